# SPDX-License-Identifier: Apache-2.0
"""Weighted sums over mHC's streams: the collapse of a token's streams, and the expand-and-mix.

Their coefficients are those of a norm's formula, or come from elsewhere: parameters, or another graph after a graph break.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Container, Iterator
from typing import NamedTuple

from mhc_inductor.ops.checks import MAX_STREAMS, MIN_WIDTH
from mhc_inductor.routing.graph.expressions import (
    READABLE,
    Ref,
    addends_of,
    aten,
    chain,
    contraction,
    operands,
    peel,
    reduction,
    rounds,
    whole,
)
from mhc_inductor.routing.graph.index import (
    ONE,
    DynamicWidth,
    Index,
    Size,
    Unsupported,
    Var,
    const,
    linear,
    product_of,
    var,
)
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.mhc.formula import NOTHING
from mhc_inductor.routing.operators.mhc.matches import CollapseUse, Post
from mhc_inductor.routing.operators.mhc.norm import Kept

_JOINS = (aten.stack.default, aten.cat.default)
SUMS = (aten.add.Tensor, aten.sub.Tensor, *_JOINS)
_MOST = MAX_STREAMS + 2
"""The most addends of a stream that are examined: h_post * f_out, a bias of it, and one per stream where the mix is a sum."""
OTHER_WEIGHTS = "x's streams are summed with other weights than those of the formula"
COLLAPSE = "h_pre does not collapse x: expected h_in[d] = sum_i h_pre[i] * x[i, d]"
EXPAND = "expected x_out[o] = h_post[o] * f_out + sum_i R[o, i] * x[i] and nothing else"
WIDER = (
    "the streams are mixed by part of a larger tensor, as in hyper-connections with static or tanh weights; "
    "expected a matrix [..., n, n]"
)


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of a formula before it is read; None stands for every tensor that has the right elements."""

    stop: Container[Value] = ()
    """Values that are not looked into. If this is a :class:`Kept`, its x is the streams."""
    weights: Collection[Value] | None = None
    """What may multiply the streams: vectors that collapse them, or matrices that mix them."""
    posts: Collection[Value] | None = None
    """What may be h_post."""

    @property
    def kept(self) -> Kept | None:
        """The streams, where they are known."""
        return self.stop if isinstance(self.stop, Kept) else None


# --- products and sums ---


def terms_of(ref: Ref, stop: Container[Value]) -> list[tuple[float, Ref]]:
    """Returns the addends of an element with their signs. Raises Unsupported where there are too many for streams."""
    terms: list[tuple[float, Ref]] = []
    todo: list[tuple[float, Ref | float]] = [(1.0, ref)]
    while todo:
        sign, of = todo.pop()
        if of == 0.0:
            continue
        if isinstance(of, float) or len(todo) + len(terms) > _MOST:
            raise Unsupported
        of = peel(of, stop)
        below = None if of.value in stop else addends_of(of, stop)
        if below is None:
            terms.append((sign, of))
        todo += [(sign * part.weight, part.of) for part in reversed(below or ())]
    return terms


@dataclasses.dataclass(frozen=True)
class Factors:
    """The two factors of a product, and the variable that it is summed over, if any."""

    a: Ref
    b: Ref
    bound: Var | None

    def of_streams(self, n: int) -> Iterator[tuple[int, Index, Ref, Ref]]:
        """Yields (stream or -1 for all, its index, weight, element of x) for each way to read it over n streams."""
        if self.bound is not None and self.bound.size != Size(n):
            return
        for at in (-1,) if self.bound is not None else range(n):
            i = var(self.bound) if self.bound is not None else const(at)
            yield at, i, self.a, self.b
            yield at, i, self.b, self.a


def scaled(ref: Ref) -> tuple[float, Factors | None]:
    """Returns a number and what it multiplies: a product, or a sum of products over one variable; None for anything else."""
    number, over = 1.0, list[Var]()
    while True:
        ref = peel(ref)
        try:
            reduced, pair = reduction(ref), operands(ref) if ref.value.func is aten.mul.Tensor else []
        except DynamicWidth:  # the number of streams is never dynamic, so that no other size has to be fixed for this
            return number, None
        refs, numbers = [a for a in pair if isinstance(a, Ref)], [a for a in pair if isinstance(a, float)]
        if reduced is not None:
            ref, bound, by = reduced
            over += [v for v in bound if v.size != ONE]
        elif refs and numbers:
            (ref,), (by,) = refs, numbers
        else:
            break
        number *= by
    contracted = contraction(ref)
    if contracted is not None:
        *refs, k = contracted
        over += [k] * (k.size != ONE)
    if len(refs) != 2 or len(over) > 1:
        return number, None
    a, b = refs
    return number, Factors(a, b, over[0] if over else None)


