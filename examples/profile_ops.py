# SPDX-License-Identifier: Apache-2.0
"""Writes a trace of one training step for https://ui.perfetto.dev, and prints what each op computes and moves.

python examples/profile_ops.py                         # a small model on a CPU, larger on a GPU; writes trace.json
python examples/profile_ops.py --peak 989 --memory 4.8 # the peaks of an H200, in TFLOP/s and TB/s: prints MFU and MBU
python examples/profile_ops.py --help
"""

from __future__ import annotations

import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import mhc_inductor
from mhc_inductor.nn import HyperConnection

STREAMS = 4
SCOPES: dict[str, str | int | bool | Callable[..., object]] = {"mhc_inductor.profile_scopes": True}


def model_of(dim: int, layers: int, device: torch.device) -> nn.Module:
    """Returns ``layers`` sublayers, each in a hyper-connection of its own."""
    return nn.Sequential(*(HyperConnection(dim, STREAMS, nn.Linear(dim, dim)) for _ in range(layers))).to(device)


def step(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Runs a forward and a backward, and waits for the device."""
    call(x).square().mean().backward()
    if x.is_cuda:
        torch.cuda.synchronize()


def median_seconds(call: Callable[[Tensor], Tensor], x: Tensor, rounds: int) -> float:
    """Returns the median time of a step, after three that compile and warm up."""
    taken = []
    for _ in range(rounds + 3):
        start = time.perf_counter()
        step(call, x)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[3:])


def shorten(trace: pathlib.Path) -> None:
    """Leaves in a trace of one thread what runs around the ops: names, times and shapes."""
    events = json.loads(trace.read_text())["traceEvents"]
    events = sorted((e for e in events if e.get("ph") == "X" and "dur" in e), key=lambda e: (e["ts"], -e["dur"]))
    start, end, kept = events[0]["ts"], 0.0, []
    for e in events:
        inside = e["ts"] < end  # an op's own record in its scope tells what the formula computes it with: left out
        if e["name"].startswith("mhc_inductor::") and not inside:
            end = e["ts"] + e["dur"]
        if not inside or e["cat"] == "user_annotation":
            shapes = {"Input Dims": d} if (d := e.get("args", {}).get("Input Dims")) else {}
            times = {"ts": round(e["ts"] - start, 1), "dur": round(e["dur"], 1)}
            kept.append({"name": e["name"], "cat": e["cat"], "ph": "X", "pid": 1, "tid": 1, **times, "args": shapes})
    lines = ",\n".join(map(json.dumps, kept))
    trace.write_text(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n')


def main(
    dim: Annotated[int | None, typer.Option(min=16, help="Width D of a stream; 64, on a GPU 4096.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the step; 128, on a GPU 8192.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Sublayers.")] = 2,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU where there is one.")] = None,
    peak: Annotated[float | None, typer.Option(help="Peak of the device in TFLOP/s, for the MFU.")] = None,
    memory: Annotated[float | None, typer.Option(help="Bandwidth of its memory in TB/s, for the MBU.")] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Timed steps; 0 leaves the time out.")] = 10,
    out: Annotated[pathlib.Path, typer.Option(help="The trace to write.")] = pathlib.Path("trace.json"),
    brief: Annotated[bool, typer.Option("--brief", help="Leave out what runs inside an op; for a CPU.")] = False,
) -> None:
    """Counts, traces and times one training step."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    big = where.type == "cuda"
    dim, tokens = dim or (4096 if big else 64), tokens or (8192 if big else 128)
    torch.manual_seed(0)
    seconds = 0.0
    model = model_of(dim, layers, where)
    x = torch.randn(1, tokens, STREAMS, dim, device=where, dtype=torch.bfloat16 if big else torch.float32)
    called = torch.compile(model, backend="mhc_inductor", options=SCOPES)
    with torch.autocast(where.type, torch.bfloat16, enabled=big):
        step(called, x)
        with mhc_inductor.count_ops() as counts:
            step(called, x)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if big else [])]
        with profile(activities=activities, record_shapes=True) as trace, mhc_inductor.op_scopes():
            step(called, x)
        if rounds:
            # Counting and scopes take time of their own: the time is that of the model as it runs without them.
            torch.compiler.reset()
            seconds = median_seconds(torch.compile(model, backend="mhc_inductor"), x, rounds)
    trace.export_chrome_trace(str(out))
    if brief:
        shorten(out)
    print(counts)
    if rounds:
        print(f"one step: {seconds * 1e3:.3g} ms, compiled, on {where}")
        if peak is not None:
            print(f"MFU of these ops: {counts.mfu(seconds, peak * 1e12):.2%} of {peak:g} TFLOP/s")
        if memory is not None:
            print(f"MBU of these ops: {counts.mbu(seconds, memory * 1e12):.2%} of {memory:g} TB/s")
    print(f"trace: {out}; open it at https://ui.perfetto.dev")


if __name__ == "__main__":
    typer.run(main)
