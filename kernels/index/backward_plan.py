# SPDX-License-Identifier: Apache-2.0
"""Launch plan of the gradients of the index scores. Memory besides inputs and outputs: PARTS times dk in fp32."""

from __future__ import annotations

from typing import Any

from ..launch import launch
from ..operands import alignment, dot_precision, without_kernel
from . import config, plan
from .backward import index_dk, index_dk_sum, index_dq

PARTS = 8  # the queries are summed in so many parts for dk
PART_TILES = 4  # tiles of queries of a part, at least
BLOCK = 1024


def unsupported(b: Any, dscores: Any, *tensors: Any) -> str | None:
    """Returns why these inputs run the reference instead of the kernels, or None if they run the kernels."""
    return without_kernel(b, dscores) or plan.unsupported(b, *tensors)


def gradient_precision(b: Any, dtype: Any) -> str:
    """Returns the input_precision of the gradients' products."""
    if dtype.itemsize == 2 and b.device_props().backend == "cuda":
        return "tf32"  # of products with fp16 only, which is exact in it
    return dot_precision(b, dtype)


def plan_index_scores_backward(
    b: Any, dscores: Any, q: Any, k: Any, w: Any, scale: float, limit: Any, mask: Any, seg_q: Any, seg_k: Any
) -> tuple[Any, Any, Any]:
    """Launches ``index_scores_backward``; returns (dq, dk, dw)."""
    (B, S, H, D), T = b.shape(q), b.shape(k)[1]
    H, D = b.static(H), b.static(D)
    dq, dk, dw = (b.empty(b.shape(t), b.dtype(t)) for t in (q, k, w))
    q, k, w, dscores = b.strided(q), b.strided(k), b.laid_out(w), b.contiguous(dscores)
    hidden = plan.hidden_keys(b, mask, seg_q, seg_k)
    limit = None if limit is None else b.contiguous(limit)
    c = config.backward_config(D, b.dtype(q).itemsize, b.device_props().backend)
    NS, NT = b.cdiv(S, c.BS), b.cdiv(T, c.BT)
    P = b.max(1, b.min(PARTS, b.cdiv(NS, PART_TILES)))
    parts = b.empty((P, B, T, D), b.f32)
    values = dict(
        plan.inputs(b, q, k, w, scale, limit), **hidden, g=dscores, NS=NS, NT=NT, H=H, D=D, DP=config.padded(D),
        ALIGN=alignment(b, q, k), PREC=gradient_precision(b, b.dtype(q)), LIMIT=limit is not None,
    )  # fmt: skip
    launch(b, index_dq, B * NS * H, c, values, dq=dq, dw=dw)
    launch(b, index_dk, (B * NT, P), c, values, dk=parts, tiles=b.cdiv(NS, P))
    N = B * T * D
    launch(b, index_dk_sum, b.cdiv(N, BLOCK), (4, 1), parts=parts, dk=dk, P=P, N=N, BLOCK=BLOCK)
    return dq, dk, dw
