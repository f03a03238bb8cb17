# SPDX-License-Identifier: Apache-2.0
"""Elements of masks: the ops that make them, their constants, and what their views and casts show."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Container
from typing import Any

import torch

from mhc_inductor.routing.graph.expressions import CASTS as CASTS
from mhc_inductor.routing.graph.expressions import VIEWS, Ref, _broadcast, aten, step, whole
from mhc_inductor.routing.graph.index import Unsupported
from mhc_inductor.routing.graph.linear import Key, variables_of
from mhc_inductor.routing.graph.values import Value

AND = {aten.bitwise_and.Tensor, aten.logical_and.default}
OR = {aten.bitwise_or.Tensor, aten.logical_or.default}
NOT = {aten.bitwise_not.default, aten.logical_not.default}
ANY = {aten.any.default, aten.any.dim, aten.any.dims, aten.amax.default}
ALL = {aten.all.default, aten.all.dim, aten.all.dims, aten.amin.default}
ARANGE = {aten.arange.default: (None, 0, None), aten.arange.start: (0, 1, None), aten.arange.start_step: (0, 1, 2)}
"""Positions of start, end and step among the arguments of an arange, None for a missing one."""
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
"""Position of the fill value among the arguments."""
DETACH = (aten.detach.default, aten.alias.default)
WHOLE = (torch.int64, torch.int32)
REVERSED = (aten.rsub.Tensor, aten.rsub.Scalar)
SUMS = {aten.sum.dim_IntList, aten.sum.default}
ADD = (aten.add.Tensor, aten.add.Scalar)
SUB = (aten.sub.Tensor, aten.sub.Scalar)
MULTIPLY = (aten.mul.Tensor, aten.mul.Scalar)
FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)


@functools.cache
def _arguments(func: Any) -> dict[str, tuple[int, Any]]:
    """Returns for each argument of an op its position and its default. Those given by keyword come after all others."""
    return {a.name: (k, a.default_value) for k, a in enumerate(func._schema.arguments)}


def argument(value: Value, *names: str) -> Any:
    """Returns the argument of the call that made ``value`` with one of these names in the op's schema, or its default.

    Returns None if the op has no such argument.
    """
    known = _arguments(value.func)
    name = next(filter(known.__contains__, names), None)
    if name is None:
        return None
    place, default = known[name]
    return value.args[place] if place < len(value.args) else value.kwargs.get(name, default)


def signed(value: Value) -> list[tuple[Any, Any]] | None:
    """Returns the operands of a sum, a difference or a negation, each after its factor; None for other ops."""
    if value.func is aten.neg.default:
        return [(-1, value.args[0])]
    if value.func not in (*ADD, *SUB, *REVERSED):
        return None
    a, b = value.args[:2]
    alpha = argument(value, "alpha")
    if not isinstance(alpha, (int, float)):
        raise Unsupported
    return [(1, b), (-alpha, a)] if value.func in REVERSED else [(1, a), (alpha if value.func in ADD else -alpha, b)]


def rounded(known: float, dtype: torch.dtype) -> float:
    """Returns ``known`` as a tensor of ``dtype`` stores it: rounded or truncated. Raises Unsupported if it does not fit."""
    if dtype is torch.bool:
        return float(known != 0.0)
    if dtype.is_floating_point:
        return float(torch.tensor(known, dtype=torch.float64).to(dtype))
    if dtype.is_complex or not torch.iinfo(dtype).min <= known <= torch.iinfo(dtype).max:
        raise Unsupported  # each device stores another integer
    return float(int(known))


def constant_of(a: Any) -> float | None:
    """Returns a Python number, or the number that every element of a tensor equals; None for anything else."""
    if not isinstance(a, Value):
        return float(a) if isinstance(a, (bool, int, float)) else None
    dtypes = []
    while isinstance(a, Value) and a.func is not None:
        dtypes.append(a.dtype)
        known = _filled_with(a)
        if known is not None:
            with contextlib.suppress(Unsupported):
                return functools.reduce(rounded, reversed(dtypes), known)
            return None
        if a.func not in SHOWN:
            return None
        a = a.args[0]
    return None


def _filled_with(a: Value) -> float | None:
    """Returns the number with which an op without other inputs fills its result; None for other ops."""
    if a.node is not None and a.node.target is torch.tensor:
        given = a.node.args[0]
        return float(given) if isinstance(given, (int, float)) else None
    if a.func in _FILLED:
        return _FILLED[a.func]
    if a.func in _FULL:
        given = a.args[_FULL[a.func]]
        return float(given) if isinstance(given, (int, float)) else constant_of(given)
    return None


SHOWN = {*VIEWS, *CASTS, aten.detach.default} - {aten.cat.default, aten.stack.default}
"""Ops whose elements are elements of their first argument, apart from the dtype."""


def behind_ops(value: Any, funcs: Container[Any]) -> Any:
    """Returns what stands behind calls of ``funcs``, of which the first argument counts."""
    while isinstance(value, Value) and value.func in funcs:
        value = value.args[0]
    return value


def inner(ref: Ref) -> Ref | None:
    """Returns the element that a view or a ``detach`` shows; None if ``ref`` is neither."""
    if ref.value.func is aten.detach.default:
        return Ref(ref.value.args[0], ref.index)
    return step(ref)


def uncast(ref: Ref) -> Ref:
    """Returns the element behind views and casts, except casts to bool."""
    while True:
        below = inner(ref)
        if below is None and ref.value.func in CASTS and ref.value.dtype is not torch.bool:
            below = Ref(ref.value.args[0], ref.index)
        if below is None:
            return ref
        ref = below


def filling(value: Value) -> tuple[Value, bool, Any, Any] | None:
    """Returns (mask, want, x, fill) of a where or a masked_fill: ``x`` where ``mask`` is ``want``, and ``fill`` elsewhere.

    What is a number in a where is the fill. Returns None for other ops.
    """
    if value.func in FILLS:
        x, mask, fill = value.args
        return mask, False, x, fill
    if value.func is not aten.where.self:
        return None
    mask, a, b = value.args
    return (mask, True, a, b) if constant_of(b) is not None else (mask, False, b, a)


def kept(value: Value) -> Any:
    """Returns what a masked_fill keeps: a tensor, or the number that it holds wherever it is kept.

    It is a number in ``x.masked_fill(m, a).masked_fill(~m, b)``.
    """
    at = whole(value)
    flag, want = _flag(_broadcast(value.args[1], at))
    x = shown(_broadcast(value.args[0], at))
    if x.value.func in FILLS:
        other, hides = _flag(_broadcast(x.value.args[1], x))
        if other == flag and hides != want:
            return x.value.args[2]
    return value.args[0]


def _flag(ref: Ref) -> tuple[Ref, bool]:
    """Returns the element of a bool tensor behind views and negations, and whether ``ref`` is that or its opposite."""
    ref, want = shown(ref), True
    while ref.value.func in NOT and ref.value.args[0].dtype is torch.bool:
        ref, want = shown(Ref(ref.value.args[0], ref.index)), not want
    return ref, want


def shown(ref: Ref) -> Ref:
    """Returns the element behind views."""
    while ref.value.func not in CASTS and (below := inner(ref)) is not None:
        ref = below
    return ref


def keyed(ref: Ref) -> bool:
    """Checks whether the element depends on the key."""
    return any(isinstance(v, Key) for v in variables_of(ref))


def operand(a: Any, ref: Ref) -> Ref:
    """Returns the element of the operand ``a`` that broadcasts to ``ref``. Raises Unsupported if it is not a tensor."""
    if not isinstance(a, Value):
        raise Unsupported
    return _broadcast(a, ref)
