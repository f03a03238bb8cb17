# SPDX-License-Identifier: Apache-2.0
"""The result of recognising an attention, and the exception for what is not one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import Size, Var, product_of, words_of
from mhc_inductor.routing.graph.linear import Key, variables_of
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.masks.keys import AnyOf, free
from mhc_inductor.routing.masks.masks import Masks
from mhc_inductor.routing.masks.operands import Pair, sources
from mhc_inductor.routing.operators.selection.data_masks import Layer, Layers
from mhc_inductor.routing.operators.selection.fills import Fills, Rows
from mhc_inductor.routing.operators.selection.intervals import Entries, Interval

if TYPE_CHECKING:
    from mhc_inductor.routing.operators.selection.absorb import Absorbed

OP = "selection_attention"


class NotOurs(Exception):
    """Raised for what is not a selection attention.

    With a reason it is reported as a near miss, if a mask of it selects keys from data.
    """

    def __init__(self, reason: str = "", value: Value | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = value


@dataclasses.dataclass
class Found:
    """A recognised attention.

    ``dims``: for each dim of ``out`` its digits (variables, the most significant first). ``pairs``, ``v``: the elements of
    q, k and v at these digits, at the features of q and k, and at the key ``t``; with several pairs, q and k are the
    concatenations of theirs. ``mask`` evaluates which keys are
    visible. ``dense``: the values that have an element for each query and key.
    """

    out: Value
    dims: list[list[Var]]
    pairs: list[Pair]
    v: Ref
    t: Key
    scale: float
    mask: Callable[[], AnyOf]
    dense: list[Value]
    masks: Masks
    fills: Fills
    keys: AnyOf = dataclasses.field(default_factory=list)
    rows: Rows = Rows.ZERO
    sink: Ref | None = None
    """The logit, one a head, that joins the softmax's denominator only."""
    read: Layers | None = None
    """The masks that the op reads as data; None if it reads none."""
    whole: bool = False
    """Whether the op reads the masks at all keys, not at those of lists."""
    gathered: bool = False
    """Whether the model gathers each query's keys: places of a list are counted each, also where several name one key."""
    inner: Var | None = None
    """The place in a gathered block, None if single keys are gathered."""
    logs: list[Ref] = dataclasses.field(default_factory=list)
    """Elements of logarithms of the scores' sum of exponentials, which the op's lse is."""
    opted: bool = False
    """Whether rows without keys give 0 because the user asked for it, although the formula gives something else."""
    intervals: list[Interval] = dataclasses.field(default_factory=list)
    entries: list[Entries] | None = None
    """The intervals as lists of single keys; None if the op is to read ranges."""
    absorbed: Absorbed | None = None
    """How the op can read the latent that K and V are maps of; None if it reads K and V."""
    compared: str = ""
    """Both figures of the rule that chose the op, once it is emitted; empty where nothing was compared."""
    batch: list[Var] = dataclasses.field(default_factory=list)
    groups: list[Var] = dataclasses.field(default_factory=list)
    heads: list[Var] = dataclasses.field(default_factory=list)
    query: list[Var] = dataclasses.field(default_factory=list)
    feature: list[Var] = dataclasses.field(default_factory=list)

    def deepest(self) -> list[Ref]:
        """Returns the elements of q and k of each pair, and that of v, behind all views and casts."""
        return [[*sources(ref)][-1].ref for ref in self.refs]

    @property
    def refs(self) -> list[Ref]:
        """Returns the elements of q and k of each pair, and that of v."""
        return [*(ref for pair in self.pairs for ref in (pair.q, pair.k)), self.v]

    @property
    def results(self) -> list[Value]:
        """Returns the values that the op's results replace."""
        return [self.out, *(ref.value for ref in self.logs)]

    @property
    def layers(self) -> list[Layer]:
        """Returns the masks that the op reads as data."""
        return [] if self.read is None else self.read.found

    @property
    def low(self) -> bool:
        """Returns whether a row in which the masks show no entry of its list depends on other keys."""
        return self.read is not None and self.read.low and not self.whole and not self.opted

    @property
    def masked(self) -> set[Var]:
        """Returns the variables that the visible keys depend on."""
        return set[Var]().union(*map(free, self.keys), *(variables_of(x.ref) for x in self.layers))

    @property
    def width(self) -> Size:
        """Returns the number of features of q and k: a sum that is a number, or the one size that there is."""
        sizes = [pair.d.size for pair in self.pairs]
        return sizes[0] if len(sizes) == 1 else Size(sum(size.factor for size in sizes))

    def words(self) -> str:
        """Returns a description for the report."""
        groups, heads = (product_of(v.size for v in digits) for digits in (self.groups, self.heads))
        kinds = []
        for each in () if self.whole else self.intervals:
            width = next((w for low, high in each.pairs() if (w := high.minus(low).value) is not None), None)
            count = product_of(v.size for v in each.bound)
            kind = "ranges" if width is None else f"blocks of {width} keys" if width > 1 else "keys"
            kinds.append(f"{words_of(count)} {kind}" if each.selects else "keys near the query")
        said = f"{words_of(groups)} groups of {words_of(heads)} heads"
        if self.absorbed is not None:
            said = f"{self.absorbed.heads} heads on one latent of {self.absorbed.width}, whose maps are absorbed"
        kinds += ["a mask that is read as data"] if self.whole or not all(x.exact for x in self.layers) else []
        sink = "" if self.sink is None else ", a sink"
        compared = f"; {self.compared}" if self.compared else ""
        return f"{said}{sink}, {' and '.join(kinds)} a query; {self.rows.value}{compared}"
