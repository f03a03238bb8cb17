# SPDX-License-Identifier: Apache-2.0
"""``explain``: reports what the routing pass finds in a model, and why it leaves the rest unrouted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import timeit
import types
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from mhc_inductor import compat
from mhc_inductor.backend import unrouted
from mhc_inductor.exported.program import routed
from mhc_inductor.report import Cost, NearMiss, Report, show
from mhc_inductor.routing import route
from mhc_inductor.routing.edit import Edit, Pairs
from mhc_inductor.routing.extract import MODES, Cut, Piece
from mhc_inductor.routing.few_tokens import FewTokens
from mhc_inductor.routing.graph.copies import copied
from mhc_inductor.routing.graph.values import example, tensors_in
from mhc_inductor.routing.interface import Match, Verdict
from mhc_inductor.routing.verify import Trial, Verifier, said

_REPEATS, _SECONDS = 20, 0.5
"""A time is the median of at most so many runs, which take about so long at most; the first two do not count."""


def explain(
    fn: Callable[..., Any],
    *args: Any,
    verify: bool | Any = False,
    measure: bool | Any = False,
    details: bool | Any = False,
    **kwargs: Any,
) -> Report:
    """Runs ``fn(*args, **kwargs)`` once; prints and returns what ``backend="mhc_inductor"`` routes in it.

    The report lists every formula found of mHC (arXiv 2512.24880), of E79 (a loop over time, a higher-order scan, or
    the op itself) and of attention under a mask of selected keys. Each has its line in the user's file, the op that it
    becomes, and the kernels that the op launches on the inputs' device. The report also lists what is fused and, for
    every near miss, the first node that did not fit and the reason. A graph break gives two graphs, which are reported
    together with Dynamo's reason. What is printed is a table with a line for each finding, in which layers that are alike share a line.

    ``fn`` runs as it would eagerly, in the ambient grad and autocast modes: Dynamo captures its graphs and the pass
    gets copies of them. Buffers, random state, and gradients of the outputs are those of an eager call. No kernel is
    compiled unless ``measure`` is set, and no counter changes.

    Args:
        fn: a function or module, compiled or not. Or an exported program, which is not run and takes no arguments: the
            report is that of :func:`mhc_inductor.route_exported`.
        *args: positional arguments of ``fn``.
        verify: also run each distinct formula and its op on random data of its shapes and dtypes. ``error`` of a routed
            formula is then the op's largest relative error over outputs and gradients, compared with the formula in
            fp64. It is None, with the reason in ``note``, if the formula could not be run. An op that differs is a near
            miss.
        measure: also compile each distinct formula, as the model wrote it, and its op, run both on random data of the
            graph's shapes and dtypes, and report the median of the seconds that they took (``cost.times``), with
            gradients where the graph has them. ``cost.note`` says why a formula was not measured.
        details: print all that the report says of each finding, below the table.
        **kwargs: keyword arguments of ``fn``. An argument of ``fn`` named like one of the above is passed by position.

    Returns:
        The :class:`~mhc_inductor.report.Report` over all graphs of the call.

    Raises:
        TypeError: if arguments are given with an exported program.
        Exception: whatever ``fn`` raises, and Dynamo's own errors.
    """
    inspector = Inspector(verify, measure)
    if isinstance(fn, torch.export.ExportedProgram):
        if args or kwargs:
            raise TypeError("explain: an exported program is not run and takes no arguments; call explain(program)")
        with _counters_kept():
            report = routed(fn, check=inspector)[1]
    else:
        report = _called(fn, args, kwargs, inspector)
    if measure:
        with _counters_kept():
            inspector.measured()
    show(report, details)
    return report


def _called(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], inspector: Inspector) -> Report:
    """Returns what routing finds in the graphs of one call."""
    target = compat.uncompiled(fn)
    report = Report()

    def capture(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        with _counters_kept():
            report.extend(route(copied(gm), check=inspector))
        return gm.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    # Dynamo stores compiled code on code objects: a new one keeps it off the user's functions.
    own = types.FunctionType(call.__code__.replace(), call.__globals__, "explain", None, call.__closure__)
    before = compat.graph_breaks()
    with compat.routing.captured_apart() as options:
        torch.compile(own, backend=capture, **options)(*args, **kwargs)
    for reason in compat.graph_breaks() - before:
        text = ". ".join(line.strip() for line in reason.splitlines()[:2])
        report.near_misses.append(NearMiss("any op", f"{_BROKEN}: {text}", "", ordinary=True))
    return report


_BROKEN = "Dynamo breaks the graph, so that no formula is seen across the break, and nothing of a checkpointed region with one"


@contextlib.contextmanager
def _counters_kept() -> Iterator[None]:
    before = dict(compat.counters())
    yield
    compat.counters().clear()
    compat.counters().update(before)


# --- what is added to each finding: the sizes that an op works on, and on request what formula and op take ---


class Inspector:
    """A check for :meth:`Edit.apply <mhc_inductor.routing.edit.Edit.apply>` that adds each op's cost to its verdict.

    Args:
        verify: also compare each formula with its op.
        measure: keep formulas and ops, for :meth:`measured`.
    """

    def __init__(self, verify: bool, measure: bool) -> None:
        self._verify, self._verifier, self._few = verify, Verifier(), FewTokens()
        self._measure = measure
        self._kept: list[tuple[Trial, Cost]] = []

    def __call__(self, edit: Edit, match: Match, pairs: Pairs) -> Verdict:
        """Returns the verdict with the op's cost. Raises Mismatch if the op differs."""
        verdict = (self._verifier if self._verify or match.proposed else self._few)(edit, match, pairs)
        cost = Cost()
        try:  # what cannot be told of an op, such as sizes that depend on data, changes nothing about the finding
            cost = _cost(edit.fresh)
            if self._measure:
                self._kept.append((Trial(Cut(edit, match, pairs)), cost))
        except Exception as error:
            cost.note = f"not known: {said(error)}"
        return dataclasses.replace(verdict, cost=cost)

    def measured(self) -> None:
        """Compiles and runs each distinct formula and op on random data, and writes what they took into the costs."""
        known: dict[Any, tuple[float, float] | str] = {}
        for trial, cost in self._kept:
            if trial.key not in known:
                known[trial.key] = _times(trial)
            found = known[trial.key]
            if isinstance(found, str):
                cost.note = found
            else:
                cost.times = found


