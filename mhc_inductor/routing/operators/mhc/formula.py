# SPDX-License-Identifier: Apache-2.0
"""The parts of the mHC formula (arXiv 2512.24880) in normal form, however the model spells them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Container
from typing import NamedTuple

import torch

from mhc_inductor.ops.checks import MAX_STREAMS
from mhc_inductor.routing.graph.bounds import Steps
from mhc_inductor.routing.graph.expressions import (
    Ref,
    Term,
    addends,
    aten,
    close,
    contraction,
    key_of,
    peel,
    product,
    reduction,
    summed,
    whole,
)
from mhc_inductor.routing.graph.gates import bound_below, gate_of, squared
from mhc_inductor.routing.graph.index import ONE, DynamicWidth, Index, Size, Unsupported, product_of
from mhc_inductor.routing.graph.values import Value, behind, values_in
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.mhc.norm import Kept, Norm, covers, norm_of


def square_matrices(value: Value) -> bool:
    """Checks whether ``value`` is [..., n, n] with a fixed n from 2 to MAX_STREAMS."""
    shape = value.shape
    return len(shape) >= 2 and shape[-1] == shape[-2] and not shape[-1].symbols and 2 <= shape[-1].factor <= MAX_STREAMS


@dataclasses.dataclass(frozen=True)
class Piece:
    """``rows`` consecutive rows (or elements) of a weight from ``start``; ``columns``: phi is stored as [n*D, m]."""

    value: Value
    start: int
    rows: int
    columns: bool = False


Weighted = tuple[float, tuple[Piece, ...]]
"""A number times weights: scalars, of which the last may have the rows instead."""


@dataclasses.dataclass(frozen=True)
class Affine:
    """``alpha * z[rows] + bias`` of a projection: the argument of a sigmoid, or the logits of Sinkhorn iterations.

    It is linear in z: alpha is a number times scalars, the bias a sum of numbers times scalars times tensors.
    """

    norm: Norm
    phi: Piece
    gamma: Piece | None
    alpha: Weighted
    bias: tuple[Weighted, ...]
    rows: int

    @property
    def key(self) -> tuple[object, ...]:
        """The x, eps and gamma that the three parts of one projection share."""
        return *self.norm.key, self.gamma

    @property
    def weights(self) -> list[Piece]:
        """The weights that are read."""
        each = (self.alpha, *self.bias)
        return [self.phi, *(p for _, pieces in each for p in pieces), *([self.gamma] if self.gamma is not None else [])]

    @property
    def rows_at(self) -> tuple[Value, int]:
        """The weight that holds the rows of phi, and the first of them."""
        return self.phi.value, self.phi.start


def projection(ref: Ref, stop: Container[Value] = ()) -> Norm | None:
    """Returns the norm inside the product ``ref`` if that is a projection of normed streams, else None."""
    term = product(ref, stop)
    for factor, exponent in term.factors:
        if exponent == -1.0 and term.bound and (norm := norm_of(factor, exponent)) is not None:
            return norm if _fits(term, norm) else None
        summed = exponent == -0.5 and bool(term.bound)
        if exponent < -0.5:  # a power of a projection: :func:`affine` reports it
            summed = any(e == -2 * exponent and contraction(f) is not None for f, e in term.factors)
        if summed and (norm := norm_of(factor, -0.5)) is not None:
            return norm
    return None


def _fits(term: Term, norm: Norm) -> bool:
    """Checks whether a projection is over what its norm is over, and scaled by a number or by a tensor, not by both."""
    tensors = [f for f, e in term.factors if e == 1.0 and not f.flat.variables() & set(term.bound)]
    whole = product_of(v.size for v in term.bound) == Size(norm.width)
    return whole and (not tensors or close(term.coef * norm.scale, 1.0))


def norm_behind(
    value: Value, stop: Container[Value] = (), fits: Callable[[Norm], bool] = lambda _: True
) -> Norm | None:
    """Returns the first norm that ``fits`` and whose projection is an addend of ``value``; None without one.

    It is asked of every sum of a long chain of sums: what has no such addend is not followed again.
    """
    key = norm_behind, fits, key_of(stop)
    todo, seen, steps = [peel(whole(value), stop)], set[Ref](), Steps("addends", value)
    with contextlib.suppress(Unsupported):
        while todo:
            ref = todo.pop()
            if ref in seen or key in ref.value.memo:
                continue
            steps.take()
            seen.add(ref)
            sides = None if ref.value in stop else summed(ref)
            norm = projection(ref, stop) if sides is None else None
            if norm is not None and fits(norm):
                return norm
            inner = sum_factor(ref, stop) if sides is None and norm is None else None
            todo += [peel(inner[0], stop)] if inner is not None else []
            todo += [peel(a, stop) for _, a in reversed(sides or ()) if isinstance(a, Ref)]
    value.memo[key] = None
    return None


def sum_factor(ref: Ref, stop: Container[Value] = ()) -> tuple[Ref, float, list[Ref]] | None:
    """Returns (sum, number, other factors) of a product whose one factor is a sum, as in ``alpha * (z + b)``, or None."""
    term = product(ref, stop)
    sums = [f for f, e in term.factors if e == 1.0 and f.value not in stop and summed(f) is not None]
    if len(sums) != 1 or term.bound or any(e != 1.0 for _, e in term.factors):
        return None
    return sums[0], term.coef, [f for f, _ in term.factors if f is not sums[0]]


_Part = tuple[float, list[Ref], Ref | None]
"""An addend: a number, the factors that multiply a sum around it, and what both multiply; None for a constant."""


def _linear(ref: Ref, number: float, factors: list[Ref], kept: Kept) -> list[_Part]:
    """Returns the addends of ``number * factors * ref``: factors of sums with a projection are expanded."""
    constant, terms = addends(ref, kept)
    parts: list[_Part] = [(number * constant, factors, None)] * (constant != 0.0)
    for sign, term in terms:
        inner = sum_factor(term, kept) if projection(term, kept) is None else None
        if inner is None or (len(terms) > 1 and norm_behind(inner[0].value, kept) is None):
            parts.append((number * sign, factors, term))
        else:
            parts += _linear(inner[0], number * sign * inner[1], [*factors, *inner[2]], kept)
    return parts


def affine(ref: Ref, out: Ref, kept: Kept, scale: float = 1.0) -> Affine:
    """Returns ``scale * ref``, an element of a value's logits, as ``alpha * z + bias``. Raises Mismatch.

    ``out`` is the element of the value itself. In ``alpha * (z + b) + c``, the bias is ``alpha * b + c``; b and c may be
    numbers.
    """
    parts = _linear(ref, scale, [], kept)
    terms = [(number, term) for number, _, term in parts if term is not None]
    found = [(norm, part) for part in parts if part[2] is not None and (norm := projection(part[2], kept)) is not None]
    if len(found) != 1:
        check_normed(terms)
        raise Mismatch(SEVERAL if len(terms) > 1 else NOTHING, ref.value)
    norm, z = found[0]
    if ref.value.dtype is torch.float64 and norm.x.dtype is not torch.float64:
        raise Mismatch(
            "the coefficients are computed in float64 and x is not: the op would compute them in float32", ref.value
        )
    others = sorted((part for part in parts if part is not z), key=lambda part: part[2] is None)
    return _affine(out, norm, z, others, kept)


EXPECTED = "expected sigmoid(alpha * z + bias)"
TANH = f"tanh is applied to the logits; {EXPECTED}"
APART = "the projection and the norm read different tensors"
LOW_RANK = "z is a product of x and two weights, as in a low-rank gate; expected one phi"
NOTHING = "no projection of normalised streams"
SEVERAL = "several values are added, and not one projection of normalised streams and a bias"
PROJECTIONS = "several projections of x, or functions of them, are added; expected one z"
NO_BIAS = "bias does not have one element a row of phi"
NO_Z = "z is not (x * gamma) @ phi.T * inv_rms over all n * D elements of a token, with one phi and one inv_rms"
NO_PHI = "phi is not [m, n * D], nor its transpose, with columns in the order of x's n * D elements"
NO_GAMMA = "gamma is not one weight that is laid out as x's n * D elements"
NO_ROWS = "the coefficients are not laid out as [tokens, rows of phi]"
NO_ALPHA = "alpha is not one scalar for these rows"
UNNORMED = "x is not normalised: expected inv_rms = rsqrt(mean(x * x) + eps) as a factor of z"
_NORM = "expected inv_rms = rsqrt(mean(x * x) + eps) or 1 / (sqrt(mean(x * x)) + eps), of all n * D elements of a token"
EACH_NORMED = f"each stream is normalised by itself; {_NORM}"
BOUNDED = f"the norm is bounded below, as by F.normalize; {_NORM}"
OTHER_NORM = f"x has another norm; {_NORM}"
LISTED = (
    "each stream is a tensor of its own, and projection and norm are sums over these tensors; "
    "expected one tensor [..., n, D], as torch.stack makes it"
)
OTHER_NORMS = (EACH_NORMED, BOUNDED, OTHER_NORM, LISTED)
NO_LOGITS = (NOTHING, SEVERAL, PROJECTIONS, UNNORMED, BOUNDED, OTHER_NORM, LISTED)
"""Why a value is no ``alpha * z + bias`` at all, which is no near miss."""


class _Root(NamedTuple):
    """An inverse root of sums of squares: the tensors of the squares, over how many elements, and whether it is bounded."""

    tensors: list[Value]
    width: Size
    bounded: bool


_NORMS: dict[str, Callable[[list[_Root], Size], bool]] = {
    UNNORMED: lambda roots, width: not roots,
    EACH_NORMED: lambda roots, width: any(root.width != width for root in roots),
    BOUNDED: lambda roots, width: any(root.bounded for root in roots),
    OTHER_NORM: lambda roots, width: True,
}
"""Norms of other families, each with how it is seen: by what divides a projection over so many elements."""


PARTS = {
    aten.tanh.default: "tanh", aten.relu.default: "relu", aten.silu.default: "silu", aten.gelu.default: "gelu",
    aten.softplus.default: "softplus", aten.hardsigmoid.default: "hardsigmoid", aten._softmax.default: "softmax",
    aten.clamp.default: "clamp", aten.clamp_min.default: "clamp", aten.native_layer_norm.default: "a LayerNorm",
    aten.div.Tensor: "a division by their sum",
}  # fmt: skip
"""Operations that weights of streams have in other families, in the words of near misses."""


def family(value: Value, x: Value) -> str | None:
    """Returns which of PARTS is the last on the way from x to weights of its streams, in a sentence, or None."""
    for one in behind(value, lambda a: a is not x):
        if one.func in PARTS and (one.func is not aten.div.Tensor or _is_sum(whole([*values_in(one.args)][-1]))):
            return (
                f"{PARTS[one.func]} is part of the weights of the streams; expected h_pre = sigmoid(alpha * z + bias)"
            )
    return None


def _is_sum(ref: Ref) -> bool:
    """Checks whether an element is a sum, plus a number or bounded by one."""
    low = bound_below(peel(ref))
    terms = addends(ref if low is None else low[0])[1]
    return len(terms) == 1 and reduction(terms[0][1]) is not None


def check_normed(terms: list[tuple[float, Ref]]) -> None:
    """Raises Mismatch if one of the terms is a projection of [..., n, D] streams without a norm, or with another."""
    for _, ref in terms:
        term = product(ref)
        width = product_of(v.size for v in term.bound)
        for value in (f.value for f, e in term.factors if e == 1 and len(term.bound) in (1, 2)):
            *_, n, d = (ONE, ONE, *value.shape)
            if len(value.shape) >= 3 and 2 <= n.factor <= MAX_STREAMS and n.times(d) == width:
                roots, ours = _roots(ref), projection(ref) is not None
                name = next(name for name, seen in _NORMS.items() if seen(roots, width))
                raise Mismatch(PROJECTIONS if ours else name, ref.value)


def check_one_tensor(terms: list[tuple[float, Ref]]) -> None:
    """Raises Mismatch if one of the terms is divided by a norm whose squares are summed over several tensors."""
    inner = [found[0] for _, ref in terms if (found := sum_factor(ref)) is not None]
    for _, ref in (*terms, *(term for each in inner for term in addends(each)[1])):
        if any(2 <= len({*root.tensors}) == len(root.tensors) <= MAX_STREAMS for root in _roots(ref)):
            raise Mismatch(LISTED, ref.value)


def _roots(ref: Ref) -> list[_Root]:
    """Returns each norm, the op's or another, that divides a product."""
    return [root for f, e in product(ref).factors if e < 0 and (root := _root(f, e)) is not None]


