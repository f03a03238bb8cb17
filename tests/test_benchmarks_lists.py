# SPDX-License-Identifier: Apache-2.0
"""The benchmark of attention over lists of keys: its inputs and formula, its outputs on a CPU, its tables and plots."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import pathlib
import pickle
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from benchmarks import __main__ as cli
from benchmarks import lists, lists_peers, pages, report, running, timing, variants
from benchmarks import lists_cases as cases
from benchmarks.accuracy import relative
from benchmarks.lists_cases import Shape
from tests import test_results
from tests.tools import toy_runs
from tests.tools.toy_runs import uncompiled

CPU = torch.device("cpu")
# The shapes are tiny, and one worker makes the run that most tests read.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("benchmarks_lists")]
SHARED = Shape("shared", 12, 20, 3, 12, 8, 5)
APART = Shape("apart", 20, 20, 2, 8, 8, 7, shared=False, sink=True)
POOLED = cases.C.small()
DECODE = cases.DECODE.small()
run = functools.partial(toy_runs.run, "lists")


@pytest.fixture
def result() -> dict[str, Any]:
    return toy_runs.whole("lists")


@pytest.fixture
def on_h200() -> dict[str, Any]:
    """Returns the committed result as if all of it were of one run."""
    found = pages.read("lists")
    found.pop("origins", None)
    return found


# ---- targets, lists and the formula


def test_rates_of_the_published_bars() -> None:
    """Checks the counts of operations with the table's own rates: 340 TFLOP/s for A, 375 for B."""
    for name, want in (("A", 340), ("B", 375)):
        shape = cases.SHAPES[name]
        count = cases.operations(shape, shape.queries * shape.entries, "fwd")
        assert count / cases.TARGETS[name, "fwd"].bar / 1e6 == pytest.approx(want, rel=0.03)
    a = cases.A
    assert cases.operations(a, 10, "fb") == 3.5 * cases.operations(a, 10, "fwd")


@pytest.mark.parametrize("shape", [SHARED, APART, DECODE], ids=lambda s: s.name)
def test_lists_are_distinct_sorted_and_causal(shape: Shape) -> None:
    torch.manual_seed(0)
    found = cases.lists(shape, CPU)
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
    found = cases.lists(POOLED, CPU)[0, :, 0]
    for s, row in enumerate(found.tolist()):
        near, far = [i for i in row if 0 <= i < POOLED.keys], [i - POOLED.keys for i in row if i >= POOLED.keys]
        assert near == list(range(max(0, s - POOLED.window + 1), s + 1))
        complete = (s + 1) // cases.RATIO
        assert len(far) == min(POOLED.listed, complete) and all(0 <= i < complete for i in far)


def test_every_causal_key_is_drawn_alike() -> None:
    torch.manual_seed(0)
    reach = torch.full((4000,), 10)
    counts = cases.drawn(reach, 16, 4).flatten().bincount(minlength=16)
    assert counts[10:].sum() == 0
    assert (counts[:10] / 1600.0 - 1).abs().max() < 0.1


@pytest.mark.parametrize("shape", [SHARED, dataclasses.replace(APART, sink=False)], ids=lambda s: s.name)
def test_dense_peers_are_causal_attention(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists_peers, "compiled", uncompiled)
    torch.manual_seed(0)
    n = 20
    case = cases.make_case(shape.of(n, n, n), CPU, dtype=torch.float32)  # lists of all causal keys
    want = case.both(case.leaves())
    for name in (cases.DENSE_CAUSAL, cases.DENSE_ALL, cases.PLAIN):
        call, _ = lists_peers.make(name, case, "fb")
        assert all(relative(t, want[k]) < 1e-5 for k, t in call().items())


EXAMPLE = """
import torch

def sparse_mla_fwd(batch, tokens, length, heads, dim, tail, topk, stride, groups, scale, causal, from_zero):
    assert (stride, groups, scale, causal, from_zero) == (1, 1, None, True, False)

    def kernel(q, kv, indices, first):
        assert q.shape == (batch, tokens, heads, dim + tail) and kv.shape == (batch, length, 1, dim + tail)
        assert indices.shape == (batch, tokens, 1, topk) and indices.dtype == first.dtype == torch.int32
        seen = indices[:, :, 0] <= first + torch.arange(tokens)[:, None]
        at = torch.where(seen, indices[:, :, 0], 0).long()
        keys = kv[:, :, 0][torch.arange(batch)[:, None, None], at]
        s = (q @ keys.mT * q.shape[-1] ** -0.5).masked_fill(~seen[:, :, None], float("-inf"))
        return s.softmax(-1) @ keys[..., :dim], s.logsumexp(-1)

    return kernel
"""


