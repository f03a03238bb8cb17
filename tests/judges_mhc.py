"""mHC as other projects write it, in our own words: layouts, conventions and names of each, for the routing to find.

Every function takes ``x [..., n, D]`` and a mapping of parameters made by :func:`parameters`, and returns
``x_out [..., n, D]`` with a sublayer in between, unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

N, WIDTH, EPS, ITERS = 4, 32, 1e-6, 5
P = Mapping[str, Tensor]


def parameters(seed: int = 0, n: int = N, width: int = WIDTH) -> dict[str, Tensor]:
    """fp32 leaves that require gradients: phi [m, n*D], alpha [3], bias [m], gamma [n, D], weight [D, D]."""
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
    """Softmax convention: rows by softmax, then columns and rows in turn."""
    matrix = scores.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def liger(x: Tensor, p: P) -> Tensor:
    """Columns-first phi [n*D, m], tokens flattened, three scalar gates, no epsilon on h_pre, R = h_res."""
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
    """A sum of squares over n*D, gates expanded to one a row, one bias for all rows, R = h_res transposed."""
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
    """gamma on the vector, raw logits: (h_in, h_post, h_res)."""
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
    """exp convention, rows then columns, sums clamped; h_res applied as it is, by a batched product."""
    lead, (n, width) = x.shape[:-2], x.shape[-2:]
    normed = F.rms_norm(x.flatten(-2).float(), [n * width], eps=EPS)
    raw = normed @ p["phi"].T
    pre, post, res = torch.split(raw, [n, n, n * n], dim=-1)
    b_pre, b_post, b_res = p["bias"].split([n, n, n * n])
    pre = (p["alpha"][0] * pre + b_pre).sigmoid()
    post = 2 * (p["alpha"][1] * post + b_post).sigmoid()
    logits = (p["alpha"][2] * res + b_res).view(*lead, n, n)
    matrix = torch.exp(logits - logits.max(dim=-1, keepdim=True).values)
    for _ in range(ITERS):
        matrix = matrix / matrix.sum(dim=-1, keepdim=True).clamp(min=EPS)
        matrix = matrix / matrix.sum(dim=-2, keepdim=True).clamp(min=EPS)
    streams = x.float()
    h_in = torch.matmul(pre.unsqueeze(-2), streams).squeeze(-2).to(x.dtype)
    mixed = torch.bmm(matrix.reshape(-1, n, n), streams.reshape(-1, n, width)).view(x.shape)
    return (mixed + post.unsqueeze(-1) * sublayer(h_in, p).float().unsqueeze(-2)).to(x.dtype)


def paper(x: Tensor, p: P) -> Tensor:
    """Eq. 7 and 8 as printed: the norm first, three weights, ``h_post`` as a column times ``F`` as a row."""
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
    """Columns before rows, from a detached column maximum, by p = 1 normalisation: iterations of the transpose."""
    alpha = (logits - logits.amax(dim=-2, keepdim=True).detach()).exp()
    for _ in range(ITERS):
        alpha = F.normalize(alpha, p=1, dim=-2)
        alpha = F.normalize(alpha, p=1, dim=-1)
    return alpha


def log_domain_sinkhorn(logits: Tensor, p: P) -> Tensor:
    """The same by alternating log-softmax."""
    for _ in range(ITERS):
        logits = F.log_softmax(logits, dim=-2)
        logits = F.log_softmax(logits, dim=-1)
    return logits.exp()


JUDGES: dict[str, tuple[Callable[..., object], dict[str, int]]] = {
    "liger": (liger, {"mhc_pre": 1, "mhc_post": 1}),
    "aiter": (aiter, {"mhc_pre": 1, "mhc_post": 1}),
    "npu_pre": (npu_pre, {"mhc_pre": 1}),
    "megatron": (megatron, {"mhc_pre": 1, "mhc_post": 1}),
    "paper": (paper, {"mhc_pre": 1, "mhc_post": 1}),
    "hyper_connections_sinkhorn": (hyper_connections_sinkhorn, {"mhc_sinkhorn": 1}),
    "log_domain_sinkhorn": (log_domain_sinkhorn, {"mhc_sinkhorn": 1}),
}
"""name -> (function, the ops that it must become)."""
