# SPDX-License-Identifier: Apache-2.0
"""Runs pytest and counts outcomes and seconds, for runs whose counts are committed."""

from __future__ import annotations

import pathlib
import re
import time
from collections import Counter, defaultdict

import pytest

from tests.tools.each_commit import function, ungrouped

PRINTED = re.compile(r"^\s*(\d+\.\d+)s (?:setup|call|teardown) +(\S.*?)\s*$", re.MULTILINE)
"""A line of pytest's ``--durations``."""


class Counted:
    """Counts, as a pytest plugin, the tests that pass in each file and the seconds and cases of each test function.

    ``others`` names the tests that do not pass. Where a test runs another pytest with ``--durations`` and prints its
    output, the seconds of those tests count too.
    """

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.passed: Counter[str] = Counter()
        self.others: list[str] = []
        self.cases: defaultdict[str, set[str]] = defaultdict(set)
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = ungrouped(report.nodeid)
        self._took(name, report.duration)
        if report.when == "call":
            for seconds, inner in PRINTED.findall(report.capstdout):
                self._took(inner, float(seconds))
        if report.passed and report.when == "call":
            self.passed[pathlib.Path(name.partition("::")[0]).name] += 1
        elif not report.passed:
            self.others.append(f"{report.outcome}: {name}")

    def _took(self, name: str, seconds: float) -> None:
        self.cases[function(name)].add(name)
        self.seconds[function(name)] += seconds

    def elapsed(self) -> float:
        """Returns the seconds since the counting began."""
        return time.perf_counter() - self.start


def run(jobs: int, *options: str) -> tuple[int, Counted]:
    """Returns pytest's exit status and the counts of a run in ``jobs`` processes."""
    counted = Counted()
    common = ["-n", str(jobs), "--dist", "loadgroup", "-p", "no:cacheprovider", "--tb=short"]
    return pytest.main([*common, *options], plugins=[counted]), counted
