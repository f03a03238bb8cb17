"""A copy of a graph without in-place operations, for analysis: masks are often written into, ``mask |= ...``."""

from __future__ import annotations

import collections
import operator
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.edit import run_fake, written_by
from mhc_inductor.routing.graph.values import example, tensors_in

_OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
}


def put(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """``x`` after ``x[index] = value``: by index tensors, or a number at places that positions say."""
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [i for i in index if not isinstance(i, torch.Tensor)]:
        gap = next(k for k, i in enumerate(index) if i is Ellipsis)
        index = (*index[:gap], *[slice(None)] * (x.dim() - len(index) + 1), *index[gap + 1 :])
    if any(isinstance(i, torch.Tensor) for i in index):
        if all(isinstance(i, torch.Tensor) or i == slice(None) for i in index):
            value = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
            places = [i if isinstance(i, torch.Tensor) else None for i in index]
            return torch.ops.aten.index_put.default(x, places, value)
        raise NotImplementedError
    if isinstance(value, torch.Tensor):
        raise NotImplementedError
    within = torch.ones((), dtype=torch.bool, device=x.device)
    for d, i in enumerate(index):
        if isinstance(i, slice) and i == slice(None):
            continue
        at = torch.arange(x.shape[d], device=x.device).view(-1, *[1] * (x.dim() - d - 1))
        if isinstance(i, int) and i >= 0:
            within = within & (at == i)
        elif isinstance(i, slice) and i.step is None and (i.start or 0) >= 0 and (i.stop is None or i.stop >= 0):
            within = within & (at >= (i.start or 0)) if i.start else within
            within = within & (at < i.stop) if i.stop is not None else within
        else:
            raise NotImplementedError
    return torch.where(within, value, x)


def _plain(node: fx.Node) -> tuple[str, Any] | None:
    """(op, target) of what computes the result of an in-place ``node``."""
    if node.op == "call_function":
        if node.target in _OPERATORS:
            return "call_function", _OPERATORS[node.target]
        if node.target is operator.setitem:
            return "call_function", put
        return None
    name = str(node.target)
    if name == "fill_":
        return "call_function", torch.full_like
    if name == "zero_":
        return "call_function", torch.zeros_like
    return ("call_method", name[:-1]) if hasattr(torch.Tensor, name[:-1]) and not name.endswith("__") else None


def functional(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node], dict[fx.Node, int]]:
    """A copy of ``graph`` in which in-place operations on the graph's own tensors make new ones.

    With the nodes that hold what the copy's nodes hold, and the positions from which on they do.
    An in-place operation stays where a view of the tensor from before is used after it.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    held: dict[int, list[fx.Node]] = collections.defaultdict(list)
    for node in graph.nodes:
        for t in tensors_in(example(node)):
            held[compat.storage_key(t)].append(node)
    last = {node: max((order[u] for u in node.users), default=-1) for node in graph.nodes}
    copy = fx.Graph()
    now: dict[fx.Node, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    origin: dict[fx.Node, fx.Node] = {}
    since: dict[fx.Node, int] = {}
    for node in graph.nodes:
        made = None
        written = written_by(node)
        if len(written) == 1 and (plain := _plain(node)) is not None:
            before = written[0]
            root = same.get(before, before)
            fake = example(before)
            shared = held[compat.storage_key(fake)] if isinstance(fake, torch.Tensor) else []
            family = [n for n in shared if same.get(n, n) is root]
            others = [n for n in shared if n not in family and order[n] < order[node] and last[n] > order[node]]
            own = root.op in ("call_function", "call_method") and not others and _owns(root)
            if own:
                made = _made(copy, node, plain, now, fake)
        if made is not None:
            for n in family:
                now[n] = made
            now[node] = made
            same[node] = root
            origin[made] = root if node.target is operator.setitem else node
            since[made] = order[node]
            continue
        new = copy.node_copy(node, lambda n: now[n])
        now[node] = new
        origin[new] = node
        since[new] = order[node]
    return copy, origin, since


def _owns(root: fx.Node) -> bool:
    """Whether a node's result is a tensor of its own, no view of another."""
    fake = example(root)
    if not isinstance(fake, torch.Tensor):
        return False
    key = compat.storage_key(fake)
    return all(compat.storage_key(t) != key for a in root.all_input_nodes for t in tensors_in(example(a)))


def _made(copy: fx.Graph, node: fx.Node, plain: tuple[str, Any], now: dict[fx.Node, fx.Node], fake: Any) -> Any:
    op, target = plain
    args: Any = fx.node.map_arg(node.args, lambda n: now[n])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: now[n])
    if target is torch.zeros_like:
        args = args[:1]
    new = copy.create_node(op, target, args, kwargs)
    try:
        result = run_fake(new)
    except Exception:  # whatever cannot be computed so stays in place
        copy.erase_node(new)
        return None
    alike = isinstance(result, torch.Tensor) and result.dtype == fake.dtype and result.dim() == fake.dim()
    if not alike or not all(map(compat.same_size, result.shape, fake.shape)):
        copy.erase_node(new)
        return None
    new.meta = dict(node.meta)
    new.meta["example_value"] = result
    return new
