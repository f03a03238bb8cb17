# SPDX-License-Identifier: Apache-2.0
"""Copies a graph without its in-place operations, for analysis.

Models often write masks in place, as in ``mask |= ...``.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.effects import Effects
from mhc_inductor.routing.graph.values import copy_into, example

_OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
}
"""In-place operators of Python, and the operators that compute their results."""
_VIEWS = {"view", "unflatten", "unsqueeze", "squeeze", "transpose", "permute", "narrow", "select"}
"""Methods whose results are views in which each element of a tensor occurs at most once."""


def put(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """Returns ``x`` after ``x[index] = value``.

    With index tensors it is an index_put, for a tensor ``value`` nested scatters, and for a number a ``where`` on
    positions. Raises NotImplementedError for an index that it does not cover.
    """
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [i for i in index if not isinstance(i, torch.Tensor)]:
        gap = next(k for k, i in enumerate(index) if i is Ellipsis)
        index = (*index[:gap], *[slice(None)] * (x.dim() - len(index) + 1), *index[gap + 1 :])
    if any(isinstance(i, torch.Tensor) for i in index):
        return _put_by_tensors(x, index, value)
    if isinstance(value, torch.Tensor):
        return _scattered(x, [*enumerate(index)], value)
    within = torch.ones((), dtype=torch.bool, device=x.device)
    for d, i in enumerate(index):
        at = torch.arange(x.shape[d], device=x.device).view(-1, *[1] * (x.dim() - d - 1))
        for place in _places(at, i):
            within = within & place
    return torch.where(within, value, x)


def stored(dtype: torch.dtype, step: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns what an in-place step leaves in a tensor of ``dtype``; ``step`` is a function or the name of a method."""
    result: torch.Tensor = (
        getattr(args[0], step[1:])(*args[1:], **kwargs) if isinstance(step, str) else step(*args, **kwargs)
    )
    return result.to(dtype)


def _put_by_tensors(x: torch.Tensor, index: tuple[Any, ...], value: Any) -> torch.Tensor:
    if not all(isinstance(i, torch.Tensor) or i == slice(None) for i in index):
        raise NotImplementedError
    if len(index) == 1 and index[0].dtype is torch.bool and not isinstance(value, torch.Tensor):
        return x.masked_fill(index[0].reshape(*index[0].shape, *[1] * (x.dim() - index[0].dim())), value)
    value = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    places = [i if isinstance(i, torch.Tensor) else None for i in index]
    return torch.ops.aten.index_put.default(x, places, value)


def _places(at: torch.Tensor, i: Any) -> list[torch.Tensor]:
    """Returns the conditions for positions ``at`` of a dimension to be in an integer or a slice without a step."""
    if isinstance(i, int) and i >= 0:
        return [at == i]
    if not isinstance(i, slice) or i.step is not None or (i.start or 0) < 0 or (i.stop is not None and i.stop < 0):
        raise NotImplementedError
    return [*([at >= i.start] if i.start else []), *([at < i.stop] if i.stop is not None else [])]


