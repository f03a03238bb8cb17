"""One attention that was recognised, and why one is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import Size, Var, product_of
from mhc_inductor.routing.graph.linear import Key
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.operators.selection.fills import Fills, Rows
from mhc_inductor.routing.operators.selection.intervals import Interval
from mhc_inductor.routing.operators.selection.keys import AnyOf
from mhc_inductor.routing.operators.selection.masks import Masks
from mhc_inductor.routing.operators.selection.operands import sources

OP = "selection_attention"


class NotOurs(Exception):
    """No selection; with a reason, close to one if its mask is."""

    def __init__(self, reason: str = "", value: Value | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = value


@dataclasses.dataclass
class Found:
    """One attention. ``dims`` are the digits (variables, most significant first) of each dim of ``out``; ``dense`` are
    the values with an element for each query and key."""

    out: Value
    dims: list[list[Var]]
    q: Ref
    k: Ref
    v: Ref
    d: Var
    t: Key
    scale: float
    mask: Callable[[], AnyOf]
    dense: list[Value]
    masks: Masks
    fills: Fills
    keys: AnyOf = dataclasses.field(default_factory=list)
    rows: Rows = Rows.ZERO
    opted: bool = False
    """Whether the user asked for zeros in rows without keys, where the formula gives something else."""
    intervals: list[Interval] = dataclasses.field(default_factory=list)
    batch: list[Var] = dataclasses.field(default_factory=list)
    groups: list[Var] = dataclasses.field(default_factory=list)
    heads: list[Var] = dataclasses.field(default_factory=list)
    query: list[Var] = dataclasses.field(default_factory=list)
    feature: list[Var] = dataclasses.field(default_factory=list)

    def deepest(self) -> list[Ref]:
        """The elements of q, k and v behind all views."""
        return [[*sources(ref)][-1].ref for ref in (self.q, self.k, self.v)]

    def words(self) -> str:
        """What it is, for the report."""
        groups, heads = (product_of(v.size for v in digits) for digits in (self.groups, self.heads))
        kinds = []
        for each in self.intervals:
            width = next((w for low, high in each.pairs() if (w := high.minus(low).value) is not None), None)
            count = product_of(v.size for v in each.bound)
            kind = "ranges" if width is None else f"blocks of {width} keys" if width > 1 else "keys"
            kinds.append(f"{_words(count)} {kind}" if each.selects else "keys near the query")
        return f"{_words(groups)} groups of {_words(heads)} heads, {' and '.join(kinds)} a query; {self.rows.value}"


def _words(size: Size) -> str:
    return "*".join([*([str(size.factor)] if size.factor != 1 or not size.symbols else []), *size.symbols])
