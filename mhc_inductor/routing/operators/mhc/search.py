# SPDX-License-Identifier: Apache-2.0
"""Finds mHC formulas in a graph: candidates come from neighbourhoods of nodes and are proved by normal forms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator

import torch
from torch import fx

from mhc_inductor.ops.checks import MIN_WIDTH
from mhc_inductor.routing.edit import node_of
from mhc_inductor.routing.graph.expressions import Ref, addends, aten, is_cast, peel, product, summed, whole
from mhc_inductor.routing.graph.gates import SIGMOIDS, argument_of, gate_of
from mhc_inductor.routing.graph.index import DynamicWidth, Index, Size, Unsupported, Var, product_of, var
from mhc_inductor.routing.graph.values import Value, name_of
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Mismatch, Miss, contained
from mhc_inductor.routing.operators.mhc import formula as mhc
from mhc_inductor.routing.operators.mhc.formula import family, square_matrices
from mhc_inductor.routing.operators.mhc.groups import FEW, Group, applied, gate_of_streams, streams_behind
from mhc_inductor.routing.operators.mhc.matches import CollapseUse, Post, PostUse, Pre, Sinkhorn
from mhc_inductor.routing.operators.mhc.mixing import SUMS, WIDER, factors, given_post, residual_of, terms_of
from mhc_inductor.routing.operators.mhc.norm import Norm, made_of, root_of
from mhc_inductor.routing.operators.mhc.sinkhorn import Chains, Iterations, last_of

_WRITTEN_APART = (
    "each stream is a tensor of its own, and written as such; expected one tensor [..., n, D] of new streams"
)
_STATIC = (
    "the weights of the streams are no projection of them, as in hyper-connections with static weights; "
    "expected h_post = post_mult * sigmoid(alpha * z + bias)"
)
_NO_PRE = "the logits h_res are computed, and no h_pre = sigmoid(alpha * z + bias) that collapses the streams"
_OTHER_WEIGHTS = (
    "the weights of the streams are computed from x, but not as sigmoid(alpha * z + bias) "
    "with z = (x @ phi.T) * rsqrt(mean(x * x) + eps) over all n * D elements of a token"
)


class Search:
    """Searches one graph and collects matches in ``found`` and near misses in ``misses``."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.chains = Chains(view)
        self.found: list[Pre | PostUse | CollapseUse | Sinkhorn] = []
        self.misses: list[Miss] = []
        self._claimed: set[fx.Node] = set()
        self._fresh: list[fx.Node] = []
        self._written: list[Post] = []
        """Sums of streams and of something with weights, as expand-and-mixes without a matrix."""
        self.cut: int | None = None

    def run(self) -> None:
        """Finds all formulas. Raises DynamicWidth where a formula sums over a width that the graph leaves dynamic."""
        avoid, settled = set[fx.Node](), set[Value]()
        for norm, seeds in self._groups(avoid):
            self.cut = None
            with contextlib.suppress(Unsupported), contained(self.view, seeds[0]):
                self._group(Group(self, norm, seeds), avoid)
                settled.add(norm.x)
        self.cut = None
        self._lone_sinkhorns(avoid)
        self._lone_posts()
        first = next(iter(self.view.graph.nodes))
        with contained(self.view, first):
            self._lone_projections(avoid, settled)
            self._lone_lists()
            self._other_weights()

    def _group(self, group: Group, avoid: set[fx.Node]) -> None:
        known, told, self._fresh = len(self.found), len(self.misses), []
        try:
            group.run(avoid)
            if (known, told) == (len(self.found), len(self.misses)):
                self._claimed.difference_update(self._fresh)  # x is no streams: its nodes may be another formula's
        except (Unsupported, DynamicWidth):
            raise
        except Exception:
            del self.found[known:]  # drop a block that was found only in part
            raise

    def miss(self, op: str, mismatch: Mismatch, start: Value) -> None:
        """Records a near miss; its reason says so where the search was cut off."""
        reason = mismatch.reason
        if self.cut is not None:
            reason += f" (the search stopped after {self.cut} operations around it)"
        self.misses.append(Miss(op, reason, mismatch.value, start))

    def reached(self, starts: Iterable[fx.Node], admit: Callable[[fx.Node], bool], limit: int = 4000) -> list[fx.Node]:
        """Returns the nodes reached from ``starts`` and claims them for the formula around a norm."""
        nodes = self.view.descendants(starts, admit, limit)
        self.cut = limit if len(nodes) >= limit else self.cut
        self._fresh += [node for node in nodes if node not in self._claimed]
        self._claimed.update(nodes)
        return nodes

    def around(self, node: fx.Node) -> list[fx.Node]:
        """Returns the nodes of the formula around ``node``, which a near miss keeps from being routed."""
        up, todo = {node}, [node]
        while todo and len(up) < 64:
            for parent in todo.pop().all_input_nodes:
                if parent not in up and parent.op != "placeholder":
                    up.add(parent)
                    todo.append(parent)
        return self.reached(up, lambda _: True, 1000)

    def rounded(self, found: Post, value: Value) -> Value:
        """Returns x_out: ``value``, or its cast to x's dtype where nothing else reads it.

        The next sublayer's formula then reads the op's own result, and can be fused with it.
        """
        after = self.only_user(value)
        casts = after is not None and is_cast(after) and after.dtype == root_of(found.x)[0].dtype
        return after if after is not None and casts else value

    def only_user(self, value: Value) -> Value | None:
        """Returns what is computed of ``value`` where one node alone reads it, else None."""
        users = [u for u in node_of(value).users if u in self.view.live]
        return self.view.value(users[0]) if len(users) == 1 and users[0].op != "output" else None

    def _tensors(self, *names: str, but: Container[fx.Node] = ()) -> Iterator[tuple[fx.Node, Value]]:
        """Yields live nodes and their tensors: all ``but`` some or, with ``names``, calls of these. Others are not analysed."""
        for node in self.view.nodes:
            named = name_of(node).partition(".")[0].strip("_") in names and node.op in ("call_function", "call_method")
            wanted = node in self.view.live and node not in but and (named or not names)
            value = self.view.value(node) if wanted else None
            if value is not None:
                yield node, value

    # --- norms and their projections ---

    def _groups(self, avoid: set[fx.Node]) -> Iterable[tuple[Norm, list[fx.Node]]]:
        """Returns every norm of streams with the sigmoids of its projections.

        Raises DynamicWidth only where there is none: a gate of something else may be a mean over dynamic tokens.
        """
        groups: dict[tuple[Value, float, str], tuple[Norm, list[fx.Node]]] = {}
        dynamic: DynamicWidth | None = None
        unnormed: list[tuple[Value, Mismatch]] = []
        for node, value in self._tensors("sigmoid", "special_expit", "expit", "exp", "tanh"):
            if not value.shape or value.shape[-1].factor > FEW or value.shape[-1].symbols:
                continue
            if value.func not in (*SIGMOIDS, aten.exp.default, aten.tanh.default):
                continue
            try:
                with contained(self.view, node):
                    norm = self._norm(value)
                    if norm is not None:
                        groups.setdefault(norm.key, (norm, []))[1].append(node)
            except Mismatch as mismatch:
                unnormed.append((value, mismatch))
            except DynamicWidth as width:
                dynamic = dynamic or width
            except Unsupported:
                continue
        if dynamic is not None and not groups:
            raise dynamic
        for value, why in unnormed:
            self.miss("mhc_pre", why, value)
            # Where only the norm differs, the iterations and the post are still those of the op.
            other = why.reason in mhc.OTHER_NORMS
            around = [] if other else self.around(node_of(value))
            if why.reason == mhc.UNNORMED:
                avoid.update(around)
        return groups.values()

    def _norm(self, value: Value) -> Norm | None:
        """Returns the norm of the projection in the argument of a sigmoid or an exp, or None. Raises Mismatch."""
        gate = gate_of(whole(value), 1.0)
        norm = mhc.norm_behind(value.args[0] if gate is None else gate.argument.value)
        if norm is not None:
            return norm
        if value.func in SIGMOIDS:
            _, terms = addends(whole(value.args[0]))
            mhc.check_normed(terms)
            mhc.check_one_tensor(terms)
            for factor in (f for _, term in terms for f, _ in product(term).factors):
                added = summed(factor) is not None
                argument = factor if added else argument_of(factor)
                if argument is not None and streams_behind(argument.value) is not None:
                    raise Mismatch(mhc.NO_ALPHA if added else applied(factor.value), factor.value)
        return None

    # --- Sinkhorn iterations and posts that belong to no routed pre ---

    def _lone_sinkhorns(self, avoid: set[fx.Node]) -> None:
        known = {s.mixed for s in self.found if isinstance(s, (Sinkhorn, Pre))}
        for node, value in self._tensors(but=avoid):
            group = None
            with contextlib.suppress(Unsupported), contained(self.view, node):
                group = self.chains.group(value)
            if group is None or not known.isdisjoint(group.after):
                continue
            known |= group.after
            if any(v.node in avoid for v in group.after) or (self.view.body and not group.chains):
                continue  # a body may be that of an autograd.Function, which has its own backward
            try:
                self._lone_sinkhorn(group)
            except Mismatch as mismatch:
                self.miss("mhc_sinkhorn", mismatch, value)

    def _lone_sinkhorn(self, group: Iterations) -> None:
        if group.miss is not None:
            raise group.miss
        if all(chain.steps < 3 for chain in group.chains.values()):
            return
        last = last_of([*group.chains.items()])
        ends = [(v, c) for v, c in last if v.shape == last[0][0].shape]
        value, chain = next(end for end in ends if end[0].dtype is ends[-1][0].dtype)  # posts read it without its casts
        if value.dtype is torch.float64 and chain.logits.dtype is not torch.float64:
            raise Mismatch(
                "the Sinkhorn iterations are in float64 and the logits are not: the op would compute them in float32",
                value,
            )
        self.found.append(Sinkhorn(chain, value))

    def _lone_projections(self, avoid: set[fx.Node], settled: set[Value]) -> None:
        """Reports projections of normed streams of which no sigmoid is taken but another function, or that only mix."""
        logits = [s.chain.logits for s in self.found if isinstance(s, Sinkhorn)]
        mixed = {norm.x for norm in map(streams_behind, logits) if norm is not None}
        for _, value in self._tensors(but=self._claimed | avoid):
            gate = gate_of_streams(value)
            norm = gate or (streams_behind(value) if square_matrices(value) else None)
            if norm is not None and norm.x not in settled and (gate or norm.x not in mixed):
                settled.add(norm.x)
                self.miss("mhc_pre", Mismatch(applied(value) if gate else _NO_PRE, value), value)

    def _lone_posts(self) -> None:
        """Finds expand-and-mixes whose coefficients no norm's formula claims; that formula handles the others."""
        outs = [out for use in self.found if isinstance(use, PostUse) for out in use.outputs]
        known = {value for out in outs for value in (out, peel(whole(out)).value)}
        for node, value in self._tensors("add", "sub", "stack", "cat", "rsub", "iadd", "addcmul", "baddbmm"):
            if value.func not in SUMS or not value.dtype.is_floating_point or value in known:
                continue
            try:
                with contained(self.view, node):
                    self._lone_post(value, known)
            except Mismatch as mismatch:
                if node not in self._claimed or mismatch.reason == WIDER:
                    self.miss("mhc_post", mismatch, value)

    def _lone_post(self, value: Value, known: set[Value]) -> None:
        found = given_post(value, known)
        if found is None:
            with contextlib.suppress(Unsupported):
                written = residual_of(value) if value.func is aten.add.Tensor else None
                self._written += [written] if written is not None else []
            return
        known.add(value)
        given = {v.node for v in (found.h_post, found.matrix) if v is not None}
        if not given & self._claimed:
            self.found.append(PostUse(None, found, self.rounded(found, value)))

    def _other_weights(self) -> None:
        """Reports streams to which what a sublayer makes of them is written with other weights than h_post."""
        if any(m.op in ("mhc_pre", "mhc_post") for m in self.misses):
            return
        posts = [use.found for use in self.found if isinstance(use, PostUse) and use.pre is None]
        for post in (*posts, *self._written):
            weights, x = post.h_post, {*map(node_of, (post.x, root_of(post.x)[0]))}
            if not made_of(node_of(post.f_out), x):
                continue
            if made_of(node_of(weights), x, 64):
                self.miss("mhc_pre", Mismatch(family(weights, post.x) or _OTHER_WEIGHTS, weights), weights)
            elif product_of(weights.shape) == Size(post.n) and product_of(post.x.shape) != Size(post.width):
                self.miss("mhc_pre", Mismatch(_STATIC, weights), weights)

    def _lone_lists(self) -> None:
        """Reports streams that are tensors of their own and that no norm's formula claims or reports."""
        if any(m.reason.startswith(mhc.LISTED) for m in self.misses):
            return
        pres = [use.norm.x for use in self.found if isinstance(use, Pre)]
        posts = [use.found for use in self.found if isinstance(use, PostUse)]
        routed = {peel(whole(v)).value for v in (*pres, *(v for post in posts for v in (post.x, post.f_out)))}
        sums = (value for _, value in self._tensors("add", "iadd", "sum", but=self._claimed))
        for mismatch in _lists(sums, routed):
            assert mismatch.value is not None
            self.miss("mhc_post", mismatch, mismatch.value)


