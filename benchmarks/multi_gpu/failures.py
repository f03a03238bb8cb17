# SPDX-License-Identifier: Apache-2.0
"""What may go wrong with several devices: two in one process, and a rank that dies while the others need it."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import training
from .rank import Ranks, worst

DEAD = 17
"""The exit code of the rank that dies."""


# --- two devices in one process -----------------------------------------------------------------------------


def one_process(ranks: Ranks) -> dict[str, Any]:
    """Trains a compiled model and calls the ops on every device of this process, in turn and from threads at once."""
    training.make_deterministic()
    count = torch.cuda.device_count() if ranks.cuda else 2
    devices = [torch.device("cuda", i) for i in range(count)] if ranks.cuda else [torch.device("cpu")] * count
    size = training.Size(**ranks.options["size"])
    batch = next(training.batches(size, ranks, 0))
    # The current device stays the first: kernels must run where the tensors are.
    first, *others = (_step(training.by_layer(size, ranks), batch, device) for device in devices)
    # Built here: the generator of the weights is the process's.
    fresh, together = [training.by_layer(size, ranks) for _ in devices], threading.Barrier(count)

    def work(model: nn.Module, device: torch.device) -> list[torch.Tensor]:
        together.wait()
        return _step(model, batch, device)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        threaded = [pool.submit(work, *pair) for pair in zip(fresh, devices, strict=True)]
    errors = [f"{type(e).__name__}: {e}" for t in threaded if (e := t.exception())]
    results = [*others, *(t.result() for t in threaded if not t.exception())]
    pairs = [pair for r in results for pair in zip(first, r, strict=True)]
    return {
        "devices": [str(d) for d in devices],
        "threads_failed": errors,
        "equal_losses": all(torch.equal(first[0], r[0]) for r in results),
        "gradient_difference": worst(float((a - b).norm() / a.norm().clamp(min=1e-12)) for a, b in pairs),
        "ops": _ops(devices),
    }


def _step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Returns the loss and all gradients of a model that is moved to a device, on the CPU."""
    model.to(device)
    loss = training.loss_of(model, (batch[0].to(device), batch[1].to(device)))
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]


def _ops(devices: list[torch.device]) -> dict[str, bool]:
    """Returns for each op whether a call on every device gives the bits of the first device's."""
    import mhc_inductor as mi

    g = torch.Generator().manual_seed(0)
    x, phi = torch.randn(64, 4, 256, generator=g), 0.05 * torch.randn(24, 1024, generator=g)
    alpha, bias = torch.ones(3), torch.zeros(24)
    kvqm = torch.randn(32, 2, 128, generator=g)
    q, k = torch.randn(1, 32, 1, 16, 64, generator=g), torch.randn(1, 1, 64, 64, generator=g)
    indices = torch.randint(0, 64, (1, 32, 1, 16), generator=g)

    def run(device: torch.device) -> dict[str, torch.Tensor]:
        args = [t.to(device) for t in (x, phi, alpha, bias)]
        ats, chosen = [t.to(device) for t in (q, k, k + 1)], indices.to(device)
        return {
            "mhc_pre": mi.mhc_pre(*args)[0].cpu(),  # type: ignore[call-arg]
            "e79_scan": mi.e79_scan(kvqm.to(device))[0].cpu(),
            "selection_attention": mi.selection_attention(*ats, indices=chosen).cpu(),
        }

    first, *others = map(run, devices)
    return {name: all(torch.equal(t, o[name]) for o in others) for name, t in first.items()}


# --- a rank that dies ---------------------------------------------------------------------------------------


def context_dies(ranks: Ranks) -> dict[str, Any]:
    """The last rank ends before a call of context parallelism that the others make."""
    from mhc_inductor.distributed import selection_attention

    q, k = (torch.ones(size, device=ranks.device) for size in ((1, 4, 1, 16, 64), (1, 1, 8, 64)))
    ranges = torch.tensor([0, 8], device=ranks.device).expand(1, 4, 1, 1, 2)
    selection_attention(q, k, k + 1, ranges)  # connects the ranks
    return _survived(ranks, lambda: selection_attention(q, k, k + 1, ranges)) | {"op": "selection_attention"}


def dtensor_dies(ranks: Ranks) -> dict[str, Any]:
    """The last rank ends before an op on DTensors that has to gather its input."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    import mhc_inductor as mi

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    g = torch.Generator().manual_seed(0)
    args = [torch.randn(s, generator=g) for s in ((8, 4, 64), (24, 256), (3,), (24,))]
    # Streams sharded along D: the op gathers them.
    parts = [distribute_tensor(t, mesh, [Shard(2) if i == 0 else Replicate()]) for i, t in enumerate(args)]

    def call() -> None:
        mi.mhc_pre(*parts)[0].full_tensor()  # type: ignore[call-arg]
        ranks.wait()

    call()
    return _survived(ranks, call)


def _survived(ranks: Ranks, call: Any) -> dict[str, Any]:
    """Ends the last rank, and returns what the call raised on the others; NCCL may end the process instead."""
    ranks.together()
    if ranks.rank == ranks.size - 1:
        ranks.write({"dead": True})
        os._exit(DEAD)
    ranks.note(waits=True)
    began, raised = time.monotonic(), ""
    try:
        call()
        # A collective of NCCL fails where its result is waited for.
        if ranks.cuda:
            dist.all_reduce(torch.ones(1, device=ranks.device))
            ranks.wait()
            dist.all_reduce(torch.ones(1))
    except Exception as e:
        raised = f"{type(e).__name__}: {e}"[:500]
    return {"raised": raised, "after_s": round(time.monotonic() - began, 1)}
