# SPDX-License-Identifier: Apache-2.0
"""A generator of spellings of the mHC formula (arXiv 2512.24880), and of mutants that are no longer mHC.

A spelling is one pick for each axis of :data:`AXES`: how x is flattened, where the norm is applied, how phi is stored,
and so on. Every pick is a callable written in ordinary PyTorch, and :class:`Formula` composes them, so two spellings
differ in the code that runs. A mutant is a spelling in which one callable is replaced by one of :data:`MUTATIONS`.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes, dtypes and constants of one formula."""

    n: int = 4
    width: int = 16
    lead: tuple[int, ...] = (2, 3)
    dtype: torch.dtype = torch.bfloat16
    rows: str = "full"  # "full": n*n + 2n rows of phi; "two": 2n rows; "head": n rows
    norm_eps: float = 1e-6
    hc_eps: float = 1e-6
    post_mult: float = 2.0
    post_eps: float = 0.0
    iters: int = 0
    sinkhorn_eps: float = 1e-6
    form: str = "softmax"
    transposed: bool = False
    uses: str = "layer"  # which outputs are returned: x_out ("layer"), "h_in", "h_in+post", or all three ("raw")
    mode: str = "train"  # "train", "no_grad", "autocast", "checkpoint"
    dynamic: bool = False

    @property
    def m(self) -> int:
        """Returns the number of rows of phi."""
        return {"full": self.n * self.n + 2 * self.n, "two": 2 * self.n, "head": self.n}[self.rows]

    @property
    def parts(self) -> list[int]:
        """Returns the number of rows in each part of phi."""
        return [self.n, self.n, self.n * self.n][: {"full": 3, "two": 2, "head": 1}[self.rows]]


AXES: dict[str, dict[str, Step]] = {}
"""Maps each axis to its picks, by name."""
MUTATIONS: dict[str, dict[str, Step]] = {}
"""Maps each axis to its mutations, by name: callables that replace the pick."""
CONDITIONS: dict[str, Callable[[Settings], bool]] = {}
"""Maps "axis.name" of a pick to a condition: whether the pick can be written for given settings."""


def pick(axis: str, name: str, when: Callable[[Settings], bool] | None = None) -> Callable[[Step], Step]:
    """Registers a callable as a pick of ``axis``."""

    def enter(fn: Step) -> Step:
        assert name not in AXES.setdefault(axis, {}), name
        AXES[axis][name] = fn
        if when is not None:
            CONDITIONS[f"{axis}.{name}"] = when
        return fn

    return enter


def picks(axis: str, **named: Step) -> None:
    """Registers short callables as picks of ``axis``."""
    for name, fn in named.items():
        pick(axis, name)(fn)


# --- x as one fp32 vector per token -------------------------------------------------------------------------

picks(
    "flatten",
    view=lambda f, x: x.view(*x.shape[:-2], -1),
    reshape=lambda f, x: x.reshape(*x.shape[:-2], f.n * f.width),
    flatten=lambda f, x: x.flatten(-2),
    flatten_positive=lambda f, x: torch.flatten(x, start_dim=x.dim() - 2),
    through_tokens=lambda f, x: x.reshape(-1, f.n * f.width).reshape(*x.shape[:-2], f.n * f.width),
    contiguous=lambda f, x: x.contiguous().view(*x.shape[:-2], x.shape[-2] * x.shape[-1]),
)
picks(
    "upcast",
    float=lambda f, t: t.float(),
    to=lambda f, t: t.to(torch.float32),
    to_dtype=lambda f, t: t.to(dtype=torch.float32),
    type=lambda f, t: t.type(torch.float32),
    like=lambda f, t: t.type_as(f.wide),
)
picks(
    "vector",
    flatten_first=lambda f, x: f.do("upcast", f.do("flatten", x)),
    upcast_first=lambda f, x: f.do("flatten", f.do("upcast", x)),
)

# --- the norm -----------------------------------------------------------------------------------------------

picks(
    "mean_square",
    mul_mean=lambda f, v, x: (v * v).mean(-1, keepdim=True),
    pow_mean=lambda f, v, x: v.pow(2).mean(dim=-1, keepdim=True),
    square_mean=lambda f, v, x: v.square().mean(-1, keepdim=True),
    star_sum=lambda f, v, x: (v**2).sum(-1, keepdim=True) / f.k,
    torch_mean=lambda f, v, x: torch.mean(v * v, dim=-1, keepdim=True),
    sum_times=lambda f, v, x: torch.sum(v.square(), -1, keepdim=True) * (1.0 / f.k),
    unsqueezed=lambda f, v, x: torch.square(v).mean(-1).unsqueeze(-1),
    two_dims=lambda f, v, x: x.float().pow(2).mean((-2, -1)).unsqueeze(-1),
    two_dims_keep=lambda f, v, x: x.float().square().mean(dim=(-1, -2), keepdim=True).squeeze(-1),
    einsum=lambda f, v, x: torch.einsum("...k,...k->...", v, v)[..., None] / f.k,
    two_means=lambda f, v, x: x.float().pow(2).mean(-1).mean(-1, keepdim=True),
)
picks(
    "root",
    rsqrt=lambda f, s: torch.rsqrt(s + f.norm_eps),
    add_rsqrt=lambda f, s: s.add(f.norm_eps).rsqrt(),
    one_over=lambda f, s: 1 / torch.sqrt(s + f.norm_eps),
    one_over_float=lambda f, s: 1.0 / (f.norm_eps + s).sqrt(),
    power=lambda f, s: (s + f.norm_eps).pow(-0.5),
    star=lambda f, s: (s + f.norm_eps) ** -0.5,
    reciprocal=lambda f, s: torch.sqrt(s + f.norm_eps).reciprocal(),
    add_left=lambda f, s: torch.rsqrt(f.norm_eps + s),
)


