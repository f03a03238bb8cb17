# SPDX-License-Identifier: Apache-2.0
"""Gates of blocks that become additive masks in place, as mixtures of block attention (arXiv 2502.13189) write them.

A gate is scores of blocks, overwritten by positions, then by 0 and -inf where blocks are chosen, and repeated for the
keys of each block. The last step writes a view of the repeated gate.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.tools import attentions
from tests.tools.capture import alike, reasons, run

INF = float("inf")
S, H, D, BLOCK, TOP = 36, 2, 8, 8, 2
Form = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of q, k and v [S, H, D]."""


def given(rows: int = S, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(rows, H, D, generator=g).to(dtype) for _ in range(3)]


def gate_of(q: Tensor, k: Tensor) -> Tensor:
    """Returns the scores of blocks [H, S, N]: inf at the query's own block, -inf at later ones."""
    means = torch.cat([block.mean(0, keepdim=True) for block in k.split(BLOCK)])
    gate = torch.einsum("shd,nhd->hsn", q.float(), means.float())
    for i in range(means.shape[0]):
        gate[:, : (i + 1) * BLOCK, i] = -INF
        gate[:, i * BLOCK : (i + 1) * BLOCK, i] = INF
    return gate


def needed(gate: Tensor) -> Tensor:
    """Returns which blocks each query attends to: the best ones, and no other one with the same score."""
    best, at = torch.topk(gate, k=min(TOP, gate.shape[-1]), dim=-1, largest=True, sorted=False)
    picked = torch.zeros(gate.shape, dtype=torch.bool).scatter_(-1, at, True)
    return torch.logical_and(gate >= best.min(-1).values.unsqueeze(-1), picked)


def causal(mask: Tensor) -> Tensor:
    return torch.ones_like(mask, dtype=torch.bool).tril()


def attention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    scores = torch.einsum("xhd,yhd->hxy", q.float(), k.float())
    scores += gate
    scores *= 0.35
    return torch.einsum("hxy,yhd->xhd", scores.softmax(-1), v.float())


def assigned(gate: Tensor) -> Tensor:
    need = needed(gate)
    gate[need] = 0
    gate[~need] = -INF
    gate = gate.repeat_interleave(BLOCK, dim=-1)[:, :, : gate.shape[1]]
    gate.masked_fill_(causal(gate).logical_not(), -INF)
    return gate


def filled(gate: Tensor) -> Tensor:
    need = needed(gate)
    gate.masked_fill_(need.logical_not(), -INF).masked_fill_(need, 0.0)
    wide = gate.unsqueeze(-1).expand(-1, -1, -1, BLOCK).flatten(2).narrow(2, 0, gate.shape[1])
    wide.masked_fill_(~causal(wide), -INF)
    return wide


def flags(gate: Tensor) -> Tensor:
    wide = needed(gate).repeat_interleave(BLOCK, -1)
    mask = wide[..., : gate.shape[1]]
    mask &= causal(mask)
    return torch.zeros(mask.shape).masked_fill(~mask, -INF)


GATES: dict[str, Callable[[Tensor], Tensor]] = {f.__name__: f for f in (assigned, filled, flags)}


def form(gate: Callable[[Tensor], Tensor]) -> Form:
    return lambda q, k, v: attention(q, k, v, gate(gate_of(q, k)))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", GATES)
def test_gates_are_lists_of_blocks(name: str, grad: bool) -> None:
    fn = form(GATES[name])
    got = attentions.routed(fn, given(), grad)
    shapes = [getattr(n.meta.get("example_value"), "shape", ()) for n in got.graphs[0].graph.nodes]
    assert not any(tuple(shape[-2:]) == (S, S) for shape in shapes)


def test_in_bf16_the_op_is_as_exact_as_the_formula() -> None:
    attentions.as_exact("gate", form(assigned), given(dtype=torch.bfloat16))


def test_a_query_that_is_nan() -> None:
    at = given()
    at[0][20, 1, 3] = float("nan")
    attentions.routed(form(assigned), at)


def _one(q: Tensor, k: Tensor, v: Tensor, own: Tensor) -> Tensor:
    return attention(q, k, v, assigned(gate_of(own, k)))


def _two(q: Tensor, k: Tensor, v: Tensor, own: Tensor) -> Tensor:
    return attention(q, k, v, assigned(gate_of(own, k))) + attention(k, q, v, assigned(gate_of(own, k)))


