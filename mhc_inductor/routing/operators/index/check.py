# SPDX-License-Identifier: Apache-2.0
"""Verification of choices: sample data, and the comparison of two choices by the scores that they select."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from mhc_inductor.routing.graph.linear import Floor, Linear
from mhc_inductor.routing.graph.values import Value, example
from mhc_inductor.routing.operators.index.matches import Found

_EPS = 16.0
"""Roundings by which scores may differ that are summed in another order, relative to the largest score."""

_HIDDEN = 1e30  # scores of visible keys are smaller


class Check:
    """Makes data for one formula, and compares choices by the formula's scores of it."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.masks = {m.ref.value.node: m for m in found.visible.masks}
        self.most: dict[fx.Node | None, int] = {}
        for limit in found.visible.limits:
            self._learn(limit, 1)

    def _learn(self, x: Linear, times: int) -> None:
        """Notes how large the integers that a limit is computed from must be to reach the last key."""
        t = self.found.formula.t.size
        keys = t.factor if not t.symbols else 16
        for datum in x.data():
            node = datum.ref.value.node
            self.most[node] = max(self.most.get(node, 0), times * keys + 3)
        for a, _ in x.terms:
            if isinstance(a, Floor):
                self._learn(a.of, times * a.by)

    def sample(
        self,
        value: Value,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        generator: torch.Generator,
        case: int,
    ) -> Tensor | None:
        """Returns data for a tensor: masks of 0 and their fill, positions up to the last key, normal numbers else."""
        node = value.node
        mask, most = self.masks.get(node), self.most.get(node)

        def uniform(*sizes: int) -> Tensor:
            return torch.rand(sizes, generator=generator, device=device)

        if mask is not None or dtype is torch.bool:
            # A few keys, most keys, or none in some rows.
            shown = uniform(*shape) < (0.2, 0.8, 0.5)[case % 3]
            if case % 3 == 2 and shape:
                shown &= (uniform(*shape[:-1]) < 0.6).unsqueeze(-1)
            if mask is None:
                made = shown
            elif mask.added:
                made = torch.zeros(shape, dtype=dtype, device=device).masked_fill_(~shown, min(mask.values))
            else:
                made = shown if mask.want else ~shown
        elif dtype.is_floating_point:
            made = torch.randn(shape, generator=generator, device=device).to(dtype)
        else:
            low, high = (0, 2) if most is None else (-2, most)
            made = torch.randint(low, high, shape, generator=generator, device=device).to(dtype)
        if node is not None:
            for d, stride in enumerate(example(node).stride()):
                if isinstance(stride, int) and stride == 0 and shape[d]:
                    made = made.narrow(d, 0, 1).expand(shape).contiguous()
        return made

    def compare(self, formula: list[Tensor], op: list[Tensor], scores: Tensor) -> float | None:
        """Returns 0.0 if the op's keys are distinct keys with the scores of the formula's; else how far they are off."""
        return max(self._apart(scores.double(), a, b) for a, b in zip(formula, op, strict=True))

    def _apart(self, scores: Tensor, formula: Tensor, op: Tensor) -> float:
        t = scores.shape[-1]
        if formula.shape != op.shape or formula.dtype != op.dtype:
            return float("inf")
        if not op.numel():
            return 0.0
        if op.is_floating_point():
            return self._off(scores, formula.double(), op.double())
        ordered = op.sort(-1).values
        if bool((ordered[..., :1] < 0).any() or (ordered[..., -1:] >= t).any() or (ordered.diff(dim=-1) == 0).any()):
            return float("inf")
        return self._off(scores, *(scores.gather(-1, x.long()) for x in (formula, op)))

    def _off(self, scores: Tensor, formula: Tensor, op: Tensor) -> float:
        """Returns how far the chosen scores are apart, relative to the largest of all; 0.0 for a rounding."""
        a, b = (x.sort(-1).values for x in (op, formula))
        fine = (a.abs() < _HIDDEN) & (b.abs() < _HIDDEN)
        # Scores of hidden keys, NaN and infinities have no rounding.
        if not torch.equal(*(x[~fine].nan_to_num(0.0, math.inf, -math.inf) for x in (a, b))):
            return float("inf")
        usual = scores.abs() < _HIDDEN
        if self.found.visible.fill is not None:
            usual &= scores != self.found.visible.fill
        size = float(scores[usual].abs().max()) if bool(usual.any()) else 1.0
        off = float((a - b)[fine].abs().max()) / max(size, 1e-30) if bool(fine.any()) else 0.0
        return 0.0 if off <= _EPS * self._rounding() else off

    def _rounding(self) -> float:
        """Returns the rounding of the narrowest dtype among the formula's own scores."""
        return max(torch.finfo(v.dtype).eps for v in self.found.formula.met if v.dtype.is_floating_point)
