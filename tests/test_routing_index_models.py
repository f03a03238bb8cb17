# SPDX-License-Identifier: Apache-2.0
"""The indexers of transformers' models are routed: masks, padding, packing, sizes and modes; outputs as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.formulas.indexers import FAMILIES, HEADS, TOPK, Indexer, inputs
from tests.tools.capture import Captured, reasons, run

pytest.importorskip("transformers.models.deepseek_v4")
pytest.importorskip("transformers.models.glm5_next")

OWN_MASK = ("deepseek_v4", "glm5_next")
"""Models that compute their masks in the indexer."""
GLM = "glm5_next"


def routed(got: Captured, keys: int, family: str = "") -> None:
    """Asserts that one indexer is routed and no tensor with an element per head, query and key is left.

    GLM-5-Next's breaks the graph before it returns: its keys leave in an order.
    """
    op = "index_scores" if family == GLM else "index_topk"
    assert [r.op for r in got.report.routed] == [op], reasons(got)
    assert got.ops[op] == 1 and not got.report.problems
    for gm in got.graphs:
        for node in gm.graph.nodes:
            shape = [s for s in getattr(node.meta.get("example_value"), "shape", ()) if isinstance(s, int)]
            assert not (len(shape) == 4 and HEADS in shape and shape[-1] == keys), node


def chosen(fn: Any, x: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns what ``fn`` gives in eager, and the scores that it chose from."""
    scores: list[Tensor] = []
    own = torch.Tensor.topk

    def topk(self: Tensor, *args: Any, **options: Any) -> Any:
        scores.append(self.detach())
        return own(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", topk)
        out = fn(*x)
    return out, scores[0]


def same(got: Captured, fn: Any, x: list[Tensor], family: str, tolerance: float = 1e-5) -> None:
    """Asserts that each query has keys with the scores of those that eager chooses, distinct ones."""
    want, scores = chosen(fn, x)
    (mine,) = got.outputs
    assert mine.shape == want.shape and mine.dtype == want.dtype
    if family == GLM:
        if len(x) > 3 or tolerance > 1e-3:  # padded: pools start at the first real key
            equal = (mine.sort(-1).values == want.sort(-1).values).all(-1)
            assert float(equal.float().mean()) >= (1.0 if tolerance < 1e-3 else 0.5)
            return
        mine, want = (i[..., : TOPK // 2 * 2 : 2] // 2 for i in (mine, want))  # pools of two keys
    if family not in OWN_MASK:
        assert int(mine.min()) >= 0 and bool((mine.sort(-1).values.diff(dim=-1) > 0).all())
    a, b = (
        scores.double().gather(-1, i.long().clamp_min(0)).masked_fill(i < 0, -torch.inf).sort(-1).values
        for i in (mine, want)
    )
    assert torch.equal(a.isfinite(), b.isfinite())
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b[b > -1e30].abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("padded", [False, True])
def test_masks(family: str, kind: str, padded: bool) -> None:
    if family in OWN_MASK and kind == "bool":
        pytest.skip("has a mask of its own")
    x = inputs(padded=padded)
    model = Indexer(family, kind)
    got = run(model, x, [*model.named_parameters()])
    routed(got, 24, family)
    same(got, model, x, family)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != GLM])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_packed_positions(family: str, kind: str) -> None:
    if family in OWN_MASK and kind == "bool":
        pytest.skip("has a mask of its own")
    x = inputs(packed=True)
    model = Indexer(family, kind, packed=True)
    got = run(model, x, grad=False)
    routed(got, 24, family)
    same(got, model, x, family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 2])
def test_dynamic_sizes(family: str, batch: int) -> None:
    x = inputs(B=batch)
    model = Indexer(family)
    symbolic = [(i, 1) for i in range(3)] + ([(i, 0) for i in range(3)] if batch > 1 else [])
    # A graph break of GLM-5-Next forgets the marks.
    dynamic, symbolic = (True, []) if family == GLM else (None, symbolic)
    got = run(model, x, grad=False, dynamic=dynamic, symbolic=symbolic)
    routed(got, 24, family)
    same(got, model, x, family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["bf16", "autocast"])
def test_bf16(family: str, how: str) -> None:
    model = Indexer(family)
    x = inputs()
    if how == "bf16":
        model, x = model.bfloat16(), inputs(dtype=torch.bfloat16)

    def fn(*given: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
            return model(*given)

    got = run(fn, x, grad=False)
    routed(got, 24, family)
    same(got, fn, x, family, 1e-5 if how == "bf16" else 0.05)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in OWN_MASK])
def test_a_bool_mask_that_the_caller_passes(family: str) -> None:
    model = Indexer(family, "bool")
    own, x = model.inner, inputs()
    seen = torch.rand(2, 24, 24, generator=torch.Generator().manual_seed(2)) < 0.5
    rope = torch.randn(2, 24, 8)

    def fn(hidden: Tensor, lora: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        given = (hidden, (rope, rope)) if family == "mistral_large4" else (hidden, lora, (rope, rope))
        return own(*given, seen, positions).sort(-1).values

    got = run(fn, [*x, seen], grad=False)
    routed(got, 24, family)
    same(got, fn, [*x, seen], family)


def whole(family: str) -> torch.nn.Module:
    """Returns a model of two layers."""
    sizes = dict(vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                 q_lora_rank=16, index_n_heads=8, index_head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
                 max_position_embeddings=128)  # fmt: skip
    if family == "deepseek_v32":
        from transformers.models.deepseek_v32 import DeepseekV32Config, DeepseekV32Model

        config = DeepseekV32Config(
            **sizes, intermediate_size=32, num_key_value_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8,
            qk_nope_head_dim=8, index_topk=4, n_group=1, topk_group=1, first_k_dense_replace=2,
        )  # fmt: skip
        made = DeepseekV32Model
    else:
        from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4Model

        config = DeepseekV4Config(
            **sizes, head_dim=16, index_topk=2, sliding_window=4, o_groups=2, o_lora_rank=8, partial_rotary_factor=0.5,
            layer_types=["compressed_sparse_attention"] * 2,
        )  # fmt: skip
        made = DeepseekV4Model
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return made(config).eval()


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
@pytest.mark.parametrize("padded", [False, True])
def test_whole_models(family: str, padded: bool) -> None:
    model = whole(family)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, :5] = 0

    def fn(ids: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = model(input_ids=ids, attention_mask=mask if padded else None, use_cache=False).last_hidden_state
        return out

    got = run(fn, [ids, mask], grad=False)
    ours = [r for r in got.report.routed if r.op == "index_topk"]
    assert len(ours) == 2 and not got.report.problems, reasons(got)
    assert not [m for m in got.report.near_misses if m.op == "index_topk"]
    prefix = family == "deepseek_v4" or not padded
    assert all(("first keys of each query" in r.detail) == prefix for r in ours), ours
    want = fn(ids, mask)
    real = mask.bool() if padded else torch.ones_like(mask, dtype=torch.bool)
    torch.testing.assert_close(got.outputs[0][real], want[real], rtol=1e-4, atol=1e-4)
