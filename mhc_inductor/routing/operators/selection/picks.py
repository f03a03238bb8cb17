# SPDX-License-Identifier: Apache-2.0
"""Attention over gathered keys: each query reads the keys that a list names, and its softmax is over the list's places.

A key that a list names twice counts twice in such a softmax, and once in the op. So the visible entries of a list must be
proved to be distinct: positions that ``topk`` or ``sort`` returns, positions that grow from place to place, and
concatenations of such lists that have no key in common. Entries that are replaced (-1 where none is left, then clamped
before the gather) count as distinct where the mask of the scores hides them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

from mhc_inductor.routing.graph.bounds import Steps, remembered
from mhc_inductor.routing.graph.expressions import Ref, aten, joined
from mhc_inductor.routing.graph.index import ONE, Index, Size, Unsupported, Var, const, var
from mhc_inductor.routing.graph.linear import (
    Datum,
    Floor,
    Key,
    Linear,
    at_least_zero,
    atom,
    number,
    of_index,
    of_scalar,
    of_size,
    placed,
    replaced,
    substituted,
    to_index,
    variables_of,
)
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.elements import FILLS, constant_of, operand
from mhc_inductor.routing.masks.index_checks import PICKS, picked_dim
from mhc_inductor.routing.masks.keys import All, AnyOf, Compare, Given, Literal
from mhc_inductor.routing.masks.masks import Masks
from mhc_inductor.routing.masks.operands import sources
from mhc_inductor.routing.masks.scatters import GATHERS, looked_up
from mhc_inductor.routing.operators.selection.matches import NotOurs

REPEATS = (
    "the keys are gathered at indices that may repeat, and a key counts each time here; expected indices that topk "
    "returns, with others hidden by the mask, or a call of mhc_inductor.selection_attention, where it counts once"
)
_OTHER = (
    "q meets keys, or weights meet values, that are gathered at indices which routing cannot tell to be equal; expected "
    "one tensor of indices for K and V"
)
_OUTSIDE = "the keys are gathered at indices that are not known to lie inside K"
_MOST = 128  # steps from indices to what they are where they are visible
_Range = tuple[Linear | None, Linear | None]
"""The smallest and the largest value of a number, None for one that is not known."""
_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)


def is_gathered(ref: Ref, j: Var) -> bool:
    """Checks whether an element of K or V, behind views and casts, is gathered at an index that depends on ``j``."""
    *_, last = sources(ref)
    moving: list[bool] = []

    def place(at: Ref, x: Value, d: int, wraps: bool) -> Index:
        moving.append(j in variables_of(at))
        return const(0)

    return last.ref.value.func in GATHERS and looked_up(last.ref, place) is not None and any(moving)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """An entry of the lists: the number ``at``, at place ``j``, where ``literals`` hold.

    ``piece``: which piece of concatenated lists it is from. ``bound``: further bound variables of the literals.
    """

    at: Linear
    j: Var
    literals: frozenset[Literal]
    bound: tuple[Var, ...]
    piece: tuple[int, ...] = ()


class Picks:
    """The lists of one attention over gathered keys; ``j`` is the place in a list.

    With ``repeats`` the op counts every place of a list, as the model does: nothing has to be proved of the indices.
    """

    def __init__(self, masks: Masks, j: Var, repeats: bool = False) -> None:
        self.masks = masks
        self.j = j
        self.repeats = repeats
        self._steps: Steps | None = None
        self._found: tuple[Key, Linear] | None = None
        self._read: dict[tuple[Value, bool], None] = {}
        """The tensors of indices that the model gathers at, each with whether negative ones count from the end."""

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
            if self.j not in entry.variables():
                return to_index(self.masks.whole(at, x.shape[d] if wraps else None))
            row, entry = self._row(self._unwrapped(entry), x.shape[d])
            self._read[at.value, wraps] = None
            if row is None:
                found.append((Key(x.shape[d]), entry))
                return var(found[-1][0])
            per = x.shape[d].over(row.size)
            assert per is not None
            found.append((Key(per), entry))
            return var(row).times(per).plus(var(found[-1][0]))

        below = looked_up(last.ref, place) if last.ref.value.func in GATHERS else None
        if below is None or len(found) != 1 or self.j in variables_of(below):
            raise NotOurs
        if last.ref.value.func is aten.gather.default:
            self.masks.placed.along(last.ref.value.args[2], last.ref.value.args[0])
        key, entry = found[0]
        if self._found is None:
            self._found = found[0]
        elif entry != self._found[1] or key.size != self.t.size:
            raise Mismatch(_OTHER, last.ref.value)
        return replaced(below, key, atom(self.t))

    def _entry(self, at: Ref, wrap: Size | None) -> Linear:
        if self.repeats:
            return self.masks.whole(at, wrap)
        return self._plain(self.masks.whole(at), at.value)

    def _plain(self, entry: Linear, where: Value) -> Linear:
        """Returns a number without clamps and fills that never change it."""
        self._steps = Steps("pieces of the lists", where, _MOST)
        plain = self._resolved(_Entry(entry, self.j, frozenset(), ()))
        return plain[0].at if len(plain) == 1 else entry

    def _unwrapped(self, entry: Linear) -> Linear:
        """Returns a number without quotients that are always 0: ``i % length`` is ``i`` where i is in range."""
        for a, c in entry.terms:
            if isinstance(a, Floor):
                low, high = self._range(a.of)
                inside = low is not None and high is not None and at_least_zero(low)
                if inside and high is not None and at_least_zero(number(a.by - 1).minus(high)):
                    entry = entry.plus(atom(a), -c)
        return entry

    def _row(self, entry: Linear, size: Size) -> tuple[Var | None, Linear]:
        """Returns the variable that tells which row of a flat tensor an entry lies in, and the place in that row.

        Keys of all sequences in one tensor are gathered at ``row * length + place``. Without rows the variable is None.
        """
        for a, c in entry.terms:
            if isinstance(a, Var) and a is not self.j and a.size != ONE and a.size.times(Size(c)) == size:
                rest = entry.without(a)
                low, high = self._range(rest)
                if (
                    low is not None
                    and high is not None
                    and at_least_zero(low)
                    and at_least_zero(number(c - 1).minus(high))
                ):
                    return a, rest
        return None, entry

    def keys(self, visible: AnyOf) -> AnyOf:
        """Returns which keys are visible, of which places are. Raises Mismatch if a key may count twice."""
        assert self._found is not None
        _, at = self._found
        if self.repeats:
            self._check_range([at])
            return [self._conjunction(_Entry(at, self.j, c.literals, c.bound)) for c in visible]
        where, wraps = next(iter(self._read))[0], any(wraps for _, wraps in self._read)
        self._steps = Steps("pieces of the lists", where, _MOST)
        entries = [e for c in visible for e in self._resolved(_Entry(at, self.j, c.literals, c.bound))]
        self._check_range([e.at for e in entries])
        for one in entries:
            if not self._distinct(one) or (wraps and not self._never_negative(one)):
                raise Mismatch(REPEATS, where)
            for other in entries:
                same = one.piece == other.piece
                if (same and one.at != other.at) or (not same and not self._apart(one, other)):
                    raise Mismatch(REPEATS, where)
        return [self._conjunction(one) for one in entries]

    def _check_range(self, resolved: list[Linear]) -> None:
        """Proves that the indices are in range, or has that checked at run time. Raises Mismatch if neither is possible.

        The check reads the indices that the model gathers at. The op must read the same ones.
        """
        assert self._found is not None
        key, at = self._found
        low, high = self._range(at)
        for where, wraps in self._read:
            least = of_size(key.size).times(-1) if wraps else number(0)
            proved = low is not None and at_least_zero(low.minus(least))
            proved = proved and high is not None and at_least_zero(of_size(key.size).shifted(-1).minus(high))
            if not proved and (not at.data() or any(each != at for each in resolved)):
                raise Mismatch(_OUTSIDE, where)
            if not proved:
                self.masks.indices.take(where, key.size, wraps, self.masks.whole)

    def _conjunction(self, one: _Entry) -> All:
        """Returns when the key is this entry; the entry's number in the conditions becomes the key."""
        t, literals = atom(self.t), set[Literal]()
        for x in one.literals:
            if isinstance(x, Compare):
                for sign in (1, -1):
                    closer = x.value.plus(one.at, -sign).plus(t, sign)
                    if self.j not in closer.variables() and one.j not in closer.variables():
                        x = Compare(x.kind, closer)
                        break
            literals.add(x)
        literals.add(Compare("eq", t.minus(one.at)))
        if one.at.coefficient(one.j):
            literals |= {
                Compare("le", atom(one.j, -1)),
                Compare("le", atom(one.j).minus(of_size(one.j.size)).shifted(1)),
            }
        return All(frozenset(literals), tuple(dict.fromkeys((*one.bound, one.j))))

    # --- entries behind what replaces some of them ---

    def _resolved(self, one: _Entry) -> list[_Entry]:
        """Returns the entry as the number that it is where it is visible: not a fill, not clamped, of one piece."""
        assert self._steps is not None
        while True:
            self._steps.take()
            data = [d for d in one.at.data() if one.j in variables_of(d.ref)]
            if len(data) != 1 or abs(one.at.coefficient(data[0])) != 1 or one.at.coefficient(one.j):
                return [one]
            (d,) = data
            func = d.ref.value.func
            if func is aten.cat.default:
                pieces = self._pieces(one, d)
                return [e for p in pieces for e in self._resolved(p)] if pieces is not None else [one]
            below = None
            with contextlib.suppress(Unsupported):
                if func is aten.where.self or func in FILLS:
                    below = self._kept(one, d)
                elif func in _CLAMPS:
                    below = self._clamped(one, d)
            if below is None:
                return [one]
            one = below

    def _kept(self, one: _Entry, d: Datum) -> _Entry | None:
        """Returns the entry with the number that is not replaced by a fill, if a condition hides the fill."""
        value, args = d.ref.value, d.ref.value.args
        when, a, b = (args[1], args[2], args[0]) if value.func in FILLS else args
        fill, kept, want = (constant_of(a), b, False) if constant_of(a) is not None else (constant_of(b), a, True)
        if fill is None or not isinstance(kept, Value):
            return self._chosen(one, d, when, {True: a, False: b})
        new = self.masks.whole(operand(kept, d.ref))
        holds = self.masks.truth(operand(when, d.ref), want)
        if self._implied(one, holds):
            return _exchanged(one, d, new)
        if not self._excludes(one, atom(d), int(fill)):
            return None
        if len(holds) != 1 or holds[0].bound:
            return dataclasses.replace(one, at=_with(one.at, d, new))
        made = _exchanged(one, d, new)
        return self._settled(dataclasses.replace(made, literals=made.literals | holds[0].literals), new)

    def _chosen(self, one: _Entry, d: Datum, when: Value, sides: dict[bool, Value]) -> _Entry | None:
        """Returns the entry with the one number of two that a condition always chooses, None if it depends."""
        for want, side in sides.items():
            if self._implied(one, self.masks.truth(operand(when, d.ref), want)):
                return _exchanged(one, d, self.masks.whole(operand(side, d.ref)))
        return None

    def _implied(self, one: _Entry, holds: AnyOf) -> bool:
        """Checks whether a condition holds wherever the entry is visible."""
        return any(not c.bound and all(x in one.literals or self._sure(x) for x in c.literals) for c in holds)

    def _sure(self, x: Literal) -> bool:
        """Checks whether a comparison always holds, by what its numbers can be."""
        high = self._range(x.value)[1] if isinstance(x, Compare) and x.kind == "le" else None
        return high is not None and at_least_zero(high.times(-1))

    def _clamped(self, one: _Entry, d: Datum) -> _Entry | None:
        """Returns the entry with the number before a clamp, if that changes no visible entry."""
        limits = self._limits(d.ref.value)
        if limits is None:
            return None
        new = self.masks.whole(operand(d.ref.value.args[0], d.ref))
        low, high = self._span(one, new)
        for limit, bound, sign in ((limits[0], low, 1), (limits[1], high, -1)):
            if limit is not None and (bound is None or not at_least_zero(bound.minus(limit).times(sign))):
                return None
        return _exchanged(one, d, new)

    def _pieces(self, one: _Entry, d: Datum) -> list[_Entry] | None:
        """Returns an entry for each piece of a concatenation along the places; None if it is along something else."""
        dim, parts = joined(d.ref.value)
        if d.ref.index[dim] != var(one.j) or sum(one.j in i.variables() for i in d.ref.index) != 1:
            return None
        if any(p.shape[dim].symbols for p in parts):
            return None
        made, start = [], 0
        for k, part in enumerate(parts):
            j = Var(part.shape[dim])
            place = var(j).plus(const(start))
            start += part.shape[dim].factor
            with contextlib.suppress(Unsupported):
                inside = self.masks.whole(
                    Ref(part, tuple(var(j) if e == dim else i for e, i in enumerate(d.ref.index)))
                )
                at, literals = (
                    _with(one.at, d, inside),
                    frozenset(_moved(x, d, inside, one.j, place) for x in one.literals),
                )
                if one.j in at.variables():
                    return None
                made.append(self._settled(_Entry(at, j, literals, one.bound, (*one.piece, k)), inside))
                continue
            return None
        return made

    def _settled(self, one: _Entry, x: Linear) -> _Entry:
        """Returns the entry without conditions on the number ``x`` that always hold."""
        low, _ = self._span(dataclasses.replace(one, literals=frozenset()), x)
        if low is None:
            return one
        kept = [c for c in one.literals if not (self._sure(c) or (isinstance(c, Compare) and _always(c, x, low)))]
        return dataclasses.replace(one, literals=frozenset(kept))

    # --- what is known of an entry ---

    def _excludes(self, one: _Entry, x: Linear, fill: int) -> bool:
        """Checks whether the conditions say that the number ``x`` is not ``fill``."""
        if self._differs(one, x, fill):
            return True
        low, high = self._span(one, x)
        above = low is not None and at_least_zero(low.shifted(-fill - 1))
        return above or (high is not None and at_least_zero(number(fill - 1).minus(high)))

    def _span(self, one: _Entry, x: Linear) -> _Range:
        """Returns the smallest and the largest number that ``x`` can be where the entry is visible, None if unknown."""
        low, high = self._range(x)
        for c in one.literals:
            if not isinstance(c, Compare) or c.kind == "ne":
                continue
            for sign in (1, -1):
                rest = c.value.plus(x, -sign)  # x is at most -rest if sign is 1, at least rest if it is -1
                if rest.data() or rest.size >= c.value.size:
                    continue
                least, _ = self._range(rest)
                if sign == 1 and high is None and least is not None:
                    high = least.times(-1)
                if sign == -1 and least is not None and (low is None or at_least_zero(least.minus(low))):
                    low = least
        if low is not None and low.value is not None and self._differs(one, x, low.value):
            low = low.shifted(1)
        return low, high

    def _differs(self, one: _Entry, x: Linear, known: int) -> bool:
        """Checks whether a condition says that the number ``x`` is not ``known``."""
        apart = x.shifted(-known)
        return any(
            isinstance(c, Compare) and c.kind == "ne" and c.value in (apart, apart.times(-1)) for c in one.literals
        )

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
        given = dict(zip(("min", "max"), clamp.args[1:], strict=False))
        if clamp.func is aten.clamp_max.default:
            given = {"max": clamp.args[1]} if len(clamp.args) > 1 else {}
        given |= clamp.kwargs
        with contextlib.suppress(Unsupported):
            low, high = (
                None if given.get(x) is None else of_scalar(given[x], self.masks.fixed) for x in ("min", "max")
            )
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
            d = picked_dim(value)
            size = None if d is None else value.args[0].shape[d]
            return number(0), None if size is None else of_size(size).shifted(-1)
        with contextlib.suppress(Unsupported):
            if value.func is aten.where.self or value.func in FILLS:
                when, one, other = value.args if value.func not in FILLS else (value.args[1], *value.args[2::-2])
                return self._either(self._side(one, a.ref, when, True), self._side(other, a.ref, when, False))
            if value.func in _CLAMPS and (limits := self._limits(value)) is not None:
                low, high = limits
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

    def _side(self, x: object, ref: Ref, when: Value | None = None, want: bool = True) -> _Range:
        """Returns the range of an operand, a number or a tensor, where the condition ``when``, if any, is ``want``."""
        known = constant_of(x)
        if known is not None:
            return self._range(number(int(known)))
        found = self.masks.whole(operand(x, ref))
        holds = [] if when is None else self.masks.truth(operand(when, ref), want)
        literals = holds[0].literals if len(holds) == 1 and not holds[0].bound else frozenset[Literal]()
        return self._span(_Entry(found, self.j, literals, ()), found)

    def _either(self, one: _Range, other: _Range) -> _Range:
        """Returns the range of a number that lies in one of two ranges."""
        ends: list[Linear | None] = []
        for a, b, sign in ((one[0], other[0], 1), (one[1], other[1], -1)):
            ordered = [] if a is None or b is None else [(a, b), (b, a)]
            ends.append(next((x for x, y in ordered if at_least_zero(y.minus(x).times(sign))), None))
        return ends[0], ends[1]

    def _distinct(self, one: _Entry) -> bool:
        """Checks whether the entry differs at any two places of a list at which it is visible."""
        moving = [a for a, _ in one.at.terms if one.j in _variables(a)]
        if len(moving) != 1 or not isinstance(d := moving[0], Datum):
            return moving == [one.j]
        value = d.ref.value
        if value.func in PICKS and value.out == 1:
            dim = picked_dim(value)
            return dim is not None and _only_along(d.ref, one.j, dim)
        node = value.node
        if value.func is None and node is not None and str(node.target).startswith("mhc_inductor.index_topk"):
            low, _ = self._span(one, atom(d))
            return _only_along(d.ref, one.j, len(d.ref.index) - 1) and low is not None and at_least_zero(low)
        return False

    def _never_negative(self, one: _Entry) -> bool:
        low, _ = self._span(one, one.at)
        return low is not None and at_least_zero(low)

    def _apart(self, one: _Entry, other: _Entry) -> bool:
        """Checks whether two entries never have a key in common."""
        (a, b), (c, d) = self._span(one, one.at), self._span(other, other.at)
        before = b is not None and c is not None and at_least_zero(c.minus(b).shifted(-1))
        return before or (d is not None and a is not None and at_least_zero(a.minus(d).shifted(-1)))


