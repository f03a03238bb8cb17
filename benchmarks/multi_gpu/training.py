# SPDX-License-Identifier: Apache-2.0
"""Training on several ranks: losses against one rank's, and weak scaling.

The model is the example's mHC transformer, with the hyper-connections written out in PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn

from ..ways.models import Written
from .rank import Ranks, worst

BAR, BAR_RANKS = 0.93, 4
"""Weak scaling: a rank's speed as a share of one rank's alone, on this many ranks."""
FSDP = "FSDP2"
MIXED = "FSDP2, parameters travel as bf16"
KEPT = "FSDP2, as bf16, kept for the backward"
POLICIES: dict[str, dict[str, bool]] = {FSDP: {}, MIXED: {"mixed": True}, KEPT: {"mixed": True, "keep": True}}
"""What :func:`fully_sharded` takes."""
ALLOWED = {True: 5e-3, False: 1e-5}
"""Largest relative difference of losses by whether products are in bf16, which round by their size."""
STREAMS = 4

# --- the model ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the model, and of a rank's batch a step."""

    dim: int
    layers: int
    batch: int
    seq: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


def built(size: Size, ranks: Ranks) -> nn.Module:
    """Returns the model with weights of one seed, in bf16 streams on a GPU."""
    from byte_model import ByteTransformer

    torch.manual_seed(0)
    dtype = torch.bfloat16 if ranks.cuda else torch.float32
    with ranks.device:
        model = ByteTransformer(size.dim, size.layers, size.seq, STREAMS, dtype)
        blocks = nn.ModuleList(Written(size.dim, STREAMS, block.sublayer) for block in model.blocks)
    model.blocks = blocks
    return model


def backend(ranks: Ranks) -> Any:
    """Returns the plugin; in a trial run on a CPU its routing without Inductor, whose C++ takes a minute."""
    if not ranks.toy:
        return "mhc_inductor"
    from tests.tools.process_engines import routing

    return routing


def batches(size: Size, ranks: Ranks, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields one rank's batches of real text, for ever; equal on every rank that asks for the same one."""
    import stdlib_text

    text = stdlib_text.load().train.to(ranks.device)
    for step in itertools.count():
        yield next(stdlib_text.batches(text, size.batch, size.seq, 1, seed=1000 * step + rank))


def loss_of(call: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(call(inputs).flatten(0, 1), targets.flatten())


def by_layer(size: Size, ranks: Ranks) -> nn.Module:
    """Returns the model, each layer compiled by itself."""
    model = built(size, ranks)
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend=backend(ranks))
    return model


def fully_sharded(size: Size, ranks: Ranks, mixed: bool = False, keep: bool = False) -> nn.Module:
    """Returns the model, each layer compiled and sharded with FSDP2.

    ``mixed``: parameters are rounded to bf16 before they travel; gradients are added in fp32, and so is the step made.
    ``keep``: a layer's whole parameters stay from its forward to its backward, and do not travel again.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "cast_forward_inputs": False}
    policy = MixedPrecisionPolicy(**half) if mixed else MixedPrecisionPolicy()  # type: ignore[arg-type]
    model = by_layer(size, ranks)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01)


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


def _trained(call: Any, model: nn.Module, size: Size, ranks: Ranks, alone: bool = False) -> list[float]:
    """Trains on this rank's batches, or ``alone`` on those of all ranks, each in a call of its own; returns all losses."""
    optimizer, values = optimizer_of(model), []
    streams = [batches(size, ranks, rank) for rank in (range(ranks.size) if alone else [ranks.rank])]
    for _ in range(ranks.options["steps"]):
        shares = []
        for stream in streams:
            loss = loss_of(call, next(stream))
            (loss / ranks.size if alone else loss).backward()
            shares.append((loss.detach() / ranks.size).double().item())
        optimizer.step()
        optimizer.zero_grad()
        values.append(sum(shares if alone else ranks.everywhere(shares[0])))
    return values


def _alone(size: Size, ranks: Ranks) -> list[float]:
    model = by_layer(size, ranks)
    return _trained(model, model, size, ranks, alone=True)


def _fsdp(size: Size, ranks: Ranks, **policy: bool) -> list[float]:
    model = fully_sharded(size, ranks, **policy)
    return _trained(model, model, size, ranks)


def _ddp(size: Size, ranks: Ranks) -> list[float]:
    """Compiles the whole DDP model, which Dynamo splits at the buckets."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = ranks.options["bucket"]  # type: ignore[attr-defined]
    devices = [ranks.device] if ranks.cuda else None
    ddp = nn.parallel.DistributedDataParallel(
        built(size, ranks), devices, bucket_cap_mb=ranks.options["bucket"] / 2**20
    )
    _GRAPHS.append(0)
    with torch._dynamo.config.patch(optimize_ddp=True):
        return _trained(torch.compile(ddp, backend=_counting(backend(ranks))), ddp, size, ranks)


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
    plain = by_layer(size, ranks)
    sharded = {name: fully_sharded(size, ranks, **of) for name, of in POLICIES.items()}
    devices = [ranks.device] if ranks.cuda else None
    ddp = nn.parallel.DistributedDataParallel(by_layer(size, ranks), devices, gradient_as_bucket_view=True)
    steps = {name: _step(model, size, ranks) for name, model in {"plain": plain, **sharded, "DDP": ddp}.items()}
    for step in steps.values():
        for _ in range(2):
            step()
        ranks.free()
    parameters = sum(p.numel() for p in plain.parameters())
    row: dict[str, Any] = {"size": dataclasses.asdict(size), "parameters": parameters, "counters": _counters()}
    ranks.note(**row)
    ranks.gate()

    def time(name: str, everyone: bool = True) -> float:
        return ranks.milliseconds(steps[name], ranks.options["rounds"], everyone, ranks.options["in_a_row"])

    times = {"one rank": time("plain", everyone=False), "all ranks, no messages": time("plain")}
    times |= {name: time(name) for name in (*POLICIES, "DDP")}
    peaks = {name: ranks.peak_mb(step) for name, step in steps.items()}
    return {**row, "rows": [_speed(name, t, times["one rank"], size) for name, t in times.items()], "peak_mb": peaks}


def _step(model: nn.Module, size: Size, ranks: Ranks) -> Callable[[], None]:
    optimizer, stream = optimizer_of(model), batches(size, ranks, ranks.rank)
    batch = next(stream)  # the speed does not depend on the text

    def step() -> None:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _speed(name: str, ms: float, alone: float, size: Size) -> dict[str, Any]:
    return {"variant": name, "median_ms": ms, "tokens_a_second_a_rank": 1e3 * size.tokens / ms, "ratio": alone / ms}
