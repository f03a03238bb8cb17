# SPDX-License-Identifier: Apache-2.0
"""The CUDA code of compiled graphs, without a GPU: which kernels are launched, and that nothing else touches x."""

from __future__ import annotations

import operator
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mhc_inductor
from mhc_inductor import backend, compat, passes
from mhc_inductor.kernels.mhc import gluon
from mhc_inductor.tuning import table
from tests.tools.fakecuda import fake_cuda, generated_code, without_a_gpu
from tests.tools.generated import launches, runs

OPS = torch.ops.mhc_inductor
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


def compiled(fn, *given, backend="mhc_inductor", dynamic=None):
    """Returns the generated source, from ``call`` on.

    ``given``: shapes of bf16 tensors, pairs of a shape and a dtype, or None.
    """
    torch._dynamo.reset()
    with fake_cuda(), FakeTensorMode():
        pairs = [one if one is None or isinstance(one[0], tuple) else (one, torch.bfloat16) for one in given]
        args = [pair and torch.empty(*pair[0], dtype=pair[1], device="cuda") for pair in pairs]
        codes = generated_code(lambda: torch.compile(fn, fullgraph=True, dynamic=dynamic, backend=backend)(*args))
    assert len(codes) == 1
    return codes[0][codes[0].index("def call(") :]


def _compile(fn, extra=(), batch=2, **options):
    x, f32 = (batch, 128, N, D), torch.float32
    lines = compiled(fn, x, *(((24, N * D), f32), ((3,), f32), ((24,), f32)), (D, D), *[x for _ in extra], **options)
    return "\n".join(line for line in lines.splitlines() if not line.lstrip().startswith("#"))


def called_and_logged(caplog, compile_, op, limit):
    """Asserts that the compiled code calls an op above the sizes of its kernels, and that this is logged."""
    with caplog.at_level("WARNING", logger="mhc_inductor"):
        code = compile_()
    assert f"torch.ops.mhc_inductor.{op}.default" in code
    assert [r for r in caplog.records if limit in r.getMessage()]


def test_inference_launches_the_kernels_and_no_op():
    code = _compile(_layer)
    ours = [k for k in launches(code) if k.startswith("mhc_")]
    assert ours == [*PRE, "mhc_post"]
    assert len(launches(code)) == len(ours) + 1, "the kernels and tanh, and nothing that copies x"
    assert "torch.ops.mhc_inductor" not in code


def test_training_graphs_launch_the_kernels_and_fold_the_sum():
    before = mhc_inductor.counters().get("dx_acc folded", 0)
    code = _compile(_layer_and_gradients, extra="g")
    launched = launches(code)
    assert sorted(k for k in launched if k.startswith("mhc_")) == sorted(
        [*PRE, "mhc_post", "mhc_post_backward", *PRE_BACKWARD]
    )
    assert "torch.ops.mhc_inductor" not in code
    # One pointwise kernel is left, tanh: dx + dx2 takes no pass of its own.
    assert len([k for k in launched if not k.startswith("mhc_")]) == 1
    assert mhc_inductor.counters()["dx_acc folded"] == before + 1


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


def test_no_fp32_copy_of_x():
    code = _compile(_layer_and_gradients, extra="g")
    sized = re.findall(r"empty_strided_cuda\(\(2, 128, 4, 256\), .*?, (torch\.\w+)\)", code)
    assert sized and set(sized) == {"torch.bfloat16"}


def test_dynamic_batch_keeps_one_symbolic_launch():
    code = _compile(_layer_and_gradients, extra="g", dynamic=True)
    grids = [launch.arguments for launch in runs(code, "mhc_")]
    assert len(grids) == 10
    assert sum(bool(re.search(r"\bs\d+", g)) for g in grids) == 9, "all but the weights' depend on the batch"
    project = next(line for line in code.splitlines() if "mhc_pre_project" in line)
    assert "min(" in project, "few tokens and many are told apart at run time"


def test_configurations_of_one_kernel_in_one_graph_stay_apart():
    """Checks that two configurations of a kernel share no compiled code: Inductor keys user kernels by function."""

    def both(x, phi, alpha, bias, w, g):
        h_in = mhc_inductor.mhc_head(x, phi.narrow(0, 0, N), alpha.narrow(0, 0, 1), bias.narrow(0, 0, N))
        return h_in, _layer(x, phi, alpha, bias, w)

    code = _compile(both, extra="g")
    for kernel in ("mhc_pre_weights", "mhc_pre_project", "mhc_pre_collapse"):
        names = [launch.variable for launch in runs(code, kernel)]
        assert len(names) == len(set(names)) == 2, names


@pytest.mark.parametrize("dynamic", [False, True])
def test_fused_ops_launch_the_fused_kernels(dynamic):
    code = _compile(_fused_and_gradients, extra="g", dynamic=dynamic)
    launched = launches(code)
    ours = [k for k in launched if k.startswith("mhc_")]
    assert sorted(ours) == sorted([*PRE, *POST_PRE, *POST_PRE_BACKWARD])
    assert len(launched) == len(ours) + 1, "the kernels and tanh"
    assert "torch.ops.mhc_inductor" not in code
    shape = r"\(s\d+, s\d+, 4, 256\)" if dynamic else r"\(2, 128, 4, 256\)"
    sized = re.findall(rf"empty_strided_cuda\({shape}, .*?, (torch\.\w+)\)", code)
    assert sized and set(sized) == {"torch.bfloat16"}, "no x-sized buffer is in fp32"
    assert len(sized) == 3, "x_out, its gradient and dx"


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


@pytest.mark.parametrize("dynamic", [False, True])
def test_single_pass_launches_its_kernels(dynamic):
    code = _compile(_single_pass_and_gradients, extra="g", dynamic=dynamic)
    ours = [k for k in launches(code) if k.startswith("mhc_")]
    coefficients = ("mhc_pre_weights", "mhc_pre_project", "mhc_coefficients")
    backward = PRE_BACKWARD[1:]
    between = ("mhc_post", *coefficients, "mhc_post_backward", *backward)
    assert sorted(ours) == sorted([*coefficients, "mhc_collapse", *between, "mhc_collapse_backward", *backward])
    assert "torch.ops.mhc_inductor" not in code


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


def test_ordinary_backend_launches_the_kernels_too():
    code = _compile(_layer, backend="inductor")
    assert [k for k in launches(code) if k.startswith("mhc_")] == [*PRE, "mhc_post"]


def test_unsupported_dtype_calls_the_op_and_logs_it(caplog):
    from mhc_inductor import log

    log._said.clear()
    backend.prepare()

    def sinkhorn(c):
        return OPS.mhc_sinkhorn(c, 3, 1e-6, "softmax") + 1

    with fake_cuda(), FakeTensorMode(), caplog.at_level("WARNING", logger="mhc_inductor"):
        c = torch.empty(7, 4, 4, dtype=torch.float64, device="cuda")
        codes = generated_code(lambda: torch.compile(sinkhorn, backend="mhc_inductor")(c))
    assert "torch.ops.mhc_inductor.mhc_sinkhorn.default(" in codes[0]
    assert "float64 has no kernel" in caplog.text
