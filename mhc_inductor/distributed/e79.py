# SPDX-License-Identifier: Apache-2.0
"""The E79 scan over time steps that are split across the ranks: each hands its states S and M to the next."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mhc_inductor.distributed.agreement import Facts, agree, requires
from mhc_inductor.distributed.groups import Members, eagerly, members
from mhc_inductor.distributed.moves import exchange, wait
from mhc_inductor.distributed.once import once
from mhc_inductor.ops import checks
from mhc_inductor.ops.e79 import segment_length
from mhc_inductor.ops.registry import call
from mhc_inductor.reference.precision import acc_dtype

_OP = "e79_scan"


@eagerly
def e79_scan(
    kvqm: Tensor,
    b_s: Tensor | None = None,
    b_m: Tensor | None = None,
    S0: Tensor | None = None,
    M0: Tensor | None = None,
    *,
    group: Any = None,
    chunks: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs :func:`mhc_inductor.e79_scan` where each rank holds a part of the time steps, in the order of the ranks.

    The recurrence is serial, so the ranks work as a pipeline over parts of the batch: while rank r runs its steps for
    one part of the sequences, rank r - 1 runs those before them for the next part. With P ranks and C chunks,
    P + C - 1 of these turns pass for the C that one rank works: the ranks are busy C / (P + C - 1) of the time. More
    chunks are smaller calls, which fill a GPU less.

    A rank sends its end states to the next rank, and gradients of its initial states to the one before: 2 * B * n * n
    numbers of 4 bytes (fp64: 8) each way, whatever the length. The backward goes from the last rank to the first.

    Every rank of the group must call the function, and reach its backward if any rank does; gradients of the states
    travel even where a rank's own outputs are not used. As for :func:`~mhc_inductor.distributed.selection_attention`,
    wrong arguments on one rank raise on all, a rank that dies ends in an error of the group, at the latest after its
    timeout, the function breaks the graph of torch.compile, and second derivatives raise RuntimeError.

    Args:
        kvqm: This rank's steps ``[T, B, 4n]``, as for the local function. T is at least 1 and may differ between ranks.
        b_s: None, fixed ``[n]`` (the same on all ranks), or ``[T, B, n]`` of this rank's steps.
        b_m: The same choices, independent of those for b_s.
        S0: S before the first rank's first step, ``[B, n, n]``, or None for zero. Read on the group's first rank; the
            others may pass None, or a tensor (a parameter that the ranks share), which gets a gradient of zero.
        M0: M before the first rank's first step; as S0.
        group: A process group, a device mesh of one dimension, or None for the default group.
        chunks: Parts of the batch, 1 to B. None for the smaller of B and the number of ranks.

    Returns:
        ``(out, S, M)``: out ``[T, B, n]`` of this rank's steps, and S and M ``[B, n, n]`` after this rank's last step.
        Those of the last rank are the final states of the sequences; ``torch.distributed.broadcast`` gives them to all.
        All three are differentiable on every rank. The gradient of a fixed bias is the share of this rank's steps: sum
        it over the ranks, as DDP and FSDP do.

    Raises:
        ValueError: A shape, device or value does not fit on some rank, differs between ranks where it must not, or
            gradients are switched off on some ranks only. Every rank raises the same message.
        TypeError: The same for types and dtypes.
        RuntimeError: There is no process group, or a rank does not answer.

    Source: the E79 model's recurrence.
    """
    group = members(_OP, group)
    inputs = kvqm, b_s, b_m, S0, M0
    agreed = agree(_OP, group, lambda: _facts(inputs, chunks, group))
    for i, name in enumerate(("S0", "M0")):
        if not agreed.sizes[0][i] and any(sizes[i] for sizes in agreed.sizes):
            raise ValueError(f"{_OP}: {name} must be given on the group's first rank if it is on any")
    anchor = agreed.anchor(kvqm.device)
    pipeline = _Pipeline(group, _count(chunks, kvqm.shape[1], group.size), anchor.requires_grad)
    return _Scan.apply(anchor, pipeline, *inputs)


def _facts(inputs: tuple[Any, ...], chunks: int | None, group: Members) -> Facts:
    """Checks this rank's arguments."""
    checks.check("e79_scan", *inputs)
    kvqm, b_s, b_m, *states = inputs
    group.check_device(_OP, "kvqm", kvqm)
    same = {
        "kvqm's dtype": kvqm.dtype,
        "kvqm's B, 4n": list(kvqm.shape[1:]),
        "chunks": _count(chunks, kvqm.shape[1], group.size),
        "the form of b_s": None if b_s is None else b_s.dim(),
        "the form of b_m": None if b_m is None else b_m.dim(),
    }
    given = (int(states[0] is not None), int(states[1] is not None))
    return Facts(same, given, requires(*inputs))


def _count(chunks: int | None, batch: int, ranks: int) -> int:
    """Returns the number of chunks; raises ValueError or TypeError unless it is one."""
    if chunks is None:
        return max(1, min(batch, ranks))
    if isinstance(chunks, bool) or not isinstance(chunks, int):
        raise TypeError(f"{_OP}: chunks must be an int or None, got {type(chunks).__name__}")
    if not 1 <= chunks <= max(1, batch):
        raise ValueError(f"{_OP}: chunks must be from 1 to B = {batch}, got {chunks}")
    return chunks


