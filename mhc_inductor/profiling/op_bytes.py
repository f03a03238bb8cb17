# SPDX-License-Identifier: Apache-2.0
"""The bytes that each op must move: every tensor that it reads, once, and every tensor that it writes, once.

Keys and values that only some queries name are an exception, :data:`GATHERED`: of these, a row counts if a query names it.
What the flop formulas (:mod:`mhc_inductor.ops.flops`) are for products, this is for memory. A kernel may move more, for
example where it reads a tensor twice, and a model less, where a tensor that one op wrote is still in a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhc_inductor import compat
from mhc_inductor.ops import flops
from mhc_inductor.reference import selection, selection_lists

_ATTENTION = ("k", "v")
GATHERED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("selection_attention", "selection_attention_backward"), _ATTENTION),
    **dict.fromkeys(("selection_list_attention", "selection_list_attention_backward"), _ATTENTION),
    **dict.fromkeys(("selection_entry_attention", "selection_entry_attention_backward"), _ATTENTION),
    "index_loss": ("k", "attention_k"),
    "index_loss_backward": ("k",),
}
"""The arguments of each op of which it reads only the rows of keys in the ranges or lists of the queries."""


class Bytes(NamedTuple):
    """The bytes of one call.

    ``moved`` has each tensor once, and each row that is gathered once. ``gathered`` has, of these rows, one read for each
    query that names them (for each entry of its list, if entries repeat), which the heads of a group share: what comes from
    memory where no cache holds a row.
    """

    moved: int
    gathered: int


def count(op: str, *args: Any, out_val: Any, **kwargs: Any) -> Bytes:
    """Returns the bytes that one call moves, symbolic numbers where the sizes are.

    Ranges and lists are read, which waits for a GPU. Where their values are not known (fake tensors, subclasses), queries
    count as naming as many keys as they can: all for ranges, one for each entry of a list.

    Args:
        op: Name of the op.
        args: The op's arguments; trailing ones may be left out.
        out_val: The op's results.
        kwargs: Arguments by name.
    """
    names = [a.name for a in getattr(torch.ops.mhc_inductor, op).default._schema.arguments]
    given = {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **kwargs}
    results = (out_val,) if isinstance(out_val, Tensor) else tuple(out_val)
    gathered = {name: given.pop(name) for name in GATHERED.get(op, ())}
    picked = _distinct(gathered.values())
    total = sum(map(_size, (*_distinct(given.values()), *results)))
    if not picked:
        return Bytes(total, 0)
    rows, pairs, groups = _rows({**given, **gathered})
    each = sum(t.shape[-1] * t.element_size() * (groups if t.dim() == 4 else 1) for t in picked)
    return Bytes(total + rows * each, pairs * each)


def _plain(t: Any) -> bool:
    """Returns whether a tensor's values can be read; None has none."""
    return t is None or (type(t) in (Tensor, torch.nn.Parameter) and not t.is_meta)


def _distinct(values: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors among ``values``; of those that begin at one place, such as k and its first columns, the largest."""
    found: dict[Any, Tensor] = {}
    for t in values:
        if isinstance(t, Tensor):
            at = (compat.storage_key(t), t.storage_offset(), t.stride()) if _plain(t) and t.numel() else id(t)
            found[at] = max(found.get(at, t), t, key=_size)
    return list(found.values())


def _size(t: Tensor) -> int:
    """Returns the bytes of a tensor; a dimension along which it is expanded counts as one entry."""
    strides: tuple[Any, ...] = t.stride() if _plain(t) else (1,) * t.dim()
    return prod(s for s, stride in zip(t.shape, strides, strict=True) if stride != 0 or s == 0) * t.element_size()


def _rows(given: Mapping[str, Any]) -> tuple[int, int, int]:
    """Returns how many rows of keys are named, how often by a query, and how many groups share a row's place.

    Rows are counted over batch and groups; for an indexer, whose list [B, S, n] all groups share, over the batch.
    """
    q, k, ranges = given["q"], given["k"], given.get("ranges")
    named = given["indices"] if ranges is None else ranges
    batch, queries, keys, shared = q.shape[0], q.shape[1], k.shape[-2], named.dim() == 3
    extra = [given.get(f"{kind}_{of}") for kind in ("cu_seqlens", "segments") for of in "qk"]
    groups = given["attention_k"].shape[1] if given.get("attention_k") is not None else 1
    if not all(map(_plain, (named, *extra))):
        each = keys if ranges is not None else named.shape[-1]
        lists = batch * (1 if shared else named.shape[2])
        return (
            lists * (each if ranges is not None else torch.sym_min(keys, queries * each)),
            lists * queries * each,
            groups,
        )
    if ranges is not None:
        start, end = selection.clipped(ranges, selection.key_bounds(q, k, *extra[:2]))
        pairs = flops._pairs({}, given)
    else:
        index, k = (named.unsqueeze(2), k.unsqueeze(1)) if shared else (named, k)
        at, seen = selection_lists.absolute_keys(q, k, index, *extra)
        start, end, pairs = at.transpose(1, 2), (at + seen).transpose(1, 2), int(seen.sum())
    return int(selection.selected(start.flatten(2), end.flatten(2), keys).sum()), pairs, groups
