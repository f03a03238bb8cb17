# SPDX-License-Identifier: Apache-2.0
"""Formulas that resemble mHC and are another one: each is named as what it is, and gates of plain models are not named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.formulas import sparse_families
from tests.formulas.reference_models_mhc import BOTH, EPS, WIDTH, N, P, _balanced, around, normed, parameters, sublayer
from tests.test_routing_mhc_laws import same, streams
from tests.tools.capture import alike, reasons, run

Made = dict[str, Tensor]
HALVES, RANK = 2, 6


def made(**shapes: tuple[int, ...]) -> Made:
    """Returns the usual parameters, and random ones of these shapes."""
    g = torch.Generator().manual_seed(9)
    more = {k: (torch.randn(s, generator=g) * 0.2).requires_grad_() for k, s in shapes.items()}
    return {**parameters(), **more}


def projected(x: Tensor, p: P) -> Tensor:
    return normed(x.flatten(-2)) @ p["phi"].T


def mixed(x: Tensor, p: P, pre: Tensor, post: Tensor, matrix: Tensor) -> Tensor:
    """Returns the streams after a sublayer, by these coefficients."""
    f_out = sublayer((pre.unsqueeze(-1) * x).sum(-2), p)
    return matrix @ x + post.unsqueeze(-1) * f_out.unsqueeze(-2)


def split(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the parts of ``z [..., n * n + 2 * n]``, the last one as a matrix."""
    return z[..., :N], z[..., N : 2 * N], z[..., 2 * N :].unflatten(-1, (N, N))


# --- plain models -------------------------------------------------------------------------------------------


def router(v: Tensor, p: P) -> Tensor:
    scores = torch.sigmoid(normed(v) @ p["experts"].T)
    best, at = scores.topk(2, -1)
    every = torch.stack([F.silu(v @ w) for w in p["each"]], -2)
    return (best.unsqueeze(-1) * every.gather(-2, at.unsqueeze(-1).expand(*at.shape, v.shape[-1]))).sum(-2)


def head_gates(v: Tensor, p: P) -> Tensor:
    heads = (v @ p["weight"]).unflatten(-1, (N, -1))
    return (heads * torch.sigmoid(normed(v) @ p["experts"].T).unsqueeze(-1)).flatten(-2)


def low_rank_gate(v: Tensor, p: P) -> Tensor:
    return v * torch.sigmoid(normed(v) @ p["down"].T @ p["up"].T)


def tanh_gate(v: Tensor, p: P) -> Tensor:
    return v * (1 + torch.tanh(normed(v) @ p["experts"][:1].T))


@pytest.mark.parametrize("gate", [router, head_gates, low_rank_gate, tanh_gate])
def test_gates_of_plain_models_are_not_named(gate: Callable[[Tensor, P], Tensor]) -> None:
    p = made(experts=(N, WIDTH), each=(N, WIDTH, WIDTH), down=(2, WIDTH), up=(1, 2))
    got = run(lambda v: gate(v, p), (streams()[..., 0, :].contiguous(),), [*p.items()])
    assert not got.ops and not got.report.near_misses, reasons(got)


@pytest.mark.parametrize("family", ["hy_v4", "dots3_note", "minimax_m3_vl"])
def test_routers_of_models_are_not_named(family: str) -> None:
    model = sparse_families.build(family)
    got = run(lambda ids: model(input_ids=ids, use_cache=False).logits, (sparse_families.tokens(1, 12),), [], False)
    assert not [m for m in got.report.near_misses if m.op.startswith("mhc")], reasons(got)


# --- near misses: x is seen as streams, however it is kept --------------------------------------------------

SEEN: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "a dim": lambda v: [*v.unflatten(-1, (N, WIDTH)).unbind(-2)],
    "chunks": lambda v: [*v.chunk(N, -1)],
    "slices": lambda v: [v[..., i * WIDTH : (i + 1) * WIDTH] for i in range(N)],
}


