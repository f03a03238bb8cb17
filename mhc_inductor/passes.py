"""Graph passes over the ops. Each carries the package's fingerprint, which is how it enters torch's cache keys."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from mhc_inductor import compat
from mhc_inductor.fingerprint import fingerprint

_BACKWARDS = ("mhc_pre_backward", "mhc_head_backward")


def fold_dx_acc(graph: torch.fx.Graph) -> int:
    """Fold ``add(pre_backward.dx, g)`` into pre_backward's ``dx_acc``: one read of g instead of a pass over both.

    Returns how many were folded. The sum is then taken in fp32 and rounded once.
    """
    folded = 0
    order = {node: i for i, node in enumerate(graph.nodes)}
    targets = {getattr(torch.ops.mhc_inductor, name).default for name in _BACKWARDS}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in targets:
            continue
        names = [a.name for a in node.target._schema.arguments]
        position = names.index("dx_acc")
        if node.args[position] is not None:
            continue
        dx = next((u for u in node.users if u.target is operator.getitem and u.args[1] == 0), None)
        if dx is None or len(dx.users) != 1:
            continue
        total = next(iter(dx.users))
        if total.target is not torch.ops.aten.add.Tensor or total.kwargs or len(total.args) != 2:
            continue
        other = total.args[0] if total.args[1] is dx else total.args[1]
        # The other gradient must exist before this op runs, and be of its kind.
        if not isinstance(other, torch.fx.Node) or other is dx or order[other] > order[node]:
            continue
        a, b = other.meta.get("val"), dx.meta.get("val")
        if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape or a.device.type != "cuda":
            continue
        args = list(node.args)
        args[position] = other
        node.args = tuple(args)
        total.replace_all_uses_with(dx)
        graph.erase_node(total)
        folded += 1
    return folded


def keep_clones(graph: torch.fx.Graph) -> None:
    """Makes a clone of an op's result, or of a view of it, that a joint graph returns a product with 1.

    Inductor removes a clone of what is neither given nor returned itself: two clones of one tensor then are one tensor, and
    a step on the result changes what the backward kept. A product with 1 is the same numbers, and stays.
    """
    returned = _returned(graph)
    results = {_memory(n) for n in graph.nodes if _is_op(n.args[0] if n.target is operator.getitem else n)} - {0}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        source = node.args[0]
        if _memory(source) in results and _memory(node) in returned and _layout(node) == _layout(source):
            node.target, node.args, node.kwargs = torch.ops.aten.mul.Tensor, (source, 1), {}


def split_calls(graph: torch.fx.Graph) -> None:
    """Copies what is returned twice of one call of an op, where AOTAutograd made one call of two equal ones."""
    returned = _returned(graph)
    first: dict[Any, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is not operator.getitem or not _is_op(node.args[0]):
            continue
        # A call is unpacked once: another getitem of its result was another call's.
        if _memory(node) in returned and (same := first.setdefault(node.args, node)) is not node:
            with graph.inserting_before(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (same,))
            node.replace_all_uses_with(copy)
            graph.erase_node(node)
            _renew(graph, copy, _memory(node))


def _is_op(node: Any) -> bool:
    """Whether a node calls one of our ops."""
    return isinstance(node, torch.fx.Node) and getattr(node.target, "namespace", "") == "mhc_inductor"


def _returned(graph: torch.fx.Graph) -> set[int]:
    """Returns the memory of what a graph returns."""
    return {_memory(n) for end in graph.find_nodes(op="output") for n in end.all_input_nodes}


def _renew(graph: torch.fx.Graph, copy: torch.fx.Node, old: int) -> None:
    """Gives ``copy`` and its views fake values in memory of their own: a clone in the memory of its input is removed."""
    renewed = {copy}
    for node in graph.nodes:
        if node is copy or (_memory(node) == old and renewed.intersection(node.all_input_nodes)):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)
            renewed.add(node)


def _memory(node: torch.fx.Node) -> int:
    """Returns an identity of the memory that a node's tensor lies in; 0 for anything else."""
    value = node.meta.get("val")
    return compat.storage_key(value) if isinstance(value, torch.Tensor) else 0


def _layout(node: torch.fx.Node) -> Any:
    """Returns what a clone that changes nothing keeps."""
    t = node.meta["val"]
    return t.dtype, tuple(map(str, t.shape)), tuple(map(str, t.stride()))


def post_grad(graph: torch.fx.Graph) -> None:
    """What is done to each forward and each backward graph."""
    split_calls(graph)
    compat.counters()["dx_acc folded"] += fold_dx_acc(graph)


PASSES: dict[str, Callable[[torch.fx.Graph], None]] = {
    "joint_custom_pre_pass": keep_clones,
    "post_grad_custom_pre_pass": post_grad,
}
"""Our passes, by Inductor's option for passes of a user's own."""


def make_pass(theirs: Any, ours: Callable[[torch.fx.Graph], None]) -> Any:
    """Returns our pass behind the user's own: None, a pass, or a list or tuple of passes."""
    passes = tuple(theirs) if isinstance(theirs, (list, tuple)) else () if theirs is None else (theirs,)

    class Chained(compat.graph_pass_base()):  # type: ignore[misc]
        mhc_inductor = True

        def __call__(self, graph: torch.fx.Graph, is_inference: bool = False) -> None:
            for user_pass in passes:
                compat.run_pass(user_pass, graph, is_inference)
            ours(graph)

        def uuid(self) -> Any:
            # A pass without a uuid forbids caching; so does the chain.
            ids = [user_pass.uuid() if hasattr(user_pass, "uuid") else None for user_pass in passes]
            return None if None in ids else "-".join(("mhc_inductor", fingerprint(), *map(repr, ids)))

    return Chained()
