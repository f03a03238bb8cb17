# SPDX-License-Identifier: Apache-2.0
"""Launch plans of the index ops.

A choice of keys loops over chunks of queries to bound its memory, which a graph with dynamic sizes cannot express.
Memory besides inputs and outputs: SCORES numbers of 4 bytes, or the scores of one tile of queries if those are more.
Rows that registers do not hold take BLOCK + T / 32 numbers more each, for the candidates among their keys.
"""

from __future__ import annotations

from typing import Any

from mhc_inductor.reference.index import chunks

from ..launch import launch
from ..operands import above, alignment, contiguous, dot_precision, power_of_two, strides, without_kernel
from . import config
from .scores import index_hide, index_row_scores, index_tile_scores
from .topk import index_select

MAX_D, MAX_HEADS, MAX_TOPK = 256, 128, 4096
SCORES = 1 << 26
FEW_ROWS = 32  # up to so many queries, a program scores one query
ROWS = 128  # the workspace holds a multiple of so many rows: whole tiles of queries
HIDE = 1024  # keys at a time of a kernel that hides them
PAD = 256  # rows of the workspace are multiples of so many numbers: whole tiles of keys


def unsupported(b: Any, q: Any, k: Any, w: Any, *_: Any) -> str | None:
    """Returns why these inputs run the reference instead of the kernels, or None if they run the kernels."""
    H, D = (b.static(x) for x in b.shape(q)[2:])
    return without_kernel(b, q, k, w) or above(D, MAX_D, "D = {} is") or above(H, MAX_HEADS, "H = {} heads are")


def unsupported_sizes(b: Any, q: Any, k: Any, w: Any, *rest: Any) -> str | None:
    """Returns the reason that depends on all arguments why the reference runs, or None if the kernels run.

    The arguments are those of ``index_scores``, or of a choice of keys, whose fourth is topk.
    """
    return above(rest[0], MAX_TOPK, "topk = {} is") if len(rest) == 6 and b.is_static(rest[0]) else None


def few(b: Any, S: Any) -> bool:
    """Returns whether a program scores one query: never with deterministic algorithms, whose scores depend on no batch."""
    return b.is_static(S) and S <= FEW_ROWS and not b.deterministic


