# SPDX-License-Identifier: Apache-2.0
"""A process of :class:`benchmarks.processes.Worker`: ``python -m benchmarks.worker MODULE cold|warm``.

A line of stdin is a job, JSON of the module's ``Job``, or null, which only shows that the module is there. The answers
are lines of stdout: what the module's ``measure(job, tell)`` tells, then its row, with "done". The rest that the process
prints goes to stderr. A cold one has empty caches.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def cold_caches() -> Iterator[None]:
    """Gives this process empty folders for the caches of Inductor and Triton. Enter it before torch is imported."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
        os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
        os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        yield


def answer(of: Any, line: str, say: Callable[[str], None]) -> None:
    """Says the row of a job: of one that raises, what it told so far, and "error"."""
    row: dict[str, Any] = {}

    def tell(found: dict[str, Any], **more: bool) -> None:
        row.update(found)
        say(json.dumps(row | more))

    try:
        found = of.measure(of.Job(**job), tell) if (job := json.loads(line)) else {}
    except Exception as e:
        traceback.print_exc()
        found = {"error": f"{type(e).__name__}: {e}"[:2000]}
    tell(found, done=True)


def main(module: str, caches: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with cold_caches() if caches == "cold" else contextlib.nullcontext():
        of = importlib.import_module(f"benchmarks.{module}")
        for line in sys.stdin:
            answer(of, line, lambda text: print(text, file=answers, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
