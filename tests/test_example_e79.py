# SPDX-License-Identifier: Apache-2.0
"""The E79 example, run as a user runs it, at tiny sizes on the CPU."""

from __future__ import annotations

import re

import pytest

from tests.tools import example_modules


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    with example_modules.imported("e79_bytes") as module:
        yield module


def test_trains_eager_and_compiled_alike(example, tmp_path, capsys):
    import matplotlib.pyplot as plt
    import torch

    import mhc_inductor

    out = tmp_path / "picture.png"
    size = example.Size(steps=24, dim=32, layers=2, batch=8, seq=10, n=8)
    before = mhc_inductor.counters().get("routed e79_scan", 0)
    eager, compiled = example.compare(torch.device("cpu"), size, seed=1, out=out, sample=5)
    assert mhc_inductor.counters()["routed e79_scan"] - before == size.layers, "one graph, a scan for each loop"

    for run in (eager, compiled):
        assert len(run.loss) == len(run.step_s) == size.steps
        assert 5.0 < run.loss[0] < 7.0, "an untrained model knows nothing: about ln 256 = 5.55"
        assert sum(run.loss[-4:]) / 4 < run.loss[0] - 1.0
        assert run.valid[-1][1] < run.valid[0][1] - 1.0
    # fp32 sums in another order, over 24 optimizer steps.
    assert max(abs(a - b) for a, b in zip(eager.loss, compiled.loss, strict=True)) < 2e-3
    assert eager.loss[0] == pytest.approx(compiled.loss[0], abs=1e-5)
    assert plt.imread(out).shape[0] > 400

    said = " ".join(capsys.readouterr().out.split())
    for text in ("E79 language model, eager against compiled", "loops that became a scan: 2, of 10 steps", out.name):
        assert text in said


def test_a_loop_that_stays_a_loop_is_an_error(example, tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(example.training, "compare", lambda *_: [])
    with pytest.raises(RuntimeError, match="no loop became a scan"):
        example.compare(torch.device("cpu"), example.DEFAULTS["cpu"], seed=0, out=tmp_path / "x.png")


def test_the_models_loop_is_the_packages_layer(example):
    """Compares the example's layer, uncompiled, with the package's on the same parameters, in fp64."""
    import torch

    from mhc_inductor.nn import E79Layer

    torch.manual_seed(0)
    layer = example.E79LM(16, 1, 5).double().blocks[0]
    ours = E79Layer(16, 5, conv=4).double()
    ours.load_state_dict(layer.state_dict())
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x), ours(x)[0], atol=1e-12, rtol=1e-12)


def test_bad_options_are_named():
    done = example_modules.run("e79_bytes", "--device", "mps")
    assert done.returncode == 2
    assert "cpu or cuda" in re.sub(r"\s+", " ", done.stderr)
