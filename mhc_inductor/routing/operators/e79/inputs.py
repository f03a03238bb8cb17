"""The inputs of E79's steps as the tensors of the op: kvqm ``[T, B, 4n]`` and the biases, without copies where they are."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from mhc_inductor.routing.graph.index import ONE, Size, Var
from mhc_inductor.routing.graph.values import Value, example
from mhc_inductor.routing.operator import Mismatch
from mhc_inductor.routing.operators.e79.lift import Plan, planned
from mhc_inductor.routing.operators.e79.slots import Held, Slot, places, sequence, side_by_side
from mhc_inductor.routing.operators.e79.step import Frame, Leaf, Step
from mhc_inductor.routing.rewriter import Rewriter, node_of

ROLES = ("k", "v", "q", "m")


class Inputs:
    """k, v, q, m and the biases of all steps, and how to put them into the op's tensors."""

    def __init__(
        self, rewriter: Rewriter, frame: Frame, steps: Sequence[Step], unasked: Collection[tuple[str, int]] = ()
    ) -> None:
        self.unasked = unasked
        """(role, step) of vectors that no gradient comes back to."""
        self.frame = frame
        self.steps = steps
        self.sources: list[fx.Node] = []
        self.rewriter = rewriter
        self.roles: dict[str, Any] = {}
        self._plans: dict[tuple[fx.Node, ...], Plan | None] = {}
        for name in (*ROLES, "b_s", "b_m"):
            leaves = [s.leaves[name] for s in steps]
            if all(leaf is None for leaf in leaves):
                self.roles[name] = None
                continue
            known = [leaf for leaf in leaves if leaf is not None]
            if len(known) < len(leaves):
                # q of a step whose output nobody reads: any vector will do.
                known = [leaf or known[0] for leaf in leaves]
            self.roles[name] = sequence(known, frame) or [self._single(leaf, name) for leaf in known]
        self.together = self._together()
        for held in self.roles.values():
            if isinstance(held, Held):
                self.sources.append(held.node)
            elif held is not None:
                plan = self._plan(held)
                self.sources += plan.sources if plan is not None else [node_of(v) for v, _ in held]

    def _single(self, leaf: Leaf, name: str) -> tuple[Value, Slot]:
        found = [p for p in places(leaf, self.frame) if not any(d[0] in ("rows", "columns") for d in p[1].dims)]
        if not found:
            raise Mismatch(f"{name} of a step is not laid out as [..., n]", leaf.ref.value)
        return found[-1]

    def _together(self) -> str | None:
        """How one tensor holds k, v, q and m side by side: "last" or "apart" (a dimension of 4), None where none does."""
        held = [self.roles[r] for r in ROLES]
        n = self.frame.n
        if all(isinstance(h, Held) for h in held):
            if len({(h.value, h.time, h.start, h.stride) for h in held}) != 1:
                return None
            return side_by_side([h.slot for h in held], held[0].value, n, held[0].time)
        if all(isinstance(h, list) for h in held):
            kinds = set()
            for row in zip(*held, strict=True):
                if len({v for v, _ in row}) != 1:
                    return None
                kinds.add(side_by_side([s for _, s in row], row[0][0], n, None))
            return kinds.pop() if len(kinds) == 1 else None
        return None

    # --- emission ---

    def emit(self, rewriter: Rewriter) -> tuple[fx.Node, fx.Node | None, fx.Node | None]:
        self.rewriter = rewriter
        if self.together is not None:
            kvqm = self._tensor(self.roles["k"], self.together, "k")
        else:
            parts = [self._part(r if self.roles[r] else "k") for r in ROLES]
            dtype = example(parts[0]).dtype
            for part in parts:
                dtype = torch.promote_types(dtype, example(part).dtype)
            parts = [p if example(p).dtype == dtype else rewriter.emit("to", p, dtype) for p in parts]
            kvqm = rewriter.emit(torch.cat, parts, -1)
        return kvqm, self._bias("b_s"), self._bias("b_m")

    def _bias(self, name: str) -> fx.Node | None:
        held = self.roles[name]
        if held is None:
            return None
        if isinstance(held, Held) and held.time is None:
            dims = [d for d in held.slot.dims if d[0] != "const"]
            if [d[0] for d in dims] == ["at"]:
                node = self.rewriter.current(held.node)
                node = self._reached(self._pick(node, held.slot, None, None), name)
                return node if len(dims) == len(example(node).shape) == 1 else self.rewriter.emit("flatten", node)
        return self._part(name)

    def _part(self, name: str) -> fx.Node:
        return self._reached(self._tensor(self.roles[name], None, name), name)

    def _reached(self, node: fx.Node, name: str, step: int | None = None) -> fx.Node:
        """``node``, detached where no gradient comes back to it: its leaves have none then, and not zeros."""
        steps = range(len(self.steps)) if step is None else [step]
        return self.rewriter.emit("detach", node) if all((name, t) in self.unasked for t in steps) else node

    def _tensor(self, held: Any, together: str | None, name: str) -> fx.Node:
        """[T, B, n], or [T, B, 4n]."""
        r, frame = self.rewriter, self.frame
        if isinstance(held, list):
            return self._listed(held, together, name)
        node = r.current(held.node)
        dims = held.slot.dims
        time = held.time
        if time is not None and dims[time][0] in ("rows", "columns"):
            batch = self._size(node, time, held)
            shape = (-1, batch) if dims[time][0] == "rows" else (batch, -1)
            node = r.emit("unflatten", node, time, shape)
            pair = [("const", 0), ("lead", 0)]
            pair = pair if dims[time][0] == "rows" else pair[::-1]
            dims = (*dims[:time], *pair, *dims[time + 1 :])
            time += dims[time][0] == "lead"
        at = Slot(dims)
        if time is None:
            node = self._batched(self._pick(node, at, None, together), at, None)
            node = r.emit("expand", r.emit("unsqueeze", node, 0), self._steps(), *[-1] * (len(frame.lead) + 1))
            return self._flat(node, together)
        count = len(self.steps)
        low = min(held.start, held.start + held.stride * (count - 1))
        stop = low + abs(held.stride) * (count - 1) + 1
        if not held.full and ((low, stop) != (0, example(node).shape[time]) or abs(held.stride) != 1):
            pick = (*[slice(None)] * time, slice(low, stop, abs(held.stride)))
            node = r.emit(operator.getitem, node, pick)
        if held.stride < 0:
            node = r.emit("flip", node, time)
        return self._flat(self._batched(self._pick(node, at, time, together), at, time), together)

    def _steps(self) -> Any:
        return len(self.steps)

    def _plan(self, held: list[tuple[Value, Slot]]) -> Plan | None:
        """How to compute the vectors of all steps at once, where each step computes its own."""
        nodes = tuple(node_of(v) for v, _ in held)
        if nodes not in self._plans:
            alike = len(held) > 1 and len({at for _, at in held}) == 1
            self._plans[nodes] = planned(self.rewriter, nodes) if alike else None
        return self._plans[nodes]

    def _listed(self, held: list[tuple[Value, Slot]], together: str | None, name: str) -> fx.Node:
        """The vectors of steps that no tensor holds: computed all at once where that can be said, else stacked."""
        r = self.rewriter
        plan = self._plan(held)
        if plan is not None:
            whole = plan.emit(tuple(node_of(v) for v, _ in held))
            at = Slot((("const", 0), *held[0][1].dims))
            return self._flat(self._batched(self._pick(whole, at, 0, together), at, 0), together)
        stacked = []
        for t, (value, at) in enumerate(held):
            node = self._pick(r.current(node_of(value)), at, None, together)
            node = node if together is not None else self._reached(node, name, t)
            stacked.append(self._batched(node, at, None))
        return self._flat(r.emit(torch.stack, stacked), together)

    def _size(self, node: fx.Node, dim: int, held: Held) -> Any:
        """The batch size, as something to put into the graph."""
        size = self.frame.lead[0].size
        if not size.symbols:
            return size.factor
        for source in [*self.rewriter.graph.find_nodes(op="placeholder")]:
            value = self.rewriter.finder.values.of(source)
            if isinstance(value, Value) and size in value.shape:
                return self.rewriter.emit("size", source, value.shape.index(size))
        raise Mismatch("the batch size is dynamic and no input has it", held.value)

    def _pick(self, node: fx.Node, at: Slot, time: int | None, together: str | None) -> fx.Node:
        """Only what the vector is of: other constants selected, the elements sliced."""
        r, n = self.rewriter, self.frame.n
        picks: list[Any] = []
        keep = len(at.dims)
        apart = max((d for d, (kind, _) in enumerate(at.dims) if kind == "const" and d != time), default=-1)
        for d, (kind, c) in enumerate(at.dims):
            if kind == "const" and d != time and not (together == "apart" and d == apart):
                picks.append(c)
                keep -= 1
            elif kind == "at" and together != "last" and r.size(node, d) != Size(n):
                picks.append(slice(c, c + n))
            else:
                picks.append(slice(None))
        while picks and picks[-1] == slice(None):
            picks.pop()
        return r.emit(operator.getitem, node, tuple(picks)) if picks else node

    def _batched(self, node: fx.Node, at: Slot, time: int | None) -> fx.Node:
        """[time,] lead..., [4,] n: dimensions in this order, missing ones spread out."""
        r, frame = self.rewriter, self.frame
        left = [(d, kind, c) for d, (kind, c) in enumerate(at.dims) if kind != "const" or d == time]
        extra = len(example(node).shape) - len(left)
        if extra:
            apart = max(d for d, (kind, _) in enumerate(at.dims) if kind == "const" and d != time)
            left.append((apart, "four", 0))
            left.sort()
        wanted: list[Any] = [] if time is None else [next(k for k, x in enumerate(left) if x[0] == time)]
        missing = []
        for k, v in enumerate(frame.lead):
            here = [p for p, x in enumerate(left) if x[1:] == ("lead", k)]
            if here:
                wanted += here
            else:
                missing.append((len(wanted), v))
                wanted.append(None)
        wanted += [p for p, x in enumerate(left) if x[1] == "four"]
        wanted += [p for p, x in enumerate(left) if x[1] == "at"]
        order = [p for p in wanted if p is not None]
        if order != sorted(order):
            node = r.emit("permute", node, *order)
        for position, v in missing:
            node = r.emit("unsqueeze", node, position)
            if v.size != ONE:
                sizes: list[Any] = [-1] * len(example(node).shape)
                sizes[position] = self._batch(v)
                node = r.emit("expand", node, *sizes)
        return node

    def _batch(self, v: Var) -> Any:
        if not v.size.symbols:
            return v.size.factor
        raise Mismatch("a vector is shared by a batch of dynamic size")

    def _flat(self, node: fx.Node, together: str | None) -> fx.Node:
        """[T, lead..., (4,) n] as [T, B, n] or [T, B, 4n]."""
        r, lead = self.rewriter, len(self.frame.lead)
        if together == "apart":
            node = r.emit("flatten", node, -2, -1)
        if lead == 0:
            return r.emit("unsqueeze", node, 1)
        return node if lead == 1 else r.emit("flatten", node, 1, lead)
