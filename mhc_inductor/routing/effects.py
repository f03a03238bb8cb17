# SPDX-License-Identifier: Apache-2.0
"""What each call of a graph writes and watches, the memory of its tensors, and the modes at every position.

A call's name does not tell: ``torch.ops.ns.f(t)`` may write ``t``, and ``F.relu(t, True)`` does. Each distinct call is
run once on fake tensors under a dispatch mode that sees the schemas of the operators below it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.graph.known_calls import KnownCalls
from mhc_inductor.routing.graph.values import SHARDED, example, fresh, given, run, run_fake, tensors_in

_DISTINCT = frozenset((int, bool, str, type(None)))
"""Types whose values serve as keys themselves. Other types are compared by their text, floats among them."""
AutocastState = tuple[str, Any, bool, Any]
"""An autocast region: device, dtype, whether enabled, whether the cache is used."""
_PLAIN = (int, float, bool, complex, str, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size)
_DESCRIPTIONS = (torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclasses.dataclass(frozen=True)
class Effect:
    """What a call does to its tensor arguments.

    ``writes`` are the positions of the arguments that it writes, in flattened order. ``watches``: it may keep or hook
    its arguments. ``known`` is False if PyTorch could not run the call; it may then do anything to them.
    """

    writes: tuple[int, ...] = ()
    watches: bool = False
    known: bool = True


_NONE = Effect()


class _Writes(compat.routing.TorchDispatchMode):
    """Dispatch mode that collects the storages that any operator under it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for written in _written_arguments(func, args, kwargs):
            tensors = (t for t in compat.tree_leaves(written) if isinstance(t, torch.Tensor))
            self.storages.update(map(compat.storage_key, tensors))
        return func(*args, **kwargs)


