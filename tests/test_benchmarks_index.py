# SPDX-License-Identifier: Apache-2.0
"""The benchmark of index scores: its formula and checks, its outputs on a CPU, its tables."""

from __future__ import annotations

import functools
import pathlib
import types
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from benchmarks import index, timing
from benchmarks import index_cases as cases
from benchmarks.accuracy import relative
from benchmarks.attention import sample_of
from tests.tools import toy_runs

CPU = torch.device("cpu")
# The shapes are tiny, and one worker makes the run that most tests read.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("benchmarks_index")]
TINY = cases.Shape("tiny", 24, 3, 8, 5, (3, 24))
run = functools.partial(toy_runs.run, "index")


@pytest.fixture
def result() -> dict[str, Any]:
    return toy_runs.whole("index")


# ---- the formula


def test_the_bar_of_memory() -> None:
    assert round(cases.MEMORY_BAR_MB, 1) == 1073.7


def test_the_ops_and_the_models_formula_are_the_formula() -> None:
    torch.manual_seed(0)
    case = cases.make_case(TINY, CPU)
    at = sample_of(TINY.tokens, 7, CPU)
    want = cases.exact(case, at)
    assert (want > float("-inf")).sum(-1).tolist() == [s + 1 for s in at.tolist()]
    assert cases.score_error(cases.scores(case)[0, at], want) < 1e-6
    plain = cases.formula(case.q, case.k, case.w, case.scale)
    assert cases.score_error(plain[0, at], want) < 1e-6
    assert cases.wrongly_chosen(cases.chosen(case)[0, at], want, 1e-6) == 0
    given = cases.formula_topk(case.q, case.k, case.w, case.scale, TINY.topk)
    late = at >= TINY.topk  # before, models take keys that are not visible
    assert cases.wrongly_chosen(given[0, at[late]], want[late], 1e-6) == 0


def test_the_loss_is_the_formula() -> None:
    torch.manual_seed(0)
    args = cases.loss_arguments(cases.make_case(TINY, CPU))
    at = sample_of(TINY.tokens, 7, CPU)
    loss, dscores, *grads = cases.trained(args)
    assert relative(loss[0, at], cases.loss_of(args, at, torch.float64)) < 1e-5
    assert [g.shape for g in grads] == [t.shape for t in args[:3]] and dscores.shape == args[3].shape
    assert loss[0, 0] == 0 and bool((loss[0, 1:] > 0).all())  # the first query sees one key


def test_wrong_scores_are_seen() -> None:
    want = torch.tensor([[3.0, 1.0, 2.0, -torch.inf]], dtype=torch.float64)
    assert cases.score_error(want.float(), want) == 0
    assert cases.score_error(want * 1.5, want) == pytest.approx(0.5)
    hidden = torch.tensor([[3.0, 1.0, -torch.inf, -torch.inf]])
    shown = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    for wrong in (hidden, shown):
        assert cases.score_error(wrong, want) != cases.score_error(wrong, want)  # NaN


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
    assert cases.wrongly_chosen(torch.tensor([chosen]), want, 1e-5) == wrong


def test_choices_within_the_tolerance_are_right() -> None:
    want = torch.tensor([[1.0, 1.0 - 1e-7, 0.5]], dtype=torch.float64)
    assert cases.wrongly_chosen(torch.tensor([[1]]), want, 1e-5) == 0
    assert cases.wrongly_chosen(torch.tensor([[1]]), want, 1e-9) == 1
    assert cases.wrongly_chosen(torch.tensor([[0, 1, 2, -1]]), want, 1e-9) == 0


# ---- a run


def test_what_a_run_holds(result: dict[str, Any]) -> None:
    ours = [r for r in result["rows"] if r["variant"] == "ops"]
    assert all("times_compiled" in r for r in ours if r["what"] != cases.LOSS)
    assert [r["name"] for r in ours if r["what"] == cases.LOSS] == ["64 heads"]
    assert len(result["errors"]) == 2 and len(result["determinism"]) == 2


def test_wrong_results_miss_their_bars(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, chosen = cases.scores, cases.chosen
    wrong: dict[str, Any] = {"scores": lambda case: scores(case) * 1.001, "chosen": lambda case: chosen(case) * 0}
    for name, call in wrong.items():
        with monkeypatch.context() as patch:
            patch.setattr(cases, name, call)
            found = run(tmp_path / "x.json", parts=("errors",))
        assert not any(r["met"] for r in found["errors"])


def test_a_wrong_loss_misses_its_bar(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = cases.trained
    monkeypatch.setattr(cases, "trained", lambda args: (trained(args)[0] * 1.001, *trained(args)[1:]))
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
    assert {r["variant"] for r in found["rows"]} == {"ops", cases.TORCH_TOPK}
    assert len(found["skipped"]) == 2
