"""Selection attention (spec: softmax(scale * q K.T) V over a union of key ranges) in normal form: what it looks like once
spelling is gone. Found from calls of scaled_dot_product_attention and from softmaxes; see :mod:`.keysets` for masks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from mhc_inductor.routing.graph.bounds import Steps
from mhc_inductor.routing.graph.expressions import (
    Ref,
    _broadcast,
    aten,
    contraction,
    number,
    operands,
    reduction,
    step,
    whole,
)
from mhc_inductor.routing.graph.index import (
    ONE,
    DynamicWidth,
    Index,
    Part,
    Size,
    Unsupported,
    Var,
    const,
    linear,
    product_of,
    var,
)
from mhc_inductor.routing.graph.linear import Key, atom, of_index, replaced, variables_of
from mhc_inductor.routing.graph.values import Value, Values
from mhc_inductor.routing.operator import Mismatch
from mhc_inductor.routing.operators.selection.elements import MULTIPLY, constant_of, uncast
from mhc_inductor.routing.operators.selection.fills import Fills, Rows
from mhc_inductor.routing.operators.selection.intervals import Interval, Judge
from mhc_inductor.routing.operators.selection.keys import All, Any_, KeyData, alike, both, eliminated, free
from mhc_inductor.routing.operators.selection.masks import Masks
from mhc_inductor.routing.operators.selection.rows import seen_by_all

OP = "selection_attention"
_DIVIDE = (aten.div.Tensor, aten.div.Scalar)
_ADD = (aten.add.Tensor, aten.add.Scalar)
_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where q, k or v lies: an element of a node's value, and the dtype in which the attention reads it."""

    ref: Ref
    dtype: torch.dtype


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
    mask: Callable[[], Any_]
    dense: list[Value]
    masks: Masks
    fills: Fills
    keys: Any_ = dataclasses.field(default_factory=list)
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
            kinds.append(f"{words(count)} {kind}" if each.selects else "keys near the query")
        return f"{words(groups)} groups of {words(heads)} heads, {' and '.join(kinds)} a query; {self.rows.value}"


