# SPDX-License-Identifier: Apache-2.0
"""Edits of a graph. Each is proved correct before the graph changes, and undone exactly if it fails.

A match names the values that its op reads and those that it returns. The same conditions are proved for every operator:
there is a position after the inputs and before the uses; nothing in between writes these tensors; the grad, inference
and autocast modes are the formula's; no hook is on a value that disappears; results need gradients, reach parameters
and share memory as the formula's did.
"""

from __future__ import annotations

import collections
import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing import sharded
from mhc_inductor.routing.graph.expressions import VIEWS, is_cast
from mhc_inductor.routing.graph.index import Size, size_of
from mhc_inductor.routing.graph.values import Value, example, reached, run_fake, tensors_in
from mhc_inductor.routing.graph.view import GRAD, View
from mhc_inductor.routing.interface import Match, Mismatch, Verdict
from mhc_inductor.routing.placement import TRACES, WRITTEN, Place, Placement, module_of, node_of, saved_by

__all__ = ["Check", "Edit", "Emit", "Pairs", "node_of"]

Pairs = Sequence[tuple[Value, fx.Node]]
"""Each output of a match with the new node that replaces it."""
Emit = Callable[["Edit", Match], Iterable[tuple[Value, fx.Node]]]
"""Builds a match's op in the graph and returns the pairs."""
Check = Callable[["Edit", Match, Pairs], Verdict]
"""Compares a match's op with its formula before the op replaces it; raises Mismatch to refuse the op."""


