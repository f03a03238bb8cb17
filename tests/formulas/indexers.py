# SPDX-License-Identifier: Apache-2.0
"""The indexers of transformers' models at toy sizes, each as a module of (hidden states, positions, padding)."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FAMILIES = {
    "deepseek_v32": "DeepseekV32Indexer",
    "glm_moe_dsa": "GlmMoeDsaIndexer",
    "hy_v4": "HYV4Indexer",
    "axk2": "AXK2Indexer",
    "dots3_note": "Dots3NoteTextIndexer",
    "mistral_large4": "MistralLarge4TextIndexer",
    "deepseek_v4": "DeepseekV4Indexer",
    "glm5_next": "Glm5NextTextIndexer",
}
HIDDEN, LORA, HEADS, WIDTH, TOPK = 24, 16, 4, 16, 6


def _config() -> Any:
    return types.SimpleNamespace(
        hidden_size=HIDDEN,
        q_lora_rank=LORA,
        index_n_heads=HEADS,
        index_head_dim=WIDTH,
        index_topk=TOPK,
        qk_rope_head_dim=8,
        rms_norm_eps=1e-6,
        index_kpool=2,
        index_kpool_always_select_tail=True,
        no_rope_layers=[1],
    )


def causal(positions: Tensor, padding: Tensor | None, packed: bool) -> Tensor:
    """Returns the mask [B, 1, S, S] of visible keys, as transformers makes it."""
    S = positions.shape[1]
    at = torch.arange(S, device=positions.device)
    seen = at[None, None, None, :] <= at[None, None, :, None]
    if packed:
        parts = torch.cumsum(torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1, -1)
        seen = seen & (parts[:, None, :, None] == parts[:, None, None, :])
    if padding is not None:
        seen = seen & padding[:, None, None, :].bool()
    return seen.expand(positions.shape[0], -1, -1, -1)


def as_float(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the mask as eager attention adds it."""
    low = torch.finfo(dtype).min
    return torch.where(seen, torch.tensor(0.0, dtype=dtype, device=seen.device), low)


class Indexer(nn.Module):
    """One indexer with its mask.

    Args:
        family: a key of FAMILIES.
        kind: "bool" or "float", what the mask is made of.
        packed: whether the mask keeps packed sequences apart.
    """

    def __init__(self, family: str, kind: str = "float", packed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        make: Callable[..., nn.Module] = getattr(module, FAMILIES[family])
        self.family, self.kind, self.packed = family, kind, packed
        if family == "deepseek_v4":
            found = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
            config = found.DeepseekV4Config(
                hidden_size=HIDDEN, q_lora_rank=LORA, index_n_heads=HEADS, index_head_dim=WIDTH, head_dim=WIDTH,
                index_topk=3, num_hidden_layers=2, num_attention_heads=2, partial_rotary_factor=0.5, vocab_size=32,
            )  # fmt: skip
            self.inner = make(config)
        elif family == "glm5_next":
            self.inner = make(_config(), 0)
        else:
            self.inner = make(_config(), layer_idx=0)
        for p in self.parameters():
            nn.init.normal_(p, std=0.5)

    def forward(self, *given: Tensor) -> Tensor:
        """Returns the choice as a set: by position."""
        return self._chosen(*given).sort(-1).values

    def _chosen(self, hidden: Tensor, lora: Tensor, positions: Tensor, padding: Tensor | None = None) -> Tensor:
        """Returns the chosen keys."""
        if self.family == "deepseek_v4":
            return self.inner(hidden, lora, positions, None, 0)
        if self.family == "glm5_next":
            seen = torch.ones_like(positions) if padding is None else padding
            return self.inner(hidden, lora, seen.bool(), None)
        mask = causal(positions, padding, self.packed)
        if self.kind == "float":
            mask = as_float(mask, hidden.dtype)
        angle = positions[..., None].float() * torch.tensor([1.0, 0.1, 0.01, 0.001], device=hidden.device)
        angle = torch.cat([angle, angle], -1)
        rope = (angle.cos().to(hidden.dtype), angle.sin().to(hidden.dtype))
        if self.family in ("glm_moe_dsa", "dots3_note", "mistral_large4"):
            rope = (rope[0], rope[1])
        given = (hidden, rope) if self.family == "mistral_large4" else (hidden, lora, rope)
        return self.inner(*given, mask[:, 0], positions)


def inputs(
    B: int = 2, S: int = 24, dtype: torch.dtype = torch.float32, padded: bool = False, packed: bool = False
) -> list[Tensor]:
    """Returns hidden states, the latent of the queries, positions, and with ``padded`` a left-padded mask."""
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(B, S, HIDDEN, generator=g).to(dtype)
    lora = torch.randn(B, S, LORA, generator=g).to(dtype)
    positions = torch.arange(S).expand(B, S).contiguous()
    if packed:
        positions = torch.cat([torch.arange(S // 3), torch.arange(S - S // 3)]).expand(B, S).contiguous()
    given = [hidden, lora, positions]
    if padded:
        mask = torch.ones(B, S, dtype=torch.long)
        mask[1:, : S // 3] = 0
        given.append(mask)
    return given
