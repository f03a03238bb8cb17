# SPDX-License-Identifier: Apache-2.0
"""Forms of sparse attention as small projects write them: routed, or left with a reason that says what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mhc_inductor
from tests.tools.attentions import routed, stays
from tests.tools.capture import Captured, reasons

B, S, H, HEADS, D, K = 2, 20, 2, 16, 8, 4
INF = float("inf")
BATCH = torch.arange(B)[:, None, None]
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()


def index_scores(i: Tensor, j: Tensor, w: Tensor) -> Tensor:
    """Returns causal index scores; 16 heads, so that no two of them are 0."""
    scores = (torch.einsum("bshd,btd->bsht", i, j).relu() * w[..., None]).sum(2)
    return scores.masked_fill(~CAUSAL, -INF)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attends under a mask that all heads share."""
    return (q @ k.mT * D**-0.5).masked_fill(~mask[:, None], -INF).softmax(-1) @ v


def given() -> list[Tensor]:
    """Returns q, k, v [B, H, S, D], the tensors of an index, and indices [B, S, K] of distinct keys."""
    g = torch.Generator().manual_seed(4)
    shapes = ((B, H, S, D),) * 3 + ((B, S, HEADS, D), (B, S, D), (B, S, HEADS))
    return [*(torch.randn(*shape, generator=g) for shape in shapes), torch.rand(B, S, S, generator=g).topk(K).indices]


def left(fn: Callable[..., Any]) -> Captured:
    return routed(fn, given(), ops={}, bound=0.0)


# --- routed --------------------------------------------------------------------------------------------------


def _in_place(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, w: Tensor, given: Tensor) -> Tensor:
    with torch.no_grad():
        scores = (torch.einsum("bshd,btd->bsht", i, j).relu() * w[..., None]).sum(2)
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -INF)
        mask = (scores.topk(K, -1, sorted=False)[1][..., None] == torch.arange(S)).any(-2)
    return attend(q, k, v, mask & CAUSAL)


def _first_keys(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, w: Tensor, given: Tensor) -> Tensor:
    row, key = torch.arange(S)[:, None], torch.arange(S)
    scores = index_scores(i, j, w)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(K).indices, True)
    mask = (mask | (key < 2) | (row - key < 3)) & (key <= row)
    return F.scaled_dot_product_attention(q, k, v, mask[:, None])


def _dropped(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, w: Tensor, given: Tensor) -> Tensor:
    scores = index_scores(i, j, w)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(K).indices, True) & CAUSAL
    return F.dropout((q @ k.mT).masked_fill(~mask[:, None], -INF).softmax(-1), 0.3) @ v


def _one_query(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, w: Tensor, given: Tensor) -> Tensor:
    place = index_scores(i, j, w)[:, -1].topk(K).indices[:, None, :, None].expand(-1, H, -1, D)
    return F.scaled_dot_product_attention(q[:, :, -1:], k.gather(2, place), v.gather(2, place))


@pytest.mark.parametrize(
    ("fn", "ops"),
    [(_in_place, {"index_topk", "selection_attention"}), (_first_keys, {"index_topk", "selection_attention"}),
     (_one_query, {"index_topk", "selection_attention"}), (_dropped, {"index_topk"})],
)  # fmt: skip
def test_routed(fn: Callable[..., Tensor], ops: set[str]) -> None:
    """Sizes of scores may be read elsewhere, keys bounded by the query too, or gathered; dropout keeps the index."""
    routed(fn, given(), ops=dict.fromkeys(ops, 1))


# --- named ---------------------------------------------------------------------------------------------------

