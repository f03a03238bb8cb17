# SPDX-License-Identifier: Apache-2.0
"""The models of the sparse benchmark: DeepSeek-V4 and DeepSeek-V3.2 of transformers with random weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from . import deepseek_model
from .sparse_targets import V4, V4_WIDE, V32_WIDE, Case

VOCAB = 4096
TOY_VOCAB = 256


def v32_config(seq: int, toy: bool) -> Any:
    """Returns the ``DeepseekV32Config``: 2 layers, latents of 512 + 64, 32 index heads, 2048 keys a query."""
    from transformers.models.deepseek_v32 import DeepseekV32Config

    # Hidden, intermediate, heads, q and kv latents, rope, nope, v, index heads, their width, keys a query.
    sizes = (
        (64, 64, 4, 32, 32, 8, 16, 16, 4, 16, 8) if toy else (2048, 4096, 32, 1024, 512, 64, 128, 128, 32, 128, 2048)
    )
    hidden, inner, heads, q_lora, kv_lora, rope, nope, v, index_heads, index_dim, topk = sizes
    config = DeepseekV32Config(
        vocab_size=TOY_VOCAB if toy else VOCAB,
        hidden_size=hidden,
        intermediate_size=inner,
        moe_intermediate_size=32 if toy else 512,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        kv_lora_rank=kv_lora,
        q_lora_rank=q_lora,
        qk_rope_head_dim=rope,
        v_head_dim=v,
        qk_nope_head_dim=nope,
        first_k_dense_replace=2,
        n_group=1,
        topk_group=1,
        index_n_heads=index_heads,
        index_head_dim=index_dim,
        index_topk=topk,
        max_position_embeddings=max(4096, seq),
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    return config


def v32_published(seq: int) -> Any:
    """Returns the ``DeepseekV32Config`` of the published model, with one layer, whose MLP is dense."""
    from transformers.models.deepseek_v32 import DeepseekV32Config

    sizes = {"num_hidden_layers": 1, "mlp_layer_types": ["dense"], "vocab_size": VOCAB}
    config = DeepseekV32Config(**sizes, max_position_embeddings=max(4096, seq), use_cache=False)
    config._attn_implementation = "sdpa"
    return config


def v4_size(case: Case, toy: bool) -> deepseek_model.Size:
    """Returns the sizes of DeepSeek-V4: those of its own benchmark, with the case's batch and length."""
    wide = case.model == V4_WIDE
    size = deepseek_model.TINY if toy else deepseek_model.PUBLISHED if wide else deepseek_model.Size()
    return dataclasses.replace(size, batch=case.batch, seq=case.seq)


def build(case: Case, device: torch.device, dtype: torch.dtype, toy: bool) -> torch.nn.Module:
    """Returns the case's model with seeded weights in ``dtype``; DeepSeek-V4's mHC parameters are fp32."""
    if case.model in (V4, V4_WIDE):
        return deepseek_model.build(v4_size(case, toy), device, dtype)
    from transformers.models.deepseek_v32 import DeepseekV32ForCausalLM

    torch.manual_seed(0)
    with device:
        wide = case.model == V32_WIDE and not toy
        model = DeepseekV32ForCausalLM(v32_published(case.seq) if wide else v32_config(case.seq, toy))
    return model.to(device=device, dtype=dtype)


def tokens(case: Case, device: torch.device, toy: bool) -> Tensor:
    """Returns random token ids, int64 ``[batch, seq]``."""
    generator = torch.Generator().manual_seed(0)
    vocab = TOY_VOCAB if toy else VOCAB
    return torch.randint(vocab, (case.batch, case.seq), generator=generator).to(device)
