# SPDX-License-Identifier: Apache-2.0
"""Recorded and replayed keys on a GPU: in CUDA graphs, captured by hand and by the compiler; wrong keys."""

from __future__ import annotations

import functools

import pytest
import torch
from test_replay import Model, by_layers, no_recompiles, others, same, states, step, trained_with

from mhc_inductor import IndexStore, checkpointed_indices, index_topk, recorded_indices, replayed_indices
from tests.oracles import index as h

pytestmark = pytest.mark.gpu


def made(seed=0):
    args = h.make_inputs(2, 300, 300, 8, 64, torch.bfloat16, device="cuda", seed=seed)
    return args, h.visibility("causal", *args[:2])[0].cuda()


def test_a_graph_that_is_captured_by_hand():
    args, limit = made()
    choose = functools.partial(index_topk, *args, 64, limit=limit)
    with recorded_indices() as store:
        first = choose()
    recording, replaying = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    given = IndexStore([store[0]])
    with replayed_indices(given):
        assert torch.equal(choose(), first)
    with torch.cuda.graph(recording), recorded_indices(store):
        choose()
    with torch.cuda.graph(replaying), replayed_indices(given):
        out = choose()
    for t, new in zip(args, made(5)[0], strict=True):
        t.copy_(new)
    recording.replay()
    second = choose()
    assert torch.equal(store[0], second) and not torch.equal(second, first)
    given.copy_([store[0].flip(-1)])  # in another order
    replaying.replay()
    given.check()
    assert torch.equal(out, second)
    given[0][0, 0] = 299  # query 0 sees key 0 alone
    replaying.replay()
    with pytest.raises(ValueError, match="keys of 1 queries cannot be a choice of entry 0"):
        given.check()


def test_wrong_keys_raise_at_the_end_of_the_context():
    args, limit = made()
    choose = functools.partial(index_topk, *args, 64, limit=limit)
    store = IndexStore([torch.full((2, 300, 64), 10**6, device="cuda")])
    with pytest.raises(ValueError, match="keys of 600 queries cannot be a choice"), replayed_indices(store):
        assert int(choose().max()) < 300, "nothing out of range"
        reached = True
    assert reached


@pytest.mark.parametrize("options", [{}, {"use_reentrant": False}])
def test_a_model_in_the_compilers_graphs(options):
    torch._dynamo.reset()
    model = Model(**options).cuda()
    call = torch.compile(model, backend="mhc_inductor", mode="reduce-overhead")
    x = states().cuda()

    def train():
        torch.compiler.cudagraph_mark_step_begin()
        return [t.clone() for t in step(model, call, x)]

    with recorded_indices() as store:
        first = train()
    addresses = [t.data_ptr() for t in store]
    for _ in range(3):  # a graph is recorded at the second call
        with recorded_indices(store):
            same(train(), first)
    for seed in range(4):
        new = [t.cuda() for t in others([t.cpu() for t in store], seed)]
        with replayed_indices(store.copy_(new)):
            got = train() if seed < 2 else _without_compiles(train)
        plain = Model().cuda()
        same(got, trained_with(plain, new))
    assert [t.data_ptr() for t in store] == addresses and len(store) == 3
    torch._dynamo.reset()


def test_layers_recompute_on_the_thread_of_the_backward():
    torch._dynamo.reset()
    model = by_layers(use_reentrant=False, context_fn=checkpointed_indices).cuda()
    x = states().cuda().requires_grad_()
    with recorded_indices() as store:
        model(x)
    new = [t.cuda() for t in others([t.cpu() for t in store])]
    with replayed_indices(IndexStore(new)):
        out = model(x)
    grads = torch.autograd.grad(out.square().sum(), [*model.parameters()], allow_unused=True, materialize_grads=True)
    same([out.detach(), *grads], trained_with(Model().cuda(), new))
    torch._dynamo.reset()


def _without_compiles(train):
    with no_recompiles():
        return train()
