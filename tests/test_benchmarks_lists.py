# SPDX-License-Identifier: Apache-2.0
"""The benchmark of attention over lists of keys: its inputs and formula, its outputs on a CPU, its tables and plots."""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from benchmarks import __main__ as cli
from benchmarks import lists, lists_cases, lists_peers, lists_report, lists_warm, pages, running, timing
from benchmarks import lists_targets as targets
from benchmarks.lists_targets import Shape
from tests import test_results

CPU = torch.device("cpu")
# The shapes are tiny, and one worker makes the run that most tests read.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("benchmarks_lists")]
SHARED = Shape("shared", 12, 20, 3, 12, 8, 5)
APART = Shape("apart", 20, 20, 2, 8, 8, 7, shared=False, sink=True)
POOLED = targets.C.small()
DECODE = targets.DECODE.small()
EVERY = (SHARED, APART, POOLED, DECODE)


def uncompiled(fn: Any, dynamic: bool) -> Any:
    """Stands in for torch.compile, which takes most of a run on a CPU."""
    return fn


def run(path: pathlib.Path, **changes: Any) -> dict[str, Any]:
    settings = lists.Settings(**{"device": "cpu", "rounds": 4, "seed": 4, **changes})
    lists.Run(settings, lambda r: running.save(r, path), lambda _: None).run()
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def result(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists_peers, "compiled", uncompiled)
        lists_peers._causal.cache_clear()
        found = run(tmp_path_factory.mktemp("lists") / "lists.json")
    lists_peers._causal.cache_clear()
    return found


