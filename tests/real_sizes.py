# SPDX-License-Identifier: Apache-2.0
"""Compiles whole models at published widths for the simulated CUDA, in many ways, and reads every wrapper that comes out.

``python -m tests.real_sizes [MODEL] [WAY]`` prints the table. Weights and inputs are fake: a model needs no memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any
from unittest import mock

import torch
import torch._functorch.config
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.formulas import reference_models_e79, reference_models_mhc
from tests.tools import generated
from tests.tools.fakecuda import fake_cuda, generated_code


class Written(nn.Module):
    """One mHC layer as the paper prints it, in plain PyTorch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        with FakeTensorMode():
            shapes = {name: t.shape for name, t in reference_models_mhc.parameters(width=dim).items()}
        self.weights = nn.ParameterDict({name: torch.empty(shape) for name, shape in shapes.items()})

    def forward(self, x: Tensor) -> Tensor:
        return reference_models_mhc.paper(x, self.weights)


class Recurrent(reference_models_e79.Layer):
    """One E79 layer, from streams to streams."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x + super().forward(x)[0]


class Stack(nn.Module):
    """Layers one after the other, each in a checkpoint if ``reentrant`` is a bool."""

    reentrant: bool | None = None

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def deepseek_v4(heavy: int = 1) -> nn.Module:
    """Returns DeepSeek-V4-Flash with all kinds of layers and few experts; the defaults of its class are published.

    The last layer is sparse as in the published order. With two ``heavy`` ones before it, the backward of the checkpointed
    model launches ``mhc_post`` as its third kernel, and has the outputs of three layers among its arguments.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    kinds = ["sliding_attention", *["heavily_compressed_attention"] * heavy, "compressed_sparse_attention"]
    few = {"n_routed_experts": 4, "num_experts_per_tok": 2, "num_hash_layers": 1, "vocab_size": 1024}
    return DeepseekV4ForCausalLM(
        DeepseekV4Config(num_hidden_layers=len(kinds), layer_types=kinds, use_cache=False, **few)
    )


def deepseek_v32() -> nn.Module:
    """Returns DeepSeek-V3.2 with one layer; the defaults of its class are published."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    few = {"num_hidden_layers": 1, "mlp_layer_types": ["dense"], "vocab_size": 1024}
    return DeepseekV32ForCausalLM(DeepseekV32Config(use_cache=False, **few))


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, the ops that each of its compiles must hold, and the shapes that these ops make unnecessary."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Shape of the input: of token ids, or of streams. Numbers of tokens are no width of their model."""
    ops: tuple[str, ...]
    """Each is the start of the name of a kernel that is launched, or of an op that its lowering calls."""
    heads: int = 1
    keys: tuple[int, ...] = ()
    """How many keys its attentions have: no tensor of queries by keys may be allocated."""
    alone: tuple[str, ...] | None = None
    """The ops where the layers are compiled one by one, if not all."""
    checkpointed: Callable[[], nn.Module] | None = None
    """Builds the model where its layers are checkpointed, if that is another."""


def _streams(dim: int) -> Model:
    return Model(lambda: Stack(*(Written(dim) for _ in range(4))), (1, 512, 4, dim), ("mhc_pre", "mhc_post"))


def _recurrent(n: int) -> Model:
    return Model(lambda: Stack(Recurrent(1024, n), Recurrent(1024, n)), (4, 6, 1024), ("e79",))


