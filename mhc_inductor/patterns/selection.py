"""Selection attention (spec: softmax(scale * q K.T) V over a union of key ranges) in normal form: what it looks like once
spelling is gone. Found from calls of scaled_dot_product_attention and from softmaxes; see :mod:`.keysets` for masks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .algebra import Ref, _broadcast, aten, contraction, number, operands, reduction
from .index import ONE, DynamicWidth, Index, Part, Size, Unsupported, Var, const, linear, var
from .intervals import Interval, Judge
from .keysets import CASTS, MULTIPLY, All, Any_, Given, KeyData, Masks, both, constant_of, eliminated, inner, uncast
from .linear import Key, Linear, of_index, variables_of
from .mhc import Mismatch
from .values import Value, Values, example

OP = "selection_attention"
SPARSE = "mask"
_DIVIDE = (aten.div.Tensor, aten.div.Scalar)
_ADD = (aten.add.Tensor, aten.add.Scalar)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where q, k or v lies: an element of a node's value, and the dtype in which the attention reads it."""

    ref: Ref
    dtype: torch.dtype


@dataclasses.dataclass
class Found:
    """One attention. ``dims`` are the digits (variables, most significant first) of each dim of ``out``."""

    out: Value
    dims: list[list[Var]]
    q: Ref
    k: Ref
    v: Ref
    d: Var
    t: Key
    scale: float
    keys: Any_
    fill: float
    dense: list[Value]
    masks: Masks
    intervals: list[Interval] = dataclasses.field(default_factory=list)
    batch: list[Var] = dataclasses.field(default_factory=list)
    groups: list[Var] = dataclasses.field(default_factory=list)
    heads: list[Var] = dataclasses.field(default_factory=list)
    query: list[Var] = dataclasses.field(default_factory=list)
    dtype: torch.dtype = torch.float32

    @property
    def dv(self) -> Var | None:
        return None


class NotOurs(Exception):
    """No selection, and nothing close to one."""


def sources(ref: Ref) -> Iterator[Source]:
    """The tensors that hold the same elements, the nearest first, behind views and casts."""
    dtype = ref.value.dtype
    while True:
        yield Source(ref, dtype)
        below = inner(ref)
        if below is None:
            return
        if below.value.dtype != dtype:
            wide, narrow = torch.finfo(dtype).bits, torch.finfo(below.value.dtype).bits
            if wide == narrow:
                return
            if narrow < wide:
                dtype = below.value.dtype
            elif ref.value.node is not None:
                return  # what the model rounded is what the op reads
        ref = below


class Scaled:
    """``factor * ref`` behind views, casts and products with numbers; ``met`` are the values on the way."""

    def __init__(self, ref: Ref) -> None:
        self.factor = 1.0
        self.met: list[Value] = []
        while True:
            self.met.append(ref.value)
            below = inner(ref)
            if below is None and (ref.value.func in MULTIPLY or ref.value.func in _DIVIDE) and not ref.value.kwargs:
                below = self._times(ref)
            if below is None:
                break
            ref = below
        self.ref = ref

    def _times(self, ref: Ref) -> Ref | None:
        a, b = operands(ref)
        if ref.value.func in MULTIPLY and isinstance(a, float):
            a, b = b, a
        if not isinstance(a, Ref) or not isinstance(b, float) or b == 0.0:
            return None
        self.factor *= b if ref.value.func in MULTIPLY else 1.0 / b
        return a


def dot(ref: Ref) -> tuple[Ref, Ref, list[Var]] | None:
    """(left, right, bound variables) of a sum of products."""
    contracted = contraction(ref)
    if contracted is not None:
        return contracted[0], contracted[1], [contracted[2]]
    reduced = reduction(ref)
    if reduced is None or reduced[2] != 1.0:
        return None
    summand, bound, _ = reduced
    while (below := inner(summand)) is not None:
        summand = below
    if summand.value.func not in MULTIPLY:
        return None
    a, b = operands(summand)
    return (a, b, bound) if isinstance(a, Ref) and isinstance(b, Ref) else None


