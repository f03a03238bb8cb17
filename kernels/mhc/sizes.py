# SPDX-License-Identifier: Apache-2.0
"""Sizes and outputs of one call, as all launch plans of the mHC ops need them."""

from __future__ import annotations

import dataclasses
from typing import Any

from .config import pow2

FORMS = {"softmax": 0, "exp": 1, "exp_eps": 2}
OUTSIDE = {"inside": False, "outside": True}


def numel(shape: Any) -> Any:
    """Returns the product of the sizes."""
    total: Any = 1
    for s in shape:
        total = total * s
    return total


def contiguous(b: Any, *tensors: Any) -> tuple[Any, ...]:
    """Returns the tensors made contiguous; None stays None."""
    return tuple(None if t is None else b.contiguous(t) for t in tensors)


@dataclasses.dataclass(frozen=True)
class Dims:
    """Sizes of one call: n streams of width D, M rows of phi, T tokens, which may be symbolic."""

    lead: tuple[Any, ...]
    n: int
    D: int
    M: int
    T: Any

    @property
    def K(self) -> int:
        """Columns of phi."""
        return self.n * self.D

    @property
    def NP(self) -> int:
        """The number of streams, padded to a power of two."""
        return pow2(self.n)

    @property
    def MP(self) -> int:
        """Rows of phi plus one for the sum of squares, padded for the tensor cores."""
        return max(16, pow2(self.M + 1))

    @property
    def has_res(self) -> bool:
        """Whether phi has rows for the residual coefficients."""
        return 2 * self.n < self.M


def dims(b: Any, x: Any, phi: Any) -> Dims:
    """Returns the sizes of a call from x and phi."""
    *lead, n, D = b.shape(x)
    return Dims(tuple(lead), b.static(n), b.static(D), b.static(b.shape(phi)[0]), numel(lead))


def pre_outputs(b: Any, s: Dims, dtype: Any, has_post: bool) -> tuple[Any, ...]:
    """Allocates h_in, h_post, h_res, h_pre, h_mix and inv_rms; h_post and h_res are None without ``has_post``."""
    res = (s.n, s.n) if s.has_res else (0, 0)
    return (
        b.empty((*s.lead, s.D), dtype),
        b.empty((*s.lead, s.n), b.f32) if has_post else None,
        b.empty((*s.lead, *res), b.f32) if has_post else None,
        b.empty((*s.lead, s.n), b.f32),
        b.empty((*s.lead, s.M), b.f32),
        b.empty(s.lead, b.f32),
    )
