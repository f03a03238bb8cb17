# SPDX-License-Identifier: Apache-2.0
"""The CUDA code of compiled graphs of mHC and E79, without a GPU: the kernels launched, and that nothing else touches x."""

from __future__ import annotations

import operator
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mhc_inductor
from mhc_inductor import compat, log, passes
from mhc_inductor.kernels.e79 import plan as e79_plan
from mhc_inductor.kernels.mhc import gluon
from mhc_inductor.tuning import table
from tests.tools.fakecuda import fake_cuda, generated_code, without_a_gpu
from tests.tools.generated import launches, runs

OPS, F32 = torch.ops.mhc_inductor, torch.float32
N, D = 4, 256
PRE = ("mhc_pre_weights", "mhc_pre_project", "mhc_pre_collapse")
PRE_BACKWARD = tuple(f"mhc_pre_backward_{k}" for k in ("dots", "coefficients", "dx", "dphi", "finish"))
POST_PRE = ("mhc_post", *PRE)
POST_PRE_BACKWARD = (*PRE_BACKWARD[:3], "mhc_post_backward", *PRE_BACKWARD[3:])
FLOATS = (1e-6, 1e-6, 2.0, 0.0, 20, 1e-6, "softmax")

pytestmark = [pytest.mark.usefixtures("no_caches"), without_a_gpu]


def _layer(x, phi, alpha, bias, w):
    h_in, h_post, h_res = mhc_inductor.mhc_pre(x, phi, alpha, bias, sinkhorn_iters=20)
    return mhc_inductor.mhc_post(x, torch.tanh(h_in @ w), h_post, h_res, transpose_res=False)


def _layer_and_gradients(x, phi, alpha, bias, w, g):
    """Computes in one graph what a training step's graphs do: autograd itself needs a real device."""
    h_in, h_post, h_res, h_pre, h_mix, inv = OPS.mhc_pre(x, phi, alpha, bias, None, *FLOATS)
    f_out = torch.tanh(h_in @ w)
    out = OPS.mhc_post(x, f_out, h_post, h_res, False)
    dx, df, dp, dr = OPS.mhc_post_backward(g, x, f_out, h_post, h_res, False)
    dx2, *rest = OPS.mhc_pre_backward(df, dp, dr, x, phi, alpha, bias, None, h_pre, h_post, h_mix, inv, None, *FLOATS)
    return out, dx + dx2, rest[:3]


def _fused_and_gradients(x, phi, alpha, bias, w, g):
    """Fuses the post of one sublayer with the pre of the next, and computes both ops' gradients."""
    h_in, h_post, h_res, *_ = OPS.mhc_pre(x, phi, alpha, bias, None, *FLOATS)
    post, params = (x, torch.tanh(h_in @ w), h_post, h_res, True), (phi, alpha, bias, None)
    x_out, h_in, next_post, next_res, h_pre, h_mix, inv = OPS.mhc_post_pre(*post, *params, *FLOATS)
    saved = (h_pre, next_post, h_mix, inv)
    return OPS.mhc_post_pre_backward(g, h_in, next_post, next_res, *post, x_out, *params, *saved, *FLOATS)[:7], x_out


def _single_pass_and_gradients(x, phi, alpha, bias, w, g):
    """Computes a site of single-pass mHC, and everything between it and the next, with all gradients."""
    h_pre, h_post, h_res, *saved = OPS.mhc_coefficients(x, phi, alpha, bias, None, *FLOATS)
    site, params = (x, torch.tanh(OPS.mhc_collapse(x, h_pre) @ w), h_post, h_res, h_pre, True), (phi, alpha, bias, None)
    x_out, h_in, *coefficients, h_mix, inv = OPS.mhc_single_pass(*site, *params, *FLOATS)
    after = (*coefficients[:2], h_mix, inv)
    dx, df, dh_post, dh_res, dh_pre, *dparams = OPS.mhc_single_pass_backward(
        g, h_in, *coefficients, *site, x_out, *params, *after, *FLOATS
    )
    dx2, dh_pre2 = OPS.mhc_collapse_backward(df, x, h_pre)
    dx3, *dparams2 = OPS.mhc_coefficients_backward(
        dh_pre + dh_pre2, dh_post, dh_res, x, *params, h_pre, h_post, *saved, dx2, *FLOATS
    )
    return x_out, dx + dx3, dparams[:3], dparams2[:3]


