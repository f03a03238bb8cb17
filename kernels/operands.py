# SPDX-License-Identifier: Apache-2.0
"""What the launch plans of all operators ask of their inputs: dtypes, limits, strides, alignment, precision."""

from __future__ import annotations

from typing import Any

FLOATS = ("torch.float32", "torch.bfloat16", "torch.float16")
"""The dtypes for which kernels exist."""


def without_kernel(b: Any, *tensors: Any) -> str | None:
    """Returns why tensors of these dtypes run the reference instead of the kernels, or None if they run the kernels."""
    for t in tensors:
        if str(b.dtype(t)) not in FLOATS:
            return f"dtype {b.dtype(t)} has no kernel"
    return None


def above(n: int, most: int, what: str) -> str | None:
    """Returns why a size runs the reference, or None if it is at most ``most``; ``what`` has a place for it."""
    return f"{what.format(n)} above {most}" if n > most else None


def power_of_two(n: int) -> int:
    """Returns n rounded up to a power of two."""
    return 1 << max(0, n - 1).bit_length()


def contiguous(b: Any, *tensors: Any) -> tuple[Any, ...]:
    """Returns the tensors made contiguous; None stays None."""
    return tuple(None if t is None else b.contiguous(t) for t in tensors)


def strided(b: Any, *tensors: Any) -> tuple[Any, ...]:
    """Returns the tensors with a last stride of 1; None stays None."""
    return tuple(None if t is None else b.strided(t) for t in tensors)


def strides(b: Any, t: Any, names: str) -> dict[str, Any]:
    """Returns the first strides of ``t`` by their names."""
    return dict(zip(names.split(), b.strides(t), strict=False))


def alignment(b: Any, *tensors: Any) -> int:
    """Returns the largest power of two of elements, at most 16 bytes, that divides every stride except the last one."""
    most = 16 // b.dtype(tensors[0]).itemsize
    each = [s for t in tensors for s in b.strides(t)[:-1]]
    while most > 1 and not all(b.is_multiple(s, most) for s in each):
        most //= 2
    return most


def dot_precision(b: Any, dtype: Any) -> str:
    """Returns the input_precision of a product of ``dtype``."""
    if dtype != b.f32 or b.device_props().backend != "cuda":
        return "ieee"
    return "tf32x3" if b.precision == "highest" else "tf32"


def attention(b: Any, q: Any, k: Any, v: Any, DV: int | None = None) -> dict[str, Any]:
    """Returns what kernels of attention take of q[B, S, G, h, Dk], k[B, G, S_kv, Dk] and v[B, G, S_kv, Dv].

    v of None: the values are the first DV columns of k.
    """
    v = k if v is None else v
    S, G, h, DK = b.shape(q)[1:]
    return dict(
        strides(b, q, "sqb sqs sqg sqh"), **strides(b, k, "skb skg skn"), **strides(b, v, "svb svg svn"), q=q, k=k, v=v, S=S,
        G=G, S_kv=b.shape(k)[2], H=b.static(h), DK=b.static(DK), DV=b.static(b.shape(v)[3]) if DV is None else DV,
        ALIGN=alignment(b, q, k, v), PREC=dot_precision(b, b.dtype(q)),
    )  # fmt: skip
