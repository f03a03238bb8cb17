# SPDX-License-Identifier: Apache-2.0
"""Cuts a formula and its op out of the real graph, each as a graph that runs alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.edit import Edit, Pairs, node_of
from mhc_inductor.routing.effects import Modes
from mhc_inductor.routing.graph.values import Value, copy_into, example, reached, values_in
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match

MODES = "mhc_inductor_modes"
"""Key in the meta of a cut node: the modes that it runs in."""
SHAPES = "mhc_inductor_shapes"
"""Key in the meta of a cut node: the fake value that it had in the graph."""

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_FIXED = 64
"""How many nodes :meth:`Cut.reads` visits before it takes a node to depend on data."""


@dataclasses.dataclass
class Piece:
    """A graph that runs alone.

    ``inputs`` maps nodes of the view to the placeholders that hold them. ``written`` are placeholders that the graph
    writes in place. ``args`` has the arguments of nodes that run with others than their own. ``around`` maps inputs of a
    checkpointed region to nodes of the graph around it, which are computed here, and ``passed`` such nodes to inputs.
    """

    graph: fx.Graph = dataclasses.field(default_factory=fx.Graph)
    inputs: dict[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)
    written: set[fx.Node] = dataclasses.field(default_factory=set)
    outputs: list[fx.Node] = dataclasses.field(default_factory=list)
    args: dict[fx.Node, Any] = dataclasses.field(default_factory=dict)
    around: Mapping[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)
    passed: Mapping[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)
    _outside: dict[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)

    def input(self, node: fx.Node) -> fx.Node:
        """Returns the placeholder of a node of the view, or what the graph around a region computes."""
        if node in self.around:
            return self._computed(self.around[node])
        if node not in self.inputs:
            self.inputs[node] = self.graph.placeholder(node.name)
            self.inputs[node].meta[SHAPES] = example(node)
        return self.inputs[node]

    def _computed(self, outside: fx.Node) -> fx.Node:
        """Returns the copy of a node of the graph around, computed from inputs of the region or of that graph."""
        if outside not in self._outside:
            at = {a: self._read(a) for a in outside.all_input_nodes}
            self._outside[outside] = self.copy(outside, at, Modes())
        return self._outside[outside]

    def _read(self, outside: fx.Node) -> fx.Node:
        inner = self.passed.get(outside)
        if inner is not None and inner not in self.around:
            return self.input(inner)
        number = isinstance(example(outside), _NUMBERS)
        return self.input(outside) if number or not outside.op.startswith("call_") else self._computed(outside)

    def copy(self, node: fx.Node, at: dict[fx.Node, fx.Node], modes: Modes) -> fx.Node:
        """Copies a real ``node`` into the piece. ``at`` maps each of its inputs to a node of the piece."""
        return copy_into(self.graph, node, at.__getitem__, {MODES: modes, SHAPES: example(node)})

    def structure(self) -> tuple[Any, ...]:
        """Returns a hashable description that is equal for pieces that compute the same; node names do not count."""
        nth: dict[fx.Node, Any] = {node: b"%d" % i for i, node in enumerate(self.graph.nodes)}  # no argument is bytes
        lines = []
        for node in self.graph.nodes:
            if node.op != "placeholder":
                args = fx.node.map_arg((node.args, node.kwargs), nth.__getitem__)
                lines.append((node.op, node.target, repr(args), node.meta.get(MODES)))
        return tuple(lines), repr([nth[p] for p in self.inputs.values()]), repr([nth[o] for o in self.outputs])


def copied(
    view: View, piece: Piece, nodes: Collection[fx.Node], ends: Collection[fx.Node], stood_for: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Copies the real nodes of ``nodes``, of the view, into a piece. Returns the copies of ``ends``.

    ``stood_for`` maps the ops that earlier matches put in to the nodes that they replaced.
    """
    region = sorted(nodes, key=view.order.__getitem__)
    stepped = any(v in view.made for v in region)
    at: dict[fx.Node, fx.Node] = {}
    results: dict[fx.Node, fx.Node] = {}
    for v in region:
        if isinstance(example(v), (torch.SymFloat, torch.SymInt, torch.SymBool)):
            continue  # a number known at compile time: its present value is used
        real = view.reader.get(v, v)
        read: dict[fx.Node, fx.Node] = {}
        part = view.through.get(v)
        for a in real.all_input_nodes:
            meant = view.before[v] if a is part else _meant(view, real, a, stood_for)
            read[a] = at[meant] if meant in at else piece.input(meant)
        whole = read[view.effects.written(real)[0]] if v in view.made else None
        if part is not None and whole is not None:
            read[part] = piece.copy(part, {part.all_input_nodes[0]: whole}, view.modes_at(v))
        at[v] = made = piece.copy(real, read, view.modes_at(v))
        if whole is not None:
            # Use the tensor that the step writes: an assignment (setitem) returns none.
            at[v] = held = whole
            if held.op == "placeholder":
                piece.written.add(held)
        if v in ends:
            # Clone the result, because a later in-place step may write it.
            results[v] = piece.graph.call_method("clone", (at[v],)) if stepped else at[v]
            results[v].meta.setdefault(MODES, made.meta[MODES])
    return results


