# SPDX-License-Identifier: Apache-2.0
"""Runs a formula and its op on a few tokens, in fp64 on the CPU, before the op replaces the formula.

Which dimensions of an op's arguments are tokens is known (ops/sharding.py: those that may be sharded). The dimensions of
the graph's tensors that arrive there get other sizes, and so do the sizes that the formula's calls name, as far as every
result keeps its other dimensions. Two numbers of tokens are tried, so that a constant that is one of them shows. Of an
attention or an indexer a few queries read all keys; a few heads, too, where these would be too large.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx

from mhc_inductor import compat
from mhc_inductor.ops import sharding
from mhc_inductor.routing.comparison import compared
from mhc_inductor.routing.cutter import IMPLICIT, LARGE, Cutter, first_of, part_of, present, scans
from mhc_inductor.routing.edit import Edit, Pairs
from mhc_inductor.routing.extract import MODES, SHAPES, Cut, Piece
from mhc_inductor.routing.fp64 import work
from mhc_inductor.routing.graph.values import name_of
from mhc_inductor.routing.interface import Match, Mismatch, Verdict
from mhc_inductor.routing.verify import Feed, NotRun, Spec, Trial, said

_TOKENS = ((2, 3, 5, 7), (3, 2, 7, 5))
"""Sizes of the token dimensions in the first run and in the second."""
_PLACES = (0.5, 1.0)
"""Where the queries lie that are compared in each run: 0.0 would be the first ones, and 1.0 is the last."""
_QUERIES, _HEADS = {"S"}, {"S", "G", "h", "H"}
"""The dimensions of an attention or an indexer that are cut."""
_POSITIONS = {"arange", "getitem", "unsqueeze", "view", "reshape", "expand", "to", "long", "add", "sub"}
"""Calls that make positions."""
_OPS, _FORMULAS = 8, 4
"""How many cuts of an op, and of a formula for each, are tried."""
_CALLS, _STEPS, _WORK = 1000, 2000, 1 << 31
"""The most calls of a formula, choices of sizes, and work of a graph after which no other formula is run: some 2 s."""
_EXACT = 3e-7
"""The difference that constants rounded to fp32 once or twice may make in fp64."""


class FewTokens:
    """A check for :meth:`Edit.apply <mhc_inductor.routing.edit.Edit.apply>` that refuses an op that differs.

    An op that cannot be run on a few tokens passes, because the match is proved; its verdict says why. ``runs`` counts
    the formulas that were run, ``left`` has the ops that were not, with the reasons.
    """

    def __init__(self) -> None:
        self.runs, self.left, self._left = 0, list[str](), _WORK
        self._known: dict[Any, tuple[str, str]] = {}
        self._kept: list[Any] = []

    def __call__(self, edit: Edit, match: Match, pairs: Pairs) -> Verdict:
        """Returns a verdict without an error. Raises Mismatch if the op differs from the formula."""
        if match.parts:
            return Verdict()
        key, start = None, work()
        try:
            trial = Trial(Cut(edit, match, pairs))
            key, found = trial.key, self._known.get(trial.key)
            if found is None:
                self._kept.append(trial.specs)  # the id() of some is part of the key
                if self._left < 0:
                    raise NotRun("as much as is compared of a graph was compared")
                found = _difference(trial), ""
                self.runs += 1
        except Exception as error:  # whatever a formula cannot do on a few tokens must not stop a compile
            found = "", str(error) if isinstance(error, NotRun) else said(error)
        self._known[key] = reason, why = found
        self._left -= work() - start
        if reason:
            raise Mismatch(reason, match.start)
        self.left += [f"{match.op}: {why}"] * bool(why)
        return Verdict(None, f"not compared on a few tokens: {why}") if why else Verdict()


def _difference(trial: Trial) -> str:
    """Returns what differs, or "". Raises whatever stops a piece from running."""
    if len(trial.cut.formula.graph.nodes) > _CALLS:
        raise NotRun(f"it has more than {_CALLS} calls")
    pieces = trial.cut.formula, trial.cut.op
    for piece in pieces:
        _own_positions(piece)
    with compat.routing.outside_compile():
        try:
            return _differs_first(trial)
        except NotRun:  # queries and keys may read the same numbers
            shared = {view for piece in pieces for view, place in piece.inputs.items() if len(place.users) > 1}
            for piece in pieces:
                _own_parts(piece, {place for view, place in piece.inputs.items() if view in shared})
            return _differs_first(trial)


def _differs_first(trial: Trial) -> str:
    """Returns what differs in the first case in which anything does, or ""."""
    return next(filter(None, (_differs(trial, case) for case in range(len(_TOKENS)))), "")


def _differs(trial: Trial, case: int) -> str:
    """Returns what differs first on a few tokens, or "". Raises NotRun if no cut of the pieces can be run."""
    if trial.match.sample is None:
        return _differs_on(trial, _Few(_TOKENS[case]), case)
    place = _PLACES[case]
    try:
        return _differs_on(trial, _Few(_TOKENS[case], _QUERIES, place), case)
    except NotRun as error:
        if str(error) != LARGE:  # the first queries are the same as any where a call reads places from shapes
            return _differs_on(trial, _Few(_TOKENS[case], _QUERIES), case)
    return _differs_on(trial, _Few(_TOKENS[case], _HEADS, place), case)


@dataclasses.dataclass(frozen=True)
class _Few:
    """The sizes of token dimensions, which of these are cut if that is known, and where the tokens lie."""

    sizes: Sequence[int]
    names: Set[str] = frozenset()
    place: float = 0.0


def _differs_on(trial: Trial, few: _Few, case: int) -> str:
    """Returns what differs first, however the pieces are cut, or ""."""
    reason, failed = "", NotRun("no sizes fit")
    for small, formula, op in _cuts(trial, few):
        feed, scan = small.data(case, case), scans(small.specs)
        grad = case == 0 or not few.names  # those of all keys take time: once is enough
        try:
            want, mine = (small._results(piece, feed, grad, exact=not scan) for piece in (formula, op))
        except Exception as error:  # as where a check of an index is cut as queries are, and counts keys
            failed = error if isinstance(error, NotRun) else NotRun(said(error))
            continue
        off, reason = compared(trial.match, mine, want, want, scan, 0.0)
        if not reason and (scan or off <= _EXACT):
            return ""
        reason = reason or f"verified on random data, the op is {off:.3g} off in fp64"
    if not reason:
        raise failed
    return reason


def _own_positions(piece: Piece) -> None:
    """Gives each reader of constant positions a copy of its own: queries and keys may then have other sizes."""
    constant = set[fx.Node]()
    for node in piece.graph.nodes:
        if node.op != "placeholder" and name_of(node) in _POSITIONS and constant.issuperset(node.all_input_nodes):
            constant.add(node)
    for node in reversed([*piece.graph.nodes]):
        if node in constant and not any(name_of(u).endswith("_") for u in node.users):  # a step in place
            for user in [*node.users][1:]:
                with piece.graph.inserting_before(node):
                    user.replace_input_with(node, piece.graph.node_copy(node))


def _own_parts(piece: Piece, shared: Set[fx.Node]) -> None:
    """Lets each reader of integers or bools take a part of them."""
    for node in [*piece.graph.nodes]:
        shapes = node.meta.get(SHAPES)
        if not (node in shared or (name_of(node) in IMPLICIT and len(node.users) > 1)):
            continue
        if not isinstance(shapes, Tensor) or shapes.is_floating_point() or not shapes.dim():
            continue
        for user in [*node.users] if not any(name_of(user).endswith("_") for user in node.users) else ():
            with piece.graph.inserting_before(user):
                part = piece.graph.call_function(part_of, (node, *present(node)))
            part.meta = {MODES: user.meta[MODES], SHAPES: shapes}
            user.replace_input_with(node, part)


def _cuts(trial: Trial, few: _Few) -> Iterator[tuple[Trial, Piece, Piece]]:
    """Yields the trial, the formula and the op with few tokens, once for each way that fits. Raises NotRun."""
    # The steps of a scan are a dimension, where those of a loop are calls.
    steps = {"T"} if scans(trial.specs) else set()
    read = [pair for node in trial.cut.op.graph.nodes for pair in _arguments(node, few.names, steps)]
    if not read:
        raise NotRun("no op whose tokens are known")
    old = {word: size for _, words in read for word, size in words if word and size > 1}
    new = dict(zip(old, itertools.cycle(few.sizes)))
    tokens = [(old[word], size) for word, size in new.items()]
    wanted = {a: [new.get(word, size) if size > 1 else size for word, size in words] for a, words in read}
    feed = {n: spec for n, spec in trial.specs.items() if not isinstance(spec, (Spec, Tensor))}
    for formula, op, given in _pairs(trial, tokens, wanted, feed, few.place):
        small = copy.copy(trial)
        small.keeps_roundings = False  # what may be dropped of them is proved on the graph
        grad = not scans(feed)  # the body of a scan does not run in fp64, and its backward takes seconds
        small.specs = {n: _small(spec, given[n], grad, few.place) for n, spec in trial.specs.items()}
        yield small, formula, op


def _pairs(
    trial: Trial, tokens: list[tuple[int, int]], wanted: dict[fx.Node, list[int]], feed: Feed, place: float
) -> Iterator[tuple[Piece, Piece, Feed]]:
    """Yields the formula and the op with other sizes, and their inputs. Raises NotRun if no sizes fit both."""
    why, some, steps = NotRun("no sizes fit"), False, iter(range(_STEPS))
    for op, given, results in itertools.islice(Cutter(trial.cut.op, tokens, wanted, place, steps).fitting(feed), _OPS):
        shapes = {o: [*r.shape] for o, r in zip(trial.cut.formula.outputs, results, strict=False)}
        cutter = Cutter(trial.cut.formula, tokens, shapes, place, steps)
        try:
            for formula, both, _ in itertools.islice(cutter.fitting(given), _FORMULAS):
                some = True
                yield formula, op, both
        except NotRun as error:  # the formula may tell apart inputs of equal sizes, such as queries and keys
            why = error
    if not some:
        raise why


def _arguments(node: fx.Node, cut: Set[str], steps: Set[str]) -> Iterator[tuple[fx.Node, list[tuple[str, int]]]]:
    """Yields each tensor that an op of ours reads, with the name and size of each dimension, "" for what is no token."""
    op = str(node.target).removeprefix("mhc_inductor.").partition(".")[0]
    if "mhc_inductor." not in str(node.target):
        return
    family = sharding.TABLE[op]
    free = {*family.independent.get(op, family.independent[""]).split()}
    free = (free & cut or free) | steps
    for argument, a in zip(node.target._schema.arguments, node.args, strict=False):  # type: ignore[union-attr]
        if isinstance(a, fx.Node) and isinstance(a.meta[SHAPES], Tensor):
            if argument.name.startswith("cu_seqlens"):
                raise NotRun("packed sequences are not cut")
            words = sharding.names(family, argument.name, a.meta[SHAPES])
            leading = ["..." if word.isdigit() and "..." in free else word for word in words]
            yield a, [(w if m in free else "", n) for w, m, n in zip(words, leading, present(a), strict=True)]


def _small(spec: Any, like: Any, grad: bool, place: float) -> Any:
    """Returns the description or the constant of an input with the shape of ``like``."""
    if isinstance(spec, Tensor):
        for d, n in enumerate(like.shape):
            if n != spec.shape[d]:
                first = first_of(spec.shape[d], n, place)
                spec = spec.index_select(d, torch.arange(first, first + n, device=spec.device) % spec.shape[d])
        return spec.detach().cpu()
    if not isinstance(spec, Spec):
        return spec
    shape, stride, cpu = tuple(like.shape), like.stride(), torch.device("cpu")
    return dataclasses.replace(spec, shape=shape, stride=stride, device=cpu, grad=spec.grad and grad)
