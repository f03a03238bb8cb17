# SPDX-License-Identifier: Apache-2.0
"""Attention over windows, lists and prefixes of keys, with sinks, padding and packed sequences, becomes the op over lists.

The parts are those of DeepSeek-V4 and its relatives, in every combination that they form, each against the formula as it
stands. Sizes are odd, heads share one group of keys, and every mask leaves out a quarter of the keys at least.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch.utils.checkpoint import checkpoint

from mhc_inductor.routing import route
from tests.tools.attentions import routed
from tests.tools.capture import Captured, alike, difference, run
from tests.tools.fakecuda import generated_code

S, WINDOW, ENTRIES, PICKED, RATIO, HEADS, D = 41, 7, 18, 3, 5, 4, 8
MIN = torch.finfo(torch.float32).min
LISTS = "mhc_inductor.selection_list_attention"


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def _positions(packed: bool) -> Tensor:
    """Returns position ids [2, S]: one sequence a row, or three that start at other places in each row."""
    if not packed:
        return torch.arange(S).expand(2, S).contiguous()
    cuts = torch.tensor([[0, 13, 30], [0, 9, 22]])
    starts = torch.zeros(2, S, dtype=torch.long).scatter_(1, cuts, cuts).cummax(1).values
    return torch.arange(S) - starts


def _padding(side: str) -> Tensor:
    """Returns an attention mask [2, S] of ones and zeros."""
    kept = torch.ones(2, S, dtype=torch.long)
    kept[1, slice(0, 6) if side == "left" else slice(S - 6, S)] = 0
    return kept


# --- the parts of a mask: bool [B, 1, S, keys] ---------------------------------------------------------------


def packed_window(position: Tensor, kept: Tensor) -> Tensor:
    """A sliding window that counts by position ids, within the sequences that they number."""
    sequence = (torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch = torch.arange(position.shape[0])[:, None, None, None]
    q, k = torch.arange(S)[None, None, :, None], torch.arange(S)[None, None, None, :]
    inside = sequence[batch, q] == sequence[batch, k]
    near = (position[batch, k] > position[batch, q] - WINDOW) & (position[batch, k] <= position[batch, q])
    return inside & near


def padded_window(position: Tensor, kept: Tensor) -> Tensor:
    """A sliding window of tokens, of which padding is left out."""
    q, k = torch.arange(S)[:, None], torch.arange(S)
    return ((k <= q) & (k > q - WINDOW))[None, None] & kept.bool()[:, None, None, :]


def causal(position: Tensor, kept: Tensor) -> Tensor:
    """All keys up to the query's own."""
    return (torch.arange(S)[None, :] <= torch.arange(S)[:, None])[None, None].expand(position.shape[0], 1, S, S)


def prefix(position: Tensor) -> Tensor:
    """The compressed entries that are complete at a position."""
    done = (position + 1) // RATIO
    return torch.arange(ENTRIES).view(1, 1, 1, -1) < done[:, None, :, None]


def scattered(indices: Tensor, keys: int) -> Tensor:
    """The listed keys: True scattered into False."""
    made = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool)
    return made.scatter(-1, indices, True).unsqueeze(1)


def left_out(indices: Tensor, keys: int) -> Tensor:
    """The same as the negation of False scattered into True."""
    made = indices.new_ones((*indices.shape[:2], keys), dtype=torch.bool)
    return ~made.scatter(-1, indices, False).unsqueeze(1)


def counted(indices: Tensor, keys: int) -> Tensor:
    """The same by counting; indices of -1 list nothing."""
    valid = indices.ge(0) & indices.lt(keys)
    counts = torch.zeros(*indices.shape[:2], keys, dtype=torch.int32)
    return counts.scatter_add_(-1, indices.clamp(0, keys - 1), valid.to(torch.int32)).ne(0).unsqueeze(1)


