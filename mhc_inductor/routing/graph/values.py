# SPDX-License-Identifier: Apache-2.0
"""A Dynamo graph seen as ATen operations, expanded one node at a time and only on demand.

Each node is run alone on the fake values that Dynamo left in it, under a mode that records the ATen operations. The
whole graph is never traced: nodes that nothing asks about cost nothing, and equal calls are expanded once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.graph.index import Size, may_fix, size_of

if TYPE_CHECKING:
    from mhc_inductor.routing.graph.known_calls import KnownCalls

aten = torch.ops.aten
_NO_OPTIONS: dict[str, Any] = {}
_T = TypeVar("_T")


def reached(starts: Iterable[_T], further: Callable[[_T], Iterable[_T]]) -> dict[_T, None]:
    """Returns ``starts`` and all that ``further`` leads to from there, each once, the nearest first."""
    found = dict.fromkeys(starts)
    todo = [*found]
    for at in todo:  # grows
        new = dict.fromkeys(a for a in further(at) if a not in found)
        found.update(new)
        todo += new
    return found


class Value:
    """The result of one ATen operation, or a tensor that the analysis treats as opaque (``func`` is None)."""

    __slots__ = ("_pending", "args", "dtype", "func", "kwargs", "memo", "node", "out", "shape")

    func: Any
    args: tuple[Any, ...]
    memo: dict[Any, Any]
    """What searches found out about this value's elements, by search and element."""

    def __init__(
        self, shape: tuple[Size, ...], dtype: torch.dtype, node: fx.Node | None = None, pending: Any = None
    ) -> None:
        self.shape, self.dtype, self.node = shape, dtype, node
        self._pending = pending
        if pending is None:
            self.func, self.args = None, ()
        self.kwargs = _NO_OPTIONS
        self.out = 0

    def set(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: int = 0) -> None:
        """Sets the operation that computes this value; ``out`` is the position among its results."""
        self.func, self.args, self.kwargs, self.out = func, args, kwargs, out

    def __getattr__(self, name: str) -> Any:
        """Computes a slot when it is first read. Slots that are filled never come here."""
        if name == "memo":
            self.memo = {}
            return self.memo
        if name not in ("func", "args"):
            raise AttributeError(name)
        pending, self._pending = self._pending, None
        self.func, self.args = None, ()
        pending(self)
        return self.func if name == "func" else self.args


def imagined(func: Any, args: tuple[Any, ...], shape: tuple[Size, ...], dtype: torch.dtype) -> Value:
    """Returns the result of a call that no node of the graph holds."""
    made = Value(shape, dtype)
    made.set(func, args, {})
    return made


def OUTSIDE() -> None:
    """Stands for the operation of a tensor that the graph around a checkpointed region does not compute itself."""


def _shadow(value: Value, known: dict[Value, Value]) -> Value:
    """Returns a copy of a value of another graph, without its nodes: it can be followed, but not read."""
    found = known.get(value)
    if found is None:

        def expand(made: Value) -> None:
            func = OUTSIDE if value.func is None else value.func
            made.set(func, _shadowed(value.args, known), value.kwargs, value.out)

        found = known[value] = Value(value.shape, value.dtype, None, expand)
    return found


def _shadowed(a: Any, known: dict[Value, Value]) -> Any:
    if isinstance(a, (tuple, list)):
        return type(a)(_shadowed(b, known) for b in a)
    return _shadow(a, known) if isinstance(a, Value) else a


def of_positions(value: Value) -> bool:
    """Checks whether a value is a mask or integers: computed from constants, integers and bools alone."""
    if not _wide(value):
        return True
    return all(v.func is not None and met < LOOKED_AT for met, v in enumerate(behind(value, _wide), 1))


def _wide(value: Value) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def values_in(args: Any) -> Iterator[Value]:
    """Yields the values in nested arguments, in order."""
    for a in args:
        if isinstance(a, Value):
            yield a
        elif isinstance(a, (tuple, list)):
            yield from values_in(a)


