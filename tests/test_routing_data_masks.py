# SPDX-License-Identifier: Apache-2.0
"""Attention under masks that routing cannot look into: read at the keys of a bound, or at all keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_inductor.report import Report
from tests.formulas import sparse_runs
from tests.formulas.sparse_families import FAMILIES
from tests.tools import capture
from tests.tools.attentions import as_exact, equal, routed, same, stays
from tests.tools.capture import Captured, difference, eager, named_tensors, reasons, run

B, H, S, D, K = 2, 3, 12, 8, 4
INF, LOWEST = float("inf"), torch.finfo(torch.float32).min
Form = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of q [B, H, S, D], k and v [B, 1, S, D], sinks [H], a mask [1, 1, S, S] and positions of keys [B, S, K]."""


def inputs(hide: float = LOWEST, dtype: torch.dtype = torch.float32, empty: bool = False) -> list[Tensor]:
    """Returns the arguments of a form; a causal mask that hides by ``hide``. ``empty``: some rows hide every key."""
    g = torch.Generator().manual_seed(0)
    q, k, v, sink = (torch.randn(*shape, generator=g) for shape in ((B, H, S, D), (B, 1, S, D), (B, 1, S, D), (H,)))
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    if empty:
        hidden[::5] = True
    mask = torch.zeros(1, 1, S, S).masked_fill(hidden, hide if dtype is torch.float32 else torch.finfo(dtype).min)
    indices = torch.rand(B, S, S, generator=g).topk(K).indices
    return [*(t.to(dtype) for t in (q, k, v, sink, mask)), indices]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor | None = None) -> Tensor:
    scores = q @ k.mT * 0.3 + mask
    if sink is None:
        return scores.softmax(-1) @ v
    scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


def chosen(q: Tensor, k: Tensor, at: Tensor) -> Tensor:
    """Returns 0 at the positions and -inf elsewhere, [B, 1, S, S]."""
    return torch.full((B, 1, q.shape[2], k.shape[2]), -INF, dtype=q.dtype).scatter(-1, at.unsqueeze(1), 0.0)


def filled(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, mask: Tensor, at: Tensor) -> Tensor:
    """The given mask filled where a key is not chosen: rows in which it hides all chosen keys depend on the others."""
    hidden = torch.ones(B, 1, q.shape[2], k.shape[2], dtype=torch.bool).scatter(-1, at.unsqueeze(1), False)
    return attend(q, k, v, mask.expand(B, -1, -1, -1).masked_fill(hidden, torch.finfo(q.dtype).min))


def chosen_by_where(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, mask: Tensor, at: Tensor) -> Tensor:
    kept = (at.unsqueeze(-1) == torch.arange(k.shape[2])).any(-2).unsqueeze(1)
    return attend(q, k, v, torch.where(kept, mask, -INF))


def segments(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, mask: Tensor, at: Tensor) -> Tensor:
    """DeepSeek-V4's: the given mask next to positions scattered into -inf, along the keys."""
    both = torch.cat([mask.expand(B, -1, -1, -1), chosen(q, k, at)], -1)
    return attend(q, torch.cat([k, k.flip(1) * 0.5], 2), torch.cat([v, v * 2], 2), both, sink)


LISTED: dict[str, Form] = {
    "scattered": lambda q, k, v, sink, mask, at: attend(q, k, v, mask + chosen(q, k, at)),
    "with_sink": lambda q, k, v, sink, mask, at: attend(q, k, v, chosen(q, k, at) + mask, sink),
    "blocks": lambda q, k, v, sink, mask, at: attend(
        q, k, v, mask[..., :2].repeat_interleave(2, -1).repeat_interleave(5, -1)[..., :S] + chosen(q, k, at)
    ),
    "filled": filled,
    "chosen_by_where": chosen_by_where,
}
WHOLE: dict[str, Form] = {
    "window": lambda q, k, v, sink, mask, at: attend(q, k, v, mask, sink),  # nothing bounds the given mask
    "segments": segments,
}
ENTRIES = "mhc_inductor.selection_entry_attention"
MASKS = "mhc_inductor.selection_mask_attention"


def detached(form: Form) -> Form:
    """Returns the form of a mask without a gradient: :func:`tests.tools.capture.run` asks for all of them."""
    return lambda q, k, v, sink, mask, at: form(q, k, v, sink, mask.detach(), at)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", {**LISTED, **WHOLE})
def test_routed(name: str, grad: bool, dynamic: bool) -> None:
    got = routed(detached({**LISTED, **WHOLE}[name]), inputs(), grad, dynamic=dynamic)
    assert len(got.nodes(ENTRIES if name in LISTED else MASKS)) == 1 or name == "segments"


