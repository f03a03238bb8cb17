# SPDX-License-Identifier: Apache-2.0
"""Emits the op in place of an attention that was found."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.edit import Edit, node_of
from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import Size, Unsupported, Var, product_of, var
from mhc_inductor.routing.graph.linear import placed, variables_of
from mhc_inductor.routing.graph.values import Value, example, tensors_in
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.layouts import Layouts, best, layout
from mhc_inductor.routing.masks.numbers import Numbers
from mhc_inductor.routing.masks.operands import Source, held
from mhc_inductor.routing.operators.selection.data_masks import LOW
from mhc_inductor.routing.operators.selection.empty_rows import EmptyRows, of_places
from mhc_inductor.routing.operators.selection.fills import Rows
from mhc_inductor.routing.operators.selection.lists import lists, mask, ranges
from mhc_inductor.routing.operators.selection.masked import LEARNED
from mhc_inductor.routing.operators.selection.matches import Found
from mhc_inductor.routing.operators.selection.profit import (
    list_refusal,
    list_sides,
    mask_refusal,
    range_sides,
    reads_masks,
    refusal,
    sizes_of,
)
from mhc_inductor.routing.operators.selection.search import data_of, orders

SEEN = LOW / 10
"""Keys that a mask hides have no weight in a row whose lse is above this."""
_LATER = (
    "a query may see no key, and what it then gives is the choice of a kernel, which is made in the compiled code, or "
    "where an exported program runs"
)


def inputs_of(one: Found) -> list[Value]:
    """Returns what the op reads: q, k, v, what determines which keys a query sees, and what is range-checked."""
    refs = [*(source.ref for source in read(one)), *data_of(one)]
    refs += [] if one.sink is None else [sink_of(one).ref]
    return list(dict.fromkeys([*(x for ref in refs for x in held(ref.value)), *one.masks.indices.values()]))


def read(one: Found) -> list[Source]:
    """Returns the tensors that the op reads for q, k and v. Raises Unsupported if one has no usable layout."""
    if one.absorbed is not None:
        return one.absorbed.read
    found = [best(ref, order, one.masks.equal) for ref, order in orders(one)]
    if any(source is None for source in found):
        raise Unsupported
    return [source for source in found if source is not None]


def emit_attention(edit: Edit, one: Found) -> list[tuple[Value, fx.Node]]:
    """Emits the op for one attention. Returns its results with the new nodes. Raises Mismatch and Unsupported."""
    assert edit.place is not None and one.out.node is not None
    if edit.place.overwritten:
        raise Mismatch("a tensor of the formula is written in place before the formula ends", one.out)
    if one.fills.by_kernel and (edit.view.knowledge.exported or edit.view.modes_at(one.out.node).kernels):
        raise Mismatch(_LATER, one.out)
    sources = read(one)
    dtype = functools.reduce(torch.promote_types, [source.dtype for source in sources])
    if torch.finfo(one.out.dtype).bits > torch.finfo(dtype).bits and not edit.narrowed(one.out.node, dtype):
        dtype = one.out.dtype
    beside = [x.ref.value for x in one.layers if x.shows is None] + ([] if one.sink is None else [one.sink.value])
    if dtype is not torch.float64 and any(x.dtype is torch.float64 for x in beside):
        raise Mismatch("a mask or sink is float64 and q is not: the op would compute the softmax in float32", one.out)
    device = example(one.out.node).device
    one.compared = _compared(edit, one, device.type, dtype)
    plain = [ref for ref in data_of(one) if one.t not in variables_of(ref)]
    layouts = Layouts(edit, [*(s.ref for s in sources), *plain])
    layouts.equal = one.masks.equal
    old, one = one, one if one.absorbed is None else one.absorbed.regrouped(one)
    given, inside = _operands(layouts, one, [s.ref for s in sources], dtype)
    new, lse = _call(layouts, one, given, inside, device)
    if not one.gathered or one.rows is Rows.ZERO_MIXED:
        new = EmptyRows(edit, lse, given, one.scale, _gradients(edit, one, sources)).put(new, one.rows)
    if one.absorbed is not None:
        new = one.absorbed.output(edit, new, dtype)
    groups = [one.batch, one.query, one.groups, one.heads, one.feature]
    made = [(old.out, edit.as_like(layouts.back(new, groups, one.dims), one.out, given[0]))]
    for ref in one.logs:
        dims = layout(ref, {v for digits in groups for v in digits}, layouts.equal)
        if dims is None:
            raise Unsupported
        log = layouts.back(lse, groups[:-1], [digits for _, digits in dims])
        made.append((ref.value, edit.as_like(log, ref.value, given[0])))
    _guard_equal(edit, one.masks.equal)
    return made


def _needs_grad(edit: Edit, source: Source) -> bool:
    return any(edit.needs_grad(node_of(value)) for value in held(source.ref.value))


def _gradients(edit: Edit, one: Found, sources: Sequence[Source]) -> list[bool]:
    """Returns whether q, k and v need gradients."""
    needed = [_needs_grad(edit, s) for s in sources]
    if one.absorbed is not None:
        return [any(needed)] * 3
    return [any(needed[:-1:2]), any(needed[1:-1:2]), needed[-1]]


def _call(
    layouts: Layouts, one: Found, given: Sequence[fx.Node], inside: bool, device: torch.device
) -> tuple[fx.Node, fx.Node]:
    """Emits the call of the op: returns o and lse. ``inside``: the values are the keys' first columns."""
    edit, (query, key, value) = layouts.edit, given
    sink = None if one.sink is None else layouts.placed(sink_of(one).ref, [one.groups, one.heads])

    def checked(keys: fx.Node) -> fx.Node:
        return one.masks.indices.checked(layouts, keys, lambda x, order: Numbers(layouts, order, device).of(x))

    def called(op: str, *args: Any) -> tuple[fx.Node, fx.Node]:
        call = edit.emit(getattr(torch.ops.mhc_inductor, op).default, query, key, *args)
        return edit.emit(operator.getitem, call, 0), edit.emit(operator.getitem, call, 1)

    if one.entries is None:
        return called("selection_attention", value, checked(ranges(layouts, one, device)), sink, None, None, one.scale)
    held, wide = None if inside else value, torch.promote_types(example(query).dtype, torch.float32)
    width = layouts.size(product_of(v.size for v in one.feature)) if one.absorbed is None else one.absorbed.width
    if one.whole:
        return called("selection_mask_attention", held, mask(layouts, one, device, wide), sink, one.scale, width)
    keys, bias = lists(layouts, one, device, wide)
    keys = checked(keys)
    if bias is None:
        return called("selection_list_attention", held, keys, sink, None, None, None, None, one.scale, width)
    if one.opted:
        bias = edit.emit("masked_fill", bias, edit.emit(operator.le, bias, LOW), -math.inf)
    if one.gathered:
        query, bias, empty = of_places(edit, query, bias, one.rows)
    listed = called("selection_entry_attention", held, keys, bias, sink, one.scale, width, one.gathered)
    if one.gathered and one.logs and empty is not None:
        return listed[0], edit.emit("masked_fill", listed[1], empty, -math.inf)
    if not one.low:
        return listed
    seen = edit.emit(operator.gt, listed[1], SEEN)
    hidden = edit.emit("unsqueeze", edit.emit("all", seen, -1), -1)
    rest = edit.emit("masked_fill", mask(layouts, one, device, wide), hidden, -math.inf)
    other = called("selection_mask_attention", held, rest, sink, one.scale, width)
    o, lse = (
        edit.emit(torch.where, x, a, b)
        for x, a, b in zip((edit.emit("unsqueeze", seen, -1), seen), listed, other, strict=True)
    )
    return o, lse


