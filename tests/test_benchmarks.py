# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of mHC, E79 and index scores: arithmetic, formulas, outputs on a CPU, crashes; two Tritons."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import pathlib
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from benchmarks import (
    accuracy,
    e79,
    e79_cases,
    environment,
    index,
    index_cases,
    mhc,
    mhc_calls,
    running,
    timing,
    tritons,
)
from benchmarks import mhc_cases as cases
from benchmarks.accuracy import relative
from benchmarks.attention import sample_of
from mhc_inductor.kernels.e79.plan import plan_e79_scan, plan_e79_scan_backward
from mhc_inductor.kernels.launch import DeviceProps, EagerBuilder
from mhc_inductor.ops.e79 import segment_length
from tests.oracles.e79 import oracle
from tests.tools import toy_runs

# The shapes are tiny, and one worker makes the runs that most tests read.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("benchmarks")]
CPU = torch.device("cpu")
TOKENS, DIM = 12, 48
TINY = index_cases.Shape("tiny", 24, 3, 8, 5, (3, 24))
FUSED = ("post_pre", "post_pre_fb", "single_pass", "single_pass_fb")
run = functools.partial(toy_runs.run, "mhc")


# ---- targets


def test_every_target_is_above_its_floor() -> None:
    for (what, dim), t in cases.TARGETS.items():
        assert cases.floor_us(what, cases.TOKENS, dim) < t.goal
        assert (t.best_peer is None) == (what in FUSED)


def test_phi_counts_at_a_few_tokens() -> None:
    with_phi = cases.floor_bytes("pre", 1, 4096, phi=True)
    assert with_phi == 5 * 4096 * 2 + 24 * 4 * 4096 * 4
    assert cases.floor_bytes("post", 1, 4096, phi=True) == 9 * 4096 * 2


# ---- timing


def test_variants_run_in_turn_and_every_sample_is_kept() -> None:
    calls: list[str] = []
    ready = {name: timing.Runnable(lambda name=name: calls.append(name), CPU) for name in "ab"}
    calls.clear()
    times = timing.interleaved(ready, CPU, timing.flusher(CPU), rounds=4, warm_rounds=2)
    assert calls == ["a", "b"] * 6
    assert all(len(t.samples_us) == 4 for t in times.values())


