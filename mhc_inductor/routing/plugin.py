# SPDX-License-Identifier: Apache-2.0
"""The entry point for operators of other packages: a generator proposes formulas, and numbers decide.

A proposal may be wrong: before the op replaces the formula, both run on the same data, on every compile (verify.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import fx

from mhc_inductor.compat import OpOverload
from mhc_inductor.routing import interface
from mhc_inductor.routing.edit import Edit, Pairs
from mhc_inductor.routing.graph.bounds import DEPTH, Steps
from mhc_inductor.routing.graph.expressions import (
    _DIV,
    _MUL,
    Ref,
    Share,
    _factors_of,
    addends,
    is_cast,
    operands,
    peel,
    power,
    shares,
    shown,
    whole,
)
from mhc_inductor.routing.graph.expressions import _REDUCTIONS as REDUCTIONS
from mhc_inductor.routing.graph.index import ONE, DynamicWidth, Unsupported
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match, Mismatch
from mhc_inductor.routing.verify import said

aten = torch.ops.aten
Proposal = Match | None  # a formula and its op, or None where an input was not found
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclasses.dataclass(eq=False)
class Element:
    """A product or one of its factors, behind views and casts. What was not found, and what is asked of it, is false."""

    ref: Ref | None = None
    parts: tuple[Ref, ...] = ()  # the factors of the product that this stands for
    eps: float = 0.0

    def __bool__(self) -> bool:
        return self.ref is not None

    @property
    def coef(self) -> float:
        """Returns the product of the numbers among the factors."""
        return self._product[0]

    @property
    def arg(self) -> Element:
        """Returns the first argument of the function that computes this factor, if it has the factor's shape."""
        inner = peel(self.ref) if self.ref else None
        a = inner.value.args[0] if inner and inner.value.args else None
        same = inner and isinstance(a, Value) and a.shape == inner.value.shape
        return Element(Ref(a, inner.index)) if same else Element()  # type: ignore[arg-type, union-attr]

    def factor(self, op: Any) -> Element:
        """Returns the factor that calls ``op``, such as ``aten.tanh``. For ``aten.silu``, also ``a * sigmoid(a)``."""
        found = next((r for r in self._once if getattr(peel(r).value.func, "overloadpacket", None) is op), None)
        if found is None and op is aten.silu and (gate := self.factor(aten.sigmoid)).arg.ref is not None:
            same = next((r for r in self._once if shown(r)[-1] == shown(gate.arg.ref)[-1]), None)
            return Element(gate.ref, (*gate.parts, same)) if same else Element()
        return Element(found, (found,)) if found else Element()

    def norm(self) -> Element:
        """Returns x of ``x * rsqrt(mean(x * x) + eps)``, with ``eps``. Whether it is a mean, numbers decide."""
        for root in (r for r, exponent in self._product[1].items() if exponent == -0.5):
            with contextlib.suppress(Unsupported, DynamicWidth):
                eps, terms = addends(root)
                sums = Element(terms[0][1])._once if len(terms) == 1 else []
                summed = peel(sums[0]).value if len(sums) == 1 else None
                if summed is None or summed.func not in REDUCTIONS:
                    continue
                squares = Element(whole(summed.args[0]))._product[1]
                for x in self._once if [*squares.values()] == [2.0] else ():
                    if peel(x).value is peel(next(iter(squares))).value:
                        return Element(x, (x, root), eps)
        return Element()

    def rest(self, *found: Element) -> Element:
        """Returns the factor other than ``found``, if there is exactly one. Numbers do not count: see ``coef``."""
        left = [r for r in self._product[1] if not any(r in one.parts for one in found)]
        return Element(left[0], (left[0],)) if len(left) == 1 and left[0] in self._once else Element()

    def read(self, out: Value) -> Value:
        """Returns the innermost tensor with dimensions in the order of the result ``out`` that is not narrower than it."""
        refs, dims = shown(self.ref) if self.ref else [], [*zip(whole(out).index, out.shape, strict=True)]
        have = {r: [d for d in zip(r.index, r.value.shape, strict=True) if d[1] != ONE] for r in refs}
        held = [r for r in refs if r.value.node is not None and have[r] == [d for d in dims if d in have[r]]]
        wide = [r for r in held if r.value.dtype.itemsize >= out.dtype.itemsize]
        return (wide or held or refs[:1])[-1].value

    @property
    def _once(self) -> list[Ref]:
        return [r for r, exponent in self._product[1].items() if exponent == 1.0]

    @functools.cached_property
    def _product(self) -> tuple[float, dict[Ref, float], list[Value]]:
        """Returns the number, the factors with exponents, each as the model reads it, and the values multiplied out."""
        coef, factors, first, inside = 1.0, dict[Ref, float](), dict[Ref, Ref](), list[Value]()

        def parts(ref: Ref) -> list[Share] | None:
            inner = peel(ref)
            # A number that may change stays a factor: looking at it would fix it.
            dynamic = any(isinstance(a, (torch.SymInt, torch.SymFloat)) for a in inner.value.args)
            made = None if dynamic else _factors_of(inner, ())
            if made and any(isinstance(s.of, Ref) for s in made):
                inside.append(inner.value)
                read = (r for r in operands(inner) if isinstance(r, Ref))
                made = [s if isinstance(s.of, float) else s._replace(of=next(read)) for s in made]
            return made

        with contextlib.suppress(Unsupported, DynamicWidth):
            found = shares([Share(self.ref)], parts, Steps("factors", self.ref.value, DEPTH)) if self.ref else []
            for a, exponent in found:
                if isinstance(a, float):
                    coef *= power(a, exponent)
                else:
                    a = first.setdefault(shown(a)[-1], a)  # casts that round nothing make no other factor
                    factors[a] = factors.get(a, 0.0) + exponent
        return coef, factors, inside


