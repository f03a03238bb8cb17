# SPDX-License-Identifier: Apache-2.0
"""Models with sparse attention end to end: eager, torch.compile and this package, each job in its own process.

Jobs run one after the other, so that each has the device and all processors to itself. Ours come first, then
torch.compile, then eager: a budget that ends cuts off peers. Finished rows are kept, so that a run goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import environment, running
from . import sparse_targets as targets
from .source_hash import ROUTING, source_hash
from .sparse_report import plot, table
from .sparse_targets import Case
from .sparse_worker import Job

__all__ = ["Driver", "Settings", "gather", "make_importable", "plot", "table", "write"]
SPENT = "the run's budget of seconds was spent"


@dataclasses.dataclass
class Settings:
    """What to measure. ``budget_s``: seconds after which no job begins; ``limit_s``: the longest that one may take."""

    device: str
    cases: tuple[Case, ...] = targets.CASES
    variants: tuple[str, ...] = targets.VARIANTS
    rounds: int = 20
    toy: bool = False
    budget_s: float = 1500.0
    limit_s: float = 300.0
    paths: tuple[str, ...] = ()

    def plan(self) -> list[Job]:
        """Returns the jobs in the order in which they run."""
        order = [v for v in targets.VARIANTS if v in self.variants]
        return [
            Job(v, dataclasses.asdict(c), self.device, self.toy, self.rounds)
            for v in order
            for c in self.cases
            if c.takes(v)
        ]


def make_importable(words: str, folder: pathlib.Path) -> tuple[str, ...]:
    """Prepends folders and wheels to ``sys.path``; returns the folders.

    Args:
        words: paths separated as in PYTHONPATH. Each is a folder with packages, or a wheel.
        folder: where wheels are unpacked: transformers looks for its models among files.

    Raises:
        FileNotFoundError: if a path does not exist.
        ImportError: if transformers cannot be imported with these paths, with what to carry too.
    """
    paths = []
    for word in filter(None, words.split(os.pathsep)):
        path = pathlib.Path(word).resolve()
        if not path.exists():
            raise FileNotFoundError(f"--transformers: {path} does not exist")
        if path.suffix == ".whl":
            unpacked = folder / path.stem
            if not unpacked.exists():
                with zipfile.ZipFile(path) as wheel:
                    wheel.extractall(unpacked)
            path = unpacked
        paths.append(str(path))
    sys.path[:0] = paths
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"transformers cannot be imported: {error}. transformers 5.23 needs huggingface-hub 1.31 or newer, where "
            "5.17 accepts 1.5; tokenizers 0.23.1, safetensors 0.8.0 and regex 2025.10.22 are enough for both. "
            f"Name folders or wheels of what is too old in --transformers too, separated by {os.pathsep!r}"
        ) from error
    return tuple(paths)


class Driver:
    """Runs the jobs of ``settings`` and keeps their rows in ``folder``, so that a later run can reuse them."""

    def __init__(self, settings: Settings, folder: pathlib.Path, step: Callable[[str], None]) -> None:
        self.settings, self.folder, self.step = settings, folder, step
        self._began = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)

    def stamp(self, job: Job) -> dict[str, Any]:
        """Returns the stamp a kept row must carry to be reused: job, hashes of the sources, commit, transformers."""
        import transformers

        return {
            "job": json.loads(json.dumps(dataclasses.asdict(job))),
            "sources": [environment.source_hash(), source_hash(folders=ROUTING)],
            "transformers": transformers.__version__,
            **environment.commit(),
        }

    def kept(self, job: Job) -> dict[str, Any] | None:
        """Returns the kept row of a job, if it is of this code and did not fail."""
        with contextlib.suppress(OSError, ValueError):
            row: dict[str, Any] = json.loads((self.folder / f"{job.name}.json").read_text())
            if row.get("stamp") == self.stamp(job) and "error" not in row:
                return row
        return None

    @property
    def left(self) -> float:
        return self.settings.budget_s - (time.monotonic() - self._began)

    def run(self, save: Callable[[list[dict[str, Any]]], None] = lambda _: None) -> list[dict[str, Any]]:
        """Returns the rows of all jobs; a failed or skipped row has "error". ``save`` gets them after every job."""
        rows = []
        for job in self.settings.plan():
            row = self.kept(job)
            if row is None:
                row = self._measured(job) if self.left > 0 else self._failed(job, SPENT)
            rows.append(row)
            save(rows)
        return rows

    def _failed(self, job: Job, why: str) -> dict[str, Any]:
        return {"variant": job.variant, "case": job.of.name, "part": job.of.part, "error": why}

    def _measured(self, job: Job) -> dict[str, Any]:
        """Runs the process of one job; a process that is stopped late keeps the times that it saved."""
        self.step(job.name)
        path, log = self.folder / f"{job.name}.json", self.folder / f"{job.name}.log"
        path.unlink(missing_ok=True)
        words = [sys.executable, "-m", "benchmarks.sparse_worker", json.dumps(dataclasses.asdict(job)), str(path)]
        places = [*self.settings.paths, str(environment.ROOT), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        env.setdefault("PYTHONPYCACHEPREFIX", str(self.folder / "bytecode"))
        limit = min(self.settings.limit_s, max(self.left, 1))
        ended: object
        with log.open("w") as out:
            try:
                ended = subprocess.run(
                    words, cwd=environment.ROOT, env=env, stdout=out, stderr=out, timeout=limit, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                ended = f"its limit of {limit:.0f} s"
        row = self._failed(job, f"the process ended with {ended}")
        with contextlib.suppress(OSError, ValueError):
            row = {**({"error": row["error"]} if ended else {}), **json.loads(path.read_text())}
        if "error" in row:
            row["output"] = log.read_text()[-3000:]
        row["stamp"] = self.stamp(job)
        path.write_text(json.dumps(row))
        return row


def gather(settings: Settings, measured: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the result of a run: header, rows, verdicts on the device of the bars, and errors within bounds."""
    import transformers

    device = torch.device(settings.device)
    result = environment.header(device) | {"operator": "sparse_models", "unit": "ms"}
    result["routing_sha256"] = source_hash(folders=ROUTING)
    result["versions"]["transformers"] = transformers.__version__
    result["notice"] = None if device.type == "cuda" else running.CPU_NOTICE
    result["settings"] = {
        "rounds": settings.rounds,
        "toy": settings.toy,
        "budget_s": settings.budget_s,
        "cases": [dataclasses.asdict(c) for c in settings.cases],
    }
    result["rows"] = rows = [{k: v for k, v in row.items() if k != "stamp"} for row in measured]
    result["complete"] = len(rows) == len(settings.plan())
    result["bars_apply"] = running.BARS_DEVICE in result["device"]["name"] and not settings.toy
    judge(result, settings.cases)
    return result


def judge(result: dict[str, Any], cases: Iterable[Case]) -> None:
    """Sets the verdicts of ``result`` on its rows, and its errors."""
    by_case = {c: {r["variant"]: r for r in result["rows"] if r["case"] == c.name} for c in cases}
    result["verdicts"] = [v for c, of in by_case.items() if result["bars_apply"] for v in targets.verdicts(c, of)]
    result["errors"] = [{"case": c.name, **e} for c, of in by_case.items() for e in targets.errors(of)]


def write(result: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the JSON and, next to it, the table and the picture."""
    running.save(result, path)
    kept = json.loads(path.read_text())
    path.with_suffix(".md").write_text(table(kept))
    with contextlib.suppress(ImportError):
        plot(kept, path.with_suffix(".png"))
