# SPDX-License-Identifier: Apache-2.0
"""Range checks of the indices that scatter, gather and indexing take.

An index tensor is proved to be in range, or checked at run time where the model's own call is removed.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mhc_inductor.routing.graph.expressions import Ref, aten, whole
from mhc_inductor.routing.graph.gates import CLAMPS, limits
from mhc_inductor.routing.graph.index import ONE, Size, Var
from mhc_inductor.routing.graph.linear import Linear
from mhc_inductor.routing.graph.values import Value, example
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.elements import ARANGE, SHOWN, WHOLE, argument, constant_of, filling
from mhc_inductor.routing.masks.layouts import Layouts

PICKS = (aten.topk.default, aten.sort.default, aten.sort.stable)
_DEPTH = 32


def in_range(a: Any, size: Size, depth: int = _DEPTH) -> bool:
    """Checks whether a number, or every element of an integer tensor, is known to be in [0, ``size``)."""
    known = constant_of(a)
    if known is not None:
        return known >= 0 and (known < size.factor or (bool(size.symbols) and known == 0))
    # A cast to fewer bits wraps large numbers, one from floating point gives any number for NaN.
    if not isinstance(a, Value) or depth == 0 or a.func is None or a.dtype not in WHOLE:
        return False
    func, args = a.func, a.args

    def each(*values: Any) -> bool:
        return all(in_range(v, size, depth - 1) for v in values)

    if func in PICKS:
        return picked_size(a) == size
    if func in ARANGE and len(args) == 1:
        most = a.shape[0]
        return most == size or (not most.symbols and not size.symbols and most.factor <= size.factor)
    if func in SHOWN:
        return each(args[0])
    if func in (aten.cat.default, aten.stack.default):
        return each(*args[0])
    if (filled := filling(a)) is not None:
        return each(*filled[2:])
    if func in CLAMPS:
        bounds = [b for b in limits(a) if b is not None]
        return each(*bounds) and (len(bounds) == 2 or each(args[0]))
    if func is aten.remainder.Scalar:
        return not size.symbols and isinstance(args[1], int) and 0 < args[1] <= size.factor
    return False


def picked_size(value: Value) -> Size | None:
    """Returns the size of the dim whose positions ``value`` holds as a topk's or sort's, None if it is not known."""
    if value.func not in PICKS or value.out != 1:
        return None
    of, d = value.args[0], argument(value, "dim")
    return of.shape[d] if of.shape else None


@dataclasses.dataclass(frozen=True)
class Check:
    """A check that ``index`` is in a dim of ``size`` at each value of ``variables``.

    ``wraps``: negative indices count from the end.
    """

    index: Linear
    variables: tuple[Var, ...]
    size: Size
    wraps: bool


class Indices:
    """The index tensors of calls that routing removes, and the sizes of the dims that they index."""

    def __init__(self) -> None:
        self.found: dict[tuple[Value, Size, bool], Check | None] = {}

    def take(self, index: Value, size: Size, wraps: bool, number: Callable[[Ref], Linear]) -> None:
        """Records a check of an index tensor, unless it is known to be in range.

        ``number`` gives the whole number that an element is, so that the check reads the same tensors as the mask.
        """
        key = (index, size, wraps)
        if key in self.found or index.dtype is torch.bool or in_range(index, size):
            return
        ref = whole(index)
        found = number(ref)
        real = all(d.ref.value.node is not None for d in found.data())
        variables = tuple(v for i in ref.index for v in i.variables() if v.size != ONE)
        self.found[key] = Check(found, variables, size, wraps) if real and found.data() else None

    def values(self) -> list[Value]:
        """Returns the tensors that the checks read."""
        return [d.ref.value for check in self.found.values() if check is not None for d in check.index.data()]

    def checked(self, layouts: Layouts, ranges: fx.Node, of: Callable[[Linear, list[Var]], fx.Node]) -> fx.Node:
        """Returns ``ranges``, computed so that an index out of range raises as in the model's own call.

        ``of`` emits a number as a tensor with a dim for each variable. An index is not checked if no input has the
        size of its dim, for example a number of blocks in a sequence of dynamic length.
        """
        emit = layouts.edit.emit
        for check in filter(None, self.found.values()):
            try:
                length = layouts.size(check.size)
            except Mismatch:
                continue
            index = emit("reshape", emit("to", of(check.index, list(check.variables)), torch.int64), -1)
            places = emit(torch.arange, length, device=example(index).device)
            same = emit(operator.getitem, places, index) if check.wraps else emit("gather", places, 0, index)
            # Always 0: the difference is 0, or ``length`` for a negative index that wraps.
            off = emit("remainder", emit(operator.sub, same, index), length)
            ranges = emit(operator.add, ranges, emit("to", emit("sum", off), example(ranges).dtype))
        return ranges
