# SPDX-License-Identifier: Apache-2.0
"""Checks that nothing depends on the rank of a key among the chosen ones: the op returns them by position.

An element that is computed from the choice belongs to one chosen key. Which one, its rank, is an index in variables of
the element. Gathers, comparisons and masks keep the rank; scatters and sums over it end it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.graph.bounds import Steps, TooLarge
from mhc_inductor.routing.graph.expressions import Ref, _broadcast, _dim, _reduced, aten, contraction, joined, whole
from mhc_inductor.routing.graph.index import ONE, Index, Size, Unsupported, Var, bound_of, product_of, var
from mhc_inductor.routing.graph.linear import variables_of
from mhc_inductor.routing.graph.values import Value, values_in
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.elements import ALL, ANY, CASTS, FILLS, SUMS, argument, constant_of, inner, uncast
from mhc_inductor.routing.masks.scatters import GATHERS, PUTS, SCATTERS, looked_up
from mhc_inductor.routing.operators.index.matches import Found

_MOST = 4096  # nodes that use the choice
_SET = {*SUMS, *ANY, *ALL, aten.mean.dim, aten.prod.dim_int, aten.logsumexp.default, aten.max.dim, aten.min.dim}
_SOFTMAXES = {aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default}
_SCATTERS = (*SCATTERS, aten.scatter_add.default, aten.scatter.value_reduce, aten.scatter_reduce.two)
_PLACES = {aten.argmax.default, aten.argmin.default}
_SORTS = {aten.sort.default, aten.sort.stable, aten.topk.default}
_RUNNING = {aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.cummin.default}
_ORDERED = {*_RUNNING, *_SORTS, aten.flip.default, aten.roll.default}
"""Ops in which the order along some dims counts, all dims if none is given."""
_SHAPES = {aten.empty_like.default, aten.rand_like.default, aten.randn_like.default, aten.new_empty.default}
_UNIFORM = {aten.full.default, aten.full_like.default, aten.new_full.default}
_UNKNOWN = "the chosen keys are used in a way in which their order may count; expected masks, scatters, gathers and sums of them"
_ORDER = ", the best first, where the op returns them by position; expected uses in which their order does not count"
_PART = f"some of the chosen keys are read by their place in what topk returns{_ORDER}"
_CALL = "scaled_dot_product"


def ranked_outside(view: View, found: Found, ordered: bool) -> bool:
    """Returns whether the chosen keys leave the graph in an order, which whoever reads them there may use.

    Args:
        view: the graph.
        found: the choice.
        ordered: whether ``topk`` returns the chosen keys by falling score.

    Raises:
        Mismatch: if some use of the chosen keys in the graph depends on their rank.
    """
    count, outside = found.outs[0].shape[-1], False
    if not ordered or count == ONE:
        return False
    ranks = _Ranks(found.outs)
    todo = [view.order[node] for node in ranks.reached]
    seen = set(todo)
    while todo:
        # In graph order: the operands of a node are known before the node.
        node = view.nodes[heapq.heappop(todo)]
        value = view.values.of(node)
        if not ranks.reach(node, value):
            outside = outside or (isinstance(value, Value) and value.func is None and not _takes_a_set(node))
            continue
        outside = outside or any(map(_leaves, node.users))
        for at in (view.order[user] for user in node.users if user in view.live and user.op.startswith("call_")):
            if at not in seen:
                seen.add(at)
                heapq.heappush(todo, at)
        if len(seen) > _MOST:
            raise TooLarge("uses of the chosen keys", _MOST, found.outs[0])
    return outside


def _leaves(user: fx.Node) -> bool:
    """Returns whether another graph reads what ``user`` reads: that of the caller, or the body of a higher-order op."""
    return user.op == "output" or isinstance(user.target, compat.HigherOrderOperator)


def _takes_a_set(node: fx.Node) -> bool:
    """Returns whether ``node`` is a custom op, such as a sparse attention kernel: these take chosen keys as a set.

    Whatever else routing cannot follow, such as a write into a buffer, may keep the keys for someone who reads the best.
    """
    packet = getattr(node.target, "overloadpacket", node.target)
    return isinstance(packet, compat.routing.OpOverloadPacket) and packet.__module__ != "torch._ops.aten"


class _Ranks:
    """The ranks of elements that are computed from the choice ``outs``."""

    def __init__(self, outs: Sequence[Value]) -> None:
        self.dims = {v: len(v.shape) - 1 for v in outs}
        """The values with a dim of ranks, and which one it is."""
        self.reached: dict[fx.Node, bool] = {v.node: True for v in outs if v.node is not None}
        """The nodes that use the choice, and whether their elements have a rank."""
        self.steps = Steps("uses of the chosen keys", outs[0])

    def reach(self, node: fx.Node, value: Any) -> bool:
        """Takes in a node that uses the choice. Returns whether its elements have a rank. Raises Mismatch."""
        self.reached[node] = True
        if not isinstance(value, Value):
            return isinstance(value, tuple)  # its parts are nodes of their own
        if value.func is None:
            self.reached[node] = False  # an op that routing does not know: it takes the keys as a set
            return False
        try:
            rank = self.of(at := whole(value))
        except TooLarge:
            raise
        except Unsupported:
            raise Mismatch(_UNKNOWN, value) from None
        self.reached[node] = rank is not None
        if rank in at.index:
            self.dims[value] = at.index.index(rank)
        return rank is not None

    def of(self, ref: Ref) -> Index | None:
        """Returns the rank of an element, None if it has none. Raises Mismatch and Unsupported."""
        self.steps.take()
        value, func, args = ref.value, ref.value.func, ref.value.args
        if value in self.dims:
            return self._own(ref, self.dims[value])
        if (
            (value.node is not None and not self.reached.get(value.node))
            or func in _SHAPES | _UNIFORM
            or constant_of(value) is not None
        ):
            return None
        if func is None:
            raise Unsupported
        below = inner(ref)
        if below is not None:
            return self.of(below)
        if func is aten.cat.default:
            return self._joined(ref)
        if func is aten.constant_pad_nd.default:
            return self._padded(ref)
        read = _read(ref)
        if read is not None:
            return self._without(self._together(read.elements, ref), read, value)
        if any(map(self._ranked, values_in(args))):
            raise Unsupported
        return None

    def _ranked(self, value: Value) -> bool:
        return self.of(whole(value)) is not None

    def _own(self, ref: Ref, dim: int) -> Index:
        """Returns the rank of an element of a value with ranks in ``dim``. Raises Mismatch if some are left out."""
        rank = ref.index[dim]
        if product_of(bound_of(a) for a in rank.atoms()) != ref.value.shape[dim]:
            raise Mismatch(_PART, ref.value)
        return rank

    def _together(self, refs: Iterable[Ref], at: Ref) -> Index | None:
        """Returns the rank of elements that are computed with each other. Raises Mismatch and Unsupported."""
        refs = list(refs)
        ranks = [self.of(ref) for ref in refs]
        own = dict.fromkeys(rank for rank in ranks if rank is not None)
        if not own:
            return None
        if len(own) > 1:
            raise Unsupported
        (rank,) = own
        if any(_varies(ref, rank) for ref, r in zip(refs, ranks, strict=True) if r is None):
            raise _by_rank(at.value)
        return rank

    def _joined(self, ref: Ref) -> Index | None:
        d, pieces = joined(ref.value)
        found, start = None, 0
        for piece in pieces:
            rank = self._piece(ref, piece, {d: start})
            if rank is not None and found not in (None, rank):
                raise Unsupported
            found = rank if rank is not None else found
            start = start + piece.shape[d].factor if not piece.shape[d].symbols else 0
        return found

    def _padded(self, ref: Ref) -> Index | None:
        x, pads = ref.value.args[:2]
        # The sign of a dynamic padding is guarded by the op itself.
        pads = [compat.routing.hint(p) for p in pads]
        places = {len(x.shape) - 1 - k: pads[2 * k] for k in range(len(pads) // 2)}
        if min(pads) < 0:
            raise Unsupported
        return self._piece(ref, x, places)

    def _piece(self, ref: Ref, piece: Value, starts: dict[int, int]) -> Index | None:
        """Returns the rank of an element that may lie in a piece, which starts at ``starts`` in some dims.

        Along these dims every place counts as a rank of its own. Raises Mismatch if the piece is not taken whole.
        """
        own = {d: Var(piece.shape[d]) for d in starts}
        rank = self.of(Ref(piece, tuple(var(own[d]) if d in own else i for d, i in enumerate(ref.index))))
        for d, v in own.items():
            if rank is None or v not in rank.variables():
                continue
            at = ref.index[d]
            size = product_of(bound_of(a) for a in at.atoms())
            cut = not size.symbols and not v.size.symbols and size.factor < starts[d] + v.size.factor
            if rank.variables() != {v} or None in at.terms or cut:
                raise Unsupported
            return at
        return rank

    def _without(self, rank: Index | None, read: Read, at: Value) -> Index | None:
        """Returns the rank of what is computed from elements of this rank. Raises Mismatch and Unsupported."""
        own = set() if rank is None else rank.variables()
        if not own.isdisjoint(read.in_order):
            raise _by_rank(at)
        if own.isdisjoint(read.as_set):
            return rank
        if not own <= {*read.as_set}:
            raise Unsupported
        return None


class Read(NamedTuple):
    """What an element is computed from: ``elements``, at every value of some variables.

    ``as_set``: those over which a sum or the like is taken. ``in_order``: those whose order counts.
    """

    elements: Sequence[Ref]
    as_set: Sequence[Var] = ()
    in_order: Sequence[Var] = ()


def _read(ref: Ref) -> Read | None:
    """Returns what an element of an op's result is computed from, None for an unknown op. Raises Unsupported."""
    func, args = ref.value.func, ref.value.args
    rule = _RULES.get(func, _attended if _CALL in func.__name__ else None)
    if rule is not None:
        return rule(ref)
    if (contracted := contraction(ref)) is not None:
        left, right, k = contracted
        return Read([left, right], [k])
    if torch.Tag.pointwise in func.tags or func in FILLS or func in CASTS:
        return Read([_broadcast(a, ref) for a in args if isinstance(a, Value)])
    return None


