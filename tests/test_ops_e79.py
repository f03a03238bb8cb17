# SPDX-License-Identifier: Apache-2.0
"""The E79 scan: NaN, checkpoints, what Inductor makes of it on a CPU. Its contract is in ``test_ops_contract.py``."""

from __future__ import annotations

import time

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import mhc_inductor
from mhc_inductor.ops import e79 as ops
from mhc_inductor.ops import registry
from tests.oracles.e79 import BIASES, OUTPUTS, check, make_inputs, oracle, run_scan
from tests.oracles.mhc import relative
from tests.oracles.samples import sample, trainable

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS = torch.ops.mhc_inductor


# --- values and gradients of the public function ------------------------------------------------------------


def test_nan_propagates_from_its_step_and_sequence_on():
    inputs = make_inputs(6, 2, 4, F32)
    inputs["kvqm"][2, 1, 5] = float("nan")
    out, S, M = mhc_inductor.e79_scan(**inputs)
    assert out[:2].isfinite().all() and out[:, 0].isfinite().all() and S[0].isfinite().all()
    assert out[2:, 1].isnan().all(-1).any() and S[1].isnan().any() and M[1].isnan().any()


def test_checkpoints_are_kept_only_for_gradients(monkeypatch):
    segments = []
    inputs = make_inputs(20, dtype=F32)

    def spy(name, *args):
        segments.append(args[-1])
        return registry.call(name, *args)

    monkeypatch.setattr("mhc_inductor.api.e79.call", spy)
    mhc_inductor.e79_scan(**inputs)
    trained = {k: t.requires_grad_() for k, t in inputs.items()}
    mhc_inductor.e79_scan(**trained)
    with torch.no_grad():
        mhc_inductor.e79_scan(**trained)
    assert segments == [0, ops.segment_length(5, 2, 20), 0] and segments[1] > 0


@pytest.mark.parametrize(
    ("n", "batch", "steps", "want"),
    [
        (64, 32, 512, 24),  # 24 MiB / (32 * 32 KiB)
        (32, 1, 512, 32),
        (128, 132, 512, 8),
        (64, 32, 3, 3),
        (64, 32, 65536, 256),
        (64, 0, 5, 5),
        (16, 1, 1, 1),
    ],
)
def test_segment_length(n, batch, steps, want):
    assert ops.segment_length(n, batch, steps) == want


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize(("steps", "segment"), [(1, 1), (7, 8), (8, 8), (9, 8), (5, 2), (4, 0)])
def test_the_implementation_for_cpus_keeps_what_the_reference_keeps(bias, steps, segment):
    args = (*make_inputs(steps, 3, 5, bias=bias).values(), segment)
    for got, want in zip(OPS.e79_scan(*args), registry.REFERENCE["e79_scan"](*args), strict=True):
        assert got.dtype is want.dtype and relative(got, want) < 1e-12


def test_a_gradient_without_checkpoints_is_refused():
    args = trainable("e79_scan", sample("e79_scan", segment=0))
    out, S, _, *saved = OPS.e79_scan(*args)
    assert [t.shape for t in saved] == [(0,), (0,)]
    for t in (out, S):
        with pytest.raises(RuntimeError, match="segment = 0, which keeps no checkpoints"):
            t.sum().backward(retain_graph=True)


# --- torch.func -------------------------------------------------------------------------------------------


def test_jacrev():
    x, *rest = make_inputs(2, 1, 2).values()
    jac = torch.func.jacrev(lambda t: mhc_inductor.e79_scan(t, *rest)[0])(x)
    assert jac.shape == (2, 1, 2, 2, 1, 8)
    assert float(jac[0, :, :, 1].norm()) == 0 and float(jac[1, :, :, 0].norm()) > 0  # the scan is causal


# --- compilation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["inductor", "mhc_inductor"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_on_a_cpu_inductor_fuses_the_loop(fullgraph, backend, fresh):
    """Checks that inference compiles to a loop around one fused kernel, and training to a call of the op."""
    inputs = make_inputs(7, 2, 8, F32, bias="input")
    scan = torch.compile(mhc_inductor.e79_scan, fullgraph=fullgraph, backend=backend)
    out, (code,) = run_and_get_code(scan, **inputs)
    assert "mhc_inductor.e79_scan" not in code and "while" in code and "bmm" not in code
    for got, want in zip(out, mhc_inductor.e79_scan(**inputs), strict=True):
        assert relative(got, want) < 1e-5
    inputs["kvqm"].requires_grad_()
    codes = run_and_get_code(scan, **inputs)[1]
    assert "mhc_inductor.e79_scan.default(" in codes[0]


