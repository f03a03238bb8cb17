"""Emits the op in place of an attention that was found."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.edit import Edit, node_of
from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import Size, Unsupported, Var, product_of
from mhc_inductor.routing.graph.values import Value, example, tensors_in
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.selection.empty_rows import EmptyRows
from mhc_inductor.routing.operators.selection.layouts import Layouts
from mhc_inductor.routing.operators.selection.matches import Found
from mhc_inductor.routing.operators.selection.operands import Source
from mhc_inductor.routing.operators.selection.profit import Sizes, refusal
from mhc_inductor.routing.operators.selection.ranges import Numbers, ranges
from mhc_inductor.routing.operators.selection.search import best, data_of, orders


def inputs_of(one: Found) -> list[Value]:
    """Returns the tensors that the op reads.

    They are q, k, v, the tensors that determine which keys a query sees, and those that give sizes or are
    range-checked.
    """
    refs = [*(source.ref for source in taken(one)), *data_of(one)]
    sized = [value for value, _ in one.masks.sized.values()]
    return list(dict.fromkeys([*(ref.value for ref in refs), *sized, *one.masks.indices.values()]))


def taken(one: Found) -> list[Source]:
    """Returns the tensors that q, k and v are read from. Raises Unsupported if one has no usable layout."""
    found = [best(ref, order) for ref, order in orders(one)]
    if any(source is None for source in found):
        raise Unsupported
    return [source for source in found if source is not None]


def emit_attention(edit: Edit, one: Found) -> list[tuple[Value, fx.Node]]:
    """Emits the op for one attention. Returns its output with the new node. Raises Mismatch and Unsupported."""
    assert edit.place is not None and one.out.node is not None
    if edit.place.overwritten:
        raise Mismatch("a tensor of the formula is written in place before the formula ends", one.out)
    sources = taken(one)
    dtype = functools.reduce(torch.promote_types, [source.dtype for source in sources])
    if torch.finfo(one.out.dtype).bits > torch.finfo(dtype).bits and not edit.narrowed(one.out.node, dtype):
        dtype = one.out.dtype
    device = example(one.out.node).device
    _check_profit(edit, one, device.type, dtype)
    layouts = Layouts(edit, [*(s.ref for s in sources), *data_of(one)], one.masks.sized)
    layouts.equal = one.masks.equal
    query, key, value = _operands(layouts, one, [s.ref for s in sources], dtype)
    op = torch.ops.mhc_inductor.selection_attention.default
    keys = one.masks.indices.checked(
        layouts, ranges(layouts, one, device), lambda number, order: Numbers(layouts, order, device).of(number)
    )
    call = edit.emit(op, query, key, value, keys, None, None, None, one.scale)
    new = edit.emit(operator.getitem, call, 0)
    new = EmptyRows(edit, call, [node_of(s.ref.value) for s in sources]).put(new, one.rows)
    groups = [one.batch, one.query, one.groups, one.heads, one.feature]
    new = edit.as_like(layouts.back(new, groups, one.dims), one.out, query)
    _guard_equal(edit, one.masks.equal)
    return [(one.out, new)]


def _operands(layouts: Layouts, one: Found, refs: Sequence[Ref], dtype: torch.dtype) -> list[fx.Node]:
    """Returns q [B, S, G, h, Dk], k [B, G, T, Dk] and v [B, G, T, Dv] in one dtype."""
    lead = [one.batch, one.groups]
    groups: list[list[list[Var]]] = [
        [one.batch, one.query, one.groups, one.heads, [one.d]],
        [*lead, [one.t], [one.d]],
        [*lead, [one.t], one.feature],
    ]
    placed = [layouts.placed(ref, dims) for ref, dims in zip(refs, groups, strict=True)]
    return [layouts.edit.to(node, dtype) for node in placed]


def _check_profit(edit: Edit, one: Found, device: str, dtype: torch.dtype) -> None:
    """Raises Mismatch if dense attention is faster or no kernel takes these sizes."""

    def now(digits: Iterable[Var]) -> int:
        return _hint(edit, product_of(v.size for v in digits))

    selected: int | None = 0
    for each in one.intervals:
        widths = [w for low, high in each.pairs() if (w := high.minus(low).value) is not None]
        if each.selects and selected is not None:
            selected = selected + min(widths) * now(each.bound) if widths else None
    width = max(now([one.d]), now(one.feature))
    reason = refusal(Sizes(device, dtype, now(one.query), now([one.t]), now(one.heads), width, selected))
    if reason:
        raise Mismatch(reason, one.out)


def _hint(edit: Edit, size: Size) -> int:
    """Returns the present value of a size, with 4096 for a symbol that has none."""
    if not size.symbols:
        return size.factor
    known = edit.view.values.hints
    return size.factor * math.prod(known.get(name, 1 << 12) for name in size.symbols)


def _guard_equal(edit: Edit, equal: set[frozenset[Size]]) -> None:
    """Adds guards that the sizes assumed to be equal stay equal. Raises Mismatch if they differ now."""
    known: dict[str, int | torch.SymInt] = {}
    for node in edit.graph.nodes:
        for t in tensors_in(example(node)) if node.op == "placeholder" else ():
            known.update({str(compat.expression(s)): s for s in t.shape if compat.is_symbol(s)})
    for pair in equal:
        a, b = (known[s.symbols[0]] for s in pair)
        if not a == b:
            raise Mismatch("sizes differ")
