"""mHC (arXiv 2512.24880) in normal form: what the pieces of its formula look like once spelling is gone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping

import torch

from mhc_inductor.ops.checks import MAX_STREAMS
from mhc_inductor.routing.graph.bounds import DEPTH, Steps
from mhc_inductor.routing.graph.expressions import (
    Ref,
    Term,
    addends,
    aten,
    chain,
    close,
    contraction,
    is_cast,
    number,
    operands,
    peel,
    product,
    reduction,
    whole,
)
from mhc_inductor.routing.graph.index import (
    ONE,
    Atom,
    DynamicWidth,
    Index,
    Size,
    Unsupported,
    Var,
    bound_of,
    const,
    linear,
    product_of,
    var,
)
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.operator import Mismatch

SIGMOIDS = (aten.sigmoid.default, aten.special_expit.default)
ROWS, COLUMNS = -1, -2
"""The dims of a matrix whose sums are those of its rows and of its columns."""


def square_matrices(value: Value) -> bool:
    """Whether ``value`` is [..., n, n] with few streams."""
    shape = value.shape
    return len(shape) >= 2 and shape[-1] == shape[-2] and not shape[-1].symbols and 2 <= shape[-1].factor <= MAX_STREAMS


# --- the streams and their norm -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Norm:
    """``rsqrt(mean(v * v) + eps)`` of the value ``x``, whose last ``width`` elements in memory order are v."""

    x: Value
    tokens: Index
    feature: Index
    width: int
    eps: float
    scale: float

    @property
    def count(self) -> Size:
        """How many tokens x has."""
        return product_of(self.x.shape).over(Size(self.width)) or Size(0)


def squared(ref: Ref) -> tuple[Ref, float, list[Var]] | None:
    """(v, factor, bound variables) of ``factor * sum(v * v)``."""
    scale = 1.0
    bound: list[Var] = []
    while True:
        ref = peel(ref)
        func = ref.value.func
        reduced = reduction(ref)
        if reduced is not None:
            ref, more, factor = reduced
            bound += more
            scale *= factor
        elif (v := _squares(ref)) is not None:
            root = peel(v)
            if root.value.func is not aten.sqrt.default:
                return v, scale, bound
            # The square of a vector norm.
            ref = Ref(root.value.args[0], root.index)
        elif func in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
            a, b = operands(ref)
            divides = func in (aten.div.Tensor, aten.div.Scalar)
            if isinstance(a, Ref) and isinstance(b, float) and b != 0.0:
                ref, scale = a, scale / b if divides else scale * b
            elif isinstance(b, Ref) and isinstance(a, float) and not divides:
                ref, scale = b, scale * a
            else:
                return None
        elif (contracted := contraction(ref)) is not None:
            left, right, k = contracted
            return (left, scale, [*bound, k]) if peel(left) == peel(right) else None
        else:
            return None


def _squares(ref: Ref) -> Ref | None:
    """v of ``v ** 2`` or ``v * v``."""
    if ref.value.func is aten.pow.Tensor_Scalar and number(ref.value.args[1]) == 2:
        return Ref(ref.value.args[0], ref.index)
    if ref.value.func is aten.mul.Tensor:
        a, b = operands(ref)
        return a if isinstance(a, Ref) and isinstance(b, Ref) and peel(a) == peel(b) else None
    return None


def _covers(flat: Index, bound: Collection[Var]) -> tuple[Index, Index, int] | None:
    """(tokens, feature, width): ``flat = width * tokens + feature``, and the feature takes every value below width."""
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


def narrows(value: Value) -> bool:
    return is_cast(value) and torch.finfo(value.dtype).bits < torch.finfo(value.args[0].dtype).bits


def norm_of(inner: Ref) -> Norm | None:
    """The norm whose ``mean(v * v) + eps`` is ``inner``."""
    try:
        eps, terms = addends(inner)
        if len(terms) != 1 or terms[0][0] <= 0 or eps < 0:
            return None
        found = squared(terms[0][1])
        if found is None:
            return None
        v, scale, bound = found
        scale *= terms[0][0]
        best, fits = None, False
        elements = product_of((*inner.value.shape, *(b.size for b in bound)))
        for ref in chain(v):
            covered = _covers(ref.flat, bound)
            # The innermost tensor of these tokens in the order of the norms, if there is one.
            fit = covered is not None and covered[0] == inner.flat and product_of(ref.value.shape) == elements
            if covered is not None and (fit or not fits):
                best, fits = (ref.value, *covered), fit
            if narrows(ref.value) and ref.value.node is not None:
                # What the model rounded is what the op reads; what autocast rounded inside the norm is not.
                break
        if best is None:
            return None
        x, tokens, feature, width = best
        total = scale * width
        if total <= 0:
            return None
        return Norm(x, tokens, feature, width, eps / total, total**-0.5)
    except Unsupported:
        return None


def sources(x: Value) -> dict[Value, tuple[int, ...]]:
    """The tensors that ``x`` is a permuted view of, and which dim of x each of their dims is."""
    found: dict[Value, tuple[int, ...]] = {}
    out = whole(x)
    for ref in chain(out):
        if len(ref.index) != len(out.index) or any(i not in out.index for i in ref.index):
            break
        found[ref.value] = tuple(out.index.index(i) for i in ref.index)
        if narrows(ref.value):
            break
    return found


def seen_in(ref: Ref, x: Value, views: Mapping[Value, tuple[int, ...]]) -> Ref:
    """An element of one of x's :func:`sources` as the element of x."""
    if ref.value is x or ref.value not in views:
        return ref
    index = list(ref.index)
    for at, dim in zip(ref.index, views[ref.value], strict=True):
        index[dim] = at
    return Ref(x, tuple(index))


