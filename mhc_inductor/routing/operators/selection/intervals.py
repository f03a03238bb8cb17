# SPDX-License-Identifier: Apache-2.0
"""Converts masks in normal form to ranges of keys, and ranges to lists of single keys, for the op that reads lists.

Each conjunction gives the keys from its lower bounds up to, but not including, its upper bounds. A range whose length has a
bound gives that many candidates from its start on. Whether a candidate is visible is decided by the range's other bounds
and conditions, evaluated at the candidate: these may read tensors at the key.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from mhc_inductor.routing.graph.bounds import TooLarge
from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import Index, Size, Unsupported, Var, const, present_size, product_of
from mhc_inductor.routing.graph.linear import Datum, Floor, Key, Linear, mapped, number, of_size, variables_of
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.keys import All, AnyOf, Compare, Given, Literal, elements_of
from mhc_inductor.routing.masks.masks import Masks

_MOST_RANGES = 64
_RANGES = (
    "the mask is not one of ranges from a start up to an end, or of whole blocks, that each query reads from tensors; "
    "expected start <= key < end of any range, or key // size == block"
)
_POSITIONS = (
    "a bound that moves with the query is not its own key's; expected key <= query + S_kv - S, and windows before it"
)
_UNBOUNDED = "keys outside the selected ranges are visible without a bound; expected a window or first keys"
MOST_ENTRIES = 4096
"""The longest list that the op takes."""


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
        found = [one for conj in rolled(keys) for one in self.interval(conj)]
        if len(found) > _MOST_RANGES:
            raise TooLarge("ranges of keys a query", _MOST_RANGES, self.where)
        return found

    def interval(self, conj: All) -> list[Interval]:
        """Returns the intervals of one conjunction: several if it has inequalities (``!=``)."""
        ends: list[tuple[list[Linear], list[Linear]]] = [([], [])]
        conditions: list[Literal] = []
        keyed: list[Literal] = []
        for literal in conj.literals:
            try:
                bounds = self._bounds(literal)
            except Unsupported:
                if not self.masks.by_key:
                    raise
                keyed.append(literal)
                continue
            if bounds is None:
                conditions.append(literal)
            else:
                ends = [(lowers + low, uppers + high) for lowers, uppers in ends for low, high in bounds]
        return [Interval(lowers, uppers, [*conditions], conj.bound, [*keyed]) for lowers, uppers in ends]

    def _bounds(self, literal: Literal) -> list[tuple[list[Linear], list[Linear]]] | None:
        """Returns (lower bounds, upper bounds) of the key, one pair for each way to satisfy ``literal``.

        Returns None if the literal does not depend on the key, and raises Unsupported if it is another condition on it.
        """
        by_key = self.masks.by_key
        if by_key and any(self.t in variables_of(ref) for ref in elements_of(literal)):
            raise Unsupported
        if isinstance(literal, Given):
            return None
        places = [
            a for a, _ in literal.value.terms if a is self.t or (isinstance(a, Floor) and self.t in a.of.variables())
        ]
        if not places:
            if not by_key and any(isinstance(v, Key) for v in literal.value.variables()):
                raise Unsupported
            return None
        if len(places) > 1 or (by_key and literal.kind == "ne"):
            raise Unsupported
        (place,) = places
        c, rest = literal.value.coefficient(place), literal.value.without(place)
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
        last = position.plus(of_size(keys)).minus(of_size(queries))
        if not any(one.pairs() for one in intervals) or not all(map(_are_ranges, intervals)):
            moved = (pair for one in intervals for pair in one.pairs() if any(x.offset for x in pair))
            found = [f"; found start + {low.offset} <= key < end + {high.offset}" for low, high in moved]
            raise Mismatch(_RANGES + "".join(found[:1]), self.where)
        for one in intervals:
            if one.selects and not _follow_the_query(one, last):
                raise Mismatch(_POSITIONS, self.where)
            bounded = (one.lowers and one.uppers) or any(not x.variables() for x in one.uppers)
            if not one.selects and not bounded:
                raise Mismatch(_UNBOUNDED, self.where)


def _are_ranges(one: Interval) -> bool:
    """Checks whether the starts and ends of an interval that are read from tensors, if any, are those of one range."""
    starts = [x for x in one.lowers if not x.terms]  # where the keys of a concatenated piece begin
    lows = {low for low, high in one.pairs() if _is_range(*_within_piece(low, high, starts))}
    several = len(lows) > 1 and len({d.ref.value for low in lows for d in low.data()}) == 1
    return not one.selects or (bool(lows) and not several)


def _follow_the_query(one: Interval, last: Linear) -> bool:
    """Checks whether bounds that move with the query are those of a causal mask or a window, ``last`` being its own key."""
    highs, lows = (filter(_of_position, ends) for ends in (one.uppers, one.lowers))
    widths = [last.minus(low).value for low in lows]
    causal = all(high.minus(last).value == 1 for high in highs)
    return causal and all(width is not None and width > 0 for width in widths)


def _within_piece(low: Linear, high: Linear, starts: Sequence[Linear]) -> tuple[Linear, Linear]:
    """Returns a start and an end, counted from the start of the piece of keys that they lie in."""
    piece = next((x for x in starts if x.constant and x.constant == low.constant), None)
    return (low, high) if piece is None else (low.minus(piece), high.minus(piece))


def _of_position(bound: Linear) -> bool:
    """Checks whether a bound moves with the query and depends on nothing else."""
    return bool(bound.terms) and all(isinstance(a, Var) for a in bound.atoms())


def _is_range(low: Linear, high: Linear) -> bool:
    """Checks whether tensors hold a start and an end, or the number of a block: positions of keys, not of the query."""
    data = all(isinstance(a, Datum) for x in (low, high) for a, _ in x.terms)
    if low.bound_variables() != high.bound_variables() or not data or low.constant:
        return False
    width, factors = high.minus(low).value, {c for _, c in low.terms}
    if width is None:
        return not high.constant and factors | {c for _, c in high.terms} == {1}
    return width > 0 and factors in ({1}, {width})


# --- lists of single keys ---


@dataclasses.dataclass(frozen=True)
class Entries:
    """Candidates ``low + 0``, ..., ``low + width - 1`` for every value of the interval's bound variables.

    ``width`` is a number, or a sum of sizes.
    """

    interval: Interval
    low: Linear
    high: Linear
    width: Linear

    def count(self, hints: Mapping[str, int]) -> int:
        """Returns the present number of candidates a query."""
        return present(self.width, hints) * present_size(product_of(v.size for v in self.interval.bound), hints)


def entries(intervals: Sequence[Interval], t: Key, hints: Mapping[str, int]) -> list[Entries] | None:
    """Returns the candidates of all intervals, None if the length of one has no bound."""
    found = []
    for each in intervals:
        one = _shortest(each, t, hints)
        if one is None:
            return None
        if present(one.width, hints) > 0:
            found.append(one)
    return found


def _shortest(each: Interval, t: Key, hints: Mapping[str, int]) -> Entries | None:
    """Returns the candidates between the start and the end of an interval that are least far apart."""
    pairs = itertools.product([*each.lowers, number(0)], [*each.uppers, of_size(t.size)])
    spans = [Entries(each, low, high, high.minus(low)) for low, high in pairs]
    known = [one for one in spans if not one.width.terms]
    return min(known, key=lambda one: present(one.width, hints), default=None)


def present(width: Linear, hints: Mapping[str, int]) -> int:
    """Returns the present value of a sum of sizes."""
    return sum(present_size(Size(c, symbols), hints) for symbols, c in width.constant)


# --- unrolled loops ---


def rolled(keys: AnyOf) -> AnyOf:
    """Returns ``keys``, with one conjunction under a variable for those that differ by evenly spaced constant indices."""
    groups: dict[All, list[tuple[All, dict[Ref, Ref]]]] = {}
    for conj in dict.fromkeys(keys):
        shape, elements = (conj, {}) if conj.bound else _shape(conj)
        groups.setdefault(shape, []).append((conj, elements))
    return [conj for shape, members in groups.items() for conj in _merged(shape, members)]


def _shape(conj: All) -> tuple[All, dict[Ref, Ref]]:
    """Returns a conjunction without the constants in indices of elements, and the elements by what stands for them there.

    Elements that are equal without their constants are numbered in the order of these.
    """
    found: dict[Ref, set[Ref]] = {}

    def enter(ref: Ref) -> Ref:
        kept = (Index({a: c for a, c in i.terms.items() if a is not None or c.symbols}) for i in ref.index)
        found.setdefault(Ref(ref.value, tuple(kept)), set()).add(ref)
        return ref

    _mapped(conj, enter)
    names = {
        ref: Ref(bare.value, tuple(i.plus(const(n)) for i in bare.index))
        for bare, refs in found.items()
        for n, ref in enumerate(sorted(refs, key=_constants))
    }
    return _mapped(conj, names.__getitem__), {name: ref for ref, name in names.items()}


def _merged(shape: All, members: list[tuple[All, dict[Ref, Ref]]]) -> AnyOf:
    """Returns one conjunction for all ``members``, which are ``shape`` with other elements, or the members as they are."""
    names = list(members[0][1])
    rows = sorted(([c for name in names for c in _constants(own[name])], at) for at, (_, own) in enumerate(members))
    constants = [row for row, _ in rows]
    steps = [b - a for a, b in zip(*constants[:2], strict=True)] if len(rows) > 1 else []
    even = [[a + s * n for a, s in zip(constants[0], steps, strict=True)] for n in range(len(rows))] if steps else []
    if even != constants or min(steps) < 0:
        return [conj for conj, _ in members]
    j, left, first = Var(Size(len(rows))), iter(steps), members[rows[0][1]][1]

    def moved(i: Index) -> Index:
        step = next(left)
        return i.plus(Index({j: Size(step)})) if step else i

    made = {name: Ref(name.value, tuple(map(moved, first[name].index))) for name in names}
    return [All(_mapped(shape, made.__getitem__).literals, (j,))]


def _mapped(conj: All, fn: Callable[[Ref], Ref]) -> All:
    """Returns a conjunction with ``fn`` applied to every tensor element in it."""
    literals = (
        Given(fn(x.ref), x.want) if isinstance(x, Given) else Compare(x.kind, mapped(x.value, fn))
        for x in conj.literals
    )
    return All(frozenset(literals), conj.bound)


def _constants(ref: Ref) -> list[int]:
    constants = (i.terms.get(None, Size(0)) for i in ref.index)
    return [0 if c.symbols else c.factor for c in constants]
