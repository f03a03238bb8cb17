"""Full garbage collections wait while a graph compiles, forward and backward, and are as before when it has."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from mhc_inductor.collector import _NEVER, full_collections_deferred

GIVEN = (701, 11, 13)


@pytest.fixture(autouse=True)
def given() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*GIVEN)
    yield
    gc.set_threshold(*before)


class _Watch(CustomGraphPass):
    """Notes the collector's thresholds while a graph is compiled."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append(gc.get_threshold())

    def uuid(self) -> None:
        return None


@pytest.mark.usefixtures("no_caches")
def test_forward_and_backward_compile_without_full_collections():
    watch = _Watch()
    step = torch.compile(
        lambda x: torch.sin(x).square().sum(), backend="mhc_inductor", options={"post_grad_custom_post_pass": watch}
    )
    step(torch.randn(8, requires_grad=True)).backward()
    assert watch.seen == [(*GIVEN[:2], _NEVER)] * 2
    assert gc.get_threshold() == GIVEN


def test_a_compile_that_fails_leaves_the_collector_as_it_was():
    with pytest.raises(ValueError, match="no"), full_collections_deferred():
        raise ValueError("no")
    assert gc.get_threshold() == GIVEN


def test_the_last_of_several_compiles_restores():
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with full_collections_deferred():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with full_collections_deferred():
        thread.start()
        assert entered.wait(60)
    assert gc.get_threshold() == (*GIVEN[:2], _NEVER)
    leave.set()
    thread.join()
    assert gc.get_threshold() == GIVEN


def test_thresholds_set_meanwhile_stay():
    with full_collections_deferred():
        gc.set_threshold(5, 6, 7)
    assert gc.get_threshold() == (5, 6, 7)
