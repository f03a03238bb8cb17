"""Edits of a graph: each is proved before the first node moves, and taken back exactly where it fails.

A match says which values its op reads and which it gives. Proved for every operator alike: a position exists after the
inputs and before the uses; nothing is written in between; the modes are the formula's; nobody watches what goes away;
results need gradients, reach parameters and share memory as the formula's did.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.effects import Modes
from mhc_inductor.routing.graph.expressions import VIEWS, is_cast
from mhc_inductor.routing.graph.index import Size, size_of
from mhc_inductor.routing.graph.run import run_fake
from mhc_inductor.routing.graph.values import Value, example, tensors_in
from mhc_inductor.routing.graph.view import GRAD, View
from mhc_inductor.routing.operator import Match, Mismatch, Unplaced, Verdict

Pairs = Sequence[tuple[Value, fx.Node]]
Emit = Callable[["Edit", Match], Iterable[tuple[Value, fx.Node]]]
Check = Callable[["Edit", Match, Pairs], Verdict]
_WRITTEN = "a tensor of the formula is changed in place within it"
_TRACES = ("stack_trace", "nn_module_stack", "source_fn_stack")


def node_of(value: Value) -> fx.Node:
    """Returns the view's node of a value. Raises Mismatch for one inside a composite operation."""
    if value.node is None:
        raise Mismatch("a tensor of the formula is inside a composite operation", value)
    return value.node


@dataclasses.dataclass
class Place:
    """Where an op goes: before ``anchor``, in ``modes``; ``region`` are the view's nodes of the formula, outputs included."""

    anchor: fx.Node
    modes: Modes
    region: set[fx.Node]
    trace: dict[str, Any]
    overwritten: list[fx.Node]
    """Inputs, as nodes of the view, that are written between the formula's first look at them and the anchor."""
    looks: dict[fx.Node, int]
    """Inputs, with the position just before the formula first reads each."""


