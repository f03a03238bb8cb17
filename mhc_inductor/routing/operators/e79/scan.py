# SPDX-License-Identifier: Apache-2.0
"""Recognises ``torch._higher_order_ops.scan`` with E79's step as its body, and replaces the call with the op."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection
from typing import Any

from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.edit import Edit
from mhc_inductor.routing.graph.expressions import Ref, shown
from mhc_inductor.routing.graph.index import Var, const, var
from mhc_inductor.routing.graph.values import Value, example, reached
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match, Mismatch
from mhc_inductor.routing.operators.e79.emit import Pairs, called, doubled, given, initial, trained
from mhc_inductor.routing.operators.e79.inputs import BIASES, ROLES, Inputs, Packing
from mhc_inductor.routing.operators.e79.lift import Lifted, lifted
from mhc_inductor.routing.operators.e79.loop import OP, Search
from mhc_inductor.routing.operators.e79.step import Step
from mhc_inductor.routing.operators.e79.terms import Frame, Leaf, shows
from mhc_inductor.routing.operators.e79.vector_layout import Held, Slot, places, slot


@dataclasses.dataclass
class Body:
    """A scan whose body is one step: its call, the step, and the roles of its inputs and results."""

    call: fx.Node
    view: View
    step: Step
    at: dict[str, int]
    """The positions of S and M among the carried states."""
    inputs: list[fx.Node]
    """The placeholders of the body."""
    taken: dict[fx.Node, int]
    """The nodes that read the scan's results, each with the position of its result."""
    held: dict[str, Held] = dataclasses.field(default_factory=dict)
    """The tensors behind the scan's inputs that hold a vector of all steps, by role."""


def body_of(view: View, node: fx.Node) -> fx.GraphModule | None:
    """Returns the body of a higher-order scan, or None for any other node."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "scan" or len(node.args) != 4:
        return None
    if not isinstance(node.target, compat.HigherOrderOperator) or not isinstance(node.args[0], fx.Node):
        return None
    body = getattr(view.real.owning_module, str(node.args[0].target), None)
    return body if isinstance(body, fx.GraphModule) else None


def match_scan(view: View, node: fx.Node, body: fx.GraphModule) -> Match | None:
    """Returns the match of a scan. Raises Mismatch where the scan does not carry the states of the step.

    Returns None where nothing reads the results, and where the body is not exactly one step: the body is then reported
    as a graph of its own.
    """
    search = Search(View(body.graph, view.modes_at(node), view.knowledge, body=True))
    search.run()
    steps = [step for one in search.chains for step in one.steps]
    if len(steps) != 1:
        return None
    view.values.fix(search.view.values.fixed)
    found = _checked(view, node, search, steps[0])
    inputs = _read(view, found)
    outputs = [view.values.of(n) for n in found.taken]
    if not outputs:
        return None
    detail = f"n = {found.step.frame.n}, the body of a scan"
    return Match(OP, inputs, outputs, detail=detail, data=found)


def _checked(view: View, node: fx.Node, search: Search, step: Step) -> Body:
    inner, known = search.view, search.chains[0].recogniser.known
    arguments: Any = node.args
    _, init, xs, extra = arguments
    inputs = [n for n in inner.nodes if n.op == "placeholder"]
    outputs: Any = inner.graph.output_node().args[0]
    results = [inner.values.of(n) if isinstance(n, fx.Node) else None for n in outputs]
    if len(init) != 2 or len(inputs) != len(init) + len(xs) + len(extra):
        raise Mismatch("the scan carries other tensors than S and M")
    carried = [known.get(step.S), known.get(step.M)]
    if set(carried) != set(inputs[:2]):
        raise Mismatch("the scan's body does not start from the states that it carries", step.S)
    at = {name: inputs.index(n) for name, n in zip("SM", carried, strict=True) if n is not None}
    for name, made in (("S", step.S_new), ("M", step.M_new)):
        if not shows(results[at[name]], made):
            raise Mismatch(f"the scan does not carry the new {name}", made)
    ends = [u for u in node.users if u in view.live]
    if any(u.target is not operator.getitem for u in ends):
        raise Mismatch("the scan's results are not unpacked one by one", step.S_new)
    taken: dict[fx.Node, Any] = {user: user.args[1] for user in ends}
    if any(k >= 2 and (step.out is None or not shows(results[k], step.out)) for k in taken.values()):
        raise Mismatch("the scan returns a value other than y * silu(y) with y = S' q", step.S_new)
    return Body(node, inner, step, at, inputs, taken)


def _read(view: View, found: Body) -> list[Value]:
    """Returns the tensors that the op will read, and fills in ``found.held``.

    An input of the scan is replaced by the tensor behind its views only if all vectors in it can be.
    """
    arguments: Any = found.call.args
    _, init, xs, extra = arguments
    of_x = dict(zip(found.inputs[2:], xs, strict=False))
    dug: dict[fx.Node, dict[str, Held]] = {x: {} for x in xs}
    time = Var(view.values.of(xs[0]).shape[0]) if xs else None
    for name in (*ROLES, *BIASES):
        leaf = found.step.leaves[name]
        inner = places(leaf, found.step.frame)[-1:] if leaf is not None else []
        if not inner or time is None or inner[0][0].node not in of_x:
            continue
        x = of_x[inner[0][0].node]
        dug[x][name] = behind(view.values.of(x), inner[0][1], found.step.frame, time)
    computed = _computed_from(found, {r for held in dug.values() for r in held})
    nodes: dict[fx.Node, None] = {}
    for placeholder, x in of_x.items():
        bases = {held.node for held in dug[x].values()}
        if placeholder not in computed and len(bases) == 1:
            found.held.update(dug[x])
            nodes.update(dict.fromkeys(bases))
        else:
            nodes[x] = None
    nodes.update(dict.fromkeys(n for n in init if given(view, view.values.of(n), n) is not None))
    nodes.update(dict.fromkeys(n for n in extra if isinstance(n, fx.Node)))
    return [v for n in nodes if (v := view.value(n)) is not None]


def _computed_from(found: Body, direct: Collection[str]) -> set[fx.Node]:
    """Returns the body's nodes, its inputs included, from which vectors other than ``direct`` are computed."""
    leaves = [leaf for name, leaf in found.step.leaves.items() if leaf is not None and name not in direct]
    starts = (node for leaf in leaves if (node := leaf.ref.value.node) is not None)
    return {*reached(starts, lambda node: node.all_input_nodes)}


