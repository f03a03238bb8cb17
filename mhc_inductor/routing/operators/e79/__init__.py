# SPDX-License-Identifier: Apache-2.0
"""Routing of E79 (coupled memory-modulation matrix recurrence): time loops and higher-order scans become one op."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from mhc_inductor.report.findings import Routed
from mhc_inductor.routing.edit import Edit
from mhc_inductor.routing.graph.index import Unsupported
from mhc_inductor.routing.graph.values import Value, example, tensors_in
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match, Mismatch, Miss, contained
from mhc_inductor.routing.operators.e79.emit import Scan, emit, match_of
from mhc_inductor.routing.operators.e79.loop import OP, Chain, Search
from mhc_inductor.routing.operators.e79.outputs import without_end
from mhc_inductor.routing.operators.e79.scan import Body, body_of, emit_scan, match_scan
from mhc_inductor.routing.operators.kernels import kernels_of
from mhc_inductor.routing.sources import modules_of, source_of

Found = Match | Miss | Routed
_HOOKED = "S' of a step has a hook, and the step's M' or output reads S' too: the hook would miss their gradients"
_VIEWS = "the inputs of the {} cannot be followed through their views"


class E79Scan:
    """Routes the E79 recurrences of one graph.

    The whole graph is searched at once, because only the graph shows where one step ends and the next begins.
    """

    name = OP
    kernels = staticmethod(kernels_of)

    def __init__(self) -> None:
        self.view: View
        self.found: dict[fx.Node, list[Found]] = {}

    def candidates(self, view: View) -> Iterable[fx.Node]:
        """Returns the nodes of scans, of chains of steps, of near misses and of ops that the model calls itself."""
        self.view, self.found = view, {}
        for node in view.nodes:
            if node.target is torch.ops.mhc_inductor.e79_scan.default:
                device = next(t.device.type for t in tensors_in(example(node)))
                kernels = self.kernels(OP, device)
                self._add(node, Routed(OP, source_of(node), "called by the model", kernels, modules=modules_of(node)))
            elif (body := body_of(view, node)) is not None:
                self._scan(node, body)
        search = Search(view)
        search.run()
        for miss in search.misses:
            self._add(None, miss)
        for one in search.chains:
            with contained(self.view, one.recogniser.known[one.steps[0].M_new]):
                for found in self._chain(one):
                    self._add(None, found)
        return self.found

    def match(self, view: View, node: fx.Node) -> Iterable[Found]:
        """Returns the matches, near misses and ops called by the model at ``node``."""
        return self.found[node]

    def emit(self, edit: Edit, match: Match) -> Iterable[tuple[Value, fx.Node]]:
        """Emits the op of one match and returns each replaced value with its new node."""
        return emit_scan(edit, match) if isinstance(match.data, Body) else emit(edit, match)

    def smaller(self, match: Match) -> list[Match]:
        """Returns one match per step, for loops where a later step's input depends on an earlier step's result."""
        scan = match.data
        if not isinstance(scan, Scan) or len(scan.chain.steps) < 2:
            return []
        singles = [Chain([step], scan.chain.recogniser) for step in scan.chain.steps]
        return [found for one in singles for found in self._chain(one) if isinstance(found, Match)]

    def _add(self, node: fx.Node | None, found: Found) -> None:
        start = node if node is not None else getattr(getattr(found, "start", None), "node", None)
        self.found.setdefault(start or self.view.nodes[0], []).append(found)

    def _scan(self, node: fx.Node, body: fx.GraphModule) -> None:
        try:
            with contained(self.view, node):
                match = match_scan(self.view, node, body)
                if match is not None:
                    self._add(node, match)
        except (Mismatch, Unsupported) as error:
            self._add(node, _miss(error, self.view.value(node), _VIEWS.format("body")))

    def _chain(self, one: Chain) -> list[Found]:
        found: list[Found] = []
        one, hooked = without_end(self.view, one)
        known = one.recogniser.known
        if hooked is not None:
            found.append(Miss(OP, _HOOKED, hooked.S_new, self.view.value(known[hooked.S_new])))
        if not one.steps:
            return found
        try:
            found.append(match_of(self.view, one))
        except (Mismatch, Unsupported) as error:
            found.append(_miss(error, self.view.value(known[one.steps[0].M_new]), _VIEWS.format("steps")))
        return found


def _miss(error: Exception, start: Value | None, unfollowed: str) -> Miss:
    if isinstance(error, Mismatch):
        return Miss(OP, error.reason, error.value, start)
    return Miss(OP, unfollowed, None, start)
