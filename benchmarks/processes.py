# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of whole models share: worker processes, rows that a later run keeps, bars, results and their tables."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from . import environment, running
from .source_hash import ROOT, ROUTING, source_hash

Row = dict[str, Any]
SPENT = "the run's budget of seconds was spent"
CLOSE_S = 10.0

# ---- processes


def environ(**changes: str) -> dict[str, str]:
    """Returns the environment of a process that imports from this checkout first."""
    places = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), **changes}


class Worker:
    """A process of :mod:`benchmarks.worker`, which measures jobs of a module; ``log`` holds what it prints."""

    def __init__(self, module: str, caches: str, log: pathlib.Path, env: Mapping[str, str]) -> None:
        self.log, pipe = log, subprocess.PIPE
        words = [sys.executable, "-m", "benchmarks.worker", module, caches]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=out, text=True, errors="replace"
            )

    def ask(self, job: Row | None, limit: float) -> Row:
        """Returns a job's row; where it raises or the process ends first, what it told, "error", and what was printed."""
        row, done, began = dict[str, Any](), False, time.monotonic()
        late = threading.Timer(limit, self.process.kill)
        late.start()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        while not done and (line := self.process.stdout.readline()).endswith("\n"):
            row = json.loads(line)
            done = row.pop("done", False)
        late.cancel()
        if not done:
            passed, code = time.monotonic() - began >= limit, self.process.wait()
            row["error"] = f"the process ended with {f'its limit of {limit:.0f} s' if passed else code}"
        if "error" in row:
            row["output"] = self.log.read_text(errors="replace")[-3000:]
        return row

    def close(self, limit: float = 0.0) -> None:
        """Ends the process; in ``limit`` seconds it may do so by itself, as one must that deletes its caches."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=limit)
        self.process.kill()
        self.process.communicate()


def stamp(job: Any) -> Row:
    """Returns what a kept row must carry to be reused: job, hashes of the sources, commit, transformers."""
    return {
        "job": json.loads(json.dumps(dataclasses.asdict(job))),
        "sources": [environment.source_hash(), source_hash(folders=ROUTING)],
        "transformers": environment.versions()["transformers"],
        **environment.commit(),
    }


def kept(folder: pathlib.Path, job: Any) -> Row | None:
    """Returns the kept row of a job, if it is of this code and did not fail."""
    with contextlib.suppress(OSError, ValueError):
        row: Row = json.loads((folder / f"{job.name}.json").read_text())
        if row.get("stamp") == stamp(job) and "error" not in row:
            return row
    return None


def run(
    module: str,
    settings: Any,
    folder: pathlib.Path,
    step: Callable[[str], None],
    save: Callable[[list[Row]], None] = lambda _: None,
) -> list[Row]:
    """Returns the rows of the jobs of ``settings.plan()``, one after the other, so that each has the machine to itself.

    No job begins ``settings.budget_s`` seconds after the start, and none takes longer than ``limit_s``. A failed or
    skipped row has "error". ``save`` gets the rows after every job. They are kept in ``folder``, so that a later run can
    reuse them; so is Python's byte code: if the installation cannot keep it, every process would otherwise compile 360
    modules of torch. A process that is stopped late keeps the times that it saved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows, end = [], time.monotonic() + settings.budget_s
    bytecode = os.environ.get("PYTHONPYCACHEPREFIX", str(folder / "bytecode"))
    for job in settings.plan():
        left, row = end - time.monotonic(), kept(folder, job)
        if row is None and left > 0:
            step(job.name)
            worker = Worker(module, "cold", folder / f"{job.name}.log", environ(PYTHONPYCACHEPREFIX=bytecode))
            row = job.named | worker.ask(dataclasses.asdict(job), min(settings.limit_s, max(left, 1)))
            worker.close(CLOSE_S)
            row["stamp"] = stamp(job)
            (folder / f"{job.name}.json").write_text(json.dumps(row))
        rows.append(row or {**job.named, "error": SPENT})
        save(rows)
    return rows


# ---- figures


def against(value: float, bar: float | None, goal: float | None, least: bool = False) -> Row:
    """Returns a figure with its bar and its goal, and whether it meets them: at most, or at ``least``, these values."""

    def met(limit: float | None) -> bool | None:
        return None if limit is None else value >= limit if least else value <= limit

    return {"value": value, "bar": bar, "met_bar": met(bar), "goal": goal, "met_goal": met(goal)}


# ---- results


def notice(device: torch.device) -> str | None:
    return None if device.type == "cuda" else running.CPU_NOTICE


def without(rows: Iterable[Row], *fields: str) -> list[Row]:
    return [{k: v for k, v in row.items() if k not in fields} for row in rows]


def figure(row: Mapping[str, Any], name: str, spec: str) -> str:
    """Returns a cell of a table, empty where the row has no such figure."""
    return "" if row.get(name) is None else f"{row[name]:{spec}}"