def test_median_and_quartiles() -> None:
    t = timing.Timing([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (t.median, t.quartiles) == (3.0, (1.5, 4.5))
    assert t.as_json()["samples_us"] == [5.0, 1.0, 2.0, 3.0, 4.0]


def test_a_chain_is_divided_by_its_calls() -> None:
    row = {"floor_us": 1.0, "variant": "ops", "bar_us": 3.0, "goal_us": 2.0, "best_peer_us": None}
    found = mhc._figures(row, timing.Timing([40.0, 60.0]).over(20), True)
    assert (found["median_us"], found["met_bar"], found["met_goal"]) == (2.5, True, False)
    assert mhc._figures(row, timing.Timing([math.nan]), True)["met_bar"] is False
    calls: list[int] = []
    timing.chain(lambda: calls.append(1), 20)()
    assert len(calls) == 20


class FakeCuda:
    """Replaces torch.cuda: logs the order of calls; replaying a graph writes to ``out``, if it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.out: torch.Tensor | None = None

        def logs(word: str) -> Any:
            return lambda *_, **__: contextlib.nullcontext(self.log.append(word))

        def replay() -> None:
            self.log.append("replay")
            if self.out is not None:
                self.out.fill_(7.0)

        def event(enable_timing: bool) -> Any:
            at: list[int] = []
            record = lambda: (self.log.append("event"), at.append(len(self.log)))  # noqa: E731
            return types.SimpleNamespace(at=at, record=record, elapsed_time=lambda end: float(end.at[0] - at[0]))

        stream = types.SimpleNamespace(wait_stream=logs("wait"))
        graph = types.SimpleNamespace(replay=replay, reset=logs("reset"))
        made = {"graph": logs("capture"), "stream": logs("side"), "synchronize": logs("sync"), "Event": event}
        made |= {"CUDAGraph": lambda: graph, "Stream": lambda *_: stream, "current_stream": lambda *_: stream}
        for name, call in made.items():
            monkeypatch.setattr(torch.cuda, name, call)


def test_graphs_are_captured_after_warm_up_and_outputs_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)

    def fn() -> tuple[torch.Tensor, torch.Tensor]:
        cuda.log.append("call")
        return torch.ones(2), torch.ones(2)

    r = timing.Runnable(fn, torch.device("cuda", 0))
    assert cuda.log == [*["wait", "side", "call", "call", "call", "wait", "sync", "capture", "call", "replay", "sync"]]
    cuda.out = r.outputs[0]
    written, forgotten = r.run_poisoned()
    assert written.tolist() == [7.0, 7.0]
    assert forgotten.isnan().all()


def test_the_flush_is_outside_the_timed_events(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    device = torch.device("cuda", 0)
    ready = {name: timing.Runnable(lambda: torch.ones(1), device) for name in "ab"}
    cuda.log.clear()
    times = timing.interleaved(ready, device, lambda: cuda.log.append("flush"), rounds=3, warm_rounds=1)
    # Flushes before a round let the host get ahead of the device; two before each call keep it ahead.
    lead = ["flush"] * timing._LEAD
    assert cuda.log == (lead + ["flush", "flush", "event", "replay", "event"] * 2 + ["sync"]) * 4
    assert times["a"].samples_us == [2000.0] * 3  # elapsed_time returns milliseconds


# ---- correctness of the compared variants ------------------------------------------------------------------


def test_reference_in_chunks_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    i = cases.make_inputs((7,), 4, DIM, CPU)
    whole = cases.reference(i)
    monkeypatch.setattr(cases, "CHUNK", 3)
    for name, value in cases.reference(i).items():
        assert relative(value, whole[name]) < 1e-13, name


@pytest.mark.parametrize("npu", [False, True])
def test_ops_and_public_functions_match_fp64(npu: bool) -> None:
    i = cases.make_inputs((TOKENS,), 4, DIM, CPU, npu=npu, transpose_res=True)
    exact = cases.reference(i)
    leaves = i.detached()
    for t in leaves.leaves():
        t.requires_grad_()
    for got in (mhc_calls.ops_fb(i), mhc_calls.autograd_fb()(leaves)):
        errors = cases.compare(got, exact, i.with_post)
        assert {"dx", "dphi", "dalpha", "dbias", "dgamma" if npu else "df"} <= set(errors)
        assert [k for k, e in errors.items() if not e["met"]] == []


def test_a_wrong_or_unwritten_output_is_seen() -> None:
    i = cases.make_inputs((TOKENS,), 4, DIM, CPU)
    exact, got = cases.reference(i), mhc_calls.ops_fb(i)
    got["dphi"] = got["dphi"] * (1 + 1e-4)
    got["dx"] = got["dx"].clone()
    got["dx"][-1, -1, -1] = math.nan
    got["h_in"] = got["h_in"] * 1.01
    errors = cases.compare(got, exact, True)
    assert {k for k, e in errors.items() if not e["met"]} == {"dphi", "dx", "h_in"}


def test_the_written_out_backward_is_autograds() -> None:
    i = cases.make_inputs((3, 5), 4, DIM, CPU, npu=True, record=True)
    exact = cases.reference(i)
    for name, value in cases.parameter_gradients(i, exact, torch.float64).items():
        assert relative(value, exact[name]) < 1e-12, name


def test_equal_bits_see_the_last_bit_and_nan() -> None:
    a = torch.tensor([1.0, math.nan])
    assert accuracy.same_bits(a, a.clone())
    assert not accuracy.same_bits(a, torch.tensor([1.0 + 2**-23, math.nan]))
    assert not accuracy.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


# ---- a run


def test_what_a_run_holds_beyond_its_rows() -> None:
    result = toy_runs.whole("mhc")
    assert len(result["accuracy"]) == 4 and result["determinism"] and result["copy"]["tb_per_s"] > 0
    assert result["settings"]["float32_matmul_precision"] == "highest"


def test_json_has_words_for_nan() -> None:
    assert running.cleaned({"a": [math.nan, 1.0, (math.inf,)]}) == {"a": ["nan", 1.0, ["inf"]]}


def test_commit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHC_COMMIT", "abc")
    monkeypatch.setenv("MHC_DIRTY", "1")
    assert environment.commit() == {"commit": "abc", "dirty": True}


def test_a_wrong_gradient_of_the_fused_op_is_seen() -> None:
    i = cases.make_inputs((TOKENS,), 4, DIM, CPU, transpose_res=True)
    p = cases.PostPre.make(i, torch.rand(TOKENS, 4), torch.rand(TOKENS, 4, 4))
    got = mhc_calls.ops_post_pre(p, gradients=True)
    assert [k for k, e in cases.check_fused(p, got).items() if not e["met"]] == []
    got["dh_res"] = got["dh_res"].transpose(-1, -2)
    got["df"] = got["df"] * 1.01
    assert {k for k, e in cases.check_fused(p, got).items() if not e["met"]} == {"dh_res", "df"}


@pytest.mark.parametrize("one", [True, False])
def test_a_wrong_gradient_of_the_single_pass_is_seen(one: bool) -> None:
    i = cases.make_inputs((TOKENS,), 4, DIM, CPU, transpose_res=True)
    p = cases.PostPre.make(i, torch.rand(TOKENS, 4), torch.rand(TOKENS, 4, 4)).single_pass()
    got = mhc_calls.ops_single_pass(p, one, gradients=True)
    bad = [k for k, e in cases.check_fused(p, got).items() if not e["met"]]
    assert set(bad) <= (set() if one else {"dx", "df", "dh_post", "dh_res"}), "between parts the gradient is rounded"
    got["dh_pre"] = got["dh_pre"] * 1.001
    got["next_pre"] = got["next_post"]
    assert {"dh_pre", "next_pre"} <= {k for k, e in cases.check_fused(p, got).items() if not e["met"]}


# ---- the command line


def _one_triton(folder: pathlib.Path, version: str, us: float, **changed: Any) -> pathlib.Path:
    folder.mkdir()
    run = {
        "operator": "mhc",
        "device": {"name": "NVIDIA H100"},
        "commit": "c",
        "dirty": False,
        "kernel_sources_sha256": "a",
        "date": "d",
        "versions": {"triton": version, "torch": "2.11.0"},
        "kernels": {"mhc_post": {"registers": round(us), "spilled": 0}},
        "rows": [
            {"what": "post", "dim": 4096, "variant": "ops", "median_us": us},
            {"what": "post", "dim": 4096, "variant": "eager", "median_us": 900.0},
        ],
    }
    (folder / "mhc-partial.json").write_text(json.dumps({**run, **changed}))
    return folder


def test_two_tritons_are_compared_row_by_row(tmp_path: pathlib.Path) -> None:
    older, newer = (_one_triton(tmp_path / v, v, us) for v, us in (("3.6.0", 100.0), ("3.9.0", 104.0)))
    result = tritons.compare(older, newer)
    assert result["ratios"] == {"mhc what=post dim=4096": 1.04}
    text = tritons.table(result)
    assert "| mhc what=post dim=4096 | 100.0 | 104.0 | 1.040 |" in text
    assert "slower with the second: mhc what=post dim=4096." in text and "| mhc_post | 100 / 0 | 104 / 0 |" in text
    for name, changed in (("kernel", {"kernel_sources_sha256": "b"}), ("rows", {"rows": []})):
        with pytest.raises(ValueError, match=name):
            tritons.compare(older, _one_triton(tmp_path / name, "3.9.0", 1.0, **changed))


# ---- the E79 scan


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
@pytest.mark.parametrize(("n", "batch", "steps"), [e79_cases.MEMORY_SHAPE, (128, 32, 512), (48, 4, 4096)])
def test_the_stated_memory_is_what_the_plans_allocate(n: int, batch: int, steps: int, bias: str) -> None:
    segment = segment_length(n, batch, steps)
    case = e79_cases.make_case(n, batch, steps, torch.device("meta"), bias=bias)
    b = Counting()
    out, S, M, *kept = plan_e79_scan(b, *case.arguments(), segment)
    grads = plan_e79_scan_backward(b, torch.empty_like(out), None, None, *case.arguments(), *kept, segment)
    asked = sum(t.numel() * t.element_size() for t in (out, S, M, *grads))
    stated = e79_cases.stated_mb(n, batch, steps, segment, bias == "input")
    # Not in the stated memory: a fixed bias's sums and the state at the chain's end.
    rest = 4 * batch * (n * n + (4 * n if bias == "fixed" else 0)) / 1e6
    assert stated + rest == pytest.approx((b.bytes - asked) / 1e6)
    assert rest < 0.02 * stated
    assert (n, batch, steps) != e79_cases.MEMORY_SHAPE or stated + rest < e79_cases.PEAK_BAR_MB


@pytest.mark.parametrize("bias", e79_cases.BIASES)
def test_the_loop_is_the_formula(bias: str) -> None:
    case = e79_cases.make_case(5, 3, 4, CPU, bias=bias, states=True, ups=e79_cases.OUTPUTS)
    want = oracle(case.inputs, {k: case.ups[k] for k in e79_cases.OUTPUTS})
    got = e79_cases.exact(case, True)
    assert got.keys() == want.keys()
    assert all(relative(got[k], want[k]) < 1e-12 for k in want)


def test_ops_match_the_loop_and_mistakes_are_seen() -> None:
    case = e79_cases.make_case(6, 2, 9, CPU, bias="input", states=True, ups=e79_cases.OUTPUTS)
    want, loops = (e79_cases.exact(case, True, d) for d in (torch.float64, torch.float32))
    got = e79_cases.both(e79_cases.SCAN, case.leaves())
    assert [k for k, e in e79_cases.compare(got, want, loops).items() if not e["met"]] == []
    got["dkvqm"] = got["dkvqm"] * (1 + 1e-4)
    got["S"] = got["S"].mT.contiguous()
    got["dM0"] = got["dM0"].clone()
    got["dM0"][0, 0, 0] = math.nan
    assert {k for k, e in e79_cases.compare(got, want, loops).items() if not e["met"]} == {"dkvqm", "S", "dM0"}


def test_low_precision_is_held_to_one_rounding() -> None:
    case = e79_cases.make_case(6, 2, 9, CPU, dtype=torch.bfloat16)
    want = e79_cases.exact(case, False)
    got = e79_cases.forward(e79_cases.SCAN, case)
    assert got["out"].dtype is torch.bfloat16
    assert all(e["met"] for e in e79_cases.compare(got, want, None).values())
    got["out"] = got["out"] * 1.01
    assert not e79_cases.compare(got, want, None)["out"]["met"]


def test_some_sequences_of_a_case_are_the_same_alone() -> None:
    case = e79_cases.make_case(4, 3, 5, CPU, bias="input", states=True, ups=e79_cases.OUTPUTS)
    whole, part = (e79_cases.exact(c, True) for c in (case, case.sequences([0, 2])))
    for name, t in part.items():
        torch.testing.assert_close(t, e79_cases.picked(name, whole[name], [0, 2]), msg=name)


def test_what_a_run_of_e79_holds() -> None:
    result = toy_runs.whole("e79")
    assert {(r["dtype"], r["bias"]) for r in result["further"]} == {
        ("bfloat16", "fixed"),
        ("float32", "input"),
        ("bfloat16", "input"),
    }
    assert len(result["batch"]) == 2 * len(e79_cases.BATCHES) and {r["T"] for r in result["decode"]} == {1}
    assert all(e["loop"] < 1e-5 for c in result["accuracy"] for e in c["errors"].values())
    assert {r["speedup"] for r in result["cpu"] if r["variant"] == e79_cases.EAGER} == {1.0}


def test_times_are_per_step_of_a_chain() -> None:
    row = {"what": "fwd", "variant": "ops", "n": 64, "B": 1, "T": 1, "dtype": "float32", "bias": "fixed"}
    object.__new__(e79.Run).add_figures(row, timing.Timing([40.0, 60.0]).over(20))
    assert row["median_us"] == 2.5 and "bar_us" not in row


def test_nothing_is_compiled_once_the_budget_is_spent(tmp_path: pathlib.Path) -> None:
    found = toy_runs.run("e79", tmp_path / "x.json", parts=("speed",), compiled=True, budget_s=0.0)
    rows = {(r["what"], r["variant"]): r for r in found["rows"]}
    assert all("budget" in rows[w, "compiled"]["error"] for w in ("fwd", "fb"))
    assert all("median_us" in rows[w, "ops"] for w in ("fwd", "fb"))


def test_rolling_up_is_measured(tmp_path: pathlib.Path) -> None:
    row = toy_runs.run("e79", tmp_path / "x.json", parts=("rollup",))["rollup"][0]
    assert (row["n"], row["B"], row["T"]) == (64, 2, 5)
    assert row["routed"] == {"e79_scan": 1}
    assert row["worst_difference"] < 1e-5
    assert 0 < row["pass_s"] < row["compile_s"] and row["nodes"] > 3 * 20


def test_a_chain_carries_the_states() -> None:
    case = e79_cases.make_case(4, 2, 1, CPU, states=True)
    got = e79_cases.chain(e79_cases.SCAN, case, e79.DECODE_CHAIN)()
    long = case.map(lambda k, t: t.expand(e79.DECODE_CHAIN, -1, -1) if k == "kvqm" else t)
    want = e79_cases.forward(e79_cases.loop, long)
    torch.testing.assert_close(got[1], want["S"])
    torch.testing.assert_close(got[0], want["out"][-1:])


# ---- index scores


def test_the_bar_of_memory() -> None:
    assert round(index_cases.MEMORY_BAR_MB, 1) == 1073.7


def test_the_ops_and_the_models_formula_are_the_formula() -> None:
    torch.manual_seed(0)
    case = index_cases.make_case(TINY, CPU)
    at = sample_of(TINY.tokens, 7, CPU)
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
    at = sample_of(TINY.tokens, 7, CPU)
    loss, dscores, *grads = index_cases.trained(args)
    assert relative(loss[0, at], index_cases.loss_of(args, at, torch.float64)) < 1e-5
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


def test_what_a_run_of_index_holds() -> None:
    result = toy_runs.whole("index")
    ours = [r for r in result["rows"] if r["variant"] == "ops"]
    assert all("times_compiled" in r for r in ours if r["what"] != index_cases.LOSS)
    assert [r["name"] for r in ours if r["what"] == index_cases.LOSS] == ["64 heads"]
    assert len(result["errors"]) == 2 and len(result["determinism"]) == 2


def test_wrong_results_miss_their_bars(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, chosen, trained = index_cases.scores, index_cases.chosen, index_cases.trained
    wrong: dict[str, Any] = {
        "scores": (lambda case: scores(case) * 1.001, [False] * 2),
        "chosen": (lambda case: chosen(case) * 0, [False] * 2),
        "trained": (lambda args: (trained(args)[0] * 1.001, *trained(args)[1:]), [False, True]),
    }
    for name, (call, met) in wrong.items():
        with monkeypatch.context() as patch:
            patch.setattr(index_cases, name, call)
            found = toy_runs.run("index", tmp_path / "x.json", parts=("errors",))
        assert [r["met"] for r in found["errors"]] == met


def test_elements_that_a_call_leaves_out_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    for outputs in ((torch.zeros(2, dtype=torch.int32), torch.zeros(2)), torch.zeros(2, dtype=torch.int64)):
        ready = timing.Runnable(lambda found=outputs: found, CPU)  # type: ignore[misc]
        assert index.written(ready.outputs)
        ready.graph = types.SimpleNamespace(replay=lambda: None)  # type: ignore[assignment]
        assert not index.written(ready.run_poisoned())


def test_a_spent_budget_leaves_peers_out(tmp_path: pathlib.Path) -> None:
    found = toy_runs.run("index", tmp_path / "x.json", parts=("speed",), budget_s=0.0)
    assert not found["complete"]
    assert {r["variant"] for r in found["rows"]} == {"ops", index_cases.TORCH_TOPK}
    assert len(found["skipped"]) == 2
