# SPDX-License-Identifier: Apache-2.0
"""Targets and inputs of the mHC rows, the plain PyTorch formula, and the fp64 values that outputs are checked against.

Source of the targets: the project's survey of other implementations on one NVIDIA H200 (torch 2.11, triton 3.6):
CUDA-graph replay with the L2 cache flushed, medians, random data, 8192 tokens, n = 4, bf16 x, fp32 phi.
TransformerEngine and TileKernels multiply in tf32, Liger keeps phi in bf16, torch.compile and eager
multiply in fp32. Absolute times count only on such a GPU; on another device compare ratios within one run.
The plain formula is written independently of the package's reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from . import accuracy
from .running import Target

TOKENS = 8192
N = 4
FLOOR_BYTES_PER_US = 4.3e6
"""The bandwidth that floors assume: 4.3 TB/s, which a large copy reaches on an H200."""
PEAK_BAR_MB = 500.0

TE, TK, LIGER, COMPILE, EAGER = "TransformerEngine", "TileKernels", "Liger", "torch.compile", "eager"


def _row(bar: float, goal: float, te: float, tk: float, *rest: float | None) -> Target:
    names = (LIGER, COMPILE, EAGER)
    peers = {TE: te, TK: tk}
    peers.update({name: us for name, us in zip(names, rest, strict=False) if us is not None})
    return Target(bar, goal, peers)


TARGETS: dict[tuple[str, int], Target] = {
    ("pre", 2560): _row(105, 75, 138, 140, 291, 421),
    ("post", 2560): _row(95, 93, 97, 96, 512, 830),
    ("fb", 2560): _row(635, 540, 1207, 1422, 5161, 3867),
    ("pre", 4096): _row(150, 105, 190, 215, 435, 622, 2333),
    ("post", 4096): _row(149, 146, 149, 150, 600, 1322, 2340),
    ("fb", 4096): _row(970, 850, 1855, 1747, 7403, 5910, 13261),
    ("pre", 7168): _row(255, 180, 308, 365, 768, 1023),
    ("post", 7168): _row(256, 252, 254, 258, 1044, 2306),
    ("fb", 7168): _row(1670, 1450, 3172, 2477, 12873, 9967),
    ("post_pre", 4096): Target(230, 190, {}),
    ("post_pre_fb", 4096): Target(850, 650, {}),
    ("single_pass", 4096): Target(205, 180, {}),
    ("single_pass_fb", 4096): Target(790, 600, {}),
    ("npu_pre", 4096): _row(150, 100, 200, 223, None, 563, 2088),
    ("npu_fb", 4096): _row(560, 400, 882, 1677, None, 1584, 6908),
}
"""Targets by row and D.

