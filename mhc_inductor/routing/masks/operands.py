# SPDX-License-Identifier: Apache-2.0
"""Products and their operands: q, k, v and scores behind views, casts and constant factors; sums of products."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mhc_inductor.routing.graph.expressions import Ref, aten, contraction, operands, peel, reduction, step, summed
from mhc_inductor.routing.graph.gates import by_number
from mhc_inductor.routing.graph.index import Size, Var
from mhc_inductor.routing.graph.values import Value, behind
from mhc_inductor.routing.masks.elements import MULTIPLY, SHOWN, behind_ops

DIVIDE = (aten.div.Tensor, aten.div.Scalar)
MOST_PRODUCTS = 4
"""The most products that scores are the sum of: one of features without positions, one of rotary features."""
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.mv.default, aten.matmul.default)
_SUMS = (aten.add.Tensor, aten.sub.Tensor)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where q, k or v is read: an element of a node's value, and the dtype in which the attention reads it."""

    ref: Ref
    dtype: torch.dtype


class Joined(Value):
    """Tensors that are cast and concatenated where the op is placed. No node of the graph holds the result."""

    __slots__ = ()

    def __init__(self, pieces: Sequence[Value], dim: int, shape: tuple[Size, ...], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.set(aten.cat.default, (tuple(pieces), dim), {})


def held(value: Value) -> list[Value]:
    """Returns the values of the nodes that hold a tensor: its own, the pieces of a :class:`Joined`, or none."""
    if isinstance(value, Joined):
        return [*value.args[0]]
    return [] if value.node is None else [value]


def sources(ref: Ref) -> Iterator[Source]:
    """Yields the tensors that hold the same elements, the nearest first, behind views and casts."""
    dtype = ref.value.dtype
    while True:
        yield Source(ref, dtype)
        below = step(ref)
        if below is None or not _same_numbers(ref, below):
            return
        if torch.finfo(below.value.dtype).bits < torch.finfo(dtype).bits:
            dtype = below.value.dtype
        ref = below


def _same_numbers(ref: Ref, below: Ref) -> bool:
    """Checks whether a view or cast changes no number, or only by a rounding that autocast or an op adds."""
    now, before = ref.value.dtype, below.value.dtype
    if now is before or not keeps_16_bits(ref, below):
        return now is before
    # The op reads what the model rounded: a narrowing cast that the model wrote stays.
    return ref.value.node is None or torch.promote_types(now, before) is now


def keeps_16_bits(ref: Ref, below: Ref) -> bool:
    """Checks that neither side of a view or cast is a float8, whose rounding must never be dropped."""
    return all(x.value.dtype.itemsize > 1 or not x.value.dtype.is_floating_point for x in (ref, below))


class Scaled:
    """An element as ``factor * ref``, found behind views, casts, signs and products with constants.

    ``met``: the values on the way to ``end``. For ``inputs`` (q and k) the roundings that the model wrote stay; for
    scores only those to fewer than 16 bits do.
    """

    def __init__(self, ref: Ref, inputs: bool = False) -> None:
        self.factor = 1.0
        self.met: list[Value] = []
        self.ref = ref
        while True:
            self.met.append(ref.value)
            if not inputs and ref.value.func is aten.cat.default:
                break  # scores next to a sink
            below = step(ref)
            if below is not None and not (_same_numbers(ref, below) if inputs else keeps_16_bits(ref, below)):
                break
            factor, of = by_number(ref) or (0.0, ref)
            if below is None and 0.0 < abs(factor) < math.inf:
                self.factor *= factor
                self.ref = below = of
            if below is None:
                break
            ref = below
        self.end = ref

    @property
    def narrowest(self) -> torch.dtype:
        """Returns the narrowest dtype on the way."""
        return min((v.dtype for v in self.met), key=lambda d: (torch.finfo(d).bits, torch.finfo(d).max))


@dataclasses.dataclass(frozen=True)
class Pair:
    """One of the products whose sum the scores are: ``sum over d of q * k``."""

    q: Ref
    k: Ref
    d: Var


def products(ref: Ref) -> tuple[list[tuple[float, Ref, Ref, list[Var]]], list[Value]] | None:
    """Returns the sums of products that an element is the sum of, None if it is anything else.

    Each is (factor, left, right, bound variables). Also returns the values on the way to them. A sum of products is one
    product of concatenated vectors.
    """
    found, met, todo = list[tuple[float, Ref, Ref, list[Var]]](), list[Value](), [(1.0, ref)]
    while todo:
        factor, at = todo.pop()
        one = dot(at)
        if one is not None:
            found.append((factor, *one))
            continue
        sides = summed(at) if at.value.func in _SUMS else None
        if sides is None or len(found) + len(todo) + len(sides) > MOST_PRODUCTS:
            return None
        for weight, side in reversed(sides):
            if side == 0.0:
                continue  # where ``sum`` starts
            if not isinstance(side, Ref):
                return None
            scaled = Scaled(side)
            met += scaled.met
            todo.append((factor * weight * scaled.factor, scaled.end))
    return found, met


def dot(ref: Ref) -> tuple[Ref, Ref, list[Var]] | None:
    """Returns (left, right, bound variables) of a sum of products, None if ``ref`` is not one."""
    contracted = contraction(ref)
    if contracted is not None:
        return contracted[0], contracted[1], [contracted[2]]
    reduced = reduction(ref)
    if reduced is None or reduced[2] != 1.0:
        return None
    summand, bound, _ = reduced
    summand = peel(summand)
    if summand.value.func not in MULTIPLY:
        return None
    a, b = operands(summand)
    return (a, b, bound) if isinstance(a, Ref) and isinstance(b, Ref) else None


def has_product(value: Value) -> bool:
    """Checks whether a product of tensors that are no parameters is among what computes ``value``."""
    return nearest(value, lambda v: v.func in _PRODUCTS and not any(map(projects, v.args[:2]))) is not None


def nearest(value: Value, wanted: Callable[[Value], bool]) -> Value | None:
    """Returns the nearest value that computes ``value``, itself included, and is ``wanted``; None without one.

    Looks at floating-point values, and behind no product except ``value`` itself.
    """
    looked_at = behind(value, lambda v: v.dtype.is_floating_point, lambda v: v is value or v.func not in _PRODUCTS)
    return next(filter(wanted, looked_at), None)


def projects(a: Any) -> bool:
    """Checks whether a factor of a product is a parameter, or a view of one."""
    origin = behind_ops(a, SHOWN)
    return isinstance(origin, Value) and is_parameter(origin)


def is_parameter(value: Value) -> bool:
    """Checks whether a value is a parameter of the model."""
    return value.node is not None and isinstance(value.node.meta.get("example_value"), torch.nn.Parameter)
