"""``torch._higher_order_ops.scan`` with E79's step as its body: the body is recognised, the call becomes the op."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.ops.e79 import segment_length
from mhc_inductor.routing.graph.expressions import Ref, chain, peel, whole
from mhc_inductor.routing.graph.index import Unsupported, Var, const, var
from mhc_inductor.routing.graph.values import Value, Values, example
from mhc_inductor.routing.operator import Mismatch
from mhc_inductor.routing.operators.e79.emit import Scans
from mhc_inductor.routing.operators.e79.inputs import ROLES, Inputs
from mhc_inductor.routing.operators.e79.lift import Lift, Lifted
from mhc_inductor.routing.operators.e79.loop import OP, Search
from mhc_inductor.routing.operators.e79.slots import Held, Slot, places, slot
from mhc_inductor.routing.operators.e79.step import Frame, Leaf, Step
from mhc_inductor.routing.operators.mhc.search import Finder
from mhc_inductor.routing.rewriter import needs_grad


def scans(gm: fx.GraphModule) -> list[tuple[fx.Node, fx.GraphModule]]:
    """The calls of the higher-order scan in a graph, each with its body."""
    found = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or getattr(node.target, "__name__", "") != "scan" or len(node.args) != 4:
            continue
        if isinstance(node.target, torch._ops.HigherOrderOperator) and isinstance(node.args[0], fx.Node):
            body = getattr(gm, str(node.args[0].target), None)
            if isinstance(body, fx.GraphModule):
                found.append((node, body))
    return found


class Bodies(Scans):
    """Puts the op in the place of each higher-order scan whose body is a step."""

    def run_bodies(self, calls: Sequence[tuple[fx.Node, fx.GraphModule]], templates: dict[Any, Any]) -> None:
        for node, body in calls:
            start = self.finder.values.of(node.all_input_nodes[1])
            outer = self.finder.values.autocast.get(node)
            autocast = dict.fromkeys(body.graph.nodes, outer) if outer is not None else {}
            search = Search(Finder(body.graph, Values(body.graph, autocast, templates)))
            search.run()
            if search.finder.values.fixed:
                self.finder.values.forget({**self.finder.values.fixed, **search.finder.values.fixed})
            mark = list(self.graph.nodes)
            try:
                self._body(node, body, search)
            except (Mismatch, Unsupported, ValueError, TypeError) as error:
                views = "the inputs of the body cannot be followed through their views"
                self._refuse(mark, error, OP, start, views)
            self._sweep()
            self.replaced = []
        if self.made:
            self._guard()

    def _body(self, node: fx.Node, body: fx.GraphModule, search: Search) -> None:
        steps = [step for one in search.chains for step in one.steps]
        if len(steps) != 1:
            raise Mismatch("")  # the body is routed, and reported, as a graph of its own
        (step,), known = steps, search.chains[0].recogniser.known
        frame, values = step.frame, self.finder.values
        given: Any = node.args
        _, init, xs, extra = given
        inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
        outputs: Any = body.graph.output_node().args[0]
        results = list(outputs)
        if len(init) != 2 or len(inputs) != len(init) + len(xs) + len(extra):
            raise Mismatch("the scan carries something besides S and M")
        carried = [known.get(step.S), known.get(step.M)]
        if set(carried) != set(inputs[:2]):
            raise Mismatch("the scan's body does not start from the states that it carries", step.S)
        at = {"S": inputs.index(carried[0]), "M": inputs.index(carried[1])}
        for name, made in (("S", step.S_new), ("M", step.M_new)):
            if not _is(search.finder.values.of(results[at[name]]), made):
                raise Mismatch(f"the scan does not carry the new {name}", made)
        ends = [u for u in node.users if u in self.finder.live]
        if any(u.target is not operator.getitem for u in ends):
            raise Mismatch("the scan's results are used together", step.S_new)
        taken: dict[fx.Node, Any] = {user: user.args[1] for user in ends}
        for k in taken.values():
            if k >= 2 and (step.out is None or not _is(search.finder.values.of(results[k]), step.out)):
                raise Mismatch("the scan gives something besides y * silu(y) with y = S' q", step.S_new)
        self.trace = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
        outer = dict(zip(inputs[2:], [*(Lifted(x, True) for x in xs), *(Lifted(x, False) for x in extra)], strict=True))
        needs = self.grad[node] and any(self.body or needs_grad(n) for n in node.all_input_nodes)
        with self.graph.inserting_before(node):
            found = BodyInputs(self, frame, step, outer)
            kvqm, b_s, b_m = found.emit(self)
            for user, k in taken.items():
                kvqm = self._widened(kvqm, values.of(user)) if k >= 2 else self._doubled(kvqm, user)
            S0, M0 = (self._state(values.of(init[at[name]]), init[at[name]], frame) for name in ("S", "M"))
            steps_, batch = (compat.hint(s) for s in example(kvqm).shape[:2])
            segment = segment_length(frame.n, batch, steps_) if needs else 0
            call = self.emit(torch.ops.mhc_inductor.e79_scan.default, kvqm, b_s, b_m, S0, M0, segment)
            new = []
            for user, k in taken.items():
                got = self.emit(operator.getitem, call, {at["S"]: 1, at["M"]: 2}.get(k, 0))
                new.append((values.of(user), self._as(got, values.of(user), got)))
        self._replace(new)
        self.made.append((OP, call, (node, frame)))
        used = node.all_input_nodes
        for gone in [*node.users, node, given[0]]:
            if not gone.users:
                self.graph.erase_node(gone)
        self.replaced = [n for n in used if n.op.startswith("call_")]


def _is(value: Any, wanted: Value) -> bool:
    """Whether ``value`` shows the elements of ``wanted`` in their order."""
    if not isinstance(value, Value):
        return False
    at = whole(value)
    inner = peel(at, {wanted})
    return inner.value is wanted and inner.flat == at.flat


class BodyInputs(Inputs):
    """The inputs of a body's step, over all steps."""

    def __init__(self, rewriter: Scans, frame: Frame, step: Step, outer: dict[fx.Node, Lifted]) -> None:
        self.rewriter, self.frame, self.steps, self.unasked = rewriter, frame, [step], ()
        self.lifted = outer
        self.time: Var | None = None
        self.lift = Lift(rewriter)
        self.roles = {}
        for name in (*ROLES, "b_s", "b_m"):
            leaf = step.leaves[name]
            self.roles[name] = None if leaf is None else self._everywhere(leaf, name)
        self.together = self._together()

    def _everywhere(self, leaf: Leaf, name: str) -> Any:
        failed: Mismatch | None = None
        for value, at in reversed(places(leaf, self.frame)):
            assert value.node is not None
            try:
                node, batched = self._over(value.node)
            except Mismatch as mismatch:
                failed = failed or mismatch
                continue
            held = self.rewriter.finder.values.of(node)
            if not batched:
                return Held(held, at, None)
            return self._behind(held, at)
        raise failed or Mismatch(f"{name} of the step is not laid out as [..., n]", leaf.ref.value)

    def _behind(self, value: Value, at: Slot) -> Held:
        """The innermost tensor behind the views that ``value``, of all steps, is made by."""
        if self.time is None:
            self.time = Var(value.shape[0])
        index = [var(self.time)]
        for kind, c in at.dims:
            v = self.frame.at if kind == "at" else self.frame.lead[c] if kind == "lead" else None
            index.append(const(c) if v is None else var(v).plus(const(c)) if kind == "at" else var(v))
        best = Held(value, Slot((("const", 0), *at.dims)), 0, full=True)
        for ref in chain(Ref(value, tuple(index))):
            found = slot(ref, self.frame, self.time) if ref.value.node is not None else None
            time = [d for d, (kind, _) in enumerate(found.dims) if kind == "time"] if found is not None else []
            if found is not None and len(time) == 1:
                dims = tuple(("const", 0) if kind == "time" else (kind, c) for kind, c in found.dims)
                best = Held(ref.value, Slot(dims), time[0], full=True)
        return best

    def _over(self, node: fx.Node) -> Lifted:
        if node not in self.lifted:
            if not self.rewriter.finder.values.inspectable(node):
                raise Mismatch("a vector of the step is no plain function of the scan's inputs")
            for a in node.all_input_nodes:
                self._over(a)
            self.lifted[node] = self.lift.call(node, self.lifted)
        return self.lifted[node]

    def _steps(self) -> Any:
        for held in self.roles.values():
            if isinstance(held, Held) and held.time is not None:
                node = self.rewriter.current(held.node)
                size = example(node).shape[held.time]
                return size if isinstance(size, int) else self.rewriter.emit("size", node, held.time)
        raise Mismatch("none of the step's vectors changes from step to step")
