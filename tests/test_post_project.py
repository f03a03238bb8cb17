# SPDX-License-Identifier: Apache-2.0
"""post and the projection of its result in one Gluon kernel (sm_90): parity, equal bits, compiled code, and its use."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from conftest import GPU, INTERPRETED

from mhc_inductor import compat
from mhc_inductor.kernels.mhc import config, fused_plan, gluon, single_pass_plan
from mhc_inductor.ops.dims import results
from mhc_inductor.ops.registry import argument_names
from tests.oracles import mhc as h
from tests.oracles import single_pass as one
from tests.oracles.poisoned import Poisoned
from tests.tools.fakecuda import without_a_gpu
from tests.tools.offline import TARGETS, Recorder, compile_all, part

BF16, F32 = torch.bfloat16, torch.float32
HOPPER = GPU and torch.cuda.get_device_capability() == (9, 0) and torch.version.hip is None
SIZED = {"sinkhorn_iters": 3}
COEFFICIENTS = "mhc_coefficients", "mhc_blocks_coefficients"
COLLAPSE = "mhc_slices_collapse", "mhc_blocks_collapse"
"""What follows the projection, of many tokens and of few."""
needs_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="wgmma")]


def on_hopper(test):
    for mark in needs_hopper:
        test = mark(test)
    return test


@pytest.fixture(autouse=True)
def narrow(request, monkeypatch):
    """Lowers MIN_D, so that the kernel is also tested at widths where it is not used."""
    if "as_shipped" not in request.fixturenames:
        monkeypatch.setattr(gluon, "MIN_D", 1024)


@pytest.fixture
def as_shipped():
    """Keeps MIN_D: the kernel is used at its shipped widths only."""


def launched(x, second, second_of_few):
    """Returns the names of the kernels that a fused op launches for the streams x."""
    tokens = x.numel() // (4 * x.shape[-1])
    few = ["mhc_post_project_few", second_of_few]
    return [] if tokens == 0 else few if tokens <= config.FEW_TOKENS else ["mhc_post_project", second]


def run(inputs, transpose_res=True, options=None):
    """Runs the plan of a fused op, or of mhc_single_pass where h_pre is among the inputs; returns its results by name."""
    head, single = inputs["phi"].shape[0] == 4, "h_pre" in inputs
    name = "mhc_single_pass" if single else "mhc_post_head" if head else "mhc_post_pre"
    plan = getattr(single_pass_plan if single else fused_plan, f"plan_{name}")
    known = {**h.PRE_OPTIONS, **({} if head else SIZED), "transpose_res": transpose_res, **inputs, **(options or {})}
    b = Poisoned(torch.device("cuda", torch.cuda.current_device()))
    out = plan(b, *(known[a] for a in argument_names(name) if a in known))
    assert b.names == launched(inputs["x"], *COEFFICIENTS if single else COLLAPSE)
    return dict(zip(results(name), out, strict=True))


run_single_pass = run


def check(inputs, transpose_res=True, options=None):
    got = run(inputs, transpose_res, options)
    sized = {**({} if inputs["phi"].shape[0] == 4 else SIZED), **(options or {})}
    want = h.oracle_fused(inputs, transpose_res, got["x_out"], None, sized)
    h.compare({k: v for k, v in got.items() if v.numel()}, want, 2e-6, 1.05)
    apart = torch.ops.mhc_inductor.mhc_post(*(inputs[k] for k in ("x", "f_out", "h_post", "h_res")), transpose_res)
    assert torch.equal(got["x_out"], apart)


def check_training_step(call, inputs, **how):
    """Asserts that a compiled training step of an op gives what eager gives."""
    torch._dynamo.reset()
    args = [t.requires_grad_() for t in inputs.values()]

    def step(*args):
        out = call(*args)
        return sum(t.float().square().sum() for t in out), *out

    results = []
    for fn in (step, torch.compile(step, backend="mhc_inductor", fullgraph=True, **how)):
        loss, *out = fn(*args)
        results.append([*out, *torch.autograd.grad(loss, args)])
    for a, b in zip(*results, strict=True):
        assert h.relative(b, a) < 2e-3, "the gradients of the loss are rounded where Inductor fuses it"


of_both = pytest.mark.parametrize("make", [h.make_fused_inputs, one.make_inputs], ids=["fused", "single_pass"])


# At 1088 the last slice has two blocks; 2560, 4096, 7168 are the widths of the benchmark.
@on_hopper
@of_both
@pytest.mark.parametrize("width", [1024, 1088, 2560, 4096, 7168])
@pytest.mark.parametrize("tokens", [1, 77, 300])
def test_parity(width, tokens, make):
    check(make((tokens,), 4, width, BF16, device="cuda"))


@on_hopper
@pytest.mark.parametrize(
    "made", [{"gamma": False}, {"residual": False}, {"full": False}, {"head": True}, {"param_dtype": BF16}], ids=str
)
@pytest.mark.parametrize("transpose_res", [False, True])
def test_variants(made, transpose_res):
    check(h.make_fused_inputs((3, 50), 4, 1024, BF16, device="cuda", **made), transpose_res)


@on_hopper
@pytest.mark.parametrize("made", [{"gamma": False}, {"residual": False}, {"full": False}], ids=str)
@pytest.mark.parametrize("transpose_res", [False, True])
def test_single_pass_variants(made, transpose_res):
    inputs = one.make_inputs((3, 50), 4, 1024, BF16, device="cuda", **made)
    inputs["h_pre"] = inputs["h_pre"].bfloat16()
    check(inputs, transpose_res, {"sinkhorn_iters": 0} if "full" in made else None)


@on_hopper
@of_both
@pytest.mark.parametrize("tokens", [1, 77, 300])
def test_eps_outside_the_root(tokens, make):
    for head in (False, True) if make is h.make_fused_inputs else (False,):
        inputs = make((tokens,), 4, 1088, BF16, device="cuda", head=head)
        check(inputs, options={"norm_eps": 0.1, "norm_form": "outside"})


@on_hopper
@pytest.mark.parametrize("gamma", [False, True])
def test_bf16_phi(gamma):
    inputs = h.make_fused_inputs((70,), 4, 1024, BF16, device="cuda", gamma=gamma)
    inputs["phi"] = inputs["phi"].bfloat16()
    check(inputs)


@on_hopper
@of_both
@pytest.mark.parametrize("width", [1024, 1088])
def test_no_token_and_many(make, width):
    """Tests more tiles than programs, so that each program takes several; equal bits in two runs and in any batch."""
    assert run(make((0, 3), 4, width, BF16, device="cuda"))["h_in"].shape == (0, 3, width)
    inputs = make((5000,), 4, width, BF16, device="cuda")
    check(inputs)
    whole, again = run(inputs), run(inputs)
    alone = run({k: t if k in one.PARAMS else t[4321:4322].clone() for k, t in inputs.items()})
    for k, t in whole.items():
        assert torch.equal(t, again[k]), k
        assert torch.equal(t[4321:4322], alone[k]), k


@on_hopper
def test_inputs_that_start_anywhere():
    inputs = h.make_fused_inputs((70,), 4, 1024, BF16, device="cuda")
    want = run(inputs)
    for k in ("x", "f_out"):
        t = inputs[k]
        inputs[k] = torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)
        assert inputs[k].data_ptr() % 16
    got = run(inputs)
    assert all(torch.equal(got[k], want[k]) for k in want)


@on_hopper
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    options = [*{**h.PRE_OPTIONS, **SIZED}.values()]  # Dynamo does not iterate over a dict's values
    call = lambda *a: torch.ops.mhc_inductor.mhc_post_pre(*a[:4], True, *a[4:], *options)[:4]  # noqa: E731
    check_training_step(call, h.make_fused_inputs((200,), 4, 1024, BF16, device="cuda"), dynamic=dynamic)


KINDS = ["pre", "gamma", "head", "plain", "bf16", "outside", "single_pass", "single_pass gamma"]


@pytest.mark.skipif(INTERPRETED, reason="compiling and interpreting exclude each other")
@pytest.mark.parametrize(
    ("few", "case", "width"),
    part(
        itertools.product([False, True], KINDS, [1088, 4096, 7168]),
        lambda few, case, width: width == 4096 or case == "pre",
    ),
)
def test_compiles_without_unnamed_spills(width, case, few):
    b = Recorder(TARGETS["cuda:90"][1])
    b.gluon = True

    def empty(*shape, dtype=F32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    T, m = 64 if few else 8192, {"head": 4, "plain": 8}.get(case, 24)
    post = (empty(T, 4, width, dtype=BF16), empty(T, width, dtype=BF16), empty(T, 4), empty(T, 4, 4))
    phi = empty(m, 4 * width, dtype=BF16 if case == "bf16" else F32)
    params = (phi, empty(1 if case == "head" else 3), empty(m), empty(4, width) if "gamma" in case else None)
    options = {
        **h.PRE_OPTIONS,
        "sinkhorn_iters": 20,
        **({"norm_form": "outside"} if case == "outside" else {}),
    }.values()
    if case == "head":
        fused_plan.plan_mhc_post_head(b, *post, True, *params, 1e-6, 1e-6)
    elif "single" in case:
        single_pass_plan.plan_mhc_single_pass(b, *post, empty(T, 4), True, *params, *options)
    else:
        fused_plan.plan_mhc_post_pre(b, *post, True, *params, *options)
    label = f"gamma={'gamma' in case}" if "single" in case else case
    expected = set(launched(post[0], *COEFFICIENTS if "single" in case else COLLAPSE))
    assert compile_all(b.launches, "cuda:90", f"{label} {width}") == expected


# --- compiled, without a GPU --------------------------------------------------------------------------------


def call_code(fn, narrow, wide):
    """Returns what Inductor calls for ``fn`` of bf16 and fp32 tensors of these shapes."""
    from test_codegen import generated_code
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.tools.fakecuda import fake_cuda

    with fake_cuda(), FakeTensorMode():
        given = [
            torch.empty(*s, dtype=dtype, device="cuda") for dtype, some in ((BF16, narrow), (F32, wide)) for s in some
        ]
        (code,) = generated_code(lambda: torch.compile(fn, fullgraph=True, backend="mhc_inductor")(*given))
    return code[code.index("def call(") :]


def _code(width):
    from test_codegen import FLOATS, OPS

    def fn(x, f, hp, hr, *params):
        out = OPS.mhc_post_pre(x, f, hp, hr, True, *params, None, *FLOATS)
        return out[0] + 1, out[1]

    return call_code(fn, [(64, 4, width), (64, width)], [(64, 4), (64, 4, 4), (24, 4 * width), (3,), (24,)])


@without_a_gpu
@pytest.mark.skipif(INTERPRETED, reason="Gluon is not interpreted")
@pytest.mark.usefixtures("no_caches", "as_shipped")
@pytest.mark.parametrize(("width", "calls"), [(2560, 1), (2592, 0), (2048, 0), (256, 0)])
def test_generated_code_calls_the_op_where_gluon_runs(width, calls):
    code = _code(width)
    assert len(re.findall(r"torch\.ops\.mhc_inductor\.mhc_post_pre\.default\(", code)) == calls
    assert ("mhc_pre_project" in code) == (calls == 0)


@without_a_gpu
@pytest.mark.skipif(INTERPRETED, reason="Gluon is not interpreted")
@pytest.mark.usefixtures("no_caches")
def test_a_package_launches_plain_triton(monkeypatch):
    monkeypatch.setattr(compat.lowerings, "packaging", lambda: True)
    code = _code(1024)
    assert "torch.ops.mhc_inductor" not in code and "mhc_pre_project" in code
