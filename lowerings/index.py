# SPDX-License-Identifier: Apache-2.0
"""Lowerings of the index ops.

On a GPU their launch plans; on a CPU a call of the op, which runs in chunks of queries, or in a package, which runs
without Python, one formula over all queries and keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhc_inductor import compat
from mhc_inductor.reference import index as reference
from mhc_inductor.reference.precision import acc_dtype

from . import common
from .builder import OpBuilder

MOST_PARTS = 8
"""Chunks of queries up to which the generated code launches the kernels itself."""


def _calls_op(name: str, args: tuple[Any, ...]) -> bool:
    """Returns whether generated code calls a choice of keys: its loop needs known sizes, and should be short."""
    builder = OpBuilder(args[0].get_device())
    sizes = (*builder.shape(args[0])[:2], builder.shape(args[1])[1], args[3])
    if not all(builder.is_static(s) for s in sizes):
        return True
    from mhc_inductor.kernels.index import plan  # imports triton

    return len(plan.parts(builder, *(int(s) for s in sizes[:3]))) > MOST_PARTS


def _loss_calls_op(name: str, args: tuple[Any, ...]) -> bool:
    """Returns whether generated code calls the loss's backward: its loop needs known sizes, and should be short."""
    from mhc_inductor.kernels.index import loss_plan  # imports triton

    _, q, k, _, indices, *_ = args
    builder = OpBuilder(q.get_device())
    sizes = (*builder.shape(q), builder.shape(k)[1], builder.shape(indices)[2])
    if not all(builder.is_static(s) for s in sizes):
        return True
    rows = loss_plan.backward_chunk(builder, q, k, sizes[-1])
    return sizes[1] > MOST_PARTS * rows


_ALL = slice(None)


def _scores(q: Tensor, k: Tensor, w: Tensor, scale: float) -> Tensor:
    keys = k.to(acc_dtype(q.dtype))
    x = torch.relu(reference.products(q, keys) * scale)
    return torch.matmul(w.to(keys.dtype).unsqueeze(2), x).squeeze(2)


def index_scores(q: Tensor, k: Tensor, w: Tensor, scale: float, *visible: Any) -> Any:
    """Decomposes the op in a package; elsewhere returns NotImplemented: generated code calls the op, which takes chunks."""
    if not compat.packaging_formulas():
        return NotImplemented
    seen = reference.visible(_ALL, _ALL, k.shape[1], q.device, *visible)
    return torch.where(seen, _scores(q, k, w, scale), -torch.inf)


def index_topk(*args: Any) -> Any:
    """Decomposes the op as :func:`index_topk_scores` does."""
    found = index_topk_scores(*args)
    return found if found is NotImplemented else found[0]


def index_topk_scores(q: Tensor, k: Tensor, w: Tensor, topk: int, scale: float, *visible: Any) -> Any:
    """Decomposes the op in a package; elsewhere returns NotImplemented: generated code calls the op, which takes chunks."""
    if not compat.packaging_formulas():
        return NotImplemented
    seen = reference.visible(_ALL, _ALL, k.shape[1], q.device, *visible)
    return reference.chosen(_scores(q, k, w, scale), seen, topk)


def register() -> None:
    """Registers all lowerings. Called once, when the first graph is compiled."""
    common.register("index_scores", index_scores)
    common.register("index_scores_backward", None)
    common.register("index_loss", None)
    common.register("index_loss_backward", None, _loss_calls_op)
    common.register("index_topk", index_topk, _calls_op)
    common.register("index_topk_scores", index_topk_scores, _calls_op)
