# SPDX-License-Identifier: Apache-2.0
"""Tensors as arrays of digits, and the views that bring their dims into a wanted order."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.edit import Edit
from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import ONE, Size, Unsupported, Var, size_of
from mhc_inductor.routing.graph.linear import variables_of
from mhc_inductor.routing.graph.values import Value, example
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.operands import Joined, Source, held, sources


def layout(ref: Ref, known: set[Var], equal: Set[frozenset[Size]]) -> list[tuple[Any, list[Var]]] | None:
    """Returns how ``ref`` indexes each dim of its tensor: pairs of (an index or a slice, digits).

    Returns None if the tensor is not a plain array of distinct digits. ``known``: the digits that may occur.
    ``equal``: pairs of sizes that are the same number.
    """
    result: list[tuple[Any, list[Var]]] = []
    met: set[Var] = set()
    for index, size in zip(ref.index, ref.value.shape, strict=True):
        terms = dict(index.terms)
        constant = terms.pop(None, Size(0))
        if (
            constant.symbols
            or constant.factor < 0
            or any(not isinstance(v, Var) or v not in known or v in met for v in terms)
        ):
            return None
        if not terms:
            result.append((slice(None), []) if size == ONE else (constant.factor, []))
            continue
        digits, reach = _digits(terms)
        if digits is None:
            return None
        met.update(digits)
        if (reach == size or frozenset({reach, size}) in equal) and not constant.factor:
            result.append((slice(None), digits))
        elif not reach.symbols and not size.symbols and constant.factor + reach.factor <= size.factor:
            result.append((slice(constant.factor, constant.factor + reach.factor), digits))
        else:
            return None
    return result


def _digits(terms: dict[Any, Size]) -> tuple[list[Var] | None, Size]:
    """Returns the digits of a number, the most significant first, and how many values they span."""
    digits: list[Var] = []
    reach = ONE
    while terms:
        v = next((v for v, c in terms.items() if c == reach), None)
        if v is None:
            return None, reach
        del terms[v]
        digits.insert(0, v)
        reach = reach.times(v.size)
    return digits, reach


class Layouts:
    """Emits views of inputs. ``equal``: pairs of sizes that are the same number."""

    def __init__(self, edit: Edit, refs: Iterable[Ref]) -> None:
        self.edit = edit
        self.equal: set[frozenset[Size]] = set()
        self._made: dict[Value, fx.Node] = {}
        self._numbers: dict[Size, Any] = {}
        self._sizes: dict[Size, tuple[fx.Node, int]] = {}
        for ref in refs:
            for d, size in enumerate(ref.value.shape):
                if size.symbols:
                    self._sizes.setdefault(size, (self._input(ref.value), d))
        for node in edit.graph.nodes:
            if node.op == "placeholder" and compat.is_symbol(number := example(node)):
                self._numbers[size_of(number, {})] = node

    def _input(self, value: Value) -> fx.Node:
        """Returns the node of an input, made here if it is concatenated from several."""
        if not isinstance(value, Joined):
            return self.edit.input(value)
        if value not in self._made:
            pieces = [self.edit.to(self.edit.input(piece), value.dtype) for piece in value.args[0]]
            self._made[value] = self.edit.emit(torch.cat, pieces, value.args[1])
        return self._made[value]

    def placed(self, ref: Ref, groups: list[list[Var]]) -> fx.Node:
        """Returns a view with one dim for each of ``groups``, made by joining the group's digits."""
        order = [v for digits in groups for v in digits if v.size != ONE]
        node = self.spread(ref, order)
        missing = [v for v in order if v not in variables_of(ref)]
        if missing:
            node = self.edit.emit("expand", node, *[self.size(v.size) if v in missing else -1 for v in order])
        return self.joined(node, groups)

    def joined(self, node: fx.Node, groups: list[list[Var]], extra: int = 0) -> fx.Node:
        """Returns ``node`` with its dims of digits joined to one dim for each of ``groups``; ``extra`` dims follow."""
        at = len(example(node).shape) - extra
        for digits in reversed(groups):
            count = sum(v.size != ONE for v in digits)
            if count == 0:
                node = self.edit.emit("unsqueeze", node, at)
            elif count > 1:
                node = self.edit.emit("flatten", node, at - count, at - 1)
            at -= count
        return node

    def cat(self, parts: Sequence[fx.Node], dim: int) -> fx.Node:
        """Returns the concatenation of nodes, the node itself if there is one."""
        return parts[0] if len(parts) == 1 else self.edit.emit(torch.cat, [*parts], dim)

    def spread(self, ref: Ref, order: list[Var]) -> fx.Node:
        """Returns a view with a dim for each variable of ``order``, of size 1 if the tensor does not depend on it.

        Raises Unsupported if the tensor is not a plain array of digits.
        """
        found = layout(ref, set(order), self.equal)
        if found is None:
            raise Unsupported
        node, emit = self._input(ref.value), self.edit.emit
        picks = [pick for pick, _ in found]
        if any(pick != slice(None) for pick in picks):
            node = emit(operator.getitem, node, tuple(picks))
        kept = [digits for pick, digits in found if not isinstance(pick, int)]
        dims = [v for digits in kept for v in digits]
        node = self._split(node, kept, [v for v in order if v in dims])
        if len(dims) < len(order):
            node = emit(operator.getitem, node, tuple(slice(None) if v in dims else None for v in order))
        return node

    def back(self, o: fx.Node, groups: list[list[Var]], dims: list[list[Var]]) -> fx.Node:
        """Returns ``o``, which has a dim for each of ``groups``, with the result's dims ``dims``."""
        real = [[v for v in digits if v.size != ONE] for digits in groups]
        return self.joined(self._split(o, real, [v for digits in dims for v in digits if v.size != ONE]), dims)

    def _split(self, node: fx.Node, groups: list[list[Var]], order: list[Var]) -> fx.Node:
        """Returns ``node``, which has a dim for each of ``groups``, with a dim for each digit, in this order."""
        for at, digits in reversed([*enumerate(groups)]):
            if not digits:
                node = self.edit.emit("squeeze", node, at)
            elif len(digits) > 1:
                node = self.edit.emit("unflatten", node, at, tuple(self.size(v.size) for v in digits))
        have = [v for digits in groups for v in digits]
        wanted = [have.index(v) for v in order]
        return node if wanted == sorted(wanted) else self.edit.emit("permute", node, *wanted)

    def give(self, size: Size, number: Any) -> None:
        """Sets the node, or the number, that a size has."""
        self._numbers[size] = number

    def size(self, size: Size) -> Any:
        """Returns a size as an int or a node of the graph. Raises Mismatch if no input has it."""
        if not size.symbols:
            return size.factor
        if size in self._numbers:
            return self._numbers[size]
        if size in self._sizes:
            return self.edit.emit("size", *self._sizes[size])
        for other, place in self._sizes.items():
            for per, op in ((other.over(size), operator.floordiv), (size.over(other), operator.mul)):
                if per is not None and not per.symbols:
                    return self.edit.emit(op, self.edit.emit("size", *place), per.factor)
        if size in self._elsewhere:
            return self.edit.emit("size", *self._elsewhere[size])
        raise Mismatch("a dynamic size cannot be read from an input's shape")

    @functools.cached_property
    def _elsewhere(self) -> dict[Size, tuple[fx.Node, int]]:
        """Returns the dynamic sizes of all tensors computed before the op, each with a (tensor, dim) that has it."""
        found: dict[Size, tuple[fx.Node, int]] = {}
        for node in self.edit.graph.nodes:
            if self.edit.place is not None and node is self.edit.place.anchor:
                break
            fake = example(node)
            for d, s in enumerate(fake.shape) if isinstance(fake, torch.Tensor) else ():
                if not isinstance(s, int):
                    found.setdefault(size_of(s, {}), (node, d))
        return found


def best(ref: Ref, order: list[Var], equal: Set[frozenset[Size]] = frozenset()) -> Source | None:
    """Returns the farthest source that holds q, k or v as a plain array of digits, or None.

    ``equal``: pairs of sizes that are the same number.
    """
    found = None
    for source in sources(ref):
        if held(source.ref.value) and layout(source.ref, set(order), equal) is not None:
            found = source
    return found
