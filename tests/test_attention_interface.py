# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="mhc_inductor" of transformers: values, gradients and generated tokens are those of "eager"."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

import mhc_inductor
from mhc_inductor.integrations.attention_interface import attention
from mhc_inductor.integrations.mask_ranges import ranges_of_keys
from tests.formulas import sparse_families

WINDOW = 5
B, S = 2, 14
TWO = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Llama4": {"attention_chunk_size": WINDOW, "no_rope_layers": [1, 0]}
    | {"num_local_experts": 2, "intermediate_size_mlp": 24},
    "Gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": None, "query_pre_attn_scalar": 3},
    "Gemma3": {"sliding_window": WINDOW, "layer_types": TWO, "query_pre_attn_scalar": 3},
    "Gemma4": {"sliding_window": WINDOW, "layer_types": TWO * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    | {"global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 32},
    "GptOss": {"sliding_window": WINDOW, "layer_types": TWO, "num_local_experts": 2, "num_experts_per_tok": 1},
}
"""A model without windows, sliding ones, a chunked one, one that cuts masks, and one with sinks; what its configuration adds to the sizes."""
CHUNKED = inspect.signature(masking_utils.create_chunked_causal_mask).parameters
PLAIN = ("Llama", "Mistral", "Llama4", "Gemma3", "Gemma4")
"""Those that sdpa runs too."""


def build(family: str, attention: str = "eager", **sizes: Any) -> nn.Module:
    """Returns a model of two layers with random weights, large enough that attention depends on the input."""
    names = [family + "Config", family + "TextConfig"]
    config = next(filter(None, (getattr(transformers, n, None) for n in reversed(names))))
    small = {32: "vocab_size hidden_size", 24: "intermediate_size", 8: "head_dim", 64: "max_position_embeddings"}
    small |= {4: "num_attention_heads", 2: "num_hidden_layers num_key_value_heads eos_token_id", 1: "bos_token_id"}
    given = sparse_families.sizes(small, pad_token_id=0)
    torch.manual_seed(0)
    of = config(**given | FAMILIES.get(family, {}) | sizes)
    model = getattr(transformers, family + "ForCausalLM")._from_config(of, attn_implementation=attention)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    mhc_inductor.register_attention()
    mhc_inductor.register_attention()  # once more changes nothing


def tokens() -> Tensor:
    return torch.randint(3, 32, (B, S), generator=torch.Generator().manual_seed(0))


def padding(*hidden: tuple[int, slice]) -> Tensor:
    mask = torch.ones(B, S, dtype=torch.long)
    for row, where in hidden:
        mask[row, where] = 0
    return mask


PACKED = torch.cat((torch.arange(5), torch.arange(9)))[None].expand(B, -1)
INPUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "padded left": {"attention_mask": padding((0, slice(0, 4)))},
    "padded with holes": {"attention_mask": padding((0, slice(6, 7)), (1, slice(10, None)))},
    "packed": {"position_ids": PACKED, "use_cache": False},
}


def step(model: nn.Module, call: Any, given: dict[str, Any]) -> list[Tensor]:
    """Returns the logits of the tokens that are no padding, and all gradients."""
    model.zero_grad()
    out = call(input_ids=tokens(), **given).logits
    out = out * given.get("attention_mask", torch.ones(B, S))[..., None]
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_close(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * max(1e-3, b.abs().max().item()))


# ---- ranges


def shown(ranges: Tensor, s_kv: int) -> Tensor:
    """Returns the mask ``[B, 1, S, S_kv]`` that ranges, and rows for keys if any, stand for."""
    s = ranges.shape[2] if ranges.shape[3] == 2 else ranges.shape[2] - s_kv
    key = torch.arange(s_kv)
    mask = (key >= ranges[:, :, :s, :1]) & (key < ranges[:, :, :s, 1:2])
    return mask if ranges.shape[3] == 2 else mask & (ranges[:, :, s:, 2] == 0)[:, :, None]


def packed(mask_function: Any) -> Any:
    segments = torch.tensor([[0] * 5 + [1] * 9, [0] * 14])
    positions = torch.stack((PACKED[0], torch.arange(S)))
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):
        return masking_utils.packed_sequence_compatibility_function(mask_function, positions, segments)
    return masking_utils.and_masks(mask_function, masking_utils.packed_sequence_mask_function(segments))


