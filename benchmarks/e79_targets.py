# SPDX-License-Identifier: Apache-2.0
"""Data of the E79 rows: shapes, bars, goals and times of others, in microseconds per time step.

Source: the project's survey on one NVIDIA H200 (torch 2.11, triton 3.6), B = 32, T = 512, L2 flushed, medians. The
authors' CUDA gradients are wrong compared with fp64, and their fp32 kernel does not run at n = 128. Absolute times
count only on such a GPU; on another device compare ratios within one run.
"""

from __future__ import annotations

from typing import Any

import torch

from .running import Target

BATCH, STEPS = 32, 512
SIZES = (32, 64, 96, 128)
BATCHES, BATCH_SIZES = (1, 32, 132, 264), (64, 128)
AUTHORS, EAGER, COMPILE = "the authors' CUDA", "Python loop", "torch.compile of the loop"
TARGETS: dict[tuple[str, int], Target] = {
    ("fwd", 32): Target(0.9, 0.50, {AUTHORS: 4.2, EAGER: 323}),
    ("fb", 32): Target(4.5, 2.2, {AUTHORS: 24.1, EAGER: 1639}),
    ("fwd", 64): Target(1.4, 0.80, {AUTHORS: 10.1, EAGER: 324, COMPILE: 120}),
    ("fb", 64): Target(7, 4, {AUTHORS: 49.2, EAGER: 1728}),
    ("fwd", 96): Target(4, 2.1, {AUTHORS: 17.7}),
    ("fb", 96): Target(20, 11, {AUTHORS: 203}),
    ("fwd", 128): Target(4, 2.0, {AUTHORS: 56.9, EAGER: 329}),
    ("fb", 128): Target(20, 11, {AUTHORS: 376, EAGER: 1750}),
}
"""``fwd``: the scan without gradients; ``fb``: the scan and the gradients of its output for every input."""
PEAK_BAR_MB = 200.0
"""Peak of training above inputs and outputs at T = 512, B = 32, n = 64."""
MEMORY_SHAPE = (64, 32, 512)  # n, B, T
FLAT_UP_TO = 132
"""Multiprocessors of an H200. With at most one sequence on each, the time should not depend on B."""
RELATIVE_BAR = 2e-5  # ||a - b|| / ||b|| against fp64; twice the fp32 loop's own error also passes
ROUNDING_MARGIN = 1.05  # allowed factor over the error norm of a correctly rounded result
CPU_SHAPE = (64, 8, 256)  # n, B, T
CPU_THREADS = 2
CPU_SPEEDUP_BAR = 3.0
"""Forward speedup over the eager loop at ``CPU_SHAPE`` on two threads."""
ROLLUP_SHAPE = (64, 2)  # n, B
ROLLUP_STEPS = (64, 512)
FURTHER: tuple[dict[str, Any], ...] = (
    {"dtype": torch.bfloat16},
    {"bias": "input"},
    {"dtype": torch.bfloat16, "bias": "input"},
)
"""The dtypes and bias modes that have no bars."""


def stated_mb(n: int, batch: int, steps: int, segment: int, input_bias: bool = False) -> float:
    """Returns training memory beyond inputs and outputs by the formula of kernels/e79/plan.py, in MB (10^6 bytes)."""
    padded = max(16, 1 << (n - 1).bit_length())
    checkpoints = 8 * batch * n * n * -(-steps // segment)
    gates = 28 * steps * batch * n
    scratch = 8 * batch * padded * padded * segment
    parts = 4 * steps * batch * (10 if input_bias else 7) * n
    return (checkpoints + gates + scratch + parts) / 1e6
