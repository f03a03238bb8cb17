# SPDX-License-Identifier: Apache-2.0
"""One small model of each kind for the tests of engines: mHC, index scores with attention over lists, and E79.

Each is written out in plain PyTorch, as a project without this package has it, or with the package's functions. Layers
map a tensor to one of the same shape ``[B, S, ...]``, so that any number of them are a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

import mhc_inductor as mi
from mhc_inductor.nn import HyperConnection, SparseIndexer
from tests.formulas.laws import e79, mhc_leaves, normal, post, pre

WIDTH, DEPTH = 16, 2
STREAMS, HEADS, GROUPS, PICKED, STATE = 4, 4, 2, 3, 4
INDEX = 16  # heads of index scores: with few, several scores are exactly 0, and the choice between them is free


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, dtype=torch.float64)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Streams(nn.Module):
    """A hyper-connection written out, around an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.sublayer = MLP()
        leaves = mhc_leaves(STREAMS, WIDTH)
        self.p = nn.ParameterDict({k: leaves[k] for k in ("phi", "alpha", "bias", "gamma")})

    def forward(self, x: Tensor) -> Tensor:
        h_in, h_post, res = pre(x, dict(self.p.items()))
        return post(x, self.sublayer(h_in), h_post, res)


class Residual(nn.Module):
    """Adds what a mixer of tokens makes of the normalised input."""

    def __init__(self, sublayer: nn.Module) -> None:
        super().__init__()
        self.norm, self.sublayer = nn.RMSNorm(WIDTH, eps=1e-6, dtype=torch.float64), sublayer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.sublayer(self.norm(x))


class Indexer(nn.Module):
    """Chooses, for each query, the keys ``[B, S, PICKED]`` with the largest index scores. The choice has no gradient."""

    def __init__(self, written: bool) -> None:
        super().__init__()
        self.q, self.k, self.w = linear(WIDTH, INDEX * 8), linear(WIDTH, 8), linear(WIDTH, INDEX)
        self.requires_grad_(False)
        self.choose = None if written else SparseIndexer(PICKED)

    def forward(self, x: Tensor) -> Tensor:
        q, k, w = self.q(x).unflatten(-1, (INDEX, 8)), self.k(x), self.w(x)
        if self.choose is not None:
            return self.choose(q, k, w).squeeze(2)
        scores = (torch.einsum("bshd,btd->bsht", q, k).mul(8**-0.5).relu() * w.unsqueeze(-1)).sum(2)
        return scores.masked_fill(~causal(x), -torch.inf).topk(PICKED, -1).indices


def causal(x: Tensor) -> Tensor:
    """Returns which keys a query may see: bool [S, S]."""
    at = torch.arange(x.shape[1], device=x.device)
    return at <= at[:, None]


def masked(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
    """Attends to the chosen keys by a mask: q ``[B, H, S, D]``, k and v the same, chosen ``[B, S, PICKED]``."""
    seen = torch.zeros(*chosen.shape[:2], k.shape[2], dtype=torch.bool, device=q.device)
    seen = seen.scatter(-1, chosen, True) & causal(chosen)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1) @ v


