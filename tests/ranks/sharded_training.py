# SPDX-License-Identifier: Apache-2.0
"""Checks of the public functions on DTensors, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mhc_inductor as mi
from tests.ranks.sharded_tools import mhc_inputs, mhc_layer, same


def mhc_trains(mesh: Any, dtype: torch.dtype = torch.float64) -> None:
    args = mhc_inputs(dtype=dtype)
    for placement in (Shard(0), Shard(1), Shard(-2), Shard(-1), Replicate()):
        same(mhc_layer, args, [[placement], *[[Replicate()]] * 4], mesh)
    # Parameters that are sharded themselves, as FSDP keeps them, are gathered.
    same(mhc_layer, args, [[Shard(0)], *[[Shard(0)]] * 4], mesh)


def e79_trains(mesh: Any, dtype: torch.dtype = torch.float64) -> None:
    g = torch.Generator().manual_seed(4)
    args = [
        torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in ((5, 3, 16), (4,), (3, 4, 4), (3, 4, 4))
    ]

    def scan(kvqm: Tensor, b_s: Tensor, S0: Tensor, M0: Tensor) -> Any:
        return mi.e79_scan(kvqm, b_s, None, S0, M0)

    for dims in ((1, 0, 0), (0, 1, 2)):
        split = [[Shard(dims[0])], [Replicate()], [Shard(dims[1])], [Shard(dims[2])]]
        same(scan, args, split, mesh)


def selection_trains(mesh: Any, dtype: torch.dtype = torch.float64) -> None:
    g = torch.Generator().manual_seed(5)
    shapes = ((2, 5, 3, 2, 8), (2, 3, 7, 8), (2, 3, 7, 6), (3, 2))
    q, k, v, sink = (torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)
    start = torch.randint(0, 6, (2, 5, 3, 2, 1), generator=g)
    ranges, indices = torch.cat([start, start + 2], -1), torch.randint(-1, 7, (2, 5, 3, 4), generator=g)

    def by_ranges(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, ranges: Tensor) -> Any:
        return mi.selection_attention(q, k, v, ranges, sink=sink, return_lse=True)

    def by_lists(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, indices: Tensor) -> Any:
        return mi.selection_attention(q, k, v, indices=indices, sink=sink, return_lse=True)

    whole = Replicate()
    for fn, which in ((by_ranges, ranges), (by_lists, indices)):
        for split in (
            (Shard(0), Shard(0), Shard(0), whole, Shard(0)),
            (Shard(1), whole, whole, whole, Shard(1)),
            (Shard(2), Shard(1), Shard(1), Shard(0), Shard(2)),
            (Shard(3), whole, whole, Shard(1), whole),
            (Shard(1), Shard(2), Shard(2), whole, Shard(1)),  # the keys' sequence is gathered
        ):
            same(fn, (q, k, v, sink, which), [[p] for p in split], mesh)


def fewer_tokens_than_ranks_are_gathered(mesh: Any) -> None:
    same(mhc_layer, mhc_inputs((1, 1)), [[Shard(1)], *[[Replicate()]] * 4], mesh)
    same(mhc_layer, mhc_inputs((0, 2)), [[Shard(0)], *[[Replicate()]] * 4], mesh)


def _refused(*args: Tensor) -> str:
    try:
        mi.mhc_pre(*args)
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("no error")


def wrong_calls_raise_on_every_rank(mesh: Any) -> None:
    x, phi, alpha, bias, gamma = mhc_inputs()
    whole = [distribute_tensor(t, mesh, [Replicate()]) for t in (phi, alpha, bias, gamma)]
    split = distribute_tensor(x, mesh, [Shard(0)])
    assert "mixed torch.Tensor and DTensor" in _refused(split, phi, *whole[1:])
    assert "mhc_pre: phi" in _refused(split, whole[0][:, :-1], *whole[1:])
    assert torch.isfinite(mi.mhc_pre(split, *whole)[0].full_tensor()).all()