def _factors(ref: Ref, x: Value, stop: Collection[Value]) -> Term:
    """:func:`product` with every element of x or its sources as one of x."""
    views = sources(x)
    term = product(ref, {*views, *stop})
    term.factors = [(seen_in(f, x, views), e) for f, e in term.factors]
    return term


# --- coefficients: alpha * z + bias -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Piece:
    """``rows`` consecutive rows (or elements) from ``start`` on of a weight; ``columns``: phi lies [n*D, m]."""

    value: Value
    start: int
    rows: int
    columns: bool = False


@dataclasses.dataclass(frozen=True)
class Affine:
    """``alpha * z[rows] + bias`` of a projection: what goes into a sigmoid or into sinkhorn."""

    norm: Norm
    phi: Piece
    gamma: Piece | None
    alpha: Piece | None
    bias: Piece | None
    rows: int
    transposed: bool = False
    scale: float = 1.0
    """alpha where it is no tensor."""

    @property
    def key(self) -> tuple[object, ...]:
        """What the three parts of one projection have in common."""
        return self.norm.x, self.norm.eps, self.gamma


def projection(ref: Ref) -> Norm | None:
    """The norm inside the product ``ref``, if it is a projection of normed streams."""
    term = product(ref)
    for factor, exponent in term.factors:
        summed = exponent == -0.5 and bool(term.bound)
        if exponent < -0.5:  # a power of a projection, which :func:`affine` names
            summed = any(e == -2 * exponent and contraction(f) is not None for f, e in term.factors)
        if summed and (norm := norm_of(factor)) is not None:
            return norm
    return None


def affine(ref: Ref, out: Ref) -> Affine:
    """``ref``, an element of a value's logits, as ``alpha * z + bias``; ``out`` is the element of the value itself.

    Raises Mismatch.
    """
    constant, terms = addends(ref)
    norms = [(projection(t), sign, t) for sign, t in terms]
    found = [(n, sign, t) for n, sign, t in norms if n is not None]
    if len(found) != 1:
        unnormed = unnormed_projection(terms)
        if unnormed is not None:
            raise Mismatch(UNNORMED, unnormed)
        raise Mismatch(NOTHING, ref.value)
    norm, sign, z = found[0]
    if constant != 0.0:
        raise Mismatch(f"a constant {constant:g} is added to the logits; expected alpha * z + bias", ref.value)
    others = [(s, t) for n, s, t in norms if n is None]
    if ref.value.dtype is torch.float64 and norm.x.dtype is not torch.float64:
        raise Mismatch("the coefficients are computed in float64, more exactly than the op would", ref.value)
    return _affine(out, norm, sign, z, others)