def _meant(view: View, real: fx.Node, a: fx.Node, stood_for: dict[fx.Node, fx.Node]) -> fx.Node:
    """Returns the node of the view that ``real`` reads under the name ``a``, which may be written before ``real``."""
    resolved, meant = view.resolved.get(real, {}), stood_for.get(a, a)
    return resolved[a] if a in resolved else resolved.get(view.node(meant), meant)


def _nearest(start: Any, further: Callable[[Any], Iterable[Any]], most: int) -> Collection[Any]:
    """Returns ``start`` and what leads to it; nothing if that is more than ``most``."""
    count = itertools.count()
    found = reached([start], lambda a: further(a) if next(count) < most else ())
    return found if len(found) <= most else ()


class Cut:
    """The formula and the op of one match as pieces. Both map their placeholders to nodes of the same view."""

    def __init__(self, edit: Edit, match: Match, pairs: Pairs) -> None:
        if edit.place is None:
            raise ValueError("Cut needs an edit in progress: call it from the check of Edit.apply")
        self.edit, self.view, self.place = edit, edit.view, edit.place
        self.match, self.pairs = match, pairs
        self.ins = dict.fromkeys(node_of(v) for v in match.inputs)
        self.stood_for = edit.originals()
        self.derived = self._derived([node_of(v) for v in match.derived])
        given = {node: v for node, v in self.view.given.items() if v is not None}
        self.passed = {v.node: node for node, v in given.items() if v.node is not None}
        self.around = {node: v.node for node, v in given.items() if v.node is not None and self._is_computed(node, v)}
        """Masks that a checkpointed region is given: the op was made from how the graph around computes them."""
        self.unknown = {node for node, v in given.items() if node not in self.around and not self._is_plain(v)}
        """Other inputs of a region of which something is known: no data is representative."""
        self.asked = [bool(self.view.ends.get(node_of(value), 0)) for value, _ in pairs]
        """For each result, whether the graph uses its gradient."""
        self.unrounded = {new: old for new, old in edit.unrounded.items() if old in self.ins}
        self.formula = self._formula()
        self.op = self._op()
        self.inputs = list(dict.fromkeys([*self.formula.inputs, *self.op.inputs]))

    def value(self, node: fx.Node) -> Value | None:
        """Returns the value of a node: the match's input value if it is one, else the view's."""
        return next((v for v in self.match.inputs if v.node is node), None) or self.view.value(node)

    def reads(self, node: fx.Node) -> bool:
        """Returns whether a view's node depends on data: on a graph input other than a size, or on random numbers."""
        todo, seen = [node], {node}
        while todo:
            one = todo.pop()
            if isinstance(example(one), _NUMBERS):
                continue
            if not one.op.startswith("call_") or "rand" in str(one.target) or len(seen) > _FIXED:
                return True
            todo += [a for a in one.all_input_nodes if a not in seen]
            seen.update(one.all_input_nodes)
        return False

    def _is_plain(self, passed: Value) -> bool:
        """Checks whether a region is given a tensor of which nothing is known, or one that depends on no data."""
        node = passed.node
        if node is None or not node.op.startswith("call_"):
            return node is not None and passed.func is None
        return not self.reads(node)

    def _is_computed(self, node: fx.Node, passed: Value) -> bool:
        """Checks whether a region is given a mask that the graph around computes, in a few calls, from plain tensors."""
        dtype, outside = example(node).dtype, passed.node
        read = node in self.ins and not dtype.is_floating_point and dtype is not torch.bool  # integers, as they are
        if outside is None or not outside.op.startswith("call_") or read or not self.reads(outside):
            return False
        nodes = _nearest(outside, lambda n: [a for a in n.all_input_nodes if a not in self.passed], _FIXED)
        far = _nearest(passed, lambda v: [a for a in values_in(v.args) if a.node not in self.passed], 8 * _FIXED)
        leaves = [v for v in far if v.node is not None and not v.node.op.startswith("call_")]
        return bool(nodes and far) and all(v.node.op == "placeholder" and v.func is None for v in leaves)

    def _formula(self) -> Piece:
        """Builds the formula's piece from the real nodes of the region in graph order, in-place steps included."""
        piece = Piece(around=self.around, passed=self.passed)
        ends = [node_of(v) for v in (*(v for v, _ in self.pairs), *self.match.inner)]
        results = copied(self.view, piece, self.place.region | self.derived, ends, self.stood_for)
        piece.outputs = [results[node] for node in ends]
        return piece

    def _derived(self, ends: list[fx.Node]) -> set[fx.Node]:
        """Returns the nodes that compute inputs from other inputs, ``ends`` included."""

        def above(node: fx.Node) -> Iterator[fx.Node]:
            read = (self.stood_for.get(a, a) for a in node.all_input_nodes)
            return (a for a in read if a.op.startswith("call_") and (a in ends or a not in self.ins))

        return {*reached((node for node in ends if node.op.startswith("call_")), above)}

    def _op(self) -> Piece:
        """Builds the op's piece from the new nodes between the match's inputs and its results."""
        piece, edit, region = Piece(around=self.around, passed=self.passed), self.edit, self.place.region
        given = {edit.input(v): node_of(v) for v in self.match.inputs}
        ends = [n for v in self.match.derived if (n := node_of(v)) in self.derived]
        known = copied(self.view, piece, self.derived, ends, self.stood_for)
        # A node of an earlier match belongs to the op unless it stands for something outside the formula.
        inside = {n for n in edit.created if n not in self.stood_for or self.stood_for[n] in region}
        inside -= given.keys() | self.unrounded.keys()
        results = [new for _, new in self.pairs]
        needed = reached(results, lambda n: n.all_input_nodes if n in inside else ())
        at: dict[fx.Node, fx.Node] = {}
        for node in needed:
            if node in given:
                at[node] = known.get(given[node]) or piece.input(given[node])
            elif node in self.unrounded:
                at[node] = self._laid(piece, node)
            elif node not in inside:
                at[node] = piece.input(self.stood_for.get(node) or self.view.shown.get(node, [node])[-1])
        for node in edit.created:
            if node in inside and node in needed:
                at[node] = piece.copy(node, at, self.place.modes)
        piece.outputs = [at[new] for new in results]
        return piece

    def _laid(self, piece: Piece, new: fx.Node) -> fx.Node:
        """Returns the formula's value of an input in the layout and dtype in which an earlier op returns it."""
        wanted, made = example(new), piece.input(self.unrounded[new])
        for target, argument in (("reshape", [*map(compat.routing.hint, wanted.shape)]), ("to", wanted.dtype)):
            made = piece.graph.call_method(target, (made, argument))
            made.meta.update({MODES: self.place.modes, SHAPES: wanted})
        return made
