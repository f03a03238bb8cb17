# SPDX-License-Identifier: Apache-2.0
"""Attention over gathered keys: each query reads the keys that a list names, and its softmax is over the list's places.

A key that a list names twice counts twice, in the model and in the op. So nothing is proved of the indices but that they
lie inside K, and masks are read at the places as the model has them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

from mhc_inductor.routing.graph.bounds import remembered
from mhc_inductor.routing.graph.expressions import Ref, aten, joined
from mhc_inductor.routing.graph.gates import CLAMPS, limits
from mhc_inductor.routing.graph.index import ONE, DynamicWidth, Index, Part, Size, Unsupported, Var, const, var
from mhc_inductor.routing.graph.linear import (
    Datum,
    Floor,
    Key,
    Linear,
    at_least_zero,
    atom,
    number,
    of_scalar,
    of_size,
    placed,
    replaced,
    to_index,
    variables_of,
)
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.elements import constant_of, filling, operand
from mhc_inductor.routing.masks.index_checks import PICKS, picked_size
from mhc_inductor.routing.masks.keys import All, AnyOf, Compare, Literal
from mhc_inductor.routing.masks.masks import Masks
from mhc_inductor.routing.masks.operands import sources
from mhc_inductor.routing.masks.scatters import GATHERS, looked_up
from mhc_inductor.routing.operators.selection.digits import Cut, splits
from mhc_inductor.routing.operators.selection.matches import NotOurs

_OTHER = (
    "q meets keys, or weights meet values, that are gathered at indices which routing cannot tell to be equal; expected "
    "one tensor of indices for K and V"
)
_OUTSIDE = "the keys are gathered at indices that are not known to lie inside K"
_Range = tuple[Linear | None, Linear | None]
"""The smallest and the largest value of a number, None for one that is not known."""


def is_gathered(ref: Ref, places: Sequence[Var]) -> bool:
    """Checks whether an element of K or V, behind views and casts, is gathered at an index that depends on its place."""
    *_, last = sources(ref)
    moving: list[bool] = []

    def place(at: Ref, x: Value, d: int, wraps: bool) -> Index:
        moving.append(not variables_of(at).isdisjoint(places))
        return const(0)

    return last.ref.value.func in GATHERS and looked_up(last.ref, place) is not None and any(moving)


class Picks:
    """The lists of one attention over gathered keys; ``places`` are the digits of the place in a list.

    Where whole blocks of keys are gathered, the last digit is the place in a block, :attr:`inner`.
    """

    def __init__(self, masks: Masks, places: Sequence[Var]) -> None:
        self.masks = masks
        self.bound = tuple(places)
        self.places, self.last = set(places), places[-1]
        self.inner: Var | None = None
        self._found: tuple[Key, Linear] | None = None
        self._read: dict[tuple[Value, bool], Size] = {}
        """The tensors of indices that the model gathers at, with whether negative ones count from the end: what they index."""

    @property
    def t(self) -> Key:
        """Returns the key, an index of the tensor that keys are gathered from."""
        assert self._found is not None
        return self._found[0]

    def below(self, ref: Ref) -> Ref:
        """Returns the element that a gathered element of K or V is, at :attr:`t`. Raises NotOurs and Unsupported."""
        *_, last = sources(ref)
        found: list[tuple[Key, Linear]] = []

        def place(at: Ref, x: Value, d: int, wraps: bool) -> Index | None:
            entry = self._entry(at, x.shape[d] if wraps else None)
            if self.places.isdisjoint(entry.variables()):
                return to_index(self.masks.whole(at, x.shape[d] if wraps else None))
            row, entry = self._row(self._unwrapped(entry), x.shape[d])
            self._read[at.value, wraps] = x.shape[d]
            if row is None:
                found.append((Key(x.shape[d]), entry))
                return var(found[-1][0])
            per = x.shape[d].over(row.size)
            assert per is not None
            found.append((Key(per), entry))
            return var(row).times(per).plus(var(found[-1][0]))

        below = looked_up(last.ref, place) if last.ref.value.func in GATHERS else None
        if below is None or len(found) != 1:
            raise NotOurs
        key, entry = found[0]
        if left := self.places & variables_of(below):
            below, key, entry = self._whole(below, key, entry, left)
        if last.ref.value.func is aten.gather.default:
            self.masks.placed.along(last.ref.value.args[2], last.ref.value.args[0])
        if self._found is None:
            self._found = key, entry
        elif entry != self._found[1] or key.size != self.t.size:
            raise Mismatch(_OTHER, last.ref.value)
        return replaced(below, key, atom(self.t))

    def _whole(self, below: Ref, block: Key, entry: Linear, left: set[Var]) -> tuple[Ref, Key, Linear]:
        """Returns the element of a gathered block, its key and the key's number. Raises Cut, NotOurs and DynamicWidth.

        The block and the place in it, which must be dims of their own, are digits of the key.
        """
        parts = (a for i in below.index for a in i.atoms() if isinstance(a, Part))
        if cuts := [([root], by) for a in parts for root, by in splits(a) if root in self.places]:
            raise Cut(cuts)
        moving = [i for i in below.index if i.variables() & {block, self.last}]
        shared = entry.variables() <= self.places  # pages of a cache: all queries read the same blocks
        if shared or left != {self.last} or moving not in ([var(block), var(self.last)], [var(self.last), var(block)]):
            raise NotOurs
        self.inner, by = self.last, self.last.size
        if by.symbols:
            raise DynamicWidth(by)
        key = Key(block.size.times(by))
        high, low = (Index({Part(key, by, mod): ONE}) for mod in (False, True))
        whole = placed(placed(below, block, high), self.last, low)
        return whole, key, entry.times(by.factor).plus(atom(self.last))

    def _entry(self, at: Ref, wrap: Size | None) -> Linear:
        """Returns the number that an element of the indices is, without wraps, clamps and fills that never change it."""
        entry = self._plain(self.masks.whole(at))
        low, _ = (None, None) if wrap is None else self._range(entry)
        return entry if wrap is None or (low is not None and at_least_zero(low)) else self.masks.whole(at, wrap)

    def _plain(self, entry: Linear) -> Linear:
        for d in entry.data():
            with contextlib.suppress(Unsupported):
                if d.wrap is None and (same := self._unchanged(d.ref)) is not None:
                    return self._plain(entry.without(d).plus(same, entry.coefficient(d)))
        return entry

    def _unchanged(self, ref: Ref) -> Linear | None:
        """Returns the number that a clamp or a fill is made of, if its range says that it stays as it is."""
        func, args = ref.value.func, ref.value.args
        if func in CLAMPS and (limits := self._limits(ref.value)) is not None:
            inside = self.masks.whole(operand(args[0], ref))
            ends = zip(self._range(inside), limits, (1, -1), strict=True)
            same = all(x is None or (end and at_least_zero(end.minus(x).times(sign))) for end, x, sign in ends)
            return inside if same else None
        if (filled := filling(ref.value)) is not None:
            mask, want, *sides = filled
            for shown, side in zip((want, not want), sides, strict=True):
                with contextlib.suppress(Unsupported):
                    holds = self.masks.truth(operand(mask, ref), shown)
                    if any(not c.bound and all(map(self._sure, c.literals)) for c in holds):
                        return self.masks.whole(operand(side, ref))
        return None

    def _sure(self, x: Literal) -> bool:
        """Checks whether a comparison always holds, by what its numbers can be."""
        high = self._range(x.value)[1] if isinstance(x, Compare) and x.kind == "le" else None
        return high is not None and at_least_zero(high.times(-1))

    def _unwrapped(self, entry: Linear) -> Linear:
        """Returns a number without quotients that are always 0: ``i % length`` is ``i`` where i is in range."""
        for a, c in entry.terms:
            if isinstance(a, Floor) and self._lies(a.of, number(0), number(a.by - 1)):
                entry = entry.plus(atom(a), -c)
        return entry

    def _row(self, entry: Linear, size: Size) -> tuple[Var | None, Linear]:
        """Returns the variable that tells which row of a flat tensor an entry lies in, and the place in that row.

        Keys of all sequences in one tensor are gathered at ``row * length + place``. Without rows the variable is None.
        """
        for a, c in entry.terms:
            if isinstance(a, Var) and a not in self.places and a.size != ONE and a.size.times(Size(c)) == size:
                rest = entry.without(a)
                if self._lies(rest, number(0), number(c - 1)):
                    return a, rest
        return None, entry

    @property
    def keys(self) -> AnyOf:
        """Returns which keys the list names. Raises Mismatch if an index may lie outside K."""
        assert self._found is not None
        t, at = self._found
        self._check_range()
        literals = {Compare("eq", atom(t).minus(at))}
        for j in filter(at.coefficient, self.places):
            literals |= {Compare("le", atom(j, -1)), Compare("le", atom(j).minus(of_size(j.size)).shifted(1))}
        return [All(frozenset(literals), self.bound)]

    def _check_range(self) -> None:
        """Proves that the indices are in range, or has that checked at run time. Raises Mismatch if neither is possible.

        The check reads the indices that the model gathers at. The op must read the same ones.
        """
        assert self._found is not None
        key, at = self._found
        for (where, wraps), size in self._read.items():
            least = of_size(key.size).times(-1) if wraps else number(0)
            if self._lies(at, least, of_size(key.size).shifted(-1)):
                continue
            if not at.data():
                raise Mismatch(_OUTSIDE, where)
            self.masks.indices.take(where, size, wraps, self.masks.whole)

    def _lies(self, x: Linear, least: Linear, most: Linear) -> bool:
        """Checks whether a number is known to lie between ``least`` and ``most``, both included."""
        low, high = self._range(x)
        if low is None or high is None:
            return False
        return at_least_zero(low.minus(least)) and at_least_zero(most.minus(high))

    def _range(self, x: Linear) -> _Range:
        """Returns the smallest and the largest value of a number by its formula, None for one that is not known."""
        low: Linear | None = Linear(constant=x.constant)
        high = low
        for a, c in x.terms:
            least, most = (number(0), of_size(a.size).shifted(-1)) if isinstance(a, Var) else self._of_datum(a)
            least, most = (least, most) if c > 0 else (most, least)
            low = None if low is None or least is None else low.plus(least, c)
            high = None if high is None or most is None else high.plus(most, c)
        return low, high

    def _limits(self, clamp: Value) -> _Range | None:
        """Returns the bounds of a clamp, None for a missing one; None for both if one is not a number."""
        with contextlib.suppress(Unsupported):
            low, high = (None if x is None else of_scalar(x, self.masks.fixed) for x in limits(clamp))
            return low, high
        return None

    def _of_datum(self, a: object) -> _Range:
        """Returns the range of an element of a tensor."""
        if not isinstance(a, Datum):
            return None, None
        found: _Range = remembered(self.masks.known, (a.ref, "range"), lambda: self._of_element(a), a.ref.value)
        return found

    def _of_element(self, a: Datum) -> _Range:
        value = a.ref.value
        if value.func in PICKS and value.out == 1:
            size = picked_size(value)
            return number(0), None if size is None else of_size(size).shifted(-1)
        with contextlib.suppress(Unsupported):
            if (filled := filling(value)) is not None:
                return functools.reduce(self._either, (self._side(x, a.ref) for x in filled[2:]))
            if value.func in CLAMPS and (limits := self._limits(value)) is not None:
                low, high = limits
                if None not in limits:  # where the lower bound lies above the upper one, a clamp gives the upper one
                    low, _ = self._either((low, None), (high, None))
                inside = self._side(value.args[0], a.ref)[1]
                if high is None and inside is not None and low is not None and at_least_zero(inside.minus(low)):
                    high = inside
                return low, high
            if value.func is aten.cat.default:
                return functools.reduce(self._either, self._parts(a.ref))
        return None, None

    def _parts(self, ref: Ref) -> list[_Range]:
        """Returns the ranges of the pieces of a concatenation."""
        dim, parts = joined(ref.value)
        index = [tuple(var(Var(p.shape[dim])) if d == dim else i for d, i in enumerate(ref.index)) for p in parts]
        return [self._range(self.masks.whole(Ref(p, at))) for p, at in zip(parts, index, strict=True)]

    def _side(self, x: object, ref: Ref) -> _Range:
        """Returns the range of an operand, a number or a tensor."""
        known = constant_of(x)
        return self._range(number(int(known)) if known is not None else self.masks.whole(operand(x, ref)))

    def _either(self, one: _Range, other: _Range) -> _Range:
        """Returns the range of a number that lies in one of two ranges."""
        ends: list[Linear | None] = []
        for a, b, sign in ((one[0], other[0], 1), (one[1], other[1], -1)):
            ordered = [] if a is None or b is None else [(a, b), (b, a)]
            ends.append(next((x for x, y in ordered if at_least_zero(y.minus(x).times(sign))), None))
        return ends[0], ends[1]
