# SPDX-License-Identifier: Apache-2.0
"""Selection attention as an operator of the routing pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, fx

from mhc_inductor.routing.edit import Edit
from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match, Miss
from mhc_inductor.routing.masks.index_checks import picked_size
from mhc_inductor.routing.masks.keys import Given, elements_of
from mhc_inductor.routing.operators.kernels import kernels_of
from mhc_inductor.routing.operators.selection.emit import emit_attention, inputs_of
from mhc_inductor.routing.operators.selection.fills import Rows
from mhc_inductor.routing.operators.selection.intervals import Interval
from mhc_inductor.routing.operators.selection.matches import OP, Found
from mhc_inductor.routing.operators.selection.search import Search, data_of

_NEAR = 64


class SelectionOperator:
    """Finds attentions whose masks are unions of key ranges and replaces them with ``selection_attention``."""

    name = "selection"

    def __init__(self) -> None:
        self._found: dict[fx.Node, list[Match | Miss]] = {}

    def candidates(self, view: View) -> Iterable[fx.Node]:
        """Returns the result nodes of the attentions found, and the nodes of near misses."""
        search = Search(view)
        self._found = {}
        for one in search.found:
            match = Match(OP, inputs_of(one), one.results, one.words(), data=one, sample=Sample(one))
            self._keep(one.out, match)
        for miss in search.misses:
            self._keep(miss.start, miss)
        return list(self._found)

    def _keep(self, value: Value | None, what: Match | Miss) -> None:
        if value is not None and value.node is not None:
            self._found.setdefault(value.node, []).append(what)

    def match(self, view: View, node: fx.Node) -> list[Match | Miss]:
        """Returns the matches and near misses found at a candidate."""
        return self._found[node]

    def emit(self, edit: Edit, match: Match) -> Iterable[tuple[Value, fx.Node]]:
        """Emits the op in place of an attention. Returns each replaced output with its new node."""
        outputs = emit_attention(edit, match.data)
        match.detail = match.data.words()  # now with both figures of the rule that chose the op
        match.derived = _derived(match.data)
        return outputs

    def faster_as_written(self, match: Match, device: str) -> bool:
        """Returns True on a CPU, where the op builds its mask anew, unless the user asked for zeros in rows without keys."""
        return device == "cpu" and not match.data.opted

    def kernels(self, op: str, device: str) -> tuple[str, ...]:
        """Returns the names of the kernels on a GPU; elsewhere a description of the reference formula."""
        return kernels_of(op, device)


def _derived(one: Found) -> list[Value]:
    """Returns the masks, and the indices of repeated keys, that the model computes from others of the op's inputs."""
    if one.read is None or one.whole:
        return []
    masks = [] if one.opted else [x.ref.value for x in one.layers]
    indices = dict.fromkeys(ref.value for ref in data_of(one)) if one.gathered else {}
    nodes = {value.node for value in indices}
    made = [value for value in indices if not nodes.isdisjoint(_above(value.node))]
    return [*masks, *made]


def _above(node: fx.Node | None) -> set[fx.Node]:
    """Returns the nearest nodes that a node is computed from, without itself."""
    found, todo = set[fx.Node](), [] if node is None else [node]
    while todo and len(found) < _NEAR:
        todo += (new := [a for a in todo.pop(0).all_input_nodes if a not in found])
        found.update(new)
    return found


# --- sample data for verification: random picks of keys at which no op that reads them raises ---


@dataclasses.dataclass
class _Role:
    """How a tensor determines which keys a query sees.

    ``starts``, ``ends``: it holds starts or ends of ranges. ``pick``: the dims that count the picks of a query.
    ``pair``: the dim that holds start and end. ``want``: the truth value that a condition expects of it. ``most``: how
    many values it may have; the number of keys limits it, too.
    """

    starts: bool = False
    ends: bool = False
    pick: set[int] = dataclasses.field(default_factory=set)
    pair: int | None = None
    want: bool | None = None
    most: float = math.inf


_PACKED = 7
"""Tokens a sequence in sample data for packed sequences."""


