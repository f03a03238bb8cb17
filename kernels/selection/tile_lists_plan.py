# SPDX-License-Identifier: Apache-2.0
"""The launches that build the lists of key tiles, with which the tile paths of the forward and of dQ start."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..launch import launch
from ..operands import alignment, power_of_two, strides
from . import config
from .pieces_plan import NONE, Pieces, plan_pieces
from .tile_lists import selection_finite, selection_lists

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

    def values(self, b: Any, DK: int, DV: int) -> dict[str, Any]:
        """Returns the values of the kernels that walk through the lists, which hold whole rows of queries and keys."""
        r = b.static(b.shape(self.pieces.starts)[3])
        widths = dict(KP=config.padded(DK), VP=config.padded(DV), R=r, RC=min(32, power_of_two(r)))
        return dict(vars(self), **vars(self.pieces), **widths)


def plan_finite(b: Any, k: Any, v: Any, DV: int, BN: int) -> Any:
    """Launches the kernel of flags[B, G, NT]: which tiles of BN keys and their DV values hold a NaN or an infinity.

    v of None: the values are columns of k.
    """
    v = k if v is None else v
    B, G, S_kv, DK = b.shape(k)
    DK, NT = b.static(DK), b.cdiv(S_kv, BN)
    flags = b.empty((B, G, NT), b.i32)
    launch(
        b, selection_finite, B * G * NT, (4, 1), strides(b, k, "skb skg skn"), strides(b, v, "svb svg svn"), k=k, v=v,
        flags=flags, S_kv=S_kv, NT=NT, G=G, DK=DK, DV=DV, DC=min(128, config.padded(max(DK, DV))), BN=BN,
        ALIGN=alignment(b, k, v),
    )  # fmt: skip
    return flags


def plan_lists(
    b: Any, k: Any, v: Any, ranges: Any, cu_q: Any, cu_k: Any, QT: int, BN: int, segments: Mapping[str, Any] = NONE
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
    launch(
        b, selection_lists, B * G * NQ, (2, 1), vars(pieces), flags=flags, tiles=tiles, counts=counts, dirty=dirty, S=S,
        NT=NT, NQ=NQ, QT=QT, TB=LIST_BLOCK, IN_ORDER=b.deterministic,
    )  # fmt: skip
    return TileLists(pieces, tiles, counts, dirty, NT, NQ)