def _root(factor: Ref, exponent: float) -> _Root | None:
    """Returns a power of ``factor`` that is an inverse root of a sum of squares, None for anything else.

    Numbers may be added under and to the root, or bound them; nothing else is.
    """
    low = bound_below(factor)
    eps, terms = addends(factor if low is None else low[0])
    found = [square for _, ref in terms if (square := squared(ref)) is not None]
    if eps < 0 or not terms:
        return None
    if len(found) == len(terms):
        width = product_of(v.size for v in found[0][2])
        return _Root([peel(v).value for v, *_ in found], width, low is not None) if exponent == -0.5 else None
    below = product(terms[0][1]).factors if len(terms) == 1 else []
    inside = len(below) == 1 and below[0] != (terms[0][1], 1.0)
    root = _root(below[0][0], exponent * below[0][1]) if inside else None
    return root._replace(bounded=root.bounded or low is not None) if root is not None else None


def _affine(out: Ref, norm: Norm, part: _Part, others: list[_Part], kept: Kept) -> Affine:
    number, factors, z = part
    assert z is not None
    term = kept.product(z)
    tokens, feature, width, scale = _projected(norm, z, term)
    phi, gammas, alphas = _weights(norm, z, term, tokens)
    total = product_of(out.value.shape)
    per_token = total.over(norm.count) if norm.count.factor else None
    piece, form = _phi(phi, feature, width)
    if per_token is None or per_token.symbols or out.flat != tokens.times(per_token).plus(form):
        raise Mismatch(NO_ROWS, out.value)
    if len(gammas) > 1:
        raise Mismatch(NO_GAMMA, gammas[1].value)
    gamma = _gamma(gammas[0], feature, width) if gammas else None
    rows = per_token.factor
    alpha = number * scale, tuple(map(_alpha, (*factors, *alphas)))
    bias = [
        (weight, (*map(_alpha, by), *([_bias(t, form, rows)] if t is not None else []))) for weight, by, t in others
    ]
    found = Affine(norm, dataclasses.replace(piece, rows=rows), gamma, alpha, tuple(bias), rows)
    for weight in found.weights:
        size = product_of(weight.value.shape)
        if size.symbols:
            raise DynamicWidth(size)
    return found


