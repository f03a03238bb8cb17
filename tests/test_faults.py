# SPDX-License-Identifier: Apache-2.0
"""The faults that are planted on purpose fit today's code, and planting one fails the test that sees it."""

from __future__ import annotations

import ast
import json

import pytest

from benchmarks.source_hash import ROOT
from tests.faults import FAULTS, RESULT, Fault, copied, planted, seen

OPTION = Fault(
    "any option is taken",
    "mhc_inductor/options.py",
    "if self.empty_rows not in EMPTY_ROWS:",
    "if not EMPTY_ROWS:",
    "test_options.py::test_bad_options_are_named",
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_code_that_is_there(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    assert ast.dump(ast.parse(planted(fault, text))) != ast.dump(ast.parse(text))


def test_a_fault_whose_place_is_gone_is_told() -> None:
    with pytest.raises(ValueError, match="expected once"):
        planted(OPTION, "")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_test_that_sees_a_fault_is_there(fault: Fault) -> None:
    file, _, case = fault.tests.partition("::")
    assert f"\ndef {case.partition('[')[0]}(" in (ROOT / "tests" / file).read_text()


def test_each_commit_sees_every_fault() -> None:
    """Reads the committed result, which is of the code that its hash names, and may be of an earlier one."""
    found = json.loads(RESULT.read_text())["faults"]
    assert list(found) == [fault.name for fault in FAULTS]
    assert all(found[fault.name]["seen_by"].startswith(fault.tests.partition("[")[0]) for fault in FAULTS)


def test_a_planted_fault_fails_the_test_that_sees_it_and_leaves_nothing() -> None:
    with copied() as tree:
        assert seen(OPTION, OPTION.tests, tree)[0].startswith(f"tests/{OPTION.tests}")
        assert seen(None, OPTION.tests, tree)[0] == ""
