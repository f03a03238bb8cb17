"""Boolean masks in normal form: which keys a query sees, as a union of intervals and conditions.

An element of a mask is a disjunction of conjunctions of comparisons between whole numbers (:mod:`.linear`), each under
variables of its own, "for some j". Comparisons, ``any``, ``one_hot``, ``scatter``, sums and cumulative sums of
indicators, ``gather`` of blocks, ``tril`` and unrolled ``|=`` all become the same thing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .algebra import Ref, _broadcast, _dim, _reduced, aten, prims, step
from .algebra import number as scalar
from .index import ONE, Index, Size, Unsupported, Var, const, var
from .linear import (
    Datum,
    Key,
    Linear,
    atom,
    floor,
    number,
    of_index,
    of_scalar,
    of_size,
    replaced,
    substituted,
    to_index,
    variables_of,
)
from .values import Value

_MOST = 1024  # conjunctions: loops over ranges are unrolled, more than this are none


@dataclasses.dataclass(frozen=True, slots=True)
class Compare:
    """``value <= 0`` ("le"), ``value == 0`` ("eq") or ``value != 0`` ("ne")."""

    kind: str
    value: Linear


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """An element of a boolean tensor, or that it is false."""

    ref: Ref
    want: bool


Literal = Compare | Given


@dataclasses.dataclass(frozen=True, slots=True)
class All:
    """For some values of ``bound``, every one of ``literals`` holds."""

    literals: frozenset[Literal] = frozenset()
    bound: tuple[Var, ...] = ()

    def comparisons(self) -> list[Linear]:
        return [x.value for x in self.literals if isinstance(x, Compare)]


Any_ = list[All]
"""A disjunction."""
TRUE: Any_ = [All()]
FALSE: Any_ = []


class KeyData(Unsupported):
    """The mask reads a tensor at the key's place."""

    def __init__(self, value: Value) -> None:
        super().__init__("a tensor of keys")
        self.value = value


def both(a: Any_, b: Any_) -> Any_:
    if len(a) * len(b) > _MOST:
        raise Unsupported
    return [All(x.literals | y.literals, tuple(dict.fromkeys(x.bound + y.bound))) for x in a for y in b]


def either(*parts: Any_) -> Any_:
    total = list(dict.fromkeys(itertools.chain(*parts)))
    if len(total) > _MOST:
        raise Unsupported
    return total


def _literal(kind: str, value: Linear) -> Any_:
    known = value.value
    if known is not None:
        return TRUE if {"le": known <= 0, "eq": known == 0, "ne": known != 0}[kind] else FALSE
    return [All(frozenset({Compare(kind, value)}))]


def compared(op: str, a: Linear, b: Linear) -> Any_:
    """``a op b``."""
    d = a.minus(b)
    if op in ("eq", "ne"):
        return _literal(op, d)
    if op in ("ge", "gt"):
        d = d.times(-1)
    return _literal("le", d if op in ("le", "ge") else d.shifted(1))


_OPPOSITE = {"le": "gt", "gt": "le", "lt": "ge", "ge": "lt", "eq": "ne", "ne": "eq"}
_MIRROR = {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt", "eq": "eq", "ne": "ne"}
_COMPARISONS = {getattr(getattr(aten, name), overload): name for name in _OPPOSITE for overload in ("Tensor", "Scalar")}
_AND = {aten.bitwise_and.Tensor, aten.logical_and.default}
_OR = {aten.bitwise_or.Tensor, aten.logical_or.default}
_NOT = {aten.bitwise_not.default, aten.logical_not.default}
_ANY = {aten.any.default, aten.any.dim, aten.any.dims, aten.amax.default}
_ALL = {aten.all.default, aten.all.dim, aten.all.dims, aten.amin.default}
_ARANGE = {aten.arange.default: (None, 0, None), aten.arange.start: (0, 1, None), aten.arange.start_step: (0, 1, 2)}
_FILLED = {
    aten.zeros.default: 0.0,
    aten.zeros_like.default: 0.0,
    aten.new_zeros.default: 0.0,
    aten.ones.default: 1.0,
    aten.ones_like.default: 1.0,
    aten.new_ones.default: 1.0,
}
_FULL = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
    aten.fill.Scalar: 1,
}
CASTS = {aten._to_copy.default, aten.to.dtype, prims.convert_element_type.default}
_WHOLE = (torch.int64, torch.int32)
_SUMS = {aten.sum.dim_IntList, aten.sum.default}
_ADD = (aten.add.Tensor, aten.add.Scalar)
_SUB = (aten.sub.Tensor, aten.sub.Scalar)
MULTIPLY = (aten.mul.Tensor, aten.mul.Scalar)


