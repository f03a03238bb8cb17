# SPDX-License-Identifier: Apache-2.0
"""Attention to single tokens that a learned index chooses, for the needle example: :class:`TokenAttention`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mhc_inductor import selection_attention
from mhc_inductor.nn import SparseIndexer

Index = tuple[Tensor, Tensor, Tensor]


class TokenAttention(nn.Module):
    """Causal attention ``[B, S, dim] -> [B, S, dim]`` of each query to the ``topk`` tokens that its index chooses.

    As in DeepSeek-V3.2, the index has projections of its own, and learns by the KL divergence from the attention's own
    distribution: first alone and over all tokens (:meth:`warm_up_loss`), then with the model and over the chosen tokens
    (:meth:`with_loss`). Neither the input of the index nor the attention gets a gradient from it: the index learns from
    the attention, the attention from the answers.
    """

    def __init__(self, dim: int, heads: int, head_dim: int, topk: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, head_dim, bias=False)
        self.v_proj = nn.Linear(dim, head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=False)
        self.index_q = nn.Linear(dim, heads * head_dim, bias=False)
        self.index_k = nn.Linear(dim, head_dim, bias=False)
        self.index_w = nn.Linear(dim, heads)
        nn.init.ones_(self.index_w.bias)  # a score grows with the products until the weights have learned otherwise
        self.choose = SparseIndexer(topk)

    def indexed(self, x: Tensor, rows: Tensor) -> Index:
        """Returns q ``[B, n, h, D]``, k ``[B, S, D]`` and w ``[B, n, h]`` of the index, for the queries ``rows[B, n]``."""
        q = self.index_q(rows).unflatten(-1, (self.heads, self.head_dim))
        return q, self.index_k(x), self.index_w(rows)

    def attention(self, x: Tensor, rows: Tensor) -> Index:
        """Returns q ``[B, n, 1, h, D]``, and k and v ``[B, 1, S, D]``."""
        q = self.q_proj(rows).unflatten(-1, (1, self.heads, self.head_dim))
        return q, self.k_proj(x).unsqueeze(1), self.v_proj(x).unsqueeze(1)

    def forward(self, x: Tensor) -> Tensor:
        picks = self.choose(*self.indexed(x, x))
        out: Tensor = self.o_proj(selection_attention(*self.attention(x, x), indices=picks).flatten(2))
        return out

    def warm_up_loss(self, x: Tensor) -> Tensor:
        """Returns the loss of the index over all tokens up to each query, in nats a query; only the index learns."""
        with torch.no_grad():
            q, k, _ = self.attention(x, x)
        return self.choose.loss(*self.indexed(x.detach(), x.detach()), None, q, k)

    def with_loss(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what :meth:`forward` returns, and the loss of the index in nats a query."""
        index, (q, k, v) = self.indexed(x.detach(), x.detach()), self.attention(x, x)
        picks = self.choose(*index)
        o, lse = selection_attention(q, k, v, indices=picks, return_lse=True)
        return self.o_proj(o.flatten(2)), self.choose.loss(*index, picks, q, k, lse=lse)

    def chosen(self, x: Tensor, at: Tensor) -> Tensor:
        """Returns the tokens ``[B, n, 1, topk]`` that the positions ``at[n]`` choose, -1 for none."""
        limit = (at + 1).expand(x.shape[0], -1)
        picks: Tensor = self.choose(*self.indexed(x, x[:, at]), limit=limit)
        return picks

    def at(self, x: Tensor, at: Tensor) -> Tensor:
        """Returns ``forward(x)[:, at]``, computed for these queries only."""
        o = selection_attention(*self.attention(x, x[:, at]), indices=self.chosen(x, at))
        out: Tensor = self.o_proj(o.flatten(2))
        return out
