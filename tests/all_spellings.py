# SPDX-License-Identifier: Apache-2.0
"""Every random spelling of the three formulas, and every mutant of mHC in a second spelling.

The tests draw a sample of these; ``python -m tests.all_spellings`` runs all of them and writes the committed counts.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import platform
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track

from benchmarks import running
from benchmarks.source_hash import ROUTING, source_hash
from tests import test_routing_e79 as e79
from tests import test_routing_selection as selection
from tests import test_routing_spellings as mhc
from tests.formulas.spellings_selection import held

RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "routing_spellings.json"
COUNTS = {"mhc": mhc.TOTAL, "mhc mutants": len(mhc.MUTANTS), "e79": e79.RANDOM, "selection": selection.RANDOM}


def problem(task: tuple[str, int]) -> str:
    """Returns the failure of the i-th spelling or mutant of a kind, or "" if it is routed as expected."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    kind, i = task
    try:
        if kind == "mhc":
            return mhc.unrouted(list(mhc.spellings(i + 1, mhc.SEED))[i]) or ""
        if kind == "mhc mutants":
            return "\n".join(mhc.routed_mutant(*list(mhc.mutants(mhc.OTHER_SPELLING))[i]))
        if kind == "e79":
            e79.assert_one_scan(e79.spellings(e79.RANDOM, e79.SEED)[i])
        else:
            selection.assert_routed(selection.spellings(selection.RANDOM, selection.SEED)[i])
    except Exception as error:  # a failed assertion, or a failure to compile
        return f"{kind} {i}: {type(error).__name__}: {error}"[:600]
    return ""


def main(
    jobs: Annotated[int, typer.Option(help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[Path, typer.Option(help="Where the counts go.")] = RESULT,
) -> None:
    """Route every spelling and mutant; exit with 1 if one is missed, a mutant is routed, or the numbers differ."""
    console, start = Console(), time.perf_counter()
    tasks = [(kind, i) for kind, count in COUNTS.items() for i in range(count)]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        found = list(track(pool.map(problem, tasks), "routing", len(tasks), console=console))
    result: dict[str, Any] = {
        "routing_sha256": source_hash(folders=ROUTING),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    for kind, count in COUNTS.items():
        problems = [p for (k, _), p in zip(tasks, found, strict=True) if k == kind and p]
        result[kind] = {"checked": count, "as_expected": count - len(problems), "problems": problems}
        if kind == "selection":
            result[kind] |= held(selection.spellings(selection.RANDOM, selection.SEED))
        console.print(f"{kind}: {count - len(problems)} of {count}", *problems, sep="\n", markup=False)
    console.print(f"{time.perf_counter() - start:.0f} s")
    running.save(result, out)
    if any(found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
