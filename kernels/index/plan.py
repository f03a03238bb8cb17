"""Launch plans of the index ops.

``index_topk`` loops over chunks of queries to bound its memory, which a graph with dynamic sizes cannot express.
Memory besides inputs and outputs: SCORES numbers of 4 bytes, or the scores of one tile of queries if those are more.
"""

from __future__ import annotations

from typing import Any

from mhc_inductor.reference.index import chunks

from ..dtypes import without_kernel
from ..selection.pieces_plan import power_of_two
from ..selection.tile_lists_plan import alignment, dot_precision
from . import config
from .scores import index_row_scores, index_tile_scores
from .topk import index_select

MAX_D, MAX_HEADS, MAX_TOPK = 256, 128, 4096
SCORES = 1 << 26
FEW_ROWS = 32  # up to so many queries, a program scores one query
ROWS = 128  # the workspace holds a multiple of so many rows: whole tiles of queries
PAD = 256  # rows of the workspace are multiples of so many numbers: whole tiles of keys


def unsupported(b: Any, q: Any, k: Any, w: Any, *_: Any) -> str | None:
    """Returns why these inputs run the reference instead of the kernels, or None if they run the kernels."""
    if reason := without_kernel(b, q, k, w):
        return reason
    H, D = b.shape(q)[2:]
    if D > MAX_D:
        return f"D = {D} is above {MAX_D}"
    if H > MAX_HEADS:
        return f"H = {H} heads are above {MAX_HEADS}"
    return None


def unsupported_sizes(b: Any, q: Any, k: Any, w: Any, *rest: Any) -> str | None:
    """Returns the reason that depends on all arguments why the reference runs, or None if the kernels run."""
    if len(rest) == 6 and rest[0] > MAX_TOPK:
        return f"topk = {rest[0]} is above {MAX_TOPK}"
    return None


def few(b: Any, S: Any) -> bool:
    """Returns whether a program scores one query."""
    return b.is_static(S) and S <= FEW_ROWS


def padded_row(T: int) -> int:
    """Returns the numbers of a row of the workspace."""
    return -(-T // PAD) * PAD


def _plan_scores(
    b: Any, out: Any, q: Any, k: Any, w: Any, scale: float, visible: tuple[Any, ...], where: tuple[Any, ...]
) -> None:
    """Launches the scores of the queries ``where`` = (sequences, first sequence, queries, first query) into ``out``.

    Where ``out`` holds integers, they are sortable.
    """
    (_, S, H, D), T = b.shape(q), b.shape(k)[1]
    _, stored, so = b.shape(out)
    H, D = b.static(H), b.static(D)
    limit, mask, seg_q, seg_k = visible
    parts, b0, rows, first = where
    props, itemsize = b.device_props(), b.dtype(q).itemsize
    sqb, sqs, sqh = b.strides(q)[:3]
    skb, skt = b.strides(k)[:2]
    swb, sws, swh = b.strides(w)
    smb, sms, smt = (0, 0, 0) if mask is None else b.strides(mask)
    args = dict(q_ptr=q, k_ptr=k, w_ptr=w, limit_ptr=limit, mask_ptr=mask, seg_q_ptr=seg_q, seg_k_ptr=seg_k, out_ptr=out,
                scale=float(scale), S=S, T=T, b0=b0, first=first, rows=rows, stored=stored, so=so, sqb=sqb, sqs=sqs, sqh=sqh, skb=skb, skt=skt,
                swb=swb, sws=sws, swh=swh, smb=smb, sms=sms, smt=smt)  # fmt: skip
    constexprs = dict(H=H, D=D, DP=config.padded(D), ALIGN=alignment(b, q, k), PREC=dot_precision(b, b.dtype(q)),
                      SORTABLE=b.dtype(out) == b.i32)  # fmt: skip
    if few(b, S):
        BT = config.row_keys(itemsize)
        NT = b.cdiv(T, BT)
        constexprs |= dict(HP=max(16, power_of_two(H)), BT=BT)
        b.launch(index_row_scores, (parts * rows * NT, 1, 1), dict(args, NT=NT), constexprs, 4, 1)
        return
    c = config.score_config(D, itemsize, props.backend, props.arch)
    NS, NT = b.cdiv(rows, c.BS), b.cdiv(T, c.BT)
    constexprs |= dict(BS=c.BS, BT=c.BT)
    grid = (parts * NS * NT, 1, 1)
    b.launch(index_tile_scores, grid, dict(args, NS=NS, NT=NT), constexprs, c.num_warps, c.num_stages)


def _inputs(b: Any, q: Any, k: Any, w: Any, *visible: Any) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """Returns the inputs as the kernels read them: a last stride of 1, or contiguous; the mask as it is."""
    limit, mask, seg_q, seg_k = visible
    small = (None if t is None else b.contiguous(t) for t in (limit, seg_q, seg_k))
    limit, seg_q, seg_k = small
    mask = None if mask is None else b.laid_out(mask)
    return b.strided(q), b.strided(k), b.laid_out(w), (limit, mask, seg_q, seg_k)


def plan_index_scores(
    b: Any, q: Any, k: Any, w: Any, scale: float, limit: Any, mask: Any, seg_q: Any, seg_k: Any
) -> Any:
    """Launches ``index_scores``; returns scores[B, S, T] fp32."""
    (B, S), T = b.shape(q)[:2], b.shape(k)[1]
    out = b.empty((B, S, T), b.f32)
    q, k, w, visible = _inputs(b, q, k, w, limit, mask, seg_q, seg_k)
    _plan_scores(b, out, q, k, w, scale, visible, (B, 0, S, 0))
    return out


def parts(B: int, S: int, T: int) -> list[tuple[slice, slice]]:
    """Returns the chunks of sequences and queries whose scores ``index_topk`` holds at a time."""
    return list(chunks(B, S, padded_row(T), SCORES, ROWS))


def plan_index_topk(
    b: Any, q: Any, k: Any, w: Any, topk: int, scale: float, limit: Any, mask: Any, seg_q: Any, seg_k: Any
) -> Any:
    """Launches ``index_topk``; returns indices[B, S, topk] int32."""
    (B, S), T = b.shape(q)[:2], b.shape(k)[1]
    out = b.empty((B, S, topk), b.i32)
    if topk == 0:
        return out
    q, k, w, visible = _inputs(b, q, k, w, limit, mask, seg_q, seg_k)
    so = padded_row(T)
    BLOCK, warps = config.select_config(T)
    for at, queries in parts(B, S, T):
        count, rows = at.stop - at.start, queries.stop - queries.start
        stored = rows if few(b, S) else -(-rows // ROWS) * ROWS
        keys = b.empty((count, stored, so), b.i32)
        _plan_scores(b, keys, q, k, w, scale, visible, (count, at.start, rows, queries.start))
        b.launch(
            index_select,
            (count * rows, 1, 1),
            dict(keys_ptr=keys, limit_ptr=visible[0], out_ptr=out, S=S, T=T, b0=at.start, first=queries.start, rows=rows,
                 stored=stored, so=so, topk=topk),
            dict(ALL=mask is None and seg_q is None, BLOCK=BLOCK, STREAM=T > BLOCK), warps, 1,
        )  # fmt: skip
    return out
