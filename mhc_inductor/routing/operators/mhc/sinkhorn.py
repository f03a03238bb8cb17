"""Sinkhorn iterations in normal form: a chain of steps, each dividing a matrix by its own row or column sums."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable

from mhc_inductor.routing.graph.expressions import (
    Ref,
    addends,
    aten,
    close,
    contraction,
    number,
    operands,
    peel,
    product,
    reduction,
    step,
    whole,
)
from mhc_inductor.routing.graph.index import Index, Size, Unsupported, Var, var
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.operator import Mismatch
from mhc_inductor.routing.operators.mhc.formula import COLUMNS, ROWS, square_matrices
from mhc_inductor.routing.operators.mhc.scalings import Scalings
from mhc_inductor.routing.operators.selection.elements import constant_of

_DIM = {ROWS: "-1", COLUMNS: "-2"}


@dataclasses.dataclass(frozen=True)
class Chain:
    """``logits`` after the normalisations ``axes`` (each the dim summed over), by softmax or by exp."""

    logits: Value
    form: str
    axes: tuple[int, ...]
    eps: float | None = None
    shift: int | None = None
    shifted: Value | None = None
    """What exp is of, if something is subtracted from the logits; ``steady``: the dims along which that is constant."""
    steady: tuple[int, ...] = (ROWS, COLUMNS)
    log: bool = False
    eps_added: bool = False

    @property
    def transposed(self) -> bool:
        """Whether the first normalisation is over columns: the iterations of the transposed logits."""
        return self.axes[:1] == (COLUMNS,)

    @property
    def iters(self) -> int | None:
        """The number of iterations, None in the middle of one or where eps does not fit the form."""
        if self.log or not self.axes or len(self.axes) % 2:
            return None
        if self.form == "softmax" and (self.eps or 0.0) > 0.0 and not self.eps_added:
            return None
        return len(self.axes) // 2

    @property
    def words(self) -> str:
        """The form and eps, for a report."""
        return f"{self.form}, eps = {self.eps or 0.0:g}"


class Chains:
    """The chains that end at values, found once each."""

    def __init__(self) -> None:
        self._of: dict[Value, Chain | Mismatch | None] = {}
        self.scalings = Scalings()

    def of(self, value: Value) -> Chain | None:
        """The chain that ends at ``value``, or None. Raises Mismatch where a step of a chain does not fit."""
        if value not in self._of:
            try:
                self._of[value] = self._find(value)
            except Mismatch as mismatch:
                self._of[value] = mismatch
            except Unsupported:
                self._of[value] = None
        found = self._of[value]
        if isinstance(found, Mismatch):
            raise found
        return found

    def _find(self, value: Value) -> Chain | None:
        out = whole(value)
        ref = peel(out) if square_matrices(value) else out
        if not square_matrices(value) or ref.index != out.index:
            return None
        func = ref.value.func
        if func in (aten._softmax.default, aten.softmax.int):
            dim = _axis(ref.value, ref.value.args[1])
            return None if dim is None else Chain(_named(ref.value.args[0]), "softmax", (dim,))
        if func in (aten._log_softmax.default, aten.log_softmax.int):
            return self._log_step(ref.value.args[0], _axis(ref.value, ref.value.args[1]))
        if func is aten.exp.default:
            return self._exp(Ref(ref.value.args[0], ref.index))
        if func in (aten.add.Tensor, aten.add.Scalar):
            return self._plus_eps(ref) or self._potentials(ref)
        if func is aten.sub.Tensor:
            return self._less_logsumexp(ref) or self._potentials(ref)
        return self._quotient(ref) if func in (aten.div.Tensor, aten.mul.Tensor) else None

    def _quotient(self, ref: Ref) -> Chain | None:
        """A matrix divided by its sums, in one step or with the factors of all steps."""
        chain = mismatch = None
        try:
            chain = self._normalised(ref)
        except Mismatch as error:
            mismatch = error
            if any(self._of.get(a.value) is mismatch for a in operands(ref) if isinstance(a, Ref)):
                raise  # a step before this one does not fit
        if chain is None:
            chain, halfway = self._scaled(ref)
            if chain is None and mismatch is not None and not halfway:
                raise mismatch
        return chain

    def _normalised(self, ref: Ref) -> Chain | None:
        """A matrix divided by its sums, or times their reciprocals."""
        left, right = operands(ref)
        if ref.value.func is aten.div.Tensor:
            return self._divided(left, right) if isinstance(left, Ref) and isinstance(right, Ref) else None
        for a, b in ((left, right), (right, left)):
            if isinstance(a, Ref) and isinstance(b, Ref) and self.of(a.value) is not None:
                inverse = _inverse(b)
                if inverse is not None:
                    return self._divided(a, inverse)
        return None

    def _scaled(self, ref: Ref) -> tuple[Chain | None, bool]:
        """The chain of :mod:`.scalings` that ``ref`` is, and whether it is on the way to one."""
        known = self.scalings.of(ref)
        if known is None or not known.axes:
            return None, known is not None
        chain = self.of(known.matrix)
        if chain is None or chain.form != "exp" or chain.axes:
            return None, False
        return dataclasses.replace(_unshifted(chain, known.axes[0]), axes=known.axes, eps=0.0), False

    def _log_step(self, logits: Value, dim: int | None) -> Chain | None:
        if dim is None:
            return None
        before = self.of(_named(logits))
        if before is not None and before.log:
            return dataclasses.replace(before, axes=_next(before, dim, logits))
        return Chain(_named(logits), "exp", (dim,), eps=0.0, log=True)

    def _less_logsumexp(self, ref: Ref) -> Chain | None:
        """``t - logsumexp(t)``: a log-softmax written out."""
        if len(ref.value.args) != 2:
            return None
        logits, total = operands(ref)
        if not isinstance(logits, Ref) or not isinstance(total, Ref):
            return None
        total = peel(total)
        if total.value.func is not aten.logsumexp.default:
            return None
        dim, summand = _logsumexp(total, logits)
        return self._log_step(logits.value, dim) if summand is not None and peel(summand) == peel(logits) else None

    def _potentials(self, ref: Ref) -> Chain | None:
        """``t + u + v``, the iterations as one addend for the rows and one for the columns, in the log domain.

        Each is ``-logsumexp(t + the other)``. What is constant along the dim of a logsumexp cancels in the step.
        """
        axes: list[int] = []
        own = _addends(ref)
        while own[0] == 0.0 and len(own[1]) > 1:
            found = _last_step(ref, own[1], axes[-1] if axes else None)
            if found is None:
                return None
            axes.append(found[0])
            own = found[1]
        if not axes or own[0] != 0.0 or len(own[1]) != 1 or own[1][0][0] != 1.0:
            return None
        logits = own[1][0][1]
        if logits.index != ref.index or any(a == b for a, b in itertools.pairwise(axes)):
            return None
        return Chain(_named(logits.value), "exp", tuple(reversed(axes)), eps=0.0, log=True)

    def _exp(self, ref: Ref) -> Chain | None:
        inner = self.of(_named(ref.value))
        if inner is not None:
            return dataclasses.replace(inner, log=False) if inner.log else None
        argument = peel(ref)
        if argument.value.func is aten.sub.Tensor and len(argument.value.args) == 2:
            logits, top = operands(argument)
            if isinstance(logits, Ref) and isinstance(top, Ref) and square_matrices(logits.value):
                steady = tuple(d for d in (ROWS, COLUMNS) if _along(top, logits, d))
                if steady:
                    peak, whole_ = _maximum(top, logits), _named(ref.value)
                    return Chain(_named(logits.value), "exp", (), shift=peak, shifted=whole_, steady=steady)
        return Chain(_named(ref.value), "exp", ())

    def _plus_eps(self, ref: Ref) -> Chain | None:
        a, b = operands(ref)
        inner, eps = (a, b) if isinstance(a, Ref) else (b, a)
        if not isinstance(inner, Ref) or not isinstance(eps, float):
            return None
        before = self.of(inner.value)
        if before is not None and before.form == "exp" and len(before.axes) == 1 and before.eps == 0.0:
            # exp divided by its sums is a softmax.
            before = dataclasses.replace(before, form="softmax", eps=None)
        if before is None or before.form != "softmax":
            return None
        if before.log or len(before.axes) != 1 or before.eps is not None or eps < 0.0:
            raise Mismatch(
                f"{eps:g} is added within the sinkhorn iterations; expected once, after the softmax", ref.value
            )
        return dataclasses.replace(before, eps=eps, eps_added=True)

    def _divided(self, numerator: Ref, divisor: Ref) -> Chain | None:
        before = self.of(numerator.value)
        if before is None or before.log:
            return None
        summed, kind, eps = _divisor(divisor)
        if summed is None:
            raise Mismatch(
                "a matrix of the sinkhorn iterations is divided by something else than its own sums", divisor.value
            )
        dim = _own_sums(numerator, summed)
        before = _with_eps(before, kind, eps, divisor.value)
        if before.form == "exp" and not before.axes and eps == 0.0:
            before = _unshifted(before, dim)
        elif before.form == "exp" and not before.axes and before.shift != dim:
            what = f"their maximum over {f'dim {_DIM[before.shift]}' if before.shift is not None else 'nothing'}"
            if before.shift is None and before.shifted is not None:
                what = "something else than their maximum"
            raise Mismatch(f"exp is of the logits less {what}; expected dim {_DIM[dim]}", divisor.value)
        return dataclasses.replace(before, axes=_next(before, dim, summed.value))


def iterated(matrices: Iterable[Value]) -> list[list[Value]]:
    """Returns each matrix with what is left of it after one, two, ... divisions by its own sums, whatever is added to them.

    ``matrices`` are in the order of the graph. Softmax over rows or columns is such a division too.
    """
    runs: dict[Value, list[Value]] = {}
    ended: dict[Value, list[Value]] = {}
    for value in matrices:
        with contextlib.suppress(Unsupported):
            ref = bare(whole(value))
            before = _before(ref) if ref.value not in runs else None
            if before is not None:
                ended.pop(before, None)
                runs[ref.value] = ended[ref.value] = [*runs.get(before, [before]), value]
    return [*ended.values()]


def _before(ref: Ref) -> Value | None:
    """The matrix that ``ref`` is, divided by its own row or column sums."""
    value, pairs = ref.value, list[tuple[Ref | float, Ref | float]]()
    if value.func in (aten._softmax.default, aten.softmax.int):
        return bare(whole(value.args[0])).value if _axis(value, value.args[1]) is not None else None
    if value.func is aten.div.Tensor:
        left, right = operands(ref)
        pairs = [(left, right)]
    elif value.func is aten.mul.Tensor:
        left, right = operands(ref)
        pairs = [(a, inverse) for a, b in ((left, right), (right, left)) if (inverse := _inverse(b)) is not None]
    for a, b in pairs:
        summed = _divisor(b)[0] if isinstance(a, Ref) and isinstance(b, Ref) else None
        found = _summation(summed) if summed is not None else None
        if found is not None and isinstance(a, Ref) and bare(found[0]).value is bare(a).value:
            return bare(a).value
    return None


def bare(ref: Ref) -> Ref:
    """Returns ``ref`` without views, casts, and numbers that are added to it or bound it."""
    while True:
        ref = peel(ref)
        low = _bounded(ref)
        terms = addends(ref)[1] if low is None else [(1.0, low[0])]
        if len(terms) != 1 or terms[0][0] != 1.0 or terms[0][1] == ref:
            return ref
        ref = terms[0][1]


def _inverse(ref: Ref | float) -> Ref | None:
    """u of ``1 / u``."""
    term = product(ref) if isinstance(ref, Ref) else None
    if term is None or term.coef != 1.0 or len(term.factors) != 1 or term.factors[0][1] != -1.0:
        return None
    return term.factors[0][0]


def _own_sums(numerator: Ref, summed: Ref) -> int:
    """The dim over which ``summed`` is the sum of the matrix ``numerator``. Raises Mismatch."""
    found = _summation(summed)
    assert found is not None
    summand, bound, scale = found
    summand = peel(summand, {numerator.value})
    if summand.value.func is aten.abs.default and summand.value is not numerator.value:
        summand = peel(Ref(summand.value.args[0], summand.index), {numerator.value})
    if scale != 1.0 or len(bound) != 1:
        raise Mismatch("a matrix of the sinkhorn iterations is not divided by its row or column sums", summed.value)
    dim = _summed_dim(numerator, summand, bound[0])
    if dim is None:
        raise Mismatch("a matrix of the sinkhorn iterations is not divided by its own row or column sums", summed.value)
    return dim


def _with_eps(chain: Chain, kind: str, eps: float, divisor: Value) -> Chain:
    """``chain`` with the eps of a step, added to its sums or a bound of them. Raises Mismatch."""
    if chain.form == "softmax":
        if kind == "max":
            raise Mismatch("sums after a softmax are clamped; expected sum + eps", divisor)
        if chain.eps is None and len(chain.axes) == 1:
            chain = dataclasses.replace(chain, eps=0.0)
    elif kind == "add":
        raise Mismatch("eps is added to sums after exp; expected max(sum, eps)", divisor)
    if chain.eps is None:
        return dataclasses.replace(chain, eps=eps)
    if not close(chain.eps, eps):
        raise Mismatch(f"eps is {eps:g} in one step of the sinkhorn iterations and {chain.eps:g} in another", divisor)
    return chain


_Addends = tuple[float, list[tuple[float, Ref]]]


def _last_step(ref: Ref, own: list[tuple[float, Ref]], steady: int | None) -> tuple[int, _Addends] | None:
    """(dim, what was there before) of the step that one of the addends ``own`` of ``ref`` is."""
    for term in own:
        sign, total = term
        if sign != -1.0 or total.value.func is not aten.logsumexp.default:
            continue
        dim, summand = _logsumexp(total, ref)
        if dim is None or summand is None:
            continue
        before = _addends(summand)
        rest = [t for t in own if t is not term]
        apart = [t for t in (*before[1], *rest) if not (t in before[1] and t in rest)]
        if before[0] == 0.0 and all(steady is not None and _along(t, ref, steady) for _, t in apart):
            return dim, before
    return None


def _unshifted(chain: Chain, dim: int) -> Chain:
    """``chain`` before its first sums: where they do not cancel what is subtracted, that is part of the logits."""
    return chain if dim in chain.steady else dataclasses.replace(chain, logits=chain.shifted or chain.logits)


def _next(chain: Chain, dim: int, value: Value) -> tuple[int, ...]:
    if chain.axes and chain.axes[-1] == dim:
        if chain.form == "softmax" and len(chain.axes) == 1:
            other = ROWS if dim == COLUMNS else COLUMNS
            raise Mismatch(f"h_res is softmaxed over dim {_DIM[dim]}; expected {_DIM[other]}", value)
        raise Mismatch(f"two sinkhorn steps in a row sum over dim {_DIM[dim]}", value)
    return (*chain.axes, dim)


def _addends(ref: Ref) -> tuple[float, list[tuple[float, Ref]]]:
    """Without the zeros that the iterations start from."""
    constant, terms = addends(ref)
    return constant, [t for t in terms if constant_of(t[1].value) != 0.0]


def _logsumexp(total: Ref, like: Ref) -> tuple[int | None, Ref | None]:
    """(dim, summand) of a logsumexp over rows or columns: its operand's element at the indices of ``like``."""
    operand, dims = total.value.args[:2]
    dims = [dims] if isinstance(dims, int) else list(dims)
    rank = len(operand.shape)
    if len(dims) != 1 or rank != len(like.index):
        return None, None
    at = dims[0] % rank
    index = list(total.index)
    if len(index) == rank:
        del index[at]
    if index != [i for d, i in enumerate(like.index) if d != at]:
        return None, None
    return _axis(operand, dims[0]), Ref(operand, like.index)


