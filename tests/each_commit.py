# SPDX-License-Identifier: Apache-2.0
"""Chooses the tests that ``./dev test`` runs, so that it takes less than 20 minutes on two cores.

``python -m tests.suite`` runs every case of every test and writes how long each test function took. Of a function that
took more than ``SECONDS``, as many cases run as fit into ``SECONDS``, at least one. A function whose cases took more
than ``LONGEST`` on average is left out. Functions marked ``every_case`` run whole. The choice is the same on every
machine: it depends only on the committed times and on the cases' names.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pytest

from benchmarks.source_hash import ROOT

RESULT = ROOT / "benchmarks" / "results" / "tests.json"
SECONDS = 1.5
"""Seconds for all cases of a test function."""
LONGEST = 10.0
"""Seconds of an average case above which a test function is left out."""
COMMIT = os.environ.get("MHC_INDUCTOR_TESTS") == "commit"
"""Whether this is a run of ``./dev test`` without options."""


class Case(NamedTuple):
    """One case of a test: its name, and the place of each of its parameters in the parameter's list."""

    name: str
    values: frozenset[tuple[str, int]]


def recorded() -> dict[str, tuple[int, float]]:
    """Returns, for each test function that took at least a second, its number of cases and their seconds."""
    return json.loads(RESULT.read_text())["seconds"] if RESULT.exists() else {}


def spread(cases: Iterable[Case], most: int) -> list[Case]:
    """Returns ``most`` cases that together have many values of the parameters, in any order of ``cases`` the same."""
    left = sorted(cases, key=lambda c: (zlib.crc32(c.name.encode()), c.name))
    if most >= len(left):
        return left
    taken: list[Case] = []
    seen: set[tuple[str, int]] = set()
    while len(taken) < most:
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
    """Returns how many of a test's ``cases`` run, where all cases were ``count`` and took ``seconds`` when last timed."""
    if seconds <= SECONDS:
        return cases
    return max(1, int(SECONDS * count / seconds)) if seconds <= LONGEST * count else 0


def function(nodeid: str) -> str:
    """Returns the name of a case's test function: without parameters, and without the @group that pytest-xdist appends."""
    return nodeid.partition("[")[0].partition("@")[0]


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Returns the collected cases that ``./dev test`` does not run."""
    rest = [item for item in items if not item.get_closest_marker("every_case")]
    tests: dict[str, list[Case]] = defaultdict(list)
    for item in rest:
        call = getattr(item, "callspec", None)
        values = frozenset(call.indices.items()) if call else frozenset()
        tests[function(item.nodeid)].append(Case(item.name, values))
    names = chosen(tests, recorded())
    return [item for item in rest if (function(item.nodeid), item.name) not in names]