@pytest.mark.parametrize(("fn", "count"), [(_one, 1), (_two, 2)])
def test_a_gate_alone_keeps_its_gradients_of_zeros(fn: Callable[..., Tensor], count: int) -> None:
    at = [*given(), given()[0].cos()]
    got = attentions.routed(fn, at, ops={"selection_attention": count})
    assert not got.grads["input 3"].any()
    assert count > 1 or dict(run(fn, at, grad=False).ops) == {"selection_attention": 1}


# --- gates that keep something else ------------------------------------------------------------------------------


def widened(gate: Tensor) -> Tensor:
    return gate.repeat_interleave(BLOCK, -1)[:, :, : gate.shape[1]].masked_fill(~causal(gate.new_empty(S, S)), -INF)


def other_mask(gate: Tensor) -> Tensor:
    need = needed(gate)
    gate[need] = 0
    gate[~need.flip(1)] = -INF
    return widened(gate)


def scores_stay(gate: Tensor) -> Tensor:
    return widened(gate.masked_fill_(~needed(gate), -INF))


def same_mask(gate: Tensor) -> Tensor:
    """Scores of the chosen blocks stay."""
    gate = gate.clamp(-1.0, 1.0)
    need = needed(gate)
    gate[~need] = 0
    gate[~need] = -INF
    return gate.repeat_interleave(BLOCK, -1)[:, :, : gate.shape[1]]


def read_again(gate: Tensor) -> Tensor:
    """What the view wrote is read through the repeated gate, rolled by one block."""
    wide = assigned_base(gate)
    mask = wide[:, :, : gate.shape[1]]
    mask.masked_fill_(~causal(mask), -INF)
    return wide.roll(0, 1)[:, :, : gate.shape[1]]


def assigned_base(gate: Tensor) -> Tensor:
    need = needed(gate)
    return torch.zeros(gate.shape).masked_fill(~need, -INF).repeat_interleave(BLOCK, dim=-1)


def another_view(gate: Tensor) -> Tensor:
    wide = assigned_base(gate)
    mask, all_of_it = wide[:, :, : gate.shape[1]], wide.transpose(1, 2)
    mask.masked_fill_(~causal(mask), -INF)
    return all_of_it.transpose(1, 2)[..., : gate.shape[1]]


def base_written_after(gate: Tensor) -> Tensor:
    wide = assigned_base(gate)
    mask = wide[:, :, : gate.shape[1]]
    mask.masked_fill_(~causal(mask), -INF)
    wide[:, :, :2] = 0.0
    return mask


def overlapping(gate: Tensor) -> Tensor:
    """Every key of a diagonal is one element: a row that is written shows keys to the queries around."""
    band = torch.zeros(2 * S, dtype=torch.bool).as_strided((S, S), (1, 1))
    band[3] = True
    wide = needed(gate).repeat_interleave(BLOCK, -1)[..., :S] | band
    return torch.zeros(wide.shape).masked_fill(~(wide & causal(wide)), -INF)


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f
    for f in (other_mask, scores_stay, same_mask, read_again, another_view, base_written_after, overlapping)
}


@pytest.mark.parametrize("name", KEPT)
def test_other_gates_are_what_they_say(name: str) -> None:
    got = alike(form(KEPT[name]), given(), within=2e-6)
    assert "verified" not in reasons(got), "an op was made, and only its comparison with the formula refused it"
    assert not got.ops or name in ("read_again", "another_view", "base_written_after", "overlapping"), reasons(got)


@pytest.mark.parametrize("returned", ["base", "view", "both"])
def test_a_gate_that_is_returned(returned: str) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        wide = assigned_base(gate_of(q, k))
        mask = wide[:, :, : q.shape[0]]
        mask.masked_fill_(~causal(mask), -INF)
        more = {"base": (wide,), "view": (mask,), "both": (mask, wide)}[returned]
        return (attention(q, k, v, mask), *more)

    alike(fn, given(), within=2e-6)


def test_a_view_of_an_argument_is_written_in_the_argument() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, wide: Tensor) -> Tensor:
        need = needed(gate_of(q, k)).repeat_interleave(BLOCK, -1)[..., : q.shape[0]]
        mask = wide[:, :, : q.shape[0]]
        mask.masked_fill_(~(need & causal(need)), -INF)
        return attention(q, k, v, mask)

    wides = [torch.zeros(H, S, S + 4) for _ in range(2)]
    results = []
    for wide, routed in zip(wides, (True, False), strict=True):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="mhc_inductor" if routed else "eager")
        results.append(compiled(*given(), wide))
    assert torch.equal(*wides) and bool(wides[0].isinf().any())
    assert torch.allclose(*results, atol=1e-5)
