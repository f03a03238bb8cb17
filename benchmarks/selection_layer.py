# SPDX-License-Identifier: Apache-2.0
"""Times a whole attention layer: ``nn.NativeSparseAttention`` and dense causal attention with the same projections.

The parts of its forward (the three branches and the choice of blocks) are also timed separately.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mhc_inductor
from mhc_inductor.nn import NativeSparseAttention

SPARSE, DENSE = "NativeSparseAttention", "dense causal SDPA, the same projections"


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes of a layer and its input; bf16, without rotary embeddings."""

    tokens: int
    dim: int = 2048
    heads: int = 64
    groups: int = 4
    head_dim: int = 128

    def small(self) -> Layer:
        return Layer(96, 32, 4, 2, 8)


LAYERS = (Layer(8192), Layer(16384), Layer(32768))


class Dense(nn.Module):
    """Causal attention ``[B, S, dim] -> [B, S, dim]``: ``heads`` query heads, ``groups`` heads of keys and values."""

    def __init__(self, size: Layer, **kwargs: Any) -> None:
        super().__init__()
        self.size = size
        self.q_proj = nn.Linear(size.dim, size.heads * size.head_dim, bias=False, **kwargs)
        self.k_proj = nn.Linear(size.dim, size.groups * size.head_dim, bias=False, **kwargs)
        self.v_proj = nn.Linear(size.dim, size.groups * size.head_dim, bias=False, **kwargs)
        self.o_proj = nn.Linear(size.heads * size.head_dim, size.dim, bias=False, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.size.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(o.transpose(1, 2).flatten(2))


def calls(size: Layer, device: torch.device) -> dict[tuple[str, str], Callable[[], Any]]:
    """Returns the call to time for each (what, variant)."""
    kwargs: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if device.type == "cuda" else torch.float32}
    sparse = NativeSparseAttention(size.dim, size.heads, size.groups, head_dim=size.head_dim, **kwargs)
    dense = Dense(size, **kwargs)
    x = torch.randn(1, size.tokens, size.dim, **kwargs)
    dy = torch.randn_like(x)

    def forward(layer: nn.Module) -> Callable[[], Any]:
        return torch.no_grad()(lambda: {"y": layer(x)})

    def both(layer: nn.Module) -> Callable[[], Any]:
        leaf = x.detach().requires_grad_()
        inputs = [leaf, *layer.parameters()]

        def call() -> Any:
            y = layer(leaf)
            return {"y": y.detach(), "grads": torch.autograd.grad(y, inputs, dy)}

        return call

    found: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, layer in ((SPARSE, sparse), (DENSE, dense)):
        found["forward", name] = forward(layer)
        found["forward + backward", name] = both(layer)
    return found | {(f"of its forward: {what}", SPARSE): call for what, call in parts(sparse, size, kwargs).items()}


def parts(layer: NativeSparseAttention, size: Layer, kwargs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Returns calls of the three branches and of the choice of blocks, on random inputs of the layer's sizes."""
    g, d, n = size.groups, size.head_dim, size.tokens
    q = torch.randn(1, n, g, size.heads // g, d, **kwargs)
    k = torch.randn(1, g, n, d, **kwargs)
    position = torch.arange(n, device=k.device)
    with torch.no_grad():
        short, _ = layer.compress_k(k)
    length, stride = layer.compress_k.length, layer.compress_k.stride
    complete = ((position + 1 - length).div(stride, rounding_mode="floor") + 1).clamp(min=0)

    def ranges(start: Tensor, end: Tensor) -> Tensor:
        return torch.stack((start, end), -1).int().view(1, -1, 1, 1, 2).expand(1, -1, g, 1, 2)

    seen, near = ranges(complete * 0, complete), ranges(position + 1 - layer.window, position + 1)
    _, lse = mhc_inductor.selection_attention(q, short, short, seen, return_lse=True)

    def choose() -> Tensor:
        return torch.ops.mhc_inductor.selection_blocks(
            q, short, lse, d**-0.5, length, stride, layer.block_size, layer.top_k, n
        )

    chosen = mhc_inductor.blocks_to_ranges(choose(), layer.block_size, n)
    found = {
        "compressing keys": lambda: layer.compress_k(k)[0],
        "compressed branch": lambda: mhc_inductor.selection_attention(q, short, short, seen),
        "choosing blocks": choose,
        "selected branch": lambda: mhc_inductor.selection_attention(q, k, k, chosen),
        "window": lambda: mhc_inductor.selection_attention(q, k, k, near),
    }
    return {what: torch.no_grad()(call) for what, call in found.items()}
