# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of selection (blocks, ranges) and of lists of keys share: the formula in fp64, calls, and rows.

The formula is written independently of the package's reference. It gives the values that outputs are checked against.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mhc_inductor

from . import accuracy, variants
from .report import Row
from .variants import Variant

CHUNK = 1 << 26
ERROR_FACTOR = 2.0
"""Bar of the error, as a multiple of dense SDPA's in the same dtype on the same selection, both against fp64."""
Named = dict[str, Tensor]
Call = Callable[[], Named]


@dataclasses.dataclass
class Case:
    """The tensors of one case; a family adds what its queries select.

    q ``[B, S, G, h, Dk]``, k ``[B, G, T, Dk]``, v ``[B, G, T, Dv]`` or None where the values are the first Dv columns of
    k, dout as o, and sink ``[G, h]`` or None.
    """

    shape: Any
    q: Tensor
    k: Tensor
    v: Tensor | None
    dout: Tensor
    sink: Tensor | None

    @property
    def selected(self) -> dict[str, Any]:
        """Returns the op's arguments that say what is selected."""
        raise NotImplementedError

    def mask(self, *at: Any) -> Tensor:
        """Returns the keys that all queries see, bool ``[B, S, G, T]``, or some of one sequence, ``[n, G, T]``."""
        raise NotImplementedError

    @property
    def values(self) -> Tensor:
        return self.k[..., : self.shape.v_dim] if self.v is None else self.v

    @property
    def inputs(self) -> Named:
        """Returns the inputs that have gradients, by name."""
        found = {"q": self.q, "k": self.k, "v": self.v, "sink": self.sink}
        return {n: t for n, t in found.items() if t is not None}

    def leaves(self, dtype: torch.dtype | None = None) -> Named:
        return {n: t.detach().to(dtype or t.dtype).requires_grad_() for n, t in self.inputs.items()}

    def op(self, leaves: Named) -> tuple[Tensor, Tensor]:
        """Returns o and lse of the op."""
        q, k, sink = leaves["q"], leaves["k"], leaves.get("sink")
        return mhc_inductor.selection_attention(q, k, leaves.get("v", k), **self.selected, sink=sink, return_lse=True)

    def forward(self) -> Named:
        """Returns o and lse, computed without gradients."""
        with torch.no_grad():
            return dict(zip(("o", "lse"), self.op(self.inputs), strict=True))

    def both(self, leaves: Named) -> Named:
        """Returns o and the gradients of all inputs that have one."""
        return gradients(self.op(leaves)[0], leaves, self.dout)

    def dense(self, dtype: torch.dtype) -> Named:
        """Returns o and all gradients under the mask: by the formula in fp64, or by SDPA in a narrower ``dtype``."""
        leaves = self.leaves(dtype)
        v = leaves.get("v", leaves["k"][..., : self.values.shape[-1]])
        attend = plain if dtype is torch.float64 else sdpa
        o = attend(leaves["q"], leaves["k"], v, self.mask(), leaves.get("sink"))
        return gradients(o, leaves, self.dout.to(dtype))


def sample_of(queries: int, count: int, device: torch.device) -> Tensor:
    """Returns positions ``[n]`` of ``queries``: the first, the last and random ones between."""
    if queries <= count:
        return torch.arange(queries, device=device)
    middle = torch.randperm(queries - 2, device=device)[: count - 2] + 1
    ends = torch.tensor([0, queries - 1], device=device)
    return torch.cat((ends, middle)).sort().values


def gradients(o: Tensor, leaves: Named, dout: Tensor) -> Named:
    """Returns o and the gradients of the leaves."""
    found = torch.autograd.grad(o, list(leaves.values()), dout)
    return {"o": o.detach(), **{f"d{name}": g for name, g in zip(leaves, found, strict=True)}}


def call(attend: Callable[[Named], Tensor], what: str, inputs: Named, dout: Tensor) -> Call:
    """Returns a call of ``attend`` on the inputs by name, or of it and their gradients."""
    inputs = {n: t.detach() for n, t in inputs.items()}
    if what == "fb":
        leaves = {n: t.requires_grad_() for n, t in inputs.items()}
        return lambda: gradients(attend(leaves), leaves, dout)

    def forward() -> Named:
        with torch.no_grad():
            return {"o": attend(inputs)}

    return forward


