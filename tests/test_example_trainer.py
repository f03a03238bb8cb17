# SPDX-License-Identifier: Apache-2.0
"""The examples of the Trainer and of Accelerate: losses equal eager's, and those of a run that nothing ended."""

from __future__ import annotations

import json
import pathlib
import shutil
import signal
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.tools import example_modules
from tests.tools.trainer_runs import SIZES

for needed in ("accelerate", "matplotlib", "rich", "transformers", "typer"):
    pytest.importorskip(needed)

LAYERS = {"routed mhc_post": 2, "routed mhc_pre": 2}
"""Ops of one layer."""
ALL = {"routed mhc_head": 1, **LAYERS}
SEPARATE = {**ALL, "routed selection_attention": 1}
"""Ops of layers that are compiled one by one: each is given its mask."""


@pytest.fixture
def new_state() -> Iterator[None]:
    """Forgets the precision and the backend that accelerate keeps for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    forget()
    yield
    forget()


def example(name: str) -> Any:
    """Returns a fixture of the imported script, whose models are quicker to compile."""

    @pytest.fixture
    def module(new_state: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
        with example_modules.imported(name) as found:
            monkeypatch.setattr(found, "build", example_modules.with_fewer_iterations(found.build))
            yield found

    return module


trainer, accelerated = map(example, ("train_trainer", "train_accelerate"))


def test_the_trainer_compiles_with_inductor_in_bf16(trainer: ModuleType, tmp_path: pathlib.Path) -> None:
    """Inductor keeps numbers in fp32 that eager rounds to bf16: losses differ by less than an eighth of a rounding to bf16."""
    plan = trainer.Plan(tmp_path, **SIZES)
    eager = trainer.train(plan, None)
    before = trainer.mhc_inductor.counters()
    compiled = trainer.train(plan, trainer.Way.trainer)
    ops = trainer.routed(before)
    assert {name: count for name, count in ops.items() if name.startswith("routed ")} == ALL
    assert trainer.compare(eager, compiled, ops) < 5e-4
    assert len({*eager}) == 4 and 5.0 < eager[3] < eager[0] < 6.0
    # A run that was stopped after its first checkpoint goes on: it loads weights, optimizer, schedule and data order.
    shutil.rmtree(tmp_path / "trainer" / "checkpoint-4")
    assert trainer.train(plan, trainer.Way.trainer) == compiled


def test_a_killed_trainer_resumes(
    trainer: ModuleType, tmp_path: pathlib.Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = example_modules.started("tests.tools.trainer_runs", "trainer", str(tmp_path))
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert [f.name for f in (tmp_path / "trainer").iterdir()] == ["checkpoint-2"]
    (tmp_path / "trainer" / "checkpoint-4").mkdir()  # as if the next one had been cut off: it has no trainer_state.json
    sizes = {"steps": 4, "every": 2, "seq": 16, "dim": 32, "folder": tmp_path, "device": "cpu"}
    trainer.main(way=trainer.Way.trainer, **sizes)
    said = capsys.readouterr().out
    assert "eager: started" in said and "trainer: resumed from checkpoint-2" in said
    assert "relative difference of 4 losses: 0.0e+00" in said and "routed mhc_pre 2" in said
    assert (tmp_path / "trainer" / "checkpoint-4" / "trainer_state.json").exists()
    # The model may compile itself; what is complete is not trained again.
    trainer.main(way=trainer.Way.model, **sizes)
    said = capsys.readouterr().out
    assert "eager: complete" in said and "model: started" in said
    assert "relative difference of 4 losses: 0.0e+00" in said and "routed mhc_pre 2" in said


@pytest.mark.parametrize("way", ["accelerate", "model"])
def test_accelerate_on_one_process(
    accelerated: ModuleType, tmp_path: pathlib.Path, quick: None, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    sizes = {"steps": 2, "every": 2, "seq": 16, "dim": 32, "folder": tmp_path, "device": "cpu"}
    accelerated.main(way=accelerated.Way(way), **sizes)
    said = capsys.readouterr().out
    assert "relative difference of 2 losses: 0.0e+00" in said
    assert "ops: " + ", ".join(f"{name} {count}" for name, count in SEPARATE.items()) in said


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_accelerate_shards_layers_that_are_compiled_one_by_one(tmp_path: pathlib.Path) -> None:
    done = example_modules.started("tests.tools.trainer_runs", "accelerate", str(tmp_path), ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"found{rank}.json").read_text())
        assert found["kinds"] == ["DTensor"], "sharded"
        assert {"model.layers.0", "model.hc_head"} <= {*found["compiled"]} and "" not in found["compiled"]
        assert found["eager"]["ops"] == {} and found["whole"]["ops"] == SEPARATE
        assert found["kept"] == ["step_000002"]
        eager = found["eager"]["losses"]
        assert len({*eager}) == 4 and 5.0 < eager[3] < eager[0] < 6.0
        assert found["whole"]["losses"] == pytest.approx(eager, rel=1e-6)
        assert found["cut"]["losses"] == found["whole"]["losses"]


def test_bad_options_are_named(trainer: ModuleType) -> None:
    import typer

    with pytest.raises(typer.BadParameter, match="multiple of 32, got 48"):
        trainer.main(device="cpu", dim=48)
    with pytest.raises(typer.BadParameter, match="cpu or cuda, got 'mps'"):
        trainer.main(device="mps")
