# SPDX-License-Identifier: Apache-2.0
"""Shapes, targets and inputs of the rows of attention over lists of keys, and what they are checked against.

Bars and goals are microseconds. Source: the project's survey on one NVIDIA H200 (torch 2.11, triton 3.6): bf16, uniform
random causal keys, sorted, L2 flushed, medians. Absolute times count only on such a GPU; on another device compare
ratios within one run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import attention
from .attention import CHUNK, Call, Named
from .running import Target

DENSE_MASKED, DENSE_ALL = "dense SDPA with a mask", "dense SDPA, all keys"
DENSE_CAUSAL, PLAIN = "dense causal SDPA", "torch.compile, dense causal"
GATHER, RANGES = "torch.compile, gathered keys", "selection op, ranges of one key"
TILELANG, ATTN_GYM = "TileLang's pipelined example", "attn-gym's gather_attn"
PACKAGES = (TILELANG, ATTN_GYM)
"""Peers that pip installs, measured where they are."""
OTHER_KEYS = (DENSE_ALL, DENSE_CAUSAL, PLAIN)
"""Peers that attend to all keys, not to those of the lists."""
FLA = "flash-linear-attention"
NO_FLA = "its selection takes blocks of at least 16 keys, and D up to 256: no lists of keys"


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape: the last ``queries`` positions of ``batch`` sequences of ``keys``, one group of ``heads`` heads.

    A query selects ``listed`` random causal keys. ``dim``, ``v_dim``: Dk and Dv; ``shared``: the values are the first
    ``v_dim`` columns of the keys. With ``pooled`` keys (DeepSeek-V4), these follow the ``queries`` own keys, each for
    ``RATIO`` positions; a query selects its last ``window`` own keys and ``listed`` of the pooled ones.
    """

    name: str
    queries: int
    keys: int
    heads: int
    dim: int
    v_dim: int
    listed: int
    shared: bool = True
    sink: bool = False
    batch: int = 1
    window: int = 0
    pooled: int = 0

    @property
    def length(self) -> int:
        """Returns S_kv."""
        return self.keys + self.pooled

    @property
    def entries(self) -> int:
        """Returns n, the length of a list."""
        return self.window + self.listed

    @property
    def decodes(self) -> bool:
        return self.queries == 1

    def of(self, queries: int, keys: int, listed: int, **changes: Any) -> Shape:
        """Returns a shape of the same kind and other sizes."""
        return dataclasses.replace(self, queries=queries, keys=keys, listed=listed, **changes)

    @property
    def peers(self) -> tuple[str, ...]:
        """Returns the other implementations that are measured at this shape."""
        plain = self.dim <= 256 and self.dim == self.v_dim and not self.sink
        return (RANGES, GATHER, DENSE_MASKED, *((DENSE_ALL,) if plain else ()))

    def packages(self, what: str) -> tuple[str, ...]:
        """Returns the packages that have this shape: TileLang's example forwards of 576 / 512 columns, attn-gym's C."""
        wide = self.shared and self.dim - self.v_dim == 64 and self.v_dim == 512 and what == "fwd"
        return (*((TILELANG,) if wide else ()), *((ATTN_GYM,) if self.pooled else ()))

    @property
    def dense(self) -> tuple[str, ...]:
        """Returns the dense causal attentions of the crossing: torch.compile too where no fast SDPA takes the width."""
        return (PLAIN, DENSE_CAUSAL) if self.shared else (DENSE_CAUSAL,)

    def small(self) -> Shape:
        """Returns a shape of the same kind with a few thousand times less work, for trial runs."""
        dim, v_dim, heads = 16 + (8 if self.dim != self.v_dim else 0), 16, min(4, self.heads)
        found = dataclasses.replace(self, heads=heads, dim=dim, v_dim=v_dim, batch=min(2, self.batch))
        if self.pooled:
            return found.of(32, 32, 5, window=6, pooled=8)
        queries = max(4, self.queries // 256) if not self.decodes else 1
        return found.of(queries, max(queries, self.keys // 256), max(3, self.listed // 256))

    def for_gradients(self) -> Shape:
        """Returns the shape at which all gradients are compared with fp64: the same heads and widths."""
        if self.pooled:
            return self.of(512, 512, 48, window=16, pooled=128)
        return self.of(512, 2048, 256)


RATIO = 4
A = Shape("A", 4096, 16384, 64, 512, 512, 2048)
B = Shape("B", 4096, 16384, 128, 576, 512, 2048)
C = Shape("C", 8192, 8192, 64, 512, 512, 512, sink=True, window=128, pooled=2048)
D = Shape("D", 4096, 16384, 64, 128, 128, 2048, shared=False)
DECODE = Shape("decode", 1, 65536, 128, 576, 512, 2048, batch=16)
SHAPES = {s.name: s for s in (A, B, C, D, DECODE)}
MEANINGS = {
    "A": "latent keys, V = K",
    "B": "absorbed latent attention, V in K",
    "C": "DeepSeek-V4: sinks, a window of 128 and 512 of 2048 pooled keys, V = K",
    "D": "keys and values apart",
    "decode": "16 sequences, V in K",
}

WIDTHS = {128: D, 512: A}
"""The shapes whose heads and widths the crossing with dense attention takes, by Dk."""
CROSSING_LENGTHS = (4096, 8192, 16384)
CROSSING_LISTS = (128, 256, 512, 1024, 2048, 4096)


TARGETS: dict[tuple[str, str], Target] = {
    ("A", "fwd"): Target(3200, 2000),
    ("A", "fb"): Target(20000, 14000),
    ("B", "fwd"): Target(6200, 4000),
    ("B", "fb"): Target(36000, 25000),
    ("C", "fwd"): Target(2300, 1500),
    ("C", "fb"): Target(11000, 7000),
    ("D", "fwd"): Target(1300, 1000),
    ("D", "fb"): Target(8000, 6000),
    ("decode", "fwd"): Target(30, 20),
}
"""``fwd``: the op without gradients; ``fb``: the op and the gradients of its output for q, k, v and the sinks."""

PUBLISHED = {
    ("B", "fwd"): "FlashMLA's README: 640 TFLOP/s on Hopper",
    ("decode", "fwd"): "FlashMLA's README: 410 TFLOP/s on Hopper",
}
"""Figures of other authors, at shapes of their own."""


def operations(shape: Shape, pairs: int, what: str) -> int:
    """Returns the operations of ``pairs`` of a query and a key: 2 products forward, 5 in the backward."""
    both = shape.dim + shape.v_dim
    return 2 * pairs * shape.heads * (both if what == "fwd" else 4 * shape.dim + 3 * shape.v_dim)


# ---- cases

Attend = Callable[..., Tensor]


@dataclasses.dataclass
class Case(attention.Case):
    """A case of one group, and the indices ``[B, S, 1, n]`` of its lists."""

    indices: Tensor

    @property
    def selected(self) -> dict[str, Any]:
        return {"indices": self.indices, "v_width": self.shape.v_dim}

    def mask(self, *at: Any) -> Tensor:
        return mask_of(self.indices[at], self.shape.length)

    @property
    def pairs(self) -> int:
        """Returns the number of selected keys of all queries."""
        return int((self.indices >= 0).sum())


# ---- what is selected


def drawn(reach: Tensor, keys: int, count: int) -> Tensor:
    """Returns ``count`` distinct random keys below ``reach [S]`` for each query, int64 ``[S, count]``; -1 for none."""
    out = torch.empty((len(reach), count), dtype=torch.int64, device=reach.device)
    every = torch.arange(keys, device=reach.device)
    rows = max(1, CHUNK // keys)
    for at in range(0, len(reach), rows):
        hidden = every >= reach[at : at + rows, None]
        score = torch.rand(hidden.shape, device=reach.device).masked_fill_(hidden, -1)
        best, index = score.topk(count, 1)
        out[at : at + rows] = torch.where(best < 0, -1, index)
    return out


def lists(shape: Shape, device: torch.device) -> Tensor:
    """Returns the lists, sorted, int32 ``[B, S, 1, n]``; then -1 where a query has fewer keys."""
    positions = torch.arange(shape.keys - shape.queries, shape.keys, device=device)
    made = []
    for _ in range(shape.batch):
        if shape.pooled:
            near = positions[:, None] - torch.arange(shape.window, device=device)
            far = drawn((positions + 1) // RATIO, shape.pooled, shape.listed)
            at = torch.cat((near.clamp(min=-1), torch.where(far < 0, -1, far + shape.keys)), 1)
        else:
            at = drawn(positions + 1, shape.keys, shape.listed)
        at = torch.where(at < 0, shape.length, at).sort(-1).values
        made.append(torch.where(at == shape.length, -1, at).int())
    return torch.stack(made)[:, :, None]


def make_case(
    shape: Shape, device: torch.device, *, dtype: torch.dtype = torch.bfloat16, selected: Tensor | None = None
) -> Case:
    """Returns a random case, everything standard normal; the lists are ``selected`` if given."""

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    row = (shape.batch, shape.queries, 1, shape.heads)
    v = None if shape.shared else normal(shape.batch, 1, shape.length, shape.v_dim)
    # Sinks that every dtype holds exactly, since SDPA takes them in its own.
    sink = torch.randn(1, shape.heads, device=device).to(torch.float16).to(torch.bfloat16).float()
    q, k = normal(*row, shape.dim), normal(shape.batch, 1, shape.length, shape.dim)
    chosen = lists(shape, device) if selected is None else selected
    return Case(shape, q, k, v, normal(*row, shape.v_dim), sink if shape.sink else None, chosen)


# ---- calls


def call(case: Case, what: str, attend: Attend) -> Call:
    """Returns a call of ``attend(q, k, v, sink)`` on q ``[B, S, h, Dk]``, k and v ``[B, T, D]``, sink ``[h]``.

    v is None where the values are the first columns of the keys.
    """

    def o(leaves: Named) -> Tensor:
        v = leaves["v"][:, 0] if "v" in leaves else None
        sink = leaves["sink"][0] if "sink" in leaves else None
        return attend(leaves["q"][:, :, 0], leaves["k"][:, 0], v, sink)[:, :, None]

    return attention.call(o, what, case.leaves(), case.dout)


# ---- the formula


def mask_of(indices: Tensor, length: int) -> Tensor:
    """Returns the lists ``[..., n]`` as a mask, bool ``[..., length]``."""
    seen = (indices >= 0) & (indices < length)
    mask = torch.zeros((*indices.shape[:-1], length + 1), dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, torch.where(seen, indices, length).long(), True)[..., :length]


def case_values(s: Shape, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Returns what a row says of its case."""
    sizes: dict[str, Any] = {"case": s.name, "B": s.batch, "S": s.queries, "S_kv": s.length, "h": s.heads}
    sizes |= {"Dk": s.dim, "Dv": s.v_dim, "n": s.entries, "shared": s.shared}
    return sizes | {"dtype": str(dtype).removeprefix("torch.")}