class Recogniser:
    """Attentions of one graph."""

    def __init__(self, values: Values) -> None:
        self.values = values

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
            masks = Masks(self.values.fixed)
            element = _aligned(m, (*lead, s, var(t)))
            if m.dtype is torch.bool:
                keys, fill = masks.truth(element), -math.inf
            else:
                keys, fill = masks.additive(element)
                _check_added(fill, m.dtype)
            refs = (
                _aligned(q, (*lead, s, var(width))),
                _aligned(k, (*kv_lead, var(t), var(width))),
                _aligned(v, (*kv_lead, var(t), e)),
            )
            return Found(out, dims, *refs, width, t, scale, keys, fill, [m], masks)

        if given.get("dropout_p") not in (None, 0, 0.0):
            self._almost(build, out, "dropout of the attention weights")
        if given.get("is_causal"):
            raise NotOurs
        return self._refined(build, out, [out.shape[-3]] if False else None)

    def _grouped(self, digits: list[Var], k: Value) -> Index:
        """The group of a head, which is the digits above the heads of a group."""
        groups = k.shape[-3]
        total, at = ONE, len(digits)
        for at, digit in enumerate(digits):
            if total == groups:
                break
            total = total.times(digit.size)
        else:
            at = len(digits)
        if total == groups:
            return _joined(digits[:at])
        per = _product(v.size for v in digits).over(groups)
        if per is None:
            raise NotOurs
        raise Cut([(digits, per)])

    def _value(self, node: Any) -> Value:
        value = self.values.of(node) if isinstance(node, fx.Node) else None
        if not isinstance(value, Value):
            raise NotOurs
        return value

    # --- softmax written out ---

    def written(self, softmax: Value, out: Value, same: dict[Value, Value | None]) -> Found:
        """``out`` = softmax @ V. ``same``: values that are the softmax but for rows without keys, and their masks."""
        dim = softmax.args[1] % max(1, len(softmax.shape))

        def build(dims: list[list[Var]]) -> Found:
            index = tuple(_joined(digits) for digits in dims)
            summed = dot(_bare(Ref(out, index), same))
            if summed is None:
                raise NotOurs
            left, right, bound = summed
            a, b = _until(left, same), _until(right, same)
            if (a.value in same) == (b.value in same):
                raise NotOurs
            weights, v = (a, right) if a.value in same else (b, left)
            over = weights.index[dim]
            if [*over.terms] != [x for x in bound if x.size != ONE][:1] or len(over.terms) > 1:
                raise NotOurs
            size = softmax.shape[dim]
            t = Key(size)
            if over.terms:
                (old,) = over.terms
                weights, v = (_renamed_ref(r, old, t) for r in (weights, v))
            masks = Masks(self.values.fixed)
            keys: Any_ = [All()]
            fills: list[float] = []
            dense = [softmax, *same]
            scores, factor = self._scores(Ref(softmax.args[0], weights.index), masks, keys_ := [keys], fills, dense)
            found = dot(scores)
            if found is None:
                raise NotOurs
            sides = [Scaled(x) for x in found[:2]]
            factor *= sides[0].factor * sides[1].factor
            has = [t in variables_of(x.ref) for x in sides]
            if size == ONE:
                has = [False, True]
            if has[0] == has[1] or len(found[2]) != 1:
                raise NotOurs
            q, k = (x for x, _ in sorted(zip(found[:2], has, strict=True), key=lambda p: p[1]))
            scaled_q, scaled_k = (Scaled(x) for x in (q, k))
            d = found[2][0]
            for mask in {m for m in same.values() if m is not None}:
                del mask
            return Found(
                out, dims, scaled_q.ref, scaled_k.ref, v, d, t, factor, keys_[0], max(fills, default=-math.inf), dense, masks
            )

        return self._refined(build, out, None)

    def _scores(
        self, ref: Ref, masks: Masks, keys: list[Any_], fills: list[float], dense: list[Value]
    ) -> tuple[Ref, float]:
        """What a softmax is taken of: its scores (a sum of products), their factor; the mask goes into ``keys``."""
        factor = 1.0
        masked = 0
        while True:
            scaled = Scaled(ref)
            dense += scaled.met
            factor *= scaled.factor
            ref = scaled.ref
            value, func, args = ref.value, ref.value.func, ref.value.args
            if func in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
                fill = constant_of(args[2])
                self._fill(fill, fills, value, factor)
                keys[0] = both(keys[0], masks.truth(_broadcast(args[1], ref), False))
                ref = _broadcast(args[0], ref)
            elif func is aten.where.self:
                when, a, b = args
                want = constant_of(b) is not None
                fill = constant_of(b if want else a)
                self._fill(fill, fills, value, factor)
                keys[0] = both(keys[0], masks.truth(_broadcast(when, ref), want))
                ref = _broadcast(a if want else b, ref)
            elif func in (*_ADD, aten.sub.Tensor) and len(args) == 2 and not value.kwargs:
                sides = [_broadcast(a, ref) for a in args if isinstance(a, Value)]
                if len(sides) != 2:
                    raise NotOurs
                own = [_is_scores(s) for s in sides]
                if own[0] == own[1] or (func is aten.sub.Tensor and own[1]):
                    raise NotOurs if masked == 0 else Unsupported
                scores, mask = sides if own[0] else sides[::-1]
                if func is aten.sub.Tensor:
                    raise Unsupported
                try:
                    found, fill = masks.additive(mask)
                except (KeyData, Unsupported):
                    if _reads_only_positions(mask):
                        raise NotOurs from None
                    raise Bias(mask.value) from None
                _check_added(fill, mask.value.dtype)
                if factor <= 0:
                    raise NotOurs
                fills.append(fill)
                keys[0] = both(keys[0], found)
                ref = scores
            else:
                if not fills:
                    raise NotOurs
                return ref, factor
            masked += 1

    def _fill(self, fill: float | None, fills: list[float], value: Value, factor: float) -> None:
        if fill is None or factor <= 0:
            raise NotOurs
        if not fill <= -1e4:
            raise Mismatch(f"scores of other keys are set to {fill:g}; expected -inf", value)
        fills.append(fill)

    # --- digits of the result's dims, and what they are ---

    def _almost(self, build: Callable[[list[list[Var]]], Found], out: Value, reason: str) -> None:
        """Raises Mismatch with ``reason`` where the rest is a selection, else NotOurs."""
        try:
            self._refined(build, out, None)
        except (Mismatch, Unsupported):
            raise NotOurs from None
        raise Mismatch(reason, out)

    def _refined(self, build: Callable[[list[list[Var]]], Found], out: Value, _: Any) -> Found:
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
            parts = [a for ref in (found.q, found.k, found.v) for i in ref.index for a in i.atoms()]
            places = [place for a in parts if isinstance(a, Part) for place in _places(a)]
            if not places or not _cut(cuts, dims, [([root], by) for root, by in places]):
                break
        self._roles(found)
        return found

    def _roles(self, found: Found) -> None:
        keys = [e for conj in found.keys if (e := eliminated(conj)) is not None]
        found.keys = keys
        masked = {v for conj in keys for v in _free(conj)} - {found.t}
        ours = {v for digits in found.dims for v in digits}
        held = (variables_of(found.k) | variables_of(found.v)) & ours
        asked = variables_of(found.q) & ours
        if not _whole(found):
            raise NotOurs
        shared = [v for digits in found.dims for v in digits if v in held and v in asked]
        features = [v for digits in found.dims for v in digits if v in held and v not in asked]
        if len(features) != 1 or features[0] not in variables_of(found.v) or features[0] in variables_of(found.k):
            raise NotOurs
        found.features = features  # type: ignore[attr-defined]
        rows: list[list[Var]] = []
        for digits in found.dims:
            own = [v for v in digits if v in asked and v not in held]
            if any(v in held for v in digits):
                found.heads += own
            elif own:
                rows.append(own)
        judge = Judge(found.masks, found.t)
        found.intervals = judge.intervals(keys)
        depends = [r for r in rows if any(v in masked for v in r)]
        if any(v in masked for v in found.heads) or len(depends) > 1:
            raise Mismatch("the mask differs between the heads of a group", found.dense[-1])
        if not depends and rows and not any(s == ONE for s in found.out.shape):
            depends = [max(rows, key=lambda r: _hint(r))]
        found.query = depends[0] if depends else []
        found.heads += [v for r in rows if r not in depends for v in r]
        found.batch, found.groups = shared[:1], shared[1:]
        if len(shared) == 1:
            found.batch, found.groups = [], shared
        position = of_index(_joined(found.query))
        judge.check(found.intervals, position, self._size(found.query), found.t.size)

    def _size(self, digits: list[Var]) -> Size:
        return _product(v.size for v in digits)


