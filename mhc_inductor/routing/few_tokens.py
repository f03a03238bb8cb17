# SPDX-License-Identifier: Apache-2.0
"""Runs a formula and its op on a few tokens, in fp64 on the CPU, before the op replaces the formula.

Which dimensions of an op's arguments are tokens is known (ops/sharding.py: those that may be sharded). The dimensions of
the graph's tensors that arrive there get other sizes, and so do the sizes that the formula's calls name, as far as every
result keeps its other dimensions. Two numbers of tokens are tried, so that a constant that is one of them shows.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mhc_inductor import compat
from mhc_inductor.ops import sharding
from mhc_inductor.routing.comparison import compared
from mhc_inductor.routing.edit import Edit, Pairs
from mhc_inductor.routing.extract import SHAPES, Cut, Piece
from mhc_inductor.routing.fp64 import Exact
from mhc_inductor.routing.graph.values import name_of, run
from mhc_inductor.routing.interface import Match, Mismatch, Verdict
from mhc_inductor.routing.verify import Feed, NotRun, Spec, Trial, said

_TOKENS = ((2, 3, 5, 7), (3, 2, 7, 5))
"""Sizes of the token dimensions in the first run and in the second."""
_SIZES = {
    **dict.fromkeys(("zeros", "ones", "empty", "full", "arange"), 0),
    **dict.fromkeys(("view", "reshape", "expand", "broadcast_to", "repeat", "tile", "split"), 1),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), 1),
    **dict.fromkeys(("unflatten", "narrow"), 2),
}
"""Calls whose arguments are sizes from this one on."""
_TRIES, _COMBINATIONS, _FORMULAS = 64, 512, 4
"""How many choices a node of a piece, combinations of a call's sizes, and formulas that fit are tried."""
_CALLS, _ELEMENTS, _SECONDS = 1000, 2**24, 1.0
"""The most calls of a formula, elements of an input, and seconds of a graph after which no other formula is run."""
_DEVICES = ("cuda", "xpu", "mps", "meta")
_EXACT = 3e-7
"""The difference that constants rounded to fp32 once or twice may make in fp64."""


class FewTokens:
    """A check for :meth:`Edit.apply <mhc_inductor.routing.edit.Edit.apply>` that refuses an op that differs.

    An op that cannot be run on a few tokens passes, because the match is proved; its verdict says why. ``runs`` counts
    the formulas that were run, ``left`` has the ops that were not, with the reasons.
    """

    def __init__(self) -> None:
        self.runs, self.left, self._seconds = 0, list[str](), _SECONDS
        self._known: dict[Any, tuple[str, str]] = {}
        self._kept: list[Any] = []

    def __call__(self, edit: Edit, match: Match, pairs: Pairs) -> Verdict:
        """Returns a verdict without an error. Raises Mismatch if the op differs from the formula."""
        if match.sample is not None or match.parts:
            return Verdict()
        key, start = None, time.thread_time()
        try:
            trial = Trial(Cut(edit, match, pairs))
            key, found = trial.key, self._known.get(trial.key)
            if found is None:
                self._kept.append(trial.constants)  # their id() is part of the key
                if self._seconds < 0:
                    raise NotRun("the time for comparisons is over")
                found = _difference(trial), ""
                self.runs += 1
        except Exception as error:  # whatever a formula cannot do on a few tokens must not stop a compile
            found = "", str(error) if isinstance(error, NotRun) else said(error)
        self._known[key] = reason, why = found
        self._seconds -= time.thread_time() - start
        if reason:
            raise Mismatch(reason, match.start)
        self.left += [f"{match.op}: {why}"] * bool(why)
        return Verdict(None, f"not compared on a few tokens: {why}") if why else Verdict()


def _difference(trial: Trial) -> str:
    """Returns what differs, or "". Raises whatever stops a piece from running."""
    if len(trial.cut.formula.graph.nodes) > _CALLS:
        raise NotRun(f"it has more than {_CALLS} calls")
    with compat.routing.outside_compile():
        return next(filter(None, (_differs(trial, case, few) for case, few in enumerate(_TOKENS))), "")


def _differs(trial: Trial, case: int, few: Sequence[int]) -> str:
    """Returns what differs first on ``few`` tokens, however the pieces are cut, or ""."""
    reason = ""
    for small, formula, op in _cuts(trial, few):
        feed, scan = small.data(case, case), _scans(small.specs)
        want, mine = (small._results(piece, feed, True, exact=not scan) for piece in (formula, op))
        off, reason = compared(trial.match, mine, want, want, scan, 0.0)
        if not reason and (scan or off <= _EXACT):
            return ""
        reason = reason or f"verified on random data, the op is {off:.3g} off in fp64"
    return reason


