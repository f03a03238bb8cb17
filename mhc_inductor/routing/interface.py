# SPDX-License-Identifier: Apache-2.0
"""The interface of an operator, and the registry of operators.

An operator says which nodes may hold its formula, which values a match reads and returns, and how to build its op. The
pass then proves that the op may replace the formula (:mod:`mhc_inductor.routing.edit`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx

from mhc_inductor.routing.graph.index import DynamicWidth, Unsupported
from mhc_inductor.routing.graph.values import Value

if TYPE_CHECKING:
    from mhc_inductor.report import Cost, Routed
    from mhc_inductor.routing.edit import Edit
    from mhc_inductor.routing.graph.view import View


class Mismatch(Exception):
    """The first thing that does not fit a formula, in the user's terms, and the value where it is.

    A match with an empty reason is dropped without a near miss, because another match reports it.
    """

    def __init__(self, reason: str, value: Value | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = value


@contextlib.contextmanager
def contained(view: View, node: fx.Node) -> Iterator[None]:
    """Confines a failure of the routing code to the search at ``node``: it is reported and the search continues.

    Exceptions that mean that the formula does not fit are raised as they are: Mismatch, Unsupported and DynamicWidth.
    """
    try:
        yield
    except (Mismatch, Unsupported, DynamicWidth):
        raise
    except Exception as error:
        view.knowledge.failures.append((node, error))


class Unplaced(Mismatch):
    """Raised if no position is after everything that the op reads and before everything that reads the op."""


@dataclasses.dataclass
class Miss:
    """A formula that is not routed.

    Args:
        op: the op that the formula resembles.
        reason: why the formula is not routed.
        value: the value that does not fit.
        start: the value where the formula is.
        ordinary: whether nobody would expect it to be routed. It is reported, but does not count as a finding.
    """

    op: str
    reason: str
    value: Value | None
    start: Value | None
    ordinary: bool = False


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of verifying an op against its formula.

    ``error`` is the op's largest relative error, or None if the formula was not run; ``note`` says why, or what was
    compared. ``cost`` is what ``explain`` reports of sizes and times.
    """

    error: float | None = None
    note: str = ""
    cost: Cost | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass
class Match:
    """A recognised formula.

    Args:
        op: name of the op in reports.
        inputs: every tensor that the op reads.
        outputs: every value that the op's results replace.
        detail: sizes and constants, for the report.
        parts: names of the ops that the new op replaces, if it fuses ops instead of replacing a formula.
        data: whatever :meth:`Operator.emit` needs.
        at: the value that a report points at; by default the first output.
        sample: makes an input's data for verification if the default would be out of range:
            ``sample(value, shape, dtype, device, generator, case)`` returns a tensor, or None for the default. Called
            for every tensor that comes from outside the formula. The default is normally distributed floats (of size 1,
            and of size 1e-3 in every second case, to show constants such as an epsilon), integers 0 and 1, and random
            bools.
        cases: how many sets of data are tried, with ``case`` from 0. Edge cases such as empty rows or ties get sets of
            their own.
        derived: those of ``inputs`` that the graph computes from others of them: verification computes them, too.
        numbers: nodes of numbers that the op reads, such as floats that Dynamo leaves dynamic.
        proposed: nothing but numbers says that the op is the formula: it is compared with it on every compile, and on
            more data, and does not replace it where that is not possible.
        compare: compares outputs that need not be equal, such as indices of equally good choices:
            ``compare(outputs of the formula, outputs of the op, *inner)`` returns the error, or None for the usual
            comparison.
        inner: values inside the formula, such as the scores of choices, that ``compare`` reads.
        saved: what the formula reads apart from ``inputs`` is only kept by an ``autograd.Function``: it gets no gradient,
            not zeros.
    """

    op: str
    inputs: Sequence[Value]
    outputs: Sequence[Value]
    detail: str = ""
    parts: tuple[str, ...] = ()
    data: Any = None
    at: Value | None = None
    sample: Callable[..., torch.Tensor | None] | None = None
    cases: int = 2
    derived: Sequence[Value] = ()
    numbers: Sequence[fx.Node] = ()
    proposed: bool = False
    compare: Callable[..., float | None] | None = None
    inner: Sequence[Value] = ()
    saved: bool = False

    @property
    def start(self) -> Value:
        """Returns the value that a report points at."""
        return self.at or self.outputs[0]


DYNAMIC = (
    "a size of the formula must be known, and the exported program leaves it dynamic: export it with that size static"
)
"""Reason of the near misses at a dynamic size that a compile would fix at its present value."""


class Operator(Protocol):
    """Interface of an operator. One instance is made per graph, so it may keep what it learns about the graph.

    Optional members:

    - ``looks_for_ops = True``, on a class that matches only ops and no formulas. Its view shows in-place steps
      unchanged.
    - ``smaller(match)`` returns smaller matches to try if a match finds no position, such as each step of a loop, or if
      a proposed match is refused.
    - ``faster_as_written(match, device)`` returns whether, on a device type, Inductor's code for the formula as the
      model wrote it is faster than the op. A compile then keeps the formula, after the same proof as for any match.
    """

    name: str

    def candidates(self, view: View) -> Iterable[fx.Node]:
        """Returns the nodes that may hold the formula."""
        ...

    def match(self, view: View, node: fx.Node) -> Match | Miss | Routed | Iterable[Match | Miss | Routed] | None:
        """Returns what is found at a candidate: matches, near misses, ops that the model calls itself, or None."""
        ...

    def emit(self, edit: Edit, match: Match) -> Iterable[tuple[Value, fx.Node]]:
        """Builds the op at the edit's position and returns each output with the node that replaces it.

        Raises Mismatch if the inputs cannot be brought into the op's layout; the pass then undoes what was built.
        """
        ...

    def kernels(self, op: str, device: str) -> tuple[str, ...]:
        """Returns the kernels that ``op`` launches on a device type, or a word for what runs there instead."""
        ...


_REGISTERED: dict[str, Callable[[], Operator]] = {}


def register(operator: Callable[[], Operator], name: str = "") -> None:
    """Adds what makes an operator for one graph, by default under its ``name``. Raises ValueError if that is taken."""
    name = name or operator.name  # type: ignore[attr-defined]
    if name in _REGISTERED:
        raise ValueError(f"register: an operator named {name!r} is registered already")
    _REGISTERED[name] = operator


def unregister(name: str) -> None:
    """Removes the operator of that name. Raises KeyError if there is none."""
    del _REGISTERED[name]


def registered() -> list[Callable[[], Operator]]:
    """Returns the registered operators' makers, in the order in which the pass runs them."""
    return list(_REGISTERED.values())
