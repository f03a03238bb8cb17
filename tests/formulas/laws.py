# SPDX-License-Identifier: Apache-2.0
"""Formulas whose intermediate values can be replaced by name, and a comparison of a routed run with eager.

The comparison covers everything a user can observe: outputs, gradients, inputs after the call, ``requires_grad`` and
shared storage. A run is compiled by Dynamo, routed, and executed by AOTAutograd without Inductor (``aot_eager``): a
case takes a fraction of a second, and autograd sees what it sees in a real compile. Most cases run in float64, where
the op and the formula agree to 1e-12, so no tolerance hides a difference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from mhc_inductor import ops as _ops  # noqa: F401  (registers the ops)
from tests.tools.capture import Report, ops_of, route, tensors

TIGHT = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}
N, D, TOKENS = 4, 16, 6
Leaves = dict[str, Tensor]
Program = Callable[[Leaves], Any]
Places = Mapping[str, Callable[[Tensor], Tensor]]
NOWHERE: Places = {}


def one_process() -> None:
    """Starts the default process group with this process as its only rank, once; later tests reuse it."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


# --- formulas whose intermediate values have names ----------------------------------------------------------


def spot(at: Places, place: str, t: Tensor) -> Tensor:
    """Returns ``at[place](t)`` if ``at`` has an entry for ``place``, else ``t``."""
    return at[place](t) if place in at else t


