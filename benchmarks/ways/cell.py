# SPDX-License-Identifier: Apache-2.0
"""One cell: a model called in one way, compiled by this package, and compared with eager in the same dtype and in fp32."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import statistics
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import mhc_inductor

from .. import routing, timing
from .models import MODELS, Model, build, missing

FACTOR, FP32_BOUND, LOSS_BOUND = 2.0, 1e-3, 1e-2
"""The largest error against fp32, as a multiple of eager's; what fp32 itself may differ by; and a loss at full width."""
LOOSE_BOUND = 0.5
"""The bound of what a single other choice of a key or an expert moves: a whole that is wrong is further off."""
STRICT, LOOSE = ("median token", "gradients"), ("logits", "worst gradient")
RIGHT, NAMED, WRONG = "right", "named", "wrong"


@dataclasses.dataclass(frozen=True)
class Way:
    """How a model is called.

    ``dtype`` is of the parameters, ``autocast`` of the call; ``reentrant``: of checkpointing, None for none. ``shares``
    of the length are the micro-batches whose gradients are added; ``calls`` with the same input, of which the last
    counts, show what depends on earlier ones.
    """

    train: bool = True
    dtype: torch.dtype = torch.bfloat16
    autocast: torch.dtype | None = None
    scaled: bool = False
    reentrant: bool | None = None
    padding: str = ""
    shares: tuple[float, ...] = (1.0,)
    decode: int = 0
    mode: str | None = None
    dynamic: bool | None = False
    layers: bool = False
    enabled: bool = False
    calls: int = 2


WAYS = {
    "dynamic lengths": Way(shares=(1.0, 0.75, 0.875), dynamic=None),
    "max-autotune": Way(mode="max-autotune", calls=4),
    "train": Way(),
    "checkpoint": Way(reentrant=False),
    "left padded": Way(padding="left"),
    "decode": Way(train=False, decode=4, dynamic=None, calls=1),
    "CUDA graphs": Way(mode="reduce-overhead", calls=4),
    "layer by layer": Way(layers=True),
    "reentrant": Way(reentrant=True),
    "fp32": Way(dtype=torch.float32),
    "decode, fp32": Way(train=False, decode=4, dynamic=None, calls=1, dtype=torch.float32),
    "forward": Way(train=False),
    "fp16, scaled": Way(dtype=torch.float32, autocast=torch.float16, scaled=True),
    "autocast": Way(dtype=torch.float32, autocast=torch.bfloat16),
    "right padded": Way(padding="right"),
    "accumulated": Way(shares=(1.0, 1.0)),
    "enable()": Way(enabled=True),
}
"""Those that compile for minutes first, then the most telling: a budget that ends cuts off the others."""
WIDE = ("checkpoint", "train", "forward")
"""The ways of a model at its published widths."""


def not_there(model: Model, way: Way) -> str:
    """Returns why the model cannot be called in this way, or an empty string."""
    if model.family in ("mhc", "e79"):
        what = "cache" if way.decode else "attention mask" if way.padding else ""
        return f"the model takes no {what}" if what else ""
    return missing(model)


@dataclasses.dataclass
class Got:
    """Results of a call, on the CPU."""

    logits: list[Tensor]
    loss: float
    grads: dict[str, Tensor | None]


