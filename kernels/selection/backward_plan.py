# SPDX-License-Identifier: Apache-2.0
"""Launch plans of the backward of selection attention. B, S and S_kv may be symbolic; everything else is known.

Memory besides inputs and outputs, in bytes: 8 per row (b, s, g, h), plus 4 with a sink and dlse; the bitmaps and lists
of the forward's tile path; 24 per key tile. Further memory depends on the device alone: P programs have two slots of
one key tile in fp32 each, and 12 CAP bytes of scratch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..launch import launch
from ..operands import attention, contiguous, power_of_two, strided
from . import config
from .delta import selection_delta, selection_dsink, selection_dsink_parts
from .dkv import selection_dkv, selection_dkv_count, selection_dkv_fix, selection_dkv_prefix
from .dkv_few import selection_dkv_few
from .dq import selection_dq
from .gather_plan import FEW, plan_gather_dq
from .pieces_plan import Pieces, plan_pieces, plan_segments
from .tile_lists_plan import TileLists, plan_lists

DELTA_ROWS = 32
DSINK_PARTS = 128
DSINK_ROWS = 16
CAP = 2048  # queries of a key tile that a program lists at a time
SETUP = 16  # cost of starting on a key tile, in iterations
WORDS = 64  # words of a bitmap's column that a program reads at a time
FEW_QUERIES = 256  # up to so many queries, pieces are read tile by tile, without lists
FEW_TILES = 16  # key tiles per program where queries are few; less than the bits of a word


@dataclasses.dataclass(frozen=True)
class KeyConfig:
    """Configuration of dK and dV.

    Key tiles of BN keys, ROWS rows of queries x heads per iteration, D in tiles of DC, ``per`` programs per
    multiprocessor.
    """

    BN: int
    ROWS: int
    DC: int
    num_warps: int
    num_stages: int
    per: int = 2


# (key tile, dQ's rows (0: the gather path), warps, stages, then rows, warps, stages of dK and dV). The rows that dK and
# dV gather are fetched one iteration ahead with three stages and two with five, because their addresses are loaded too.
Choices = tuple[tuple[int, int, int, int, int, int, int], ...]
_NARROW: Choices = ((64, 64, 4, 2, 32, 4, 5), (64, 32, 4, 1, 32, 4, 1), (32, 32, 4, 1, 16, 4, 1))
_WIDE: Choices = (
    (32, 64, 8, 2, 32, 8, 3),
    (32, 32, 8, 2, 32, 8, 3),
    (32, 32, 8, 1, 32, 8, 1),
    (32, 16, 8, 1, 16, 8, 1),
    (16, 0, 0, 0, 16, 8, 1),
)
_NARROW_FP32: Choices = ((32, 32, 4, 2, 32, 8, 3), (32, 32, 4, 1, 32, 8, 1), (16, 16, 4, 1, 16, 8, 1))
_WIDE_FP32: Choices = ((32, 0, 0, 0, 16, 8, 1), (16, 0, 0, 0, 16, 8, 1))


def backward_config(
    h: int, DK: int, DV: int, itemsize: int, backend: str, arch: int
) -> tuple[config.ForwardConfig | None, KeyConfig] | None:
    """Returns dQ's tiles (None if dQ gathers keys) and those of dK and dV, or None if shared memory holds neither."""
    KP, VP = config.tiled(DK), config.tiled(DV)
    D = max(KP, VP)
    # Reserves shared memory for exchanges between warps.
    limit = config.shared_limit(backend, arch) - ((2 if D <= 256 else 6) << 10)
    # An fp32 product keeps each factor in parts.
    room = limit * 7 // 8 if itemsize == 4 and D > 128 else limit
    choices = {(4, True): _WIDE_FP32, (4, False): _NARROW_FP32, (2, True): _WIDE, (2, False): _NARROW}[
        itemsize, D > 128
    ]
    columns = min(D, 64 if itemsize == 4 and D > 512 else 128)
    for BN, rows, warps, stages, key_rows, key_warps, key_stages in choices:
        if D > 256 and (rows == 64 or BN * itemsize == 128):  # the accumulators would not fit into the registers
            continue
        if rows and D > 512:  # dQ's tiles are padded to powers of two
            continue
        ahead = (key_stages + 1) // 2
        if itemsize * (KP + VP) * max(rows + stages * BN, BN + ahead * key_rows) <= room:
            dq = config.ForwardConfig(*config.tile_of(rows, h), BN, warps, stages) if rows else None
            return dq, KeyConfig(BN, key_rows, columns, key_warps, key_stages)
    return None


