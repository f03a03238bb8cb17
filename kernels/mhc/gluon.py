# SPDX-License-Identifier: Apache-2.0
"""Choice and configuration of the Gluon kernels of pre and of the fused ops (sm_90)."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import gluon

# Measured from 2560 to 7168. At 2048 a model takes longer to compile and its steps are not faster (docs/tuning.md).
MIN_D = 2560
MAX_D = 16384  # a token's parts, one per slice, are summed as one tile


@dataclasses.dataclass(frozen=True)
class PostProjectConfig:
    """Configuration of the fused kernel and of the collapse that follows it.

    A tile has NW * 16 tokens, a slice NB blocks of 32 columns, and SL tiles of 64 columns are in flight. The collapse
    takes BC tokens or BD columns per program.
    """

    NW: int
    NB: int
    SL: int
    BC: int
    BD: int

    def slices(self, D: int) -> int:
        """Returns the number of slices of D columns."""
        return -(-D // (32 * self.NB))


def post_project_config(D: int, collapse: bool) -> PostProjectConfig:
    """Returns the configuration, which fills shared memory: 144 KiB of phi, 80 KiB of x and f_out."""
    NW, SL = (8, 1) if D <= 4096 and not collapse else (4, 2)
    return PostProjectConfig(NW, 8, SL, 8, 512)


def post_project(b: Any, x: Any, f_out: Any, collapse: bool = False) -> tuple[Any, PostProjectConfig] | None:
    """Returns the kernel and its configuration, or None if the separate kernels of post and pre must run."""
    *_, n, D = b.shape(x)
    if b.static(n) != 4 or b.dtype(x) != b.bf16 or b.dtype(f_out) != b.bf16:
        return None
    D = b.static(D)
    if D % 64 or not MIN_D <= D <= MAX_D or not b.gluon or b.device_props().arch != 90:
        return None
    names = "mhc.gluon_post_project:mhc_post_project", "mhc.gluon_few:mhc_post_project_few"
    loaded = gluon.kernels(b, 227 << 10, "mHC", *names)
    return None if loaded is None else (loaded, post_project_config(D, collapse))


# --- one read of x ---------------------------------------------------------------------------------------------

COLUMNS = 256  # of each stream, per program of a group
COUNTERS = 256  # words before the exchange
WARPS = 8  # the kernel's layouts are written for them
# Widths of pre whose kernel reads x once, in steps of 512 (docs/tuning.md). range(0) switches it off.
ONE_READ_PRE = range(2560, 5121)
refused: set[Any] = set()
"""Devices that could not hold a group's programs at once."""


def one_read(b: Any, x: Any) -> Any | None:
    """Returns the kernel of pre with one read of x, or None if the kernels of ``pre.py`` must run."""
    *_, n, D = b.shape(x)
    if b.static(n) != 4 or b.dtype(x) != b.bf16 or not b.gluon or b.device in refused:
        return None
    D = b.static(D)
    if D not in ONE_READ_PRE or D % (2 * COLUMNS) or D > 32 * COLUMNS:
        return None
    props = b.device_props()
    if props.arch != 90 or props.sm_count < D // COLUMNS:
        return None
    loaded = gluon.kernels(b, 227 << 10, "mHC", "mhc.gluon_one_read:mhc_one_read")
    return None if loaded is None else loaded[0]
