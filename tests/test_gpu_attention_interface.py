# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="mhc_inductor" on a GPU: sinks, windows, chunks and packed sequences, 700 tokens, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhc_inductor
from tests.test_attention_interface import TWO, build

pytestmark = pytest.mark.gpu
S, WINDOW = 700, 128
SIZES = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 64}
SIZES["max_position_embeddings"] = 2048
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Llama4": {"attention_chunk_size": WINDOW},
    "GptOss": {"sliding_window": WINDOW, "layer_types": TWO},
}
PACKED = torch.cat([torch.arange(n) for n in (1, 64, 300, 335)])[None]


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    mhc_inductor.register_attention()


def made(family: str) -> nn.Module:
    model = build(family, **SIZES, **FAMILIES[family])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model.cuda()


def tokens(length: int = S) -> Tensor:
    return torch.randint(3, 512, (1, length), generator=torch.Generator().manual_seed(0)).cuda()


def step(model: nn.Module, call: Any, given: dict[str, Any]) -> list[Tensor]:
    """Returns logits and all gradients."""
    model.zero_grad()
    out = call(input_ids=tokens(), **given).logits
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_eager(family: str, packed: bool, compiled: bool) -> None:
    given = {"position_ids": PACKED.cuda(), "use_cache": False} if packed else {}
    model = made(family)
    wanted = step(model, model, given)
    model.set_attn_implementation("mhc_inductor")
    call = torch.compile(model, backend="mhc_inductor", dynamic=False) if compiled else model
    got = step(model, call, given)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-4 * max(1e-3, b.abs().max().item()))


@pytest.mark.parametrize("family", FAMILIES)
def test_generate(family: str) -> None:
    model = made(family)
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    wanted = model.generate(tokens(300), **options)
    model.set_attn_implementation("mhc_inductor")
    got = model.generate(tokens(300), **options)
    assert torch.equal(got.sequences, wanted.sequences)
    for a, b in zip(got.logits, wanted.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-4 * b.abs().max().item())
