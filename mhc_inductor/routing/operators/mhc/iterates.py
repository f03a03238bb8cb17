# SPDX-License-Identifier: Apache-2.0
"""The matrices of Sinkhorn iterations as numbers: the op's after each step, and data that tells forms apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mhc_inductor.routing.verify import NotRun

CLOSE = 2e-7
"""The relative difference that constants rounded to fp32 may make in fp64."""
_STARTS, _NUMBERS = 8, 12
"""The most matrices that iterations may start from, and numbers that a formula may name."""
Kind = Callable[[Tensor], Tensor]
"""Makes logits [n, n] of one kind from random numbers."""


class Step(NamedTuple):
    """After ``steps`` normalisations of the logits that matrix number ``start`` is; ``transposed``: columns first."""

    start: int
    form: str
    eps: float
    steps: int
    transposed: bool


def iterates(logits: Tensor, form: str, eps: float, most: int) -> Iterator[tuple[int, Tensor]]:
    """Yields (number of normalisations, matrix) of the op's iterations, up to ``most`` normalisations."""
    if form == "softmax":
        c, steps = logits.softmax(-1), 1
        yield steps, c
        c = c + eps
        yield steps, c
    else:
        c, steps = (logits - logits.amax(-1, keepdim=True) if form == "exp" else logits).exp(), 0
    while steps < most:
        total = c.sum(-1 - steps % 2, keepdim=True)
        c, steps = c / (total.clamp(min=eps) if form == "exp" else total + eps), steps + 1
        yield steps, c


def kinds(numbers: Sequence[float]) -> tuple[list[Kind], list[Kind], list[Kind]]:
    """Returns kinds of logits: those on which every form is finite, others, and logits that are not finite.

    Some converge slowly, so that the number of iterations shows. Others bring sums, or the logits themselves, close to
    each of ``numbers``. Raises NotRun for too many of these.
    """
    if len(numbers) > _NUMBERS:
        raise NotRun(f"it names more than {_NUMBERS} numbers")

    def shifted(by: float, rows: slice, columns: slice) -> Kind:
        def made(r: Tensor) -> Tensor:
            r = r.clone()
            r[rows, columns] += by
            return r

        return made

    def past(by: float, turned: bool) -> Kind:
        """A whole row or column, its entries far apart: a bound there makes them equal, which shows however far it is."""

        def made(r: Tensor) -> Tensor:
            (r := r.clone())[0] += by * torch.arange(2, len(r) + 2)
            return r.mT if turned else r

        return made

    every, first, half = slice(None), slice(1), slice(2, None)
    plain: list[Kind] = [lambda r: r, lambda r: 6 * r, lambda r: 1e-3 * r, torch.round]
    plain += [shifted(-40.0, slice(1), slice(1, None))]
    for by in map(math.log, numbers):
        plain += [shifted(by, every, first), shifted(by, first, every), shifted(by, every, every)] * (abs(by) < 100)
    far: list[Kind] = [lambda r: 40 * r, shifted(-60.0, first, half)]
    far += [shifted(by, *at) for by in (-60.0, -1e4) for at in ((every, first), (first, every))]
    far += [past(by, turned) for c in numbers if c > 1 for by in (c, -c) for turned in (False, True)]
    places = (first, first), (first, every), (every, first)
    return plain, far, [shifted(by, *at) for by in (math.nan, math.inf, -math.inf) for at in places]


def samples(kinds: Sequence[Kind], n: int, tokens: int, apart: bool = False) -> Iterator[tuple[list[int], Tensor]]:
    """Yields logits [tokens, n, n] for one run after the other, each kind in one of them, with the kinds of the tokens.

    If kinds are wanted ``apart``, all tokens of a run are of one kind.
    """
    one = [[k] * tokens for k in range(len(kinds))]
    mixed = [[(start + k) % len(kinds) for k in range(tokens)] for start in range(0, len(kinds), tokens)]
    for seed, which in enumerate(one if apart else mixed):
        g = torch.Generator().manual_seed(seed)
        yield which, torch.stack([kinds[k](torch.randn(n, n, generator=g, dtype=torch.float64)) for k in which])


class Forms(NamedTuple):
    """What the op's iterations are tried with: forms, numbers of which some may be eps, and the most normalisations."""

    forms: Sequence[str]
    numbers: Sequence[float]
    most: int

    def each(self, logits: Tensor) -> Iterator[tuple[str, float, int, Tensor]]:
        """Yields (form, eps, number of normalisations, matrix) of the op's iterations of ``logits``."""
        for form in self.forms:
            for eps in (0.0, *(c for c in self.numbers if c < 1)):
                yield from ((form, eps, steps, c) for steps, c in iterates(logits, form, eps, self.most))


def explained(
    values: Sequence[Tensor], first: Tensor, starts: Sequence[int], forms: Forms
) -> Iterator[dict[int, Step]]:
    """Yields the step that each matrix is, by its number, if iterations start from one of ``starts``, from the next, ...

    ``values`` are all matrices [tokens, n, n] in order; ``first`` are the tokens that are compared first.
    """
    for start in starts[:_STARTS]:
        rest, found = torch.stack([*values[start + 1 :]]), dict[int, Step]()
        for turned in (False, True):
            logits, mine = (values[start].mT, rest.mT) if turned else (values[start], rest)
            some = mine[:, first]
            for form, eps, steps, c in forms.each(logits):
                near = (some - c[first]).abs().amax((1, 2, 3)) <= CLOSE
                for i in near.nonzero().flatten().tolist():
                    at, known = start + 1 + i, found.get(start + 1 + i)
                    # A first step over what is normalised already changes nothing: whole iterations are wanted.
                    if (known is None or (known.steps % 2 and not steps % 2)) and off(mine[i], c) <= CLOSE:
                        found[at] = Step(start, form, eps, steps, turned)
        yield found


def nearest(values: Sequence[Tensor], forms: Forms) -> str:
    """Returns which of the op's matrices is nearest to the last of ``values``, in words."""
    each = ((off(values[-1], c), form, eps, steps) for form, eps, steps, c in forms.each(values[0]) if not steps % 2)
    error, form, eps, steps = min(each)
    return f"the nearest is {form}, eps = {eps:g}, {steps // 2} iterations, {error:.1e} off"


def off(theirs: Tensor, mine: Tensor, size: Tensor | None = None) -> float:
    """Returns the largest difference among matrices of which ``theirs`` is finite; infinite where ``mine`` is not.

    It is relative to ``size``, or to the element: all that Sinkhorn iterations do to positive numbers keeps their digits.
    """
    finite = theirs.isfinite().all(-1).all(-1)
    a, b = theirs[finite], mine[finite]
    size = torch.maximum(a.abs(), b.abs()) if size is None else size[finite]
    apart = (a - b).abs() / size.clamp(min=1e-200)
    return float(apart.nan_to_num(math.inf, math.inf).amax()) if bool(finite.any()) else math.inf
