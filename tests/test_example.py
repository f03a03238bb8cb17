# SPDX-License-Identifier: Apache-2.0
"""The examples on one device, run as a user runs them, at tiny sizes on the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import mhc_inductor
from tests.tools import example_modules

train_bytes, e79_bytes, sparse_models = map(example_modules.fixture, ("train_bytes", "e79_bytes", "sparse_models"))
CPU = torch.device("cpu")
drawn, printed = example_modules.drawn, example_modules.printed


def learned(runs, size, by):
    """Checks that both runs, eager and compiled, learnt alike: their losses fell by more than ``by``."""
    for run in runs:
        assert len(run.loss) == len(run.step_s) == size.steps
        assert 5.0 < run.loss[0] < 7.0, "an untrained model knows nothing: about ln 256 = 5.55"
        assert sum(run.loss[-4:]) / 4 < run.loss[0] - by
        assert run.valid[-1][1] < run.valid[0][1] - by
    eager, compiled = runs
    # fp32 sums in another order, over 24 optimizer steps.
    assert max(abs(a - b) for a, b in zip(eager.loss, compiled.loss, strict=True)) < 2e-3
    assert eager.loss[0] == pytest.approx(compiled.loss[0], abs=1e-5)


# --- train_bytes ----------------------------------------------------------------------------------------------


@pytest.mark.every_case
def test_trains_eager_and_compiled_alike(train_bytes, tmp_path, capsys):
    out = tmp_path / "picture.png"
    size = train_bytes.Size(steps=24, dim=32, layers=1, batch=8, seq=32)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    runs = train_bytes.compare(CPU, size, seed=1, out=out, sample=20)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    assert graphs == 1, "training and validation share one compiled graph, and eager has none"
    learned(runs, size, 1.5)
    for run in runs:
        assert run.tokens_per_s == pytest.approx(size.batch * size.seq / run.median_s)
    drawn(out, 400, 800)
    words = ("validation bits a byte", "tokens a second", "largest difference", "sampled from", out.name)
    printed(capsys, *words)


def test_split_by_file_and_batches(train_bytes):
    text = train_bytes.training.stdlib_text
    corpus = text.load()
    assert len(corpus.train) > 10 * len(corpus.valid) > 10 * 2**16
    assert bytes(corpus.valid[:4096].tolist()) not in bytes(corpus.train.tolist())
    first, again = (list(text.batches(corpus.train, 3, 16, 4, seed=5)) for _ in range(2))
    for (a, b), (c, d) in zip(first, again, strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)
        assert torch.equal(a[:, 1:], b[:, :-1]), "targets are the inputs, one byte on"
    assert not torch.equal(first[0][0], first[1][0])


# --- e79_bytes ------------------------------------------------------------------------------------------------


def test_e79_trains_eager_and_compiled_alike(e79_bytes, tmp_path, capsys):
    out = tmp_path / "picture.png"
    size = e79_bytes.Size(steps=24, dim=32, layers=2, batch=8, seq=10, n=8)
    before = mhc_inductor.counters().get("routed e79_scan", 0)
    runs = e79_bytes.compare(CPU, size, seed=1, out=out, sample=5)
    assert mhc_inductor.counters()["routed e79_scan"] - before == size.layers, "one graph, a scan for each loop"
    learned(runs, size, 1.0)
    drawn(out, 400, 0)
    printed(capsys, "E79 language model, eager against compiled", "loops that became a scan: 2, of 10 steps", out.name)


def test_a_loop_that_stays_a_loop_is_an_error(e79_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(e79_bytes.training, "compare", lambda *_: [])
    with pytest.raises(RuntimeError, match="no loop became a scan"):
        e79_bytes.compare(CPU, e79_bytes.DEFAULTS["cpu"], seed=0, out=tmp_path / "x.png")


def test_the_models_loop_is_the_packages_layer(e79_bytes):
    """Compares the example's layer, uncompiled, with the package's on the same parameters, in fp64."""
    torch.manual_seed(0)
    layer = e79_bytes.E79LM(16, 1, 5).double().blocks[0]
    ours = mhc_inductor.nn.E79Layer(16, 5, conv=4).double()
    ours.load_state_dict(layer.state_dict())
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x), ours(x)[0], atol=1e-12, rtol=1e-12)


# --- sparse_models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "training"), [("deepseek_v32", False), ("deepseek_v4", True)])
def test_three_ways_of_sparse_models_agree(sparse_models, tmp_path, capsys, monkeypatch, model, training):
    # The models' C++ takes minutes to compile. That of routed models is tested elsewhere.
    monkeypatch.setitem(sparse_models.BACKENDS, "torch.compile", "eager")
    monkeypatch.setitem(sparse_models.BACKENDS, "mhc_inductor", "aot_eager")
    monkeypatch.setitem(sparse_models.MODELS, model, example_modules.with_fewer_iterations(sparse_models.MODELS[model]))
    lengths = (32,) if training else (32, 64)
    size = dataclasses.replace(sparse_models.DEFAULTS["cpu"], lengths=lengths, rounds=2, topk=8)
    report, runs = sparse_models.compare(model, CPU, size, training, seed=3, out=tmp_path / "lines.png")

    ways = ("eager", "torch.compile", "mhc_inductor")
    assert [(r.length, r.name) for r in runs] == [(length, name) for length in lengths for name in ways]
    for run in runs:
        eager = next(r for r in runs if r.name == "eager" and r.length == run.length)
        assert run.seconds > 0 and run.peak_bytes > 0 and not run.failed
        assert (run.compile_s > 0) == (run.name != "eager")
        assert bool(run.gradients) == training
        assert sparse_models.difference(run, eager) < 5e-5
    if not training:
        assert runs[3].peak_bytes > runs[0].peak_bytes, "twice the tokens take more memory"
    mhc = [r for r in report.routed if r.op.startswith("mhc_")]
    assert all(f"modeling_{model}.py" in r.source for r in mhc) and not report.problems
    drawn(tmp_path / "lines.png", 0, 1000)
    formulas = 13 if model == "deepseek_v4" else 0
    printed(capsys, "routed: ", f"{formulas} mHC formulas", "x eager", report.totals(), "lines.png")


def test_memory_of_a_call_is_measured(sparse_models):
    kept = []
    one = sparse_models.peak_on_cpu(lambda: kept.append(torch.ones(1 << 20)))
    assert 4 << 20 <= one < 6 << 20


def test_no_memory_is_a_row_without_figures(sparse_models, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(sparse_models.Call, "seconds", fail)
    run = sparse_models.measure("eager", torch.nn.Linear(2, 2), torch.zeros(1, 8, dtype=torch.long), False, 1)
    assert run.failed == "out of memory" and sparse_models.difference(run, run) is None
    assert sparse_models.table_of([run], "title").row_count == 1


# --- errors ---------------------------------------------------------------------------------------------------


def test_other_gradients_are_an_error(sparse_models):
    one, two = sparse_models.Run("mhc_inductor", 8), sparse_models.Run("eager", 8)
    one.logits = two.logits = torch.ones(3)
    two.gradients = {"w": torch.ones(2)}
    with pytest.raises(RuntimeError, match="'w'"):
        sparse_models.difference(one, two)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("train_bytes", {"dim": 50}, "multiple of 32"),
        ("sparse_models", {"model": "gpt"}, "deepseek_v4"),
        ("sparse_models", {"device": "mps"}, "cpu or cuda"),
        ("sparse_models", {"lengths": "a"}, "whole"),
    ],
)
def test_bad_options_are_named(name, options, said):
    typer = pytest.importorskip("typer")
    with example_modules.imported(name) as example, pytest.raises(typer.BadParameter, match=said):
        example.main(**{"device": "cpu", **options})


@pytest.mark.parametrize("name", ["train_bytes", "e79_bytes", "needle"])
def test_a_script_ends_with_2_for_another_device(name, monkeypatch, capsys):
    assert "cpu or cuda" in example_modules.refused(name, monkeypatch, capsys, "--device", "mps")
