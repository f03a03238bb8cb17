# SPDX-License-Identifier: Apache-2.0
"""Emits the keys that every query sees, as ranges [B, S, G, r, 2]."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import ONE, Index, Size, Unsupported, Var
from mhc_inductor.routing.graph.linear import Atom, Datum, Floor, Linear, of_index, of_size, variables_of
from mhc_inductor.routing.graph.values import example
from mhc_inductor.routing.operators.selection.intervals import Interval
from mhc_inductor.routing.operators.selection.keys import Compare, Given, Literal
from mhc_inductor.routing.operators.selection.layouts import Layouts, layout
from mhc_inductor.routing.operators.selection.matches import Found


def ranges(layouts: Layouts, one: Found, device: torch.device) -> fx.Node:
    """Returns the node of the ranges of all intervals of an attention."""
    parts = [_part(layouts, one, each, device) for each in one.intervals]
    return parts[0] if len(parts) == 1 else layouts.edit.emit(torch.cat, parts, -2)


def _part(layouts: Layouts, one: Found, each: Interval, device: torch.device) -> fx.Node:
    """Emits the ranges of one interval."""
    emit = layouts.edit.emit
    lead = [one.batch, one.query, one.groups, list(each.bound)]
    order = [v for digits in lead for v in digits if v.size != ONE]
    whole = _as_they_are(one, each)
    if whole is not None:
        pair = Var(Size(2))
        ref = Ref(whole.value, (*whole.index[:-1], Index({pair: ONE})))
        if layout(ref, {*order, pair}, layouts.equal) is not None:
            return _ranged(layouts, layouts.spread(ref, [*order, pair]), order, lead)
    numbers = Numbers(layouts, order, device)
    low = numbers.extreme([x for x in each.lowers if x.value is None or x.value > 0], torch.maximum)
    ends = [x for x in each.uppers if x != of_size(one.t.size)]
    high = numbers.extreme(ends or [of_size(one.t.size)], torch.minimum)
    low = numbers.of(Linear()) if low is None else low
    assert high is not None
    for condition in each.conditions:
        if not _implied(condition, each):
            high = emit(torch.where, numbers.holds(condition), high, 0)
    if len(example(low).shape) != len(example(high).shape):
        raise Unsupported
    pairs = emit(torch.broadcast_tensors, low, high)
    node = emit(torch.stack, [emit(operator.getitem, pairs, 0), emit(operator.getitem, pairs, 1)], -1)
    return _ranged(layouts, node, order, lead)


def _ranged(layouts: Layouts, node: fx.Node, order: list[Var], lead: list[list[Var]]) -> fx.Node:
    """Returns starts and ends, which have a dim for each digit, as ranges with one dim for each part of ``lead``."""
    sizes = example(node).shape
    if any(not isinstance(s, torch.SymInt) and s == 1 for s in sizes[: len(order)]):
        node = layouts.edit.emit("expand", node, *[layouts.size(v.size) for v in order], 2)
    return layouts.joined(node, lead, 1)


def _as_they_are(one: Found, each: Interval) -> Ref | None:
    """Returns the model's tensor of starts and ends if nothing else determines the keys, None otherwise."""
    ends = [x for x in each.uppers if x != of_size(one.t.size)]
    if len(each.lowers) != 1 or len(ends) != 1 or each.conditions:
        return None
    data = []
    for x in (each.lowers[0], ends[0]):
        if x.constant or len(x.terms) != 1:
            return None
        ((a, c),) = x.terms
        if c != 1 or not isinstance(a, Datum) or a.wrap is not None:
            return None
        data.append(a.ref)
    start, end = data
    if start.value is not end.value or start.value.shape[-1:] != (Size(2),):
        return None
    same = start.index[:-1] == end.index[:-1]
    return start if same and (start.index[-1].constant, end.index[-1].constant) == (0, 1) else None


def _implied(condition: Literal, each: Interval) -> bool:
    """Checks whether ``condition`` says no more than that a block's id is not negative.

    It need not be emitted: the keys of a negative block would lie before the first key.
    """
    if not isinstance(condition, Compare) or len(condition.value.terms) != 1:
        return False
    ((a, c),) = condition.value.terms
    constant = condition.value.minus(Linear(condition.value.terms)).value
    if (condition.kind, c, constant) not in (("le", -1, 0), ("ne", 1, 1), ("ne", -1, -1)):
        return False
    return any(high.terms == frozenset({(a, w)}) and high.offset <= w for high in each.uppers for _, w in high.terms)


