"""What an element of a mask, or of a tensor of numbers that masks are made of, is in normal form.

Comparisons, ``any``, ``one_hot``, ``scatter``, sums and cumulative sums of indicators, ``gather`` of blocks, ``tril`` and
unrolled ``|=`` all become the same thing (:mod:`.keysets`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mhc_inductor.routing.graph.bounds import remembered
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
    uncast,
)
from mhc_inductor.routing.operators.selection.keys import (
    FALSE,
    TRUE,
    All,
    Any_,
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

_OPPOSITE = {"le": "gt", "gt": "le", "lt": "ge", "ge": "lt", "eq": "ne", "ne": "eq"}
_MIRROR = {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt", "eq": "eq", "ne": "ne"}
_COMPARISONS = {getattr(getattr(aten, name), overload): name for name in _OPPOSITE for overload in ("Tensor", "Scalar")}


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """``sum(factor * indicator)``; ``exact``: overlapping indicators add up; ``unit``: the number is 0 or 1."""

    terms: tuple[tuple[float, All], ...]
    exact: bool = True
    unit: bool = False


def _constant(known: float) -> Count:
    return Count(((known, All()),) if known else (), unit=known in (0.0, 1.0))


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
        self._known: dict[Any, Any] = {}
        """What was found of each element, or why nothing was: masks are in other masks more than once."""

    # --- booleans ---

    def truth(self, ref: Ref, want: bool = True) -> Any_:
        """When ``ref``, an element of a boolean (or nonzero) tensor, is ``want``. Raises Unsupported."""

        def find() -> Any_:
            found = self._find(ref, want)
            self._note(ref, found)
            return found

        found: Any_ = remembered(self._known, (ref, want), find, ref.value)
        return found

    def _note(self, ref: Ref, found: Any_) -> None:
        if keyed(ref) and any(has_data(conj) for conj in found):
            self.seen[ref.value] = None

    def _find(self, ref: Ref, want: bool) -> Any_:
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
            raise KeyData(value)
        return [All(frozenset({Given(ref, want)}))]

    def _nonzero(self, ref: Ref, want: bool) -> Any_:
        """Whether a number is not 0."""
        try:
            return compared("ne" if want else "eq", self.whole(ref), number(0))
        except Unsupported:
            return self._positive(self.count(ref), want)

    def _comparison(self, ref: Ref, op: str, want: bool) -> Any_:
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
                return self.additive(operand(left, ref), op == "ne")[0]
            raise Unsupported
        if isinstance(left, Value) and left.dtype is torch.bool and known in (0.0, 1.0) and op in ("eq", "ne"):
            return self.truth(operand(left, ref), (op == "eq") == bool(known))
        try:
            counted = self.count(operand(left, ref))
        except Unsupported:
            # index_mask == 0
            if op in ("eq", "ne") and known == 0 and isinstance(left, Value) and left.dtype.is_floating_point:
                return self.additive(operand(left, ref), op == "eq")[0]
            raise
        if (op in ("gt", "ne") and known == 0) or (op == "gt" and 0 < known < 1) or (op == "ge" and 0 < known <= 1):
            return self._positive(counted, True)
        if (op in ("le", "eq") and known == 0) or (op == "le" and 0 < known < 1) or (op == "lt" and 0 < known <= 1):
            return self._positive(counted, False)
        if op in ("eq", "ne") and known == 1 and counted.unit:
            return self._positive(counted, op == "eq")
        raise Unsupported

    def _positive(self, counted: Count, want: bool) -> Any_:
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
            raise KeyData(ref.value)
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
            return sides[1].minus(sides[0])
        if func in MULTIPLY:
            for a, b in (sides, sides[::-1]):
                if not a.terms:
                    return b.times(a.known)
        if func is aten.neg.default:
            return self.whole(Ref(args[0], ref.index)).times(-1)
        if func in (aten.floor_divide.default, *_DIVISIONS, *_SHIFTS):
            by = sides[1].known
            if func in _DIVISIONS and not self._rounds(value, sides[0]):
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
        """An element of a tensor of numbers as a sum of indicators. Raises Unsupported."""
        ref = uncast(ref)
        found: Count = remembered(self._known, (ref, "count"), lambda: self._count(ref), ref.value)
        return found

    def _count(self, ref: Ref) -> Count:
        value, func, args = ref.value, ref.value.func, ref.value.args
        known = constant_of(value)
        if known is not None:
            return _constant(known)
        if value.dtype is torch.bool:
            found = self.truth(ref)
            return Count(tuple((1.0, c) for c in found), len(found) <= 1 and not any(c.bound for c in found), True)
        if func in ADD or func in SUB or func is aten.rsub.Scalar:
            a, b = (self._count_side(x, ref) for x in args[:2])
            alpha = scalar(value.kwargs.get("alpha", args[2] if len(args) > 2 else 1))
            if alpha is None:
                raise Unsupported
            if func is aten.rsub.Scalar:
                a, b = b, a
            factor = alpha if func in ADD else -alpha
            return Count((*a.terms, *((factor * f, c) for f, c in b.terms)), a.exact and b.exact)
        if func is aten.neg.default:
            a = self.count(Ref(args[0], ref.index))
            return Count(tuple((-f, c) for f, c in a.terms), a.exact)
        if func in MULTIPLY or func in (aten.minimum.default,):
            a, b = (self._count_side(x, ref) for x in args[:2])
            if {v for _, c in a.terms for v in c.bound} & {v for _, c in b.terms for v in c.bound}:
                raise Unsupported  # the same sum twice: its variables would count for both
            terms = [(f * g, e) for f, c in a.terms for g, d in b.terms for e in both([c], [d])]
            if func is aten.minimum.default and not (a.unit and b.unit):
                raise Unsupported
            return Count(tuple(terms), a.exact and b.exact, a.unit and b.unit)
        if func in SUMS:
            inside, bound = _reduced(ref)
            a = self.count(inside)
            return Count(tuple((f, All(c.literals, c.bound + tuple(bound))) for f, c in a.terms), a.exact)
        if func in (aten.amax.default, aten.max.dim) and value.out == 0:
            inside, bound = _reduced(ref)
            a = self.count(inside)
            if any(f < 0 for f, _ in a.terms):
                raise Unsupported
            return Count(tuple((f, All(c.literals, c.bound + tuple(bound))) for f, c in a.terms), False, a.unit)
        if func is aten.cumsum.default:
            d = _dim(value, args[1])
            u = Key(value.shape[d])
            a = self.count(Ref(args[0], (*ref.index[:d], var(u), *ref.index[d + 1 :])))
            upto = compared("le", atom(u), of_index(ref.index[d]))
            terms = [(f, e) for f, c in a.terms for e in both([All(c.literals, (*c.bound, u))], upto)]
            return Count(tuple(terms), a.exact)
        if func in (aten.scatter_add.default, aten.scatter_reduce.two):
            return self._scattered(ref)
        if func in _CLAMPS:
            a = self.count(Ref(args[0], ref.index))
            low, high = _limits(value)
            if all(f > 0 for f, _ in a.terms) and low in (None, 0.0) and high in (None, 1.0):
                return Count(a.terms, False, a.unit or high == 1.0)
            raise Unsupported
        units: list[bool] = []

        def counted(r: Ref, want: bool) -> Any_:
            """For operations that place numbers which are not negative: whether the number is not 0."""
            each = self.count(r)
            if not want or any(f < 0 for f, _ in each.terms):
                raise Unsupported
            units.append(each.unit)
            return [c for _, c in each.terms]

        placed = self._structured(ref, True, counted)
        if placed is not None:
            return Count(tuple((1.0, c) for c in placed), False, all(units))
        raise Unsupported

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
        d = _dim(ref.value, d)
        for places, values in _pieces(index, source, d):
            (hit,) = self._hits(ref, d, places) or (None,)
            if hit is None:
                continue
            j = hit.bound[-1]
            known = constant_of(values)
            if known is not None:
                total.append((known, hit))
                continue
            added = self.count(Ref(values, (*ref.index[:d], var(j), *ref.index[d + 1 :])))
            total += [(f, All(hit.literals | c.literals, hit.bound + c.bound)) for f, c in added.terms]
        if not summed and any(f < 0 for f, _ in total):
            raise Unsupported
        return Count(tuple((f, c) for f, c in total if f), base.exact and summed)

    # --- additive masks ---

    def additive(self, ref: Ref, want: bool = True, sign: float = 1.0) -> tuple[Any_, float]:
        """When ``sign`` times an element of an additive mask is 0 (``want``), and what it is elsewhere. Raises Unsupported."""
        fills: set[float] = set()
        known_zeros: dict[Any, Any] = {}

        def zero(r: Ref, w: bool) -> Any_:
            r = uncast(r)
            found: Any_ = remembered(known_zeros, (r, w), lambda: find(r, w), r.value)
            return found

        def find(r: Ref, w: bool) -> Any_:
            known = constant_of(r.value)
            if known is not None:
                if known != 0.0:
                    fills.add(known)
                return TRUE if (known == 0.0) == w else FALSE
            value, func, args = r.value, r.value.func, r.value.args
            if not value.dtype.is_floating_point:
                raise Unsupported
            if func in ADD and not value.kwargs and len(args) == 2:
                parts = [zero(operand(a, r), w) for a in args]
                return both(*parts) if w else either(*parts)
            if func is aten.log.default:
                fills.add(-math.inf)
                return self.truth(uncast(Ref(args[0], r.index)), w)
            if func in MULTIPLY:
                for a, b in (args, args[::-1]):
                    known = constant_of(b)
                    if known is not None and known != 0.0 and not math.isinf(known):
                        return self._scaled(operand(a, r), known, w, zero, fills)
            if func is aten.minimum.default:
                parts = [zero(operand(a, r), w) for a in args]
                return both(*parts) if w else either(*parts)
            found = self._structured(r, w, zero)
            if found is None:
                raise Unsupported
            self._note(r, found)
            return found

        found = zero(ref, want)
        if not fills:
            fills.add(-sign * math.inf)
        worst = max(sign * fill for fill in fills)
        if worst > -1e4 or worst != worst:
            raise Unsupported
        self._note(ref, found)
        return found, worst

    def _scaled(self, ref: Ref, by: float, want: bool, zero: Callable[[Ref, bool], Any_], fills: set[float]) -> Any_:
        """``(1 - mask) * -1e9``, or ``~mask * -1e9``."""
        below = uncast(ref)
        if below.value.dtype is torch.bool:
            fills.add(by)
            return self.truth(below, not want)
        func, args = below.value.func, below.value.args
        one = None
        if func in SUB and constant_of(args[0]) == 1.0:
            one, sign = args[1], by
        elif func is aten.rsub.Scalar and constant_of(args[1]) == 1.0:
            one, sign = args[0], by
        elif (func in SUB and constant_of(args[1]) == 1.0) or (func in ADD and constant_of(args[1]) == -1.0):
            one, sign = args[0], -by
        if one is None:
            return zero(ref, want)
        flag = uncast(operand(one, below))
        if flag.value.dtype is not torch.bool:
            counted = self.count(flag)
            if len(counted.terms) != 1 or counted.terms[0][0] != 1.0 or counted.terms[0][1].bound:
                raise Unsupported
        fills.add(sign)
        return self.truth(flag, want)


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