def _parts(case: Case, at: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields the queries ``at`` of each sequence, as many at a time as scores of them fit into memory."""
    few = max(1, CHUNK // (case.shape.length * case.q.shape[2] * case.shape.heads))
    return ((b, some) for b in range(case.shape.batch) for some in at.split(few))


def exact(case: Case, at: Tensor) -> Named:
    """Returns o ``[B * n, G, h, Dv]``, lse and dq in fp64 for the queries ``at``."""
    found: dict[str, list[Tensor]] = {}
    scale = case.shape.dim**-0.5
    for b, some in _parts(case, at):
        k, v = case.k[b].double(), case.values[b].double()
        s = torch.einsum("nghd,gkd->nghk", case.q[b, some].double(), k) * scale
        s = s.masked_fill(~case.mask(b, some)[:, :, None], float("-inf"))
        lse = s.logsumexp(-1)
        total = lse if case.sink is None else torch.logaddexp(lse, case.sink.double())
        p = (s - total.nan_to_num(neginf=0.0)[..., None]).exp()
        o, dout = torch.einsum("nghk,gkd->nghd", p, v), case.dout[b, some].double()
        ds = p * (torch.einsum("nghd,gkd->nghk", dout, v) - (dout * o).sum(-1, keepdim=True))
        for name, t in (("o", o), ("lse", lse), ("dq", torch.einsum("nghk,gkd->nghd", ds, k) * scale)):
            found.setdefault(name, []).append(t)
    return {name: torch.cat(parts) for name, parts in found.items()}


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor | None = None) -> Tensor:
    """Computes o of all queries under a mask, bool ``[B, S, G, T]``, by ``scaled_dot_product_attention``.

    Keys of one group are not copied for its heads. Sinks ``[G, h]`` become the bias of a key of zeros.
    """
    heads, bias = q.shape[3], mask.transpose(1, 2)
    if sink is not None:
        k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        scores = torch.zeros(bias.shape, dtype=q.dtype, device=q.device).masked_fill(~bias, float("-inf"))
        column = sink.to(q.dtype)[None, :, :, None, None].expand(len(q), -1, -1, q.shape[1], -1)
        bias = torch.cat((scores[:, :, None].expand(-1, -1, heads, -1, -1), column), -1).flatten(1, 2)
    elif q.shape[2] > 1:
        bias = bias.repeat_interleave(heads, 1)
    keys, values = (t[:, :, None].expand(-1, -1, heads, -1, -1).flatten(1, 2) for t in (k, v))
    o = F.scaled_dot_product_attention(q.flatten(2, 3).transpose(1, 2), keys, values, bias)
    return o.transpose(1, 2).unflatten(2, q.shape[2:4])


def sampled(case: Case, at: Tensor) -> Named:
    """Returns o and dq of :func:`sdpa` in the case's dtype for the queries ``at``, in the layout of :func:`exact`."""
    found: dict[str, list[Tensor]] = {"o": [], "dq": []}
    for b, some in _parts(case, at):
        q, (k, v) = case.q[b, some][None].detach().requires_grad_(), (t[b][None] for t in (case.k, case.values))
        o = sdpa(q, k, v, case.mask(b, some)[None], case.sink)
        (dq,) = torch.autograd.grad(o, [q], case.dout[b, some][None])
        found["o"].append(o[0].detach())
        found["dq"].append(dq[0])
    return {name: torch.cat(parts) for name, parts in found.items()}


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor | None) -> Tensor:
    """Computes o of all queries under a mask, bool ``[B, S, G, T]``."""
    s = torch.einsum("bsghd,bgtd->bghst", q, k) * q.shape[-1] ** -0.5
    s = s.masked_fill(~mask.movedim(1, 2)[:, :, None], float("-inf"))
    if sink is not None:
        column = sink.to(s.dtype)[None, :, :, None, None].expand(*s.shape[:4], 1)
        s = torch.cat((s, column), -1)
    return torch.einsum("bghst,bgtd->bsghd", s.softmax(-1)[..., : k.shape[2]], v)


def picked(got: Named, at: Tensor) -> Named:
    """Returns the rows of o, lse and dq of the queries ``at``, in the layout of :func:`exact`."""
    return {name: t[:, at].flatten(0, 1) for name, t in got.items() if name in ("o", "lse", "dq")}


def finite(got: Named) -> bool:
    return all(bool(t.isfinite().all()) for k, t in got.items() if k != "lse")


class Run(variants.Run):
    """A run of attention."""

    def ours(self, case: Case, what: str) -> Variant:
        def build() -> Callable[[], Any]:
            if what == "fwd":
                return case.forward
            leaves = case.leaves()
            return lambda: case.both(leaves)

        return Variant(what, "ops", build, case=case)

    def peer(self, case: Case, what: str, name: str, make: Callable[[Any, str], tuple[Call, str]]) -> Variant:
        """Returns another implementation, whose ``make`` returns its call and a note."""

        def build() -> Callable[[], Any]:
            call, found.note = make(case, what)
            return call

        found = Variant(what, name, build, case=case)
        return found

    def record(self, to: str, row: Row, got: Named, want: Named, dense: Named) -> None:
        """Adds a row of errors next to those of dense attention."""

        def bar(*of: Any) -> float | None:
            return ERROR_FACTOR * of[-1]["dense"] if "dense" in of[-1] else None

        self.result[to].append(row | {"errors": accuracy.errors(got, want, bar, dense=dense)})

    def record_sampled(self, row: Row, case: Case, got: Named, at: Tensor) -> None:
        """Adds a row of errors of what a run ``got`` for the queries ``at``."""
        self.record("errors", row, picked(got, at), exact(case, at), sampled(case, at))

    def record_gradients(self, to: str, row: Row, case: Case) -> None:
        """Adds a row of errors of o and of all gradients."""
        got, want = case.both(case.leaves()), case.dense(torch.float64)
        self.record(to, row, got, want, case.dense(case.q.dtype))

    def twice(self, case: Case) -> Named:
        """Checks o, lse and gradients for equal bits in two runs; returns those of the first."""
        first, second = (case.forward() | case.both(case.leaves()) for _ in range(2))
        self.result["determinism"].append({"case": case.shape.name, **accuracy.equal_bits(first, second)})
        return first
