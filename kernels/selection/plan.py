# SPDX-License-Identifier: Apache-2.0
"""Launch plans of selection attention. B, S and S_kv may be symbolic; everything else is known.

Memory besides inputs and outputs on the tile path, in bytes per batch entry and group: S * S_kv / 4 / BN for the
bitmaps of queries x key tiles, 4 or 8 * S / QT * S_kv / BN for the lists, 8 S r for the pieces.
"""

from __future__ import annotations

from typing import Any

from ..launch import launch
from ..operands import above, attention, strided, without_kernel
from . import config
from .forward import selection_forward
from .gather_plan import plan_gather
from .pieces_plan import MAX_RANGES, plan_segments
from .tile_lists_plan import plan_lists

MAX_D = 576
MAX_DV = 512
MAX_HEADS = 128
# Bytes of a query that the tile path takes: it pads a width to a power of two, the gather path to a multiple of its tiles. Of
# fp32 with more than 256 columns the assembler keeps nothing in registers (28 KiB a thread spill), and a test failed on an H200.
MAX_TILE_BYTES = 1024
# Beyond (token-level selection), neighbours share few keys and masks would compare each tile with hundreds of pieces.
MOST_TILE_RANGES = 64
FEW_QUERIES = 16


def unsupported(b: Any, *tensors: Any) -> str | None:
    """Returns why these inputs run the reference instead of the kernels, or None if they run the kernels."""
    for t in tensors:
        shape, dtype = b.shape(t), str(b.dtype(t))
        if len(shape) < 4:  # a sink or boundaries
            continue
        if dtype.startswith(("torch.float", "torch.bfloat")):
            reason = without_kernel(b, t) or above(b.static(shape[-1]), MAX_D, "D = {} is")
            if len(shape) == 5:
                reason = reason or above(b.static(shape[3]), MAX_HEADS, "h = {} heads a group are")
        else:
            reason = above(b.static(shape[3]), MAX_RANGES, "r = {} ranges a query are")
        if reason:
            return reason
    return None


def unsupported_sizes(b: Any, q: Any, k: Any, v: Any, *_: Any) -> str | None:
    """Returns why these sizes run the reference instead of the kernels, or None if they run the kernels."""
    return above(b.static(b.shape(v)[3]), MAX_DV, "Dv = {} is")


def takes_tiles(b: Any, S: Any, r: int) -> bool:
    """Returns whether the tile path runs: enough queries, and so few ranges that neighbours share key tiles.

    With deterministic algorithms any number of queries is enough: the two paths add in different orders.
    """
    few = b.is_static(S) and S <= FEW_QUERIES
    return r <= MOST_TILE_RANGES and (not few or b.deterministic)


def plan_tiles(
    b: Any, q: Any, k: Any, v: Any, ranges: Any, sink: Any, cu_q: Any, cu_k: Any, scale: Any, seg_q: Any = None,
    seg_k: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Launches the tile path; returns o[B, S, G, h, Dv] and lse[B, S, G, h]."""
    q, k, v = strided(b, q, k, v)
    x, props = attention(b, q, k, v), b.device_props()
    B, S, G, h, DK, DV = b.shape(q)[0], *(x[name] for name in ("S", "G", "H", "DK", "DV"))
    c = config.forward_config(h, DK, DV, b.dtype(q).itemsize, props.backend, props.arch)
    o, lse = b.empty((B, S, G, h, DV), b.dtype(q)), b.empty((B, S, G, h), b.f32)
    segments = plan_segments(b, seg_q, seg_k)
    lists = plan_lists(b, k, v, ranges, cu_q, cu_k, c.QT, c.BN, segments)
    launch(
        b, selection_forward, B * G * lists.NQ * -(-h // c.HB), c, x, lists.values(b, DK, DV), segments,
        sink=lse if sink is None else b.contiguous(sink), o=o, lse=lse, scale=scale, SINK=sink is not None,
        POSITIVE=isinstance(scale, float) and scale > 0,
    )  # fmt: skip
    return o, lse


def plan_selection_attention(
    b: Any, q: Any, k: Any, v: Any, ranges: Any, sink: Any, cu_q: Any, cu_k: Any, scale: Any, seg_q: Any = None,
    seg_k: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Launches ``selection_attention`` on the tile path or the gather path; returns (o, lse)."""
    narrow = b.static(b.shape(q)[4]) * b.dtype(q).itemsize <= MAX_TILE_BYTES
    if narrow and takes_tiles(b, b.shape(q)[1], b.static(b.shape(ranges)[3])):
        return plan_tiles(b, q, k, v, ranges, sink, cu_q, cu_k, scale, seg_q, seg_k)
    return plan_gather(b, q, k, v, ranges, sink, cu_q, cu_k, scale, segments=plan_segments(b, seg_q, seg_k))
