# SPDX-License-Identifier: Apache-2.0
"""Launch plans of selection attention under a mask. B, S and S_kv may be symbolic; everything else is known.

Memory besides inputs and outputs, in bytes: 6 per pair of a tile of queries and a tile of keys, for each B and G of the
mask that is not broadcast; 8 per row (b, s, g, h) in the backward, 16 under a mask of floats, and 8 per key tile and two
slots of one key tile in fp32 for each of P programs. Nothing can overflow: a list has room for all tiles.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from . import plan
from .backward_plan import SETUP, KeyConfig, KeyRuns, backward_config, plan_delta
from .lists_config import ListConfig, list_config, widths
from .mask_dkv import selection_mask_dkv
from .mask_dq import selection_mask_dq, selection_mask_shares
from .mask_forward import selection_mask_forward
from .mask_tiles import selection_mask_lists, selection_mask_tiles
from .pieces_plan import power_of_two
from .tile_lists_plan import LIST_BLOCK, alignment, dot_precision, plan_finite

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
    if reason := plan.unsupported(b, *(t for t in (q, k, v) if t is not None)):
        return reason
    if DV > plan.MAX_DV:
        return f"Dv = {DV} is above {plan.MAX_DV}"
    if backward and _key_config(b, q, DV) is None:
        return f"shared memory of this device does not hold the backward's tiles at D = {b.static(b.shape(q)[4])}"
    return None


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
        mask = self.args["mask_ptr"]
        MB, MG = (
            1 if b.is_static(stride) and stride == 0 else b.shape(mask)[d]
            for d, stride in ((0, self.args["smb"]), (2, self.args["smg"]))
        )
        codes, near = b.empty((MB, MG, NQ, NT), b.i16), b.empty((MB, MG, NQ), b.i32)
        fill = _FILLS.get(str(b.dtype(mask)), _NO_FILL)
        b.launch(
            selection_mask_tiles, (MB * MG * NQ, 1, 1),
            dict(self.args, codes_ptr=codes, near_ptr=near, S=S, S_kv=S_kv, NT=NT, NQ=NQ, G=MG),
            dict(QT=QT, BN=BN, TB=max(1, PASS // (QT * BN)), BIAS=self.bias, FILL=fill, ALIGN=_alignment(b, mask)),
            8 if QT * BN > PASS else 4, 1,
        )  # fmt: skip
        rows, n = (NT, NQ) if by_key else (NQ, NT)
        lists, counts = b.empty((MB, MG, rows, n), b.i32), b.empty((MB, MG, rows, 2), b.i32)
        b.launch(
            selection_mask_lists, (MB * MG * rows, 1, 1),
            dict(codes_ptr=codes, near_ptr=near, lists_ptr=lists, counts_ptr=counts, NT=NT, NQ=NQ),
            dict(BY_KEY=by_key, TB=LIST_BLOCK), 2, 1,
        )  # fmt: skip
        lb, lg = (0 if MB == 1 else MG * rows), (0 if MG == 1 else rows)
        return dict(self.args, lists_ptr=lists, counts_ptr=counts, S=S, S_kv=S_kv, NT=NT, NQ=NQ, lb=lb, lg=lg)


def _alignment(b: Any, mask: Any) -> int:
    """Returns how many elements one load of the mask may take: a power of two, at most 16 bytes."""
    most = alignment(b, mask)
    while most > 1 and not b.is_multiple(b.shape(mask)[3], most):
        most //= 2
    return most


def _masked(b: Any, mask: Any) -> _Masked:
    mask = b.laid_out(mask)
    smb, sms, smg, smk = b.strides(mask)
    return _Masked(dict(mask_ptr=mask, smb=smb, sms=sms, smg=smg, smk=smk), str(b.dtype(mask)) != "torch.bool")


def _operands(b: Any, q: Any, k: Any, v: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments and constants of queries, keys and values, which are k where v is None."""
    v = k if v is None else v
    (sqb, sqs, sqg, sqh), (skb, skg, skn), (svb, svg, svn) = (tuple(b.strides(t))[:-1] for t in (q, k, v))
    h, DK = (b.static(n) for n in b.shape(q)[3:])
    args = dict(q_ptr=q, k_ptr=k, v_ptr=v, G=b.shape(q)[2], sqb=sqb, sqs=sqs, sqg=sqg, sqh=sqh, skb=skb, skg=skg, skn=skn,
                svb=svb, svg=svg, svn=svn)  # fmt: skip
    return args, dict(H=h, DK=DK, ALIGN=alignment(b, q, k, v), PREC=dot_precision(b, b.dtype(q)))


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
    q, k, v = (t if t is None else b.strided(t) for t in (q, k, v))
    (B, S, G, *_), S_kv, DV = b.shape(q), b.shape(k)[2], b.static(v_width)
    (args, constexprs), (c, tiling), masked = _operands(b, q, k, v), _tiling(b, q, v, DV, False), _masked(b, mask)
    h = constexprs["H"]
    o, lse = b.empty((B, S, G, h, DV), b.dtype(q)), b.empty((B, S, G, h), b.f32)
    lists = masked.lists(b, S, S_kv, tiling["QT"], c.BN)
    flags = plan_finite(b, k, v, DV, c.BN)
    b.launch(
        selection_mask_forward, (B * G * lists["NQ"] * -(-h // tiling["HB"]), 1, 1),
        dict(args, **lists, flags_ptr=flags, sink_ptr=lse if sink is None else b.contiguous(sink), o_ptr=o, lse_ptr=lse,
             scale=scale),
        dict(constexprs, **tiling, HELD=c.held, SHARED=v is None and tiling["VM"] * c.MC == DV, SINK=sink is not None,
             BIAS=masked.bias),
        c.num_warps, c.num_stages,
    )  # fmt: skip
    return o, lse


def plan_selection_mask_attention_backward(
    b: Any, dout: Any, dlse: Any, q: Any, k: Any, v: Any, mask: Any, sink: Any, o: Any, lse: Any, scale: Any, v_width: Any
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Launches ``selection_mask_attention_backward``; returns (dq, dk, dv, dsink)."""
    dout, dlse, sink = (t if t is None else b.contiguous(t) for t in (dout, dlse, sink))
    o, lse, (q, k, v) = b.contiguous(o), b.contiguous(lse), (t if t is None else b.strided(t) for t in (q, k, v))
    (B, S, G, *_), S_kv, DV = b.shape(q), b.shape(k)[2], b.static(v_width)
    (args, constexprs), (c, tiling), masked = _operands(b, q, k, v), _tiling(b, q, v, DV, True), _masked(b, mask)
    h, DK = constexprs["H"], constexprs["DK"]
    base, delta, dsink = plan_delta(b, dout, dlse, sink, o, lse)
    lists = masked.lists(b, S, S_kv, tiling["QT"], c.BN)
    grid = (B * G * lists["NQ"] * -(-h // tiling["HB"]), 1, 1)
    share = base
    if masked.bias:
        base, share = b.empty((B, S, G, h), b.f32), b.empty((B, S, G, h), b.f32)
        values = ("v_ptr", "svb", "svg", "svn")
        keys = {name: value for name, value in args.items() if name not in values}
        b.launch(
            selection_mask_shares, grid,
            dict(keys, **lists, lse_ptr=lse, sink_ptr=lse if sink is None else sink, dlse_ptr=lse if dlse is None else dlse,
                 delta_ptr=delta, base_ptr=base, share_ptr=share, scale=scale),
            dict(constexprs, **{name: tiling[name] for name in ("KM", "MC", "KT", "QT", "HB", "BN")}, SINK=sink is not None,
                 DLSE=dlse is not None),
            c.num_warps, 1,
        )  # fmt: skip
    dq, flags = b.empty((B, S, G, h, DK), b.dtype(q)), plan_finite(b, k, v, DV, c.BN)
    args |= dict(dout_ptr=q if dout is None else dout, base_ptr=base, share_ptr=share, delta_ptr=delta, scale=scale)
    constexprs |= dict(DOUT=dout is not None, BIAS=masked.bias)
    b.launch(
        selection_mask_dq, grid, dict(args, **lists, flags_ptr=flags, dq_ptr=dq), dict(constexprs, **tiling), c.num_warps,
        c.num_stages,
    )  # fmt: skip
    kc = _key_config(b, q, DV)
    assert kc is not None  # unsupported_sizes has asked
    HB = min(power_of_two(h), kc.ROWS)
    lists = masked.lists(b, S, S_kv, kc.ROWS // HB, kc.BN, by_key=True)
    # The kernels skip key tiles that no query sees.
    dk = b.zeros((B, G, S_kv, DK), b.dtype(k))
    dv = b.empty((0,), b.dtype(k)) if v is None else b.zeros((B, G, S_kv, DV), b.dtype(v))
    CHUNKS = power_of_two(h) // HB
    runs = KeyRuns.of(b, kc, k, lists["counts_ptr"], lists["lb"], lists["lg"], 1, CHUNKS, EACH=2)
    slot_k = runs.slots(b, DK)
    slot_v = slot_k if v is None else runs.slots(b, DV)
    b.launch(
        selection_mask_dkv, (runs.P, 1, 1),
        dict(args, **lists | runs.args, dk_ptr=dk, dv_ptr=dk if v is None else dv, slot_k_ptr=slot_k, slot_v_ptr=slot_v),
        dict(constexprs, P=runs.P, DV=DV, DC=kc.DC, NK=-(-DK // kc.DC), NV=-(-DV // kc.DC), HB=HB, QT=kc.ROWS // HB,
             CHUNKS=CHUNKS, COST=SETUP, BN=kc.BN, SHARED=v is None,
             DOUT_ALIGN=min(16 // b.dtype(q).itemsize, DV & -DV)),
        kc.num_warps, kc.num_stages,
    )  # fmt: skip
    for slot, out in ((slot_k, dk), (slot_v, dv)):
        if out is dk or v is not None:
            runs.finish(b, slot, out)
    return dq, dk, dv, dsink
