# SPDX-License-Identifier: Apache-2.0
"""Finds where the vectors of E79's steps are stored: along time in one tensor, side by side, or one tensor each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from torch import fx

from mhc_inductor.routing.edit import node_of
from mhc_inductor.routing.graph.expressions import Ref, shown
from mhc_inductor.routing.graph.index import ONE, Size, Var
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.operators.e79.terms import Frame, Leaf


@dataclasses.dataclass(frozen=True)
class Slot:
    """How a tensor holds a vector of one step: the meaning of each of its dimensions."""

    dims: tuple[Any, ...]
    """One entry per dimension: ("at", offset) for elements, ("lead", k) for a leading dim, ("const", c) for index c.

    Where one dimension merges time and batch: ("rows", t) if time is the outer of the two, ("columns", t) if the inner.
    """


def slot(ref: Ref, frame: Frame, time: Var | None = None) -> Slot | None:
    """Returns the place of ``ref``, an element at ``frame.at``, in its tensor, or None.

    With ``time``, ``ref`` is of all steps, and the dimension of time is ("time", 0).
    """
    dims: list[Any] = []
    for index, size in zip(ref.index, ref.value.shape, strict=True):
        terms = dict(index.terms)
        fixed = terms.pop(None, Size(0))
        if not terms:
            if fixed.symbols:
                return None
            dims.append(("const", fixed.factor))
            continue
        if len(terms) != 1:
            return None
        (atom, step), *_ = terms.items()
        if atom is frame.at and step == ONE and not fixed.symbols:
            dims.append(("at", fixed.factor))
        elif time is not None and atom is time and step == ONE and fixed.factor == 0 and size == atom.size:
            dims.append(("time", 0))
        elif atom in frame.lead and step == ONE and fixed.factor == 0 and size == atom.size:
            dims.append(("lead", frame.lead.index(atom)))
        elif len(frame.lead) == 1 and atom is frame.lead[0]:
            before, after = fixed.over(atom.size) if fixed.factor else fixed, size.over(step)
            if step == ONE and before is not None and not before.symbols and size.over(atom.size) is not None:
                dims.append(("rows", before.factor))
            elif after == atom.size and not fixed.symbols and not step.symbols and fixed.factor < step.factor:
                dims.append(("columns", fixed.factor))
            else:
                return None
        else:
            return None
    kinds = [d[0] for d in dims]
    if kinds.count("at") != 1 or len({d for d in dims if d[0] == "lead"}) != kinds.count("lead"):
        return None
    return Slot(tuple(dims))


def places(leaf: Leaf, frame: Frame) -> list[tuple[Value, Slot]]:
    """Returns every tensor that holds the vector, the outermost first, up to a rounding of the model's."""
    every = [(ref.value, slot(ref, frame)) for ref in shown(leaf.ref) if ref.value.node is not None]
    return [(value, at) for value, at in every if at is not None]


@dataclasses.dataclass
class Held:
    """One tensor that holds a vector of every step.

    ``time`` is the dimension of time, or the one that merges time and batch; None where all steps share the vector.
    ``start`` and ``stride`` are the index of the first step and the distance between steps.
    """

    value: Value
    slot: Slot
    time: int | None
    start: int = 0
    stride: int = 1

    @property
    def node(self) -> fx.Node:
        """The node of the tensor."""
        return node_of(self.value)


def sequence(leaves: Sequence[Leaf], frame: Frame) -> Held | None:
    """Returns the innermost tensor that holds all of ``leaves`` at evenly spaced places, or None."""
    every = [dict(places(leaf, frame)) for leaf in leaves]
    for value, first in reversed(every[0].items()):
        slots = [each.get(value) for each in every]
        if any(s is None for s in slots):
            continue
        rows = [s.dims for s in slots if s is not None]
        moving = [d for d in range(len(first.dims)) if len({r[d] for r in rows}) > 1]
        if not moving:
            merged = [d for d, (kind, _) in enumerate(first.dims) if kind in ("rows", "columns")]
            single = [d for d, (kind, _) in enumerate(first.dims) if kind == "const"]
            if len(leaves) == 1 and single and not merged:
                moving = single[:1]  # with one step, time is the first dimension that is neither batch nor vector
            elif len(merged) == 1:
                moving = merged
            elif not merged:
                return Held(value, first, None)
            else:
                continue
        if len(moving) != 1 or first.dims[moving[0]][0] not in ("const", "rows", "columns"):
            continue
        at = moving[0]
        if any(kind in ("rows", "columns") for d, (kind, _) in enumerate(first.dims) if d != at):
            continue
        numbers = [r[at][1] for r in rows]
        stride = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        if stride == 0 or any(b - a != stride for a, b in itertools.pairwise(numbers)):
            continue
        return Held(value, first, at, numbers[0], stride)
    return None


def side_by_side(slots: list[Slot], value: Value, n: int, time: int | None) -> str | None:
    """Returns how ``value`` holds k, v, q and m: "last" (concatenated), "apart" (a dimension of size 4), or None."""
    first = slots[0]
    differ = [d for d in range(len(first.dims)) if len({s.dims[d] for s in slots}) > 1]
    if len(differ) != 1 or any(len(s.dims) != len(first.dims) for s in slots):
        return None
    d = differ[0]
    at = [s.dims[d] for s in slots]
    if at == [("at", k * n) for k in range(4)] and value.shape[d] == Size(4 * n):
        return "last"
    others = [k for k, (kind, _) in enumerate(first.dims) if kind == "const" and k != time]
    if at == [("const", k) for k in range(4)] and value.shape[d] == Size(4) and others[-1:] == [d]:
        vector = [kind for kind, _ in first.dims].index("at")
        return "apart" if value.shape[vector] == Size(n) else None
    return None
