# SPDX-License-Identifier: Apache-2.0
"""Normal forms of tensor expressions: a product of factors, summed over variables, and a sum of such terms.

A :class:`Ref` is an element of a value: the value and an index for each of its dimensions. Views and casts between
floating dtypes become index arithmetic: which element of its operand an element of a view is. Matrix products, einsum,
``sum`` and ``mean`` all become products with bound variables, so that it does not matter whether a factor stands before
or after a contraction. Each distinct element is expanded once, however many paths lead to it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from mhc_inductor import compat
from mhc_inductor.log import logger
from mhc_inductor.routing.graph.bounds import DEPTH, Steps, Unfollowed, remembered
from mhc_inductor.routing.graph.index import (
    ONE,
    DynamicWidth,
    Index,
    Size,
    Unsupported,
    Var,
    const,
    divmod_index,
    linear,
    may_fix,
    reshape,
    size_of,
    span,
    var,
)
from mhc_inductor.routing.graph.values import Value

aten = torch.ops.aten
prims = torch.ops.prims


_UNASKED = object()


class Ref:
    """``value[index]``. Immutable."""

    __slots__ = ("_flat", "_hash", "below", "index", "value")

    def __init__(self, value: Value, index: tuple[Index, ...]) -> None:
        self.value = value
        self.index = index
        self._hash: int | None = None
        self._flat: Index | None = None
        self.below: Any = _UNASKED
        """The result of :func:`step`, once it was called."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and self.value is other.value and self.index == other.index

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.value, self.index))
        return self._hash

    @property
    def flat(self) -> Index:
        """Returns the row-major position in the value."""
        if self._flat is None:
            self._flat = linear(self.index, self.value.shape)
        return self._flat


def whole(value: Value) -> Ref:
    """Returns the element of ``value`` at one variable per dimension. Every call returns the same variables."""
    found: Ref | None = value.memo.get(whole)
    if found is None:
        found = value.memo[whole] = Ref(value, tuple(var(Var(s)) for s in value.shape))
    return found


def _dim(value: Value, d: int) -> int:
    return d % len(value.shape) if value.shape else 0


def _broadcast(operand: Any, ref: Ref) -> Ref:
    """Returns the element of an operand that is used for ``ref``, an element of an elementwise operation's result."""
    return broadcast(operand, ref.index)


def broadcast(operand: Value, index: tuple[Index, ...]) -> Ref:
    """Returns the element of a tensor that is read at ``index`` after the tensor is broadcast. Raises Unsupported."""
    if len(operand.shape) > len(index):
        raise Unsupported
    tail = index[len(index) - len(operand.shape) :]
    return Ref(operand, tuple(const(0) if s == ONE else i for s, i in zip(operand.shape, tail, strict=True)))


def _same_shape(ref: Ref) -> Ref:
    return Ref(ref.value.args[0], ref.index)


def _reshaped(ref: Ref) -> Ref:
    base = ref.value.args[0]
    return Ref(base, reshape(ref.index, ref.value.shape, base.shape))


def _permuted(ref: Ref) -> Ref:
    base, dims = ref.value.args[0], ref.value.args[1]
    index: list[Index] = [const(0)] * len(dims)
    for i, d in zip(ref.index, dims, strict=True):
        index[_dim(base, d)] = i
    return Ref(base, tuple(index))


def _reversed(ref: Ref) -> Ref:
    return Ref(ref.value.args[0], ref.index[::-1])


def _transposed(ref: Ref) -> Ref:
    base = ref.value.args[0]
    a, b = (_dim(base, d) for d in (ref.value.args[1:3] if len(ref.value.args) > 2 else (0, -1)))
    index = list(ref.index)
    if index:
        index[a], index[b] = index[b], index[a]
    return Ref(base, tuple(index))


def _selected(ref: Ref) -> Ref:
    base, d, i = ref.value.args[:3]
    d = _dim(base, d)
    return Ref(base, (*ref.index[:d], _offset(base, d, i), *ref.index[d:]))


def _offset(base: Value, d: int, start: Any) -> Index:
    if isinstance(start, torch.SymInt) and compat.routing.expression(start).is_nonnegative:
        return Index({None: size_of(start, {})})
    if not isinstance(start, int):
        raise Unsupported
    if start < 0:
        size = base.shape[d]
        if size.symbols:
            raise Unsupported
        start = max(0, start + size.factor)
    return const(start)


