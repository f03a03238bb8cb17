# SPDX-License-Identifier: Apache-2.0
"""Checks how a model uses the scores of an indexer."""

from __future__ import annotations

import torch
from torch import fx

from mhc_inductor.routing.graph.values import Value, example, values_in
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.elements import SHOWN, constant_of
from mhc_inductor.routing.operators.index.formula import Formula
from mhc_inductor.routing.operators.index.matches import Found


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
