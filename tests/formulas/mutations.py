# SPDX-License-Identifier: Apache-2.0
"""Single changes that turn the mHC formula into another function: none may be routed as if unchanged.

Excluded are changes after which the formula is still mHC with other weights or other numbers (phi's columns permuted, 2
becoming 3, alpha negated, z scaled by a number), since routing those can be correct.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.formulas import spellings_mhc
from tests.formulas.spellings_mhc import AXES, MUTATIONS, Formula, Settings, Spelling, Step, _inv, _normalise, plainest


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change: what it replaces, the settings and picks that expose it, and the op that must not be routed.

    ``breaks`` is that op; "sinkhorn" means that no op may hold all the iterations, "fold" that mhc_pre may not.
    """

    axis: str
    name: str
    breaks: str
    settings: Settings
    picked: dict[str, str]

    @property
    def key(self) -> str:
        """Returns "axis.name"."""
        return f"{self.axis}.{self.name}"


ALL: list[Mutation] = []
FP32 = Settings(dtype=torch.float32, iters=2, hc_eps=1e-2)
SINKHORN = dataclasses.replace(FP32, iters=3, sinkhorn_eps=0.1)
EXP = dataclasses.replace(SINKHORN, form="exp")
QUIET = dataclasses.replace(FP32, mode="no_grad")


def mutate(
    axis: str, breaks: str, s: Settings = FP32, picked: dict[str, str] | None = None, **named: Callable[..., Any]
) -> None:
    """Registers callables that replace the pick of ``axis``."""
    for name, fn in named.items():
        assert name not in MUTATIONS.setdefault(axis, {}), name
        MUTATIONS[axis][name] = fn
        ALL.append(Mutation(axis, name, breaks, s, picked or {}))


def _plain(axis: str, *args: Any) -> Any:
    """Calls the first pick of ``axis``."""
    step: Step = next(iter(AXES[axis].values()))
    return step(*args)


def _scales(t: Tensor) -> Tensor:
    """Returns 3 for the first element of the last axis, 1 for the others."""
    return torch.where(torch.arange(t.shape[-1]) == 0, 3.0, 1.0)


# --- the norm -----------------------------------------------------------------------------------------------

