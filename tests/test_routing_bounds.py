# SPDX-License-Identifier: Apache-2.0
"""The work of the pass is bounded: repeating a step of a formula must not double it.

Work is counted in calls, which are the same on every machine (tests/tools/work.py); seconds are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_inductor.report import Report
from mhc_inductor.routing import route
from mhc_inductor.routing.graph.copies import copied
from tests.tools.work import MOST, Work

N, D, TOKENS = 4, 16, 6
Case = Callable[..., Any]


def routed(fn: Case, *inputs: Tensor) -> tuple[Report, int]:
    """Returns the report of the pass over ``fn``'s graphs, and the calls that it made in the second of two runs."""
    report, work = Report(), Work()

    def backend(gm: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        route(copied(gm))  # imports, and fills caches
        copy = copied(gm)
        with work.counted():
            report.extend(route(copy))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend)(*inputs)
    assert not report.problems, report.problems
    return report, work.calls


def check(make: Callable[[int], Case], inputs: tuple[Tensor, ...], depths: tuple[int, int]) -> Report:
    """Returns the report at the larger depth; asserts bounded work there, at most quadratic in the depth."""
    _, short = routed(make(depths[0]), *inputs)
    report, long = routed(make(depths[1]), *inputs)
    assert long < MOST, f"{long} calls at depth {depths[1]}, {short} at {depths[0]}"
    # Exponential work would take more than a hundred times as many calls.
    assert long < (depths[1] / depths[0]) ** 2 * short, (short, long)
    return report


def streams() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    m = N * N + 2 * N
    return torch.randn(TOKENS, N, D), torch.randn(m, N * D) * 0.1, torch.ones(3), torch.randn(m) * 0.1


def logits(x: Tensor, phi: Tensor) -> Tensor:
    v = x.flatten(-2)
    return (v @ phi.T) * torch.rsqrt((v * v).mean(-1, keepdim=True) + 1e-6)


# --- hyper-connections --------------------------------------------------------------------------------------


