# SPDX-License-Identifier: Apache-2.0
"""Launch plans of selection attention under a mask. B, S and S_kv may be symbolic; everything else is known.

Memory besides inputs and outputs, in bytes: 6 per pair of a tile of queries and a tile of keys, for each B and G of the
mask that is not broadcast; 8 per row (b, s, g, h) in the backward, 16 under a mask of floats, and 8 per key tile and two
slots of one key tile in fp32 for each of P programs. Nothing can overflow: a list has room for all tiles.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..launch import launch
from ..operands import above, alignment, attention, contiguous, power_of_two, strided, strides
from . import plan
from .backward_plan import KeyConfig, KeyRuns, backward_config, plan_delta
from .lists_config import ListConfig, list_config, widths
from .mask_dkv import selection_mask_dkv
from .mask_dq import selection_mask_dq, selection_mask_shares
from .mask_forward import selection_mask_forward
from .mask_tiles import selection_mask_lists, selection_mask_tiles
from .tile_lists_plan import LIST_BLOCK, plan_finite

ROWS = 64  # rows of queries x heads a program
PASS = 2048  # elements of the mask that a program looks at together
_FILLS = {"torch.float32": -1.7014117331926443e38, "torch.bfloat16": -1.6947657e38}
"""Half of finfo.min. A fill of fp16 is too small to hide a key whatever the scores are, and stays in the lists."""
_NO_FILL = -1e30  # below all numbers of fp16. Generated code could not spell -inf


def unsupported(b: Any, *tensors: Any) -> str | None:
    """Returns None: which tensor is the mask, :func:`unsupported_sizes` knows."""
    return None


def unsupported_sizes(b: Any, *args: Any) -> str | None:
    """Returns why these inputs run the reference instead of the kernels, or None if they run the kernels."""
    backward = len(args) > 7
    q, k, v = args[2:5] if backward else args[:3]
    DV = b.static(args[-1])
    reason = plan.unsupported(b, *(t for t in (q, k, v) if t is not None)) or above(DV, plan.MAX_DV, "Dv = {} is")
    if reason is None and backward and _key_config(b, q, DV) is None:
        return f"shared memory of this device does not hold the backward's tiles at D = {b.static(b.shape(q)[4])}"
    return reason


def tile_config(DK: int, DV: int, itemsize: int, backend: str, arch: int, shared: bool, backward: bool) -> ListConfig:
    """Returns the configuration of the forward or of dQ, whose HB counts rows: neighbouring queries x heads."""
    c = list_config(ROWS, DK, DV, itemsize, backend, arch, shared, backward)
    if not c.held or max(DK, DV) <= 128:
        return c
    if not backward:  # tiles of 64 keys spill, and leave shared memory no room for another version of Triton
        return dataclasses.replace(c, BN=min(32, c.BN), num_warps=8)
    # Rows that are read again leave room in registers and shared memory. Products of 64 rows need those of sm_90.
    c = dataclasses.replace(c, HB=ROWS if arch >= 90 else ROWS // 2, BN=32, MC=64, num_warps=8, num_stages=1)
    wide = backend == "cuda" and 90 <= arch < 120 and max(DK, DV) <= 512
    return dataclasses.replace(c, BN=64, MC=128) if wide else c


def _key_config(b: Any, q: Any, DV: int) -> KeyConfig | None:
    props, (h, DK) = b.device_props(), (b.static(n) for n in b.shape(q)[3:])
    found = backward_config(h, DK, DV, b.dtype(q).itemsize, props.backend, props.arch)
    return None if found is None else found[1]


@dataclasses.dataclass(frozen=True)
class _Masked:
    """A mask with its strides, and the lists of tiles of QT queries x BN keys."""

    args: dict[str, Any]
    bias: bool

    def lists(self, b: Any, S: Any, S_kv: Any, QT: int, BN: int, by_key: bool = False) -> dict[str, Any]:
        """Launches the pass over the mask and the lists of a config; returns the kernels' arguments."""
        NQ, NT = b.cdiv(S, QT), b.cdiv(S_kv, BN)
        mask = self.args["mask"]
        MB, MG = (
            1 if b.is_static(stride) and stride == 0 else b.shape(mask)[d]
            for d, stride in ((0, self.args["smb"]), (2, self.args["smg"]))
        )
        rows, n = (NT, NQ) if by_key else (NQ, NT)
        values = dict(
            self.args, codes=b.empty((MB, MG, NQ, NT), b.i16), near=b.empty((MB, MG, NQ), b.i32), S=S, S_kv=S_kv, NT=NT, NQ=NQ,
            lists=b.empty((MB, MG, rows, n), b.i32), counts=b.empty((MB, MG, rows, 2), b.i32), BIAS=self.bias, QT=QT, BN=BN,
        )  # fmt: skip
        launch(
            b, selection_mask_tiles, MB * MG * NQ, (8 if QT * BN > PASS else 4, 1), values, G=MG, TB=max(1, PASS // (QT * BN)),
            FILL=_FILLS.get(str(b.dtype(mask)), _NO_FILL), ALIGN=_alignment(b, mask),
        )  # fmt: skip
        launch(b, selection_mask_lists, MB * MG * rows, (2, 1), values, BY_KEY=by_key, TB=LIST_BLOCK)
        return dict(values, lb=0 if MB == 1 else MG * rows, lg=0 if MG == 1 else rows)


def _alignment(b: Any, mask: Any) -> int:
    """Returns how many elements one load of the mask may take: a power of two, at most 16 bytes."""
    most = alignment(b, mask)
    while most > 1 and not b.is_multiple(b.shape(mask)[3], most):
        most //= 2
    return most


def _masked(b: Any, mask: Any) -> _Masked:
    mask = b.laid_out(mask)
    return _Masked(dict(strides(b, mask, "smb sms smg smk"), mask=mask), str(b.dtype(mask)) != "torch.bool")


def _tiling(b: Any, q: Any, v: Any, DV: int, backward: bool) -> tuple[ListConfig, dict[str, Any]]:
    """Returns the configuration of the forward or of dQ, and its constants."""
    props, (h, DK) = b.device_props(), (b.static(n) for n in b.shape(q)[3:])
    c = tile_config(DK, DV, b.dtype(q).itemsize, props.backend, props.arch, v is None, backward)
    (KM, KT), (VM, VT) = widths(DK, c.MC), widths(DV, c.MC)
    HB = min(power_of_two(h), c.HB)
    return c, dict(DV=DV, KM=KM, VM=VM, MC=c.MC, KT=KT, VT=VT, QT=c.HB // HB, HB=HB, BN=c.BN)


def plan_selection_mask_attention(
    b: Any, q: Any, k: Any, v: Any, mask: Any, sink: Any, scale: Any, v_width: Any
) -> tuple[Any, Any]:
    """Launches ``selection_mask_attention``; returns (o, lse)."""
    q, k, v = strided(b, q, k, v)
    (B, S, G, *_), S_kv, DV = b.shape(q), b.shape(k)[2], b.static(v_width)
    x, (c, tiling), masked = attention(b, q, k, v, DV), _tiling(b, q, v, DV, False), _masked(b, mask)
    h = x["H"]
    o, lse = b.empty((B, S, G, h, DV), b.dtype(q)), b.empty((B, S, G, h), b.f32)
    lists = masked.lists(b, S, S_kv, tiling["QT"], c.BN)
    launch(
        b, selection_mask_forward, B * G * lists["NQ"] * -(-h // tiling["HB"]), c, x, lists, tiling,
        flags=plan_finite(b, k, v, DV, c.BN), sink=lse if sink is None else b.contiguous(sink), o=o, lse=lse, scale=scale,
        HELD=c.held, SHARED=v is None and tiling["VM"] * c.MC == DV, SINK=sink is not None,
    )  # fmt: skip
    return o, lse


def plan_selection_mask_attention_backward(
    b: Any, dout: Any, dlse: Any, q: Any, k: Any, v: Any, mask: Any, sink: Any, o: Any, lse: Any, scale: Any, v_width: Any
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Launches ``selection_mask_attention_backward``; returns (dq, dk, dv, dsink)."""
    dout, dlse, sink, o, lse = contiguous(b, dout, dlse, sink, o, lse)
    q, k, v = strided(b, q, k, v)
    (B, S, G, *_), S_kv, DV = b.shape(q), b.shape(k)[2], b.static(v_width)
    x, (c, tiling), masked = attention(b, q, k, v, DV), _tiling(b, q, v, DV, True), _masked(b, mask)
    h, DK = x["H"], x["DK"]
    base, delta, dsink = plan_delta(b, dout, dlse, sink, o, lse)
    lists = masked.lists(b, S, S_kv, tiling["QT"], c.BN)
    programs = B * G * lists["NQ"] * -(-h // tiling["HB"])
    share = base
    if masked.bias:
        base, share = b.empty((B, S, G, h), b.f32), b.empty((B, S, G, h), b.f32)
    x.update(
        dout=q if dout is None else dout, base=base, share=share, delta=delta, scale=scale, DOUT=dout is not None,
        SHARED=v is None,
    )  # fmt: skip
    if masked.bias:
        launch(
            b, selection_mask_shares, programs, (c.num_warps, 1), x, lists, tiling, lse=lse, sink=lse if sink is None else sink,
            dlse=lse if dlse is None else dlse, SINK=sink is not None, DLSE=dlse is not None,
        )  # fmt: skip
    dq, flags = b.empty((B, S, G, h, DK), b.dtype(q)), plan_finite(b, k, v, DV, c.BN)
    launch(b, selection_mask_dq, programs, c, x, lists, tiling, flags=flags, dq=dq)
    kc = _key_config(b, q, DV)
    assert kc is not None  # unsupported_sizes has asked
    HB = min(power_of_two(h), kc.ROWS)
    lists = masked.lists(b, S, S_kv, kc.ROWS // HB, kc.BN, by_key=True)
    # The kernels skip key tiles that no query sees.
    dk = b.zeros((B, G, S_kv, DK), b.dtype(k))
    dv = b.empty((0,), b.dtype(k)) if v is None else b.zeros((B, G, S_kv, DV), b.dtype(v))
    CHUNKS = power_of_two(h) // HB
    runs = KeyRuns.of(b, kc, k, lists["counts"], lists["lb"], lists["lg"], 1, CHUNKS, EACH=2)
    slot_k = runs.slots(b, DK)
    slot_v = slot_k if v is None else runs.slots(b, DV)
    launch(
        b, selection_mask_dkv, runs.P, kc, x, lists, runs.values, dk=dk, dv=dk if v is None else dv, slot_k=slot_k,
        slot_v=slot_v, NK=-(-DK // kc.DC), NV=-(-DV // kc.DC), HB=HB, CHUNKS=CHUNKS,
        DOUT_ALIGN=min(16 // b.dtype(q).itemsize, DV & -DV),
    )  # fmt: skip
    for slot, out in ((slot_k, dk), (slot_v, dv)):
        if out is dk or v is not None:
            runs.finish(b, slot, out)
    return dq, dk, dv, dsink
