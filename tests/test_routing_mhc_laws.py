# SPDX-License-Identifier: Apache-2.0
"""The laws of routing (design.md) for mHC: the model's roundings, autograd's graph, near misses, lone posts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mhc_inductor
from mhc_inductor.report import Report
from tests.formulas import laws
from tests.formulas.reference_models_mhc import ITERS, WIDTH, N, _balanced, _gates, around, normed, parameters, sublayer
from tests.tools.capture import Captured, alike, interpreted, run

BOTH, POST = {"mhc_pre": 1, "mhc_post": 1}, {"mhc_post": 1}
Fn = Callable[..., Any]


def streams(*lead: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(*(lead or (2, 3)), N, WIDTH, generator=torch.Generator().manual_seed(3))
    return x.to(dtype)


def same(fn: Fn, inputs: tuple[Tensor, ...], named: Any = (), ops: Any = None, **options: Any) -> Captured:
    """Asserts what ``alike`` asserts, and requires_grad of the outputs."""
    got = alike(fn, inputs, named, ops, **options)
    assert requires(fn, inputs, True) == requires(fn, inputs, False)
    return got


def requires(fn: Fn, inputs: tuple[Tensor, ...], routed: bool) -> list[bool]:
    """Returns requires_grad of every output, where no input requires it."""
    torch._dynamo.reset()
    outputs = torch.compile(fn, backend=interpreted(Report(), [], routed=routed), dynamic=False)(*inputs)
    return [t.requires_grad for t in torch.utils._pytree.tree_leaves(outputs)]


def reasons(got: Captured) -> list[str]:
    return [f"{m.op}: {m.reason}" for m in got.report.near_misses]


# --- a rounding that the model wrote on an input stays ------------------------------------------------------


@pytest.mark.parametrize("where", ["all", "collapse", "projection", "mix", "f_out"])
def test_rounded_streams_stay_rounded(where: str) -> None:
    p = parameters()

    def fn(x: Tensor) -> Tensor:
        r = x.bfloat16().float()
        x = r if where == "all" else x
        pick = lambda name: r if where == name else x  # noqa: E731
        inv = torch.rsqrt(x.flatten(-2).square().mean(-1, keepdim=True) + 1e-6)
        z = (pick("projection").flatten(-2) @ p["phi"].T) * inv
        pre, post, res = _gates(z, p)
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

    assert dict(run(fn, (streams(dtype=torch.bfloat16),), list(p.items())).ops) == BOTH


@pytest.mark.parametrize("which", ["h_post", "h_res", "x", "f"])
def test_rounded_inputs_of_a_lone_post_stay_rounded(which: str) -> None:
    def fn(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        given = {"x": x, "f": f, "h_post": h_post, "h_res": h_res}
        given[which] = given[which].bfloat16().float()
        x, f, h_post, h_res = given.values()
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res @ x

    same(fn, post_inputs(), ops=POST)


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
    got = same(POSTS[name], post_inputs(dtype=dtype), ops=POST, within=1e-5 if dtype is torch.float32 else 3e-2)
    assert "transposed" in name or not got.report.routed[0].detail.endswith("transposed")


@pytest.mark.parametrize("static", ["r", "h", "rh"])
@pytest.mark.parametrize("name", ["matmul", "transposed", "einsum", "sum"])
def test_a_post_of_static_coefficients(name: str, static: str) -> None:
    fn = POSTS[name]
    if name.startswith("einsum"):
        fn = lambda x, f, h, r: POSTS["einsum"](x, f, h.expand(*x.shape[:-1]), r.expand(*x.shape[:-2], N, N))  # noqa: E731
    same(fn, post_inputs(static=static), ops=POST)


NO_POSTS: dict[str, Fn] = {
    "minus": lambda x, f, h, r: h[..., None] * f[..., None, :] - r @ x,
    "scaled": lambda x, f, h, r: h[..., None] * f[..., None, :] + 0.5 * (r @ x),
    "identity": lambda x, f, h, r: h[..., None] * f[..., None, :] + x,
    "a third": lambda x, f, h, r: r @ x + x + h[..., None] * f[..., None, :],
    "no outer": lambda x, f, h, r: h[..., None] * x + r @ x,
    "diagonal": lambda x, f, h, r: h[..., None] * f[..., None, :] + torch.einsum("...ii,...id->...id", r, x),
    "rolled": lambda x, f, h, r: h[..., None] * f[..., None, :] + (r @ x).roll(1, -2),
    "bias": lambda x, f, h, r: r @ x + 1.0 + h[..., None] * f[..., None, :],
}


@pytest.mark.parametrize("name", NO_POSTS)
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
    same(lambda h, w: around(SOURCES[source](h, w), p, _balanced), (h, w), p.items(), BOTH, within=within)


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

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "around"):
        alike(inside if where == "inside" else body, (streams(dtype=dtype),), p.items(), BOTH, within=3e-2)


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


def test_ops_to_save_are_ops_that_the_pass_puts_in() -> None:
    """A policy that saves them is one of those in ``tests/test_laws_autograd.py``."""
    ops = mhc_inductor.ops_to_save()
    assert all(isinstance(op, torch._ops.OpOverload) and op.namespace == "mhc_inductor" for op in ops)
    names = {op.name().split("::")[1] for op in ops}
    parts = {"mhc_pre", "mhc_coefficients", "mhc_collapse", "mhc_post", "mhc_sinkhorn", "mhc_head"}
    attention = {"selection_blocks", *(f"selection_{kind}attention" for kind in ("", "list_", "entry_", "mask_"))}
    assert names == {*parts, *attention, "e79_scan", "index_scores", "index_topk", "index_topk_scores", "index_loss"}


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
    compiled = laws.changed("mhc", {place: change}, routed=REST)
    assert [m.op for m in compiled.report.near_misses if why in m.reason] == ["mhc_pre"]


def test_logits_that_two_numbers_scale() -> None:
    laws.changed("mhc", {"logits": lambda c: 0.88 * c}, routed=BOTH)


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

    alike(fn, (streams(),), p.items(), BOTH, dynamic=None, symbolic=[1])


def test_a_search_that_finds_nothing_fixes_no_size() -> None:
    """The weights of an attention to few tokens look like matrices of streams where their number is taken as fixed."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        q = x.flatten(2)
        return (q @ q.transpose(1, 2)).softmax(-1) @ q, x * torch.sigmoid(x.mean(1, keepdim=True))

    alike(fn, (streams(2, 6),), ops={}, dynamic=None, symbolic=[1])
