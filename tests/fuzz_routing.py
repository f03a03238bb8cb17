# SPDX-License-Identifier: Apache-2.0
"""Random modules and small transformers models, compiled with and without routing: results must agree.

``python -m tests.fuzz_routing`` runs them all and writes the counts to ``benchmarks/results/routing_fuzz.json``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import logging
import math
import multiprocessing
import os
import platform
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from benchmarks.source_hash import ROUTING, source_hash
from tests.formulas.mutations import ALL
from tests.formulas.spellings_mhc import Formula, Settings, _picked
from tests.tools.capture import Captured, difference, evaluate, run

RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "routing_fuzz.json"
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}
_RANDOM = ("rounded", "dropout", "dropped")  # random numbers, or jumps at a rounding


@dataclasses.dataclass
class Outcome:
    """The results of one module without and with routing. ``problem`` is empty if both agree."""

    name: str
    kind: str
    ops: Counter[str]
    near_misses: int
    compiles_without: bool
    problem: str = ""
    apart: float = 0.0


# --- random modules -----------------------------------------------------------------------------------------


class Block(nn.Module):
    """One random operation on ``x [B, S, n, D]`` that keeps its shape."""

    seen: Tensor

    def __init__(self, kind: str, rng: random.Random, n: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.n, self.width, self.number = kind, n, width, rng.uniform(0.5, 1.5)
        self.linear = nn.Linear(width, width, dtype=dtype)
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.streams = nn.Parameter(torch.randn(n, n).to(dtype) * 0.3)
        self.dropout = nn.Dropout(0.3).eval()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return OPERATIONS[self.kind](self, x)


def _count(b: Block, x: Tensor) -> Tensor:
    b.seen.add_(1.0)
    return x + b.seen.to(x.dtype) * 0.01


def _average(b: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        b.seen.mul_(0.9).add_(0.1 * x.float().square().mean())
    return x * torch.rsqrt(b.seen + 1.0).to(x.dtype)


def _broken(b: Block, x: Tensor) -> Tensor:
    x = x * b.number
    torch._dynamo.graph_break()
    return x + 0.1


def _written(b: Block, x: Tensor) -> Tensor:
    y = x.clone()
    y[..., 0, :] = y[..., 1, :] * b.number
    return y


def _viewed(b: Block, x: Tensor) -> Tensor:
    y = x * 1.0
    y.flatten(-2)[..., ::2].mul_(b.number)
    return y


def _hooked(b: Block, x: Tensor) -> Tensor:
    y = x * 1.0
    if y.requires_grad:
        y.register_hook(lambda g: g * 0.5)
    return y


def _unused(b: Block, x: Tensor) -> Tensor:
    torch.sigmoid(x.flatten(-2) @ torch.ones(b.n * b.width, b.n, dtype=x.dtype))
    return x


def _rms_gate(b: Block, x: Tensor) -> Tensor:
    """Computes a norm, a sigmoid and a sum over streams that are not mHC."""
    gate = torch.sigmoid(F.rms_norm(x.flatten(-2), (b.n * b.width,))[..., : b.n])
    return x + (gate.unsqueeze(-1) * x).sum(-2, keepdim=True)


def _balanced(b: Block, x: Tensor) -> Tensor:
    """Balances a product of streams by two iterations similar to Sinkhorn."""
    c = torch.softmax(x @ x.transpose(-1, -2) / math.sqrt(b.width), -1)
    for _ in range(2):
        c = c / (c.sum(-2, keepdim=True) + 1e-6)
        c = c / (c.sum(-1, keepdim=True) + 1e-6)
    return c.to(x.dtype) @ x


OPERATIONS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "linear": lambda b, x: b.linear(x),
    "layer_norm": lambda b, x: b.norm(x),
    "gelu": lambda b, x: x + F.gelu(b.linear(x)),
    "dropout": lambda b, x: b.dropout(x),
    "residual": lambda b, x: x + torch.tanh(b.norm(x)),
    "mix_streams": lambda b, x: torch.einsum("on,bsnd->bsod", b.streams, x),
    "matmul_streams": lambda b, x: b.streams @ x,
    "transposed": lambda b, x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "viewed": lambda b, x: x.reshape(-1, b.n * b.width).view(x.shape),
    "chunks": lambda b, x: torch.cat([c * k for k, c in enumerate(x.chunk(2, -1), 1)], -1),
    "flipped": lambda b, x: x.flip(-2),
    "mean_stream": lambda b, x: x - x.mean(-2, keepdim=True),
    "weighed": lambda b, x: x * b.number,
    "softmax": lambda b, x: x + torch.softmax(x, -2),
    "other_dtype": lambda b, x: x.double().sin().to(x.dtype),
    "expanded": lambda b, x: x[..., :1, :].expand(x.shape) + x,
    "masked": lambda b, x: torch.where(x > 0, x, 0.1 * x),
    "checkpointed": lambda b, x: torch.utils.checkpoint.checkpoint(b.linear, x, use_reentrant=False),
    "count": _count,
    "average": _average,
    "graph_break": _broken,
    "by_shape": lambda b, x: b.linear(x) if x.shape[1] > 2 else b.norm(x),
    # The sum of all of x would be 0 up to rounding after a layer norm, so the branch would depend on rounding.
    "by_value": lambda b, x: x * 2 if float(x.detach()[..., 0].sum()) > 0 else x * 0.5,
    "written": _written,
    "written_view": _viewed,
    "hooked": _hooked,
    "unused": _unused,
    "rms_gate": _rms_gate,
    "attention": lambda b, x: (
        x + F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3, is_causal=True).transpose(1, 2)
    ),
    "balanced": _balanced,
}


class Stack(nn.Module):
    """Random blocks, formulas and near misses in sequence; returns the streams and every buffer."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        for block in self.blocks:
            x = block(x, x.flip(0)) if isinstance(block, Formula) and block.mutation else block(x)
        return (x, *(b.clone() for b in self.buffers()))