class Sample:
    """Makes the tensors that determine which keys a query sees, such that each query sees at least one.

    In every second case some queries may see none, if that is possible and the op gives what the formula gives there.
    """

    def __init__(self, one: Found) -> None:
        widths = [w for i in one.intervals for low, high in i.pairs() if (w := high.minus(low).value) is not None]
        self.keys = 0 if one.t.size.symbols else one.t.size.factor
        self.most = max(1, self.keys // max([1, *widths]))
        self.empty = one.rows is not Rows.SEEN and not one.opted
        self.keyed = {ref.value.node for each in one.intervals for ref in elements_of(*each.keyed)}
        self.packed = {value.node: what for value, what in one.masks.packed.items()}
        self.roles: dict[fx.Node | None, _Role] = {}
        for each in one.intervals:
            self._learn(each)
        for check in filter(None, one.masks.indices.found.values()):  # what the model's own call refuses says nothing
            for datum in (d for d in check.index.data() if not check.size.symbols and check.index.coefficient(d) == 1):
                role = self.roles.setdefault(datum.ref.value.node, _Role())
                role.most = min(role.most, check.size.factor - check.index.offset)
        if one.opted:  # the formula gives something else in rows without keys
            self.roles |= {x.ref.value.node: _Role(want=x.shows) for x in one.layers}

    def _learn(self, each: Interval) -> None:
        for low in each.lowers:
            for datum in low.data():
                role = self._role(datum.ref, each)
                role.starts = True
                size = picked_size(datum.ref.value)
                if size is not None and not size.symbols:  # ops that read the positions before the keys see them
                    role.most = min(role.most, size.factor)
                if self.keys and not any(symbols for symbols, _ in low.constant) and low.coefficient(datum) > 0:
                    role.most = min(role.most, (self.keys - low.offset) // low.coefficient(datum))
        for ref in elements_of(*each.uppers):
            self._role(ref, each).ends = True
        for condition in each.conditions:
            if isinstance(condition, Given):
                self._role(condition.ref, each).want = condition.want

    def _role(self, ref: Ref, each: Interval) -> _Role:
        role = self.roles.setdefault(ref.value.node, _Role())
        for d, index in enumerate(ref.index):
            if any(v in index.terms for v in each.bound):
                role.pick.add(d)
            elif index.constant is not None and ref.value.shape[d].factor == 2 and not ref.value.shape[d].symbols:
                role.pair = d
        return role

    def __call__(
        self,
        value: Value,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        generator: torch.Generator,
        case: int,
    ) -> Tensor | None:
        """Returns data for a tensor that picks keys, or None, for the default data, for q, k and v."""
        if dtype.is_floating_point:
            return None
        if value.node in self.packed:
            d, segments = self.packed[value.node]
            place = torch.arange(shape[d], device=device, dtype=dtype).view(-1, *[1] * (len(shape) - d - 1))
            return (place // _PACKED if segments else place % _PACKED).expand(shape).contiguous()
        if value.node in self.keyed and value.node not in self.roles:
            return None
        role, empty = self.roles.get(value.node, _Role()), case % 2 == 1 and self.empty

        def first(made: Tensor, without: int | None = None) -> Tensor:
            return made if empty else _first(made, role.pick, without)

        if dtype is torch.bool:
            return None if empty or role.want is None else torch.full(shape, role.want, device=device)
        most = int(max(1, min(self.most, role.most)))
        made = torch.randint(0, most, shape, dtype=dtype, device=device, generator=generator)
        if role.starts and role.ends and role.pair is not None:
            low, high = made.sort(role.pair).values.unbind(role.pair)
            return torch.stack([first(low, role.pair), high + 1], role.pair)
        if role.starts and not role.ends:
            return first(made // 2)
        if role.ends and not role.starts:
            return most - made // 2
        return first(made)


def _first(made: Tensor, pick: set[int], without: int | None = None) -> Tensor:
    """Returns ``made`` with the first pick of every query set to 0, which a causal query sees too."""
    dims: Sequence[int] = [d - (without is not None and d > without) for d in pick]
    if not dims:
        return torch.zeros_like(made)
    for d in dims:
        made.select(d, 0).zero_()
    return made
