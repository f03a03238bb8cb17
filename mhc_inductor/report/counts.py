# SPDX-License-Identifier: Apache-2.0
"""What ops compute and move: calls, floating-point operations and bytes of each."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mhc_inductor.report.findings import Routed

if TYPE_CHECKING:
    from mhc_inductor.report import Report


@dataclasses.dataclass
class OpCount:
    """Sums over the calls of one op: floating-point operations, and bytes as :class:`~mhc_inductor.profiling.op_bytes.Bytes`."""

    calls: int = 0
    flops: int = 0
    bytes: int = 0
    gathered: int = 0

    def add(self, other: OpCount) -> None:
        """Adds the sums of ``other``."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclasses.dataclass
class OpCounts:
    """The counts of each op, by its name in ``torch.ops.mhc_inductor``; ``str(counts)`` is a table.

    ``flops`` are the products of matrices that the op's formula has, as ``torch.utils.flop_counter`` counts them; what a
    kernel computes again is not among them. ``bytes`` has each tensor that the op reads or writes once, but of keys and
    values that queries gather only the named rows; ``gathered`` has those rows once for each query that names them.
    """

    ops: dict[str, OpCount] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, report: Report) -> OpCounts:
        """Returns the counts of the ops that routing puts into a model, each forward once, for the shapes of ``explain``.

        Where ops were fused, the fused op counts and its parts do not. Ranges and lists count as all keys, each once:
        their values are not known.

        Args:
            report: what :func:`mhc_inductor.explain` returned.

        Raises:
            TypeError: if ``report`` is something else.
        """
        from mhc_inductor.report import Report

        if not isinstance(report, Report):
            raise TypeError(f"OpCounts.of: report must be what explain returned, got {type(report).__name__}")
        ops, counts = list(report.routed), cls()
        for fused in report.fused:
            for part in fused.parts:
                gone = next((one for one in ops if one.op == part and _streams(one) == _streams(fused)), None)
                if gone is not None:
                    ops.remove(gone)
        for one in (*ops, *report.fused):
            if one.cost is not None:
                counts.add(one.op, OpCount(1, one.cost.flops, one.cost.bytes))
        return counts

    def add(self, op: str, count: OpCount) -> None:
        """Adds calls of ``op``."""
        self.ops.setdefault(op, OpCount()).add(count)

    def total(self) -> OpCount:
        """Returns the sums over all ops."""
        total = OpCount()
        for count in self.ops.values():
            total.add(count)
        return total

    def mfu(self, seconds: float, peak_flops: float) -> float:
        """Returns the model FLOPs utilization of these ops: their FLOPs in ``seconds``, as a part of the peak.

        The FLOPs are those of this package's ops only. For a whole model, take ``torch.utils.flop_counter``, which
        knows the ops too.

        Args:
            seconds: the time that the counted calls took, measured in another run.
            peak_flops: the device's peak in FLOP/s, for the dtype of the products.

        Raises:
            ValueError: if an argument is no number above 0.
        """
        return self.total().flops / (_above_0("mfu", "seconds", seconds) * _above_0("mfu", "peak_flops", peak_flops))

    def mbu(self, seconds: float, peak_bytes: float) -> float:
        """Returns the memory bandwidth utilization: the bytes that must move in ``seconds``, as a part of the peak.

        Args:
            seconds: the time that the counted calls took, measured in another run.
            peak_bytes: the device's peak in bytes/s.

        Raises:
            ValueError: if an argument is no number above 0.
        """
        return self.total().bytes / (_above_0("mbu", "seconds", seconds) * _above_0("mbu", "peak_bytes", peak_bytes))

    def __str__(self) -> str:
        width = max(map(len, ("op", "total", *self.ops)))
        lines = [f"{'op':{width}} {'calls':>6} {'GFLOP':>10} {'MB':>10} {'gathered MB':>12} {'FLOP/byte':>10}"]
        for op, c in (*self.ops.items(), ("total", self.total())):
            each = f"{c.flops / c.bytes:10.1f}" if c.bytes else f"{'':10}"
            lines.append(
                f"{op:{width}} {c.calls:6} {c.flops / 1e9:10.4g} {c.bytes / 1e6:10.4g} {c.gathered / 1e6:12.4g} {each}"
            )
        return "\n".join(lines)


def _above_0(method: str, name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"OpCounts.{method}: {name} must be a number above 0, got {value!r}")
    return float(value)


def _streams(one: Routed) -> tuple[str, ...]:
    """Returns name, dtype and shape of an mHC op's first argument: fused ops and their parts have the same."""
    return one.cost.tensors[:1] if one.cost is not None else ()
