# SPDX-License-Identifier: Apache-2.0
"""Launch plans of selection attention over lists of keys. The forward takes symbolic B, S and S_kv, the backward none.

Workspace besides inputs and outputs, in bytes: 4 B S G (n + 1) for the canonical lists; where the keys of a query are
split, 4 G h (Dv + 1) for each of B S NS splits, at most 32 (Dv + 1) h per multiprocessor. In the backward 8 per row (b,
s, g, h), 4 per element of dK and dV, and of a chunk of queries at most PAIRS for its rows and factors (or those of one
query, if more), with 6 per key and query: at most TABLE, or those of FEW_QUERIES, if more. With a bias per entry
(``selection_entry_attention``), 4 B S G n for those of the canonical lists.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..launch import launch
from ..operands import above, alignment, attention, contiguous, power_of_two, strided, without_kernel
from .backward_plan import plan_delta
from .gather_plan import COMBINE, parts, plan_combine, plan_dq_sum, splits
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
from .lists_config import ListConfig, list_config, list_kernels, main_columns, rows_config, widths

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
    indices = False  # whether the tensor before is the indices: of their dimensions, only a bias follows
    for t in tensors:
        shape, bias = b.shape(t), indices
        indices = not str(b.dtype(t)).startswith(("torch.float", "torch.bfloat")) and len(shape) >= 4
        if len(shape) < 4:  # a sink, boundaries or segment ids
            continue
        width = b.static(shape[-1])
        reason = above(width, MAX_KEYS, "n = {} keys a query are") if indices else without_kernel(b, t)
        if not indices and not (bias and len(shape) == 4):
            reason = reason or above(width, MAX_D, "D = {} is")
        if not indices and len(shape) == 5:
            reason = reason or above(b.static(shape[3]), MAX_HEADS, "h = {} heads a group are")
        if reason:
            return reason
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
    indices, bias, cu_q, cu_k, seg_q, seg_k = contiguous(b, indices, bias, cu_q, cu_k, seg_q, seg_k)
    varlen, seg = cu_q is not None, seg_q is not None
    cu_q = cu_q if varlen else indices
    NP = power_of_two(NI)
    launch(
        b, selection_list_keys, B * S * G, (max(1, min(8, NP // 256)), 1), indices=indices, bias=bias, cu_q=cu_q,
        cu_k=cu_q if cu_k is None else cu_k, seg_q=seg_q if seg else indices, seg_k=seg_k if seg else indices, keys=keys,
        biases=biases, counts=counts, S=S, S_kv=S_kv, G=G, NSEQ=b.shape(cu_q)[0] - 1 if varlen else 0, NI=NI, N=N, NP=NP,
        VARLEN=varlen, SEG=seg, BIAS=has_bias, REPEATS=repeats,
    )  # fmt: skip
    return lists


@dataclasses.dataclass(frozen=True)
class _Call:
    """Values and configuration shared by the forward and dQ."""

    values: dict[str, Any]
    config: ListConfig
    kernel: Any = None  # the Gluon kernel that runs in place of the plain one
    rows_kernel: Any = None  # the Gluon kernel of the rows of dK, where it runs

    @property
    def heads(self) -> int:
        """Number of blocks of heads."""
        return -(-self.values["H"] // self.config.HB)


def _call(
    b: Any, q: Any, k: Any, v: Any, lists: Lists, scale: Any, v_width: int, backward: bool, config: ListConfig | None
) -> _Call:
    x = dict(
        attention(b, q, k, v, v_width), keys=lists.keys, counts=lists.counts, bias=lists.bias, scale=scale,
        N=b.static(b.shape(lists.keys)[3]), BIAS=lists.bias is not None,
    )  # fmt: skip
    wgmma = None if config else list_kernels(b, q, k, v, v_width, scale)
    if wgmma:
        return _wgmma_call(wgmma[backward], wgmma[2], x)
    c = config or _plain_config(b, q, v, v_width, backward)
    (KM, KT), (VM, VT) = widths(x["DK"], c.MC), widths(v_width, c.MC)
    # The keys' tiles are the values' only where no tile holds columns beyond Dv.
    x.update(KM=KM, VM=VM, KT=KT, VT=VT, HELD=c.held, SHARED=v is None and v_width == VM * c.MC)
    return _Call(x, c)


def _plain_config(b: Any, q: Any, v: Any, v_width: int, backward: bool) -> ListConfig:
    props, (h, DK) = b.device_props(), (b.static(n) for n in b.shape(q)[3:])
    return list_config(h, DK, v_width, b.dtype(q).itemsize, props.backend, props.arch, v is None, backward)


def _wgmma_call(kernel: Any, rows: Any, x: dict[str, Any]) -> _Call:
    values = dict(x, scale=float(x["scale"]), KT=0 if x["DK"] == x["DV"] else 64)
    # Up to 64 heads memory is what the plain kernel waits for, too.
    return _Call(values, ListConfig(64, 64, x["DV"], 4, 1, per=1), kernel, rows if x["H"] > 64 else None)


def plan_lists_forward(
    b: Any, q: Any, k: Any, v: Any, lists: Lists, sink: Any, scale: Any, v_width: int,
    config: ListConfig | None = None, NS: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Launches the forward; returns o[B, S, G, h, Dv], lse[B, S, G, h]. ``config``, ``NS``: for measurements."""
    q, k, v = strided(b, q, k, v)
    call = _call(b, q, k, v, lists, scale, v_width, False, config)
    B, S, G, h, _ = b.shape(q)
    h, c = b.static(h), call.config
    rows = B * S * G
    NS = splits(b, rows * call.heads, c.per) if NS is None else NS
    o, lse = b.empty((B, S, G, h, v_width), b.dtype(q)), b.empty((B, S, G, h), b.f32)
    part, plse = parts(b, rows, NS, h, v_width), parts(b, rows, NS, h)
    pnorm = parts(b, rows, NS, h) if lists.bias is not None else None
    sink, SINK = (lse, False) if sink is None else (b.contiguous(sink), True)
    launch(
        b, call.kernel or selection_list_forward, rows * call.heads * NS, c, call.values, NS=NS, sink=sink, o=o, lse=lse,
        part=part, plse=plse, pnorm=pnorm, SINK=SINK,
    )  # fmt: skip
    plan_combine(b, part, plse, sink if SINK else None, o, lse, NS, pnorm)
    return o, lse


