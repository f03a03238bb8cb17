"""Normal forms of tensor expressions: a product of factors under sums, a sum of such terms.

A :class:`Ref` is an element of a value: the value and the index of each of its dimensions. Views and casts disappear
into indices; matrix products, einsum, ``sum`` and ``mean`` all become products with bound variables, so that a
factor's place, before or after a contraction, does not matter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from mhc_inductor.routing.graph.index import (
    ONE,
    DynamicWidth,
    Index,
    Size,
    Unsupported,
    Var,
    const,
    divmod_index,
    linear,
    reshape,
    size_of,
    var,
)
from mhc_inductor.routing.graph.values import Value

aten = torch.ops.aten
prims = torch.ops.prims


@dataclasses.dataclass(frozen=True, slots=True)
class Ref:
    """``value[index]``."""

    value: Value
    index: tuple[Index, ...]

    @property
    def flat(self) -> Index:
        """The row-major position in the value."""
        return linear(self.index, self.value.shape)


def whole(value: Value) -> Ref:
    """An element of ``value`` at fresh variables."""
    return Ref(value, tuple(var(Var(s)) for s in value.shape))


def _dim(value: Value, d: int) -> int:
    return d % len(value.shape) if value.shape else 0


def _broadcast(operand: Any, ref: Ref) -> Ref:
    """The element of an operand that meets ``ref`` of an elementwise operation's result."""
    if len(operand.shape) > len(ref.index):
        raise Unsupported
    tail = ref.index[len(ref.index) - len(operand.shape) :]
    return Ref(operand, tuple(const(0) if s == ONE else i for s, i in zip(operand.shape, tail, strict=True)))


def _same_shape(ref: Ref) -> Ref:
    return Ref(ref.value.args[0], ref.index)


def _reshaped(ref: Ref) -> Ref:
    base = ref.value.args[0]
    return Ref(base, reshape(ref.index, ref.value.shape, base.shape))


def _permuted(ref: Ref) -> Ref:
    base, dims = ref.value.args[0], ref.value.args[1]
    index: list[Index] = [const(0)] * len(dims)
    for i, d in zip(ref.index, dims, strict=True):
        index[_dim(base, d)] = i
    return Ref(base, tuple(index))


def _transposed(ref: Ref) -> Ref:
    base = ref.value.args[0]
    a, b = (_dim(base, d) for d in (ref.value.args[1:3] if len(ref.value.args) > 2 else (0, -1)))
    index = list(ref.index)
    if index:
        index[a], index[b] = index[b], index[a]
    return Ref(base, tuple(index))


def _selected(ref: Ref) -> Ref:
    base, d, i = ref.value.args[:3]
    d = _dim(base, d)
    return Ref(base, (*ref.index[:d], _offset(base, d, i), *ref.index[d:]))


def _offset(base: Value, d: int, start: Any) -> Index:
    if not isinstance(start, int):
        raise Unsupported
    if start < 0:
        size = base.shape[d]
        if size.symbols:
            raise Unsupported
        start = max(0, start + size.factor)
    return const(start)


def _sliced(ref: Ref) -> Ref:
    base, *rest = ref.value.args
    d = _dim(base, rest[0] if rest else 0)
    start = rest[1] if len(rest) > 1 and rest[1] is not None else 0
    if len(rest) > 3 and rest[3] != 1:
        raise Unsupported
    index = list(ref.index)
    # A size of 1 has no variable, so the offset alone is the index.
    index[d] = index[d].plus(_offset(base, d, start))
    return Ref(base, tuple(index))


def _split(ref: Ref) -> Ref:
    base, sizes, *rest = ref.value.args
    d = _dim(base, rest[0] if rest else 0)
    k = ref.value.out
    each = sizes[:k] if isinstance(sizes, (tuple, list)) else (sizes,) * k
    if not all(isinstance(size, int) for size in each):
        raise Unsupported
    before = sum(each)
    index = list(ref.index)
    index[d] = index[d].plus(_offset(base, d, before))
    return Ref(base, tuple(index))


def _unbound(ref: Ref) -> Ref:
    base, *rest = ref.value.args
    d = _dim(base, rest[0] if rest else 0)
    return Ref(base, (*ref.index[:d], const(ref.value.out), *ref.index[d:]))


def _expanded(ref: Ref) -> Ref:
    return _broadcast(ref.value.args[0], ref)


