# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn iterations, found by running: what a graph computes of logits alone, next to the op's iterations.

No spelling is read. The op's matrices after each step, in each of its forms and with each number of the graph as eps, are
compared with every matrix of the graph; where one is the last of whole iterations, so are gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from mhc_inductor import compat
from mhc_inductor.routing.edit import node_of
from mhc_inductor.routing.extract import Piece
from mhc_inductor.routing.fp64 import Exact
from mhc_inductor.routing.graph.expressions import aten
from mhc_inductor.routing.graph.index import ONE, Size, product_of
from mhc_inductor.routing.graph.values import Value, example, random
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.mhc.formula import square_matrices
from mhc_inductor.routing.region import Region, cut, fix, numbers_in, piece_of, root_of
from mhc_inductor.routing.verify import NotRun, interpreted, said

UNFINISHED = "the last Sinkhorn iteration divides by the sums over one dim only; expected rows and columns"
ONCE = "h_res is divided by the sums over one dim, as by a softmax, and no Sinkhorn iterations of the op follow"
OTHER = "rows and columns are normalised {count} times, and no form of mhc_sinkhorn gives the matrix: {nearest}"
GRADIENT = "the matrix is mhc_sinkhorn's and its gradient is not, as where a step is detached: it is {error:.1e} off"
UNRUN = "these iterations could not be run on a few tokens: {why}"
_GRADIENTS = 1e-6
"""The difference of gradients, relative to the largest of a token's, that is none."""
_MOST = 256
"""The most normalisations that are looked for."""
_FEW = ((40, 2, 2), (2, 40, 3), (3, 2, 40))
"""The leading sizes of the logits in each run."""
CLOSE = 2e-7
"""The relative difference that constants rounded to fp32 may make in fp64."""
_STARTS, _NUMBERS = 8, 12
"""The most matrices that iterations may start from, and numbers that a formula may name."""
_SOFTMAX = (aten._softmax.default, aten.softmax.int)
_LOGS = (aten._log_softmax.default, aten.log_softmax.int, aten.logsumexp.default)
Kind = Callable[[Tensor], Tensor]
"""Makes logits [n, n] of one kind from random numbers."""


# --- the iterations of the op as numbers, and data that tells forms apart ---


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


# --- the iterations of a graph ---


@dataclasses.dataclass(frozen=True)
class Chain:
    """``steps`` normalisations over rows and columns in turn of ``logits``, which are computed from ``read`` alone."""

    logits: Value
    read: Value
    form: str
    eps: float
    steps: int
    transposed: bool
    """Whether the first normalisation is over columns, as in iterations on the transposed logits."""

    @property
    def iters(self) -> int | None:
        """The number of iterations, None within one."""
        return None if self.steps % 2 else self.steps // 2

    @property
    def words(self) -> str:
        """The form and eps as text for reports."""
        return f"{self.form}, eps = {self.eps:g}"


@dataclasses.dataclass(frozen=True)
class Iterations:
    """What is found of one tensor of logits."""

    chains: dict[Value, Chain]
    after: set[Value]
    """All matrices from the first exponential or normalisation on."""
    miss: Mismatch | None = None
    """Why the last of them has no chain."""


def last_of(chains: Sequence[tuple[Value, Chain]]) -> list[tuple[Value, Chain]]:
    """Returns the matrices after the most steps, with their chains. Raises Mismatch for unfinished iterations."""
    steps = max((chain.steps for _, chain in chains), default=0)
    last = [(value, chain) for value, chain in chains if chain.steps == steps]
    if steps % 2:
        raise Mismatch(UNFINISHED if steps > 1 else ONCE, last[-1][0])
    return last


