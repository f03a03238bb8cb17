# SPDX-License-Identifier: Apache-2.0
"""Gives a piece of a graph other token sizes, by running it on zeros with one choice of sizes after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mhc_inductor import compat
from mhc_inductor.routing.extract import SHAPES, Piece
from mhc_inductor.routing.fp64 import Exact
from mhc_inductor.routing.graph.values import name_of, run, tensors_in
from mhc_inductor.routing.verify import Feed, NotRun, said

_SIZES = {
    **dict.fromkeys(("zeros", "ones", "empty", "full", "arange"), 0),
    **dict.fromkeys(("part_of", "view", "reshape", "expand", "broadcast_to", "repeat", "tile", "split"), 1),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), 1),
    **dict.fromkeys(("unflatten", "narrow"), 2),
}
"""Calls whose arguments are sizes from this one on."""
IMPLICIT = {"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "roll", "flip", "eye", "tril_", "triu_"}
"""Calls that read the places of tokens from their shapes."""
_PICKS = {"gather", "take_along_dim", "index_select", "select", "narrow", "take", "_unsafe_index", "index", "embedding"}
"""Calls that pick places, in the dimension that their second argument is, or in any."""
_TRIES, _COMBINATIONS, _ELEMENTS = 64, 512, 2**25
"""How many choices a node of a piece, and combinations of a call's sizes, are tried; the most elements of a tensor."""
_DEVICES = ("cuda", "xpu", "mps", "meta")
LARGE = "a tensor is too large"


def scans(specs: Mapping[fx.Node, Any]) -> bool:
    """Returns whether a piece has a scan, by the constants that it reads."""
    return any(isinstance(spec, fx.GraphModule) for spec in specs.values())


@dataclasses.dataclass
class Cutter:
    """Makes a piece with other token sizes by running it, one choice of sizes after the other.

    ``tokens`` has the size of each token dimension and the one that takes its place, ``wanted`` the new shapes that are
    known. ``place`` says where the tokens lie that are left, from 0.0 for the first ones to 1.0 for the last: positions
    that the piece makes count from there. ``steps`` is used up by one for each choice.
    """

    piece: Piece
    tokens: Sequence[tuple[int, int]]
    wanted: Mapping[fx.Node, list[int]]
    place: float = 0.0
    steps: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    why: str = "the results have other shapes"
    large: bool = False

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
        mode = contextlib.nullcontext() if scans(feed) else Exact({})  # as if there were no autocast
        at, before, blamed = {node: i for i, node in enumerate(nodes)}, list[int](), [0] * len(nodes)
        for node in nodes:  # bit masks of the nodes that each is computed from, whose choices may be why none fits
            inputs_of = [at[a] for a in node.all_input_nodes if a in at]
            before.append(functools.reduce(operator.or_, (before[i] | 1 << i for i in inputs_of), 0))
        tries = [self._options(nodes[0], env)]
        for _ in range(_TRIES * len(nodes)):
            if next(self.steps, None) is None:
                break
            with mode:
                found = next(tries[-1], None)
            if found is None:  # back to the latest choice that may be why: others change nothing
                last = len(tries) - 1
                why = before[last] | blamed[last]
                if not why:
                    break
                back = why.bit_length() - 1
                blamed[back] |= why & ~(1 << back)
                blamed[back + 1 :] = [0] * (len(nodes) - back - 1)
                del tries[back + 1 :]
                continue
            node = nodes[len(tries) - 1]
            args[node], env[node] = found
            if len(tries) < len(nodes):
                tries.append(self._options(nodes[len(tries)], env))
            else:
                blamed[-1] = (1 << len(nodes) - 1) - 1  # any other choice may give another piece that fits
                some, shaped = True, {view: env[place] for view, place in inputs.items()} | feed
                yield dataclasses.replace(self.piece, args={**args}), shaped, [env[o] for o in self.piece.outputs]
        if not some:
            raise NotRun(LARGE if self.large else self.why)

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
                raise NotRun(LARGE)
            made = torch.zeros([shape[d] for d in order], dtype=fake.dtype, device="cpu")
            yield (), made.permute([order.index(d) for d in range(len(shape))])

    def _calls(self, node: fx.Node, env: Feed) -> Iterator[tuple[Any, Any]]:
        placed: Any = fx.node.map_aggregate((node.args, node.kwargs), _on_cpu)
        args, kwargs = placed
        given, options = fx.node.map_arg((args, kwargs), env.__getitem__)
        name, ours = name_of(node), str(node.target).startswith("mhc_inductor.")  # an op may keep parts of a sequence
        shapes = None if ours else node.meta.get(SHAPES)
        first, large = _SIZES.get(name, len(args)), shapes is not None and _elements(shapes) > _ELEMENTS
        if self.place and options.get("is_causal"):
            raise NotRun(f"{name}: reads the places of tokens from a shape")
        if self.place and (why := _needs_all(node, given, options)):
            self.why = why
            return
        if name in ("tril", "triu"):
            (old, new), first = (present(args[0]), given[0].shape), 1
            by = first_of(old[-2], new[-2], self.place) - first_of(old[-1], new[-1], self.place)
            given = (given[0], by + (given[1] if len(given) > 1 else options.get("diagonal", 0)))
            kwargs, options = {}, {}
        for tail in self._tails(node, given[first:], given[0] if given else None):
            call = (*given[:first], *tail), options
            if large and _large(node, *call):
                self.large = True
                continue
            try:  # an op of ours may take long, and zeros will do
                out = _zeros_like(_meta(node, *call)) if ours else run(node, *call)
            except Exception as error:
                self.why = f"{name}: {said(error)}"
                continue
            view = name in ("view", "reshape") and shapes is not None
            if self._fits(shapes, out) and not (view and _joined(present(args[0]), present(node), given[0], out)):
                yield ((*args[:first], *tail), kwargs), out
            else:
                self.why = f"{name}: no size fits"

    def _tails(self, node: fx.Node, given: Sequence[Any], of: Any) -> Iterator[Sequence[Any]]:
        """Yields the arguments of a call on ``of`` from its sizes on, with each combination of sizes."""
        name, inner = name_of(node), bool(given) and isinstance(given[0], (tuple, list))
        sizes = given[0] if inner else given[:1] if name == "split" else given
        options = [self._sizes(s) if name in _SIZES and type(s) is int and s > 1 else [s] for s in sizes]
        for some in itertools.islice(itertools.product(*options), _COMBINATIONS):
            if name == "arange" and some[:-1] in ((), (0,)) and some[-1] < (old := present(node)[0]):
                # The result tells: the size may be read from a tensor that is cut already, as in an exported program.
                some = (at := first_of(old, some[-1], self.place), at + some[-1])
            if name == "part_of":
                some = tuple(
                    slice(at := first_of(n, m, self.place), at + m) for n, m in zip(of.shape, some, strict=True)
                )
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


