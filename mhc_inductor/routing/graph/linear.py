# SPDX-License-Identifier: Apache-2.0
"""Normal form of integers: sums of index variables, elements of integer tensors and quotients of such sums."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mhc_inductor import compat
from mhc_inductor.routing.graph.bounds import TooLarge
from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import (
    ONE,
    DynamicWidth,
    Index,
    Part,
    Size,
    Unsupported,
    Var,
    const,
    divmod_index,
    monomial,
)

_LARGEST = 256
"""Largest number of atoms in one integer, those inside its quotients included."""


class Key(Var):
    """An index variable over the keys of an attention, or an auxiliary one in its place. Views may split it."""

    __slots__ = ()
    open = True


@dataclasses.dataclass(frozen=True, slots=True)
class Datum:
    """An element of an integer tensor. With ``wrap``, negative values count from that size on, as in ``x[i]``."""

    ref: Ref
    wrap: Size | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Floor:
    """``of // by``, rounded down."""

    of: Linear
    by: int


Atom = Var | Datum | Floor
Symbols = tuple[str, ...]


class Linear:
    """``sum(coefficient * atom) + sum(coefficient * product of symbols)``; the second part is the constant.

    Immutable. Raises TooLarge if nested quotients make it too large to search.
    """

    __slots__ = ("_hash", "constant", "size", "terms")

    def __init__(
        self,
        terms: frozenset[tuple[Atom, int]] = frozenset(),
        constant: frozenset[tuple[Symbols, int]] = frozenset(),
    ) -> None:
        self.terms = terms
        self.constant = constant
        self.size: int = len(terms) + sum(a.of.size for a, _ in terms if isinstance(a, Floor))
        """The number of atoms; those inside quotients count wherever they occur."""
        if self.size > _LARGEST:
            raise TooLarge("terms in a position", _LARGEST)
        self._hash: int | None = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Linear) and self.terms == other.terms and self.constant == other.constant

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.terms, self.constant))
        return self._hash

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        """Returns the sum of this and ``factor`` times ``other``."""
        return Linear(_added(self.terms, other.terms, factor), _added(self.constant, other.constant, factor))

    def minus(self, other: Linear) -> Linear:
        """Returns the difference."""
        return self.plus(other, -1)

    def times(self, factor: int) -> Linear:
        """Returns the product with a number."""
        return ZERO.plus(self, factor)

    def shifted(self, by: int) -> Linear:
        """Returns the sum with a number."""
        return self.plus(number(by))

    @property
    def value(self) -> int | None:
        """Returns the number if it is known and there are no atoms, else None."""
        if self.terms or any(symbols for symbols, _ in self.constant):
            return None
        return self.offset

    @property
    def known(self) -> int:
        """Returns the number. Raises DynamicWidth if it depends on symbols, Unsupported if it has atoms."""
        found = self.value
        if found is None and not self.terms:
            raise DynamicWidth(Size(1, tuple({x for symbols, _ in self.constant for x in symbols})))
        if found is None:
            raise Unsupported
        return found

    @property
    def offset(self) -> int:
        """Returns the number that is added."""
        return dict(self.constant).get((), 0)

    @property
    def never_negative(self) -> bool:
        """Returns whether this is a sum of positions and constants with positive coefficients."""
        atoms = (isinstance(a, Var) or (isinstance(a, Floor) and a.of.never_negative) for a, _ in self.terms)
        return all(atoms) and all(c > 0 for _, c in (*self.terms, *self.constant))

    def coefficient(self, atom: Atom) -> int:
        """Returns the coefficient of an atom, 0 if it does not occur."""
        return dict(self.terms).get(atom, 0)

    def without(self, atom: Atom) -> Linear:
        """Returns the sum without the term of an atom."""
        return Linear(frozenset(t for t in self.terms if t[0] != atom), self.constant)

    def atoms(self) -> Iterator[Atom]:
        """Yields every atom, those inside quotients included."""
        for atom, _ in self.terms:
            yield atom
            if isinstance(atom, Floor):
                yield from atom.of.atoms()

    def variables(self) -> set[Var]:
        """Returns all variables, those in indices of tensor elements included."""
        found: set[Var] = set()
        for atom in self.atoms():
            if isinstance(atom, Var):
                found.add(atom)
            elif isinstance(atom, Datum):
                found |= variables_of(atom.ref)
        return found

    def bound_variables(self) -> set[Var]:
        """Returns the variables that tensor elements depend on."""
        return {v for d in self.data() for v in variables_of(d.ref)}

    def data(self) -> list[Datum]:
        """Returns all tensor elements, those inside quotients included."""
        return [a for a in self.atoms() if isinstance(a, Datum)]


