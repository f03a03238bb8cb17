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
from rich.table import Table
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


def _by_shape(b: Block, x: Tensor) -> Tensor:
    return b.linear(x) if x.shape[1] > 2 else b.norm(x)


def _by_value(b: Block, x: Tensor) -> Tensor:
    # The sum of all of x would be 0 up to rounding after a layer norm, so the branch would depend on rounding.
    return x * 2 if float(x.detach()[..., 0].sum()) > 0 else x * 0.5


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
    v = x.flatten(-2)
    gate = torch.sigmoid(F.rms_norm(v, (b.n * b.width,))[..., : b.n])
    return x + (gate.unsqueeze(-1) * x).sum(-2, keepdim=True)


def _attention(b: Block, x: Tensor) -> Tensor:
    q = x.transpose(1, 2)
    return x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)


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
    "by_shape": _by_shape,
    "by_value": _by_value,
    "written": _written,
    "written_view": _viewed,
    "hooked": _hooked,
    "unused": _unused,
    "rms_gate": _rms_gate,
    "attention": _attention,
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

_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1}
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {},
    "llama": _TEXT,
    "qwen2": _TEXT,
    "qwen3": _TEXT,
    "gemma": _TEXT,
    "gemma2": _TEXT,
    "mistral": _TEXT,
    "mixtral": {**_TEXT, **_MOE},
    "qwen3_moe": {**_TEXT, **_MOE},
    "gpt_oss": {**_TEXT, **_MOE},
    "deepseek_v3": {**{k: v for k, v in _TEXT.items() if k != "head_dim"}, **_MLA},
    "olmo": _TEXT,
    "olmo2": _TEXT,
    "granite": _TEXT,
    "starcoder2": _TEXT,
    "stablelm": _TEXT,
    "cohere": _TEXT,
    "phi": _TEXT,
    "phi3": _TEXT,
    "gpt_neox": {**_TEXT, "rotary_pct": 0.5},
    "gpt2": _GPT2,
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2},
    "falcon": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "opt": {**_TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bert": _TEXT,
    "roberta": _TEXT,
    "modernbert": {**_TEXT, "cls_token_id": 1, "sep_token_id": 2},
    "t5": {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2},
    "vit": _VISION,
    "clip_vision_model": _VISION,
    "mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "whisper": {
        "vocab_size": 64,
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "num_mel_bins": 8,
        "max_source_positions": 8,
        "max_target_positions": 16,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    },
}
"""Maps each configuration type to the values that make the model small."""


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
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(seed)
    ids = torch.randint(3, 60, (2, 8))
    inputs: tuple[Tensor, ...] = (ids,)
    if name == "deepseek_v4":
        from benchmarks import deepseek_model

        config = deepseek_model.config(deepseek_model.TINY)
        config.hc_sinkhorn_iters = 3
    else:
        config = AutoConfig.for_model(name, **MODELS[name])
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
    modules: Annotated[int, typer.Option(help="Random modules.")] = 500,
    models: Annotated[int, typer.Option(help="Models of transformers, in the order of MODELS.")] = len(MODELS),
    inductor: Annotated[int, typer.Option(help="Random modules that also go through Inductor.")] = 6,
    jobs: Annotated[int, typer.Option(help="Processes.")] = os.cpu_count() or 1,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the counts go.")] = RESULT,
) -> None:
    """Compile random modules and models with and without routing; exit with 1 if routing changed anything."""
    console, start = Console(), time.perf_counter()
    tasks: list[tuple[str, int | str, int]] = [("model", name, seed) for name in list(MODELS)[:models]]
    tasks += [("inductor", 2 * i, seed) for i in range(inductor)]
    tasks += [("module", i, seed) for i in range(modules)]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        outcomes = list(track(pool.map(outcome, tasks), "compiling", len(tasks), console=console))
    result = summary(outcomes, seed)
    table = Table("kind", "compiled", "with routed ops", "problems")
    for kind, count in result["by_kind"].items():
        bad = sum(bool(o.problem) for o in outcomes if o.kind == kind)
        table.add_row(kind, str(count), str(result["with_routed_ops"][kind]), str(bad))
    console.print(table)
    for o in outcomes:
        if o.problem:
            console.print(f"{o.name}: {o.problem}", markup=False)
    console.print(f"{time.perf_counter() - start:.0f} s")
    out.write_text(json.dumps(result, indent=1) + "\n")
    if result["problems"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
