# SPDX-License-Identifier: Apache-2.0
"""Finds what the scores of masked keys are set to, which queries see a key, and what one without a visible key gives.

A masked score is a number F (``masked_fill``, ``where``), or the score plus F (an added mask), rounded in the dtype
in which the model computes it. A key counts as masked if F is -inf, ``finfo.min`` of that dtype, or at most
:data:`LOWEST`. Only -inf is exact: docs/design.md, section 16, says where the others differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
from collections.abc import Iterable

import torch

from mhc_inductor.routing.graph.expressions import Ref, aten
from mhc_inductor.routing.graph.index import DynamicWidth, Unsupported, var
from mhc_inductor.routing.graph.linear import Key, at_least_zero, atom, number, of_size
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.additive import TOO_MANY, spacing
from mhc_inductor.routing.masks.elements import ADD, constant_of, filling, operand, rounded
from mhc_inductor.routing.masks.index_checks import PICKS
from mhc_inductor.routing.masks.keys import All, AnyOf, Compare
from mhc_inductor.routing.masks.masks import Masks
from mhc_inductor.routing.operators.selection.intervals import Judge

LOWEST = -1e9
"""The largest finite fill that counts as a mask, other than ``finfo.min`` of the scores' dtype."""
_LOST = 32.0  # an added fill must swallow, by rounding, all scores of up to this magnitude
_UNKNOWN = (
    "a query may see no key, and routing does not know what it gives where all its scores are {}: mask with -inf, or "
    'compile with the option "mhc_inductor.empty_rows": "zero"'
)


@dataclasses.dataclass(frozen=True)
class Fill:
    """The value of a masked score: ``value``, or the score plus ``value`` if ``added``.

    ``low``: when it was made, before any scaling, the value was low enough to count as a mask in ``dtype``.
    """

    value: float
    added: bool
    low: bool
    dtype: torch.dtype


def _fill(value: float, added: bool, dtype: torch.dtype) -> Fill:
    """Returns a fill, rounded to ``dtype``."""
    value = rounded(value, dtype)
    return Fill(value, added, value <= max(LOWEST, torch.finfo(dtype).min), dtype)


class Rows(enum.Enum):
    """What the formula gives for a query without a visible key, in words for the report."""

    SEEN = "every query sees a key"
    ZERO = "rows without keys give 0"
    ZERO_SCORES = "rows without keys give 0, and gradients of NaN to q and k"
    ZERO_MIXED = "rows without keys give 0, and gradients of NaN to q and some keys"
    NAN = "rows without keys give NaN"
    NAN_SCORES = "rows without keys give NaN, and gradients of NaN to q and k"
    MEAN = "rows without keys give the mean of V"
    MEAN_SCORES = "rows without keys give the mean of V, with gradients to q and k"
    MEAN_SUMMED = "rows without keys give the mean of V, with the gradients of a sum"


class Fills:
    """The values that masked scores of one attention can have.

    ``safe``: the softmax itself gives 0 in rows of -inf, and no gradients. ``no_nan``: the model sets NaN weights to 0
    later, which leaves the softmax's gradients. ``guarded``: it sets finite weights of rows without a visible key to 0.
    ``call``: what PyTorch runs for the one call inside which scores and mask meet, if they do. ``by_kernel``: what
    rows without keys give depends on the kernel that PyTorch chooses for it. ``bare``: as in :class:`.weights.Written`.
    """

    def __init__(self, call: Value | None = None) -> None:
        self.found: frozenset[Fill] = frozenset()
        self.call = call
        self.safe = call is not None
        self.no_nan = self.guarded = self.by_kernel = self.bare = False

    def filled(self, value: float, dtype: torch.dtype) -> None:
        """Records a ``masked_fill`` with ``value``."""
        self.found |= {_fill(value, False, dtype)}

    def added(self, values: Iterable[float], dtype: torch.dtype) -> None:
        """Records an added mask with these values. Raises Unsupported if there are too many fills."""
        values = [v for v in values if v]
        sums = {(f.value + v, f.added) for f in self.found for v in values} | {(v, True) for v in values}
        self.found |= {_fill(v, added, dtype) for v, added in sums}
        if len(self.found) > TOO_MANY:
            raise Unsupported

    def moved(self, by: float, plus: float, dtype: torch.dtype) -> None:
        """Records that all scores are multiplied by ``by``, and that ``plus`` is added to them."""
        moved = {dataclasses.replace(f, value=rounded(f.value * by + plus, dtype)) for f in self.found}
        self.found = frozenset(moved)

    def check(self, where: Value) -> None:
        """Raises Mismatch if a fill is too high to hide a key."""
        for f in sorted(self.found, key=lambda f: -f.value):
            if not (f.value <= -1e4 and f.low):
                what = f"lowered by {-f.value:g}" if f.added else f"set to {f.value:g}"
                expected = f"expected -inf or torch.finfo({f.dtype}).min, which no score reaches"
                raise Mismatch(f"scores of other keys are {what}; {expected}", where)

    @property
    def zero(self) -> Rows | None:
        """Returns how the formula gives 0 in a row without a visible key, None if it gives something else."""
        infinite = {f for f in self.found if f.value == -math.inf}
        if (infinite and not (self.no_nan or self.safe)) or (infinite != self.found and not self.guarded):
            return None
        if self.safe or not any(f.added for f in infinite):
            return Rows.ZERO
        return Rows.ZERO_SCORES if len({(f.value, f.added) for f in self.found}) == 1 else Rows.ZERO_MIXED

    def rows(self, where: Value) -> Rows:
        """Returns what a row without a visible key gives. Raises Mismatch if that depends on more than V."""
        kinds = sorted({(f.value, f.added) for f in self.found})
        said = " and ".join(f"a score plus {value:g}" if added else f"{value:g}" for value, added in kinds)
        unknown = Mismatch(_UNKNOWN.format(said), where)
        if len(kinds) != 1:
            raise unknown
        only = max(self.found, key=lambda f: torch.finfo(f.dtype).bits)
        if only.value == -math.inf:
            return Rows.NAN_SCORES if only.added else Rows.NAN
        if not only.added:
            return Rows.MEAN
        mean, dtype = Rows.MEAN_SCORES, only.dtype
        if self.call is not None:
            self.by_kernel, kernel, dtype = True, self.call.func, torch.promote_types(dtype, torch.float32)
            other = kernel is None or (kernel not in _KERNELS and "scaled_dot_product" in kernel.__name__)
            if other or only.dtype is not self.call.dtype:  # autocast rounds the mask first
                raise unknown
            if _KERNELS.get(kernel) and rounded(only.value * math.log2(math.e), dtype) == -math.inf:
                return Rows.ZERO
            mean = Rows.MEAN_SUMMED if kernel in _KERNELS else mean
        if spacing(only.value, dtype) / 2 < _LOST:
            raise unknown
        return mean


