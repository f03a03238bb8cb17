"""Selection attention over lists of keys on a CPU: C++ for large calls, else that over ranges of one key each."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mhc_inductor.ops import selection_cpu
from mhc_inductor.ops import selection_cpu_core as core
from mhc_inductor.reference import selection
from mhc_inductor.reference import selection_lists as reference
from mhc_inductor.reference.mhc import as_given


def _selected(
    q: Tensor,
    k: Tensor,
    indices: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
) -> core.Selected:
    bounds = selection.key_bounds(q, k, cu_seqlens_q, cu_seqlens_k)
    return core.Selected(indices, bounds, core.segments(segments_q, segments_k))


@as_given
def selection_list_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
    scale: float,
    v_width: int,
) -> tuple[Tensor, Tensor]:
    """Computes :func:`mhc_inductor.reference.selection_lists.selection_list_attention` over selected keys only."""
    if core.usable(q, k):
        selected = _selected(q, k, indices, cu_seqlens_q, cu_seqlens_k, segments_q, segments_k)
        o, lse = core.attention(q, k, reference.values_of(k, v, v_width), selected, sink, scale)
        return o.to(q.dtype), lse
    ranges = reference.ranges_of(q, k, indices, cu_seqlens_q, cu_seqlens_k, segments_q, segments_k)
    return selection_cpu.selection_attention(q, k, reference.values_of(k, v, v_width), ranges, sink, None, None, scale)


@as_given
def selection_list_attention_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
    o: Tensor,
    lse: Tensor,
    scale: float,
    v_width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`selection_list_attention` over selected keys only."""
    if core.usable(q, k):
        selected = _selected(q, k, indices, cu_seqlens_q, cu_seqlens_k, segments_q, segments_k)
        row, dsink = selection.backward_rows(dout, dlse, sink, o, lse)
        dq, dk, dv = core.backward(row, dlse is not None, q, k, reference.values_of(k, v, v_width), selected, scale)
        if v is None:
            dk, dv = dk + F.pad(dv, (0, k.shape[3] - v_width)), dv.new_empty((0,))
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dsink
    ranges = reference.ranges_of(q, k, indices, cu_seqlens_q, cu_seqlens_k, segments_q, segments_k)
    backward = selection_cpu.selection_attention_backward
    return reference.gradients(backward, dout, dlse, q, k, v, ranges, sink, o, lse, scale, v_width)


# --- compiled: one formula ----------------------------------------------------------------------------------


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
    scale: float,
    v_width: int,
) -> Any:
    """Decomposes the op for Inductor; returns NotImplemented where the generated code should call the op."""
    if not selection_cpu.fits(q, k):
        return NotImplemented
    ranges = reference.ranges_of(q, k, indices, cu_seqlens_q, cu_seqlens_k, segments_q, segments_k)
    return selection_cpu.fused_attention(q, k, reference.values_of(k, v, v_width), ranges, sink, None, None, scale)


def fused_attention_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
    o: Tensor,
    lse: Tensor,
    scale: float,
    v_width: int,
) -> Any:
    """Decomposes the backward op for Inductor; returns NotImplemented where the generated code should call the op."""
    if not selection_cpu.fits(q, k):
        return NotImplemented
    ranges = reference.ranges_of(q, k, indices, cu_seqlens_q, cu_seqlens_k, segments_q, segments_k)
    backward = selection_cpu.fused_attention_backward
    return reference.gradients(backward, dout, dlse, q, k, v, ranges, sink, o, lse, scale, v_width)
