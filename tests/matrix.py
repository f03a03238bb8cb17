# SPDX-License-Identifier: Apache-2.0
"""Runs a part of the tests with several Pythons, each of which has a torch of its own; writes a row for each.

``python -m tests.matrix .venv/bin/python /path/to/another/python`` takes some ten minutes a Python on two cores. The row
of a torch that is in ``benchmarks/results/versions.json`` already is replaced. A Python needs the dev extra's test tools,
numpy, setuptools, typer, rich, matplotlib, hypothesis, transformers and accelerate next to torch and Triton, not this
package.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Annotated, Any

import pytest
import typer
from rich.console import Console

from benchmarks import running
from benchmarks.source_hash import ROOT, source_hash
from tests.tools.counting import run

RESULT = ROOT / "benchmarks" / "results" / "versions.json"
TESTS = pathlib.Path(__file__).parent
PARTS = {
    "import": ["test_doctor"],
    "ops": ["test_ops_*", "test_nn*", "test_replay*", "test_checkpoint_policies"],
    "kernels": ["test_interpreter", "test_offline*", "test_post_project", "test_one_read"],
    "code generation": ["test_codegen*", "test_backend", "test_compile_early"],
    "caches": ["test_cache*", "test_process_state"],
    "export": ["test_export*", "test_packages"],
    "routing": ["test_routing_*", "test_laws_*", "test_explain*"],
}
"""The test files of each part."""


def files(part: str) -> list[pathlib.Path]:
    """Returns the test files of a part."""
    return sorted(f for pattern in PARTS[part] for f in TESTS.glob(f"{pattern}.py"))


def here(jobs: int) -> dict[str, Any]:
    """Runs the tests in this Python; returns its row."""
    import torch
    import triton

    from mhc_inductor import doctor

    os.environ["MHC_INDUCTOR_TESTS"] = "commit"
    every = [str(f) for part in PARTS for f in files(part)]
    status, counted = run(jobs, "-m", "not gpu and not whole", "-q", *every)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with status {status!r} before it ran all tests")
    failed = [o for o in counted.others if not o.startswith("skipped")]
    return {
        "torch": torch.__version__.partition("+")[0],
        "triton": triton.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "passed": {part: sum(counted.passed[f.name] for f in files(part)) for part in PARTS},
        "failed": failed,
        "kernels_off": doctor.unloadable(),
        "kernel_sources_sha256": source_hash(),
        "seconds": round(counted.elapsed()),
    }


def _row(python: str, jobs: int) -> dict[str, Any]:
    """Returns what :func:`here` returns in another Python. Its code caches are its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "row.json")
        code = f"import json, tests.matrix as m; json.dump(m.here({jobs}), open({str(out)!r}, 'w'))"
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        paths = os.pathsep.join([str(ROOT), str(TESTS)])
        env = {**os.environ, **caches, "PYTHONPATH": paths}
        subprocess.run([python, "-c", code], cwd=ROOT, env=env, check=True)
        row: dict[str, Any] = json.loads(out.read_text())
        return row


def _number(row: dict[str, Any]) -> list[int]:
    return [int(n) for n in row["torch"].split(".")]


def main(
    pythons: Annotated[list[str], typer.Argument(help="The Pythons.")],
    jobs: Annotated[int, typer.Option(help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[pathlib.Path, typer.Option(help="Where the rows go.")] = RESULT,
) -> None:
    """Run the tests with each Python; exit with 1 if one fails, or kernels are off."""
    rows = {r["torch"]: r for r in json.loads(out.read_text())["rows"]} if out.exists() else {}
    bad = False
    for python in pythons:
        row = _row(python, jobs)
        rows[row["torch"]] = row
        bad |= bool(row["failed"] or row["kernels_off"])
        running.save({"rows": sorted(rows.values(), key=_number)}, out)
        Console().print({k: v for k, v in row.items() if k != "kernel_sources_sha256"})
    raise typer.Exit(bad)


if __name__ == "__main__":
    typer.run(main)
