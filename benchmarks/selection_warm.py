"""Compiles what a run will launch in processes side by side, so that the run finds it in Triton's cache on disk.

Nothing is timed meanwhile. A process that fails or takes too long costs the run only the time of compiling it itself.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch

from . import selection_cases as cases
from . import selection_peers as peers
from . import selection_targets as targets

LIMIT_S = 75.0


class _Nothing:
    """A kernel that is not launched: another process compiles it."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def ours(name: str, dtype: torch.dtype = torch.bfloat16, gradients: bool = True, sink: bool = False) -> None:
    """The op at the real shape: plans look at sizes."""
    every = (targets.C1, targets.C2, *targets.SHORT, targets.DECODE, targets.TOKENS, targets.TOKENS_DECODE)
    shape = next(s for s in (*every, *targets.GRADIENTS) if s.name == name)
    case = cases.make_case(shape, "corr", torch.device("cuda"), dtype=dtype, sink=sink)
    cases.forward(case)
    if gradients:
        cases.both(case, case.leaves())
    torch.cuda.synchronize()


def fla(without: tuple[str, ...], what: str) -> None:
    """flash-linear-attention's kernels but for those named, whose results nobody looks at here."""
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
    """Seconds it took, and what did not finish."""

    seconds: float
    failed: list[str]


def warm(with_fla: bool) -> Warmed:
    """Run the jobs in spawned processes on the current GPU and wait for them, ``LIMIT_S`` at most."""
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    jobs = JOBS | (FLA_JOBS if with_fla else {})
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
