# SPDX-License-Identifier: Apache-2.0
"""Options of the routing pass.

Set by ``torch.compile(backend="mhc_inductor", options={"mhc_inductor.NAME": value})`` or ``enable(NAME=value)``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

PREFIX = "mhc_inductor."
"""Prefix of this package's names among the options of ``torch.compile``."""
EMPTY_ROWS = ("exact", "zero")
"""The values of ``empty_rows``."""


@dataclasses.dataclass(frozen=True)
class RoutingOptions:
    """The user's options of the routing pass.

    Args:
        verify: compare each routed formula with its op at compile time, outputs and gradients. A formula whose op
            differs is left unrouted.
        empty_rows: what attention returns for rows without a visible key: "exact", what the model's formula gives, or
            "zero".
        batch_invariant: give a query of attention or of an indexer the same bits whatever the number of queries. Few
            queries, as in decoding, then run the kernels of many, without splits of their keys. Of ranges this holds
            where they are made of whole tiles of keys (docs/determinism.md). All else is so anyway.
        profile_scopes: call each op from the generated code, so that a profiler's trace has a scope for it, with shapes,
            and :func:`mhc_inductor.count_ops` counts it. Slower where Inductor would launch an op's kernels, or fuse its
            formula, itself.

    Raises:
        TypeError: if ``verify``, ``batch_invariant`` or ``profile_scopes`` is not a bool.
        ValueError: if ``empty_rows`` is not one of the two values.
    """

    verify: bool = False
    empty_rows: str = "exact"
    batch_invariant: bool = False
    profile_scopes: bool = False

    def __post_init__(self) -> None:
        for name in ("verify", "batch_invariant", "profile_scopes"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{PREFIX}{name} must be a bool, got {type(value).__name__}")
        if self.empty_rows not in EMPTY_ROWS:
            raise ValueError(f"{PREFIX}empty_rows must be one of {EMPTY_ROWS}, got {self.empty_rows!r}")


DEFAULT = RoutingOptions()


def parse(options: Mapping[str, Any] | None) -> tuple[RoutingOptions, dict[str, Any]]:
    """Splits the options of ``torch.compile`` into routing options and Inductor's options.

    Args:
        options: option values by name, or None for no options. Dashes in names count as underscores.

    Returns:
        The routing options, and the options whose names do not begin with "mhc_inductor.", unchanged.

    Raises:
        RuntimeError: if a name begins with "mhc_inductor." and is not a routing option.
        TypeError: if a routing option has a value of the wrong type.
        ValueError: if a routing option has a value that it does not take.
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