NOTHING = "no projection of normalised streams"
UNNORMED = "x is not normalised: expected inv_rms = rsqrt(mean(x * x) + eps) as a factor of z"


def unnormed_projection(terms: list[tuple[float, Ref]]) -> Value | None:
    """The value of a projection of [..., n, D] streams to a few rows without a norm."""
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
                return ref.value
    return None


def _affine(out: Ref, norm: Norm, sign: float, z: Ref, others: list[tuple[float, Ref]]) -> Affine:
    term = _factors(z, norm.x, ())
    streams = [f for f, e in term.factors if f.value is norm.x and e == 1]
    roots = [f for f, e in term.factors if e == -0.5]
    rest = [(f, e) for f, e in term.factors if f.value is not norm.x and e != -0.5]
    if len(streams) != 1:
        raise Mismatch("the projection's input is not the tensor that the norm is of", z.value)
    if len(roots) != 1:
        raise Mismatch(f"{len(roots)} norm factors; expected one inv_rms", z.value)
    # The summed variables of the projection, and the elements of x that they stand for.
    covered = _covers(streams[0].flat, term.bound)
    again = norm_of(roots[0])
    if covered is None or again is None or again.x is not norm.x:
        raise Mismatch("the projection does not run over all n * D elements of x", z.value)
    tokens, feature, width = covered
    if width != again.width or again.tokens != tokens:
        raise Mismatch(f"the norm is over {again.width} elements of x, the projection over {width}", z.value)
    scale = sign * term.coef * again.scale
    token_vars = tokens.variables()
    phis: list[Ref] = []
    gammas: list[Ref] = []
    alphas: list[Ref] = []
    for factor, exponent in rest:
        seen = factor.flat.variables()
        if exponent != 1.0 or seen & token_vars:
            raise Mismatch("an unexpected factor of the projection", factor.value)
        over = seen & set(term.bound)
        (phis if over and seen - over else gammas if over else alphas).append(factor)
    if len(phis) != 1:
        raise Mismatch(f"{len(phis)} weights with rows and columns; expected one phi", z.value)
    total = product_of(out.value.shape)
    per_token = total.over(norm.count) if norm.count.factor else None
    if per_token is None or per_token.symbols:
        raise Mismatch("the coefficients do not have a fixed number of rows a token", out.value)
    phi, form = _phi(phis[0], feature, width)
    transposed = False
    base = tokens.times(per_token)
    if out.flat != base.plus(form):
        turned = _turned(form)
        if turned is None or out.flat != base.plus(turned):
            raise Mismatch("the coefficients are not laid out as [tokens, rows of phi]", out.value)
        transposed = True
    if len(gammas) > 1:
        raise Mismatch(f"{len(gammas)} weights over x's elements; expected one gamma", gammas[1].value)
    gamma = _gamma(gammas[0], feature, width) if gammas else None
    if len(alphas) > 1:
        raise Mismatch(f"{len(alphas)} scalars multiply z; expected one alpha", z.value)
    if alphas and not close(scale, 1.0):
        raise Mismatch(
            f"z is scaled by {scale:g}; expected inv_rms = rsqrt(mean(x * x) + eps) and no constant", z.value
        )
    at = alphas[0].flat.constant if alphas else 0
    if at is None:
        raise Mismatch("alpha is not one scalar for these rows", alphas[0].value)
    if len(others) > 1 or any(s != 1.0 for s, _ in others):
        raise Mismatch(f"{len(others)} further addends in the logits; expected alpha * z + bias", out.value)
    rows = per_token.factor
    bias = _bias(others[0][1], form, rows) if others else None
    alpha = Piece(alphas[0].value, at, 1) if alphas else None
    for weight in (phi, gamma, alpha, bias):
        size = product_of(weight.value.shape) if weight is not None else ONE
        if size.symbols:
            raise DynamicWidth(size)
    return Affine(norm, dataclasses.replace(phi, rows=rows), gamma, alpha, bias, rows, transposed, scale)


def _turned(form: Index) -> Index | None:
    """``n * j + i`` of ``n * i + j``."""
    if len(form.terms) != 2 or None in form.terms:
        return None
    (a, ca), (b, cb) = form.terms.items()
    return Index({a: cb, b: ca})


