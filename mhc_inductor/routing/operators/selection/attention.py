# SPDX-License-Identifier: Apache-2.0
"""Recognises one attention, softmax(scale * q @ k.T) @ v over a union of key ranges, in normal form.

It starts at a softmax; see :mod:`.written_out` for those of calls. See :mod:`.keys` for the normal form of masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mhc_inductor.routing.graph.expressions import Ref, aten, peel
from mhc_inductor.routing.graph.index import ONE, DynamicWidth, Index, Part, Size, Unsupported, Var, const, var
from mhc_inductor.routing.graph.linear import Key, atom, placed, replaced, variables_of
from mhc_inductor.routing.graph.values import Value, Values
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.keys import AnyOf, alike, both
from mhc_inductor.routing.masks.masks import Masks
from mhc_inductor.routing.masks.operands import Pair, Scaled, dot
from mhc_inductor.routing.operators.selection.data_masks import Layers
from mhc_inductor.routing.operators.selection.digits import Cut, assign_roles, cut_at, digits_of, joined, splits
from mhc_inductor.routing.operators.selection.fills import Rows, seen_by_all
from mhc_inductor.routing.operators.selection.masked import selecting
from mhc_inductor.routing.operators.selection.matches import Found, NotOurs
from mhc_inductor.routing.operators.selection.picks import Picks, is_gathered
from mhc_inductor.routing.operators.selection.scores import Scores
from mhc_inductor.routing.operators.selection.segments import asks, pairs_of, products_of
from mhc_inductor.routing.operators.selection.weights import Traced, Weights

_BARE = (
    "a query may see no key, where the sink is not counted in the maximum that its exponential is taken less; expected "
    "torch.maximum(scores.amax(-1, keepdim=True), sink)"
)


class Recogniser:
    """Recognises the attention of one softmax.

    ``zero_rows``: the user asked for zeros in rows without keys. ``by_key``: the mask is to become lists of keys, so
    its conditions may read tensors at the key. ``data``: the op is to read the masks as data. ``gathered``: so, and K and V
    are gathered: the op is to gather them, and to count every place of the list.
    """

    def __init__(
        self,
        values: Values,
        zero_rows: bool = False,
        by_key: bool = False,
        gathered: bool = False,
        data: bool = False,
    ) -> None:
        self.values = values
        self.data = data or gathered
        self.zero_rows = zero_rows
        self.by_key = by_key
        self.gathered = gathered
        self.gathers = False
        """Whether the values that the weights meet are gathered."""
        self.differs = False
        """Whether the search found a difference to a selection, not only something that it cannot follow."""
        self._made: list[Masks] = []
        self._cuts: list[Size] = []
        self._places: list[Var] = []
        """Where the place in a gathered list is split, and its digits."""
        self.given: list[Value] = []
        """The masks of the scores examined last."""
        self._shapes: list[tuple[Size, ...]] = []

    def narrow(self, batch: bool) -> set[str]:
        """Returns the symbols in the sizes of heads, groups and features, and of the batch if ``batch``.

        The symbols in the number of keys and in the longest other dim of the scores (the queries) are left out.
        """
        if not self._shapes:
            return set()
        now = self.values.hints
        *rows, keys = self._shapes[0]
        longest = max(rows, key=lambda s: s.factor * math.prod(now.get(x, 1) for x in s.symbols), default=keys)
        wide = {*keys.symbols, *longest.symbols, *(() if batch or len(rows) < 2 else rows[0].symbols)}
        return {x for shape in self._shapes for size in shape for x in size.symbols if x in now} - wide

    def _masks(self) -> Masks:
        """Returns a new evaluator of masks, and keeps it for :attr:`close`."""
        self._made.append(Masks(self.values.fixed, self.values.hints, self.by_key or self.data))
        return self._made[-1]

    @property
    def close(self) -> list[Value]:
        """Returns the masks whose visible keys depend on tensor values, not only on positions.

        If no evaluation so far met one, evaluates the masks given on their own.
        """
        found = [value for masks in self._made for value in masks.seen]
        return found or selecting(self.given, self._masks())

    @property
    def shape(self) -> tuple[Size, ...]:
        """Returns the shape of the scores examined last, keys last; empty if it is not known."""
        return self._shapes[0] if self._shapes else ()

    def written(self, weights: Weights) -> Found:
        """Returns the attention in which a softmax's weights are multiplied by V.

        Raises NotOurs, Mismatch, Unsupported and DynamicWidth.
        """
        softmax, (out,) = weights.softmax, weights.outs
        self._shapes = [_keys_last(softmax), out.shape]
        return self._refined(lambda dims: self._weighed(weights, out, dims), out)

    def _weighed(self, weights: Weights, out: Value, dims: list[list[Var]]) -> Found:
        """Builds the attention of a softmax, with the digits ``dims`` of its product ``out`` with V."""
        softmax = weights.softmax
        parts = weights.parts(Ref(out, tuple(joined(digits) for digits in dims)))
        traced, v, t = products_of([_side(weights, part) for part in parts], _dim_of(softmax))
        masks, dense = self._masks(), [*weights.same, *weights.added]
        self.gathers, picks, places = is_gathered(v, [t]), None, [t]
        if self.gathered:
            self._places = places = digits_of(t.size, self._cuts)
            traced, v = traced.at(t, joined(places)), placed(v, t, joined(places))
            picks = Picks(masks, places)
        self.given = [] if weights.call is None or weights.call.mask is None else [weights.call.mask]
        layers = Layers(masks, self.gathered) if self.data else None
        scores = Scores(Ref(softmax.args[0], traced.ref.index), masks, dense, self.given, layers=layers)
        if picks is not None and scores.segments:
            raise NotOurs
        if scores.sink is None and t.size != softmax.shape[_dim_of(softmax)]:
            raise NotOurs("the weights of some keys are cut off before the product with V", out)
        self._shapes = [
            _keys_last(softmax),
            *(x.value.shape for _, *sides, _ in scores.products for x in sides),
            v.value.shape,
        ]
        pairs, factor = _paired(scores, v, places)
        if picks is not None:
            v = picks.below(v)
            pairs = [Pair(p.q, picks.below(p.k), p.d) for p in pairs]
        scores.fills.no_nan = traced.no_nan
        scores.fills.safe, scores.fills.bare = softmax.func is aten._safe_softmax.default, weights.bare
        scores.fills.call = None if weights.call is None else weights.call.kernel

        def keys() -> AnyOf:
            total = scores.keys()
            shown = layers.filled_keys if layers and picks and traced.guards else total
            for ref, want in traced.guards:
                if not alike(masks.truth(ref, want), shown, t):
                    raise Mismatch(
                        "the attention weights are masked again, and not by the mask of the scores", ref.value
                    )
            scores.fills.guarded = bool(traced.guards)
            return total if picks is None else both(total, picks.keys)

        fills = scores.fills
        key = t if picks is None else picks.t
        assert isinstance(key, Key)
        found = Found(out, dims, pairs, v, key, factor, keys, dense, masks, fills, sink=scores.sink)
        found.gathered, found.read = picks is not None, layers
        found.logs = _logs(weights, scores, traced.ref.index)
        found.inner = None if picks is None else picks.inner
        return found

    # --- digits of the result's dims, and their roles ---

    def _refined(self, build: Callable[[list[list[Var]]], Found], out: Value) -> Found:
        """Returns the attention that ``build`` makes, with the result's dims split until whole digits index q, k and v.

        Also evaluates its mask, assigns the roles of the digits and sets what rows without keys give.
        """
        cuts: list[list[Size]] = [[] for _ in out.shape]
        for _ in range(6):
            dims = [digits_of(size, at) for size, at in zip(out.shape, cuts, strict=True)]
            try:
                found = build(dims)
            except Cut as cut:
                if not cut_at([*cuts, self._cuts], [*dims, self._places], cut.places):
                    raise Unsupported from None
                continue
            parts = [a for ref in found.deepest() for i in ref.index for a in i.atoms()]
            places = [place for a in parts if isinstance(a, Part) for place in splits(a)]
            if not places or not cut_at(cuts, dims, [([root], by) for root, by in places]):
                break
        found.keys = found.mask()
        assign_roles(found, self.values.sizes)
        found.fills.check(found.out)
        found.rows = self._rows(found)
        if found.rows is not Rows.SEEN and any(x.added or x.value > -math.inf for x in found.fills.found):
            # Rows without keys: the op's lse is -inf and has no gradient; that of scores with -inf added has NaN.
            found.dense += [ref.value for ref in found.logs]
            found.logs = []
        return found

    def _rows(self, found: Found) -> Rows:
        """Returns what a query without a visible key gives. Raises Mismatch if routing cannot reproduce it."""
        zero, bare = found.fills.zero, found.fills.bare
        if not bare and (zero is Rows.ZERO or found.sink is not None):
            return Rows.ZERO  # the sink takes all the weight: every fill that counts as a mask is far below it
        known = not found.gathered and all(x.exact for x in found.layers)
        if known and seen_by_all(found.keys, found.t, found.masks):
            return Rows.SEEN
        if self.zero_rows:
            found.opted = True
            return Rows.ZERO
        if bare and (zero or not found.gathered or any(x.value > -math.inf for x in found.fills.found)):
            raise Mismatch(_BARE, found.out)
        if zero is not None:
            return Rows.ZERO_MIXED if found.gathered else zero
        return found.fills.rows(found.out)


def _logs(weights: Weights, scores: Scores, index: Sequence[Index]) -> list[Ref]:
    """Returns the elements of logarithms of the scores' sum of exponentials, which the op's lse is. A sink is in none."""
    logits, dim = weights.softmax.args[0], _dim_of(weights.softmax)
    pieces = logits.args[0] if logits.func is aten.cat.default else ()
    parts = [logits] if scores.sink is None else [x for x in pieces if x.shape[dim] != ONE]
    found = weights.logs(parts[0]) if len(parts) == 1 else []
    if scores.shifted:
        scores.dense += found
        return []
    rest = tuple(index[:dim]), tuple(index[dim + 1 :])
    return [Ref(x, (*rest[0], *[const(0)] * (len(x.shape) - len(index) + 1), *rest[1])) for x in found]


def _paired(scores: Scores, v: Ref, t: Sequence[Var], like: Sequence[Pair] = ()) -> tuple[list[Pair], float]:
    """Returns q and k of each product that the scores are the sum of, and the factor of all of them.

    ``t``: the digits of the key, or of the place in a list. ``like``: those of other keys, which tell q from a single key.
    Raises NotOurs for other products, and for products that one product of concatenated vectors cannot replace.
    """
    if scores.segments:
        made_of: dict[Scores, tuple[list[Pair], float]] = {}
        for _, each in sorted(zip(scores.spans, scores.segments, strict=True), key=lambda x: x[0] == ONE):
            made_of[each] = _paired(each, v, t, like)
            like = like or made_of[each][0]
        return pairs_of([made_of[each] for each in scores.segments], scores.spans, t[0])
    made: list[tuple[float, Pair]] = []
    for factor, *sides, bound in scores.products:
        if len(bound) != 1:
            raise NotOurs
        scaled = [Scaled(side, inputs=True) for side in sides]
        has = [not variables_of(x.end).isdisjoint(t) for x in scaled]
        if not any(has) and len(made) < len(like):
            has = [not asks(x.ref, bound[0], like[len(made)]) for x in scaled]
        if has[0] == has[1]:
            raise NotOurs
        q, k = scaled if has[1] else scaled[::-1]
        made.append((factor * q.factor * k.factor, Pair(q.ref, k.ref, bound[0])))
    if len(made) > 1:
        _check_sum(made, v, t, scores.ref.value)
    return [pair for _, pair in made], scores.factor * made[0][0]


def _check_sum(made: Sequence[tuple[float, Pair]], v: Ref, t: Sequence[Var], where: Value) -> None:
    """Raises NotOurs unless concatenated vectors give the sum of products, and no key is copied for every query."""
    for factor, pair in made:
        if pair.d.size.symbols:
            raise DynamicWidth(pair.d.size)
        if factor != made[0][0]:
            raise NotOurs(
                "the products that are added have different factors; expected scale * (q1 @ k1 + q2 @ k2)", where
            )
        if not variables_of(pair.k) <= {*variables_of(v), *t, pair.d}:
            raise NotOurs("keys of one of the products that are added differ where V does not", where)


def _side(weights: Weights, out: Ref) -> tuple[Traced, Ref, Var]:
    """Returns the softmax's element and V's in one of the products that are added, and the key of its own."""
    summed = dot(peel(out))
    if summed is None:
        raise NotOurs
    a, b, bound = summed
    first, second = weights.traced(a), weights.traced(b)
    if (first is None) == (second is None):
        raise NotOurs
    traced, v = (first, b) if first is not None else (second, a)
    assert traced is not None
    keys = [x for x in bound if x.size != ONE]
    if not keys:
        return traced, v, Key(ONE)
    over = traced.ref.index[_dim_of(weights.softmax)]
    if len(keys) != 1 or [(x, c) for x, c in over.terms.items() if x is not None] != [(keys[0], ONE)]:
        raise NotOurs
    old, t = keys[0], Key(keys[0].size)
    return traced.at(old, var(t)), replaced(v, old, atom(t)), t


def _dim_of(softmax: Value) -> int:
    """Returns the dim over which a softmax is taken."""
    dim: int = softmax.args[1] % max(1, len(softmax.shape))
    return dim


def _keys_last(softmax: Value) -> tuple[Size, ...]:
    """Returns the shape of the weights with the keys in the last dim."""
    dim, shape = _dim_of(softmax), softmax.shape
    return (*shape[:dim], *shape[dim + 1 :], shape[dim])
