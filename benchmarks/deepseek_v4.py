"""DeepSeek-V4 of transformers end to end: time, compile time and memory of every variant, against bars.

A process a variant and part (forward, training, training with activation checkpointing), each with cold caches:
several compile at once, and when all have compiled each is timed alone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from . import deepseek_model, environment, report
from .deepseek_worker import PARTS, VARIANTS, Job

# One H200, torch 2.11, 4 layers, D = 2048, 2 x 2048 tokens: bar and goal of mhc_inductor (ms, s, GiB).
BARS = {
    "forward_ms": (11.2, 10.4),
    "training_ms": (28.5, 25.5),
    "forward_compile_s": (20.0, 17.0),
    "training_compile_s": (45.0, 35.0),
    "training_peak_gib": (6.0, 5.5),
}
PATIENCE_S = 480.0
"""A variant that has not compiled by then is timed beside the others' compiles."""
_LABELS = {
    "eager": "eager",
    "torch.compile": "torch.compile",
    "trivial": "torch.compile, mHC coefficients made trivial",
    "mhc_inductor": 'backend="mhc_inductor"',
}


@dataclasses.dataclass
class Settings:
    """What to measure; ``jobs`` variants compile at once, ``threads`` workers each."""

    device: str
    size: deepseek_model.Size
    variants: tuple[str, ...] = VARIANTS
    parts: tuple[str, ...] = PARTS
    rounds: int = 30
    jobs: int = 4
    threads: int = 8

    def plan(self) -> list[Job]:
        """The jobs, those that compile longest first."""
        slow = ("torch.compile", "mhc_inductor", "trivial", "eager")
        size = dataclasses.asdict(self.size)
        return [
            Job(v, p, self.device, size, self.rounds)
            for p in reversed(PARTS)
            for v in slow
            if v in self.variants and p in self.parts
        ]


