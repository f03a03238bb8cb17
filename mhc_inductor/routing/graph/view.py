# SPDX-License-Identifier: Apache-2.0
"""The graph as operators see it: functional, with the modes, effects and gradients at every position.

In-place steps on the graph's own tensors become calls that make new tensors. Operators work with the nodes of this
view; ``origin`` maps them to the nodes of the real graph.
"""

from __future__ import annotations

import bisect
import collections
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Set

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.options import DEFAULT, RoutingOptions
from mhc_inductor.routing.effects import Effects, Modes, modes_of
from mhc_inductor.routing.graph.functional import Functional, functional
from mhc_inductor.routing.graph.known_calls import KnownCalls
from mhc_inductor.routing.graph.values import (
    Value,
    Values,
    elements_read,
    example,
    is_tensors,
    name_of,
    random,
    tensors_in,
)


class Knowledge:
    """What all graphs of a compile share: the user's options, how calls expand, and what they write.

    ``exported``: the graphs are an exported program's. Its dynamic sizes stay dynamic, and it may run uncompiled, so
    that each op is an autograd node of its own.
    """

    def __init__(self, options: RoutingOptions = DEFAULT, exported: bool = False) -> None:
        self.options = options
        self.exported = exported
        self.templates = KnownCalls("template")
        self.effects = Effects()
        self.failures: list[tuple[fx.Node, Exception]] = []
        """Nodes at which an operator's search failed, until the pass reports them."""
        self.in_policies: set[fx.Graph] = set()
        """Bodies of higher-order operators inside a region with a checkpoint policy, which sees their ops too."""


Passed = Mapping[fx.Node, Value | None]
"""What is passed to inputs that need no gradient: the value of a mask or of integers, None for any other tensor."""


