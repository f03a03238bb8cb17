# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn iterations in normal form: a chain of steps, each dividing a matrix by its own row or column sums."""

from __future__ import annotations

import dataclasses
import itertools
import math

from mhc_inductor.routing.graph.expressions import Ref, addends, aten, close, operands, peel, summed, whole
from mhc_inductor.routing.graph.index import Unsupported
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.elements import constant_of
from mhc_inductor.routing.operators.mhc.formula import COLUMNS, ROWS, square_matrices
from mhc_inductor.routing.operators.mhc.normalisation import (
    DIM_NAMES,
    axis_of,
    constant_along,
    dim_summed,
    divisor_of,
    inverse_of,
    logsumexp_of,
    maximum_of,
    named_value,
    sum_of,
)
from mhc_inductor.routing.operators.mhc.scalings import Scalings

_ROUNDED = 1e-6
"""The largest logarithm of a factor that is 1 but for rounding: log n is often computed in fp32."""
ONE_LOG = "there is one Sinkhorn iteration in the log domain, of logits of which exp may be 0; expected two or more"


@dataclasses.dataclass(frozen=True)
class Chain:
    """``logits`` after a softmax or an exp and the normalisations ``axes``, each given by the dim summed over."""

    logits: Value
    form: str
    axes: tuple[int, ...]
    eps: float | None = None
    shift: int | None = None
    shifted: Value | None = None
    """The argument of exp, where something is subtracted from the logits."""
    steady: tuple[int, ...] = (ROWS, COLUMNS)
    """The dims along which the subtracted value is constant."""
    log: bool = False
    wide: bool = False
    """Whether the first log-domain iteration is among ``axes``: its columns may be larger than the range of exp."""
    read: Value | None = None
    """What the model reads, where it computes the first iteration as addends: ``logits`` are computed from it."""
    eps_added: bool = False
    offset: float = 0.0
    """The logarithm of a number that multiplies the matrix, as log marginals do."""

    @property
    def transposed(self) -> bool:
        """Whether the first normalisation is over columns, as in iterations on the transposed logits."""
        return self.axes[:1] == (COLUMNS,)

    @property
    def iters(self) -> int | None:
        """The number of iterations; None within an iteration, in the log domain, or where eps does not fit the form.

        None too where the sums are another number than 1.
        """
        if self.log or self.wide or not self.axes or len(self.axes) % 2 or abs(self.offset) > _ROUNDED:
            return None
        if self.form == "softmax" and (self.eps or 0.0) > 0.0 and not self.eps_added:
            return None
        return len(self.axes) // 2

    @property
    def words(self) -> str:
        """The form and eps as text for reports."""
        return f"{self.form}, eps = {self.eps or 0.0:g}"


