# SPDX-License-Identifier: Apache-2.0
"""A generator of loops over time that are E79, written in many ways, and of mutants that are no longer E79.

A spelling is one pick for each axis of :data:`AXES`, every pick a callable in ordinary PyTorch. :class:`Loop` composes
them, so two spellings differ in the code that runs. A mutant replaces one part by one of :data:`MUTATIONS`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Part = Callable[..., Any]


class Axes(dict[str, dict[str, Part]]):
    """Maps each axis to its picks, by name; the first pick of an axis is the plainest."""

    def pick(self, axis: str) -> Callable[[Part], Part]:
        """Registers a function as a pick of ``axis``."""

        def register(fn: Part) -> Part:
            self.setdefault(axis, {})[fn.__name__.removeprefix("_").removeprefix(f"{axis}_")] = fn
            return fn

        return register

    def picks(self, axis: str, **parts: Part) -> None:
        """Registers short functions as picks of ``axis``."""
        self.setdefault(axis, {}).update(parts)


AXES = Axes()
pick, picks = AXES.pick, AXES.picks
MUTATIONS: dict[str, tuple[str, Part]] = {}
"""Maps each mutation to its axis and the callable that replaces the pick."""


# --- a matrix times a vector, and its transpose -------------------------------------------------------------


picks(
    "rows",
    einsum=lambda a, u: torch.einsum("bij,bj->bi", a, u),
    einsum_vector_first=lambda a, u: torch.einsum("bj,bij->bi", u, a),
    matmul=lambda a, u: (a @ u.unsqueeze(-1)).squeeze(-1),
    indexed_matmul=lambda a, u: torch.matmul(a, u[..., None])[..., 0],
    bmm=lambda a, u: torch.bmm(a, u.unsqueeze(2)).squeeze(2),
    row_vector=lambda a, u: (u.unsqueeze(1) @ a.transpose(1, 2)).squeeze(1),
    mul_sum=lambda a, u: (a * u.unsqueeze(1)).sum(-1),
    sum_mul=lambda a, u: torch.sum(u[:, None, :] * a, dim=2),
    keepdim=lambda a, u: (a * u.unsqueeze(-2)).sum(dim=-1, keepdim=True).squeeze(-1),
)
picks(
    "columns",
    einsum=lambda a, u: torch.einsum("bji,bj->bi", a, u),
    einsum_other=lambda a, u: torch.einsum("bij,bi->bj", a, u),
    transposed=lambda a, u: (a.transpose(-1, -2) @ u.unsqueeze(-1)).squeeze(-1),
    mt=lambda a, u: torch.bmm(a.mT, u.unsqueeze(-1))[:, :, 0],
    permuted=lambda a, u: torch.matmul(a.permute(0, 2, 1), u.unsqueeze(-1)).reshape(u.shape),
    row_vector=lambda a, u: torch.bmm(u.unsqueeze(1), a).squeeze(1),
    mul_sum=lambda a, u: (a * u.unsqueeze(-1)).sum(1),
)
picks(
    "outer",
    einsum=lambda a, b: torch.einsum("bi,bj->bij", a, b),
    unsqueezed=lambda a, b: a.unsqueeze(-1) * b.unsqueeze(1),
    indexed=lambda a, b: a[:, :, None] * b[:, None, :],
    bmm=lambda a, b: torch.bmm(a.unsqueeze(2), b.unsqueeze(1)),
    matmul=lambda a, b: a.unsqueeze(-1) @ b.unsqueeze(-2),
)
picks(
    "update",
    plain=lambda p, r, a, c, d, u: r.unsqueeze(-1) * a * c.unsqueeze(1) + p.outer(d, u),
    bracketed=lambda p, r, a, c, d, u: (r.unsqueeze(-1) * a * c.unsqueeze(-2)) + p.outer(d, u),
    gates_first=lambda p, r, a, c, d, u: (r[:, :, None] * c[:, None, :]) * a + p.outer(d, u),
    outer_gates=lambda p, r, a, c, d, u: p.outer(r, c) * a + p.outer(d, u),
    outer_first=lambda p, r, a, c, d, u: p.outer(d, u) + a * r.unsqueeze(2) * c.unsqueeze(1),
    einsum=lambda p, r, a, c, d, u: torch.einsum("bi,bij,bj->bij", r, a, c) + p.outer(d, u),
    baddbmm=lambda p, r, a, c, d, u: torch.baddbmm(
        r.unsqueeze(-1) * a * c.unsqueeze(1), d.unsqueeze(2), u.unsqueeze(1)
    ),
    addcmul=lambda p, r, a, c, d, u: torch.addcmul(r.unsqueeze(-1) * a * c.unsqueeze(1), d[..., None], u[:, None]),
    expanded=lambda p, r, a, c, d, u: r.unsqueeze(-1).expand_as(a) * a * c.unsqueeze(1).expand_as(a) + p.outer(d, u),
    method=lambda p, r, a, c, d, u: a.mul(r.unsqueeze(-1)).mul(c.unsqueeze(1)).add(p.outer(d, u)),
)


@pick("update")
def _update_in_place(p: Any, r: Tensor, a: Tensor, c: Tensor, d: Tensor, u: Tensor) -> Tensor:
    a = r.unsqueeze(-1) * a * c.unsqueeze(1)
    a += p.outer(d, u)
    return a


# --- vectors ------------------------------------------------------------------------------------------------

picks(
    "norm",
    method=lambda k: k / (k.norm(dim=-1, keepdim=True) + 1e-6),
    vector_norm=lambda k: k / (torch.linalg.vector_norm(k, dim=-1, keepdim=True) + 1e-6),
    linalg_norm=lambda k: k / (torch.linalg.norm(k, dim=-1, keepdim=True) + 1e-6),
    torch_norm=lambda k: k / (torch.norm(k, p=2, dim=-1, keepdim=True) + 1e-6),
    without_keepdim=lambda k: k / (k.norm(dim=-1) + 1e-6).unsqueeze(-1),
    eps_first=lambda k: k / (1e-6 + k.norm(p=2, dim=-1, keepdim=True)),
    sqrt=lambda k: k / ((k * k).sum(-1, keepdim=True).sqrt() + 1e-6),
    power=lambda k: k / (k.pow(2).sum(-1, keepdim=True) ** 0.5 + 1e-6),
    torch_sqrt=lambda k: k / (torch.sqrt(torch.sum(k**2, dim=-1, keepdim=True)) + 1e-6),
    reciprocal=lambda k: k * (k.norm(dim=-1, keepdim=True) + 1e-6).reciprocal(),
    one_over=lambda k: k * (1.0 / (k.norm(dim=-1, keepdim=True) + 1e-6)),
    added=lambda k: torch.div(k, torch.add(k.norm(dim=-1, keepdim=True), 1e-6)),
)
picks(
    "sigmoid",
    torch=torch.sigmoid,
    method=lambda z: z.sigmoid(),
    functional=F.sigmoid,
    expit=torch.special.expit,
    exp=lambda z: 1.0 / (1.0 + torch.exp(-z)),
)
picks(
    "bias",
    after=lambda z, b: z if b is None else z + b,
    before=lambda z, b: z if b is None else b + z,
    torch_add=lambda z, b: z if b is None else torch.add(z, b),
)
picks(
    "delta",
    sub=lambda v, s: v - s,
    plus_negative=lambda v, s: v + (-s),
    reversed=lambda v, s: -(s - v),
    torch_sub=lambda v, s: torch.sub(v, s),
)
picks(
    "output",
    silu=lambda y: y * F.silu(y),
    silu_first=lambda y: F.silu(y) * y,
    squared=lambda y: y * y * torch.sigmoid(y),
    power=lambda y: y**2 * y.sigmoid(),
    sigmoid_inside=lambda y: y * (y * torch.sigmoid(y)),
    square=lambda y: torch.square(y) * torch.sigmoid(y),
)

# --- where the vectors of a step come from ------------------------------------------------------------------


def _steps(vectors: Any, steps: int) -> list[tuple[Tensor, ...]]:
    k, v, q, m = vectors
    return [(k[t], v[t], q[t], m[t]) for t in range(steps)]


def _ranges(a: Tensor) -> list[tuple[Tensor, ...]]:
    n = a.shape[-1] // 4
    return [(u[:, :n], u[..., n : 2 * n], a[t, :, 2 * n : 3 * n], a[t][:, 3 * n :]) for t, u in enumerate(a)]


def _apart(a: Tensor) -> list[tuple[Tensor, ...]]:
    parts = a.reshape(a.shape[0], a.shape[1], 4, -1)
    return [tuple([parts[t, :, i] for i in range(4)]) for t in range(a.shape[0])]


def _unbound(a: Tensor) -> list[tuple[Tensor, ...]]:
    k, v, q, m = a.unflatten(-1, (4, -1)).unbind(2)
    return [(k.select(0, t), v.select(0, t), q.select(0, t), m.select(0, t)) for t in range(a.shape[0])]


def _batch_first(a: Tensor) -> list[tuple[Tensor, ...]]:
    k, v, q, m = a.transpose(0, 1).chunk(4, dim=-1)
    return [(k[:, t], v[:, t], q[:, t], m[:, t]) for t in range(a.shape[0])]


def _flat_rows(a: Tensor) -> list[tuple[Tensor, ...]]:
    steps, batch, width = a.shape
    parts = a.reshape(steps * batch, width).split(width // 4, -1)
    return _steps([u.reshape(steps, batch, width // 4) for u in parts], steps)


picks(
    "slices",
    chunk=lambda a: _steps(a.chunk(4, dim=-1), a.shape[0]),
    split=lambda a: list(zip(*[u.unbind(0) for u in torch.split(a, a.shape[-1] // 4, dim=-1)], strict=True)),
    step_first=lambda a: [a[t].chunk(4, -1) for t in range(a.shape[0])],
    ranges=_ranges,
    apart=_apart,
    unbound=_unbound,
    iterated=lambda a: [row.split(row.shape[-1] // 4, dim=-1) for row in a],
    batch_first=_batch_first,
    narrow=lambda a: [a.narrow(0, t, 1).squeeze(0).chunk(4, -1) for t in range(a.shape[0])],
    flat_rows=_flat_rows,
    copied=lambda a: _steps([u.contiguous() for u in a.chunk(4, dim=-1)], a.shape[0]),
    # Each step's vectors are tensors computed on their own, not slices of one tensor.
    computed=lambda a: [tuple([u.tanh() for u in a[t].chunk(4, -1)]) for t in range(a.shape[0])],
)
picks("normed", inside=lambda: False, before=lambda: True)

picks(
    "gather",
    stack=lambda outs: torch.stack(outs),
    stack_dim=lambda outs: torch.stack(outs, dim=0),
    batch_first=lambda outs: torch.stack(outs, dim=1),
    turned=lambda outs: torch.stack(outs, dim=1).transpose(0, 1),
    cat=lambda outs: torch.cat([o.unsqueeze(0) for o in outs], dim=0),
    cat_batch_first=lambda outs: torch.cat([o[:, None] for o in outs], dim=1),
    rows=lambda outs: torch.cat(outs, dim=0),
    features=lambda outs: torch.cat(outs, dim=-1),
    last_dim=lambda outs: torch.stack(outs, -1),
    last=lambda outs: outs[-1],
    total=lambda outs: sum(outs[1:], outs[0]),
)


@pick("gather")
def _gather_buffer(outs: list[Tensor]) -> Tensor:
    buffer = outs[0].new_empty(len(outs), *outs[0].shape)
    for t, o in enumerate(outs):
        buffer[t] = o
    return buffer


@pick("gather")
def _gather_buffer_batch_first(outs: list[Tensor]) -> Tensor:
    buffer = torch.zeros(outs[0].shape[0], len(outs), outs[0].shape[1], dtype=outs[0].dtype)
    for t, o in enumerate(outs):
        buffer[:, t] = o
    return buffer


picks(
    "start",
    zeros=lambda a, b, n: (
        torch.zeros(b, n, n, device=a.device, dtype=a.dtype),
        torch.zeros(b, n, n, device=a.device, dtype=a.dtype),
    ),
    new_zeros=lambda a, b, n: (a.new_zeros(b, n, n), a.new_zeros(b, n, n)),
    shared=lambda a, b, n: (a.new_zeros(b, n, n),) * 2,
    like=lambda a, b, n: (s := a.new_zeros((b, n, n)), torch.zeros_like(s)),
    full=lambda a, b, n: (torch.full((b, n, n), 0.0, dtype=a.dtype), torch.full((b, n, n), 0, dtype=a.dtype)),
    expanded=lambda a, b, n: (a.new_zeros(1, n, n).expand(b, -1, -1), a.new_zeros(n, n).expand(b, n, n)),
    given=None,  # type: ignore[arg-type]
    pair=None,  # type: ignore[arg-type]
    parameter=None,  # type: ignore[arg-type]
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes, dtypes and returned results of one loop."""

    T: int = 3
    B: int = 2
    n: int = 6
    dtype: torch.dtype = torch.float32
    bias: str = "fixed"  # "none", "fixed", "input"
    final: str = "both"  # the final states that are returned: "both", "S", "M", "none"
    mode: str = "train"  # "train", "no_grad", "autocast"
    wide: bool = False  # the cell computes in fp32 for any input dtype
    symbolic: bool = False


