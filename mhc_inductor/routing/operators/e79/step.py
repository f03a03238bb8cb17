# SPDX-License-Identifier: Apache-2.0
"""Recognises one step of E79 (coupled memory-modulation matrix recurrence) in normal form, however it is spelled.

r = sigmoid(M k^ + b_s) ; c = sigmoid(M.T k^ + b_s) ; delta = v - S k^ ; S' = r S c + delta (x) k^
p = sigmoid(S' m^ + b_m) ; w = sigmoid(S'.T m^ + b_m) ; g = delta - M m^ ; M' = p M w + g (x) m^
out = y * silu(y),  y = S' q ;  k^ = k / (|k| + 1e-6), m^ likewise
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Collection

from torch import fx

from mhc_inductor.routing.graph.expressions import (
    Ref,
    addends,
    aten,
    close,
    number,
    peel,
    shown,
    written,
)
from mhc_inductor.routing.graph.gates import sigmoid_argument, squared
from mhc_inductor.routing.graph.index import ONE, DynamicWidth, Size, Unsupported, Var, var
from mhc_inductor.routing.graph.linear import variables_of
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.e79.terms import (
    FULL,
    Applied,
    Frame,
    Leaf,
    Product,
    applied,
    pieces,
    product,
)
from mhc_inductor.routing.operators.e79.update import NoUpdate, Update, Weak, matrices_in, update, word_of

EPS = 1e-6
_CLAMPS = (aten.clamp_min.default, aten.clamp.default, aten.maximum.default, aten.clamp_min.Tensor)


@dataclasses.dataclass
class Step:
    """One step: its states before and after, and its inputs. ``out`` and ``q`` are None where nothing reads S'."""

    frame: Frame
    S: Value
    M: Value
    S_new: Value
    M_new: Value
    leaves: dict[str, Leaf | None]
    out: Value | None = None
    out_node: fx.Node | None = None
    cut: int | None = None
    """The number of operations after which the search for the output was cut off; None where it was not."""

    @property
    def pattern(self) -> tuple[bool, bool]:
        """Whether b_s and b_m are absent: the same in every step of a scan."""
        return self.leaves["b_s"] is None, self.leaves["b_m"] is None


