# SPDX-License-Identifier: Apache-2.0
"""Verification of choices: sample data, and the comparison of two choices by the scores that they select."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, fx

from mhc_inductor import compat
from mhc_inductor.routing.graph.linear import Floor, Linear
from mhc_inductor.routing.graph.values import Value, example, run
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.operators.index.matches import Found
from mhc_inductor.routing.operators.index.visible import Mask
from mhc_inductor.routing.verify import fixed

_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
_EPS = 16.0
"""Roundings by which scores may differ that are summed in another order, relative to the largest score."""


class Check:
    """Makes data for one formula, keeps it, and computes the formula's own scores from it to compare a choice with."""

    def __init__(self, view: View, found: Found) -> None:
        self.view, self.found = view, found
        self.given: dict[fx.Node, Tensor] = {}
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
        made = self._made(self.masks.get(node), self.most.get(node), shape, dtype, device, generator, case)
        if node is not None:
            for d, stride in enumerate(example(node).stride()):
                if isinstance(stride, int) and stride == 0 and shape[d]:
                    made = made.narrow(d, 0, 1).expand(shape).contiguous()
            self.given[node] = made
        return made

    def _made(
        self,
        mask: Mask | None,
        most: int | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        generator: torch.Generator,
        case: int,
    ) -> Tensor:
        def uniform(*sizes: int) -> Tensor:
            return torch.rand(sizes, generator=generator, device=device)

        if mask is not None or dtype is torch.bool:
            # A few keys, most keys, or none in some rows.
            shown = uniform(*shape) < (0.2, 0.8, 0.5)[case % 3]
            if case % 3 == 2 and shape:
                shown &= (uniform(*shape[:-1]) < 0.6).unsqueeze(-1)
            if mask is None or not mask.added:
                return shown if mask is None or mask.want else ~shown
            fill = min(mask.values)
            return torch.zeros(shape, dtype=dtype, device=device).masked_fill_(~shown, fill)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator, device=device).to(dtype)
        high = 2 if most is None else most
        return torch.randint(0 if most is None else -2, high, shape, generator=generator, device=device).to(dtype)

    def compare(self, formula: list[Tensor], op: list[Tensor]) -> float | None:
        """Returns 0.0 if the op's keys are distinct keys with the scores of the formula's; else how far they are off."""
        with torch.no_grad(), compat.routing.outside_compile():
            scores = self._scores().double()
        return max(self._apart(scores, a, b) for a, b in zip(formula, op, strict=True))

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
        if not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        fine = a.isfinite() & (a.abs() < 1e30)
        usual = scores.isfinite() & (scores.abs() < 1e30)
        size = float(scores[usual].abs().max()) if bool(usual.any()) else 1.0
        off = float((a - b)[fine].abs().max()) / max(size, 1e-30) if bool(fine.any()) else 0.0
        return 0.0 if off <= _EPS * self._rounding() else off

    def _rounding(self) -> float:
        """Returns the rounding of the narrowest dtype among the formula's own scores."""
        return max(torch.finfo(v.dtype).eps for v in self.found.formula.met if v.dtype.is_floating_point)

    def _scores(self) -> Tensor:
        """Returns the formula's scores on the data made last."""
        known: dict[fx.Node, Any] = dict(self.given)
        end = self.found.scores.node
        if end is None:
            raise ValueError("the scores have no node")
        todo = [end]
        while todo:
            node = todo[-1]
            sized = isinstance(example(node), _SIZES)
            missing = [] if node in known or sized else [a for a in node.all_input_nodes if a not in known]
            todo += missing
            if not missing:
                todo.pop()
                if node not in known:
                    known[node] = self._value(node, known)
        scores = known[end]
        assert isinstance(scores, Tensor)
        return scores

    def _value(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        fake = example(node)
        if isinstance(fake, _SIZES):
            return fake.node.hint
        outside = self.view.given.get(node)
        if outside is not None and outside.node is not None:
            return fixed(outside.node, {})  # the mask that a checkpointed region is given
        if node.op == "get_attr":
            owner: Any = self.view.real.owning_module
            for name in str(node.target).split("."):
                owner = getattr(owner, name)
            return owner
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        modes = self.view.modes_at(node)
        with modes.entered() if modes.autocast else contextlib.nullcontext():
            return run(node, args, kwargs)
