"""``S += outer`` on a tensor that the loop has just made is ``S = S + outer``: written so, it can be recognised."""

from __future__ import annotations

import collections
import itertools
import operator
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.graph.run import run_fake
from mhc_inductor.routing.graph.values import Values, example, tensors_in
from mhc_inductor.routing.rewriter import written_by

_OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_METHODS = ("add_", "sub_", "mul_", "div_", "neg_", "sigmoid_", "baddbmm_", "addcmul_")


def _floating(node: fx.Node) -> bool:
    fake = example(node)
    return isinstance(fake, torch.Tensor) and fake.is_floating_point() and fake.dim() > 1


Change = tuple[fx.Node, Any, Any]
"""A node, and its target and fake value from before."""


def _plain(node: fx.Node) -> Any:
    """The target that computes what ``node`` computes in place, or None."""
    if node.op == "call_function":
        return _OPERATORS.get(node.target)
    if node.op == "call_method" and node.target in _METHODS:
        return str(node.target)[:-1]
    return None


def out_of_place(graph: fx.Graph, values: Values) -> list[Change]:
    """Let in-place operations make new tensors, where nobody can tell. What was changed.

    That is so where no other node shares the tensor's memory, and none reads it afterwards but through the result.
    """
    candidates = [node for node in graph.nodes if _plain(node) is not None and not node.kwargs and _floating(node)]
    if not candidates:
        return []
    order = {node: i for i, node in enumerate(graph.nodes)}
    held: dict[int, list[fx.Node]] = collections.defaultdict(list)
    for node in graph.nodes:
        for t in tensors_in(example(node)):
            held[compat.storage_key(t)].append(node)
    undo: list[Change] = []
    done: set[fx.Node] = set()
    for node in candidates:
        before, fake = node.args[0], example(node)
        # A tensor and its in-place results, each read only before the next is made; views of the last one only.
        shared = held[compat.storage_key(fake)]
        writes = [k for k, other in enumerate(shared) if written_by(other)]
        chain = shared[: writes[-1] + 1]
        made = chain[0].op in ("call_function", "call_method") and values.inspectable(chain[0])
        if not made or any(a is not b.args[0] or not (b in done or _plain(b)) for a, b in itertools.pairwise(chain)):
            continue
        if not isinstance(before, fx.Node) or any(order[user] > order[node] for user in before.users):
            continue
        change = node, node.target, fake
        node.target = _plain(node)
        result = run_fake(node)
        if result.dtype == fake.dtype and result.shape == fake.shape:
            node.meta["example_value"] = result
            done.add(node)
            undo.append(change)
        else:
            node.target = change[1]
    return undo


def exchange(changes: list[Change]) -> None:
    """Take back what :func:`out_of_place` did, or, called again, do it again."""
    for i, (node, target, fake) in enumerate(changes):
        changes[i] = node, node.target, example(node)
        node.target = target
        node.meta["example_value"] = fake