def _along(ref: Ref, like: Ref, dim: int) -> bool:
    """Whether ``ref`` is the same for all elements of ``like`` along a dim."""
    varying = like.index[dim].variables()
    return not any(varying & i.variables() for i in peel(ref).index)


def _axis(value: Value, dim: int) -> int | None:
    at = dim % len(value.shape) - len(value.shape)
    return at if at in (ROWS, COLUMNS) else None


def _named(value: Value) -> Value:
    """``value``, or what it is a cast of, as far as a node of the graph."""
    ref = whole(value)
    while ref.value.node is None:
        inner = step(ref)
        if inner is None or inner.index != ref.index:
            break
        ref = inner
    return ref.value


def _maximum(top: Ref, logits: Ref) -> int | None:
    """The dim over which ``top`` is the maximum of ``logits``, detached or not: its gradient cancels."""
    top = peel(top)
    while top.value.func is aten.detach.default:
        top = peel(Ref(top.value.args[0], top.index))
    if top.value.func is not aten.amax.default and (top.value.func is not aten.max.dim or top.value.out != 0):
        return None
    operand = whole(top.value.args[0])
    while operand.value.func is aten.detach.default:
        operand = Ref(operand.value.args[0], operand.index)
    given = top.value.args[1] if len(top.value.args) > 1 else ()
    dims: list[int] = [given] if isinstance(given, int) else list(given)
    same = Ref(logits.value, operand.index) if len(operand.index) == len(logits.index) else None
    if same is None or len(dims) != 1 or peel(operand) != peel(same):
        return None
    return _axis(operand.value, dims[0])


