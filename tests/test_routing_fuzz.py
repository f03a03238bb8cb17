# SPDX-License-Identifier: Apache-2.0
"""A seeded sample of the fuzz test: routing changes no result. The full run is ``python -m tests.fuzz_routing``."""

from __future__ import annotations

import pytest

from tests.fuzz_routing import MODELS, RESULT, compare, model_case, random_case

SEED = 1  # differs from the full run's seed


@pytest.mark.parametrize("start", range(0, 20, 5))
def test_random_modules_give_the_same_with_and_without_routing(start: int) -> None:
    outcomes = [compare(random_case(i, SEED)) for i in range(start, start + 5)]
    assert not [f"{o.name}: {o.problem}" for o in outcomes if o.problem]
    assert all(o.compiles_without for o in outcomes)
    formulas = [o for o in outcomes if o.kind == "formula"]
    assert sum(bool(o.ops) for o in formulas) >= 0.6 * len(formulas)
    assert not any(o.ops for o in outcomes if o.kind == "plain" and "balanced" not in o.name)


@pytest.mark.parametrize("number", [15, 116, 254])
def test_modules_of_the_full_run_that_once_met_a_failure_of_the_pass(number: int) -> None:
    # A sum of scalars next to streams, and sizes that new nodes read from tensors of a formula.
    assert compare(random_case(number, 0)).problem == ""


@pytest.mark.parametrize("name", ["llama", "bert", "gpt_oss", "t5"])
def test_small_models_give_the_same_with_and_without_routing(name: str) -> None:
    outcome = compare(model_case(name))
    assert outcome.compiles_without and not outcome.problem, outcome.problem
    assert not outcome.ops


def test_one_random_module_through_inductor() -> None:
    outcome = compare(random_case(0, SEED), inductor=True)
    assert outcome.compiles_without and not outcome.problem, outcome.problem


def test_the_committed_counts_are_of_a_full_run_without_problems() -> None:
    import json

    result = json.loads(RESULT.read_text())
    assert result["by_kind"]["transformers"] >= 30 and len(result["models"]) == len(MODELS)
    assert sum(k for kind, k in result["by_kind"].items() if kind != "transformers") >= 500
    assert result["problems"] == []
    assert result["fail_without_routing"] <= 0.02 * result["compiled"]
    assert all(result["with_routed_ops"][kind] > 0 for kind in ("formula", "both"))
