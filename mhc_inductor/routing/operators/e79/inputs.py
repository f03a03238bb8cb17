# SPDX-License-Identifier: Apache-2.0
"""Builds the op's tensors from the inputs of E79's steps: kvqm ``[T, B, 4n]`` and the biases, if possible as views."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from mhc_inductor.routing.edit import Edit, node_of
from mhc_inductor.routing.graph.index import ONE, Size, Var
from mhc_inductor.routing.graph.values import Value, example
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.e79.lift import Plan, planned
from mhc_inductor.routing.operators.e79.step import Step
from mhc_inductor.routing.operators.e79.terms import Frame, Leaf
from mhc_inductor.routing.operators.e79.vector_layout import Held, Slot, places, sequence, side_by_side

ROLES = ("k", "v", "q", "m")
BIASES = ("b_s", "b_m")
Listed = list[tuple[Value, Slot]]
"""A separate tensor per step, with the place of the step's vector in it."""


@dataclasses.dataclass
class Inputs:
    """Where k, v, q, m and the biases of all steps are stored, by name; None for an absent one."""

    frame: Frame
    roles: dict[str, Held | Listed | None]
    count: int | None
    """The number of steps; None where the size of a tensor gives it."""
    plans: dict[str, Plan] = dataclasses.field(default_factory=dict)
    """How to compute the listed vectors of a role for all steps at once."""

    @property
    def sources(self) -> list[fx.Node]:
        """The nodes that the op's inputs are built from."""
        found: list[fx.Node] = []
        for name, held in self.roles.items():
            if isinstance(held, Held):
                found.append(held.node)
            elif held is not None:
                found += self.plans[name].sources if name in self.plans else [node_of(v) for v, _ in held]
        return list(dict.fromkeys(found))

    @property
    def together(self) -> str | None:
        """How one tensor holds k, v, q and m side by side, or None.

        "last": concatenated along the vectors' dimension; "apart": along a dimension of size 4 of their own.
        """
        held, n = [self.roles[r] for r in ROLES], self.frame.n
        one = [h for h in held if isinstance(h, Held)]
        if len(one) == len(ROLES):
            if len({(h.value, h.time, h.start, h.stride) for h in one}) != 1:
                return None
            return side_by_side([h.slot for h in one], one[0].value, n, one[0].time)
        lists = [h for h in held if isinstance(h, list)]
        if len(lists) < len(ROLES):
            return None
        kinds = set()
        for row in zip(*lists, strict=True):
            if len({v for v, _ in row}) != 1:
                return None
            kinds.add(side_by_side([s for _, s in row], row[0][0], n, None))
        return kinds.pop() if len(kinds) == 1 else None


def of_steps(view: View, frame: Frame, steps: Sequence[Step]) -> Inputs:
    """Returns where the vectors of an unrolled loop's steps are stored. Raises Mismatch."""
    inputs = Inputs(frame, {}, len(steps))
    for name in (*ROLES, *BIASES):
        leaves = [s.leaves[name] for s in steps]
        known = [leaf for leaf in leaves if leaf is not None]
        if not known:
            inputs.roles[name] = None
            continue
        # A step whose output nothing reads has no q: any vector will do.
        filled = [leaf or known[0] for leaf in leaves]
        held = inputs.roles[name] = sequence(filled, frame) or [_single(leaf, frame, name) for leaf in filled]
        if isinstance(held, list) and len(held) > 1 and len({at for _, at in held}) == 1:
            plan = planned(view, [node_of(v) for v, _ in held])
            if plan is not None:
                inputs.plans[name] = plan
    return inputs


def _single(leaf: Leaf, frame: Frame, name: str) -> tuple[Value, Slot]:
    found = [p for p in places(leaf, frame) if not any(d[0] in ("rows", "columns") for d in p[1].dims)]
    if not found:
        raise Mismatch(f"{name} of a step is not laid out as [..., n]", leaf.ref.value)
    return found[-1]


