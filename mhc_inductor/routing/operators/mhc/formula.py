# SPDX-License-Identifier: Apache-2.0
"""The parts of the mHC formula (arXiv 2512.24880) in normal form, however the model spells them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Container

import torch

from mhc_inductor.ops.checks import MAX_STREAMS
from mhc_inductor.routing.graph.bounds import Steps
from mhc_inductor.routing.graph.expressions import (
    Ref,
    Term,
    addends,
    close,
    contraction,
    key_of,
    peel,
    product,
    summed,
    whole,
)
from mhc_inductor.routing.graph.gates import bound_below, gate_of, squared
from mhc_inductor.routing.graph.index import ONE, DynamicWidth, Index, Size, Unsupported, product_of
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.mhc.norm import Kept, Norm, covers, norm_of

ROWS, COLUMNS = -1, -2
"""The dims of a matrix to reduce for row sums and for column sums."""


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
    transposed: bool = False

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


def norm_behind(value: Value, fits: Callable[[Norm], bool], stop: Container[Value] = ()) -> Norm | None:
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


def any_norm(norm: Norm) -> bool:
    """Takes every norm."""
    return True


def sum_factor(ref: Ref, stop: Container[Value] = ()) -> tuple[Ref, float, list[Ref]] | None:
    """Returns (sum, number, other factors) of a product whose one factor is a sum, as in ``alpha * (z + b)``, or None."""
    term = product(ref, stop)
    sums = [f for f, e in term.factors if e == 1.0 and f.value not in stop and summed(f) is not None]
    if len(sums) != 1 or term.bound or any(e != 1.0 for _, e in term.factors):
        return None
    return sums[0], term.coef, [f for f, _ in term.factors if f is not sums[0]]


_Part = tuple[float, list[Ref], Ref]
"""An addend: a number, the factors that multiply a sum around it, and what both multiply."""


def _linear(
    ref: Ref, number: float, factors: list[Ref], kept: Kept
) -> tuple[list[tuple[float, list[Ref]]], list[_Part]]:
    """Returns ``number * factors * ref`` as constants and addends: factors of sums with a projection are expanded."""
    constant, terms = addends(ref, kept)
    constants, parts = [(number * constant, factors)] * (constant != 0.0), list[_Part]()
    for sign, term in terms:
        inner = sum_factor(term, kept) if projection(term, kept) is None else None
        if inner is None or (len(terms) > 1 and norm_behind(inner[0].value, any_norm, kept) is None):
            parts.append((number * sign, factors, term))
            continue
        below = _linear(inner[0], number * sign * inner[1], [*factors, *inner[2]], kept)
        constants, parts = constants + below[0], parts + below[1]
    return constants, parts


def affine(ref: Ref, out: Ref, kept: Kept, scale: float = 1.0) -> Affine:
    """Returns ``scale * ref``, an element of a value's logits, as ``alpha * z + bias``. Raises Mismatch.

    ``out`` is the element of the value itself. In ``alpha * (z + b) + c``, the bias is ``alpha * b + c``; b and c may be
    numbers.
    """
    constants, parts = _linear(ref, scale, [], kept)
    found = [(norm, part) for part in parts if (norm := projection(part[2], kept)) is not None]
    if len(found) != 1:
        check_normed([(number, term) for number, _, term in parts])
        raise Mismatch(SEVERAL if len(parts) > 1 else NOTHING, ref.value)
    norm, z = found[0]
    if ref.value.dtype is torch.float64 and norm.x.dtype is not torch.float64:
        raise Mismatch(
            "the coefficients are computed in float64 and x is not: the op would compute them in float32", ref.value
        )
    return _affine(out, norm, z, [part for part in parts if part is not z], constants, kept)


EXPECTED = "expected sigmoid(alpha * z + bias)"
TANH = f"tanh is applied to the logits; {EXPECTED}"
APART = "the projection and the norm read different tensors"
WIDTHS = "the norm is over"
LOW_RANK = "z is a product of x and two weights, as in a low-rank gate; expected one phi"
NOTHING = "no projection of normalised streams"
SEVERAL = "several values are added, and not one projection of normalised streams and a bias"
NO_BIAS = "bias does not have one element a row of phi"
UNNORMED = "x is not normalised: expected inv_rms = rsqrt(mean(x * x) + eps) as a factor of z"

TWICE = (
    "eps is added under the root and to the root: expected rsqrt(mean(x * x) + eps) or 1 / (sqrt(mean(x * x)) + eps)"
)
BOUNDED = "the norm is bounded below by eps: expected inv_rms = rsqrt(mean(x * x) + eps)"
MULTIPLE = "the norm is a multiple of the root of the mean, plus eps: expected 1 / (sqrt(mean(x * x)) + eps)"
LISTED = (
    "each stream is a tensor of its own, and projection and norm are sums over these tensors; "
    "expected one tensor [..., n, D], as torch.stack makes it"
)
OTHER_NORMS = (TWICE, MULTIPLE, BOUNDED, LISTED)
NO_LOGITS = (NOTHING, SEVERAL, UNNORMED, *OTHER_NORMS)
"""Why a value is no ``alpha * z + bias`` at all, which is no near miss."""


def check_normed(terms: list[tuple[float, Ref]]) -> None:
    """Raises Mismatch if one of the terms is a projection of [..., n, D] streams without a norm, or with another."""
    for _, ref in terms:
        term = product(ref)
        if len(term.bound) not in (1, 2):
            continue
        width = product_of(v.size for v in term.bound)
        for factor, exponent in term.factors:
            shape = factor.value.shape
            if exponent != 1 or len(shape) < 3 or not 2 <= shape[-2].factor <= MAX_STREAMS:
                continue
            if shape[-2].times(shape[-1]) == width:
                reasons = [reason for f, e in term.factors if e < 0 and (reason := _other_norm(f, width)) is not None]
                raise Mismatch(next(iter(reasons), UNNORMED), ref.value)


def check_one_tensor(terms: list[tuple[float, Ref]]) -> None:
    """Raises Mismatch if one of the terms is divided by a norm whose squares are summed over several tensors."""
    inner = [found[0] for _, ref in terms if (found := sum_factor(ref)) is not None]
    for _, ref in (*terms, *(term for each in inner for term in addends(each)[1])):
        for factor, exponent in product(ref).factors:
            under = _norm_addends(factor)[: MAX_STREAMS + 1] if exponent < 0 else []
            tensors = {peel(square[0]).value for _, r in under if (square := squared(r)) is not None}
            if 2 <= len(tensors) == len(under) <= MAX_STREAMS:
                raise Mismatch(LISTED, ref.value)


def _norm_addends(divisor: Ref) -> list[tuple[float, Ref]]:
    """Returns what is added under the root of a norm, behind numbers that are added or multiplied."""
    while True:
        _, terms = addends(divisor)
        inner = sum_factor(terms[0][1]) if len(terms) == 1 else None
        root = product(terms[0][1]).factors if len(terms) == 1 and inner is None else []
        if inner is not None:
            divisor = inner[0]
        elif len(root) == 1 and root[0][1] == 0.5:
            divisor = root[0][0]
        else:
            return terms


def _other_norm(divisor: Ref, width: Size) -> str | None:
    """Returns how the divisor of a norm differs from those of the op, None for no norm; ``width`` is the projection's."""
    low = bound_below(divisor)
    eps, terms = addends(divisor if low is None else low[0])
    if len(terms) != 1:
        return None
    factors = product(terms[0][1]).factors
    root = len(factors) == 1 and factors[0][1] == 0.5 and squared(factors[0][0]) is not None
    if low is not None:
        return BOUNDED if root or squared(terms[0][1]) is not None else None
    if root and eps > 0:
        norm = norm_of(divisor, -1.0)
        narrow = norm is not None and Size(norm.width) != width and not width.symbols
        return (
            f"{WIDTHS} {norm.width} elements of x, the projection over {width.factor}" if norm and narrow else MULTIPLE
        )
    inner = addends(factors[0][0]) if len(factors) == 1 and factors[0][1] == 0.5 and eps > 0 else (0.0, [])
    return TWICE if inner[0] > 0 and len(inner[1]) == 1 and squared(inner[1][0][1]) is not None else None


