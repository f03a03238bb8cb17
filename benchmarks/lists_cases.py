# SPDX-License-Identifier: Apache-2.0
"""Inputs of the rows of attention over lists of keys, and the formula in fp64 and as dense SDPA with a mask.

The formula is written independently of the package's reference. It gives the values that outputs are checked against.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mhc_inductor

from .lists_targets import RATIO, Shape
from .selection_cases import Named, relative, sample_of

_CHUNK = 1 << 26
__all__ = ["Case", "Named", "make_case", "relative", "sample_of"]
Call = Callable[[], Named]
Attend = Callable[..., Tensor]


@dataclasses.dataclass
class Case:
    """The tensors of one case: q ``[B, S, 1, h, Dk]``, k and v ``[B, 1, S_kv, D]``, indices ``[B, S, 1, n]``.

    ``v`` is None where the values are the first Dv columns of k. ``sink`` is ``[1, h]`` or None; ``dout`` is o's
    gradient.
    """

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor | None
    indices: Tensor
    dout: Tensor
    sink: Tensor | None = None

    def leaves(self, dtype: torch.dtype | None = None) -> Named:
        """Returns the inputs that have gradients, by name, as leaves; in ``dtype`` if it is given."""
        found = {"q": self.q, "k": self.k, "v": self.v, "sink": self.sink}
        return {n: t.detach().to(dtype or t.dtype).requires_grad_() for n, t in found.items() if t is not None}

    @property
    def values(self) -> Tensor:
        return self.k[..., : self.shape.v_dim] if self.v is None else self.v

    @property
    def pairs(self) -> int:
        """Returns the number of selected keys of all queries."""
        return int((self.indices >= 0).sum())


# ---- what is selected


def _drawn(reach: Tensor, keys: int, count: int) -> Tensor:
    """Returns ``count`` distinct random keys below ``reach [S]`` for each query, int64 ``[S, count]``; -1 for none."""
    out = torch.empty((len(reach), count), dtype=torch.int64, device=reach.device)
    every = torch.arange(keys, device=reach.device)
    rows = max(1, _CHUNK // keys)
    for at in range(0, len(reach), rows):
        hidden = every >= reach[at : at + rows, None]
        score = torch.rand(hidden.shape, device=reach.device).masked_fill_(hidden, -1)
        best, index = score.topk(count, 1)
        out[at : at + rows] = torch.where(best < 0, -1, index)
    return out


def lists(shape: Shape, device: torch.device) -> Tensor:
    """Returns the lists, sorted, int32 ``[B, S, 1, n]``; then -1 where a query has fewer keys."""
    positions = torch.arange(shape.keys - shape.queries, shape.keys, device=device)
    made = []
    for _ in range(shape.batch):
        if shape.pooled:
            near = positions[:, None] - torch.arange(shape.window, device=device)
            far = _drawn((positions + 1) // RATIO, shape.pooled, shape.listed)
            at = torch.cat((near.clamp(min=-1), torch.where(far < 0, -1, far + shape.keys)), 1)
        else:
            at = _drawn(positions + 1, shape.keys, shape.listed)
        at = torch.where(at < 0, shape.length, at).sort(-1).values
        made.append(torch.where(at == shape.length, -1, at).int())
    return torch.stack(made)[:, :, None]


def make_case(
    shape: Shape, device: torch.device, *, dtype: torch.dtype = torch.bfloat16, selected: Tensor | None = None
) -> Case:
    """Returns a random case, everything standard normal; the lists are ``selected`` if given."""

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    row = (shape.batch, shape.queries, 1, shape.heads)
    v = None if shape.shared else normal(shape.batch, 1, shape.length, shape.v_dim)
    # Sinks that every dtype holds exactly, since SDPA takes them in its own.
    sink = torch.randn(1, shape.heads, device=device).to(torch.float16).to(torch.bfloat16).float()
    return Case(
        shape,
        normal(*row, shape.dim),
        normal(shape.batch, 1, shape.length, shape.dim),
        v,
        lists(shape, device) if selected is None else selected,
        normal(*row, shape.v_dim),
        sink if shape.sink else None,
    )


# ---- calls


def op(case: Case, leaves: Named) -> tuple[Tensor, Tensor]:
    k, v = leaves["k"], leaves.get("v")
    found = mhc_inductor.selection_attention(
        leaves["q"],
        k,
        k if v is None else v,
        indices=case.indices,
        sink=leaves.get("sink"),
        v_width=case.shape.v_dim,
        return_lse=True,
    )
    assert isinstance(found, tuple)
    return found


def forward(case: Case) -> Named:
    """Returns o and lse, computed without gradients."""
    with torch.no_grad():
        o, lse = op(case, {n: t.detach() for n, t in case.leaves().items()})
    return {"o": o, "lse": lse}


def gradients(o: Tensor, leaves: Named, dout: Tensor) -> Named:
    """Returns o and the gradients of the leaves."""
    found = torch.autograd.grad(o, list(leaves.values()), dout)
    return {"o": o.detach(), **{f"d{name}": g for name, g in zip(leaves, found, strict=True)}}


def both(case: Case, leaves: Named) -> Named:
    """Returns o and the gradients of the op for all inputs that have one."""
    return gradients(op(case, leaves)[0], leaves, case.dout)


def call(case: Case, what: str, attend: Attend) -> Call:
    """Returns a call of ``attend(q, k, v, sink)`` on q ``[B, S, h, Dk]``, k and v ``[B, T, D]``, sink ``[h]``.

    v is None where the values are the first columns of the keys.
    """

    def o(leaves: Named) -> Tensor:
        v = leaves["v"][:, 0] if "v" in leaves else None
        sink = leaves["sink"][0] if "sink" in leaves else None
        return attend(leaves["q"][:, :, 0], leaves["k"][:, 0], v, sink)[:, :, None]

    leaves = case.leaves()
    if what == "fb":
        return lambda: gradients(o(leaves), leaves, case.dout)
    inputs = {n: t.detach() for n, t in leaves.items()}

    def forward() -> Named:
        with torch.no_grad():
            return {"o": o(inputs)}

    return forward


# ---- the formula


def mask_of(indices: Tensor, length: int) -> Tensor:
    """Returns the lists ``[..., n]`` as a mask, bool ``[..., length]``."""
    seen = (indices >= 0) & (indices < length)
    mask = torch.zeros((*indices.shape[:-1], length + 1), dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, torch.where(seen, indices, length).long(), True)[..., :length]


def exact(case: Case, at: Tensor) -> Named:
    """Returns o and lse, ``[B * n, h, ...]``, and dq in fp64 for the queries ``at``, from their own keys alone."""
    shape = case.shape
    few = max(1, _CHUNK // (shape.entries * (shape.dim + shape.v_dim)))
    found: dict[str, list[Tensor]] = {"o": [], "lse": [], "dq": []}
    for b in range(shape.batch):
        for some in at.split(few):
            for name, t in _exact(case, b, some).items():
                found[name].append(t)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _exact(case: Case, b: int, at: Tensor) -> Named:
    scale = case.shape.dim**-0.5
    index = case.indices[b, at, 0].long()
    keys, values = (t[b, 0, index.clamp(min=0)].double() for t in (case.k, case.values))
    q, dout = case.q[b, at, 0].double(), case.dout[b, at, 0].double()
    s = (q @ keys.mT * scale).masked_fill(index[:, None] < 0, float("-inf"))
    lse = s.logsumexp(-1)
    total = lse if case.sink is None else torch.logaddexp(lse, case.sink[0].double())
    p = (s - total[..., None]).exp()
    o, dp = p @ values, dout @ values.mT
    ds = p * (dp - (dout * o).sum(-1, keepdim=True))
    return {"o": o, "lse": lse, "dq": ds @ keys * scale}


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor | None, fold: bool) -> Tensor:
    """Computes SDPA under a mask that all heads share.

    Args:
        q: Queries ``[B, n, h, Dk]``.
        k: Keys ``[B, T, Dk]``.
        v: Values ``[B, T, Dv]``.
        mask: Which keys a query sees, bool ``[B, n, T]``.
        sink: Logits ``[h]``, or None; they become the bias of a key of zeros.
        fold: Whether heads become further queries, so that no head gets keys of its own.

    Returns:
        o ``[B, n, h, Dv]``.
    """
    B, n, h, width = q.shape
    bias = mask[:, None]
    if sink is not None:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        scores = torch.zeros(bias.shape, dtype=q.dtype, device=q.device).masked_fill(~bias, float("-inf"))
        column = sink.to(q.dtype).view(1, h, 1, 1).expand(B, h, n, 1)
        bias = torch.cat((scores.expand(-1, h, -1, -1), column), -1)
    heads = 1 if fold else h
    if fold:
        bias = bias.expand(-1, h, -1, -1).reshape(B, 1, h * n, -1)
    keys, values = (t[:, None].expand(-1, heads, -1, -1) for t in (k, v))
    rows = q.transpose(1, 2).reshape(B, heads, -1, width)
    o = F.scaled_dot_product_attention(rows, keys, values, bias)
    return o.reshape(B, h, n, -1).transpose(1, 2)


def dense_sampled(case: Case, at: Tensor) -> Named:
    """Returns o and dq of dense SDPA in the case's dtype for the queries ``at``, in the layout of :func:`exact`."""
    outs, grads = [], []
    sink = None if case.sink is None else case.sink[0]
    few = max(1, _CHUNK // (case.shape.length * case.shape.heads))
    for b in range(case.shape.batch):
        for some in at.split(few):
            q = case.q[b : b + 1, some, 0].detach().requires_grad_()
            mask = mask_of(case.indices[b : b + 1, some, 0], case.shape.length)
            o = dense(q, case.k[b : b + 1, 0], case.values[b : b + 1, 0], mask, sink, fold=True)
            (dq,) = torch.autograd.grad(o, [q], case.dout[b : b + 1, some, 0])
            outs.append(o[0].detach())
            grads.append(dq[0])
    return {"o": torch.cat(outs), "dq": torch.cat(grads)}


def picked(got: Named, at: Tensor) -> Named:
    """Returns the rows of o, lse and dq of the queries ``at``, in the layout of :func:`exact`."""
    return {name: t[:, at].flatten(0, 2) for name, t in got.items() if name in ("o", "lse", "dq")}


def dense_gradients(case: Case, dtype: torch.dtype) -> Named:
    """Returns o and all gradients under the dense mask: the formula in fp64, or SDPA in a narrower ``dtype``."""
    leaves = case.leaves(dtype)
    q, k = leaves["q"][:, :, 0], leaves["k"][:, 0]
    v = leaves["v"][:, 0] if "v" in leaves else k[..., : case.shape.v_dim]
    sink = leaves["sink"][0] if "sink" in leaves else None
    mask = mask_of(case.indices[:, :, 0], case.shape.length)
    o = _plain(q, k, v, mask, sink) if dtype is torch.float64 else dense(q, k, v, mask, sink, fold=False)
    return gradients(o[:, :, None], leaves, case.dout.to(dtype))


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor | None) -> Tensor:
    s = torch.einsum("bnhd,btd->bhnt", q, k) * q.shape[-1] ** -0.5
    s = s.masked_fill(~mask[:, None], float("-inf"))
    if sink is not None:
        s = torch.cat((s, sink[None, :, None, None].expand(*s.shape[:3], 1)), -1)
    return torch.einsum("bhnt,btd->bnhd", s.softmax(-1)[..., : k.shape[1]], v)


def case_values(s: Shape, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Returns what a row says of its case."""
    sizes: dict[str, Any] = {"case": s.name, "B": s.batch, "S": s.queries, "S_kv": s.length, "h": s.heads}
    sizes |= {"Dk": s.dim, "Dv": s.v_dim, "n": s.entries, "shared": s.shared}
    return sizes | {"dtype": str(dtype).removeprefix("torch.")}
