# SPDX-License-Identifier: Apache-2.0
"""The reference (the specification in code) against independent fp64 autograd oracles."""

from __future__ import annotations

import pytest
import torch

import mhc_inductor
from mhc_inductor.reference import mhc as reference
from tests.oracles import single_pass as one
from tests.oracles.mhc import (
    HEAD_OPTIONS,
    MISTAKES,
    PRE_OPTIONS,
    RECORD,
    compare,
    make_inputs,
    make_post_inputs,
    oracle_head,
    oracle_pre,
    oracle_sinkhorn,
    relative,
    sinkhorn,
    upstream,
)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EXACT = 1e-12
LAYER = ("h_in", "h_post", "h_res")
FORMS = [(0, "softmax"), (1, "softmax"), (20, "softmax"), (1, "exp"), (20, "exp"), (1, "exp_eps"), (20, "exp_eps")]


ALL = [name for name in one.FORMULAS if name != "coefficients"]


def check(name, inputs, transpose=True, options=None, tolerance=EXACT):
    """Asserts that an op's results and gradients are the oracle's; returns them."""
    _, run, oracle, outputs = one.FORMULAS[name]
    out = run(inputs, transpose, None, options)
    up = upstream({k: out[k] for k in outputs})
    got = run(inputs, transpose, up, options)
    errors = compare(got, oracle(inputs, transpose, out.get("x_out"), up, options), tolerance)
    assert {f"d{k}" for k, t in inputs.items() if t is not None} <= errors.keys()
    return got


def _made(name):
    """Returns the kinds of inputs that an op has: without a residual matrix, its coefficients, the norm's weight."""
    whole = [{}, {"gamma": False}, {"full": False}, {"full": False, "gamma": False}]
    if name in ("post", "post_head"):
        return [{}, {"residual": False}]
    kinds = {"pre": whole, "head": whole[:2], "post_pre": whole[:3], "coefficients": whole[:1], "collapse": whole[:1]}
    kinds = kinds.get(name, [*whole[:3], {"residual": False}])
    return [*kinds, *({**kind, "residual": False} for kind in kinds if name == "post_pre")]


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("transpose", [False, True], ids=["R", "RT"])
@pytest.mark.parametrize(("name", "made"), [(name, made) for name in ALL for made in _made(name)], ids=str)
def test_results_and_gradients(name, made, transpose, n):
    balanced = name in ("post_pre", "single_pass") and "full" not in made
    check(name, one.FORMULAS[name][0]((2, 3), n, 20, **made), transpose, {"sinkhorn_iters": 2} if balanced else None)


