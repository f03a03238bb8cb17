# SPDX-License-Identifier: Apache-2.0
"""The launch of ``selection_pieces``, with which most plans of selection attention start."""

from __future__ import annotations

import dataclasses
from typing import Any

from .pieces import selection_pieces
from .segments_plan import NONE, Segments, plan_segment_tiles

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


def power_of_two(n: int) -> int:
    """Returns n rounded up to a power of two."""
    return 1 << max(0, n - 1).bit_length()


def plan_pieces(
    b: Any, ranges: Any, cu_q: Any, cu_k: Any, S_kv: Any, *, count: bool = False, tile: int | None = None,
    segments: Segments = NONE,
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
    ranges = b.contiguous(ranges)
    varlen = cu_q is not None
    cu_q = b.contiguous(cu_q) if varlen else ranges
    cu_k = cu_q if cu_k is None else b.contiguous(cu_k)
    bounds = plan_segment_tiles(b, segments, tile) if segments.given and tile is not None else None
    b.launch(
        selection_pieces,
        (b.cdiv(S, rows) * B * G, 1, 1),
        dict(ranges_ptr=ranges, cu_q_ptr=cu_q, cu_k_ptr=cu_k, starts_ptr=starts, ends_ptr=ends,
             totals_ptr=totals if count else starts, sel_ptr=starts if sel is None else sel,
             full_ptr=starts if full is None else full, seg_q_ptr=None if bounds is None else segments.q,
             bounds_ptr=bounds, G=G, S=S, S_kv=S_kv, N=b.shape(cu_q)[0] - 1 if varlen else 0, NT=NT),
        dict(R=r, RP=power_of_two(r), ROWS=rows, BN=tile or 1, VARLEN=varlen, COUNT=count, MARK=tile is not None, SEG=bounds is not None),
        warps, 1,
    )  # fmt: skip
    return pieces
