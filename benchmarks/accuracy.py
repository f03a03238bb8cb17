# SPDX-License-Identifier: Apache-2.0
"""Errors of tensors, and whether two runs are equal in bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Named = Mapping[str, torch.Tensor]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns ||a - b|| / ||b|| in fp64; NaN if ``a`` holds a NaN, so that no bar is met."""
    b = b.double()
    return float((a.double() - b).norm() / b.norm())


def equal_bits(first: Named, second: Named) -> dict[str, Any]:
    """Returns which tensors of two runs differ in a bit, and whether none does."""
    differ = [k for k in first if not same_bits(first[k], second[k])]
    return {"differ": differ, "met": not differ}


def against_dense(got: Named, want: Named, dense: Named, factor: float) -> dict[str, Any]:
    """Returns for every tensor its error against ``want``, dense attention's, the bar, and whether it is met.

    The bar is ``factor`` times the error of ``dense``, where that has the tensor.
    """
    errors: dict[str, Any] = {}
    for name, value in got.items():
        errors[name] = {"relative": relative(value, want[name])}
        if name in dense:
            other = relative(dense[name], want[name])
            met = errors[name]["relative"] <= factor * other
            errors[name] |= {"dense": other, "bar": factor * other, "met": met}
    return errors


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))
