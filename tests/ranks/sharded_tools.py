# SPDX-License-Identifier: Apache-2.0
"""What the checks of ops on DTensors share: errors, placements, and a run with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import mhc_inductor as mi
from tests.formulas.laws import Compiled

# Sums over tokens in another order; fp16 and bf16 gradients of parameters are rounded once per rank.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def error(a: Tensor, b: Tensor) -> float:
    """Returns ||a - b|| / ||b||, with equal infinities left out."""
    a, b = (t.double() for t in (a, b))
    assert a.shape == b.shape, (a.shape, b.shape)
    same = (a == b) & a.isinf()
    a, b = a.masked_fill(same, 0), b.masked_fill(same, 0)
    return float((a - b).norm() / b.norm().clamp(min=1e-6))


def close(a: Tensor, b: Tensor) -> bool:
    return error(a, b) <= TOLERANCE[b.dtype] if b.is_floating_point() else torch.equal(a, b)


def outputs(out: Any) -> list[Any]:
    return [out] if isinstance(out, Tensor) else list(out)


def placed(args: Sequence[Any], mesh: Any) -> list[Any]:
    """Returns arguments with their tensors on the mesh's device."""
    return [t.to(mesh.device_type) if isinstance(t, Tensor) else t for t in args]


def mhc_inputs(tokens: Sequence[int] = (3, 5), dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    n, width = 4, 16
    shapes = [(*tokens, n, width), (24, n * width), (3,), (24,), (n, width)]
    return [torch.randn(s, generator=g, dtype=torch.float64).mul(0.3).to(dtype) for s in shapes]


def mhc_layer(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor) -> Tensor:
    h_in, h_post, h_res = mi.mhc_pre(x, phi, alpha, bias, gamma, sinkhorn_iters=2)
    return mi.mhc_post(x, torch.tanh(h_in), h_post, h_res, transpose_res=True)


def trained(fn: Callable[..., Any], args: Sequence[Tensor]) -> list[Tensor]:
    """Returns the outputs and the gradients of all floating-point arguments, as whole tensors."""

    def whole(t: Tensor) -> Tensor:
        return t.full_tensor() if isinstance(t, DTensor) else t

    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in args]
    outs = [t for t in outputs(fn(*leaves)) if t.is_floating_point()]
    sum((t.masked_fill(t == -torch.inf, 0) * t.masked_fill(t == -torch.inf, 0)).sum() for t in outs).backward()
    grads = [t.grad for t in leaves if t.requires_grad]
    assert all(g is not None for g in grads)
    return [whole(t).detach() for t in (*outs, *grads)]  # type: ignore[arg-type]


def same(fn: Callable[..., Any], args: Sequence[Tensor], placements: Sequence[Any], mesh: Any) -> None:
    args = placed(args, mesh)
    want = trained(fn, args)
    got = trained(fn, [distribute_tensor(t, mesh, p) for t, p in zip(args, placements, strict=True)])
    errors = [error(a, b) for a, b in zip(got, want, strict=True)]
    assert max(errors) < TOLERANCE[args[0].dtype], errors


def spread(given: dict[str, Any], dims: dict[str, int], mesh: Any) -> list[Any]:
    return [
        distribute_tensor(t, mesh, [Shard(dims[k]) if k in dims else Replicate()]) if isinstance(t, Tensor) else t
        for k, t in given.items()
    ]


def compiled(fn: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    torch._dynamo.reset()
    seen = Compiled()
    return torch.compile(fn, backend=seen.backend), seen
