# SPDX-License-Identifier: Apache-2.0
"""The lines of each part of the project: a change that adds some takes others away, or says here that it grew.

What was wanted is docs/design.md's ("Budgets"), which says why it is not met.
"""

from __future__ import annotations

import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ("mhc_inductor", "kernels", "lowerings")
BUDGETS: dict[tuple[str, ...], int] = {
    PACKAGE: 50_823,
    ("benchmarks",): 10_386,
    ("tests",): 56_037,
    ("examples",): 3_137,
}


def lines(folders: tuple[str, ...]) -> int:
    """Returns the lines of the Python files in folders; the checkout may hold links to two of them in a third."""
    files = {f.resolve() for folder in folders for f in (ROOT / folder).rglob("*.py")}
    return sum(len(f.read_text().splitlines()) for f in files)


@pytest.mark.parametrize("folders", BUDGETS, ids=" ".join)
def test_parts_do_not_grow(folders: tuple[str, ...]) -> None:
    assert lines(folders) <= BUDGETS[folders]


def test_budgets_are_what_is_there() -> None:
    """A part that became smaller by a hundred lines or more has a budget that says so."""
    assert {
        folders: budget - lines(folders) for folders, budget in BUDGETS.items() if budget - lines(folders) >= 100
    } == {}