def constant_of(a: Any) -> float | None:
    """A Python number, or the one that every element of a tensor is."""
    if isinstance(a, bool):
        return float(a)
    if not isinstance(a, Value):
        return float(a) if isinstance(a, (int, float)) else None
    while isinstance(a, Value) and a.func is not None:
        if a.node is not None and a.node.target is torch.tensor:
            given = a.node.args[0]
            return float(given) if isinstance(given, (int, float)) else None
        if a.func in _FILLED:
            return _FILLED[a.func]
        if a.func in _FULL:
            given = a.args[_FULL[a.func]]
            return float(given) if isinstance(given, (int, float)) else constant_of(given)
        if a.func not in (*_SAME, *CASTS, aten.expand.default, aten.view.default, aten.unsqueeze.default):
            return None
        a = a.args[0]
    return None


_SAME = (aten.detach.default, aten.clone.default, aten.alias.default, aten.contiguous.default, aten.lift_fresh.default)


def inner(ref: Ref) -> Ref | None:
    """The element that a view, or a detached tensor of no gradient, shows."""
    if ref.value.func is aten.detach.default:
        return Ref(ref.value.args[0], ref.index)
    return behind(ref)


def behind(ref: Ref) -> Ref | None:
    """The element that a view or a cast of floating dtypes shows, of a tensor of the graph."""
    below = step(ref)
    return below if below is not None and isinstance(below.value, Value) else None


def uncast(ref: Ref) -> Ref:
    """``ref`` behind views and casts, none of them to bool."""
    while True:
        below = inner(ref)
        if below is None and ref.value.func in CASTS and ref.value.dtype is not torch.bool:
            below = Ref(ref.value.args[0], ref.index)
        if below is None:
            return ref
        ref = below


def keyed(ref: Ref) -> bool:
    """Whether the element depends on the key."""
    return any(isinstance(v, Key) for v in variables_of(ref))


def _operand(a: Any, ref: Ref) -> Ref:
    if not isinstance(a, Value):
        raise Unsupported
    return _broadcast(a, ref)


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """``sum(factor * indicator)``; ``exact``: overlapping indicators add up; ``unit``: the number is 0 or 1."""

    terms: tuple[tuple[float, All], ...]
    exact: bool = True
    unit: bool = False


def _constant(known: float) -> Count:
    return Count(((known, All()),) if known else (), unit=known in (0.0, 1.0))


