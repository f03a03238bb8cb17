# SPDX-License-Identifier: Apache-2.0
"""Packages for a GPU (AOTInductor), with the operators whose kernels run without Python."""

from __future__ import annotations

import pathlib
import shlex
import shutil

import pytest
import torch

from tests.tools import packaged

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("gpu_packages")]
# Fp32 products of the model's own layers are compared with those of another library or order.
TOLERANCE = 1e-3


MODELS = {
    "mHC, E79 and ranges": lambda: packaged.Everything(64, 32, picks=False, recurrent=True),
    "lists and index scores": lambda: packaged.Listed(64, 32, picks=False),
    "chosen keys": lambda: packaged.Listed(64, 32, picks=True),
}


@pytest.fixture(scope="module", params=MODELS)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a folder with a package of a model, whose symbols are bound to its own definitions.

    Loading crashes otherwise where g++ 13 built it: the loader takes templates of std::regex from libtorch. Sizes are
    static where the model calls ``index_topk``, which needs Python with dynamic ones.
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
        packaged.make(folder, MODELS[request.param](), 64, "cuda", dynamic=request.param != "chosen keys")
    return folder


def test_a_process_without_this_package_loads_it(package: pathlib.Path) -> None:
    packaged.run_in_python(package, TOLERANCE)


def test_a_program_in_cpp_runs_it_without_python(package: pathlib.Path) -> None:
    packaged.run_in_cpp(package, "cuda", TOLERANCE)
