"""What an operator brings to the pass, and where operators register.

An operator says where its formula may be, what a match reads and gives, and how its op is put there. The pass proves
for all of them alike that the op may stand where the formula stood (:mod:`mhc_inductor.routing.edit`).
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
    from mhc_inductor.routing.edit import Edit
    from mhc_inductor.routing.graph.view import View
    from mhc_inductor.routing.report import Routed


class Mismatch(Exception):
    """The first thing that does not fit a formula, in the user's terms, and the value where it is.

    An empty reason drops the match without a near miss: another match says why.
    """

    def __init__(self, reason: str, value: Value | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = value


@contextlib.contextmanager
def contained(view: View, node: fx.Node) -> Iterator[None]:
    """Lets a failure of routing itself end the search at ``node`` alone: it is reported, and the rest is searched on.

    What is raised of a formula that does not fit passes through.
    """
    try:
        yield
    except (Mismatch, Unsupported, DynamicWidth):
        raise
    except Exception as error:
        view.knowledge.failures.append((node, error))


class Unplaced(Mismatch):
    """No position is after everything that the op needs and before everything that needs the op."""


@dataclasses.dataclass
class Miss:
    """A formula that stays: the op that it resembles, why, the value that does not fit, and where the formula is.

    ``ordinary``: nobody would take it for the op's formula. It is reported, and is no finding.
    """

    op: str
    reason: str
    value: Value | None
    start: Value | None
    ordinary: bool = False


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What running a formula beside its op gave: the op's largest relative error, or None and why it was not run."""

    error: float | None = None
    note: str = ""


@dataclasses.dataclass
class Match:
    """A formula that was recognised.

    Args:
        op: name of the op in reports.
        inputs: every tensor that the op reads.
        outputs: every value that the op's results replace.
        detail: sizes and constants, for the report.
        parts: ops that the new one replaces, where it is a fusion of ops rather than of a formula.
        data: whatever :meth:`Operator.emit` needs.
        at: the value that a report points at; by default the first output.
        sample: makes an input's data for verification, where the default would be out of range:
            ``sample(value, shape, dtype, device, generator, case)`` returns a tensor, or None for the default. Called for
            every tensor that comes from outside the formula. The default is normal floats (of size 1, and 1e-3 in every
            second case, where constants such as an epsilon show), integers of 0 and 1, and random bools.
        cases: how many sets of data are tried, ``case`` from 0: empty rows, ties and other edges are cases of their own.
        judge: compares outputs that need not be equal, such as indices of equally good choices:
            ``judge(outputs of the formula, outputs of the op)`` returns the error, or None for the usual comparison.
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
    judge: Callable[[list[torch.Tensor], list[torch.Tensor]], float | None] | None = None

    @property
    def start(self) -> Value:
        """The value that a report points at."""
        return self.at or self.outputs[0]


class Operator(Protocol):
    """One operator. Instances are made for each graph, so they may keep what they learn of it.

    Optional are ``looks_for_ops = True`` of a class that matches ops and no formulas (its view shows in-place steps as they
    are), and two methods:

    - ``smaller(match)`` returns smaller matches to try where no position was found for one (each step of a loop).
    - ``faster_as_written(match, device)`` says that on a type of device Inductor's code of the formula as the model
      wrote it beats the op's. A compile then keeps the formula there, proved like any other match.
    """

    name: str

    def candidates(self, view: View) -> Iterable[fx.Node]:
        """Returns the nodes where the formula may be."""
        ...

    def match(self, view: View, node: fx.Node) -> Match | Miss | Routed | Iterable[Match | Miss | Routed] | None:
        """Returns what is at a candidate: matches, near misses, ops that the model calls itself, or None."""
        ...

    def emit(self, edit: Edit, match: Match) -> Iterable[tuple[Value, fx.Node]]:
        """Puts the op at the edit's position. Returns each output with the node that takes its place.

        Raises Mismatch where the inputs cannot be brought into the op's layout; the pass takes back what was put in.
        """
        ...

    def kernels(self, op: str, device: str) -> tuple[str, ...]:
        """Returns the kernels that ``op`` launches on a type of device, or a word for what runs there instead."""
        ...


_REGISTERED: dict[str, Callable[[], Operator]] = {}


def register(operator: Callable[[], Operator], name: str | None = None) -> None:
    """Adds an operator to the pass of every later compile.

    Args:
        operator: a class, or a function without arguments, that makes the operator for one graph.
        name: what :func:`unregister` takes; by default the class's ``name``.

    Raises:
        ValueError: if an operator of that name is registered already.
    """
    name = name or getattr(operator, "name", None)
    if not isinstance(name, str):
        raise ValueError(f"register: {operator!r} has no name; give the class a `name` or pass name=...")
    if name in _REGISTERED:
        raise ValueError(f"register: an operator named {name!r} is registered already")
    _REGISTERED[name] = operator


def unregister(name: str) -> None:
    """Removes an operator. Raises KeyError if none has that name."""
    del _REGISTERED[name]


def registered() -> list[Callable[[], Operator]]:
    """Returns the makers of all operators, in the order in which they run."""
    return list(_REGISTERED.values())
