# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of a run in parallel processes, so that the run finds them in Triton's cache on disk.

Nothing is timed meanwhile. If a process fails or takes too long, the run compiles those kernels itself.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import selection_cases as cases
from . import selection_peers as peers
from . import selection_targets as targets

LIMIT_S = 75.0


class _Nothing:
    """Stands in for a kernel that another process compiles: launching it does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def ours(name: str, dtype: torch.dtype = torch.bfloat16, gradients: bool = True, sink: bool = False) -> None:
    """Runs the op at the real shape, because launch plans depend on sizes."""
    every = (targets.C1, targets.C2, *targets.SHORT, targets.DECODE, targets.TOKENS, targets.TOKENS_DECODE)
    shape = next(s for s in (*every, *targets.GRADIENTS) if s.name == name)
    case = cases.make_case(shape, "corr", torch.device("cuda"), dtype=dtype, sink=sink)
    cases.forward(case)
    if gradients:
        cases.both(case, case.leaves())
    torch.cuda.synchronize()


def fla(without: tuple[str, ...], what: str) -> None:
    """Runs flash-linear-attention without the kernels named in ``without``; its results are not used."""
    module = peers.fla_module()
    for kernel in without:
        setattr(module, f"parallel_nsa_{kernel}", _Nothing())
    case = cases.make_case(targets.C1, "corr", torch.device("cuda"))
    peers.fla_selected(case, what)()
    torch.cuda.synchronize()


JOBS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "c1": (ours, ("c1",)),
    "c2": (ours, ("c2",)),
    "2K": (ours, ("2K",)),
    "decode": (ours, ("decode", torch.bfloat16, False)),
    "tokens": (ours, ("tokens",)),
    "fp16": (ours, (targets.GRADIENTS[0].name, torch.float16)),
    "fp32": (ours, (targets.GRADIENTS[0].name, torch.float32)),
    "sink": (ours, (targets.GRADIENTS[0].name, torch.bfloat16, True, True)),
}
FLA_JOBS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "fla fwd": (fla, ((), "fwd")),
    "fla dq": (fla, (("fwd_kernel", "bwd_kernel_dkv"), "fb")),
    "fla dkv": (fla, (("fwd_kernel", "bwd_kernel_dq"), "fb")),
}


@dataclasses.dataclass
class Warmed:
    """The seconds that warming took, and the jobs that failed or did not finish."""

    seconds: float
    failed: list[str]


def warm(with_fla: bool) -> Warmed:
    """Runs the jobs side by side."""
    return side_by_side(JOBS | (FLA_JOBS if with_fla else {}))


def side_by_side(jobs: Mapping[str, tuple[Callable[..., None], tuple[Any, ...]]]) -> Warmed:
    """Runs jobs in spawned processes on the current GPU and waits for them for at most ``LIMIT_S`` seconds."""
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    running = {name: context.Process(target=fn, args=args, daemon=True) for name, (fn, args) in jobs.items()}
    for process in running.values():
        process.start()
    failed = []
    for name, process in running.items():
        process.join(max(0.0, start + LIMIT_S - time.monotonic()))
        if process.exitcode != 0:
            failed.append(name)
            process.kill()
            process.join()
    return Warmed(round(time.monotonic() - start, 1), failed)