def _affine(
    out: Ref, norm: Norm, part: _Part, others: list[_Part], constants: list[tuple[float, list[Ref]]], kept: Kept
) -> Affine:
    number, factors, z = part
    term = kept.product(z)
    tokens, feature, width, scale = _projected(norm, z, term)
    phi, gammas, alphas = _weights(norm, z, term, tokens)
    total = product_of(out.value.shape)
    per_token = total.over(norm.count) if norm.count.factor else None
    if per_token is None or per_token.symbols:
        raise Mismatch("the coefficients do not have a fixed number of rows a token", out.value)
    piece, form = _phi(phi, feature, width)
    transposed = _transposed(out, tokens.times(per_token), form)
    if len(gammas) > 1:
        raise Mismatch(f"{len(gammas)} weights over x's elements; expected one gamma", gammas[1].value)
    gamma = _gamma(gammas[0], feature, width) if gammas else None
    rows = per_token.factor
    alpha = number * scale, tuple(map(_alpha, (*factors, *alphas)))
    bias = [(weight, (*map(_alpha, by), _bias(t, form, rows))) for weight, by, t in others]
    bias += [(constant, tuple(map(_alpha, by))) for constant, by in constants]
    found = Affine(norm, dataclasses.replace(piece, rows=rows), gamma, alpha, tuple(bias), rows, transposed)
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
    if len(roots) != 1:
        raise Mismatch(f"{len(roots)} norm factors; expected one inv_rms", z.value)
    if not {v for v in term.bound if v.size != ONE} <= streams[0].flat.variables():
        raise Mismatch(LOW_RANK, z.value)
    covered = covers(streams[0].flat, term.bound)
    again = norm_of(*roots[0])
    if covered is None or again is None or again.x is not norm.x:
        raise Mismatch("the projection does not run over all n * D elements of x", z.value)
    tokens, feature, width = covered
    if width != again.width or again.tokens != tokens:
        raise Mismatch(f"{WIDTHS} {again.width} elements of x, the projection over {width}", z.value)
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
            raise Mismatch("the projection has a further factor; expected (x * gamma) @ phi.T * inv_rms", factor.value)
        over = seen & bound
        (phis if over and seen - over else gammas if over else alphas).append(factor)
    if len(phis) != 1:
        raise Mismatch(f"{len(phis)} weights with rows and columns; expected one phi", z.value)
    return phis[0], gammas, alphas


