# SPDX-License-Identifier: Apache-2.0
"""Weighted sums over mHC's streams in normal form: the collapse of a token's streams, and the expand-and-mix."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection

from mhc_inductor.routing.graph.bounds import DEPTH, Steps
from mhc_inductor.routing.graph.expressions import (
    READABLE,
    Ref,
    addends,
    aten,
    chain,
    contraction,
    operands,
    peel,
    reduction,
    rounds,
    whole,
)
from mhc_inductor.routing.graph.index import ONE, Atom, Index, Size, Var, const, linear, product_of, var
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.mhc.formula import NOTHING
from mhc_inductor.routing.operators.mhc.norm import Kept

OTHER_WEIGHTS = "x's streams are summed with other weights than those of the formula"


@dataclasses.dataclass(frozen=True)
class StreamSum:
    """``sum_i weight[i] * x[i]``.

    ``at`` and ``x`` are the flat indices into the weight and into x, in terms of ``stream``, the variable of i.
    """

    weight: Value
    at: Index
    x: Index
    stream: Var | None
    n: int


def stream_sum(terms: list[tuple[float, Ref]], kept: Kept, weights: Collection[Value]) -> StreamSum:
    """Returns the terms as one weighted sum of x's streams. Raises Mismatch.

    The sum may be a matrix product, a reduction, or one addend per stream.
    """
    seen = [_weighted(sign, ref, kept, weights) for sign, ref in terms]
    weight, stream, bound = seen[0]
    if len(seen) == 1:
        if len(bound) != 1:
            raise Mismatch("not a weighted sum over x's streams", weight.value)
        return StreamSum(weight.value, weight.flat, stream.flat, bound[0], bound[0].size.factor)
    n = len(seen)
    if any(b for _, _, b in seen) or any(w.value is not weight.value for w, _, _ in seen):
        raise Mismatch("not a weighted sum over x's streams", weight.value)
    # One addend per stream: from each to the next, the indices of x and of the weight grow by constant steps.
    by_stream = sorted(seen, key=lambda item: item[1].flat.terms.get(None, Size(0)).factor)
    first_w, first_x, _ = by_stream[0]
    i = Var(Size(n))
    step_w = _step(first_w.flat, by_stream[1][0].flat)
    step_x = _step(first_x.flat, by_stream[1][1].flat)
    for k, (w, xs, _) in enumerate(by_stream):
        if w.flat != first_w.flat.plus(const(k * step_w)) or xs.flat != first_x.flat.plus(const(k * step_x)):
            raise Mismatch("the addends do not pair each stream with its own weight", w.value)
    at = first_w.flat.plus(var(i).times(Size(step_w)))
    return StreamSum(weight.value, at, first_x.flat.plus(var(i).times(Size(step_x))), i, n)


def _weighted(sign: float, ref: Ref, kept: Kept, weights: Collection[Value]) -> tuple[Ref, Ref, list[Var]]:
    """Returns (weight, element of x, summed variables) of a product of a weight and x. Raises Mismatch."""
    term = kept.product(ref)
    mixed = [f for f, e in term.factors if f.value in weights and e == 1.0]
    # A tensor that is several streams is here the one that its weight is of.
    at = divided(mixed[0].flat, len(kept.parts.roots) or 1)[1].constant if mixed else None
    streams = [x for f, e in term.factors if e == 1.0 and (x := kept.seen(f, at)).value is kept.x]
    if len(term.factors) != 2 or len(streams) != 1 or len(mixed) != 1:
        raise Mismatch(OTHER_WEIGHTS if len(streams) == 1 and len(term.factors) > 1 else NOTHING, ref.value)
    if sign * term.coef != 1.0:
        raise Mismatch(f"the sum of streams is scaled by {sign * term.coef:g}", ref.value)
    return mixed[0], streams[0], term.bound


def _step(a: Index, b: Index) -> int:
    return b.terms.get(None, Size(0)).factor - a.terms.get(None, Size(0)).factor


def divided(flat: Index, per: int) -> tuple[Index, Index]:
    """Returns (quotient, rest) such that ``flat = per * quotient + rest``."""
    quotient, rest = dict[Atom, Size](), dict[Atom, Size]()
    for atom, c in flat.terms.items():
        if (each := c.over(Size(per))) is not None:
            quotient[atom] = each
        elif atom is None and not c.symbols:
            at, low = divmod(c.factor, per)
            quotient |= {None: Size(at)} if at else {}
            rest[None] = Size(low)
        else:
            rest[atom] = c
    return Index(quotient), Index(rest)


def collapse(value: Value, x: Value, width: int, weights: Collection[Value]) -> Value:
    """Returns the one of ``weights`` that collapses x: ``value[d] = sum_i weight[i] * x[i, d]``. Raises Mismatch."""
    out, kept = whole(value), Kept(x, weights)
    constant, terms = addends(out, kept)
    if constant != 0.0:
        raise Mismatch(f"a constant {constant:g} is added to the collapsed streams", value)
    found = stream_sum(terms, kept, weights)
    if found.stream is None or width % found.n:
        raise Mismatch("not a weighted sum over x's streams", value)
    n, d = found.n, width // found.n
    tokens, feature = divided(found.x, width)
    stream = var(found.stream)
    if n == 1 or found.at != tokens.times(Size(n)).plus(stream):
        raise Mismatch("x[i] is not weighted with h_pre[i]", value)
    low = {a: c for a, c in feature.terms.items() if a is not found.stream}
    if feature.terms.get(found.stream) != Size(d) or out.flat != tokens.times(Size(d)).plus(Index(low)):
        raise Mismatch("x's streams are not summed over: expected h_in[d] = sum_i h_pre[i] * x[i, d]", value)
    return found.weight


# --- expand and mix -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Post:
    """``x_out[o] = h_post[o] * f_out + sum_i R[o, i] * x[i]``, where R is ``matrix`` or its transpose.

    Where ``matrix`` is None, the residual is x[o] itself.
    """

    x: Value
    h_post: Value
    f_out: Value
    matrix: Value | None
    transpose: bool
    n: int
    width: int
    """The number of elements of a token's streams, n * D."""
    added: tuple[Value, ...] = ()
    """Vectors [D] that are added to f_out."""
    stream: int = -2
    """The stream dim of x_out."""
    x_stream: int = -2
    """The stream dim of x, where the streams have a dim of their own."""


