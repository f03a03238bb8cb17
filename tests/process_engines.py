# SPDX-License-Identifier: Apache-2.0
"""What each process of a test with several does: runs a compiled model that was pickled, and DDP in many buckets."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from mhc_inductor import backend, counters
from mhc_inductor.options import RoutingOptions
from tests.laws import block, mhc_leaves

RANKS, DEPTH, WIDE = 2, 2, 2048


class Layer(nn.Module):
    """One block of mHC in plain PyTorch."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        leaves = {k: scale * t.float() for k, t in mhc_leaves().items() if k != "x"}
        self.p = nn.ParameterDict({k: nn.Parameter(t) for k, t in leaves.items()})

    def forward(self, x: Tensor) -> Tensor:
        return block(x, self.p)


class Stages(nn.Module):
    """Blocks with wide layers in between, each of which fills a bucket, so that no formula is cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        stages: list[nn.Module] = []
        for k in range(DEPTH):
            stages += [Layer(1.0 - 0.1 * k), nn.Linear(16, WIDE), nn.Linear(WIDE, 16)]
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def streams(seed: int) -> Tensor:
    return torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(seed))


def routing(gm: Any, inputs: Any) -> Any:
    """Routes a graph as the backend does, and runs it without Inductor."""
    backend._route(gm, RoutingOptions())
    return aot_eager(gm, inputs)


def work(rank: int, path: str, compiled: nn.Module, want: Tensor) -> None:
    """Raises AssertionError unless everything holds in this process."""
    torch.set_num_threads(1)
    with torch.no_grad():
        torch.testing.assert_close(compiled(streams(9)), want, rtol=2e-5, atol=2e-5)
    assert counters()["routed mhc_pre"] == 1
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=dist.FileStore(path, RANKS))
    try:
        _ddp(rank)
    finally:
        dist.destroy_process_group()


def _ddp(rank: int) -> None:
    """Compares outputs and averaged gradients of a compiled DDP model with those of the plain one."""
    cap = 4 * WIDE * 16
    dist._DEFAULT_FIRST_BUCKET_BYTES = cap  # type: ignore[attr-defined]
    model, plain = Stages(), Stages()
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap / 2**20)
    graphs, before = [], counters()["routed mhc_pre"]

    def bucket(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return routing(gm, inputs)

    with torch._dynamo.config.patch(optimize_ddp=True):
        out, same = torch.compile(ddp, backend=bucket)(streams(rank)), plain(streams(rank))
    torch.testing.assert_close(out, same, rtol=2e-5, atol=2e-5)
    out.square().mean().backward()
    same.square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        dist.all_reduce(q.grad)
        torch.testing.assert_close(p.grad, q.grad / RANKS, rtol=1e-4, atol=1e-5)
    assert len(graphs) > DEPTH and counters()["routed mhc_pre"] - before == DEPTH, len(graphs)
