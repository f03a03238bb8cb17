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
LEAST = {
    "mhc": 100,
    "single_pass": 75,
    "e79": 40,
    "selection": 300,
    "selection_pieces": 24,
    "selection_lists": 300,
    "selection_join": 40,
    "selection_blocks": 22,
    "index": 85,
    "index_backward": 28,
    "index_loss": 90,
    "few": 6,
}
"""The least cases of each file ``test_kernels_NAME.py``; of selection's, the part that conftest.some keeps here."""
KEPT = ("e79", "selection selection_pieces selection_join selection_blocks index_backward few")
"""Files that each commit interprets, those of one process together: they take seconds."""
OTHERS = ("mhc", "single_pass", "selection_lists", "index", "index_loss")
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


def test_every_file_of_kernels_is_interpreted():
    files = {file.stem.removeprefix("test_kernels_") for file in TESTS.glob("test_kernels_*.py")}
    assert files == {*LEAST} == {name for names in (*KEPT, *OTHERS) for name in names.split()}


def test_bf16_dot_is_fixed(tmp_path):
    script = tmp_path / "dot.py"
    script.write_text(BF16_DOT.format(root=str(TESTS.parent)))
    done = _run(str(script))
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU")
@pytest.mark.every_case  # the processes leave out cases of their own
@pytest.mark.timeout(900)  # each takes up to two minutes of one core
@pytest.mark.parametrize(("names",), part([(n,) for n in (*KEPT, *OTHERS)], KEPT.__contains__))
def test_kernels_under_the_interpreter(names):
    files = {name: str(TESTS / f"test_kernels_{name}.py") for name in names.split()}
    # tests/tools/counting.py reads the durations
    done = _run("-m", "pytest", "-p", "no:cacheprovider", "-vv", "--durations=0", "--durations-min=0", *files.values())
    print(done.stdout)
    assert done.returncode == 0, done.stdout.partition("slowest durations")[0][-5000:] + done.stderr[-2000:]
    for name in files:
        passed = len(re.findall(rf"^tests/test_kernels_{name}\.py::.* PASSED", done.stdout, re.MULTILINE))
        assert passed >= (1 if COMMIT else LEAST[name]), name
    assert "skipped" not in done.stdout
