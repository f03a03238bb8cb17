"""The models that ``python -m benchmarks ways`` trains and serves, with seeded random weights."""

from __future__ import annotations

import dataclasses
import unittest.mock
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.byte_model import MLP, Attention
from examples.e79_model import E79Layer
from mhc_inductor.nn import HyperConnection, expand
from tests import laws, sparse_families

_LATENT = sparse_families.LATENT | {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "index_topk": 48,
    "index_head_dim": 64,
    "num_hidden_layers": 2,
    "mlp_layer_types": ["dense", "sparse"],
}
_SHARED = _LATENT | {"indexer_types": ["full", "shared"]}
_COMPRESSED = ["compressed_sparse_attention", "heavily_compressed_attention"]
_V4 = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "layer_types": _COMPRESSED,
    "compress_rates": dict(zip(_COMPRESSED, (4, 16), strict=True)),
    "sliding_window": 32,
    "num_attention_heads": 8,
    "head_dim": 64,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "num_hash_layers": 1,
    "max_position_embeddings": 512,
}
_M3 = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 64,
    "dense_intermediate_size": 256,
    "shared_intermediate_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse"],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rotary_dim": 32,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "index_n_heads": 2,
    "index_head_dim": 64,
    "index_block_size": 16,
    "index_topk_blocks": 3,
    "index_local_blocks": 1,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE_V4 = {
    "vocab_size": 32768,
    "num_hidden_layers": 4,
    "layer_types": _COMPRESSED[::-1] + _COMPRESSED,
    "mlp_layer_types": ["hash_moe"] + ["moe"] * 3,
    "n_routed_experts": 16,
    "max_position_embeddings": 16384,
}
_WIDE_V32 = {"vocab_size": 32768, "num_hidden_layers": 1, "mlp_layer_types": ["dense"], "max_position_embeddings": 16384}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and one batch of it.

    ``family``: of ``tests.sparse_families``, with ``sizes`` for its configuration; or "mhc" or "e79", written out in
    plain PyTorch with ``sizes`` for :func:`_written`. ``wide``: published widths, measured alone, and not compared with
    fp32, which does not fit. ``toy``: sizes for a CPU; None takes those of the tests.
    """

    family: str
    batch: int
    seq: int
    sizes: dict[str, Any]
    toy: tuple[int, dict[str, Any] | None] = (36, None)
    attention: str = "eager"
    wide: bool = False


MODELS = {
    "deepseek_v4": Model("deepseek_v4", 2, 192, _V4),
    "deepseek_v32": Model("deepseek_v32", 2, 192, _LATENT, attention="sdpa"),
    "glm_moe_dsa": Model("glm_moe_dsa", 2, 192, _SHARED, attention="sdpa"),
    "hy_v4": Model("hy_v4", 2, 192, _SHARED),
    "minimax_m3": Model("minimax_m3_vl", 2, 192, _M3),
    "mhc": Model("mhc", 2, 192, {"dim": 256, "layers": 2}, (36, {"dim": 32, "layers": 1})),
    "e79": Model("e79", 4, 32, {"dim": 256, "layers": 2, "n": 32}, (8, {"dim": 32, "layers": 1, "n": 8})),
    "deepseek_v4 at 8192": Model("deepseek_v4", 1, 8192, _WIDE_V4, wide=True),
    "deepseek_v32 at 8192": Model("deepseek_v32", 1, 8192, _WIDE_V32, attention="sdpa", wide=True),
}
"""Published widths are the defaults of the configurations of transformers."""


class Out(NamedTuple):
    logits: Tensor
    loss: Tensor | None


class Written(HyperConnection):
    """A hyper-connection written out in PyTorch: the parameters of this package's module, none of its ops."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        p = {name: getattr(self, name).float() for name in ("phi", "alpha", "bias")}
        h_in, h_post, mixing = laws.pre(x.float(), p)
        return laws.post(x.float(), self.sublayer(h_in.to(x.dtype)).float(), h_post, mixing).to(x.dtype)


class Residual(nn.Module):
    def __init__(self, sublayer: nn.Module) -> None:
        super().__init__()
        self.sublayer = sublayer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.sublayer(F.rms_norm(x, x.shape[-1:]))


class WrittenLM(nn.Module):
    """A language model of ``layers``, on ``n`` residual streams or on none (0), called as those of transformers are."""

    def __init__(self, dim: int, layers: list[nn.Module], n: int) -> None:
        super().__init__()
        self.n, self.reentrant = n, None
        self.embed, self.layers = nn.Embedding(sparse_families.VOCAB, dim), nn.ModuleList(layers)
        self.head = nn.Linear(dim, sparse_families.VOCAB, bias=False)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        self.reentrant = gradient_checkpointing_kwargs["use_reentrant"]

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, use_cache: bool = False) -> Out:
        x = self.embed(input_ids)
        x = expand(x, self.n) if self.n else x
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        x = x.mean(-2) if self.n else x
        logits = self.head(F.rms_norm(x, x.shape[-1:])).float()
        wanted = None if labels is None else labels[:, 1:].flatten()
        return Out(logits, None if wanted is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), wanted))


def _written(dim: int, layers: int, seq: int, n: int = 0) -> nn.Module:
    """Returns a model with E79 states of n x n, or with mHC where n is 0."""
    made: list[nn.Module] = []
    for _ in range(layers):
        if n:
            made += [Residual(E79Layer(dim, n))]
        else:
            made += [Written(dim, 4, Attention(dim, seq)), Written(dim, 4, MLP(dim))]
    for name, p in (named for layer in made for named in layer.named_parameters()):
        if name in ("bias", "alpha"):  # those of mHC: nearly zero at the start, which would hide an error
            nn.init.normal_(p, 1.0 if name == "alpha" else 0.0, 0.3)
    return WrittenLM(dim, made, 0 if n else 4)


def missing(model: Model) -> str:
    """Returns why a model cannot be built here, or an empty string."""
    if model.family not in sparse_families.FAMILIES:
        return ""
    import transformers

    name = sparse_families.FAMILIES[model.family].model
    return "" if hasattr(transformers, name) else f"transformers {transformers.__version__} has no {name}"


def build(model: Model, device: torch.device, dtype: torch.dtype, toy: bool) -> nn.Module:
    """Returns the model with seeded weights in ``dtype``, but for those that its class keeps in fp32."""
    torch.manual_seed(0)
    seq, sizes = model.toy if toy else (model.seq, model.sizes)
    with device:
        if model.family not in sparse_families.FAMILIES:
            return _written(seq=seq, **(sizes or {})).to(dtype)
        family = sparse_families.FAMILIES[model.family]
        if sizes is not None:
            config: Callable[[], Any] = type(family.config())
            family = dataclasses.replace(family, config=lambda: config(**sizes))
        with unittest.mock.patch.dict(sparse_families.FAMILIES, {model.family: family}):
            return sparse_families.build(model.family, model.attention, dtype)


def tokens(model: Model, device: torch.device, toy: bool, share: float, seed: int) -> Tensor:
    """Returns random token ids, int64 ``[batch, share * seq]``."""
    length = int(share * (model.toy[0] if toy else model.seq))
    vocab = model.sizes.get("vocab_size", sparse_families.VOCAB) if not toy else sparse_families.VOCAB
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (model.batch, length), generator=generator).to(device)
