# SPDX-License-Identifier: Apache-2.0
"""Committed results match this tree's sources; test_pages.py compares the pages with them.

Results of lists and of the index say of every bar whether it is met. A bar of an error or of equal bits must be; one of
time or memory that is not is named in ``NOT_YET_MET.md``, with the reason.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks import index_cases, lists_cases, running
from benchmarks.source_hash import FOLDERS, ROOT, ROUTING, TESTED, source_hash
from mhc_inductor import versions
from tests import all_offline, matrix
from tests.tools import each_commit

RESULTS = ROOT / "benchmarks" / "results"
NOT_YET = RESULTS / "NOT_YET_MEASURED.md"
NOT_COUNTED = RESULTS / "NOT_YET_COUNTED.md"
NOT_TESTED = RESULTS / "NOT_YET_TESTED.md"
NOT_MET = RESULTS / "NOT_YET_MET.md"
BARS = {
    "lists": {f"{name}, {what}": t for (name, what), t in lists_cases.TARGETS.items()},
    "index": {f"{name}, {what}": t for (name, what), t in index_cases.TARGETS.items()},
}
"""Bars and goals of this tree, by results file and row."""
COUNTS = ("routing_fuzz.json", "routing_spellings.json")


def problems(results: pathlib.Path, tree: str) -> list[str]:
    """Returns one line for each reason why ``results`` do not match the sources with hash ``tree``."""
    found, measured = [], False
    for file in sorted(results.glob("*.json")):
        result = json.loads(file.read_text())
        if "device" not in result:  # counts of graphs, which do not depend on kernels
            continue
        if not re.fullmatch("[0-9a-f]{64}", str(result.get("kernel_sources_sha256"))):
            found.append(f"{file.name} has no kernel_sources_sha256")
        # A CPU runs no kernel, a partial run measures few of them, one of several GPUs what is between the ranks, and
        # ways and published widths are of whole models.
        elif (
            result["device"]["type"] == "cuda"
            and not file.stem.endswith("-partial")
            and file.stem not in ("multi_gpu", "ways", "sparse_models-published")
        ):
            measured |= result["kernel_sources_sha256"] == tree
    old, run = "" if measured else "no results of a GPU", "python -m benchmarks mhc on a GPU"
    return found + list(_unexplained(old, "kernels", tree, run, results / NOT_YET.name))


def uncounted(results: pathlib.Path, routing: str) -> list[str]:
    """Returns why the counts of ``results`` do not stand for the routing with hash ``routing``, a line each."""
    counted = {name: json.loads((results / name).read_text()).get("routing_sha256") for name in COUNTS}
    found = [
        f"{name} has no routing_sha256" for name, of in counted.items() if not re.fullmatch("[0-9a-f]{64}", str(of))
    ]
    old = [name for name, of in counted.items() if of != routing]
    run = "python -m tests.all_spellings and tests.fuzz_routing"
    return found + list(_unexplained(", ".join(old), "routing", routing, run, results / NOT_COUNTED.name))


def untested(results: pathlib.Path, tested: str) -> list[str]:
    """Returns why the counts of all tests do not stand for the code and tests with hash ``tested``, a line each."""
    run = json.loads((results / each_commit.RESULT.name).read_text())
    old = "" if run["tested_sources_sha256"] == tested else each_commit.RESULT.name
    found = [line for line in run["others"] if not line.startswith("skipped: ")]
    return found + list(_unexplained(old, "code", tested, "python -m tests.suite", results / NOT_TESTED.name))


def _unexplained(old: str, what: str, digest: str, run: str, note: pathlib.Path) -> Iterator[str]:
    """Yields a line if files are old and no note says why, or if a note stands there for nothing."""
    text = note.read_text() if note.exists() else ""
    if not old and text:
        yield f"{note.name} is there though everything is counted: delete it"
    if old and not (digest in text and len(text.replace(digest, "").split()) >= 8):
        yield f"{old}: of another {what} than {digest}: run {run}, or name the hash and the reason in {note.name}"


def _held(result: dict[str, Any], bars: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yields the rows with a bar and whether it is met; raises AssertionError where a row contradicts itself."""
    seen = set()
    for row in result["rows"]:
        name = f"{row.get('case', row.get('name'))}, {row['what']}"
        if row["variant"] != "ops" or name not in bars:
            continue
        seen.add(name)
        if "median_us" not in row:
            yield name, False  # it failed
            continue
        bar, goal = bars[name].bar, bars[name].goal
        assert (row["bar_us"], row["goal_us"]) == (bar, goal), f"{name}: measured against other bars"
        assert row["met_bar"] is (row["median_us"] <= bar), f"{name}: {row['median_us']} against {bar}"
        assert row["met_goal"] is (row["median_us"] <= goal), f"{name}: {row['median_us']} against {goal}"
        yield name, row["met_bar"]
    yield from ((name, False) for name in bars if name not in seen)  # not measured: the note says why
    for row in result["memory"]:
        if "bar_mb" in row:
            assert row["met_bar"] is (row["peak_above_mb"] <= row["bar_mb"]), row["name"]
            yield f"{row['name']}, memory", row["met_bar"]


