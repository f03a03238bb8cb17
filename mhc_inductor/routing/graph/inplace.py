"""``S += outer`` on a tensor that the loop has just made is ``S = S + outer``: written so, it can be recognised."""

from __future__ import annotations

import collections
import itertools
import operator
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.graph.run import run_fake
from mhc_inductor.routing.graph.values import Values, example, tensors_in
from mhc_inductor.routing.operators.mhc.search import name_of
from mhc_inductor.routing.rewriter import written_by

_OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_METHODS = ("add_", "sub_", "mul_", "div_", "neg_", "sigmoid_", "baddbmm_", "addcmul_")


def _floating(node: fx.Node) -> bool:
    fake = example(node)
    return isinstance(fake, torch.Tensor) and fake.is_floating_point() and fake.dim() > 1


Change = tuple[fx.Node, Any, Any]
"""A node, and its target and fake value from before."""


def _plain(node: fx.Node) -> Any:
    """The target that computes what ``node`` computes in place, or None."""
    if node.op == "call_function":
        return _OPERATORS.get(node.target)
    if node.op == "call_method" and node.target in _METHODS:
        return str(node.target)[:-1]
    return None


def out_of_place(graph: fx.Graph, values: Values) -> list[Change]:
    """Let in-place operations make new tensors, where nobody can tell. What was changed.

    That is so where no other node shares the tensor's memory, and none reads it afterwards but through the result.
    """
    candidates = [node for node in graph.nodes if _plain(node) is not None and not node.kwargs and _floating(node)]
    if not candidates:
        return []
    order = {node: i for i, node in enumerate(graph.nodes)}
    held: dict[int, list[fx.Node]] = collections.defaultdict(list)
    for node in graph.nodes:
        for t in tensors_in(example(node)):
            held[compat.storage_key(t)].append(node)
    undo: list[Change] = []
    done: set[fx.Node] = set()
    for node in candidates:
        before, fake = node.args[0], example(node)
        # A tensor and its in-place results, each read only before the next is made; views of the last one only.
        shared = held[compat.storage_key(fake)]
        writes = [k for k, other in enumerate(shared) if written_by(other)]
        chain = shared[: writes[-1] + 1]
        made = chain[0].op in ("call_function", "call_method") and values.inspectable(chain[0])
        if not made or any(a is not b.args[0] or not (b in done or _plain(b)) for a, b in itertools.pairwise(chain)):
            continue
        if not isinstance(before, fx.Node) or any(order[user] > order[node] for user in before.users):
            continue
        change = node, node.target, fake
        node.target = _plain(node)
        result = run_fake(node)
        if result.dtype == fake.dtype and result.shape == fake.shape:
            node.meta["example_value"] = result
            done.add(node)
            undo.append(change)
        else:
            node.target = change[1]
    return undo


def exchange(changes: list[Change]) -> None:
    """Take back what :func:`out_of_place` did, or, called again, do it again."""
    for i, (node, target, fake) in enumerate(changes):
        changes[i] = node, node.target, example(node)
        node.target = target
        node.meta["example_value"] = fake


_EMPTY = {"empty", "zeros", "full", "empty_like", "zeros_like", "full_like", "new_empty", "new_zeros", "new_full"}


def stacked_buffers(graph: fx.Graph) -> list[fx.Node]:
    """Let a buffer that a loop fills piece by piece, ``out[t] = y`` or ``out[:, t] = y``, be a stack. The stacks.

    Only where the pieces cover all of it, and nothing reads it before it is full.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    made = []
    for node in list(graph.nodes):
        fake = example(node)
        if not node.op.startswith("call_") or name_of(node) not in _EMPTY or not isinstance(fake, torch.Tensor):
            continue
        writes = [user for user in node.users if user.target is operator.setitem and user.args[0] is node]
        others = [user for user in node.users if user not in writes]
        places = [_place(user.args[1]) for user in writes]
        dims = {place[0] for place in places if place is not None}
        if not writes or None in places or len(dims) != 1 or any(user.users for user in writes):
            continue
        dim = dims.pop()
        pieces = {place[1]: user.args[2] for place, user in zip(places, writes, strict=True) if place is not None}
        if fake.dim() <= dim or sorted(pieces) != list(range(len(writes))) or str(fake.shape[dim]) != str(len(writes)):
            continue
        inner = [*map(str, (*fake.shape[:dim], *fake.shape[dim + 1 :]))]
        fakes = [example(piece) if isinstance(piece, fx.Node) else None for piece in pieces.values()]
        if any(
            not isinstance(t, torch.Tensor) or [*map(str, t.shape)] != inner or t.dtype != fake.dtype for t in fakes
        ):
            continue
        if not others or min(order[user] for user in others) < max(order[user] for user in writes):
            continue
        with graph.inserting_after(max(writes, key=order.__getitem__)):
            stack = graph.call_function(torch.stack, ([pieces[t] for t in range(len(writes))], dim))
        stack.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
        stack.meta["example_value"] = run_fake(stack)
        node.replace_all_uses_with(stack, delete_user_cb=lambda user, kept=set(writes): user not in kept)
        for user in [*writes, node]:
            graph.erase_node(user)
        made.append(stack)
    return made


def _place(index: Any) -> tuple[int, int] | None:
    """(dimension, position) of ``[t]`` or ``[:, ..., t]``."""
    index = index if isinstance(index, tuple) else (index,)
    *before, last = index
    full = all(isinstance(i, slice) and i == slice(None) for i in before)
    return (len(before), last) if full and isinstance(last, int) and not isinstance(last, bool) else None