class Chains:
    """Finds the chains that end at values of a graph. Equal pieces are run once."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._groups: dict[fx.Node, Iterations | None] = {}
        self._known: dict[Any, tuple[dict[int, Step], str]] = {}

    def group(self, value: Value) -> Iterations | None:
        """Returns what is found of the logits behind a matrix, or None."""
        node = value.node
        if node not in self._groups:
            if node is None or not square_matrices(value):
                return None
            admit = functools.partial(self._admit, size=product_of(value.shape))
            root = root_of(self.view, node, square_matrices, admit)
            region = Region(self.view, root, admit) if root is not None else None
            found = self._found(region) if region is not None else None
            self._groups.update(dict.fromkeys((node, *(region.inside if region is not None else ())), found))
        return self._groups[node]

    def _admit(self, node: fx.Node, *, size: Size) -> bool:
        """Checks whether a node may be part of iterations: a call that gives the same for the same, and no more."""
        made = self.view.values.of(node)
        if not self.view.values.inspectable(node):
            return False
        return not isinstance(made, Value) or (size.over(product_of(made.shape)) is not None and not random(made))

    def _found(self, region: Region) -> Iterations | None:
        values = region.values
        steps = [v for v in values if v.func in (*_SOFTMAX, *_LOGS) or _divides(v)]
        begins = next((i for i, v in enumerate(values) if v in steps or v.func is aten.exp.default), None)
        ends = [v for v in values if square_matrices(v) and v.dtype.is_floating_point]
        root = self.view.value(region.root)
        if root is None or begins is None or not ends:
            return None
        after = {*values[begins:]}.intersection(ends)
        every, found, why = self._steps(region, [root, *ends], after, begins)
        chains = {every[i]: Chain(every[step.start], root, *step[1:]) for i, step in found.items()}
        return Iterations(chains, after, _miss(region, every, chains, steps, why))

    def _steps(
        self, region: Region, every: list[Value], after: set[Value], begins: int
    ) -> tuple[list[Value], dict[int, Step], str]:
        """Returns the matrices that could be run, what they are, and why the others are nothing; the first is the root."""
        try:
            return every, *self._run(region, every, after, begins)
        except Exception as error:  # what cannot be run is left alone
            why = UNRUN.format(why=error if isinstance(error, NotRun) else said(error))
        some = [v for v in every if v.shape == every[0].shape]  # others may be views with the present sizes
        with contextlib.suppress(Exception):
            return some, *self._run(region, some, after, begins)
        return every, {}, why

    def _run(self, region: Region, every: list[Value], after: set[Value], begins: int) -> tuple[dict[int, Step], str]:
        """Returns the step that each matrix is, by its number, and why the others are none."""
        piece, starts = piece_of(self.view, region.root, [*map(node_of, every[1:])]), self._starts(every, after)
        floats = tuple(f.node.hint for n in piece.inputs if isinstance(f := example(n), torch.SymFloat))
        key = piece.structure(), str(example(region.root).shape), begins, floats, starts
        if key not in self._known:
            with compat.routing.outside_compile():
                self._known[key] = _Runs(region, piece, begins).steps(starts)
        found, why = self._known[key]
        if any(not step.steps % 2 for step in found.values()):
            fix(piece)
        return found, why

    def _starts(self, every: list[Value], after: set[Value]) -> tuple[int, ...]:
        """Returns the numbers of the matrices that iterations may start from, those before the first step first.

        Of these, memory of an input comes last: the op keeps what it starts from for its backward, and a caller may write
        an input before that. A body's inputs are what its caller keeps.
        """

        def given(value: Value) -> bool:
            held = (h for key in self.view.storages(node_of(value)) for h in self.view.holders.get(key, ()))
            return not self.view.body and any(h.op in ("placeholder", "get_attr") for h in held)

        ranks = [(value in after, given(value)) for value in every[:-1]]
        return tuple(sorted(range(len(ranks)), key=ranks.__getitem__))


def _miss(
    region: Region, every: list[Value], chains: dict[Value, Chain], steps: list[Value], why: str
) -> Mismatch | None:
    """Returns why the last matrix that is normalised after the chains' last ones has no chain, or None."""
    deepest = max((chain.steps for chain in chains.values()), default=0)
    last = [node_of(v) for v, chain in chains.items() if chain.steps == deepest] or [region.root]
    after = {n for a in last for n in region.view.descendants([a], region.inside.__contains__) if n is not a}
    if chains and not deepest % 2:  # what is computed of the last matrix may be anything but a step
        rest = [v for v in every if v.node in after and _divides(v)]
    else:
        rest = [v for v in every if v.node in after and (v in steps or v.func is aten.exp.default)]
    return Mismatch(why.format(count=len(steps)), rest[-1]) if rest and len(steps) > 2 else None


def _divides(value: Value) -> bool:
    """Checks whether a matrix is divided, or multiplied, by one number a row or a column."""
    if value.func not in (aten.div.Tensor, aten.mul.Tensor) or not square_matrices(value):
        return False
    given = [a.args[0] if a.func is aten.expand.default else a for a in value.args if isinstance(a, Value)]
    return any(ONE in (*a.shape[-2:],) for a in given if len(a.shape) == len(value.shape))


