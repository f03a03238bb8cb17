# SPDX-License-Identifier: Apache-2.0
"""Compares the results of a formula and of its op with the formula's results in higher precision."""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_inductor.routing.interface import Match

Results = dict[str, Tensor | None]

_FP32 = torch.finfo(torch.float32).eps


def compared(
    match: Match, mine: Results, theirs: Results, want: Results, loose: bool, rounded: float
) -> tuple[float, str]:
    """Compares the op's results with the formula's, result by result.

    If ``match.compare`` returns an error for the outputs, only that counts.

    Args:
        match: the formula and its op.
        mine: the op's outputs and gradients, by name.
        theirs: the formula's outputs and gradients.
        want: the formula's outputs and gradients in higher precision.
        loose: whether ``want`` is not of higher precision, so that the formula's own error is unknown.
        rounded: the rounding that every use of a result applies; an op may apply it itself.

    Returns:
        The op's largest relative error, and a description of the first result whose error is larger than the formula's
        own error allows, or "".
    """
    if match.compare is not None:
        outputs = [[t for k, t in r.items() if k.startswith("output") and t is not None] for r in (theirs, mine)]
        error = match.compare(*outputs, *(t for k, t in theirs.items() if k.startswith("inner")))
        if error is not None:
            worse = f"verified on random data, the op's selection is worse than the formula's by {error:.3g}"
            return error, worse if error else ""
    want = {k: t for k, t in want.items() if k in mine}
    grads = (t for k, t in want.items() if "grad" in k and t is not None and t.numel())
    top = max((float(t.double().abs().max()) for t in grads), default=0.0)
    own = {k: _apart(theirs[k], t, t, _least(k, t, top)) if t is not theirs[k] else 0.0 for k, t in want.items()}
    off = {k: _apart(mine[k], theirs[k], want[k], _least(k, want[k], top)) for k in want}
    worst = max(off.values(), default=0.0)
    for name, error in off.items():
        group = [e for k, e in own.items() if "grad" in name or "grad" not in k]
        bar = 2 * max((e for e in group if e < 1), default=0.0) + _roundings(theirs, loose, rounded)
        if not error <= bar:
            return worst, _told(name, error, bar)
    return worst, ""


def _told(name: str, error: float, bar: float) -> str:
    """Returns the near-miss reason for a result that differs."""
    if error == float("inf"):
        return f"verified on random data, {name} of the op and of the formula are NaN or infinite at different places"
    return (
        f"verified on random data, {name} differs from the formula's by {error:.3g} of its norm; {bar:.3g} is allowed"
    )


def _least(name: str, want: Tensor | None, top: float) -> float:
    """Returns the smallest norm that a gradient's error is divided by.

    A gradient below 5 % of the largest entry of all gradients (20 % for a scalar) counts as cancelled: its error is
    measured against that size instead of its own norm.
    """
    if "grad" not in name or want is None:
        return 0.0
    return (0.2 if want.numel() == 1 else 0.05) * top * float(want.numel()) ** 0.5


def _roundings(results: Results, loose: bool, rounded: float) -> float:
    """Returns the error that rounding may cause: a few roundings, or many if the formula's own error is unknown."""
    dtypes = {t.dtype for t in results.values() if t is not None and t.is_floating_point()}
    eps = max([rounded, *(torch.finfo(d).eps for d in dtypes)])
    return min(0.05, 1000 * eps) if loose else 16 * _FP32 + (eps if eps > _FP32 else 0.0)


def _apart(mine: Tensor | None, formula: Tensor | None, want: Tensor | None, least: float) -> float:
    """Returns ``||mine - want|| / ||want||`` over the entries where ``formula`` and ``want`` are finite.

    Infinite if ``mine`` is not finite where both are, or differs from a NaN or an infinity that both have. Integers and
    bools give 0 or 1. A missing gradient counts as zeros.
    """
    if mine is None or want is None or formula is None:
        some = [t for t in (mine, want) if t is not None]
        return 1.0 if any(bool(t.any()) for t in some) and len(some) == 1 else 0.0
    if not want.is_floating_point():
        return 0.0 if torch.equal(mine, want) else 1.0
    a, b, c = mine.double(), want.double(), formula.double()
    fine = b.isfinite() & c.isfinite()
    if not bool((fine & a.isfinite()).all()):
        wrong = (fine & ~a.isfinite()) | (~b.isfinite() & ~torch.isclose(a, b, equal_nan=True))
        if bool((wrong & (torch.isclose(b, c, equal_nan=True) | fine)).any()):
            return float("inf")
        a, b = a.where(fine, 0.0), b.where(fine, 0.0)
    error, size = float((a - b).norm()), max(float(b.norm()), least)
    return error / size if size else error
