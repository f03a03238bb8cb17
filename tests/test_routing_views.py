# SPDX-License-Identifier: Apache-2.0
"""Every view maps elements as PyTorch does: a wrong map gives wrong numbers.

Each case is a call with random legal arguments on a node like those of a real graph. The rule's map of every element is
compared with the call itself, run on a tensor of the element numbers.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mhc_inductor.routing.graph.expressions import VIEWS, Ref, aten, chain, step, whole
from mhc_inductor.routing.graph.index import Index, Part, Var, const
from mhc_inductor.routing.graph.known_calls import KnownCalls
from mhc_inductor.routing.graph.values import Value, Values

CASES = 60
Call = tuple[Callable[..., Any], list[Tensor], tuple[Any, ...]]
"""A function, its tensors, and its other arguments; cat and stack take the tensors as a list."""


def numbered(shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns tensors whose elements are numbered consecutively."""
    made, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        made.append(torch.arange(start, start + size, dtype=torch.float64).view(list(shape)))
        start += size
    return made


def shape_of(rng: random.Random, least: int = 0, most: int = 4) -> list[int]:
    return [rng.choice([1, 2, 3, 4, 6, rng.choice([0, 1, 5])]) for _ in range(rng.randint(least, most))]


def dim_of(rng: random.Random, rank: int) -> int:
    return rng.randrange(-rank, rank)


def resized(rng: random.Random, size: int) -> list[int]:
    """Returns a random shape with ``size`` elements."""
    if size == 0:
        return [0, *shape_of(rng, 0, 2)]
    shape, left = [], size
    while left > 1:
        by = rng.choice([d for d in range(2, left + 1) if left % d == 0])
        shape.append(by)
        left //= by
    for _ in range(rng.randint(0, 2)):
        shape.insert(rng.randint(0, len(shape)), 1)
    rng.shuffle(shape)
    if shape and rng.random() < 0.3:
        shape[rng.randrange(len(shape))] = -1
    return shape


def one(rng: random.Random, *sizes: int, least: int = 0) -> Tensor:
    """Returns a tensor of a random shape; of no dimension smaller than ``least``."""
    return numbered([[max(least, s) for s in shape_of(rng, *sizes)]])[0]


def squeeze(rng: random.Random) -> Call:
    x = one(rng, 1)
    dims = rng.sample(range(x.dim()), rng.randint(1, x.dim()))
    return torch.squeeze, [x], rng.choice([(), (dim_of(rng, x.dim()),), (dims,)])


def expand(rng: random.Random) -> Call:
    x = one(rng)
    kept = [rng.choice([-1, s]) if s != 1 else rng.choice([1, -1, 3, 0]) for s in x.shape]
    return Tensor.expand, [x], ([*shape_of(rng, 0, 2), *kept],)


def reshape(rng: random.Random) -> Call:
    x = one(rng)
    shape = resized(rng, x.numel())
    return rng.choice([torch.reshape, Tensor.view, Tensor.reshape, aten._unsafe_view.default]), [x], (shape,)


def permute(rng: random.Random) -> Call:
    x = one(rng)
    order = rng.sample(range(x.dim()), x.dim())
    return torch.permute, [x], ([d - rng.choice([0, x.dim()]) for d in order],)


def select(rng: random.Random) -> Call:
    x = one(rng, 1, least=1)
    d = dim_of(rng, x.dim())
    return torch.select, [x], (d, rng.randrange(-x.shape[d], x.shape[d]))


def cut(rng: random.Random) -> Call:
    x, ends = one(rng, 1), [None, *range(-8, 9), 2**62, -(2**62)]
    given = dim_of(rng, x.dim()), rng.choice(ends), rng.choice(ends), rng.choice([1, 1, 1, 2, 3])
    return aten.slice.Tensor, [x], given


def narrow(rng: random.Random) -> Call:
    x = one(rng, 1)
    d = dim_of(rng, x.dim())
    start = rng.randint(0, x.shape[d])
    return torch.narrow, [x], (d, start, rng.randint(0, x.shape[d] - start))


def index(rng: random.Random) -> Call:
    """Returns ``x[...]`` with slices, integers, None and an ellipsis, as people write it."""
    x = one(rng, 1, least=1)
    parts: list[Any] = []
    for size in x.shape[: rng.randint(1, x.dim())]:
        ends = [None, *range(-size - 2, size + 3)]
        whole_ = slice(rng.choice(ends), rng.choice(ends), rng.choice([None, 1, 2]))
        parts.append(rng.choice([whole_, whole_, rng.randrange(-size, size), slice(None)]))
    if rng.random() < 0.3:
        parts.insert(rng.randint(0, len(parts)), None)
    if rng.random() < 0.3:
        parts.append(Ellipsis)
    return Tensor.__getitem__, [x], (tuple(parts),)