def padded_row(T: int) -> int:
    """Returns the numbers of a row of the workspace."""
    return -(-T // PAD) * PAD


def inputs(b: Any, q: Any, k: Any, w: Any, scale: float, limit: Any) -> dict[str, Any]:
    """Returns the arguments that the kernels of scores and of gradients share: inputs, sizes and strides."""
    named = zip((q, k, w), ("sqb sqs sqh", "skb skt", "swb sws swh"), strict=True)
    x: dict[str, Any] = dict(q=q, k=k, w=w, limit=limit, scale=float(scale), S=b.shape(q)[1], T=b.shape(k)[1])
    for t, names in named:
        x.update(strides(b, t, names))
    return x


def _plan_scores(
    b: Any, out: Any, q: Any, k: Any, w: Any, scale: float, limit: Any, hidden: dict[str, Any], where: tuple[Any, ...]
) -> None:
    """Launches the scores of the queries ``where`` = (sequences, first sequence, queries, first query) into ``out``.

    Where ``out`` holds integers, they are sortable.
    """
    (_, S, H, D), T = b.shape(q), b.shape(k)[1]
    _, stored, so = b.shape(out)
    H, D = b.static(H), b.static(D)
    parts, b0, rows, first = where
    props, itemsize = b.device_props(), b.dtype(q).itemsize
    sortable, PREC = b.dtype(out) == b.i32, dot_precision(b, b.dtype(q))
    values = dict(
        inputs(b, q, k, w, scale, limit), **hidden, out=out, b0=b0, first=first, rows=rows, stored=stored, so=so, H=H, D=D,
        DP=config.padded(D), ALIGN=alignment(b, q, k), PREC=PREC, SORTABLE=sortable, LIMIT=limit is not None,
    )  # fmt: skip
    if few(b, S):
        c = config.row_config(itemsize)
        NT, DC = b.cdiv(T, c.BT), min(16 if itemsize == 4 else 64, config.padded(D))
        if itemsize == 4 and b.precision == "highest":
            PREC = "ieee"
        HP = max(16, power_of_two(H))
        launch(b, index_row_scores, parts * rows * NT, c, values, NT=NT, HP=HP, DC=DC, PREC=PREC)
        return
    c = config.score_config(D, itemsize, props.backend, props.arch)
    assert not sortable or stored % c.BS == 0, "tiles are written whole"
    NS, NT = b.cdiv(rows, c.BS), b.cdiv(T, c.BT)
    launch(b, index_tile_scores, parts * NS * NT, c, values, NS=NS, NT=NT)


def hidden_keys(b: Any, mask: Any, seg_q: Any, seg_k: Any) -> dict[str, Any]:
    """Returns the kernels' values that say which keys mask and segment ids hide. The mask keeps its strides."""
    mask = None if mask is None else b.laid_out(mask)
    seg_q, seg_k = contiguous(b, seg_q, seg_k)
    named = dict(smb=0, sms=0, smt=0) if mask is None else strides(b, mask, "smb sms smt")
    return dict(named, mask=mask, seg_q=seg_q, seg_k=seg_k, MASK=mask is not None, SEG=seg_q is not None)


def plan_index_scores(
    b: Any, q: Any, k: Any, w: Any, scale: float, limit: Any, mask: Any, seg_q: Any, seg_k: Any
) -> Any:
    """Launches ``index_scores``; returns scores[B, S, T] fp32."""
    (B, S), T = b.shape(q)[:2], b.shape(k)[1]
    out = b.empty((B, S, T), b.f32)
    hidden = hidden_keys(b, mask, seg_q, seg_k)
    limit = None if limit is None else b.contiguous(limit)
    _plan_scores(b, out, b.strided(q), b.strided(k), b.laid_out(w), scale, limit, hidden, (B, 0, S, 0))
    if hidden["MASK"] or hidden["SEG"]:
        launch(b, index_hide, B * S, (4, 1), hidden, out=out, S=S, T=T, BLOCK=HIDE)
    return out


def padded_rows(rows: int, tiles: bool) -> int:
    """Returns the rows of the workspace that queries need; ``tiles``: whether programs write whole tiles of them."""
    return -(-rows // ROWS) * ROWS if tiles else rows


def parts(b: Any, B: int, S: int, T: int) -> list[tuple[slice, slice]]:
    """Returns the chunks of sequences and queries whose scores a choice of keys holds at a time, the largest first."""
    per_query = -(-padded_row(T) * padded_rows(S, not few(b, S)) // max(1, S))
    return list(chunks(B, S, per_query, SCORES, ROWS))


def plan_index_topk(b: Any, *args: Any) -> Any:
    """Launches ``index_topk``; returns indices[B, S, topk] int32."""
    return _plan_choice(b, None, *args)


def plan_index_topk_scores(b: Any, q: Any, k: Any, w: Any, topk: int, *args: Any) -> tuple[Any, Any]:
    """Launches ``index_topk_scores``; returns indices[B, S, topk] int32 and their scores, fp32."""
    scores = b.empty((*b.shape(q)[:2], topk), b.f32)
    return _plan_choice(b, scores, q, k, w, topk, *args), scores


def _plan_choice(
    b: Any, scores: Any, q: Any, k: Any, w: Any, topk: int, scale: float, limit: Any, mask: Any, seg_q: Any, seg_k: Any
) -> Any:
    """Launches the choice of keys, with their scores unless that buffer is None; returns indices[B, S, topk] int32."""
    (B, S), T = b.shape(q)[:2], b.shape(k)[1]
    out = b.empty((B, S, topk), b.i32)
    if topk == 0:
        return out
    q, k, w = b.strided(q), b.strided(k), b.laid_out(w)
    limit, hidden = None if limit is None else b.contiguous(limit), hidden_keys(b, mask, seg_q, seg_k)
    c, tiles = config.select_config(T, topk, few(b, S)), not few(b, S)
    # Places of candidates, and a bit for each key.
    listed = c.BLOCK + -(-T // (2 * c.STEP)) * (c.STEP // 16)
    keys = places = None
    for at, queries in parts(b, B, S, T):
        count, rows = at.stop - at.start, queries.stop - queries.start
        if keys is None:
            keys = b.empty((count, padded_rows(rows, tiles), padded_row(T)), b.i32)
            places = b.empty((count, rows, listed), b.i32) if T > c.BLOCK else None
        _, stored, so = b.shape(keys)
        _plan_scores(b, keys, q, k, w, scale, limit, hidden, (count, at.start, rows, queries.start))
        launch(
            b, index_select, count * rows, (c.num_warps, 1), hidden, keys=keys, limit=limit, places=places, out=out,
            scores=scores, S=S, T=T, b0=at.start, first=queries.start, rows=rows, stored=stored, so=so, topk=topk,
            listed=listed, LIMIT=limit is not None, BLOCK=c.BLOCK, STEP=c.STEP,
        )  # fmt: skip
    return out
