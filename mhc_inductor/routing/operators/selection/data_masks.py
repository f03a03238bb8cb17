# SPDX-License-Identifier: Apache-2.0
"""Masks that the op reads as data: arguments, buffers, and what other ops or graphs return.

Nothing is proved of their contents. A bound says where such a mask can show a key: everywhere that it is not -inf, or
not finfo.min. The op reads the mask itself at the keys within the bound, and at all keys in rows where it shows none.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math

from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import Unsupported
from mhc_inductor.routing.masks.elements import ADD, constant_of, inner, operand, uncast
from mhc_inductor.routing.masks.keys import FALSE, TRUE, AnyOf, Literal, both
from mhc_inductor.routing.masks.masks import Masks

LOW = -1e30
"""A score plus this number has no weight next to a score plus 0, in any dtype."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A mask on the scores.

    ``shows``: the truth value at which a key counts, None for a mask that is added, multiplied by ``factor``. ``exact``: the
    keys that the search found are those that it shows, so that a list of them needs no look at the mask. ``span``: what
    holds of the keys of its segment; it says nothing of others.
    """

    ref: Ref
    shows: bool | None
    factor: float
    exact: bool
    span: frozenset[Literal]


class Layers:
    """The masks on the scores of one attention, which the op is to read as data.

    ``places``: they are masks of the places of gathered lists, which nothing is known of.
    """

    def __init__(self, masks: Masks, places: bool) -> None:
        self.masks = masks
        self.places = places
        self.found: list[Layer] = []
        self._low: list[float] = []
        self._span = frozenset[Literal]()

    @property
    def low(self) -> bool:
        """Returns whether keys beyond the bound may have a number of at most :data:`LOW` in place of -inf."""
        return bool(self._low)

    def within(self, keys: AnyOf) -> Layers:
        """Returns where masks of a segment of these keys are recorded."""
        (conj,) = keys
        part = copy.copy(self)
        part._span = self._span | conj.literals
        return part

    def filled(self, ref: Ref, want: bool) -> AnyOf:
        """Returns which keys a mask leaves that is filled in, all of them if its formula cannot be followed."""
        keys: AnyOf | None = None
        with contextlib.suppress(Unsupported):
            keys = None if self.places else self.masks.truth(ref, want)
        return self._taken(ref, want, 1.0, keys, TRUE)

    def added(self, ref: Ref, factor: float = 1.0) -> AnyOf:
        """Returns the keys at which a mask may be above :data:`LOW` that is added, multiplied by ``factor``."""
        if self.places:
            return self._taken(ref, None, factor, None, TRUE)
        if factor != 1.0:
            raise Unsupported
        return self._taken(ref, None, factor, self._bare(ref), self._shown(ref))

    def _taken(self, ref: Ref, shows: bool | None, factor: float, keys: AnyOf | None, bound: AnyOf) -> AnyOf:
        """Records a mask. Returns the keys that it shows, the ``bound`` if they are not known."""
        self.found.append(Layer(_held(ref), shows, factor, keys is not None, self._span))
        return bound if keys is None else keys

    @property
    def filled_keys(self) -> AnyOf:
        """Returns which keys the masks show. Raises Unsupported for formulas that cannot be followed, and for added masks."""
        keys = TRUE
        for each in self.found:
            if each.shows is None:  # a row of nothing but low numbers counts its entries
                raise Unsupported
            keys = both(keys, self.masks.truth(each.ref, each.shows))
        return keys

    def _bare(self, ref: Ref) -> AnyOf | None:
        """Returns the keys that an added mask of 0 and -inf alone shows, None for any other mask."""
        with contextlib.suppress(Unsupported):
            if self.masks.possible(ref.value) <= {0.0, -math.inf}:
                return self.masks.additive(ref)
        return None

    def _hides(self, number: float) -> bool:
        if -math.inf < number <= LOW:
            self._low.append(number)
        return number <= LOW

    def _shown(self, ref: Ref, _: bool = True) -> AnyOf:
        """Returns a bound of the keys at which an element is above :data:`LOW`: all of them where nothing is known."""
        ref = uncast(ref)
        known = constant_of(ref.value)
        if known is not None:
            return FALSE if self._hides(known) else TRUE
        keys = self._bare(ref)
        if keys is not None:
            return keys
        with contextlib.suppress(Unsupported):
            if all(x == 0.0 or self._hides(x) for x in self.masks.possible(ref.value)):
                return self.masks.additive(ref)
        with contextlib.suppress(Unsupported):
            if ref.value.func in ADD and len(ref.value.args) == 2 and not ref.value.kwargs:
                parts = (self._shown(operand(x, ref)) for x in ref.value.args if constant_of(x) is None)
                return functools.reduce(both, parts, TRUE)
            found = self.masks.placed.structured(ref, True, self._shown)
            return TRUE if found is None else found
        return TRUE


def _held(ref: Ref) -> Ref:
    """Returns the element of a mask in a tensor of the graph, behind views alone. Raises Unsupported without one."""
    below: Ref | None = ref
    while below is not None and below.value.node is None:
        below = inner(below)
    if below is None:
        raise Unsupported
    return below
