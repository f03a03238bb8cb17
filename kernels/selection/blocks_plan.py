# SPDX-License-Identifier: Apache-2.0
"""Launch plan of the selection of blocks.

It runs eagerly only, because it loops over chunks of queries to bound its memory. Memory besides inputs and outputs:
SCORES numbers of 4 bytes, or the scores of one tile of queries of each sequence and group if those are more.
"""

from __future__ import annotations

from typing import Any

from ..launch import launch
from ..operands import above, alignment, dot_precision, power_of_two, strides, without_kernel
from . import config
from .blocks import selection_block_scores, selection_block_top

ROWS = 64  # queries x heads per program
TILES = ((64, 2), (64, 1), (32, 1), (16, 1))  # (compressed keys at a time, stages), the best first
TOP_ROWS, TOP_BLOCKS = 4, 256
SCORES = 1 << 24
MAX_D = 256
MAX_HEADS = 64


def tile(b: Any, D: int, BP: int, itemsize: int) -> tuple[int, int] | None:
    """Returns (blocks at a time, each padded to BP keys, stages), or None if shared memory is too small."""
    props = b.device_props()
    limit = config.shared_limit(props.backend, props.arch) * 3 // 4
    if itemsize == 4:  # an fp32 product keeps both factors in two parts
        itemsize *= 2
    for keys, stages in TILES:
        NT = max(1, keys // BP)
        if itemsize * config.padded(D) * (ROWS + stages * NT * BP) <= limit:
            return NT, stages
    return None


def unsupported(b: Any, *tensors: Any) -> str | None:
    """Returns why these inputs run the reference instead of the kernels, or None if they run the kernels."""
    for t in tensors:
        reason, shape = without_kernel(b, t), b.shape(t)
        if len(shape) == 5:
            reason = reason or above(shape[4], MAX_D, "D = {} is")
            reason = reason or above(shape[3], MAX_HEADS, "h = {} heads a group are")
        if reason:
            return reason
    return None


def unsupported_sizes(
    b: Any, q: Any, k: Any, lse: Any, scale: float, length: int, stride: int, block: int, count: int, s_kv: int
) -> str | None:
    """Returns the reason that depends on all arguments why the reference runs, or None if the kernels run."""
    if tile(b, b.shape(q)[4], power_of_two(block // stride), b.dtype(q).itemsize) is None:
        return f"shared memory does not hold blocks of {block // stride} strides at D = {b.shape(q)[4]}, {b.dtype(q)}"
    return None


def plan_selection_blocks(
    b: Any, q: Any, k: Any, lse: Any, scale: float, length: int, stride: int, block: int, count: int, s_kv: int
) -> Any:
    """Launches ``selection_blocks``; returns blocks[B, S, G, count] int32."""
    B, S, G, h, D = b.shape(q)
    N, NB = b.shape(k)[2], b.cdiv(s_kv, block)
    blocks = b.empty((B, S, G, count), b.i32)
    q, k, lse = b.strided(q), b.strided(k), b.contiguous(lse)
    QT, HB = config.tile_of(ROWS, h)
    BK, BP = block // stride, power_of_two(block // stride)
    shifts = (BK + length // stride - 2) // BK + 1
    found = tile(b, D, BP, b.dtype(q).itemsize)
    assert found is not None, "unsupported"
    NT, stages = found
    values = dict(
        strides(b, q, "sqb sqs sqg sqh"), **strides(b, k, "skb skg skn"), q=q, k=k, lse=lse, blocks=blocks, scale=scale, N=N,
        S=S, NB=NB, G=G, past=s_kv - S, H=h, D=D, DP=config.padded(D), QT=QT, HB=HB, NT=NT, BK=BK, BP=BP, LENGTH=length,
        STRIDE=stride, SHIFTS=shifts, ALIGN=alignment(b, q, k), PREC=dot_precision(b, b.dtype(q)), COUNT=count,
        CP=power_of_two(count), BLOCK=block, ROWS=TOP_ROWS, JB=TOP_BLOCKS,
    )  # fmt: skip
    sizes = 4 if b.dtype(q).itemsize == 2 and D <= 128 else 8, stages
    # Number of queries at a time, in whole tiles.
    step = max(QT, SCORES // max(1, shifts * B * G * NB) // QT * QT)
    for first in range(0, S, step):
        rows = min(step, S - first)
        NQ = b.cdiv(rows, QT)
        values.update(score=b.empty((shifts, B, G, rows, NB), b.f32), NQ=NQ, first=first, rows=rows)
        launch(b, selection_block_scores, B * G * NQ, sizes, values)
        launch(b, selection_block_top, B * G * b.cdiv(rows, TOP_ROWS), (4, 1), values)
    return blocks
