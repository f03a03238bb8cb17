# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn iterations are found by running: what differs from them rarely, or only for some tokens, is not taken for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mhc_inductor.report import Report
from tests.formulas.reference_models_mhc import WIDTH, N, _balanced, around, parameters
from tests.tools.capture import alike, difference, eager, interpreted, looking, run

Matrix = Callable[[Tensor], Tensor]
TOKENS = 200


def balanced(logits: Tensor, iters: int = 6, eps: float = 1e-6) -> Tensor:
    return _balanced(logits, iters, eps)


def clamped(logits: Tensor, bound: float = 1e-6) -> Tensor:
    m = torch.exp(logits - logits.amax(-1, keepdim=True))
    for k in range(6):
        m = m / m.sum(-1 - k % 2, keepdim=True).clamp(min=bound)
    return m


CHANGING: dict[str, Callable[[Tensor, float], Tensor]] = {
    "eps": lambda z, number: balanced(z, eps=number),
    "a factor that is 1 now": lambda z, number: balanced(z) * (number * 2.0),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_number_that_may_change(name: str) -> None:
    """It is a symbol of the second graph. The iterations hold for its present value, which a guard keeps."""
    logits = torch.randn(7, N, N, requires_grad=True)
    with torch._dynamo.config.patch(specialize_float=False):
        compiled, reports = looking(lambda z, number: CHANGING[name](z, number))
        for number in (0.25, 0.5, 0.125):
            torch.testing.assert_close(compiled(logits, number), CHANGING[name](logits, number))
    assert [r.op for r in reports[1].routed][:1] == ["mhc_sinkhorn"]


def _written(logits: Tensor, at: Any, value: float = 0.25) -> Tensor:
    m = balanced(logits)
    m[at] = value
    return m


OTHER: dict[str, Matrix] = {
    "bounded far out": lambda z: balanced(z.clamp(-1e4, 1e4)),
    "bounded above": lambda z: balanced(z.clamp(max=300.0)),
    "bounded far above": lambda z: balanced((1.0 * z).clamp(max=3e3)),
    "bounded far below": lambda z: balanced((1.0 * z).clamp(min=-1e5)),
    "a small entry is 0": lambda z: (m := balanced(z)).where(m > 1e-9, 0.0),
    "a large entry is less": lambda z: balanced(z).clamp(max=1 - 1e-3),
    "large logits give the mean": lambda z: balanced(z).where(z.abs().amax((-1, -2), keepdim=True) < 1e3, 1 / N),
    "no NaN": lambda z: balanced(z).nan_to_num(),
    "no NaN of logits": lambda z: balanced(z.nan_to_num()),
    "no infinity of logits": lambda z: balanced((1.0 * z).nan_to_num(nan=torch.nan, neginf=-1e4)),
    "of the last token": lambda z: (m := balanced(z)).where(
        (torch.arange(z.shape[-3]) != z.shape[-3] - 1)[:, None, None], 0.5 * m
    ),
    "from a position on": lambda z: torch.cat([(m := balanced(z))[..., :100, :, :], 0.5 * m[..., 100:, :, :]], -3),
    "written from a position on": lambda z: _written(z, (..., slice(150, None), slice(None), slice(None))),
    "written at a position": lambda z: _written(z, (170,)),
    "written at a position from the end": lambda z: _written(z, (-40,)),
    "a part that is scaled in place": lambda z: ((m := balanced(z))[150:].mul_(0.5), m)[1],
    "filled at a position": lambda z: balanced(z).index_fill(0, torch.tensor([170]), 0.25),
    "written at a small position": lambda z: _written(z, (3,)),
    "of the next token": lambda z: balanced(z.roll(1, -3)),
    "less the tokens' mean": lambda z: balanced(z - z.mean(-3, keepdim=True) * torch.eye(N)),
    "a gradient of half the size": lambda z: (m := balanced(z)).detach() / 2 + m / 2,
    "no gradient": lambda z: balanced(z.detach()) + 0 * z,
    "no gradient of a step": lambda z: (m := balanced(z, 3)) / (m.sum(-1, keepdim=True).detach() + 1e-6),
    "one eps is larger": lambda z: (m := balanced(z, 5)) / (m.sum(-1, keepdim=True) + 1e-4),
    "a bound that is rarely reached": lambda z: clamped(z, 1e-12) + clamped(z, 1e-3),
    "half an iteration more": lambda z: (m := balanced(z, 2)) / (m.sum(-1, keepdim=True) + 1e-6),
    "columns first": lambda z: balanced(z.mT).mT,
    "a small number is added": lambda z: balanced(z) + 1e-5,
}
"""Matrices that are those of the op, or all but equal to them, on ordinary data."""


def _logits() -> Tensor:
    """Returns logits of which a few are very large, far below the others, infinite, or NaN."""
    z = torch.randn(TOKENS, N, N, generator=torch.Generator().manual_seed(1))
    z[5, 0, 0], z[6, 1, 2], z[7, 0, 0], z[8, 3, 1] = 2e4, -2e4, 500.0, torch.nan
    z[9, :, 0] -= 12.0
    z[10, :, 0] -= 50.0
    z[11, :2, 2:] -= 30.0
    z[12] *= 40.0
    z[13, 0, :2] += torch.tensor([3e4, 4e4])  # two entries of a row beyond a bound
    z[15, :, 1] -= torch.tensor([3e5, 4e5, 5e5, 6e5])
    z[16, 1] -= torch.tensor([3e5, 4e5, 5e5, 6e5])
    z[17, 2] = -torch.inf
    z[14, 2, 1:3] += torch.tensor([500.0, 700.0])
    return z


@pytest.mark.parametrize("tokens", [[], [0]], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", list(OTHER))
def test_what_differs_rarely_gives_what_eager_gives(name: str, tokens: list[int]) -> None:
    if tokens and name == "less the tokens' mean":
        tokens = []  # a sum over the tokens fixes their number
    z = _logits()
    got, plain = run(OTHER[name], (z,), symbolic=tokens), eager(OTHER[name], (z,))
    assert not got.report.problems
    for a, b in zip(got.outputs, plain.outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-7, equal_nan=True)
    if "position" in name or "part" in name:
        return  # that the first five tokens do not have
    _of_a_parameter(OTHER[name], z.nan_to_num()[:5])


def _of_a_parameter(fn: Matrix, z: Tensor) -> None:
    leaf = z.requires_grad_()
    alike(lambda: fn(leaf), (), [("z", leaf)])


INSIDE = [
    *("bounded far out", "bounded far above", "bounded far below", "no NaN of logits", "no infinity of logits"),
    *("of the next token", "columns first", "no gradient of a step", "one eps is larger", "half an iteration more"),
]
"""Those that are no iterations of the logits themselves."""


@pytest.mark.parametrize("name", INSIDE)
def test_iterations_of_something_else_are_not_folded_into_mhc_pre(name: str) -> None:
    p = parameters()
    x = torch.randn(TOKENS, N, WIDTH, generator=torch.Generator().manual_seed(1))
    fn = functools.partial(around, p=p, matrix=OTHER[name])
    got = alike(fn, (x,), p.items(), within=1e-4)
    held = [n.args[9] for n in got.nodes("mhc_pre")]
    assert held == [0], (held, got.report.near_misses)


def test_a_small_eps_that_is_added_is_no_bound() -> None:
    """The two differ where a sum is about as large as eps, and nowhere else."""

    def fn(z: Tensor) -> Tensor:
        m = torch.exp(z - z.amax(-1, keepdim=True))
        for k in range(6):
            m = m / (m.sum(-1 - k % 2, keepdim=True) + 1e-12)
        return m

    got = run(fn, (_logits()[:5] * 1.0,))
    calls = [n.args[1:] for n in got.nodes("mhc_sinkhorn")]
    assert calls == [(3, 1e-12, "exp_eps")], got.report.near_misses


RANDOM: dict[str, Matrix] = {
    "dropout": lambda z: balanced(torch.nn.functional.dropout(z, 1e-4, training=True)),
    "noise": lambda z: balanced(z + 1e-9 * torch.rand_like(z)),
    "noise of all tokens": lambda z: balanced(z + 1e-9 * torch.rand(N, N)),
    "after the iterations": lambda z: torch.nn.functional.dropout(balanced(z), 1e-4, training=True),
}


@pytest.mark.parametrize("name", list(RANDOM))
def test_random_numbers_stay(name: str) -> None:
    """Checks that as many are drawn as in eager."""
    z, fn = _logits()[:5], lambda z: torch.stack([RANDOM[name](z), torch.rand_like(z)])
    torch.manual_seed(3)
    got = run(fn, (z,))
    torch.manual_seed(3)
    assert difference(got, eager(fn, (z,))) < 1e-5


def _by_products(logits: Tensor) -> Tensor:
    m, ones = logits.sub(logits.max(-1, keepdim=True).values).exp(), torch.ones(N, 1)
    for _ in range(4):
        m = m * (m @ ones).clamp_min(1e-5).pow(-1)
        m = m * torch.einsum("tij->tj", m).clamp_min(1e-5).reciprocal()[:, None]
    return m


def _written_out(logits: Tensor) -> Tensor:
    rows = (logits - torch.logsumexp(logits, -1, keepdim=True)).exp() + 1e-5
    m = rows.div(rows.sum(-2, keepdim=True).add(1e-5))
    for _ in range(3):
        m = m.mul(torch.true_divide(1.0, m.sum(-1, keepdim=True) + 1e-5))
        m = torch.exp(m.log() - (m.sum(-2, keepdim=True) + 1e-5).log())
    return m


@pytest.mark.parametrize("tokens", [[], [0]], ids=["static", "dynamic"])
@pytest.mark.parametrize(("fn", "form"), [(_by_products, "exp"), (_written_out, "softmax")])
def test_iterations_that_nobody_foresaw(fn: Matrix, form: str, tokens: list[int]) -> None:
    z = _logits()[:5]
    _of_a_parameter(fn, z.clone())
    got = run(fn, (z,), symbolic=tokens)
    calls = [n.args[1:] for n in got.nodes("mhc_sinkhorn")]
    assert calls == [(4, 1e-5, form)], got.report.near_misses


@pytest.mark.parametrize(
    "wrap", [lambda z: z[..., :N] * 1.0, lambda z: z[..., :N].float() + 0.0], ids=["times", "plus"]
)
def test_an_input_that_is_written_before_the_backward_is_not_kept(wrap: Matrix) -> None:
    """The formula keeps no logits: the op starts from the product, which nobody else sees."""

    def gradient(fn: Matrix) -> Tensor:
        leaf = torch.randn(6, N, 2 * N, generator=torch.Generator().manual_seed(2)).requires_grad_()
        z = leaf * 2
        out = fn(z)
        z.add_(1.0)
        return torch.autograd.grad(out.square().sum(), leaf)[0]

    fn, report = lambda z: balanced(wrap(z)), Report()
    torch._dynamo.reset()
    compiled = gradient(torch.compile(fn, backend=interpreted(report, [])))
    assert [r.op for r in report.routed] == ["mhc_sinkhorn"]
    torch.testing.assert_close(compiled, gradient(fn))