@dataclasses.dataclass(frozen=True)
class Loop:
    """One spelling: a Python loop over time, called on ``inputs()``."""

    picks: dict[str, str]
    settings: Settings
    mutant: str = ""
    where: int = -1  # the only step that is mutated; -1: all

    @property
    def name(self) -> str:
        """Returns what differs from the plainest spelling."""
        odd = [f"{axis}.{name}" for axis, name in self.picks.items() if name != next(iter(AXES[axis]))]
        plain = {f.name: f.default for f in dataclasses.fields(Settings)}
        odd += [f"{k}={v}" for k, v in dataclasses.asdict(self.settings).items() if v != plain[k]]
        return " ".join([*([f"mutant {self.mutant}"] if self.mutant else []), *odd]) or "plain"

    def part(self, axis: str, t: int | None = None) -> Part:
        """Returns the callable of an axis in step ``t``."""
        if self.mutant and MUTATIONS[self.mutant][0] == axis and (self.where in (-1, t) or t is None):
            return MUTATIONS[self.mutant][1]
        return AXES[axis][self.picks[axis]] if axis in AXES else _FIXED[axis]

    def outer(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns ``a b.T``."""
        return self.part("outer")(a, b)

    def inputs(self, seed: int = 0) -> tuple[Tensor, ...]:
        """Returns kvqm [T, B, 4n], then the biases and states that the settings ask for."""
        s, g = self.settings, torch.Generator().manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = s.dtype, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(dtype)

        given = [normal(s.T, s.B, 4 * s.n)]
        if s.bias == "fixed":
            given += [normal(s.n), normal(s.n)]
        elif s.bias == "input":
            given += [normal(s.T, s.B, s.n), normal(s.T, s.B, s.n)]
        state = torch.float32 if s.wide else s.dtype
        if self.picks["start"] == "given":
            given += [normal(s.B, s.n, s.n, dtype=state, scale=0.3) for _ in range(2)]
        elif self.picks["start"] == "pair":
            given.append(normal(s.B, 2, s.n, s.n, dtype=state, scale=0.3))
        elif self.picks["start"] == "parameter":
            given.append(normal(2, s.n, s.n, dtype=state, scale=0.3))
        return tuple(given)

    @property
    def batched(self) -> list[tuple[int, int]]:
        """Returns (input, dimension) of every batch dimension, if it is symbolic."""
        s = self.settings
        if not s.symbolic:
            return []
        count = {"none": 0, "fixed": 2, "input": 2}[s.bias]
        found = [(0, 1), *((1 + i, 1) for i in range(count) if s.bias == "input")]
        return found + [(1 + count + i, 0) for i in range({"given": 2, "pair": 1}.get(self.picks["start"], 0))]

    def _start(self, kvqm: Tensor, rest: list[Tensor]) -> tuple[Tensor, Tensor]:
        s, start = self.settings, self.picks["start"]
        batch = kvqm.shape[1]
        if start == "given":
            return rest[0], rest[1]
        if start == "pair":
            return rest[0][:, 0], rest[0][:, 1]
        if start == "parameter":
            return rest[0][0].expand(batch, s.n, s.n), rest[0][1].expand(batch, s.n, s.n)
        like = kvqm.float() if s.wide and kvqm.dtype is not torch.float64 else kvqm
        return AXES["start"][start](like, batch, s.n)

    def __call__(self, kvqm: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Returns (out, S, M), or those of them that the settings ask for."""
        if self.settings.mode == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return self._run(kvqm, *others)
        return self._run(kvqm, *others)

    def _run(self, kvqm: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        s, rest = self.settings, list(others)
        b_s = b_m = None
        if s.bias != "none":
            b_s, b_m, *rest = rest
        S, M = self._start(kvqm, rest)
        given = kvqm.dtype
        if self.picks["normed"] == "before":
            n, norm = s.n, self.part("norm")
            k, v, q, m = kvqm.split(n, -1)
            kvqm = torch.cat([norm(k), v, q, norm(m)], -1)
        outs = []
        for t, (k, v, q, m) in enumerate(self.part("slices")(kvqm)):
            if s.wide:
                k, v, q, m = [u.float() if given is not torch.float64 else u for u in (k, v, q, m)]
            if self.picks["normed"] == "inside":
                k, m = self.part("norm", t)(k), self.part("norm_m", t)(m, self)
            now = (b_s, b_m) if s.bias != "input" else (b_s[t], b_m[t])  # type: ignore[index]
            S, M, out = self.part("step", t)(self, t, S, M, k, v, q, m, *now)
            outs.append(out.to(given))
        final = {"both": (S, M), "S": (S,), "M": (M,), "none": ()}[s.final]
        return (self.part("gather")(outs), *final)


def _norm_m(m: Tensor, p: Loop) -> Tensor:
    return AXES["norm"][p.picks["norm"]](m)


def _step_with(**changes: Any) -> Part:
    """Returns a step in which some values are replaced; each change is a function of the values computed so far."""

    def step(
        p: Loop, t: int, S: Tensor, M: Tensor, k: Tensor, v: Tensor, q: Tensor, m: Tensor, b_s: Any, b_m: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns, bias, delta = (p.part(axis, t) for axis in ("rows", "columns", "bias", "delta"))
        sigmoid, update = p.part("sigmoid", t), p.part("update", t)
        e: dict[str, Any] = {"S": S, "M": M, "k": k, "v": v, "q": q, "m": m, "rows": rows, "columns": columns, "p": p}
        lines: dict[str, Callable[[], Any]] = {
            "r": lambda: sigmoid(bias(rows(M, k), b_s)),
            "c": lambda: sigmoid(bias(columns(M, k), b_s)),
            "d": lambda: delta(v, rows(S, k)),
            "S1": lambda: update(p, e["r"], S, e["c"], e["d"], k),
            "pg": lambda: sigmoid(bias(rows(e["S1"], m), b_m)),
            "w": lambda: sigmoid(bias(columns(e["S1"], m), b_m)),
            "g": lambda: delta(e["d"], rows(M, m)),
            "M1": lambda: update(p, e["pg"], M, e["w"], e["g"], m),
            "y": lambda: rows(e["S1"], q),
            "out": lambda: p.part("output", t)(e["y"]),
        }
        if changes:
            e["b_s"], e["b_m"] = (torch.zeros_like(v) if b is None else b for b in (b_s, b_m))
        for name, line in lines.items():
            e[name] = changes[name](e) if name in changes else line()
        return e["S1"], e["M1"], e["out"]

    return step


_FIXED: dict[str, Part] = {"norm_m": _norm_m, "step": _step_with()}

# --- mutants ------------------------------------------------------------------------------------------------


def _wrong(name: str, **changes: Any) -> None:
    MUTATIONS[name] = ("step", _step_with(**changes))


_sig, _up = torch.sigmoid, AXES["update"]["plain"]
_wrong("row gate of S transposed", r=lambda e: _sig(e["columns"](e["M"], e["k"]) + e["b_s"]))
_wrong("column gate of S not transposed", c=lambda e: _sig(e["rows"](e["M"], e["k"]) + e["b_s"]))
_wrong("row gate of M transposed", pg=lambda e: _sig(e["columns"](e["S1"], e["m"]) + e["b_m"]))
_wrong("column gate of M not transposed", w=lambda e: _sig(e["rows"](e["S1"], e["m"]) + e["b_m"]))
_wrong(
    "gates of S change places",
    r=lambda e: _sig(e["columns"](e["M"], e["k"]) + e["b_s"]),
    c=lambda e: _sig(e["rows"](e["M"], e["k"]) + e["b_s"]),
)
_wrong("old S in the row gate of M", pg=lambda e: _sig(e["rows"](e["S"], e["m"]) + e["b_m"]))
_wrong("old S in the column gate of M", w=lambda e: _sig(e["columns"](e["S"], e["m"]) + e["b_m"]))
_wrong(
    "old S in both gates of M",
    pg=lambda e: _sig(e["rows"](e["S"], e["m"]) + e["b_m"]),
    w=lambda e: _sig(e["columns"](e["S"], e["m"]) + e["b_m"]),
)
_wrong("output from M", y=lambda e: e["rows"](e["M1"], e["q"]))
_wrong("output from S transposed", y=lambda e: e["columns"](e["S1"], e["q"]))
_wrong("g without delta", g=lambda e: -e["rows"](e["M"], e["m"]))
_wrong("g from v alone", g=lambda e: e["v"] - e["rows"](e["M"], e["m"]))
_wrong("g without M m", g=lambda e: e["d"])
_wrong("g with M transposed", g=lambda e: e["d"] - e["columns"](e["M"], e["m"]))
_wrong("g with S", g=lambda e: e["d"] - e["rows"](e["S"], e["m"]))
_wrong("g with S'", g=lambda e: e["d"] - e["rows"](e["S1"], e["m"]))
_wrong("g with k", g=lambda e: e["d"] - e["rows"](e["M"], e["k"]))
_wrong("g plus", g=lambda e: e["d"] + e["rows"](e["M"], e["m"]))
_wrong("g negative", g=lambda e: e["rows"](e["M"], e["m"]) - e["d"])
_wrong("delta plus", d=lambda e: e["v"] + e["rows"](e["S"], e["k"]))
_wrong("delta negative", d=lambda e: e["rows"](e["S"], e["k"]) - e["v"])
_wrong("delta without S k", d=lambda e: e["v"])
_wrong("delta from M", d=lambda e: e["v"] - e["rows"](e["M"], e["k"]))
_wrong("delta transposed", d=lambda e: e["v"] - e["columns"](e["S"], e["k"]))
_wrong("delta halved", d=lambda e: 0.5 * (e["v"] - e["rows"](e["S"], e["k"])))
_wrong("retrieved scaled", d=lambda e: e["v"] - 0.9 * e["rows"](e["S"], e["k"]))
_wrong("r is softplus", r=lambda e: F.softplus(e["rows"](e["M"], e["k"]) + e["b_s"]))
_wrong("w is tanh", w=lambda e: torch.tanh(e["columns"](e["S1"], e["m"]) + e["b_m"]))
_wrong("r is doubled", r=lambda e: 2 * _sig(e["rows"](e["M"], e["k"]) + e["b_s"]))
_wrong("gate has a temperature", r=lambda e: _sig(2 * e["rows"](e["M"], e["k"]) + e["b_s"]))
_wrong("bias subtracted", c=lambda e: _sig(e["columns"](e["M"], e["k"]) - e["b_s"] - 1.0))
_wrong("a constant in a gate", c=lambda e: _sig(e["columns"](e["M"], e["k"]) + e["b_s"] + 1.0))
_wrong("bias of M in a gate of S", c=lambda e: _sig(e["columns"](e["M"], e["k"]) + e["b_s"] + e["v"]))
_wrong("m in a gate of S", r=lambda e: _sig(e["rows"](e["M"], e["m"]) + e["b_s"]))
_wrong("k in a gate of M", w=lambda e: _sig(e["columns"](e["S1"], e["k"]) + e["b_m"]))
_wrong("S gated by itself", r=lambda e: _sig(e["rows"](e["S"], e["k"]) + e["b_s"]))
_wrong("old note's gate", pg=lambda e: _sig(e["rows"](e["S1"], e["q"]) + e["rows"](e["M"], e["m"]) + e["b_m"]))
_wrong("no column gate", S1=lambda e: e["r"].unsqueeze(-1) * e["S"] + e["p"].outer(e["d"], e["k"]))
_wrong("write transposed", S1=lambda e: _up(e["p"], e["r"], e["S"], e["c"], e["k"], e["d"]))
_wrong("state transposed", S1=lambda e: _up(e["p"], e["r"], e["S"].transpose(1, 2), e["c"], e["d"], e["k"]))
_wrong("write subtracted", S1=lambda e: _up(e["p"], e["r"], e["S"], e["c"], -e["d"], e["k"]))
_wrong("write with m", S1=lambda e: _up(e["p"], e["r"], e["S"], e["c"], e["d"], e["m"]))
_wrong("M written with k", M1=lambda e: _up(e["p"], e["pg"], e["M"], e["w"], e["g"], e["k"]))
_wrong("M decays S", M1=lambda e: _up(e["p"], e["pg"], e["S"], e["w"], e["g"], e["m"]))
_wrong("output is silu", out=lambda e: F.silu(e["y"]))
_wrong("output is cubed", out=lambda e: e["y"] * e["y"] * F.silu(e["y"]))
_wrong("output is gelu", out=lambda e: e["y"] * F.gelu(e["y"]))
_wrong("output is scaled", out=lambda e: 2 * e["y"] * F.silu(e["y"]))
_wrong("output gated by q", out=lambda e: e["y"] * F.silu(e["q"]))


MUTATIONS |= {
    f"k_{name}": ("norm", part)
    for name, part in {
        "normalised_by_F_normalize": lambda k: F.normalize(k, dim=-1, eps=1e-6),
        "with_another_eps": lambda k: k / (k.norm(dim=-1, keepdim=True) + 1e-5),
        "with_eps_under_the_root": lambda k: k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6),
        "with_eps_in_the_sum": lambda k: k / ((k * k).sum(-1, keepdim=True) + 1e-12).sqrt(),
        "with_the_mean_square": lambda k: k / ((k * k).mean(-1, keepdim=True).sqrt() + 1e-6),
        "with_the_1_norm": lambda k: k / (k.norm(p=1, dim=-1, keepdim=True) + 1e-6),
        "not_normalised": lambda k: k,
        "with_the_norm_of_the_batch": lambda k: k / (k.norm() + 1e-6),
    }.items()
}
MUTATIONS["m_not_normalised"] = ("norm_m", lambda m, p: m)
MUTATIONS["m_without_eps"] = ("norm_m", lambda m, p: m / m.norm(dim=-1, keepdim=True))


# --- which spellings ----------------------------------------------------------------------------------------

VARIANTS = (
    Settings(),
    Settings(T=1),
    Settings(T=2, bias="none"),
    Settings(bias="input"),
    Settings(final="none", bias="none"),
    Settings(final="S"),
    Settings(final="M"),
    Settings(mode="no_grad"),
    Settings(dtype=torch.bfloat16, wide=True),
    Settings(dtype=torch.bfloat16),
    Settings(dtype=torch.float64),
    Settings(mode="autocast"),
    Settings(symbolic=True),
    Settings(symbolic=True, bias="input", B=5),
    Settings(T=1, symbolic=True, mode="no_grad", bias="none"),
    Settings(B=1, T=4),
    Settings(B=1, T=1, bias="input"),
    Settings(T=11, n=4),
    Settings(n=2, B=4),
    Settings(T=4, B=4, n=4),
)


def plain(settings: Settings = VARIANTS[0], **picks: str) -> Loop:
    """Returns the plainest spelling, except for ``picks``."""
    return Loop({**{axis: next(iter(parts)) for axis, parts in AXES.items()}, **picks}, settings)


def singles() -> list[Loop]:
    """Returns every pick and every setting, with everything else at its plainest."""
    first = [plain(s) for s in VARIANTS]
    return first + [plain(**{axis: name}) for axis, parts in AXES.items() for name in list(parts)[1:]]


def spellings(count: int, seed: int = 0) -> list[Loop]:
    """Returns random spellings."""
    g = random.Random(seed)
    found: list[Loop] = []
    while len(found) < count:
        picks = {axis: g.choice(list(parts)) for axis, parts in AXES.items()}
        if picks["slices"] != "computed" or picks["normed"] != "before":  # E79 takes no tanh of the normalised k
            found.append(Loop(picks, g.choice(VARIANTS)))
    return found


def mutants() -> list[Loop]:
    """Returns every mutation with everything else at its plainest.

    A mutated output takes three steps: the states of one step are E79 whatever its output is.
    """
    found = []
    for k, name in enumerate(MUTATIONS):
        settings = (Settings(), Settings(T=1, bias="none"), Settings(T=2, bias="input"))[k % 3]
        if name.startswith("output"):
            settings = Settings()
        found.append(dataclasses.replace(plain(settings), mutant=name))
    return found
