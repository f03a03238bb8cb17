# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels' parity tests in processes with Triton's interpreter, which must be on before triton is imported."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from tests.tools.each_commit import COMMIT
from tests.tools.offline import part

TESTS = pathlib.Path(__file__).parent
KEPT = ("few", "e79", "selection", "selection_pieces", "selection_join", "index_backward")
"""Kernels that each commit interprets: they take seconds."""
BF16_DOT = """
import sys; sys.path.insert(0, {root!r})
import torch, triton, triton.language as tl
from tests.tools.interpreter_fixes import fix_dot
fix_dot()

@triton.jit
def dot(a, b, c, B: tl.constexpr):
    i = tl.arange(0, B)
    ij = i[:, None] * B + i[None, :]
    tl.store(c + ij, tl.dot(tl.load(a + ij), tl.load(b + ij)))

a, b, c = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16(), torch.empty(16, 16)
dot[(1,)](a, b, c, 16)
assert torch.allclose(c, a.float() @ b.float(), atol=1e-5), (c - a.float() @ b.float()).abs().max()
"""


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, cwd=TESTS.parent)


def test_bf16_dot_is_fixed(tmp_path):
    script = tmp_path / "dot.py"
    script.write_text(BF16_DOT.format(root=str(TESTS.parent)))
    done = _run(str(script))
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU")
@pytest.mark.every_case  # the processes leave out cases of their own
@pytest.mark.timeout(900)  # each takes one or two minutes of one core
@pytest.mark.parametrize(
    # of selection's tests, the part that conftest.some keeps for the interpreter
    ("operator", "least"),
    part(
        [
            ("mhc", 100),
            ("few", 6),
            ("single_pass", 75),
            ("e79", 40),
            ("selection", 300),
            ("selection_pieces", 24),
            ("selection_lists", 300),
            ("selection_join", 40),
            ("index", 85),
            ("index_backward", 28),
            ("index_loss", 90),
        ],
        lambda operator, _: operator in KEPT,
    ),
)
def test_kernels_under_the_interpreter(operator, least):
    options = (
        "-p",
        "no:cacheprovider",
        "-vv",
        "--durations=0",
        "--durations-min=0",
    )  # tests/tools/counting.py reads them
    done = _run("-m", "pytest", *options, str(TESTS / f"test_kernels_{operator}.py"))
    print(done.stdout)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout.partition("slowest durations")[0][-5000:] + done.stderr[-2000:]
    assert passed and (COMMIT or int(passed[1]) >= least) and "skipped" not in done.stdout
