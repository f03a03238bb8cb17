"""Surgery on the Dynamo graph: found formulas become ops, what only they needed goes away."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.graph.expressions import VIEWS, is_cast
from mhc_inductor.routing.graph.index import Size, Unsupported, size_of
from mhc_inductor.routing.graph.run import run_fake
from mhc_inductor.routing.graph.values import Value, example, tensors_in
from mhc_inductor.routing.operator import Mismatch, Miss, Unplaced
from mhc_inductor.routing.operators.mhc.formula import Affine, Piece, streams_last
from mhc_inductor.routing.operators.mhc.search import Finder, Found, PostUse, Pre, Sinkhorn, name_of

_ROLES = ("pre", "post", "res")


def mutations(graph: fx.Graph) -> list[tuple[int, int]]:
    """(position, storage) of every tensor that a node changes in place."""
    events = []
    for i, node in enumerate(graph.nodes):
        for target in written_by(node):
            changed = example(target)
            if isinstance(changed, torch.Tensor):
                events.append((i, compat.storage_key(changed)))
    return events


def written_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that ``node`` changes in place."""
    if node.op not in ("call_function", "call_method"):
        return []
    inputs = [a for a in node.args if isinstance(a, fx.Node)]
    name = name_of(node)
    if isinstance(node.target, torch._ops.OpOverload):
        names = [a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        positions = {a.name: k for k, a in enumerate(node.target._schema.arguments)}
        picked = [node.args[positions[n]] if positions[n] < len(node.args) else node.kwargs.get(n) for n in names]
        return [a for a in picked if isinstance(a, fx.Node)]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return list(node.all_input_nodes) if "mutation" in name or "mutat" in str(node.target) else []
    in_place = name.endswith("_") and not name.endswith("__")
    in_place = in_place or node.target in _IN_PLACE or name in ("setitem", "__setitem__") or name.startswith("__i")
    if node.kwargs.get("inplace") is True:
        in_place = True
    changed = inputs[:1] if in_place else []
    if name.startswith("_foreach") and name.endswith("_"):
        changed = list(node.all_input_nodes)
    out = node.kwargs.get("out")
    changed += [a for a in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(a, fx.Node)]
    return changed


_IN_PLACE = {
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.imatmul,
    operator.iand,
    operator.ior,
    operator.ixor,
    operator.ilshift,
    operator.irshift,
    operator.setitem,
}


def _written(node: fx.Node) -> bool:
    """Whether something changes ``node`` in place."""
    return any(node in written_by(user) for user in node.users)


class Rewriter:
    """Puts what a :class:`Finder` found into its graph."""

    def __init__(self, graph: fx.Graph, finder: Finder) -> None:
        self.graph = graph
        self.finder = finder
        self.order = finder.order
        self.events = mutations(graph)
        self.grad = grad_states(graph)
        self.new: dict[fx.Node, fx.Node] = {}
        self.replaced: list[fx.Node] = []
        self.misses: list[Miss] = []
        self.made: list[tuple[str, fx.Node, Any]] = []
        self.trace: dict[str, Any] = {}
        self._h: dict[int, dict[str, fx.Node]] = {}

    def run(self, found: Found) -> None:
        positions = self.order
        work: list[tuple[int, Callable[[], None], str, Value]] = [
            *((positions[node_of(p.h_in)], functools.partial(self._pre, p), p.op, p.h_in) for p in found.pres),
            *(
                (positions[node_of(p.x_out)], functools.partial(self._post, p), "mhc_post", p.x_out)
                for p in found.posts
            ),
            *(
                (positions[node_of(s.mixed)], functools.partial(self._sinkhorn, s), "mhc_sinkhorn", s.mixed)
                for s in found.sinkhorns
            ),
        ]
        for _, act, op, value in sorted(work, key=lambda item: item[0]):
            mark = list(self.graph.nodes)
            try:
                act()
            except (Mismatch, ValueError, TypeError) as error:
                self._refuse(mark, error, op, value)
        if self.made:
            self._guard()
        self._sweep()

    def _refuse(self, mark: list[fx.Node], error: Exception, op: str, start: Any, unfollowed: str = "") -> None:
        """Take back what was put in since ``mark``; note why, unless that is said elsewhere."""
        self.undo(mark)
        if isinstance(error, Mismatch):
            reason, value = error.reason, error.value
        else:  # views that lead nowhere, or the op's own validation, run on fake tensors
            reason, value = unfollowed if isinstance(error, Unsupported) else str(error), start
        if reason:
            self.misses.append(Miss(op, reason, value, start))

    def _guard(self) -> None:
        """Let the compile be specialised on the widths that were taken as fixed."""
        for node in self.graph.nodes:
            for tensor in tensors_in(example(node)) if node.op == "placeholder" and self.finder.values.fixed else ():
                for size in tensor.shape:
                    if not isinstance(size, int) and str(compat.expression(size)) in self.finder.values.fixed:
                        int(size)

    # --- the three rewrites ---

    def _pre(self, pre: Pre) -> None:
        outputs = [v for v in (pre.h_in, pre.h_post, pre.mixed if pre.fold else pre.h_res) if v is not None]
        if not pre.fold and pre.mixed is not None:
            outputs.append(pre.mixed)
        affines = {"pre": pre.pre.affine}
        if pre.post is not None:
            affines["post"] = pre.post.affine
        if pre.res is not None:
            affines["res"] = pre.res
        sources = [pre.norm.x]
        for a in affines.values():
            sources += [piece.value for piece in (a.phi, a.alpha, a.bias, a.gamma) if piece is not None]
        here = self._safe(sources, outputs)
        n, width = pre.n, pre.norm.width
        with here:
            x = self._streams(pre, n, width)
            phi = self._gathered({r: a.phi for r, a in affines.items()}, n, width, "phi", x)
            alpha = self._gathered({r: a.alpha or a.scale for r, a in affines.items()}, n, width, "alpha", x)
            bias = self._gathered({r: a.bias or 0.0 for r, a in affines.items()}, n, width, "bias", x)
            gamma = self._gamma(affines, n, width)
            norm_eps, hc_eps = pre.norm.eps, pre.pre.add
            chain = pre.chain
            if pre.op == "mhc_head":
                call = self.emit(torch.ops.mhc_inductor.mhc_head.default, x, phi, alpha, bias, gamma, norm_eps, hc_eps)
                names = {"h_in": 0}
            else:
                mult, add = (pre.post.mult, pre.post.add) if pre.post is not None else (2.0, 0.0)
                iters, eps, form = 0, 1e-6, "softmax"
                if pre.fold and chain is not None:
                    iters, eps, form = chain.iters or 0, chain.eps or 0.0, chain.form
                call = self.emit(
                    torch.ops.mhc_inductor.mhc_pre.default,
                    *(x, phi, alpha, bias, gamma, norm_eps, hc_eps, mult, add, iters, eps, form),
                )
                names = {"h_in": 0, "h_post": 1, "h_res": 2}
            got = {name: self.emit(operator.getitem, call, k) for name, k in names.items()}
            self._h[id(pre)] = {"x": x, **got}
            new = [(pre.h_in, self._as(got["h_in"], pre.h_in, x))]
            if pre.h_post is not None:
                new.append((pre.h_post, self._as(got["h_post"], pre.h_post, x)))
            if pre.h_res is not None:
                target = pre.mixed if pre.fold and pre.mixed is not None else pre.h_res
                new.append((target, self._as(got["h_res"], target, x)))
            if pre.mixed is not None and not pre.fold:
                mixed = self._mixed(got["h_res"], chain)
                self._h[id(pre)]["h_res"] = mixed
                new.append((pre.mixed, self._as(mixed, pre.mixed, x)))
        self._replace(new)
        self.made.append((pre.op, call, pre))
        if pre.mixed is not None and not pre.fold:
            self.made.append(("mhc_sinkhorn", mixed, pre.mixed))

    def _mixed(self, logits: fx.Node, chain: Any) -> fx.Node:
        turned = self.emit("transpose", logits, -1, -2) if chain.transposed else logits
        iters, eps, form = chain.iters, chain.eps or 0.0, chain.form
        mixed = self.emit(torch.ops.mhc_inductor.mhc_sinkhorn.default, turned, iters, eps, form)
        return self.emit("transpose", mixed, -1, -2) if chain.transposed else mixed

    def _post(self, use: PostUse) -> None:
        pre, found = use.pre, use.found
        h = self._h.get(id(pre)) if pre is not None else {}
        if h is None:
            raise Mismatch("")
        n, f_node = found.n, node_of(found.f_out.value)
        foreign = [found.matrix] if found.matrix is not None and not use.own else []
        here = self._safe([use.x, found.f_out.value, found.h_post, *foreign, *found.added], [use.x_out])
        with here:
            x = self._widened(h["x"] if h else self._split(use.x, n, use.x.shape[-1].factor), use.x_out)
            lead, d = list(example(x).shape[:-2]), example(x).shape[-1]
            f = self._shaped(self.current(f_node), [*lead, d], x)
            for vector in found.added:
                f = self.emit(operator.add, self._wide(f), self._shaped(self.current(node_of(vector)), [d], x))
            h_post = h["h_post"] if h else self._wide(self._shaped(self.current(node_of(found.h_post)), [*lead, n], x))
            matrix = h.get("h_res") if found.matrix is not None else None
            if foreign:
                matrix = self._wide(self._shaped(self.current(node_of(foreign[0])), [*lead, n, n], x))
            call = self.emit(torch.ops.mhc_inductor.mhc_post.default, x, f, h_post, matrix, found.transpose)
            if found.stream != -2:
                wanted = example(node_of(use.x_out)).shape
                order = streams_last(len(wanted), found.stream)
                call = self.emit("movedim", self._shaped(call, [wanted[d] for d in order], x), -2, found.stream)
            out = self._as(call, use.x_out, x)
        self._replace([(use.x_out, out)])
        self.made.append(("mhc_post", call, use))

    def _wide(self, node: fx.Node) -> fx.Node:
        """Coefficients as the ops of this package give them, in fp32 at least."""
        return node if torch.finfo(example(node).dtype).bits >= 32 else self.emit("to", node, torch.float32)

    def _sinkhorn(self, lone: Sinkhorn) -> None:
        logits = lone.chain.logits
        with self._safe([logits], [lone.mixed]):
            source = self.current(node_of(logits))
            if torch.finfo(lone.mixed.dtype).bits > torch.finfo(example(source).dtype).bits:
                source = self.emit("to", source, lone.mixed.dtype)
            mixed = self._mixed(source, lone.chain)
            out = self._as(mixed, lone.mixed, source)
        self._replace([(lone.mixed, out)])
        self.made.append(("mhc_sinkhorn", mixed, lone))

    # --- inputs ---

    def current(self, node: fx.Node) -> fx.Node:
        while node in self.new:
            node = self.new[node]
        return node

    def _streams(self, pre: Pre, n: int, width: int) -> fx.Node:
        """x as [..., n, D], in the dtype that h_in needs."""
        return self._widened(self._split(pre.norm.x, n, width // n), pre.h_in)

    def _split(self, x: Value, n: int, d: int) -> fx.Node:
        """x as [..., n, D]."""
        node = self.current(node_of(x))
        shape = example(node).shape
        if len(shape) >= 3 and shape[-1] == d and shape[-2] == n:
            return node
        if len(shape) >= 2 and shape[-1] == n * d:
            return self.emit("unflatten", node, -1, (n, d))
        return self.emit("reshape", node, -1, n, d)

    def _widened(self, x: fx.Node, result: Value) -> fx.Node:
        """``x`` in the dtype of ``result`` where something needs the result that exactly."""
        dtype = example(x).dtype
        if torch.finfo(result.dtype).bits <= torch.finfo(dtype).bits or self._narrowed(node_of(result), dtype):
            return x
        return self.emit("to", x, result.dtype)

    def _narrowed(self, node: fx.Node, dtype: torch.dtype) -> bool:
        """Whether every use of ``node`` is a cast to ``dtype``, through views at most."""
        users = [u for u in node.users if u.op != "output"]
        if not users or len(users) != len(node.users):
            return False
        for user in users:
            value = self.finder.values.of(user)
            if not isinstance(value, Value) or (value.dtype != dtype and value.func not in VIEWS):
                return False
            if value.dtype == dtype and is_cast(value):
                continue
            if value.func not in VIEWS or not self._narrowed(user, dtype):
                return False
        return True

    def _gathered(self, parts: Mapping[str, Piece | float], n: int, width: int, what: str, x: fx.Node) -> fx.Node:
        """phi, alpha or bias of the given roles as one tensor; a number stands for all elements of a role."""
        rows = {"pre": n, "post": n, "res": n * n} if what != "alpha" else dict.fromkeys(_ROLES, 1)
        wanted = ["pre"] if set(parts) == {"pre"} else ["pre", "post"] if "res" not in parts else list(_ROLES)
        starts, total = {}, 0
        for role in wanted:
            starts[role] = total
            total += rows[role]
        pieces = [(role, piece) for role, piece in parts.items() if isinstance(piece, Piece)]
        sizes = {p.value: self._rows(p.value, width if what == "phi" else 1) for _, p in pieces}
        if len(sizes) == 1 and len(pieces) == len(parts):
            (leaf,) = sizes
            if sizes[leaf] >= total and all(piece.start == starts[role] for role, piece in pieces):
                node = self._rowed(self.current(node_of(leaf)), pieces[0][1], width, what)
                return node if sizes[leaf] == total else self.emit(operator.getitem, node, slice(0, total))
        missing = [role for role in wanted if role not in parts]
        if missing:
            raise Mismatch(f"no {what} for h_{missing[0]}: expected those of h_pre, h_post and h_res in one tensor")
        nodes = []
        for role in wanted:
            part = parts[role]
            if not isinstance(part, Piece):
                dtype = torch.promote_types(example(x).dtype, torch.float32)
                nodes.append(self.emit("new_full", x, [rows[role]], part, dtype=dtype))
                continue
            node = self._rowed(self.current(node_of(part.value)), part, width, what)
            if sizes[part.value] != rows[role]:
                node = self.emit(operator.getitem, node, slice(part.start, part.start + rows[role]))
            nodes.append(node)
        dtypes = {example(node).dtype for node in nodes}
        if len(dtypes) > 1:
            nodes = [self.emit("to", node, torch.float32) for node in nodes]
        return self.emit(torch.cat, nodes) if len(nodes) > 1 else nodes[0]

    def _rows(self, value: Value, per: int) -> int:
        total = 1
        for size in value.shape:
            if size.symbols:
                raise Mismatch("a weight's size is dynamic", value)
            total *= size.factor
        return total // per

    def _rowed(self, node: fx.Node, piece: Piece, width: int, what: str) -> fx.Node:
        shape = tuple(example(node).shape)
        if what != "phi":
            return node if len(shape) == 1 else self.emit("reshape", node, -1)
        if piece.columns:
            if len(shape) != 2:
                node = self.emit("reshape", node, width, -1)
            return self.emit("t", node)
        return node if shape == (shape[0], width) and len(shape) == 2 else self.emit("reshape", node, -1, width)

    def _gamma(self, affines: dict[str, Affine], n: int, width: int) -> fx.Node | None:
        gammas = {a.gamma for a in affines.values()}
        if len(gammas) != 1:
            raise Mismatch("h_pre, h_post and h_res have different gammas")
        gamma = gammas.pop()
        if gamma is None:
            return None
        node = self.current(node_of(gamma.value))
        d = width // n
        if gamma.rows == width:
            return node if tuple(example(node).shape) == (n, d) else self.emit("reshape", node, n, d)
        if gamma.rows != d:
            raise Mismatch("gamma has neither n * D elements nor D", gamma.value)
        return self.emit("expand", self.emit("reshape", node, d), n, d)

    # --- outputs ---

    def _as(self, node: fx.Node, like: Value, x: fx.Node) -> fx.Node:
        """``node`` with the shape and dtype of ``like``."""
        old = node_of(like)
        wanted = example(old)
        node = self._shaped(node, list(wanted.shape), x)
        if example(node).dtype != wanted.dtype:
            node = self.emit("to", node, wanted.dtype)
        if _order(example(node)) == _order(wanted) or not self._strides_matter(old):
            return node
        # A later reshape must be the copy, or the view, that it was.
        order = _order(wanted)
        back = sorted(range(len(order)), key=order.__getitem__)
        return self.emit("permute", self.emit("contiguous", self.emit("permute", node, *order)), *back)

    def _strides_matter(self, old: fx.Node) -> bool:
        """Whether strides decide what is seen: a result whose memory order shows, or a view of it changed in place."""
        seen, todo = {old}, [old]
        while todo:
            node = todo.pop()
            if _written(node):
                return True
            for user in node.users:
                if user.op == "output":
                    return True
                value = self.finder.values.of(user) if user.op.startswith("call_") else None
                mine = self.finder.values.of(node)
                if user in seen or _written(user):
                    todo += [user] if user not in seen else []
                    seen.add(user)
                elif isinstance(value, Value) and isinstance(mine, Value):
                    pointwise = value.shape == mine.shape and value.func not in _FRESH
                    if value.func in VIEWS or pointwise:
                        seen.add(user)
                        todo.append(user)
                elif isinstance(value, tuple):
                    seen.add(user)
                    todo.append(user)
        return False

    def size(self, node: fx.Node, d: int) -> Size:
        """A size of a node's tensor."""
        return size_of(example(node).shape[d], self.finder.values.fixed)

    def _known(self, shape: Sequence[Any]) -> list[Any]:
        """Sizes whose symbols count as their present values, as numbers."""
        fixed = self.finder.values.fixed
        sizes = [size_of(s, fixed) for s in shape]
        return [s if size.symbols else size.factor for s, size in zip(shape, sizes, strict=True)]

    def _shaped(self, node: fx.Node, shape: list[Any], x: fx.Node) -> fx.Node:
        have, shape = self._known(example(node).shape), self._known(shape)
        if len(have) == len(shape) and all(compat.same_size(a, b) for a, b in zip(have, shape, strict=True)):
            return node
        sizes: list[Any] = []
        inferred = False
        for size in shape:
            if isinstance(size, int):
                sizes.append(size)
                continue
            source = next(
                (
                    (s, d)
                    for s in (node, x)
                    for d, other in enumerate(example(s).shape)
                    if compat.same_size(other, size)
                ),
                None,
            )
            if source is not None:
                sizes.append(self.emit("size", *source))
            elif not inferred:
                sizes.append(-1)
                inferred = True
            else:
                raise Mismatch("the shape of the result has more than one new dynamic size")
        return self.emit("reshape", node, *sizes)

    def _replace(self, pairs: list[tuple[Value, fx.Node]]) -> None:
        for value, new in pairs:
            old = node_of(value)
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
                if key in old.meta:
                    new.meta[key] = old.meta[key]
            if needs_grad(old):
                new.meta[_GRAD] = True
            old.replace_all_uses_with(new)
            self.new[old] = new
            self.replaced.append(old)

    # --- safety ---

    def _safe(self, sources: Sequence[Value], outputs: Sequence[Value]) -> Any:
        """The place for the op: after its inputs, before every use of its outputs. Raises Mismatch where there is none."""
        ins = {node_of(v) for v in sources}
        outs = [node_of(v) for v in outputs]
        region = self._region(ins, outs)
        first, last = min(self.order[o] for o in region | set(outs)), max(self.order[o] for o in outs)
        storages = {
            compat.storage_key(e) for node in region | ins | set(outs) if isinstance(e := example(node), torch.Tensor)
        }
        for position, storage in self.events:
            if first <= position <= last and storage in storages:
                raise Mismatch("a tensor of the formula is changed in place within it", self.finder.value(outs[0]))
        states = {self.grad[node] for node in region | set(outs)}
        if len(states) > 1:
            raise Mismatch("gradients are switched on or off within the formula", self.finder.value(outs[0]))
        for node in region - set(outs):
            for user in node.users:
                if "hook" in str(user.target) or "retain_grad" in str(user.target):
                    raise Mismatch("a hook is on an intermediate result", self.finder.value(node))
        anchor = min(outs, key=self.order.__getitem__)
        self.trace = {key: anchor.meta[key] for key in ("stack_trace", "nn_module_stack") if key in anchor.meta}
        late = max((self.order[node] for node in ins), default=-1)
        if late >= self.order[anchor]:
            users = [u for o in outs for u in o.users if u not in region]
            if any(self.order.get(u, -1) <= late for u in users):
                raise Unplaced(
                    "an input of the op is computed after one of its results is used", self.finder.value(outs[0])
                )
            node = next(n for n in ins if self.order[n] == late)
            # inserting_after would put each further node before the last one.
            return self.graph.inserting_before(self.current(node).next)
        return self.graph.inserting_before(anchor)

    def _region(self, ins: set[fx.Node], outs: list[fx.Node]) -> set[fx.Node]:
        """The nodes between inputs and outputs. Raises Mismatch where an input needs an output."""
        region, todo = set(outs), list(outs)
        while todo:
            for parent in todo.pop().all_input_nodes:
                if (
                    parent not in ins
                    and parent not in region
                    and parent in self.order
                    and parent.op.startswith("call_")
                ):
                    region.add(parent)
                    todo.append(parent)
        bad, todo, seen = set(outs), list(ins), set(ins)
        floor = min(self.order[o] for o in outs)
        while todo:
            for parent in todo.pop().all_input_nodes:
                if parent in bad:
                    raise Unplaced("an input of the op depends on its result", self.finder.value(parent))
                if parent not in seen and self.order.get(parent, -1) >= floor:
                    seen.add(parent)
                    todo.append(parent)
        return region

    # --- graph ---

    def emit(self, target: Any, *args: Any, **options: Any) -> fx.Node:
        """A new node at the current place, run on fake tensors: bad input raises here and not in the compile."""
        call = self.graph.call_method if isinstance(target, str) else self.graph.call_function
        node = call(target, args, options)
        node.meta["example_value"] = run_fake(node)
        node.meta.update(self.trace)
        return node

    def undo(self, before: list[fx.Node]) -> None:
        kept = set(before)
        for node in reversed(list(self.graph.nodes)):
            if node not in kept:
                self.graph.erase_node(node)

    def _sweep(self) -> None:
        """Erase what only the replaced nodes needed. Never the whole graph's dead code: it may have effects."""
        todo = list(self.replaced)
        gone: set[fx.Node] = set()
        while todo:
            node = todo.pop()
            if node in gone or node.users or node.op not in ("call_function", "call_method"):
                continue
            if written_by(node) or not self.finder.values.inspectable(node) or example(node) is None:
                continue
            inputs = list(node.all_input_nodes)
            gone.add(node)
            self.graph.erase_node(node)
            todo += inputs


def _order(t: torch.Tensor) -> list[int]:
    """The dimensions by falling stride; dimensions of size 1 stay where they are."""
    strides, sizes = ([compat.hint(s) for s in each] for each in (t.stride(), t.shape))
    real = iter(sorted((d for d in range(t.dim()) if sizes[d] != 1), key=lambda d: -strides[d]))
    return [next(real) if sizes[d] != 1 else d for d in range(t.dim())]


_FRESH = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.native_layer_norm.default,
    torch.ops.aten.native_dropout.default,
}
"""Operations whose result does not have its input's memory order."""


def node_of(value: Value) -> fx.Node:
    if value.node is None:
        raise Mismatch("a tensor of the formula is inside a composite operation", value)
    return value.node


def needs_grad(node: fx.Node) -> bool:
    """Whether gradients may be asked of ``node``. What took another's place was run on its fake values without them."""
    fake = example(node)
    return _GRAD in node.meta or (isinstance(fake, torch.Tensor) and fake.requires_grad)


_GRAD = "mhc_inductor_needs_grad"


def grad_states(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Whether gradients are on at each node."""
    states, on = {}, torch.is_grad_enabled()
    for node in graph.nodes:
        if node.op == "call_function" and "set_grad_enabled" in getattr(node.target, "__name__", ""):
            on = bool(node.args[0])
        states[node] = on
    return states
