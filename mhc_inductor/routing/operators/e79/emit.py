# SPDX-License-Identifier: Apache-2.0
"""Replaces a chain of E79's steps with one call of the op."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.ops.e79 import segment_length
from mhc_inductor.routing.edit import Edit
from mhc_inductor.routing.graph.expressions import aten
from mhc_inductor.routing.graph.values import Value, example
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match
from mhc_inductor.routing.operators.e79.inputs import Inputs, Packing, of_steps
from mhc_inductor.routing.operators.e79.loop import OP, Chain
from mhc_inductor.routing.operators.e79.outputs import Outputs, Stack, Uses, check_closed, unasked
from mhc_inductor.routing.operators.e79.terms import Frame, zero

Pairs = list[tuple[Value, fx.Node]]


@dataclasses.dataclass
class Scan:
    """The inputs, outputs and initial states of a chain of steps."""

    chain: Chain
    inputs: Inputs
    outputs: Outputs
    states: dict[str, fx.Node | None]
    """The initial states by name, S and M; None for zeros."""


def match_of(view: View, one: Chain) -> Match:
    """Returns the match of a chain. Raises Mismatch where its steps cannot become a scan."""
    known, first = one.recogniser.known, one.steps[0]
    inputs, outputs = of_steps(view, one.frame, one.steps), Uses(view, one).find()
    states = {}
    for name, value in (("S", first.S), ("M", first.M)):
        states[name] = given(view, value, known[value])
    sources = [*inputs.sources, *outputs.sources, *(node for node in states.values() if node is not None)]
    check_closed(view, one, sources, outputs.nodes)
    return Match(
        OP,
        [view.values.of(n) for n in dict.fromkeys(sources)],
        [view.values.of(n) for n in outputs.nodes],
        detail=f"n = {one.frame.n}, {len(one.steps)} steps of an unrolled loop",
        data=Scan(one, inputs, outputs, states),
        at=view.value(known[first.M_new]),
    )


def emit(edit: Edit, match: Match) -> Pairs:
    """Emits the op of a chain and returns each replaced value with its new node."""
    scan: Scan = match.data
    values, frame = edit.view.values, scan.chain.frame
    needs = trained(edit, match)
    packing = Packing(edit, scan.inputs, unasked(edit.view, scan.chain) if needs else ())
    kvqm, b_s, b_m = packing.emit()
    outs = [*scan.outputs.alone.values(), *(n for n, stack in scan.outputs.stacks.items() if stack.plan is None)]
    outs += [n for n in [scan.chain.steps[0].out_node] if n is not None and scan.outputs.sources]
    for node in outs:
        kvqm = edit.widened(kvqm, values.of(node))
    kvqm = doubled(edit, kvqm, scan.outputs.final.values())
    S0, M0 = (initial(edit, node, frame) for node in scan.states.values())
    call = called(edit, (kvqm, b_s, b_m, S0, M0), frame.n, len(scan.chain.steps), needs)
    return results(edit, call, scan)


def trained(edit: Edit, match: Match) -> bool:
    """Checks whether an input of the op may need a gradient."""
    grad = edit.place is not None and edit.place.modes.grad
    return grad and any(edit.needs_grad(edit.input(v)) for v in match.inputs)


def called(edit: Edit, inputs: tuple[fx.Node | None, ...], n: int, steps: Any, needs: bool) -> fx.Node:
    """Emits the call of the op and returns its node. The op keeps checkpoints of the states only for gradients."""
    assert inputs[0] is not None
    batch = compat.routing.hint(example(inputs[0]).shape[1])
    segment = segment_length(n, batch, steps) if needs else 0
    return edit.emit(torch.ops.mhc_inductor.e79_scan.default, *inputs, segment)


def doubled(edit: Edit, kvqm: fx.Node, states: Any) -> fx.Node:
    """Returns ``kvqm`` in fp64 where the model's states are fp64; otherwise the op keeps its states in fp32."""
    wide = any(example(state).dtype is torch.float64 for state in states)
    return edit.to(kvqm, torch.float64) if wide else kvqm


def given(view: View, value: Value, node: fx.Node) -> fx.Node | None:
    """Returns the node of an initial state; None for zeros without gradients, the op's default."""
    return None if zero(value) and not view.needs_grad[node] else node


def initial(edit: Edit, node: fx.Node | None, frame: Frame) -> fx.Node | None:
    """Returns an initial state as ``[B, n, n]``, or None."""
    if node is None:
        return None
    real = edit.current(node)
    return real if len(frame.lead) == 1 else edit.emit("reshape", real, -1, frame.n, frame.n)


def results(edit: Edit, call: fx.Node, scan: Scan) -> Pairs:
    """Returns each output of the chain with the node that takes its place."""
    values, outputs, pairs = edit.view.values, scan.outputs, Pairs()
    if outputs.stacks or outputs.alone:
        out = edit.emit(operator.getitem, call, 0)
    for node, stack in outputs.stacks.items():
        made = stacked(edit, out, stack, node) if stack.plan is None else computed(edit, out, stack, scan.chain)
        pairs.append((values.of(node), edit.as_like(made, values.of(node), out)))
    for t, node in outputs.alone.items():
        pairs.append((values.of(node), edit.as_like(edit.emit(operator.getitem, out, t), values.of(node), out)))
    for name, node in outputs.final.items():
        state = edit.emit(operator.getitem, call, {"S": 1, "M": 2}[name])
        pairs.append((values.of(node), edit.as_like(state, values.of(node))))
    return pairs


def computed(edit: Edit, out: fx.Node, stack: Stack, one: Chain) -> fx.Node:
    """Returns the stack of what each step computes from its output, computed from all outputs at once."""
    first = one.steps[0].out_node
    assert first is not None and stack.plan is not None
    piece = example(first)
    given = edit.to(edit.shaped(out, [len(one.steps), *piece.shape], out), piece.dtype)
    made = stack.plan.emit(edit, stack.row, given)
    return edit.emit("movedim", made, 0, stack.dim) if stack.dim else made


def stacked(edit: Edit, out: fx.Node, stack: Stack, node: fx.Node) -> fx.Node:
    """Returns the op's output ``[T, B, n]`` with the dimensions of ``node``, which stacks the steps' outputs."""
    wanted, dim = list(example(node).shape), stack.dim
    inner = wanted[:dim] + wanted[dim + 1 :]
    value, steps = edit.view.value(node), example(out).shape[0]
    if value is not None and value.func is aten.cat.default:
        inner.insert(dim, wanted[dim] // steps)
    spread = edit.shaped(out, [steps, *inner], out)
    return edit.emit("permute", spread, *range(1, dim + 1), 0, *range(dim + 1, len(inner) + 1)) if dim else spread
