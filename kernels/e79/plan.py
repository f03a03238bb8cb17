# SPDX-License-Identifier: Apache-2.0
"""Launch plans of the E79 ops. T and B may be symbolic; the configuration depends on n and the device alone.

Memory of a training step besides inputs and outputs, in bytes, with segments of C steps::

    8 B n^2 ceil(T / C)    checkpoints, from forward to backward
    28 T B n               gates, from forward to backward
    8 B R^2 C              scratch of one segment (R: n padded to a power of two), during the backward
    4 T B P n              parts, during the backward; P = 7, plus 1 with b_s per step, plus 2 with b_m per step
"""

from __future__ import annotations

from typing import Any

from .. import gluon
from ..launch import launch
from ..operands import above, without_kernel
from .backward import e79_backward
from .config import (
    BIAS_ROWS,
    FINISH_ROWS,
    backward_config,
    forward_config,
    gluon_backward_config,
    gluon_forward_config,
)
from .finish import e79_bias_sum, e79_finish
from .forward import e79_forward

MAX_N = 128


def unsupported(b: Any, *tensors: Any) -> str | None:
    """Returns why these inputs run the reference instead of the kernels, or None if they run the kernels."""
    reason = without_kernel(b, *tensors)
    # The last dimension of kvqm, 4n, is the longest of all three-dimensional tensors.
    n = max((b.static(b.shape(t)[-1]) for t in tensors if len(b.shape(t)) == 3), default=4) // 4
    return reason or above(n, MAX_N, "n = {} is")


def _gluon_kernels(b: Any, shared: int) -> Any:
    """Returns (forward, backward), or None if plain Triton must run. ``shared``: bytes of shared memory needed."""
    names = ("e79.gluon_forward:e79_forward_gluon", "e79.gluon_backward:e79_backward_gluon")
    return gluon.kernels(b, shared, "E79", *names)


def runs_gluon(b: Any, n: int, name: str) -> bool:
    """Returns whether op ``name`` runs its Gluon kernel with this builder."""
    shared = gluon_backward_config(n).backward_shared if name == "e79_scan_backward" else 0
    return _gluon_kernels(b, shared) is not None


def _bias_kind(b: Any, bias: Any) -> int:
    """Returns 0 for no bias, 1 for one [n] for all steps, 2 for one per step and sequence."""
    return 0 if bias is None else 1 if len(b.shape(bias)) == 1 else 2


def _given(b: Any, other: Any, *tensors: Any) -> list[Any]:
    """Returns the tensors made contiguous, and ``other``, which is then never read or written, for None."""
    return [other if t is None else b.contiguous(t) for t in tensors]


def plan_e79_scan(b: Any, kvqm: Any, b_s: Any, b_m: Any, S0: Any, M0: Any, segment: Any) -> tuple[Any, ...]:
    """Allocates the outputs of ``e79_scan`` and launches its kernel.

    Returns (out, S, M, checkpoints, gates); checkpoints and gates have shape [0] if segment is 0.
    """
    T, B, n4 = b.shape(kvqm)
    n = b.static(n4) // 4
    save = not (b.is_static(segment) and segment == 0)
    out = b.empty((T, B, n), b.dtype(kvqm))
    S, M = b.empty((B, n, n), b.f32), b.empty((B, n, n), b.f32)
    checkpoints = b.empty((2 * b.cdiv(T, segment), B, n, n) if save else (0,), b.f32)
    gates = b.empty((T, B, 7, n) if save else (0,), b.f32)
    kvqm = b.contiguous(kvqm)
    bs, bm, s0, m0 = _given(b, kvqm, b_s, b_m, S0, M0)
    values = dict(
        kvqm=kvqm, bs=bs, bm=bm, s0=s0, m0=m0, out=out, s=S, m=M, ckpt=checkpoints if save else S, gates=gates if save else S,
        T=T, B=B, SEG=segment, has_s=int(S0 is not None), has_m=int(M0 is not None), N=n, BS=_bias_kind(b, b_s),
        BM=_bias_kind(b, b_m), SAVE=save,
    )  # fmt: skip
    kernels = _gluon_kernels(b, 0)
    if kernels:
        h = gluon_forward_config(n)
        launch(b, kernels[0], B, (h.NW, 1), values, R=h.R, LC=h.LC, NW=h.NW)
    else:
        c = forward_config(n)
        launch(b, e79_forward, B, (c.num_warps, 1), values, R=c.R, CI=c.CI, C=c.C, PF=c.AHEAD)
    return out, S, M, checkpoints, gates


def plan_e79_scan_backward(
    b: Any, dout: Any, dS: Any, dM: Any, kvqm: Any, b_s: Any, b_m: Any, S0: Any, M0: Any, checkpoints: Any, gates: Any,
    segment: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Allocates the outputs of ``e79_scan_backward`` and launches its kernels.

    Returns (dkvqm, db_s, db_m, dS0, dM0), of shape [0] where the input is None.
    """
    T, B, n4 = b.shape(kvqm)
    n = b.static(n4) // 4
    inputs = (kvqm, b_s, b_m, S0, M0)
    grads = tuple(b.empty((0,), b.f32) if t is None else b.empty(b.shape(t), b.dtype(t)) for t in inputs)
    dkvqm, db_s, db_m, dS0, dM0 = grads
    kinds = _bias_kind(b, b_s), _bias_kind(b, b_m)
    h = gluon_backward_config(n)
    parts = b.empty((T, B, 7 + kinds[0] // 2 + 2 * (kinds[1] // 2), n), b.f32)
    sums = [b.empty((B, 2, n), b.f32) if kind == 1 else parts for kind in kinds]
    scratch = b.empty((B, segment, 2, h.R, h.R), b.f32)
    # Where the kernel writes the gradient of an initial state that was not given.
    unasked = None if S0 is not None and M0 is not None else b.empty((B, n, n), b.f32)
    kvqm, checkpoints, gates = (b.contiguous(t) for t in (kvqm, checkpoints, gates))
    do, ds, dm = _given(b, kvqm, dout, dS, dM)
    values = dict(
        dout=do, ds=ds, dm=dm, kvqm=kvqm, gates=gates, ckpt=checkpoints, scratch=scratch, parts=parts, T=T, B=B, SEG=segment,
        ds0=unasked if S0 is None else dS0, dm0=unasked if M0 is None else dM0, has_ds=int(dS is not None),
        has_dm=int(dM is not None), N=n, BS=kinds[0], BM=kinds[1],
    )  # fmt: skip
    more = dict(dbs=sums[0], dbm=sums[1], DOUT=dout is not None)
    kernels = _gluon_kernels(b, h.backward_shared)
    if kernels:
        launch(b, kernels[1], B, (h.NW, 1), values, vars(h), more, R=h.R, LC=h.LC)
    else:
        c = backward_config(n)
        launch(b, e79_backward, B, (c.num_warps, 1), values, more, R=c.R, CI=c.CI, C=c.C, KEEP=c.AHEAD)
    launch(
        b, e79_finish, b.cdiv(T * B, FINISH_ROWS), (4, 1), values, dkvqm=dkvqm, dbs=db_s if kinds[0] == 2 else parts,
        dbm=db_m if kinds[1] == 2 else parts, rows=T * B, NP=h.R, BR=FINISH_ROWS,
    )  # fmt: skip
    for kind, part, db in zip(kinds, sums, (db_s, db_m), strict=True):
        if kind == 1:
            launch(b, e79_bias_sum, 1, (4, 1), part=part, out=db, B=B, N=n, NP=h.R, BR=BIAS_ROWS)
    return grads
