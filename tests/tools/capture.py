# SPDX-License-Identifier: Apache-2.0
"""Runs a function's graph with and without the routing pass, without Inductor.

Dynamo writes the graph. Where each commit runs the tests, :mod:`tests.tools.traced` records those that it can in half the time;
``python -m tests.suite`` runs all of them with Dynamo.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mhc_inductor import compat
from mhc_inductor.options import DEFAULT, RoutingOptions
from mhc_inductor.report import Report
from mhc_inductor.routing import Verifier, route
from mhc_inductor.routing.effects import ambient
from mhc_inductor.routing.graph.view import Knowledge, View
from mhc_inductor.routing.operators.selection.emit import SEEN
from tests.oracles.mhc import relative, rounding
from tests.tools.each_commit import COMMIT
from tests.tools.traced import Unrecorded, traced

FP32_SUMS = 2e-6  # fp32 sums of a few hundred products in another order
VERIFY: Verifier | None = None if os.environ.get("MHC_INDUCTOR_VERIFY") == "0" else Verifier()
"""Compares each distinct routed formula with its op, once per process; None if MHC_INDUCTOR_VERIFY is 0."""
FUSED = {
    **{f"selection_{kind}_attention": ("selection_attention",) for kind in ("list", "entry", "mask")},
    "mhc_post_pre": ("mhc_post", "mhc_pre"),
    "mhc_post_head": ("mhc_post", "mhc_head"),
    "mhc_single_pass": ("mhc_post", "mhc_collapse", "mhc_coefficients"),
}


@dataclasses.dataclass
class Captured:
    """The results of a compiled call, the report of the pass, and the ops in the graphs."""

    outputs: list[Tensor]
    grads: dict[str, Tensor | None]
    report: Report = dataclasses.field(default_factory=Report)
    ops: Counter[str] = dataclasses.field(default_factory=Counter)
    graphs: list[fx.GraphModule] = dataclasses.field(default_factory=list)

    def nodes(self, target: str = "") -> list[fx.Node]:
        """Returns the nodes with ``target`` in their target's name, of the graphs and of the bodies in them."""
        return [node for node in nodes_of(*self.graphs) if target in str(node.target)]


def nodes_of(*graphs: fx.GraphModule) -> Iterator[fx.Node]:
    """Yields the nodes of ``graphs`` and of the bodies of their higher-order operators."""
    for module in (module for gm in graphs for module in gm.modules()):
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def ops_of(*graphs: fx.GraphModule) -> Counter[str]:
    """Counts calls of this package's ops in ``graphs`` and in the bodies of their higher-order operators.

    A fused op counts as its parts; lists and the mask of rows without a visible entry count once.
    """
    found: Counter[str] = Counter()
    for node in nodes_of(*graphs):
        name = str(node.target)
        if node.op == "call_function" and name.startswith("mhc_inductor."):
            op = name.split(".")[1]
            found.update(FUSED.get(op, (op,)))
        found["selection_attention"] -= node.target is operator.gt and node.args[1] == SEEN
    return +found


def tensors(out: Any) -> list[Tensor]:
    """Returns the tensors in nested outputs, in order."""
    leaves, _ = torch.utils._pytree.tree_flatten(out)
    return [t for t in leaves if isinstance(t, Tensor)]


