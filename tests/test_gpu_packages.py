# SPDX-License-Identifier: Apache-2.0
"""A package for a GPU (AOTInductor), with the operators whose kernels run without Python."""

from __future__ import annotations

import pathlib
import shlex
import shutil

import packaged
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("gpu_packages")]
# Fp32 products of the model's own layers are compared with those of another library or order.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a folder with a package whose symbols are bound to its own definitions.

    Loading crashes otherwise where g++ 13 built it: the loader takes templates of std::regex from libtorch.
    """
    folder = tmp_path_factory.mktemp("package")
    linker = folder / "g++"
    compiler = shlex.quote(shutil.which("g++") or "g++")
    linker.write_text(f"""#!/bin/sh
for a in "$@"; do [ "$a" != -shared ] || exec {compiler} "$@" -Wl,-Bsymbolic; done
exec {compiler} "$@"
""")
    linker.chmod(0o755)
    with torch._inductor.config.patch({"cpp.cxx": (str(linker),)}):
        packaged.make(folder, width=64, head=32, picks=False, device="cuda")
    return folder


def test_a_process_without_this_package_loads_it(package: pathlib.Path) -> None:
    packaged.run_in_python(package, TOLERANCE)


def test_a_program_in_cpp_runs_it_without_python(package: pathlib.Path) -> None:
    packaged.run_in_cpp(package, "cuda", TOLERANCE)