def _needs_all(node: fx.Node, given: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Returns why a call gives tokens that do not come first something else than all of them would, or an empty text."""
    name, places = name_of(node), list[Any]([*node.args, *node.kwargs.values()])
    if name in IMPLICIT and not (given and isinstance(given[0], Tensor) and present(places[0]) == given[0].shape):
        return f"{name}: reads the places of tokens from a shape"
    # A gather or scatter may have an index for the first rows alone: it must have one for every row that is left.
    rows = name.startswith(("gather", "scatter", "take_along_dim"))
    pairs = zip(places, (*given, *options.values()), strict=True)
    apart = rows and not _row_by_row([pair for pair in pairs if isinstance(pair[1], Tensor)])
    picks = apart or any(present(places[0])[d] != given[0].shape[d] for d in _picked(name, given))
    return f"{name}: picks places among a few tokens" if picks else ""


def _picked(name: str, given: Sequence[Any]) -> Sequence[int]:
    """Returns the dimensions of its first argument in which a call picks places."""
    if name == "getitem" and isinstance(given[0], Tensor):
        index = given[1] if isinstance(given[1], tuple) else (given[1],)
        after = next((len(index) - d - 1 for d, i in enumerate(index) if i is Ellipsis), 0)
        real = [i for i in index if i is not None and i is not Ellipsis]
        some = [d for d, i in enumerate(real) if not (isinstance(i, slice) and i == slice(None))]
        return [d if d < len(real) - after else d - len(real) for d in some]
    if name in _PICKS:
        return [d for d in given[1:2] if isinstance(d, int)] or range(given[0].dim())
    return ()


def _row_by_row(tensors: Sequence[tuple[Any, Tensor]]) -> bool:
    """Returns whether the index of a gather or scatter, the second of its tensors, still has the rows that it had."""
    (x, new_x), (index, new_index), *_ = tensors
    old, new = zip(present(x), present(index), strict=True), zip(new_x.shape, new_index.shape, strict=True)
    return all(a != b or c == d for (a, b), (c, d) in zip(old, new, strict=True))


def _elements(results: Any) -> int:
    return max((compat.routing.hint(t.numel()) for t in tensors_in(results)), default=0)


def _meta(node: fx.Node, *call: Any) -> Any:
    """Returns what a call gives, without data. Raises what it raises where that takes data."""
    return run(node, *compat.tree_map_only(Tensor, lambda t: t.to("meta"), call))


def _zeros_like(results: Any) -> Any:
    return compat.tree_map_only(Tensor, lambda t: torch.zeros_like(t, device="cpu"), results)


def _large(node: fx.Node, *call: Any) -> bool:
    with contextlib.suppress(Exception):
        return _elements(_meta(node, *call)) > _ELEMENTS
    return False


def _on_cpu(arg: Any) -> Any:
    named = isinstance(arg, str) and arg.partition(":")[0] in _DEVICES
    return "cpu" if named or isinstance(arg, torch.device) else arg


def present(node: fx.Node) -> tuple[int, ...]:
    """Returns the present shape of a piece's node."""
    return tuple(map(compat.routing.hint, node.meta[SHAPES].shape))


def _joined(old_in: Sequence[int], old_out: Sequence[int], new_in: Tensor, new_out: Tensor) -> bool:
    """Returns whether a view with other sizes joins dimensions that the view with the old sizes keeps apart."""

    def products(shape: Sequence[int]) -> Iterator[int]:
        return itertools.accumulate(shape, operator.mul, initial=1)

    at = dict(zip(products(old_in), products(new_in.shape), strict=True))
    return any(at.get(o, n) != n for o, n in zip(products(old_out), products(new_out.shape), strict=True))


def part_of(t: Tensor, *spans: slice) -> Tensor:
    """Returns the part of a tensor within a span of each dimension."""
    return t[spans]


def first_of(old: int, new: int, place: float) -> int:
    """Returns the position of the first of ``new`` tokens among the ``old`` ones."""
    return int(max(0, old - new) * place)
