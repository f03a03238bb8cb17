"""Edits of a graph: each is proved before the first node moves, and taken back exactly where it fails.

A match says which values its op reads and which it gives. Proved for every operator alike: a position exists after the
inputs and before the uses; nothing is written in between; the modes are the formula's; nobody watches what goes away;
results need gradients, reach parameters and share memory as the formula's did.
"""

from __future__ import annotations

import collections
import contextlib
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.graph.expressions import VIEWS, is_cast
from mhc_inductor.routing.graph.index import Size, size_of
from mhc_inductor.routing.graph.run import run_fake
from mhc_inductor.routing.graph.values import Value, example, tensors_in
from mhc_inductor.routing.graph.view import GRAD, View
from mhc_inductor.routing.operator import Match, Mismatch, Verdict
from mhc_inductor.routing.placement import TRACES, WRITTEN, Place, Placement, node_of
from mhc_inductor.routing.saved import saved_by
from mhc_inductor.routing.sweep import pure, share_memory, unneeded

__all__ = ["Check", "Edit", "Emit", "Pairs", "node_of"]

Pairs = Sequence[tuple[Value, fx.Node]]
Emit = Callable[["Edit", Match], Iterable[tuple[Value, fx.Node]]]
Check = Callable[["Edit", Match, Pairs], Verdict]


