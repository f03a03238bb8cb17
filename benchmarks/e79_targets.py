"""What the E79 rows are judged by: bars, goals and times of others, in microseconds a time step.

Source: the project's survey on one NVIDIA H200 (torch 2.11, triton 3.6), B = 32, T = 512, L2 flushed, medians. The
authors' CUDA gradients are wrong compared with fp64, and their fp32 kernel does not run at n = 128. An absolute time
counts only on such a GPU; elsewhere compare ratios within one run.
"""

from __future__ import annotations

import dataclasses

BATCH, STEPS = 32, 512
SIZES = (32, 64, 96, 128)
BATCHES, BATCH_SIZES = (1, 32, 132, 264), (64, 128)
AUTHORS, EAGER, COMPILE = "the authors' CUDA", "Python loop", "torch.compile of the loop"


@dataclasses.dataclass(frozen=True)
class Target:
    """Microseconds a time step; ``peers``: the time of each other implementation."""

    bar: float
    goal: float
    peers: dict[str, float]


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


def stated_mb(n: int, batch: int, steps: int, segment: int, input_bias: bool = False) -> float:
    """What docs and kernels/e79/plan.py state for training beyond inputs and outputs, in MB of 10^6 bytes."""
    padded = max(16, 1 << (n - 1).bit_length())
    checkpoints = 8 * batch * n * n * -(-steps // segment)
    gates = 28 * steps * batch * n
    scratch = 8 * batch * padded * padded * segment
    parts = 4 * steps * batch * (10 if input_bias else 7) * n
    return (checkpoints + gates + scratch + parts) / 1e6


PEAK_BAR_MB = 200.0
"""Training at T = 512, B = 32, n = 64, above inputs and outputs."""
MEMORY_SHAPE = (64, 32, 512)  # n, B, T
FLAT_UP_TO = 132
"""One sequence a multiprocessor of an H200: up to there the time should not depend on B."""

RELATIVE_BAR = 2e-5  # of ||a - b|| / ||b|| against fp64, or twice the fp32 loop's own error
ROUNDING_MARGIN = 1.05  # what the norm of a correctly rounded result may be exceeded by

CPU_SHAPE = (64, 8, 256)  # n, B, T
CPU_THREADS = 2
CPU_SPEEDUP_BAR = 3.0
"""Times faster than the eager loop, forward, at ``CPU_SHAPE`` on two threads."""
ROLLUP_SHAPE = (64, 2)  # n, B
ROLLUP_STEPS = (64, 512)
ROLLUP_BAR_S = 60.0
"""Compiling a loop of 512 steps, with gradients, on two cores."""
