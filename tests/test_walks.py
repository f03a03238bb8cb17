# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md walks a formula of each operator through the files: the functions are called, in that order."""

from __future__ import annotations

import functools
import importlib
import inspect
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.formulas.spellings_e79 import plain
from tests.tools.capture import reasons, run

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "architecture.md"
FILES = 20
_ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|", re.M)
Rows = list[tuple[str, str]]


def _walks() -> Iterator[tuple[str, Rows]]:
    """Yields the title and the rows (file, function) of each table."""
    text = PAGE.read_text().split("## How a formula becomes an op\n")[1]
    for part in re.split(r"^### ", text, flags=re.M):
        if rows := _ROW.findall(part):
            yield part.split("\n", 1)[0], rows


(_, COMMON), *PARTS = _walks()


def mhc(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> Tensor:
    z = F.linear(x.flatten(-2), phi) * torch.rsqrt(x.flatten(-2).square().mean(-1, keepdim=True) + 1e-6)
    a, b, c = (alpha[i] * z[..., at] + bias[at] for i, at in enumerate((slice(4), slice(4, 8), slice(8, 24))))
    mix = c.unflatten(-1, (4, 4)).softmax(-1)
    for _ in range(3):
        mix = mix / mix.sum(-2, keepdim=True)
        mix = mix / mix.sum(-1, keepdim=True)
    y = torch.tanh((torch.sigmoid(a).unsqueeze(-1) * x).sum(-2))
    return 2 * torch.sigmoid(b).unsqueeze(-1) * y.unsqueeze(-2) + torch.einsum("...ij,...jd->...id", mix, x)


def selection(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    hidden = torch.ones(2, 1, 32, 32, dtype=torch.bool).scatter(-1, at, False)
    hidden = hidden | torch.ones(32, 32, dtype=torch.bool).triu(1)
    return (q @ k.mT * 8**-0.5).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def index(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    scores = (torch.relu(torch.einsum("bshd,btd->bsht", q, k)) * w.unsqueeze(-1)).sum(2)
    return scores.masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), float("-inf")).topk(4, -1).indices


def _examples() -> dict[str, tuple[Callable[..., Any], list[Tensor], bool]]:
    """Returns a formula of each operator, its inputs, and whether they train."""
    qkv = [torch.randn(2, 2, 32, 8) for _ in range(3)]
    loop = plain()
    return {
        "mHC": (mhc, [torch.randn(2, 3, 4, 16), torch.randn(24, 64), torch.randn(3), torch.randn(24)], True),
        "Selection attention": (selection, [*qkv, torch.arange(32)[:, None].expand(2, 1, 32, 1) // 2], True),
        "Indexers": (index, [torch.randn(2, 16, 3, 8), torch.randn(2, 16, 8), torch.randn(2, 16, 3)], False),
        "E79": (loop, loop.inputs(), True),
    }


def _code(file: str, function: str) -> CodeType:
    """Returns the code of a function of routing/."""
    module = ".".join(["mhc_inductor.routing", *file.removesuffix(".py").split("/")]).removesuffix(".__init__")
    found = functools.reduce(getattr, function.split("."), importlib.import_module(module))
    return inspect.unwrap(found).__code__  # type: ignore[arg-type, attr-defined, no-any-return]


def _calls(title: str) -> dict[CodeType, int]:
    """Returns what routing the formula of an operator calls, with the order of the first calls."""
    fn, given, grad = _examples()[title]
    found: dict[CodeType, int] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.setdefault(frame.f_code, len(found))

    sys.setprofile(note)
    try:
        got = run(fn, given, grad=grad)
    finally:
        sys.setprofile(None)
    assert got.ops, reasons(got)
    return found


@pytest.mark.parametrize(("title", "rows"), PARTS, ids=[title for title, _ in PARTS])
def test_a_formula_goes_through_these_functions(title: str, rows: Rows) -> None:
    calls = _calls(title)
    for walk in (COMMON, rows):
        missing = [row for row in walk if _code(*row) not in calls]
        assert not missing
        called = sorted(walk, key=lambda row: calls[_code(*row)])
        assert walk == called
    assert len({file for file, _ in [*COMMON, *rows]}) <= FILES
