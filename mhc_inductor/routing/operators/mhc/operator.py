"""mHC as an operator of the pass."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.edit import Edit
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match, Miss
from mhc_inductor.routing.operators.kernels import kernels_of
from mhc_inductor.routing.operators.mhc.emit import Emission
from mhc_inductor.routing.operators.mhc.found import PostUse, Pre
from mhc_inductor.routing.operators.mhc.search import Search

POLICY = (
    "a checkpoint policy decides what this region saves, and no longer sees the formula's products: "
    "let it name mhc_inductor.ops_to_save()"
)


class Mhc:
    """Pres, heads, posts and Sinkhorn iterations of one graph."""

    name = "mhc"
    kernels = staticmethod(kernels_of)

    def __init__(self) -> None:
        self._found: dict[fx.Node, list[Match | Miss]] = {}
        self._emission: Emission | None = None

    def candidates(self, view: View) -> Iterable[fx.Node]:
        """Searches the graph. Returns the nodes where something is."""
        search = Search(view)
        search.run()
        self._found = {}
        self._emission = None
        each: list[Match | Miss] = [*(found.match() for found in search.found), *search.misses]
        if search.found and compat.checkpoint_policy(view.real) is not None:
            each.append(Miss("mhc_pre", POLICY, None, each[0].start))
        for one in each:
            start = one.start
            assert start is not None and start.node is not None
            self._found.setdefault(start.node, []).append(one)
        return list(self._found)

    def match(self, view: View, node: fx.Node) -> Iterable[Match | Miss]:
        """Returns what the search found at ``node``."""
        return self._found[node]

    def emit(self, edit: Edit, match: Match) -> Iterable[tuple[Value, fx.Node]]:
        """Puts one op in. Raises Mismatch."""
        if self._emission is None:
            self._emission = Emission(edit)
        found = match.data
        if isinstance(found, Pre):
            return self._emission.pre(found)
        return self._emission.post(found) if isinstance(found, PostUse) else self._emission.sinkhorn(found)

    def faster_as_written(self, match: Match, device: str) -> bool:
        """Whether the formula is kept: a CPU has no kernel of ours, and the op is fused there as the formula is."""
        return device == "cpu"