def _scans(specs: Mapping[fx.Node, Any]) -> bool:
    return any(isinstance(spec, fx.GraphModule) for spec in specs.values())


def _cuts(trial: Trial, few: Sequence[int]) -> Iterator[tuple[Trial, Piece, Piece]]:
    """Yields the trial, the formula and the op with few tokens, once for each way that fits. Raises NotRun."""
    free = ["T"] if _scans(trial.specs) else []  # the steps of a scan are a dimension, where those of a loop are calls
    read = [pair for node in trial.cut.op.graph.nodes for pair in _arguments(node, free)]
    if not read:
        raise NotRun("no op whose tokens are known")
    old = {word: size for _, words in read for word, size in words if word and size > 1}
    new = dict(zip(old, itertools.cycle(few)))
    tokens = [(old[word], size) for word, size in new.items()]
    wanted = {a: [new.get(word, size) if size > 1 else size for word, size in words] for a, words in read}
    feed = {n: spec for n, spec in trial.specs.items() if not isinstance(spec, (Spec, Tensor))}
    op, feed, results = next(Cutter(trial.cut.op, tokens, wanted).fitting(feed))
    wanted = {o: [*r.shape] for o, r in zip(trial.cut.formula.outputs, results, strict=True)}
    for formula, given, _ in itertools.islice(Cutter(trial.cut.formula, tokens, wanted).fitting(feed), _FORMULAS):
        small = copy.copy(trial)
        small.keeps_roundings = False  # what may be dropped of them is proved on the graph
        grad = not _scans(feed)  # the body of a scan does not run in fp64, and its backward takes seconds
        small.specs = {n: _small(spec, given[n], grad) for n, spec in trial.specs.items()}
        yield small, formula, op


def _arguments(node: fx.Node, free: list[str]) -> Iterator[tuple[fx.Node, list[tuple[str, int]]]]:
    """Yields each tensor that an op of ours reads, with the name and size of each dimension, "" for what is no token."""
    op = str(node.target).removeprefix("mhc_inductor.").partition(".")[0]
    if "mhc_inductor." not in str(node.target):
        return
    family = sharding.TABLE[op]
    free = [*free, *family.independent.get(op, family.independent[""]).split()]
    for argument, a in zip(node.target._schema.arguments, node.args, strict=False):  # type: ignore[union-attr]
        if isinstance(a, fx.Node) and isinstance(a.meta[SHAPES], Tensor):
            words = sharding.names(family, argument.name, a.meta[SHAPES])
            yield a, [(w if w.isdigit() or w in free else "", n) for w, n in zip(words, present(a), strict=True)]