def _phi(phi: Ref, feature: Index, width: int) -> tuple[Piece, Index]:
    """phi's rows as a piece without its length, and which row an element takes."""
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
    factor = peel(ref)
    terms = dict(factor.flat.terms)
    start = terms.pop(None, Size(0))
    if Index(terms) != form or start.symbols:
        raise Mismatch("bias does not have one element a row of phi", factor.value)
    return Piece(factor.value, start.factor, rows)


@dataclasses.dataclass(frozen=True)
class Coefficient:
    """``mult * sigmoid(affine) + add``."""

    affine: Affine
    mult: float
    add: float


def sigmoid_argument(ref: Ref, exponent: float) -> Ref | None:
    """The argument of a sigmoid, or of its reciprocal ``1 + exp(-z)``."""
    if exponent == 1.0 and ref.value.func in SIGMOIDS:
        return Ref(ref.value.args[0], ref.index)
    if exponent == -1.0:
        one, terms = addends(ref)
        if one == 1.0 and len(terms) == 1 and terms[0][0] == 1.0 and terms[0][1].value.func is aten.exp.default:
            inner = peel(Ref(terms[0][1].value.args[0], terms[0][1].index))
            if inner.value.func is aten.neg.default:
                return Ref(inner.value.args[0], inner.index)
    return None


def coefficient(value: Value) -> Coefficient:
    """``value`` as ``mult * sigmoid(alpha * z + bias) + add``. Raises Mismatch."""
    out = whole(value)
    add, terms = addends(out)
    if len(terms) != 1:
        raise Mismatch(NOTHING, value)
    sign, ref = terms[0]
    term = product(ref)
    argument = sigmoid_argument(*term.factors[0]) if len(term.factors) == 1 and not term.bound else None
    if argument is None:
        raise Mismatch(NOTHING, value)
    return Coefficient(affine(argument, out), sign * term.coef, add)


# --- sums over streams --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StreamSum:
    """``sum_i weight[i] * x[i]``: the weight's value and flat index, and x's, in terms of the variable of i."""

    weight: Value
    at: Index
    x: Index
    stream: Var | None
    n: int


def stream_sum(terms: list[tuple[float, Ref]], x: Value, weights: Collection[Value]) -> StreamSum:
    """The terms as one weighted sum of x's streams: a contraction, a sum, or one addend a stream. Raises Mismatch."""
    seen: list[tuple[Ref, Ref, list[Var]]] = []
    for sign, ref in terms:
        term = _factors(ref, x, weights)
        streams = [f for f, e in term.factors if f.value is x and e == 1.0]
        mixed = [f for f, e in term.factors if f.value in weights and e == 1.0]
        if len(term.factors) != 2 or len(streams) != 1 or len(mixed) != 1:
            raise Mismatch("not a weighted sum of x's streams", ref.value)
        if sign * term.coef != 1.0:
            raise Mismatch(f"the sum of streams is scaled by {sign * term.coef:g}", ref.value)
        seen.append((mixed[0], streams[0], term.bound))
    weight, stream, bound = seen[0]
    if len(seen) == 1:
        if len(bound) != 1:
            raise Mismatch("not a weighted sum over x's streams", weight.value)
        return StreamSum(weight.value, weight.flat, stream.flat, bound[0], bound[0].size.factor)
    n = len(seen)
    if any(b for _, _, b in seen) or any(w.value is not weight.value for w, _, _ in seen):
        raise Mismatch("not a weighted sum over x's streams", weight.value)
    # One addend a stream: x's index differs by a constant, the weight's by a multiple of the same count.
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


def _step(a: Index, b: Index) -> int:
    return b.terms.get(None, Size(0)).factor - a.terms.get(None, Size(0)).factor


def tokens_of(flat: Index, per: int) -> tuple[Index, Index]:
    """``flat`` as ``per * tokens + rest``."""
    tokens, rest = {}, {}
    for atom, c in flat.terms.items():
        whole_ = c.over(Size(per))
        if whole_ is not None and atom is not None:
            tokens[atom] = whole_
        else:
            rest[atom] = c
    return Index(tokens), Index(rest)


