# SPDX-License-Identifier: Apache-2.0
"""The benchmark of index scores: its formula and checks, its outputs on a CPU, its tables."""

from __future__ import annotations

import copy
import json
import pathlib
import types
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from benchmarks import __main__ as cli
from benchmarks import index, index_cases, index_targets, pages, running, timing
from tests import test_results
from tests.tools.toy_runs import unlike

CPU = torch.device("cpu")
# The shapes are tiny, and one worker makes the run that most tests read.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("benchmarks_index")]
TINY = index_targets.Shape("tiny", 24, 3, 8, 5, (3, 24))


def run(path: pathlib.Path, **changes: Any) -> dict[str, Any]:
    settings = index.Settings(**{"device": "cpu", "rounds": 4, "seed": 4, **changes})
    index.Run(settings, lambda r: running.save(r, path), lambda _: None).run()
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def result(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("index") / "index.json")


@pytest.fixture
def on_h200(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the run as it would look on an H200 at the published shapes, made by the run's own row code."""
    made = copy.deepcopy(result)
    made["device"], made["notice"] = {"type": "cuda", "name": "NVIDIA H200"}, None
    runner = object.__new__(index.Run)
    runner.gpu, runner.result, runner.s = True, made, index.Settings()
    made["rows"] = []
    for (name, what), target in index_targets.TARGETS.items():
        shape = next(s for s in index_targets.SHAPES if s.name == name)
        for variant, us in (("ops", 0.9 * target.bar), (index_targets.COMPILE, 45000)):
            row: dict[str, Any] = {"name": name, "tokens": 8192, "heads": 64, "dim": 128, "topk": 2048}
            row |= {"what": what, "variant": variant}
            runner.add_figures(shape, row, timing.Timing([us] * 4))
            made["rows"].append(row)
    runner.compare("64 heads")
    row = {"name": "long", "tokens": 131072, "heads": 64, "peak_above_mb": 600.0, "outputs_mb": 1.0, "met_bar": True}
    made["memory"] = [{**row, "seconds": 0.5, "bar_mb": 1073.7, "goal_mb": 536.9, "met_goal": False}]
    return made


# ---- the formula


def test_targets_are_in_order() -> None:
    assert all(t.goal < t.bar for t in index_targets.TARGETS.values())
    assert round(index_targets.MEMORY_BAR_MB, 1) == 1073.7


def test_the_ops_and_the_models_formula_are_the_formula() -> None:
    torch.manual_seed(0)
    case = index_cases.make_case(TINY, CPU)
    at = index_cases.sample_of(TINY.tokens, 7, CPU)
    want = index_cases.exact(case, at)
    assert (want > float("-inf")).sum(-1).tolist() == [s + 1 for s in at.tolist()]
    assert index_cases.score_error(index_cases.scores(case)[0, at], want) < 1e-6
    plain = index_cases.formula(case.q, case.k, case.w, case.scale)
    assert index_cases.score_error(plain[0, at], want) < 1e-6
    assert index_cases.wrongly_chosen(index_cases.chosen(case)[0, at], want, 1e-6) == 0
    given = index_cases.formula_topk(case.q, case.k, case.w, case.scale, TINY.topk)
    late = at >= TINY.topk  # before, models take keys that are not visible
    assert index_cases.wrongly_chosen(given[0, at[late]], want[late], 1e-6) == 0


def test_the_loss_is_the_formula() -> None:
    torch.manual_seed(0)
    args = index_cases.loss_arguments(index_cases.make_case(TINY, CPU))
    at = index_cases.sample_of(TINY.tokens, 7, CPU)
    loss, dscores, *grads = index_cases.trained(args)
    assert index_cases.relative(loss[0, at], index_cases.loss_of(args, at, torch.float64)) < 1e-5
    assert [g.shape for g in grads] == [t.shape for t in args[:3]] and dscores.shape == args[3].shape
    assert loss[0, 0] == 0 and bool((loss[0, 1:] > 0).all())  # the first query sees one key


def test_wrong_scores_are_seen() -> None:
    want = torch.tensor([[3.0, 1.0, 2.0, -torch.inf]], dtype=torch.float64)
    assert index_cases.score_error(want.float(), want) == 0
    assert index_cases.score_error(want * 1.5, want) == pytest.approx(0.5)
    hidden = torch.tensor([[3.0, 1.0, -torch.inf, -torch.inf]])
    shown = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    for wrong in (hidden, shown):
        assert index_cases.score_error(wrong, want) != index_cases.score_error(wrong, want)  # NaN


@pytest.mark.parametrize(
    ("chosen", "wrong"),
    [
        ([0, 2], 0),
        ([2, 0], 0),
        ([0, 1], 1),  # key 2 is better
        ([0, 0], 2),  # a repeat, and a key too few
        ([0, -1], 1),  # a key too few
        ([0, 3], 1),  # not visible
    ],
)
def test_wrong_choices_are_counted(chosen: list[int], wrong: int) -> None:
    want = torch.tensor([[3.0, 1.0, 2.0, -torch.inf]], dtype=torch.float64)
    assert index_cases.wrongly_chosen(torch.tensor([chosen]), want, 1e-5) == wrong


def test_choices_within_the_tolerance_are_right() -> None:
    want = torch.tensor([[1.0, 1.0 - 1e-7, 0.5]], dtype=torch.float64)
    assert index_cases.wrongly_chosen(torch.tensor([[1]]), want, 1e-5) == 0
    assert index_cases.wrongly_chosen(torch.tensor([[1]]), want, 1e-9) == 1
    assert index_cases.wrongly_chosen(torch.tensor([[0, 1, 2, -1]]), want, 1e-9) == 0


# ---- a run


def test_a_run_has_every_part(result: dict[str, Any]) -> None:
    assert result["complete"] and result["operator"] == "index" and result["notice"] == running.CPU_NOTICE
    assert set(result["skipped"]) == {"memory"}
    rows = {(r["name"], r["what"], r["variant"]) for r in result["rows"]}
    for shape in index_targets.SHAPES:
        for what in (index_targets.SCORES, index_targets.BOTH):
            assert {(shape.name, what, "ops"), (shape.name, what, index_targets.COMPILE)} <= rows
        assert (shape.name, "top-k", index_targets.TORCH_TOPK) in rows
    assert [r for r in result["rows"] if "error" in r] == []
    ours = [r for r in result["rows"] if r["variant"] == "ops"]
    assert all("times_compiled" in r for r in ours if r["what"] != index_targets.LOSS)
    assert [r["name"] for r in ours if r["what"] == index_targets.LOSS] == ["64 heads"]
    assert all("beyond_scores_us" in r for r in ours if r["what"] == index_targets.BOTH)
    assert len(result["errors"]) == 2 and all(r["met"] for r in result["errors"])
    assert len(result["determinism"]) == 2 and all(d["met"] for d in result["determinism"])


def test_wrong_results_miss_their_bars(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, chosen = index_cases.scores, index_cases.chosen
    wrong: dict[str, Any] = {"scores": lambda case: scores(case) * 1.001, "chosen": lambda case: chosen(case) * 0}
    for name, call in wrong.items():
        with monkeypatch.context() as patch:
            patch.setattr(index_cases, name, call)
            found = run(tmp_path / "x.json", parts=("errors",))
        assert not any(r["met"] for r in found["errors"])


def test_a_wrong_loss_misses_its_bar(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = index_cases.trained
    monkeypatch.setattr(index_cases, "trained", lambda args: (trained(args)[0] * 1.001, *trained(args)[1:]))
    found = run(tmp_path / "x.json", parts=("errors",))
    assert [r["met"] for r in found["errors"]] == [False, True]


def test_elements_that_a_call_leaves_out_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    for outputs in ((torch.zeros(2, dtype=torch.int32), torch.zeros(2)), torch.zeros(2, dtype=torch.int64)):
        ready = timing.Runnable(lambda found=outputs: found, CPU)  # type: ignore[misc]
        assert index.written(ready.outputs)
        ready.graph = types.SimpleNamespace(replay=lambda: None)  # type: ignore[assignment]
        assert not index.written(ready.run_poisoned())


def test_a_spent_budget_leaves_peers_out(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path / "x.json", parts=("speed",), budget_s=0.0)
    assert not found["complete"]
    assert {r["variant"] for r in found["rows"]} == {"ops", index_targets.TORCH_TOPK}
    assert len(found["skipped"]) == 2


def test_a_run_has_the_fields_of_the_committed_result(result: dict[str, Any]) -> None:
    assert unlike(result, "index", "memory") == {}


def test_memory_of_a_gpu(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        running, "peak_memory", lambda call, *_: {"peak_above_mb": 600.0 + 0 * len(call()), "met_bar": True}
    )
    runner = index.Run(index.Settings(device="cpu", seed=4), lambda _: None, lambda _: None)
    runner.gpu = True
    runner.part("memory")
    names = [r["name"] for r in runner.result["memory"]]
    assert names == ["64 heads", "131072 tokens", "64 heads, loss with gradients"] and not runner.result["skipped"]
    assert not any(r["met_goal"] for r in runner.result["memory"])


# ---- tables


def test_tables_are_whole(result: dict[str, Any], on_h200: dict[str, Any]) -> None:
    for made in (result, on_h200):
        for block in index.table(made).split("\n\n"):
            if block.startswith("|"):
                assert len({line.count("|") for line in block.splitlines()}) == 1
    assert running.CPU_NOTICE in index.table(result) and "skipped: memory: " in index.table(result)


def test_table_of_an_h200_run_marks_every_bar(on_h200: dict[str, Any]) -> None:
    made = [[c.strip() for c in line.split("|")[1:-1]] for line in index.table(on_h200).splitlines()]
    line = next(x for x in made if x[4:6] == ["scores and top-k", "mhc_inductor, ops"])
    assert line[6] == "1.44 ms" and line[9:13] == ["1.6 ms", "1.1 ms", "met", "31.25"]
    assert line[13] == "675 µs beyond the scores alone"
    line = next(x for x in made if x[4:6] == ["scores", "mhc_inductor, ops"])
    assert line[8] == "719" and line[9:12] == ["850 µs", "750 µs", "met"]
    line = next(x for x in made if x[:1] == ["long"])
    assert line[3:7] == ["600", "1074", "537", "met"]


# ---- the command line


def test_command_line(tmp_path: pathlib.Path) -> None:
    words = ["--quick", "--device", "cpu", "--rounds", "4", "--out", str(tmp_path)]
    done = CliRunner().invoke(cli.app, ["index", *words])
    assert done.exit_code == 0, done.output
    path = tmp_path / "index-cpu-partial.json"  # a partial run never gets the file name of a full run
    stored = json.loads(path.read_text())
    assert {r["variant"] for r in stored["rows"]} == {"ops", index_targets.TORCH_TOPK}
    assert path.with_suffix(".md").read_text() == index.table(stored)
    shown = CliRunner().invoke(cli.app, ["table", str(path)])
    assert shown.output == index.table(stored)


# ---- the pages


def test_the_pages_block(on_h200: dict[str, Any]) -> None:
    block = pages.BLOCKS["index"](lambda name: on_h200)
    assert "| 64 heads | scores and top-k | 1.44 | 45 |" in block
    assert "At S = T = 131072 a choice takes 600 MB." in block


def test_the_committed_bars_are_checked(on_h200: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Checks that a run's file passes the check of committed results, whatever its rows are called."""
    running.save(on_h200, tmp_path / "index.json")
    assert test_results.unmet(tmp_path) == []