class Cut(Exception):
    """Digits that must be split: (digits, size of the lower part)."""

    def __init__(self, places: list[tuple[list[Var], Size]]) -> None:
        super().__init__("split")
        self.places = places


class Bias(Exception):
    """Something is added to the scores that is no mask."""

    def __init__(self, value: Value) -> None:
        super().__init__("a bias")
        self.value = value


def _hint(digits: list[Var]) -> tuple[bool, int]:
    size = _product(v.size for v in digits)
    return bool(size.symbols), size.factor


def _product(sizes: Iterable[Size]) -> Size:
    total = ONE
    for size in sizes:
        total = total.times(size)
    return total


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
            below = _product(v.size for v in own[own.index(digits[-1]) + 1 :])
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


def _free(conj: All) -> set[Var]:
    found: set[Var] = set()
    for x in conj.literals:
        found |= variables_of(x.ref) if isinstance(x, Given) else x.value.variables()
    return found - set(conj.bound)


def _aligned(value: Value, index: Sequence[Index]) -> Ref:
    """The element of a tensor that broadcasts to ``index``."""
    if len(value.shape) > len(index):
        raise NotOurs
    tail = index[len(index) - len(value.shape) :]
    return Ref(value, tuple(const(0) if s == ONE else i for s, i in zip(value.shape, tail, strict=True)))