def _scan(x, w, bias, S0):
    kvqm = x @ w
    out, S, M, checkpoints, gates = OPS.e79_scan(kvqm, bias, None, S0, None, 8)
    return out, S, M, OPS.e79_scan_backward(out, S, None, kvqm, bias, None, S0, None, checkpoints, gates, 8)[:2]


def _one_step(x, w, bias, S0):
    return OPS.e79_scan(x @ w, bias, bias, S0, S0, 0)[:3]


def compiled(fn, *given, backend="mhc_inductor", **options):
    """Returns the generated source, from ``call`` on.

    ``given``: shapes of bf16 tensors, pairs of a shape and a dtype, or None.
    """
    torch._dynamo.reset()
    with fake_cuda(), FakeTensorMode():
        pairs = [one if one is None or isinstance(one[0], tuple) else (one, torch.bfloat16) for one in given]
        args = [pair and torch.empty(*pair[0], dtype=pair[1], device="cuda") for pair in pairs]
        codes = generated_code(lambda: torch.compile(fn, fullgraph=True, backend=backend, **options)(*args))
    assert len(codes) == 1
    return codes[0][codes[0].index("def call(") :]


def _compile(fn, extra=(), batch=2, **options):
    x = (batch, 128, N, D)
    lines = compiled(fn, x, *(((24, N * D), F32), ((3,), F32), ((24,), F32)), (D, D), *[x for _ in extra], **options)
    return "\n".join(line for line in lines.splitlines() if not line.lstrip().startswith("#"))


def scans(fn, steps=20, batch=3, bias="fixed", dynamic=None):
    sizes = {"none": None, "fixed": ((32,), F32), "input": ((steps, batch, 32), F32)}[bias]
    given = ((steps, batch, 48), F32), ((48, 4 * 32), F32), sizes, ((batch, 32, 32), F32)
    return compiled(fn, *given, dynamic=dynamic)


def called_and_logged(caplog, compile_, op, limit):
    """Asserts that the compiled code calls an op above the sizes of its kernels, and that this is logged."""
    with caplog.at_level("WARNING", logger="mhc_inductor"):
        code = compile_()
    assert f"torch.ops.mhc_inductor.{op}.default" in code
    assert [r for r in caplog.records if limit in r.getMessage()]


SITE = [*PRE, "mhc_post"]
TRAINED = [*SITE, "mhc_post_backward", *PRE_BACKWARD]
FUSED = [*PRE, *POST_PRE, *POST_PRE_BACKWARD]
COEFFICIENTS = ["mhc_pre_weights", "mhc_pre_project", "mhc_coefficients"]
SINGLE_PASS = [*COEFFICIENTS, "mhc_post", "mhc_post_backward", *PRE_BACKWARD[1:]]
SINGLE_PASS += [*COEFFICIENTS, "mhc_collapse", "mhc_collapse_backward", *PRE_BACKWARD[1:]]
SCAN = ["e79_forward", "e79_backward", "e79_finish"]
# Plain Triton runs in an AOTInductor package or on a device without Gluon.
PLAIN, PACKAGE = (e79_plan, "runs_gluon", False), (compat.lowerings, "packaging", True)
LAUNCHED = {
    "a site": (_layer, _compile, {}, SITE),
    "a site, the ordinary backend": (_layer, _compile, {"backend": "inductor"}, SITE),
    **{
        f"{name}, dynamic={dynamic}": (fn, _compile, {"extra": "g", "dynamic": dynamic}, kernels)
        for name, fn, kernels in (
            ("training", _layer_and_gradients, TRAINED),
            ("fused", _fused_and_gradients, FUSED),
            ("single pass", _single_pass_and_gradients, SINGLE_PASS),
        )
        for dynamic in (False, True)
    },
    **{
        f"scan of {steps} steps, bias {bias}": (
            _scan, scans, {"steps": steps, "batch": batch, "bias": bias, "patch": PLAIN},
            SCAN + ["e79_bias_sum"] * (bias == "fixed"))
        for steps, batch in ((20, 3), (1, 1), (2, 1))
        for bias in ("none", "fixed", "input")
    },
    "scan of unknown sizes": (_scan, scans, {"bias": "input", "dynamic": True, "patch": PLAIN}, SCAN),
    "scan in a package": (_scan, scans, {"patch": PACKAGE}, [*SCAN, "e79_bias_sum"]),
    "scan, Gluon": (_scan, scans, {}, []),
    "scan of one step": (_one_step, scans, {"steps": 1, "batch": 4}, SCAN[:1]),
}  # fmt: skip
"""Functions, what compiles them and how, and kernels; without any, the ops are called."""