class Edit:
    """The edits of one graph.

    :meth:`apply` edits the graph for one match. The operator's ``emit``, which it calls, builds nodes with :meth:`emit`
    and the other helpers.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.graph = view.real
        self.place: Place | None = None
        self._new: dict[fx.Node, fx.Node] = {}
        self.created: list[fx.Node] = []
        """The nodes that this and earlier matches created, each after the nodes that it reads."""
        self.unrounded: dict[fx.Node, fx.Node] = {}
        """New nodes that hold a value in an op's own layout and dtype, with the view's node that they stand for."""
        self._replaced: list[tuple[fx.Node, Any, Any]] = []
        self._learned: list[tuple[fx.Node, fx.Node]] = []
        """The nodes of the view that were replaced, in order, each with the node that stands for it from then on."""
        self._formulas: set[fx.Node] = set()
        self._copies: set[fx.Node] = set()
        self._saved: dict[fx.Node, set[int]] = {}
        self._seen: dict[int, int] = {}
        self._reach: dict[fx.Node, int] = {}
        """The graph inputs that a gradient reaches through the op in place of a node, as a bit mask."""
        self._mark = (0, 0, 0)
        self.committed = False

    # --- applying a match ---

    def apply(self, match: Match, emit: Emit, check: Check | None = None) -> Verdict:
        """Puts one match's op into the graph.

        Args:
            match: the formula and its op.
            emit: builds the op and returns each output with its new node.
            check: is called with the new nodes while the formula still stands, and may refuse them.

        Returns:
            What the check says.

        Raises:
            Mismatch: if the op may not stand there. This and whatever ``emit`` raises leave the graph unchanged.
        """
        self.view.settle()
        mark = self._mark = len(self.created), len(self._replaced), len(self._learned)
        try:
            self.place = Placement(self.view, match).find()
            self._keep_overwritten(self.place)
            with self.graph.inserting_before(self.place.anchor), self.place.modes.entered():
                pairs = self._settled(match, [*emit(self, match)])
                sharded.check(self.view, self.fresh, pairs)
            verdict = Verdict() if check is None else check(self, match, pairs)
            for value, new in pairs:
                self._replace(value, new)
            self._note(self.place)
            self._formulas |= self.place.region
            return verdict
        except BaseException:
            self.undo(mark)
            raise
        finally:
            self.place = None

    @property
    def changed(self) -> bool:
        """Returns whether anything was edited."""
        return bool(self.created or self._replaced)

    def undo(self, mark: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Undoes every edit since ``mark``; restores nodes, arguments and users."""
        created, replaced, learned = mark
        for user, args, kwargs in reversed(self._replaced[replaced:]):
            user.args, user.kwargs = args, kwargs
        for node in reversed(self.created[created:]):
            self.unrounded.pop(node, None)
            self.graph.erase_node(node)
        del self._replaced[replaced:], self.created[created:], self._learned[learned:]
        self._new = dict(self._learned)

    @property
    def fresh(self) -> list[fx.Node]:
        """Returns the nodes created for the match that is being applied."""
        return self.created[self._mark[0] :]

    def originals(self) -> dict[fx.Node, fx.Node]:
        """Returns the new nodes with the nodes of the view that they stand for; an op's result and its clone both do."""
        return {new: old for old, new in self._learned}

    # --- for operators ---

    def keep(self, node: fx.Node, value: Value) -> None:
        """Records that ``node`` holds ``value`` before :meth:`as_like` converts it: a later op may read it directly."""
        self.unrounded[node] = node_of(value)

    def current(self, node: fx.Node) -> fx.Node:
        """Returns the real node that now holds what a node of the view, or a new node, stands for."""
        while True:
            if node in self._new:
                node = self._new[node]
            elif node in self.view.made and self.view.origin[node] is not self.view.made[node]:
                # An assignment (setitem, or a copy into a slice) has no result: the tensor it writes holds the value,
                # and may itself have been replaced.
                node = self._unkept(self.view.before[node])
            else:
                return self.view.node(node)

    def _unkept(self, node: fx.Node) -> fx.Node:
        """Returns the original of a node that :meth:`_keep_overwritten` cloned, else the node itself."""
        return self._new[node].all_input_nodes[0] if self.copied(node) else node

    def input(self, value: Value) -> fx.Node:
        """Returns the real node of an input. Raises Mismatch for a value inside a composite operation."""
        return self.current(node_of(value))

    def copied(self, node: fx.Node) -> bool:
        """Returns whether ops read a clone of a node of the view, because the graph writes or returns the original."""
        return self._new.get(node) in self._copies

    def emit(self, target: Any, *args: Any, **options: Any) -> fx.Node:
        """Creates a node at the current position and runs it on fake tensors, so that invalid inputs raise here.

        Returns the tensor's own node for a conversion to the dtype that it has: :meth:`_viewed_from_outside` must see the
        origin of what is viewed.
        """
        if target == "to" and example(args[0]).dtype == args[1]:
            return args[0]
        return self.create("call_method" if isinstance(target, str) else "call_function", target, args, options)

    def create(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """Creates a node like :meth:`emit`, from arguments that may hold nodes at any depth.

        Raises Mismatch if an argument is computed after the current position.
        """
        node = self.graph.create_node(op, target, tuple(args), dict(kwargs))
        self.created.append(node)
        if self.place is not None:
            position = self.view.position
            here = position[self.place.anchor]
            if any(position.get(n, -1) >= here for n in node.all_input_nodes):
                raise Mismatch("an input of the op is computed after the place where the op would stand")
        # Inputs that are only sizes carry no fake mode: look at the anchor and its inputs too.
        around = [self.place.anchor, *self.place.anchor.all_input_nodes] if self.place is not None else []
        mode = compat.fake_mode_of([t for n in (*node.all_input_nodes, *around) for t in tensors_in(example(n))])
        # A call without tensor inputs, such as arange, needs the fake mode to return a fake tensor.
        with mode or contextlib.nullcontext():
            ours, modes = str(target).startswith("mhc_inductor."), self.place.modes if self.place is not None else None
            node.meta["example_value"] = self.view.effects.result(node, modes) if ours else run_fake(node)
        if (outside := self._viewed_from_outside(node)) is not None:
            self.graph.erase_node(self.created.pop())
            copy = self.emit("clone", outside)
            return self.create(op, target, *fx.node.map_arg((args, kwargs), lambda n: copy if n is outside else n))
        if self.place is not None:
            self.view.since[node] = self.view.position[self.place.anchor]
            node.meta.update(self.place.trace)
            wide = any(t.is_floating_point() for t in tensors_in(example(node)))
            through = wide and self.place.modes.grad and target != "detach"
            node.meta[GRAD] = through and any(map(self.needs_grad, node.all_input_nodes))
        return node

    def _viewed_from_outside(self, node: fx.Node) -> fx.Node | None:
        """Returns an input from outside of the inference mode that ``node``, a view of it, stands in.

        AOTAutograd cannot trace such a view: "Cannot set version_counter for inference tensor" (torch 2.11 to 2.13). A
        view of a copy that is made inside is fine.
        """
        if self.place is None or not self.place.modes.inference or not _is_view(node):
            return None
        outside = (n for n in node.all_input_nodes if n in self.view.modes and not self.view.modes[n].inference)
        return next(outside, None)

    def needs_grad(self, node: fx.Node) -> bool:
        """Returns whether gradients may flow through a node of the view or a new node."""
        return self.view.flows(node)

    def to(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Returns ``node`` cast to ``dtype``; ``node`` itself if it has that dtype."""
        return self.emit("to", node, dtype)

    def size(self, node: fx.Node, d: int) -> Size:
        """Returns the size of dimension ``d`` of a node's tensor."""
        return size_of(example(node).shape[d], self.view.values.fixed)

    def shaped(self, node: fx.Node, shape: Sequence[Any], like: fx.Node) -> fx.Node:
        """Returns ``node`` reshaped to ``shape``. Raises Mismatch if more than one dynamic size is new.

        Dynamic sizes are read from ``node`` or ``like`` at run time.
        """
        have, wanted, same = self._known(example(node).shape), self._known(shape), compat.routing.same_size
        if len(have) == len(wanted) and all(map(same, have, wanted)):
            return node
        sizes: list[Any] = []
        for size in wanted:
            if isinstance(size, int):
                sizes.append(size)
                continue
            places = ((n, d) for n in (node, like) for d, other in enumerate(example(n).shape) if same(other, size))
            source = next(places, None)
            if source is not None:
                sizes.append(self.emit("size", *source))
            elif -1 not in sizes:
                sizes.append(-1)
            else:
                raise Mismatch("the result's shape has more than one dynamic size that no input has")
        return self.emit("reshape", node, *sizes)

    def _known(self, shape: Sequence[Any]) -> list[Any]:
        """Returns the sizes with fixed symbols replaced by their values."""
        sizes = [size_of(s, self.view.values.fixed) for s in shape]
        return [s if size.symbols else size.factor for s, size in zip(shape, sizes, strict=True)]

    def widened(self, node: fx.Node, result: Value) -> fx.Node:
        """Returns ``node``, cast to the dtype of ``result`` if that is wider and some use needs it."""
        dtype = example(node).dtype
        narrow = torch.finfo(result.dtype).bits <= torch.finfo(dtype).bits
        return node if narrow or self.narrowed(node_of(result), dtype) else self.emit("to", node, result.dtype)

    def narrowed(self, node: fx.Node, dtype: torch.dtype) -> bool:
        """Returns whether every use of the view's ``node`` casts it to ``dtype``, directly or through views."""

        def casts(user: fx.Node) -> bool:
            value = None if user.op == "output" else self.view.value(user)
            if value is None:
                return False
            return (value.dtype == dtype and is_cast(value)) or (value.func in VIEWS and self.narrowed(user, dtype))

        return bool(node.users) and all(map(casts, node.users))

    def as_like(self, node: fx.Node, value: Value, sized: fx.Node | None = None) -> fx.Node:
        """Returns ``node`` with the shape and dtype of ``value``, and with its memory order if that is observable."""
        old = node_of(value)
        wanted = example(old)
        node = self.to(self.shaped(node, list(wanted.shape), sized or node), wanted.dtype)
        order = _memory_order(wanted)
        if _memory_order(example(node)) == order or not self._order_shows(old):
            return node
        # A later reshape must stay a copy or stay a view, as in the model.
        back = sorted(range(len(order)), key=order.__getitem__)
        return self.emit("permute", self.emit("contiguous", self.emit("permute", node, *order)), *back)

    def _order_shows(self, old: fx.Node) -> bool:
        """Returns whether the memory order of a result is observable.

        It is if the graph returns the result, or something computed in its memory order, or writes its memory later.
        """
        of = self.view.values.of

        def alike(node: fx.Node) -> Iterator[fx.Node]:
            return (u for u in node.users if u.op != "output" and _keeps_order(of(u), of(node)))

        return self.view.overwritten(old) or any(u.op == "output" for n in reached([old], alike) for u in n.users)

    # --- conditions and how they are kept ---

    def _keep_overwritten(self, place: Place) -> None:
        """Clones inputs that the op would otherwise read after a write, right after they are computed."""
        for n, look in place.looks.items():
            seen = min((self._seen[key] for key in self.view.storages(n) if key in self._seen), default=look)
            # An earlier op reads this tensor as it was before the write.
            if self.view.written_between(n, look + 1, left=True, after=min(seen, look)):
                raise Mismatch(WRITTEN, self.view.value(n))
        for node in place.overwritten:
            if self.copied(node):
                continue
            held, at = self.current(node), self.view.defined(node)
            late = held in self.view.since and held not in self.view.position and self.view.since[held] > at
            copied = self.view.since[held] if late else at
            if self.view.written_between(node, place.looks[node] + 1, left=True, after=copied):
                raise Mismatch(WRITTEN, self.view.value(node))  # the formula reads what a write without gradients left
            if self.view.modes[self.view.real_nodes[copied]].grad != place.modes.grad:
                raise Mismatch(
                    "an input of the formula that is written in place, or returned, is computed in another grad mode",
                    self.view.value(node),
                )
            after = held if late else self.view.real_nodes[at]
            with self.graph.inserting_after(after):
                kept = self.emit("clone", held)
            kept.meta.update(module_of(self.view, after))
            self._copies.add(kept)
            self._learn(node, kept)

    def _note(self, place: Place) -> None:
        """Records from which position on ops read each tensor of a formula."""
        for n, look in [*place.looks.items(), *((n, self.view.defined(n)) for n in place.region)]:
            for key in self.view.storages(n):
                self._seen[key] = min(look, self._seen.get(key, look))

    def _settled(self, match: Match, pairs: Pairs) -> Pairs:
        """Checks each result against the value that it replaces, and detaches or clones it where needed.

        Gradients and shared memory are then as the formula had them.
        """
        settled = []
        memory = self.view.effects.storages
        claimed = {key: key for v in match.inputs for key in memory(self.input(v))}
        shared = collections.Counter(key for _, new in pairs for key in memory(new))
        for value, new in pairs:
            old = node_of(value)
            _check_alike(example(old), example(new), value)
            if self.view.needs_grad[old]:
                new = self._reaching(match, old, new)
            elif self.needs_grad(new):
                new = self.emit("detach", new)
            if self._apart(old, new, claimed, max(map(shared.__getitem__, memory(new))) > 1):
                new = self.emit("clone", new)
            settled.append((value, new))
        return settled

    def _apart(self, old: fx.Node, new: fx.Node, claimed: dict[int, int], shared: bool) -> bool:
        """Returns whether a result must be cloned: something would share its memory that did not share ``old``'s."""
        memory = self.view.effects.storages
        (mine,), (theirs,) = memory(new), self.view.storages(old)
        # PyTorch calls a hook on an op's own output with None if no gradient arrives; eager does not call it at all.
        if self.view.hooked(old) or (shared and self.view.overwritten(old)):
            return True
        if not self.view.escapes(old):
            return False
        same = [n for n in self.fresh if self.needs_grad(n) and mine in memory(n)]
        # An in-place write to a result must not change what any backward saved, that of a later op included.
        if any(n in self.unrounded or not self.needs_grad(new) for n in same):
            return True
        if any(mine in self._saved_memory(n) for n in self.fresh):
            return True
        return claimed.setdefault(mine, theirs) != theirs or self._repeats()

    def _saved_memory(self, node: fx.Node) -> set[int]:
        """Returns the storages that the backward of a new node saves."""
        if node not in self._saved:
            self._saved[node] = set()
            if self.place is not None and self.needs_grad(node) and node.target is not operator.getitem:
                saved = saved_by(node, self.needs_grad, self.place.modes)
                memory = self.view.effects.storages
                inputs, outputs = saved or (set(node.all_input_nodes), set(range(len(memory(node)))))
                self._saved[node] = {key for a in inputs for key in memory(a)} | {memory(node)[i] for i in outputs}
        return self._saved[node]

    def _repeats(self) -> bool:
        """Returns whether an op with several outputs may have been called on the same inputs before.

        AOTAutograd merges two equal calls into one, so that their outputs share memory.
        """
        mine, earlier = (
            [n for n in nodes if isinstance(example(n), (tuple, list))]
            for nodes in (self.fresh, self.created[: self._mark[0]])
        )
        return any(a.target == b.target and self._leaves(a) == self._leaves(b) for a in mine for b in earlier)

    def _leaves(self, node: fx.Node) -> set[fx.Node]:
        """Returns the graph inputs that a node depends on."""
        above = reached([node], lambda n: n.all_input_nodes)
        return {n for n in above if n.op in ("placeholder", "get_attr")}

    def _reaching(self, match: Match, old: fx.Node, new: fx.Node) -> fx.Node:
        """Returns ``new``, also reaching the graph inputs to which the model gives gradients of zeros.

        Raises Mismatch if a parameter would get a gradient of zeros where the model gives it none.
        """
        view, roots = self.view, 0
        if not view.ends.get(old, 0):
            return new
        given: dict[fx.Node, int] = collections.defaultdict(int)
        for value in match.inputs:
            given[self.input(value)] |= view.roots[node_of(value)]

        def above(node: fx.Node) -> Iterable[fx.Node]:
            # Stop at the match's inputs: their roots are known.
            passed = node not in given and node not in view.position and self.needs_grad(node)
            return node.all_input_nodes if node is new or passed else ()

        for node in reached([new], above):  # a view of an op's output may be skipped: then its own inputs are reached
            roots |= given[node] if node in given else view.roots.get(node, 0)
        if roots & ~view.reached_anyway(old):
            raise Mismatch(
                "the op would give a parameter a gradient of zeros where the model gives none", view.value(old)
            )
        self._reach[old] = roots
        if match.saved or not view.roots[old] & ~roots:
            return new
        zeros = view.roots[old] & ~(roots | self._reached_past(old))
        self._reach[old] |= zeros
        for node in [n for n in view.nodes if n.op in ("placeholder", "get_attr") and view.roots[n] & zeros]:
            # A sum of no elements is 0, and what it would add up gets zeros. A difference keeps -0.
            none = self.emit(operator.getitem, self.emit("reshape", self.current(node), -1), slice(0))
            new = self.emit(operator.sub, new, self.emit("sum", none))
        return new

    def _reached_past(self, old: fx.Node) -> int:
        """Returns the graph inputs to which a gradient flows elsewhere than through ``old``, as a bit mask.

        Results that were replaced before reach what their ops read. Nothing counts in a program that may run uncompiled.
        """
        view, found, seen = self.view, 0, {old}
        todo = [] if view.knowledge.exported else [*view.results]
        while todo:
            node = todo.pop()
            if node in seen or not self.needs_grad(node):
                continue
            seen.add(node)
            if node in self._new and node in self._reach:
                found |= self._reach[node]
            elif node.op in ("placeholder", "get_attr"):
                found |= view.roots[node]
            else:
                todo += node.all_input_nodes
        return found

    def _replace(self, value: Value, new: fx.Node) -> None:
        """Makes the readers of a formula's result read ``new``."""
        old = node_of(value)
        real = self.view.node(old)
        for key in TRACES:
            if key in real.meta:
                new.meta[key] = real.meta[key]
        fresh = set(self.fresh)
        region = {self.view.reader.get(n, n) for n in self.place.region} if self.place else set()
        steps = {n for n in region if self.view.effects.written(n)}
        here = self.view.position[self.place.anchor] if self.place else 0
        for user, a in self._readers(old, real, steps):
            # An in-place step of the formula that stays for another reason must not write the op's result.
            # What the formula itself reads before the op's place stays too: the result does not exist there yet.
            if user not in fresh and user not in steps and self.view.position.get(user, here) >= here:
                self._replaced.append((user, user.args, user.kwargs))
                user.replace_input_with(a, new)
        self._learn(old, new)

    def _readers(self, old: fx.Node, real: fx.Node, steps: set[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
        """Returns the real nodes that read what ``old`` stands for, each with the name under which it reads it."""
        resolved = self.view.resolved
        if old in self.view.made:
            readers = [self.view.reader[u] for u in old.users]
            return [(user, a) for user in readers for a, now in resolved[user].items() if now is old]
        own = any(real in self.view.effects.written(step) for step in steps)
        exact = [user for user in real.users if not own or resolved.get(user, {}).get(real, old) is old]
        return [(user, real) for user in exact]

    def _learn(self, old: fx.Node, new: fx.Node) -> None:
        self._learned.append((old, new))
        self._new[old] = new

    # --- clean-up ---

    def sweep(self) -> None:
        """Erases what only the replaced formulas needed.

        Other dead code stays, because it may have effects. Nothing is undone from here on: if this fails, dead code is
        left in the graph.
        """
        gone, read = unneeded(self.view, self._formulas), set[fx.Node]()
        self.committed = True
        share_memory(self.view, [(old, new) for old, new in self._learned if new not in self._copies])
        for node in reversed([*self.graph.nodes]):  # readers come later
            if node in gone or (node in read and not node.users and pure(self.view, node)):
                read.update(node.all_input_nodes)
                self.graph.erase_node(node)

    def guard(self) -> None:
        """Specialises the compile to the sizes that the analysis took as fixed."""
        fixed = self.view.values.fixed
        for node in self.graph.nodes if fixed else ():
            if node.op != "placeholder":
                continue
            given = example(node)
            sizes = [s for t in tensors_in(given) for s in t.shape] or [given]
            for size in sizes:
                if isinstance(size, torch.SymInt) and str(compat.routing.expression(size)) in fixed:
                    int(size)


def _is_view(node: fx.Node) -> bool:
    """Returns whether a call returns a new tensor in the memory of one that it is given."""
    given = [t for n in node.all_input_nodes for t in tensors_in(example(n))]
    memory = {compat.storage_key(t) for t in given}
    results = [t for t in tensors_in(example(node)) if not any(t is other for other in given)]
    return any(compat.storage_key(t) in memory for t in results)


def _check_alike(old: torch.Tensor, new: torch.Tensor, value: Value) -> None:
    """Raises Mismatch if the op's result differs from the formula's in rank, dtype, device or a known size."""
    same = len(old.shape) == len(new.shape) and old.dtype == new.dtype and old.device == new.device
    if not same or not all(_may_equal(a, b) for a, b in zip(old.shape, new.shape, strict=True)):
        have, want = (f"{[*t.shape]} {t.dtype} on {t.device}" for t in (new, old))
        raise Mismatch(f"the op returns {have}, the formula returns {want}", value)


def _may_equal(a: Any, b: Any) -> bool:
    """Returns whether two sizes are equal or at least one is dynamic."""
    return compat.routing.same_size(a, b) or not (isinstance(a, int) and isinstance(b, int))


def _keeps_order(value: Any, of: Any) -> bool:
    """Returns whether an operation's result keeps its input's memory order.

    Views, tuples of views and most elementwise operations do.
    """
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
"""Operations whose result does not keep its input's memory order."""


def _memory_order(t: torch.Tensor) -> list[int]:
    """Returns the dimensions by falling stride; dimensions of size 1 keep their position."""
    strides, sizes = ([compat.routing.hint(s) for s in each] for each in (t.stride(), t.shape))
    real = iter(sorted((d for d in range(t.dim()) if sizes[d] != 1), key=lambda d: -strides[d]))
    return [next(real) if sizes[d] != 1 else d for d in range(t.dim())]


def unneeded(view: View, formulas: set[fx.Node]) -> set[fx.Node]:
    """Returns the real nodes of ``formulas`` that nothing else reads, in-place steps on their own tensors included."""
    # Dynamo leaves dead code in its graphs. New nodes, which read sizes of the formulas' tensors, are not in the view.
    unread = reached(formulas, lambda n: (user for user in n.users if user in view.order and user not in view.live))
    gone = {view.node(n) for n in unread if n.op.startswith("call_")}
    # The view knows in-place steps on the formulas' tensors under other nodes: add the real ones.
    gone |= {node for _, _, node in view.events if gone.issuperset(view.effects.written(node))}
    before = -1
    while before != len(gone):
        before = len(gone)
        # Readers come later, so one sweep from the end settles everything except nodes that in-place steps read.
        for n in sorted(gone, key=view.position.__getitem__, reverse=True):
            if not gone.issuperset(n.users) or not _removable(view, n, gone):
                gone.discard(n)
    return gone


def _removable(view: View, node: fx.Node, gone: set[fx.Node]) -> bool:
    """Returns whether a node has no effect other than writes to tensors that only nodes of ``gone`` hold."""
    effect, targets = view.effects.of(node), view.effects.written(node)
    if (example(node) is None and not targets) or not effect.known or (effect.watches and not effect.writes):
        return False
    return all(gone.issuperset(view.holders[s]) for n in targets for s in view.effects.storages(n))


def pure(view: View, node: fx.Node) -> bool:
    """Returns whether a node does nothing but compute its result."""
    if node.op == "get_attr":
        return True
    if node.op not in ("call_function", "call_method") or example(node) is None:
        return False
    effect = view.effects.of(node)
    return effect.known and not effect.writes and not effect.watches and view.values.inspectable(node)


def share_memory(view: View, replaced: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Records the views of each replaced result as views of its replacement, for the operators that run next."""
    for old, new in replaced:
        if isinstance(example(view.node(old)), torch.Tensor):
            (was,), (now,) = view.storages(old), view.effects.storages(new)
            for user in view.holding(new, {was})[1:]:
                user.meta[GRAD] = view.flows(user)
                view.effects.move(user, was, now)
