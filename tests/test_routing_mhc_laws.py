# SPDX-License-Identifier: Apache-2.0
"""The laws of routing (design.md) for mHC: the model's roundings, autograd's graph, near misses, lone posts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mhc_inductor
from mhc_inductor.routing import route
from tests.formulas import laws
from tests.formulas.reference_models_mhc import ITERS, WIDTH, N, _balanced, around, normed, parameters, sublayer
from tests.tools.capture import Captured, difference, eager, run

BOTH = {"mhc_pre": 1, "mhc_post": 1}
Fn = Callable[..., Any]


def streams(*lead: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(*(lead or (2, 3)), N, WIDTH, generator=torch.Generator().manual_seed(3))
    return x.to(dtype)


def same(fn: Fn, inputs: tuple[Tensor, ...], named: Any = (), within: float = 1e-5, **options: Any) -> Captured:
    """Runs ``fn`` routed and unrouted, and asserts equal values, gradients, None gradients and requires_grad."""
    got, plain = run(fn, inputs, list(named), **options), eager(fn, inputs, list(named), **options)
    assert not got.report.problems
    assert difference(got, plain) < within, (difference(got, plain), dict(got.ops))
    assert {k for k, g in got.grads.items() if g is None} == {k for k, g in plain.grads.items() if g is None}
    assert requires(fn, inputs, True) == requires(fn, inputs, False)
    return got


def requires(fn: Fn, inputs: tuple[Tensor, ...], routed: bool) -> list[bool]:
    """Returns requires_grad of every output, where no input requires it."""

    def backend(gm: torch.fx.GraphModule, _: list[Any]) -> Fn:
        if routed:
            route(gm)
        return gm.forward

    torch._dynamo.reset()
    outputs = torch.compile(fn, backend=backend, dynamic=False)(*inputs)
    return [t.requires_grad for t in torch.utils._pytree.tree_leaves(outputs)]


def reasons(got: Captured) -> list[str]:
    return [f"{m.op}: {m.reason}" for m in got.report.near_misses]


# --- a rounding that the model wrote on an input stays ------------------------------------------------------

FP8 = torch.float8_e4m3fn
ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": lambda t: t.to(FP8).to(torch.float32),
    "bf16": lambda t: t.bfloat16().float(),
    "fp16": lambda t: t.half().to(t.dtype),
    "int8": lambda t: (t * 32).to(torch.int8).float() / 32,
    "fake": lambda t: torch.fake_quantize_per_tensor_affine(t, 0.05, 0, -127, 127),
    "bf16 stays": lambda t: t.bfloat16(),
    "scaled fp8": lambda t: (t * 16).to(FP8).float() * 0.0625,
}


@pytest.mark.parametrize("how", list(ROUNDINGS))
@pytest.mark.parametrize("which", ["phi", "alpha", "bias", "gamma"])
def test_a_rounded_weight_stays_rounded(which: str, how: str) -> None:
    p = parameters()
    p[which].data.mul_(1.37)
    named = [(k, t) for k, t in p.items() if how not in ("int8", "fp8", "scaled fp8") or k != which]

    def fn(x: Tensor) -> Tensor:
        q = {**p, which: ROUNDINGS[how](p[which])}
        v = normed(x.flatten(-2))
        return around(x, q, _balanced, (v * q["gamma"].flatten().to(v.dtype)) @ q["phi"].to(v.dtype).T)

    # 16-bit gradients are rounded where the op's sums end, and where the model's do.
    got = same(fn, (streams(),), named, 3e-4)
    if how not in ("int8", "scaled fp8"):
        assert dict(got.ops) == BOTH, reasons(got)
    assert got.ops or reasons(got)


@pytest.mark.parametrize("where", ["all", "collapse", "projection", "mix", "f_out"])
def test_rounded_streams_stay_rounded(where: str) -> None:
    p = parameters()

    def fn(x: Tensor) -> Tensor:
        r = x.bfloat16().float()
        x = r if where == "all" else x
        pick = lambda name: r if where == name else x  # noqa: E731
        inv = torch.rsqrt(x.flatten(-2).square().mean(-1, keepdim=True) + 1e-6)
        z = (pick("projection").flatten(-2) @ p["phi"].T) * inv
        pre = torch.sigmoid(z[..., :N] * p["alpha"][0] + p["bias"][:N])
        post = torch.sigmoid(z[..., N : 2 * N] * p["alpha"][1] + p["bias"][N : 2 * N])
        res = (z[..., 2 * N :] * p["alpha"][2] + p["bias"][2 * N :]).unflatten(-1, (N, N))
        f = sublayer((pre.unsqueeze(-1) * pick("collapse")).sum(-2), p)
        f = f.bfloat16().float() if where == "f_out" else f
        return _balanced(res) @ pick("mix") + post.unsqueeze(-1) * f.unsqueeze(-2)

    got = same(fn, (streams(),), p.items())
    assert got.ops["mhc_pre"] == (where in ("all", "mix", "f_out")), reasons(got)
    # Other streams are collapsed than projected: an op computes the coefficients alone, and another one collapses.
    apart = {"mhc_coefficients": 1, "mhc_collapse": 1, "mhc_post": 1}
    assert dict(got.ops) == (apart if where == "collapse" else BOTH) or reasons(got)


def test_roundings_of_intermediate_values_may_go() -> None:
    """Rounds the operands of the projection to bf16: the op may leave these roundings out, closer to exact."""
    p = parameters()

    def fn(x: Tensor) -> Tensor:
        z = (normed(x.flatten(-2)).bfloat16() @ p["phi"].T.bfloat16()).float()
        return around(x, p, _balanced, z)

    got = run(fn, (streams(dtype=torch.bfloat16),), list(p.items()))
    assert dict(got.ops) == BOTH, reasons(got)


@pytest.mark.parametrize("how", ["fp8", "bf16", "fp16"])
@pytest.mark.parametrize("which", ["h_pre", "h_post", "res", "mixed"])
def test_intermediate_roundings_to_a_dtype_that_no_tensor_has_stay(which: str, how: str) -> None:
    p = laws.mhc_leaves(dtype=torch.float32)
    x = p.pop("x")

    got = same(lambda x: laws.block(x, p, {which: ROUNDINGS[how]}), (x,), list(p.items()))
    assert "rounded to" in str(reasons(got))


@pytest.mark.parametrize("which", ["h_post", "h_res", "x", "f"])
def test_rounded_inputs_of_a_lone_post_stay_rounded(which: str) -> None:
    def fn(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        given = {"x": x, "f": f, "h_post": h_post, "h_res": h_res}
        given[which] = given[which].bfloat16().float()
        x, f, h_post, h_res = given.values()
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res @ x

    assert dict(same(fn, post_inputs()).ops) == {"mhc_post": 1}


# --- a post whose coefficients come from any operation ------------------------------------------------------


def post_inputs(*lead: int, dtype: torch.dtype = torch.float32, static: str = "") -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(9)
    lead = lead or (2, 3)
    t = [(*lead, N, WIDTH), (*lead, WIDTH), (*lead, N), (*lead, N, N)]
    t[2] = (N,) if "h" in static else t[2]
    t[3] = (N, N) if "r" in static else t[3]
    return tuple(torch.randn(s, generator=g).to(dtype) for s in t)


def _loop(x: Tensor, f: Tensor, h: Tensor, r: Tensor) -> Tensor:
    rows = [h[..., o, None] * f + sum(r[..., o, i, None] * x[..., i, :] for i in range(N)) for o in range(N)]
    return torch.stack(rows, -2)


POSTS: dict[str, Fn] = {
    "matmul": lambda x, f, h, r: r @ x + h.unsqueeze(-1) * f.unsqueeze(-2),
    "transposed": lambda x, f, h, r: h[..., None] * f[..., None, :] + torch.matmul(r.transpose(-1, -2), x),
    "einsum": lambda x, f, h, r: torch.einsum("...oi,...id->...od", r, x) + torch.einsum("...n,...d->...nd", h, f),
    "einsum transposed": lambda x, f, h, r: torch.einsum("...io,...id->...od", r, x) + h[..., None] * f[..., None, :],
    "sum": lambda x, f, h, r: (r.unsqueeze(-1) * x.unsqueeze(-3)).sum(-2) + h.unsqueeze(-1) * f.unsqueeze(-2),
    "sum transposed": lambda x, f, h, r: (r.unsqueeze(-1) * x.unsqueeze(-2)).sum(-3) + h[..., None] * f[..., None, :],
    "columns": lambda x, f, h, r: h.unsqueeze(-1) @ f.unsqueeze(-2) + r @ x,
    "loop": _loop,
    "bmm": lambda x, f, h, r: (
        torch.bmm(r.flatten(0, 1), x.flatten(0, 1)).view(x.shape) + h[..., None] * f[..., None, :]
    ),
    "packed": lambda x, f, h, r: (
        torch.bmm(r.flatten(0, 1), x.flatten(0, 1)).view(*x.shape[:2], -1)
        + (h[..., None] * f[..., None, :]).view(*x.shape[:2], -1)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(POSTS))
def test_a_post_of_given_coefficients(name: str, dtype: torch.dtype) -> None:
    got = same(POSTS[name], post_inputs(dtype=dtype), within=1e-5 if dtype is torch.float32 else 3e-2)
    assert dict(got.ops) == {"mhc_post": 1}, reasons(got)
    assert "transposed" in name or not got.report.routed[0].detail.endswith("transposed")


@pytest.mark.parametrize("static", ["r", "h", "rh"])
@pytest.mark.parametrize("name", ["matmul", "transposed", "einsum", "sum"])
def test_a_post_of_static_coefficients(name: str, static: str) -> None:
    fn = POSTS[name]
    if name.startswith("einsum"):
        fn = lambda x, f, h, r: POSTS["einsum"](x, f, h.expand(*x.shape[:-1]), r.expand(*x.shape[:-2], N, N))  # noqa: E731
    got = same(fn, post_inputs(static=static))
    assert dict(got.ops) == {"mhc_post": 1}, reasons(got)


NO_POSTS: dict[str, Fn] = {
    "minus": lambda x, f, h, r: h[..., None] * f[..., None, :] - r @ x,
    "scaled": lambda x, f, h, r: h[..., None] * f[..., None, :] + 0.5 * (r @ x),
    "identity": lambda x, f, h, r: h[..., None] * f[..., None, :] + x,
    "a third": lambda x, f, h, r: r @ x + x + h[..., None] * f[..., None, :],
    "no outer": lambda x, f, h, r: h[..., None] * x + r @ x,
    "right": lambda x, f, h, r: h[..., None] * f[..., None, :] + (x.transpose(-1, -2) @ r),
    "diagonal": lambda x, f, h, r: h[..., None] * f[..., None, :] + torch.einsum("...ii,...id->...id", r, x),
    "rolled": lambda x, f, h, r: h[..., None] * f[..., None, :] + (r @ x).roll(1, -2),
    "bias": lambda x, f, h, r: r @ x + 1.0 + h[..., None] * f[..., None, :],
}


@pytest.mark.parametrize("name", [n for n in NO_POSTS if n != "right"])
def test_formulas_that_are_not_post(name: str) -> None:
    assert not same(NO_POSTS[name], post_inputs()).ops["mhc_post"]


def test_wide_matrices_are_no_streams() -> None:
    """Runs linear attention's recurrence: as many columns as rows, or more rows than the op has streams."""
    g = torch.Generator().manual_seed(1)
    for n, d in ((16, 64), (4, 4), (8, 8)):
        given = tuple(torch.randn(s, generator=g) for s in ((2, n, d), (2, d), (2, n), (2, n, n)))
        assert not same(POSTS["matmul"], given).ops