class _Runs:
    """Runs one piece on data."""

    def __init__(self, region: Region, piece: Piece, begins: int) -> None:
        self.region, self.n = region, compat.routing.hint(example(region.root).shape[-1])  # int() would fix the size
        numbers, most = numbers_in(region.values), min(len(region.values) - begins + 1, _MOST)
        softmax = region.values[begins].func in _SOFTMAX
        plain, *others = kinds(numbers)
        self.grad = any(region.view.modes_at(n).grad for n in region.nodes)
        self.kinds, self.plain, self.apart = [*plain, *itertools.chain(*others)], len(plain), False
        self.forms = Forms(("softmax", "exp", "exp_eps") if softmax else ("exp", "exp_eps", "softmax"), numbers, most)
        self.cut = functools.cache(functools.partial(cut, piece, region.root))

    def steps(self, starts: Sequence[int]) -> tuple[dict[int, Step], str]:
        """Returns the step that each matrix is, by its number, and why the others are none."""
        values, first = self.values(_FEW[0])
        best, why = dict[int, Step](), ""
        for found in explained(values, first, starts, self.forms):
            deepest = max((step.steps for step in found.values()), default=0)
            last = {i: step for i, step in found.items() if step.steps == deepest and not deepest % 2}
            errors = {i: self.gradient(i, step) if self.grad else 0.0 for i, step in last.items()}
            same = [i for i, step in last.items() if errors[i] <= _GRADIENTS and self.again(i, step)]
            if same:
                best, why = {i: step for i, step in found.items() if i in same or i not in last}, ""
                break
            if errors and not why:
                why = GRADIENT.format(error=min(errors.values()))
            best = best or (found if not last else {})
        if not why and len(values) - 1 not in best:
            why = OTHER.format(count="{count}", nearest=nearest(values, self.forms))
        return best, why

    def again(self, i: int, step: Step) -> bool:
        """Checks whether matrix number i is the op's with other numbers of tokens, too."""
        return all(off(v[i], mixed(v[step.start], step)) <= CLOSE for v in self.others)

    @functools.cached_property
    def others(self) -> list[list[Tensor]]:
        """Returns the matrices with other numbers of tokens."""
        return [self.values(few)[0] for few in _FEW[1:]]

    def values(self, few: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
        """Returns the logits and the matrices [tokens, n, n] on all kinds of data, and the tokens of ordinary data."""
        made = [*self.runs(few, False)]
        plain = (v[which < self.plain] for which, outs in made for v in outs)
        if not self.apart and not all(bool(v.isfinite().all()) for v in plain):
            self.apart = True  # one token's numbers reach another's
            made = [*self.runs(few, False)]
        values = [torch.cat(parts) for parts in zip(*(outs for _, outs in made), strict=True)]
        return values, torch.cat([which for which, _ in made]) == 0

    def runs(self, few: tuple[int, ...], grad: bool) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yields the kinds of tokens, and the logits and matrices [tokens, n, n] of a run."""
        (piece, feed, tokens), root = self.cut(few), self.region.root
        for which, logits in samples(self.kinds, self.n, tokens, self.apart):
            with torch.set_grad_enabled(grad), Exact({}):
                outs = interpreted(piece, feed | {root: logits.requires_grad_(grad).view(feed[root].shape)}, plain=True)
            yield torch.tensor(which), [logits, *(t.reshape(-1, self.n, self.n) for t in outs)]

    def gradient(self, i: int, step: Step) -> float:
        """Returns the largest difference of the gradient of matrix number i from the op's, relative to its token's."""
        found = list[Tensor]()
        for _, outs in self.runs(_FEW[0], True):
            up = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            for out in (outs[i], mixed(outs[step.start], step)):
                found += torch.autograd.grad(out, outs[0], up, retain_graph=True) if out.requires_grad else [0 * up]
        theirs, mine = torch.cat(found[::2]), torch.cat(found[1::2])
        return off(theirs, mine, 1 + theirs.abs().amax((-1, -2), keepdim=True))


def mixed(logits: Tensor, step: Step | Chain) -> Tensor:
    """Returns the op's matrix after whole iterations."""
    logits = logits.mT if step.transposed else logits
    made: Tensor = torch.ops.mhc_inductor.mhc_sinkhorn(logits, step.steps // 2, step.eps, step.form)
    return made.mT if step.transposed else made
