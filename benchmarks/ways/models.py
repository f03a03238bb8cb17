# SPDX-License-Identifier: Apache-2.0
"""The models that ``python -m benchmarks ways`` trains and serves, with seeded random weights."""

from __future__ import annotations

import dataclasses
import unittest.mock
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.byte_model import MLP, Attention
from examples.e79_model import E79Layer
from mhc_inductor.nn import HyperConnection, expand
from tests.formulas import laws, sparse_families
from tests.formulas.sparse_families import FAMILIES, VOCAB

_HEAVY, _SPARSE = "heavily_compressed_attention", "compressed_sparse_attention"
_WIDE_V4 = {"num_hidden_layers": 4, "layer_types": [_HEAVY, _SPARSE] * 2, "n_routed_experts": 16, "vocab_size": 32768}
_WIDE_V32 = {"num_hidden_layers": 1, "mlp_layer_types": ["dense"], "vocab_size": 32768}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and one batch of it.

    ``family``: of ``tests.formulas.sparse_families``, with the sizes of the tests, or "mhc" or "e79", written out in plain PyTorch.
    ``wide``: what differs from the published sizes, the defaults of transformers; such a model is measured alone, and not
    compared with fp32, which does not fit. ``toy``: the length on a CPU.
    """

    family: str
    batch: int = 2
    seq: int = 192
    toy: int = 36
    attention: str = "eager"
    wide: dict[str, Any] | None = None

    def tokens(self, device: torch.device, toy: bool, share: float, seed: int) -> Tensor:
        """Returns random token ids, int64 ``[batch, share * seq]``."""
        vocab = (self.wide or {}).get("vocab_size", VOCAB) if not toy else VOCAB
        size = (self.batch, int(share * (self.toy if toy else self.seq)))
        return torch.randint(3, vocab - 6, size, generator=torch.Generator().manual_seed(seed)).to(device)


MODELS = {
    "deepseek_v4": Model("deepseek_v4"),
    "deepseek_v32": Model("deepseek_v32", attention="sdpa"),
    "glm_moe_dsa": Model("glm_moe_dsa", attention="sdpa"),
    "hy_v4": Model("hy_v4"),
    "minimax_m3": Model("minimax_m3_vl"),
    "mhc": Model("mhc"),
    "e79": Model("e79", 4, 32, 8),
    "deepseek_v4 at 8192": Model("deepseek_v4", 1, 8192, wide=_WIDE_V4),
    "deepseek_v32 at 8192": Model("deepseek_v32", 1, 8192, attention="sdpa", wide=_WIDE_V32),
}


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
        self.embed, self.layers = nn.Embedding(VOCAB, dim), nn.ModuleList(layers)
        self.head = nn.Linear(dim, VOCAB, bias=False)

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


def _written(family: str, seq: int, dim: int = 128) -> nn.Module:
    if family == "e79":
        return WrittenLM(dim, [Residual(E79Layer(dim, 32))], 0)
    layers = [Written(dim, 4, sublayer) for sublayer in (Attention(dim, seq), MLP(dim))]
    for layer in layers:  # at the start they are nearly constant, which would hide an error
        nn.init.normal_(layer.bias, 0.0, 0.3)
        nn.init.normal_(layer.alpha, 1.0, 0.3)
    return WrittenLM(dim, [*layers], 4)


def missing(model: Model) -> str:
    """Returns why a model cannot be built here, or an empty string."""
    if model.family not in FAMILIES:
        return ""
    import transformers

    name = FAMILIES[model.family].model
    return "" if hasattr(transformers, name) else f"transformers {transformers.__version__} has no {name}"


def build(model: Model, device: torch.device, dtype: torch.dtype, toy: bool) -> nn.Module:
    """Returns the model with seeded weights in ``dtype``, but for those that its class keeps in fp32."""
    torch.manual_seed(0)
    with device:
        if model.family not in FAMILIES:
            return _written(model.family, model.toy if toy else model.seq).to(dtype)
        family = FAMILIES[model.family]
        if model.wide and not toy:
            config, wide = type(family.config()), model.wide
            family = dataclasses.replace(family, config=lambda: config(**wide))
        with unittest.mock.patch.dict(FAMILIES, {model.family: family}):
            return sparse_families.build(model.family, model.attention, dtype)