@pytest.mark.parametrize("lead", [(0,), (1,), (), (2, 0), (1, 1, 3)])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ALL)
def test_no_token_one_token_any_leading_dimensions(name, lead, dtype):
    inputs = one.FORMULAS[name][0](lead, 4, 16, dtype)
    got = check(name, inputs, tolerance=2e-5)
    if name == "post":
        assert mhc_inductor.mhc_sinkhorn(inputs["h_res"]).shape == (*lead, 4, 4)
    if 0 in lead:
        assert all((got[f"d{k}"] == 0).all() and got[f"d{k}"].numel() for k in inputs.keys() & set(one.PARAMS))


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize("param_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("iters", [0, 20])
def test_pre_dtypes(dtype, param_dtype, iters):
    inputs = make_inputs((16,), 4, 64, dtype, param_dtype=param_dtype)
    got = check("pre", inputs, options={"sinkhorn_iters": iters}, tolerance=2e-5)
    wide = F64 if dtype is F64 else F32
    assert got["h_in"].dtype is dtype and got["dx"].dtype is dtype
    assert all(got[k].dtype is wide for k in ("h_post", "h_res", "h_pre", "h_mix", "inv_rms"))
    assert all(got[k].dtype is param_dtype for k in ("dphi", "dalpha", "dbias", "dgamma"))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("f_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("h_dtype", [F32, BF16])
def test_post_dtypes(dtype, f_dtype, h_dtype):
    inputs = make_post_inputs((5,), 4, 24, dtype, f_dtype=f_dtype, h_dtype=h_dtype)
    got = check("post", inputs, False, tolerance=1e-6)
    assert [t.dtype for t in got.values()] == [dtype, dtype, f_dtype, h_dtype, h_dtype]


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_sinkhorn_dtypes(dtype):
    logits = torch.randn(6, 4, 4).to(dtype)
    g = torch.randn(6, 4, 4).to(dtype)
    got = {"h_res": torch.ops.mhc_inductor.mhc_sinkhorn(logits, 5, 1e-6, "softmax")}
    got["dh_res"] = torch.ops.mhc_inductor.mhc_sinkhorn_backward(g, logits, 5, 1e-6, "softmax")
    assert all(t.dtype is dtype for t in got.values())
    compare(got, oracle_sinkhorn(logits, 5, 1e-6, "softmax", g), 1e-12 if dtype is F64 else 1e-5)


@pytest.mark.parametrize(("iters", "form"), FORMS)
def test_pre_through_sinkhorn(iters, form):
    options = {"sinkhorn_iters": iters, "sinkhorn_form": form, "sinkhorn_eps": 1e-3}
    check("pre", make_inputs((5,), 4, 20), options=options)


@pytest.mark.parametrize("form", ["softmax", "exp"])
@pytest.mark.parametrize("name", ["pre", "post_pre", "single_pass", "coefficients"])
def test_every_constant_off_its_default(name, form):
    options = {"norm_eps": 0.3, "hc_eps": 0.07, "post_mult": 3.1, "post_eps": 0.4, "sinkhorn_eps": 0.01}
    check(name, one.FORMULAS[name][0]((4,), 3, 20), False, {**options, "sinkhorn_iters": 3, "sinkhorn_form": form})


@pytest.mark.parametrize(
    ("name", "made"), [(n, made) for n in one.FORMULAS if n not in ("post", "collapse") for made in _made(n)], ids=str
)
def test_eps_outside_the_root(name, made):
    """Uses an eps that tells the two forms of the norm apart."""
    inputs = one.FORMULAS[name][0]((2, 3), 4, 20, **made)
    options = {"norm_eps": 0.1, "sinkhorn_iters": 0 if name in ("head", "post_head") or "full" in made else 3}
    outside, inside = (check(name, inputs, options={**options, "norm_form": form}) for form in ("outside", "inside"))
    assert outside.keys() >= {"inv_rms", "dx", "dphi", "dalpha", "dbias"}
    assert relative(inside["dx"], outside["dx"]) > 5e-4


@pytest.mark.parametrize("case", MISTAKES)
def test_pre_mistakes_made_before(case):
    check("pre", make_inputs(**MISTAKES[case]))


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
    up = upstream({k: t for k, t in oracle_pre(inputs).items() if k in LAYER})
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
    got = check("pre", inputs := make_inputs(**RECORD, dtype=BF16, phi_std=1.0), tolerance=2e-5)
    want = oracle_pre(inputs, upstream({k: got[k] for k in LAYER}))
    exact = ("dphi", "dalpha", "dbias", "dgamma", "h_mix", "inv_rms")
    compare({k: got[k] for k in exact}, want, 5e-6)


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


def test_post_orientation_by_hand():
    """Uses a matrix that moves stream 1 to stream 0, which exposes a wrong axis."""
    x = torch.stack([torch.full((16,), 10.0), torch.full((16,), 20.0)])
    r = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    zero = torch.zeros(16), torch.zeros(2)
    assert reference.mhc_post(x, *zero, r, False)[:, 0].tolist() == [20.0, 0.0]
    assert reference.mhc_post(x, *zero, r, True)[:, 0].tolist() == [0.0, 10.0]
