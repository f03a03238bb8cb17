# SPDX-License-Identifier: Apache-2.0
"""Puts regions under another grad mode or under autocast into the graph around them, as in Dynamo's graphs.

Export makes such a region the body of a higher-order operator. Dynamo's graphs, which the routing pass reads, have calls
that switch the mode before and after it, so that a formula may read across the boundary.
"""

from __future__ import annotations

from torch import fx

from mhc_inductor import compat


def inline(gm: fx.GraphModule) -> bool:
    """Inlines all such regions of a graph and of the bodies of its other operators. Returns whether there were any."""
    found = False
    while (node := next(filter(compat.exported.is_mode_region, gm.graph.nodes), None)) is not None:
        _inline(gm, node)
        found = True
    if found:
        gm.recompile()
    for body in bodies(gm):
        found |= inline(body)
    return found


def bodies(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """Returns the graphs that the higher-order operators of a graph run."""
    held = (getattr(gm, str(node.target), None) for node in gm.graph.find_nodes(op="get_attr"))
    return list(dict.fromkeys(body for body in held if isinstance(body, fx.GraphModule)))


def _inline(gm: fx.GraphModule, node: fx.Node) -> None:
    """Replaces one call of a region by its body, between calls that enter and leave the mode."""
    (enter, entered), (leave, left), holder, inputs = compat.exported.mode_region(node)
    body = getattr(gm, str(holder.target))
    graph = gm.graph
    with graph.inserting_before(node):
        start = graph.call_function(enter, entered)
        env = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
        for inner in body.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            env[inner] = graph.node_copy(inner, env.__getitem__)
            if inner.op == "get_attr":
                name, held = str(inner.target), getattr(body, str(inner.target))
                while getattr(gm, name, held) is not held:
                    name += "_"
                setattr(gm, name, held)
                env[inner].target = name
        end = graph.call_function(leave, (start,) if left is None else left)
    for mark in (start, end):
        mark.meta.update({k: node.meta[k] for k in ("nn_module_stack", "stack_trace") if k in node.meta})
    results = fx.node.map_arg(body.graph.output_node().args[0], env.__getitem__)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    if not holder.users:
        graph.erase_node(holder)
