# SPDX-License-Identifier: Apache-2.0
"""A package for a CPU (AOTInductor): loaded without this package, by Python and by C++, at other sizes.

One package holds the modules and routed formulas of all operators, because each takes a C++ compile.
"""

from __future__ import annotations

import pathlib

import pytest
from torch._inductor.exc import InductorError

from mhc_inductor import versions
from tests.tools import packaged

pytestmark = pytest.mark.xdist_group("packages")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a folder with the package, and the inputs and expected outputs of two sizes."""
    folder = tmp_path_factory.mktemp("package")
    missing = bool(versions.missing())
    if missing:
        # What the doctor says of this torch.
        with pytest.raises(InductorError):
            packaged.make(folder, packaged.Everything(16, 8, picks=True, recurrent=True), 16)
    everything = packaged.Everything(16, 8, picks=True, recurrent=not missing)
    packaged.make(folder, packaged.Together(everything, packaged.Listed(16, 8, picks=False)), 16)
    return folder


def test_a_process_without_this_package_loads_it(package: pathlib.Path) -> None:
    packaged.run_in_python(package)


def test_a_program_in_cpp_runs_it_without_python(package: pathlib.Path) -> None:
    packaged.run_in_cpp(package)


def test_chosen_keys_run_without_this_package(tmp_path: pathlib.Path) -> None:
    """Runs on a CPU what tests/test_gpu_packages.py runs on a GPU; lists of any length are in the package of all."""
    packaged.make(tmp_path, packaged.Listed(16, 8, picks=True), 16, dynamic=False)
    packaged.run_in_python(tmp_path)
    packaged.run_in_cpp(tmp_path)