def _lists(values: Iterable[Value], routed: Collection[Value]) -> Iterator[Mismatch]:
    """Yields a mismatch for each list of streams that are written as tensors of their own, none of them after another.

    Their sums have one tensor times several elements of a tensor of weights: f_out times those of h_post, or a stream
    times those of a column of the matrix. Tensors that are ``routed`` are left out.
    """
    shared: dict[tuple[Value, Ref], dict[Index, list[Value]]] = {}
    for value, index in _alike(values):
        for weights, wide, at in _products(value, index):
            if wide.value not in routed:
                shared.setdefault((weights, wide), {}).setdefault(at, []).append(value)
    known = set[Value]()
    for each in sorted(shared.values(), key=len, reverse=True):
        sums = [one for written in each.values() for one in written]
        apart = len(each) > 1 and not made_of(node_of(sums[-1]), {node_of(sums[0])})
        if apart and known.isdisjoint(sums):
            known.update(sums)
            yield Mismatch(_WRITTEN_APART, sums[-1])


def _alike(values: Iterable[Value]) -> Iterator[tuple[Value, tuple[Index, ...]]]:
    """Yields values that may be streams [..., D], each with the index that all values of its shape share."""
    shared: dict[tuple[Size, ...], tuple[Index, ...]] = {}
    for value in values:
        wide = len(value.shape) > 1 and (value.shape[-1].symbols or value.shape[-1].factor >= MIN_WIDTH)
        if wide and value.func is aten.add.Tensor and value.dtype.is_floating_point:
            yield value, shared.setdefault(value.shape, tuple(var(Var(s)) for s in value.shape))


def _products(value: Value, index: tuple[Index, ...]) -> list[tuple[Value, Ref, Index]]:
    """Returns (tensor, element of a tensor [..., D], index in the first) of the products in a sum; none in other sums."""
    low, found = index[-1].variables(), list[tuple[Value, Ref, Index]]()
    with contextlib.suppress(Unsupported):
        for sign, ref in terms_of(Ref(value, index), ()):
            pair = factors(ref)
            if sign != 1.0 or (pair is not None and pair.bound is not None):
                return []
            if pair is not None:
                weight, wide = sorted((peel(pair.a), peel(pair.b)), key=lambda one: low <= one.flat.variables())
                if low & weight.flat.variables() or not low <= wide.flat.variables():
                    return []
                found.append((weight.value, wide, weight.flat))
        return found
    return []