def evaluate(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    parameters: Sequence[tuple[str, Tensor]] = (),
    grad: bool = True,
    symbolic: Sequence[int | tuple[int, int]] = (),
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Returns the outputs of ``fn``, and the gradients of its floating-point inputs and of ``parameters``.

    ``symbolic`` lists dims of the first input, or pairs (input, dim), that are marked dynamic.
    """
    given = [t.detach().clone().requires_grad_(grad and t.is_floating_point()) for t in inputs]
    for which in symbolic:
        at, dim = which if isinstance(which, tuple) else (0, which)
        torch._dynamo.mark_dynamic(given[at], dim)
    torch.manual_seed(5)
    with contextlib.nullcontext() if grad else torch.no_grad():
        outputs = tensors(fn(*given))
    named = [*((f"input {i}", t) for i, t in enumerate(given) if t.requires_grad), *parameters]
    named = [(name, t) for name, t in named if t.requires_grad]
    live = [o for o in outputs if o.requires_grad]
    grads: dict[str, Tensor | None] = {}
    if grad and live:
        g = torch.Generator().manual_seed(7)
        # bf16 values are exact in every dtype.
        ups = [torch.randn(o.shape, generator=g).bfloat16().to(o.dtype) for o in live]
        got = torch.autograd.grad(live, [t for _, t in named], ups, allow_unused=True)
        grads = dict(zip((name for name, _ in named), got, strict=True))
    return [o.detach() for o in outputs], grads


def eager(
    fn: Callable[..., Any], inputs: Sequence[Any], parameters: Sequence[tuple[str, Tensor]] = (), grad: bool = True
) -> Captured:
    """Runs ``fn`` eagerly."""
    return Captured(*evaluate(fn, inputs, parameters, grad))


def run(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    parameters: Sequence[tuple[str, Tensor]] = (),
    grad: bool = True,
    *,
    routed: bool = True,
    dynamic: bool | None = False,
    symbolic: Sequence[int | tuple[int, int]] = (),
    options: RoutingOptions = DEFAULT,
    dynamo: bool | None = None,
    check: Verifier | None = None,
) -> Captured:
    """Compiles ``fn`` with a backend that routes and interprets the graph, and runs it and its backward once.

    ``dynamo``: whether Dynamo writes the graph, or it is recorded; by default what this run of the tests does. ``check``
    compares formulas with ops in place of ``VERIFY``. Raises ValueError for dynamic sizes without Dynamo.
    """
    fixed = dynamic is False and not symbolic
    if dynamo is False and not fixed:
        raise ValueError("dynamo=False records the present sizes: dynamic must be False and symbolic empty")
    report, graphs = Report(), list[fx.GraphModule]()
    backend = interpreted(report, graphs, check or VERIFY, options, routed)

    def compiled(*args: Tensor) -> Any:
        if dynamo is False or (dynamo is None and COMMIT and fixed):
            with contextlib.nullcontext() if dynamo is False else contextlib.suppress(Unrecorded):
                return traced(fn, backend)(*args)
        torch._dynamo.reset()
        return torch.compile(fn, backend=backend, dynamic=dynamic)(*args)

    outputs, grads = evaluate(compiled, inputs, parameters, grad, symbolic)
    return Captured(outputs, grads, report, ops_of(*graphs) if routed else Counter(), graphs)


def through_inductor(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    parameters: Iterable[tuple[str, Tensor]] = (),
    grad: bool = True,
    **options: Any,
) -> Captured:
    """Runs ``fn`` through ``torch.compile`` with the package's backend; ``ops`` are those that it counted as routed."""
    torch._dynamo.reset()
    before = Counter(compat.counters())
    got = Captured(*evaluate(torch.compile(fn, backend="mhc_inductor", **options), inputs, [*parameters], grad))
    found = Counter(compat.counters()) - before
    got.ops = Counter({k.removeprefix("routed "): n for k, n in found.items() if k.startswith("routed ")})
    return got


def looking(
    fn: Callable[..., Any], look: Callable[[fx.GraphModule], Any] = route, **options: Any
) -> tuple[Callable[..., Any], list[Any]]:
    """Returns ``fn`` compiled with a backend that interprets graphs, and what ``look`` returns of each: a report of the pass."""
    found: list[Any] = []

    def backend(gm: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        found.append(look(gm))
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, **options), found


def view_of(fn: Callable[..., Any], *args: Tensor) -> View:
    """Returns what the pass sees of the graph of ``fn``."""
    compiled, views = looking(fn, lambda gm: View(gm.graph, ambient(), Knowledge()), fullgraph=True)
    compiled(*args)
    return views[0]


def interpreted(
    report: Report,
    graphs: list[fx.GraphModule],
    check: Any = None,
    options: RoutingOptions = DEFAULT,
    routed: bool = True,
) -> Callable[..., Any]:
    """Returns a backend that routes graphs and interprets them, without Inductor; it adds to ``report`` and ``graphs``."""

    def backend(gm: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        if routed:
            report.extend(route(gm, options, check=check))
        graphs.append(gm)
        return gm.forward

    return backend


def difference(a: Captured, b: Captured) -> float:
    """Returns the largest relative difference between the outputs and gradients of two calls.

    A tensor that only one call has counts as 1, unless it is zero.
    """
    if len(a.outputs) != len(b.outputs) or a.grads.keys() != b.grads.keys():
        return float("inf")
    outputs = [_apart(x, y) for x, y in zip(a.outputs, b.outputs, strict=True)]
    # A sum over tokens may cancel to almost zero: measure its error against the size of the gradients around it.
    top = max((float(g.abs().max()) for g in b.grads.values() if g is not None and g.numel()), default=0.0)
    grads = [
        _apart(g, b.grads[k], (0.2 if g is not None and g.numel() == 1 else 0.05) * top) for k, g in a.grads.items()
    ]
    return max([*outputs, *grads], default=0.0)


def _apart(x: Tensor | None, y: Tensor | None, least: float = 0.0) -> float:
    if x is None or y is None:
        some = y if x is None else x
        return 0.0 if some is None or not bool(some.any()) else 1.0
    if torch.equal(x, y):
        return 0.0
    if not x.is_floating_point():
        return 1.0
    a, b = x.double(), y.double()
    if bool((a.isnan() != b.isnan()).any()):
        return float("inf")
    a, b = a.nan_to_num(), b.nan_to_num()
    return float((a - b).norm() / b.norm().clamp_min(max(1e-30, least * b.numel() ** 0.5)))


def alike(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    named: Iterable[tuple[str, Tensor]] = (),
    ops: Mapping[str, int] | None = None,
    grad: bool = True,
    within: float = 1e-5,
    **options: Any,
) -> Captured:
    """Runs ``fn`` routed and eagerly; asserts these ``ops`` if given, and the values and gradients of eager.

    A gradient that is None in eager is None. ``options`` are those of :func:`run`.
    """
    named = [*named]
    got, plain = run(fn, inputs, named, grad, **options), eager(fn, inputs, named, grad)
    assert not got.report.problems and (ops is None or dict(got.ops) == ops), (dict(got.ops), reasons(got))
    assert (apart := difference(got, plain)) <= within, (apart, dict(got.ops), reasons(got))
    assert {k for k, g in got.grads.items() if g is None} == {k for k, g in plain.grads.items() if g is None}
    return got


def reasons(got: Captured) -> str:
    """Returns the report's reasons for everything left unrouted."""
    return "; ".join([m.reason for m in got.report.near_misses] + got.report.problems) or "no reason given"


def named_tensors(got: Captured) -> dict[str, Tensor]:
    """Returns outputs and gradients by name."""
    named = {f"output {k}": t for k, t in enumerate(got.outputs)}
    return {**named, **{f"gradient of {k}": g for k, g in got.grads.items() if g is not None}}


def not_worse(name: str, got: Captured, unrouted: Captured, exact: Captured, scalars: float = 2) -> None:
    """Asserts that no error against fp64 exceeds twice the unrouted call's largest error plus one rounding.

    ``scalars``: how often the largest error, for a tensor of one element.
    """
    mine, theirs, want = named_tensors(got), named_tensors(unrouted), named_tensors(exact)
    kinds = [(t.shape, t.dtype) for t in mine.values()]
    assert mine.keys() == theirs.keys() and kinds == [(t.shape, t.dtype) for t in theirs.values()], name
    errors = {k: relative(t, want[k]) for k, t in theirs.items() if bool(want[k].any())}
    largest = max(errors.values(), default=0.0)
    for key in errors:
        error = relative(mine[key], want[key])
        bar = (scalars if mine[key].numel() == 1 else 2) * largest + FP32_SUMS
        assert error <= bar + rounding(mine[key].dtype), f"{name}, {key}: {error:.3g} from fp64, {bar:.3g} allowed"


def exact_or_left(name: str, fn: Callable[..., Any], narrow: Sequence[Tensor], op: str) -> None:
    """Asserts that ``op`` on bf16 tensors is as exact as the formula, or that the formula stays, with a reason."""
    got, plain = run(fn, narrow), run(fn, narrow, routed=False)
    if got.ops[op]:
        not_worse(name, got, plain, eager(fn, [t.double() for t in narrow]))
    else:
        assert difference(got, plain) == 0.0 and reasons(got)


def left_by_proof(fn: Callable[..., Any], given: Sequence[Tensor], op: str) -> None:
    """Asserts that the formula stays without the help of verification, with equal numbers."""
    got, want = run(fn, given), eager(fn, given)
    assert not got.ops[op] and difference(got, want) == 0.0
    assert not any("verified" in m.reason for m in got.report.near_misses), reasons(got)
