# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the rule's figures: both sides compute one attention, and a run on a CPU writes its table."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from benchmarks import __main__ as cli
from benchmarks import pages, rule
from benchmarks.lists_cases import mask_of

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_both_sides_are_one_attention() -> None:
    torch.manual_seed(0)
    layer = rule.SMALL[0]
    leaves = {k: t.detach().float().requires_grad_() for k, t in layer.leaves(CPU).items()}
    indices = layer.indices(CPU)
    seen = indices >= 0
    at = torch.arange(layer.tokens)
    assert bool((indices[seen] <= at[None, :, None].expand_as(indices)[seen]).all()), "a query sees later keys"
    assert torch.equal(seen.sum(-1)[0], (at + 1).clamp(max=layer.selected))
    sides = (layer.dense(leaves, mask_of(indices, layer.tokens)[:, None]), layer.lists(leaves, indices))
    grad = torch.randn_like(sides[0])
    for a, b in zip(*([o, *torch.autograd.grad(o, list(leaves.values()), grad)] for o in sides), strict=True):
        assert float((a - b).norm() / a.norm()) < 1e-5


def test_a_run_writes_its_rows_and_its_table(tmp_path: pathlib.Path) -> None:
    done = CliRunner().invoke(cli.app, ["rule", "--device", "cpu", "--rounds", "4", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads((tmp_path / "rule-cpu.json").read_text())
    assert found["complete"] and not found["skipped"] and all(r["finite"] for r in found["rows"])
    assert {(r["variant"], r["what"]) for r in found["rows"]} == {
        *((side, what) for side in (rule.DENSE, "ops", rule.PRODUCTS, rule.WRITTEN) for what in ("fwd", "fb")),
        ("torch", "product"),
    }
    table = (tmp_path / "rule-cpu.md").read_text()
    assert "not representative" in table and table.count("softmax written out") == 2
    kept = json.loads((pages.RESULTS / "rule.json").read_text())
    assert kept["complete"] and not kept["settings"]["small"] and max(r.get("differ", 0) for r in kept["rows"]) < 0.01
