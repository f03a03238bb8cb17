# SPDX-License-Identifier: Apache-2.0
"""A byte-level transformer whose residuals are manifold-constrained hyper-connections (arXiv 2512.24880)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_inductor.nn import HyperConnection, HyperHead, expand

VOCAB = 256
HEAD_DIM = 32


class Linear(nn.Linear):
    """Linear layer with an fp32 weight that multiplies in the dtype of its input: bf16 compute without autocast."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary positions to x ``[B, heads, S, 2 * half]``; cos and sin are ``[S, half]``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Norm and causal self-attention on the collapsed input ``[B, S, D]``."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, seq: int) -> None:
        super().__init__()
        self.heads = dim // HEAD_DIM
        self.qkv = Linear(dim, 3 * dim, bias=False)
        self.proj = Linear(dim, dim, bias=False)
        frequency = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angle = torch.outer(torch.arange(seq), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        qkv = self.qkv(F.rms_norm(x, (D,))).view(B, S, 3, self.heads, HEAD_DIM)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        cos, sin = self.cos[:S].to(x.dtype), self.sin[:S].to(x.dtype)
        q, k = (rope(F.rms_norm(t, (HEAD_DIM,)), cos, sin) for t in (q, k))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(o.transpose(1, 2).reshape(B, S, D))
        return out


class MLP(nn.Module):
    """Norm and gated MLP on the collapsed input ``[B, S, D]``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.hidden = 8 * dim // 3
        self.up = Linear(dim, 2 * self.hidden, bias=False)
        self.down = Linear(self.hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(F.rms_norm(x, x.shape[-1:])).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * value)
        return out


class ByteTransformer(nn.Module):
    """Maps byte values ``[B, S]`` (int64) to logits ``[B, S, 256]`` in fp32.

    The ``n`` residual streams ``[B, S, n, D]`` have dtype ``streams``. A sublayer reads only their collapse.
    """

    def __init__(self, dim: int, layers: int, seq: int, n: int = 4, streams: torch.dtype = torch.float32) -> None:
        super().__init__()
        if dim % HEAD_DIM:
            raise ValueError(f"dim must be a multiple of {HEAD_DIM}, got {dim}")
        self.n = n
        self.streams = streams
        self.embed = nn.Embedding(VOCAB, dim)
        sublayers = [sublayer for _ in range(layers) for sublayer in (Attention(dim, seq), MLP(dim))]
        self.blocks = nn.ModuleList(HyperConnection(dim, n, sublayer) for sublayer in sublayers)
        self.collapse = HyperHead(dim, n)
        self.head = Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = expand(self.embed(tokens).to(self.streams), self.n)
        for block in self.blocks:
            x = block(x)
        h = self.collapse(x)
        out: Tensor = self.head(F.rms_norm(h, h.shape[-1:])).float()
        return out
