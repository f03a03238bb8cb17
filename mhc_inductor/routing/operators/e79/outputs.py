# SPDX-License-Identifier: Apache-2.0
"""Finds what the graph reads of a chain of steps: stacked outputs, outputs of single steps, and the final S and M."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx

from mhc_inductor.routing.graph.expressions import VIEWS, aten, is_cast, peel, whole
from mhc_inductor.routing.graph.values import Value, reached
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.e79.lift import Plan, planned
from mhc_inductor.routing.operators.e79.loop import Chain
from mhc_inductor.routing.operators.e79.step import Step
from mhc_inductor.routing.operators.e79.terms import reads, shows

_STACKS = (aten.stack.default, aten.cat.default, aten.select_scatter.default)
_NEAR = 4
"""The most operations between an output and the stack of all outputs."""


@dataclasses.dataclass
class Stack:
    """A node that stacks the outputs of all steps along ``dim``.

    With a ``plan``, the pieces are computed from the outputs of all steps at once.
    """

    dim: int
    row: tuple[fx.Node, ...] = ()
    plan: Plan | None = None


@dataclasses.dataclass
class Outputs:
    """The nodes that the op's outputs replace."""

    stacks: dict[fx.Node, Stack]
    alone: dict[int, fx.Node]
    """The outputs that something reads outside of a stack, by step."""
    final: dict[str, fx.Node]
    """The final states by name, S and M, where something reads them."""

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes that the op's outputs replace."""
        return [*self.stacks, *self.alone.values(), *self.final.values()]

    @property
    def sources(self) -> list[fx.Node]:
        """The nodes that are read to compute the stacked pieces."""
        return [n for stack in self.stacks.values() if stack.plan is not None for n in stack.plan.sources]


class Uses:
    """Finds the uses of a chain's results."""

    def __init__(self, view: View, one: Chain) -> None:
        self.view = view
        self.one = one
        self.outs = [step.out_node for step in one.steps]
        self.stacks: dict[fx.Node, Stack] = {}
        self.paths: set[fx.Node] = set()

    def find(self) -> Outputs:
        """Returns the outputs that nodes outside the chain read."""
        made = [n for n in self.outs if n is not None]
        if len(made) == len(self.outs):
            for candidate, near in self._candidates(made[0]):
                inner = self._inner(candidate, set(made))
                found = self._stack(candidate) if near else None
                found = found or self._computed(candidate, tuple(made), inner)
                # A hook must see the gradient of its own piece, so hooked pieces and their stack stay.
                if found is not None and not any(self.view.hooked(n) for n in (*made, *inner - {candidate})):
                    self.stacks[candidate] = found
                    self.paths |= inner
        alone = {t: n for t, n in enumerate(self.outs) if n is not None and self._leaves(n)}
        known, last, live = self.one.recogniser.known, self.one.steps[-1], self.view.live
        states = {"S": known[last.S_new], "M": known[last.M_new]}
        return Outputs(self.stacks, alone, {k: n for k, n in states.items() if any(u in live for u in n.users)})

    def _candidates(self, node: fx.Node) -> list[tuple[fx.Node, bool]]:
        """Returns the stacks that ``node`` goes into, each with whether only views and casts lie between."""
        found: dict[fx.Node, bool] = {}
        todo, seen = [(node, 0, True)], {node}
        while todo:
            at, depth, near = todo.pop(0)
            for user in at.users:
                value = self.view.value(user) if user.op.startswith("call_") else None
                if value is None or user not in self.view.live or user in seen:
                    continue
                seen.add(user)
                if value.func in _STACKS:
                    found[self._filled(user)] = near
                elif depth < _NEAR:
                    todo.append((user, depth + 1, near and (value.func in VIEWS or is_cast(value))))
        return list(found.items())

    def _filled(self, node: fx.Node) -> fx.Node:
        """Follows a buffer from ``node``, the write of one piece, and returns it after the last such write."""
        while True:
            value = self.view.value(node)
            later = [u for u in node.users if _scatters_into(self.view.value(u), value)]
            if len(later) != 1:
                return node
            node = later[0]

    def _pieces(self, value: Value) -> tuple[int, list[Value]] | None:
        """Returns (dim, pieces) of the stack ``value``, or None."""
        if value.func in (aten.stack.default, aten.cat.default):
            pieces = list(value.args[0])
            rank = len(pieces[0].shape) + (value.func is aten.stack.default)
            return (value.args[1] if len(value.args) > 1 else 0) % rank, pieces
        found: dict[int, Value] = {}
        dim = value.args[2] % len(value.shape)
        size = value.shape[dim]
        while (
            not size.symbols and value.func is aten.select_scatter.default and value.args[2] % len(value.shape) == dim
        ):
            found.setdefault(value.args[3] % size.factor, value.args[1])
            if len(found) == size.factor:
                return dim, [found[t] for t in range(size.factor)]
            value = peel(whole(value.args[0]), set()).value if value.args[0].func in VIEWS else value.args[0]
        return None

    def _stack(self, node: fx.Node) -> Stack | None:
        """Returns ``node`` as a stack of the outputs of all steps in order, or None."""
        value = self.view.value(node)
        found = self._pieces(value) if value is not None else None
        if found is None or len(found[1]) != len(self.outs) or len({p.shape for p in found[1]}) != 1:
            return None
        dim, pieces = found
        each = zip(pieces, self.one.steps, strict=True)
        if not all(step.out is not None and shows(piece, step.out) for piece, step in each):
            return None
        return Stack(dim)

    def _computed(self, node: fx.Node, outs: tuple[fx.Node, ...], inner: set[fx.Node]) -> Stack | None:
        """Returns ``node`` as a stack of what every step computes from its output in the same way, or None."""
        given = next(iter(node.args), node.kwargs.get("tensors")) if node.target is torch.stack else ()
        row: Any = tuple(given) if isinstance(given, (tuple, list)) else ()
        if len(row) != len(outs) or len(row) < 2 or not all(isinstance(n, fx.Node) for n in row):
            return None
        plan = planned(self.view, row, outs)
        if plan is None or outs not in plan.batched:
            return None
        first = min(map(self.view.defined, outs))
        private = all(u in inner for n in inner - {node} for u in n.users)
        if not private or any(self.view.defined(n) >= first for n in plan.sources):
            return None
        value = self.view.value(row[0])
        dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        return Stack(dim % (len(value.shape) + 1), row, plan) if value is not None else None

    def _inner(self, node: fx.Node, outs: Collection[fx.Node]) -> set[fx.Node]:
        """Returns the nodes on the paths from ``outs`` to ``node``, including ``node``."""
        order = self.view.order
        first = min(order[n] for n in outs)
        seen = reached([node], lambda n: (a for a in n.all_input_nodes if a not in outs and order.get(a, -1) > first))
        found: set[fx.Node] = set()
        for n in sorted(seen, key=order.__getitem__):
            if any(a in outs or a in found for a in n.all_input_nodes):
                found.add(n)
        return found

    def _leaves(self, node: fx.Node) -> bool:
        """Checks whether something uses ``node`` other than through a stack."""

        def users(of: fx.Node) -> Iterator[fx.Node]:
            return (u for u in of.users if u in self.view.live and u not in self.stacks)

        every = reached([node], lambda n: (u for u in users(n) if u in self.paths))
        return any(u not in self.paths for n in every for u in users(n))


