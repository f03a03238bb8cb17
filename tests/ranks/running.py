# SPDX-License-Identifier: Apache-2.0
"""Runs checks on ranks: processes of one gloo group, forked from a process that has imported what they need.

A check is a function that every rank calls, of the mesh (``sharded_*.py``) or of nothing (``distributed_*.py``).
``python -m tests.ranks.running NAME...`` runs some on two ranks, those named ``whole_...`` on four.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import init_device_mesh

import mhc_inductor
from tests.ranks import distributed_checks, distributed_tools, sharded_checks
from tests.tools import quick_torch

TIMEOUT = datetime.timedelta(minutes=5)
SERVER = mp.get_context("forkserver")
SERVER.set_forkserver_preload([__name__])
CHECKS: dict[str, Callable[[Any], None]] = {
    **sharded_checks.CHECKS,
    **{name: lambda _, check=check: check() for name, check in distributed_checks.CHECKS.items()},
}


def _rank(rank: int, shape: tuple[int, ...], folder: str, names: Sequence[str]) -> None:
    """Runs checks as one rank; writes what failed, by check, to a file of this rank."""
    torch.set_num_threads(1)
    quick_torch.apply()
    assert "mhc_inductor.distributed" not in sys.modules, "it is imported where it is used"
    early = distributed_tools.message(lambda: mhc_inductor.distributed.e79_scan(torch.ones(2, 1, 4)))
    assert early.startswith("RuntimeError: e79_scan: torch.distributed has no process group; call torch."), early
    world, found = torch.Size(shape).numel(), dict[str, str]()
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=TIMEOUT)
    mesh = init_device_mesh("cpu", shape)
    for name in names:
        found[name] = quick_torch.roomy(_told, CHECKS[name], mesh)
        (pathlib.Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
        if found[name] and not _everywhere(store, f"failed {name}", world):
            break  # the other ranks wait for messages of this check, or are past it
    os._exit(0)  # the group of a dead rank cannot be taken down


def _told(check: Callable[[Any], None], mesh: Any) -> str:
    """Returns what went wrong in a check, or ""."""
    try:
        check(mesh)
    except BaseException:
        return traceback.format_exc()
    return ""


def _everywhere(store: dist.Store, key: str, world: int, seconds: float = 10) -> bool:
    """Returns whether all ranks call this with ``key`` in time."""
    store.add(key, 1)
    end = time.monotonic() + seconds
    while store.add(key, 0) < world:
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def run(shape: tuple[int, ...], names: Sequence[str], seconds: float = 500) -> dict[str, str]:
    """Runs checks on the ranks of a mesh; returns for each check what the ranks that failed said, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            SERVER.Process(target=_rank, args=(rank, shape, folder, names), daemon=True)
            for rank in range(torch.Size(shape).numel())
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + seconds
        for process in ranks:
            process.join(max(0, end - time.monotonic()))
            process.kill()
        files = [pathlib.Path(folder) / f"rank{rank}.json" for rank in range(len(ranks))]
        found = [json.loads(f.read_text()) if f.exists() else {} for f in files]
    said = {name: [one.get(name, f"did not run, after {list(one)[-1:]}") for one in found] for name in names}
    return {n: "\n".join(f"rank {r}: {text}" for r, text in enumerate(told) if text) for n, told in said.items()}


if __name__ == "__main__":
    names = sys.argv[1:] or list(sharded_checks.ONE)
    for name, told in run((2, 2) if names[0].startswith("whole_") else (2,), names).items():
        print(name, told or "good")
