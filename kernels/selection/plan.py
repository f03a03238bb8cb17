# SPDX-License-Identifier: Apache-2.0
"""Launch plans of selection attention. B, S and S_kv may be symbolic; everything else is known.

Memory besides inputs and outputs on the tile path, in bytes per batch entry and group: S * S_kv / 4 / BN for the
bitmaps of queries x key tiles, 4 or 8 * S / QT * S_kv / BN for the lists, 8 S r for the pieces.
"""

from __future__ import annotations

from typing import Any

from ..dtypes import without_kernel
from . import config
from .forward import selection_forward
from .gather_plan import plan_gather
from .pieces_plan import MAX_RANGES, power_of_two
from .segments_plan import plan_segments
from .tile_lists_plan import alignment, dot_precision, plan_lists

MAX_D = 576
MAX_DV = 512
MAX_HEADS = 128
MAX_TILE_D = 512  # the tile path pads a width to a power of two, the gather path to a multiple of its tiles
# Beyond (token-level selection), neighbours share few keys and masks would compare each tile with hundreds of pieces.
MOST_TILE_RANGES = 64
FEW_QUERIES = 16


def unsupported(b: Any, *tensors: Any) -> str | None:
    """Returns why these inputs run the reference instead of the kernels, or None if they run the kernels."""
    for t in tensors:
        shape, dtype = b.shape(t), str(b.dtype(t))
        if len(shape) < 4:  # a sink or boundaries
            continue
        if not dtype.startswith(("torch.float", "torch.bfloat")):
            if b.static(shape[3]) > MAX_RANGES:
                return f"r = {b.static(shape[3])} ranges a query are above {MAX_RANGES}"
            continue
        if reason := without_kernel(b, t):
            return reason
        if b.static(shape[-1]) > MAX_D:
            return f"D = {b.static(shape[-1])} is above {MAX_D}"
        if len(shape) == 5 and b.static(shape[3]) > MAX_HEADS:
            return f"h = {b.static(shape[3])} heads a group are above {MAX_HEADS}"
    return None


def unsupported_sizes(b: Any, q: Any, k: Any, v: Any, *_: Any) -> str | None:
    """Returns why these sizes run the reference instead of the kernels, or None if they run the kernels."""
    DV = b.static(b.shape(v)[3])
    return f"Dv = {DV} is above {MAX_DV}" if DV > MAX_DV else None


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
    B, S, G, h, DK = b.shape(q)
    S_kv, DV = b.shape(v)[2:]
    h, DK, DV, r = (b.static(x) for x in (h, DK, DV, b.shape(ranges)[3]))
    props = b.device_props()
    c = config.forward_config(h, DK, DV, b.dtype(q).itemsize, props.backend, props.arch)
    q, k, v = (b.strided(t) for t in (q, k, v))
    o, lse = b.empty((B, S, G, h, DV), b.dtype(q)), b.empty((B, S, G, h), b.f32)
    segments = plan_segments(b, seg_q, seg_k)
    x = plan_lists(b, k, v, ranges, cu_q, cu_k, c.QT, c.BN, segments)
    sqb, sqs, sqg, sqh = b.strides(q)[:4]
    skb, skg, skn = b.strides(k)[:3]
    svb, svg, svn = b.strides(v)[:3]
    b.launch(
        selection_forward,
        (B * G * x.NQ * -(-h // c.HB), 1, 1),
        dict(q_ptr=q, k_ptr=k, v_ptr=v, starts_ptr=x.pieces.starts, ends_ptr=x.pieces.ends, tiles_ptr=x.tiles,
             counts_ptr=x.counts, dirty_ptr=x.dirty, sink_ptr=lse if sink is None else b.contiguous(sink), o_ptr=o,
             lse_ptr=lse, scale=scale, S=S, S_kv=S_kv, NT=x.NT, NQ=x.NQ, G=G, sqb=sqb, sqs=sqs, sqg=sqg, sqh=sqh, skb=skb,
             skg=skg, skn=skn, svb=svb, svg=svg, svn=svn, **segments.args()),
        dict(H=h, DK=DK, DV=DV, KP=config.padded(DK), VP=config.padded(DV), R=r, RC=min(32, power_of_two(r)),
             QT=c.QT, HB=c.HB, BN=c.BN, SINK=sink is not None, ALIGN=alignment(b, q, k, v), PREC=dot_precision(b, b.dtype(q)),
             POSITIVE=isinstance(scale, float) and scale > 0, SEG=segments.given),
        c.num_warps, c.num_stages,
    )  # fmt: skip
    return o, lse


def plan_selection_attention(
    b: Any, q: Any, k: Any, v: Any, ranges: Any, sink: Any, cu_q: Any, cu_k: Any, scale: Any, seg_q: Any = None,
    seg_k: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Launches ``selection_attention`` on the tile path or the gather path; returns (o, lse)."""
    narrow = b.static(b.shape(q)[4]) <= MAX_TILE_D
    if narrow and takes_tiles(b, b.shape(q)[1], b.static(b.shape(ranges)[3])):
        return plan_tiles(b, q, k, v, ranges, sink, cu_q, cu_k, scale, seg_q, seg_k)
    return plan_gather(b, q, k, v, ranges, sink, cu_q, cu_k, scale, segments=plan_segments(b, seg_q, seg_k))
