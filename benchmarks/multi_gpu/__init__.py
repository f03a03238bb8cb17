# SPDX-License-Identifier: Apache-2.0
"""Several GPUs of one host: correct results, training, weak scaling, context parallelism, and what fails cleanly.

``python -m benchmarks multi_gpu --out FOLDER``. Each job is processes of its own under a time limit, so that none can
take the others' time. Jobs that only check run side by side; those that measure have the machine to themselves. The
result is written after every job. On a CPU (gloo, ``--toy``) the same jobs run with tiny sizes, one after the other.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import environment, processes
from ..processes import Row
from ..report import writer
from ..source_hash import ROUTING, source_hash
from . import jobs
from .jobs import Job, Outcome
from .report import passed, table

PARTS = ("checks", "fsdp", "scaling", "context", "failures")
SHARES = 5
"""Jobs that the sharded ops are checked in on a GPU, where kernels take long to compile."""
TINY = {"dim": 64, "layers": 1, "batch": 1, "seq": 16}


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
        every = [job for job in _jobs(self, out) if job.part in self.parts]
        chosen = [j for j in every if not self.only or any(word in j.name for word in self.only)]
        return sorted(chosen, key=lambda job: not job.timed)


def _jobs(s: Settings, out: pathlib.Path) -> Iterator[Job]:
    def either(toy: Any, full: Any) -> Any:
        return toy if s.toy else full

    def size(**full: int) -> dict[str, Any]:
        return {"size": either(TINY, full)}

    shares, few = either(1, SHARES), {"seconds": 60} | either({"most": 2}, {})
    for name, target, most in (
        ("sharded ops", "sharded_ops", either({"most": 8}, {})),
        ("context parallel", "context", few),
    ):
        for i in range(shares):
            options = {"share": i, "shares": shares, "seconds": 60, **most}
            yield Job(f"{name} {i + 1} of {shares}", "checks", f"checks:{target}", s.ranks, 150, options=options)
    yield Job("sharded training", "checks", "checks:trained", s.ranks, 150, options=few)

    options = {"steps": either(3, 6), "bucket": either(2**16, 25 * 2**20)}
    options = size(dim=1536, layers=2, batch=2, seq=1024) | options
    yield Job("losses", "fsdp", "training:losses", s.ranks, 170, timeout_s=120, options=options)
    small = {"steps": 5, "dim": 32, "layers": 1, "batch": 2, "seq": 16}
    full = {"steps": 40, "dim": 768, "layers": 2, "batch": 8, "seq": 1024}
    options = {"ranks": s.ranks, "size": either(small, full), "every": either(2, 16), "killed_after": either(3, 27)}
    options |= {"picture": str(out.resolve() / f"train_fsdp{either('-toy', '')}.png")}
    yield Job("example", "fsdp", "resume:run", 1, 170, group=False, options=options)

    options = size(dim=3072, layers=3, batch=4, seq=2048) | {"rounds": either(2, 6), "in_a_row": either(1, 5)}
    yield Job("weak scaling", "scaling", "training:scaling", s.ranks, 170, timed=True, timeout_s=120, options=options)
    for name in ("selection", "e79", "mhc"):
        options = {"operator": name, "tokens": either(64, 65536), "rounds": either(2, 7)}
        yield Job(f"context {name}", "context", "context:run", s.ranks, 150, timed=True, options=options)
    options = size(dim=768, layers=1, batch=2, seq=512)
    yield Job("one process", "failures", "failures:one_process", 1, 150, group=False, options=options)
    for name, target in (("context parallel", "context_dies"), ("DTensor", "dtensor_dies")):
        yield Job(f"a rank dies, {name}", "failures", f"failures:{target}", s.ranks, 120, timeout_s=20)


def run(settings: Settings, path: pathlib.Path, say: Callable[[str], None]) -> Row:
    """Runs the jobs and returns the result; writes it to ``path`` and the table next to it after every job."""
    began, result, plan = time.monotonic(), _header(settings), settings.plan(path.parent)

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


def _header(s: Settings) -> Row:
    gpu = s.device == "cuda"
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    found = environment.header("multi_gpu", device, unit="ms", complete=False)
    found["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if gpu else None
    return found | {
        "routing_sha256": source_hash(folders=ROUTING),
        "distributed_sha256": source_hash(folders=("mhc_inductor/distributed",)),
        "ranks": s.ranks,
        "backend": "nccl" if gpu else "gloo",
        "notice": processes.notice(device),
        "settings": {"toy": s.toy, "parts": list(s.parts), "only": list(s.only), "budget_s": s.budget_s},
        "variables": {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_NCCL_"))},
        "jobs": [],
    }


def _row(job: Job, outcomes: list[Outcome]) -> Row:
    """Returns what a job found, and how each of its processes ended."""
    good, why = passed(job, outcomes)
    ends = [{"rank": o.rank, "code": o.code, "seconds": o.seconds} for o in outcomes]
    rows, all_ranks = [o.row for o in outcomes], job.part in ("checks", "failures")
    found = rows if all_ranks else rows[0] if rows else None
    row = {"job": job.name, "part": job.part, "passed": good, "why": why, "processes": ends, "found": found}
    return row if good else row | {"logs": [o.log[-2500:] for o in outcomes]}


write = writer(table)
