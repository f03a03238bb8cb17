# SPDX-License-Identifier: Apache-2.0
"""Operators of another package: a gated norm, a SwiGLU product and capped logits, each with its op."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import silu

from mhc_inductor.routing import Graph, Proposal, plugin
from mhc_inductor.routing.edit import Edit, Pairs
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match

aten = torch.ops.aten


def norm_formula(x: Tensor, w: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Returns the gated RMS norm of ``x [..., D]`` with ``w [D]`` and ``gate [..., D]``."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w * silu(gate)


def swiglu_formula(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def cap_formula(x: Tensor, scale: float, cap: float) -> Tensor:
    return cap * torch.tanh(x * (scale / cap))


def define(name: str, formula: Callable[..., Tensor], tensors: int, schema: str, wrong: int | None = None) -> Any:
    """Defines an op that runs ``formula``, with a fake function and gradients of its first ``tensors`` arguments.

    The gradient of the argument ``wrong`` is half of what it must be.
    """

    def fake(x: Tensor, *rest: Any) -> Tensor:
        return torch.empty_like(x)

    def setup(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:tensors])
        ctx.rest = inputs[tensors:]

    def backward(ctx: Any, grad: Tensor) -> Any:
        given = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            result = formula(*given, *ctx.rest)
        found = torch.autograd.grad(result, given, grad)
        return (*(g * 0.5 if i == wrong else g for i, g in enumerate(found)), *(None for _ in ctx.rest))

    op = torch.library.custom_op(f"example::{name}", formula, mutates_args=(), schema=schema)
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=setup)
    return getattr(torch.ops.example, name)


define("gated_norm", norm_formula, 3, "(Tensor x, Tensor w, Tensor gate, float eps) -> Tensor")
define("swiglu", swiglu_formula, 2, "(Tensor gate, Tensor up) -> Tensor")
define("softcap", cap_formula, 1, "(Tensor x, float scale, float cap) -> Tensor")


def gated_norm(g: Graph) -> Iterator[Proposal]:
    for out in g.products():
        n, s = out.norm(), out.factor(aten.silu)
        if n and s:
            yield g.propose(out, x=n, w=out.rest(n, s), gate=s.arg, eps=n.eps)


def swiglu(g: Graph) -> Iterator[Proposal]:
    for out in g.products():
        s = out.factor(aten.silu)
        yield g.propose(out, gate=s.arg, up=out.rest(s))


def softcap(g: Graph) -> Iterator[Proposal]:
    for out in g.products():
        inner = out.factor(aten.tanh).arg
        yield g.propose(out, x=inner.rest(), scale=inner.coef * out.coef, cap=out.coef)


GENERATORS = {"gated_norm": gated_norm, "swiglu": swiglu, "softcap": softcap}


class GatedNorm:
    """The gated norm as an operator in the pass's own protocol, which is not compared with its formula unasked."""

    name = "gated_norm"
    op = torch.ops.example.gated_norm.default

    def candidates(self, view: View) -> Iterable[fx.Node]:
        matches = plugin._Plugged(self.name, self.op, gated_norm).match(view, view.nodes[0])
        plain = (dataclasses.replace(m, data=m.data.given["eps"], proposed=False, cases=2) for m in matches)
        self.found = {m.start.node: m for m in plain}
        return self.found

    def match(self, view: View, node: fx.Node) -> Match:
        return self.found[node]

    def emit(self, edit: Edit, match: Match) -> Pairs:
        call = edit.emit(self.op, *map(edit.input, match.inputs), match.data)
        return [(match.outputs[0], edit.as_like(call, match.outputs[0]))]

    def kernels(self, op: str, device: str) -> tuple[str, ...]:
        return ("example::gated_norm",)
