# SPDX-License-Identifier: Apache-2.0
"""Makes the choices of keys in a routed Dynamo graph its outputs, or inputs in their place.

So a compiled graph stays functional: it records nothing itself, and its checkpointed regions take the keys as arguments,
which the backward reads again. The code around the compiled function copies keys from and to the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from mhc_inductor import compat
from mhc_inductor.log import warn_once
from mhc_inductor.replay import ops, run
from mhc_inductor.report import Report
from mhc_inductor.routing.graph.values import example, name_of
from mhc_inductor.routing.operators.index.operator import IndexOperator
from mhc_inductor.routing.sources import modules_of
from mhc_inductor.scope import Change, replace

_OPS = torch.ops.mhc_inductor
_CHOICES = (_OPS.index_topk.default, _OPS.index_topk_scores.default)
_SCORES = _OPS.index_scores.default
_MASKS = re.compile("i?add|i?sub|mul|truediv|masked_fill|where|to|float|type_as|contiguous|clone|detach|view|reshape")
"""Calls that may stand between scores and their ``topk``: they hide keys, or change no order."""
_LOWEST, _FILL = -1e30, -1e4
"""No visible key's score is below the first; a mask adds less than the second to a hidden key's score alone."""
_BEST_KEYS = ((-1, True), (2, True))
"""Arguments ``dim`` and ``largest`` of a ``topk`` that ranks the keys of index scores, the best first."""

as_ops = Change(lambda: replace(IndexOperator, "faster_as_written", lambda _: lambda *_: False))
"""Context in which every recognised indexer becomes an op, also where a CPU would run its formula."""


def routed_in_mode() -> contextlib.AbstractContextManager[None]:
    """Returns the context in which to route a graph in the present mode."""
    return contextlib.nullcontext() if run.mode == "off" else as_ops


def compiled(gm: fx.GraphModule, inputs: Any, report: Report, compile_: Callable[[Any], Any]) -> Any:
    """Compiles a routed Dynamo graph for the present mode, and makes Dynamo compile it again for another mode.

    Args:
        gm: the graph, which is rewritten in place.
        inputs: its example inputs.
        report: what was routed in it.
        compile_: compiles the graph for given example inputs.

    Returns:
        A function with the arguments and results of the graph as it was given.

    Raises:
        NotImplementedError: if a choice is where it cannot be recorded or replaced.
    """
    if not any(r.op.startswith("index_") for r in report.routed) and not any(map(_chooses, _nodes(gm))):
        return compile_(inputs)
    compat.backend.guard_attribute(run.__name__, "mode")
    if run.mode == "off":
        return compile_(inputs)
    compat.backend.own_graph(gm)
    sites = _rewritten(gm, run.mode == "replay")
    if not sites:
        return compile_(inputs)
    if run.mode == "record":
        return _around(compile_(inputs), sites, None)
    return _around(compile_([*inputs, *(s.keys for s in sites)]), sites, _Sizes(list(inputs)))


def _around(fn: Callable[..., Any], sites: list[Site], sizes: _Sizes | None) -> Callable[..., Any]:
    """Returns ``fn`` with keys from the open context's store, if ``sizes`` tells their sizes, or into it."""

    def call(*args: Any) -> Any:
        here = run.current(sites[0].name)
        first, keys = here.next, list[Tensor]()
        if sizes is not None:
            keys = [here.give(s.name, sizes.of(s.keys, args), s.keys.device) for s in sites]
        out = fn(*args, *keys)
        for at, (site, found) in enumerate(zip(sites, out[-len(sites) :], strict=True), first):
            if sizes is None:
                here.keep(site.name, found)
            else:
                here.note(at, found)
        return out[: -len(sites)]

    return call


@dataclasses.dataclass(frozen=True)
class Site:
    """One choice of keys: module and line, and a fake tensor of its keys [B, S, n], int32."""

    name: str
    keys: Tensor


class _Sizes:
    """Computes the sizes of a call from its arguments."""

    def __init__(self, inputs: list[Any]) -> None:
        self.where: dict[Any, tuple[int, int | None]] = {}
        for i, given in enumerate(inputs):
            sizes = enumerate(given.shape) if isinstance(given, Tensor) else [(None, given)]
            for dim, size in sizes:
                if compat.is_symbol(size):
                    self.where.setdefault(compat.expression(size), (i, dim))

    def of(self, keys: Tensor, args: tuple[Any, ...]) -> tuple[int | None, ...]:
        """Returns the sizes of ``keys``, a fake tensor, in a call with ``args``; None where no argument tells it."""
        return tuple(s if isinstance(s, int) else self._value(compat.expression(s), args) for s in keys.shape)

    def _value(self, size: Any, args: tuple[Any, ...]) -> int | None:
        if not self.where.keys() >= size.free_symbols:
            return None
        at = ((symbol, *self.where[symbol]) for symbol in size.free_symbols)
        return _substituted(size, frozenset((s, int(args[i] if d is None else args[i].shape[d])) for s, i, d in at))


