# SPDX-License-Identifier: Apache-2.0
"""Inductor generates code of what routing puts into a graph, whatever it fuses it with."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_routing_lists import ENTRIES, WINDOWS, _model, inputs, written
from torch._inductor.compile_fx import compile_fx

from mhc_inductor.routing import route
from tests.tools.fakecuda import generated_code

pytestmark = pytest.mark.usefixtures("no_caches")


def _compiled(fn: Any, given: tuple[torch.Tensor, ...], dynamic: bool) -> tuple[list[str], list[str]]:
    """Returns what is routed and Inductor's code of the routed graphs, where it fuses every concatenation.

    It does so on a GPU where the parts of a concatenation are computed element by element.
    """
    routed: list[str] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        routed.extend(r.op for r in route(gm).routed)
        return compile_fx(gm, example_inputs)

    with torch._inductor.config.patch(force_pointwise_cat=True):
        codes = generated_code(lambda: torch.compile(fn, backend=backend, dynamic=dynamic)(*given))
    return routed, codes


@pytest.mark.parametrize(("side", "grad", "dynamic"), [("left", True, False), ("right", False, True)])
@pytest.mark.parametrize(("window", "second"), [*itertools.product(WINDOWS, ("prefix", "counted"))])
def test_lists_of_keys_of_two_parts(window: str, second: str, side: str, grad: bool, dynamic: bool) -> None:
    """Checks a window, which starts before the first key, joined with other keys; padding is looked up by key."""
    given = tuple(t.requires_grad_(grad and t.is_floating_point()) for t in inputs(window == "packed", side, ENTRIES))
    routed, codes = _compiled(_model(window, second, True, written), given, dynamic)
    # A fill that Dynamo left dynamic is looked at twice: first as a mask that is data.
    assert {*routed} == {"selection_attention"} and "selection_list_attention" in codes[0]
