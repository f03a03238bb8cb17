# SPDX-License-Identifier: Apache-2.0
"""DTensors in a graph: analysed as the whole tensors that they stand for, and checked where an op replaces a formula.

A formula on DTensors means what it means on whole tensors. So the pass sees, in place of each DTensor, a fake tensor of
the whole shape. An op that replaces a formula is then run on the fake DTensors themselves: it must accept them, and each
result must have the placements of the value that it replaces, because code after it may read the local tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.graph.values import SHARDED, Value, example, given, run_fake, tensors_in
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Mismatch


@contextlib.contextmanager
def as_whole(gm: fx.GraphModule) -> Iterator[dict[int, int]]:
    """Replaces the fake DTensors of a graph and of its bodies by whole fake tensors until the context is left.

    Nothing is replaced in a graph with a DTensor that has no plain fake tensor inside: its formulas stay as they are.

    Yields:
        For the storage of each whole tensor, the storage of the local tensor: what a write to one changes in the other.
    """
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    nodes = [n for graph in graphs for n in graph.nodes if any(map(compat.is_dtensor, tensors_in(example(n))))]
    if not nodes or not all(compat.fake_mode_of([t]) for n in nodes for t in tensors_in(example(n))):
        yield {}
        return
    memory: dict[int, int] = {}
    try:
        for node in nodes:
            whole = compat.tree_map_only(torch.Tensor, lambda t: _whole(t, memory), example(node))
            node.meta[SHARDED], node.meta["example_value"] = example(node), whole
        yield memory
    finally:
        for graph in graphs:
            for node in graph.nodes:
                if SHARDED in node.meta:
                    node.meta["example_value"] = node.meta.pop(SHARDED)


def _whole(t: torch.Tensor, memory: dict[int, int]) -> torch.Tensor:
    """Returns a fake tensor with the metadata of a DTensor, and records its storage in ``memory``."""
    if not compat.is_dtensor(t):
        return t
    mode = compat.fake_mode_of([t])
    with torch.no_grad(), mode, compat.no_new_guards(mode):
        made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        if isinstance(t, torch.nn.Parameter):
            made = torch.nn.Parameter(made, t.requires_grad)
        else:
            made.requires_grad_(t.requires_grad)
    memory[compat.storage_key(made)] = compat.storage_key(compat.local_tensor(t))
    return made


def check(view: View, created: Sequence[fx.Node], pairs: Sequence[tuple[Value, fx.Node]]) -> None:
    """Runs new nodes on the fake DTensors of their inputs.

    Args:
        view: the graph.
        created: the new nodes, each after the nodes that it reads.
        pairs: each value that is replaced, with its new node.

    Raises:
        Mismatch: if a call refuses its DTensors, or a result is placed differently than the value that it replaces.
    """
    for node in created:
        inputs = [t for a in node.all_input_nodes for t in tensors_in(given(a))]
        if any(map(compat.is_dtensor, inputs)):
            node.meta[SHARDED] = _run(node)
    for value, new in pairs:
        before = _placed(given(view.node(value.node))) if value.node is not None else None
        after = _placed(given(new))
        if before != after:
            raise Mismatch(f"the op's result would be {_text(after)} where the formula's is {_text(before)}", value)


def _run(node: fx.Node) -> Any:
    try:
        return run_fake(node, given)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Mismatch(f"the op cannot run on these DTensors: {reason}") from error


def _placed(fake: Any) -> list[Any]:
    """Returns the mesh and the placements of each tensor; None for a tensor that is no DTensor."""
    found: list[Any] = tensors_in(fake)
    return [(t.device_mesh, t.placements) if compat.is_dtensor(t) else None for t in found]


def _text(placed: list[Any] | None) -> str:
    return ", ".join(str(p[1]) if p else "a plain tensor" for p in placed or [None])
