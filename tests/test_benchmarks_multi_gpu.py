# SPDX-License-Identifier: Apache-2.0
"""The benchmark of several GPUs, with tiny sizes on gloo: its jobs, their limits, and what makes one fail."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
pytest.importorskip("typer")
pytest.importorskip("rich")

from benchmarks import multi_gpu  # noqa: E402
from benchmarks.multi_gpu import jobs, report  # noqa: E402
from benchmarks.multi_gpu.jobs import Job, Outcome  # noqa: E402


def test_a_job_that_hangs_is_ended_and_fails(tmp_path: pathlib.Path) -> None:
    """The limit comes before the process has imported anything; the next job does not begin: the budget is spent."""
    found: dict[str, tuple[bool, str]] = {}
    plan = [Job(name, "context", "context:run", 2, 0.3) for name in ("hangs", "late")]
    began = time.monotonic()
    jobs.run(plan, tmp_path, "cpu", True, 1, 0.2, lambda job, ends: found.update({job.name: report.passed(job, ends)}))
    assert time.monotonic() - began < 30
    assert not found["hangs"][0] and "rank 1: ended by the time limit" in found["hangs"][1], found
    assert found["late"] == (False, "did not begin within the run's budget of seconds")


def _dead(row: dict[str, Any] | None, code: int | None, log: str = "") -> tuple[bool, str]:
    job = Job("a rank dies", "failures", "failures:dtensor_dies", 2, 1)
    return report.passed(job, [Outcome(0, row, code, 9.0, log), Outcome(1, {"dead": True}, report.DEAD, 1.0, "")])


def test_a_death_must_end_in_an_error() -> None:
    assert _dead({"waits": True, "raised": "RuntimeError: peer"}, 0) == (True, "")
    assert _dead({"waits": True, "raised": "RuntimeError: op: peer", "op": "op"}, 0) == (True, "")
    assert "does not name op" in _dead({"waits": True, "raised": "RuntimeError: peer", "op": "op"}, 0)[1]
    assert _dead({"waits": True}, -6, "Watchdog caught collective operation timeout") == (True, "")
    assert _dead({"waits": True}, None) == (False, "rank 0 hung for 9.0 s")
    assert not _dead({"waits": True, "raised": ""}, 0)[0] and not _dead(None, -6, "Watchdog")[0]


def test_wrong_results_fail() -> None:
    def of(target: str, part: str, row: dict[str, Any]) -> tuple[bool, str]:
        return report.passed(Job("job", part, target, 1, 1), [Outcome(0, row, 0, 1.0, "")])

    good = {"failed": {}, "other_bits": []}
    assert of("checks:sharded_ops", "checks", good)[0]
    assert (
        "other bits: mhc_pre plain" in of("checks:sharded_ops", "checks", {**good, "other_bits": ["mhc_pre plain"]})[1]
    )
    assert "AssertionError" in of("checks:trained", "checks", {"failed": {"mhc_trains": "x\nAssertionError: 1"}})[1]
    variant = {"difference": 1e-9, "allowed": 1e-5, "routed": True}
    losses = {"variants": {"FSDP2": variant}}
    assert of("training:losses", "fsdp", losses)[0]
    for change in ({"difference": float("nan")}, {"difference": 1e-4}, {"routed": False}):
        assert not of("training:losses", "fsdp", {**losses, "variants": {"FSDP2": {**variant, **change}}})[0]
    results = {"output_error": 0.0, "gradient_error": float("nan")}
    rows = [{"variant": "one rank"}, {"variant": "ring", "results": results}]
    assert of("context:run", "context", {"rows": rows}) == (False, "ring: error nan")
    assert of("context:run", "context", {"error": "RuntimeError: no"}) == (False, "rank 0: RuntimeError: no")


def test_every_part_has_jobs_and_a_name_of_its_own(tmp_path: pathlib.Path) -> None:
    plan = multi_gpu.Settings("cuda", 4).plan(tmp_path)
    assert {job.part for job in plan} == set(multi_gpu.PARTS) and len({job.name for job in plan}) == len(plan)
    assert all(job.target.endswith("_dies") or job.target in report._FOUND for job in plan)
    assert [job.timed for job in plan] == sorted((job.timed for job in plan), reverse=True)
