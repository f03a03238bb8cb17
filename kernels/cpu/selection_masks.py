# SPDX-License-Identifier: Apache-2.0
"""Selection attention under a mask on a CPU: the reference, without its handling of NaN and inf where there are none.

Each function takes the arguments of the op of its name, see :mod:`mhc_inductor.reference.selection_masks`.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mhc_inductor.reference import selection
from mhc_inductor.reference import selection_masks as reference
from mhc_inductor.reference.precision import acc_dtype
from mhc_inductor.reference.selection_lists import values_of

from .selection import _ALL, _odd, fits


def selection_mask_attention(*args: Any) -> tuple[Tensor, Tensor]:
    """Computes :func:`mhc_inductor.reference.selection_masks.selection_mask_attention`."""
    _q, k, v, *_, v_width = args
    return reference.selection_mask_attention(*args, odd=_odd(values_of(k, v, v_width)))


def selection_mask_attention_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`selection_mask_attention`."""
    dout, _dlse, q, k, v, *_ = args
    given = (t for t in (dout, q, k, v) if t is not None)
    return reference.selection_mask_attention_backward(*args, odd=_odd(*given))


# --- compiled: one formula ----------------------------------------------------------------------------------


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor, sink: Tensor | None, scale: float, v_width: int
) -> Any:
    """Decomposes the op for Inductor; returns NotImplemented where the generated code should call the op."""
    if not fits(q, k):
        return NotImplemented
    acc, h = acc_dtype(q.dtype), q.shape[3]
    seen, bias = reference.visible(q, mask, _ALL)
    logit = None if sink is None else sink.repeat(1, q.shape[1])
    values = values_of(k, v, v_width).to(acc)
    part = selection.attend(selection.rows(q, _ALL), k.to(acc), values, seen, logit, scale, bias=bias)
    o, lse = (selection.unrows(t, h) for t in part)
    return o.to(q.dtype).contiguous(), lse.contiguous()


def fused_attention_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor,
    sink: Tensor | None, o: Tensor, lse: Tensor, scale: float, v_width: int,
) -> Any:  # fmt: skip
    """Decomposes the backward op for Inductor; returns NotImplemented where the generated code should call the op."""
    if not fits(q, k):
        return NotImplemented
    acc = acc_dtype(q.dtype)
    row, dsink = selection.backward_rows(dout, dlse, sink, o, lse)
    seen, bias = reference.visible(q, mask, _ALL)
    part = selection.Rows(*(selection.rows(t, _ALL) for t in row))
    values = values_of(k, v, v_width).to(acc)
    dq, dk, dv = selection.attend_backward(part, selection.rows(q, _ALL), k.to(acc), values, seen, scale, bias=bias)
    if v is None:
        dk, dv = dk + F.pad(dv, (0, k.shape[3] - v_width)), k.new_empty((0,))
    dq = selection.unrows(dq, q.shape[3])
    return (*(t.to(q.dtype).contiguous() for t in (dq, dk, dv)), dsink)
