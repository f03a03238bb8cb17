# SPDX-License-Identifier: Apache-2.0
"""Finds softmaxes that are written out as ``e / e.sum(dim)`` with ``e = exp(s - s.amax(dim))``.

They have the softmax's values and gradients, NaN of rows of -inf included. Without the maximum they overflow where the
softmax does not, and are another formula.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from mhc_inductor.routing.graph.expressions import aten
from mhc_inductor.routing.graph.index import ONE
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.masks.elements import DETACH, behind_ops
from mhc_inductor.routing.masks.operands import DIVIDE


def written_softmax(view: View, node: fx.Node) -> fx.Node | None:
    """Returns the node of the weights whose exponential is ``node``; their value becomes that of a softmax.

    Returns None if it is none, or something else reads the exponential.
    """
    power = view.value(node)
    if power is None or power.func is not aten.exp.default or power.args[0].func is not aten.sub.Tensor:
        return None
    less = power.args[0]
    scores, top = less.args[:2]
    dim = _over(top, scores, aten.amax.default, aten.max.dim)
    if dim is None or less.kwargs or len(less.args) > 2 or less.shape != scores.shape:
        return None
    readers = {view.value(user): user for user in node.users if user in view.live}
    weights = next((v for v in readers if v is not None and _is_softmax(v, power, scores, dim)), None)
    others = [v for v in readers if v is not weights]
    if weights is None or len(others) != 1 or others[0] is None or others[0].func is not aten.sum.dim_IntList:
        return None
    weights.set(aten._softmax.default, (scores, dim, False), {})
    return readers[weights]


def _is_softmax(value: Value, power: Value, scores: Value, dim: int) -> bool:
    """Checks whether ``value`` is ``power`` over its sum, or was found to be that softmax before."""
    if value.func is aten._softmax.default:
        return value.args[:2] == (scores, dim)
    divided = value.func in DIVIDE and value.args[0] is power
    return divided and _over(value.args[1], power, aten.sum.dim_IntList) == dim


def _over(value: Any, of: Value, *funcs: Any) -> int | None:
    """Returns the dim of ``of`` that ``value``, broadcast to it, is reduced over; None if it is something else."""
    value = behind_ops(value, DETACH)
    if not isinstance(value, Value) or len(value.shape) != len(of.shape):
        return None
    gone = [d for d, (a, b) in enumerate(zip(value.shape, of.shape, strict=True)) if a != b]
    if len(gone) != 1 or value.shape[gone[0]] != ONE:
        return None
    if value.func is aten.unsqueeze.default and value.args[1] % len(of.shape) == gone[0]:
        value = value.args[0]
    if not isinstance(value, Value) or value.func not in funcs or value.out or value.kwargs or len(value.args) < 2:
        return None
    dims = [value.args[1]] if isinstance(value.args[1], int) else [*value.args[1]]
    return gone[0] if behind_ops(value.args[0], DETACH) is of and [d % len(of.shape) for d in dims] == gone else None
