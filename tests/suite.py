# SPDX-License-Identifier: Apache-2.0
"""Runs every test but those marked ``whole``, every case of each, and writes the committed counts and times.

``python -m tests.suite`` takes some 40 minutes on two cores. ``./dev test`` runs a part of it, chosen by the times that were
written (``tests/tools/each_commit.py``); ``tests/test_results.py`` checks that the counts are of this tree's code and tests.
``--add FILE`` runs the tests of a file alone and writes the times of those that have none, as of a new file's.
"""

from __future__ import annotations

import json
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
from tests.tools.counting import Counted, run
from tests.tools.each_commit import RESULT

LEAST = 1.0
"""Seconds of a test function below which its time is not written."""


def times_of(counted: Counted) -> dict[str, list[float]]:
    """Returns the number of cases and the seconds of each test function that took a second or more."""
    spent = sorted(counted.seconds.items())
    return {name: [len(counted.cases[name]), round(seconds, 1)] for name, seconds in spent if seconds >= LEAST}


def result_of(counted: Counted) -> dict[str, Any]:
    """Returns the committed results of a run that has just ended."""
    names = ("torch", "triton", "transformers", "pytest")
    return {
        "tested_sources_sha256": source_hash(folders=TESTED),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
        "ran_on": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, Triton's interpreter",
        "seconds_in_all": round(counted.elapsed()),
        "passed": counted.passed.total(),
        "others": sorted(counted.others),
        "seconds": times_of(counted),
    }


def with_times_of(counted: Counted, known: dict[str, Any]) -> dict[str, Any]:
    """Returns the results ``known``, with the times of functions that have none there."""
    return {**known, "seconds": dict(sorted({**times_of(counted), **known["seconds"]}.items()))}


def main(
    jobs: Annotated[int, typer.Option(help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[Path, typer.Option(help="Where the counts go.")] = RESULT,
    add: Annotated[list[str], typer.Option(help="Files that run alone, for times that are missing.")] = [],  # noqa: B006
) -> None:
    """Run every case of every test; exit with 1 if one fails."""
    os.environ.pop("MHC_INDUCTOR_TESTS", None)
    if add:  # what has no time yet runs whole there, too
        os.environ["MHC_INDUCTOR_TESTS"] = "commit"
    # That test asks for the counts of this very run.
    without = ("--deselect", "tests/test_results.py::test_every_case_of_every_test_has_run")
    code, counted = run(jobs, "-q", *without, *(add or [str(Path(__file__).parent)]))
    running.save(with_times_of(counted, json.loads(out.read_text())) if add else result_of(counted), out)
    Console().print(f"{counted.passed.total()} passed, {len(counted.others)} others, {counted.elapsed():.0f} s")
    if code:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
