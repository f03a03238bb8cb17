# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn iterations in an ``autograd.Function`` whose backward is the derivative of its forward, as in Megatron.

Dynamo hands over such a Function as a call with two graphs, its forward and its backward. The forward is recognised
like any other iterations. The backward is a graph of its own, which may be anything: it is run, in fp64 and on data with
ties and vanishing sums, next to the op's gradient. Only where both agree does the op replace the Function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from mhc_inductor import compat
from mhc_inductor.routing.edit import Edit, node_of
from mhc_inductor.routing.fp64 import Exact
from mhc_inductor.routing.graph.expressions import chain, whole, written
from mhc_inductor.routing.graph.values import Value, example, name_of
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match, Miss
from mhc_inductor.routing.operators.kernels import kernels_of
from mhc_inductor.routing.operators.mhc.emit import Emission
from mhc_inductor.routing.operators.mhc.matches import Sinkhorn
from mhc_inductor.routing.operators.mhc.sinkhorn import Chain, Chains

FUNCTION = "autograd_function_apply"
OTHER = "the backward of this autograd.Function is not the derivative of its forward: run in fp64, {what} differ by {error:.1e}"
UNRUN = "the backward of this autograd.Function could not be compared with the derivative of its forward: {error}"
_ELEMENTS = 1 << 15
"""The most elements of the logits that a Function is run on, so that a compile does not wait for the proof."""
_EXACT = 1e-9
"""Relative difference in fp64 above which two results are not the same formula."""


@dataclasses.dataclass(frozen=True)
class Function:
    """A call of a Function whose forward applies ``steps`` to its argument number ``at``, and returns ``mixed``."""

    call: fx.Node
    bodies: tuple[fx.GraphModule, fx.GraphModule]
    at: int
    steps: Chain
    mixed: Value
    whole: bool = True
    """Whether the iterations start from the argument itself, and not from what the forward subtracts something from."""

    @property
    def key(self) -> tuple[object, ...]:
        """What two calls have in common if they compute the same."""
        given = tuple(str(example(a)) if isinstance(a, fx.Node) else repr(a) for a in self.call.args[2:])
        return *map(_structure, self.bodies), repr(self.call.kwargs), given, self.at, self.steps.words

    def apply(self, logits: Tensor, others: list[Tensor]) -> Tensor:
        """Returns the Function's result on other data; the tensors besides the logits are added to ``others``."""
        args = self._args(logits, others)
        result: Tensor = self.call.target(*self.bodies, *args, **self.call.kwargs)[0]  # type: ignore[operator]
        return result

    def forward(self, logits: Tensor, others: list[Tensor]) -> Tensor:
        """Returns the result of the Function's forward alone, which autograd then differentiates."""
        graph, places = fx.Graph(), self.bodies[0].graph.find_nodes(op="placeholder")
        graph.output(graph.graph_copy(self.bodies[0].graph, {}))
        for node in [n for n in graph.nodes if name_of(n) == "_set_grad_enabled"]:
            graph.erase_node(node)
        args = self._args(logits, others)
        result = fx.GraphModule(self.bodies[0], graph)(*[None] * (len(places) - len(args)), *args)
        while not isinstance(result, Tensor):
            result = result[0]
        return result

    def _args(self, logits: Tensor, others: list[Tensor]) -> list[Any]:
        args: list[Any] = []
        for a in self.call.args[2:]:
            fake = example(a) if isinstance(a, fx.Node) else a
            if isinstance(fake, Tensor) and len(args) != self.at:
                others.append(
                    torch.ones([compat.routing.hint(s) for s in fake.shape], dtype=torch.float64).requires_grad_()
                )
                args.append(others[-1])
            else:
                symbolic = isinstance(fake, (torch.SymInt, torch.SymFloat))
                args.append(logits if isinstance(fake, Tensor) else compat.routing.hint(fake) if symbolic else fake)
        return args


def _structure(body: fx.GraphModule) -> tuple[object, ...]:
    """Returns a description that is equal for bodies that compute the same, whatever the names of their nodes are."""
    number = {node: i for i, node in enumerate(body.graph.nodes)}

    def line(node: fx.Node) -> object:
        held = id(getattr(body, str(node.target), None)) if node.op == "get_attr" else None
        args = fx.node.map_arg((node.args, node.kwargs), lambda a: ("node", number[a]))
        return node.op, None if node.op in ("placeholder", "get_attr") else node.target, held, repr(args)

    return tuple(map(line, number))