def _stacked(ref: Ref) -> Read:
    d = _dim(ref.value, argument(ref.value, "dim"))
    index = (*ref.index[:d], *ref.index[d + 1 :])
    return Read([Ref(piece, index) for piece in ref.value.args[0]], in_order=[*ref.index[d].variables()])


def _embedded(ref: Ref) -> Read:
    table, index = ref.value.args[:2]
    row = Var(table.shape[0])
    return Read([Ref(index, ref.index[:-1]), Ref(table, (var(row), ref.index[-1]))], in_order=[row])


def _gathered(ref: Ref) -> Read:
    places: list[Ref] = []
    fresh: list[Var] = []

    def place(at: Ref, x: Value, d: int, wraps: bool) -> Index:
        places.append(at)
        fresh.append(Var(x.shape[d]))
        return var(fresh[-1])

    below = looked_up(ref, place)
    if below is None:
        raise Unsupported
    return Read([below, *places], in_order=fresh)


def _scattered(ref: Ref) -> Read:
    x, d, index, *source = ref.value.args
    d = _dim(x, d)
    own = {k: Var(size) for k, size in enumerate(index.shape) if k == d or size != x.shape[k]}
    at = tuple(var(own[k]) if k in own else i for k, i in enumerate(ref.index))
    written = [index, *(a for a in source if isinstance(a, Value) and a.shape)]
    others = [v for k, v in own.items() if k != d]
    return Read([*(Ref(a, at) for a in written), whole(x)], [own[d]], [*others, *variables_of(whole(x))])