@pytest.mark.parametrize("hide", [LOWEST, -INF, -1e4, -2.5])
@pytest.mark.parametrize("name", {**LISTED, **WHOLE})
def test_rows_in_which_the_mask_hides_every_key(name: str, hide: float) -> None:
    """NaN and its gradients, means with full gradients, and sums in which a fill of -2.5 is only a smaller score."""
    form, given = detached({**LISTED, **WHOLE}[name]), inputs(hide, empty=True)
    got, want = run(form, given), eager(form, given)
    assert got.ops["selection_attention"] == 1, reasons(got)
    ours, nan = ([t.isnan() for t in named_tensors(x).values()] for x in (got, want))
    assert all(map(torch.equal, ours, nan)) and len(ours) == len(nan)
    assert difference(got, want) < 2e-5 or any(t.any() for t in nan)
    equal(Captured(got.outputs, {}), Captured(want.outputs, {}), 1e-6)


@pytest.mark.parametrize("name", {**LISTED, **WHOLE})
def test_bf16(name: str) -> None:
    as_exact(name, detached({**LISTED, **WHOLE}[name]), inputs(dtype=torch.bfloat16, empty=True))


KINDS = {
    "fp64": ((torch.float64, torch.float64, torch.float64), 1e-13),
    "fp32_in_fp64": ((torch.float64, torch.float32, torch.float32), 1e-13),
    "bf16_in_fp32": ((torch.float32, torch.bfloat16, torch.bfloat16), 2e-6),
    "whole_numbers": ((torch.float32, torch.int32, torch.int32), 2e-6),
    "truth_values": ((torch.float32, torch.bool, torch.bool), 2e-6),
    "rounded_then_not": ((torch.bfloat16, torch.int32, torch.float32), 2e-2),
    "fp64_in_fp32": ((torch.float32, torch.float64, torch.float32), 0.0),
}


@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_numbers_of_other_dtypes_added_one_by_one(name: str, chooses: bool) -> None:
    """Each number is added in the dtype of the scores, whatever its own is; fp64 is not rounded to fp32."""

    def form(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, a: Tensor, b: Tensor, at: Tensor) -> Tensor:
        scores = q @ k.mT * 0.3 + a.detach() + b.detach()
        if chooses:
            return (scores + chosen(q, k, at)).softmax(-1).to(v.dtype) @ v
        scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
        return scores.softmax(-1)[..., :-1].to(v.dtype) @ v

    ((dtype, *others), within), (*tensors, _, at) = KINDS[name], inputs()
    numbers = torch.randn(2, 1, 1, S, S, generator=torch.Generator().manual_seed(6), dtype=torch.float64) * 3
    added = [t.to(other) for t, other in zip(numbers, others, strict=True)]
    ops = {"selection_attention": 1} if within else {}
    capture.alike(form, [*(t.to(dtype) for t in tensors), *added, at], ops=ops, within=within)


# --- segments of keys, each under masks of its own ------------------------------------------------------------------

Segments = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of the arguments of :data:`Form`, and keys, values [B, 1, C, D] and a mask [B, 1, S, C] of a segment before them."""


def two(a: Tensor, b: Tensor, v: Tensor, vc: Tensor, sink: Tensor | None) -> Tensor:
    scores = torch.cat([a, b] if sink is None else [a, b, sink.view(1, -1, 1, 1).expand(*a.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : a.shape[-1] + b.shape[-1]] @ torch.cat([vc, v], 2)


def among(at: Tensor, keys: int, fill: float = -INF) -> Tensor:
    return torch.full((B, 1, at.shape[1], keys), fill).scatter(-1, at.unsqueeze(1), 0.0)


def masked_again(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor, mask: Tensor, at: Tensor, kc: Tensor, vc: Tensor, m: Tensor
) -> Tensor:
    """One mask more on all of the scores, and products of slices of the weights."""
    n, own = kc.shape[2], torch.zeros(B, 1, *q.shape[2:3], k.shape[2])
    scores = torch.cat([q @ kc.mT * 0.3, q @ k.mT * 0.3 + mask], -1) + torch.cat([among(at, n), own], -1)
    w = scores.softmax(-1)
    return w[..., n:] @ v + w[..., :n] @ vc


def first(masked: Callable[[Tensor, Tensor, Tensor], Tensor], sunk: bool = True) -> Segments:
    """Returns the form with the first segment's scores masked as ``masked`` says of them, positions and its mask."""
    return lambda q, k, v, sink, mask, at, kc, vc, m: two(
        masked(q @ kc.mT * 0.3, at, m), q @ k.mT * 0.3 + mask, v, vc, sink if sunk else None
    )


APART: dict[str, Segments] = {
    "picked_and_given": first(lambda s, at, m: s + among(at, s.shape[-1])),
    # Keys that are not chosen count in rows where the given mask hides all others.
    "hidden_by_a_number": first(lambda s, at, m: s + (among(at, s.shape[-1], LOWEST) + m)),
    "two_given": first(lambda s, at, m: s.masked_fill(m != 0, -INF)),
    "without_a_sink": first(lambda s, at, m: s + (among(at, s.shape[-1]) + m), sunk=False),
    "masked_again": masked_again,
}