class SinkhornFunction:
    """Replaces autograd.Functions by the op of Sinkhorn iterations where their backward is proved to be its gradient."""

    name = "mhc_sinkhorn_function"
    kernels = staticmethod(kernels_of)

    def __init__(self) -> None:
        self._known: dict[Any, str] = {}

    def candidates(self, view: View) -> Iterable[fx.Node]:
        """Returns the calls of Functions."""
        return [n for n in view.nodes if n.op == "call_function" and name_of(n) == FUNCTION and n in view.live]

    def match(self, view: View, node: fx.Node) -> Match | Miss | None:
        """Returns the iterations of a Function's forward, a near miss where its backward is something else, or None."""
        found = _function(view, node)
        if found is None:
            return None
        if found.key not in self._known:
            self._known[found.key] = _difference(found)
        reason, steps = self._known[found.key], found.steps
        if reason or not found.whole:
            return Miss("mhc_sinkhorn", reason, found.mixed, found.mixed) if reason else None
        detail = f"{steps.iters} iterations ({steps.words}), of an autograd.Function whose backward is their derivative"
        return Match("mhc_sinkhorn", [steps.logits], [found.mixed], detail, data=Sinkhorn(steps, found.mixed))

    def emit(self, edit: Edit, match: Match) -> Iterable[tuple[Value, fx.Node]]:
        """Emits the op and returns the Function's result with its new node. Raises Mismatch."""
        return Emission(edit).sinkhorn(match.data)


def _function(view: View, node: fx.Node) -> Function | None:
    """Returns the iterations that a Function's forward applies to one of its tensors, as its one used result, or None."""
    owner, users = view.real.owning_module, [u for u in node.users if u in view.live]
    given = [getattr(owner, str(a.target), None) for a in node.args[:2] if isinstance(a, fx.Node)]
    bodies = [b for b in given if isinstance(b, fx.GraphModule)]
    mixed = view.value(users[0]) if len(users) == 1 and users[0].args == (node, 0) else None
    if mixed is None or len(bodies) != 2:
        return None
    inner = View(bodies[0].graph, view.modes_at(node), view.knowledge, body=True)
    found, args = _iterations(inner), node.args[2:]
    places = [*inner.graph.find_nodes(op="placeholder")][-len(args) :]
    like = [i for i, a in enumerate(args) if isinstance(a, fx.Node) and (v := view.value(a)) and _alike(v, mixed)]
    own = found is not None and found[1] in places
    if found is None or not (own or len(like) == 1):
        return None
    steps, at = found[0], places.index(found[1]) if own else like[0]
    start = args[at]
    # Dynamo hands over every leaf tensor where the backward runs Tensor.backward.
    apart = all(_leaf(a) for i, a in enumerate(args) if i != at)
    logits = view.value(start) if isinstance(start, fx.Node) and apart else None
    if logits is None or not _alike(logits, mixed):
        return None
    return Function(
        node, (bodies[0], bodies[1]), at, dataclasses.replace(steps, logits=logits, read=logits), mixed, own
    )


def _alike(a: Value, b: Value) -> bool:
    return a.shape == b.shape and a.dtype.is_floating_point


def _iterations(forward: View) -> tuple[Chain, Any] | None:
    """Returns the iterations that give a forward's first result, and the node of the graph that they start from, if any."""
    returned: Any = forward.graph.output_node().args[0]
    results: Any = returned[0] if isinstance(returned, (tuple, list)) else returned
    results = [results] if isinstance(results, fx.Node) else [*results]
    # Dynamo of torch 2.11 returns every step of the forward after its results.
    result = forward.value(results[0]) if results and isinstance(results[0], fx.Node) else None
    group = Chains(forward).group(result) if result is not None else None
    steps = group.chains.get(result) if group is not None and result is not None else None
    seen = chain(whole(steps.logits)) if steps is not None else []
    if steps is None or not steps.iters or steps.steps < 3 or any(written(r.value) for r in seen):
        return None
    return steps, seen[-1].value.node if seen[-1].index == seen[0].index else None


