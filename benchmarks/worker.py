# SPDX-License-Identifier: Apache-2.0
"""A process of :class:`benchmarks.processes.Worker`; its answers go to stdout, and what else it prints to stderr.

``python -m benchmarks.worker measure MODULE JOB FILE`` measures one job (JSON of the module's ``Job``) with cold caches
and writes its row. ``python -m benchmarks.worker serve MODULE WORD...`` calls the module's ``serve(answer, WORD...)``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any

Answer = Callable[[str], None]


@contextlib.contextmanager
def cold_caches() -> Iterator[None]:
    """Gives this process empty folders for the caches of Inductor and Triton. Enter it before torch is imported."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
        os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
        os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        yield


def measure(answer: Answer, module: str, words: str, out: str) -> None:
    """Writes the row of ``measure(job, tell)`` to ``out``: of a job that raises, what it told so far, and "error"."""
    with cold_caches():  # before torch is imported
        of = importlib.import_module(f"benchmarks.{module}")
        job = of.Job(**json.loads(words))
        row: dict[str, Any] = job.named

        def tell(found: dict[str, Any]) -> None:
            row.update(found)
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
