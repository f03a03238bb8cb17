# SPDX-License-Identifier: Apache-2.0
"""What a proposed op is tried on next to ordinary data, so that it does not agree with the formula by chance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhc_inductor.compat.routing import TorchDispatchMode
from mhc_inductor.routing.graph.values import Values

LARGE, ZEROS, SPECIAL = 2, 3, 4
"""Cases of data: large numbers; rows of zeros; from there on NaN, then infinities, in one input after the other."""


def edge(t: Tensor, case: int, nth: int) -> Tensor:
    """Returns random data for the ``nth`` input as a case wants it."""
    if case == ZEROS and t.dim():
        t[: (len(t) + 1) // 2] = 0
    elif case - SPECIAL in (2 * nth, 2 * nth + 1) and t.is_floating_point() and t.numel():
        t.view(-1)[-1], t.view(-1)[0] = (-torch.inf, torch.inf) if case % 2 else (torch.nan, torch.nan)
    return t * 64 if case == LARGE and t.is_floating_point() else t


def other_sizes(values: Values) -> list[dict[str, int]]:
    """Returns two other values of every dynamic size: multiples, since a view may divide it, and small if it is large."""
    free, sizes = sorted(values.hints.keys() - values.fixed.keys()), values.hints
    unit = {n: sizes[n] // 4 if sizes[n] % 4 == 0 and sizes[n] >= 16 else 2 * sizes[n] for n in free}
    return [{**sizes, **{n: unit[n] * (1 + (i + k) % 3) for i, n in enumerate(free)}} for k in (0, 1) if free]


_LIMITS = {"clamp", "clamp_min", "clamp_max", "maximum", "minimum", "hardtanh", "relu", "leaky_relu"}
_LIMITS |= {"threshold", "hardshrink", "hardswish", "softplus"}  # return some elements as they are
_TESTS = {"lt", "le", "gt", "ge", "eq", "ne"}


class Branches(TorchDispatchMode):
    """Records what the limits and comparisons of a formula return, in all runs inside the mode; calls are counted."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[str, set[str], set[str]]] = []
        self._at = 0

    def __enter__(self) -> Any:
        self._at = 0
        return super().__enter__()

    def missed(self) -> str | None:
        """Returns the name of a call one side of which no data has reached."""
        return next((name for name, wanted, seen in self._seen if wanted - seen), None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__.partition(".")[0].rstrip("_"), kwargs or {}
        before = args[0].clone() if name in _LIMITS | _TESTS else None  # the call may write it
        out = func(*args, **kwargs)
        if before is not None:
            two = name in ("clamp", "hardtanh") and sum(a is not None for a in (*args, *kwargs.values())) != 2
            if self._at == len(self._seen):
                self._seen.append((name, set("TF" if name in _TESTS else "<=>" if two else "=!"), set()))
            marks = {"T": out != 0, "F": out == 0, "!": out != before}
            marks |= {"<": out < before, "=": out == before, ">": out > before}
            self._seen[self._at][2].update(mark for mark, where in marks.items() if bool(where.any()))
            self._at += 1
        return out
