# SPDX-License-Identifier: Apache-2.0
"""Index top-k as an operator of the routing pass."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from mhc_inductor.routing.edit import Edit
from mhc_inductor.routing.graph.expressions import Ref, aten
from mhc_inductor.routing.graph.index import Unsupported, Var, var
from mhc_inductor.routing.graph.linear import Key
from mhc_inductor.routing.graph.values import Value, example, name_of, values_in
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match, Mismatch, Miss
from mhc_inductor.routing.masks.elements import SHOWN, argument, constant_of
from mhc_inductor.routing.masks.operands import Source, has_product
from mhc_inductor.routing.operators.index.check import Check
from mhc_inductor.routing.operators.index.emit import emit_choice
from mhc_inductor.routing.operators.index.formula import EXPECTED, NEAR, Formula, Unrelated, has_relu, recognised
from mhc_inductor.routing.operators.index.matches import OP, PICKS, SCORES, Found, operands, roles
from mhc_inductor.routing.operators.index.order import ranked_outside
from mhc_inductor.routing.operators.index.profit import keeps_formula, refusal
from mhc_inductor.routing.operators.index.visible import Visible, visible
from mhc_inductor.routing.operators.kernels import kernels_of

_CHOICES = ("topk", "sort", "argsort")
_FOLLOWED = "the scores cannot be followed through their views"


class IndexOperator:
    """Finds lightning indexers, scores of keys and the ``topk`` of them, and replaces them with ``index_topk``.

    Where the chosen keys leave the graph by falling score, or something else stops that (a mask of unknown values, the
    values of ``topk``, another reader), ``index_scores`` replaces the scores, and masks and ``topk`` stay.
    """

    name = "index"

    def __init__(self) -> None:
        self._values: Any = None
        self._routed: set[Value] = set()

    def candidates(self, view: View) -> Iterable[fx.Node]:
        """Returns the calls that choose the largest elements of a tensor."""
        self._values = view.values
        return [node for node in view.nodes if node in view.live and name_of(node).partition(".")[0] in _CHOICES]

    def match(self, view: View, node: fx.Node) -> Match | Miss | list[Match | Miss] | None:
        """Returns the choice of keys that a candidate makes, a near miss with the scores, or None for something else."""
        outs = _results(view, node)
        start = outs[0] if outs else None
        if start is None or not start.args or not isinstance(start.args[0], Value):
            return None
        scores = start.args[0]
        if not scores.dtype.is_floating_point or not scores.shape:
            return None
        try:
            found = _found(view, scores, start, outs)
        except Unrelated:
            return None
        except Mismatch as mismatch:
            return [Miss(OP, mismatch.reason, mismatch.value, start), *self._scored(view, scores)]
        except Unsupported:
            near = has_relu(scores) and has_product(scores)
            return Miss(OP, f"{_FOLLOWED}; {EXPECTED}", None, start) if near else None
        check = Check(found)
        return Match(
            SCORES if found.ranked else PICKS if found.marked else OP,
            found.values(),
            found.outs,
            found.words(),
            data=found,
            sample=check.sample,
            cases=3,
            compare=check.compare,
            inner=[scores],
        )

    def _scored(self, view: View, chosen: Value) -> Iterable[Match]:
        """Yields the scores below the masks of ``chosen``, once, if the op computes them."""
        with contextlib.suppress(Mismatch, Unrelated, Unsupported):
            found = _scores(view, chosen)
            if found.scores not in self._routed:
                self._routed.add(found.scores)
                yield Match(SCORES, found.values(), found.outs, found.words(), data=found)

    def emit(self, edit: Edit, match: Match) -> Iterable[tuple[Value, fx.Node]]:
        """Emits the op in place of an indexer. Returns each replaced output with its new node."""
        return emit_choice(edit, match.data)

    def faster_as_written(self, match: Match, device: str) -> bool:
        """Returns whether a CPU runs the formula as the model wrote it: see :func:`.profit.keeps_formula`."""
        return device == "cpu" and keeps_formula(match.data.sizes(self._values))

    def kernels(self, op: str, device: str) -> tuple[str, ...]:
        """Returns the names of the kernels on a GPU; elsewhere what runs there."""
        if device == "cuda":
            return ("index_tile_scores",) if op == SCORES else ("index_tile_scores", "index_select")
        return ("reference formula, in chunks of queries",) if device == "cpu" else kernels_of(op, device)


def _results(view: View, node: fx.Node) -> list[Value]:
    """Returns the values of the results of a call that are used, of its getitems or its own."""
    users = [node] if isinstance(example(node), torch.Tensor) else [u for u in node.users if u in view.live]
    if users != [node] and any(name_of(u) != "getitem" for u in users):
        return []
    # Reading func sets out.
    return [v for v in map(view.value, users) if v is not None and v.func is not None]


def _found(view: View, scores: Value, start: Value, outs: list[Value]) -> Found:
    """Returns the choice of the largest ``scores``. Raises Mismatch, Unrelated, Unsupported and DynamicWidth."""
    t = Key(scores.shape[-1])
    lead = [Var(size) for size in scores.shape[:-1]]
    formula = recognised(Ref(scores, tuple(var(v) for v in (*lead, t))), t)
    _check_call(start, scores)
    check_marks(view, formula, outs)
    batch, query, q, k, weights = _read(formula, lead)
    seen = visible(formula.hidden, t, {*batch, *query}, view.values.fixed, view.values.hints)
    dims = [*lead, Var(outs[0].shape[-1])]
    found = Found(formula, scores, outs, dims, _count(outs), batch, query, seen, q, k, weights)
    _check(view, found, start)
    ranked = ranked_outside(view, found, argument(start, "sorted"))
    if found.marked and (ranked or seen.fill is None):
        raise Mismatch(VALUES, next(v for v in outs if not v.out))
    return dataclasses.replace(found, ranked=ranked)


def _scores(view: View, chosen: Value) -> Found:
    """Returns the scores of all keys below the masks of ``chosen``. Raises as :func:`_found` does."""
    t = Key(chosen.shape[-1])
    base = recognised(Ref(chosen, (*(var(Var(size)) for size in chosen.shape[:-1]), var(t))), t).unmasked
    if var(t) not in base.index or len(base.index) < 2:  # one query of a loop
        raise Unsupported
    at, scores = base.index.index(var(t)), base.value
    lead = [Var(size) for d, size in enumerate(scores.shape) if d != at]
    dims = [*lead[:at], t, *lead[at:]]
    formula = recognised(Ref(scores, tuple(map(var, dims))), t)
    batch, query, q, k, weights = _read(formula, lead)
    found = Found(formula, scores, [scores], dims, None, batch, query, Visible(), q, k, weights)
    _check(view, found, scores)
    return found


def _read(formula: Formula, lead: list[Var]) -> tuple[list[Var], list[Var], Source, Source, list[Source]]:
    """Returns the variables of batch and queries, and where q, k and w are read. Raises Mismatch and Unsupported."""
    batch, query = roles(formula, lead)
    q, k, weights = operands(formula, batch, query)
    if any(w.dtype is torch.float64 for w in weights) and torch.float64 not in (q.dtype, k.dtype):
        raise Mismatch("w is float64 and q is not", formula.weights[0].value)
    return batch, query, q, k, weights


def _check(view: View, found: Found, where: Value) -> None:
    """Raises Mismatch if no kernel takes these sizes, or something else reads what the op computes on the way."""
    reason = refusal(found.sizes(view.values), _device(found.outs[0]))
    if reason:
        raise Mismatch(reason, where)
    check_scores(view, found)


def _device(value: Value) -> str:
    return str(example(value.node).device.type) if value.node is not None else "cpu"


def _check_call(start: Value, scores: Value) -> None:
    """Raises Mismatch unless the largest scores along the last dim are chosen."""
    if start.func is not aten.topk.default:
        found = "by a sort"
    elif len(scores.shape) < 2:
        found = "one query at a time"
    elif argument(start, "dim") % len(scores.shape) != len(scores.shape) - 1:
        found = "along another dim"
    elif not argument(start, "largest"):
        found = "the smallest"
    else:
        return
    raise Mismatch(NEAR["choice"].format(found), start)


def _count(outs: list[Value]) -> Any:
    """Returns the argument k of the call of ``topk``: a number or a node."""
    (call,) = outs[0].node.all_input_nodes if outs[0].node is not None else (None,)
    if call is None:
        return None
    return call.args[1] if len(call.args) > 1 else call.kwargs.get("k")


def check_scores(view: View, found: Found) -> None:
    """Raises Mismatch if what the op computes on the way is used elsewhere: it would be computed twice."""
    inside = {v.node for v in found.formula.met if v.node is not None}
    ends = {a for v in found.outs if v.node is not None for a in (v.node, *v.node.all_input_nodes)}
    for value in (v for v in found.formula.met if v not in found.outs):
        for user in value.node.users if value.node is not None else ():
            if user not in inside and user not in ends and user in view.live and _reads(view, user):
                raise Mismatch("the scores are used elsewhere, too", view.value(user) or value)


def _reads(view: View, user: fx.Node) -> bool:
    """Checks whether a node reads more of its arguments than their sizes: ``zeros_like`` does not."""
    if user.op == "output":
        return True
    return (
        not isinstance(example(user), (int, torch.SymInt, torch.Size, bool)) and constant_of(view.value(user)) is None
    )


VALUES = "the values of topk are used; expected its indices, and marks of hidden keys such as values == -inf"


def check_marks(view: View, formula: Formula, outs: list[Value]) -> None:
    """Raises Mismatch unless the values of ``topk`` are only compared with numbers, as where they mark hidden keys.

    A comparison has no gradient. It must see the scores that the op gives: no shifts, no overflows of fp16.
    """
    todo = [v for v in outs if not v.out]
    known = {*todo}
    if todo and (formula.moved or any(v.dtype is torch.float16 for v in formula.met)):
        raise Mismatch(VALUES, todo[0])
    for value in todo:  # grows
        for user in value.node.users if value.node is not None else ():
            if user not in view.live or not _reads(view, user):
                continue
            used = view.value(user)
            if used is not None and used.func in SHOWN and used.dtype.is_floating_point:
                todo.append(used)
                known.add(used)
            elif used is None or used.dtype is not torch.bool or not _compares(used, known, user):
                raise Mismatch(VALUES, used or value)


def _compares(value: Value, known: set[Value], call: fx.Node) -> bool:
    """Checks whether a value is computed from ``known`` values and numbers alone, inside one ``call``."""
    if value in known or constant_of(value) is not None:
        return True
    inside = value.func is not None and value.node in (None, call)
    return inside and all(_compares(a, known, call) for a in values_in(value.args))