@dataclasses.dataclass(frozen=True)
class Collapse:
    """``h_in[d] = sum_i weight[i] * x[i, d]``."""

    weight: Value
    n: int


def collapse(value: Value, x: Value, width: int, weights: Collection[Value]) -> Collapse:
    """``value`` as the collapse of x by one of ``weights``. Raises Mismatch."""
    out = whole(value)
    constant, terms = addends(out, {*sources(x), *weights})
    if constant != 0.0:
        raise Mismatch(f"a constant {constant:g} is added to the collapsed streams", value)
    found = stream_sum(terms, x, weights)
    if found.stream is None or width % found.n:
        raise Mismatch("not a weighted sum over x's streams", value)
    n, d = found.n, width // found.n
    tokens, feature = tokens_of(found.x, width)
    stream = var(found.stream)
    if n == 1 or found.at != tokens.times(Size(n)).plus(stream):
        raise Mismatch("x[i] is not weighted with h_pre[i]", value)
    low = {a: c for a, c in feature.terms.items() if a is not found.stream}
    if feature.terms.get(found.stream) != Size(d) or out.flat != tokens.times(Size(d)).plus(Index(low)):
        raise Mismatch("x's streams are not summed over: expected h_in[d] = sum_i h_pre[i] * x[i, d]", value)
    return Collapse(found.weight, n)


# --- expand and mix -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Post:
    """``x_out[o] = h_post[o] * f_out + sum_i R[o, i] * x[i]``, R one of the given matrices or its transpose."""

    h_post: Value
    f_out: Ref
    matrix: Value | None
    transpose: bool
    n: int
    added: tuple[Value, ...] = ()
    """Vectors [D] that are added to f_out."""
    stream: int = -2
    """x_out's dim of streams."""