def split(rng: random.Random) -> Call:
    x = one(rng, 1)
    d = dim_of(rng, x.dim())
    sizes = []
    while sum(sizes) < x.shape[d]:
        sizes.append(rng.randint(0, x.shape[d] - sum(sizes)))
    each = rng.randint(1, 4) if sizes else [0]  # PyTorch 2.11 cannot split an empty fake tensor into equal parts
    fn, given = rng.choice([(torch.split, each), (torch.split, sizes or [0]), (torch.chunk, rng.randint(1, 5))])
    return fn, [x], (given, d)


def cat(rng: random.Random) -> Call:
    shape = shape_of(rng, 1)
    d = dim_of(rng, len(shape))
    shapes = [[rng.choice([0, 1, 2, 3]) if k == d % len(shape) else s for k, s in enumerate(shape)] for _ in range(3)]
    pieces = numbered(shapes)
    for _ in range(rng.choice([0, 0, 1, 2])):  # the empty tensors that caches start from
        pieces.insert(rng.randint(0, len(pieces)), torch.zeros(0, dtype=torch.float64))
    return torch.cat, pieces, (d,)


def restack(rng: random.Random) -> Call:
    """Returns a call that stacks slices of one tensor."""
    x = one(rng, 2, least=1)
    d = dim_of(rng, x.dim())
    at = [rng.randrange(x.shape[d]) for _ in range(rng.randint(1, 3))] if rng.random() < 0.5 else [*range(x.shape[d])]
    to = rng.randint(-x.dim(), x.dim() - 1)
    return lambda x: torch.stack([x.select(d, i) for i in at], to), [x], ()


def repeat(rng: random.Random) -> Call:
    x = one(rng)
    times = [rng.randint(0 if rng.random() < 0.1 else 1, 3) for _ in range(x.dim() + rng.randint(0, 2))]
    return Tensor.repeat, [x], (times,)


def composite(rng: random.Random) -> Call:
    """Returns a call that PyTorch decomposes into the views above."""
    x = one(rng, 3, least=1)
    a, b = sorted(rng.sample(range(x.dim()), 2))
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (torch.flatten, (a, b)),
        (torch.movedim, (a, b)),
        (torch.swapaxes, (a, b)),
        (torch.broadcast_to, ([2, *x.shape],)),
        (Tensor.unflatten, (a, [1, -1])),
        (torch.tile, ([2] * x.dim(),)),
        (torch.atleast_3d, ()),
        (torch.ravel, ()),
        (torch.adjoint, ()),
        (torch.hstack, ()),
        (torch.repeat_interleave, (2, a)),
        (torch.diagonal, (0, a, b)),
        (torch.flip, ([a],)),
        (torch.roll, (1, a)),
        (Tensor.unfold, (a, 1, 1)),
    ]
    fn, rest = rng.choice(calls)
    if fn is torch.hstack:
        return fn, [x, x + x.numel()], ()
    return fn, [x], rest


def several(rng: random.Random) -> Call:
    """Returns a chain of views."""
    steps = [rng.choice(["reshape", "permute", "cut", "unsqueeze", "transpose", "expand", "repeat"]) for _ in range(4)]
    seeds = [rng.random() for _ in steps]
    (x,) = numbered([[rng.choice([1, 2, 3, 4, 6]) for _ in range(3)]])

    def fn(t: Tensor) -> Tensor:
        for make, seed in zip(steps, seeds, strict=True):
            t = _with(t, make, random.Random(seed))
        return t

    return fn, [x], ()


