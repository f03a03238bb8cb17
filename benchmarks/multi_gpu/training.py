# SPDX-License-Identifier: Apache-2.0
"""Training on several ranks: losses against one rank's, and weak scaling."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import nn

from . import model as models
from .model import Size
from .rank import Ranks, worst

BAR, BAR_RANKS = 0.93, 4
"""Weak scaling: a rank's speed as a share of one rank's alone, on this many ranks."""
FSDP = "FSDP2"
MIXED = "FSDP2, parameters travel as bf16"
KEPT = "FSDP2, as bf16, kept for the backward"
POLICIES: dict[str, dict[str, bool]] = {FSDP: {}, MIXED: {"mixed": True}, KEPT: {"mixed": True, "keep": True}}
"""What :func:`model.fully_sharded` takes."""
ALLOWED = {True: 5e-3, False: 1e-5}
"""Largest relative difference of losses by whether products are in bf16, which round by their size."""


# --- losses -------------------------------------------------------------------------------------------------


def losses(ranks: Ranks) -> dict[str, Any]:
    """Trains on every rank's batches in one process, with FSDP2 and with DDP in many buckets; compares the losses."""
    make_deterministic()
    size = Size(**ranks.options["size"])
    found: dict[str, Any] = {"size": dataclasses.asdict(size), "variants": {}}
    sharded = {name: functools.partial(_fsdp, **POLICIES[name]) for name in (FSDP, MIXED)}
    for name, run in {"one rank": _alone, **sharded, "DDP": _ddp}.items():
        torch._dynamo.reset()
        before = _counters()
        values = run(size, ranks)
        row = {
            "losses": values,
            "allowed": ALLOWED[ranks.cuda or name == MIXED],
            "counters": {k: v - before.get(k, 0) for k, v in _counters().items() if v != before.get(k)},
        }
        if name == "DDP":
            row["graphs"] = _GRAPHS[-1]
        found["variants"][name] = row
        ranks.free()
        ranks.note(**found)
    want = found["variants"]["one rank"]["losses"]
    for row in found["variants"].values():
        pairs = list(zip(row["losses"], want, strict=True))
        row["difference"] = worst(abs(a - b) / b for a, b in pairs)
        row["equal_bits"] = sum(a == b for a, b in pairs)
        row["routed"] = all(row["counters"].get(f"routed {op}", 0) > 0 for op in ("mhc_pre", "mhc_post"))
    return found


def make_deterministic() -> None:
    """Makes two runs of this process, or of two processes, give equal bits."""
    torch.use_deterministic_algorithms(True)  # with warn_only, flash attention's backward is not deterministic
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward is never deterministic
    torch._inductor.config.deterministic = True  # else each process benchmarks and chooses its own reductions


_GRAPHS: list[int] = []


def _counters() -> dict[str, int]:
    import mhc_inductor

    return {k: v for k, v in mhc_inductor.counters().items() if k.startswith(("routed", "fused", "near"))}


def _alone(size: Size, ranks: Ranks) -> list[float]:
    """Trains one model on the batches of all ranks, one after the other, each in a call of its own."""
    model = models.by_layer(models.built(size, ranks), ranks)
    optimizer, values = models.optimizer_of(model), []
    streams = [models.batches(size, ranks, rank) for rank in range(ranks.size)]
    for _ in range(ranks.options["steps"]):
        total = 0.0
        for stream in streams:
            loss = models.loss_of(model, next(stream)) / ranks.size
            loss.backward()
            total += loss.detach().double().item()
        optimizer.step()
        optimizer.zero_grad()
        values.append(total)
    return values


def _parallel(call: Any, model: nn.Module, size: Size, ranks: Ranks) -> list[float]:
    optimizer, values = models.optimizer_of(model), []
    stream = models.batches(size, ranks, ranks.rank)
    for _ in range(ranks.options["steps"]):
        loss = models.loss_of(call, next(stream))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shares = ranks.everywhere((loss.detach() / ranks.size).double().item())
        values.append(sum(shares))
    return values


def _fsdp(size: Size, ranks: Ranks, **policy: bool) -> list[float]:
    model = models.fully_sharded(models.built(size, ranks), ranks, **policy)
    return _parallel(model, model, size, ranks)


def _ddp(size: Size, ranks: Ranks) -> list[float]:
    """Compiles the whole DDP model, which Dynamo splits at the buckets."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = ranks.options["bucket"]  # type: ignore[attr-defined]
    devices = [ranks.device] if ranks.cuda else None
    model = models.built(size, ranks)
    ddp = nn.parallel.DistributedDataParallel(model, devices, bucket_cap_mb=ranks.options["bucket"] / 2**20)
    _GRAPHS.append(0)
    with torch._dynamo.config.patch(optimize_ddp=True):
        return _parallel(torch.compile(ddp, backend=_counting(models.backend(ranks))), ddp, size, ranks)


def _counting(backend: Any) -> Callable[..., Any]:
    """Returns a backend that counts the graphs which it gets: one a bucket."""
    from torch._dynamo.backends.registry import lookup_backend

    compiled = lookup_backend(backend) if isinstance(backend, str) else backend

    def counted(gm: Any, inputs: Any) -> Any:
        _GRAPHS[-1] += 1
        return compiled(gm, inputs)

    return counted


# --- weak scaling -------------------------------------------------------------------------------------------


def scaling(ranks: Ranks) -> dict[str, Any]:
    """Measures steps of equal size a rank: the first rank alone, all with FSDP2 (three policies), and all with DDP.

    A step is forward, backward and AdamW; as in training, the device gets the next one without waiting. Every variant
    has its own model; all layers are compiled with the plugin.
    """
    size = Size(**ranks.options["size"])
    plain = models.by_layer(models.built(size, ranks), ranks)
    sharded = {name: models.fully_sharded(models.built(size, ranks), ranks, **of) for name, of in POLICIES.items()}
    devices = [ranks.device] if ranks.cuda else None
    ddp = nn.parallel.DistributedDataParallel(
        models.by_layer(models.built(size, ranks), ranks), devices, gradient_as_bucket_view=True
    )
    steps = {name: _step(model, size, ranks) for name, model in {"plain": plain, **sharded, "DDP": ddp}.items()}
    for step in steps.values():
        for _ in range(2):
            step()
        ranks.free()
    parameters = sum(p.numel() for p in plain.parameters())
    row: dict[str, Any] = {"size": dataclasses.asdict(size), "parameters": parameters, "counters": _counters()}
    ranks.note(**row)
    ranks.gate()

    def time(name: str, everyone: bool = True) -> float | None:
        return ranks.milliseconds(steps[name], ranks.options["rounds"], everyone, ranks.options["in_a_row"])

    times = {
        "one rank": time("plain", everyone=False),
        "all ranks, no messages": time("plain"),
        **{name: time(name) for name in (*POLICIES, "DDP")},
    }
    peaks = {name: ranks.peak_mb(step) for name, step in steps.items()}
    return {**row, "rows": [_speed(name, t, times["one rank"], size) for name, t in times.items()], "peak_mb": peaks}


def _step(model: nn.Module, size: Size, ranks: Ranks) -> Callable[[], None]:
    optimizer, stream = models.optimizer_of(model), models.batches(size, ranks, ranks.rank)
    batch = next(stream)  # the speed does not depend on the text

    def step() -> None:
        models.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _speed(name: str, ms: float | None, alone: float | None, size: Size) -> dict[str, Any]:
    assert ms is not None and alone is not None
    return {"variant": name, "median_ms": ms, "tokens_a_second_a_rank": 1e3 * size.tokens / ms, "ratio": alone / ms}