def spare_column(indices: Tensor, keys: int) -> Tensor:
    """The same as a bias with a column more, in which -1 ends."""
    valid = indices >= 0
    safe = torch.where(valid, indices, torch.full_like(indices, keys))
    bias = torch.full((indices.shape[0], 1, indices.shape[1], keys + 1), -torch.inf)
    return bias.scatter_(-1, safe.unsqueeze(1), 0.0)[..., :keys] == 0


# --- the attention under a mask --------------------------------------------------------------------------------


def library(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor | None) -> Tensor:
    """Calls scaled_dot_product_attention with a bool mask."""
    return F.scaled_dot_product_attention(
        q, k.expand_as(q[..., :1, :].expand(-1, -1, k.shape[2], -1)), v.expand(-1, HEADS, -1, -1), mask
    )


def written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor | None) -> Tensor:
    """Writes the softmax out, over a sink too if there is one, as DeepSeek-V4 does."""
    bias = torch.where(mask, torch.zeros(()), MIN)
    scores = q @ k.transpose(2, 3) * D**-0.5 + bias
    if sink is None:
        return scores.softmax(-1) @ v
    logits = torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(q.shape[0], -1, S, -1)], -1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    return logits.softmax(-1)[..., :-1] @ v


def sink_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor | None) -> Tensor:
    """The same with the sink before the scores, and no maximum taken off."""
    assert sink is not None
    scores = (q @ k.transpose(2, 3) * D**-0.5).masked_fill(~mask, -torch.inf)
    logits = torch.cat([sink.view(1, -1, 1, 1).expand(q.shape[0], HEADS, S, 1), scores], -1)
    return logits.softmax(-1)[..., 1:] @ v


def inputs(packed: bool = False, side: str = "right", entries: int = 0) -> tuple[Tensor, ...]:
    """Returns q, k, v, the sink, position ids, an attention mask, and indices of keys or entries that repeat."""
    g = _generator()
    q, k = torch.randn(2, HEADS, S, D, generator=g), torch.randn(2, 1, S + entries, D, generator=g)
    v, sink = torch.randn(2, 1, S + entries, D, generator=g), torch.randn(HEADS, generator=g)
    indices = torch.randint(0, entries or S, (2, S, PICKED), generator=g)
    indices[..., 0] = 0 if entries else torch.arange(S)
    return q, k, v, sink, _positions(packed), _padding(side), indices


WINDOWS = {"packed": packed_window, "padded": padded_window}
SECOND: dict[str, Callable[[Tensor, int], Tensor] | None] = {
    **dict.fromkeys(("", "prefix")),
    "scattered": scattered,
    "left out": left_out,
    "counted": counted,
    "spare": spare_column,
}
CASES = [(w, second, sink) for w, second, sink in itertools.product(WINDOWS, SECOND, (True, False))]


def _model(window: str, second: str, sink: bool, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor, logit: Tensor, position: Tensor, kept: Tensor, indices: Tensor) -> Tensor:
        mask = WINDOWS[window](position, kept)
        if second == "prefix":
            mask = torch.cat([mask, prefix(position)], -1)
        elif second:
            more = SECOND[second]
            assert more is not None
            mask = torch.cat([mask, more(indices, ENTRIES)], -1)
        return attend(q, k, v, mask, logit if sink else None)

    return fn


def _check(fn: Callable[..., Any], given: tuple[Tensor, ...]) -> Captured:
    got = routed(fn, given)
    assert got.nodes(LISTS)
    return got


@pytest.mark.parametrize(("window", "second", "sink"), CASES)
def test_windows_lists_and_prefixes_are_lists_of_keys(window: str, second: str, sink: bool) -> None:
    given = inputs(window == "packed", "left", ENTRIES if second else 0)
    if second in ("counted", "spare"):
        given = (*given[:-1], given[-1].masked_fill(given[-1] % 5 == 4, -1))
    _check(_model(window, second, sink, written), given)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_sink_may_stand_first(window: str) -> None:
    _check(_model(window, "prefix", True, sink_first), inputs(window == "packed", "left", ENTRIES))


