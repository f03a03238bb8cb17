# SPDX-License-Identifier: Apache-2.0
"""Evaluates ops that put elements of tensors, or constants, in places that comparisons describe.

These are where, masked_fill, tril, triu, scatter, assignments to indices, pad, cat and gather.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mhc_inductor.routing.graph.expressions import Ref, _dim, aten, broadcast, joined
from mhc_inductor.routing.graph.index import ONE, Index, Size, Unsupported, Var, const, var
from mhc_inductor.routing.graph.linear import Key, Linear, atom, number, of_index, of_scalar, of_size, to_index
from mhc_inductor.routing.graph.values import Value, imagined
from mhc_inductor.routing.masks.elements import FILLS, constant_of, filling, kept, keyed, operand, rounded
from mhc_inductor.routing.masks.keys import FALSE, TRUE, All, AnyOf, Compare, Literal, both, compared, either

if TYPE_CHECKING:
    from mhc_inductor.routing.masks.masks import Masks

TRIANGLES = (aten.tril.default, aten.triu.default)
SCATTERS = (aten.scatter.value, aten.scatter.src)
PUTS = (aten.index_put.default, aten._unsafe_index_put.default)
Wanted = TypeVar("Wanted")
"""What an element is to be: a truth value, or one of some numbers."""
GATHERS = (aten.gather.default, aten.index_select.default, aten.index.Tensor, aten._unsafe_index.Tensor)


class Placed:
    """Follows elements of masks back to the operands that they come from."""

    def __init__(self, masks: Masks) -> None:
        self.masks = masks

    def structured(self, ref: Ref, want: Wanted, of: Callable[[Ref, Wanted], AnyOf]) -> AnyOf | None:
        """Returns when ``ref``, an element of the result of such an op, is ``want``; None for other ops.

        ``of`` evaluates an element of an operand. Raises Unsupported.
        """
        value, func = ref.value, ref.value.func
        if (filled := filling(value)) is not None:
            mask, shown, x, fill = filled
            x = kept(value) if func in FILLS else x
            a, b = (of(_part(y, ref), want) for y in ((x, fill) if shown else (fill, x)))
            return self._either_way(mask, a, b, ref)
        if func in SCATTERS or func in PUTS:
            return self._written(ref, want, of)
        cases = self._cases(ref)
        return None if cases is None else either(*(both(when, of(part, want)) for when, part in cases))

    def _cases(self, ref: Ref) -> Iterable[tuple[AnyOf, Ref]] | None:
        """Returns the elements of operands that an element may be, and when it is which; None for other ops."""
        func = ref.value.func
        if func in TRIANGLES:
            return self._triangle(ref)
        if func is aten.constant_pad_nd.default:
            return _padded(ref)
        if func is aten.cat.default:
            return pieces_of(ref.index, *joined(ref.value))
        gathered = self._gathered(ref)
        return None if gathered is None else [gathered]

    def _written(self, ref: Ref, want: Wanted, of: Callable[[Ref, Wanted], AnyOf]) -> AnyOf:
        """Evaluates a scatter of a constant, or an assignment of one to indices."""
        value = ref.value
        scatters = value.func in SCATTERS
        x, known = value.args[0], constant_of(value.args[3 if scatters else 2])
        if known is None or (not scatters and any(value.args[3:4])):
            raise Unsupported
        hit = self.hits(ref, *value.args[1:3]) if scatters else None
        if of(filled(known, value), want) == TRUE:
            return either(of(Ref(x, ref.index), want), self._put(ref, value.args[1]) if hit is None else hit)
        if of(Ref(x, ref.index), want) == FALSE:
            return FALSE
        self.masks.note(ref, hit or FALSE)
        raise Unsupported

    def _either_way(self, when: Any, a: AnyOf, b: AnyOf, ref: Ref) -> AnyOf:
        """Returns ``a`` where ``when`` holds, else ``b``."""
        yes = both(self.masks.side(when, ref, True), a) if a else FALSE
        if not b:
            return yes
        # Where ``a`` always holds, ``when or b`` needs no ``not when``.
        return either(yes, b if a == TRUE else both(self.masks.side(when, ref, False), b))

    def _triangle(self, ref: Ref) -> list[tuple[AnyOf, Ref]]:
        x, *rest = ref.value.args
        diagonal = of_scalar(rest[0] if rest else 0, self.masks.fixed)
        ahead = of_index(ref.index[-1]).minus(of_index(ref.index[-2])).minus(diagonal)
        kept, left = ("le", "gt") if ref.value.func is aten.tril.default else ("ge", "lt")
        return [
            (compared(kept, ahead, number(0)), Ref(x, ref.index)),
            (compared(left, ahead, number(0)), filled(0.0, ref.value)),
        ]

    def hits(self, ref: Ref, d: int, index: Value) -> AnyOf:
        """Returns when a scatter along ``d`` at ``index`` writes the element ``ref``. Raises Unsupported."""
        d = _dim(ref.value, d)
        for k, (a, b) in enumerate(zip(index.shape, ref.value.shape, strict=True)):
            if k != d and a != b:
                self._assume(a, b)
        j = Var(index.shape[d])
        place = self.masks.whole(Ref(index, (*ref.index[:d], var(j), *ref.index[d + 1 :])))
        if place.data():
            self.masks.indices.take(index, ref.value.shape[d], False, self.masks.whole)
        found = compared("eq", place, of_index(ref.index[d]))
        return [All(c.literals, (*c.bound, j)) for c in found]

    def _assume(self, a: Size, b: Size) -> None:
        """Assumes that two symbols are the same size if their present values are equal; the rewrite guards it.

        Raises Unsupported if they differ, or if a size is not a single symbol.
        """
        if not all(s.factor == 1 and len(s.symbols) == 1 for s in (a, b)):
            raise Unsupported
        now = {self.masks.hints.get(s.symbols[0]) for s in (a, b)}
        if None in now or len(now) != 1:
            raise Unsupported
        self.masks.equal.add(frozenset({a, b}))

    def along(self, index: Value, x: Value) -> None:
        """Assumes that a gather takes all of ``x`` along dims that have another symbol for the same size.

        The indices of a gather may have fewer elements there, so PyTorch itself says nothing of them.
        """
        for a, b in zip(index.shape, x.shape, strict=True):
            if a != b:
                with contextlib.suppress(Unsupported):
                    self._assume(a, b)

    def _put(self, ref: Ref, indices: Sequence[Any]) -> AnyOf:
        """Returns when ``x[indices] = ...`` writes this element."""
        given = [i for i in indices if i is not None]
        if any(i.dtype is torch.bool for i in given):
            raise Unsupported
        rank = max(len(i.shape) for i in given)
        shape = [ONE] * rank
        for i in given:
            for k, size in enumerate(i.shape):
                if size != ONE:
                    shape[rank - len(i.shape) + k] = size
        bound = [Var(s) for s in shape]
        places = tuple(var(v) for v in bound)
        total = TRUE
        for d, i in enumerate(indices):
            if i is None:
                continue
            place = self.masks.whole(broadcast(i, places), ref.value.shape[d])
            if place.data():
                self.masks.indices.take(i, ref.value.shape[d], True, self.masks.whole)
            total = both(total, compared("eq", place, of_index(ref.index[d])))
        return [All(c.literals, (*c.bound, *(v for v in bound if v.size != ONE))) for c in total]

    def _gathered(self, ref: Ref) -> tuple[AnyOf, Ref] | None:
        """Returns the element that a gather reads, after the conditions on the variables that stand for its place.

        Returns None for other ops and for elements that do not depend on the key.
        """
        if ref.value.func not in GATHERS or not keyed(ref):
            return None
        more: dict[Var, Literal] = {}

        def place(at: Ref, x: Value, d: int, wraps: bool) -> Index:
            return self._place(at, x.shape[d], wraps, more)

        below = looked_up(ref, place)
        return None if below is None else ([All(frozenset(more.values()), tuple(more))], below)

    def _place(self, ref: Ref, size: Size, wraps: bool, more: dict[Var, Literal]) -> Index:
        """Returns a whole number as an index; if it is not one, a new variable with a condition in ``more``."""
        at = self.masks.whole(ref, size if wraps else None)
        if at.data():
            self.masks.indices.take(ref.value, size, wraps, self.masks.whole)
        index = to_index(at)
        if index is not None:
            return index
        v = Key(size)
        more[v] = Compare("eq", atom(v).minus(at))
        return var(v)


def looked_up(ref: Ref, place: Callable[[Ref, Value, int, bool], Index | None]) -> Ref | None:
    """Returns the element that a call of :data:`GATHERS` reads, None if a place or the form of the call is not known.

    ``place`` returns an element of an index tensor as an index of a dim of a tensor. It gets the element, the tensor, the
    dim, and whether negative indices count from the end.
    """
    func, args = ref.value.func, ref.value.args
    x, index = args[0], list(ref.index)
    if func in (aten.gather.default, aten.index_select.default):
        d, places = _dim(x, args[1]), args[2]
        at = ref.index if func is aten.gather.default else (ref.index[d],) if places.shape else ()
        found = place(Ref(places, at), x, d, False)
        return None if found is None else Ref(x, (*index[:d], found, *index[d + 1 :]))
    given = {d: i for d, i in enumerate(args[1]) if i is not None}
    if any(i.dtype in (torch.bool, torch.uint8) for i in given.values()):
        return None
    rank = max(len(i.shape) for i in given.values())
    # The dims of adjacent index tensors replace the dims that they index; those of others come first.
    first = min(given) if max(given) - min(given) + 1 == len(given) else 0
    spread, rest = ref.index[first : first + rank], [*ref.index[:first], *ref.index[first + rank :]]
    index = []
    for d in range(len(x.shape)):
        if d not in given:
            index.append(rest.pop(0))
            continue
        found = place(broadcast(given[d], spread), x, d, True)
        if found is None:
            return None
        index.append(found)
    return Ref(x, tuple(index))


def _part(a: Any, ref: Ref) -> Ref:
    """Returns the element of an operand, a number or a tensor, that is used for ``ref``."""
    known = constant_of(a)
    return operand(a, ref) if known is None else filled(known, ref.value)


def _padded(ref: Ref) -> list[tuple[AnyOf, Ref]]:
    """Returns the element that is padded and the fill, and when an element is which."""
    x, pads, *rest = ref.value.args
    fill = constant_of(rest[0] if rest else 0.0)
    if fill is None:
        raise Unsupported
    within, index = TRUE, list(ref.index)
    outside: list[AnyOf] = []
    for k in range(len(pads) // 2):
        d = len(index) - 1 - k
        before, after = pads[2 * k : 2 * k + 2]
        if not isinstance(before, int) or not isinstance(after, int) or before < 0 or after < 0:
            raise Unsupported
        at = of_index(index[d])
        if before:
            within = both(within, compared("ge", at, number(before)))
            outside.append(compared("lt", at, number(before)))
            index[d] = index[d].plus(const(-before))
        if after:
            end = of_size(x.shape[d]).shifted(before)
            within = both(within, compared("lt", at, end))
            outside.append(compared("ge", at, end))
    return [(within, Ref(x, tuple(index))), (either(*outside), filled(fill, ref.value))]


def filled(known: float, like: Value) -> Ref:
    """Returns an element of a tensor that is ``known`` everywhere, in the dtype of ``like``."""
    return Ref(imagined(aten.scalar_tensor.default, (rounded(known, like.dtype),), (), like.dtype), ())


def pieces_of(index: tuple[Index, ...], d: int, pieces: Sequence[Value]) -> Iterator[tuple[AnyOf, Ref]]:
    """Yields the element ``index`` of the concatenation of ``pieces`` along ``d`` in each of them, and when it is there."""
    at, start = of_index(index[d]), number(0)
    for piece in pieces:
        end = start.plus(of_size(piece.shape[d]))
        here = both(compared("ge", at, start), compared("lt", at, end))
        place = const(0) if piece.shape[d] == ONE else moved(index[d], start)
        yield here, Ref(piece, (*index[:d], place, *index[d + 1 :]))
        start = end


def moved(index: Index, by: Linear) -> Index:
    """Returns ``index`` minus a number or a size. Raises Unsupported if ``by`` is neither."""
    if by.terms:
        raise Unsupported
    for symbols, c in by.constant:
        index = index.plus(Index({None: Size(-c, symbols)}))
    return index
