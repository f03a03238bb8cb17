# SPDX-License-Identifier: Apache-2.0
"""Absorption of multi-head latent attention: which spellings are recognised, and what the emitted graph computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mhc_inductor import routing
from mhc_inductor.routing import Verifier
from mhc_inductor.routing.effects import ambient
from mhc_inductor.routing.graph.view import Knowledge, View
from mhc_inductor.routing.operators.selection import search
from mhc_inductor.routing.operators.selection.absorb import Absorbed, absorption
from tests.formulas.reference_models_selection import repeat_kv
from tests.oracles.mhc import relative
from tests.tools import capture
from tests.tools.capture import Captured, alike, difference, eager, named_tensors, not_worse, reasons, run

H, NOPE, V, ROPE, LATENT, DIM, TOPK = 3, 6, 5, 4, 8, 24, 4
Kv = Callable[["Latent", Tensor, Tensor], tuple[Tensor, Tensor]]


class Latent(nn.Module):
    """Multi-head latent attention over selected keys; ``kv`` makes K and V [B, H, T, D] of the latents [B, 1, T, D]."""

    def __init__(
        self, kv: Kv, bias: bool = False, rope: bool = True, call: bool = False, heads: int = H, rotate: bool = True
    ) -> None:
        super().__init__()
        self.kv, self.call, self.heads, self.rope, self.rotate = kv, call, heads, ROPE if rope else 0, rope and rotate
        self.width = NOPE + self.rope
        self.q_b_proj = nn.Linear(DIM, heads * self.width, bias=False)
        self.kv_a_proj = nn.Linear(DIM, LATENT + ROPE, bias=False)
        self.norm = nn.RMSNorm(LATENT)
        self.kv_b_proj = nn.Linear(LATENT, heads * (NOPE + V), bias=bias)
        self.k_b_proj = nn.Linear(LATENT, heads * NOPE, bias=False)
        self.v_b_proj = nn.Linear(LATENT, heads * V, bias=False)
        self.own = nn.Parameter(torch.randn(heads))
        self.o_proj = nn.Linear(heads * V, DIM, bias=False)

    def queries(self, x: Tensor) -> Tensor:
        q = self.q_b_proj(x).view(*x.shape[:2], self.heads, self.width).transpose(1, 2)
        q_pass, q_rot = torch.split(q, [NOPE, self.rope], dim=-1)
        return torch.cat((q_pass, q_rot.sin()), dim=-1) if self.rotate else q

    def forward(self, x: Tensor, topk: Tensor, past: Tensor | None = None) -> Tensor:
        B, S = x.shape[:2]
        c, rot = torch.split(self.kv_a_proj(x), [LATENT, ROPE], dim=-1)
        c, rot = self.norm(c).view(B, 1, S, LATENT), rot.cos().view(B, 1, S, ROPE)
        if past is not None:
            c, rot = torch.cat((past[..., :LATENT], c), 2), torch.cat((past[..., LATENT:], rot), 2)
        query, (key, value) = self.queries(x), self.kv(self, c, rot)
        mask = torch.zeros(B, S, key.shape[2], dtype=torch.bool).scatter(-1, topk, True).unsqueeze(1)
        if self.call:
            o = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.37)
        else:
            weights = torch.matmul(query, repeat_kv(key, 1).transpose(2, 3)) * 0.37
            weights = weights.masked_fill(~mask, float("-inf"))
            weights = F.softmax(weights, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
            o = torch.matmul(weights, repeat_kv(value, 1))
        return self.o_proj(o.transpose(1, 2).reshape(B, S, -1))


# --- spellings that are absorbed ---


def _both(m: Latent, c: Tensor) -> tuple[Tensor, Tensor]:
    kv = m.kv_b_proj(c).view(c.shape[0], c.shape[2], -1, NOPE + V).transpose(1, 2)
    k, v = torch.split(kv, [NOPE, V], dim=-1)
    return k, v


def _expanded(k: Tensor, rot: Tensor) -> Tensor:
    return rot.expand(-1, k.shape[1], -1, -1)


def _joined(rot: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([k, _expanded(k, rot)], dim=-1), v


def _halves(rot: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    return _joined(rot, kv[..., :NOPE], kv[..., NOPE:])


def cat(m: Latent, c: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
    return _joined(rot, *_both(m, c))


def copies(m: Latent, c: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
    k, v = _both(m, c)
    key = k.new_empty(*k.shape[:-1], NOPE + ROPE)
    key[..., :NOPE].copy_(k)
    key[..., NOPE:].copy_(_expanded(k, rot))
    return key, v


def assigned(m: Latent, c: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
    k, v = _both(m, c)
    key = k.new_empty(*k.shape[:-1], NOPE + ROPE)
    key[:, :, :, :NOPE] = k
    key[:, :, :, NOPE:] = rot
    return key, v


def einsum(m: Latent, c: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
    w = m.kv_b_proj.weight.view(m.heads, NOPE + V, LATENT)
    k = torch.einsum("btl,hdl->bhtd", c[:, 0], w[:, :NOPE])
    return _joined(rot, k, torch.einsum("btl,hel->bhte", c[:, 0], w[:, NOPE:]))


def _by_head(m: Latent, *parts: Tensor) -> list[Tensor]:
    return [t.unflatten(-1, (m.heads, -1)).transpose(1, 2) for t in parts]


def values_first(m: Latent, c: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
    v, k = m.kv_b_proj(c[:, 0]).unflatten(-1, (m.heads, V + NOPE)).transpose(1, 2).split([V, NOPE], dim=-1)
    return _joined(rot, k, v)


def two_ropes(m: Latent, c: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
    k, v = _both(m, c)
    first, rest = (_expanded(k, r) for r in (rot[..., :1].exp(), rot[..., 1:].sin()))
    return torch.cat([first, k, rest], dim=-1), v


def in_static_cache(m: Latent, c: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
    cache = torch.zeros(c.shape[0], 1, c.shape[2] + 3, LATENT, dtype=c.dtype)
    cache = cache.index_copy(2, torch.arange(c.shape[2]), c)
    return cat(m, cache[:, :, : c.shape[2]], rot)


SPELLINGS: dict[str, Kv] = {
    "cat": cat,
    "cat, sdpa": cat,
    "q as projected": cat,
    "rope first": lambda m, c, rot: (torch.cat([_expanded((kv := _both(m, c))[0], rot), kv[0]], dim=-1), kv[1]),
    "copies": copies,
    "copies, sdpa": copies,
    "assigned": assigned,
    "no rope": lambda m, c, rot: _both(m, c),
    "two maps": lambda m, c, rot: _joined(rot, *_by_head(m, m.k_b_proj(c[:, 0]), m.v_b_proj(c[:, 0]))),
    "matmul": lambda m, c, rot: _halves(
        rot, (c[:, 0] @ m.kv_b_proj.weight.t()).unflatten(-1, (m.heads, NOPE + V)).permute(0, 2, 1, 3)
    ),
    "einsum": einsum,
    "blocks of rows": lambda m, c, rot: _joined(
        rot, *_by_head(m, *m.kv_b_proj(c[:, 0]).split([m.heads * NOPE, m.heads * V], dim=-1))
    ),
    "values first": values_first,
    "repeated": lambda m, c, rot: (
        torch.cat([(kv := _both(m, c))[0], rot.repeat(1, m.heads, 1, 1)], dim=-1).contiguous(),
        kv[1].contiguous(),
    ),
    "two ropes": two_ropes,
    "static cache": in_static_cache,
}
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"call": True} for name in ("cat, sdpa", "copies, sdpa")},
    **{name: {"bias": True} for name in ("bias", "bias, copies")},
    "q as projected": {"rotate": False},
    "no rope": {"rope": False},
}
"""What spellings and formulas that are left need of :class:`Latent`."""


# --- running a graph with absorption ---


def absorbed(
    fn: Callable[..., Any],
    inputs: tuple[Any, ...],
    grad: bool = True,
    model: nn.Module | None = None,
    check: Verifier | None = None,
    **options: Any,
) -> tuple[Captured, list[Absorbed | None]]:
    """Runs ``fn`` with absorption whatever it costs; ``model``: whose parameters have gradients, by default ``fn``.

    Returns also what absorption was found for each attention, None where there was none. Without ``check`` no formula is
    compared on sample data: it refuses K whose parts end elsewhere than those of q ("rope first", "two ropes").
    """
    found: list[Absorbed | None] = []

    def recorded(*given: Any) -> Absorbed | None:
        found.append(absorption(*given))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "absorption", recorded)
        patch.setattr(search, "absorbs", lambda sizes: True)
        patch.setattr(capture, "VERIFY", check)
        patch.setattr(routing, "FewTokens", lambda: None)
        got = run(fn, inputs, [*(model or fn).named_parameters()], grad, dynamo=True, **options)
    assert got.ops["selection_attention"] == 1 and not got.report.problems, reasons(got)
    return got, found


def same(
    fn: Callable[..., Any], inputs: tuple[Any, ...], grad: bool = True, model: nn.Module | None = None, **options: Any
) -> tuple[Captured, Absorbed]:
    """Asserts that one attention is absorbed, with eager's values and gradients; returns how."""
    got, found = absorbed(fn, inputs, grad, model, **options)
    assert found and all(isinstance(x, Absorbed) for x in found), found
    assert difference(got, eager(fn, inputs, [*(model or fn).named_parameters()], grad)) < 1e-12
    return got, found[-1]


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Latent:
    torch.manual_seed(3)
    return Latent((SPELLINGS | LEFT)[name], **OPTIONS.get(name, {})).to(dtype)