def behind(
    value: Value,
    within: Callable[[Value], bool] = lambda _: True,
    passed: Callable[[Value], bool] = lambda _: True,
) -> Iterator[Value]:
    """Yields a value and those ``within`` that it is computed from, the nearest first, :data:`LOOKED_AT` at most.

    What a value that is not ``passed`` is computed from is not looked at.
    """
    met, seen = [value], {value}
    for at in met:  # grows
        yield at
        if not passed(at):
            continue
        new = dict.fromkeys(a for a in values_in(at.args) if a not in seen and within(a))
        met += list(new)[: LOOKED_AT - len(met)]
        seen.update(met)


def inner(value: Value) -> Iterator[Value]:
    """Yields a value and those inside its node that it is computed from."""
    return behind(value, lambda a: a.node is None)


def random(value: Value) -> bool:
    """Checks whether a node draws random numbers."""
    return any(torch.Tag.nondeterministic_seeded in getattr(v.func, "tags", ()) for v in inner(value))


LOOKED_AT = 256
"""Limit on the values behind a mask, or an input of a checkpointed region, that are looked at."""


def _alias(value: Value, of: Value) -> None:
    value.set(aten.alias.default, (of,), {})


def is_given(value: Value) -> bool:
    """Checks whether a value is an input of a checkpointed region whose formula in the graph around it is known."""
    return value.func is aten.alias.default and value.node is not None and value.node.op == "placeholder"


class _Recorder(compat.routing.TorchDispatchMode):
    """Records the ATen operations below composite ones, and decomposes a few of them further."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _sized_by_data(func, args):
            # Running it would create a symbol that the compiled graph does not know.
            raise NotImplementedError(f"the size of {func} depends on data")
        further = compat.routing.analysis_decompositions().get(func)
        if further is not None:
            with self:
                result = further(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result


_BY_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_INDEXING = {aten.index.Tensor, aten._unsafe_index.Tensor}


def _sized_by_data(func: Any, args: Any) -> bool:
    """Returns whether the size or the value of an operation's result depends on data."""
    if not _BY_DATA.intersection(func.tags):
        return False
    return func not in _INDEXING or any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))


@dataclasses.dataclass(slots=True)
class _At:
    """In a template: tensor ``out`` of those that go into the call (step 0), or that the k-th operation returns (k)."""

    step: int
    out: int


@dataclasses.dataclass(slots=True)
class _Like:
    """In a template: a tensor of which only the shape and the dtype count."""

    shape: torch.Size
    dtype: torch.dtype


_LEVELS = {
    "_grad_increment_nesting": 1,
    "_jvp_increment_nesting": 1,
    "_grad_decrement_nesting": -1,
    "_jvp_decrement_nesting": -1,
}
"""How the calls around torch.func.grad and jvp change the nesting depth."""


def _map(fn: Any, tree: Any) -> Any:
    if isinstance(tree, (list, tuple)):
        return tuple([_map(fn, t) for t in tree])
    if isinstance(tree, dict):
        return {k: _map(fn, t) for k, t in tree.items()}
    return fn(tree)


def example(node: fx.Node) -> Any:
    """Returns the fake value or values that Dynamo left in a node."""
    found = node.meta.get("example_value")
    return node.meta.get("val") if found is None else found


SHARDED = "mhc_inductor_sharded"
"""Key in a node's meta: its fake value with DTensors, while the pass sees whole tensors."""


def given(node: fx.Node) -> Any:
    """Returns the fake value or values that Dynamo left in a node, with their DTensors."""
    return node.meta.get(SHARDED, example(node))


