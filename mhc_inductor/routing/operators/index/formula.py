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
from mhc_inductor.routing.graph.gates import by_number, limits
from mhc_inductor.routing.graph.index import ONE, Unsupported, Var
from mhc_inductor.routing.graph.linear import Key, variables_of
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.elements import ADD, MULTIPLY, SUB, constant_of, filling, inner
from mhc_inductor.routing.masks.operands import DIVIDE, dot, has_product, keeps_16_bits, nearest

EXPECTED = "expected sum over heads of w * relu(scale * q @ k), masks, and topk"
NEAR = {
    "scores": f"the scores are computed in another way, by {{}}; {EXPECTED}",
    "keys": f"heads or queries have keys of their own; {EXPECTED}",
    "mask": "the scores of hidden keys are {}; expected -inf, or the dtype's least number for all, from a bool mask or one "
    "that is computed in the same graph",
    "choice": f"the keys are not chosen as the largest scores along the last dim, for all queries at once: {{}}; {EXPECTED}",
}
"""What is said of each quantity of the formula where it is another one; the braces stand for what was found."""
_MAXIMA = (aten.amax.default, aten.max.dim)
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
        q, k = (right, left) if keyed[0] else (left, right)
        feature = [v for v in bound if v.size != ONE]
        if keyed[0] == keyed[1] or len(feature) > 1:
            raise other_scores(inside.value)
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
        if own[0] == own[1]:
            raise self._unlike(ref)  # such as heads that are added one by one
        scores, mask = (a, b) if own[0] else (b, a)
        if subtracted:
            raise Mismatch(NEAR["mask"].format("lowered by a subtraction"), ref.value) if own[0] else Unrelated
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
                if not any(self._keyed(x) and has_relu(x.value) for x in (left, right)):
                    raise self._unlike(ref)
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
        near = self.heads or ref.value.func in _MAXIMA or has_relu(self.scores.value)
        return other_scores(ref.value) if near and has_product(ref.value) else Unrelated()

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
        raise self._unlike(ref)


def other_scores(value: Value) -> Mismatch:
    """Returns that the scores are not those of an indexer, because of the op that computes ``value``."""
    return Mismatch(NEAR["scores"].format(value.func.__name__.partition(".")[0]), value)


def _finite(x: float) -> float:
    if not math.isfinite(x) or x == 0.0:
        raise Unsupported
    return x


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


def has_relu(value: Value) -> bool:
    """Checks whether a relu is among what computes ``value``, before any product below it."""
    return nearest(value, _is_relu) is not None
