# SPDX-License-Identifier: Apache-2.0
"""Launch plans of the gather path. B, S and S_kv may be symbolic.

Workspace besides inputs and outputs, in bytes: where the keys of a query are split, 4 G h (Dv + 1) for each of B S NS
splits, which is at most 32 (Dv + 1) h per multiprocessor; nothing where B S G queries fill the device. Above FEW ranges
per query, 12 B G S r for pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..launch import launch
from ..operands import attention, power_of_two, strided
from .config import padded, tiled
from .gather import selection_combine, selection_dq_sum, selection_gather, selection_gather_dq
from .pieces_plan import NONE, Pieces, plan_pieces

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


def _values(
    b: Any, q: Any, k: Any, v: Any, ranges: Any, cu_q: Any, cu_k: Any, scale: float, c: GatherConfig | None, NS: Any,
    segments: Mapping[str, Any], pieces: Pieces | None = None,
) -> tuple[dict[str, Any], GatherConfig, Any, Any]:  # fmt: skip
    """Returns the values that forward and dq share, their configuration, and the numbers of selections and programs."""
    q, k, v = strided(b, q, k, v)
    x, r, device = attention(b, q, k, v), b.static(b.shape(ranges)[3]), b.device_props()
    h, DK, DV = (x[name] for name in ("H", "DK", "DV"))
    c = c or gather_config(h, DK, DV, b.dtype(q).itemsize, device.arch, device.backend)
    rows, blocks = b.shape(q)[0] * x["S"] * x["G"], -(-h // c.HB)
    NS = splits(b, rows * blocks, c.per) if NS is None else NS
    few = r <= FEW
    ends = totals = ranges
    if few:
        ranges = b.contiguous(ranges)
    else:
        pieces = pieces or plan_pieces(b, ranges, cu_q, cu_k, x["S_kv"], count=True)
        ends, totals = pieces.ends, pieces.totals
    varlen = few and cu_q is not None
    cu_q = b.contiguous(cu_q) if varlen else ranges
    cu_k = b.contiguous(cu_k) if varlen and cu_k is not None else cu_q
    KC, VC = (max(16, min(c.DC, power_of_two(D))) for D in (DK, DV))
    x.update(
        segments, ranges=ranges, cu_q=cu_q, cu_k=cu_k, ends=ends, totals=totals, scale=scale, NS=NS, KC=KC, VC=VC,
        N=b.shape(cu_q)[0] - 1 if varlen else 0, NK=-(-DK // KC), NV=-(-DV // VC), HELD=c.held, R=r, RP=power_of_two(r),
        FEW=few, VARLEN=varlen,
    )  # fmt: skip
    return x, c, rows, rows * blocks * NS


def plan_gather(
    b: Any, q: Any, k: Any, v: Any, ranges: Any, sink: Any, cu_q: Any, cu_k: Any, scale: float,
    config: GatherConfig | None = None, NS: Any = None, segments: Mapping[str, Any] = NONE,
) -> tuple[Any, Any]:  # fmt: skip
    """Launches the forward; returns o[B, S, G, h, Dv], lse[B, S, G, h]. ``config``, ``NS``: for measurements."""
    x, c, rows, programs = _values(b, q, k, v, ranges, cu_q, cu_k, scale, config, NS, segments)
    B, S, G, h, _ = b.shape(q)
    h, DV, NS = x["H"], x["DV"], x["NS"]
    o, lse = b.empty((B, S, G, h, DV), b.dtype(q)), b.empty((B, S, G, h), b.f32)
    part, plse = parts(b, rows, NS, h, DV), parts(b, rows, NS, h)
    sink, SINK = (lse, False) if sink is None else (b.contiguous(sink), True)
    launch(b, selection_gather, programs, c, x, sink=sink, o=o, lse=lse, part=part, plse=plse, SINK=SINK)
    plan_combine(b, part, plse, sink if SINK else None, o, lse, NS)
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
    launch(
        b, selection_combine, programs, (1, 1), part=part, plse=plse, pnorm=pnorm, sink=lse if sink is None else sink, o=o,
        lse=lse, G=G, NS=NS, H=h, DV=DV, VP=power_of_two(DV), CS=COMBINE, SINK=sink is not None, NATURAL=pnorm is not None,
    )  # fmt: skip


def plan_gather_dq(
    b: Any, dout: Any, q: Any, k: Any, v: Any, ranges: Any, cu_q: Any, cu_k: Any, lse2: Any, delta: Any, scale: float,
    config: GatherConfig | None = None, NS: Any = None, pieces: Pieces | None = None,
    segments: Mapping[str, Any] = NONE,
) -> Any:  # fmt: skip
    """Launches dq's kernels; returns dq, contiguous, in q's shape and dtype.

    dout[B, S, G, h, Dv] is contiguous or None; lse2 and delta[B, S, G, h] come from ``plan_delta``; pieces, if the
    caller has them, must have totals.
    """
    x, c, rows, programs = _values(b, q, k, v, ranges, cu_q, cu_k, scale, config, NS, segments, pieces)
    h, DK, NS = x["H"], x["DK"], x["NS"]
    dq, part = b.empty(b.shape(q), b.dtype(q)), parts(b, rows, NS, h, DK)
    launch(
        b, selection_gather_dq, programs, c, x, dout=q if dout is None else dout, lse2=lse2, delta=delta, dq=dq, part=part,
        DOUT=dout is not None,
    )  # fmt: skip
    plan_dq_sum(b, part, dq, combine_programs(b, rows * h, NS), NS, COMBINE if DK <= 512 else COMBINE // 2)
    return dq


def plan_dq_sum(b: Any, part: Any, dq: Any, programs: Any, NS: Any, CS: int) -> None:
    """Launches the kernel that adds NS parts of dq, unless there are no programs; CS parts at a time."""
    if b.is_static(programs) and programs == 0:
        return
    H, D = (b.static(n) for n in b.shape(dq)[3:])
    launch(b, selection_dq_sum, programs, (1, 1), part=part, dq=dq, NS=NS, H=H, D=D, DP=power_of_two(D), CS=CS)
