# SPDX-License-Identifier: Apache-2.0
"""Sizes, options and outputs of one call, as all launch plans of the mHC ops need them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ..operands import power_of_two

FORMS = {"softmax": 0, "exp": 1, "exp_eps": 2}
OUTSIDE = {"inside": False, "outside": True}


def numel(shape: Any) -> Any:
    """Returns the product of the sizes."""
    total: Any = 1
    for s in shape:
        total = total * s
    return total


def nothing(b: Any, T: Any) -> bool:
    """Returns whether there are known to be no tokens."""
    return bool(b.is_static(T) and T == 0)


class Options(NamedTuple):
    """The options of an op, in its order; those of a head by name."""

    norm_eps: float
    hc_eps: float
    post_mult: float = 0.0
    post_eps: float = 0.0
    iters: int = 0
    sinkhorn_eps: float = 0.0
    form: str = "softmax"
    norm_form: str = "inside"

    def values(self, has_res: bool) -> dict[str, Any]:
        """Returns the kernels' values for them."""
        iters = self.iters if has_res else 0
        return dict(self._asdict(), ITERS=iters, FORM=FORMS[self.form], OUTSIDE=OUTSIDE[self.norm_form])


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
    def MP(self) -> int:
        """Rows of phi plus one for the sum of squares, padded for the tensor cores."""
        return max(16, power_of_two(self.M + 1))

    @property
    def has_res(self) -> bool:
        """Whether phi has rows for the residual coefficients."""
        return 2 * self.n < self.M

    def values(self) -> dict[str, Any]:
        """Returns the kernels' values for them."""
        return dict(
            D=self.D, N=self.n, NP=power_of_two(self.n), K=self.K, M=self.M, MP=self.MP, T=self.T, HAS_RES=self.has_res
        )


def dims(b: Any, x: Any, phi: Any = None) -> Dims:
    """Returns the sizes of a call from x and phi; M is 0 without phi."""
    *lead, n, D = b.shape(x)
    return Dims(tuple(lead), b.static(n), b.static(D), 0 if phi is None else b.static(b.shape(phi)[0]), numel(lead))


def outputs(b: Any, s: Dims, dtype: Any, has_post: bool = True) -> dict[str, Any]:
    """Allocates h_in (None without its dtype), h_post, h_res (None without ``has_post``), h_pre, h_mix and inv_rms."""
    res = (s.n, s.n) if s.has_res else (0, 0)
    return dict(
        h_in=None if dtype is None else b.empty((*s.lead, s.D), dtype),
        h_post=b.empty((*s.lead, s.n), b.f32) if has_post else None,
        h_res=b.empty((*s.lead, *res), b.f32) if has_post else None,
        h_pre=b.empty((*s.lead, s.n), b.f32),
        h_mix=b.empty((*s.lead, s.M), b.f32),
        inv=b.empty(s.lead, b.f32),
    )


def of_tokens(s: Dims, out: dict[str, Any], params: tuple[Any, ...], o: Options) -> dict[str, Any]:
    """Returns the values of kernels that compute ``out`` with params (phi, alpha, bias, gamma)."""
    names = ("phi", "alpha", "bias", "gamma")
    return dict(
        s.values(), **o.values(s.has_res), **dict(out, h_res=out["h_res"] if s.has_res else None),
        **dict(zip(names, params, strict=True)), HAS_POST=out["h_post"] is not None, HAS_GAMMA=params[3] is not None,
    )  # fmt: skip