def _kinds() -> dict[str, tuple[Any, int | None]]:
    m = masking_utils
    left = torch.tensor([4, 0])
    none = torch.zeros(2, dtype=torch.long)
    kinds = {
        "causal": (m.causal_mask_function, None),
        "sliding": (m.sliding_window_causal_mask_function(WINDOW), WINDOW),
        "window of one": (m.sliding_window_causal_mask_function(1), 1),
        "chunked": (m.chunked_causal_mask_function(WINDOW, none), WINDOW),
        "bidirectional": (m.bidirectional_mask_function, None),
        "sliding both ways": (m.sliding_window_bidirectional_mask_function(3), 3),
    }
    kinds |= {f"packed {n}": (packed(f), size) for n, (f, size) in kinds.items() if "way" not in n and "bi" not in n}
    return kinds | {"chunked, padded": (m.chunked_causal_mask_function(WINDOW, left), WINDOW)}


@pytest.mark.parametrize("kind", _kinds())
def test_ranges_show_the_keys_of_the_mask(kind: str) -> None:
    function, size = _kinds()[kind]
    masks: list[Tensor | None] = [p["attention_mask"].bool() for p in INPUTS.values() if "attention_mask" in p]
    if kind == "chunked, padded":
        masks = [padding((0, slice(0, 4))).bool()]
    elif kind == "chunked":
        masks = [None, padding((1, slice(10, None))).bool()]
    elif kind.startswith("packed"):
        masks = [None]
    else:
        masks += [None, padding((0, slice(None))).bool()]
    places = [(S, S, 0, 0), (1, S, 13, 0), (1, WINDOW, 13, 9), (4, 20, 10, 0), (4, 8, 10, 6), (S, 20, 0, 0)]
    for mask in masks:
        for place in places[: 1 if kind.startswith("packed") else None]:
            given = dict(zip(("q_length", "kv_length", "q_offset", "kv_offset"), place, strict=True))
            given |= {"batch_size": B, "mask_function": function, "attention_mask": mask, "local_size": size}
            expected = masking_utils.sdpa_mask(**given, allow_is_causal_skip=False)
            assert torch.equal(shown(ranges_of_keys(**given), given["kv_length"]), expected), (kind, mask, given)


