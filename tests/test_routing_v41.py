# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1's three kinds of indexers and Qwen3.8-Flash-Next: what is routed, what is named, equal results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhc_inductor
from tests.formulas.reference_models_v41 import DIM, Attention, Model, State
from tests.tools.capture import alike, reasons

KINDS = ("full", "reindex", "reuse", "reindex")


def _model(*kinds: str) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(*kinds), torch.randn(2, 24, DIM)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_every_attention_and_every_score_of_v41_is_routed(grad: bool) -> None:
    model, x = _model(*KINDS)
    got = alike(model, (x,), model.named_parameters(), {"selection_attention": 4, "index_scores": 3}, grad)
    # The choice of whole blocks is another formula: the topk of all three reads scores that it shares with others.
    assert "the scores are computed in another way, by amax" in reasons(got)


@pytest.mark.parametrize("kind, ops", [("full", 1), ("reindex", 1), ("reuse", 0)])
def test_a_layer_of_v41_alone_is_routed(kind: str, ops: int) -> None:
    """Layers compiled one by one: what they share is handed in, as data."""
    torch.manual_seed(1)
    full, layer, x = Attention("full"), Attention(kind), torch.randn(2, 24, DIM)
    _, state = full(x, State())
    state = State(**{k: v.detach() for k, v in vars(state).items()})
    got = alike(lambda x: layer(x, state)[0], (x,), layer.named_parameters())
    assert got.ops["selection_attention"] == 1 and got.ops.get("index_scores", 0) == ops, reasons(got)


def _qwen() -> tuple[nn.Module, Tensor]:
    configuration = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp")
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    torch.manual_seed(2)
    config = configuration.Qwen4ExpTextConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts_per_tok=2, num_experts=4,
        layer_types=["linear_attention", "indexed_attention"], indexer_n_heads=2, indexer_kv_heads=1,
        indexer_head_dim=16, indexer_budget=4, indexer_compress_ratio=2, hc_lowrank=8,
    )  # fmt: skip
    return modeling.Qwen4ExpForCausalLM(config).eval(), torch.randint(64, (1, 7))


def test_what_qwen38_computes_otherwise_is_named() -> None:
    """Residuals by low-rank gates, without a matrix that mixes streams, and an indexer that loops over queries."""
    model, ids = _qwen()
    report = mhc_inductor.explain(model, ids)
    assert not report.routed and not report.problems
    found: dict[str, list[Any]] = {}
    for miss in report.near_misses:
        found.setdefault(miss.op, []).append(miss)
    assert len(found["mhc_pre"]) == 4  # two a layer
    assert all("each stream is normalised by itself" in m.reason for m in found["mhc_pre"])
    assert any("aten.nonzero" in m.reason for m in found["any op"])
    assert any("whose contents routing cannot see" in m.reason for m in found["selection_attention"])


def test_qwen38_compiled_is_eager() -> None:
    model, ids = _qwen()
    alike(model, (ids,), model.named_parameters(), {}, False)
