# SPDX-License-Identifier: Apache-2.0
"""The example with models that have sparse attention, run as a user runs it, at a tiny size on the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.tools import example_modules


@pytest.fixture(scope="module")
def example():
    with example_modules.imported("sparse_models") as module:
        yield module


def tiny(example, **changes):
    return dataclasses.replace(example.DEFAULTS["cpu"], **{"lengths": (32, 64), "rounds": 2, "topk": 8, **changes})


@pytest.mark.parametrize(("model", "training"), [("deepseek_v32", False), ("deepseek_v4", True)])
def test_three_ways_agree(example, tmp_path, capsys, monkeypatch, model, training):
    import matplotlib.pyplot as plt

    # The models' C++ takes minutes to compile. That of routed models is tested elsewhere.
    monkeypatch.setitem(example.BACKENDS, "torch.compile", "aot_eager")
    monkeypatch.setitem(example.BACKENDS, "mhc_inductor", "aot_eager")
    size = tiny(example, lengths=(32, 64) if not training else (32,))
    report, runs = example.compare(model, torch.device("cpu"), size, training, seed=3, out=tmp_path / "lines.png")

    assert [(r.length, r.name) for r in runs] == [
        (length, name) for length in size.lengths for name in ("eager", "torch.compile", "mhc_inductor")
    ]
    for run in runs:
        eager = next(r for r in runs if r.name == "eager" and r.length == run.length)
        assert run.seconds > 0 and run.peak_bytes > 0 and not run.failed
        assert (run.compile_s > 0) == (run.name != "eager")
        assert bool(run.gradients) == training
        assert example.difference(run, eager) < 5e-5
    if not training:
        assert runs[3].peak_bytes > runs[0].peak_bytes, "twice the tokens take more memory"
    assert not report.problems

    picture = plt.imread(tmp_path / "lines.png")
    colors = {tuple(c) for c in picture[::3, ::3, :3].reshape(-1, 3).round(2).tolist()}
    assert picture.shape[1] > 1000 and len(colors) > 20, "an empty canvas"
    said = " ".join(capsys.readouterr().out.split())
    for text in ("routed: ", "x eager", report.totals(), "lines.png"):
        assert text in said


def test_memory_of_a_call_is_measured(example):
    kept = []
    one = example.peak_on_cpu(lambda: kept.append(torch.ones(1 << 20)))
    assert 4 << 20 <= one < 6 << 20


def test_no_memory_is_a_row_without_figures(example, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(example.Call, "seconds", fail)
    run = example.measure("eager", torch.nn.Linear(2, 2), torch.zeros(1, 8, dtype=torch.long), False, 1)
    assert run.failed == "out of memory" and example.difference(run, run) is None
    assert example.table_of([run], "title").row_count == 1


def test_other_gradients_are_an_error(example):
    one, two = example.Run("mhc_inductor", 8), example.Run("eager", 8)
    one.logits = two.logits = torch.ones(3)
    two.gradients = {"w": torch.ones(2)}
    with pytest.raises(RuntimeError, match="'w'"):
        example.difference(one, two)


def test_bad_options_are_named(example):
    import typer

    for wrong, text in (
        ({"model": "gpt"}, "deepseek_v4"),
        ({"device": "mps"}, "cpu or cuda"),
        ({"lengths": "a"}, "whole"),
    ):
        with pytest.raises(typer.BadParameter, match=text):
            example.main(**{"device": "cpu", **wrong})
