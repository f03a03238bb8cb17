# SPDX-License-Identifier: Apache-2.0
"""Sparse models of transformers, routed: a prompt, chunks of odd sizes and a single token give the full forward.

Graphs are routed and then interpreted, so that a cache that grows costs no compile in Inductor.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mhc_inductor.routing import Report
from tests.formulas import sparse_families
from tests.formulas.sparse_families import FAMILIES
from tests.tools import capture

if not all(importlib.util.find_spec(f"transformers.models.{name}") for name in FAMILIES):
    pytest.skip("this transformers lacks some of the models", allow_module_level=True)

BATCH = 2
SIZES = (11, 7, 5, 1)
"""Sizes of the calls, each with the cache of the one before; each is compiled. The last token fills pools of 2, 4 and 8."""
BAR = 1e-4


@torch.no_grad()
def cached(call: Callable[..., Any], ids: Tensor) -> Tensor:
    """Returns the logits of ``ids``, given in calls of :data:`SIZES` tokens."""
    rows, cache = [], None
    for part in ids.split(SIZES, 1):
        out = call(input_ids=part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits)
    return torch.cat(rows, 1)


def apart(a: Tensor, b: Tensor) -> float:
    """Returns the largest distance of a token's logits, in units of the largest norm."""
    return float((a - b).norm(dim=-1).max() / b.norm(dim=-1).max())


CASES = [(family, attention) for family, one in FAMILIES.items() for attention in one.implementations]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_routed_calls_with_a_cache_give_the_full_forward(family: str, attention: str) -> None:
    model, ids = sparse_families.build(family, attention), sparse_families.tokens(BATCH, sum(SIZES))
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
    report, graphs = Report(), list[torch.fx.GraphModule]()
    torch._dynamo.reset()
    backend = capture.interpreted(report, graphs, capture.VERIFY)
    got, ops = cached(torch.compile(model, backend=backend, dynamic=False), ids), capture.ops_of(*graphs)
    assert not report.problems
    for each, whole in zip(got.split(SIZES, 1), want.split(SIZES, 1), strict=True):
        assert apart(each, whole) < BAR
    indexers, attentions = sparse_families.expected(family, attention, "decode")
    indexed = ops["index_topk"] + ops["index_scores"]  # the second where a graph break lies between
    assert (indexed > 0, ops["selection_attention"] > 0) == (indexers > 0, attentions > 0), ops
