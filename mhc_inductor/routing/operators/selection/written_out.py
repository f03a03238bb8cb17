# SPDX-License-Identifier: Apache-2.0
"""Finds softmaxes that are written out, in three forms, and those inside calls of scaled_dot_product_attention.

``e / e.sum(dim)`` with ``e = exp(s - s.amax(dim))``, also divided after the product with V, also with the exponential of a sink
in the sum; ``exp(s - s.logsumexp(dim))``; and ``s.log_softmax(dim).exp()``.
They have the softmax's values and gradients, NaN of rows of -inf included. Without the maximum they overflow where the
softmax does not, and are another formula.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mhc_inductor.routing.graph.expressions import _broadcast, aten, number, peel, whole
from mhc_inductor.routing.graph.index import ONE, DynamicWidth, Size
from mhc_inductor.routing.graph.linear import of_size, size_of_sum
from mhc_inductor.routing.graph.values import Value, example, imagined
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.masks.elements import DETACH, behind_ops
from mhc_inductor.routing.masks.operands import DIVIDE, dot, has_product
from mhc_inductor.routing.operators.selection.masked import gathered
from mhc_inductor.routing.operators.selection.weights import REACH, Call, Written, over, shows


@dataclasses.dataclass(frozen=True)
class _Power:
    """The value ``exp(scores - top)`` that ``node`` holds; ``counted``: the sink that ``top`` is at least."""

    node: fx.Node
    value: Value
    scores: Value
    top: Value
    dim: int
    counted: Value | None = None

    def sinks(self, total: Any) -> list[Value] | None:
        """Returns the sink whose exponential is added to the sum ``total`` over the keys, if any; None for no such sum."""
        if over(total, self.value, aten.sum.dim_IntList) == self.dim:
            return [] if self.counted is None else None
        if not isinstance(total, Value) or total.func is not aten.add.Tensor or total.kwargs:
            return None
        for a, b in (total.args, total.args[::-1]):
            less = b.args[0] if isinstance(b, Value) and b.func is aten.exp.default else None
            if less is None or less.func is not aten.sub.Tensor or less.kwargs or less.args[1] is not self.top:
                continue
            sink = behind_ops(less.args[0], DETACH) if self.counted is not None else self.counted
            if (
                sink is self.counted
                and over(a, self.value, aten.sum.dim_IntList) == self.dim
                and a.shape == total.shape
            ):
                return [less.args[0]]
        return None

    def read(
        self,
        view: View,
        weights: Value,
        node: fx.Node,
        sinks: Sequence[Value],
        after: tuple[Value, Value] | None = None,
    ) -> Written:
        """Reads ``weights`` as those of a softmax."""
        scores, dim = self.scores, self.dim
        if not sinks:
            view.values.reread(weights, aten._softmax.default, (scores, dim, False), {})
            return Written(weights, node, weights, after)
        one, more = (
            (*scores.shape[:dim], size, *scores.shape[dim + 1 :])
            for size in (ONE, size_of_sum(of_size(scores.shape[dim]).shifted(1)))
        )
        column = imagined(aten.expand.default, (sinks[0], None), one, scores.dtype)
        logits = imagined(aten.cat.default, ((scores, column), dim), more, scores.dtype)
        softmax = imagined(aten._softmax.default, (logits, dim, False), more, weights.dtype)
        view.values.reread(weights, aten.slice.Tensor, (softmax, dim, 0), {})
        return Written(weights, node, softmax, after, self.counted is None)


def written_softmax(view: View, node: fx.Node) -> Written | None:
    """Returns the softmax whose exponential is ``node``, of which its weights' value becomes that, or a part.

    Returns None if it is none, or something else reads the exponential.
    """
    value = view.value(node)
    if value is None or value.func is not aten.exp.default:
        return None
    less = value.args[0]
    if less.func is aten._log_softmax.default and not less.kwargs:
        power = _Power(node, value, less.args[0], less, less.args[1] % len(less.shape))
        return power.read(view, value, node, []) if has_product(less) else None
    if less.func is not aten.sub.Tensor or less.kwargs or len(less.args) > 2 or less.shape != less.args[0].shape:
        return None
    scores, top = less.args
    if (dim := over(top, scores, aten.logsumexp.default)) is not None:
        # Without products it may be another operator's formula, such as a Sinkhorn iteration.
        return _Power(node, value, scores, top, dim).read(view, value, node, []) if has_product(scores) else None
    found = _maximum(node, value)
    if found is None:
        return None
    readers = {view.value(user): user for user in node.users if user in view.live}
    divided = (v for v in readers if v is not None and v.func in DIVIDE and v.args[0] is value)
    weights, sinks = next(((v, x) for v in divided if (x := found.sinks(v.args[1])) is not None), (None, []))
    others = [v for v in readers if v is not weights]
    if weights is None:
        return _divided_after(view, found) if has_product(scores) else None
    if len(others) != 1 or others[0] is None or others[0].func is not aten.sum.dim_IntList:
        return None
    return found.read(view, weights, readers[weights], sinks)


_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def called_softmax(view: View, node: fx.Node) -> Written | None:
    """Returns the softmax of a call of scaled_dot_product_attention, whose value becomes its product with V.

    Returns None for calls without a mask whose keys are not gathered. Raises DynamicWidth if the scale is of an open size.
    """
    given = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
    nodes = [node, *(given.get(name) for name in _NAMES[:4])]
    out, q, k, v, mask = (view.value(x) if isinstance(x, fx.Node) else None for x in nodes)
    plain = mask is None and (given.get("attn_mask") is not None or k is None or gathered(k) is None)
    if out is None or q is None or k is None or v is None or plain or given.get("is_causal"):
        return None
    scale, dropped = (example(a) if isinstance(a := given.get(x), fx.Node) else a for x in ("scale", "dropout_p"))
    if scale is None and q.shape[-1].symbols:
        raise DynamicWidth(q.shape[-1])
    factor = 1.0 / math.sqrt(q.shape[-1].factor) if scale is None else number(scale)
    *lead, rows, _ = out.shape
    if given.get("enable_gqa") and lead:
        k, v = (_repeated(x, lead[-1]) for x in (k, v))
    q, k, v = (imagined(aten.expand.default, (x, None), (*lead, *x.shape[-2:]), x.dtype) for x in (q, k, v))
    keys, shape = k.shape[-2], (*lead, rows, k.shape[-2])
    turned = imagined(aten.transpose.int, (k, -2, -1), (*lead, k.shape[-1], keys), k.dtype)
    scores = imagined(aten.matmul.default, (q, turned), shape, q.dtype)
    scores = imagined(aten.mul.Tensor, (scores, factor), shape, q.dtype)
    if mask is not None and mask.dtype is torch.bool:
        scores = imagined(aten.where.self, (mask, scores, -math.inf), shape, q.dtype)
    elif mask is not None:
        scores = imagined(aten.add.Tensor, (scores, mask), shape, mask.dtype)
    softmax = imagined(aten._safe_softmax.default, (scores, -1), shape, out.dtype)
    kernel = imagined(out.func, (), out.shape, out.dtype)
    view.values.reread(out, aten.matmul.default, (softmax, v), {})
    call = Call(out, kernel, mask, None if dropped is None or number(dropped) == 0.0 else out)
    return Written(softmax, node, softmax, call=call)


def _repeated(x: Value, heads: Size) -> Value:
    """Returns K or V with each head as often as ``enable_gqa`` repeats it."""
    *lead, groups, keys, width = x.shape
    per = heads.over(groups) or ONE
    apart = imagined(aten.unsqueeze.default, (x, -3), (*lead, groups, ONE, keys, width), x.dtype)
    wide = imagined(aten.expand.default, (apart, None), (*lead, groups, per, keys, width), x.dtype)
    return imagined(aten.view.default, (wide, None), (*lead, groups.times(per), keys, width), x.dtype)


def _maximum(node: fx.Node, value: Value) -> _Power | None:
    """Returns the exponential of scores less their maximum, which may be that of them and a sink; None for another one."""
    scores, top = value.args[0].args
    both = behind_ops(top, DETACH)
    pairs: list[tuple[Any, Any]] = [(top, None)]
    if isinstance(both, Value) and both.func is aten.maximum.default:
        pairs = [both.args, both.args[::-1]]
    for highest, sink in pairs:
        dim = over(highest, scores, aten.amax.default, aten.max.dim, through=DETACH)
        if dim is not None:
            return _Power(node, value, scores, top, dim, behind_ops(sink, DETACH))
    return None


def _divided_after(view: View, power: _Power) -> Written | None:
    """Returns the softmax of an exponential whose one product is divided by its sum; the quotient's value becomes the product."""
    others = _readers(view, power.node, power.value)
    out = next((v for v in others if v is not None and dot(peel(whole(v))) is not None), None)
    total = next((v for v in others if v is not out), None)
    if total is None or out is None or len(others) != 2 or total.func is not aten.sum.dim_IntList:
        return None
    users = [view.value(user) for user in others[out].users if user in view.live]
    above = _readers(view, others[total], total)
    if len(users) != 1 or (made := users[0]) is None or made.func not in DIVIDE or made.args[0] is not out:
        return None
    if not isinstance(made.args[1], Value) or made.shape != out.shape:
        return None
    place = whole(made)
    *sides, _ = dot(peel(_broadcast(out, place)))  # type: ignore[misc]
    of = next((ref for side in sides if (ref := peel(side)).value is power.value), None)
    by, sinks = peel(_broadcast(made.args[1], place)), list[Value]()
    if by.value is not total:
        found = power.sinks(by.value)
        if not found or [*above] != [by.value]:
            return None
        above, sinks = _readers(view, above[by.value], by.value), found
    elif power.counted is not None or total.args[0] is not power.value:
        return None
    if of is None or [*above] != users or [d % len(of.index) for d in total.args[1]] != [power.dim]:
        return None
    row = [i for d, i in enumerate(of.index) if d != power.dim]
    if row != [i for d, i in enumerate(by.index) if d != power.dim or len(by.index) < len(of.index)]:
        return None
    view.values.reread(made, out.func, out.args, out.kwargs)
    return power.read(view, power.value, power.node, sinks, (out, made))


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