def _projected(norm: Norm, z: Ref, term: Term) -> tuple[Index, Index, int, float]:
    """Returns (tokens, feature, width, scale) of a projection of normed streams. Raises Mismatch."""
    streams = [f for f, e in term.factors if f.value is norm.x and e == 1]
    roots = [(f, e) for f, e in term.factors if _is_root(f, e)]
    if len(streams) != 1:
        raise Mismatch(APART, z.value)
    if len(roots) == 1 and not {v for v in term.bound if v.size != ONE} <= streams[0].flat.variables():
        raise Mismatch(LOW_RANK, z.value)
    covered = covers(streams[0].flat, term.bound)
    again = norm_of(*roots[0]) if len(roots) == 1 else None
    if covered is None or again is None or again.x is not norm.x:
        raise Mismatch(NO_Z, z.value)
    tokens, feature, width = covered
    if width != again.width or again.tokens != tokens:
        raise Mismatch(EACH_NORMED, z.value)
    return tokens, feature, width, term.coef * again.scale


def _is_root(factor: Ref, exponent: float) -> bool:
    return exponent == -0.5 or norm_of(factor, exponent) is not None


def _weights(norm: Norm, z: Ref, term: Term, tokens: Index) -> tuple[Ref, list[Ref], list[Ref]]:
    """Returns (phi, gammas, alphas): weights with rows and columns, with columns, and with neither. Raises Mismatch."""
    bound = set(term.bound)
    phis: list[Ref] = []
    gammas: list[Ref] = []
    alphas: list[Ref] = []
    for factor, exponent in term.factors:
        if factor.value is norm.x or _is_root(factor, exponent):
            continue
        seen = factor.flat.variables()
        if exponent != 1.0 or seen & tokens.variables():
            raise Mismatch(NO_Z, factor.value)
        over = seen & bound
        (phis if over and seen - over else gammas if over else alphas).append(factor)
    if len(phis) != 1:
        raise Mismatch(NO_Z, z.value)
    return phis[0], gammas, alphas