def _wrong(result: dict[str, Any]) -> Iterator[str]:
    """Yields what is not right, whatever it costs: errors above their bars, bits that differ, a run that was cut."""
    if not result["complete"]:
        yield "the run is not complete"
    said = list(result.get("skipped", {}).values())
    said += [r.get("reason", "") for rows in result.values() if isinstance(rows, list) for r in rows if type(r) is dict]
    if spent := sum(running.SPENT.endswith(why or "-") for why in said):
        yield f"{spent} cells were not measured for lack of time"
    for row in result["errors"]:
        errors = {k: e for k, e in row["errors"].items() if "bar" in e}
        yield from (
            f"{row.get('case', row.get('name'))}: {k} is {e['relative']}, above {e['bar']}"
            for k, e in errors.items()
            if not (e["met"] and e["relative"] <= e["bar"])
        )
        if row.get("wrongly_chosen"):
            yield f"{row['name']}: {row['wrongly_chosen']} keys are wrong"
    yield from (f"{row['case']}: {row['differ']} differ in two runs" for row in result["determinism"] if row["differ"])
    if not result["errors"] or not result["determinism"]:
        yield "errors or equal bits were not measured"


def unmet(results: pathlib.Path) -> list[str]:
    """Returns one line for each bar of lists and index that is not met and not named in the note."""
    found, missed = [], False
    note = results / NOT_MET.name
    text = note.read_text() if note.exists() else ""
    for name, bars in BARS.items():
        file = results / f"{name}.json"
        if not file.exists():
            continue
        result = json.loads(file.read_text())
        found += [f"{file.name}: {line}" for line in _wrong(result)]
        for row, met in _held(result, bars):
            missed |= not met
            if not met and f"{file.name} {row}:" not in text:
                found.append(f"{file.name} {row}: the bar is not met, and {note.name} does not say why")
    if text and not missed:
        found.append(f"{note.name} is there though every bar is met: delete it")
    return found


def test_bars_are_met_or_explained():
    assert not unmet(RESULTS)


def test_results_are_of_these_sources():
    assert not problems(RESULTS, source_hash())


def test_counts_are_of_this_routing():
    assert not uncounted(RESULTS, source_hash(folders=ROUTING))


def _measured(digest: str | None, device: str) -> dict[str, Any]:
    return {"kernel_sources_sha256": digest, "device": {"type": device}}


REASON = " Only the words of near misses, or of a test, have changed since then."
COUNTED: dict[str, Any] = {
    "kernels": (problems, NOT_YET, lambda of, others: {"mhc.json": _measured(of, "cuda")}),
    "routing": (uncounted, NOT_COUNTED, lambda of, others: {name: {"routing_sha256": of} for name in COUNTS}),
    "code": (
        untested,
        NOT_TESTED,
        lambda of, others: {each_commit.RESULT.name: {"tested_sources_sha256": of, "others": others}},
    ),
}