def factors(ref: Ref) -> Factors | None:
    """Returns the two factors of a product, or of a sum of products over one variable; None for anything else."""
    number, found = scaled(ref)
    return found if number == 1.0 else None


class _Weighted(NamedTuple):
    """``weight[place(i)] * x[i]``, or x[i] where ``weight`` is None."""

    weight: Value | None
    place: int
    """Which of its possible places the weight has."""
    x: Value
    dim: int
    """The stream dim of x."""


def _one_sum(found: list[tuple[int, set[_Weighted]]], n: int) -> _Weighted | None:
    """Returns how all addends (stream or -1 for all, ways to read it) may be read if they sum n streams once, else None."""
    streams = sorted(at for at, _ in found)
    alike = set.intersection(*(ways for _, ways in found)) if streams in ([-1], [*range(n)]) else ()
    return next(iter(alike), None)


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


# --- elements of streams ---


class _Expanded(NamedTuple):
    """``h_post[o] * f_out``, with ``element`` of h_post behind its views.

    f_out has elements for each token, or is a vector [D]. If there is one token, it is both.
    """

    h_post: Value
    element: Ref
    f_out: Value | None
    vector: Value | None


@dataclasses.dataclass(frozen=True)
class _Frame:
    """An element of x_out or h_in, with its token, column and, in x_out, its stream: a variable, or a number."""

    known: Known
    out: Ref
    n: int
    d: int
    tokens: Index
    count: Size
    """The number of tokens."""
    stream: Index
    low: Index
    dim: int = -2
    """The stream dim of x_out."""

    def per_token(self, per: int, at: Index) -> tuple[Index, Size]:
        """Returns (flat index, total elements) of a tensor with ``per`` elements a token at element ``at``."""
        return self.tokens.times(Size(per)).plus(at), self.count.times(Size(per))

    def coefficient(self, ref: Ref, allowed: Collection[Value] | None, per: int, at: Index) -> Value | None:
        """Returns which of the ``allowed`` coefficients, ``per`` a token, ``ref`` shows at ``at``, or None.

        Others than known ones may be shared by all tokens.
        """
        place = self.per_token(per, at)
        if allowed is None:
            return read(ref, place, (at, Size(per)))
        shown = chain(ref, self.known.stop)
        return next((r.value for r in shown if r.value in allowed and r.flat == place[0]), None)

    def streams(self, ref: Ref, i: Index) -> tuple[Value, int] | None:
        """Returns (x, its stream dim) if ``ref`` is the element of the i-th stream in this column, else None."""
        wanted, elements = self.per_token(self.n * self.d, i.times(Size(self.d)).plus(self.low))
        kept = self.known.kept
        if kept is not None:
            seen = kept.seen(peel(ref, kept), i.constant)
            return (kept.x, -2) if seen.value is kept.x and seen.flat == wanted else None
        x = read(ref, (wanted, elements))
        if x is not None:
            return x, -2
        for r in chain(ref):
            shape = r.value.shape
            if r.value.node is None or shape[-1:] != (Size(self.d),):
                shape = ()
            for dim in range(len(shape) - 1):
                order = streams_last(len(shape), dim)
                at = linear([r.index[k] for k in order], [shape[k] for k in order])
                if shape[dim] == Size(self.n) and at == wanted:
                    return r.value, dim - len(shape)
            if rounds(r.value):
                break
        return None

    def weighted(
        self, found: Factors | None, per: int, *places: Callable[[Index], Index]
    ) -> tuple[int, set[_Weighted]] | None:
        """Returns (stream or -1 for all, ways to read it) of ``weight[place(i)] * x[i]``, or None.

        There are ``per`` weights a token. An element of a matrix may be one of its transpose, too.
        """
        for at, i, a, b in found.of_streams(self.n) if found is not None else ():
            x = self.streams(b, i)
            if x is None:
                continue
            weights = [self.coefficient(a, self.known.weights, per, place(i)) for place in places]
            ways = {_Weighted(weight, k, *x) for k, weight in enumerate(weights) if weight is not None}
            if ways:
                return at, ways
        return None

    def mixed(self, ref: Ref, found: Factors | None) -> tuple[int, set[_Weighted]] | None:
        """Returns (stream or -1 for all, ways to read it) of ``R[o, i] * x[i]``, or of x[o] where x is known; or None."""
        x, n, o = self.streams(ref, self.stream) if self.known.kept is not None else None, Size(self.n), self.stream
        if x is not None:
            return -1, {_Weighted(None, 0, *x)}
        return self.weighted(found, self.n**2, lambda i: o.times(n).plus(i), lambda i: i.times(n).plus(o))

    def expanded(self, found: Factors | None) -> _Expanded | None:
        """Returns a product as ``h_post[o] * f_out``, or None."""
        if found is None or found.bound is not None:
            return None
        for a, b in ((found.a, found.b), (found.b, found.a)):
            h_post = self.coefficient(a, self.known.posts, self.n, self.stream)
            f_out, vector = read(b, self.per_token(self.d, self.low)), read(b, (self.low, Size(self.d)))
            if h_post is not None and (f_out is not None or vector is not None):
                return _Expanded(h_post, peel(a), f_out, vector)
        return None

    def misweighted(self, found: Factors | None) -> bool:
        """Checks whether one factor of a product is an element of known streams, in any place."""
        kept = self.known.kept
        if found is None or kept is None:
            return False
        return any(kept.seen(peel(side, kept)).value is kept.x for side in (found.a, found.b))

    def wider(self, ref: Ref) -> bool:
        """Checks whether a term is a sum of streams with weights that are no matrix [n, n] of their own."""
        found = factors(ref)
        if found is None or found.bound is None:
            return False
        return any(self.streams(b, i) is not None for _, i, _, b in found.of_streams(self.n))


