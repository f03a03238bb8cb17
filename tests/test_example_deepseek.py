# SPDX-License-Identifier: Apache-2.0
"""The example with DeepSeek-V4, run as a user runs it, at a tiny size on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.tools import example_modules


@pytest.fixture(scope="module")
def example():
    with example_modules.imported("deepseek_v4") as module:
        yield module


def test_three_ways_agree(example, tmp_path, capsys, monkeypatch):
    import matplotlib.pyplot as plt

    # The unrouted model's C++ takes as long to compile as everything else, and tests only PyTorch.
    monkeypatch.setitem(example.BACKENDS, "torch.compile", "aot_eager")
    out = tmp_path / "bars.png"
    size = example.Size(
        layers=1, dim=32, heads=2, head_dim=16, experts=2, hidden=16, batch=2, seq=16, rounds=2, vocab=256
    )
    report, runs = example.compare(torch.device("cpu"), size, seed=3, out=out)

    assert sorted(r.op for r in report.routed) == ["mhc_head", "mhc_post", "mhc_post", "mhc_pre", "mhc_pre"]
    assert all("modeling_deepseek_v4.py" in r.source for r in report.routed)
    assert all(miss.ordinary for miss in report.near_misses) and not report.problems
    assert [run.name for run in runs] == ["eager", "torch.compile", "mhc_inductor"]
    eager, *compiled = runs
    assert 4.5 < eager.loss < 7.0, "an untrained model knows nothing: about ln 256 = 5.55"
    assert sum("_hc." in name or "hc_head." in name for name in eager.gradients) == 2 * 3 + 3
    assert all(g.abs().sum() > 0 for name, g in eager.gradients.items() if "_hc." in name)
    for run in runs:
        assert run.forward_s > 0 and run.both_s > 0 and (run.compile_s > 0) == (run is not eager)
    for run in compiled:
        assert all(v < 5e-5 for v in example.agreement(run, eager).values()), example.agreement(run, eager)

    picture = plt.imread(out)
    assert picture.shape[0] > 400 and picture.shape[1] > 1000
    colors = {tuple(c) for c in picture[::3, ::3, :3].reshape(-1, 3).round(2).tolist()}
    assert len(colors) > 20, "an empty canvas"
    said = " ".join(capsys.readouterr().out.split())
    for text in ("mhc_pre", "compile time, both", "gradients, relative", report.totals(), out.name):
        assert text in said


def test_other_gradients_are_an_error(example):
    one, two = example.Run("mhc_inductor"), example.Run("eager")
    one.logits = two.logits = torch.ones(3)
    two.gradients = {"w": torch.ones(2)}
    with pytest.raises(RuntimeError, match="'w'"):
        example.agreement(one, two)


def test_bad_options_are_named(example):
    import typer

    with pytest.raises(typer.BadParameter, match="even"):
        example.main(device="cpu", heads=3)
    with pytest.raises(typer.BadParameter, match="cpu or cuda"):
        example.main(device="mps")
