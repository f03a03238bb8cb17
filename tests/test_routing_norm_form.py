# SPDX-License-Identifier: Apache-2.0
"""Routing of the norm with eps added to the root: every spelling, other places of an eps, two forms in one graph."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.formulas.reference_models_mhc import WIDTH, N, P, _balanced, _gates, around, normed, parameters, sublayer
from tests.test_routing_mhc_laws import reasons, same, streams
from tests.tools.capture import alike

EPS = 0.1  # large enough to tell the forms apart
K = N * WIDTH
BOTH = {"mhc_pre": 1, "mhc_post": 1}
REST = {"mhc_sinkhorn": 1, "mhc_post": 1}
Normed = Callable[[Tensor], Tensor]

SPELLINGS: dict[str, Normed] = {
    "norm": lambda v: v * (1.0 / (v.norm(dim=-1, keepdim=True) / math.sqrt(K) + EPS)),
    "times K ** -0.5": lambda v: v / (torch.linalg.vector_norm(v, dim=-1, keepdim=True) * K**-0.5 + EPS),
    "sqrt of the mean": lambda v: v / (v.square().mean(-1, keepdim=True).sqrt() + EPS),
    "sqrt of the sum": lambda v: v * torch.reciprocal(EPS + (torch.tensor(1 / K) * (v * v).sum(-1, True)).sqrt()),
    "power": lambda v: v * (v.pow(2).mean(-1, keepdim=True).pow(0.5) + EPS) ** -1,
    "einsum": lambda v: v / (torch.einsum("...k,...k->...", v, v).div(K).sqrt().unsqueeze(-1) + EPS),
    "eps before the division": lambda v: v * math.sqrt(K) / (v.norm(dim=-1, keepdim=True) + EPS * math.sqrt(K)),
}
OTHERS: dict[str, tuple[Normed, dict[str, int], str]] = {
    "twice": (
        lambda v: v / ((v.square().mean(-1, keepdim=True) + EPS).sqrt() + EPS),
        REST,
        "x has another norm; expected",
    ),
    "no mean": (lambda v: v / (v.norm(dim=-1, keepdim=True) + EPS), REST, "x has another norm; expected"),
    "each stream": (
        lambda v: (
            (u := v.unflatten(-1, (N, WIDTH))).div(u.norm(dim=-1, keepdim=True) / math.sqrt(WIDTH) + EPS).flatten(-2)
        ),
        REST,
        "each stream is normalised by itself; expected",
    ),
    "to the inverse": (lambda v: v * (1 / v.square().mean(-1, keepdim=True).sqrt() + EPS), {}, "x is not normalised"),
    "no root": (lambda v: v / (v.square().mean(-1, keepdim=True) + EPS), {}, "x is not normalised"),
    "subtracted": (lambda v: v / (v.norm(dim=-1, keepdim=True) / math.sqrt(K) - EPS), {}, "x is not normalised"),
    "of the token": (
        lambda v: v / (v.norm(dim=-1, keepdim=True) / math.sqrt(K) + EPS * v[..., :1].abs()),
        {},
        "x is not normalised",
    ),
}


def site(x: Tensor, p: P, form: Normed) -> Tensor:
    """Returns the formula with another norm."""
    v = x.flatten(-2).to(torch.promote_types(x.dtype, torch.float32))
    q = {k: t.to(v.dtype) for k, t in p.items()}
    z = form(v) @ q["phi"].T
    if x.dtype is torch.float32:
        return around(x, q, _balanced, z)
    pre, post, res = _gates(z, q)
    return res @ x + post.unsqueeze(-1) * torch.tanh((pre.unsqueeze(-1) * x).sum(-2)).unsqueeze(-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", list(SPELLINGS))
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    p = parameters()
    fn = functools.partial(site, p=p, form=SPELLINGS[name])
    got = same(fn, (streams(dtype=dtype),), p.items(), BOTH, within=1e-5 if dtype is torch.float32 else 1e-12)
    (call,) = got.nodes("mhc_inductor.mhc_pre.default")
    assert call.args[-1] == "outside" and math.isclose(call.args[5], EPS, rel_tol=1e-6)
    assert "norm_eps = 0.1 outside the root" in str([r.detail for r in got.report.routed])


def test_the_factor_after_the_projection() -> None:
    p = parameters()

    def fn(x: Tensor) -> Tensor:
        v = x.flatten(-2)
        return around(x, p, _balanced, v @ p["phi"].T / (v.norm(dim=-1, keepdim=True) / math.sqrt(K) + EPS))

    same(fn, (streams(),), p.items(), BOTH)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_head_and_a_single_pass(dynamic: bool) -> None:
    """Checks mhc_head, and mhc_coefficients whose streams are collapsed with the weights of the site before."""
    p = parameters()

    def head(x: Tensor) -> Tensor:
        z = SPELLINGS["norm"](x.flatten(-2)) @ p["phi"][:N].T
        return (torch.sigmoid(z * p["alpha"][0] + p["bias"][:N]).unsqueeze(-1) * x).sum(-2)

    def two(x: Tensor) -> Tensor:
        h_pre = None
        for _ in range(2):
            pre, post, res = _gates(SPELLINGS["sqrt of the mean"](x.flatten(-2)) @ p["phi"].T, p)
            h_in = x[..., 0, :] if h_pre is None else (h_pre.unsqueeze(-1) * x).sum(-2)
            x, h_pre = res.softmax(-1) @ x + post.unsqueeze(-1) * sublayer(h_in, p).unsqueeze(-2), pre
        return (h_pre.unsqueeze(-1) * x).sum(-2)

    for fn, wanted in ((head, {"mhc_head": 1}), (two, {"mhc_coefficients": 2, "mhc_collapse": 2, "mhc_post": 2})):
        alike(fn, (streams(),), p.items(), wanted, dynamic=None, symbolic=(0, 1) if dynamic else ())


@pytest.mark.parametrize("name", list(OTHERS))
def test_an_eps_elsewhere_stays(name: str) -> None:
    p = parameters()
    form, ops, reason = OTHERS[name]
    got = same(functools.partial(site, p=p, form=form), (streams(),), p.items(), ops)
    assert any(m.startswith(f"mhc_pre: {reason}") for m in reasons(got)), reasons(got)


def test_both_forms_of_one_x_stay_apart() -> None:
    """Checks that projections of the same streams with the same eps, but another form, are not one pre."""
    p = parameters()

    def fn(x: Tensor) -> Tensor:
        v = x.flatten(-2)
        inside = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS)
        z = torch.cat([(inside @ p["phi"].T)[..., : 2 * N], (SPELLINGS["norm"](v) @ p["phi"].T)[..., 2 * N :]], -1)
        return around(x, p, _balanced, z)

    got = same(fn, (streams(),), p.items())
    (call,) = got.nodes("mhc_inductor.mhc_pre.default")
    assert call.args[1].meta["example_value"].shape == (2 * N, K), "h_res has the other norm"

    def two(x: Tensor) -> Tensor:
        x = around(x, p, _balanced)
        return around(x, p, _balanced, SPELLINGS["norm"](x.flatten(-2)) @ p["phi"].T) + normed(x).sum() * 0

    same(two, (streams(),), p.items(), {"mhc_pre": 2, "mhc_post": 2})


def test_a_token_of_zeros_in_training() -> None:
    """Checks that the gradient is that of torch's norm, 0 through the norm."""
    p, x = parameters(), streams()
    x[0, 1] = 0
    got = same(functools.partial(site, p=p, form=SPELLINGS["norm"]), (x,), p.items())
    assert got.ops["mhc_pre"] == 1
    assert all(bool(g.isfinite().all()) for g in got.grads.values() if g is not None)
