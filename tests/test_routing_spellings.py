# SPDX-License-Identifier: Apache-2.0
"""Routing finds the mHC formula in every spelling, and nothing that is not mHC.

Each pick is a graph of Dynamo's once, which runs without Inductor; a sample runs through all of
``backend="mhc_inductor"``. What combines picks, and mutants, is recorded without Dynamo (:mod:`tests.tools.traced`) where it
has no modes and no dynamic sizes; :mod:`tests.all_spellings` has Dynamo write all of them.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from typing import Any

import pytest

from tests.formulas.mutations import Mutation, mutants
from tests.formulas.spellings_mhc import AXES, Spelling, singles, spellings
from tests.tools.capture import Captured, difference, eager, evaluate, not_worse, run, through_inductor

TOTAL, SEED = 500, 0
EVERY, PARTS = 5, 10
"""Every EVERY-th random spelling is tested here, in PARTS parts; tests/all_spellings.py tests all of them."""


def _given(s: Spelling) -> tuple[Any, ...]:
    return s.module, s.inputs, list(s.module.named_parameters()), s.settings.mode != "no_grad"


def _check(s: Spelling, got: Captured, plain: Captured) -> None:
    """Asserts that no gradient is missing, and errors against fp64 of at most twice the largest unrouted one.

    Outputs and gradients are measured apart. Those of scalars may be eight times as large: sums may cancel.
    """
    _, inputs, parameters, grad = _given(s)
    exact = Captured(*evaluate(s.module.oracle, inputs, parameters, grad))
    assert got.grads.keys() == plain.grads.keys()
    reached = [k for k, g in plain.grads.items() if g is not None and bool(g.any())]
    three = got, plain, exact
    not_worse(s.name, *(Captured(c.outputs, {}) for c in three), scalars=8)
    not_worse(s.name, *(Captured([], {k: c.grads[k] for k in reached}) for c in three), scalars=8)


def unrouted(s: Spelling, dynamo: bool = True) -> str | None:
    """Returns what is wrong with the routed ops, or None; asserts the numbers."""
    got = run(*_given(s), dynamic=s.settings.dynamic, dynamo=dynamo)
    _check(s, got, eager(*_given(s)))
    if dict(got.ops) == s.ops:
        return _wrong_numbers(s, got)
    reasons = "; ".join([f"{m.op}: {m.reason}" for m in got.report.near_misses] + got.report.problems)
    return f"{s.name}\n    {dict(got.ops)} instead of {s.ops}: {reasons or 'no reason given'}"


def _same(a: Any, b: Any) -> bool:
    return a == b if isinstance(a, str) or isinstance(b, str) else math.isclose(a, b, rel_tol=1e-6)


def _wrong_numbers(s: Spelling, got: Captured) -> str | None:
    """Compares the op's norm_eps, hc_eps, post_mult, post_eps and sinkhorn arguments with the settings."""
    t, used = s.settings, s.settings.iters if s.settings.uses != "h_in+post" else 0
    head = [t.norm_eps, t.hc_eps]
    post = [t.post_mult, t.post_eps, used]
    sinkhorn = [t.sinkhorn_eps, t.form] if used else []
    for op, want in (("mhc_head", head), ("mhc_pre", [*head, *post, *sinkhorn])):
        for node in got.nodes(f"mhc_inductor.{op}."):
            given = list(node.args[5 : 5 + len(want)])
            if not all(map(_same, given, want)):  # rms_norm keeps its eps in fp32
                return f"{s.name}\n    {op} with {given} instead of {want}"
    return None


@pytest.mark.parametrize("part", range(PARTS))
def test_random_spellings_are_routed(part: int) -> None:
    some = itertools.islice(spellings(TOTAL, SEED), EVERY * part, None, EVERY * PARTS)
    missed = [
        m for s in some if (m := unrouted(s, s.settings.dynamic or s.settings.mode in ("autocast", "checkpoint")))
    ]
    assert not missed, "\n".join(missed)


def test_the_committed_counts_are_of_all_random_spellings() -> None:
    """Requires that 99 of 100 are routed with the right numbers, and no mutant is."""
    from tests.all_spellings import COUNTS, RESULT

    found = json.loads(RESULT.read_text())
    assert {kind: found[kind]["checked"] for kind in COUNTS} == COUNTS
    assert found["mhc"]["as_expected"] >= 0.99 * TOTAL
    assert [p for kind in COUNTS if kind != "mhc" for p in found[kind]["problems"]] == []


@functools.cache
def _singles() -> dict[str, list[Spelling]]:
    """Maps each axis to its spellings that no earlier axis has: most axes share the plainest spelling."""
    found: dict[str, list[Spelling]] = {}
    seen = set()
    for axis in (*AXES, "phi"):
        found[axis] = []
        for s in singles(axis):
            what = s.settings, tuple(sorted(s.module.picked.items())), s.module.store
            if what not in seen:
                found[axis].append(s)
            seen.add(what)
    return found


@pytest.mark.parametrize("axis", [*AXES, "phi"])
def test_every_pick_is_routed_alone(axis: str) -> None:
    missed = [m for s in _singles()[axis] if (m := unrouted(s))]
    assert not missed, "\n".join(missed)


