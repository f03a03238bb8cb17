# SPDX-License-Identifier: Apache-2.0
"""A seeded part of the random inputs of every op and public function, and whether they would find a mistake.

``python -m tests.properties`` draws 2,000 of each.
"""

from __future__ import annotations

import json
import os
import pathlib
import pkgutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import mhc_inductor
from benchmarks.source_hash import source_hash
from mhc_inductor.ops import registry
from tests import properties, properties_public
from tests.oracles import mhc as helpers_mhc

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


@pytest.mark.parametrize("name", properties_public.PROPERTIES)
def test_random_calls_of_public_functions(name: str) -> None:
    count = properties.run(name, CASES, derandomize=True, properties=properties_public.PROPERTIES)
    assert count.cases >= CASES and count.public["refused"] > CASES // 3


@pytest.mark.parametrize(
    ("raised", "found"),
    [
        (ValueError("f: size must be at least 1"), None),
        (ValueError("does not fit"), AssertionError),
        (RuntimeError("f: size must be at least 1"), RuntimeError),
        (AttributeError("f: size must be at least 1"), AttributeError),
    ],
)
def test_a_refusal_that_does_not_name_the_argument_is_found(raised: Exception, found: type[Exception] | None) -> None:
    def refuse(size: int) -> None:
        raise raised

    call = properties.Call(refuse, {"size": 3})
    if found is None:
        assert properties.refused_by_name(call, seed=0) == "refused"
        return
    with pytest.raises(found, match=str(raised)):
        properties.refused_by_name(call, seed=0)


@pytest.mark.parametrize(
    ("name", "at", "change"),
    [
        (
            "nn.HyperConnection",
            "mhc.mhc_post",
            lambda of: lambda *a, transpose_res: of(*a, transpose_res=not transpose_res),
        ),
        ("nn.E79Layer", "e79.E79Layer._convolve", lambda of: lambda self, h, tail: of(self, h, None)),
        ("nn.NativeSparseAttention", "sparse._rotate", lambda of: lambda t, position, base: of(t, position, 2 * base)),
        ("nn.SparseIndexer", "indexer.index_topk", lambda of: lambda *a, limit, **k: of(*a, limit=None, **k)),
        ("nn.SelectionAttention", "selection.selection_attention", lambda of: lambda *a, sink, **k: of(*a, **k)),
    ],
)
def test_a_mistake_of_a_module_is_found(name: str, at: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another orientation, a forgotten tail of a convolution, other frequencies, no causality, no sink."""
    where = f"mhc_inductor.nn.{at}"
    monkeypatch.setattr(where, change(pkgutil.resolve_name(where)))
    with pytest.raises(AssertionError):
        properties.run(name, CASES, derandomize=True, properties=properties_public.PROPERTIES, smallest=False)


def test_every_op_of_a_forward_and_every_public_function_has_properties_and_a_committed_count() -> None:
    forward = {name for name in registry.REFERENCE if not name.endswith("_backward")}
    assert forward == properties.PROPERTIES.keys()
    public = {*mhc_inductor.__all__, *(f"nn.{name}" for name in mhc_inductor.nn.__all__)}
    drawn = {name for name in properties_public.PROPERTIES if name != "nn.SparseIndexer.loss"}
    of_an_op = forward & public
    assert drawn - {"selection_attention"} | of_an_op | properties_public.WITHOUT.keys() == public
    assert not properties_public.WITHOUT.keys() & (drawn | of_an_op)
    counted = json.loads(properties.RESULT.read_text())
    for key, folders in (("sources_sha256", properties.FOLDERS), ("public_sha256", properties.PUBLIC_FOLDERS)):
        assert counted[key] == source_hash(folders=folders), "run python -m tests.properties"
    assert counted["ops"].keys() == properties.PROPERTIES.keys()
    assert counted["public"].keys() == properties_public.PROPERTIES.keys()
    for count in (*counted["ops"].values(), *counted["public"].values()):
        assert count["cases"] >= 2000
    assert all(counted["ops"][name]["public, refused"] > 1000 for name in of_an_op)
