# SPDX-License-Identifier: Apache-2.0
"""Runs a tiny sparse model eagerly and routed, in every mode that people use, and compares and counts."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mhc_inductor.options import DEFAULT, RoutingOptions
from mhc_inductor.report import Report
from mhc_inductor.routing import Verifier
from tests.formulas import sparse_families
from tests.tools import capture

INDEXERS = ("index_topk", "index_scores")
ATTENTIONS = ("selection_attention", "selection_list_attention")
BATCH, LENGTH, PROMPT, STEPS = 2, 36, 38, 2
"""After a prompt, ``STEPS`` tokens are decoded: the last fills pools of 2, 4 and 8 tokens, the one before none."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a model is called.

    Args:
        train: whether with labels and gradients; otherwise under ``no_grad``.
        use_cache: what the call passes; None leaves the configuration's default, which is True.
        padding: "left" or "right" pads the first sequence, with an attention mask.
        packed: whether each row holds two sequences, told by position ids alone.
        decode: whether one token at a time follows an eager prompt.
        checkpointed: whether activations are recomputed.
        dynamic: what ``torch.compile`` is told.
        dtype: of the parameters.
    """

    train: bool = False
    use_cache: bool | None = None
    padding: str = ""
    packed: bool = False
    decode: bool = False
    checkpointed: bool = False
    dynamic: bool | None = False
    dtype: torch.dtype = torch.float32


MODES = {
    "training": Mode(train=True),
    "training, bf16": Mode(train=True, dtype=torch.bfloat16),
    "training, checkpointed": Mode(train=True, checkpointed=True, use_cache=False),
    "training, checkpointed, packed": Mode(train=True, checkpointed=True, use_cache=False, packed=True),
    "training, checkpointed, left padded": Mode(train=True, checkpointed=True, use_cache=False, padding="left"),
    "training, left padded": Mode(train=True, padding="left"),
    "training, packed": Mode(train=True, packed=True, use_cache=False),
    "training, dynamic": Mode(train=True, dynamic=True),
    "prefill": Mode(),
    "prefill, bf16": Mode(dtype=torch.bfloat16),
    "prefill, no cache": Mode(use_cache=False),
    "prefill, left padded": Mode(padding="left"),
    "prefill, right padded": Mode(padding="right"),
    "prefill, packed": Mode(packed=True, use_cache=False),
    "prefill, dynamic": Mode(dynamic=True),
    "decode": Mode(decode=True),
    "decode, left padded": Mode(decode=True, padding="left"),
}


def inputs(mode: Mode, length: int = LENGTH, seed: int = 0) -> dict[str, Any]:
    """Returns the keyword arguments of one call of the whole sequence."""
    ids = sparse_families.tokens(BATCH, length, seed)
    call: dict[str, Any] = {"input_ids": ids}
    if mode.use_cache is not None:
        call["use_cache"] = mode.use_cache
    if mode.padding:
        mask = torch.ones_like(ids)
        pads = slice(0, 7) if mode.padding == "left" else slice(-7, None)
        mask[0, pads] = 0
        call["attention_mask"] = mask
    if mode.packed:
        first = length // 2 - 3
        places = [*range(first), *range(length - first)]
        call["position_ids"] = torch.tensor(places).expand(BATCH, -1).contiguous()
    if mode.train:
        call["labels"] = ids.masked_fill(call["attention_mask"] == 0, -100) if mode.padding else ids
    return call


def real(mode: Mode, length: int = LENGTH) -> Tensor:
    """Returns which tokens are no padding, bool ``[BATCH, length]``."""
    mask = inputs(mode, length).get("attention_mask")
    return torch.ones(BATCH, length, dtype=torch.bool) if mask is None else mask.bool()


def prepare(family: str, mode: Mode, attention: str) -> nn.Module:
    """Returns the family's model, ready for ``mode``."""
    model = sparse_families.build(family, attention, mode.dtype)
    model.train(mode.train)
    if mode.checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def evaluate(model: nn.Module, call: Callable[..., Any], mode: Mode, steps: int = STEPS) -> capture.Captured:
    """Calls ``call``, which runs ``model``, in ``mode``; returns logits of real tokens, and gradients.

    ``steps`` tokens are decoded after an eager prompt, each with the cache that the last call left.
    """
    if mode.decode:
        return capture.Captured(_decode(model, call, mode, steps), {})
    given = inputs(mode)
    with contextlib.nullcontext() if mode.train else torch.no_grad():
        out = call(**given)
    logits = out.logits[real(mode)]
    if not mode.train:
        return capture.Captured([logits], {})
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    grads = torch.autograd.grad(out.loss, [p for _, p in named], allow_unused=True)
    return capture.Captured([logits.detach(), out.loss.detach()], dict(zip((n for n, _ in named), grads, strict=True)))


