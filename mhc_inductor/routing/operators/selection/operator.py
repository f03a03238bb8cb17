"""Selection attention as an operator of the pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from mhc_inductor.routing.edit import Edit
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.operator import Match, Miss
from mhc_inductor.routing.operators.kernels import kernels_of
from mhc_inductor.routing.operators.selection.attention import OP, Found
from mhc_inductor.routing.operators.selection.emit import emit_attention, inputs_of
from mhc_inductor.routing.operators.selection.search import Search


class SelectionOperator:
    """Finds attentions whose masks are unions of key ranges, and puts ``selection_attention`` in their place."""

    name = "selection"

    def __init__(self) -> None:
        self._found: dict[fx.Node, list[Match | Miss]] = {}

    def candidates(self, view: View) -> Iterable[fx.Node]:
        """Returns the nodes of attentions and of what comes close to one."""
        search = Search(view)
        self._found = {}
        for one in search.found:
            match = Match(OP, inputs_of(one), [one.out], one.words(), data=one, sample=_Sample(one))
            self._keep(one.out, match)
        for miss in search.misses:
            self._keep(miss.start, miss)
        return list(self._found)

    def _keep(self, value: Value | None, what: Match | Miss) -> None:
        if value is not None and value.node is not None:
            self._found.setdefault(value.node, []).append(what)

    def match(self, view: View, node: fx.Node) -> list[Match | Miss]:
        """Returns what is at a candidate."""
        return self._found[node]

    def emit(self, edit: Edit, match: Match) -> Iterable[tuple[Value, fx.Node]]:
        """Puts the op in the place of an attention."""
        return emit_attention(edit, match.data)

    def kernels(self, op: str, device: str) -> tuple[str, ...]:
        """Returns the kernels on a GPU, elsewhere a word for the formula."""
        return kernels_of(op, device)


class _Sample:
    """Random picks of keys: within the keys, so that nothing that reads them raises."""

    def __init__(self, one: Found) -> None:
        widths = [w for i in one.intervals for low, high in i.pairs() if (w := high.minus(low).value) is not None]
        symbols = one.t.size.symbols
        self.most = max(1, one.t.size.factor // max([1, *widths])) if not symbols else 1

    def __call__(
        self,
        value: Value,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        generator: torch.Generator,
        case: int,
    ) -> torch.Tensor | None:
        if dtype.is_floating_point or dtype is torch.bool:
            return None
        return torch.randint(0, self.most, shape, dtype=dtype, device=device, generator=generator)
