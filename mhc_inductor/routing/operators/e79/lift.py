# SPDX-License-Identifier: Apache-2.0
"""Replaces a call that each step of a loop makes, such as a projection or a slice, with one call over all steps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from mhc_inductor.routing.edit import Edit
from mhc_inductor.routing.graph.values import example, name_of
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Mismatch

_UNARY = {"float", "to", "type", "half", "bfloat16", "contiguous", "clone", "silu", "sigmoid", "tanh", "relu", "gelu"}
_BINARY = {"add", "sub", "mul", "truediv", "div"}
_TUPLES = {"chunk", "split", "unbind"}


class Lifted(NamedTuple):
    """A node that holds the values of all steps along its first dimension or, if not ``batched``, one value for all."""

    node: fx.Node
    batched: bool


def lifted(edit: Edit, node: fx.Node, inputs: Mapping[fx.Node, Lifted]) -> Lifted:
    """Emits the computation of ``node`` over all steps, from its ``inputs`` over all steps. Raises Mismatch."""
    args, kwargs = node.args, dict(node.kwargs)
    batched = [a for a in node.all_input_nodes if inputs[a].batched]
    if batched:
        args = arguments(edit.view, node, kwargs, batched)
    swap = {a: inputs[a].node for a in node.all_input_nodes}
    placed: Any = fx.node.map_arg((args, kwargs), swap.__getitem__)
    return Lifted(edit.create(node.op, node.target, *placed), bool(batched))


def arguments(view: View, node: fx.Node, kwargs: dict[str, Any], batched: Sequence[fx.Node]) -> tuple[Any, ...]:
    """Returns the arguments of ``node`` for ``batched`` inputs that have the steps as a new first dimension.

    Changes ``kwargs`` accordingly. Raises Mismatch where the call cannot run over all steps.
    """
    name, args = name_of(node), node.args
    first, rest = (args[0], args[1:]) if args else (kwargs.get("input"), ())
    alone = list(batched) == [first]
    if alone and name in _UNARY and not any(isinstance(a, fx.Node) for a in rest):
        return args
    # Broadcasting aligns the last dimensions, so only inputs that all steps share may have a lower rank.
    if name in _BINARY and not kwargs and all(_rank(a) == _rank(node) for a in batched):
        return args
    product = name in ("matmul", "__matmul__") and bool(rest) and _rank(rest[0]) == 2
    if alone and (name == "linear" or product):
        return args
    if alone and name in _TUPLES:
        return _split(args, kwargs, name)
    if alone and name == "getitem":
        index = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
        if _rank(first) is None:
            return args
        if all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in index):
            return (first, (slice(None), *index))
    raise Mismatch(f"a vector of the steps is computed within the loop by {name}", view.value(node))


def _split(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> tuple[Any, ...]:
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
Make = Callable[[Edit, dict[Row, Lifted]], Lifted]


class Plan:
    """One computation over all steps in place of the same one in each step: what it reads, and how to emit it.

    ``given`` are nodes, one per step, whose values the emitter already has in one tensor.
    """

    def __init__(self, view: View, given: Row = ()) -> None:
        self.view = view
        self.given = given
        self.sources: list[fx.Node] = []
        self._made: dict[Row, Make] = {}
        self.batched: dict[Row, bool] = {}
        """The rows of the plan, each with whether its nodes differ from step to step."""

    def add(self, row: Row) -> bool:
        """Adds a row of nodes, one per step. Returns whether they are the same computation. Raises Mismatch."""
        if row in self._made:
            return True
        if row == self.given:
            self._put(row, True, lambda edit, made: made[row])
        elif all(node is row[0] for node in row):
            self.sources.append(row[0])
            self._put(row, False, lambda edit, made: Lifted(edit.current(row[0]), False))
        elif (taken := _slices(row)) is not None:
            source, pick = taken
            self.sources.append(source)
            self._put(row, True, lambda edit, made: Lifted(_picked(edit, edit.current(source), pick), True))
        else:
            return self._call(row)
        return True

    def _call(self, row: Row) -> bool:
        first, view = row[0], self.view
        # The same call reads the same constants, and its inputs in the same places.
        calls = {
            (n.op, n.target, repr(fx.node.map_arg((n.args, n.kwargs), n.all_input_nodes.index)), view.modes_at(n))
            for n in row
        }
        if len(calls) != 1 or view.values.autocast.get(first):
            return False
        if not view.values.inspectable(first) or any(map(view.hooked, row)):
            return False
        columns = list(zip(*(node.all_input_nodes for node in row), strict=True))
        if not columns or not all(self.add(column) for column in columns):
            return False
        batched = [column[0] for column in columns if self.batched[column]]
        if batched:
            arguments(view, first, dict(first.kwargs), batched)
        inputs = {column[0]: column for column in columns}
        self._put(row, bool(batched), lambda edit, made: lifted(edit, first, {n: made[c] for n, c in inputs.items()}))
        return True

    def _put(self, row: Row, batched: bool, make: Make) -> None:
        self._made[row], self.batched[row] = make, batched

    def emit(self, edit: Edit, row: Row, given: fx.Node | None = None) -> fx.Node:
        """Emits the plan and returns one node for ``row``. ``given`` holds the nodes that the plan was given."""
        made: dict[Row, Lifted] = {} if given is None else {self.given: Lifted(given, True)}
        for other, make in self._made.items():
            made[other] = make(edit, made)
        return made[row].node


def planned(view: View, nodes: Sequence[fx.Node], given: Row = ()) -> Plan | None:
    """Returns the plan to compute ``nodes``, one per step, at once; None where the steps compute them differently."""
    plan, row = Plan(view, given), tuple(nodes)
    try:
        fits = plan.add(row)
    except Mismatch:
        return None
    return plan if fits and plan.batched[row] else None


def _slices(row: Row) -> tuple[fx.Node, slice] | None:
    """Returns (x, slice) where the nodes are ``x[a], x[a + 1], ...``, else None."""
    if any(n.target is not operator.getitem or n.args[0] is not row[0].args[0] for n in row):
        return None
    source, at = row[0].args[0], [n.args[1] for n in row]
    if not isinstance(source, fx.Node) or not isinstance(example(source), torch.Tensor):
        return None
    low = at[0]
    if not isinstance(low, int) or low < 0 or at != list(range(low, low + len(at))):
        return None
    return source, slice(low, low + len(at))


def _picked(edit: Edit, source: fx.Node, pick: slice) -> fx.Node:
    size = example(source).shape[0]
    return source if (0, size) == (pick.start, pick.stop) else edit.emit(operator.getitem, source, pick)