def _inv(f: Formula, v: Tensor, x: Tensor) -> Tensor:
    return f.do("root", f.do("mean_square", v, x))


def _rms(f: Formula, v: Tensor, x: Tensor) -> Tensor:
    return torch.sqrt(f.do("mean_square", v, x) + f.norm_eps)


def _each(fn: Callable[[Tensor], Tensor], z: Any) -> Any:
    return [fn(t) for t in z] if isinstance(z, list) else fn(z)


def _weigh(f: Formula, v: Tensor) -> Tensor:
    return f.do("gamma", v)


picks(
    "norm",
    before=lambda f, v, x: f.do("project", _weigh(f, v * _inv(f, v, x))),
    before_left=lambda f, v, x: f.do("project", _weigh(f, _inv(f, v, x) * v)),
    before_divide=lambda f, v, x: f.do("project", _weigh(f, v / _rms(f, v, x))),
    weight_first=lambda f, v, x: f.do("project", _weigh(f, v) * _inv(f, v, x)),
)


@pick("norm", "after")
def _after(f: Formula, v: Tensor, x: Tensor) -> Any:
    inv = _inv(f, v, x)
    return _each(lambda t: t * inv, f.do("project", _weigh(f, v)))


@pick("norm", "after_left")
def _after_left(f: Formula, v: Tensor, x: Tensor) -> Any:
    z, inv = f.do("project", _weigh(f, v)), _inv(f, v, x)
    return _each(lambda t: torch.mul(inv, t), z)


@pick("norm", "after_divide")
def _after_divide(f: Formula, v: Tensor, x: Tensor) -> Any:
    rms = _rms(f, v, x)
    return _each(lambda t: t / rms, f.do("project", _weigh(f, v)))


picks(
    "norm",
    rms_norm=lambda f, v, x: f.do("project", _weigh(f, F.rms_norm(v, (f.k,), eps=f.norm_eps))),
    torch_rms_norm=lambda f, v, x: f.do("project", _weigh(f, torch.rms_norm(v, [v.shape[-1]], None, f.norm_eps))),
    module=lambda f, v, x: f.do("project", _weigh(f, f.rms(v))),
    two_dims=lambda f, v, x: f.do(
        "project", _weigh(f, F.rms_norm(x.float(), (f.n, f.width), eps=f.norm_eps).flatten(-2))
    ),
)

# --- gamma --------------------------------------------------------------------------------------------------

picks(
    "gamma",
    none=lambda f, v: v,
    flat=lambda f, v: v * f.gamma,
    flat_left=lambda f, v: f.gamma * v,
    streams=lambda f, v: v * f.gamma.reshape(-1),
    streams_view=lambda f, v: v * f.gamma.view(1, f.k),
    blocks=lambda f, v: (v.unflatten(-1, (f.n, f.width)) * f.gamma).flatten(-2),
    folded=lambda f, v: v,  # weight() multiplies it into phi
    one_plus=lambda f, v: v * (1 + f.gamma),
    one_plus_float=lambda f, v: v * (f.gamma.reshape(-1) + 1.0),
)

# --- the projection -----------------------------------------------------------------------------------------

STORES = {"rows", "columns", "blocks", "linear", "three", "three_linear", "three_columns", "bf16"}


def weight(f: Formula) -> Tensor:
    """Returns phi as one tensor [m, n*D]."""
    phi: Tensor = f.phi
    if f.store == "columns":
        phi = phi.t()
    elif f.store == "blocks":
        phi = phi.reshape(f.m, f.k)
    elif f.store == "bf16":
        phi = phi.float()
    return phi * f.gamma.reshape(-1) if f.picked["gamma"] == "folded" else phi


def _project(f: Formula, v: Tensor) -> Any:
    if f.store == "linear":
        return f.phi_linear(v)
    if not f.store.startswith("three"):
        return f.do("product", v, weight(f))
    how = {"three_linear": lambda phi: phi(v), "three_columns": lambda phi: v @ phi}
    return [how[f.store](phi) if f.store in how else f.do("product", v, phi) for phi in f.phis]


picks("project", stored=_project)
_bsk = lambda s: len(s.lead) == 2  # noqa: E731