def _written_arguments(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Yields the arguments that an operator's schema marks as written."""
    for i, a in enumerate(func._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            yield kwargs.get(a.name) if a.kwarg_only or i >= len(args) else args[i]


class Effects:
    """The effects of the nodes of all graphs of one compile. Equal calls are run once."""

    def __init__(self) -> None:
        self._known = KnownCalls("effect")
        self._of_node: dict[fx.Node, Effect] = {}
        self.unknown: dict[fx.Node, None] = {}
        """Calls whose effects PyTorch could not determine."""
        self.memory: Mapping[int, int] = {}
        """For storages that stand for another one, that one."""
        self._described: dict[int, tuple[torch.Tensor, Any]] = {}
        self._storages: dict[fx.Node, tuple[int, ...]] = {}
        self._results: dict[Any, Any] = {}
        self._autocast: dict[fx.Node, tuple[AutocastState, ...]] = {}

    def within(self, modes: Mapping[fx.Node, Modes]) -> None:
        """Records the autocast regions of nodes: some calls fail outside of theirs."""
        self._autocast.update((node, m.autocast) for node, m in modes.items() if m.autocast)

    def of(self, node: fx.Node) -> Effect:
        """Returns what ``node`` does to its tensor arguments."""
        found = self._of_node.get(node)
        if found is None:
            found = self._of_node[node] = self._find(node)
            if not found.known:
                self.unknown[node] = None
        return found

    def _find(self, node: fx.Node) -> Effect:
        if node.op == "call_module":
            return Effect(known=False)
        if node.op not in ("call_function", "call_method") or compat.mode_change(node) is not None:
            return _NONE
        if not any(map(self.storages, node.all_input_nodes)):
            return _NONE
        if isinstance(node.target, compat.OpOverload):
            return self._of_schema(node)
        if isinstance(node.target, compat.HigherOrderOperator):
            return self._of_bodies(node)
        target = str(node.target) if node.op == "call_method" else node.target
        autocast = self._autocast.get(node, ())
        key = target, autocast, self._key(node.args), self._key(node.kwargs)
        found: Effect = self._known.find(node, key, lambda: _asked(node, Modes(autocast=autocast)))
        if not found.known and any(SHARDED in a.meta for a in node.all_input_nodes):
            return _asked(node, Modes(autocast=autocast), given)  # a method of DTensors, such as redistribute
        return found

    def _key(self, tree: Any) -> Any:
        """Returns a key of what a call's effects may depend on: argument structure, numbers and tensor metadata."""
        kind = type(tree)
        if kind is fx.Node:
            tree = example(tree)
            kind = type(tree)
        if kind in _DISTINCT:
            return kind, tree
        if isinstance(tree, torch.Tensor):
            known = self._described.get(id(tree))
            if known is None:
                known = self._described[id(tree)] = tree, _description(tree)
            return known[1]
        if kind is slice:
            tree = tree.start, tree.stop, tree.step
        if isinstance(tree, (list, tuple)):
            return kind, *[self._key(t) for t in tree]
        if isinstance(tree, dict):
            return tuple([(k, self._key(v)) for k, v in tree.items()])
        return kind, repr(tree)

    def result(self, node: fx.Node, modes: Modes | None = None) -> Any:
        """Returns what a call gives on fake tensors. Of equal calls that return new tensors one is run."""
        key = node.op, node.target, modes, self._key(node.args), self._key(node.kwargs)
        if key not in self._results:
            found = run_fake(node)
            new, old = tensors_in(found), [t for a in node.all_input_nodes for t in tensors_in(example(a))]
            if not all(map(compat.routing.is_fake, new)) or not _memory(new).isdisjoint(_memory(old)):
                return found
            self._results[key] = found
        found = self._results[key]
        with compat.fake_mode_of(tensors_in(found)) or contextlib.nullcontext():
            return compat.tree_map_only(torch.Tensor, lambda t: fresh(t, t.requires_grad), found)

    def written(self, node: fx.Node) -> list[fx.Node]:
        """Returns the inputs of ``node`` whose tensors it writes: all tensor inputs if its effects are unknown."""
        effect = self.of(node)
        if effect.known and not effect.writes:
            return []
        holders = _tensor_arguments(node)
        picked = holders if not effect.known else [holders[i] for i in effect.writes if i < len(holders)]
        return list(dict.fromkeys(picked))

    def events(self, graph: fx.Graph) -> list[tuple[int, int, fx.Node]]:
        """Returns (position, storage, node) for every tensor that a node writes in place."""
        written = ((i, node, target) for i, node in enumerate(graph.nodes) for target in self.written(node))
        return [(i, storage, node) for i, node, target in written for storage in self.storages(target)]

    def storages(self, node: fx.Node) -> tuple[int, ...]:
        """Returns the storage key of each tensor of a node's result."""
        found = self._storages.get(node)
        if found is None:
            keys = map(compat.storage_key, tensors_in(example(node)))
            found = self._storages[node] = tuple(self.memory.get(key, key) for key in keys)
        return found

    def move(self, node: fx.Node, was: int, now: int) -> None:
        """Records that a node's result lies in storage ``now``, although its example value says ``was``."""
        self._storages[node] = tuple(now if key == was else key for key in self.storages(node))

    def _of_schema(self, node: fx.Node) -> Effect:
        """Returns the effect that an operator's schema declares."""
        written = [*_written_arguments(node.target, node.args, node.kwargs)]
        nodes = {n for n in compat.tree_leaves(written) if isinstance(n, fx.Node)}
        return Effect(tuple(i for i, n in enumerate(_tensor_arguments(node)) if n in nodes))

    def _of_bodies(self, node: fx.Node) -> Effect:
        """Returns the effect of a higher-order operator.

        It writes what its bodies write of their inputs; without bodies it may write everything. If it returns an
        input's own memory, it may have attached something to it, such as a hook, and so watches it.
        """
        arguments = _tensor_arguments(node)
        handed_on = not {key for n in arguments for key in self.storages(n)}.isdisjoint(self.storages(node))
        owner = node.graph.owning_module
        given = [getattr(owner, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"]
        bodies = [b for b in given if isinstance(b, fx.GraphModule)]
        if not bodies:
            pure = not compat.routing.may_mutate(node.target)
            return Effect(watches=handed_on) if pure else Effect(tuple(range(len(arguments))))
        for body in bodies:
            starts = [n for n in body.graph.nodes if n.op in ("placeholder", "get_attr")]
            inputs = {storage for n in starts for storage in self.storages(n)}
            # Inside a body torch.autograd.grad is a barrier, but it writes none of what it is given.
            events = [e for e in self.events(body.graph) if e[2].target is not torch.autograd.grad]
            if any(storage in inputs for _, storage, _ in events):
                return Effect(tuple(range(len(arguments))), watches=handed_on)
        return Effect(watches=handed_on)


def _memory(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {*map(compat.storage_key, tensors)}


def _tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """Returns for each tensor among the arguments of ``node``, in flattened order, the node that holds it."""
    given = [n for n in compat.tree_leaves((node.args, node.kwargs)) if isinstance(n, fx.Node)]
    return [n for n in given for t in compat.tree_leaves(example(n)) if isinstance(t, torch.Tensor)]


def _description(t: torch.Tensor) -> Any:
    strides = tuple(map(str, t.stride())) if t.layout is torch.strided else ()
    return type(t), t.dtype, tuple(map(str, t.shape)), strides, t.device, t.requires_grad, t.layout


def _made(t: Any) -> Any:
    if not isinstance(t, torch.Tensor):
        return t
    grad = t.requires_grad and t.is_floating_point()
    return torch.empty_like(t).requires_grad_(grad) if compat.is_dtensor(t) else fresh(t, grad)


def _asked(node: fx.Node, modes: Modes, value: Callable[[fx.Node], Any] = example) -> Effect:
    """Runs ``node`` on new fake tensors and returns its effect. Leaves modes and the graph's tensors as they were.

    ``value`` returns the fake value of an input.
    """
    flat, spec = compat.routing.tree_flatten(fx.node.map_arg((node.args, node.kwargs), value))
    mode = compat.fake_mode_of([t for t in flat if isinstance(t, torch.Tensor)])
    if mode is None:
        return Effect(known=False)
    writes = _Writes()
    try:
        with compat.routing.modes_kept(), torch.no_grad(), modes.entered(), mode, compat.no_new_guards(mode):
            made = [_made(t) for t in flat]
            args, kwargs = compat.routing.tree_unflatten(made, spec)
            with writes:
                out = run(node, args, kwargs)
    except Exception as error:  # not every call can be run alone
        # Reading a number from data (item) aborts the run; until then the call may have only read.
        return Effect(known=compat.routing.reads_data(error) and not writes.storages)
    tensors = [(t, old) for t, old in zip(made, flat, strict=True) if isinstance(t, torch.Tensor)]
    changed = [
        compat.storage_key(t) in writes.storages or t.requires_grad != (old.requires_grad and t.is_floating_point())
        for t, old in tensors
    ]
    return Effect(tuple(i for i, c in enumerate(changed) if c), watches=not _plain(out))


def _plain(out: Any) -> bool:
    """Returns whether a result consists of tensors and numbers. A handle does not, and neither does a hook's None."""
    leaves = compat.tree_leaves(out)
    kinds = (torch.Tensor, *_PLAIN, *_DESCRIPTIONS)
    return bool(leaves) and all(isinstance(leaf, kinds) for leaf in leaves)


@dataclasses.dataclass(frozen=True)
class Modes:
    """The grad mode, inference mode and autocast regions, outermost first, at a position of a graph.

    ``kernels``: the graph has chosen kernels of scaled_dot_product_attention, so that they may not be the ambient ones.
    """

    grad: bool = True
    inference: bool = False
    autocast: tuple[AutocastState, ...] = ()
    kernels: bool = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enters the autocast regions for the body."""
        with contextlib.ExitStack() as stack:
            for device, dtype, enabled, _ in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


def ambient(devices: tuple[str, ...] = ("cpu", "cuda")) -> Modes:
    """Returns the modes in force where the compiled function is called."""
    autocast = tuple(
        (device, torch.get_autocast_dtype(device), True, None)
        for device in devices
        if torch.is_autocast_enabled(device)
    )
    return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)


def modes_of(graph: fx.Graph, outer: Modes) -> dict[fx.Node, Modes]:
    """Returns the modes of every node of ``graph``, which starts in ``outer``."""
    found: dict[fx.Node, Modes] = {}
    now, before = outer, {}
    for node in graph.nodes:
        change = compat.mode_change(node)
        if change is not None:
            kind, value = change
            if kind == "grad":
                now = dataclasses.replace(now, grad=value)
            elif kind == "kernels":
                now = dataclasses.replace(now, kernels=True)
            elif kind == "enter_inference":
                before[node] = now
                now = dataclasses.replace(now, inference=value, grad=now.grad and not value)
            elif kind == "enter_autocast":
                before[node] = now
                now = dataclasses.replace(now, autocast=(*now.autocast, value))
            elif kind == "exit_inference":
                then = before.get(value, outer)
                now = dataclasses.replace(now, inference=then.inference, grad=then.grad)
            elif kind == "exit_autocast":
                now = dataclasses.replace(now, autocast=before.get(value, outer).autocast)
        found[node] = now
    return found
