"""Chains of E79's steps become one scan: the surgery, and what forbids it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.ops.e79 import segment_length
from mhc_inductor.routing.graph.expressions import VIEWS, aten, is_cast, peel, whole
from mhc_inductor.routing.graph.index import ONE, Unsupported
from mhc_inductor.routing.graph.inplace import stacked_buffers
from mhc_inductor.routing.graph.values import Value, example, tensors_in
from mhc_inductor.routing.operator import Mismatch, Miss, Unplaced
from mhc_inductor.routing.operators.e79.inputs import Inputs
from mhc_inductor.routing.operators.e79.lift import planned
from mhc_inductor.routing.operators.e79.loop import OP, Chain
from mhc_inductor.routing.operators.e79.step import Frame, Step, reads, zero
from mhc_inductor.routing.operators.e79.uses import Uses, hooked
from mhc_inductor.routing.operators.mhc.search import Finder
from mhc_inductor.routing.rewriter import Rewriter, grad_states, mutations, needs_grad


class Scans(Rewriter):
    """Puts one op in the place of each chain. In a ``body`` of a higher-order operator inputs do not show gradients."""

    def __init__(self, graph: fx.Graph, finder: Finder, body: bool) -> None:
        super().__init__(graph, finder)
        self.body = body
        self.uses: Uses

    def run_chains(self, chains: Sequence[Chain]) -> None:
        stacks = stacked_buffers(self.graph)
        if stacks:
            self.finder.live.update(stacks)
            self._renumber()
        self.uses = Uses(self.graph, self.finder.live, self.body)
        todo = list(chains)[::-1]
        while todo:
            one = self._ended(todo.pop())
            if not one.steps:
                continue
            mark = list(self.graph.nodes)
            start = self.finder.values.of(one.recogniser.known[one.steps[0].M_new])
            try:
                self._scan(one)
            except (Mismatch, Unsupported, ValueError, TypeError) as error:
                if isinstance(error, Unplaced) and len(one.steps) > 1:
                    # What a step gives, a later one takes in: each may still be a scan of one step.
                    todo += [Chain([step], one.recogniser) for step in reversed(one.steps)]
                views = "the inputs of the steps cannot be followed through their views"
                self._refuse(mark, error, OP, start, views)
        if self.made:
            self._guard()
            self._after()
        self._sweep()

    def _ended(self, one: Chain) -> Chain:
        """Returns the chain without last steps that nothing reads, or whose S' has a hook that the op cannot serve."""
        known, steps = one.recogniser.known, list(one.steps)
        while steps:
            last = steps[-1]
            S, M, out = known[last.S_new], known[last.M_new], last.out_node
            if S in self.finder.live or M in self.finder.live:
                if not hooked(S) or not self.uses.flowing & {M, out}:
                    break
                # The hook gets the gradient of S' from there too; the op's result has only what comes from outside.
                reason = "a hook is on S' of a step, which the step's M' or output reads too"
                self.misses.append(Miss(OP, reason, last.S_new, self.finder.values.of(S)))
            steps.pop()
        return Chain(steps, one.recogniser)

    def _after(self) -> None:
        """What each step computed from its output, and a stack put together, is computed from the op's output at once."""
        outs = {user for _, call, _ in self.made for user in call.users if user.args[1] == 0}
        for node in list(self.graph.nodes) if not self.events else ():
            if node.target is not torch.stack or not isinstance(node.args[0], (tuple, list)):
                continue
            row: Any = tuple(node.args[0])
            if len(row) < 2 or any(not isinstance(n, fx.Node) or len(n.users) != 1 for n in row):
                continue
            plan = planned(self, row)
            if plan is None or not outs & set(plan.sources):
                continue
            dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            value = self.finder.values.of(node)
            with self.graph.inserting_before(node):
                whole = plan.emit(row)
                if dim % len(example(node).shape):
                    whole = self.emit("movedim", whole, 0, dim)
                whole = self._as(whole, value, whole)
                shared = {compat.storage_key(t) for n in plan.sources for t in tensors_in(example(self.current(n)))}
                if self.uses.exposed(node) and compat.storage_key(example(whole)) in shared:
                    whole = self.emit("clone", whole)
            self._replace([(value, whole)])

    def _scan(self, one: Chain) -> None:
        frame, steps, known = one.frame, one.steps, one.recogniser.known
        inputs = Inputs(self, frame, steps)
        first, last = steps[0], steps[-1]
        states = {name: known.get(value) for name, value in (("S", first.S), ("M", first.M))}
        for name, node in states.items():
            if node is None:
                raise Mismatch(f"the initial {name} is inside a composite operation", getattr(first, name))
        final = {"S": known[last.S_new], "M": known[last.M_new]}
        gathered, alone = self._outputs(one)
        results = [*gathered, *alone.values(), *(n for n in final.values() if self._alive(n, ()))]
        if not results:
            raise Mismatch("")
        sources = [*inputs.sources, *(n for n in states.values() if n is not None)]
        values = self.finder.values
        if any(node not in self.order for node in sources):
            self._renumber()  # results of an earlier chain
        here = self._safe([values.of(n) for n in sources], [values.of(n) for n in results])
        self._closed(one, sources, results, gathered)
        needs = self.grad[results[0]] and any(n in self.uses.carrying for n in sources)
        if needs:
            inputs.unasked = self._unasked(one)
        with here:
            kvqm, b_s, b_m = inputs.emit(self)
            for node in [*gathered, *alone.values()]:
                kvqm = self._widened(kvqm, values.of(node))
            for node in final.values():
                kvqm = self._doubled(kvqm, node)
            S0, M0 = (self._state(value, states[name], frame) for name, value in (("S", first.S), ("M", first.M)))
            segment = segment_length(frame.n, compat.hint(example(kvqm).shape[1]), len(steps)) if needs else 0
            call = self.emit(torch.ops.mhc_inductor.e79_scan.default, kvqm, b_s, b_m, S0, M0, segment)
            results_of = Results(self, call, needs)
            many = len(gathered) + len(alone) > 1
            for node, (dim, inner) in gathered.items():
                made = self._stacked(results_of.item(0), dim, inner, node)
                results_of.add(node, made, 0, many, whole=True)
            for t, node in alone.items():
                made = self.emit(operator.getitem, results_of.item(0), t)
                results_of.add(node, made, 0, many, whole=len(steps) == 1)
            for k, node in enumerate(final.values(), 1):
                if node in results:
                    results_of.add(node, results_of.item(k), k)
        new = results_of.new
        self._replace(new)
        self.replaced += self._dead(one)
        for step in steps:
            self.replaced += [known[step.S_new], known[step.M_new], *([step.out_node] if step.out_node else [])]
        self.made.append((OP, call, one))

    def _unasked(self, one: Chain) -> set[tuple[str, int]]:
        """Returns (role, step) of the vectors that no gradient comes back to, where some come back to the chain."""
        known, last = one.recogniser.known, one.steps[-1]

        def asked(node: fx.Node | None) -> bool:
            return node is not None and (node in self.uses.flowing or hooked(node))

        found: set[tuple[str, int]] = set()
        final = asked(known[last.M_new])
        later = final or asked(known[last.S_new])
        for t, step in reversed(list(enumerate(one.steps))):
            memory = final if step is last else later
            later = later or asked(step.out_node)
            wanted = {"k": later, "v": later, "b_s": later, "q": asked(step.out_node), "m": memory, "b_m": memory}
            found.update((role, t) for role, reached in wanted.items() if not reached)
        return found if later else set()

    def _renumber(self) -> None:
        self.order = {node: i for i, node in enumerate(self.graph.nodes)}
        self.events = mutations(self.graph)
        self.grad = grad_states(self.graph)

    # --- inputs ---

    def _doubled(self, kvqm: fx.Node, state: fx.Node) -> fx.Node:
        """``kvqm`` in fp64 where the model's states are: the op's are in fp32 otherwise."""
        if example(state).dtype is not torch.float64 or example(kvqm).dtype is torch.float64:
            return kvqm
        return self.emit("to", kvqm, torch.float64)

    def _state(self, value: Value, node: fx.Node | None, frame: Frame) -> fx.Node | None:
        if node is None or (zero(value) and not needs_grad(node)):
            return None
        node = self.current(node)
        if len(frame.lead) == 1:
            return node
        return self.emit("reshape", node, -1, frame.n, frame.n)

    # --- outputs ---

    def _alive(self, node: fx.Node, within: Any) -> bool:
        return any(u in self.finder.live and u not in within for u in node.users)

    def _outputs(self, one: Chain) -> tuple[dict[fx.Node, tuple[int, Any]], dict[int, fx.Node]]:
        """The nodes that stack every step's output, and the steps whose output is used otherwise as well."""
        steps = one.steps
        nodes = [s.out_node for s in steps]
        gathered: dict[fx.Node, tuple[int, Any]] = {}
        path: set[fx.Node] = set()
        if all(n is not None for n in nodes):
            for candidate in self._stacks(nodes[0]):  # type: ignore[arg-type]
                found = self._stack(candidate, steps)
                between = self._between(candidate, set(nodes))
                # A hook sees the gradient of one piece: the pieces stay, and are stacked.
                if found is None or any(n is not candidate and hooked(n) for n in (*nodes, *between)):  # type: ignore[arg-type]
                    continue
                gathered[candidate] = found
                path |= between
        alone = {t: n for t, n in enumerate(nodes) if n is not None and self._leaves(n, path, set(gathered))}
        return gathered, alone

    def _stacks(self, node: fx.Node) -> list[fx.Node]:
        found, todo = [], [(node, 0)]
        while todo:
            at, depth = todo.pop()
            for user in at.users:
                value = self.finder.values.of(user) if user.op.startswith("call_") else None
                if not isinstance(value, Value) or user not in self.finder.live:
                    continue
                if value.func in (aten.stack.default, aten.cat.default):
                    found.append(user)
                elif depth < 4 and (value.func in VIEWS or is_cast(value)):
                    todo.append((user, depth + 1))
        return found

    def _stack(self, node: fx.Node, steps: list[Step]) -> tuple[int, Any] | None:
        """(dimension, shape of the pieces) where ``node`` stacks the outputs of all steps in their order."""
        value = self.finder.values.of(node)
        pieces = value.args[0]
        if len(pieces) != len(steps) or len({p.shape for p in pieces}) != 1:
            return None
        rank = len(pieces[0].shape) + (value.func is aten.stack.default)
        dim = (value.args[1] if len(value.args) > 1 else 0) % rank
        for piece, step in zip(pieces, steps, strict=True):
            assert step.out is not None
            at = whole(piece)
            inner = peel(at, {step.out})
            if inner.value is not step.out or inner.flat != at.flat:
                return None
        return dim, pieces[0]

    def _between(self, node: fx.Node, ends: set[Any]) -> set[fx.Node]:
        seen, todo = {node}, [node]
        while todo:
            for parent in todo.pop().all_input_nodes:
                if parent not in seen and parent not in ends:
                    seen.add(parent)
                    todo.append(parent)
        return seen

    def _leaves(self, node: fx.Node, path: set[fx.Node], ends: set[fx.Node]) -> bool:
        """Whether something uses ``node`` without passing through ``ends``."""
        todo, seen = [node], {node}
        while todo:
            for user in todo.pop().users:
                if user in ends or user in seen or user not in self.finder.live:
                    continue
                if user not in path:
                    return True
                seen.add(user)
                todo.append(user)
        return False

    def _stacked(self, out: fx.Node, dim: int, piece: Value, node: fx.Node) -> fx.Node:
        stacks = self.finder.values.of(node).func is aten.stack.default
        wanted = list(example(node).shape)
        if stacks:
            inner = wanted[:dim] + wanted[dim + 1 :]
        else:
            inner = [*wanted[:dim], 1 if piece.shape[dim] == ONE else None, *wanted[dim + 1 :]]
            if inner[dim] is None:
                size = piece.shape[dim]
                if size.symbols:
                    same = [s for s in example(out).shape if not isinstance(s, int)]
                    inner[dim] = same[0] if same else None
                else:
                    inner[dim] = size.factor
        spread = self._shaped(out, [example(out).shape[0], *inner], out)
        if dim == 0:
            return spread
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(inner) + 1)]
        return self.emit("permute", spread, *order)

    def _dead(self, one: Chain) -> list[fx.Node]:
        """What the loop computes and nobody reads: Dynamo leaves it in its graphs."""
        known, live = one.recogniser.known, self.finder.live
        todo = [known[v] for s in one.steps for v in (s.S_new, s.M_new)]
        seen: dict[fx.Node, None] = {}
        while todo:
            for user in todo.pop().users:
                if user not in live and user not in seen and user in self.order:
                    seen[user] = None
                    todo.append(user)
        return list(seen)

    def _closed(self, one: Chain, sources: list[fx.Node], results: list[fx.Node], gathered: Any) -> None:
        """Raises Mismatch where something outside needs a state or a product within the loop."""
        region, known = self._region(set(sources), results), one.recogniser.known
        carried = set(sources[-2:])
        for node in sorted(region, key=self.order.__getitem__):
            if not any(a in carried for a in node.all_input_nodes) or node in sources:
                continue
            carried.add(node)
            if node in results:
                continue
            for user in node.users:
                if user not in region and user in self.finder.live:
                    news = {s.S_new for s in one.steps}
                    read = self.finder.values.of(user)
                    reason = "an intermediate result of a step is used outside the loop"
                    if any(known[v] is node for v in news) and reads(read, one.frame, news):
                        reason = "what is read from S' is not y * silu(y) with y = S' q"
                    raise Mismatch(reason, self.finder.value(node))


