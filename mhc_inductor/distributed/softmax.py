"""Joins partial softmax results, what attention over each part of the keys returned, and splits their gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mhc_inductor.reference.selection import Rows, backward_rows


class Running:
    """The softmax-weighted sum over the parts so far, relative to the largest lse so far.

    A part's o counts with the weight exp(lse - most). NaN and inf of an o stay what they are, even where the weight is
    0: a selected value of inf is inf in the result, as over all keys at once.
    """

    def __init__(self, o: Tensor, lse: Tensor, dtype: torch.dtype) -> None:
        """Starts with the first part: ``o[..., Dv]``, and ``lse[...]``, -inf where nothing is selected, whose o is 0."""
        self.most = lse.to(dtype)
        self.total = (lse != -torch.inf).to(dtype)
        self.sums = o.to(dtype, copy=True)

    def add(self, o: Tensor, lse: Tensor) -> None:
        """Adds another part."""
        most = torch.maximum(self.most, lse)
        base = torch.where(most == -torch.inf, 0.0, most)
        before, now = torch.exp(self.most - base), torch.exp(lse - base)
        self.total = self.total * before + now
        self.sums.mul_(_kept(before)).addcmul_(o, _kept(now))
        self.most = most

    def finish(self, sink: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns o in ``dtype``, and lse; the sink's logits, ``[G, h]``, join the denominator of o only."""
        empty = self.most == -torch.inf
        base = torch.where(empty, 0.0, self.most)
        lse = base + torch.log(self.total)
        total = self.total if sink is None else self.total + torch.exp(sink.to(base.dtype) - base)
        return self.sums.mul_(_kept(torch.where(empty, 0.0, 1 / total))).to(dtype), lse


def _kept(weight: Tensor) -> Tensor:
    """Returns weights for o, at least the smallest normal number: it vanishes in any sum, and inf times it is inf."""
    return weight.clamp_min(torch.finfo(weight.dtype).tiny).unsqueeze(-1)


class Upstream(NamedTuple):
    """The gradients of the joined o and lse.

    A part's share of the result is ``w o_part`` with ``w = exp(lse_part - total)``, where ``total`` is the logarithm of
    the whole denominator, and dw/dlse_part reaches o through all parts::

        do_part   = w do
        dlse_part = w (<do, o_part> - <do, o>) + dlse exp(lse_part - lse)
    """

    rows: Rows
    dot: Tensor
    """<do, o> of each row."""

    @classmethod
    def of(
        cls, dout: Tensor | None, dlse: Tensor | None, sink: Tensor | None, o: Tensor, lse: Tensor
    ) -> tuple[Upstream, Tensor | None]:
        """Returns the gradients to split, and that of the sink, None without one."""
        rows, dsink = backward_rows(dout, dlse, sink, o, lse)
        return cls(rows, _dot(rows.dout, o, lse.dtype)), None if sink is None else dsink

    def to_part(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of one part's o and lse: 0 in rows that select nothing there."""
        dout, dlse, whole, total = self.rows
        nothing = lse == -torch.inf
        weight = torch.exp(lse - total)
        grad = weight * (_dot(dout, o, lse.dtype) - self.dot) + dlse * torch.exp(lse - whole)
        share = torch.mul(dout, weight.unsqueeze(-1), out=torch.empty_like(o))  # rounded once, in one pass
        return share.masked_fill_(nothing.unsqueeze(-1), 0.0), torch.where(nothing, 0.0, grad)


def _dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.to(dtype, copy=True).mul_(b).sum(-1)
