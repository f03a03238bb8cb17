# SPDX-License-Identifier: Apache-2.0
"""The layers of the package: every import, those inside functions too, goes to a lower layer."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks import imports

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_no_import_goes_upwards_or_sideways() -> None:
    """So there is no circle between two places either."""
    assert [str(i) for i in imports.upward(ROOT)] == []


def test_all_imports_are_seen() -> None:
    found = {(i.module, i.imported) for i in imports.imports(ROOT)}
    assert ("mhc_inductor.ops.selection", "kernels.cpu.selection") in found  # a package that lies elsewhere
    assert ("kernels.cpu.selection", "kernels.cpu.selection_core") in found  # relative
    assert ("mhc_inductor.backend", "lowerings.common") in found  # in a function
    assert ("mhc_inductor.doctor", "mhc_inductor.backend") in found  # by name
    assert len(found) > 500


@pytest.mark.parametrize(
    ("file", "code", "places"),
    [
        ("mhc_inductor/reference/mhc.py", "from mhc_inductor.ops import checks", "reference -> ops"),
        ("mhc_inductor/ops/mhc.py", "def f():\n    from mhc_inductor import backend", "ops -> backend"),
        (
            "kernels/mhc/plan.py",
            "def f():\n    import mhc_inductor.kernels.mhc, mhc_inductor.ops.mhc",
            "kernels -> ops",
        ),
        ("mhc_inductor/ops/mhc.py", "importlib.import_module('mhc_inductor.lowerings.mhc')", "ops -> lowerings"),
        ("lowerings/mhc.py", "from mhc_inductor.api import mhc", "lowerings -> api"),
    ],
)
def test_an_upward_import_is_found(tmp_path: pathlib.Path, file: str, code: str, places: str) -> None:
    files = ["mhc_inductor/ops/checks.py", "mhc_inductor/ops/mhc.py", "mhc_inductor/backend.py", "lowerings/mhc.py"]
    for name in (*files, "mhc_inductor/api/mhc.py", "kernels/mhc/plan.py", "kernels/mhc/__init__.py", file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code if name == file else "")
    assert [str(i).rpartition(": ")[2] for i in imports.upward(tmp_path)] == [places]


def test_a_module_without_a_layer_is_named() -> None:
    with pytest.raises(KeyError, match=r"mhc_inductor\.novel\.part is in no layer"):
        imports.place("mhc_inductor.novel.part")
