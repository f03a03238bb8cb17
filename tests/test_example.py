# SPDX-License-Identifier: Apache-2.0
"""The main example, run as a user runs it, at tiny sizes on the CPU."""

from __future__ import annotations

import re

import pytest

from tests.tools import example_modules


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    with example_modules.imported("train_bytes") as module:
        yield module


@pytest.mark.every_case
def test_trains_eager_and_compiled_alike(example, tmp_path, capsys):
    import matplotlib.pyplot as plt
    import torch

    out = tmp_path / "picture.png"
    size = example.Size(steps=24, dim=32, layers=1, batch=8, seq=32)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    eager, compiled = example.compare(torch.device("cpu"), size, seed=1, out=out, sample=20)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    assert graphs == 1, "training and validation share one compiled graph, and eager has none"

    for run in (eager, compiled):
        assert len(run.loss) == len(run.step_s) == size.steps
        assert 5.0 < run.loss[0] < 7.0, "an untrained model knows nothing: about ln 256 = 5.55"
        assert sum(run.loss[-4:]) / 4 < run.loss[0] - 1.5
        assert run.valid[-1][1] < run.valid[0][1] - 1.5
        assert run.tokens_per_s == pytest.approx(size.batch * size.seq / run.median_s)
    # fp32 sums in another order, over 24 optimizer steps.
    assert max(abs(a - b) for a, b in zip(eager.loss, compiled.loss, strict=True)) < 2e-3
    assert eager.loss[0] == pytest.approx(compiled.loss[0], abs=1e-5)

    picture = plt.imread(out)
    assert picture.shape[0] > 400 and picture.shape[1] > 800
    colors = {tuple(c) for c in picture[::3, ::3, :3].reshape(-1, 3).round(2).tolist()}
    assert len(colors) > 20, "an empty canvas"

    said = " ".join(capsys.readouterr().out.split())
    for text in (
        "validation bits a byte",
        "tokens a second",
        "largest difference",
        "sampled from",
        str(out.name),
    ):
        assert text in said


def test_split_by_file_and_batches(example):
    import torch

    text = example.training.stdlib_text
    corpus = text.load()
    assert len(corpus.train) > 10 * len(corpus.valid) > 10 * 2**16
    assert bytes(corpus.valid[:4096].tolist()) not in bytes(corpus.train.tolist())
    first, again = (list(text.batches(corpus.train, 3, 16, 4, seed=5)) for _ in range(2))
    for (a, b), (c, d) in zip(first, again, strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)
        assert torch.equal(a[:, 1:], b[:, :-1]), "targets are the inputs, one byte on"
    assert not torch.equal(first[0][0], first[1][0])


def test_bad_options_are_named(example):
    typer = pytest.importorskip("typer")
    with pytest.raises(typer.BadParameter, match="multiple of 32"):
        example.main(device="cpu", dim=50)
    done = example_modules.run("train_bytes", "--device", "mps")
    assert done.returncode == 2
    assert "cpu or cuda" in re.sub(r"\s+", " ", done.stderr)
