# SPDX-License-Identifier: Apache-2.0
"""Launch configurations of the mHC kernels, all in this one table.

Measured on an H200: docs/tuning.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..operands import power_of_two
from ..tuned import tunable

# The projection's K is summed as GROUPS groups of GROUP sections, always in this order. Up to SMALL_T tokens, each
# section is a program of its own.
GROUPS = 4
GROUP = 8
SMALL_T = 512
# Up to so many tokens, kernels with shorter chains of dependent steps run: of the fused ops, and of pre.
FEW_TOKENS = 256
PRE_FEW_TOKENS = 64
# Registers that ptxas may give a thread of their coefficients and collapse: without it, it loads 14 parts at a time.
BLOCKS_MAXNREG = 200
# The second stage of the parameter gradients: columns of dphi per program, rows of partial sums at a time.
FINISH_COLUMNS, FINISH_ROWS = 32, 32


def few(b: Any, T: Any) -> bool:
    """Returns whether the fused ops run their kernels for few tokens; never if T is not known.

    The number of tokens may choose, because both give a token the same bits (docs/design.md).
    """
    return bool(b.is_static(T) and T <= FEW_TOKENS)


def pre_few(b: Any, x: Any, T: Any) -> bool:
    """As :func:`few`, of pre. Only of bf16: there its products are exact, and both sum them in one order."""
    return bool(b.dtype(x) == b.bf16 and b.is_static(T) and T <= PRE_FEW_TOKENS)


@dataclasses.dataclass(frozen=True)
class PreConfig:
    """Configuration of pre.

    The projection takes BT tokens and BK columns per step; a coefficients program BC tokens; a collapse program BD
    columns; a weights program WK columns.
    """

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
    """Configuration of kernels on n x n matrices: BC tokens per program."""

    BC: int
    num_warps: int


COEFFICIENTS = RowsConfig(8, 1)
"""The configuration of the coefficients alone; more tokens spill."""


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Configuration of kernels that process BD columns of one token at a time."""

    BD: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class DxConfig:
    """Configuration of dx: R tokens and BD columns of one stream per program."""

    R: int
    BD: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class DphiConfig:
    """Configuration of dphi, with BK columns per program.

    C * Z programs share the work on the same columns: C split the tokens, which each reads R at a time; Z split the
    bf16 terms of dh_mix, FOLD terms each.
    """

    C: int
    Z: int
    FOLD: int
    R: int
    BK: int
    num_warps: int
    num_stages: int


def _small(props: Any) -> bool:
    """Returns whether a block of this device has at most about 100 kB of shared memory."""
    return props.backend == "hip" or props.arch in (86, 89, 120, 121)


@tunable("mhc.pre", num_stages=(1, 2, 3, 4, 5), BD=(128, 256, 512, 1024), WK=(512, 1024, 2048))
def pre_config(props: Any, K: int, D: int, MP: int, bf16: bool) -> PreConfig:
    """Returns the configuration of pre, for K = n*D columns and MP padded rows of phi."""
    BT, BK, stages, warps = 128, 64, 4, 8
    if not bf16:
        BT, BK, stages = 64, 32, 3
    if MP > 32:
        BT, stages = 64, 3
    if _small(props):
        BT, stages = 64, 2
    wide = K > 4 * D
    return PreConfig(BT, BK, 8, min(256 if wide else 512, max(32, power_of_two(D))), 1024, warps, stages, 1)


def rows_config(n: int) -> RowsConfig:
    """Returns the configuration of kernels on n x n matrices."""
    return RowsConfig(32 if n <= 4 else 8, 1)


@tunable("mhc.post", BD=(128, 256, 512, 1024, 2048), num_warps=(1, 2, 4, 8))
def post_config(D: int, n: int) -> TileConfig:
    """Returns the configuration of post."""
    return TileConfig(min(512, max(128, power_of_two(D))), 4)


def post_backward_config(props: Any, D: int, n: int, itemsize: int, collapse: bool) -> TileConfig:
    """Returns the configuration of post's backward.

    ``itemsize`` is that of the widest input, ``collapse`` whether x_out was collapsed with given weights too.
    """
    BD = 512 if n <= 4 and D > 256 and itemsize == 2 else 256
    # Each of these takes registers: with two of them, half the columns avoid spills.
    return TileConfig(BD // 2 if collapse + (n > 4) + (props.arch >= 100) > 1 else BD, 1)


def dots_config(D: int, n: int) -> TileConfig:
    """Returns the configuration of the dot products <dh_in, x>."""
    if n <= 4 and D % 2048 == 0:
        return TileConfig(2048, 8)
    return TileConfig(min(512, max(128, power_of_two(D))), 4)


@tunable("mhc.dx", num_warps=(4, 8), num_stages=(1, 2, 3))
def dx_config(props: Any, D: int, MP: int, bf16: bool) -> DxConfig:
    """Returns the configuration of dx."""
    if not bf16 or MP > 32:
        return DxConfig(32, 64, 4, 1)
    return DxConfig(128, 64, 8, 1)


@tunable("mhc.dphi", num_stages=(1, 2, 3, 4))
def dphi_config(props: Any, K: int, MP: int, terms: int) -> DphiConfig:
    """Returns the configuration of dphi; ``terms`` is the number of bf16 terms, 0 for fp32."""
    fold = max(1, 128 // MP) if terms else 1
    if terms:
        fold = min(fold, 4)
    Z = -(-terms // fold) if terms else 1
    BK, R, warps, stages = (128, 64, 4, 3) if terms else (64, 32, 4, 2)
    if terms and props.arch not in (90, 100):
        # Without warpgroup MMA the accumulator needs twice the warps.
        warps = 8
    if _small(props):
        stages = 2
    programs = Z * -(-K // BK)
    return DphiConfig(min(16, max(1, -(-3 * props.sm_count // programs))), Z, fold, R, BK, warps, stages)
