# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 in the example of FSDP2: layers compiled one by one, checkpoints with and without a policy, comparison."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.tools import example_modules

for needed in ("matplotlib", "rich", "transformers", "typer"):
    pytest.importorskip(needed)
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

V4 = ("--model", "deepseek_v4")


@pytest.fixture
def example() -> Iterator[ModuleType]:
    """The example, in a process group of this process alone, which other tests of the process may have made."""
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo", rank=0, world_size=1, init_method="tcp://localhost:0")
    try:
        with example_modules.imported("train_fsdp") as module:
            yield module
    finally:
        if mine:
            dist.destroy_process_group()


def test_two_ranks_compare_eager_torch_compile_and_mhc_inductor(tmp_path: pathlib.Path) -> None:
    """Layers have a checkpoint policy; the graph of each holds its region."""
    figures = tmp_path / "figures.json"
    size = ("--checkpoint", "policy", "--compare", "--steps", "4", "--seq", "16", "--json", str(figures))
    done = example_modules.started("tests.ranks.fsdp_runs", *V4, "--device", "cpu", *size, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tokens a second" in done.stdout and "largest difference from eager" in done.stdout
    found = json.loads(figures.read_text())
    assert (found["ranks"], found["checkpoint"], found["tolerance"], found["equal"]) == (2, "policy", 1e-3, True)
    runs = {run["name"]: run for run in found["runs"]}
    assert [*runs] == ["eager", "torch.compile", "mhc_inductor"]
    for run in runs.values():
        assert len(run["losses"]) == len(run["seconds"]) == 4 and run["tokens_per_second"] > 0
        assert run["losses"] == pytest.approx(runs["eager"]["losses"], rel=1e-5) and run["difference"] < 1e-5
        assert 5.0 < run["losses"][0] < 6.0 and run["losses"][-1] < run["losses"][0]
    assert not runs["torch.compile"]["routed"]
    ops = runs["mhc_inductor"]["routed"]
    assert {
        "routed mhc_pre": 6,
        "routed mhc_post": 6,
        "routed index_topk": 1,
        "routed selection_attention": 3,
        "routed mhc_head": 1,
    }.items() <= ops.items()


def test_checkpoints_keep_less_and_change_no_gradient(example: ModuleType) -> None:
    from sparse_models import peak_on_cpu  # type: ignore[import-not-found]

    v4, size = example.fsdp_v4, example.Size(1, 64, 3, 2, 64)
    mesh, device = example.init_device_mesh("cpu", (1,)), torch.device("cpu")
    inputs, targets = example.batch_of(example.stdlib_text.load().train, size, 0, 0)
    peaks, gradients = list[int](), list[dict[str, torch.Tensor]]()
    for how in v4.Checkpoint:
        model = v4.built(size, 0, device, mesh, None, how)

        def step(model: Any = model) -> None:
            model.zero_grad()
            example.training.loss_of(model, inputs, targets).backward()

        step()
        peaks.append(peak_on_cpu(step))
        named = {n.replace(".layer.", "."): p.grad for n, p in model.named_parameters() if p.grad is not None}
        gradients.append({n: g.full_tensor() for n, g in named.items()})
    nothing, full, policy = peaks
    assert full < policy < 0.8 * nothing
    assert gradients[0].keys() == gradients[1].keys() == gradients[2].keys() and len(gradients[0]) > 60
    for name, want in gradients[0].items():
        for got in gradients[1:]:
            torch.testing.assert_close(got[name], want, rtol=1e-5, atol=1e-7, msg=name)
    # Only what no gradient can reach is frozen.
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.grad is not None
    }


def test_the_policy_keeps_ops_of_the_package_and_every_second_product(example: ModuleType) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

    policy, (forward, again) = (
        example.fsdp_v4.Saved(),
        (SelectiveCheckpointContext(is_recompute=r) for r in (False, True)),
    )
    aten, keep = torch.ops.aten, CheckpointPolicy.MUST_SAVE
    for context in (forward, again):
        assert [policy(context, aten.mm.default) is keep for _ in range(4)] == [True, False, True, False]
        assert policy(context, torch.ops.mhc_inductor.mhc_pre.default) is keep
        assert policy(context, aten.exp.default) is CheckpointPolicy.PREFER_RECOMPUTE


def test_a_v4_resumes(example: ModuleType, tmp_path: pathlib.Path) -> None:
    """Eager, as the compiled model of this example's other test: its checkpoints have states of all that is trained."""
    size, device = example.Size(3, 64, 3, 2, 16), torch.device("cpu")

    def build(*args: Any) -> torch.nn.Module:
        return example.fsdp_v4.built(*args, None, example.fsdp_v4.Checkpoint.full)

    def losses(steps: int, folder: str) -> list[float]:
        at = example.dataclasses.replace(size, steps=steps)
        done = example.train(at, 0, device, tmp_path / folder, 2, tmp_path / "x.png", build, "V4")
        return [round(loss, 12) for loss in done.losses]

    # The rate of a step depends on how many there are: the first run ends after one step of three.
    whole = losses(3, "a")
    assert len(whole) == 3 and (tmp_path / "a" / "step_000002" / ".metadata").exists()
    for file in (tmp_path / "a" / "step_000003").iterdir():
        file.unlink()
    assert losses(3, "a") == whole


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((*V4, "--context-parallel", "2"), "--context-parallel must be 1"),
        (("--checkpoint", "policy"), "--checkpoint policy needs --model deepseek_v4"),
        ((*V4, "--layers", "2"), "--layers must be at least 3"),
        ((*V4, "--seq", "8"), "--seq must be at least 16"),
        ((*V4, "--dim", "96"), "--dim must be a multiple of 64"),
        ((*V4, "--compare", "--steps", "3"), "--steps must be above 3"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import typer
    from typer.testing import CliRunner

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with example_modules.imported("train_fsdp") as module:
        app = typer.Typer()
        app.command()(module.main)
        done = CliRunner().invoke(app, ["--device", "cpu", *options], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and said in re.sub(r"[\s│]+", " ", done.output), done.output