@dataclasses.dataclass
class Case:
    """A module, its inputs, and the mode of the call."""

    name: str
    kind: str
    module: nn.Module
    inputs: tuple[Any, ...]
    grad: bool
    dynamic: bool
    tolerance: float


def _formula(rng: random.Random, n: int, width: int, dtype: torch.dtype, seed: int, miss: bool) -> tuple[Formula, str]:
    s = Settings(
        n=n,
        width=width,
        dtype=dtype,
        rows=rng.choice(["full", "full", "two"]),
        iters=rng.choice([0, 1, 2, 3, 5]),
        form=rng.choice(["softmax", "exp"]),
        transposed=rng.random() < 0.5,
        mode=rng.choice(["train", "train", "checkpoint"]),
    )
    s = s if s.rows == "full" else dataclasses.replace(s, iters=0)
    picked, store = _picked(rng, s)
    if not miss:
        return Formula(s, picked, store, seed), f"formula{s.iters}"
    mutation = rng.choice([m for m in ALL if m.settings.mode == "train" and not any(w in m.name for w in _RANDOM)])
    s = dataclasses.replace(s, form=mutation.settings.form, iters=3, rows="full", mode="train")
    return Formula(s, {**picked, **mutation.picked}, "rows", seed, mutation.key), mutation.key


def random_case(i: int, seed: int) -> Case:
    """Returns the i-th random module; every second one holds a formula or a near miss."""
    rng = random.Random(f"fuzz {seed} {i}")
    torch.manual_seed(rng.randrange(2**31))
    n, width, dtype = rng.choice([2, 3, 4]), 16, rng.choice([torch.float32, torch.float32, torch.bfloat16])
    kind = "plain" if i % 2 else rng.choice(["formula", "formula", "near miss", "both"])
    names = [rng.choice(list(OPERATIONS)) for _ in range(rng.randint(1, 5))]
    blocks: list[nn.Module] = [Block(name, rng, n, width, dtype) for name in names]
    for wanted, miss in (("formula", False), ("near miss", True)):
        if kind in (wanted, "both"):
            made, name = _formula(rng, n, width, dtype, 100 * i, miss)
            at = rng.randint(0, len(blocks))
            blocks.insert(at, made)
            names.insert(at, name)
    x = torch.randn(rng.choice([1, 2]), rng.choice([2, 3]), n, width).to(dtype)
    grad, dynamic = rng.random() < 0.7, rng.random() < 0.2
    return Case(f"{i}: {' > '.join(names)}", kind, Stack(blocks), (x,), grad, dynamic, TOLERANCE[dtype])


# --- small models of transformers ---------------------------------------------------------------------------

_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "n_head"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "eos_token_id", "sep_token_id"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "bos_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group"), 1),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "image_size", "max_target_positions", "moe_intermediate_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("patch_size", "state_size", "num_mel_bins", "max_source_positions"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    "rotary_pct": 0.5,
}
"""Sizes that make a model small, under the names that its configuration has for them."""
MODELS = (
    *("deepseek_v4", "llama", "qwen2", "qwen3", "gemma", "gemma2", "mistral", "mixtral", "qwen3_moe", "gpt_oss"),
    *("deepseek_v3", "olmo", "olmo2", "granite", "starcoder2", "stablelm", "cohere", "phi", "phi3", "gpt_neox"),
    *("gpt2", "bloom", "falcon", "opt", "bert", "roberta", "modernbert", "t5", "vit", "clip_vision_model"),
    *("mamba", "whisper"),
)
"""Types of configurations."""


def _small(name: str) -> Any:
    """Returns a configuration of this type, with those of the small sizes that it has."""
    from transformers import AutoConfig

    names = {**vars(AutoConfig.for_model(name)), **type(AutoConfig.for_model(name)).attribute_map}
    own = {"mamba": "intermediate_size", "whisper": "num_hidden_layers"}.get(name)  # which others of its sizes give
    return AutoConfig.for_model(name, **{k: v for k, v in _SMALL.items() if k in names and k != own})