class Edit:
    """The edits of one graph. Operators call :meth:`emit` and its helpers between :meth:`apply`'s proofs."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.graph = view.real
        self.place: Place | None = None
        self.verdict = Verdict()
        """What the check said of the last match."""
        self._new: dict[fx.Node, fx.Node] = {}
        self._created: list[fx.Node] = []
        self._unrounded: dict[fx.Node, fx.Node] = {}
        self._replaced: list[tuple[fx.Node, Any, Any]] = []
        self._learned: list[fx.Node] = []
        self._regions: list[set[fx.Node]] = []
        self._copies: set[fx.Node] = set()
        self._saved: set[fx.Node] = set()
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
        mark = self._mark = len(self._created), len(self._replaced), len(self._learned), len(self._regions)
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
            return self._created[mark[0] :]
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
        return bool(self._created or self._replaced)

    def undo(self, mark: tuple[int, int, int, int] = (0, 0, 0, 0)) -> None:
        """Takes back every edit since ``mark``; nodes, arguments and users are as they were."""
        created, replaced, learned, regions = mark
        for user, args, kwargs in reversed(self._replaced[replaced:]):
            user.args, user.kwargs = args, kwargs
        for node in reversed(self._created[created:]):
            self.graph.erase_node(node)
        for node in self._learned[learned:]:
            self._new.pop(node, None)
        del self._replaced[replaced:], self._created[created:], self._learned[learned:], self._regions[regions:]

    @property
    def created(self) -> list[fx.Node]:
        """The nodes that this and earlier matches made, each after those that it reads."""
        return self._created

    def originals(self) -> dict[fx.Node, fx.Node]:
        """Returns the nodes of the view that new nodes stand for."""
        return {new: old for old, new in self._new.items()}

    def unrounded(self) -> dict[fx.Node, fx.Node]:
        """Returns the nodes of the view that new nodes stand for in an op's own layout and dtype."""
        return self._unrounded

    # --- for operators ---

    def keep(self, node: fx.Node, value: Value) -> None:
        """Notes that a new ``node`` is what ``value`` is, before :meth:`as_like`: a later op may read it as it is."""
        self._unrounded[node] = node_of(value)

    def saves(self, node: fx.Node) -> None:
        """Notes that an op keeps the new ``node``, an output of it, for its backward."""
        self._saved.add(node)

    def unsaved(self, value: Value, name: str) -> fx.Node:
        """Returns the real node of an input that the op keeps for its backward, and the formula does not.

        Raises Mismatch where the graph returns it too: a step in place on it before the backward would fail.
        """
        node = node_of(value)
        if self.place is not None and self.place.modes.grad and node.op != "placeholder" and self.view.returned(node):
            raise Mismatch(f"{name} is a result of the graph too, and the op keeps it for its backward", value)
        return self.current(node)

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
        kept = self._new.get(node)
        return kept.all_input_nodes[0] if kept is not None and kept in self._copies else node

    def input(self, value: Value) -> fx.Node:
        """Returns the real node of an input. Raises Mismatch for a value inside a composite operation."""
        return self.current(node_of(value))

    def emit(self, target: Any, *args: Any, **options: Any) -> fx.Node:
        """Returns a new node at the current position, run on fake tensors, so that bad input raises here."""
        return self.create("call_method" if isinstance(target, str) else "call_function", target, args, options)

    def create(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """Returns a new node, as :meth:`emit` does, from arguments that may hold nodes at any depth."""
        node = self.graph.create_node(op, target, tuple(args), dict(kwargs))
        self._created.append(node)
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
        """Copies inputs that are written before the op reads them, right where they are made."""
        for n, look in place.looks.items():
            seen = min((self._seen[key] for key in self._storages(n) if key in self._seen), default=look)
            # Another op knows the tensor under this name as it was before.
            if self.view.written_between(n, look + 1, left=True, after=min(seen, look)):
                raise Mismatch(_WRITTEN, self.view.value(n))
        for node in place.overwritten:
            if self._new.get(node) in self._copies:
                continue
            held, at = self.current(node), self.view.defined(node)
            late = held in self.view.since and held not in self.view.position and self.view.since[held] > at
            if self.view.modes[self.view.real_nodes[self.view.since[held] if late else at]].grad != place.modes.grad:
                raise Mismatch(
                    "an input of the formula is changed in place in another grad mode", self.view.value(node)
                )
            with self.graph.inserting_after(held if late else self.view.real_nodes[at]):
                kept = self.emit("clone", held)
            self._copies.add(kept)
            self._learn(node, kept)

    def _note(self, place: Place) -> None:
        """Notes from when on the ops know the tensors of a formula."""
        for n, look in [*place.looks.items(), *((n, self.view.defined(n)) for n in place.region)]:
            for key in self._storages(n):
                self._seen[key] = min(look, self._seen.get(key, look))

    def _storages(self, node: fx.Node) -> set[int]:
        return {compat.storage_key(t) for t in tensors_in(example(self.view.node(node)))}

    def _settled(self, match: Match, pairs: Pairs) -> Pairs:
        """Checks each result against what it replaces, and keeps gradients and memory as the formula had them."""
        settled = []
        memory = {compat.storage_key(t) for v in match.inputs for t in tensors_in(example(self.input(v)))}
        claimed = {key: key for key in memory}
        shared = collections.Counter(compat.storage_key(example(new)) for _, new in pairs)
        for value, new in pairs:
            old = node_of(value)
            _check_alike(example(old), example(new), value)
            if self.view.needs_grad[old]:
                self._check_reach(match, old, new)
            elif self.needs_grad(new):
                new = self.emit("detach", new)
            mine = compat.storage_key(example(new))
            if self._apart(old, new, claimed, shared[mine] > 1):
                new = self.emit("clone", new)
            settled.append((value, new))
        return settled

    def _apart(self, old: fx.Node, new: fx.Node, claimed: dict[int, int], shared: bool) -> bool:
        """Whether a result needs memory of its own: nothing may share it that did not share that of ``old``."""
        mine, theirs = compat.storage_key(example(new)), compat.storage_key(example(self.view.node(old)))
        # PyTorch calls the hook of an op's own output with None where no gradient arrives; eager does not call it.
        if self.view.hooked(old) or (shared and self.view.overwritten(old)):
            return True
        if not self.view.escapes(old):
            return False
        fresh = self._created[self._mark[0] :]
        same = [n for n in fresh if mine in {compat.storage_key(t) for t in tensors_in(example(n))}]
        # A step on a result must change nothing that the op's backward needs.
        if any(self.needs_grad(n) and (n in self._saved or not self.needs_grad(new)) for n in same):
            return True
        return claimed.setdefault(mine, theirs) != theirs or self._repeats()

    def _repeats(self) -> bool:
        """Whether an op of several outputs may have been called on the same inputs before.

        AOTAutograd makes one call of two equal ones, and lets their outputs share memory.
        """
        calls = [n for n in self._created if isinstance(example(n), (tuple, list))]
        mine = set(self._created[self._mark[0] :])
        return any(
            a.target == b.target and self._leaves(a) == self._leaves(b)
            for a in calls
            if a in mine
            for b in calls
            if b not in mine
        )

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
        made = set(self._created)
        reached, todo = set(), [new]
        while todo:
            for parent in todo.pop().all_input_nodes:
                if parent in made and parent not in reached and self.needs_grad(parent):
                    todo.append(parent)
                reached.add(parent)
        view, roots = self.view, 0
        for value in match.inputs:
            if self.input(value) in reached:
                roots |= view.roots[node_of(value)]
        # A compiled graph is one node of autograd: each result has the gradients of all of them.
        for result in view.results if view.ends.get(old, 0) else ():
            roots &= ~view.roots[result]
        if view.ends.get(old, 0) and roots:
            raise Mismatch(
                "a parameter of another part of the formula would get zeros where the model gives it no gradient",
                self.view.value(old),
            )

    def _replace(self, value: Value, new: fx.Node) -> None:
        old = node_of(value)
        real = self.view.node(old)
        for key in _TRACES:
            if key in real.meta:
                new.meta[key] = real.meta[key]
        fresh = set(self._created[self._mark[0] :])
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
        self._new[old] = new
        self._learned.append(old)

    # --- the end ---

    def sweep(self) -> None:
        """Erases what only the replaced formulas needed. Never the whole graph's dead code: it may have effects.

        Nothing is undone from here on: what is left where this fails is dead code.
        """
        gone = self._unneeded()
        self.committed = True
        parents = [a for node in gone for a in node.all_input_nodes]
        for node in sorted(gone, key=self.view.position.__getitem__, reverse=True):
            self.graph.erase_node(node)
        todo = [n for n in parents if n not in gone]
        erased: set[fx.Node] = set()
        while todo:
            node = todo.pop()
            if node in erased or node.users or not self._pure(node):
                continue
            todo += node.all_input_nodes
            erased.add(node)
            self.graph.erase_node(node)

    def _unneeded(self) -> set[fx.Node]:
        """The real nodes of the formulas that nothing else reads, in-place steps on their own tensors included."""
        formulas = {n for region in self._regions for n in region}
        formulas |= self._unread(formulas)
        gone = {self.view.node(n) for n in formulas if n.op.startswith("call_")}
        gone |= {n for n in self._written_only(gone)}
        kept = True
        while kept:
            kept = False
            # Readers come later in the graph: one look from its end settles all but what in-place steps hold.
            for n in sorted(gone, key=self.view.position.__getitem__, reverse=True):
                if any(u not in gone for u in n.users) or not self._removable(n, gone):
                    gone.discard(n)
                    kept = True
        return gone

    def _unread(self, formulas: set[fx.Node]) -> set[fx.Node]:
        """What is computed from the formulas and never read: Dynamo leaves dead code in its graphs."""
        found: set[fx.Node] = set()
        todo = list(formulas)
        while todo:
            for user in todo.pop().users:
                if user not in self.view.live and user not in found:
                    found.add(user)
                    todo.append(user)
        return found

    def _written_only(self, gone: set[fx.Node]) -> Iterator[fx.Node]:
        """In-place steps on what the formulas made, whose results the view knows under another name."""
        for _, _, node in self.view.events:
            if all(n in gone for n in self.view.effects.written(node)):
                yield node

    def _removable(self, node: fx.Node, gone: set[fx.Node]) -> bool:
        if example(node) is None and not self.view.effects.written(node):
            return False
        effect = self.view.effects.of(node)
        if not effect.known or (effect.watches and not effect.writes):
            return False
        written = {compat.storage_key(t) for n in self.view.effects.written(node) for t in tensors_in(example(n))}
        return all(holder in gone for s in written for holder in self.view.holders[s])

    def _pure(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            return True
        if node.op not in ("call_function", "call_method") or example(node) is None:
            return False
        effect = self.view.effects.of(node)
        return effect.known and not effect.writes and not effect.watches and self.view.values.inspectable(node)

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


class Placement:
    """Finds where one match's op may stand."""

    def __init__(self, view: View, match: Match) -> None:
        self.view = view
        self.match = match
        self.ins = list(dict.fromkeys(node_of(v) for v in match.inputs))
        self.outs = list(dict.fromkeys(node_of(v) for v in match.outputs))
        self.at = self.match.start

    def find(self) -> Place:
        """Returns the position. Raises Mismatch, or Unplaced where inputs and results leave no room."""
        view = self.view
        region = self._region()
        self._check_writes(region)
        modes = self._modes(region)
        self._check_watched(region)
        self._check_outputs(region)
        anchor = self._anchor(region, modes)
        first = min(self.outs, key=view.defined)
        trace: dict[str, Any] = {k: first.meta[k] for k in _TRACES[:2] if k in first.meta}
        at = view.position.get(anchor, len(view.position))
        looks = {n: self._looked_at(n, region) for n in self.ins}
        overwritten = [n for n, look in looks.items() if view.written_between(n, at, after=look)]
        if any(view.written_between(n, looks[n] + 1, left=True) for n in overwritten):
            raise Mismatch(_WRITTEN, self.at)
        return Place(anchor, view.modes[anchor], region, trace, overwritten, looks)

    def _looked_at(self, node: fx.Node, region: set[fx.Node]) -> int:
        """The position just before the formula first reads an input; its definition where gradients saw it change."""
        view = self.view
        made = view.defined(node)
        first = min((view.defined(u) for u in node.users if u in region), default=made + 1) - 1
        writers = view.writers(node, made, first)
        quiet = all(not view.modes[n].grad or not any(map(view.flows, n.all_input_nodes)) for n in writers)
        return max(first, made) if quiet else made

    def _region(self) -> set[fx.Node]:
        """The view's nodes between inputs and outputs. Raises Unplaced where an input needs an output."""
        ins, region, todo = set(self.ins), set(self.outs), list(self.outs)
        while todo:
            for parent in todo.pop().all_input_nodes:
                known = parent in ins or parent in region or parent not in self.view.order
                if not known and parent.op.startswith("call_"):
                    region.add(parent)
                    todo.append(parent)
        floor = min(self.view.order[o] for o in self.outs)
        outs, todo, seen = set(self.outs), list(self.ins), set(self.ins)
        while todo:
            node = todo.pop()
            if node in outs:
                raise Unplaced("an input of the op depends on its result", self.at)
            for parent in node.all_input_nodes:
                if parent not in seen and self.view.order.get(parent, -1) >= floor:
                    seen.add(parent)
                    todo.append(parent)
        return region

    def _check_writes(self, region: set[fx.Node]) -> None:
        """Raises Mismatch where something that the view could not make functional writes within the formula."""
        last = max(self.view.defined(o) for o in self.outs)
        inside = any(self.view.written_between(n, last + 1, left=True) for n in region)
        seen = {n: self._looked_at(n, region) for n in self.ins}
        if inside or any(self.view.written_between(n, last + 1, left=True, after=at) for n, at in seen.items()):
            raise Mismatch(_WRITTEN, self.at)

    def _modes(self, region: set[fx.Node]) -> Modes:
        """The modes of the formula. Raises Mismatch where they change within it."""
        view = self.view
        flowing = [n for n in region if any(view.flows(a) for a in n.all_input_nodes)]
        # Reals without gradients may be computed in any grad mode.
        grads = {view.modes_at(n).grad for n in flowing}
        if len(grads) > 1:
            raise Mismatch("gradients are switched on or off within the formula", self.at)
        first = view.modes_at(min(self.outs, key=view.defined))
        if len({view.modes_at(n).inference for n in region}) > 1:
            raise Mismatch("inference mode is switched on or off within the formula", self.at)
        return dataclasses.replace(first, grad=grads.pop()) if grads else first

    def _check_watched(self, region: set[fx.Node]) -> None:
        """Raises Mismatch where a hook, or anything that keeps a tensor, is on a value that goes away."""
        outs = set(self.outs)
        for node in region:
            inside = any(u in region for u in node.users)
            if node in outs and not inside:
                continue
            for user in node.users:
                effect = self.view.effects.of(self.view.reader.get(user, user))
                if user not in region and (effect.watches or not effect.known):
                    raise Mismatch("a hook is on an intermediate result of the formula", self.view.value(node))

    def _check_outputs(self, region: set[fx.Node]) -> None:
        """Raises Mismatch where a result's memory is shared with something that stays, or written later under another name."""
        view, outs = self.view, set(self.outs)
        for node in self.outs:
            if node in view.made and any(u in view.made and u not in region for u in node.users):
                raise Mismatch("a result of the formula is changed in place later", self.at)
            storages = {compat.storage_key(t) for t in tensors_in(example(node))}
            for other in region - outs:
                shared = storages & {compat.storage_key(t) for t in tensors_in(example(other))}
                if shared and any(u not in region and u in view.live for u in other.users) and view.escapes(other):
                    raise Mismatch("a result of the formula shares memory with another result", self.at)

    def _anchor(self, region: set[fx.Node], modes: Modes) -> fx.Node:
        """The node to insert before: the first result, or right after the last input where that is later."""
        view = self.view
        real = view.real_nodes
        late = max((view.defined(n) for n in self.ins), default=-1)
        start = min(view.defined(o) for o in self.outs)
        uses = [view.defined(u) for o in self.outs for u in o.users if u not in region]
        end = min(uses, default=len(real) - 1)
        for at in (start, *range(max(late + 1, start), end + 1)):
            if at > late and self._fits(view.modes[real[at]], modes):
                return real[at]
        if late >= end:
            raise Unplaced("an input of the op is computed after one of its results is used", self.at)
        raise Mismatch("gradients are switched on or off within the formula", self.at)

    def _fits(self, here: Modes, wanted: Modes) -> bool:
        return here.grad == wanted.grad and here.inference == wanted.inference


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
