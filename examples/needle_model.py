# SPDX-License-Identifier: Apache-2.0
"""A byte-level model for look-ups: a short convolution, attention, an MLP.

Its attention is causal over all positions (:class:`DenseAttention`),
:class:`mhc_inductor.nn.NativeSparseAttention` over compressed blocks, selected blocks and a window, or
:class:`TokenAttention` to single tokens. :func:`sparse` and :func:`by_token` convert a model with the first into one
with the second or the third.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from needle_tokens import TokenAttention
from torch import Tensor, nn

from mhc_inductor.nn import NativeSparseAttention

VOCAB = 256
CONV = 4


class DenseAttention(nn.Module):
    """Causal attention ``[B, S, dim] -> [B, S, dim]``: one head of keys and values for all heads, no positions."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, head_dim, bias=False)
        self.v_proj = nn.Linear(dim, head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=False)
        with torch.no_grad():
            # Start with sharper scores than the default: a look-up attends to one key of many.
            self.q_proj.weight.mul_(2)
            self.k_proj.weight.mul_(2)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        k, v = (p(x).unsqueeze(1).expand(-1, self.heads, -1, -1) for p in (self.k_proj, self.v_proj))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(o.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Norm, causal convolution and attention, then norm and gated MLP, each with a residual."""

    def __init__(self, dim: int, attention: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv1d(dim, dim, CONV)
        self.attention = attention
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def mixed(self, x: Tensor) -> Tensor:
        """Returns the input of attention, ``[B, S, dim]``: each position mixed with the three before it."""
        h = F.rms_norm(x, x.shape[-1:])
        mixed: Tensor = self.conv(F.pad(h.mT, (CONV - 1, 0))).mT
        return h + mixed

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(self.mixed(x)))

    def mlp(self, x: Tensor) -> Tensor:
        gate, value = self.up(F.rms_norm(x, x.shape[-1:])).chunk(2, -1)
        out: Tensor = self.down(F.silu(gate) * value)
        return x + out


class NeedleModel(nn.Module):
    """Maps bytes ``tokens[B, S]`` and positions ``ask[n]`` to logits ``[B, n, 256]`` of the byte after each."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.block = Block(dim, DenseAttention(dim, heads, head_dim))
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: Tensor, ask: Tensor) -> Tensor:
        return self.logits(self.block(self.embed(tokens))[:, ask])

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.rms_norm(x, x.shape[-1:]))
        return out

    def answers(self, tokens: Tensor, ask: Tensor) -> Tensor:
        """Returns the same logits; attention to tokens is computed for the positions ``ask`` only."""
        attention = self.block.attention
        if not isinstance(attention, TokenAttention):
            return self.forward(tokens, ask)
        x = self.embed(tokens)
        return self.logits(self.block.mlp(x[:, ask] + attention.at(self.block.mixed(x), ask)))

    def loss(self, tokens: Tensor, ask: Tensor, answer: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        """Returns nats per answer, and nats per block (:meth:`block_loss`) or of the index's loss; else 0."""
        attention = self.block.attention
        if isinstance(attention, TokenAttention):
            x = self.embed(tokens)
            attended, nats_index = attention.with_loss(self.block.mixed(x))
            logits = self.logits(self.block.mlp((x + attended)[:, ask]))
            return F.cross_entropy(logits.flatten(0, 1), answer.flatten()), nats_index
        nats = F.cross_entropy(self(tokens, ask).flatten(0, 1), answer.flatten())
        sparse = isinstance(attention, NativeSparseAttention)
        return nats, self.block_loss(tokens, ask, where) if sparse else nats.new_zeros(())

    def warm_up_loss(self, tokens: Tensor) -> Tensor:
        """Returns the loss of the index over all tokens, in nats a query; the rest of the model gets no gradient."""
        attention = self.block.attention
        assert isinstance(attention, TokenAttention)
        with torch.no_grad():
            x = self.block.mixed(self.embed(tokens))
        return attention.warm_up_loss(x)

    def block_loss(self, tokens: Tensor, ask: Tensor, where: Tensor) -> Tensor:
        """Returns the cross-entropy, in nats, of the compressed scores against the block that holds the answer.

        The compressed scores decide which blocks are selected, and the selection has no gradient. In a large model the
        scores learn without help; here this second loss teaches them, as DeepSeek-V3.2 does with its indexer.
        """
        layer = self.block.attention
        assert isinstance(layer, NativeSparseAttention)
        x = self.block.mixed(self.embed(tokens))
        q = layer.q_proj(x[:, ask]).unflatten(-1, (layer.heads, layer.head_dim))
        keys = layer.k_proj(x)[..., : layer.head_dim].unsqueeze(1)  # the compressed branch's keys come first
        keys = layer.compress_k(keys)[0].squeeze(1)
        length, stride = layer.compress_k.length, layer.compress_k.stride
        scores = torch.einsum("bnhd,bcd->bnhc", q, keys) * layer.head_dim**-0.5
        end = torch.arange(keys.shape[1], device=x.device) * stride + length
        scores = scores.masked_fill(end > ask[:, None, None] + 1, -1e9)
        holds = (where // stride).clamp(max=keys.shape[1] - 1)
        return F.cross_entropy(scores.flatten(0, 2), holds[..., None].expand(-1, -1, layer.heads).flatten())

    @torch.no_grad()
    def selected(self, tokens: Tensor) -> Tensor:
        """Returns the blocks that each position selects, ``[B, S, top_k]``, -1 for none."""
        layer = self.block.attention
        assert isinstance(layer, NativeSparseAttention)
        return layer.selected_blocks(self.block.mixed(self.embed(tokens)))[:, :, 0]


def sparse(model: NeedleModel, block: int, top_k: int, compress: int, window: int) -> NeedleModel:
    """Returns a copy of the model with sparse attention; every branch starts with the dense key and value weights."""
    made = copy.deepcopy(model)
    dense = made.block.attention
    assert isinstance(dense, DenseAttention)
    layer = NativeSparseAttention(
        dense.q_proj.in_features,
        dense.heads,
        1,
        head_dim=dense.head_dim,
        block_size=block,
        top_k=top_k,
        compress=compress,
        stride=compress,
        window=window,
    ).to(dense.q_proj.weight)
    with torch.no_grad():
        layer.q_proj.weight.copy_(dense.q_proj.weight)
        layer.o_proj.weight.copy_(dense.o_proj.weight)
        for ours, its in ((layer.k_proj, dense.k_proj), (layer.v_proj, dense.v_proj)):
            ours.weight.copy_(its.weight.repeat(3, 1))
        nn.init.zeros_(layer.gate.weight)
        nn.init.zeros_(layer.gate.bias)
    made.block.attention = layer
    return made


def by_token(model: NeedleModel, topk: int) -> NeedleModel:
    """Returns a copy of the model with attention to tokens: the dense weights, and an index that has learned nothing."""
    made = copy.deepcopy(model)
    dense = made.block.attention
    assert isinstance(dense, DenseAttention)
    layer = TokenAttention(dense.q_proj.in_features, dense.heads, dense.head_dim, topk).to(dense.q_proj.weight)
    layer.load_state_dict({**layer.state_dict(), **dense.state_dict()})
    made.block.attention = layer
    return made