class Recogniser:
    """Finds steps among matrices of one shape."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.known: dict[Value, fx.Node] = {}
        """The matrices of the graph, each with the first node that holds it."""
        self._sources: set[Value] = set()
        self._updates: dict[Value, Update | Mismatch | None] = {}
        self._of_state: collections.defaultdict[Value, list[Value]] = collections.defaultdict(list)

    def add(self, value: Value, node: fx.Node) -> None:
        """Adds a matrix of the graph. Matrices must be added in graph order."""
        ref = self.frame.matrix(value)
        here = ref.index
        refs = shown(ref, self._sources)
        if written(refs[-1].value) and refs[-1].value.shape == value.shape:
            self._sources.add(refs[-1].value)
        if refs[-1].index != here or refs[-1].value.shape != value.shape:
            same = [r for r in refs if r.index == here and r.value.shape == value.shape]
            # A state may be a view of another tensor; skip transposed states and expanded vectors.
            if not self._source(refs[-1]):
                return
            refs = same
            self._sources.add(refs[-1].value)
        self.known.setdefault(refs[-1].value, node)

    def _source(self, ref: Ref) -> bool:
        i, j = self.frame.i, self.frame.j
        if set(ref.index) == set(self.frame.matrix(ref.value).index) or not {i, j} <= variables_of(ref):
            return ref.value.func in FULL
        return (
            ref.value.func in (None, *FULL) or written(ref.value) or any({i, j} <= at.variables() for at in ref.index)
        )

    def update(self, value: Value) -> Update | None:
        """Returns the gated update that ``value`` is, or None. Raises Mismatch where it almost is one."""
        if value not in self._updates:
            try:
                self._updates[value] = made = update(value, self.frame, self._sources, self.known)
                self._of_state[made.state].append(value)
            except Mismatch as mismatch:
                self._updates[value] = mismatch
            except (NoUpdate, Unsupported):
                self._updates[value] = self._rounded(value)
        found = self._updates[value]
        if isinstance(found, Mismatch):
            raise found
        return found

    def _rounded(self, value: Value) -> Mismatch | None:
        """Returns a Mismatch where only casts of the addends keep ``value`` from being an update, else None."""
        with contextlib.suppress(NoUpdate, Mismatch, Unsupported):
            _, terms = addends(self.frame.matrix(value), self._sources)
            rounded = [t.value for _, t in terms if written(t.value)] if len(terms) == 2 else []
            if rounded and update(value, self.frame, self._sources.difference(rounded), self.known):
                return Mismatch(
                    f"r S c or delta (x) k^ is rounded to {rounded[0].dtype} before they are added", rounded[0]
                )
        return None

    @functools.cached_property
    def update_nodes(self) -> set[fx.Node]:
        """The nodes of all updates. Valid only after :meth:`update` was called for every matrix."""
        return {self.known[v] for v, u in self._updates.items() if isinstance(u, Update)}

    def reads_a_matrix(self, value: Value) -> bool:
        """Checks whether ``value`` is an update in which both gates read products of matrices with vectors."""
        found = self._updates.get(value)
        if not isinstance(found, Update):
            return False
        return all(matrices_in(ref, self.known) for ref in (found.row, found.col))

    # --- vectors ---

    def unit(self, vector: Product, v: Var, name: str, where: Value) -> Leaf:
        """Returns k of ``k / (|k| + 1e-6)``. Raises Mismatch. ``name`` names the vector in messages."""
        frame = self.frame
        scales = [(f, e) for f, e in vector.factors if v not in variables_of(f)]
        rest = [(f, e) for f, e in vector.factors if v in variables_of(f)]
        if not scales:
            raise Mismatch(f"{name} is not normalised: expected {name} / (|{name}| + {EPS:g})", where)
        if len(scales) != 1 or scales[0][1] != -1.0:
            word = word_of(scales[0][0].value)
            raise Mismatch(f"{name} is scaled by {word}; expected a division by |{name}| + {EPS:g}", scales[0][0].value)
        normed, bound = self._norm(scales[0][0], name)
        want = product(normed)
        if not close(want.coef, vector.coef):
            raise Mismatch(f"the normalised {name} is scaled by {vector.coef / want.coef:g}", where)
        if _canonical(frame, rest, v) != _canonical(frame, want.factors, bound):
            raise Mismatch(f"the norm that divides {name} is not the norm of {name}", scales[0][0].value)
        mine, normed_to = (
            {d for f, _ in of for d in p.roundings[f]} for p, of in ((vector, rest), (want, want.factors))
        )
        if mine != normed_to:
            raise Mismatch(f"{name} is rounded in another way than in the norm that divides it", where)
        return Leaf(frame.along(normed, bound))

    def _norm(self, ref: Ref, name: str) -> tuple[Ref, Var]:
        ref = peel(ref)
        if ref.value.func in _CLAMPS:
            raise Mismatch(f"{name} is divided by max(|{name}|, eps); expected |{name}| + {EPS:g}", ref.value)
        eps, terms = addends(ref)
        if len(terms) != 1 or not close(terms[0][0], 1.0):
            raise Mismatch(f"{name} is divided by something that is not |{name}| + {EPS:g}", ref.value)
        if not close(eps, EPS):
            raise Mismatch(f"{eps:g} is added to the norm of {name}; expected {EPS:g}", ref.value)
        root = peel(terms[0][1])
        is_root = root.value.func is aten.sqrt.default
        if root.value.func is aten.pow.Tensor_Scalar:
            is_root = number(root.value.args[1]) == 0.5
        inside = Ref(root.value.args[0], root.index) if is_root else None
        square = squared(inside) if inside is not None else None
        if square is None:
            raise Mismatch(f"{name} is divided by something that is not its Euclidean norm + {EPS:g}", root.value)
        v, scale, bound = square
        real = [b for b in bound if b.size != ONE]
        if len(real) == 1 and real[0].size.symbols:
            raise DynamicWidth(real[0].size)
        if len(real) != 1 or real[0].size != Size(self.frame.n) or not close(scale, 1.0):
            raise Mismatch(f"the norm of {name} is not over its {self.frame.n} elements", root.value)
        return v, real[0]

    def applied_unit(self, found: Applied, name: str) -> Leaf:
        """Returns k of the vector ``k / (|k| + 1e-6)`` that a matrix is applied to. Raises Mismatch."""
        inner = product(found.vector)
        whole = Product(inner.coef * found.coef, inner.factors + found.others, inner.roundings)
        return self.unit(whole, found.bound, name, found.vector.value)

    # --- the parts of a step ---

    def _gate(
        self, ref: Ref, matrix: Value, v: Var, unit: Leaf, what: str, states: Collection[Value], names: str
    ) -> Leaf | None:
        """Returns the bias of the gate argument ``matrix @ unit + bias``, or None without one. Raises Mismatch.

        With ``v`` as the row variable the gate reads the matrix, as the column variable its transpose. ``names`` are
        those of the matrix, the vector and the bias in messages.
        """
        constant, found = pieces(ref, states)
        products = [(s, a) for s, _, a in found if a is not None]
        others = [(s, r) for s, r, a in found if a is None]
        big, small, bias = names.split()
        if len(products) != 1:
            raise Mismatch(
                f"{what} has {len(products)} products with a state; expected {big} {small}^ + b_{bias}", ref.value
            )
        sign, a = products[0]
        if a.matrix.value is not matrix:
            raise Mismatch(f"{what} does not read {big}", a.matrix.value)
        i, j = (v, a.bound) if v is self.frame.i else (a.bound, v)
        if a.matrix.index != (*map(var, self.frame.lead), var(i), var(j)):
            straight, turned = (big, f"{big}.T") if v is self.frame.i else (f"{big}.T", big)
            raise Mismatch(f"{what} is taken from {turned} {small}^; expected {straight} {small}^", a.matrix.value)
        if sign != 1.0:
            raise Mismatch(f"{what} has {sign:g} times the product; expected {big} {small}^ + b_{bias}", ref.value)
        if self.applied_unit(a, small).key != unit.key:
            raise Mismatch(f"{what} is not taken with the normalised {small} of the outer product", a.vector.value)
        if constant != 0.0 or len(others) > 1 or any(s != 1.0 for s, _ in others):
            raise Mismatch(f"{what} has further addends; expected {big} {small}^ + b_{bias}", ref.value)
        return Leaf(self.frame.along(others[0][1], v)) if others else None

    def _written(self, ref: Ref, sign: float, states: Collection[Value]) -> tuple[list[Leaf], list[Applied]]:
        constant, found = pieces(ref, states)
        leaves, products = [], []
        for s, r, a in found:
            if a is None:
                if s * sign != 1.0:
                    raise Mismatch(f"v enters delta with a factor of {s * sign:g}", r.value)
                leaves.append(Leaf(self.frame.along(r, self.frame.i)))
            else:
                products.append(dataclasses.replace(a, coef=a.coef * s * sign))
        if constant != 0.0:
            raise Mismatch(f"a constant {constant:g} is added to delta", ref.value)
        return leaves, products

    def _retrieved(self, a: Applied, unit: Leaf, what: str, small: str) -> None:
        if a.matrix.index != (*map(var, self.frame.lead), var(self.frame.i), var(a.bound)):
            raise Mismatch(f"{what} is transposed", a.matrix.value)
        if not close(a.coef, -1.0):
            raise Mismatch(f"{what} enters with a factor of {a.coef:g}; expected -1", a.matrix.value)
        if self.applied_unit(dataclasses.replace(a, coef=1.0), small).key != unit.key:
            raise Mismatch(f"{what} is not taken with the normalised {small} of the outer product", a.vector.value)

    def _contents(self, root: Update) -> list[Value]:
        """Returns the candidates for S' of the update ``root`` that makes M'. Raises Mismatch.

        These are the matrices that its gates read, and the updates of other states that its write reads.
        """
        gates = [a.matrix.value for ref in (root.row, root.col) for _, _, a in pieces(ref, self.known)[1] if a]
        found = {value: None for value in gates if value is not root.state}
        rounded = next((v for v in found if written(v) and self.update(peel(self.frame.matrix(v)).value)), None)
        if rounded is not None:
            raise Mismatch("S' is rounded before the gates of M read it", rounded)
        read = [a.matrix.value for _, _, a in pieces(root.write, self.known)[1] if a is not None]
        for state in read:
            if state is not root.state:
                found.update(dict.fromkeys(self._of_state.get(state, ())))
        return [value for value in found if self.update(value) is not None]

    def step(self, value: Value) -> Step | None:
        """Returns the step whose M' is ``value``, or None where it is not an update of M. Raises Mismatch.

        :meth:`update` must have been called for every matrix of the graph before.
        """
        root = self.update(value)
        if root is None:
            return None
        weak: Mismatch | None = None
        for new in self._contents(root):
            inner = self.update(new)
            assert inner is not None
            states = {inner.state, root.state, new}
            parts: list[tuple[list[Leaf], list[Applied]]] = []
            try:
                parts += (self._written(part.write, part.sign, states) for part in (inner, root))
                return self._step(value, new, root, inner, parts, states)
            except Mismatch as mismatch:
                # The previous M' and this S' look like a step too, but they share no v.
                if len(parts) == 2 and {leaf.key for leaf in parts[0][0]} & {leaf.key for leaf in parts[1][0]}:
                    raise
                weak = weak or Weak(mismatch.reason, mismatch.value)
        if weak is not None:
            raise weak
        return None

    def _step(
        self,
        value: Value,
        new: Value,
        root: Update,
        inner: Update,
        parts: list[tuple[list[Leaf], list[Applied]]],
        states: Collection[Value],
    ) -> Step:
        frame = self.frame
        (v, retrieved), (again, both) = parts
        k = self.unit(inner.unit, frame.j, "k", new)
        m = self.unit(root.unit, frame.j, "m", value)
        b_s = self._gate(inner.row, root.state, frame.i, k, "the row gate of S", states, "M k s")
        b_c = self._gate(inner.col, root.state, frame.j, k, "the column gate of S", states, "M k s")
        if (b_s and b_s.key) != (b_c and b_c.key):
            raise Mismatch("the two gates of S have different biases", new)
        if len(v) != 1 or len(retrieved) != 1 or retrieved[0].matrix.value is not inner.state:
            raise Mismatch("what is written to S is not delta = v - S k^ with the old S", inner.write.value)
        self._retrieved(retrieved[0], k, "S k^ in delta", "k")
        b_m = self._gate(root.row, new, frame.i, m, "the row gate of M", states, "S' m m")
        b_w = self._gate(root.col, new, frame.j, m, "the column gate of M", states, "S' m m")
        if (b_m and b_m.key) != (b_w and b_w.key):
            raise Mismatch("the two gates of M have different biases", value)
        if len(again) != 1 or again[0].key != v[0].key:
            raise Mismatch("what is written to M is not g = delta - M m^: delta's v is missing", root.write.value)
        if inner.state is root.state and len(both) == 2:
            # One tensor of zeros is both states: tell the products apart by their vectors.
            both.sort(key=lambda a: self.applied_unit(dataclasses.replace(a, coef=1.0), "k").key != k.key)
        elif len(both) == 2:
            both.sort(key=lambda a: a.matrix.value is not inner.state)
        if [a.matrix.value for a in both] != [inner.state, root.state]:
            raise Mismatch("what is written to M is not g = delta - M m^ with delta = v - S k^", root.write.value)
        self._retrieved(both[0], k, "S k^ in g", "k")
        self._retrieved(both[1], m, "M m^ in g", "m")
        leaves = {"k": k, "v": v[0], "q": None, "m": m, "b_s": b_s, "b_m": b_m}
        return Step(frame, inner.state, root.state, new, value, leaves)

    def output(self, step: Step, ref: Ref) -> bool:
        """Checks whether ``ref``, an element at ``Frame.i``, is the step's output; if so, sets ``out`` and q."""
        found = product(ref)
        gated = [(f, z) for f, e in found.factors if (z := _gated(f, e)) is not None]
        if len(gated) != 1:
            return False
        gate, y = gated[0]
        y = peel(y)
        a = applied(y, {step.S_new})
        if a is None:
            return False
        powers = collections.Counter[Ref]()
        for f, e in found.factors:
            if f is not gate:
                powers[f] += int(e)
        if gate.value.func is aten.silu.default:
            powers[y] += 1
        if dict(powers) == {y: 1} and close(found.coef, 1.0):
            return False  # silu(y) alone, an intermediate of the output
        if dict(powers) != {y: 2} or not close(found.coef, 1.0):
            raise Mismatch("the output is not y * silu(y) with y = S' q", ref.value)
        if a.matrix.index != (*map(var, self.frame.lead), var(self.frame.i), var(a.bound)):
            raise Mismatch("the output reads S' transposed", a.matrix.value)
        if not close(a.coef, 1.0) or a.others:
            raise Mismatch("y = S' q is scaled", y.value)
        step.leaves["q"] = Leaf(self.frame.along(a.vector, a.bound))
        step.out = ref.value
        return True


def _gated(ref: Ref, exponent: float) -> Ref | None:
    """Returns the argument of a silu or of a sigmoid, or None."""
    if exponent == 1.0 and ref.value.func is aten.silu.default:
        return Ref(ref.value.args[0], ref.index)
    return sigmoid_argument(ref, exponent)


def _canonical(frame: Frame, factors: list[tuple[Ref, float]], v: Var) -> collections.Counter[tuple[Ref, float]]:
    return collections.Counter((frame.along(peel(f), v), e) for f, e in factors)