def hooked(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """Returns a function that registers ``hook`` on a tensor that requires grad, and returns the tensor."""

    def apply(t: Tensor) -> Tensor:
        if t.requires_grad:
            t.register_hook(hook)
        return t

    return apply


def normal(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns normal random numbers that are the same in every dtype, up to rounding."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g, dtype=torch.float64) * scale).to(dtype)


def mhc_leaves(n: int = N, width: int = D, dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> Leaves:
    """Returns x [tokens, n, D] and the parameters of an mHC block."""
    m = n * n + 2 * n
    return {
        "x": normal(tokens, n, width, seed=1, dtype=dtype),
        "phi": normal(m, n * width, seed=2, scale=(n * width) ** -0.5, dtype=dtype),
        "alpha": torch.tensor([1.1, 0.9, 1.05], dtype=dtype),
        "bias": normal(m, seed=3, scale=0.1, dtype=dtype),
        "gamma": 1 + normal(n, width, seed=4, scale=0.2, dtype=dtype),
        "w": normal(width, width, seed=5, scale=width**-0.5, dtype=dtype),
    }


def sinkhorn(c: Tensor, iters: int = 2, eps: float = 1e-6) -> Tensor:
    """Returns the balanced matrix, by the Sinkhorn convention that starts with a softmax."""
    c = c.softmax(-1) + eps
    for step in range(2 * iters - 1):
        c = c / (c.sum(-2 + step % 2, keepdim=True) + eps)
    return c


def pre(x: Tensor, p: Leaves, at: Places = NOWHERE) -> tuple[Tensor, Tensor, Tensor]:
    """Returns h_in, h_post and the balanced matrix of mHC."""
    n = x.shape[-2]
    phi, alpha, bias = (spot(at, name, p[name]) for name in ("phi", "alpha", "bias"))
    v = spot(at, "v", x.flatten(-2))
    inv = spot(at, "inv", torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6))
    weighed = v * spot(at, "gamma", p["gamma"]).flatten() if "gamma" in p else v
    z = spot(at, "z", F.linear(weighed, phi) * inv)
    a, b, c = z.split([n, n, n * n], -1)
    h_pre = spot(at, "h_pre", torch.sigmoid(alpha[0] * a + bias[:n]) + 1e-6)
    h_post = spot(at, "h_post", 2 * torch.sigmoid(alpha[1] * b + bias[n : 2 * n]))
    logits = spot(at, "logits", (alpha[2] * c + bias[2 * n :]).unflatten(-1, (n, n)))
    res = spot(at, "res", sinkhorn(logits))
    return spot(at, "h_in", (h_pre.unsqueeze(-1) * x).sum(-2)), h_post, res


def post(x: Tensor, f: Tensor, h_post: Tensor, res: Tensor, at: Places = NOWHERE) -> Tensor:
    """Returns x_out of mHC."""
    mixed = spot(at, "mixed", res @ x)
    return spot(at, "x_out", h_post.unsqueeze(-1) * f.unsqueeze(-2) + mixed)


def block(x: Tensor, p: Leaves, at: Places = NOWHERE) -> Tensor:
    """Returns the streams after mHC's pre, a sublayer and mHC's post."""
    x = spot(at, "x", x)
    h_in, h_post, res = pre(x, p, at)
    f = spot(at, "f", torch.tanh(h_in @ p["w"]))
    return post(x, f, h_post, res, at)


MHC_PLACES = ("x", "v", "inv", "z", "h_pre", "h_post", "logits", "res", "h_in", "f", "mixed", "x_out")
MHC = {"mhc_pre": 1, "mhc_post": 1}


def head(x: Tensor, p: Leaves, at: Places = NOWHERE) -> Tensor:
    """Returns the streams collapsed for the LM head."""
    n, x = x.shape[-2], spot(at, "x", x)
    v = x.flatten(-2)
    z = F.linear(v, spot(at, "phi", p["phi"])[:n]) * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)
    h = spot(at, "h", torch.sigmoid(p["alpha"][0] * spot(at, "z", z) + p["bias"][:n]) + 1e-6)
    return (h.unsqueeze(-1) * x).sum(-2)


def e79_leaves(steps: int = 3, batch: int = 2, n: int = 4, dtype: torch.dtype = torch.float64) -> Leaves:
    """Returns kvqm [T, B, 4n], two biases [n] and the initial states [B, n, n]."""
    return {
        "kvqm": normal(steps, batch, 4 * n, seed=11, dtype=dtype),
        "b_s": normal(n, seed=12, scale=0.5, dtype=dtype),
        "b_m": normal(n, seed=13, scale=0.5, dtype=dtype),
        "S": normal(batch, n, n, seed=14, scale=0.3, dtype=dtype),
        "M": normal(batch, n, n, seed=15, scale=0.3, dtype=dtype),
    }


def unit(k: Tensor, at: Places = NOWHERE) -> Tensor:
    """Returns ``k`` divided by its norm."""
    return spot(at, "above", k) / (spot(at, "below", k).norm(dim=-1, keepdim=True) + 1e-6)


def e79(p: Leaves, at: Places = NOWHERE, start: int = 0) -> tuple[list[Tensor], Tensor, Tensor]:
    """Returns the outputs of every step and the final S and M.

    Names for ``at``: "kvqm", "b_s", "b_m", "S0", "M0", and in step t "k{t}", "v{t}", "r{t}" (the product in a gate),
    "delta{t}", "S{t+1}", "M{t+1}", "out{t}". In every step "above" and "below" are k and m over and in their norms, "kept"
    gated states, "written" outer products, and "gate" stands for the sigmoid.
    """
    gate = at.get("gate", torch.sigmoid)
    kvqm, S, M = spot(at, "kvqm", p["kvqm"]), spot(at, "S0", p["S"]), spot(at, "M0", p["M"])
    n, outs = S.shape[-1], []
    b_s, b_m = spot(at, "b_s", p["b_s"]), spot(at, "b_m", p["b_m"])
    for t in range(start, kvqm.shape[0]):
        k, v, q, m = kvqm[t].split(n, -1)
        k, m, v = spot(at, f"k{t}", unit(k, at)), unit(m, at), spot(at, f"v{t}", v)
        r = gate(spot(at, f"r{t}", torch.einsum("bij,bj->bi", M, k)) + b_s)
        c = gate(torch.einsum("bij,bi->bj", M, k) + b_s)
        delta = spot(at, f"delta{t}", v - torch.einsum("bij,bj->bi", S, k))
        S = spot(at, "kept", r[..., None] * S * c[..., None, :])
        S = spot(at, f"S{t + 1}", S + spot(at, "written", delta[..., None] * k[..., None, :]))
        a = gate(torch.einsum("bij,bj->bi", S, m) + b_m)
        w = gate(torch.einsum("bij,bi->bj", S, m) + b_m)
        g = delta - torch.einsum("bij,bj->bi", M, m)
        M = spot(at, "kept", a[..., None] * M * w[..., None, :])
        M = spot(at, f"M{t + 1}", M + spot(at, "written", g[..., None] * m[..., None, :]))
        y = torch.einsum("bij,bj->bi", S, q)
        outs.append(spot(at, f"out{t}", y * F.silu(y)))
    return outs, S, M


def loop(p: Leaves, at: Places = NOWHERE) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the outputs of :func:`e79` as one tensor, and the final S and M."""
    outs, S, M = e79(p, at)
    return torch.stack(outs), S, M


def selection_leaves(
    queries: int = 6, keys: int = 12, empty: bool = False, scale: float = 1.0, dtype: torch.dtype = torch.float64
) -> Leaves:
    """Returns q [B, S, H, Dk], k and v [B, T, G, .], and ranges [B, S, G, r, 2] that end at the query or before.

    With ``empty``, some queries see no key.
    """
    B, G, h = 2, 2, 2
    position = torch.arange(queries).view(1, -1, 1, 1) + keys - queries
    g = torch.Generator().manual_seed(21)
    start = (torch.rand(B, queries, G, 2, generator=g) * (position + 1)).long()
    end = torch.minimum(start + torch.randint(1, 5, start.shape, generator=g), position + 1)
    if empty:
        end = torch.where(torch.tensor([True, False, False] * (queries // 3)).view(1, -1, 1, 1), start, end)
    return {
        "q": normal(B, queries, G * h, 8, seed=22, scale=scale, dtype=dtype),
        "k": normal(B, keys, G, 8, seed=23, dtype=dtype),
        "v": normal(B, keys, G, 6, seed=24, dtype=dtype),
        "ranges": torch.stack([start, end], -1),
    }


def selected(p: Leaves) -> Tensor:
    """Returns the mask of the keys that each query sees: bool [B, S, G, T]."""
    t, x = torch.arange(p["k"].shape[1]), p["ranges"]
    return ((t >= x[..., 0:1]) & (t < x[..., 1:2])).any(-2)


def heads(mask: Tensor, p: Leaves) -> Tensor:
    """Returns a mask [B, S, G, T] as [B, H, S, T]."""
    return mask.repeat_interleave(p["q"].shape[2] // mask.shape[2], 2).transpose(1, 2)


def filled(fill: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function that sets scores to ``fill`` where the mask is False."""
    return lambda scores, mask: scores.masked_fill(~mask, fill)


def added(fill: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function that adds ``fill`` to scores where the mask is False."""

    def apply(scores: Tensor, mask: Tensor) -> Tensor:
        return scores + torch.zeros(mask.shape, dtype=scores.dtype).masked_fill(~mask, fill)

    return apply


MINUS_INFINITY = filled(float("-inf"))


def attention(
    p: Leaves,
    mask: Callable[[Leaves], Tensor] = selected,
    fill: Callable[[Tensor, Tensor], Tensor] = MINUS_INFINITY,
    at: Places = NOWHERE,
) -> Tensor:
    """Returns the softmax over the scores of the selected keys, times V: [B, S, H, Dv]."""
    h = p["q"].shape[2] // p["k"].shape[2]
    q = spot(at, "q", p["q"]).transpose(1, 2)
    k, v = (spot(at, name, p[name]).repeat_interleave(h, 2).transpose(1, 2) for name in ("k", "v"))
    scores = spot(at, "scores", q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
    masked = spot(at, "masked", fill(scores, heads(spot(at, "mask", mask(p)), p)))
    weights = spot(at, "weights", torch.softmax(masked, -1))
    return spot(at, "o", (weights @ v).transpose(1, 2))


def sdpa(
    p: Leaves,
    mask: Callable[[Leaves], Tensor] = selected,
    given: Callable[[Tensor], Tensor] = lambda mask: mask,
    call: Callable[..., Tensor] = F.scaled_dot_product_attention,
) -> Tensor:
    """Returns the same as :func:`attention` by scaled_dot_product_attention with a bool mask.

    A query without keys gives 0. ``given``: what the mask is made into.
    """
    h = p["q"].shape[2] // p["k"].shape[2]
    q, k, v = (p[name].transpose(1, 2) for name in ("q", "k", "v"))
    k, v = k.repeat_interleave(h, 1), v.repeat_interleave(h, 1)
    return call(q, k, v, given(heads(mask(p), p))).transpose(1, 2)


def index_leaves(queries: int = 6, keys: int = 12, dtype: torch.dtype = torch.float64) -> Leaves:
    """Returns q [B, S, 16, 8], k [B, T, 8] and w [B, S, 16] of an indexer; of so many heads no two scores are 0."""
    return {
        "iq": normal(2, queries, 16, 8, seed=31, dtype=dtype),
        "ik": normal(2, keys, 8, seed=32, dtype=dtype),
        "iw": normal(2, queries, 16, seed=33, dtype=dtype),
    }


def chosen(p: Leaves, topk: int = 4, at: Places = NOWHERE, ordered: bool = True) -> Tensor:
    """Returns the causal keys of the largest index scores: int64 [B, S, topk], also later keys if there are too few."""
    q, k, w = (spot(at, name, p[name]) for name in INDEX_PLACES[:3])
    S, T = q.shape[1], k.shape[1]
    products = spot(at, "products", torch.einsum("bshd,btd->bsht", q, k) * q.shape[-1] ** -0.5)
    scores = spot(at, "summed", (products.relu() * w.unsqueeze(-1)).sum(2))
    late = torch.arange(T) > torch.arange(S).unsqueeze(-1) + (T - S)
    return scores.masked_fill(late, float("-inf")).topk(topk, -1, sorted=ordered).indices


INDEX_PLACES = ("iq", "ik", "iw", "products", "summed")


def listed(p: Leaves, indices: Tensor) -> Tensor:
    """Returns the mask of the listed keys for all heads: bool [B, S, 1, T]."""
    return torch.zeros(*indices.shape[:2], p["k"].shape[1], dtype=torch.bool).scatter(-1, indices, True).unsqueeze(2)


FORMULAS: dict[str, tuple[Callable[..., Any], Callable[[], Leaves], Sequence[str]]] = {
    "mhc": (lambda p, at=NOWHERE: block(p["x"], p, at), mhc_leaves, "x"),
    "e79": (loop, e79_leaves, ("kvqm", "b_s", "b_m", "S", "M")),
    "selection": (lambda p, at=NOWHERE: attention(p, at=at), selection_leaves, "qkv"),
}
"""Maps each family to its formula, whose values can be replaced by name, its leaves, and the names of those in ``fresh``."""


# --- one run ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Seen:
    """Everything a user can observe of one call."""

    outputs: list[Tensor] = dataclasses.field(default_factory=list)
    requires: list[bool] = dataclasses.field(default_factory=list)
    shared: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    moved: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    grads: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)
    inputs: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    error: str = ""


@dataclasses.dataclass
class Compiled:
    """The result of routing a program: the report, the counted ops and the graphs.

    ``excused`` lists the differences from eager that the same compile shows without routing.
    """

    report: Report = dataclasses.field(default_factory=Report)
    ops: Counter[str] = dataclasses.field(default_factory=Counter)
    graphs: list[torch.fx.GraphModule] = dataclasses.field(default_factory=list)
    routes: bool = True
    autograd: bool = True
    excused: list[str] = dataclasses.field(default_factory=list)

    def backend(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        """Routes ``gm`` and hands it to AOTAutograd, or, if ``autograd`` is False, interprets it."""
        if self.routes:
            self.report.extend(route(gm))
            self.ops.update(ops_of(gm))
        self.graphs.append(gm)
        return aot_eager(gm, example_inputs) if self.autograd else gm.forward

    @property
    def near(self) -> dict[str, str]:
        """Maps each op to the reasons of its near misses."""
        found: dict[str, str] = {}
        for miss in self.report.near_misses:
            found[miss.op] = "; ".join(filter(None, [found.get(miss.op), miss.reason]))
        return found


def _mode(name: str) -> Any:
    return {"train": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}[name]()


def _named(outputs: Sequence[Tensor], leaves: Leaves) -> dict[str, Tensor]:
    return {**{f"output {i}": t for i, t in enumerate(outputs)}, **{f"input {k}": t for k, t in leaves.items()}}


def _memory(outputs: Sequence[Tensor], leaves: Leaves) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Returns which outputs share memory with other tensors.

    The first set holds the pairs (output, other) with one storage; the second, the pairs where an in-place write to the
    output changes the other.
    """
    named, shared, moved = _named(outputs, leaves), set(), set()
    for i, out in enumerate(outputs):
        mine, where = f"output {i}", out.untyped_storage().data_ptr()
        others = {k: t for k, t in named.items() if k != mine and t.untyped_storage().data_ptr() == where and where}
        shared |= {(mine, k) for k in others}
        before = {k: t.detach().clone() for k, t in others.items()}
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            (out if out.is_inference() else out.detach()).view(out.shape).add_(1)
        moved |= {(mine, k) for k, t in others.items() if not torch.equal(before[k], t.detach())}
    return shared, moved


def observe(
    fn: Program,
    leaves: Leaves,
    mode: str = "train",
    frozen: Iterable[str] = (),
    around: Callable[[], Any] = contextlib.nullcontext,
    step: bool = False,
) -> Seen:
    """Calls ``fn`` on copies of ``leaves`` and records all results.

    With ``step``, the outputs are written in place before the backward.
    """
    given = {
        k: t.detach().clone().requires_grad_(mode == "train" and t.is_floating_point() and k not in set(frozen))
        for k, t in leaves.items()
    }
    seen = Seen()
    try:
        with _mode(mode), around():
            outputs = tensors(fn(given))
        seen.outputs = [o.detach().clone() for o in outputs]
        seen.requires = [o.requires_grad for o in outputs]
        if step:
            with torch.no_grad():
                for o in outputs:
                    o.mul_(0.5)
        live = [o for o in outputs if o.requires_grad]
        if mode == "train" and live:
            ups = [normal(*o.shape, seed=31, dtype=o.dtype) for o in live]
            torch.autograd.backward(live, ups)
        seen.grads = {k: t.grad for k, t in given.items() if t.requires_grad}
        seen.inputs = {k: t.detach().clone() for k, t in given.items()}
        if not step:
            seen.shared, seen.moved = _memory(outputs, given)
    except Exception as error:  # compared like any other result
        seen.error = f"{type(error).__name__}: {error}"
    return seen


def apart(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    """Returns ``||a - b|| / ||b||``, or infinity where shapes, dtypes, NaN or infinities differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a, b):
        return 0.0
    if not a.is_floating_point():
        return float("inf")
    a, b = a.double(), b.double()
    odd = ~b.isfinite()
    if not torch.equal(~a.isfinite(), odd) or not torch.equal(a[odd].nan_to_num(0.5), b[odd].nan_to_num(0.5)):
        return float("inf")
    a, b = a[~odd], b[~odd]
    return float((a - b).norm() / b.norm().clamp_min(max(1e-30, least * b.numel() ** 0.5)))


def _allowed(bar: float | Seen, want: Seen, what: str, key: Any, dtype: torch.dtype) -> float:
    """Returns ``bar`` if it is a number, else 8 times eager's own error against fp64, plus a few roundings."""
    if not isinstance(bar, Seen):
        return bar
    mine, exact = getattr(want, what)[key], getattr(bar, what)[key]
    if mine is None or exact is None or not dtype.is_floating_point:
        return 0.0
    own = apart(mine.double(), exact.double())
    return 8 * (own if own < float("inf") else 0.0) + 16 * torch.finfo(dtype).eps


def differences(got: Seen, want: Seen, bar: float | Seen) -> list[str]:
    """Returns one line for each difference above ``bar``.

    ``bar`` is a number, or the fp64 run from which eager's own error is measured.
    """
    if want.error:  # if eager raises, the compiled run may succeed
        return []
    if got.error:
        return [f"raises {got.error}"[:400]]
    found = []
    for i, (a, b) in enumerate(zip(got.outputs, want.outputs, strict=True)):
        if (d := apart(a, b)) > _allowed(bar, want, "outputs", i, b.dtype):
            found.append(f"output {i}: {d:.3g} apart")
    for k, b in want.inputs.items():
        if (d := apart(got.inputs[k], b)) > _allowed(bar, want, "inputs", k, b.dtype):
            found.append(f"input {k} afterwards: {d:.3g} apart")
    if got.requires != want.requires:
        found.append(f"requires_grad {got.requires}, eager {want.requires}")
    top = max(
        (float(g.abs().nan_to_num().max()) for g in want.grads.values() if g is not None and g.numel()), default=0
    )
    for k, g in want.grads.items():
        mine = got.grads[k]
        if (mine is None) != (g is None):
            found.append(f"gradient of {k}: {'None' if mine is None else 'a tensor'}, eager the other")
        elif (
            mine is not None
            and g is not None
            and (d := apart(mine, g, 0.05 * top)) > _allowed(bar, want, "grads", k, g.dtype)
        ):
            found.append(f"gradient of {k}: {d:.3g} apart")
    if got.shared != want.shared:
        found.append(f"share storage: {sorted(got.shared)}, eager {sorted(want.shared)}")
    if got.moved != want.moved:
        found.append(f"change together: {sorted(got.moved)}, eager {sorted(want.moved)}")
    return found


def in_one_graph(fn: Program, compiled: Compiled) -> Program:
    """Returns ``fn`` for Dynamo, routing and AOTAutograd: compiled when first called, and once for leaves of equal shapes."""
    torch._dynamo.reset()
    return torch.compile(lambda p: fn(p), backend=compiled.backend, dynamic=False)


def compare(
    fn: Program,
    leaves: Leaves,
    bar: float | Seen,
    mode: str = "train",
    steps: bool = True,
    autograd: bool = True,
    others: Sequence[Leaves] = (),
    **how: Any,
) -> tuple[Compiled, list[str]]:
    """Returns the result of routing ``fn``, and its differences from eager.

    The compiled code also runs on ``others``, leaves that differ in their values only. ``bar`` is the largest error
    allowed, or an fp64 run: then eager's own distance from it sets the limit. A difference that the same compile shows
    without routing is not reported but listed in ``excused``. Without ``autograd``, the graphs are interpreted.
    """
    every = [leaves, *others]
    wanted = [observe(fn, one, mode, **how) for one in every]
    stepped = [observe(fn, one, mode, step=True, **how) for one in every] if mode == "train" and steps else []

    def differing(compiled: Compiled) -> list[str]:
        call, found = in_one_graph(fn, compiled), list[str]()
        for one, want in zip(every, wanted, strict=True):
            found += differences(observe(call, one, mode, **how), want, bar)
        for one, want in zip(every, stepped, strict=False):
            if not want.error:
                again = differences(observe(call, one, mode, step=True, **how), want, bar)
                found += [f"outputs stepped before backward: {d}" for d in again]
        assert len(compiled.graphs) <= 1 or not others, "leaves of other shapes were compiled again"
        return found

    compiled = Compiled(autograd=autograd)
    found = differing(compiled)
    if not found:
        return compiled, found
    plain = differing(Compiled(routes=False, autograd=autograd))
    # AOTAutograd refuses some programs by itself, such as custom ops that return an alias.
    if any("raises " in line for line in plain):
        compiled, found = Compiled(autograd=False), []
        if got := differing(compiled):
            plain = differing(Compiled(routes=False, autograd=False))
            found = got
    compiled.excused = [d for d in found if _same(d, plain)]
    return compiled, [d for d in found if not _same(d, plain)]


def _same(line: str, others: Iterable[str]) -> bool:
    """Returns whether one of ``others`` names the same difference; its numbers may vary."""
    return any(line.rpartition(":")[0] == other.rpartition(":")[0] or line[:90] == other[:90] for other in others)


# --- a test's assertion -------------------------------------------------------------------------------------


def check(
    fn: Program,
    leaves: Leaves,
    *,
    routed: Mapping[str, int] | None = None,
    unrouted: str = "",
    named: Sequence[str] = (),
    modes: Sequence[str] = ("train", "no_grad"),
    tolerance: float | None = None,
    **how: Any,
) -> Compiled:
    """Asserts that routing changes nothing a user can observe.

    ``routed``: exactly these ops are in the graphs, counted. ``unrouted``: this op is absent, and a near miss says why.
    ``named``: each of these families ("mhc", "e79", "selection") is routed or has a near miss with a reason.
    Returns what the first mode compiled. Raises AssertionError with every difference of every mode.
    """
    dtypes = [t.dtype for t in leaves.values() if t.is_floating_point()]
    bar = TIGHT[max(dtypes, key=TIGHT.__getitem__)] if tolerance is None else tolerance
    problems: list[str] = []
    first: Compiled | None = None
    for mode in modes:
        if observe(
            fn, leaves, mode, **{k: v for k, v in how.items() if k not in ("autograd", "steps", "others")}
        ).error:
            continue
        compiled, found = compare(fn, leaves, bar, mode=mode, **how)
        found += _expectations(compiled, routed, unrouted, named)
        problems += [f"{mode}: {line}" for line in found]
        first = first or compiled
    assert not problems, "\n".join(problems)
    assert first is not None, "eager refuses this program in every mode"
    return first


def law_of(leaves: Callable[[], Leaves], **how: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of a program whose first parameter is the leaves: it asserts what :func:`check` does."""

    def test_of(program: Callable[..., Any]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            check(lambda p: program(p, **given), leaves(), **how)

        functools.update_wrapper(test, program)
        _, *rest = inspect.signature(program).parameters.values()
        test.__dict__ = {"__signature__": inspect.Signature(rest)}  # and not __wrapped__, whose parameters are others
        return test

    return test_of


def _expectations(
    compiled: Compiled, routed: Mapping[str, int] | None, unrouted: str, named: Sequence[str]
) -> list[str]:
    found = [f"the pass failed: {p}" for p in compiled.report.problems]
    if routed is not None and dict(compiled.ops) != dict(routed):
        found.append(f"routed {dict(compiled.ops)}, expected {dict(routed)}; near misses {compiled.near}")
    if unrouted and (compiled.ops[unrouted] or not compiled.near.get(unrouted)):
        found.append(f"{unrouted} must stay and be named: routed {dict(compiled.ops)}, near misses {compiled.near}")
    for family in named:
        said = [op for op in compiled.ops if op.startswith(family)]
        said += [op for op, reason in compiled.near.items() if op.startswith(family) and reason]
        if not said:
            found.append(f"silence about {family}: routed {dict(compiled.ops)}, near misses {compiled.near}")
    return found


def changed(family: str, change: Places, fresh: bool = False, more: Leaves | None = None, **how: Any) -> Compiled:
    """Checks the formula of a family some of whose values are changed; with ``fresh``, what it reads are no leaves.

    ``more``: leaves that the changes read; then ``change`` is a function of all leaves. Without other expectations in
    ``how``, the family must be routed or named.
    """
    formula, leaves, names = FORMULAS[family]

    def program(p: Leaves) -> Any:
        given = {**p, **{k: p[k] * 1.0 for k in names}} if fresh else p
        return formula(given, change(p) if callable(change) else change)

    expected = how if how.keys() & {"routed", "unrouted"} else {"named": [family], **how}
    return check(program, {**leaves(), **(more or {})}, **expected)
