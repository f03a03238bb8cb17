# SPDX-License-Identifier: Apache-2.0
"""The mHC benchmark: its arithmetic, its outputs on a CPU, its handling of crashes, and its tables and plots."""

from __future__ import annotations

import contextlib
import copy
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

from typer.testing import CliRunner

from benchmarks import __main__ as cli
from benchmarks import accuracy, environment, mhc, mhc_calls, mhc_cases, report, running, source_hash, timing, tritons
from benchmarks import mhc_targets as targets
from tests.tools.toy_runs import unlike

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


def settings(**changes: Any) -> mhc.Settings:
    base = {
        "device": "cpu",
        "parts": ("4096",),
        "rounds": 3,
        "compiled": False,
        "tokens": TOKENS,
        "dim": DIM,
        "seed": 5,
    }
    return mhc.Settings(**{**base, **changes})


def run(**changes: Any) -> report.Result:
    saved: list[str] = []
    result = mhc.Run(settings(**changes), lambda r: saved.append(json.dumps(running.cleaned(r))), lambda _: None).run()
    assert json.loads(saved[-1]) == json.loads(json.dumps(running.cleaned(result)))
    return json.loads(saved[-1])


@pytest.fixture(scope="module")
def result() -> report.Result:
    return run(parts=("4096", "npu", "decode", "memory", "accuracy", "determinism"), peers=True)