@pytest.mark.parametrize("what", COUNTED)
@pytest.mark.parametrize(
    ("counted", "others", "note", "expected"),
    [
        ("a" * 64, ["skipped: tests/test_a.py::test"], None, None),
        ("a" * 64, ["failed: tests/test_a.py::test"], None, "failed: "),
        ("b" * 64, [], None, "of another"),
        ("b" * 64, [], "a" * 64, "of another"),
        ("b" * 64, [], "a" * 64 + REASON, None),
        ("a" * 64, [], "a" * 64 + REASON, "delete it"),
    ],
)
def test_what_counts_as_counted(tmp_path, what, counted, others, note, expected):
    check, place, files = COUNTED[what]
    for name, content in files(counted, others).items():
        (tmp_path / name).write_text(json.dumps(content))
    if note is not None:
        (tmp_path / place.name).write_text(note)
    found = check(tmp_path, "a" * 64)
    if expected is None or (what != "code" and expected == "failed: "):
        assert not found
    else:
        assert [expected in line for line in found] == [True]


def test_every_case_of_every_test_has_run():
    digest = source_hash(folders=TESTED)
    assert not untested(RESULTS, digest)
    if json.loads(each_commit.RESULT.read_text())["tested_sources_sha256"] != digest:
        return  # a run of earlier code, which NOT_YET_TESTED.md names
    families, _ = each_commit.recorded()["tests/test_sparse_models.py::test_routed_of_all_and_the_same_results"]
    assert families == each_commit.FAMILY_CASES


def _minors(name: str) -> set[tuple[int, int]]:
    """Returns the minor versions of torch or Triton that this package says it is tested with."""
    (major, low), (_, high) = versions.TESTED[name]
    return {(major, minor) for minor in range(low, high + 1)}


def test_every_tested_version_has_a_row_in_which_nothing_failed_and_no_kernel_is_off():
    rows = json.loads((RESULTS / "versions.json").read_text())["rows"]
    for name in versions.TESTED:
        assert {versions.minor(row[name]) for row in rows} == _minors(name)
    for row in rows:
        assert row["passed"].keys() == matrix.PARTS.keys() and all(row["passed"].values()), row["torch"]
        assert not row["failed"] and not row["kernels_off"], row["torch"]


def test_every_kernel_was_compiled_in_every_case_for_every_target():
    found = json.loads((RESULTS / "offline.json").read_text())
    assert set(map(versions.minor, found)) == _minors("triton")
    for version, run in found.items():
        assert run["passed"].keys() - {all_offline.INTERPRETED} == set(all_offline.FILES) and not run["others"], version
        assert all(run["passed"].values()), version
    assert all_offline.INTERPRETED in found["3.7"]["passed"]
    assert found["3.7"]["kernels_sha256"] == all_offline.digest(), (
        "kernels have changed: run python -m tests.all_offline"
    )


A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("files", "note", "expected"),
    [
        ({"mhc.json": (A, "cuda"), "old.json": (B, "cuda")}, None, None),
        ({}, A + REASON, None),
        ({}, None, "no results of a GPU"),
        ({"mhc-cpu.json": (A, "cpu")}, None, "no results of a GPU"),
        ({"mhc-partial.json": (A, "cuda")}, None, "no results of a GPU"),
        ({"multi_gpu.json": (A, "cuda")}, None, "no results of a GPU"),
        ({}, B + REASON, "no results of a GPU"),
        ({"mhc.json": (None, "cuda")}, A + REASON, "has no kernel_sources_sha256"),
    ],
)
def test_what_counts_as_measured(tmp_path, files, note, expected):
    for name, of in files.items():
        (tmp_path / name).write_text(json.dumps(_measured(*of)))
    if note is not None:
        (tmp_path / NOT_YET.name).write_text(note)
    found = problems(tmp_path, A)
    assert not found if expected is None else [expected in line for line in found] == [True]


def _index_result() -> dict[str, Any]:
    """Returns a run of the index in which every bar is met."""
    rows = []
    for (name, what), t in index_cases.TARGETS.items():
        row = {"name": name, "what": what, "variant": "ops", "median_us": t.goal + 1, "bar_us": t.bar}
        rows.append({**row, "goal_us": t.goal, "met_bar": True, "met_goal": False})
    error = {"name": "64 heads", "errors": {"scores": {"relative": 1e-7, "bar": 2e-5, "met": True}}}
    return {
        "complete": True,
        "rows": rows,
        "errors": [{**error, "wrongly_chosen": 0, "met": True}],
        "determinism": [{"case": "64 heads", "differ": [], "met": True}],
        "memory": [{"name": "long", "peak_above_mb": 500.0, "bar_mb": 1073.7, "met_bar": True}],
    }


