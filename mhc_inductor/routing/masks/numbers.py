# SPDX-License-Identifier: Apache-2.0
"""Emits whole numbers of the normal form, and what holds of them, as nodes."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import Index, Size, Unsupported, Var
from mhc_inductor.routing.graph.linear import Atom, Datum, Floor, Linear, at_least_zero, of_index, of_size, variables_of
from mhc_inductor.routing.masks.keys import Given, Literal
from mhc_inductor.routing.masks.layouts import Layouts, layout


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
        constant = self.size_of(x)
        if total is None:
            value = 0 if constant is None else constant
            return self.emit(torch.full, [1] * len(self.order), value, dtype=torch.int64, device=self.device)
        return total if constant is None else self.emit(operator.add, total, constant)

    def size_of(self, x: Linear) -> Any:
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

    def extreme(self, bounds: list[Linear], pick: Any) -> fx.Node:
        """Returns the node of the largest or smallest of ``bounds``, at least one."""
        return functools.reduce(lambda a, b: self.emit(pick, a, b), map(self.of, dict.fromkeys(bounds)))

    def holds(self, condition: Literal) -> fx.Node:
        """Returns the node of a condition's truth value."""
        if isinstance(condition, Given):
            node = self.element(condition.ref)
            if not condition.want:
                return self.emit(torch.logical_not, node)
            return node if condition.ref.value.dtype is torch.bool else self.emit(operator.ne, node, 0)
        return self.emit(getattr(operator, condition.kind), self.of(condition.value), 0)

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

    def element(self, ref: Ref) -> fx.Node:
        """Returns an element of a tensor, read at indices inside of it."""
        if not variables_of(ref) <= {*self.order, *self.at}:
            raise Unsupported
        if layout(ref, set(self.order), self.layouts.equal) is not None:
            return self.layouts.spread(ref, self.order)
        node = self.layouts.edit.input(ref.value)
        places = (self._place(i, size) for i, size in zip(ref.index, ref.value.shape, strict=True))
        return self.emit(operator.getitem, node, tuple(places))

    def _place(self, index: Index, size: Size) -> fx.Node:
        """Returns an index of a dim, clamped to it where a key that is not visible may lie outside."""
        place = of_index(index)
        found, most = self.of(place), of_size(size).shifted(-1)
        if index.variables().isdisjoint(self.at) and at_least_zero(place) and at_least_zero(most.minus(place)):
            return found
        # Not clamp or minimum: Inductor follows these into the addresses of loads, and fails there inside a
        # concatenation (torch 2.11 to 2.13: "The argument '-63 + ((0))' is not comparable"). It does not follow where.
        found = self.emit(torch.where, self.emit(operator.lt, found, 0), 0, found)
        last = self.layouts.size(size)
        last = last - 1 if isinstance(last, int) else self.emit(operator.sub, last, 1)
        return self.emit(torch.where, self.emit(operator.gt, found, last), last, found)
