# SPDX-License-Identifier: Apache-2.0
"""Validation of the arguments of selection attention under a mask. Values of the mask are never read.

Messages name the public function, ``selection_attention``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_inductor.ops.checks import _floating, _text, strided
from mhc_inductor.ops.checks_index import broadcasts
from mhc_inductor.ops.checks_selection import outputs
from mhc_inductor.ops.checks_selection_lists import operands


def selection_mask_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    mask: Tensor,
    sink: Tensor | None,
    scale: float,
    v_width: int,
    *,
    op: str = "selection_attention",
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``selection_mask_attention`` fit together."""
    operands(op, q, k, v, sink, scale, v_width)
    visible(op, mask, q, k)


def visible(op: str, mask: Tensor, q: Tensor, k: Tensor) -> None:
    """Raises ValueError or TypeError unless the mask fits to queries and keys."""
    strided(op, "mask", mask)
    if mask.dtype is not torch.bool:
        if not mask.is_floating_point():
            raise TypeError(f"{op}: mask must be bool or floating, got {mask.dtype}; pass mask.bool()")
        _floating(op, q=q, mask=mask)
    full = [*q.shape[:3], k.shape[2]]
    broadcasts(op, mask, q, full, f"have shape [B or 1, S, G or 1, S_kv], with [B, S, G, S_kv] = {_text(full)}", (0, 2))


def selection_mask_attention_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    mask: Tensor,
    sink: Tensor | None,
    o: Tensor,
    lse: Tensor,
    scale: float,
    v_width: int,
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``selection_mask_attention_backward`` fit together."""
    op = "selection_attention_backward"
    selection_mask_attention(q, k, v, mask, sink, scale, v_width, op=op)
    outputs(op, q, v_width, o, lse, dout, dlse)
