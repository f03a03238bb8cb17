# SPDX-License-Identifier: Apache-2.0
"""Shared parts of all benchmark runs: state and order, device, failures, peak memory, results as JSON."""

from __future__ import annotations

import gc
import json
import math
import pathlib
import re
import secrets
import time
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from . import environment, timing

BARS_DEVICE = "H200"
"""Absolute times are compared with bars only on this GPU."""
CPU_NOTICE = "CPU run, wall-clock times: not representative of a GPU."
REPLAYED = "CUDA-graph replay, L2 flushed before each"
SPENT = "not measured: the run's budget of seconds was spent"
"""The reason of a cell that a run had no time for."""
_GIB = {"GiB": 1.0, "MiB": 2.0**-10, "KiB": 2.0**-20, "bytes": 2.0**-30}


class Settings(Protocol):
    """The settings that every run has."""

    rounds: int
    seed: int | None

    def resolve(self) -> torch.device: ...


class PartSettings(Settings, Protocol):
    parts: tuple[str, ...]
    budget_s: float


S = TypeVar("S", bound=Settings)
P = TypeVar("P", bound=PartSettings)


def device_of(name: str, gpu: bool = True) -> torch.device:
    """Returns the device of this name; "auto" is a GPU if there is one and ``gpu`` is set, else the CPU."""
    if name == "auto":
        name = "cuda" if gpu and torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


class OtherRun(ValueError):
    """Two runs are not of the same thing."""


def same(what: str, first: object, second: object) -> None:
    """Raises OtherRun if two runs, of which one completes the other, differ in something."""
    if first != second:
        raise OtherRun(f"the runs differ in {what}: {first} and {second}")


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


def peak_memory(call: Callable[[], Any], device: torch.device, bar_mb: float) -> dict[str, Any]:
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
    return {
        "peak_above_mb": round(above, 2),
        "outputs_mb": round(kept / 1e6, 2),
        "met_bar": above <= bar_mb,
    }


def cleaned(value: Any) -> Any:
    """Returns ``value`` with NaN and infinities as strings, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {k: cleaned(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [cleaned(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def save(result: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the result as JSON. Called after each group or part, so that a crash loses at most one."""
    # A run that is cut while it writes leaves the earlier file whole.
    made = path.with_suffix(".tmp")
    made.write_text(json.dumps(cleaned(result), indent=1) + "\n")
    made.replace(path)


class Run(Generic[S]):
    """State of one run: its settings, its device, and the result so far."""

    operator: ClassVar[str]
    notice: ClassVar[str]
    unit: ClassVar[str | None] = None
    how: ClassVar[str] = REPLAYED
    lists: ClassVar[tuple[str, ...]]
    """Names of the result's lists of rows."""

    def __init__(self, settings: S, save: Callable[[dict[str, Any]], None], report: Callable[[str], None]) -> None:
        self.s, self.save, self.report = settings, save, report
        self.device = settings.resolve()
        self.gpu = self.device.type == "cuda"
        self.seed = secrets.randbits(32) if settings.seed is None else settings.seed
        torch.manual_seed(self.seed)
        torch.set_float32_matmul_precision("highest")
        self.result: dict[str, Any] = {
            **environment.header(self.device),
            "operator": self.operator,
            "complete": False,
            "notice": None if self.gpu else self.notice,
            **({} if self.unit is None else {"unit": self.unit}),
            "settings": {
                "rounds": settings.rounds,
                **self.recorded(),
                "timing": self.how if self.gpu else "wall clock",
            },
            **{name: [] for name in self.lists},
            "skipped": {},
        }
        self.flush = timing.Flusher(self.device)
        self.whole = True
        self._started = time.monotonic()

    def recorded(self) -> dict[str, Any]:
        """Returns the settings that the result keeps, in addition to rounds and timing."""
        raise NotImplementedError

    @property
    def bars_apply(self) -> bool:
        """Returns whether absolute bars count on this device."""
        return self.gpu and BARS_DEVICE in self.result["device"]["name"]

    def finish(self) -> dict[str, Any]:
        self.result["complete"] = self.whole
        if self.gpu:
            self.result["kernels"] = environment.kernels()
        self.result["seconds"] = round(time.monotonic() - self._started, 1)
        self.save(self.result)
        return self.result


class PartRun(Run[P]):
    """A run made of parts within a budget of seconds; each part is a method of the same name.

    It is complete if no part failed and the budget left nothing out.
    """

    @property
    def spent(self) -> bool:
        """Returns whether the budget is spent. Who asks leaves something out then, so the run is not complete."""
        over = time.monotonic() - self._started > self.s.budget_s
        self.whole &= not over
        return over

    def run(self) -> dict[str, Any]:
        for name in self.s.parts:
            self.part(name)
            self.save(self.result)
        return self.finish()

    def part(self, name: str) -> None:
        try:
            getattr(self, name)()
        except Exception as e:  # one failing part must not discard the others' figures
            self.result["skipped"][name] = message(e)
            self.whole = False
        self.tidy()

    def tidy(self) -> None:
        free(self.device)
