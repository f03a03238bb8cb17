# SPDX-License-Identifier: Apache-2.0
"""What a graph computes of one tensor alone, run on other data: in fp64, on the CPU, with other numbers of tokens."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.cutter import Cutter
from mhc_inductor.routing.extract import Piece, copied
from mhc_inductor.routing.graph.expressions import number
from mhc_inductor.routing.graph.index import product_of
from mhc_inductor.routing.graph.values import Value, elements_read, example, inner, name_of, reached
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.masks.elements import constant_of
from mhc_inductor.routing.verify import Feed

_NODES = 2000
"""The most nodes of a region."""
_FEWEST = 30
"""Each dimension of tokens has as many or more in one of the runs."""
_INDEXED = {
    "getitem", "setitem", "select", "narrow", "slice", "index_fill", "index_copy", "index_add", "index_select",
    "slice_scatter", "select_scatter", "index_put", "scatter", "gather", "take", "take_along_dim", "masked_scatter",
    "tril", "triu", "arange",
}  # fmt: skip
"""Calls that name positions."""
_NUMBERS = {"number", "float", "Tensor", "Optional[number]", "Optional[float]"}
"""Types of arguments that are numbers, and no dims or sizes."""


class Region:
    """The nodes that ``root`` and numbers alone determine, among those that ``admit`` takes, the same for every token."""

    def __init__(self, view: View, root: fx.Node, admit: Callable[[fx.Node], bool]) -> None:
        self.view, self.root = view, root
        self.inside, seen, todo = set[fx.Node](), {root}, [(view.order[root], root)]
        while todo:  # in graph order: what a node reads is decided before it
            node = heapq.heappop(todo)[1]
            if node is not root and not self._determined(node, admit):
                continue
            self.inside.add(node)
            for user in node.users:
                calls = user not in seen and user in view.live and user.op in ("call_function", "call_method")
                if calls and len(seen) < _NODES and node in elements_read(user):
                    seen.add(user)
                    heapq.heappush(todo, (view.order[user], user))
        self.nodes = sorted(self.inside - {root}, key=view.order.__getitem__)
        self.values = [v for n in self.nodes if (v := view.value(n)) is not None]

    def _determined(self, node: fx.Node, admit: Callable[[fx.Node], bool]) -> bool:
        """Checks whether what is inside and numbers alone determine a node, the same for every token."""
        read = all(a in self.inside or self._uniform(a) for a in elements_read(node))
        return read and admit(node) and not far(self.view, node)

    def _uniform(self, node: fx.Node) -> bool:
        """Checks whether a node is determined by sizes and numbers, and has one number or is no larger than a matrix."""
        value, root = self.view.value(node), self.view.value(self.root)
        if value is None or root is None or node not in self.view.constants:
            return value is None and node in self.view.constants
        small = product_of(root.shape[-2:]).over(product_of(value.shape)) is not None
        return small or constant_of(value) is not None  # others, such as positions, tell tokens apart


def far(view: View, node: fx.Node) -> bool:
    """Checks whether a call reads or writes at a position that few tokens do not have."""
    for call in (node, view.reader.get(node), view.through.get(node)):  # a step in place, of a part
        if call is not None and name_of(call).strip("_") in _INDEXED:
            leaves = compat.tree_leaves((call.args, call.kwargs))
            at = [i for a in leaves for i in ((a.start, a.stop, a.step) if isinstance(a, slice) else (a,))]
            at = [example(i) if isinstance(i, fx.Node) else i for i in at]
            if any(isinstance(i, (int, torch.SymInt)) and not (type(i) is int and abs(i) < _FEWEST) for i in at):
                return True
    return False


def piece_of(view: View, root: fx.Node, ends: Sequence[fx.Node]) -> Piece:
    """Returns a piece that computes ``ends`` from ``root``."""
    every = reached(ends, lambda n: (a for a in elements_read(n) if a.op.startswith("call_") and a is not root))
    made = Piece()
    made.input(root)
    at = copied(view, made, every, ends, {})
    made.outputs = [at[node] for node in ends]
    return made


def cut(piece: Piece, root: fx.Node, few: Sequence[int], held: Feed | None = None) -> tuple[Piece, Feed, int]:
    """Returns a piece with ``few`` as the sizes of the root's leading dimensions, inputs, and its number of tokens.

    ``held`` has the inputs that stay as they are. Raises NotRun.
    """
    old = [*map(compat.routing.hint, example(root).shape)]
    sizes = itertools.cycle(few)
    new = [size if size == 1 else next(sizes) for size in old[:-2]]
    tokens = [(a, b) for a, b in zip(old, new, strict=False) if a > 1]
    given = {n: example(n).node.hint for n in piece.inputs if isinstance(example(n), (torch.SymInt, torch.SymFloat))}
    wanted = {piece.inputs[root]: [*new, *old[-2:]]}
    small, feed, _ = next(Cutter(piece, tokens, wanted).fitting(given | (held or {})))
    return small, feed, feed[root][..., 0, 0].numel()


def fix(piece: Piece) -> None:
    """Fixes the floats that the graph leaves dynamic and that the piece reads: it was run for these numbers alone."""
    for node in piece.inputs:
        if isinstance(example(node), torch.SymFloat):
            number(example(node))


def root_of(
    view: View, node: fx.Node, fits: Callable[[Value], bool], admit: Callable[[fx.Node], bool]
) -> fx.Node | None:
    """Returns the earliest node that ``fits`` and through which goes all that ``node`` is computed from, or None."""
    found, todo = None, {node}
    for _ in range(_NODES):
        at = max(todo, key=view.order.__getitem__)
        todo.remove(at)
        value = view.value(at)
        if not todo and value is not None and fits(value):
            found = at
        if not admit(at):
            return found
        todo.update(a for a in elements_read(at) if a not in view.constants)
        if not todo or sum(not a.op.startswith("call_") for a in todo) > 1:
            return found
    return found


def numbers_in(values: Iterable[Value]) -> list[float]:
    """Returns the sizes of the numbers that the operations of values and of what is inside their nodes take, without 0."""
    found = dict[float, None]()
    for value in dict.fromkeys(v for outer in values for v in inner(outer)):
        schema = value.func._schema.arguments if isinstance(value.func, compat.OpOverload) else ()
        given = [*zip(schema, value.args, strict=False), *((a, value.kwargs.get(a.name)) for a in schema)]
        for argument, a in given:
            a = a.node.hint if isinstance(a, torch.SymFloat) else a
            if str(argument.type) in _NUMBERS and isinstance(a, (int, float)):
                found[abs(float(a))] = None
    return [a for a in found if 0 < a < math.inf]