def _until(ref: Ref, stop: Any) -> Ref:
    """``ref`` behind views and casts, as far as a value of ``stop``."""
    while ref.value not in stop:
        below = inner(ref)
        if below is None:
            break
        ref = below
    return ref


def _bare(ref: Ref, same: Any) -> Ref:
    return _until(ref, same)


def _renamed_ref(ref: Ref, old: Any, new: Var) -> Ref:
    from .linear import atom, replaced

    return replaced(ref, old, atom(new))


def _is_scores(ref: Ref) -> bool:
    """Whether scores are behind masks and scalings."""
    for _ in range(32):
        ref = Scaled(ref).ref
        func, args = ref.value.func, ref.value.args
        if dot(ref) is not None:
            return True
        if func in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
            ref = _broadcast(args[0], ref)
        elif func is aten.where.self:
            ref = _broadcast(args[1] if constant_of(args[2]) is not None else args[2], ref)
        elif func in _ADD:
            sides = [_broadcast(a, ref) for a in args[:2] if isinstance(a, Value)]
            return any(_is_scores(s) for s in sides)
        else:
            return False
    return False


def _reads_only_positions(ref: Ref) -> bool:
    return constant_of(uncast(ref).value) is not None


def _check_added(fill: float, dtype: torch.dtype) -> None:
    # A smaller one leaves something of the scores in rows without keys.
    if fill > -1e8 and not (dtype.is_floating_point and fill <= torch.finfo(dtype).min):
        raise Unsupported


def _whole(found: Found) -> bool:
    """Whether q and k are multiplied over their whole width."""
    return all(found.d in variables_of(r) or found.d.size == ONE for r in (found.q, found.k))