@torch.no_grad()
def _decode(model: nn.Module, call: Callable[..., Any], mode: Mode, steps: int) -> list[Tensor]:
    given = inputs(mode, PROMPT + steps)
    ids, mask = given.pop("input_ids"), given.pop("attention_mask", None)
    if mask is not None:
        given["attention_mask"] = mask[:, :PROMPT]
    cache = model(input_ids=ids[:, :PROMPT], use_cache=True, **given).past_key_values
    rows = []
    for at in range(PROMPT, PROMPT + steps):
        if mask is not None:
            given["attention_mask"] = mask[:, : at + 1]
        out = call(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True, **given)
        cache = out.past_key_values
        rows.append(out.logits[:, -1])
    return rows


@dataclasses.dataclass
class Found:
    """What routing found in one compiled call.

    ``indexers`` and ``attentions`` count ops in the graphs. ``breaks`` are Dynamo's reasons for more than one graph.
    """

    indexers: int
    attentions: int
    graphs: list[torch.fx.GraphModule]
    report: Report
    breaks: list[str]
    error: str = ""

    def reasons(self) -> list[str]:
        """Returns each near miss of an indexer or attention and each problem, with its count and source line."""
        texts = [f"{m.op}: {m.reason} @ {_line(m.source)}" for m in self.report.near_misses]
        texts += [f"problem: {p}" for p in self.report.problems]
        return [f"{n} x {text}" for text, n in collections.Counter(texts).items()]


def _line(source: str) -> str:
    return re.sub(r"^.*/", "", source)


def routed(
    model: nn.Module,
    mode: Mode,
    steps: int = STEPS,
    *,
    routing: bool = True,
    options: RoutingOptions = DEFAULT,
    check: Verifier | None = None,
) -> tuple[capture.Captured, Found]:
    """Runs ``model`` with its Dynamo graphs routed and then interpreted, without Inductor.

    Args:
        model: from :func:`prepare`.
        mode: how it is called.
        steps: tokens to decode in a decoding mode.
        routing: False leaves the graphs as Dynamo made them.
        options: of the routing pass.
        check: compares routed formulas with their ops, and refuses those that differ.

    Returns:
        The results of the call, and what was found in the graphs of the last compile of each frame.
    """
    report, graphs = Report(), list[torch.fx.GraphModule]()
    backend = capture.interpreted(report, graphs, check, options, routing)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    got = evaluate(model, torch.compile(model, backend=backend, dynamic=mode.dynamic), mode, steps)
    ops = capture.ops_of(*graphs)
    breaks = [_first(reason) for reason in torch._dynamo.utils.counters["graph_break"]]
    found = Found(sum(ops[o] for o in INDEXERS), sum(ops[o] for o in ATTENTIONS), graphs, report, breaks)
    return got, found


def _first(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return " / ".join(lines[:4])[:300]


def look(family: str, mode: Mode, attention: str) -> Found:
    """Returns what routing finds in one call; ``error`` says why the call failed, if it did."""
    try:
        return routed(prepare(family, mode, attention), mode, steps=1)[1]
    except Exception as error:
        return Found(0, 0, [], Report(), [], f"{type(error).__name__}: {_first(str(error))}")


def compiled(model: nn.Module, mode: Mode, backend: str = "mhc_inductor", steps: int = STEPS) -> capture.Captured:
    """Runs ``model`` through ``torch.compile``, generated code and all."""
    torch._dynamo.reset()
    return evaluate(model, torch.compile(model, backend=backend, dynamic=mode.dynamic), mode, steps)


def bound(mode: Mode) -> float:
    """Returns the largest relative error that two ways of computing a call in ``mode`` may have."""
    return 5e-2 if mode.dtype == torch.bfloat16 else 1e-4
