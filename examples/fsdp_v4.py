# SPDX-License-Identifier: Apache-2.0
"""The DeepSeek-V4 of ``train_fsdp.py``: a small one of transformers, its code unmodified.

Each layer is compiled by itself, checkpointed and sharded, so the collectives are outside of all graphs. A policy must see
the layer's ops, so its region is in the layer's graph, as torchtitan has it. Without a policy the region is around the
compiled layer, as transformers and Accelerate have it.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import Any

import torch
from sparse_models import MODELS
from sparse_models import Size as ModelSize
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from training import Size

import mhc_inductor

DEFAULTS = {"cpu": Size(20, 64, 3, 2, 64), "cuda": Size(40, 2048, 6, 2, 4096)}
COMPRESSION = 16
"""Tokens of the widest compressed entry: a shorter sequence leaves parameters without a gradient."""


class Checkpoint(str, enum.Enum):
    """What the backward of a layer computes again."""

    none = "none"
    full = "full"
    policy = "policy"


class Saved:
    """The policy of one forward: keeps the package's ops and every second matrix product, as torchtitan keeps them."""

    def __init__(self) -> None:
        self.ops = {*mhc_inductor.ops_to_save(), torch.ops.aten.mm.default}
        self.products: Counter[bool] = Counter()

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = op in self.ops
        if op is torch.ops.aten.mm.default:
            self.products[ctx.is_recompute] += 1  # the recomputation counts anew, and decides alike
            save = self.products[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def _selective() -> Any:
    return create_selective_checkpoint_contexts(Saved())


class Checkpointed(nn.Module):
    """Calls a layer as a region whose activations are computed again in the backward."""

    def __init__(self, layer: nn.Module, how: Checkpoint) -> None:
        super().__init__()
        self.layer = layer
        self.options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if how is Checkpoint.policy:
            self.options["context_fn"] = _selective

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.layer, *args, **self.options, **kwargs)


class Bytes(nn.Module):
    """A language model of transformers, called with ids ``[B, S]`` for fp32 logits ``[B, S, vocabulary]``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits.float()


def check(size: Size) -> None:
    """Raises ValueError for sizes that this model cannot have."""
    if size.layers < 3:
        raise ValueError(f"--layers must be at least 3, one of each attention, got {size.layers}")
    if size.seq < COMPRESSION:
        raise ValueError(f"--seq must be at least {COMPRESSION}, the tokens of a compressed entry, got {size.seq}")
    if size.dim % 64:
        raise ValueError(f"--dim must be a multiple of 64, got {size.dim}")


def built(
    size: Size,
    seed: int,
    device: torch.device,
    mesh: DeviceMesh,
    backend: str | None = "mhc_inductor",
    how: Checkpoint = Checkpoint.none,
) -> nn.Module:
    """Returns the model with each layer checkpointed, compiled and sharded; all ranks draw the same weights.

    Weights are fp32; on a GPU layers compute in bf16, with gradients summed in fp32. The indexers are frozen: their
    choice of keys has no gradient. For ``backend`` None the layers stay eager.
    """
    heads = max(4, size.dim // 128)
    head, topk = 64 if size.dim > 256 else 16, max(8, size.seq // 8)
    shape = ModelSize(size.layers, size.dim, heads, size.dim // 4, head, 4, 32, topk, (size.seq,), 1, vocab=256)
    torch.manual_seed(seed)
    whole = MODELS["deepseek_v4"](shape).to(device).train()
    policy = MixedPrecisionPolicy()
    if device.type == "cuda":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(".indexer." not in name)
    layers = whole.model.layers
    for i, layer in enumerate(layers):
        layers[i] = unit = layer if how is Checkpoint.none else Checkpointed(layer, how)
        if backend is not None:
            (unit if how is Checkpoint.policy else layer).compile(backend=backend, dynamic=False)
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    if backend is not None:
        whole.model.hc_head.compile(backend=backend, dynamic=False)
    fully_shard(whole, mesh=mesh, mp_policy=policy)
    return Bytes(whole)
