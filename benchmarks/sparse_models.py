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
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from . import environment, processes, report, routing, running, sparse_cases, timing
from .processes import SPENT, Row
from .report import Table
from .source_hash import ROUTING, source_hash
from .sparse_cases import (
    CASES,
    COMPILE,
    COMPILE_GRAPHS,
    EAGER,
    FORWARD,
    OURS,
    OURS_GRAPHS,
    OURS_LAYERS,
    TRIVIAL,
    VARIANTS,
    Case,
)

BACKENDS = dict.fromkeys((COMPILE, COMPILE_GRAPHS, TRIVIAL), "inductor")
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

    def build(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.Tensor]:
        """Returns the model and its token ids."""
        return sparse_cases.build(self.of, device, dtype, self.toy), sparse_cases.tokens(self.of, device, self.toy)


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

    def plan(self) -> list[Job]:
        """Returns the jobs in the order in which they run."""
        pairs = [(v, c) for v in self.variants for c in self.cases if c.takes(v)]
        return [Job(v, dataclasses.asdict(c), self.device, self.toy, self.rounds) for v, c in pairs]


# ---- one process


class Process:
    """The model of a job, which has ``build``, ``variant``, ``rounds`` and ``seconds``, and its calls."""

    def __init__(self, job: Any) -> None:
        self.job, self.device = job, torch.device(job.device)
        self.cuda, self.trains = self.device.type == "cuda", job.named["part"] != FORWARD
        self.model, self.ids = job.build(self.device, torch.bfloat16 if self.cuda else torch.float32)
        self.model.train(self.trains)
        if BACKENDS.get(job.variant) == OURS:
            import mhc_inductor  # noqa: F401  (registers the backend in a checkout that is not installed)

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
        seconds = functools.partial(timing.seconds, self.step, self.device)
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
    ours, process = BACKENDS.get(job.variant) == OURS, Process(job)
    row = job.named | {"parameters": sum(p.numel() for p in process.model.parameters())}
    with routing.watched() if ours else contextlib.nullcontext() as reports:
        row |= process.times()
    if reports is not None:
        row["routing"] = routing.summary(reports)
        row["reasons"] = sorted({m.reason for r in reports for m in r.near_misses if not m.ordinary})
    save(row)
    return {**row, **process.errors()} if job.of.checked else row


# ---- the run


def gather(settings: Settings, measured: Iterable[Row]) -> Row:
    """Returns the result of a run: header, rows, verdicts on the device of the bars, and errors within bounds."""
    device = torch.device(settings.device)
    result = environment.header("sparse_models", device, unit="ms")
    result["routing_sha256"] = source_hash(folders=ROUTING)
    result["notice"] = processes.notice(device)
    of = {"rounds": settings.rounds, "toy": settings.toy, "budget_s": settings.budget_s}
    result["settings"] = of | {"cases": [dataclasses.asdict(c) for c in settings.cases]}
    result["rows"] = processes.without(measured, "stamp")
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
    running.same(
        result, later, "device name", "device type", *(f"versions {v}" for v in ("torch", "triton", "transformers"))
    )
    peers, run = (COMPILE, COMPILE_GRAPHS, EAGER), {"of_run": {k: later[k] for k in ("commit", "date")}}
    found = {(r["case"], r["variant"]): r | run for r in later["rows"] if r.get("error") != SPENT}
    found = {key: row for key, row in found.items() if key[1] in peers}
    rows = [found.get((r["case"], r["variant"]), r) if r.get("error") == SPENT else r for r in result["rows"]]
    if rows == result["rows"]:
        raise ValueError("the later run has none of the rows that the first one had no time for")
    filled = {**result, "rows": rows}
    rate(filled, [Case(**made) for made in result["settings"]["cases"]])
    return filled


# ---- the table

_NAMES = {EAGER: "eager", COMPILE: "torch.compile", OURS: 'backend="mhc_inductor"'}
_NAMES |= {OURS_LAYERS: f"{_NAMES[OURS]}, layer by layer"}
_NAMES |= {v: f'{_NAMES[of]}, mode="reduce-overhead"' for v, of in ((COMPILE_GRAPHS, COMPILE), (OURS_GRAPHS, OURS))}


def _note(row: Row) -> str:
    """Returns why a row has no figures, and which later run measured it."""
    said = [row["error"].splitlines()[0].replace("|", "/")[:100]] if "error" in row else []
    said += [f"run of {row['of_run']['date'][:10]}, commit {row['of_run']['commit'][:7]}"] if "of_run" in row else []
    return "; ".join(said)


def _each(result: Row) -> Iterator[Row]:
    for case in (Case(**made) for made in result["settings"]["cases"]):
        of = {r["variant"]: r for r in result["rows"] if r["case"] == case.name}
        base = of.get(COMPILE, {}).get("median_ms")
        for variant in reversed([v for v in VARIANTS if v in of]):
            row = of[variant]
            times = base / row["median_ms"] if base and "median_ms" in row else None
            named = {"model": case.model, "tokens": f"{case.batch} x {case.seq}", "run_by": _NAMES[variant]}
            yield row | named | {"times": times, "said": _note(row)}


def _routed(row: Row) -> list[Row]:
    of, reasons = row["routing"], "; ".join(row.get("reasons", [])).replace("|", "/")
    ops = Counter({**of["routed"], **of["fused"]})
    return [{"case": row["case"], "ops": ops or "nothing", "seconds": of["seconds"], "reasons": reasons}]


_FIGURES = "{median_ms:.2f}|{times:.2f}|{peak_gib:.2f}|{compile_s:.1f}|{error_logits:.2g}|{error_gradients:.2g}"
ROWS = Table(
    "",
    "model|tokens||run by|ms|x torch.compile|peak, GiB|compile, s|error, logits|error, gradients|note",
    f"{{model}}|{{tokens}}|{{part}}|{{run_by}}|{_FIGURES}|{{said}}",
)
VERDICTS = Table(
    "", "case|of this package||bar|goal", "{case}|{what}|{value:.2f}|{bar:g} {yes_bar}|{goal:g} {yes_goal}"
)
ROUTED = Table("", "case|routed|seconds of routing|near misses", "{case}|{ops}|{seconds:.2f}|{reasons}", _routed)


def _parts(result: Row) -> Iterator[str]:
    yield ROWS.markdown(_each(result))
    yield VERDICTS.markdown(result["verdicts"])
    for e in result["errors"]:
        if e["within"] is False:
            yield f"- **error out of bounds**: {e['case']}, {e['what']}: {e['value']:.2g} > {e['bound']:.2g}"
    yield ROUTED.markdown(r for r in result["rows"] if "routing" in r)


def table(result: Row) -> str:
    """Returns the run as Markdown."""
    lines = [
        *report.facts(result),
        f"transformers {result['versions']['transformers']}, unmodified, random weights",
        "medians of calls on the host's clock; each job in a process of its own with cold caches",
        "errors: relative, against the same weights run eagerly in fp32",
    ]
    return report.document("Models with sparse attention, end to end", lines, *_parts(result))


write = report.writer(table)
