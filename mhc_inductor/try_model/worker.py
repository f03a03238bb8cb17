# SPDX-License-Identifier: Apache-2.0
"""Builds the model of a trial, and measures one variant of it in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mhc_inductor.try_model import configuration

EAGER, COMPILE, OURS = "eager", "torch.compile", "mhc_inductor"
BACKENDS = {COMPILE: "inductor", OURS: "mhc_inductor"}
_CALLS, _SECONDS = 20, 5.0
"""A time is the median of at most so many calls, which take about so long, and of at least 3."""
_KINDS = {"CAUSAL_LM": "CausalLM", "IMAGE_TEXT_TO_TEXT": "ImageTextToText", "MASKED_LM": "MaskedLM"}


def kind_of(config: Any) -> str:
    """Returns the kind of model to build, such as "CausalLM".

    Raises:
        ValueError: if transformers has no model of the configuration's type that takes tokens and returns logits.
    """
    import transformers

    own = getattr(config, "auto_map", None) or {}
    for words, kind in _KINDS.items():
        if type(config) in getattr(transformers, f"MODEL_FOR_{words}_MAPPING") or f"AutoModelFor{kind}" in own:
            return kind
    raise ValueError(f"transformers has no model of type {config.model_type} that takes tokens and returns logits")


@dataclasses.dataclass(frozen=True)
class Job:
    """The model and the calls of a trial, alike in every variant; ``changes`` are those of the configuration."""

    source: str
    changes: dict[str, Any]
    weights: bool = False
    trust_remote_code: bool = False
    attention: str = ""
    training: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    batch: int = 1
    tokens: int = 256

    def build(self) -> Any:
        """Returns the model, with the folder's weights or with random ones, the same each time.

        Raises:
            ValueError: from :func:`kind_of`; or if the folder has no weights for a parameter.
            Exception: whatever the model raises for a configuration that it refuses.
        """
        import transformers

        config = configuration.changed(configuration.load(self.source, self.trust_remote_code), self.changes)
        auto, dtype = getattr(transformers, f"AutoModelFor{kind_of(config)}"), getattr(torch, self.dtype)
        options: dict[str, Any] = {"attn_implementation": self.attention} if self.attention else {}
        options["trust_remote_code"] = self.trust_remote_code
        torch.manual_seed(0)
        if self.weights:
            options |= {"config": config, "dtype": dtype, "local_files_only": True, "output_loading_info": True}
            model, info = auto.from_pretrained(self.source, **options)
            if missing := sorted(info["missing_keys"]):
                raise ValueError(f"{self.source} has no weights for {len(missing)} parameters, such as {missing[0]}")
        else:
            model = _filled(auto.from_config(config, dtype=torch.float32, **options), dtype)
        return model.to(self.device).train(self.training)

    def inputs(self, model: Any) -> dict[str, Tensor]:
        """Returns random ids of ordinary tokens, int64 [batch, tokens], which in training are the labels too."""
        ids = configuration.special_tokens(model.config).values()
        special = {i for v in ids for i in (v if isinstance(v, list) else [v])}
        ordinary = torch.tensor([*{*range(model.config.get_text_config().vocab_size)} - special])
        at = torch.randint(len(ordinary), (self.batch, self.tokens), generator=torch.Generator().manual_seed(0))
        tokens = ordinary[at].to(self.device)
        return {"input_ids": tokens, "labels": tokens} if self.training else {"input_ids": tokens}


@torch.no_grad()
def _filled(model: Any, dtype: torch.dtype) -> Any:
    """Returns a new model in ``dtype`` whose parameters are not the zeros and ones that would hide an error."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()  # as from_pretrained does
    for name, parameter in model.named_parameters():
        if bool((parameter == parameter.flatten()[:1]).all()):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        if not any(f".{part}." in f".{name}." for part in kept):
            parameter.data = parameter.data.to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):  # the experts of each token, which a checkpoint would fill
            buffer.copy_(torch.randint(model.config.get_text_config().n_routed_experts, buffer.shape))
    return model


def step(model: Any, call: Callable[..., Any], inputs: dict[str, Tensor]) -> dict[str, list[Tensor | None]]:
    """Makes one call; returns the outputs and, in training, the loss and the parameters' gradients."""
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(model.training):
        out = call(**inputs)
    if not model.training:
        return {"outputs": [out.logits]}
    out.loss.backward()
    grads = [p.grad for p in model.parameters()]
    return {"outputs": [out.logits.detach()], "loss": [out.loss.detach()], "gradients": grads}


def relative(got: Iterable[Tensor | None], want: Iterable[Tensor | None]) -> float:
    """Returns the largest relative difference of tensors by their norms; NaN for NaN, inf if one of a pair is missing.

    A tensor with less than a thousandth of the largest one's norm counts as that: its differences are rounding.
    """
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if a is not None or b is not None]
    sizes = [0.0 if b is None else float(b.double().norm()) for _, b in pairs]
    least, worst = max(1e-3 * max(sizes, default=0.0), 1e-300), 0.0
    for (a, b), size in zip(pairs, sizes, strict=True):
        e = float("inf") if a is None or b is None else float((a.double() - b.double()).norm()) / max(size, least)
        worst = e if e != e or e > worst else worst
    return worst


def _peak(device: str) -> int | None:
    """Returns the most bytes in use since the last reset on a GPU, of this process on a CPU; None if unknown."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    status = pathlib.Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)


def measure(job: Job, variant: str, save: Callable[[dict[str, Any]], None]) -> None:
    """Compiles and times a variant, then compares it with eager calls of its model; ``save`` gets what is known."""
    model = job.build()
    inputs = job.inputs(model)
    call = torch.compile(model, backend=BACKENDS[variant]) if variant in BACKENDS else model

    def seconds() -> float:
        start = time.perf_counter()
        step(model, call, inputs)
        if job.device != "cpu":
            torch.cuda.synchronize(job.device)
        return time.perf_counter() - start

    first = seconds() + seconds()
    if job.device != "cpu":
        torch.cuda.reset_peak_memory_stats(job.device)
    count = max(3, min(_CALLS, int(_SECONDS / seconds())))
    median = statistics.median(seconds() for _ in range(count))
    save({"call_s": median, "calls": count, "peak_bytes": _peak(job.device)})
    if variant in BACKENDS:
        save({"compile_s": max(first - 2 * median, 0.0)})
        got = {k: [t if t is None else t.clone() for t in v] for k, v in step(model, call, inputs).items()}
        errors = {k: relative(got[k], v) for k, v in step(model, model, inputs).items()}
        save({"errors": {k: e if math.isfinite(e) else None for k, e in errors.items()}})


def main(words: str, variant: str, out: str) -> int:
    """Measures a variant of the job in ``words`` (JSON); writes its row to the file ``out``, with "error" if it fails."""
    row: dict[str, Any] = {}

    def save(more: dict[str, Any]) -> None:
        pathlib.Path(out).write_text(json.dumps({**row, **more}))
        row.update(more)

    try:
        measure(Job(**json.loads(words)), variant, save)
    except Exception as error:  # whatever a model or a compiler raises
        traceback.print_exc()
        save({"error": f"{type(error).__name__}: {error}"[:1000]})
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