def _scatters_into(value: Value | None, base: Value | None) -> bool:
    return value is not None and value.func is aten.select_scatter.default and value.args[0] is base


def check_closed(view: View, one: Chain, sources: Collection[fx.Node], results: Collection[fx.Node]) -> None:
    """Raises Mismatch where something outside the loop reads a state or a product inside it."""
    known, news = one.recogniser.known, {s.S_new for s in one.steps}
    region = reached(results, lambda n: (a for a in n.all_input_nodes if a not in sources and a.op.startswith("call_")))
    carried = {known[one.steps[0].S], known[one.steps[0].M]}
    for node in sorted(region, key=view.order.__getitem__):
        if node in sources or not any(a in carried for a in node.all_input_nodes):
            continue
        carried.add(node)
        if node in results or all(u in region or u not in view.live for u in node.users):
            continue
        read = [view.value(u) for u in node.users if u not in region and u in view.live]
        reason = "an intermediate result of a step is used outside the loop"
        if any(known[v] is node for v in news) and any(reads(v, one.frame, news) for v in read):
            reason = "what is read from S' is not y * silu(y) with y = S' q"
        cut = next((s.cut for s in one.steps if s.cut is not None), None)
        if cut is not None:
            reason += f" (the search for the output of a step stopped after {cut} operations)"
        raise Mismatch(reason, view.value(node))


def unasked(view: View, one: Chain) -> set[tuple[str, int]]:
    """Returns (role, step) of the vectors that no gradient comes back to; empty where none comes back to the chain."""
    known, last = one.recogniser.known, one.steps[-1]

    def asked(node: fx.Node | None) -> bool:
        return node is not None and ((view.needs_grad[node] and bool(view.ends.get(node))) or view.hooked(node))

    found: set[tuple[str, int]] = set()
    memory = asked(known[last.M_new])
    later = memory or asked(known[last.S_new])
    for t, step in reversed(list(enumerate(one.steps))):
        out = asked(step.out_node)
        now = later or out
        wanted = {"k": now, "v": now, "b_s": now, "q": out, "m": memory, "b_m": memory}
        found.update((role, t) for role, reached in wanted.items() if not reached)
        memory = later = now
    return found if later else set()


def without_end(view: View, one: Chain) -> tuple[Chain, Step | None]:
    """Returns the chain without last steps that cannot be routed, and the step whose hook prevents it, or None.

    Last steps whose states nothing reads are cut off. So is a last step with a hook on S': the hook sees the gradients
    of that step's M' and output too, but the op's final S gets only those from outside.
    """
    known, steps, odd = one.recogniser.known, list(one.steps), None
    while steps:
        last = steps[-1]
        S, M, out = known[last.S_new], known[last.M_new], last.out_node
        if S in view.live or M in view.live:
            inside = [n for n in (M, out) if n is not None and view.needs_grad[n] and view.ends.get(n)]
            if not view.hooked(S) or not inside:
                break
            odd = odd or last
        steps.pop()
    return Chain(steps, one.recogniser), odd
