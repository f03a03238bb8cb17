# SPDX-License-Identifier: Apache-2.0
"""The reference (the specification in code) against independent fp64 autograd oracles."""

from __future__ import annotations

import functools

import pytest
import torch

import mhc_inductor  # noqa: F401  (registers the ops)
from mhc_inductor.reference import mhc as reference
from tests.oracles.mhc import (
    HEAD_OPTIONS,
    MISTAKES,
    PRE_OPTIONS,
    RECORD,
    compare,
    make_inputs,
    make_post_inputs,
    oracle_head,
    oracle_post,
    oracle_pre,
    oracle_sinkhorn,
    relative,
    run_head,
    run_post,
    run_pre,
    sinkhorn,
    upstream,
)

EXACT = 1e-12
FORMS = [(0, "softmax"), (1, "softmax"), (20, "softmax"), (1, "exp"), (20, "exp"), (1, "exp_eps"), (20, "exp_eps")]


def check_pre(inputs, options=None, tolerance=EXACT):
    up = upstream({k: t for k, t in oracle_pre(inputs, None, options).items() if k in ("h_in", "h_post", "h_res")})
    up = {k: t.to(inputs["x"].dtype if k == "h_in" else reference.acc_dtype(inputs["x"].dtype)) for k, t in up.items()}
    return compare(run_pre(inputs, up, options), oracle_pre(inputs, up, options), tolerance)


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("full", [True, False], ids=["full", "2n"])
@pytest.mark.parametrize("gamma", [True, False], ids=["gamma", "plain"])
def test_pre_and_its_gradients(n, full, gamma):
    errors = check_pre(make_inputs((2, 3), n, 24, full=full, gamma=gamma))
    assert {"dx", "dphi", "dalpha", "dbias"} <= errors.keys() and ("dgamma" in errors) == gamma


@pytest.mark.parametrize(("iters", "form"), FORMS)
def test_pre_through_sinkhorn(iters, form):
    check_pre(make_inputs((5,), 4, 20), {"sinkhorn_iters": iters, "sinkhorn_form": form, "sinkhorn_eps": 1e-3})


def test_pre_with_every_constant_off_its_default():
    options = {"norm_eps": 0.3, "hc_eps": 0.07, "post_mult": 3.1, "post_eps": 0.4, "sinkhorn_eps": 0.01}
    check_pre(make_inputs((4,), 3, 20), {**options, "sinkhorn_iters": 3})


@pytest.mark.parametrize("case", MISTAKES)
def test_pre_mistakes_made_before(case):
    check_pre(make_inputs(**MISTAKES[case]), tolerance=EXACT)


@pytest.mark.parametrize("gone", ["h_in", "h_post", "h_res"])
def test_pre_backward_takes_none_for_zero(gone):
    inputs = make_inputs((3,), 4, 16)
    up = upstream({k: t for k, t in oracle_pre(inputs).items() if k in {"h_in", "h_post", "h_res"} - {gone}})
    compare(run_pre(inputs, up), oracle_pre(inputs, up), EXACT)


@pytest.mark.parametrize("head", [True, False], ids=["head", "pre"])
def test_dx_acc_is_added_before_the_rounding(head):
    inputs = make_inputs((3,), 4, 16, torch.bfloat16, head=head)
    if head:
        out = torch.ops.mhc_inductor.mhc_head(*inputs.values(), *HEAD_OPTIONS.values())
        saved, op = out[1:], torch.ops.mhc_inductor.mhc_head_backward
        args, tail = [out[0], *inputs.values(), *saved], HEAD_OPTIONS.values()
        want = oracle_head(inputs, {"h_in": out[0]})["dx"]
    else:
        out = torch.ops.mhc_inductor.mhc_pre(*inputs.values(), *PRE_OPTIONS.values())
        args = [*out[:3], *inputs.values(), out[3], out[1], out[4], out[5]]
        op, tail = torch.ops.mhc_inductor.mhc_pre_backward, PRE_OPTIONS.values()
        want = oracle_pre(inputs, dict(zip(("h_in", "h_post", "h_res"), out[:3], strict=True)))["dx"]
    acc = torch.randn(inputs["x"].shape).bfloat16()
    got = op(*args, acc, *tail)[0]
    assert got.dtype is torch.bfloat16
    exact = want + acc.double()
    # Rounded once: no element is off by more than half a unit in the last place, plus fp32's own error.
    assert ((got.double() - exact).abs() <= exact.abs() * (2.0**-8) * 1.001 + 1e-5).all()
    twice = op(*args, None, *tail)[0] + acc
    assert relative(got, exact) < relative(twice, exact)


