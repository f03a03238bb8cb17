# SPDX-License-Identifier: Apache-2.0
"""The work of the pass is bounded: repeating a step of a formula must not double it.

Work is counted in calls, which are the same on every machine (tests/tools/work.py); seconds are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_inductor.report import Report
from mhc_inductor.routing import route
from mhc_inductor.routing.graph.copies import copied
from tests.formulas import laws
from tests.tools.capture import looking
from tests.tools.work import MOST, Work

N, D, TOKENS = 4, 16, 6
Case = Callable[..., Any]
Deep = Callable[..., Any]
"""A case whose last argument is the depth: how often a step of its formula is repeated."""


def routed(fn: Case, *inputs: Tensor) -> tuple[Report, int]:
    """Returns the report of the pass over ``fn``'s graphs, and the calls that it made in the second of two runs."""
    report, work = Report(), Work()

    def look(gm: torch.fx.GraphModule) -> None:
        route(copied(gm))  # imports, and fills caches
        copy = copied(gm)
        with work.counted():
            report.extend(route(copy))

    looking(fn, look)[0](*inputs)
    assert not report.problems, report.problems
    return report, work.calls


def at(depth: int, fn: Deep) -> Case:
    return lambda *inputs: fn(*inputs, depth)


def check(fn: Deep, inputs: tuple[Tensor, ...], depths: tuple[int, int]) -> None:
    """Asserts bounded work at the larger depth, at most quadratic in the depth."""
    short, long = (routed(at(depth, fn), *inputs)[1] for depth in depths)
    assert long < MOST, f"{long} calls at depth {depths[1]}, {short} at {depths[0]}"
    # Exponential work would take more than a hundred times as many calls.
    assert long < (depths[1] / depths[0]) ** 2 * short, (short, long)


def streams() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    m = N * N + 2 * N
    return torch.randn(TOKENS, N, D), torch.randn(m, N * D) * 0.1, torch.ones(3), torch.randn(m) * 0.1


def logits(x: Tensor, phi: Tensor) -> Tensor:
    v = x.flatten(-2)
    return (v @ phi.T) * torch.rsqrt((v * v).mean(-1, keepdim=True) + 1e-6)


# --- hyper-connections --------------------------------------------------------------------------------------


