# SPDX-License-Identifier: Apache-2.0
"""Sigmoids in all their spellings, elementwise functions of one tensor, and sums of squares."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from mhc_inductor.routing.graph.expressions import Ref, addends, aten, contraction, number, operands, peel, reduction
from mhc_inductor.routing.graph.index import Var
from mhc_inductor.routing.graph.values import Value

SIGMOIDS = (aten.sigmoid.default, aten.special_expit.default)
LOG_SIGMOIDS = (aten.log_sigmoid.default, aten.log_sigmoid_forward.default)
_MULTIPLY = (aten.mul.Tensor, aten.mul.Scalar)
_DIVIDE = (aten.div.Tensor, aten.div.Scalar)
CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)


@dataclasses.dataclass(frozen=True)
class Gate:
    """``span * sigmoid(scale * argument) + offset``."""

    argument: Ref
    scale: float = 1.0
    span: float = 1.0
    offset: float = 0.0


def gate_of(ref: Ref, exponent: float) -> Gate | None:
    """Returns a sigmoid, the reciprocal of ``1 + exp(-z)``, or what is one in other words; None for anything else.

    ``tanh(t) = 2 sigmoid(2 t) - 1``, and ``exp(logsigmoid(t))`` is a sigmoid.
    """
    func = ref.value.func
    if exponent == 1.0 and func in (*SIGMOIDS, aten.tanh.default):
        argument = Ref(ref.value.args[0], ref.index)
        return Gate(argument) if func in SIGMOIDS else Gate(argument, 2.0, 2.0, -1.0)
    if exponent == 1.0 and func is aten.exp.default:
        inner = peel(Ref(ref.value.args[0], ref.index))
        return Gate(Ref(inner.value.args[0], inner.index)) if inner.value.func in LOG_SIGMOIDS else None
    if exponent == -1.0:
        one, terms = addends(ref)
        if one == 1.0 and len(terms) == 1 and terms[0][0] == 1.0 and terms[0][1].value.func is aten.exp.default:
            inner = peel(Ref(terms[0][1].value.args[0], terms[0][1].index))
            if inner.value.func is aten.neg.default:
                return Gate(Ref(inner.value.args[0], inner.index))
    return None


def argument_of(ref: Ref) -> Ref | None:
    """Returns the argument of an elementwise function of one tensor, None for anything else."""
    tensors = [a for a in ref.value.args if isinstance(a, Value)]
    fits = len(tensors) == 1 and tensors[0].shape == ref.value.shape
    return Ref(tensors[0], ref.index) if fits else None


def limits(clamp: Value) -> tuple[Any, Any]:
    """Returns the smallest and the largest value that one of :data:`CLAMPS` lets through, None for a missing one."""
    low, high = [*clamp.args[1:], None, None][:2]
    if clamp.func is aten.clamp_max.default:
        low, high = None, low
    return clamp.kwargs.get("min", low), clamp.kwargs.get("max", high)


def bound_below(ref: Ref) -> tuple[Ref, float] | None:
    """Returns (element, bound) of a clamp that bounds an element from below, or None."""
    if ref.value.func in CLAMPS:
        low, high = limits(ref.value)
        bound = number(low)
        return (peel(Ref(ref.value.args[0], ref.index)), bound) if bound is not None and high is None else None
    return None


def by_number(ref: Ref) -> tuple[float, Ref] | None:
    """Returns (factor, element) of an element that is multiplied or divided by a number, or negated; else None."""
    value = ref.value
    if value.func is aten.neg.default:
        return -1.0, Ref(value.args[0], ref.index)
    if value.func not in (*_MULTIPLY, *_DIVIDE) or value.kwargs:
        return None
    a, b = operands(ref)
    if value.func in _MULTIPLY and isinstance(a, float):
        a, b = b, a
    if not isinstance(a, Ref) or not isinstance(b, float):
        return None
    return b if value.func in _MULTIPLY else 1.0 / b if b else math.inf, a


def squared(ref: Ref) -> tuple[Ref, float, list[Var]] | None:
    """Returns (v, factor, bound variables) of ``factor * sum(v * v)``, or None."""
    scale = 1.0
    bound: list[Var] = []
    while True:
        ref = peel(ref)
        reduced = reduction(ref)
        if reduced is not None:
            ref, more, factor = reduced
            bound += more
            scale *= factor
        elif (v := _squares(ref)) is not None:
            root = peel(v)
            if root.value.func is not aten.sqrt.default:
                return v, scale, bound
            # The square of a vector norm: go on with the sum under its root.
            ref = Ref(root.value.args[0], root.index)
        elif (scaled := by_number(ref)) is not None and 0.0 < scaled[0] < math.inf:
            ref, scale = scaled[1], scale * scaled[0]
        elif (contracted := contraction(ref)) is not None:
            left, right, k = contracted
            return (left, scale, [*bound, k]) if peel(left) == peel(right) else None
        else:
            return None


def _squares(ref: Ref) -> Ref | None:
    """Returns v of ``v ** 2`` or ``v * v``, or None."""
    if ref.value.func is aten.pow.Tensor_Scalar and number(ref.value.args[1]) == 2:
        return Ref(ref.value.args[0], ref.index)
    if ref.value.func is aten.mul.Tensor:
        a, b = operands(ref)
        return a if isinstance(a, Ref) and isinstance(b, Ref) and peel(a) == peel(b) else None
    return None
