# SPDX-License-Identifier: Apache-2.0
"""Selection attention by a ring: the parts of the keys travel, and each rank joins its partial results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_inductor.distributed.agreement import Agreed
from mhc_inductor.distributed.groups import Members
from mhc_inductor.distributed.moves import exchange, wait
from mhc_inductor.distributed.once import once
from mhc_inductor.distributed.softmax import Running, Upstream
from mhc_inductor.ops.selection import call, given
from mhc_inductor.reference.precision import acc_dtype


class _Ring(NamedTuple):
    """What every step knows."""

    members: Members
    lengths: tuple[int, ...]
    scale: float
    v_width: int
    listed: bool
    """Whether the selection is a list of positions, not ranges."""

    def owner(self, step: int) -> int:
        """Returns the rank whose keys are here in a step."""
        return (self.members.rank - step) % self.members.size


class _Part(NamedTuple):
    """One rank's keys, their values (None: the keys' first columns), and their segment ids."""

    k: Tensor
    v: Tensor | None
    ids: Tensor | None

    def tensors(self) -> list[Tensor]:
        return [t for t in self if t is not None]

    def like(self, length: int) -> _Part:
        """Returns memory for a part of another length."""
        k, v = (None if t is None else t.new_empty((*t.shape[:2], length, t.shape[3])) for t in (self.k, self.v))
        assert k is not None
        return _Part(k, v, None if self.ids is None else self.ids.new_empty((self.ids.shape[0], length)))


class _Queries(NamedTuple):
    """What a rank keeps of its own."""

    q: Tensor
    selection: Tensor
    ids: Tensor | None
    sink: Tensor | None


def ring_attention(
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    selection: Tensor | None,
    ids: tuple[Tensor | None, Tensor | None],
    scale: float,
    v_width: int,
    listed: bool,
    agreed: Agreed,
    members: Members,
) -> tuple[Tensor, Tensor]:
    """Returns o and lse of this rank's queries.

    Args:
        inputs: q, k, v (None where v is k) and sink of this rank.
        selection: Ranges or, if ``listed``, indices, in the joined keys.
        ids: Segment ids of this rank's queries and keys, or None for both.
        scale: Factor of the scores.
        v_width: Number of the values' columns.
        listed: Whether the selection is a list.
        agreed: Its first size is the number of keys of each rank; its needs are those of q, k, v and sink.
        members: The group, of at least two ranks.
    """
    ring = _Ring(members, tuple(sizes[0] for sizes in agreed.sizes), scale, v_width, listed)
    segments = [None if t is None else t.to(torch.int64) for t in ids]
    anchor = agreed.anchor(inputs[0].device)
    sends_grads = agreed.needs[1] or agreed.needs[2]
    return _RingAttention.apply(anchor, ring, sends_grads, *inputs, selection, *segments)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ring: _Ring, sends_grads: bool, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, sink, selection, ids_q, ids_k = inputs
        mine = _Queries(q, selection, ids_q, sink)
        o, lse = _joined(mine, _round(_Part(k, v, ids_k), ring), ring)
        ctx.ring, ctx.sends_grads = ring, sends_grads
        ctx.save_for_backward(*inputs, o, lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, selection, ids_q, ids_k, o, lse = ctx.saved_tensors
        mine, ring, acc = _Queries(q, selection, ids_q, sink), ctx.ring, acc_dtype(q.dtype)
        own = _Part(k, v, ids_k)
        dq: Tensor | None = None
        home = _Home(own, ring, acc) if ctx.sends_grads else None
        up, dsink = Upstream.of(dout, dlse, sink, o, lse)
        for step, part in _round(own, ring):
            more, dk_part, dv_part = _part_backward(up, mine, part, ring, step)
            dq = more.to(acc) if dq is None else dq.add_(more)
            del more  # before the next part's dq is made
            if home is not None:
                home.send(step, dk_part, dv_part)
        dk, dv = (None, None) if home is None else home.sums()
        wanted = ctx.needs_input_grad[3:7]
        assert dq is not None
        own_grads = (dq.to(q.dtype), dk, dv, dsink)
        kept = (g if need else None for g, need in zip(own_grads, wanted, strict=True))
        return None, None, None, *kept, None, None, None


def _joined(mine: _Queries, parts: Iterator[tuple[int, _Part]], ring: _Ring) -> tuple[Tensor, Tensor]:
    """Returns o and lse over all parts of the keys, of which there are at least two."""
    last = ring.members.size - 1
    assert last > 0, "the sink joins with the last part"
    step, part = next(parts)
    running = Running(*_attend(mine, part, ring, step))
    for step, part in parts:
        running = running.add(*_attend(mine, part, ring, step), step == last, mine.sink)
    return running.sums, running.most


def _round(own: _Part, ring: _Ring) -> Iterator[tuple[int, _Part]]:
    """Yields each step's part of the keys, this rank's own first, while the next one travels."""
    part = _Part(*(None if t is None else t.contiguous() for t in own))  # type: ignore[arg-type]
    rank, size = ring.members.rank, ring.members.size
    for step in range(size):
        if step == size - 1:
            yield step, part
            return
        following = part.like(ring.lengths[ring.owner(step + 1)])
        works = exchange(part.tensors(), rank + 1, following.tensors(), rank - 1, ring.members)
        yield step, part
        wait(works, ring.members)
        part = following


def _attention(mine: _Queries, part: _Part, ring: _Ring, step: int) -> tuple[str, tuple[Any, ...], tuple[Any, ...]]:
    """Returns the op over one part, without the sink: its name, its tensors, and what comes after its outputs."""
    start = sum(ring.lengths[: ring.owner(step)])
    # Ranges or positions as counted in this part; what lies outside it selects nothing. Clipped first: the difference
    # could overflow. -1 is no position, and stays none.
    chosen = mine.selection.clamp(-1 if ring.listed else 0, sum(ring.lengths)) - start
    if ring.listed:
        lists = (mine.q, part.k, part.v, chosen, None, None, None, mine.ids, part.ids)
        return "selection_list_attention", lists, (ring.scale, ring.v_width)
    v = part.k[..., : ring.v_width] if part.v is None else part.v
    ranges = (mine.q, part.k, v, chosen, None, None, None)
    return "selection_attention", ranges, (ring.scale, *given(mine.ids, part.ids))


def _attend(mine: _Queries, part: _Part, ring: _Ring, step: int) -> tuple[Tensor, Tensor]:
    """Returns o and lse over one part, without the sink."""
    name, tensors, options = _attention(mine, part, ring, step)
    return call(name, *tensors, *options)


def _part_backward(
    up: Upstream, mine: _Queries, part: _Part, ring: _Ring, step: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns dq over one part, and the part's dk and dv (None where v is k)."""
    name, tensors, options = _attention(mine, part, ring, step)
    # The op's gradients are those of its own outputs, which are computed again.
    outputs = call(name, *tensors, *options)
    dq, dk, dv, _ = call(f"{name}_backward", *up.to_part(*outputs), *tensors, *outputs, *options)
    if part.v is not None:
        return dq, dk, dv
    return dq, dk if ring.listed else dk + F.pad(dv, (0, dk.shape[3] - ring.v_width)), None


