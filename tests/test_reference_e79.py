# SPDX-License-Identifier: Apache-2.0
"""The reference (the specification in code) of the E79 scan against an independent fp64 loop under autograd."""

from __future__ import annotations

import pytest
import torch

import mhc_inductor
from mhc_inductor.reference import e79 as reference
from tests.oracles.e79 import (
    BIASES,
    FP32_GRADIENTS,
    MISTAKES,
    NAMES,
    check,
    loop,
    make_inputs,
    oracle,
    run_scan,
    upstream,
)
from tests.oracles.mhc import relative

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
EXACT = 1e-12


def run_reference(inputs, up=None, segment=8):
    """Calls the reference's two functions, and names the results as the oracle does."""
    args = [inputs[k] for k in NAMES]
    *out, checkpoints, gates = reference.e79_scan(*args, segment)
    named = dict(zip(("out", "S", "M"), out, strict=True))
    if up:
        grads = reference.e79_scan_backward(*[up.get(k) for k in named], *args, checkpoints, gates, segment)
        named |= {f"d{k}": g for k, g, a in zip(NAMES, grads, args, strict=True) if a is not None}
    return named


def public(inputs, up=None, segment=None):
    """Calls the public function, which chooses the segment, and autograd."""
    leaf = {k: None if t is None else t.detach().requires_grad_() for k, t in inputs.items()}
    out = dict(zip(("out", "S", "M"), mhc_inductor.e79_scan(**leaf), strict=True))
    wanted = {k: t for k, t in leaf.items() if t is not None}
    grads = torch.autograd.grad([out[k] for k in up], list(wanted.values()), list(up.values()))
    return {k: t.detach() for k, t in out.items()} | {f"d{k}": g for k, g in zip(wanted, grads, strict=True)}


FORMS = {"reference": run_reference, "op": run_scan, "public": public}
of_every_form = pytest.mark.parametrize("form", FORMS)


def exact(inputs, up, segment=8, form="reference"):
    return check(FORMS[form](inputs, up, segment), inputs, up, EXACT)


@of_every_form
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("steps", [1, 2, 3, 17, 64])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("state", [True, False], ids=["state", "zero"])
def test_scan_and_its_gradients(bias, steps, batch, state, form):
    inputs = make_inputs(steps, batch, 5, bias=bias, state=state)
    errors = exact(inputs, upstream(inputs), form=form)
    assert {f"d{k}" for k, t in inputs.items() if t is not None} <= errors.keys()


@pytest.mark.parametrize("gates", [-12.0, 12.0], ids=["near_0", "near_1"])
@pytest.mark.parametrize("bias", ["fixed", "input"])
def test_saturated_gates(gates, bias):
    inputs = make_inputs(9, 2, 5, bias=bias, gates=gates)
    up = upstream(inputs)
    got, want = run_reference(inputs, up), oracle(inputs, up)
    for key in got:
        # A saturated sigmoid's gradient is the difference of much larger terms.
        assert float((got[key] - want[key]).norm()) <= EXACT * (1 + float(want[key].norm())), key
    # One step of S shows the saturation: the old state is kept whole, or not at all.
    step = {k: t[:1] if k in ("kvqm", "b_s", "b_m") and t.dim() == 3 else t for k, t in inputs.items()}
    k, v, _, _ = step["kvqm"][0].chunk(4, -1)
    k = k / k.norm(dim=-1, keepdim=True)
    change = torch.einsum("bi,bj->bij", v - torch.einsum("bij,bj->bi", step["S0"], k), k)
    kept = step["S0"] if gates > 0 else torch.zeros_like(change)
    assert relative(run_reference(step)["S"], kept + change) < 1e-3


@of_every_form
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_made_before(case, dtype, form):
    """Tests T of 2 and more, biases per step, gradients of final and initial states, T = C-1, C, C+1."""
    options = dict(MISTAKES[case])
    segment, names = options.pop("segment", 4), options.pop("up", ("out", "S", "M"))
    inputs = make_inputs(dtype=dtype, **options)
    up = upstream(inputs, names)
    check(FORMS[form](inputs, up, segment), inputs, up, EXACT if dtype is F64 else FP32_GRADIENTS)


@pytest.mark.parametrize("segment", [1, 2, 7, 8, 9, 100])
def test_every_segment_length_gives_the_same(segment):
    inputs = make_inputs(17, 2, 4, bias="input")
    up = upstream(inputs)
    got, one = run_reference(inputs, up, segment), run_reference(inputs, up, 17)
    for key in got:
        assert torch.equal(got[key], one[key]), key


