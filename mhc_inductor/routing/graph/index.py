# SPDX-License-Identifier: Apache-2.0
"""Index arithmetic: maps an element of a view to the element of the tensor that it shows, through any chain of views.

An :class:`Index` is a sum of variables times sizes. A size is a monomial: an integer times symbols of a dynamic shape.
So "tokens * streams * width" divides by "streams * width" whether or not the number of tokens is known.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mhc_inductor import compat


class Unsupported(Exception):
    """Raised for an index that is not a sum of variables: the views cannot be followed."""


_sizes_stay: contextvars.ContextVar[bool] = contextvars.ContextVar("mhc_inductor_sizes_stay", default=False)


def may_fix() -> bool:
    """Returns whether dynamic sizes may be fixed at their present values: an exported program promises its own."""
    return not _sizes_stay.get()


@contextlib.contextmanager
def sizes_stay(wanted: bool = True) -> Iterator[None]:
    """Keeps dynamic sizes from being fixed inside the context, if ``wanted``."""
    token = _sizes_stay.set(wanted)
    try:
        yield
    finally:
        _sizes_stay.reset(token)


class DynamicWidth(Exception):
    """Raised for a sum over a dynamic size: the analysis can continue only if that size is fixed."""

    def __init__(self, size: Size) -> None:
        super().__init__(str(size))
        self.size = size


class Size(NamedTuple):
    """``factor`` times the product of ``symbols`` (sorted names of dynamic sizes)."""

    factor: int
    symbols: tuple[str, ...] = ()

    def times(self, other: Size) -> Size:
        """Returns the product of two sizes."""
        if self is ONE or other is ONE:
            return other if self is ONE else self
        if not self.symbols and not other.symbols:
            return _NUMBER(self.factor * other.factor)
        return Size(self.factor * other.factor, tuple(sorted(self.symbols + other.symbols)))

    def over(self, other: Size) -> Size | None:
        """Returns the exact quotient, or None if ``other`` does not divide this size."""
        if other.factor == 0 or self.factor % other.factor:
            return None
        if not other.symbols:
            return Size(self.factor // other.factor, self.symbols)
        left = list(self.symbols)
        for name in other.symbols:
            if name not in left:
                return None
            left.remove(name)
        return Size(self.factor // other.factor, tuple(left))


ONE = Size(1)
_NUMBER = functools.lru_cache(1 << 14)(Size)


def present_size(size: Size, known: Mapping[str, int]) -> int:
    """Returns the present value of a size, with 4096 for a symbol that is not ``known``."""
    return size.factor * math.prod(known.get(name, 1 << 12) for name in size.symbols)


def words_of(size: Size) -> str:
    """Returns a size in words, such as ``4*s0``."""
    return "*".join([*([str(size.factor)] if size.factor != 1 or not size.symbols else []), *size.symbols])


def size_of(value: Any, fixed: Mapping[str, int]) -> Size:
    """Returns an int or a torch.SymInt as a :class:`Size`. Symbols in ``fixed`` become their values."""
    if isinstance(value, int):
        return _NUMBER(value)
    return monomial(compat.routing.expression(value), fixed)


def monomial(expr: Any, fixed: Mapping[str, int]) -> Size:
    """Returns a sympy expression as a :class:`Size`. An expression that is not a monomial becomes one symbol."""
    if expr.is_Integer:
        return Size(int(expr))
    if expr.is_Mul:
        return product_of(monomial(part, fixed) for part in expr.args)
    if expr.is_Pow and expr.exp.is_Integer and int(expr.exp) > 0:
        return product_of([monomial(expr.base, fixed)] * int(expr.exp))
    if type(expr).__name__ == "FloorDiv":
        base, divisor = (monomial(part, fixed) for part in expr.args)
        quotient = base.over(divisor)
        if quotient is not None:
            return quotient
    known = {symbol: fixed[str(symbol)] for symbol in expr.free_symbols if str(symbol) in fixed}
    if known:
        return monomial(expr.subs(known), {})
    return Size(1, (str(expr),))


def product_of(sizes: Iterable[Size]) -> Size:
    """Returns the number of elements of a tensor with these sizes."""
    return _product(tuple(sizes))


@functools.lru_cache(1 << 12)
def _product(sizes: tuple[Size, ...]) -> Size:
    total = ONE
    for size in sizes:
        total = total.times(size)
    return total


class Var:
    """An index variable that runs over ``[0, size)``."""

    __slots__ = ("size",)
    open = False
    """Whether a view may split the variable by a number that does not divide its size.

    That is so for a slice of something longer.
    """

    def __init__(self, size: Size) -> None:
        self.size = size


class Part(NamedTuple):
    """``of // by`` or, if ``mod``, ``of % by``, where a view splits a variable."""

    of: Any
    by: Size
    mod: bool