@pytest.mark.parametrize("second", [s for s in SECOND if s])
def test_masks_of_a_call_are_lists_of_keys(second: str) -> None:
    given = inputs(True, "right", ENTRIES)
    _check(_model("packed", second, False, library), given)


def test_keys_and_values_of_one_tensor_are_read_once() -> None:
    def fn(q: Tensor, k: Tensor, _: Tensor, *rest: Tensor) -> Tensor:
        return _model("padded", "scattered", True, written)(q, k, k, *rest)

    got = _check(fn, inputs(entries=ENTRIES))
    (call,) = got.nodes(LISTS)
    assert call.args[2] is None


def put(indices: Tensor, keys: int) -> Tensor:
    """The listed keys: True assigned to the places of a batch and its queries."""
    made = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool)
    made[torch.arange(made.shape[0])[:, None, None], torch.arange(made.shape[1])[:, None], indices] = True
    return made.unsqueeze(1)


LISTED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "scattered": scattered,
    "put from the end": lambda indices, keys: put(indices - keys, keys),
    "with a window": lambda indices, keys: (
        scattered(indices, keys) | (torch.arange(keys) > torch.arange(keys)[:, None] - indices.shape[-1] - 2)
    ),
    "put among twice as many": lambda indices, keys: put(indices, 2 * keys)[..., :keys],
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", LISTED)
def test_dynamic_sizes_are_routed(name: str, grad: bool) -> None:
    def fn(x: Tensor, indices: Tensor) -> Tensor:
        q, k, v = x.split([HEADS, 1, 1], 1)
        place = torch.arange(x.shape[2])
        return written_plain(q, k, v, LISTED[name](indices, x.shape[2]) & (place <= place[:, None]))

    q, k, v, *_, indices = inputs()
    given = torch.cat([q, k, v], 1), indices
    routed(fn, given, grad, dynamic=None, symbolic=[(0, 2), (1, 1), (1, 2)])


def written_plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Writes the softmax out, without a sink."""
    return (q @ k.transpose(2, 3) * D**-0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v


def test_segments_of_another_row_are_not_ones_own() -> None:
    """Checks a window by the positions of the first row's sequences, in every row."""

    def fn(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, position: Tensor, kept: Tensor, indices: Tensor) -> Tensor:
        sequence = (torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        same = sequence[:, None, :, None] == sequence[:1, None, None, :]
        near = position[:1, None, None, :] > position[:, None, :, None] - WINDOW
        late = position[:1, None, None, :] <= position[:, None, :, None]
        return written(q, k, v, same & near & late & scattered(indices, S), sink)

    given = inputs(packed=True)
    alike(fn, given, within=2e-6)


@pytest.mark.parametrize(("window", "second", "sink"), CASES)
def test_a_checkpointed_region_reads_the_mask_that_it_is_given(window: str, second: str, sink: bool) -> None:
    """Checks masks made of padding and position ids outside the region, of which the region has the result alone."""

    def attend(*given: Any) -> Tensor:
        return checkpoint(written, *given, use_reentrant=False)

    routed(_model(window, second, sink, attend), inputs(window == "packed", "left", ENTRIES if second else 0))


MADE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "new_full": lambda kv, n: kv.new_full((2, 1, S, n), -torch.inf),
    "full_like": lambda kv, n: torch.full_like(kv[:, :1, :S, :1].expand(2, 1, S, n), -torch.inf),
    "new_zeros": lambda kv, n: kv.new_zeros(2, 1, S, n) - torch.inf,
}


