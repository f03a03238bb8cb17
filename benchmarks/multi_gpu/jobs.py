# SPDX-License-Identifier: Apache-2.0
"""Runs jobs of several processes, each under a time limit, side by side where they are not timed.

A timed job does what comes before its timing, imports and compiling, next to the others. Then it waits at a gate, and
has the machine to itself once it is opened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..processes import environ
from ..source_hash import ROOT

GRACE_S = 8.0
"""What a process that is told to end may take; torchrun ends its own processes in this time."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Processes that run one function of this package together.

    ``target``: "module:function". ``group``: whether they form a process group. ``timed``: whether the job waits for a
    gate before it measures. ``limit_s``: seconds to the gate or the end, and as many from the gate on.
    ``timeout_s``: the process group's.
    """

    name: str
    part: str
    target: str
    ranks: int
    limit_s: float
    group: bool = True
    timed: bool = False
    timeout_s: float = 60.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Outcome:
    """How one process of a job ended: its row, None if it wrote none; its exit code, None if the limit ended it."""

    rank: int
    row: dict[str, Any] | None
    code: int | None
    seconds: float
    log: str


class Running:
    """The processes of a job, whose files are in a folder of their own."""

    def __init__(self, job: Job, folder: pathlib.Path, device: str, toy: bool) -> None:
        self.job, self.folder, self.began, self.opened = job, folder, time.monotonic(), False
        folder.mkdir(parents=True)
        self.deadline: float | None = self.began + job.limit_s
        self.ended: dict[int, tuple[int | None, float]] = {}
        words = dataclasses.asdict(job) | {"device": device, "toy": toy, "folder": str(folder)}
        self.processes = [self._start(words | {"rank": rank}) for rank in range(job.ranks)]

    def _start(self, words: dict[str, Any]) -> subprocess.Popen[bytes]:
        env = environ(PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1" if words["toy"] else "4")
        # Many processes compile at once; each would otherwise start a worker for every processor.
        env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
        if not self.job.timed:
            env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # equal bits in two runs
        command = [sys.executable, "-m", "benchmarks.multi_gpu.rank", json.dumps(words)]
        with (self.folder / f"log{words['rank']}.txt").open("wb") as log:
            return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)

    @property
    def waits(self) -> bool:
        """Returns whether all processes stand at the gate."""
        return not self.opened and len(list(self.folder.glob("ready*"))) == self.job.ranks

    def open(self) -> None:
        """Lets the processes go on, for at most the limit."""
        self.opened, self.deadline = True, time.monotonic() + self.job.limit_s
        (self.folder / "go").touch()

    def poll(self, cut: float) -> bool:
        """Returns whether all processes have ended; ends them after the deadline, or the moment ``cut``."""
        now = time.monotonic()
        for rank, process in enumerate(self.processes):
            if rank not in self.ended and process.poll() is not None:
                self.ended[rank] = (process.returncode, now - self.began)
        if len(self.ended) < len(self.processes):
            if self.job.timed and self.waits:
                self.deadline = None
            if now > min(cut, self.deadline or cut):
                self.end()
        return len(self.ended) == len(self.processes)

    def end(self) -> None:
        """Ends the processes that still run, with those that they started."""
        left = [(rank, process) for rank, process in enumerate(self.processes) if rank not in self.ended]
        for _, process in left:
            _signal(process, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until and any([_signal(process, 0) for _, process in left]):
            time.sleep(0.05)
        for rank, process in left:
            _signal(process, signal.SIGKILL)
            process.wait()
            self.ended[rank] = (None, time.monotonic() - self.began)

    def outcome(self, rank: int) -> Outcome:
        row, (code, seconds) = None, self.ended[rank]
        with contextlib.suppress(OSError, ValueError):
            row = json.loads((self.folder / f"rank{rank}.json").read_text())
        log = (self.folder / f"log{rank}.txt").read_text(errors="replace")
        return Outcome(rank, row, code, round(seconds, 1), log)


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Sends a signal to a process and those of its session; returns whether one of them is left."""
    process.poll()  # one that has ended is no longer counted
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
        return True
    return False


def run(
    jobs: Sequence[Job],
    folder: pathlib.Path,
    device: str,
    toy: bool,
    side_by_side: int,
    budget_s: float,
    done: Callable[[Job, list[Outcome]], None],
) -> None:
    """Runs jobs, ``side_by_side`` of them at once; calls ``done`` when one has ended.

    Jobs are ended after ``budget_s`` seconds; those that have not begun by then are reported without outcomes.
    """
    cut, waiting, running = time.monotonic() + budget_s, list(jobs), dict[str, Running]()
    try:
        while waiting or running:
            while waiting and len(running) < side_by_side:
                job = waiting.pop(0)
                if time.monotonic() > cut:
                    done(job, [])
                else:
                    running[job.name] = Running(job, folder / job.name, device, toy)
            for name in [name for name, r in running.items() if r.poll(cut)]:
                ended = running.pop(name)
                done(ended.job, [ended.outcome(rank) for rank in range(ended.job.ranks)])
            # The gate of one timed job opens if every other job stands at its own.
            held = [r for r in running.values() if r.job.timed and r.waits]
            if (not waiting or side_by_side == 1) and held and len(held) == len(running):
                held[0].open()
            time.sleep(0.1)
    finally:
        for r in running.values():
            r.end()