class _Home:
    """Sends the gradients of each step's part to the rank that holds its keys, and sums those of this rank's own."""

    def __init__(self, own: _Part, ring: _Ring, acc: torch.dtype) -> None:
        like = [t for t in (own.k, own.v) if t is not None]
        self.ring, self.acc, self.like = ring, acc, like
        self.totals = [torch.zeros_like(t, dtype=acc, memory_format=torch.contiguous_format) for t in like]
        # What travels: works, tensors sent (kept until then), tensors received.
        self.pending: tuple[Sequence[Any], list[Tensor], list[Tensor]] = ((), [], [])

    def send(self, step: int, dk: Tensor, dv: Tensor | None) -> None:
        """Sends the gradients of one step, and adds those that arrived in the step before."""
        self._arrive()
        grads = [t.contiguous() for t in (dk, dv) if t is not None]
        if step == 0:
            self.pending = ((), [], grads)
            return
        into = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in self.like]
        rank = self.ring.members.rank
        self.pending = (exchange(grads, rank - step, into, rank + step, self.ring.members), grads, into)

    def _arrive(self) -> None:
        wait(self.pending[0], self.ring.members)
        for total, t in zip(self.totals, self.pending[2], strict=False):
            total += t

    def sums(self) -> list[Tensor | None]:
        """Returns dk and dv of this rank's own keys, dv None where v is k."""
        self._arrive()
        sums: list[Tensor | None] = [total.to(t.dtype) for total, t in zip(self.totals, self.like, strict=True)]
        return [*sums, None][:2]
