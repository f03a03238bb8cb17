# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of models with sparse attention measures: models, cases, their bars and goals in ms and GiB.

The models are DeepSeek-V4 and DeepSeek-V3.2 of transformers with random weights. Source of the bars: the project's
survey on one NVIDIA H200 (torch 2.11, triton 3.6), bf16, batch by tokens as named. Absolute figures count only on such
a GPU; on another device compare ratios within one run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from . import deepseek_model
from .processes import Row, against

V4, V32 = "deepseek_v4", "deepseek_v32"
V4_WIDE, V32_WIDE = f"{V4}_published", f"{V32}_published"
FORWARD, TRAINING, CHECKPOINTED = "forward", "training", "checkpointed"
EAGER, COMPILE, TRIVIAL, OURS = "eager", "torch.compile", "trivial", "mhc_inductor"
OURS_GRAPHS, COMPILE_GRAPHS = f"{OURS}+graphs", f"{COMPILE}+graphs"
"""The same compilers with ``mode="reduce-overhead"``: the device is given whole CUDA graphs, not single launches."""
OURS_LAYERS = f"{OURS}+layers"
"""Each layer is compiled alone, so that masks are arguments."""
VARIANTS = (OURS, OURS_LAYERS, COMPILE, OURS_GRAPHS, COMPILE_GRAPHS, EAGER)
"""In the order in which they are measured: a budget that ends cuts off eager first, then CUDA graphs."""
LAYERS_BAR = 1.5
"""The longest that a model takes layer by layer, as a multiple of the whole model's time in the same run."""
ERROR_FACTOR = 2.0
"""Largest error of ours against fp32, as a multiple of the largest of the others in the same run."""
VOCAB, TOY_VOCAB = 4096, 256


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of one model.

    ``eager``: also run eagerly; ``checked``: also compared with eager fp32; ``graphs``: also run in CUDA graphs; ``layers``:
    also compiled layer by layer; ``peer``: run by torch.compile.

    Bars and goals are ms, peak GiB, and how many times torch.compile's time of the same run.
    """

    model: str
    batch: int
    seq: int
    part: str
    eager: bool = False
    checked: bool = False
    graphs: bool = field(default=False, kw_only=True)
    layers: bool = field(default=False, kw_only=True)
    peer: bool = field(default=True, kw_only=True)
    bar_ms: float | None = None
    goal_ms: float | None = None
    bar_gib: float | None = None
    goal_gib: float | None = None
    bar_times: float | None = None
    goal_times: float | None = None

    def takes(self, variant: str) -> bool:
        """Returns whether the case is run in this way."""
        only = {EAGER: self.eager, OURS_GRAPHS: self.graphs, COMPILE_GRAPHS: self.graphs, OURS_LAYERS: self.layers}
        return {**only, COMPILE: self.peer}.get(variant, True)

    @property
    def name(self) -> str:
        return f"{self.model}-{self.batch}x{self.seq}-{self.part}"


CASES = (
    Case(V4, 2, 2048, FORWARD, True, True, 6.3, 5.6, graphs=True),
    Case(V4, 2, 2048, TRAINING, True, True, 17.5, 15.5, goal_gib=4, graphs=True),
    Case(V4, 1, 8192, FORWARD, True, True, 13.5, 11.5, bar_gib=3, layers=True),
    Case(V32, 1, 4096, FORWARD, True, True, 7, 6),
    Case(V32, 1, 4096, TRAINING, True, True, 19, 17),
    Case(V32, 1, 8192, FORWARD, False, True, 18, 14, bar_gib=3),
    Case(V32, 1, 8192, TRAINING, False, False, 57, 45, bar_gib=7, goal_gib=5),
    Case(V32, 1, 16384, FORWARD, bar_times=4, goal_times=6),
    Case(V32, 1, 16384, TRAINING, bar_times=2.2, goal_times=3),
    Case(V32, 1, 32768, FORWARD),
    Case(V32, 1, 32768, TRAINING),
    Case(V4, 1, 8192, TRAINING, layers=True),
    # Bars and goals of the published widths are for an H100.
    Case(V4_WIDE, 1, 8192, FORWARD, bar_ms=47, goal_ms=43, layers=True),
    # torch.compile takes minutes to compile it.
    Case(V4_WIDE, 1, 8192, TRAINING, bar_ms=150, goal_ms=138, layers=True, peer=False),
    Case(V4_WIDE, 1, 32768, FORWARD, bar_ms=205, goal_ms=190, peer=False),  # out of memory with torch.compile
    Case(V32_WIDE, 1, 8192, TRAINING, bar_ms=92, goal_ms=80),
    Case(V32_WIDE, 1, 32768, FORWARD, bar_ms=130, goal_ms=118, peer=False),
)
TOY_CASES = tuple(
    Case(model, 2, seq, part, True, True, graphs=model == V4, layers=model == V4)
    for model in (V4, V32)
    for seq in (32, 64)
    for part in (FORWARD, TRAINING)
)
"""For trying the run out on a CPU: their figures say nothing about a GPU."""
COMPILE_BARS = {FORWARD: (0.55, 0.45), TRAINING: (0.28, 0.22)}
"""Bar and goal of DeepSeek-V4's compile time at 2 x 2048, as a share of torch.compile's in the same run."""

# ---- what a case's rows by variant say


def verdicts(case: Case, rows: dict[str, Row]) -> list[Row]:
    """Returns the verdict on each figure of ours that has a bar or a goal."""
    ours, peer, layers = (rows.get(v, {}) for v in (OURS, COMPILE, OURS_LAYERS))
    found = [
        (what, ours[what], limits)
        for what, limits in (("median_ms", (case.bar_ms, case.goal_ms)), ("peak_gib", (case.bar_gib, case.goal_gib)))
        if what in ours and limits != (None, None)
    ]
    if case.bar_times and "median_ms" in ours and "median_ms" in peer:
        times = peer["median_ms"] / ours["median_ms"]
        found.append(("times torch.compile's speed", times, (case.bar_times, case.goal_times, True)))
    if "median_ms" in layers and "median_ms" in ours:
        times = layers["median_ms"] / ours["median_ms"]
        found.append(("layer by layer, of the whole model's time", times, (LAYERS_BAR, None)))
    if (case.model, case.seq) == (V4, 2048) and "compile_s" in ours and "compile_s" in peer:
        share = ours["compile_s"] / peer["compile_s"]
        found.append(("share of torch.compile's compile time", share, COMPILE_BARS[case.part]))
    return [{"case": case.name, "what": what} | against(value, *limits) for what, value, limits in found]


def errors(rows: dict[str, Row]) -> list[Row]:
    """Returns each error of ours against fp32 with the largest of the others, and whether it is within bounds.

    The others' error is the noise of bf16: it decides which keys are chosen, so no fixed bound would fit.
    """
    mine, found = (OURS, OURS_GRAPHS), []
    for what in ("error_logits", "error_gradients"):
        others = [r[what] for v, r in rows.items() if v not in mine and what in r]
        bound = ERROR_FACTOR * max(others) + 1e-6 if others else None
        for value in (rows[v][what] for v in mine if what in rows.get(v, {})):
            within = None if bound is None else value <= bound
            found.append({"what": what, "value": value, "bound": bound, "within": within})
    return found


# ---- the models


def v32_config(seq: int, toy: bool) -> Any:
    """Returns the ``DeepseekV32Config``: 2 layers, latents of 512 + 64, 32 index heads, 2048 keys a query."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 512}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": 1024, "kv_lora_rank": 512}
    sizes |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    sizes |= {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048}
    if toy:
        tiny = (TOY_VOCAB, 64, 64, 32, 4, 4, 32, 32, 8, 16, 16, 4, 16, 8)
        sizes = dict(zip(sizes, tiny, strict=True))
    sizes |= {"n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    return _v32(seq, num_hidden_layers=2, first_k_dense_replace=2, **sizes)


def v32_published(seq: int) -> Any:
    """Returns the ``DeepseekV32Config`` of the published model, with one layer, whose MLP is dense."""
    return _v32(seq, num_hidden_layers=1, mlp_layer_types=["dense"], vocab_size=VOCAB)


def _v32(seq: int, **sizes: Any) -> Any:
    from transformers.models.deepseek_v32 import DeepseekV32Config

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
        model = deepseek_model.build(v4_size(case, toy), device, dtype)
        if case.part == CHECKPOINTED:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model
    from transformers.models.deepseek_v32 import DeepseekV32ForCausalLM

    torch.manual_seed(0)
    with device:
        wide = case.model == V32_WIDE and not toy
        model = DeepseekV32ForCausalLM(v32_published(case.seq) if wide else v32_config(case.seq, toy))
    return model.to(device=device, dtype=dtype)


def tokens(case: Case, device: torch.device, toy: bool) -> Tensor:
    """Returns random token ids, int64 ``[batch, seq]``."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(TOY_VOCAB if toy else VOCAB, (case.batch, case.seq), generator=generator).to(device)
