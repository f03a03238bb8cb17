# SPDX-License-Identifier: Apache-2.0
"""Evaluates elements of masks, and of the number tensors that masks are computed from, in normal form.

Comparisons, ``any``, ``one_hot``, ``scatter``, sums and cumulative sums of indicators, ``gather`` of blocks, ``tril``
and unrolled ``|=`` all get the same form (:mod:`.keys`).
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Mapping
from typing import Any

import torch

from mhc_inductor.routing.graph.bounds import TooLarge, remembered
from mhc_inductor.routing.graph.expressions import Ref, _reduced, aten
from mhc_inductor.routing.graph.index import Size, Unsupported
from mhc_inductor.routing.graph.values import Value, is_given
from mhc_inductor.routing.masks.additive import Additive, PossibleValues
from mhc_inductor.routing.masks.elements import (
    ALL,
    AND,
    ANY,
    CASTS,
    MULTIPLY,
    NOT,
    OR,
    constant_of,
    inner,
    keyed,
    operand,
)
from mhc_inductor.routing.masks.index_checks import Indices
from mhc_inductor.routing.masks.indicator_sums import Counts, against
from mhc_inductor.routing.masks.integers import Wholes
from mhc_inductor.routing.masks.keys import (
    FALSE,
    TRUE,
    All,
    AnyOf,
    Given,
    KeyData,
    Literal,
    both,
    compared,
    conjunction,
    either,
    elements_of,
    has_data,
    reads_key,
)
from mhc_inductor.routing.masks.scatters import Placed

_OPPOSITE = {"le": "gt", "gt": "le", "lt": "ge", "ge": "lt", "eq": "ne", "ne": "eq"}
_MIRROR = {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt", "eq": "eq", "ne": "ne"}
_COMPARISONS = {getattr(getattr(aten, name), overload): name for name in _OPPOSITE for overload in ("Tensor", "Scalar")}
_BOTH = {*AND, *MULTIPLY, aten.minimum.default}
_EITHER = {*OR, aten.maximum.default}


class Masks:
    """Evaluates elements of masks.

    ``seen``: the values met whose visible keys depend on tensor values, not only on positions. ``by_key``: conditions
    may read tensors at the key, since they are evaluated at each entry of a list of keys.
    """

    def __init__(self, fixed: Mapping[str, int], hints: Mapping[str, int], by_key: bool = False) -> None:
        self.fixed = fixed
        self.by_key = by_key
        self.hints = hints
        self.equal: set[frozenset[Size]] = set()
        """Pairs of sizes that are assumed to be equal; the rewrite must guard them."""
        self.seen: dict[Value, None] = {}
        self.packed: dict[Value, tuple[int, bool]] = {}
        """Tensors of packed sequences, each with its dim of tokens: the number of the sequence, or positions in it."""
        self.possible = PossibleValues()
        self.indices = Indices()
        self.known: dict[Any, Any] = {}
        """The result or the exception for each element evaluated: masks occur in other masks more than once."""
        self.placed = Placed(self)
        self.wholes = Wholes(self)
        self.counts = Counts(self)
        self.numbers = Additive(self)
        self.additive = self.numbers.of
        self.whole = self.wholes.of

    def truth(self, ref: Ref, want: bool = True) -> AnyOf:
        """Returns when ``ref`` is ``want``. Raises Unsupported.

        ``ref`` is an element of a boolean tensor, or of a number tensor, where nonzero counts as true.
        """

        def find() -> AnyOf:
            found = self._find(ref, want)
            self.note(ref, found)
            return found

        found: AnyOf = remembered(self.known, (ref, want), find, ref.value)
        return found

    def note(self, ref: Ref, found: AnyOf) -> None:
        """Records ``ref`` in :attr:`seen` if it depends on the key and ``found`` on elements of tensors."""
        if keyed(ref) and any(has_data(conj) for conj in found):
            self.seen[ref.value] = None

    def side(self, a: Any, ref: Ref, want: bool) -> AnyOf:
        """Returns when an operand of ``ref``, a number or a tensor, is ``want``."""
        known = constant_of(a)
        if known is not None:
            return TRUE if bool(known) == want else FALSE
        return self.truth(operand(a, ref), want)

    def _find(self, ref: Ref, want: bool) -> AnyOf:
        value = ref.value
        below = inner(ref)
        if below is not None:
            found = self.truth(below, want)
            return self.read(ref, want, found) if is_given(value) else found
        known = constant_of(value)
        if known is not None:
            return TRUE if bool(known) == want else FALSE
        try:
            return self._evaluated(ref, want)
        except Unsupported as error:
            readable = self.by_key and value.dtype is torch.bool and value.node is not None
            if isinstance(error, TooLarge) or not readable:
                raise
            return [All(frozenset({Given(ref, want)}))]

    def _evaluated(self, ref: Ref, want: bool) -> AnyOf:
        """Evaluates an element that is neither a view of another nor a constant. Raises Unsupported."""
        value, func = ref.value, ref.value.func
        if value.dtype is not torch.bool:
            return self._compared(ref, "ne" if want else "eq", 0, ref)
        if func in CASTS or func in NOT:
            return self.truth(Ref(value.args[0], ref.index), want == (func in CASTS))
        if func in _BOTH or func in _EITHER:
            return self._combined(ref, want)
        if func in _COMPARISONS:
            return self._comparison(ref, _COMPARISONS[func], want)
        if func in ANY or func in ALL:
            return self._reduced(ref, want)
        found = self.placed.structured(ref, want, self.truth)
        if found is not None:
            return found
        if keyed(ref) and not self.by_key:
            raise KeyData(ref)
        return [All(frozenset({Given(ref, want)}))]

    def _combined(self, ref: Ref, want: bool) -> AnyOf:
        """Evaluates two conditions joined by and, or by or."""
        a, b = (self.side(x, ref, want) for x in ref.value.args[:2])
        if (ref.value.func in _BOTH) != want:
            return either(a, b)
        return a if ref.value.args[0] is ref.value.args[1] else both(a, b)

    def _reduced(self, ref: Ref, want: bool) -> AnyOf:
        """Evaluates an ``any`` that is to hold, or an ``all`` that is not to.

        Raises Unsupported for the other two cases, which need a condition on all elements.
        """
        inside, bound = _reduced(ref)
        if (ref.value.func in ANY) != want:
            self.note(ref, self.truth(inside, not want))
            raise Unsupported
        return [All(c.literals, c.bound + tuple(bound)) for c in self.truth(inside, want)]

    def _comparison(self, ref: Ref, op: str, want: bool) -> AnyOf:
        left, right = ref.value.args[:2]
        if not want:
            op = _OPPOSITE[op]
        if constant_of(left) is not None and constant_of(right) is None:
            left, right, op = right, left, _MIRROR[op]
        return self._compared(operand(left, ref), op, right, ref)

    def _compared(self, element: Ref, op: str, other: Any, at: Ref) -> AnyOf:
        """Compares a number with the operand ``other`` of ``at``. Raises Unsupported.

        What the comparison of whole numbers gives is preferred, unless it reads tensors at the key.
        """
        known = constant_of(other)
        if known is None:
            return compared(op, self.whole(element), self.wholes.side(other, at))
        found = None
        with contextlib.suppress(Unsupported):
            found = compared(op, self.whole(element), self.wholes.side(other, at))
            if not self.by_key or not any(map(reads_key, found)):
                return found
        try:
            return self._against(element, op, known)
        except Unsupported:
            if found is None:
                raise
            return found

    def _against(self, element: Ref, op: str, known: float) -> AnyOf:
        """Compares an element of an additive mask, a flag or a count with a number. Raises Unsupported."""
        holds = getattr(operator, op)

        def passing() -> AnyOf:
            return self.numbers.passing(element, lambda x: holds(x, known))

        if element.value.dtype is torch.bool or math.isinf(known):
            return passing()
        try:
            return against(self.counts.of(element), op, known)
        except Unsupported:
            if op in ("eq", "ne"):
                with contextlib.suppress(Unsupported):
                    return passing()
            raise

    # --- checkpointed regions ---

    def input(self, ref: Ref) -> Ref | None:
        """Returns the element of a region's input that ``ref`` shows through views and casts, None for anything else."""
        at: Ref | None = ref
        while at is not None and not is_given(at.value):
            below = inner(at)
            cast = below is None and at.value.func in CASTS
            at = Ref(at.value.args[0], at.index) if cast else below
        return at

    def read(self, given: Ref, want: bool, found: AnyOf) -> AnyOf:
        """Returns when ``given``, an input of a checkpointed region, is nonzero (``want``) or zero.

        ``found`` is its formula in the graph around. The formula bounds the keys that a mask shows, but what it reads,
        such as padding or position ids, cannot be read inside the region; there the mask itself is read at each key.
        Each alternative keeps what it says of positions: with the condition that the mask itself holds, all of them
        together say the same. Raises KeyData if the mask would be read at the key and that is not allowed.
        """
        if not any(map(_outside, (x for conj in found for x in conj.literals))):
            return found
        if keyed(given) and not self.by_key:
            raise KeyData(given)
        closer = (self.wholes.positions.inside(conj, note=False) for conj in found)
        itself = Given(given, want)
        kept = [conjunction({itself, *(x for x in conj.literals if not _outside(x))}, conj.bound) for conj in closer]
        return list(dict.fromkeys(kept))


def _outside(literal: Literal) -> bool:
    """Checks whether a condition reads a tensor of the graph around."""
    return any(ref.value.node is None for ref in elements_of(literal))