def _summation(ref: Ref) -> tuple[Ref, list[Var], float] | None:
    """(summand, bound variables, factor) of a sum, a mean or a product with a matrix of ones."""
    contracted = contraction(ref)
    if contracted is None:
        return reduction(ref)
    left, right, k = contracted
    for ones, summand in ((left, right), (right, left)):
        if constant_of(peel(ones).value) == 1.0:
            return summand, [k], 1.0
    return None


def _divisor(ref: Ref) -> tuple[Ref | None, str, float]:
    """(the sum, "add" or "max" or "", eps) of ``sum + eps``, ``max(sum, eps)`` or a bare sum."""
    ref = peel(ref)
    low = _bounded(ref)
    if low is not None:
        return (low[0], "max", low[1]) if _summation(low[0]) is not None else (None, "", 0.0)
    eps, terms = addends(ref)
    if len(terms) != 1 or terms[0][0] != 1.0 or eps < 0.0 or _summation(terms[0][1]) is None:
        return None, "", 0.0
    return terms[0][1], "add" if eps else "", eps


def _bounded(ref: Ref) -> tuple[Ref, float] | None:
    """(element, least) of what is no less than a number."""
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


def _summed_dim(numerator: Ref, summand: Ref, bound: Var) -> int | None:
    if summand.value is not numerator.value:
        numerator = peel(numerator)
        summand = peel(summand)
        if summand.value is not numerator.value:
            return None
    expected: Index = var(bound)
    differing = [d for d, (a, b) in enumerate(zip(numerator.index, summand.index, strict=True)) if a != b]
    if len(differing) != 1 or summand.index[differing[0]] != expected:
        return None
    at = differing[0] - len(numerator.index)
    return at if at in (ROWS, COLUMNS) and bound.size != Size(1) else None
