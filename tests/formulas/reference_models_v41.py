# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1's attention as trainers write it (NeMo Automodel, without quantised caches): three kinds of indexers.

A *full* layer pools keys and index keys, scores them, keeps whole blocks of candidates and chooses the topk. A *re-index*
layer chooses again among the candidates with queries of its own. A *reuse* layer takes what was chosen before.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS, WIDTH, RATIO, WINDOW = 32, 2, 16, 2, 4
INDEX_HEADS, INDEX_WIDTH, TOPK, BLOCK, BLOCKS = 3, 16, 5, 4, 2


@dataclasses.dataclass(frozen=True)
class State:
    """What layers share: pooled keys ``[B, T, WIDTH]``, index keys, chosen ones ``[B, S, TOPK]`` and candidates."""

    pooled: Tensor | None = None
    keys: Tensor | None = None
    chosen: Tensor | None = None
    candidates: Tensor | None = None


def candidate_blocks(scores: Tensor, visible: Tensor) -> Tensor:
    """Returns bool ``[B, S, T]``: the keys of the best blocks, the last visible one always among them."""
    T = scores.shape[-1]
    best = F.pad(scores, (0, -T % BLOCK), value=-torch.inf).unflatten(-1, (-1, BLOCK)).amax(-1)
    last = (visible - 1) // BLOCK
    best = best.masked_fill(torch.arange(best.shape[-1], device=scores.device) == last, torch.inf)
    top = best.topk(min(BLOCKS, best.shape[-1]), -1)
    keep = torch.zeros_like(best, dtype=torch.bool).scatter(-1, top.indices, top.values > -torch.inf)
    return keep.repeat_interleave(BLOCK, -1)[..., :T]


class Indexer(nn.Module):
    """Chooses pooled keys for each query; ``full`` ones make the index keys, and the candidates if ``source``."""

    def __init__(self, full: bool, source: bool) -> None:
        super().__init__()
        self.full, self.source = full, source
        self.q = nn.Linear(DIM, INDEX_HEADS * INDEX_WIDTH, bias=False)
        self.weights = nn.Linear(DIM, INDEX_HEADS, bias=False)
        if full:
            self.k = nn.Linear(WIDTH, INDEX_WIDTH, bias=False)

    @torch.no_grad()
    def forward(self, x: Tensor, state: State) -> State:
        keys = self.k(state.pooled) if self.full else state.keys
        assert keys is not None
        q = self.q(x).unflatten(-1, (INDEX_HEADS, INDEX_WIDTH))
        weights = self.weights(x) * (INDEX_WIDTH**-0.5 * INDEX_HEADS**-0.5)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        visible = ((positions + 1) // RATIO)[..., None].expand(x.shape[0], -1, -1)
        allowed = torch.arange(keys.shape[1], device=x.device) < visible
        scores = torch.einsum("bshd,btd->bsht", q, keys)
        scores = (scores.relu() * weights[..., None]).sum(2).masked_fill(~allowed, -torch.inf)
        candidates = state.candidates
        if self.source:
            candidates = candidate_blocks(scores, visible) & allowed
        elif candidates is not None:
            scores = scores.masked_fill(~candidates, -torch.inf)
        chosen = scores.topk(min(TOPK, keys.shape[1]), -1, sorted=False).indices.sort(-1).values
        chosen = torch.where(torch.isfinite(scores.gather(-1, chosen)), chosen, -1)
        return dataclasses.replace(state, keys=keys, chosen=chosen, candidates=candidates)


class Attention(nn.Module):
    """Attention to a window of a query's own keys and to the chosen pooled ones, with a sink; V = K."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q = nn.Linear(DIM, HEADS * WIDTH, bias=False)
        self.kv = nn.Linear(DIM, WIDTH, bias=False)
        self.out = nn.Linear(HEADS * WIDTH, DIM, bias=False)
        self.sink = nn.Parameter(torch.randn(HEADS))
        if kind == "full":
            self.pool, self.gate = nn.Linear(DIM, WIDTH, bias=False), nn.Linear(DIM, WIDTH, bias=False)
        if kind != "reuse":
            self.indexer = Indexer(kind == "full", kind == "full")

    def compress(self, x: Tensor) -> Tensor:
        values, scores = (f(x).unflatten(1, (-1, RATIO)) for f in (self.pool, self.gate))
        return (values * scores.softmax(2)).sum(2)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        B, S, _ = x.shape
        if self.kind == "full":
            state = State(pooled=self.compress(x))
        if self.kind != "reuse":
            state = self.indexer(x, state)
        assert state.pooled is not None and state.chosen is not None
        q, own = self.q(x).unflatten(-1, (HEADS, WIDTH)), self.kv(x)
        at = torch.arange(S, device=x.device)
        near = at[:, None] - torch.arange(WINDOW - 1, -1, -1, device=x.device)
        near = torch.where(near >= 0, near, -1).expand(B, -1, -1)
        index = torch.cat((near, torch.where(state.chosen >= 0, state.chosen + S, -1)), -1)
        keys = torch.cat((own, state.pooled), 1)
        rows = keys[torch.arange(B, device=x.device)[:, None, None], index.clamp_min(0)]
        logits = torch.einsum("bshd,bsnd->bshn", q, rows) * WIDTH**-0.5
        logits = logits.float().masked_fill((index < 0)[:, :, None], -torch.inf)
        sink = self.sink.view(1, 1, -1, 1).expand(B, S, -1, 1)
        p = torch.cat((logits, sink), -1).softmax(-1)[..., :-1].to(x.dtype)
        return self.out(torch.einsum("bshn,bsnd->bshd", p, rows).flatten(2)), state


class Model(nn.Module):
    """Residual layers of the given kinds, which hand on their state."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(kind) for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        state = State()
        for layer in self.layers:
            y, state = layer(x, state)
            x = x + y
        return x
