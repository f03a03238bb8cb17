"""Configurations of the E79 kernels, in closed form from n and the device. Measured on an H200: docs/tuning.md."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ScanConfig:
    """Rows R (n padded), C column tiles of CI; AHEAD: the next step's vectors, or states, are fetched a step ahead."""

    n: int
    num_warps: int
    AHEAD: bool

    @property
    def R(self) -> int:
        return max(16, 1 << (self.n - 1).bit_length())

    @property
    def CI(self) -> int:
        return 16 if self.n <= 16 or 32 < self.n <= 48 else 32

    @property
    def C(self) -> int:
        return -(-self.n // self.CI)


def forward_config(n: int) -> ScanConfig:
    if n <= 16:
        return ScanConfig(n, 1, True)
    if n <= 64:
        return ScanConfig(n, 4, True)
    return ScanConfig(n, 8, False)


def backward_config(n: int) -> ScanConfig:
    if n <= 16:
        return ScanConfig(n, 1, True)
    if n <= 32:
        return ScanConfig(n, 4, True)
    return ScanConfig(n, 8, False)


@dataclasses.dataclass(frozen=True)
class GluonConfig:
    """NW warps that split the rows; C column tiles a state; MS: how many M of a step fit into shared memory."""

    n: int
    NW: int
    C: int = 1
    MS: int = 2

    @property
    def R(self) -> int:
        return max(16, 1 << (self.n - 1).bit_length())

    @property
    def LC(self) -> int:
        return min(8, self.R // 4)

    @property
    def backward_shared(self) -> int:
        """Bytes of shared memory of the backward: states, vectors and gates, parts of the warps."""
        return 4 * self.R * ((2 + self.MS) * self.R + 28 + 5 * self.NW) + 8 * self.NW


def gluon_forward_config(n: int) -> GluonConfig:
    return GluonConfig(n, 1 if n <= 16 else 4 if n <= 64 else 8)


def gluon_backward_config(n: int) -> GluonConfig:
    if n <= 64:
        return GluonConfig(n, 1 if n <= 16 else 4)
    return GluonConfig(n, 8, 4, 1)


FINISH_ROWS = 16
BIAS_ROWS = 64
