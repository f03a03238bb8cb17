# SPDX-License-Identifier: Apache-2.0
"""The notebook of the documentation: its stored outputs, that it runs again, and progress bars in a notebook."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.source_hash import ROOT
from mhc_inductor import progress

FILE = ROOT / "docs" / "notebooks" / "first_steps.ipynb"
BARS = """
from mhc_inductor.progress import bars, shown
assert shown()
with bars() as bar:
    task = bar.add_task("counting", total=3, note="begins")
    for i in range(3):
        bar.update(task, advance=1, note=f"at {i}")
"""
SILENT = """
with bars(disable=True) as bar:
    bar.advance(bar.add_task("nothing", total=1))
"""
PATHS = re.compile(r"/(?:home|root|Users|work|tmp|usr|opt|var)/|site-packages|[A-Z]:\\\\")


def read() -> Any:
    return pytest.importorskip("nbformat").read(FILE, as_version=4)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[tuple[str, ...]]:
    return [(out.output_type, out.get("name", ""), *sorted(out.get("data", {}))) for out in cell.outputs]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """Yields a client whose kernel has run the notebook, in the folder that it lies in."""
    nbclient = pytest.importorskip("nbclient")
    notebook = read()
    for cell in code(notebook):
        cell.outputs = []
    made = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FILE.parent)}}
    )
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with made.setup_kernel(env={**os.environ, "PYTHONPATH": paths}):
        for at, cell in enumerate(notebook.cells):
            made.execute_cell(cell, at)
        yield made


def test_the_outputs_are_stored_and_small() -> None:
    assert FILE.stat().st_size < 100 * 1024
    text = FILE.read_text()
    assert not PATHS.search(text), PATHS.findall(text)
    cells = code(read())
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [out for cell in cells for out in cell.outputs]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 2
    assert not [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"]
    said = "".join(out.get("text", "") for out in outputs)
    assert all(part in said for part in ("2 mhc_pre", "1 mhc_post_pre", "1 graph for", "of 11 tensors"))


def test_the_notebook_runs_again_with_the_same_kinds_of_output(client: Any) -> None:
    """Printed are the same lines, but for measured numbers; a cell that fails raises here."""
    stored, again = code(read()), code(client.nb)
    for old, new in zip(stored, again, strict=True):
        assert kinds(new) == kinds(old), new.source
        printed = [
            [re.sub(r"[\d.e+-]+", "0", out.get("text", "")).split() for out in cell.outputs] for cell in (old, new)
        ]
        assert printed[0] == printed[1]


def test_a_bar_in_a_notebook_is_one_table_that_changes_in_place(client: Any) -> None:
    from nbformat.v4 import new_code_cell

    for at, source in enumerate((BARS, SILENT)):
        client.nb.cells.append(new_code_cell(source))
        cell = client.execute_cell(client.nb.cells[-1], len(client.nb.cells) - 1)
        found = [out for out in cell.outputs if "data" in out]
        assert kinds(cell) == ([("display_data", "", "text/html", "text/plain")] if at == 0 else []), cell.outputs
        assert all(word in found[0]["data"]["text/html"] for word in ("counting", "3/3", "at 2")) if at == 0 else True


def test_bars_of_a_file_are_written_once_and_a_note_is_optional() -> None:
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=100)
    with progress.bars(console, width=12) as bar:
        for name in ("one", "two"):
            task = bar.add_task(name, total=4)
            bar.update(task, advance=4, **({"note": "ready"} if name == "two" else {}))
    lines = console.file.getvalue().rstrip().splitlines()
    assert [line.split()[0] for line in lines] == ["one", "two"] and all("4/4" in line for line in lines)
    assert lines[0].startswith(" " * 9 + "one") and "ready" in lines[1] and "ready" not in lines[0]


def test_all_bars_are_made_by_one_function() -> None:
    files = [f for folder in ("mhc_inductor", "examples", "benchmarks") for f in (ROOT / folder).rglob("*.py")]
    assert [f.name for f in files if re.search(r"\b(?:Progress|track|tqdm)\(", f.read_text())] == []
    users = [f.name for f in files if "from mhc_inductor.progress import bars" in f.read_text()]
    assert len(users) == 7, users
