# SPDX-License-Identifier: Apache-2.0
"""A third-party operator, which routes ``x * rsqrt(mean(x * x) + eps) * w * silu(gate)`` to one op."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from mhc_inductor.routing import Edit, Match, Miss, Value, View, algebra

aten = torch.ops.aten


@torch.library.custom_op("example::gated_norm", mutates_args=())
def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Returns the gated RMS norm of ``x [..., D]`` with ``weight [D]`` and ``gate [..., D]``."""
    return formula(x, weight, gate, eps)


@gated_norm.register_fake
def _(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


def formula(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight * torch.nn.functional.silu(gate)


def _backward(ctx, grad):
    x, weight, gate = (t.detach().requires_grad_() for t in ctx.saved_tensors)
    with torch.enable_grad():
        y = formula(x, weight, gate, ctx.eps)
    return (*torch.autograd.grad(y, (x, weight, gate), grad), None)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.eps = inputs[3]


gated_norm.register_autograd(_backward, setup_context=_setup)


class GatedNorm:
    """Finds the formula among products. An expression's factors are the same for every spelling."""

    name = "gated_norm"

    def candidates(self, view: View) -> Iterable[fx.Node]:
        for node in view.nodes:
            value = view.value(node) if node in view.live else None
            users = [view.value(user) for user in node.users]
            last = not any(u is not None and u.func is aten.mul.Tensor for u in users)
            if value is not None and value.func is aten.mul.Tensor and value.shape and last:
                yield node

    def match(self, view: View, node: fx.Node) -> Match | Miss | None:
        value = view.value(node)
        assert value is not None  # of candidates only
        term = algebra.product(algebra.whole(value))
        roots = [ref for ref, exponent in term.factors if exponent == -0.5]
        gates = [ref for ref, _ in term.factors if ref.value.func is aten.silu.default]
        if len(roots) != 1 or len(gates) != 1 or term.bound:
            return None
        eps, squares = algebra.addends(roots[0])
        if len(squares) != 1:
            return None
        square = algebra.product(squares[0][1])
        rest = [ref.value for ref, exponent in term.factors if exponent == 1.0 and ref not in gates]
        if len(square.bound) != 1 or len({ref.value for ref, _ in square.factors}) != 1 or len(rest) != 2:
            return None
        x, over = square.factors[0][0].value, square.bound[0]
        if sum(e for _, e in square.factors) != 2.0 or x.shape[-1] != over.size or x not in rest:
            return None
        if not algebra.close(square.coef * over.size.factor, 1.0):
            difference = "the sum of squares is not divided by the width"
            return Miss(self.name, difference, squares[0][1].value, value)
        if not algebra.close(term.coef, 1.0):
            return Miss(self.name, f"the norm is multiplied by {term.coef:g}; expected 1", value, value)
        weight = next(v for v in rest if v is not x)
        gate = gates[0].value.args[0]
        return Match(self.name, [x, weight, gate], [value], detail=f"eps = {eps:g}", data=eps)

    def emit(self, edit: Edit, match: Match) -> Iterable[tuple[Value, fx.Node]]:
        call = edit.emit(torch.ops.example.gated_norm.default, *map(edit.input, match.inputs), match.data)
        return [(match.outputs[0], edit.as_like(call, match.outputs[0]))]

    def kernels(self, op: str, device: str) -> tuple[str, ...]:
        return ("example::gated_norm",)
