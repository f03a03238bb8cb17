# SPDX-License-Identifier: Apache-2.0
"""Runs every test but those marked ``whole``, every case of each, and writes the committed counts and times.

``python -m tests.suite`` takes an hour on two cores. ``./dev test`` runs a part of it, chosen by the times that were
written (``tests/each_commit.py``); ``tests/test_results.py`` checks that the counts are of this tree's code and tests.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks import running
from benchmarks.source_hash import TESTED, source_hash
from tests.counting import Counted, run
from tests.each_commit import RESULT

LEAST = 1.0
"""Seconds of a test function below which its time is not written."""


def result_of(counted: Counted) -> dict[str, Any]:
    """Returns the committed results of a run that has just ended."""
    times = {
        name: [len(counted.cases[name]), round(spent, 1)]
        for name, spent in sorted(counted.seconds.items())
        if spent >= LEAST
    }
    names = ("torch", "triton", "transformers", "pytest")
    return {
        "tested_sources_sha256": source_hash(folders=TESTED),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
        "ran_on": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, Triton's interpreter",
        "seconds_in_all": round(counted.elapsed()),
        "passed": counted.passed.total(),
        "others": sorted(counted.others),
        "seconds": times,
    }


def main(
    jobs: Annotated[int, typer.Option(help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[Path, typer.Option(help="Where the counts go.")] = RESULT,
) -> None:
    """Run every case of every test; exit with 1 if one fails."""
    os.environ.pop("MHC_INDUCTOR_TESTS", None)
    # That test asks for the counts of this very run.
    without = ("--deselect", "tests/test_results.py::test_every_case_of_every_test_has_run")
    code, counted = run(jobs, "-q", *without, str(Path(__file__).parent))
    result = result_of(counted)
    running.save(result, out)
    Console().print(f"{result['passed']} passed, {len(result['others'])} others, {result['seconds_in_all']} s")
    if code:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
