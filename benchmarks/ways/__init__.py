# SPDX-License-Identifier: Apache-2.0
"""Models that people train and serve, in every way that they do, compiled and compared with eager: a cell for each pair.

Cells run side by side on one device. A process measures one after the other; a cell that raises, crashes or takes too
long ends its process and no other. Rows are saved in the result as they come, from which a later run goes on.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import torch

from .. import environment, processes, running
from ..processes import Row, figure
from ..report import document, facts, markdown, writer
from ..source_hash import source_hash
from . import cell
from .cell import NAMED, RIGHT, STRICT, WAYS, WIDE, WRONG
from .models import MODELS

SOURCES = ("kernels", "lowerings", "mhc_inductor", "benchmarks/ways")
"""What a row depends on."""
NOT_RUN, START_S = "not run", 600.0
Cell = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run.

    ``jobs``: processes side by side; ``budget_s``: seconds after which no cell begins; ``limit_s``: the longest that one
    may take; ``only``: words of which a cell's name must have one, if there are any.
    """

    device: str
    toy: bool = False
    jobs: int = 12
    budget_s: float = 420.0
    limit_s: float = 400.0
    only: tuple[str, ...] = ()

    def plan(self) -> list[Cell]:
        """Returns all cells in the order in which they begin: way by way, then models of published widths."""
        small = [(m, w) for w in WAYS for m, of in MODELS.items() if not of.wide]
        return small + [(m, w) for w in WIDE for m, of in MODELS.items() if of.wide]

    def chosen(self, cell: Cell) -> bool:
        return not self.only or any(word in ": ".join(cell) for word in self.only)


# ---- processes


@dataclasses.dataclass(frozen=True)
class Job:
    """A cell, as the process that measures it gets it."""

    model: str
    way: str
    device: str
    toy: bool
    threads: int


def measure(job: Job, tell: Callable[[Row], None]) -> Row:
    """Returns the row of a cell, with "output" if it raised: the next needs a fresh process."""
    torch.set_num_threads(job.threads)
    try:
        row = cell.measure(job.model, job.way, torch.device(job.device), job.toy)
    except Exception as error:
        row = {"status": WRONG, "why": cell.said(error), "output": traceback.format_exc()[-3000:]}
    cell.free()
    return running.cleaned(row)  # type: ignore[no-any-return]


def start(log: pathlib.Path, threads: int, gpu: str) -> processes.Worker:
    """Starts a process that measures cells, one at a time."""
    # A process that crashes does not write what Python buffered.
    env = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    env |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
    for name, folder in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        env[name] = os.environ.get(name, str(log.parent / folder))
    worker = processes.Worker("ways", "warm", log, processes.environ(**env))
    worker.ask(None, START_S)
    return worker


