# SPDX-License-Identifier: Apache-2.0
"""Context parallelism at full length: each operator on one rank, and with its sequence on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mhc_inductor as mi

from ..accuracy import relative
from .rank import Ranks, worst

Call = Callable[..., Tensor]


@dataclasses.dataclass
class Operator:
    """An operator as one rank alone calls it, and as all ranks call it together.

    ``whole``: the inputs that get gradients. ``dims``: where each is split, None for a parameter, whose gradients the
    ranks sum. ``out_dim``: where the output is split.
    """

    name: str
    alone: Call
    together: dict[str, Call]
    whole: Sequence[Tensor]
    dims: Sequence[int | None]
    out_dim: int

    def part(self, ranks: Ranks) -> list[Tensor]:
        """Returns this rank's inputs."""
        return [share(t, d, ranks) for t, d in zip(self.whole, self.dims, strict=True)]


def share(t: Tensor, dim: int | None, ranks: Ranks) -> Tensor:
    """Returns this rank's run of a dimension, or all of a parameter, in memory of its own."""
    if dim is None:
        return t.detach().clone()
    length = t.shape[dim] // ranks.size
    return t.detach().narrow(dim, ranks.rank * length, length).clone()


# --- the operators ------------------------------------------------------------------------------------------


def _normal(ranks: Ranks, *shape: int, scale: float = 1.0) -> Tensor:
    g = torch.Generator(ranks.device).manual_seed(sum(shape))
    dtype = torch.bfloat16 if ranks.cuda else torch.float32
    return torch.randn(shape, generator=g, device=ranks.device, dtype=torch.float32).mul_(scale).to(dtype)


def selection(ranks: Ranks, tokens: int) -> Operator:
    """Causal selection of blocks, as native sparse attention's: 16 blocks of 64 keys for each of 64 heads' queries."""
    from ..selection_cases import Shape, blocks

    shape = Shape("context", tokens, *((2, 2) if ranks.toy else (4, 16)))
    shape = dataclasses.replace(shape, dim=16, block=8, picks=5) if ranks.toy else shape
    torch.manual_seed(0)  # blocks draws from the default generator: all ranks get the same
    ranges = mi.blocks_to_ranges(blocks(shape, "corr", ranks.device), shape.block, tokens)
    mine = share(ranges, 1, ranks)
    heads = (shape.groups, shape.heads)
    q = _normal(ranks, 1, tokens, *heads, shape.dim)
    k, v = (_normal(ranks, 1, shape.groups, tokens + i, shape.dim)[:, :, i:].contiguous() for i in (0, 1))

    def joined(method: Any) -> Call:
        return lambda q, k, v: mi.distributed.selection_attention(q, k, v, mine, method=method)

    together = {"all-gather": joined("gather"), "ring": joined("ring")}
    alone = lambda q, k, v: mi.selection_attention(q, k, v, ranges)  # noqa: E731
    return Operator("selection attention", alone, together, (q, k, v), (1, 2, 2), 1)


def scan(ranks: Ranks, tokens: int) -> Operator:
    """The E79 scan of two long sequences; states travel from rank to rank."""
    n = 4 if ranks.toy else 32
    kvqm = _normal(ranks, tokens, 2, 4 * n)

    def joined(chunks: int) -> Call:
        return lambda kvqm: mi.distributed.e79_scan(kvqm, chunks=chunks)[0]

    together = {"hand-over, 1 chunk": joined(1), "hand-over, 2 chunks": joined(2)}
    return Operator("E79 scan", lambda kvqm: mi.e79_scan(kvqm)[0], together, (kvqm,), (0,), 0)