@pytest.mark.parametrize("seen", SEEN)
def test_a_collapse_of_something_else_is_named(seen: str) -> None:
    p = parameters()

    def fn(v: Tensor) -> Tensor:
        pre = torch.sigmoid(normed(v) @ p["phi"][:N].T)
        return sum(pre[..., i : i + 1] * t.square() for i, t in enumerate(SEEN[seen](v)))  # type: ignore[return-value]

    got = run(fn, (streams().flatten(-2),), [*p.items()])
    assert [m.op for m in got.report.near_misses] == ["mhc_pre"], reasons(got)


# --- other families -----------------------------------------------------------------------------------------


def low_rank(x: Tensor, p: P) -> Tensor:
    return around(x, p, _balanced, normed(x.flatten(-2)) @ p["down"].T @ p["up"].T)


def tanh_gates(x: Tensor, p: P) -> Tensor:
    z, (alpha, bias) = projected(x, p), (p["alpha"], p["bias"])
    pre, post = (1 + torch.tanh(z[..., i * N :][..., :N] * alpha[i] + bias[i * N :][:N]) for i in range(2))
    matrix = _balanced((z[..., 2 * N :] * alpha[2] + bias[2 * N :]).unflatten(-1, (N, N)))
    return mixed(x, p, pre, post, matrix)


def tanh_without_bias(x: Tensor, p: P) -> Tensor:
    return ((1 + torch.tanh(projected(x, p)[..., :N])).unsqueeze(-1) * x).sum(-2)


def fractions(x: Tensor, p: P) -> Tensor:
    """Every stream is split in halves, each with weights of its own."""
    z, each = normed(x.flatten(-2)) @ p["wide"].T, N * HALVES
    pre, post = torch.sigmoid(z[..., :each]).unflatten(-1, (N, HALVES)), torch.sigmoid(z[..., each : 2 * each])
    parts = x.unflatten(-1, (HALVES, -1))
    f_out = sublayer((pre.unsqueeze(-1) * parts).sum(-3).flatten(-2), p).unflatten(-1, (1, HALVES, -1))
    mixed = _balanced(z[..., 2 * each :].unflatten(-1, (N, N))) @ x
    return mixed + 2 * (post.unflatten(-1, (N, HALVES)).unsqueeze(-1) * f_out).flatten(-2)


def frac_connections(x: Tensor, p: P) -> Tensor:
    """The hidden state itself is split into streams, and a matrix collapses them."""
    v = x.flatten(-2)
    z = normed(v) @ p["wide"].T
    pre, post = torch.sigmoid(z[..., : N * N]).unflatten(-1, (N, N)), torch.sigmoid(z[..., N * N : N * N + N])
    f_out = F.silu(pre @ v.unflatten(-1, (N, -1)))
    return (x + 2 * post.unsqueeze(-1) * f_out).flatten(-2)


def altered(pre: Callable[[Tensor], Tensor], post: Callable[[Tensor], Tensor]) -> Callable[[Tensor, P], Tensor]:
    """Returns a site whose weights are functions of alpha * z + bias."""

    def fn(x: Tensor, p: P) -> Tensor:
        a, b, c = split(p["alpha"][0] * projected(x, p) + p["bias"])
        return mixed(x, p, pre(a), post(b), _balanced(c))

    return fn


def share(z: Tensor) -> Tensor:
    return (h := z.sigmoid()) / (h.sum(-1, keepdim=True) + EPS)


def of_all(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, P], Tensor]:
    """Returns a site with a function before alpha, in one call for all weights, and none after it."""

    def fn(x: Tensor, p: P) -> Tensor:
        return mixed(x, p, *split(p["alpha"][0] * function(projected(x, p)) + p["bias"]))

    return fn


def from_logits(logits: Callable[[Tensor, P], Tensor]) -> Callable[[Tensor, P], Tensor]:
    return lambda x, p: around(x, p, _balanced, logits(x, p))


