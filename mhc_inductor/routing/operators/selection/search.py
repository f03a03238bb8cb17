# SPDX-License-Identifier: Apache-2.0
"""Finds the attentions of a graph whose visible keys depend on tensor values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from mhc_inductor.routing.graph.expressions import Ref, aten
from mhc_inductor.routing.graph.index import DynamicWidth, Unsupported, Var, may_fix
from mhc_inductor.routing.graph.values import Value, example, name_of, reached
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import DYNAMIC, Mismatch, Miss, contained
from mhc_inductor.routing.masks.keys import KeyData, elements_of
from mhc_inductor.routing.masks.layouts import best
from mhc_inductor.routing.masks.operands import Joined, held, sources
from mhc_inductor.routing.operators.selection.absorb import absorption
from mhc_inductor.routing.operators.selection.attention import Recogniser
from mhc_inductor.routing.operators.selection.masked import (
    OPAQUE,
    Masked,
    by_choice,
    is_log,
    is_power,
    logged,
    masked_softmax,
    picked_scores,
    unknown,
)
from mhc_inductor.routing.operators.selection.matches import OP, Found, NotOurs
from mhc_inductor.routing.operators.selection.profit import absorbs, list_refusal, reads_masks, sizes_of
from mhc_inductor.routing.operators.selection.scores import difference
from mhc_inductor.routing.operators.selection.weights import Weights, Written
from mhc_inductor.routing.operators.selection.written_out import called_softmax, written_softmax

_SOFTMAXES = (aten._softmax.default, aten._safe_softmax.default)
_OTHER = "the scores under the mask are not scale * q @ k alone; expected softmax(scale * q @ k + masks) @ V"
_USED = "the attention weights or scores are used elsewhere, too"
_HANDMADE = "the softmax of the masked scores is written out as exp(scores) / sum; expected torch.softmax(scores, -1)"
_LOGARITHM = "the logarithm of a softmax or of its sum is taken of masked scores; expected softmax(scores) @ V"
_RENORMALISED = (
    "the weights of a softmax over more keys are masked and divided by their sum again, which is 0 / 0 where hidden scores "
    "are far above the others; expected masks on the scores, before the softmax"
)
_GATHERED = (
    "the keys are gathered before their product with q; expected the product with all keys and a mask of the chosen "
    "ones, or a call of mhc_inductor.selection_attention with their indices"
)
_THRESHOLD = "the mask is computed from values that topk or sort returns; expected one computed from their indices"
_BY_KEY = "the mask also indexes a tensor by the key's position, or its heads are in another order than those of K"
_PICKED = (
    "the softmax is over scores that were chosen after the product with all keys; "
    "expected masks on scale * q @ k, made from indices"
)


def is_call(node: fx.Node) -> bool:
    """Checks whether a node is a call of scaled_dot_product_attention."""
    return node.op == "call_function" and name_of(node) == "scaled_dot_product_attention"


def is_softmax(node: fx.Node) -> bool:
    """Checks whether a node is a softmax or softmin of a tensor that could be scores."""
    name = name_of(node)
    if node.op not in ("call_function", "call_method") or "softm" not in name or "log" in name:
        return False
    t = example(node)
    return isinstance(t, torch.Tensor) and t.dim() >= 2


class Search:
    """Searches one graph.

    :attr:`found`: the attentions that can be routed. :attr:`misses`: the near misses.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.values = view.values
        self.zero_rows = view.knowledge.options.empty_rows == "zero"
        self.failed: list[Recogniser] = []
        self.reads = self.opaque = False
        """Whether masks may be read as data, and whether one is met that might be."""
        self.misses: list[Miss] = []
        self.found: list[Found] = []
        self.softmaxes = set[Value]()
        """The scores of the softmaxes examined."""
        self._written: dict[Value | None, Written] = {}
        self._said: tuple[str, Value | None] | None = None
        """Why the last softmax is none of ours, if its masks were not examined."""
        if any(is_call(node) or is_softmax(node) or is_power(node) or is_log(node) for node in view.nodes):
            self.found = self._unused(self._all())
            for one in self.found:
                self._take_classes(one)

    def _take_classes(self, one: Found) -> None:
        """Records range checks for the classes given to ``one_hot``.

        Its decomposition has no index, but the call raises for a class out of range.
        """
        for node in region_of(one):
            if name_of(node) == "one_hot":
                hot, classes = self.view.value(node), self.view.value(node.all_input_nodes[0])
                if hot is not None and classes is not None:
                    one.masks.indices.take(classes, hot.shape[-1], False, one.masks.whole)

    def _all(self) -> list[Found]:
        """Returns the attentions in the graph, before the check of uses elsewhere.

        Masks are read as data only where no attention is found otherwise, whatever sizes are fixed for it.
        """
        found = self._searched()
        if self.opaque:
            self.reads = True
            found = self._searched()
        return found

    def _searched(self) -> list[Found]:
        """Returns the attentions in the graph.

        Fixes dynamic sizes at their present values where the analysis needs that, and unfixes them if that finds
        nothing.
        """
        stages = iter((False, True))
        before = dict(self.values.fixed)
        while True:
            self.misses, self.failed = [], []
            try:
                found = self._attempt()
            except DynamicWidth as dynamic:
                if not self.values.fix(dynamic.size.symbols):
                    return []
                continue
            # If all sizes are dynamic, the number of heads often is what cannot be followed: fix it and retry.
            if found or not any(self.values.fix(self._open(batch)) for batch in stages):
                if not found:
                    self.values.forget(before)
                return found

    def _open(self, batch: bool) -> set[str]:
        """Returns the symbols that failed recognisers would fix."""
        return set().union(*(recogniser.narrow(batch) for recogniser in self.failed))

    def _attempt(self) -> list[Found]:
        found: list[Found] = []
        # A logarithm of the sum is a part of most softmaxes: those of other scores are looked at last.
        self.softmaxes = set()
        for node in sorted(self.view.nodes, key=is_log):
            if node in self.view.live:
                with contained(self.view, node):
                    try:
                        one = self._at(node)
                    except DynamicWidth:
                        if may_fix():
                            raise
                        one = self._miss(DYNAMIC, None, node)
                    if isinstance(one, Found):
                        found.append(one)
                    elif one is not None:
                        self.misses.append(one)
        return found

    def _at(self, node: fx.Node) -> Found | Miss | None:
        """Returns the attention at ``node``, a near miss if it resembles one, or None."""
        if is_softmax(node):
            value = self.view.value(node)
            return None if value is None or value.func not in _SOFTMAXES else self._softmax(Written(value, node, value))
        if is_power(node) or is_call(node):
            value, read = self.view.value(node), called_softmax if is_call(node) else written_softmax
            if value not in self._written and (written := read(self.view, node)) is not None:
                self._written[value] = written
            if value in self._written:
                return self._softmax(self._written[value])
            masked = None if is_call(node) else masked_softmax(self.view, node)
            return None if masked is None else self._unrouted(_HANDMADE, None, node, masked)
        if is_log(node) and (scores := logged(self.view, node)) is not None and scores not in self.softmaxes:
            return self._unrouted(_LOGARITHM, None, node, Masked(self.view, scores))
        return None

    def _unrouted(self, reason: str, value: Value | None, node: fx.Node, masked: Masked) -> Miss | None:
        """Returns a near miss for ``reason`` if some scores of the softmax at ``node`` are hidden."""
        self.softmaxes |= masked.followed
        if not masked.hidden:
            return None
        return self._miss(reason, value, node, masked.ordinary)

    def _miss(self, reason: str, value: Value | None, node: fx.Node, ordinary: bool = False) -> Miss:
        return Miss(OP, reason, value, self.view.value(node), ordinary)

    def _tried(self, weights: Weights, node: fx.Node) -> Found | Miss | None:
        """Returns the attention with the weights of the softmax at ``node``, or a near miss.

        Looks for ranges of keys first. If the formula does not contradict them, but they cannot be followed, looks for
        lists of keys whose conditions may read tensors at the key. Reports what the first search missed if the second
        finds nothing either.
        """
        recogniser = Recogniser(self.values, self.zero_rows)
        found = self._recognised(recogniser, weights, node)
        if isinstance(found, Found):
            return found
        slower = ""
        if not recogniser.differs:
            listed = self._recognised(Recogniser(self.values, self.zero_rows, by_key=True), weights, node)
            if isinstance(listed, Found):
                reason = left_to_dense(listed, self.values.sizes)
                if reason is None:
                    return listed
                slower = reason
        masked = Masked(self.view, weights.softmax.args[0])
        if masked.gathered is not None or recogniser.gathers:
            picked = self._recognised(Recogniser(self.values, self.zero_rows, gathered=True), weights, node)
            chosen = None if masked.gathered is None else self._miss(_GATHERED, masked.gathered, node)
            found = picked or chosen or found
        else:
            found = self._read(recogniser, weights, node, slower) or found
        if isinstance(found, Found):
            return found
        self.failed.append(recogniser)
        if found is not None:
            return found
        if slower:
            return self._miss(slower, None, node, ordinary=True)
        return self._masks(recogniser, masked, node) if recogniser.given else None

    def _masks(self, recogniser: Recogniser, masked: Masked, node: fx.Node) -> Miss:
        """Returns what is reported of an attention by what its masks are made of."""
        masks = dict.fromkeys([*recogniser.given, *masked.masks])
        close, chosen = recogniser.close, by_choice(masks)
        if chosen is not None or close:
            return self._miss(*((_OTHER, close[-1]) if chosen is None else (_THRESHOLD, chosen)), node)
        reason, origin = unknown(self.view, masks, recogniser.shape)
        return self._miss(reason, origin, node, ordinary=reason is not OPAQUE)

    def _read(self, failed: Recogniser, weights: Weights, node: fx.Node, slower: str) -> Found | Miss | None:
        """Returns the attention at ``node`` whose masks the op is to read as data.

        If it is not worth it, returns a near miss with the reason, unless ``slower`` says already that lists are slower.
        """
        if unknown(self.view, failed.given, failed.shape)[0] is not OPAQUE:
            return None
        self.opaque = True
        if not self.reads:
            return None
        found = self._recognised(Recogniser(self.values, self.zero_rows, data=True), weights, node)
        if not isinstance(found, Found) or found.out.node is None:
            return None
        sizes = sizes_of(found, self.values.sizes, example(found.out.node).device.type, found.v.value.dtype)
        reason = left_to_dense(found, self.values.sizes)
        if reason is None or reads_masks(sizes, found.sink is not None):
            return found
        return self._miss(reason, None, node) if reason and not slower else None

    def _recognised(self, recogniser: Recogniser, weights: Weights, node: fx.Node) -> Found | Miss | None:
        """Returns what is found at ``node``; else a near miss if it resembles a selection."""
        try:
            found = recogniser.written(weights)
            self._absorb(found)
            if found.absorbed is not None or all(
                best(ref, order, found.masks.equal) is not None for ref, order in orders(found)
            ):
                return found
            return self._miss("q, k or v cannot be followed through their views", found.out, node)
        except Mismatch as mismatch:
            recogniser.differs = True
            return self._miss(mismatch.reason, mismatch.value, node)
        except KeyData as data:
            if recogniser.close:
                return self._miss(_BY_KEY, data.value, node)
        except Unsupported:
            if (chosen := by_choice(recogniser.given)) is not None:
                return self._miss(_THRESHOLD, chosen, node)
            if recogniser.close:
                return self._miss("the mask is not a union of ranges of keys", recogniser.close[-1], node)
        except NotOurs as different:
            if different.reason and recogniser.close:
                return self._miss(different.reason, different.value, node)
            if different.reason:
                self._said = different.reason, different.value
        return None

    def _absorb(self, found: Found) -> None:
        """Sets how the op can read the latent that K and V are maps of, if lists are read and that is faster."""
        joined = any(isinstance(ref.value, Joined) for ref in found.refs)
        if found.entries is None or joined:
            return
        found.absorbed = absorption(self.view, found)
        if not absorbs(sizes_of(found, self.values.sizes, "cuda", found.v.value.dtype)):
            found.absorbed = None

    def _softmax(self, written: Written) -> Found | Miss | None:
        """Returns the attention with the weights of a softmax, or a near miss."""
        _, node, value, *_ = written
        logits = value.args[0]
        self.softmaxes |= {logits, *(logits.args[0] if logits.func is aten.cat.default else ())}
        self._said = None
        weights = Weights(self.view, written)
        if weights.renormalised is not None and weights.guards:
            masked = Masked(self.view, logits, weights.guards)
            return self._unrouted(_RENORMALISED, weights.renormalised, node, masked)
        found = self._tried(weights, node) if len(weights.outs) == 1 else None
        if isinstance(found, Found) and weights.dropped is not None:
            return self._miss("the attention weights are dropped out", weights.dropped, node)
        return self._unseen(node, logits, weights) if found is None else found

    def _unseen(self, node: fx.Node, scores: Value, weights: Weights) -> Miss | None:
        """Returns a near miss of a softmax whose scores or weights cannot be followed."""
        picked = picked_scores(scores)
        if picked is not None:
            return self._miss(_PICKED, picked, node)
        if not weights.over_keys:
            return None
        masked = Masked(self.view, scores)
        return self._unrouted(*(self._said or difference(scores, weights.softmax.args[1]) or weights.why), node, masked)

    # --- uses outside the attention ---

    def _unused(self, found: list[Found]) -> list[Found]:
        """Returns the attentions whose weights and scores are not used elsewhere. A mask may be.

        Adds a near miss for each of the others.
        """
        while True:
            regions = [region_of(one) for one in found]
            inside = set().union(*regions) if regions else set()
            kept = []
            for one, region in zip(found, regions, strict=True):
                one.logs = [ref for ref in one.logs if self._used([ref.value.node], region) is not None]
                dense = [v.node for v in one.dense if v.node in region and v is not one.out]
                where = self._used(dense, inside)
                if where is None:
                    kept.append(one)
                else:
                    self.misses.append(Miss(OP, _USED, self.view.value(where), one.out))
            if len(kept) == len(found):
                return kept
            found = kept

    def _used(self, nodes: Iterable[fx.Node | None], inside: set[fx.Node]) -> fx.Node | None:
        """Returns the first of ``nodes`` that a live node outside ``inside`` uses, or None."""
        for node in nodes:
            if node is not None and any(u not in inside and u in self.view.live for u in node.users):
                return node
        return None