picks(
    "product",
    linear=lambda f, v, w: F.linear(v, w),
    at=lambda f, v, w: v @ w.t(),
    matmul=lambda f, v, w: torch.matmul(v, w.T),
    mT=lambda f, v, w: torch.matmul(v, w.mT),
    transpose=lambda f, v, w: v.matmul(w.transpose(0, 1)),
    einsum=lambda f, v, w: torch.einsum("...k,mk->...m", v, w),
    einsum_left=lambda f, v, w: torch.einsum("ok,...k->...o", w, v),
    einsum_columns=lambda f, v, w: torch.einsum("...k,km->...m", v, w.t()),
    einsum_blocks=lambda f, v, w: torch.einsum(
        "...nd,mnd->...m", v.view(*v.shape[:-1], f.n, f.width), w.view(w.shape[0], f.n, f.width)
    ),
    einsum_columns_blocks=lambda f, v, w: torch.einsum(
        "...nd,ndm->...m", v.unflatten(-1, (f.n, f.width)), w.t().reshape(f.n, f.width, w.shape[0])
    ),
    mm=lambda f, v, w: torch.mm(v.reshape(-1, f.k), w.t()).view(*v.shape[:-1], w.shape[0]),
    mm_reversed=lambda f, v, w: torch.mm(w, v.reshape(-1, f.k).t()).t().reshape(*v.shape[:-1], w.shape[0]),
    mul_sum=lambda f, v, w: (v.unsqueeze(-2) * w).sum(-1),
    tensordot=lambda f, v, w: torch.tensordot(v, w, dims=([-1], [1])),
    inner=lambda f, v, w: torch.inner(v, w),
    linear_tokens=lambda f, v, w: F.linear(v.flatten(0, -2), w).unflatten(0, v.shape[:-1]),
    mv=lambda f, v, w: torch.matmul(w, v.unsqueeze(-1)).squeeze(-1),
)
pick("product", "einsum_named", _bsk)(lambda f, v, w: torch.einsum("bsk,ok->bso", v, w))
pick("product", "bmm", _bsk)(lambda f, v, w: torch.bmm(v, w.t().expand(v.shape[0], -1, -1)))
pick("product", "bmm_repeated", _bsk)(lambda f, v, w: torch.bmm(v, w.t().unsqueeze(0).repeat(v.shape[0], 1, 1)))

# --- alpha, bias, parts -------------------------------------------------------------------------------------

picks(
    "alpha",
    indexed=lambda f: [f.alpha[i] for i in range(f.count)],
    unbound=lambda f: list(f.alpha.unbind(0)),
    split=lambda f: list(f.alpha.split(1)),
    chunk=lambda f: list(f.alpha.chunk(f.count)),
    sliced=lambda f: [f.alpha[i : i + 1] for i in range(f.count)],
    unpacked=lambda f: list(torch.unbind(f.alpha)),
    select=lambda f: [f.alpha.select(0, i) for i in range(f.count)],
    scalars=lambda f: list(f.alphas),
    one_element=lambda f: list(f.alphas),
    viewed=lambda f: [f.alpha[i].view(1, 1) for i in range(f.count)],
    upcast=lambda f: list(f.alpha.float().unbind()),
)
ALPHA_STORE = {"scalars": "scalars", "one_element": "one_element"}

picks(
    "bias",
    sliced=lambda f: [f.bias[f.at[i] : f.at[i + 1]] for i in range(f.count)],
    split=lambda f: list(f.bias.split(f.parts)),
    torch_split=lambda f: list(torch.split(f.bias, f.parts, dim=0)),
    narrow=lambda f: [f.bias.narrow(0, f.at[i], f.parts[i]) for i in range(f.count)],
    tensor_split=lambda f: list(f.bias.tensor_split(f.at[1:-1])),
    three=lambda f: list(f.biases),
    three_square=lambda f: [b.reshape(-1) for b in f.biases],
    upcast=lambda f: list(f.bias.float().split_with_sizes(f.parts)),
)
BIAS_STORE = {"three": "three", "three_square": "square"}

picks(
    "split",
    slices=lambda f, z: [z[..., f.at[i] : f.at[i + 1]] for i in range(f.count)],
    split=lambda f, z: list(z.split(f.parts, dim=-1)),
    torch_split=lambda f, z: list(torch.split(z, f.parts, -1)),
    narrow=lambda f, z: [z.narrow(-1, f.at[i], f.parts[i]) for i in range(f.count)],
    tensor_split=lambda f, z: list(torch.tensor_split(z, f.at[1:-1], dim=-1)),
    split_with_sizes=lambda f, z: list(z.split_with_sizes(f.parts, z.dim() - 1)),
    two_steps=lambda f, z: _two_steps(f, z),
)


def _two_steps(f: Formula, z: Tensor) -> list[Tensor]:
    pair, rest = z[..., : 2 * f.n], z[..., 2 * f.n :]
    return [pair] if f.count == 1 else [*pair.chunk(2, dim=-1), *([rest] if f.count == 3 else [])]


def _parts(f: Formula, z: Any) -> list[Tensor]:
    return z if isinstance(z, list) else f.do("split", z)


picks(
    "affine",
    mul_add=lambda f, z, a, b: z * a + b,
    left=lambda f, z, a, b: a * z + b,
    bias_left=lambda f, z, a, b: b + a * z,
    methods=lambda f, z, a, b: z.mul(a).add(b),
    functions=lambda f, z, a, b: torch.add(torch.mul(a, z), b),
    addcmul=lambda f, z, a, b: torch.addcmul(b, z, a),
)


@pick("logits", "by_part")
def _by_part(f: Formula, z: Any) -> list[Tensor]:
    parts = zip(_parts(f, z), f.do("alpha"), f.do("bias"), strict=True)
    return [f.do("affine", *part) for part in parts]


def _expanded(f: Formula) -> Tensor:
    return torch.cat([a.reshape(1).expand(k) for a, k in zip(f.do("alpha"), f.parts, strict=True)])


def _whole_bias(f: Formula) -> Tensor:
    return torch.cat([b.reshape(-1) for b in f.biases]) if hasattr(f, "biases") else f.bias


@pick("logits", "whole")
def _whole(f: Formula, z: Any) -> list[Tensor]:
    """Scales and shifts before the split, with alpha expanded to one element per row."""
    z = torch.cat(z, -1) if isinstance(z, list) else z
    return f.do("split", f.do("affine", z, _expanded(f), _whole_bias(f)))