def test_no_mask_over_queries_and_keys_is_built() -> None:
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            self.elements = max([self.elements, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
            return out

    s, holes = 512, torch.ones(B, 512, dtype=torch.bool)
    holes[:, 7] = False
    with Largest() as largest:
        for mask in (None, holes):
            function = masking_utils.sliding_window_causal_mask_function(64)
            ranges_of_keys(B, s, s, mask_function=function, attention_mask=mask, local_size=64)
    assert 0 < largest.elements < B * s * 16


# ---- models


@pytest.mark.parametrize(("family", "eager"), [*((f, "eager") for f in FAMILIES), *((f, "sdpa") for f in PLAIN)])
def test_values_and_gradients_are_those_of_eager_and_sdpa(family: str, eager: str) -> None:
    model = build(family, eager).train(eager == "eager")
    for given in INPUTS.values():
        expected = step(model, model, given)
        model.set_attn_implementation("mhc_inductor")
        assert_close(step(model, model, given), expected)
        model.set_attn_implementation(eager)


@pytest.mark.parametrize("given", ["padded with holes", "packed"])
@pytest.mark.parametrize("family", ["Mistral", "Llama4", "GptOss"])
def test_compiled_in_one_graph(family: str, given: str, quick: None) -> None:
    model = build(family).train()
    expected = step(model, model, INPUTS[given])
    model.set_attn_implementation("mhc_inductor")
    compiled = torch.compile(model, backend="mhc_inductor", fullgraph=True)
    assert_close(step(model, compiled, INPUTS[given]), expected)


@torch.no_grad()
@pytest.mark.parametrize(("family", "hidden"), [("Mistral", True), ("Llama4", False)])
def test_compiled_to_code(family: str, hidden: bool) -> None:
    """Llama 4 without padding: the code that finds where packed sequences begin, under a chunked mask."""
    torch._dynamo.reset()
    model = build(family)
    given = {"input_ids": tokens(), **({"attention_mask": padding((0, slice(2, 4)))} if hidden else {})}
    expected = model(**given).logits[:, WINDOW + 4 :]
    model.set_attn_implementation("mhc_inductor")
    compiled = torch.compile(model, backend="mhc_inductor", fullgraph=True, dynamic=False)
    assert_close([compiled(**given).logits[:, WINDOW + 4 :]], [expected])


def test_bfloat16_is_as_exact_as_eager() -> None:
    exact = build("GptOss")
    expected = exact(input_ids=tokens()).logits
    model = copy.deepcopy(exact).bfloat16()
    eager = model(input_ids=tokens()).logits
    model.set_attn_implementation("mhc_inductor")
    errors = [(out.float() - expected).abs().max().item() for out in (model(input_ids=tokens()).logits, eager)]
    assert errors[0] <= 2 * errors[1]


def test_checkpointed() -> None:
    model = build("Mistral", "mhc_inductor").train()
    expected = step(model, model, INPUTS["padded with holes"])
    model.gradient_checkpointing_enable()
    assert_close(step(model, model, INPUTS["padded with holes"]), expected)


def test_rows_without_keys_are_zero_and_finite() -> None:
    given = {"attention_mask": padding((0, slice(None)))}
    model = build("Mistral", "mhc_inductor").train()
    assert all(t.isfinite().all() for t in step(model, model, given))
    out = []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: out.append(args[0]))
    model(input_ids=tokens(), **given)
    assert not out[0][0].any() and out[0][1].any()


# ---- generate


def generated(model: nn.Module, new: int = 10, **options: Any) -> Any:
    mask = padding((0, slice(0, 4)))
    return model.generate(
        input_ids=tokens() * mask,
        attention_mask=mask,
        min_new_tokens=new,
        max_new_tokens=new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens_are_those_of_eager(family: str, cache: str | None) -> None:
    if family == "Llama4" and "block_sequence_ids" not in CHUNKED:
        cache = None  # transformers 5.17 fails on a static cache with chunks, whatever the implementation
    model = build(family)
    expected = generated(model, cache_implementation=cache)
    model.set_attn_implementation("mhc_inductor")
    got = generated(model, cache_implementation=cache)
    assert torch.equal(got.sequences, expected.sequences)
    assert_close(list(got.logits), list(expected.logits))


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_compiles_no_more_graphs_than_with_sdpa(cache: str | None) -> None:
    model, graphs, found = build("Mistral", num_hidden_layers=1), {}, {}
    expected = generated(model)
    forward = model.forward
    for name in ("sdpa", "mhc_inductor"):
        model.set_attn_implementation(name)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model.forward = torch.compile(forward, backend="eager", fullgraph=True)  # what Dynamo compiles
        found[name] = generated(model, cache_implementation=cache, disable_compile=True)
        graphs[name] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch.equal(found["mhc_inductor"].sequences, expected.sequences)
    assert 0 < graphs["mhc_inductor"] <= graphs["sdpa"]


# ---- other ways to say which keys count


def causal_with_a_hole() -> Tensor:
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    mask[4:, 3] = False
    return mask.expand(B, 1, S, S)


@pytest.mark.parametrize("fill", [None, -torch.inf, torch.finfo(torch.float32).min])
def test_a_given_mask_is_read(fill: float | None) -> None:
    model, mask = build("Llama"), causal_with_a_hole()
    expected = model(input_ids=tokens(), attention_mask=torch.where(mask, 0.0, torch.finfo(torch.float32).min)).logits
    model.set_attn_implementation("mhc_inductor")
    given = mask if fill is None else torch.where(mask, 0.0, fill)
    assert_close([model(input_ids=tokens(), attention_mask=given).logits], [expected])


def test_sequences_packed_by_boundaries() -> None:
    model = build("Mistral", "mhc_inductor")
    given = {"input_ids": tokens()[:1], "use_cache": False}
    ends = torch.tensor([0, 5, 14], dtype=torch.int32)
    expected = model(**given, position_ids=PACKED[:1]).logits
    sequences = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    assert_close([model(**given, position_ids=PACKED[:1], **sequences).logits], [expected])
    # Positions that never start again: the boundaries alone separate the sequences.
    query, key = torch.randn(1, 4, S, 8), torch.randn(1, 2, S, 8)
    out, _ = attention(model, query, key, key, None, is_causal=True, cu_seq_lens_q=ends)
    for part in (slice(0, 5), slice(5, 14)):
        parts = (t[:, :, part] for t in (query, key, key))
        alone = nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        assert_close([out[:, part].transpose(1, 2)], [alone])


def test_encoders_and_cross_attention() -> None:
    sizes = {"vocab_size": 32, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    layers = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = transformers.BartConfig(**sizes, **layers)
    model = transformers.BartForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    given = {"attention_mask": INPUTS["padded with holes"]["attention_mask"], "num_beams": 2, "max_new_tokens": 4}
    expected = model.generate(input_ids=tokens(), **given)
    logits = model(input_ids=tokens(), decoder_input_ids=tokens()[:, :6]).logits
    model.set_attn_implementation("mhc_inductor")
    assert torch.equal(model.generate(input_ids=tokens(), **given), expected)
    assert_close([model(input_ids=tokens(), decoder_input_ids=tokens()[:, :6]).logits], [logits])


# ---- what raises


@pytest.mark.parametrize(
    ("option", "use"),
    [
        ({"dropout": 0.1}, "sdpa"),
        ({"softcap": 50.0}, "eager"),
        ({"position_bias": torch.zeros(1)}, "sdpa"),
        ({"head_mask": torch.ones(4)}, "eager"),
        ({"output_attentions": True}, "eager"),
        ({"cache": object()}, "sdpa"),
        ({"block_indices": torch.zeros(1)}, "sdpa"),
        ({"cu_seq_lens_q": torch.tensor([0, 2])}, "flash_attention_2"),
        ({"attention_mask": torch.ones(2, 4, 3, 3, dtype=torch.bool)}, "sdpa"),
        ({"attention_mask": torch.ones(2, 1, 3, 5, dtype=torch.int32)}, "eager"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_an_option_that_is_not_supported_names_what_to_use(option: dict[str, Any], use: str) -> None:
    query = torch.randn(2, 4, 3, 8)
    with pytest.raises(ValueError, match=f'"mhc_inductor" does not support .*attn_implementation=.*"{use}"') as error:
        attention(nn.Identity(), query, query, query, **{"attention_mask": None} | option)
    if "attention_mask" not in option:
        assert next(iter(option)) in str(error.value).replace("paged caches", "cache")


def test_a_model_that_cuts_the_mask_raises_where_that_drops_padding() -> None:
    """Gemma 4 runs the layers that share keys for the last token alone, and cuts their masks to its row."""
    model = build("Gemma4", "mhc_inductor")
    given = {"input_ids": tokens(), **INPUTS["padded left"]}
    assert_close([model(**given, logits_to_keep=1).logits], [model(**given).logits[:, -1:]])
    holes = INPUTS["padded with holes"]["attention_mask"].bool()
    last, key = ranges_of_keys(B, S, S, attention_mask=holes)[:, :, -1:], torch.randn(B, 2, S, 8)
    with pytest.raises(ValueError, match=r"change the mask, which became \[2, 1, 1, 3\]"):
        attention(model, torch.randn(B, 4, 1, 8), key, key, last)


def test_models_raise_what_their_options_need() -> None:
    given = {"input_ids": tokens()}
    with pytest.raises(ValueError, match=r'softcap; use attn_implementation="eager"'):
        build("Gemma2", "mhc_inductor", attn_logit_softcapping=30.0)(**given)
    model = build("Llama", "mhc_inductor", attention_dropout=0.1)
    assert model(**given).logits.isfinite().all()  # without dropout outside of training
    with pytest.raises(ValueError, match="dropout"):
        model.train()(**given)
    with pytest.raises(ValueError, match=r'output_attentions.*"eager"'):
        model.eval()(**given, output_attentions=True)


@pytest.mark.parametrize("indirect", [False, True])
def test_masks_that_are_no_range_name_what_to_use(indirect: bool) -> None:
    def own(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q != k

    m, config, embeds = masking_utils, build("Llama", "mhc_inductor").config, torch.zeros(B, S, 32)
    overlays = {"or_mask_function": own}, {"and_mask_function": own}, {"block_sequence_ids": torch.zeros(B, S).long()}
    for overlay in overlays:
        with pytest.raises(ValueError, match=r'or_mask.*"eager" or "sdpa"'):
            m.create_causal_mask(config, embeds, None, None, **overlay)
    with pytest.raises(ValueError, match="own"):
        ranges_of_keys(B, S, S, mask_function=m.and_masks(m.causal_mask_function, own) if indirect else own)
    with pytest.raises(ValueError, match="combine the mask"):
        m.create_causal_mask(config, embeds, None, None, allow_is_causal_skip=False)


def test_transformers_is_imported_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import mhc_inductor, sys; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="needs transformers: pip install"):
        mhc_inductor.register_attention()
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="5.16.1"))
    with pytest.raises(ImportError, match=r"5\.17 or newer, got 5\.16\.1"):
        mhc_inductor.register_attention()
