# SPDX-License-Identifier: Apache-2.0
"""Selection attention over lists of keys on a CPU: C++ for large calls, else that over ranges of one key each.

Each function takes the arguments of the op of its name, see :mod:`mhc_inductor.reference.selection_lists`.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mhc_inductor.reference import selection
from mhc_inductor.reference import selection_lists as reference
from mhc_inductor.reference.precision import as_given

from . import selection as ranges
from . import selection_core as core


def _selected(q: Tensor, k: Tensor, indices: Tensor, cu_q: Any, cu_k: Any, *segments: Any) -> core.Selected:
    return core.Selected(indices, selection.key_bounds(q, k, cu_q, cu_k), core.segments(*segments))


@as_given
def selection_list_attention(*args: Any) -> tuple[Tensor, Tensor]:
    """Computes :func:`mhc_inductor.reference.selection_lists.selection_list_attention` over selected keys only."""
    q, k, v, indices, sink, *visible, scale, v_width = args
    if not core.usable(q, k):
        return reference.over_ranges(ranges.selection_attention, *args)
    values, selected = reference.values_of(k, v, v_width), _selected(q, k, indices, *visible)
    o, lse = core.attention(q, k, values, selected, sink, scale)
    return o.to(q.dtype), lse


@as_given
def selection_list_attention_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`selection_list_attention` over selected keys only."""
    dout, dlse, q, k, v, indices, sink, *visible, o, lse, scale, v_width = args
    if not core.usable(q, k):
        return reference.gradients(ranges.selection_attention_backward, *args)
    values, selected = reference.values_of(k, v, v_width), _selected(q, k, indices, *visible)
    row, dsink = selection.backward_rows(dout, dlse, sink, o, lse)
    dq, dk, dv = core.backward(row, dlse is not None, q, k, values, selected, scale)
    if v is None:
        dk, dv = dk + F.pad(dv, (0, k.shape[3] - v_width)), dv.new_empty((0,))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dsink


# --- compiled: one formula ----------------------------------------------------------------------------------


def fused_attention(*args: Any) -> Any:
    """Decomposes the op for Inductor; returns NotImplemented where the generated code should call the op."""
    q, k, *_ = args
    return reference.over_ranges(ranges.fused_attention, *args) if ranges.fits(q, k) else NotImplemented


def fused_attention_backward(*args: Any) -> Any:
    """Decomposes the backward op for Inductor; returns NotImplemented where the generated code should call the op."""
    _, _, q, k, *_ = args
    backward = ranges.fused_attention_backward
    return reference.gradients(backward, *args) if ranges.fits(q, k) else NotImplemented
