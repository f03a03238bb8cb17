# SPDX-License-Identifier: Apache-2.0
"""A seeded part of the random inputs of every op, and whether they would find a mistake.

``python -m tests.properties`` draws 2,000 an op.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import helpers_mhc
import pytest
import torch
from torch import Tensor

from benchmarks.source_hash import source_hash
from mhc_inductor.ops import registry
from tests import properties

CASES = 40
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU's implementations; kernels have parity tests"
)


@pytest.mark.parametrize("name", properties.PROPERTIES)
def test_random_inputs(name: str) -> None:
    count = properties.run(name, CASES, derandomize=True)
    assert count.cases >= CASES and count.spoiled["refused"] > CASES // 2


def test_the_command_runs_from_the_checkout_alone(tmp_path: pathlib.Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    out = tmp_path / "counts.json"
    command = ["-m", "tests.properties", "--only", "mhc_collapse", "--cases", "2", "--out", str(out)]
    done = subprocess.run([sys.executable, *command], cwd=properties.ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(out.read_text())["ops"]["mhc_collapse"]["cases"] >= 2


def test_another_orientation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = helpers_mhc.oracle_post
    monkeypatch.setattr(helpers_mhc, "oracle_post", lambda made, transpose, up=None: oracle(made, not transpose, up))
    with pytest.raises(AssertionError, match="above"):
        properties.run("mhc_post", CASES, derandomize=True)


def test_a_fake_function_that_takes_more_than_the_op_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    op = properties.op

    def lenient(name: str) -> Any:
        def call(*args: Any) -> Any:
            meta = any(isinstance(a, Tensor) and a.is_meta for a in args)
            return args[0] if meta else op(name)(*args)

        return call

    monkeypatch.setattr(properties, "op", lenient)
    with pytest.raises(AssertionError, match="of its fake function"):
        properties.alike_when_spoiled("mhc_collapse", [torch.zeros(2, 4, 16), torch.zeros(2, 4)], 1)


def test_every_op_of_a_forward_has_properties_and_a_committed_count() -> None:
    forward = {name for name in registry.REFERENCE if not name.endswith("_backward")}
    assert forward == properties.PROPERTIES.keys()
    counted = json.loads(properties.RESULT.read_text())
    assert counted["sources_sha256"] == source_hash(folders=properties.FOLDERS), "run python -m tests.properties"
    assert counted["ops"].keys() == properties.PROPERTIES.keys()
    assert all(count["cases"] >= 2000 for count in counted["ops"].values())
