# SPDX-License-Identifier: Apache-2.0
"""A byte-level E79 language model in plain PyTorch: the recurrence is a Python loop over time.

This module does not use mhc_inductor. Compiled with its backend, the loop that Dynamo unrolled becomes one scan again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 256
EPS = 1e-6


class E79Cell(nn.Module):
    """The coupled memory-modulation matrix recurrence over ``[T, B, dim]`` with fixed biases and zero initial states.

    Each sequence has two n x n states: S holds content. M decides what S keeps, and S decides what M keeps.
    """

    def __init__(self, dim: int, n: int) -> None:
        super().__init__()
        self.n = n
        self.W_kvqm = nn.Parameter(torch.empty(4 * n, dim))
        nn.init.xavier_uniform_(self.W_kvqm)
        # Gates start near sigmoid(2) = 0.88, so that stored content fades over several steps.
        self.b_s_gate = nn.Parameter(torch.full((n,), 2.0))
        self.b_m_gate = nn.Parameter(torch.full((n,), 2.5))

    def forward(self, x: Tensor) -> Tensor:
        T, B, _ = x.shape
        k, v, q, m = (x @ self.W_kvqm.T).chunk(4, dim=-1)
        S = x.new_zeros(B, self.n, self.n)
        M = x.new_zeros(B, self.n, self.n)
        outs = []
        for t in range(T):
            S, M, out = self.step(S, M, k[t], v[t], q[t], m[t])
            outs.append(out)
        return torch.stack(outs)

    def step(self, S: Tensor, M: Tensor, k: Tensor, v: Tensor, q: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k = k / (k.norm(dim=-1, keepdim=True) + EPS)
        m = m / (m.norm(dim=-1, keepdim=True) + EPS)
        row = torch.sigmoid(torch.einsum("bij,bj->bi", M, k) + self.b_s_gate)
        column = torch.sigmoid(torch.einsum("bij,bi->bj", M, k) + self.b_s_gate)
        delta = v - torch.einsum("bij,bj->bi", S, k)
        S = row.unsqueeze(-1) * S * column.unsqueeze(1) + torch.einsum("bi,bj->bij", delta, k)
        row = torch.sigmoid(torch.einsum("bij,bj->bi", S, m) + self.b_m_gate)
        column = torch.sigmoid(torch.einsum("bij,bi->bj", S, m) + self.b_m_gate)
        rest = delta - torch.einsum("bij,bj->bi", M, m)
        M = row.unsqueeze(-1) * M * column.unsqueeze(1) + torch.einsum("bi,bj->bij", rest, m)
        y = torch.einsum("bij,bj->bi", S, q)
        return S, M, y * F.silu(y)


class E79Layer(nn.Module):
    """In-projection, causal depthwise convolution, SiLU, cell and out-projection on ``[B, T, dim]``.

    The parameters have the names and shapes of those of ``mhc_inductor.nn.E79Layer(dim, n, conv=4)``.
    """

    def __init__(self, dim: int, n: int, width: int = 4) -> None:
        super().__init__()
        self.in_proj = nn.Linear(dim, dim, bias=False)
        self.conv1d = nn.Conv1d(dim, dim, width, groups=dim)
        self.cell = E79Cell(dim, n)
        self.out_proj = nn.Linear(n, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.pad(self.in_proj(x).mT, (self.conv1d.kernel_size[0] - 1, 0))
        h = F.silu(self.conv1d(h).mT)
        out: Tensor = self.out_proj(self.cell(h.transpose(0, 1)).transpose(0, 1))
        return out


class MLP(nn.Module):
    """Gated MLP on ``[B, T, dim]``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = 8 * dim // 3
        self.up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * value)
        return out


class E79LM(nn.Module):
    """Maps byte values ``[B, T]`` (int64) to logits ``[B, T, 256]`` in fp32."""

    def __init__(self, dim: int, layers: int, n: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(block for _ in range(layers) for block in (E79Layer(dim, n), MLP(dim)))
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(F.rms_norm(x, x.shape[-1:]))
        out: Tensor = self.head(F.rms_norm(x, x.shape[-1:]))
        return out