@functools.cache
def _substituted(size: Any, values: frozenset[tuple[Any, int]]) -> int:
    return int(size.subs(dict(values)))


def _nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def _ranking(node: fx.Node) -> list[fx.Node]:
    """Returns the calls from index scores [B, S, T] to what a ``topk`` of keys ranks, or [] for another node."""
    given = dict(zip(("input", "k", "dim", "largest"), node.args, strict=False)) | node.kwargs
    how = given.get("dim", -1), given.get("largest", True)
    if name_of(node).partition(".")[0] != "topk" or how not in _BEST_KEYS:
        return []
    path = _path(node.all_input_nodes[0])
    return path if path and example(path[0]).shape == example(path[-1]).shape else []


def _path(node: fx.Node) -> list[fx.Node]:
    """Returns the calls from index scores to ``node``, between which there are only masks, or []."""
    if any(name_of(u) == "setitem" or name_of(u).partition(".")[0].endswith("_") for u in node.users):
        return []  # written in place
    if node.target is _SCORES:
        return [node]
    if _MASKS.fullmatch(name_of(node).partition(".")[0]):
        for a in node.all_input_nodes:
            value = example(a)
            if isinstance(value, Tensor) and value.is_floating_point() and (path := _path(a)):
                return [*path, node]
    return []


def _chooses(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target in _CHOICES or node.target is _SCORES)


