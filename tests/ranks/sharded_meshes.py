# SPDX-License-Identifier: Apache-2.0
"""Checks on a mesh of two by two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import mhc_inductor as mi
from tests.ranks.sharded_tools import error, mhc_inputs, mhc_layer, same


def whole_mesh_of_two_dimensions(mesh: Any) -> None:
    whole = [Replicate(), Replicate()]
    # The first op that this process calls is called in inference mode, which skips autograd.
    args = mhc_inputs((4, 5))
    with torch.inference_mode():
        parts = [distribute_tensor(t, mesh, p) for t, p in zip(args, [[Shard(0), Shard(1)], *[whole] * 4], strict=True)]
        h_in = torch.ops.mhc_inductor.mhc_pre(*parts, 1e-6, 1e-6, 2.0, 0.0, 0, 1e-6, "softmax")[0]
        assert tuple(h_in.placements) == (Shard(0), Shard(1))
        assert error(h_in.full_tensor(), mi.mhc_pre(*args)[0]) < 1e-12
    for split in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(1), Shard(1)], [Replicate(), Shard(0)]):
        same(mhc_layer, args, [split, *[whole] * 4], mesh)
    g = torch.Generator().manual_seed(5)
    q, k = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((2, 3, 1, 4, 8), (2, 1, 7, 8)))
    indices = torch.randint(0, 7, (2, 3, 1, 4), generator=g)

    def attend(q: Tensor, k: Tensor, indices: Tensor) -> Tensor:
        return mi.selection_attention(q, k, k, indices=indices, v_width=6)

    same(attend, (q, k, indices), [[Shard(0), Shard(3)], [Shard(0), Replicate()], [Shard(0), Replicate()]], mesh)
    dq = distribute_tensor(q.requires_grad_(), mesh, [Shard(0), Shard(3)])
    dk = distribute_tensor(k, mesh, [Shard(0), Replicate()]).requires_grad_()
    attend(dq, dk, distribute_tensor(indices, mesh, [Shard(0), Replicate()])).sum().backward()
    assert dk.grad.placements == (Shard(0), Partial("sum"))


def whole_empty_shards(mesh: Any) -> None:
    """Five tokens on four ranks: the last one has none."""
    flat = init_device_mesh("cpu", (mesh.size(),))
    same(mhc_layer, mhc_inputs((1, 5)), [[Shard(1)], *[[Replicate()]] * 4], flat)


def whole_a_dead_rank_ends_in_an_error(mesh: Any) -> None:
    """The last check of its process group: one rank ends; the others get an error where they need it."""
    flat = init_device_mesh("cpu", (mesh.size(),))
    args = mhc_inputs((1, 8))
    parts = [distribute_tensor(t, flat, [Shard(3) if i == 0 else Replicate()]) for i, t in enumerate(args)]
    if dist.get_rank() == mesh.size() - 1:
        return  # the process ends
    try:
        mhc_layer(*parts).full_tensor()
    except RuntimeError:
        return
    raise AssertionError("no error")