class Runner:
    """Calls the model of a cell."""

    def __init__(self, model: Model, way: Way, device: torch.device, toy: bool) -> None:
        self.of, self.way, self.device, self.toy = model, way, device, toy
        self.model = build(model, device, way.dtype, toy).train(way.train)
        if way.reentrant is not None:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": way.reentrant})

    def batch(self, share: float, seed: int) -> tuple[dict[str, Any], Tensor]:
        """Returns the arguments of a call, and which tokens are no padding."""
        ids = self.of.tokens(self.device, self.toy, share, seed)
        mask, pads = torch.ones_like(ids), ids.shape[1] // 5
        if self.way.padding:
            mask[0, slice(0, pads) if self.way.padding == "left" else slice(-pads, None)] = 0
        given = {"input_ids": ids} | ({"attention_mask": mask} if self.way.padding else {})
        return given | ({"labels": ids.masked_fill(mask == 0, -100)} if self.way.train else {}), mask.bool()

    def step(self, model: nn.Module, call: Callable[..., Any], exact: bool = False) -> tuple[list[Tensor], float]:
        """Runs one step of ``model`` by ``call``; returns logits of real tokens and the loss, and leaves gradients."""
        model.zero_grad(set_to_none=True)
        if self.way.decode:
            return self._decode(model, call), 0.0
        casts = self.way.autocast is not None and not exact
        scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**10, enabled=self.way.scaled and not exact)
        rows, loss, parts = [], 0.0, len(self.way.shares)
        for seed, share in enumerate(self.way.shares):
            given, real = self.batch(share, seed)
            torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast(self.device.type, self.way.autocast, casts), torch.set_grad_enabled(self.way.train):
                out = call(**given, use_cache=False)
            rows.append(out.logits.detach()[real].clone())
            if self.way.train:
                loss += float(out.loss.detach()) / parts
                scaler.scale(out.loss / parts).backward()
        if scaler.is_enabled():
            scaler.unscale_(torch.optim.SGD(model.parameters(), 0.0))
        return rows, loss

    @torch.no_grad()
    def _decode(self, model: nn.Module, call: Callable[..., Any]) -> list[Tensor]:
        ids = self.batch(1.0, 0)[0]["input_ids"]
        prompt = ids.shape[1] - self.way.decode
        cache, rows = model(input_ids=ids[:, :prompt], use_cache=True).past_key_values, []
        for at in range(prompt, ids.shape[1]):
            out = call(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[:, -1].clone())
        return rows

    def got(self, model: nn.Module, call: Callable[..., Any], exact: bool = False, calls: int = 1) -> Got:
        for _ in range(calls):
            rows, loss = self.step(model, call, exact)
        grads = {n: None if p.grad is None else p.grad.cpu() for n, p in model.named_parameters()}
        return Got([r.cpu() for r in rows], loss, grads)

    def timed(self, call: Callable[..., Any]) -> dict[str, Any]:
        """Returns the median ms of three steps after one, and their peak in GiB."""
        free()
        self.step(self.model, call)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        times = [1e3 * timing.seconds(lambda: self.step(self.model, call), self.device) for _ in range(3)]
        return {"ms": statistics.median(times), "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None}

    @contextlib.contextmanager
    def compiled(self, backend: str) -> Iterator[Callable[..., Any]]:
        """Yields the compiled model; ``backend`` is "mhc_inductor" or "inductor", which is torch.compile alone."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        asked: dict[str, Any] = {"backend": "inductor" if self.way.enabled else backend, "dynamic": self.way.dynamic}
        if self.way.enabled and backend == "mhc_inductor":
            mhc_inductor.enable()
        try:
            # All templates of all products would take minutes.
            with torch._inductor.config.patch({"test_configs.max_mm_configs": 2}):
                if self.way.layers:
                    for layer in getattr(self.model, "model", self.model).layers:
                        layer.compile(**asked)
                yield self.model if self.way.layers else torch.compile(self.model, mode=self.way.mode, **asked)
        finally:
            mhc_inductor.disable()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def apart(got: Tensor, want: Tensor, least: float = 0.0) -> float:
    """Returns the norm of the difference over the norm of ``want``, or over ``least`` of each element if that is more."""
    size = max(float(want.double().norm()), least * want.numel() ** 0.5, 1e-30)
    return float((got.double() - want.double()).norm()) / size


def errors(got: Got, want: Got) -> dict[str, float]:
    """Returns relative errors: of the median token's logits, of all logits, of all gradients, and the worst gradient's.

    A rounding can change which key or expert a token takes, and few tokens differ that way: the median does not see
    them. A sum over tokens may cancel to nearly nothing, so the worst gradient is of at least a twentieth of the largest.
    """
    shapes = [[*t.shape] for t in got.logits], [[*t.shape] for t in want.logits]
    if shapes[0] != shapes[1]:
        raise RuntimeError(f"logits are {shapes[0]}, and {shapes[1]} eagerly")
    a, b = (torch.cat([t.flatten(0, -2) for t in x.logits]).double() for x in (got, want))
    tokens = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)
    found = {"median token": float(tokens.median()), "logits": apart(a, b)}
    both = [(g, w) for n, g in got.grads.items() if g is not None and (w := want.grads[n]) is not None]
    if both:
        sizes = [float(w.double().norm()) for _, w in both]
        whole = sum((apart(g, w) * size) ** 2 for (g, w), size in zip(both, sizes, strict=True)) ** 0.5
        found["gradients"] = whole / max(sum(size * size for size in sizes) ** 0.5, 1e-30)
        top = 0.05 * max(float(w.abs().max()) for _, w in both)
        found["worst gradient"] = max(apart(g, w, top) for g, w in both)
    return found


def finite(t: Tensor | None) -> bool:
    return t is None or bool(t.isfinite().all())


def judged(row: dict[str, Any], got: Got, eager: Got | None, exact: Got | None, dtype: torch.dtype) -> list[str]:
    """Adds the errors to the row; returns what is wrong. Gradients that are not finite in eager are left out."""
    if eager is not None and (lost := [n for n, g in eager.grads.items() if not finite(g)]):
        row["not finite in eager"] = lost
        left = [n for n in eager.grads if n not in lost]
        got, eager, exact = (
            x and dataclasses.replace(x, grads={n: x.grads[n] for n in left}) for x in (got, eager, exact)
        )
    wrong = [f"{n} is not finite" for n, g in got.grads.items() if not finite(g)]
    wrong += ["logits are not finite"] * (not all(map(finite, got.logits)))
    row["loss"] = got.loss
    if eager is None:
        return wrong
    if lost := [n for n, g in got.grads.items() if (g is None) != (eager.grads[n] is None)]:
        wrong.append(f"a gradient exists in one of eager and compiled only: {lost[:3]}")
    if (t := [x.dtype for x in got.logits]) != [x.dtype for x in eager.logits]:
        wrong.append(f"logits have dtypes {t}")
    row["from eager"], row["eager loss"] = errors(got, eager), eager.loss
    if exact is not None:
        row["from fp32"], row["eager from fp32"] = errors(got, exact), errors(eager, exact)
    return [*wrong, *_too_far(row, dtype)]


def _too_far(row: dict[str, Any], dtype: torch.dtype) -> Iterator[str]:
    """Yields the errors of a row that are above their bounds: from fp32 where it was run, else from eager."""
    if "from fp32" not in row:
        if not (median := row["from eager"]["median token"]) <= LOOSE_BOUND:
            yield f"median token: {median:.2g} from eager, above {LOOSE_BOUND}"
        if not abs(row["loss"] - row["eager loss"]) <= LOSS_BOUND * abs(row["eager loss"]):
            yield f"the loss is {row['loss']}, and {row['eager loss']} eagerly"
        return
    ours, theirs = row["from fp32"], row["eager from fp32"]
    exact_bound = FP32_BOUND if dtype == torch.float32 else 0.0
    for what in (k for k in (*STRICT, *LOOSE) if k in ours):
        bound = exact_bound or FACTOR * theirs[what] + torch.finfo(dtype).eps / 2
        if what in LOOSE:
            bound = max(bound, 20 * exact_bound or LOOSE_BOUND)
        if not ours[what] <= bound:
            yield f"{what}: {ours[what]:.2g} from fp32, above {bound:.2g}"


def said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[:3])}"[:400]


def measure(name: str, way_name: str, device: torch.device, toy: bool) -> dict[str, Any]:
    """Returns the row of a cell. "status" is "right", "wrong" or "named", and "why" says why it is not right."""
    model, way = MODELS[name], WAYS[way_name]
    if why := not_there(model, way):
        return {"status": NAMED, "why": why}
    torch.set_float32_matmul_precision("highest")
    runner = Runner(model, way, device, toy)
    row: dict[str, Any] = {"parameters": sum(p.numel() for p in runner.model.parameters())}
    wide = bool(model.wide) and not toy
    eager = exact = None
    try:
        eager = runner.got(runner.model, runner.model)
        if model.wide:
            row["eager"] = runner.timed(runner.model)
    except torch.OutOfMemoryError:
        row["eager"] = {"error": "out of memory"}
    except Exception as error:
        return {"status": NAMED, "why": f"eager fails: {said(error)}", "output": traceback.format_exc()[-3000:]}
    runner.model.zero_grad(set_to_none=True)
    free()
    if not wide:
        other = copy.deepcopy(runner.model).float()
        exact = runner.got(other, other, exact=True)
    found, wrong = attempt(runner, "mhc_inductor", eager, exact)
    row |= found | {"status": WRONG if wrong else RIGHT, "why": "; ".join(wrong)}
    if why := _not_ours(row, runner, eager, exact, wide):
        row |= {"status": NAMED, "why": why}
    return row


def _not_ours(row: dict[str, Any], runner: Runner, eager: Got | None, exact: Got | None, wide: bool) -> str:
    """Returns why a cell that is not right is not of this package: eager's gradients, or torch.compile, are wrong too."""
    if row["status"] == RIGHT:
        lost = row.get("not finite in eager")
        return f"eager's gradients of {len(lost)} parameters are not finite; the rest is right" if lost else ""
    if wide or not works(runner.device):
        return ""
    other, too = attempt(runner, "inductor", eager, exact)
    as_well = "output" in other or (too and "output" not in row)
    return f"{row['why']}. torch.compile without this package too: {'; '.join(too)}" if as_well else ""


def works(device: torch.device) -> bool:
    """Returns whether the device still takes calls: after an illegal access, it fails at all that come."""
    try:
        torch.ones(1, device=device).item()
    except Exception:
        return False
    return True


def attempt(runner: Runner, backend: str, eager: Got | None, exact: Got | None) -> tuple[dict[str, Any], list[str]]:
    """Runs the cell compiled; returns what was found, with "output" if it raised, and what is wrong."""
    row: dict[str, Any] = {}
    try:
        with routing.watched() as reports, runner.compiled(backend) as call:
            got = runner.got(runner.model, call, calls=runner.way.calls)
            row["skipped graphs"] = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
            if runner.of.wide:
                row["ours"] = runner.timed(call)
    except Exception as error:
        return {"output": traceback.format_exc()[-3000:]}, [said(error)]
    row["graphs"], row["routed"] = len(reports), dict(Counter(x.op for r in reports for x in r.routed))
    row["near misses"] = dict(Counter(f"{m.op}: {m.reason}" for r in reports for m in r.near_misses if not m.ordinary))
    problems = [p for r in reports for p in r.problems]
    return row, judged(row, got, eager, exact, runner.way.autocast or runner.way.dtype) + problems
