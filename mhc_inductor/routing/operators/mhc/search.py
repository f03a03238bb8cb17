"""Where in a graph the mHC formula is: candidates by their neighbourhood, proved by the normal forms."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable

import torch
from torch import fx

from mhc_inductor.ops.checks import MAX_STREAMS
from mhc_inductor.routing.graph.expressions import VIEWS, Ref, addends, aten, is_cast, product, whole
from mhc_inductor.routing.graph.expressions import chain as chain_of
from mhc_inductor.routing.graph.index import DynamicWidth, Size, Unsupported, product_of
from mhc_inductor.routing.graph.values import Value, Values
from mhc_inductor.routing.operator import Mismatch, Miss
from mhc_inductor.routing.operators.mhc import formula as mhc
from mhc_inductor.routing.operators.mhc.formula import NOTHING, Affine, Coefficient, Norm, square_matrices
from mhc_inductor.routing.operators.mhc.sinkhorn import Chain, Chains

# What a coefficient's rows may be: n, 2n, n * n of up to MAX_STREAMS streams, and all of them.
_FEW = MAX_STREAMS * (MAX_STREAMS + 2)
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

_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_BOUNDS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.hardtanh.default, aten.tanh.default)


@dataclasses.dataclass
class Pre:
    """A pre, or a head where ``post`` and ``res`` are missing, and the nodes that its outputs replace."""

    norm: Norm
    n: int
    pre: Coefficient
    h_in: Value
    post: Coefficient | None = None
    h_post: Value | None = None
    posts: list[Value] = dataclasses.field(default_factory=list)
    res: Affine | None = None
    h_res: Value | None = None
    chain: Chain | None = None
    mixed: Value | None = None
    steps: list[Value] = dataclasses.field(default_factory=list)
    others: set[Value] = dataclasses.field(default_factory=set)
    fold: bool = False
    foreign: Mismatch | None = None
    """Why the sinkhorn iterations of h_res are not the op's: they stay the model's, between pre and post."""

    @property
    def op(self) -> str:
        return "mhc_pre" if self.post is not None or self.res is not None else "mhc_head"


@dataclasses.dataclass
class PostUse:
    """An expand-and-mix of x that follows ``pre``, or one whose collapse is not the op's."""

    pre: Pre | None
    x: Value
    found: mhc.Post
    x_out: Value

    @property
    def own(self) -> bool:
        """Whether the matrix is what ``pre`` gives."""
        return self.pre is not None and self.found.matrix in (self.pre.mixed, self.pre.h_res)


@dataclasses.dataclass
class Sinkhorn:
    """Sinkhorn iterations on logits that are not a routed pre's."""

    chain: Chain
    mixed: Value


@dataclasses.dataclass
class Found:
    pres: list[Pre] = dataclasses.field(default_factory=list)
    posts: list[PostUse] = dataclasses.field(default_factory=list)
    sinkhorns: list[Sinkhorn] = dataclasses.field(default_factory=list)
    misses: list[Miss] = dataclasses.field(default_factory=list)


def name_of(node: fx.Node) -> str:
    """The name of what a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _rows(norm: Norm) -> int:
    """The rows of x [..., rows, D] where a norm is of all of a token's; 0 where it is not."""
    if len(norm.x.shape) < 3 or norm.x.shape[-2].symbols:
        return 0
    n, d = norm.x.shape[-2:]
    return n.factor if n.times(d) == Size(norm.width) else 0


def _streams(norm: Norm) -> bool:
    """Whether a norm looks like one of all streams of a token."""
    return 2 <= _rows(norm) <= MAX_STREAMS


def _calls(node: fx.Node, names: Iterable[str]) -> bool:
    name = name_of(node)
    return node.op in ("call_function", "call_method") and any(name == n or name.startswith(n + ".") for n in names)


