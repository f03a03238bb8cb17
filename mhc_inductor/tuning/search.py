# SPDX-License-Identifier: Apache-2.0
"""Measures configurations one field at a time, and keeps what is faster and gives equal bits.

Whatever a field may change in theory, a value is kept only if every output and gradient of the workload, at several
numbers of tokens, has the bits that the closed form gives.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhc_inductor.tuning import table

GAIN = 0.02
"""Smallest share of the time that a value must save to be kept."""


class Calls(NamedTuple):
    """A workload's calls: ``outputs`` returns all results at several sizes, ``timed`` is what is measured.

    The configurations that ``timed`` asks for are searched, so it should take little time but theirs.
    """

    outputs: Callable[[], Sequence[Tensor]]
    timed: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Calls that ask for configurations; ``make`` allocates their inputs."""

    name: str
    make: Callable[[], Calls]


@dataclasses.dataclass
class Search:
    """A search that goes on where the table's file ends.

    ``measure`` returns the time of a call in milliseconds. ``said`` gets a line for every configuration.
    """

    path: pathlib.Path
    header: Mapping[str, Any]
    measure: Callable[[Callable[[], Any]], float]
    said: Callable[[str], None]
    until: float = float("inf")
    """Time of :func:`time.monotonic` after which nothing more is measured."""

    def __post_init__(self) -> None:
        self.content: dict[str, Any] = {"header": dict(self.header), "entries": {}, "measured": {}}
        if self.path.exists():
            kept = table.read(self.path)
            if kept["header"] == self.content["header"]:
                self.content = kept

    def run(self, workload: Workload) -> bool:
        """Measures the configurations of a workload that the table does not have; returns whether all are done."""
        from mhc_inductor.kernels import tuned

        calls = workload.make()
        with table.use({}):
            with tuned.recorded() as asked:
                calls.timed()
            want = list(calls.outputs())
        for key, of in asked.items():
            if key in self.content["measured"]:
                continue
            if time.monotonic() > self.until:
                return False
            values, row = _Trial(self, calls, key, want).best(of.default, of.choices)
            self.content["measured"][key] = {"workload": workload.name, **row}
            if values:
                self.content["entries"][key] = values
            table.write(self.path, self.content)
            self.said(f"{key}: {_words(values)}, {row['default_ms']:.4g} ms to {row['ms']:.4g} ms")
        return True


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} = {v}" for k, v in values.items()) or "the closed form"


@dataclasses.dataclass
class _Trial:
    """Tries values of one configuration."""

    search: Search
    calls: Calls
    key: str
    want: Sequence[Tensor]

    def best(self, default: Any, choices: Mapping[str, tuple[Any, ...]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the values to keep, empty for the closed form, and the row of what was tried."""
        base = least = self.milliseconds({})
        kept: dict[str, Any] = {}
        tried: list[dict[str, Any]] = []
        for field, values in choices.items():
            found: dict[str, Any] = {}
            for value in values:
                if value != getattr(default, field):
                    ms, why = self.tried({**kept, field: value})
                    tried.append({field: value, **({"ms": ms} if not why else {"refused": why})})
                    if not why and ms < least:
                        least, found = ms, {field: value}
            kept |= found
        if kept:  # once more, now that the GPU is as warm for the one as for the other
            base, least = self.milliseconds({}), self.milliseconds(kept)
        if least > (1 - GAIN) * base:
            kept, least = {}, base
        return kept, {"default": dataclasses.asdict(default), "default_ms": base, "ms": least, "tried": tried}

    def milliseconds(self, values: Mapping[str, Any]) -> float:
        with table.use({**self.search.content["entries"], self.key: values}):
            return self.search.measure(self.calls.timed)

    def tried(self, values: Mapping[str, Any]) -> tuple[float, str]:
        """Returns the time with these values, and why they may not be used, or ""."""
        try:
            with table.use({**self.search.content["entries"], self.key: values}):
                got = list(self.calls.outputs())
            if not equal_bits(got, self.want):
                return 0.0, "other bits"
            return self.milliseconds(values), ""
        except Exception as error:  # too much shared memory, or what this compiler cannot compile
            return 0.0, f"{type(error).__name__}: {error}"[:200]


def equal_bits(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    """Returns whether two lists of tensors are equal in every bit, NaN included."""
    return len(got) == len(want) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))
        for a, b in zip(got, want, strict=True)
    )


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)
