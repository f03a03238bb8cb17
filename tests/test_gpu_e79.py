# SPDX-License-Identifier: Apache-2.0
"""E79 on a GPU: which kernels run, compiled training, CUDA graphs, dynamic sizes, memory, long and large inputs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
from test_gpu import captured, kernels_of

import mhc_inductor
from mhc_inductor.kernels.e79 import plan
from tests.formulas import reference_models_e79
from tests.oracles import e79 as h

pytestmark = pytest.mark.gpu
F32, BF16 = torch.float32, torch.bfloat16


def named_e79(names):
    return [n for n in names if n.startswith("e79_")]


def inputs_on_gpu(T, B, n, dtype=F32, **made):
    return h.make_inputs(T, B, n, dtype, device="cuda", **made)


def train(scan, inputs, ups):
    leaves = {k: None if t is None else t.detach().clone().requires_grad_() for k, t in inputs.items()}
    out = dict(zip(h.OUTPUTS, scan(**leaves), strict=True))
    wanted = {k: t for k, t in leaves.items() if t is not None}
    grads = torch.autograd.grad([out[k] for k in ups], list(wanted.values()), list(ups.values()))
    named = {k: t.detach() for k, t in out.items()}
    return named | {f"d{k}": g for k, g in zip(wanted, grads, strict=True)}


@pytest.mark.parametrize("bias", h.BIASES)
@pytest.mark.parametrize(("T", "B"), [(17, 4), (64, 1), (512, 4)])
def test_gradients_against_fp64(T, B, bias):
    inputs = inputs_on_gpu(T, B, 64, bias=bias)
    ups = h.upstream(inputs)
    h.check(train(mhc_inductor.e79_scan, inputs, ups), inputs, ups)


def test_the_op_runs_gluon_and_nothing_else():
    inputs = inputs_on_gpu(20, 3, 64)
    ups = h.upstream(inputs)
    args = [inputs[k] for k in h.NAMES]
    saved = []
    forward = kernels_of(lambda: saved.append(torch.ops.mhc_inductor.e79_scan(*args, 8)))
    assert named_e79(forward) == forward == ["e79_forward_gluon"]
    backward = kernels_of(lambda: torch.ops.mhc_inductor.e79_scan_backward(*ups.values(), *args, *saved[0][3:], 8))
    assert sorted(backward) == ["e79_backward_gluon", "e79_bias_sum", "e79_bias_sum", "e79_finish"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_compiled_training(monkeypatch, plain, dynamic):
    """Checks that compiled code calls the op, or launches plain Triton where Gluon does not run."""
    torch._dynamo.reset()
    # Cache keys cover the device, but not this test's patch of runs_gluon.
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    if plain:
        monkeypatch.setattr(plan, "runs_gluon", lambda *_: False)
    inputs = inputs_on_gpu(40, 3, 32, bias="input")
    ups = h.upstream(inputs)
    scan = torch.compile(mhc_inductor.e79_scan, backend="mhc_inductor", fullgraph=True, dynamic=dynamic)
    h.check(train(scan, inputs, ups), inputs, ups)
    names = named_e79(kernels_of(lambda: train(scan, inputs, ups)))
    ending = "" if plain else "_gluon"
    assert sorted(names) == [f"e79_backward{ending}", "e79_finish", f"e79_forward{ending}"]


def test_one_compile_serves_every_size():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("mhc_inductor")
    scan = torch.compile(mhc_inductor.e79_scan, backend=counter, dynamic=True, fullgraph=True)
    for T, B in ((40, 3), (64, 2), (300, 5), (5, 3)):
        inputs = inputs_on_gpu(T, B, 32)
        ups = h.upstream(inputs)
        h.check(train(scan, inputs, ups), inputs, ups)
    assert counter.frame_count == 1


def test_decoding_under_cuda_graphs():
    torch._dynamo.reset()

    def step(kvqm, S, M):
        return mhc_inductor.e79_scan(kvqm, S0=S, M0=M)

    compiled = torch.compile(step, backend="mhc_inductor", mode="reduce-overhead", fullgraph=True)
    inputs = inputs_on_gpu(8, 4, 64, bias="none")
    with torch.no_grad():
        want = mhc_inductor.e79_scan(**inputs)
        S, M, outs = inputs["S0"], inputs["M0"], []
        for t in range(8):
            torch.compiler.cudagraph_mark_step_begin()
            out, S, M = compiled(inputs["kvqm"][t : t + 1], S, M)
            out, S, M = out.clone(), S.clone(), M.clone()
            outs.append(out)
    assert h.relative(torch.cat(outs), want[0]) < 1e-5
    assert h.relative(S, want[1]) < 1e-5 and h.relative(M, want[2]) < 1e-5


def test_training_step_captured_in_a_cuda_graph():
    inputs = inputs_on_gpu(20, 3, 64)
    ups = h.upstream(inputs)
    want = train(mhc_inductor.e79_scan, inputs, ups)  # the first call compiles the kernels
    graph, got = captured(lambda: train(mhc_inductor.e79_scan, inputs, ups))
    for t in got.values():
        t.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(got[k], want[k]) for k in want)


@pytest.mark.parametrize("n", [16, 48, 64, 128])
def test_more_sequences_than_multiprocessors(n):
    inputs = inputs_on_gpu(9, 300, n, bias="input")
    ups = h.upstream(inputs)
    h.check(train(mhc_inductor.e79_scan, inputs, ups), inputs, ups)


def test_peak_memory_of_training():
    T, B, n = 512, 32, 64
    inputs = inputs_on_gpu(T, B, n, bias="none", state=False)
    kvqm = inputs["kvqm"].requires_grad_()
    g = torch.randn(T, B, n, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, S, M = mhc_inductor.e79_scan(kvqm)
    out.backward(g)
    used = torch.cuda.max_memory_allocated() - before
    own = sum(t.numel() * t.element_size() for t in (out, S, M, kvqm.grad))
    assert used - own <= 200e6, used - own


@pytest.mark.parametrize("n", [32, 128])
def test_65536_steps_with_gradients(n):
    inputs = inputs_on_gpu(65536, 1, n, bias="none", state=False)
    kvqm = inputs["kvqm"].requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    out, S, _ = mhc_inductor.e79_scan(kvqm)
    (grad,) = torch.autograd.grad(out[-1].sum() + S.sum(), kvqm)
    # Old states decay: the last steps alone, from the state before them, have the same gradients.
    tail = 64
    with torch.no_grad():
        _, S0, M0 = mhc_inductor.e79_scan(kvqm[:-tail])
    last = kvqm[-tail:].detach().requires_grad_()
    out1, S1, _ = mhc_inductor.e79_scan(last, S0=S0, M0=M0)
    (want,) = torch.autograd.grad(out1[-1].sum() + S1.sum(), last)
    assert torch.equal(out1, out[-tail:]) and torch.equal(S1, S)
    assert h.relative(grad[-tail:], want) < 1e-5


def test_more_than_2_to_the_31_elements():
    T, B, n = 40000, 112, 128
    kvqm = torch.empty(T, B, 4 * n, device="cuda", dtype=BF16)
    assert kvqm.numel() > 2**31
    for piece in kvqm.split(4000):
        piece.normal_()
    with torch.no_grad():
        out, S, M = mhc_inductor.e79_scan(kvqm)
        want = mhc_inductor.e79_scan(kvqm[:, -1:].contiguous())
    assert torch.equal(out[:, -1:], want[0]) and torch.equal(S[-1:], want[1]) and torch.equal(M[-1:], want[2])


def test_above_128_the_reference_runs_and_logs_it(caplog):
    inputs = inputs_on_gpu(3, 2, 132)
    with caplog.at_level("WARNING", logger="mhc_inductor"):
        got = h.run_scan(inputs)
    h.check(got, inputs)
    assert [r for r in caplog.records if "n = 132 is above 128" in r.getMessage()]


@pytest.mark.parametrize("bias", h.BIASES)
def test_a_plain_loop_runs_on_the_kernels(bias):
    torch._dynamo.reset()
    torch.manual_seed(0)
    cell = reference_models_e79.CoupledCell(bias).cuda()
    x = torch.randn(12, 3, reference_models_e79.DIM, device="cuda")

    def step(cell, x):
        x = x.detach().requires_grad_()
        out, S, M = cell(x)
        return [out.detach(), *torch.autograd.grad(out.square().sum() + S.sum() + M.sum(), [x, *cell.parameters()])]

    want, plain = step(copy.deepcopy(cell).double(), x.double()), step(cell, x)
    compiled = torch.compile(cell, backend="mhc_inductor", fullgraph=True)
    before = mhc_inductor.counters().get("routed e79_scan", 0)
    got = step(compiled, x)
    assert mhc_inductor.counters()["routed e79_scan"] == before + 1
    for a, b, exact in zip(got, plain, want, strict=True):
        assert h.relative(a, exact) <= max(h.FP32_GRADIENTS, 2 * h.relative(b, exact))
    names = named_e79(kernels_of(lambda: step(compiled, x)))
    assert names.count("e79_forward_gluon") == names.count("e79_backward_gluon") == 1
