# SPDX-License-Identifier: Apache-2.0
"""Runs the routing pass on an exported program."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from mhc_inductor import compat
from mhc_inductor.exported import examples, lowering
from mhc_inductor.exported.inlining import inline
from mhc_inductor.exported.spelling import Spelling
from mhc_inductor.options import DEFAULT, RoutingOptions
from mhc_inductor.report import Report
from mhc_inductor.routing import route
from mhc_inductor.routing.edit import Check
from mhc_inductor.routing.effects import ambient
from mhc_inductor.routing.graph.copies import copied
from mhc_inductor.routing.graph.values import example, run_fake
from mhc_inductor.routing.placement import KEPT, PASSED_ON


def routed(
    program: ExportedProgram, options: RoutingOptions = DEFAULT, check: Check | None = None
) -> tuple[ExportedProgram, Report]:
    """Returns a routed copy of a program, which shares its parameters, and what was found.

    Args:
        program: the program. It is left unchanged.
        options: the user's routing options.
        check: compares each formula with its op, as for :func:`mhc_inductor.routing.route`.
    """
    gm = copied(program.graph_module)
    outer = _outer_grad(gm)
    regions = inline(gm)
    signature, calls = copy.deepcopy(program.graph_signature), copy.deepcopy(program.module_call_graph)
    spelling = Spelling(gm, _numbers(program))
    with torch.set_grad_enabled(outer):
        examples.fill(gm, _needs_grad(program), ambient())
        with _kept(gm, calls):
            report = route(gm, options, check=check, exported=True)
            spelling.undo()
            lowering.lower(gm, compat.exported.for_training(program))
        if regions:
            gm, signature = compat.exported.with_mode_regions(gm, signature)
        _rename(gm, signature)
    return compat.exported.with_graph(program, gm, signature, calls), report


def _outer_grad(gm: fx.GraphModule) -> bool:
    """Returns the grad mode outside the graph's regions: export makes a region only where the mode differs."""
    found = (compat.exported.mode_region(n)[0][1] for n in gm.graph.nodes if compat.exported.is_mode_region(n))
    return next((not entered[0] for entered in found if isinstance(entered[0], bool)), True)


def _needs_grad(program: ExportedProgram) -> dict[str, bool]:
    """Returns for each input whether it may require gradients.

    Parameters may be frozen or trained later, and a user may pass inputs that require gradients.
    """
    found = {}
    for spec in program.graph_signature.input_specs:
        held = program.state_dict.get(spec.target) if spec.kind is InputKind.BUFFER and spec.target else None
        trained = spec.kind in (InputKind.PARAMETER, InputKind.USER_INPUT)
        found[_name(spec)] = trained or (isinstance(held, torch.Tensor) and held.requires_grad)
    return found


def _numbers(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Returns the inputs of the graph that are numbers written in the model's code, as ``torch.tensor(0.0)``."""
    specs = [s for s in program.graph_signature.input_specs if s.kind is InputKind.CONSTANT_TENSOR]
    held = {_name(s): program.constants.get(s.target) for s in specs if s.target is not None}
    plain = (torch.bool, torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
    return {name: t for name, t in held.items() if isinstance(t, torch.Tensor) and t.dim() == 0 and t.dtype in plain}


def _name(spec: Any) -> str:
    return str(getattr(spec.arg, "name", ""))


@contextlib.contextmanager
def _kept(gm: fx.GraphModule, calls: list[Any]) -> Iterator[None]:
    """Keeps the inputs and outputs of submodules whose calling convention export preserved.

    While the body runs, the graph reads each, so that routing replaces each by a node of the same value. Then their
    names in ``calls`` are brought up to date.
    """
    signatures = [entry.signature for entry in calls if entry.signature is not None]
    nodes = {node.name: node for node in gm.graph.nodes}
    named = [a for s in signatures for a in (*s.inputs, *s.outputs) if _name_of(a) in nodes]
    _mark(gm, calls, nodes)
    output = gm.graph.output_node()
    plain: Any = output.args[0]
    count = len(plain) if isinstance(plain, (tuple, list)) else 0
    if named:
        with gm.graph.inserting_before(output):
            output.args = ((*plain, *(_reader(nodes[_name_of(a)]) for a in named)),)
    yield
    if named:
        results: Any = output.args[0]
        output.args = (tuple(results[:count]),)
        for a, node in zip(named, results[count:], strict=True):
            read = node.target is _READ and not node.users
            a.name = (node.args[0] if read else node).name
            if read:
                gm.graph.erase_node(node)


_READ = torch.ops.aten.count_nonzero.default
"""Reads a tensor and is part of no formula. The tensor itself as a result would escape, and be cloned before ops read it."""


def _reader(node: fx.Node) -> fx.Node:
    """Returns a new node that reads a tensor; ``node`` itself if it is a size."""
    if not isinstance(example(node), torch.Tensor):
        return node
    made = node.graph.call_function(_READ, (node,))
    made.meta[examples.KEY] = run_fake(made)
    return made


def _mark(gm: fx.GraphModule, calls: list[Any], nodes: dict[str, fx.Node]) -> None:
    """Marks what lies in submodules that keep their signature, so that no formula crosses their boundary."""
    kept = {entry.fqn: entry.signature for entry in calls if entry.signature is not None and entry.fqn}
    for node in gm.graph.nodes if kept else ():
        inside = [key for key, (path, _) in node.meta.get("nn_module_stack", {}).items() if path in kept]
        node.meta.update({KEPT: inside[-1]} if inside else {})
    for path, signature in kept.items():
        for node in (nodes[_name_of(a)] for a in signature.outputs if _name_of(a) in nodes):
            stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack", {})
            innermost = [path for path, _ in stack.values()][-1:]
            node.meta[PASSED_ON] = innermost != [path.partition("@")[0]]


def _name_of(argument: Any) -> str:
    return str(getattr(argument, "name", ""))


def _rename(gm: fx.GraphModule, signature: Any) -> None:
    """Names the inputs of a graph as a program's signature does, and brings the signature's outputs up to date."""
    inputs = gm.graph.find_nodes(op="placeholder")
    compat.give_names((n, _name(s) or n.name) for n, s in zip(inputs, signature.input_specs, strict=True))
    results: Any = gm.graph.output_node().args[0]
    for node, spec in zip(results, signature.output_specs, strict=True):
        if isinstance(node, fx.Node):
            spec.arg.name = node.name