def _put(ref: Ref) -> Read:
    """Reads a write at all chosen keys: what it gives has no rank."""
    x, indices, values = ref.value.args[:3]
    given = [i for i in (*indices, values) if isinstance(i, Value)]
    if any(i.dtype is torch.bool for i in given[:-1]):
        raise Unsupported
    longest = max(given, key=lambda i: len(i.shape))
    spread = [next((s for s in sizes if s != ONE), ONE) for sizes in _aligned([i.shape for i in given])]
    at = Ref(longest, tuple(var(Var(s)) for s in spread))
    return Read([*(_broadcast(i, at) for i in given), whole(x)], [*variables_of(at)], [*variables_of(whole(x))])


def _ordered(ref: Ref) -> Read:
    x = ref.value.args[0]
    given = argument(ref.value, "dim", "dims")
    dims = {_dim(x, d) for d in (given if isinstance(given, (list, tuple)) else [given])} or {*range(len(x.shape))}
    along = {d: Var(x.shape[d]) for d in dims}
    read = [Ref(x, tuple(var(along[d]) if d in dims else i for d, i in enumerate(ref.index)))]
    # Keys that are sorted again are the same whatever their order was.
    again = ref.value.func in _SORTS and ref.value.out == 0
    return Read(read, [*along.values()]) if again else Read(read, in_order=[*along.values()])


