# SPDX-License-Identifier: Apache-2.0
"""Elements of values, and views as maps between them: which element of its operand an element of a view is.

A :class:`Ref` is an element of a value: the value and an index for each of its dimensions. Views and casts between
floating dtypes become index arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch

from mhc_inductor import compat
from mhc_inductor.log import logger
from mhc_inductor.routing.graph.bounds import Unfollowed
from mhc_inductor.routing.graph.index import (
    ONE,
    DynamicWidth,
    Index,
    Size,
    Unsupported,
    Var,
    bound_of,
    const,
    divmod_index,
    linear,
    reshape,
    size_of,
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
        if self is other:
            return True
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
    if len(operand.shape) > len(ref.index):
        raise Unsupported
    tail = ref.index[len(ref.index) - len(operand.shape) :]
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
    low, high = _range(at)
    for piece in pieces:
        size = piece.shape[d]
        if size.symbols:
            raise Unsupported
        if start <= low and high < start + size.factor:
            index = list(ref.index)
            index[d] = at.plus(const(-start)) if start else at
            return Ref(piece, tuple(index))
        start += size.factor
    raise Unsupported


def _range(index: Index) -> tuple[int, int]:
    """Returns the smallest and the largest number that ``index`` can be. Raises Unsupported."""
    low = high = 0
    for atom, c in index.terms.items():
        bound = Size(2) if atom is None else bound_of(atom)
        if c.symbols or bound.symbols or (atom is not None and c.factor < 0):
            raise Unsupported
        low += c.factor if atom is None else 0
        high += c.factor * (bound.factor - 1)
    return low, high


def _stacked(ref: Ref) -> Ref:
    pieces, *rest = ref.value.args
    d = _dim(ref.value, rest[0] if rest else 0)
    at = ref.index[d].constant
    rest_index = (*ref.index[:d], *ref.index[d + 1 :])
    if at is not None:
        return Ref(pieces[at], rest_index)
    # Evenly spaced pieces of one tensor, stacked in order, are a view of it.
    each = [step(Ref(piece, rest_index)) for piece in pieces]
    first = each[0]
    if first is None or len(each) < 2 or any(e is None or e.value is not first.value for e in each):
        raise Unsupported
    shifts = [[_constant(i) - _constant(j) for i, j in zip(e.index, first.index, strict=True)] for e in each if e]
    steps = shifts[1]
    for k, (e, shift) in enumerate(zip(each, shifts, strict=True)):
        moved = tuple(i.plus(const(k * by)) for i, by in zip(first.index, steps, strict=True))
        if shift != [k * by for by in steps] or e is None or e.index != moved:
            raise Unsupported
    spread = (i.plus(ref.index[d].times(Size(by))) for i, by in zip(first.index, steps, strict=True))
    return Ref(first.value, tuple(spread))


def _constant(index: Index) -> int:
    fixed = index.terms.get(None)
    if fixed is not None and fixed.symbols:
        raise Unsupported
    return fixed.factor if fixed is not None else 0


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