def test_every_pick_has_a_spelling() -> None:
    made = {pick for each in _singles().values() for s in each for pick in s.module.picked.items()}
    assert made >= {(axis, name) for axis, table in AXES.items() for name in table}


def test_spellings_differ() -> None:
    """Checks that the generator gives distinct graphs, the same ones each time, and draws every pick."""
    made = list(spellings(TOTAL, SEED))
    assert len({tuple(sorted(s.module.picked.items())) for s in made}) == TOTAL
    assert [s.name for s in made[:20]] == [s.name for s in spellings(20, SEED)]
    drawn = {(axis, name) for s in made for axis, name in s.module.picked.items()}
    assert drawn == {(axis, name) for axis, table in AXES.items() for name in table}


WHOLE_LAYER = pytest.param(50, marks=pytest.mark.every_case)  # trains with both ops, and compiles in a few seconds


@pytest.mark.parametrize("k", [*range(0, 50, 10), WHOLE_LAYER, 60, 70])
def test_through_inductor(k: int) -> None:
    s = next(itertools.islice(spellings(k + 1, seed=1), k, None))
    got = through_inductor(*_given(s), dynamic=s.settings.dynamic)
    # Dynamo compiles a graph again when a dynamic float becomes a constant.
    times = {got.ops[op] / count for op, count in s.ops.items()}
    assert len(times) == 1 and min(times) >= 1 and times == {*map(int, times)}, got.ops
    _check(s, got, eager(*_given(s)))


def _iterations(got: Captured) -> dict[str, int]:
    """Maps each op to the most Sinkhorn iterations that one of its calls holds."""
    calls = {
        op: [n.args[at] for n in got.nodes(f"mhc_inductor.{op}.")] for op, at in (("mhc_pre", 9), ("mhc_sinkhorn", 1))
    }
    return {op: max(map(int, found)) for op, found in calls.items() if found}


MUTANTS = list(mutants())


def test_there_are_enough_mutants() -> None:
    assert len({m.key for m, _, _ in MUTANTS}) >= 60


@pytest.mark.parametrize("axis", sorted({m.axis for m, _, _ in MUTANTS}))
def test_no_mutant_is_routed(axis: str) -> None:
    """Checks that the op the mutation breaks is not routed, and that the mutation changes the function."""
    wrong = [w for m, mutant, whole in MUTANTS if m.axis == axis for w in routed_mutant(m, mutant, whole, False)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", range(PARTS))
def test_no_mutant_is_routed_in_a_second_spelling(part: int) -> None:
    """Tests one in ten; tests/all_spellings.py tests all of them."""
    table = itertools.islice(mutants(OTHER_SPELLING), 10 * part, None, 10 * PARTS)
    wrong = [w for m, mutant, whole in table for w in routed_mutant(m, mutant, whole, False)]
    assert not wrong, "\n".join(wrong)


OTHER_SPELLING = {
    "flatten": "flatten",
    "vector": "upcast_first",
    "norm": "after",
    "product": "matmul",
    "alpha": "unbound",
    "bias": "split",
    "split": "split",
    "logits": "square",
    "collapse": "einsum",
    "expand": "index",
    "mix": "einsum",
    "post": "fp32",
    "total": "unsqueeze",
}


def routed_mutant(m: Mutation, mutant: Spelling, whole: Spelling, dynamo: bool = True) -> list[str]:
    """Returns what is wrong where a mutant is routed as the whole formula, or computes it."""
    got, plain, unchanged = run(*_given(mutant), dynamo=dynamo), eager(*_given(mutant)), eager(*_given(whole))
    wrong = []
    if difference(plain, unchanged) < 1e-3:
        wrong.append("computes the formula after all")
    if (apart := difference(got, plain)) > 1e-4:
        wrong.append(f"routed and unrouted differ by {apart:.3g}")
    most = _iterations(got)
    if m.breaks in got.ops:
        wrong.append(f"{m.breaks} is routed: {[r.detail for r in got.report.routed]}")
    if m.breaks == "sinkhorn" and max(most.values(), default=0) >= m.settings.iters:
        wrong.append(f"all iterations are routed: {most}")
    if m.breaks == "fold" and most.get("mhc_pre", 0) > 0:
        wrong.append(f"the iterations of other logits are routed into mhc_pre: {most}")
    return [f"{mutant.name}: {w}" for w in wrong]


def test_the_formula_of_the_mutants_is_routed() -> None:
    """Checks that the mutants' formulas are routed without the mutation, which the tests of mutants rely on."""
    seen = {(m.settings, tuple(sorted(m.picked.items()))): whole for m, _, whole in MUTANTS}
    missed = [w for whole in seen.values() if (w := _unrouted_whole(whole))]
    assert not missed, "\n".join(missed)


def _unrouted_whole(whole: Spelling) -> str | None:
    got = run(*_given(whole), dynamo=False)
    return None if dict(got.ops) == whole.ops else f"{whole.name}: {dict(got.ops)} instead of {whole.ops}"
