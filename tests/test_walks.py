# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md walks a formula of each operator through the files: the functions are called, in that order."""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mhc_inductor.routing
from tests.capture import reasons, run
from tests.spellings_e79 import plain

ROOT = pathlib.Path(mhc_inductor.routing.__file__).parent
PAGE = ROOT.parents[1] / "docs" / "architecture.md"
FILES = 20
_ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|", re.M)


def _walks() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yields the title and the rows (file, function) of each table."""
    text = PAGE.read_text().split("## How a formula becomes an op\n")[1]
    for part in re.split(r"^### ", text, flags=re.M):
        if rows := _ROW.findall(part):
            yield part.split("\n", 1)[0] or "", rows


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


def _given(fn: Callable[..., Any]) -> list[Tensor]:
    if fn is mhc:
        return [torch.randn(2, 3, 4, 16), torch.randn(24, 64), torch.randn(3), torch.randn(24)]
    if fn is index:
        return [torch.randn(2, 16, 3, 8), torch.randn(2, 16, 8), torch.randn(2, 16, 3)]
    return [*(torch.randn(2, 2, 32, 8) for _ in range(3)), torch.arange(32)[:, None].expand(2, 1, 32, 1) // 2]


def _calls(fn: Callable[[], Any]) -> dict[tuple[str, str], int]:
    """Returns the functions of routing/ that a call runs, with the order of their first calls."""
    found: dict[tuple[str, str], int] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(ROOT)):
            found.setdefault((pathlib.Path(file).relative_to(ROOT).as_posix(), frame.f_code.co_qualname), len(found))

    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return found


def _routed(title: str) -> dict[tuple[str, str], int]:
    loop = plain()
    fn = {"mHC": mhc, "Selection attention": selection, "Indexers": index, "E79": loop}[title]
    given = loop.inputs() if fn is loop else _given(fn)
    made: list[Any] = []
    calls = _calls(lambda: made.append(run(fn, given, grad=fn is not index)))
    assert made[0].ops, reasons(made[0])
    return calls


@pytest.mark.parametrize(("title", "rows"), PARTS, ids=[title for title, _ in PARTS])
def test_a_formula_goes_through_these_functions(title: str, rows: list[tuple[str, str]]) -> None:
    calls = _routed(title)
    for walk in (COMMON, rows):
        missing = [row for row in walk if row not in calls]
        assert not missing
        order = [calls[row] for row in walk]
        assert order == sorted(order), sorted(walk, key=calls.__getitem__)
    assert len({file for file, _ in [*COMMON, *rows]}) <= FILES
