# SPDX-License-Identifier: Apache-2.0
"""Configurations of the tile path of selection attention, in closed form from h, Dk, Dv, the dtype and the device.

Measured on an H200: docs/tuning.md. Tuning scripts replace ``forward_config``.
"""

from __future__ import annotations

import dataclasses

from ..launch import shared_limit as shared_limit
from ..operands import power_of_two
from ..tuned import tunable


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Configuration of a program: QT neighbouring queries x HB heads, and key tiles of BN keys."""

    QT: int
    HB: int
    BN: int
    num_warps: int
    num_stages: int


def padded(D: int) -> int:
    """Returns D padded to a power of two of at least 16, as the kernels hold it."""
    return max(16, power_of_two(D))


def tiled(D: int) -> int:
    """Returns D padded as kernels hold it that loop over tiles of its columns."""
    return padded(D) if D <= 512 else -(-D // 128) * 128


def tile_of(rows: int, h: int) -> tuple[int, int]:
    """Returns (QT, HB) of a program with ``rows`` rows: the heads of a group by neighbouring queries, at most 32."""
    HB = max(min(power_of_two(h), rows), -(-rows // 32))
    return rows // HB, HB


# (rows, keys, warps, stages), the best first. The first that fits is used.
_NARROW = ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2))
_WIDE = ((64, 32, 8, 3), (64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1), (16, 16, 4, 1))
# An fp32 product keeps each factor in two parts.
_FLOAT = ((32, 32, 8, 2), (16, 16, 4, 1))


@tunable("selection.forward", num_stages=(1, 2, 3, 4))
def forward_config(h: int, DK: int, DV: int, itemsize: int, backend: str, arch: int) -> ForwardConfig:
    """Returns the forward's configuration: the first choice whose tiles fit into shared memory."""
    KP, VP = padded(DK), padded(DV)
    wide = max(KP, VP) > 128
    choices: tuple[tuple[int, int, int, int], ...] = (
        (_FLOAT[1:] if wide else _FLOAT) if itemsize == 4 else _WIDE if wide else _NARROW
    )
    if choices is _NARROW and h < 16:
        choices = _NARROW[1:]  # measured with 4 heads per group: docs/tuning.md
    limit = shared_limit(backend, arch)

    def held(rows: int, BN: int, stages: int) -> int:
        """Returns the bytes of the keys and values in flight, plus the queries where they stay in shared memory."""
        return itemsize * (stages * BN * (KP + VP) + (0 if backend == "hip" else rows * KP))

    fitting = (c for c in choices if held(c[0], c[1], c[3]) <= limit)
    rows, BN, warps, stages = next(fitting, choices[-1])
    return ForwardConfig(*tile_of(rows, h), BN, warps, stages)