@pytest.mark.parametrize(
    ("peer", "shape"), [(cases.TILELANG, SHARED), (cases.TILELANG, DECODE), (cases.GATHER, SHARED)], ids=str
)
def test_tilelangs_example_and_torch_compile_compute_the_formula(
    peer: str, shape: Shape, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "example.py").write_text(EXAMPLE)
    monkeypatch.setenv(lists_peers.EXAMPLE, str(tmp_path / "example.py"))
    lists_peers._example.cache_clear()
    torch.manual_seed(0)
    case = cases.make_case(shape, CPU, dtype=torch.float32)
    got = lists_peers.make(peer, case, "fwd")[0]()
    assert relative(got["o"], case.forward()["o"]) < 1e-5
    lists_peers._example.cache_clear()


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cases.B.packages("fwd") == cases.DECODE.packages("fwd") == (cases.TILELANG,)
    assert cases.C.packages("fb") == (cases.ATTN_GYM,) and not cases.A.packages("fwd") + cases.B.packages("fb")
    assert lists_peers.missing(cases.ATTN_GYM) is None
    monkeypatch.setattr(lists_peers.importlib.util, "find_spec", lambda name: None)
    assert lists_peers.missing(cases.TILELANG) == "not installed: pip install tilelang"
    monkeypatch.undo()
    monkeypatch.setattr(lists_peers.importlib.util, "find_spec", lambda name: name)
    monkeypatch.delenv(lists_peers.EXAMPLE, raising=False)
    assert lists_peers.EXAMPLE in str(lists_peers.missing(cases.TILELANG))


def test_a_first_call_that_does_not_end_costs_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.make_case(POOLED, CPU)
    monkeypatch.setattr(lists_peers, "_failed", {})
    monkeypatch.setattr(lists_peers, "FIRST_CALL_S", 0.01)
    with pytest.raises(RuntimeError, match="did not finish its first call in 0 s"):
        lists_peers.first_call(cases.ATTN_GYM, case, "fwd")
    monkeypatch.setattr(lists_peers, "FIRST_CALL_S", 60)
    with pytest.raises(RuntimeError, match="did not finish"):  # and is not waited for again
        lists_peers.first_call(cases.ATTN_GYM, case, "fb")
    with pytest.raises(RuntimeError, match="its first call failed: "):
        lists_peers.first_call("no package", case, "fwd")


# ---- a run


def test_what_a_run_holds(result: dict[str, Any]) -> None:
    rows = {(r["case"], r["what"], r["variant"]) for r in result["peers"]}
    assert {("D", "fb", cases.DENSE_ALL), ("C", "fb", cases.ATTN_GYM)} <= rows
    kinds = {(r["case"].partition(",")[0], r["variant"]) for r in result["crossing"]}
    assert {c for c, _ in kinds} == {"D = 128", "D = 512"}
    assert {v for _, v in kinds} == {"ops", cases.PLAIN, cases.DENSE_CAUSAL}
    assert {r["dtype"] for r in result["errors"]} == {"bfloat16", "float16", "float32"}
    assert {d["case"] for d in result["determinism"]} == set(cases.SHAPES)


