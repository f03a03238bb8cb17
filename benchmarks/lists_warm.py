# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of a run of the lists benchmark in parallel processes: see :mod:`benchmarks.selection_warm`.

Those of torch.compile are not among them: it chooses by their times on the GPU, which must have nothing else to do then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import lists_cases as cases
from . import lists_peers as peers
from . import lists_targets as targets
from .selection_warm import Warmed, side_by_side


def ours(name: str) -> None:
    """Runs the op at the real shape, because launch plans depend on sizes."""
    shape = targets.SHAPES[name]
    case = cases.make_case(shape, torch.device("cuda"))
    cases.forward(case)
    cases.both(case, case.leaves())
    torch.cuda.synchronize()


def gradients(name: str, dtype: torch.dtype) -> None:
    """Runs the op at the shape whose gradients are compared with fp64."""
    case = cases.make_case(targets.SHAPES[name].for_gradients(), torch.device("cuda"), dtype=dtype)
    cases.both(case, case.leaves())
    torch.cuda.synchronize()


def crossing(width: int) -> None:
    """Runs the op for each length of the lists that the crossing has."""
    for count in targets.CROSSING_LISTS:
        case = cases.make_case(targets.WIDTHS[width].of(4096, 4096, count), torch.device("cuda"))
        cases.both(case, case.leaves())
    torch.cuda.synchronize()


def ranges(name: str) -> None:
    """Runs the selection op over ranges of one key."""
    shape = targets.SHAPES[name]
    case = cases.make_case(shape, torch.device("cuda"))
    peers.make(targets.RANGES, case, "fwd" if shape.decodes else "fb")[0]()
    torch.cuda.synchronize()


def warm(names: Sequence[str], parts: Sequence[str]) -> Warmed:
    """Runs side by side the jobs of these shapes that the parts of the run need."""
    jobs: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {}
    if {"speed", "errors", "memory", "peers"} & set(parts):
        jobs |= {name: (ours, (name,)) for name in names}
    if "errors" in parts:
        wide = [name for name in ("A", "D") if name in names]
        jobs |= {f"{name}, {d}": (gradients, (name, d)) for name in wide for d in (torch.float16, torch.float32)}
    if "crossing" in parts:
        jobs |= {f"crossing, D = {width}": (crossing, (width,)) for width in targets.WIDTHS}
    if "peers" in parts:
        jobs |= {f"ranges, {name}": (ranges, (name,)) for name in names}
    return side_by_side(jobs)