def parted(form: Segments, keys: int, hide: float, empty: bool) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Returns a form of masks without gradients, and its arguments, with a first segment of ``keys``."""
    g = torch.Generator().manual_seed(4)
    kc, vc = (torch.randn(B, 1, keys, D, generator=g) for _ in range(2))
    given, hidden = inputs(hide, empty=empty), torch.rand(B, 1, S, keys, generator=g) > 0.5
    given[-1] = torch.rand(B, S, keys, generator=g).topk(K).indices

    def fn(*x: Tensor) -> Tensor:
        return form(*x[:4], x[4].detach(), *x[5:8], x[8].detach())

    return fn, [*given, kc, vc, torch.zeros(hidden.shape).masked_fill(hidden, hide)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("hide", "empty"), [(LOWEST, False), (LOWEST, True), (-INF, True), (-2.5, True)])
@pytest.mark.parametrize("keys", [6, 60])
@pytest.mark.parametrize("name", APART)
def test_segments_under_masks_of_their_own(name: str, keys: int, hide: float, empty: bool, dynamic: bool) -> None:
    """Of 6 keys and 12 most are read, as a whole mask; of 60 and 12 a list."""
    got = same(*parted(APART[name], keys, hide, empty), 3e-6, 2e-5, dynamic=dynamic)
    if keys == 6 and not dynamic and name in ("without_a_sink", "masked_again"):  # torch has fused kernels for these
        assert not got.ops and [m for m in got.report.near_misses if m.op == "selection_attention"], reasons(got)
        return
    assert got.ops["selection_attention"] == 1, reasons(got)
    assert dynamic or len(got.nodes(ENTRIES)) == (keys == 60 and name != "two_given")


# --- left alone ---------------------------------------------------------------------------------------------------


LEFT: dict[str, Form] = {
    # The mask has a gradient, which no op gives.
    "trained": lambda q, k, v, sink, mask, at: LISTED["scattered"](q, k, v, sink, mask * 1.0, at),
    "trained_window": lambda q, k, v, sink, mask, at: attend(q, k, v, mask + sink.sum(), sink),
    "scaled": lambda q, k, v, sink, mask, at: ((q @ k.mT + (mask.detach() + chosen(q, k, at))) * 0.3).softmax(-1) @ v,
    # Heads of a group differ in their masks.
    "of_heads": lambda q, k, v, sink, mask, at: attend(q, k, v, mask.detach() * torch.arange(H).view(1, H, 1, 1), sink),
    # Torch has fused kernels for a mask without a sink and for heads of up to 256 elements.
    "narrow": lambda q, k, v, sink, mask, at: attend(q, k, v, mask.detach()),
    "in_a_call": lambda q, k, v, sink, mask, at: F.scaled_dot_product_attention(
        q, k.expand_as(q), v.expand_as(q), attn_mask=mask.detach()
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_with_a_reason(name: str) -> None:
    said = "a tensor that is trained" if "trained" in name else "an element for each query and key"
    stays(LEFT[name], inputs(), said, 2e-6, ordinary=True)


def test_more_than_4096_entries_stay_and_say_so() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, at: Tensor) -> Tensor:
        chosen = torch.full((1, 1, 2, 8000), -INF).scatter(-1, at.view(1, 1, 2, -1), 0.0)
        return attend(q, k, v, mask.detach() + chosen)

    g = torch.Generator().manual_seed(1)
    q, k, v, mask = (
        torch.randn(*shape, generator=g) for shape in ((1, H, 2, 4), (1, 1, 8000, 4), (1, 1, 8000, 4), (1, 1, 2, 8000))
    )
    given = [q, k, v, mask, torch.rand(2, 8000, generator=g).topk(5000).indices]
    stays(fn, given, "lists of 5000 keys a query; the op takes up to 4096", 2e-6)


def test_a_mask_with_a_gradient_is_read_where_none_is_asked_for() -> None:
    assert len(routed(LEFT["trained_window"], inputs(), False).nodes(MASKS)) == 1


# --- models whose layers are compiled one by one --------------------------------------------------------------------

ALONE = [(family, mode) for family in ("deepseek_v4", "hy_v4", "deepseek_v32", "glm_moe_dsa", "axk2", "dots3_note",
                                       "mistral_large4") for mode in ("training", "prefill, left padded")]  # fmt: skip


@pytest.mark.parametrize(("family", "mode"), ALONE)
def test_layers_compiled_one_by_one(family: str, mode: str) -> None:
    how = sparse_runs.MODES[mode]
    model = sparse_runs.prepare(family, how, "eager")
    report, graphs = Report(), list[torch.fx.GraphModule]()
    torch._dynamo.reset()
    want = sparse_runs.evaluate(model, model, how)
    for layer in next(m for name, m in model.named_modules() if name.endswith(".layers") and "vision" not in name):
        layer.compile(backend=capture.interpreted(report, graphs, capture.VERIFY), dynamic=False)
    got, ops = sparse_runs.evaluate(model, model, how), capture.ops_of(*graphs)
    assert difference(got, want) < 1e-4 and not report.problems
    assert not any("positions or padding alone" in m.reason for m in report.near_misses)
    assert ops["selection_attention"] >= FAMILIES[family].attentions
    assert ops["index_topk"] + ops["index_scores"] == FAMILIES[family].indexers
