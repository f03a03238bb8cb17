# SPDX-License-Identifier: Apache-2.0
"""A seeded sample of the adversarial suite, and tests of the suite itself.

The full run is ``python -m tests.adversarial``.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.source_hash import ROUTING, source_hash
from mhc_inductor.routing.operators.index import operator
from tests import adversarial
from tests.adversarial import DTYPES, RESULT, Case, Outcome, Writer, compared, outcome, random_case, shrunk
from tests.formulas import laws

SEED, EACH = 1, 10  # differs from the full run's seed
SHARE = 0.6


@pytest.mark.parametrize("start", range(0, 50, EACH))
def test_random_programs_give_what_eager_gives(start: int) -> None:
    done = [outcome((number, SEED, False)) for number in range(start, start + EACH)]
    assert not [f"{o.differences}\n{o.source}" for o in done if o.differences]
    assert sum(bool(o.ops) for o in done) >= 0.4 * EACH


def test_programs_hold_every_kind_of_statement() -> None:
    kinds = Counter(k for number in range(400) for k in Writer(number, SEED).write().kinds)
    formulas = ["block", "pre", "post", "head", "sinkhorn", "e79", "sdpa", "attention", "checkpoint"]
    formulas += ["index", "listed", "rank"]
    transforms = ["func.grad", "func.vmap", "func.jvp"]
    effects = ["hook", "write", "named write", "write under no_grad", "detach", "round", "made under no_grad", "scaled"]
    others = ["mode", "alias", "buffer", "graph break"]
    assert not [k for k in [*formulas, *transforms, *effects, *others] if kinds[k] < 3], kinds


def test_a_program_is_the_same_twice_and_prints_as_python() -> None:
    case, _ = random_case(5, SEED)
    again, _ = random_case(5, SEED)
    assert case == again
    names: dict[str, Any] = {}
    exec(compile(str(case), "program", "exec"), names)
    assert callable(names["program"]) and case.dtype in DTYPES


def _planted(gm: torch.fx.GraphModule, route: Any = laws.route) -> Any:
    """Routes the graph, then applies a wrong rewrite: transposes the residual matrix of mhc_post."""
    report = route(gm)
    for node in gm.graph.nodes:
        if node.target is torch.ops.mhc_inductor.mhc_post.default:
            node.args = (*node.args[:4], not node.args[4])
    gm.recompile()
    return report


def test_a_planted_wrong_rewrite_is_found_and_the_program_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ['x0 = p["x"]', "t1 = x0.sin() + 0.1", "x2 = block(x0, p)", "t3 = head(x0, p)", "t4 = t1.view(-1)"]
    case = Case(0, SEED, tuple(lines), ("x2", "t3", "t4"))
    assert not compared(case, ["train"])[3]
    monkeypatch.setattr(laws, "route", _planted)
    assert compared(case, ["train"])[3]
    small = shrunk(case, ["train"])
    assert small.statements == ('x0 = p["x"]', "x2 = block(x0, p)") and small.returned == ("x2",)


def test_a_choice_that_is_read_by_rank_after_a_break_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("t1 = chosen(p, 4, {})", "torch._dynamo.graph_break()", "t2 = t1[..., 0] * 1")
    case = Case(0, SEED, ('x0 = p["x"]', *lines), ("t2",))
    ops, _, _, found = compared(case, ["no_grad"])
    assert (dict(ops), found) == ({"index_scores": 1}, [])
    monkeypatch.setattr(operator, "ranked_outside", lambda *_: False)
    ops, _, _, found = compared(case, ["no_grad"])
    assert dict(ops) == {"index_topk": 1} and "output 0" in found[0]


def test_a_head_next_to_iterations_that_do_not_fit_fails_no_search() -> None:
    lines = ("t1 = head(p['x'], p)", "t2 = without_grad(t1)", "t3, t4, t5 = pre(p['x'], p)", "t8 = t5.sin() + 0.1")
    case = Case(0, 0, lines, ("t2", "t8"), empty=True, frozen=("mean", "x"), dtensor=True)
    assert compared(case, ["inference"])[3] == []


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def outcome(task: tuple[int, int, bool]) -> Outcome:
        ran.append(task[0])
        return Outcome(task[0], ("mhc",), "fp64", ("train",), Counter(mhc_pre=1), 0, 0, 0, 0.5)

    monkeypatch.setattr(adversarial, "outcome", outcome)
    file, result = tmp_path / "kept", tmp_path / "json"
    adversarial.main(0, 2, 1, True, None, file)
    adversarial.main(0, 4, 1, True, result, file)
    assert ran == [0, 1, 2, 3]
    assert json.loads(result.read_text())["routed_ops"] == {"mhc_pre": 4}
    monkeypatch.setattr(adversarial, "source_hash", lambda folders: "another")
    adversarial.main(0, 1, 1, True, None, file)
    assert ran[4:] == [0], "outcomes of other sources were taken"


def test_the_committed_counts_are_of_a_full_run_of_these_sources() -> None:
    result = json.loads(RESULT.read_text())
    routing = source_hash(folders=ROUTING)
    assert result["routing_sha256"] == routing, "run python -m tests.adversarial --json " + str(RESULT)
    assert result["programs"] >= 3000 and result["differences"] == []
    assert result["with_routed_ops"] >= SHARE * result["programs"]
    ops = ("mhc_pre", "mhc_post", "e79_scan", "selection_attention", "index_topk", "index_scores")
    assert not [op for op in ops if not result["routed_ops"].get(op)], result["routed_ops"]
    assert min(result["runs"][mode] for mode in adversarial.MODES) >= 0.3 * result["programs"]
