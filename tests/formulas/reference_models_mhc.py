# SPDX-License-Identifier: Apache-2.0
"""Reference models of mHC as other projects write it: their layouts, conventions and names, for routing to find.

The code is our own. Every function takes ``x [..., n, D]`` and a mapping of parameters made by :func:`parameters`, and
returns ``x_out [..., n, D]`` with a sublayer in between, unless its docstring says otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

N, WIDTH, EPS, ITERS = 4, 32, 1e-6, 5
P = Mapping[str, Tensor]


def parameters(seed: int = 0, n: int = N, width: int = WIDTH) -> dict[str, Tensor]:
    """Returns fp32 leaves that require gradients: phi [m, n*D], alpha [3], bias [m], gamma [n, D], weight [D, D]."""
    g = torch.Generator().manual_seed(seed)
    m, k = n * n + 2 * n, n * width
    made = {
        "phi": torch.randn(m, k, generator=g) * k**-0.5,
        "alpha": torch.tensor([1.1, 0.9, 1.05]),
        "bias": torch.randn(m, generator=g) * 0.3,
        "gamma": 1 + 0.2 * torch.randn(n, width, generator=g),
        "weight": torch.randn(width, width, generator=g) * width**-0.5,
    }
    return {name: t.requires_grad_() for name, t in made.items()}


def sublayer(t: Tensor, p: P) -> Tensor:
    return F.silu(t @ p["weight"].to(t.dtype))


def _balanced(scores: Tensor, iters: int = ITERS, eps: float = EPS) -> Tensor:
    """Balances by the softmax convention: rows by softmax, then columns and rows in turn."""
    matrix = scores.softmax(-1) + eps
    for step in range(2 * iters - 1):
        matrix = matrix / (matrix.sum(-2 + step % 2, keepdim=True) + eps)
    return matrix


def liger(x: Tensor, p: P) -> Tensor:
    """Liger: phi [n*D, m] on flat tokens, three scalar gates, no epsilon on h_pre, R = h_res."""
    lead, (n, width) = x.shape[:-2], x.shape[-2:]
    tokens = x.reshape(-1, n * width).float()
    scale = torch.rsqrt(tokens.pow(2).mean(dim=-1, keepdim=True) + EPS)
    mixed = (tokens @ p["phi"].t()) * scale
    gate_in, gate_out, gate_res = p["alpha"].unbind()
    bias = p["bias"].float()
    h_pre = torch.sigmoid(mixed[:, :n] * gate_in + bias[:n])
    h_post = torch.sigmoid(mixed[:, n : 2 * n] * gate_out + bias[n : 2 * n]) * 2.0
    h_res = _balanced((mixed[:, 2 * n :] * gate_res + bias[2 * n :]).view(-1, n, n))
    streams = x.reshape(-1, n, width).float()
    h_in = (h_pre.unsqueeze(-1) * streams).sum(dim=1).to(x.dtype)
    f_out = sublayer(h_in, p).float()
    out = torch.einsum("toi,tic->toc", h_res, streams) + h_post.unsqueeze(-1) * f_out.unsqueeze(1)
    return out.to(x.dtype).view(*lead, n, width)


def aiter(x: Tensor, p: P) -> Tensor:
    """AITER: a sum of squares over n*D, gates expanded to one per row, a single bias vector, R = h_res transposed."""
    shape, n = x.shape, x.shape[-2]
    flat = x.reshape(-1, n, x.shape[-1]).flatten(1).float()
    mean = flat.square().sum(dim=-1, keepdim=True) / flat.shape[-1]
    gates = torch.cat([p["alpha"][0].expand(n), p["alpha"][1].expand(n), p["alpha"][2].expand(n * n)])
    mixes = F.linear(flat, p["phi"]) * torch.rsqrt(mean + EPS) * gates + p["bias"]
    pre = mixes[:, :n].sigmoid().unsqueeze(-1) + EPS
    post = (mixes[:, n : 2 * n].sigmoid() * 2.0).unsqueeze(-1)
    comb = _balanced(mixes[:, 2 * n :].view(-1, n, n))
    residual = x.reshape(-1, n, x.shape[-1])
    layer_input = (pre * residual.float()).sum(-2).to(x.dtype)
    f_out = sublayer(layer_input, p)
    mixed = torch.einsum("tij,tid->tjd", comb, residual.float())
    return (f_out.unsqueeze(-2).float() * post + mixed).to(x.dtype).reshape(shape)


def npu_pre(x: Tensor, p: P) -> tuple[Tensor, Tensor, Tensor]:
    """npu_mhc_pre: gamma on the vector, raw logits; returns (h_in, h_post, h_res)."""
    n, width = x.shape[-2:]
    vector = x.reshape(*x.shape[:-2], n * width).float()
    projected = torch.matmul(vector * p["gamma"].reshape(n * width), p["phi"].transpose(0, 1))
    z = projected * torch.rsqrt(vector.square().mean(-1, keepdim=True) + EPS)
    z_pre, z_post, z_res = z.split([n, n, n * n], dim=-1)
    alpha, bias = p["alpha"], p["bias"]
    h_pre = torch.sigmoid(alpha[0] * z_pre + bias[:n]) + EPS
    h_post = 2 * torch.sigmoid(alpha[1] * z_post + bias[n : 2 * n])
    h_res = alpha[2] * z_res.view(*x.shape[:-2], n, n) + bias[2 * n :].view(n, n)
    return (h_pre.unsqueeze(-1) * x.float()).sum(-2).to(x.dtype), h_post, h_res


def megatron(x: Tensor, p: P) -> Tensor:
    """Megatron: exp convention, rows then columns, sums clamped; R = h_res, applied by a batched product."""
    lead, (n, width) = x.shape[:-2], x.shape[-2:]
    normed = F.rms_norm(x.flatten(-2).float(), [n * width], eps=EPS)
    raw = normed @ p["phi"].T
    pre, post, res = torch.split(raw, [n, n, n * n], dim=-1)
    b_pre, b_post, b_res = p["bias"].split([n, n, n * n])
    pre = (p["alpha"][0] * pre + b_pre).sigmoid()
    post = 2 * (p["alpha"][1] * post + b_post).sigmoid()
    logits = (p["alpha"][2] * res + b_res).view(*lead, n, n)
    matrix = torch.exp(logits - logits.max(dim=-1, keepdim=True).values)
    for step in range(2 * ITERS):
        matrix = matrix / matrix.sum(dim=-1 - step % 2, keepdim=True).clamp(min=EPS)
    streams = x.float()
    h_in = torch.matmul(pre.unsqueeze(-2), streams).squeeze(-2).to(x.dtype)
    mixed = torch.bmm(matrix.reshape(-1, n, n), streams.reshape(-1, n, width)).view(x.shape)
    return (mixed + post.unsqueeze(-1) * sublayer(h_in, p).float().unsqueeze(-2)).to(x.dtype)


def paper(x: Tensor, p: P) -> Tensor:
    """The paper's Eq. 7 and 8 as printed: norm first, three weights, ``h_post`` as a column times ``F`` as a row."""
    n = x.shape[-2]
    normed = F.rms_norm(x.flatten(-2).float(), (x.shape[-2] * x.shape[-1],), p["gamma"].flatten(), EPS)
    phi_pre, phi_post, phi_res = p["phi"].split([n, n, n * n])
    b_pre, b_post, b_res = p["bias"].split([n, n, n * n])
    h_pre = torch.sigmoid(p["alpha"][0] * (normed @ phi_pre.T) + b_pre)
    h_post = 2 * torch.sigmoid(p["alpha"][1] * (normed @ phi_post.T) + b_post)
    h_res = _balanced((p["alpha"][2] * (normed @ phi_res.T) + b_res).unflatten(-1, (n, n)), iters=20)
    h_in = (h_pre.unsqueeze(-2) @ x.float()).squeeze(-2).to(x.dtype)
    f_out = sublayer(h_in, p)
    return (h_res @ x.float() + h_post.unsqueeze(-1) @ f_out.unsqueeze(-2).float()).to(x.dtype)


