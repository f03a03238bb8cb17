"""Compiles every kernel in every case for every target; the tests of each commit compile the most common cases.

``python -m tests.all_offline`` takes eight minutes on two cores, and writes the committed counts.
``tests/test_results.py`` checks that they are of this tree's kernels.
"""

from __future__ import annotations

import os
import pathlib
import platform
from typing import Annotated, Any

import triton
import typer
from rich.console import Console

from benchmarks import running
from benchmarks.source_hash import ROOT, source_hash
from tests.counting import run

TESTS = pathlib.Path(__file__).parent
RESULT = ROOT / "benchmarks" / "results" / "offline.json"
FILES = [*sorted(f.name for f in TESTS.glob("test_offline*.py")), "test_contraction.py", "test_post_project.py"]


def main(
    jobs: Annotated[int, typer.Option(help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[pathlib.Path, typer.Option(help="Where the counts go.")] = RESULT,
) -> None:
    """Compile every case for every target; exit with 1 if one fails, spills more than its table says, or is skipped."""
    os.environ["MHC_INDUCTOR_TESTS"] = "whole"
    # Of test_post_project.py, only what compiles offline.
    code, counted = run(jobs, "-k", "not test_post_project or spills", *(str(TESTS / f) for f in FILES))
    result: dict[str, Any] = {
        "kernel_sources_sha256": source_hash(),
        "versions": {"triton": triton.__version__, "python": platform.python_version()},
        "passed": dict(sorted(counted.passed.items())),
        "others": counted.others,
    }
    Console().print(f"{counted.passed.total()} passed, {counted.elapsed():.0f} s")
    running.save(result, out)
    if code or counted.others or len(counted.passed) != len(FILES):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
