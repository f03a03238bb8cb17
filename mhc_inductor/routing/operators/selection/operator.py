# SPDX-License-Identifier: Apache-2.0
"""Selection attention as an operator of the routing pass."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from mhc_inductor.routing.edit import Edit
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match, Miss
from mhc_inductor.routing.operators.kernels import kernels_of
from mhc_inductor.routing.operators.selection.emit import emit_attention, inputs_of
from mhc_inductor.routing.operators.selection.matches import OP, Found
from mhc_inductor.routing.operators.selection.sample import Sample
from mhc_inductor.routing.operators.selection.search import Search, data_of

_NEAR = 64


class SelectionOperator:
    """Finds attentions whose masks are unions of key ranges and replaces them with ``selection_attention``."""

    name = "selection"

    def __init__(self) -> None:
        self._found: dict[fx.Node, list[Match | Miss]] = {}

    def candidates(self, view: View) -> Iterable[fx.Node]:
        """Returns the result nodes of the attentions found, and the nodes of near misses."""
        search = Search(view)
        self._found = {}
        for one in search.found:
            match = Match(OP, inputs_of(one), one.results, one.words(), data=one, sample=Sample(one))
            self._keep(one.out, match)
        for miss in search.misses:
            self._keep(miss.start, miss)
        return list(self._found)

    def _keep(self, value: Value | None, what: Match | Miss) -> None:
        if value is not None and value.node is not None:
            self._found.setdefault(value.node, []).append(what)

    def match(self, view: View, node: fx.Node) -> list[Match | Miss]:
        """Returns the matches and near misses found at a candidate."""
        return self._found[node]

    def emit(self, edit: Edit, match: Match) -> Iterable[tuple[Value, fx.Node]]:
        """Emits the op in place of an attention. Returns each replaced output with its new node."""
        outputs = emit_attention(edit, match.data)
        match.detail = match.data.words()  # now with both figures of the rule that chose the op
        match.derived = _derived(match.data)
        return outputs

    def faster_as_written(self, match: Match, device: str) -> bool:
        """Returns True on a CPU, unless the user asked for zeros in rows without keys.

        There the op runs the same dense attention and has to build its mask anew.
        """
        return device == "cpu" and not match.data.opted

    def kernels(self, op: str, device: str) -> tuple[str, ...]:
        """Returns the names of the kernels on a GPU; elsewhere a description of the reference formula."""
        return kernels_of(op, device)


def _derived(one: Found) -> list[Value]:
    """Returns the masks, and the indices of repeated keys, that the model computes from others of the op's inputs."""
    if one.read is None or one.whole:
        return []
    masks = [] if one.opted else [x.ref.value for x in one.layers]
    indices = dict.fromkeys(ref.value for ref in data_of(one)) if one.gathered else {}
    nodes = {value.node for value in indices}
    made = [value for value in indices if not nodes.isdisjoint(_above(value.node))]
    return [*masks, *made]


def _above(node: fx.Node | None) -> set[fx.Node]:
    """Returns the nearest nodes that a node is computed from, without itself."""
    found, todo = set[fx.Node](), [] if node is None else [node]
    while todo and len(found) < _NEAR:
        todo += (new := [a for a in todo.pop(0).all_input_nodes if a not in found])
        found.update(new)
    return found