def orders(one: Found) -> list[tuple[Ref, list[Var]]]:
    """Returns q and k of each pair, and v, each with its digits in order."""
    lead = [*one.batch, *one.groups]
    asked, held = [*lead, *one.query, *one.heads], [*lead, one.t]
    pairs = [each for p in one.pairs for each in ((p.q, [*asked, p.d]), (p.k, [*held, p.d]))]
    return [*pairs, (one.v, [*held, *one.feature])]


def data_of(one: Found) -> list[Ref]:
    """Returns the elements of tensors that determine which keys a query sees."""
    told = (x for each in one.intervals for x in (*each.lowers, *each.uppers, *each.conditions, *each.keyed))
    return list(dict.fromkeys([*(layer.ref for layer in one.layers), *elements_of(*told)]))


def left_to_dense(one: Found, hints: Mapping[str, int]) -> str | None:
    """Returns why dense attention stays, None if lists are read instead, "" if they leave out less than a quarter of the keys.

    Lists that are held in tensors and are slower than dense attention are reported later, when the op is emitted.
    """
    assert one.out.node is not None
    sizes = sizes_of(one, hints, example(one.out.node).device.type, one.v.value.dtype)
    if one.gathered:
        return None
    if sizes.crowded:
        return ""
    return None if any(each.selects for each in one.intervals) else list_refusal(sizes) or None


def region_of(one: Found) -> set[fx.Node]:
    """Returns the results' nodes and all nodes between them and q, k, v and the tensors that determine the keys."""
    if one.absorbed is not None:
        stop = {value.node for value in one.absorbed.inputs}
    else:
        stop = {value.node for ref in one.refs for s in sources(ref) for value in held(s.ref.value)}
    stop |= {ref.value.node for ref in data_of(one)}

    def above(node: fx.Node) -> list[fx.Node]:
        return [a for a in node.all_input_nodes if a not in stop and a.op.startswith("call_")]

    return {*reached([value.node for value in one.results if value.node is not None], above)}
