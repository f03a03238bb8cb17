# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn iterations, found by running: what a graph computes of logits alone, next to the op's iterations.

No spelling is read. The op's matrices after each step, in each of its forms and with each number of the graph as eps, are
compared with every matrix of the graph (:mod:`.iterates`); where one is the last of whole iterations, so are gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

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
from mhc_inductor.routing.operators.mhc.iterates import CLOSE, Forms, Step, explained, kinds, nearest, off, samples
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
_SOFTMAX = (aten._softmax.default, aten.softmax.int)
_LOGS = (aten._log_softmax.default, aten.log_softmax.int, aten.logsumexp.default)


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
        if node is None or not square_matrices(value):
            return None
        if node not in self._groups:
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
        after, softmax = {*values[begins:]}.intersection(ends), values[begins].func in _SOFTMAX
        every, found, why = self._steps(region, [root, *ends], after, softmax)
        chains = {every[i]: Chain(every[step.start], root, *step[1:]) for i, step in found.items()}
        return Iterations(chains, after, _miss(region, every, chains, steps, why))

    def _steps(
        self, region: Region, every: list[Value], after: set[Value], softmax: bool
    ) -> tuple[list[Value], dict[int, Step], str]:
        """Returns the matrices that could be run, what they are, and why the others are nothing; the first is the root."""
        try:
            return every, *self._run(region, every, after, softmax)
        except Exception as error:  # what cannot be run is left alone
            why = UNRUN.format(why=error if isinstance(error, NotRun) else said(error))
        some = [v for v in every if v.shape == every[0].shape]  # others may be views with the present sizes
        with contextlib.suppress(Exception):
            return some, *self._run(region, some, after, softmax)
        return every, {}, why

    def _run(self, region: Region, every: list[Value], after: set[Value], softmax: bool) -> tuple[dict[int, Step], str]:
        """Returns the step that each matrix is, by its number, and why the others are none."""
        piece, starts = piece_of(self.view, region.root, [*map(node_of, every[1:])]), self._starts(every, after)
        floats = tuple(f.node.hint for n in piece.inputs if isinstance(f := example(n), torch.SymFloat))
        key = piece.structure(), str(example(region.root).shape), softmax, floats, starts
        if key not in self._known:
            with compat.routing.outside_compile():
                self._known[key] = _Runs(region, piece, softmax).steps(starts)
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

    def __init__(self, region: Region, piece: Piece, softmax: bool) -> None:
        self.region, self.n = region, compat.routing.hint(example(region.root).shape[-1])  # int() would fix the size
        numbers, most = numbers_in(region.values), min(len(region.values) + 1, _MOST)
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