@pytest.fixture
def on_h200(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the run as it would look on an H200 at the published shapes, made by the run's own row code."""
    made = copy.deepcopy(result)
    made["device"], made["notice"] = {"type": "cuda", "name": "NVIDIA H200"}, None
    runner = object.__new__(lists.Run)
    runner.gpu, runner.result, runner.s, runner.save = True, made, lists.Settings(), lambda _: None
    made["rows"], made["crossing"], made["memory"] = [], [], []
    for (name, what), target in targets.TARGETS.items():
        shape = targets.SHAPES[name]
        for variant, us in (("ops", 0.95 * target.bar), (targets.GATHER, 3 * target.bar)):
            row = row_of(shape, what, variant)
            runner.add_figures(shape, row, timing.Timing([us] * 4), shape.queries * shape.entries)
            made["rows"].append(row)
    for name in targets.SHAPES:
        runner.compare(name)
    for kind in targets.WIDTHS.values():
        for tokens in targets.CROSSING_LENGTHS:
            for what in ("fwd", "fb"):
                shape = kind.of(tokens, tokens, 1, name=f"D = {kind.dim}")
                for n in targets.CROSSING_LISTS:
                    row = row_of(shape, what, "ops") | {"n": n}
                    runner.add_figures(shape, row, timing.Timing([float(n)] * 4), tokens * n)
                    made["crossing"].append(row)
                row = row_of(shape, what, targets.DENSE_CAUSAL) | {"n": tokens}
                runner.add_figures(shape, row, timing.Timing([tokens / 4 + 1] * 4), 0)
                made["crossing"].append(row)
    return made


def row_of(shape: Shape, what: str, variant: str) -> dict[str, Any]:
    row: dict[str, Any] = {"case": shape.name, "B": shape.batch, "S": shape.queries, "S_kv": shape.length}
    row |= {"h": shape.heads, "Dk": shape.dim, "Dv": shape.v_dim, "n": shape.entries, "shared": shape.shared}
    return row | {"dtype": "bfloat16", "what": what, "variant": variant, "finite": True}


# ---- targets, lists and the formula


def test_targets_are_in_order() -> None:
    for (name, what), t in targets.TARGETS.items():
        assert t.goal < t.bar and name in targets.SHAPES
        assert what == "fwd" or t.bar > targets.TARGETS[name, "fwd"].bar
    assert targets.SHAPES["B"].dim == 576 and targets.SHAPES["B"].v_dim == 512


def test_rates_of_the_published_bars() -> None:
    """Checks the counts of operations with the table's own rates: 340 TFLOP/s for A, 375 for B."""
    for name, want in (("A", 340), ("B", 375)):
        shape = targets.SHAPES[name]
        count = targets.operations(shape, shape.queries * shape.entries, "fwd")
        assert count / targets.TARGETS[name, "fwd"].bar / 1e6 == pytest.approx(want, rel=0.03)
    a = targets.A
    assert targets.operations(a, 10, "fb") == 3.5 * targets.operations(a, 10, "fwd")


@pytest.mark.parametrize("shape", [SHARED, APART, DECODE], ids=lambda s: s.name)
def test_lists_are_distinct_sorted_and_causal(shape: Shape) -> None:
    torch.manual_seed(0)
    found = lists_cases.lists(shape, CPU)
    assert found.shape == (shape.batch, shape.queries, 1, shape.entries) and found.dtype is torch.int32
    for b in range(shape.batch):
        for s in range(shape.queries):
            position = shape.keys - shape.queries + s
            keys = [int(i) for i in found[b, s, 0] if i >= 0]
            assert len(keys) == min(position + 1, shape.listed) and keys == sorted(set(keys))
            assert max(keys) <= position
            assert found[b, s, 0, len(keys) :].tolist() == [-1] * (shape.listed - len(keys))


def test_lists_of_a_window_and_pooled_keys() -> None:
    torch.manual_seed(0)
    found = lists_cases.lists(POOLED, CPU)[0, :, 0]
    for s, row in enumerate(found.tolist()):
        near, far = [i for i in row if 0 <= i < POOLED.keys], [i - POOLED.keys for i in row if i >= POOLED.keys]
        assert near == list(range(max(0, s - POOLED.window + 1), s + 1))
        complete = (s + 1) // targets.RATIO
        assert len(far) == min(POOLED.listed, complete) and all(0 <= i < complete for i in far)


def test_every_causal_key_is_drawn_alike() -> None:
    torch.manual_seed(0)
    reach = torch.full((4000,), 10)
    counts = lists_cases._drawn(reach, 16, 4).flatten().bincount(minlength=16)
    assert counts[10:].sum() == 0
    assert (counts[:10] / 1600.0 - 1).abs().max() < 0.1


@pytest.mark.parametrize("shape", EVERY, ids=lambda s: s.name)
def test_the_op_and_dense_attention_are_the_formula(shape: Shape) -> None:
    torch.manual_seed(0)
    case = lists_cases.make_case(shape, CPU, dtype=torch.float32)
    at = lists_cases.sample_of(shape.queries, 7, CPU)
    want = lists_cases.exact(case, at)
    got = lists_cases.picked(lists_cases.forward(case) | lists_cases.both(case, case.leaves()), at)
    assert got.keys() == want.keys() == {"o", "lse", "dq"}
    assert all(lists_cases.relative(got[k], want[k]) < 1e-6 for k in want)
    dense = lists_cases.dense_sampled(case, at)
    assert dense.keys() == {"o", "dq"}
    assert all(lists_cases.relative(dense[k], want[k]) < 1e-6 for k in dense)


@pytest.mark.parametrize("shape", EVERY, ids=lambda s: s.name)
def test_gradients_are_the_formulas(shape: Shape) -> None:
    torch.manual_seed(0)
    case = lists_cases.make_case(shape, CPU, dtype=torch.float32)
    want = lists_cases.dense_gradients(case, torch.float64)
    got, dense = lists_cases.both(case, case.leaves()), lists_cases.dense_gradients(case, torch.float32)
    names = {"o", "dq", "dk"} | ({"dv"} if not shape.shared else set()) | ({"dsink"} if shape.sink else set())
    assert got.keys() == want.keys() == dense.keys() == names
    assert all(lists_cases.relative(got[k], want[k]) < 2e-6 for k in want)
    assert all(lists_cases.relative(dense[k], want[k]) < 2e-6 for k in want)


@pytest.mark.parametrize("peer", ["masked", "ranges", "gather"])
@pytest.mark.parametrize("shape", EVERY, ids=lambda s: s.name)
def test_peers_compute_the_same(shape: Shape, peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists_peers, "compiled", uncompiled)
    torch.manual_seed(0)
    case = lists_cases.make_case(shape, CPU, dtype=torch.float32)
    want = lists_cases.both(case, case.leaves())
    make: Any = {
        "masked": lambda c, w: lists_peers.masked(c, w)[0],
        "ranges": lists_peers.ranges,
        "gather": lists_peers.compiled_gather,
    }[peer]
    forward, both = make(case, "fwd")(), make(case, "fb")()
    assert forward.keys() == {"o"} and lists_cases.relative(forward["o"], want["o"]) < 1e-5
    assert both.keys() == want.keys()
    assert all(lists_cases.relative(both[k], want[k]) < 1e-5 for k in want)


@pytest.mark.parametrize("shape", [SHARED, dataclasses.replace(APART, sink=False)], ids=lambda s: s.name)
def test_dense_peers_are_causal_attention(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists_peers, "compiled", uncompiled)
    lists_peers._causal.cache_clear()
    torch.manual_seed(0)
    n = 20
    case = lists_cases.make_case(shape.of(n, n, n), CPU, dtype=torch.float32)  # lists of all causal keys
    want = lists_cases.both(case, case.leaves())
    for call in (lists_peers.unmasked(case, "fb")[0], lists_peers.compiled_causal(case, "fb")):
        assert all(lists_cases.relative(t, want[k]) < 1e-5 for k, t in call().items())
    lists_peers._causal.cache_clear()


def test_torch_compile_takes_the_formula() -> None:
    torch.manual_seed(0)
    case = lists_cases.make_case(SHARED, CPU, dtype=torch.float32)
    got = lists_peers.compiled_gather(case, "fwd")()
    assert lists_cases.relative(got["o"], lists_cases.forward(case)["o"]) < 1e-5


# ---- a run


def test_a_run_has_every_part(result: dict[str, Any]) -> None:
    assert result["complete"] and result["operator"] == "lists" and result["notice"] == running.CPU_NOTICE
    assert set(result["skipped"]) == {"memory", targets.FLA}
    rows = {(r["case"], r["what"], r["variant"]) for r in result["rows"]}
    for name in targets.SHAPES:
        for what in ("fwd",) if name == "decode" else ("fwd", "fb"):
            for variant in ("ops", targets.RANGES, targets.GATHER, targets.DENSE_MASKED):
                assert (name, what, variant) in rows
    assert ("D", "fb", targets.DENSE_ALL) in rows
    assert [r for r in (*result["rows"], *result["crossing"]) if "error" in r or not r["finite"]] == []
    checked = [r for r in result["rows"] if r["variant"] not in lists.OTHER_KEYS]
    assert all(r["o_error"] < 5e-3 for r in checked)
    assert all(r["dq_error"] < 8e-3 for r in checked if r["what"] == "fb")
    ours = [r for r in result["rows"] if r["variant"] == "ops"]
    assert all({"times_masked", "times_gather", "times_ranges"} <= r.keys() for r in ours)
    kinds = {(r["case"], r["variant"]) for r in result["crossing"]}
    assert {c.partition(",")[0] for c, _ in kinds} == {"D = 128", "D = 512"}
    assert {v for _, v in kinds} == {"ops", targets.PLAIN, targets.DENSE_CAUSAL}


def test_errors_are_held_against_dense_attention(result: dict[str, Any]) -> None:
    assert {r["dtype"] for r in result["errors"]} == {"bfloat16", "float16", "float32"}
    found = [(r["case"], k, e) for r in result["errors"] for k, e in r["errors"].items() if k != "lse"]
    assert {k for _, k, _ in found} == {"o", "dq", "dk", "dv", "dsink"}
    assert all(e["met"] for _, _, e in found)
    assert {d["case"] for d in result["determinism"]} == set(targets.SHAPES)
    assert all(d["met"] for d in result["determinism"])


def test_a_wrong_result_misses_its_bar(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = lists_cases.both, []

    def wrong(*a: Any) -> Any:
        calls.append(a)
        return {k: t * (1.02 + len(calls)) for k, t in right(*a).items()}

    monkeypatch.setattr(lists_cases, "both", wrong)
    found = run(tmp_path / "x.json", parts=("errors",), shapes=("C",))
    assert not any(e["met"] for r in found["errors"] for k, e in r["errors"].items() if k.startswith("d"))
    assert found["determinism"][0]["differ"] == ["o", "dq", "dk", "dsink"] and not found["determinism"][0]["met"]


def test_failures_are_recorded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(lists_cases, "both", broken)
    monkeypatch.setattr(lists_peers, "ranges", broken)
    monkeypatch.setattr(lists_peers, "compiled", uncompiled)
    found = run(tmp_path / "x.json", parts=("speed", "errors", "peers"), shapes=("A",))
    assert found["skipped"]["errors"] == "RuntimeError: no such kernel" and found["complete"]
    failed = {(r["what"], r["variant"]) for r in found["rows"] if "error" in r}
    assert failed == {("fb", "ops"), ("fwd", targets.RANGES), ("fb", targets.RANGES)}


def test_a_spent_budget_leaves_peers_out(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path / "x.json", parts=("speed", "peers", "crossing"), shapes=("A",), budget_s=0.0)
    assert {r["variant"] for r in found["rows"]} == {"ops"} and found["crossing"] == []
    assert {f"{targets.GATHER}, A, fwd", "crossing, D = 512, 64"} <= found["skipped"].keys()


def test_a_very_long_call_of_a_peer_is_timed_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists_peers, "compiled", uncompiled)
    monkeypatch.setattr(lists, "LONG_US", 1.0)
    found = run(tmp_path / "x.json", parts=("speed", "peers"), shapes=("A",))
    assert all((r["rounds"] == 4) is (r["variant"] == "ops") for r in found["rows"])
    peers = [r for r in found["rows"] if r["variant"] != "ops"]
    assert all(r["rounds"] == 1 and r["captured"] is False and r["finite"] for r in peers) and len(peers) == 8
    assert "called, not replayed" in lists.table(found)


def test_a_cut_run_leaves_what_it_measured(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lists.Run, "errors", cut)
    path = tmp_path / "lists.json"
    with pytest.raises(KeyboardInterrupt):
        run(path, shapes=("A", "decode"))
    found = json.loads(path.read_text())
    assert not found["complete"] and len(found["rows"]) == 3
    assert "this run did not come to its end" in lists.table(found)
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(lists_warm, "side_by_side", lambda jobs: seen.update(jobs))
    lists_warm.warm(("A", "decode"), lists.PARTS)
    assert {"A", "decode", "ranges, A", "crossing, D = 512", "A, torch.float16"} <= seen.keys()
    assert not {"B", "D, torch.float16"} & seen.keys()
    seen.clear()
    lists_warm.warm(("A",), ("speed",))
    assert seen.keys() == {"A"}


# ---- tables and plots


def test_tables_are_whole(result: dict[str, Any], on_h200: dict[str, Any]) -> None:
    for made in (result, on_h200):
        for block in lists.table(made).split("\n\n"):
            if block.startswith("|"):
                assert len({line.count("|") for line in block.splitlines()}) == 1
    assert running.CPU_NOTICE in lists.table(result) and "skipped: memory: " in lists.table(result)


def test_table_of_an_h200_run_marks_every_bar(on_h200: dict[str, Any]) -> None:
    made = [[c.strip() for c in line.split("|")[1:-1]] for line in lists.table(on_h200).splitlines()]
    line = next(x for x in made if x[:1] == ["A"] and x[6:8] == ["forward", "mhc_inductor, ops"])
    assert line[:6] == ["A", "4096", "16384", "64", "512 / 512 in K", "2048"]
    assert line[8] == "3.04 ms" and line[10:14] == ["362", "3.2 ms", "2 ms", "met"] and line[15] == "3.16"
    line = next(x for x in made if x[:1] == ["decode"])
    assert line[8] == "28.5 µs" and line[11:14] == ["30 µs", "20 µs", "met"] and "FlashMLA" in line[-1]
    assert "bars that are" not in lists.table(on_h200)
    on_h200["rows"][0]["met_bar"] = False
    assert "- bars that are **not met**: A, forward\n" in lists.table(on_h200)


def test_where_lists_pass_dense_attention(on_h200: dict[str, Any]) -> None:
    points = [(128, 1.0), (256, 2.0), (512, 4.0)]
    for dense, want in ((0.5, None), (1.0, None), (3.0, 384), (5.0, 512)):
        at = lists_report.break_even(points, dense)
        assert at is None if want is None else at == pytest.approx(want, rel=0.06)
    assert lists_report.break_even([], 1.0) is None
    _title, headings, rows = lists_report.crossing_section(on_h200)
    line = next(r for r in rows if r[0] == "D = 512" and r[1:3] == ["forward", "8192"])
    assert dict(zip(headings, line, strict=True))["lists are faster up to n"] == "2,049"


def test_pictures(result: dict[str, Any], on_h200: dict[str, Any], tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    for name, made in {"cpu": result, "h200": on_h200}.items():
        path = tmp_path / f"{name}.png"
        lists_report.plot(made, path)
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    lists_report.plot({**result, "crossing": []}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


# ---- the command line


def test_command_line(tmp_path: pathlib.Path) -> None:
    words = ["--only", "A,decode", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    done = CliRunner().invoke(cli.app, ["lists", *words])
    assert done.exit_code == 0, done.output
    path = tmp_path / "lists-cpu-partial.json"  # a partial run never gets the file name of a full run
    stored = json.loads(path.read_text())
    assert stored["settings"]["parts"] == list(lists.QUICK_PARTS) and stored["settings"]["shapes"] == ["A", "decode"]
    assert path.with_suffix(".md").read_text() == lists.table(stored)
    shown = CliRunner().invoke(cli.app, ["table", str(path)])
    assert shown.output == lists.table(stored)


def test_unknown_words_are_refused(tmp_path: pathlib.Path) -> None:
    done = CliRunner().invoke(cli.app, ["lists", "--only", "E", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert list(tmp_path.iterdir()) == []


# ---- the pages


def test_the_pages_block(on_h200: dict[str, Any]) -> None:
    block = pages.BLOCKS["lists"](lambda name: on_h200)
    assert "| 3.04 / 19 |" in block and "../../benchmarks/results/lists.png" in block and "NVIDIA H200" in block
    assert "| D = 512 | forward | 8192 | 2.05 | 2,049 |" in block

    def none(name: str) -> dict[str, Any]:
        raise FileNotFoundError(name)

    assert pages.BLOCKS["lists"](none) == pages.NOT_MEASURED


def test_the_committed_bars_are_checked(on_h200: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Checks that a run's file passes the check of committed results, whatever its rows are called."""
    path = tmp_path / "lists.json"
    running.save(on_h200, path)
    assert test_results.unmet(tmp_path) == []
    row = next(r for r in on_h200["rows"] if (r["case"], r["what"], r["variant"]) == ("B", "fb", "ops"))
    row |= {"median_us": 1e6, "met_bar": False, "met_goal": False}
    running.save(on_h200, path)
    assert [line.partition(":")[0] for line in test_results.unmet(tmp_path)] == ["lists.json B, fb"]
