# SPDX-License-Identifier: Apache-2.0
"""Lowerings of selection attention.

On a GPU its launch plans; on a CPU one formula if the problem is small, else a call of the op.

Attention over lists of keys is launched by the op itself, which the generated code calls, where it is a Gluon kernel: never
with a bias per entry. So is its backward where sizes are symbolic, and above MOST_CHUNKS chunks of queries, which bound its
memory.
"""

from __future__ import annotations

from typing import Any

from mhc_inductor import compat
from mhc_inductor.kernels.cpu import selection, selection_lists, selection_masks
from mhc_inductor.reference import selection_entries

from . import common
from .builder import OpBuilder

MOST_CHUNKS = 4
"""Chunks of queries up to which the generated code launches the kernels of the backward."""


def _runs_gluon(name: str, args: tuple[Any, ...]) -> bool:
    from mhc_inductor.kernels.selection.lists_config import list_kernels

    builder = OpBuilder(args[0].get_device())
    q, k, v = (t if t is None else builder.strided(t) for t in args[:3])
    scale, v_width = args[-3:-1] if "entry" in name else args[-2:]
    known = list_kernels(builder, q, k, v, compat.lowerings.static_int(v_width), scale)
    return not compat.lowerings.packaging() and known is not None


def _backward_calls_op(name: str, args: tuple[Any, ...]) -> bool:
    from mhc_inductor.kernels.selection import lists_plan

    """Returns whether generated code calls the backward of lists: its loop needs known sizes, and should be short."""
    q, k, v, indices = args[2:6]
    v_width = args[-2] if "entry" in name else args[-1]
    builder = OpBuilder(q.get_device())
    sizes = (*builder.shape(q), *builder.shape(k), builder.shape(indices)[-1], v_width)
    if _runs_gluon(name, args[2:]) or not all(builder.is_static(s) for s in sizes):
        return True
    S, N = builder.shape(q)[1], lists_plan.list_width(builder.shape(indices)[-1])
    rows = lists_plan.backward_chunk(builder, q, k, v, N, int(v_width))
    return -(-S // max(1, rows)) > MOST_CHUNKS


def _packaged_entries(*args: Any) -> Any:
    """Decomposes the op in a package for a CPU; elsewhere returns NotImplemented: generated code calls the op."""
    return selection_entries.attention(*args) if compat.packaging_formulas() else NotImplemented


def register() -> None:
    """Registers all lowerings. Called once, when the first graph is compiled."""
    common.register("selection_attention", selection.fused_attention)
    common.register("selection_attention_backward", selection.fused_attention_backward)
    common.register("selection_list_attention", selection_lists.fused_attention, _runs_gluon)
    common.register(
        "selection_list_attention_backward", selection_lists.fused_attention_backward, _backward_calls_op, ("dout",)
    )
    common.register("selection_entry_attention", _packaged_entries, _runs_gluon)
    common.register("selection_entry_attention_backward", None, _backward_calls_op, ("dout",))
    common.register("selection_mask_attention", selection_masks.fused_attention)
    common.register("selection_mask_attention_backward", selection_masks.fused_attention_backward)