class Chains:
    """Finds the chains that end at values, each once."""

    def __init__(self) -> None:
        self._of: dict[Value, Chain | Mismatch | None] = {}
        self.scalings = Scalings()

    def of(self, value: Value) -> Chain | None:
        """Returns the chain that ends at ``value``, or None. Raises Mismatch where a step of a chain does not fit."""
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
            return self._softmax(ref.value.args[0], axis_of(ref.value, ref.value.args[1]))
        if func in (aten._log_softmax.default, aten.log_softmax.int):
            return self._log_step(ref.value.args[0], axis_of(ref.value, ref.value.args[1]))
        if func is aten.exp.default:
            return self._exp(Ref(ref.value.args[0], ref.index))
        if func in (aten.add.Tensor, aten.add.Scalar):
            return self._plus_number(ref) or self._plus_eps(ref) or self._potentials(ref)
        if func is aten.sub.Tensor:
            return self._plus_number(ref) or self._less_logsumexp(ref) or self._potentials(ref)
        if func in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
            return self._times_number(ref) or self._quotient(ref)
        return None

    def _times_number(self, ref: Ref) -> Chain | None:
        """Returns the chain of a matrix of log-domain iterations times a positive number, or None."""
        sides = operands(ref)
        inner, number = next((a for a in sides if isinstance(a, Ref)), None), _number(ref)
        before = self.of(inner.value) if inner is not None and number is not None else None
        if before is None or number is None or before.log or not before.offset:
            return None
        return dataclasses.replace(before, offset=before.offset + math.log(number))

    def _plus_number(self, ref: Ref) -> Chain | None:
        """Returns the chain of a matrix of log-domain iterations plus a number, such as a log marginal, or None."""
        (sign, inner), (weight, number) = summed(ref) or [(0.0, 0.0)] * 2
        before = self.of(inner.value) if sign == 1.0 and isinstance(inner, Ref) and isinstance(number, float) else None
        if before is None or not before.log or not isinstance(number, float):
            return None
        return dataclasses.replace(before, offset=before.offset + weight * number)

    def _quotient(self, ref: Ref) -> Chain | None:
        """Returns the chain of a matrix divided by its sums, step by step or by the factors of all steps, or None."""
        chain = mismatch = None
        try:
            chain = self._normalised(ref)
        except Mismatch as error:
            mismatch = error
            if any(self._of.get(a.value) is mismatch for a in operands(ref) if isinstance(a, Ref)):
                raise  # an earlier step does not fit
        if chain is None:
            chain, halfway = self._scaled(ref)
            if chain is None and mismatch is not None and not halfway:
                raise mismatch
        return chain

    def _normalised(self, ref: Ref) -> Chain | None:
        """Returns the chain of a matrix divided by its sums, or multiplied by their reciprocals; None without one."""
        left, right = operands(ref)
        if ref.value.func is aten.div.Tensor:
            return self._divided(left, right) if isinstance(left, Ref) and isinstance(right, Ref) else None
        for a, b in ((left, right), (right, left)):
            if isinstance(a, Ref) and isinstance(b, Ref) and self.of(a.value) is not None:
                inverse = inverse_of(b)
                if inverse is not None:
                    return self._divided(a, inverse)
        return None

    def _scaled(self, ref: Ref) -> tuple[Chain | None, bool]:
        """Returns the chain that ``ref`` is in scaling form, or None, and whether it is an intermediate of one."""
        known = self.scalings.of(ref)
        if known is None or not known.axes:
            return None, known is not None
        chain = self.of(known.matrix)
        if chain is None or chain.form != "exp" or chain.axes:
            return None, False
        return dataclasses.replace(_unshifted(chain, known.axes[0]), axes=known.axes, eps=0.0), False

    def _softmax(self, logits: Value, dim: int | None) -> Chain | None:
        """Returns the chain of a softmax, which may be the last step and the exp of log-domain iterations, or None."""
        chain = self._log_step(logits, dim)
        begins = chain is not None and chain.wide and len(chain.axes) == 1
        return Chain(chain.logits, "softmax", chain.axes) if begins and chain is not None else _exponential(chain)

    def _log_step(self, logits: Value, dim: int | None) -> Chain | None:
        if dim is None:
            return None
        before = self.of(named_value(logits))
        first = before is not None and before.log and before.wide and len(before.axes) == 2
        if before is not None and before.log and not first:
            return dataclasses.replace(before, axes=_next(before, dim, logits), offset=0.0)
        return Chain(named_value(logits), "exp", (dim,), eps=0.0, log=True, wide=not first)

    def _less_logsumexp(self, ref: Ref) -> Chain | None:
        """Returns the chain of ``t - logsumexp(t)``, a log-softmax written out, or None."""
        if len(ref.value.args) != 2:
            return None
        logits, total = operands(ref)
        if not isinstance(logits, Ref) or not isinstance(total, Ref):
            return None
        total = peel(total)
        if total.value.func is not aten.logsumexp.default:
            return None
        dim, summand = logsumexp_of(total, logits)
        return self._log_step(logits.value, dim) if summand is not None and peel(summand) == peel(logits) else None

    def _potentials(self, ref: Ref) -> Chain | None:
        """Returns the chain of ``t + u + v``: log-domain iterations with one addend for rows and one for columns.

        Each addend is ``-logsumexp(t + the other)``. A term that is constant along the dim of a logsumexp cancels.
        """
        axes, sums, own = list[int](), list[Value](), _addends(ref)
        offset = own[0]
        while len(own[1]) > 1 and (found := _last_step(ref, own[1], axes[-1] if axes else None)) is not None:
            offset -= 0.0 if axes else found[1][0]  # numbers before the last step cancel
            axes.append(found[0])
            sums.append(found[2].value)
            own = found[1]
        if not axes or any(a == b for a, b in itertools.pairwise(axes)):
            return None
        read, wide = _start(sums[-1]), len(axes) <= 2
        logits, axes = (read, axes) if wide else (named_value(sums[-3]), axes[:-2])
        if wide and (len(read.shape) != len(ref.index) or _addends(Ref(read, ref.index))[1] != own[1]):
            return None
        return Chain(logits, "exp", (*axes[::-1],), 0.0, log=True, wide=wide, read=read, offset=offset)

    def _exp(self, ref: Ref) -> Chain | None:
        inner = self.of(named_value(ref.value))
        if inner is not None:
            return _exponential(inner) if inner.log else None
        argument = peel(ref)
        if argument.value.func is aten.sub.Tensor and len(argument.value.args) == 2:
            logits, top = operands(argument)
            if isinstance(logits, Ref) and isinstance(top, Ref) and square_matrices(logits.value):
                steady = tuple(d for d in (ROWS, COLUMNS) if constant_along(top, logits, d))
                if steady:
                    peak, whole_ = maximum_of(top, logits), named_value(ref.value)
                    return Chain(named_value(logits.value), "exp", (), shift=peak, shifted=whole_, steady=steady)
        return Chain(named_value(ref.value), "exp", ())

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
                f"{eps:g} is added within the Sinkhorn iterations; expected once, right after the softmax", ref.value
            )
        return dataclasses.replace(before, eps=eps, eps_added=True)

    def _divided(self, numerator: Ref, divisor: Ref) -> Chain | None:
        before = self.of(numerator.value)
        if before is None or before.log:
            return None
        summed, kind, eps = divisor_of(divisor)
        if summed is None:
            raise Mismatch(
                "a Sinkhorn iteration divides the matrix by a value other than its own row or column sums",
                divisor.value,
            )
        dim = _own_sums(numerator, summed)
        before = _with_eps(before, kind, eps, divisor.value)
        if before.form == "exp" and not before.axes and eps == 0.0:
            before = _unshifted(before, dim)
        elif before.form == "exp" and not before.axes and before.shift != dim:
            raise Mismatch(
                f"{_shift_words(before, eps)}; expected minus their maximum over dim {DIM_NAMES[dim]}", divisor.value
            )
        offset = 0.0 if eps == 0.0 else before.offset  # its own sums take a factor away, but not from eps
        return dataclasses.replace(before, axes=_next(before, dim, summed.value), offset=offset)


