# SPDX-License-Identifier: Apache-2.0
"""Elements of the graph's values as numbers: what analytic operations make of random data, in fp64 on the CPU.

Analytic functions that agree at random points are equal, however they are written. Anything but an analytic operation,
such as a clamp, a comparison or random numbers, is data of its own here: what depends on it is equal to no formula.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mhc_inductor.routing.graph.bounds import DEPTH, LIMIT
from mhc_inductor.routing.graph.expressions import Ref, aten, broadcast, contraction, number, peel, reduction
from mhc_inductor.routing.graph.index import DynamicWidth, Size, Unsupported, Var, var
from mhc_inductor.routing.graph.linear import placed
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.operators.e79.terms import Frame, Leaf

_ANALYTIC = {
    *(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar),
    *(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.reciprocal.default),
    *(aten.pow.Tensor_Scalar, aten.sqrt.default, aten.rsqrt.default, aten.exp.default, aten.log.default),
    *(aten.sigmoid.default, aten.special_expit.default, aten.silu.default, aten.tanh.default),
}
SCALES = (1.0, 1.0, 1e-6, 1e-6)
"""The size of the data of each token: next to small data, a constant such as an epsilon shows."""
_MOST = 1 << 20
"""The most numbers of one element."""


class Array(NamedTuple):
    """The numbers of an element: a token for each of :data:`SCALES`, then a dimension for each variable of ``over``."""

    data: Tensor
    over: tuple[Var, ...]


class Data:
    """The random numbers of one graph: the same wherever the same elements are read."""

    def __init__(self) -> None:
        self._generator = torch.Generator(device="cpu").manual_seed(0)
        self._of: dict[Ref, Tensor] = {}
        self._names: dict[tuple[Size, int], Var] = {}

    def at(self, ref: Ref, over: Sequence[Var]) -> Tensor:
        """Returns the numbers of an element, whatever its variables are called."""
        for d, v in enumerate(over):
            ref = placed(ref, v, var(self._names.setdefault((v.size, d), Var(v.size))))
        if ref not in self._of:
            shape = [len(SCALES), *(v.size.factor for v in over)]
            made = torch.randn(shape, generator=self._generator, dtype=torch.float64, device="cpu")
            self._of[ref] = made * torch.tensor(SCALES, dtype=torch.float64, device="cpu").view(-1, *[1] * len(over))
        return self._of[ref]


class Elements:
    """Evaluates elements. The position in the sequences is the same in all of them, so it needs no dimension.

    Args:
        frame: the variables of the sequences, and the size of vectors.
        given: matrices that are data, whatever the graph computes them from.
        near: the values that are computed; all others are data.
        data: the numbers of what is data.
    """

    def __init__(self, frame: Frame, given: Mapping[Value, Tensor], near: Collection[Value], data: Data) -> None:
        self.frame, self.given, self.near, self.data = frame, given, near, data
        self.vectors: dict[Ref, tuple[Leaf, Tensor]] = {}
        """The vectors that were met, each once up to views and casts, the first first."""
        self.dynamic: Size | None = None
        """The size of a sum that could not be computed, because it is dynamic."""
        self._known: dict[Ref, Array] = {}
        self._depth = 0

    def of(self, ref: Ref) -> Array:
        """Returns the numbers of an element."""
        found = self._known.get(ref)
        if found is None:
            inner = peel(ref, self.given)
            self._depth += 1
            found = self._matrix(inner) or self.computed(inner) or self._random(inner)
            self._depth -= 1
            self._known[ref] = found
            if len(found.over) == 1 and found.over[0].size == Size(self.frame.n):
                leaf = Leaf(self.frame.along(ref, found.over[0]))
                self.vectors.setdefault(leaf.key, (leaf, found.data))
        return found

    def _matrix(self, ref: Ref) -> Array | None:
        """Returns an element of a given matrix, None for any other."""
        over = tuple(v for i in ref.index[-2:] for v in i.variables())
        if ref.value not in self.given or ref.index != tuple(map(var, (*self.frame.lead, *over))) or len(over) != 2:
            return None
        return Array(self.given[ref.value], over)

    def computed(self, ref: Ref) -> Array | None:
        """Returns the numbers of an element from those of its operands, or None where it is data."""
        if ref.value not in self.near or self._depth > DEPTH or len(self._known) > LIMIT:
            return None
        try:
            found = self._computed(ref)
        except DynamicWidth as dynamic:
            self.dynamic, found = dynamic.size, None
        except Unsupported:
            found = None
        return found if found is not None and bool(found.data.isfinite().all()) else None

    def _computed(self, ref: Ref) -> Array | None:
        value = ref.value
        if (constant := number(value)) is not None:
            return Array(torch.full((len(SCALES),), constant, dtype=torch.float64, device="cpu"), ())
        if (contracted := contraction(ref)) is not None:
            left, right, bound = contracted
            sides = [self.of(left), self.of(right)]
            # A projection of the model's stays data: only sums over a state or a vector are E79's.
            for side, a in zip((left, right), sides, strict=True):
                if bound in a.over and len(a.over) > 1 and peel(side, self.given).value not in self.given:
                    return None
            over, data = _aligned(sides)
            return _summed(Array(data[0] * data[1], over), [bound], 1.0)
        if (reduced := reduction(ref)) is not None:
            summand, variables, scale = reduced
            return _summed(self.of(summand), variables, scale)
        if value.func not in _ANALYTIC:
            return None
        refs = {k: broadcast(a, ref.index) for k, a in enumerate(value.args) if isinstance(a, Value)}
        over, data = _aligned([self.of(r) for r in refs.values()])
        given = dict(zip(refs, data, strict=True))
        args = [given[k] if k in given else number(a) for k, a in enumerate(value.args)]
        return Array(value.func(*args, **{k: number(a) for k, a in value.kwargs.items()}), over)

    def _random(self, ref: Ref) -> Array:
        """Returns an element as data. Raises Unsupported and DynamicWidth if that would be too much."""
        every = dict.fromkeys(v for i in ref.index for v in i.variables())
        over = tuple(v for v in every if v not in self.frame.lead)
        _check(over)
        return Array(self.data.at(ref, over), over)


def _summed(made: Array, bound: Sequence[Var], scale: float) -> Array:
    _check(bound)
    total, over = made.data * scale, made.over
    for v in bound:
        total = total.sum(1 + over.index(v)) if v in over else total * v.size.factor
        over = tuple(other for other in over if other is not v)
    return Array(total, over)


def _check(over: Sequence[Var]) -> None:
    """Raises DynamicWidth for a variable of a dynamic size, and Unsupported for too many numbers."""
    for v in over:
        if v.size.symbols:
            raise DynamicWidth(v.size)
    if math.prod(v.size.factor for v in over) > _MOST:
        raise Unsupported


def _aligned(arrays: Sequence[Array]) -> tuple[tuple[Var, ...], list[Tensor]]:
    """Returns the variables of all arrays, and the arrays with a dimension for each of them."""
    over = tuple(dict.fromkeys(v for a in arrays for v in a.over))
    _check(over)
    order = [[a.over.index(v) + 1 for v in over if v in a.over] for a in arrays]
    missing = [(slice(None), *(slice(None) if v in a.over else None for v in over)) for a in arrays]
    every = zip(arrays, order, missing, strict=True)
    return over, [a.data.permute(0, *dims)[pick] for a, dims, pick in every]
