# SPDX-License-Identifier: Apache-2.0
"""Targets of the index rows: shapes, bars and goals, in microseconds.

Source: the project's survey on one NVIDIA H200 (torch 2.11, triton 3.6), bf16, L2 flushed, medians. Absolute times
count only on such a GPU; on another device compare ratios within one run.
"""

from __future__ import annotations

import dataclasses

from .running import Target

SCORES, BOTH, LOSS = "scores", "scores and top-k", "loss with gradients"
COMPILE, TORCH_TOPK = "torch.compile of the models' formula", "torch.topk of given scores"
RELATIVE_BAR = 2e-5  # ||a - b|| / ||b|| against fp64
MEMORY_BAR_MB, MEMORY_GOAL_MB = 2**30 / 1e6, 2**29 / 1e6
"""Bar and goal of the peak beyond inputs and outputs, of a choice at ``LONG`` and of a loss: 1 and 0.5 GiB."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape: S = T = ``tokens`` causal queries and keys, ``heads`` heads of ``dim``, ``topk`` keys chosen."""

    name: str
    tokens: int
    heads: int
    dim: int = 128
    topk: int = 2048
    attention: tuple[int, int] = (64, 576)
    """Heads and width of the attention that the loss takes as its target, in one group."""

    def small(self) -> Shape:
        return Shape(self.name, min(64, self.tokens // 128), max(2, self.heads // 16), 16, 12, (3, 24))


SHAPES = (Shape("64 heads", 8192, 64), Shape("32 heads", 8192, 32))
LONG = Shape("131072 tokens", 131072, 64)
TARGETS = {
    ("64 heads", SCORES): Target(850, 750),
    ("64 heads", BOTH): Target(1600, 1100),
    ("64 heads", LOSS): Target(8000, 5000),
}
