"""Configurations of the selection kernels' tile path, in closed form from h, Dk, Dv, the dtype and the device.

Measured on an H200: docs/tuning.md. A script that tunes replaces ``forward_config``.
"""

from __future__ import annotations

import dataclasses

from .pieces_plan import power_of_two

# Shared memory a program may have, in bytes.
_SHARED = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
_SHARED_OTHER = {"cuda": 99 << 10, "hip": 64 << 10}


def shared_limit(backend: str, arch: int) -> int:
    """Bytes of shared memory that one program may have."""
    return _SHARED.get(arch, _SHARED_OTHER["cuda"]) if backend == "cuda" else _SHARED_OTHER["hip"]


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """A program: QT neighbouring queries x HB heads; key tiles of BN."""

    QT: int
    HB: int
    BN: int
    num_warps: int
    num_stages: int


def padded(D: int) -> int:
    """D as the kernels hold it."""
    return max(16, power_of_two(D))


def tile_of(rows: int, h: int) -> tuple[int, int]:
    """QT, HB of a program with so many rows: neighbours of one group, at most 32, then more heads."""
    HB = max(min(power_of_two(h), rows), -(-rows // 32))
    return rows // HB, HB


def forward_config(h: int, DK: int, DV: int, itemsize: int, backend: str, arch: int) -> ForwardConfig:
    KP, VP = padded(DK), padded(DV)
    limit = shared_limit(backend, arch)
    wide = itemsize == 4 or max(KP, VP) > 128
    for rows, BN, stages in _CHOICES if wide else ((64, 64, 3), (64, 64, 2), *_CHOICES):
        # The query tile, and keys and values in flight.
        if itemsize * (rows * KP + max(1, stages) * BN * (KP + VP)) <= limit:
            break
    # fp32's products hold each factor in two parts.
    warps = 8 if rows * VP * (2 if itemsize == 4 else 1) > 64 * 128 else 4
    return ForwardConfig(*tile_of(rows, h), BN, warps, stages)


# Rows, keys and stages of the wide heads, the widest first that fit.
_CHOICES = ((64, 32, 3), (64, 32, 2), (32, 32, 2), (32, 32, 1), (16, 32, 1), (16, 16, 1))
