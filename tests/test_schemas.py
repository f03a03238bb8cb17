# SPDX-License-Identifier: Apache-2.0
"""The schemas of the ops are a contract, since saved programs hold them: none changes, none disappears.

A new op gets a line in ``schemas.txt``. What an op must do otherwise is a new op; the old one stays (CONTRIBUTING.md).
"""

from __future__ import annotations

import pathlib
import re

import pytest
import torch

import mhc_inductor  # noqa: F401  (registers the ops)
from tests import saved_programs

FROZEN = pathlib.Path(__file__).with_name("schemas.txt").read_text().splitlines()


def _schemas() -> list[str]:
    names = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("mhc_inductor::"))
    return [str(torch._C._get_schema(*name.partition(".")[::2])) for name in names]


def test_every_schema_is_as_it_was() -> None:
    assert _schemas() == FROZEN, "a saved program would not load: make another op in place of another schema"


def test_the_saved_programs_hold_most_ops() -> None:
    programs = [torch.export.load(saved_programs.DATA / f"{name}.pt2") for name in saved_programs.MODELS]
    held = {op for program in programs for op in re.findall(r"mhc_inductor\.(\w+)\.default", program.graph_module.code)}
    assert held == {
        "e79_scan", "index_topk", "mhc_coefficients", "mhc_collapse", "mhc_post", "mhc_post_head", "mhc_pre",
        "mhc_single_pass", "selection_attention", "selection_list_attention",
    }  # fmt: skip


@pytest.mark.parametrize("name", saved_programs.MODELS)
def test_a_program_that_was_saved_with_the_oldest_torch_runs(name: str) -> None:
    program = torch.export.load(saved_programs.DATA / f"{name}.pt2").module()
    for given, want in torch.load(saved_programs.DATA / f"{name}.pt"):
        for got, expected in zip(program(*given), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
