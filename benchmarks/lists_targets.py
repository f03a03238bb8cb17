# SPDX-License-Identifier: Apache-2.0
"""Targets of the rows of selection attention over lists of keys: shapes, bars and goals, in microseconds.

Source: the project's survey on one NVIDIA H200 (torch 2.11, triton 3.6): bf16, uniform random causal keys, sorted, L2
flushed, medians. Absolute times count only on such a GPU; on another device compare ratios within one run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

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