def gathered(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
    """Does the same with the chosen keys gathered."""
    place = chosen[:, None, :, :, None].expand(-1, k.shape[1], -1, -1, k.shape[-1])
    keys, values = (t.unsqueeze(2).expand(-1, -1, t.shape[2], -1, -1).gather(3, place) for t in (k, v))
    late = chosen > torch.arange(chosen.shape[1], device=q.device)[:, None]
    scores = torch.einsum("bhsd,bhskd->bhsk", q, keys) * q.shape[-1] ** -0.5
    return torch.einsum("bhsk,bhskd->bhsd", scores.masked_fill(late[:, None], -torch.inf).softmax(-1), values)


class Attention(nn.Module):
    """Attention of two groups of heads to the keys that an indexer chooses."""

    def __init__(self, attend: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.q, self.o = linear(WIDTH, HEADS * 8), linear(HEADS * 8, WIDTH)
        self.k, self.v = linear(WIDTH, GROUPS * 8), linear(WIDTH, GROUPS * 8)
        self.index, self.attend = Indexer(attend is not None), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        h, chosen = q.shape[1] // k.shape[1], self.index(x)
        if self.attend is not None:
            k, v = (t.repeat_interleave(h, 1) for t in (k, v))
            return self.o(self.attend(q, k, v, chosen).transpose(1, 2).flatten(2))
        lists = chosen.unsqueeze(2).expand(-1, -1, k.shape[1], -1)
        o = mi.selection_attention(q.transpose(1, 2).unflatten(2, (-1, h)), k, v, indices=lists)
        return self.o(o.flatten(2))


class Recurrence(nn.Module):
    """E79 with two heads, each a sequence of its own to the scan, and biases that they share."""

    def __init__(self, written: bool) -> None:
        super().__init__()
        self.into, self.out = linear(WIDTH, 2 * 4 * STATE), linear(2 * STATE, WIDTH)
        self.b_s, self.b_m = (nn.Parameter(normal(STATE, seed=s, scale=0.5)) for s in (12, 13))
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        kvqm = self.into(x).unflatten(-1, (-1, 4 * STATE))  # [B, T, heads, 4n]
        B, _, heads = kvqm.shape[:3]
        kvqm = kvqm.movedim(1, 0).flatten(1, 2)
        if self.written:
            zero = kvqm.new_zeros(B * heads, STATE, STATE)
            out = torch.stack(e79({"kvqm": kvqm, "b_s": self.b_s, "b_m": self.b_m, "S": zero, "M": zero})[0])
        else:
            out = mi.e79_scan(kvqm, self.b_s, self.b_m)[0]
        return self.out(out.unflatten(1, (B, heads)).movedim(0, 1).flatten(2))


def connection() -> nn.Module:
    layer = HyperConnection(WIDTH, STREAMS, MLP(), transpose_res=True).double()
    nn.init.constant_(layer.alpha, 1.0)
    return layer


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the tests need to know of one kind of model.

    ``columns`` and ``rows`` are the linear layers of a sublayer that tensor parallelism splits by outputs and by
    inputs, ``whole`` a module in it that needs all tokens, and ``partial`` the sublayer's parameters that a rank uses
    for its own heads only. ``split`` is the dimension at which a DTensor is sharded.
    """

    written: Callable[[int], nn.Module]
    called: Callable[[int], nn.Module]
    shape: tuple[int, ...]
    ops: Mapping[str, int]
    columns: tuple[str, ...]
    rows: str
    whole: str = ""
    partial: tuple[str, ...] = ()
    split: int = 0

    def layers(self, written: bool = True) -> list[nn.Module]:
        """Returns ``DEPTH`` layers, the same at every call."""
        torch.manual_seed(9)
        return [(self.written if written else self.called)(k) for k in range(DEPTH)]

    def model(self, written: bool = True) -> nn.Sequential:
        return nn.Sequential(*self.layers(written))

    def x(self, seed: int = 8, batch: int = 4) -> Tensor:
        return normal(batch, *self.shape, seed=seed)

    def expected(self, times: int = DEPTH) -> dict[str, int]:
        """Returns how often each op is in the graphs of ``times`` layers."""
        return {op: times * count for op, count in self.ops.items()}


KINDS = {
    "mHC": Kind(
        lambda k: Streams(),
        lambda k: connection(),
        (6, STREAMS, WIDTH),
        {"mhc_pre": 1, "mhc_post": 1},
        ("up",),
        "down",
        split=1,
    ),
    "lists": Kind(
        lambda k: Residual(Attention((masked, gathered)[k % 2])),
        lambda k: Residual(Attention(None)),
        (8, WIDTH),
        {"index_topk": 1, "selection_attention": 1},
        ("q", "k", "v"),
        "o",
        whole="index",
    ),
    "E79": Kind(
        lambda k: Residual(Recurrence(True)),
        lambda k: Residual(Recurrence(False)),
        (4, WIDTH),
        {"e79_scan": 1},
        ("into",),
        "out",
        partial=("b_s", "b_m"),
    ),
}


def counted(kind: str, since: Mapping[str, int]) -> dict[str, int]:
    """Returns how often each of a kind's ops was routed in this process since ``since`` was copied from the counters."""
    now = mi.counters()
    return {op: now.get(f"routed {op}", 0) - since.get(f"routed {op}", 0) for op in KINDS[kind].ops}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
