# SPDX-License-Identifier: Apache-2.0
"""The index ops in ``torch.ops.mhc_inductor``: scores of keys, their gradients, and the keys of the largest scores.

``index_topk`` has no gradient: its outputs are integers. That of the scores in ``index_topk_scores`` raises RuntimeError. Double backward raises RuntimeError. The ops run in chunks of
queries to bound their memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mhc_inductor.ops.batching import into_batch
from mhc_inductor.ops.registry import Gradient, define, needed
from mhc_inductor.ops.registry import call as call
from mhc_inductor.reference import index as reference
from mhc_inductor.reference.mhc import acc_dtype

_TENSORS = "Tensor q, Tensor k, Tensor w"
_VISIBLE = "Tensor? limit, Tensor? mask, Tensor? segments_q, Tensor? segments_k"
SCHEMAS = {
    "index_scores": f"({_TENSORS}, float scale, {_VISIBLE}) -> Tensor scores",
    "index_scores_backward": (
        f"(Tensor dscores, {_TENSORS}, float scale, {_VISIBLE}) -> (Tensor dq, Tensor dk, Tensor dw)"
    ),
    "index_topk": f"({_TENSORS}, SymInt topk, float scale, {_VISIBLE}) -> Tensor indices",
    "index_topk_scores": (f"({_TENSORS}, SymInt topk, float scale, {_VISIBLE}) -> (Tensor indices, Tensor scores)"),
}


def _scores_fake(q: Tensor, k: Tensor, *_: Any) -> Tensor:
    return q.new_empty((*q.shape[:2], k.shape[1]), dtype=acc_dtype(q.dtype))


def _backward_fake(dscores: Tensor, q: Tensor, k: Tensor, w: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), w.new_empty(w.shape)


def _topk_fake(q: Tensor, k: Tensor, w: Tensor, topk: int, *_: Any) -> Tensor:
    return q.new_empty((*q.shape[:2], topk), dtype=torch.int32)


def _topk_scores_fake(q: Tensor, k: Tensor, w: Tensor, topk: int, *_: Any) -> tuple[Tensor, Tensor]:
    indices = _topk_fake(q, k, w, topk)
    return indices, indices.new_empty(indices.shape, dtype=acc_dtype(q.dtype))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, w, ctx.scale, *visible = inputs
    ctx.save_for_backward(q, k, w, *visible)
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
    if dscores is None:
        return needed(ctx)
    q, k, w, *visible = ctx.saved_tensors
    return needed(ctx, *call("index_scores_backward", dscores, q, k, w, ctx.scale, *visible))


_FAKES: dict[str, Callable[..., Any]] = {
    "index_scores": _scores_fake,
    "index_scores_backward": _backward_fake,
    "index_topk": _topk_fake,
    "index_topk_scores": _topk_scores_fake,
}
_GRADIENTS: dict[str, Gradient] = {"index_scores": (_setup, _grad)}

for _name, _fake in _FAKES.items():
    define(
        _name,
        SCHEMAS[_name],
        getattr(reference, _name),
        _fake,
        _GRADIENTS.get(_name),
        functools.partial(into_batch, _name),
        integers=_name == "index_topk",
    )
