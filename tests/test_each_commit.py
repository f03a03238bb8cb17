# SPDX-License-Identifier: Apache-2.0
"""What ``./dev test`` leaves out: cases of tests that take long, tests whose every case does; how times are read."""

from __future__ import annotations

import itertools
import types

import pytest

from tests.tools import each_commit
from tests.tools.counting import Counted
from tests.tools.each_commit import LONGEST, SECONDS, Case, chosen, function, selected, spread

GRID = [
    Case(f"test[{a}-{b}-{c}]", frozenset({("a", a), ("b", b), ("c", c)}))
    for a, b, c in itertools.product(range(5), range(4), range(2))
]


def _values(cases: list[Case]) -> frozenset[tuple[str, int]]:
    return frozenset().union(*(case.values for case in cases))


def test_a_spread_has_every_value_of_every_parameter() -> None:
    taken = spread(GRID, 5)
    assert len(taken) == 5 and _values(taken) == _values(GRID)


def test_a_spread_does_not_depend_on_the_order_of_the_cases() -> None:
    assert spread(GRID, 7) == spread(GRID[::-1], 7) and spread(GRID[:3], 9) == spread(GRID[2::-1], 9)


@pytest.mark.parametrize(
    ("recorded", "kept"),
    [
        (None, 40),  # a new test
        ((40, SECONDS), 40),
        ((40, 4 * SECONDS), 10),
        ((20, 4 * SECONDS), 5),  # cases were added
        ((40, 40 * LONGEST), 1),
        ((40, 41 * LONGEST), 0),  # each case takes too long
        ((1, LONGEST), 1),
    ],
)
def test_a_test_gets_its_seconds_and_one_case_that_does_not_take_too_long(
    recorded: tuple[int, float] | None, kept: int
) -> None:
    tests = {"tests/test_a.py::test": GRID, "tests/test_a.py::other": [Case("other", frozenset())]}
    names = chosen(tests, {"tests/test_a.py::test": recorded} if recorded else {})
    assert ("tests/test_a.py::other", "other") in names and len(names) == 1 + kept


@pytest.mark.parametrize("name", ["a.py::test", "a.py::test[x]", "a.py::test@group", "a.py::test[x@y-z[0]]@group"])
def test_the_function_of_a_case(name: str) -> None:
    assert function(name) == "a.py::test"


class _Item(types.SimpleNamespace):
    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    __hash__ = object.__hash__


def _left(marks: dict[str, tuple[tuple[str, ...], ...]]) -> list[str]:
    """Returns the cases that are left out, of functions whose cases have these marks."""
    items = [
        _Item(
            nodeid=f"tests/a.py::{n}[{k}]",
            name=f"{n}[{k}]",
            marks=own,
            callspec=types.SimpleNamespace(indices={"k": k}),
        )
        for n, cases in marks.items()
        for k, own in enumerate(cases)
    ]
    return [item.name for item in each_commit.left_out(items)]  # type: ignore[arg-type]


def test_a_mark_keeps_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"some": (2, 3 * SECONDS), "every": (2, 1e3), "long": (2, 1e3)}
    times = {f"tests/a.py::{name}": time for name, time in times.items()}
    monkeypatch.setattr(each_commit, "recorded", lambda: times)
    marks = {"some": (), "every": ("every_case",), "long": (), "new": ()}
    left = _left({name: (own, own) for name, own in marks.items()})
    assert len(left) == 3 and left[0].startswith("some") and left[1:] == ["long[0]", "long[1]"]


def _report(name: str, outcome: str, when: str = "call", seconds: float = 1.0, printed: str = "") -> pytest.TestReport:
    made = pytest.TestReport(name, ("a.py", 1, name), {}, outcome, None, when, duration=seconds)  # type: ignore[arg-type]
    made.sections.append(("Captured stdout call", printed))
    return made


def test_outcomes_and_times_are_counted() -> None:
    counted = Counted()
    printed = "= slowest durations =\n1.50s call     tests/b.py::inner[a b]\n0.25s setup    tests/b.py::inner[c]\n1 passed in 2s"
    for report in (
        _report("tests/a.py::one[x]@group", "passed", "setup", 0.5),
        _report("tests/a.py::one[x]@group", "passed"),
        _report("tests/a.py::one[y]", "failed"),
        _report("tests/a.py::two", "skipped", "setup"),
        _report("tests/a.py::runs", "passed", printed=printed),
    ):
        counted.pytest_runtest_logreport(report)
    assert counted.passed == {"a.py": 2}
    assert counted.others == ["failed: tests/a.py::one[y]", "skipped: tests/a.py::two"]
    assert counted.seconds == {
        "tests/a.py::one": 2.5,
        "tests/a.py::two": 1.0,
        "tests/a.py::runs": 1.0,
        "tests/b.py::inner": 1.75,
    }
    assert counted.cases["tests/b.py::inner"] == {"tests/b.py::inner[a b]", "tests/b.py::inner[c]"}


def test_of_a_law_one_case_runs_however_long_it_takes() -> None:
    tests = {"tests/test_a.py::test": GRID}
    times = {"tests/test_a.py::test": (40, 41 * LONGEST)}
    assert chosen(tests, times) == set()
    assert len(chosen(tests, times, ["tests/test_a.py::test"])) == 1


@pytest.mark.every_case
def test_each_commit_runs_a_case_of_each_law() -> None:
    """Asks pytest for the choice of ``./dev test``, so that no law is lost by a name, a mark or a recorded time."""
    tests = {f"tests/{test}" for one in each_commit.LAWS.values() for test in one}
    models = "tests/test_sparse_models.py"  # is skipped where transformers is old, and asks for its own cases
    tests = {test for test in tests if not test.startswith(models)}
    assert not tests - {function(case) for case in selected(*{test.partition("::")[0] for test in tests})}


def test_a_law_keeps_a_case_unless_one_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("law", "other", "marked")
    monkeypatch.setattr(each_commit, "LAWS", {"one": ("a.py::law", "a.py::marked")})
    monkeypatch.setattr(each_commit, "recorded", lambda: {f"tests/a.py::{name}": (2, 1e3) for name in names})
    left = _left({"law": ((), ()), "other": ((), ()), "marked": (("every_case",), ())})
    assert len(left) == 4 and left[1:] == ["other[0]", "other[1]", "marked[1]"]