@pytest.mark.parametrize("dtype", [F64, BF16])
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_the_fused_loop_in_other_dtypes_and_lengths(dtype, steps, fresh):
    inputs = make_inputs(steps, 2, 8, dtype, bias=("input", "none"), state=steps != 9)
    out = torch.compile(mhc_inductor.e79_scan, fullgraph=True)(**inputs)
    check(dict(zip(OUTPUTS, out, strict=True)), inputs, None, 1e-12 if dtype is F64 else 2e-5)


def test_every_output_of_the_compiled_op(fresh):
    args = sample("e79_scan", segment=0)
    got = torch.compile(lambda *a: OPS.e79_scan(*a, 0), fullgraph=True)(*args[:-1])
    for g, w in zip(got, OPS.e79_scan(*args), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype) and relative(g, w) < 1e-5


def test_sizes_that_are_expressions(fresh):
    """Computes T and B from other sizes, which Inductor's loop cannot take."""

    @torch.compile(fullgraph=True, dynamic=True)
    def twice(kvqm, S0):
        kvqm = torch.cat((kvqm, kvqm * 0.5))
        return mhc_inductor.e79_scan(torch.cat((kvqm, -kvqm), 1), S0=torch.cat((S0, S0)))

    for steps in (3, 8):
        inputs = make_inputs(steps, 2, 4, F32)
        kvqm = torch.cat((inputs["kvqm"], inputs["kvqm"] * 0.5))
        want = mhc_inductor.e79_scan(torch.cat((kvqm, -kvqm), 1), S0=torch.cat((inputs["S0"], inputs["S0"])))
        for got, w in zip(twice(inputs["kvqm"], inputs["S0"]), want, strict=True):
            assert relative(got, w) < 1e-5


def test_compiled_for_a_cpu_is_three_times_as_fast_as_the_loop(fresh, vectorised, one_thread):
    """Times B = 8, n = 64 on one thread, since two threads wait for each other when other tests run.

    The ratio depends little on the number of steps.
    """
    inputs = make_inputs(48, 8, 64, F32)
    compiled = torch.compile(mhc_inductor.e79_scan, fullgraph=True)
    calls = {"compiled": lambda: compiled(**inputs), "loop": lambda: eager_loop(**inputs)}
    best = dict.fromkeys(calls, float("inf"))
    with torch.no_grad():
        assert relative(calls["compiled"]()[0], calls["loop"]()) < 1e-5
        for _ in range(30):  # alternate, so that both meet the same load; on a busy machine few rounds are undisturbed
            for name, call in calls.items():
                start = time.process_time()
                call()
                best[name] = min(best[name], time.process_time() - start)
            if best["loop"] > 3 * best["compiled"]:
                break
    print(best)
    assert best["loop"] > 3 * best["compiled"], best


def eager_loop(kvqm, b_s, b_m, S0, M0):
    """Computes the loop as users write it, with matrix products."""
    mv = lambda a, u: (a @ u.unsqueeze(-1)).squeeze(-1)  # noqa: E731
    S, M, outs = S0, M0, []
    for row in kvqm:
        k, v, q, m = row.chunk(4, -1)
        k = k / (k.norm(dim=-1, keepdim=True) + 1e-6)
        m = m / (m.norm(dim=-1, keepdim=True) + 1e-6)
        delta = v - mv(S, k)
        r, c = torch.sigmoid(mv(M, k) + b_s), torch.sigmoid(mv(M.mT, k) + b_s)
        S = r[..., None] * S * c[..., None, :] + delta[..., None] * k[..., None, :]
        p, w = torch.sigmoid(mv(S, m) + b_m), torch.sigmoid(mv(S.mT, m) + b_m)
        M = p[..., None] * M * w[..., None, :] + (delta - mv(M, m))[..., None] * m[..., None, :]
        y = mv(S, q)
        outs.append(y * y * torch.sigmoid(y))
    return torch.stack(outs)


# --- bad input ----------------------------------------------------------------------------------------------


def test_the_oracle_detects_another_formula():
    """Checks that the comparison can fail: another formula, a gate without its bias, must differ."""
    inputs = make_inputs(3, 2, 4, F32)
    got = run_scan({**inputs, "b_m": None})
    with pytest.raises(AssertionError, match="relative error"):
        check(got, inputs)
    assert oracle(inputs)["out"].dtype is F64
