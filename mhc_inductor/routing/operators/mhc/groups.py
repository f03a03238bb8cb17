# SPDX-License-Identifier: Apache-2.0
"""The formulas around one norm of streams: coefficients, collapse, logits, and the expand-and-mix that follows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from torch import fx

from mhc_inductor.ops.checks import MAX_STREAMS
from mhc_inductor.routing.edit import node_of
from mhc_inductor.routing.graph.expressions import VIEWS, aten, contraction, is_cast, whole
from mhc_inductor.routing.graph.expressions import chain as chain_of
from mhc_inductor.routing.graph.index import ONE, Size, Unsupported, product_of
from mhc_inductor.routing.graph.values import Value, reached
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.mhc import formula as mhc
from mhc_inductor.routing.operators.mhc import mixing
from mhc_inductor.routing.operators.mhc.formula import NOTHING, PARTS, Affine, Coefficient, family, square_matrices
from mhc_inductor.routing.operators.mhc.matches import CollapseUse, Post, PostUse, Pre, Sinkhorn
from mhc_inductor.routing.operators.mhc.mixing import Known
from mhc_inductor.routing.operators.mhc.norm import Kept, Norm
from mhc_inductor.routing.operators.mhc.sinkhorn import Chain, last_of

if TYPE_CHECKING:
    from mhc_inductor.routing.operators.mhc.search import Search

FEW = MAX_STREAMS * (MAX_STREAMS + 2)
"""The most rows that coefficients may have: n + n + n * n with n = MAX_STREAMS."""
_TRIED = 48
"""The most values that are taken for logits h_res: each is followed to the projection by itself."""
_LIGHT = {
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.pow.Tensor_Scalar,
    aten.rsqrt.default,
    aten.sqrt.default,
    aten.reciprocal.default,
    aten.add.Tensor,
    aten.add.Scalar,
}
"""Elementwise operations that the search passes in tensors as large as the streams."""
_SEVERAL_WEIGHTS = (
    "{} weights a stream come out of one sigmoid, as where streams are split into fractions or a matrix collapses them; "
    "expected one weight a stream"
)
_UNFIT = (
    "h_pre is {:g} * sigmoid(alpha * z + bias) + {:g}; expected sigmoid(alpha * z + bias) + hc_eps with hc_eps >= 0, "
    "and an h_post where other streams are collapsed"
)
_NO_POST = "no h_post = post_mult * sigmoid(alpha * z + bias) next to h_pre and h_res"


def rows_of(norm: Norm) -> int:
    """Returns the number of rows of x [..., rows, D] where the norm is over all rows of a token, else 0.

    Where the model flattened the streams before rounding them, the rows are found behind the rounding.
    """
    for ref in chain_of(whole(norm.x)):
        shape = ref.value.shape
        if len(shape) >= 3 and not shape[-2].symbols and shape[-2].times(shape[-1]) == Size(norm.width):
            return shape[-2].factor
    return 0


def of_streams(norm: Norm) -> bool:
    """Checks whether a norm looks like one over all streams of a token: 2 to MAX_STREAMS rows."""
    return 2 <= rows_of(norm) <= MAX_STREAMS


def streams_behind(value: Value) -> Norm | None:
    """Returns the norm, over all streams of a token, whose projection is an addend of ``value``; None without one."""
    return mhc.norm_behind(value, fits=of_streams)


def gate_of_streams(value: Value) -> Norm | None:
    """Returns the norm where another function than a sigmoid is taken of a projection of streams, or None."""
    if value.func not in PARTS or value.func is aten.div.Tensor or not value.shape or value.shape[-1].factor > FEW:
        return None
    norm = streams_behind(value.args[0])
    if norm is None or product_of(value.shape) == norm.count.times(Size(rows_of(norm) ** 2)):
        return None  # a matrix, of which Sinkhorn iterations take a softmax
    return norm


def applied(value: Value) -> str:
    """Returns what a near miss says of a function of the logits that is no sigmoid."""
    name = PARTS.get(value.func) or getattr(value.func, "overloadpacket", value.func).__name__
    return f"{name} is applied to the logits; {mhc.EXPECTED}"


class Group:
    """Finds the formulas around one norm. ``seeds`` are the nodes of the sigmoids of its projections."""

    def __init__(self, search: Search, norm: Norm, seeds: list[fx.Node]) -> None:
        self.search = search
        self.view = search.view
        self.norm = norm
        self.seeds = seeds
        self.kept = Kept(norm.x)
        self.coefficients: dict[Value, Coefficient] = {}
        self.failed: list[tuple[int, Mismatch]] = []
        self.uses: list[CollapseUse] = []
        self._per_token: dict[tuple[Size, ...], int | None] = {}
        streams = len(norm.x.shape) >= 2 and not norm.x.shape[-2].symbols
        rows = norm.x.shape[-2] if streams and norm.x.shape[-2].times(norm.x.shape[-1]) == Size(norm.width) else None
        self.few = FEW if rows is None else rows.factor * (rows.factor + 2)

    def run(self, avoid: set[fx.Node]) -> None:
        """Finds the formulas and adds to ``avoid`` the nodes that other searches must skip. Raises Unsupported."""
        search = self.search
        nodes = search.reached(self.seeds, self._near, 600)
        self._collect(nodes)
        reasons: list[Mismatch] = []
        pre = self._collapse(nodes, reasons) or self._coefficients_alone() or self._coefficients_given_away()
        if pre is None:
            self._without_pre([m for _, m in self.failed] + reasons, avoid)
            return
        self._choose_post(pre)
        start = node_of(self.norm.x)
        try:
            _Residual(self, pre).choose(search.reached([start], self._near, 1500))
            for per, mismatch in self.failed:
                if per == pre.n:
                    raise mismatch
        except Mismatch as mismatch:
            search.miss("mhc_pre", mismatch, pre.collapsed)
            avoid.update(search.reached([start], self._near))
            return
        unfit = _unfit(pre)
        if unfit is not None:
            self._without_pre([unfit], avoid)
            return
        self._enter(pre, avoid)

    def _without_pre(self, reasons: list[Mismatch], avoid: set[fx.Node]) -> None:
        """Reports why there is no pre. The post and the iterations can be routed without one."""
        around = set() if self._lone_post() else avoid
        self._missed(reasons, around)

    def _enter(self, pre: Pre, avoid: set[fx.Node]) -> None:
        search = self.search
        search.found.append(pre)
        search.found += self.uses
        avoid.update(v.node for v in pre.steps if v.node is not None)
        if pre.mixed is not None and pre.chain is not None and not pre.fold:
            search.found.append(Sinkhorn(pre.chain, pre.mixed, pre))
        if pre.foreign is not None:
            search.miss("mhc_sinkhorn", pre.foreign, pre.h_res or pre.collapsed)
        if pre.post is not None:
            self._find_post(pre)
        elif pre.res is not None:
            search.miss("mhc_post", self._other_gate() or Mismatch(_NO_POST), pre.collapsed)

    @functools.cached_property
    def _streams_of_x(self) -> int:
        """The number of streams that the shape of x shows; 0 where it shows none."""
        return rows_of(self.norm) if of_streams(self.norm) else 0

    def _one_a_stream(self, n: int) -> dict[Value, Coefficient]:
        """Returns the coefficients of n rows a token, in the order of phi's rows: those that may weigh streams."""
        return {v: c for v, c in self.coefficients.items() if c.affine.rows == n}

    # --- neighbourhoods ---

    def per_token(self, node: fx.Node) -> int | None:
        """Returns the number of elements per token of a tensor node; None where it is not a fixed number."""
        value = self.view.values.of(node)
        if not isinstance(value, Value):
            return None
        if value.shape not in self._per_token:
            per = product_of(value.shape).over(self.norm.count)
            self._per_token[value.shape] = per.factor if per is not None and not per.symbols else None
        return self._per_token[value.shape]

    def _light(self, node: fx.Node) -> bool:
        value = self.view.values.of(node)
        if not isinstance(value, Value):
            return isinstance(value, tuple)
        if value.func in _LIGHT or value.func in VIEWS or is_cast(value):
            return True
        contracted = contraction(whole(value)) if value.shape else None
        return contracted is not None and contracted[2].size == ONE  # an outer product

    def _near(self, node: fx.Node) -> bool:
        """Checks whether the search continues past ``node``.

        It passes tensors as large as x or h_in only by views, casts and products, and never passes x_out.
        """
        value, per = self.view.values.of(node), self.per_token(node)
        if (per is None and isinstance(value, tuple)) or (per is not None and per <= self.few):
            return True
        total = isinstance(value, Value) and value.func in (aten.add.Tensor, aten.add.Scalar)
        return self._light(node) and not (total and per == self.norm.width)

    # --- coefficients and collapse ---

    def _collect(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            value, per = self.view.value(node), self.per_token(node)
            if value is None or per is None or per > FEW:
                continue
            try:
                self.coefficients[value] = mhc.coefficient(value, self.kept)
            except Mismatch as mismatch:
                # Skip permuted views of a coefficient: they are not separate candidates.
                views = any(r.value in self.coefficients for r in chain_of(whole(value)))
                if mismatch.reason not in (NOTHING, mhc.SEVERAL) and not views and not self._of_another(mismatch):
                    self.failed.append((per, mismatch))
            except Unsupported:
                continue

    def _of_another(self, mismatch: Mismatch) -> bool:
        """Checks whether a mismatch is of a projection of other streams, with a norm of their own."""
        if mismatch.reason != mhc.APART or mismatch.value is None:
            return False
        norm = mhc.norm_behind(mismatch.value)
        return norm is not None and norm.x is not self.norm.x

    def _collapse(self, nodes: list[fx.Node], reasons: list[Mismatch]) -> Pre | None:
        """Returns the first collapse of x by some of the coefficients, or None; adds why others are none."""
        weights: dict[int, list[Value]] = {}
        for weight, c in self.coefficients.items():
            weights.setdefault(c.affine.rows, []).append(weight)
        for n, each in weights.items():
            known = Known(Kept(self.norm.x, each), each)
            for use in self._sums(nodes, n, known, reasons) if 2 <= n <= MAX_STREAMS else ():
                return Pre(self.norm, n, self.coefficients[use.weight], use.h_in)
        return None

    def _sums(self, nodes: Iterable[fx.Node], n: int, known: Known, reasons: list[Mismatch]) -> Iterator[CollapseUse]:
        """Yields those of the nodes that are weighted sums of n streams; adds why others are none."""
        d = Size(self.norm.width).over(Size(n))
        for node in nodes:
            value = self.view.value(node)
            if d is not None and value is not None and self.per_token(node) == d.factor:
                try:
                    yield mixing.collapse(value, n, d.factor, known)
                except Mismatch as mismatch:
                    reasons.append(mismatch)
                except Unsupported:
                    continue

    def _coefficients_alone(self) -> Pre | None:
        """Returns the coefficients where h_pre collapses other streams than x, as in a single pass, or None."""
        n = self._streams_of_x
        weights = self._one_a_stream(n)
        uses = self._collapses([*map(node_of, weights)], n, weights, None)
        if not uses:
            return None
        mine = weights[uses[0].weight]
        self.uses = [use for use in uses if _piece(weights[use.weight]) == _piece(mine)]
        alike = [v for v, c in weights.items() if _piece(c) == _piece(mine)]
        same = sorted(alike, key=lambda v: self.view.defined(node_of(v)))
        x = self.norm.x
        # The first site's weights are the model's own.
        self.uses += self._collapses([node_of(x)], n, None, x)
        return Pre(self.norm, n, mine, None, same)

    def _coefficients_given_away(self) -> Pre | None:
        """Returns the coefficients where h_pre leaves the graph, as where every layer is compiled by itself, or None.

        h_pre is then what the expand-and-mix of x does not use, or the one without a factor where both leave.
        """
        n = self._streams_of_x
        each = self._one_a_stream(n)
        parts: dict[object, dict[Value, Coefficient]] = {}
        for value, c in each.items():
            parts.setdefault((*c.affine.rows_at, *c.affine.key), {})[value] = c
        leaving = [part for part in parts.values() if not self._multiplies(part, n)]
        if len(parts) != 2 or not leaving:
            return None
        found = None
        with contextlib.suppress(Mismatch):
            found = self._post_of(n, set(each))
        if len(leaving) == 1 and (found is None or found[0].matrix is None or found[0].h_post in leaving[0]):
            return None
        last = [part[self._along(part)[-1]] for part in leaving]
        mine = next((c for c in last if c.mult == 1.0), last[0])
        return Pre(self.norm, n, mine, None, [v for v, c in each.items() if _piece(c) == _piece(mine)])

    def _multiplies(self, weights: Iterable[Value], n: int) -> bool:
        """Checks whether weights, or what is computed of them, multiply something as wide as a stream."""
        starts, width = [*map(node_of, weights)], self.norm.width // n
        nodes = self.search.reached(starts, lambda node: (self.per_token(node) or width) < width, 200)
        return any((self.per_token(node) or 0) >= width for node in nodes)

    def _collapses(
        self, starts: list[fx.Node], n: int, weights: Collection[Value] | None, x: Value | None
    ) -> list[CollapseUse]:
        """Returns the collapses after ``starts`` that no other formula has, without what reads one of them."""
        known = {use.h_in for use in (*self.search.found, *self.uses) if isinstance(use, CollapseUse)}
        found, nodes = [], self.search.reached(starts, self._near, 600)
        for use in self._sums(nodes, n, Known(weights=weights), []) if n else ():
            again = not known.isdisjoint(r.value for r in chain_of(whole(use.h_in)))
            if not again and (x is None or use.x is x):
                found.append(use)
                known.add(use.h_in)
        return found

    def _choose_post(self, pre: Pre) -> None:
        """Chooses the coefficient that is h_post: the last scaling of its sigmoid that all other uses go through."""
        mine = pre.pre.affine
        others = {
            v: c
            for v, c in self._one_a_stream(pre.n).items()
            if c.affine.rows_at != mine.rows_at and c.affine.key == mine.key
        }
        if not others:
            return
        along = self._along(others)
        last = pre.post = others[along[-1]]
        first = next(v for v in along if (others[v].mult, others[v].add) == (last.mult, last.add))
        pre.posts = [first, *(v for v, c in others.items() if (c.mult, c.add) == (last.mult, last.add) and v != first)]

    def _along(self, coefficients: Mapping[Value, Coefficient]) -> list[Value]:
        """Returns the first of ``coefficients`` and, while each is the only use of the one before, those after it."""
        along = [next(iter(coefficients))]
        while (after := self.search.only_user(along[-1])) is not None and after in coefficients:
            along.append(after)
        return along

    # --- near misses ---

    def _missed(self, reasons: list[Mismatch], avoid: set[fx.Node]) -> None:
        """Reports a near miss.

        A normed projection into a sigmoid is also a gate or a router of a plain model: it is a near miss only where x is
        seen as streams, too.
        """
        start = self.view.value(self.seeds[0])
        assert start is not None
        narrow = next((m for m in reasons if m.reason == mhc.EACH_NORMED), None)
        if narrow is not None:  # each stream is normalised by itself
            self.search.miss("mhc_pre", narrow, start)
            return
        if not self._streams():
            return
        mismatch = self._several_weights() or next(iter(reasons), None) or self._other_gate()
        why = mismatch or Mismatch(mixing.COLLAPSE)
        if why.reason == mixing.OTHER_WEIGHTS and why.value is not None:
            why = Mismatch(family(why.value, self.norm.x) or why.reason, why.value)
        self.search.miss("mhc_pre", why, start)
        for seed in self.seeds:
            avoid.update(self.search.around(seed))

    def _streams(self) -> int:
        """Returns the number of streams of x, of a view or parts of it, or of the list that it is made of; else 0.

        In parts of x counts only as many as there are weights.
        """
        apart = any(v.node is not None and len(v.node.users) > 1 for v in self.kept.parts.places)
        seen = [rows_of(self.norm) or len(self.kept.parts.roots) * apart]
        rows = {c.affine.rows for c in self.coefficients.values()}
        nodes = self.view.descendants([node_of(self.norm.x)], self._shows, 200)
        for value in [v for node in nodes if self._shows(node) and (v := self.view.value(node)) is not None]:
            *_, above, last = (ONE, ONE, *value.shape)
            n = Size(self.norm.width).over(last)
            seen += [n.factor] if n is not None and (n == above or n.factor in rows) else []
        return next((n for n in seen if 2 <= n <= MAX_STREAMS), 0)

    def _shows(self, node: fx.Node) -> bool:
        """Checks whether a node is a view, or parts, of x."""
        value = self.view.values.of(node)
        return not isinstance(value, Value) or any(ref.value is self.norm.x for ref in chain_of(whole(value)))

    def _several_weights(self) -> Mismatch | None:
        """Returns a mismatch where a sigmoid is taken of several weights a stream, which are not split up later."""
        n, each = self._streams(), {v: c.affine for v, c in self.coefficients.items()}
        ones = {(a.phi.value, a.phi.start) for a in each.values() if a.rows == n}
        for value, a in each.items():
            at = a.phi.start
            if a.rows > n and a.rows % n == 0 and not any(v is a.phi.value and at <= s < at + a.rows for v, s in ones):
                return Mismatch(_SEVERAL_WEIGHTS.format(a.rows // n), value)
        return None

    def _other_gate(self) -> Mismatch | None:
        """Returns the first function of the logits that stands where a sigmoid is expected, or None."""
        known, n = {*map(node_of, self.coefficients)}, rows_of(self.norm)
        for node in self.search.reached([node_of(self.norm.x)], self._near, 600):
            value = self.view.value(node) if node not in known else None
            norm = gate_of_streams(value) if value is not None else None
            # A tanh may be part of a sigmoid.
            mine = norm is not None and norm.x is self.norm.x and self.per_token(node) in (n, self.few)
            if value is not None and mine and not (self.coefficients and node in self.seeds):
                return Mismatch(applied(value), value)
        return None

    # --- expand and mix ---

    def _find_post(self, pre: Pre) -> None:
        try:
            found = self._post_of(pre.n, set(pre.posts), pre)
        except Mismatch as mismatch:
            self.search.miss("mhc_post", mismatch, pre.posts[0])
            return
        if found is not None:
            self.search.found.append(PostUse(pre, *found))
        elif self.search.cut is not None or self._multiplies(pre.posts, pre.n):
            self.search.miss("mhc_post", Mismatch(mixing.EXPAND), pre.posts[0])

    def _lone_post(self) -> bool:
        """Finds an expand-and-mix of streams that no routed pre collapses. Returns whether there is one."""
        n = self._streams_of_x
        posts = {*self._one_a_stream(n)}
        found = None
        with contextlib.suppress(Mismatch):
            found = self._post_of(n, posts) if posts else None
        if found is None or found[0].matrix is None:
            return False
        self.search.found.append(PostUse(None, *found))
        return True

    def _post_of(
        self, n: int, posts: set[Value], pre: Pre | None = None
    ) -> tuple[Post, Value, dict[int, Value]] | None:
        """Returns the expand-and-mix of x by one of ``posts``, x_out, and its streams apart, or None. Raises Mismatch.

        Where ``pre`` has iterations, their matrix mixes x; else any matrix or, where it has no h_res either, none.
        """
        norm = self.norm
        admit = lambda node: self._light(node) and self.per_token(node) is not None  # noqa: E731
        nodes = self.search.reached(map(node_of, posts), admit, 400)
        h_res, mixed = (pre.h_res, pre.mixed) if pre is not None else (None, None)
        matrices = {mixed} if mixed is not None else self._matrices(n, nodes, h_res)
        known, d = Known(Kept(norm.x, posts, matrices), matrices, posts), norm.width // n
        first, apart = None, dict[Post, dict[int, Value]]()
        for node in nodes:
            value, per = self.view.value(node), self.per_token(node)
            if value is None or per not in (norm.width, d):
                continue
            try:
                at, found = mixing.post(value, n, d, known, apart=per != norm.width)
            except Unsupported:
                continue
            if not isinstance(found, Post):
                first = found if first is None and found.reason != NOTHING else first
                continue
            if found.matrix is None and h_res is not None:
                continue
            value, streams = self.search.rounded(found, value), apart.setdefault(found, {})
            if at is None:
                return found, value, streams
            streams.setdefault(at, value)
        for found, streams in apart.items():
            if len(streams) == n:
                return found, streams[0], streams
        if first is not None:
            raise first
        return None

    def _matrices(self, n: int, ends: list[fx.Node], h_res: Value | None) -> set[Value]:
        """Returns the n x n matrices of all tokens between x and ``ends``: h_res or matrices computed from it."""
        norm, order = self.norm, self.view.order
        last = max((order[node] for node in ends), default=0)
        # The shape is checked too: where D = n * n, f_out and single streams of x also have n * n elements per token.
        found = {
            value
            for node in (self.view.nodes[order[node_of(norm.x)] : last] if norm.width != n * n else ())
            if self.per_token(node) == n * n
            and (value := self.view.value(node)) is not None
            and value.dtype.is_floating_point
            and square_matrices(value)
        }
        behind = {v: {ref.value for ref in chain_of(whole(v))[1:]} for v in found}
        # Keep each matrix and drop its views and casts, but keep h_res as the op returns it.
        matrices = {v for v in behind if not behind[v] & found}
        return matrices if h_res is None else (matrices - behind.get(h_res, set())) | {h_res}


class _Residual:
    """Chooses the logits h_res of a pre and the Sinkhorn iterations on them."""

    def __init__(self, group: Group, pre: Pre) -> None:
        self.group = group
        self.view = group.view
        self.pre = pre
        self.chains: list[tuple[Value, Chain]] = []
        self._asked: dict[Value, Affine | None] = {}
        self._tried = 0

    def choose(self, nodes: Iterable[fx.Node]) -> None:
        """Fills in the logits and the Sinkhorn iterations of the pre. Raises Mismatch."""
        pre, almost = self.pre, self._collect(nodes)
        logits = {value: affine for value, affine in self._asked.items() if affine is not None}
        if not logits:
            if almost is not None:
                raise almost
            return
        rows = [v for v in logits if len(v.shape) >= 2 and v.shape[-1] == Size(pre.n)]
        start = next(iter([chain.logits for _, chain in self.chains] or rows or logits))
        pre.res, pre.h_res = logits[start], start
        pre.steps += [v for v, _ in self.chains]
        try:
            last = last_of(self.chains)
        except Mismatch as mismatch:
            pre.foreign = pre.foreign or mismatch
        if pre.foreign is None and last:
            pre.mixed, pre.chain = last[0]
            pre.fold = not pre.chain.transposed and self._only_through(start, pre.mixed)

    def _collect(self, nodes: Iterable[fx.Node]) -> Mismatch | None:
        """Finds logits and iterations. Returns the mismatch of the last value that almost is the logits, or None."""
        # Every value on the way to the logits almost matches, so only the last mismatch is worth reporting.
        almost: Mismatch | None = None
        for node in nodes:
            value = self.view.value(node)
            if value is None or self.group.per_token(node) != self.pre.n**2 or self._in_iterations(value):
                continue
            if value.func in _LIGHT or value.func in VIEWS or is_cast(value):
                try:
                    self._logits(value)
                except Mismatch as mismatch:
                    almost = mismatch if square_matrices(value) else almost
        return almost

    def _in_iterations(self, value: Value) -> bool:
        """Checks whether ``value`` is a matrix of Sinkhorn iterations; keeps it if these are on the logits."""
        pre, group = self.pre, self.group.search.chains.group(value)
        if group is None or value not in group.after or value.shape[-1].factor != pre.n:
            return False
        chain = group.chains.get(value)
        if group.miss is not None:
            pre.foreign = pre.foreign or group.miss
            pre.steps.append(value)
        elif chain is not None:
            with contextlib.suppress(Mismatch):  # iterations of something else, such as logits minus their maximum
                self.chains += [(value, chain)] if self._logits(chain.logits) is not None else []
        return True

    def _logits(self, value: Value) -> Affine | None:
        """Returns ``value`` as logits of the pre, None where it is something else. Raises Mismatch when first asked."""
        if value not in self._asked:
            self._asked[value] = None
            self._asked[value] = self._affine(value)
        return self._asked[value]

    def _affine(self, value: Value) -> Affine | None:
        mine, n, kept = self.pre.pre.affine, self.pre.n, self.group.kept
        if value.node is None or self._tried == _TRIED or mhc.norm_behind(value, kept) is None:
            return None
        self._tried += 1
        try:
            found = mhc.affine(whole(value), whole(value), kept)
        except Unsupported:
            return None
        except Mismatch as mismatch:
            if mismatch.reason not in mhc.NO_LOGITS:
                raise
            return None
        # Skip z and alpha * z on the way to the logits, unless h_pre has no bias or no alpha either.
        alike = (not found.alpha[1], not found.bias) == (not mine.alpha[1], not mine.bias)
        others = found.phi.value is mine.phi.value and found.phi.start != 2 * n and n == 2
        return found if found.key == mine.key and found.rows == n**2 and alike and not others else None

    def _only_through(self, start: Value, end: Value) -> bool:
        """Checks whether every use of ``start`` goes through ``end``."""
        order, last = self.view.order, node_of(end)

        def readers(node: fx.Node) -> list[fx.Node]:
            early = order[node] < order[last]
            return [user for user in node.users if user is not last and user in self.view.live] if early else []

        return all(order[node] < order[last] for node in reached([node_of(start)], readers))


def _piece(c: Coefficient) -> tuple[Value, int, float, float]:
    """Returns what two values that are one coefficient have in common."""
    return *c.affine.rows_at, c.mult, c.add


def _unfit(pre: Pre) -> Mismatch | None:
    """Returns why the op cannot give h_pre, or None."""
    found = pre.pre
    if found.mult != 1.0 and found.tanh:
        return Mismatch(mhc.TANH, pre.collapsed)
    if found.mult != 1.0 or found.add < 0.0 or (pre.h_in is None and pre.post is None):
        return Mismatch(_UNFIT.format(found.mult, found.add), pre.collapsed)
    return None