def _toward(ref: Ref, targets: Collection[Value]) -> tuple[Ref, list[Ref]] | None:
    """Returns ``ref`` as (element of one of ``targets``, other factors left whole), or None. Raises TooLarge."""
    known: dict[Ref, tuple[Ref, list[Ref]] | None] = {}
    steps = Steps("factors", ref.value, DEPTH)

    def find(ref: Ref) -> tuple[Ref, list[Ref]] | None:
        ref = peel(ref, targets)
        if ref not in known:
            steps.take()
            known[ref] = search(ref)
        return known[ref]

    def search(ref: Ref) -> tuple[Ref, list[Ref]] | None:
        if ref.value in targets:
            return ref, []
        pair: list[Ref | float] = []
        if ref.value.func is aten.mul.Tensor:
            pair = operands(ref)
        elif (contracted := contraction(ref)) is not None and contracted[2].size == ONE:
            pair = [contracted[0], contracted[1]]
        elif (reduced := reduction(ref)) is not None and all(v.size == ONE for v in reduced[1]):
            return find(reduced[0])
        for k, a in enumerate(pair):
            found = find(a) if isinstance(a, Ref) else None
            if found is not None:
                other = pair[1 - k]
                return (found[0], [*found[1], other]) if isinstance(other, Ref) else None
        return None

    return find(ref)


