# SPDX-License-Identifier: Apache-2.0
"""One process of a job: joins the group, runs the job's function, and writes its row.

The function gets :class:`Ranks`, and returns a dictionary for JSON.
"""

from __future__ import annotations

import datetime
import importlib
import json
import math
import os
import pathlib
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from .. import timing
from ..source_hash import ROOT


class Ranks:
    """What a process knows of its job. Its row is a file of the job's folder."""

    def __init__(self, words: dict[str, Any]) -> None:
        self.rank, self.size, self.toy, self.timed = words["rank"], words["ranks"], words["toy"], words["timed"]
        self.options: dict[str, Any] = words["options"]
        self.folder = pathlib.Path(words["folder"])
        self.cuda = words["device"] == "cuda"
        self.device = torch.device("cuda", self.rank) if self.cuda else torch.device("cpu")
        self.group, self.timeout = words["group"], datetime.timedelta(seconds=words["timeout_s"])
        self.notes: dict[str, Any] = {}

    def join(self) -> None:
        """Takes this rank's device, and joins the process group."""
        if self.cuda:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        if self.group:
            backend = "cpu:gloo,cuda:nccl" if self.cuda else "gloo"
            store = dist.FileStore(str(self.folder / "store"), self.size)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=self.timeout)

    def write(self, row: dict[str, Any]) -> None:
        path = self.folder / f"rank{self.rank}.json"
        made = path.with_suffix(".tmp")
        made.write_text(json.dumps({**self.notes, **row}))
        made.replace(path)

    def note(self, **values: Any) -> None:
        """Adds to the row, and writes it: what a process had found stays if it is ended."""
        self.notes.update(values)
        self.write({})

    def everywhere(self, value: Any) -> list[Any]:
        """Returns the values of all ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def gate(self) -> None:
        """Waits until this job has the machine to itself."""
        self.free()
        if self.timed:
            (self.folder / f"ready{self.rank}").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.05)

    def wait(self) -> None:
        timing.wait(self.device)

    def free(self) -> None:
        if self.cuda:
            self.wait()
            torch.cuda.empty_cache()

    def together(self) -> None:
        """Waits for the device and for the other ranks; no GPU works while a rank waits."""
        self.wait()
        dist.all_reduce(torch.zeros(1))

    def milliseconds(self, call: Callable[[], Any], rounds: int, everyone: bool = True, in_a_row: int = 1) -> float:
        """Returns the median over rounds of the slowest rank's time, or of the first rank's if it runs alone.

        Args:
            call: What is timed; called once before the first round.
            rounds: Times that are taken.
            everyone: Whether all ranks call it. Otherwise only the first does, and the others wait.
            in_a_row: Calls a time, which the device gets without waiting in between; the time is divided by them.
        """
        calls, samples = in_a_row if everyone or self.rank == 0 else 0, []
        if calls:
            call()
        for _ in range(rounds):
            self.together()
            taken = timing.seconds(lambda: [call() for _ in range(calls)], self.device)
            samples.append(max(self.everywhere(1e3 * taken / in_a_row if calls else 0.0)))
        return statistics.median(samples)

    def peak_mb(self, call: Callable[[], Any]) -> float | None:
        """Returns the peak of memory in MB (10^6 bytes) above what was there before the call; None on a CPU."""
        if not self.cuda:
            call()
            return None
        self.free()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        self.wait()
        return round((torch.cuda.max_memory_allocated(self.device) - before) / 1e6, 1)


def worst(values: Iterable[float]) -> float:
    """Returns the largest of some errors; NaN if one is NaN, which ``max`` may pass over."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def main(words: str) -> None:
    given = json.loads(words)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples")]
    ranks, code = Ranks(given), 0
    try:
        ranks.join()
        import mhc_inductor  # noqa: F401  (registers the backend in a checkout that is not installed)

        module, _, name = given["target"].partition(":")
        began = time.monotonic()
        row = getattr(importlib.import_module(f"benchmarks.multi_gpu.{module}"), name)(ranks)
        ranks.write({**row, "seconds": round(time.monotonic() - began, 1)})
    except BaseException as e:
        traceback.print_exc()
        ranks.write({"error": f"{type(e).__name__}: {e}"[:2000], "trace": traceback.format_exc()[-3000:]})
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without taking the group down: a rank that is gone would make the others wait


if __name__ == "__main__":
    main(sys.argv[1])