def data(S: int = 9, B: int = 2, dtype: torch.dtype = torch.float64, T: int | None = None) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(S)
    rows = torch.stack([torch.randperm(T or S, generator=g)[:TOPK] for _ in range(B * S)]).view(B, S, TOPK)
    return torch.randn(B, S, DIM, generator=g, dtype=torch.float64).to(dtype), rows


def _expansions(got: Captured) -> list[str]:
    """Returns the nodes of the last graph that hold keys or values of each head, or write them."""
    wide, found = {NOPE + V, H * (NOPE + V), H * NOPE, H * V}, list[str]()
    for node in got.graphs[-1].graph.nodes:
        t = node.meta.get("example_value")
        after = node.op.startswith("call_") and isinstance(t, Tensor) and t.dim() > 2 and t.shape[-1] in wide
        if (after and t.shape[-1] != H * V) or node.target in ("copy_", "new_empty"):
            found.append(f"{node.name} {node.target} {tuple(t.shape)}")
    return found


@pytest.mark.parametrize("name", SPELLINGS)
def test_same_values_and_gradients(name: str) -> None:
    got, _ = same(model_of(name), data())
    # Without rope all of q has as many features as the keys.
    assert name == "no rope" or not _expansions(got)


@pytest.mark.parametrize("name", ["cat", "copies", "einsum", "two ropes", "two maps"])
def test_dynamic_sizes(name: str) -> None:
    same(model_of(name), data(9, 2), dynamic=True)