class Packing:
    """Emits the op's input tensors. ``unasked``: (role, step) of the vectors that no gradient comes back to."""

    def __init__(self, edit: Edit, inputs: Inputs, unasked: Collection[tuple[str, int]] = ()) -> None:
        self.edit = edit
        self.inputs = inputs
        self.frame = inputs.frame
        self.unasked = unasked

    def emit(self) -> tuple[fx.Node, fx.Node | None, fx.Node | None]:
        """Returns kvqm, b_s and b_m; a bias that is absent is None."""
        together, edit = self.inputs.together, self.edit
        if together is not None:
            kvqm = self._tensor("k", together)
        else:
            parts = [self._part(r if self.inputs.roles[r] else "k") for r in ROLES]
            dtype = example(parts[0]).dtype
            for part in parts:
                dtype = torch.promote_types(dtype, example(part).dtype)
            kvqm = edit.emit(torch.cat, [edit.to(p, dtype) for p in parts], -1)
        return kvqm, self._bias("b_s"), self._bias("b_m")

    def _bias(self, name: str) -> fx.Node | None:
        held = self.inputs.roles[name]
        if held is None:
            return None
        if isinstance(held, Held):
            dims = [d for d in held.slot.dims if d[0] != "const"]
            if held.time is None and [d[0] for d in dims] == ["at"]:
                node = self._reached(self._pick(self.edit.current(held.node), held.slot, None, None), name)
                return node if len(dims) == len(example(node).shape) == 1 else self.edit.emit("flatten", node)
        return self._part(name)

    def _part(self, name: str) -> fx.Node:
        return self._reached(self._tensor(name, None), name)

    def _reached(self, node: fx.Node, name: str, step: int | None = None) -> fx.Node:
        """Returns ``node``, detached where no gradient comes back to it: its leaves then get None and not zeros."""
        steps = range(self.inputs.count or 1) if step is None else [step]
        unasked = all((name, t) in self.unasked for t in steps) and self.edit.needs_grad(node)
        return self.edit.emit("detach", node) if unasked else node

    def _tensor(self, name: str, together: str | None) -> fx.Node:
        """Returns a role as [T, B, n] or, with ``together``, k, v, q and m as [T, B, 4n]."""
        held = self.inputs.roles[name]
        if isinstance(held, list):
            return self._listed(name, held, together)
        assert held is not None
        node, dims, time = self._times(self.edit.current(held.node), held)
        at = Slot(dims)
        node = self._window(node, held, time) if time is not None else node
        node = self._batched(self._pick(node, at, time, together), at, time)
        if time is None:
            node = self.edit.emit("unsqueeze", node, 0)
            node = self.edit.emit("expand", node, self._steps(), *[-1] * (len(self.frame.lead) + 1))
        return self._flat(node, together)

    def _times(self, node: fx.Node, held: Held) -> tuple[fx.Node, tuple[Any, ...], int | None]:
        """Returns the tensor with a time dimension of its own, the meaning of its dimensions, and which one is time."""
        dims, time = held.slot.dims, held.time
        if time is None or dims[time][0] not in ("rows", "columns"):
            return node, dims, time
        batch, rows = self._batch_size(held), dims[time][0] == "rows"
        node = self.edit.emit("unflatten", node, time, (-1, batch) if rows else (batch, -1))
        pair = [("const", 0), ("lead", 0)] if rows else [("lead", 0), ("const", 0)]
        return node, (*dims[:time], *pair, *dims[time + 1 :]), time + (not rows)

    def _window(self, node: fx.Node, held: Held, time: int) -> fx.Node:
        """Returns the part of a tensor that holds the steps of the loop, in their order."""
        count = self.inputs.count
        if count is None:  # the steps take all of the time dimension, whatever its size
            return node
        low = min(held.start, held.start + held.stride * (count - 1))
        stop = low + abs(held.stride) * (count - 1) + 1
        whole = (low, stop) == (0, example(node).shape[time]) and abs(held.stride) == 1
        if not whole:
            pick = (*[slice(None)] * time, slice(low, stop, abs(held.stride)))
            node = self.edit.emit(operator.getitem, node, pick)
        return self.edit.emit("flip", node, time) if held.stride < 0 else node

    def _steps(self) -> Any:
        """Returns the number of steps as an int or a node. Raises Mismatch."""
        if self.inputs.count is not None:
            return self.inputs.count
        for held in self.inputs.roles.values():
            if isinstance(held, Held) and held.time is not None:
                node = self.edit.current(held.node)
                size = example(node).shape[held.time]
                return size if isinstance(size, int) else self.edit.emit("size", node, held.time)
        raise Mismatch("no vector of the step changes from step to step, so the number of steps is not known")

    def _listed(self, name: str, held: Listed, together: str | None) -> fx.Node:
        """Returns vectors that no single tensor holds: computed for all steps at once where possible, else stacked."""
        plan, edit = self.inputs.plans.get(name), self.edit
        if plan is not None:
            whole = plan.emit(edit, tuple(node_of(v) for v, _ in held))
            at = Slot((("const", 0), *held[0][1].dims))
            return self._flat(self._batched(self._pick(whole, at, 0, together), at, 0), together)
        stacked = []
        for t, (value, at) in enumerate(held):
            node = self._pick(edit.input(value), at, None, together)
            node = node if together is not None else self._reached(node, name, t)
            stacked.append(self._batched(node, at, None))
        return self._flat(edit.emit(torch.stack, stacked), together)

    def _batch_size(self, held: Held) -> Any:
        """Returns the batch size as an int or a node. Raises Mismatch."""
        size, view = self.frame.lead[0].size, self.edit.view
        if not size.symbols:
            return size.factor
        for source in view.graph.find_nodes(op="placeholder"):
            value = view.value(source)
            if value is not None and size in value.shape:
                return self.edit.emit("size", self.edit.current(source), value.shape.index(size))
        raise Mismatch("the batch size is dynamic and no input has it", held.value)

    def _pick(self, node: fx.Node, at: Slot, time: int | None, together: str | None) -> fx.Node:
        """Returns the part of ``node`` that holds the vector: indexes constant dimensions and slices the elements."""
        n, picks = self.frame.n, list[Any]()
        apart = _apart(at, time) if together == "apart" else -1
        for d, (kind, c) in enumerate(at.dims):
            if kind == "const" and d not in (time, apart):
                picks.append(c)
            elif kind == "at" and together != "last" and self.edit.size(node, d) != Size(n):
                picks.append(slice(c, c + n))
            else:
                picks.append(slice(None))
        while picks and picks[-1] == slice(None):
            picks.pop()
        return self.edit.emit(operator.getitem, node, tuple(picks)) if picks else node

    def _batched(self, node: fx.Node, at: Slot, time: int | None) -> fx.Node:
        """Returns ``node`` with the dimensions [time,] lead..., [4,] n in this order; missing ones are expanded."""
        left = [(d, kind, c) for d, (kind, c) in enumerate(at.dims) if kind != "const" or d == time]
        if len(example(node).shape) > len(left):
            left = sorted([*left, (_apart(at, time), "four", 0)])
        wanted: list[Any] = [] if time is None else [next(k for k, x in enumerate(left) if x[0] == time)]
        missing = []
        for k, v in enumerate(self.frame.lead):
            here = [p for p, x in enumerate(left) if x[1:] == ("lead", k)]
            if not here:
                missing.append((len(wanted), v))
            wanted += here or [None]
        wanted += [p for name in ("four", "at") for p, x in enumerate(left) if x[1] == name]
        order = [p for p in wanted if p is not None]
        if order != sorted(order):
            node = self.edit.emit("permute", node, *order)
        for position, v in missing:
            node = self._spread(self.edit.emit("unsqueeze", node, position), position, v)
        return node

    def _spread(self, node: fx.Node, position: int, v: Var) -> fx.Node:
        if v.size == ONE:
            return node
        if v.size.symbols:
            raise Mismatch("a vector is shared by a batch of dynamic size")
        sizes = [-1] * len(example(node).shape)
        sizes[position] = v.size.factor
        return self.edit.emit("expand", node, *sizes)

    def _flat(self, node: fx.Node, together: str | None) -> fx.Node:
        """Returns [T, lead..., (4,) n] as [T, B, n] or [T, B, 4n]."""
        lead = len(self.frame.lead)
        if together == "apart":
            node = self.edit.emit("flatten", node, -2, -1)
        if lead == 0:
            return self.edit.emit("unsqueeze", node, 1)
        return node if lead == 1 else self.edit.emit("flatten", node, 1, lead)


def _apart(at: Slot, time: int | None) -> int:
    """Returns the dimension of size 4 that separates k, v, q and m: the last constant one that is not time."""
    return max((d for d, (kind, _) in enumerate(at.dims) if kind == "const" and d != time), default=-1)
