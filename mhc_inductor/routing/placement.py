# SPDX-License-Identifier: Apache-2.0
"""Proves that an op may stand where a formula stood, before the graph is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import fx

from mhc_inductor.routing.effects import Modes
from mhc_inductor.routing.graph.values import Value, elements_read, reached
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match, Mismatch, Unplaced
from mhc_inductor.routing.rounding import check_roundings
from mhc_inductor.routing.saved_tensors import changed_later

WRITTEN = "a tensor of the formula is written in place before the formula ends"
TRACES = ("stack_trace", "source_fn_stack")
"""Keys in a node's meta that say which line of the user's code its value comes from."""
KEPT = "kept_submodule"
"""Key in the meta of a node of an exported program: the call of the innermost submodule around it that keeps its
signature. A formula does not cross the boundary of such a call."""
PASSED_ON = "passed_on"
"""Key in the meta of a node of an exported program: whether it is a result of such a submodule that a module inside it
computes. Something outside of that module must read it, or torch.export.unflatten loses it."""
_MODULES = ("nn_module_stack", KEPT)


def node_of(value: Value) -> fx.Node:
    """Returns the view's node of a value. Raises Mismatch for a value inside a composite operation."""
    if value.node is None:
        raise Mismatch(
            "an input or result of the op is inside one call of PyTorch, such as F.rms_norm, and has no graph node",
            value,
        )
    return value.node


def module_of(view: View, node: fx.Node) -> dict[str, Any]:
    """Returns the keys of a new node's meta that say in which submodule it stands, if it is put next to ``node``.

    It is the outermost module where ``node`` is an input or the output of the graph.
    """
    found = {k: node.meta[k] for k in _MODULES if k in node.meta}
    if node.op in ("placeholder", "output"):
        stacks = (n.meta[_MODULES[0]] for n in view.real_nodes if n.meta.get(_MODULES[0]))
        stack: dict[str, Any] = next(stacks, {})
        found[_MODULES[0]] = dict([*stack.items()][:1])
    return found


@dataclasses.dataclass
class Place:
    """The position of an op: it goes before ``anchor`` and runs in ``modes``.

    ``region`` holds the view's nodes of the formula, outputs included. ``trace`` is the op's source location, and the
    submodule that the anchor stands in: torch.export.unflatten makes a submodule of neighbouring nodes.
    """

    anchor: fx.Node
    modes: Modes
    region: set[fx.Node]
    trace: dict[str, Any]
    overwritten: list[fx.Node]
    """Inputs, as nodes of the view, that the op must read from a clone.

    They are written between the formula's first read and the anchor; or only the op, not the formula, saves them for
    its backward, and the graph returns or later writes them.
    """
    looks: dict[fx.Node, int]
    """Inputs, each with the position just before the formula first reads it."""