def _shift_words(chain: Chain, eps: float) -> str:
    """Returns what exp is taken of, where its sums are bounded by ``eps`` and so depend on what was subtracted."""
    if chain.shift is not None:
        return f"exp is taken of the logits minus their maximum over dim {DIM_NAMES[chain.shift]}"
    if chain.shifted is not None:
        return "exp is taken of the logits minus something else than their maximum"
    return f"exp is taken of the logits as they are and eps = {eps:g} bounds its sums"


def _own_sums(numerator: Ref, summed: Ref) -> int:
    """Returns the dim over which ``summed`` is the sum of the matrix ``numerator``. Raises Mismatch."""
    found = sum_of(summed)
    assert found is not None
    summand, bound, scale = found
    summand = peel(summand, {numerator.value})
    if summand.value.func is aten.abs.default and summand.value is not numerator.value:
        summand = peel(Ref(summand.value.args[0], summand.index), {numerator.value})
    if scale != 1.0 or len(bound) != 1:
        raise Mismatch("a matrix of the sinkhorn iterations is not divided by its row or column sums", summed.value)
    dim = dim_summed(numerator, summand, bound[0])
    if dim is None:
        raise Mismatch("a matrix of the sinkhorn iterations is not divided by its own row or column sums", summed.value)
    return dim