@pytest.mark.parametrize("made", MADE)
def test_a_mask_of_the_dtype_of_trained_keys_is_not_trained(made: str) -> None:
    """In a region, as in DeepSeek-V4: the keys give the mask their dtype and device, and none of their elements."""
    q, k, v, _sink, position, kept, indices = inputs(False, "none", ENTRIES)
    window = torch.where(padded_window(position, kept), 0.0, -torch.inf)  # a graph's argument that has no gradient

    def attend(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        k = k * 1.5
        chosen = MADE[made](k, ENTRIES + 1).scatter(-1, indices.clamp(max=ENTRIES).unsqueeze(1), 0.0)[..., :ENTRIES]
        mask = torch.cat((window, chosen), -1)
        return (q @ k.transpose(2, 3) * D**-0.5 + mask).softmax(-1) @ v

    def fn(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        return checkpoint(attend, q, k, v, indices, use_reentrant=False)

    routed(fn, (q, k, v, indices), dynamo=True)


def test_a_given_mask_that_is_negated_in_the_region() -> None:
    """Checks a bool mask of hidden keys, of which the region reads a slice, next to what it is made of."""

    def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, position: Tensor, indices: Tensor) -> Tensor:
        return library(q, k, v, ~hidden[..., 1:] & scattered(indices, S), None) + position.sum()

    def fn(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, position: Tensor, kept: Tensor, indices: Tensor) -> Tensor:
        hidden = ~(packed_window(position, kept) & kept[:, None, None, :])
        hidden = torch.cat([torch.ones(2, 1, S, 1, dtype=torch.bool), hidden], -1)
        return checkpoint(attend, q, k, v, hidden, position, indices, use_reentrant=False)

    *given, kept, indices = inputs(True)
    routed(fn, (*given, kept.bool(), indices))


def test_a_body_of_two_calls_is_not_bounded_by_the_mask_of_one() -> None:
    """Checks a window and all keys as masks of two regions that run one graph."""

    def region(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, indices: Tensor) -> Tensor:
        return written_plain(q, k, v, mask & scattered(indices, S))

    def fn(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, position: Tensor, kept: Tensor, indices: Tensor) -> Tensor:
        masks = padded_window(position, kept), causal(position, kept)
        return sum(checkpoint(region, q, k, v, mask, indices, use_reentrant=False) for mask in masks)

    def backend(gm: torch.fx.GraphModule, given: Any) -> Any:
        bodies = gm.graph.find_nodes(op="get_attr")
        first = bodies[0].target
        assert len(bodies) == 2
        bodies[1].target = first
        gm.recompile()
        want = gm(*given)[0]
        assert route(gm).routed
        assert difference(Captured([gm(*given)[0]], {}), Captured([want], {})) < 2e-6
        return gm.forward

    with torch.no_grad():
        torch.compile(fn, backend=backend)(*inputs())


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "a step through a view": lambda mask: mask.view(-1)[::2].fill_(True),
    "a filled slice": lambda mask: mask[:, :, 5:, :4].fill_(True),
    "a slice with steps": lambda mask: mask[:, :, ::2, ::3].fill_(True),
    "out": lambda mask: torch.logical_or(mask, torch.ones_like(mask), out=mask),
    "data": lambda mask: mask.data.fill_(True),
    "index": lambda mask: mask.index_fill_(-1, torch.arange(0, S, 3), True),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("place", ["before", "behind", "inside", "inside the first"])
def test_a_mask_that_is_written_in_place_is_read_as_it_is(place: str, write: str) -> None:
    """Checks writes to a mask before regions read it, to the tensor that it is made of, and in the regions."""

    def region(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, indices: Tensor, writes: bool) -> Tensor:
        if writes:
            WRITES[write](mask)
        return written_plain(q, k, v, mask & scattered(indices, S))

    def fn(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, position: Tensor, kept: Tensor, indices: Tensor) -> Tensor:
        made = padded_window(position, kept).clone()
        if place == "behind":
            mask = made & kept.bool()[:, None, None, :]
            WRITES[write](made)
            mask = mask | made
        else:
            mask = made
        if place == "before":
            WRITES[write](mask)
        out = checkpoint(region, q, k, v, mask, indices, place.startswith("inside"), use_reentrant=False)
        more = checkpoint(region, q, k, v, mask, indices, place == "inside", use_reentrant=False)
        return out + more

    # Eager checkpoints refuse gradients of a region that writes what it is given.
    alike(fn, inputs(), grad=not place.startswith("inside"), within=2e-6)


LOOKUPS = {
    "before": lambda place: place[place - 1],
    "from the end": lambda place: place[-place - 1],
    "last": lambda place: place + place[torch.full((1,), -1)] - (S - 1),
    "without a check": lambda place: torch.ops.aten._unsafe_index(place, [place - 1]),
    "gathered": lambda place: place.gather(0, (place - 1).clamp(min=0)),
    "itself": lambda place: place[place],
}


def looked_up(name: str) -> Callable[..., Tensor]:
    """Returns an attention to a window around a position that is looked up, and to one around the first position."""

    def fn(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, position: Tensor, kept: Tensor, indices: Tensor) -> Tensor:
        at = LOOKUPS[name](torch.arange(S))[:, None]
        near = (torch.arange(S) <= at + 1) & (torch.arange(S) > at - WINDOW)
        first = packed_window(position, kept)[:, :, :1, :]
        return written(q, k, v, first | (near & kept.bool()[:, None, None, :]), sink)

    return fn


@pytest.mark.parametrize("name", LOOKUPS)
def test_positions_are_looked_up_from_either_end(name: str) -> None:
    """Negative indices count from the end."""
    _check(looked_up(name), inputs(packed=True))


@pytest.mark.usefixtures("no_caches")
@pytest.mark.parametrize(("side", "grad", "dynamic"), [("left", True, False), ("right", False, True)])
@pytest.mark.parametrize(("window", "second"), [*itertools.product(WINDOWS, ("prefix", "counted"))])
def test_lists_of_keys_of_two_parts(window: str, second: str, side: str, grad: bool, dynamic: bool) -> None:
    """Checks that Inductor generates code of a window, which starts before the first key, joined with other keys.

    Padding is looked up by key. Every concatenation is fused, as on a GPU where its parts are computed element by element.
    """
    given = tuple(t.requires_grad_(grad and t.is_floating_point()) for t in inputs(window == "packed", side, ENTRIES))
    ops: list[str] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        ops.extend(r.op for r in route(gm).routed)
        return compile_fx(gm, example_inputs)

    compiled = torch.compile(_model(window, second, True, written), backend=backend, dynamic=dynamic)
    with torch._inductor.config.patch(force_pointwise_cat=True):
        codes = generated_code(lambda: compiled(*given))
    # A fill that Dynamo left dynamic is looked at twice: first as a mask that is data.
    assert {*ops} == {"selection_attention"} and "selection_list_attention" in codes[0]


# --- what stays -------------------------------------------------------------------------------------------------


def test_a_mask_of_most_keys_stays() -> None:
    """Checks that a list of nearly all keys is not a selection."""

    def fn(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, position: Tensor, kept: Tensor, indices: Tensor) -> Tensor:
        return written(q, k, v, causal(position, kept) & kept.bool()[:, None, None, :], sink)

    assert not run(fn, inputs()).ops


def test_a_key_that_a_list_names_out_of_its_segment_is_not_seen() -> None:
    """Checks that NaN in keys and values that conditions hide does not reach the result."""

    def fn(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, position: Tensor, kept: Tensor, indices: Tensor) -> Tensor:
        return written_plain(q, k, v, scattered(indices, S) & causal(position, kept) & kept.bool()[:, None, None, :])

    given = inputs(side="right")
    poisoned = [t.clone() for t in given]
    poisoned[1][1, :, S - 6 :] = torch.nan
    poisoned[2][1, :, S - 6 :] = torch.nan
    clean = run(fn, given, (), False).outputs[0]
    torch.testing.assert_close(run(fn, tuple(poisoned), (), False).outputs[0][:, :, : S - 6], clean[:, :, : S - 6])