def measured(settings: Settings, folder: pathlib.Path, rows: dict[Cell, Row], done: Callable[[str], None]) -> None:
    """Measures the cells that ``rows`` lacks, and puts their rows there; ``done`` is called after each, with a line."""
    folder.mkdir(parents=True, exist_ok=True)
    began, lock, logs = time.monotonic(), threading.Lock(), itertools.count()
    todo = [c for c in settings.plan() if c not in rows and settings.chosen(c)]
    gpus = torch.cuda.device_count() if settings.device.startswith("cuda") else 0

    def some(wide: bool, jobs: int) -> None:
        cells, idle = [c for c in todo if bool(MODELS[c[0]].wide) == wide], list[processes.Worker]()
        jobs, gpu = min(jobs, len(cells)), str(int(wide)) if gpus > 1 else ""
        threads = max(1, (os.cpu_count() or 1) // max(jobs, 1))

        def one(of: Cell) -> None:
            if (at := time.monotonic()) - began >= settings.budget_s:
                return
            log = folder / f"worker{gpu}-{next(logs)}.log"
            worker = idle.pop() if idle else start(log, threads, gpu)
            job = Job(*of, settings.device, settings.toy, threads)
            row = worker.ask(dataclasses.asdict(job), settings.limit_s)
            row |= {"status": WRONG, "why": row.pop("error")} if "error" in row else {}
            row["seconds"] = round(time.monotonic() - at, 1)
            if "output" in row:
                worker.close()
            else:
                idle.append(worker)
            with lock:
                rows[of] = row
                done(f"{time.monotonic() - began:4.0f} s  {': '.join(of):35} {text(row)}")

        with concurrent.futures.ThreadPoolExecutor(max(jobs, 1)) as pool:
            list(pool.map(one, cells))
        for worker in idle:
            worker.close()

    # A model of full width has a device to itself.
    with concurrent.futures.ThreadPoolExecutor(2 if gpus > 1 else 1) as pool:
        list(pool.map(some, (False, True), (settings.jobs, 1)))


# ---- the result


def stamp(settings: Settings) -> str:
    """Returns what a kept row must be of: sources, versions, device and sizes, as a short hash."""
    of = [environment.versions(), environment.device_facts(torch.device(settings.device))]
    words = json.dumps([source_hash(folders=SOURCES), of, settings.toy])
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def run(settings: Settings, path: pathlib.Path, folder: pathlib.Path, step: Callable[[str], None]) -> Row:
    """Runs the cells that the result at ``path`` lacks or has wrong, and returns and saves it."""
    device, mark = torch.device(settings.device), stamp(settings)
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    good = [r for r in kept if r.get("stamp") == mark and r["status"] in (RIGHT, NAMED)]
    rows: dict[Cell, Row] = {(r["model"], r["way"]): r for r in good}
    result = environment.header("ways", device)
    result["notice"] = processes.notice(device)

    def save(line: str = "") -> None:
        named = {c: {"model": c[0], "way": c[1], "stamp": mark, "status": NOT_RUN} for c in settings.plan()}
        result["rows"] = [{**made, **rows.get(c, {})} for c, made in named.items()]
        result["complete"] = all(r["status"] in (RIGHT, NAMED) for r in result["rows"])
        write(result, path)
        if line:
            step(line)

    save()
    measured(settings, folder, rows, save)
    return result


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


def _wide(row: Row, said: str) -> Iterator[list[str]]:
    """Yields the figures of a model at its published widths, ours and eager's."""
    for who, by, loss, last in (("ours", 'backend="mhc_inductor"', "loss", said), ("eager", "eager", "eager loss", "")):
        of = row.get(who, {})
        cells = [row["model"], row["way"], by, figure(of, "ms", ".1f") or of.get("error", "")]
        yield [*cells, figure(of, "peak_gib", ".1f"), f"{row[loss]:.4f}" if row.get(loss) else "", last]


def table(result: Row) -> str:
    """Returns the run as Markdown."""
    by = {(r["model"], r["way"]): r for r in result["rows"]}
    counts = collections.Counter(r["status"] for r in result["rows"])
    notes: dict[str, int] = {}

    def shown(row: Row) -> str:
        if row["status"] in (RIGHT, NOT_RUN):
            return text(row)
        return f"{row['status']} [{notes.setdefault(row['why'].replace('|', '/'), len(notes) + 1)}]"

    small, wide = ([m for m, of in MODELS.items() if bool(of.wide) == w] for w in (False, True))
    grid = [[way, *(shown(by[m, way]) for m in small)] for way in WAYS]
    cells = [by[m, way] for m in wide for way in WIDE]
    rows = [line for row in cells for line in _wide(row, shown(row))]
    lines = [*facts(result), f"transformers {result['versions'].get('transformers')}, random weights"]
    lines += [", ".join(f"{n} cells {status}" for status, n in sorted(counts.items(), reverse=True))]
    lines += ["ok 1.1x: the error against fp32 is at most 1.1 times eager's; then how many formulas were routed"]
    parts = [markdown(["", *small], grid), "## Published widths, 8192 tokens"]
    parts += [markdown(["model", "", "run by", "ms", "peak, GiB", "loss", ""], rows)]
    last = "\n".join(f"{n}. {why}" for why, n in notes.items())
    return document("Ways to train and serve, against eager", lines, *parts, last)


write = writer(table)
