"""``explain``: what the routing pass finds in a model, and why it passes over what it does not route."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch

from mhc_inductor import compat
from mhc_inductor.routing import route
from mhc_inductor.routing.report import Report, show
from mhc_inductor.routing.verify import Verifier


def copied(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """``gm`` with graphs of its own, bodies of higher-order ops included; tensors and modules are shared."""
    result = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    result.meta = dict(gm.meta)
    for node in result.graph.find_nodes(op="get_attr"):
        body = getattr(gm, node.target, None)
        if isinstance(body, torch.fx.GraphModule):
            setattr(result, node.target, copied(body))
    return result


def explain(fn: Callable[..., Any], *args: Any, verify: bool = False, **kwargs: Any) -> Report:
    """Run ``fn(*args, **kwargs)`` once; print and return what ``backend="mhc_inductor"`` routes in it.

    ``fn`` is a function or module, compiled or not. It runs as it would eagerly, in the ambient grad and autocast modes:
    its graphs are captured by Dynamo and the pass sees copies of them, so that buffers, random state and the gradients
    of a caller who uses the outputs are those of an eager call. No kernel is compiled and no counter moves.

    Returns a :class:`~mhc_inductor.routing.report.Report`: every formula of mHC (arXiv 2512.24880), every E79
    recurrence (a loop over time, a higher-order scan, the op itself) and every attention under a mask of selected keys
    that was found, with its line in the user's file, the op that it becomes and the kernels which that op launches on
    the device of the inputs, what is fused, and for every near miss the first node that did not fit and the reason.
    One graph break makes two graphs, which are reported together. The report is printed as tables if rich is installed.

    With ``verify``, each distinct formula is run once beside its op, on random data of its shapes and dtypes: ``error``
    of a routed formula is the op's largest relative error, over outputs and gradients, against the formula in fp64;
    None, with the reason in ``note``, where it could not be run. An op that differs is a near miss.

    Raises what ``fn`` raises, and Dynamo's own errors.
    """
    target = compat.uncompiled(fn)
    report = Report()
    checks = {"check": Verifier()} if verify else {}

    def capture(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        before = dict(compat.counters())
        report.extend(route(copied(gm), **checks))
        compat.counters().clear()
        compat.counters().update(before)
        return gm.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    # Dynamo keeps compiled code on code objects: one of our own leaves those of the user's functions alone.
    own = types.FunctionType(call.__code__.replace(), call.__globals__, "explain", None, call.__closure__)
    with compat.captured_apart() as options:
        torch.compile(own, backend=capture, **options)(*args, **kwargs)
    show(report)
    return report
