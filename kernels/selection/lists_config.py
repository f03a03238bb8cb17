# SPDX-License-Identifier: Apache-2.0
"""Configurations of the kernels for lists of keys, in closed form from h, Dk, Dv, the dtype and the device.

At the end, which Gluon kernels run, and where.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..gluon import kernels
from ..operands import power_of_two
from ..tuned import tunable
from .config import padded, shared_limit


@dataclasses.dataclass(frozen=True)
class ListConfig:
    """Configuration of the forward or of dQ.

    HB heads per program (padded), tiles of BN keys, rows in tiles of MC columns and a rest. held: whether queries (and
    dO) stay on the chip or are read again for every tile. per: programs per multiprocessor that splitting aims at.
    """

    HB: int
    BN: int
    MC: int
    num_warps: int
    num_stages: int
    held: bool = True
    per: int = 2


def widths(D: int, MC: int) -> tuple[int, int]:
    """Returns how many tiles of MC columns hold D columns, and the width of a narrower tile for the rest (or 0)."""
    full, rest = divmod(D, MC)
    if rest == 0:
        return full, 0
    if padded(rest) == MC:
        return full + 1, 0
    return full, padded(rest)


def main_columns(DK: int, DV: int) -> int:
    """Returns the columns of a tile where a row is held whole: the narrower width, or its largest power of two."""
    smaller = max(16, min(DK, DV))
    return power_of_two(smaller + 1) // 2 if smaller & (smaller - 1) else smaller


# (heads, keys, warps, stages), the best first. The first that fits is used.
_NARROW = ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 1))
# Three stages of 32 keys: 1.5 ms for lists of 2048 keys at D = 128 where 64 keys take 2.2 to 4.
_NARROW_BACKWARD = ((64, 32, 4, 3), *_NARROW[2:])
_WIDE = ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2), (16, 32, 4, 2), (16, 16, 4, 1))


@tunable("lists.tiles", num_stages=(1, 2, 3, 4))
def list_config(
    h: int, DK: int, DV: int, itemsize: int, backend: str, arch: int, shared: bool, backward: bool = False
) -> ListConfig:
    """Returns the configuration of the forward, or of dQ: the first choice whose tiles fit into shared memory."""
    most = max(16, power_of_two(h))
    wide = max(DK, DV) > 256
    if itemsize == 4 or (wide and backend == "hip"):
        return ListConfig(min(16, most), 16 if wide else 32, min(64, main_columns(DK, DV)), 4, 1, held=not wide)
    MC = main_columns(DK, DV)
    KP, VP = (MC * n + rest for n, rest in (widths(D, MC) for D in (DK, DV)))
    limit = shared_limit(backend, arch) - (8 << 10)
    if backend == "cuda" and arch >= 100 and wide:  # tiles are kept twice, for products of tensor memory
        limit //= 2
    for HB, BN, warps, stages in _WIDE if wide else _NARROW_BACKWARD if backward else _NARROW:
        rows = stages * BN * (KP + (0 if shared else VP)) + min(HB, most) * (KP + (VP if backward else 0))
        if itemsize * rows <= limit:
            return ListConfig(min(HB, most), BN, MC, warps, stages)
    return ListConfig(16, 16, 64, 4, 1, held=False)


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """Configuration of the rows of dK and dV: all HB heads (padded), tiles of BN keys and DC columns."""

    HB: int
    BN: int
    DC: int
    num_warps: int
    num_stages: int


@tunable("lists.rows", num_stages=(1, 2, 3, 4))
def rows_config(h: int, DK: int, DV: int, itemsize: int) -> RowsConfig:
    """Returns the configuration of the rows of dK and dV."""
    HB, columns = max(16, power_of_two(h)), max(16, power_of_two(max(DK, DV)))
    if itemsize == 4:
        return RowsConfig(HB, 32, min(32 if HB > 64 else 64, columns), 4, 1)
    return RowsConfig(HB, 64, min(128, columns), 4, 4 if HB <= 64 else 3)


# --- Gluon --------------------------------------------------------------------------------------------------

NAMES = (
    "selection.gluon_list_forward:selection_list_forward_wgmma",
    "selection.gluon_list_dq:selection_list_dq_wgmma",
    "selection.gluon_list_rows:selection_list_rows_wgmma",
)
LEAST_HEADS = 17
VALUES, TAIL = 512, 64
SHARED = 225 << 10


def rows_fit(b: Any, q: Any, k: Any) -> bool:
    """Returns whether Gluon kernels can copy the rows of q[B, S, G, h, DK] and k[B, G, S_kv, DK].

    They are for sm_90, 16-bit rows of 512 columns and up to 64 more, and not for a few heads.
    """
    if not b.gluon or b.device_props().arch != 90 or b.dtype(q).itemsize != 2:
        return False
    h, DK = (b.static(n) for n in b.shape(q)[3:])
    if h < LEAST_HEADS or not 0 <= DK - VALUES <= TAIL:
        return False
    return all(b.is_multiple(s, 8) for t in (q, k) for s in b.strides(t)[:-1]) and bool(b.starts_aligned(q, k))


def list_kernels(b: Any, q: Any, k: Any, v: Any, v_width: int, scale: Any) -> tuple[Any, ...] | None:
    """Returns the kernels of the forward, of dQ and of the rows of dK, or None where plain Triton runs.

    Values must be the first 512 columns of the keys, and the scale positive: the largest score is looked for before it.
    """
    if v is not None or v_width != VALUES or not float(scale) > 0 or not rows_fit(b, q, k):
        return None
    return kernels(b, SHARED, "selection attention over lists", *NAMES)
