"""Committed results match this tree's sources, and measured numbers on the pages match the results.

Each measured number in README.md or docs/ is followed, on its line, by a comment that names its source:

    218 µs <!-- from: benchmarks/results/mhc.json rows[what=npu_fb][variant=ops].median_us -->

A path is a sequence of keys joined by dots, with ``[3]`` for an item and ``[key=value]`` for the one item of a list
that has it. The number must be the file's, rounded to the digits that the page shows.
"""

from __future__ import annotations

import decimal
import json
import pathlib
import re
from typing import Any

import pytest

from benchmarks.pages import pages
from benchmarks.source_hash import FOLDERS, ROOT, ROUTING, source_hash

RESULTS = ROOT / "benchmarks" / "results"
NOT_YET = RESULTS / "NOT_YET_MEASURED.md"
NOT_COUNTED = RESULTS / "NOT_YET_COUNTED.md"
COUNTS = ("routing_fuzz.json", "routing_spellings.json")
PAGES = [*pages(), *sorted((ROOT / "examples").glob("*.md"))]
MARK = re.compile(r"<!--\s*from:(.*?)-->", re.DOTALL)
# Matches numbers; the last one before the mark counts. A sign, a range's dash or a unit may stand around it.
NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\d)")
STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]|\[([^=\[\]]+)=([^\[\]]*)\]")


def follow(value: Any, path: str) -> Any:
    """Returns the value at ``path``; raises LookupError, naming the step that does not exist."""
    at = 0
    while at < len(path):
        step = STEP.match(path, at)
        if step is None:
            raise LookupError(f"cannot read {path[at:]!r} of {path!r}")
        key, index, name, wanted = step.groups()
        if name is not None and isinstance(value, list):
            found = [v for v in value if str(v.get(name)) == wanted]
            # Further [key=value] steps may still choose among several items.
            value = found[0] if len(found) == 1 and path[step.end() : step.end() + 1] != "[" else found
        elif index is not None and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        elif key is not None and isinstance(value, dict) and key in value:
            value = value[key]
        else:
            raise LookupError(f"{step.group()!r} of {path!r} is not there")
        at = step.end()
    return value


def shows(text: str, value: float) -> bool:
    """Returns whether ``text`` is ``value`` rounded to the digits of ``text``."""
    shown = decimal.Decimal(text.replace(",", "").replace("−", "-"))
    unit = decimal.Decimal((0, (1,), int(shown.as_tuple().exponent)))
    return abs(decimal.Decimal(str(value)) - shown) <= unit / 2


def wrong_numbers(page: str, root: pathlib.Path) -> list[str]:
    """Returns one line for each marked number of a page that is wrong."""
    wrong = []
    for mark in MARK.finditer(page):
        line = page[page.rfind("\n", 0, mark.start()) + 1 : mark.start()]
        # Another mark on the same line has its own number.
        numbers = NUMBER.findall(line.rpartition("-->")[2])
        source = mark.group(1).strip()
        file, _, path = source.partition(" ")
        try:
            value = follow(json.loads((root / file).read_text()), path.strip())
        except (OSError, ValueError, LookupError) as e:
            wrong.append(f"{source}: {e}")
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            wrong.append(f"{source}: no number there, but {str(value)[:60]}")
        elif not numbers:
            wrong.append(f"{source}: no number before the mark on its line")
        elif not shows(numbers[-1], value):
            wrong.append(f"{source}: the page says {numbers[-1]}, the file {value}")
    return wrong


def _read_note(note: pathlib.Path, digest: str) -> tuple[bool, bool]:
    """Returns whether a note names the hash, and whether it gives a reason."""
    text = note.read_text() if note.exists() else ""
    return digest in text, len(text.replace(digest, "").split()) >= 8


def problems(results: pathlib.Path, tree: str) -> list[str]:
    """Returns one line for each reason why ``results`` do not match the sources with hash ``tree``."""
    found, measured = [], False
    for file in sorted(results.glob("*.json")):
        result = json.loads(file.read_text())
        if "device" not in result:  # counts of graphs, which do not depend on kernels
            continue
        if not re.fullmatch("[0-9a-f]{64}", str(result.get("kernel_sources_sha256"))):
            found.append(f"{file.name} has no kernel_sources_sha256")
        # A CPU runs no kernel, and a partial run measures few of them.
        elif result["device"]["type"] == "cuda" and not file.stem.endswith("-partial"):
            measured |= result["kernel_sources_sha256"] == tree
    note = results / NOT_YET.name
    named, why = _read_note(note, tree)
    if measured and note.exists():
        found.append(f"{note.name} is there though the sources are measured: delete it")
    if not measured:
        if not named:
            found.append(
                f"no results of a GPU have this tree's hash, {tree}: run python -m benchmarks mhc on a GPU, "
                f"or name the hash and the reason in {note.name}"
            )
        elif not why:
            found.append(f"{note.name} names the hash but no reason")
    return found


