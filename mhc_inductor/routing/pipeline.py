"""The routing pass: formulas of a Dynamo graph become ops, before autograd, and neighbouring ops become one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mhc_inductor.log import logger, warn_once
from mhc_inductor.routing.graph.inplace import Change, exchange, out_of_place
from mhc_inductor.routing.graph.values import Value, Values
from mhc_inductor.routing.operator import Miss
from mhc_inductor.routing.operators.kernels import kernels_of
from mhc_inductor.routing.operators.mhc.fuse import fuse
from mhc_inductor.routing.operators.mhc.search import Finder, Pre
from mhc_inductor.routing.report import Fused, NearMiss, Report, Routed, source_of
from mhc_inductor.routing.rewriter import Rewriter


def legacy(gm: torch.fx.GraphModule, report: Report) -> None:
    """Runs the operators that do not plug in yet."""
    _route(gm, report, {}, ())


def _route(
    gm: torch.fx.GraphModule,
    report: Report,
    templates: dict[Any, Any],
    autocast: tuple[Any, ...],
    body: bool = False,
) -> None:
    states = _autocast_states(gm.graph, autocast)
    # Bodies of higher-order operators (activation checkpointing) are graphs of their own.
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(inner := getattr(gm, str(node.target), None), fx.GraphModule):
            user = next(iter(node.users), node)
            _route(inner, report, templates, states.get(user, autocast), body=True)
    saved = None
    undo: list[Change] = []
    try:
        found = Report()
        values = Values(gm.graph, states, templates)
        if values.transformed:
            logger.info(
                "not routed: what torch.func.grad or jvp transforms inside a compiled function (%s)", _where(gm.graph)
            )
        undo = out_of_place(gm.graph, values)
        finder = Finder(gm.graph, values)
        result = finder.run()
        rewriter = None
        if result.pres or result.posts or result.sinkhorns:
            if saved is None:
                exchange(undo)
                saved = _copy(gm.graph)
                exchange(undo)
            rewriter = Rewriter(gm.graph, finder)
            rewriter.run(result)
            for op, node, what in rewriter.made:
                found.routed.append(_routed(op, node, what))
        if not (rewriter is not None and rewriter.made):
            exchange(undo)
            undo = []
        if rewriter is not None or _holds_ops(gm.graph):
            saved = saved or _copy(gm.graph)
            for fused, second, node in fuse(gm.graph):
                kernels = kernels_of(fused, _device(node))
                found.fused.append(Fused(fused, ("mhc_post", second), source_of(node), kernels))
        if saved is not None:
            gm.graph.lint()
            gm.recompile()
        for miss in [*result.misses, *(rewriter.misses if rewriter is not None else [])]:
            found.near_misses.append(_near_miss(miss))
        report.extend(found)
    except Exception as error:  # whatever goes wrong here, the model compiles as it would without this package
        if saved is not None:
            gm.graph = saved
            gm.recompile()
        else:
            exchange(undo)
        where = _where(gm.graph)
        message = f"a graph is compiled unrouted: {type(error).__name__}: {error} ({where})"
        report.problems.append(message)
        logger.debug("routing failed", exc_info=True)
        warn_once(f"unrouted: {type(error).__name__} {where}", message)


def _holds_ops(graph: fx.Graph) -> bool:
    post = torch.ops.mhc_inductor.mhc_post.default
    return any(node.target is post for node in graph.nodes)


def _copy(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    out = copy.graph_copy(graph, {}, return_output_node=True)
    if out is not None:
        value, old = out if isinstance(out, tuple) else (out, None)
        node = copy.output(value)
        if old is not None:
            node.meta = dict(old.meta)
    return copy


def _autocast_states(graph: fx.Graph, outer: tuple[Any, ...]) -> dict[fx.Node, tuple[Any, ...]]:
    """The autocast regions of the graph that each node is in, outermost first."""
    states: dict[fx.Node, tuple[Any, ...]] = {}
    stack = list(outer)
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name == "_enter_autocast":
            args = (*node.args, None, None, None)[:4]
            stack.append((args[0], args[1], True if args[2] is None else args[2], None))
        elif name == "_exit_autocast" and stack:
            stack.pop()
        if stack:
            states[node] = tuple(stack)
    return states


def _where(graph: fx.Graph) -> str:
    return next((s for node in graph.nodes if (s := source_of(node)) != "unknown"), "no source line known")


def _routed(op: str, node: fx.Node, what: Any) -> Routed:
    detail = ""
    source = source_of(node)
    if isinstance(what, Pre):
        source = source_of(what.h_in.node)
        d = what.norm.width // what.n
        detail = f"n = {what.n}, D = {d}, norm_eps = {what.norm.eps:g}, hc_eps = {what.pre.add:g}"
        if op == "mhc_pre" and what.fold and what.chain is not None:
            detail += f", {what.chain.iters} sinkhorn iterations ({what.chain.form}, eps = {what.chain.eps or 0.0:g})"
    elif hasattr(what, "x_out"):
        source = source_of(what.x_out.node)
        matrix = what.found.matrix
        detail = "residual x" if matrix is None else "h_res" if what.own else "the model's own matrix"
        detail += " transposed" * what.found.transpose
    elif isinstance(what, Value):
        source = source_of(what.node)
    elif hasattr(what, "mixed"):
        source = source_of(what.mixed.node)
        detail = f"{what.chain.iters} iterations ({what.chain.form}, eps = {what.chain.eps or 0.0:g})"
    return Routed(op, source, detail, kernels_of(op, _device(node)))


def _near_miss(miss: Miss) -> NearMiss:
    node = (
        miss.value.node
        if miss.value is not None and miss.value.node is not None
        else miss.start.node
        if miss.start
        else None
    )
    return NearMiss(miss.op, miss.reason, source_of(node), node.name if node is not None else "")


def _device(node: fx.Node) -> str:
    example = node.meta.get("example_value")
    tensor = example[0] if isinstance(example, (tuple, list)) else example
    return tensor.device.type if isinstance(tensor, torch.Tensor) else "cpu"