class _Pipeline(NamedTuple):
    members: Members
    chunks: int
    keeps: bool
    """Whether a backward may follow."""

    def parts(self, batch: int) -> Iterator[slice]:
        """Yields the sequences of each chunk; their numbers differ by at most one."""
        ends = [batch * i // self.chunks for i in range(self.chunks + 1)]
        return (slice(a, b) for a, b in itertools.pairwise(ends))


class _Relay:
    """Passes two states per chunk along the ranks: ``step`` is 1 in the forward, -1 in the backward."""

    def __init__(self, members: Members, step: int) -> None:
        source, to = members.rank - step, members.rank + step
        self.members = members
        self.source = source if 0 <= source < members.size else None
        self.to = to if 0 <= to < members.size else None
        self.sent: list[tuple[list[dist.Work], Tensor]] = []

    def receive(self, shape: tuple[int, ...], like: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the two tensors of the rank before, or None twice where there is none."""
        if self.source is None:
            return None, None
        both = like.new_empty((2, *shape), dtype=acc_dtype(like.dtype))
        wait(exchange((), 0, (both,), self.source, self.members), self.members)
        return both[0], both[1]

    def send(self, first: Tensor, second: Tensor) -> None:
        """Starts to send two tensors to the next rank, if there is one."""
        if self.to is not None:
            both = torch.stack((first, second))
            self.sent.append((exchange((both,), self.to, (), 0, self.members), both))

    def finish(self) -> None:
        """Waits until all is sent."""
        for works, _ in self.sent:
            wait(works, self.members)


def _chunk(at: slice, kvqm: Tensor, *biases: Tensor | None) -> list[Tensor | None]:
    """Returns one chunk's kvqm and biases. A fixed bias is widened: its gradients are summed over the chunks."""
    parts = [None if t is None else t.to(acc_dtype(kvqm.dtype)) if t.dim() == 1 else t[:, at] for t in biases]
    return [kvqm[:, at], *parts]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pipeline: _Pipeline, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        kvqm, b_s, b_m, S0, M0 = given
        steps, batch, width = kvqm.shape
        n, relay = width // 4, _Relay(pipeline.members, 1)
        largest = -(-batch // pipeline.chunks)
        ctx.segment = segment_length(n, largest, steps) if pipeline.keeps else 0
        results, saved = [], []
        for at in pipeline.parts(batch):
            inputs = _chunk(at, kvqm, b_s, b_m)
            initial = relay.receive((at.stop - at.start, n, n), kvqm)
            if relay.source is None:
                initial = tuple(None if t is None else t[at] for t in (S0, M0))
            out, S, M, *kept = call("e79_scan", *inputs, *initial, ctx.segment)
            relay.send(S, M)
            results.append((out, S, M))
            saved += [*initial, *kept]
        relay.finish()
        ctx.pipeline = pipeline
        if pipeline.keeps:
            ctx.save_for_backward(*given, *saved)
        ctx.set_materialize_grads(False)
        outs, Ss, Ms = zip(*results, strict=True)
        return torch.cat(outs, 1), torch.cat(Ss), torch.cat(Ms)

    @staticmethod
    @once
    def backward(ctx: Any, dout: Tensor | None, dS: Tensor | None, dM: Tensor | None) -> tuple[Tensor | None, ...]:
        kvqm, b_s, b_m, S0, M0, *saved = ctx.saved_tensors
        batch, n, pipeline = kvqm.shape[1], kvqm.shape[2] // 4, ctx.pipeline
        relay = _Relay(pipeline.members, -1)
        gradients = _Gradients(relay.to is None, kvqm, b_s, b_m, S0, M0)
        for i, at in enumerate(pipeline.parts(batch)):
            S_in, M_in, checkpoints, gates = saved[4 * i : 4 * i + 4]
            inputs = _chunk(at, kvqm, b_s, b_m)
            own = [None if t is None else t[at] for t in (dS, dM)]
            later = relay.receive((at.stop - at.start, n, n), kvqm)
            ends = [a if b is None else b if a is None else a + b for a, b in zip(own, later, strict=True)]
            up = None if dout is None else dout[:, at]
            grads = call("e79_scan_backward", up, *ends, *inputs, S_in, M_in, checkpoints, gates, ctx.segment)
            relay.send(grads[3], grads[4])
            gradients.add(at, grads)
        relay.finish()
        wanted = ctx.needs_input_grad[2:]
        kept = (g if need else None for g, need in zip(gradients.finish(), wanted, strict=True))
        return None, None, *kept


class _Gradients:
    """Collects the gradients of kvqm, biases and initial states from the chunks; only the first rank read the states."""

    def __init__(self, first: bool, kvqm: Tensor, *others: Tensor | None) -> None:
        self.first, self.inputs = first, (kvqm, *others)
        acc = acc_dtype(kvqm.dtype)
        # Zero is where the sums over the chunks start, and the gradient of a state that was not read.
        self.totals = [
            None if t is None else torch.zeros(t.shape, dtype=acc if t.dim() == 1 else t.dtype, device=t.device)
            for t in self.inputs
        ]

    def add(self, at: slice, grads: tuple[Tensor, ...]) -> None:
        """Takes the backward op's results of the chunk ``at``."""
        for i, (total, grad) in enumerate(zip(self.totals, grads, strict=True)):
            if total is None:
                continue
            if i >= 3:
                if self.first:
                    total[at] = grad
            elif total.dim() == 1:
                total += grad
            else:
                total[:, at] = grad

    def finish(self) -> list[Tensor | None]:
        """Returns the gradients, each in its input's dtype."""
        pairs = zip(self.totals, self.inputs, strict=True)
        return [None if total is None or t is None else total.to(t.dtype) for total, t in pairs]
