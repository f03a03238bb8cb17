# SPDX-License-Identifier: Apache-2.0
"""Which Gluon kernels for lists of keys run, and where."""

from __future__ import annotations

from typing import Any

from ..gluon import kernels

NAMES = (
    "selection.gluon_list_forward:selection_list_forward_wgmma",
    "selection.gluon_list_dq:selection_list_dq_wgmma",
)
LEAST_HEADS = 17
TAIL = 64


def list_kernels(b: Any, q: Any, k: Any, v: Any, v_width: int, scale: Any) -> tuple[Any, ...] | None:
    """Returns the kernels of the forward and of dQ, or None where plain Triton runs.

    They are for sm_90, 16-bit rows of 512 value columns and up to 64 more, values that are a part of the keys, and a
    positive scale: the largest score is looked for before the scale.
    """
    if v is not None or not b.gluon or b.device_props().arch != 90 or b.dtype(q).itemsize != 2 or not float(scale) > 0:
        return None
    h, DK = (b.static(n) for n in b.shape(q)[3:])
    if v_width != 512 or not 0 <= DK - v_width <= TAIL or h < LEAST_HEADS:
        return None
    aligned = all(b.is_multiple(s, 8) for t in (q, k) for s in b.strides(t)[:-1]) and b.starts_aligned(q, k)
    return kernels(b, 225 << 10, "selection attention over lists", *NAMES) if aligned else None