def _with(t: Tensor, kind: str, rng: random.Random) -> Tensor:
    """Returns ``t`` after a call like those of a kind, with arguments for its own shape."""
    rank = t.dim()
    if kind == "reshape":
        return t.reshape(resized(rng, t.numel()))
    if kind == "permute":
        return t.permute(rng.sample(range(rank), rank))
    if kind == "cut" and rank:
        d = rng.randrange(rank)
        return torch.narrow(t, d, k := rng.randint(0, t.shape[d] // 2), t.shape[d] - k)
    if kind == "unsqueeze":
        return t.unsqueeze(rng.randint(0, rank))
    if kind == "transpose" and rank:
        return t.transpose(rng.randrange(rank), rng.randrange(rank))
    if kind == "expand":
        return t.expand(rng.randint(1, 2), *t.shape)
    return t.repeat([rng.randint(1, 2) for _ in t.shape]) if t.numel() < 200 else t


CALLS: dict[str, Callable[[random.Random], Call]] = {
    **{f.__name__: f for f in (reshape, squeeze, expand, permute, select, cut, narrow, index, split, cat, restack)},
    **{f.__name__: f for f in (repeat, composite, several)},
    "unsqueeze": lambda rng: (torch.unsqueeze, [x := one(rng)], (rng.randint(-x.dim() - 1, x.dim()),)),
    "transpose": lambda rng: (torch.transpose, [x := one(rng, 1)], (dim_of(rng, x.dim()), dim_of(rng, x.dim()))),
    "turn": lambda rng: (torch.t, [one(rng, 0, 2)], ()),
    "reverse": lambda rng: (aten.numpy_T.default, [one(rng)], ()),
    "unbind": lambda rng: (torch.unbind, [x := one(rng, 1, least=1)], (dim_of(rng, x.dim()),)),
    "stack": lambda rng: (
        torch.stack,
        numbered([shape := shape_of(rng)] * rng.randint(1, 3)),
        (rng.randint(-len(shape) - 1, len(shape)),),
    ),
    "same": lambda rng: (
        *(lambda x: (rng.choice([torch.clone, Tensor.contiguous, aten.alias.default, aten.lift_fresh.default]), [x]))(
            one(rng)
        ),
        (),
    ),
}


# --- the map of a rule, element by element ------------------------------------------------------------------


def at(index: Index, point: dict[Var, int]) -> int:
    """Evaluates ``index`` at ``point``."""

    def atom(a: Any) -> int:
        if isinstance(a, Part):
            whole_ = atom(a.of)
            return whole_ % a.by.factor if a.mod else whole_ // a.by.factor
        return 1 if a is None else point[a]

    assert all(not c.symbols for c in index.terms.values())
    return sum(c.factor * atom(a) for a, c in index.terms.items())


def followed(value: Value, result: Tensor, inputs: dict[Value, Tensor]) -> int:
    """Returns how many elements of ``value`` the rules follow to an input.

    Asserts that each input element holds ``result``'s number.
    """
    count = 0
    shape = [s.factor for s in value.shape]
    assert shape == [*result.shape]
    for place in itertools.product(*map(range, shape)):
        # With an index of variables, and with one of numbers.
        for ref in (whole(value), _fixed(value, place)):
            point = {v: k for i, k in zip(ref.index, place, strict=True) for v in i.variables()}
            for inner in chain(ref):
                spot = [at(i, point) for i in inner.index]
                sizes = [s.factor for s in inner.value.shape]
                assert all(0 <= k < s for k, s in zip(spot, sizes, strict=True)), (place, spot, sizes)
                if inner.value in inputs:
                    assert float(inputs[inner.value][tuple(spot)]) == float(result[place]), (place, spot)
                    count += 1
    return count


def _fixed(value: Value, place: Sequence[int]) -> Ref:
    return Ref(value, tuple(map(const, place)))


def values_of(
    fn: Callable[..., Any], given: list[Tensor], rest: tuple[Any, ...]
) -> tuple[list[Value], dict[Value, Tensor]]:
    """Returns the values of a call in a graph of fake tensors, and its inputs' values."""
    graph = fx.Graph()
    with FakeTensorMode() as mode:
        nodes = [graph.placeholder(f"x{k}") for k in range(len(given))]
        for node, t in zip(nodes, given, strict=True):
            node.meta["example_value"] = mode.from_tensor(t)
        listed = fn in (torch.cat, torch.stack, torch.hstack)
        out = graph.call_function(fn, ([*nodes], *rest) if listed else (*nodes, *rest))
        fakes = [n.meta["example_value"] for n in nodes]
        out.meta["example_value"] = fn(fakes, *rest) if listed else fn(*fakes, *rest)
    values = Values(graph, {}, KnownCalls("template"), lambda node: False)
    made = values.of(out)
    return list(made) if isinstance(made, tuple) else [made], {
        values.of(n): t for n, t in zip(nodes, given, strict=True)
    }


@pytest.mark.parametrize("name", CALLS)
def test_a_view_is_the_map_that_pytorch_says(name: str) -> None:
    rng, count, elements = random.Random(name), 0, 0
    for _ in range(CASES):
        fn, given, rest = CALLS[name](rng)
        listed = fn in (torch.cat, torch.stack, torch.hstack)
        out = fn(given, *rest) if listed else fn(*given, *rest)
        results = list(out) if isinstance(out, (tuple, list)) else [out]
        values, inputs = values_of(fn, given, rest)
        assert len(values) == len(results)
        for value, result in zip(values, results, strict=True):
            if result.numel() <= 400:
                elements += 2 * result.numel()
                count += followed(value, result, inputs)
    # Elements that no rule follows are skipped, so require that most are followed.
    assert count > 0.4 * elements, (count, elements)


def test_every_rule_is_tried() -> None:
    tried: set[Any] = set()
    for name, make in CALLS.items():
        rng = random.Random(name)
        for _ in range(CASES):
            fn, given, rest = make(rng)
            for value in values_of(fn, given, rest)[0]:
                ref: Ref | None = whole(value)
                while ref is not None:
                    tried.add(ref.value.func)
                    ref = step(ref)
    # PyTorch decomposes these calls; the rules remain for exported programs.
    composite_ = {op.default for op in (aten.reshape, aten.contiguous, aten.numpy_T, aten.squeeze)} | {aten.squeeze.dim}
    assert set(VIEWS) - tried <= composite_
