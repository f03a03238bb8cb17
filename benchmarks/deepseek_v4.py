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
import json
import os
import pathlib
import subprocess
import sys
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
RECORD_COMPILE_S = 31.0
"""Seconds plain torch.compile took for the forward on the machine of the bars; scales compile times to that machine."""
ALONE = ("mhc_inductor", "torch.compile-forward", "trivial-forward")
"""The variants and single jobs whose compile times are compared."""
_LABELS = {
    "eager": "eager",
    "torch.compile": "torch.compile",
    "trivial": "torch.compile, mHC coefficients made trivial",
    "mhc_inductor": 'backend="mhc_inductor"',
}


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
        slow = ("torch.compile", "mhc_inductor", "trivial", "eager")
        size = dataclasses.asdict(self.size)
        return [
            Job(v, p, self.device, size, self.rounds)
            for p in reversed(PARTS)
            for v in slow
            if v in self.variants and p in self.parts
        ]

    def compiles_alone(self, job: Job) -> bool:
        return job.variant in self.alone or job.name in self.alone

    def threads(self, job: Job) -> int:
        """Returns the number of Inductor's compile workers: torch's default, shared among jobs that compile at once."""
        return max(1, min(32, os.cpu_count() or 1) // (1 if self.compiles_alone(job) else self.jobs))


_IMPORTED = """
import torch, torch._inductor.config as config
config.force_disable_caches = True
torch.compile(lambda x: (x @ x).sin().sum(-1))(torch.ones(64, 64, device="{device}"))
"""
"""A script that compiles once, to import the modules that a compile imports and cache their byte code."""


def _environment(bytecode: pathlib.Path | None) -> dict[str, str]:
    """Returns the environment of a worker.

    ``bytecode`` is a folder for Python's byte code. If the installation cannot keep byte code, every process would
    otherwise compile 360 modules of torch.
    """
    paths = os.pathsep.join(filter(None, [str(environment.ROOT), os.environ.get("PYTHONPATH")]))
    kept = {"PYTHONPYCACHEPREFIX": str(bytecode)} if bytecode else {}
    return {**os.environ, "PYTHONPATH": paths, **kept}


class Worker:
    """The process of one job. The driver tells it when to compile and when to time."""

    def __init__(self, job: Job, threads: int, folder: pathlib.Path) -> None:
        self.job = job
        self.path, self.log = folder / f"{job.name}.json", folder / f"{job.name}.log"
        self.path.unlink(missing_ok=True)
        words = json.dumps(dataclasses.asdict(job))
        bytecode = folder / "bytecode" if job.variant != "eager" else None
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.deepseek_worker", words, str(self.path)],
                cwd=environment.ROOT,
                env={**_environment(bytecode), "TORCHINDUCTOR_COMPILE_THREADS": str(threads)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def reach(self, stage: str) -> None:
        """Waits until the process prints ``stage`` or ends."""
        assert self.process.stdout is not None
        any(line.strip() == stage for line in iter(self.process.stdout.readline, ""))

    def go_on(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("go on\n")
            self.process.stdin.flush()

    def row(self) -> dict[str, Any]:
        """Waits for the process to end; returns what it measured, or "error" and the end of its output."""
        self.process.communicate()
        failed = {"error": f"the process ended with {self.process.returncode}"}
        row = json.loads(self.path.read_text()) if self.path.exists() else failed
        if "error" in row:
            row["output"] = self.log.read_text()[-3000:]
        return {"variant": self.job.variant, "part": self.job.part, **row}


class Driver:
    """Runs the jobs of ``settings`` and keeps their rows in ``folder``, so that a later run can reuse them."""

    def __init__(self, settings: Settings, folder: pathlib.Path, step: Callable[[str], None]) -> None:
        self.settings, self.folder, self.step = settings, folder, step
        folder.mkdir(parents=True, exist_ok=True)

    def stamp(self, job: Job) -> dict[str, Any]:
        """Returns the stamp a kept row must carry to be reused: job, hash of the sources, commit."""
        return {"job": dataclasses.asdict(job), "sources": environment.source_hash(), **environment.commit()}

    def kept(self, job: Job) -> dict[str, Any] | None:
        path = self.folder / f"{job.name}.json"
        with contextlib.suppress(OSError, ValueError):
            row = json.loads(path.read_text())
            if row.get("stamp") == self.stamp(job) and "error" not in row:
                return row
        return None

    def run(self) -> list[dict[str, Any]]:
        """Returns the rows of all jobs in the plan's order; a failed row has "error" and the end of its output."""
        plan = self.settings.plan()
        rows = {job.name: row for job in plan if (row := self.kept(job))}
        todo = [job for job in plan if job.name not in rows]
        if any(job.variant != "eager" for job in todo):
            self.step("importing")
            words = [sys.executable, "-c", _IMPORTED.format(device=self.settings.device)]
            subprocess.run(words, env=_environment(self.folder / "bytecode"), stderr=subprocess.DEVNULL, check=False)
        workers = [Worker(job, self.settings.threads(job), self.folder) for job in todo]
        for worker in workers:
            worker.reach("ready")
        alone = [w for w in workers if self.settings.compiles_alone(w.job)]
        others = [w for w in workers if w not in alone]
        for worker in alone:
            self._compile(worker)
            rows[worker.job.name] = self._time(worker)
        with concurrent.futures.ThreadPoolExecutor(self.settings.jobs) as pool:
            list(pool.map(self._compile, others))
        for worker in others:
            rows[worker.job.name] = self._time(worker)
        return [rows[job.name] for job in plan]

    def _compile(self, worker: Worker) -> None:
        self.step(f"{worker.job.name}: compiling")
        worker.go_on()
        worker.reach("compiled")

    def _time(self, worker: Worker) -> dict[str, Any]:
        self.step(f"{worker.job.name}: timing")
        worker.go_on()
        row = worker.row()
        row |= {"compiled_alone": self.settings.compiles_alone(worker.job), "stamp": self.stamp(worker.job)}
        row["compile_threads"] = self.settings.threads(worker.job)
        worker.path.write_text(json.dumps(row))
        return row


def gather(settings: Settings, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the result of a run: header, rows, figures per variant, and verdicts on the device of the bars."""
    import transformers

    device = torch.device(settings.device)
    result = environment.header(device) | {"operator": "deepseek_v4"}
    result["versions"]["transformers"] = transformers.__version__
    result["settings"] = {
        "size": dataclasses.asdict(settings.size),
        "rounds": settings.rounds,
        "jobs": settings.jobs,
        "compiled_alone": settings.alone,
    }
    result["rows"] = [{k: v for k, v in row.items() if k != "stamp"} for row in rows]
    bars_apply = "H200" in result["device"]["name"] and settings.size == deepseek_model.Size()
    result["variants"] = {v: summary(v, rows) for v in settings.variants}
    result["verdicts"] = verdicts(result["variants"], settings.alone) if bars_apply else []
    return result


def verdicts(variants: dict[str, dict[str, float]], alone: tuple[str, ...]) -> list[dict[str, Any]]:
    """Returns the verdict on every figure of mhc_inductor that has a bar.

    Compile times appear a second time, scaled to the processor of the machine that set the bars.
    """
    ours = dict(variants.get("mhc_inductor", {}))
    bars = dict(BARS)
    plain = variants.get("torch.compile", {}).get("forward_compile_s")
    if plain is not None and "torch.compile-forward" in alone:
        for what in [w for w in ours if w.endswith("_compile_s") and w in BARS]:
            scaled = f"{what} x {RECORD_COMPILE_S:g} / {plain:.1f}, plain torch.compile in the record and here"
            ours[scaled], bars[scaled] = ours[what] * RECORD_COMPILE_S / plain, BARS[what]
    return [
        {"what": what, "value": ours[what], "bar": bar, "met_bar": ours[what] <= bar}
        | {"goal": goal, "met_goal": ours[what] <= goal}
        for what, (bar, goal) in bars.items()
        if what in ours
    ]


def summary(variant: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the figures of one variant under flat names such as ``training_ms``."""
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
    """Returns the run as Markdown."""
    v, d, s = result["versions"], result["device"], result["settings"]["size"]
    count = next((r["parameters"] for r in result["rows"] if "parameters" in r), 0)
    lines = [
        f"- {d['name']}, torch {v['torch']}, triton {v['triton']}, transformers {v['transformers']}, Python {v['python']}",
        f"- commit {report.commit_of(result)}, sources {report.sources_of(result)}, {result['date']}",
        f"- DeepSeek-V4 of transformers, unmodified, random weights: {s['layers']} layers, D = {s['dim']}, "
        f"{s['batch']} x {s['seq']} tokens, {count / 1e6:.0f} M parameters",
        f"- compile times are cold but for Python's byte code; alone, with all processors: {', '.join(result['settings']['compiled_alone'])}; "
        f"the others {result['settings']['jobs']} at once; each was timed while nothing compiled",
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
    """Writes the JSON and, next to it, the table."""
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(result))
