# SPDX-License-Identifier: Apache-2.0
"""Errors of tensors, and whether two runs are equal in bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def rounding(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the relative error of a correct rounding to the dtype of ``value``, 0 for fp32 and fp64."""
    narrow = value.dtype in (torch.bfloat16, torch.float16)
    return relative(exact.to(value.dtype), exact) if narrow else 0.0


def errors(got: Named, want: Named, bar: Callable[..., float | None], **others: Named) -> dict[str, Any]:
    """Returns for every tensor its error against ``want``, that of each other that has it, its bar, and if it is met.

    ``bar`` gets the tensor's name, the tensor, what it should be, and its errors; it returns None where there is no bar.
    """
    found: dict[str, Any] = {}
    for name, value in got.items():
        exact = want[name].reshape(value.shape)
        of = {k: relative(t[name], exact) for k, t in {"relative": got, **others}.items() if name in t}
        limit = bar(name, value, exact, of)
        found[name] = of if limit is None else {**of, "bar": limit, "met": of["relative"] <= limit}
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))
