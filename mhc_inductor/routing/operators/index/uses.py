"""Checks of how a model uses the scores and the choice of an indexer."""

from __future__ import annotations

import torch
from torch import fx

from mhc_inductor.routing.graph.expressions import aten
from mhc_inductor.routing.graph.index import Size
from mhc_inductor.routing.graph.values import Value, example
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.index.matches import Found

_PARTS = {
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.index_select.default,
}
"""Ops that take a part of one dim."""
_MOST = 256


def check_scores(view: View, found: Found) -> None:
    """Raises Mismatch if the scores are used for anything but the choice: they would be computed twice."""
    inside = {v.node for v in found.formula.met if v.node is not None}
    ends = {a for v in found.outs if v.node is not None for a in (v.node, *v.node.all_input_nodes)}
    for value in found.formula.met:
        for user in value.node.users if value.node is not None else ():
            if user not in inside and user not in ends and user in view.live and _tensor(user):
                raise Mismatch("the scores are used elsewhere, too", view.value(user) or value)


def _tensor(node: fx.Node) -> bool:
    return node.op == "output" or not isinstance(example(node), (int, torch.SymInt, torch.Size, bool))


def check_order(view: View, found: Found, ordered: bool) -> None:
    """Raises Mismatch if some of the chosen keys are taken by their rank: the op returns them by position.

    Args:
        view: the graph.
        found: the choice.
        ordered: whether ``topk`` returns the chosen keys by falling score.
    """
    count = found.outs[0].shape[-1]
    todo = [v.node for v in found.outs if v.node is not None] if ordered else []
    seen = set(todo)
    while todo and len(seen) < _MOST:
        for user in todo.pop().users:
            value = view.values.of(user) if user.op.startswith("call_") else None
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, Value) and _takes_part(one, count):
                    raise Mismatch("keys are taken by their rank among the chosen ones; expected all of them", one)
                if user not in seen and isinstance(one, Value) and one.shape and one.shape[-1] == count:
                    seen.add(user)
                    todo.append(user)


def _takes_part(value: Value, count: Size) -> bool:
    """Checks whether a value, or one that it is a view of, is a part of the chosen keys."""
    for _ in range(8):
        if value.func is None or not value.args or not isinstance(value.args[0], Value):
            return False
        of = value.args[0]
        if value.func in _PARTS and of.shape and of.shape[-1] == count:
            dim = value.args[2] if "split" in str(value.func) and len(value.args) > 2 else value.args[1:2]
            at = dim[0] if isinstance(dim, tuple) and dim else dim if isinstance(dim, int) else 0
            if isinstance(at, int) and at % len(of.shape) == len(of.shape) - 1:
                return value.func not in (aten.slice.Tensor,) or value.shape[-1] != count
        if value.node is not None and of.node is not None:
            return False
        value = of
    return False
