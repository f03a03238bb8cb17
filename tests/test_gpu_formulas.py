# SPDX-License-Identifier: Apache-2.0
"""Attentions as others write them, at DeepSeek-V4's widths on a GPU: routed and compiled, against the formula in fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mhc_inductor

pytestmark = pytest.mark.gpu
S, P, H, D, K = 512, 128, 64, 512, 64
INF = float("inf")


def made(dtype: torch.dtype) -> list[Tensor]:
    """Returns q [1, S, H, D], own keys [1, S, D], pooled keys [1, P, D], indices [1, S, K], a window mask, and sinks."""
    g = torch.Generator("cuda").manual_seed(0)
    q, k, p = (
        torch.randn(shape, generator=g, device="cuda").to(dtype) for shape in ((1, S, H, D), (1, S, D), (1, P, D))
    )
    at = torch.rand(1, S, P, generator=g, device="cuda").topk(K).indices
    at = at.masked_fill(torch.rand(1, S, K, generator=g, device="cuda") < 0.3, -1)
    at[..., 0] = at[..., 0].clamp(min=0)
    ago = torch.arange(S, device="cuda")[:, None] - torch.arange(S, device="cuda")
    window = torch.zeros(1, 1, S, S, device="cuda", dtype=dtype).masked_fill((ago < 0) | (ago >= 128), -INF)
    return [q, k, p, at, window, torch.randn(H, generator=g, device="cuda")]


def wide(x: Tensor) -> Tensor:
    """Returns a tensor in fp32, or in fp64 if that is what it has."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def gathered(q: Tensor, p: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scores of the listed keys [1, S, H, K] and the keys, both in fp32."""
    keys = wide(p[torch.arange(1, device=q.device)[:, None, None], at.clamp(min=0)])
    scores = torch.einsum("bshd,bskd->bshk", wide(q), keys) * D**-0.5
    return scores.masked_fill((at < 0).unsqueeze(2), -INF), keys


def product(w: Tensor, keys: Tensor, q: Tensor) -> Tensor:
    return torch.einsum("bshk,bskd->bshd", w, keys).to(q.dtype)


def sink_in_the_sum(q: Tensor, k: Tensor, p: Tensor, at: Tensor, window: Tensor, sink: Tensor) -> Tensor:
    scores, keys = gathered(q, p, at)
    m = scores.amax(-1, keepdim=True)
    e = (scores - m).exp()
    return product(e / (e.sum(-1, keepdim=True) + (sink.view(1, 1, -1, 1) - m).exp()), keys, q)


def sink_afterwards(q: Tensor, k: Tensor, p: Tensor, at: Tensor, window: Tensor, sink: Tensor) -> Tensor:
    scores, keys = gathered(q, p, at)
    return product(scores.softmax(-1), keys, q) * torch.sigmoid(scores.logsumexp(-1) - sink)[..., None].to(q.dtype)


def with_logarithm(q: Tensor, k: Tensor, p: Tensor, at: Tensor, window: Tensor, sink: Tensor) -> Tensor:
    hidden = torch.ones(1, S, P, dtype=torch.bool, device=q.device).scatter(-1, at.clamp(min=0), False).unsqueeze(1)
    scores = wide(q.transpose(1, 2) @ p.unsqueeze(1).mT) * D**-0.5
    scores = scores.masked_fill(hidden, -INF)
    return (scores.softmax(-1).to(q.dtype) @ p.unsqueeze(1)) * scores.logsumexp(-1, keepdim=True).to(q.dtype)


def segments(q: Tensor, k: Tensor, p: Tensor, at: Tensor, window: Tensor, sink: Tensor) -> Tensor:
    chosen = torch.full((1, S, P), -INF, device=q.device, dtype=q.dtype).scatter(-1, at.clamp(min=0), 0.0)
    q, k, p = q.transpose(1, 2), k.unsqueeze(1), p.unsqueeze(1)
    logit = sink.to(q.dtype).view(1, -1, 1, 1).expand(1, -1, S, 1)
    logits = [q @ p.mT * D**-0.5 + chosen.unsqueeze(1), q @ k.mT * D**-0.5 + window.detach(), logit]
    weights = wide(torch.cat(logits, -1)).softmax(-1).to(q.dtype)
    return weights[..., :P] @ p + weights[..., P : P + S] @ k


FORMS: tuple[Callable[..., Tensor], ...] = (sink_in_the_sum, sink_afterwards, with_logarithm, segments)


def results(fn: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """Returns the output and the gradients to q, both keys and sinks."""
    leaves = [t.detach().clone().requires_grad_(i in (0, 1, 2, 5)) for i, t in enumerate(given)]
    out = fn(*leaves)
    wide(out).square().sum().backward()
    return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_routed_and_as_exact_as_the_formula(form: Callable[..., Tensor], dtype: torch.dtype) -> None:
    given, before = made(dtype), mhc_inductor.counters().get("routed selection_attention", 0)
    torch._dynamo.reset()
    got = results(torch.compile(form, backend="mhc_inductor", fullgraph=True), given)
    assert mhc_inductor.counters().get("routed selection_attention", 0) == before + 1
    plain = results(form, given)
    exact = results(form, [t.double() if t.is_floating_point() else t for t in given])
    # The gradient of a sink in fp32 comes from the op's output, which is rounded to the dtype of q.
    least = max(4e-6, torch.finfo(dtype).eps / 64)
    for mine, theirs, want in zip(got, plain, exact, strict=True):
        off, usual = ((x.double() - want).norm() / want.norm().clamp(min=1e-12) for x in (mine, theirs))
        assert off <= 2 * usual + least, (off, usual)
