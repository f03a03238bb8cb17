# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: a toy run's fields, tables, pictures and commands, and what follows from committed results."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import pathlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from benchmarks import __main__ as cli
from benchmarks import (
    deepseek_model,
    e79_cases,
    index_cases,
    lists_cases,
    mhc_cases,
    report,
    rule,
    selection,
    selection_cases,
    timing,
)
from benchmarks.lists_cases import mask_of
from benchmarks.multi_gpu.training import POLICIES
from benchmarks.pages import read
from benchmarks.source_hash import source_hash
from tests.test_results import BARS
from tests.tools import toy_runs

pytestmark = pytest.mark.usefixtures("one_thread")
Row = dict[str, Any]
PAGES = toy_runs.pages()
KEPT = ("deepseek_v4", "sparse_models", "ways")
SPARSE, MANY = "deepseek_v32,2x32-training", "weak.scaling,context.parallel"
TARGETS: dict[str, Any] = {"mhc": mhc_cases, "e79": e79_cases, "index": index_cases}
TARGETS |= {"lists": lists_cases, "selection": selection_cases}


def of(name: str, *rest: Any) -> Any:
    """Returns a case that runs where the other tests of its family do, which read the same toy run."""
    group = f"benchmarks_{name}" if name in ("lists", "selection") else "benchmarks"
    words = (name, *(word for word in rest[:1] if isinstance(word, str)))
    return pytest.param(name, *rest, marks=pytest.mark.xdist_group(group), id="-".join(words))


every_family = pytest.mark.parametrize("name", [of(name) for name in TARGETS])


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


# ---- a toy run


@every_family
def test_a_run_has_every_part(name: str) -> None:
    made, shape = toy_runs.whole(name), toy_runs.SETTINGS[name]
    assert made["complete"] and made["operator"] == name and made["notice"] == module(name).Run.notice
    assert made["kernel_sources_sha256"] == source_hash() and made["versions"]["torch"] == torch.__version__
    assert made["settings"]["seed"] == shape["seed"]
    # Small shapes have no 576 columns, so that nothing is said of TileLang.
    skipped = {words.partition(",")[0] for words in made["skipped"]}
    assert {"memory"} <= skipped <= {"memory", lists_cases.FLA}
    for row in (r for rows in made.values() if isinstance(rows, list) for r in rows):
        assert "error" not in row and "met_bar" not in row, "absolute bars count on an H200 only"
        assert all(row.get(k, True) for k in ("finite", "correct", "met")), row
        assert all(e.get("met", True) for e in row.get("errors", {}).values()), row
        assert row.get("o_error", 0) < 5e-3 and row.get("dq_error", 0) < 8e-3, row
        if "median_us" in row:
            assert row["q1_us"] <= row["median_us"] <= row["q3_us"]
            assert len(row["samples_us"]) == row["rounds"] == shape["rounds"]


OTHERS = ("rows", "crossing", "errors", "determinism", "memory", "layers", "union")


@pytest.mark.parametrize(
    ("name", "result", "lists", "differ"),
    [
        of("mhc", "mhc", ("memory",), {}),
        of("e79", "e79", ("memory", "cpu", "rollup"), {}),
        of("e79", "e79-cpu", (*toy_runs.PARTS["e79"]["parts"][:-1], "rows", "rollup"), {}),
        of("index", "index", ("memory",), {}),
        of("lists", "lists", ("memory",), {}),
        of("selection", "selection", ("memory", "cpu", "cpu_dense", "cpu_errors"), {}),
        of("selection", "selection-cpu", OTHERS, {}),
    ],
)
def test_a_run_has_the_fields_of_the_committed_result(name: str, result: str, lists: Any, differ: Row) -> None:
    assert toy_runs.unlike(toy_runs.whole(name), result, *lists) == differ


@every_family
def test_tables_are_whole(name: str) -> None:
    """Every line of a table has as many cells as its heading."""
    toy = toy_runs.whole(name)
    made = module(name).table(toy)
    for text in (made, PAGES[name].with_suffix(".md").read_text()):
        for block in text.split("\n\n"):
            if block.startswith("|"):
                assert len({line.count("|") for line in block.splitlines()}) == 1
    assert toy["notice"] in made and "skipped: memory: " in made


