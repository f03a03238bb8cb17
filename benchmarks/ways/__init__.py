# SPDX-License-Identifier: Apache-2.0
"""Models that people train and serve, in every way that they do, compiled and compared with eager: a cell for each pair.

Cells run side by side on one device. A process measures one after the other; a cell that raises, crashes or takes too
long ends its process and no other. Rows are saved in the result as they come, from which a later run goes on.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from .. import environment, running
from ..report import facts, markdown
from ..source_hash import source_hash
from .cell import NAMED, RIGHT, STRICT, WAYS, WIDE, WRONG
from .models import MODELS

__all__ = ["Settings", "run", "table", "write"]
SOURCES = ("kernels", "lowerings", "mhc_inductor", "benchmarks/ways")
"""What a row depends on."""
NOT_RUN = "not run"
Row = dict[str, Any]
Cell = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run.

    ``jobs``: processes side by side; ``budget_s``: seconds after which no cell begins; ``limit_s``: the longest that one
    may take; ``only``: words of which a cell's name must have one, if there are any; ``paths``: for PYTHONPATH.
    """

    device: str
    toy: bool = False
    jobs: int = 12
    budget_s: float = 420.0
    limit_s: float = 400.0
    only: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    def plan(self) -> list[Cell]:
        """Returns all cells in the order in which they begin: way by way, then models of published widths."""
        small = [(m, w) for w in WAYS for m, of in MODELS.items() if not of.wide]
        return small + [(m, w) for w in WIDE for m, of in MODELS.items() if of.wide]

    def chosen(self, cell: Cell) -> bool:
        return not self.only or any(word in ": ".join(cell) for word in self.only)