@pick("logits", "square")
def _square(f: Formula, z: Any) -> list[Tensor]:
    """Reshapes the residual part to [n, n] before its bias is added."""
    parts, alphas, biases = _parts(f, z), f.do("alpha"), f.do("bias")
    if f.count == 3:
        parts[2], biases[2] = f.do("matrix", parts[2]), biases[2].view(f.n, f.n)
        alphas[2] = alphas[2].reshape(())
    return [f.do("affine", *part) for part in zip(parts, alphas, biases, strict=True)]


picks(
    "matrix",
    view=lambda f, t: t.view(*t.shape[:-1], f.n, f.n),
    reshape=lambda f, t: t.reshape(*t.shape[:-1], f.n, f.n),
    unflatten=lambda f, t: t.unflatten(-1, (f.n, f.n)),
    stack=lambda f, t: torch.stack(t.split(f.n, -1), -2),
)

# --- activations --------------------------------------------------------------------------------------------

picks(
    "sigmoid",
    torch=lambda f, t: torch.sigmoid(t),
    functional=lambda f, t: F.sigmoid(t),
    method=lambda f, t: t.sigmoid(),
    module=lambda f, t: f.sigmoid_module(t),
    expit=lambda f, t: torch.special.expit(t),
    written_out=lambda f, t: 1 / (1 + torch.exp(-t)),
)
picks(
    "pre_act",
    right=lambda f, t: f.do("sigmoid", t) + f.hc_eps if f.hc_eps else f.do("sigmoid", t),
    left=lambda f, t: f.hc_eps + f.do("sigmoid", t) if f.hc_eps else f.do("sigmoid", t),
    method=lambda f, t: f.do("sigmoid", t).add(f.hc_eps) if f.hc_eps else f.do("sigmoid", t),
)


def _shift(f: Formula, t: Tensor) -> Tensor:
    return t + f.post_eps if f.post_eps else t


picks(
    "post_act",
    left=lambda f, t: _shift(f, f.post_mult * f.do("sigmoid", t)),
    right=lambda f, t: _shift(f, f.do("sigmoid", t) * f.post_mult),
    method=lambda f, t: _shift(f, f.do("sigmoid", t).mul(f.post_mult)),
    function=lambda f, t: _shift(f, torch.mul(f.do("sigmoid", t), f.post_mult)),
    over=lambda f, t: _shift(f, f.do("sigmoid", t) / (1 / f.post_mult)),
)

# --- sinkhorn -----------------------------------------------------------------------------------------------

picks(
    "softmax",
    torch=lambda f, t: torch.softmax(t, dim=-1),
    functional=lambda f, t: F.softmax(t, -1),
    method=lambda f, t: t.softmax(-1),
    positive=lambda f, t: t.softmax(dim=t.dim() - 1),
    module=lambda f, t: f.softmax_module(t),
)
picks(
    "total",
    keepdim=lambda f, c, d: c.sum(d, keepdim=True),
    torch=lambda f, c, d: torch.sum(c, dim=d, keepdim=True),
    unsqueeze=lambda f, c, d: c.sum(dim=d).unsqueeze(d),
    positive=lambda f, c, d: c.sum(dim=c.dim() + d, keepdim=True),
    tuple=lambda f, c, d: c.sum(dim=(d,), keepdim=True),
    index=lambda f, c, d: c.sum(-1)[..., None] if d == -1 else c.sum(-2)[..., None, :],
)
picks(
    "divide",
    slash=lambda f, c, t: c / t,
    function=lambda f, c, t: torch.div(c, t),
    one_over=lambda f, c, t: c * (1.0 / t),
    reciprocal=lambda f, c, t: c * t.reciprocal(),
    method=lambda f, c, t: c.div(t),
    reciprocal_left=lambda f, c, t: torch.reciprocal(t) * c,
)
picks(
    "guard",  # keeps a sum from zero in the softmax form
    right=lambda f, t: t + f.sinkhorn_eps,
    left=lambda f, t: f.sinkhorn_eps + t,
    method=lambda f, t: t.add(f.sinkhorn_eps),
)
picks(
    "clamp",  # the same in the exp form
    clamp=lambda f, t: t.clamp(min=f.sinkhorn_eps),
    clamp_min=lambda f, t: t.clamp_min(f.sinkhorn_eps),
    torch_clamp=lambda f, t: torch.clamp(t, f.sinkhorn_eps),
    torch_clamp_min=lambda f, t: torch.clamp_min(t, f.sinkhorn_eps),
)
picks(
    "peak",
    amax=lambda f, t: t.amax(-1, keepdim=True),
    max=lambda f, t: t.max(dim=-1, keepdim=True).values,
    max_detached=lambda f, t: t.max(-1, keepdim=True)[0].detach(),
    amax_detached=lambda f, t: torch.amax(t, dim=-1, keepdim=True).detach(),
    detached_amax=lambda f, t: t.detach().amax(dim=-1, keepdim=True),
)


def _normalise(f: Formula, c: Tensor, dim: int, step: int) -> Tensor:
    total = f.do("total", c, dim)
    return f.do("divide", c, f.do("guard" if f.form == "softmax" else "clamp", total))


picks("normalise", plain=_normalise)


@pick("sinkhorn", "unrolled")
def _sinkhorn(f: Formula, t: Tensor) -> Tensor:
    if f.form == "softmax":
        c = f.do("softmax", t) + f.sinkhorn_eps
        c = f.do("normalise", c, -2, 0)
        for i in range(f.iters - 1):
            c = f.do("normalise", c, -1, 2 * i + 1)
            c = f.do("normalise", c, -2, 2 * i + 2)
        return c
    c = torch.exp(t - f.do("peak", t))
    for i in range(f.iters):
        c = f.do("normalise", c, -1, 2 * i)
        c = f.do("normalise", c, -2, 2 * i + 1)
    return c


