# SPDX-License-Identifier: Apache-2.0
"""Keys that indexers chose in compiled models: recorded, replayed, checkpointed, without new compiles for new keys."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch.utils.checkpoint import checkpoint

import mhc_inductor
from mhc_inductor import IndexStore, backend, compat, recorded_indices, replayed_indices
from tests.formulas import sparse_families, sparse_runs
from tests.tools import capture

pytestmark = pytest.mark.usefixtures("one_thread")
TOPK = 4
no_recompiles = functools.partial(torch._dynamo.config.patch, error_on_recompile=True)


@pytest.fixture
def autograd_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Lets AOTAutograd and its partitioner compile what the backend gives to Inductor, which takes no C++ compiler.

    Yields a list to which the code of each graph is added.
    """
    codes = list[str]()

    def compile_(_: Any, options: Any, gm: torch.fx.GraphModule, inputs: Any, **__: Any) -> Any:
        codes.append("".join(m.code for m in gm.modules() if isinstance(m, torch.fx.GraphModule)))
        return aot_eager_decomp_partition(gm, inputs)

    monkeypatch.setattr(backend, "_compile", compile_)
    torch._dynamo.reset()
    yield codes
    torch._dynamo.reset()


class Layer(nn.Module):
    """A layer with the formula of an indexer in plain PyTorch, whose chosen keys it averages.

    Args:
        width: of the hidden states [B, S, width].
        read: what is done with the scores [B, S, T] and their ``topk``: returns weights of the keys [B, S, T].
    """

    def __init__(self, width: int = 16, read: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.q, self.k, self.w, self.v = (nn.Linear(width, n, bias=False) for n in (4 * 8, 8, 4, width))
        self.read = read or chosen

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, w = self.q(x).unflatten(-1, (4, 8)), self.k(x), self.w(x)
        scores = (torch.einsum("bshd,btd->bsht", q, k).relu() * w.unsqueeze(-1)).sum(2)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        taken = self.read(scores.masked_fill(hidden, -torch.inf) if mask is None else scores + mask) & ~hidden
        return x + (taken / taken.sum(-1, keepdim=True).clamp(min=1)) @ self.v(x).tanh()


def chosen(scores: Tensor) -> Tensor:
    """Returns which keys are chosen, as a model that reads indices alone."""
    at = scores.topk(TOPK, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, at, True)


def marked(scores: Tensor, low: float = -torch.inf) -> Tensor:
    """Reads the values of ``topk`` to leave hidden keys out, and with ``low`` those with scores up to it."""
    values, at = scores.topk(TOPK, dim=-1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, at, values > low)


class Model(nn.Module):
    """Layers one after another, as they are or each in a checkpointed region."""

    def __init__(self, layers: int = 3, read: Callable[..., Tensor] | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(read=read) for _ in range(layers))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, **self.options) if self.options else layer(x)
        return x


