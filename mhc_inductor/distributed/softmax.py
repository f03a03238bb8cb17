# SPDX-License-Identifier: Apache-2.0
"""Joins partial softmax results, what attention over each part of the keys returned, and splits their gradients.

CUDA tensors run kernels (``kernels/selection/join.py``), others the formulas here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhc_inductor.kernels import eager
from mhc_inductor.reference.selection import Rows, backward_rows


class Running(NamedTuple):
    """The softmax-weighted sum over the parts so far, relative to the largest lse so far.

    A part's o counts with the weight exp(lse - most). NaN and inf of an o stay what they are, even where the weight is
    0: a selected value of inf is inf in the result, as over all keys at once.
    """

    sums: Tensor
    """``[B, S, G, h, Dv]``; in lse's dtype and overwritten later, or the first part's o."""
    most: Tensor
    """``[B, S, G, h]``, in lse's dtype; -inf where nothing is selected, whose o is 0."""
    total: Tensor | None = None
    """The sum of the weights, like ``most``; None after the first part."""

    def add(self, o: Tensor, lse: Tensor, last: bool, sink: Tensor | None) -> Running:
        """Returns the sum with another part; with the ``last``, o and lse of all parts in its first two fields.

        The sink's logits, ``[G, h]``, join the denominator of that o only.
        """
        return Running(*_run("selection_join", join, *self, o, lse, sink if last else None, last))


def _run(name: str, formula: Callable[..., Any], *args: Any) -> Any:
    return eager.run(name, formula, *args) if args[0].is_cuda else formula(*args)


def join(
    sums: Tensor, most: Tensor, total: Tensor | None, o: Tensor, lse: Tensor, sink: Tensor | None, last: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns sums, most and total with another part, or o, lse and None where it is the ``last``."""
    if total is None:
        total, sums = (most != -torch.inf).to(most.dtype), sums.to(most.dtype, copy=True)
    top = torch.maximum(most, lse)
    empty = top == -torch.inf
    base = torch.where(empty, 0.0, top)
    before, now = torch.exp(most - base), torch.exp(lse - base)
    total = total * before + now
    sums.mul_(_kept(before)).addcmul_(o, _kept(now))
    if not last:
        return sums, top, total
    weights = total if sink is None else total + torch.exp(sink.to(base.dtype) - base)
    return sums.mul_(_kept(torch.where(empty, 0.0, 1 / weights))).to(o.dtype), base + torch.log(total), None


def _kept(weight: Tensor) -> Tensor:
    """Returns weights for o, at least the smallest normal number: it vanishes in any sum, and inf times it is inf."""
    return weight.clamp_min(torch.finfo(weight.dtype).tiny).unsqueeze(-1)


class Upstream(NamedTuple):
    """The gradients of the joined o and lse.

    A part's share of the result is ``w o_part`` with ``w = exp(lse_part - total)``, where ``total`` is the logarithm of
    the whole denominator, and dw/dlse_part reaches o through all parts::

        do_part   = w do
        dlse_part = w <do, o_part - o> + dlse exp(lse_part - lse)
    """

    rows: Rows
    o: Tensor

    @classmethod
    def of(
        cls, dout: Tensor | None, dlse: Tensor | None, sink: Tensor | None, o: Tensor, lse: Tensor
    ) -> tuple[Upstream, Tensor | None]:
        """Returns the gradients to split, and that of the sink, None without one."""
        rows, dsink = backward_rows(dout, dlse, sink, o, lse)
        return cls(rows, o), None if sink is None else dsink

    def to_part(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of one part's o and lse: 0 in rows that select nothing there."""
        dout, dlse, whole, total = self.rows
        found: tuple[Tensor, Tensor] = _run(
            "selection_part_gradients", part_gradients, dout, dlse, self.o, whole, total, o, lse
        )
        return found


def part_gradients(
    dout: Tensor, dlse: Tensor, o: Tensor, lse: Tensor, total: Tensor, part: Tensor, part_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of ``part`` and of its lse from those of the joined o and lse."""
    nothing = part_lse == -torch.inf
    weight = torch.exp(part_lse - total)
    dot = part.to(lse.dtype, copy=True).sub_(o).mul_(dout).sum(-1)
    grad = weight * dot + dlse * torch.exp(part_lse - lse)
    share = torch.mul(dout, weight.unsqueeze(-1), out=torch.empty_like(part))  # rounded once, in one pass
    return share.masked_fill_(nothing.unsqueeze(-1), 0.0), torch.where(nothing, 0.0, grad)