def sink_of(one: Found) -> Source:
    """Returns where the sink is read. Raises Unsupported if it is not a plain array of groups and heads."""
    assert one.sink is not None
    found = best(one.sink, [*one.groups, *one.heads])
    if found is None:
        raise Unsupported
    return found


def _operands(layouts: Layouts, one: Found, refs: Sequence[Ref], dtype: torch.dtype) -> tuple[list[fx.Node], bool]:
    """Returns q [B, S, G, h, Dk], k [B, G, T, Dk] and v [B, G, T, Dv] in one dtype, and whether v is k's first columns."""
    emit = layouts.edit.emit
    if one.absorbed is not None:
        query, key = one.absorbed.operands(layouts, dtype)
        return [query, key, emit(operator.getitem, key, (..., slice(one.absorbed.width)))], True
    lead, *sides = [one.batch, one.groups], refs[:-1:2], refs[1:-1:2]
    pairs = list(zip(one.pairs, *sides, strict=True))
    first = None if one.entries is None else _holding(one, sides[1], refs[-1])
    if first is not None:  # the pair whose keys hold the values comes first
        pairs.insert(0, pairs.pop(first))

    def laid(ref: Ref, *groups: list[Var]) -> fx.Node:
        return layouts.edit.to(layouts.placed(ref, [*groups]), dtype)

    asked = [laid(q, one.batch, one.query, one.groups, one.heads, [pair.d]) for pair, q, _ in pairs]
    held = [laid(k, *lead, [one.t], [pair.d]) for pair, _, k in pairs]
    query, key = (emit(torch.cat, each, -1) if len(each) > 1 else each[0] for each in (asked, held))
    if first is None:
        return [query, key, laid(refs[-1], *lead, [one.t], one.feature)], False
    (feature,) = one.feature
    if feature.size == one.width:
        return [query, key, key], True
    return [query, key, emit(operator.getitem, key, (..., slice(layouts.size(feature.size))))], True


