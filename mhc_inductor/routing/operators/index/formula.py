# SPDX-License-Identifier: Apache-2.0
"""Recognises index scores, ``sum_h w[h] * relu(scale * <q[h], k>)`` with masks on them, element by element.

The walk starts at the scores that ``topk`` reads and follows the side that depends on the key: masks first, then the
weighted sum over the heads, the relu, the scale, and the product of q and k.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from mhc_inductor.routing.graph.expressions import Ref, _broadcast, aten, contraction, operands, reduction
from mhc_inductor.routing.graph.gates import limits
from mhc_inductor.routing.graph.index import ONE, Unsupported, Var
from mhc_inductor.routing.graph.linear import Key, variables_of
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.elements import ADD, MULTIPLY, SHOWN, SUB, behind_ops, constant_of, filling, inner
from mhc_inductor.routing.masks.operands import (
    DIVIDE,
    by_number,
    dot,
    has_product,
    is_parameter,
    keeps_16_bits,
    nearest,
)

EXPECTED = "expected sum over heads of w * relu(scale * q @ k), masks, and topk"
_LONGEST = 64  # steps between topk and the relu


class Unrelated(Exception):
    """Raised for scores that do not resemble those of an indexer."""


@dataclasses.dataclass(frozen=True)
class Hidden:
    """One step that hides keys.

    ``mask``: its element at the query and key. A boolean mask shows a key where it is ``want``; an ``added`` one where
    it is 0. ``fill``: what the score of a hidden key is set to, None for an added mask. ``dtype``: that of the result.
    """

    mask: Ref
    want: bool
    added: bool
    fill: float | None
    dtype: torch.dtype
    at: Value


@dataclasses.dataclass
class Formula:
    """Index scores at one query and the key ``t``.

    ``weights``: the factors of w. ``factor``: the constant outside the relu; ``scale``: the one inside. ``heads``:
    the variables summed over. ``feature``: the variable of the product. ``met``: the scores on the way. ``unmasked``:
    the element of the scores before all masks. ``moved``: whether a number is added to the scores.
    """

    t: Key
    q: Ref
    k: Ref
    feature: list[Var]
    heads: list[Var]
    weights: list[Ref]
    factor: float
    scale: float
    hidden: list[Hidden]
    met: list[Value]
    unmasked: Ref
    moved: bool


def recognised(scores: Ref, t: Key) -> Formula:
    """Returns the formula of an element of the scores. Raises Mismatch, Unrelated, Unsupported and DynamicWidth."""
    return _Walk(scores, t).formula()


class _Walk:
    """A walk from masked scores to the product of q and k."""

    def __init__(self, scores: Ref, t: Key) -> None:
        self.scores, self.t = scores, t
        self.factor = 1.0
        self.heads: list[Var] = []
        self.weights: list[Ref] = []
        self.hidden: list[Hidden] = []
        self.met: list[Value] = []
        self.moved = False

    def formula(self) -> Formula:
        """Returns the formula."""
        unmasked = self._unmasked(self.scores)
        inside = self._weighted(unmasked)
        scale, (left, right, bound) = self._scaled(inside)
        keyed = [self._keyed(x) for x in (left, right)]
        if keyed[0] == keyed[1]:
            raise Mismatch(f"both factors of the product inside the relu depend on the key; {EXPECTED}", inside.value)
        q, k = (right, left) if keyed[0] else (left, right)
        feature = [v for v in bound if v.size != ONE]
        if len(feature) > 1:
            raise Mismatch(f"the product inside the relu is summed over several dims; {EXPECTED}", inside.value)
        sums = self.heads, self.weights, self.factor, scale
        return Formula(self.t, q, k, feature, *sums, self.hidden, list(self.met), unmasked, self.moved)

    def _keyed(self, ref: Ref) -> bool:
        return self.t in variables_of(ref)

    def _through(self, ref: Ref) -> Ref:
        """Returns the element behind views, casts and ``detach``."""
        while True:
            self.met.append(ref.value)
            below = inner(ref)
            if below is None:
                return ref
            if not (below.value.dtype.is_floating_point and keeps_16_bits(ref, below)):
                raise Unrelated
            ref = below

    # --- masks ---

    def _unmasked(self, ref: Ref) -> Ref:
        """Returns the scores before masks, positive factors and shifts, which change no choice but by hiding keys."""
        while True:
            masked, ref = ref, self._through(ref)
            func, args = ref.value.func, ref.value.args
            found: Ref | None = None
            if (filled := filling(ref.value)) is not None:
                found = self._filled(ref, *filled)
            elif func in (*ADD, *SUB) and len(args) == 2 and not ref.value.kwargs:
                found = self._summed(ref)
            if found is None:
                return masked
            ref = found

    def _filled(self, ref: Ref, mask: Value, want: bool, scores: Any, given: Any) -> Ref | None:
        fill = constant_of(given)
        if fill is None or not isinstance(scores, Value):
            return None
        self.hidden.append(Hidden(_broadcast(mask, ref), want, False, fill, ref.value.dtype, ref.value))
        return _broadcast(scores, ref)

    def _summed(self, ref: Ref) -> Ref | None:
        """Returns the scores before a mask or a number was added to them; None if the sum is something else."""
        a, b = ref.value.args
        subtracted = ref.value.func in SUB
        if constant_of(b) is not None and isinstance(a, Value) and math.isfinite(constant_of(b) or 0.0):
            return self._moved(a, ref)
        if constant_of(a) is not None and isinstance(b, Value) and not subtracted:
            return self._moved(b, ref)
        if not isinstance(a, Value) or not isinstance(b, Value):
            return None
        own = [has_product(x) for x in (a, b)]
        if all(own):
            if has_relu(ref.value):
                raise Mismatch(f"the scores of several heads are added one by one, or to others; {EXPECTED}", ref.value)
            raise Unrelated
        if not any(own) or (subtracted and own[1]):
            raise Unrelated
        scores, mask = (a, b) if own[0] else (b, a)
        if subtracted:
            raise Mismatch("a mask is subtracted from the scores; expected one added to them", ref.value)
        self.hidden.append(Hidden(_broadcast(mask, ref), True, True, None, ref.value.dtype, ref.value))
        return _broadcast(scores, ref)

    def _moved(self, scores: Value, ref: Ref) -> Ref:
        self.moved = True
        return _broadcast(scores, ref)

    # --- the weighted sum over heads ---

    def _weighted(self, ref: Ref) -> Ref:
        """Returns the argument of the relu. Raises Mismatch or Unrelated where there is none."""
        for _ in range(_LONGEST):
            ref = self._through(ref)
            if _is_relu(ref.value):
                inside = _broadcast(ref.value.args[0], ref)
                self.met.append(inside.value)
                return inside
            if (reduced := reduction(ref)) is not None:
                ref, bound, scale = reduced
                self.factor *= scale
                self.heads += [v for v in bound if v.size != ONE]
            elif (contracted := contraction(ref)) is not None:
                left, right, v = contracted
                if not any(self._keyed(x) and (_is_relu(peeled(x).value) or has_relu(x.value)) for x in (left, right)):
                    raise self._bare(ref, left, right)
                self.heads += [v] if v.size != ONE else []
                ref = self._side(ref, left, right)
            elif ref.value.func in (*MULTIPLY, *DIVIDE, aten.neg.default):
                ref = self._factor(ref)
            else:
                break
        raise self._unlike(ref)

    def _side(self, ref: Ref, left: Ref, right: Ref) -> Ref:
        """Returns the factor that depends on the key and keeps the other as a part of w."""
        keyed = [self._keyed(x) for x in (left, right)]
        if keyed[0] == keyed[1]:
            raise self._unlike(ref)
        self.weights.append(right if keyed[0] else left)
        return left if keyed[0] else right

    def _factor(self, ref: Ref) -> Ref:
        """Returns the factor that depends on the key; numbers go into :attr:`factor`, the rest into the weights."""
        if (multiple := by_number(ref)) is not None:
            factor, below = multiple
            self.factor *= _finite(factor)
            return below
        if len(ref.value.args) > 2 or ref.value.kwargs:
            raise Unrelated
        a, b = operands(ref)
        if not isinstance(a, Ref) or not isinstance(b, Ref):
            raise Unrelated
        if ref.value.func in DIVIDE:
            raise self._unlike(ref)
        return self._side(ref, a, b)

    def _unlike(self, ref: Ref) -> Exception:
        """Returns why the scores are not those of an indexer, as Mismatch if they resemble it, else as Unrelated."""
        below = nearest(ref.value, lambda v: v.func in _CHANGES)
        reason = _CHANGES[below.func] if below is not None else ""
        if below is None or not (has_relu(ref.value) or reason == _MAXIMUM) or not has_product(below):
            if (by_hand := nearest(ref.value, _is_comparison)) is not None and has_product(by_hand):
                return Mismatch(f"{_BY_HAND}; {EXPECTED}", by_hand)
            if not has_relu(self.scores.value) or not has_product(self.scores.value):
                return Unrelated()
            reason, below = "what is between the relu and topk is not a weighted sum over heads", ref.value
        return Mismatch(f"{reason}; {EXPECTED}", below)

    def _bare(self, ref: Ref, left: Ref, right: Ref) -> Exception:
        """Returns why a product without a relu is not that of an indexer."""
        if not self.heads or _parameter(left) or _parameter(right):
            return Unrelated()
        return Mismatch(f"the products of q and k have no relu; {EXPECTED}", ref.value)

    # --- inside the relu ---

    def _scaled(self, ref: Ref) -> tuple[float, tuple[Ref, Ref, list[Var]]]:
        """Returns the scale and the product inside the relu."""
        scale = 1.0
        while True:
            ref = self._through(ref)
            found = dot(ref)
            if found is not None:
                return scale, found
            multiple = by_number(ref)
            if multiple is None:
                break
            factor, ref = multiple
            scale *= _finite(factor)
        if not has_product(ref.value):
            raise Unrelated
        what = _CHANGES.get(ref.value.func) or "what is inside the relu is not a number times q @ k"
        raise Mismatch(f"{what}; {EXPECTED}", ref.value)


def _finite(x: float) -> float:
    if not math.isfinite(x) or x == 0.0:
        raise Unsupported
    return x


def peeled(ref: Ref) -> Ref:
    """Returns the element behind views, casts and ``detach``."""
    while (below := inner(ref)) is not None:
        ref = below
    return ref


def _parameter(ref: Ref) -> bool:
    return is_parameter(peeled(ref).value)


def _is_relu(value: Value) -> bool:
    """Checks whether a value is the relu, in any spelling, of its first argument."""
    func, args = value.func, value.args
    if func is aten.relu.default:
        return True
    if func is aten.threshold.default:
        return [*map(constant_of, args[1:3])] == [0.0, 0.0]
    if func in (aten.clamp.default, aten.clamp_min.default):
        low, high = limits(value)
        return high is None and low is not None and constant_of(low) == 0.0
    return func is aten.maximum.default and constant_of(args[1]) == 0.0


def _is_comparison(value: Value) -> bool:
    """Checks whether a value is a relu written with a comparison: where(x > 0, x, 0), or x * (x > 0)."""
    if value.func is aten.where.self:
        return constant_of(value.args[2]) == 0.0 and _is_positive(value.args[0], value.args[1])
    sides = value.args[:2] if value.func in MULTIPLY else ()
    return any(_is_positive(a, b) for a, b in (sides, sides[::-1]) if isinstance(a, Value)) if sides else False


def _is_positive(value: Value, of: Any) -> bool:
    """Checks whether a value, or what it is cast from, is ``of > 0`` or ``of >= 0``."""
    value = behind_ops(value, SHOWN)
    return value.func in _ABOVE and value.args[0] is of and constant_of(value.args[1]) == 0.0


def has_relu(value: Value) -> bool:
    """Checks whether a relu is among what computes ``value``, before any product below it."""
    return nearest(value, _is_relu) is not None


_ABOVE = (aten.gt.Scalar, aten.ge.Scalar, aten.gt.Tensor, aten.ge.Tensor)
_BY_HAND = "the relu is written with a comparison, which gives other numbers for NaN and infinity"
_MAXIMUM = "the scores are a maximum, not a sum over heads"
_CHANGES = {
    aten.tanh.default: "the scores are capped by a tanh",
    aten.sigmoid.default: "the scores are put through a sigmoid",
    aten.amax.default: _MAXIMUM,
    aten.max.dim: _MAXIMUM,
    aten._softmax.default: "the scores are put through a softmax",
    aten.abs.default: "topk takes the largest magnitudes",
    aten.add.Tensor: "something is added to the scores",
    aten.sub.Tensor: "something is subtracted from the scores",
    aten.clamp.default: "the scores are clamped",
    aten.clamp_min.default: "the scores are clamped",
    aten.clamp_max.default: "the scores are clamped",
    aten.native_dropout.default: "the scores are dropped out",
    aten.pow.Tensor_Scalar: "the scores are raised to a power",
    aten.gelu.default: "the scores are put through a gelu",
    aten.silu.default: "the scores are put through a silu",
    aten.exp.default: "the scores are put through an exp",
}
"""Ops on scores that are no part of an indexer, in words."""