def shaped(dim: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(x=torch.empty(targets.TOKENS, 4, dim, device="meta"))


@pytest.fixture
def on_h200(result: report.Result) -> report.Result:
    """Returns the run as it would look on an H200 at the shapes of the targets, made by the run's own row code."""
    made = copy.deepcopy(result)
    made["device"] = {"type": "cuda", "name": "NVIDIA H200"}
    made["notice"] = None
    made["rows"] = []
    for (what, dim), target in targets.TARGETS.items():
        for variant, us in [
            ("ops", 0.9 * target.bar),
            ("compiled", 1.5 * target.bar),
            ("Liger", 5 * target.bar),
        ]:
            if variant == "compiled" and not what.endswith("fb"):
                continue
            row = mhc.row_header(mhc.Variant(what, variant, lambda: lambda: None, case=shaped(dim)))
            row.update(mhc._figures(row, timing.Timing([us - 1, us, us + 1]), 1, True))
            made["rows"].append(row)
    made["memory"] = [
        {"variant": "ops", "dim": 4096, "bar_mb": 500.0, "peak_above_mb": 300.0, "met_bar": True},
        {"variant": "eager", "dim": 4096, "bar_mb": 500.0, "error": "OutOfMemoryError: no\nmore"},
    ]
    return made


# ---- targets


@pytest.mark.parametrize(("dim", "what"), [(d, w) for d, of in FLOORS.items() for w in of])
def test_floors_are_those_of_the_targets(dim: int, what: str) -> None:
    assert round(targets.floor_us(what, targets.TOKENS, dim)) == FLOORS[dim][what]


def test_every_target_is_above_its_floor_and_in_order() -> None:
    assert {(w, d) for d, of in FLOORS.items() for w in of} == set(targets.TARGETS)
    for (what, dim), t in targets.TARGETS.items():
        assert targets.floor_us(what, targets.TOKENS, dim) < t.goal < t.bar
        assert (t.best_peer is None) == (what in ("post_pre", "post_pre_fb", "single_pass", "single_pass_fb"))
        assert t.best_peer is None or t.best_peer[1] == min(t.peers.values())


def test_best_peers() -> None:
    assert targets.TARGETS["fb", 4096].best_peer == ("TileKernels", 1747)
    assert targets.TARGETS["pre", 2560].best_peer == ("TransformerEngine", 138)
    assert "Liger" not in targets.TARGETS["npu_pre", 4096].peers
    assert targets.TARGETS["npu_fb", 4096].peers["eager"] == 6908


def test_phi_counts_at_a_few_tokens() -> None:
    with_phi = targets.floor_bytes("pre", 1, 4096, phi=True)
    assert with_phi == 5 * 4096 * 2 + 24 * 4 * 4096 * 4
    assert targets.floor_bytes("post", 1, 4096, phi=True) == 9 * 4096 * 2


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
    row = {"floor_us": 1.0, "variant": "ops"}
    assert mhc._figures(row, timing.Timing([40.0, 60.0]), 20, True)["median_us"] == 2.5
    calls: list[int] = []
    timing.chain(lambda: calls.append(1), 20)()
    assert len(calls) == 20


class FakeCuda:
    """Replaces torch.cuda: logs the order of calls; replaying a graph writes to ``out``, if it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.out: torch.Tensor | None = None
        fake = self

        class Graph:
            def replay(self) -> None:
                fake.log.append("replay")
                if fake.out is not None:
                    fake.out.fill_(7.0)

            def reset(self) -> None:
                fake.log.append("reset")

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0

            def record(self) -> None:
                fake.log.append("event")
                self.at = len(fake.log)

            def elapsed_time(self, end: Event) -> float:
                return float(end.at - self.at)

        class Stream:
            def wait_stream(self, other: Any) -> None:
                fake.log.append("wait")

        context = {"graph": "capture", "stream": "side"}
        for name, word in context.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, word=word: contextlib.nullcontext(self.log.append(word)))
        for name, new in {"CUDAGraph": Graph, "Event": Event}.items():
            monkeypatch.setattr(torch.cuda, name, new)
        for name in ("Stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: Stream())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: self.log.append("sync"))


def test_graphs_are_captured_after_warm_up_and_outputs_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)

    def fn() -> tuple[torch.Tensor, torch.Tensor]:
        cuda.log.append("call")
        return torch.ones(2), torch.ones(2)

    r = timing.Runnable(fn, torch.device("cuda", 0))
    assert cuda.log == [
        "wait",
        "side",
        "call",
        "call",
        "call",
        "wait",
        "sync",
        "capture",
        "call",
        "replay",
        "sync",
    ]
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
    i = mhc_cases.make_inputs((7,), 4, DIM, CPU)
    whole = mhc_cases.reference(i)
    monkeypatch.setattr(mhc_cases, "CHUNK", 3)
    for name, value in mhc_cases.reference(i).items():
        assert accuracy.relative(value, whole[name]) < 1e-13, name


@pytest.mark.parametrize("npu", [False, True])
def test_ops_and_public_functions_match_fp64(npu: bool) -> None:
    i = mhc_cases.make_inputs((TOKENS,), 4, DIM, CPU, npu=npu, transpose_res=True)
    exact = mhc_cases.reference(i)
    leaves = i.detached()
    for t in leaves.leaves():
        t.requires_grad_()
    for got in (mhc_calls.ops_fb(i), mhc_calls.autograd_fb(False)(leaves)):
        errors = mhc_cases.compare(got, exact, i.with_post)
        assert {"dx", "dphi", "dalpha", "dbias", "dgamma" if npu else "df"} <= set(errors)
        assert [k for k, e in errors.items() if not e["met"]] == []


def test_a_wrong_or_unwritten_output_is_seen() -> None:
    i = mhc_cases.make_inputs((TOKENS,), 4, DIM, CPU)
    exact, got = mhc_cases.reference(i), mhc_calls.ops_fb(i)
    got["dphi"] = got["dphi"] * (1 + 1e-4)
    got["dx"] = got["dx"].clone()
    got["dx"][-1, -1, -1] = math.nan
    got["h_in"] = got["h_in"] * 1.01
    errors = mhc_cases.compare(got, exact, True)
    assert {k for k, e in errors.items() if not e["met"]} == {"dphi", "dx", "h_in"}


def test_the_written_out_backward_is_autograds() -> None:
    i = mhc_cases.make_inputs((3, 5), 4, DIM, CPU, npu=True, record=True)
    exact = mhc_cases.reference(i)
    for name, value in mhc_cases.parameter_gradients(i, exact, torch.float64).items():
        assert accuracy.relative(value, exact[name]) < 1e-12, name


def test_equal_bits_see_the_last_bit_and_nan() -> None:
    a = torch.tensor([1.0, math.nan])
    assert accuracy.same_bits(a, a.clone())
    assert not accuracy.same_bits(a, torch.tensor([1.0 + 2**-23, math.nan]))
    assert not accuracy.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


# ---- a run


def test_a_run_has_every_part(result: report.Result) -> None:
    assert result["complete"]
    assert result["notice"] == mhc.CPU_NOTICE
    named = {(r["what"], r["variant"]) for r in result["rows"]}
    both = {(w, v) for w in ("pre", "post", "fb", "npu_pre", "npu_fb") for v in ("ops", "eager")}
    assert named == both | {(w, v) for w in FUSED for v in ("ops", mhc.TWO_OPS)}
    for r in result["rows"]:
        assert "error" not in r
        assert len(r["samples_us"]) == r["rounds"] == 3
        assert r["q1_us"] <= r["median_us"] <= r["q3_us"]
        assert "met_bar" not in r  # absolute bars count on an H200 only
    assert all(r["correct"] for r in result["rows"] if r["variant"] == "ops")
    errors = next(r["errors"] for r in result["rows"] if (r["what"], r["variant"]) == ("post_pre_fb", "ops"))
    assert {
        "x_out",
        "h_in",
        "next_post",
        "next_res",
        "dx",
        "df",
        "dh_post",
        "dh_res",
        "dphi",
        "dalpha",
        "dbias",
    } <= set(errors)
    assert {r["what"] for r in result["decode"] if r["variant"] == "ops"} == {"pre", "post", "post_pre", "single_pass"}
    assert len(result["accuracy"]) == 4
    assert result["determinism"][0]["met"]
    assert result["copy"]["tb_per_s"] > 0
    assert "Liger" in result["skipped"]
    assert "memory" in result["skipped"]


def test_a_run_says_what_it_measured(result: report.Result) -> None:
    assert result["kernel_sources_sha256"] == environment.source_hash()
    assert result["versions"]["torch"] == torch.__version__
    assert result["settings"]["seed"] == 5
    assert result["settings"]["float32_matmul_precision"] == "highest"


def test_commit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHC_COMMIT", "abc")
    monkeypatch.setenv("MHC_DIRTY", "1")
    assert environment.commit() == {"commit": "abc", "dirty": True}


def test_bars_count_on_an_h200_only() -> None:
    row = {"floor_us": 78.0, "variant": "ops", "bar_us": 160.0, "goal_us": 105.0, "best_peer_us": 190.0}
    good = mhc._figures(row, timing.Timing([150.0]), 1, True)
    assert (good["met_bar"], good["met_goal"], good["not_slower_than_best_peer"]) == (True, False, True)
    assert mhc._figures(row, timing.Timing([math.nan]), 1, True)["met_bar"] is False
    assert "met_bar" not in mhc._figures(row, timing.Timing([150.0]), 1, False)
    assert "met_bar" not in mhc._figures({**row, "variant": "eager"}, timing.Timing([150.0]), 1, True)


def test_one_failing_variant_keeps_the_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(mhc_calls, "ops_post", fail)
    rows = {(r["what"], r["variant"]): r for r in run(peers=True)["rows"]}
    for what in ("post", "fb"):
        assert rows[what, "ops"]["error"] == "RuntimeError: no such kernel"
        assert "median_us" not in rows[what, "ops"]
        assert rows[what, "eager"]["median_us"] > 0
    assert rows["pre", "ops"]["correct"]


def test_a_failing_group_keeps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(mhc, "determinism", fail)
    made = run(parts=("determinism", "npu"))
    assert made["skipped"]["determinism"] == "ValueError: broken"
    assert len(made["rows"]) == 2


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


def test_parts_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks what only a GPU's run adds, on a CPU that is taken for one: chains, memory, Liger's absence."""
    monkeypatch.setattr(running, "peak_memory", lambda call, *_: {"peak_above_mb": float(len(call()))})
    runner = mhc.Run(settings(peers=True, parts=("decode", "memory")), lambda _: None, lambda _: None)
    runner.gpu = True
    for part in ("decode", "memory"):
        runner.part(part)
    assert runner.result["skipped"].keys() <= {"Liger"}
    ops = [r for r in runner.result["decode"] if r["variant"].startswith("ops")]
    assert {r["variant"] for r in ops} == {"ops", f"ops, chain of {mhc.DECODE_CHAIN}"}
    assert all(r["median_us"] > 0 and ("errors" in r) is (r["variant"] == "ops") for r in ops)
    assert {r["variant"]: r["peak_above_mb"] > 0 for r in runner.result["memory"]} == {"ops": True, "eager": True}


def test_json_has_words_for_nan() -> None:
    assert running.cleaned({"a": [math.nan, 1.0, (math.inf,)]}) == {"a": ["nan", 1.0, ["inf"]]}


def test_a_run_has_the_fields_of_the_committed_result(result: report.Result) -> None:
    assert unlike(result, "mhc", "memory") == {}


# ---- tables and plots --------------------------------------------------------------------------------------


def test_table_of_a_cpu_run(result: report.Result) -> None:
    text = mhc.table(result)
    assert mhc.CPU_NOTICE in text
    assert "skipped: Liger: " in text
    assert "shape of record" in text
    # Every line of a table has as many cells as its heading.
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_table_of_an_h200_run_marks_every_bar(on_h200: report.Result) -> None:
    lines = {tuple(c.strip() for c in x.split("|")[1:4]): x for x in mhc.table(on_h200).splitlines()}
    ops = lines["4096", "forward + backward", "mhc_inductor, ops"]
    assert "| 873 |" in ops
    assert "| 970 met | 850 **not met** | TileKernels 1747 met |" in ops
    compiled = lines["4096", "forward + backward", "mhc_inductor, compiled"]
    assert "970 **not met**" in compiled
    assert lines["eager", "4096", "failed: OutOfMemoryError: no"]
    assert lines["ops", "4096", "300.0"]


def test_a_bar_without_a_peer(on_h200: report.Result) -> None:
    row = next(r for r in on_h200["rows"] if (r["what"], r["variant"]) == ("post_pre", "ops"))
    assert row["met_bar"] and not row["met_goal"] and "not_slower_than_best_peer" not in row
    line = next(x for x in mhc.table(on_h200).splitlines() if "post fused with pre" in x)
    assert line.endswith("| 230 met | 190 **not met** |  |")


def test_a_wrong_gradient_of_the_fused_op_is_seen() -> None:
    i = mhc_cases.make_inputs((TOKENS,), 4, DIM, CPU, transpose_res=True)
    p = mhc_cases.PostPre.make(i, torch.rand(TOKENS, 4), torch.rand(TOKENS, 4, 4))
    got = mhc_calls.ops_post_pre_fb(p)
    assert [k for k, e in mhc_cases.check_fused(p, got).items() if not e["met"]] == []
    got["dh_res"] = got["dh_res"].transpose(-1, -2)
    got["df"] = got["df"] * 1.01
    assert {k for k, e in mhc_cases.check_fused(p, got).items() if not e["met"]} == {"dh_res", "df"}


@pytest.mark.parametrize("one", [True, False])
def test_a_wrong_gradient_of_the_single_pass_is_seen(one: bool) -> None:
    i = mhc_cases.make_inputs((TOKENS,), 4, DIM, CPU, transpose_res=True)
    p = mhc_cases.PostPre.make(i, torch.rand(TOKENS, 4), torch.rand(TOKENS, 4, 4)).single_pass()
    got = mhc_calls.ops_single_pass_fb(p, one)
    bad = [k for k, e in mhc_cases.check_fused(p, got).items() if not e["met"]]
    assert set(bad) <= (set() if one else {"dx", "df", "dh_post", "dh_res"}), "between parts the gradient is rounded"
    got["dh_pre"] = got["dh_pre"] * 1.001
    got["next_pre"] = got["next_post"]
    assert {"dh_pre", "next_pre"} <= {k for k, e in mhc_cases.check_fused(p, got).items() if not e["met"]}


def test_wrong_outputs_are_listed(result: report.Result) -> None:
    bad = copy.deepcopy(result)
    row = next(r for r in bad["rows"] if r["what"] == "fb" and r["variant"] == "ops")
    row["errors"]["dphi"]["met"] = False
    assert mhc.wrong_outputs(result) == []
    assert mhc.wrong_outputs(bad) == [f"fb ops at {TOKENS} tokens, D = {DIM}: dphi"]
    assert f"- fb ops at {TOKENS} tokens" in mhc.table(bad)


def test_peers_of_this_run_replace_separate_times(on_h200: report.Result) -> None:
    found = {b.name: (b.separate, b.us) for b in mhc.bars(on_h200, "fb", 4096)}
    assert found["Liger"] == (False, 5 * 970)
    assert found["TileKernels"] == (True, 1747)
    assert next(iter(found)) == "mhc_inductor, ops"


def test_pictures(result: report.Result, on_h200: report.Result, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    for name, made in {"cpu": result, "h200": on_h200}.items():
        path = tmp_path / f"{name}.png"
        mhc.plot(made, path)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000


# ---- the command line


def test_command_line(tmp_path: pathlib.Path) -> None:
    options = {
        "--rows": "2560,determinism",
        "--rounds": "2",
        "--tokens": "4",
        "--dim": "32",
        "--device": "cpu",
    }
    arguments = ["mhc", "--no-compiled", *(word for pair in options.items() for word in pair)]
    done = CliRunner().invoke(cli.app, [*arguments, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "nothing of a GPU" in " ".join(done.output.split())
    path = tmp_path / "mhc-cpu-partial.json"  # a partial run never gets the file name of a full GPU run
    stored = json.loads(path.read_text())
    assert {r["dim"] for r in stored["rows"]} == {32}
    assert path.with_suffix(".md").read_text() == mhc.table(stored)
    shown = CliRunner().invoke(cli.app, ["table", str(path)])
    assert shown.output == mhc.table(stored)


def test_unknown_rows_are_refused(tmp_path: pathlib.Path) -> None:
    done = CliRunner().invoke(cli.app, ["mhc", "--rows", "5000", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert list(tmp_path.iterdir()) == []


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

BUDGETS = {"mhc*": 1_188, "e79*": 714, "index*": 397, "selection*": 1_170, "lists*": 1_221}
"""Lines that an operator's modules may have: what they have, so that they can only shrink (all: test_budgets.py)."""


@pytest.mark.parametrize("modules", BUDGETS)
def test_benchmarks_do_not_grow(modules: str) -> None:
    files = list((source_hash.ROOT / "benchmarks").glob(f"{modules}.py"))
    assert files and sum(len(file.read_text().splitlines()) for file in files) <= BUDGETS[modules]