def own_weights(x: Tensor, p: P) -> Tensor:
    """Each stream is normalised and projected by itself, to a weight of its own and to a row of the matrix."""
    z = normed(x) @ p["experts"].T
    f_out = sublayer((torch.sigmoid(z[..., :1]) * x).sum(-2), p)
    return _balanced(z) @ x + 2 * torch.sigmoid(z[..., 1:2]) * f_out.unsqueeze(-2)


NOT_PHI = "the weights of the streams are computed from x, but not as sigmoid(alpha * z + bias)"
FAMILIES: dict[str, tuple[Callable[[Tensor, P], Tensor], str]] = {
    "renormalised": (altered(share, lambda z: 2 * z.sigmoid()), "a division by their sum is part of the weights"),
    "both renormalised": (altered(share, lambda z: N * share(z)), "a division by their sum is part of the weights"),
    "clamped weights": (altered(lambda z: z.sigmoid().clamp(0.1, 0.9), torch.sigmoid), "clamp is part of the weights"),
    "softmaxed": (altered(lambda z: z.softmax(-1), lambda z: z.softmax(-1)), "softmax is applied to the logits"),
    "linear": (altered(lambda z: z, lambda z: z), NOT_PHI),
    "linear, and no iterations": (of_all(lambda z: z), "the logits h_res are computed, and no h_pre = sigmoid("),
    "tanh before alpha": (of_all(torch.tanh), "tanh is applied to the logits; expected sigmoid(alpha * z + bias)"),
    "layer norm": (
        from_logits(lambda x, p: F.layer_norm(x.flatten(-2), (N * WIDTH,)) @ p["phi"].T),
        "a LayerNorm is part of the weights of the streams",
    ),
    "the mean of streams": (from_logits(lambda x, p: normed(x.mean(-2)) @ p["phi"][:, :WIDTH].T), NOT_PHI),
    "the first stream": (from_logits(lambda x, p: normed(x[..., 0, :]) @ p["phi"][:, :WIDTH].T), NOT_PHI),
    "each stream's own": (own_weights, NOT_PHI),
    "each stream normalised": (
        from_logits(lambda x, p: F.rms_norm(x, (WIDTH,)).flatten(-2) @ p["phi"].T),
        "each stream is normalised by itself; expected inv_rms",
    ),
    "low rank": (low_rank, "z is a product of x and two weights, as in a low-rank gate; expected one phi"),
    "tanh": (tanh_gates, "tanh is applied to the logits; expected sigmoid(alpha * z + bias)"),
    "tanh without bias": (tanh_without_bias, "tanh is applied to the logits; expected sigmoid(alpha * z + bias)"),
    "fractions": (fractions, "2 weights a stream come out of one sigmoid"),
    "frac-connections": (frac_connections, "4 weights a stream come out of one sigmoid"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_another_family_is_named(name: str) -> None:
    fn, reason = FAMILIES[name]
    rows = N * N + 2 * N
    p = made(down=(RANK, N * WIDTH), up=(rows, RANK), wide=(2 * HALVES * N + N * N, N * WIDTH), experts=(N, WIDTH))
    got = same(lambda x: fn(x, p), (streams(),), p.items())
    assert [m.reason.startswith(reason) for m in got.report.near_misses if m.op == "mhc_pre"] == [True], reasons(got)


def test_a_matrix_that_is_only_softmaxed_is_named() -> None:
    p = parameters()
    got = same(lambda x: around(x, p, lambda z: z.softmax(-1)), (streams(),), p.items(), BOTH)
    assert (
        reasons(got)
        == "h_res is divided by the sums over one dim, as by a softmax, and no Sinkhorn iterations of the op follow"
    )


# --- what eps bounds ----------------------------------------------------------------------------------------

SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda t: t,
    "of columns": lambda t: t - t.amax(-2, keepdim=True),
    "another": lambda t: t - t.mean((-1, -2), keepdim=True),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_what_exp_is_taken_of_where_eps_bounds_its_sums(name: str) -> None:
    """The bound reaches sums that depend on what was subtracted."""
    p = parameters()

    def balanced(t: Tensor) -> Tensor:
        m = torch.exp(SHIFTS[name](t))
        for i in range(6):
            m = m / m.sum(-1 - i % 2, keepdim=True).clamp_min(1e-2)
        return m

    got = same(lambda x: around(x, p, balanced), (streams(),), p.items())
    said = "rows and columns are normalised 6 times, and no form of mhc_sinkhorn gives the matrix: the nearest"
    assert any(m.reason.startswith(said) for m in got.report.near_misses), reasons(got)
    assert "mhc_sinkhorn" not in got.ops


# --- constants that alpha takes in --------------------------------------------------------------------------

SCALED: dict[str, Callable[[Tensor, P], Tensor]] = {
    "z": lambda x, p: around(x, p, _balanced, 0.0625 * projected(x, p)),
    "the norm's mean is a sum": from_logits(
        lambda x, p: (v := x.float().flatten(-2)) * torch.rsqrt((v * v).sum(-1, keepdim=True) + EPS) @ p["phi"].T
    ),
    "the root of two": from_logits(
        lambda x, p: (v := x.float().flatten(-2)) * torch.rsqrt(2 * (v * v).mean(-1, keepdim=True) + EPS) @ p["phi"].T
    ),
    "minus z": lambda x, p: around(x, p, _balanced, -projected(x, p)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SCALED)
def test_a_number_that_scales_z_is_a_factor_of_alpha(name: str, dtype: torch.dtype) -> None:
    p, fn = parameters(), SCALED[name]
    within = 1e-5 if dtype is torch.float32 else 2e-2
    got = alike(lambda x: fn(x, p), (streams(dtype=dtype),), p.items(), BOTH, within=within)
    assert not got.report.near_misses and all(r.error is not None for r in got.report.routed)


def test_numbers_that_differ_between_the_coefficients() -> None:
    """One alpha for all three, each with another number, and a bias inside the product."""
    p = parameters()

    def fn(x: Tensor) -> Tensor:
        z, bias, a = projected(x, p), p["bias"], p["alpha"][0]
        pre = torch.sigmoid(0.5 * a * z[..., :N] + bias[:N])
        post = 2 * torch.sigmoid(a * 3.0 * (z[..., N : 2 * N] / 4.0 + bias[N : 2 * N]))
        matrix = _balanced((a * z[..., 2 * N :] / 7.0 + bias[2 * N :]).unflatten(-1, (N, N)))
        return mixed(x, p, pre, post, matrix)

    same(fn, (streams(),), p.items(), BOTH)


Logits = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BIASES: dict[str, Logits] = {
    "inside and outside alpha": lambda z, a, b, c: a * (z + b) + c,
    "the one outside first": lambda z, a, b, c: c + (b + z) * a,
    "a number inside and one outside": lambda z, a, b, c: 0.5 * (a * (z / 3.0 + b)) + c,
    "both outside": lambda z, a, b, c: a * z + b + c,
    "without alpha": lambda z, a, b, c: z + b + c,
    "one of them twice": lambda z, a, b, c: a * (z + b) + 2.0 * c,
    "one of them reversed": lambda z, a, b, c: a * (z + b) + c.flip(-1),
    "one is subtracted": lambda z, a, b, c: a * (z + b) - c,
    "both are subtracted": lambda z, a, b, c: a * (z - b) - c,
    "from the bias": lambda z, a, b, c: b - a * (c - z),
    "an alpha each": lambda z, a, b, c: a * (a * (z + b) + c),
    "a third one": lambda z, a, b, c: a * (z + b) + c + b,
    "a temperature": lambda z, a, b, c: (a * (z + b) + c) / 0.7,
    "two scalars": lambda z, a, b, c: a * z * c[0] + b,
    "a sum that is a factor of a sum": lambda z, a, b, c: 0.5 * (c + a * (b + 3.0 * (z + c))) + b,
    "and a number": lambda z, a, b, c: a * (z + b) + c + 1.0,
    "and a number inside": lambda z, a, b, c: a * (z + 1.5) + c,
    "a number alone": lambda z, a, b, c: z * a + 0.5,
    "a number alone, without alpha": lambda z, a, b, c: z - 0.5,
    "a number times alpha": lambda z, a, b, c: a * (z + 1.0),
    "a number times the first of many": lambda z, a, b, c: c[0] * (z + 1.0),
    "numbers that are no bias together": lambda z, a, b, c: 3.0 - a * (2.0 - (z + 0.25) / 0.7) - 0.5 * b,
}
OTHER_BIASES: dict[str, Logits] = {
    "one is made of x": lambda z, a, b, c: a * (z + b) + c * z.mean(-1, keepdim=True),
    "one is the tokens'": lambda z, a, b, c: a * (z + b) + c * torch.linspace(0, 1, z.shape[1]).unsqueeze(-1),
    "an alpha for each row": lambda z, a, b, c: c * (z + b),
    "an alpha that is the tokens'": lambda z, a, b, c: torch.linspace(0, 1, z.shape[1]).unsqueeze(-1) * (z + b) + c,
    "z squared": lambda z, a, b, c: (z + b) * (z + b) + c,
    "divided by a sum": lambda z, a, b, c: a / (z + b) + c,
    "z twice": lambda z, a, b, c: a * (z + b) + c + z,
    "a number for each token": lambda z, a, b, c: a * z + b + torch.linspace(0, 1, z.shape[1]).unsqueeze(-1),
    "a number and an alpha for each row": lambda z, a, b, c: c * (z + 1.5),
    "a number times a token's": lambda z, a, b, c: torch.linspace(0, 1, z.shape[1]).unsqueeze(-1) * (a * z + 1.5),
    "the square of z and a number": lambda z, a, b, c: a * (z + 1.5) ** 2,
    "divided by z and a number": lambda z, a, b, c: a / (z + 1.5) + b,
    "a function of z and a number": lambda z, a, b, c: a * torch.relu(z + 1.5) + b,
}


def with_biases(logits: Logits | list[Logits], p: Made) -> Callable[[Tensor], Tensor]:
    """Returns a site whose logits, of all three coefficients or of each, are made of z, alpha and two biases."""
    parts = (slice(0, N), slice(N, 2 * N), slice(2 * N, None))
    functions = logits if isinstance(logits, list) else [logits] * 3

    def fn(x: Tensor) -> Tensor:
        z = projected(x, p)
        pre, post, res = (
            of(z[..., at], a, p["bias"][at], p["more"][at])
            for of, at, a in zip(functions, parts, p["alpha"], strict=True)
        )
        return mixed(x, p, torch.sigmoid(pre), 2 * torch.sigmoid(post), _balanced(res.unflatten(-1, (N, N))))

    return fn


@pytest.mark.parametrize("tokens", [[], [0]], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", BIASES)
def test_two_biases_are_one(name: str, tokens: list[int]) -> None:
    p = made(more=(N * N + 2 * N,))
    got = alike(with_biases(BIASES[name], p), (streams(),), p.items(), BOTH, symbolic=tokens)
    assert not got.report.near_misses and all(r.error is not None for r in got.report.routed)


@pytest.mark.parametrize("name", OTHER_BIASES)
def test_other_biases_stay_the_models(name: str) -> None:
    p = made(more=(N * N + 2 * N,))
    got = same(with_biases(OTHER_BIASES[name], p), (streams(),), p.items())
    assert not got.ops["mhc_pre"], reasons(got)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("role", range(3))
def test_a_number_added_to_the_logits_of_one_coefficient(role: int, bias: bool) -> None:
    p = made(more=(N * N + 2 * N,))
    each: list[Logits] = [lambda z, a, b, c: a * z + b if bias else a * z] * 3
    each[role] = lambda z, a, b, c: a * (z + 1.5) + b if bias else a * z + 0.5
    got = same(with_biases(each, p), (streams(),), p.items())
    assert dict(got.ops) == BOTH or not bias, reasons(got)


def test_two_biases_in_bf16_are_added_in_fp32() -> None:
    """Sums of bf16 numbers, of which bf16 would round off a hundredth."""
    p = made(more=(N * N + 2 * N,))
    p = {k: v.detach().bfloat16().requires_grad_() if k in ("bias", "more") else v for k, v in p.items()}
    fn = with_biases(lambda z, a, b, c: z + (b * 8).float() + c.float(), p)
    same(fn, (streams(),), p.items(), BOTH, within=1e-4)


ALONE = {
    "rows": lambda t: t.amax(-1, keepdim=True),
    "columns": lambda t: t.amax(-2, keepdim=True),
    "both": lambda t: t.amax((-2, -1), keepdim=True),
    "both, flat": lambda t: t.flatten(-2).max(-1).values[..., None, None],
    "both, detached": lambda t: t.detach().amax((-2, -1), keepdim=True),
}


def exponential(top: Callable[[Tensor], Tensor], steps: int, p: P, bias: Tensor | float) -> Callable[[Tensor], Tensor]:
    """Returns a site with iterations of exp(logits - top), with eps added to the sums."""

    def fn(x: Tensor) -> Tensor:
        pre, post, logits = split(projected(x, p) + bias)
        matrix = torch.exp(logits - top(logits))
        for step in range(steps):
            matrix = matrix / (matrix.sum(-1 - step % 2, keepdim=True) + 1e-3)
        return mixed(x, p, torch.sigmoid(pre), 2 * torch.sigmoid(post), matrix)

    return fn


@pytest.mark.parametrize("tokens", [[], [0]], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ALONE)
def test_iterations_of_exp_less_a_maximum_inside_a_site(name: str, tokens: list[int]) -> None:
    p = parameters()
    ops = {**BOTH, "mhc_sinkhorn": 1}
    got = alike(exponential(ALONE[name], 6, p, p["bias"]), (streams(),), p.items(), ops, symbolic=tokens)
    assert not got.report.near_misses


@pytest.mark.parametrize("steps", [5, 1], ids=["a step too few", "one step"])
def test_unfinished_iterations_of_exp_stay_the_models(steps: int) -> None:
    p = parameters()
    same(exponential(ALONE["rows"], steps, p, 0.0), (streams(),), p.items(), BOTH)


# --- tokens in one dim, and weights of each coefficient -----------------------------------------------------------

DETACHED = ("nothing", "pre", "post", "matrix")


def flat_tokens(x: Tensor, p: Made, detached: str) -> Tensor:
    tokens = x.flatten(0, 1)
    v = normed(tokens.flatten(1))
    pre = (v @ p["first"] + p["bias"][:N]).sigmoid()
    post = 2 * torch.sigmoid(torch.addmm(p["own"], v, p["second"]))
    matrix = _balanced((v @ p["third"].flatten(1) + p["table"].flatten()).view(-1, N, N))
    pre, post, matrix = (
        t.detach() if name == detached else t for name, t in zip(DETACHED[1:], (pre, post, matrix), strict=True)
    )
    f_out = sublayer(torch.einsum("tn,tnd->td", pre, tokens), p)
    return (torch.bmm(matrix, tokens) + post.unsqueeze(-1) * f_out.unsqueeze(1)).view(x.shape)


@pytest.mark.parametrize("tokens", [[], [0]], ids=["static", "dynamic"])
@pytest.mark.parametrize("detached", DETACHED)
def test_weights_of_each_coefficient_get_their_gradients(detached: str, tokens: list[int]) -> None:
    """The op reads views of another op's outputs, and the weights behind them: they have a gradient, or none."""
    k = N * WIDTH
    p = made(first=(k, N), second=(k, N), third=(k, N, N), own=(N,), table=(N, N))
    ops = BOTH if detached == "nothing" else None
    got = alike(lambda x: flat_tokens(x, p, detached), (streams(),), p.items(), ops, symbolic=tokens)
    assert detached != "nothing" or not got.report.near_misses, reasons(got)
