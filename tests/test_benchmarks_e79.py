# SPDX-License-Identifier: Apache-2.0
"""The E79 benchmark: its arithmetic, its loop, its outputs on a CPU, its tables and plots."""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from benchmarks import accuracy, e79, timing
from benchmarks import e79_cases as cases
from mhc_inductor.kernels.e79.plan import plan_e79_scan, plan_e79_scan_backward
from mhc_inductor.kernels.launch import DeviceProps, EagerBuilder
from mhc_inductor.ops.e79 import segment_length
from tests.oracles.e79 import oracle
from tests.tools import toy_runs

pytestmark = pytest.mark.xdist_group("benchmarks_e79")  # one worker makes the run that most tests read
CPU = torch.device("cpu")
run, settings = (functools.partial(f, "e79") for f in (toy_runs.run, toy_runs.settings))


@pytest.fixture
def result() -> dict[str, Any]:
    return toy_runs.whole("e79")


# ---- targets and the formula


class Counting(EagerBuilder):
    """Allocates meta tensors, launches nothing, and counts bytes."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"), DeviceProps(132, "cuda", 90))
        self.bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = super().empty(shape, dtype)
        self.bytes += made.numel() * made.element_size()
        return made

    def launch(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("bias", ["fixed", "input"])
@pytest.mark.parametrize(("n", "batch", "steps"), [cases.MEMORY_SHAPE, (128, 32, 512), (48, 4, 4096)])
def test_the_stated_memory_is_what_the_plans_allocate(n: int, batch: int, steps: int, bias: str) -> None:
    segment = segment_length(n, batch, steps)
    case = cases.make_case(n, batch, steps, torch.device("meta"), bias=bias)
    b = Counting()
    out, S, M, *kept = plan_e79_scan(b, *case.arguments(), segment)
    grads = plan_e79_scan_backward(b, torch.empty_like(out), None, None, *case.arguments(), *kept, segment)
    asked = sum(t.numel() * t.element_size() for t in (out, S, M, *grads))
    stated = cases.stated_mb(n, batch, steps, segment, bias == "input")
    # Not in the stated memory: a fixed bias's sums and the state at the chain's end.
    rest = 4 * batch * (n * n + (4 * n if bias == "fixed" else 0)) / 1e6
    assert stated + rest == pytest.approx((b.bytes - asked) / 1e6)
    assert rest < 0.02 * stated
    assert (n, batch, steps) != cases.MEMORY_SHAPE or stated + rest < cases.PEAK_BAR_MB


@pytest.mark.parametrize("bias", cases.BIASES)
def test_the_loop_is_the_formula(bias: str) -> None:
    case = cases.make_case(5, 3, 4, CPU, bias=bias, states=True, ups=cases.OUTPUTS)
    want = oracle(case.inputs, {k: case.ups[k] for k in cases.OUTPUTS})
    got = cases.exact(case, True)
    assert got.keys() == want.keys()
    assert all(accuracy.relative(got[k], want[k]) < 1e-12 for k in want)


def test_ops_match_the_loop_and_mistakes_are_seen() -> None:
    case = cases.make_case(6, 2, 9, CPU, bias="input", states=True, ups=cases.OUTPUTS)
    want, loops = (cases.exact(case, True, d) for d in (torch.float64, torch.float32))
    got = cases.both(cases.eager_scan(), case.leaves())
    assert [k for k, e in cases.compare(got, want, loops).items() if not e["met"]] == []
    got["dkvqm"] = got["dkvqm"] * (1 + 1e-4)
    got["S"] = got["S"].mT.contiguous()
    got["dM0"] = got["dM0"].clone()
    got["dM0"][0, 0, 0] = math.nan
    assert {k for k, e in cases.compare(got, want, loops).items() if not e["met"]} == {"dkvqm", "S", "dM0"}


def test_low_precision_is_held_to_one_rounding() -> None:
    case = cases.make_case(6, 2, 9, CPU, dtype=torch.bfloat16)
    want = cases.exact(case, False)
    got = cases.forward(cases.eager_scan(), case)
    assert got["out"].dtype is torch.bfloat16
    assert all(e["met"] for e in cases.compare(got, want, None).values())
    got["out"] = got["out"] * 1.01
    assert not cases.compare(got, want, None)["out"]["met"]


def test_some_sequences_of_a_case_are_the_same_alone() -> None:
    case = cases.make_case(4, 3, 5, CPU, bias="input", states=True, ups=cases.OUTPUTS)
    whole, part = (cases.exact(c, True) for c in (case, case.sequences([0, 2])))
    for name, t in part.items():
        torch.testing.assert_close(t, cases.picked(name, whole[name], [0, 2]), msg=name)


# ---- a run


def test_what_a_run_holds(result: dict[str, Any]) -> None:
    assert {(r["dtype"], r["bias"]) for r in result["further"]} == {
        ("bfloat16", "fixed"),
        ("float32", "input"),
        ("bfloat16", "input"),
    }
    assert len(result["batch"]) == 2 * len(cases.BATCHES) and {r["T"] for r in result["decode"]} == {1}
    assert all(e["loop"] < 1e-5 for c in result["accuracy"] for e in c["errors"].values())
    assert {r["speedup"] for r in result["cpu"] if r["variant"] == cases.EAGER} == {1.0}


def test_times_are_per_step_of_a_chain() -> None:
    row = {"what": "fwd", "variant": "ops", "n": 64, "B": 1, "T": 1, "dtype": "float32", "bias": "fixed"}
    object.__new__(e79.Run).add_figures(row, timing.Timing([40.0, 60.0]).over(20))
    assert row["median_us"] == 2.5 and "bar_us" not in row


def test_nothing_is_compiled_once_the_budget_is_spent(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path / "x.json", parts=("speed",), compiled=True, budget_s=0.0)
    rows = {(r["what"], r["variant"]): r for r in found["rows"]}
    assert all("budget" in rows[w, "compiled"]["error"] for w in ("fwd", "fb"))
    assert all("median_us" in rows[w, "ops"] for w in ("fwd", "fb"))


def test_rolling_up_is_measured(tmp_path: pathlib.Path) -> None:
    row = run(tmp_path / "x.json", parts=("rollup",), steps=3)["rollup"][0]
    assert (row["n"], row["B"], row["T"]) == (64, 3, 3)
    assert row["routed"] == {"e79_scan": 1}
    assert row["worst_difference"] < 1e-5
    assert 0 < row["pass_s"] < row["compile_s"] and row["nodes"] > 3 * 20


def test_a_chain_carries_the_states() -> None:
    case = cases.make_case(4, 2, 1, CPU, states=True)
    got = cases.chain(cases.eager_scan(), case, e79.DECODE_CHAIN)()
    long = case.map(lambda k, t: t.expand(e79.DECODE_CHAIN, -1, -1) if k == "kvqm" else t)
    want = cases.forward(cases.loop, long)
    torch.testing.assert_close(got[1], want["S"])
    torch.testing.assert_close(got[0], want["out"][-1:])
