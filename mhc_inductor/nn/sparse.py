# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention (arXiv 2502.11089): :class:`NativeSparseAttention`, a causal attention layer.

::

    layer = NativeSparseAttention(dim=2048, heads=64, groups=4)
    y = layer(x)                                            # [B, S, dim] -> [B, S, dim]
    y, cache = layer(prompt, return_cache=True)             # prefill, then token by token, or a few at once
    y_next, cache = layer(x_next, cache, return_cache=True)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_inductor.api.selection import blocks_to_ranges, selection_attention
from mhc_inductor.nn.arguments import sizes
from mhc_inductor.ops.checks import number, strided
from mhc_inductor.ops.selection import call


class NSACache(NamedTuple):
    """State that :class:`NativeSparseAttention` carries between calls: tensors ``[B, G, length, width]``."""

    k: Tensor
    """Keys of the selected branch, of every position."""
    v: Tensor
    """Values of the selected branch, of every position."""
    k_window: Tensor
    """Keys of the window branch, of the last positions that a next query can see."""
    v_window: Tensor
    """Values of the window branch, of the same positions as k_window."""
    k_compressed: Tensor
    """Compressed keys, one for each complete block."""
    v_compressed: Tensor
    """Compressed values, one for each complete block."""
    k_tail: Tensor
    """Keys not yet compressed, with which the next compressed blocks begin."""
    v_tail: Tensor
    """Values not yet compressed, of the same positions as k_tail."""


