"""Which roundings of a formula an op may drop: none to a dtype that the op's tensors do not have."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from mhc_inductor.routing.graph.expressions import is_cast
from mhc_inductor.routing.graph.values import Value, example, tensors_in
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.graph.views import loses
from mhc_inductor.routing.operator import Mismatch


def check_roundings(view: View, around: Iterable[fx.Node], region: Iterable[fx.Node]) -> None:
    """Raises Mismatch where the nodes of ``region`` round to a dtype narrower than those of ``around``, inputs and results.

    Coefficients in the streams' dtype are closer to exact without the cast, and fp32 is what ops compute in. Coefficients
    through fp8 between streams of bf16 are a quantisation that the model wrote. What autocast computes in a narrow dtype
    is no cast of the model's.
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
            f"an intermediate result is rounded to {narrow[0]}; no tensor that the op reads or gives is", value
        )


def _dtypes(node: fx.Node) -> set[torch.dtype]:
    return {t.dtype for t in tensors_in(example(node)) if t.is_floating_point()}


def _holds(dtype: torch.dtype, others: Iterable[torch.dtype]) -> bool:
    """Whether ``dtype`` holds every number of one of ``others``."""
    return not all(loses(dtype, other) for other in others)
