# SPDX-License-Identifier: Apache-2.0
"""The comparison of ``train_fsdp.py``: one model, trained eager, by torch.compile and by mhc_inductor on the same batches.

Speed is that of the steps after the first ``WARM``, which compile. Peak memory, on a GPU, is the largest of all ranks in
those steps, weights and optimizer included.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn
from training import Size, console, device_name, side_by_side

import mhc_inductor

WARM = 3
BACKENDS = {"eager": None, "torch.compile": "inductor", "mhc_inductor": "mhc_inductor"}
TOLERANCE = {"cpu": 1e-3, "cuda": 2e-2}
"""Largest relative difference of a step's loss from eager's: fp32 on a CPU, bf16 on a GPU."""


class Done(Protocol):
    """What a step appends to: a loss in nats a byte, the mean of all ranks, and seconds."""

    losses: list[float]
    seconds: list[float]


@dataclasses.dataclass
class Run:
    """The figures of one way to run the model, the same on all ranks but for ``routed``.

    ``peak_bytes`` is None on a CPU. ``difference`` is the largest relative difference of a loss from eager's.
    """

    name: str
    losses: list[float]
    seconds: list[float]
    tokens_per_second: float
    first_step_seconds: float
    peak_bytes: int | None
    routed: dict[str, int]
    difference: float = 0.0


def versions() -> dict[str, str]:
    """Returns the versions of those packages that are installed."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {name: found[name] for name in ("torch", "triton", "transformers") if name in found}


def largest(value: float) -> float:
    """Returns the largest value of all ranks."""
    shared = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return float(shared)


def trained(
    name: str,
    build: Callable[[str | None], nn.Module],
    step: Callable[[nn.Module, torch.optim.Optimizer, Done], None],
    done: Done,
    size: Size,
    device: torch.device,
) -> Run:
    """Trains the model that ``build`` returns for a backend; every step is the slowest rank's."""
    gc.collect()
    torch._dynamo.reset()
    cuda, before, held = device.type == "cuda", mhc_inductor.counters(), 0
    if cuda:
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated(device)  # of earlier ways: the compiler keeps some
    model = build(BACKENDS[name])
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    while len(done.losses) < size.steps:
        if cuda and len(done.losses) == WARM:
            torch.cuda.reset_peak_memory_stats(device)
        step(model, optimizer, done)
    peak = int(largest(torch.cuda.max_memory_allocated(device) - held)) if cuda else None
    seconds = [largest(s) for s in done.seconds]
    speed = size.batch * size.seq * dist.get_world_size() / statistics.median(seconds[WARM:])
    now = mhc_inductor.counters().items()
    ops = {k: n - before.get(k, 0) for k, n in now if k.startswith("routed ") and n > before.get(k, 0)}
    return Run(name, done.losses, seconds, speed, seconds[0], peak, ops)


def table_of(runs: list[Run]) -> Table:
    """Returns a column for each way to run the model."""
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("tokens a second", lambda r: f"{r.tokens_per_second:,.0f}"),
        ("speed", lambda r: f"{r.tokens_per_second / runs[0].tokens_per_second:.2f} x"),
        ("first step, with compiling", lambda r: f"{r.first_step_seconds:.1f} s"),
        ("loss, first / last", lambda r: f"{r.losses[0]:.4f} / {r.losses[-1]:.4f}"),
        ("largest difference from eager", lambda r: f"{r.difference:.1e}"),
    ]
    if runs[0].peak_bytes is not None:
        rows.insert(2, ("peak memory of a rank", lambda r: f"{(r.peak_bytes or 0) / 2**30:.2f} GiB"))
    return side_by_side("FSDP2, layers compiled one by one", {run.name: run for run in runs}, rows)


def compare(
    build: Callable[[str | None], nn.Module],
    step: Callable[[nn.Module, torch.optim.Optimizer, Done], None],
    new: Callable[[], Done],
    size: Size,
    device: torch.device,
    about: dict[str, Any],
    out: pathlib.Path | None,
) -> list[Run]:
    """Trains the model in each way, prints a table and writes ``out`` as JSON; ``about`` is copied into it.

    Raises:
        RuntimeError: A loss differs from eager's by more than ``TOLERANCE``; the figures are written before.
    """
    first, runs = dist.get_rank() == 0, list[Run]()
    for name in BACKENDS:
        runs.append(trained(name, build, step, new(), size, device))
        pairs = zip(runs[-1].losses, runs[0].losses, strict=True)
        runs[-1].difference = max(abs(a - b) / abs(b) for a, b in pairs)
        if first:
            console.print(f"{name}: {runs[-1].tokens_per_second:,.0f} tokens a second, loss {runs[-1].losses[-1]:.4f}")
    tolerance = TOLERANCE[device.type]
    equal = all(run.difference <= tolerance for run in runs)  # NaN is not
    if first:
        console.print(table_of(runs))
        routed = ", ".join(f"{name} {count}" for name, count in runs[-1].routed.items())
        console.print(f"ops in the graphs, which layers of a kind share: {routed or 'none'}", soft_wrap=True)
        facts = {
            **about,
            "size": dataclasses.asdict(size),
            "ranks": dist.get_world_size(),
            "ran_on": device_name(device),
        }
        facts |= {"mhc_inductor": mhc_inductor.__version__, "versions": versions(), "warm_steps": WARM}
        facts |= {"tolerance": tolerance, "equal": equal, "runs": [dataclasses.asdict(run) for run in runs]}
        if out is not None:
            out.write_text(json.dumps(facts, indent=1) + "\n")
    if not equal:
        apart = {run.name: run.difference for run in runs}
        raise RuntimeError(f"losses differ from eager's by more than {tolerance}: {apart}")
    return runs
