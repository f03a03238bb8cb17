# SPDX-License-Identifier: Apache-2.0
"""Evaluates elements of number tensors as sums of indicators, conditions that count as 1 where they hold."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import TYPE_CHECKING, Any

import torch

from mhc_inductor.routing.graph.bounds import TooLarge, remembered
from mhc_inductor.routing.graph.expressions import Ref, _dim, _reduced, aten
from mhc_inductor.routing.graph.gates import CLAMPS, limits
from mhc_inductor.routing.graph.index import Unsupported, Var, var
from mhc_inductor.routing.graph.linear import Key, atom, of_index
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.masks.elements import (
    CASTS,
    MULTIPLY,
    SUMS,
    WHOLE,
    constant_of,
    inner,
    operand,
    rounded,
    signed,
)
from mhc_inductor.routing.masks.keys import MOST, TRUE, All, AnyOf, both, compared, differences, either, opposite

if TYPE_CHECKING:
    from mhc_inductor.routing.masks.masks import Masks

_HALVES = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """A number as ``sum(factor * indicator)``.

    ``exact``: indicators that overlap add up; otherwise the number is at least the smallest factor that applies.
    ``unit``: the number is 0 or 1. ``most``: no intermediate result has a larger magnitude.
    """

    terms: tuple[tuple[float, All], ...]
    exact: bool = True
    unit: bool = False
    most: float = math.inf

    @property
    def least(self) -> float:
        """Returns the smallest factor. If no factor is negative, it is the smallest nonzero value."""
        return min((factor for factor, _ in self.terms), default=1.0)

    def within(self, dtype: torch.dtype) -> Count:
        """Returns the count as ``dtype`` stores it. Raises Unsupported if that may be a different number."""
        if not self.terms or dtype is torch.bool:
            return self
        if dtype.is_floating_point:
            factors = [rounded(f, dtype) for f, _ in self.terms]
            # Sums of numbers of one sign tolerate rounding; differences must stay whole numbers.
            if 0.0 in factors or (min(factors) < 0.0 and self.most > 2.0 / torch.finfo(dtype).eps and dtype in _HALVES):
                raise Unsupported
            terms = tuple((f, c) for f, (_, c) in zip(factors, self.terms, strict=True))
            return dataclasses.replace(self, terms=terms)
        whole = all(float(f).is_integer() for f, _ in self.terms)
        wide = dtype in WHOLE and max(abs(f) for f, _ in self.terms) < 2**20
        narrow = self.most <= torch.iinfo(dtype).max and (self.least >= 0.0 or dtype is not torch.uint8)
        if not whole or not (wide or narrow):
            raise Unsupported
        return self


def _product(*factors: float) -> float:
    """Returns the product of ``factors``, with 0 times infinity as 0."""
    return 0.0 if 0.0 in factors else math.prod(factors)


def _length(v: Var) -> float:
    """Returns the number of values of a variable, inf if its size is symbolic."""
    return math.inf if v.size.symbols else float(v.size.factor)


def _constant(known: float) -> Count:
    """Returns a constant as a count."""
    return Count(((known, All()),) if known else (), unit=known in (0.0, 1.0), most=abs(known))


class Counts:
    """Evaluates elements of number tensors."""

    def __init__(self, masks: Masks) -> None:
        self.masks = masks

    def of(self, ref: Ref) -> Count:
        """Returns an element of a number tensor as a sum of indicators. Raises Unsupported."""
        while (below := inner(ref)) is not None and below.value.dtype is ref.value.dtype:
            ref = below
        found: Count = remembered(self.masks.known, (ref, "count"), lambda: self._count(ref), ref.value)
        return found

    def _count(self, ref: Ref) -> Count:
        value = ref.value
        known = constant_of(value)
        if known is not None:
            return _constant(known)
        if value.dtype is torch.bool:
            found = self.masks.truth(ref)
            alone = len(found) <= 1 and not any(c.bound for c in found)
            return Count(tuple((1.0, c) for c in found), alone, True, 1.0)
        if value.func in CASTS:
            return self.of(Ref(value.args[0], ref.index)).within(value.dtype)
        counted = self._counted(ref).within(value.dtype)
        if len(counted.terms) > MOST:
            raise TooLarge("terms of a count", MOST)
        return counted

    def _counted(self, ref: Ref) -> Count:
        value, func = ref.value, ref.value.func
        if (sides := signed(value)) is not None:
            counts = [(factor, self._count_side(x, ref)) for factor, x in sides]
            terms = tuple((factor * f, c) for factor, a in counts for f, c in a.terms)
            most = sum(abs(factor) * a.most for factor, a in counts)
            return Count(terms, all(a.exact for _, a in counts), most=most)
        if func in MULTIPLY or func is aten.minimum.default:
            return self._product(ref)
        if func in SUMS or (func in (aten.amax.default, aten.max.dim) and value.out == 0):
            return self._reduced_count(ref)
        if func is aten.cumsum.default:
            return self._running(ref)
        if func in (aten.scatter_add.default, aten.scatter_reduce.two):
            return self._scattered(ref)
        if func is aten.relu.default or func in CLAMPS:
            return self._clamped(ref)
        return self._placed_count(ref)

    def _product(self, ref: Ref) -> Count:
        """Returns an element of a product, or of a minimum of two indicators."""
        func = ref.value.func
        a, b = (self._count_side(x, ref) for x in ref.value.args[:2])
        if {v for _, c in a.terms for v in c.bound} & {v for _, c in b.terms for v in c.bound}:
            raise Unsupported  # both operands contain the same sum and would share its bound variables
        if func is aten.minimum.default and not (a.unit and b.unit):
            raise Unsupported
        terms = [(f * g, e) for f, c in a.terms for g, d in b.terms for e in both([c], [d])]
        return Count(tuple(terms), a.exact and b.exact, a.unit and b.unit, _product(a.most, b.most))

    def _running(self, ref: Ref) -> Count:
        """Returns an element of a cumulative sum."""
        value, args = ref.value, ref.value.args
        d = _dim(value, args[1])
        u = Key(value.shape[d])
        a = self.of(Ref(args[0], (*ref.index[:d], var(u), *ref.index[d + 1 :])))
        upto = compared("le", atom(u), of_index(ref.index[d]))
        terms = [(f, e) for f, c in a.terms for e in both([All(c.literals, (*c.bound, u))], upto)]
        return Count(tuple(terms), a.exact, most=_product(a.most, _length(u)))

    def _reduced_count(self, ref: Ref) -> Count:
        inside, bound = _reduced(ref)
        a = self.of(inside)
        terms = tuple((f, All(c.literals, c.bound + tuple(bound))) for f, c in a.terms)
        if ref.value.func in SUMS:
            return Count(terms, a.exact, most=_product(a.most, *map(_length, bound)))
        if any(f < 0 for f, _ in a.terms):
            raise Unsupported
        return Count(terms, False, a.unit, a.most)

    def _clamped(self, ref: Ref) -> Count:
        a = self.of(Ref(ref.value.args[0], ref.index))
        low, high = (0.0, None) if ref.value.func is aten.relu.default else limits(ref.value)
        top = math.inf if high is None else constant_of(high)
        if a.least < 0 or (low is not None and constant_of(low) != 0.0) or top is None or not top >= 1.0:
            raise Unsupported
        terms = tuple((min(f, top), c) for f, c in a.terms)
        unit = a.unit or (top == 1.0 and a.least >= 1.0)
        return Count(terms, False, unit, min(a.most, top))

    def _placed_count(self, ref: Ref) -> Count:
        """Returns an element of an op that places numbers, none of them negative (see :mod:`.scatters`).

        Every number counts as the smallest one.
        """
        each: list[Count] = []

        def counted(r: Ref, want: bool) -> AnyOf:
            found = self.of(r)
            if not want or found.least < 0:
                raise Unsupported
            each.append(found)
            return [c for _, c in found.terms]

        placed = self.masks.placed.structured(ref, True, counted)
        if placed is None:
            raise Unsupported
        least = min((found.least for found in each if found.terms), default=1.0)
        most = max((found.most for found in each), default=0.0)
        return Count(tuple((least, c) for c in placed), False, all(found.unit for found in each), most)

    def _count_side(self, a: Any, ref: Ref) -> Count:
        known = constant_of(a)
        return self.of(operand(a, ref)) if known is None else _constant(known)

    def _scattered(self, ref: Ref) -> Count:
        x, d, index, source, *rest = ref.value.args
        summed = ref.value.func is aten.scatter_add.default or rest[0] == "sum"
        if not summed and rest[0] not in ("amax",):
            raise Unsupported
        base = self.of(Ref(x, ref.index))
        total = list(base.terms) if ref.value.kwargs.get("include_self", True) else []
        most = base.most
        d = _dim(ref.value, d)
        for places, values in _pieces(index, source, d):
            (hit,) = self.masks.placed.hits(ref, d, places) or (None,)
            if hit is None:
                continue
            j = hit.bound[-1]
            added = self.of(Ref(values, (*ref.index[:d], var(j), *ref.index[d + 1 :])))
            total += [(f, All(hit.literals | c.literals, hit.bound + c.bound)) for f, c in added.terms]
            most += _product(added.most, _length(j))
        if not summed and any(f < 0 for f, _ in total):
            raise Unsupported
        return Count(tuple((f, c) for f, c in total if f), base.exact and summed, most=most)


def against(counted: Count, op: str, known: float) -> AnyOf:
    """Returns when ``counted op known`` holds; ``op`` is the name of a comparison in :mod:`operator`.

    Raises Unsupported unless the comparison has one answer for 0 and the opposite one for all other values.
    """
    holds = getattr(operator, op)
    below = holds(0.0, known)
    if not counted.exact or all(factor > 0 for factor, _ in counted.terms):
        # A count of one sign is 0 or at least the smallest factor.
        others = [counted.least, math.inf] if not counted.unit else [1.0]
    elif op in ("eq", "ne") and known != 0.0:
        raise Unsupported
    else:
        others = [1.0, math.inf]
    answers = {holds(x, known) for x in others}
    if below in answers or len(answers) != 1:
        raise Unsupported
    return positive(counted, not below)


def positive(counted: Count, want: bool) -> AnyOf:
    """Returns when a count is nonzero (``want``) or 0. Raises Unsupported."""
    if not want:
        found = positive(counted, True)
        total = TRUE
        for conj in found:
            if conj.bound:
                raise Unsupported
            total = both(total, either(*(opposite(x) for x in conj.literals)))
        return total
    if all(factor > 0 for factor, _ in counted.terms):
        return either([conj for _, conj in counted.terms])
    if not counted.exact:
        raise Unsupported
    return differences(counted.terms)


def _pieces(index: Value, source: Value, d: int) -> list[tuple[Value, Value]]:
    """Returns the pairs of index and source that a scatter is concatenated from, or the one pair itself."""
    a, b = (x.args if x.func is aten.cat.default else None for x in (index, source))
    if a is not None and b is not None:
        same = all(_dim(x, y[1] if len(y) > 1 else 0) == d for x, y in ((index, a), (source, b)))
        if same and [p.shape for p in a[0]] == [p.shape for p in b[0]]:
            return list(zip(a[0], b[0], strict=True))
    return [(index, source)]