def emit_scan(edit: Edit, match: Match) -> Pairs:
    """Emits the op of a scan and returns each replaced value with its new node."""
    found: Body = match.data
    values, frame = edit.view.values, found.step.frame
    arguments: Any = found.call.args
    _, init, xs, extra = arguments
    outer = [Lifted(edit.current(x), True) for x in xs]
    outer += [Lifted(edit.current(x) if isinstance(x, fx.Node) else x, False) for x in extra]
    inputs = Lifting(edit, found, dict(zip(found.inputs[2:], outer, strict=True))).inputs()
    kvqm, b_s, b_m = Packing(edit, inputs).emit()
    for user, k in found.taken.items():
        kvqm = edit.widened(kvqm, values.of(user)) if k >= 2 else doubled(edit, kvqm, [user])
    states = [given(edit.view, values.of(node), node) for node in (init[found.at[name]] for name in "SM")]
    S0, M0 = (initial(edit, node, frame) for node in states)
    steps = compat.routing.hint(example(kvqm).shape[0])
    call = called(edit, (kvqm, b_s, b_m, S0, M0), frame.n, steps, trained(edit, match))
    pairs = Pairs()
    for user, k in found.taken.items():
        got = edit.emit(operator.getitem, call, {found.at["S"]: 1, found.at["M"]: 2}.get(k, 0))
        pairs.append((values.of(user), edit.as_like(got, values.of(user))))
    return pairs


class Lifting:
    """Computes the vectors of a body's step for all steps, outside of the scan."""

    def __init__(self, edit: Edit, found: Body, outer: dict[fx.Node, Lifted]) -> None:
        self.edit = edit
        self.body = found
        self.frame = found.step.frame
        self.lifted = outer
        self.time: Var | None = None

    def inputs(self) -> Inputs:
        """Returns where the vectors of all steps are stored. Raises Mismatch."""
        leaves = {name: self.body.step.leaves[name] for name in (*ROLES, *BIASES)}
        roles: dict[str, Any] = {}
        for name, leaf in leaves.items():
            held = self.body.held.get(name)
            roles[name] = held if held is not None or leaf is None else self._everywhere(leaf, name)
        return Inputs(self.frame, roles, None)

    def _everywhere(self, leaf: Leaf, name: str) -> Held:
        failed: Mismatch | None = None
        for value, at in reversed(places(leaf, self.frame)):
            assert value.node is not None
            try:
                node, batched = self._over(value.node)
            except Mismatch as mismatch:
                failed = failed or mismatch
                continue
            held = self.edit.view.values.of(node)
            if batched and self.time is None:
                self.time = Var(held.shape[0])
            return behind(held, at, self.frame, self.time) if batched and self.time else Held(held, at, None)
        raise failed or Mismatch(f"{name} of the step is not laid out as [..., n]", leaf.ref.value)

    def _over(self, node: fx.Node) -> Lifted:
        if node not in self.lifted:
            if not self.body.view.values.inspectable(node):
                raise Mismatch("a vector of the step is computed by an operation that cannot be moved out of the scan")
            for a in node.all_input_nodes:
                self._over(a)
            self.lifted[node] = lifted(self.edit, node, self.lifted)
        return self.lifted[node]


def behind(value: Value, at: Slot, frame: Frame, steps: Var) -> Held:
    """Returns the innermost tensor that ``value``, which holds all steps, is a view of."""
    index = [var(steps), *(_index(frame, kind, c) for kind, c in at.dims)]
    best = Held(value, Slot((("const", 0), *at.dims)), 0)
    for ref in shown(Ref(value, tuple(index))):
        found = slot(ref, frame, steps) if ref.value.node is not None else None
        time = [d for d, (kind, _) in enumerate(found.dims) if kind == "time"] if found is not None else []
        if found is not None and len(time) == 1:
            dims = tuple(("const", 0) if kind == "time" else (kind, c) for kind, c in found.dims)
            best = Held(ref.value, Slot(dims), time[0])
    return best


def _index(frame: Frame, kind: str, c: int) -> Any:
    if kind == "at":
        return var(frame.at).plus(const(c))
    return var(frame.lead[c]) if kind == "lead" else const(c)