@pick("sinkhorn", "one_loop")
def _one_loop(f: Formula, t: Tensor) -> Tensor:
    """Iterates in a single loop whose first row step is the softmax, a common way to write it."""
    if f.form == "exp":
        c = (t - f.do("peak", t)).exp()
        for i in range(2 * f.iters):
            c = f.do("normalise", c, -1 - i % 2, i)
        return c
    c = f.do("softmax", t).add(f.sinkhorn_eps)
    for i in range(f.iters):
        if i > 0:
            c = f.do("normalise", c, -1, 2 * i - 1)
        c = f.do("normalise", c, -2, 2 * i)
    return c


# --- collapse -----------------------------------------------------------------------------------------------

picks(
    "h_dtype",  # the cast of the coefficients before they meet the streams
    kept=lambda f, h, x: h,
    model=lambda f, h, x: h.to(x.dtype),
    type_as=lambda f, h, x: h.type_as(x),
)
picks(
    "streams",  # the cast of the streams
    float=lambda f, x, h: x.float(),
    to_h=lambda f, x, h: x.to(h.dtype),
)
picks(
    "collapse",
    mul_sum=lambda f, h, x: (h.unsqueeze(-1) * x).sum(-2),
    mul_sum_dim=lambda f, h, x: (h[..., None] * x).sum(dim=x.dim() - 2),
    sum_right=lambda f, h, x: torch.sum(x * h.unsqueeze(-1), dim=-2),
    einsum=lambda f, h, x: torch.einsum("...n,...nd->...d", h, x),
    einsum_right=lambda f, h, x: torch.einsum("...nd,...n->...d", x, h),
    matmul=lambda f, h, x: torch.matmul(h.unsqueeze(-2), x).squeeze(-2),
    at=lambda f, h, x: (h[..., None, :] @ x)[..., 0, :],
    matmul_left=lambda f, h, x: (x.transpose(-1, -2) @ h.unsqueeze(-1)).squeeze(-1),
    bmm=lambda f, h, x: torch.bmm(h.reshape(-1, 1, f.n), x.reshape(-1, f.n, f.width)).reshape(*x.shape[:-2], f.width),
    explicit=lambda f, h, x: functools.reduce(torch.add, [h[..., i, None] * x[..., i, :] for i in range(f.n)]),
    builtin_sum=lambda f, h, x: sum(h[..., i : i + 1] * x[..., i, :] for i in range(f.n)),
    unbound=lambda f, h, x: sum(a.unsqueeze(-1) * s for a, s in zip(h.unbind(-1), x.unbind(-2), strict=True)),
)
picks(
    "to_model", to=lambda f, t, x: t.to(x.dtype), type_as=lambda f, t, x: t.type_as(x), to_other=lambda f, t, x: t.to(x)
)
picks("collapse_input", same=lambda f, x: x)


@pick("collapsed", "plain")
def _collapsed(f: Formula, h: Tensor, x: Tensor) -> Tensor:
    h = f.do("h_dtype", h, x)
    streams = f.do("streams", f.do("collapse_input", x), h)
    t = f.do("collapse", h.to(streams.dtype), streams)
    return f.do("to_model", t, x)


@pick("collapsed", "promoted")
def _promoted(f: Formula, h: Tensor, x: Tensor) -> Tensor:
    """Collapses without casting the streams: fp32 coefficients promote them."""
    return f.do("to_model", (h.unsqueeze(-1) * f.do("collapse_input", x)).sum(-2), x)


# --- post ---------------------------------------------------------------------------------------------------

picks(
    "expand",
    unsqueeze=lambda f, h, t: h.unsqueeze(-1) * t.unsqueeze(-2),
    index=lambda f, h, t: h[..., None] * t[..., None, :],
    left=lambda f, h, t: t.unsqueeze(-2) * h.unsqueeze(-1),
    einsum=lambda f, h, t: torch.einsum("...n,...d->...nd", h, t),
    matmul=lambda f, h, t: h.unsqueeze(-1) @ t.unsqueeze(-2),
    view=lambda f, h, t: h.view(*h.shape, 1) * t.view(*t.shape[:-1], 1, t.shape[-1]),
    stack=lambda f, h, t: torch.stack([h[..., i, None] * t for i in range(f.n)], dim=-2),
)
picks(
    "turn",
    transpose=lambda f, r: r.transpose(-1, -2),
    mT=lambda f, r: r.mT,
    swap=lambda f, r: r.swapaxes(-2, -1),
    permute=lambda f, r: r.permute(*range(r.dim() - 2), r.dim() - 1, r.dim() - 2),
)


def _turned(f: Formula, r: Tensor) -> Tensor:
    return f.do("turn", r) if f.transposed else r


def _letters(f: Formula) -> str:
    return "io" if f.transposed else "oi"


def _explicit(f: Formula, r: Tensor, x: Tensor) -> Tensor:
    def entry(o: int, i: int) -> Tensor:
        return r[..., i, o] if f.transposed else r[..., o, i]

    rows: list[Any] = [sum(entry(o, i).unsqueeze(-1) * x[..., i, :] for i in range(f.n)) for o in range(f.n)]
    return torch.stack(rows, dim=-2)


