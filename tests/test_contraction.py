# SPDX-License-Identifier: Apache-2.0
"""Kernels that must give the same bits leave the compilers no choice: contraction changes none of their instructions."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest
import torch
import triton
from conftest import INTERPRETED
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler.compiler import make_backend

from mhc_inductor.kernels import COMPILED
from mhc_inductor.kernels.launch import EagerBuilder
from mhc_inductor.kernels.mhc import gluon
from tests.tools import offline
from tests.tools.offline import TARGETS, part, source, split_options

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiling and interpreting exclude each other")


def recorded(op, tokens, norm_form="inside"):
    launches = offline.mhc(op, tokens, 2560, "gamma", sinkhorn_iters=3, norm_form=norm_form)
    return {launch[0].__name__: launch for launch in launches}


def ptx(launch, fusion: bool) -> str:
    """Returns a kernel's PTX without debug information; ``fusion`` allows the compiler to contract."""
    kernel, args, constexprs, num_warps, num_stages = launch
    constants, others = split_options(kernel, constexprs)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fusion, **others}
    code = triton.compile(source(kernel, args, constants), target=TARGETS["cuda:90"][0], options=options).asm["ptx"]
    lines = [line for line in code.splitlines() if not line.strip().startswith((".loc", "//", ".file", ".section"))]
    return "\n".join(lines[: lines.index("}") + 1])


def chosen(code: str) -> str:
    """Returns PTX in which instructions that may be contracted look like those that may not."""
    return re.sub(r"\b(mul|add|sub)\.rn\.f32", r"\1.f32", code)


def machine_code(code: str, folder: pathlib.Path) -> str:
    """Returns the instructions that the assembler makes of PTX."""
    # A reciprocal ends with a product by a power of two, which is exact: to add it in the same step changes no bit.
    ones = set(re.findall(r"mov\.b32\s+(%\w+), 0f3F800000;", code))
    code = re.sub(
        r"div\.full\.f32(\s+%\w+), (%\w+|0f3F800000), (%\w+);",
        lambda m: f"rcp.approx.ftz.f32{m[1]}, {m[3]};" if m[2] in ones | {"0f3F800000"} else m[0], code,
    )  # fmt: skip
    (folder / "k.ptx").write_text(code)
    subprocess.run([get_ptxas(90).path, "--gpu-name=sm_90a", "k.ptx", "-o", "k.cubin"], cwd=folder, check=True)
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-sass", folder / "k.cubin"]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return "\n".join(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", sass, re.MULTILINE))


@pytest.mark.parametrize(
    ("op", "tokens", "norm_form", "kernels"),
    part([
        ("post", 64, "inside", {"mhc_post"}),
        ("post_pre", 64, "inside", {"mhc_post_project_few", "mhc_blocks_collapse"}),
        ("post_pre", 8192, "inside", {"mhc_post_project", "mhc_slices_collapse"}),
        ("single_pass", 64, "inside", {"mhc_post_project_few", "mhc_blocks_coefficients"}),
        ("single_pass", 8192, "inside", {"mhc_post_project", "mhc_coefficients"}),
        ("pre", 8192, "inside", {"mhc_pre_weights"}),
        ("pre", 64, "inside", {"mhc_pre_collapse"}),
        ("post_pre", 64, "outside", {"mhc_blocks_collapse"}),
        ("post_pre", 8192, "outside", {"mhc_slices_collapse"}),
        ("single_pass", 64, "outside", {"mhc_blocks_coefficients"}),
        ("single_pass", 8192, "outside", {"mhc_coefficients"}),
        ("pre", 64, "outside", {"mhc_pre_collapse"}),
    ], lambda op, tokens, norm_form, kernels: op == "post_pre" and norm_form == "inside"),
    ids=lambda v: "" if isinstance(v, set) else str(v),
)  # fmt: skip
def test_contraction_changes_no_instruction(op, tokens, norm_form, kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(gluon, "ONE_READ_PRE", range(0))
    launches = recorded(op, tokens, norm_form)
    assert kernels <= set(launches)
    for name in kernels:
        free, fixed = (ptx(launches[name], fusion) for fusion in (True, False))
        assert chosen(free) == chosen(fixed), name
        assert machine_code(free, tmp_path) == machine_code(fixed, tmp_path), name


def test_a_row_of_four_threads_is_summed_as_the_reader_of_blocks_does():
    """The training kernel's only exchange between threads, whose order ``blocks.py`` repeats: (0 + 2) + (1 + 3)."""
    code = ptx(recorded("post_pre", 8192)["mhc_post_project"], True)
    assert re.findall(r"shfl\.sync\.bfly\.b32\s+%\w+, %\w+, (\d+),", code) == ["2", "1", "2", "1"]


@pytest.mark.parametrize("target", TARGETS)
def test_fp_fusion_does_not_depend_on_triton_s_default(target):
    backend = make_backend(TARGETS[target][0])
    with triton.knobs.language.scope():
        for default in (True, False):
            triton.knobs.language.default_fp_fusion = default
            assert backend.parse_options(dict(COMPILED)).enable_fp_fusion


def test_eager_launches_ask_for_fp_fusion():
    asked = []
    kernel = {(2,): lambda **given: asked.append(given)}
    EagerBuilder(torch.device("cpu")).launch(kernel, (2,), {"x": 1}, {"B": 2}, 4, 3)
    assert asked == [{"x": 1, "B": 2, "num_warps": 4, "num_stages": 3, **COMPILED}]
