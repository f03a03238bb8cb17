# SPDX-License-Identifier: Apache-2.0
"""Validation of the selection attention arguments, shared by the public functions, the ops and their fakes.

See ``checks.py``. The values of ranges, cu_seqlens and segment ids are never read: invalid ranges select the keys that they cover,
which may be none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_inductor.ops.checks import _floating, _shape, _text, integers, number
from mhc_inductor.ops.segments import segments


def _sequences(op: str, q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
    if cu_seqlens_q is None:
        if cu_seqlens_k is not None:
            raise ValueError(f"{op}: cu_seqlens_k must be None where cu_seqlens_q is, got {_text(cu_seqlens_k.shape)}")
        return
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if t is None:
            continue
        integers(op, name, t, q)
        if t.dim() != 1:
            raise ValueError(f"{op}: {name} must have shape [N+1], got {_text(t.shape)}")
        torch._check_value(
            t.shape[0] >= 1, lambda name=name, t=t: f"{op}: {name} must have shape [N+1], got {_text(t.shape)}"
        )
    torch._check_value(
        q.shape[0] == 1, lambda: f"{op}: q must have a batch of 1 with cu_seqlens_q (packed), got {_text(q.shape)}"
    )
    if cu_seqlens_k is not None:
        _shape(op, "cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, "cu_seqlens_q's")
        return
    torch._check_value(
        k.shape[2] == q.shape[1],
        lambda: (
            f"{op}: cu_seqlens_k may be None only where k has as many rows as q has queries, "
            f"got q {_text(q.shape)} and k {_text(k.shape)}"
        ),
    )


def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    scale: float,
    segments_q: Tensor | None = None,
    segments_k: Tensor | None = None,
    *,
    op: str = "selection_attention",
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``selection_attention`` fit together."""
    _floating(op, q=q, k=k, v=v)
    if q.dim() != 5:
        raise ValueError(f"{op}: q must have shape [B, S, G, h, Dk], got {_text(q.shape)}")
    batch, s, groups, heads, width = q.shape
    if k.dim() != 4:
        raise ValueError(f"{op}: k must have shape [B, G, S_kv, Dk], got {_text(k.shape)}")
    _shape(op, "k", k, [batch, groups, k.shape[2], width], "[B, G, S_kv, Dk]")
    if v.dim() != 4:
        raise ValueError(f"{op}: v must have shape [B, G, S_kv, Dv], got {_text(v.shape)}")
    _shape(op, "v", v, [batch, groups, k.shape[2], v.shape[3]], "[B, G, S_kv, Dv]")
    for name, size in (("h", heads), ("Dk", width)):
        torch._check_value(
            size >= 1, lambda name=name: f"{op}: q[B, S, G, h, Dk] must have {name} of at least 1, got {_text(q.shape)}"
        )
    torch._check_value(
        v.shape[3] >= 1, lambda: f"{op}: v[B, G, S_kv, Dv] must have Dv of at least 1, got {_text(v.shape)}"
    )
    for name, t in (("k", k), ("v", v)):
        if t.dtype is not q.dtype:
            raise TypeError(f"{op}: {name} must have q's dtype {q.dtype}, got {t.dtype}")
    integers(op, "ranges", ranges, q)
    if ranges.dim() != 5:
        raise ValueError(f"{op}: ranges must have shape [B, S, G, r, 2], got {_text(ranges.shape)}")
    _shape(op, "ranges", ranges, [batch, s, groups, ranges.shape[3], 2], "[B, S, G, r, 2]")
    if sink is not None:
        _floating(op, q=q, sink=sink)
        _shape(op, "sink", sink, [groups, heads], "[G, h]")
    _sequences(op, q, k, cu_seqlens_q, cu_seqlens_k)
    segments(op, segments_q, segments_k, q.shape[:2], [batch, k.shape[2]], q)
    number(op, "scale", scale, read=False)


def outputs(op: str, q: Tensor, v_width: int, o: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None) -> None:
    """Raises ValueError or TypeError unless the outputs and their gradients, if any, fit to q."""
    out, row = [*q.shape[:4], v_width], q.shape[:4]
    _floating(op, q=q, o=o, lse=lse)
    for name, t in (("o", o), ("dout", dout)):
        if t is not None:
            _floating(op, q=q, **{name: t})
            _shape(op, name, t, out, "[B, S, G, h, Dv]")
    for name, t in (("lse", lse), ("dlse", dlse)):
        if t is not None:
            _floating(op, q=q, **{name: t})
            _shape(op, name, t, row, "[B, S, G, h]")


def selection_attention_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    o: Tensor,
    lse: Tensor,
    scale: float,
    segments_q: Tensor | None = None,
    segments_k: Tensor | None = None,
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``selection_attention_backward`` fit together."""
    op = "selection_attention_backward"
    selection_attention(q, k, v, ranges, sink, cu_seqlens_q, cu_seqlens_k, scale, segments_q, segments_k, op=op)
    outputs(op, q, v.shape[3], o, lse, dout, dlse)


def blocks_to_ranges(
    block_indices: Tensor,
    block_size: int,
    S_kv: int,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``blocks_to_ranges`` fit together."""
    op = "blocks_to_ranges"
    integers(op, "block_indices", block_indices)
    if block_indices.dim() != 4:
        raise ValueError(f"{op}: block_indices must have shape [B, S, G, k], got {_text(block_indices.shape)}")
    # Plain comparisons: Dynamo traces this function and cannot build a message about a symbolic size.
    for name, value, least in (("block_size", block_size, 1), ("S_kv", S_kv, 0)):
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{op}: {name} must be at least {least}, got {value}")
    if S_kv >= 2**31:
        raise ValueError(f"{op}: S_kv must be below 2**31, got {S_kv}")
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise ValueError(f"{op}: cu_seqlens_k must be None where cu_seqlens_q is, got {_text(cu_seqlens_k.shape)}")
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if t is None:
            continue
        integers(op, name, t, block_indices, "block_indices")
        if t.dim() != 1 or t.shape[0] < 1:
            raise ValueError(f"{op}: {name} must have shape [N+1], got {_text(t.shape)}")
    if cu_seqlens_q is not None and cu_seqlens_k is not None and cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"{op}: cu_seqlens_k must have cu_seqlens_q's shape {_text(cu_seqlens_q.shape)}, got {_text(cu_seqlens_k.shape)}"
        )