def _concatenated(ref: Ref) -> Ref:
    pieces, *rest = ref.value.args
    d = _dim(ref.value, rest[0] if rest else 0)
    start = 0
    at = ref.index[d]
    fixed = at.terms.get(None)
    low = fixed.factor if fixed is not None and not fixed.symbols else 0
    high = low
    for atom, c in at.terms.items():
        if atom is not None:
            bound = atom.size if isinstance(atom, Var) else None
            if bound is None or bound.symbols or c.symbols:
                raise Unsupported
            high += c.factor * (bound.factor - 1)
    for piece in pieces:
        size = piece.shape[d]
        if size.symbols:
            raise Unsupported
        if start <= low and high < start + size.factor:
            index = list(ref.index)
            index[d] = at.plus(const(-start)) if start else at
            return Ref(piece, tuple(index))
        start += size.factor
    raise Unsupported


def _stacked(ref: Ref) -> Ref:
    pieces, *rest = ref.value.args
    d = _dim(ref.value, rest[0] if rest else 0)
    at = ref.index[d].constant
    rest_index = (*ref.index[:d], *ref.index[d + 1 :])
    if at is not None:
        return Ref(pieces[at], rest_index)
    # Evenly spaced pieces of one tensor, put side by side again.
    each = [step(Ref(piece, rest_index)) for piece in pieces]
    first = each[0]
    if first is None or len(each) < 2 or any(e is None or e.value is not first.value for e in each):
        raise Unsupported
    shifts = [[_constant(i) - _constant(j) for i, j in zip(e.index, first.index, strict=True)] for e in each if e]
    steps = shifts[1]
    for k, (e, shift) in enumerate(zip(each, shifts, strict=True)):
        moved = tuple(i.plus(const(k * by)) for i, by in zip(first.index, steps, strict=True))
        if shift != [k * by for by in steps] or e is None or e.index != moved:
            raise Unsupported
    spread = (i.plus(ref.index[d].times(Size(by))) for i, by in zip(first.index, steps, strict=True))
    return Ref(first.value, tuple(spread))


def _constant(index: Index) -> int:
    fixed = index.terms.get(None)
    if fixed is not None and fixed.symbols:
        raise Unsupported
    return fixed.factor if fixed is not None else 0


def _repeated(ref: Ref) -> Ref:
    base, times = ref.value.args[:2]
    added = len(times) - len(base.shape)
    index = []
    for d, size in enumerate(base.shape):
        at = ref.index[added + d]
        index.append(const(0) if size == ONE else at if times[added + d] == 1 else divmod_index(at, size)[1])
    return Ref(base, tuple(index))


VIEWS: dict[Any, Callable[[Ref], Ref]] = {
    aten.view.default: _reshaped,
    aten.reshape.default: _reshaped,
    aten._unsafe_view.default: _reshaped,
    aten.unsqueeze.default: _reshaped,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.expand.default: _expanded,
    aten.permute.default: _permuted,
    aten.transpose.int: _transposed,
    aten.t.default: _transposed,
    aten.numpy_T.default: _transposed,
    aten.select.int: _selected,
    aten.slice.Tensor: _sliced,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbound,
    aten.cat.default: _concatenated,
    aten.stack.default: _stacked,
    aten.repeat.default: _repeated,
    aten.clone.default: _same_shape,
    aten.contiguous.default: _same_shape,
    aten.alias.default: _same_shape,
    aten.lift_fresh.default: _same_shape,
}
CASTS = {aten._to_copy.default, aten.to.dtype, prims.convert_element_type.default}


def is_cast(value: Value) -> bool:
    return value.func in CASTS and value.dtype.is_floating_point and value.args[0].dtype.is_floating_point


def step(ref: Ref) -> Ref | None:
    """The element that a view or a cast of floating dtypes shows, or None for anything else."""
    func = ref.value.func
    if func is None:
        return None
    view = VIEWS.get(func) or (_same_shape if is_cast(ref.value) else None)
    if view is None:
        return None
    try:
        below = view(ref)
    except Unsupported:
        return None
    # Not the numbers that torch.tensor was given: they are no node's.
    return below if below.value.node is not None or below.value.func is not None else None


def peel(ref: Ref, stop: Collection[Value] = ()) -> Ref:
    """``ref`` behind its views and casts, as far as a value of ``stop``."""
    while ref.value not in stop:
        inner = step(ref)
        if inner is None:
            break
        ref = inner
    return ref


