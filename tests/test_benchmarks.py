# SPDX-License-Identifier: Apache-2.0
"""The mHC benchmark: its arithmetic, its outputs on a CPU, its handling of crashes, and its tables and plots."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import pathlib
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from benchmarks import accuracy, environment, mhc, mhc_calls, running, source_hash, timing, tritons
from benchmarks import mhc_cases as cases
from tests.tools import toy_runs

pytestmark = pytest.mark.xdist_group("benchmarks")  # one worker makes the run that most tests read
CPU = torch.device("cpu")
TOKENS, DIM = 12, 48
FUSED = ("post_pre", "post_pre_fb", "single_pass", "single_pass_fb")
# The floors that the targets were given with, in whole microseconds.
FLOORS = {
    2560: {"pre": 49, "post": 88, "fb": 400},
    4096: {
        "pre": 78,
        "post": 140,
        "fb": 640,
        "post_pre": 156,
        "post_pre_fb": 453,
        "npu_pre": 78,
        "npu_fb": 218,
        "single_pass": 156,
        "single_pass_fb": 390,
    },
    7168: {"pre": 137, "post": 246, "fb": 1120},
}
run, settings = (functools.partial(f, "mhc") for f in (toy_runs.run, toy_runs.settings))


@pytest.fixture
def result() -> dict[str, Any]:
    return toy_runs.whole("mhc")


# ---- targets


@pytest.mark.parametrize(("dim", "what"), [(d, w) for d, of in FLOORS.items() for w in of])
def test_floors_are_those_of_the_targets(dim: int, what: str) -> None:
    assert round(cases.floor_us(what, cases.TOKENS, dim)) == FLOORS[dim][what]


def test_every_target_is_above_its_floor() -> None:
    assert {(w, d) for d, of in FLOORS.items() for w in of} == set(cases.TARGETS)
    for (what, dim), t in cases.TARGETS.items():
        assert cases.floor_us(what, cases.TOKENS, dim) < t.goal
        assert (t.best_peer is None) == (what in FUSED)
        assert t.best_peer is None or t.best_peer[1] == min(t.peers.values())


def test_best_peers() -> None:
    assert cases.TARGETS["fb", 4096].best_peer == ("TileKernels", 1747)
    assert cases.TARGETS["pre", 2560].best_peer == ("TransformerEngine", 138)
    assert "Liger" not in cases.TARGETS["npu_pre", 4096].peers
    assert cases.TARGETS["npu_fb", 4096].peers["eager"] == 6908


def test_phi_counts_at_a_few_tokens() -> None:
    with_phi = cases.floor_bytes("pre", 1, 4096, phi=True)
    assert with_phi == 5 * 4096 * 2 + 24 * 4 * 4096 * 4
    assert cases.floor_bytes("post", 1, 4096, phi=True) == 9 * 4096 * 2


# ---- timing


def test_variants_run_in_turn_and_every_sample_is_kept() -> None:
    calls: list[str] = []
    ready = {name: timing.Runnable(lambda name=name: calls.append(name), CPU) for name in "ab"}
    calls.clear()
    times = timing.interleaved(ready, CPU, timing.Flusher(CPU), rounds=4, warm_rounds=2)
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
        assert accuracy.relative(value, whole[name]) < 1e-13, name


@pytest.mark.parametrize("npu", [False, True])
def test_ops_and_public_functions_match_fp64(npu: bool) -> None:
    i = cases.make_inputs((TOKENS,), 4, DIM, CPU, npu=npu, transpose_res=True)
    exact = cases.reference(i)
    leaves = i.detached()
    for t in leaves.leaves():
        t.requires_grad_()
    for got in (mhc_calls.ops_fb(i), mhc_calls.autograd_fb(False)(leaves)):
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
        assert accuracy.relative(value, exact[name]) < 1e-12, name


def test_equal_bits_see_the_last_bit_and_nan() -> None:
    a = torch.tensor([1.0, math.nan])
    assert accuracy.same_bits(a, a.clone())
    assert not accuracy.same_bits(a, torch.tensor([1.0 + 2**-23, math.nan]))
    assert not accuracy.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


# ---- a run


def test_what_a_run_holds_beyond_its_rows(result: dict[str, Any]) -> None:
    assert len(result["accuracy"]) == 4 and result["determinism"] and result["copy"]["tb_per_s"] > 0
    assert "Liger" in result["skipped"] and result["settings"]["float32_matmul_precision"] == "highest"


def test_json_has_words_for_nan() -> None:
    assert running.cleaned({"a": [math.nan, 1.0, (math.inf,)]}) == {"a": ["nan", 1.0, ["inf"]]}


def test_commit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHC_COMMIT", "abc")
    monkeypatch.setenv("MHC_DIRTY", "1")
    assert environment.commit() == {"commit": "abc", "dirty": True}


def test_a_lost_device_goes_on_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def fail(*_: Any) -> None:
        raise RuntimeError("illegal address")

    real = subprocess.run

    def second_process(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        if command[0] != sys.executable:  # the run's header calls git
            return real(command, **kwargs)
        assert command[:3] == [sys.executable, "-m", "benchmarks.mhc"]
        seen.update(json.loads(command[3]))
        monkeypatch.undo()
        mhc._child(command[3], command[4])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(mhc_calls, "ops_post", fail)
    monkeypatch.setattr(mhc, "device_alive", lambda _: False)
    monkeypatch.setattr(mhc.subprocess, "run", second_process)
    rows = {(r["what"], r["variant"]): r for r in run(parts=("4096", "npu"))["rows"]}
    assert seen["exclude"] == {"4096/post/ops": "RuntimeError: illegal address"}
    assert seen["parts"] == ["4096", "npu"]
    assert rows["post", "ops"]["error"] == "RuntimeError: illegal address"
    assert {k for k, r in rows.items() if "median_us" in r} == {
        *((w, "ops") for w in ("pre", "fb", *FUSED, "npu_pre", "npu_fb")),
        *((w, mhc.TWO_OPS) for w in FUSED),
    }


# ---- tables and plots --------------------------------------------------------------------------------------


def test_a_wrong_gradient_of_the_fused_op_is_seen() -> None:
    i = cases.make_inputs((TOKENS,), 4, DIM, CPU, transpose_res=True)
    p = cases.PostPre.make(i, torch.rand(TOKENS, 4), torch.rand(TOKENS, 4, 4))
    got = mhc_calls.ops_post_pre_fb(p)
    assert [k for k, e in cases.check_fused(p, got).items() if not e["met"]] == []
    got["dh_res"] = got["dh_res"].transpose(-1, -2)
    got["df"] = got["df"] * 1.01
    assert {k for k, e in cases.check_fused(p, got).items() if not e["met"]} == {"dh_res", "df"}


@pytest.mark.parametrize("one", [True, False])
def test_a_wrong_gradient_of_the_single_pass_is_seen(one: bool) -> None:
    i = cases.make_inputs((TOKENS,), 4, DIM, CPU, transpose_res=True)
    p = cases.PostPre.make(i, torch.rand(TOKENS, 4), torch.rand(TOKENS, 4, 4)).single_pass()
    got = mhc_calls.ops_single_pass_fb(p, one)
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


# ---- size

BUDGETS = {"mhc*": 1_174, "e79*": 665, "index*": 393, "selection*": 1_169, "lists*": 1_220}
"""Lines that an operator's modules may have: what they have, so that they can only shrink (all: test_budgets.py)."""


@pytest.mark.parametrize("modules", BUDGETS)
def test_benchmarks_do_not_grow(modules: str) -> None:
    files = list((source_hash.ROOT / "benchmarks").glob(f"{modules}.py"))
    assert files and sum(len(file.read_text().splitlines()) for file in files) <= BUDGETS[modules]
