"""What the graph around a loop does with its values: where gradients pass, which tensors leave or are written, hooks."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.graph.values import example, tensors_in
from mhc_inductor.routing.operators.mhc.search import name_of
from mhc_inductor.routing.rewriter import grad_states, mutations, needs_grad, written_by

_CUTS = ("detach", "detach_")


def hooked(node: fx.Node) -> bool:
    """Whether a hook is on ``node``, or its gradient is kept."""
    return any(_is_hook(user) for user in node.users)


def _is_hook(node: fx.Node) -> bool:
    return "hook" in str(node.target) or "retain_grad" in str(node.target)


class Uses:
    """The uses of every node of a graph, as they are before anything is routed.

    Where a gradient may pass or not, it counts as passing: then nothing is detached that eager would not detach.
    """

    def __init__(self, graph: fx.Graph, live: Set[fx.Node], body: bool) -> None:
        self.carrying: set[fx.Node] = set()
        """The nodes whose tensors require grad."""
        self.flowing: set[fx.Node] = set()
        """Those of them that gradients of the graph's outputs come back to."""
        self.leaving = {compat.storage_key(t) for a in graph.output_node().all_input_nodes for t in _all(a)}
        """Storages of the graph's outputs."""
        self.written = {storage for _, storage in mutations(graph)}
        """Storages of tensors that something writes in place."""
        on = grad_states(graph)
        given = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
        # Some bodies of higher-order operators do not show what their inputs require.
        known = not body or any(needs_grad(node) for node in given)
        for node in graph.nodes:
            if (
                needs_grad(node)
                or (node in given and not known and _differentiable(node))
                or (self._passes(node, on) and any(a in self.carrying for a in node.all_input_nodes))
            ):
                self.carrying.add(node)
        for node in reversed(graph.nodes):
            if node.op == "output" or (node in live and node in self.carrying and self._asked(node)):
                self.flowing.add(node)

    def _passes(self, node: fx.Node, on: Mapping[fx.Node, bool]) -> bool:
        return node.op.startswith("call_") and on[node] and name_of(node) not in _CUTS and _differentiable(node)

    def _asked(self, node: fx.Node) -> bool:
        effect = bool(written_by(node)) or (not node.users and not _is_hook(node))
        return effect or any(user in self.flowing for user in node.users)

    def leaves(self, node: fx.Node) -> bool:
        """Whether an output of the graph lies in the memory of ``node``."""
        return any(compat.storage_key(t) in self.leaving for t in _all(node))

    def changes(self, node: fx.Node) -> bool:
        """Whether something writes into the memory of ``node``."""
        return any(compat.storage_key(t) in self.written for t in _all(node))

    def exposed(self, node: fx.Node) -> bool:
        """Whether it can be seen which tensors share the memory of ``node``."""
        return self.leaves(node) or self.changes(node)


def _all(node: fx.Node) -> list[torch.Tensor]:
    return tensors_in(example(node))


def _differentiable(node: fx.Node) -> bool:
    """Whether a gradient can be of ``node``: floating point, or nothing known."""
    return example(node) is None or any(t.is_floating_point() or t.is_complex() for t in _all(node))