def chain(ref: Ref, stop: Collection[Value] = ()) -> list[Ref]:
    """Every element on the way of :func:`peel`, the outermost first."""
    refs = [ref]
    while refs[-1].value not in stop and (inner := step(refs[-1])) is not None:
        refs.append(inner)
    return refs


@dataclasses.dataclass
class Term:
    """``coef * product(factor ** exponent)``, summed over ``bound``."""

    coef: float = 1.0
    factors: list[tuple[Ref, float]] = dataclasses.field(default_factory=list)
    bound: list[Var] = dataclasses.field(default_factory=list)


def number(a: Any) -> float | None:
    """A Python number, or a symbolic float fixed at its value (a guard keeps it)."""
    if isinstance(a, (int, float)) and not isinstance(a, bool):
        return float(a)
    if isinstance(a, torch.SymFloat):
        return float(a)
    if isinstance(a, torch.SymInt):
        raise DynamicWidth(size_of(a, {}))
    if isinstance(a, Value) and not a.shape:
        while a.func is aten.lift_fresh.default and isinstance(a.args[0], Value):
            a = a.args[0]
        func = a.func
        if func in (aten.full.default, aten.scalar_tensor.default):
            return number(a.args[1] if func is aten.full.default else a.args[0])
    if isinstance(a, Value) and a.func is aten.full.default:
        return number(a.args[1])
    return None


def _reduced(ref: Ref) -> tuple[Ref, list[Var]]:
    """The summand of a reduction, at fresh bound variables where it reduces."""
    operand, *rest = ref.value.args
    dims = rest[0] if rest and rest[0] is not None and rest[0] != () else tuple(range(len(operand.shape)))
    dims = (dims,) if isinstance(dims, int) else dims
    gone = {_dim(operand, d) for d in dims}
    keepdim = len(ref.value.shape) == len(operand.shape)
    bound: list[Var] = []
    index: list[Index] = []
    position = 0
    for d, size in enumerate(operand.shape):
        if d in gone:
            v = Var(size)
            bound.append(v)
            index.append(var(v))
            position += keepdim
        else:
            index.append(ref.index[position])
            position += 1
    return Ref(operand, tuple(index)), bound


_REDUCTIONS = {
    aten.sum.dim_IntList: False,
    aten.sum.default: False,
    aten.mean.dim: True,
    aten.mean.default: True,
}


def reduction(ref: Ref) -> tuple[Ref, list[Var], float] | None:
    """(summand, bound variables, factor) of a sum or a mean."""
    mean = _REDUCTIONS.get(ref.value.func)
    if mean is None:
        return None
    operand, bound = _reduced(ref)
    scale = 1.0
    if mean:
        for v in bound:
            if v.size.symbols:
                raise DynamicWidth(v.size)
            scale /= v.size.factor
    return operand, bound, scale


def contraction(ref: Ref) -> tuple[Ref, Ref, Var] | None:
    """(left, right, bound variable) of a matrix product."""
    func = ref.value.func
    if func not in (aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.matmul.default):
        return None
    a, b = ref.value.args[:2]
    if func is aten.matmul.default and (len(a.shape) < 2 or len(b.shape) < 2 or a.shape[:-2] != b.shape[:-2]):
        return None
    k = Var(a.shape[-1])
    ik = var(k)
    if func is aten.dot.default:
        return Ref(a, (ik,)), Ref(b, (ik,)), k
    if func is aten.mv.default:
        return Ref(a, (ref.index[0], ik)), Ref(b, (ik,)), k
    *batch, i, j = ref.index
    return Ref(a, (*batch, i, ik)), Ref(b, (*batch, ik, j)), k


_MUL = (aten.mul.Tensor, aten.mul.Scalar)
_DIV = (aten.div.Tensor, aten.div.Scalar)


def operands(ref: Ref) -> list[Ref | float]:
    """The first two operands of an elementwise operation, as elements or numbers."""
    result: list[Ref | float] = []
    for a in ref.value.args[:2]:
        n = number(a)
        if n is not None:
            result.append(n)
        elif isinstance(a, Value):
            result.append(_broadcast(a, ref))
        else:
            raise Unsupported
    return result