_KERNELS = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: False,
    aten._scaled_dot_product_efficient_attention.default: True,
    aten._scaled_dot_product_cudnn_attention.default: True,
}
"""Kernels whose backward takes every weight of a row without keys as 1, and whether they compute powers of 2.

Those multiply scores and mask by log2(e) first, which makes -inf of the lowest numbers of fp32 and bf16.
"""


def seen_by_all(keys: AnyOf, t: Key, masks: Masks) -> bool:
    """Checks whether, at all values of the other variables, ``keys`` holds for some key ``t``.

    Such a key is the query's own position, a first block, or the best one by a score.
    """
    return any(_not_empty(conj, t, masks) or _top(conj, t, masks) for conj in keys)


def _not_empty(conj: All, t: Key, masks: Masks) -> bool:
    """Checks whether ``conj`` says only ``low <= t < high``, with low < high at all positions."""
    with contextlib.suppress(Unsupported):
        one, *others = Judge(masks, t).interval(conj)
        lows, highs = [number(0), *one.lowers], [of_size(t.size), *one.uppers]
        if not (others or one.conditions or one.keyed or any(x.data() for x in (*lows, *highs))):
            return all(at_least_zero(high.minus(low).shifted(-1)) for low in lows for high in highs)
    return False


def _top(conj: All, t: Key, masks: Masks) -> bool:
    """Checks whether ``t`` is a ``topk`` pick by scores that are lowest at the keys that ``conj`` excludes."""
    picks = [x for x in conj.literals if isinstance(x, Compare) and x.value.data()]
    if len(picks) != 1 or len(conj.bound) != 1 or picks[0].kind != "eq":
        return False
    (data,) = picks[0].value.data()
    value = data.ref.value
    same = picks[0].value in (atom(t).minus(atom(data)), atom(data).minus(atom(t)))
    wanted = conj.literals - {picks[0]}
    if not same or value.func not in PICKS or value.out != 1 or not conj.bound[0].size.factor:
        return False
    if not wanted:
        return True  # every pick is visible, and there is one
    if value.func is not aten.topk.default:
        return False
    scores, k, *rest = value.args
    largest = rest[1] if len(rest) > 1 else value.kwargs.get("largest", True)
    last = not rest or rest[0] in (-1, len(value.shape) - 1)
    if not largest or not last or not isinstance(k, int):
        return False
    if conj.bound[0] not in data.ref.index[-1].variables():
        return False
    ref = Ref(scores, (*data.ref.index[:-1], var(t)))
    return any(wanted <= c.literals and _not_empty(c, t, masks) for c in _unmasked_scores(ref, masks))


def _unmasked_scores(ref: Ref, masks: Masks) -> AnyOf:
    """Returns the keys whose scores are not lowered by the last mask on them.

    Returns an empty list unless that mask is added or filled in, with values of at most :data:`LOWEST`.
    """
    value, args = ref.value, ref.value.args
    with contextlib.suppress(Unsupported, DynamicWidth, Mismatch):
        if value.func in ADD and len(args) == 2 and not value.kwargs:
            for a in args:
                with contextlib.suppress(Unsupported):
                    if constant_of(a) is None and max((v for v in masks.possible(a) if v), default=0.0) <= LOWEST:
                        return masks.additive(operand(a, ref))
        if (filled := filling(value)) is not None:
            mask, want, _, given = filled
            fill = constant_of(given)
            if fill is not None and fill <= LOWEST:
                return masks.truth(operand(mask, ref), want)
    return []
