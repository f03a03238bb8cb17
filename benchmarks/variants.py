# SPDX-License-Identifier: Apache-2.0
"""Measures the variants of one case: builds their calls, times them in turn, checks their outputs, fills their rows.

Long calls get fewer rounds, and a very long one of a peer one. A failing variant is recorded in its row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from . import running, timing

FEW, CPU_ROUNDS, CALLED_ROUNDS = 4, 10, 3
ROUND_US = 120e3
"""Microseconds that all rounds of one variant may take together; at least ``FEW`` rounds are run."""

Row = dict[str, Any]


@dataclasses.dataclass
class Variant:
    """One row to measure. ``build`` prepares and returns the call; ``note`` says what it includes or leaves out.

    ``case`` is what it is measured on. ``check`` compares its outputs with fp64. A chain makes ``calls`` calls.
    ``capture=False``: called, not replayed.
    """

    what: str
    variant: str
    build: Callable[[], Callable[[], Any]]
    note: str = ""
    case: Any = None
    check: Callable[[Any], Row] | None = None
    calls: int = 1
    capture: bool = True


@dataclasses.dataclass
class Once:
    """A very long call that was timed when it was tried out: its second call, on the host's clock."""

    us: float
    outputs: Any

    def run_poisoned(self) -> Any:
        return self.outputs

    def close(self) -> None:
        self.outputs = None


Ready = timing.Runnable | Once


def failure(e: BaseException) -> Row:
    """Returns what a row says of a failure: its text and, where it is known, the reason in words."""
    why = running.reason(e)
    return {"error": running.message(e)} | ({} if why is None else {"reason": why})


@contextlib.contextmanager
def _failing(row: Row) -> Iterator[None]:
    """Puts a failure into the row. After it, nothing holds the tensors that the exception did."""
    try:
        yield
    except Exception as e:
        row |= failure(e)


def _checked(v: Variant, row: Row, ready: Ready, check: Check | None) -> Row:
    """Returns what a row says of the outputs of a run after they were filled with NaN, by ``check`` or the variant's own."""
    if check is not None:
        return check(row, ready.run_poisoned())
    if v.check is None:
        return {}
    errors = v.check(ready.run_poisoned())
    return {"errors": errors, "correct": all(e["met"] for e in errors.values())}


def chained(v: Variant, length: int, build: Callable[[], Callable[[], Any]]) -> Variant:
    """Returns a variant of ``length`` calls after one another, as in a decoding loop."""
    return dataclasses.replace(v, variant=f"{v.variant}, chain of {length}", build=build, check=None, calls=length)


Header = Callable[[Variant], Row]
Figures = Callable[[Row, timing.Timing], None]
Check = Callable[[Row, Any], Row]


class Run(running.PartRun):
    """A run that times variants."""

    long_us: ClassVar[float] = math.inf
    """Microseconds above which a peer's call is timed once, without a graph."""
    alike: ClassVar[bool] = False
    """Whether all variants that are replayed get as many rounds, however long they take, and those that are called a few."""

    def ready(self, v: Variant, row: Row) -> Ready:
        """Returns the prepared call of a variant; notes in its row the seconds it took and whether it was captured."""
        if self.alike:
            return timing.Runnable(v.build(), self.device, v.capture)
        start = time.perf_counter()
        try:
            return self._ready(v.build(), v.variant == "ops", row)
        finally:
            row["prepared_s"] = round(time.perf_counter() - start, 2)

    def _ready(self, call: Callable[[], Any], ours: bool, row: Row) -> Ready:
        if not ours and self.long_us < math.inf:
            call()  # compiles
            made: list[Any] = []
            tried = Once(1e6 * timing.seconds(lambda: made.append(call()), self.device), made.pop())
            if tried.us > self.long_us:
                row["captured"] = False
                return tried
            tried.close()
            running.free(self.device)  # the capture takes memory of its own
        try:
            return timing.Runnable(call, self.device)
        except Exception:
            if ours or not self.gpu:
                raise
        # A peer that cannot be captured is called instead, with the cost of its launches. Not in the handler: the
        # exception holds the tensors of the frames that it passed.
        running.free(self.device)
        row["captured"] = False
        return timing.Runnable(call, self.device, capture=False)

    def rounds_of(self, r: timing.Runnable) -> int:
        """Returns how many rounds a call gets: the longer it takes, the fewer."""
        most = self.s.rounds if self.gpu else min(CPU_ROUNDS, self.s.rounds)
        if self.alike:
            return most if r.capture else min(CALLED_ROUNDS, most)
        allowed = int(ROUND_US / timing.interleaved({"": r}, self.device, self.flush, 1, 1)[""].median)
        return most if allowed >= most else min(most, max(FEW, allowed // FEW * FEW))

    def times(self, ready: dict[int, Ready]) -> Iterator[tuple[int, timing.Timing]]:
        """Yields the times of each prepared variant; those of as many rounds take turns."""
        groups: dict[int, dict[str, timing.Runnable]] = {}
        for at, r in ready.items():
            if isinstance(r, Once):
                yield at, timing.Timing([r.us])
            else:
                groups.setdefault(self.rounds_of(r), {})[str(at)] = r
        for rounds, chosen in groups.items():
            for name, t in timing.interleaved(chosen, self.device, self.flush, rounds, min(3, rounds // 2)).items():
                yield int(name), t

    def timed(
        self, to: str, name: str, found: Sequence[Variant], header: Header, figures: Figures, check: Check | None = None
    ) -> list[Row]:
        """Builds, times and checks the variants of one case, which take turns, and adds their rows to the result.

        Args:
            to: The list of the result that gets the rows.
            name: What the case is called in the lines that say what is prepared.
            found: The variants.
            header: Returns what names the row of a variant, in addition to what it is.
            figures: Adds to a row its times, of one call of a chain.
            check: Returns what to add to a row for the outputs of a run after they were filled with NaN; None: the
                errors that the variant's own check finds, if it has one.
        """
        rows = [{"what": v.what, "variant": v.variant} | header(v) for v in found]
        ready = dict[int, Ready]()
        try:
            for at, v in enumerate(found):
                self.report(f"{name}: preparing {v.what} {v.variant}")
                with _failing(rows[at]):
                    ready[at] = self.ready(v, rows[at])
                if at not in ready:
                    running.free(self.device)
                rows[at].update({"note": v.note} if v.note else {})
            for at, t in self.times(ready):
                figures(rows[at], t.over(found[at].calls))
            for at, r in ready.items():
                with _failing(rows[at]):
                    rows[at].update(_checked(found[at], rows[at], r, check))
                r.close()
            ready.clear()
            running.free(self.device)
        finally:  # what failed may have taken the device with it
            self.result[to].extend(r for r in rows if "median_us" in r or "error" in r)
            self.save(self.result)
        return rows

    def add_bars(self, row: Row, target: running.Target | None, ours: Sequence[str] = ("ops",)) -> None:
        """Adds to a row of ours its bars, if it has any."""
        if target is not None and row["variant"] in ours and not self.s.small:
            row |= target.of(row, self.bars_apply)
