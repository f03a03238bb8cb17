# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of selection (blocks, ranges) and of lists of keys share: the formula in fp64, calls, and rows.

The formula is written independently of the package's reference. It gives the values that outputs are checked against.
A case has q ``[B, S, G, h, Dk]``, k ``[B, G, T, Dk]``, values ``[B, G, T, Dv]``, dout as o, and sink ``[G, h]`` or None.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import accuracy, running
from .report import Row
from .variants import Variant

CHUNK = 1 << 26
ERROR_FACTOR = 2.0
"""Bar of the error, as a multiple of dense SDPA's in the same dtype on the same selection, both against fp64."""
Named = dict[str, Tensor]
Call = Callable[[], Named]


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


def exact(case: Any, at: Tensor, mask: Callable[[int, Tensor], Tensor], dq: bool = False) -> Named:
    """Returns o ``[B * n, G, h, Dv]``, lse and, if asked for, dq in fp64 for the queries ``at``.

    ``mask`` returns the keys that some queries of a sequence see, bool ``[n, G, T]``.
    """
    found: dict[str, list[Tensor]] = {}
    few = max(1, CHUNK // (case.shape.length * case.q.shape[2] * case.shape.heads))
    scale = case.shape.dim**-0.5
    for b in range(case.shape.batch):
        k, v = case.k[b].double(), case.values[b].double()
        for some in at.split(few):
            s = torch.einsum("nghd,gkd->nghk", case.q[b, some].double(), k) * scale
            s = s.masked_fill(~mask(b, some)[:, :, None], float("-inf"))
            lse = s.logsumexp(-1)
            total = lse if case.sink is None else torch.logaddexp(lse, case.sink.double())
            p = (s - total.nan_to_num(neginf=0.0)[..., None]).exp()
            made = {"o": torch.einsum("nghk,gkd->nghd", p, v), "lse": lse}
            if dq:
                dout = case.dout[b, some].double()
                dp = torch.einsum("nghd,gkd->nghk", dout, v)
                ds = p * (dp - (dout * made["o"]).sum(-1, keepdim=True))
                made["dq"] = torch.einsum("nghk,gkd->nghd", ds, k) * scale
            for name, t in made.items():
                found.setdefault(name, []).append(t)
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


class Run(running.PartRun[running.S]):
    """A run of attention; ``cases`` is the module of its family that has ``forward`` and ``both``."""

    timed_parts = True
    cases: ClassVar[ModuleType]

    def ours(self, case: Any, what: str) -> Variant:
        def build() -> Callable[[], Any]:
            if what == "fwd":
                return lambda: self.cases.forward(case)
            leaves = case.leaves()
            return lambda: self.cases.both(case, leaves)

        return Variant(what, "ops", build, case=case)

    def peer(self, case: Any, what: str, name: str, make: Callable[[Any, str], tuple[Call, str]]) -> Variant:
        """Returns another implementation, whose ``make`` returns its call and a note."""

        def build() -> Callable[[], Any]:
            call, found.note = make(case, what)
            return call

        found = Variant(what, name, build, case=case)
        return found

    def record(self, to: str, row: Row, got: Named, want: Named, dense: Named) -> None:
        """Adds a row of errors next to those of dense attention."""
        self.result[to].append(row | {"errors": accuracy.against_dense(got, want, dense, ERROR_FACTOR)})

    def twice(self, case: Any) -> Named:
        """Checks o, lse and gradients for equal bits in two runs; returns those of the first."""
        first, second = (self.cases.forward(case) | self.cases.both(case, case.leaves()) for _ in range(2))
        self.result["determinism"].append({"case": case.shape.name, **accuracy.equal_bits(first, second)})
        return first
