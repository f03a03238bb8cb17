# SPDX-License-Identifier: Apache-2.0
"""Recorded and replayed keys without a compiler: modules and functions, the store, the ops, checkpoints, errors."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mhc_inductor
from mhc_inductor import IndexStore, index_topk, recorded_indices, replayed_indices
from mhc_inductor.nn import SelectionAttention, SparseIndexer
from mhc_inductor.replay import ops
from tests.oracles import index as h

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("limit", "mask", "segments_q", "segments_k")


def given(kind: str = "causal", **sizes: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    args = h.make_inputs(**sizes)
    return args, h.visibility(kind, *args[:2])


def choose(kind: str = "causal", topk: int = 4, **sizes: Any) -> Tensor:
    args, visible = given(kind, **sizes)
    return index_topk(*args, topk, **dict(zip(NAMES, visible, strict=True)))


def another(kind: str, topk: int = 4, seed: int = 2) -> Tensor:
    """Returns a random other choice of the queries of :func:`choose`, in any order, -1 at any place."""
    args, visible = given(kind)
    seen = h.seen(*args[:2], visible)
    g = torch.Generator().manual_seed(seed)
    rank = torch.rand(seen.shape, generator=g) + 2.0 * ~seen
    at = rank.argsort(-1)[..., :topk]
    at = torch.where(seen.gather(-1, at), at, -1)
    return at.gather(-1, torch.rand(at.shape, generator=g).argsort(-1))


def as_chosen(keys: Tensor) -> Tensor:
    """Returns keys in the order of ``index_topk``: increasing, then -1."""
    return torch.where(keys < 0, 10**6, keys).sort(-1).values.apply_(lambda k: k if k < 10**6 else -1).int()


@pytest.mark.parametrize("kind", h.KINDS)
def test_any_choice_is_replayed(kind):
    with recorded_indices() as store:
        first = choose(kind)
    assert torch.equal(store[0], first) and store[0].data_ptr() != first.data_ptr()
    with replayed_indices(store):
        assert torch.equal(choose(kind), first)
    new = another(kind)
    assert kind == "everything" or not torch.equal(as_chosen(new), first), "there no query sees more than 4 keys"
    with replayed_indices(IndexStore([new])):
        got = choose(kind)
    assert torch.equal(got, as_chosen(new)) and got.dtype == torch.int32
    assert torch.equal(choose(kind), first), "the context is over"


def test_a_module_and_its_attention():
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(s, generator=g, requires_grad=True) for s in ((2, 5, 2, 3, 8), (2, 2, 9, 8)))
    args, _ = given()
    index, attention = SparseIndexer(4), SelectionAttention(groups=2, heads=3)

    def run() -> Tensor:
        return attention(q, k, k, indices=index(*args).expand(-1, -1, 2, -1))

    with recorded_indices() as store:
        first = run()
        run()
    assert len(store) == 2 and torch.equal(*store) and "test_replay_eager.py:" in store.names[0]
    new = another("causal")
    with replayed_indices(store.copy_([store[0], new])):
        assert torch.equal(run(), first)
        other = run()
    want = attention(q, k, k, indices=as_chosen(new).unsqueeze(2).expand(-1, -1, 2, -1))
    assert torch.equal(other, want) and not torch.equal(other, first)
    assert all(map(torch.equal, torch.autograd.grad(other.sum(), (q, k)), torch.autograd.grad(want.sum(), (q, k))))


def test_a_store_is_saved_moved_and_made_from_tensors():
    with recorded_indices() as store, torch.inference_mode():
        choose(), choose(topk=3)
    assert not any(t.is_inference() for t in store), "training may save them"
    file = io.BytesIO()
    torch.save(store.state_dict(), file)
    file.seek(0)
    loaded = IndexStore(torch.load(file))
    assert loaded.names == store.names and all(map(torch.equal, loaded, store)) and len(loaded) == 2
    assert all(t.device.type == "meta" for t in store.to("meta")) and store.to("cpu")[0] is not store[0]
    assert "entries: 2" in repr(store) and "[2, 5, 3]" in repr(store)
    made = IndexStore([t.long() for t in store])
    assert made.names == ["", ""] and made[0].dtype == torch.int32
    with replayed_indices(made):
        choose(), choose(topk=3)


# --- ops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", h.KINDS)
def test_ops_pass_opcheck(kind):
    args, visible = given(kind)
    size = args[1].shape[1]
    keys = choose(kind)
    for ranked in (False, True):
        torch.library.opcheck(ops.replayed, (keys, size, *visible, ranked))
    torch.library.opcheck(ops.replayed, (keys[..., :0], size, *visible, False))


@pytest.mark.parametrize("kind", h.KINDS)
def test_the_ops_against_their_words(kind):
    args, visible = given(kind)
    size, seen = args[1].shape[1], h.seen(*args[:2], visible)
    keys = another(kind)
    got, wrong = ops.replayed(keys.int(), size, *visible, False)
    assert torch.equal(got, as_chosen(keys)) and wrong.tolist() == [0]
    got, wrong = ops.replayed(keys.int(), size, *visible, True)
    assert wrong.tolist() == [0] and got.dtype == torch.int64
    for row, mine, sees in zip(keys.flatten(0, 1), got.flatten(0, 1), seen.flatten(0, 1), strict=True):
        named = [k for k in row.tolist() if k >= 0]
        hidden = mine.tolist()[len(named) :]
        assert mine.tolist()[: len(named)] == named and len({*mine.tolist()}) == len(mine) and not sees[hidden].any()


WRONG = {
    "out of range": (0, 4, 9),
    "below -1": (0, 4, -2),
    "twice": (0, 4, 3),
    "not visible": (0, 1, 7),
    "too few": (0, 4, -1),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("ranked", [False, True])
def test_a_wrong_row_is_counted_and_stays_in_range(name, ranked):
    keys = torch.tensor([[[0, 1, 2, 3]] * 5] * 2, dtype=torch.int32)
    limit = torch.tensor([[4, 5, 6, 7, 8]] * 2)
    b, s, new = WRONG[name][0], WRONG[name][1], WRONG[name][2]
    assert ops.replayed(keys, 9, limit, None, None, None, ranked)[1].tolist() == [0]
    keys[b, s, 1 if name == "twice" else 3] = new
    got, wrong = ops.replayed(keys, 9, limit, None, None, None, ranked)
    assert wrong.tolist() == [1] and bool(((got >= 0) & (got < 9)).all())


# --- checkpoints ----------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A module whose output depends on the keys that it chooses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.v = nn.Linear(8, 8)
        self.index = SparseIndexer(3)

    def forward(self, x: Tensor) -> Tensor:
        q, w = x.detach().unsqueeze(2).expand(-1, -1, 2, -1), torch.ones(*x.shape[:2], 2)
        at = self.index(q, x.detach(), w).squeeze(2)
        taken = torch.zeros(*x.shape[:2], x.shape[1] + 1).scatter(-1, at.long() % (x.shape[1] + 1), 1.0)[..., :-1]
        return x + taken @ self.v(x).tanh()


def _twice(layers: list[Layer], x: Tensor, inner: dict[str, Any]) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, **inner) if inner else layer(x)
    return x


def _together() -> Any:
    """Returns the contexts as a user would who adds some of their own."""
    return mhc_inductor.checkpointed_indices()


REGION: dict[str, Any] = {"use_reentrant": False, "context_fn": mhc_inductor.checkpointed_indices}


@pytest.mark.parametrize("nested", [False, True])
def test_recomputation_takes_the_forwards_keys(nested):
    own = {**REGION, "context_fn": _together}
    layers = [Layer(), Layer()]
    x = torch.randn(2, 6, 8, requires_grad=True)
    with recorded_indices() as store:
        _twice(layers, x, {})
    new = IndexStore([torch.where(t < 0, t, torch.arange(6)[:, None] - t) for t in store])  # other visible keys
    with replayed_indices(new):
        plain = _twice(layers, x, {})
    want = torch.autograd.grad(plain.square().sum(), x)

    def run() -> Tensor:
        return checkpoint(_twice, layers, x, REGION, **REGION) if nested else _twice(layers, x, REGION)

    with replayed_indices(new):
        assert torch.equal(torch.autograd.grad(_twice(layers, x, own).square().sum(), x)[0], want[0])

    with replayed_indices(new):
        out = run()
    assert torch.equal(out, plain) and torch.equal(torch.autograd.grad(out.square().sum(), x)[0], want[0])
    assert not torch.equal(torch.autograd.grad(_twice(layers, x, {}).square().sum(), x)[0], want[0])
    with replayed_indices(new):
        loss = run().square().sum()
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], want[0])
    with recorded_indices() as again:
        run().sum().backward()
    assert len(again) == 2 and all(map(torch.equal, again, store))
    with torch.no_grad(), replayed_indices(new):
        assert torch.equal(run(), plain), "a region without gradients is not computed again"
    torch.autograd.grad(run().sum(), x)  # an ordinary region


@pytest.mark.parametrize("options", [{"use_reentrant": False}, {"use_reentrant": True}])
def test_a_region_without_the_context_function_raises(options):
    x = torch.randn(2, 6, 8, requires_grad=True)
    store = IndexStore([torch.zeros(2, 6, 3, dtype=torch.int32)])
    for context in (recorded_indices(), replayed_indices(store)):
        with pytest.raises(RuntimeError, match=r"context_fn=mhc_inductor.checkpointed_indices"), context:
            checkpoint(Layer(), x, **options)
    with (
        pytest.raises(RuntimeError, match=r"context_fn=mhc_inductor.checkpointed_indices"),
        recorded_indices(),  # the inner region alone has it
    ):
        checkpoint(_twice, [Layer()], x, REGION, **options)
    out = checkpoint(Layer(), x, **options)
    with pytest.raises(RuntimeError, match=r"context_fn=mhc_inductor.checkpointed_indices"), recorded_indices():
        out.sum().backward()


def test_keys_that_were_changed_before_the_backward_raise():
    x = torch.randn(2, 6, 8, requires_grad=True)
    with recorded_indices() as store:
        Layer()(x)
    with replayed_indices(store):
        out = checkpoint(Layer(), x, **REGION)
    store[0].add_(0)
    with pytest.raises(RuntimeError, match=r"store was changed before the backward"):
        out.sum().backward()


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ([[1, 2]], TypeError, r"tensors\[0\] must be a tensor, got list"),
        ([torch.zeros(1, 2, 3)], TypeError, r"tensors\[0\] must be int32 or int64, got torch.float32"),
        ([torch.zeros(2, 3, dtype=torch.int32)], ValueError, r"must have shape \[B, S, n\], got \[2, 3\]"),
        ([torch.full((1, 2, 3), -2)], ValueError, "must hold keys from 0 and -1 for none, got -2 to -2"),
        ([torch.full((1, 2, 3), 2**31)], ValueError, "got 2147483648"),
    ],
)
def test_what_is_no_store(tensors, error, message):
    with pytest.raises(error, match=message):
        IndexStore(tensors)


def test_what_a_store_cannot_take():
    store = IndexStore([choose(), choose()])
    with pytest.raises(ValueError, match=r"tensors must be 2, one for each choice, got 1"):
        store.copy_([choose()])
    with pytest.raises(ValueError, match=r"tensors\[1\] must have shape \[2, 5, 4\], got \[2, 5, 3\]"):
        store.copy_([choose() * 0, choose(topk=3)])
    assert torch.equal(store[0], choose()), "nothing was written"


def refused(error: type[Exception], message: str, context: Any, *topk: int) -> None:
    """Checks that a context in which indexers choose so many keys, one after the other, raises."""
    with pytest.raises(error, match=message), context:
        for n in topk:
            choose(topk=n)


def test_contexts_say_what_does_not_fit():
    store, two = IndexStore([choose()]), IndexStore([choose(), choose()])
    refused(ValueError, r"the store is empty", replayed_indices(IndexStore()))
    for context in (recorded_indices, replayed_indices):
        refused(TypeError, r"must be an IndexStore, got list", context([choose()]))
    already = r"recorded_indices is open already"
    with pytest.raises(RuntimeError, match=already), recorded_indices(), replayed_indices(store):
        pass
    refused(RuntimeError, r"nothing was recorded", recorded_indices())
    refused(ValueError, r"0 of the 1 entries were taken", replayed_indices(store))
    once_more = r"has 1 entries, but test_replay_eager.py:.* chooses once more"
    refused(ValueError, once_more, replayed_indices(store), 4, 4)
    other_shape = r"entry 0 must have shape \[B, S, n\] = \[2, 5, 3\] on cpu.*got \[2, 5, 4\]"
    refused(ValueError, other_shape, replayed_indices(store), 3)
    refused(ValueError, r"on cpu, for .* got .* on meta", replayed_indices(store.to("meta")), 4)
    refused(ValueError, r"is \[2, 5, 4\] on cpu, but .* chose \[2, 5, 3\]", recorded_indices(store), 3)
    refused(ValueError, r"has 2 entries, but 1 were recorded", recorded_indices(two), 4)
    with pytest.raises(NotImplementedError, match=r"inside torch.func"), recorded_indices():
        args, _ = given()
        torch.vmap(lambda q: index_topk(q, *args[1:], 2))(args[0].expand(3, *args[0].shape))
    assert torch.equal(choose(), store[0]), "no context is left open"


@pytest.mark.parametrize("key", [9, -2, 8])
def test_keys_that_are_no_choice_raise(key):
    store = IndexStore([choose()])
    store[0][1, 0, 0] = key  # query 0 of 5 sees 5 of the 9 keys
    refused(ValueError, r"keys of 1 queries cannot be a choice of entry 0: expected", replayed_indices(store), 4)
    store[0].copy_(choose())
    with replayed_indices(store):
        choose()