def streams_last(rank: int, dim: int) -> list[int]:
    """Returns the dims in an order with the stream dim ``dim`` second to last."""
    others = [d for d in range(rank) if d != dim]
    return [*others[:-1], dim, *others[-1:]]


def _columns(value: Value, d: int) -> int | None:
    """Returns the first of the last dims that have d elements together, or None."""
    dims = reversed(range(len(value.shape)))
    return next((k for k in dims if product_of(value.shape[k:]) == Size(d)), None)


def _stream_dims(value: Value, n: int, d: int) -> list[int | None]:
    """Returns the dims of ``value`` that may be its n streams, and None where they may share the last one with D."""
    shape, first = value.shape, _columns(value, d)
    own = [k for k in range(first or 0) if shape[k] == Size(n) and first in (k + 1, len(shape) - 1)]
    return [*own, *[None] * (shape[-1:] == (Size(n * d),))]


def _frame(value: Value, n: int, d: int, known: Known, stream: Index, dim: int | None = None) -> _Frame:
    """Returns the element of ``value`` in a stream. Where ``value`` has no dim for streams, it may be one of them."""
    shape, index, first = value.shape, [*whole(value).index], _columns(value, d)
    if first is None:
        first, low = len(shape) - 1, var(Var(Size(d)))
        index[-1] = stream.times(Size(d)).plus(low)
    else:
        low = linear(index[first:], shape[first:])
    if dim is not None:
        index[dim] = stream
    lead = [k for k in range(first) if k != dim]
    sizes = [shape[k] for k in lead]
    tokens, place = linear([index[k] for k in lead], sizes), -2 if dim in (None, first - 1) else dim - len(shape)
    return _Frame(known, Ref(value, tuple(index)), n, d, tokens, product_of(sizes), stream, low, place)


# --- collapse ---


def collapse(value: Value, n: int, d: int, known: Known) -> CollapseUse:
    """Returns ``value[d] = sum_i weight[i] * x[i, d]`` as a collapse of n streams. Raises Mismatch and Unsupported."""
    if _columns(value, d) is None or (known.kept is None and d < MIN_WIDTH):
        raise Mismatch(COLLAPSE, value)
    frame, found = _frame(value, n, d, known, const(0)), []
    for sign, ref in terms_of(frame.out, known.stop):
        number, pair = scaled(ref)
        one = frame.weighted(pair, n, lambda i: i)
        if one is None or sign * number != 1.0:
            raise Mismatch(OTHER_WEIGHTS if one is None and frame.misweighted(pair) else COLLAPSE, ref.value)
        found.append(one)
    total = _one_sum(found, n)
    if total is None or total.weight is None:
        raise Mismatch(COLLAPSE, value)
    return CollapseUse(n, d, total.weight, total.x, total.dim, value)


# --- expand and mix ---


def post(value: Value, n: int, d: int, known: Known, apart: bool = False) -> tuple[int | None, Post | Mismatch]:
    """Returns ``value`` as an expand-and-mix of n streams, or why it is none. Raises Unsupported.

    All its streams may have one expression, or each its own, as in a stack. If streams are tensors of their own
    (``apart``), it is one of them: then its place comes first.
    """
    every: list[Index] = [*map(const, range(n))]
    ways: list[tuple[int | None, int | None, list[Index]]]
    if apart:
        ways = [(o, None, [at]) for o, at in enumerate(every)] if _columns(value, d) is not None else []
    else:
        ways = [(None, dim, each) for dim in _stream_dims(value, n, d) for each in ([var(Var(Size(n)))], every)]
    why = Mismatch(NOTHING, value)
    for place, dim, streams in ways:
        try:
            found = {_post(_frame(value, n, d, known, at, dim)) for at in streams}
        except Mismatch as mismatch:
            why = mismatch if why.reason == NOTHING else why
            continue
        if len(found) == 1:
            return place, found.pop()
    return None, why