V4 = Model(
    deepseek_v4,
    (1, 6144),
    ("mhc_pre", "mhc_post", "selection", "index"),
    heads=64,
    keys=(6144, 6144 + 6144 // 4, 6144 + 6144 // 128),
    alone=("mhc_pre", "mhc_post", "index"),
    checkpointed=lambda: deepseek_v4(heavy=2),
)
MODELS = {
    "DeepSeek-V4-Flash": V4,
    "DeepSeek-V3.2": Model(
        # With fewer tokens, dense attention is faster than lists of 2048 keys.
        deepseek_v32,
        (1, 10240),
        ("selection", "index"),
        heads=128,
        keys=(10240,),
        alone=("index",),
    ),
    "mHC 4096": _streams(4096),
    "mHC 7168": _streams(7168),
    "E79 64": _recurrent(64),
    "E79 128": _recurrent(128),
}
WAYS = (
    "inference",
    "training",
    "checkpointed",
    "reentrant",
    "padded",
    "dynamic",
    "fp16",
    "layer by layer",
)
CASES = [(m, w) for m, one in MODELS.items() for w in WAYS if w != "padded" or one.keys]


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Simulates CUDA, with fake tensors and without caches; the padding of products would time them."""
    config: Any = torch._inductor.config
    with (
        config.patch(fx_graph_cache=False, shape_padding=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        fake_cuda(),
        FakeTensorMode(),
    ):
        yield


def _faked(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Gives a model on the meta device fake weights on the GPU; returns it."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                made = torch.empty(p.shape, dtype=dtype if p.is_floating_point() else p.dtype, device="cuda")
                module._parameters[name] = nn.Parameter(made, p.requires_grad)
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = torch.empty(b.shape, dtype=b.dtype, device="cuda")
    return model


def _prepared(one: Model, way: str) -> Callable[..., Any]:
    """Returns the model, compiled as ``way`` asks."""
    checkpointed = way in ("checkpointed", "reentrant")
    with torch.device("meta"):
        model = one.checkpointed() if checkpointed and one.checkpointed else one.build()
    # The other models' formulas keep fp32 weights, which they cast.
    half = torch.float16 if way == "fp16" else torch.bfloat16
    _faked(model, half if one.keys else torch.float32).train(way != "inference")
    if checkpointed:
        if isinstance(model, Stack):
            model.reentrant = way == "reentrant"
        else:
            reentrant = {"use_reentrant": way == "reentrant"}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=reentrant)  # type: ignore[operator]
    if way != "layer by layer":
        return torch.compile(model, backend="mhc_inductor", dynamic=True if way == "dynamic" else None)
    for layer in (model if isinstance(model, Stack) else model.model).layers:  # type: ignore[union-attr]
        layer.compile(backend="mhc_inductor")
    return model


def _run(one: Model, way: str, call: Callable[..., Any]) -> None:
    """Runs a step of training, or a forward pass without gradients."""
    with torch.set_grad_enabled(way != "inference"):
        if one.keys:
            ids = torch.zeros(one.shape, dtype=torch.int64, device="cuda")
            given = {"attention_mask": torch.ones_like(ids)} if way == "padded" else {}
            out = call(input_ids=ids, labels=ids, use_cache=False, **given).loss
        else:
            half = torch.float16 if way == "fp16" else torch.bfloat16
            dtype = torch.float32 if one.ops == ("e79",) else half
            x = torch.empty(one.shape, dtype=dtype, device="cuda", requires_grad=way != "inference")
            out = call(x).float().sum()
        if way != "inference":
            out.backward()


def generate(one: Model, way: str) -> tuple[list[str], set[str]]:
    """Returns the wrappers of a case, and the ops that their lowerings chose to call instead of launching kernels."""
    from mhc_inductor.lowerings import common

    chosen: set[str] = set()
    with simulated(), mock.patch.object(common, "compile_in_background", lambda name, *_: chosen.add(name)):
        call = _prepared(one, way)
        return generated_code(lambda: _run(one, way, call)), chosen


def faults(one: Model, way: str, codes: list[str], chosen: set[str]) -> list[str]:
    """Returns what is wrong with the wrappers of a case."""
    found = []
    for k, code in enumerate(codes):
        compile(code, f"wrapper {k}", "exec")
        found += [f"wrapper {k}: {name} stands for two things" for name in generated.clashes(code)]
        found += [f"wrapper {k}: calls {name}, which has a launch" for name in sorted(generated.called(code) - chosen)]
    ops = one.alone if way == "layer by layer" and one.alone else one.ops
    held = {name for code in codes for name in (*generated.launches(code), *generated.called(code))}
    found += [f"no kernel of {op}" for op in ops if not any(name.startswith(op) for name in held)]
    if way != "inference":
        trained = [op for op in ops if op != "index"]  # it chooses keys, and has no gradient
        backward = {name for name in held if "backward" in name}
        found += [f"no backward of {op}" for op in trained if not any(name.startswith(op) for name in backward)]
    if ops == one.ops:
        found += [f"allocates {shape}" for shape in sorted({s for code in codes for s in _by_keys(one, code)})]
    return found


def _by_keys(one: Model, code: str) -> Iterator[str]:
    """Yields the shapes of the tensors that hold a value for each query and key."""
    tokens = one.shape[1]
    for sizes, _ in generated.allocated(code):
        numbers = [_number(size, tokens) for size in sizes]
        queries = [i for i, size in enumerate(numbers) if size in (tokens, tokens * one.heads)]
        keys = [i for i, size in enumerate(numbers) if size in one.keys]
        if any(i != j for i in queries for j in keys):
            yield f"({', '.join(sizes)})"


def _number(size: str, tokens: int) -> int:
    """Returns a size of generated code, in which every symbol is the number of tokens."""
    return int(eval(re.sub(r"\bs\d+\b", str(tokens), size), {"min": min, "max": max, "math": math}))


def main(
    model: Annotated[str, typer.Argument(help="Part of a model's name.")] = "",
    way: Annotated[str, typer.Argument(help="Part of a way's name.")] = "",
) -> None:
    """Compile every case and print what is wrong; exit with 1 if anything is."""
    table = Table("model", "way", "wrappers", "launches", "ops called", "seconds", "faults")
    wrong = 0
    for name, how in CASES:
        if model not in name or way not in how:
            continue
        start, one = time.perf_counter(), MODELS[name]
        try:
            codes, chosen = generate(one, how)
            bad = faults(one, how, codes, chosen)
        except Exception as error:  # the other cases still run
            codes, bad = [], [f"{type(error).__name__}: {error}"[:300]]
        wrong += bool(bad)
        launched = sum(not k.startswith("triton_") for code in codes for k in generated.launches(code))
        called = ", ".join(sorted(set().union(*map(generated.called, codes))))
        seconds = f"{time.perf_counter() - start:.0f}"
        table.add_row(name, how, str(len(codes)), str(launched), called, seconds, "; ".join(bad) or "none")
        Console().print(f"{name}, {how}: {seconds} s, {bad or 'right'}")
    Console(width=180).print(table)
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
