# SPDX-License-Identifier: Apache-2.0
"""The routing pass: rewrites formulas in a Dynamo graph to ops, before autograd.

This module is the whole pass and knows no specific operator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import time
from collections.abc import Callable
from typing import Any

from torch import fx

from mhc_inductor import compat
from mhc_inductor.log import logger, warn_once
from mhc_inductor.options import DEFAULT, RoutingOptions
from mhc_inductor.report import AS_WRITTEN, NearMiss, Report, Routed
from mhc_inductor.routing.edit import Check, Edit
from mhc_inductor.routing.effects import Modes, ambient, modes_of
from mhc_inductor.routing.few_tokens import FewTokens
from mhc_inductor.routing.graph import bounds
from mhc_inductor.routing.graph.index import DynamicWidth, Unsupported, may_fix, sizes_stay
from mhc_inductor.routing.graph.values import Value, example, name_of, of_positions, reached, tensors_in
from mhc_inductor.routing.graph.view import Knowledge, Passed, View
from mhc_inductor.routing.interface import (
    DYNAMIC,
    Match,
    Mismatch,
    Miss,
    Operator,
    Unplaced,
    Verdict,
    contained,
    registered,
    unregister,
)
from mhc_inductor.routing.placement import Placement
from mhc_inductor.routing.plugin import Element, Graph, Proposal, register
from mhc_inductor.routing.sharded import as_whole
from mhc_inductor.routing.sources import modules_of, source_of
from mhc_inductor.routing.verify import Verifier
from mhc_inductor.scope import Change

__all__ = ["Element", "Graph", "Proposal", "Report", "Verifier", "register", "route", "unregister"]

_UNFOLLOWED = "an input of the formula is a view that the analysis cannot map to the tensor below it"


def route(
    gm: fx.GraphModule,
    options: RoutingOptions = DEFAULT,
    *,
    check: Check | None = None,
    lower: bool = False,
    exported: bool = False,
) -> Report:
    """Rewrites formulas of ``gm`` to ops, in place. Never raises: what cannot be analysed stays as it is.

    Args:
        gm: a Dynamo graph.
        options: the user's routing options.
        check: is called with each formula and its op before the op replaces the formula, and may refuse it. By default
            a new :class:`~mhc_inductor.routing.few_tokens.FewTokens`, or with ``options.verify`` a new
            :class:`~mhc_inductor.routing.verify.Verifier`.
        lower: keep a formula as the model wrote it if that is faster than the op. It counts as routed.
        exported: the graph is an exported program's: no dynamic size may be fixed, and it may run uncompiled.

    Returns:
        What was routed and fused, the near misses and the problems.
    """
    report = Report()
    start = time.perf_counter()
    if check is None and options.verify:
        check = Verifier()
    routing = _Pass(report, check, Knowledge(options, exported), lower)
    try:
        # A check's tensors may be in reference cycles, which only the garbage collector frees.
        checks = check is not None or any(getattr(make, "proposes", False) for make in registered())
        paused = contextlib.nullcontext() if checks else _collector_paused
        with paused, sizes_stay(exported), bounds.watch() as unfollowed, as_whole(gm) as memory:
            routing.knowledge.effects.memory = memory
            routing.graph(gm, ambient(), body=False)
        near = (_near_at(bounds.nearest(error.value), str(error)) for error in unfollowed)
        report.near_misses += dict.fromkeys(near)
    except Exception as error:  # on any failure the model compiles as it would without this package
        routing.problem("a graph is compiled unrouted", error, _where(gm.graph))
    report.seconds = time.perf_counter() - start
    try:
        _count(report)
    except Exception as error:
        routing.problem("the counters could not be updated", error, _where(gm.graph))
    return report


def _pause_collector() -> Callable[[], None]:
    if not gc.isenabled():
        return lambda: None
    gc.disable()

    def resume() -> None:
        # Make the pass's objects old, so that the next collection does not scan them all. unfreeze() would also release
        # objects that the user froze: do nothing if there are any.
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()

    return resume


_collector_paused = Change(_pause_collector)
"""Context that pauses the garbage collector during a pass.

