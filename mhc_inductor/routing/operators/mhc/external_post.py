# SPDX-License-Identifier: Apache-2.0
"""Finds expand-and-mixes whose coefficients come from elsewhere: parameters, or another graph after a graph break."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator

from mhc_inductor.ops.checks import MAX_STREAMS, MIN_WIDTH
from mhc_inductor.routing.graph.expressions import (
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
from mhc_inductor.routing.graph.index import ONE, Index, Size, Unsupported, Var, const, linear, product_of, var
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.mhc.mixing import Post, read, streams_last

SUMS = (aten.add.Tensor, aten.sub.Tensor, aten.stack.default, aten.cat.default)
_MOST = MAX_STREAMS + 2
"""The most addends of a stream that are examined: h_post * f_out, and one per stream where the mix is a sum."""
WIDER = (
    "the streams are mixed by part of a larger tensor, as in hyper-connections with static or tanh weights; "
    "expected a matrix [..., n, n]"
)


@dataclasses.dataclass(frozen=True)
class _Frame:
    """An element of x_out, with its token, stream and column.

    ``stream`` is a variable, or a number where each stream has its own expression.
    """

    out: Ref
    tokens: Index
    stream: Index
    low: Index
    n: int
    d: int
    dim: int

    @property
    def count(self) -> Size:
        """The number of tokens."""
        return product_of(self.out.value.shape).over(Size(self.n * self.d)) or ONE

    def flat(self, per: int, at: Index) -> tuple[tuple[Index, Size], ...]:
        """Returns the two (flat index, total elements) that a tensor with ``per`` elements a token may have at ``at``.

        The first is for a tensor with tokens, the second for one that all tokens share.
        """
        return (self.tokens.times(Size(per)).plus(at), self.count.times(Size(per))), (at, Size(per))


def given_post(value: Value, known: Container[Value]) -> Post | None:
    """Returns ``value`` as an expand-and-mix, or None.

    ``known`` are the sums that are already known to be expand-and-mixes. Raises Mismatch where the streams are expanded
    and mixed, but the sum has further terms.
    """
    try:
        if value.func in (aten.stack.default, aten.cat.default):
            return _by_streams(value, known)
        terms = terms_of(whole(value), known)
        sizes = {f.bound.size.factor for _, t in terms if (f := factors(t)) is not None and f.bound is not None}
        if len(terms) < 2 or not value.shape:
            return None
        for frame in _frames(value, sizes):
            found = _post(frame, known)
            if found is not None:
                return found
    except Unsupported:
        pass
    return None


def terms_of(ref: Ref, known: Container[Value]) -> list[tuple[float, Ref]]:
    """Returns the addends of an element with their signs. Raises Unsupported where there are too many for streams."""
    terms: list[tuple[float, Ref]] = []
    todo: list[tuple[float, Ref | float]] = [(1.0, ref)]
    while todo:
        sign, of = todo.pop()
        if of == 0.0:
            continue
        if isinstance(of, float) or len(todo) + len(terms) > _MOST:
            raise Unsupported
        of = peel(of, known)
        below = None if of.value in known else addends_of(of, known)
        if below is None:
            terms.append((sign, of))
        todo += [(sign * part.weight, part.of) for part in reversed(below or ())]
    return terms


def _frames(value: Value, sizes: set[int]) -> Iterator[_Frame]:
    """Yields the layouts in which ``value`` may hold streams: [..., n, ..., D], or [..., n * D]."""
    *shape, last = value.shape
    streams = [n for n in sizes if 2 <= n <= MAX_STREAMS]
    if last.symbols or not streams:
        return
    for dim, size in enumerate(shape):
        if not size.symbols and size.factor in streams:
            yield _frame(value, dim, size.factor, last.factor)
    for n in streams:
        if last.factor % n == 0:
            yield _frame(value, None, n, last.factor // n)


def _frame(value: Value, dim: int | None, n: int, d: int, stream: Index | None = None) -> _Frame:
    stream, low = stream if stream is not None else var(Var(Size(n))), var(Var(Size(d)))
    index = [var(Var(s)) for s in value.shape]
    index[-1] = low if dim is not None else stream.times(Size(d)).plus(low)
    lead = [k for k in range(len(index) - 1) if k != dim]
    if dim is not None:
        index[dim] = stream
    tokens = linear([index[k] for k in lead], [value.shape[k] for k in lead])
    return _Frame(Ref(value, tuple(index)), tokens, stream, low, n, d, -2 if dim is None else dim - len(index))


def _by_streams(value: Value, known: Container[Value]) -> Post | None:
    """Returns the expand-and-mix of a stack, or of tensors put together by cat, with one expression per stream, or None."""
    dim, parts = (value.args[1] if len(value.args) > 1 else 0) % len(value.shape), value.args[0]
    n, last = len(parts), dim == len(value.shape) - 1
    joined = value.func is aten.cat.default
    if (last and not joined) or not 2 <= n <= MAX_STREAMS or value.shape[-1].symbols:
        return None
    if joined and any(
        len(p.shape) != len(value.shape)  # an empty tensor of any rank may be part of a cat
        or p.shape[dim].times(Size(n)) != value.shape[dim]
        or not (last or p.shape[dim] == ONE)
        for p in parts
    ):
        return None
    d = value.shape[-1].factor // (n if last else 1)
    each = [_post(_frame(value, None if last else dim, n, d, const(o)), known) for o in range(n)]
    return each[0] if all(found == each[0] for found in each) else None


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


def factors(ref: Ref) -> Factors | None:
    """Returns the two factors of a product, or of a sum of products over one variable; None for anything else."""
    ref, bound = peel(ref), None
    reduced = reduction(ref)
    if reduced is not None:
        summand, over, scale = reduced
        over = [v for v in over if v.size != ONE]
        if scale != 1.0 or len(over) > 1:
            return None
        ref, bound = peel(summand), over[0] if over else None
    contracted = contraction(ref)
    if contracted is not None:
        left, right, k = contracted
        if k.size != ONE and bound is not None:
            return None
        return Factors(left, right, bound if k.size == ONE else k)
    if ref.value.func is not aten.mul.Tensor:
        return None
    a, b = operands(ref)
    return Factors(a, b, bound) if isinstance(a, Ref) and isinstance(b, Ref) else None


def _post(frame: _Frame, known: Container[Value]) -> Post | None:
    """Returns the expand-and-mix of one frame, or None. Raises Mismatch."""
    if frame.d <= frame.n or frame.d < MIN_WIDTH:
        return None
    outer: list[tuple[Value, Value]] = []
    mixes: list[tuple[int, tuple[Value, bool, Value, int]]] = []
    terms = terms_of(frame.out, known)
    for sign, ref in terms:
        f = factors(ref) if sign == 1.0 else None
        # One stream of x times its element of R also looks like h_post * f_out, so try the mix first.
        mixed = _mixed(frame, f) if f is not None else None
        expanded = _expanded(frame, f) if f is not None and mixed is None else None
        outer += [expanded] if expanded is not None else []
        mixes += [mixed] if mixed is not None else []
    if outer and not mixes and any(_wider(frame, factors(ref)) for _, ref in terms):
        raise Mismatch(WIDER, frame.out.value)
    if not outer or not mixes:
        return None
    streams = sorted(at for at, _ in mixes)
    whole_mix = len({mix for _, mix in mixes}) == 1 and streams in ([-1], [*range(frame.n)])
    if len(outer) != 1 or not whole_mix or len(outer) + len(mixes) != len(terms):
        reason = "expected x_out[o] = h_post[o] * f_out + sum_i R[o, i] * x[i] and nothing else"
        raise Mismatch(reason, frame.out.value)
    matrix, transpose, x, x_stream = mixes[0][1]
    h_post, f_out = outer[0]
    width = frame.n * frame.d
    return Post(x, h_post, f_out, matrix, transpose, frame.n, width, stream=frame.dim, x_stream=x_stream)


def expanded(value: Value, n: int) -> bool:
    """Checks whether an addend of ``value`` [..., n, D] is ``h_post[o] * f_out``."""
    frame = _frame(value, len(value.shape) - 2, n, value.shape[-1].factor)
    found = [factors(ref) for _, ref in terms_of(frame.out, ())]
    return any(f is not None and _expanded(frame, f) is not None for f in found)


def _wider(frame: _Frame, f: Factors | None) -> bool:
    """Checks whether a term is a sum of streams with weights that are no matrix [n, n] of their own."""
    if f is None or f.bound is None or f.bound.size != Size(frame.n):
        return False
    return any(_streams(frame, b, var(f.bound)) is not None for b in (f.a, f.b))


def _expanded(frame: _Frame, f: Factors) -> tuple[Value, Value] | None:
    """Returns (h_post, f_out) of ``h_post[o] * f_out``, or None."""
    if f.bound is not None:
        return None
    for a, b in ((f.a, f.b), (f.b, f.a)):
        h_post, f_out = read(a, *frame.flat(frame.n, frame.stream)), read(b, frame.flat(frame.d, frame.low)[0])
        if h_post is not None and f_out is not None:
            return h_post, f_out
    return None


def _mixed(frame: _Frame, f: Factors) -> tuple[int, tuple[Value, bool, Value, int]] | None:
    """Returns (stream or -1 for all, (matrix, transposed, x, x's stream dim)) of ``R[o, i] * x[i]``, or None."""
    n, o = frame.n, frame.stream
    for at, i, a, b in f.of_streams(n):
        x = _streams(frame, b, i)
        for transpose, (row, column) in enumerate(((o, i), (i, o))) if x is not None else ():
            matrix = read(a, *frame.flat(n * n, row.times(Size(n)).plus(column)))
            if matrix is not None and x is not None:
                return at, (matrix, bool(transpose), *x)
    return None


def _streams(frame: _Frame, ref: Ref, i: Index) -> tuple[Value, int] | None:
    """Returns (x, its stream dim) if ``ref`` is an element of the i-th stream of a token, else None."""
    wanted = frame.tokens.times(Size(frame.n)).plus(i).times(Size(frame.d)).plus(frame.low)
    return streams_of(ref, wanted, product_of(frame.out.value.shape), frame.n, frame.d)


def streams_of(ref: Ref, wanted: Index, elements: Size, n: int, d: int) -> tuple[Value, int] | None:
    """Returns (x, its stream dim) if ``ref`` is the element ``wanted`` of streams of n times d, else None.

    ``wanted`` is the flat index into [..., n, d], and ``elements`` the size of that.
    """
    x = read(ref, (wanted, elements))
    if x is not None:
        return x, -2
    for r in chain(ref):
        shape = r.value.shape
        if r.value.node is None or shape[-1:] != (Size(d),):
            shape = ()
        for dim in range(len(shape) - 1):
            order = streams_last(len(shape), dim)
            if shape[dim] == Size(n) and linear([r.index[k] for k in order], [shape[k] for k in order]) == wanted:
                return r.value, dim - len(shape)
        if rounds(r.value):
            break
    return None