class Driver:
    """Runs the jobs of ``settings`` and keeps their rows in ``folder``, where a later run finds them."""

    def __init__(self, settings: Settings, folder: pathlib.Path, step: Callable[[str], None]) -> None:
        self.settings, self.folder, self.step = settings, folder, step
        self.slots = threading.Semaphore(settings.jobs)
        self.alone = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def stamp(self, job: Job) -> dict[str, Any]:
        """What a kept row must have been measured with."""
        return {"job": dataclasses.asdict(job), "sources": environment.sources_hash(), **environment.commit()}

    def kept(self, job: Job) -> dict[str, Any] | None:
        path = self.folder / f"{job.name}.json"
        with contextlib.suppress(OSError, ValueError):
            row = json.loads(path.read_text())
            if row.get("stamp") == self.stamp(job) and "error" not in row:
                return row
        return None

    def run(self) -> list[dict[str, Any]]:
        """The rows of all jobs, in the plan's order; a failed one has "error" and the end of its output."""
        plan = self.settings.plan()
        rows = {job.name: row for job in plan if (row := self.kept(job))}
        todo = [job for job in plan if job.name not in rows]
        if todo:
            barrier = threading.Barrier(len(todo))
            with concurrent.futures.ThreadPoolExecutor(len(todo)) as pool:
                made = pool.map(lambda job: self._one(job, barrier), todo)
                rows.update({job.name: row for job, row in zip(todo, made, strict=True)})
        return [rows[job.name] for job in plan]

    def _one(self, job: Job, barrier: threading.Barrier) -> dict[str, Any]:
        path, log = self.folder / f"{job.name}.json", self.folder / f"{job.name}.log"
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.deepseek_worker", json.dumps(dataclasses.asdict(job)), str(path)]
        paths = os.pathsep.join(filter(None, [str(environment.ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": str(self.settings.threads)}
        with log.open("w") as errors:
            with self.slots:
                self.step(f"{job.name}: compiling")
                child = subprocess.Popen(
                    command,
                    cwd=environment.ROOT,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
                assert child.stdout is not None
                compiled = any(line.strip() == "compiled" for line in iter(child.stdout.readline, ""))
            alone = True
            try:
                barrier.wait(PATIENCE_S)
            except threading.BrokenBarrierError:
                alone = False
            with self.alone:
                if compiled:
                    self.step(f"{job.name}: timing")
                child.communicate("time\n" if compiled else None)
        row = json.loads(path.read_text()) if path.exists() else {"error": f"the process ended with {child.returncode}"}
        row = {"variant": job.variant, "part": job.part, **row, "timed_alone": alone, "stamp": self.stamp(job)}
        if "error" in row:
            row["output"] = log.read_text()[-3000:]
        path.write_text(json.dumps(row))
        return row


def gather(settings: Settings, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of a run: the header, a line a variant, and the verdicts where the bars hold."""
    import transformers

    device = torch.device(settings.device)
    result = environment.header(device) | {"operator": "deepseek_v4"}
    result["versions"]["transformers"] = transformers.__version__
    result["settings"] = {"size": dataclasses.asdict(settings.size), "rounds": settings.rounds, "jobs": settings.jobs}
    result["rows"] = [{k: v for k, v in row.items() if k != "stamp"} for row in rows]
    judged = "H200" in result["device"]["name"] and settings.size == deepseek_model.Size()
    result["variants"] = {v: summary(v, rows) for v in settings.variants}
    ours = result["variants"].get("mhc_inductor", {})
    result["verdicts"] = [
        {"what": what, "value": ours[what], "bar": bar, "met_bar": ours[what] <= bar}
        | {"goal": goal, "met_goal": ours[what] <= goal}
        for what, (bar, goal) in BARS.items()
        if judged and what in ours
    ]
    return result


def summary(variant: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of one variant under flat names, such as ``training_ms``."""
    figures = {"median_ms": "ms", "compile_s": "compile_s", "peak_gib": "peak_gib", "loss": "loss"}
    return {
        f"{row['part']}_{short}": row[long]
        for row in rows
        if row["variant"] == variant
        for long, short in figures.items()
        if long in row
    }


def _pair(of: dict[str, float], *names: str, digits: int = 1) -> str:
    return " + ".join(f"{of[n]:.{digits}f}" if n in of else "?" for n in names) if set(names) & set(of) else ""


def table(result: dict[str, Any]) -> str:
    """The run as Markdown."""
    v, d, s = result["versions"], result["device"], result["settings"]["size"]
    commit = (result["commit"] or "unknown")[:12] + (" with local changes" if result["dirty"] else "")
    count = next((r["parameters"] for r in result["rows"] if "parameters" in r), 0)
    lines = [
        f"- {d['name']}, torch {v['torch']}, triton {v['triton']}, transformers {v['transformers']}, Python {v['python']}",
        f"- commit {commit}, sources {(result['kernel_sources_sha256'] or '?')[:12]}, {result['date']}",
        f"- DeepSeek-V4 of transformers, unmodified, random weights: {s['layers']} layers, D = {s['dim']}, "
        f"{s['batch']} x {s['seq']} tokens, {count / 1e6:.0f} M parameters",
        f"- compile times are cold, {result['settings']['jobs']} processes compiling at once"
        + "".join(f", {v} alone" for v in result["settings"].get("compiled_alone", ()))
        + "; each was timed alone"
        + ("" if all(r.get("timed_alone", True) for r in result["rows"]) else ", but for some that waited too long"),
    ]
    headings = ["", "forward, ms", "forward + backward, ms", "compile forward + training, s", "peak of training, GiB"]
    headings += ["checkpointed: f + b, ms", "compile, s", "peak, GiB", "loss"]
    rows = []
    for name, of in result["variants"].items():
        cells = [_pair(of, "forward_ms"), _pair(of, "training_ms")]
        cells += [_pair(of, "forward_compile_s", "training_compile_s"), _pair(of, "training_peak_gib", digits=2)]
        cells += [_pair(of, "checkpointed_ms"), _pair(of, "checkpointed_compile_s")]
        cells += [_pair(of, "checkpointed_peak_gib", digits=2), _pair(of, "training_loss", digits=4)]
        rows.append([_LABELS[name], *cells])
    parts = ["# DeepSeek-V4 end to end", "\n".join(lines), report.markdown(headings, rows)]
    if result["verdicts"]:
        marks = [
            [x["what"], f"{x['value']:.2f}", f"{x['bar']} {_met(x['met_bar'])}", f"{x['goal']} {_met(x['met_goal'])}"]
            for x in result["verdicts"]
        ]
        parts.append(report.markdown([f"of {_LABELS['mhc_inductor']}", "", "bar", "goal"], marks))
    routing = [(r["part"], r["routing"]) for r in result["rows"] if "routing" in r]
    if routing:
        marks = [
            [part, _counted(x["routed"]), _counted(x["fused"]), str(x["near_misses"]), f"{x['nodes']:,}"]
            for part, x in routing
        ]
        for mark, (_, x) in zip(marks, routing, strict=True):
            mark += [f"{x['seconds']:.2f}", f"{100 * x['share_of_compile']:.1f} %"]
        headings = ["the pass", "routed", "fused", "near misses", "nodes", "s", "of the compile time"]
        parts.append(report.markdown(headings, marks))
    failed = [
        f"- failed: {r['variant']}, {r['part']}: {r['error']}".splitlines()[0] for r in result["rows"] if "error" in r
    ]
    if failed:
        parts.append("\n".join(failed))
    return "\n\n".join(parts) + "\n"


def _met(met: bool) -> str:
    return "met" if met else "**not met**"


def _counted(ops: dict[str, int]) -> str:
    return ", ".join(f"{n} {op}" for op, n in ops.items()) or "none"


def write(result: dict[str, Any], path: pathlib.Path) -> None:
    """The JSON, and the table beside it."""
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(result))