def _name(node: fx.Node) -> str:
    """Returns the module and the line of the innermost user code of a node."""
    frames = re.findall(r'File "(.*)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith(run._OWN)] or frames or [("unknown", "0")]
    line = f"{own[-1][0].rpartition('/')[2]}:{own[-1][1]}"
    modules = [path for path, _ in modules_of(node) if path]
    return f"{modules[-1]} ({line})" if modules else line


def _rewritten(gm: fx.GraphModule, replay: bool) -> list[Site]:
    """Gives a graph one more output for each choice, and for replay one more input. Returns the choices in order."""
    graph, sites, more = gm.graph, list[Site](), list[fx.Node]()
    ranked = {path[0] for node in graph.nodes if (path := _ranking(node))}
    for node in graph.find_nodes(op="call_function", target=_SCORES):
        if node not in ranked:
            name = _name(node)
            warn_once(f"unranked {name}", f"the scores of {name} choose no keys that can be recorded or replayed")
    for node in list(graph.nodes):
        if body := _body(gm, node):
            inner = _rewritten(body, replay)
            node.args = (*node.args, *(_input(graph, s.keys)[0] for s in inner if replay))
            first = len(_results(body)) - len(inner)
            with graph.inserting_after(node):
                more += [graph.call_function(operator.getitem, (node, first + i)) for i in range(len(inner))]
            sites += inner
        elif node.target in _CHOICES or _ranking(node):
            with graph.inserting_before(node if replay else node.next):
                site, added = (_replaced if replay else _recorded)(node)
            sites.append(site)
            more.append(added)
    if sites:
        graph.output_node().args = ((*_results(gm), *more),)
        graph.lint()
        gm.recompile()
    return sites


def _results(gm: fx.GraphModule) -> tuple[Any, ...]:
    return gm.graph.output_node().args[0]  # type: ignore[return-value]


def _body(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """Returns the body of a checkpointed region that chooses keys. Raises NotImplementedError for another kind of body."""
    if node.op != "call_function":
        return None
    for a in node.all_input_nodes:
        body = getattr(gm, str(a.target), None) if a.op == "get_attr" else None
        if isinstance(body, fx.GraphModule) and any(n.target in _CHOICES or _ranking(n) for n in _nodes(body)):
            if name_of(node) == "tag_activation_checkpoint" and len(a.users) == 1:
                return body
            raise NotImplementedError(
                f"recorded_indices and replayed_indices cannot reach the choice of keys in {name_of(node)} at {_name(node)}; "
                "take the indexer out of it"
            )
    return None


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of a call of an op, by name; those that are left out are None."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict.fromkeys(names) | dict(zip(names, node.args, strict=False)) | node.kwargs


def _visible(node: fx.Node) -> tuple[Any, ...]:
    """Emits T, and what says which of the keys a query sees, for a choice of keys."""
    path = _ranking(node)
    given = _arguments(path[0] if path else node)
    mask = given["mask"]
    if path[1:]:  # what the model's own masks leave of scores of 0
        copies = {path[0]: _emit(node, torch.zeros_like, path[0])}
        for call in path[1:]:
            copies[call] = node.graph.node_copy(call, lambda n: copies.get(n, n))
        seen = _emit(node, operator.gt, copies[path[-1]], _FILL)
        mask = seen if mask is None else _emit(node, torch.logical_and, seen, mask)
    size = _emit(node, "size", given["k"], 1)
    return size, given["limit"], mask, given["segments_q"], given["segments_k"]


def _emit(of: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Adds a call where the graph inserts, with the line and the modules of another node."""
    make = of.graph.call_method if isinstance(target, str) else of.graph.call_function
    node = make(target, args)
    node.meta.update({k: v for k, v in of.meta.items() if k in ("stack_trace", "nn_module_stack")})
    return node


def _recorded(node: fx.Node) -> tuple[Site, fx.Node]:
    """Emits the keys that a choice returns, -1 in place of hidden ones. Returns the choice and their node."""
    keys = node if node.target is _CHOICES[0] else _emit(node, operator.getitem, node, int(bool(_ranking(node))))
    if path := _ranking(node):
        hidden = _emit(node, operator.le, _emit(node, operator.getitem, node, 0), _LOWEST)
        if path[1:]:
            seen = _emit(node, torch.gather, _visible(node)[2], -1, keys)
            hidden = _emit(node, torch.logical_or, hidden, _emit(node, torch.logical_not, seen))
        keys = _emit(node, "to", _emit(node, torch.where, hidden, -1, keys), torch.int32)
    return Site(_name(node), _example(node)), keys


def _replaced(node: fx.Node) -> tuple[Site, fx.Node]:
    """Puts given keys in the place of a choice. Returns the choice, and the node with the number of wrong queries."""
    ranked = bool(_ranking(node))
    keys, value = _input(node.graph, _example(node))
    both = _emit(node, ops.replayed, keys, *_visible(node), ranked)
    indices, wrong = (_emit(node, operator.getitem, both, i) for i in range(2))
    if node.target is _CHOICES[0]:
        node.replace_all_uses_with(indices)
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise NotImplementedError(f"replayed_indices: {_name(user)} reads both results of topk in one call")
        if user.args[1] == int(ranked):
            user.replace_all_uses_with(indices)
        elif user.users:
            user.replace_all_uses_with(_values(node, indices, user))
        node.graph.erase_node(user)
    node.graph.erase_node(node)
    return Site(_name(node), value), wrong


def _values(node: fx.Node, indices: fx.Node, values: fx.Node) -> fx.Node:
    """Emits the scores of given keys: those of all keys are computed unless the scores only mark hidden keys."""
    if _ranking(node):
        return _emit(node, torch.gather, node.all_input_nodes[0], -1, indices)
    hidden, shown = _emit(node, operator.lt, indices, 0), 0.0
    if not _only_marks(values):
        given = _arguments(node)
        scores = _emit(node, _SCORES, *(given[a.name] for a in _SCORES._schema.arguments))
        at = _emit(node, "to", _emit(node, "clamp", indices, 0), torch.int64)
        shown = _emit(node, torch.gather, scores, -1, at)  # type: ignore[assignment]
    return _emit(node, torch.where, hidden, -torch.inf, shown)


def _only_marks(node: fx.Node) -> bool:
    """Returns whether scores are only compared with numbers that no visible key's score reaches."""
    for user in node.users:
        low = any(isinstance(a, (int, float)) and a < _LOWEST for a in user.args)
        filled = name_of(user) == "where" and node in user.args[1:] and _only_marks(user)
        if not low or not (filled or name_of(user) in ("eq", "ne", "lt", "le", "gt", "ge")):
            return False
    return True


def _example(node: fx.Node) -> Any:
    """Returns the fake keys of a choice. Raises NotImplementedError for a DTensor."""
    value = example(node)
    keys = value if isinstance(value, Tensor) else value[int(bool(_ranking(node)))]
    if compat.is_wrapper(keys):
        raise NotImplementedError(f"{_name(node)}: keys of DTensors are neither recorded nor replayed")
    return keys


def _input(graph: fx.Graph, like: Any) -> tuple[fx.Node, Any]:
    """Adds an input for keys after the others. Returns its node and its fake value."""
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(next(iter(graph.nodes))):
        node = graph.placeholder(f"replayed_keys_{len(inputs)}")
    return node, compat.backend.graph_input(node, like)
