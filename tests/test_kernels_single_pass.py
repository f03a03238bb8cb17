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


COLLAPSE = cases(
    collapse=({"width": 100}, "dtype lead", product([F32, BF16, F16], [(2, 3), (0,), (1,)])),
    other_sizes=({"lead": (3,), "h_dtype": BF16, "strided": True}, "n width", product([2, 3, 8], [16, 17, 1100])),
)


@pytest.mark.parametrize(("op", "case"), of_ops(single_pass=SINGLE_PASS, coefficients=COEFFICIENTS, collapse=COLLAPSE))
def test_against_fp64(device, op, case):
    check(op, device, **case)