def test_pre_intermediates_agree_with_the_closed_form():
    """Compares dh_mix, dinv and G separately with the formulas, since mistakes show in the intermediates."""
    inputs = make_inputs((2, 5), 4, 24)
    up = upstream({k: t for k, t in oracle_pre(inputs).items() if k in ("h_in", "h_post", "h_res")})
    want = oracle_pre(inputs, up)
    x, phi, alpha, _, gamma = inputs.values()
    s, h = want["h_pre"] - 1e-6, want["h_post"]
    d_pre = torch.einsum("...d,...id->...i", up["h_in"], x) * s * (1 - s)
    d = [d_pre, up["h_post"] * h * (1 - h / 2), up["h_res"].flatten(-2)]
    dz = torch.cat([a * p for a, p in zip(alpha, d, strict=True)], -1)
    dh_mix = dz * want["inv_rms"][..., None]
    g = torch.einsum("abj,abk->jk", dh_mix, x.flatten(-2))
    assert relative(dh_mix, want["dh_mix"]) < EXACT
    assert relative((dz * want["h_mix"]).sum(-1), want["dinv"]) < EXACT
    assert relative(g, want["G"]) < EXACT
    assert relative(g * gamma.flatten(), want["dphi"]) < EXACT
    assert relative((phi * g).sum(0).view_as(gamma), want["dgamma"]) < EXACT


def test_example_shape_in_fp32_arithmetic():
    """Tests the specification's example shape with bf16 x, fp32 parameters and standard normal phi."""
    inputs = make_inputs(**RECORD, dtype=torch.bfloat16, phi_std=1.0)
    up = upstream({k: t for k, t in run_pre(inputs).items() if k in ("h_in", "h_post", "h_res")})
    got, want = run_pre(inputs, up), oracle_pre(inputs, up)
    errors = compare(got, want, 2e-5)
    assert all(errors[k] < 5e-6 for k in ("dphi", "dalpha", "dbias", "dgamma", "h_mix", "inv_rms")), errors


@pytest.mark.parametrize("iters", [0, 1, 2, 20])
@pytest.mark.parametrize("form", ["softmax", "exp", "exp_eps"])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_sinkhorn(iters, form, n):
    logits = torch.randn(3, 2, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) * 2
    grad = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for eps in (0.0, 1e-6, 0.2):
        want = oracle_sinkhorn(logits, iters, eps, form, grad)
        assert relative(reference.mhc_sinkhorn(logits, iters, eps, form), want["h_res"]) < EXACT
        got = reference.mhc_sinkhorn_backward(grad, logits, iters, eps, form)
        # After 20 iterations without eps, the true gradient is much smaller than its terms.
        assert float((got - want["dh_res"]).norm()) < EXACT * float(grad.norm())


def test_sinkhorn_clamp_stops_the_gradient_through_the_sum():
    """Checks form "exp" with column sums below eps, where the divisor is the constant eps."""
    logits = torch.tensor([[8.0, -3.0], [9.0, -2.0]], dtype=torch.float64)
    grad = torch.tensor([[0.3, -1.0], [2.0, 0.7]], dtype=torch.float64)
    want = oracle_sinkhorn(logits, 2, 0.05, "exp", grad)
    assert float(sinkhorn(logits, 1, 0.05, "exp").sum(-2).min()) < 0.5  # the clamp acts
    assert relative(reference.mhc_sinkhorn_backward(grad, logits, 2, 0.05, "exp"), want["dh_res"]) < EXACT


