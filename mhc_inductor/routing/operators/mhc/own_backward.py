# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn iterations in an ``autograd.Function`` whose backward is the derivative of its forward, as in Megatron.

Dynamo hands over such a Function as a call with two graphs, its forward and its backward. The forward is recognised
like any other iterations. The backward may be anything: the call is run in fp64, and its gradient compared with the op's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mhc_inductor import compat
from mhc_inductor.routing.edit import Edit, node_of
from mhc_inductor.routing.extract import Piece, copied
from mhc_inductor.routing.fp64 import Exact
from mhc_inductor.routing.graph.index import size_of
from mhc_inductor.routing.graph.values import Value, example, name_of
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match, Miss
from mhc_inductor.routing.operators.kernels import kernels_of
from mhc_inductor.routing.operators.mhc.emit import Emission
from mhc_inductor.routing.operators.mhc.matches import Sinkhorn
from mhc_inductor.routing.operators.mhc.sinkhorn import Chain, Chains, kinds, mixed, off, samples
from mhc_inductor.routing.region import cut, far, fix, numbers_in, piece_of
from mhc_inductor.routing.verify import NotRun, interpreted, said

FUNCTION = "autograd_function_apply"
OTHER = "the backward of this autograd.Function is not the derivative of its forward: run in fp64, {what} differ by {error:.1e}"
UNRUN = "the backward of this autograd.Function could not be compared with the derivative of its forward: {error}"
_FEW, _ELEMENTS, _EXACT = (40, 39, 2), 1 << 20, 1e-9
"""The leading sizes of the logits that a Function is run on, the most elements where it does not run on these, and the
relative difference in fp64 above which two results are not the same formula."""


@dataclasses.dataclass(frozen=True)
class Function:
    """A call of a Function whose forward applies ``steps`` to one of its arguments, and returns ``result``."""

    call: Piece
    forward: Piece | None
    """The forward, if it does not iterate on the argument itself."""
    bodies: dict[fx.Node, Any]
    views: list[View]
    steps: Chain
    result: Value

    @property
    def key(self) -> tuple[object, ...]:
        """What two calls have in common if they compute the same, whatever the names of their nodes are."""
        given: list[Any] = [str(example(n)) for n in self.call.inputs if n not in self.bodies]
        for body in self.bodies.values():
            held = body.graph.find_nodes(op="get_attr")
            given += [Piece(body.graph).structure(), *(id(operator.attrgetter(n.target)(body)) for n in held)]
        return self.call.structure(), *given, self.steps.words


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
        if found is None or (view.roots[node] and not view.roots[node_of(found.steps.logits)]):
            return None  # the result needs a gradient for what is only saved, and the op's would need none
        key, made = found.key, Sinkhorn(found.steps, found.result).match()
        if key not in self._known:
            self._known[key] = _difference(found)
        if self._known[key] or found.forward is not None:
            return Miss(made.op, self._known[key], found.result, found.result) if self._known[key] else None
        fix(found.call)
        detail = f"{made.detail}, of an autograd.Function whose backward is their derivative"
        return dataclasses.replace(made, detail=detail, saved=True)

    def emit(self, edit: Edit, match: Match) -> Iterable[tuple[Value, fx.Node]]:
        """Emits the op and returns the Function's result with its new node. Raises Mismatch."""
        return Emission(edit).sinkhorn(match.data)


def _function(view: View, node: fx.Node) -> Function | None:
    """Returns the iterations that a Function's forward applies to one of its tensors, as its one used result, or None."""
    users, given = [u for u in node.users if u in view.live], [a for a in node.args if isinstance(a, fx.Node)]
    bodies: dict[fx.Node, Any] = {a: getattr(view.real.owning_module, str(a.target), None) for a in given[:2]}
    result = view.value(users[0]) if len(users) == 1 and users[0].args == (node, 0) else None
    if result is None or given != [*node.args] or not all(isinstance(b, fx.GraphModule) for b in bodies.values()):
        return None
    views = [View(body.graph, view.modes_at(node), view.knowledge, body=True) for body in bodies.values()]
    places, (steps, ends) = views[0].graph.find_nodes(op="placeholder")[2 - len(given) :], _steps(views[0])
    args = dict(zip(places, given[2:], strict=False))
    values = {at: v for at, a in args.items() if (v := view.value(a)) is not None and v.shape == result.shape}
    like = [at for at, v in values.items() if v.dtype.is_floating_point]
    whole = steps is not None and steps.logits is steps.read and steps.read.node in like
    start = steps.read.node if whole and steps is not None else like[0] if len(like) == 1 else None
    sizes = {symbol for size in result.shape for symbol in size.symbols}
    others = [(a, example(a)) for at, a in args.items() if at is not start]
    # Dynamo hands over every leaf tensor where the backward runs Tensor.backward.
    computed = any(isinstance(t, Tensor) and a.op not in ("placeholder", "get_attr") for a, t in others)
    numbers = any(isinstance(t, torch.SymInt) and not sizes.issuperset(size_of(t, {}).symbols) for _, t in others)
    if steps is None or start is None or computed or numbers:
        return None
    call, forward, logits = Piece(), None if whole else piece_of(views[0], start, ends), values[start]
    call.outputs = [*copied(view, call, {node, users[0]}, users, {}).values()]
    if forward is not None:
        forward.inputs = {args.get(at, at): place for at, place in forward.inputs.items()}
    return Function(call, forward, bodies, views, dataclasses.replace(steps, logits=logits, read=logits), result)


