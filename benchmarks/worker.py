# SPDX-License-Identifier: Apache-2.0
"""A process of :class:`benchmarks.processes.Worker`; its answers go to stdout, and what else it prints to stderr.

``python -m benchmarks.worker measure MODULE JOB FILE`` measures one job (JSON of the module's ``Job``) with cold caches
and writes its row. ``python -m benchmarks.worker serve MODULE WORD...`` calls the module's ``serve(answer, WORD...)``.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

from .cold import cold_caches

Answer = Callable[[str], None]


def measure(answer: Answer, module: str, words: str, out: str) -> None:
    """Writes the row of ``measure(job, tell)`` to ``out``: of a job that raises, what it told so far, and "error".

    ``tell(stage)`` answers with the stage and waits for a line on stdin; ``tell(row)`` writes a row that may get more.
    """
    with cold_caches():  # before torch is imported
        of = importlib.import_module(f"benchmarks.{module}")
        job = of.Job(**json.loads(words))
        row: dict[str, Any] = job.named

        def tell(what: str | dict[str, Any]) -> None:
            if isinstance(what, str):
                answer(what)
                sys.stdin.readline()
            else:
                row.update(what)
                pathlib.Path(out).write_text(json.dumps(row))

        try:
            found = of.measure(job, tell)
        except Exception as e:
            traceback.print_exc()
            found = {"error": f"{type(e).__name__}: {e}"[:2000]}
        tell(found)


def serve(answer: Answer, module: str, *words: str) -> None:
    importlib.import_module(f"benchmarks.{module}").serve(answer, *words)


def main(how: str, *words: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    {"measure": measure, "serve": serve}[how](lambda text: print(text, file=answers, flush=True), *words)


if __name__ == "__main__":
    main(*sys.argv[1:])
