# SPDX-License-Identifier: Apache-2.0
"""The peers of attention over lists: dense SDPA, torch.compile, the selection op over ranges, and other packages."""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import mhc_inductor

from . import lists_cases as cases
from . import lists_others as others
from . import lists_targets as targets
from .lists_cases import Attend, Call, Case, call

Made = tuple[Call, str]
"""A call, and a note on how it is made."""
BACKENDS = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}
_FEW = 128


def masked(case: Case, what: str) -> Made:
    """Returns SDPA over all keys with the lists as a mask, made before timing, and the backend that PyTorch chose."""
    mask = cases.mask_of(case.indices[:, :, 0], case.shape.length)
    # A decoding model takes its heads as further queries; else each head gets keys of its own, without a copy.
    fold = case.shape.decodes

    def attend(q: Tensor, k: Tensor, v: Tensor | None, sink: Tensor | None) -> Tensor:
        return cases.dense(q, k, k[..., : case.shape.v_dim] if v is None else v, mask, sink, fold)

    return call(case, what, attend), f"backend {masked_backend(case, what)}"


def masked_backend(case: Case, what: str) -> str:
    """Returns the name of the backend that SDPA takes for this case with a mask."""
    leaves = {n: t.requires_grad_(what == "fb") for n, t in case.leaves().items()}
    q, k = leaves["q"][:, :_FEW, 0].transpose(1, 2), leaves["k"]
    v = leaves["v"] if "v" in leaves else k[..., : case.shape.v_dim]
    k, v = (t.expand(-1, q.shape[1], -1, -1) for t in (k, v))
    mask = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    choice = torch._fused_sdp_choice(q, k, v, attn_mask=mask)
    return next((name for backend, name in BACKENDS.items() if int(backend) == choice), "unknown")


def unmasked(case: Case, what: str) -> Made:
    """Returns SDPA without a mask, causal where queries and keys are as many, with the first backend that takes it."""
    causal = case.shape.queries == case.shape.length
    if not case.q.is_cuda:
        return call(case, what, _sdpa(case, None, causal, grouped=True)), ""
    backend, grouped = _backend(case, what, causal)
    how = "grouped heads" if grouped else "keys expanded to all heads"
    return call(case, what, _sdpa(case, backend, causal, grouped)), f"backend {BACKENDS[backend]}, {how}"


def _sdpa(case: Case, backend: SDPBackend | None, causal: bool, grouped: bool) -> Attend:
    """Returns SDPA by one backend; ``grouped``: with one head of keys for all, else with keys expanded to all heads."""

    def attend(q: Tensor, k: Tensor, v: Tensor | None, sink: Tensor | None = None) -> Tensor:
        values = k[..., : case.shape.v_dim] if v is None else v
        heads = 1 if grouped else q.shape[2]
        keys, values = (t[:, None].expand(-1, heads, -1, -1) for t in (k, values))
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=causal, enable_gqa=grouped)
        return o.transpose(1, 2)

    return attend


def _backend(case: Case, what: str, causal: bool) -> tuple[SDPBackend, bool]:
    """Returns the first of cuDNN, flash and efficient that runs a few queries, grouped or not; else math."""
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        for grouped in (True, False):
            tensors = (case.q[:, :_FEW, 0], case.k[:, 0, :_FEW], case.values[:, 0, :_FEW])
            leaves = [t.detach().requires_grad_(what == "fb") for t in tensors]
            try:
                o = _sdpa(case, backend, causal, grouped)(*leaves)
                if what == "fb":
                    torch.autograd.grad(o, leaves, torch.ones_like(o))
                return backend, grouped
            except RuntimeError:
                continue
    return SDPBackend.MATH, False


# ---- torch.compile


def compiled(fn: Attend, dynamic: bool) -> Attend:
    return torch.compile(fn, dynamic=dynamic)


@functools.cache
def _causal() -> Attend:
    """Returns one compiled function for all lengths: nearly all of its time goes into library calls either way."""
    return compiled(plain_causal, dynamic=True)


def gathered(q: Tensor, k: Tensor, v: Tensor | None, sink: Tensor | None, indices: Tensor, v_dim: int) -> Tensor:
    """Computes the plain formula over gathered keys, as a model would write it; indices ``[B, S, n]``."""
    at = indices.clamp(min=0).long()
    batch = torch.arange(q.shape[0], device=q.device)[:, None, None]
    keys = k[batch, at]
    values = keys[..., :v_dim] if v is None else v[batch, at]
    s = (q @ keys.mT * q.shape[-1] ** -0.5).masked_fill(indices[:, :, None] < 0, float("-inf"))
    if sink is not None:
        s = torch.cat((s, sink.to(s.dtype)[None, None, :, None].expand(*s.shape[:3], 1)), -1)
    p = s.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : indices.shape[-1]]
    return p @ values


def compiled_gather(case: Case, what: str) -> Made:
    """Returns torch.compile of the formula over gathered keys."""
    torch.compiler.reset()  # after some recompiles of one function, Dynamo would run it uncompiled
    run = compiled(gathered, dynamic=False)
    indices, v_dim = case.indices[:, :, 0], case.shape.v_dim
    return call(case, what, lambda q, k, v, sink: run(q, k, v, sink, indices, v_dim)), ""


def plain_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes causal attention of all heads over all keys, as eager models write it; S = T."""
    s = torch.einsum("bshd,btd->bhst", q, k) * q.shape[-1] ** -0.5
    at = torch.arange(k.shape[1], device=q.device)
    s = s.masked_fill(at > at[:, None], float("-inf"))
    return torch.einsum("bhst,btd->bshd", s.softmax(-1, dtype=torch.float32).to(q.dtype), v)


def compiled_causal(case: Case, what: str) -> Made:
    """Returns torch.compile of dense causal attention."""
    run = _causal()
    return call(case, what, lambda q, k, v, sink: run(q, k, k[..., : case.shape.v_dim] if v is None else v)), ""


# ---- the op over ranges


def ranges(case: Case, what: str) -> Made:
    """Returns the selection op over a range of one key for each entry; the ranges are made before timing."""
    chosen = torch.stack((case.indices, case.indices + 1), -1)

    def attend(q: Tensor, k: Tensor, v: Tensor | None, sink: Tensor | None) -> Tensor:
        values = (k[..., : case.shape.v_dim] if v is None else v)[:, None]
        logits = None if sink is None else sink[None]
        o = mhc_inductor.selection_attention(q[:, :, None], k[:, None], values, chosen, sink=logits)
        assert isinstance(o, Tensor)
        return o[:, :, 0]

    return call(case, what, attend), ""


# ---- other packages


def packaged(name: str, case: Case, what: str) -> Made:
    """Returns the call of another package, once its first call came to an end in a process of its own."""
    if case.q.is_cuda:
        others.first_call(name, case, what)
    return call(case, what, others.attend(name, case)), ""


def make(name: str, case: Case, what: str) -> Made:
    """Returns the call of the peer of this name."""
    makers = {targets.RANGES: ranges, targets.GATHER: compiled_gather, targets.DENSE_MASKED: masked}
    makers |= {targets.PLAIN: compiled_causal, targets.DENSE_ALL: unmasked, targets.DENSE_CAUSAL: unmasked}
    makers |= {other: functools.partial(packaged, other) for other in targets.PACKAGES}
    return makers[name](case, what)