def uncounted(results: pathlib.Path, routing: str) -> list[str]:
    """Returns why the counts of ``results`` do not stand for the routing with hash ``routing``, a line each."""
    counted = {name: json.loads((results / name).read_text()).get("routing_sha256") for name in COUNTS}
    found = [
        f"{name} has no routing_sha256" for name, of in counted.items() if not re.fullmatch("[0-9a-f]{64}", str(of))
    ]
    old = [name for name, of in counted.items() if of != routing]
    note = results / NOT_COUNTED.name
    if not old and note.exists():
        found.append(f"{note.name} is there though everything is counted: delete it")
    if old and not all(_read_note(note, routing)):
        found.append(
            f"{', '.join(old)}: of another routing than {routing}: run python -m tests.all_spellings and "
            f"tests.fuzz_routing, or name the hash and the reason in {note.name}"
        )
    return found


def test_results_are_of_these_sources():
    assert not problems(RESULTS, source_hash())


def test_counts_are_of_this_routing():
    assert not uncounted(RESULTS, source_hash(folders=ROUTING))


@pytest.mark.parametrize(
    ("counted", "note", "expected"),
    [
        ("a" * 64, None, None),
        ("b" * 64, None, "of another routing"),
        ("b" * 64, "a" * 64, "of another routing"),
        ("b" * 64, "a" * 64 + " Only the words of near misses have changed since then.", None),
        ("a" * 64, "a" * 64 + " Only the words of near misses have changed since then.", "delete it"),
    ],
)
def test_what_counts_as_counted(tmp_path, counted, note, expected):
    for name in COUNTS:
        (tmp_path / name).write_text(json.dumps({"routing_sha256": counted}))
    if note is not None:
        (tmp_path / NOT_COUNTED.name).write_text(note)
    found = uncounted(tmp_path, "a" * 64)
    assert not found if expected is None else [expected in line for line in found] == [True]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_numbers_of_the_pages_are_in_the_results(page):
    assert not wrong_numbers(page.read_text(), ROOT)


A, B = "a" * 64, "b" * 64
REASON = f"# Not yet measured\n\n{A}\n\nThe machine with the GPU was not to be had on that day."


@pytest.mark.parametrize(
    ("files", "note", "expected"),
    [
        ({"mhc.json": (A, "cuda")}, None, None),
        ({"mhc.json": (A, "cuda"), "old.json": (B, "cuda")}, None, None),
        ({}, REASON, None),
        ({"mhc.json": (B, "cuda")}, REASON, None),
        ({}, None, "no results of a GPU"),
        ({"mhc.json": (B, "cuda")}, None, "no results of a GPU"),
        ({"mhc-cpu.json": (A, "cpu")}, None, "no results of a GPU"),
        ({"mhc-partial.json": (A, "cuda")}, None, "no results of a GPU"),
        ({}, REASON.replace(A, B), "no results of a GPU"),
        ({}, A, "no reason"),
        ({"mhc.json": (A, "cuda")}, REASON, "delete it"),
        ({"mhc.json": (None, "cuda")}, REASON, "has no kernel_sources_sha256"),
    ],
)
def test_what_counts_as_measured(tmp_path, files, note, expected):
    for name, (digest, device) in files.items():
        content = {"kernel_sources_sha256": digest, "device": {"type": device}}
        (tmp_path / name).write_text(json.dumps(content))
    if note is not None:
        (tmp_path / NOT_YET.name).write_text(note)
    found = problems(tmp_path, A)
    assert not found if expected is None else [expected in line for line in found] == [True]


RESULT = {
    "rows": [{"dim": 64, "v": "ops", "us": 217.6}, {"dim": 64, "v": "a, b", "us": 1234.5}],
    "small": 2.44e-5,
}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("takes 217.6 µs <!-- from: r.json rows[0].us --> at D = 64", None),
        ("| D = 64 | 218 µs<!-- from: r.json rows[dim=64][v=ops].us --> |", None),
        ("1,234.5 <!-- from: r.json rows[v=a, b].us -->, 2.4e-5 <!-- from: r.json small -->", None),
        ("0.000024 <!--from: r.json small-->", None),
        ("2.4e-05 <!-- from: r.json small -->", None),
        ("no mark: 5", None),
        ("217 <!-- from: r.json rows[0].us -->", "says 217,"),
        ("217.5 <!-- from: r.json rows[0].us -->", "says 217.5,"),
        ("-218 <!-- from: r.json rows[0].us -->", "says -218,"),
        ("218 and\nno number <!-- from: r.json rows[0].us -->", "no number before"),
        ("218 <!-- from: r.json rows[0].us --> <!-- from: r.json small -->", "no number before"),
        ("218 <!-- from: r.json rows[dim=64].us -->", "is not there"),
        ("218 <!-- from: r.json rows[v=no].us -->", "is not there"),
        ("218 <!-- from: r.json rows[2].us -->", "is not there"),
        ("218 <!-- from: r.json rows -->", "no number there"),
        ("218 <!-- from: no.json rows -->", "No such file"),
        ("218 <!-- from: -->", "s a directory"),
    ],
)
def test_the_check_of_numbers(tmp_path, line, expected):
    (tmp_path / "r.json").write_text(json.dumps(RESULT))
    wrong = wrong_numbers(line + "\n", tmp_path)
    assert not wrong if expected is None else [expected in w for w in wrong] == [True]


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