ZERO = Linear()


def _added(a: frozenset[Any], b: frozenset[Any], factor: int) -> frozenset[Any]:
    if not b or not factor:
        return a
    total = dict(a)
    for key, c in b:
        total[key] = total.get(key, 0) + factor * c
    return frozenset((key, c) for key, c in total.items() if c)


def number(value: int) -> Linear:
    """Returns a number as a constant."""
    return Linear(constant=frozenset({((), value)})) if value else ZERO


def atom(a: Atom, coefficient: int = 1) -> Linear:
    """Returns ``coefficient`` times an atom."""
    return Linear(frozenset({(a, coefficient)}))


def of_size(size: Size) -> Linear:
    """Returns a size as a constant."""
    return Linear(constant=frozenset({(size.symbols, size.factor)})) if size.factor else ZERO


def size_of_sum(total: Linear) -> Size:
    """Returns a sum of sizes as the size of a dim that has it: a symbol that is named as PyTorch names the sum."""
    import sympy

    if len(total.constant) <= 1:
        return next((Size(c, symbols) for symbols, c in total.constant), Size(0))
    return Size(1, (str(sum(c * sympy.prod(map(sympy.Symbol, symbols)) for symbols, c in total.constant)),))


def of_scalar(value: Any, fixed: Mapping[str, int]) -> Linear:
    """Returns an int, a whole float or a torch.SymInt as a constant. Raises Unsupported for anything else."""
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return number(int(value))
    if not isinstance(value, torch.SymInt):
        raise Unsupported
    expression = compat.routing.expression(value).expand()
    parts = expression.args if expression.is_Add else (expression,)
    return functools.reduce(Linear.plus, [of_size(monomial(part, fixed)) for part in parts], ZERO)


def of_index(index: Index) -> Linear:
    """Returns an index of a tensor as a sum. Raises Unsupported if a coefficient is symbolic."""
    total = ZERO
    for a, c in index.terms.items():
        if a is None:
            total = total.plus(of_size(c))
            continue
        if c.symbols:
            raise Unsupported
        total = total.plus(_of_atom(a), c.factor)
    return total


def _of_atom(a: Any) -> Linear:
    if isinstance(a, Var):
        return atom(a)
    assert isinstance(a, Part)
    if a.by.symbols and any(isinstance(v, Key) for v in Index({a: ONE}).variables()):
        raise DynamicWidth(a.by)  # keys in blocks of a dynamic size
    if a.by.symbols:
        raise Unsupported
    inner, by = _of_atom(a.of), a.by.factor
    floored = floor(inner, by)
    return inner.plus(floored, -by) if a.mod else floored


