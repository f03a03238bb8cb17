# SPDX-License-Identifier: Apache-2.0
"""Kernel parity of single-pass mHC with the fp64 oracle, through the launch plans, with every buffer poisoned.

The kernels run on a GPU, elsewhere in the interpreter.
"""

from __future__ import annotations

from itertools import product

import pytest
from conftest import cases
from test_kernels_mhc import BF16, F16, F32, FORMS, NONE_AND_ONE, ODD_WIDTHS, OUTSIDE, ROUNDINGS, check, of_ops
from test_kernels_mhc import kernels as kernels  # a fixture

from tests.oracles import mhc as h
from tests.oracles import single_pass as one

VARIANTS = ({"residual": False}, {"full": False, "iters": 0}, {"gamma": False}, {"form": "exp"}, {"form": "exp_eps"})
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


def test_low_precision_weights(device):
    inputs = one.make_inputs((5,), 4, 48, BF16, device=device)
    for key in ("h_post", "h_res", "h_pre"):
        inputs[key] = inputs[key].bfloat16()
    out = one.run(inputs, True)
    up = h.upstream({k: out[k] for k in one.UP})
    got, want = one.run(inputs, True, up), one.oracle(inputs, True, out["x_out"], up)
    assert all(got[f"d{k}"].dtype is BF16 for k in ("h_post", "h_res", "h_pre"))
    h.compare(got, want, 2e-6 + ROUNDINGS * h.rounding(BF16), ROUNDINGS)


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


@pytest.mark.parametrize(("op", "case"), of_ops(single_pass=SINGLE_PASS, coefficients=COEFFICIENTS))
def test_against_fp64(device, op, case):
    check(op, device, **case)


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