def unsupported(b: Any, *tensors: Any) -> str | None:
    """Returns why these inputs run the reference's backward instead of the kernels, or None if they run the kernels."""
    from . import plan

    reason = plan.unsupported(b, *tensors)
    if reason is None:
        q, o = [t for t in tensors if len(b.shape(t)) == 5 and "float" in str(b.dtype(t))][-2:]
        props = b.device_props()
        DK, DV = b.static(b.shape(q)[4]), b.static(b.shape(o)[4])
        if backward_config(1, DK, DV, b.dtype(q).itemsize, props.backend, props.arch) is None:
            reason = (
                f"shared memory of this device does not hold the backward's tiles at D = {max(DK, DV)}, {b.dtype(q)}"
            )
    return reason


def unsupported_sizes(b: Any, dout: Any, dlse: Any, *args: Any) -> str | None:
    """Returns why these sizes run the reference instead of the kernels, or None if they run the kernels."""
    from . import plan

    return plan.unsupported_sizes(b, *args)


def plan_delta(b: Any, dout: Any, dlse: Any, sink: Any, o: Any, lse: Any, bias: bool = False) -> tuple[Any, Any, Any]:
    """Launches the kernels of lse2, delta[B, S, G, h] and dsink[G, h] (shape [0] without a sink).

    dout and dlse must be contiguous, or None. ``bias``: whether lse may be as low as the lowest number.
    """
    B, S, G, h, DV = b.shape(o)
    G, h, DV = (b.static(x) for x in (G, h, DV))
    lse2, delta = b.empty((B, S, G, h), b.f32), b.empty((B, S, G, h), b.f32)
    both = sink is not None and dlse is not None
    dot = b.empty((B, S, G, h), b.f32) if both else delta
    launch(
        b, selection_delta, b.cdiv(B * S * G * h, DELTA_ROWS), (4, 1), dout=o if dout is None else dout, o=o, lse=lse,
        dlse=lse if dlse is None else dlse, sink=lse if sink is None else sink, lse2=lse2, delta=delta, dot=dot,
        rows=B * S * G * h, GH=G * h, DV=DV, VP=power_of_two(DV), ROWS=DELTA_ROWS, DOUT=dout is not None,
        DLSE=dlse is not None, SINK=sink is not None, BIAS=bias,
    )  # fmt: skip
    if sink is None:
        return lse2, delta, b.empty((0,), b.f32)
    dsink, part = b.empty((G, h), b.dtype(sink)), b.empty((DSINK_PARTS, G * h), b.f32)
    cols = min(128, power_of_two(G * h))
    blocks, values = -(-G * h // cols), dict(part=part, GH=G * h, COLS=cols, PARTS=DSINK_PARTS)
    launch(
        b, selection_dsink_parts, (DSINK_PARTS, blocks), (4, 1), values, dot=dot, lse2=lse2, sink=sink, tokens=B * S,
        ROWS=DSINK_ROWS,
    )  # fmt: skip
    launch(b, selection_dsink, blocks, (4, 1), values, out=dsink)
    return lse2, delta, dsink


def _plan_dq(b: Any, c: config.ForwardConfig, lists: TileLists, x: dict[str, Any], q: Any) -> Any:
    """Launches dq's kernel on the tile path, over lists of key tiles for ``c``."""
    dq, programs = b.empty(b.shape(q), b.dtype(q)), b.shape(q)[0] * x["G"] * lists.NQ * -(-x["H"] // c.HB)
    launch(b, selection_dq, programs, c, x, lists.values(b, x["DK"], x["DV"]), dq=dq)
    return dq


def _key_values(b: Any, c: KeyConfig, pieces: Pieces, x: dict[str, Any], dk: Any, dv: Any) -> dict[str, Any]:
    """Returns the values that both kernels of dk and dv take."""
    DK, DV = x["DK"], x["DV"]
    return dict(
        x, **vars(pieces), dk=dk, dv=dv, NT=b.cdiv(x["S_kv"], c.BN), NK=-(-DK // c.DC), NV=-(-DV // c.DC),
        R=b.static(b.shape(pieces.starts)[3]), DOUT_ALIGN=min(16 // b.dtype(x["q"]).itemsize, DV & -DV),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class KeyRuns:
    """Equal runs of the iterations of dK and dV over all key tiles, one for each of P programs, as :mod:`dkv` has them."""

    P: int
    values: dict[str, Any]
    BN: int

    @classmethod
    def of(
        cls, b: Any, c: KeyConfig, keys: Any, counts: Any, lb: Any, lg: Any, QB: int, CHUNKS: int, EACH: int
    ) -> KeyRuns:  # fmt: skip
        """Launches the kernel that adds up the work of keys[B, G, S_kv, D]; the others are those of ``selection_dkv_prefix``."""
        B, G, S_kv, _ = b.shape(keys)
        NT = b.cdiv(S_kv, c.BN)
        prefix = b.empty((B * G * NT + 1,), b.i64)
        P = c.per * b.device_props().sm_count
        values = dict(prefix=prefix, units=B * G * NT, NT=NT, P=P, BN=c.BN, COST=SETUP)
        launch(
            b, selection_dkv_prefix, 1, (4, 1), values, counts=counts, G=G, lb=lb, lg=lg, EACH=EACH, QB=QB, CHUNKS=CHUNKS,
            UB=1024,
        )  # fmt: skip
        return cls(P, values, c.BN)

    def slots(self, b: Any, D: int) -> Any:
        """Allocates what programs write of the key tiles that they share with others."""
        return b.empty((self.P, 2, self.BN, D), b.f32)

    def finish(self, b: Any, slot: Any, out: Any) -> None:
        """Launches the kernel that adds up the slots to out[B, G, S_kv, D]."""
        *_, S_kv, D = b.shape(out)
        D = b.static(D)
        BR = 16 if D <= 512 else 8
        values = dict(self.values, slot=slot, out=out, S_kv=S_kv, D=D, DP=power_of_two(D), BR=BR)
        launch(b, selection_dkv_fix, (self.P, self.BN // BR), (4, 1), values)


def plan_dkv(b: Any, c: KeyConfig, pieces: Pieces, x: dict[str, Any], k: Any, v: Any) -> tuple[Any, Any]:
    """Launches the kernels of dk and dv; returns (dk, dv).

    The pieces must have bitmaps of key tiles of c.BN keys.
    """
    # The kernels skip key tiles that no query selects.
    dk, dv = (b.zeros(b.shape(t), b.dtype(t)) for t in (k, v))
    values = _key_values(b, c, pieces, x, dk, dv)
    B, G, NT, r = b.shape(k)[0], x["G"], values["NT"], values["R"]
    HP = power_of_two(x["H"])
    HB = min(HP, c.ROWS)
    QB, chunks = c.ROWS // HB, HP // HB
    counts = b.empty((B * G * NT, 4), b.i32)
    W = b.cdiv(x["S"], 32)
    launch(b, selection_dkv_count, (B * G, b.cdiv(NT, 32)), (4, 1), values, counts=counts, W=W, TB=32, WB=64)
    runs = KeyRuns.of(b, c, k, counts, G * NT, NT, QB, chunks, EACH=4)
    lists, bits = (b.empty((runs.P, CAP + QB, *n), b.i32) for n in ((), (2,)))
    slot_k, slot_v = runs.slots(b, x["DK"]), runs.slots(b, x["DV"])
    launch(
        b, selection_dkv, runs.P, c, values, runs.values, counts=counts, list=lists, bits=bits, slot_k=slot_k, slot_v=slot_v,
        HB=HB, QB=QB, CHUNKS=chunks, RP=power_of_two(r), STEPS=r.bit_length(), CAP=CAP, WB=WORDS, EB=128 if r > 32 else 64,
    )  # fmt: skip
    for slot, out in ((slot_k, dk), (slot_v, dv)):
        runs.finish(b, slot, out)
    return dk, dv


def few_config(h: int, DK: int, DV: int, itemsize: int) -> KeyConfig:
    """Returns the configuration of dk and dv where queries are few."""
    D = max(config.padded(DK), config.padded(DV))
    if D > 128 or itemsize == 4:
        return KeyConfig(16, 16, min(D, 64 if itemsize == 4 else 128), 8, 1)
    return KeyConfig(16, max(16, min(32, power_of_two(h))), D, 2, 1)


def plan_dkv_few(b: Any, c: KeyConfig, pieces: Pieces, x: dict[str, Any], k: Any, v: Any) -> tuple[Any, Any]:
    """Launches the kernel of dk and dv for at most FEW_QUERIES queries; returns (dk, dv).

    The pieces must have bitmaps of key tiles of c.BN keys.
    """
    dk, dv = (b.empty(b.shape(t), b.dtype(t)) for t in (k, v))
    values = _key_values(b, c, pieces, x, dk, dv)
    programs = b.shape(k)[0] * x["G"] * b.cdiv(values["NT"], FEW_TILES)
    RC, W = min(512, power_of_two(values["R"])), -(-b.static(x["S"]) // 32)
    launch(b, selection_dkv_few, programs, c, values, RC=RC, TILES=FEW_TILES, W=W)
    return dk, dv


def plan_selection_attention_backward(
    b: Any, dout: Any, dlse: Any, q: Any, k: Any, v: Any, ranges: Any, sink: Any, cu_q: Any, cu_k: Any, o: Any, lse: Any,
    scale: Any, seg_q: Any = None, seg_k: Any = None,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Launches ``selection_attention_backward``; returns (dq, dk, dv, dsink)."""
    from .plan import takes_tiles

    q, k, v = strided(b, q, k, v)
    dout, dlse, sink, o, lse = contiguous(b, dout, dlse, sink, o, lse)
    lse2, delta, dsink = plan_delta(b, dout, dlse, sink, o, lse)
    segments, props = plan_segments(b, seg_q, seg_k), b.device_props()
    x = dict(attention(b, q, k, v), **segments, dout=q if dout is None else dout, lse2=lse2, delta=delta, scale=scale,
             DOUT=dout is not None)  # fmt: skip
    S, h, DK, DV, r = *(x[name] for name in ("S", "H", "DK", "DV")), b.static(b.shape(ranges)[3])
    found = backward_config(h, DK, DV, b.dtype(q).itemsize, props.backend, props.arch)
    assert found is not None, "unsupported"
    queries, keys = found
    if queries is not None and takes_tiles(b, S, r):
        lists = plan_lists(b, k, v, ranges, cu_q, cu_k, queries.QT, queries.BN, segments)
        return _plan_dq(b, queries, lists, x, q), *plan_dkv(b, keys, lists.pieces, x, k, v), dsink
    few = b.is_static(S) and S <= FEW_QUERIES
    if few:
        keys = few_config(h, DK, DV, b.dtype(q).itemsize)
    pieces = plan_pieces(b, ranges, cu_q, cu_k, x["S_kv"], tile=keys.BN, count=r > FEW, segments=segments)
    dq = plan_gather_dq(b, dout, q, k, v, ranges, cu_q, cu_k, lse2, delta, scale, pieces=pieces, segments=segments)
    return dq, *(plan_dkv_few if few else plan_dkv)(b, keys, pieces, x, k, v), dsink
