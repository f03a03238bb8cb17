# SPDX-License-Identifier: Apache-2.0
"""Launch plans of selection attention over lists of keys. The forward takes symbolic B, S and S_kv, the backward none.

Workspace besides inputs and outputs, in bytes: 4 B S G (n + 1) for the canonical lists; where the keys of a query are
split, 4 G h (Dv + 1) for each of B S NS splits, at most 32 (Dv + 1) h per multiprocessor. In the backward 8 per row (b,
s, g, h), 4 per element of dK and dV, and of a chunk of queries at most PAIRS for its rows and factors (or those of one
query, if more), with 6 per key and query: at most TABLE, or those of FEW_QUERIES, if more.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..dtypes import without_kernel
from .backward_plan import plan_delta
from .gather import selection_dq_sum
from .gather_plan import COMBINE, parts, plan_combine, splits
from .list_dkv import (
    selection_list_fold,
    selection_list_invert,
    selection_list_rows,
    selection_list_slots,
    selection_list_sum,
)
from .list_dq import selection_list_dq, selection_list_totals
from .list_forward import selection_list_forward
from .list_keys import selection_list_keys
from .lists_config import ListConfig, list_config, main_columns, rows_config, widths
from .lists_gluon import list_kernels
from .pieces_plan import power_of_two
from .tile_lists_plan import alignment, dot_precision

MAX_D = 576
MAX_HEADS = 128
MAX_KEYS = 4096
ROW = 16  # a list takes a multiple of so many entries
PAIRS = 5 << 28  # bytes of a chunk's rows of dK and dV
MOST_QUERIES = 2048  # of a chunk
TABLE = 1 << 28  # bytes of the table of a chunk's pairs, 6 a key and query, above FEW_QUERIES
FEW_QUERIES = 1024  # of a chunk, which may take them whatever its table needs


def unsupported(b: Any, *tensors: Any) -> str | None:
    """Returns why these inputs run the reference instead of the kernels, or None if they run the kernels."""
    for t in tensors:
        shape, dtype = b.shape(t), str(b.dtype(t))
        if len(shape) < 4:  # a sink, boundaries or segment ids
            continue
        width = b.static(shape[-1])
        if not dtype.startswith(("torch.float", "torch.bfloat")):
            if width > MAX_KEYS:
                return f"n = {width} keys a query are above {MAX_KEYS}"
            continue
        if reason := without_kernel(b, t):
            return reason
        if width > MAX_D:
            return f"D = {width} is above {MAX_D}"
        if len(shape) == 5 and b.static(shape[3]) > MAX_HEADS:
            return f"h = {b.static(shape[3])} heads a group are above {MAX_HEADS}"
    return None


@dataclasses.dataclass(frozen=True)
class Lists:
    """Canonical lists: keys[B, S, G, N] int32, of which counts[B, S, G] are set, in increasing order.

    N is ``given``, the number of entries, rounded up to a multiple of 16. With a bias, ``bias`` [B, S, G, N] holds those of the keys in
    fp32, and ``repeats`` says whether keys may be equal; else it is None.
    """

    keys: Any
    counts: Any
    given: int
    bias: Any = None
    repeats: bool = False


def _whole_rows(n: int) -> int:
    """Rounds n up to a multiple of ROW."""
    return -(-n // ROW) * ROW


def list_width(n: int) -> int:
    """Returns N, the entries of a canonical list made of n."""
    return max(ROW, _whole_rows(n))


def plan_keys(
    b: Any, S_kv: Any, indices: Any, cu_q: Any = None, cu_k: Any = None, seg_q: Any = None, seg_k: Any = None,
    bias: Any = None, repeats: bool = False,
) -> Lists:  # fmt: skip
    """Launches ``selection_list_keys`` on indices[B, S, G, n], or [B, S, n] for lists without a dimension of groups."""
    *rows, NI = b.shape(indices)
    B, S, G = rows if len(rows) == 3 else (*rows, 1)
    NI = b.static(NI)
    N = list_width(NI)
    keys = b.empty((*rows, N), b.i32)
    has_bias = bias is not None
    biases = b.empty((*rows, N), b.f32) if has_bias else None
    counts = (b.empty if NI else b.zeros)(rows, b.i32)
    lists = Lists(keys, counts, NI, biases, repeats)
    if NI == 0:
        return lists
    indices = b.contiguous(indices)
    varlen, seg = cu_q is not None, seg_q is not None
    cu_q = b.contiguous(cu_q) if varlen else indices
    cu_k = b.contiguous(cu_k) if cu_k is not None else cu_q
    NP = power_of_two(NI)
    b.launch(
        selection_list_keys,
        (B * S * G, 1, 1),
        dict(indices_ptr=indices, bias_ptr=b.contiguous(bias) if has_bias else None, cu_q_ptr=cu_q, cu_k_ptr=cu_k,
             seg_q_ptr=b.contiguous(seg_q) if seg else indices, seg_k_ptr=b.contiguous(seg_k) if seg else indices,
             keys_ptr=keys, biases_ptr=biases, counts_ptr=counts, S=S, S_kv=S_kv, G=G,
             NSEQ=b.shape(cu_q)[0] - 1 if varlen else 0, NI=NI, N=N),
        dict(NP=NP, VARLEN=varlen, SEG=seg, BIAS=has_bias, REPEATS=repeats),
        max(1, min(8, NP // 256)), 1,
    )  # fmt: skip
    return lists


@dataclasses.dataclass(frozen=True)
class _Call:
    """Arguments, constants and configuration shared by the forward and dQ."""

    args: dict[str, Any]
    constexprs: dict[str, Any]
    config: ListConfig
    kernel: Any = None  # the Gluon kernel that runs in place of the plain one
    rows_kernel: Any = None  # the Gluon kernel of the rows of dK, where it runs

    @property
    def heads(self) -> int:
        """Number of blocks of heads."""
        return -(-self.constexprs["H"] // self.config.HB)


def _call(
    b: Any, q: Any, k: Any, v: Any, lists: Lists, scale: Any, v_width: int, backward: bool, config: ListConfig | None
) -> _Call:
    h, DK, N = (b.static(n) for n in (b.shape(q)[3], b.shape(q)[4], b.shape(lists.keys)[3]))
    S, G, DV = b.shape(q)[1], b.shape(q)[2], v_width
    wgmma = None if config else list_kernels(b, q, k, v, DV, scale)
    if wgmma:
        return _wgmma_call(b, wgmma[backward], wgmma[2], q, k, lists, scale, DV)
    c = config or _plain_config(b, q, v, v_width, backward)
    values = k if v is None else v
    (sqb, sqs, sqg, sqh), (skb, skg, skn), (svb, svg, svn) = (tuple(b.strides(t))[:-1] for t in (q, k, values))
    args = dict(
        q_ptr=q, k_ptr=k, v_ptr=values, keys_ptr=lists.keys, counts_ptr=lists.counts,
        bias_ptr=lists.bias, scale=scale, S=S, G=G, N=N, sqb=sqb, sqs=sqs, sqg=sqg, sqh=sqh, skb=skb, skg=skg, skn=skn, svb=svb, svg=svg, svn=svn,
    )  # fmt: skip
    (KM, KT), (VM, VT) = widths(DK, c.MC), widths(DV, c.MC)
    # The keys' tiles are the values' only where no tile holds columns beyond Dv.
    shared = v is None and DV == VM * c.MC
    constexprs = dict(
        H=h, DK=DK, DV=DV, KM=KM, VM=VM, MC=c.MC, KT=KT, VT=VT, HELD=c.held, SHARED=shared, HB=c.HB, BN=c.BN,
        BIAS=lists.bias is not None, ALIGN=alignment(b, q, k, values), PREC=dot_precision(b, b.dtype(q)),
    )  # fmt: skip
    return _Call(args, constexprs, c)


def _plain_config(b: Any, q: Any, v: Any, v_width: int, backward: bool) -> ListConfig:
    props, (h, DK) = b.device_props(), (b.static(n) for n in b.shape(q)[3:])
    return list_config(h, DK, v_width, b.dtype(q).itemsize, props.backend, props.arch, v is None, backward)


def _wgmma_call(b: Any, kernel: Any, rows: Any, q: Any, k: Any, lists: Lists, scale: Any, DV: int) -> _Call:
    S, G, h, DK = b.shape(q)[1:]
    (sqb, sqs, sqg, sqh), (skb, skg, skn) = (tuple(b.strides(t))[:-1] for t in (q, k))
    args = dict(
        q_ptr=q, k_ptr=k, keys_ptr=lists.keys, counts_ptr=lists.counts, bias_ptr=lists.bias, scale=float(scale), S=S, G=G,
        N=b.shape(lists.keys)[3], sqb=sqb, sqs=sqs, sqg=sqg, sqh=sqh, skb=skb, skg=skg, skn=skn,
    )  # fmt: skip
    constexprs = dict(H=h, DK=DK, DV=DV, KT=0 if DK == DV else 64, BIAS=lists.bias is not None)
    # Up to 64 heads memory is what the plain kernel waits for, too.
    return _Call(args, constexprs, ListConfig(64, 64, DV, 4, 1, per=1), kernel, rows if b.static(h) > 64 else None)


def plan_lists_forward(
    b: Any, q: Any, k: Any, v: Any, lists: Lists, sink: Any, scale: Any, v_width: int,
    config: ListConfig | None = None, NS: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Launches the forward; returns o[B, S, G, h, Dv], lse[B, S, G, h]. ``config``, ``NS``: for measurements."""
    call = _call(b, q, k, v, lists, scale, v_width, False, config)
    B, S, G, h, _ = b.shape(q)
    h, c = b.static(h), call.config
    rows = B * S * G
    NS = splits(b, rows * call.heads, c.per) if NS is None else NS
    o, lse = b.empty((B, S, G, h, v_width), b.dtype(q)), b.empty((B, S, G, h), b.f32)
    part, plse = parts(b, rows, NS, h, v_width), parts(b, rows, NS, h)
    pnorm = parts(b, rows, NS, h) if lists.bias is not None else None
    has_sink = sink is not None
    sink = b.contiguous(sink) if has_sink else lse
    outs = dict(NS=NS, sink_ptr=sink, o_ptr=o, lse_ptr=lse, part_ptr=part, plse_ptr=plse, pnorm_ptr=pnorm)
    b.launch(
        call.kernel or selection_list_forward,
        (rows * call.heads * NS, 1, 1), dict(call.args, **outs), dict(call.constexprs, SINK=has_sink),
        c.num_warps, c.num_stages,
    )  # fmt: skip
    plan_combine(b, part, plse, sink if has_sink else None, o, lse, NS, pnorm)
    return o, lse


