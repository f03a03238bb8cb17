# SPDX-License-Identifier: Apache-2.0
"""``python -m mhc_inductor tune``: measures configurations on this GPU and writes the table that the package reads."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mhc_inductor.progress import bars
from mhc_inductor.tuning import table
from mhc_inductor.tuning.search import Search, Workload


def main(
    kinds: Sequence[str],
    widths: Sequence[int],
    minutes: float,
    again: bool,
    out: pathlib.Path | None,
    as_json: bool = False,
) -> int:
    """Measures on the first visible GPU and returns the exit status: 0, or 1 if there is nothing to measure on.

    Args:
        kinds: Operators, of :data:`mhc_inductor.tuning.workloads.KINDS`.
        widths: D of mHC.
        minutes: After these, the rest is left for the next call, which goes on there.
        again: Whether to measure anew what the table has.
        out: The table's file; None for the one that the package reads.
        as_json: Whether to print one JSON object in place of a sentence. Progress goes to standard error.
    """
    if not torch.cuda.is_available():
        print("tune: no GPU is visible, and nothing can be measured without one", file=sys.stderr)
        return 1
    from triton.testing import do_bench

    from mhc_inductor.tuning.workloads import workloads

    device = torch.device("cuda", 0)
    of = table.header(0)
    path = table.default_path(of) if out is None else out
    if again:
        path.unlink(missing_ok=True)

    def measure(call: Callable[[], Any]) -> float:
        return float(do_bench(call, warmup=20, rep=80, return_mode="median"))

    with torch.cuda.device(device):
        content = search(workloads(kinds, widths, device), path, of, measure, minutes)
    done = {"table": str(path), "measured": len(content["measured"]), "changed": len(content["entries"])}
    words = f"{path}: {done['measured']} configurations measured, {done['changed']} changed"
    print(json.dumps(done) if as_json else words)
    return 0


def search(
    plan: Sequence[Workload], path: pathlib.Path, of: dict[str, Any], measure: Any, minutes: float
) -> dict[str, Any]:
    """Runs a search over workloads with a progress bar; returns the table's content."""
    with progress(len(plan)) as (step, say):
        run = Search(path, of, measure, say, time.monotonic() + 60 * minutes)
        for workload in plan:
            step(workload.name)
            if not run.run(workload):
                say(f"{minutes:g} minutes are over; the same command goes on here")
                break
            step(None)
    table.write(path, run.content)  # also where nothing was measured: a table without entries is one
    return run.content


@contextlib.contextmanager
def progress(total: int) -> Iterator[tuple[Callable[[str | None], None], Callable[[str], None]]]:
    """Yields what begins a workload by its name, or ends it by None, and what prints a line."""
    try:
        from rich.console import Console
    except ImportError:
        say = functools.partial(print, file=sys.stderr)
        yield (lambda name: say(name) if name else None), say
        return
    console = Console(stderr=True)
    with bars(console) as bar:
        task = bar.add_task("", total=total)

        def step(name: str | None) -> None:
            bar.update(task, description=name) if name else bar.advance(task)

        yield step, lambda line: console.print(line, highlight=False, markup=False)
