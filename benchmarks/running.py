"""What the runs of all benchmarks share: the device, failures as text, peak memory, results as JSON."""

from __future__ import annotations

import gc
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import torch

from . import timing


def device_of(name: str, gpu: bool = True) -> torch.device:
    """The device of this name; "auto" is a GPU where there is one and the run wants it (``gpu``)."""
    if name == "auto":
        name = "cuda" if gpu and torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def message(e: BaseException) -> str:
    """A failure as a row records it."""
    return f"{type(e).__name__}: {e}"[:2000]


def free(device: torch.device) -> None:
    """Give back what earlier groups held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def peak_memory(call: Callable[[], Any], device: torch.device, bar_mb: float) -> dict[str, Any]:
    """Peak memory of ``call`` above what was allocated before and what it returns, in MB of 10^6 bytes."""
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
    """The same with NaN and infinities as words: JSON has none."""
    if isinstance(value, dict):
        return {k: cleaned(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [cleaned(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def save(result: dict[str, Any], path: pathlib.Path) -> None:
    """The result as JSON: after each group or part, so that a crash loses one at most."""
    path.write_text(json.dumps(cleaned(result), indent=1) + "\n")
