"""The one table of launch configurations of the mHC kernels, measured on an H200 (docs/tuning.md)."""

from __future__ import annotations

import dataclasses
from typing import Any


def pow2(v: int) -> int:
    return 1 << (v - 1).bit_length()


# The projection's K is summed as GROUPS groups of GROUP sections, always in that order; up to SMALL_T tokens each
# section is a program of its own.
GROUPS = 4
GROUP = 8
SMALL_T = 512


@dataclasses.dataclass(frozen=True)
class PreConfig:
    """BT tokens, BK columns a step (projection); BC tokens (coefficients); BD columns (collapse); WK columns (weights)."""

    BT: int
    BK: int
    BC: int
    BD: int
    WK: int
    num_warps: int
    num_stages: int
    collapse_warps: int


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """BC tokens a program in kernels on n x n matrices."""

    BC: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """BD columns of one token."""

    BD: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class DxConfig:
    """R tokens, BD columns of one stream."""

    R: int
    BD: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class DphiConfig:
    """C * Z programs share the tokens, R at a time, and the terms of dh_mix, FOLD at a time, for BK columns."""

    C: int
    Z: int
    FOLD: int
    R: int
    BK: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class FinishConfig:
    """BK columns of dphi, BP rows of partial sums."""

    BK: int
    BP: int
    num_warps: int


def _small(props: Any) -> bool:
    """Devices with 100 kB of shared memory or less a block."""
    return props.backend == "hip" or props.arch in (86, 89, 120, 121)


def pre_config(props: Any, K: int, D: int, MP: int, bf16: bool) -> PreConfig:
    BT, BK, stages, warps = 128, 64, 4, 8
    if not bf16:
        BT, BK, stages = 64, 32, 3
    if MP > 32:
        BT, stages = 64, 3
    if _small(props):
        BT, stages = 64, 2
    wide = K > 4 * D
    return PreConfig(BT, BK, 8, min(256 if wide else 512, max(32, pow2(D))), 1024, warps, stages, 1)


def rows_config(n: int) -> RowsConfig:
    return RowsConfig(32 if n <= 4 else 8, 1)


def post_config(D: int, n: int) -> TileConfig:
    return TileConfig(min(512, max(128, pow2(D))), 4)


def post_backward_config(D: int, n: int, itemsize: int) -> TileConfig:
    return TileConfig(512 if n <= 4 and D > 256 and itemsize == 2 else 256, 1)


def dots_config(D: int, n: int) -> TileConfig:
    if n <= 4 and D % 2048 == 0:
        return TileConfig(2048, 8)
    return TileConfig(min(512, max(128, pow2(D))), 4)


def dx_config(props: Any, D: int, MP: int, bf16: bool) -> DxConfig:
    if not bf16 or MP > 32:
        return DxConfig(32, 64, 4, 1)
    return DxConfig(128, 64, 8, 1)


def dphi_config(props: Any, K: int, MP: int, terms: int) -> DphiConfig:
    fold = max(1, 128 // MP) if terms else 1
    if terms:
        fold = min(fold, 4)
    Z = -(-terms // fold) if terms else 1
    BK, R, warps, stages = (128, 64, 4, 3) if terms else (64, 32, 4, 2)
    if terms and props.arch not in (90, 100):
        # Without warpgroup products the accumulator takes twice the warps.
        warps = 8
    if _small(props):
        stages = 2
    programs = Z * -(-K // BK)
    return DphiConfig(min(16, max(1, -(-3 * props.sm_count // programs))), Z, fold, R, BK, warps, stages)


def finish_config(MP: int) -> FinishConfig:
    return FinishConfig(32, 32, 4)