def _toward(ref: Ref, targets: Collection[Value]) -> tuple[Ref, list[Ref]] | None:
    """``ref`` as an element of one of ``targets`` times others, which are left whole. Raises TooLarge."""
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
    """``value`` as expand and mix. Raises Mismatch."""
    out = whole(value)
    try:
        return _post(out, out.flat, x, width, posts, matrices)
    except Mismatch as mismatch:
        first = mismatch
    shape = value.shape
    if len(shape) < 2:
        raise first
    if shape[-2] == Size(n):
        try:
            return _post_by_streams(out, x, width, n, posts, matrices)
        except Mismatch as mismatch:
            first = mismatch
    for dim, size in enumerate(shape[:-1]):
        if size == Size(n) and shape[-1] == Size(width // n):
            order = streams_last(len(shape), dim)
            flat = linear([out.index[d] for d in order], [shape[d] for d in order])
            with contextlib.suppress(Mismatch):
                return dataclasses.replace(_post(out, flat, x, width, posts, matrices), stream=dim)
    raise first


def _post_by_streams(
    out: Ref, x: Value, width: int, n: int, posts: Collection[Value], matrices: Collection[Value]
) -> Post:
    """One expression a stream."""
    each = []
    for o in range(n):
        at = Ref(out.value, (*out.index[:-2], const(o), out.index[-1]))
        each.append(_post(at, at.flat, x, width, posts, matrices))
    found = each[0]
    for other in each:
        if (other.h_post, other.matrix, other.transpose) != (found.h_post, found.matrix, found.transpose) or (
            peel(other.f_out) != peel(found.f_out) or other.added != found.added
        ):
            raise Mismatch("the streams of x_out are not all made in the same way", out.value)
    return found


def streams_last(rank: int, dim: int) -> list[int]:
    """The dims with that of the streams before the last."""
    others = [d for d in range(rank) if d != dim]
    return [*others[:-1], dim, *others[-1:]]


def _post(out: Ref, flat: Index, x: Value, width: int, posts: Collection[Value], matrices: Collection[Value]) -> Post:
    views = sources(x)
    constant, terms = addends(out, {*views, *posts, *matrices})
    if constant != 0.0:
        raise Mismatch(f"a constant {constant:g} is added to x_out", out.value)
    expanded = [(s, t, _toward(t, posts)) for s, t in terms]
    outer = [(s, f) for s, _, f in expanded if f is not None]
    rest = [(s, t) for s, t, f in expanded if f is None]
    if not outer or not rest or any(peel(f[0]) != peel(outer[0][1][0]) for _, f in outer):
        raise Mismatch(NOTHING, out.value)
    h = outer[0][1][0]
    others = [f[1][0] for s, f in outer if s == 1.0 and len(f[1]) == 1]
    if len(others) != len(outer):
        raise Mismatch("expected h_post[o] * f_out with no other factor", out.value)
    identity = seen_in(peel(rest[0][1], views), x, views)
    matrix, transpose, n = None, False, 0
    plain = len(rest) == 1 and identity.value is x and rest[0][0] == 1.0
    if plain:
        if identity.flat != flat:
            raise Mismatch("the residual is not x at x_out's own place", out.value)
        per = product_of(h.value.shape).over(product_of(x.shape).over(Size(width)) or ONE)
        n = per.factor if per is not None and not per.symbols else 0
        tokens, _ = tokens_of(flat, width)
        if n < 2 or width % n:
            raise Mismatch("h_post does not have one element a stream", out.value)
    else:
        found = stream_sum(rest, x, matrices)
        n = found.n
        tokens, feature = tokens_of(found.x, width)
        if found.stream is None or n < 2 or width % n or feature.terms.get(found.stream) != Size(width // n):
            raise Mismatch("the residual streams are not mixed by an n x n matrix", out.value)
        feature = Index({a: c for a, c in feature.terms.items() if a is not found.stream})
        if tokens_of(flat, width)[0] != tokens:
            raise Mismatch("x is taken at another token than x_out", out.value)
    d = width // n
    stream_part, low = _by(tokens_of(flat, width)[1], d)
    if not plain:
        if low != feature:
            raise Mismatch("x is not mixed within its columns", out.value)
        i = var(found.stream)  # type: ignore[arg-type]
        base = tokens.times(Size(n * n))
        if found.at == base.plus(stream_part.times(Size(n))).plus(i):
            matrix, transpose = found.weight, False
        elif found.at == base.plus(i.times(Size(n))).plus(stream_part):
            matrix, transpose = found.weight, True
        else:
            raise Mismatch("the residual matrix is neither h_res nor its transpose", out.value)
    if h.flat != tokens.times(Size(n)).plus(stream_part):
        raise Mismatch("f_out is not weighted with the h_post of its own stream", out.value)
    wanted = tokens.times(Size(d)).plus(low)
    # A bias of the sublayer may be expanded on its own.
    vectors = [next((v for r in chain(ref) if (v := _vector(r, low, d)) is not None), None) for ref in others]
    if not tokens.terms:
        # Of one token f_out is a vector too.
        vectors[0] = None
    added = tuple(v for v in vectors if v is not None)
    others = [ref for ref, v in zip(others, vectors, strict=True) if v is None]
    if len(others) != 1:
        raise Mismatch("expected h_post[o] * f_out with one f_out", out.value)
    best = None
    for ref in chain(others[0]):
        if ref.value.node is not None and ref.flat == wanted:
            best = ref
        if narrows(ref.value) and best is not None:
            break
    if best is None:
        raise Mismatch("f_out is not laid out as [tokens, D]", others[0].value)
    return Post(h.value, best, matrix, transpose, n, added)


def _vector(ref: Ref, low: Index, d: int) -> Value | None:
    """The vector [D] that ``ref`` is an element of, the one of column ``low``."""
    found = ref.value.node is not None and ref.flat == low and product_of(ref.value.shape) == Size(d)
    return ref.value if found else None


def _by(feature: Index, d: int) -> tuple[Index, Index]:
    """``feature`` as ``d * stream + low``."""
    stream: dict[Atom, Size] = {}
    low: dict[Atom, Size] = {}
    for atom, c in feature.terms.items():
        per = c.over(Size(d))
        if per is not None:
            stream[atom] = per
        elif atom is None:
            stream_at, low_at = divmod(c.factor, d)
            if stream_at:
                stream[None] = Size(stream_at)
            if low_at:
                low[None] = Size(low_at)
        else:
            low[atom] = c
    return Index(stream), Index(low)