class Masks:
    """Evaluates elements of masks. ``seen`` are the values met that say which keys a query sees, from data."""

    def __init__(self, fixed: Mapping[str, int], hints: Mapping[str, int]) -> None:
        self.fixed = fixed
        self.hints = hints
        self.equal: set[frozenset[Size]] = set()
        """Sizes that are taken to be one number, which the rewrite must guard."""
        self.sized: dict[Size, tuple[Value, int]] = {}
        """Where sizes are that negative indices count from."""
        self.seen: dict[Value, None] = {}
        self._truth: dict[tuple[Ref, bool], Any_] = {}

    # --- booleans ---

    def truth(self, ref: Ref, want: bool = True) -> Any_:
        """When ``ref``, an element of a boolean (or nonzero) tensor, is ``want``. Raises Unsupported."""
        key = ref, want
        if key not in self._truth:
            found = self._truth[key] = self._find(ref, want)
            self._note(ref, found)
        return self._truth[key]

    def _note(self, ref: Ref, found: Any_) -> None:
        if keyed(ref) and any(_has_data(conj) for conj in found):
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
        if func in _NOT:
            return self.truth(Ref(value.args[0], ref.index), not want)
        if (
            func in _AND
            or func in _OR
            or func in MULTIPLY
            or func is aten.maximum.default
            or func is aten.minimum.default
        ):
            a, b = (self._side(x, ref, want) for x in value.args[:2])
            conjunction = (func in _AND or func in MULTIPLY or func is aten.minimum.default) == want
            if conjunction and value.args[0] is value.args[1]:
                return a
            return both(a, b) if conjunction else either(a, b)
        if func in _COMPARISONS:
            return self._comparison(ref, _COMPARISONS[func], want)
        if func in _ANY or func in _ALL:
            operand, bound = _reduced(ref)
            if (func in _ANY) != want:
                self._note(ref, self.truth(operand, not want))
                raise Unsupported
            return [All(c.literals, c.bound + tuple(bound)) for c in self.truth(operand, want)]
        found = self._structured(ref, want, lambda r, w: self.truth(r, w))
        if found is not None:
            return found
        if func is aten.isin.Tensor_Tensor and want and len(value.args) == 2 and not value.kwargs:
            tests = value.args[1]
            bound = [Var(s) for s in tests.shape]
            this = self.whole(_operand(value.args[0], ref))
            found = compared("eq", this, self.whole(Ref(tests, tuple(var(v) for v in bound))))
            return [All(c.literals, (*c.bound, *bound)) for c in found]
        if keyed(ref):
            raise KeyData(value)
        return [All(frozenset({Given(ref, want)}))]

    def _side(self, a: Any, ref: Ref, want: bool) -> Any_:
        known = constant_of(a)
        if known is not None:
            return TRUE if bool(known) == want else FALSE
        return self.truth(_operand(a, ref), want)

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
                return self.additive(_operand(left, ref), op == "ne")[0]
            raise Unsupported
        if isinstance(left, Value) and left.dtype is torch.bool and known in (0.0, 1.0) and op in ("eq", "ne"):
            return self.truth(_operand(left, ref), (op == "eq") == bool(known))
        try:
            counted = self.count(_operand(left, ref))
        except Unsupported:
            # index_mask == 0
            if op in ("eq", "ne") and known == 0 and isinstance(left, Value) and left.dtype.is_floating_point:
                return self.additive(_operand(left, ref), op == "eq")[0]
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
                total = both(total, either(*(_opposite(x) for x in conj.literals)))
            return total
        if all(factor > 0 for factor, _ in counted.terms):
            return either([conj for _, conj in counted.terms])
        if not counted.exact:
            raise Unsupported
        return _differences(counted.terms)

    def _structured(self, ref: Ref, want: bool, of: Callable[[Ref, bool], Any_]) -> Any_ | None:
        """Operations that put elements of other tensors, or constants, in places that comparisons say."""
        value, func = ref.value, ref.value.func
        if func is aten.where.self:
            when, a, b = value.args
            return self._either_way(when, self._part(a, ref, want, of), self._part(b, ref, want, of), ref)
        if func in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
            x, when, fill = value.args
            return self._either_way(when, self._part(fill, ref, want, of), self._part(x, ref, want, of), ref)
        if func in (aten.tril.default, aten.triu.default):
            return self._triangle(ref, want, of)
        if func in (aten.scatter.value, aten.scatter.src):
            x, d, index, source = value.args
            known = constant_of(source)
            if known is None:
                raise Unsupported
            hit = self._hits(ref, d, index)
            if (of(_filled(known, value), want)) == TRUE:
                return either(of(Ref(x, ref.index), want), hit)
            if of(Ref(x, ref.index), want) == FALSE:
                return FALSE
            raise Unsupported
        if func in (aten.index_put.default, aten._unsafe_index_put.default):
            x, indices, source, *rest = value.args
            known = constant_of(source)
            if known is None or (rest and rest[0]):
                raise Unsupported
            if (of(_filled(known, value), want)) == TRUE:
                return either(of(Ref(x, ref.index), want), self._put(ref, indices))
            if of(Ref(x, ref.index), want) == FALSE:
                return FALSE
            raise Unsupported
        if func is aten.constant_pad_nd.default:
            return self._padded(ref, want, of)
        if func is aten.cat.default:
            return self._joined(ref, want, of)
        gathered = self._gathered(ref)
        if gathered is not None:
            below, more = gathered
            return both(more, of(below, want))
        return None

    def _either_way(self, when: Any, a: Any_, b: Any_, ref: Ref) -> Any_:
        """``a`` where ``when`` holds, else ``b``."""
        yes = both(self._side(when, ref, True), a) if a else FALSE
        if not b:
            return yes
        # True there, or b: what holds need not be said again.
        return either(yes, b if a == TRUE else both(self._side(when, ref, False), b))

    def _part(self, a: Any, ref: Ref, want: bool, of: Callable[[Ref, bool], Any_]) -> Any_:
        known = constant_of(a)
        if known is not None:
            return of(_filled(known, ref.value), want)
        return of(_operand(a, ref), want)

    def _triangle(self, ref: Ref, want: bool, of: Callable[[Ref, bool], Any_]) -> Any_:
        x, *rest = ref.value.args
        diagonal = of_scalar(rest[0] if rest else 0, self.fixed)
        ahead = of_index(ref.index[-1]).minus(of_index(ref.index[-2])).minus(diagonal)
        lower = ref.value.func is aten.tril.default
        kept = compared("le" if lower else "ge", ahead, number(0))
        left = compared("gt" if lower else "lt", ahead, number(0))
        zero = of(_filled(0.0, ref.value), want)
        return either(both(kept, of(Ref(x, ref.index), want)), both(left, zero))

    def _hits(self, ref: Ref, d: int, index: Value) -> Any_:
        """Whether a scatter writes this element."""
        d = _dim(ref.value, d)
        for k, (a, b) in enumerate(zip(index.shape, ref.value.shape, strict=True)):
            if k != d and a != b:
                self._assume(a, b)
        j = Var(index.shape[d])
        place = Ref(index, (*ref.index[:d], var(j), *ref.index[d + 1 :]))
        found = compared("eq", self.whole(place), of_index(ref.index[d]))
        return [All(c.literals, (*c.bound, j)) for c in found]

    def _wrap(self, value: Value, d: int) -> Size:
        """The size that negative indices of a dim count from."""
        size = value.shape[d]
        while value.node is None and isinstance(value.args[0], Value) and value.args[0].shape == value.shape:
            value = value.args[0]
        if size.symbols and value.node is not None:
            self.sized[size] = value, d
        return size

    def _assume(self, a: Size, b: Size) -> None:
        """Take two symbols for the same size, if they are now. Raises Unsupported."""
        if not all(s.factor == 1 and len(s.symbols) == 1 for s in (a, b)):
            raise Unsupported
        now = {self.hints.get(s.symbols[0]) for s in (a, b)}
        if None in now or len(now) != 1:
            raise Unsupported
        self.equal.add(frozenset({a, b}))

    def _put(self, ref: Ref, indices: Sequence[Any]) -> Any_:
        """Whether ``x[indices] = ...`` writes this element."""
        given = [i for i in indices if i is not None]
        if any(i.dtype is torch.bool for i in given):
            raise Unsupported
        rank = max(len(i.shape) for i in given)
        shape = [ONE] * rank
        for i in given:
            for k, size in enumerate(i.shape):
                if size != ONE:
                    shape[rank - len(i.shape) + k] = size
        bound = [Var(s) for s in shape]
        total = TRUE
        for d, i in enumerate(indices):
            if i is None:
                continue
            tail = bound[rank - len(i.shape) :]
            at = tuple(const(0) if s == ONE else var(v) for s, v in zip(i.shape, tail, strict=True))
            place = self.whole(Ref(i, at), self._wrap(ref.value, d))
            total = both(total, compared("eq", place, of_index(ref.index[d])))
        return [All(c.literals, (*c.bound, *(v for v in bound if v.size != ONE))) for c in total]

    def _padded(self, ref: Ref, want: bool, of: Callable[[Ref, bool], Any_]) -> Any_:
        x, pads, *rest = ref.value.args
        fill = constant_of(rest[0] if rest else 0.0)
        if fill is None:
            raise Unsupported
        within, index = TRUE, list(ref.index)
        outside: list[Any_] = []
        for k in range(len(pads) // 2):
            d = len(index) - 1 - k
            before, after = pads[2 * k : 2 * k + 2]
            if not isinstance(before, int) or not isinstance(after, int) or before < 0 or after < 0:
                raise Unsupported
            at = of_index(index[d])
            if before:
                within = both(within, compared("ge", at, number(before)))
                outside.append(compared("lt", at, number(before)))
                index[d] = index[d].plus(const(-before))
            if after:
                end = of_size(x.shape[d]).shifted(before)
                within = both(within, compared("lt", at, end))
                outside.append(compared("ge", at, end))
        rest_ = both(either(*outside), of(_filled(fill, ref.value), want)) if outside else FALSE
        return either(both(within, of(Ref(x, tuple(index)), want)), rest_)

    def _joined(self, ref: Ref, want: bool, of: Callable[[Ref, bool], Any_]) -> Any_:
        """A cat whose pieces the index spans."""
        pieces, *rest = ref.value.args
        d = _dim(ref.value, rest[0] if rest else 0)
        at, start, total = of_index(ref.index[d]), number(0), FALSE
        for piece in pieces:
            end = start.plus(of_size(piece.shape[d]))
            here = both(compared("ge", at, start), compared("lt", at, end))
            moved = ref.index[d] if not start.constant else _moved(ref.index[d], start)
            index = (*ref.index[:d], moved, *ref.index[d + 1 :])
            total = either(total, both(here, of(Ref(piece, index), want)))
            start = end
        return total

    def _gathered(self, ref: Ref) -> tuple[Ref, Any_] | None:
        """The element that a gather reads, and the conditions on the variables that stand for its place."""
        func, args = ref.value.func, ref.value.args
        if func not in _GATHERS or not keyed(ref):
            return None
        more: dict[Var, Literal] = {}
        x, index = args[0], list(ref.index)
        if func in (aten.gather.default, aten.index_select.default):
            d, places = _dim(x, args[1]), args[2]
            at = ref.index if func is aten.gather.default else (ref.index[d],) if places.shape else ()
            index[d] = self._place(Ref(places, at), x.shape[d], None, more)
        else:
            given = [d for d, i in enumerate(args[1]) if i is not None]
            indices = [args[1][d] for d in given]
            # The dims of index tensors stay where they were if they are neighbours.
            if any(i.dtype is torch.bool for i in indices) or given != [*range(given[0], given[-1] + 1)]:
                return None
            rank = max(len(i.shape) for i in indices)
            spread = ref.index[given[0] : given[0] + rank]
            index = [*ref.index[: given[0]]]
            for d, places in zip(given, indices, strict=True):
                tail = spread[rank - len(places.shape) :]
                at = tuple(const(0) if s == ONE else i for s, i in zip(places.shape, tail, strict=True))
                index.append(self._place(Ref(places, at), x.shape[d], self._wrap(x, d), more))
            index += ref.index[given[0] + rank :]
        return Ref(x, tuple(index)), [All(frozenset(more.values()), tuple(more))]

    def _place(self, ref: Ref, size: Size, wrap: Size | None, more: dict[Var, Literal]) -> Index:
        """A whole number as an index; what is none becomes a variable with a condition in ``more``."""
        at = self.whole(ref, wrap)
        index = to_index(at)
        if index is not None:
            return index
        v = Key(size)
        more[v] = Compare("eq", atom(v).minus(at))
        return var(v)

    # --- numbers ---

    def _whole_side(self, a: Any, ref: Ref) -> Linear:
        return self.whole(_operand(a, ref)) if isinstance(a, Value) and a.shape else self._scalar(a)

    def _scalar(self, a: Any) -> Linear:
        if isinstance(a, Value):
            return self.whole(Ref(a, ()))
        return of_scalar(a, self.fixed)

    def whole(self, ref: Ref, wrap: Size | None = None) -> Linear:
        """An element of an integer tensor. Raises Unsupported, and for sums of indicators, which :meth:`count` takes."""
        outer = ref
        while (below := inner(ref)) is not None or (
            ref.value.func in CASTS and ref.value.dtype in _WHOLE and ref.value.args[0].dtype in _WHOLE
        ):
            ref = below if below is not None else Ref(ref.value.args[0], ref.index)
        if ref.value.dtype is torch.bool or ref.value.dtype.is_floating_point or ref.value.dtype.is_complex:
            if outer.value.dtype.is_floating_point or outer.value.dtype is torch.bool:
                known = constant_of(ref.value)
                if known is None or known != known or math.isinf(known) or known != int(known):
                    raise Unsupported
                return number(int(known))
            return self._datum(outer, wrap)
        if ref.value.dtype not in _WHOLE:  # sums of narrow ones wrap
            return self._datum(ref, wrap)
        try:
            return self._arithmetic(ref, wrap)
        except KeyData:
            raise
        except Unsupported:
            return self._datum(ref, wrap)

    def _datum(self, ref: Ref, wrap: Size | None) -> Linear:
        if keyed(ref):
            raise KeyData(ref.value)
        return atom(Datum(ref, wrap))

    def _arithmetic(self, ref: Ref, wrap: Size | None) -> Linear:
        value, func, args = ref.value, ref.value.func, ref.value.args
        known = constant_of(value)
        if known is not None:
            return number(int(known))
        if func in _ARANGE:
            start, stop, step_ = (None if k is None else args[k] if k < len(args) else None for k in _ARANGE[func])
            del stop
            stride = of_scalar(1 if step_ is None else step_, self.fixed).value
            if stride is None:
                raise Unsupported
            first = of_scalar(0 if start is None else start, self.fixed)
            return first.plus(of_index(ref.index[0]) if ref.index else number(0), stride)
        sides = [self._whole_side(a, ref) for a in args[:2]] if func in _INTEGER else []
        if func in _ADD or func in _SUB:
            alpha = value.kwargs.get("alpha", args[2] if len(args) > 2 else 1)
            if not isinstance(alpha, int):
                raise Unsupported
            return sides[0].plus(sides[1], alpha if func in _ADD else -alpha)
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
        if wrap is None and not keyed(ref):
            return atom(Datum(ref))
        raise Unsupported

    def _rounds(self, value: Value, of: Linear) -> bool:
        mode = value.kwargs.get("rounding_mode", value.args[2] if len(value.args) > 2 else None)
        plain = all(isinstance(a, Var) and c >= 0 for a, c in of.terms) and all(c >= 0 for _, c in of.constant)
        return mode == "floor" or (mode == "trunc" and plain)

    def count(self, ref: Ref) -> Count:
        """An element of a tensor of numbers as a sum of indicators. Raises Unsupported."""
        ref = uncast(ref)
        value, func, args = ref.value, ref.value.func, ref.value.args
        known = constant_of(value)
        if known is not None:
            return _constant(known)
        if value.dtype is torch.bool:
            found = self.truth(ref)
            return Count(tuple((1.0, c) for c in found), len(found) <= 1 and not any(c.bound for c in found), True)
        if func in _ADD or func in _SUB or func is aten.rsub.Scalar:
            a, b = (self._count_side(x, ref) for x in args[:2])
            alpha = scalar(value.kwargs.get("alpha", args[2] if len(args) > 2 else 1))
            if alpha is None:
                raise Unsupported
            if func is aten.rsub.Scalar:
                a, b = b, a
            factor = alpha if func in _ADD else -alpha
            return Count((*a.terms, *((factor * f, c) for f, c in b.terms)), a.exact and b.exact)
        if func is aten.neg.default:
            a = self.count(Ref(args[0], ref.index))
            return Count(tuple((-f, c) for f, c in a.terms), a.exact)
        if func in MULTIPLY or func in (aten.minimum.default,):
            a, b = (self._count_side(x, ref) for x in args[:2])
            terms = [(f * g, e) for f, c in a.terms for g, d in b.terms for e in both([c], [d])]
            if func is aten.minimum.default and not (a.unit and b.unit):
                raise Unsupported
            return Count(tuple(terms), a.exact and b.exact, a.unit and b.unit)
        if func in _SUMS:
            operand, bound = _reduced(ref)
            a = self.count(operand)
            return Count(tuple((f, All(c.literals, c.bound + tuple(bound))) for f, c in a.terms), a.exact)
        if func in (aten.amax.default, aten.max.dim) and value.out == 0:
            operand, bound = _reduced(ref)
            a = self.count(operand)
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
        return self.count(_operand(a, ref)) if known is None else _constant(known)

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

        def zero(r: Ref, w: bool) -> Any_:
            r = uncast(r)
            known = constant_of(r.value)
            if known is not None:
                if known != 0.0:
                    fills.add(known)
                return TRUE if (known == 0.0) == w else FALSE
            value, func, args = r.value, r.value.func, r.value.args
            if not value.dtype.is_floating_point:
                raise Unsupported
            if func in _ADD and not value.kwargs and len(args) == 2:
                parts = [zero(_operand(a, r), w) for a in args]
                return both(*parts) if w else either(*parts)
            if func is aten.log.default:
                fills.add(-math.inf)
                return self.truth(uncast(Ref(args[0], r.index)), w)
            if func in MULTIPLY:
                for a, b in (args, args[::-1]):
                    known = constant_of(b)
                    if known is not None and known != 0.0 and not math.isinf(known):
                        return self._scaled(_operand(a, r), known, w, zero, fills)
            if func is aten.minimum.default:
                parts = [zero(_operand(a, r), w) for a in args]
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
        if func in _SUB and constant_of(args[0]) == 1.0:
            one, sign = args[1], by
        elif func is aten.rsub.Scalar and constant_of(args[1]) == 1.0:
            one, sign = args[0], by
        elif (func in _SUB and constant_of(args[1]) == 1.0) or (func in _ADD and constant_of(args[1]) == -1.0):
            one, sign = args[0], -by
        if one is None:
            return zero(ref, want)
        flag = uncast(_operand(one, below))
        if flag.value.dtype is not torch.bool:
            counted = self.count(flag)
            if len(counted.terms) != 1 or counted.terms[0][0] != 1.0 or counted.terms[0][1].bound:
                raise Unsupported
        fills.add(sign)
        return self.truth(flag, want)


_GATHERS = (aten.gather.default, aten.index_select.default, aten.index.Tensor, aten._unsafe_index.Tensor)
_SHIFTS = (aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar, aten.__rshift__.Scalar)
_CLAMPS = (aten.relu.default, aten.clamp_min.default, aten.clamp.default, aten.clamp_max.default)
_DIVISIONS = (aten.div.Tensor_mode, aten.div.Scalar_mode)
_REMAINDERS = (aten.remainder.Scalar, aten.remainder.Tensor)
_INTEGER = {
    *_REMAINDERS,
    *(*_ADD, *_SUB, *MULTIPLY, *_SHIFTS, aten.rsub.Scalar, aten.rsub.Tensor),
    *(aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode),
}


def _filled(known: float, like: Value) -> Ref:
    """An element of a tensor that is ``known`` everywhere."""
    made = object.__new__(Value)
    made.shape, made.dtype, made.node, made.out = (), like.dtype, None, 0
    made._pending, made._func, made._args, made.kwargs = None, aten.scalar_tensor.default, (known,), {}
    return Ref(made, ())


def _moved(index: Index, by: Linear) -> Index:
    if by.value is None:
        raise Unsupported
    return index.plus(const(-by.value))


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


def _has_data(conj: All) -> bool:
    return any(isinstance(x, Given) or x.value.data() for x in conj.literals)


def _opposite(literal: Literal) -> Any_:
    if isinstance(literal, Given):
        return [All(frozenset({Given(literal.ref, not literal.want)}))]
    if literal.kind == "le":
        return _literal("le", literal.value.times(-1).shifted(1))
    return _literal("ne" if literal.kind == "eq" else "eq", literal.value)


def _differences(terms: Sequence[tuple[float, All]]) -> Any_:
    """Counts of starts less counts of ends: whether some start is passed and its end is not."""
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
        total += (All(common | {start} | conj.literals, up.bound) for conj in _opposite(end))
    return total


def _rewritten(literal: Literal, old: Var, new: Linear) -> Literal:
    if isinstance(literal, Given):
        return Given(replaced(literal.ref, old, new), literal.want)
    return Compare(literal.kind, substituted(literal.value, old, new))


def eliminated(conj: All) -> All | None:
    """``conj`` without the bound variables that an equality says, None where it never holds."""
    bound, literals = list(conj.bound), set(conj.literals)
    again = True
    while again:
        again = False
        for literal in sorted(literals, key=_order):
            if not isinstance(literal, Compare) or literal.kind != "eq":
                continue
            for v in sorted(bound, key=lambda v: not isinstance(v, Key)):
                c = literal.value.coefficient(v)
                rest = literal.value.without(v)
                if abs(c) != 1 or v in rest.variables():
                    continue
                new = rest.times(-c)
                try:
                    moved = {_rewritten(x, v, new) for x in literals if x is not literal}
                except Unsupported:
                    continue
                kept = [(x, _known(x)) for x in moved]
                if any(known is False for _, known in kept):
                    return None
                literals = {x for x, known in kept if known is None}
                bound.remove(v)
                again = True
                break
            if again:
                break
    used: set[Var] = set()
    for x in literals:
        used |= variables_of(x.ref) if isinstance(x, Given) else x.value.variables()
    return All(frozenset(literals), tuple(v for v in bound if v in used))


def _order(literal: Literal) -> tuple[int, str]:
    # Equalities of few atoms first: they say the most.
    return (len(literal.value.terms), literal.kind) if isinstance(literal, Compare) else (99, "")


def _known(literal: Literal) -> bool | None:
    known = literal.value.value if isinstance(literal, Compare) else None
    return None if known is None else bool({"le": known <= 0, "eq": known == 0, "ne": known != 0}[literal.kind])  # type: ignore[union-attr]


def free(conj: All) -> set[Var]:
    """The variables of ``conj`` that are not bound."""
    found: set[Var] = set()
    for x in conj.literals:
        found |= variables_of(x.ref) if isinstance(x, Given) else x.value.variables()
    return found - set(conj.bound)


def alike(a: Any_, b: Any_, t: Key) -> bool:
    """Whether ``a`` is ``b``, or says for which rows ``b`` holds for some key ``t``."""
    mine, theirs = ({_canonical(c, t, rows) for c in x if c is not None} for x, rows in ((a, False), (b, False)))
    return mine == theirs or {_canonical(c, t, True) for c in a} == theirs


_STANDINS: dict[tuple[Size, int], Var] = {}


def _canonical(conj: All, t: Key, rows: bool) -> All | None:
    """``conj`` with stand-ins for its bound variables; with ``rows``, ``t`` for the one that runs over keys."""
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
