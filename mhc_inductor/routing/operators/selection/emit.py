"""Found selection attentions become ops: candidates, what forbids them, and the surgery."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.effects import ambient
from mhc_inductor.routing.graph.expressions import VIEWS, Ref, aten, step, whole
from mhc_inductor.routing.graph.index import ONE, DynamicWidth, Index, Size, Unsupported, Var, product_of, size_of
from mhc_inductor.routing.graph.linear import Datum, Floor, Linear, of_index, of_size, variables_of
from mhc_inductor.routing.graph.run import run_fake
from mhc_inductor.routing.graph.values import Value, Values, example, tensors_in
from mhc_inductor.routing.graph.view import Knowledge, View
from mhc_inductor.routing.operator import Mismatch, Miss
from mhc_inductor.routing.operators.mhc.search import Finder, name_of
from mhc_inductor.routing.operators.selection.attention import (
    OP,
    Found,
    Guarded,
    NotOurs,
    Recogniser,
    Source,
    bare,
    dot,
    guarded,
    sources,
)
from mhc_inductor.routing.operators.selection.elements import MULTIPLY
from mhc_inductor.routing.operators.selection.intervals import Interval
from mhc_inductor.routing.operators.selection.keys import Compare, Given, KeyData
from mhc_inductor.routing.operators.selection.profit import Sizes, refusal
from mhc_inductor.routing.rewriter import Rewriter

_CALL = "scaled_dot_product_attention"
_SOFTMAXES = (aten._softmax.default, aten._safe_softmax.default)
_REACH = 16


def candidates(graph: fx.Graph) -> bool:
    """Whether anything in the graph could be an attention with a mask."""
    return any(_masked_call(node) or _is_softmax(node) for node in graph.nodes)


def _masked_call(node: fx.Node) -> bool:
    if node.op != "call_function" or name_of(node) != _CALL:
        return False
    return isinstance(node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask"), fx.Node)


def _is_softmax(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or "softmax" not in name_of(node) or "log" in name_of(node):
        return False
    t = example(node)
    return isinstance(t, torch.Tensor) and t.dim() >= 2


class Selections(Rewriter):
    """Puts ops in the place of the attentions of a graph. Search and proof run on a copy without in-place operations."""

    def __init__(self, graph: fx.Graph, autocast: dict[fx.Node, Any], templates: dict[Any, Any]) -> None:
        view = View(graph, ambient(), Knowledge())
        copy = view.graph
        self.origin: dict[fx.Node, fx.Node] = {n: view.node(n) for n in copy.nodes}
        self.since: dict[fx.Node, int] = {n: view.defined(n) for n in copy.nodes}
        states = {new: autocast[old] for new, old in self.origin.items() if old in autocast}
        self.search = Finder(copy, Values(copy, states, templates))
        self.sizes: dict[Size, tuple[fx.Node, int]] = {}
        self.numbers: dict[Size, fx.Node] = {}
        self.mode: Any = None
        self.failed: list[Recogniser] = []
        self.equal: set[frozenset[Size]] = set()
        self.misses: list[Miss] = []
        self.made: list[tuple[str, fx.Node, Any]] = []
        self.found = self._unused(self._all())

    # --- search ---

    def rewrite(self, graph: fx.Graph, autocast: dict[fx.Node, Any], templates: dict[Any, Any]) -> None:
        """Put an op in the place of each attention of ``graph``, of which the search had a copy."""
        misses = self.misses
        super().__init__(graph, Finder(graph, Values(graph, autocast, templates)))
        self.finder.values.forget(self.search.values.fixed)
        self.misses = misses
        for one in self.found:
            mark = list(self.graph.nodes)
            try:
                self._attention(one)
            except (Mismatch, Unsupported, DynamicWidth, ValueError, TypeError) as error:
                views = "q, k, v or the ranges cannot be followed through their views"
                self._refuse(mark, error, OP, one.out, views)
        if self.made:
            self._guard()
        self._sweep()

    def _all(self) -> list[Found]:
        stages = [False, True]
        before = dict(self.search.values.fixed)
        while True:
            self.misses, self.failed = [], []
            try:
                found = self._attempt()
            except DynamicWidth as dynamic:
                if not self._fix(set(dynamic.size.symbols)):
                    return []
                continue
            # Where all sizes are open, those of heads are often the reason.
            if found or not any(self._fix(self._open(stages.pop(0))) for _ in range(len(stages))):
                if not found:
                    self.search.values.forget(before)
                return found

    def _open(self, batch: bool) -> set[str]:
        return set().union(*(recogniser.narrow(batch) for recogniser in self.failed))

    def _fix(self, symbols: set[str]) -> bool:
        """Count symbols as their present values from now on. Whether any is new."""
        return bool(symbols) and self.search.values.fix(symbols)

    def _attempt(self) -> list[Found]:
        found = []
        for node in self.search.graph.nodes:
            if node not in self.search.live:
                continue
            if _masked_call(node):
                recogniser = Recogniser(self.search.values)
                found += self._tried(recogniser, functools.partial(recogniser.sdpa, node), node)
            elif _is_softmax(node):
                found += self._softmax(node)
        return found

    def _tried(self, recogniser: Recogniser, recognise: Callable[[], Found], node: fx.Node) -> list[Found]:
        value = self.search.values.of(node)
        try:
            found = recognise()
            if all(self._best(ref, order) is not None for ref, order in _orders(found)):
                return [found]
            reason = "q, k or v cannot be followed through their views"
            self.misses.append(Miss(OP, reason, found.out, value))
        except Mismatch as mismatch:
            self.misses.append(Miss(OP, mismatch.reason, mismatch.value, value))
        except KeyData as data:
            if recogniser.close:
                reason = "the mask also reads a tensor at the key's place"
                if data.value.func in VIEWS:
                    reason = "the heads of the mask are in another order than those of K"
                self.misses.append(Miss(OP, reason, data.value, value))
        except Unsupported:
            if recogniser.close:
                self.misses.append(Miss(OP, "the mask is no union of ranges of keys", recogniser.close[-1], value))
        except NotOurs:
            pass
        self.failed.append(recogniser)
        return []

    def _softmax(self, node: fx.Node) -> list[Found]:
        """The attention whose weights ``node`` computes."""
        value = self.search.value(node)
        if value is None or value.func not in _SOFTMAXES:
            return []
        known: dict[Value, Guarded] = {}
        outs: list[Value] = []
        dropped: Value | None = None
        todo, seen, same = collections.deque([node]), {node}, {value: None}
        while todo and len(seen) < _REACH:
            for user in todo.popleft().users:
                reached = self.search.value(user) if user.op.startswith("call_") and user in self.search.live else None
                if user in seen or reached is None:
                    continue
                seen.add(user)
                guard = guarded(reached, same)
                if guard is None and name_of(user).startswith("dropout") and _first(reached, user, self.search) in same:
                    guard, dropped = Guarded(_first(reached, user, self.search)), reached  # type: ignore[arg-type]
                if guard is not None:
                    known[reached] = guard
                if guard is not None or (step(whole(reached)) is not None and reached.args[0] in same):
                    same[reached] = None
                    todo.append(user)
                elif dot(bare(whole(reached))) is not None:
                    outs.append(reached)
                elif reached.func in MULTIPLY and any(a in same for a in reached.args[:2]):
                    todo.append(user)  # the products of a sum of products
        if len(outs) != 1:
            return []
        recogniser = Recogniser(self.search.values)
        found = self._tried(recogniser, functools.partial(recogniser.written, value, outs[0], known, same), node)
        if found and dropped is not None:
            self.misses.append(Miss(OP, "the attention weights are dropped out", dropped, value))
            return []
        return found

    def _unused(self, found: list[Found]) -> list[Found]:
        """Those of which nothing is used elsewhere that has an element for each query and key."""
        while True:
            regions = [self._region_of(one) for one in found]
            inside = set().union(*regions) if regions else set()
            kept = []
            for one, region in zip(found, regions, strict=True):
                weights = [v.node for v in one.dense if v.node in region and v.node is not one.out.node]
                masks = [v.node for v in one.masks.seen if v.node in region]
                where = self._used(weights, inside)
                reason = "the attention weights or scores are used elsewhere, too"
                if where is None or where in masks:
                    where, reason = self._used(masks, inside) or where, "the mask is used elsewhere, too"
                if where is None:
                    kept.append(one)
                else:
                    self.misses.append(Miss(OP, reason, self.search.value(where), one.out))
            if len(kept) == len(found):
                return kept
            found = kept

    def _used(self, nodes: Iterable[fx.Node | None], inside: set[fx.Node]) -> fx.Node | None:
        for node in nodes:
            if node is not None and any(u not in inside and u in self.search.live for u in node.users):
                return node
        return None

    def _region_of(self, one: Found) -> set[fx.Node]:
        stop = {s.ref.value.node for ref in (one.q, one.k, one.v) for s in sources(ref)}
        stop |= {ref.value.node for ref in _data(one)}
        assert one.out.node is not None
        region, todo = {one.out.node}, [one.out.node]
        while todo:
            for parent in todo.pop().all_input_nodes:
                if parent not in region and parent not in stop and parent.op.startswith("call_"):
                    region.add(parent)
                    todo.append(parent)
        return region

    # --- surgery ---

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
        node = make(target, args, kwargs)
        # Tensors of positions have no input that would say that they are fake.
        with self.mode or contextlib.nullcontext():
            node.meta["example_value"] = run_fake(node)
        node.meta.update(self.trace)
        return node

    def _original(self, value: Value) -> fx.Node:
        if value.node is None:
            raise Mismatch("a tensor of the formula is inside a composite operation", value)
        return self.current(self.origin[value.node])

    def _attention(self, one: Found) -> None:
        assert one.out.node is not None
        old = self.origin[one.out.node]
        out = self.finder.values.of(old)
        self.equal = one.masks.equal
        (q, dq), (k, dk), (v, dv) = (self._source(ref, order) for ref, order in _orders(one))
        dtype = functools.reduce(torch.promote_types, (dq, dk, dv))
        if torch.finfo(out.dtype).bits > torch.finfo(dtype).bits and not self._narrowed(old, dtype):
            dtype = out.dtype
        self._check(one, old, (q, k, v))
        self._worth(one, old, dtype)
        self.trace = {key: old.meta[key] for key in ("stack_trace", "nn_module_stack") if key in old.meta}
        self.sizes = {}
        self.mode = compat.fake_mode_of([example(old)])
        for node, ref in (q, k, v, *((self._original(ref.value), ref) for ref in _data(one))):
            for d, size in enumerate(ref.value.shape):
                if size.symbols:
                    self.sizes.setdefault(size, (node, d))
        for node in self.graph.nodes:
            if node.op == "placeholder" and compat.is_symbol(number := example(node)):
                self.numbers[size_of(number, {})] = node
        for size, (held, d) in one.masks.sized.items():
            self.sizes.setdefault(size, (self._original(held), d))
        with self.graph.inserting_before(old):
            rows, lead = [one.batch, one.query, one.groups, one.heads], [one.batch, one.groups]
            query = self._cast(self._placed(q, [*rows, [one.d]]), dtype)
            key = self._cast(self._placed(k, [*lead, [one.t], [one.d]]), dtype)
            value = self._cast(self._placed(v, [*lead, [one.t], one.feature]), dtype)
            ranges = self._ranges(one)
            call = self.emit(
                torch.ops.mhc_inductor.selection_attention.default,
                query,
                key,
                value,
                ranges,
                None,
                None,
                None,
                one.scale,
            )
            new = self.emit(operator.getitem, call, 0)
            if not math.isinf(one.fill):
                new = self._filled(new, self.emit(operator.getitem, call, 1), value)
            new = self._as(self._back(new, one, old), out, query)
        self._replace([(out, new)])
        self._guard_equal()
        self.made.append((OP, call, one))

    def _guard(self) -> None:
        super()._guard()
        for node in self.graph.nodes:
            size = example(node) if node.op == "placeholder" else None
            if isinstance(size, torch.SymInt) and str(compat.expression(size)) in self.finder.values.fixed:
                int(size)

    def _guard_equal(self) -> None:
        """Let the compile hold only while the sizes that were taken to be equal are."""
        known: dict[str, Any] = {}
        for node in self.graph.nodes:
            for t in tensors_in(example(node)) if node.op == "placeholder" else ():
                known.update({str(compat.expression(s)): s for s in t.shape if compat.is_symbol(s)})
        for pair in self.equal:
            a, b = (known[s.symbols[0]] for s in pair)
            if not a == b:
                raise Mismatch("sizes differ")

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if example(node).dtype == dtype else self.emit("to", node, dtype)

    def _filled(self, o: fx.Node, lse: fx.Node, v: fx.Node) -> fx.Node:
        """Rows without keys as the model has them: where every score is one finite number, the mean of V."""
        mean = self.emit(operator.getitem, self.emit("mean", v, -2), (slice(None), None, slice(None), None))
        empty = self.emit("unsqueeze", self.emit(operator.eq, lse, -math.inf), -1)
        return self.emit(torch.where, empty, mean, o)

    def _worth(self, one: Found, old: fx.Node, dtype: torch.dtype) -> None:
        """Raises Mismatch where dense attention is faster."""

        def now(digits: Iterable[Var]) -> int:
            return _hint(self, product_of(v.size for v in digits))

        selected: int | None = 0
        for each in one.intervals:
            widths = [w for low, high in each.pairs() if (w := high.minus(low).value) is not None]
            if each.selects and selected is not None:
                selected = selected + min(widths) * now(each.bound) if widths else None
        width = max(now([one.d]), now(one.feature))
        device = example(old).device.type
        reason = refusal(Sizes(device, dtype, now(one.query), now([one.t]), now(one.heads), width, selected))
        if reason:
            raise Mismatch(reason, one.out)

    def _check(self, one: Found, old: fx.Node, taken: Sequence[tuple[fx.Node, Ref]]) -> None:
        """Raises Mismatch where the op would not see what the model's operations see."""
        at = self.order[old]
        for value in [ref.value for ref in (*(ref for _, ref in taken), *_data(one))]:
            node = self._original(value)
            key, since = compat.storage_key(example(node)), self.since[value.node]  # type: ignore[index]
            if any(since < position < at and storage == key for position, storage in self.events):
                raise Mismatch("a tensor of the formula is changed in place within it", one.out)
        region = {self.origin[n] for n in self._region_of(one) if n in self.origin}
        path, starts = {old}, {node for node, _ in taken[:3]}
        for node in sorted(region, key=self.order.__getitem__):
            if any(a in starts or a in path for a in node.all_input_nodes):
                path.add(node)
        floating = [n for n in path if isinstance(e := example(n), torch.Tensor) and e.is_floating_point()]
        if len({self.grad[n] for n in floating}) > 1:
            raise Mismatch("gradients are switched on or off within the formula", one.out)
        for node in floating:
            for user in node.users if node is not old else ():
                if "hook" in str(user.target) or "retain_grad" in str(user.target):
                    raise Mismatch("a hook is on an intermediate result", one.out)

    # --- layouts ---

    def _source(self, ref: Ref, order: list[Var]) -> tuple[tuple[fx.Node, Ref], torch.dtype]:
        """The tensor farthest back that holds q, k or v as a plain array of digits."""
        source = self._best(ref, order)
        if source is None:
            raise Unsupported
        return (self._original(source.ref.value), source.ref), source.dtype

    def _best(self, ref: Ref, order: list[Var]) -> Source | None:
        found = None
        for source in sources(ref):
            if source.ref.value.node in self.origin and _layout(source.ref, set(order), set()) is not None:
                found = source
        return found

    def _placed(self, taken: tuple[fx.Node, Ref], groups: list[list[Var]]) -> fx.Node:
        """A view with one dim for each of ``groups``, the digits of which it joins."""
        node, ref = taken
        order = [v for digits in groups for v in digits if v.size != ONE]
        node = self._spread(node, ref, order)
        missing = [v for v in order if v not in variables_of(ref)]
        if missing:
            node = self.emit("expand", node, *[self._size(v.size) if v in missing else -1 for v in order])
        return self._joined(node, groups)

    def _joined(self, node: fx.Node, groups: list[list[Var]], extra: int = 0) -> fx.Node:
        """Dims of digits as one dim each of ``groups``; ``extra`` more dims are behind them."""
        at = len(example(node).shape) - extra
        for digits in reversed(groups):
            count = sum(v.size != ONE for v in digits)
            if count == 0:
                node = self.emit("unsqueeze", node, at)
            elif count > 1:
                node = self.emit("flatten", node, at - count, at - 1)
            at -= count
        return node

    def _spread(self, node: fx.Node, ref: Ref, order: list[Var]) -> fx.Node:
        """``node`` with a dim for each variable of ``order``, of size 1 where it has none. Raises Unsupported."""
        layout = _layout(ref, set(order), self.equal)
        if layout is None:
            raise Unsupported
        picks = [pick for pick, _ in layout]
        if any(pick != slice(None) for pick in picks):
            node = self.emit(operator.getitem, node, tuple(picks))
        kept = [digits for pick, digits in layout if not isinstance(pick, int)]
        at = len(kept)
        for digits in reversed(kept):
            at -= 1
            if len(digits) > 1:
                node = self.emit("unflatten", node, at, tuple(self._size(v.size) for v in digits))
            elif not digits:
                node = self.emit("squeeze", node, at)
        dims = [v for digits in kept for v in digits]
        wanted = [dims.index(v) for v in order if v in dims]
        if wanted != sorted(wanted):
            node = self.emit("permute", node, *wanted)
        if len(dims) < len(order):
            node = self.emit(operator.getitem, node, tuple(slice(None) if v in dims else None for v in order))
        return node

    def _size(self, size: Size) -> Any:
        """A size, as something to put into the graph."""
        if not size.symbols:
            return size.factor
        if size in self.numbers:
            return self.numbers[size]
        if size in self.sizes:
            return self.emit("size", *self.sizes[size])
        for other, place in self.sizes.items():
            per = other.over(size)
            if per is not None and not per.symbols:
                return self.emit(operator.floordiv, self.emit("size", *place), per.factor)
            per = size.over(other)
            if per is not None and not per.symbols:
                return self.emit(operator.mul, self.emit("size", *place), per.factor)
        raise Mismatch("a size is dynamic, and no input has it")

    def _back(self, o: fx.Node, one: Found, old: fx.Node) -> fx.Node:
        """o [B, S, G, h, Dv] in the model's order of dims."""
        groups = [one.batch, one.query, one.groups, one.heads, one.feature]
        at = len(groups)
        for digits in reversed(groups):
            at -= 1
            real = [v for v in digits if v.size != ONE]
            if not real:
                o = self.emit("squeeze", o, at)
            elif len(real) > 1:
                o = self.emit("unflatten", o, at, tuple(self._size(v.size) for v in real))
        have = [v for digits in groups for v in digits if v.size != ONE]
        order = [have.index(v) for digits in one.dims for v in digits if v.size != ONE]
        if order != sorted(order):
            o = self.emit("permute", o, *order)
        return self._joined(o, one.dims)

    # --- ranges ---

    def _ranges(self, one: Found) -> fx.Node:
        """[B, S, G, r, 2]."""
        parts = [self._part(one, each) for each in one.intervals]
        return parts[0] if len(parts) == 1 else self.emit(torch.cat, parts, -2)

    def _part(self, one: Found, each: Interval) -> fx.Node:
        lead = [one.batch, one.query, one.groups, list(each.bound)]
        order = [v for digits in lead for v in digits if v.size != ONE]
        whole = self._as_they_are(one, each)
        if whole is not None:
            pair = Var(Size(2))
            ref = Ref(whole.value, (*whole.index[:-1], Index({pair: ONE})))
            if _layout(ref, {*order, pair}, self.equal) is not None:
                node = self._spread(self._original(ref.value), ref, [*order, pair])
                return self._ranged(node, order, lead)
        device = example(self.origin[one.out.node]).device  # type: ignore[index]
        numbers = Numbers(self, order, device)
        low = self._extreme(numbers, [x for x in each.lowers if x.value is None or x.value > 0], torch.maximum)
        ends = [x for x in each.uppers if x != of_size(one.t.size)]
        high = self._extreme(numbers, ends or [of_size(one.t.size)], torch.minimum)
        low = numbers.of(Linear()) if low is None else low
        assert high is not None
        for condition in each.conditions:
            if not _implied(condition, each):
                high = self.emit(torch.where, numbers.holds(condition), high, 0)
        if len(example(low).shape) != len(example(high).shape):
            raise Unsupported
        pairs = self.emit(torch.broadcast_tensors, low, high)
        node = self.emit(
            torch.stack, [self.emit(operator.getitem, pairs, 0), self.emit(operator.getitem, pairs, 1)], -1
        )
        return self._ranged(node, order, lead)

    def _ranged(self, node: fx.Node, order: list[Var], lead: list[list[Var]]) -> fx.Node:
        sizes = example(node).shape
        if any(not isinstance(s, torch.SymInt) and s == 1 for s in sizes[: len(order)]):
            node = self.emit("expand", node, *[self._size(v.size) for v in order], 2)
        return self._joined(node, lead, 1)

    def _as_they_are(self, one: Found, each: Interval) -> Ref | None:
        """The tensor of starts and ends, where nothing else says which keys these are."""
        ends = [x for x in each.uppers if x != of_size(one.t.size)]
        if len(each.lowers) != 1 or len(ends) != 1 or each.conditions:
            return None
        data = []
        for x in (each.lowers[0], ends[0]):
            if x.constant or len(x.terms) != 1:
                return None
            ((a, c),) = x.terms
            if c != 1 or not isinstance(a, Datum) or a.wrap is not None:
                return None
            data.append(a.ref)
        start, end = data
        if start.value is not end.value or start.value.shape[-1:] != (Size(2),):
            return None
        same = start.index[:-1] == end.index[:-1]
        return start if same and (start.index[-1].constant, end.index[-1].constant) == (0, 1) else None

    def _extreme(self, numbers: Numbers, bounds: list[Linear], pick: Any) -> fx.Node | None:
        nodes = [numbers.of(x) for x in dict.fromkeys(bounds)]
        return functools.reduce(lambda a, b: self.emit(pick, a, b), nodes) if nodes else None