def _sliced(ref: Ref) -> Ref:
    base, *rest = ref.value.args
    d = _dim(base, rest[0] if rest else 0)
    start = rest[1] if len(rest) > 1 and rest[1] is not None else 0
    stride = rest[3] if len(rest) > 3 else 1
    if not isinstance(stride, int):
        raise Unsupported
    index = list(ref.index)
    # A dimension of size 1 has no variable, so its index is the offset alone.
    index[d] = index[d].times(Size(stride)).plus(_offset(base, d, start))
    return Ref(base, tuple(index))


def _split(ref: Ref) -> Ref:
    base, sizes, *rest = ref.value.args
    d = _dim(base, rest[0] if rest else 0)
    k = ref.value.out
    each = sizes[:k] if isinstance(sizes, (tuple, list)) else (sizes,) * k
    index = list(ref.index)
    index[d] = index[d].plus(_offset(base, d, sum(each)))
    return Ref(base, tuple(index))


def _unbound(ref: Ref) -> Ref:
    base, *rest = ref.value.args
    d = _dim(base, rest[0] if rest else 0)
    return Ref(base, (*ref.index[:d], const(ref.value.out), *ref.index[d:]))


def _expanded(ref: Ref) -> Ref:
    return _broadcast(ref.value.args[0], ref)


def joined(value: Value) -> tuple[int, list[Value]]:
    """Returns the dimension and the pieces of a cat, without pieces like torch.tensor([]), which every cat skips."""
    pieces, *rest = value.args
    d = _dim(value, rest[0] if rest else 0)
    rank = len(value.shape)
    return d, [p for p in pieces if len(p.shape) == rank]


def _concatenated(ref: Ref) -> Ref:
    d, pieces = joined(ref.value)
    if len(pieces) == 1:
        return Ref(pieces[0], ref.index)
    start = 0
    at = ref.index[d]
    low, high = span(at)
    for piece in pieces:
        size = piece.shape[d]
        if size.symbols or high is None:
            raise Unsupported
        if start <= low and high < start + size.factor:
            index = list(ref.index)
            index[d] = at.plus(const(-start)) if start else at
            return Ref(piece, tuple(index))
        start += size.factor
    raise Unsupported


def _stacked(ref: Ref) -> Ref:
    pieces, *rest = ref.value.args
    d = _dim(ref.value, rest[0] if rest else 0)
    at = ref.index[d].constant
    rest_index = (*ref.index[:d], *ref.index[d + 1 :])
    if at is not None:
        return Ref(pieces[at], rest_index)
    # Evenly spaced pieces of one tensor, stacked in order, are a view of it.
    each = [below for piece in pieces if (below := step(Ref(piece, rest_index))) is not None]
    if len(each) < max(2, len(pieces)) or any(e.value is not each[0].value for e in each):
        raise Unsupported
    first = each[0].index
    steps = [_constant(i) - _constant(j) for i, j in zip(each[1].index, first, strict=True)]
    for k, e in enumerate(each):
        if e.index != tuple(i.plus(const(k * by)) for i, by in zip(first, steps, strict=True)):
            raise Unsupported
    spread = (i.plus(ref.index[d].times(Size(by))) for i, by in zip(first, steps, strict=True))
    return Ref(each[0].value, tuple(spread))


def _constant(index: Index) -> int:
    fixed = index.terms.get(None, Size(0))
    if fixed.symbols:
        raise Unsupported
    return fixed.factor


def _repeated(ref: Ref) -> Ref:
    base, times = ref.value.args[:2]
    added = len(times) - len(base.shape)
    index = []
    for d, size in enumerate(base.shape):
        at = ref.index[added + d]
        index.append(const(0) if size == ONE else at if times[added + d] == 1 else divmod_index(at, size)[1])
    return Ref(base, tuple(index))


