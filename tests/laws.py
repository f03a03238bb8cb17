"""Formulas with named places, and a judge that compares a routed run with eager in everything a user can see.

A run is compiled by Dynamo, routed, and executed by AOTAutograd without Inductor (``aot_eager``): a case takes a fraction
of a second and autograd sees what it sees in a real compile. Most cases run in float64, where the op and the formula agree
to 1e-12 and no tolerance hides a difference.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from mhc_inductor import ops as _ops  # noqa: F401  (registers the ops)
from tests.capture import Report, ops_of, route, tensors

TIGHT = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}
N, D, TOKENS = 4, 16, 6
Leaves = dict[str, Tensor]
Program = Callable[[Leaves], Any]
Places = Mapping[str, Callable[[Tensor], Tensor]]
NOWHERE: Places = {}


def one_process() -> None:
    """Begins the default process group with this process alone, once; it stays, for what other tests do in it."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


# --- formulas with named places -----------------------------------------------------------------------------


def spot(at: Places, place: str, t: Tensor) -> Tensor:
    """``t`` after what ``at`` does at ``place``."""
    return at[place](t) if place in at else t


def normal(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, the same in every dtype up to rounding."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g, dtype=torch.float64) * scale).to(dtype)


def mhc_leaves(n: int = N, width: int = D, dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> Leaves:
    """x [tokens, n, D] and the parameters of two blocks that share them."""
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
    """The softmax convention."""
    c = c.softmax(-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def pre(x: Tensor, p: Leaves, at: Places = NOWHERE) -> tuple[Tensor, Tensor, Tensor]:
    """h_in, h_post and the balanced matrix."""
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
    """x_out."""
    mixed = spot(at, "mixed", res @ x)
    return spot(at, "x_out", h_post.unsqueeze(-1) * f.unsqueeze(-2) + mixed)


def block(x: Tensor, p: Leaves, at: Places = NOWHERE) -> Tensor:
    """pre, a sublayer and post."""
    x = spot(at, "x", x)
    h_in, h_post, res = pre(x, p, at)
    f = spot(at, "f", torch.tanh(h_in @ p["w"]))
    return post(x, f, h_post, res, at)


MHC_PLACES = ("x", "v", "inv", "z", "h_pre", "h_post", "logits", "res", "h_in", "f", "mixed", "x_out")
MHC = {"mhc_pre": 1, "mhc_post": 1}


def head(x: Tensor, p: Leaves) -> Tensor:
    """The collapse before the LM head."""
    n = x.shape[-2]
    v = x.flatten(-2)
    z = F.linear(v, p["phi"][:n]) * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)
    h = torch.sigmoid(p["alpha"][0] * z + p["bias"][:n]) + 1e-6
    return (h.unsqueeze(-1) * x).sum(-2)


def e79_leaves(steps: int = 3, batch: int = 2, n: int = 4, dtype: torch.dtype = torch.float64) -> Leaves:
    """kvqm [T, B, 4n], two biases [n] and the initial states [B, n, n]."""
    return {
        "kvqm": normal(steps, batch, 4 * n, seed=11, dtype=dtype),
        "b_s": normal(n, seed=12, scale=0.5, dtype=dtype),
        "b_m": normal(n, seed=13, scale=0.5, dtype=dtype),
        "S": normal(batch, n, n, seed=14, scale=0.3, dtype=dtype),
        "M": normal(batch, n, n, seed=15, scale=0.3, dtype=dtype),
    }


def unit(k: Tensor) -> Tensor:
    """k over its norm."""
    return k / (k.norm(dim=-1, keepdim=True) + 1e-6)


def e79(p: Leaves, at: Places = NOWHERE, start: int = 0) -> tuple[list[Tensor], Tensor, Tensor]:
    """Outputs of every step, and the final states; places are "kvqm" and "S1" for S after the second step, and so on."""
    kvqm, S, M = spot(at, "kvqm", p["kvqm"]), spot(at, "S0", p["S"]), spot(at, "M0", p["M"])
    n, outs = S.shape[-1], []
    b_s, b_m = spot(at, "b_s", p["b_s"]), spot(at, "b_m", p["b_m"])
    for t in range(start, kvqm.shape[0]):
        k, v, q, m = kvqm[t].split(n, -1)
        k, m = spot(at, f"k{t}", unit(k)), unit(m)
        r = torch.sigmoid(torch.einsum("bij,bj->bi", M, k) + b_s)
        c = torch.sigmoid(torch.einsum("bij,bi->bj", M, k) + b_s)
        delta = spot(at, f"delta{t}", v - torch.einsum("bij,bj->bi", S, k))
        S = r[..., None] * S * c[..., None, :] + delta[..., None] * k[..., None, :]
        S = spot(at, f"S{t + 1}", S)
        a = torch.sigmoid(torch.einsum("bij,bj->bi", S, m) + b_m)
        w = torch.sigmoid(torch.einsum("bij,bi->bj", S, m) + b_m)
        g = delta - torch.einsum("bij,bj->bi", M, m)
        M = a[..., None] * M * w[..., None, :] + g[..., None] * m[..., None, :]
        M = spot(at, f"M{t + 1}", M)
        y = torch.einsum("bij,bj->bi", S, q)
        outs.append(spot(at, f"out{t}", y * F.silu(y)))
    return outs, S, M


def selection_leaves(
    queries: int = 6, keys: int = 12, empty: bool = False, scale: float = 1.0, dtype: torch.dtype = torch.float64
) -> Leaves:
    """q [B, S, H, Dk], k and v [B, T, G, .], ranges [B, S, G, r, 2] that end at the query; ``empty``: some rows see no key."""
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
    """Which keys a query sees: bool [B, S, G, T]."""
    t, x = torch.arange(p["k"].shape[1]), p["ranges"]
    return ((t >= x[..., 0:1]) & (t < x[..., 1:2])).any(-2)


def heads(mask: Tensor, p: Leaves) -> Tensor:
    """[B, S, G, T] as [B, H, S, T]."""
    return mask.repeat_interleave(p["q"].shape[2] // mask.shape[2], 2).transpose(1, 2)


def filled(fill: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Scores with ``fill`` where the mask is False."""
    return lambda scores, mask: scores.masked_fill(~mask, fill)


def added(fill: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Scores plus ``fill`` where the mask is False."""

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
    """Softmax over the scores of selected keys, times V: [B, S, H, Dv]."""
    h = p["q"].shape[2] // p["k"].shape[2]
    q = spot(at, "q", p["q"]).transpose(1, 2)
    k, v = (spot(at, name, p[name]).repeat_interleave(h, 2).transpose(1, 2) for name in ("k", "v"))
    scores = spot(at, "scores", q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
    masked = spot(at, "masked", fill(scores, heads(spot(at, "mask", mask(p)), p)))
    weights = spot(at, "weights", torch.softmax(masked, -1))
    return spot(at, "o", (weights @ v).transpose(1, 2))


def sdpa(p: Leaves, mask: Callable[[Leaves], Tensor] = selected) -> Tensor:
    """The same by scaled_dot_product_attention with a bool mask, where a row without keys gives 0."""
    h = p["q"].shape[2] // p["k"].shape[2]
    q, k, v = (p[name].transpose(1, 2) for name in ("q", "k", "v"))
    k, v = k.repeat_interleave(h, 1), v.repeat_interleave(h, 1)
    return F.scaled_dot_product_attention(q, k, v, heads(mask(p), p)).transpose(1, 2)


# --- one run ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Seen:
    """Everything that a user can see of a call."""

    outputs: list[Tensor] = dataclasses.field(default_factory=list)
    requires: list[bool] = dataclasses.field(default_factory=list)
    shared: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    moved: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    grads: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)
    inputs: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    error: str = ""


@dataclasses.dataclass
class Compiled:
    """What routing made of a program."""

    report: Report = dataclasses.field(default_factory=Report)
    ops: Counter[str] = dataclasses.field(default_factory=Counter)
    graphs: list[torch.fx.GraphModule] = dataclasses.field(default_factory=list)
    routes: bool = True
    autograd: bool = True
    excused: list[str] = dataclasses.field(default_factory=list)

    def backend(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        """Route ``gm`` and hand it to AOTAutograd, or (``autograd`` False) interpret it."""
        if self.routes:
            self.report.extend(route(gm))
            self.ops.update(ops_of(gm))
        self.graphs.append(gm)
        return aot_eager(gm, example_inputs) if self.autograd else gm.forward

    @property
    def near(self) -> dict[str, str]:
        """op -> reasons of its near misses."""
        found: dict[str, str] = {}
        for miss in self.report.near_misses:
            found[miss.op] = "; ".join(filter(None, [found.get(miss.op), miss.reason]))
        return found


def _mode(name: str) -> Any:
    return {"train": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}[name]()


def _named(outputs: Sequence[Tensor], leaves: Leaves) -> dict[str, Tensor]:
    return {**{f"output {i}": t for i, t in enumerate(outputs)}, **{f"input {k}": t for k, t in leaves.items()}}


def _memory(outputs: Sequence[Tensor], leaves: Leaves) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Pairs (output, other) that share a storage, and pairs where a step in place on the first changes the second."""
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
    """Call ``fn`` on copies of ``leaves`` and take down everything; ``step``: write the outputs before the backward."""
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
    """``||a - b|| / ||b||``; infinite where shapes, dtypes, NaN or infinities differ."""
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
    """The error that eager itself has against fp64, times 8 and a few roundings; or ``bar`` where that is a number."""
    if not isinstance(bar, Seen):
        return bar
    mine, exact = getattr(want, what)[key], getattr(bar, what)[key]
    if mine is None or exact is None or not dtype.is_floating_point:
        return 0.0
    own = apart(mine.double(), exact.double())
    return 8 * (own if own < float("inf") else 0.0) + 16 * torch.finfo(dtype).eps


def differences(got: Seen, want: Seen, bar: float | Seen) -> list[str]:
    """What differs by more than ``bar`` (a number, or the run in fp64 that says what eager's own error is), a line each."""
    if want.error:  # what eager refuses need not fail in a compile
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


def compile_and_observe(
    fn: Program, leaves: Leaves, compiled: Compiled, twice: bool = False, **how: Any
) -> tuple[Seen, Seen | None]:
    """``fn`` through Dynamo, routing and AOTAutograd; with ``twice`` a second time with steps before the backward."""
    torch._dynamo.reset()
    call = torch.compile(lambda p: fn(p), backend=compiled.backend, dynamic=False)
    return observe(call, leaves, **how), observe(call, leaves, step=True, **how) if twice else None


def compare(
    fn: Program,
    leaves: Leaves,
    bar: float | Seen,
    mode: str = "train",
    steps: bool = True,
    autograd: bool = True,
    **how: Any,
) -> tuple[Compiled, list[str]]:
    """What routing made of ``fn``, and what differs from eager by more than ``bar``, or than eager differs from a run in fp64.

    What the same compile without routing does is no difference: it is listed in ``excused``. Without ``autograd`` the
    graphs are interpreted.
    """
    want = observe(fn, leaves, mode, **how)
    stepped = observe(fn, leaves, mode, step=True, **how) if mode == "train" and steps else None

    def differing(compiled: Compiled) -> list[str]:
        twice = stepped is not None and not stepped.error
        got, again = compile_and_observe(fn, leaves, compiled, twice, mode=mode, **how)
        found = differences(got, want, bar)
        if again is not None and stepped is not None:
            found += [f"outputs stepped before backward: {d}" for d in differences(again, stepped, bar)]
        return found

    compiled = Compiled(autograd=autograd)
    found = differing(compiled)
    if not found:
        return compiled, found
    plain = differing(Compiled(routes=False, autograd=autograd))
    if any(
        "raises " in line for line in plain
    ):  # what AOTAutograd refuses by itself, as custom ops that return an alias
        compiled, found = Compiled(autograd=False), []
        if got := differing(compiled):
            plain = differing(Compiled(routes=False, autograd=False))
            found = got
    compiled.excused = [d for d in found if _same(d, plain)]
    return compiled, [d for d in found if not _same(d, plain)]


def _same(line: str, others: Iterable[str]) -> bool:
    """Whether a line names what one of ``others`` names; numbers may differ in their last digits."""
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
    """Assert that routing changes nothing that a user sees.

    ``routed``: exactly these ops stand in the graphs, counted. ``unrouted``: this op does not, and a near miss says why.
    ``named``: each of these families ("mhc", "e79", "selection") is routed or has a near miss with a reason.
    Returns what the first mode compiled. Raises AssertionError with every difference of every mode.
    """
    dtypes = [t.dtype for t in leaves.values() if t.is_floating_point()]
    bar = TIGHT[max(dtypes, key=TIGHT.__getitem__)] if tolerance is None else tolerance
    problems: list[str] = []
    first: Compiled | None = None
    for mode in modes:
        if observe(fn, leaves, mode, **{k: v for k, v in how.items() if k not in ("autograd", "steps")}).error:
            continue
        compiled, found = compare(fn, leaves, bar, mode=mode, **how)
        found += _expectations(compiled, routed, unrouted, named)
        problems += [f"{mode}: {line}" for line in found]
        first = first or compiled
    assert not problems, "\n".join(problems)
    assert first is not None, "eager refuses this program in every mode"
    return first


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
