# SPDX-License-Identifier: Apache-2.0
"""Models with sparse attention end to end: eager, torch.compile and this package, each job in its own process.

Jobs run one after the other, so that each has the device and all processors to itself. Ours come first, then
torch.compile, then eager: a budget that ends cuts off peers. Finished rows are kept, so that a run goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import processes, routing, running, sparse_cases
from .processes import Row
from .source_hash import ROUTING, source_hash
from .sparse_cases import (
    CASES,
    COMPILE,
    COMPILE_GRAPHS,
    EAGER,
    OURS,
    OURS_GRAPHS,
    OURS_LAYERS,
    TRAINING,
    VARIANTS,
    Case,
)
from .sparse_report import plot, table

__all__ = ["Job", "Process", "Settings", "fill", "gather", "measure", "plot", "rate", "run", "table", "write"]
SPENT = "the run's budget of seconds was spent"
BACKENDS = dict.fromkeys((COMPILE, COMPILE_GRAPHS), "inductor")
BACKENDS |= dict.fromkeys((OURS, OURS_GRAPHS, OURS_LAYERS), "mhc_inductor")


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures. ``toy``: tiny sizes; ``rounds``: timed calls at most, within ``seconds``."""

    variant: str
    case: dict[str, Any]
    device: str
    toy: bool = False
    rounds: int = 20
    seconds: float = 10.0

    @property
    def of(self) -> Case:
        return Case(**self.case)

    @property
    def name(self) -> str:
        return f"{self.of.name}-{self.variant}"

    @property
    def named(self) -> Row:
        return {"variant": self.variant, "case": self.of.name, "part": self.of.part}


@dataclasses.dataclass
class Settings:
    """What to measure. ``budget_s``: seconds after which no job begins; ``limit_s``: the longest that one may take."""

    device: str
    cases: tuple[Case, ...] = CASES
    variants: tuple[str, ...] = VARIANTS
    rounds: int = 20
    toy: bool = False
    budget_s: float = 1500.0
    limit_s: float = 300.0
    paths: tuple[str, ...] = ()

    def plan(self) -> list[Job]:
        """Returns the jobs in the order in which they run."""
        pairs = [(v, c) for v in VARIANTS if v in self.variants for c in self.cases if c.takes(v)]
        return [Job(v, dataclasses.asdict(c), self.device, self.toy, self.rounds) for v, c in pairs]


# ---- one process