def product(ref: Ref, stop: Collection[Value] = ()) -> Term:
    """``ref`` as a product of factors none of which is a product, a sum over variables, a view or a cast.

    Values of ``stop`` are factors whatever they are. rsqrt(u) is the factor (u, -0.5).
    """
    term = Term()
    _multiply(term, ref, 1.0, stop)
    return term


def _multiply(term: Term, ref: Ref | float, exponent: float, stop: Collection[Value]) -> None:
    if isinstance(ref, float):
        if ref == 0.0 and exponent < 0:
            raise Unsupported
        term.coef *= ref**exponent
        return
    ref = peel(ref, stop)
    coef, factors, bound = term.coef, len(term.factors), len(term.bound)
    try:
        _expand(term, ref, exponent, stop)
    except Unsupported:
        # What cannot be followed stays one factor.
        del term.factors[factors:], term.bound[bound:]
        term.coef = coef
        term.factors.append((ref, exponent))


def _expand(term: Term, ref: Ref, exponent: float, stop: Collection[Value]) -> None:
    func = ref.value.func
    if ref.value in stop or func is None:
        term.factors.append((ref, exponent))
    elif (n := number(ref.value)) is not None:
        _multiply(term, n, exponent, stop)
    elif func in _MUL:
        for a in operands(ref):
            _multiply(term, a, exponent, stop)
    elif func in _DIV:
        a, b = operands(ref)
        _multiply(term, a, exponent, stop)
        _multiply(term, b, -exponent, stop)
    elif func is aten.neg.default:
        if exponent != int(exponent):
            raise Unsupported
        term.coef *= (-1.0) ** int(exponent)
        _multiply(term, _same_shape(ref), exponent, stop)
    elif func is aten.reciprocal.default:
        _multiply(term, _same_shape(ref), -exponent, stop)
    elif func in (aten.rsqrt.default, aten.sqrt.default):
        power = -0.5 if func is aten.rsqrt.default else 0.5
        inner = _same_shape(ref)
        term.factors.append((peel(inner, stop), power * exponent))
    elif func is aten.pow.Tensor_Scalar:
        given = number(ref.value.args[1])
        if given is None:
            raise Unsupported
        inner = _same_shape(ref)
        if given == int(given):
            _multiply(term, inner, given * exponent, stop)
        else:
            term.factors.append((peel(inner, stop), given * exponent))
    elif exponent == 1.0 and (reduced := reduction(ref)) is not None:
        summand, bound, scale = reduced
        term.coef *= scale
        term.bound += bound
        _multiply(term, summand, 1.0, stop)
    elif exponent == 1.0 and (contracted := contraction(ref)) is not None:
        left, right, k = contracted
        if k.size != ONE:
            term.bound.append(k)
        _multiply(term, left, 1.0, stop)
        _multiply(term, right, 1.0, stop)
    else:
        term.factors.append((ref, exponent))


def addends(ref: Ref, stop: Collection[Value] = ()) -> tuple[float, list[tuple[float, Ref]]]:
    """``ref`` as a constant plus signed elements none of which is a sum, a view or a cast."""
    constant = 0.0
    terms: list[tuple[float, Ref]] = []
    todo: list[tuple[float, Ref | float]] = [(1.0, ref)]
    while todo:
        sign, a = todo.pop()
        if isinstance(a, float):
            constant += sign * a
            continue
        a = peel(a, stop)
        func = a.value.func
        if a.value in stop:
            terms.append((sign, a))
        elif (n := number(a.value)) is not None:
            constant += sign * n
        elif func in (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar):
            left, right = operands(a)
            scale = number(a.value.kwargs.get("alpha", a.value.args[2] if len(a.value.args) > 2 else 1))
            if scale is None:
                raise Unsupported
            if func in (aten.sub.Tensor, aten.sub.Scalar):
                scale = -scale
            todo += [(sign * scale, right), (sign, left)]
        elif func in (aten.rsub.Scalar, aten.rsub.Tensor):
            left, right = operands(a)
            todo += [(sign, right), (-sign, left)]
        elif func is aten.neg.default:
            todo.append((-sign, _same_shape(a)))
        else:
            terms.append((sign, a))
    return constant, terms


def close(a: float, b: float) -> bool:
    """Whether two constants are the same number, up to the rounding of the arithmetic that made them."""
    return math.isclose(a, b, rel_tol=1e-6)