class Edit:
    """The edits of one graph. Operators call :meth:`emit` and its helpers between :meth:`apply`'s proofs."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.graph = view.real
        self.place: Place | None = None
        self.verdict = Verdict()
        """What the check said of the last match."""
        self._new: dict[fx.Node, fx.Node] = {}
        self.created: list[fx.Node] = []
        """The nodes that this and earlier matches made, each after those that it reads."""
        self.unrounded: dict[fx.Node, fx.Node] = {}
        """The nodes of the view that new nodes stand for in an op's own layout and dtype."""
        self._replaced: list[tuple[fx.Node, Any, Any]] = []
        self._learned: list[tuple[fx.Node, fx.Node | None, fx.Node]] = []
        self._regions: list[set[fx.Node]] = []
        self._copies: set[fx.Node] = set()
        self._saved: dict[fx.Node, set[int]] = {}
        self._seen: dict[int, int] = {}
        self._mark = (0, 0, 0, 0)
        self.committed = False

    # --- one transaction ---

    def apply(self, match: Match, emit: Emit, check: Check | None = None) -> list[fx.Node]:
        """Puts one match's op into the graph. Returns the nodes that were made.

        ``check`` sees the new nodes while the formula still stands, and may refuse them.
        Raises Mismatch where something forbids it, and whatever ``emit`` raises; the graph is then as before.
        """
        self.view.settle()
        mark = self._mark = len(self.created), len(self._replaced), len(self._learned), len(self._regions)
        try:
            self.place = Placement(self.view, match).find()
            self._keep_overwritten(self.place)
            with self.graph.inserting_before(self.place.anchor), self.place.modes.entered():
                pairs = self._settled(match, [*emit(self, match)])
            self.verdict = Verdict() if check is None else check(self, match, pairs)
            for value, new in pairs:
                self._replace(value, new)
            self._regions.append(self.place.region)
            self._note(self.place)
            return self.created[mark[0] :]
        except BaseException:
            self.undo(mark)
            raise
        finally:
            self.place = None

    def prove(self, match: Match) -> None:
        """Checks that a match's op could be placed. Raises Mismatch where something forbids it."""
        Placement(self.view, match).find()

    @property
    def changed(self) -> bool:
        """Whether anything was edited."""
        return bool(self.created or self._replaced)

    def undo(self, mark: tuple[int, int, int, int] = (0, 0, 0, 0)) -> None:
        """Takes back every edit since ``mark``; nodes, arguments and users are as they were."""
        created, replaced, learned, regions = mark
        for user, args, kwargs in reversed(self._replaced[replaced:]):
            user.args, user.kwargs = args, kwargs
        for node in reversed(self.created[created:]):
            self.graph.erase_node(node)
        for node, before, _ in reversed(self._learned[learned:]):
            if before is None:
                del self._new[node]
            else:
                self._new[node] = before
        del self._replaced[replaced:], self.created[created:], self._learned[learned:], self._regions[regions:]

    @property
    def _fresh(self) -> list[fx.Node]:
        """The nodes of the match that is being applied."""
        return self.created[self._mark[0] :]

    def originals(self) -> dict[fx.Node, fx.Node]:
        """Returns the nodes of the view that new nodes stand for."""
        return {new: old for old, new in self._new.items()}

    # --- for operators ---

    def keep(self, node: fx.Node, value: Value) -> None:
        """Notes that a new ``node`` is what ``value`` is, before :meth:`as_like`: a later op may read it as it is."""
        self.unrounded[node] = node_of(value)

    def current(self, node: fx.Node) -> fx.Node:
        """Returns the real node that now holds what a node of the view, or a new node, stands for."""
        while True:
            if node in self._new:
                node = self._new[node]
            elif node in self.view.made and self.view.made[node].target is operator.setitem:
                # An assignment has no result: what was written holds it, and may itself have been replaced.
                node = self._unkept(self.view.before[node])
            else:
                return self.view.node(node)

    def _unkept(self, node: fx.Node) -> fx.Node:
        """What a node of the view is now, never its copy from before it is written."""
        return self._new[node].all_input_nodes[0] if self.copied(node) else node

    def input(self, value: Value) -> fx.Node:
        """Returns the real node of an input. Raises Mismatch for a value inside a composite operation."""
        return self.current(node_of(value))

    def copied(self, node: fx.Node) -> bool:
        """Whether ops read a copy of a node of the view, because the graph changes or returns what holds it."""
        return self._new.get(node) in self._copies

    def emit(self, target: Any, *args: Any, **options: Any) -> fx.Node:
        """Returns a new node at the current position, run on fake tensors, so that bad input raises here."""
        return self.create("call_method" if isinstance(target, str) else "call_function", target, args, options)

    def create(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """Returns a new node, as :meth:`emit` does, from arguments that may hold nodes at any depth."""
        node = self.graph.create_node(op, target, tuple(args), dict(kwargs))
        self.created.append(node)
        mode = compat.fake_mode_of([t for n in self._nearby(node) for t in tensors_in(example(n))])
        # Tensors of positions have no input that would say that they are fake.
        with mode or contextlib.nullcontext():
            node.meta["example_value"] = run_fake(node)
        if self.place is not None:
            self.view.since[node] = self.view.position[self.place.anchor]
            node.meta.update(self.place.trace)
            wide = any(t.is_floating_point() for t in tensors_in(example(node)))
            through = wide and self.place.modes.grad and target != "detach"
            node.meta[GRAD] = through and any(map(self.needs_grad, node.all_input_nodes))
        return node

    def _nearby(self, node: fx.Node) -> list[fx.Node]:
        # Sizes alone do not say that tensors are fake.
        around = [self.place.anchor, *self.place.anchor.all_input_nodes] if self.place else []
        return [*node.all_input_nodes, *around]

    def needs_grad(self, node: fx.Node) -> bool:
        """Whether gradients may be asked of a node of the view or of a new one."""
        return self.view.flows(node)

    def to(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Returns ``node`` in a dtype."""
        return node if example(node).dtype == dtype else self.emit("to", node, dtype)

    def size(self, node: fx.Node, d: int) -> Size:
        """Returns a size of a node's tensor."""
        return size_of(example(node).shape[d], self.view.values.fixed)

    def shaped(self, node: fx.Node, shape: Sequence[Any], like: fx.Node) -> fx.Node:
        """Returns ``node`` reshaped; dynamic sizes are read off ``node`` or ``like``. Raises Mismatch."""
        have, wanted = self._known(example(node).shape), self._known(shape)
        if len(have) == len(wanted) and all(compat.same_size(a, b) for a, b in zip(have, wanted, strict=True)):
            return node
        sizes: list[Any] = []
        for size in wanted:
            if isinstance(size, int):
                sizes.append(size)
                continue
            source = self._sized(size, (node, like))
            if source is not None:
                sizes.append(self.emit("size", *source))
            elif -1 not in sizes:
                sizes.append(-1)
            else:
                raise Mismatch("the shape of the result has more than one new dynamic size")
        return self.emit("reshape", node, *sizes)

    def _sized(self, size: Any, nodes: Iterable[fx.Node]) -> tuple[fx.Node, int] | None:
        places = ((s, d) for s in nodes for d, other in enumerate(example(s).shape) if compat.same_size(other, size))
        return next(places, None)

    def _known(self, shape: Sequence[Any]) -> list[Any]:
        """Sizes whose symbols count as their present values, as numbers."""
        sizes = [size_of(s, self.view.values.fixed) for s in shape]
        return [s if size.symbols else size.factor for s, size in zip(shape, sizes, strict=True)]

    def widened(self, node: fx.Node, result: Value) -> fx.Node:
        """Returns ``node`` in the dtype of ``result`` where something needs the result that exactly."""
        dtype = example(node).dtype
        narrow = torch.finfo(result.dtype).bits <= torch.finfo(dtype).bits
        return node if narrow or self.narrowed(node_of(result), dtype) else self.emit("to", node, result.dtype)

    def narrowed(self, node: fx.Node, dtype: torch.dtype) -> bool:
        """Whether every use of the view's ``node`` is a cast to ``dtype``, through views at most."""
        users = [u for u in node.users if u.op != "output"]
        if not users or len(users) != len(node.users):
            return False
        for user in users:
            value = self.view.values.of(user)
            if not isinstance(value, Value) or (value.dtype != dtype and value.func not in VIEWS):
                return False
            if value.dtype == dtype and is_cast(value):
                continue
            if value.func not in VIEWS or not self.narrowed(user, dtype):
                return False
        return True

    def as_like(self, node: fx.Node, value: Value, sized: fx.Node | None = None) -> fx.Node:
        """Returns ``node`` with the shape and dtype of ``value``, and its memory order where that can be seen."""
        old = node_of(value)
        wanted = example(old)
        node = self.to(self.shaped(node, list(wanted.shape), sized or node), wanted.dtype)
        order = _memory_order(wanted)
        if _memory_order(example(node)) == order or not self._order_shows(old):
            return node
        # A later reshape must be the copy, or the view, that it was.
        back = sorted(range(len(order)), key=order.__getitem__)
        return self.emit("permute", self.emit("contiguous", self.emit("permute", node, *order)), *back)

    def _order_shows(self, old: fx.Node) -> bool:
        """Whether strides decide what is seen: a result whose memory order shows, or a view of it written in place."""
        seen, todo = {old}, [old]
        if self.view.written_between(old, len(self.view.real_nodes)):
            return True
        while todo:
            node = todo.pop()
            mine = self.view.values.of(node)
            for user in node.users:
                if user.op == "output":
                    return True
                value = self.view.values.of(user) if user.op.startswith("call_") else None
                if user in seen or not _keeps_order(value, mine):
                    continue
                seen.add(user)
                todo.append(user)
        return False

    # --- the laws ---

    def _keep_overwritten(self, place: Place) -> None:
        """Copies inputs that the op would see changed, right where they are made."""
        for n, look in place.looks.items():
            seen = min((self._seen[key] for key in self.view.storages(n) if key in self._seen), default=look)
            # Another op knows the tensor under this name as it was before.
            if self.view.written_between(n, look + 1, left=True, after=min(seen, look)):
                raise Mismatch(WRITTEN, self.view.value(n))
        for node in place.overwritten:
            if self.copied(node):
                continue
            held, at = self.current(node), self.view.defined(node)
            late = held in self.view.since and held not in self.view.position and self.view.since[held] > at
            if self.view.modes[self.view.real_nodes[self.view.since[held] if late else at]].grad != place.modes.grad:
                raise Mismatch(
                    "an input of the formula that is changed in place, or returned, is made in another grad mode",
                    self.view.value(node),
                )
            with self.graph.inserting_after(held if late else self.view.real_nodes[at]):
                kept = self.emit("clone", held)
            self._copies.add(kept)
            self._learn(node, kept)

    def _note(self, place: Place) -> None:
        """Notes from when on the ops know the tensors of a formula."""
        for n, look in [*place.looks.items(), *((n, self.view.defined(n)) for n in place.region)]:
            for key in self.view.storages(n):
                self._seen[key] = min(look, self._seen.get(key, look))

    def _settled(self, match: Match, pairs: Pairs) -> Pairs:
        """Checks each result against what it replaces, and keeps gradients and memory as the formula had them."""
        settled = []
        memory = self.view.effects.storages
        claimed = {key: key for v in match.inputs for key in memory(self.input(v))}
        shared = collections.Counter(key for _, new in pairs for key in memory(new))
        for value, new in pairs:
            old = node_of(value)
            _check_alike(example(old), example(new), value)
            if self.view.needs_grad[old]:
                self._check_reach(match, old, new)
            elif self.needs_grad(new):
                new = self.emit("detach", new)
            if self._apart(old, new, claimed, max(map(shared.__getitem__, memory(new))) > 1):
                new = self.emit("clone", new)
            settled.append((value, new))
        return settled

    def _apart(self, old: fx.Node, new: fx.Node, claimed: dict[int, int], shared: bool) -> bool:
        """Whether a result needs memory of its own: nothing may share it that did not share that of ``old``."""
        memory = self.view.effects.storages
        (mine,), (theirs,) = memory(new), self.view.storages(old)
        # PyTorch calls the hook of an op's own output with None where no gradient arrives; eager does not call it.
        if self.view.hooked(old) or (shared and self.view.overwritten(old)):
            return True
        if not self.view.escapes(old):
            return False
        same = [n for n in self._fresh if self.needs_grad(n) and mine in memory(n)]
        # A step on a result must change nothing that a backward needs, a later op's included.
        if any(n in self.unrounded or not self.needs_grad(new) for n in same):
            return True
        if any(mine in self._saved_memory(n) for n in self._fresh):
            return True
        return claimed.setdefault(mine, theirs) != theirs or self._repeats()

    def _saved_memory(self, node: fx.Node) -> set[int]:
        """The memory that the backward of a new node keeps."""
        if node not in self._saved:
            self._saved[node] = set()
            if self.place is not None and self.needs_grad(node) and node.target is not operator.getitem:
                saved = saved_by(node, self.needs_grad, self.place.modes)
                memory = self.view.effects.storages
                inputs, outputs = saved or (set(node.all_input_nodes), set(range(len(memory(node)))))
                self._saved[node] = {key for a in inputs for key in memory(a)} | {memory(node)[i] for i in outputs}
        return self._saved[node]

    def _repeats(self) -> bool:
        """Whether an op of several outputs may have been called on the same inputs before.

        AOTAutograd makes one call of two equal ones, and lets their outputs share memory.
        """
        mine, earlier = (
            [n for n in nodes if isinstance(example(n), (tuple, list))]
            for nodes in (self._fresh, self.created[: self._mark[0]])
        )
        return any(a.target == b.target and self._leaves(a) == self._leaves(b) for a in mine for b in earlier)

    def _leaves(self, node: fx.Node) -> set[fx.Node]:
        """The inputs of the graph that a node depends on."""
        seen, todo = {node}, [node]
        while todo:
            for parent in todo.pop().all_input_nodes:
                if parent not in seen:
                    seen.add(parent)
                    todo.append(parent)
        return {n for n in seen if n.op in ("placeholder", "get_attr")}

    def _check_reach(self, match: Match, old: fx.Node, new: fx.Node) -> None:
        """Raises Mismatch where a parameter would get zeros that the model leaves without a gradient."""
        view, roots = self.view, 0
        if not view.ends.get(old, 0):
            return
        given: dict[fx.Node, int] = collections.defaultdict(int)
        for value in match.inputs:
            given[self.input(value)] |= view.roots[node_of(value)]
        reached, todo = {new}, [new]
        while todo:
            parents = [n for n in todo.pop().all_input_nodes if n not in reached]
            reached.update(parents)
            # What an input is made of, its own roots say.
            todo += [n for n in parents if n not in given and n not in view.position and self.needs_grad(n)]
        for node in reached & given.keys():
            roots |= given[node]
        # A compiled graph is one node of autograd: each result has the gradients of all of them.
        for result in view.results:
            roots &= ~view.roots[result]
        if roots:
            raise Mismatch(
                "a parameter of another part of the formula would get zeros where the model gives it no gradient",
                self.view.value(old),
            )

    def _replace(self, value: Value, new: fx.Node) -> None:
        old = node_of(value)
        real = self.view.node(old)
        for key in TRACES:
            if key in real.meta:
                new.meta[key] = real.meta[key]
        fresh = set(self._fresh)
        region = {self.view.reader.get(n, n) for n in self.place.region} if self.place else set()
        steps = {n for n in region if self.view.effects.written(n)}
        for user, a in self._readers(old, real, steps):
            # An in-place step of the formula, kept for another reason, must not write the op's result.
            if user not in fresh and user not in steps:
                self._redirect(user, a, new)
        self._learn(old, new)

    def _readers(self, old: fx.Node, real: fx.Node, steps: set[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
        """The real nodes that read what a node of the view stands for, each with the name that it reads."""
        resolved = self.view.resolved
        if old in self.view.made:
            readers = [self.view.reader[u] for u in old.users]
            return [(user, a) for user in readers for a, now in resolved[user].items() if now is old]
        own = any(real in self.view.effects.written(step) for step in steps)
        exact = [user for user in real.users if not own or resolved.get(user, {}).get(real, old) is old]
        return [(user, real) for user in exact]

    def _redirect(self, user: fx.Node, old: fx.Node, new: fx.Node) -> None:
        self._replaced.append((user, user.args, user.kwargs))
        user.replace_input_with(old, new)

    def _learn(self, old: fx.Node, new: fx.Node) -> None:
        self._learned.append((old, self._new.get(old), new))
        self._new[old] = new

    # --- the end ---

    def sweep(self) -> None:
        """Erases what only the replaced formulas needed. Never the whole graph's dead code: it may have effects.

        Nothing is undone from here on: what is left where this fails is dead code.
        """
        gone = unneeded(self.view, {n for region in self._regions for n in region})
        self.committed = True
        share_memory(self.view, [(old, new) for old, _, new in self._learned if new not in self._copies])
        parents = [a for node in gone for a in node.all_input_nodes]
        for node in sorted(gone, key=self.view.position.__getitem__, reverse=True):
            self.graph.erase_node(node)
        todo = [n for n in parents if n not in gone]
        while todo:
            node = todo.pop()
            if node not in gone and not node.users and pure(self.view, node):
                todo += node.all_input_nodes
                gone.add(node)
                self.graph.erase_node(node)

    def guard(self) -> None:
        """Lets the compile be specialised on the sizes that were taken as fixed."""
        fixed = self.view.values.fixed
        for node in self.graph.nodes if fixed else ():
            if node.op != "placeholder":
                continue
            given = example(node)
            sizes = [s for t in tensors_in(given) for s in t.shape] or [given]
            for size in sizes:
                if isinstance(size, torch.SymInt) and str(compat.expression(size)) in fixed:
                    int(size)


def _check_alike(old: torch.Tensor, new: torch.Tensor, value: Value) -> None:
    same = len(old.shape) == len(new.shape) and old.dtype == new.dtype and old.device == new.device
    if not same or not all(_may_equal(a, b) for a, b in zip(old.shape, new.shape, strict=True)):
        have, want = (f"{[*t.shape]} {t.dtype} on {t.device}" for t in (new, old))
        raise Mismatch(f"the op gives {have} where the formula gives {want}", value)


def _may_equal(a: Any, b: Any) -> bool:
    return compat.same_size(a, b) or not (isinstance(a, int) and isinstance(b, int))


def _keeps_order(value: Any, of: Any) -> bool:
    """Whether an operation's result shows its input's memory order: views, tuples of views, elementwise operations."""
    if isinstance(value, tuple):
        return True
    if not isinstance(value, Value) or not isinstance(of, Value):
        return False
    return value.func in VIEWS or (value.shape == of.shape and value.func not in _FRESH)


_FRESH = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.native_layer_norm.default,
    torch.ops.aten.native_dropout.default,
}
"""Operations whose result does not have its input's memory order."""


def _memory_order(t: torch.Tensor) -> list[int]:
    """The dimensions by falling stride; dimensions of size 1 stay where they are."""
    strides, sizes = ([compat.hint(s) for s in each] for each in (t.stride(), t.shape))
    real = iter(sorted((d for d in range(t.dim()) if sizes[d] != 1), key=lambda d: -strides[d]))
    return [next(real) if sizes[d] != 1 else d for d in range(t.dim())]