@pytest.mark.parametrize("segment", [1, 3, 4, 5, 8, 9])
def test_checkpoints_are_the_states_before_each_segment(segment):
    inputs = make_inputs(8, 2, 4)
    args = [inputs[k] for k in NAMES]
    checkpoints = reference.e79_scan(*args, segment)[3]
    assert checkpoints.shape == (2 * -(-8 // segment), 2, 4, 4)
    assert torch.equal(checkpoints[0], inputs["S0"]) and torch.equal(checkpoints[1], inputs["M0"])
    for j in range(1, len(checkpoints) // 2):
        before = loop({**inputs, "kvqm": inputs["kvqm"][: j * segment]})
        assert relative(checkpoints[2 * j], before["S"]) < EXACT
        assert relative(checkpoints[2 * j + 1], before["M"]) < EXACT
    assert reference.e79_scan(*args, 0)[3].shape == (0,)


def test_the_state_continues_the_sequence():
    inputs = make_inputs(7, 2, 4, bias="input")
    whole = run_reference(inputs)
    first = {k: t[:3] if k in ("kvqm", "b_s", "b_m") else t for k, t in inputs.items()}
    one = run_reference(first)
    rest = {k: t[3:] if k in ("kvqm", "b_s", "b_m") else t for k, t in inputs.items()}
    two = run_reference({**rest, "S0": one["S"], "M0": one["M"]})
    assert torch.equal(torch.cat([one["out"], two["out"]]), whole["out"])
    assert torch.equal(two["S"], whole["S"]) and torch.equal(two["M"], whole["M"])


@of_every_form
@pytest.mark.parametrize("part", [0, 3], ids=["k", "m"])
@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_a_zero_vector_has_a_finite_gradient(part, dtype, form):
    """Checks the gradient of zero vectors: the norm's is 0, so dk = dk^ / 1e-6."""
    inputs = make_inputs(3, 2, 4, dtype, state=True)
    inputs["kvqm"][1, :, part * 4 : part * 4 + 4] = 0
    up = upstream(inputs)
    got = FORMS[form](inputs, up, 8)
    assert all(t.isfinite().all() for t in got.values())
    assert float(got["dkvqm"][1, :, part * 4 : part * 4 + 4].abs().max()) > 1e3
    check(got, inputs, up, EXACT if dtype is F64 else FP32_GRADIENTS)


@of_every_form
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize(("steps", "batch", "state"), [(1, 1, True), (2, 4, False), (17, 4, True), (64, 1, True)])
def test_low_precision(bias, steps, batch, state, dtype, form):
    inputs = make_inputs(steps, batch, 16, dtype, bias=bias, state=state)
    up = upstream(inputs)
    errors = check(FORMS[form](inputs, up, 8), inputs, up)
    assert dtype is BF16 or (errors["out"] < 1e-5 and errors["S"] < 1e-5)


@of_every_form
@pytest.mark.parametrize(
    ("n", "gates"), [(1, 0.0), (2, 0.0), (130, 0.0), (16, -10.0), (16, -8.0), (16, 8.0), (16, 10.0)]
)
def test_fp32_of_any_n_and_with_saturated_gates(n, gates, form):
    inputs = make_inputs(17, 2, n, F32, bias="input", gates=gates)
    up = upstream(inputs)
    check(FORMS[form](inputs, up, 8), inputs, up)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", BIASES)
def test_low_precision_inputs_are_rounded_once(dtype, bias):
    inputs = make_inputs(9, 2, 8, dtype, bias=bias)
    up = upstream(inputs)
    got = run_reference(inputs, up)
    check(got, inputs, up)
    assert got["out"].dtype is got["dkvqm"].dtype is dtype
    assert got["S"].dtype is got["M"].dtype is got["dS0"].dtype is got["dM0"].dtype is F32
    assert all(got[k].dtype is dtype for k in ("db_s", "db_m") if k in got)


@pytest.mark.parametrize("bias", BIASES)
def test_the_loop_has_second_derivatives(bias):
    """Differentiates the loop itself twice, as the op's error on second derivatives advises."""
    args = [t if t is None else t.requires_grad_() for t in make_inputs(3, 1, 3, bias=bias).values()]
    out = reference.e79_scan(*args, 0)[0]
    (first,) = torch.autograd.grad(out.square().sum(), args[0], create_graph=True)
    first.square().sum().backward()
    assert args[0].grad.isfinite().all() and float(args[0].grad.norm()) > 0
