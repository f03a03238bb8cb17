# SPDX-License-Identifier: Apache-2.0
"""Finds weights of a softmax that are masked and divided by their own sum or norm: another formula than masked scores.

Both agree where the softmax leaves something for the visible keys. Where hidden scores are so far above the others that
the visible weights are rounded to 0, this formula gives 0 / 0 or loses its digits, and masked scores do not.
"""

from __future__ import annotations

from torch import fx

from mhc_inductor.routing.graph.values import Value, behind, inner
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.masks.operands import DIVIDE, has_product
from mhc_inductor.routing.operators.selection.weights import REACH, guarded, multiplied, shows


def renormalised(view: View, softmax: Value, node: fx.Node) -> tuple[Value, list[Value]] | None:
    """Returns weights of an attention that are masked and divided by their sum, and the masks; None if there are none.

    Scores are products of tensors: the choice of a router, which multiplies by a parameter, is none.
    """
    if not has_product(softmax.args[0]):
        return None
    known: dict[Value, None] = {softmax: None}
    guards: list[Value] = []
    found: list[Value] = []

    def passes(user: fx.Node) -> bool:
        value = view.value(user)
        if value is None or found:
            return False
        mask = _masked(value, known)
        if mask is not None:
            guards.append(mask)
        if mask is not None or shows(value, known):
            known[value] = None
            return True
        divided = (v for v in inner(value) if v.func in DIVIDE and v.args[0] in known)
        found.extend(
            value for v in divided if isinstance(v.args[1], Value) and not known.keys().isdisjoint(behind(v.args[1]))
        )
        return False

    view.descendants([node], passes, REACH)
    return (found[0], guards) if found and guards else None


def _masked(value: Value, known: dict[Value, None]) -> Value | None:
    """Returns the tensor that weights are multiplied by or masked with."""
    guard = guarded(value, known)
    if guard is not None:
        return guard.mask
    pairs = [(a, b) for a, b in multiplied(value) if a in known and b not in known]
    return next((b for _, b in pairs if b.shape[-1:] == value.shape[-1:]), None)
