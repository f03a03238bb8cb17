# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel in every case for every target, and runs all their tests in Triton's interpreter.

The tests of each commit compile the most common cases and interpret a part. ``python -m tests.all_offline`` takes ten minutes
on two cores, and writes the committed counts of the Triton that it runs with. ``tests/test_results.py`` checks that those
of CI's Triton are of this tree's kernels.
"""

from __future__ import annotations

import json
import os
import pathlib
import platform
import tempfile
from typing import Annotated, Any

import triton
import typer
from rich.console import Console

from benchmarks import running
from benchmarks.source_hash import ROOT, source_hash
from tests.tools.counting import run
from tests.tools.offline import RECORD, TABLE, TRITON

TESTS = pathlib.Path(__file__).parent
RESULT = ROOT / "benchmarks" / "results" / "offline.json"
PARTLY = ["test_one_read.py", "test_post_project.py"]
"""Files of which only some tests compile offline: those whose names end in "spills"."""
FILES = [*sorted(f.name for f in TESTS.glob("test_offline*.py")), "test_contraction.py", *PARTLY]
INTERPRETED = "test_interpreter.py"


def digest() -> str:
    """Returns the hash of what is compiled here: the kernels and their launch plans."""
    return source_hash(folders=("kernels",))


def write_table(noted: str) -> None:
    """Puts what was noted into the table, as this Triton's column. A row a kernel, target and case."""
    table = json.loads(TABLE.read_text())
    rows: dict[str, dict[str, list[str]]] = table["kernels"]
    for row in rows.values():
        row.pop(TRITON, None)
    for key, used in sorted({tuple(json.loads(line)) for line in noted.splitlines()}):
        rows.setdefault(key, {}).setdefault(TRITON, []).append(used)
    lines = (f"  {json.dumps(k)}: {json.dumps(dict(sorted(row.items())))}" for k, row in sorted(rows.items()) if row)
    versions = json.dumps(sorted({*table["versions"], TRITON}))
    TABLE.write_text(f'{{"versions": {versions}, "kernels": {{\n' + ",\n".join(lines) + "\n}}\n")


def main(
    jobs: Annotated[int, typer.Option(help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[pathlib.Path, typer.Option(help="Where the counts go.")] = RESULT,
    record: Annotated[bool, typer.Option(help="Write this Triton's column of tests/compiled.json.")] = False,
) -> None:
    """Compile every case for every target; exit with 1 if one fails, uses what its table does not have, or is skipped."""
    os.environ["MHC_INDUCTOR_TESTS"] = "whole"
    others = " and ".join(f"not {pathlib.Path(f).stem}" for f in PARTLY)
    with tempfile.NamedTemporaryFile() as noted:
        if record:
            os.environ[RECORD] = noted.name
        code, counted = run(jobs, "-k", f"({others}) or spills", *(str(TESTS / f) for f in (*FILES, INTERPRETED)))
        compiled = noted.read().decode()
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    result[TRITON] = {
        "kernels_sha256": digest(),
        "versions": {"triton": triton.__version__, "python": platform.python_version()},
        "passed": dict(sorted(counted.passed.items())),
        "others": counted.others,
    }
    Console().print(f"{counted.passed.total()} passed, {counted.elapsed():.0f} s")
    running.save(dict(sorted(result.items())), out)
    if code or counted.others or counted.passed.keys() != {*FILES, INTERPRETED}:
        raise typer.Exit(1)
    if record:
        write_table(compiled)


if __name__ == "__main__":
    typer.run(main)
