# SPDX-License-Identifier: Apache-2.0
"""Configurations of the E79 kernels, in closed form from n and the device.

Measured on an H200: docs/tuning.md.
"""

from __future__ import annotations

import dataclasses

from ..operands import power_of_two
from ..tuned import tunable


@dataclasses.dataclass(frozen=True)
class ScanConfig:
    """Configuration of a plain Triton scan kernel.

    AHEAD: whether the vectors (backward: also the states) of the next step are fetched one step ahead.
    """

    n: int
    num_warps: int
    AHEAD: bool

    @property
    def R(self) -> int:
        """Rows: n padded to a power of two."""
        return max(16, power_of_two(self.n))

    @property
    def CI(self) -> int:
        """Columns per tile."""
        return 16 if self.n <= 16 or 32 < self.n <= 48 else 32

    @property
    def C(self) -> int:
        """Column tiles per state."""
        return -(-self.n // self.CI)


@tunable("e79.forward", AHEAD=(False, True))
def forward_config(n: int) -> ScanConfig:
    """Returns the configuration of the plain Triton forward."""
    if n <= 16:
        return ScanConfig(n, 1, True)
    if n <= 64:
        return ScanConfig(n, 4, True)
    return ScanConfig(n, 8, False)


@tunable("e79.backward", AHEAD=(False, True))
def backward_config(n: int) -> ScanConfig:
    """Returns the configuration of the plain Triton backward."""
    if n <= 16:
        return ScanConfig(n, 1, True)
    if n <= 32:
        return ScanConfig(n, 4, True)
    return ScanConfig(n, 8, False)


@dataclasses.dataclass(frozen=True)
class GluonConfig:
    """Configuration of a Gluon scan kernel.

    NW: warps, which split the rows. C: column tiles per state. MS: buffers for M in shared memory.
    """

    n: int
    NW: int
    C: int = 1
    MS: int = 2

    @property
    def R(self) -> int:
        """Rows: n padded to a power of two."""
        return max(16, power_of_two(self.n))

    @property
    def LC(self) -> int:
        """Lanes of a warp along a row, with four columns each."""
        return min(8, self.R // 4)

    @property
    def backward_shared(self) -> int:
        """Bytes of shared memory of the backward: states, vectors, gates and the warps' partial sums."""
        return 4 * self.R * ((2 + self.MS) * self.R + 28 + 5 * self.NW) + 8 * self.NW


def gluon_forward_config(n: int) -> GluonConfig:
    """Returns the configuration of the Gluon forward."""
    return GluonConfig(n, 1 if n <= 16 else 4 if n <= 64 else 8)


@tunable("e79.gluon_backward", MS=(1, 2))
def gluon_backward_config(n: int) -> GluonConfig:
    """Returns the configuration of the Gluon backward."""
    if n <= 64:
        return GluonConfig(n, 1 if n <= 16 else 4)
    return GluonConfig(n, 8, 4, 1)


FINISH_ROWS = 16
BIAS_ROWS = 64