def _alpha(ref: Ref) -> Piece:
    at = ref.flat.constant
    if at is None:
        raise Mismatch(NO_ALPHA, ref.value)
    return Piece(ref.value, at, 1)


def _phi(phi: Ref, feature: Index, width: int) -> tuple[Piece, Index]:
    """Returns phi's rows as a Piece without its length, and the index of the row of an element. Raises Mismatch."""
    over = {a: c for a, c in phi.flat.terms.items() if a in feature.terms}
    steps = {over[a].over(c) for a, c in feature.terms.items() if a in over}
    step = steps.pop() if set(over) == set(feature.terms) and len(steps) == 1 else None
    columns = step != ONE
    rows = {a: c.over(ONE if columns else Size(width)) for a, c in phi.flat.terms.items() if a not in feature.terms}
    form = {a: per for a, per in rows.items() if per is not None}
    start = form.pop(None, Size(0))
    whole = not columns or (step is not None and product_of(phi.value.shape) == step.times(Size(width)))
    if step is None or not whole or None in rows.values() or any(per.symbols for per in (start, *form.values())):
        raise Mismatch(NO_PHI, phi.value)
    return Piece(phi.value, start.factor, 0, columns), Index(form)


def _gamma(gamma: Ref, feature: Index, width: int) -> Piece:
    if gamma.flat == feature and product_of(gamma.value.shape) == Size(width):
        return Piece(gamma.value, 0, width)
    raise Mismatch(NO_GAMMA, gamma.value)