class Compression(nn.Module):
    """Compresses blocks of keys or values by a learned map: ``[B, G, S, D] -> [B, G, N, D]``, N complete blocks.

    Block i, which covers the positions ``[i * stride, i * stride + length)``, becomes its mean plus the output of a
    small network::

        c[i] = mean(x) + W2 silu(W1 vec(x + position))

    Parameters: ``position[length, D]``, ``inner`` (W1, ``[D, length * D]``), ``outer`` (W2, ``[D, D]``).

    Args:
        width: D, the width of a key or value.
        length: Positions per block, a multiple of stride.
        stride: Positions from the start of one block to the start of the next.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Source: arXiv 2502.11089, equation 7.
    """

    def __init__(self, width: int, length: int, stride: int, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.length, self.stride = length, stride
        self.position = nn.Parameter(torch.empty((length, width), device=device, dtype=dtype))
        self.inner = nn.Linear(length * width, width, bias=False, device=device, dtype=dtype)
        self.outer = nn.Linear(width, width, bias=False, device=device, dtype=dtype)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compresses all complete blocks of x.

        Args:
            x: Keys or values ``[B, G, S, D]``.

        Returns:
            ``(c, tail)``: c ``[B, G, N, D]``, one row for each complete block, and the last positions of x, with which
            later blocks begin.
        """
        size = x.shape[2]
        if size < self.length:
            return x[:, :, :0], x
        count = (size - self.length) // self.stride + 1
        # Blocks overlap: each one consists of several neighbouring strides.
        strides = self.length // self.stride
        whole = x[:, :, : (count + strides - 1) * self.stride].unflatten(2, (-1, self.stride))
        blocks = torch.cat([whole[:, :, k : k + count] for k in range(strides)], 3)  # [B, G, N, length, D]
        hidden = F.silu(self.inner((blocks + self.position.to(x.dtype)).flatten(3)))
        return blocks.mean(3) + self.outer(hidden), x[:, :, count * self.stride :]

    def extra_repr(self) -> str:
        """Returns the sizes, for ``repr``."""
        return f"length={self.length}, stride={self.stride}"


class NativeSparseAttention(nn.Module):
    """Causal attention over compressed blocks, selected blocks and a window: ``[B, S, dim] -> [B, S, dim]``.

    ::

        q, k, v  = projections of x; each branch has its own k and v
        compressed: attention over the compressed blocks that are complete at the query's position
        selected:   attention over top_k blocks: block 0, the query's own block, the previous one, and those that
                    score best by the compressed branch's probabilities, summed over the heads of a group
        window:     attention over the last ``window`` positions
        y        = o_proj(sum over branches of sigmoid(gate) * o)

    All three branches run on :func:`mhc_inductor.selection_attention` (a prefix and a window are ranges too), and no
    tensor of size ``[S, S_kv]`` is made. The choice of blocks has no gradient; the compression learns through its own
    branch.

    Args:
        dim: Width of x and of the result.
        heads: Number of query heads, a multiple of groups.
        groups: Number of heads of keys and values.
        head_dim: Width of a head of queries and keys; None for dim // heads.
        value_dim: Width of a head of values; None for head_dim.
        block_size: Keys per selected block, a multiple of stride.
        top_k: Blocks selected for each query, at least 3: the first, the own and the previous block are always
            selected.
        compress: Keys per compressed block, a multiple of stride.
        stride: Keys from the start of one compressed block to the start of the next.
        window: Positions that the window sees, the query's own included.
        rope: Base of the rotary embedding in the selected and window branches, which needs an even head_dim; None for
            no rotary embedding.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ValueError: A size is below its minimum or is not a multiple of the size it must be a multiple of.
        TypeError: A size is not an int, or rope is not a number.

    Source: arXiv 2502.11089.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        groups: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        block_size: int = 64,
        top_k: int = 16,
        compress: int = 32,
        stride: int = 16,
        window: int = 512,
        rope: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        module = "NativeSparseAttention"
        sizes(module, dim=dim, heads=heads, groups=groups)
        head_dim = dim // heads if head_dim is None else head_dim
        value_dim = head_dim if value_dim is None else value_dim
        sizes(module, head_dim=head_dim, value_dim=value_dim, stride=stride)
        sizes(module, block_size=block_size, compress=compress, window=window, top_k=top_k)
        if rope is not None:
            number(module, "rope", rope)
        if heads % groups:
            raise ValueError(f"{module}: heads must be a multiple of groups = {groups}, got {heads}")
        for name, size in (("compress", compress), ("block_size", block_size)):
            if size % stride:
                raise ValueError(f"{module}: {name} must be a multiple of stride = {stride}, got {size}")
        if top_k < 3:
            raise ValueError(
                f"{module}: top_k must be at least 3 (the first, the own and the previous block), got {top_k}"
            )
        if rope is not None and head_dim % 2:
            raise ValueError(f"{module}: head_dim must be even with rope, got {head_dim}")
        self.dim, self.groups, self.heads = dim, groups, heads // groups
        self.head_dim, self.value_dim, self.rope = head_dim, value_dim, rope
        self.block_size, self.top_k, self.window = block_size, top_k, window
        kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=False, **kwargs)
        self.k_proj = nn.Linear(dim, 3 * groups * head_dim, bias=False, **kwargs)
        self.v_proj = nn.Linear(dim, 3 * groups * value_dim, bias=False, **kwargs)
        self.o_proj = nn.Linear(heads * value_dim, dim, bias=False, **kwargs)
        self.gate = nn.Linear(dim, 3 * heads, **kwargs)
        self.compress_k = Compression(head_dim, compress, stride, **kwargs)
        self.compress_v = Compression(value_dim, compress, stride, **kwargs)

    def forward(
        self, x: Tensor, cache: NSACache | None = None, *, return_cache: bool = False
    ) -> Tensor | tuple[Tensor, NSACache]:
        """Runs the layer over x, whose positions follow those in the cache.

        Args:
            x: Input ``[B, S, dim]``.
            cache: Cache that the previous call returned, or None at the start of the sequences.
            return_cache: Whether to return the cache for the next call as well.

        Returns:
            y ``[B, S, dim]``, or ``(y, cache)`` with return_cache.

        Raises:
            ValueError: x does not have the shape ``[B, S, dim]``.
        """
        strided("NativeSparseAttention", "x", x)
        if x.dim() != 3 or x.shape[-1] != self.dim:
            expected = f"[B, S, dim] = [B, S, {self.dim}]"
            raise ValueError(f"NativeSparseAttention: x must have shape {expected}, got {list(x.shape)}")
        y, cache, _ = self._run(x, cache)
        return (y, cache) if return_cache else y

    @torch.no_grad()
    def selected_blocks(self, x: Tensor) -> Tensor:
        """Returns the blocks that each query selects, without gradients and without a cache.

        Args:
            x: Input ``[B, S, dim]``.

        Returns:
            Block indices ``[B, S, G, top_k]``, int32, in no particular order; -1 where there are fewer blocks.
        """
        return self._run(x, None)[2]

    def _run(self, x: Tensor, cache: NSACache | None) -> tuple[Tensor, NSACache, Tensor]:
        s, g, h = x.shape[1], self.groups, self.heads
        past = 0 if cache is None else cache.k.shape[2]
        q = self.q_proj(x).unflatten(-1, (g, h, self.head_dim))
        # [3, B, G, S, D], views
        k_c, k_s, k_w = self.k_proj(x).unflatten(-1, (3, g, self.head_dim)).permute(2, 0, 3, 1, 4)
        v_c, v_s, v_w = self.v_proj(x).unflatten(-1, (3, g, self.value_dim)).permute(2, 0, 3, 1, 4)
        position = torch.arange(s, device=x.device) + past
        turned = q
        if self.rope is not None:
            turned = _rotate(q, position.view(-1, 1, 1), self.rope)
            k_s, k_w = (_rotate(t, position, self.rope) for t in (k_s, k_w))
        new: tuple[Tensor, ...] = (k_s, v_s, k_w, v_w, k_c, v_c)
        if cache is not None:
            old = (cache.k, cache.v, cache.k_window, cache.v_window, cache.k_tail, cache.v_tail)
            new = tuple(torch.cat(pair, 2) for pair in zip(old, new, strict=True))
        k_s, v_s, k_w, v_w, k_c, v_c = new
        (k_n, k_tail), (v_n, v_tail) = self.compress_k(k_c), self.compress_v(v_c)
        if cache is not None:
            k_n, v_n = torch.cat((cache.k_compressed, k_n), 2), torch.cat((cache.v_compressed, v_n), 2)

        length, stride = self.compress_k.length, self.compress_k.stride
        complete = ((position + 1 - length).div(stride, rounding_mode="floor") + 1).clamp(min=0)
        o_c, lse = selection_attention(q, k_n, v_n, self._ranges(x, complete * 0, complete), return_lse=True)
        options = (self.head_dim**-0.5, length, stride, self.block_size, self.top_k, past + s)
        blocks = call("selection_blocks", q.detach(), k_n.detach(), lse.detach(), *options)
        o_s = selection_attention(turned, k_s, v_s, blocks_to_ranges(blocks, self.block_size, past + s))
        end = position + 1 - past + (k_w.shape[2] - s)
        o_w = selection_attention(turned, k_w, v_w, self._ranges(x, end - self.window, end))

        gates = torch.sigmoid(self.gate(x)).unflatten(-1, (3, g, h, 1)).unbind(2)
        o = sum(gate * t for gate, t in zip(gates, (o_c, o_s, o_w), strict=True))
        assert isinstance(o, Tensor)
        first = max(0, k_w.shape[2] - (self.window - 1))
        state = NSACache(k_s, v_s, k_w[:, :, first:], v_w[:, :, first:], k_n, v_n, k_tail, v_tail)
        return self.o_proj(o.flatten(2)), state, blocks

    def _ranges(self, x: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """Returns one range per position for all groups, ``[B, S, G, 1, 2]``, from its start and end ``[S]``."""
        pair = torch.stack((start, end), -1).to(torch.int32)
        return pair.view(1, -1, 1, 1, 2).expand(x.shape[0], -1, self.groups, 1, 2)

    def extra_repr(self) -> str:
        """Returns the sizes, for ``repr``."""
        return (
            f"dim={self.dim}, groups={self.groups}, heads a group={self.heads}, block_size={self.block_size}, "
            f"top_k={self.top_k}, window={self.window}, rope={self.rope}"
        )


def _rotate(t: Tensor, position: Tensor, base: float) -> Tensor:
    """Returns the rotary embedding of ``t[..., D]``, which pairs the two halves of D.

    ``position`` broadcasts against the dimensions of t before D.
    """
    half = t.shape[-1] // 2
    wide = torch.promote_types(t.dtype, torch.float32)
    rate = base ** (-torch.arange(half, device=t.device, dtype=wide) / half)
    angle = position.unsqueeze(-1) * rate
    cos, sin = angle.cos(), angle.sin()
    a, b = t.to(wide).chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(t.dtype)