def _transposed(out: Ref, base: Index, form: Index) -> bool:
    """Checks whether the coefficients are phi's rows transposed. Raises Mismatch where they are not its rows at all."""
    if out.flat == base.plus(form):
        return False
    turned = _turned(form)
    if turned is None or out.flat != base.plus(turned):
        raise Mismatch("the coefficients are not laid out as [tokens, rows of phi]", out.value)
    return True


def _alpha(ref: Ref) -> Piece:
    at = ref.flat.constant
    if at is None:
        raise Mismatch("alpha is not one scalar for these rows", ref.value)
    return Piece(ref.value, at, 1)


def _turned(form: Index) -> Index | None:
    """Returns ``n * j + i`` for ``n * i + j``, None for any other index."""
    if len(form.terms) != 2 or None in form.terms:
        return None
    (a, ca), (b, cb) = form.terms.items()
    return Index({a: cb, b: ca})


def _phi(phi: Ref, feature: Index, width: int) -> tuple[Piece, Index]:
    """Returns phi's rows as a Piece without its length, and the index of the row of an element. Raises Mismatch."""
    over = {a: c for a, c in phi.flat.terms.items() if a in feature.terms}
    others = {a: c for a, c in phi.flat.terms.items() if a not in feature.terms}
    steps = {over[a].over(c) for a, c in feature.terms.items() if a in over}
    if set(over) != set(feature.terms) or len(steps) != 1 or (step := steps.pop()) is None:
        raise Mismatch("phi's columns are not in the order of x's n * D elements", phi.value)
    columns = step != ONE
    unit = ONE if columns else Size(width)
    form, start = {}, 0
    for atom, c in others.items():
        per = c.over(unit)
        if per is None or per.symbols:
            raise Mismatch("phi is not [m, n * D], nor its transpose", phi.value)
        if atom is None:
            start = per.factor
        else:
            form[atom] = per
    if columns and product_of(phi.value.shape) != step.times(Size(width)):
        raise Mismatch("phi is not [m, n * D], nor its transpose", phi.value)
    return Piece(phi.value, start, 0, columns), Index(form)


def _gamma(gamma: Ref, feature: Index, width: int) -> Piece:
    size = product_of(gamma.value.shape)
    if gamma.flat == feature and size == Size(width):
        return Piece(gamma.value, 0, width)
    low = {a: c for a, c in feature.terms.items() if c != size and size.over(c) is not None}
    if size.factor and not size.symbols and width % size.factor == 0 and gamma.flat == Index(low):
        return Piece(gamma.value, 0, size.factor)
    raise Mismatch("gamma is not laid out as x's n * D elements", gamma.value)


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