mutate(
    "mean_square",
    "mhc_pre",
    no_square=lambda f, v, x: v.abs().mean(-1, keepdim=True),
    signed=lambda f, v, x: v.mean(-1, keepdim=True).square(),
    fourth_power=lambda f, v, x: v.pow(4).mean(-1, keepdim=True),
    sum_without_one=lambda f, v, x: (v * v).sum(-1, keepdim=True) - v[..., :1].square(),
    over_a_token=lambda f, v, x: (v * v).sum(-1, keepdim=True) / (f.width + x[..., :1, 0].float().abs()),
    one_element_more=lambda f, v, x: (v * v).mean(-1, keepdim=True) + v[..., 3:4].square() / 8,
    first_stream=lambda f, v, x: x[..., 0, :].float().square().mean(-1, keepdim=True),
    half_of_it=lambda f, v, x: v[..., : f.k // 2].square().mean(-1, keepdim=True),
    all_but_one=lambda f, v, x: v[..., 8:].square().mean(-1, keepdim=True),
    centred=lambda f, v, x: v.var(-1, keepdim=True, correction=0),
    shifted=lambda f, v, x: (v + 0.5).square().mean(-1, keepdim=True),
    other=lambda f, v, x: f.other.flatten(-2).float().square().mean(-1, keepdim=True),
    with_other=lambda f, v, x: (v * f.other.flatten(-2).float()).mean(-1, keepdim=True).abs(),
    detached=lambda f, v, x: v.detach().square().mean(-1, keepdim=True),
    half_detached=lambda f, v, x: (v * v.detach()).mean(-1, keepdim=True),
    clamped=lambda f, v, x: v.square().mean(-1, keepdim=True).clamp(min=1.1),
    clamped_inside=lambda f, v, x: v.clamp(-1, 1).square().mean(-1, keepdim=True),
    peak=lambda f, v, x: v.square().amax(-1, keepdim=True),
    all_tokens=lambda f, v, x: v.square().mean(),
    batch=lambda f, v, x: v.square().mean((-2, -1), keepdim=True),
    next_token=lambda f, v, x: v.square().mean(-1, keepdim=True).roll(1, -2),
    dropped=lambda f, v, x: f.dropout(v).square().mean(-1, keepdim=True),
    scaled_stream=lambda f, v, x: (v * _scales(v)).square().mean(-1, keepdim=True),
)
mutate(
    "mean_square",
    "mhc_pre",
    picked={"norm": "before"},
    over_tokens=lambda f, v, x: v.square().mean(-2, keepdim=True),
    each_element=lambda f, v, x: v.square(),
)
mutate(
    "root",
    "mhc_pre",
    sqrt=lambda f, s: torch.sqrt(s + f.norm_eps),
    inverse=lambda f, s: 1 / (s + f.norm_eps),
    quarter=lambda f, s: (s + f.norm_eps).pow(-0.25),
    eps_twice=lambda f, s: 1 / (torch.sqrt(s + f.norm_eps) + 0.1),
    eps_subtracted=lambda f, s: torch.rsqrt(s - 0.1),
    clamped=lambda f, s: torch.rsqrt(s.clamp(max=0.9) + f.norm_eps),
    two_roots=lambda f, s: torch.rsqrt(s + f.norm_eps) + torch.rsqrt(2 * s + f.norm_eps),
    tanh=lambda f, s: torch.tanh(torch.rsqrt(s + f.norm_eps)),
    detached=lambda f, s: torch.rsqrt(s + f.norm_eps).detach(),
    capped=lambda f, s: torch.rsqrt(s + f.norm_eps).clamp(max=0.9),
    eps_a_token=lambda f, s: torch.rsqrt(s + 0.1 * s.abs().sqrt()),
    unsquared=lambda f, s: torch.rsqrt(s * s + f.norm_eps),
)
mutate(
    "norm",
    "mhc_pre",
    absent=lambda f, v, x: f.do("project", v),
    twice=lambda f, v, x: f.do("project", v) * _inv(f, v, x).square(),
    before_and_after=lambda f, v, x: f.do("project", v * _inv(f, v, x)) * _inv(f, v, x),
    times_rms=lambda f, v, x: f.do("project", v) / _inv(f, v, x),
    layer_norm=lambda f, v, x: f.do("project", F.layer_norm(v, (f.k,), eps=f.norm_eps)),
    each_stream=lambda f, v, x: f.do("project", F.rms_norm(x.float(), (f.width,), eps=f.norm_eps).flatten(-2)),
    other_projected=lambda f, v, x: f.do("project", f.other.flatten(-2).float()) * _inv(f, v, x),
    relu=lambda f, v, x: f.do("project", v.relu()) * _inv(f, v, x),
    dropout=lambda f, v, x: f.do("project", f.dropout(v)) * _inv(f, v, x),
    added=lambda f, v, x: f.do("project", v) + _inv(f, v, x),
    l2=lambda f, v, x: f.do("project", F.normalize(v, dim=-1)),
    detached=lambda f, v, x: f.do("project", v.detach()) * _inv(f, v, x),
    rounded=lambda f, v, x: f.do("project", (v * _inv(f, v, x)).round()),
)
GAMMA = {"gamma": "flat"}
mutate(
    "gamma",
    "mhc_pre",
    picked=GAMMA,
    added=lambda f, v: v + f.gamma.reshape(-1),
    divided_by_x=lambda f, v: f.gamma.reshape(-1) * v.abs(),
    of_the_token=lambda f, v: v * f.gamma.reshape(-1) * v.mean(-1, keepdim=True),
)
mutate(
    "product",
    "mhc_pre",
    rolled=lambda f, v, w: F.linear(v.roll(1, -1), w),
    without_the_end=lambda f, v, w: F.linear(v[..., :-8], w[:, :-8]),
    flipped_streams=lambda f, v, w: F.linear(v.unflatten(-1, (f.n, f.width)).flip(-2).flatten(-2), w),
    absolute=lambda f, v, w: F.linear(v, w).abs(),
    with_a_bias_a_token=lambda f, v, w: F.linear(v, w) + f.bias * v.abs().mean(-1, keepdim=True),
    squared=lambda f, v, w: F.linear(v * v, w),
    twice_the_input=lambda f, v, w: F.linear(v, w) + v[..., : w.shape[0]],
    one_stream=lambda f, v, w: F.linear(v[..., : f.width], w[:, : f.width]),
    cumulative=lambda f, v, w: F.linear(v, w).cumsum(-1),
    next_token=lambda f, v, w: F.linear(v, w).roll(1, -2),
)

# --- coefficients -------------------------------------------------------------------------------------------

mutate(
    "affine",
    "mhc_pre",
    minus_bias_of_z=lambda f, z, a, b: z * a - b * z,
    no_z=lambda f, z, a, b: a + b + 0 * z.square(),
    relu=lambda f, z, a, b: F.relu(z * a + b),
    squared=lambda f, z, a, b: z * z * a + b,
    bias_for_alpha=lambda f, z, a, b: z * b + a,
    a_row_each=lambda f, z, a, b: z * (a + b) + b,
    of_the_token=lambda f, z, a, b: z * a * z.mean(-1, keepdim=True) + b,
    bias_of_the_token=lambda f, z, a, b: z * a + b * z.mean(-1, keepdim=True),
    summed=lambda f, z, a, b: z * a + b + z.sum(-1, keepdim=True),
    dropout=lambda f, z, a, b: f.dropout(z * a) + b,
    detached=lambda f, z, a, b: z.detach() * a + b,
    clamped=lambda f, z, a, b: (z * a).clamp(-0.3, 0.3) + b,
    rounded=lambda f, z, a, b: (z * a + b).round(),
    tanh=lambda f, z, a, b: torch.tanh(z) * a + b,
)
mutate(
    "sigmoid",
    "mhc_pre",
    tanh=lambda f, t: torch.tanh(t),
    softplus=lambda f, t: F.softplus(t),
    hard=lambda f, t: F.hardsigmoid(t),
    silu=lambda f, t: F.silu(t),
    log=lambda f, t: F.logsigmoid(t),
    relu=lambda f, t: F.relu(t),
    exp=lambda f, t: torch.exp(t),
    squared=lambda f, t: torch.sigmoid(t).square(),
    softmax=lambda f, t: torch.softmax(t, -1),
    two_plus=lambda f, t: 1 / (2 + torch.exp(-t)),
    gauss=lambda f, t: torch.special.ndtr(t),
    twice=lambda f, t: torch.sigmoid(torch.sigmoid(t)),
    straight_through=lambda f, t: torch.sigmoid(t).detach() + t - t.detach(),
    identity=lambda f, t: t,
)
mutate(
    "pre_act",
    "mhc_pre",
    doubled=lambda f, t: 2 * torch.sigmoid(t) + f.hc_eps,
    eps_times=lambda f, t: torch.sigmoid(t) * (1 + f.hc_eps),
    complement=lambda f, t: 1 - torch.sigmoid(t) + f.hc_eps,
    normalised=lambda f, t: torch.sigmoid(t) / torch.sigmoid(t).sum(-1, keepdim=True),
    clamped=lambda f, t: torch.sigmoid(t).clamp(max=0.5) + f.hc_eps,
    clamped_eps=lambda f, t: torch.sigmoid(t).clamp(min=0.5),
    dropout=lambda f, t: f.dropout(torch.sigmoid(t)) + f.hc_eps,
    detached=lambda f, t: torch.sigmoid(t).detach() + f.hc_eps,
    one_stream_tripled=lambda f, t: torch.sigmoid(t) * _scales(t) + f.hc_eps,
    eps_a_stream=lambda f, t: torch.sigmoid(t) + f.hc_eps * _scales(t),
    softmax=lambda f, t: torch.softmax(t, -1) + f.hc_eps,
    reversed=lambda f, t: torch.sigmoid(t).flip(-1) + f.hc_eps,
    rolled=lambda f, t: torch.sigmoid(t).roll(1, -1) + f.hc_eps,
    rounded=lambda f, t: torch.sigmoid(t).round() + f.hc_eps,
)
mutate("pre_act", "mhc_pre", QUIET, in_place=lambda f, t: (h := torch.sigmoid(t) + f.hc_eps).mul_(_scales(h)))
mutate(
    "post_act",
    "mhc_post",
    squared=lambda f, t: 2 * torch.sigmoid(t).square(),
    clamped=lambda f, t: (2 * torch.sigmoid(t)).clamp(max=1.0),
    tanh=lambda f, t: 2 * torch.tanh(t),
    softmax=lambda f, t: 2 * torch.softmax(t, -1),
    dropout=lambda f, t: 2 * f.dropout(torch.sigmoid(t)),
    detached=lambda f, t: 2 * torch.sigmoid(t).detach(),
    one_stream_tripled=lambda f, t: 2 * torch.sigmoid(t) * _scales(t),
    reversed=lambda f, t: 2 * torch.sigmoid(t).flip(-1),
    normalised=lambda f, t: 2 * torch.sigmoid(t) / torch.sigmoid(t).sum(-1, keepdim=True),
    power=lambda f, t: 2 ** torch.sigmoid(t),
    half_detached=lambda f, t: torch.sigmoid(t) + torch.sigmoid(t).detach(),
)


# --- sinkhorn -----------------------------------------------------------------------------------------------

mutate(
    "softmax",
    "sinkhorn",
    SINKHORN,
    columns=lambda f, t: torch.softmax(t, -2),
    tokens=lambda f, t: torch.softmax(t, 0),
    whole_matrix=lambda f, t: torch.softmax(t.flatten(-2), -1).unflatten(-1, (f.n, f.n)),
    sigmoid=lambda f, t: torch.sigmoid(t),
    absolute=lambda f, t: t.abs(),
    log=lambda f, t: F.log_softmax(t, -1),
    softmin=lambda f, t: F.softmin(t, -1).square(),
    detached=lambda f, t: torch.softmax(t, -1).detach(),
    dropout=lambda f, t: f.dropout(torch.softmax(t, -1)),
    relu=lambda f, t: F.relu(t) + 0.1,
)
mutate(
    "total",
    "sinkhorn",
    SINKHORN,
    swapped=lambda f, c, d: c.sum(-3 - d, keepdim=True),
    rows_only=lambda f, c, d: c.sum(-1, keepdim=True),
    columns_only=lambda f, c, d: c.sum(-2, keepdim=True),
    mean=lambda f, c, d: c.mean(d, keepdim=True),
    squares=lambda f, c, d: c.square().sum(d, keepdim=True),
    peak=lambda f, c, d: c.amax(d, keepdim=True),
    detached=lambda f, c, d: c.sum(d, keepdim=True).detach(),
    everything=lambda f, c, d: c.sum((-2, -1), keepdim=True),
    transposed=lambda f, c, d: c.sum(d, keepdim=True).transpose(-1, -2),
    norm=lambda f, c, d: torch.linalg.vector_norm(c, dim=d, keepdim=True),
    all_but_one=lambda f, c, d: c.sum(d, keepdim=True) - c.narrow(d, 0, 1),
    next_token=lambda f, c, d: c.sum(d, keepdim=True).roll(1, 0),
)
mutate(
    "divide",
    "sinkhorn",
    SINKHORN,
    times=lambda f, c, t: c * t,
    minus=lambda f, c, t: c - t,
    root=lambda f, c, t: c / t.sqrt(),
    squared=lambda f, c, t: c / t.square(),
    floor=lambda f, c, t: c / t.clamp(min=1.0),
    turned=lambda f, c, t: c.transpose(-1, -2) / t,
)
mutate(
    "guard",
    "sinkhorn",
    SINKHORN,
    minus=lambda f, t: t - f.sinkhorn_eps,
    missing=lambda f, t: t,
    times=lambda f, t: t * (1 + f.sinkhorn_eps),
    clamped=lambda f, t: t.clamp(min=0.97),
    doubled=lambda f, t: t + 2 * f.sinkhorn_eps,
)
EXP_SHARP = dataclasses.replace(EXP, sinkhorn_eps=0.95)
mutate(
    "clamp",
    "sinkhorn",
    EXP_SHARP,
    added_square=lambda f, t: t + f.sinkhorn_eps * t * t,
    maximum=lambda f, t: t.clamp(max=f.sinkhorn_eps),
)


def _at(step: int, change: Step) -> Step:
    """Replaces one step of the iterations by ``change(f, c, dim)``."""

    def normalise(f: Formula, c: Tensor, dim: int, at: int) -> Tensor:
        return change(f, c, dim) if at == step else _normalise(f, c, dim, at)

    return normalise


def _eps(factor: float) -> Step:
    return lambda f, c, d: c / (c.sum(d, keepdim=True) + factor * f.sinkhorn_eps)


mutate(
    "normalise",
    "sinkhorn",
    SINKHORN,
    eps_of_one_step=_at(2, _eps(3.0)),
    no_eps_in_one_step=_at(1, _eps(0.0)),
    no_eps_in_the_first=_at(0, _eps(0.0)),
    eps_of_the_last=_at(4, _eps(2.0)),
    rows_differ=lambda f, c, d, at: _eps(2.0 if d == -1 else 1.0)(f, c, d),
    wrong_axis_once=_at(1, lambda f, c, d: _normalise(f, c, -2, 1)),
    skipped=_at(1, lambda f, c, d: c),
    dropout_once=_at(2, lambda f, c, d: f.dropout(_normalise(f, c, d, 2))),
    detached_once=_at(2, lambda f, c, d: _normalise(f, c.detach(), d, 2)),
    relu_of_logits_once=_at(3, lambda f, c, d: F.relu(_normalise(f, c, d, 3) - 0.2)),
    squared_once=_at(2, lambda f, c, d: _normalise(f, c, d, 2).square()),
    scaled_once=_at(3, lambda f, c, d: 1.5 * _normalise(f, c, d, 3)),
    of_the_first_once=_at(3, lambda f, c, d: c / (c.roll(1, d).square().sum(d, keepdim=True) + f.sinkhorn_eps)),
    turned_once=_at(2, lambda f, c, d: _normalise(f, c.transpose(-1, -2), d, 2)),
)
mutate(
    "normalise",
    "sinkhorn",
    EXP,
    exp_skipped=_at(2, lambda f, c, d: c),
    exp_swapped=lambda f, c, d, at: _normalise(f, c, -3 - d, at),
    exp_wrong_axis_once=_at(3, lambda f, c, d: _normalise(f, c, -1, 3)),
)


def _again(first: bool, after: bool) -> Step:
    """Iterates with eps added to the softmax, and after each step."""

    def fn(f: Formula, t: Tensor) -> Tensor:
        c = torch.softmax(t, -1) + f.sinkhorn_eps if first else torch.softmax(t, -1)
        for i in range(2 * f.iters - 1):
            c = f.do("normalise", c, -2 + i % 2, i)
            c = c + f.sinkhorn_eps if after else c
        return c

    return fn


mutate(
    "sinkhorn",
    "sinkhorn",
    SINKHORN,
    no_eps_after_softmax=_again(False, False),
    eps_every_time=_again(True, True),
    rows_for_columns=lambda f, t: f.do("normalise", f.do("softmax", t) + f.sinkhorn_eps, -1, 0),
)
mutate(
    "sinkhorn",
    "fold",
    SINKHORN,
    clamped=lambda f, t: _plain("sinkhorn", f, t.clamp(-0.3, 0.3)),
    of_other_logits=lambda f, t: _plain("sinkhorn", f, t.roll(1, -1)),
    damped=lambda f, t: _plain("sinkhorn", f, 0.5 * t + 0.5 * t.mean(0)),
)
mutate(
    "peak",
    "sinkhorn",
    EXP_SHARP,
    columns=lambda f, t: t.amax(-2, keepdim=True),
    twice=lambda f, t: 2 * t.amax(-1, keepdim=True),
    tokens=lambda f, t: t.amax(0, keepdim=True),
)

# --- collapse -----------------------------------------------------------------------------------------------

mutate(
    "collapse",
    "mhc_pre",
    mean=lambda f, h, x: (h.unsqueeze(-1) * x).mean(-2),
    without_the_last=lambda f, h, x: (h[..., :-1, None] * x[..., :-1, :]).sum(-2),
    rolled=lambda f, h, x: (h.roll(1, -1).unsqueeze(-1) * x).sum(-2),
    flipped=lambda f, h, x: (h.unsqueeze(-1) * x.flip(-2)).sum(-2),
    squared=lambda f, h, x: (h.unsqueeze(-1) * x.square()).sum(-2),
    peak=lambda f, h, x: (h.unsqueeze(-1) * x).amax(-2),
    absolute=lambda f, h, x: (h.unsqueeze(-1) * x).abs().sum(-2),
    coefficients_squared=lambda f, h, x: (h.square().unsqueeze(-1) * x).sum(-2),
    product=lambda f, h, x: (h.unsqueeze(-1) + x).sum(-2),
    one_stream_tripled=lambda f, h, x: torch.einsum("...n,...nd->...d", h * _scales(h), x),
    dropout=lambda f, h, x: (h.unsqueeze(-1) * f.dropout(x)).sum(-2),
    one_coefficient=lambda f, h, x: (h[..., :1, None] * x).sum(-2),
    first_with_second=lambda f, h, x: sum(h[..., i, None] * x[..., i ^ 1, :] for i in range(f.n)),
    cumulative=lambda f, h, x: (h.unsqueeze(-1) * x.cumsum(-2)).sum(-2),
    next_token=lambda f, h, x: (h.unsqueeze(-1) * x.roll(1, 0)).sum(-2),
)
mutate(
    "collapse_input",
    "mhc_pre",
    other=lambda f, x: f.other,
    detached=lambda f, x: x.detach(),
    sum_with_other=lambda f, x: x + f.other,
    scaled=lambda f, x: 3 * x,
    tripled_stream=lambda f, x: x * _scales(x.transpose(-1, -2))[:, None],
    relu=lambda f, x: F.relu(x),
    normed=lambda f, x: F.rms_norm(x, (f.width,)),
)


mutate(
    "disturb",
    "mhc_pre",
    QUIET,
    {"entry": "copied"},
    mul=lambda f, x: x.mul_(2),
    add=lambda f, x: x.add_(f.other),
    copy=lambda f, x: x.copy_(f.other),
    relu=lambda f, x: F.relu(x, inplace=True),
    item=lambda f, x: (operator.setitem(x, (..., 0, slice(None)), 0), x)[1],
    view=lambda f, x: (x.flatten(-2)[..., ::2].mul_(3), x)[1],
    detach=lambda f, x: (x.detach().mul_(2), x)[1],
    out=lambda f, x: torch.mul(x, 2, out=x),
    augmented=lambda f, x: operator.imul(x, 0.5),
)

# --- post ---------------------------------------------------------------------------------------------------

mutate(
    "expand",
    "mhc_post",
    added=lambda f, h, t: h.unsqueeze(-1) + t.unsqueeze(-2),
    rolled=lambda f, h, t: h.roll(1, -1).unsqueeze(-1) * t.unsqueeze(-2),
    squared=lambda f, h, t: h.square().unsqueeze(-1) * t.unsqueeze(-2),
    one_coefficient=lambda f, h, t: h[..., :1, None] * t.unsqueeze(-2).expand(*t.shape[:-1], f.n, f.width),
    one_stream_tripled=lambda f, h, t: (h * _scales(h)).unsqueeze(-1) * t.unsqueeze(-2),
    one_stream_only=lambda f, h, t: F.pad(h[..., :1, None] * t.unsqueeze(-2), (0, 0, 0, f.n - 1)),
    dropout=lambda f, h, t: f.dropout(h.unsqueeze(-1) * t.unsqueeze(-2)),
    detached=lambda f, h, t: h.detach().unsqueeze(-1) * t.unsqueeze(-2),
    clamped=lambda f, h, t: (h.unsqueeze(-1) * t.unsqueeze(-2)).clamp(max=0.5),
    a_stream_each=lambda f, h, t: h.unsqueeze(-1) * t.unsqueeze(-2) * _scales(h)[:, None],
)
mutate(
    "mix",
    "mhc_post",
    squared=lambda f, r, x: r.square() @ x,
    twice=lambda f, r, x: r @ (r @ x),
    plus_identity=lambda f, r, x: r @ x + x,
    symmetric=lambda f, r, x: 0.5 * (r + r.transpose(-1, -2)) @ x,
    absolute=lambda f, r, x: r @ x.abs(),
    diagonal=lambda f, r, x: torch.einsum("...ii,...id->...id", r, x),
    rolled=lambda f, r, x: r @ x.roll(1, -2),
    one_row_tripled=lambda f, r, x: (r * _scales(r)[:, None]) @ x,
    detached=lambda f, r, x: r.detach() @ x,
    detached_streams=lambda f, r, x: r @ x.detach(),
    dropout=lambda f, r, x: f.dropout(r) @ x,
    softmaxed=lambda f, r, x: torch.softmax(r, -1) @ x,
    scaled=lambda f, r, x: 0.5 * (r @ x),
    without_the_last=lambda f, r, x: r[..., :-1] @ x[..., :-1, :],
    triangular=lambda f, r, x: r.tril() @ x,
    row_sums=lambda f, r, x: r.sum(-1, keepdim=True) * x * 0.5,
)
mutate(
    "mix_input",
    "mhc_post",
    other=lambda f, x: f.other,
    relu=lambda f, x: F.relu(x),
    normed=lambda f, x: F.rms_norm(x, (f.width,)),
    next_token=lambda f, x: x.roll(1, 0),
    scaled=lambda f, x: 3 * x,
)
mutate(
    "add",
    "mhc_post",
    minus=lambda f, a, b: a - b,
    times=lambda f, a, b: a * b,
    weighted=lambda f, a, b: torch.add(a, b, alpha=0.5),
    maximum=lambda f, a, b: torch.maximum(a, b),
    rolled=lambda f, a, b: a + b.roll(1, -2),
    lerp=lambda f, a, b: torch.lerp(a, b, 0.3),
    hypot=lambda f, a, b: torch.hypot(a, b),
)
HEAD = Settings(dtype=torch.float32, rows="head", uses="h_in", hc_eps=1e-2)
HEADS = ("mean_square.sum_without_one", "norm.absent", "sigmoid.tanh", "collapse.mean", "collapse_input.other")


def head_mutations() -> Iterator[Mutation]:
    """Yields those mutations that also apply to the head."""
    for m in ALL:
        if m.key in HEADS or (m.breaks == "mhc_pre" and m.settings is FP32 and m.axis in ("root", "pre_act")):
            yield dataclasses.replace(m, breaks="mhc_head", settings=HEAD)


def mutants(extra: dict[str, str] | None = None) -> Iterator[tuple[Mutation, Spelling, Spelling]]:
    """Yields (mutation, mutant, unchanged formula) in the plainest spelling except for ``extra``."""
    for m in (*ALL, *head_mutations()):
        picked = plainest(m.settings, **{**(extra or {}), **m.picked})
        name = f"{m.key}{'-head' if m.settings is HEAD else ''}"
        pair = [spellings_mhc._make(name, m.settings, picked, "rows", 11, mutation) for mutation in (m.key, "")]
        other = torch.randn(pair[0].inputs[0].shape, generator=torch.Generator().manual_seed(3))
        for spelling in pair:
            spelling.inputs = (*spelling.inputs, other)
        yield m, pair[0], pair[1]
