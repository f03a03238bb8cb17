"""Converts masks in normal form to ranges of keys.

Each conjunction gives the keys from its lower bounds up to, but not including, its upper bounds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from mhc_inductor.routing.graph.bounds import TooLarge
from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import Index, Size, Unsupported, Var
from mhc_inductor.routing.graph.linear import Datum, Floor, Key, Linear, mapped, of_size, variables_of
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.selection.keys import All, AnyOf, Compare, Given, Literal
from mhc_inductor.routing.operators.selection.masks import Masks

_MOST = 64


@dataclasses.dataclass
class Interval:
    """Keys ``max(lowers) <= t < min(uppers)`` where all ``conditions`` hold, for every value of ``bound``."""

    lowers: list[Linear] = dataclasses.field(default_factory=list)
    uppers: list[Linear] = dataclasses.field(default_factory=list)
    conditions: list[Literal] = dataclasses.field(default_factory=list)
    bound: tuple[Var, ...] = ()
    keyed: list[Literal] = dataclasses.field(default_factory=list)
    """Conditions that read tensors at the key: they can be evaluated for single keys only."""

    @property
    def selects(self) -> bool:
        """Checks whether a bound is read from a tensor."""
        return any(x.data() for x in (*self.lowers, *self.uppers))

    def pairs(self) -> list[tuple[Linear, Linear]]:
        """Returns every pair of a start and an end that are both read from tensors."""
        return [(low, high) for low in self.lowers for high in self.uppers if low.data() and high.data()]


class Judge:
    """Converts the keys of a mask to intervals, and checks that these are a selection."""

    def __init__(self, masks: Masks, t: Key) -> None:
        self.masks = masks
        self.t = t
        self.where: Value | None = next(reversed(masks.seen), None)

    def intervals(self, keys: AnyOf) -> list[Interval]:
        """Returns the intervals of all conjunctions.

        Raises Unsupported for a conjunction that is not an interval, and TooLarge for more ranges than the op is
        worth.
        """
        found = [one for conj in rolled(keys) for one in self._interval(conj)]
        if len(found) > _MOST:
            raise TooLarge("ranges of keys a query", _MOST, self.where)
        return found

    def _interval(self, conj: All) -> list[Interval]:
        """Returns the intervals of one conjunction: several if it has inequalities (``!=``)."""
        made = [Interval(bound=conj.bound)]
        for literal in conj.literals:
            if self.masks.by_key and (where := self._by_key(literal)) is not None:
                for one in made:
                    (one.keyed if where else one.conditions).append(literal)
                continue
            if isinstance(literal, Given):
                for one in made:
                    one.conditions.append(literal)
                continue
            place = [a for a, _ in literal.value.terms if a is self.t or (isinstance(a, Floor) and self._moves(a))]
            if not place:
                if any(isinstance(v, Key) for v in literal.value.variables()):
                    raise Unsupported
                for one in made:
                    one.conditions.append(literal)
                continue
            if len(place) > 1:
                raise Unsupported
            bounds = self._bounds(literal, place[0])
            made = [
                dataclasses.replace(
                    one,
                    lowers=one.lowers + low,
                    uppers=one.uppers + high,
                    conditions=[*one.conditions],
                    keyed=[*one.keyed],
                )
                for one in made
                for low, high in bounds
            ]
        return made

    def _by_key(self, literal: Literal) -> bool | None:
        """Returns whether a literal must be evaluated at single keys, None if it is a bound of the keys.

        False means that it does not depend on the key.
        """
        read = variables_of(literal.ref) if isinstance(literal, Given) else literal.value.bound_variables()
        if self.t in read:
            return True
        if isinstance(literal, Given) or self.t not in literal.value.variables():
            return False
        if literal.kind == "ne":
            return True
        place = [a for a, _ in literal.value.terms if a is self.t or (isinstance(a, Floor) and self._moves(a))]
        if len(place) != 1:
            return True
        try:
            self._bounds(literal, place[0])
        except Unsupported:
            return True
        return None

    def _moves(self, a: Floor) -> bool:
        return self.t in a.of.variables()

    def _bounds(self, literal: Compare, place: object) -> list[tuple[list[Linear], list[Linear]]]:
        """Returns (lower bounds, upper bounds) of the key, one pair for each way to satisfy ``literal``."""
        c = literal.value.coefficient(place)  # type: ignore[arg-type]
        rest = literal.value.without(place)  # type: ignore[arg-type]
        if abs(c) != 1 or (not isinstance(place, Floor) and self.t in rest.variables()):
            raise Unsupported
        # Kind "eq" says place == at; kind "le" says place <= at if c is 1, and place >= at if c is -1.
        at = rest.times(-c)
        below, above = self._below(place, at.shifted(1)), self._below(place, at)
        if literal.kind == "eq":
            return [([above], [below])]
        if literal.kind == "le":
            return [([], [below])] if c == 1 else [([above], [])]
        return [([], [above]), ([below], [])]

    def _below(self, place: object, at: Linear) -> Linear:
        """Returns the first key whose ``place`` is at least ``at``."""
        if not isinstance(place, Floor):
            return at
        inside = place.of.without(self.t)
        if place.of.coefficient(self.t) != 1 or self.t in inside.variables():
            raise Unsupported
        return at.times(place.by).minus(inside)

    # --- checks for a selection ---

    def check(self, intervals: Sequence[Interval], position: Linear, queries: Size, keys: Size) -> None:
        """Raises Mismatch if the intervals differ from the ranges of a selection."""
        if not any(i.pairs() for i in intervals):
            raise Mismatch(
                "no term of the mask gives a start and an end, or a block, for each query; expected start <= key < end, or key // size == block",
                self.where,
            )
        last = position.plus(of_size(keys)).minus(of_size(queries))
        for one in intervals:
            self._check(one, last)

    def _check(self, one: Interval, last: Linear) -> None:
        if one.selects:
            self._check_data(one)
            self._check_positions(one, last)
            return
        bounded = all(not x.variables() for x in one.uppers) and one.uppers
        if not (one.lowers and one.uppers) and not bounded:
            raise Mismatch(
                "keys outside the selected ranges are visible without a bound; expected a window or first keys",
                self.where,
            )

    def _check_data(self, one: Interval) -> None:
        """Raises Mismatch if starts and ends from tensors do not form ranges."""
        pairs = one.pairs()
        if not pairs:
            raise Mismatch("a range has only a start or only an end; expected start <= key < end", self.where)
        starts = [x for x in one.lowers if not x.terms]  # where the keys of a concatenated piece begin
        reasons = [_odd(*_within_piece(low, high, starts)) for low, high in pairs]
        if all(reasons):
            raise Mismatch(reasons[0], self.where)
        lows = {low for (low, _), reason in zip(pairs, reasons, strict=True) if not reason}
        if len(lows) > 1 and len({d.ref.value for low in lows for d in low.data()}) == 1:
            raise Mismatch(
                "the mask keeps keys that lie in several ranges at once; expected keys of any range", self.where
            )

    def _check_positions(self, one: Interval, last: Linear) -> None:
        """Raises Mismatch if a bound that moves with the query is not that of a causal mask or a window."""
        for high in one.uppers:
            ahead = high.minus(last).shifted(-1)
            if _of_position(high) and ahead.value != 0:
                said = "the difference of the lengths" if ahead.value is None else f"{ahead.value}"
                raise Mismatch(f"the last key seen is off by {said}; expected key <= query + S_kv - S", self.where)
        for low in one.lowers:
            behind = last.minus(low).value
            if _of_position(low) and (behind is None or behind <= 0):
                raise Mismatch("a window starts at the query or after it; expected key > query - width", self.where)


def _within_piece(low: Linear, high: Linear, starts: Sequence[Linear]) -> tuple[Linear, Linear]:
    """Returns a start and an end, counted from the start of the piece of keys that they lie in."""
    piece = next((x for x in starts if x.constant and x.constant == low.constant), None)
    return (low, high) if piece is None else (low.minus(piece), high.minus(piece))


def _of_position(bound: Linear) -> bool:
    """Checks whether a bound moves with the query and depends on nothing else."""
    return bool(bound.terms) and all(isinstance(a, Var) for a in bound.atoms())


def _odd(low: Linear, high: Linear) -> str:
    """Returns why a start and an end do not form a range, an empty string if they do."""
    width = high.minus(low).value
    factors = {c for _, c in low.terms}
    if low.bound_variables() != high.bound_variables():
        return "the start and the end of a range use different indices"
    if any(not isinstance(a, Datum) for x in (low, high) for a, _ in x.terms):
        return "starts and ends are relative to the query's position; expected positions of keys"
    if low.constant:
        return f"keys from start + {low.offset} on; expected start <= key < end"
    if width is None:
        if high.constant:
            return f"keys below end + {high.offset}; expected start <= key < end"
        if {c for _, c in (*low.terms, *high.terms)} != {1}:
            return "starts and ends are scaled"
    elif width <= 0 or factors not in ({1}, {width}):
        return f"{width} keys of blocks of {max(factors)}; expected whole blocks"
    return ""


# --- unrolled loops ---


def rolled(keys: AnyOf) -> AnyOf:
    """Returns ``keys``, merging conjunctions that differ by evenly spaced constant indices under one variable."""
    groups: dict[object, list[tuple[tuple[int, ...], All]]] = {}
    for conj in keys:
        shape, constants = _shape(conj)
        groups.setdefault(shape if not conj.bound else object(), []).append((constants, conj))
    total: AnyOf = []
    for members in groups.values():
        total += _rolled([*dict(members).items()]) if len(members) > 1 else [members[0][1]]
    return total


def _rolled(members: list[tuple[tuple[int, ...], All]]) -> AnyOf:
    members = sorted(members, key=lambda m: m[0])
    columns = list(zip(*(constants for constants, _ in members), strict=True))
    steps = []
    for column in columns:
        step = column[1] - column[0]
        if step < 0 or any(b - a != step for a, b in itertools.pairwise(column)):
            return [conj for _, conj in members]
        steps.append(step)
    if not any(steps):
        return [members[0][1]]
    j = Var(Size(len(members)))
    first = members[0][1]
    moves = iter(steps)

    def moved(ref: Ref) -> Ref:
        return Ref(ref.value, tuple(i.plus(Index({j: Size(s)})) if (s := next(moves)) else i for i in ref.index))

    literals = [_mapped(x, moved) for x in _ordered(first)]
    return [All(frozenset(literals), (j,))]


def _mapped(literal: Literal, fn: object) -> Literal:
    if isinstance(literal, Given):
        return Given(fn(literal.ref), literal.want)  # type: ignore[operator]
    # The order of :func:`_constants`, in which ``fn`` takes the steps of the indices.
    total = Linear(constant=literal.value.constant)
    for a, c in _terms(literal.value):
        total = total.plus(mapped(Linear(frozenset({(a, c)})), fn), 1)  # type: ignore[arg-type]
    return Compare(literal.kind, total)


def _bare(ref: Ref) -> Ref:
    return Ref(ref.value, tuple(Index({a: c for a, c in i.terms.items() if a is not None}) for i in ref.index))


def _template(x: Linear) -> Linear:
    return mapped(x, _bare)


def _terms(x: Linear) -> list[tuple[object, int]]:
    return sorted(x.terms, key=lambda term: (hash(_template(Linear(frozenset({term})))), _constants_of(term[0])))  # type: ignore[arg-type]


def _constants_of(a: object) -> tuple[int, ...]:
    if isinstance(a, Datum):
        return tuple(_number(i) for i in a.ref.index)
    if isinstance(a, Floor):
        return tuple(c for b, _ in _terms(a.of) for c in _constants_of(b))
    return ()


def _number(index: Index) -> int:
    c = index.terms.get(None)
    return c.factor if c is not None and not c.symbols else 0


def _constants(literal: Literal) -> tuple[int, ...]:
    if isinstance(literal, Given):
        return tuple(_number(i) for i in literal.ref.index)
    return tuple(c for a, _ in _terms(literal.value) for c in _constants_of(a))


def _bare_literal(literal: Literal) -> Literal:
    if isinstance(literal, Given):
        return Given(_bare(literal.ref), literal.want)
    return Compare(literal.kind, _template(literal.value))


def _ordered(conj: All) -> list[Literal]:
    return sorted(conj.literals, key=lambda x: (hash(_bare_literal(x)), _constants(x)))


def _shape(conj: All) -> tuple[object, tuple[int, ...]]:
    literals = _ordered(conj)
    shape = tuple(_bare_literal(x) for x in literals)
    return shape, tuple(c for x in literals for c in _constants(x))
