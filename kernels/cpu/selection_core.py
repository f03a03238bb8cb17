# SPDX-License-Identifier: Apache-2.0
"""Selection attention on a CPU in C++: each query reads the rows of its own keys, without gathering them.

The source is in ``selection_products.py`` and ``selection_source.py``. Inductor's C++ compiler builds it at the
first call that is large enough, in a few seconds, and caches it on disk. :func:`usable` returns False where there is no
compiler; the caller then uses a formula.

A query's keys are the union of ranges or a list of single keys, optionally of its own segment: :class:`Selected`.
Results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_inductor import compat
from mhc_inductor.log import warn_once
from mhc_inductor.reference import selection as reference
from mhc_inductor.reference.precision import acc_dtype

from .selection_products import PRODUCTS
from .selection_source import ATTENTION

LEAST = 2**20
"""Scores (B * S * G * h * S_kv) above which a call is worth a compile; never below 0, since the C++ needs all sizes."""

# Inductor's flags forbid fused multiply-adds, half of the speed.
_FLAGS = ("-ffp-contract=fast",)

# The backward cuts the queries of each group into parts, about 16 in all groups and at least 4 in one. A part has 64
# queries or more. All sums of a group hold at most 8 chunks of elements, or as many as q.
_MOST_PARTS, _FEWEST_PARTS, _PART_QUERIES, _PART_CHUNKS = 16, 4, 64, 8


class Selected(NamedTuple):
    """The keys of each query.

    Attributes:
        entries: ``[start, end)`` pairs ``[B, S, G, r, 2]``, or single keys ``[B, S, G, n]``; int32 or int64. Those
            outside the query's own sequence select nothing, repeated ones count once.
        bounds: Bounds of each query's own sequence of keys, from which entries count, int64 ``[S]`` each.
        segments: Segment ids ``[B, S]`` and ``[B, S_kv]``, or None: a key counts only where its id is the query's or
            -2**31.
    """

    entries: Tensor
    bounds: reference.Bounds
    segments: tuple[Tensor, Tensor] | None = None


def segments(segments_q: Tensor | None, segments_k: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Returns the pair that :class:`Selected` takes, or None where either is None."""
    return None if segments_q is None or segments_k is None else (segments_q, segments_k)


_Int = ctypes.c_int64
_INTS = (
    *("batch", "queries", "groups", "heads", "keys", "key_width", "value_width", "key_columns", "value_columns"),
    *("entries", "pairs", "wide"),
)
_STRIDES = (("entry_strides", 5), ("k_strides", 3), ("v_strides", 3))
_POINTERS = (
    *("q", "k", "v", "sink", "entries_at", "low", "high", "segments_q", "segments_k", "o", "lse"),
    *("dout", "dlse", "row_lse", "total", "dq", "dk", "dv"),
)