picks(
    "mix",
    matmul=lambda f, r, x: torch.matmul(_turned(f, r), x),
    at=lambda f, r, x: _turned(f, r) @ x,
    einsum=lambda f, r, x: torch.einsum(f"...{_letters(f)},...id->...od", r, x),
    einsum_right=lambda f, r, x: torch.einsum(f"...id,...{_letters(f)}->...od", x, r),
    bmm=lambda f, r, x: torch.bmm(_turned(f, r).reshape(-1, f.n, f.n), x.reshape(-1, f.n, f.width)).reshape(x.shape),
    broadcast=lambda f, r, x: (
        (r.unsqueeze(-1) * x.unsqueeze(-2)).sum(-3) if f.transposed else (r.unsqueeze(-1) * x.unsqueeze(-3)).sum(-2)
    ),
    right=lambda f, r, x: (x.transpose(-1, -2) @ _turned(f, r).transpose(-1, -2)).transpose(-1, -2),
    explicit=_explicit,
)
picks("mix_input", same=lambda f, x: x)
picks(
    "add",
    expanded_first=lambda f, a, b: a + b,
    mixed_first=lambda f, a, b: b + a,
    function=lambda f, a, b: torch.add(a, b),
    method=lambda f, a, b: b.add(a),
)
picks("f_out", same=lambda f, t: t)


@pick("post", "model_dtype")
def _post_model(f: Formula, x: Tensor, t: Tensor, h: Tensor, r: Tensor | None) -> Tensor:
    """Computes in the model's dtype throughout, as DeepSeek-V4 in transformers does."""
    expanded = f.do("expand", h.to(x.dtype), f.do("f_out", t))
    y = f.do("mix_input", x)
    return f.do("add", expanded, y if r is None else f.do("mix", r.to(x.dtype), y))


@pick("post", "fp32")
def _post_fp32(f: Formula, x: Tensor, t: Tensor, h: Tensor, r: Tensor | None) -> Tensor:
    expanded = f.do("expand", h, f.do("f_out", t).float())
    y = f.do("mix_input", x).float()
    return f.do("to_model", f.do("add", expanded, y if r is None else f.do("mix", r, y)), x)


picks(
    "sublayer",
    mlp=lambda f, t: f.down(F.gelu(f.up(t))),
    sine=lambda f, t: torch.sin(t) * 0.5,
    norm_linear=lambda f, t: f.up(F.layer_norm(t, (f.width,))),
)
picks("disturb", no=lambda f, x: x)
picks("entry", given=lambda f, x: x, copied=lambda f, x: x.clone())


# --- the formula --------------------------------------------------------------------------------------------


