# SPDX-License-Identifier: Apache-2.0
"""The launches that build the lists of key tiles, with which the tile paths of the forward and of dQ start."""

from __future__ import annotations

import dataclasses
from typing import Any

from . import config
from .nonfinite import selection_finite
from .pieces_plan import Pieces, plan_pieces
from .segments_plan import NONE, Segments
from .tile_lists import selection_lists

LIST_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class TileLists:
    """Pieces of the ranges, and the key tiles of each tile of QT queries (see ``lists.py``)."""

    pieces: Pieces
    tiles: Any
    counts: Any
    dirty: Any
    NT: Any
    NQ: Any


def alignment(b: Any, *tensors: Any) -> int:
    """Returns the largest power of two of elements, at most 16 bytes, that divides every stride except the last one."""
    most = 16 // b.dtype(tensors[0]).itemsize
    strides = [s for t in tensors for s in b.strides(t)[:-1]]
    while most > 1 and not all(b.is_multiple(s, most) for s in strides):
        most //= 2
    return most


def dot_precision(b: Any, dtype: Any) -> str:
    """Returns the input_precision of a product of ``dtype``."""
    if dtype != b.f32 or b.device_props().backend != "cuda":
        return "ieee"
    return "tf32x3" if b.precision == "highest" else "tf32"


def plan_finite(b: Any, k: Any, v: Any, DV: int, BN: int) -> Any:
    """Launches the kernel of flags[B, G, NT]: which tiles of BN keys and their DV values hold a NaN or an infinity.

    v of None: the values are columns of k.
    """
    v = k if v is None else v
    B, G, S_kv, DK = b.shape(k)
    DK, NT = b.static(DK), b.cdiv(S_kv, BN)
    flags = b.empty((B, G, NT), b.i32)
    skb, skg, skn = b.strides(k)[:3]
    svb, svg, svn = b.strides(v)[:3]
    b.launch(
        selection_finite,
        (B * G * NT, 1, 1),
        dict(k_ptr=k, v_ptr=v, flags_ptr=flags, S_kv=S_kv, NT=NT, G=G, skb=skb, skg=skg, skn=skn, svb=svb, svg=svg, svn=svn),
        dict(DK=DK, DV=DV, DC=min(128, config.padded(max(DK, DV))), BN=BN, ALIGN=alignment(b, k, v)), 4, 1,
    )  # fmt: skip
    return flags


def plan_lists(
    b: Any, k: Any, v: Any, ranges: Any, cu_q: Any, cu_k: Any, QT: int, BN: int, segments: Segments = NONE
) -> TileLists:
    """Launches the kernels of bitmaps, flags and lists, for key tiles of BN keys and query tiles of QT queries."""
    B, S, G = b.shape(ranges)[:3]
    S_kv = b.shape(k)[2]
    NT, NQ = b.cdiv(S_kv, BN), b.cdiv(S, QT)
    pieces = plan_pieces(b, ranges, cu_q, cu_k, S_kv, tile=BN, segments=segments)
    flags = plan_finite(b, k, v, b.static(b.shape(v)[3]), BN)
    # One integer holds the tile and QT bits.
    tiles = b.empty((B, G, NQ, NT), b.i32 if QT <= 4 else b.i64)
    counts, dirty = b.empty((B, G, NQ, 2), b.i32), b.empty((B, G, NQ), b.i32)
    b.launch(
        selection_lists,
        (B * G * NQ, 1, 1),
        dict(sel_ptr=pieces.sel, full_ptr=pieces.full, flags_ptr=flags, tiles_ptr=tiles, counts_ptr=counts, dirty_ptr=dirty,
             S=S, NT=NT, NQ=NQ),
        dict(QT=QT, TB=LIST_BLOCK, IN_ORDER=b.deterministic), 2, 1,
    )  # fmt: skip
    return TileLists(pieces, tiles, counts, dirty, NT, NQ)