class Numbers:
    """Emits whole numbers as tensors with a dim for each variable of ``order``, of size 1 where it has no part."""

    def __init__(self, rewriter: Selections, order: list[Var], device: torch.device) -> None:
        self.rewriter = rewriter
        self.order = order
        self.device = device

    def of(self, x: Linear) -> fx.Node:
        r = self.rewriter
        total: fx.Node | None = None
        for a, c in sorted(x.terms, key=lambda term: not isinstance(term[0], Datum)):
            node = self._atom(a)
            node = node if abs(c) == 1 else r.emit(operator.mul, node, abs(c))
            if total is None:
                total = node if c > 0 else r.emit(operator.neg, node)
            else:
                total = r.emit(operator.add if c > 0 else operator.sub, total, node)
        constant: Any = None
        for symbols, c in sorted(x.constant):
            if not symbols:
                part: Any = c
            else:
                part = r._size(Size(1, symbols))
                part = part if c == 1 else r.emit(operator.mul, part, c)
            constant = part if constant is None else r.emit(operator.add, constant, part)
        if total is None:
            shape = [1] * len(self.order)
            return r.emit(torch.full, shape, 0 if constant is None else constant, dtype=torch.int64, device=self.device)
        return total if constant is None else r.emit(operator.add, total, constant)

    def _atom(self, a: Any) -> fx.Node:
        r = self.rewriter
        if isinstance(a, Var):
            node = r.emit(torch.arange, r._size(a.size), device=self.device)
            return r.emit(operator.getitem, node, tuple(slice(None) if v is a else None for v in self.order))
        if isinstance(a, Floor):
            return r.emit(operator.floordiv, self.of(a.of), a.by)
        node = self._element(a.ref)
        if a.wrap is not None:
            wrapped = r.emit(operator.add, node, r._size(a.wrap))
            node = r.emit(torch.where, r.emit(operator.lt, node, 0), wrapped, node)
        return node

    def _element(self, ref: Ref) -> fx.Node:
        r = self.rewriter
        node = r._original(ref.value)
        if not variables_of(ref) <= set(self.order):
            raise Unsupported
        if _layout(ref, set(self.order), r.equal) is not None:
            return r._spread(node, ref, self.order)
        return r.emit(operator.getitem, node, tuple(self.of(of_index(i)) for i in ref.index))

    def holds(self, condition: Any) -> fx.Node:
        if isinstance(condition, Given):
            node = self._element(condition.ref)
            return node if condition.want else self.rewriter.emit(torch.logical_not, node)
        kinds = {"le": operator.le, "eq": operator.eq, "ne": operator.ne}
        return self.rewriter.emit(kinds[condition.kind], self.of(condition.value), 0)


