# SPDX-License-Identifier: Apache-2.0
"""Reference models of E79 as others write it: cells and layers with a loop over time in plain Python.

Each has a style of its own. Sizes are small, and the code is what such projects publish: lists of outputs, out-of-place
updates, a single projection or one projection per vector, states made inside or passed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, STATE = 24, 8


class CoupledCell(nn.Module):
    """[T, B, dim] input, a single projection, einsum throughout, three bias modes."""

    def __init__(self, bias: str = "fixed", dim: int = DIM, n: int = STATE) -> None:
        super().__init__()
        self.n, self.bias = n, bias
        self.W_kvqm = nn.Parameter(torch.empty(4 * n, dim))
        nn.init.xavier_uniform_(self.W_kvqm)
        if bias == "fixed":
            self.b_s_gate, self.b_m_gate = nn.Parameter(torch.full((n,), 2.0)), nn.Parameter(torch.full((n,), 2.5))
        elif bias == "input":
            self.W_bs, self.W_bm = nn.Parameter(0.1 * torch.randn(n, dim)), nn.Parameter(0.1 * torch.randn(n, dim))

    def forward(self, x: Tensor, S: Tensor | None = None, M: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        T, B, D = x.shape
        n = self.n
        if S is None:
            S = torch.zeros(B, n, n, device=x.device, dtype=x.dtype)
        if M is None:
            M = torch.zeros(B, n, n, device=x.device, dtype=x.dtype)
        x_flat = x.reshape(T * B, D)
        kvqm_all = (x_flat @ self.W_kvqm.T).reshape(T, B, 4 * n)
        if self.bias == "input":
            bs_all = (x_flat @ self.W_bs.T).reshape(T, B, n)
            bm_all = (x_flat @ self.W_bm.T).reshape(T, B, n)
        k_all = kvqm_all[:, :, :n]
        v_all = kvqm_all[:, :, n : 2 * n]
        q_all = kvqm_all[:, :, 2 * n : 3 * n]
        m_all = kvqm_all[:, :, 3 * n :]
        outputs = []
        for t in range(T):
            k, v, q, m = k_all[t], v_all[t], q_all[t], m_all[t]
            if self.bias == "fixed":
                b_s, b_m = self.b_s_gate, self.b_m_gate
            elif self.bias == "input":
                b_s, b_m = bs_all[t], bm_all[t]
            else:
                b_s = b_m = 0.0
            k_norm = k / (k.norm(dim=-1, keepdim=True) + 1e-6)
            m_norm = m / (m.norm(dim=-1, keepdim=True) + 1e-6)
            s_row = torch.sigmoid(torch.einsum("bij,bj->bi", M, k_norm) + b_s)
            s_col = torch.sigmoid(torch.einsum("bji,bj->bi", M, k_norm) + b_s)
            s_delta = v - torch.einsum("bij,bj->bi", S, k_norm)
            S = (s_row.unsqueeze(-1) * S * s_col.unsqueeze(1)) + torch.einsum("bi,bj->bij", s_delta, k_norm)
            m_row = torch.sigmoid(torch.einsum("bij,bj->bi", S, m_norm) + b_m)
            m_col = torch.sigmoid(torch.einsum("bji,bj->bi", S, m_norm) + b_m)
            m_delta = s_delta - torch.einsum("bij,bj->bi", M, m_norm)
            M = (m_row.unsqueeze(-1) * M * m_col.unsqueeze(1)) + torch.einsum("bi,bj->bij", m_delta, m_norm)
            Sq = torch.einsum("bij,bj->bi", S, q)
            out = Sq * F.silu(Sq)
            outputs.append(out)
        return torch.stack(outputs, dim=0), S, M


class SeparateCell(nn.Module):
    """One Linear per vector, batched matrix products, states as one tensor [2, B, n, n]."""

    def __init__(self, dim: int = DIM, n: int = STATE) -> None:
        super().__init__()
        self.n = n
        self.to_k, self.to_v, self.to_q, self.to_m = (nn.Linear(dim, n, bias=k > 1) for k in range(4))
        self.gate = nn.Parameter(torch.randn(2, n))

    def step(self, s: Tensor, z: Tensor, k: Tensor, v: Tensor, q: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, m = (u * (1.0 / (torch.linalg.vector_norm(u, dim=-1, keepdim=True) + 1e-6)) for u in (k, m))
        kc, mc = k.unsqueeze(-1), m.unsqueeze(-1)
        err = v - torch.bmm(s, kc).squeeze(-1)
        rows = (torch.bmm(z, kc).squeeze(-1) + self.gate[0]).sigmoid()
        cols = (torch.bmm(z.transpose(1, 2), kc).squeeze(-1) + self.gate[0]).sigmoid()
        s = rows[:, :, None] * cols[:, None, :] * s + torch.bmm(err.unsqueeze(-1), k.unsqueeze(1))
        rows = (torch.bmm(s, mc).squeeze(-1) + self.gate[1]).sigmoid()
        cols = (torch.bmm(s.transpose(1, 2), mc).squeeze(-1) + self.gate[1]).sigmoid()
        err = err - torch.bmm(z, mc).squeeze(-1)
        z = rows[:, :, None] * cols[:, None, :] * z + torch.bmm(err.unsqueeze(-1), m.unsqueeze(1))
        y = torch.bmm(s, q.unsqueeze(-1)).squeeze(-1)
        return s, z, y * y * torch.sigmoid(y)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if state is None:
            state = x.new_zeros(2, x.shape[1], self.n, self.n)
        s, z = state.unbind(0)
        ys = []
        for k, v, q, m in zip(self.to_k(x), self.to_v(x), self.to_q(x), self.to_m(x), strict=True):
            s, z, y = self.step(s, z, k, v, q, m)
            ys.append(y)
        return torch.stack(ys), torch.stack([s, z])


class WideCell(nn.Module):
    """Batch first, fp32 inside for any input dtype, broadcasting and sums in place of matrix products."""

    def __init__(self, dim: int = DIM, n: int = STATE) -> None:
        super().__init__()
        self.n = n
        self.proj = nn.Linear(dim, 4 * n, bias=False)
        self.bias_proj = nn.Linear(dim, 2 * n)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        p = self.proj(x).view(batch, steps, 4, self.n).float()
        b_s, b_m = self.bias_proj(x).float().chunk(2, dim=-1)
        content = torch.zeros(batch, self.n, self.n, device=x.device)
        modulation = torch.zeros_like(content)
        outs: list[Tensor] = []
        for t in range(steps):
            key, value, query, mod = p[:, t].unbind(1)
            key = key / (key.pow(2).sum(-1, keepdim=True).sqrt() + 1e-6)
            mod = mod / (mod.pow(2).sum(-1, keepdim=True).sqrt() + 1e-6)
            delta = value - (content * key[:, None, :]).sum(-1)
            r = torch.sigmoid((modulation * key[:, None, :]).sum(-1) + b_s[:, t])
            c = torch.sigmoid((modulation * key[:, :, None]).sum(-2) + b_s[:, t])
            content = r[:, :, None] * content * c[:, None, :] + delta[:, :, None] * key[:, None, :]
            r = torch.sigmoid((content * mod[:, None, :]).sum(-1) + b_m[:, t])
            c = torch.sigmoid((content * mod[:, :, None]).sum(-2) + b_m[:, t])
            delta = delta - (modulation * mod[:, None, :]).sum(-1)
            modulation = r[:, :, None] * modulation * c[:, None, :] + delta[:, :, None] * mod[:, None, :]
            y = (content * query[:, None, :]).sum(-1)
            outs.append((y * F.silu(y)).to(x.dtype))
        return torch.stack(outs, dim=1)


class Layer(nn.Module):
    """[B, T, dim]: in_proj, causal depthwise convolution, SiLU, the cell's loop, out_proj."""

    def __init__(self, dim: int = DIM, n: int = STATE, bias: str = "fixed") -> None:
        super().__init__()
        self.in_proj = nn.Linear(dim, dim, bias=False)
        self.conv = nn.Conv1d(dim, dim, 4, padding=3, groups=dim)
        self.cell = CoupledCell(bias, dim, n)
        self.out_proj = nn.Linear(n, dim, bias=False)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h = self.in_proj(x)
        h = self.conv(h.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        h = F.silu(h).transpose(0, 1).contiguous()
        out, S, M = self.cell(h, *(state or (None, None)))
        return self.out_proj(out.transpose(0, 1)), (S, M)


class Stack(nn.Module):
    """Residual layers with RMSNorm between them; only the last output is passed on."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(depth))
        self.layers = nn.ModuleList(Layer(bias="input" if k else "none") for k in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))[0]
        return x


class Projecting(nn.Module):
    """Projects inside the loop, one step at a time, as generation code does."""

    def __init__(self, dim: int = DIM, n: int = STATE) -> None:
        super().__init__()
        self.n = n
        self.W = nn.Parameter(torch.randn(4 * n, dim) / math.sqrt(dim))
        self.b = nn.Linear(dim, n)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        S = M = x.new_zeros(x.shape[1], self.n, self.n)
        outs = []
        for xt in x:
            k, v, q, m = (xt @ self.W.t()).chunk(4, dim=-1)
            b = self.b(xt)
            k = k / (k.norm(dim=-1, keepdim=True) + 1e-6)
            m = m / (m.norm(dim=-1, keepdim=True) + 1e-6)
            delta = v - (S @ k[..., None])[..., 0]
            gates = torch.sigmoid((M @ k[..., None])[..., 0] + b), torch.sigmoid((k[:, None] @ M)[:, 0] + b)
            S = gates[0][..., None] * S * gates[1][:, None] + delta[..., None] @ k[:, None]
            gates = torch.sigmoid((S @ m[..., None])[..., 0]), torch.sigmoid((m[:, None] @ S)[:, 0])
            delta = delta - (M @ m[..., None])[..., 0]
            M = gates[0][..., None] * M * gates[1][:, None] + delta[..., None] @ m[:, None]
            y = (S @ q[..., None])[..., 0]
            outs.append(y.square() * y.sigmoid())
        return torch.stack(outs), S, M


class StepByStep(nn.Module):
    """Loops over time outside and over layers inside: every layer takes its step before the next token comes."""

    def __init__(self, depth: int = 2, dim: int = DIM, n: int = STATE) -> None:
        super().__init__()
        self.n, self.depth = n, depth
        self.inner = nn.ModuleList(nn.Linear(dim, 4 * n) for _ in range(depth))
        self.outer = nn.ModuleList(nn.Linear(n, dim, bias=False) for _ in range(depth))

    def cell(self, S: Tensor, M: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v, q, m = torch.split(z, self.n, dim=-1)
        k = k / (torch.norm(k, dim=-1, keepdim=True) + 1e-6)
        m = m / (torch.norm(m, dim=-1, keepdim=True) + 1e-6)
        delta = v - torch.einsum("bij,bj->bi", S, k)
        rows, columns = torch.einsum("bij,bj->bi", M, k).sigmoid(), torch.einsum("bij,bi->bj", M, k).sigmoid()
        S = torch.einsum("bi,bij,bj->bij", rows, S, columns) + torch.einsum("bi,bj->bij", delta, k)
        delta = delta - torch.einsum("bij,bj->bi", M, m)
        rows, columns = torch.einsum("bij,bj->bi", S, m).sigmoid(), torch.einsum("bij,bi->bj", S, m).sigmoid()
        M = torch.einsum("bi,bij,bj->bij", rows, M, columns) + torch.einsum("bi,bj->bij", delta, m)
        y = torch.einsum("bij,bj->bi", S, q)
        return S, M, F.silu(y) * y

    def forward(self, x: Tensor) -> Tensor:
        states = [(x.new_zeros(x.shape[1], self.n, self.n),) * 2 for _ in range(self.depth)]
        outs = []
        for t in range(x.shape[0]):
            h = x[t]
            for layer in range(self.depth):
                S, M, y = self.cell(*states[layer], self.inner[layer](h))
                states[layer] = S, M
                h = self.outer[layer](y)
            outs.append(h)
        return torch.stack(outs)


REFERENCE_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "no bias": (lambda: CoupledCell("none"), (5, 2, DIM), 1),
    "fixed bias": (lambda: CoupledCell("fixed"), (5, 2, DIM), 1),
    "input bias": (lambda: CoupledCell("input"), (5, 2, DIM), 1),
    "separate projections": (SeparateCell, (4, 3, DIM), 1),
    "batch first, fp32 inside": (WideCell, (2, 5, DIM), 1),
    "layer": (Layer, (2, 6, DIM), 1),
    "two layers": (Stack, (2, 4, DIM), 2),
    "time outside, layers inside": (StepByStep, (4, 2, DIM), 2),
    "projects in the loop": (Projecting, (4, 2, DIM), 1),
}
"""Maps each name to its module, the shape of x, and the number of scans in it."""
