# SPDX-License-Identifier: Apache-2.0
"""Timing: CUDA-graph replays between events, with the L2 cache flushed before each replay; variants take turns.

On a CPU the same interface reads the wall clock. All times are in microseconds.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

_WARM_CALLS = 3
_LEAD = 16
"""Flushes before a round, about 1 ms on an H200: by the time the device reaches a call's first event, the host must have
launched the call, or the host's delay is timed too (docs/tuning.md, "Two rows that differ between runs")."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """The samples of one variant, in the order they were taken."""

    samples_us: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def quartiles(self) -> tuple[float, float]:
        q = statistics.quantiles(self.samples_us, n=4) if len(self.samples_us) > 1 else self.samples_us * 3
        return q[0], q[2]

    def as_json(self) -> dict[str, Any]:
        q1, q3 = self.quartiles
        return {
            "median_us": round(self.median, 3),
            "q1_us": round(q1, 3),
            "q3_us": round(q3, 3),
            "rounds": len(self.samples_us),
            "samples_us": [round(s, 3) for s in self.samples_us],
        }

    def in_ms(self) -> dict[str, Any]:
        """Returns the same with the median in milliseconds, too."""
        return self.as_json() | {"median_ms": round(round(self.median, 3) / 1e3, 6)}

    def over(self, count: int) -> Timing:
        """Returns the times of one of ``count`` equal parts of a call."""
        return Timing([s / count for s in self.samples_us])


def tensors(result: Any) -> list[torch.Tensor]:
    """Returns the tensors of a nested result, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, (tuple, list)):
        return [t for r in result for t in tensors(r)]
    return []


class Runnable:
    """A prepared variant: ``run()`` repeats the call, ``outputs`` is its result.

    ``capture=False`` calls the function each time instead of replaying a CUDA graph, so that Python's launches count.
    """

    def __init__(self, fn: Callable[[], Any], device: torch.device, capture: bool = True) -> None:
        self.graph: torch.cuda.CUDAGraph | None = None
        self.capture, self._fn = capture, fn
        if device.type != "cuda" or not capture:
            self.outputs = fn()
            return
        # Compile and tune here, on a side stream, as graph capture requires.
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_CALLS):
                fn()
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = fn()
        self.run()
        torch.cuda.synchronize(device)

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.outputs = self._fn()

    def run_poisoned(self) -> Any:
        """Fills every output with NaN (integers with -7), runs once and returns the outputs, so that unwritten elements show."""
        if self.graph is None:
            self.run()  # each call allocates new outputs: nothing to poison
            return self.outputs
        for t in tensors(self.outputs):
            t.detach().fill_(float("nan") if t.is_floating_point() else -7)
        self.run()
        torch.cuda.synchronize()
        return self.outputs

    def close(self) -> None:
        self.outputs = None
        if self.graph is not None:
            self.graph.reset()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(step: Callable[[], Any], device: torch.device) -> float:
    """Returns how long a call takes, with all that it leaves to the device, on the host's clock."""
    wait(device)
    start = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - start


def flusher(device: torch.device) -> Callable[[], object]:
    """Returns what writes a buffer larger than the L2 cache, so that every replay starts from device memory."""
    if device.type != "cuda":
        return lambda: None
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
    return torch.empty(max(4 * cache, 256 << 20) // 4, dtype=torch.int32, device=device).zero_


def interleaved(
    runnables: Mapping[str, Runnable],
    device: torch.device,
    flush: Callable[[], object],
    rounds: int,
    warm_rounds: int = 3,
) -> dict[str, Timing]:
    """Times every variant once per round, in turn, for ``rounds`` rounds after ``warm_rounds`` untimed ones."""
    if device.type != "cuda":
        wall: dict[str, list[float]] = {name: [] for name in runnables}
        for i in range(warm_rounds + rounds):
            for name, r in runnables.items():
                start = time.perf_counter()
                r.run()
                if i >= warm_rounds:
                    wall[name].append((time.perf_counter() - start) * 1e6)
        return {name: Timing(s) for name, s in wall.items()}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runnables}
    for i in range(warm_rounds + rounds):
        for _ in range(_LEAD):
            flush()
        for name, r in runnables.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(2):
                flush()  # two take longer than the host needs for a launch, so it stays ahead
            start.record()
            r.run()
            end.record()
            if i >= warm_rounds:
                events[name].append((start, end))
        torch.cuda.synchronize(device)  # bounds the queue
    return {name: Timing([a.elapsed_time(b) * 1e3 for a, b in pairs]) for name, pairs in events.items()}


def chain(fn: Callable[[], Any], length: int) -> Callable[[], Any]:
    """Returns ``length`` calls of ``fn`` as one call: latency with warm caches, as in a decoding loop."""

    def run() -> Any:
        out = None
        for _ in range(length):
            out = fn()
        return out

    return run


def copy_bandwidth(device: torch.device, flush: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Measures a large copy by a kernel, in TB/s (bytes read plus written), and the cost of an almost empty graph."""
    count = (1 << 29) if device.type == "cuda" else (1 << 22)
    src = torch.empty(count // 4, dtype=torch.int32, device=device).random_()
    dst, tiny = torch.empty_like(src), torch.zeros(1, device=device)
    copy: Callable[..., Any] = lambda src, dst: dst.copy_(src)  # noqa: E731
    if device.type == "cuda":  # where copy_ is another kind of node in a graph, and slower
        from .copy_kernel import copy
    runs = {"copy": Runnable(lambda: copy(src, dst), device), "empty": Runnable(lambda: tiny.add_(1.0), device)}
    runs["copy"].run()
    if not torch.equal(src, dst):
        raise AssertionError("the copy is not what was copied")
    times = interleaved(runs, device, flush, rounds)
    for r in runs.values():
        r.close()
    return {
        "bytes": 2 * count,
        "tb_per_s": round(2 * count / times["copy"].median / 1e6, 4),
        "smallest_graph_us": round(times["empty"].median, 3),
        **times["copy"].as_json(),
    }