@dataclasses.dataclass
class Cutter:
    """Makes a piece with other token sizes by running it, one choice of sizes after the other.

    ``tokens`` has the size of each token dimension and the one that takes its place, ``wanted`` the new shapes that are
    known.
    """

    piece: Piece
    tokens: Sequence[tuple[int, int]]
    wanted: Mapping[fx.Node, list[int]]
    why: str = "the results have other shapes"

    def fitting(self, feed: Feed) -> Iterator[tuple[Piece, Feed, list[Any]]]:
        """Yields a piece that has the wanted shapes, a feed that it runs on, and its outputs. Raises NotRun if none has.

        Inputs that are not in ``feed`` get zeros.
        """
        inputs, some = self.piece.inputs, False
        env, args = {place: feed[view] for view, place in inputs.items() if view in feed}, dict[fx.Node, Any]()
        env |= {place: env[place].clone() for place in self.piece.written & env.keys()}
        # An input is chosen right before its first use, so that a choice that does not fit is changed soon.
        ordered = (a for n in self.piece.graph.nodes if n.op != "placeholder" for a in (*n.all_input_nodes, n))
        nodes = [n for n in dict.fromkeys((*ordered, *inputs.values())) if n not in env]
        mode = contextlib.nullcontext() if _scans(feed) else Exact({})  # as if there were no autocast
        tries = [self._options(nodes[0], env)]
        for _ in range(_TRIES * len(nodes)):
            with mode:
                found = next(tries[-1], None)
            if found is None:
                tries.pop()
                if not tries:
                    break
                continue
            node = nodes[len(tries) - 1]
            args[node], env[node] = found
            if len(tries) < len(nodes):
                tries.append(self._options(nodes[len(tries)], env))
            else:
                some, shaped = True, {view: env[place] for view, place in inputs.items()} | feed
                yield dataclasses.replace(self.piece, args={**args}), shaped, [env[o] for o in self.piece.outputs]
        if not some:
            raise NotRun(self.why)

    def _options(self, node: fx.Node, env: Feed) -> Iterator[tuple[Any, Any]]:
        """Yields the arguments of a node with other sizes and its result, for each choice of sizes that may fit."""
        for args, out in self._zeros(node) if node.op == "placeholder" else self._calls(node, env):
            if node not in self.wanted or [*out.shape] == self.wanted[node]:
                yield args, out
            else:
                self.why = f"{name_of(node)}: no size fits"

    def _zeros(self, place: fx.Node) -> Iterator[tuple[Any, Tensor]]:
        fake, old = place.meta[SHAPES], present(place)
        # The formula may view the tensor in the memory order that it has.
        order = sorted(range(len(old)), key=lambda d: -compat.routing.hint(fake.stride(d)))
        wanted = self.wanted.get(place)
        for shape in [wanted] if wanted else itertools.product(*map(self._sizes, old)):
            if math.prod(shape) > _ELEMENTS:
                raise NotRun("an input is too large")
            made = torch.zeros([shape[d] for d in order], dtype=fake.dtype, device="cpu")
            yield (), made.permute([order.index(d) for d in range(len(shape))])

    def _calls(self, node: fx.Node, env: Feed) -> Iterator[tuple[Any, Any]]:
        args, kwargs = compat.tree_map_only((torch.device, str), _on_cpu, (node.args, node.kwargs))
        given, options = fx.node.map_arg((args, kwargs), env.__getitem__)
        name, ours = name_of(node), str(node.target).startswith("mhc_inductor.")  # an op may keep parts of a sequence
        shapes = None if ours else node.meta.get(SHAPES)
        first = _SIZES.get(name, len(args))
        for tail in self._tails(name, given[first:]):
            try:
                out = run(node, (*given[:first], *tail), options)
            except Exception as error:
                self.why = f"{name}: {said(error)}"
                continue
            view = name in ("view", "reshape") and shapes is not None
            if self._fits(shapes, out) and not (view and _joined(present(args[0]), present(node), given[0], out)):
                yield ((*args[:first], *tail), kwargs), out
            else:
                self.why = f"{name}: no size fits"

    def _tails(self, name: str, given: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Yields the arguments of a call from its sizes on, with each combination of sizes."""
        inner = bool(given) and isinstance(given[0], (tuple, list))
        sizes = given[0] if inner else given[:1] if name == "split" else given
        options = [self._sizes(s) if type(s) is int and s > 1 else [s] for s in sizes]
        for some in itertools.islice(itertools.product(*options), _COMBINATIONS):
            yield (some, *given[1:]) if inner else (*some, *given[len(sizes) :])

    def _sizes(self, size: int) -> list[int]:
        """Returns what may take the place of a size: tokens first if it is one of them, then itself and products."""
        found = [new for old, new in self.tokens if old == size] + [size]
        for k in range(1, len(self.tokens) + 1):
            for some in itertools.combinations(self.tokens, k):
                old, new = map(math.prod, zip(*some, strict=True))
                found += [size // old * new] * (size % old == 0)
        return list(dict.fromkeys(found))

    def _fits(self, old: Any, new: Any) -> bool:
        """Returns whether results have the old shapes but for tokens."""
        if isinstance(old, (tuple, list)):
            return len(old) == len(new) and all(map(self._fits, old, new))
        if not isinstance(old, Tensor):
            return True
        shape = [*map(compat.routing.hint, old.shape)]
        return len(shape) == new.dim() and all(n in self._sizes(o) for o, n in zip(shape, new.shape, strict=True))


def _on_cpu(device: torch.device | str) -> torch.device | str:
    return "cpu" if isinstance(device, torch.device) or device.partition(":")[0] in _DEVICES else device


def present(node: fx.Node) -> tuple[int, ...]:
    """Returns the present shape of a piece's node."""
    return tuple(map(compat.routing.hint, node.meta[SHAPES].shape))


def _joined(old_in: Sequence[int], old_out: Sequence[int], new_in: Tensor, new_out: Tensor) -> bool:
    """Returns whether a view with other sizes joins dimensions that the view with the old sizes keeps apart."""

    def products(shape: Sequence[int]) -> Iterator[int]:
        return itertools.accumulate(shape, operator.mul, initial=1)

    at = dict(zip(products(old_in), products(new_in.shape), strict=True))
    return any(at.get(o, n) != n for o, n in zip(products(old_out), products(new_out.shape), strict=True))


def _small(spec: Any, like: Any, grad: bool) -> Any:
    """Returns the description or the constant of an input with the shape of ``like``."""
    if isinstance(spec, Tensor):
        for d, n in enumerate(like.shape):
            if n != spec.shape[d]:
                spec = spec.index_select(d, torch.arange(n, device=spec.device) % spec.shape[d])
        return spec.detach().cpu()
    if not isinstance(spec, Spec):
        return spec
    shape, stride, cpu = tuple(like.shape), like.stride(), torch.device("cpu")
    return dataclasses.replace(spec, shape=shape, stride=stride, device=cpu, grad=spec.grad and grad)
