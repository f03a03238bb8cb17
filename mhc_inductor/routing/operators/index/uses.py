# SPDX-License-Identifier: Apache-2.0
"""Checks how a model uses the scores of an indexer."""

from __future__ import annotations

import torch
from torch import fx

from mhc_inductor.routing.graph.values import example
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.elements import constant_of
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
