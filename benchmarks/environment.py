# SPDX-License-Identifier: Apache-2.0
"""The environment recorded with a result: commit, sources, device, versions."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from typing import Any

import torch

from .source_hash import ROOT, source_hash


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def commit() -> dict[str, Any]:
    """Returns the commit and whether the tree differs from it. MHC_COMMIT and MHC_DIRTY, if set, replace git."""
    named = os.environ.get("MHC_COMMIT")
    if named:
        return {"commit": named, "dirty": os.environ.get("MHC_DIRTY", "0") not in ("", "0")}
    head = _output("git", "rev-parse", "HEAD")
    if head is None:
        return {"commit": None, "dirty": None}
    # The results that a run writes do not make the tree dirty.
    status = _output("git", "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return {"commit": head, "dirty": bool(status)}


def versions() -> dict[str, str | None]:
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    transformers = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        transformers = importlib.metadata.version("transformers")
    driver = None
    if torch.cuda.is_available():
        driver = (_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "").split("\n")[
            0
        ] or None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "transformers": transformers,
        "cuda": torch.version.cuda,
        "driver": driver,
    }


def kernels() -> dict[str, dict[str, int]]:
    """Returns, by kernel, the most registers a thread and the most spilled ones of what this process ran on its GPUs.

    Kernels that generated code launches are not among them.
    """
    found: dict[str, dict[str, int]] = {}
    ours = [vars(m) for name, m in sys.modules.items() if name.startswith("mhc_inductor.kernels.")]
    for jitted in (j for names in ours for j in names.values() if hasattr(j, "device_caches")):
        compiled = [k for cache, *_ in jitted.device_caches.values() for k in cache.values()]
        loaded = [k for k in compiled if isinstance(getattr(k, "n_regs", None), int)]
        if loaded:
            most = {"registers": max(k.n_regs for k in loaded), "spilled": max(k.n_spills for k in loaded)}
            found[jitted.__name__] = most
    return dict(sorted(found.items()))


def device_facts(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {
            "type": device.type,
            "name": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        }
    p = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": p.name,
        "multiprocessors": p.multi_processor_count,
        "memory_gib": round(p.total_memory / 2**30, 1),
        "l2_bytes": getattr(p, "L2_cache_size", None),
        "capability": f"{p.major}.{p.minor}",
    }


def header(operator: str, device: torch.device, **further: Any) -> dict[str, Any]:
    """Returns what a result begins with: commit, sources, device, versions."""
    return {
        "schema": 1,
        "operator": operator,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **commit(),
        "kernel_sources_sha256": source_hash(),
        "device": device_facts(device),
        "versions": versions(),
        **further,
    }