def test_a_wrong_result_misses_its_bar(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = cases.Case.both, []

    def wrong(*a: Any) -> Any:
        calls.append(a)
        return {k: t * (1.02 + len(calls)) for k, t in right(*a).items()}

    monkeypatch.setattr(cases.Case, "both", wrong)
    found = run(tmp_path / "x.json", parts=("errors",), shapes=("C",))
    assert not any(e["met"] for r in found["errors"] for k, e in r["errors"].items() if k.startswith("d"))
    assert found["determinism"][0]["differ"] == ["o", "dq", "dk", "dsink"] and not found["determinism"][0]["met"]


def test_a_spent_budget_leaves_peers_out(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path / "x.json", parts=("speed", "peers", "crossing"), shapes=("A",), budget_s=0.0)
    assert all("median_us" in r for r in found["rows"]) and not found["complete"]
    left = found["peers"] + found["crossing"]
    assert {r["reason"] for r in left} == {running.SPENT} and not any("median_us" in r for r in left)
    # As many cells as a run with time has: four of torch.compile, SDPA or ranges and the op, forward and with gradients.
    assert len(found["peers"]) == 2 * 5 and len(found["crossing"]) == 2 * 2 * (2 * 2) + 2 * 2 * (1 + 2)
    made = lists.table(found)
    assert report.NOT_COMPLETE in made and made.count(running.SPENT) == len(left)
    assert "| not measured | not measured | not measured |" in pages._lists(found)


def test_a_very_long_call_of_a_peer_is_timed_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists_peers, "compiled", uncompiled)
    monkeypatch.setattr(lists.Run, "long_us", 1.0)
    found = run(tmp_path / "x.json", parts=("speed", "peers"), shapes=("A",))
    assert all((r["rounds"] == 4) is (r["variant"] == "ops") for r in found["rows"] + found["peers"])
    peers = [r for r in found["peers"] if r["variant"] != "ops"]
    assert all(r["rounds"] == 1 and r["captured"] is False and r["finite"] for r in peers) and len(peers) == 8
    assert "called, not replayed" in lists.table(found)


OOM = (
    "CUDA out of memory. Tried to allocate 34.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 20.5 GiB is free. "
    "Process 7 has 119.3 GiB memory in use. Of the allocated memory 103.00 GiB is allocated by PyTorch, and 1.25 GiB is "
    "reserved by PyTorch but unallocated."
)
NEEDS = "out of memory: needs at least 137 GiB, the GPU has 140"


def test_what_an_error_says_of_memory() -> None:
    assert running.reason(torch.OutOfMemoryError(OOM)) == NEEDS
    assert running.reason(RuntimeError("CUDA error: out of memory")) == "out of memory"
    assert running.reason(RuntimeError("no such kernel")) is None
    small = OOM.replace("34.00 GiB", "512.00 MiB").replace("103.00", "1.5")
    assert running.reason(RuntimeError(small)) == "out of memory: needs at least 2 GiB, the GPU has 140"


def test_a_peer_without_memory_says_what_it_needs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = lists_peers.make

    def make(name: str, case: Any, what: str) -> Any:
        if (name, what) == (cases.DENSE_MASKED, "fb"):
            raise torch.OutOfMemoryError(OOM)
        return right(name, case, what)

    monkeypatch.setattr(lists_peers, "compiled", uncompiled)
    monkeypatch.setattr(lists_peers, "make", make)
    found = run(tmp_path / "x.json", parts=("speed", "peers"), shapes=("A",))
    assert found["complete"], "it was tried"
    assert [r["reason"] for r in found["peers"] if "reason" in r] == [NEEDS]
    assert f"| {NEEDS} |" in lists.table(found) and " / out of memory |" in pages._lists(found)