class View:
    """One graph, and what the pass knows about it.

    ``body``: the graph is the body of a higher-order operator, so that its inputs do not tell whether they need
    gradients. ``in_place``: in-place steps stay as they are. That is enough to look for ops, and saves a copy of the
    graph. ``given``: what is known of the tensors that the graph around a checkpointed region passes to this graph's inputs.
    """

    def __init__(
        self,
        graph: fx.Graph,
        modes: Modes,
        knowledge: Knowledge,
        body: bool = False,
        in_place: bool = False,
        given: Passed | None = None,
    ) -> None:
        self.real = graph
        self.body = body
        self.knowledge = knowledge
        self.effects = knowledge.effects
        self.real_nodes = list(graph.nodes)
        self.position = {node: i for i, node in enumerate(self.real_nodes)}
        self.modes = modes_of(graph, modes)
        self.effects.within(self.modes)
        self.events = self.effects.events(graph)
        self.in_place = in_place
        view = Functional(graph) if in_place else functional(graph, self.effects, self.events)
        self.graph, self.origin, self.since, self.resolved = view.graph, view.origin, view.since, view.resolved
        self.reader, self.made, self.before, self.through = view.reader, view.made, view.before, view.through
        self.converted = set(view.made.values())
        self.nodes = list(self.graph.nodes)
        self.given = self._unwritten(given or {})
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.values = self.fresh_values()

    def _unwritten(self, given: Passed) -> dict[fx.Node, Value | None]:
        """Returns what is passed to the inputs of this graph, without inputs that the graph writes in place."""
        written = {storage for _, storage, _ in self.events} if given else set()
        kept = {real for real in given if written.isdisjoint(self.effects.storages(real))}
        return {n: given[real] for n in self.nodes if (real := self.origin.get(n, n)) in kept}

    def fresh_values(self) -> Values:
        """Returns the values of the view's nodes, with no symbol fixed."""
        states = {n: m.autocast for n in self.graph.nodes if (m := self.modes_at(n)).autocast}
        return Values(self.graph, states, self.knowledge.templates, self._in_place, self.given)

    @functools.cached_property
    def has_policy(self) -> bool:
        """Returns whether a checkpoint policy, of this region or of one around it, decides which ops are saved."""
        return self.real in self.knowledge.in_policies or compat.routing.checkpoint_policy(self.real) is not None

    def _in_place(self, node: fx.Node) -> bool:
        """Returns whether a node of the view writes, or may write, one of its inputs, or is a copy that is filled later."""
        if node in self.made:
            return False
        return bool(self.effects.written(self.reader.get(node, node))) or self._filled(node)

    def _filled(self, node: fx.Node) -> bool:
        """Returns whether a step that stays in place writes a copy before anything reads it, except to write it.

        Whoever reads it later does not read what was copied.
        """
        if name_of(node) != "clone":
            return False
        memory, since = {*self.storages(node)}, self.defined(node)
        first = min((at for s in memory for at in self._writes[1].get(s, ()) if at > since), default=None)
        if first is None:
            return False
        return all(self.defined(u) >= first or not memory.isdisjoint(self.storages(u)) for u in node.users)

    def modes_at(self, node: fx.Node) -> Modes:
        """Returns the modes that the call of a view's node runs in."""
        return self.modes[self.reader.get(node, node)]

    def node(self, node: fx.Node) -> fx.Node:
        """Returns the real node whose result a node of the view stands for."""
        return self.origin.get(node, node)

    @functools.cached_property
    def live(self) -> set[fx.Node]:
        """Returns the nodes that a result or an effect needs. Dynamo leaves dead code in its graphs."""
        live: set[fx.Node] = set()
        for node in reversed(self.nodes):
            pure = self.values.inspectable(node) and is_tensors(example(node))
            if not pure or not live.isdisjoint(node.users):
                live.add(node)
        return live

    def value(self, node: fx.Node) -> Value | None:
        """Returns the value of a node that is one tensor, else None."""
        found = self.values.of(node)
        return found if isinstance(found, Value) else None

    @functools.cached_property
    def constants(self) -> set[fx.Node]:
        """Returns the nodes that sizes and numbers determine, the same ones each time."""
        found = set[fx.Node]()
        for node in self.nodes:
            if isinstance(example(node), (int, float, torch.SymInt, torch.SymFloat)):
                found.add(node)
            elif self.values.inspectable(node) and found.issuperset(elements_read(node)):
                value = self.value(node)
                found |= {node} if value is None or (value.func is not None and not random(value)) else set()
        return found

    def descendants(
        self, starts: Iterable[fx.Node], admit: Callable[[fx.Node], bool], limit: int = 4000
    ) -> list[fx.Node]:
        """Returns the live nodes that read elements of ``starts``, or of nodes that do, in graph order.

        Args:
            starts: the nodes to start from; they are included.
            admit: returns whether the search continues past a node. Other nodes are included but not passed.
            limit: the search stops at about this many nodes, of which it visits the nearest first.
        """
        seen, live = dict.fromkeys(starts), self.live
        todo = collections.deque(seen)
        # Breadth first, so that the limit drops the farthest nodes.
        while todo and len(seen) < limit:
            node = todo.popleft()
            for user in node.users:
                calls = user not in seen and user in live and user.op in ("call_function", "call_method")
                if calls and node in elements_read(user):
                    seen[user] = None
                    if admit(user):
                        todo.append(user)
        return sorted(seen, key=self.order.__getitem__)

    # --- effects ---

    @functools.cached_property
    def _writes(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Returns the positions at which each storage is written, in order: all, and those left in place here."""
        every: dict[int, list[int]] = collections.defaultdict(list)
        left: dict[int, list[int]] = collections.defaultdict(list)
        for position, storage, node in self.events:
            every[storage].append(position)
            if node not in self.converted:
                left[storage].append(position)
        return every, left

    def written_between(self, node: fx.Node, before: int, left: bool = False, after: int | None = None) -> bool:
        """Returns whether the memory of a view's node is written after its definition and before a real position.

        Args:
            node: a node of the view.
            before: a position of the real graph.
            left: count only steps that the view could not make functional.
            after: a position to start from instead of the definition.
        """
        writes, after = self._writes[left], self.defined(node) if after is None else after
        for storage in self.storages(node) if writes else ():
            found = writes.get(storage, [])
            at = bisect.bisect_right(found, after)
            if at < len(found) and found[at] < before:
                return True
        return False

    def writers(self, node: fx.Node, after: int, until: int) -> list[fx.Node]:
        """Returns the real nodes that write the memory of a view's node after one position and up to another."""
        mine = self.storages(node)
        return [n for at, storage, n in self.events if after < at <= until and storage in mine]

    def defined(self, node: fx.Node) -> int:
        """Returns the position from which on the real node holds what the view's node stands for."""
        return self.since.get(node, self.position.get(self.node(node), -1))

    @functools.cached_property
    def holders(self) -> dict[int, list[fx.Node]]:
        """Returns the real nodes that hold each storage, in graph order."""
        found: dict[int, list[fx.Node]] = collections.defaultdict(list)
        for node in self.real.nodes:
            for storage in dict.fromkeys(self.effects.storages(node)):
                found[storage].append(node)
        return found

    @functools.cached_property
    def hiding(self) -> list[fx.Node]:
        """Returns the real nodes that are ``t.data``: another name of a tensor, under which autograd sees no write."""
        return [node for node in self.real_nodes if compat.routing.hides_writes(node)]

    def storages(self, node: fx.Node) -> tuple[int, ...]:
        """Returns the storage key of each tensor that the real node of a view's node holds."""
        return self.effects.storages(self.node(node))

    # --- gradients ---

    def settle(self) -> None:
        """Computes what depends on the unedited graph, before the first edit."""
        _ = self.roots, self.ends, self.holders, self.live, self.returned

    def flows(self, node: fx.Node) -> bool:
        """Returns whether a gradient may flow through a node of the view, of the real graph, or of an edit."""
        known = self.needs_grad.get(node)
        if known is None:
            known = bool(node.meta.get(GRAD, False)) or any(self.needs_grad[n] for n in self.shown.get(node, ()))
        return known

    @functools.cached_property
    def shown(self) -> dict[fx.Node, list[fx.Node]]:
        """Returns the nodes of the view that stand for each real node, in order; none if nothing is written in place."""
        found: dict[fx.Node, list[fx.Node]] = collections.defaultdict(list)
        for node, real in self.origin.items():
            found[real].append(node)
        return found

    @functools.cached_property
    def needs_grad(self) -> dict[fx.Node, bool]:
        """Returns for each node of the view whether a gradient may flow through it."""
        found: dict[fx.Node, bool] = {}
        for node in self.nodes:
            tensors = tensors_in(example(node))
            wide = [t for t in tensors if t.is_floating_point() or t.is_complex()]
            if node.op in ("placeholder", "get_attr"):
                unknown = self.body and node not in self.given
                found[node] = any(t.requires_grad for t in wide) or (unknown and bool(wide))
            elif not wide:
                found[node] = False
            elif not self.modes_at(node).grad:
                # A tensor that is written without gradients keeps those that it had.
                found[node] = any(found[a] for a in self._handed_on(node))
            elif self.body or node in self.made:
                through = any(found[a] for a in elements_read(node))
                found[node] = through and "detach" not in str(node.target)
            else:
                found[node] = any(t.requires_grad for t in wide) or bool(node.meta.get(GRAD, False))
        return found

    def _handed_on(self, node: fx.Node) -> list[fx.Node]:
        """Returns the nodes that stand, before the step, for the tensors that ``node`` writes and returns."""
        if node in self.made:
            return [self.before[node]]
        step = self.reader.get(node, node)
        mine = self.effects.storages(step)
        written = [a for a in self.effects.written(step) if not {*mine}.isdisjoint(self.effects.storages(a))]
        return [self.resolved.get(step, {}).get(a, a) for a in written]

    @functools.cached_property
    def roots(self) -> dict[fx.Node, int]:
        """Returns for each node of the view the graph inputs that its gradient reaches, as a bit mask."""
        found: dict[fx.Node, int] = {}
        count = 0
        for node in self.nodes:
            bits = 0
            if self.needs_grad[node] or node in self._steps:
                if node.op in ("placeholder", "get_attr"):
                    bits, count = 1 << count, count + 1
                else:
                    for a in node.all_input_nodes:
                        bits |= found[a]
            found[node] = bits
            if node in self._steps:  # what it writes is reached under every other name, too
                written = self.effects.written(self.reader.get(node, node))
                for real in {n for a in written for s in self.effects.storages(a) for n in self.holders.get(s, ())}:
                    for other in self.shown.get(real, [real]):
                        if other in found:
                            found[other] |= bits
        return found

    @functools.cached_property
    def ends(self) -> dict[fx.Node, int]:
        """Returns for each node of the view which of :attr:`results` it reaches, as a bit mask.

        One more bit is set if it reaches a call that writes or keeps a tensor.
        """
        found = {node: 1 << i for i, node in enumerate(self.results)}
        kept = 1 << len(found)
        for node in self.nodes:
            effect = self.effects.of(self.reader.get(node, node))
            if node not in self.made and (effect.writes or effect.watches or not effect.known):
                for a in node.all_input_nodes:
                    found[a] = found.get(a, 0) | kept
        for node in reversed(self.nodes):
            bits = found.get(node, 0)
            if bits and (self.needs_grad[node] or node in self._steps):
                for a in node.all_input_nodes:
                    found[a] = found.get(a, 0) | bits
        return found

    @functools.cached_property
    def results(self) -> list[fx.Node]:
        """Returns the nodes that the graph returns, and the in-place writes that gradients may come back from."""
        return list(dict.fromkeys([*self.graph.output_node().all_input_nodes, *self._steps]))

    @functools.cached_property
    def _steps(self) -> dict[fx.Node, None]:
        """Returns the nodes that write in place in this view too, and run in grad mode."""
        writers = {node for _, _, node in self.events} - self.converted
        return {n: None for n in self.nodes if self.reader.get(n, n) in writers and self.modes_at(n).grad}

    def reached_anyway(self, node: fx.Node) -> int:
        """Returns the graph inputs that get a gradient anyway where one flows through ``node``, as a bit mask.

        A compiled graph is one autograd node: what any of its results reaches gets one. Uncompiled, it is what every
        result that ``node`` flows into reaches.
        """
        reached = [self.roots[result] for result in self.results]
        if not self.knowledge.exported:
            return functools.reduce(operator.or_, reached, 0)
        ends = self.ends.get(node, 0)
        if ends >> len(reached):
            return 0  # the tensor is written or kept by a call, and gradients may come back from there alone
        flows = [roots for i, roots in enumerate(reached) if ends >> i & 1]
        return functools.reduce(operator.and_, flows, ~0)

    def escapes(self, node: fx.Node) -> bool:
        """Returns whether the memory of a view's node is returned by the graph, or written in place later."""
        holders = self.holding(node, {*self.effects.storages(node)})
        return any(user.op == "output" for n in holders for user in n.users) or self.overwritten(node)

    def holding(self, node: fx.Node, memory: Set[int]) -> list[fx.Node]:
        """Returns ``node`` and the nodes that hold this memory and are reached from it through users that hold it."""
        found, todo = {node: None}, [node]
        while todo:
            new = [u for u in todo.pop().users if u not in found and not memory.isdisjoint(self.effects.storages(u))]
            found.update(dict.fromkeys(new))
            todo += new
        return list(found)

    @functools.cached_property
    def returned(self) -> set[int]:
        """Returns the storage keys of what the graph returns."""
        return {key for node in self.graph.output_node().all_input_nodes for key in self.storages(node)}

    def overwritten(self, node: fx.Node) -> bool:
        """Returns whether the memory of a view's node is written in place later."""
        return self.written_between(node, len(self.real_nodes))

    def hooked(self, node: fx.Node) -> bool:
        """Returns whether a hook, or anything else that keeps a tensor, is on a view's node."""
        seen = [self.effects.of(self.reader.get(u, u)) for u in node.users if u not in self.made]
        return any(effect.watches and not effect.writes for effect in seen)


GRAD = "mhc_inductor_needs_grad"
"""Key in a node's meta: whether gradients flow through it.

Ops that replace formulas are run without gradients, so their fake values do not tell.
"""
