# SPDX-License-Identifier: Apache-2.0
"""Kernel parity of single-pass mHC with the fp64 oracle, through the launch plans, with every buffer poisoned.

The kernels run on a GPU, elsewhere in the interpreter.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from conftest import GPU, cases
from test_kernels_mhc import BF16, F16, F32, FORMS, ODD_WIDTHS, OUTSIDE, ROUNDINGS, kernels  # noqa: F401 (a fixture)

from tests.oracles import mhc as h
from tests.oracles import single_pass as one


def check_dalpha(got, want, of_tokens, n, tolerance):
    """Compares dalpha with the fp64 oracle's, relative to the sizes of its terms where there are tokens."""
    if of_tokens:
        one.compare_dalpha(got["dalpha"], want["dalpha"], one.dalpha_terms(of_tokens, n), tolerance, ROUNDINGS)
    else:
        assert not got["dalpha"].any()


def check(
    device, lead, width, *, n=4, dtype=BF16, iters=2, form="softmax", transpose_res=True, missing=(), more=None, **made
):
    inputs = one.make_inputs(lead, n, width, dtype, device=device, **made)
    options = {"sinkhorn_iters": iters, "sinkhorn_form": form, **(more or {})}
    out = one.run(inputs, transpose_res, None, options)
    up = h.upstream({k: out[k] for k in one.UP if k not in missing and (out[k].numel() or 0 in lead)})
    got = one.run(inputs, transpose_res, up, options)
    want = one.oracle(inputs, transpose_res, out["x_out"], up, options)
    # The gradient of x_out is rounded to x's dtype once; everything computed from it has that error. dh_pre is computed
    # from x_out, which the backward computes again: a GPU's compiler may choose other fused multiply-adds there, so that
    # an element rounds the other way.
    once = ROUNDINGS * h.rounding(dtype) if dtype in (BF16, F16) else 0.0
    # Sums over D of rounded products may cancel a little: of one token, dh_post was 1.012 roundings apart.
    errors = {"dx": once, "df_out": once, "dh_post": 2 * once, "dh_res": 2 * once}
    errors["dh_pre"] = 3 * once if GPU else 0.0
    for key in got.keys() - {"dalpha"}:
        h.compare({key: got[key]}, want, 2e-6 + errors.get(key, 0.0), ROUNDINGS)
    tokens = zip(one.alone({**inputs, "x_out": out["x_out"]}, lead), one.alone(up, lead), strict=True)
    terms = (one.oracle(t, transpose_res, t.pop("x_out"), u, options) for t, u in tokens)
    check_dalpha(got, want, list(terms), n, 2e-6 + once)
    apart = h.OPS.mhc_post(*(inputs[k] for k in ("x", "f_out", "h_post", "h_res")), transpose_res)
    assert h.relative(out["x_out"], apart) <= 2 * once + 1e-6 if GPU else torch.equal(out["x_out"], apart)
    assert all(torch.isfinite(v).all() for v in got.values())
    assert bool((got["dh_pre"] == 0).all()) == ("h_in" in missing or 0 in lead)


VARIANTS = ({"residual": False}, {"full": False, "iters": 0}, {"gamma": False}, {"form": "exp"}, {"form": "exp_eps"})
NONE_AND_ONE = [(0,), (1,), (0, 3)]
SINGLE_PASS = cases(
    single_pass=({"lead": (2, 5), "width": 128}, "dtype transpose_res", product([F32, BF16, F16], [False, True])),
    other_n=({"lead": (3,), "width": 24}, "n", [2, 3, 5, 8]),
    odd_widths=({"lead": (3,), "iters": 0}, "width dtype", product(ODD_WIDTHS, [BF16, F32])),
    without_gradients=(
        {"lead": (5,), "width": 48},
        "missing",
        [one.UP[:1], one.UP[1:2], one.UP[2:], one.UP[2:3], one.UP[:2]],
    ),
    variants=[{"lead": (5,), "width": 48, **variant} for variant in VARIANTS],
    outside=({"lead": (5,), "width": 48, "more": OUTSIDE}, "dtype", [F32, BF16]),
    no_token=({"width": 32}, "lead dtype", product(NONE_AND_ONE, [F32, BF16])),
)


@pytest.mark.parametrize("case", SINGLE_PASS)
def test_single_pass(device, case):
    check(device, **case)


