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
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from . import environment, running
from .source_hash import ROOT, ROUTING, source_hash

Row = dict[str, Any]
SPENT = "the run's budget of seconds was spent"

# ---- processes


def environ(**changes: str) -> dict[str, str]:
    """Returns the environment of a process that imports from this checkout first."""
    places = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), **changes}


class Worker:
    """A process of :mod:`benchmarks.worker`, which takes lines and answers with lines; ``log`` holds what it prints."""

    def __init__(self, words: Sequence[str], log: pathlib.Path, env: Mapping[str, str]) -> None:
        self.log, pipe = log, subprocess.PIPE
        words = [sys.executable, "-m", "benchmarks.worker", *words]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=out, text=True, errors="replace"
            )

    def tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def answer(self) -> str:
        """Returns the next line that the process answers with, "" where it has ended."""
        return self.process.stdout.readline().strip()

    def ended(self, limit: float) -> object:
        """Waits for the end, at most ``limit`` seconds; returns the exit code, or which limit ended the process."""
        try:
            self.process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.close()
            return f"its limit of {limit:.0f} s"
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def output(self) -> str:
        """Returns the end of what the process printed."""
        return self.log.read_text(errors="replace")[-3000:]


def begin(module: str, job: Any, folder: pathlib.Path, env: Mapping[str, str]) -> Worker:
    """Starts the process of a job of ``module``. Its row and its log are files in ``folder`` with the job's name."""
    path = folder / f"{job.name}.json"
    path.unlink(missing_ok=True)
    words = ["measure", module, json.dumps(dataclasses.asdict(job)), str(path)]
    return Worker(words, folder / f"{job.name}.log", env)


def finish(worker: Worker, job: Any, folder: pathlib.Path, limit: float) -> Row:
    """Waits for a job's process, and returns and keeps its row; a failed one has "error", and what it had saved."""
    path, ended = folder / f"{job.name}.json", worker.ended(limit)
    row = {**job.named, "error": f"the process ended with {ended}"}
    with contextlib.suppress(OSError, ValueError):
        row = {**(row if ended else {}), **json.loads(path.read_text())}
    if "error" in row:
        row["output"] = worker.output()
    row["stamp"] = stamp(job)
    path.write_text(json.dumps(row))
    return row


def stamp(job: Any) -> Row:
    """Returns what a kept row must carry to be reused: job, hashes of the sources, commit, transformers."""
    import transformers

    return {
        "job": json.loads(json.dumps(dataclasses.asdict(job))),
        "sources": [environment.source_hash(), source_hash(folders=ROUTING)],
        "transformers": transformers.__version__,
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
            worker = begin(module, job, folder, environ(PYTHONPYCACHEPREFIX=bytecode))
            row = finish(worker, job, folder, min(settings.limit_s, max(left, 1)))
        rows.append(row or {**job.named, "error": SPENT})
        save(rows)
    return rows


# ---- figures


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


def against(value: float, bar: float | None, goal: float | None, least: bool = False) -> Row:
    """Returns a figure with its bar and its goal, and whether it meets them: at most, or at ``least``, these values."""

    def met(limit: float | None) -> bool | None:
        return None if limit is None else value >= limit if least else value <= limit

    return {"value": value, "bar": bar, "met_bar": met(bar), "goal": goal, "met_goal": met(goal)}


# ---- results


def header(operator: str, device: torch.device, **further: Any) -> Row:
    """Returns what a result begins with: commit, sources, device, versions with transformers'."""
    import transformers

    found = environment.header(device) | {"operator": operator} | further
    found["versions"]["transformers"] = transformers.__version__
    return found


def notice(device: torch.device) -> str | None:
    return None if device.type == "cuda" else running.CPU_NOTICE


def without(rows: Iterable[Row], *fields: str) -> list[Row]:
    return [{k: v for k, v in row.items() if k not in fields} for row in rows]


def figure(row: Mapping[str, Any], name: str, spec: str) -> str:
    """Returns a cell of a table, empty where the row has no such figure."""
    return "" if row.get(name) is None else f"{row[name]:{spec}}"