Form = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of q, k, v, index scores and given indices."""


def _rows(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, given: Tensor) -> Tensor:
    best, at = scores.topk(K)
    at = at.masked_fill(best == -INF, -1)
    keys, values = (x.transpose(1, 2)[BATCH, at.clamp(min=0)] for x in (k, v))
    weights = torch.einsum("bhsd,bskhd->bshk", q, keys).masked_fill((at < 0)[:, :, None], -INF).softmax(-1)
    return torch.einsum("bshk,bskhd->bhsd", weights, values)


def _own_scores(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, given: Tensor) -> Tensor:
    best, at = (q @ k.mT).masked_fill(~CAUSAL, -INF).topk(K)
    return (q @ k.mT).new_full((B, H, S, S), -INF).scatter(-1, at, best).softmax(-1) @ v


def _picked(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, given: Tensor) -> Tensor:
    at = scores.topk(K).indices[:, None].expand(-1, H, -1, -1)
    weights = (q @ k.mT).masked_fill(~CAUSAL, -INF).gather(-1, at).softmax(-1)
    return torch.zeros(B, H, S, S).scatter(-1, at, weights) @ v


def _valid(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, given: Tensor) -> Tensor:
    best, at = scores.topk(K)
    return attend(q, k, v, torch.zeros(B, S, S, dtype=torch.bool).scatter(-1, at, best > -INF))


GATHERED, VALUES, PICKED = "the keys are gathered", "from values that topk", "after the product with all keys"
NAMED: dict[str, tuple[Form, str]] = {
    "rows, -1 for none": (_rows, GATHERED),
    "at least the worst of the best": (
        lambda q, k, v, x, i: attend(q, k, v, (x >= x.topk(K).values[..., -1:]) & CAUSAL), VALUES),
    "scattered where valid": (_valid, VALUES),
    "the best of its own scores": (_own_scores, PICKED),
    "scores at chosen keys": (_picked, PICKED),
}  # fmt: skip


def _named(form: Form, reason: str) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, w: Tensor, given: Tensor) -> Tensor:
        return form(q, k, v, index_scores(i, j, w), given)

    stays(fn, given(), reason, 2e-6)


@pytest.mark.parametrize("name", NAMED)
def test_named(name: str) -> None:
    _named(*NAMED[name])


def test_a_relu_written_with_a_comparison_is_named() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, w: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        scores = torch.einsum("bshd,btd->bsht", i, j)
        relus = torch.where(scores > 0, scores, 0.0), scores * (scores > 0), scores * (scores >= 0).float()
        return tuple((x * w[..., None]).sum(2).topk(K).indices for x in relus)

    got = left(fn)
    found = [m.reason.partition("; expected sum over heads of w * relu")[0] for m in got.report.near_misses]
    assert found == [f"the scores are computed in another way, by {op}" for op in ("where", "mul", "mul")]


def test_beams_pages_and_routers_are_not_mentioned() -> None:
    """Gathers along the batch, of pages of a cache, and the choice of experts are no sparse attention."""

    def fn(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, w: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        beams, pages = given[:, 0, 0] % B, given[0, :2] % S
        paged = k[0].transpose(0, 1)[pages].flatten(1, 2)[:, None]
        best, at = (i.flatten(2) @ weight).topk(2)
        gates = torch.full((B, S, 3), -INF).scatter(-1, at, best).softmax(-1)
        called = F.scaled_dot_product_attention(q, k.index_select(0, beams), v.index_select(0, beams))
        return called, F.scaled_dot_product_attention(q[:, :1], paged, paged), gates @ weight[:3]

    weight = torch.nn.Parameter(torch.randn(HEADS * D, 3, generator=torch.Generator().manual_seed(1)))
    got = left(fn)
    assert got.report.empty, reasons(got)


# --- weights that are masked after the softmax -----------------------------------------------------------------


def _renormalised(mask: Callable[[Tensor], Tensor], divide: Callable[[Tensor], Tensor]) -> Form:
    return lambda q, k, v, x, i: divide((q @ k.mT).softmax(-1) * mask(x)[:, None]) @ v


def _listed(scores: Tensor) -> Tensor:
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(K).indices, True) & CAUSAL


def _divided_in_place(p: Tensor) -> Tensor:
    p = p.clone()
    p /= p.sum(-1, keepdim=True)
    return p


RENORMALISED: dict[str, Form] = {
    "plain": _renormalised(_listed, lambda p: p / p.sum(-1, keepdim=True)),
    "with an epsilon": _renormalised(_listed, lambda p: p / (p.sum(-1, keepdim=True) + 1e-9)),
    "not below": _renormalised(lambda x: _listed(x).float(), lambda p: p / p.sum(-1, keepdim=True).clamp(min=1e-6)),
    "normalize": _renormalised(_listed, lambda p: F.normalize(p, p=1, dim=-1)),
    "in place": _renormalised(_listed, _divided_in_place),
    "filled": lambda q, k, v, x, i: _divided_in_place(
        (q @ k.mT).softmax(-1).masked_fill(~_listed(x)[:, None], 0.0)) @ v,
    "numbers": _renormalised(lambda x: torch.zeros_like(x).scatter(-1, x.topk(K).indices, 1.0).tril(), _divided_in_place),
}  # fmt: skip


@pytest.mark.parametrize("name", RENORMALISED)
def test_weights_masked_and_divided_by_their_sum_are_named(name: str) -> None:
    _named(RENORMALISED[name], "divided by their sum again")


def test_hidden_scores_far_above_the_others_tell_the_two_formulas_apart() -> None:
    """Why masked weights stay: 0 / 0 here, where masked scores give the mean of the visible values."""
    scores, mask = torch.tensor([0.0, 0.0, 200.0]), torch.tensor([True, True, False])
    weights = scores.softmax(-1) * mask
    assert (weights / weights.sum()).isnan().all()
    assert scores.masked_fill(~mask, -INF).softmax(-1).tolist() == [0.5, 0.5, 0.0]


def test_renormalised_weights_under_other_masks_and_of_routers_are_not_mentioned() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, w: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        causal = (q @ k.mT).softmax(-1) * torch.ones(S, S).tril()
        gates = (q @ weight).softmax(-1)
        gates = gates * torch.zeros_like(gates).scatter(-1, gates.topk(2).indices, 1.0)
        return causal / causal.sum(-1, keepdim=True) @ v, gates / gates.sum(-1, keepdim=True) @ weight.mT

    weight = torch.nn.Parameter(torch.randn(D, 5, generator=torch.Generator().manual_seed(1)))
    got = left(fn)
    assert all(m.ordinary for m in got.report.near_misses), reasons(got)


def test_a_list_of_the_first_of_two_parts_of_the_keys_is_verified() -> None:
    """Checks that sample data for positions that a topk returns stay in the part that the topk chose from."""

    def attend(q: Tensor, kept: Tensor, near: Tensor, scores: Tensor) -> Tensor:
        chosen = torch.full((2, 12, 13), -torch.inf).scatter(-1, scores.topk(4, -1).indices, 0.0)
        apart = torch.arange(12)[:, None] - torch.arange(12)
        window = torch.where((apart >= 0) & (apart < 4), 0.0, -torch.inf).expand(2, 12, 12)
        mask = torch.cat([chosen, window], -1)[:, None]
        k = torch.cat([kept, near], 1)[:, None].expand(2, 2, 25, 16)
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    shapes = ((2, 2, 12, 16), (2, 13, 16), (2, 12, 16), (2, 12, 13))
    report = mhc_inductor.explain(attend, *(torch.randn(s) for s in shapes), verify=True)
    (routed,) = report.routed
    assert isinstance(routed.error, float) and routed.error < 1e-5, routed.error
