# SPDX-License-Identifier: Apache-2.0
"""Launch plans of the gather path. B, S and S_kv may be symbolic.

Workspace besides inputs and outputs, in bytes: where the keys of a query are split, 4 G h (Dv + 1) for each of B S NS
splits, which is at most 32 (Dv + 1) h per multiprocessor; nothing where B S G queries fill the device. Above FEW ranges
per query, 12 B G S r for pieces.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .config import padded, tiled
from .gather import selection_combine, selection_dq_sum, selection_gather, selection_gather_dq
from .pieces_plan import Pieces, plan_pieces, power_of_two
from .segments_plan import NONE, Segments
from .tile_lists_plan import alignment, dot_precision

FEW = 64  # ranges per query up to which each program makes them disjoint itself
MAX_SPLITS = 128
COMBINE = 8  # splits that the combining kernels read at a time


@dataclasses.dataclass(frozen=True)
class GatherConfig:
    """Configuration of the gather path.

    HB heads per program (padded), tiles of BN keys, D in tiles of DC. per: programs per multiprocessor that splitting
    aims at. held: whether the query stays in shared memory or is read again for every tile.
    """

    HB: int
    BN: int
    num_warps: int
    num_stages: int
    per: int = 2
    DC: int = 128
    held: bool = True


def shared_memory(arch: int, backend: str) -> int:
    """Returns the bytes that one program may use so that several share a multiprocessor."""
    if backend == "hip":
        return 60 << 10
    return {80: 80, 90: 100, 100: 100}.get(arch, 48) << 10


def gather_config(h: int, DK: int, DV: int, itemsize: int, arch: int, backend: str) -> GatherConfig:
    """Returns the configuration of the gather path, in closed form from h, Dk, Dv, the dtype and the device."""
    KP, VP = tiled(DK), tiled(DV)
    HB = max(16, min(power_of_two(h), 8192 // padded(max(DK, DV))))
    room = shared_memory(arch, backend) // ((KP + VP) * itemsize)
    BN = 64 if room >= 128 and itemsize == 2 else 32 if room >= 64 else 16
    if itemsize == 4 and max(KP, VP) > 256:
        return GatherConfig(HB, BN, 8, 1, DC=64, held=False)
    return GatherConfig(HB, BN, 4, 2 if room >= 2 * BN else 1)


def splits(b: Any, rows: Any, per: int) -> Any:
    """Returns the number of parts of each of ``rows`` selections that gives ``per`` programs per multiprocessor.

    It depends on the number of queries, and so do the last bits. Deterministic algorithms never split.
    """
    if b.deterministic:
        return 1
    wanted = per * b.device_props().sm_count
    rows = b.max(rows, 1)
    return b.max(1, b.min(MAX_SPLITS, b.cdiv(wanted + 1, rows) - 1))


def parts(b: Any, rows: Any, NS: Any, *shape: int) -> Any:
    """Allocates a buffer [rows * NS, *shape], which is empty where nothing is split."""
    return b.empty((rows * NS * b.min(NS - 1, 1), *shape), b.f32)


def combine_programs(b: Any, rows: Any, NS: Any) -> Any:
    """Returns the programs of a kernel that combines NS splits of each of ``rows`` rows.

    That is 0 without splits, and at least 1 if their number is symbolic.
    """
    if b.is_static(NS):
        return 0 if NS == 1 else rows
    return b.max(1, rows * b.min(NS - 1, 1))


@dataclasses.dataclass(frozen=True)
class _Call:
    """Arguments shared by forward and backward: the selections' source, sizes and the grid."""

    args: dict[str, Any]
    constexprs: dict[str, Any]
    config: GatherConfig
    rows: Any
    NS: Any

    def grid(self) -> tuple[Any, int, int]:
        """Returns the grid: one program per selection, block of heads and split."""
        H, HB = self.constexprs["H"], self.config.HB
        return (self.rows * -(-H // HB) * self.NS, 1, 1)

    def parts(self, b: Any, *shape: int) -> Any:
        """Allocates a buffer [rows * NS, *shape], which is empty where nothing is split."""
        return parts(b, self.rows, self.NS, *shape)


def _call(
    b: Any, q: Any, k: Any, v: Any, ranges: Any, cu_q: Any, cu_k: Any, scale: float, c: GatherConfig | None, NS: Any,
    segments: Segments, pieces: Pieces | None = None,
) -> _Call:  # fmt: skip
    B, S, G, h, DK = b.shape(q)
    S_kv, DV = b.shape(v)[2:]
    h, DK, DV, r = (b.static(x) for x in (h, DK, DV, b.shape(ranges)[3]))
    q, k, v = (b.strided(t) for t in (q, k, v))
    dtype, device = b.dtype(q), b.device_props()
    c = c or gather_config(h, DK, DV, dtype.itemsize, device.arch, device.backend)
    rows = B * S * G
    NS = splits(b, rows * -(-h // c.HB), c.per) if NS is None else NS
    few = r <= FEW
    ends = totals = ranges
    if few:
        ranges = b.contiguous(ranges)
    else:
        pieces = pieces or plan_pieces(b, ranges, cu_q, cu_k, S_kv, count=True)
        ends, totals = pieces.ends, pieces.totals
    varlen = few and cu_q is not None
    cu_q = b.contiguous(cu_q) if varlen else ranges
    cu_k = b.contiguous(cu_k) if varlen and cu_k is not None else cu_q
    (sqb, sqs, sqg, sqh), (skb, skg, skn), (svb, svg, svn) = (tuple(b.strides(t))[:-1] for t in (q, k, v))
    args = dict(
        q_ptr=q, k_ptr=k, v_ptr=v, ranges_ptr=ranges, cu_q_ptr=cu_q, cu_k_ptr=cu_k, ends_ptr=ends, totals_ptr=totals,
        scale=scale, S=S, S_kv=S_kv, G=G, N=b.shape(cu_q)[0] - 1 if varlen else 0, NS=NS, sqb=sqb, sqs=sqs, sqg=sqg, sqh=sqh,
        skb=skb, skg=skg, skn=skn, svb=svb, svg=svg, svn=svn, **segments.args(),
    )  # fmt: skip
    KC, VC = (max(16, min(c.DC, power_of_two(D))) for D in (DK, DV))
    constexprs = dict(
        H=h, DK=DK, DV=DV, KC=KC, VC=VC, NK=-(-DK // KC), NV=-(-DV // VC), HELD=c.held, R=r, RP=power_of_two(r), HB=c.HB, BN=c.BN, FEW=few, VARLEN=varlen,
        ALIGN=alignment(b, q, k, v), PREC=dot_precision(b, dtype), SEG=segments.given,
    )  # fmt: skip
    return _Call(args, constexprs, c, rows, NS)


def plan_gather(
    b: Any, q: Any, k: Any, v: Any, ranges: Any, sink: Any, cu_q: Any, cu_k: Any, scale: float,
    config: GatherConfig | None = None, NS: Any = None, segments: Segments = NONE,
) -> tuple[Any, Any]:  # fmt: skip
    """Launches the forward; returns o[B, S, G, h, Dv], lse[B, S, G, h]. ``config``, ``NS``: for measurements."""
    call = _call(b, q, k, v, ranges, cu_q, cu_k, scale, config, NS, segments)
    B, S, G, h, _ = b.shape(q)
    DV = call.constexprs["DV"]
    o, lse = b.empty((B, S, G, h, DV), b.dtype(q)), b.empty((B, S, G, h), b.f32)
    part, plse = call.parts(b, h, DV), call.parts(b, h)
    has_sink = sink is not None
    sink = b.contiguous(sink) if has_sink else lse
    c = call.config
    b.launch(
        selection_gather,
        call.grid(),
        dict(call.args, sink_ptr=sink, o_ptr=o, lse_ptr=lse, part_ptr=part, plse_ptr=plse),
        dict(call.constexprs, SINK=has_sink),
        c.num_warps, c.num_stages,
    )  # fmt: skip
    plan_combine(b, part, plse, sink if has_sink else None, o, lse, call.NS)
    return o, lse


def plan_combine(b: Any, part: Any, plse: Any, sink: Any, o: Any, lse: Any, NS: Any, pnorm: Any = None) -> None:
    """Launches the kernel that combines NS splits of each query's keys to o and lse, unless NS is 1.

    part[B * S * G * NS, h, Dv] and plse[B * S * G * NS, h] come from the forward; ``sink`` is contiguous or None. With
    ``pnorm``, of plse's shape, plse holds the maxima of the splits in natural units, and pnorm their sums of weights.
    """
    B, S, G, h, DV = b.shape(o)
    h, DV = b.static(h), b.static(DV)
    programs = combine_programs(b, B * S * G * h, NS)
    if b.is_static(programs) and programs == 0:
        return
    b.launch(
        selection_combine,
        (programs, 1, 1),
        dict(part_ptr=part, plse_ptr=plse, pnorm_ptr=pnorm,
             sink_ptr=lse if sink is None else sink, o_ptr=o, lse_ptr=lse, G=G, NS=NS),
        dict(H=h, DV=DV, VP=power_of_two(DV), CS=COMBINE, SINK=sink is not None, NATURAL=pnorm is not None),
        1, 1,
    )  # fmt: skip


def plan_gather_dq(
    b: Any, dout: Any, q: Any, k: Any, v: Any, ranges: Any, cu_q: Any, cu_k: Any, lse2: Any, delta: Any, scale: float,
    config: GatherConfig | None = None, NS: Any = None, pieces: Pieces | None = None,
    segments: Segments = NONE,
) -> Any:  # fmt: skip
    """Launches dq's kernels; returns dq, contiguous, in q's shape and dtype.

    dout[B, S, G, h, Dv] is contiguous or None; lse2 and delta[B, S, G, h] come from ``plan_delta``; pieces, if the
    caller has them, must have totals.
    """
    call = _call(b, q, k, v, ranges, cu_q, cu_k, scale, config, NS, segments, pieces)
    h, DK = call.constexprs["H"], call.constexprs["DK"]
    dq = b.empty(b.shape(q), b.dtype(q))
    part = call.parts(b, h, DK)
    c = call.config
    b.launch(
        selection_gather_dq,
        call.grid(),
        dict(call.args, dout_ptr=q if dout is None else dout, lse2_ptr=lse2, delta_ptr=delta, dq_ptr=dq, part_ptr=part),
        dict(call.constexprs, DOUT=dout is not None),
        c.num_warps, c.num_stages,
    )  # fmt: skip
    programs = combine_programs(b, call.rows * h, call.NS)
    if not (b.is_static(programs) and programs == 0):
        b.launch(
            selection_dq_sum, (programs, 1, 1), dict(part_ptr=part, dq_ptr=dq, NS=call.NS),
            dict(H=h, D=DK, DP=power_of_two(DK), CS=COMBINE if DK <= 512 else COMBINE // 2), 1, 1,
        )  # fmt: skip
    return dq