def _scattered(x: torch.Tensor, index: list[tuple[int, Any]], value: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` with ``value`` at the given integers and slices of its dimensions."""
    picked = [(d, i) for d, i in index if i != slice(None)]
    if not picked:
        return value.to(x.dtype).expand(x.shape)
    (d, i), rest = picked[0], picked[1:]
    if isinstance(i, int) and not isinstance(i, bool):
        inner = _scattered(x.select(d, i), [(e - 1, j) for e, j in rest], value)
        return torch.ops.aten.select_scatter.default(x, inner, d, i)
    if not isinstance(i, slice):
        raise NotImplementedError
    before: list[Any] = [slice(None)] * d
    part = x[tuple([*before, i])]
    return torch.ops.aten.slice_scatter.default(x, _scattered(part, rest, value), d, i.start, i.stop, i.step or 1)


def _plain(node: fx.Node) -> tuple[str, Any] | None:
    """Returns (op, target) of the call that computes the result of an in-place ``node``, or None."""
    if node.op == "call_function":
        if node.target in _OPERATORS:
            return "call_function", _OPERATORS[node.target]
        if node.target is operator.setitem:
            return "call_function", put
        return None
    name = str(node.target)
    if name == "fill_":
        return "call_function", torch.full_like
    if name == "zero_":
        return "call_function", torch.zeros_like
    return ("call_method", name[:-1]) if hasattr(torch.Tensor, name[:-1]) and not name.endswith("__") else None


@dataclasses.dataclass
class Functional:
    """A copy of a graph without in-place steps on the graph's own tensors.

    ``origin``: for each node, the real node whose result it stands for. ``since``: the real position from which that
    node holds it. ``resolved``: for each real node, the node that each of its inputs stands for at that position. If
    the graph writes nothing in place, ``graph`` is the real graph and all maps are empty.
    """

    graph: fx.Graph
    origin: dict[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)
    since: dict[fx.Node, int] = dataclasses.field(default_factory=dict)
    resolved: dict[fx.Node, dict[fx.Node, fx.Node]] = dataclasses.field(default_factory=dict)
    reader: dict[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)
    """For each node, the real call that it stands for."""
    made: dict[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)
    """The nodes that stand for in-place steps, each with the real step."""
    before: dict[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)
    """For each of these nodes, the node that stands for the tensor before the step."""
    through: dict[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)
    """For each of these nodes whose step writes a slice of the tensor, the real node of the slice."""


def functional(graph: fx.Graph, effects: Effects, events: list[tuple[int, int, fx.Node]]) -> Functional:
    """Returns ``graph`` with in-place steps on its own tensors replaced by calls that make new tensors.

    A step stays in place if a view of the tensor from before the step is used after it.
    """
    writers = {node: effects.written(node) for _, _, node in events}
    steps = {node: written[0] for node, written in writers.items() if len(written) == 1 and _call(node, written[0])}
    return _Functionalised(graph, effects, steps).result if steps else Functional(graph)


class _Functionalised:
    """Builds the copy, node by node; ``result`` is the :class:`Functional`."""

    def __init__(self, graph: fx.Graph, effects: Effects, steps: dict[fx.Node, fx.Node]) -> None:
        self.effects = effects
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.held: dict[int, list[fx.Node]] = collections.defaultdict(list)
        for node in graph.nodes:
            for storage in effects.storages(node):
                self.held[storage].append(node)
        self.result = Functional(fx.Graph(graph.owning_module))
        self.now: dict[fx.Node, fx.Node] = {}
        self.same: dict[fx.Node, fx.Node] = {}
        for position, node in enumerate(graph.nodes):
            self.result.resolved[node] = {a: self.now[a] for a in node.all_input_nodes}
            made = self._step(node, steps[node]) if node in steps else None
            if made is None:
                made = copy_into(self.result.graph, node, self.now.__getitem__, {**node.meta})
                self.result.origin[made] = node
                self.now[node] = made
            self.result.since[made] = position
            self.result.reader[made] = node

    def _step(self, node: fx.Node, before: fx.Node) -> fx.Node | None:
        """Returns a new node that computes what ``node`` writes to ``before``, or None if the step stays in place."""
        part, call = before if _fills_slice(node, before) else None, _call(node, before)
        before = part.all_input_nodes[0] if part is not None else before
        root, fake = self.same.get(before, before), example(before)
        if call is None or not isinstance(fake, torch.Tensor):
            return None
        at = self.order[node]
        earlier = [n for n in self.held[self.effects.storages(before)[0]] if self.order[n] < at]
        family = [n for n in earlier if self.same.get(n, n) is root]
        if any(self.order[u] > at for n in earlier if self.same.get(n, n) is not root for u in n.users):
            return None
        if before not in family or root.op not in ("call_function", "call_method") or not self._owns(root):
            return None
        args = (before, part.args[1], node.args[1]) if part is not None else node.args
        made = self._made(node, call, args, fake)
        if made is None:
            return None
        result = self.result
        result.before[made], result.made[made] = self.now[before], node
        result.origin[made] = root if node.target is operator.setitem or part is not None else node
        if part is not None:
            result.through[made] = part
        else:
            self.same[node] = root
        for n in (*family, node):
            self.now[n] = made
        return made

    def _made(self, node: fx.Node, call: tuple[str, Any], given: Any, fake: torch.Tensor) -> fx.Node | None:
        """Creates the node that computes the result of an in-place ``node``. Returns None if it cannot.

        A result of another dtype is cast, as the step casts it.
        """
        (op, target), copy = call, self.result.graph
        args, kwargs = fx.node.map_arg((given, node.kwargs), self.now.__getitem__)
        if target is torch.zeros_like:
            args = args[:1]
        step = f".{target}" if op == "call_method" else target
        for kind, called, given_to in ((*call, args), ("call_function", stored, (fake.dtype, step, *args))):
            new = copy.create_node(kind, called, given_to, kwargs)
            try:
                result = self.effects.result(new)
            except Exception:  # what cannot be computed this way stays in place
                result = None
            alike = isinstance(result, torch.Tensor) and result.dtype == fake.dtype and result.dim() == fake.dim()
            if alike and all(map(compat.routing.same_size, result.shape, fake.shape)):
                new.meta = {**node.meta, "example_value": result}
                return new
            copy.erase_node(new)
        return None

    def _owns(self, root: fx.Node) -> bool:
        """Returns whether a node's result is a new tensor or a view of one that the graph made, not of an input."""
        key, of = self.effects.storages(root), self.effects.storages
        held = [a for a in root.all_input_nodes if key[0] in of(a)]
        if len(held) == 1 and (root.target is operator.getitem or (root.op == "call_method" and root.target in _VIEWS)):
            return self._owns(held[0])
        return isinstance(example(root), torch.Tensor) and root.op.startswith("call_") and not held


def _fills_slice(node: fx.Node, part: fx.Node) -> bool:
    """Returns whether ``node`` is ``x[index].copy_(y)`` with a result that nothing reads; ``part`` is ``x[index]``."""
    if node.op != "call_method" or node.target != "copy_" or node.users or len(node.args) != 2 or node.kwargs:
        return False
    sliced = part.op == "call_function" and part.target is operator.getitem and len(part.all_input_nodes) == 1
    base = example(part.all_input_nodes[0]) if sliced else None
    return isinstance(base, torch.Tensor) and compat.storage_key(base) == compat.storage_key(example(part))


def _call(node: fx.Node, before: fx.Node) -> tuple[str, Any] | None:
    """Returns (op, target) of the call that computes the tensor after an in-place ``node`` wrote ``before``, or None."""
    return ("call_function", put) if _fills_slice(node, before) else _plain(node)
