# SPDX-License-Identifier: Apache-2.0
"""The golden table tells a test whose formulas become other ops from one whose formulas do not."""

from __future__ import annotations

import pytest

from mhc_inductor import routing
from mhc_inductor.report import Report, Routed
from tests import golden

NAME = "test_routing_selection.py::test_of_the_table"


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(golden.RECORD, raising=False)
    monkeypatch.setattr(golden, "read", lambda: {NAME: "selection_attention"})
    golden.start()


def _found(*ops: str) -> None:
    routing._count(Report(routed=[Routed(op, "line", "", ()) for op in ops]))


def test_the_same_ops_pass_and_others_are_told() -> None:
    _found("selection_attention")
    assert golden.check(NAME) is None
    _found("selection_attention", "index_topk")
    assert golden.check(NAME) == "golden table: selection_attention expected, index_topk selection_attention found"
    assert golden.check(NAME) == "golden table: selection_attention expected, none found"
    _found("mhc_pre")  # what an earlier test found does not count
    golden.start()
    _found("selection_attention")
    assert golden.check(NAME) is None


def test_names_of_the_table() -> None:
    assert golden.named(f"tests/{NAME}[a @ b]@group") == f"{NAME}[a @ b]"
    assert golden.named("tests/test_laws_process.py::test_x") is None
    assert golden.named("tests/test_ops_mhc.py::test_x") is None
