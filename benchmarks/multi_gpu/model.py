# SPDX-License-Identifier: Apache-2.0
"""The mHC transformer of the training parts: the example's, with the hyper-connections written out in plain PyTorch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mhc_inductor.nn import HyperConnection

from .rank import Ranks

STREAMS = 4
SINKHORN = 4


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


class Written(HyperConnection):
    """A hyper-connection whose forward is the paper's formula in plain PyTorch, as a model's author writes it."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        n = self.n
        v = x.flatten(-2).float()
        phi, alpha, bias = (p.float() for p in (self.phi, self.alpha, self.bias))  # a policy may have rounded them
        z = nn.functional.linear(v, phi) * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)
        pre, post, res = z.split((n, n, n * n), -1)
        b_pre, b_post, b_res = bias.split((n, n, n * n))
        h_pre = torch.sigmoid(alpha[0] * pre + b_pre) + 1e-6
        h_post = 2 * torch.sigmoid(alpha[1] * post + b_post)
        c = (alpha[2] * res + b_res).unflatten(-1, (n, n)).softmax(-1) + 1e-6
        c = c / (c.sum(-2, keepdim=True) + 1e-6)
        for _ in range(SINKHORN - 1):
            c = c / (c.sum(-1, keepdim=True) + 1e-6)
            c = c / (c.sum(-2, keepdim=True) + 1e-6)
        h_in = (h_pre.unsqueeze(-1) * x.float()).sum(-2).to(x.dtype)
        f_out = self.sublayer(h_in)
        mixed = c.transpose(-1, -2) @ x.float()
        return (h_post.unsqueeze(-1) * f_out.float().unsqueeze(-2) + mixed).to(x.dtype)


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
    from process_engines import routing

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


def by_layer(model: nn.Module, ranks: Ranks, compiled: bool = True) -> nn.Module:
    """Compiles each layer by itself."""
    if compiled:
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(backend=backend(ranks))
    return model


def fully_sharded(model: nn.Module, ranks: Ranks, mixed: bool = False, keep: bool = False) -> nn.Module:
    """Compiles each layer and shards it with FSDP2.

    ``mixed``: parameters are rounded to bf16 before they travel; gradients are added in fp32, and so is the step made.
    ``keep``: a layer's whole parameters stay from its forward to its backward, and do not travel again.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "cast_forward_inputs": False}
    policy = MixedPrecisionPolicy(**half) if mixed else MixedPrecisionPolicy()  # type: ignore[arg-type]
    for block in by_layer(model, ranks).blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01)