def _steps(forward: View) -> tuple[Chain | None, list[fx.Node]]:
    """Returns the iterations that give a forward's first result, or None, and this result."""
    # Dynamo of torch 2.11 returns every step of the forward after its results.
    first = [n for n in compat.tree_leaves(forward.graph.output_node().args)[:1] if isinstance(n, fx.Node)]
    result = next(map(forward.value, first), None)
    group = Chains(forward).group(result) if result is not None else None
    steps = group.chains.get(result) if group is not None and result is not None else None
    return steps if steps is not None and steps.iters and steps.steps > 2 else None, first


def _difference(function: Function) -> str:
    """Returns how a Function differs from the op, as a reason, or an empty string if it does not."""
    shape = example(node_of(function.steps.logits)).shape
    *present, n, _ = map(compat.routing.hint, shape)
    large = [size for size in present if size > 1]  # cut() leaves a size of 1 as it is
    placed, unknown = any(far(view, node) for view in function.views for node in view.nodes), ""
    if placed and any(isinstance(size, torch.SymInt) for size in shape):
        unknown = UNRUN.format(error="it names positions, and the number of tokens may change")
    with compat.routing.outside_compile():
        try:
            return _compared(function, large if placed else _FEW, n) or unknown
        except Exception as error:
            why = UNRUN.format(error=said(error))
        with contextlib.suppress(Exception):  # a body may have the number of tokens in it
            return _compared(function, large, n) or unknown
    return why


def _compared(function: Function, few: Sequence[int], n: int) -> str:
    """Returns how a Function differs from the op on logits with these leading sizes. Raises what the Function raises."""
    steps, forward, g = function.steps, function.forward, torch.Generator().manual_seed(11)
    call, feed, tokens = cut(function.call, start := node_of(steps.logits), few, function.bodies)
    if tokens * n * n > _ELEMENTS:
        raise NotRun("it does not run on few tokens")
    for node, t in [(node, t) for node, t in feed.items() if isinstance(t, Tensor)]:
        made = torch.randn(t.shape, generator=g, dtype=torch.float64)
        feed[node] = made.requires_grad_() if t.is_floating_point() else (made > 0).to(t.dtype)
    others = [t for node, t in feed.items() if node is not start and isinstance(t, Tensor) and t.requires_grad]
    numbers = numbers_in(v for view in function.views for node in view.nodes if (v := view.value(node)) is not None)
    plain, extreme, _ = kinds(numbers)
    for _, logits in samples([*plain, *extreme], n, tokens):
        feed[start] = logits.requires_grad_().view(feed[start].shape)
        sizes = torch.tensor([1, 1e-6, 1e6, *numbers, 1, 1], dtype=torch.float64).view(-1, 1, 1, 1)
        ups = sizes * torch.randn(len(sizes), *logits.shape, generator=g, dtype=torch.float64)
        ups[-2:, ..., 0] = torch.tensor([[[math.inf]], [[math.nan]]])
        with torch.enable_grad(), Exact({compat.storage_key(logits): steps.logits.dtype}):
            mine = mixed(logits, steps) if forward is None else interpreted(forward, feed, plain=True)[0]
            theirs, mine = (t.view(logits.shape) for t in (interpreted(call, feed, plain=True)[0], mine))
            found = [(0 * logits, theirs, mine)]
            for up in ups:
                grad, *rest = torch.autograd.grad(theirs, [logits, *others], up, retain_graph=True, allow_unused=True)
                if grad is None or any(r is not None for r in rest):
                    raise ValueError("its gradient does not go to the logits alone")
                found.append((up, grad, *torch.autograd.grad(mine, logits, up, retain_graph=True)))
        for i, tensors in enumerate(found):
            error = _apart(*tensors)
            if not error <= _EXACT:
                return OTHER.format(what="gradients" if i else "results", error=error)
    return ""


def _apart(up: Tensor, theirs: Tensor, mine: Tensor) -> float:
    """Returns the largest difference, relative to a token's largest element; a NaN is in both or it is infinite."""
    if not torch.equal(theirs.isnan(), mine.isnan()):
        return math.inf
    # Where the logits are far apart all gradients vanish, and only their rounding errors are left.
    least, theirs, mine = (t.detach().nan_to_num() for t in (1e-5 * up, theirs, mine))
    return off(theirs, mine, torch.maximum(least.abs(), mine.abs()).amax((-1, -2), keepdim=True))
