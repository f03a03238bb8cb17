# SPDX-License-Identifier: Apache-2.0
"""``route_exported``: the routing pass on an exported program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.export import ExportedProgram

from mhc_inductor.options import RoutingOptions


def route_exported(program: ExportedProgram, *, verify: bool = False, empty_rows: str = "exact") -> ExportedProgram:
    """Returns a copy of an exported program in which the formulas that routing recognises are ops of this package.

    Recognised are the formulas that ``torch.compile(backend="mhc_inductor")`` recognises: mHC (arXiv 2512.24880), E79,
    attention under a mask of selected keys (arXiv 2502.11089) and its indexers. Programs may come from strict or
    non-strict export, before or after ``run_decompositions()``. Dynamic sizes stay dynamic: a formula that needs one of
    them as a number is left as it is. On a CPU too the ops replace their formulas; a compile or a package decomposes
    them again. What was found is logged; ``mhc_inductor.explain(program)`` returns it as a report.

    The copy shares the parameters, buffers and constants of ``program``. It can be saved, loaded, compiled, decomposed
    and trained as any exported program. Python needs to import this package before it loads or runs one that holds ops.

    Args:
        program: the program that ``torch.export.export`` returned. It is left unchanged.
        verify: compare each routed formula with its op, outputs and gradients. A formula whose op differs is left
            unrouted.
        empty_rows: what attention returns for rows without a visible key: "exact", what the model's formula gives, or
            "zero".

    Returns:
        The routed program. Its inputs, outputs and dynamic shapes are those of ``program``.

    Raises:
        TypeError: if ``program`` is not an ExportedProgram, or ``verify`` is not a bool.
        ValueError: if ``empty_rows`` is not one of the two values.
    """
    if not isinstance(program, ExportedProgram):
        raise TypeError(
            f"route_exported: program must be a torch.export.ExportedProgram, got {type(program).__name__}; "
            "export the model first: torch.export.export(model, args)"
        )
    options = RoutingOptions(verify, empty_rows)
    from mhc_inductor.backend import prepare
    from mhc_inductor.exported.program import routed
    from mhc_inductor.report import log_report

    # A package is compiled from the copy without Dynamo, which would register the lowerings.
    prepare()
    result, report = routed(program, options)
    log_report(report)
    return result


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns the plain formulas of this package's ops, as a table for ``ExportedProgram.run_decompositions``.

    Use it where a consumer of a program knows only ATen operations: ONNX, ``torch.jit.trace`` of ``program.module()``,
    other runtimes. ``program.run_decompositions(mhc_inductor.decompositions())`` gives a program that needs nothing of
    this package. Attention becomes dense attention under a mask. An E79 recurrence becomes a ``scan``.

    Returns:
        The table of ``torch.export.default_decompositions()`` with one more entry for each op. Backward ops of E79 and
        of index scores have none.
    """
    from torch.export import default_decompositions

    from mhc_inductor.backend import prepare
    from mhc_inductor.lowerings.common import FORMULAS

    prepare()
    table: dict[Any, Callable[..., Any]] = dict(default_decompositions().items())
    table.update({op: functools.partial(_decomposed, formula) for op, formula in FORMULAS.items()})
    return table


def _decomposed(formula: Callable[..., Any], *args: Any) -> Any:
    """Applies the formula that a package holds."""
    from mhc_inductor import compat

    with compat.without_ops():
        return formula(*args)