def gates(z: Tensor, alpha: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns h_pre and h_post."""
    return torch.sigmoid(alpha[0] * z[..., :N] + bias[:N]), 2 * torch.sigmoid(
        alpha[1] * z[..., N : 2 * N] + bias[N : 2 * N]
    )


def skip_mixes(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, depth: int) -> Tensor:
    """Nests sums in an expand-and-mix."""
    h, w = gates(logits(x, phi), alpha, bias)
    out = w[..., None] * torch.tanh((h[..., None] * x).sum(-2))[..., None, :] + x
    for _ in range(depth):
        out = out + (out + x)
    return out


def nested_factors(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, depth: int) -> Tensor:
    """Multiplies f by itself at each step before h_post weights it."""
    h, w = gates(logits(x, phi), alpha, bias)
    p = torch.tanh((h[..., None] * x).sum(-2))[..., None, :].expand(x.shape)
    for _ in range(depth):
        p = p * p.clone()
    return w[..., None] * p + x


def repeated(step: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    return lambda t, depth: functools.reduce(step, range(depth), t)


def headed(place: str, change: Callable[[Tensor, int], Tensor]) -> Deep:
    """Returns a head that changes the value at a place."""

    def fn(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, depth: int) -> Tensor:
        given = {"x": x, "phi": phi, "alpha": alpha, "bias": bias}
        return laws.head(x, given, {place: lambda t: change(t, depth)})

    return fn


squares = repeated(lambda t, k: t * t)
MHC: dict[str, Deep] = {
    "squared_logits": headed("z", squares),
    "squared_streams": headed("x", repeated(lambda t, k: t * t.clone() if k % 2 else t * t)),
    "squared_weights": headed("h", squares),
    # The number of different factors doubles at every step: no merging helps, only a cap.
    "matrix_powers": headed("phi", repeated(lambda w, k: w @ w)),
    "skip_logits": headed("z", repeated(lambda z, k: z + (z.clone() + k))),
    # Sums of different elements at each step, where neighbouring steps share elements.
    "shifted_sums": headed("z", lambda z, n: repeated(lambda t, k: t[..., 1:] + t[..., :-1])(F.pad(z, (0, n)), n)),
    "skip_mixes": skip_mixes,
    "nested_factors": nested_factors,
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", MHC)
@pytest.mark.parametrize("depths", [(7, 14), (20, 40)], ids=str)
def test_work_for_formulas_of_streams_is_bounded(name: str, depths: tuple[int, int]) -> None:
    check(MHC[name], streams_for(name), depths)


def streams_for(name: str) -> tuple[Tensor, ...]:
    x, phi, alpha, bias = streams()
    return (x, torch.randn(N * D, N * D) * 0.1 if name == "matrix_powers" else phi, alpha, bias)


def test_a_product_of_very_many_factors_is_a_near_miss() -> None:
    report, calls = routed(at(14, MHC["matrix_powers"]), *streams_for("matrix_powers"))
    assert calls < MOST
    assert any("too large to follow" in m.reason and "laws.py" in m.source for m in report.near_misses)


def test_a_small_formula_is_not_called_too_large() -> None:
    report, _ = routed(at(20, MHC["squared_logits"]), *streams())
    assert not any("too large to follow" in miss.reason for miss in report.near_misses)


# --- sinkhorn -----------------------------------------------------------------------------------------------


def scalings(t: Tensor, depth: int) -> Tensor:
    k = torch.exp(t)
    v = torch.ones_like(k[..., :1, :])
    for _ in range(depth):
        u = 1 / (k * v).sum(-1, keepdim=True)
        v = 1 / (k * u).sum(-2, keepdim=True)
    return u * k * v


def log_domain(t: Tensor, depth: int) -> Tensor:
    u, v = torch.zeros_like(t[..., :1]), torch.zeros_like(t[..., :1, :])
    for _ in range(depth):
        u = -torch.logsumexp(t + v, -1, keepdim=True)
        v = -torch.logsumexp(t + u, -2, keepdim=True)
    return torch.exp(t + u + v)


def by_columns(c: Tensor) -> Tensor:
    return c / (c.sum(-2, keepdim=True) + 1e-6)


ITERATIONS: dict[str, Deep] = {
    "divisions": lambda t, n: repeated(lambda c, k: by_columns(c / (c.sum(-1, keepdim=True) + 1e-6)))(
        by_columns(torch.softmax(t, -1) + 1e-6), n
    ),
    "scalings": scalings,
    # Resembles Sinkhorn iterations: every matrix occurs twice in the next one, and in its divisor.
    "odd_divisions": lambda t, n: repeated(lambda c, k: (c * c) / ((c * c.clone()).sum(-1, keepdim=True) + c))(
        torch.softmax(t, -1), n
    ),
    "log_domain": log_domain,
}


@pytest.mark.parametrize("name", ITERATIONS)
@pytest.mark.parametrize("depths", [(10, 20), (20, 40)], ids=str)
def test_work_for_iterations_is_bounded(name: str, depths: tuple[int, int]) -> None:
    check(ITERATIONS[name], (torch.randn(TOKENS, N, N),), depths)


# --- E79 ----------------------------------------------------------------------------------------------------


def recurrence(twist: Callable[[Tensor], Tensor], kvqm: Tensor, S: Tensor, M: Tensor, depth: int) -> tuple[Tensor, ...]:
    """Returns two steps of E79 that apply ``twist`` ``depth`` times to the product for a gate and to the state."""

    def twisted(t: Tensor) -> Tensor:
        for _ in range(depth):
            t = twist(t)
        return t

    outs: list[Tensor] = []
    for at in kvqm.split(1):
        given: Any = {"kvqm": at, "S": S, "M": M, "b_s": 0.0, "b_m": 0.0}
        out, S, M = laws.e79(given, {"r0": twisted})
        outs, S = [*outs, *out], twisted(S)
    return torch.stack(outs), S, M


TWISTS: dict[str, Callable[[Tensor], Tensor]] = {
    "e79_skips": lambda t: t + (t.clone() - 1),
    "e79_squares": lambda t: t * t.clone(),
}


@pytest.mark.parametrize("twist", TWISTS)
@pytest.mark.parametrize("depths", [(7, 14), pytest.param((20, 40), marks=pytest.mark.every_case)], ids=str)
def test_work_for_recurrences_is_bounded(twist: str, depths: tuple[int, int]) -> None:
    n = 16
    inputs = torch.randn(2, 3, 4 * n), torch.randn(3, n, n), torch.randn(3, n, n)
    check(functools.partial(recurrence, TWISTS[twist]), inputs, depths)


# --- selection ----------------------------------------------------------------------------------------------

S_KV, INF = 32, float("inf")


def attention(masked: Deep) -> Deep:
    """Returns softmax(masked(scores)) @ V of keys in ranges, whose conditions a and b ``masked`` reads."""

    def fn(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, depth: int) -> Tensor:
        at = torch.arange(S_KV)
        a, b = at >= starts[..., None], at < starts[..., None] + 4
        return torch.softmax(masked(q @ k.transpose(-1, -2) * 0.25, starts, a, b, depth), -1) @ v

    return fn


def unlike_masks(scores: Tensor, starts: Tensor, a: Tensor, b: Tensor, depth: int) -> Tensor:
    """Adds different conditions at each step: 2**depth combinations make a key visible."""
    at, m = torch.arange(S_KV), a & b
    for k in range(depth):
        m = (m & (at >= k)) | (m & (at < S_KV - k))
    return scores.masked_fill(~m, -INF)


def whole_numbers(scores: Tensor, starts: Tensor, a: Tensor, b: Tensor, depth: int) -> Tensor:
    """Adds positions to themselves, so that sums nest."""
    low, high, at = starts[..., None], starts[..., None] + 4, torch.arange(S_KV)
    for _ in range(depth):
        at = at + (at.clone() // 1)
        low, high = low + low.clone(), high + high.clone()
    return scores.masked_fill(~((at >= low) & (at < high)), -INF)


SELECTION: dict[str, Deep] = {
    "shared_masks": lambda s, at, a, b, n: s.masked_fill(~repeated(lambda m, k: (m & a) | (m & b))(a & b, n), -INF),
    "unlike_masks": unlike_masks,
    # Masks as numbers: at each step one analysis fails and another continues.
    "counted_masks": lambda s, at, a, b, n: s.masked_fill(
        repeated(lambda m, k: ((m * a.float() + m * b.float()) > 0.5).float())((a & b).float(), n) == 0, -INF
    ),
    "scores_in_where": lambda s, at, a, b, n: repeated(lambda t, k: torch.where(a & b, t * 1.5, -INF))(s, n),
    # The scores are in every addend.
    "scores_added": lambda s, at, a, b, n: repeated(lambda t, k: t + t.clone())(s.masked_fill(~(a & b), -INF), n),
    # A bias that many steps of analysis do not distinguish from scores.
    "scores_without_end": lambda s, at, a, b, n: (
        s + repeated(lambda t, k: t + torch.where(a, t, 0.0))(torch.tanh(s), n)
    ).masked_fill(~(a & b), -INF),
    "added_masks": lambda s, at, a, b, n: (
        s + repeated(lambda m, k: m + m.clone())(torch.zeros(1, S_KV).masked_fill(~(a & b), -INF), n)
    ),
    "whole_numbers": whole_numbers,
    # Quotients, each twice in the next one.
    "differing_floors": lambda s, starts, a, b, n: s.masked_fill(
        ~(
            ((at := repeated(lambda t, k: t // 3 + (t + 1) // 2)(torch.arange(S_KV), n)) >= starts[..., None])
            & (at < starts[..., None] + 4)
        ),
        -INF,
    ),
}
"""Of scores, starts of ranges, conditions a and b, and the depth."""


def ranges() -> tuple[Tensor, ...]:
    q, k, v = (torch.randn(2, S_KV, D) for _ in range(3))
    return q, k, v, torch.randint(0, S_KV - 4, (2, S_KV))


@pytest.mark.parametrize("name", SELECTION)
@pytest.mark.parametrize("depths", [(10, 20), (20, 40)], ids=str)
def test_work_for_masks_is_bounded(name: str, depths: tuple[int, int]) -> None:
    check(attention(SELECTION[name]), ranges(), depths)


def test_a_mask_of_too_many_combinations_is_a_near_miss() -> None:
    report, _ = routed(at(15, attention(unlike_masks)), *ranges())
    assert any("too large to follow" in m.reason and "test_routing_bounds" in m.source for m in report.near_misses)