A pass makes millions of objects, nearly all of which live until it ends. The collector would scan them, and all that
Dynamo made, again and again, for a quarter of the pass.
"""


class _Pass:
    """One run over a graph and the bodies of its higher-order operators."""

    def __init__(self, report: Report, check: Check | None, knowledge: Knowledge, lower: bool) -> None:
        self.report = report
        self.check = check or FewTokens()
        self.judge = check or Verifier()
        """The check of what is only proposed."""
        self.lower = lower
        self.knowledge = knowledge

    def graph(self, gm: fx.GraphModule, outer: Modes, body: bool, given: Passed | None = None) -> None:
        """Routes one graph, then the graphs of its higher-order operators.

        ``given``: what is known of the tensors that the graph around a checkpointed region passes to this graph's inputs.
        """
        self.report.graphs += 1
        self.report.nodes += len(gm.graph.nodes)
        try:
            self._graph(gm, outer, body, given or {})
        except Exception as error:  # on any failure the model compiles as it would without this package
            self.problem("a graph is compiled unrouted", error, _where(gm.graph))

    def _graph(self, gm: fx.GraphModule, outer: Modes, body: bool, given: Passed) -> None:
        first = View(gm.graph, outer, self.knowledge, body, given=given)
        if first.values.transformed:
            where = _where(gm.graph)
            logger.info("not routed: formulas inside torch.func.grad or torch.func.jvp (%s)", where)
        self.report.near_misses += _opaque(first)
        view: View | None = first
        try:
            for make in registered():
                ops = getattr(make, "looks_for_ops", False)
                if view is None or (view.in_place and not ops):
                    view = View(gm.graph, outer, self.knowledge, body, ops, given)
                view = self._operator(make, gm, view)
        finally:
            if view is not first:
                gm.recompile()
        modes = modes_of(gm.graph, outer)
        # Bodies of higher-order operators, such as activation checkpointing, are separate graphs.
        around: View | None = None
        for inner, users in _bodies(gm).items():
            if first.has_policy:
                self.knowledge.in_policies.add(inner.graph)
            if len({modes[user] for user in users}) > 1:
                logger.info("not routed: the body of several calls in different modes (%s)", _where(inner.graph))
                continue
            passed: Passed = {}
            if len(users) == 1 and name_of(users[0]) == _CHECKPOINT:
                around = around or View(gm.graph, outer, self.knowledge, body, given=given)
                passed = _passed(around, users[0], inner)
            known = len(self.report.routed)
            self.graph(inner, modes[users[0]], body=True, given=passed)
            if name_of(users[0]) == _FUNCTION:
                inside = [dataclasses.replace(r, detail=r.detail + _OWN_BACKWARD) for r in self.report.routed[known:]]
                self.report.routed[known:] = inside

    def _operator(self, make: Callable[[], Operator], gm: fx.GraphModule, view: View) -> View | None:
        """Runs one operator on a graph. Returns ``view`` if it left the graph unchanged, else None."""
        edit, found = Edit(view), Report()
        try:
            operator = make()
            view.values.forget({})
            matches, found = _found(operator, view)
            todo = sorted(matches, key=lambda match: view.order.get(match.start.node, -1), reverse=True)
            while todo:
                self._apply(operator, edit, todo.pop(), todo, found)
            if edit.changed:
                edit.guard()
                gm.graph.lint()
                edit.sweep()
        except Exception as error:
            what = "dead code stays in a routed graph"
            if not edit.committed:
                edit.undo()
                what, found = "a graph is compiled unrouted", Report()
            self.problem(what, error, _where(gm.graph))
        self._report_failures()
        self.report.extend(found)
        return None if edit.changed else view

    def _apply(self, operator: Operator, edit: Edit, match: Match, todo: list[Match], found: Report) -> None:
        """Puts one match's op into the graph, or adds a near miss or a problem to ``found``.

        A match that finds no position may be replaced in ``todo`` by smaller ones.
        """
        faster = getattr(operator, "faster_as_written", None)
        try:
            kept = faster is not None and faster(match, _device(match.start))
            if kept and self.lower:
                Placement(edit.view, match).find()  # the proof that the op could stand there
                found.routed.append(_routed(match, AS_WRITTEN, Verdict(), kept))
                return
            verdict = edit.apply(match, operator.emit, self.judge if match.proposed else self.check)
        except (Mismatch, Unsupported, DynamicWidth, ValueError, TypeError) as error:
            smaller = getattr(operator, "smaller", None)
            if smaller is not None and (isinstance(error, Unplaced) or match.proposed):
                todo += reversed([*smaller(match)])
            miss = _refused(match, error)
            if miss is not None:
                found.near_misses.append(_near(miss))
        except Exception as error:
            self.problem("a formula stays as it is", error, source_of(match.start.node))
        else:
            kernels = operator.kernels(match.op, _device(match.start))
            made = found.fused if match.parts else found.routed
            made.append(_routed(match, kernels, verdict, kept))

    def _report_failures(self) -> None:
        """Reports the nodes at which the search of an operator failed."""
        failures, self.knowledge.failures = self.knowledge.failures, []
        for node, error in failures:
            self.problem("the search failed at this line, which is left as the model wrote it", error, source_of(node))

    def problem(self, what: str, error: Exception, where: str) -> None:
        """Adds a problem to the report and logs it once."""
        message = f"{what}: {type(error).__name__}: {error} ({where})"
        if message not in self.report.problems:
            self.report.problems.append(message)
        logger.debug("routing failed", exc_info=error)
        warn_once(f"unrouted: {type(error).__name__} {where}", message)


_CHECKPOINT = "tag_activation_checkpoint"
_FUNCTION = "autograd_function_apply"
_OWN_BACKWARD = "; inside an autograd.Function, whose own backward stays"


def _bodies(gm: fx.GraphModule) -> dict[fx.GraphModule, list[fx.Node]]:
    """Returns the graphs that higher-order operators of a graph run, each with the nodes that use it."""
    found: dict[fx.GraphModule, list[fx.Node]] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        inner = getattr(gm, str(node.target), None)
        if isinstance(inner, fx.GraphModule):
            found.setdefault(inner, []).extend(node.users or [node])
    return found


def _passed(view: View, call: fx.Node, inner: fx.GraphModule) -> Passed:
    """Returns what is known of the tensors that the call of a checkpointed region passes to the inputs of its body.

    The values are masks and integers; those of other tensors without gradients are None.
    """
    inputs = list(inner.graph.find_nodes(op="placeholder"))
    args = call.args[len(call.args) - len(inputs) :]
    meant, found = view.resolved.get(call, {}), dict[fx.Node, Value | None]()
    for place, a in zip(inputs, args, strict=True):
        node = meant.get(a, a) if isinstance(a, fx.Node) else None
        value = view.value(node) if node is not None else None
        if node is None or value is None:
            continue
        if of_positions(value) and not _written(view, node, call):
            found[place] = value
        elif not view.flows(node) and not view.written_between(node, view.position[call], left=True):
            found[place] = None
    return found


def _written(view: View, node: fx.Node, call: fx.Node) -> bool:
    """Returns whether what a view's node is computed from is written in place before a real call that reads it.

    Only steps that the view could not make functional count: the others are part of the formula.
    """
    above, end = reached([node], lambda n: n.all_input_nodes), view.position[call]
    return any(view.written_between(n, end, left=True) for n in above)


def _where(graph: fx.Graph) -> str:
    return next((s for node in graph.nodes if (s := source_of(node)) != "unknown"), "no source line known")


def _found(operator: Operator, view: View) -> tuple[list[Match], Report]:
    """Returns the matches of one operator, and a report of its near misses and of ops that the model calls itself.

    If a formula sums over a dynamic size, that size is fixed at its present value and the search starts again.
    """
    while True:
        matches: list[Match] = []
        report = Report()
        try:
            for node in operator.candidates(view):
                with contained(view, node):
                    found = _match(operator, view, node)
                    for one in [found] if isinstance(found, (Match, Miss, Routed)) else found or ():
                        if isinstance(one, Match):
                            matches.append(one)
                        elif isinstance(one, Routed):
                            report.routed.append(one)
                        else:
                            report.near_misses.append(_near(one))
        except DynamicWidth as dynamic:
            if view.values.fix(dynamic.size.symbols):
                continue
        return matches, report


def _match(operator: Operator, view: View, node: fx.Node) -> Any:
    """Returns what ``operator`` finds at a node; a near miss where it needs a dynamic size that may not be fixed."""
    try:
        return operator.match(view, node)
    except DynamicWidth:
        if may_fix():
            raise
        return Miss(operator.name, DYNAMIC, view.value(node), view.value(node))


def _refused(match: Match, error: Exception) -> Miss | None:
    """Returns the near miss for a match that could not be placed, or None if another match gives the reason."""
    if isinstance(error, Mismatch):
        return Miss(match.op, error.reason, error.value, match.start) if error.reason else None
    # The views could not be followed, or the op's own validation failed on fake tensors.
    return Miss(match.op, _UNFOLLOWED if isinstance(error, Unsupported) else str(error), None, match.start)


def _near(miss: Miss) -> NearMiss:
    places = [v.node for v in (miss.value, miss.start) if v is not None and v.node is not None]
    return _near_at(places[0] if places else None, miss.reason, miss.op, miss.ordinary)


def _near_at(node: fx.Node | None, reason: str, op: str = "any op", ordinary: bool = False) -> NearMiss:
    name = node.name if node is not None else ""
    return NearMiss(op, reason, source_of(node), name, ordinary, modules_of(node))


def _opaque(view: View) -> list[NearMiss]:
    """Returns near misses for what the pass cannot analyse: calls with unknown writes, and wrapper tensors."""
    found: dict[str, fx.Node] = {}
    for node in view.real_nodes:
        if node in view.effects.unknown:
            found.setdefault(
                f"PyTorch cannot say which tensors {node.target} writes: no formula is routed across this call", node
            )
        elif node.op == "placeholder" and any(map(compat.is_wrapper, tensors_in(example(node)))):
            kind = type(example(node)).__name__
            found.setdefault(f"formulas of {kind}, a subclass of Tensor, are not analysed", node)
    return [_near_at(node, why, ordinary=True) for why, node in found.items()]


def _routed(match: Match, kernels: tuple[str, ...], verdict: Verdict, kept: bool) -> Routed:
    node, said = match.start.node, (verdict.error, verdict.note)
    where, modules = source_of(node), modules_of(node)
    return Routed(match.op, where, match.detail, kernels, *said, kept, modules, verdict.cost, match.parts)


def _device(value: Value) -> str:
    """Returns the device type of a value's tensor; "cpu" if it has none."""
    tensors = tensors_in(example(value.node)) if value.node is not None else []
    return tensors[0].device.type if tensors else "cpu"


def _count(report: Report) -> None:
    counters = compat.counters()
    for routed in report.routed:
        counters[f"routed {routed.op}"] += 1
    for fused in report.fused:
        counters[f"fused {fused.op}"] += 1
    if close := [m for m in report.near_misses if not m.ordinary]:
        counters["near misses"] += len(close)
    if report.problems:
        counters["unrouted graphs"] += len(report.problems)


# The package's own operators register themselves on import.
importlib.import_module("mhc_inductor.routing.operators")
