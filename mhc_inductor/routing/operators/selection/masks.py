"""What an element of a mask, or of a tensor of numbers that masks are made of, is in normal form.

Comparisons, ``any``, ``one_hot``, ``scatter``, sums and cumulative sums of indicators, ``gather`` of blocks, ``tril`` and
unrolled ``|=`` all become the same thing (:mod:`.keysets`).
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mhc_inductor.routing.graph.bounds import TooLarge, remembered
from mhc_inductor.routing.graph.expressions import Ref, _dim, _reduced, aten
from mhc_inductor.routing.graph.expressions import number as scalar
from mhc_inductor.routing.graph.index import Size, Unsupported, Var, var
from mhc_inductor.routing.graph.linear import (
    Datum,
    Key,
    Linear,
    atom,
    floor,
    number,
    of_index,
    of_scalar,
)
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.operators.selection.elements import (
    ADD,
    ALL,
    AND,
    ANY,
    ARANGE,
    CASTS,
    MULTIPLY,
    NOT,
    OR,
    SUB,
    SUMS,
    WHOLE,
    constant_of,
    inner,
    keyed,
    operand,
    rounded,
    uncast,
)
from mhc_inductor.routing.operators.selection.fills import PossibleValues
from mhc_inductor.routing.operators.selection.index_checks import Indices
from mhc_inductor.routing.operators.selection.keys import (
    FALSE,
    MOST,
    TRUE,
    All,
    AnyOf,
    Given,
    KeyData,
    both,
    compared,
    differences,
    either,
    has_data,
    opposite,
)
from mhc_inductor.routing.operators.selection.placed import Placed

_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "le": operator.le,
    "ge": operator.ge,
    "lt": operator.lt,
    "gt": operator.gt,
    "eq": operator.eq,
    "ne": operator.ne,
}
_OPPOSITE = {"le": "gt", "gt": "le", "lt": "ge", "ge": "lt", "eq": "ne", "ne": "eq"}
_MIRROR = {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt", "eq": "eq", "ne": "ne"}
_COMPARISONS = {getattr(getattr(aten, name), overload): name for name in _OPPOSITE for overload in ("Tensor", "Scalar")}


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """``sum(factor * indicator)``; ``exact``: overlapping indicators add up, else the number is at least the smallest
    factor that applies; ``unit``: the number is 0 or 1; ``most``: no magnitude above it occurs on the way."""

    terms: tuple[tuple[float, All], ...]
    exact: bool = True
    unit: bool = False
    most: float = math.inf

    @property
    def least(self) -> float:
        """The smallest factor: if none is negative, the smallest number that is not 0."""
        return min((factor for factor, _ in self.terms), default=1.0)

    def within(self, dtype: torch.dtype) -> Count:
        """Returns the count as ``dtype`` holds it. Raises Unsupported where that may be another number."""
        if not self.terms or dtype is torch.bool:
            return self
        if dtype.is_floating_point:
            factors = [rounded(f, dtype) for f, _ in self.terms]
            # Sums of numbers of one sign may be rounded; differences must stay whole numbers.
            if 0.0 in factors or (min(factors) < 0.0 and self.most > 2.0 / torch.finfo(dtype).eps and dtype in _HALVES):
                raise Unsupported
            terms = tuple((f, c) for f, (_, c) in zip(factors, self.terms, strict=True))
            return dataclasses.replace(self, terms=terms)
        whole = all(f == int(f) for f, _ in self.terms)
        wide = dtype in WHOLE and max(abs(f) for f, _ in self.terms) < 2**20
        narrow = self.most <= torch.iinfo(dtype).max and (self.least >= 0.0 or dtype is not torch.uint8)
        if not whole or not (wide or narrow):
            raise Unsupported
        return self


_HALVES = (torch.float16, torch.bfloat16)


def _product(*factors: float) -> float:
    return 0.0 if 0.0 in factors else math.prod(factors)


def _length(v: Var) -> float:
    return math.inf if v.size.symbols else float(v.size.factor)


def _constant(known: float) -> Count:
    return Count(((known, All()),) if known else (), unit=known in (0.0, 1.0), most=abs(known))


class Masks(Placed):
    """Evaluates elements of masks. ``seen`` are the values met that say which keys a query sees, from data."""

    def __init__(self, fixed: Mapping[str, int], hints: Mapping[str, int]) -> None:
        self.fixed = fixed
        self.hints = hints
        self.equal: set[frozenset[Size]] = set()
        """Sizes that are taken to be one number, which the rewrite must guard."""
        self.sized: dict[Size, tuple[Value, int]] = {}
        """Where sizes are that negative indices count from."""
        self.seen: dict[Value, None] = {}
        self.possible = PossibleValues()
        self.indices = Indices()
        self._known: dict[Any, Any] = {}
        """What was found of each element, or why nothing was: masks are in other masks more than once."""

    # --- booleans ---

    def truth(self, ref: Ref, want: bool = True) -> AnyOf:
        """When ``ref``, an element of a boolean (or nonzero) tensor, is ``want``. Raises Unsupported."""

        def find() -> AnyOf:
            found = self._find(ref, want)
            self._note(ref, found)
            return found

        found: AnyOf = remembered(self._known, (ref, want), find, ref.value)
        return found

    def _note(self, ref: Ref, found: AnyOf) -> None:
        if keyed(ref) and any(has_data(conj) for conj in found):
            self.seen[ref.value] = None

    def _find(self, ref: Ref, want: bool) -> AnyOf:
        value, func = ref.value, ref.value.func
        below = inner(ref)
        if below is not None:
            return self.truth(below, want)
        known = constant_of(value)
        if known is not None:
            return TRUE if bool(known) == want else FALSE
        if value.dtype is not torch.bool:
            return self._nonzero(ref, want)
        if func in CASTS:
            return self.truth(Ref(value.args[0], ref.index), want)
        if func in NOT:
            return self.truth(Ref(value.args[0], ref.index), not want)
        if (
            func in AND
            or func in OR
            or func in MULTIPLY
            or func is aten.maximum.default
            or func is aten.minimum.default
        ):
            a, b = (self._side(x, ref, want) for x in value.args[:2])
            conjunction = (func in AND or func in MULTIPLY or func is aten.minimum.default) == want
            if conjunction and value.args[0] is value.args[1]:
                return a
            return both(a, b) if conjunction else either(a, b)
        if func in _COMPARISONS:
            return self._comparison(ref, _COMPARISONS[func], want)
        if func in ANY or func in ALL:
            inside, bound = _reduced(ref)
            if (func in ANY) != want:
                self._note(ref, self.truth(inside, not want))
                raise Unsupported
            return [All(c.literals, c.bound + tuple(bound)) for c in self.truth(inside, want)]
        found = self._structured(ref, want, lambda r, w: self.truth(r, w))
        if found is not None:
            return found
        if func is aten.isin.Tensor_Tensor and want and len(value.args) == 2 and not value.kwargs:
            tests = value.args[1]
            bound = [Var(s) for s in tests.shape]
            this = self.whole(operand(value.args[0], ref))
            found = compared("eq", this, self.whole(Ref(tests, tuple(var(v) for v in bound))))
            return [All(c.literals, (*c.bound, *bound)) for c in found]
        if keyed(ref):
            raise KeyData(ref)
        return [All(frozenset({Given(ref, want)}))]

    def _nonzero(self, ref: Ref, want: bool) -> AnyOf:
        """Whether a number is not 0."""
        try:
            return compared("ne" if want else "eq", self.whole(ref), number(0))
        except Unsupported:
            return self._positive(self.count(ref), want)

    def _comparison(self, ref: Ref, op: str, want: bool) -> AnyOf:
        left, right = ref.value.args[:2]
        if not want:
            op = _OPPOSITE[op]
        if constant_of(left) is not None and constant_of(right) is None:
            left, right, op = right, left, _MIRROR[op]
        try:
            return compared(op, self._whole_side(left, ref), self._whole_side(right, ref))
        except Unsupported:
            known = constant_of(right)
            if known is None:
                raise
        if math.isinf(known):
            # index_mask == -inf
            if op in ("eq", "ne") and known < 0:
                mask = operand(left, ref)
                if self.possible(mask.value) <= {0.0, known}:
                    return self.additive(mask, op == "ne")
            raise Unsupported
        if isinstance(left, Value) and left.dtype is torch.bool and known in (0.0, 1.0) and op in ("eq", "ne"):
            return self.truth(operand(left, ref), (op == "eq") == bool(known))
        try:
            counted = self.count(operand(left, ref))
        except Unsupported:
            # index_mask == 0
            if op in ("eq", "ne") and known == 0 and isinstance(left, Value) and left.dtype.is_floating_point:
                return self.additive(operand(left, ref), op == "eq")
            raise
        return self._against(counted, op, known)

    def _against(self, counted: Count, op: str, known: float) -> AnyOf:
        """Whether a count is ``op`` a number: where 0 and every other count answer differently."""
        if not counted.exact or all(factor > 0 for factor, _ in counted.terms):
            below = _HOLDS[op](0.0, known)
            # Counts of one sign only grow from the smallest factor on.
            others = [counted.least, math.inf] if not counted.unit else [1.0]
        else:
            below, others = _HOLDS[op](0.0, known), [1.0, math.inf]
            if op in ("eq", "ne") and known != 0.0:
                raise Unsupported
        answers = {_HOLDS[op](x, known) for x in others}
        if below in answers or len(answers) != 1:
            raise Unsupported
        return self._positive(counted, not below)

    def _positive(self, counted: Count, want: bool) -> AnyOf:
        """Whether a count is not 0."""
        if not want:
            found = self._positive(counted, True)
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

    # --- numbers ---

    def _whole_side(self, a: Any, ref: Ref) -> Linear:
        return self.whole(operand(a, ref)) if isinstance(a, Value) and a.shape else self._scalar(a)

    def _scalar(self, a: Any) -> Linear:
        if isinstance(a, Value):
            return self.whole(Ref(a, ()))
        return of_scalar(a, self.fixed)

    def whole(self, ref: Ref, wrap: Size | None = None) -> Linear:
        """An element of an integer tensor. Raises Unsupported, and for sums of indicators, which :meth:`count` takes."""
        found: Linear = remembered(self._known, (ref, "whole", wrap), lambda: self._whole(ref, wrap), ref.value)
        return found

    def _whole(self, ref: Ref, wrap: Size | None) -> Linear:
        outer = ref
        while (below := inner(ref)) is not None or (
            ref.value.func in CASTS and ref.value.dtype in WHOLE and ref.value.args[0].dtype in WHOLE
        ):
            ref = below if below is not None else Ref(ref.value.args[0], ref.index)
        if ref.value.dtype is torch.bool or ref.value.dtype.is_floating_point or ref.value.dtype.is_complex:
            if outer.value.dtype.is_floating_point or outer.value.dtype is torch.bool:
                known = constant_of(ref.value)
                if known is None or known != known or math.isinf(known) or known != int(known):
                    raise Unsupported
                return number(int(known))
            return self._datum(outer, wrap)
        if ref.value.dtype not in WHOLE:  # sums of narrow ones wrap
            return self._datum(ref, wrap)
        try:
            found = remembered(self._known, (ref, "sum"), lambda: self._arithmetic(ref), ref.value)
        except KeyData:
            raise
        except Unsupported:
            return self._datum(ref, wrap)
        # Only an element itself, or what is never negative, is the same from both ends.
        if wrap is None or (not found.data() and found.never_negative):
            return found
        return self._datum(ref, wrap)

    def _datum(self, ref: Ref, wrap: Size | None) -> Linear:
        if keyed(ref):
            raise KeyData(ref)
        return atom(Datum(ref, wrap))

    def _arithmetic(self, ref: Ref) -> Linear:
        value, func, args = ref.value, ref.value.func, ref.value.args
        known = constant_of(value)
        if known is not None:
            return number(int(known))
        if func in ARANGE:
            start, stop, step_ = (None if k is None else args[k] if k < len(args) else None for k in ARANGE[func])
            del stop
            stride = of_scalar(1 if step_ is None else step_, self.fixed).value
            if stride is None:
                raise Unsupported
            first = of_scalar(0 if start is None else start, self.fixed)
            return first.plus(of_index(ref.index[0]) if ref.index else number(0), stride)
        sides = [self._whole_side(a, ref) for a in args[:2]] if func in _INTEGER else []
        if func in ADD or func in SUB:
            alpha = value.kwargs.get("alpha", args[2] if len(args) > 2 else 1)
            if not isinstance(alpha, int):
                raise Unsupported
            return sides[0].plus(sides[1], alpha if func in ADD else -alpha)
        if func in (aten.rsub.Scalar, aten.rsub.Tensor):
            if len(args) > 2 or value.kwargs:
                raise Unsupported
            return sides[1].minus(sides[0])
        if func in MULTIPLY:
            for a, b in (sides, sides[::-1]):
                if not a.terms:
                    return b.times(a.known)
        if func is aten.neg.default:
            return self.whole(Ref(args[0], ref.index)).times(-1)
        if func in (aten.floor_divide.default, *_DIVISIONS, *_SHIFTS):
            by = sides[1].known
            if (func in _DIVISIONS and not self._rounds(value, sides[0])) or (func in _SHIFTS and not 0 <= by < 32):
                raise Unsupported
            return floor(sides[0], 2**by if func in _SHIFTS else by)
        if func in _REMAINDERS:
            by = sides[1].known
            return sides[0].plus(floor(sides[0], by), -by)
        if not keyed(ref):
            return atom(Datum(ref))
        raise Unsupported

    def _rounds(self, value: Value, of: Linear) -> bool:
        mode = value.kwargs.get("rounding_mode", value.args[2] if len(value.args) > 2 else None)
        plain = all(isinstance(a, Var) and c >= 0 for a, c in of.terms) and all(c >= 0 for _, c in of.constant)
        return mode == "floor" or (mode == "trunc" and plain)

    def count(self, ref: Ref) -> Count:
        """Returns an element of a tensor of numbers as a sum of indicators. Raises Unsupported."""
        while (below := inner(ref)) is not None and below.value.dtype is ref.value.dtype:
            ref = below
        found: Count = remembered(self._known, (ref, "count"), lambda: self._count(ref), ref.value)
        return found

    def _count(self, ref: Ref) -> Count:
        value = ref.value
        known = constant_of(value)
        if known is not None:
            return _constant(known)
        if value.dtype is torch.bool:
            found = self.truth(ref)
            alone = len(found) <= 1 and not any(c.bound for c in found)
            return Count(tuple((1.0, c) for c in found), alone, True, 1.0)
        if value.func in CASTS:
            return self.count(Ref(value.args[0], ref.index)).within(value.dtype)
        counted = self._counted(ref).within(value.dtype)
        if len(counted.terms) > MOST:
            raise TooLarge("terms of a count", MOST)
        return counted

    def _counted(self, ref: Ref) -> Count:
        value, func, args = ref.value, ref.value.func, ref.value.args
        if func in ADD or func in SUB or func is aten.rsub.Scalar:
            return self._sum(ref)
        if func is aten.neg.default:
            a = self.count(Ref(args[0], ref.index))
            return Count(tuple((-f, c) for f, c in a.terms), a.exact, most=a.most)
        if func in MULTIPLY or func is aten.minimum.default:
            a, b = (self._count_side(x, ref) for x in args[:2])
            if {v for _, c in a.terms for v in c.bound} & {v for _, c in b.terms for v in c.bound}:
                raise Unsupported  # the same sum twice: its variables would count for both
            if func is aten.minimum.default and not (a.unit and b.unit):
                raise Unsupported
            terms = [(f * g, e) for f, c in a.terms for g, d in b.terms for e in both([c], [d])]
            return Count(tuple(terms), a.exact and b.exact, a.unit and b.unit, _product(a.most, b.most))
        if func in SUMS or (func in (aten.amax.default, aten.max.dim) and value.out == 0):
            return self._reduced_count(ref)
        if func is aten.cumsum.default:
            d = _dim(value, args[1])
            u = Key(value.shape[d])
            a = self.count(Ref(args[0], (*ref.index[:d], var(u), *ref.index[d + 1 :])))
            upto = compared("le", atom(u), of_index(ref.index[d]))
            terms = [(f, e) for f, c in a.terms for e in both([All(c.literals, (*c.bound, u))], upto)]
            return Count(tuple(terms), a.exact, most=_product(a.most, *map(_length, (u,))))
        if func in (aten.scatter_add.default, aten.scatter_reduce.two):
            return self._scattered(ref)
        if func in _CLAMPS:
            return self._clamped(ref)
        return self._placed_count(ref)

    def _sum(self, ref: Ref) -> Count:
        value, args = ref.value, ref.value.args
        a, b = (self._count_side(x, ref) for x in args[:2])
        alpha = scalar(value.kwargs.get("alpha", args[2] if len(args) > 2 else 1))
        if alpha is None:
            raise Unsupported
        if value.func is aten.rsub.Scalar:
            a, b = b, a
        factor = alpha if value.func in ADD else -alpha
        terms = (*a.terms, *((factor * f, c) for f, c in b.terms))
        return Count(terms, a.exact and b.exact, most=a.most + abs(factor) * b.most)

    def _reduced_count(self, ref: Ref) -> Count:
        inside, bound = _reduced(ref)
        a = self.count(inside)
        terms = tuple((f, All(c.literals, c.bound + tuple(bound))) for f, c in a.terms)
        if ref.value.func in SUMS:
            return Count(terms, a.exact, most=_product(a.most, *map(_length, bound)))
        if any(f < 0 for f, _ in a.terms):
            raise Unsupported
        return Count(terms, False, a.unit, a.most)

    def _clamped(self, ref: Ref) -> Count:
        a = self.count(Ref(ref.value.args[0], ref.index))
        low, high = _limits(ref.value)
        if a.least < 0 or low not in (None, 0.0) or not (high is None or high >= 1.0):
            raise Unsupported
        top = math.inf if high is None else high
        terms = tuple((min(f, top), c) for f, c in a.terms)
        unit = a.unit or (high == 1.0 and a.least >= 1.0)
        return Count(terms, False, unit, min(a.most, top))

    def _placed_count(self, ref: Ref) -> Count:
        """Operations that place numbers none of which is negative: the smallest stands for all."""
        each: list[Count] = []

        def counted(r: Ref, want: bool) -> AnyOf:
            found = self.count(r)
            if not want or found.least < 0:
                raise Unsupported
            each.append(found)
            return [c for _, c in found.terms]

        placed = self._structured(ref, True, counted)
        if placed is None:
            raise Unsupported
        least = min((found.least for found in each if found.terms), default=1.0)
        most = max((found.most for found in each), default=0.0)
        return Count(tuple((least, c) for c in placed), False, all(found.unit for found in each), most)

    def _count_side(self, a: Any, ref: Ref) -> Count:
        known = constant_of(a)
        return self.count(operand(a, ref)) if known is None else _constant(known)

    def _scattered(self, ref: Ref) -> Count:
        x, d, index, source, *rest = ref.value.args
        summed = ref.value.func is aten.scatter_add.default or rest[0] == "sum"
        if not summed and rest[0] not in ("amax",):
            raise Unsupported
        base = self.count(Ref(x, ref.index))
        total = list(base.terms) if ref.value.kwargs.get("include_self", True) else []
        most = base.most
        d = _dim(ref.value, d)
        for places, values in _pieces(index, source, d):
            (hit,) = self._hits(ref, d, places) or (None,)
            if hit is None:
                continue
            j = hit.bound[-1]
            known = constant_of(values)
            if known is not None:
                total.append((known, hit))
                most += _product(abs(known), _length(j))
                continue
            added = self.count(Ref(values, (*ref.index[:d], var(j), *ref.index[d + 1 :])))
            total += [(f, All(hit.literals | c.literals, hit.bound + c.bound)) for f, c in added.terms]
            most += _product(added.most, _length(j))
        if not summed and any(f < 0 for f, _ in total):
            raise Unsupported
        return Count(tuple((f, c) for f, c in total if f), base.exact and summed, most=most)

    # --- additive masks ---

    def additive(self, ref: Ref, want: bool = True) -> AnyOf:
        """Returns when an element of an additive mask is 0 (``want``), or not. Raises Unsupported."""
        below = uncast(ref)
        if below.value.func is None and keyed(below):
            raise KeyData(below)
        _one_sign(self.possible(ref.value))
        found = self._zero(ref, want)
        self._note(ref, found)
        return found

    def _zero(self, ref: Ref, want: bool) -> AnyOf:
        ref = uncast(ref)
        found: AnyOf = remembered(self._known, (ref, want, "zero"), lambda: self._find_zero(ref, want), ref.value)
        return found

    def _find_zero(self, ref: Ref, want: bool) -> AnyOf:
        value, func, args = ref.value, ref.value.func, ref.value.args
        known = constant_of(value)
        if known is not None:
            return TRUE if (known == 0.0) == want else FALSE
        if not value.dtype.is_floating_point:
            raise Unsupported
        if func in ADD or func is aten.minimum.default:
            low, high = (_one_sign(self.possible(a)) for a in args[:2])
            if low * high < 0.0 or (func not in ADD and max(low, high) > 0.0):
                raise Unsupported  # the parts may cancel
            parts = [self._zero(operand(a, ref), want) for a in args[:2] if constant_of(a) != 0.0]
            return both(*parts) if want and len(parts) > 1 else either(*parts)
        if func is aten.log.default:
            if not self.possible(args[0]) <= {0.0, 1.0}:
                raise Unsupported
            return self._flag(Ref(args[0], ref.index), want)
        if func in MULTIPLY:
            for a, b in (args, args[::-1]):
                known = constant_of(b)
                if known is not None and known != 0.0 and not math.isinf(known):
                    return self._scaled(operand(a, ref), want)
        found = self._structured(ref, want, self._zero)
        if found is None:
            raise Unsupported
        self._note(ref, found)
        return found

    def _scaled(self, ref: Ref, want: bool) -> AnyOf:
        """Whether ``ref``, which is multiplied by a number, is 0: ``1 - mask``, ``mask - 1``, or ``~mask``."""
        below = uncast(ref)
        if below.value.dtype is torch.bool:
            return self.truth(below, not want)
        func, args = below.value.func, below.value.args
        one = None
        if (func in SUB or func in ADD or func is aten.rsub.Scalar) and len(args) == 2 and not below.value.kwargs:
            constants = [constant_of(a) for a in args]
            if func in SUB and 1.0 in constants:
                one = args[1 - constants.index(1.0)]
            elif (func in ADD and constants[1] == -1.0) or (func is aten.rsub.Scalar and constants[1] == 1.0):
                one = args[0]
        if one is None:
            return self._zero(ref, want)
        return self._flag(operand(one, below), want)

    def _flag(self, ref: Ref, want: bool) -> AnyOf:
        """Whether a number that is 0 or 1 is 1 (``want``)."""
        ref = uncast(ref)
        if ref.value.dtype is not torch.bool:
            counted = self.count(ref)
            if not counted.unit or len(counted.terms) != 1 or counted.terms[0][1].bound:
                raise Unsupported
        return self.truth(ref, want)


def _one_sign(values: frozenset[float]) -> float:
    """Returns the sign of the numbers that are not 0. Raises Unsupported where there are both."""
    signs = {math.copysign(1.0, v) for v in values if v}
    if len(signs) > 1:
        raise Unsupported
    return signs.pop() if signs else 0.0


_SHIFTS = (aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar, aten.__rshift__.Scalar)
_CLAMPS = (aten.relu.default, aten.clamp_min.default, aten.clamp.default, aten.clamp_max.default)
_DIVISIONS = (aten.div.Tensor_mode, aten.div.Scalar_mode)
_REMAINDERS = (aten.remainder.Scalar, aten.remainder.Tensor)
_INTEGER = {
    *_REMAINDERS,
    *(*ADD, *SUB, *MULTIPLY, *_SHIFTS, aten.rsub.Scalar, aten.rsub.Tensor),
    *(aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode),
}


def _limits(value: Value) -> tuple[float | None, float | None]:
    """The bounds of a relu or a clamp; NaN where one is no number."""
    if value.func is aten.relu.default:
        return 0.0, None
    given = [*value.args[1:], None][:2] if value.func is aten.clamp.default else [value.args[1], None]
    given = given[::-1] if value.func is aten.clamp_max.default else given
    low, high = (None if b is None else number_or_nan(constant_of(b)) for b in given)
    return low, high


def number_or_nan(a: float | None) -> float:
    return math.nan if a is None else a


def _pieces(index: Value, source: Value, d: int) -> list[tuple[Value, Any]]:
    """The pieces that index and source of a scatter are put together from."""
    a, b = (x.args if x.func is aten.cat.default else None for x in (index, source))
    if a is not None and b is not None:
        same = all(_dim(x, y[1] if len(y) > 1 else 0) == d for x, y in ((index, a), (source, b)))
        if same and [p.shape for p in a[0]] == [p.shape for p in b[0]]:
            return list(zip(a[0], b[0], strict=True))
    return [(index, source)]