def hyper_connections_sinkhorn(logits: Tensor, p: P) -> Tensor:
    """Balances columns before rows, from a detached column maximum, with F.normalize(p=1).

    These are the iterations of the transposed matrix.
    """
    alpha = (logits - logits.amax(dim=-2, keepdim=True).detach()).exp()
    for step in range(2 * ITERS):
        alpha = F.normalize(alpha, p=1, dim=-2 + step % 2)
    return alpha


def log_domain_sinkhorn(logits: Tensor, p: P) -> Tensor:
    """Computes the same as :func:`hyper_connections_sinkhorn` by alternating log-softmax."""
    for step in range(2 * ITERS):
        logits = F.log_softmax(logits, dim=-2 + step % 2)
    return logits.exp()


def normed(v: Tensor) -> Tensor:
    """Returns ``v / rms(v)`` in fp32."""
    return v.float() * torch.rsqrt(v.float().square().mean(-1, keepdim=True) + EPS)


def _gates(z: Tensor, p: P, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """Returns h_pre, h_post and the logits [..., n, n] of ``z [..., m]``."""
    alpha, bias = p["alpha"], p["bias"]
    pre = torch.sigmoid(z[..., :n] * alpha[0] + bias[:n]) + EPS
    post = 2 * torch.sigmoid(z[..., n : 2 * n] * alpha[1] + bias[n : 2 * n])
    return pre, post, (z[..., 2 * n :] * alpha[2] + bias[2 * n :]).unflatten(-1, (n, n))


def around(x: Tensor, p: P, matrix: Callable[[Tensor], Tensor], z: Tensor | None = None) -> Tensor:
    """Returns the formula in its plainest form, with ``matrix(logits)`` as H_res."""
    pre, post, logits = _gates(normed(x.flatten(-2)) @ p["phi"].T if z is None else z, p)
    f_out = sublayer((pre.unsqueeze(-2) @ x.float()).squeeze(-2).to(x.dtype), p)
    return (matrix(logits) @ x.float() + post.unsqueeze(-1) * f_out.unsqueeze(-2).float()).to(x.dtype)


def tile_kernels(x: Tensor, p: P) -> Tensor:
    """TileKernels: gamma folded into phi, an einsum on flat tokens, expanded gates, comb summed over its first dim."""
    a, b, n, k = *x.shape[:3], x.shape[2] * x.shape[3]
    fn = p["phi"] * p["gamma"].reshape(-1)
    flat = x.flatten(2, 3).float().view(-1, 1, k)
    mixes = torch.einsum("mbk,nbk->mbn", flat, fn.view(-1, 1, k))
    mixes = (mixes * (flat.square().sum(-1).unsqueeze(-1) / k + EPS).rsqrt()).sum(-2).view(a, b, -1)
    scale = torch.cat([p["alpha"][0].expand(n), p["alpha"][1].expand(n), p["alpha"][2].expand(n * n)])
    mixes = mixes * scale + p["bias"]
    pre = mixes[:, :, :n].sigmoid().unsqueeze(-1) + EPS
    post = (mixes[:, :, n : 2 * n].sigmoid() * 2.0).unsqueeze(-1)
    comb = _balanced(mixes[:, :, 2 * n :].view(a, b, n, n))
    f_out = sublayer((x * pre).sum(-2).to(x.dtype), p)
    mixed = torch.einsum("abmn,abmc->abnc", comb, x.float())
    return (f_out.float().unsqueeze(-2) * post + mixed).to(x.dtype)


def deepseek(x: Tensor, p: P) -> Tensor:
    """DeepSeek's inference code, XTuner, torchtitan: coefficients of flat tokens, comb times x summed over dim 2."""
    n, shape = x.shape[-2], x.shape
    flat = x.flatten(2).float()
    mixes = F.linear(flat, p["phi"]) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    pre, post, logits = _gates(mixes.view(-1, (2 + n) * n), p)
    pre, post, comb = pre.view(*shape[:2], n), post.view(*shape[:2], n), _balanced(logits).view(*shape[:2], n, n)
    f_out = sublayer(torch.sum(pre.unsqueeze(-1) * flat.view(shape), dim=2).to(x.dtype), p)
    mixed = torch.sum(comb.unsqueeze(-1) * x.unsqueeze(-2), dim=2)
    return (post.unsqueeze(-1) * f_out.unsqueeze(-2) + mixed).type_as(f_out)


def sglang(x: Tensor, p: P) -> Tensor:
    """SGLang's and TeleChat's torch path, AITER's HIP reference: softmax written out, the mix added in place."""
    pre, post, comb = _gates(F.linear(normed(x.flatten(-2)), p["phi"]), p)
    comb = torch.exp(comb - comb.amax(dim=-1, keepdim=True))
    comb = comb / comb.sum(dim=-1, keepdim=True) + EPS
    for step in range(2 * ITERS - 1):
        comb = comb / (comb.sum(dim=-2 + step % 2, keepdim=True) + EPS)
    f_out = sublayer((pre.unsqueeze(-1) * x.float()).sum(dim=-2).to(x.dtype), p)
    out = post.unsqueeze(-1) * f_out.float().unsqueeze(-2)
    out += (comb.unsqueeze(-1) * x.float().unsqueeze(-2)).sum(dim=-3)
    return out.to(x.dtype)


def potentials(logits: Tensor) -> Tensor:
    """Balances in the log domain, with an addend per row and an addend per column."""
    u = torch.zeros(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    v = torch.zeros_like(u)
    for _ in range(ITERS):
        u = -torch.logsumexp(logits.float() + v.unsqueeze(-2), dim=-1)
        v = -torch.logsumexp(logits.float() + u.unsqueeze(-1), dim=-2)
    return torch.exp(logits.float() + u.unsqueeze(-1) + v.unsqueeze(-2))


def aiter_triton(x: Tensor, p: P) -> Tensor:
    """AITER's Triton reference: x over its rms, one product per part, constant gates, log-domain iterations."""
    n, k = x.shape[-2], x.shape[-2] * x.shape[-1]
    flat = x.reshape(-1, k).float()
    normed, phi, bias = flat / torch.sqrt(torch.mean(flat**2, dim=-1, keepdim=True) + EPS), p["phi"].t(), p["bias"]
    pre = torch.sigmoid(0.7 * (normed @ phi[:, :n]) + bias[:n]) + EPS
    post = (2.0 * torch.sigmoid(0.8 * (normed @ phi[:, n : 2 * n]) + bias[n : 2 * n])).unsqueeze(-1)
    comb = potentials((1.1 * (normed @ phi[:, 2 * n :]) + bias[2 * n :]).view(-1, n, n))
    f_out = sublayer(torch.einsum("mn,mnc->mc", pre, flat.view(len(flat), n, -1)).to(x.dtype), p)
    mixed = torch.einsum("mhc,mhj->mjc", x.reshape(-1, *x.shape[-2:]).float(), comb)
    return (post.squeeze(-1)[:, :, None] * f_out.float()[:, None, :] + mixed).to(x.dtype).view(x.shape)


def megatron_packed(x: Tensor, p: P) -> Tensor:
    """Megatron-LM: sequence-first streams packed as [s, b, n * C], the sublayer's bias expanded separately."""
    b, s, n, d = x.shape
    streams = x.transpose(0, 1).contiguous().view(s, b, n * d)
    r = torch.rsqrt(streams.float().square().mean(-1, keepdim=True) + EPS)
    alpha = torch.cat([p["alpha"][k : k + 1].expand(m) for k, m in enumerate((n, n, n * n))])
    h = r * F.linear(streams.float(), p["phi"]) * alpha + p["bias"]
    post, matrix = h[..., n : 2 * n].sigmoid() * 2, h[..., 2 * n :].view(s, b, n, n)
    matrix = torch.exp(matrix - matrix.max(dim=-1, keepdim=True).values)
    for step in range(2 * ITERS):
        matrix = matrix / matrix.sum(dim=-1 - step % 2, keepdim=True).clamp(min=1e-8)
    h_in = (streams.view(s, b, n, d) * h[..., :n].sigmoid().unsqueeze(-1)).sum(dim=2).to(x.dtype)
    mixed = torch.bmm(matrix.view(s * b, n, n), streams.view(s * b, n, d).float()).view(s, b, n * d)
    out = (post.unsqueeze(-1) * sublayer(h_in, p).float().unsqueeze(2)).view(s, b, n * d)
    out = out + (post.unsqueeze(-1) * p["weight"][0].view(1, 1, 1, d)).view(s, b, n * d)
    return (out + mixed).to(x.dtype).view(s, b, n, d).transpose(0, 1)


def streams_first(x: Tensor, p: P) -> Tensor:
    """[B, n, T, D] throughout, as some forks of KDA and nanoGPT keep the streams."""
    b, n, t, d = x.shape
    normed = F.rms_norm(x.transpose(1, 2).reshape(b, t, n * d).float(), (n * d,), p["gamma"].reshape(-1), EPS)
    pre, post, logits = _gates(normed @ p["phi"].T, p)
    f_out = sublayer((pre.transpose(1, 2).unsqueeze(-1) * x.float()).sum(1).to(x.dtype), p)
    mixed = torch.einsum("btij,bjtd->bitd", _balanced(logits), x.float())
    return (mixed + torch.einsum("btn,btd->bntd", post, f_out.float())).to(x.dtype)


def _exp_and_eps(matrix: Tensor) -> Tensor:
    matrix = matrix.exp()
    for step in range(2 * ITERS):
        matrix = matrix / (matrix.sum(-1 - step % 2, keepdim=True) + 1e-2)
    return matrix


def whole_maximum(m: Tensor) -> Tensor:
    """MiniMind: the maximum of the whole matrix is subtracted before exp, and no eps is added."""
    m = torch.exp(m - m.amax((-2, -1), keepdim=True))
    for step in range(2 * ITERS):
        m = m / m.sum(-1 - step % 2, keepdim=True)
    return m


class Balance(torch.autograd.Function):
    """Iterations with a custom backward, as in Megatron's SinkhornKnopp; the gradient here is arbitrary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        matrix = _exp_and_eps(logits)
        ctx.save_for_backward(matrix)
        return matrix

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (matrix,) = ctx.saved_tensors
        return grad * matrix


def lite(x: Tensor, p: P) -> Tensor:
    """mHC-lite: H_res is a convex combination of all permutations, weighted by n! rows of phi."""
    n = x.shape[-2]
    every = torch.eye(n)[torch.tensor(list(itertools.permutations(range(n))))].flatten(1)
    z = F.rms_norm(x.flatten(-2).float(), (n * x.shape[-1],), eps=EPS) @ torch.cat([p["phi"], p["phi"][:8]]).T
    weights = torch.softmax(z[..., 2 * n :] * p["alpha"][2], -1)
    return around(x, p, lambda _: (weights @ every).unflatten(-1, (n, n)), z[..., : n * (n + 2)])


def single_pass(x: Tensor, p: P) -> Tensor:
    """DeepSeek-V4.1: the streams are collapsed with the h_pre that the previous sublayer predicted."""
    h_pre = None
    for _ in range(2):
        pre, post, logits = _gates(normed(x.flatten(-2)) @ p["phi"].T, p)
        h_in = x[..., 0, :] if h_pre is None else (h_pre.unsqueeze(-1) * x.float()).sum(-2).to(x.dtype)
        mixed = _balanced(logits).transpose(-1, -2) @ x.float()
        x, h_pre = (mixed + post.unsqueeze(-1) * sublayer(h_in, p).unsqueeze(-2).float()).to(x.dtype), pre
    return x


def motif(x: Tensor, p: P) -> Tensor:
    """Motif-3: all logits are clamped. The op has no such form."""
    n, z = x.shape[-2], normed(x.flatten(-2)) @ p["phi"].T
    pre = torch.sigmoid((z[..., :n] * p["alpha"][0] + p["bias"][:n]).clamp(-1, 1))
    post = torch.sigmoid((z[..., n : 2 * n] * p["alpha"][1] + p["bias"][n : 2 * n]).clamp(-1, 1))
    f_out = sublayer((pre.unsqueeze(-1) * x.float()).sum(-2).to(x.dtype), p)
    return (x.float() + post.unsqueeze(-1) * f_out.unsqueeze(-2).float()).to(x.dtype)


def marginals_sinkhorn(logits: Tensor, p: P, each: float = 0.0) -> Tensor:
    """Iterates as tokenbender does: as :func:`potentials`, with explicit log marginals, which are zero or ``each``."""
    z, marginal = logits / 0.5, torch.full(logits.shape[-1:], each)
    u = v = torch.zeros(logits.shape[:-1])
    for _ in range(ITERS):
        u = marginal - torch.logsumexp(z + v.unsqueeze(-2), dim=-1)
        v = marginal - torch.logsumexp(z + u.unsqueeze(-1), dim=-2)
    return torch.exp(z + u.unsqueeze(-1) + v.unsqueeze(-2))


def logsumexp_sinkhorn(logits: Tensor, p: P) -> Tensor:
    """Balances with the log-softmax written out, as in many ports."""
    for step in range(2 * ITERS):
        logits = logits - torch.logsumexp(logits, dim=-1 - step % 2, keepdim=True)
    return logits.exp()


def gates_written_out(
    x: Tensor,
    p: P,
    gate: Callable[[Tensor], Tensor],
    inside: bool = False,
    matrix: Callable[[Tensor], Tensor] = _balanced,
) -> Tensor:
    """Returns the formula with ``gate`` for sigmoid; ``inside``: alpha multiplies the bias too."""
    n, a, b = x.shape[-2], p["alpha"], p["bias"]
    z = normed(x.flatten(-2)) @ p["phi"].T
    parts = zip(z.split([n, n, n * n], -1), a.unbind(), b.split([n, n, n * n]), strict=True)
    pre, post, logits = ((z_ + b_) * a_ if inside else z_ * a_ + b_ for z_, a_, b_ in parts)
    f_out = sublayer(((gate(pre) + EPS).unsqueeze(-2) @ x.float()).squeeze(-2).to(x.dtype), p)
    mixed = matrix(logits.unflatten(-1, (n, n))) @ x.float()
    return (mixed + 2 * gate(post).unsqueeze(-1) * f_out.unsqueeze(-2).float()).to(x.dtype)


def inline_marginals_sinkhorn(logits: Tensor, p: P) -> Tensor:
    """Balances with the log-softmax written out and log marginals of 1 / n subtracted in place of potentials."""
    n = logits.shape[-1]
    for step in range(2 * ITERS):
        logits = logits - torch.logsumexp(logits, -1 - step % 2, keepdim=True) - math.log(n)
    return logits.exp() * n


def loops(x: Tensor, p: P) -> Tensor:
    """Sums the streams in a loop that starts from zeros, and casts by ``type_as``."""
    pre, post, logits = _gates(normed(x.flatten(-2)) @ p["phi"].T, p)
    h_in = torch.zeros_like(x[..., 0, :], dtype=torch.float32)
    for i in range(x.shape[-2]):
        h_in += pre[..., i : i + 1] * x[..., i, :].float()
    f_out = sublayer(h_in.type_as(x), p)
    out = torch.matmul(_balanced(logits).mT, x.float())
    out += post.unsqueeze(-1) * f_out.float().unsqueeze(-2)
    return out.type_as(f_out)


def layer_alone(x: Tensor, p: P) -> tuple[Tensor, Tensor]:
    """DeepSeek-V4.1, each layer compiled by itself: returns x_out, and h_pre for the next layer."""
    pre, post, logits = _gates(normed(x.flatten(-2)) @ p["phi"].T, p)
    f_out = sublayer(x[..., 0, :], p)
    mixed = _balanced(logits).mT @ x.float()
    return (mixed + post.unsqueeze(-1) * f_out.unsqueeze(-2).float()).to(x.dtype), pre


def _memory(x: Tensor, p: P) -> Tensor:
    """Adds rows of a table to the streams, by a gate on the normed product with keys of each stream."""
    rows = p["weight"][torch.arange(x.shape[1]) % p["weight"].shape[0]].to(x.dtype).expand(x.shape[0], -1, -1)
    key, value = (rows.unsqueeze(-2) * p["gamma"].to(x.dtype)).float(), sublayer(rows, p)
    h = x.float()
    scale = torch.rsqrt(h.square().mean(-1) + EPS) * torch.rsqrt(key.square().mean(-1) + EPS) * x.shape[-1] ** -0.5
    product = (h * p["gamma"].float() * key).sum(-1) * scale
    gate = torch.sigmoid(torch.copysign(product.abs().clamp_min(1e-6).sqrt(), product))
    return (h + gate.unsqueeze(-1) * value.float().unsqueeze(-2)).to(x.dtype)


def automodel(x: Tensor, p: P) -> Tensor:
    """NeMo Automodel's DeepSeek-V4.1: two layers of two sublayers, and a memory that writes the streams in between.

    Logits by addcmul with expanded scales, comb times x summed over dim 2, results in f_out's dtype. Returns [..., D].
    """
    n = x.shape[2]
    h_pre = torch.zeros(*x.shape[:3], dtype=torch.float32)
    h_pre[..., 0] = 1
    for site in range(4):
        if site == 2:
            x = _memory(x, p)
        flat = x.flatten(2).float()
        z = F.linear(flat, p["phi"].float()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
        scales = torch.cat([a.expand(k) for a, k in zip(p["alpha"], (n, n, n * n), strict=True)]).float()
        logits = torch.addcmul(p["bias"].float(), z, scales)
        pre, post = torch.sigmoid(logits[..., :n]) + EPS, 2 * torch.sigmoid(logits[..., n : 2 * n])
        comb = _balanced(logits[..., 2 * n :].unflatten(-1, (n, n)))
        f_out = sublayer(normed((h_pre.unsqueeze(-1) * x.float()).sum(2).to(x.dtype)).to(x.dtype), p)
        mixed = (comb.unsqueeze(-1) * x.unsqueeze(-2)).sum(2)
        x, h_pre = (post.unsqueeze(-1) * f_out.unsqueeze(-2) + mixed).to(f_out.dtype), pre
    return (h_pre.unsqueeze(-1) * x.float()).sum(2).to(x.dtype)


def coefficients_alone(x: Tensor, p: P) -> tuple[Tensor, Tensor, Tensor]:
    """Liger's coefficients: a function of their own returns h_pre, h_post and h_res."""
    pre, post, logits = _gates(normed(x.flatten(-2)) @ p["phi"].T, p)
    return pre, post, _balanced(logits)


def eps_outside_the_root(x: Tensor, p: P) -> Tensor:
    """Megatron-LM's norm, |x| / sqrt(n D) + eps."""
    v = x.flatten(-2).float()
    inverse = 1.0 / (v.norm(dim=-1, keepdim=True) / math.sqrt(v.shape[-1]) + EPS)
    return around(x, p, _balanced, (v @ p["phi"].T) * inverse)


def normalised_by_torch(x: Tensor, p: P) -> Tensor:
    """The norm of lucidrains' code, F.normalize. The op has no such norm."""
    v = x.flatten(-2).float()
    return around(x, p, _balanced, F.normalize(v, dim=-1) * math.sqrt(v.shape[-1]) @ p["phi"].T)


def softmaxed_post(x: Tensor, p: P) -> Tensor:
    """Takes a softmax for h_post. The op has no such weights."""
    n, z = x.shape[-2], normed(x.flatten(-2)) @ p["phi"].T
    pre, _, logits = _gates(z, p)
    post = torch.softmax(z[..., n : 2 * n] * p["alpha"][1] + p["bias"][n : 2 * n], -1)
    f_out = sublayer((pre.unsqueeze(-1) * x.float()).sum(-2).to(x.dtype), p)
    return (_balanced(logits) @ x.float() + post.unsqueeze(-1) * f_out.unsqueeze(-2).float()).to(x.dtype)


def tanh_hyper_connections(x: Tensor, p: P) -> Tensor:
    """The first hyper-connections (arXiv 2409.19606): tanh weights, of each stream by itself, around static ones."""
    n, d = x.shape[-2:]
    z = torch.tanh(F.layer_norm(x.float(), (d,)) @ p["phi"][: n + 2, :d].T)
    alpha = z[..., : n + 1] * p["alpha"][0] + torch.eye(n + 1)[1:]
    beta = z[..., n + 1] * p["alpha"][1] + 1
    mixed = alpha.transpose(-1, -2) @ x.float()
    f_out = sublayer(mixed[..., 0, :].to(x.dtype), p)
    return (torch.einsum("...d,...n->...nd", f_out.float(), beta) + mixed[..., 1:, :]).to(x.dtype)


BOTH = {"mhc_pre": 1, "mhc_post": 1}
REST = {"mhc_sinkhorn": 1, "mhc_post": 1}
REFERENCE_MODELS: dict[str, tuple[Callable[..., object], dict[str, int]]] = {
    "liger": (liger, BOTH),
    "aiter": (aiter, BOTH),
    "npu_pre": (npu_pre, {"mhc_pre": 1}),
    "megatron": (megatron, BOTH),
    "paper": (paper, BOTH),
    "hyper_connections_sinkhorn": (hyper_connections_sinkhorn, {"mhc_sinkhorn": 1}),
    "log_domain_sinkhorn": (log_domain_sinkhorn, {"mhc_sinkhorn": 1}),
    "tile_kernels": (tile_kernels, BOTH),
    "deepseek": (deepseek, BOTH),
    "sglang": (sglang, BOTH),
    "aiter_triton": (aiter_triton, {**BOTH, "mhc_sinkhorn": 1}),
    "megatron_packed": (megatron_packed, BOTH),
    "streams_first": (streams_first, BOTH),
    # Most ports of the paper: exp without a maximum, eps added to the sums. The op has no such form.
    "exp_and_eps": (lambda x, p: around(x, p, _exp_and_eps), BOTH),
    "whole_maximum": (lambda x, p: around(x, p, whole_maximum), BOTH),
    # Logits divided by tau, as in nanochat and tokenbender.
    "temperature": (lambda x, p: around(x, p, lambda m: potentials(m / 0.5)), {**BOTH, "mhc_sinkhorn": 1}),
    "own_backward": (lambda x, p: around(x, p, Balance.apply), BOTH),
    "lite": (lite, BOTH),
    "single_pass": (single_pass, {"mhc_coefficients": 1, "mhc_collapse": 1, "mhc_post": 2, "mhc_sinkhorn": 1}),
    "motif": (motif, {}),
    "marginals_sinkhorn": (marginals_sinkhorn, {"mhc_sinkhorn": 1}),
    "logsumexp_sinkhorn": (logsumexp_sinkhorn, {"mhc_sinkhorn": 1}),
    # Log marginals of 1 / n a row and column, and n times the result.
    "n_marginals_sinkhorn": (lambda x, p: marginals_sinkhorn(x, p, -math.log(N)) * N, {"mhc_sinkhorn": 1}),
    "half_tanh": (lambda x, p: gates_written_out(x, p, lambda z: (1 + torch.tanh(z / 2)) / 2), BOTH),
    "log_sigmoid": (lambda x, p: gates_written_out(x, p, lambda z: F.logsigmoid(z).exp()), BOTH),
    "alpha_of_the_sum": (lambda x, p: gates_written_out(x, p, torch.sigmoid, inside=True), BOTH),
    # Several ports: exp of the logits minus their row maximum, eps added to the sums.
    "eps_after_maximum": (
        lambda x, p: around(x, p, lambda m: _exp_and_eps(m - m.amax(-1, keepdim=True))),
        {**BOTH, "mhc_sinkhorn": 1},
    ),
    "inline_marginals_sinkhorn": (inline_marginals_sinkhorn, {"mhc_sinkhorn": 1}),
    "loops": (loops, BOTH),
    "automodel": (automodel, {"mhc_coefficients": 4, "mhc_collapse": 5, "mhc_post": 4}),
    "layer_alone": (layer_alone, {"mhc_coefficients": 1, "mhc_post": 1}),
    "coefficients_alone": (coefficients_alone, {"mhc_coefficients": 1}),
    "eps_outside_the_root": (eps_outside_the_root, BOTH),
    "normalised_by_torch": (normalised_by_torch, REST),
    "softmaxed_post": (softmaxed_post, {"mhc_pre": 1}),
    "tanh_hyper_connections": (tanh_hyper_connections, {}),
}
"""Maps each name to its function and the ops that it must become, counted."""
IN_TRAINING = {"own_backward": {**BOTH, "mhc_sinkhorn": 1}}
"""The ops of those that differ in training: iterations with a backward of their own stay apart from pre."""
REASONS = {
    # Nothing reads the h_pre of the last sublayer.
    "single_pass": ["mhc_pre: h_pre does not collapse x: expected h_in[d] = sum_i h_pre[i] * x[i, d]"],
    "normalised_by_torch": [
        "mhc_pre: the norm is bounded below, as by F.normalize; expected inv_rms = rsqrt(mean(x * x) + eps) or "
        "1 / (sqrt(mean(x * x)) + eps), of all n * D elements of a token"
    ],
    "own_backward": [
        "mhc_sinkhorn: the backward of this autograd.Function is not the derivative of its forward: run in fp64, gradients "
        "differ by 9.9e+04"
    ],
    "softmaxed_post": ["mhc_post: softmax is applied to the logits; expected sigmoid(alpha * z + bias)"],
    "tanh_hyper_connections": [
        "mhc_post: the streams are mixed by part of a larger tensor, as in hyper-connections with static or tanh "
        "weights; expected a matrix [..., n, n]"
    ],
    "motif": ["mhc_pre: clamp is applied to the logits; expected sigmoid(alpha * z + bias)"],
}
"""The report's near misses for the formulas that differ from the op's."""