def _in_each_commit():
    """Returns the rows, of which one of each kind that takes less than two seconds runs in each commit."""
    slow = {"fused, dynamic=True", "single pass, dynamic=True"}
    slow |= {
        name for name in LAUNCHED if name.endswith(("none", "input")) or name.startswith(("scan of 1", "scan of 2 "))
    }
    return [pytest.param(name, marks=() if name in slow else pytest.mark.every_case) for name in LAUNCHED]


@pytest.mark.parametrize("name", _in_each_commit())
def test_the_kernels_that_are_launched_and_the_ops_that_are_called(name, monkeypatch):
    fn, compile_, how, kernels = LAUNCHED[name]
    if patch := how.get("patch"):
        monkeypatch.setattr(*patch[:2], lambda *_: patch[2])
    before = mhc_inductor.counters().get("dx_acc folded", 0)
    code = compile_(fn, **{k: v for k, v in how.items() if k != "patch"})
    launched, order = runs(code, ("mhc_", "e79_")), list if fn is _layer else sorted
    assert order(launch.kernel for launch in launched) == order(kernels)
    ops = [] if kernels else ["e79_scan", "e79_scan_backward"]
    assert re.findall(r"torch\.ops\.mhc_inductor\.(\w+)\.default\(", code) == ops
    assert ("torch.ops.mhc_inductor" in code) == bool(ops)
    for launch in launched:
        symbolic = bool(how.get("dynamic")) and launch.kernel != "mhc_pre_weights"
        assert bool(re.search(r"\bs\d+", launch.arguments)) == symbolic, "all but the weights' depend on the batch"
        if symbolic and launch.kernel == "mhc_pre_project":
            assert "min(" in launch.arguments, "few tokens and many are told apart at run time"
    shape = r"\((?:2, 128|s\d+, s\d+), 4, 256\)"
    sized = re.findall(rf"empty_strided_cuda\({shape}, .*?, (torch\.\w+)\)", code)
    assert {*sized} == ({"torch.bfloat16"} if compile_ is _compile else set()), "no buffer of x's size is in fp32"
    trained = fn in (_layer_and_gradients, _fused_and_gradients)
    assert not trained or len(sized) == 3, "x_out, its gradient and dx"
    if trained or fn is _layer:
        assert len(launches(code)) == len(launched) + 1, "tanh, and nothing that copies x or adds dx to dx2"
    assert mhc_inductor.counters().get("dx_acc folded", 0) - before == (fn is _layer_and_gradients)


@pytest.mark.parametrize("later", [False, True])
def test_the_kernel_adds_no_gradient_that_is_computed_after_it(later):
    graph, op, aten = torch.fx.Graph(), OPS.mhc_head_backward.default, torch.ops.aten
    g = graph.placeholder("g")
    earlier = graph.call_function(aten.mul.Tensor, (g, 2))
    call = graph.call_function(op, tuple(None if a.name == "dx_acc" else g for a in op._schema.arguments))
    dx = graph.call_function(operator.getitem, (call, 0))
    other = graph.call_function(aten.mul.Tensor, (g, 3)) if later else earlier
    graph.output(graph.call_function(aten.add.Tensor, (dx, other)))
    with fake_cuda(), FakeTensorMode():
        for node in (dx, other):
            node.meta["val"] = torch.empty(2, N, D, device="cuda")
    assert passes.fold_dx_acc(graph) == (not later)
    graph.lint()


def test_a_tuned_table_reaches_the_generated_launch():
    def programs():
        return int(re.search(r", (\d+), 1, 1, stream", runs(_compile(_layer), "mhc_post")[0].arguments)[1])

    assert programs() == 2 * 128
    with table.use({f"mhc.post({D}, {N})": {"BD": 128, "num_warps": 8, "N": 1}}):
        assert programs() == 2 * 128 * 2


def test_eps_outside_the_root_is_a_constant_of_the_same_kernels():
    """Checks that the backward's kernel takes norm_eps in that form only."""

    def fn(x, phi, alpha, bias, w, g):
        floats = (*FLOATS, form)
        h_in, h_post, h_res, h_pre, h_mix, inv = OPS.mhc_pre(x, phi, alpha, bias, None, 0.125, *floats[1:])
        ups = (h_in, h_post, h_res)
        saved = (h_pre, h_post, h_mix, inv, g)
        return OPS.mhc_pre_backward(*ups, x, phi, alpha, bias, None, *saved, 0.125, *floats[1:])[:4]

    launched = {}
    for form in ("inside", "outside"):
        code = _compile(fn, extra="g")
        assert sorted(launches(code)) == sorted([*PRE, *PRE_BACKWARD]) and "torch.ops.mhc_inductor" not in code
        launched[form] = [
            line for line in code.splitlines() if "mhc_pre_backward_coefficients" in line and ".run(" in line
        ]
    assert ["0.125" in line for lines in launched.values() for line in lines] == [False, True]


