# SPDX-License-Identifier: Apache-2.0
"""Takes K and V of an attention apart: the parts that are a linear map of a latent, and those that all heads share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from mhc_inductor.routing.graph.bounds import Steps
from mhc_inductor.routing.graph.expressions import Ref, aten, joined, peel, step
from mhc_inductor.routing.graph.index import Index, Size, Unsupported, Var, const, var
from mhc_inductor.routing.graph.linear import variables_of
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.masks.layouts import best, layout
from mhc_inductor.routing.masks.operands import Source, dot, sources

_DEFAULTS = (0, None, None, 1)
"""The arguments of ``slice_scatter`` after its two tensors."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """The element of a projection's weight at a head, a feature and the latent; see :func:`rows_of`."""

    source: Source
    feature: Var
    latent: Var


@dataclasses.dataclass(frozen=True)
class Part:
    """The features ``[start, start + size)`` of ``of``, an element of K or V.

    ``shared``: the element of what all heads have there, None for a linear map of the latent. ``c`` and ``weight``: the
    candidates for the latent, the nearest first, and the map; None for a shared part.
    """

    of: Ref
    start: int
    feature: Var
    shared: Source | None = None
    c: tuple[Source, ...] = ()
    weight: Weight | None = None


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Elements below ``of``, K or V, that start at its feature ``start``, which ``feature`` counts from there."""

    of: Ref
    start: int
    ref: Ref
    dtype: torch.dtype
    feature: Var


def parts_of(ref: Ref, feature: Var, rows: Sequence[Var], head: Var) -> list[Part]:
    """Returns the parts of K or V along ``feature``. Raises Unsupported, DynamicWidth and TooLarge.

    Args:
        ref: the element.
        feature: its feature.
        rows: the other digits that it may depend on, without the head.
        head: the digit of the head.
    """
    steps, found = Steps("parts of K", ref.value), list[Part]()
    todo = [_Piece(ref, 0, ref, ref.value.dtype, feature)]
    while todo:
        steps.take()
        piece = todo.pop()
        below = [*sources(piece.ref)]
        last = _narrowed(below[-1], piece.dtype)
        if any(head not in variables_of(s.ref) for s in below):
            found.append(_shared(piece, [*rows, piece.feature]))
        elif (cut := _cut(piece, last)) is not None:
            todo += reversed(cut)
        else:
            found.append(_projected(last, piece, rows, head))
    return found


def _narrowed(source: Source, dtype: torch.dtype) -> Source:
    """Returns a source, read in ``dtype`` if that is narrower."""
    narrow = torch.finfo(dtype).bits < torch.finfo(source.dtype).bits
    return dataclasses.replace(source, dtype=dtype) if narrow else source


def _shared(piece: _Piece, digits: list[Var]) -> Part:
    found = best(piece.ref, digits)
    if found is None:
        raise Unsupported
    return Part(piece.of, piece.start, piece.feature, shared=_narrowed(found, piece.dtype))


def _cut(piece: _Piece, source: Source) -> list[_Piece] | None:
    """Returns the pieces of a concatenation, or of a tensor that slices were written to, along the feature."""
    ref, feature = source.ref, piece.feature
    sections = _sections(ref.value)
    if sections is None:
        return None
    dim, each = sections
    at = dict(ref.index[dim].terms)
    offset = at.pop(None, Size(0))
    others = {v for d, i in enumerate(ref.index) if d != dim for v in i.variables()}
    if Index(at) != var(feature) or offset.symbols or feature.size.symbols or feature in others:
        return None
    pieces = []
    for low, high, value, shift in each:
        first, last = max(low - offset.factor, 0), min(high - offset.factor, feature.size.factor)
        if first < last:
            inner, index = Var(Size(last - first)), list(ref.index)
            index[dim] = var(inner).plus(const(first + offset.factor - shift))
            pieces.append(_Piece(piece.of, piece.start + first, Ref(value, tuple(index)), source.dtype, inner))
    return pieces


def _sections(value: Value) -> tuple[int, list[tuple[int, int, Value, int]]] | None:
    """Returns (dim, sections): each a range of the dim, the value that has it, and the position of its element 0."""
    if value.func is aten.cat.default:
        dim, pieces = joined(value)
        sizes = [p.shape[dim] for p in pieces]
        if any(size.symbols for size in sizes):
            return None
        ends = [sum(s.factor for s in sizes[: k + 1]) for k in range(len(sizes))]
        return dim, [(end - s.factor, end, p, end - s.factor) for end, s, p in zip(ends, sizes, pieces, strict=True)]
    if value.func is not aten.slice_scatter.default:
        return None
    given: list[Any] = [*value.args, *_DEFAULTS[len(value.args) - 2 :]]
    base, new, dim, start, end, by = given
    dim %= len(value.shape)
    size, width = value.shape[dim], new.shape[dim]
    if size.symbols or width.symbols or by != 1 or not all(x is None or isinstance(x, int) for x in (start, end)):
        return None
    low = min(max(start + size.factor if (start or 0) < 0 else start or 0, 0), size.factor)
    high = low + width.factor
    return dim, [(0, low, base, 0), (low, high, new, low), (high, size.factor, base, 0)]


def _projected(source: Source, piece: _Piece, rows: Sequence[Var], head: Var) -> Part:
    """Returns the part that is a product of a latent and a weight. Raises Unsupported for anything else."""
    found = dot(source.ref)
    bound = [] if found is None else [v for v in found[2] if v.size != Size(1)]
    if found is None or len(bound) != 1 or bound[0].size.symbols:
        raise Unsupported
    (latent,) = bound
    sides = [side for side in found[:2] if {head, piece.feature} & variables_of(side)]
    if len(sides) != 1:
        raise Unsupported  # a projection of a tensor that differs between the heads
    c = found[1] if sides[0] is found[0] else found[0]
    digits = {*rows, latent}
    plain = (s for s in sources(c) if s.ref.value.node is not None and layout(s.ref, digits, set()) is not None)
    held = tuple(_narrowed(s, source.dtype) for s in plain)
    if not held:
        raise Unsupported
    weight = _weight(sides[0], source.dtype, head, piece.feature, latent)
    return Part(piece.of, piece.start, piece.feature, None, held, weight)


def _weight(ref: Ref, dtype: torch.dtype, head: Var, feature: Var, latent: Var) -> Weight:
    """Returns the weight of a projection. Raises Unsupported unless it is a 2-d input of the graph, or a cast of one."""
    *_, last = sources(ref)
    value, root = last.ref.value, peel(last.ref).value
    given = root.func is None and root.node is not None and root.node.op in ("placeholder", "get_attr")
    below = step(last.ref)
    wide = min(torch.finfo(root.dtype).bits, torch.finfo(value.dtype).bits) >= 16
    computed = not given or value.node is None or (below is not None and below.value is not root)
    weight = Weight(_narrowed(last, dtype), feature, latent)
    if computed or not wide or len(value.shape) != 2 or rows_of(weight, head) is None:
        raise Unsupported
    return weight


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which elements of a weight are those of the heads.

    ``dim``: the dim of the rows. From row ``first`` on there are ``stride`` rows for each head, of which ``count`` from
    ``start`` on are meant. ``columns``: the range of the latent in the other dim.
    """

    dim: int
    first: int
    stride: int
    start: int
    count: int
    columns: slice


def rows_of(weight: Weight, head: Var) -> Rows | None:
    """Returns the rows of a weight, None if they are not one equally long run for each head."""
    ref = weight.source.ref
    dim = next((d for d, i in enumerate(ref.index) if weight.latent not in i.variables()), None)
    if dim is None or any(size.symbols for size in ref.value.shape):
        return None
    terms, columns = dict(ref.index[dim].terms), dict(ref.index[1 - dim].terms)
    offset, shift = (each.pop(None, Size(0)).factor for each in (terms, columns))
    stride = terms.pop(head, Size(0)).factor
    if Index(terms) != var(weight.feature) or Index(columns) != var(weight.latent):
        return None
    count, heads, rows = weight.feature.size.factor, head.size.factor, ref.value.shape[dim].factor
    if stride < count:
        return None
    for first in (offset - offset % stride, offset):
        if offset - first + count <= stride and first + heads * stride <= rows:
            return Rows(dim, first, stride, offset - first, count, slice(shift, shift + weight.latent.size.factor))
    return None