def _set(*path: Any, **values: Any) -> Callable[[dict[str, Any]], None]:
    def change(result: dict[str, Any]) -> None:
        for step in path:
            result = result[step]
        result.update(values)

    return change


SLOW = _set("rows", 1, median_us=1e6, met_bar=False)
WHY = "index.json 64 heads, scores and top-k: the choice reads its scores twice."


@pytest.mark.parametrize(
    ("change", "note", "expected"),
    [
        (None, None, None),
        (SLOW, None, "scores and top-k: the bar is not met"),
        (_set("rows", 0, name="16 heads"), None, "64 heads, scores: the bar is not met"),
        (SLOW, "index.json 64 heads, scores: another row.", "scores and top-k: the bar is not met"),
        (SLOW, WHY, None),
        (None, WHY, "delete it"),
        (_set("memory", 0, peak_above_mb=2000.0, met_bar=False), None, "long, memory: the bar is not met"),
        (_set("errors", 0, "errors", "scores", relative=1e-3), None, "scores is 0.001, above 2e-05"),
        (_set("errors", 0, "errors", "scores", relative="nan", bar="nan", met=False), None, "scores is nan"),
        (_set("errors", 0, wrongly_chosen=3), None, "3 keys are wrong"),
        (_set("determinism", 0, differ=["chosen"]), None, "differ in two runs"),
        (_set(complete=False), None, "the run is not complete"),
        (_set("rows", 1, reason=running.SPENT), None, "1 cells were not measured"),
        (_set(skipped={"a peer": "the run's budget of seconds was spent"}), None, "1 cells were not measured"),
        (_set(skipped={"a peer": "it takes no lists"}), None, None),
        (_set(errors=[]), None, "not measured"),
    ],
)
def test_what_counts_as_met(tmp_path, change, note, expected):
    result = _index_result()
    if change is not None:
        change(result)
    (tmp_path / "index.json").write_text(json.dumps(result))
    if note is not None:
        (tmp_path / NOT_MET.name).write_text(note)
    found = unmet(tmp_path)
    assert not found if expected is None else [expected in line for line in found] == [True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("rows", 0, bar_us=1e6), "measured against other bars"),
        (_set("rows", 0, median_us=1e6), "against 850"),
        (_set("rows", 0, met_goal=True), "against 750"),
        (_set("memory", 0, met_bar=False), "long"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(tmp_path, change, message):
    result = _index_result()
    change(result)
    (tmp_path / "index.json").write_text(json.dumps(result))
    with pytest.raises(AssertionError, match=message):
        unmet(tmp_path)


def _folders(root: pathlib.Path) -> tuple[pathlib.Path, ...]:
    folders = tuple(root / folder for folder in FOLDERS)
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def test_the_hash_follows_names_and_code(tmp_path):
    folders = _folders(tmp_path)
    first, second = folders[0] / "a.py", folders[-1] / "b.py"
    first.write_text("1")
    second.write_text("2")
    start = source_hash(tmp_path)
    (folders[0] / "notes.txt").write_text("not measured")
    assert source_hash(tmp_path) == start

    def after(change) -> str:
        change()
        return source_hash(tmp_path)

    seen = [
        start,
        after(lambda: second.write_text("3")),
        after(lambda: second.write_text("f(3)")),
        after(lambda: second.write_text('f("text")')),
        after(lambda: first.rename(first.with_name("c.py"))),
        after(lambda: (folders[1] / "new.py").touch()),
    ]
    assert len(set(seen)) == len(seen)
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in seen)


def test_the_hash_does_not_follow_prose(tmp_path):
    file = _folders(tmp_path)[0] / "a.py"
    texts = [
        '"""A module."""\nX = 1\n"""A number."""\ndef f(x):\n    """Returns x."""\n    return x\n',
        "X = 1\ndef f(x):\n    return x\n",
        "# Why.\nX=1\n\ndef f( x ):\n    # As given.\n    return (x)\n",
    ]
    hashes = set()
    for text in texts:
        file.write_text(text)
        hashes.add(source_hash(tmp_path))
    assert len(hashes) == 1


def test_every_folder_of_the_hash_has_sources():
    assert [folder for folder in FOLDERS if not list((ROOT / folder).rglob("*.py"))] == []