def _with_eps(chain: Chain, kind: str, eps: float, divisor: Value) -> Chain:
    """Returns ``chain`` with the eps of a step, which is added to the sums or bounds them. Raises Mismatch."""
    if chain.form == "softmax":
        if kind == "max":
            raise Mismatch("sums after a softmax are clamped; expected sum + eps", divisor)
        if chain.eps is None and len(chain.axes) == 1:
            chain = dataclasses.replace(chain, eps=0.0)
    elif kind == "add" and not chain.axes:
        chain = dataclasses.replace(chain, form="exp_eps", logits=chain.shifted or chain.logits)
    elif (kind == "add") != (chain.form == "exp_eps") and eps:
        raise Mismatch("eps is added to some sums after exp and bounds others", divisor)
    if chain.eps is None:
        return dataclasses.replace(chain, eps=eps)
    if not close(chain.eps, eps):
        raise Mismatch(f"eps is {eps:g} in one step of the sinkhorn iterations and {chain.eps:g} in another", divisor)
    return chain


_Addends = tuple[float, list[tuple[float, Ref]]]


def _last_step(ref: Ref, own: list[tuple[float, Ref]], steady: int | None) -> tuple[int, _Addends, Ref] | None:
    """Returns (dim, addends before it, their sum) of the last step, one of the addends ``own`` of ``ref``, or None."""
    for term in own:
        sign, total = term
        if sign != -1.0 or total.value.func is not aten.logsumexp.default:
            continue
        dim, summand = logsumexp_of(total, ref)
        if dim is None or summand is None:
            continue
        before = _addends(summand)
        rest = [t for t in own if t is not term]
        apart = [t for t in (*before[1], *rest) if not (t in before[1] and t in rest)]
        if all(steady is not None and constant_along(t, ref, steady) for _, t in apart):
            return dim, before, summand
    return None


def _start(value: Value) -> Value:
    """Returns ``value`` without the constants that are added to it, such as the zeros that iterations start from."""
    sides = [a for _, a in summed(whole(value)) or () if isinstance(a, Ref) and constant_of(peel(a).value) is None]
    return _start(sides[0].value) if len(sides) == 1 else named_value(value)


def _exponential(chain: Chain | None) -> Chain | None:
    """Returns the chain of exp of log-domain iterations. Raises Mismatch where the op would take exp of their logits.

    A column of exp of logits may be 0. After an iteration each row and column has an element of 1 / n**2 or more.
    """
    if chain is not None and chain.wide and len(chain.axes) > 1:
        raise Mismatch(ONE_LOG, chain.logits)
    return None if chain is None else dataclasses.replace(chain, log=False, wide=False)


def _unshifted(chain: Chain, dim: int) -> Chain:
    """Returns ``chain`` before its first sums; a subtracted value that they do not cancel joins the logits."""
    return chain if dim in chain.steady else dataclasses.replace(chain, logits=chain.shifted or chain.logits)


def _next(chain: Chain, dim: int, value: Value) -> tuple[int, ...]:
    if chain.axes and chain.axes[-1] == dim:
        if chain.form == "softmax" and len(chain.axes) == 1:
            if chain.eps == 0.0 and not chain.eps_added:
                return chain.axes  # the sums are 1 already
            other = ROWS if dim == COLUMNS else COLUMNS
            raise Mismatch(f"h_res is softmaxed over dim {DIM_NAMES[dim]}; expected {DIM_NAMES[other]}", value)
        raise Mismatch(f"two sinkhorn steps in a row sum over dim {DIM_NAMES[dim]}", value)
    return (*chain.axes, dim)


def _addends(ref: Ref) -> tuple[float, list[tuple[float, Ref]]]:
    """Returns the addends of ``ref``, with those of one value, such as zeros to start from and marginals, as numbers."""
    constant, terms = addends(ref)
    known = [(sign, t, constant_of(t.value)) for sign, t in terms]
    constant += sum(sign * number for sign, _, number in known if number is not None)
    return constant, [(sign, t) for sign, t, number in known if number is None]


def _number(ref: Ref) -> float | None:
    """Returns the positive number that an element is multiplied by, or None."""
    a, b = operands(ref)
    divides = ref.value.func in (aten.div.Tensor, aten.div.Scalar)
    number = b if isinstance(b, float) else a if isinstance(a, float) and not divides else None
    if number is None or number <= 0.0:
        return None
    return 1 / number if divides else number
