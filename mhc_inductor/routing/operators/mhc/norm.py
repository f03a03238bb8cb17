# SPDX-License-Identifier: Apache-2.0
"""The norm of mHC's streams: the tensor that a formula is taken of, and the roundings of the model that it keeps."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Collection
from typing import NamedTuple

from torch import fx

from mhc_inductor.routing.graph.bounds import remembered
from mhc_inductor.routing.graph.expressions import Ref, Term, addends, chain, product, rounds, shown, whole, written
from mhc_inductor.routing.graph.gates import squared
from mhc_inductor.routing.graph.index import (
    ONE,
    DynamicWidth,
    Index,
    Size,
    Unsupported,
    Var,
    bound_of,
    const,
    product_of,
    reshape,
)
from mhc_inductor.routing.graph.values import Value, aten, elements_read


@dataclasses.dataclass(frozen=True)
class Norm:
    """``scale * rsqrt(mean(v * v) + eps)``, where v is the last ``width`` elements of ``x`` in memory order.

    With the form "outside" it is ``scale / (sqrt(mean(v * v)) + eps)``.
    """

    x: Value
    tokens: Index
    feature: Index
    width: int
    eps: float
    scale: float
    form: str = "inside"

    @property
    def key(self) -> tuple[Value, float, str]:
        """What two norms have in common if they are the same."""
        return self.x, self.eps, self.form

    @property
    def count(self) -> Size:
        """The number of tokens of x."""
        return product_of(self.x.shape).over(Size(self.width)) or Size(0)


def covers(flat: Index, bound: Collection[Var]) -> tuple[Index, Index, int] | None:
    """Returns (tokens, feature, width) such that ``flat = width * tokens + feature``.

    Returns None unless the feature takes every value below the width. Raises DynamicWidth.
    """
    feature = {a: c for a, c in flat.terms.items() if a is not None and Index({a: ONE}).variables() <= set(bound)}
    rest = {a: c for a, c in flat.terms.items() if a not in feature}
    expected = ONE
    for atom, c in sorted(feature.items(), key=lambda item: item[1].factor):
        if c != expected:
            return None
        expected = c.times(bound_of(atom))
    width = product_of(v.size for v in bound)
    if expected != width:
        return None
    if width.symbols:
        raise DynamicWidth(width)
    tokens = {}
    for atom, c in rest.items():
        per = c.over(width)
        if atom is None or per is None:
            return None
        tokens[atom] = per
    return Index(tokens), Index(feature), width.factor


def norm_of(factor: Ref, exponent: float) -> Norm | None:
    """Returns the norm that a factor of a product is, or None.

    It is ``mean(v * v) + eps`` to the power of -1/2, or ``sqrt(mean(v * v)) + eps`` to that of -1.
    """
    form = {-0.5: _inside, -1.0: _outside}.get(exponent)
    with contextlib.suppress(Unsupported):
        return form(factor) if form is not None else None
    return None


def _outside(divisor: Ref) -> Norm | None:
    """Returns the norm whose ``sqrt(mean(v * v)) + eps`` is ``divisor``, or None. Raises Unsupported."""
    eps, terms = addends(divisor)
    term = product(terms[0][1]) if len(terms) == 1 and terms[0][0] > 0 and eps > 0 else None
    if term is None or term.coef <= 0 or term.bound or [e for _, e in term.factors] != [0.5]:
        return None
    norm = _inside(term.factors[0][0])
    if norm is None or norm.eps != 0.0:
        return None
    # The divisor is (sqrt(mean(v * v)) + eps * scale) / scale.
    scale = norm.scale / (terms[0][0] * term.coef)
    return dataclasses.replace(norm, eps=eps * scale, scale=scale, form="outside")


def _inside(inner: Ref) -> Norm | None:
    """Returns the norm whose ``mean(v * v) + eps`` is ``inner``, or None. Raises Unsupported."""
    eps, terms = addends(inner)
    found = squared(terms[0][1]) if len(terms) == 1 and terms[0][0] > 0 and eps >= 0 else None
    best = _normed(found[0], inner, found[2]) if found is not None else None
    if found is None or best is None:
        return None
    x, tokens, feature, width = best
    total = found[1] * terms[0][0] * width
    return Norm(x, tokens, feature, width, eps / total, total**-0.5) if total > 0 else None


def _normed(v: Ref, inner: Ref, bound: Collection[Var]) -> tuple[Value, Index, Index, int] | None:
    """Returns (x, tokens, feature, width) of the tensor that ``v`` is an element of, or None.

    Prefers the innermost tensor that has exactly these tokens. Skips values inside a composite operation, such as the
    product of a linear layer: the op cannot read them.
    """
    best, fits = None, False
    elements = product_of((*inner.value.shape, *(b.size for b in bound)))
    # shown() looks behind casts that autocast inserted inside the norm: no graph node produced them.
    for ref in shown(v):
        covered = covers(ref.flat, bound)
        fit = covered is not None and covered[0] == inner.flat and product_of(ref.value.shape) == elements
        if covered is not None and ref.value.node is not None and (fit or not fits):
            best, fits = (ref.value, *covered), fit
    return best


def sources(x: Value) -> dict[Value, tuple[int, ...]]:
    """Returns the tensors that ``x`` is a permuted view of, each with the dims of x that its own dims are."""
    found: dict[Value, tuple[int, ...]] = {}
    out = whole(x).index
    for ref in shown(whole(x)):
        free, dims = list(range(len(out))), list[int]()
        for i in ref.index:
            # Dims of size 1 have equal indices: take the first free one.
            dims += [d for d in free if out[d] == i][:1]
            free = [d for d in free if d not in dims]
        # Compare shapes too: a slice of one row has the same indices as the whole tensor.
        if len(dims) != len(out) or ref.value.shape != tuple(x.shape[d] for d in dims):
            break
        found[ref.value] = tuple(dims)
        if rounds(ref.value):
            break
    return found


def root_of(x: Value) -> tuple[Value, tuple[int, ...]]:
    """Returns the graph tensor that ``x`` is a permuted view of, and the dim of that tensor for each dim of x."""
    found = {value: dims for value, dims in sources(x).items() if value.node is not None}
    root = next(reversed(found), x)
    dims = found.get(root, tuple(range(len(x.shape))))
    return root, tuple(map(dims.index, range(len(dims))))


def made_of(node: fx.Node, sources: Collection[fx.Node], most: int = sys.maxsize) -> bool:
    """Checks whether the result of ``node`` depends on elements of ``sources``, as far as the ``most`` nearest nodes show."""
    todo, seen, first = [node], {node}, min(sources)
    for at in todo:  # grows
        if at in sources:
            return True
        new = [parent for parent in elements_read(at) if parent not in seen and not parent < first]
        seen.update(new)
        todo += new[: most - len(todo)]
    return False


class Parts(NamedTuple):
    """The tensors of one shape that ``stack`` or ``cat`` puts together to x. In memory order, x is [count, parts, size].

    ``places`` has what they are views of, too; no place for a tensor with another dtype than x's.
    """

    places: dict[Value, tuple[int, ...]]
    roots: tuple[Value, ...] = ()
    sizes: tuple[Size, ...] = ()


_JOINS = (aten.stack.default, aten.cat.default)


def parts_of(x: Value) -> Parts:
    """Returns the parts of ``x``; none where it is not put together of any."""
    found: Parts = remembered(x.memo, parts_of, lambda: _parts_of(x))
    return found


def _parts_of(x: Value) -> Parts:
    last = shown(whole(x))[-1]
    pieces, *rest = last.value.args if last.value.func in _JOINS else ((),)
    same_elements = last.flat == whole(x).flat and product_of(last.value.shape) == product_of(x.shape)
    if len({p.shape for p in pieces}) != 1 or not same_elements:
        return Parts({})
    places, roots = dict[Value, tuple[int, ...]](), list[Value]()
    for at, piece in enumerate(pieces):
        refs = [r for r in shown(whole(piece)) if r.flat == whole(piece).flat and r.value.node is not None]
        same = [r.value for r in refs if product_of(r.value.shape) == product_of(piece.shape)]
        if not same:
            return Parts({})
        places |= {v: (*places.get(v, ()), *[at] * (piece.dtype == last.value.dtype)) for v in same}
        roots += same[-1:]
    shape, dim = pieces[0].shape, (rest[0] if rest else 0) % len(last.value.shape)
    return Parts(places, tuple(roots), (product_of(shape[:dim]), Size(len(pieces)), product_of(shape[dim:])))


class Kept:
    """The values at which the analysis of a formula of ``x`` stops: x, its sources, ``others``, and rounded inputs.

    A cast that the model wrote on x, on a weight, or on anything else that does not depend on x is kept. Casts of
    intermediate values, and those that autocast inserts, are not kept: without them the op is closer to exact.
    """

    def __init__(self, x: Value, *others: Collection[Value]) -> None:
        self.x = x
        self.views = sources(x)
        self.parts = parts_of(x)
        self._others = frozenset(value for each in others for value in each)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and (self.x, self._others) == (other.x, other._others)

    def __hash__(self) -> int:
        return hash((self.x, self._others))

    def __contains__(self, value: object) -> bool:
        if value in self.views or value in self.parts.places or value in self._others:
            return True
        if not isinstance(value, Value) or value.node is None or not written(value):
            return isinstance(value, Value) and self._again(value)
        of_x = self.x.node is None or made_of(value.node, {self.x.node})
        return not of_x or any(ref.value in self.views for ref in chain(whole(value)))

    def _again(self, value: Value) -> bool:
        """Checks whether ``value`` is x's parts, put together once more."""
        mine = self.parts
        return bool(mine.roots) and value.func in _JOINS and parts_of(value)[1:] == mine[1:]

    def product(self, ref: Ref) -> Term:
        """Returns ``ref`` as a product, in which elements of x's sources and parts are written as elements of x."""
        term = product(ref, self)
        term.factors = [(self.seen(f), e) for f, e in term.factors]
        return term

    def seen(self, ref: Ref, at: int | None = None) -> Ref:
        """Returns an element of x's :func:`sources` or parts as that of x; any other ``ref`` unchanged.

        A tensor that is several parts is the one ``at`` that place.
        """
        places = self.parts.places.get(ref.value, ())
        place = places[0] if len(places) == 1 else at
        if place is not None and place in places:
            token, low = reshape(ref.index, ref.value.shape, self.parts.sizes[::2])
            return Ref(self.x, reshape((token, const(place), low), self.parts.sizes, self.x.shape))
        if self._again(ref.value):
            return Ref(self.x, reshape(ref.index, ref.value.shape, self.x.shape))
        if ref.value is self.x or ref.value not in self.views:
            return ref
        index = list(ref.index)
        for i, dim in zip(ref.index, self.views[ref.value], strict=True):
            index[dim] = i
        return Ref(self.x, tuple(index))
