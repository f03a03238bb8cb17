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
from mhc_inductor.reference.selection_lists import values_of

from .selection import ALL, fits, formula, formula_backward
from .selection_core import odd


def selection_mask_attention(*args: Any) -> tuple[Tensor, Tensor]:
    """Computes :func:`mhc_inductor.reference.selection_masks.selection_mask_attention`."""
    _q, k, v, *_, v_width = args
    return reference.selection_mask_attention(*args, odd=odd(values_of(k, v, v_width)))


def selection_mask_attention_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`selection_mask_attention`."""
    dout, _dlse, q, k, v, *_ = args
    given = (t for t in (dout, q, k, v) if t is not None)
    return reference.selection_mask_attention_backward(*args, odd=odd(*given))


# --- compiled: one formula ----------------------------------------------------------------------------------


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor, sink: Tensor | None, scale: float, v_width: int
) -> Any:
    """Decomposes the op for Inductor; returns NotImplemented where the generated code should call the op."""
    if not fits(q, k):
        return NotImplemented
    seen, bias = reference.visible(q, mask, ALL)
    return formula(q, k, values_of(k, v, v_width), seen, sink, scale, bias)


def fused_attention_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor,
    sink: Tensor | None, o: Tensor, lse: Tensor, scale: float, v_width: int,
) -> Any:  # fmt: skip
    """Decomposes the backward op for Inductor; returns NotImplemented where the generated code should call the op."""
    if not fits(q, k):
        return NotImplemented
    row, dsink = selection.backward_rows(dout, dlse, sink, o, lse)
    seen, bias = reference.visible(q, mask, ALL)
    dq, dk, dv = formula_backward(row, q, k, values_of(k, v, v_width), seen, scale, bias)
    if v is None:
        dk, dv = dk + F.pad(dv, (0, k.shape[3] - v_width)), k.new_empty((0,))
    return (*(t.to(q.dtype).contiguous() for t in (dq, dk, dv)), dsink)
