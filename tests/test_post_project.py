# SPDX-License-Identifier: Apache-2.0
"""post and the projection of its result in one Gluon kernel (sm_90): parity, equal bits, compiled code, and its use."""

from __future__ import annotations

import itertools

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
from tests.tools import offline
from tests.tools.fakecuda import without_a_gpu
from tests.tools.offline import compile_all, part

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


SHIPPED = gluon.MIN_D


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Lowers MIN_D, so that the kernel is also tested at widths where it is not used."""
    monkeypatch.setattr(gluon, "MIN_D", 1024)


def launched(tokens, second, second_of_few):
    """Returns the names of the kernels that a fused op launches for so many tokens."""
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
    assert b.names == launched(inputs["f_out"].shape[:-1].numel(), *COEFFICIENTS if single else COLLAPSE)
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
    op = "single_pass" if "single" in case else "post_pre"
    options = {"norm_form": "outside"} if case == "outside" else {}
    launches = offline.mhc(op, 64 if few else 8192, width, case, **options)
    label = f"gamma={'gamma' in case}" if "single" in case else case
    expected = set(launched(64 if few else 8192, *COEFFICIENTS if "single" in case else COLLAPSE))
    assert compile_all(launches, "cuda:90", f"{label} {width}") == expected


# --- compiled, without a GPU --------------------------------------------------------------------------------


@without_a_gpu
@pytest.mark.skipif(INTERPRETED, reason="Gluon is not interpreted")
@pytest.mark.usefixtures("no_caches")
@pytest.mark.parametrize(
    ("width", "least", "packaged"),
    [(2560, None, False), (2592, None, False), (2048, None, False), (256, None, False), (1024, 1024, True)],
)
def test_generated_code_calls_the_op_where_gluon_runs(width, least, packaged, monkeypatch):
    from test_codegen import FLOATS, OPS, compiled

    monkeypatch.setattr(gluon, "MIN_D", least or SHIPPED)
    monkeypatch.setattr(compat.lowerings, "packaging", lambda: packaged)

    def fn(x, f, hp, hr, *params):
        out = OPS.mhc_post_pre(x, f, hp, hr, True, *params, None, *FLOATS)
        return out[0] + 1, out[1]

    wide = [(shape, F32) for shape in ((64, 4), (64, 4, 4), (24, 4 * width), (3,), (24,))]
    code = compiled(fn, (64, 4, width), (64, width), *wide)
    assert code.count("torch.ops.mhc_inductor.mhc_post_pre.default(") == (width == 2560)
    assert not packaged or "torch.ops.mhc_inductor" not in code
    assert ("mhc_pre_project" in code) == (width != 2560)
