# SPDX-License-Identifier: Apache-2.0
"""The runner of all families: settings, parts within a budget, devices, failures, bars, memory, processes, JSON.

A family is a module with a :class:`PartRun`, whose methods measure the parts and add rows to lists of the result; its
cases, bars and peers are tables of data next to its inputs. ``report`` makes tables and pictures from the JSON alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import math
import multiprocessing
import pathlib
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from . import accuracy, environment, timing

BARS_DEVICE = "H200"
"""Absolute times are compared with bars only on this GPU."""
CPU_NOTICE = "CPU run, wall-clock times: not representative of a GPU."
REPLAYED = "CUDA-graph replay, L2 flushed before each"
SPENT = "not measured: the run's budget of seconds was spent"
"""The reason of a cell that a run had no time for."""
LIMIT_S = 75.0
"""Seconds that compiling side by side may take."""
_GIB = {"GiB": 1.0, "MiB": 2.0**-10, "KiB": 2.0**-20, "bytes": 2.0**-30}
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Target:
    """Targets of a row in microseconds. ``goal``: None if there is only a bar; ``peers``: times of others."""

    bar: float
    goal: float | None
    peers: Mapping[str, float] | None = None

    @property
    def best_peer(self) -> tuple[str, float] | None:
        return min(self.peers.items(), key=lambda p: p[1]) if self.peers else None

    def of(self, row: Row, apply: bool) -> Row:
        """Returns what a row says of its targets; whether they are met only if they ``apply``."""
        found: Row = {"bar_us": self.bar, "goal_us": self.goal}
        if self.peers is not None:
            found["measured_separately_us"] = self.peers
        if apply:
            found["met_bar"] = row["median_us"] <= self.bar
            found["met_goal"] = None if self.goal is None else row["median_us"] <= self.goal
        return found


@dataclasses.dataclass
class Settings:
    """Settings that families share.

    ``small``: tiny shapes; ``budget_s``: seconds from the start, after which what may be left out is; ``peers``,
    ``compiled``: whether these are measured.
    """

    device: str = "auto"
    parts: tuple[str, ...] = ()
    rounds: int = 20
    budget_s: float = math.inf
    seed: int | None = None
    small: bool = False
    peers: bool = True
    compiled: bool = True
    cpu_parts: ClassVar[tuple[str, ...]] = ()
    """Parts that need no GPU, so that "auto" is the CPU for them."""

    def resolve(self) -> torch.device:
        """Returns the device; "auto" is a GPU if there is one and a part needs it, else the CPU."""
        name, needs = self.device, not self.cpu_parts or not set(self.parts) <= set(self.cpu_parts)
        if name == "auto":
            name = "cuda" if needs and torch.cuda.is_available() else "cpu"
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return device


class OtherRun(ValueError):
    """Two runs are not of the same thing."""


def same(first: Row, second: Row, *places: str) -> None:
    """Raises OtherRun if two runs, of which one completes the other, differ at a place, such as "device name"."""
    for place in places:
        a, b = (functools.reduce(lambda of, key: of.get(key, {}), place.split(), run) for run in (first, second))
        if a != b:
            raise OtherRun(f"the runs differ in {place}: {a} and {b}")


def message(e: BaseException) -> str:
    """Returns the text that a row records for a failure."""
    return f"{type(e).__name__}: {e}"[:2000]


def reason(e: BaseException) -> str | None:
    """Returns why a call ran out of GPU memory, with the least that it needs; None for any other failure."""
    text = str(e)
    if "out of memory" not in text:
        return None

    def gib(before: str, after: str = "") -> float | None:
        found = re.search(rf"{before} ([\d.]+) (GiB|MiB|KiB|bytes){after}", text)
        return None if found is None else float(found[1]) * _GIB[found[2]]

    held, tried = gib("allocated memory", " is allocated by PyTorch"), gib("Tried to allocate")
    total = gib("total capacity of")
    if held is None or tried is None or total is None:
        return "out of memory"
    return f"out of memory: needs at least {held + tried:.0f} GiB, the GPU has {total:.0f}"


def free(device: torch.device) -> None:
    """Frees the GPU memory that earlier groups held."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Computes on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def peak_memory(call: Callable[[], Any], device: torch.device, bar_mb: float) -> Row:
    """Returns the peak memory of ``call`` above earlier allocations and its outputs, in MB (10^6 bytes)."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    outputs = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    kept = sum(t.untyped_storage().nbytes() for t in timing.tensors(outputs))
    above = (peak - before - kept) / 1e6
    return {"peak_above_mb": round(above, 2), "outputs_mb": round(kept / 1e6, 2), "met_bar": above <= bar_mb}


def cleaned(value: Any) -> Any:
    """Returns ``value`` with NaN and infinities as strings, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {k: cleaned(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [cleaned(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def save(result: Row, path: pathlib.Path) -> None:
    """Writes the result as JSON. Called after each part, so that a crash loses at most one."""
    # A run that is cut while it writes leaves the earlier file whole.
    made = path.with_suffix(".tmp")
    made.write_text(json.dumps(cleaned(result), indent=1) + "\n")
    made.replace(path)


Jobs = dict[str, tuple[Callable[..., None], tuple[Any, ...]]]


def side_by_side(jobs: Jobs) -> Row:
    """Runs jobs in spawned processes on the current GPU; returns the seconds they took, and which did not finish.

    They compile kernels, which the run then finds in Triton's cache on disk; nothing is timed meanwhile. What a failed
    job or one beyond ``LIMIT_S`` seconds leaves out, the run compiles itself.
    """
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
    return {"seconds": round(time.monotonic() - start, 1), "failed": failed}


class PartRun:
    """A run made of parts within a budget of seconds; each part is a method of the same name.

    It is complete if no part failed and the budget left nothing out.
    """

    operator: ClassVar[str]
    notice: ClassVar[str] = CPU_NOTICE
    unit: ClassVar[str | None] = "microseconds"
    how: ClassVar[str] = REPLAYED
    lists: ClassVar[tuple[str, ...]]
    """Names of the result's lists of rows."""

    def __init__(self, settings: Any, save: Callable[[Row], None], report: Callable[[str], None]) -> None:
        self.s, self.save, self.report = settings, save, report
        self.device = settings.resolve()
        self.gpu = self.device.type == "cuda"
        # Without parts for it, a CPU only tries the run out, with tiny shapes: its times say nothing at any.
        settings.small |= not self.gpu and not settings.cpu_parts
        self.seed = secrets.randbits(32) if settings.seed is None else settings.seed
        torch.manual_seed(self.seed)
        torch.set_float32_matmul_precision("highest")
        self.result: Row = {
            **environment.header(self.operator, self.device),
            "complete": False,
            "notice": None if self.gpu else self.notice,
            **({} if self.unit is None else {"unit": self.unit}),
            "settings": {
                **{k: v for k, v in vars(settings).items() if k not in ("device", "earlier")},
                "seed": self.seed,
                "threads": torch.get_num_threads(),
                "float32_matmul_precision": torch.get_float32_matmul_precision(),
                "timing": self.how if self.gpu else "wall clock",
            },
            **{name: [] for name in self.lists},
            "skipped": {},
            "seconds_of": {},
        }
        self.flush = timing.flusher(self.device)
        self.whole = True
        self._started = time.monotonic()

    @property
    def bars_apply(self) -> bool:
        """Returns whether absolute bars count on this device."""
        return self.gpu and BARS_DEVICE in self.result["device"]["name"] and not self.s.small

    def sized(self, shape: Any) -> Any:
        """Returns a shape, or a small one of the same kind where the run is small."""
        return shape.small() if self.s.small else shape

    def jobs(self) -> Jobs:
        """Returns what to compile in parallel processes before a run on a GPU."""
        return {}

    @property
    def spent(self) -> bool:
        """Returns whether the budget is spent. Who asks leaves something out then, so the run is not complete."""
        over = time.monotonic() - self._started > self.s.budget_s
        self.whole &= not over
        return over

    def run(self) -> Row:
        if self.gpu and not self.s.small and (jobs := self.jobs()):
            self.report("compiling side by side")
            self.result["settings"]["compiled_first"] = side_by_side(jobs)
        for name in self.s.parts:
            begun = time.monotonic()
            self.part(name)
            self.result["seconds_of"][name] = round(time.monotonic() - begun, 1)
            self.save(self.result)
        self.result["complete"] = self.whole
        if self.gpu:
            self.result["kernels"] = environment.kernels()
        self.result["seconds"] = round(time.monotonic() - self._started, 1)
        self.save(self.result)
        return self.result

    def part(self, name: str) -> None:
        try:
            if name == "memory" and not self.gpu:
                self.result["skipped"][name] = "peak memory is read from a GPU's allocator"
            else:
                self.measure(name)
        except Exception as e:  # one failing part must not discard the others' figures
            self.result["skipped"][name] = message(e)
            self.whole = False
        self.tidy()

    def measure(self, name: str) -> None:
        getattr(self, name)()

    def peak(self, row: Row, build: Callable[[], Callable[[], Any]]) -> None:
        """Adds to the result a row of the peak memory of a call's second time, or of its failure."""
        self.result["memory"].append(row)
        self.report(f"memory: {row['variant']}")
        try:
            call = build()
            call()
            row |= peak_memory(call, self.device, row["bar_mb"])
        except Exception as e:
            row["error"] = message(e)

    def equal_bits(self, checks: Mapping[str, tuple[accuracy.Named, accuracy.Named]], shape: list[int]) -> None:
        """Adds to the result, for each check, whether its two runs are equal in bits."""
        rows = ({"check": name, "shape": shape, **accuracy.equal_bits(*runs)} for name, runs in checks.items())
        self.result["determinism"].extend(rows)

    def tidy(self) -> None:
        torch.compiler.reset()
        free(self.device)