@pytest.mark.parametrize(("S", "B"), [(1, 2), (9, 1), (1, 1)])
def test_one_query_one_sequence(S: int, B: int) -> None:
    same(model_of("copies"), (*data(S, B, T=7 + S), torch.randn(B, 1, 7, LATENT + ROPE, dtype=torch.float64)))


# --- what is left as the model wrote it ---


def latent_per_head(m: Latent, c: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
    w = m.kv_b_proj.weight.view(m.heads, NOPE + V, LATENT)
    return _halves(rot, torch.einsum("bhtl,hdl->bhtd", c * m.own[:, None, None], w))


def hooked(m: Latent, c: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
    kv = m.kv_b_proj(c)
    kv.register_hook(lambda g: g * 2)
    return _halves(rot, kv.view(c.shape[0], c.shape[2], -1, NOPE + V).transpose(1, 2))


def merged_weight(m: Latent, c: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
    kv = F.linear(c, m.kv_b_proj.weight * 2).view(c.shape[0], c.shape[2], -1, NOPE + V).transpose(1, 2)
    return _halves(rot, kv)


def partly_written(m: Latent, c: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
    k, v = cat(m, c, rot)
    key = torch.zeros_like(k)
    key[..., 1:].copy_(k[..., 1:])
    return key, v


def without_gradients(m: Latent, c: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        k, _ = cat(m, c, rot)
    return k, cat(m, c, rot)[1]


def changed(change: Callable[[Tensor, Latent], Tensor]) -> Kv:
    """Returns :func:`cat` with keys that are changed after they are joined."""

    def kv(m: Latent, c: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
        k, v = cat(m, c, rot)
        return change(k, m), v

    return kv


LEFT: dict[str, Kv] = {
    "two latents": lambda m, c, rot: (cat(m, c, rot)[0], cat(m, c.tanh(), rot)[1]),
    "K normed": lambda m, c, rot: (
        torch.cat([F.rms_norm((kv := _both(m, c))[0], (NOPE,)), _expanded(kv[0], rot)], dim=-1),
        kv[1],
    ),
    "K and rope normed": changed(lambda k, m: F.rms_norm(k, (NOPE + ROPE,))),
    "bias": cat,
    "bias, copies": copies,
    "a latent for each head": latent_per_head,
    "K scaled by head": changed(lambda k, m: k * m.own[:, None, None]),
    "hook": hooked,
    "rope of each head": lambda m, c, rot: (
        torch.cat([(kv := _both(m, c))[0], rot * m.own[:, None, None]], dim=-1),
        kv[1],
    ),
    "dropout of K": changed(lambda k, m: F.dropout(k, 0.5)),
    "dropout of the latent, twice": lambda m, c, rot: (
        cat(m, F.dropout(c, 0.5), rot)[0],
        cat(m, F.dropout(c, 0.5), rot)[1],
    ),
    "weight computed": merged_weight,
    "V activated": lambda m, c, rot: (cat(m, c, rot)[0], *_by_head(m, F.silu(m.v_b_proj(c[:, 0])))),
    "K partly written": partly_written,
    "K detached": changed(lambda k, m: k.detach()),
    "K without gradients": without_gradients,
}


@pytest.mark.parametrize("name", LEFT)
def test_left_as_written(name: str) -> None:
    model, inputs = model_of(name), data()
    got, found = absorbed(model, inputs)
    assert found and not any(found)
    assert difference(got, eager(model, inputs, [*model.named_parameters()])) < 1e-12


def test_values_used_elsewhere_stay() -> None:
    model = model_of("cat")

    def used_elsewhere(m: Latent, c: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
        k, v = cat(m, c, rot)
        m.seen = k.sum()
        return k, v

    model.kv = used_elsewhere
    assert _expansions(same(lambda x, rows: (model(x, rows), model.seen), data(), model=model)[0])


def test_copies_into_slices_are_routed_and_verified() -> None:
    """K assembled by copies into slices is an input like any other, in training too."""
    model, inputs = model_of("copies"), data()
    got = alike(model, inputs, model.named_parameters(), {"selection_attention": 1}, within=1e-12)
    assert all(r.error is not None and r.error < 1e-10 for r in got.report.routed)


# --- precision, modes, gradients ---


def of_size(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    for name, size in sizes.items():
        monkeypatch.setattr(f"{__name__}.{name}", size)


def errors(model: nn.Module, exact: nn.Module, inputs: tuple[Tensor, Tensor]) -> dict[str, tuple[float, float]]:
    """Returns the errors against fp64 of the absorbed and of the unrouted ``model``, by output and gradient."""
    exact.load_state_dict(model.state_dict())
    parameters = [*model.named_parameters()]
    got, found = absorbed(model, inputs)
    assert found and all(isinstance(x, Absorbed) for x in found), found
    mine, theirs = named_tensors(got), named_tensors(eager(model, inputs, parameters))
    want = named_tensors(eager(exact, (inputs[0].double(), inputs[1]), [*exact.named_parameters()]))
    return {k: (relative(mine[k], w), relative(theirs[k], w)) for k, w in want.items() if bool(w.any())}


@pytest.mark.parametrize("seed", range(2))
def test_bf16_is_closer_to_fp64_than_the_model(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Rounds the absorbed q and the op's result instead of K, V and the scores: 0.7 times the error at real widths."""
    of_size(monkeypatch, H=4, NOPE=64, V=64, ROPE=32, LATENT=256, DIM=256, TOPK=32)
    torch.manual_seed(seed)
    model, exact = (Latent(copies, heads=4) for _ in range(2))
    for key, (mine, theirs) in errors(model.bfloat16(), exact.double(), data(96, 1, torch.bfloat16)).items():
        assert mine <= 0.9 * theirs, f"{key}: {mine:.3g} from fp64, the model {theirs:.3g}"


@pytest.mark.parametrize("large", [3, 30])
def test_bf16_where_most_of_the_latent_is_not_in_the_keys(monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    """Costs at most the one rounding of the op's result more, sqrt(3 / 2) of the model's two.

    The products with the absorbed q cancel, but the latent's own rounding, which the model has too, is no smaller. V is
    nearly the same for all keys: the model's error of V averages out.
    """
    of_size(monkeypatch, H=4, NOPE=64, V=64, ROPE=32, LATENT=256, DIM=256, TOPK=32)

    def kv(m: Latent, c: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
        return cat(m, c + large * torch.where(torch.arange(LATENT) % 3 == 0, -1, 1).to(c.dtype), rot)

    torch.manual_seed(1)
    model, exact = (Latent(kv, heads=4) for _ in range(2))
    unit = torch.where(torch.arange(LATENT) % 3 == 0, -1, 1) / LATENT**0.5
    with torch.no_grad():
        w = model.kv_b_proj.weight.view(4, NOPE + V, LATENT)[:, :NOPE]
        w -= (w @ unit)[..., None] * unit
    for key, (mine, theirs) in errors(model.bfloat16(), exact.double(), data(96, 1, torch.bfloat16)).items():
        assert mine <= 1.25 * theirs, f"{key}: {mine:.3g} from fp64, the model {theirs:.3g}"


@pytest.mark.parametrize("name", ["copies", "cat, sdpa", "two maps"])
def test_autocast(name: str) -> None:
    model, exact = model_of(name, torch.float32), model_of(name)
    exact.load_state_dict(model.state_dict())
    inputs = data(9, 2, torch.float32)

    def fn(x: Tensor, rows: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x, rows)

    got, found = absorbed(fn, inputs, model=model)
    assert found and all(isinstance(x, Absorbed) for x in found), found
    (call,) = [n for n in got.graphs[-1].graph.nodes if "selection" in str(n.target)]
    assert call.args[0].meta["example_value"].dtype is torch.bfloat16
    want = eager(exact, (inputs[0].double(), inputs[1]), [*exact.named_parameters()])
    not_worse(name, got, eager(fn, inputs, [*model.named_parameters()]), want)


@pytest.mark.parametrize("frozen", ["q_b_proj", "kv_b_proj", "kv_a_proj"])
def test_frozen_weights_get_no_gradient(frozen: str) -> None:
    model = model_of("copies")
    getattr(model, frozen).weight.requires_grad_(False)
    same(model, data())


def test_without_gradients() -> None:
    assert not _expansions(same(model_of("copies"), data(), grad=False)[0])


@pytest.mark.parametrize("name", ["cat", "copies", "assigned", "einsum"])
def test_verified(name: str) -> None:
    """The formula that is cut out of the graph and its op agree on the verifier's own data."""
    got, _ = absorbed(model_of(name), data(), check=Verifier())
    errors = [routed.error for routed in got.report.routed]
    assert len(errors) == 1 and errors[0] is not None and errors[0] < 1e-10


def test_static_cache_written_in_place() -> None:
    model, (x, rows) = model_of("cat"), data(2, 2, T=7)
    at = torch.tensor([5, 6])

    def kv(m: Latent, c: Tensor, rot: Tensor) -> tuple[Tensor, Tensor]:
        m.latents.index_copy_(2, m.at, c)
        m.ropes.index_copy_(2, m.at, rot)
        return copies(m, m.latents, m.ropes)

    model.kv = kv

    def fn(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        model.at, model.latents = at, torch.full((2, 1, 7, LATENT), 0.3, dtype=torch.float64)
        model.ropes = torch.linspace(-1, 1, 7, dtype=torch.float64).view(1, 1, 7, 1).repeat(2, 1, 1, ROPE)
        return model(x, rows), model.latents

    same(fn, (x, rows), grad=False, model=model)


def test_heads_with_lists_of_their_own_are_left() -> None:
    model, (x, rows) = model_of("cat"), data()

    def fn(x: Tensor, rows: Tensor) -> Tensor:
        c, rot = torch.split(model.kv_a_proj(x).unsqueeze(1), [LATENT, ROPE], dim=-1)
        query, (key, value) = model.queries(x), cat(model, c, rot)
        mask = torch.zeros(2, H, 9, 9, dtype=torch.bool).scatter(-1, rows, True)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    own = torch.stack([rows, (rows + 1) % 9, (rows + 2) % 9], 1)
    assert not any(absorbed(fn, (x, own), model=model)[1])


def test_sizes() -> None:
    _, found = same(model_of("rope first"), data())
    assert (found.heads, found.rope, found.width) == (H, ROPE, LATENT)


# --- copies into slices, made functional ---


def written_once(x: Tensor) -> Tensor:
    new = x.new_empty(4, 6)
    new[:, :2].copy_(x[:, :2])
    new[..., 2:].copy_(x[0, 2:] * 2)
    return new.sin()


def one_element_and_cast(x: Tensor) -> Tensor:
    new = torch.zeros(4, 6, dtype=torch.float32)
    new[1].copy_(x[2])
    new[:, 3].copy_(x[:, 1])
    return new + 1


def slice_used(x: Tensor, later: bool) -> Tensor:
    new = x * 2
    part = new[:, :2]
    written = part.copy_(x[:, 2:4])
    return new * (part if later else written).sum()


def slice_of_before_another_write(x: Tensor) -> Tensor:
    new = x * 2
    part = new[:, :2]
    new += 1
    part.copy_(x[:, 2:4])
    return new.sin()


def of_an_input(x: Tensor) -> Tensor:
    y = x.view(6, 4)
    y[:, :2].copy_(y[:, 2:].detach())
    return y * 2


def into(part: Callable[[Tensor], Tensor], source: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    new = x * 2
    part(new).copy_(source(x))
    return new.sin()


SLICES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "written once": (written_once, 2),
    "one element, and a cast": (one_element_and_cast, 2),
    "slice used later": (lambda x: slice_used(x, True), 0),
    "slice of before another write": (slice_of_before_another_write, 0),
    "result used": (lambda x: slice_used(x, False), 0),
    "picked by a list": (lambda x: into(lambda new: new[:, [0, 1]], lambda x: x[:, 2:4], x), 0),
    "of an input": (of_an_input, 0),
    "of a view": (lambda x: into(lambda new: new.view(6, 4)[:, :2], lambda x: x.view(6, 4)[:, 2:], x), 0),
}


@pytest.mark.parametrize("name", SLICES)
def test_copies_into_slices(name: str) -> None:
    fn, count = SLICES[name]
    views: list[View] = []

    def backend(gm: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        views.append(View(gm.graph, ambient(), Knowledge()))
        return fx.GraphModule(gm, views[-1].graph).forward

    x = torch.randn(4, 6, dtype=torch.float64)
    torch._dynamo.reset()
    got = torch.compile(fn, backend=backend)(x.clone())
    assert torch.equal(got, fn(x.clone()))
    assert [len(v.through) for v in views] == [count]
