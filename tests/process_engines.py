# SPDX-License-Identifier: Apache-2.0
"""What each process of a test with several does: runs compiled models that were pickled, and DDP in many buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from mhc_inductor import backend, counters
from mhc_inductor.options import RoutingOptions
from tests.engine_models import DEPTH, KINDS, WIDTH, Kind, counted, gradients, linear

RANKS, WIDE = 2, 1024


class Stages(nn.Module):
    """Layers with wide ones in between, each of which fills a bucket, so that no formula is cut."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        torch.manual_seed(0)
        wide = [nn.Sequential(linear(WIDTH, WIDE), linear(WIDE, WIDTH)) for _ in range(DEPTH)]
        self.stages = nn.Sequential(*(m for pair in zip(kind.layers(), wide, strict=True) for m in pair))

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(x)


def routing(gm: Any, inputs: Any) -> Any:
    """Routes a graph as the backend does, and runs it without Inductor."""
    backend._route(gm, RoutingOptions())
    return aot_eager(gm, inputs)


def work(rank: int, path: str, models: Mapping[str, tuple[nn.Module, Tensor]]) -> None:
    """Raises AssertionError unless everything holds in this process, for each kind's compiled model and its output."""
    torch.set_num_threads(1)
    for kind, (compiled, want) in models.items():
        with torch.no_grad():
            torch.testing.assert_close(compiled(KINDS[kind].x()), want)
        assert counted(kind, {}) == KINDS[kind].expected(), kind
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=dist.FileStore(path, RANKS))
    try:
        for kind in KINDS:
            _ddp(rank, kind)
    finally:
        dist.destroy_process_group()


def _ddp(rank: int, kind: str) -> None:
    """Compares outputs and averaged gradients of a compiled DDP model with those of the plain one."""
    cap = 8 * WIDE * WIDTH
    dist._DEFAULT_FIRST_BUCKET_BYTES = cap  # type: ignore[attr-defined]
    made = KINDS[kind]
    model, plain, x = Stages(made), Stages(made), made.x(rank)
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap / 2**20)
    graphs, before = [], dict(counters())

    def bucket(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return routing(gm, inputs)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=True):
        out, same = torch.compile(ddp, backend=bucket)(x), plain(x)
    torch.testing.assert_close(out, same)
    out.square().mean().backward()
    same.square().mean().backward()
    got, want = gradients(model), gradients(plain)
    assert got.keys() == want.keys(), kind
    for name, grad in want.items():
        dist.all_reduce(grad)
        torch.testing.assert_close(got[name], grad / RANKS)
    assert len(graphs) > DEPTH and counted(kind, before) == made.expected(), (kind, len(graphs))