def squared_logits(depth: int) -> Case:
    def fn(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> Tensor:
        z = logits(x, phi)[..., :N]
        for _ in range(depth):
            z = z * z
        return (torch.sigmoid(alpha[0] * z + bias[:N])[..., None] * x).sum(-2)

    return fn


def squared_streams(depth: int) -> Case:
    """Squares the streams repeatedly before the norm, the projection and the collapse."""

    def fn(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> Tensor:
        for k in range(depth):
            x = x * x.clone() if k % 2 else x * x
        z = logits(x, phi)[..., :N]
        return (torch.sigmoid(alpha[0] * z + bias[:N])[..., None] * x).sum(-2)

    return fn


def squared_weights(depth: int) -> Case:
    """Squares h_pre repeatedly before it weights the streams."""

    def fn(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> Tensor:
        h = torch.sigmoid(alpha[0] * logits(x, phi)[..., :N] + bias[:N])
        for _ in range(depth):
            h = h * h
        return (h[..., None] * x).sum(-2)

    return fn


def matrix_powers(depth: int) -> Case:
    """Doubles the number of different factors at every step: no merging helps, only a cap."""

    def fn(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> Tensor:
        w = phi[: N * D, :]
        for _ in range(depth):
            w = w @ w
        z = logits(x, w)[..., :N]
        return (torch.sigmoid(alpha[0] * z + bias[:N])[..., None] * x).sum(-2)

    return fn


def skip_logits(depth: int) -> Case:
    def fn(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> Tensor:
        z = logits(x, phi)[..., :N]
        for k in range(depth):
            z = z + (z.clone() + bias[k % N])
        return (torch.sigmoid(alpha[0] * z + bias[:N])[..., None] * x).sum(-2)

    return fn


def skip_mixes(depth: int) -> Case:
    """Nests sums in an expand-and-mix."""

    def fn(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> Tensor:
        z = logits(x, phi)
        h = torch.sigmoid(alpha[0] * z[..., :N] + bias[:N])
        w = 2 * torch.sigmoid(alpha[1] * z[..., N : 2 * N] + bias[N : 2 * N])
        f = torch.tanh((h[..., None] * x).sum(-2))
        out = w[..., None] * f[..., None, :] + x
        for _ in range(depth):
            out = out + (out + x)
        return out

    return fn


def shifted_sums(depth: int) -> Case:
    """Sums different elements at each step, where neighbouring steps share elements."""

    def fn(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> Tensor:
        z = F.pad(logits(x, phi), (0, depth))
        for _ in range(depth):
            z = z[..., 1:] + z[..., :-1]
        return (torch.sigmoid(alpha[0] * z[..., :N] + bias[:N])[..., None] * x).sum(-2)

    return fn


def nested_factors(depth: int) -> Case:
    """Multiplies f by itself at each step before h_post weights it."""

    def fn(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> Tensor:
        z = logits(x, phi)
        h = torch.sigmoid(alpha[0] * z[..., :N] + bias[:N])
        w = 2 * torch.sigmoid(alpha[1] * z[..., N : 2 * N] + bias[N : 2 * N])
        f = torch.tanh((h[..., None] * x).sum(-2))
        p = f[..., None, :].expand(x.shape)
        for _ in range(depth):
            p = p * p.clone()
        return w[..., None] * p + x

    return fn


MHC = [
    squared_logits,
    squared_streams,
    squared_weights,
    matrix_powers,
    skip_logits,
    skip_mixes,
    shifted_sums,
    nested_factors,
]


@pytest.mark.every_case
@pytest.mark.parametrize("make", MHC, ids=lambda f: f.__name__)
@pytest.mark.parametrize("depths", [(7, 14), (20, 40)], ids=str)
def test_work_for_formulas_of_streams_is_bounded(make: Callable[[int], Case], depths: tuple[int, int]) -> None:
    check(make, streams_for(make), depths)


def streams_for(make: Callable[[int], Case]) -> tuple[Tensor, ...]:
    x, phi, alpha, bias = streams()
    return (x, torch.randn(N * D, N * D) * 0.1, alpha, bias) if make is matrix_powers else (x, phi, alpha, bias)


def test_a_product_of_very_many_factors_is_a_near_miss() -> None:
    report, calls = routed(matrix_powers(14), *streams_for(matrix_powers))
    assert calls < MOST
    assert any(
        "too large to follow" in miss.reason and "test_routing_bounds" in miss.source for miss in report.near_misses
    )


def test_a_small_formula_is_not_called_too_large() -> None:
    report, _ = routed(squared_logits(20), *streams())
    assert not any("too large to follow" in miss.reason for miss in report.near_misses)


# --- sinkhorn -----------------------------------------------------------------------------------------------


def divisions(depth: int) -> Case:
    def fn(t: Tensor) -> Tensor:
        c = torch.softmax(t, -1) + 1e-6
        c = c / (c.sum(-2, keepdim=True) + 1e-6)
        for _ in range(depth):
            c = c / (c.sum(-1, keepdim=True) + 1e-6)
            c = c / (c.sum(-2, keepdim=True) + 1e-6)
        return c

    return fn


def scalings(depth: int) -> Case:
    def fn(t: Tensor) -> Tensor:
        k = torch.exp(t)
        v = torch.ones_like(k[..., :1, :])
        for _ in range(depth):
            u = 1 / (k * v).sum(-1, keepdim=True)
            v = 1 / (k * u).sum(-2, keepdim=True)
        return u * k * v

    return fn


def odd_divisions(depth: int) -> Case:
    """Resembles Sinkhorn iterations: every matrix occurs twice in the next one, and in its divisor."""

    def fn(t: Tensor) -> Tensor:
        c = torch.softmax(t, -1)
        for _ in range(depth):
            c = (c * c) / ((c * c.clone()).sum(-1, keepdim=True) + c)
        return c

    return fn


def log_domain(depth: int) -> Case:
    def fn(t: Tensor) -> Tensor:
        u, v = torch.zeros_like(t[..., :1]), torch.zeros_like(t[..., :1, :])
        for _ in range(depth):
            u = -torch.logsumexp(t + v, -1, keepdim=True)
            v = -torch.logsumexp(t + u, -2, keepdim=True)
        return torch.exp(t + u + v)

    return fn


@pytest.mark.parametrize("make", [divisions, scalings, odd_divisions, log_domain], ids=lambda f: f.__name__)
@pytest.mark.parametrize("depths", [(10, 20), (20, 40)], ids=str)
def test_work_for_iterations_is_bounded(make: Callable[[int], Case], depths: tuple[int, int]) -> None:
    check(make, (torch.randn(TOKENS, N, N),), depths)


# --- E79 ----------------------------------------------------------------------------------------------------


def recurrence(twist: Callable[[Tensor], Tensor]) -> Case:
    """Returns two steps of E79 that apply ``twist`` to the product for a gate and to the state."""

    def fn(kvqm: Tensor, S: Tensor, M: Tensor) -> tuple[Tensor, ...]:
        outs = []
        for t in range(2):
            k, v, q, m = kvqm[t].chunk(4, -1)
            k = k / (k.norm(dim=-1, keepdim=True) + 1e-6)
            m = m / (m.norm(dim=-1, keepdim=True) + 1e-6)
            r = torch.sigmoid(twist((M @ k[..., None])[..., 0]))
            c = torch.sigmoid((M.mT @ k[..., None])[..., 0])
            delta = v - (S @ k[..., None])[..., 0]
            S1 = r[..., :, None] * S * c[..., None, :] + delta[..., :, None] * k[..., None, :]
            p = torch.sigmoid((S1 @ m[..., None])[..., 0])
            w = torch.sigmoid((S1.mT @ m[..., None])[..., 0])
            g = delta - (M @ m[..., None])[..., 0]
            M = p[..., :, None] * M * w[..., None, :] + g[..., :, None] * m[..., None, :]
            S = twist(S1)
            y = (S1 @ q[..., None])[..., 0]
            outs.append(y * F.silu(y))
        return torch.stack(outs), S, M

    return fn


def e79_skips(depth: int) -> Case:
    def twist(t: Tensor) -> Tensor:
        for _ in range(depth):
            t = t + (t.clone() - 1)
        return t

    return recurrence(twist)


def e79_squares(depth: int) -> Case:
    def twist(t: Tensor) -> Tensor:
        for _ in range(depth):
            t = t * t.clone()
        return t

    return recurrence(twist)


@pytest.mark.parametrize("make", [e79_skips, e79_squares], ids=lambda f: f.__name__)
@pytest.mark.parametrize("depths", [(7, 14), pytest.param((20, 40), marks=pytest.mark.every_case)], ids=str)
def test_work_for_recurrences_is_bounded(make: Callable[[int], Case], depths: tuple[int, int]) -> None:
    n = 16
    check(make, (torch.randn(2, 3, 4 * n), torch.randn(3, n, n), torch.randn(3, n, n)), depths)


# --- selection ----------------------------------------------------------------------------------------------

S_KV = 32


def attention(masked: Callable[[Tensor, Tensor], Tensor]) -> Case:
    """Returns softmax(masked(scores)) @ V of keys in ranges."""

    def fn(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * 0.25
        return torch.softmax(masked(scores, starts), -1) @ v

    return fn


def selected(starts: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(S_KV)
    return at >= starts[..., None], at < starts[..., None] + 4


def shared_masks(depth: int) -> Case:
    def masked(scores: Tensor, starts: Tensor) -> Tensor:
        a, b = selected(starts)
        m = a & b
        for _ in range(depth):
            m = (m & a) | (m & b)
        return scores.masked_fill(~m, float("-inf"))

    return attention(masked)


def unlike_masks(depth: int) -> Case:
    """Adds different conditions at each step: 2**depth combinations make a key visible."""

    def masked(scores: Tensor, starts: Tensor) -> Tensor:
        at = torch.arange(S_KV)
        a, b = selected(starts)
        m = a & b
        for k in range(depth):
            m = (m & (at >= k)) | (m & (at < S_KV - k))
        return scores.masked_fill(~m, float("-inf"))

    return attention(masked)


def counted_masks(depth: int) -> Case:
    """Holds masks as numbers: at each step one analysis fails and another continues."""

    def masked(scores: Tensor, starts: Tensor) -> Tensor:
        a, b = selected(starts)
        m = (a & b).float()
        for _ in range(depth):
            m = ((m * a.float() + m * b.float()) > 0.5).float()
        return scores.masked_fill(m == 0, float("-inf"))

    return attention(masked)


def scores_in_where(depth: int) -> Case:
    def masked(scores: Tensor, starts: Tensor) -> Tensor:
        a, b = selected(starts)
        for _ in range(depth):
            scores = torch.where(a & b, scores * 1.5, float("-inf"))
        return scores

    return attention(masked)


def scores_added(depth: int) -> Case:
    """Adds the scores to themselves, so that they are in every addend."""

    def masked(scores: Tensor, starts: Tensor) -> Tensor:
        a, b = selected(starts)
        scores = scores.masked_fill(~(a & b), float("-inf"))
        for _ in range(depth):
            scores = scores + scores.clone()
        return scores

    return attention(masked)


def scores_without_end(depth: int) -> Case:
    """Adds a bias that many steps of analysis do not distinguish from scores."""

    def masked(scores: Tensor, starts: Tensor) -> Tensor:
        a, b = selected(starts)
        bias = torch.tanh(scores)
        for _ in range(depth):
            bias = bias + torch.where(a, bias, 0.0)
        return (scores + bias).masked_fill(~(a & b), float("-inf"))

    return attention(masked)


def added_masks(depth: int) -> Case:
    def masked(scores: Tensor, starts: Tensor) -> Tensor:
        a, b = selected(starts)
        m = torch.zeros(1, S_KV).masked_fill(~(a & b), float("-inf"))
        for _ in range(depth):
            m = m + m.clone()
        return scores + m

    return attention(masked)


def whole_numbers(depth: int) -> Case:
    """Adds positions to themselves, so that sums nest."""

    def masked(scores: Tensor, starts: Tensor) -> Tensor:
        low, high = starts[..., None], starts[..., None] + 4
        at = torch.arange(S_KV)
        for _ in range(depth):
            at = at + (at.clone() // 1)
            low, high = low + low.clone(), high + high.clone()
        return scores.masked_fill(~((at >= low) & (at < high)), float("-inf"))

    return attention(masked)


def differing_floors(depth: int) -> Case:
    """Nests quotients, each twice in the next one."""

    def masked(scores: Tensor, starts: Tensor) -> Tensor:
        at = torch.arange(S_KV)
        for _ in range(depth):
            at = at // 3 + (at + 1) // 2
        seen = (at >= starts[..., None]) & (at < starts[..., None] + 4)
        return scores.masked_fill(~seen, float("-inf"))

    return attention(masked)


SELECTION = [
    shared_masks,
    unlike_masks,
    counted_masks,
    scores_in_where,
    scores_added,
    scores_without_end,
    added_masks,
    whole_numbers,
    differing_floors,
]


@pytest.mark.parametrize("make", SELECTION, ids=lambda f: f.__name__)
@pytest.mark.parametrize("depths", [(10, 20), (20, 40)], ids=str)
def test_work_for_masks_is_bounded(make: Callable[[int], Case], depths: tuple[int, int]) -> None:
    q, k, v = (torch.randn(2, S_KV, D) for _ in range(3))
    inputs = (q, k, v, torch.randint(0, S_KV - 4, (2, S_KV)))
    check(make, inputs, depths)


def test_a_mask_of_too_many_combinations_is_a_near_miss() -> None:
    q, k, v = (torch.randn(2, S_KV, D) for _ in range(3))
    report, _ = routed(unlike_masks(15), q, k, v, torch.randint(0, S_KV - 4, (2, S_KV)))
    assert any("too large to follow" in m.reason and "test_routing_bounds" in m.source for m in report.near_misses)