# --- streams from any operation -----------------------------------------------------------------------------


SOURCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda h, w: F.linear(h, w).view(*h.shape[:-1], N, WIDTH),
    "linear with bias": lambda h, w: F.linear(h, w, w[:, 0]).unflatten(-1, (N, WIDTH)),
    "matmul": lambda h, w: torch.matmul(h, w.t()).view(*h.shape[:-1], N, WIDTH),
    "at": lambda h, w: (h @ w.t().expand(h.shape[0], -1, -1)).reshape(*h.shape[:-1], N, WIDTH),
    "einsum": lambda h, w: torch.einsum("btk,ndk->btnd", h, w.view(N, WIDTH, -1)),
    "einsum flat": lambda h, w: torch.einsum("btk,mk->btm", h, w).view(*h.shape[:-1], N, WIDTH),
    "product": lambda h, w: F.linear(h, w).unflatten(-1, (N, WIDTH)) * w.view(N, WIDTH, -1)[..., 0],
    "sum": lambda h, w: (F.linear(h, w) + 1.0).unflatten(-1, (N, WIDTH)),
    "norm": lambda h, w: F.layer_norm(F.linear(h, w), (N * WIDTH,)).unflatten(-1, (N, WIDTH)),
    "repeated": lambda h, w: F.linear(h, w[:WIDTH]).unsqueeze(-2).repeat(1, 1, N, 1),
    "expanded": lambda h, w: F.linear(h, w[:WIDTH]).unsqueeze(-2).expand(-1, -1, N, -1),
    "mean": lambda h, w: F.linear(h, w).unflatten(-1, (N, WIDTH)) / 3,
    "relu": lambda h, w: F.linear(h, w).unflatten(-1, (N, WIDTH)).relu(),
    "of each stream": lambda h, w: h.repeat(1, 1, N).view(*h.shape[:2], N, 24) @ w[:WIDTH].t(),
    "batched": lambda h, w: torch.bmm(h.flatten(0, 1)[:, None], w.t().expand(10, -1, -1)).view(2, 5, N, WIDTH),
    "embedding": lambda h, w: F.embedding(torch.arange(10).view(2, 5), F.linear(h, w).flatten(0, 1)).view(
        2, 5, N, WIDTH
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", list(SOURCES))
def test_streams_from_any_operation(source: str, dtype: torch.dtype) -> None:
    p = parameters()
    g = torch.Generator().manual_seed(4)
    h = torch.randn(2, 5, 24, generator=g).to(dtype)
    w = torch.randn(N * WIDTH, 24, generator=g).to(dtype).mul_(0.3)
    within = 1e-4 if dtype is torch.float32 else 3e-2
    got = same(lambda h, w: around(SOURCES[source](h, w), p, _balanced), (h, w), p.items(), within)
    assert dict(got.ops) == BOTH, reasons(got)


# --- autocast -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_with_a_linear_projection(dtype: torch.dtype, where: str) -> None:
    p = parameters()

    def body(x: Tensor) -> Tensor:
        v = x.flatten(-2)
        z = F.linear(F.rms_norm(v, (v.shape[-1],), eps=1e-6), p["phi"])
        return around(x, p, _balanced, z.float())

    def inside(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return body(x)

    x = streams(dtype=dtype)
    if where == "inside":
        got, plain = run(inside, (x,), list(p.items())), eager(inside, (x,), list(p.items()))
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, plain = run(body, (x,), list(p.items())), eager(body, (x,), list(p.items()))
    assert dict(got.ops) == BOTH, reasons(got)
    assert difference(got, plain) < 3e-2


# --- nothing stays unrouted without a near miss -------------------------------------------------------------


def test_a_search_that_stops_early_says_so() -> None:
    p = parameters()

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        z = normed(x.flatten(-2)) @ p["phi"].T
        pre = torch.sigmoid(z[..., :N] * p["alpha"][0] + p["bias"][:N])
        noise = [pre * float(k) for k in range(700)]
        return (pre.unsqueeze(-1) * x.square()).sum(-2), torch.stack(noise)

    got = same(fn, (streams(),), p.items())
    assert any("stopped after" in r for r in reasons(got)), reasons(got)


@pytest.mark.parametrize(("eps", "steps"), [(1e-6, 2 * ITERS), (1e-3, 2 * ITERS + 1)], ids=["odd", "eps"])
def test_sinkhorn_chains_that_stay_say_why(eps: float, steps: int) -> None:
    """Ends with rows, or has another eps for columns than for rows."""

    def fn(logits: Tensor) -> Tensor:
        matrix = logits.softmax(-1) + 1e-6
        for k in range(steps):
            matrix = matrix / (matrix.sum(-2 + k % 2, keepdim=True) + (eps if k and k % 2 == 0 else 1e-6))
        return matrix

    got = same(fn, (streams().new_ones(2, 3, N, N) * 0.3,))
    assert got.ops["mhc_sinkhorn"] == 0 and any(r.startswith("mhc_sinkhorn") for r in reasons(got)), reasons(got)


# --- checkpoint policies ------------------------------------------------------------------------------------


def _checkpointed(p: dict[str, Tensor], policy: Any) -> Fn:
    options = {} if policy is None else {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}
    layer = lambda x: around(around(x, p, _balanced), p, _balanced)  # noqa: E731
    return lambda x: checkpoint(layer, x, use_reentrant=False, **options)


def _save(names: list[Any]) -> Any:
    return lambda _, op, *__, **___: CheckpointPolicy.MUST_SAVE if op in names else CheckpointPolicy.PREFER_RECOMPUTE


def test_no_fusion_where_a_policy_decides() -> None:
    p = parameters()
    free, held = (same(_checkpointed(p, policy), (streams(),), p.items()) for policy in (None, _save([])))
    assert [f.op for f in free.report.fused] == ["mhc_post_pre"] and not held.report.fused
    assert dict(free.ops) == dict(held.ops) == {"mhc_pre": 2, "mhc_post": 2}
    assert any("ops_to_save" in r for r in reasons(held)) and not reasons(free)


def test_ops_to_save_are_ops_that_the_pass_puts_in() -> None:
    ops = mhc_inductor.ops_to_save()
    assert all(isinstance(op, torch._ops.OpOverload) and op.namespace == "mhc_inductor" for op in ops)
    names = {op.name().split("::")[1] for op in ops}
    parts = {"mhc_pre", "mhc_coefficients", "mhc_collapse", "mhc_post", "mhc_sinkhorn", "mhc_head"}
    attention = {"selection_blocks", *(f"selection_{kind}attention" for kind in ("", "list_", "entry_", "mask_"))}
    assert names == {*parts, *attention, "e79_scan", "index_scores", "index_topk", "index_topk_scores", "index_loss"}
    assert dict(same(_checkpointed(parameters(), _save(ops)), (streams(),)).ops) == {"mhc_pre": 2, "mhc_post": 2}


# --- what stays routed where one part is another formula ----------------------------------------------------

PARTS: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "h_pre scaled": ("h_pre", lambda h: 1.25 * h, "h_pre is 1.25 * sigmoid(alpha * z + bias) + "),
    "h_pre less a number": ("h_pre", lambda h: h - 0.5, "expected sigmoid(alpha * z + bias) + hc_eps with hc_eps >= 0"),
    "h_pre in another order": ("h_pre", lambda h: h.flip(-1), "summed with other weights than those of the formula"),
}
REST = {"mhc_sinkhorn": 1, "mhc_post": 1}


@pytest.mark.parametrize("part", PARTS)
def test_the_post_and_the_iterations_need_no_pre(part: str) -> None:
    place, change, why = PARTS[part]
    compiled = laws.check(lambda p: laws.block(p["x"], p, {place: change}), laws.mhc_leaves(), routed=REST)
    assert [m.op for m in compiled.report.near_misses if why in m.reason] == ["mhc_pre"]


def test_logits_that_two_numbers_scale() -> None:
    changed = {"logits": lambda c: 0.88 * c}
    ops = {"mhc_pre": 1, "mhc_post": 1}
    laws.check(lambda p: laws.block(p["x"], p, changed), laws.mhc_leaves(), routed=ops)


# --- dynamic sizes ------------------------------------------------------------------------------------------

ELSEWHERE: dict[str, Fn] = {
    "a loss that is a mean over tokens": lambda y, x: y.square().mean((1, 2, 3)) + 0.01 * x.mean(1).mean((-1, -2)),
    "a sigmoid of a mean over tokens": lambda y, x: torch.sigmoid(y.flatten(2).mean(1)[:, :4]),
    "a gate for each channel": lambda y, x: y * torch.sigmoid(y.mean(1, keepdim=True)),
    "a norm over tokens": lambda y, x: y * torch.rsqrt(y.square().mean(1, keepdim=True) + 1e-6),
}


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_sums_over_dynamic_tokens_elsewhere_fix_no_size(elsewhere: str) -> None:
    """A size that is fixed although mark_dynamic names it is an error of Dynamo's."""
    p = parameters()

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = around(x, p, _balanced)
        return y, ELSEWHERE[elsewhere](y, x)

    got, want = run(fn, (streams(),), [*p.items()], dynamic=None, symbolic=[1]), eager(fn, (streams(),), [*p.items()])
    assert dict(got.ops) == BOTH and not got.report.problems
    assert difference(got, want) < 1e-5


def test_a_search_that_finds_nothing_fixes_no_size() -> None:
    """The weights of an attention to few tokens look like matrices of streams where their number is taken as fixed."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        q = x.flatten(2)
        return (q @ q.transpose(1, 2)).softmax(-1) @ q, x * torch.sigmoid(x.mean(1, keepdim=True))

    got, want = run(fn, (streams(2, 6),), dynamic=None, symbolic=[1]), eager(fn, (streams(2, 6),))
    assert not got.ops and not got.report.problems
    assert difference(got, want) < 1e-5
