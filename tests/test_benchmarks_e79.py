# SPDX-License-Identifier: Apache-2.0
"""The E79 benchmark: its arithmetic, its loop, its outputs on a CPU, its tables and plots."""

from __future__ import annotations

import copy
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from benchmarks import __main__ as cli
from benchmarks import e79, e79_cases, running, timing
from benchmarks import e79_targets as targets
from mhc_inductor.kernels.e79.plan import plan_e79_scan, plan_e79_scan_backward
from mhc_inductor.kernels.launch import DeviceProps, EagerBuilder
from mhc_inductor.ops.e79 import segment_length
from tests.oracles.e79 import oracle
from tests.tools.toy_runs import unlike

pytestmark = pytest.mark.xdist_group("benchmarks_e79")  # one worker makes the run that most tests read
CPU = torch.device("cpu")
PARTS = ("speed", "batch", "further", "decode", "memory", "accuracy", "determinism", "cpu")


def settings(**changes: Any) -> e79.Settings:
    base = {"device": "cpu", "rounds": 3, "compiled": False, "sizes": (6,), "batch": 3, "steps": 5, "seed": 4}
    return e79.Settings(**{**base, **changes})


def run(path: pathlib.Path, **changes: Any) -> dict[str, Any]:
    e79.Run(settings(**changes), lambda r: running.save(r, path), lambda _: None).run()
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("e79") / "e79.json", parts=PARTS)


