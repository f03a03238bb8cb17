"""Options of routing: ``torch.compile(backend="mhc_inductor", options={"mhc_inductor.NAME": value})`` and ``enable(NAME=value)``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

PREFIX = "mhc_inductor."
EMPTY_ROWS = ("exact", "zero")


@dataclasses.dataclass(frozen=True)
class RoutingOptions:
    """What a user may ask of the routing pass.

    verify: compare each routed formula with its op, outputs and gradients, at compile time; what differs stays unrouted.
    empty_rows: what an attention gives in rows without a visible key: "exact", as the model's formula, or "zero".
    """

    verify: bool = False
    empty_rows: str = "exact"

    def __post_init__(self) -> None:
        if not isinstance(self.verify, bool):
            raise TypeError(f"{PREFIX}verify must be a bool, got {type(self.verify).__name__}")
        if self.empty_rows not in EMPTY_ROWS:
            raise ValueError(f"{PREFIX}empty_rows must be one of {EMPTY_ROWS}, got {self.empty_rows!r}")


DEFAULT = RoutingOptions()


def parse(options: Mapping[str, Any] | None) -> tuple[RoutingOptions, dict[str, Any]]:
    """Returns the options of routing, and the others, which are Inductor's.

    Raises RuntimeError for an unknown name that begins with "mhc_inductor.", TypeError or ValueError for a value.
    """
    known = {PREFIX + field.name: field.name for field in dataclasses.fields(RoutingOptions)}
    ours: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in (options or {}).items():
        key = name.replace("-", "_")
        if not key.startswith(PREFIX):
            others[name] = value
        elif key in known:
            ours[known[key]] = value
        else:
            raise RuntimeError(f"unexpected option {name!r}: the options of routing are {', '.join(known)}")
    return RoutingOptions(**ours), others
