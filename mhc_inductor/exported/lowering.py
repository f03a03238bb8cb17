# SPDX-License-Identifier: Apache-2.0
"""Writes the nodes that routing added to an exported graph as the ATen calls that exported graphs consist of."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.exported.examples import KEY
from mhc_inductor.exported.inlining import bodies
from mhc_inductor.routing.graph.values import example, run, tensors_in
from mhc_inductor.routing.graph.view import GRAD
from mhc_inductor.routing.placement import KEPT, PASSED_ON

aten = torch.ops.aten
_MARKS = ("nn_module_stack", "stack_trace", "torch_fn")
"""What export records about where a node comes from."""


def lower(gm: fx.GraphModule, training: bool) -> None:
    """Lowers a graph and the bodies of its operators, and gives every new node its fake value in ``meta["val"]``.

    Args:
        gm: a routed graph.
        training: write composite operations whole, as export does. Else only core ATen operations are written.
    """
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if "val" not in node.meta and KEY in node.meta:
            node.meta["val"] = _plain(node.meta[KEY])
        if not _allowed(node):
            _replace(gm.graph, node, training)
    for node in gm.graph.nodes:
        for key in (KEY, GRAD, KEPT, PASSED_ON):
            node.meta.pop(key, None)
    gm.graph.lint()
    gm.recompile()
    for body in bodies(gm):
        lower(body, training)


def _plain(value: Any) -> Any:
    """Returns a fake value without its gradient."""
    return compat.tree_map_only(torch.Tensor, lambda t: t.detach(), value)


def _allowed(node: fx.Node) -> bool:
    """Returns whether an exported graph may hold a call as it is: an ATen operation, or one on sizes or on a tuple."""
    if node.op == "call_method":
        return False
    if isinstance(node.target, (compat.OpOverload, compat.HigherOrderOperator)):
        return True
    tensors = [t for a in node.all_input_nodes for t in tensors_in(a.meta.get("val"))]
    of_tuple = (
        bool(node.args)
        and isinstance(node.args[0], fx.Node)
        and isinstance(node.args[0].meta.get("val"), (tuple, list))
    )
    return compat.mode_change(node) is not None or of_tuple or (not tensors and not tensors_in(node.meta.get("val")))


def _replace(graph: fx.Graph, node: fx.Node, training: bool) -> None:
    """Replaces one call by the ATen calls that it makes."""
    if node.target == "detach":  # tracing below autograd would leave it out
        node.op, node.target = "call_function", aten.detach.default
        return
    if node.target == "size":
        node.op, node.target = "call_function", aten.sym_size.int
        return
    inputs = node.all_input_nodes

    def call(*values: Any) -> Any:
        env = dict(zip(inputs, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        return run(node, args, kwargs)

    values = [_plain(example(a)) for a in inputs]
    mode = compat.fake_mode_of(tensors_in([*values, node.meta["val"]]))
    traced = compat.exported.traced(call, values, mode, training)
    env = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    marks = {k: node.meta[k] for k in _MARKS if k in node.meta}
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "call_function":
                env[inner] = graph.node_copy(inner, env.__getitem__)
                env[inner].meta = {**marks, "val": inner.meta["val"]}
    result: Any = traced.graph.output_node().args[0]
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(env[result])
    else:
        for user in list(node.users):
            user.replace_all_uses_with(env[result[user.args[1]]])
            graph.erase_node(user)
    graph.erase_node(node)
