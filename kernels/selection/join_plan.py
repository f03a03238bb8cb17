# SPDX-License-Identifier: Apache-2.0
"""Launch plans for attention over one part of the keys after the other. Called eagerly, by context parallelism.

They need no memory besides inputs and outputs, and read and write each element once.
"""

from __future__ import annotations

from typing import Any

from ..launch import launch
from ..operands import contiguous, power_of_two, without_kernel
from .join import selection_join, selection_part_gradients

MAX_DV = 1024
ELEMENTS = 4096  # of a program, which is of four warps


def unsupported(b: Any, *tensors: Any) -> str | None:
    """Returns why the formula runs instead of the kernels, or None if they run."""
    wide = [DV for t in tensors if len(b.shape(t)) == 5 and (DV := b.shape(t)[4]) > MAX_DV]
    return without_kernel(b, *tensors) or (f"Dv = {wide[0]} is above {MAX_DV}" if wide else None)


def _sizes(b: Any, o: Any) -> tuple[dict[str, int], int]:
    """Returns the kernels' values for the rows of ``o[B, S, G, h, Dv]``, and the number of programs."""
    B, S, G, h, DV = b.shape(o)
    rows, VP = B * S * G * h, power_of_two(DV)
    ROWS = max(1, ELEMENTS // VP)
    return dict(rows=rows, DV=DV, VP=VP, ROWS=ROWS), b.cdiv(rows, ROWS)


def plan_selection_join(
    b: Any, sums: Any, most: Any, total: Any, o: Any, lse: Any, sink: Any, last: bool
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Launches the kernel that adds a part; returns sums, most and total, or o, lse and None if it is the ``last``.

    Args:
        b: The builder.
        sums: ``[B, S, G, h, Dv]``; the o of the first part where total is None, else fp32, and overwritten.
        most: The largest lse so far, ``[B, S, G, h]`` fp32.
        total: The denominator so far, relative to it; None after the first part.
        o: The part's output, like the first one's.
        lse: Its lse, fp32.
        sink: ``[G, h]`` or None; of the last call only.
        last: Whether no part follows.
    """
    values, programs = _sizes(b, o)
    shape = b.shape(lse)
    o = b.contiguous(o)
    top, norm = b.empty(shape, b.f32), None if last else b.empty(shape, b.f32)
    new = last or total is None
    out = b.empty(b.shape(o), b.dtype(o) if last else b.f32) if new else sums
    launch(
        b, selection_join, programs, (4, 1), values, sums=b.contiguous(sums), most=b.contiguous(most), o=o, out=out, top=top,
        total=most if total is None else total, lse=b.contiguous(lse), sink=most if sink is None else b.contiguous(sink),
        norm=top if norm is None else norm, GH=shape[2] * shape[3], FIRST=total is None, LAST=last, SINK=sink is not None,
    )  # fmt: skip
    return out, top, norm


def plan_selection_part_gradients(
    b: Any, dout: Any, dlse: Any, o: Any, lse: Any, total: Any, part: Any, plse: Any
) -> tuple[Any, Any]:  # fmt: skip
    """Launches the kernel of a part's gradients; returns that of its o, in o's dtype, and that of its lse, in fp32.

    dout, o and the part's o are ``[B, S, G, h, Dv]``, all others ``[B, S, G, h]`` in fp32: dlse, lse and total are 0
    in rows without keys, and the part's lse is -inf in rows without keys there.
    """
    values, programs = _sizes(b, part)
    share, grad = b.empty(b.shape(part), b.dtype(part)), b.empty(b.shape(plse), b.f32)
    names = ("dout", "dlse", "o", "lse", "total", "part", "plse")
    inputs = dict(zip(names, contiguous(b, dout, dlse, o, lse, total, part, plse), strict=True))
    launch(b, selection_part_gradients, programs, (4, 1), values, inputs, share=share, grad=grad)
    return share, grad
