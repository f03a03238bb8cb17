# SPDX-License-Identifier: Apache-2.0
"""Validation of the arguments of selection attention over lists of keys. Values of indices are never read.

Messages name the public function, ``selection_attention``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_inductor.ops.checks import _floating, _shape, _text, integers, number
from mhc_inductor.ops.checks_selection import _sequences, outputs
from mhc_inductor.ops.segments import segments


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
    *,
    op: str = "selection_attention",
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``selection_list_attention`` fit together."""
    operands(op, q, k, v, sink, scale, v_width)
    batch, s, groups = q.shape[:3]
    integers(op, "indices", indices, q)
    if indices.dim() != 4:
        raise ValueError(f"{op}: indices must have shape [B, S, G, k], got {_text(indices.shape)}")
    _shape(op, "indices", indices, [batch, s, groups, indices.shape[3]], "[B, S, G, k]")
    _sequences(op, q, k, cu_seqlens_q, cu_seqlens_k)
    segments(op, segments_q, segments_k, q.shape[:2], [k.shape[0], k.shape[2]], q)


def operands(op: str, q: Tensor, k: Tensor, v: Tensor | None, sink: Tensor | None, scale: float, v_width: int) -> None:
    """Raises ValueError or TypeError unless queries, keys, values (or v_width), sink and scale fit together."""
    _floating(op, q=q, k=k)
    if q.dim() != 5:
        raise ValueError(f"{op}: q must have shape [B, S, G, h, Dk], got {_text(q.shape)}")
    batch, _, groups, heads, width = q.shape
    if k.dim() != 4:
        raise ValueError(f"{op}: k must have shape [B, G, S_kv, Dk], got {_text(k.shape)}")
    _shape(op, "k", k, [batch, groups, k.shape[2], width], "[B, G, S_kv, Dk]")
    for name, size in (("h", heads), ("Dk", width)):
        torch._check_value(
            size >= 1, lambda name=name: f"{op}: q[B, S, G, h, Dk] must have {name} of at least 1, got {_text(q.shape)}"
        )
    if k.dtype is not q.dtype:
        raise TypeError(f"{op}: k must have q's dtype {q.dtype}, got {k.dtype}")
    if v is None:
        torch._check_value(v_width <= width, lambda: f"{op}: v_width must be at most Dk = {width}, got {v_width}")
    else:
        _values(op, q, k, v, v_width)
    torch._check_value(v_width >= 1, lambda: f"{op}: v must have Dv of at least 1, got {v_width}")
    if sink is not None:
        _floating(op, q=q, sink=sink)
        _shape(op, "sink", sink, [groups, heads], "[G, h]")
    number(op, "scale", scale, read=False)


def _values(op: str, q: Tensor, k: Tensor, v: Tensor, v_width: int) -> None:
    _floating(op, q=q, v=v)
    if v.dim() != 4:
        raise ValueError(f"{op}: v must have shape [B, G, S_kv, Dv], got {_text(v.shape)}")
    _shape(op, "v", v, [k.shape[0], k.shape[1], k.shape[2], v_width], "[B, G, S_kv, Dv]")
    if v.dtype is not q.dtype:
        raise TypeError(f"{op}: v must have q's dtype {q.dtype}, got {v.dtype}")


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
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``selection_list_attention_backward`` fit together."""
    op = "selection_attention_backward"
    lists = (indices, sink, cu_seqlens_q, cu_seqlens_k, segments_q, segments_k)
    selection_list_attention(q, k, v, *lists, scale, v_width, op=op)
    outputs(op, q, v_width, o, lse, dout, dlse)


def selection_entry_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    bias: Tensor,
    sink: Tensor | None,
    scale: float,
    v_width: int,
    repeats: bool,
    *,
    op: str = "selection_attention",
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``selection_entry_attention`` fit together."""
    selection_list_attention(q, k, v, indices, sink, None, None, None, None, scale, v_width, op=op)
    check_bias(op, q, indices, bias)


def check_bias(op: str, q: Tensor, indices: Tensor, bias: Tensor) -> None:
    """Raises ValueError or TypeError unless ``bias`` is one number of each entry of ``indices``."""
    _floating(op, q=q, bias=bias)
    _shape(op, "bias", bias, indices.shape, "indices' shape [B, S, G, k]")


def selection_entry_attention_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    bias: Tensor,
    sink: Tensor | None,
    o: Tensor,
    lse: Tensor,
    scale: float,
    v_width: int,
    repeats: bool,
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``selection_entry_attention_backward`` fit together."""
    op = "selection_attention_backward"
    selection_entry_attention(q, k, v, indices, bias, sink, scale, v_width, repeats, op=op)
    outputs(op, q, v_width, o, lse, dout, dlse)
