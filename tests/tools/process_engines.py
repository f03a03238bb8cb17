# SPDX-License-Identifier: Apache-2.0
"""What a spawned process of a test does: runs compiled models that were pickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from mhc_inductor.options import RoutingOptions
from mhc_inductor.routing import route


def routing(gm: Any, inputs: Any) -> Any:
    """Puts ops into a graph, also those that the backend leaves to Inductor on a CPU, and runs it without Inductor."""
    route(gm, RoutingOptions())
    return aot_eager(gm, inputs)


def work(rank: int, models: Mapping[str, tuple[nn.Module, Tensor]]) -> None:
    """Raises AssertionError unless each kind's compiled model is routed here and gives the output that came with it."""
    from tests.formulas.engine_models import KINDS, counted

    torch.set_num_threads(1)
    for kind, (compiled, want) in models.items():
        with torch.no_grad():
            torch.testing.assert_close(compiled(KINDS[kind].x()), want)
        assert counted(kind, {}) == KINDS[kind].expected(), kind
