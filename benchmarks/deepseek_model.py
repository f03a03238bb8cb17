# SPDX-License-Identifier: Apache-2.0
"""The model of the end-to-end benchmark: DeepSeek-V4 of transformers, unmodified, with random weights."""

from __future__ import annotations

import contextlib
import dataclasses
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The mHC parameters stay in fp32, as in DeepSeek-V4's checkpoints. The other modules that the model class lists as fp32
# are left in bf16: before transformers 5.18 its fp32 norms cannot feed bf16 linear layers.
FP32 = ("attn_hc", "ffn_hc", "hc_head")


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the model and its input: ``batch`` sequences of ``seq`` tokens. The default has 155 M parameters."""

    layers: int = 4
    dim: int = 2048
    heads: int = 16
    head_dim: int = 128
    lora: int = 512
    out_lora: int = 256
    index_heads: int = 8
    index_dim: int = 64
    index_topk: int = 64
    experts: int = 8
    expert_dim: int = 512
    vocab: int = 4096
    batch: int = 2
    seq: int = 2048
    out_groups: int = 4
    per_token: int = 2
    kinds: tuple[str, ...] | None = None


TINY = Size(2, 64, 2, 32, 32, 16, 2, 16, 8, 4, 32, 256, 2, 64)
"""For runs on a CPU. Its figures say nothing about a GPU."""
_KINDS = ("heavily_compressed_attention", "compressed_sparse_attention") * 2
PUBLISHED = Size(4, 4096, 64, 512, 1024, 1024, 64, 128, 512, 16, 2048, 32768, out_groups=8, per_token=6, kinds=_KINDS)
"""DeepSeek-V4-Flash's widths, with 4 layers and 16 experts."""


def config(size: Size) -> Any:
    """Returns the ``DeepseekV4Config`` of a size; transformers 5.17 and 5.23 have the same fields."""
    from transformers import DeepseekV4Config

    given = {"vocab_size": size.vocab, "hidden_size": size.dim, "num_hidden_layers": size.layers, "num_hash_layers": 1}
    given |= {"num_attention_heads": size.heads, "head_dim": size.head_dim, "q_lora_rank": size.lora}
    given |= {"o_groups": min(size.out_groups, size.heads), "o_lora_rank": size.out_lora}
    given |= {"index_n_heads": size.index_heads, "index_head_dim": size.index_dim, "index_topk": size.index_topk}
    given |= {"n_routed_experts": size.experts, "num_experts_per_tok": size.per_token}
    given |= {"moe_intermediate_size": size.expert_dim, "max_position_embeddings": max(4096, size.seq)}
    kinds = None if size.kinds is None else [*size.kinds]
    return DeepseekV4Config(**given, layer_types=kinds, use_cache=False)


def build(size: Size, device: torch.device, dtype: torch.dtype, seed: int = 0) -> torch.nn.Module:
    """Returns the model on ``device`` with seeded weights in ``dtype``; the mHC parameters are fp32."""
    from transformers import DeepseekV4ForCausalLM

    torch.manual_seed(seed)
    with device:  # a GPU draws the weights in a fraction of the time
        model = DeepseekV4ForCausalLM(config(size))
    for module in model.modules():
        # The published initialisation (gates 1, bias 0) would hide an error in either: draw both at random.
        if type(module).__name__ == "DeepseekV4HyperConnection":
            torch.nn.init.normal_(module.base, std=0.5)
            torch.nn.init.uniform_(module.scale, 0.5, 1.5)
    # A checkpoint would fill this buffer. Left at zero, it sends every token of a hash layer to expert 0.
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.randint(size.experts, buffer.shape, device=device))
    model.to(device=device, dtype=dtype)
    for name, parameter in model.named_parameters():
        if not set(FP32).isdisjoint(name.split(".")):
            parameter.data = parameter.data.float()
    return model


def tokens(size: Size, device: torch.device, seed: int = 0) -> Tensor:
    """Returns random token ids, int64 ``[batch, seq]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(size.vocab, (size.batch, size.seq), generator=generator).to(device)


def _trivial(self: Any, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, lead = self.hc_mult, hidden_streams.shape[:2]
    pre, post, comb = self.base.split([n, n, n * n])
    pre, post = (torch.sigmoid(v).expand(*lead, n) for v in (pre, post))
    comb = F.softmax(comb.view(n, n), dim=-1).expand(*lead, n, n)
    return 2 * post, comb, (pre.unsqueeze(-1) * hidden_streams).sum(dim=2).to(hidden_streams.dtype)


@contextlib.contextmanager
def trivial_coefficients() -> Iterator[None]:
    """Makes the coefficients independent of the streams: no norm, projection or Sinkhorn; collapse and mixing stay."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    with unittest.mock.patch.object(modeling.DeepseekV4HyperConnection, "forward", _trivial):
        yield
