"""Indexers in plain PyTorch become index_topk: spellings, masks, models, modes, and what is left alone and named."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capture import Captured, eager, reasons, run
from tests.spellings_index import CHOICES, K, MASKS, NEAR, SCORES, SILENT, D, H

B, S, T = 2, 7, 9


def given(seed: int = 0, dtype: torch.dtype = torch.bfloat16, s: int = S, t: int = T) -> list[Tensor]:
    """Returns q, k, w, a mask, positions and padding."""
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(B, s, H, D, generator=g).to(dtype), torch.randn(B, t, D, generator=g).to(dtype)
    w = torch.randn(B, s, H, generator=g).to(dtype)
    seen = torch.rand(B, s, t, generator=g) < 0.5
    seen[0, 0] = False
    pos = torch.cat([torch.arange(3), torch.arange(s - 3)]).expand(B, s).contiguous()
    pad = torch.ones(B, t, dtype=torch.bool)
    pad[1, :3] = False
    return [q, k, w, seen, pos, pad]


def routed(got: Captured, count: int = 1) -> None:
    """Asserts that the graph has the op and no tensor of all heads' products."""
    assert [r.op for r in got.report.routed] == ["index_topk"] * count, reasons(got)
    assert got.ops["index_topk"] == count
    for gm in got.graphs:
        for node in gm.graph.nodes:
            shape = getattr(node.meta.get("example_value"), "shape", ())
            assert len(shape) != 4 or node.op == "placeholder" or H not in shape or T not in shape, node


def same_choice(mine: Tensor, theirs: Tensor, scores: Tensor, tolerance: float = 1e-5) -> None:
    """Asserts that ``mine`` are distinct keys whose scores are those of ``theirs``."""
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    ordered = mine.long().sort(-1).values
    assert int(ordered.min()) >= 0 and int(ordered.max()) < scores.shape[-1]
    assert bool((ordered.diff(dim=-1) > 0).all())
    a, b = (scores.double().gather(-1, x.long()).sort(-1).values for x in (mine, theirs))
    assert torch.equal(a.isfinite(), b.isfinite())
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def spelled(name: str, mask: str, choice: str) -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    """Returns an indexer and its masked scores."""

    def masked(q: Tensor, k: Tensor, w: Tensor, seen: Tensor, pos: Tensor, pad: Tensor) -> Tensor:
        return MASKS[mask](SCORES[name](q, k, w), seen, pos, pad)

    return lambda *given: CHOICES[choice](masked(*given)), masked


def cases() -> list[Any]:
    """Returns every spelling of the scores and of the mask, each with others drawn at random."""
    draw = random.Random(16)
    names = [(n, draw.choice([*MASKS]), draw.choice([*CHOICES])) for n in SCORES]
    names += [(draw.choice([*SCORES]), m, draw.choice([*CHOICES])) for m in MASKS for _ in range(2)]
    return [pytest.param(*n, i, id=" | ".join(n)) for i, n in enumerate(names)]


@pytest.mark.parametrize(("name", "mask", "choice", "seed"), cases())
def test_spellings(name: str, mask: str, choice: str, seed: int) -> None:
    fn, masked = spelled(name, mask, choice)
    x = given(seed, (torch.bfloat16, torch.float32, torch.float16)[seed % 3])
    dynamic = seed % 4 == 0
    symbolic = [(0, 1), (2, 1), (3, 1), (4, 1), (1, 1), (3, 2), (5, 1)] if dynamic else []
    got = run(fn, x, grad=seed % 2 == 0, dynamic=None, symbolic=symbolic)
    routed(got)
    assert "spellings_index" in got.report.routed[0].source and got.report.routed[0].error == 0.0
    loose = 3e-2 if name == "matmul of 16 bits" else 1e-5
    same_choice(got.outputs[0], eager(fn, x, grad=False).outputs[0], masked(*x), loose)


def test_at_least_forty_spellings_and_twenty_near_misses() -> None:
    assert len(cases()) >= 40 and len(NEAR) >= 20


@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name: str) -> None:
    fn, reason = NEAR[name]
    x = given()[:4]
    got = run(fn, x, grad=False)
    assert not got.report.routed and not got.report.problems
    ours = [m.reason for m in got.report.near_misses if m.op == "index_topk"]
    assert ours and any(re.search(reason, m) for m in ours), reasons(got)
    for a, b in zip(got.outputs, eager(fn, x, grad=False).outputs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", SILENT)
def test_other_choices_are_not_mentioned(name: str) -> None:
    got = run(SILENT[name], given()[:4], grad=False)
    assert not got.report.routed and not [m for m in got.report.near_misses if m.op == "index_topk"]