class Process:
    """The model of a job and its calls."""

    def __init__(self, job: Job) -> None:
        self.job, self.case, self.device = job, job.of, torch.device(job.device)
        self.cuda, self.trains = self.device.type == "cuda", self.case.part == TRAINING
        dtype = torch.bfloat16 if self.cuda else torch.float32
        self.model = sparse_cases.build(self.case, self.device, dtype, job.toy).train(self.trains)
        self.ids = sparse_cases.tokens(self.case, self.device, job.toy)
        self.graphs = job.variant in (OURS_GRAPHS, COMPILE_GRAPHS)
        self.call: Any = self.model
        if job.variant == OURS_LAYERS:
            for layer in self.model.get_submodule("model.layers"):
                layer.compile(backend=BACKENDS[OURS_LAYERS], dynamic=False)
        elif backend := BACKENDS.get(job.variant):
            mode = "reduce-overhead" if self.graphs else None
            self.call = torch.compile(self.model, backend=backend, dynamic=False, mode=mode)

    def step(self) -> Any:
        """Makes one call: logits without gradients, or a loss and its gradients."""
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        if not self.trains:
            with torch.no_grad():
                return self.call(input_ids=self.ids, use_cache=False).logits
        self.model.zero_grad(set_to_none=True)
        out = self.call(input_ids=self.ids, labels=self.ids, use_cache=False)
        out.loss.backward()
        return out.logits.detach()

    def times(self) -> Row:
        """Compiles, warms up and times; returns ms, GiB and seconds of compiling."""
        seconds = functools.partial(processes.seconds, self.step, self.device)
        first = [seconds(), seconds()]
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        once = min(seconds() for _ in range(2))
        count = max(3, min(self.job.rounds, int(self.job.seconds / once)))
        samples = [round(1e3 * seconds(), 4) for _ in range(count)]
        row: Row = {"median_ms": statistics.median(samples), "samples_ms": samples}
        if self.cuda:
            row["peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        if self.job.variant != EAGER:
            row["compile_s"] = sum(first) - 2 * row["median_ms"] / 1e3
        return row

    def errors(self) -> dict[str, float]:
        """Returns the relative errors of logits and gradients against the same weights run eagerly in fp32."""
        # A CUDA graph's results are overwritten by the next call.
        logits, grads = self.step().clone(), {n: g.clone() for n, g in self._gradients().items()}
        self.model.zero_grad(set_to_none=True)
        self.model.float()
        self.call, self.graphs = self.model, False
        gc.collect()
        want, exact = self.step(), self._gradients()
        row = {"error_logits": _relative([logits], [want])}
        if self.trains:
            if lost := sorted(exact.keys() ^ grads.keys()):
                raise RuntimeError(f"gradients of {lost[:3]} exist in one of fp32 and {self.job.variant} only")
            row["error_gradients"] = _relative([grads[k] for k in exact], [*exact.values()])
        return row

    def _gradients(self) -> dict[str, Any]:
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


def _relative(got: list[Any], want: list[Any]) -> float:
    """Returns the norm of the difference of two lists of tensors, over the norm of the second."""
    apart = sum(float((a.float() - b).double().square().sum()) for a, b in zip(got, want, strict=True))
    size = sum(float(b.double().square().sum()) for b in want)
    return float((apart / max(size, 1e-300)) ** 0.5)


def measure(job: Job, save: Callable[[Row], None] = lambda _: None) -> Row:
    """Returns the row of a job: times, memory, errors, and what was routed. ``save`` gets the times first."""
    ours = BACKENDS.get(job.variant) == "mhc_inductor"
    if ours:
        import mhc_inductor  # noqa: F401  (registers the backend in a checkout that is not installed)
    process = Process(job)
    row = job.named | {"parameters": sum(p.numel() for p in process.model.parameters())}
    with routing.watched() if ours else contextlib.nullcontext() as reports:
        row |= process.times()
    if reports is not None:
        row["routing"] = routing.summary(reports)
        row["reasons"] = sorted({m.reason for r in reports for m in r.near_misses if not m.ordinary})
    save(row)
    return {**row, **process.errors()} if job.of.checked else row


# ---- the run


def run(
    settings: Settings,
    folder: pathlib.Path,
    step: Callable[[str], None],
    save: Callable[[list[Row]], None] = lambda _: None,
) -> list[Row]:
    """Returns the rows of all jobs; a failed or skipped row has "error". ``save`` gets them after every job.

    Rows are kept in ``folder``, so that a later run can reuse them. A process that is stopped late keeps the times that
    it saved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows, end = [], time.monotonic() + settings.budget_s
    bytecode = os.environ.get("PYTHONPYCACHEPREFIX", str(folder / "bytecode"))
    for job in settings.plan():
        left, row = end - time.monotonic(), processes.kept(folder, job)
        if row is None and left > 0:
            step(job.name)
            env = processes.environ(*settings.paths, PYTHONPYCACHEPREFIX=bytecode)
            worker = processes.begin("sparse_models", job, folder, env)
            row = processes.finish(worker, job, folder, min(settings.limit_s, max(left, 1)))
        rows.append(row or {**job.named, "error": SPENT})
        save(rows)
    return rows


def gather(settings: Settings, measured: Iterable[Row]) -> Row:
    """Returns the result of a run: header, rows, verdicts on the device of the bars, and errors within bounds."""
    device = torch.device(settings.device)
    result = processes.header("sparse_models", device, unit="ms")
    result["routing_sha256"] = source_hash(folders=ROUTING)
    result["notice"] = processes.notice(device)
    of = {"rounds": settings.rounds, "toy": settings.toy, "budget_s": settings.budget_s}
    result["settings"] = of | {"cases": [dataclasses.asdict(c) for c in settings.cases]}
    result["rows"] = processes.without_stamps([*measured])
    result["complete"] = len(result["rows"]) == len(settings.plan())
    result["bars_apply"] = running.BARS_DEVICE in result["device"]["name"] and not settings.toy
    rate(result, settings.cases)
    return result


def rate(result: Row, cases: Iterable[Case]) -> None:
    """Sets the verdicts of ``result`` on its rows, and its errors."""
    by_case = {c: {r["variant"]: r for r in result["rows"] if r["case"] == c.name} for c in cases}
    result["verdicts"] = [v for c, of in by_case.items() if result["bars_apply"] for v in sparse_cases.verdicts(c, of)]
    result["errors"] = [{"case": c.name, **e} for c, of in by_case.items() for e in sparse_cases.errors(of)]


def fill(result: Row, later: Row) -> Row:
    """Returns ``result`` with the rows of peers that its budget cut off taken from ``later``, each naming its run.

    Rows of this package are never taken: they belong to the commit that measured them.

    Raises:
        ValueError: if the runs differ in device or versions, or ``later`` has no row that is missing.
    """
    for what in ("name", "type"):
        running.same(f"device's {what}", result["device"].get(what), later["device"].get(what))
    for what in ("torch", "triton", "transformers"):
        running.same(what, result["versions"].get(what), later["versions"].get(what))
    peers, run = (COMPILE, COMPILE_GRAPHS, EAGER), {"of_run": {k: later[k] for k in ("commit", "date")}}
    found = {(r["case"], r["variant"]): r | run for r in later["rows"] if r.get("error") != SPENT}
    found = {key: row for key, row in found.items() if key[1] in peers}
    rows = [found.get((r["case"], r["variant"]), r) if r.get("error") == SPENT else r for r in result["rows"]]
    if rows == result["rows"]:
        raise ValueError("the later run has none of the rows that the first one had no time for")
    filled = {**result, "rows": rows}
    rate(filled, [Case(**made) for made in result["settings"]["cases"]])
    return filled


write = functools.partial(processes.write, table=table, plot=plot)
