"""One call over all steps in the place of a call that each step makes: projections and slices inside a loop."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from mhc_inductor.routing.graph.run import run_fake
from mhc_inductor.routing.graph.values import example
from mhc_inductor.routing.operator import Mismatch
from mhc_inductor.routing.operators.mhc.search import name_of
from mhc_inductor.routing.rewriter import Rewriter

_UNARY = {"float", "to", "type", "half", "bfloat16", "contiguous", "clone", "silu", "sigmoid", "tanh", "relu", "gelu"}
_BINARY = {"add", "sub", "mul", "truediv", "div"}
_TUPLES = {"chunk", "split", "unbind"}


class Lifted(NamedTuple):
    """A node that holds a value of every step, along a first dimension, or (not ``batched``) the same of all."""

    node: fx.Node
    batched: bool


class Lift:
    """Emits calls over all steps at the rewriter's current place."""

    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter = rewriter

    def call(self, node: fx.Node, inputs: dict[fx.Node, Lifted]) -> Lifted:
        """What ``node`` computes, over all steps; ``inputs`` are its inputs so. Raises Mismatch where it cannot be said."""
        args, kwargs = node.args, dict(node.kwargs)
        batched = [a for a in node.all_input_nodes if inputs[a].batched]
        if batched:
            args = self.arguments(node, kwargs, batched)
        swap = {a: inputs[a].node for a in node.all_input_nodes}

        def placed(tree: Any) -> Any:
            return fx.node.map_arg(tree, swap.__getitem__)

        made = self.rewriter.graph.create_node(node.op, node.target, placed(args), placed(kwargs))
        made.meta["example_value"] = run_fake(made)
        made.meta.update(self.rewriter.trace)
        return Lifted(made, bool(batched))

    def arguments(self, node: fx.Node, kwargs: dict[str, Any], batched: Sequence[fx.Node]) -> tuple[Any, ...]:
        """The arguments of ``node`` where its ``batched`` inputs have all steps first; changes ``kwargs`` likewise."""
        name, args = name_of(node), node.args
        first, rest = args[0], args[1:]
        rank = _rank(first)
        alone = list(batched) == [first]
        if alone and name in _UNARY and not any(isinstance(a, fx.Node) for a in rest):
            return args
        if name in _BINARY and not kwargs:
            # Broadcasting counts dimensions from the last one: the first may be missing of what all steps share only.
            if all(_rank(a) == _rank(node) for a in batched):
                return args
        elif (alone and name == "linear") or (
            alone and name in ("matmul", "__matmul__") and rest and _rank(rest[0]) == 2
        ):
            return args
        elif alone and name in _TUPLES:
            return self._split(args, kwargs, name)
        elif alone and name == "getitem":
            if rank is None:
                return args
            index = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
            if all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in index):
                return (first, (slice(None), *index))
        raise Mismatch(f"a vector of the steps is computed within the loop by {name}", self.rewriter.finder.value(node))

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> tuple[Any, ...]:
        at = 1 if name == "unbind" else 2
        if "dim" in kwargs:
            kwargs["dim"] += kwargs["dim"] >= 0
        elif len(args) > at:
            return (*args[:at], args[at] + (args[at] >= 0), *args[at + 1 :])
        else:
            kwargs["dim"] = 1
        return args


def _rank(a: Any) -> int | None:
    fake = example(a) if isinstance(a, fx.Node) else None
    return fake.dim() if isinstance(fake, torch.Tensor) else None


Row = tuple[fx.Node, ...]


class Plan:
    """The same computation of every step, as one of all steps: what it reads, and how to emit it."""

    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter = rewriter
        self.lift = Lift(rewriter)
        self.sources: list[fx.Node] = []
        self._made: dict[Row, Callable[[dict[Row, Lifted]], Lifted]] = {}
        self._batched: dict[Row, bool] = {}

    def add(self, row: Row) -> bool:
        """Plan for one node of each step; whether they are the same computation. Raises Mismatch where it is none."""
        if row in self._made:
            return True
        first = row[0]
        if all(node is first for node in row):
            self.sources.append(first)
            self._put(row, False, lambda made: Lifted(self.rewriter.current(first), False))
            return True
        taken = _slices(row)
        if taken is not None:
            source, pick = taken
            self.sources.append(source)
            self._put(row, True, lambda made: Lifted(_picked(self.rewriter, self.rewriter.current(source), pick), True))
            return True
        values = self.rewriter.finder.values
        kinds = {(n.op, n.target, len(n.args), tuple(sorted(n.kwargs)), len(n.all_input_nodes)) for n in row}
        constants = {repr(fx.node.map_arg((n.args, n.kwargs), lambda _: 0)) for n in row}
        if len(kinds) != 1 or len(constants) != 1 or not values.inspectable(first) or values.autocast.get(first):
            return False
        columns = list(zip(*(node.all_input_nodes for node in row), strict=True))
        if not columns or not all(self.add(column) for column in columns):
            return False
        batched = [column[0] for column in columns if self._batched[column]]
        if batched:
            self.lift.arguments(first, dict(first.kwargs), batched)
        inputs = {column[0]: column for column in columns}
        self._put(row, bool(batched), lambda made: self.lift.call(first, {n: made[c] for n, c in inputs.items()}))
        return True

    def _put(self, row: Row, batched: bool, make: Callable[[dict[Row, Lifted]], Lifted]) -> None:
        self._made[row], self._batched[row] = make, batched

    def emit(self, row: Row) -> fx.Node:
        """The nodes of ``row`` as one."""
        made: dict[Row, Lifted] = {}
        for other, make in self._made.items():
            made[other] = make(made)
        return made[row].node


def planned(rewriter: Rewriter, nodes: Sequence[fx.Node]) -> Plan | None:
    """How to compute at once what every step computes, one node each; None where it cannot be said."""
    plan, row = Plan(rewriter), tuple(nodes)
    try:
        fits = plan.add(row)
    except Mismatch:
        return None
    return plan if fits and plan._batched[row] else None


def _slices(row: tuple[fx.Node, ...]) -> tuple[fx.Node, slice] | None:
    """(x, picked) where the nodes are ``x[a], x[a + 1], ...``."""
    first = row[0]
    if any(n.target is not operator.getitem or n.args[0] is not first.args[0] for n in row):
        return None
    source, at = first.args[0], [n.args[1] for n in row]
    if not isinstance(source, fx.Node) or not all(isinstance(a, int) for a in at):
        return None
    fake = example(source)
    if not isinstance(fake, torch.Tensor) or any(a != at[0] + k for k, a in enumerate(at)) or at[0] < 0:  # type: ignore[operator]
        return None
    return source, slice(at[0], at[0] + len(at))  # type: ignore[operator]


def _picked(rewriter: Rewriter, source: fx.Node, pick: slice) -> fx.Node:
    size = example(source).shape[0]
    return source if (0, size) == (pick.start, pick.stop) else rewriter.emit(operator.getitem, source, pick)