Atom = Var | Part | None  # None stands for the constant


def bound_of(atom: Any) -> Size:
    """Returns the number of values that an atom takes."""
    if isinstance(atom, Var):
        return atom.size
    if atom.mod:
        return atom.by
    whole = bound_of(atom.of)
    quotient = whole.over(atom.by)
    if quotient is None and _variable(atom).open:
        rounded = -(-whole.factor // atom.by.factor)
        return Size(rounded) if not whole.symbols + atom.by.symbols else Size(1, (f"ceil({whole}/{atom.by})",))
    if quotient is None:
        raise Unsupported
    return quotient


def span(index: Index) -> tuple[int, int | None]:
    """Returns the smallest and the largest number that ``index`` can be, None for a largest one that is not known.

    Raises Unsupported if that is not a sum of numbers that are never negative.
    """
    first = index.terms.get(None, Size(0))
    moving = [(bound_of(atom), c) for atom, c in index.terms.items() if atom is not None]
    if first.symbols or any(c.symbols or c.factor < 0 for _, c in moving):
        raise Unsupported
    if any(bound.symbols for bound, _ in moving):
        return first.factor, None
    return first.factor, first.factor + sum(c.factor * (bound.factor - 1) for bound, c in moving)


def _variable(atom: Any) -> Var:
    """Returns the variable that an atom is, or is a part of."""
    while isinstance(atom, Part):
        atom = atom.of
    found: Var = atom
    return found


class Index:
    """An immutable linear form ``{atom: size}``; the atom of the constant is None."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: dict[Any, Size]) -> None:
        self.terms = terms
        self._hash: int | None = None

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Index) and self.terms == other.terms)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.terms.items()))
        return self._hash

    @property
    def constant(self) -> int | None:
        """Returns the value if the index is a known number, else None."""
        if not self.terms:
            return 0
        if set(self.terms) == {None} and not self.terms[None].symbols:
            return self.terms[None].factor
        return None

    def atoms(self) -> set[Any]:
        """Returns the atoms, without that of the constant."""
        return {a for a in self.terms if a is not None}

    def variables(self) -> set[Var]:
        """Returns the variables, those inside quotients and remainders included."""
        return {_variable(atom) for atom in self.atoms()}

    def times(self, size: Size) -> Index:
        """Returns the index times ``size``."""
        return Index({a: c.times(size) for a, c in self.terms.items()}) if size.factor else Index({})

    def plus(self, other: Index) -> Index:
        """Returns the sum of two indices. Raises Unsupported if two coefficients of an atom differ in their symbols."""
        if not other.terms:
            return self
        terms = dict(self.terms)
        for atom, c in other.terms.items():
            have = terms.get(atom)
            if have is None:
                terms[atom] = c
            elif have.symbols == c.symbols:
                total = Size(have.factor + c.factor, c.symbols)
                if total.factor:
                    terms[atom] = total
                else:
                    del terms[atom]
            else:
                raise Unsupported
        return Index(_rejoin(terms))


def _rejoin(terms: dict[Any, Size]) -> dict[Any, Size]:
    """Replaces ``by * (a // by) + a % by`` by ``a``."""
    for atom in list(terms):
        if isinstance(atom, Part) and atom.mod and atom in terms:
            whole = Part(atom.of, atom.by, False)
            if terms.get(whole) == terms[atom].times(atom.by):
                coefficient = terms.pop(atom)
                del terms[whole]
                return Index(terms).plus(Index({atom.of: coefficient})).terms
    return terms


def const(value: int) -> Index:
    """Returns a number as an index."""
    return Index({None: Size(value)} if value else {})


def var(variable: Var) -> Index:
    """Returns a variable as an index: 0 if its size is 1."""
    return Index({variable: ONE}) if variable.size != ONE else Index({})


def linear(index: Sequence[Index], shape: Sequence[Size]) -> Index:
    """Returns the row-major position of ``index`` in a tensor of ``shape``."""
    strides = _strides(tuple(shape))
    atoms = [atom for at in index for atom in at.terms]
    if (
        len({*atoms}) == len(atoms)
        and not any(isinstance(atom, Part) for atom in atoms)
        and all(s.factor for s in shape)
    ):
        return Index(
            {a: c.times(stride) for at, stride in zip(index, strides, strict=True) for a, c in at.terms.items()}
        )
    # A variable occurs twice, or parts of one may rejoin: add index by index.
    total = Index({})
    for at, stride in zip(reversed(index), reversed(strides), strict=True):
        total = total.plus(at.times(stride))
    return total


@functools.lru_cache(1 << 12)
def _strides(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    strides, total = [], ONE
    for size in reversed(shape):
        strides.append(total)
        total = total.times(size)
    return tuple(reversed(strides))


def _below(terms: dict[Any, Size], limit: Size) -> bool:
    """Returns whether the sum of the terms is always less than ``limit``."""
    if not limit.symbols and all(not c.symbols for c in terms.values()):
        top = 0
        for atom, c in terms.items():
            if c.factor < 0:
                return False
            if atom is None:
                top += c.factor
                continue
            bound = bound_of(atom)
            if bound.symbols:
                return False
            top += c.factor * (bound.factor - 1)
        return top < limit.factor
    # With symbols, treat the terms as digits of a mixed radix, each unit a multiple of the range below it.
    reach = ONE
    for atom, c in sorted(terms.items(), key=lambda item: (len(item[1].symbols), item[1].factor)):
        if atom is None or c.factor < 0 or c.over(reach) is None:
            return False
        reach = c.times(bound_of(atom))
    return limit.over(reach) is not None


def divmod_index(index: Index, by: Size) -> tuple[Index, Index]:
    """Returns ``index // by`` and ``index % by``. Raises Unsupported if they are not linear forms."""
    if by == ONE:
        return index, Index({})
    quotient: dict[Any, Size] = {}
    rest: dict[Any, Size] = {}
    for atom, c in index.terms.items():
        q = c.over(by)
        if q is not None:
            quotient[atom] = q
        elif atom is None and not c.symbols and not by.symbols:
            if c.factor // by.factor:
                quotient[None] = Size(c.factor // by.factor)
            rest[None] = Size(c.factor % by.factor)
        else:
            rest[atom] = c
    if _below(rest, by):
        return Index(quotient), Index(rest)
    for atom, c in rest.items():
        others = {a: v for a, v in rest.items() if a is not atom}
        per = by.over(c)
        if atom is None or per is None or not _below(others, c):
            continue
        if bound_of(atom).over(per) is None and not _variable(atom).open:
            raise Unsupported
        high, low = Part(atom, per, False), Part(atom, per, True)
        return Index(quotient).plus(Index({high: ONE})), Index(others).plus(Index({low: c}))
    raise Unsupported


def reshape(index: Sequence[Index], shape: Sequence[Size], base: Sequence[Size]) -> tuple[Index, ...]:
    """Maps element ``index`` of a view with ``shape`` to its index in the base tensor of shape ``base``."""
    result: list[Index] = []
    o = len(shape)
    b = len(base)
    # Match groups of dimensions with equal products, from the last to the first.
    while b or o:
        first_o, first_b = o, b
        here, there = ONE, ONE
        if o:
            o -= 1
            here = here.times(shape[o])
        if b:
            b -= 1
            there = there.times(base[b])
        while here != there:
            if o and there.over(here) is not None:
                o -= 1
                here = here.times(shape[o])
            elif b and here.over(there) is not None:
                b -= 1
                there = there.times(base[b])
            elif o and (not b or (here.factor <= there.factor and len(here.symbols) <= len(there.symbols))):
                o -= 1
                here = here.times(shape[o])
            elif b:
                b -= 1
                there = there.times(base[b])
            else:
                raise Unsupported
        flat = linear(index[o:first_o], shape[o:first_o])
        group: list[Index] = []
        for size in reversed(base[b:first_b][1:]):
            flat, low = divmod_index(flat, size)
            group.append(low)
        if first_b > b:
            group.append(flat)
        result += group
    return tuple(reversed(result))