def post(value: Value, x: Value, width: int, n: int, posts: Collection[Value], matrices: Collection[Value]) -> Post:
    """Returns ``value`` as an expand-and-mix of x by one of ``posts`` and one of ``matrices``. Raises Mismatch."""
    out, search = whole(value), _Expansion(Kept(x, posts, matrices), width, posts, matrices)
    try:
        return search.at(out, out.flat)
    except Mismatch as mismatch:
        first = mismatch
    shape = value.shape
    if len(shape) < 2:
        raise first
    place = _places(out, n, width)
    if place is not None:
        with contextlib.suppress(Mismatch):  # with an index for the stream and one for the column
            return search.at(at := place(var(Var(Size(n)))), at.flat)
        try:
            return search.by_streams(out, n, place)
        except Mismatch as mismatch:
            first = mismatch
    for dim, size in enumerate(shape[:-1]):
        if size == Size(n) and shape[-1] == Size(width // n):
            order = streams_last(len(shape), dim)
            flat = linear([out.index[d] for d in order], [shape[d] for d in order])
            with contextlib.suppress(Mismatch):
                return dataclasses.replace(search.at(out, flat), stream=dim)
    raise first


def stream(
    value: Value, x: Value, width: int, n: int, posts: Collection[Value], matrices: Collection[Value]
) -> tuple[int, Post]:
    """Returns which stream of x_out ``value`` is, as a tensor of its own, and the expand-and-mix. Raises Mismatch."""
    out, search, d = whole(value), _Expansion(Kept(x, posts, matrices), width, posts, matrices), width // n
    h = search.outer(out, addends(out, search.kept)[1])[0]
    (tokens, low), at = divided(out.flat, d), divided(h.flat, n)[1].constant
    if at is None:
        raise Mismatch(NOTHING, value)
    return at, search.at(out, tokens.times(Size(width)).plus(const(at * d)).plus(low))


def _places(out: Ref, n: int, width: int) -> Callable[[Index], Ref] | None:
    """Returns what gives the element of a stream that ``out`` is: a dim of their own, or one of n * D; else None."""
    shape, index = out.value.shape, out.index
    if shape[-2] == Size(n):
        return lambda stream: Ref(out.value, (*index[:-2], stream, index[-1]))
    if shape[-1] == Size(width):
        column = var(Var(Size(width // n)))
        return lambda stream: Ref(out.value, (*index[:-1], stream.times(Size(width // n)).plus(column)))
    return None


def streams_last(rank: int, dim: int) -> list[int]:
    """Returns the dims in an order with the stream dim ``dim`` second to last."""
    others = [d for d in range(rank) if d != dim]
    return [*others[:-1], dim, *others[-1:]]


@dataclasses.dataclass(frozen=True)
class _Mix:
    """A residual: its matrix, the number of streams, and the token, stream and column of an element of x_out."""

    matrix: Value | None
    transpose: bool
    n: int
    tokens: Index
    stream: Index
    low: Index


@dataclasses.dataclass(frozen=True)
class _Expansion:
    """Proves that elements of values are the expand-and-mix of ``kept.x``. All methods raise Mismatch."""

    kept: Kept
    width: int
    posts: Collection[Value]
    matrices: Collection[Value]

    def at(self, out: Ref, flat: Index) -> Post:
        """Returns ``out``, the element of x_out at ``flat``, as an expand-and-mix."""
        constant, terms = addends(out, self.kept)
        if constant != 0.0:
            raise Mismatch(f"a constant {constant:g} is added to x_out", out.value)
        h, others, rest = self.outer(out, terms)
        plain = len(rest) == 1 and rest[0][0] == 1.0
        identity = self.kept.seen(peel(rest[0][1], self.kept))
        if plain and identity.value is self.kept.x:
            mix = self._residual(out, flat, identity, h)
        else:
            mix = self._mixed(out, flat, rest)
        if h.flat != mix.tokens.times(Size(mix.n)).plus(mix.stream):
            raise Mismatch("f_out is not weighted with the h_post of its own stream", out.value)
        f_out, added = _sublayer(others, mix, self.width // mix.n, product_of(self.kept.x.shape), out)
        return Post(self.kept.x, h.value, f_out, mix.matrix, mix.transpose, mix.n, self.width, added)

    def by_streams(self, out: Ref, n: int, place: Callable[[Index], Ref]) -> Post:
        """Returns ``out`` as an expand-and-mix where each stream has its own expression."""
        each = [self.at(at, at.flat) for at in map(place, map(const, range(n)))]
        if any(other != each[0] for other in each):
            raise Mismatch("the streams of x_out are not all made in the same way", out.value)
        return each[0]

    def outer(self, out: Ref, terms: list[tuple[float, Ref]]) -> tuple[Ref, list[Ref], list[tuple[float, Ref]]]:
        """Returns (h_post, the factors that it multiplies, the other addends)."""
        expanded = [(s, t, _toward(t, self.posts)) for s, t in terms]
        outer = [(s, f) for s, _, f in expanded if f is not None]
        rest = [(s, t) for s, t, f in expanded if f is None]
        if not outer or not rest or any(peel(f[0]) != peel(outer[0][1][0]) for _, f in outer):
            raise Mismatch(NOTHING, out.value)
        others = [f[1][0] for s, f in outer if s == 1.0 and len(f[1]) == 1]
        if len(others) != len(outer):
            raise Mismatch("expected h_post[o] * f_out with no other factor", out.value)
        return outer[0][1][0], others, rest

    def _residual(self, out: Ref, flat: Index, identity: Ref, h: Ref) -> _Mix:
        """Returns the residual that is x itself."""
        if identity.flat != flat:
            raise Mismatch("the residual is not x at x_out's own place", out.value)
        per = product_of(h.value.shape).over(product_of(self.kept.x.shape).over(Size(self.width)) or ONE)
        n = per.factor if per is not None and not per.symbols else 0
        if n < 2 or self.width % n:
            raise Mismatch("h_post does not have one element a stream", out.value)
        tokens, rest = divided(flat, self.width)
        return _Mix(None, False, n, tokens, *divided(rest, self.width // n))

    def _mixed(self, out: Ref, flat: Index, rest: list[tuple[float, Ref]]) -> _Mix:
        """Returns the residual that is x times a matrix."""
        found = stream_sum(rest, self.kept, self.matrices)
        n = found.n
        tokens, feature = divided(found.x, self.width)
        fits = found.stream is not None and n >= 2 and self.width % n == 0
        if not fits or feature.terms.get(found.stream) != Size(self.width // n):
            raise Mismatch("the residual streams are not mixed by an n x n matrix", out.value)
        feature = Index({a: c for a, c in feature.terms.items() if a is not found.stream})
        mine, place = divided(flat, self.width)
        if mine != tokens:
            raise Mismatch("x is taken at another token than x_out", out.value)
        stream, low = divided(place, self.width // n)
        if low != feature:
            raise Mismatch(
                "x_out's stream o and column d are not laid out as those of x; expected sum_i R[o, i] * x[i, d]",
                out.value,
            )
        i, base = var(found.stream), tokens.times(Size(n * n))  # type: ignore[arg-type]
        for transpose, (row, column) in enumerate(((stream, i), (i, stream))):
            if found.at == base.plus(row.times(Size(n))).plus(column):
                return _Mix(found.weight, bool(transpose), n, tokens, stream, low)
        raise Mismatch("the residual matrix is neither h_res nor its transpose", out.value)


def _sublayer(others: list[Ref], mix: _Mix, d: int, elements: Size, out: Ref) -> tuple[Value, tuple[Value, ...]]:
    """Returns (f_out, vectors [D] that are added to it). ``elements`` is the size of x. Raises Mismatch."""
    # h_post may multiply a bias of the sublayer in an addend of its own.
    vectors = [next((v for r in chain(ref) if (v := _vector(r, mix.low, d)) is not None), None) for ref in others]
    if not mix.tokens.terms:
        # With a single token, f_out is itself a vector [D].
        vectors[0] = None
    added = tuple(v for v in vectors if v is not None)
    others = [ref for ref, v in zip(others, vectors, strict=True) if v is None]
    if len(others) != 1:
        raise Mismatch("expected h_post[o] * f_out with one f_out", out.value)
    f_out = read(others[0], (mix.tokens.times(Size(d)).plus(mix.low), elements.over(Size(mix.n)) or ONE))
    if f_out is None:
        raise Mismatch("f_out is not laid out as [tokens, D]", others[0].value)
    return f_out, added


def read(ref: Ref, *wanted: tuple[Index, Size]) -> Value | None:
    """Returns the innermost tensor that ``ref`` shows with one of the ``wanted`` (flat index, total elements), or None.

    Once it has found a tensor, it looks no further than a rounding.
    """
    best = None
    for r in chain(ref):
        if r.value.node is not None and r.value.dtype in READABLE and (r.flat, product_of(r.value.shape)) in wanted:
            best = r.value
        if rounds(r.value) and best is not None:
            break
    return best


def _vector(ref: Ref, low: Index, d: int) -> Value | None:
    """Returns the vector [D] whose element in column ``low`` is ``ref``, or None."""
    found = ref.value.node is not None and ref.flat == low and product_of(ref.value.shape) == Size(d)
    return ref.value if found else None
