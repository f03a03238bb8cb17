# SPDX-License-Identifier: Apache-2.0
"""The launch of ``selection_pieces``, with which most plans of selection attention start, and the segment ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..launch import launch
from ..operands import contiguous, power_of_two
from .pieces import selection_pieces
from .segments import selection_segment_tiles

MAX_RANGES = 4096
FEW_ROWS = 16  # up to so many queries, the time of one row counts, not the throughput


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Results of ``selection_pieces``.

    starts, ends, totals[B, G, S, r] int32; sel, full[B, G, cdiv(S, 32), NT] int32; None for what was not requested.
    """

    starts: Any
    ends: Any
    totals: Any = None
    sel: Any = None
    full: Any = None


def rows_and_warps(r: int, few: bool) -> tuple[int, int]:
    """Returns (rows per program, warps).

    A sort within one warp needs no exchange through shared memory; with few rows, each row gets several warps.
    """
    RP = power_of_two(r)
    if few and RP > 128:
        return 1, 4
    if RP <= 32:
        return (128 // RP, 4) if RP > 8 else (min(32, 64 // RP), 1)
    return (1, 1) if RP > 64 else (2, 1)


NONE: Mapping[str, Any] = dict(seg_q=None, seg_k=None, SEG=False)


def plan_segments(b: Any, seg_q: Any, seg_k: Any) -> Mapping[str, Any]:
    """Returns the kernels' values for segment ids q[B, S] and k[B, S_kv], made contiguous, or for none."""
    return NONE if seg_q is None else dict(seg_q=b.contiguous(seg_q), seg_k=b.contiguous(seg_k), SEG=True)


def _segment_tiles(b: Any, seg_k: Any, tile: int) -> Any:
    """Launches ``selection_segment_tiles``; returns bounds[B, NT, 4] of tiles of ``tile`` keys."""
    B, S_kv = b.shape(seg_k)
    NT = b.cdiv(S_kv, tile)
    bounds = b.empty((B, NT, 4), b.i64)
    launch(b, selection_segment_tiles, B * NT, (1, 1), seg_k=seg_k, bounds=bounds, S_kv=S_kv, NT=NT, BN=tile)
    return bounds


def plan_pieces(
    b: Any, ranges: Any, cu_q: Any, cu_k: Any, S_kv: Any, *, count: bool = False, tile: int | None = None,
    segments: Mapping[str, Any] = NONE,
) -> Pieces:  # fmt: skip
    """Launches ``selection_pieces`` on ranges[B, S, G, r, 2].

    ``count`` asks for totals; ``tile``, the number of keys of a tile, for sel and full; ``segments``, that
    these leave out keys of other segments.
    """
    B, S, G, r, _ = b.shape(ranges)
    r = b.static(r)
    starts, ends = b.empty((B, G, S, r), b.i32), b.empty((B, G, S, r), b.i32)
    totals = b.empty((B, G, S, r), b.i32) if count else None
    NT = 1 if tile is None else b.cdiv(S_kv, tile)
    sel, full = (None, None) if tile is None else (b.zeros((B, G, b.cdiv(S, 32), NT), b.i32) for _ in range(2))
    pieces = Pieces(starts, ends, totals, sel, full)
    if r == 0:
        return pieces
    rows, warps = rows_and_warps(r, b.is_static(S) and S <= FEW_ROWS)
    ranges, cu_q, cu_k = contiguous(b, ranges, cu_q, cu_k)
    varlen = cu_q is not None
    cu_q = cu_q if varlen else ranges
    bounds = _segment_tiles(b, segments["seg_k"], tile) if segments["SEG"] and tile is not None else None
    launch(
        b, selection_pieces, b.cdiv(S, rows) * B * G, (warps, 1), starts=starts, ends=ends, ranges=ranges, cu_q=cu_q,
        cu_k=cu_q if cu_k is None else cu_k, totals=totals if count else starts, sel=starts if sel is None else sel,
        full=starts if full is None else full, seg_q=None if bounds is None else segments["seg_q"], bounds=bounds, G=G, S=S,
        S_kv=S_kv, N=b.shape(cu_q)[0] - 1 if varlen else 0, NT=NT, R=r, RP=power_of_two(r), ROWS=rows, BN=tile or 1,
        VARLEN=varlen, COUNT=count, MARK=tile is not None, SEG=bounds is not None,
    )  # fmt: skip
    return pieces
