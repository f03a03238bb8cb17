# SPDX-License-Identifier: Apache-2.0
"""The example of FSDP2 on one process and on two of torchrun: killed in a step and started again, it loses nothing."""

from __future__ import annotations

import json
import pathlib
import subprocess

import pytest
import torch

from tests.tools import example_modules

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def _started(folder: pathlib.Path, turn: str, ranks: int) -> subprocess.CompletedProcess[str]:
    # What torchrun would say, without its process.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    size = {"steps": 5, "dim": 32, "layers": 1, "batch": 2, "seq": 16}
    killed = {"every": 2, "killed_after": 3}  # the last checkpoint is of step 2
    words = {"folder": str(folder), "turn": turn, "size": size, "device": "cpu", "inductor": False, **killed}
    given = {} if ranks > 1 else alone
    return example_modules.started("benchmarks.multi_gpu.resume", json.dumps(words), ranks=ranks, **given)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.every_case), 2])
def test_killed_and_resumed_has_the_same_losses(tmp_path: pathlib.Path, ranks: int) -> None:
    for name in ("typer", "rich", "matplotlib"):
        pytest.importorskip(name)
    killed = _started(tmp_path, "first", ranks)
    assert killed.returncode != 0 and (tmp_path / f"whole{ranks - 1}.json").exists(), killed.stderr[-3000:]
    saved = sorted(f.name for f in (tmp_path / "cut").iterdir())
    assert saved == ["step_000002"] and not (tmp_path / "resumed0.json").exists()
    # A checkpoint whose writing was cut off has no metadata, and is passed over.
    (tmp_path / "cut" / "step_000004").mkdir()
    done = _started(tmp_path, "again", ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed after step 2" in done.stdout and "tokens a second" in done.stdout
    for rank in range(ranks):
        whole, resumed, graphs = (
            json.loads((tmp_path / f"{name}{rank}.json").read_text()) for name in ("whole", "resumed", "graphs")
        )
        assert len(whole) == 5 and whole == resumed
        assert graphs == [2], "one graph of the attentions' hyper-connections, one of the MLPs'"
    assert len(set(whole)) == 5 and 5.0 < whole[0] < 7.0
    kept = sorted(f.name for f in (tmp_path / "cut").iterdir() if (f / ".metadata").exists())
    assert kept == ["step_000004", "step_000005"]
    example_modules.drawn(tmp_path / "cut.png", 0, 0)


def test_it_says_how_it_is_started(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    monkeypatch.delenv("RANK", raising=False)
    assert "torchrun" in example_modules.refused("train_fsdp", monkeypatch, capsys)