class Results:
    """What takes the place of the values that a chain's op makes: who requires grad and who shares memory stays."""

    def __init__(self, rewriter: Scans, call: fx.Node, needs: bool) -> None:
        self.rewriter = rewriter
        self.call = call
        self.needs = needs
        self.new: list[tuple[Value, fx.Node]] = []
        self._items: dict[int, fx.Node] = {}
        self._taken: set[int] = set()
        self._again: bool | None = None

    def item(self, k: int) -> fx.Node:
        """Returns the op's k-th output."""
        if k not in self._items:
            self._items[k] = self.rewriter.emit(operator.getitem, self.call, k)
        return self._items[k]

    def add(self, old: fx.Node, made: fx.Node, k: int, many: bool = False, whole: bool = True) -> None:
        """Lets ``made``, of the op's k-th output or of all of it, stand for ``old``; ``many`` values are of this output."""
        r, value = self.rewriter, self.rewriter.finder.values.of(old)
        new = r._as(made, value, made)
        if self.needs and old not in r.uses.carrying:
            new = r.emit("detach", new)
        if compat.storage_key(example(new)) == compat.storage_key(example(self.item(k))) and self._apart(
            old, k, many, whole
        ):
            new = r.emit("clone", new)
        self.new.append((value, new))

    def _apart(self, old: fx.Node, k: int, many: bool, whole: bool) -> bool:
        """Whether ``old`` needs memory of its own."""
        uses = self.rewriter.uses
        # A hook on an output of the op itself is called without a gradient too.
        if hooked(old) or (many and uses.changes(old)):
            return True
        if not uses.leaves(old):
            return False
        if k in self._taken or not whole or self._repeats():
            return True
        self._taken.add(k)
        return False

    def _repeats(self) -> bool:
        """Whether an earlier scan may be of the same inputs: Inductor computes equal calls once."""
        if self._again is None:
            others = [call for _, call, _ in self.rewriter.made]
            mine = _given(self.call) if others else set()
            self._again = any(_given(call) == mine for call in others)
        return self._again


def _given(call: fx.Node) -> set[fx.Node]:
    """Returns the inputs of the graph that ``call`` depends on."""
    seen, todo = {call}, [call]
    while todo:
        for parent in todo.pop().all_input_nodes:
            if parent not in seen:
                seen.add(parent)
                todo.append(parent)
    return {node for node in seen if node.op in ("placeholder", "get_attr")}