class Formula(nn.Module):
    """One spelling: :meth:`forward` runs the picked callables, :meth:`oracle` the formula in fp64."""

    def __init__(
        self, settings: Settings, picked: Mapping[str, str], store: str, seed: int, mutation: str = ""
    ) -> None:
        super().__init__()
        self.settings, self.store, self.mutation = settings, store, mutation
        self.picked = dict(picked)
        for field in dataclasses.fields(settings):
            setattr(self, field.name, getattr(settings, field.name))
        self.m, self.k, self.parts = settings.m, settings.n * settings.width, settings.parts
        self.count = len(self.parts)
        self.at = [sum(self.parts[:i]) for i in range(self.count + 1)]
        self.steps = {axis: AXES[axis][name] for axis, name in picked.items()}
        if mutation:
            axis, name = mutation.split(".")
            self.steps[axis] = MUTATIONS[axis][name]
        self._make(torch.Generator().manual_seed(seed))

    if TYPE_CHECKING:  # attributes are the settings' fields, and parameters that depend on the picks

        def __getattr__(self, name: str) -> Any: ...

    def do(self, axis: str, *args: Any) -> Any:
        """Calls the pick of ``axis``."""
        return self.steps[axis](self, *args)

    def _make(self, g: torch.Generator) -> None:
        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=g) * scale

        n, k, picked = self.n, self.k, self.picked
        phi = normal(self.m, k, scale=k**-0.5)
        alpha = torch.tensor([1.1, 0.9, 1.05])[: self.count]
        bias = normal(self.m, scale=0.1)
        self._phi(phi)
        kind = ALPHA_STORE.get(picked["alpha"])
        if kind is None:
            self.alpha = nn.Parameter(alpha)
        else:
            shape = () if kind == "scalars" else (1,)
            self.alphas = nn.ParameterList([nn.Parameter(a.reshape(shape).clone()) for a in alpha])
        if kind := BIAS_STORE.get(picked["bias"]):
            parts = list(bias.split(self.parts))
            if kind == "square" and self.count == 3:
                parts[2] = parts[2].reshape(n, n)
            self.biases = nn.ParameterList([nn.Parameter(b.clone()) for b in parts])
        else:
            self.bias = nn.Parameter(bias)
        if picked["gamma"] != "none":
            flat = picked["gamma"] in ("flat", "flat_left", "one_plus")
            gamma = normal(n, self.width, scale=0.3) + (0.0 if "one_plus" in picked["gamma"] else 1.0)
            self.gamma = nn.Parameter(gamma.flatten() if flat else gamma)
        self.rms = nn.RMSNorm(k, eps=self.norm_eps, elementwise_affine=False)
        self.sigmoid_module, self.softmax_module = nn.Sigmoid(), nn.Softmax(dim=-1)
        self.register_buffer("wide", torch.zeros(1))
        self.dropout = nn.Dropout(0.25)
        if self.uses == "layer" and picked["sublayer"] != "sine":
            self.up = self._linear(normal)
            if picked["sublayer"] == "mlp":
                self.down = self._linear(normal)

    def _linear(self, normal: Callable[..., Tensor]) -> nn.Linear:
        layer = nn.Linear(self.width, self.width, bias=False, dtype=self.dtype)
        layer.weight.data = normal(self.width, self.width, scale=self.width**-0.5).to(self.dtype)
        return layer

    def _phi(self, phi: Tensor) -> None:
        if self.store == "linear":
            self.phi_linear = nn.Linear(self.k, self.m, bias=False)
            self.phi_linear.weight.data = phi
        elif self.store == "three_linear":
            self.phis: Any = nn.ModuleList([nn.Linear(self.k, r, bias=False) for r in self.parts])
            for layer, part in zip(self.phis, phi.split(self.parts), strict=True):
                layer.weight.data = part.clone()
        elif self.store.startswith("three"):
            parts = [p.t() if self.store == "three_columns" else p for p in phi.split(self.parts)]
            self.phis = nn.ParameterList([nn.Parameter(p.clone()) for p in parts])
        else:
            stored = {"columns": phi.t().contiguous(), "blocks": phi.reshape(self.m, self.n, self.width)}
            self.phi = nn.Parameter(phi.bfloat16() if self.store == "bf16" else stored.get(self.store, phi))

    def canonical(self) -> dict[str, Tensor | None]:
        """Returns phi [m, n*D], alpha, bias and gamma in fp64, differentiable with respect to the parameters."""
        if self.store == "linear":
            phi = self.phi_linear.weight
        elif self.store == "three_linear":
            phi = torch.cat([layer.weight for layer in self.phis])
        elif self.store.startswith("three"):
            phi = torch.cat([p.t() if self.store == "three_columns" else p for p in self.phis])
        else:
            phi = self.phi.t() if self.store == "columns" else self.phi.reshape(self.m, self.k)
        alpha = self.alpha if hasattr(self, "alpha") else torch.cat([a.reshape(1) for a in self.alphas])
        bias = self.bias if hasattr(self, "bias") else torch.cat([b.reshape(-1) for b in self.biases])
        gamma = self.gamma.reshape(-1) if hasattr(self, "gamma") else None
        if gamma is not None and "one_plus" in self.picked["gamma"]:
            gamma = 1 + gamma
        made = {"phi": phi, "alpha": alpha, "bias": bias, "gamma": gamma}
        return {k: None if t is None else t.double() for k, t in made.items()}

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        """Runs the picked callables on ``x [..., n, D]``.

        Some mutants read ``other``, a tensor of x's shape, in place of x.
        """
        if other is not None:
            self.other = other
        if self.mode == "checkpoint":
            return torch.utils.checkpoint.checkpoint(self.layer, x, other, use_reentrant=False)
        if self.mode == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.layer(x, other)
        return self.layer(x, other)

    def layer(self, x: Tensor, other: Tensor | None) -> Any:
        x = self.do("entry", x)
        v = self.do("vector", x)
        logits = self.do("logits", self.do("norm", v, x))
        x = self.do("disturb", x)
        h_in = self.do("collapsed", self.do("pre_act", logits[0]), x)
        if self.rows == "head" or self.uses == "h_in":
            return h_in
        h_post = self.do("post_act", logits[1])
        r = None
        if self.rows == "full" and self.uses != "h_in+post":
            r = logits[2] if self.picked["logits"] == "square" else self.do("matrix", logits[2])
            if self.iters:
                r = self.do("sinkhorn", r)
        if self.uses != "layer":
            return (h_in, h_post) if r is None else (h_in, h_post, r)
        return self.do("post", x, self.do("sublayer", h_in), h_post, r)

    def oracle(self, x: Tensor, other: Tensor | None = None) -> list[Tensor]:
        """Returns the outputs in fp64 by the specification's formula; ``other`` is not used."""
        from tests.oracles.mhc import _pre

        o = {name: getattr(self, name) for name in ("norm_eps", "hc_eps", "post_mult", "post_eps", "sinkhorn_eps")}
        t = {"x": x.double(), **self.canonical()}
        out = _pre(t, {**o, "sinkhorn_iters": self.iters, "sinkhorn_form": self.form})[0]
        if self.uses != "layer":
            names = {"h_in": "h_in", "h_in+post": "h_in h_post", "raw": "h_in h_post h_res"}[self.uses].split()
            return [out[k] for k in names if out[k].numel()]
        x, r = t["x"], out["h_res"] if self.rows == "full" else None
        mixed = (
            x if r is None else torch.einsum("...io,...id->...od" if self.transposed else "...oi,...id->...od", r, x)
        )
        return [out["h_post"][..., None] * self._sublayer64(out["h_in"])[..., None, :] + mixed]

    def _sublayer64(self, t: Tensor) -> Tensor:
        if self.picked["sublayer"] == "sine":
            return torch.sin(t) * 0.5
        up = self.up.weight.double()
        if self.picked["sublayer"] == "mlp":
            return F.gelu(t @ up.T) @ self.down.weight.double().T
        return F.layer_norm(t, (self.width,)) @ up.T


@dataclasses.dataclass
class Spelling:
    """A formula, inputs for it, and the ops that routing must find in it."""

    name: str
    module: Formula
    inputs: tuple[Tensor, ...]
    ops: dict[str, int]

    @property
    def settings(self) -> Settings:
        return self.module.settings