def run(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Returns the result of the call of ``node`` on other arguments."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def copy_into(graph: fx.Graph, node: fx.Node, at: Callable[[fx.Node], fx.Node], meta: dict[str, Any]) -> fx.Node:
    """Copies a node into another graph, where ``at`` gives its inputs, in a third of the time of Graph.node_copy.

    That looks for symbolic numbers in all arguments that a node is created with, and fx.Node updates a table of targets
    with each attribute that is set (torch 2.13).
    """
    made = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    object.__setattr__(made, "args", fx.node.map_arg(node.args, at))
    if node.kwargs:
        made.kwargs = fx.node.map_arg(node.kwargs, at)
    object.__setattr__(made, "meta", meta)
    return made


def is_tensors(fake: Any) -> bool:
    """Returns whether a node's fake value is a tensor, or a tuple or list of tensors only."""
    if isinstance(fake, torch.Tensor):
        return True
    return isinstance(fake, (tuple, list)) and all(isinstance(e, torch.Tensor) for e in fake)


def name_of(node: fx.Node) -> str:
    """Returns the name of what a node calls, for an ATen operation without its overload."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.partition(".")[0] if isinstance(node.target, compat.OpOverload) else name


class Values:
    """The values of a graph's nodes.

    Args:
        graph: a Dynamo graph, whose nodes hold fake values.
        autocast: for each node inside autocast, the (device, dtype, enabled, cache) of its regions, outermost first.
        templates: the calls recorded so far.
        writes: returns whether a node writes a tensor that it is given. Such nodes stay opaque.
        given: for inputs of the body of a checkpointed region, the masks and integers that the graph around passes in;
            None for others.
    """

    def __init__(
        self,
        graph: fx.Graph,
        autocast: dict[fx.Node, tuple[Any, ...]],
        templates: KnownCalls,
        writes: Callable[[fx.Node], Any],
        given: Mapping[fx.Node, Value | None] | None = None,
    ) -> None:
        self.graph = graph
        self.writes = writes
        self.autocast = autocast
        self.templates = templates
        self.given = given or {}
        self._shadows: dict[Value, Value] = {}
        self.fixed: dict[str, int] = {}
        self._of: dict[fx.Node, Any] = {}
        self._inspectable: dict[fx.Node, bool] = {}
        self._reread = False

    @functools.cached_property
    def hints(self) -> dict[str, int]:
        """Returns the present values of the symbols in the graph's shapes. Computed once for all callers."""
        return compat.routing.hints(self.graph)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Returns the present values of the symbols and expressions in the graph's shapes."""
        return compat.routing.present_sizes(self.graph)

    def fix(self, symbols: Collection[str]) -> bool:
        """Fixes these symbols at their present values from now on. Returns whether any of them is new."""
        if not may_fix():
            return False
        new = {name: hint for name, hint in self.hints.items() if name in symbols}
        if not new.keys() - self.fixed.keys():
            return False
        self.fixed.update(new)
        self._of.clear()
        return True

    def reread(self, value: Value, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Lets a value be the result of another formula that is equal, until :meth:`forget`: for one operator."""
        value.set(func, args, kwargs)
        self._reread = True

    def forget(self, fixed: Mapping[str, int]) -> None:
        """Fixes the symbols of ``fixed`` at the given values, and no others."""
        if self._reread or self.fixed != fixed:
            self.fixed, self._reread = dict(fixed), False
            self._of.clear()

    def of(self, node: fx.Node) -> Any:
        """Returns the :class:`Value` of a tensor node, a tuple of them, or None."""
        try:
            return self._of[node]
        except KeyError:
            found = self._of[node] = self._make(node)
            return found

    def _like(self, tensor: torch.Tensor | _Like, node: fx.Node | None = None, pending: Any = None) -> Value:
        return Value(tuple([size_of(s, self.fixed) for s in tensor.shape]), tensor.dtype, node, pending)

    def _make(self, node: fx.Node) -> Any:
        fake = example(node)
        if isinstance(fake, torch.Tensor):
            pending = self._expand if self.inspectable(node) else None
            made = self._like(fake, node, pending)
            outside = None if self.fixed else self.given.get(node)
            if outside is not None and outside.shape == made.shape:
                _alias(made, _shadow(outside, self._shadows))
            return made
        return self._call(node) if is_tensors(fake) and self.inspectable(node) else None

    @functools.cached_property
    def transformed(self) -> set[fx.Node]:
        """Returns the nodes inside torch.func.grad or jvp: their tensors belong to a level of derivatives."""
        found, depth = set(), 0
        for node in self.graph.nodes:
            change = _LEVELS.get(getattr(node.target, "__name__", ""), 0) if node.op == "call_function" else 0
            depth += change
            if depth or change:
                found.add(node)
        return found

    def inspectable(self, node: fx.Node) -> bool:
        """Returns whether a node calls one of PyTorch's own operations that writes none of its arguments."""
        found = self._inspectable.get(node)
        if found is None:
            found = self._inspectable[node] = self._own_call(node)
        return found

    def _own_call(self, node: fx.Node) -> bool:
        if node.op not in ("call_method", "call_function") or node in self.transformed or self.writes(node):
            return False
        if node.op == "call_method":
            return isinstance(node.target, str)
        target = node.target
        if isinstance(target, compat.HigherOrderOperator):
            return False
        if isinstance(target, (compat.OpOverload, compat.routing.OpOverloadPacket)):
            return str(target).partition(".")[0] in ("aten", "prims")
        return not getattr(target, "__name__", "").startswith("_set_grad")

    def _expand(self, value: Value) -> None:
        result = None
        # a node that cannot be run alone stays opaque
        with contextlib.suppress(Exception):
            result = self._call(value.node)  # type: ignore[arg-type]
        if isinstance(result, Value):
            if result.node is None and result._pending is None and result.func is not None:
                value.set(result.func, result.args, result.kwargs, result.out)
            elif result is not value:
                _alias(value, result)

    def _call(self, node: fx.Node) -> Any:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            source = self.of(node.args[0])
            if isinstance(source, tuple) and isinstance(node.args[1], int):
                return source[node.args[1]]
        inputs: list[Any] = []
        seen: dict[int, int] = {}

        def signature_of(t: Any) -> Any:
            # x * x and x * y are different calls: which inputs are the same tensor is part of the key.
            return (*_signature(t), seen.setdefault(id(t), len(seen))) if isinstance(t, torch.Tensor) else repr(t)

        def key(a: Any) -> Any:
            if not isinstance(a, fx.Node):
                return (type(a).__name__, repr(a))
            fake = example(a)
            if tensors_in(fake):
                inputs.append(a)
            return _map(signature_of, fake)

        signature = (
            node.op,
            node.target if node.op == "call_function" else str(node.target),
            _map(key, node.args),
            tuple(sorted(_map(key, node.kwargs).items())) if node.kwargs else (),
            self.autocast.get(node, ()),
        )
        template = self.templates.find(node, signature, lambda: self._record(node, inputs))
        return self._instantiate(template, inputs)

    def _record(self, node: fx.Node, inputs: list[fx.Node]) -> Any:
        arguments = fx.node.map_arg(node.args, example), fx.node.map_arg(node.kwargs, example)
        examples = [t for n in inputs for t in tensors_in(example(n))]
        # A call without tensors, such as torch.zeros, must not make a real one.
        mode = compat.fake_mode_of(examples or tensors_in(example(node)))
        if mode is None:
            raise NotImplementedError("a call is only ever run on fake values: a real one could draw random numbers")
        recorder = _Recorder()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for state in self.autocast.get(node, ()):
                device, dtype, enabled, _ = state
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
            stack.enter_context(mode)
            stack.enter_context(compat.no_new_guards(mode))
            stack.enter_context(recorder)
            result = run(node, *arguments)
        where = {id(t): _At(0, k) for k, t in enumerate(examples)}

        def place(t: Any) -> Any:
            if not isinstance(t, torch.Tensor) or (type(t) is torch.Tensor and t.dim() == 0):
                return t
            return where.get(id(t)) or _Like(t.shape, t.dtype)

        calls = []
        for k, (func, args, kwargs, out) in enumerate(recorder.calls, 1):
            results = tensors_in(out)
            likes = [_Like(t.shape, t.dtype) for t in results]
            calls.append((_functional(func), _map(place, args), _map(place, kwargs), likes))
            for i, t in enumerate(results):
                known = where.get(id(t))
                if known is not None and known.step == 0 and _functional(func) is not func:
                    raise RuntimeError(f"{func} writes an input of {node.name} in place")
                # Composite operations write their own intermediates in place: from here on the tensor is the new value.
                where[id(t)] = _At(k, i)
        return calls, _map(place, result)

    def _instantiate(self, template: Any, inputs: list[fx.Node]) -> Any:
        calls, result = template
        given = [self.of(n) for n in inputs]
        if None in given:
            return None  # a tuple of tensors of which nothing is known
        made = [[*values_in(given)]]

        def fill(t: Any) -> Any:
            if isinstance(t, _At):
                return made[t.step][t.out]
            if isinstance(t, torch.SymInt) and not (size := size_of(t, self.fixed)).symbols:
                return size.factor
            if isinstance(t, _Like):
                return self._like(t)
            if isinstance(t, torch.Tensor):  # a real tensor: the number of torch.tensor(number)
                value = self._like(t)
                value.set(aten.scalar_tensor.default, (t.item(),), {})
                return value
            return t

        for func, args, kwargs, likes in calls:
            filled = _map(fill, args), _map(fill, kwargs) if kwargs else kwargs
            row = []
            for i, t in enumerate(likes):
                value = self._like(t)
                value.set(func, *filled, out=i)
                row.append(value)
            made.append(row)
        return _map(fill, result)


_SHAPES = ("new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like")
"""Calls that read no element of their first argument."""
_LIKE = ("type_as", "view_as", "reshape_as", "expand_as", "to")
"""Calls that read no element of a second tensor, only its shape or dtype."""


def elements_read(node: fx.Node) -> list[fx.Node]:
    """Returns the inputs of a call whose elements it reads, without those whose shape or dtype it asks for."""
    name, given = name_of(node), node.all_input_nodes
    if name in _SHAPES:
        return []
    return given[:1] if name in _LIKE and node.args[:1] == (*given[:1],) else given


def _functional(func: Any) -> Any:
    """Returns the functional variant of an in-place ATen operator: ``add`` for ``add_``. Returns others unchanged."""
    packet, _, overload = func.__name__.partition(".")
    if not packet.endswith("_") or packet.endswith("__") or func.namespace != "aten":
        return func
    return getattr(getattr(aten, packet[:-1], None), overload, func)


def _signature(t: torch.Tensor) -> Any:
    # Symbolic sizes must not be hashed, because that could ask for their value.
    shape, stride = (tuple([s if type(s) is int else str(s) for s in sizes]) for sizes in (t.shape, t.stride()))
    return (type(t), shape, stride, t.dtype, t.device)


def tensors_in(out: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested tuples and lists, in order."""
    if isinstance(out, torch.Tensor):
        return [out]
    return [t for o in out for t in tensors_in(o)] if isinstance(out, (tuple, list)) else []


def fresh(t: torch.Tensor, grad: bool) -> torch.Tensor:
    """Returns a new tensor with the shape, strides, dtype and device of ``t``, in the current fake mode."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).requires_grad_(grad)


def run_fake(node: fx.Node, value: Callable[[fx.Node], Any] = example) -> Any:
    """Returns the result of ``node`` on the fake values of its inputs, which ``value`` returns. Adds no guards."""
    values, options = fx.node.map_arg((node.args, node.kwargs), value)
    mode = compat.fake_mode_of([e for a in node.all_input_nodes for e in tensors_in(value(a))])
    with torch.no_grad(), mode or contextlib.nullcontext(), compat.no_new_guards(mode):
        return run(node, values, options)
