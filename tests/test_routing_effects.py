# SPDX-License-Identifier: Apache-2.0
"""Finds what calls write, keep and hook by asking PyTorch, and the modes at each position of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.functional import dropout, hardtanh, relu

from mhc_inductor import compat
from mhc_inductor.routing import effects
from mhc_inductor.routing.effects import Effects
from mhc_inductor.routing.graph.values import example, run_fake
from tests.formulas import laws_writes
from tests.tools.capture import view_of

_LIBRARY = torch.library.Library("routing_effects", "FRAGMENT")
_LIBRARY.define("pure(Tensor x) -> Tensor")
_LIBRARY.impl("pure", lambda x: x * 2, "CompositeExplicitAutograd")
torch.library.register_fake("routing_effects::pure", torch.empty_like)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    **laws_writes.WRITES,
    "hardtanh by name": lambda a: hardtanh(a, -1.0, 1.0, inplace=True),
    "dropout": lambda a: dropout(a, 0.5, True, True),
    "rng": lambda a: a.normal_(),
    "aten": lambda a: torch.ops.aten.mul_(a, 2.0),
}
PURE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "packet": lambda a, b: torch.ops.routing_effects.pure(a),
    "relu": lambda a, b: relu(a),
    "relu, not in place": lambda a, b: relu(a, False),
    "view": lambda a, b: a.view(-1),
    "a composite that writes its own": lambda a, b: torch.einsum("ij,kj->ik", a, b).softmax(-1),
    "dropout": lambda a, b: dropout(a, 0.5, True),
    "size": lambda a, b: a.new_zeros(b.size(0)),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_found(name: str) -> None:
    view = view_of(lambda x: (a := x * 2, WRITES[name](a), a)[2], torch.randn(4, 8))
    held = {id(n) for n in view.real.nodes if n.op == "call_function" and n.name.startswith("a")}
    assert view.events, "no write found"
    for _, storage, _ in view.events:
        assert any(id(n) in held for n in view.holders[storage])


@pytest.mark.parametrize("name", PURE)
def test_calls_that_write_nothing_have_no_effects(name: str) -> None:
    view = view_of(lambda x, y: (a := x * 2, PURE[name](a, y)), torch.randn(4, 8), torch.randn(4, 8))
    assert not view.events
    assert not any(view.effects.of(n).watches for n in view.real.nodes)


def test_hooks_are_seen() -> None:
    def fn(x: Tensor) -> Tensor:
        a = x * 2
        a.register_hook(lambda g: g.clamp(-1, 1))
        return a.sum()

    view = view_of(fn, torch.randn(4, requires_grad=True))
    assert [n for n in view.real.nodes if view.effects.of(n).watches]


def test_modes_belong_to_positions() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        a = x * 2
        with torch.no_grad():
            b = a * 3
            with torch.enable_grad():
                c = a * 4
        with torch.autocast("cpu", dtype=torch.bfloat16):
            d = a @ a
            with torch.autocast("cpu", enabled=False):
                e = a @ a
        with torch.inference_mode():
            f = a * 5
        return b, c, d, e, f, a * 6

    view = view_of(fn, torch.randn(4, 4, requires_grad=True))
    modes = {n.name: view.modes[n] for n in view.real.nodes}
    assert [modes[n].grad for n in "abcdef"] == [True, False, True, True, True, False]
    assert [modes[n].inference for n in "abcdef"] == [False] * 5 + [True]
    assert [len(modes[n].autocast) for n in "abcdef"] == [0, 0, 0, 1, 2, 0]
    assert modes["d"].autocast[0][1:3] == (torch.bfloat16, True) and modes["e"].autocast[1][2] is False


def test_ambient_modes_are_known() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        view = view_of(lambda x: x @ x, torch.randn(4, 4))
    (node,) = [n for n in view.real.nodes if n.op == "call_function"]
    assert not view.modes[node].grad and view.modes[node].autocast[0][:2] == ("cpu", torch.bfloat16)
    assert view.values.of(node).dtype is torch.bfloat16


def test_asking_changes_nothing() -> None:
    before = torch.get_rng_state()
    view = view_of(lambda x: torch.nn.functional.dropout(x * 2, 0.5).bernoulli_(0.5), torch.randn(4, 4))
    state = torch.get_rng_state()
    for node in view.real.nodes:
        view.effects.of(node)
    assert torch.equal(torch.get_rng_state(), state) and before.shape == state.shape
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_in_place_steps_make_new_tensors_in_the_view() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a = x * 2
        b = a + y
        a += y
        a.mul_(3)
        a[0] = 1.0
        return a * y, b

    view = view_of(fn, torch.randn(4, 8), torch.randn(4, 8))
    assert len(view.made) == 3 and view.converted == {n for _, _, n in view.events}
    first, second = view.results
    assert any(a in view.made for a in first.all_input_nodes) and not any(
        a in view.made for a in second.all_input_nodes
    )


def test_a_call_that_only_autocast_can_run_is_asked_there() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return a.bfloat16() @ b

    view = view_of(fn, torch.randn(4, 4), torch.randn(4, 4))
    assert not view.effects.unknown


def test_equal_calls_are_run_once_and_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x * y, y * x, x.t(), x.t(), x * y.t()

    view = view_of(fn, torch.randn(4, 4), torch.randn(4, 4))
    ran = list[fx.Node]()
    monkeypatch.setattr(effects, "run_fake", lambda node: (ran.append(node), run_fake(node))[1])
    calls = [n for n in view.real.nodes if n.op.startswith("call_")]
    found = {n: view.effects.result(n) for n in calls}
    # Views are run each time: their memory is that of the tensor at hand.
    assert [n.name for n in ran] == [n.name for n in calls if n.name not in ("mul_1",)]
    owners = {n: compat.storage_key(t) for n, t in found.items()}
    views = [n for n in calls if n.target == "t"]
    assert all(owners[n] == compat.storage_key(example(n.all_input_nodes[0])) for n in views)
    assert len({owners[n] for n in calls if n not in views}) == len(calls) - len(views) == 3
    for node, made in found.items():
        wanted = example(node)
        assert (made.shape, made.stride(), made.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


def test_slices_up_to_other_numbers_are_other_calls() -> None:
    graph = fx.Graph()
    ends = [graph.placeholder("n"), fx.Graph().placeholder("n")]  # of two graphs of one compile
    for node, number in zip(ends, (3, 5), strict=True):
        node.meta["example_value"] = number
    first, second = (Effects()._key((slice(None, end), 0)) for end in ends)
    assert first != second
