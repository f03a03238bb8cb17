# SPDX-License-Identifier: Apache-2.0
"""Masks that a checkpointed region is given, and whose formula stands in the graph around the region.

The formula bounds the keys that a mask shows. What it reads, such as padding or position ids, cannot be read inside the
region; there the mask itself is read at each key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.values import is_given
from mhc_inductor.routing.masks.elements import CASTS, inner, keyed
from mhc_inductor.routing.masks.keys import AnyOf, Given, KeyData, Literal, conjunction

if TYPE_CHECKING:
    from mhc_inductor.routing.masks.masks import Masks


class Inside:
    """Replaces conditions on tensors outside a checkpointed region by the mask that the region is given."""

    def __init__(self, masks: Masks) -> None:
        self.masks = masks

    def input(self, ref: Ref) -> Ref | None:
        """Returns the element of a region's input that ``ref`` shows through views and casts, None for anything else."""
        at: Ref | None = ref
        while at is not None and not is_given(at.value):
            below = inner(at)
            cast = below is None and at.value.func in CASTS
            at = Ref(at.value.args[0], at.index) if cast else below
        return at

    def read(self, given: Ref, want: bool, found: AnyOf) -> AnyOf:
        """Returns when ``given`` is nonzero (``want``) or zero, of which ``found`` is the formula outside.

        Each alternative keeps what it says of positions: with the condition that the mask itself holds, all of them
        together say the same. Raises KeyData if the mask would be read at the key and that is not allowed.
        """
        if not any(map(_outside, (x for conj in found for x in conj.literals))):
            return found
        if keyed(given) and not self.masks.by_key:
            raise KeyData(given)
        closer = (self.masks.wholes.positions.inside(conj, note=False) for conj in found)
        itself = Given(given, want)
        kept = [conjunction({itself, *(x for x in conj.literals if not _outside(x))}, conj.bound) for conj in closer]
        return list(dict.fromkeys(kept))


def _outside(literal: Literal) -> bool:
    """Checks whether a condition reads a tensor of the graph around."""
    refs = [literal.ref] if isinstance(literal, Given) else [d.ref for d in literal.value.data()]
    return any(ref.value.node is None for ref in refs)