def floor(of: Linear, by: int) -> Linear:
    """Returns ``of // by``, rounded down. Raises Unsupported unless ``by`` is positive."""
    if by <= 0:
        raise Unsupported
    if by == 1:
        return of
    out = Linear(
        frozenset((a, c // by) for a, c in of.terms if c % by == 0),
        frozenset((s, c // by) for s, c in of.constant if c % by == 0 or (not s and c // by)),
    )
    rest = of.plus(out, -by)
    most = _most(rest)
    return out if most is not None and most < by else out.plus(atom(Floor(rest, by)))


def _most(of: Linear) -> int | None:
    """Returns the largest value of a sum that is never negative, or None if it is not known."""
    top = Linear(constant=of.constant).value
    if top is None or top < 0:
        return None
    for a, c in of.terms:
        most = None
        if isinstance(a, Var) and not a.size.symbols:
            most = a.size.factor - 1
        elif isinstance(a, Floor) and (inner := _most(a.of)) is not None:
            most = inner // a.by
        if most is None or c < 0:
            return None
        top += c * most
    return top


def to_index(value: Linear) -> Index | None:
    """Returns ``value`` as an index of a tensor, or None if it is not one."""
    terms: dict[Any, Size] = {}
    for a, c in value.terms:
        if c < 0:
            return None
        if isinstance(a, Floor) and a.of == atom(v := next(iter(a.of.variables()), Var(ONE))):
            terms[Part(v, Size(a.by), False)] = Size(c)
        elif isinstance(a, Var):
            terms[a] = Size(c)
        else:
            return None
    constant = value.minus(Linear(value.terms))
    if constant.value is None or constant.value < 0:
        return None
    return Index({**terms, **const(constant.value).terms})


def variables_of(ref: Ref) -> set[Var]:
    """Returns the variables in a reference's index."""
    return {v for i in ref.index for v in i.variables()}


def substituted(value: Linear, old: Var, new: Linear) -> Linear:
    """Returns ``value`` with ``old`` replaced by ``new``.

    Raises Unsupported if a tensor would be indexed with something that is not an index.
    """
    if old not in value.variables():
        return value
    return mapped(value, lambda ref: replaced(ref, old, new), lambda v: new if v is old else atom(v))


def mapped(value: Linear, element: Callable[[Ref], Ref], variable: Callable[[Var], Linear] = atom) -> Linear:
    """Returns ``value`` with ``element`` applied to every tensor element in it, and ``variable`` to every variable."""
    total = Linear(constant=value.constant)
    for a, c in value.terms:
        if isinstance(a, Var):
            new = variable(a)
        elif isinstance(a, Floor):
            new = floor(mapped(a.of, element, variable), a.by)
        else:
            new = atom(Datum(element(a.ref), a.wrap))
        total = total.plus(new, c)
    return total


def replaced(ref: Ref, old: Var, new: Linear) -> Ref:
    """Returns ``ref`` with ``old`` replaced by ``new`` in its index. Raises Unsupported if that is not an index."""
    if old not in variables_of(ref):
        return ref
    index = to_index(new)
    if index is None:
        raise Unsupported
    return placed(ref, old, index)


def placed(ref: Ref, old: Var, new: Index) -> Ref:
    """Returns ``ref`` with ``old`` replaced by the index ``new``. Raises Unsupported if a quotient is not an index."""
    return Ref(ref.value, tuple(_with(i, old, new) for i in ref.index))


def _with(index: Index, old: Var, new: Index) -> Index:
    total = Index({})
    for a, c in index.terms.items():
        total = total.plus(_divided(a, old, new).times(c))
    return total


def _divided(a: Any, old: Var, new: Index) -> Index:
    """Returns an atom of an index with ``old`` replaced by ``new``. Raises Unsupported if that is no index."""
    if not isinstance(a, Part) or old not in Index({a: ONE}).variables():
        return new if a is old else Index({a: ONE})
    of = _divided(a.of, old, new)
    (only,) = of.terms.items() if len(of.terms) == 1 else ((None, ONE),)
    if only[0] is not None and only[1] == ONE:
        return Index({Part(only[0], a.by, a.mod): ONE})
    return divmod_index(of, a.by)[a.mod]


def at_least_zero(x: Linear) -> bool:
    """Checks whether ``x``, a sum of positions, sizes and quotients, is never negative."""
    for a, c in x.terms:
        if isinstance(a, Floor):
            # by * (of // by) is of minus a remainder in [0, by - 1].
            if c % a.by:
                return False
            m = c // a.by
            rest = x.plus(atom(a), -c).plus(a.of, m)
            return at_least_zero(rest if m < 0 else rest.shifted(-m * (a.by - 1)))
    total = Linear(constant=x.constant)
    for a, c in x.terms:
        if not isinstance(a, Var):
            return False
        if c < 0:
            total = total.plus(of_size(a.size), c).shifted(-c)
    sizes = [c for symbols, c in total.constant if symbols]
    # A dynamic size is at least 1.
    return all(c > 0 for c in sizes) and total.offset + sum(sizes) >= 0
