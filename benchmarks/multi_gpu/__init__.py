# SPDX-License-Identifier: Apache-2.0
"""Several GPUs of one host: correct results, training, weak scaling, context parallelism, and what fails cleanly.

``python -m benchmarks multi_gpu --out FOLDER``. Each job is processes of its own under a time limit, so that none can
take the others' time. Jobs that only check run side by side; those that measure have the machine to themselves. The
result is written after every job. On a CPU (gloo, ``--toy``) the same jobs run with tiny sizes, one after the other.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from .. import environment, running
from ..source_hash import ROUTING, source_hash
from . import jobs
from .jobs import Job, Outcome
from .report import table
from .verdict import passed

__all__ = ["PARTS", "Settings", "run", "table", "write"]
PARTS = ("checks", "fsdp", "scaling", "context", "failures")
SHARES = 5
"""Jobs that the sharded ops are checked in on a GPU, where kernels take long to compile."""


@dataclasses.dataclass
class Settings:
    """What to run. ``budget_s``: seconds after which every job is ended."""

    device: str
    ranks: int
    toy: bool = False
    parts: tuple[str, ...] = PARTS
    budget_s: float = 290.0
    only: tuple[str, ...] = ()
    """Words of jobs' names; all jobs of the parts where it is empty."""

    def plan(self, out: pathlib.Path) -> list[Job]:
        """Returns the jobs in the order in which they begin: those that take longest first."""
        every = [job for part in PARTS if part in self.parts for job in _JOBS[part](self, out)]
        chosen = [j for j in every if not self.only or any(word in j.name for word in self.only)]
        return sorted(chosen, key=lambda job: not job.timed)


# --- the jobs -----------------------------------------------------------------------------------------------


def _checks(s: Settings, out: pathlib.Path) -> list[Job]:
    shares = 1 if s.toy else SHARES
    most = {"most": 8} if s.toy else {}
    sharded = [
        Job(
            f"sharded ops {i + 1} of {shares}",
            "checks",
            "checks:sharded_ops",
            s.ranks,
            150,
            options={"share": i, "shares": shares, "seconds": 60, **most},
        )
        for i in range(shares)
    ]
    few = {"seconds": 60, **({"most": 2} if s.toy else {})}
    parallel = [
        Job(
            f"context parallel {i + 1} of {shares}",
            "checks",
            "checks:context",
            s.ranks,
            150,
            options={"share": i, "shares": shares, **few},
        )
        for i in range(shares)
    ]
    return [*sharded, *parallel, Job("sharded training", "checks", "checks:trained", s.ranks, 150, options=few)]


def _fsdp(s: Settings, out: pathlib.Path) -> list[Job]:
    size = (
        {"dim": 64, "layers": 1, "batch": 1, "seq": 16}
        if s.toy
        else {"dim": 1536, "layers": 2, "batch": 2, "seq": 1024}
    )
    losses = {"size": size, "steps": 3 if s.toy else 6, "bucket": 2**16 if s.toy else 25 * 2**20}
    small = {"steps": 5, "dim": 32, "layers": 1, "batch": 2, "seq": 16}
    example = {
        "ranks": s.ranks,
        "size": small if s.toy else {"steps": 40, "dim": 768, "layers": 2, "batch": 8, "seq": 1024},
        "every": 2 if s.toy else 16,
        "killed_after": 3 if s.toy else 27,
        "picture": str(out.resolve() / ("train_fsdp-toy.png" if s.toy else "train_fsdp.png")),
    }
    return [
        Job("losses", "fsdp", "training:losses", s.ranks, 170, timeout_s=120, options=losses),
        Job("example", "fsdp", "example:run", 1, 170, group=False, options=example),
    ]


def _scaling(s: Settings, out: pathlib.Path) -> list[Job]:
    size = (
        {"dim": 64, "layers": 1, "batch": 1, "seq": 16}
        if s.toy
        else {"dim": 3072, "layers": 3, "batch": 4, "seq": 2048}
    )
    options = {"size": size, "rounds": 2 if s.toy else 6, "in_a_row": 1 if s.toy else 5}
    return [
        Job("weak scaling", "scaling", "training:scaling", s.ranks, 170, timed=True, timeout_s=120, options=options)
    ]


