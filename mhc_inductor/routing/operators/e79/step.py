# SPDX-License-Identifier: Apache-2.0
"""Recognises one step of E79 (coupled memory-modulation matrix recurrence), however it is spelled.

r = sigmoid(M k^ + b_s) ; c = sigmoid(M.T k^ + b_s) ; delta = v - S k^ ; S' = r S c + delta (x) k^
p = sigmoid(S' m^ + b_m) ; w = sigmoid(S'.T m^ + b_m) ; g = delta - M m^ ; M' = p M w + g (x) m^
out = y * silu(y),  y = S' q ;  k^ = k / (|k| + 1e-6), m^ likewise

The graph says which matrices may be S', S, M and M', and which vectors they are computed from. Which vector is k, v, m
or a bias is then found by numbers: the formula is computed with each of them and compared (elements.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Set

import torch
from torch import Tensor, fx

from mhc_inductor import compat
from mhc_inductor.routing.graph.expressions import Ref, addends, product, shown, written
from mhc_inductor.routing.graph.index import DynamicWidth, Unsupported, Var
from mhc_inductor.routing.graph.linear import variables_of
from mhc_inductor.routing.graph.values import Value, behind, values_in
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Mismatch, contained
from mhc_inductor.routing.operators.e79.elements import SCALES, Data, Elements
from mhc_inductor.routing.operators.e79.roles import QUANTITIES, Missing, Roles
from mhc_inductor.routing.operators.e79.terms import FULL, Frame, Leaf


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


class NearStep(Mismatch):
    """Two matrices that are almost S' and M'.

    ``present`` are the names of the quantities between them that are E79's. ``likely``: M' reads the S that S' is made
    of, as g does; M' of one step and S' of the next resemble a step, too.
    """

    def __init__(self, missing: Missing | Mismatch, value: Value, present: list[str], likely: bool) -> None:
        self.name, reason = str(missing), str(missing)
        if isinstance(missing, Missing):
            nearest = f"the nearest is {missing.error:.1g} off; " if missing.value is not None else ""
            reason = f"nothing is {QUANTITIES[missing.name]}: {nearest}{', '.join(present)} of E79 are there"
        super().__init__(reason, value)
        self.rank = likely, len(present)
        self.pair: tuple[Value, ...] = ()


@dataclasses.dataclass
class Update:
    """A matrix that is made of a factor ``state``; ``gated`` where there are more factors."""

    state: Value
    gated: bool
    rounded: Value | None = None
    """The product of the state and its gates, where it is rounded: there is no step then, but almost."""
    near: set[Value] = dataclasses.field(default_factory=set)
    """What it is computed from, down to the matrices of the steps."""


def _behind(value: Value, ends: Set[Value | None]) -> set[Value]:
    """Returns a value and what it is computed from, down to ``ends``."""
    return {value}.union(*(behind(a, passed=lambda v: v not in ends) for a in values_in(value.args)))


class Recogniser:
    """Finds steps among matrices of one shape."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.known: dict[Value, fx.Node] = {}
        """The matrices of the graph, each with the first node that holds it."""
        self.updates: dict[Value, Update] = {}
        """The matrices that may be new states."""
        self._sources: set[Value] = set()
        self._given: dict[Value, Tensor] = {}
        self._data = Data()

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

    def look(self, view: View) -> None:
        """Finds the matrices that may be new states: sums of what a matrix is a factor of, and of an outer product."""
        stop = self._sources | {v for v in self.known if v.func in (None, *FULL)}
        unrounded = {v for v in stop if not written(v)}
        for value, node in self.known.items():
            update = None
            with contextlib.suppress(Unsupported, DynamicWidth), contained(view, node):
                update = self._update(value, stop, unrounded)
            if update is not None:
                self.updates[value] = update
        if not self.updates:
            return
        rounded = [v for v in self.known if written(v)]
        given = dict.fromkeys([*self.updates, *(u.state for u in self.updates.values()), *rounded])
        for value, update in self.updates.items():
            update.near = _behind(value, given.keys() - {update.rounded})
        n, g = self.frame.n, torch.Generator(device="cpu").manual_seed(0)
        with compat.routing.outside_compile():
            self._given = {
                v: torch.randn(len(SCALES), n, n, generator=g, dtype=torch.float64, device="cpu") for v in given
            }

    def _update(self, value: Value, stop: set[Value], unrounded: set[Value]) -> Update | None:
        both = {self.frame.i, self.frame.j}
        _, terms = addends(self.frame.matrix(value), stop)
        if len(terms) != 2:
            return None
        kept, outer = list[Ref](), set[Var]()
        for _, ref in terms:  # the outer product may be rounded: there is no step then, but almost
            found = [variables_of(f) for f, _ in product(ref, unrounded).factors]
            if any(both <= variables for variables in found):
                kept.append(ref)
            else:
                outer.update(*found)
        if len(kept) != 1 or not both <= outer:
            return None
        factors, rounded = product(kept[0], stop).factors, None
        if len(factors) == 1 and written(factors[0][0].value):
            rounded, factors = factors[0][0].value, product(kept[0], unrounded).factors
        states = [f.value for f, e in factors if f.value in self.known and e == 1.0]
        return Update(states[0], len(factors) > 1, rounded) if len(states) == 1 else None

    def step(self, value: Value) -> Step | None:
        """Returns the step whose M' is ``value``, or None where it does not resemble one. Raises NearStep.

        :meth:`look` must have been called before.
        """
        last, before = self.updates[value], [*self.updates]
        near: list[NearStep] = []
        for new in reversed(before[: before.index(value)]):
            if new is last.state or last.near.isdisjoint((new, self.updates[new].state)):
                continue
            try:
                with compat.routing.outside_compile():
                    step = self._pair(value, new)
                if step is not None:
                    return step
            except NearStep as miss:
                miss.pair = new, value
                near.append(miss)
        if near:
            raise max(near, key=lambda miss: miss.rank)
        return None

    def _pair(self, value: Value, new: Value) -> Step | None:
        """Returns the step that makes ``new`` and then ``value``, or None where nothing is like it. Raises NearStep."""
        first, last = self.updates[new], self.updates[value]
        elements = Elements(self.frame, self._given, first.near | last.near, self._data)
        wholes = [elements.computed(self.frame.matrix(v)) for v in (new, value)]
        for inner in values_in(u.rounded.args[0] for u in (first, last) if u.rounded is not None):
            elements.of(self.frame.matrix(inner))
        order = self.frame.i, self.frame.j
        made = [w.data if w.over == order else w.data.mT for w in wholes if w is not None and {*w.over} == {*order}]
        if len(made) != 2 or not elements.vectors:
            return None
        roles = Roles(elements, (self._given[first.state], self._given[last.state], self._given[new]))
        try:
            return Step(self.frame, first.state, last.state, new, value, roles.find(*made))
        except (Missing, Mismatch) as error:
            present = roles.present()
            if len(present) < 3 and not {"delta", "g"} <= {*present}:
                return None
            where = error.value or (new if "S" in str(error) else value)
            raise NearStep(error, where, present, first.state in last.near) from None

    def output(self, step: Step, ref: Ref) -> bool:
        """Checks whether ``ref``, an element at ``Frame.i``, is the step's output; if so, sets ``out`` and q."""
        near = {*behind(ref.value, passed=lambda v: v not in self._given)}
        if step.S_new not in near:
            return False
        with compat.routing.outside_compile():
            elements = Elements(self.frame, self._given, near, self._data)
            found = elements.of(ref)
            roles = Roles(elements, (self._given[step.S_new],) * 3)
            q = roles.output(found.data)
            if q is not None:
                step.leaves["q"], step.out = roles.leaf(q, "q"), ref.value
        return q is not None
