# SPDX-License-Identifier: Apache-2.0
"""Softmaxes of selected keys that are written out, and forms that look like one and have other values or gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.capture import difference, eager, not_worse, reasons, run

B, S, H, D, K = 2, 11, 3, 8, 4
INF = float("inf")
Form = Callable[[Tensor, Tensor], Tensor]
"""Of masked scores [B, S, H, T] and values [B, T, D]."""


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(4)
    return [torch.randn(*shape, generator=g).to(dtype) for shape in ((B, S, H, D), (B, S, D), (B, S, D), (B, S, S))]


def attention(form: Form, gathered: bool = False) -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        causal = torch.full((S, S), -INF).triu(1)
        at = (x + causal).topk(K).indices
        if gathered:
            rows = torch.arange(k.shape[0])[:, None, None]
            scores = torch.einsum("bshd,bskd->bshk", q, k[rows, at])
            later = at > torch.arange(S)[:, None]
            return form(scores.masked_fill(later.unsqueeze(2), -INF).transpose(1, 2), v[rows, at])
        mask = torch.full((k.shape[0], S, S), -INF, dtype=q.dtype).scatter(-1, at, 0.0) + causal.to(q.dtype)
        return form(torch.einsum("bshd,btd->bhst", q, k) + mask[:, None], v[:, None].expand(-1, S, -1, -1))

    return fn


def power(s: Tensor) -> Tensor:
    return (s - s.amax(-1, keepdim=True)).exp()


def product(weights: Tensor, v: Tensor) -> Tensor:
    """Values [B, H, S, D] of weights [B, H, S, T] and values [B, S, T, D]."""
    return torch.einsum("bhst,bstd->bhsd", weights, v)


FORMS: dict[str, Form] = {
    "divided": lambda s, v: product((e := power(s)) / e.sum(-1, keepdim=True), v),
    "divided after the product": lambda s, v: product(e := power(s), v) / e.sum(-1, keepdim=True),
    "after, in another order": lambda s, v: (
        torch.einsum("bhst,bstd->bshd", e := power(s), v) / e.sum(-1).transpose(1, 2)[..., None]
    ),
    "a detached maximum": lambda s, v: product(e := (s - s.amax(-1, True).detach()).exp(), v) / e.sum(-1)[..., None],
    "less the logarithm of the sum": lambda s, v: product((s - s.logsumexp(-1, keepdim=True)).exp(), v),
    "of a log_softmax": lambda s, v: product(s.log_softmax(-1).exp(), v),
}
OTHER: dict[str, Form] = {
    "a detached sum": lambda s, v: product((e := power(s)) / e.sum(-1, keepdim=True).detach(), v),
    "a sum of what is detached": lambda s, v: product((e := power(s)) / e.detach().sum(-1, keepdim=True), v),
    "a detached sum, after": lambda s, v: product(e := power(s), v) / e.sum(-1, keepdim=True).detach(),
    "a detached logarithm": lambda s, v: product((s - s.logsumexp(-1, keepdim=True).detach()).exp(), v),
    "sums of other rows": lambda s, v: product(e := power(s), v) / e.sum(-1, keepdim=True).flip(2),
    "sums of other heads": lambda s, v: product(e := power(s), v) / e.sum(-1, keepdim=True).roll(1, 1),
    "sums of all heads": lambda s, v: product(e := power(s), v) / e.sum((1, 3), keepdim=True),
    "twice the sum": lambda s, v: product(e := power(s), v) / (2 * e.sum(-1, keepdim=True)),
    "a sum and a number": lambda s, v: product(e := power(s), v) / (e.sum(-1, keepdim=True) + 1e-3),
    "read before the division": lambda s, v: (p := product(e := power(s), v)) / e.sum(-1, keepdim=True) + p,
    "a sum that is read": lambda s, v: product(e := power(s), v) / (z := e.sum(-1, keepdim=True)) + z,
    "multiplied": lambda s, v: product(e := power(s), v) * e.sum(-1, keepdim=True),
    "logarithm of other rows": lambda s, v: product((s - s.logsumexp(-1, keepdim=True).flip(2)).exp(), v),
}


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_forms_of_a_softmax(name: str, gathered: bool) -> None:
    fn = attention(FORMS[name], gathered)
    got, want = run(fn, inputs()), eager(fn, inputs())
    assert got.ops["selection_attention"] == 1 and not got.report.problems, reasons(got)
    assert difference(got, want) < 2e-6


@pytest.mark.parametrize("name", FORMS)
def test_dynamic_batch(name: str) -> None:
    fn = attention(FORMS[name])
    got, want = run(fn, inputs(), symbolic=[(i, 0) for i in range(4)]), eager(fn, inputs())
    assert got.ops["selection_attention"] == 1, reasons(got)
    assert difference(got, want) < 2e-6


@pytest.mark.parametrize("name", FORMS)
def test_in_bf16_the_op_is_as_exact_as_the_formula(name: str) -> None:
    fn, narrow = attention(FORMS[name]), inputs(torch.bfloat16)
    got, plain = run(fn, narrow), run(fn, narrow, routed=False)
    if got.ops["selection_attention"]:
        not_worse(name, got, plain, eager(fn, [t.double() for t in narrow]))
    else:
        assert difference(got, plain) == 0.0 and reasons(got)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", OTHER)
def test_other_formulas_stay(name: str, gathered: bool) -> None:
    fn = attention(OTHER[name], gathered)
    got, want = run(fn, inputs()), eager(fn, inputs())
    assert not got.ops["selection_attention"] and difference(got, want) == 0.0
    assert not any("verified" in m.reason for m in got.report.near_misses), reasons(got)