def _holding(one: Found, keys: Sequence[Ref], v: Ref) -> int | None:
    """Returns which pair's keys hold the values in their first columns, elements of one tensor; None without one."""
    if len(one.feature) != 1 or one.feature[0].size.symbols:
        return None
    (feature,) = one.feature
    for at, (pair, k) in enumerate(zip(one.pairs, keys, strict=True)):
        fits = not pair.d.size.symbols and feature.size.factor <= pair.d.size.factor
        if fits and k.value is v.value and k == placed(v, feature, var(pair.d)):
            return at
    return None


def _compared(edit: Edit, one: Found, device: str, dtype: torch.dtype) -> str:
    """Returns both figures of the rule, an empty string where it compares nothing: elsewhere than on a GPU.

    Raises Mismatch if dense attention is faster or no kernel takes these sizes.
    """
    sizes = sizes_of(one, edit.view.values.sizes, device, dtype)
    assert edit.place is not None
    training = edit.place.modes.grad and any(_needs_grad(edit, s) for s in read(one))
    if edit.place.modes.grad and any(edit.needs_grad(node_of(x.ref.value)) for x in one.layers):
        raise Mismatch(LEARNED, one.layers[0].ref.value)
    reason = refusal(sizes) if one.entries is None else list_refusal(sizes, training)
    if one.layers and not one.gathered and (reason or sizes.crowded):
        one.whole = reads_masks(sizes, one.sink is not None)
        reason = mask_refusal(sizes) if one.whole else reason
        if reason:
            raise Mismatch(reason, one.out)
        return ""
    if reason and (one.entries is None or device == "cuda"):
        raise Mismatch(reason, one.out)
    sides = range_sides(sizes) if one.entries is None else list_sides(sizes, training)
    return sides.words() if device == "cuda" else ""


def _guard_equal(edit: Edit, equal: set[frozenset[Size]]) -> None:
    """Adds guards that the sizes assumed to be equal stay equal. Raises Mismatch if they differ now."""
    known: dict[str, int | torch.SymInt] = {}
    for node in edit.graph.nodes:
        for t in tensors_in(example(node)) if node.op == "placeholder" else ():
            known.update({str(compat.routing.expression(s)): s for s in t.shape if compat.is_symbol(s)})
    for pair in equal:
        a, b = (known[s.symbols[0]] for s in pair)
        if not a == b:
            raise Mismatch("sizes differ")