def _leaf(a: Any) -> bool:
    """Checks whether an argument of a Function is an input of the graph, or no tensor."""
    return not isinstance(a, fx.Node) or a.op in ("placeholder", "get_attr") or not isinstance(example(a), Tensor)


def _difference(function: Function) -> str:
    """Returns how a Function differs from the op, as a reason, or an empty string if it does not."""
    shape = [compat.routing.hint(s) for s in example(node_of(function.steps.logits)).shape]
    few = _fewer(shape)
    with compat.routing.outside_compile():
        try:
            return _compared(function, few)
        except Exception as error:
            why = UNRUN.format(error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        with contextlib.suppress(Exception):  # a body may have the number of tokens in it
            return _compared(function, shape) if few != shape else why
    return why


def _fewer(shape: list[int]) -> list[int]:
    """Returns the shape with its leading sizes halved until it has at most _ELEMENTS elements."""
    few = [*shape]
    for d in range(len(few) - 2):
        while few[d] > 1 and math.prod(few) > _ELEMENTS:
            few[d] = -(-few[d] // 2)
    return few


def _compared(function: Function, shape: list[int]) -> str:
    """Returns how a Function differs from the op on logits of this shape. Raises what the Function raises."""
    dtype = function.steps.logits.dtype
    for logits, up in _data(shape):
        theirs = _run(function.apply, logits, up, dtype)
        if function.whole:
            mine = _run(lambda t, _: _op(t, function.steps), logits, up, None)
        else:
            mine = _run(function.forward, logits, up, dtype)
        for what, a, b, size in zip(("results", "gradients"), theirs, mine, (logits, up), strict=True):
            error = _apart(a, b, size)
            if not error <= _EXACT:
                return OTHER.format(what=what, error=error)
    return ""


def _apart(a: Tensor, b: Tensor, size: Tensor) -> float:
    """Returns the relative difference of two results; a NaN is in both or the difference is infinite."""
    if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    # Where the logits are far apart all gradients vanish, and only their rounding errors are left.
    least = 1e-6 * float(size.nan_to_num().norm())
    a, b = a.nan_to_num(), b.nan_to_num()
    return float((a - b).norm()) / max(float(b.norm()), least, 1e-30)


def _op(logits: Tensor, steps: Chain) -> Tensor:
    logits = logits.mT if steps.transposed else logits
    mixed: Tensor = torch.ops.mhc_inductor.mhc_sinkhorn.default(logits, steps.iters, steps.eps, steps.form)
    return mixed.mT if steps.transposed else mixed


def _run(fn: Any, logits: Tensor, up: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Returns the result and the gradient in fp64; ``dtype`` is what the logits are in a graph of the model.

    Raises ValueError if another tensor gets a gradient too.
    """
    leaf, others = logits.clone().requires_grad_(), list[Tensor]()
    mode = contextlib.nullcontext() if dtype is None else Exact({compat.storage_key(leaf): dtype})
    with torch.enable_grad(), mode:
        out = fn(leaf, others)
        grad, *rest = torch.autograd.grad(out, [leaf, *others], up, allow_unused=True)
    if grad is None or any(g is not None for g in rest):
        raise ValueError("its gradient does not go to the logits alone")
    return out.detach().double(), grad.double()


def _data(shape: list[int]) -> Iterable[tuple[Tensor, Tensor]]:
    """Yields logits and gradients that show what a backward leaves out.

    Logits: ordinary, small and large ones, ties, and a column whose sums fall below any eps. Gradients: ordinary, small
    and large ones, and one of NaN.
    """
    g = torch.Generator().manual_seed(11)

    def random() -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    yield random(), random()
    yield 1e-3 * random(), 1e-6 * random()
    yield 6.0 * random(), 1e6 * random()
    yield 40.0 * random(), random()
    yield torch.randint(-1, 2, shape, generator=g).double(), 1e3 * random()
    vanishing, broken = random(), random()
    vanishing[..., 0] -= 60.0
    yield vanishing, random()
    broken.view(-1)[0] = float("nan")
    yield random(), broken
