"""A pytest plugin that counts outcomes and seconds, for runs whose counts are committed."""

from __future__ import annotations

import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest

from tests.each_commit import function

PRINTED = re.compile(r"^\s*(\d+\.\d+)s (?:setup|call|teardown) +(\S.*?)\s*$", re.MULTILINE)
"""A line of pytest's ``--durations``."""


def spent(report: pytest.TestReport) -> Iterator[tuple[str, float]]:
    """Yields the report's test and its seconds, and those of the tests of a pytest whose output the test printed."""
    yield re.sub(r"@\w+$", "", report.nodeid), report.duration  # without the group of pytest-xdist
    if report.when == "call":
        for seconds, name in PRINTED.findall(report.capstdout):
            yield name, float(seconds)


class Counted:
    """Counts the outcomes of each file's tests, and keeps the names of those that do not pass."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self.others: list[str] = []
        self.cases: defaultdict[str, set[str]] = defaultdict(set)
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, seconds in spent(report):
            self.cases[function(name)].add(name)
            self.seconds[function(name)] += seconds
        name, _ = next(spent(report))
        if report.passed and report.when == "call":
            self.passed[pathlib.Path(name.partition("::")[0]).name] += 1
        elif not report.passed:
            self.others.append(f"{report.outcome}: {name}")
