# SPDX-License-Identifier: Apache-2.0
"""The result of recognising the choice of an indexer."""

from __future__ import annotations

import dataclasses
from typing import Any

from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import ONE, Size, Unsupported, Var, present_size, product_of, words_of
from mhc_inductor.routing.graph.linear import variables_of
from mhc_inductor.routing.graph.values import Value, Values
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.elements import uncast
from mhc_inductor.routing.masks.layouts import best
from mhc_inductor.routing.masks.operands import Source, sources
from mhc_inductor.routing.operators.index.formula import NEAR, Formula
from mhc_inductor.routing.operators.index.profit import Sizes
from mhc_inductor.routing.operators.index.visible import Visible

OP, SCORES, PICKS = "index_topk", "index_scores", "index_topk_scores"


@dataclasses.dataclass
class Found:
    """A recognised choice of keys, or scores of all keys.

    ``scores``: the tensor that ``topk`` reads. ``outs``: the indices, and the values if they are used; or the scores.
    ``dims``: the variable of each dim of ``outs``; the last dim of indices counts the chosen keys. ``count``: the
    argument k of ``topk``. ``q``, ``k``, ``weights``: the tensors that are read. ``ranked``: whether the indices must
    come by falling score.
    """

    formula: Formula
    scores: Value
    outs: list[Value]
    dims: list[Var]
    count: Any
    batch: list[Var]
    query: list[Var]
    visible: Visible
    q: Source
    k: Source
    weights: list[Source]
    ranked: bool = False

    @property
    def chooses(self) -> bool:
        """Returns whether these are chosen keys, not scores of all keys."""
        return self.outs != [self.scores]

    @property
    def marked(self) -> bool:
        """Returns whether the values of ``topk`` are used, too."""
        return self.chooses and not all(v.out for v in self.outs)

    @property
    def refs(self) -> list[Ref]:
        """Returns the elements of tensors that the op reads."""
        read = [*(s.ref for s in (self.q, self.k, *self.weights)), *(m.ref for m in self.visible.masks)]
        return [*read, *self.visible.data()]

    def values(self) -> list[Value]:
        """Returns the tensors that the op reads."""
        return list(dict.fromkeys(ref.value for ref in self.refs))

    def sizes(self, values: Values) -> Sizes:
        """Returns the present sizes, with 4096 for a symbol that has none."""

        def now(size: Size) -> int:
            return present_size(size, values.hints)

        formula = self.formula
        rows, heads, width = (
            now(product_of(v.size for v in digits))
            for digits in ((*self.batch, *self.query), formula.heads, formula.feature)
        )
        topk = now(self.outs[0].shape[-1]) if self.chooses else 0
        return Sizes(self.q.dtype, rows, now(formula.t.size), heads, width, topk)

    def words(self) -> str:
        """Returns a description for the report."""
        heads = words_of(product_of(v.size for v in self.formula.heads))
        if not self.chooses:
            return f"{heads} heads, {words_of(self.formula.t.size)} keys; masks and topk stay"
        return f"{heads} heads, {words_of(self.outs[0].shape[-1])} of {words_of(self.formula.t.size)} keys, {self.visible.words()}"


def roles(formula: Formula, lead: list[Var]) -> tuple[list[Var], list[Var]]:
    """Returns the variables of the batch and of the queries. Raises Mismatch where q, k or w have others."""
    in_k, in_q = (variables_of(uncast(ref)) for ref in (formula.k, formula.q))
    rows = [v for v in lead if v.size != ONE]
    batch = [v for v in rows if v in in_k]
    query = [v for v in rows if v not in in_k]
    heads = set(formula.heads)
    if in_k & heads or (batch and not query and len(rows) > 1):
        raise Mismatch(NEAR["keys"], formula.k.value)
    known = {*rows, *heads}
    if not in_q - set(formula.feature) <= known or not in_k - set(formula.feature) <= {*batch, formula.t}:
        raise Unsupported
    if any(not variables_of(uncast(w)) <= known for w in formula.weights):
        raise Unsupported
    return batch, query


def operands(formula: Formula, batch: list[Var], query: list[Var]) -> tuple[Source, Source, list[Source]]:
    """Returns the tensors from which q, k and the factors of w are read. Raises Mismatch."""
    rows = [*batch, *query, *formula.heads]
    q = _source(formula.q, [*rows, *formula.feature], "q")
    k = _source(formula.k, [*batch, formula.t, *formula.feature], "k")
    return q, k, [_source(w, rows, "w") for w in formula.weights]


def _source(ref: Ref, order: list[Var], name: str) -> Source:
    found = best(ref, order)
    if found is None or not all(s.ref.value.dtype.is_floating_point for s in sources(ref)):
        raise Mismatch(f"{name} cannot be followed through its views", ref.value)
    return found
