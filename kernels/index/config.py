# SPDX-License-Identifier: Apache-2.0
"""Configurations of the index kernels, in closed form from D, the dtype and the device."""

from __future__ import annotations

import dataclasses

from ..launch import shared_limit
from ..operands import power_of_two
from ..selection.config import padded as padded
from ..selection.lists_config import RowsConfig
from ..tuned import tunable


@dataclasses.dataclass(frozen=True)
class ScoreConfig:
    """Configuration of the scores: tiles of BS queries and BT keys."""

    BS: int
    BT: int
    num_warps: int
    num_stages: int


# (queries, keys, warps, stages), the best first. The first that fits is used.
_TILES = ((64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 1))
# An fp32 product keeps each factor in two parts.
_FLOAT = ((64, 64, 8, 2), (32, 64, 8, 2), (32, 32, 8, 1), (16, 32, 4, 1))
MOST_BLOCK = 8192
"""Keys of a row that ``index_select`` holds in registers."""


@dataclasses.dataclass(frozen=True)
class SelectConfig:
    """Configuration of the choice of keys: BLOCK keys in registers, of longer rows so many candidates; STEP at a time."""

    BLOCK: int
    STEP: int
    num_warps: int


@tunable("index.scores", num_warps=(4, 8), num_stages=(1, 2, 3, 4))
def score_config(D: int, itemsize: int, backend: str, arch: int) -> ScoreConfig:
    """Returns the configuration of the scores: the first choice whose tiles fit into shared memory."""
    limit = shared_limit(backend, arch) - (8 << 10)
    size = itemsize * (2 if itemsize == 4 else 1)
    choices = _FLOAT if itemsize == 4 else _TILES
    fitting = (c for c in choices if size * padded(D) * (c[1] + c[3] * c[0]) <= limit)
    return ScoreConfig(*next(fitting, choices[-1]))


def row_config(itemsize: int) -> ScoreConfig:
    """Returns the configuration of the scores where a program scores one query."""
    return ScoreConfig(1, 32, 8, 1) if itemsize == 4 else ScoreConfig(1, 64, 4, 1)


@tunable("index.backward", num_stages=(1, 2, 3))
def backward_config(D: int, itemsize: int, backend: str) -> ScoreConfig:
    """Returns the configuration of the gradients."""
    wide = padded(D) > 128
    if itemsize == 4:
        return ScoreConfig(16, 16, 4, 1) if wide else ScoreConfig(32, 32, 8, 1)
    if backend == "hip":
        return ScoreConfig(32, 32, 4, 1) if wide else ScoreConfig(64, 64, 4, 2)
    return ScoreConfig(64, 32, 8, 2) if wide else ScoreConfig(64, 64, 8, 2)


@tunable("index.loss", num_stages=(1, 2, 3))
def loss_config(H: int, D: int, itemsize: int, backend: str) -> RowsConfig:
    """Returns the configuration of the loss's gradients."""
    HB = padded(H)
    if itemsize == 4:
        return RowsConfig(HB, 16, min(64, padded(D)), 8, 1)
    return RowsConfig(HB, 32 if HB > 64 or backend == "hip" else 64, min(128, padded(D)), 8, 2)


def select_config(T: int, topk: int, few: bool) -> SelectConfig:
    """Returns the configuration of ``index_select`` for rows of T keys; ``few``: of a few queries."""
    if T <= MOST_BLOCK:
        block = max(1024, power_of_two(T))
        warps = max(1, block // 2048)
    else:
        most = power_of_two(topk)
        block = max(2048, min(4 * most, max(4096, 2 * most)))
        # A few programs do not fill the device: then more warps shorten each.
        warps = 16 if few else block // 1024
    return SelectConfig(block, min(block, 512 * warps), warps)