def _variables(a: object) -> set[Var]:
    return atom(a).variables()  # type: ignore[arg-type]


def _only_along(ref: Ref, j: Var, dim: int) -> bool:
    """Checks whether an index moves along ``dim`` alone, and takes another element there for each ``j``."""
    return all((j in i.variables()) == (d == dim) for d, i in enumerate(ref.index)) and j in ref.index[dim].terms


def _with(x: Linear, d: Datum, new: Linear) -> Linear:
    """Returns a number with ``new`` in place of an element."""
    c = x.coefficient(d)
    return x.without(d).plus(new, c) if c else x


def _exchanged(one: _Entry, d: Datum, new: Linear) -> _Entry:
    """Returns the entry with ``new`` in place of an element."""
    literals = (Compare(x.kind, _with(x.value, d, new)) if isinstance(x, Compare) else x for x in one.literals)
    return dataclasses.replace(one, at=_with(one.at, d, new), literals=frozenset(literals))


def _moved(x: Literal, d: Datum, new: Linear, j: Var, place: Index) -> Literal:
    """Returns a condition with ``new`` in place of an element, and ``place`` in place of ``j``. Raises Unsupported."""
    if isinstance(x, Given):
        return Given(placed(x.ref, j, place), x.want)
    return Compare(x.kind, substituted(_with(x.value, d, new), j, of_index(place)))


def _always(c: Compare, x: Linear, low: Linear) -> bool:
    """Checks whether a comparison of ``x`` with a number always holds, given that ``x`` is at least ``low``."""
    up, down = c.value.minus(x), c.value.plus(x)
    if c.kind == "ne" and up.value is not None:
        return at_least_zero(low.shifted(up.value - 1))
    if c.kind == "ne" and down.value is not None:
        return at_least_zero(low.shifted(-down.value - 1))
    return c.kind == "le" and not down.terms and at_least_zero(low.minus(down))
