# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers 5.23 with sparse attention, one configuration a family, with random weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 96


def sizes(by_size: dict[int, str], **others: Any) -> dict[str, Any]:
    """Returns a configuration's values by name, from the names that have each size."""
    return {name: size for size, names in by_size.items() for name in names.split()} | others


_COMMON = {VOCAB: "vocab_size", 64: "hidden_size", 256: "max_position_embeddings"}
LATENT = sizes(
    {
        **_COMMON,
        64: "hidden_size intermediate_size",
        32: "moe_intermediate_size q_lora_rank kv_lora_rank",
        16: "qk_nope_head_dim v_head_dim index_n_heads index_head_dim",
        8: "qk_rope_head_dim index_topk",
        4: "num_attention_heads num_key_value_heads n_routed_experts",
        2: "num_experts_per_tok eos_token_id",
        1: "n_shared_experts n_group topk_group bos_token_id",
        0: "pad_token_id",
    }
)
"""Sizes that the families with multi-head latent attention share."""


def _config(class_name: str, **values: Any) -> Callable[[], Any]:
    """Returns a function that makes the configuration ``class_name``."""

    def config() -> Any:
        import transformers

        return getattr(transformers, class_name)(**{k: v for k, v in values.items() if v is not _NONE})

    return config


def _latent(class_name: str, **changes: Any) -> Callable[[], Any]:
    """Returns a function that makes the configuration ``class_name`` of :data:`LATENT` with ``changes``."""
    return _config(class_name, **{**LATENT, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], **changes})


_NONE = object()
"""Marks a size of :data:`LATENT` that a family does not have."""


