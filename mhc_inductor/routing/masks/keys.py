# SPDX-License-Identifier: Apache-2.0
"""Boolean masks in normal form: which keys a query sees, as a union of intervals with conditions.

An element of a mask is a disjunction of conjunctions. Each conjunction consists of comparisons between whole numbers
(:mod:`mhc_inductor.routing.graph.linear`) and has bound variables of its own: "for some j".
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence

from mhc_inductor.routing.graph.bounds import TooLarge
from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import Size, Unsupported, Var
from mhc_inductor.routing.graph.linear import (
    Key,
    Linear,
    at_least_zero,
    atom,
    of_size,
    replaced,
    substituted,
    variables_of,
)

MOST = 1024  # limit on conjunctions: an unrolled loop over ranges has one for each


@dataclasses.dataclass(frozen=True, slots=True)
class Compare:
    """The comparison ``value <= 0`` (kind "le"), ``value == 0`` ("eq") or ``value != 0`` ("ne"), as :mod:`operator` names it."""

    kind: str
    value: Linear


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """The condition that an element of a boolean tensor is ``want``."""

    ref: Ref
    want: bool


Literal = Compare | Given


@dataclasses.dataclass(frozen=True, slots=True)
class All:
    """A conjunction: for some values of ``bound``, all ``literals`` hold."""

    literals: frozenset[Literal] = frozenset()
    bound: tuple[Var, ...] = ()

    def comparisons(self) -> list[Linear]:
        """Returns the whole numbers that the conjunction compares with 0."""
        return [x.value for x in self.literals if isinstance(x, Compare)]


AnyOf = list[All]
"""A disjunction: holds if any of its conjunctions does, never if it has none."""
TRUE: AnyOf = [All()]
FALSE: AnyOf = []


class KeyData(Unsupported):
    """Raised where a mask reads a tensor at an index that depends on the key."""

    def __init__(self, ref: Ref) -> None:
        super().__init__("a tensor of keys")
        self.ref = ref
        self.value = ref.value


def both(a: AnyOf, b: AnyOf) -> AnyOf:
    """Returns the conjunction of two disjunctions, multiplied out. Raises TooLarge."""
    if len(a) * len(b) > MOST:
        raise TooLarge("ways for a key to be seen", MOST)
    return [All(x.literals | y.literals, tuple(dict.fromkeys(x.bound + y.bound))) for x in a for y in b]


def either(*parts: AnyOf) -> AnyOf:
    """Returns the disjunction of ``parts``, without duplicates. Raises TooLarge."""
    total = list(dict.fromkeys(itertools.chain(*parts)))
    if len(total) > MOST:
        raise TooLarge("ways for a key to be seen", MOST)
    return total


def _literal(kind: str, value: Linear) -> AnyOf:
    """Returns the comparison of ``value`` with 0; TRUE or FALSE if it is a constant."""
    made = Compare(kind, value)
    known = _known(made)
    if known is None:
        return [All(frozenset({made}))]
    return TRUE if known else FALSE


def compared(op: str, a: Linear, b: Linear) -> AnyOf:
    """Returns ``a op b`` in normal form; ``op`` is "le", "lt", "ge", "gt", "eq" or "ne"."""
    d = a.minus(b)
    if op in ("eq", "ne"):
        return _literal(op, d)
    if op in ("ge", "gt"):
        d = d.times(-1)
    return _literal("le", d if op in ("le", "ge") else d.shifted(1))


def elements_of(*parts: Literal | Linear) -> list[Ref]:
    """Returns the elements of tensors that numbers and conditions read, each once."""
    found: dict[Ref, None] = {}
    for x in parts:
        if isinstance(x, Given):
            found[x.ref] = None
        else:
            found.update(dict.fromkeys(d.ref for d in (x.value if isinstance(x, Compare) else x).data()))
    return [*found]


def has_data(conj: All) -> bool:
    """Checks whether a conjunction depends on elements of tensors."""
    return any(map(elements_of, conj.literals))


def reads_key(conj: All) -> bool:
    """Checks whether a comparison of a conjunction reads a tensor of numbers at the key."""
    return any(isinstance(v, Key) for value in conj.comparisons() for v in value.bound_variables())


def opposite(literal: Literal) -> AnyOf:
    """Returns the negation of a literal."""
    if isinstance(literal, Given):
        return [All(frozenset({Given(literal.ref, not literal.want)}))]
    if literal.kind == "le":
        return _literal("le", literal.value.times(-1).shifted(1))
    return _literal("ne" if literal.kind == "eq" else "eq", literal.value)


def differences(terms: Sequence[tuple[float, All]]) -> AnyOf:
    """Returns when a count of starts minus a count of ends is positive: some start is passed and its end is not.

    Raises Unsupported unless each start (factor 1) has an end (factor -1).
    """
    ups = [e for f, c in terms if f == 1.0 and (e := eliminated(c)) is not None]
    downs = [e for f, c in terms if f == -1.0 and (e := eliminated(c)) is not None]
    if len(ups) + len(downs) != len(terms) or len(ups) != len(downs):
        raise Unsupported
    total: list[All] = []
    for up, down in zip(ups, downs, strict=True):
        if [v.size for v in up.bound] != [v.size for v in down.bound]:
            raise Unsupported
        passed = set(down.literals)
        for old, new in zip(down.bound, up.bound, strict=True):
            passed = {_rewritten(x, old, atom(new)) for x in passed}
        common, late = up.literals & passed, passed - up.literals
        early = up.literals - passed
        if len(late) != 1 or len(early) != 1:
            raise Unsupported
        (end,), (start,) = late, early
        if not isinstance(end, Compare) or end.kind != "le" or not isinstance(start, Compare) or start.kind != "le":
            raise Unsupported
        total += (All(common | {start} | conj.literals, up.bound) for conj in opposite(end))
    return total


def _rewritten(literal: Literal, old: Var, new: Linear) -> Literal:
    """Returns a literal with ``new`` in place of ``old``."""
    if isinstance(literal, Given):
        return Given(replaced(literal.ref, old, new), literal.want)
    return Compare(literal.kind, substituted(literal.value, old, new))


def eliminated(conj: All) -> All | None:
    """Returns ``conj`` without the bound variables that an equality determines; None if it never holds."""
    bound, literals = list(conj.bound), conj.literals
    while (found := _determined(literals, bound)) is not None:
        v, moved = found
        still = _undecided(moved)
        if still is None:
            return None
        literals = still
        bound.remove(v)
    return conjunction(literals, bound)


def _determined(literals: frozenset[Literal], bound: Sequence[Var]) -> tuple[Var, set[Literal]] | None:
    """Returns a variable that an equality determines, and the literals with its value in its place, None without one."""
    for literal in sorted(literals, key=_order):
        if not isinstance(literal, Compare) or literal.kind != "eq":
            continue
        for v in sorted(bound, key=lambda v: not isinstance(v, Key)):
            c = literal.value.coefficient(v)
            rest = literal.value.without(v)
            if abs(c) != 1 or v in rest.variables():
                continue
            new = rest.times(-c)
            with contextlib.suppress(Unsupported):
                return v, {_rewritten(x, v, new) for x in literals if x is not literal} | _within(v, new)
    return None


def _undecided(literals: Iterable[Literal]) -> frozenset[Literal] | None:
    """Returns the literals that depend on variables or data; None if one of the others does not hold."""
    known = {x: _known(x) for x in literals}
    return None if False in known.values() else frozenset(x for x, holds in known.items() if holds is None)


def _within(v: Var, new: Linear) -> set[Literal]:
    """Returns what must hold for ``new`` to be a value of the bound variable ``v``, without what always holds.

    A place that a tensor holds is in range, or the model's own call raises.
    """
    if isinstance(v, Key):
        return set()
    ends = (new.times(-1), new.minus(of_size(v.size)).shifted(1))
    return {Compare("le", x) for x in ends if not at_least_zero(x.times(-1))}


def conjunction(literals: Iterable[Literal], bound: Iterable[Var]) -> All:
    """Returns the conjunction of ``literals``, with those variables of ``bound`` that they have."""
    made = frozenset(literals)
    used = free(All(made))
    return All(made, tuple(v for v in bound if v in used))


def _order(literal: Literal) -> tuple[int, str]:
    # Equalities of few atoms first: they determine the most.
    return (len(literal.value.terms), literal.kind) if isinstance(literal, Compare) else (99, "")


def _known(literal: Literal) -> bool | None:
    """Returns whether a literal holds, None if that depends on variables or data."""
    if isinstance(literal, Given) or (known := literal.value.value) is None:
        return None
    return bool(getattr(operator, literal.kind)(known, 0))


def settled(conj: All) -> All | None:
    """Returns ``conj`` without the literals that always hold; None if one never does."""
    literals = _undecided(conj.literals)
    return None if literals is None else eliminated(All(literals, conj.bound))


def free(conj: All) -> set[Var]:
    """Returns the variables of ``conj`` that are not bound."""
    found: set[Var] = set()
    for x in conj.literals:
        found |= variables_of(x.ref) if isinstance(x, Given) else x.value.variables()
    return found - set(conj.bound)


def alike(a: AnyOf, b: AnyOf, t: Var) -> bool:
    """Checks whether ``a`` equals ``b``, or says for which rows ``b`` holds for some key ``t``."""
    theirs = {_canonical(c, t, False) for c in b}
    return any({_canonical(c, t, rows) for c in a} == theirs for rows in (False, True))


_STANDINS: dict[tuple[Size, int], Var] = {}


def _canonical(conj: All, t: Var, rows: bool) -> All | None:
    """Returns ``conj`` with stand-ins for its bound variables; None if it never holds.

    With ``rows``, replaces the bound variable that runs over keys by ``t``; None unless there is exactly one.
    """
    if rows:
        keys = [v for v in conj.bound if v.size == t.size]
        if len(keys) != 1:
            return None
        literals = frozenset(_rewritten(x, keys[0], atom(t)) for x in conj.literals)
        conj = All(literals, tuple(v for v in conj.bound if v is not keys[0]))
    found = eliminated(conj)
    if found is None:
        return None
    literals = found.literals
    for k, v in enumerate(found.bound):
        new = _STANDINS.setdefault((v.size, k), Var(v.size))
        literals = frozenset(_rewritten(x, v, atom(new)) for x in literals)
    return All(literals)
