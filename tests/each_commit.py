"""Chooses what ``./dev test`` runs: of a test with many cases that take long in all, some of them.

``python -m tests.suite`` runs every case, and writes what each test took. From that this module gives each test
function ``SECONDS`` and at least one case, and leaves out those of which one case takes more than ``LONGEST``. Tests
marked ``every_case`` run whole. The cases are the same on every machine: they follow from the committed times and from
the cases' names.
"""

from __future__ import annotations

import json
import os
import pathlib
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pytest

RESULT = pathlib.Path(__file__).parent.parent / "benchmarks" / "results" / "tests.json"
SECONDS = 1.5
LONGEST = 10.0
COMMIT = os.environ.get("MHC_INDUCTOR_TESTS") == "commit"
"""Whether this is a run of ``./dev test`` without options."""


class Case(NamedTuple):
    """One case of a test: its name, and the place of each of its parameters in the parameter's list."""

    name: str
    values: frozenset[tuple[str, int]]


def recorded(path: pathlib.Path = RESULT) -> dict[str, tuple[int, float]]:
    """Returns how many cases each test function had and their seconds in all; functions of under a second are left out."""
    if not path.exists():
        return {}
    return {name: (cases, seconds) for name, (cases, seconds) in json.loads(path.read_text())["seconds"].items()}


def spread(cases: Iterable[Case], most: int) -> list[Case]:
    """Returns ``most`` cases that have as many values of the parameters as possible; they follow from the names alone."""
    left = sorted(cases, key=lambda c: (zlib.crc32(c.name.encode()), c.name))
    taken: list[Case] = []
    seen: set[tuple[str, int]] = set()
    while left and len(taken) < most:
        best = max(left, key=lambda c: len(c.values - seen))  # the first of the best
        left.remove(best)
        taken.append(best)
        seen |= best.values
    return taken


def chosen(tests: Mapping[str, list[Case]], times: Mapping[str, tuple[int, float]]) -> set[tuple[str, str]]:
    """Returns the cases to run, by test and name: every case of a test that is quick or that has no recorded time."""
    return {
        (test, case.name)
        for test, cases in tests.items()
        for case in spread(cases, most_of(*times.get(test, (1, 0.0)), len(cases)))
    }


def most_of(count: int, seconds: float, cases: int) -> int:
    """Returns how many of a test's ``cases`` run, if ``count`` of them took ``seconds`` when all ran."""
    if seconds <= SECONDS:
        return cases
    return max(1, int(SECONDS * count / seconds)) if seconds <= LONGEST * count else 0


def function(nodeid: str) -> str:
    """Returns the name of a case's test function; a group of pytest-xdist stands behind the last @ of a case's name."""
    return nodeid.partition("[")[0].partition("@")[0]


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Returns the collected tests that a commit does not run."""
    rest = [item for item in items if not item.get_closest_marker("every_case")]
    tests: dict[str, list[Case]] = defaultdict(list)
    for item in rest:
        call = getattr(item, "callspec", None)
        values = frozenset(call.indices.items()) if call else frozenset()
        tests[function(item.nodeid)].append(Case(item.name, values))
    names = chosen(tests, recorded())
    return [item for item in rest if (function(item.nodeid), item.name) not in names]