def _cost(created: list[fx.Node]) -> Cost:
    """Returns the cost of the one op among the nodes that a match put in; views and conversions around it are free."""
    calls = [n for n in created if isinstance(n.target, compat.OpOverload) and n.target.namespace != "aten"]
    if not calls:
        return Cost()
    call = calls[-1]
    schema: Any = call.target._schema  # type: ignore[union-attr]
    named = {**dict(zip((a.name for a in schema.arguments), call.args, strict=False)), **call.kwargs}
    given = [(name, t) for name, value in named.items() for t in _tensors(value)]
    results = [(r.name or "result", t) for r, t in zip(schema.returns, _tensors(call), strict=False)]
    size = {compat.storage_key(t): prod(_shape(t)) * t.element_size() for _, t in (*given, *results)}
    return Cost(tuple(_described(*pair) for pair in (*given, *results)), sum(size.values()), _flops(call))


def _tensors(argument: Any) -> list[Tensor]:
    nodes: list[fx.Node] = []
    fx.node.map_arg(argument, nodes.append)
    return [t for node in nodes for t in tensors_in(example(node))]


def _shape(t: Tensor) -> list[int]:
    return [compat.routing.hint(s) for s in t.shape]


def _described(name: str, t: Tensor) -> str:
    return f"{name}: {str(t.dtype).removeprefix('torch.')} {_shape(t)}"


def _flops(call: fx.Node) -> int:
    formula = flop_registry.get(getattr(call.target, "_overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((call.args, call.kwargs), example)
    return compat.routing.hint(formula(*args, **kwargs, out_val=example(call)))


def _times(trial: Trial) -> tuple[float, float] | str:
    """Returns the seconds of the formula and of its op, each compiled; or why they could not be measured."""
    try:
        feed = trial.data(0, 0)
        return _seconds(trial, trial.cut.formula, feed, unrouted), _seconds(trial, trial.cut.op, feed, "mhc_inductor")
    except Exception as error:
        return f"not measured: {said(error)}"


def _seconds(trial: Trial, piece: Piece, feed: dict[fx.Node, Any], backend: Any) -> float:
    leaves = [trial.leaf(node, feed[node]) for node in piece.inputs]
    leaves = [t.clone() if p in piece.written else t for t, p in zip(leaves, piece.inputs.values(), strict=True)]
    modes = next(n.meta[MODES] for n in piece.graph.nodes if MODES in n.meta)
    compiled = torch.compile(_module(piece, len(trial.cut.pairs)), backend=backend, dynamic=False)
    wanted = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    ups: list[Tensor] = []

    def run() -> None:
        with torch.set_grad_enabled(bool(modes.grad and wanted)), modes.entered():
            live = [t for t in compiled(*leaves) if t.requires_grad]
        if live:
            ups[:] = ups or [torch.ones_like(t) for t in live]
            torch.autograd.grad(live, wanted, ups, allow_unused=True)

    devices = {t.device for t in leaves if isinstance(t, Tensor)}
    timer = timeit.Timer(run, timer=functools.partial(_now, devices))
    *_, once = timer.repeat(3, number=1)
    return statistics.median(timer.repeat(min(_REPEATS, 1 + int(_SECONDS / once)), number=1))


def _module(piece: Piece, count: int) -> fx.GraphModule:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(piece.graph, copies)
    graph.output(tuple(copies[o] for o in piece.outputs[:count]))
    return fx.GraphModule({}, graph)


def _now(devices: set[torch.device]) -> float:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return timeit.default_timer()