def connection(ranks: Ranks, tokens: int) -> Operator:
    """A hyper-connection's pre and post on streams split by tokens; only gradients of parameters are summed."""
    n, width = 4, 32 if ranks.toy else 2560
    x = _normal(ranks, 1, tokens, n, width)
    phi = _normal(ranks, n * n + 2 * n, n * width, scale=(n * width) ** -0.5).float()
    alpha, bias = (_normal(ranks, size).float() for size in (3, n * n + 2 * n))

    def layer(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> Tensor:
        h_in, h_post, h_res = mi.mhc_pre(x, phi, alpha, bias, sinkhorn_iters=20)
        return mi.mhc_post(x, h_in, h_post, h_res, transpose_res=True)

    return Operator("mHC pre and post", layer, {"by tokens": layer}, (x, phi, alpha, bias), (1, None, None, None), 1)


OPERATORS = {"selection": selection, "e79": scan, "mhc": connection}


# --- measuring ----------------------------------------------------------------------------------------------


def run(ranks: Ranks) -> dict[str, Any]:
    """Measures one operator: equal results first, which also compile; then, alone on the machine, time and memory."""
    op, rounds = OPERATORS[ranks.options["operator"]](ranks, ranks.options["tokens"]), ranks.options["rounds"]
    found: dict[str, Any] = {"operator": op.name, "tokens": ranks.options["tokens"]}
    want = _result(op.alone, op.whole)
    checked = {name: _compared(op, fn, want, ranks) for name, fn in op.together.items()}
    del want
    ranks.note(**found, checked=checked)
    ranks.gate()
    first = _measured("one rank", op.alone, list(op.whole), False, rounds, ranks)
    rows, mine = [first], op.part(ranks)
    for name, fn in op.together.items():
        row = _measured(name, fn, mine, True, rounds, ranks) | {"results": checked[name]}
        rows.append(row | {"speedup": {what: first["ms"][what] / row["ms"][what] for what in row["ms"]}})
    return found | {"rows": rows}


def _measured(name: str, fn: Call, inputs: list[Tensor], everyone: bool, rounds: int, ranks: Ranks) -> dict[str, Any]:
    """Returns ms and the bytes that a rank sends, forward and with the backward, and the peak of memory."""
    from tests.ranks import distributed_tools

    def forward() -> None:
        with torch.no_grad():
            fn(*inputs)

    up: list[Tensor] = []

    def step() -> None:
        leaves = [t.requires_grad_() for t in (i.detach() for i in inputs)]
        out = fn(*leaves)
        if not up:
            up.append(torch.ones_like(out))
        torch.autograd.backward([out], up)

    calls = {"forward": forward, "forward + backward": step}
    row: dict[str, Any] = {"variant": name, "sent_bytes": {}, "peak_mb": {}}
    row["ms"] = {what: ranks.milliseconds(call, rounds, everyone) for what, call in calls.items()}
    for what, call in calls.items():
        sent, peak = [0], None
        if everyone or ranks.rank == 0:
            with distributed_tools.counted_bytes() as sent:
                peak = ranks.peak_mb(call)
        every = ranks.everywhere((sent[0], peak))
        row["sent_bytes"][what] = max(s for s, _ in every)
        row["peak_mb"][what] = max((p for _, p in every if p is not None), default=None)
    return row


def _result(fn: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns the output and all gradients of a call.

    The output's gradient depends on the last dimension only, so that every rank makes its part of it.
    """
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = fn(*leaves)
    up = torch.linspace(0.5, 1.5, out.shape[-1], device=out.device).to(out.dtype)
    torch.autograd.backward([out], [up.expand_as(out).contiguous()])
    return out.detach(), [t.grad for t in leaves if t.grad is not None]


def _compared(op: Operator, fn: Call, want: tuple[Tensor, list[Tensor]], ranks: Ranks) -> dict[str, Any]:
    """Returns whether the output has the bits of one rank's, and the relative errors of output and gradients."""
    out, grads = _result(fn, op.part(ranks))
    whole, errors = share(want[0], op.out_dim, ranks), []
    for grad, exact, dim in zip(grads, want[1], op.dims, strict=True):
        if dim is None:
            dist.all_reduce(grad)
        errors.append(relative(grad, share(exact, dim, ranks)))
    bits, apart, off = zip(
        *ranks.everywhere((torch.equal(out, whole), relative(out, whole), worst(errors))), strict=True
    )
    return {"equal_bits": all(bits), "output_error": worst(apart), "gradient_error": worst(off)}