def _live(graph: fx.Graph, values: Values) -> set[fx.Node]:
    """The nodes that a result or an effect needs. Dynamo leaves dead code in its graphs."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        pure = node.op in ("call_function", "call_method") and values.inspectable(node) and values.of(node) is not None
        if not pure or any(user in live for user in node.users):
            live.add(node)
    return live


class Finder:
    """Searches one graph."""

    def __init__(self, graph: fx.Graph, values: Values) -> None:
        self.graph = graph
        self.values = values
        self.nodes = list(graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.chains = Chains()
        self.result = Found()
        self.live = _live(graph, values)

    # --- neighbourhoods ---

    def value(self, node: fx.Node) -> Value | None:
        found = self.values.of(node)
        return found if isinstance(found, Value) else None

    def descendants(
        self, starts: Iterable[fx.Node], admit: Callable[[fx.Node], bool], limit: int = 4000
    ) -> list[fx.Node]:
        """Nodes reached from ``starts`` through admitted ones (not admitted: listed, not passed), in graph order."""
        seen = dict.fromkeys(starts)
        todo = collections.deque(seen)
        # The nearest first: the limit cuts off what is far away.
        while todo and len(seen) < limit:
            for user in todo.popleft().users:
                if user not in seen and user in self.live and user.op in ("call_function", "call_method"):
                    seen[user] = None
                    if admit(user):
                        todo.append(user)
        return sorted(seen, key=self.order.__getitem__)

    def _light(self, node: fx.Node) -> bool:
        value = self.values.of(node)
        if not isinstance(value, Value):
            return isinstance(value, tuple)
        return value.func in _LIGHT or value.func in VIEWS or is_cast(value)

    def _per_token(self, node: fx.Node, tokens: Size) -> int | None:
        """Elements of a tensor node a token; None where that is no fixed number."""
        value = self.values.of(node)
        if not isinstance(value, Value) or tokens.factor == 0:
            return None
        per = product_of(value.shape).over(tokens)
        return per.factor if per is not None and not per.symbols else None

    # --- search ---

    def run(self) -> Found:
        """Everything found. Dynamic widths that a formula sums over are taken as they are now."""
        found = None
        while found is None:
            found = self._attempt()
        return found

    def _attempt(self) -> Found | None:
        """One search; None after fixing a width that it met."""
        try:
            return self._run()
        except DynamicWidth as dynamic:
            self.chains = Chains()
            self.result = Found()
            return None if self.values.fix(dynamic.size.symbols) else self.result

    def _run(self) -> Found:
        groups: dict[tuple[Value, float], tuple[Norm, list[fx.Node]]] = {}
        unnormed: list[tuple[Value, Mismatch]] = []
        for node in self.graph.nodes:
            if node not in self.live or not _calls(node, ("sigmoid", "special_expit", "exp")):
                continue
            value = self.value(node)
            if value is None or not value.shape or value.shape[-1].factor > _FEW or value.shape[-1].symbols:
                continue
            if value.func not in (*mhc.SIGMOIDS, aten.exp.default):
                continue
            try:
                norm = self._norm(value)
            except Mismatch as mismatch:
                unnormed.append((value, mismatch))
                continue
            except Unsupported:
                continue
            if norm is not None and norm.x.node is not None:
                groups.setdefault((norm.x, norm.eps), (norm, []))[1].append(node)
        avoid: set[fx.Node] = set()
        for value, miss in unnormed:
            assert value.node is not None
            self.result.misses.append(Miss("mhc_pre", miss.reason, miss.value, value))
            if miss.reason == mhc.UNNORMED:
                avoid.update(self._around(value.node))
        for norm, seeds in groups.values():
            with contextlib.suppress(Unsupported):
                self._group(norm, seeds, avoid)
        self._lone_sinkhorns(avoid)
        return self.result

    def _norm(self, value: Value) -> Norm | None:
        """The norm of the projection in a sigmoid's or an exp's argument."""
        _, terms = addends(whole(value.args[0]))
        for _, term in terms:
            norm = mhc.projection(term)
            if norm is not None:
                return norm
        if value.func in mhc.SIGMOIDS:
            found = mhc.unnormed_projection(terms)
            if found is not None:
                raise Mismatch(mhc.UNNORMED, found)
            for _, term in terms:
                self._altered(term)
        return None

    def _altered(self, term: Ref) -> None:
        """Raise Mismatch where the argument of a sigmoid is another function of the logits of streams."""
        if term.value.func in _BOUNDS:
            within = [(f"{term.value.func.overloadpacket.__name__} is applied to the logits", term.value.args[0])]
        else:
            within = [
                ("alpha multiplies z and a bias", f.value) for f, _ in product(term).factors if f.value.func in _SUMS
            ]
        for reason, value in within:
            norms = (mhc.projection(t) for _, t in addends(whole(value))[1])
            if any(norm is not None and _streams(norm) for norm in norms):
                raise Mismatch(f"{reason}; expected sigmoid(alpha * z + bias)", term.value)

    def _around(self, node: fx.Node) -> list[fx.Node]:
        """The part of a formula around a node: what a near miss keeps away from routing."""
        up, todo = {node}, [node]
        while todo and len(up) < 64:
            for parent in todo.pop().all_input_nodes:
                if parent not in up and parent.op != "placeholder":
                    up.add(parent)
                    todo.append(parent)
        return self.descendants(up, lambda _: True, 1000)

    def _group(self, norm: Norm, seeds: list[fx.Node], avoid: set[fx.Node]) -> None:
        tokens, width = norm.count, norm.width
        x = norm.x
        assert x.node is not None
        streams = len(x.shape) >= 2 and not x.shape[-2].symbols and x.shape[-2].times(x.shape[-1]) == Size(width)
        few = x.shape[-2].factor * (x.shape[-2].factor + 2) if streams else _FEW

        def small(node: fx.Node) -> bool:
            per = self._per_token(node, tokens)
            if per is None:
                return isinstance(self.values.of(node), tuple)
            return per <= few

        def near(node: fx.Node) -> bool:
            # Past x-sized and h_in-sized tensors only through views, casts and products; past x_out not at all.
            if small(node):
                return True
            value = self.values.of(node)
            total = isinstance(value, Value) and value.func in (aten.add.Tensor, aten.add.Scalar)
            return self._light(node) and not (total and self._per_token(node, tokens) == width)

        coefficients: dict[Value, Coefficient] = {}
        failed: list[tuple[int, Mismatch]] = []
        around_seeds = self.descendants(seeds, near, 600)
        for node in around_seeds:
            value = self.value(node)
            per = self._per_token(node, tokens)
            if value is None or per is None or per > _FEW:
                continue
            try:
                coefficients[value] = mhc.coefficient(value)
            except Mismatch as mismatch:
                # A permuted view of a coefficient is none, and nothing is wrong with it.
                if mismatch.reason != NOTHING and not any(r.value in coefficients for r in chain_of(whole(value))):
                    failed.append((per, mismatch))
            except Unsupported:
                continue
        reasons: list[Mismatch] = []
        pre = self._collapse(norm, coefficients, around_seeds, reasons)
        if pre is None:
            # Without its collapse, as where the last sublayer's h_pre takes it, the rest of the formula is still ours.
            kept = set() if self._lone_post(norm, coefficients) else avoid
            self._missed(norm, coefficients, [m for _, m in failed] + reasons, seeds, kept)
            return
        n = pre.n
        self._choose_post(pre, coefficients)
        try:
            self._choose_res(pre, self.descendants([x.node], near, 1500))
            self._check(pre, [m for per, m in failed if per == n])
        except Mismatch as mismatch:
            self.result.misses.append(Miss("mhc_pre", mismatch.reason, mismatch.value, pre.h_in))
            avoid.update(self.descendants([x.node], near))
            return
        self.result.pres.append(pre)
        avoid.update(v.node for v in pre.steps if v.node is not None)
        if pre.foreign is not None:
            assert pre.h_res is not None
            self.result.misses.append(Miss("mhc_sinkhorn", pre.foreign.reason, pre.foreign.value, pre.h_res))
        if pre.post is not None:
            self._find_post(pre)

    def _collapse(
        self, norm: Norm, coefficients: dict[Value, Coefficient], nodes: list[fx.Node], reasons: list[Mismatch]
    ) -> Pre | None:
        weights: dict[int, set[Value]] = {}
        for weight, c in coefficients.items():
            weights.setdefault(c.affine.rows, set()).add(weight)
        for node in nodes:
            per = self._per_token(node, norm.count)
            value = self.value(node)
            if per is None or value is None or per == 0 or norm.width % per:
                continue
            n = norm.width // per
            if n not in weights or not 2 <= n <= MAX_STREAMS:
                continue
            try:
                found = mhc.collapse(value, norm.x, norm.width, weights[n])
            except Mismatch as mismatch:
                reasons.append(mismatch)
                continue
            except Unsupported:
                continue
            return Pre(norm, n, coefficients[found.weight], value)
        return None

    def _choose_post(self, pre: Pre, coefficients: dict[Value, Coefficient]) -> None:
        """The coefficient that is h_post: the last scaling of its sigmoid that everything else goes through."""
        mine = pre.pre.affine
        rows = {v: c for v, c in coefficients.items() if c.affine.rows == pre.n and not c.affine.transposed}
        others = {
            v: c
            for v, c in rows.items()
            if (c.affine.phi.value, c.affine.phi.start) != (mine.phi.value, mine.phi.start) and c.affine.key == mine.key
        }
        if not others:
            return
        current = next(iter(others))
        along = [current]
        while True:
            assert current.node is not None
            users = [u for u in current.node.users if u in self.live]
            after = self.value(users[0]) if len(users) == 1 and users[0].op != "output" else None
            if after is None or after not in others:
                break
            current = after
            along.append(current)
        last = others[current]
        first = next(v for v in along if (others[v].mult, others[v].add) == (last.mult, last.add))
        pre.post, pre.h_post = last, first
        pre.posts = [v for v in others if (others[v].mult, others[v].add) == (last.mult, last.add)]

    def _choose_res(self, pre: Pre, nodes: list[fx.Node]) -> None:
        n, tokens = pre.n, pre.norm.count
        logits: dict[Value, Affine] = {}
        chains: list[tuple[Value, Chain]] = []
        # On the way to the logits every value is almost them: the last one's reason counts.
        almost: Mismatch | None = None
        for node in nodes:
            value = self.value(node)
            if value is None or self._per_token(node, tokens) != n * n:
                continue
            if square_matrices(value) and value.shape[-1].factor == n:
                try:
                    chain = self.chains.of(value)
                except Mismatch as mismatch:
                    pre.foreign = pre.foreign or mismatch
                    pre.steps.append(value)
                    continue
                if chain is not None and self._is_logits(chain.logits, logits, pre):
                    chains.append((value, chain))
                    continue
            if value.func in _LIGHT or value.func in VIEWS or is_cast(value):
                try:
                    self._is_logits(value, logits, pre)
                except Mismatch as mismatch:
                    almost = mismatch if square_matrices(value) else almost
        if not logits:
            if almost is not None:
                raise almost
            return
        upright = [v for v, affine in logits.items() if not affine.transposed]
        if not upright:
            raise Mismatch("h_res is laid out transposed; expected row-major [n, n]", next(iter(logits)))
        # Iterations of the transposed logits are an op of their own.
        chains = [(v, c) for v, c in chains if c.logits in upright]
        start = next((v for v in upright if len(v.shape) >= 2 and v.shape[-1] == Size(n)), upright[0])
        if chains:
            start = chains[0][1].logits
        pre.res, pre.h_res = logits[start], start
        pre.steps += [v for v, _ in chains]
        complete = [(v, c) for v, c in chains if c.iters is not None]
        steps = max((len(c.axes) for _, c in chains), default=0)
        if pre.foreign is None and steps > max((len(c.axes) for _, c in complete), default=0):
            last = next(v for v, c in chains if len(c.axes) == steps)
            pre.foreign = Mismatch("the sinkhorn iterations do not end after a sum over both dims", last)
        if not complete or pre.foreign is not None:
            return
        pre.mixed, pre.chain = next((v, c) for v, c in complete if len(c.axes) == steps)
        pre.fold = not pre.chain.transposed and self._only_through(start, pre.mixed)

    def _is_logits(self, value: Value, logits: dict[Value, Affine], pre: Pre) -> bool:
        if value in logits:
            return True
        if value.node is None or value in pre.others:
            return False
        pre.others.add(value)
        try:
            out = whole(value)
            found = mhc.affine(out, out)
        except Unsupported:
            return False
        except Mismatch as mismatch:
            if mismatch.reason in (NOTHING, mhc.UNNORMED):
                return False
            raise
        mine = pre.pre.affine
        if found.key != mine.key or found.rows != pre.n**2:
            return False
        # z and alpha * z on the way to the logits are none, unless h_pre has no bias or alpha either.
        if (found.alpha is None, found.bias is None) != (mine.alpha is None, mine.bias is None):
            return False
        if found.phi.value is mine.phi.value and found.phi.start != 2 * pre.n and pre.n == 2:
            return False
        logits[value] = found
        return True

    def _only_through(self, start: Value, end: Value) -> bool:
        """Whether everything that uses ``start`` does so through ``end``."""
        assert start.node is not None and end.node is not None
        stop = self.order[end.node]
        todo, seen = [start.node], {start.node}
        while todo:
            for user in todo.pop().users:
                if user is end.node or user in seen or user not in self.live:
                    continue
                if user.op == "output" or self.order[user] > stop:
                    return False
                seen.add(user)
                todo.append(user)
        return True

    def _check(self, pre: Pre, failed: list[Mismatch]) -> None:
        """What the parts must have in common. Raises Mismatch."""
        if failed:
            raise failed[0]
        if pre.pre.mult != 1.0:
            raise Mismatch(f"h_pre is scaled by {pre.pre.mult:g}", pre.h_in)
        if pre.pre.add < 0.0:
            raise Mismatch(f"{pre.pre.add:g} is added to h_pre; expected hc_eps >= 0", pre.h_in)
        if pre.pre.affine.transposed:
            raise Mismatch("h_pre is not in the order of phi's rows", pre.h_in)

    def _missed(
        self,
        norm: Norm,
        coefficients: dict[Value, Coefficient],
        reasons: list[Mismatch],
        seeds: list[fx.Node],
        avoid: set[fx.Node],
    ) -> None:
        """A near miss, where x looks like streams: a gate or a router of a plain model is none."""
        if not (coefficients or _streams(norm)):
            return
        if not _rows(norm) and not any(c.affine.rows <= MAX_STREAMS for c in coefficients.values()):
            return
        mismatch = next(iter(reasons), None) or Mismatch("h_pre does not collapse x: no sum_i h_pre[i] * x[i]", None)
        start = self.value(seeds[0])
        assert start is not None
        self.result.misses.append(Miss("mhc_pre", mismatch.reason, mismatch.value, start))
        for seed in seeds:
            avoid.update(self._around(seed))

    def _find_post(self, pre: Pre) -> None:
        assert pre.h_post is not None
        matrices = {pre.mixed} if pre.mixed is not None else None
        try:
            use = self._post_of(pre.norm, pre.n, set(pre.posts), matrices, pre.h_res)
        except Mismatch as mismatch:
            self.result.misses.append(Miss("mhc_post", mismatch.reason, mismatch.value, pre.h_post))
            return
        if use is not None:
            self.result.posts.append(dataclasses.replace(use, pre=pre))

    def _lone_post(self, norm: Norm, coefficients: dict[Value, Coefficient]) -> bool:
        """Look for an expand-and-mix of streams that no routed pre collapses. Whether there is one."""
        n = _rows(norm) if _streams(norm) else 0
        posts = {v for v, c in coefficients.items() if c.affine.rows == n and not c.affine.transposed}
        if not posts:
            return False
        use = None
        with contextlib.suppress(Mismatch):
            use = self._post_of(norm, n, posts, None, None)
            if use is not None and use.found.matrix is None:
                use = None
        if use is not None:
            self.result.posts.append(use)
        return use is not None

    def _post_of(
        self, norm: Norm, n: int, posts: set[Value], matrices: set[Value] | None, h_res: Value | None
    ) -> PostUse | None:
        """The expand-and-mix of x by one of ``posts``: with x itself as the residual, if there is no h_res. Raises Mismatch.

        ``matrices`` are those that may mix it, None for any.
        """
        starts = [v.node for v in posts if v.node is not None]
        nodes = self.descendants(
            starts, lambda node: self._light(node) and self._per_token(node, norm.count) is not None, 400
        )
        raw = matrices is None
        if matrices is None:
            matrices = self._matrices(norm, n, nodes, h_res)
        first = None
        for node in nodes:
            value = self.value(node)
            if value is None or self._per_token(node, norm.count) != norm.width:
                continue
            try:
                found = mhc.post(value, norm.x, norm.width, n, posts, matrices)
            except Mismatch as mismatch:
                if mismatch.reason != NOTHING:
                    first = first or mismatch
                continue
            except Unsupported:
                continue
            if found.n == n and (found.matrix is not None or (raw and h_res is None)):
                return PostUse(None, norm.x, found, value)
        if first is not None:
            raise first
        return None

    def _matrices(self, norm: Norm, n: int, ends: list[fx.Node], h_res: Value | None) -> set[Value]:
        """The n x n matrices of all tokens between x and ``ends``: h_res where it is used raw, or what is made of it."""
        assert norm.x.node is not None
        last = max((self.order[node] for node in ends), default=0)
        # By their shape too: where D is n * n, f_out and the streams of x have as many elements.
        found = {
            value
            for node in (self.nodes[self.order[norm.x.node] : last] if norm.width != n * n else ())
            if self._per_token(node, norm.count) == n * n
            and (value := self.value(node)) is not None
            and value.dtype.is_floating_point
            and square_matrices(value)
        }
        behind = {v: {ref.value for ref in chain_of(whole(v))[1:]} for v in found}
        # Of a matrix and its views and casts, the matrix, but h_res as the op gives it.
        matrices = {v for v in behind if not behind[v] & found}
        return matrices if h_res is None else (matrices - behind.get(h_res, set())) | {h_res}

    def _lone_sinkhorns(self, avoid: set[fx.Node]) -> None:
        seeds = [
            node
            for node in self.graph.nodes
            if _calls(node, ("softmax", "log_softmax", "exp"))
            and node in self.live
            and node not in avoid
            and (value := self.value(node)) is not None
            and square_matrices(value)
        ]
        for seed in seeds:
            first = self.value(seed)
            assert first is not None
            size = first.shape
            nodes = self.descendants([seed], functools.partial(self._no_larger, shape=size), 2000)
            best: tuple[Value, Chain] | None = None
            longest = 0
            try:
                for node in nodes:
                    value = self.value(node)
                    if node in avoid or value is None or value.shape != size:
                        continue
                    chain = self.chains.of(value)
                    if chain is None:
                        continue
                    longest = max(longest, len(chain.axes))
                    if chain.iters is not None and chain.iters >= 2:
                        best = value, chain
            except Mismatch as mismatch:
                if longest >= 3:
                    self.result.misses.append(Miss("mhc_sinkhorn", mismatch.reason, mismatch.value, first))
                continue
            if best is None or len(best[1].axes) < longest:
                continue
            logits = best[1].logits
            if logits.node is None or any(s.mixed is best[0] for s in self.result.sinkhorns):
                continue
            if logits.dtype is not torch.float64 and best[0].dtype is torch.float64:
                continue
            self.result.sinkhorns.append(Sinkhorn(best[1], best[0]))

    def _no_larger(self, node: fx.Node, *, shape: tuple[Size, ...]) -> bool:
        value = self.values.of(node)
        if not isinstance(value, Value):
            return True
        return product_of(shape).over(product_of(value.shape)) is not None