_deepseek_v4 = _config(
    "DeepseekV4Config",
    **sizes(
        {
            **_COMMON,
            32: "head_dim q_lora_rank index_head_dim moe_intermediate_size",
            16: "o_lora_rank index_n_heads",
            12: "sliding_window",
            4: "num_attention_heads index_topk n_routed_experts",
            3: "num_hidden_layers hc_sinkhorn_iters",
            2: "o_groups num_experts_per_tok",
            1: "num_hash_layers",
        },
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
        partial_rotary_factor=0.25,
    ),
)
_SPECIAL = ("image", "video", "image_start", "image_end", "video_start", "video_end")
_glm5_next = _config(
    "Glm5NextConfig",
    text_config={
        **LATENT,
        **sizes({0: "qk_rope_head_dim", 2: "num_hidden_layers linear_num_heads", 4: "index_kpool"}),
        **sizes({16: "linear_head_dim", 3: "hc_sinkhorn_iters"}),
        "layer_types": ["indexed_attention", "indexed_attention"],
        "indexer_types": ["full", "shared"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    vision_config=sizes(
        {
            1: "depth",
            32: "hidden_size intermediate_size projection_intermediate_size",
            2: "num_heads",
            64: "out_hidden_size",
        }
    ),
    **{f"{kind}_token_id": VOCAB - 1 - i for i, kind in enumerate(_SPECIAL)},
)
_mistral_large4 = _config(
    "MistralLarge4Config",
    text_config={
        **{k: v for k, v in LATENT.items() if k != "q_lora_rank"},
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "dense", "sparse"],
        "indexer_types": ["full", "full", "shared"],
        "kv_source_layers": [0, 0, 2],
        "no_rope_layers": [1, 1, 1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    vision_config=sizes(
        {32: "hidden_size intermediate_size", 1: "num_hidden_layers", 2: "num_attention_heads", 16: "head_dim"},
        model_type="pixtral",
        patch_size=14,
        image_size=28,
    ),
    image_token_index=VOCAB - 1,
)
_minimax_m3_vl = _config(
    "MiniMaxM3VLTextConfig",
    **sizes(
        {
            **_COMMON,
            64: "hidden_size dense_intermediate_size",
            32: "intermediate_size shared_intermediate_size head_dim index_head_dim",
            16: "rotary_dim",
            8: "index_block_size",
            4: "num_attention_heads num_local_experts",
            2: "num_hidden_layers num_key_value_heads num_experts_per_tok index_n_heads index_topk_blocks eos_token_id",
            1: "index_local_blocks bos_token_id",
            0: "pad_token_id",
        },
        layer_types=["full_attention", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "sparse"],
    ),
)
_SLIDING = sizes(
    {
        4: "swa_num_attention_heads swa_num_key_value_heads",
        32: "swa_q_lora_rank swa_kv_lora_rank",
        24: "swa_head_dim",
        16: "swa_qk_nope_head_dim swa_v_head_dim",
    }
)


@dataclasses.dataclass(frozen=True)
class Family:
    """A model class, its tiny configuration, and how many indexers and sparse attentions a call of it has.

    ``indexers`` counts the formulas that ``index_topk`` computes: MiniMax-M3 scores blocks, which is another formula.
    ``attentions`` counts the attentions under lists or blocks of keys, and DeepSeek-V4's window with its sinks. Ordinary
    windows (dots3) and GLM-5-Next's linear attention are neither; the tiny GLM-5-Next has no layer of the latter.
    """

    model: str
    config: Callable[[], Any]
    indexers: int
    attentions: int
    implementations: tuple[str, ...] = ("eager", "sdpa")


FAMILIES = {
    "deepseek_v4": Family("DeepseekV4ForCausalLM", _deepseek_v4, 1, 3, ("eager",)),
    "hy_v4": Family("HYV4ForCausalLM", _latent("HYV4Config", indexer_types=["full", "shared"]), 1, 2, ("eager",)),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", _latent("DeepseekV32Config"), 2, 2),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", _latent("GlmMoeDsaConfig", indexer_types=["full", "shared"]), 1, 2),
    "glm5_next": Family("Glm5NextForConditionalGeneration", _glm5_next, 1, 2),
    "mistral_large4": Family("MistralLarge4ForConditionalGeneration", _mistral_large4, 2, 3),
    "axk2": Family("AXK2ForCausalLM", _latent("AXK2Config", n_group=_NONE, topk_group=_NONE, gated_norm_rank=4), 2, 2),
    "dots3_note": Family(
        "Dots3NoteForCausalLM",
        _latent(
            "Dots3NoteTextConfig",
            layer_types=["indexed_attention", "sliding_attention"],
            sliding_window=12,
            head_dim=24,
            shared_experts_intermediate_size=32,
            **_SLIDING,
        ),
        1,
        1,
    ),
    "minimax_m3_vl": Family("MiniMaxM3VLForCausalLM", _minimax_m3_vl, 0, 1),
}


def build(family: str, attention: str = "eager", dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Returns the family's model with seeded weights on the CPU, in eval mode.

    Weights are drawn larger than the published initialisation does, so that attention and selection depend on the
    input. As in ``from_pretrained``, buffers and the parameters that the model class keeps in fp32 are fp32.

    Args:
        family: a name of :data:`FAMILIES`.
        attention: "eager" or "sdpa", as ``attn_implementation``.
        dtype: of all other parameters.
        seed: of the weights.
    """
    import transformers

    torch.manual_seed(seed)
    one = FAMILIES[family]
    model = getattr(transformers, one.model)._from_config(one.config(), attn_implementation=attention)
    _draw(model)
    kept = model._keep_in_fp32_modules_strict or ()  # the other list counts in fp16 only
    for name, parameter in model.named_parameters():
        if not any(f".{part}." in f".{name}." for part in kept):
            parameter.data = parameter.data.to(dtype)
    return model.eval()


@torch.no_grad()
def _draw(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        last = name.rpartition(".")[2]
        if last == "scale":
            parameter.uniform_(0.5, 1.5)
        elif parameter.dim() >= 2:
            parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
        elif "norm" in name and last == "weight":
            parameter.normal_(1.0, 0.1)
        else:
            parameter.normal_(std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.randint(4, buffer.shape))


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Returns random ids of ordinary tokens, int64 ``[batch, length]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB - len(_SPECIAL), (batch, length), generator=generator)


# ---- what is routed


SDPA_MODES = (
    "training",
    "prefill",
    "prefill, left padded",
    "prefill, packed",
    "decode",
    "training, checkpointed, packed",
)
EAGER_MODES = (
    *("training", "training, checkpointed", "training, left padded", "training, packed"),
    *("prefill", "prefill, bf16", "prefill, no cache", "prefill, left padded", "prefill, right padded"),
    *("prefill, packed", "prefill, dynamic", "decode", "decode, left padded", "training, dynamic"),
    *("training, checkpointed, packed", "training, checkpointed, left padded"),
)
CHECKPOINTED = [name for name in EAGER_MODES if "checkpointed" in name]
ROUTED: dict[tuple[str, str, str], tuple[int, int]] = {
    # Its layers write a dictionary inside the checkpoint, which breaks the graph between index and attention.
    **{("mistral_large4", of, name): (1, 2) for of in ("eager", "sdpa") for name in CHECKPOINTED},
    # Graph breaks return the attention weights of its shared layer; checkpoints hide the mask of its pools.
    **{("glm5_next", "eager", name): (1, 1) for name in EAGER_MODES},
    **{("glm5_next", attention, name): (0, 1) for attention in ("eager", "sdpa") for name in CHECKPOINTED},
    # A plain window, which is not counted among its attentions, is routed too.
    **{("dots3_note", "eager", name): (1, 2) for name in EAGER_MODES},
}
"""How many (indexers, attentions) are routed where not all are, by family, implementation and mode."""


EACH_COMMIT: dict[str, tuple[tuple[str, str], ...]] = {
    "deepseek_v4": (("eager", "training, checkpointed"), ("eager", "decode")),
    "hy_v4": (("eager", "prefill, left padded"),),
    "deepseek_v32": (("sdpa", "training"), ("eager", "prefill, dynamic")),
    "glm_moe_dsa": (("sdpa", "decode"), ("eager", "training, left padded")),
    "glm5_next": (("eager", "prefill"),),
    "mistral_large4": (("sdpa", "prefill, packed"),),
    "axk2": (("eager", "training, left padded"),),
    "dots3_note": (("eager", "prefill, bf16"),),
    "minimax_m3_vl": (("eager", "training, checkpointed"),),
}
"""The implementation and mode of each family that every commit is tested with; the whole suite takes all of them."""


def modes(attention: str) -> tuple[str, ...]:
    """Returns the modes that are tested with an implementation of attention."""
    return EAGER_MODES if attention == "eager" else SDPA_MODES


def expected(family: str, attention: str, mode: str) -> tuple[int, int]:
    """Returns how many indexers and attentions are routed in a mode."""
    one = FAMILIES[family]
    return ROUTED.get((family, attention, mode), (one.indexers, one.attentions))


def by_result(family: str, attention: str) -> dict[tuple[int, int], list[str]]:
    """Returns the modes by how many indexers and attentions are routed in them, the most common first."""
    found: dict[tuple[int, int], list[str]] = {}
    for mode in modes(attention):
        found.setdefault(expected(family, attention, mode), []).append(mode)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))