@every_family
def test_pictures(name: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = {"index": 0, "selection": 2}.get(name, 1)
    for made in (toy_runs.whole(name), read(name)):
        path = tmp_path / f"{made['device']['type']}.json"
        module(name).write(made, path)
        assert json.loads(path.read_text()) == made and path.with_suffix(".md").read_text() == module(name).table(made)
        drawn = [*tmp_path.glob(f"{path.stem}*.png")]
        assert len(drawn) == pictures and all(f.read_bytes().startswith(b"\x89PNG") for f in drawn)
        assert all(f.stat().st_size > 10_000 for f in drawn)
    untimed = {**read(name), **{key: [] for key in ("rows", "cpu", "crossing")}}
    module(name).write(untimed, tmp_path / "untimed.json")
    assert not [*tmp_path.glob("untimed*.png")]


@pytest.mark.parametrize(
    ("name", "broken", "parts", "failed"),
    [
        of("mhc", "mhc_calls.ops_post", ("4096", "npu", "determinism"), {("post", "ops"), ("fb", "ops")}),
        of("e79", "e79_cases.both", ("speed", "determinism"), {("fb", "ops"), ("fb", e79_cases.EAGER)}),
        of("selection", "attention.Case.both", ("cpu", "errors"), {("fb", "ops")}),
        of("lists", "attention.Case.both", ("speed", "errors"), {("fb", "ops")}),
        of("lists", "lists_peers.ranges", ("peers",), {(w, lists_cases.RANGES) for w in ("fwd", "fb")}),
    ],
)
def test_a_failure_costs_a_row_or_a_part(
    name: str, broken: str, parts: tuple[str, ...], failed: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(f"benchmarks.{broken}", fail)
    monkeypatch.setattr("benchmarks.lists_peers.compiled", toy_runs.uncompiled)
    made = toy_runs.run(name, parts=parts, **({"shapes": ("A",)} if name == "lists" else {}))
    rows = [*made["rows"], *made.get("cpu", ()), *made.get("peers", ())]
    assert {(r["what"], r["variant"]) for r in rows if "error" in r} == failed
    assert all(("median_us" in r) is ("error" not in r) for r in rows)
    assert {r["error"] for r in rows if "error" in r} == {"RuntimeError: no such kernel"}
    whole = {p: "RuntimeError: no such kernel" for p in parts if p in ("determinism", "errors")}
    assert made["skipped"].items() >= whole.items()
    text = module(name).table(made)
    assert not made["rows"] or "failed: RuntimeError: no such kernel" in text
    assert made["complete"] is not bool(whole)
    assert made["complete"] or report.NOT_COMPLETE in text


@pytest.mark.parametrize(
    ("name", "changes", "parts", "memory"),
    [
        of("mhc", {"peers": True}, ("decode", "memory"), ["ops", "eager"]),
        of("e79", {}, ("decode", "determinism", "memory"), ["ops"]),
        of("lists", {"shapes": ("A", "decode")}, ("memory",), ["A, fwd", "A, fb", "decode, fwd"]),
        of("index", {}, ("memory",), ["64 heads", "131072 tokens", "64 heads, loss with gradients"]),
    ],
)
def test_parts_of_a_gpu(
    name: str, changes: Row, parts: tuple[str, ...], memory: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks what only a GPU's run adds, on a CPU that is taken for one: chains, a sequence alone, memory."""
    found = {"peak_above_mb": 600.0, "met_bar": True}
    monkeypatch.setattr("benchmarks.running.peak_memory", lambda call, *_: found | {"outputs": len(call())})
    runner = module(name).Run(toy_runs.settings(name, parts=parts, **changes), lambda _: None, lambda _: None)
    runner.gpu = True
    for part in parts:
        runner.part(part)
    assert runner.result["skipped"].keys() <= {lists_cases.FLA}
    rows = runner.result["memory"]
    assert [r.get("name") or r.get("variant") or f"{r['case']}, {r['what']}" for r in rows] == memory
    assert all(r["peak_above_mb"] == 600 and (r["outputs"] == 6 if name == "e79" else r["outputs"] > 0) for r in rows)
    assert not any(r.get("met_goal") for r in rows)
    assert all(("met_bar" in r) is (name != "lists") and r.get("formula_mb", 1) > 0 for r in rows)
    ours = [r for r in runner.result.get("decode", ()) if r["variant"].startswith("ops")]
    assert {r["variant"] for r in ours} == ({"ops", "ops, chain of 20"} if "decode" in parts else set())
    assert all(r["median_us"] > 0 and ("errors" in r) is (r["variant"] == "ops") for r in ours)
    if "determinism" in parts:
        assert [d["check"] for d in runner.result["determinism"]] == ["two runs", "one sequence alone"]
        assert all(d["met"] for d in runner.result["determinism"])


@pytest.mark.parametrize(
    ("name", "tensor", "place"),
    [of("mhc", "dphi", "12 tokens, D = 48"), of("e79", "dkvqm", "n = 6, B = 3, T = 5")],
)
def test_wrong_outputs_are_listed(name: str, tensor: str, place: str) -> None:
    made = toy_runs.whole(name)
    assert "meet their bars" in module(name).table(made)
    next(r for r in made["rows"] if (r["what"], r["variant"]) == ("fb", "ops"))["errors"][tensor]["met"] = False
    lines = module(name).table(made).partition("## Outputs of the timed calls\n\n")[2].splitlines()
    assert lines == [f"- fb ops at {place}: {tensor}"]


@pytest.mark.parametrize(
    ("name", "what", "size", "here", "apart"),
    [
        of("mhc", "fb", 4096, mhc_cases.COMPILE, "TileKernels"),
        of("e79", "fwd", 64, e79_cases.EAGER, e79_cases.AUTHORS),
    ],
)
def test_times_of_this_run_replace_separate_ones(name: str, what: str, size: int, here: str, apart: str) -> None:
    found = {b.name: b for b in module(name).bars(read(name), what, size)}
    assert next(iter(found)) == "mhc_inductor, ops"
    peers = TARGETS[name].TARGETS[what, size].peers
    assert not found[here].separate and found[here].us != peers[here]
    assert found[apart].separate and found[apart].us == peers[apart]


@pytest.mark.parametrize(
    ("field", "row", "text"),
    [
        ("peak", {"error": "OutOfMemoryError: no\nmore"}, "failed: OutOfMemoryError: no"),
        ("peak_bar", {"error": "OutOfMemoryError: no\nmore"}, ""),
        ("verdict", {"met_bar": True, "met_goal": True}, "goal met"),
        ("verdict", {"met_bar": True, "met_goal": False}, "met"),
        ("verdict", {"met_bar": False, "met_goal": False}, "**not met**"),
        ("verdict", {}, ""),
    ],
)
def test_what_a_cell_says(field: str, row: Row, text: str) -> None:
    assert report.FIELDS[field](row) == text


# ---- the command line


@pytest.mark.parametrize(
    ("name", "words", "right"),
    [
        of(
            "mhc",
            "--rows 2560,determinism --rounds 2 --no-compiled",
            lambda r: {row["dim"] for row in r["rows"]} == {48} and "nothing of a GPU" in r["notice"],
        ),
        of(
            "e79",
            "--part cpu,accuracy --rounds 2 --small --no-compiled",
            lambda r: r["cpu"] and r["accuracy"] and not r["rows"],
        ),
        of("selection", "--part cpu --rounds 4 --small", lambda r: r["cpu"] and not r["rows"]),
        of(
            "lists",
            "--only A,decode --quick",
            lambda r: (r["settings"]["parts"], r["settings"]["shapes"]) == (["speed", "errors"], ["A", "decode"]),
        ),
        of(
            "index",
            "--quick --rounds 4",
            lambda r: {w["variant"] for w in r["rows"]} == {"ops", index_cases.TORCH_TOPK},
        ),
    ],
)
def test_command_line(name: str, words: str, right: Callable[[Row], bool], tmp_path: pathlib.Path) -> None:
    done = CliRunner().invoke(cli.app, [name, *words.split(), "--device", "cpu", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    path = tmp_path / f"{name}-cpu-partial.json"  # a partial run never gets the file name of a full GPU run
    stored = json.loads(path.read_text())
    assert right(stored)
    assert path.with_suffix(".md").read_text() == module(name).table(stored)
    assert path.with_suffix(".png").exists() is (name not in ("index", "lists"))
    shown = CliRunner().invoke(cli.app, ["table", str(path)])
    assert shown.output == module(name).table(stored)


def _rule(found: Row) -> bool:
    sides = {(side, what) for side in (rule.DENSE, "ops", rule.PRODUCTS, rule.WRITTEN) for what in ("fwd", "fb")}
    named = {(r["variant"], r["what"]) for r in found["rows"]} == sides | {("torch", "product")}
    return named and found["complete"] and not found["skipped"] and all(r["finite"] for r in found["rows"])


def _routing(found: Row) -> bool:
    ops = [{"mhc_pre": 2 * n, "mhc_post": 2 * n, "mhc_head": 1} for n in (1, 2)]
    timed = all(0 < r["cpu_seconds"] <= r["seconds"] + 0.1 and r["dynamo_seconds"] > 0 for r in found["rows"])
    return timed and [r["routed"] for r in found["rows"]] == ops and not any(r["problems"] for r in found["rows"])


def _deepseek(found: Row) -> bool:
    return found["settings"]["size"] == dataclasses.asdict(deepseek_model.TINY) and found["verdicts"] == []


def _sparse(found: Row) -> bool:
    (row,) = found["rows"]
    return row["variant"] == "eager" and row["error_logits"] == 0 and found["verdicts"] == []


def _ways(found: Row) -> bool:
    (row,) = (r for r in found["rows"] if r["status"] != "not run")
    assert row["graphs"] == 1 and row["routed"] == {"e79_scan": 1}
    assert row["from fp32"]["median token"] <= 2 * row["eager from fp32"]["median token"] + 2**-8
    return (row["model"], row["way"], row["status"]) == ("e79", "forward", "right")


def _many(found: Row) -> bool:
    scaling, death = found["jobs"]
    rows, counted = {r["variant"]: r for r in scaling["found"]["rows"]}, scaling["found"]["counters"]
    assert rows["one rank"]["ratio"] == 1 and rows.keys() == {"one rank", "all ranks, no messages", *POLICIES, "DDP"}
    for row in rows.values():
        assert row["tokens_a_second_a_rank"] == pytest.approx(16e3 / row["median_ms"])
    # One graph of the attentions' connections and one of the MLPs'; models may share them.
    assert counted["routed mhc_pre"] == counted["routed mhc_post"] in (2, 4, 6), counted
    assert [p["code"] for p in death["processes"]] == [0, 17] and "Error" in death["found"][0]["raised"]
    return bool(found["complete"] and found["backend"] == "gloo" and len(found["kernel_sources_sha256"]) == 64)


@pytest.mark.parametrize(
    ("name", "words", "stem", "right"),
    [
        ("rule", "--rounds 4", "rule-cpu", _rule),
        ("routing", "--layers 1,2 --compiled 0", "routing", _routing),
        ("deepseek_v4", "--variant eager --part training --rounds 2", "deepseek_v4-tiny-partial", _deepseek),
        ("sparse_models", f"--only {SPARSE} --variant eager --rounds 2", "sparse_models-toy-partial", _sparse),
        ("ways", "--only e79:.forward --jobs 1", "ways-toy", _ways),
        ("multi_gpu", f"--only {MANY} --parts scaling,failures", "multi_gpu-toy-partial", _many),
    ],
    ids=("rule", "routing", *KEPT, "multi_gpu"),
)
@pytest.mark.timeout(200)
def test_a_toy_run_has_the_fields_of_the_committed_result(
    name: str, words: str, stem: str, right: Callable[[Row], bool], tmp_path: pathlib.Path
) -> None:
    """Whole models, several GPUs and the pass, by their commands: rows, page, and the fields of the committed result."""
    folders = ["--out", str(tmp_path)] + (["--keep", str(tmp_path / "kept")] if name in KEPT else [])
    done = CliRunner().invoke(
        cli.app, [name, *(w.replace(".", " ") for w in words.split()), "--device", "cpu", *folders]
    )
    assert done.exit_code == (1 if name == "ways" else 0), done.output  # 1: cells were not run
    path = tmp_path / f"{stem}.json"  # a part of a run, or a toy, never has the name of a whole one
    found = json.loads(path.read_text())
    assert right(found)
    assert path.with_suffix(".md").read_text() == module(name).table(found)
    assert name == "routing" or "not representative" in done.output or name == "deepseek_v4"
    if name == "ways":
        found["rows"] = [r for r in found["rows"] if r["status"] != "not run"]
    assert toy_runs.unlike(found, name) == {}
    shown = CliRunner().invoke(cli.app, ["table", str(path)])
    assert shown.output == path.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    "words",
    [
        *("mhc --rows 5000", "e79 --part gpu", "selection --part gpu", "lists --only E", "index --only gpu"),
        *("rule --only gpu", "deepseek_v4 --variant fast", "sparse_models --toy --only gpt", "ways --only gpt"),
    ],
)
def test_unknown_words_are_refused(words: str, tmp_path: pathlib.Path) -> None:
    done = CliRunner().invoke(cli.app, [*words.split(), "--device", "cpu", "--out", str(tmp_path)])
    assert done.exit_code == 2 and list(tmp_path.iterdir()) == []


# ---- what follows from committed results


@every_family
def test_targets_are_in_order(name: str) -> None:
    targets = TARGETS[name].TARGETS
    for key, t in targets.items():
        assert t.goal < t.bar
        forward = tuple("fwd" if word == "fb" else word for word in key)
        if name != "mhc":  # whose bars are between its floors and its peers
            assert t.bar < min((t.peers or {}).values(), default=float("inf"))
            assert forward == key or t.bar > targets[forward].bar
    for row in BARS.get(name, ()):  # what the committed rows are called
        assert row in {f"{r.get('case', r.get('name'))}, {r['what']}" for r in toy_runs.whole(name)["rows"]}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_of_a_result_is_its_table(name: str) -> None:
    result = read(name)
    assert module(result.get("operator", name)).table(result) == PAGES[name].with_suffix(".md").read_text(), (
        f"run python -m benchmarks table {PAGES[name]} --write"
    )


TIMES = ("median_us", "q1_us", "q3_us", "rounds", "samples_us")
DERIVED = (
    *("bar_us", "goal_us", "measured_separately_us", "met_bar", "met_goal", "median_ms", "tflops", "published"),
    *("ratio_to_floor", "not_slower_than_best_peer", "beyond_scores_us", "times_compiled"),
    *selection.TIMES.values(),
)


def _pairs(row: Row) -> int:
    """Returns how many keys all queries of a committed row of lists have together."""
    s = lists_cases.SHAPES[row["case"]]
    reach = range(s.keys - s.queries + 1, s.keys + 1)
    if not s.pooled:
        return s.batch * sum(min(s.listed, n) for n in reach)
    return s.batch * sum(min(s.window, n) + min(s.listed, n // lists_cases.RATIO) for n in reach)


def _figures(name: str, runner: Any, row: Row, t: timing.Timing) -> None:
    """Adds to a row what the run's own code makes of its time."""
    if name == "mhc":
        case = types.SimpleNamespace(x=torch.empty(row["tokens"], 4, row["dim"], device="meta"))
        row |= module(name).row_header(
            module(name).Variant(row["what"], row["variant"], lambda: lambda: None, case=case)
        )
        row |= module(name)._figures(row, t, runner.bars_apply)
    elif name == "e79":
        runner.add_figures(row, t)
    elif name == "selection":
        shape = types.SimpleNamespace(name=row["case"])
        runner.add_figures(types.SimpleNamespace(shape=shape, select=row["select"]), row, t)
    elif name == "lists":
        runner.add_figures(lists_cases.SHAPES[row["case"]], _pairs(row), row, t)
        runner.add_published(row)
    else:
        runner.add_figures(next(s for s in index_cases.SHAPES if s.name == row["name"]), row, t)


@every_family
def test_bars_rates_and_ratios_follow_from_the_committed_times(name: str) -> None:
    """Takes them out of an H200's rows, and has the run's own code put them in again."""
    want, runner = read(name), object.__new__(module(name).Run)
    made = copy.deepcopy(want)
    runner.gpu, runner.result, runner.s, runner.dense_us = True, made, module(name).Settings(), {}
    for row in made["rows"]:
        times = {k: row[k] for k in TIMES}
        for k in DERIVED:
            row.pop(k, None)
        _figures(name, runner, row, timing.Timing([row["median_us"] * (row["T"] if name == "e79" else 1)]))
        row |= times
    groups = dict.fromkeys((r["case"], r["select"]) if name == "selection" else r.get("name") for r in made["rows"])
    for group in groups if name in ("selection", "index") else ():
        if name == "index":
            runner.compare(group)
        else:
            shape = types.SimpleNamespace(name=group[0])
            rows = [r for r in made["rows"] if (r["case"], r["select"]) == group]
            runner.compare(types.SimpleNamespace(shape=shape), rows)
    assert made["rows"] == want["rows"]
    assert any(r.get("met_bar") for r in want["rows"])


# ---- the rule


def test_both_sides_are_one_attention() -> None:
    torch.manual_seed(0)
    layer = rule.SMALL[0]
    leaves = {k: t.detach().float().requires_grad_() for k, t in layer.leaves(torch.device("cpu")).items()}
    indices = layer.indices(torch.device("cpu"))
    seen = indices >= 0
    at = torch.arange(layer.tokens)
    assert bool((indices[seen] <= at[None, :, None].expand_as(indices)[seen]).all()), "a query sees later keys"
    assert torch.equal(seen.sum(-1)[0], (at + 1).clamp(max=layer.selected))
    sides = (layer.dense(leaves, mask_of(indices, layer.tokens)[:, None]), layer.lists(leaves, indices))
    grad = torch.randn_like(sides[0])
    kept = read("rule")
    assert kept["complete"] and not kept["settings"]["small"] and max(r.get("differ", 0) for r in kept["rows"]) < 0.01
    for a, b in zip(*([o, *torch.autograd.grad(o, list(leaves.values()), grad)] for o in sides), strict=True):
        assert float((a - b).norm() / a.norm()) < 1e-5