def plan_selection_list_attention(
    b: Any, q: Any, k: Any, v: Any, indices: Any, sink: Any, cu_q: Any, cu_k: Any, seg_q: Any, seg_k: Any, scale: Any,
    v_width: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Launches ``selection_list_attention``; returns (o, lse)."""
    lists = plan_keys(b, b.shape(k)[2], indices, cu_q, cu_k, seg_q, seg_k)
    q, k, v = (t if t is None else b.strided(t) for t in (q, k, v))
    return plan_lists_forward(b, q, k, v, lists, sink, scale, b.static(v_width))


# --- backward -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Gradients:
    """Tensors of the backward that do not depend on the chunk.

    With a bias, lse2 is lse, and delta has no part of ``dlse``: ``total`` and ``of_lse`` are those of
    ``selection_list_totals``, else None.
    """

    dout: Any
    lse2: Any
    delta: Any
    total: Any
    of_lse: Any
    dq: Any
    dk: Any
    dv: Any
    acc_k: Any
    acc_v: Any


def chunk_of(b: Any, S: int, groups: int, N: int, columns: int, programs: int, S_kv: int) -> int:
    """Returns the number of queries of a chunk, within the workspaces PAIRS and TABLE.

    A chunk either fills whole waves of programs, or is one of equal chunks: whichever takes fewer waves in all.
    ``programs`` is the number of programs of a query.
    """
    table = max(FEW_QUERIES, TABLE // max(1, 6 * groups * S_kv))
    most = max(1, min(MOST_QUERIES, table, PAIRS // max(1, groups * N * columns * 4)))
    if most >= S:
        return S
    sms = b.device_props().sm_count
    wave = max(1, sms // programs)

    def waves(rows: int) -> int:
        full, rest = divmod(S, rows)
        return full * -(-rows * programs // sms) + -(-rest * programs // sms)

    equal = -(-S // -(-S // most))
    return min(equal, most // wave * wave or equal, key=waves)


def backward_chunk(b: Any, q: Any, k: Any, v: Any, N: int, v_width: int, config: ListConfig | None = None) -> int:
    """Returns the number of queries that the backward takes at a time, of lists of N entries."""
    B, S, G, h, DK = b.shape(q)
    config = config or _plain_config(b, q, v, v_width, True)
    columns = DK + (0 if v is None else v_width)
    return chunk_of(b, S, B * G, N, columns, B * G * -(-h // config.HB), b.shape(k)[2])


def plan_selection_list_attention_backward(
    b: Any, dout: Any, dlse: Any, q: Any, k: Any, v: Any, indices: Any, sink: Any, cu_q: Any, cu_k: Any, seg_q: Any,
    seg_k: Any, o: Any, lse: Any, scale: Any, v_width: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Launches ``selection_list_attention_backward``; returns (dq, dk, dv, dsink)."""
    lists = plan_keys(b, b.shape(k)[2], indices, cu_q, cu_k, seg_q, seg_k)
    return plan_lists_backward(b, dout, dlse, q, k, v, lists, sink, o, lse, scale, v_width)


def plan_lists_backward(
    b: Any, dout: Any, dlse: Any, q: Any, k: Any, v: Any, lists: Lists, sink: Any, o: Any, lse: Any, scale: Any,
    v_width: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Launches the backward over canonical lists; returns (dq, dk, dv, dsink)."""
    B, S, G, h, DK = b.shape(q)
    S_kv = b.shape(k)[2]
    N = b.shape(lists.keys)[3]
    q, k, v = (t if t is None else b.strided(t) for t in (q, k, v))
    dout, dlse, sink, o, lse = (t if t is None else b.contiguous(t) for t in (dout, dlse, sink, o, lse))
    bias = lists.bias is not None
    lse2, delta, dsink = plan_delta(b, dout, None if bias else dlse, sink, o, lse, bias)
    dq, dk = b.empty((B, S, G, h, DK), b.dtype(q)), b.empty((B, G, S_kv, DK), b.dtype(k))
    # Without dO no kernel writes dV.
    dv = (b.zeros if dout is None else b.empty)((0,) if v is None else (B, G, S_kv, v_width), b.dtype(k))
    call = _call(b, q, k, v, lists, scale, v_width, True, None)
    if 0 in (S * B * G, lists.given, S_kv):
        return b.zeros(b.shape(dq), b.dtype(q)), *(b.zeros(b.shape(t), b.dtype(k)) for t in (dk, dv)), dsink
    rows = backward_chunk(b, q, k, v, N, v_width, call.config)
    many = rows < S
    acc_k, acc_v = (b.empty(b.shape(t) if many else (0,), b.f32) for t in (dk, dv))
    total, of_lse = _plan_totals(b, q, k, lists, dlse, sink, lse, scale, v_width) if bias else (None, None)
    grads = _Gradients(dout, lse if bias else lse2, delta, total, of_lse, dq, dk, dv, acc_k, acc_v)
    for first in range(0, S, rows):
        _plan_chunk(b, call, grads, v is None, lists.repeats, B, S_kv, rows, first)
    return dq, dk, dv, dsink


def _plan_totals(
    b: Any, q: Any, k: Any, lists: Lists, dlse: Any, sink: Any, lse: Any, scale: Any, v_width: int
) -> tuple[Any, Any]:
    """Launches ``selection_list_totals``; returns (total, of_lse), each [B, S, G, h]."""
    B, S, G, h, DK = b.shape(q)
    HB, MC = 16, min(64, main_columns(DK, v_width))
    (sqb, sqs, sqg, sqh), (skb, skg, skn) = (tuple(b.strides(t))[:-1] for t in (q, k))
    total, of_lse = (b.empty(b.shape(lse), b.f32) for _ in range(2))
    KM, KT = widths(DK, MC)
    b.launch(
        selection_list_totals, (B * S * G * -(-h // HB), 1, 1),
        dict(dlse_ptr=dlse, q_ptr=q, k_ptr=k, keys_ptr=lists.keys, counts_ptr=lists.counts, bias_ptr=lists.bias,
             sink_ptr=sink, lse_ptr=lse, total_ptr=total, of_lse_ptr=of_lse, scale=float(scale), S=S, G=G,
             N=b.shape(lists.keys)[3], sqb=sqb, sqs=sqs, sqg=sqg, sqh=sqh, skb=skb, skg=skg, skn=skn),
        dict(H=h, DK=DK, KM=KM, MC=MC, KT=KT, HB=HB, BN=32, DLSE=dlse is not None, SINK=sink is not None,
             ALIGN=alignment(b, q, k), PREC=dot_precision(b, b.dtype(q))),
        4, 1,
    )  # fmt: skip
    return total, of_lse


def _plan_chunk(
    b: Any, call: _Call, x: _Gradients, shared: bool, repeats: bool, B: int, S_kv: int, size: int, first: int
) -> None:
    """Launches the kernels of at most ``size`` queries from ``first`` on."""
    n = call.constexprs
    S, G, N, H, DK, DV = *(call.args[name] for name in "SGN"), n["H"], n["DK"], n["DV"]
    rows = min(size, S - first)
    dtype = b.dtype(call.args["q_ptr"])
    lines, has_dout = B * G * rows, x.dout is not None
    ds = b.empty((lines, H, N), dtype)
    p = b.empty((lines, H, N), dtype) if has_dout else ds
    _plan_dq(b, call, x, p, ds, B, first, rows)
    kept = rows_dtype(b, dtype)
    part_k = b.empty((lines, N, DK), kept)
    part_v = b.empty((0,) if shared else (lines, N, DV), kept)
    chunk = dict(S=S, G=G, N=N, first=first, rows=rows)
    lists = {name: call.args[name] for name in ("keys_ptr", "counts_ptr")}
    for factor in ((ds, p) if has_dout else (ds,)) if repeats else ():
        b.launch(
            selection_list_fold, (lines, 1, 1), dict(lists, factor_ptr=factor, **chunk), dict(H=H, NP=power_of_two(N)),
            4, 1,
        )  # fmt: skip
    with_v = has_dout and not shared
    _plan_rows(b, call, x, p, ds, part_k, part_v, with_v, chunk)
    outs = [(part_k, x.acc_k, x.dk, DK)]
    if with_v:
        outs.append((part_v, x.acc_v, x.dv, DV))
    plan_sums(b, lists, int(repeats), B, S_kv, size, chunk, outs)


def _plan_rows(
    b: Any, call: _Call, x: _Gradients, p: Any, ds: Any, part_k: Any, part_v: Any, with_v: bool, chunk: dict[str, Any]
) -> None:
    """Launches the rows of dK, and ``with_v`` those of dV, of a chunk's queries; else those of V's gradient count to dK's."""
    n = call.constexprs
    H, DK, DV = n["H"], n["DK"], n["DV"]
    lines, has_dout = b.shape(ds)[0], x.dout is not None
    args = dict(
        {name: call.args[name] for name in ("q_ptr", "counts_ptr", "scale", "sqb", "sqs", "sqg", "sqh")}, **chunk,
        dout_ptr=x.dout if has_dout else ds, p_ptr=p, ds_ptr=ds, part_k_ptr=part_k,
    )  # fmt: skip
    if call.rows_kernel and has_dout:
        b.launch(call.rows_kernel, (lines * (DV // 256), 1, 1), args, dict(H=H, DK=DK, DV=DV, KT=n["KT"]), 4, 1)
        return
    dtype = b.dtype(call.args["q_ptr"])
    c = rows_config(H, DK, DV, dtype.itemsize)
    NKC, NVC = -(-DK // c.DC), -(-DV // c.DC) if with_v else 0
    b.launch(
        selection_list_rows, (lines * (NKC + NVC), 1, 1), dict(args, part_v_ptr=part_v),
        dict(H=H, DK=DK, DV=DV, HB=c.HB, BN=c.BN, DC=c.DC, NKC=NKC, NVC=NVC, SHARED=not with_v, DOUT=has_dout,
             ALIGN=alignment(b, call.args["q_ptr"]), PREC=dot_precision(b, dtype)),
        c.num_warps, c.num_stages,
    )  # fmt: skip


def plan_sums(
    b: Any, lists: dict[str, Any], repeats: int, B: int, S_kv: int, size: int, chunk: dict[str, Any], outs: list[Any]
) -> None:
    """Launches the sums over a chunk of at most ``size`` queries, for each key in their order.

    outs lists (part[B, G, rows, N, D], the rows of each pair; acc[B, G, S_kv, D] fp32, between chunks; out, after the
    last; D). ``repeats`` is that of ``selection_list_slots``.
    """
    S, G, N, first, rows = (chunk[name] for name in ("S", "G", "N", "first", "rows"))
    CQ = _whole_rows(size)
    inverse, sizes = _plan_inverse(b, lists, repeats, B, S_kv, CQ, chunk)
    for part, acc, out, D in outs:
        columns = min(128, max(16, power_of_two(D)))
        b.launch(
            selection_list_sum,
            (B * G * S_kv, -(-D // columns), 1),
            dict(part_ptr=part, inverse_ptr=inverse, sizes_ptr=sizes, acc_ptr=acc, out_ptr=out, S_kv=S_kv, N=N,
                 CQ=CQ, rows=rows),
            dict(D=D, DC=columns, FIRST=first == 0, LAST=first + rows == S, UNROLL=16), 1, 1,
        )  # fmt: skip


def rows_dtype(b: Any, dtype: Any) -> Any:
    """Returns the dtype in which the rows of dK and dV are kept until they are summed in fp32.

    bf16's rounding is as large as that of the factors that a bf16 product takes. fp16 could lose small gradients.
    """
    return b.bf16 if dtype == b.bf16 else b.f32


def _plan_dq(b: Any, call: _Call, x: _Gradients, p: Any, ds: Any, B: int, first: int, rows: int) -> None:
    """Launches the kernels of dQ, p and ds of ``rows`` queries from ``first`` on."""
    n, c = call.constexprs, call.config
    G, H, DK = call.args["G"], n["H"], n["DK"]
    lines = B * G * rows
    args = dict(
        call.args, dout_ptr=ds if x.dout is None else x.dout, lse2_ptr=x.lse2, delta_ptr=x.delta, total_ptr=x.total,
        of_lse_ptr=x.of_lse, dq_ptr=x.dq, p_ptr=p,
        ds_ptr=ds, first=first, rows=rows,
    )  # fmt: skip
    constexprs = dict(n, DOUT=x.dout is not None)
    if call.kernel:
        b.launch(call.kernel, (lines * call.heads, 1, 1), args, constexprs, c.num_warps, c.num_stages)
        return
    NS = splits(b, lines * call.heads, c.per) if rows == call.args["S"] else 1
    part = b.empty((lines * NS if NS > 1 else 0, H, DK), b.f32)
    b.launch(
        selection_list_dq, (lines * call.heads * NS, 1, 1), dict(args, part_ptr=part, NS=NS), constexprs, c.num_warps,
        c.num_stages,
    )  # fmt: skip
    if NS > 1:
        b.launch(
            selection_dq_sum, (lines * H, 1, 1), dict(part_ptr=part, dq_ptr=x.dq, NS=NS),
            dict(H=H, D=DK, DP=power_of_two(DK), CS=COMBINE), 1, 1,
        )  # fmt: skip


def _plan_inverse(
    b: Any, lists: dict[str, Any], repeats: int, B: int, S_kv: int, CQ: int, chunk: dict[str, Any]
) -> tuple[Any, Any]:
    """Launches the kernels that list, for each key, the pairs of the chunk in query order; returns them and numbers."""
    G, N = chunk["G"], chunk["N"]
    units = B * G * S_kv
    slots = b.zeros((units, CQ), b.i16)
    inverse, sizes = b.empty((units, CQ), b.i32), b.empty((units,), b.i32)
    b.launch(
        selection_list_slots, (B * G * chunk["rows"], 1, 1), dict(lists, slots_ptr=slots, S_kv=S_kv, CQ=CQ, **chunk),
        dict(NB=min(1024, power_of_two(N)), REPEATS=repeats), 4, 1,
    )  # fmt: skip
    plan_invert(b, slots, inverse, sizes, N)
    return inverse, sizes


def plan_invert(b: Any, slots: Any, inverse: Any, sizes: Any, N: int) -> None:
    """Launches ``selection_list_invert`` on slots[units, CQ]."""
    units, CQ = b.shape(slots)
    CP = power_of_two(CQ)
    KB = max(1, 2048 // CP)
    b.launch(
        selection_list_invert, (-(-units // KB), 1, 1),
        dict(slots_ptr=slots, inverse_ptr=inverse, sizes_ptr=sizes, units=units, N=N, CQ=CQ),
        dict(CP=CP, KB=KB), 4, 1,
    )  # fmt: skip
