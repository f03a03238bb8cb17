# SPDX-License-Identifier: Apache-2.0
"""What routing finds: formulas that became ops, near misses, and what an op costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

AS_WRITTEN = ("kept as written: Inductor's code is faster on this device",)
"""Shown instead of kernels for a formula that a compile kept as the model wrote it."""
_WOULD_KEEP = "a compile keeps the formula as written, which is faster on this device"


Modules = tuple[tuple[str, str], ...]
"""Path and class of each module around a line, outermost first. The path of explain's argument is empty."""


@dataclasses.dataclass
class Cost:
    """What an op does in its forward, from the shapes that ``explain`` saw.

    ``tensors`` describes what it reads and returns; ``bytes`` is their size, each counted once; ``flops`` is the op's flop
    formula. ``times`` are the seconds that the compiled formula and the compiled op took if they were measured, with
    gradients where the graph had them; ``note`` says why they were not.
    """

    tensors: tuple[str, ...] = ()
    bytes: int = 0
    flops: int = 0
    times: tuple[float, float] | None = None
    note: str = ""


Said = Iterator[tuple[str, str]]
"""Headings with texts, of which some may be empty."""


@dataclasses.dataclass(frozen=True)
class Routed:
    """A formula that became an op, or neighbouring ops that became one: then ``parts`` are their names.

    ``source`` is "file.py:line, in function: code" in the user's file. ``error`` is the op's largest relative error
    over outputs and gradients, compared with the formula in higher precision, if it was verified. ``note`` says why it
    was not verified, or what it was compared with instead. ``as_written`` says that a compile keeps the formula as the
    model wrote it, since Inductor's code for it is faster on this device: there ``kernels`` run only if the op is called.
    ``modules`` are the modules around the line. ``cost`` is known where ``explain`` made the report.
    """

    op: str
    source: str
    detail: str = ""
    kernels: tuple[str, ...] = ()
    error: float | None = None
    note: str = ""
    as_written: bool = False
    modules: Modules = dataclasses.field(default=(), compare=False)
    cost: Cost | None = dataclasses.field(default=None, compare=False, repr=False)
    parts: tuple[str, ...] = ()

    def runs(self) -> str:
        """Returns what runs in place of the formula, as text."""
        kept = (_WOULD_KEEP,) if self.as_written and self.kernels != AS_WRITTEN else ()
        return "; ".join((", ".join(self.kernels), *kept))

    def said(self) -> Said:
        """Yields what a report says of it."""
        yield "of", " + ".join(self.parts)
        yield "detail", self.detail
        yield "kernels", self.runs()
        error = "" if self.error is None else f"{self.error:.2g}"
        yield "relative error", f"{error} ({self.note})" if error and self.note else error or self.note


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A formula that almost became an op: the op it resembles, the first node that does not fit, and why.

    Near misses that differ only in the node are equal, so that they share a row, which names the first node.
    """

    op: str
    reason: str
    source: str
    node: str = dataclasses.field(default="", compare=False)
    ordinary: bool = False
    """Whether nobody would expect this formula to be routed."""
    modules: Modules = dataclasses.field(default=(), compare=False)

    def said(self) -> Said:
        """Yields what a report says of it."""
        yield "why not", self.reason
        yield "node", self.node


def module_name(found: Routed | NearMiss) -> str:
    """Returns the path of the innermost module around a finding; the class of explain's own argument."""
    path, kind = found.modules[-1] if found.modules else ("", "")
    return path or kind