@pytest.mark.parametrize("form", ["softmax", "exp", "exp_eps"])
def test_sinkhorn_is_doubly_stochastic(form):
    c = reference.mhc_sinkhorn(torch.randn(7, 4, 4, dtype=torch.float64), 200, 1e-9, form)
    assert torch.allclose(c.sum(-1), torch.ones(7, 4).double(), atol=1e-6)
    assert torch.allclose(c.sum(-2), torch.ones(7, 4).double(), atol=1e-6)


def test_sinkhorn_forms_differ_and_rows_come_first_in_exp():
    logits = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    one = {form: reference.mhc_sinkhorn(logits, 1, 1e-6, form) for form in ("softmax", "exp")}
    for c in one.values():  # both forms end with the columns
        assert torch.allclose(c.sum(-2), torch.ones(4).double(), atol=1e-5)
    two = {form: reference.mhc_sinkhorn(logits, 2, 1e-2, form) for form in ("softmax", "exp")}
    assert not torch.allclose(two["softmax"], two["exp"], atol=1e-4)


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("transpose", [False, True], ids=["R", "RT"])
@pytest.mark.parametrize("residual", [True, False], ids=["res", "none"])
def test_post_and_its_gradients(n, transpose, residual):
    inputs = make_post_inputs((2, 3), n, 20, residual=residual)
    up = torch.randn(inputs["x"].shape, dtype=torch.float64)
    errors = compare(run_post(inputs, transpose, up), oracle_post(inputs, transpose, up), EXACT)
    assert ("dh_res" in errors) == residual


def test_post_orientation_by_hand():
    """Uses a matrix that moves stream 1 to stream 0, which exposes a wrong axis."""
    x = torch.stack([torch.full((16,), 10.0), torch.full((16,), 20.0)])
    r = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    zero = torch.zeros(16), torch.zeros(2)
    assert reference.mhc_post(x, *zero, r, False)[:, 0].tolist() == [20.0, 0.0]
    assert reference.mhc_post(x, *zero, r, True)[:, 0].tolist() == [0.0, 10.0]


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("gamma", [True, False], ids=["gamma", "plain"])
def test_head_and_its_gradients(n, gamma):
    inputs = make_inputs((2, 3), n, 20, gamma=gamma, head=True)
    up = upstream({"h_in": oracle_head(inputs)["h_in"]})
    compare(run_head(inputs, up), oracle_head(inputs, up), EXACT)


@pytest.mark.parametrize("full", [True, False], ids=["full", "2n"])
def test_gradcheck_of_the_pre_reference(full):
    inputs = make_inputs((2,), 2, 16, full=full)
    options = {**PRE_OPTIONS, "sinkhorn_iters": 3 if full else 0}
    pre = functools.partial(reference.mhc_pre.__wrapped__)
    args = [t.requires_grad_() for t in inputs.values()]
    assert torch.autograd.gradcheck(lambda *a: pre(*a, *options.values())[: 3 if full else 2], args, fast_mode=True)


def test_gradcheck_of_the_other_references():
    head = [t.requires_grad_() for t in make_inputs((2,), 2, 16, head=True).values()]
    assert torch.autograd.gradcheck(lambda *a: reference.mhc_head(*a, *HEAD_OPTIONS.values())[0], head, fast_mode=True)
    post = [t.requires_grad_() for t in make_post_inputs((2,), 3, 16).values()]
    for transpose in (False, True):
        fn = functools.partial(reference.mhc_post, transpose_res=transpose)
        assert torch.autograd.gradcheck(fn, post, fast_mode=True)
    logits = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    for form in ("softmax", "exp", "exp_eps"):
        assert torch.autograd.gradcheck(lambda t, form=form: reference.mhc_sinkhorn(t, 4, 1e-3, form), [logits])
