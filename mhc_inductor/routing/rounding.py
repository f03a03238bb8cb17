# SPDX-License-Identifier: Apache-2.0
"""Checks which roundings of a formula an op may drop: only those to dtypes that the op's tensors have, or fp32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from mhc_inductor.routing.graph.expressions import is_cast, loses
from mhc_inductor.routing.graph.values import Value, example, tensors_in
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Mismatch


def check_roundings(view: View, around: Iterable[fx.Node], region: Iterable[fx.Node]) -> None:
    """Raises Mismatch if ``region`` rounds to a dtype narrower than those of ``around``, the inputs and results.

    A cast of coefficients to the streams' dtype may be dropped: without it the result is closer to exact, and ops
    compute in fp32. Coefficients cast to fp8 between bf16 streams are a quantisation that the model wrote, and must
    stay. What autocast computes in a narrow dtype is not a cast of the model's.
    """
    kept = {torch.float32, *(d for n in around for d in _dtypes(n))}
    for node in region:
        narrow = [d for d in _dtypes(node) if not _holds(d, kept)]
        if not narrow or all(not _holds(d, kept) for a in node.all_input_nodes for d in _dtypes(a)):
            continue
        value = view.value(node)
        if view.modes_at(node).autocast and not (isinstance(value, Value) and is_cast(value)):
            continue
        raise Mismatch(
            f"an intermediate result is rounded to {narrow[0]}; no input or output of the op has that dtype", value
        )


def _dtypes(node: fx.Node) -> set[torch.dtype]:
    return {t.dtype for t in tensors_in(example(node)) if t.is_floating_point()}


def _holds(dtype: torch.dtype, others: Iterable[torch.dtype]) -> bool:
    """Returns whether ``dtype`` represents every number of one of ``others``."""
    return not all(loses(dtype, other) for other in others)