def _context(s: Settings, out: pathlib.Path) -> list[Job]:
    return [
        Job(
            f"context {name}",
            "context",
            "context:run",
            s.ranks,
            150,
            timed=True,
            options={"operator": name, "tokens": 64 if s.toy else 65536, "rounds": 2 if s.toy else 7},
        )
        for name in ("selection", "e79", "mhc")
    ]


def _failures(s: Settings, out: pathlib.Path) -> list[Job]:
    size = (
        {"dim": 64, "layers": 1, "batch": 1, "seq": 16} if s.toy else {"dim": 768, "layers": 1, "batch": 2, "seq": 512}
    )
    return [
        Job("one process", "failures", "failures:one_process", 1, 150, group=False, options={"size": size}),
        Job("a rank dies, context parallel", "failures", "failures:context_dies", s.ranks, 120, timeout_s=20),
        Job("a rank dies, DTensor", "failures", "failures:dtensor_dies", s.ranks, 120, timeout_s=20),
    ]


_JOBS: dict[str, Callable[[Settings, pathlib.Path], list[Job]]] = {
    "checks": _checks,
    "fsdp": _fsdp,
    "scaling": _scaling,
    "context": _context,
    "failures": _failures,
}


# --- the run ------------------------------------------------------------------------------------------------


def run(settings: Settings, path: pathlib.Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs the jobs and returns the result; writes it to ``path`` and the table next to it after every job."""
    began = time.monotonic()
    result = _header(settings)
    plan = settings.plan(path.parent)

    def done(job: Job, outcomes: list[Outcome]) -> None:
        row = _row(job, outcomes)
        result["jobs"].append(row)
        result["jobs"].sort(key=lambda r: [j.name for j in plan].index(r["job"]))
        result["seconds"] = round(time.monotonic() - began, 1)
        write(result, path)
        say(f"{result['seconds']:6.1f} s  {job.name}: {'passed' if row['passed'] else 'FAILED: ' + row['why']}")

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        side_by_side = 1 if settings.device == "cpu" else len(plan)
        where = pathlib.Path(folder)
        jobs.run(plan, where, settings.device, settings.toy, side_by_side, settings.budget_s, done)
    result["complete"] = len(result["jobs"]) == len(plan)
    write(result, path)
    return result


def _header(s: Settings) -> dict[str, Any]:
    device = torch.device("cuda", 0) if s.device == "cuda" else torch.device("cpu")
    nccl = torch.cuda.nccl.version() if s.device == "cuda" else None
    found = environment.header(device) | {"operator": "multi_gpu", "unit": "ms", "complete": False}
    found["versions"]["nccl"] = None if nccl is None else ".".join(map(str, nccl))
    return found | {
        "routing_sha256": source_hash(folders=ROUTING),
        "distributed_sha256": source_hash(folders=("mhc_inductor/distributed",)),
        "ranks": s.ranks,
        "backend": "nccl" if s.device == "cuda" else "gloo",
        "notice": None if s.device == "cuda" else running.CPU_NOTICE,
        "settings": {"toy": s.toy, "parts": list(s.parts), "only": list(s.only), "budget_s": s.budget_s},
        "variables": {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_NCCL_"))},
        "jobs": [],
    }


def _row(job: Job, outcomes: list[Outcome]) -> dict[str, Any]:
    """Returns what a job found, and how each of its processes ended."""
    good, why = passed(job, outcomes)
    ends = [{"rank": o.rank, "code": o.code, "seconds": o.seconds} for o in outcomes]
    row = {"job": job.name, "part": job.part, "passed": good, "why": why, "processes": ends}
    row["found"] = (
        [o.row for o in outcomes] if job.part in ("checks", "failures") else outcomes[0].row if outcomes else None
    )
    if not good:
        row["logs"] = [o.log[-2500:] for o in outcomes]
    return row


def write(result: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the JSON and the table."""
    running.save(result, path)
    path.with_suffix(".md").write_text(table(json.loads(path.read_text())))