class Numbers:
    """Emits whole numbers as tensors with a dim for each variable of ``order``, of size 1 if independent of it.

    ``at``: nodes in place of variables that are not in ``order``.
    """

    def __init__(self, layouts: Layouts, order: list[Var], device: torch.device) -> None:
        self.layouts = layouts
        self.emit = layouts.edit.emit
        self.order = order
        self.device = device
        self.at: dict[Var, fx.Node] = {}

    def of(self, x: Linear) -> fx.Node:
        """Returns the node of a whole number."""
        total: fx.Node | None = None
        for a, c in sorted(x.terms, key=lambda term: not isinstance(term[0], Datum)):
            node = self._atom(a)
            node = node if abs(c) == 1 else self.emit(operator.mul, node, abs(c))
            if total is None:
                total = node if c > 0 else self.emit(operator.neg, node)
            else:
                total = self.emit(operator.add if c > 0 else operator.sub, total, node)
        constant = self._constant(x)
        if total is None:
            value = 0 if constant is None else constant
            return self.emit(torch.full, [1] * len(self.order), value, dtype=torch.int64, device=self.device)
        return total if constant is None else self.emit(operator.add, total, constant)

    def _constant(self, x: Linear) -> Any:
        """Returns the constant part of a number as an int or a node, None if it is 0."""
        constant: Any = None
        for symbols, c in sorted(x.constant):
            if not symbols:
                part: Any = c
            else:
                part = self.layouts.size(Size(1, symbols))
                part = part if c == 1 else self.emit(operator.mul, part, c)
            constant = part if constant is None else self.emit(operator.add, constant, part)
        return constant

    def extreme(self, bounds: list[Linear], pick: Any) -> fx.Node | None:
        """Returns the node of the largest or smallest of ``bounds``, None without bounds."""
        nodes = [self.of(x) for x in dict.fromkeys(bounds)]
        return functools.reduce(lambda a, b: self.emit(pick, a, b), nodes) if nodes else None

    def holds(self, condition: Literal) -> fx.Node:
        """Returns the node of a condition's truth value."""
        if isinstance(condition, Given):
            node = self.element(condition.ref)
            if not condition.want:
                return self.emit(torch.logical_not, node)
            return node if condition.ref.value.dtype is torch.bool else self.emit(operator.ne, node, 0)
        kinds = {"le": operator.le, "eq": operator.eq, "ne": operator.ne}
        return self.emit(kinds[condition.kind], self.of(condition.value), 0)

    def _atom(self, a: Atom) -> fx.Node:
        if isinstance(a, Var) and a in self.at:
            return self.at[a]
        if isinstance(a, Var):
            node = self.emit(torch.arange, self.layouts.size(a.size), device=self.device)
            return self.emit(operator.getitem, node, tuple(slice(None) if v is a else None for v in self.order))
        if isinstance(a, Floor):
            return self.emit(operator.floordiv, self.of(a.of), a.by)
        node = self.element(a.ref)
        if a.wrap is not None:
            wrapped = self.emit(operator.add, node, self.layouts.size(a.wrap))
            node = self.emit(torch.where, self.emit(operator.lt, node, 0), wrapped, node)
        return node

    def size_of(self, x: Linear) -> Any:
        """Returns a sum of sizes as an int or a node."""
        return self._constant(x)

    def element(self, ref: Ref) -> fx.Node:
        """Returns an element of a tensor, read at indices inside of it."""
        used = variables_of(ref)
        if not used <= {*self.order, *self.at}:
            raise Unsupported
        if layout(ref, set(self.order), self.layouts.equal) is not None:
            return self.layouts.spread(ref, self.order)
        node = self.layouts.edit.input(ref.value)
        places = [
            self._place(i, size, not used.isdisjoint(self.at))
            for i, size in zip(ref.index, ref.value.shape, strict=True)
        ]
        return self.emit(operator.getitem, node, tuple(places))

    def _place(self, index: Index, size: Size, clamped: bool) -> fx.Node:
        """Returns an index of a dim; ``clamped`` to the dim where a key that is not visible may lie outside."""
        found = self.of(of_index(index))
        if not clamped or not any(v in self.at for v in index.variables()):
            return found
        # Not clamp or minimum: Inductor follows these into the addresses of loads, and fails there inside a
        # concatenation (torch 2.11 to 2.13: "The argument '-63 + ((0))' is not comparable"). It does not follow where.
        found = self.emit(torch.where, self.emit(operator.lt, found, 0), 0, found)
        last = self.layouts.size(size)
        last = last - 1 if isinstance(last, int) else self.emit(operator.sub, last, 1)
        return self.emit(torch.where, self.emit(operator.gt, found, last), last, found)
