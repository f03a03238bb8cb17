# SPDX-License-Identifier: Apache-2.0
"""Recognises E79's steps and chains of them in a loop over time that Dynamo has unrolled.

Nothing is assumed about where one step ends and the next begins: each step is recognised by itself, from the matrices
that it reads and makes. In a chain, each step reads the matrices that the step before it made.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.graph.expressions import aten
from mhc_inductor.routing.graph.index import DynamicWidth, Unsupported
from mhc_inductor.routing.graph.values import Value, Values, example, name_of
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Miss, contained
from mhc_inductor.routing.operators.e79.step import NearStep, Recogniser, Step
from mhc_inductor.routing.operators.e79.terms import Frame, vector

OP = "e79_scan"
_REACH = 64
_CROSSED = "S and M are swapped between two steps"


@dataclasses.dataclass
class Chain:
    """Consecutive steps: each starts from the states that the one before it made."""

    steps: list[Step]
    recogniser: Recogniser

    @property
    def frame(self) -> Frame:
        """The index variables that the steps share."""
        return self.recogniser.frame


def is_square(node: fx.Node) -> bool:
    """Checks whether a node is a floating-point tensor [..., n, n] with n > 1."""
    t = example(node)
    if not isinstance(t, torch.Tensor) or t.dim() < 2 or not t.is_floating_point():
        return False
    m, n = t.shape[-2:]
    return compat.routing.same_size(m, n) and not (isinstance(n, int) and n <= 1)


def recognisers(graph: fx.Graph, values: Values) -> list[Recogniser]:
    """Returns one recogniser for each shape of matrices in the graph, with these matrices added."""
    found: dict[tuple[Any, ...], Recogniser] = {}
    for node in graph.nodes:
        if node.op == "output" or not is_square(node):
            continue
        value = values.of(node)
        if not isinstance(value, Value) or value.shape[-1].symbols:
            continue
        recogniser = found.get(value.shape)
        if recogniser is None:
            recogniser = found[value.shape] = Recogniser(Frame(value.shape[:-2], value.shape[-1].factor))
        try:
            recogniser.add(value, node)
        except Unsupported:
            continue
    return list(found.values())


class Search:
    """Finds the chains of steps in a graph, and the near misses."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.chains: list[Chain] = []
        self.misses: list[Miss] = []
        self.open: set[str] = set()
        """The symbols that the size of a vector depends on."""

    def run(self) -> None:
        """Finds the chains and near misses. Where sizes are dynamic, searches again with their symbols fixed."""
        self._look()
        if self.chains or (self.misses and not self.open) or not self.view.values.hints:
            return
        symbols, values = self.open or self._open(), self.view.values
        before = dict(values.fixed)
        if symbols and values.fix(symbols):
            self.misses = []
            self._look()
            if not self.chains:
                values.forget(before)

    def _open(self) -> set[str]:
        """Returns the symbols in dynamic sizes of matrices, if the graph has enough sigmoids for a step's gates."""
        found: set[str] = set()
        gates = 0
        for node in self.view.graph.nodes:
            gates += "sigmoid" in name_of(node)
            t = example(node)
            if isinstance(t, torch.Tensor) and is_square(node) and not isinstance(n := t.shape[-1], int):
                found |= {str(symbol) for symbol in compat.routing.expression(n).free_symbols}
        return found if gates >= 4 else set()

    def _look(self) -> None:
        for recogniser in recognisers(self.view.graph, self.view.values):
            self.chains += self._chains(recogniser, self._steps(recogniser))

    def _steps(self, recogniser: Recogniser) -> list[Step]:
        """Finds the steps, the last first: the states of a step are then no M' and S' of two steps."""
        recogniser.look(self.view)
        steps: list[Step] = []
        near: list[NearStep] = []
        taken: set[Value] = set()
        for value in reversed(recogniser.updates):
            node = recogniser.known[value]
            if value in taken:
                continue
            try:
                with contained(self.view, node):
                    step = recogniser.step(value)
                    if step is not None:
                        taken |= {step.S_new, step.M_new}
                        steps.append(step)
                        self._output(recogniser, step)
            except NearStep as miss:
                near += [miss] * (node in self.view.live)
            except DynamicWidth as dynamic:
                self.open.update(re.findall(r"\w+", " ".join(dynamic.size.symbols)))
            except Unsupported:
                continue
        self._report(recogniser, near, taken)
        return steps[::-1]

    def _report(self, recogniser: Recogniser, near: list[NearStep], taken: set[Value]) -> None:
        """Adds a near miss for each quantity that is missing where most of a step is there."""
        named: set[str] = set()
        for miss in sorted(near, key=lambda miss: miss.rank, reverse=True):
            if taken.isdisjoint(miss.pair):
                taken.update(miss.pair)
                new = [recogniser.updates[v] for v in miss.pair]
                ordinary = not any(update.gated for update in new)
                start = self.view.value(recogniser.known[miss.pair[1]])
                if miss.name not in named:
                    self.misses.append(Miss(OP, miss.reason, miss.value, start, ordinary))
                named.add(miss.name)

    def _output(self, recogniser: Recogniser, step: Step) -> None:
        """Finds the step's output among the nodes that S' reaches."""
        frame = recogniser.frame
        start = recogniser.known[step.S_new]
        updates = {recogniser.known[v] for v in recogniser.updates}
        seen = {start}
        todo = collections.deque([start])
        while todo and len(seen) < _REACH:
            for user in todo.popleft().users:
                if user in seen or user.op not in ("call_function", "call_method"):
                    continue
                seen.add(user)
                value = self.view.values.of(user)
                if not isinstance(value, Value) or user in updates:
                    continue
                ref = vector(value, frame) if value.func in (aten.mul.Tensor, aten.div.Tensor) else None
                if ref is not None and recogniser.output(step, ref):
                    step.out_node = user
                    return
                todo.append(user)
        step.cut = _REACH if todo else None

    def _chains(self, recogniser: Recogniser, steps: list[Step]) -> list[Chain]:
        """Returns the chains of steps, which are in the order of the graph."""
        made_S, made_M = {s.S_new for s in steps}, {s.M_new for s in steps}
        crossed = {v for s in steps if s.S in made_M or s.M in made_S for v in (s.S, s.M)}
        kept = [s for s in steps if crossed.isdisjoint((s.S, s.M, s.S_new, s.M_new))]
        for step in steps:
            if step not in kept and not any(m.reason == _CROSSED for m in self.misses):
                self.misses.append(Miss(OP, _CROSSED, step.M_new, self.view.value(recogniser.known[step.M_new])))
        starts = collections.Counter((s.S, s.M) for s in kept)
        chains: list[Chain] = []
        ends: dict[Any, Chain] = {}
        for step in kept:
            before = ends.get((step.S, step.M, step.pattern)) if starts[step.S, step.M] == 1 else None
            if before is None:
                chains.append(before := Chain([], recogniser))
            before.steps.append(step)
            ends[step.S_new, step.M_new, step.pattern] = before
        return chains