class Graph:
    """A graph that an operator searches."""

    def __init__(self, name: str, view: View) -> None:
        self.name, self.view, self.at = name, view, view.nodes[0]

    def products(self) -> Iterator[Element]:
        """Yields the products of tensors, the last of the graph first."""
        for node in reversed(self.view.nodes):
            self.at, value = node, self.view.value(node) if node in self.view.live else None
            inner = value
            while inner is not None and is_cast(inner):
                inner = inner.args[0]
            if value and inner and inner.func in (*_MUL, *_DIV):
                yield Element(whole(value))

    def propose(self, out: Element, **inputs: Element | float) -> Proposal:
        """Returns the proposal that the op, with these arguments by name, gives ``out``. Yield it to have it tried."""
        if out.ref is None or any(isinstance(e, Element) and not e for e in inputs.values()):
            return None
        result = out.ref.value
        given = {k: e.read(result) if isinstance(e, Element) else e for k, e in inputs.items()}
        detail = ", ".join(f"{k} = {v:g}" for k, v in given.items() if not isinstance(v, Value))
        tensors = [v for v in given.values() if isinstance(v, Value)]
        data = types.SimpleNamespace(given=given, inside=out._product[2], smaller=[])
        return Match(self.name, tensors, [result], detail, data=data, proposed=True)


@dataclasses.dataclass
class _Plugged:
    """An operator of another package, in the form that the pass runs."""

    name: str
    op: OpOverload
    find: Callable[[Graph], Iterable[Proposal]]
    proposes = True

    def __call__(self) -> _Plugged:
        return self

    def candidates(self, view: View) -> Iterable[fx.Node]:
        return view.nodes[:1]

    def match(self, view: View, node: fx.Node) -> Iterable[Match]:
        graph, found, top = Graph(self.name, view), list[Match](), list[Match]()
        try:
            for one in filter(None, self.find(graph)):
                around = [m for m in found if one.start in m.data.inside]
                (around[-1].data.smaller if around else top).append(one)  # tried if what is around it is refused
                found.append(one)
        except Exception as error:  # ends the search; the report says at which product
            view.knowledge.failures.append((graph.at, error))
        return top

    def smaller(self, match: Match) -> Iterable[Match]:
        return match.data.smaller

    def emit(self, edit: Edit, match: Match) -> Pairs:
        given = {k: edit.input(v) if isinstance(v, Value) else v for k, v in match.data.given.items()}
        try:
            call = edit.create("call_function", self.op, (), given)
            return [(match.outputs[0], edit.as_like(call, match.outputs[0]))]
        except Exception as error:  # no fake function, or arguments or a result that do not fit
            if isinstance(error, Mismatch):
                raise
            raise Mismatch(f"the op cannot stand for the formula: {said(error)}") from error

    def kernels(self, op: str, device: str) -> tuple[str, ...]:
        return (str(self.op),)


def register(name: str, *, op: Any) -> Callable[[_F], _F]:
    """Returns a decorator that adds a generator of proposals for ``op``, such as ``torch.ops.example.swiglu``.

    Raises ValueError if the op returns anything but one new tensor or writes one, or if the name is taken.
    """
    overload = op if isinstance(op, OpOverload) else op.default
    schema = overload._schema
    if schema.is_mutable or [str(r.type) for r in schema.returns] != ["Tensor"] or schema.returns[0].alias_info:
        raise ValueError(f"register: an op must return one new tensor and write none, got {schema}")

    def add(find: _F) -> _F:
        interface.register(_Plugged(name, overload, find), name)
        return find

    return add
