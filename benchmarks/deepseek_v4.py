# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 of transformers end to end: time, compile time and memory of every variant, compared with bars.

Each variant and part (forward, training, training with activation checkpointing) runs in its own process with cold
caches. The jobs in ``ALONE`` compile first, one after the other, with all processors to themselves. The others then
compile several at once. Nothing is timed while something compiles.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import deepseek_model, processes, report, routing
from .processes import Row, counted, figure

VARIANTS = ("eager", "torch.compile", "trivial", "mhc_inductor")
PARTS = ("forward", "training", "checkpointed")
# One H200, torch 2.11, 4 layers, D = 2048, 2 x 2048 tokens: bar and goal of mhc_inductor (ms, s, GiB).
BARS = {
    "forward_ms": (11.2, 10.4),
    "training_ms": (28.5, 25.5),
    "forward_compile_s": (20.0, 17.0),
    "training_compile_s": (45.0, 35.0),
    "training_peak_gib": (6.0, 5.5),
}
RECORD_COMPILE_S = 31.0
"""Seconds plain torch.compile took for the forward on the machine of the bars; scales compile times to that machine."""
ALONE = ("mhc_inductor", "torch.compile-forward", "trivial-forward")
"""The variants and single jobs whose compile times are compared."""
_LABELS = {v: v for v in VARIANTS} | {
    "trivial": "torch.compile, mHC coefficients made trivial",
    "mhc_inductor": 'backend="mhc_inductor"',
}


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures. ``size`` holds the fields of :class:`benchmarks.deepseek_model.Size`."""

    variant: str
    part: str
    device: str
    size: dict[str, Any]
    rounds: int = 30

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.part}"

    @property
    def named(self) -> Row:
        return {"variant": self.variant, "part": self.part}


@dataclasses.dataclass
class Settings:
    """What to measure. Jobs named in ``alone`` compile alone; the others compile ``jobs`` at a time."""

    device: str
    size: deepseek_model.Size
    variants: tuple[str, ...] = VARIANTS
    parts: tuple[str, ...] = PARTS
    rounds: int = 30
    jobs: int = 4
    alone: tuple[str, ...] = ALONE

    def plan(self) -> list[Job]:
        """Returns the jobs, longest compile first."""
        slow, size = ("torch.compile", "mhc_inductor", "trivial", "eager"), dataclasses.asdict(self.size)
        pairs = [(v, p) for p in reversed(PARTS) for v in slow if v in self.variants and p in self.parts]
        return [Job(v, p, self.device, size, self.rounds) for v, p in pairs]

    def compiles_alone(self, job: Job) -> bool:
        return job.variant in self.alone or job.name in self.alone

    def threads(self, job: Job) -> int:
        """Returns the number of Inductor's compile workers: torch's default, shared among jobs that compile at once."""
        return max(1, min(32, os.cpu_count() or 1) // (1 if self.compiles_alone(job) else self.jobs))


# ---- one process


def measure(job: Job, tell: Callable[[str], None]) -> Row:
    """Builds, calls ``tell("ready")``, compiles, calls ``tell("compiled")`` and times; returns the row.

    Times are in ms, compile times in s, memory in GiB. The row also has the loss and the norm of the gradients.
    """
    device, trains = torch.device(job.device), job.part != "forward"
    cuda, ours = device.type == "cuda", job.variant == "mhc_inductor"
    model, ids, call = _built(job, device)

    def step() -> torch.Tensor:
        if not trains:
            with torch.no_grad():
                return call(input_ids=ids).logits
        model.zero_grad(set_to_none=True)
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    seconds = functools.partial(processes.seconds, step, device)
    row = job.named | {"parameters": sum(p.numel() for p in model.parameters())}
    with (
        deepseek_model.trivial_coefficients() if job.variant == "trivial" else contextlib.nullcontext(),
        routing.watched() if ours else contextlib.nullcontext() as reports,
    ):
        processes.wait(device)
        tell("ready")
        first = [seconds(), seconds()]
        if cuda:
            torch.cuda.empty_cache()
        tell("compiled")
        for _ in range(3):
            seconds()
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        samples = [round(1e3 * seconds(), 4) for _ in range(job.rounds)]
        loss = step()
    row |= {"median_ms": statistics.median(samples), "samples_ms": samples}
    row |= _results(model, loss, ids, trains)
    if job.variant != "eager":
        row["compile_s"] = sum(first) - 2 * row["median_ms"] / 1e3
    if reports is not None:
        import mhc_inductor

        row["routing"] = routing.summary(reports) | {"counters": mhc_inductor.counters()}
        row["routing"]["share_of_compile"] = row["routing"]["seconds"] / row["compile_s"]
    return row


def _built(job: Job, device: torch.device) -> tuple[torch.nn.Module, torch.Tensor, Any]:
    """Returns the model of a job, its token ids, and the compiled model."""
    size, dtype = deepseek_model.Size(**job.size), torch.bfloat16 if device.type == "cuda" else torch.float32
    model = deepseek_model.build(size, device, dtype).train(job.part != "forward")
    if job.part == "checkpointed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids, backend = deepseek_model.tokens(size, device), "inductor"
    if job.variant == "mhc_inductor":
        import mhc_inductor  # noqa: F401  (registers the backend in a checkout that is not installed)

        backend = "mhc_inductor"
    return model, ids, model if job.variant == "eager" else torch.compile(model, backend=backend)


def _results(model: torch.nn.Module, found: torch.Tensor, ids: torch.Tensor, trains: bool) -> Row:
    """Returns the loss, the peak of memory, and what the gradients are."""
    if not trains:
        found = torch.nn.functional.cross_entropy(found[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    row: Row = {"loss": found.item()}
    if ids.is_cuda:
        row["peak_gib"] = torch.cuda.max_memory_allocated(ids.device) / 2**30
    if trains:
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        row["gradient_norm"] = torch.stack(squares).sum().sqrt().item()
        row["parameters_without_gradient"] = [n for n, p in model.named_parameters() if p.grad is None]
    return row


# ---- the run

_IMPORTED = """
import torch, torch._inductor.config as config
config.force_disable_caches = True
torch.compile(lambda x: (x @ x).sin().sum(-1))(torch.ones(64, 64, device="{device}"))
"""
"""A script that compiles once, to import the modules that a compile imports and cache their byte code."""


def run(settings: Settings, folder: pathlib.Path, step: Callable[[str], None]) -> list[Row]:
    """Returns the rows of all jobs in the plan's order; a failed row has "error" and the end of its output.

    Finished rows are kept in ``folder``, so that a later run can reuse them; so is Python's byte code: if the
    installation cannot keep it, every process would otherwise compile 360 modules of torch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan, cached = settings.plan(), {"PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    rows = {job.name: row for job in plan if (row := processes.kept(folder, job))}
    todo = [job for job in plan if job.name not in rows]
    if any(job.variant != "eager" for job in todo):
        step("importing")
        words = [sys.executable, "-c", _IMPORTED.format(device=settings.device)]
        subprocess.run(words, env=processes.environ(**cached), stderr=subprocess.DEVNULL, check=False)
    workers = {}
    for job in todo:
        env = {"TORCHINDUCTOR_COMPILE_THREADS": str(settings.threads(job))} | (cached if job.variant != "eager" else {})
        workers[job.name] = processes.begin("deepseek_v4", job, folder, processes.environ(**env))
    for worker in workers.values():
        worker.answer()  # ready

    def go_on(job: Job, to: str) -> processes.Worker:
        step(f"{job.name}: {to}")
        workers[job.name].tell("go on")
        return workers[job.name]

    def finish(job: Job) -> None:
        of = {"compiled_alone": settings.compiles_alone(job), "compile_threads": settings.threads(job)}
        rows[job.name] = processes.finish(go_on(job, "timing"), job, folder, **of)

    alone = [job for job in todo if settings.compiles_alone(job)]
    others = [job for job in todo if not settings.compiles_alone(job)]
    for job in alone:
        go_on(job, "compiling").answer()
        finish(job)
    with concurrent.futures.ThreadPoolExecutor(settings.jobs) as pool:
        list(pool.map(lambda job: go_on(job, "compiling").answer(), others))
    for job in others:
        finish(job)
    return [rows[job.name] for job in plan]


def gather(settings: Settings, rows: list[Row]) -> Row:
    """Returns the result of a run: header, rows, figures per variant, and verdicts on the device of the bars."""
    result = processes.header("deepseek_v4", torch.device(settings.device))
    of = {"size": dataclasses.asdict(settings.size), "rounds": settings.rounds, "jobs": settings.jobs}
    result["settings"] = of | {"compiled_alone": settings.alone}
    result["rows"] = processes.without_stamps(rows)
    bars_apply = "H200" in result["device"]["name"] and settings.size == deepseek_model.Size()
    result["variants"] = {v: summary(v, rows) for v in settings.variants}
    result["verdicts"] = verdicts(result["variants"], settings.alone) if bars_apply else []
    return result


def verdicts(variants: dict[str, dict[str, float]], alone: tuple[str, ...]) -> list[Row]:
    """Returns the verdict on every figure of mhc_inductor that has a bar.

    Compile times appear a second time, scaled to the processor of the machine that set the bars.
    """
    ours, bars = dict(variants.get("mhc_inductor", {})), dict(BARS)
    plain = variants.get("torch.compile", {}).get("forward_compile_s")
    if plain is not None and "torch.compile-forward" in alone:
        for what in [w for w in ours if w.endswith("_compile_s") and w in BARS]:
            scaled = f"{what} x {RECORD_COMPILE_S:g} / {plain:.1f}, plain torch.compile in the record and here"
            ours[scaled], bars[scaled] = ours[what] * RECORD_COMPILE_S / plain, BARS[what]
    return [{"what": w, **processes.against(ours[w], *limits)} for w, limits in bars.items() if w in ours]


def summary(variant: str, rows: list[Row]) -> dict[str, float]:
    """Returns the figures of one variant under flat names such as ``training_ms``."""
    names = {"median_ms": "ms", "compile_s": "compile_s", "peak_gib": "peak_gib", "loss": "loss"}
    mine = [row for row in rows if row["variant"] == variant]
    return {f"{row['part']}_{short}": row[long] for row in mine for long, short in names.items() if long in row}


# ---- the table

_COLUMNS = {
    "forward, ms": (".1f", "forward_ms"),
    "forward + backward, ms": (".1f", "training_ms"),
    "compile forward + training, s": (".1f", "forward_compile_s", "training_compile_s"),
    "peak of training, GiB": (".2f", "training_peak_gib"),
    "checkpointed: f + b, ms": (".1f", "checkpointed_ms"),
    "compile, s": (".1f", "checkpointed_compile_s"),
    "peak, GiB": (".2f", "checkpointed_peak_gib"),
    "loss": (".4f", "training_loss"),
}


def _cell(of: dict[str, float], spec: str, *names: str) -> str:
    return " + ".join(figure(of, n, spec) or "?" for n in names) if set(names) & set(of) else ""


def _parts(result: Row) -> Iterable[str]:
    rows = [[_LABELS[v], *(_cell(of, *column) for column in _COLUMNS.values())] for v, of in result["variants"].items()]
    yield report.markdown(["", *_COLUMNS], rows)
    if result["verdicts"]:
        marks = [
            [x["what"], f"{x['value']:.2f}", *(processes.met(x, k) for k in ("bar", "goal"))]
            for x in result["verdicts"]
        ]
        yield report.markdown([f"of {_LABELS['mhc_inductor']}", "", "bar", "goal"], marks)
    passes = [(r["part"], x, f"{100 * x['share_of_compile']:.1f} %") for r in result["rows"] if (x := r.get("routing"))]
    if passes:
        headings = ["the pass", "routed", "fused", "near misses", "nodes", "s", "of the compile time"]
        marks = [
            [
                part,
                counted(x["routed"]),
                counted(x["fused"]),
                f"{x['near_misses']}",
                f"{x['nodes']:,}",
                f"{x['seconds']:.2f}",
                of,
            ]
            for part, x, of in passes
        ]
        yield report.markdown(headings, marks)
    failed = [f"{r['variant']}, {r['part']}: {r['error']}" for r in result["rows"] if "error" in r]
    yield "\n".join(f"- failed: {line.splitlines()[0]}" for line in failed)


def table(result: Row) -> str:
    """Returns the run as Markdown."""
    v, made = result["versions"], result["settings"]
    s, count = made["size"], next((r["parameters"] for r in result["rows"] if "parameters" in r), 0)
    lines = [
        f"{result['device']['name']}, torch {v['torch']}, triton {v['triton']}, transformers {v['transformers']}, "
        f"Python {v['python']}",
        f"commit {report.commit_of(result)}, sources {report.sources_of(result)}, {result['date']}",
        f"DeepSeek-V4 of transformers, unmodified, random weights: {s['layers']} layers, D = {s['dim']}, "
        f"{s['batch']} x {s['seq']} tokens, {count / 1e6:.0f} M parameters",
        f"compile times are cold but for Python's byte code; alone, with all processors: {', '.join(made['compiled_alone'])}; "
        f"the others {made['jobs']} at once; each was timed while nothing compiled",
    ]
    return processes.document("DeepSeek-V4 end to end", lines, *_parts(result))


write = functools.partial(processes.write, table=table)
