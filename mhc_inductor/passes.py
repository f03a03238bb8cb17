# SPDX-License-Identifier: Apache-2.0
"""Inductor graph passes over this package's ops.

Each pass carries the package's fingerprint, and so makes it part of torch's cache keys.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from mhc_inductor import compat
from mhc_inductor.fingerprint import fingerprint
from mhc_inductor.scope import calls_ops
from mhc_inductor.tuning import table as table  # a part of the fingerprint

_BACKWARDS = ("mhc_pre_backward", "mhc_head_backward")
"""Ops with an argument ``dx_acc``, a gradient that the kernel adds to its own."""


def fold_dx_acc(graph: torch.fx.Graph) -> int:
    """Folds ``add(dx, g)``, with ``dx`` of a pre or head backward, into that op's argument ``dx_acc``.

    The kernel then reads g once, which saves a pass over both tensors. The sum is taken in fp32 and rounded once.

    Returns:
        How many additions were folded.
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
        # The other gradient must be computed before this op runs, and have the same dtype and shape.
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
    """Replaces clones of op results, or of their views, by products with 1 where the joint graph returns them.

    Inductor removes a clone whose input the graph neither takes nor returns. Two clones of one tensor would then become
    one tensor, and an in-place write to the result would change what the backward saved. A product with 1 has the same
    values and is not removed.
    """
    returned = _returned(graph)
    results = {_memory(n) for n in graph.nodes if _is_op(n.args[0] if n.target is operator.getitem else n)} - {0}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        source = node.args[0]
        if _memory(source) in results and _memory(node) in returned and _layout(node) == _layout(source):
            node.target, node.args, node.kwargs = torch.ops.aten.mul.Tensor, (source, 1), {}


def split_calls(graph: torch.fx.Graph) -> None:
    """Clones results that are returned twice because AOTAutograd merged two equal calls of an op into one."""
    returned = _returned(graph)
    first: dict[Any, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is not operator.getitem or not _is_op(node.args[0]):
            continue
        # Each call is unpacked by one getitem per result: a second one with equal arguments came from a merged call.
        if _memory(node) in returned and (same := first.setdefault(node.args, node)) is not node:
            with graph.inserting_before(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (same,))
            node.replace_all_uses_with(copy)
            graph.erase_node(node)
            _renew(graph, copy, _memory(node))


def _is_op(node: Any) -> bool:
    """Returns whether a node calls one of this package's ops."""
    return isinstance(node, torch.fx.Node) and getattr(node.target, "namespace", "") == "mhc_inductor"


def _returned(graph: torch.fx.Graph) -> set[int]:
    """Returns the storage keys of what a graph returns."""
    return {_memory(n) for end in graph.find_nodes(op="output") for n in end.all_input_nodes}


def _renew(graph: torch.fx.Graph, copy: torch.fx.Node, old: int) -> None:
    """Gives ``copy`` and its views new fake values in storage of their own.

    Inductor removes a clone whose fake value lies in the storage of its input.
    """
    renewed = {copy}
    for node in graph.nodes:
        if node is copy or (_memory(node) == old and renewed.intersection(node.all_input_nodes)):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)
            renewed.add(node)


def _memory(node: torch.fx.Node) -> int:
    """Returns a key of the storage that a node's tensor lies in, 0 for anything but a tensor."""
    value = node.meta.get("val")
    return compat.storage_key(value) if isinstance(value, torch.Tensor) else 0


def _layout(node: torch.fx.Node) -> Any:
    """Returns dtype, shape and strides: a clone that keeps all three only copies."""
    t = node.meta["val"]
    return t.dtype, tuple(map(str, t.shape)), tuple(map(str, t.stride()))


def post_grad(graph: torch.fx.Graph) -> None:
    """Runs this package's passes on a forward or backward graph."""
    from mhc_inductor.lowerings import e79_cpu

    split_calls(graph)
    if not calls_ops():
        e79_cpu.expand(graph)
    compat.counters()["dx_acc folded"] += fold_dx_acc(graph)


PASSES: dict[str, Callable[[torch.fx.Graph], None]] = dict(
    zip(compat.PASS_OPTIONS, (keep_clones, post_grad), strict=True)
)
"""This package's passes, by the Inductor option that takes a user's pass."""


def make_pass(theirs: Any, ours: Callable[[torch.fx.Graph], None], invariant: bool = False) -> Any:
    """Returns a cacheable pass that runs the user's passes and then ours. Its uuid says if the generated code calls ops.

    Args:
        theirs: the user's passes: None, a pass, or a list or tuple of passes.
        ours: this package's pass.
        invariant: the option ``batch_invariant``, which lowerings read. A pass carries it to backward graphs, which are
            compiled later and on other threads, and into torch's cache keys.
    """
    mark = ("mhc_inductor", "calls") if calls_ops() else ("mhc_inductor",)
    passes = tuple(theirs) if isinstance(theirs, (list, tuple)) else () if theirs is None else (theirs,)

    class Chained(compat.backend.graph_pass_base()):  # type: ignore[misc]
        mhc_inductor = True
        batch_invariant = invariant

        def __call__(self, graph: torch.fx.Graph, is_inference: bool = False) -> None:
            for user_pass in passes:
                compat.backend.run_pass(user_pass, graph, is_inference)
            ours(graph)

        def uuid(self) -> Any:
            # A pass without a uuid forbids caching, so a chain with such a pass must forbid it too.
            ids = [user_pass.uuid() if hasattr(user_pass, "uuid") else None for user_pass in passes]
            return None if None in ids else "-".join((*mark, fingerprint(), str(invariant), *map(repr, ids)))

    return Chained()