def given_post(value: Value, sums: Container[Value]) -> Post | None:
    """Returns ``value`` as an expand-and-mix of whatever streams and coefficients, or None.

    ``sums`` are already known to be expand-and-mixes. Raises Mismatch where the streams are expanded and mixed, but the
    sum has further terms.
    """
    *_, last = (ONE, *value.shape)
    if last.symbols or last.factor < MIN_WIDTH:
        return None
    try:
        terms = [ref for _, ref in terms_of(whole(value), sums)]
        sizes = {f.bound.size.factor for t in terms if (f := factors(t)) is not None and f.bound is not None}
        sizes |= {len(t.value.args[0]) for t in terms if t.value.func in _JOINS}
        for n in sorted(size for size in sizes if 2 <= size <= MAX_STREAMS):
            for d in (last.factor, last.factor // n):
                found = post(value, n, d, Known(sums))[1] if d > n and d >= MIN_WIDTH else None
                if isinstance(found, Post):
                    return found
                if found is not None and found.reason != NOTHING:
                    raise found
    except Unsupported:
        pass
    return None


def _post(frame: _Frame) -> Post:
    """Returns the expand-and-mix of one frame. Raises Mismatch and Unsupported."""
    terms = terms_of(frame.out, frame.known.stop)
    outer: list[_Expanded] = []
    mixes: list[tuple[int, set[_Weighted]]] = []
    for sign, ref in terms if len(terms) > 1 else ():
        number, pair = scaled(ref)
        if sign * number != 1.0:
            continue
        # One stream of x times its element of R also looks like h_post * f_out, so try the mix first.
        mixed = frame.mixed(ref, pair)
        one = frame.expanded(pair) if mixed is None else None
        mixes += [mixed] if mixed is not None else []
        outer += [one] if one is not None else []
    # h_post may multiply a bias of the sublayer, a vector, in an addend of its own.
    own = next((k for k, each in enumerate(outer) if each.vector is None), 0)
    f_out = outer[own].f_out if outer else None
    added = [each.vector for k, each in enumerate(outer) if k != own and each.vector is not None]
    mix, alike = _one_sum(mixes, frame.n), len({each.element for each in outer}) == 1
    fits = alike and len(outer) + len(mixes) == len(terms) and len(added) + 1 == len(outer)
    if mix is None or f_out is None or not fits:
        raise Mismatch(_misfit(frame, [ref for _, ref in terms], f_out is not None, bool(mixes)), frame.out.value)
    n, width, h_post = frame.n, frame.n * frame.d, outer[0].h_post
    return Post(mix.x, h_post, f_out, mix.weight, bool(mix.place), n, width, tuple(added), frame.dim, mix.dim)


def _misfit(frame: _Frame, terms: list[Ref], expands: bool, mixes: bool) -> str:
    """Returns why a sum is no expand-and-mix: NOTHING where it does not expand and mix streams at all."""
    posts, stop = frame.known.posts, frame.known.stop
    if posts is None:
        if expands and mixes:
            return EXPAND
        return WIDER if expands and any(map(frame.wider, terms)) else NOTHING
    pairs = [(found.a, found.b) if (found := scaled(ref)[1]) is not None else () for ref in terms]
    weighted = [any(r.value in posts for side in pair for r in chain(side, stop)) for pair in pairs]
    return EXPAND if any(weighted) and not all(weighted) else NOTHING


def residual_of(value: Value) -> Post | None:
    """Returns ``x + h_post[o] * f_out`` with streams x [..., n, D], or None. Raises Unsupported."""
    *_, n, d = (Size(0), Size(0), *value.shape)
    if n.symbols or not 2 <= n.factor <= MAX_STREAMS:
        return None
    frame = _frame(value, n.factor, d.factor, Known(), var(Var(n)), len(value.shape) - 2)
    terms = [ref for _, ref in terms_of(frame.out, ())]
    plain = [ref.value for ref in terms if factors(ref) is None and ref.value.shape == value.shape]
    written = [one for ref in terms if (one := frame.expanded(factors(ref))) is not None and one.f_out is not None]
    if len(terms) != 2 or len(plain) != 1 or len(written) != 1 or plain[0].node is None or written[0].f_out is None:
        return None
    return Post(plain[0], written[0].h_post, written[0].f_out, None, False, n.factor, n.factor * d.factor)
