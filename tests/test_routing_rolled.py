# SPDX-License-Identifier: Apache-2.0
"""Conjunctions of an unrolled loop are merged into one under a variable only if that gives each of them again."""

from __future__ import annotations

import functools
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import ONE, Index, Size, Var, const
from mhc_inductor.routing.graph.linear import Datum, Key, Linear, atom, floor, mapped
from mhc_inductor.routing.masks.keys import All, AnyOf, Compare, Given
from mhc_inductor.routing.operators.selection.intervals import rolled
from tests.tools.capture import alike

T = Key(Size(32))


class Named(NamedTuple):
    """Stands for a tensor of a graph."""

    name: str


# Values are compared by identity: one name is always one tensor.
named = functools.cache(Named)


def element(name: str, *index: int | Index) -> Ref:
    return Ref(named(name), tuple(const(i) if isinstance(i, int) else i for i in index))  # type: ignore[arg-type]


def number(ref: Ref) -> Linear:
    return atom(Datum(ref))


def key_is(x: Linear) -> All:
    return All(frozenset({Compare("eq", atom(T).minus(x))}))


def unrolled(keys: AnyOf) -> set[All]:
    """Returns the conjunctions, each with every number in place of its variable."""
    found = set()
    for conj in keys:
        if not conj.bound:
            found.add(conj)
            continue
        (j,) = conj.bound
        for place in range(j.size.factor):
            found.add(All(frozenset(_fixed(x, j, place) for x in conj.literals)))
    return found


def _fixed(literal: Compare | Given, j: Var, place: int) -> Compare | Given:
    """Puts a number in place of a variable, independently of the function of the pass that does so."""

    def at(ref: Ref) -> Ref:
        terms = ({a: c for a, c in i.terms.items() if a is not j} for i in ref.index)
        steps = (const(i.terms[j].factor * place) if j in i.terms else Index({}) for i in ref.index)
        return Ref(ref.value, tuple(Index(t).plus(s) for t, s in zip(terms, steps, strict=True)))

    if isinstance(literal, Given):
        return Given(at(literal.ref), literal.want)
    return Compare(literal.kind, mapped(literal.value, at))


@pytest.mark.parametrize("seed", range(40))
def test_the_variable_indexes_the_tensor_whose_index_moves(seed):
    a, b = (f"{name}{seed}" for name in "ab")  # other names, another order of the sets
    keys = [key_is(floor(number(element(a, 0)).plus(number(element(b, n))), 2)) for n in range(3)]
    (merged,) = rolled(keys)
    assert len(merged.bound) == 1 and unrolled([merged]) == set(keys)
    (literal,) = merged.literals
    assert {d.ref.value.name for d in literal.value.data() if d.ref.index[0].variables()} == {b}


def _random(rng: random.Random, depth: int, names: str) -> Any:
    """Returns a function from a step to a whole number of tensor elements, sums and quotients."""
    if depth == 0 or rng.random() < 0.3:
        name, start, step = rng.choice(names), rng.randrange(3), rng.choice([0, 0, 1, 2])
        return lambda n: number(element(name, start + step * n))
    parts = [(_random(rng, depth - 1, names), rng.choice([1, 1, 2, -1])) for _ in range(2)]
    by = rng.choice([0, 2, 3])

    def total(n: int) -> Linear:
        x = Linear()
        for part, factor in parts:
            x = x.plus(part(n), factor)
        return floor(x, by) if by else x

    return total


@pytest.mark.parametrize("seed", range(150))
def test_random_loops_unroll_to_what_they_were(seed):
    rng = random.Random(seed)
    formulas = [_random(rng, 3, "abcd") for _ in range(rng.randrange(1, 3))]
    keys = []
    for n in range(rng.randrange(1, 5)):
        literals: set[Compare | Given] = {Compare("le", atom(T).minus(f(n))) for f in formulas}
        if rng.random() < 0.5:
            literals.add(Given(element("m", n), True))
        keys.append(All(frozenset(literals)))
    assert unrolled(rolled(keys)) == set(keys)


def test_conjunctions_that_occur_twice():
    keys = [key_is(number(element("a", n))) for n in (0, 2, 0, 2)]
    (merged,) = rolled(keys)
    assert unrolled([merged]) == set(keys)
    assert rolled(keys[:1] * 2) == keys[:1]


def test_dynamic_sizes_in_an_index_are_no_constants():
    q, size = Var(Size(8)), Index({None: Size(1, ("s0",))})
    keys = [key_is(number(element("a", Index({q: ONE}).plus(c)))) for c in (const(0), size)]
    assert rolled(keys) == keys
    keys = [key_is(number(element("a", size if n else const(0), n))) for n in range(3)]
    assert unrolled(rolled(keys)) == set(keys)


def _given() -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 16, 8, generator=g) for _ in range(3))
    a, b = (torch.randint(0, 16, (2, 16, 4), generator=g) for _ in range(2))
    return q, k, v, a, b, torch.rand(2, 16, generator=g) > 0.3


def _quotients(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, keep: Tensor) -> Tensor:
    at, mask = torch.arange(16), torch.zeros(1, dtype=torch.bool)
    for n in range(3):
        mask = mask | (at == ((a[..., 0] + b[..., n]) // 2)[..., None])
    mask = mask & keep[:, None, :]
    return torch.softmax((q @ k.mT * 0.25).masked_fill(~mask, -1e9), -1) @ v


def _twice(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, keep: Tensor) -> Tensor:
    at, start = torch.arange(16), a[..., :1]

    def seen() -> Tensor:
        return ((at >= start) & (at < start + 4)) | ((at >= start) & (at < start + 12))

    return torch.softmax((q @ k.mT * 0.25).masked_fill(~(seen() & seen()), -1e9), -1) @ v


@pytest.mark.parametrize("fn", [_quotients, _twice])
def test_attentions_under_such_masks(fn):
    for _ in range(4):  # the order of sets differs from compile to compile
        alike(fn, _given(), (), {"selection_attention": 1}, False, 2e-6)