def _first(value: Value, node: fx.Node, finder: Finder) -> Value | None:
    """The first argument of a dropout that changes something."""
    given = node.args[0] if node.args else None
    return finder.value(given) if isinstance(given, fx.Node) and step(whole(value)) is None else None


def _implied(condition: Any, each: Interval) -> bool:
    """Whether a block's id is not negative: its keys would lie before the first one."""
    if not isinstance(condition, Compare) or len(condition.value.terms) != 1:
        return False
    ((a, c),) = condition.value.terms
    constant = condition.value.minus(Linear(condition.value.terms)).value
    if (condition.kind, c, constant) not in (("le", -1, 0), ("ne", 1, 1), ("ne", -1, -1)):
        return False
    return any(high.terms == frozenset({(a, w)}) and high.offset <= w for high in each.uppers for _, w in high.terms)


def _layout(ref: Ref, known: set[Var], equal: set[frozenset[Size]]) -> list[tuple[Any, list[Var]]] | None:
    """For each dim of a tensor (an index or a slice, digits), where an element is one of a plain array of digits."""
    result: list[tuple[Any, list[Var]]] = []
    met: set[Var] = set()
    for index, size in zip(ref.index, ref.value.shape, strict=True):
        terms = dict(index.terms)
        constant = terms.pop(None, Size(0))
        if constant.symbols or any(not isinstance(v, Var) or v not in known or v in met for v in terms):
            return None
        if not terms:
            result.append((slice(None), []) if size == ONE else (constant.factor, []))
            continue
        digits: list[Var] = []
        reach = ONE
        while terms:
            v = next((v for v, c in terms.items() if c == reach), None)
            if v is None:
                return None
            del terms[v]
            digits.insert(0, v)
            met.add(v)
            reach = reach.times(v.size)
        if (reach == size or frozenset({reach, size}) in equal) and not constant.factor:
            result.append((slice(None), digits))
        elif not reach.symbols and not size.symbols and constant.factor + reach.factor <= size.factor:
            result.append((slice(constant.factor, constant.factor + reach.factor), digits))
        else:
            return None
    return result


def _orders(one: Found) -> list[tuple[Ref, list[Var]]]:
    """q, k and v, and the digits that they are made of."""
    lead = [*one.batch, *one.groups]
    return [
        (one.q, [*lead, *one.query, *one.heads, one.d]),
        (one.k, [*lead, one.t, one.d]),
        (one.v, [*lead, one.t, *one.feature]),
    ]


def _data(one: Found) -> list[Ref]:
    """The elements of tensors that say which keys a query sees."""
    found: dict[Ref, None] = {}
    for each in one.intervals:
        for x in (*each.lowers, *each.uppers):
            found.update(dict.fromkeys(d.ref for d in x.data()))
        for condition in each.conditions:
            if isinstance(condition, Given):
                found[condition.ref] = None
            else:
                found.update(dict.fromkeys(d.ref for d in condition.value.data()))
    return list(found)


def _hint(rewriter: Selections, size: Size) -> int:
    """A size's present value."""
    if not size.symbols:
        return size.factor
    known = rewriter.finder.values.hints
    return size.factor * math.prod(known.get(name, 1 << 12) for name in size.symbols)