def _bias(ref: Ref, form: Index, rows: int) -> Piece:
    terms = dict(ref.flat.terms)
    start = terms.pop(None, Size(0))
    if Index(terms) != form or start.symbols:
        raise Mismatch(NO_BIAS, ref.value)
    return Piece(ref.value, start.factor, rows)


@dataclasses.dataclass(frozen=True)
class Coefficient:
    """``mult * sigmoid(affine) + add``; ``tanh``: the model writes it with a tanh."""

    affine: Affine
    mult: float
    add: float
    tanh: bool = False


def coefficient(value: Value, kept: Kept) -> Coefficient:
    """Returns ``value`` as ``mult * sigmoid(alpha * z + bias) + add``. Raises Mismatch."""
    out = whole(value)
    add, terms = addends(out)
    while len(terms) == 1 and (inner := sum_factor(terms[0][1])) is not None and not inner[2]:
        # A number times a sum, as in (1 + tanh(z / 2)) / 2.
        number, (constant, below) = terms[0][0] * inner[1], addends(inner[0])
        add, terms = add + number * constant, [(number * sign, t) for sign, t in below]
    if len(terms) != 1:
        raise Mismatch(NOTHING, value)
    sign, ref = terms[0]
    term = product(ref)
    gate = gate_of(*term.factors[0]) if len(term.factors) == 1 and not term.bound else None
    if gate is None:
        raise Mismatch(NOTHING, value)
    scale = sign * term.coef
    add += scale * gate.offset
    if gate.offset and add < -1e-12:  # a tanh that nothing shifts up to a sigmoid
        raise Mismatch(NOTHING, value)
    add = add if abs(add) > 1e-15 else 0.0
    try:
        return Coefficient(affine(gate.argument, out, kept, gate.scale), scale * gate.span, add, bool(gate.offset))
    except Mismatch as mismatch:
        if not gate.offset or mismatch.reason in NO_LOGITS:
            raise
        raise Mismatch(TANH, value) from mismatch
