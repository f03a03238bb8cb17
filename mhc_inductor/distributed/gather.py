# SPDX-License-Identifier: Apache-2.0
"""Gathers the keys of all ranks, with a gradient: dK and dV go back to the ranks that hold the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mhc_inductor.distributed.agreement import Agreed
from mhc_inductor.distributed.groups import Members
from mhc_inductor.distributed.moves import gather_rows, sum_rows
from mhc_inductor.distributed.once import once
from mhc_inductor.reference.precision import acc_dtype


def gather(
    tensors: Sequence[Tensor | None], dim: int, needs: Sequence[bool], anchor: Tensor, agreed: Agreed, members: Members
) -> list[Tensor | None]:
    """Returns the tensors of all ranks, joined along ``dim`` in the order of the ranks; None stays None.

    Args:
        tensors: This rank's parts, or None; all ranks give the same ones.
        dim: The dimension that is split.
        needs: For each tensor, whether any rank needs its gradient.
        anchor: From :meth:`Agreed.anchor`.
        agreed: Its first size is the length of each rank's part.
        members: The group.

    Returns:
        Views whose memory has ``dim`` first: nothing is copied after the gathering, unless the parts are uneven.
    """
    lengths = tuple(sizes[0] for sizes in agreed.sizes)
    given = [t for t in tensors if t is not None]
    wanted = tuple(n for n, t in zip(needs, tensors, strict=True) if t is not None)
    joined = iter(_Gather.apply(anchor, (dim, lengths, wanted, members), *given))
    return [None if t is None else next(joined) for t in tensors]


def gather_ids(ids: Tensor | None, agreed: Agreed, members: Members) -> Tensor | None:
    """Returns the segment ids ``[B, L]`` of all ranks' keys as ``[B, sum of lengths]``, int64; None stays None."""
    if ids is None:
        return None
    # int64 on every rank, whatever dtype a rank has.
    rows = ids.movedim(1, 0).to(torch.int64)
    return gather_rows(rows, [sizes[0] for sizes in agreed.sizes], members).movedim(0, 1)


class _Gather(torch.autograd.Function):
    """Joins parts of all ranks; the backward sums gradients over the ranks, in their order."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, how: tuple[int, tuple[int, ...], tuple[bool, ...], Members], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.how = dim, lengths, wanted, members = how
        joined = tuple(gather_rows(t.movedim(dim, 0), lengths, members).movedim(0, dim) for t in tensors)
        ctx.mark_non_differentiable(*(t for t, want in zip(joined, wanted, strict=True) if not want))
        return joined

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dim, lengths, wanted, members = ctx.how
        own: list[Tensor | None] = []
        for grad, want in zip(grads, wanted, strict=True):
            if not want:
                own.append(None)
                continue
            rows = sum_rows(grad.movedim(dim, 0), lengths, members, acc_dtype(grad.dtype))
            own.append(rows.movedim(0, dim).to(grad.dtype))
        return None, None, *own