def test_a_peer_is_called_again_outside_the_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a peer whose capture fails is called without it, with the tensors of the failure free again."""
    freed: list[torch.device] = []

    def runnable(call: Any, device: torch.device, capture: bool = True) -> str:
        if capture:
            raise RuntimeError("not while capturing")
        assert sys.exc_info()[0] is None, "the exception holds the tensors of its frames"
        assert freed
        return "called"

    monkeypatch.setattr(timing, "Runnable", runnable)
    monkeypatch.setattr(running, "free", freed.append)
    runner, row = object.__new__(lists.Run), {}
    runner.device, runner.gpu = torch.device("cuda"), True
    monkeypatch.setattr(lists.Run, "long_us", float("inf"))
    made = runner.ready(variants.Variant("fwd", "a peer", lambda: lambda: None), row)
    assert (made, row["captured"]) == ("called", False)
    with pytest.raises(RuntimeError, match="while capturing"):
        runner.ready(variants.Variant("fwd", "ops", lambda: lambda: None), row)


# ---- runs that go on from others


def cut_after(monkeypatch: pytest.MonkeyPatch, cells: int) -> None:
    """Ends a run, as a machine that is taken away does, once it has timed so many groups of rows."""
    right, done = lists.Run.time, []

    def time(self: lists.Run, *args: Any) -> None:
        if len(done) == cells:
            raise KeyboardInterrupt
        done.append(args)
        right(self, *args)

    monkeypatch.setattr(lists.Run, "time", time)


def test_a_cut_run_leaves_what_it_measured_and_is_gone_on_with(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists_peers, "compiled", uncompiled)
    parts, path = {"parts": ("speed", "peers"), "shapes": ("A", "decode")}, tmp_path / "lists.json"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        cut_after(patch, 2 + 5 + 3)
        run(path, **parts)
    cut = json.loads(path.read_text())
    assert len(cut["rows"]) == 3 and len(cut["peers"]) == 5 + 3 and not cut["complete"]
    assert "this run did not come to its end" in lists.table(cut) and list(tmp_path.iterdir()) == [path]
    found = run(path, **parts, earlier=cut)
    assert found["complete"] and found["resumed"] == [cut["date"]]
    assert found["rows"] == cut["rows"], "a part that was done is kept"
    assert found["peers"][:5] == cut["peers"][:5], "so is a place"
    assert found["peers"][5] != cut["peers"][5], "the op is measured again next to the peers that were missing"
    cells = [(r["case"], r["what"], r["variant"]) for r in found["peers"]]
    assert len(cells) == len(set(cells)) == 5 + 5 + 4 and all("median_us" in r for r in found["peers"])
    assert f"went on from the run of {cut['date']}" in lists.table(found)


def test_what_a_budget_left_out_is_measured_by_a_later_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists_peers, "compiled", uncompiled)
    path = tmp_path / "lists.json"
    short = run(path, parts=("crossing",), budget_s=0.0)
    found = run(path, parts=("crossing",), earlier=short)
    assert not short["complete"] and found["complete"] and len(short["crossing"]) == len(found["crossing"])
    assert all("median_us" in r for r in found["crossing"])


def test_a_peer_that_ends_a_run_is_not_tried_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks a run on a device that a peer's kernel leaves unusable, as an illegal access does, and the run after it."""
    right, tried = lists_peers.make, []

    def make(name: str, case: Any, what: str) -> Any:
        if name == cases.DENSE_MASKED:
            tried.append(what)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return right(name, case, what)

    def free(_: torch.device) -> None:
        if tried:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(lists_peers, "compiled", uncompiled)
    monkeypatch.setattr(lists_peers, "make", make)
    parts: dict[str, Any] = {"parts": ("peers",), "shapes": ("decode", "A")}
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="illegal"):
        patch.setattr(running, "free", free)
        run(tmp_path / "x.json", **parts)
    dead = json.loads((tmp_path / "x.json").read_text())
    assert [r["variant"] for r in dead["peers"] if "error" in r] == [cases.DENSE_MASKED]
    assert not dead["complete"]
    tried.clear()
    found = run(tmp_path / "y.json", **parts, earlier=dead)
    assert tried == ["fwd", "fb"], "of A: decoding was tried by the first run"
    assert found["complete"] and sum("error" in r for r in found["peers"]) == 3


@pytest.mark.parametrize(
    ("of", "change"),
    [
        ("device", {"device": {"name": "another"}}),
        ("kernel_sources_sha256", {"kernel_sources_sha256": "a" * 64}),
        ("torch", {"versions": {"torch": "1.0", "triton": "1.0"}}),
    ],
)
def test_runs_of_something_else_are_not_gone_on_with(
    result: dict[str, Any], tmp_path: pathlib.Path, of: str, change: dict[str, Any]
) -> None:
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps({**result, **change}))
    words = ["--only", "A,speed", "--device", "cpu", "--out", str(tmp_path / "out"), "--resume", str(path)]
    done = CliRunner().invoke(cli.app, ["lists", *words])
    assert done.exit_code == 2 and of in done.output and not list((tmp_path / "out").iterdir())


def without_peers(on_h200: dict[str, Any]) -> dict[str, Any]:
    """Returns a result of an H200 as it was before its peers had a list: its budget left them and a crossing out."""
    old = copy.deepcopy(on_h200)
    del old["peers"]
    old["crossing"] = [r for r in old["crossing"] if r["S"] < 16384]
    del old["seconds_of"]["peers"]
    old["skipped"] = {cases.FLA: cases.NO_FLA, "crossing": "RuntimeError: no"}
    old["settings"] |= {"parts": list(lists.PARTS), "small": False}
    return old


