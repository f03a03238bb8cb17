# SPDX-License-Identifier: Apache-2.0
"""The argument of a softmax: scaled products of q and k, and the masks on them."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from mhc_inductor.routing.graph.bounds import Steps
from mhc_inductor.routing.graph.expressions import Ref, _broadcast, aten, joined, step, whole
from mhc_inductor.routing.graph.index import ONE, DynamicWidth, Size, Unsupported, Var, const, product_of, var
from mhc_inductor.routing.graph.linear import Key, Linear, number, of_size, size_of_sum
from mhc_inductor.routing.graph.values import OUTSIDE, Value
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.elements import ADD, DETACH, FILLS, constant_of, filling, kept
from mhc_inductor.routing.masks.keys import All, AnyOf, KeyData, both, either
from mhc_inductor.routing.masks.masks import Masks
from mhc_inductor.routing.masks.operands import Scaled, dot, products
from mhc_inductor.routing.masks.scatters import pieces_of
from mhc_inductor.routing.operators.selection.data_masks import Layers
from mhc_inductor.routing.operators.selection.fills import Fills
from mhc_inductor.routing.operators.selection.matches import NotOurs
from mhc_inductor.routing.operators.selection.weights import over


class Scores:
    """Scores that are ``factor`` times the sum of products ``ref`` at the keys that :meth:`keys` returns.

    The masks met are appended to ``given``, and all values that have an element for each query and key to ``dense``.
    ``segments``: scores that are concatenated under the masks, each with masks of its own, and
    ``spans``, how many keys each has. With ``layers`` the op is to read the masks as data.
    """

    def __init__(
        self,
        ref: Ref,
        masks: Masks,
        dense: list[Value],
        given: list[Value],
        factor: float = 1.0,
        layers: Layers | None = None,
    ) -> None:
        self.masks = masks
        self.layers = layers
        self.factor = factor
        self.fills = Fills()
        self.given = given
        self.dense = dense
        self.sink: Ref | None = None
        self.shifted = False
        """Whether something was added to all scores of a row, which a softmax cancels and a logarithm of its sum does not."""
        self._parts: list[Callable[[], AnyOf]] = []
        self._steps: list[Callable[[], None]] = []
        self._pieces: list[tuple[AnyOf, Ref]] = []
        self.ref = ref
        self.products: list[tuple[float, Ref, Ref, list[Var]]] = []
        self.segments: list[Scores] = []
        self.spans: list[Size] = []
        negated = None
        while True:
            scaled = Scaled(self.ref)
            dense += scaled.met
            self.factor *= scaled.factor
            self._steps.append(functools.partial(self.fills.moved, scaled.factor, 0.0, scaled.narrowest))
            self.ref = scaled.end
            if (found := products(self.ref)) is not None:
                self.products = found[0]
                dense += found[1]
                break
            if not 0.0 < abs(self.factor) < math.inf:
                raise changed(self.ref.value)
            negated = self.ref.value if self.factor < 0.0 else negated
            below = self._unmasked(self.ref)
            if below is None:
                for keys, x in self._pieces:
                    inside = None if layers is None else layers.within(keys)
                    self.segments.append(Scores(x, masks, dense, given, self.factor, inside))
                self.products = [product for each in self.segments for product in each.products]
                self.shifted = self.shifted or any(each.shifted for each in self.segments)
                break
            self.ref = below
        if negated is not None:
            raise NotOurs(
                "masked scores are negated (softmin); expected a softmax of scale * q @ k, and masks", negated
            )
        dense.append(self.ref.value)

    def keys(self) -> AnyOf:
        """Returns which keys are visible, and sets :attr:`fills`. Raises Mismatch and Unsupported."""
        keys = functools.reduce(both, [part() for part in self._parts], [All()])
        if self.segments:
            parts = zip(self._pieces, self.segments, strict=True)
            keys = both(keys, either(*(both(here, each.keys()) for (here, _), each in parts)))
            self.fills.found = frozenset().union(*(each.fills.found for each in self.segments))
        for took in reversed(self._steps):
            took()
        return keys

    def _unmasked(self, ref: Ref) -> Ref | None:
        """Returns the scores before the last mask or constant was put on them; None if they are in segments.

        Raises NotOurs and Mismatch.
        """
        value, func, args = ref.value, ref.value.func, ref.value.args
        if (filled := filling(value)) is not None:
            return self._filled(ref, *filled)
        if not value.kwargs and len(args) == 2:  # no alpha, which scales the second operand
            if func in ADD and any(constant_of(a) is not None for a in args):
                return self._shifted(ref)
            if func is aten.sub.Tensor and _is_row_maximum(args[1], args[0], ref):
                self.shifted = True
                return _broadcast(args[0], ref)
            if func in (aten.add.Tensor, aten.sub.Tensor):
                return self._summed(ref)
        if func is aten.cat.default:
            return self._joined(ref)
        raise changed(value)

    def _filled(self, ref: Ref, mask: Value, want: bool, scores: Value, given: Any) -> Ref:
        """Returns the scores that stay where ``mask`` is ``want`` and are replaced by ``given`` elsewhere."""
        fill = constant_of(given)
        if fill is None or fill != fill:
            raise changed(ref.value)
        self.given.append(mask)
        if not self.factor * fill <= -1e4:
            raise Mismatch(f"scores of other keys are set to {self.factor * fill:g}; expected -inf", ref.value)
        self._steps.append(functools.partial(self.fills.filled, fill, ref.value.dtype))
        truth = self.masks.truth if self.layers is None else self.layers.filled
        self._parts.append(functools.partial(truth, _broadcast(mask, ref), want))
        return _broadcast(scores, ref)

    def _shifted(self, ref: Ref) -> Ref:
        """Returns the scores before a constant was added to all of them, which a softmax cancels."""
        a, b = ref.value.args
        known = constant_of(a) if constant_of(a) is not None else constant_of(b)
        if known is None or not abs(known) < 1e4:
            raise changed(ref.value)
        self.shifted = True
        self._steps.append(functools.partial(self.fills.moved, 1.0, known, ref.value.dtype))
        return _broadcast(a if constant_of(a) is None else b, ref)

    def _summed(self, ref: Ref) -> Ref:
        """Returns the scores before a mask was added to them."""
        sides = [_broadcast(a, ref) for a in ref.value.args if isinstance(a, Value)]
        own = [is_scores(side) for side in sides]
        sign = 1.0 if ref.value.func is aten.add.Tensor else -1.0
        if sum(own) != 1 or len(own) != 2 or (sign < 0.0 and own[1]):
            raise changed(ref.value)
        scores, mask = sides if own[0] else sides[::-1]
        self.given.append(mask.value)
        if self.layers is not None:
            self._parts.append(functools.partial(self.layers.added, mask, sign * self.factor))
        else:
            self._parts.append(functools.partial(self._added, mask, scores, sign * self.factor))
        self._steps.append(functools.partial(self._take_added, mask.value, sign, ref.value.dtype))
        return scores

    def _added(self, mask: Ref, scores: Ref, factor: float) -> AnyOf:
        """Returns which keys an added mask leaves visible. Raises Mismatch and Unsupported."""
        low = False
        with contextlib.suppress(Unsupported):
            low = max((factor * v for v in self.masks.possible(mask.value) if v), default=0.0) <= -1e4
        try:
            keys = self.masks.additive(mask)
            if low:
                return keys
            raise Unsupported
        except KeyData:
            raise
        except Unsupported:
            if not low and (self.masks.seen or selects(scores, self.masks)):
                raise Mismatch(
                    "the tensor added to the scores is not a mask: its values are not all 0 or at most -1e4", mask.value
                ) from None
            raise

    def _take_added(self, mask: Value, sign: float, dtype: torch.dtype) -> None:
        """Records the values of an added mask in :attr:`fills`, -inf for one that is read as data."""
        values = [-sign * math.inf]
        layers = None if self.fills.call is not None else self.layers  # what a call gives depends on the numbers
        with contextlib.suppress(*(() if layers is None else (Unsupported,))):
            if layers is None or layers.places:
                values = [*self.masks.possible(mask)]
        self.fills.added([sign * v for v in values], dtype)

    def _joined(self, ref: Ref) -> Ref | None:
        """Returns the scores in a concatenation of scores and one logit a row, and sets :attr:`sink` to that logit.

        Returns None if scores of several segments of keys are left. Raises NotOurs for any other concatenation.
        """
        d, pieces = joined(ref.value)
        at, last = ref.index[d], len(pieces) - 1
        width = product_of(v.size for v in at.variables())
        free = self.sink is None and not self._parts and self.factor == 1.0
        with contextlib.suppress(Unsupported):
            for begin, sink in ((0, None), *(((0, last), (1, 0)) if free else ())):
                kept = [x for k, x in enumerate(pieces) if k != sink]
                sizes = [x.shape[d] for x in kept]
                spans = size_of_sum(functools.reduce(Linear.plus, map(of_size, sizes), number(0))) == width
                if not spans or at.terms.get(None, Size(0)) != Size(begin):
                    continue
                if sink is not None:
                    if pieces[sink].shape[d] != ONE:
                        continue
                    self.sink = Ref(pieces[sink], (*ref.index[:d], const(0), *ref.index[d + 1 :]))
                found = [*pieces_of((*ref.index[:d], at.plus(const(-begin)), *ref.index[d + 1 :]), d, kept)]
                if len(kept) == 1:
                    return found[0][1]
                if all(isinstance(v, Key) for v in at.variables()) and all(is_scores(x) for _, x in found):
                    self._pieces, self.spans = found, sizes
                    return None
        below = step(ref)
        if below is not None:
            return below
        raise NotOurs(OTHER_LOGITS, ref.value)


OTHER_LOGITS = (
    "the softmax is over scores and other logits (a sink, more keys); expected scores, and at most one sink a head "
    "whose weight is cut off again"
)


def _is_row_maximum(value: Any, of: Value, ref: Ref) -> bool:
    """Checks whether ``value`` is the maximum of ``of`` over the keys; a softmax does not change if it is subtracted."""
    d = over(value, of, aten.amax.default, aten.max.dim, through=DETACH)
    keys = [k for k, i in enumerate(ref.index) if any(isinstance(v, Key) for v in i.variables())]
    return d is not None and (keys == [d] or (not keys and d == len(of.shape) - 1))


_CHANGES = {
    aten.tanh.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.native_dropout.default,
    aten.sigmoid.default,
    aten.relu.default,
    aten.rsub.Scalar,
    aten.rsub.Tensor,
}
"""Ops on scores that are not part of selection attention. Masks may be put on their results."""


def changed(value: Value) -> NotOurs:
    """Returns what is said of scores that something else than a mask or a constant changes."""
    unseen = value.func in (None, OUTSIDE)
    by = "a hook, or a step that routing cannot see through" if unseen else value.func.__name__.partition(".")[0]
    return NotOurs(f"the scores are changed by {by}; expected scale * q @ k, and masks", value)


def difference(scores: Value, dim: int) -> tuple[str, Value | None] | None:
    """Returns how scores differ from masked products of q and k, and the value where they do; None if they do not."""
    try:
        with contextlib.suppress(Unsupported, DynamicWidth):
            Scores(at_key(scores, dim), Masks({}, {}), [], [])
    except (NotOurs, Mismatch) as found:
        return found.reason, found.value
    return None


def at_key(value: Value, dim: int) -> Ref:
    """Returns an element of scores whose keys are in the dim ``dim``."""
    place = [var(Var(size)) for size in value.shape]
    place[dim] = var(Key(value.shape[dim]))
    return Ref(value, tuple(place))


def selects(scores: Ref, masks: Masks) -> bool:
    """Checks whether a mask of the scores selects keys from data."""
    other = Masks(masks.fixed, masks.hints)
    with contextlib.suppress(Mismatch, Unsupported, NotOurs):
        Scores(scores, other, [], []).keys()
    return bool(other.seen)


def is_scores(ref: Ref) -> bool:
    """Checks whether a sum of products is behind masks and scalings."""
    todo, seen, steps = [ref], set[Ref](), Steps("addends of the scores", ref.value)
    while todo:
        ref = Scaled(todo.pop()).end
        if ref in seen:
            continue
        seen.add(ref)
        steps.take()
        if dot(ref) is not None:
            return True
        todo += _parts(ref)
    return False


def _parts(ref: Ref) -> list[Ref]:
    """Returns the elements that may be the scores before a mask, a sum or another change."""
    func, args = ref.value.func, ref.value.args
    if func is aten.cat.default:
        return [*map(whole, args[0])]
    parts: tuple[Any, ...] = ()
    if (filled := filling(ref.value)) is not None:
        parts = (kept(ref.value) if func in FILLS else filled[2],)
    elif func in _CHANGES:
        parts = args[:1]
    elif func in (*ADD, aten.sub.Tensor):
        parts = args[:2]
    return [_broadcast(a, ref) for a in parts if isinstance(a, Value)]
