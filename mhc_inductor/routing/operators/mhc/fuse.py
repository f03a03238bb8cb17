"""Neighbouring mHC ops as one: the post of a sublayer and the pre (or head) of the next read x_out once."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.graph.run import run_fake
from mhc_inductor.routing.graph.values import example
from mhc_inductor.routing.rewriter import grad_states, mutations

_FUSED = {"mhc_pre": "mhc_post_pre", "mhc_head": "mhc_post_head"}
"""What follows a post, and the fused op."""
FEW_TOKENS = 256
"""Tokens below which the two ops apart are faster in inference (docs/tuning.md): decoding, where latency counts."""


def _op(name: str) -> Any:
    return getattr(torch.ops.mhc_inductor, name).default


def fuse(graph: fx.Graph) -> list[tuple[str, str, fx.Node]]:
    """Fuse every post with the pre or head that reads its result; (fused op, second op, the new node) for each."""
    done = []
    followers = {_op(name): (fused, name) for name, fused in _FUSED.items()}
    order = {node: i for i, node in enumerate(graph.nodes)}
    events = mutations(graph)
    grad = grad_states(graph)
    for second in list(graph.nodes):
        if second.op != "call_function" or second.target not in followers:
            continue
        first = second.args[0]
        if not isinstance(first, fx.Node) or first.target is not _op("mhc_post") or first not in order:
            continue
        if grad[first] != grad[second] or not _movable(first, second, order, events):
            continue
        if not grad[first] and _few(first):
            continue
        fused, name = followers[second.target]
        done.append((fused, name, _merge(graph, first, second, _op(fused))))
    return done


def _few(post: fx.Node) -> bool:
    """Whether a post has few tokens on a GPU, a number that is known."""
    x = example(post)
    lead = x.shape[:-2]
    return x.device.type == "cuda" and all(isinstance(n, int) for n in lead) and math.prod(lead) < FEW_TOKENS


def _movable(first: fx.Node, second: fx.Node, order: dict[fx.Node, int], events: list[tuple[int, int]]) -> bool:
    """Whether ``first`` may run as late as ``second``: nothing needs it before, nothing changes its inputs between."""
    begin, end = order[first], order[second]
    if any(order.get(user, end + 1) < end for user in first.users if user is not second):
        return False
    inputs = {
        compat.storage_key(e)
        for node in (*first.all_input_nodes, first)
        if isinstance(e := example(node), torch.Tensor)
    }
    return not any(begin < position <= end and storage in inputs for position, storage in events)


def _merge(graph: fx.Graph, first: fx.Node, second: fx.Node, target: Any) -> fx.Node:
    with graph.inserting_before(second):
        args = (*first.args, *second.args[1:])
        call = graph.call_function(target, args)
        call.meta["example_value"] = run_fake(call)
        x_out = graph.call_function(operator.getitem, (call, 0))
        x_out.meta["example_value"] = call.meta["example_value"][0]
    for key in ("stack_trace", "nn_module_stack"):
        if key in second.meta:
            call.meta[key] = second.meta[key]
    first.replace_all_uses_with(x_out, delete_user_cb=lambda user: user is not call)
    # The outputs of the second op follow x_out.
    for user in list(second.users):
        user.args = (call, user.args[1] + 1)  # type: ignore[operator]
    graph.erase_node(second)
    graph.erase_node(first)
    return call
