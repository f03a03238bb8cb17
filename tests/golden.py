# SPDX-License-Identifier: Apache-2.0
"""The golden table: which ops each test's formulas become.

``tests/golden.txt`` has a line for each test of routing: its name and, for every run of the pass in it that found
something, the ops. A redesign of the pass that loses a spelling, a mutant, a model or a mode fails here, also where the
test itself would not see it. ``python -m tests.golden FILE...`` writes the lines of those tests anew; its diff says
what changed.
"""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys
from collections import Counter

import torch

from mhc_inductor import routing
from mhc_inductor.report import Report
from tests.tools.each_commit import ungrouped

TABLE = pathlib.Path(__file__).with_name("golden.txt")
FILES = ("test_routing_", "test_sparse_models", "test_laws_", "test_decoding_families", "test_adversarial")
"""Beginnings of the names of the test files in the table."""
_RANDOM = ("test_routing_bounds", "test_laws_process", "test_routing_plugin")
"""Files whose tests end the pass early or put in operators of their own."""
RECORD = "MHC_INDUCTOR_GOLDEN"
"""Environment variable with the file that tests write their lines to, in place of comparing them."""
_seen: list[str] = []


def watch() -> None:
    """Records what the pass finds from now on."""
    count = routing._count

    def counted(report: Report) -> None:
        ops = Counter([one.op for one in report.routed] + [f"fused {one.op}" for one in report.fused])
        if ops:
            _seen.append(" ".join(f"{op}*{n}" if n > 1 else op for op, n in sorted(ops.items())))
        count(report)

    routing._count = counted


def named(nodeid: str) -> str | None:
    """Returns a test's name in the table, None for a test that is not in it."""
    path, _, case = ungrouped(nodeid).partition("::")
    file = path.rpartition("/")[2]
    return f"{file}::{case}" if file.startswith(FILES) and not file.startswith(_RANDOM) else None


@functools.cache
def read() -> dict[str, str]:
    """Returns the table: the ops of each test. It is not for torch 2.11, whose Dynamo cuts and repeats other graphs."""
    if torch.__version__.startswith("2.11."):
        return {}
    lines = (line.partition("\t") for line in TABLE.read_text().splitlines() if line)
    return {name: ops for name, _, ops in lines}


def start() -> None:
    """Forgets what was seen before."""
    _seen.clear()


def check(name: str) -> str | None:
    """Returns how the ops seen since the last call differ from the table's, None if they do not."""
    got = "; ".join(f"{n} x ({ops})" if n > 1 else ops for ops, n in sorted(Counter(_seen).items())) or "none"
    _seen.clear()
    if RECORD in os.environ:
        with open(os.environ[RECORD], "a") as out:
            out.write(f"{name}\t{got}\n")
        return None
    want = read().get(name)
    return None if want in (None, got) else f"golden table: {want} expected, {got} found"


def main(files: list[str]) -> int:
    """Runs the tests in ``files``, which may have options of pytest among them, and writes their lines.

    Lines of files that run whole are dropped if no test gives them any more.
    """
    made = TABLE.with_suffix(".new")
    made.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", *files]
    failed = subprocess.run(command, env={**os.environ, RECORD: str(made)}).returncode
    fresh = dict(line.split("\t", 1) for line in made.read_text().splitlines())
    whole = not any("::" in f or f.startswith("-") for f in files)
    ran = {name.partition("::")[0] for name in fresh} if whole else set()
    kept = {name: ops for name, ops in read().items() if name.partition("::")[0] not in ran}
    TABLE.write_text("".join(f"{name}\t{ops}\n" for name, ops in sorted({**kept, **fresh}.items())))
    made.unlink()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
