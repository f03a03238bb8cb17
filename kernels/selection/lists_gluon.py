# SPDX-License-Identifier: Apache-2.0
"""Which Gluon kernels for lists of keys run, and where."""

from __future__ import annotations

from typing import Any

from ..gluon import kernels

NAMES = (
    "selection.gluon_list_forward:selection_list_forward_wgmma",
    "selection.gluon_list_dq:selection_list_dq_wgmma",
    "selection.gluon_list_rows:selection_list_rows_wgmma",
)
LEAST_HEADS = 17
VALUES, TAIL = 512, 64
SHARED = 225 << 10


def rows_fit(b: Any, q: Any, k: Any) -> bool:
    """Returns whether Gluon kernels can copy the rows of q[B, S, G, h, DK] and k[B, G, S_kv, DK].

    They are for sm_90, 16-bit rows of 512 columns and up to 64 more, and not for a few heads.
    """
    if not b.gluon or b.device_props().arch != 90 or b.dtype(q).itemsize != 2:
        return False
    h, DK = (b.static(n) for n in b.shape(q)[3:])
    if h < LEAST_HEADS or not 0 <= DK - VALUES <= TAIL:
        return False
    return all(b.is_multiple(s, 8) for t in (q, k) for s in b.strides(t)[:-1]) and bool(b.starts_aligned(q, k))


def list_kernels(b: Any, q: Any, k: Any, v: Any, v_width: int, scale: Any) -> tuple[Any, ...] | None:
    """Returns the kernels of the forward, of dQ and of the rows of dK, or None where plain Triton runs.

    Values must be the first 512 columns of the keys, and the scale positive: the largest score is looked for before it.
    """
    if v is not None or v_width != VALUES or not float(scale) > 0 or not rows_fit(b, q, k):
        return None
    return kernels(b, SHARED, "selection attention over lists", *NAMES)
