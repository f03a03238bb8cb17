# SPDX-License-Identifier: Apache-2.0
"""Chooses the tests that ``./dev test`` runs, so that it takes less than 20 minutes on two cores.

``python -m tests.suite`` runs every case of every test and writes how long each test function took. Of a function that
took more than ``SECONDS``, as many cases run as fit into ``SECONDS``, at least one. A function whose cases took more
than ``LONGEST`` on average is left out. Functions and cases marked ``every_case`` run whole, and of a function marked
``law`` at least one case runs. The choice is the same on every machine: it depends only on the committed times and on
the cases' names.
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
LAWS = (
    "adversarial programs",
    "disable() takes everything back",
    "failure at every edit",
    "families in every kind of mode",
    "formulas on DTensors",
    "processes that are spawned",
    "random modules",
    "random spellings",
    "resume after a kill",
    "state of the process",
    "through Inductor",
)
"""The classes of laws that each commit is tested by: names of the mark ``law``. Issues were closed on them."""
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


def chosen(
    tests: Mapping[str, list[Case]], times: Mapping[str, tuple[int, float]], laws: Iterable[str] = ()
) -> set[tuple[str, str]]:
    """Returns the cases to run, by test and name: every case of a test that is quick or that has no recorded time.

    Of each of ``laws`` at least one case runs.
    """
    least = dict.fromkeys(laws, 1)
    return {
        (test, case.name)
        for test, cases in tests.items()
        for case in spread(cases, max(least.get(test, 0), most_of(*times.get(test, (1, 0.0)), len(cases))))
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
    laws = {function(item.nodeid) for item in rest if item.get_closest_marker("law")}
    names = chosen(tests, recorded(), laws)
    return [item for item in rest if (function(item.nodeid), item.name) not in names]
