# SPDX-License-Identifier: Apache-2.0
"""Finds what hides scores of a softmax, whatever lies between the products of q and k and the softmax.

Also finds softmaxes that are not routed, so that they do not stay silently: they are written out as exp(scores) over a sum, or
their scores pass through something that routing cannot follow.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from mhc_inductor.routing.graph.expressions import aten, whole
from mhc_inductor.routing.graph.index import ONE, DynamicWidth, Size, Unsupported
from mhc_inductor.routing.graph.values import LOOKED_AT, OUTSIDE, Value, behind, inner, name_of, values_in
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.additive import SOURCES, PossibleValues
from mhc_inductor.routing.masks.elements import ADD, SHOWN, SUB, constant_of
from mhc_inductor.routing.masks.masks import Masks
from mhc_inductor.routing.masks.operands import Scaled, dot, has_product, is_parameter, projects
from mhc_inductor.routing.masks.scatters import GATHERS
from mhc_inductor.routing.operators.selection.scores import at_key
from mhc_inductor.routing.operators.selection.weights import REACH, Weights, Written

LOGS = (aten.logsumexp.default, aten._log_softmax.default)
CHOICES = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.kthvalue.default)
MAXIMA = (aten.amax.default, aten.max.dim, *LOGS)
_ENDS = {*MAXIMA, aten._softmax.default, aten._safe_softmax.default, aten.topk.default, aten.sort.default}
"""Ops whose results are no scores: what stands above them is another formula."""
_NAMES = ("exp", "exp_", "exp2", "exp2_", "special_exp2", "expm1", "special_expm1", "pow")
_POWERS = {aten.exp.default: 0, aten.exp2.default: 0, aten.expm1.default: 0, aten.pow.Scalar: 1}
"""Exponential ops, and which argument is the exponent."""
_SUMS = (aten.sum.dim_IntList, aten.mean.dim, aten.linalg_vector_norm.default)

ORDINARY = "the mask depends on positions or padding alone (causal, sliding, documents), not on selected keys: left to torch.compile"
LEARNED = "a tensor that is trained is added to the scores; expected masks, whose values are 0 or at most -1e4"
OPAQUE = (
    "the mask comes from a tensor whose contents routing cannot see (an argument, a buffer, what another op or graph "
    "returns), and which may have an element for each query and key; expected a mask that is computed in the same graph "
    "from starts and ends, blocks or indices of keys"
)


def selecting(given: Iterable[Value], masks: Masks) -> list[Value]:
    """Returns the masks whose visible keys are known to depend on tensor values, each evaluated on its own."""
    for value in given:
        ref = at_key(value, -1) if value.shape else whole(value)
        with contextlib.suppress(Unsupported, Mismatch, DynamicWidth):
            _ = masks.truth(ref) if value.dtype is torch.bool else masks.additive(ref)
    return [*masks.seen]


def unknown(view: View, masks: Iterable[Value], scores: Sequence[Size]) -> tuple[str, Value | None]:
    """Returns why masks of scores of this shape are not known to be ordinary, and the tensor that they come from.

    The reason is :data:`ORDINARY` if they are computed from positions and from a number or a flag for each token, and
    :data:`LEARNED` if the others are trained, and so are no masks.
    """
    found: tuple[str, Value | None] = ORDINARY, None
    for mask in masks:
        origin = _origin(mask, scores, view.values.sizes)
        if origin is None:
            continue
        trained = mask.dtype.is_floating_point and mask.node is not None and view.flows(mask.node)
        if not trained and not is_parameter(origin):
            return OPAQUE, origin
        found = LEARNED, origin
    return found


def _origin(mask: Value, scores: Sequence[Size], sizes: Mapping[str, int]) -> Value | None:
    """Returns the nearest tensor behind a mask that may say for each query which keys it sees, None without one."""
    for met, at in enumerate(behind(mask), 1):
        random = torch.Tag.nondeterministic_seeded in getattr(at.func, "tags", ())
        if random or met == LOOKED_AT or (at.func in (None, OUTSIDE) and not _per_token(at, scores, sizes)):
            return at
    return None


def _per_token(value: Value, scores: Sequence[Size], sizes: Mapping[str, int]) -> bool:
    """Checks whether a tensor holds at most a number for each token of each sequence: positions, padding, documents."""
    own = scores[1:] if len(scores) > 2 else scores
    longest = sorted(own, key=lambda s: s.factor * math.prod(sizes.get(x, 1) for x in s.symbols))[-2:]
    *lead, last = value.shape or (ONE,)
    if len(lead) > 1 or (lead and lead[0] in longest and lead[0] != ONE):
        return False
    one_query = ONE in own[:-1] and last in longest and value.shape
    return not one_query or not (value.dtype is torch.bool or value.dtype.is_floating_point)


def gathered(keys: Value) -> Value | None:
    """Returns the gather, at places that tensors hold, that keys or values [..., keys, D] come from; None without one."""
    at = Scaled(whole(keys)).end.value
    places = at.args[1:] if at.func in (*GATHERS, aten.embedding.default) else ()
    return at if any(_from_data(place) for place in values_in(places)) else None


def _from_data(value: Value) -> bool:
    """Checks whether integers are a choice, or are given for each sequence, query and key: no beams, no pages."""

    def chosen(at: Value) -> bool:
        given = at.func is None and not at.dtype.is_floating_point
        return at.func in CHOICES or (given and min(map(_rank, (at, value))) > 2)

    return any(map(chosen, behind(value)))


def _rank(value: Value) -> int:
    """Returns the number of dims, without those of size 1."""
    return sum(size != ONE for size in value.shape)


class Masked:
    """What hides some of the scores that a softmax is taken of.

    ``masks``: the tensors that do, ``guards`` on the weights among them. ``hidden``: whether anything does. ``gathered``: the
    gather that the keys come from, None without one.
    """

    def __init__(self, view: View, scores: Value, guards: Iterable[Value] = ()) -> None:
        self.view = view
        self.scores = scores
        self.masks: dict[Value, None] = dict.fromkeys(guards)
        self.hidden = bool(self.masks)
        self.gathered: Value | None = None
        self._possible = PossibleValues()
        self._known: dict[Value, bool] = {}
        self.hidden = self._has_products(scores) and self.hidden

    @property
    def followed(self) -> set[Value]:
        """Returns the scores, and all that they are made of up to the products."""
        return {self.scores, *(value for value, has in self._known.items() if has)}

    @property
    def ordinary(self) -> bool:
        """Checks whether all masks are known to be none of selected keys, and no keys are gathered."""
        if self.gathered is not None:
            return False
        masks = Masks(self.view.values.fixed, self.view.values.hints)
        return not selecting(self.masks, masks) and unknown(self.view, self.masks, self.scores.shape)[0] is not OPAQUE

    def _sources(self, at: Value) -> list[object]:
        """Returns what the elements of a value are taken from, numbers included."""
        if at.func is None:
            return [a for a in (given(self.view, at),) if a is not None]
        return [*SOURCES[at.func](at)] if at.func in SOURCES else [*values_in(at.args)]

    def _has_products(self, at: Value) -> bool:
        """Returns whether products of q and k are behind a value, and takes in what hides some of them."""
        if at in self._known or len(self._known) >= LOOKED_AT:
            return self._known.get(at, False)
        self._known[at] = False
        if at.func in _ENDS or not at.dtype.is_floating_point:
            return False
        product = dot(whole(at))
        if product is not None:
            self._known[at] = not any(projects(x.value) for x in product[:2])
            self.gathered = self.gathered or next(filter(None, (gathered(x.value) for x in product[:2])), None)
            return self._known[at]
        sources = self._sources(at)
        scores = [a for a in sources if isinstance(a, Value) and self._has_products(a)]
        self._known[at] = bool(scores)
        if scores and any(self._hides(a, at) for a in sources if a not in scores):
            self.hidden = True
            self.masks.update(dict.fromkeys(a for a in values_in(at.args) if a not in scores))
        return self._known[at]

    def _hides(self, a: object, at: Value) -> bool:
        """Checks whether an operand next to scores lowers or replaces some of them."""
        with contextlib.suppress(Unsupported):
            return max(map(abs, self._possible(a)), default=0.0) >= 1e4
        # A tensor of unknown contents is a mask if it varies with the query, which K does not, and with the key.
        return at.func in (*ADD, *SUB) and isinstance(a, Value) and ONE not in (ONE, *a.shape)[-2:]


def given(view: View, result: Value) -> Value | None:
    """Returns the argument, of the result's shape, of the call that made a tensor or a tuple with it; else None.

    Routing cannot see through such a call: a hook, or a step in place.
    """
    call = result.node
    if call is not None and call.target is operator.getitem:
        call = call.all_input_nodes[0]
    values = map(view.value, call.all_input_nodes) if call is not None else ()
    return next((v for v in values if v is not None and v.shape == result.shape), None)


# --- softmaxes that are not routed ---


def is_power(node: fx.Node) -> bool:
    """Checks whether a node could be the exponential of a softmax."""
    return node.op in ("call_function", "call_method") and name_of(node) in _NAMES


def is_log(node: fx.Node) -> bool:
    """Checks whether a node is a log_softmax or a logsumexp."""
    return node.op in ("call_function", "call_method") and name_of(node) in ("log_softmax", "logsumexp")


def logged(view: View, node: fx.Node) -> Value | None:
    """Returns the scores of which a node takes the logarithm of a softmax or of its sum."""
    top = _maximum(view.value(node))
    return top.args[0] if top is not None and top.func in LOGS else None


def masked_softmax(view: View, node: fx.Node) -> Masked | None:
    """Returns what hides scores in the softmax whose exponential is ``node``.

    Returns None if the node is not part of a softmax.
    """
    value = view.value(node)
    if value is None or value.func not in _POWERS or not value.shape:
        return None
    exponent, weights = value.args[_POWERS[value.func]], Weights(view, Written(value, node, value))
    top = _maximum(exponent)
    if not (top is not None and top.func in LOGS) and not _is_summed(view, weights):
        return None
    return Masked(view, exponent, [g.mask for g in weights.known.values() if g.mask is not None])


def _maximum(value: object) -> Value | None:
    """Returns the maximum, or logarithm of a sum, that ``value`` is computed from element by element; else None."""
    near = (
        behind(value, passed=lambda at: at.func is None or dot(whole(at)) is None) if isinstance(value, Value) else ()
    )
    return next((at for at in itertools.islice(near, REACH) if at.func in MAXIMA), None)


def _is_summed(view: View, weights: Weights) -> bool:
    """Checks whether anything takes the sum of the exponentials."""
    users = {user for value in weights.same if value.node is not None for user in value.node.users if user in view.live}
    return any(_sums(value, weights) for user in users if (value := view.value(user)) is not None)


def _sums(value: Value, weights: Weights) -> bool:
    """Checks whether one call, seen as the ops that it consists of, takes the sum of the exponentials."""
    for at in itertools.islice(inner(value), REACH):
        of = at.args[0] if at.func in _SUMS else None
        while isinstance(of, Value) and of not in weights.same and (of.func is aten.abs.default or of.func in SHOWN):
            of = of.args[0]
        if of in weights.same:
            return True
    return False


def by_choice(masks: Iterable[Value]) -> Value | None:
    """Returns the first mask that is computed from values that a topk or sort returns; None without one."""
    return next((m for m in masks if any(at.func in CHOICES and at.out == 0 for at in behind(m))), None)


def picked_scores(scores: Value) -> Value | None:
    """Returns the gather or scatter by which a softmax gets some scores of all that were computed; None without one."""
    at = Scaled(whole(scores)).end.value if scores.shape else scores
    if at.func is aten.scatter.src:
        fill = constant_of(at.args[0])
        return at if fill is not None and fill <= -1e4 and has_product(at.args[3]) else None
    picks = at.func is aten.gather.default or (at.func is aten.topk.default and at.out == 0)
    return at if picks and has_product(at.args[0]) else None
