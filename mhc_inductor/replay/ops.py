# SPDX-License-Identifier: Apache-2.0
"""The op of replay, ``torch.ops.mhc_inductor_replay.replayed``: given keys in the form in which an indexer returns them.

It has a namespace of its own: it exists only while a context is open, and no saved program holds it. It is functional, so
nothing reorders or drops it, and runs as plain PyTorch on any device without reading on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_inductor.reference.index import CHUNK, chunks, visible
from mhc_inductor.reference.segments import ANY_SEGMENT

LIBRARY = torch.library.Library("mhc_inductor_replay", "DEF")
LIBRARY.define(
    "replayed(Tensor keys, SymInt size, Tensor? limit, Tensor? mask, Tensor? segments_q, Tensor? segments_k, bool ranked)"
    " -> (Tensor indices, Tensor wrong)"
)

_Given = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_LAST = 2**31 - 1


def _sees(at: Tensor, limit: Tensor | None, mask: Tensor | None, sq: Tensor | None, sk: Tensor | None) -> Tensor:
    """Returns whether each query sees the keys ``at`` [B, S, n], int64 in range, bool."""
    seen = torch.ones_like(at, dtype=torch.bool)
    if limit is not None:
        seen = seen & (at < limit.unsqueeze(-1))
    if mask is not None:
        seen = seen & mask.expand(*at.shape[:2], mask.shape[2]).gather(-1, at if mask.shape[2] > 1 else at * 0)
    if sq is not None and sk is not None:
        ids = sk.unsqueeze(1).expand(-1, at.shape[1], -1).gather(-1, at)
        seen = seen & ((ids == sq.unsqueeze(-1)) | (ids == ANY_SEGMENT))
    return seen


def _count(keys: Tensor, size: int, given: _Given) -> Tensor:
    """Returns how many keys each query sees, int64 [B, S]."""
    limit, mask, segments, _ = given
    if mask is None and segments is None:
        everything = torch.full(keys.shape[:2], size, dtype=torch.int64, device=keys.device)
        return everything if limit is None else torch.minimum(limit.clamp(min=0), everything)
    count = torch.empty(keys.shape[:2], dtype=torch.int64, device=keys.device)
    for b, s in chunks(keys.shape[0], keys.shape[1], size, CHUNK):
        seen = visible(s, b, size, keys.device, *given)
        count[b, s] = seen.expand(*count[b, s].shape, size).sum(-1)
    return count


def _replayed(keys: Tensor, size: int, *rest: Tensor | bool | None) -> tuple[Tensor, Tensor]:
    """Returns given keys as the choice of an indexer returns them, and how many queries' keys cannot be its choice.

    A query's keys are its choice if they are distinct, in range and visible to it, and ``min(n, visible keys)`` of them
    are given. Others become the first n keys, so that nothing reads out of range until the error is raised.

    Args:
        keys: Keys [B, S, n], int32, in any order; -1 where there is none.
        size: T.
        *rest: ``limit``, ``mask``, ``segments_q`` and ``segments_k`` of :func:`mhc_inductor.index_topk`; and ``ranked``.

    Returns:
        ``(indices, wrong)``: as ``index_topk`` returns them, int32 [B, S, n], increasing, then -1. If ``ranked``, as
        ``topk`` of masked scores does, int64, in the given order, then hidden keys. The number of queries is int32 [1].
    """
    *given, ranked = rest
    visible_to: _Given = tuple(given)  # type: ignore[assignment]
    n, many = keys.shape[-1], _count(keys, size, visible_to)
    if n == 0:
        return keys.to(torch.int64 if ranked else torch.int32, copy=True), keys.new_zeros(1, dtype=torch.int32)
    inside = (keys >= 0) & (keys < size)
    good = inside & _sees(torch.where(inside, keys, 0).long(), *visible_to)
    ordered = torch.where(good, keys, _LAST).to(torch.int32).sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] < _LAST)
    bad = ((keys != -1) & ~good).any(-1) | twice.any(-1) | (good.sum(-1) != many.clamp(max=n))
    wrong = bad.sum().to(torch.int32).reshape(1)
    first = torch.arange(n, device=keys.device).expand(keys.shape)
    if not ranked:
        return torch.where(bad.unsqueeze(-1), first, torch.where(ordered == _LAST, -1, ordered)).to(torch.int32), wrong
    # What is visible comes first, in its order. Of the first n keys, at least as many are hidden as are missing.
    hidden = ~_sees(first, *visible_to)
    fill, front = ((x.to(torch.int8)).sort(dim=-1, descending=True, stable=True).indices for x in (hidden, good))
    missing = first - good.sum(-1, keepdim=True)
    found = torch.where(missing < 0, keys.long().gather(-1, front), fill.gather(-1, missing.clamp(min=0)))
    return torch.where(bad.unsqueeze(-1), first, found), wrong


def _fake_replayed(keys: Tensor, size: int, *rest: Tensor | bool | None) -> tuple[Tensor, Tensor]:
    dtype = torch.int64 if rest[-1] else torch.int32
    return keys.new_empty(keys.shape, dtype=dtype), keys.new_empty(1, dtype=torch.int32)


LIBRARY.impl("replayed", _replayed, "CompositeExplicitAutograd")
torch.library.register_fake("mhc_inductor_replay::replayed", _fake_replayed, lib=LIBRARY)
replayed = torch.ops.mhc_inductor_replay.replayed.default