def expected_ops(s: Settings) -> dict[str, int]:
    """Returns the ops that routing must find, counted.

    A collapse whose other coefficients are unused is a head.
    """
    if s.rows == "head" or s.uses == "h_in":
        return {"mhc_head": 1}
    return {"mhc_pre": 1, "mhc_post": 1} if s.uses == "layer" else {"mhc_pre": 1}


def _settings(rng: random.Random) -> Settings:
    rows = rng.choices(["full", "two", "head"], [8, 1, 1])[0]
    uses = "h_in" if rows == "head" else rng.choices(["layer", "h_in", "h_in+post", "raw"], [7, 1, 1, 1])[0]
    iters = rng.choice([0, 1, 2, 3, 4, 5, 20]) if rows == "full" else 0
    return Settings(
        n=rng.choice([2, 3, 4, 4, 4, 5, 8]),
        width=rng.choice([16, 16, 20, 24]),
        lead=rng.choice([(2, 3), (2, 3), (5,), (2, 2, 3)]),
        dtype=rng.choice([torch.bfloat16, torch.bfloat16, torch.float32]),
        rows=rows,
        norm_eps=rng.choice([1e-6, 1e-5, 1e-20]),
        hc_eps=rng.choice([1e-6, 1e-6, 1e-4, 0.0]),
        post_mult=rng.choice([2.0, 2.0, 2, 1.5]),
        post_eps=rng.choice([0.0, 0.0, 0.0, 1e-6]),
        iters=iters,
        sinkhorn_eps=rng.choice([1e-6, 1e-5]),
        form=rng.choice(["softmax", "softmax", "exp"]),
        transposed=rng.random() < 0.5,
        uses=uses,
        mode=rng.choices(["train", "no_grad", "autocast", "checkpoint"], [8, 3, 2, 2])[0],
        dynamic=rng.random() < 0.2,
    )


def usable(axis: str, name: str, s: Settings) -> bool:
    """Returns whether a pick can be written for these settings."""
    return CONDITIONS.get(f"{axis}.{name}", lambda _: True)(s)


def _picked(rng: random.Random, s: Settings) -> tuple[dict[str, str], str]:
    """Returns one usable pick per axis, and how phi is stored."""
    picked = {axis: rng.choice([name for name in table if usable(axis, name, s)]) for axis, table in AXES.items()}
    if rng.random() < 0.6:
        picked["gamma"] = "none"
    store = rng.choice(sorted(STORES))
    if picked["gamma"] == "folded" and store in ("linear", "three", "three_linear", "three_columns"):
        store = "rows"
    if len(s.parts) == 1 and store.startswith("three"):
        store = "rows"
    return picked, store


def _make(name: str, s: Settings, picked: Mapping[str, str], store: str, seed: int, mutation: str = "") -> Spelling:
    module = Formula(s, picked, store, seed, mutation)
    g = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(*s.lead, s.n, s.width, generator=g).to(s.dtype)
    return Spelling(name, module, (x,), expected_ops(s))


def _name(i: int, s: Settings, picked: Mapping[str, str], store: str) -> str:
    sizes = f"n{s.n}D{s.width}-{len(s.lead) + 2}d-{str(s.dtype).split('.')[1]}-{s.rows}-{s.uses}-{s.mode}"
    rest = f"{s.form}{s.iters}-{'RT' if s.transposed else 'R'}{'-dynamic' if s.dynamic else ''}"
    return f"{i}-{sizes}-{rest}-phi={store}-" + "-".join(f"{a}={p}" for a, p in picked.items() if len(AXES[a]) > 1)


def spellings(count: int, seed: int = 0) -> Iterator[Spelling]:
    """Yields ``count`` spellings with picks drawn at random; the i-th is the same for every ``count``."""
    for i in range(count):
        rng = random.Random(f"{seed} {i}")
        s = _settings(rng)
        picked, store = _picked(rng, s)
        yield _make(_name(i, s, picked, store), s, picked, store, 1000 * seed + i)


def plainest(s: Settings, **changed: str) -> dict[str, str]:
    """Returns the first usable pick of each axis, except for those in ``changed``."""
    picked = {axis: next(name for name in table if usable(axis, name, s)) for axis, table in AXES.items()}
    return {**picked, **changed}


def singles(axis: str) -> Iterator[Spelling]:
    """Yields the plainest spelling with each pick of ``axis`` in turn; the axis "phi" is how phi is stored."""
    for name in sorted(STORES) if axis == "phi" else list(AXES[axis]):
        for s, rest in _contexts(axis):
            if axis == "phi":
                yield _make(f"phi={name}", s, plainest(s), name, 5)
            elif usable(axis, name, s):
                yield _make(f"{axis}={name}-{s.form}-{s.transposed}", s, plainest(s, **{**rest, axis: name}), "rows", 5)


def _contexts(axis: str) -> Iterator[tuple[Settings, dict[str, str]]]:
    """Yields settings, and picks of other axes, in which the picks of ``axis`` run."""
    if axis in ("mix", "turn"):
        for transposed in (False, True):
            yield Settings(iters=2, transposed=transposed), {}
            yield Settings(iters=2, transposed=transposed), {"post": "fp32"}
    elif axis in ("peak", "clamp"):
        yield Settings(iters=3, form="exp"), {}
    elif axis in ("total", "divide", "normalise", "sinkhorn"):
        yield Settings(iters=3, form="exp"), {}
        yield Settings(iters=3), {}
    elif axis == "logits":
        yield Settings(iters=2), {}
        yield Settings(rows="two"), {}
        yield Settings(rows="head", uses="h_in"), {}
    else:
        yield Settings(iters=2), {}
