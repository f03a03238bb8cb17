# SPDX-License-Identifier: Apache-2.0
"""``explain``: reports what the routing pass finds in a model, and why it leaves the rest unrouted."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mhc_inductor import compat
from mhc_inductor.routing import route
from mhc_inductor.routing.measure import Inspector
from mhc_inductor.routing.report import NearMiss, Report, show


def copied(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns a copy of ``gm`` and of the bodies of its higher-order ops; names, tensors and modules are the same."""
    graph = copy.deepcopy(gm.graph)
    compat.give_names(zip(graph.nodes, (node.name for node in gm.graph.nodes), strict=True))
    result = torch.fx.GraphModule(gm, graph)
    result.meta = dict(gm.meta)
    for node in result.graph.find_nodes(op="get_attr"):
        body = getattr(gm, node.target, None)
        if isinstance(body, torch.fx.GraphModule):
            setattr(result, node.target, copied(body))
    return result


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
        The :class:`~mhc_inductor.routing.report.Report` over all graphs of the call.

    Raises:
        TypeError: if arguments are given with an exported program.
        Exception: whatever ``fn`` raises, and Dynamo's own errors.
    """
    inspector = Inspector(verify, measure)
    if isinstance(fn, torch.export.ExportedProgram):
        report = _exported(fn, args, kwargs, inspector)
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

    def capture(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
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
        said = ". ".join(line.strip() for line in reason.splitlines()[:2])
        report.near_misses.append(NearMiss("any op", f"{_BROKEN}: {said}", "", ordinary=True))
    return report


_BROKEN = "Dynamo breaks the graph, so that no formula is seen across the break, and nothing of a checkpointed region with one"


def _exported(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inspector: Inspector) -> Report:
    """Returns what routing finds in an exported program."""
    if args or kwargs:
        raise TypeError("explain: an exported program is not run and takes no arguments; call explain(program)")
    from mhc_inductor.exported.program import routed

    with _counters_kept():
        return routed(program, check=inspector)[1]


@contextlib.contextmanager
def _counters_kept() -> Iterator[None]:
    before = dict(compat.counters())
    yield
    compat.counters().clear()
    compat.counters().update(before)