``pre``: coefficients, 20 Sinkhorn iterations, collapse. ``post``: expand and mix. ``fb``: forward and all gradients of
both. ``post_pre``: post of one sublayer with the pre of the next; no other implementation is known. ``single_pass``:
everything between two sublayers of DeepSeek-V4.1; no other implementation for this GPU is known.
``npu_*``: with gamma and raw h_res, as the operator ``npu_mhc_pre``. ``*_fb``: forward and all gradients.
"""

DECODE_PEERS = "one boundary by their authors: sglang #38475 12.4 us (40 tokens, sm_120), mirage #677 15.7 us"

# Bar of ||a - b|| / ||b|| against fp64 for gradients and fp32 intermediates (bf16 x, fp32 phi, "highest").
RELATIVE_BAR = 2e-5
# Outputs are allowed the error norm of one correct rounding to their dtype, times this factor.
ROUNDING_MARGIN = 1.05
# Bars of the largest absolute error at the shape (2, 64, 4, 128).
RECORD_SHAPE = (2, 64, 4, 128)
RECORD_BARS = {"dphi": 8e-6, "dalpha": 1.2e-4, "dbias": 4e-6, "dgamma": 6.9e-5}

# Passes over one stream's elements (tokens * D * element size): the forward of pre reads n and writes 1.
_UNITS = {
    "pre": lambda n: n + 1,
    "post": lambda n: 2 * n + 1,
    # The backward of post reads g, x, f and writes dx, df; that of pre reads x, dh_in, dx of post and writes dx.
    "fb": lambda n: (n + 1) + (2 * n + 1) + (3 * n + 2) + (3 * n + 1),
    # Reads x, f and writes x_out, h_in; its backward reads dx_out, dh_in, x, f, x_out and writes dx, df.
    "post_pre": lambda n: 2 * n + 2,
    "post_pre_fb": lambda n: (2 * n + 2) + (4 * n + 3),
    # As post_pre; its backward makes x_out again.
    "single_pass": lambda n: 2 * n + 2,
    "single_pass_fb": lambda n: (2 * n + 2) + (3 * n + 3),
    "npu_pre": lambda n: n + 1,
    "npu_fb": lambda n: (n + 1) + (2 * n + 1),
}


def floor_bytes(what: str, tokens: int, dim: int, phi: bool = False) -> int:
    """Returns the fewest bytes through device memory. ``phi=True`` adds fp32 phi, which dominates at a few tokens."""
    total = _UNITS[what](N) * tokens * dim * 2
    return total + (N * N + 2 * N) * N * dim * 4 if phi and what != "post" else total


def floor_us(what: str, tokens: int, dim: int, phi: bool = False) -> float:
    """Returns the time of ``floor_bytes`` at 4.3 TB/s, in microseconds."""
    return floor_bytes(what, tokens, dim, phi) / FLOOR_BYTES_PER_US


# ---- cases

NORM_EPS = HC_EPS = SINKHORN_EPS = 1e-6
POST_MULT, POST_EPS = 2.0, 0.0
ITERS = 20


@dataclasses.dataclass
class Inputs:
    """The tensors of one case: the inputs of the two ops, and the loss gradients of their outputs."""

    x: torch.Tensor
    phi: torch.Tensor
    alpha: torch.Tensor
    bias: torch.Tensor
    gamma: torch.Tensor | None
    f_out: torch.Tensor
    dh_in: torch.Tensor
    dx_out: torch.Tensor | None
    dh_post: torch.Tensor | None
    dh_res: torch.Tensor | None
    iters: int
    transpose_res: bool = False

    @property
    def n(self) -> int:
        return self.x.shape[-2]

    @property
    def with_post(self) -> bool:
        return self.dx_out is not None

    def leaves(self) -> list[torch.Tensor]:
        """Returns the tensors that receive gradients: x, phi, alpha, bias, then gamma or f_out."""
        last = self.f_out if self.with_post else self.gamma
        return [t for t in (self.x, self.phi, self.alpha, self.bias, last) if t is not None]

    def map(self, fn: Any) -> Inputs:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Inputs(**{k: fn(k, v) if isinstance(v, torch.Tensor) else v for k, v in fields.items()})

    def tokens(self, start: int, stop: int) -> Inputs:
        """Returns the case reduced to a range of tokens (leading dimension of x)."""
        per_token = {"x", "f_out", "dh_in", "dx_out", "dh_post", "dh_res"}
        return self.map(lambda k, v: v[start:stop].contiguous() if k in per_token else v)

    def detached(self, dtype: torch.dtype | None = None) -> Inputs:
        """Returns a copy of the case in fresh leaves, in ``dtype`` if given."""
        return self.map(lambda _, v: v.detach().to(dtype or v.dtype).clone())


def make_inputs(
    lead: tuple[int, ...],
    n: int,
    dim: int,
    device: torch.device,
    *,
    npu: bool = False,
    record: bool = False,
    transpose_res: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Inputs:
    """Returns random inputs. ``npu``: with gamma and raw h_res; ``record``: phi and gamma standard normal."""
    m = n * n + 2 * n

    def normal(*shape: int, out: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(out)

    # Logits of unit size, as in a trained model; with ``record`` the sigmoids saturate.
    scale = 1.0 if record else (n * dim) ** -0.5
    gamma = normal(n, dim) if record else 1.0 + 0.1 * normal(n, dim)
    return Inputs(
        x=normal(*lead, n, dim, out=dtype),
        phi=normal(m, n * dim) * scale,
        alpha=torch.tensor([1.1, 0.9, 1.05], device=device),
        bias=0.1 * normal(m),
        gamma=gamma if npu else None,
        f_out=normal(*lead, dim, out=dtype),
        dh_in=normal(*lead, dim, out=dtype),
        dx_out=None if npu else normal(*lead, n, dim, out=dtype),
        dh_post=normal(*lead, n) if npu else None,
        dh_res=normal(*lead, n, n) if npu else None,
        iters=0 if npu else ITERS,
        transpose_res=transpose_res,
    )


def plain_sinkhorn(h_res: torch.Tensor, iters: int) -> torch.Tensor:
    if iters == 0:
        return h_res
    c = torch.softmax(h_res, -1) + SINKHORN_EPS
    c = c / (c.sum(-2, keepdim=True) + SINKHORN_EPS)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + SINKHORN_EPS)
        c = c / (c.sum(-2, keepdim=True) + SINKHORN_EPS)
    return c


def plain_coefficients(
    x: torch.Tensor, phi: torch.Tensor, alpha: torch.Tensor, bias: torch.Tensor, gamma: torch.Tensor | None, iters: int
) -> dict[str, torch.Tensor]:
    n = x.shape[-2]
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    v = x.to(work).flatten(-2)
    h_mix = (v if gamma is None else v * gamma.flatten()) @ phi.t()
    inv_rms = torch.rsqrt(v.square().mean(-1) + NORM_EPS)
    z = h_mix * inv_rms[..., None]
    h_pre = torch.sigmoid(alpha[0] * z[..., :n] + bias[:n]) + HC_EPS
    h_post = POST_MULT * torch.sigmoid(alpha[1] * z[..., n : 2 * n] + bias[n : 2 * n]) + POST_EPS
    h_res = (alpha[2] * z[..., 2 * n :] + bias[2 * n :]).unflatten(-1, (n, n))
    h_in = (h_pre[..., None] * x.to(work)).sum(-2).to(x.dtype)
    return {
        "h_in": h_in,
        "h_post": h_post,
        "h_res": plain_sinkhorn(h_res, iters),
        "h_pre": h_pre,
        "h_mix": h_mix,
        "inv_rms": inv_rms,
    }


def plain_pre(x, phi, alpha, bias, gamma, iters):  # type: ignore[no-untyped-def]
    c = plain_coefficients(x, phi, alpha, bias, gamma, iters)
    return c["h_in"], c["h_post"], c["h_res"]


def plain_post(
    x: torch.Tensor, f_out: torch.Tensor, h_post: torch.Tensor, h_res: torch.Tensor, transpose_res: bool
) -> torch.Tensor:
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    r = h_res.transpose(-1, -2) if transpose_res else h_res
    out = h_post[..., None] * f_out.to(work)[..., None, :] + torch.matmul(r, x.to(work))
    return out.to(x.dtype)


# ---- the case of a fused op


@dataclasses.dataclass
class PostPre:
    """One case of a fused op.

    ``inputs`` are those of the separate ops; ``h_post`` and ``h_res`` belong to the sublayer that made f_out;
    ``dnext_post`` and ``dnext_res`` are the gradients of the next sublayer's coefficients. In single-pass mHC,
    ``h_pre`` are the weights of the collapse and ``dnext_pre`` is the gradient of the next ones.
    """

    inputs: Inputs
    h_post: torch.Tensor
    h_res: torch.Tensor
    dnext_post: torch.Tensor
    dnext_res: torch.Tensor
    h_pre: torch.Tensor | None = None
    dnext_pre: torch.Tensor | None = None

    @classmethod
    def make(cls, i: Inputs, h_post: torch.Tensor, h_res: torch.Tensor) -> PostPre:
        return cls(i, h_post, h_res, torch.randn_like(h_post), torch.randn_like(h_res))

    def single_pass(self) -> PostPre:
        """Returns the same case with weights of the collapse."""
        return dataclasses.replace(self, h_pre=torch.rand_like(self.h_post), dnext_pre=torch.randn_like(self.h_post))


# ---- fp64

CHUNK = 1024
SUMMED = ("dphi", "dalpha", "dbias", "dgamma")
Named = dict[str, torch.Tensor]


def _formula(i: Inputs) -> Named:
    """Returns the outputs and all gradients of the plain formula by autograd, in the dtypes of ``i``."""
    leaves = [t.requires_grad_() for t in i.leaves()]
    out = plain_coefficients(i.x, i.phi, i.alpha, i.bias, i.gamma, i.iters)
    if i.dx_out is not None:
        out["x_out"] = plain_post(i.x, i.f_out, out["h_post"], out["h_res"], i.transpose_res)
        losses = [(out["h_in"], i.dh_in), (out["x_out"], i.dx_out)]
    else:
        losses = [(out["h_in"], i.dh_in), (out["h_post"], i.dh_post), (out["h_res"], i.dh_res)]
    grads = torch.autograd.grad([a for a, _ in losses], leaves, [g for _, g in losses])
    names = ("dx", "dphi", "dalpha", "dbias", "df" if i.with_post else "dgamma")
    return {k: v.detach() for k, v in {**out, **dict(zip(names, grads, strict=True))}.items()}


def _whole(parts: Iterable[Named]) -> Named:
    """Returns the values of all tokens from those of chunks of tokens."""
    of = list(parts)
    return {k: sum(p[k] for p in of) if k in SUMMED else torch.cat([p[k] for p in of]) for k in of[0]}


def reference(i: Inputs) -> Named:
    """Returns all outputs and gradients in fp64, computed in chunks of tokens (leading dimension)."""
    chunks = range(0, i.x.shape[0], CHUNK)
    return _whole(_formula(i.tokens(at, at + CHUNK).detached(torch.float64)) for at in chunks)


def plain(i: Inputs) -> Named:
    """Returns the plain formula's outputs and gradients in the case's dtypes; ops are compared with their error."""
    return _formula(i.detached())


def compare(got: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor], with_post: bool) -> dict[str, Any]:
    """Returns for every tensor its relative error, its bar, and whether the bar is met."""

    def bar(name: str, value: torch.Tensor, want: torch.Tensor, _: Any) -> float:
        # With post, dx is the sum of the gradients of two ops, each rounded once.
        roundings = 2 if name == "dx" and with_post else 1
        return ROUNDING_MARGIN * roundings * accuracy.rounding(value, want) or RELATIVE_BAR

    return accuracy.errors(got, exact, bar)


def parameter_gradients(i: Inputs, saved: Named, dtype: torch.dtype) -> Named:
    """Returns pre's parameter gradients (raw logits), written out from the forward's saved tensors, in ``dtype``."""
    n, wide = i.n, i.map(lambda _, t: t.to(dtype))
    h_pre, h_post, h_mix, inv_rms = (saved[k].to(dtype) for k in ("h_pre", "h_post", "h_mix", "inv_rms"))
    s = h_pre - HC_EPS
    h = h_post - POST_EPS
    d = [
        (wide.dh_in[..., None, :] * wide.x).sum(-1) * s * (1 - s),
        wide.dh_post * h * (1 - h / POST_MULT),
        wide.dh_res.flatten(-2),
    ]
    z = (h_mix * inv_rms[..., None]).split([n, n, n * n], -1)
    dz = torch.cat([wide.alpha[k] * d[k] for k in range(3)], -1)
    g = (dz * inv_rms[..., None]).flatten(0, -2).t() @ wide.x.flatten(-2).flatten(0, -2)
    return {
        "dphi": g * wide.gamma.flatten(),
        "dalpha": torch.stack([(a * b).sum() for a, b in zip(d, z, strict=True)]),
        "dbias": torch.cat(d, -1).flatten(0, -2).sum(0),
        "dgamma": (wide.phi * g).sum(0).view_as(wide.gamma),
    }


# ---- fp64 of the fused ops


def _formula_of_both(p: PostPre, start: int, x_out: torch.Tensor, with_grads: bool) -> Named:
    """Returns a chunk of tokens in fp64. The next pre reads x_out as the op rounded it; gradients flow through."""
    here = slice(start, start + CHUNK)
    i = p.inputs.tokens(start, start + CHUNK).detached(torch.float64)
    h_post, h_res = (t[here].detach().double() for t in (p.h_post, p.h_res))
    given = () if p.h_pre is None else (p.h_pre[here].detach().double(),)
    leaves = [t.requires_grad_(with_grads) for t in (i.x, i.f_out, h_post, h_res, *given, i.phi, i.alpha, i.bias)]
    exact = plain_post(i.x, i.f_out, h_post, h_res, i.transpose_res)
    rounded = exact + (x_out[here].double() - exact).detach()
    after = plain_coefficients(rounded, i.phi, i.alpha, i.bias, None, i.iters)
    after["next_post"], after["next_res"] = after.pop("h_post"), after.pop("h_res")
    if p.h_pre is not None:
        after["next_pre"], after["h_in"] = after.pop("h_pre"), (given[0][..., None] * rounded).sum(-2)
    out = {"x_out": exact, **after}
    if with_grads:
        ups = {"h_in": i.dh_in, "next_post": p.dnext_post[here].double(), "next_res": p.dnext_res[here].double()}
        if p.dnext_pre is not None:
            ups["next_pre"] = p.dnext_pre[here].double()
        grads = torch.autograd.grad([rounded, *(out[k] for k in ups)], leaves, [i.dx_out, *ups.values()])
        names = THROUGH if p.h_pre is None else (*THROUGH, "dh_pre")
        out.update(zip((*names, *SUMMED[:3]), grads, strict=True))
    return {k: v.detach() for k, v in out.items()}


THROUGH = ("dx", "df", "dh_post", "dh_res")
"""Gradients computed from that of x_out, which is rounded once to x's dtype, as it is between two ops."""


def check_fused(p: PostPre, got: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Returns the errors of the outputs, and of gradients if ``got`` has them, and whether each meets its bar.

    The bars of :data:`THROUGH` are wider by one rounding, taken to be x_out's bar.
    """
    chunks = range(0, p.h_post.shape[0], CHUNK)
    exact = _whole(_formula_of_both(p, at, got["x_out"], "dx" in got) for at in chunks)
    errors = compare(got, exact, with_post=False)
    for e in (errors[name] for name in THROUGH if name in errors):
        e["bar"] += errors["x_out"]["bar"]
        e["met"] = e["relative"] <= e["bar"]
    return errors
