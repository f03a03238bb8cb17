# SPDX-License-Identifier: Apache-2.0
"""Reports softmaxes over masked scores that are not routed, so that they do not stay silently.

They are written out as exp(scores) over a sum, or their scores pass through something that routing cannot follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import fx

from mhc_inductor.routing.graph.expressions import aten, whole
from mhc_inductor.routing.graph.values import Value, behind, inner, name_of
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.masks.elements import SHOWN, constant_of
from mhc_inductor.routing.masks.operands import Scaled, dot, has_product
from mhc_inductor.routing.operators.selection.masked import CHOICES, LOGS, MAXIMA, Masked
from mhc_inductor.routing.operators.selection.weights import REACH, Weights, Written

_NAMES = ("exp", "exp_", "exp2", "exp2_", "special_exp2", "expm1", "special_expm1", "pow")
_POWERS = {aten.exp.default: 0, aten.exp2.default: 0, aten.expm1.default: 0, aten.pow.Scalar: 1}
"""Exponential ops, and which argument is the exponent."""
_SUMS = (aten.sum.dim_IntList, aten.mean.dim, aten.linalg_vector_norm.default)


def is_power(node: fx.Node) -> bool:
    """Checks whether a node could be the exponential of a softmax."""
    return node.op in ("call_function", "call_method") and name_of(node) in _NAMES


def is_log(node: fx.Node) -> bool:
    """Checks whether a node is a log_softmax or a logsumexp."""
    return node.op in ("call_function", "call_method") and name_of(node) in ("log_softmax", "logsumexp")


def logged(view: View, node: fx.Node) -> Value | None:
    """Returns the scores of which a node takes the logarithm of a softmax or of its sum."""
    top = _maximum(view.value(node))
    return top.args[0] if top is not None and top.func in LOGS else None


def masked_softmax(view: View, node: fx.Node) -> Masked | None:
    """Returns what hides scores in the softmax whose exponential is ``node``.

    Returns None if the node is not part of a softmax.
    """
    value = view.value(node)
    if value is None or value.func not in _POWERS or not value.shape:
        return None
    exponent, weights = value.args[_POWERS[value.func]], Weights(view, Written(value, node, value))
    top = _maximum(exponent)
    if not (top is not None and top.func in LOGS) and not _is_summed(view, weights):
        return None
    return Masked(view, exponent, [g.mask for g in weights.known.values() if g.mask is not None])


def _maximum(value: object) -> Value | None:
    """Returns the maximum, or logarithm of a sum, that ``value`` is computed from element by element; else None."""
    near = (
        behind(value, passed=lambda at: at.func is None or dot(whole(at)) is None) if isinstance(value, Value) else ()
    )
    return next((at for at in itertools.islice(near, REACH) if at.func in MAXIMA), None)


def _is_summed(view: View, weights: Weights) -> bool:
    """Checks whether anything takes the sum of the exponentials."""
    users = {user for value in weights.same if value.node is not None for user in value.node.users if user in view.live}
    return any(_sums(value, weights) for user in users if (value := view.value(user)) is not None)


def _sums(value: Value, weights: Weights) -> bool:
    """Checks whether one call, seen as the ops that it consists of, takes the sum of the exponentials."""
    for at in itertools.islice(inner(value), REACH):
        of = at.args[0] if at.func in _SUMS else None
        while isinstance(of, Value) and of not in weights.same and (of.func is aten.abs.default or of.func in SHOWN):
            of = of.args[0]
        if of in weights.same:
            return True
    return False


def by_choice(masks: Iterable[Value]) -> Value | None:
    """Returns the first mask that is computed from values that a topk or sort returns; None without one."""
    return next((m for m in masks if any(at.func in CHOICES and at.out == 0 for at in behind(m))), None)


def picked_scores(scores: Value) -> Value | None:
    """Returns the gather or scatter by which a softmax gets some scores of all that were computed; None without one."""
    at = Scaled(whole(scores)).end.value if scores.shape else scores
    if at.func is aten.scatter.src:
        fill = constant_of(at.args[0])
        return at if fill is not None and fill <= -1e4 and has_product(at.args[3]) else None
    picks = at.func is aten.gather.default or (at.func is aten.topk.default and at.out == 0)
    return at if picks and has_product(at.args[0]) else None