class NotOurs(Exception):
    """No selection; with a reason, close to one if its mask is."""

    def __init__(self, reason: str = "", value: Value | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = value


def sources(ref: Ref) -> Iterator[Source]:
    """Returns the tensors that hold the same elements, the nearest first, behind views and casts to wider dtypes."""
    dtype = ref.value.dtype
    while True:
        yield Source(ref, dtype)
        below = step(ref)
        if below is None or not _same_numbers(ref, below):
            return
        if torch.finfo(below.value.dtype).bits < torch.finfo(dtype).bits:
            dtype = below.value.dtype
        ref = below


def _same_numbers(ref: Ref, below: Ref) -> bool:
    """Whether a view or cast changes no number, or only by a rounding that autocast or an operation adds."""
    now, before = ref.value.dtype, below.value.dtype
    if now is before or not keeps_16_bits(ref, below):
        return now is before
    # What the model rounded is what the op reads.
    return ref.value.node is None or torch.promote_types(now, before) is now


class Scaled:
    """``factor * ref`` behind views, casts and products with numbers; ``met`` are the values on the way to ``end``.

    Of ``inputs``, q and k, the roundings that the model wrote stay; of scores only those to less than 16 bits.
    """

    def __init__(self, ref: Ref, inputs: bool = False) -> None:
        self.factor = 1.0
        self.met: list[Value] = []
        self.ref = ref
        while True:
            self.met.append(ref.value)
            below = step(ref)
            if below is not None and not (_same_numbers(ref, below) if inputs else keeps_16_bits(ref, below)):
                break
            if below is None and (ref.value.func in MULTIPLY or ref.value.func in _DIVIDE) and not ref.value.kwargs:
                below = self._times(ref)
                self.ref = below or self.ref
            if below is None:
                break
            ref = below
        self.end = ref

    def _times(self, ref: Ref) -> Ref | None:
        a, b = operands(ref)
        if ref.value.func in MULTIPLY and isinstance(a, float):
            a, b = b, a
        if not isinstance(a, Ref) or not isinstance(b, float) or b == 0.0:
            return None
        self.factor *= b if ref.value.func in MULTIPLY else 1.0 / b
        return a

    @property
    def narrowest(self) -> torch.dtype:
        """The dtype on the way that holds the fewest numbers."""
        return min((v.dtype for v in self.met), key=lambda d: (torch.finfo(d).bits, torch.finfo(d).max))


def keeps_16_bits(ref: Ref, below: Ref) -> bool:
    """Whether neither side of a view or cast is a float8, whose rounding nobody may drop."""
    return all(torch.finfo(x.value.dtype).bits >= 16 for x in (ref, below))


def _last(shape: tuple[Size, ...], dim: int) -> tuple[Size, ...]:
    return (*shape[:dim], *shape[dim + 1 :], shape[dim])


def dot_of(ref: Ref) -> list[Ref]:
    """The two sides of a sum of products."""
    found = dot(ref)
    if found is None:
        raise NotOurs
    return [*found[:2]]


def dot(ref: Ref) -> tuple[Ref, Ref, list[Var]] | None:
    """(left, right, bound variables) of a sum of products."""
    contracted = contraction(ref)
    if contracted is not None:
        return contracted[0], contracted[1], [contracted[2]]
    reduced = reduction(ref)
    if reduced is None or reduced[2] != 1.0:
        return None
    summand, bound, _ = reduced
    while (below := step(summand)) is not None:
        summand = below
    if summand.value.func not in MULTIPLY:
        return None
    a, b = operands(summand)
    return (a, b, bound) if isinstance(a, Ref) and isinstance(b, Ref) else None


class Recogniser:
    """Attentions of one graph."""

    def __init__(self, values: Values, zero_rows: bool = False) -> None:
        self.values = values
        self.zero_rows = zero_rows
        self._made: list[Masks] = []
        self._given: list[Value] = []
        self._shapes: list[tuple[Size, ...]] = []

    def narrow(self, batch: bool) -> set[str]:
        """Symbols in the sizes of heads, groups and features (and ``batch``), which queries and keys do not share."""
        if not self._shapes:
            return set()
        now = self.values.hints
        *rows, keys = self._shapes[0]
        longest = max(rows, key=lambda s: s.factor * math.prod(now.get(x, 1) for x in s.symbols), default=keys)
        wide = {*keys.symbols, *longest.symbols, *(() if batch or len(rows) < 2 else rows[0].symbols)}
        return {x for shape in self._shapes for size in shape for x in size.symbols if x in now} - wide

    def _masks(self) -> Masks:
        self._made.append(Masks(self.values.fixed, self.values.hints))
        return self._made[-1]

    @property
    def close(self) -> list[Value]:
        """What of the masks that were looked at says, from data, which keys a query sees."""
        found = [value for masks in self._made for value in masks.seen]
        if not found:
            for value in self._given:
                masks, ref = self._masks(), whole(value)
                ref = Ref(value, (*ref.index[:-1], var(Key(value.shape[-1]))))
                with contextlib.suppress(Unsupported, Mismatch, DynamicWidth):
                    _ = masks.truth(ref) if value.dtype is torch.bool else masks.additive(ref)
                found += masks.seen
        return found

    # --- scaled_dot_product_attention ---

    def sdpa(self, node: fx.Node) -> Found:
        """The call ``node``. Raises NotOurs, Mismatch, Unsupported and DynamicWidth."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        mask = given.get("attn_mask")
        out = self.values.of(node)
        if not isinstance(mask, fx.Node) or not isinstance(out, Value):
            raise NotOurs
        q, k, v, m = (self._value(given[n]) for n in ("query", "key", "value", "attn_mask"))
        self._given = [m]
        self._shapes = [(*q.shape[:-1], k.shape[-2]), q.shape, k.shape, v.shape]

        def build(dims: list[list[Var]]) -> Found:
            index = [_joined(digits) for digits in dims]
            *lead, s, e = index
            width, t = Var(q.shape[-1]), Key(k.shape[-2])
            kv_lead = list(lead)
            if given.get("enable_gqa") and lead:
                kv_lead[-1] = self._grouped(dims[len(lead) - 1], k)
            scale = given.get("scale")
            if scale is None:
                if width.size.symbols:
                    raise DynamicWidth(width.size)
                scale = 1.0 / math.sqrt(width.size.factor)
            scale = number(scale)
            if scale is None:
                raise NotOurs
            masks = self._masks()
            element = _aligned(m, (*lead, s, var(t)))

            fills = Fills(no_nan=True, fused=True)

            def keys() -> Any_:
                if m.dtype is torch.bool:
                    return masks.truth(element)
                found = masks.additive(element)
                fills.added(masks.possible(m), q.dtype)
                return found

            refs = (
                _aligned(q, (*lead, s, var(width))),
                _aligned(k, (*kv_lead, var(t), var(width))),
                _aligned(v, (*kv_lead, var(t), e)),
            )
            return Found(out, dims, *refs, width, t, scale, keys, [m], masks, fills)

        if given.get("is_causal"):
            raise NotOurs
        found = self._refined(build, out)
        if given.get("dropout_p") not in (None, 0, 0.0):
            raise Mismatch("the attention weights are dropped out", out)
        return found

    def _grouped(self, digits: list[Var], k: Value) -> Index:
        """The group of a head, which is the digits above the heads of a group."""
        groups = k.shape[-3]
        for at in range(len(digits) + 1):
            if product_of(v.size for v in digits[:at]) == groups:
                return _joined(digits[:at])
        per = product_of(v.size for v in digits).over(groups)
        if per is None:
            raise NotOurs
        raise Cut([(digits, per)])

    def _value(self, node: Any) -> Value:
        value = self.values.of(node) if isinstance(node, fx.Node) else None
        if not isinstance(value, Value):
            raise NotOurs
        return value

    # --- softmax written out ---

    def written(self, softmax: Value, out: Value, same: dict[Value, Guarded], shown: Iterable[Value]) -> Found:
        """``out`` = softmax @ V. ``same`` are values that are the softmax but for rows without keys; all are ``shown``."""
        dim = softmax.args[1] % max(1, len(softmax.shape))
        self._shapes = [_last(softmax.shape, dim), out.shape]

        no_nan: list[bool] = []

        def weights_of(ref: Ref, guards: list[tuple[Ref, bool]]) -> Ref | None:
            """The element of the softmax that ``ref`` is."""
            while ref.value is not softmax:
                guarded = same.get(ref.value)
                if guarded is not None:
                    if guarded.mask is not None:
                        guards.append((_broadcast(guarded.mask, ref), guarded.want))
                    no_nan.append(guarded.no_nan)
                    ref = _broadcast(guarded.of, ref)
                elif (below := step(ref)) is not None and keeps_16_bits(ref, below):
                    ref = below
                else:
                    return None
            return ref

        def build(dims: list[list[Var]]) -> Found:
            summed = dot(bare(Ref(out, tuple(_joined(digits) for digits in dims))))
            if summed is None:
                raise NotOurs
            sides = summed[:2]
            guards: list[tuple[Ref, bool]] = []
            own = [weights_of(side, guards) for side in sides]
            if (own[0] is None) == (own[1] is None):
                raise NotOurs
            weights, v = (own[0], sides[1]) if own[0] is not None else (own[1], sides[0])
            assert weights is not None
            over, t = weights.index[dim], Key(softmax.shape[dim])
            if t.size != ONE:
                if len(over.terms) != 1 or [*over.terms.items()] != [(x, ONE) for x in summed[2] if x.size != ONE]:
                    raise NotOurs
                (old,) = over.terms
                weights, v = replaced(weights, old, atom(t)), replaced(v, old, atom(t))
                guards = [(replaced(r, old, atom(t)), want) for r, want in guards]
            masks, dense = self._masks(), [*shown]
            self._given = []
            scores = Scores(Ref(softmax.args[0], weights.index), masks, dense, self._given)
            self._shapes = [_last(softmax.shape, dim), *(x.value.shape for x in (*dot_of(scores.ref), v))]
            found = dot(scores.ref)
            if found is None or len(found[2]) != 1:
                raise NotOurs
            scaled = [Scaled(side, inputs=True) for side in found[:2]]
            has = [t in variables_of(x.end) for x in scaled]
            if has[0] == has[1]:
                raise NotOurs
            q, k = scaled if has[1] else scaled[::-1]
            factor = scores.factor * q.factor * k.factor

            scores.fills.no_nan = any(no_nan) or softmax.func is aten._safe_softmax.default

            def keys() -> Any_:
                total = scores.keys()
                for ref, want in guards:
                    if not alike(masks.truth(ref, want), total, t):
                        raise Mismatch("the attention weights are masked once more, and differently", ref.value)
                scores.fills.guarded = bool(guards)
                return total

            return Found(out, dims, q.ref, k.ref, v, found[2][0], t, factor, keys, dense, masks, scores.fills)

        return self._refined(build, out)

    def selects(self, scores: Value, dim: int) -> bool:
        """Whether a softmax of ``scores`` is one of scores under the mask of a selection."""
        place = [var(Var(size)) for size in scores.shape]
        place[dim] = var(Key(scores.shape[dim]))
        self._given = []
        with contextlib.suppress(Unsupported, DynamicWidth):
            return _selects(Ref(scores, tuple(place)), self._masks(), self._given)
        return False

    @property
    def masked(self) -> bool:
        """Whether a mask was on the scores that were looked at last."""
        return bool(self._given)

    @property
    def queries(self) -> Size:
        """How many queries there are, as the shapes say."""
        return self._shapes[0][-2] if self._shapes and len(self._shapes[0]) > 1 else ONE

    # --- digits of the result's dims, and what they are ---

    def _refined(self, build: Callable[[list[list[Var]]], Found], out: Value) -> Found:
        """``build`` of the result's dims, split into digits until q, k and v are indexed by whole ones."""
        cuts: list[list[Size]] = [[] for _ in out.shape]
        for _ in range(6):
            dims = [_digits(size, at) for size, at in zip(out.shape, cuts, strict=True)]
            try:
                found = build(dims)
            except Cut as cut:
                if not _cut(cuts, dims, cut.places):
                    raise Unsupported from None
                continue
            parts = [a for ref in found.deepest() for i in ref.index for a in i.atoms()]
            places = [place for a in parts if isinstance(a, Part) for place in _places(a)]
            if not places or not _cut(cuts, dims, [([root], by) for root, by in places]):
                break
        found.keys = found.mask()
        self._roles(found)
        found.fills.check(found.out)
        found.rows = self._rows(found)
        return found

    def _rows(self, found: Found) -> Rows:
        """What a query without a visible key gives. Raises Mismatch."""
        if found.fills.always_zero:
            return Rows.ZERO
        if seen_by_all(found.keys, found.t, found.masks):
            return Rows.SEEN
        if self.zero_rows:
            found.opted = True
            return Rows.ZERO
        return found.fills.rows(found.out)

    def _roles(self, found: Found) -> None:
        """What each digit is: batch, group, head, query or feature. Raises NotOurs, Mismatch and Unsupported."""
        found.keys = [e for conj in found.keys if (e := eliminated(conj)) is not None]
        if not any(x.data() for conj in found.keys for x in conj.comparisons()):
            raise NotOurs
        masked = {v for conj in found.keys for v in free(conj)}
        ours = [v for digits in found.dims for v in digits if v.size != ONE]
        asked, in_k, in_v = map(variables_of, found.deepest())
        held = in_k | in_v
        shared = [v for v in ours if v in held and v in asked]
        found.feature = [v for v in ours if v in held and v not in asked]
        if any(v not in held and v not in asked for v in ours) or len(found.feature) > 1:
            raise NotOurs
        if any(v not in in_v or v in in_k for v in found.feature):
            raise NotOurs
        rows: list[list[Var]] = []
        for digits in found.dims:
            own = [v for v in digits if v in asked and v not in held]
            if any(v in shared for v in digits):
                found.heads += own
            elif own:
                rows.append(own)
        depends = [r for r in rows if any(v in masked for v in r)]
        if any(v in masked for v in found.heads) or len(depends) > 1:
            raise Mismatch("the mask differs between the heads of a group", found.dense[-1])
        if not depends and rows and not any(len(digits) == 1 and digits[0].size == ONE for digits in found.dims[:-1]):
            depends = [max(rows, key=_large)]
        found.query = depends[0] if depends else []
        found.heads += [v for r in rows if r not in depends for v in r]
        found.batch, found.groups = (shared[:1], shared[1:]) if len(shared) > 1 else ([], shared)
        judge = Judge(found.masks, found.t)
        found.intervals = judge.intervals(found.keys)
        queries = product_of(v.size for v in found.query)
        judge.check(found.intervals, of_index(_joined(found.query)), queries, found.t.size)


@dataclasses.dataclass(frozen=True)
class Guarded:
    """``of``, with 0 where ``mask`` is not ``want``, or, if ``no_nan``, where it is NaN."""

    of: Value
    mask: Value | None = None
    want: bool = True
    no_nan: bool = False


def guarded(value: Value, known: Any) -> Guarded | None:
    """``value`` as one of the values ``known`` that differs from it only where something is masked or NaN."""
    func, args = value.func, value.args
    if func is aten.nan_to_num.default and args[0] in known and (len(args) < 2 or args[1] in (None, 0, 0.0)):
        return Guarded(args[0], no_nan=True)
    if func in _FILLS and args[0] in known and constant_of(args[2]) == 0.0:
        return Guarded(args[0], args[1], False)
    if func is aten.where.self and args[1] in known and constant_of(args[2]) == 0.0:
        return Guarded(args[1], args[0])
    if func is aten.where.self and args[2] in known and constant_of(args[1]) == 0.0:
        return Guarded(args[2], args[0], False)
    if func in MULTIPLY:
        for a, b in (args[:2], args[1::-1]):
            if a in known and isinstance(b, Value) and uncast(whole(b)).value.dtype is torch.bool:
                return Guarded(a, b)
    return None


class Scores:
    """What a softmax is taken of: ``factor`` times the sum of products ``ref``, where :meth:`keys` hold."""

    def __init__(self, ref: Ref, masks: Masks, dense: list[Value], given: list[Value]) -> None:
        self.masks = masks
        self.factor = 1.0
        self.fills = Fills()
        self.given = given
        self._parts: list[Callable[[], Any_]] = []
        self._steps: list[Callable[[], None]] = []
        self.ref = ref
        while True:
            scaled = Scaled(self.ref)
            dense += scaled.met
            self.factor *= scaled.factor
            self._steps.append(functools.partial(self.fills.moved, scaled.factor, 0.0, scaled.narrowest))
            self.ref = scaled.end
            if dot(self.ref) is not None:
                break
            if not 0.0 < self.factor < math.inf:
                raise NotOurs
            self.ref = self._unmasked(self.ref)
        dense.append(self.ref.value)

    def keys(self) -> Any_:
        """Returns which keys are seen, and sets :attr:`fills`. Raises Mismatch and Unsupported."""
        keys = functools.reduce(both, [part() for part in self._parts], [All()])
        for took in reversed(self._steps):
            took()
        return keys

    def _unmasked(self, ref: Ref) -> Ref:
        """The scores before the last mask was put on them."""
        value, func, args = ref.value, ref.value.func, ref.value.args
        if func in _FILLS:
            self._filled(args[2], value)
            return self._masked(args[1], False, args[0], ref)
        if func is aten.where.self:
            want = constant_of(args[2]) is not None
            self._filled(args[2] if want else args[1], value)
            return self._masked(args[0], want, args[1] if want else args[2], ref)
        scaled = value.kwargs or len(args) > 2  # by alpha
        if func in _ADD and not scaled and any(constant_of(a) is not None for a in args):
            return self._shifted(ref)
        if func in (aten.add.Tensor, aten.sub.Tensor) and not scaled:
            sides = [_broadcast(a, ref) for a in args if isinstance(a, Value)]
            own = [is_scores(side) for side in sides]
            sign = 1.0 if func is aten.add.Tensor else -1.0
            if sum(own) != 1 or len(own) != 2 or (sign < 0.0 and own[1]):
                raise NotOurs
            scores, mask = sides if own[0] else sides[::-1]
            if sum(own) == 1 and bare(scores).value.func is aten.cat.default:
                return scores
            self.given.append(mask.value)
            self._parts.append(functools.partial(self._added, mask, scores, sign * self.factor))
            self._steps.append(functools.partial(self._take_added, mask.value, sign, value.dtype))
            return scores
        if func is aten.cat.default:
            self._joined(ref)
        changed = _CHANGES.get(func)
        raise NotOurs(f"the scores are {changed}; expected scale * q @ k, and masks" if changed else "", value)

    def _joined(self, ref: Ref) -> None:
        """Raises Mismatch where masked scores of a selection are joined with other logits."""
        d = ref.value.args[1] if len(ref.value.args) > 1 else 0
        for piece in ref.value.args[0]:
            place = [var(Var(size)) for size in piece.shape]
            place[d] = var(Key(piece.shape[d]))
            if is_scores(Ref(piece, tuple(place))) and _selects(Ref(piece, tuple(place)), self.masks):
                raise Mismatch(
                    "the softmax is over scores and other logits (a sink, more keys); expected scores", ref.value
                )

    def _masked(self, mask: Value, want: bool, scores: Value, ref: Ref) -> Ref:
        self.given.append(mask)
        self._parts.append(functools.partial(self.masks.truth, _broadcast(mask, ref), want))
        return _broadcast(scores, ref)

    def _shifted(self, ref: Ref) -> Ref:
        """Scores to all of which a number was added, which a softmax does not see."""
        a, b = ref.value.args
        known = constant_of(a) if constant_of(a) is not None else constant_of(b)
        if known is None or not abs(known) < 1e4:
            raise NotOurs
        self._steps.append(functools.partial(self.fills.moved, 1.0, known, ref.value.dtype))
        return _broadcast(a if constant_of(a) is None else b, ref)

    def _added(self, mask: Ref, scores: Ref, factor: float) -> Any_:
        """Which keys an added mask leaves alone. Raises Mismatch and Unsupported."""
        try:
            keys = self.masks.additive(mask)
            if max((factor * v for v in self.masks.possible(mask.value) if v), default=0.0) > -1e4:
                raise Unsupported
            return keys
        except KeyData:
            raise
        except Unsupported:
            if self.masks.seen or _selects(scores, self.masks):
                raise Mismatch("something that is no mask is added to the scores", mask.value) from None
            raise

    def _take_added(self, mask: Value, sign: float, dtype: torch.dtype) -> None:
        self.fills.added([sign * v for v in self.masks.possible(mask)], dtype)

    def _filled(self, given: Any, value: Value) -> None:
        fill = constant_of(given)
        if fill is None or fill != fill:
            raise NotOurs
        if not self.factor * fill <= -1e4:
            raise Mismatch(f"scores of other keys are set to {self.factor * fill:g}; expected -inf", value)
        self._steps.append(functools.partial(self.fills.filled, fill, value.dtype))


_CHANGES = {
    aten.tanh.default: "capped by a tanh",
    aten.clamp.default: "clamped",
    aten.clamp_min.default: "clamped",
    aten.clamp_max.default: "clamped",
    aten.native_dropout.default: "dropped out",
    aten.sigmoid.default: "put through a sigmoid",
    aten.relu.default: "put through a relu",
}
"""What operations do to scores that no selection attention does."""


def _selects(scores: Ref, masks: Masks, given: list[Value] | None = None) -> bool:
    """Whether another mask of the scores is a selection. ``given``: where the masks of scores go."""
    other, met = Masks(masks.fixed, masks.hints), [] if given is None else given
    try:
        Scores(scores, other, [], met).keys()
    except (Mismatch, Unsupported):
        return bool(other.seen)
    except NotOurs:
        met.clear()  # masked, but no scores
    return bool(other.seen)


class Cut(Exception):
    """Digits that must be split: (digits, size of the lower part)."""

    def __init__(self, places: list[tuple[list[Var], Size]]) -> None:
        super().__init__("split")
        self.places = places


def _large(digits: list[Var]) -> tuple[bool, int]:
    size = product_of(v.size for v in digits)
    return bool(size.symbols), size.factor


def _joined(digits: Sequence[Var]) -> Index:
    """The number whose digits these are."""
    return linear([var(v) for v in digits], [v.size for v in digits])


def _digits(size: Size, cuts: list[Size]) -> list[Var]:
    """Variables for a dim that is split at ``cuts``: products of the sizes of its lower digits."""
    digits, below = [], ONE
    for cut in [*cuts, size]:
        each = cut.over(below)
        if each is None:
            raise Unsupported
        if each != ONE or not cuts:
            digits.append(Var(each))
        below = cut
    return digits[::-1]


def _cut(cuts: list[list[Size]], dims: list[list[Var]], places: list[tuple[list[Var], Size]]) -> bool:
    """Whether a cut is new."""
    changed = False
    for digits, by in places:
        for d, own in enumerate(dims):
            if digits[-1] not in own:
                continue
            below = product_of(v.size for v in own[own.index(digits[-1]) + 1 :])
            cut = below.times(by)
            if cut not in cuts[d]:
                cuts[d].append(cut)
                cuts[d].sort(key=lambda s: (len(s.symbols), s.factor))
                changed = True
    return changed


def _places(part: Any) -> list[tuple[Var, Size]]:
    """Where a variable is split by a part of it."""
    path = []
    while isinstance(part, Part):
        path.append(part)
        part = part.of
    found, low = [], ONE
    for p in reversed(path):
        found.append((part, low.times(p.by)))
        if not p.mod:
            low = low.times(p.by)
    return found


def _aligned(value: Value, index: Sequence[Index]) -> Ref:
    """The element of a tensor that broadcasts to ``index``."""
    if len(value.shape) > len(index):
        raise NotOurs
    tail = index[len(index) - len(value.shape) :]
    return Ref(value, tuple(const(0) if s == ONE else i for s, i in zip(value.shape, tail, strict=True)))


def bare(ref: Ref) -> Ref:
    while (below := step(ref)) is not None:
        ref = below
    return ref


def is_scores(ref: Ref) -> bool:
    """Whether a sum of products is behind masks and scalings."""
    todo, seen, steps = [ref], set[Ref](), Steps("addends of the scores", ref.value)
    while todo:
        ref = Scaled(todo.pop()).end
        if ref in seen:
            continue
        seen.add(ref)
        steps.take()
        func, args = ref.value.func, ref.value.args
        if dot(ref) is not None:
            return True
        if func in _FILLS:
            todo.append(_broadcast(args[0], ref))
        elif func is aten.where.self:
            todo.append(_broadcast(args[1] if constant_of(args[2]) is not None else args[2], ref))
        elif func in (*_ADD, aten.sub.Tensor):
            todo += (_broadcast(a, ref) for a in args[:2] if isinstance(a, Value))
        elif func is aten.cat.default:
            todo += map(whole, args[0])
        elif func in _CHANGES and isinstance(args[0], Value):
            todo.append(_broadcast(args[0], ref))
    return False


def words(size: Size) -> str:
    """A size for a report."""
    return "*".join([*([str(size.factor)] if size.factor != 1 or not size.symbols else []), *size.symbols])
