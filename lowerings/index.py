# SPDX-License-Identifier: Apache-2.0
"""Lowerings of the index ops.

On a GPU their launch plans; on a CPU a call of the op, which runs in chunks of queries, or in a package one formula.
"""

from __future__ import annotations

from typing import Any

from . import common, index_cpu
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


def register() -> None:
    """Registers all lowerings. Called once, when the first graph is compiled."""
    common.register("index_scores", index_cpu.index_scores)
    common.register("index_scores_backward", None)
    common.register("index_loss", None)
    common.register("index_loss_backward", None, _loss_calls_op)
    common.register("index_topk", index_cpu.index_topk, _calls_op)
    common.register("index_topk_scores", index_cpu.index_topk_scores, _calls_op)