def states(seed: int = 1, length: int = 9) -> Tensor:
    return torch.randn(2, length, 16, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, call: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    return with_gradients(model, call(x))


def with_gradients(model: nn.Module, out: Tensor) -> list[Tensor]:
    """Returns the output, then the gradients: zero where there is none."""
    grads = torch.autograd.grad(out.square().sum(), [*model.parameters()], allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def others(of: IndexStore | list[Tensor], seed: int = 3) -> list[Tensor]:
    """Returns random other choices of causal queries in the shapes of a store: in any order, -1 at any place."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for keys in of:
        _, s, n = keys.shape
        rank = torch.rand(*keys.shape[:2], s, generator=g) + torch.ones(s, s).triu(1)
        at = rank.argsort(-1)[..., :n]
        at = torch.where(at <= torch.arange(s)[:, None], at, -1)
        made.append(at.gather(-1, torch.rand(at.shape, generator=g).argsort(-1)))
    return made


def eagerly(model: nn.Module, keys: list[Tensor]) -> nn.Module:
    """Returns a copy of a :class:`Model` that uses given keys in plain PyTorch."""
    model = copy.deepcopy(model)
    for layer, at in zip(model.layers, keys, strict=True):
        shown = nn.functional.one_hot(at.long() + 1, 2 * at.shape[1])[..., 1:].sum(-2).bool()
        layer.read = functools.partial(lambda shown, scores: shown[..., : scores.shape[-1]], shown)
    return model


def trained_with(model: nn.Module, keys: list[Tensor]) -> list[Tensor]:
    """Returns output and gradients of a :class:`Model` that uses given keys in plain PyTorch."""
    given = eagerly(model, keys)
    given.options = {}
    return step(given, given, states().to(keys[0].device))


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# --- whole models -------------------------------------------------------------------------------------------------


def _small_v4() -> Any:
    config = sparse_families._deepseek_v4()
    return type(config)(**{**config.to_dict(), "num_hidden_layers": 1, "layer_types": ["compressed_sparse_attention"]})


@pytest.mark.parametrize(
    ("family", "attention", "name"),
    [("deepseek_v32", "sdpa", "training, checkpointed"), ("deepseek_v4", "eager", "prefill")],
)
@pytest.mark.every_case
def test_a_model_of_transformers_takes_the_keys_that_it_recorded(family, attention, name, autograd_only, monkeypatch):
    one = dataclasses.replace(sparse_families.FAMILIES["deepseek_v4"], config=_small_v4)
    monkeypatch.setitem(sparse_families.FAMILIES, "deepseek_v4", one)
    mode = sparse_runs.MODES[name]
    model = sparse_runs.prepare(family, mode, attention)
    call = torch.compile(model, backend="mhc_inductor", dynamic=False)
    run = functools.partial(sparse_runs.evaluate, model, call, mode)
    with recorded_indices() as store:
        first = run()
    assert capture.difference(first, sparse_runs.evaluate(model, model, mode)) < 1e-4
    assert len(store) == (2 if family == "deepseek_v32" else 1)
    assert all("indexer (modeling_deepseek_v" in name for name in store.names)
    with replayed_indices(store):
        again = run()
    assert capture.difference(again, first) == 0.0, "equal bits"
    if family == "deepseek_v32":
        new = others(store)
        with replayed_indices(IndexStore(new)), no_recompiles():
            got = run()
        with no_recompiles(), recorded_indices(store):
            run()
        assert capture.difference(got, first) > 1e-2
        for layer, keys in zip(model.model.layers, new, strict=True):
            # What the model's mask hides stands for -1.
            keys = torch.where(keys < 0, keys.shape[1] - 1, keys).to(torch.int32)
            monkeypatch.setattr(layer.self_attn.indexer, "forward", functools.partial(lambda k, *_, **__: k, keys))
        assert capture.difference(got, sparse_runs.evaluate(model, model, mode)) < 1e-4


# --- checkpoints, sizes, readers of scores ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"use_reentrant": False}])
def test_training_with_given_keys_is_training_with_these_keys(options, autograd_only):
    model = Model(**options)
    call = torch.compile(model, backend="mhc_inductor", fullgraph=True)
    with recorded_indices() as store:
        first = step(model, call, states())
    assert len(store) == 3 and [n.partition(" ")[0] for n in store.names] == [f"layers.{i}" for i in range(3)]
    same(first, step(model, model, states()))
    new = others(store)
    with replayed_indices(IndexStore(new)):
        got = step(model, call, states())
    same(got, trained_with(model, new))
    recorded, replayed = autograd_only
    assert (recorded.count("index_topk."), recorded.count("replay.replayed.")) == (3, 0)
    assert (replayed.count("index_"), replayed.count("replay.replayed.")) == (0, 3), "no scores"
    assert float((got[0] - first[0]).abs().max()) > 1e-2
    of_indexer = [g for (n, _), g in zip(model.named_parameters(), got[1:], strict=True) if ".v." not in n]
    assert not any(g.any() for g in of_indexer)


def test_keys_that_were_changed_before_the_backward_raise(autograd_only):
    model = Model(1, use_reentrant=False)
    call = torch.compile(model, backend="mhc_inductor")
    with recorded_indices() as store:
        call(states())
    with replayed_indices(store):
        out = call(states())
    store.copy_(others(store))
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.IntTensor"):
        out.sum().backward()


def test_new_keys_and_a_return_to_a_mode_compile_nothing(autograd_only):
    model = Model()
    call = torch.compile(model, backend="mhc_inductor")
    with recorded_indices() as store, torch.inference_mode():
        kept = call(states()), call(states(2))
    assert len(store) == 6, "two calls"
    addresses = [t.data_ptr() for t in store]
    with replayed_indices(store), torch.no_grad():
        assert all(torch.equal(call(states(s)), k) for s, k in zip((1, 2), kept, strict=True))
    call(states())  # off
    with no_recompiles():
        with recorded_indices(store), torch.inference_mode():
            call(states(2)), call(states(3))
        new = others(store)
        with replayed_indices(store.copy_(new)), torch.no_grad():
            got = call(states()), call(states(2))
        call(states())
    assert [t.data_ptr() for t in store] == addresses
    with torch.no_grad():
        same([*got], [eagerly(model, new[:3])(states()), eagerly(model, new[3:])(states(2))])


def test_one_compile_replays_any_length(autograd_only):
    model = Model(2)
    call = torch.compile(model, backend="mhc_inductor", dynamic=True)
    with torch.no_grad(), recorded_indices() as store:
        call(states())
    with no_recompiles(), torch.no_grad():
        with recorded_indices() as longer:
            call(states(length=12))
        assert [t.shape[1] for t in (*store, *longer)] == [9, 9, 12, 12]
    with torch.no_grad():
        for n, (kept, length) in enumerate(((store, 9), (longer, 12))):
            with replayed_indices(IndexStore(others(kept))), torch._dynamo.config.patch(error_on_recompile=n > 0):
                got = call(states(length=length))
            same([got], [eagerly(model, others(kept))(states(length=length))])
        said = r"entry 0 \(layers.0 .* must have shape .* = \[2, 12, 4\].*got \[2, 9, 4\]"
        with pytest.raises(ValueError, match=said), replayed_indices(store):
            call(states(length=12))


@pytest.mark.parametrize("low", [-torch.inf, 0.0])
def test_values_of_topk_are_those_of_the_given_keys(low, autograd_only):
    model = Model(1, functools.partial(marked, low=low))
    call = torch.compile(model, backend="mhc_inductor")
    with torch.no_grad(), recorded_indices() as store:
        first = call(states())
    same([first], [model(states())])
    new = others(store)
    with torch.no_grad(), replayed_indices(IndexStore(new)):
        got = call(states())
    read = model.layers[0].read
    given = eagerly(model, new)
    shown = given.layers[0].read
    given.layers[0].read = lambda scores: shown(scores) & (scores > low)
    same([got], [given(states())])
    assert read is model.layers[0].read and not torch.equal(got, first)


@pytest.mark.parametrize(
    ("fill", "low"), [(-torch.inf, -torch.inf), (torch.finfo(torch.float32).min, 0.0), (-1e9, None)]
)
def test_a_mask_that_is_data_says_which_keys_are_hidden(fill, low, autograd_only):
    model = Model(1, chosen if low is None else functools.partial(marked, low=low))
    layer, mask = model.layers[0], torch.full((9, 9), fill).triu(1).expand(2, 9, 9)
    call = torch.compile(layer, backend="mhc_inductor")
    with recorded_indices() as store, torch.no_grad():
        first = call(states(), mask)
    same([first], [layer(states(), mask)])
    assert torch.equal((store[0] >= 0).sum(-1), torch.arange(1, 10).clamp(max=TOPK).expand(2, 9))
    new = others(store)
    with replayed_indices(IndexStore(new)), torch.no_grad():
        got = call(states(), mask)
    given = eagerly(model, new)
    if low == 0.0:
        shown = given.layers[0].read
        given.layers[0].read = lambda scores: shown(scores) & (scores > low)
    same([got], [given(states())])
    last = IndexStore([new[0] * 0 + 8])
    with pytest.raises(ValueError, match=r"keys of 18 queries cannot be"), replayed_indices(last):
        call(states(), mask)


def test_an_order_by_score_is_kept_and_hidden_keys_stand_for_none(autograd_only):
    def ranked(x: Tensor, layer: Layer) -> Tensor:
        found: list[Tensor] = []

        def read(scores: Tensor) -> Tensor:
            found.append(scores.topk(TOPK, dim=-1).indices)
            return scores > 0

        layer.read = read
        layer(x)
        return found[0]

    layer, x = Model(1).layers[0], states()
    call = torch.compile(ranked, backend="mhc_inductor")
    with torch.no_grad(), recorded_indices() as store:
        first = call(x, layer)
    want = ranked(x, layer)
    seen = want <= torch.arange(9)[:, None]
    assert torch.equal(first[seen], want[seen]) and torch.equal(store[0] < 0, ~seen)
    assert torch.equal(store[0][seen], want[seen].int()), "by falling score"
    new = others(store)
    with torch.no_grad(), replayed_indices(IndexStore(new)):
        got = call(x, layer)
    assert got.dtype == torch.int64 and [len({*row}) for row in got.flatten(0, 1).tolist()] == [TOPK] * 18
    for row, (given, mine) in enumerate(zip(new[0].flatten(0, 1).tolist(), got.flatten(0, 1).tolist(), strict=True)):
        named = [k for k in given if k >= 0]
        assert mine[: len(named)] == named and all(k > row % 9 for k in mine[len(named) :])


# --- layers that are compiled one by one --------------------------------------------------------------------------


def by_layers(**options: Any) -> Model:
    """Returns a :class:`Model` whose layers are compiled one by one, with what its checkpoints are given."""
    model = Model(**options)
    for layer in model.layers:
        layer.compile(backend="mhc_inductor")
    return model


def test_layers_compiled_one_by_one_recompute_with_their_own_keys(autograd_only):
    plain = Model()
    model = by_layers(use_reentrant=False, context_fn=mhc_inductor.checkpointed_indices)
    with recorded_indices() as store:
        out = model(states())
    assert len(store) == 3
    same(with_gradients(model, out), step(plain, plain, states()))
    new = others(store)
    with replayed_indices(IndexStore(new)):
        out = model(states())
    same(with_gradients(model, out), trained_with(plain, new))
    with recorded_indices() as inside:  # the backward inside the context records nothing
        step(model, model, states())
    assert len(inside) == 3 and all(map(torch.equal, inside, store))


def test_a_recomputation_that_could_take_other_keys_raises(autograd_only):
    for options in ({"use_reentrant": False}, {"use_reentrant": True}):
        model = by_layers(**options)
        said = r"checkpointed region.*context_fn=mhc_inductor.checkpointed_indices"
        with pytest.raises(RuntimeError, match=said), recorded_indices():
            model(states().requires_grad_())
    model = by_layers(use_reentrant=False, context_fn=mhc_inductor.checkpointed_indices)
    with recorded_indices() as store:
        model(states())
    with replayed_indices(store):
        out = model(states())
    store.copy_(others(store))
    with pytest.raises(RuntimeError, match=r"store was changed before the backward"):
        out.sum().backward()


def test_a_compiled_model_takes_the_context_function_too(autograd_only):
    model = Model(use_reentrant=False, context_fn=mhc_inductor.checkpointed_indices)
    call = torch.compile(model, backend="mhc_inductor", fullgraph=True)
    with recorded_indices() as store:
        got = step(model, call, states())
    plain = Model()
    same(got, step(plain, plain, states()))
    with replayed_indices(IndexStore(others(store))):
        got = step(model, call, states())
    same(got, trained_with(plain, others(store)))


# --- what cannot be followed --------------------------------------------------------------------------------------


def test_a_choice_in_a_branch_is_refused(autograd_only):
    def branch(x: Tensor, *given: Tensor) -> Tensor:
        pick = lambda x, *given: x + mhc_inductor.index_topk(*given, 3).float().sum()  # noqa: E731
        return torch.cond(x.sum() > 0, pick, lambda x, *_: x.sin(), (x, *given))

    given = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 2)
    call = torch.compile(branch, backend="mhc_inductor")
    with pytest.raises(Exception, match=r"cannot reach the choice of keys in cond"), recorded_indices():
        call(torch.ones(3), *given)


@pytest.mark.parametrize("options", [{"dim": 1}, {"dim": -2}, {"largest": False}])
def test_a_topk_over_queries_or_of_the_lowest_is_no_choice_of_keys(options, autograd_only):
    model = Model(1, read=lambda scores: scores >= scores.topk(3, **options).values.sum())
    with pytest.raises(RuntimeError, match=r"nothing was recorded"), recorded_indices():
        torch.compile(model, backend="mhc_inductor")(states())


def test_another_backend_is_noticed(autograd_only):
    call = torch.compile(mhc_inductor.index_topk, backend="aot_eager")
    given = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 2), 3
    with pytest.raises(RuntimeError, match=r'nothing was recorded; .*backend="mhc_inductor"'), recorded_indices():
        call(*given)
    store = IndexStore([mhc_inductor.index_topk(*given)])
    with pytest.raises(ValueError, match=r"0 of the 1 entries were taken"), replayed_indices(store):
        call(*given)


def test_a_users_call_in_compiled_code_is_a_choice(autograd_only):
    given = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 2), 3
    limit = torch.arange(1, 6).view(1, 5)
    call = torch.compile(lambda *a: mhc_inductor.index_topk(*a, limit=limit), backend="mhc_inductor")
    with recorded_indices() as store:
        first = call(*given)
    assert torch.equal(first, store[0]) and "test_replay.py:" in store.names[0]
    new = others(store)
    with replayed_indices(IndexStore(new)):
        got = call(*given)
    assert torch.equal(got, torch.where(new[0] < 0, 99, new[0]).sort(-1).values.where(got >= 0, -1).int())
    wrong, said = IndexStore([torch.full_like(store[0], 4)]), r"keys of 5 queries cannot be a choice of entry 0"
    with pytest.raises(ValueError, match=said), replayed_indices(wrong):
        call(*given)


# --- generated code -----------------------------------------------------------------------------------------------


@pytest.mark.every_case
def test_generated_code_under_enable(no_caches):
    """Runs Inductor's own code, which on a CPU would keep the formula, under the ordinary backend."""
    torch._dynamo.reset()
    model = Model(1, use_reentrant=False)
    mhc_inductor.enable()
    try:
        call = torch.compile(model)
        compat.counters().clear()
        with recorded_indices() as store:
            first = step(model, call, states())
        assert compat.counters()["routed index_topk"] == len(store) == 1
        with replayed_indices(store):
            assert all(map(torch.equal, step(model, call, states()), first))
        with replayed_indices(IndexStore(others(store))), no_recompiles():
            got = step(model, call, states())
    finally:
        mhc_inductor.disable()
        torch._dynamo.reset()
    plain = Model(1)
    same(first, step(plain, plain, states()))
    same(got, trained_with(plain, others(store)))