class Outputs(nn.Module):
    """Wraps a transformers model so that it returns its tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        names = ("pixel_values",) if inputs[0].dim() == 4 else ("input_ids", "decoder_input_ids")
        if inputs[0].dim() == 3:
            names = ("input_features", "decoder_input_ids")
        out = self.model(**dict(zip(names, inputs, strict=False)), return_dict=True)
        return out[0], *([out.encoder_last_hidden_state] if "encoder_last_hidden_state" in out else [])


def model_case(name: str, seed: int = 0) -> Case:
    """Returns a small transformers model with random weights, for inference."""
    from transformers import AutoModel

    torch.manual_seed(seed)
    ids = torch.randint(3, 60, (2, 8))
    inputs: tuple[Tensor, ...] = (ids,)
    if name == "deepseek_v4":
        from benchmarks import deepseek_model

        config = deepseek_model.config(deepseek_model.TINY)
        config.hc_sinkhorn_iters = 3
    else:
        config = _small(name)
    config.use_cache = False
    if name == "t5":
        inputs = (ids, ids)
    elif name == "whisper":
        inputs = (torch.randn(2, 8, 16), ids)
    elif name in ("vit", "clip_vision_model"):
        inputs = (torch.randn(2, 3, 16, 16),)
    return Case(name, "transformers", Outputs(AutoModel.from_config(config)).eval(), inputs, False, False, 1e-3)


# --- the comparison -----------------------------------------------------------------------------------------


def _captured(case: Case, routed: bool) -> Captured:
    module = copy.deepcopy(case.module)
    named = list(module.named_parameters())
    return run(module, case.inputs, named, case.grad, routed=routed, dynamic=case.dynamic)


def _inductor(case: Case, routed: bool) -> Captured:
    module = copy.deepcopy(case.module)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="mhc_inductor" if routed else "inductor", dynamic=case.dynamic)
    return Captured(*evaluate(compiled, case.inputs, list(module.named_parameters()), case.grad))


def compare(case: Case, inductor: bool = False) -> Outcome:
    """Compiles ``case`` without and with routing and compares outputs, gradients and buffers."""
    call = functools.partial(_inductor if inductor else _captured, case)
    name = f"{case.name}{' (Inductor)' if inductor else ''}"
    try:
        plain = call(False)
    except Exception:  # counted as not comparable
        return Outcome(name, case.kind, Counter(), 0, False, "")
    try:
        got = call(True)
    except Exception as error:
        problem = f"fails only when routed: {type(error).__name__}: {error}"[:600]
        return Outcome(name, case.kind, Counter(), 0, True, problem)
    apart = difference(got, plain)
    same = [(t.shape, t.dtype) for t in got.outputs] == [(t.shape, t.dtype) for t in plain.outputs]
    problem = "" if same and apart <= case.tolerance else f"routed and unrouted are {apart:.3g} apart"
    if got.report.problems:
        problem = "; ".join(got.report.problems)
    return Outcome(name, case.kind, got.ops, len(got.report.near_misses), True, problem, apart)


def outcome(task: tuple[str, int | str, int]) -> Outcome:
    """Runs the task ("module" or "inductor", i, seed) or ("model", name, seed)."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    how, which, seed = task
    case = model_case(which, seed) if isinstance(which, str) else random_case(which, seed)
    return compare(case, how == "inductor")


def summary(outcomes: Sequence[Outcome], seed: int) -> dict[str, Any]:
    """Returns the counts for the results file."""
    import transformers

    ops: Counter[str] = Counter()
    for o in outcomes:
        ops.update(o.ops)
    return {
        "routing_sha256": source_hash(folders=ROUTING),
        "seed": seed,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "compiled": len(outcomes),
        "by_kind": dict(Counter(o.kind for o in outcomes)),
        "through_inductor": sum("(Inductor)" in o.name for o in outcomes),
        "models": [o.name for o in outcomes if o.kind == "transformers" and "(Inductor)" not in o.name],
        "with_routed_ops": {
            k: sum(bool(o.ops) for o in outcomes if o.kind == k) for k in sorted({o.kind for o in outcomes})
        },
        "routed_ops": dict(sorted(ops.items())),
        "near_misses": sum(o.near_misses for o in outcomes),
        "fail_without_routing": sum(not o.compiles_without for o in outcomes),
        "problems": [{"name": o.name, "problem": o.problem} for o in outcomes if o.problem],
    }


def main(
    jobs: Annotated[int, typer.Option(help="Processes.")] = os.cpu_count() or 1,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
) -> None:
    """Compile random modules and models with and without routing; exit with 1 if routing changed anything."""
    console, start = Console(), time.perf_counter()
    tasks: list[tuple[str, int | str, int]] = [("model", name, seed) for name in MODELS]
    tasks += [("inductor", 2 * i, seed) for i in range(6)] + [("module", i, seed) for i in range(500)]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        outcomes = list(track(pool.map(outcome, tasks), "compiling", len(tasks), console=console))
    result = summary(outcomes, seed)
    for key in ("by_kind", "with_routed_ops", "problems"):
        console.print(key, result[key], markup=False)
    console.print(f"{time.perf_counter() - start:.0f} s")
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    if result["problems"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