def test_low_precision_weights(device):
    inputs = one.make_inputs((5,), 4, 48, BF16, device=device)
    for key in ("h_post", "h_res", "h_pre"):
        inputs[key] = inputs[key].bfloat16()
    out = one.run(inputs, True)
    up = h.upstream({k: out[k] for k in one.UP})
    got, want = one.run(inputs, True, up), one.oracle(inputs, True, out["x_out"], up)
    assert all(got[f"d{k}"].dtype is BF16 for k in ("h_post", "h_res", "h_pre"))
    h.compare(got, want, 2e-6 + ROUNDINGS * h.rounding(BF16), ROUNDINGS)


def check_coefficients(device, lead, width, *, n=4, dtype=BF16, iters=2, form="softmax", missing=(), more=None, **made):
    inputs = h.make_inputs(lead, n, width, dtype, device=device, **made)
    options = {"sinkhorn_iters": iters, "sinkhorn_form": form, **(more or {})}
    out = one.run_coefficients(inputs, None, options)
    up = h.upstream({k: out[k] for k in one.COEFFICIENTS[:3] if k not in missing and (out[k].numel() or 0 in lead)})
    got = one.run_coefficients(inputs, up, options)
    want = one.oracle_coefficients(inputs, up, options)
    h.compare({k: t for k, t in got.items() if k != "dalpha"}, want, 2e-6, ROUNDINGS)
    tokens = zip(one.alone(inputs, lead), one.alone(up, lead), strict=True)
    check_dalpha(got, want, [one.oracle_coefficients(t, u, options) for t, u in tokens], n, 2e-6)
    whole = h.OPS.mhc_pre(*inputs.values(), *{**h.PRE_OPTIONS, **options}.values())
    for key, want in zip(("h_post", "h_res", "h_pre", "h_mix", "inv_rms"), whole[1:], strict=True):
        assert torch.equal(got[key], want), f"{key} of mhc_pre has other bits"


COEFFICIENTS = cases(
    dtypes=(
        {"lead": (2, 5), "width": 128},
        "dtype iters form",
        [(t, *form) for t in (F32, BF16, F16) for form in FORMS],
    ),
    outside=({"lead": (5,), "width": 48, "more": OUTSIDE}, "dtype", [F32]),
    other_n=({"lead": (3,), "width": 40}, "n", [2, 3, 8]),
    variants=[
        {"lead": (5,), "width": 48, **made, "missing": missing}
        for made in ({"full": False, "iters": 0}, {"gamma": False}, {"param_dtype": BF16})
        for missing in ((), ("h_pre",), ("h_post", "h_res"))
    ],
    no_token=({"width": 32}, "lead", NONE_AND_ONE),
)


@pytest.mark.parametrize("case", COEFFICIENTS)
def test_coefficients(device, case):
    check_coefficients(device, **case)


def test_dx_acc_is_added_before_the_one_rounding(device):
    inputs = h.make_inputs((5,), 4, 32, BF16, device=device)
    up = h.upstream({k: v for k, v in one.run_coefficients(inputs).items() if k in one.COEFFICIENTS[:3]})
    acc = h.upstream({"x": inputs["x"]}, seed=7)["x"]
    got = one.run_coefficients(inputs, up, None, acc)["dx"]
    want = one.oracle_coefficients(inputs, up)["dx"] + acc.double().cpu()
    h.compare({"dx": got}, {"dx": want}, 2e-6, ROUNDINGS)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("lead", [(2, 3), (0,), (1,)])
def test_collapse(device, dtype, lead):
    inputs = one.make_inputs(lead, 4, 100, dtype, device=device)
    dh_in = h.upstream({"f": inputs["f_out"]})["f"]
    args = inputs["x"], inputs["h_pre"], dh_in
    h.compare(one.run_collapse(*args), one.oracle_collapse(*args), 1e-6, ROUNDINGS)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("width", [16, 17, 1100])
def test_collapse_of_other_sizes(device, n, width):
    inputs = one.make_inputs((3,), n, width, BF16, device=device)
    args = inputs["x"].transpose(-1, -2).contiguous().transpose(-1, -2), inputs["h_pre"].bfloat16(), inputs["f_out"]
    h.compare(one.run_collapse(*args), one.oracle_collapse(*args), 1e-6, ROUNDINGS)
