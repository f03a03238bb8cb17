# SPDX-License-Identifier: Apache-2.0
"""Finds softmaxes that are written out, in three forms.

``e / e.sum(dim)`` with ``e = exp(s - s.amax(dim))``, also divided after the product with V; ``exp(s - s.logsumexp(dim))``; and
``s.log_softmax(dim).exp()``.
They have the softmax's values and gradients, NaN of rows of -inf included. Without the maximum they overflow where the
softmax does not, and are another formula.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from mhc_inductor.routing.graph.expressions import _broadcast, aten, peel, whole
from mhc_inductor.routing.graph.index import ONE
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.masks.elements import DETACH, behind_ops
from mhc_inductor.routing.masks.operands import DIVIDE, dot
from mhc_inductor.routing.masks.products import has_product
from mhc_inductor.routing.operators.selection.weights import REACH, shows


class Written(NamedTuple):
    """The node of the weights. ``after``: their product with V before and after it is divided by their sum."""

    node: fx.Node
    after: tuple[Value, Value] | None = None


def written_softmax(view: View, node: fx.Node) -> Written | None:
    """Returns the weights whose exponential is ``node``; their value becomes that of a softmax.

    Returns None if it is none, or something else reads the exponential.
    """
    power = view.value(node)
    if power is None or power.func is not aten.exp.default:
        return None
    less = power.args[0]
    if less.func is aten._log_softmax.default and not less.kwargs and has_product(less):
        return _set(power, less.args[0], less.args[1], node)
    if less.func is not aten.sub.Tensor or less.kwargs or len(less.args) > 2 or less.shape != less.args[0].shape:
        return None
    scores, top = less.args
    if (dim := _over(top, scores, aten.logsumexp.default)) is not None:
        # Without products it may be another operator's formula, such as a Sinkhorn iteration.
        return _set(power, scores, dim, node) if has_product(scores) else None
    dim = _over(top, scores, aten.amax.default, aten.max.dim, through=DETACH)
    if dim is None:
        return None
    readers = {view.value(user): user for user in node.users if user in view.live}
    weights = next((v for v in readers if v is not None and _is_softmax(v, power, scores, dim)), None)
    others = [v for v in readers if v is not weights]
    if weights is None:
        after = _divided_after(view, node, power, dim) if has_product(scores) else None
        return after and _set(power, scores, dim, node, after)
    if len(others) != 1 or others[0] is None or others[0].func is not aten.sum.dim_IntList:
        return None
    return _set(weights, scores, dim, readers[weights])


def _set(weights: Value, scores: Value, dim: int, node: fx.Node, after: tuple[Value, Value] | None = None) -> Written:
    weights.set(aten._softmax.default, (scores, dim % len(scores.shape), False), {})
    return Written(node, after)


def _divided_after(view: View, node: fx.Node, power: Value, dim: int) -> tuple[Value, Value] | None:
    """Returns the one product of an exponential, and that over the exponential's sum, whose value becomes the product's."""
    others = _readers(view, node, power)
    out = next((v for v in others if v is not None and dot(peel(whole(v))) is not None), None)
    total = next((v for v in others if v is not out), None)
    if total is None or out is None or len(others) != 2:
        return None
    users = [view.value(user) for user in others[out].users if user in view.live]
    if len(users) != 1 or (made := users[0]) is None or [*_readers(view, others[total], total)] != users:
        return None
    if made.func not in DIVIDE or made.args[0] is not out or not isinstance(made.args[1], Value):
        return None
    place = whole(made)
    *sides, _ = dot(peel(_broadcast(out, place)))  # type: ignore[misc]
    of = next((ref for side in sides if (ref := peel(side)).value is power), None)
    by = peel(_broadcast(made.args[1], place))
    if of is None or by.value is not total or total.func is not aten.sum.dim_IntList or made.shape != out.shape:
        return None
    row = [i for d, i in enumerate(of.index) if d != dim]
    summed = [i for d, i in enumerate(by.index) if d != dim or len(by.index) < len(of.index)]
    if [d % len(of.index) for d in total.args[1]] != [dim] or total.args[0] is not power or row != summed:
        return None
    made.set(out.func, out.args, out.kwargs)
    return out, made


def _readers(view: View, node: fx.Node, value: Value) -> dict[Value | None, fx.Node]:
    """Returns what reads a value, behind views and casts."""
    known, found = {value: None}, dict[Value | None, fx.Node]()

    def passes(user: fx.Node) -> bool:
        reader = view.value(user)
        if reader is not None and shows(reader, known):
            known[reader] = None
            return True
        found[reader] = user
        return False

    view.descendants([node], passes, REACH)
    return found


def _is_softmax(value: Value, power: Value, scores: Value, dim: int) -> bool:
    """Checks whether ``value`` is ``power`` over its sum, or was found to be that softmax before."""
    if value.func is aten._softmax.default:
        return value.args[:2] == (scores, dim)
    divided = value.func in DIVIDE and value.args[0] is power
    return divided and _over(value.args[1], power, aten.sum.dim_IntList) == dim


def _over(value: Any, of: Value, *funcs: Any, through: Any = ()) -> int | None:
    """Returns the dim of ``of`` that ``value``, broadcast to it, is reduced over; None if it is something else.

    ``through``: calls that may stand in between. A softmax does not depend on the maximum, so only that may be detached.
    """
    value = behind_ops(value, through)
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
    return gone[0] if behind_ops(value.args[0], through) is of and [d % len(of.shape) for d in dims] == gone else None