def _summed(ref: Ref) -> Read:
    operand, bound = _reduced(ref)
    return Read([operand], in_order=bound) if ref.value.out or ref.value.func in _PLACES else Read([operand], bound)


def _attended(ref: Ref) -> Read:
    """Reads scaled_dot_product_attention, a sum over the keys and the features."""
    value = ref.value
    q, k, v = (argument(value, name) for name in ("query", "key", "value"))
    mask = argument(value, "attn_mask", "attn_bias")
    *lead, s, e = ref.index
    other_ranks = len({len(x.shape) for x in (q, k, v)}) > 1
    if value.out or argument(value, "is_causal") or argument(value, "dropout_p") or other_ranks:
        raise Unsupported
    t, d = Var(k.shape[-2]), Var(k.shape[-1])
    places = [(q, s, var(d)), (k, var(t), var(d)), (v, var(t), e)]
    places += [(mask, s, var(t))] if isinstance(mask, Value) else []
    return Read([_broadcast(x, Ref(value, (*lead, *tail))) for x, *tail in places], [t, d])


def _aligned(shapes: Sequence[Sequence[Size]]) -> list[list[Size]]:
    """Returns the sizes of each dim of the broadcast of some shapes."""
    longest = max(map(len, shapes))
    padded = [[*(ONE,) * (longest - len(shape)), *shape] for shape in shapes]
    return [list(sizes) for sizes in zip(*padded, strict=True)]


def _varies(ref: Ref, rank: Index) -> bool:
    """Checks whether an element may differ with the rank."""
    ref = uncast(ref)
    shared = any(_overlap(a, b) for i in ref.index for a in i.atoms() for b in rank.atoms())
    return shared and ref.value.func not in _UNIFORM and constant_of(ref.value) is None


def _overlap(a: Any, b: Any) -> bool:
    """Checks whether two atoms may have digits of one variable in common."""
    (one, low, high), (other, start, end) = map(_digits, (a, b))
    return one is other and start.over(high) is None and low.over(end) is None


def _digits(atom: Any) -> tuple[Var, Size, Size]:
    """Returns the variable of an atom, and the units of its lowest digit and of the first above it."""
    if isinstance(atom, Var):
        return atom, ONE, atom.size
    variable, low, high = _digits(atom.of)
    return (variable, low, low.times(atom.by)) if atom.mod else (variable, low.times(atom.by), high)


def _by_rank(value: Value) -> Mismatch:
    reason = f"the chosen keys are combined with something else by their place in what topk returns{_ORDER}"
    return Mismatch(reason, value)


_RULES: dict[Any, Callable[[Ref], Read]] = {
    aten.stack.default: _stacked,
    aten.embedding.default: _embedded,
    **dict.fromkeys(GATHERS, _gathered),
    **dict.fromkeys(_SCATTERS, _scattered),
    **dict.fromkeys(PUTS, _put),
    **dict.fromkeys(_ORDERED, _ordered),
    **dict.fromkeys((*_SET, *_PLACES), _summed),
    **dict.fromkeys(_SOFTMAXES, lambda ref: Read([Ref(ref.value.args[0], ref.index)])),
}
