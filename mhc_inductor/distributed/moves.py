# SPDX-License-Identifier: Apache-2.0
"""Messages between the ranks of a group. They move bytes, so that every dtype goes through every backend.

The backends add nothing: sums are made here, in the order of the ranks, so that two runs give equal bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mhc_inductor.distributed.groups import Members

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@contextlib.contextmanager
def _named(members: Members) -> Iterator[None]:
    """Makes a backend's error, of its own type, say which function's message failed."""
    try:
        yield
    except RuntimeError as e:
        raise type(e)(f"{members.op}: a message between the ranks of the group failed: {e}") from e


def as_bytes(t: Tensor) -> Tensor:
    """Returns a contiguous tensor's memory as a vector of bytes."""
    return t.view(-1).view(torch.uint8)


def gather_rows(t: Tensor, lengths: Sequence[int], members: Members) -> Tensor:
    """Returns the rows ``t[L, ...]`` of all ranks, in the order of the ranks: ``[sum of lengths, ...]``.

    ``lengths`` has the L of every rank. A shorter part is sent with padding up to the longest.
    """
    longest, row = max(lengths), tuple(t.shape[1:])
    if t.shape[0] == longest:
        padded = t.contiguous()
    else:
        padded = t.new_zeros((longest, *row))
        padded[: t.shape[0]] = t
    parts = t.new_empty((members.size, longest, *row))
    if not parts.numel():
        return t.new_empty((sum(lengths), *row))
    with _named(members):
        _all_gather(as_bytes(parts), as_bytes(padded), group=members.group)
    if min(lengths) == longest:
        return parts.flatten(0, 1)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def sum_rows(t: Tensor, lengths: Sequence[int], members: Members, dtype: torch.dtype) -> Tensor:
    """Returns this rank's rows of the sum over all ranks of ``t[sum of lengths, ...]``: ``[L, ...]``.

    It is the transpose of :func:`gather_rows`. Rows travel in t's dtype and are added in ``dtype``, rank by rank.
    """
    t, own = t.contiguous(), lengths[members.rank]
    parts = t.new_empty((members.size, own, *t.shape[1:]))
    if not t.numel():
        return parts.sum(0, dtype=dtype)
    width = t[:1].numel() * t.element_size()
    # Bytes that each rank gets from this one, and this one from each.
    out, into = [length * width for length in lengths], [own * width] * members.size
    with _named(members):
        dist.all_to_all_single(as_bytes(parts), as_bytes(t), into, out, group=members.group)
    return parts.sum(0, dtype=dtype)


def exchange(
    sent: Sequence[Tensor], to: int, received: Sequence[Tensor], source: int, members: Members
) -> list[dist.Work]:
    """Starts to send contiguous tensors to one rank and to receive others from one rank; returns what to wait for.

    ``to`` and ``source`` are ranks of the group, counted round. Both ends skip tensors without elements.
    """
    ops = [_message(dist.isend, t, to, members) for t in sent if t.numel()]
    ops += [_message(dist.irecv, t, source, members) for t in received if t.numel()]
    with _named(members):
        return dist.batch_isend_irecv(ops) if ops else []


def _message(kind: Any, t: Tensor, rank: int, members: Members) -> dist.P2POp:
    return dist.P2POp(kind, as_bytes(t), members.global_rank(rank), members.group)


def wait(works: Sequence[dist.Work], members: Members) -> None:
    """Waits for messages. On a GPU the current stream waits, and Python goes on."""
    with _named(members):
        for work in works:
            work.wait()
