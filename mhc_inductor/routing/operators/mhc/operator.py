# SPDX-License-Identifier: Apache-2.0
"""The mHC operator of the routing pass."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from mhc_inductor.routing.edit import Edit
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match, Miss
from mhc_inductor.routing.operators.kernels import kernels_of
from mhc_inductor.routing.operators.mhc.emit import Emission
from mhc_inductor.routing.operators.mhc.matches import CollapseUse, PostUse, Pre
from mhc_inductor.routing.operators.mhc.search import Search

POLICY = (
    "a checkpoint policy decides what this region saves, and no longer sees the formula's products; "
    "add mhc_inductor.ops_to_save() to what it saves"
)


class Mhc:
    """Routes the pres, heads, coefficients, collapses, posts and Sinkhorn iterations of one graph."""

    name = "mhc"
    kernels = staticmethod(kernels_of)

    def __init__(self) -> None:
        self._found: dict[fx.Node, list[Match | Miss]] = {}
        self._emission: Emission | None = None

    def candidates(self, view: View) -> Iterable[fx.Node]:
        """Searches the graph and returns the nodes at which a match or a near miss starts."""
        search = Search(view)
        search.run()
        self._found = {}
        self._emission = None
        each: list[Match | Miss] = [*(found.match() for found in search.found), *search.misses]
        if search.found and view.has_policy:
            each.append(Miss("mhc_pre", POLICY, None, each[0].start))
        for one in each:
            start = one.start
            assert start is not None and start.node is not None
            self._found.setdefault(start.node, []).append(one)
        return list(self._found)

    def match(self, view: View, node: fx.Node) -> Iterable[Match | Miss]:
        """Returns the matches and near misses that start at ``node``."""
        return self._found[node]

    def emit(self, edit: Edit, match: Match) -> Iterable[tuple[Value, fx.Node]]:
        """Emits the op of one match and returns each replaced value with its new node. Raises Mismatch."""
        if self._emission is None:
            self._emission = Emission(edit)
        found = match.data
        if isinstance(found, Pre):
            return self._emission.pre(found)
        if isinstance(found, CollapseUse):
            return self._emission.collapse(found)
        return self._emission.post(found) if isinstance(found, PostUse) else self._emission.sinkhorn(found)

    def faster_as_written(self, match: Match, device: str) -> bool:
        """Checks whether to keep the formula: on a CPU the op has no kernel and is fused as the formula is."""
        return device == "cpu"