class Placement:
    """Finds where one match's op may stand."""

    def __init__(self, view: View, match: Match) -> None:
        self.view = view
        self.match = match
        self.ins = list(dict.fromkeys(node_of(v) for v in match.inputs))
        if not all(n in view.order for n in self.ins):
            raise Mismatch("the formula reads a tensor from outside the checkpointed region", match.start)
        self.outs = list(dict.fromkeys(node_of(v) for v in match.outputs))
        self.first = min(self.outs, key=view.defined)
        self.at = match.start

    def find(self) -> Place:
        """Returns the position. Raises Unplaced if inputs and results leave no room, or another Mismatch."""
        view = self.view
        region = self._region()
        looks = {n: self._looked_at(n, region) for n in self.ins}
        self._check_writes(region, looks)
        modes = self._modes(region)
        self._check_watched(region)
        self._check_outputs(region)
        self._check_kept(region)
        check_roundings(view, [*self.ins, *self.outs], region)
        anchor = self._anchor(region, modes)
        trace: dict[str, Any] = {k: self.first.meta[k] for k in TRACES[:1] if k in self.first.meta}
        trace |= module_of(view, anchor)
        at = view.position.get(anchor, len(view.position))
        overwritten = [n for n, look in looks.items() if view.written_between(n, at, after=look)]
        if any(view.written_between(n, looks[n] + 1, left=True) for n in overwritten):
            raise Mismatch(WRITTEN, self.at)
        overwritten += [n for n in changed_later(view, self.ins, region, at, modes) if n not in overwritten]
        return Place(anchor, view.modes[anchor], region, trace, overwritten, looks)

    def _looked_at(self, node: fx.Node, region: set[fx.Node]) -> int:
        """Returns the position just before the formula first reads an input."""
        made = self.view.defined(node)
        first = min((self.view.defined(u) for u in node.users if u in region), default=made + 1) - 1
        return max(first, made)

    def _region(self) -> set[fx.Node]:
        """Returns the view's nodes between inputs and outputs. Raises Unplaced if an input depends on an output."""
        ins, order = set(self.ins), self.view.order

        def inside(node: fx.Node) -> Iterator[fx.Node]:
            return (a for a in elements_read(node) if a not in ins and a in order and a.op.startswith("call_"))

        floor = min(order[o] for o in self.outs)
        above = reached(self.ins, lambda n: (a for a in n.all_input_nodes if order.get(a, -1) >= floor))
        if not above.keys().isdisjoint(self.outs):
            raise Unplaced("an input of the op depends on its result", self.at)
        return {*reached(self.outs, inside)}

    def _check_writes(self, region: set[fx.Node], looks: dict[fx.Node, int]) -> None:
        """Raises Mismatch if an in-place write that the view could not make functional lies within the formula."""
        last = max(self.view.defined(o) for o in self.outs)
        since = [*((n, None) for n in region), *looks.items()]
        if any(self.view.written_between(n, last + 1, left=True, after=at) for n, at in since):
            raise Mismatch(WRITTEN, self.at)

    def _modes(self, region: set[fx.Node]) -> Modes:
        """Returns the modes of the formula. Raises Mismatch if they change within it."""
        view = self.view
        flowing = [n for n in region if any(view.flows(a) for a in n.all_input_nodes)]
        # Nodes that no gradient flows into may be computed in any grad mode.
        grads = {view.modes_at(n).grad for n in flowing}
        if len(grads) > 1:
            raise Mismatch("gradients are switched on or off within the formula", self.at)
        first = view.modes_at(self.first)
        if len({view.modes_at(n).inference for n in region}) > 1:
            raise Mismatch("inference mode is switched on or off within the formula", self.at)
        return dataclasses.replace(first, grad=grads.pop()) if grads else first

    def _check_watched(self, region: set[fx.Node]) -> None:
        """Raises Mismatch if a hook, or anything else that keeps a tensor, is on a value that disappears."""
        outs = set(self.outs)
        for node in region:
            inside = any(u in region for u in node.users)
            if node in outs and not inside:
                continue
            for user in node.users:
                effect = self.view.effects.of(self.view.reader.get(user, user))
                if user not in region and (effect.watches or not effect.known):
                    raise Mismatch("an intermediate result of the formula has a hook", self.view.value(node))

    def _check_outputs(self, region: set[fx.Node]) -> None:
        """Raises Mismatch if a result shares memory with a tensor that stays, or is later written by another name."""
        view, outs = self.view, set(self.outs)
        for node in self.outs:
            if node in view.made and any(u in view.made and u not in region for u in node.users):
                raise Mismatch("a result of the formula is changed in place later", self.at)
            storages = {*view.effects.storages(node)}
            for other in region - outs:
                shared = not storages.isdisjoint(view.effects.storages(other))
                if shared and any(u not in region and u in view.live for u in other.users) and view.escapes(other):
                    raise Mismatch("a result of the formula shares memory with another result", self.at)

    def _check_kept(self, region: set[fx.Node]) -> None:
        """Raises Mismatch if the formula lies in part in a submodule whose inputs and outputs must stay the model's."""
        inside = region - set(self.outs)
        if len({n.meta.get(KEPT) for n in region}) > 1 or any(n.meta.get(PASSED_ON) for n in inside):
            raise Mismatch("the formula crosses the boundary of a submodule whose signature export preserves", self.at)

    def _anchor(self, region: set[fx.Node], modes: Modes) -> fx.Node:
        """Returns the node to insert before: the first result, or a later node if an input is computed later."""
        view = self.view
        real = view.real_nodes
        late = max((view.defined(n) for n in (*self.ins, *self.match.numbers)), default=-1)
        start = view.defined(self.first)
        uses = [view.defined(u) for o in self.outs for u in o.users if u not in region]
        end = min(uses, default=len(real) - 1)
        kept = self.first.meta.get(KEPT)
        for at in (start, *range(max(late + 1, start), end + 1)):
            here = view.modes[real[at]]
            alike = here.grad == modes.grad and here.inference == modes.inference
            if at > late and alike and real[at].meta.get(KEPT) == kept:
                return real[at]
        if late >= end:
            raise Unplaced("an input of the op is computed after one of its results is used", self.at)
        raise Mismatch("gradients are switched on or off within the formula", self.at)
