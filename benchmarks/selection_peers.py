# SPDX-License-Identifier: Apache-2.0
"""The peers of the op: dense causal SDPA, flash-linear-attention's selected branch, gather + SDPA, masked SDPA."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import attention
from . import selection_cases as cases
from .attention import Call
from .selection_cases import NAMES, Case, mask_of


def _call(attend: Callable[..., Tensor], what: str, inputs: Iterable[Tensor], dout: Tensor) -> Call:
    return attention.call(lambda a: attend(*a.values()), what, dict(zip(NAMES, inputs, strict=True)), dout)


def _heads(t: Tensor) -> Tensor:
    """Returns queries in the layout ``[B, H, S, D]``."""
    return t.flatten(2, 3).transpose(1, 2).contiguous()


def dense(case: Case, what: str) -> tuple[Call, str]:
    """Returns causal SDPA over all keys (layout ``[B, H, S, D]``, cuDNN on a GPU), and how K and V are shared."""
    gpu = case.q.device.type == "cuda"
    causal = not case.shape.decodes

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if gpu else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=k.shape[1] != q.shape[1])

    q, k, v = _heads(case.q), case.k, case.v
    how = "grouped"
    try:
        few = min(128, q.shape[2])
        with torch.no_grad():
            attend(q[:1, :, :few], k[:1, :, :few], v[:1, :, :few])
    except RuntimeError:
        # If cuDNN rejects grouped heads, repeat K and V before timing.
        how = "K and V repeated beforehand"
        k, v = (t.repeat_interleave(case.shape.heads, 1) for t in (k, v))
    return _call(attend, what, (q, k, v), _heads(case.dout)), how


# ---- flash-linear-attention


def fla_module() -> Any:
    """Returns ``fla.ops.nsa.parallel``. Raises ImportError if it or one of its dependencies is missing."""
    return importlib.import_module("fla.ops.nsa.parallel")


def fla_version() -> str:
    for name in ("fla-core", "flash-linear-attention"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return importlib.import_module("fla").__version__


def fla_takes(case: Case) -> bool:
    """Returns whether flash-linear-attention runs this case: blocks, and at least 16 heads a group."""
    return case.blocks is not None and case.shape.heads >= 16


def fla_selected(case: Case, what: str) -> Call:
    """Returns flash-linear-attention's selected branch on the same blocks, in its layout ``[B, T, heads, D]``."""
    module = fla_module()
    picks, block, scale = case.shape.picks, case.shape.block, case.shape.dim**-0.5
    chosen = case.blocks.contiguous()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module.ParallelNSAFunction.apply(q, k, v, chosen, picks, block, scale, None)

    k, v = (t.transpose(1, 2).contiguous() for t in (case.k, case.v))
    return _call(attend, what, (case.q.flatten(2, 3), k, v), case.dout.flatten(2, 3))


# ---- any selection


def gather(case: Case, what: str) -> tuple[Call, str]:
    """Returns gather + SDPA for single keys: gathers rows of K and V per query and group, then attends to them."""
    B, S, G, h, D = case.q.shape
    length = case.shape.length
    base = torch.arange(B * G, device=case.q.device).view(B, 1, G, 1) * length
    rows = (case.ranges[..., 0] + base).flatten().long()
    picked = (B * S, G, case.shape.tokens, D)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (t.flatten(0, 2).index_select(0, rows).view(picked) for t in (k, v))
        return F.scaled_dot_product_attention(q.flatten(0, 1), keys, values).view(B, S, G, h, D)

    return _call(attend, what, (case.q, case.k, case.v), case.dout), ""


def masked(case: Case, what: str) -> tuple[Call, str]:
    """Returns SDPA over all keys with the selection as a boolean mask, which is made before timing."""
    h = case.shape.heads
    mask = mask_of(case.ranges, case.shape.length).transpose(1, 2).repeat_interleave(h, 1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return _call(attend, what, (_heads(case.q), case.k, case.v), _heads(case.dout)), ""


MAKERS = {cases.DENSE: dense, cases.GATHER: gather, cases.MASKED: masked}
"""What makes a call of each other implementation and a note on how; flash-linear-attention is apart, by its version."""


# ---- a CPU


def causal(case: Case, what: str) -> Call:
    """Returns causal SDPA over all keys, with as many heads of keys as of queries, repeated beforehand."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    k, v = (t.repeat_interleave(case.shape.heads, 1) for t in (case.k, case.v))
    return _call(attend, what, (_heads(case.q), k, v), _heads(case.dout))