@pytest.fixture
def on_h200(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the run as it would look on an H200 at the published shape, made by the run's own row code."""
    made = copy.deepcopy(result)
    made["device"], made["notice"] = {"type": "cuda", "name": "NVIDIA H200"}, None
    runner = object.__new__(e79.Run)
    runner.gpu, runner.result, runner.s = True, made, settings()
    made["rows"], made["batch"], made["cpu"] = [], [], []
    for (what, n), target in targets.TARGETS.items():
        for variant, us in (("ops", 0.9 * target.bar), ("compiled", 1.5 * target.bar), (targets.EAGER, 300.0)):
            row: dict[str, Any] = {"what": what, "variant": variant, "n": n, "B": 32, "T": 512}
            row |= {"dtype": "float32", "bias": "fixed"}
            runner.add_figures(row, timing.Timing([512 * us]), 1)
            made["rows"].append(row)
            made["batch"] += [{**row, "B": b} for b in targets.BATCHES if variant == "ops" and n in targets.BATCH_SIZES]
    made["memory"] = [
        {"variant": "ops", "n": 64, "B": 32, "T": 512, "bar_mb": 200.0, "peak_above_mb": 110.0, "met_bar": True},
        {"variant": "compiled", "n": 64, "B": 32, "T": 512, "bar_mb": 200.0, "error": "OutOfMemoryError: no\nmore"},
    ]
    return made


# ---- targets and the formula


def test_targets_are_in_order() -> None:
    assert {n for _, n in targets.TARGETS} == set(targets.SIZES)
    for (what, n), t in targets.TARGETS.items():
        assert t.goal < t.bar < min(t.peers.values())
        assert what == "fwd" or t.bar > targets.TARGETS["fwd", n].bar


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
@pytest.mark.parametrize(("n", "batch", "steps"), [targets.MEMORY_SHAPE, (128, 32, 512), (48, 4, 4096)])
def test_the_stated_memory_is_what_the_plans_allocate(n: int, batch: int, steps: int, bias: str) -> None:
    segment = segment_length(n, batch, steps)
    case = e79_cases.make_case(n, batch, steps, torch.device("meta"), bias=bias)
    b = Counting()
    out, S, M, *kept = plan_e79_scan(b, *case.arguments(), segment)
    grads = plan_e79_scan_backward(b, torch.empty_like(out), None, None, *case.arguments(), *kept, segment)
    asked = sum(t.numel() * t.element_size() for t in (out, S, M, *grads))
    stated = targets.stated_mb(n, batch, steps, segment, bias == "input")
    # Not in the stated memory: a fixed bias's sums and the state at the chain's end.
    rest = 4 * batch * (n * n + (4 * n if bias == "fixed" else 0)) / 1e6
    assert stated + rest == pytest.approx((b.bytes - asked) / 1e6)
    assert rest < 0.02 * stated
    assert (n, batch, steps) != targets.MEMORY_SHAPE or stated + rest < targets.PEAK_BAR_MB


@pytest.mark.parametrize("bias", e79_cases.BIASES)
def test_the_loop_is_the_formula(bias: str) -> None:
    case = e79_cases.make_case(5, 3, 4, CPU, bias=bias, states=True, ups=e79_cases.OUTPUTS)
    want = oracle(case.inputs, {k: case.ups[k] for k in e79_cases.OUTPUTS})
    got = e79_cases.exact(case, True)
    assert got.keys() == want.keys()
    assert all(e79_cases.relative(got[k], want[k]) < 1e-12 for k in want)


def test_ops_match_the_loop_and_mistakes_are_seen() -> None:
    case = e79_cases.make_case(6, 2, 9, CPU, bias="input", states=True, ups=e79_cases.OUTPUTS)
    want, loops = (e79_cases.exact(case, True, d) for d in (torch.float64, torch.float32))
    got = e79_cases.both(e79_cases.eager_scan(), case.leaves())
    assert [k for k, e in e79_cases.compare(got, want, loops).items() if not e["met"]] == []
    got["dkvqm"] = got["dkvqm"] * (1 + 1e-4)
    got["S"] = got["S"].mT.contiguous()
    got["dM0"] = got["dM0"].clone()
    got["dM0"][0, 0, 0] = math.nan
    assert {k for k, e in e79_cases.compare(got, want, loops).items() if not e["met"]} == {"dkvqm", "S", "dM0"}


def test_low_precision_is_held_to_one_rounding() -> None:
    case = e79_cases.make_case(6, 2, 9, CPU, dtype=torch.bfloat16)
    want = e79_cases.exact(case, False)
    got = e79_cases.forward(e79_cases.eager_scan(), case)
    assert got["out"].dtype is torch.bfloat16
    assert all(e["met"] for e in e79_cases.compare(got, want, None).values())
    got["out"] = got["out"] * 1.01
    assert not e79_cases.compare(got, want, None)["out"]["met"]


def test_some_sequences_of_a_case_are_the_same_alone() -> None:
    case = e79_cases.make_case(4, 3, 5, CPU, bias="input", states=True, ups=e79_cases.OUTPUTS)
    whole, part = (e79_cases.exact(c, True) for c in (case, case.sequences([0, 2])))
    for name, t in part.items():
        torch.testing.assert_close(t, e79_cases.picked(name, whole[name], [0, 2]), msg=name)


# ---- a run


def test_a_run_has_every_part(result: dict[str, Any]) -> None:
    assert result["complete"] and result["operator"] == "e79" and result["notice"] == running.CPU_NOTICE
    assert set(result["skipped"]) == {"memory"}
    named = {(r["what"], r["variant"]) for r in result["rows"]}
    assert named == {(w, v) for w in ("fwd", "fb") for v in ("ops", targets.EAGER)}
    for r in [*result["rows"], *result["batch"], *result["further"], *result["decode"], *result["cpu"]]:
        assert "error" not in r
        assert len(r["samples_us"]) == r["rounds"] == 3
        assert "met_bar" not in r  # absolute bars count on an H200 only, the CPU's at its own shape
        assert r.get("correct", True)
    compared = {(r["what"], *sorted(r["errors"])) for r in result["rows"] if r["variant"] == "ops"}
    assert compared == {("fwd", "M", "S", "out"), ("fb", "M", "S", "dkvqm", "out")}
    assert {(r["dtype"], r["bias"]) for r in result["further"]} == {
        ("bfloat16", "fixed"),
        ("float32", "input"),
        ("bfloat16", "input"),
    }
    assert len(result["batch"]) == 2 * len(targets.BATCHES)
    assert {r["T"] for r in result["decode"]} == {1}
    names = {"out", "S", "M", "dkvqm", "db_s", "db_m", "dS0", "dM0"}
    for c in result["accuracy"]:
        assert set(c["errors"]) == names
        assert all(e["met"] and e["loop"] < 1e-5 for e in c["errors"].values())
    assert all(d["met"] for d in result["determinism"])
    assert {r["speedup"] for r in result["cpu"] if r["variant"] == targets.EAGER} == {1.0}


def test_times_are_per_step(on_h200: dict[str, Any]) -> None:
    row = on_h200["rows"][0]
    assert row["median_us"] == pytest.approx(0.9 * 0.9) and row["met_bar"] and not row["met_goal"]
    chained: dict[str, Any] = {"what": "fwd", "variant": "ops", "n": 64, "B": 1, "T": 1, "dtype": "float32"}
    made = chained | {"bias": "fixed"}
    object.__new__(e79.Run).add_figures(made, timing.Timing([40.0, 60.0]), 20)
    assert made["median_us"] == 2.5 and "bar_us" not in made


def test_a_failure_affects_one_row(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(e79_cases, "both", fail)
    found = run(tmp_path / "x.json", parts=("speed", "determinism"))
    rows = {(r["what"], r["variant"]): r for r in found["rows"]}
    assert rows["fb", "ops"]["error"] == "RuntimeError: no such kernel"
    assert "median_us" in rows["fwd", "ops"] and "error" not in rows["fwd", "ops"]
    assert found["skipped"] == {"determinism": "RuntimeError: no such kernel"}
    assert "failed: RuntimeError: no such kernel" in e79.table(found)


def test_nothing_is_compiled_once_the_budget_is_spent(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path / "x.json", parts=("speed",), compiled=True, budget_s=0.0)
    rows = {(r["what"], r["variant"]): r for r in found["rows"]}
    assert all("budget" in rows[w, "compiled"]["error"] for w in ("fwd", "fb"))
    assert all("median_us" in rows[w, "ops"] for w in ("fwd", "fb"))


def test_a_compiled_loop_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = e79.Run(settings(), lambda _: None, lambda _: None)
    monkeypatch.setattr(e79, "LIMIT_S", 0.1)
    assert runner.compiled_loop()["error"] == "did not compile in 0.1 s"


def test_the_compiled_loops_process_sends_its_times() -> None:
    sent: list[dict[str, Any]] = []

    class Send:
        def send(self, found: dict[str, Any]) -> None:
            sent.append(found)

    e79.time_compiled_loop(4, 2, 2, "cpu", Send())
    assert sent[0].get("error") is None and sent[0]["median_us"] > 0 and sent[0]["rounds"] == 20


def test_rolling_up_is_measured(tmp_path: pathlib.Path) -> None:
    row = run(tmp_path / "x.json", parts=("rollup",), steps=3)["rollup"][0]
    assert (row["n"], row["B"], row["T"]) == (64, 3, 3)
    assert row["routed"] == {"e79_scan": 1}
    assert row["worst_difference"] < 1e-5
    assert 0 < row["pass_s"] < row["compile_s"] and row["nodes"] > 3 * 20


def test_parts_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks what only a GPU's run adds, on a CPU that is taken for one: chains, a sequence alone, memory."""
    monkeypatch.setattr(running, "peak_memory", lambda call, *_: {"peak_above_mb": float(len(call()))})
    runner = e79.Run(settings(), lambda _: None, lambda _: None)
    runner.gpu = True
    for part in ("decode", "determinism", "memory"):
        runner.part(part)
    assert runner.result["skipped"] == {}
    chains = [r for r in runner.result["decode"] if r["variant"] == f"ops, chain of {e79.DECODE_CHAIN}"]
    assert len(chains) == 2 and all(r["median_us"] > 0 and "errors" not in r for r in chains)
    assert [d["check"] for d in runner.result["determinism"]] == ["two runs", "one sequence alone"]
    assert all(d["met"] for d in runner.result["determinism"])
    assert runner.result["memory"][0]["peak_above_mb"] == 6 and runner.result["memory"][0]["formula_mb"] > 0


def test_a_chain_carries_the_states() -> None:
    case = e79_cases.make_case(4, 2, 1, CPU, states=True)
    got = e79_cases.chain(e79_cases.eager_scan(), case, e79.DECODE_CHAIN)()
    long = case.map(lambda k, t: t.expand(e79.DECODE_CHAIN, -1, -1) if k == "kvqm" else t)
    want = e79_cases.forward(e79_cases.loop, long)
    torch.testing.assert_close(got[1], want["S"])
    torch.testing.assert_close(got[0], want["out"][-1:])


def test_a_run_has_the_fields_of_the_committed_result(result: dict[str, Any]) -> None:
    assert unlike(result, "e79", "memory", "cpu", "rollup") == {}
    assert unlike(result, "e79-cpu", *e79.GPU_PARTS, "rows", "rollup") == {}


# ---- tables and plots --------------------------------------------------------------------------------------


def test_tables_are_whole(result: dict[str, Any], on_h200: dict[str, Any]) -> None:
    for made in (result, on_h200):
        text = e79.table(made)
        for block in text.split("\n\n"):
            if block.startswith("|"):
                assert len({line.count("|") for line in block.splitlines()}) == 1
    assert running.CPU_NOTICE in e79.table(result)
    assert "skipped: memory: " in e79.table(result)


def test_table_of_an_h200_run_marks_every_bar(on_h200: dict[str, Any]) -> None:
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in e79.table(on_h200).splitlines()]
    line = next(x for x in lines if x[:1] == ["64"] and x[3:5] == ["forward", "mhc_inductor, compiled"])
    assert line[5] == "2.1" and line[7:9] == ["1.4 **not met**", "0.8 **not met**"]
    assert line[9] == "the authors' CUDA 10.1; Python loop 324; torch.compile of the loop 120"
    assert next(x for x in lines if x[0:1] == ["ops"])[4] == "110.0"
    assert next(x for x in lines if x[0:1] == ["compiled"])[4] == "failed: OutOfMemoryError: no"


def test_wrong_outputs_are_listed(result: dict[str, Any]) -> None:
    assert e79.wrong_outputs(result) == []
    bad = copy.deepcopy(result)
    next(r for r in bad["rows"] if r["what"] == "fb" and r["variant"] == "ops")["errors"]["dkvqm"]["met"] = False
    assert e79.wrong_outputs(bad) == ["fb ops at n = 6, B = 3, T = 5: dkvqm"]
    assert "- fb ops at n = 6" in e79.table(bad)


def test_times_of_this_run_replace_separate_ones(on_h200: dict[str, Any]) -> None:
    found = {b.name: (not b.separate, b.us) for b in e79.bars(on_h200, "fwd", 64)}
    assert found[targets.EAGER] == (True, 300.0)
    assert found[targets.AUTHORS] == (False, 10.1)
    assert next(iter(found)) == "mhc_inductor, ops"


def test_pictures(result: dict[str, Any], on_h200: dict[str, Any], tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    for name, made in {"cpu": result, "h200": on_h200}.items():
        path = tmp_path / f"{name}.png"
        e79.plot(made, path)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000


# ---- the command line


def test_command_line(tmp_path: pathlib.Path) -> None:
    options = {"--part": "cpu,accuracy", "--rounds": "2", "--sizes": "4", "--batch": "2", "--steps": "3"}
    words = [word for pair in options.items() for word in pair]
    done = CliRunner().invoke(cli.app, ["e79", "--no-compiled", "--device", "cpu", *words, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    path = tmp_path / "e79-cpu-partial.json"  # a partial run never gets the file name of a full GPU run
    stored = json.loads(path.read_text())
    assert path.with_suffix(".md").read_text() == e79.table(stored)
    assert path.with_suffix(".png").exists()
    shown = CliRunner().invoke(cli.app, ["table", str(path)])
    assert shown.output == e79.table(stored)


def test_unknown_parts_are_refused(tmp_path: pathlib.Path) -> None:
    done = CliRunner().invoke(cli.app, ["e79", "--part", "gpu", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert list(tmp_path.iterdir()) == []
