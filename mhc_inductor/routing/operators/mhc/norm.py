# SPDX-License-Identifier: Apache-2.0
"""The norm of mHC's streams: the tensor that a formula is taken of, and the roundings of the model that it keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from torch import fx

from mhc_inductor.routing.graph.expressions import (
    Ref,
    Term,
    addends,
    aten,
    chain,
    number,
    operands,
    peel,
    product,
    rounds,
    shown,
    whole,
    written,
)
from mhc_inductor.routing.graph.gates import squared
from mhc_inductor.routing.graph.index import ONE, DynamicWidth, Index, Size, Unsupported, Var, bound_of, product_of
from mhc_inductor.routing.graph.values import Value, elements_read


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


def bound_below(ref: Ref) -> tuple[Ref, float] | None:
    """Returns (element, bound) of a clamp or a maximum that bounds an element from below, or None."""
    args, func = ref.value.args, ref.value.func
    if func in (aten.clamp_min.default, aten.clamp.default):
        low = number(args[1]) if len(args) > 1 else number(ref.value.kwargs.get("min"))
        if low is not None and len(args) <= 2 and ref.value.kwargs.get("max") is None:
            return peel(Ref(args[0], ref.index)), low
    elif func is aten.maximum.default:
        a, b = operands(ref)
        a, b = (b, a) if isinstance(a, float) else (a, b)
        if isinstance(a, Ref) and isinstance(b, float):
            return peel(a), b
    return None


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
    return form(factor) if form is not None else None


def _outside(divisor: Ref) -> Norm | None:
    """Returns the norm whose ``sqrt(mean(v * v)) + eps`` is ``divisor``, or None."""
    try:
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
    except Unsupported:
        return None


def _inside(inner: Ref) -> Norm | None:
    """Returns the norm whose ``mean(v * v) + eps`` is ``inner``, or None."""
    try:
        eps, terms = addends(inner)
        if len(terms) != 1 or terms[0][0] <= 0 or eps < 0:
            return None
        found = squared(terms[0][1])
        best = _normed(found[0], inner, found[2]) if found is not None else None
        if found is None or best is None:
            return None
        x, tokens, feature, width = best
        total = found[1] * terms[0][0] * width
        return Norm(x, tokens, feature, width, eps / total, total**-0.5) if total > 0 else None
    except Unsupported:
        return None


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


def seen_in(ref: Ref, x: Value, views: Mapping[Value, tuple[int, ...]]) -> Ref:
    """Returns an element of one of x's :func:`sources` as the element of x; any other ``ref`` unchanged."""
    if ref.value is x or ref.value not in views:
        return ref
    index = list(ref.index)
    for at, dim in zip(ref.index, views[ref.value], strict=True):
        index[dim] = at
    return Ref(x, tuple(index))


class Kept:
    """The values at which the analysis of a formula of ``x`` stops: x, its sources, ``others``, and rounded inputs.

    A cast that the model wrote on x, on a weight, or on anything else that does not depend on x is kept. Casts of
    intermediate values, and those that autocast inserts, are not kept: without them the op is closer to exact.
    """

    def __init__(self, x: Value, *others: Collection[Value]) -> None:
        self.x = x
        self.views = sources(x)
        self._others = frozenset(value for each in others for value in each)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and (self.x, self._others) == (other.x, other._others)

    def __hash__(self) -> int:
        return hash((self.x, self._others))

    def __contains__(self, value: object) -> bool:
        if value in self.views or value in self._others:
            return True
        if not isinstance(value, Value) or value.node is None or not written(value):
            return False
        return not self._made_of_x(value.node) or any(ref.value in self.views for ref in chain(whole(value)))

    def _made_of_x(self, node: fx.Node) -> bool:
        """Checks whether the result of ``node`` depends on elements of x."""
        if self.x.node is None or node is self.x.node:
            return True
        todo, seen = [node], {node}
        while todo:
            for parent in elements_read(todo.pop()):
                if parent is self.x.node:
                    return True
                if parent not in seen and self.x.node < parent:
                    seen.add(parent)
                    todo.append(parent)
        return False

    def product(self, ref: Ref) -> Term:
        """Returns ``ref`` as a product, in which elements of x's sources are written as elements of x."""
        term = product(ref, self)
        term.factors = [(seen_in(f, self.x, self.views), e) for f, e in term.factors]
        return term
