# SPDX-License-Identifier: Apache-2.0
"""Absorption of multi-head latent attention: every head attends to the latent itself, not to its own keys and values.

If ``K[h] = [W_k[h] c ; k_rope]`` and ``V[h] = W_v[h] c`` with one latent c for all heads, then
``q[h] . K[h] = [W_k[h].T q_nope ; q_rope] . [c ; k_rope]`` and ``O[h] = W_v[h] (P c)``: one group of all heads, whose keys
are ``[c ; k_rope]`` and whose values are the first columns of the keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from mhc_inductor.routing.edit import Edit
from mhc_inductor.routing.graph.bounds import Steps, TooLarge
from mhc_inductor.routing.graph.expressions import Ref, aten, joined, peel, step
from mhc_inductor.routing.graph.index import ONE, DynamicWidth, Index, Size, Unsupported, Var, const, var
from mhc_inductor.routing.graph.linear import Key, placed, variables_of
from mhc_inductor.routing.graph.values import Value, example, reached
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.masks.layouts import Layouts, best, layout
from mhc_inductor.routing.masks.operands import Pair, Source, dot, sources
from mhc_inductor.routing.operators.selection.matches import Found

_SCORES = "bshd,hdl->bshl"
_OUTPUT = "bshl,hel->bshe"
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


# --- the attention on the latent ---


@dataclasses.dataclass(frozen=True)
class Absorbed:
    """An attention whose keys and values are linear maps of one latent.

    ``c`` is the latent at (batch, key, :attr:`latent`), ``w_k`` and ``w_v`` the weights of the maps. ``q_nope`` is the
    part of q that meets the map of the latent; ``q_shared`` and ``k_shared`` are the other parts of q and K (rope), which
    all heads share, in K's order. ``batch``, ``query``, ``head`` and ``t`` are those of the attention.
    """

    batch: list[Var]
    query: list[Var]
    head: Var
    t: Key
    latent: Var
    c: Source
    w_k: Weight
    w_v: Weight
    q_nope: Source
    q_shared: list[tuple[Source, Var]]
    k_shared: list[tuple[Source, Var]]

    @property
    def heads(self) -> int:
        """Returns the number of heads."""
        return self.head.size.factor

    @property
    def rope(self) -> int:
        """Returns the number of K's features that all heads share."""
        return sum(v.size.factor for _, v in self.k_shared)

    @property
    def width(self) -> int:
        """Returns the size of the latent: ``v_width`` of the op on :meth:`operands`."""
        return self.latent.size.factor

    @property
    def read(self) -> list[Source]:
        """Returns everything that the absorbed attention reads: parts of q, the latent, parts of K, and the weights."""
        shared = [source for source, _ in (*self.q_shared, *self.k_shared)]
        return list(dict.fromkeys([self.q_nope, self.c, *shared, self.w_k.source, self.w_v.source]))

    @property
    def inputs(self) -> list[Value]:
        """Returns the tensors of :attr:`read`, to be a match's inputs in place of those of q, k and v."""
        return list(dict.fromkeys(source.ref.value for source in self.read))

    def regrouped(self, one: Found) -> Found:
        """Returns the attention with one group of all heads."""
        return dataclasses.replace(one, batch=self.batch, groups=[], heads=[self.head])

    # --- emitted nodes ---

    def operands(self, layouts: Layouts, dtype: torch.dtype) -> tuple[fx.Node, fx.Node]:
        """Emits q [B, S, 1, H, L + R] and the keys [B, 1, T, L + R], whose first L columns are the values."""
        emit, head = layouts.edit.emit, [self.head]

        def asked(source: Source, feature: Var) -> fx.Node:
            return layouts.edit.to(layouts.placed(source.ref, [self.batch, self.query, head, [feature]]), dtype)

        def held(source: Source, feature: Var) -> fx.Node:
            return layouts.edit.to(layouts.placed(source.ref, [self.batch, [self.t], [feature]]), dtype)

        nope, w_k = asked(self.q_nope, self.w_k.feature), self._weight(layouts.edit, self.w_k, dtype)
        q = [layouts.edit.to(emit(torch.einsum, _SCORES, nope, w_k), dtype)]
        q += [asked(source, feature) for source, feature in self.q_shared]
        k = [held(self.c, self.latent), *(held(source, feature) for source, feature in self.k_shared)]
        both = [emit(torch.cat, each, -1) if len(each) > 1 else each[0] for each in (q, k)]
        return emit("unsqueeze", both[0], 2), emit("unsqueeze", both[1], 1)

    def output(self, edit: Edit, o: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Emits the attention's result [B, S, 1, H, Dv] of the op's result ``o`` [B, S, 1, H, L]."""
        flat = edit.emit("squeeze", edit.to(o, dtype), 2)
        made = edit.emit(torch.einsum, _OUTPUT, flat, self._weight(edit, self.w_v, dtype))
        return edit.emit("unsqueeze", edit.to(made, dtype), 2)

    def _weight(self, edit: Edit, weight: Weight, dtype: torch.dtype) -> fx.Node:
        """Emits a weight [H, features, L]."""
        node, rows = edit.to(edit.input(weight.source.ref.value), dtype), rows_of(weight, self.head)
        assert rows is not None
        node = edit.emit("t", node) if rows.dim else node
        last = rows.first + self.heads * rows.stride
        picks = (slice(rows.first, last), rows.columns)
        if tuple(example(node).shape) != (last - rows.first, self.width):
            node = edit.emit(operator.getitem, node, picks)
        node = edit.emit("unflatten", node, 0, (self.heads, rows.stride))
        if rows.stride == rows.count:
            return node
        return edit.emit(operator.getitem, node, (slice(None), slice(rows.start, rows.start + rows.count)))


def absorption(view: View, one: Found) -> Absorbed | None:
    """Returns how an attention can be absorbed, None if it is no multi-head latent attention."""
    with contextlib.suppress(Unsupported, DynamicWidth, TooLarge):
        return _absorbed(view, one)
    return None


def _absorbed(view: View, one: Found) -> Absorbed:
    head, batch = _head(one)
    rows = [*batch, one.t]
    (feature,) = one.feature
    if any(pair.d.size.symbols for pair in one.pairs) or feature.size.symbols or head.size.symbols:
        raise Unsupported
    values = parts_of(one.v, feature, rows, head)
    keys = [part for pair in one.pairs for part in parts_of(pair.k, pair.d, rows, head)]
    maps = [part for part in keys if part.weight is not None]
    if len(maps) != 1 or len(values) != 1 or head in one.masked:
        raise Unsupported  # where the mask differs between the heads, they cannot share one list of keys
    (k_part,), (v_part,) = maps, values
    if k_part.weight is None or v_part.weight is None:
        raise Unsupported
    c = _same(k_part, v_part)
    of = {pair.k: pair for pair in one.pairs}
    asked = [_slice_of(of[part.of], part, [*batch, *one.query, head]) for part in keys]
    shared = [(q, part) for q, part in zip(asked, keys, strict=True) if part.shared is not None]
    found = Absorbed(
        batch=batch,
        query=one.query,
        head=head,
        t=one.t,
        latent=k_part.weight.latent,
        c=c,
        w_k=k_part.weight,
        w_v=v_part.weight,
        q_nope=asked[keys.index(k_part)],
        q_shared=[(q, part.feature) for q, part in shared],
        k_shared=[(part.shared, part.feature) for _, part in shared if part.shared is not None],
    )
    _check(view, one, found)
    return found


def _head(one: Found) -> tuple[Var, list[Var]]:
    """Returns the digit of the head and the digits of the batch. Raises Unsupported unless each head has its own keys."""
    shared = [v for v in (*one.batch, *one.groups) if v.size != ONE]
    if not shared or any(v.size != ONE for v in one.heads) or len(one.feature) != 1:
        raise Unsupported
    return shared[-1], shared[:-1]


def _same(keys: Part, values: Part) -> Source:
    """Returns the farthest tensor that both maps read. Raises Unsupported if there is none."""
    assert keys.weight is not None and values.weight is not None
    mine, theirs = keys.weight.latent, values.weight.latent
    known = {placed(s.ref, theirs, var(mine)): s for s in values.c} if mine.size == theirs.size else {}
    for source in reversed(keys.c):
        other = known.get(source.ref)
        if other is not None:
            wide = torch.finfo(source.dtype).bits > torch.finfo(other.dtype).bits
            return dataclasses.replace(source, dtype=other.dtype if wide else source.dtype)
    raise Unsupported


def _slice_of(pair: Pair, part: Part, digits: list[Var]) -> Source:
    """Returns the features of q that meet a part of K."""
    ref = placed(pair.q, pair.d, var(part.feature).plus(const(part.start)))
    found = best(ref, [*digits, part.feature])
    if found is None:
        raise Unsupported
    return found


# --- what may not lie between the attention and its new inputs ---


def _check(view: View, one: Found, found: Absorbed) -> None:
    """Raises Unsupported if something holds on to K, V or q, writes them in place, or runs in another mode."""
    assert one.out.node is not None
    nodes = [value.node for value in found.inputs if value.node is not None]
    if any(found.c.ref.value.node in node.all_input_nodes for node in nodes):
        raise Unsupported  # q comes from the latent too: one projection gives q, K and V
    place, end = view.modes_at(one.out.node), view.defined(one.out.node)
    for node in _between(one, found):
        if any(_watches(view, user) for user in node.users) or view.written_between(node, end, left=True):
            raise Unsupported
        modes = view.modes_at(node)
        if modes.inference != place.inference or (
            modes.grad != place.grad and any(map(view.flows, node.all_input_nodes))
        ):
            raise Unsupported


def _watches(view: View, user: fx.Node) -> bool:
    effect = view.effects.of(view.reader.get(user, user))
    return user not in view.made and ((effect.watches and not effect.writes) or not effect.known)


def _between(one: Found, found: Absorbed) -> list[fx.Node]:
    """Returns the nodes on the views of q, k and v and above them, up to what is read instead."""
    ends = {value.node for value in found.inputs}
    nearest = (next((n for s in sources(ref) if (n := s.ref.value.node)), None) for ref in one.refs)

    def calls(nodes: Iterable[fx.Node | None]) -> list[fx.Node]:
        return [n for n in nodes if n is not None and n not in ends and n.op.startswith("call_")]

    return sorted(reached(calls(nearest), lambda node: calls(node.all_input_nodes)))