VIEWS: dict[Any, Callable[[Ref], Ref]] = {
    aten.view.default: _reshaped,
    aten.reshape.default: _reshaped,
    aten._unsafe_view.default: _reshaped,
    aten.unsqueeze.default: _reshaped,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.expand.default: _expanded,
    aten.permute.default: _permuted,
    aten.transpose.int: _transposed,
    aten.t.default: _transposed,
    aten.numpy_T.default: _reversed,
    aten.select.int: _selected,
    aten.slice.Tensor: _sliced,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbound,
    aten.cat.default: _concatenated,
    aten.stack.default: _stacked,
    aten.repeat.default: _repeated,
    aten.clone.default: _same_shape,
    aten.contiguous.default: _same_shape,
    aten.alias.default: _same_shape,
    aten.lift_fresh.default: _same_shape,
}
"""For each ATen view or copy, the function that maps an element of its result to an element of its operand."""
CASTS = {aten._to_copy.default, aten.to.dtype, prims.convert_element_type.default}
"""ATen operations that convert dtypes."""


def is_cast(value: Value) -> bool:
    """Returns whether ``value`` is a cast between floating dtypes."""
    return value.func in CASTS and value.dtype.is_floating_point and value.args[0].dtype.is_floating_point


def rounds(value: Value) -> bool:
    """Returns whether ``value`` is a cast that loses precision or range."""
    return is_cast(value) and loses(value.dtype, value.args[0].dtype)


def loses(to: torch.dtype, of: torch.dtype) -> bool:
    """Returns whether numbers of the floating dtype ``of`` lose precision or range in ``to``."""
    a, b = torch.finfo(to), torch.finfo(of)
    return a.eps > b.eps or a.max < b.max or a.smallest_normal > b.smallest_normal


READABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The dtypes that the ops read."""


def written(value: Value) -> bool:
    """Returns whether ``value`` is a rounding that the model wrote, or a cast from a dtype that no op reads.

    Casts inside an operation, such as those that autocast inserts, are not the model's.
    """
    return value.node is not None and (rounds(value) or (is_cast(value) and value.args[0].dtype not in READABLE))


def step(ref: Ref) -> Ref | None:
    """Returns the element that a view or a cast between floating dtypes shows, or None for anything else."""
    if ref.below is _UNASKED:
        ref.below = _step(ref)
    below: Ref | None = ref.below
    return below


def _step(ref: Ref) -> Ref | None:
    func = ref.value.func
    if func is None:
        return None
    view = VIEWS.get(func) or (_same_shape if is_cast(ref.value) else None)
    if view is None:
        return None
    try:
        below = view(ref)
    except DynamicWidth:
        raise
    except Unsupported:
        return None
    except Exception as error:  # a rule that fails on an unexpected call must only stop this search
        logger.debug("a view is not followed: %s", func, exc_info=True)
        Unfollowed(f"a view on this line is not followed: {func}: {type(error).__name__}: {error}", ref.value)
        return None
    # Stop at the numbers that torch.tensor was given: no graph node produced them.
    return below if below.value.node is not None or below.value.func is not None else None


def peel(ref: Ref, stop: Container[Value] = ()) -> Ref:
    """Returns the element below the views and casts of ``ref``, but not below a value of ``stop``."""
    while ref.value not in stop:
        inner = step(ref)
        if inner is None:
            break
        ref = inner
    return ref


def chain(ref: Ref, stop: Container[Value] = ()) -> list[Ref]:
    """Returns every element that :func:`peel` passes, the outermost first."""
    refs = [ref]
    while refs[-1].value not in stop and (inner := step(refs[-1])) is not None:
        refs.append(inner)
    return refs


def shown(ref: Ref, stop: Container[Value] = ()) -> list[Ref]:
    """Returns :func:`chain` through the first rounding that the model wrote, if there is one.

    An op that reads ``ref`` reads one of these elements.
    """
    refs = chain(ref, stop)
    end = next((k for k, r in enumerate(refs) if written(r.value)), len(refs))
    return refs[: end + 1]


# --- normal forms ---


@dataclasses.dataclass
class Term:
    """``coef * product(factor ** exponent)``, summed over ``bound``."""

    coef: float = 1.0
    factors: list[tuple[Ref, float]] = dataclasses.field(default_factory=list)
    bound: list[Var] = dataclasses.field(default_factory=list)


def number(a: Any) -> float | None:
    """Returns the number that ``a`` is, or that it holds if it is a constant tensor, else None.

    A symbolic float is fixed at its value; a guard keeps it there. Raises DynamicWidth for a symbolic integer, and for
    such a float where no size may be fixed.
    """
    if isinstance(a, Value):
        while not a.shape and a.func is aten.lift_fresh.default and isinstance(a.args[0], Value):
            a = a.args[0]
        if a.func is aten.full.default:
            return number(a.args[1])
        if a.func is aten.zeros_like.default and a.dtype.is_floating_point:
            return 0.0
        return number(a.args[0]) if not a.shape and a.func is aten.scalar_tensor.default else None
    if isinstance(a, torch.SymInt):
        raise DynamicWidth(size_of(a, {}))
    if isinstance(a, torch.SymFloat) and not may_fix():
        raise DynamicWidth(Size(1, (str(a),)))
    return float(a) if isinstance(a, (int, float, torch.SymFloat)) and not isinstance(a, bool) else None


def _reduced(ref: Ref) -> tuple[Ref, list[Var]]:
    """Returns the operand of a reduction, with new bound variables in the reduced dimensions, and these variables."""
    operand, *rest = ref.value.args
    dims = rest[0] if rest and rest[0] is not None and rest[0] != () else tuple(range(len(operand.shape)))
    dims = (dims,) if isinstance(dims, int) else dims
    given = {_dim(operand, d) for d in dims}
    gone = [d for d in range(len(operand.shape)) if d in given]
    keepdim = len(ref.value.shape) == len(operand.shape)
    bound = [Var(operand.shape[d]) for d in gone]
    places = [*ref.index]
    for d, v in zip(gone, bound, strict=True):
        places[d : d + keepdim] = [var(v)]
    return Ref(operand, tuple(places)), bound


_REDUCTIONS = {
    aten.sum.dim_IntList: False,
    aten.sum.default: False,
    aten.mean.dim: True,
    aten.mean.default: True,
}
"""Reductions, and whether they are means."""


def reduction(ref: Ref) -> tuple[Ref, list[Var], float] | None:
    """Returns (summand, bound variables, factor) of a sum or a mean, else None."""
    mean = _REDUCTIONS.get(ref.value.func)
    if mean is None:
        return None
    operand, bound = _reduced(ref)
    scale = 1.0
    if mean:
        for v in bound:
            if v.size.symbols:
                raise DynamicWidth(v.size)
            scale /= v.size.factor
    return operand, bound, scale


def contraction(ref: Ref) -> tuple[Ref, Ref, Var] | None:
    """Returns (left, right, bound variable) of a matrix product, else None."""
    func = ref.value.func
    if func not in (aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.matmul.default):
        return None
    a, b = ref.value.args[:2]
    if func is aten.matmul.default and (len(a.shape) < 2 or len(b.shape) < 2 or a.shape[:-2] != b.shape[:-2]):
        return None
    k = Var(a.shape[-1])
    rows = len(a.shape) - 1  # with the dims of a batch before them
    batch = max(len(b.shape) - 2, 0)
    left, right = (*ref.index[:rows], var(k)), (*ref.index[:batch], var(k), *ref.index[rows:])
    return Ref(a, left), Ref(b, right), k


_MUL = (aten.mul.Tensor, aten.mul.Scalar)
_DIV = (aten.div.Tensor, aten.div.Scalar)
_POWERS = {aten.rsqrt.default: -0.5, aten.sqrt.default: 0.5}
_SUMS = {
    aten.add.Tensor: (1.0, False),
    aten.add.Scalar: (1.0, False),
    aten.sub.Tensor: (-1.0, False),
    aten.sub.Scalar: (-1.0, False),
    aten.rsub.Tensor: (-1.0, True),
    aten.rsub.Scalar: (-1.0, True),
}
"""For each sum, the sign of its second operand, and whether the operands are reversed."""


def operands(ref: Ref) -> list[Ref | float]:
    """Returns the first two operands of an elementwise operation, as elements or numbers."""
    result: list[Ref | float] = []
    for a in ref.value.args[:2]:
        n = number(a)
        if n is not None:
            result.append(n)
        elif isinstance(a, Value):
            result.append(_broadcast(a, ref))
        else:
            raise Unsupported
    return result


# --- shared parts ---


class Share(NamedTuple):
    """A part of an element, a number or another element, that counts ``weight`` times.

    If ``final``, it is not expanded further.
    """

    of: Ref | float
    weight: float = 1.0
    final: bool = False


def shares(
    roots: Sequence[Share], parts: Callable[[Ref], Sequence[Share] | None], steps: Steps
) -> list[tuple[Ref | float, float]]:
    """Expands ``roots`` until nothing can be expanded further.

    Args:
        roots: the parts to start from.
        parts: returns the parts of an element, or None if it is not expanded.
        steps: counts the expanded elements.

    Returns:
        The numbers and then the elements that remain, each with its weight. An element that is met on several paths
        appears once, with the sum of their weights.

    Raises:
        TooLarge: if there are more elements than ``steps`` allows.
    """
    below: dict[tuple[Ref, bool], Sequence[Share] | None] = {}
    finished: list[tuple[Ref, bool]] = []
    todo: list[tuple[tuple[Ref, bool], bool]] = _elements(roots)
    while todo:
        key, done = todo.pop()
        if done:
            finished.append(key)
        elif key not in below:
            steps.take()
            made = below[key] = None if key[1] else parts(key[0])
            todo.append((key, True))
            todo += _elements(made or ())
    total: dict[Ref | float, float] = {key[0]: 0.0 for key, made in below.items() if made is None}
    numbers: list[tuple[Ref | float, float]] = []
    weights: dict[tuple[Ref, bool], float] = collections.defaultdict(float)

    def share(made: Sequence[Share], weight: float) -> None:
        for part in made:
            if isinstance(part.of, float):
                numbers.append((part.of, weight * part.weight))
            else:
                weights[part.of, part.final] += weight * part.weight

    share(roots, 1.0)
    # Visit an element before its parts: its total weight is then known.
    for key in reversed(finished):
        made = below[key]
        if made is None:
            total[key[0]] += weights[key]
        else:
            share(made, weights[key])
    return [*numbers, *total.items()]


def _elements(parts: Sequence[Share]) -> list[tuple[tuple[Ref, bool], bool]]:
    return [((part.of, part.final), False) for part in reversed(parts) if isinstance(part.of, Ref)]


def key_of(stop: Container[Value]) -> Hashable:
    """Returns a hashable key of the values to stop at. A container that is hashable is its own key."""
    return stop if isinstance(stop, Hashable) else frozenset(stop)  # type: ignore[call-overload]


def product(ref: Ref, stop: Container[Value] = ()) -> Term:
    """Returns ``ref`` as a product of factors that are not products, sums over variables, views or casts.

    Values of ``stop`` are factors whatever they are. rsqrt(u) becomes the factor (u, -0.5). Raises TooLarge.
    """
    key = product, ref.index, key_of(stop)
    term: Term = remembered(ref.value.memo, key, lambda: _product(ref, stop))
    return Term(term.coef, [*term.factors], [*term.bound])


def _product(ref: Ref, stop: Container[Value]) -> Term:
    term, steps, sums = Term(), Steps("factors", ref.value), Steps("sums", ref.value, DEPTH)
    factors: dict[Ref, float] = {}

    def below(refs: Sequence[Ref]) -> list[tuple[Ref | float, float]]:
        found = shares([Share(peel(r, stop)) for r in refs], lambda a: _factors_of(a, stop), steps)
        return found[::-1]

    todo = below([ref])
    while todo:
        a, exponent = todo.pop()
        if isinstance(a, float):
            term.coef *= power(a, exponent)
        # The square of a sum is not a sum of squares: it stays one factor.
        elif exponent == 1.0 and (inside := _summands(term, a, stop)) is not None:
            sums.take()
            todo += below(inside)
        else:
            factors[a] = factors.get(a, 0.0) + exponent
    if not all(map(math.isfinite, factors.values())):
        raise Unsupported
    term.factors = [*factors.items()]
    return term


def power(number: float, exponent: float) -> float:
    """Returns ``number ** exponent``. Raises Unsupported if that is not a finite real number."""
    try:
        found = number**exponent
    except (OverflowError, ZeroDivisionError):
        raise Unsupported from None
    if isinstance(found, complex) or not math.isfinite(found):
        raise Unsupported
    return found


def _factors_of(ref: Ref, stop: Container[Value]) -> list[Share] | None:
    """Returns the factors of an element of an elementwise operation, or None if it is itself a factor.

    An element that cannot be followed is a factor too.
    """
    value, func = ref.value, ref.value.func
    if value in stop or func is None:
        return None
    try:
        if (n := number(value)) is not None:
            return [Share(n)]
        if func in _MUL:
            return [_part(a, stop) for a in operands(ref)]
        if func in _DIV:
            a, b = operands(ref)
            return [_part(a, stop), _part(b, stop, -1.0)] if b != 0.0 else None
        if func is aten.neg.default:
            return [Share(-1.0), _part(_same_shape(ref), stop)]
        if func is aten.reciprocal.default:
            return [_part(_same_shape(ref), stop, -1.0)]
        exponent = number(value.args[1]) if func is aten.pow.Tensor_Scalar else _POWERS.get(func)
        if exponent is None:
            return None
        inner = _part(_same_shape(ref), stop, exponent)
        return [inner._replace(final=not exponent.is_integer())]
    except Unsupported:
        return None


def _part(a: Ref | float, stop: Container[Value], weight: float = 1.0) -> Share:
    return Share(a if isinstance(a, float) else peel(a, stop), weight)


def _summands(term: Term, ref: Ref, stop: Container[Value]) -> list[Ref] | None:
    """Returns the factors under a sum or a matrix product, else None.

    Adds its bound variables and its coefficient to ``term``.
    """
    if ref.value in stop:
        return None
    if (reduced := reduction(ref)) is not None:
        summand, bound, scale = reduced
        term.coef *= scale
        term.bound += bound
        return [summand]
    if (contracted := contraction(ref)) is not None:
        left, right, k = contracted
        if k.size != ONE:
            term.bound.append(k)
        return [left, right]
    return None


def addends(ref: Ref, stop: Container[Value] = ()) -> tuple[float, list[tuple[float, Ref]]]:
    """Returns ``ref`` as a constant plus elements with coefficients, none of which is a sum, a view or a cast.

    An element that is added twice appears once, with the sum of its coefficients, which may be 0. Raises Unsupported
    and TooLarge.
    """
    key = addends, ref.index, key_of(stop)
    constant, terms = remembered(ref.value.memo, key, lambda: _addends(ref, stop))
    return constant, [*terms]


def _addends(ref: Ref, stop: Container[Value]) -> tuple[float, list[tuple[float, Ref]]]:
    constant = 0.0
    terms: list[tuple[float, Ref]] = []
    for a, weight in shares([_part(ref, stop)], lambda r: addends_of(r, stop), Steps("addends", ref.value)):
        if not math.isfinite(weight):
            raise Unsupported
        if isinstance(a, float):
            constant += weight * a
        else:
            terms.append((weight, a))
    return constant, terms


def addends_of(ref: Ref, stop: Container[Value]) -> list[Share] | None:
    """Returns the addends of a sum or a difference, None for anything else. Raises Unsupported."""
    if ref.value in stop:
        return None
    value = ref.value
    while value.func is aten.detach.default:  # zeros_like ends in it; as a factor a state's start is kept
        value = value.args[0]
    if (n := number(value)) is not None:
        return [Share(n)]
    sides = summed(ref)
    return None if sides is None else [_part(a, stop, weight) for weight, a in sides]


def summed(ref: Ref) -> list[tuple[float, Ref | float]] | None:
    """Returns the operands of a sum or a difference with their coefficients, else None. Raises Unsupported."""
    value, func = ref.value, ref.value.func
    if func is aten.neg.default:
        return [(-1.0, _same_shape(ref))]
    if func not in _SUMS:
        return None
    scale = number(value.kwargs.get("alpha", value.args[2] if len(value.args) > 2 else 1))
    if scale is None:
        raise Unsupported
    left, right = operands(ref)
    sign, reverse = _SUMS[func]
    return [(1.0, right), (sign * scale, left)] if reverse else [(1.0, left), (sign * scale, right)]


def close(a: float, b: float) -> bool:
    """Returns whether two constants are equal up to the rounding of the arithmetic that made them."""
    return math.isclose(a, b, rel_tol=1e-6)