def plan_selection_list_attention(
    b: Any, q: Any, k: Any, v: Any, indices: Any, sink: Any, cu_q: Any, cu_k: Any, seg_q: Any, seg_k: Any, scale: Any,
    v_width: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Launches ``selection_list_attention``; returns (o, lse)."""
    lists = plan_keys(b, b.shape(k)[2], indices, cu_q, cu_k, seg_q, seg_k)
    return plan_lists_forward(b, q, k, v, lists, sink, scale, b.static(v_width))


def plan_selection_entry_attention(
    b: Any, q: Any, k: Any, v: Any, indices: Any, bias: Any, sink: Any, scale: Any, v_width: Any, repeats: bool
) -> tuple[Any, Any]:
    """Launches ``selection_entry_attention``; returns (o, lse)."""
    lists = plan_keys(b, b.shape(k)[2], indices, bias=bias, repeats=repeats)
    return plan_lists_forward(b, q, k, v, lists, sink, scale, b.static(v_width))


# --- backward -----------------------------------------------------------------------------------------------


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


def plan_selection_entry_attention_backward(
    b: Any, dout: Any, dlse: Any, q: Any, k: Any, v: Any, indices: Any, bias: Any, sink: Any, o: Any, lse: Any, scale: Any,
    v_width: Any, repeats: bool,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Launches ``selection_entry_attention_backward``; returns (dq, dk, dv, dsink)."""
    lists = plan_keys(b, b.shape(k)[2], indices, bias=bias, repeats=repeats)
    return plan_lists_backward(b, dout, dlse, q, k, v, lists, sink, o, lse, scale, v_width)


def plan_lists_backward(
    b: Any, dout: Any, dlse: Any, q: Any, k: Any, v: Any, lists: Lists, sink: Any, o: Any, lse: Any, scale: Any,
    v_width: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Launches the backward over canonical lists; returns (dq, dk, dv, dsink)."""
    B, S, G, h, DK = b.shape(q)
    S_kv = b.shape(k)[2]
    N = b.shape(lists.keys)[3]
    q, k, v = strided(b, q, k, v)
    dout, dlse, sink, o, lse = contiguous(b, dout, dlse, sink, o, lse)
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
    total, of_lse = _plan_totals(b, call, dlse, sink, lse) if bias else (None, None)
    # With a bias, lse2 is lse, and delta has no part of dlse: total and of_lse are those of ``selection_list_totals``.
    grads = dict(
        dout=dout, lse2=lse if bias else lse2, delta=delta, total=total, of_lse=of_lse, dq=dq, DOUT=dout is not None
    )
    outs = [(acc_k, dk)] if v is None or dout is None else [(acc_k, dk), (acc_v, dv)]
    for first in range(0, S, rows):
        _plan_chunk(b, call, grads, outs, v is None, lists.repeats, B, rows, first)
    return dq, dk, dv, dsink


def _plan_totals(b: Any, call: _Call, dlse: Any, sink: Any, lse: Any) -> tuple[Any, Any]:
    """Launches ``selection_list_totals``; returns (total, of_lse), each [B, S, G, h]."""
    x, (B, S, G, h) = call.values, b.shape(lse)
    HB, MC = 16, min(64, main_columns(x["DK"], x["DV"]))
    total, of_lse = (b.empty(b.shape(lse), b.f32) for _ in range(2))
    KM, KT = widths(x["DK"], MC)
    launch(
        b, selection_list_totals, B * S * G * -(-h // HB), (4, 1), x, dlse=dlse, sink=sink, lse=lse, total=total, of_lse=of_lse,
        scale=float(x["scale"]), KM=KM, MC=MC, KT=KT, HB=HB, BN=32, DLSE=dlse is not None, SINK=sink is not None,
        ALIGN=alignment(b, x["q"], x["k"]),
    )  # fmt: skip
    return total, of_lse


def _plan_chunk(
    b: Any, call: _Call, grads: dict[str, Any], outs: list[Any], shared: bool, repeats: bool, B: int, size: int, first: int,
) -> None:  # fmt: skip
    """Launches the kernels of at most ``size`` queries from ``first`` on. outs: sums and gradient of keys, and of values."""
    n = call.values
    S, G, N, H, dtype = *(n[name] for name in ("S", "G", "N", "H")), b.dtype(n["q"])
    rows = min(size, S - first)
    lines = B * G * rows
    ds = b.empty((lines, H, N), dtype)
    p = b.empty((lines, H, N), dtype) if grads["DOUT"] else ds
    # The values of all kernels of a chunk.
    chunk = dict(n, **grads, p=p, ds=ds, first=first, rows=rows)
    if not grads["DOUT"]:
        chunk["dout"] = ds
    _plan_dq(b, call, chunk, lines)
    kept, columns = rows_dtype(b, dtype), (n["DK"], n["DV"])
    made = [b.empty((0,) if shared and i else (lines, N, D), kept) for i, D in enumerate(columns)]
    for factor in ((ds, p) if grads["DOUT"] else (ds,)) if repeats else ():
        launch(b, selection_list_fold, lines, (4, 1), chunk, factor=factor, NP=power_of_two(N))
    _plan_rows(b, call, chunk, lines, made, len(outs) == 2)
    sums = [(part, *out, D) for part, out, D in zip(made, outs, columns, strict=False)]
    plan_sums(b, int(repeats), B, n["S_kv"], size, chunk, sums)


def _plan_rows(b: Any, call: _Call, chunk: dict[str, Any], lines: int, made: list[Any], with_v: bool) -> None:
    """Launches the rows of dK, and ``with_v`` those of dV, of a chunk's queries; else those of V's gradient count to dK's."""
    H, DK, DV, q = (chunk[name] for name in ("H", "DK", "DV", "q"))
    if call.rows_kernel and chunk["DOUT"]:
        launch(b, call.rows_kernel, lines * (DV // 256), (4, 1), chunk, part_k=made[0])
        return
    c = rows_config(H, DK, DV, b.dtype(q).itemsize)
    NKC, NVC = -(-DK // c.DC), -(-DV // c.DC) if with_v else 0
    launch(
        b, selection_list_rows, lines * (NKC + NVC), c, chunk, part_k=made[0], part_v=made[1], NKC=NKC, NVC=NVC,
        SHARED=not with_v, ALIGN=alignment(b, q),
    )  # fmt: skip


def plan_sums(b: Any, repeats: int, B: int, S_kv: int, size: int, chunk: dict[str, Any], outs: list[Any]) -> None:
    """Launches the sums over a chunk of at most ``size`` queries, for each key in their order.

    outs lists (part[B, G, rows, N, D], the rows of each pair; acc[B, G, S_kv, D] fp32, between chunks; out, after the
    last; D). ``repeats`` is that of ``selection_list_slots``. ``chunk`` has the lists' keys and counts, S, G, N, first, rows.
    """
    G, N, first, rows = (chunk[name] for name in ("G", "N", "first", "rows"))
    units, CQ = B * G * S_kv, _whole_rows(size)
    x = dict(chunk, S_kv=S_kv, CQ=CQ, slots=b.zeros((units, CQ), b.i16))
    inverse, sizes = b.empty((units, CQ), b.i32), b.empty((units,), b.i32)
    # For each key, the pairs of the chunk in query order, and their number.
    launch(b, selection_list_slots, B * G * rows, (4, 1), x, NB=min(1024, power_of_two(N)), REPEATS=repeats)
    plan_invert(b, x["slots"], inverse, sizes, N)
    for part, acc, out, D in outs:
        DC = min(128, max(16, power_of_two(D)))
        launch(
            b, selection_list_sum, (units, -(-D // DC)), (1, 1), x, part=part, inverse=inverse, sizes=sizes, acc=acc, out=out,
            D=D, DC=DC, FIRST=first == 0, LAST=first + rows == chunk["S"], UNROLL=16,
        )  # fmt: skip


def rows_dtype(b: Any, dtype: Any) -> Any:
    """Returns the dtype in which the rows of dK and dV are kept until they are summed in fp32.

    bf16's rounding is as large as that of the factors that a bf16 product takes. fp16 could lose small gradients.
    """
    return b.bf16 if dtype == b.bf16 else b.f32


def _plan_dq(b: Any, call: _Call, chunk: dict[str, Any], lines: int) -> None:
    """Launches the kernels of dQ, p and ds of a chunk's queries."""
    c, H, DK = call.config, chunk["H"], chunk["DK"]
    programs = lines * call.heads
    if call.kernel:
        launch(b, call.kernel, programs, c, chunk)
        return
    NS = splits(b, programs, c.per) if chunk["rows"] == chunk["S"] else 1
    part = b.empty((lines * NS if NS > 1 else 0, H, DK), b.f32)
    launch(b, selection_list_dq, programs * NS, c, chunk, part=part, NS=NS)
    plan_dq_sum(b, part, chunk["dq"], lines * H if NS > 1 else 0, NS, COMBINE)


def plan_invert(b: Any, slots: Any, inverse: Any, sizes: Any, N: int) -> None:
    """Launches ``selection_list_invert`` on slots[units, CQ]."""
    units, CQ = b.shape(slots)
    CP = power_of_two(CQ)
    KB = max(1, 2048 // CP)
    launch(
        b, selection_list_invert, -(-units // KB), (4, 1), slots=slots, inverse=inverse, sizes=sizes, units=units, N=N, CQ=CQ,
        CP=CP, KB=KB,
    )  # fmt: skip
