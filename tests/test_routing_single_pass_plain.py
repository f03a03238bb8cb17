# SPDX-License-Identifier: Apache-2.0
"""Single-pass mHC in plain PyTorch (DeepSeek-V4.1): spellings, what stays, and equal results."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.formulas.laws import hooked
from tests.tools.capture import Captured, difference, eager, reasons, run

D, N, T = 16, 4, 6
Fn = Callable[..., Any]


def _sinkhorn(c: Tensor) -> Tensor:
    c = c.softmax(-1) + 1e-6
    for step in range(7):
        c = c / (c.sum(-2 + step % 2, keepdim=True) + 1e-6)
    return c


COLLAPSES: dict[str, Fn] = {
    "sum": lambda w, x: (w.unsqueeze(-1) * x).sum(-2).to(x.dtype),
    "einsum": lambda w, x: torch.einsum("...n,...nd->...d", w.to(x.dtype), x),
    "matmul": lambda w, x: torch.matmul(w.unsqueeze(-2).to(x.dtype), x).squeeze(-2),
    "streams": lambda w, x: sum(w[..., i, None] * x[..., i, :] for i in range(N)).to(x.dtype),
    "unbound": lambda w, x: sum(a[..., None] * b for a, b in zip(w.unbind(-1), x.unbind(-2), strict=True)).to(x.dtype),
    "flat": lambda w, x: (w.unsqueeze(-1) * x.flatten(-2).unflatten(-1, (N, D))).sum(dim=-2).to(x.dtype),
}
MIXES: dict[str, Fn] = {
    "matmul": lambda p, f, c, x: (p.unsqueeze(-1) * f.unsqueeze(-2) + torch.matmul(c.transpose(-1, -2), x.float())).to(
        x.dtype
    ),
    "einsum": lambda p, f, c, x: (
        torch.einsum("...n,...d->...nd", p, f.float()) + torch.einsum("...io,...id->...od", c, x.float())
    ).to(x.dtype),
}


class Site(nn.Module):
    """The parameters of one site, named as DeepSeek-V4's."""

    def __init__(self) -> None:
        super().__init__()
        m = N * N + 2 * N
        self.fn, self.base = nn.Parameter(torch.randn(m, N * D) * 0.1), nn.Parameter(torch.randn(m) * 0.1)
        self.scale, self.sublayer = nn.Parameter(torch.tensor([1.1, 0.9, 1.05])), nn.Linear(D, D)

    def coefficients(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = x.flatten(-2).float()
        mix = F.linear(flat, self.fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        pre, post, comb = mix.split([N, N, N * N], -1)
        pre = torch.sigmoid(pre * self.scale[0] + self.base[:N]) + 1e-6
        post = 2 * torch.sigmoid(post * self.scale[1] + self.base[N : 2 * N])
        comb = (comb * self.scale[2] + self.base[2 * N :]).view(*comb.shape[:-1], N, N)
        return pre, post, _sinkhorn(comb)


class Model(nn.Module):
    around: Fn = staticmethod(lambda k: contextlib.nullcontext())
    seen: Fn = staticmethod(lambda pre: pre)
    call: Fn = staticmethod(lambda step, *given: step(*given))

    def __init__(self, depth: int = 3, collapse: str = "sum", mix: str = "matmul", between: Fn | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sites = nn.ModuleList(Site() for _ in range(depth))
        self.collapse, self.mix, self.between = COLLAPSES[collapse], MIXES[mix], between

    def first(self, x: Tensor) -> Tensor:
        pre = torch.zeros(x.shape[:-1], dtype=torch.float32)
        pre[..., 0] = 1
        return pre

    def step(self, pre: Tensor, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        site = self.sites[k]
        h_in = self.collapse(pre, x)
        with self.around(k):
            pre, post, comb = site.coefficients(x)
        return self.seen(pre), self.mix(post, site.sublayer(h_in), comb, x)

    def forward(self, x: Tensor) -> Tensor:
        pre = self.first(x)
        for k in range(len(self.sites)):
            pre, x = self.call(self.step, pre, x, k)
            x = x if self.between is None else self.between(x)
        return self.collapse(pre, x)


def streams(*lead: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(lead or (2, T)), N, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def fused(got: Captured) -> Counter[str]:
    return Counter(f.op for f in got.report.fused)


WHOLE = {"mhc_coefficients": 3, "mhc_post": 3, "mhc_collapse": 4}


def check(model: nn.Module, x: Tensor, bar: float = 1e-6, **options: Any) -> Captured:
    named = [*model.named_parameters()]
    got, plain = run(model, [x], named, **options), eager(model, [x], named, options.get("grad", True))
    assert difference(got, plain) < bar, reasons(got)
    assert not got.report.problems
    return got


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("collapse", COLLAPSES)
def test_every_site_is_routed_and_fused(collapse: str, mix: str) -> None:
    got = check(Model(collapse=collapse, mix=mix), streams())
    assert {k: got.ops[k] for k in WHOLE} == WHOLE, reasons(got)
    assert fused(got) == {"mhc_single_pass": 2}


@pytest.mark.parametrize("options", [{"dynamic": True}, {"grad": False}, {"symbolic": [1]}], ids=str)
def test_modes(options: dict[str, Any]) -> None:
    got = check(Model(), streams(), **options)
    assert {k: got.ops[k] for k in WHOLE} == WHOLE and fused(got) == {"mhc_single_pass": 2}, reasons(got)


@pytest.mark.parametrize("lead", [(T,), (1, 1), (2, 1, 3)])
def test_leading_dimensions(lead: tuple[int, ...]) -> None:
    got = check(Model(), streams(*lead))
    assert {k: got.ops[k] for k in WHOLE} == WHOLE, reasons(got)


def by_sum(p: Tensor, f: Tensor, c: Tensor, x: Tensor) -> Tensor:
    return (p[..., None] * f[..., None, :] + (c[..., None] * x[..., None, :]).sum(-3)).type_as(f)


@pytest.mark.parametrize("cast", ["to", "type_as"])
def test_bf16_streams_are_fused(cast: str) -> None:
    """The op's result is the cast of the sum, so that the next site reads it, and not a copy in fp32 rounded again."""
    model = Model(mix="matmul")
    for site in model.sites:
        site.sublayer.bfloat16()
    if cast == "type_as":
        model.mix = by_sum
    got = check(model, streams(dtype=torch.bfloat16), bar=2e-2)
    assert {k: got.ops[k] for k in WHOLE} == WHOLE and fused(got) == {"mhc_single_pass": 2}, reasons(got)


def _filled(x: Tensor) -> Tensor:
    pre = x.new_zeros(x.shape[:-1])
    pre.select(-1, 0).fill_(1.0)
    return pre


FIRST: dict[str, Fn] = {
    "one_hot": lambda x: F.one_hot(torch.zeros(x.shape[:-2], dtype=torch.long), N).float(),
    "cat": lambda x: torch.cat([torch.ones(*x.shape[:-2], 1), torch.zeros(*x.shape[:-2], N - 1)], -1),
    "filled": _filled,
    "fewer": lambda x: F.pad(torch.ones(*x.shape[:-2], 1), (0, N - 1)),
}


@pytest.mark.parametrize("first", FIRST)
def test_first_weights(first: str) -> None:
    """A write to the first weights keeps nothing else from being routed: ``type_as`` reads no element of f_out."""
    model = Model()
    model.first, model.mix = FIRST[first], by_sum
    got = check(model, streams())
    assert {k: got.ops[k] for k in WHOLE} == WHOLE and fused(got) == {"mhc_single_pass": 2}, reasons(got)


def test_another_write_to_the_streams_ends_the_fusion() -> None:
    got = check(Model(between=lambda x: x.index_add(0, torch.tensor([0]), x[:1])), streams())
    assert {k: got.ops[k] for k in WHOLE} == WHOLE and not fused(got), reasons(got)


def eye(x: Tensor) -> Tensor:
    return torch.eye(N)[0].expand(x.shape[:-1])


OTHERS: dict[str, dict[str, Fn]] = {
    "checkpointed sites": {"call": functools.partial(checkpoint, use_reentrant=False)},
    "a hook on the weights": {"seen": hooked(lambda g: g * 3)},
    "weights under no_grad": {"around": lambda k: torch.no_grad() if k == 1 else contextlib.nullcontext()},
}


@pytest.mark.parametrize("how", OTHERS)
def test_gradients_are_those_of_eager(how: str) -> None:
    model = Model()
    for name, fn in {"first": eye, **OTHERS[how]}.items():
        setattr(model, name, fn)
    check(model, streams())


CHANGES: dict[str, Fn] = {
    "scaled": lambda w, x: (2 * w.unsqueeze(-1) * x).sum(-2),
    "reversed": lambda w, x: (w.flip(-1).unsqueeze(-1) * x).sum(-2),
    "constant": lambda w, x: (w.unsqueeze(-1) * x + 0.5).sum(-2),
    "other tokens": lambda w, x: (w.roll(1, 0).unsqueeze(-1) * x).sum(-2),
    "three streams": lambda w, x: (w.unsqueeze(-1) * x)[..., :3, :].sum(-2),
    "squared": lambda w, x: (w.square().unsqueeze(-1) * x).sum(-2),
    "detached": lambda w, x: (w.detach().unsqueeze(-1) * x).sum(-2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_collapse_that_differs_stays(change: str) -> None:
    model = Model()
    model.collapse = CHANGES[change]
    got = check(model, streams())
    # The first site's weights are not a sigmoid's: "scaled" and their like are weights of the model's own there.
    assert got.ops["mhc_collapse"] <= 1 and got.ops["mhc_pre"] == 0


@pytest.mark.parametrize("frozen", ["fn", "base", "scale", "all"])
def test_frozen_parameters_have_no_gradient(frozen: str) -> None:
    model = Model()
    for name, p in model.sites[1].named_parameters():
        p.requires_grad_(not (frozen == "all" or name == frozen))
    check(model, streams())


def test_weights_that_the_model_returns() -> None:
    model = Model(depth=2)

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        (a, b), given = model.sites, []
        pre, post, comb = a.coefficients(x)
        given += [pre, post, comb]
        x = model.mix(post, a.sublayer(x[..., 0, :]), comb, x)
        h_in = model.collapse(pre, x)
        pre, post, comb = b.coefficients(x)
        return model.mix(post, b.sublayer(h_in), comb, x), pre, *given, x

    named = [*model.named_parameters()]
    got = run(forward, [streams()], named)
    assert difference(got, eager(forward, [streams()], named)) < 1e-6