def test_configurations_of_one_kernel_in_one_graph_stay_apart():
    """Checks that two configurations of a kernel share no compiled code: Inductor keys user kernels by function."""

    def both(x, phi, alpha, bias, w, g):
        h_in = mhc_inductor.mhc_head(x, phi.narrow(0, 0, N), alpha.narrow(0, 0, 1), bias.narrow(0, 0, N))
        return h_in, _layer(x, phi, alpha, bias, w)

    code = _compile(both, extra="g")
    for kernel in ("mhc_pre_weights", "mhc_pre_project", "mhc_pre_collapse"):
        names = [launch.variable for launch in runs(code, kernel)]
        assert len(names) == len(set(names)) == 2, names


def _post_pre(x, phi, alpha, bias, w):
    h_post, h_res = x.sum(-1, dtype=torch.float32), (x @ x.mT).float()
    x_out = mhc_inductor.mhc_post(x, x.sum(-2) @ w, h_post, h_res, transpose_res=True)
    return mhc_inductor.mhc_pre(x_out, phi, alpha, bias, sinkhorn_iters=20)[0], x_out


@pytest.mark.parametrize(("batch", "grad", "fused"), [(1, False, 0), (2, False, 1), (1, True, 1)])
def test_few_tokens_in_inference_stay_two_ops(batch, grad, fused):
    """Checks that inference fuses from 256 tokens on, since separate kernels are faster below; training always fuses.

    A sequence has 128 tokens.
    """
    before = mhc_inductor.counters().get("fused mhc_post_pre", 0)
    with torch.set_grad_enabled(grad):
        launched = launches(_compile(_post_pre, batch=batch))
    assert [k for k in launched if k.startswith("mhc_")] == list(POST_PRE)
    assert mhc_inductor.counters().get("fused mhc_post_pre", 0) - before == fused


@pytest.mark.parametrize(("dynamic", "launched"), [(False, PRE[1:]), (True, PRE)])
def test_few_tokens_split_phi_in_the_projection_if_their_number_is_static(dynamic, launched):
    """Checks also that a symbolic number of tokens gets no guard: it runs the kernels for any number."""

    def head(x, *params):
        return mhc_inductor.mhc_pre(x, *params, sinkhorn_iters=20)[0]

    with fake_cuda(), FakeTensorMode():
        x = torch.empty(64, N, D, dtype=torch.bfloat16, device="cuda")
        params = [torch.empty(*shape, device="cuda") for shape in ((24, N * D), (3,), (24,))]
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        compiled = torch.compile(head, fullgraph=True, backend="mhc_inductor")
        (code,) = generated_code(lambda: compiled(x, *params))
    code = code[code.index("def call(") :]
    assert launches(code) == list(launched)


@pytest.mark.parametrize("packaged", [False, True])
def test_few_tokens_are_fused_where_the_fused_op_has_kernels_for_them(monkeypatch, packaged):
    pytest.importorskip("mhc_inductor.kernels.mhc.gluon_post_project")
    monkeypatch.setattr(gluon, "MIN_D", 64)
    monkeypatch.setattr(compat, "in_package", lambda: packaged)
    before = mhc_inductor.counters().get("fused mhc_post_pre", 0)
    with torch.no_grad():
        code = _compile(_post_pre, batch=1)
    assert mhc_inductor.counters().get("fused mhc_post_pre", 0) - before == (not packaged)
    assert ("torch.ops.mhc_inductor.mhc_post_pre.default(" in code) == (not packaged)


@pytest.mark.parametrize(
    ("fn", "given", "op", "reason"),
    [(lambda c: OPS.mhc_sinkhorn(c, 3, 1e-6, "softmax") + 1, ((7, 4, 4), torch.float64), "mhc_sinkhorn", "float64 has no"),
     (lambda x: OPS.e79_scan(x, *[None] * 4, 0)[0], ((4, 2, 4 * 136), F32), "e79_scan", "n = 136 is above 128")],
)  # fmt: skip
def test_without_a_kernel_the_reference_is_called_and_logged(caplog, monkeypatch, fn, given, op, reason):
    monkeypatch.setattr(log, "_said", set())
    called_and_logged(caplog, lambda: compiled(fn, given), op, reason)