class Worker:
    """A process that measures cells, one at a time."""

    def __init__(self, settings: Settings, log: pathlib.Path, jobs: int, gpu: str) -> None:
        self.log, threads = log, max(1, (os.cpu_count() or 1) // jobs)
        places = [*settings.paths, str(environment.ROOT), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        env["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
        env["PYTHONUNBUFFERED"] = "1"  # a process that crashes does not write what Python buffered
        env |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        for name, folder in (("TORCHINDUCTOR", "inductor"), ("TRITON", "triton")):
            env.setdefault(f"{name}_CACHE_DIR", str(log.parent / folder))
        words = [sys.executable, "-m", "benchmarks.ways.worker", settings.device, str(int(settings.toy)), str(threads)]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                words,
                cwd=environment.ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        self.process.stdout.readline()  # ready

    def measure(self, cell: Cell, limit: float) -> Row:
        """Returns the row of a cell; where the process ends first, with how and the end of what it printed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        late, start = threading.Timer(limit, self.process.kill), time.monotonic()
        late.start()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(cell) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        late.cancel()
        if answer:
            return json.loads(answer)  # type: ignore[no-any-return]
        code = self.process.wait()
        passed = time.monotonic() - start >= limit
        why = f"took longer than {limit:.0f} s" if passed else f"the process ended with {code}"
        return {"status": WRONG, "why": why, "output": self.log.read_text(errors="replace")[-3000:]}

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Driver:
    """Runs the cells that ``rows`` lacks, and puts their rows there; ``save`` is called after each."""

    def __init__(
        self, settings: Settings, folder: pathlib.Path, rows: dict[Cell, Row], save: Callable[[], None]
    ) -> None:
        self.settings, self.folder, self.rows, self.save = settings, folder, rows, save
        self.began, self.lock = time.monotonic(), threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, step: Callable[[str], None]) -> None:
        todo = [c for c in self.settings.plan() if c not in self.rows and self.settings.chosen(c)]
        gpus = torch.cuda.device_count() if self.settings.device.startswith("cuda") else 0
        running: list[threading.Thread] = []
        for wide, jobs in ((False, self.settings.jobs), (True, 1)):  # a model of full width has a device to itself
            queue = collections.deque(c for c in todo if bool(MODELS[c[0]].wide) == wide)
            jobs, gpu = min(jobs, len(queue)), str(int(wide)) if gpus > 1 else ""
            running += [threading.Thread(target=self._work, args=(queue, gpu, k, jobs, step)) for k in range(jobs)]
            if gpus < 2 or wide:
                for thread in running:
                    thread.start()
                while running:
                    running.pop().join()

    def _work(
        self, queue: collections.deque[Cell], gpu: str, number: int, jobs: int, step: Callable[[str], None]
    ) -> None:
        worker: Worker | None = None
        name = f"worker{gpu}-{number}.log"
        while time.monotonic() - self.began < self.settings.budget_s:
            with self.lock:
                if not queue:
                    break
                cell = queue.popleft()
            start = time.monotonic()
            worker = worker or Worker(self.settings, self.folder / name, jobs, gpu)
            row = worker.measure(cell, self.settings.limit_s) | {"seconds": round(time.monotonic() - start, 1)}
            if "output" in row:
                worker.close()
                worker = None
            with self.lock:
                self.rows[cell] = row
                self.save()
                step(f"{time.monotonic() - self.began:4.0f} s  {': '.join(cell):35} {text(row)}")
        if worker:
            worker.close()


def stamp(settings: Settings) -> str:
    """Returns what a kept row must be of: sources, versions, device and sizes, as a short hash."""
    import transformers

    of = [environment.versions(), environment.device_facts(torch.device(settings.device)), transformers.__version__]
    words = json.dumps([source_hash(folders=SOURCES), of, settings.toy])
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def run(settings: Settings, path: pathlib.Path, folder: pathlib.Path, step: Callable[[str], None]) -> dict[str, Any]:
    """Runs the cells that the result at ``path`` lacks or has wrong, and returns and saves it."""
    import transformers

    device, mark = torch.device(settings.device), stamp(settings)
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    rows: dict[Cell, Row] = {
        (r["model"], r["way"]): r for r in kept if r.get("stamp") == mark and r["status"] in (RIGHT, NAMED)
    }
    result = environment.header(device) | {"operator": "ways"}
    result["versions"]["transformers"] = transformers.__version__
    result["notice"] = None if device.type == "cuda" else running.CPU_NOTICE

    def save() -> None:
        named = {c: {"model": c[0], "way": c[1], "stamp": mark, "status": NOT_RUN} for c in settings.plan()}
        result["rows"] = [{**made, **rows.get(c, {})} for c, made in named.items()]
        result["complete"] = all(r["status"] in (RIGHT, NAMED) for r in result["rows"])
        write(result, path)

    save()
    Driver(settings, folder, rows, save).run(step)
    return result


def write(result: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the JSON and, next to it, the table."""
    running.save(result, path)
    path.with_suffix(".md").write_text(table(json.loads(path.read_text())))


# ---- the table


def text(row: Row) -> str:
    """Returns a cell of the table: the largest ratio of errors to eager's, and how many formulas were routed."""
    if row["status"] != RIGHT:
        return row["status"] if row["status"] == NOT_RUN else f"{row['status']}: {row['why']}".replace("|", "/")[:160]
    ours, eager = row.get("from fp32", {}), row.get("eager from fp32", {})
    ratios = [ours[k] / eager[k] for k in STRICT if eager.get(k)]
    errors = f" {max(ratios):.1f}x" if ratios else f" {row['from eager']['logits']:.0e}" if "from eager" in row else ""
    routed = sum(row["routed"].values())
    skipped = f", {n} CUDA graphs skipped" if (n := row.get("skipped graphs")) else ""
    return f"ok{errors}, {routed if routed else '**nothing**'} routed{skipped}"


def table(result: dict[str, Any]) -> str:
    """Returns the run as Markdown."""
    by = {(r["model"], r["way"]): r for r in result["rows"]}
    counts = collections.Counter(r["status"] for r in result["rows"])
    notes: dict[str, int] = {}

    def cell(row: Row) -> str:
        if row["status"] in (RIGHT, NOT_RUN):
            return text(row)
        return f"{row['status']} [{notes.setdefault(row['why'].replace('|', '/'), len(notes) + 1)}]"

    small, wide = ([m for m, of in MODELS.items() if bool(of.wide) == w] for w in (False, True))
    grid = [[way, *(cell(by[m, way]) for m in small)] for way in WAYS]
    rows = []
    for m, way in ((m, w) for m in wide for w in WIDE):
        row = by[m, way]
        for who in ("ours", "eager"):
            of, loss = row.get(who, {}), row.get("loss" if who == "ours" else "eager loss")
            loss = f"{loss:.4f}" if loss else ""
            cells = [
                f"{of['ms']:.1f}" if "ms" in of else of.get("error", ""),
                f"{of['peak_gib']:.1f}" if "peak_gib" in of else "",
                loss,
            ]
            rows.append([m, way, 'backend="mhc_inductor"' if who == "ours" else "eager", *cells])
            rows[-1].append(cell(row) if who == "ours" else "")
    lines = [*facts(result), f"transformers {result['versions'].get('transformers')}, random weights"]
    lines += [", ".join(f"{n} cells {status}" for status, n in sorted(counts.items(), reverse=True))]
    lines += ["ok 1.1x: the error against fp32 is at most 1.1 times eager's; then how many formulas were routed"]
    parts = ["# Ways to train and serve, against eager", "\n".join(f"- {line}" for line in lines)]
    parts += [markdown(["", *small], grid), "## Published widths, 8192 tokens"]
    parts += [markdown(["model", "", "run by", "ms", "peak, GiB", "loss", ""], rows)]
    parts += ["\n".join(f"{n}. {why}" for why, n in notes.items())] if notes else []
    return "\n\n".join(parts) + "\n"