def of_an_h100(on_h200: dict[str, Any]) -> dict[str, Any]:
    later = copy.deepcopy(on_h200) | {"commit": "b" * 40, "dirty": False, "rows": [], "errors": [], "skipped": {}}
    later["device"] = {"type": "cuda", "name": "NVIDIA H100"}
    later["settings"] |= {"parts": ["crossing", "peers"], "small": False}
    later["seconds_of"] = {"crossing": 60.0, "peers": 90.0}
    return later


def test_peers_of_a_later_run_are_filled_in(on_h200: dict[str, Any], tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    files = tmp_path / "lists.json", tmp_path / "later.json"
    for file, made in zip(files, (without_peers(on_h200), of_an_h100(on_h200)), strict=True):
        running.save(made, file)
    later = json.loads(files[1].read_text())
    later["settings"]["parts"] = list(lists.PARTS)  # a whole run, on a card that the bars are not for
    running.save(later, files[1])
    words = ["--only", "crossing,peers", "--into", str(files[0])]
    done = CliRunner().invoke(cli.app, ["lists_fill", str(files[1]), *words])
    assert done.exit_code == 0, done.output
    found = json.loads(files[0].read_text())
    assert found["complete"] and found["skipped"] == {cases.FLA: cases.NO_FLA}
    assert found["rows"] == json.loads(json.dumps(on_h200["rows"])), "those with bars are of the H200 still"
    assert found["peers"] and {r["S"] for r in found["crossing"]} == set(cases.CROSSING_LENGTHS)
    made = files[0].with_suffix(".md").read_text()
    assert made == lists.table(found) and "\n- NVIDIA H200, torch" in made
    assert "\n- of another run: crossing, peers: NVIDIA H100, torch" in made and "b" * 12 in made
    block = pages.BLOCKS["lists"](lambda name: found)
    assert block.count("NVIDIA H100") == 2 and "NVIDIA H200" not in block
    assert [line.partition(":")[0] for line in test_results.unmet(tmp_path)] == ["lists.json decode, fwd"]


def test_a_later_run_that_left_cells_out_does_not_complete(on_h200: dict[str, Any]) -> None:
    later = of_an_h100(on_h200)
    row = next(r for r in later["peers"] if r["variant"] == cases.GATHER)
    row["reason"] = running.SPENT
    assert not lists.fill(without_peers(on_h200), later, later["settings"]["parts"])["complete"]
    only = of_an_h100(on_h200)
    found = lists.fill(without_peers(on_h200), only, ["crossing"])
    assert not found["complete"] and found["skipped"] == {cases.FLA: cases.NO_FLA}
    only["settings"]["shapes"] = ["A"]
    with pytest.raises(running.OtherRun, match="shapes"):
        lists.fill(without_peers(on_h200), only, ["crossing"])


def test_a_peers_wrong_output_is_named(on_h200: dict[str, Any]) -> None:
    assert "wrong" not in lists.table(on_h200)
    on_h200["peers"][1] |= {"o_error": 0.7, "dq_error": "nan"}
    assert "**wrong o, dq**" in lists.table(on_h200)


def test_what_is_compiled_side_by_side() -> None:
    every = lists.jobs(("A", "decode"), lists.PARTS)
    assert {"A", "decode", "ranges, A", "crossing, D = 512", "A, torch.float16"} <= every.keys()
    assert not {"B", "D, torch.float16"} & every.keys() and pickle.loads(pickle.dumps(every)) == every
    assert lists.jobs(("A",), ("speed",)).keys() == {"A"}
    assert lists.jobs(("A",), ("peers",)).keys() == {"A", "ranges, A"}


# ---- tables and plots


def test_where_lists_pass_dense_attention() -> None:
    points = [(128, 1.0), (256, 2.0), (512, 4.0)]
    for dense, want in ((0.5, None), (1.0, None), (3.0, 384), (5.0, 512)):
        at = lists.break_even(points, dense)
        assert at is None if want is None else at == pytest.approx(want, rel=0.06)
    assert lists.break_even([], 1.0) is None