class _Arguments(ctypes.Structure):
    """The arguments of a call, as ``selection_source.py`` lays them out."""

    _fields_ = [
        *((name, _Int) for name in _INTS),
        *((name, _Int * size) for name, size in _STRIDES),
        *((name, _Int) for name in ("threads", "odd", "parts")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("scale", ctypes.c_double),
    ]


@functools.cache
def _library(dtype: torch.dtype, heads: int) -> Any:
    """Returns the library for products of 1, 2 or 4 heads, or None where it cannot be built."""
    scalar = {torch.float32: "float", torch.float64: "double"}[dtype]
    try:
        source = f"#define SCALAR {scalar}\n#define HEADS {heads}\n{PRODUCTS}{ATTENTION}"
        library = compat.kernels.compiled_cpp(source, _FLAGS)
        library.selection.argtypes = [ctypes.POINTER(_Arguments)]
        library.lanes()
    except Exception as e:  # no compiler, an old one, a cache folder without the right to execute
        text = str(e).strip().splitlines()
        reason = f"{type(e).__name__}: {text[0]}" if text else type(e).__name__
        warn_once("selection_cpu", f"selection attention runs a slower formula on this CPU: no C++ compiler ({reason})")
        return None
    return library


def _library_of(q: Tensor) -> Any:
    return _library(acc_dtype(q.dtype), q.shape[3] if q.shape[3] < 3 else 4)


def usable(q: Tensor, k: Tensor) -> bool:
    """Returns whether the C++ form is to be used: a large call, and a compiler."""
    size = q.shape[:4].numel() * k.shape[2]
    return size > LEAST and k.shape[2] < 2**31 and _library_of(q) is not None


def _whole(t: Tensor, acc: torch.dtype, lanes: int) -> Tensor:
    """Returns ``t[..., D]`` in the arithmetic's dtype with rows of whole vectors; copies only what is not so."""
    missing = -t.shape[-1] % lanes
    # A padding of 0 copies too.
    t = F.pad(t.to(acc), (0, missing)) if missing else t.to(acc)
    return t if t.stride(-1) == 1 else t.contiguous()


def odd(*tensors: Tensor) -> bool:
    """Returns whether any value may be NaN or inf. A sum that overflows also returns True, which costs only time."""
    return not all(bool(t.sum(dtype=acc_dtype(t.dtype)).isfinite()) for t in tensors)


def _run(
    q: Tensor, k: Tensor, v: Tensor, selected: Selected, scale: float, wild: bool, parts: int, **tensors: Tensor | None
) -> None:
    """Fills the outputs among ``tensors``, which are contiguous and, like the others, in the arithmetic's dtype."""
    library, acc = _library_of(q), acc_dtype(q.dtype)
    keys, values = (_whole(t, acc, library.lanes()) for t in (k, v))
    entries, (low, high) = selected.entries, selected.bounds
    if entries.dtype not in (torch.int32, torch.int64):
        entries = entries.to(torch.int64)
    held: dict[str, Tensor | None] = {"q": q, **tensors}
    held = {name: None if t is None else t.to(acc).contiguous() for name, t in held.items()}
    held |= {"k": keys, "v": values, "entries_at": entries, "low": low.contiguous(), "high": high.contiguous()}
    if selected.segments is not None:
        ids = (t.to(torch.int64).contiguous() for t in selected.segments)
        held |= dict(zip(("segments_q", "segments_k"), ids, strict=True))
    pairs = entries.dim() == 5
    b, s, g, h, _ = q.shape
    sizes = (b, s, g, h, k.shape[2], keys.shape[3], values.shape[3], k.shape[3], v.shape[3])
    made = _Arguments()
    for name, value in zip(_INTS, (*sizes, entries.shape[3], pairs, entries.dtype == torch.int64), strict=True):
        setattr(made, name, value)
    for (name, count), strided in zip(_STRIDES, (entries, keys, values), strict=True):
        setattr(made, name, (_Int * count)(*(*strided.stride(), 0)[:count]))
    for name, t in held.items():
        setattr(made, name, None if t is None else t.data_ptr())
    made.threads, made.odd, made.parts, made.scale = torch.get_num_threads(), wild, parts, scale
    if library.selection(ctypes.byref(made)):
        raise MemoryError("selection attention: not enough memory")


def attention(
    q: Tensor, k: Tensor, v: Tensor, selected: Selected, sink: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns o ``[B, S, G, h, Dv]`` and lse ``[B, S, G, h]`` in the arithmetic's dtype."""
    acc = acc_dtype(q.dtype)
    o = torch.empty((*q.shape[:4], v.shape[3]), dtype=acc)
    lse = torch.empty(q.shape[:4], dtype=acc)
    _run(q, k, v, selected, scale, False, 0, sink=sink, o=o, lse=lse)
    return o, lse


def _parts(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Returns the number of parts of the queries of a group. It depends on shapes only, as results then do."""
    wanted = max(_FEWEST_PARTS, _MOST_PARTS // (q.shape[0] * q.shape[2]))
    sums = k.shape[2] * (k.shape[3] + v.shape[3])
    fit = max(_PART_CHUNKS * reference.CHUNK, q.numel()) // max(1, sums)
    return max(1, min(wanted, q.shape[1] // _PART_QUERIES, fit))


def backward(
    row: reference.Rows, dlse: bool, q: Tensor, k: Tensor, v: Tensor, selected: Selected, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv in the arithmetic's dtype.

    Args:
        row: Tensors ``[B, S, G, h]`` (dout ``[B, S, G, h, Dv]``).
        dlse: Whether row.dlse may differ from 0.
        q: Queries ``[B, S, G, h, Dk]``.
        k: Keys ``[B, G, S_kv, Dk]``.
        v: Values ``[B, G, S_kv, Dv]``.
        selected: The keys of each query.
        scale: Factor of the scores.
    """
    acc = acc_dtype(q.dtype)
    dq, dk, dv = (torch.empty(t.shape, dtype=acc) for t in (q, k, v))
    parts = _parts(q, k, v)
    given = {"dout": row.dout, "dlse": row.dlse if dlse else None, "row_lse": row.lse, "total": row.total}
    _run(q, k, v, selected, scale, odd(q, k, v, *row), parts, **given, dq=dq, dk=dk, dv=dv)
    return dq, dk, dv
