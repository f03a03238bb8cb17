"""One cell: a model called in one way, compiled by this package, and compared with eager in the same dtype and in fp32."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import mhc_inductor

from .. import routing
from .models import MODELS, Model, build, missing, tokens

FACTOR, FP32_BOUND, LOSS_BOUND = 2.0, 1e-3, 1e-2
"""The largest error against fp32, as a multiple of eager's; what fp32 itself may differ by; and a loss at full width."""
WORST_BOUND = 0.5
"""A gradient that is this far off is wrong, unless the worst of eager is as well."""
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
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
    "train": Way(),
    "checkpoint": Way(reentrant=False),
    "left padded": Way(padding="left"),
    "decode": Way(train=False, decode=4, dynamic=None, calls=1),
    "CUDA graphs": Way(mode="reduce-overhead", calls=4),
    "dynamic lengths": Way(shares=(1.0, 0.75, 0.875), dynamic=None),
    "layer by layer": Way(layers=True),
    "reentrant": Way(reentrant=True),
    "fp32": Way(dtype=torch.float32),
    "forward": Way(train=False),
    "fp16, scaled": Way(dtype=torch.float32, autocast=torch.float16, scaled=True),
    "autocast": Way(dtype=torch.float32, autocast=torch.bfloat16),
    "right padded": Way(padding="right"),
    "accumulated": Way(shares=(1.0, 1.0)),
    "enable()": Way(enabled=True),
    "max-autotune": Way(mode="max-autotune", calls=4),
}
"""The most telling first: a budget that ends cuts off the others."""
WIDE = ("forward", "train", "checkpoint")
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
        ids = tokens(self.of, self.device, self.toy, share, seed)
        mask = torch.ones_like(ids)
        given: dict[str, Any] = {"input_ids": ids}
        if self.way.padding:
            pads = ids.shape[1] // 5
            mask[0, slice(0, pads) if self.way.padding == "left" else slice(-pads, None)] = 0
            given["attention_mask"] = mask
        if self.way.train:
            given["labels"] = ids.masked_fill(mask == 0, -100)
        return given, mask.bool()

    def step(self, model: nn.Module, call: Callable[..., Any], exact: bool = False) -> tuple[list[Tensor], float]:
        """Runs one step of ``model`` by ``call``; returns logits of real tokens and the loss, and leaves gradients."""
        model.zero_grad(set_to_none=True)
        if self.way.decode:
            return self._decode(model, call), 0.0
        to = None if exact else self.way.autocast
        scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**10, enabled=self.way.scaled and not exact)
        rows, loss = [], 0.0
        for seed, share in enumerate(self.way.shares):
            given, real = self.batch(share, seed)
            torch.compiler.cudagraph_mark_step_begin()
            context = torch.autocast(self.device.type, to) if to else contextlib.nullcontext()
            with context, contextlib.nullcontext() if self.way.train else torch.no_grad():
                out = call(**given, use_cache=False)
            rows.append(out.logits.detach()[real].clone())
            if self.way.train:
                loss += float(out.loss.detach()) / len(self.way.shares)
                scaler.scale(out.loss / len(self.way.shares)).backward()
        if scaler.is_enabled():
            scaler.unscale_(torch.optim.SGD(model.parameters(), 0.0))
        return rows, loss

    @torch.no_grad()
    def _decode(self, model: nn.Module, call: Callable[..., Any]) -> list[Tensor]:
        ids = self.batch(1.0, 0)[0]["input_ids"]
        prompt = ids.shape[1] - self.way.decode
        cache = model(input_ids=ids[:, :prompt], use_cache=True).past_key_values
        rows = []
        for at in range(prompt, ids.shape[1]):
            out = call(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[:, -1].clone())
        return rows

    def got(self, model: nn.Module, call: Callable[..., Any], exact: bool = False, calls: int = 1) -> Got:
        for _ in range(calls):
            rows, loss = self.step(model, call, exact)
        named = model.named_parameters()
        return Got([r.cpu() for r in rows], loss, {n: None if p.grad is None else p.grad.cpu() for n, p in named})

    def timed(self, call: Callable[..., Any]) -> dict[str, Any]:
        """Returns the median ms of three steps after one, and the peak in GiB."""
        cuda = self.device.type == "cuda"
        free()
        times = []
        for at in range(4):
            if cuda and at == 1:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            self.step(self.model, call)
            if cuda:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        peak = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if cuda else {}
        return {"ms": statistics.median(times[1:]), **peak}

    @contextlib.contextmanager
    def compiled(self, backend: str) -> Iterator[Callable[..., Any]]:
        """Yields the compiled model; ``backend`` is "mhc_inductor" or "inductor", which is torch.compile alone."""
        ours, way = backend == "mhc_inductor", self.way
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        asked: dict[str, Any] = {"backend": "inductor" if way.enabled else backend, "dynamic": way.dynamic}
        if way.enabled and ours:
            mhc_inductor.enable()
        try:
            # All templates of all products would take minutes.
            with torch._inductor.config.patch({"test_configs.max_mm_configs": 2}):
                if way.layers:
                    for layer in getattr(self.model, "model", self.model).layers:
                        layer.compile(**asked)
                yield self.model if way.layers else torch.compile(self.model, mode=way.mode, **asked)
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


def errors(got: Got, want: Got) -> dict[str, Any]:
    """Returns relative errors: of all logits, of all gradients, and the largest of one gradient, with its name.

    A sum over tokens may cancel to nearly nothing, so one gradient is measured against a twentieth of the largest too.
    """
    shapes = [(t.shape, t.dtype) for t in got.logits], [(t.shape, t.dtype) for t in want.logits]
    if [s for s, _ in shapes[0]] != [s for s, _ in shapes[1]]:
        raise RuntimeError(f"logits are {shapes[0]}, and {shapes[1]} eagerly")
    found: dict[str, Any] = {"logits": apart(*(torch.cat([t.flatten() for t in x.logits]) for x in (got, want)))}
    both = {n: (g, want.grads[n]) for n, g in got.grads.items() if g is not None and want.grads[n] is not None}
    if not both:
        return found
    top = 0.05 * max(float(w.abs().max()) for _, w in both.values())  # type: ignore[union-attr]
    sums = [(apart(g, w) * float(w.double().norm()), float(w.double().norm())) for g, w in both.values()]  # type: ignore[arg-type, union-attr]
    found["gradients"] = sum(d * d for d, _ in sums) ** 0.5 / max(sum(s * s for _, s in sums) ** 0.5, 1e-30)
    each = {n: apart(g, w, top) for n, (g, w) in both.items()}  # type: ignore[arg-type]
    found["worst"] = max(each.items(), key=lambda item: item[1])
    return found


def judged(row: dict[str, Any], got: Got, eager: Got | None, exact: Got | None, dtype: torch.dtype) -> list[str]:
    """Adds the errors to the row; returns what is wrong."""
    wrong = [f"{n} is not finite" for n, g in got.grads.items() if g is not None and not bool(g.isfinite().all())]
    wrong += ["logits are not finite"] * (not all(bool(t.isfinite().all()) for t in got.logits))
    if eager is None:
        return wrong
    if lost := [n for n, g in got.grads.items() if (g is None) != (eager.grads[n] is None)]:
        wrong.append(f"a gradient exists in one of eager and compiled only: {lost[:3]}")
    if (t := [x.dtype for x in got.logits]) != [x.dtype for x in eager.logits]:
        wrong.append(f"logits have dtypes {t}")
    row["from eager"], row["losses"] = errors(got, eager), [got.loss, eager.loss]
    if exact is None:
        far = abs(got.loss - eager.loss) > LOSS_BOUND * abs(eager.loss)
        return wrong + [f"the loss is {got.loss}, and {eager.loss} eagerly"] * far
    row["from fp32"], row["eager from fp32"] = ours, theirs = errors(got, exact), errors(eager, exact)
    for what in [k for k in ("logits", "gradients") if k in ours]:
        bound = FP32_BOUND if dtype == torch.float32 else FACTOR * theirs[what] + ROUNDING[dtype]
        if not ours[what] <= bound:
            wrong.append(f"{what}: {ours[what]:.2g} from fp32, above {bound:.2g}")
    if "worst" in ours:
        worst = 20 * FP32_BOUND if dtype == torch.float32 else max(WORST_BOUND, FACTOR * theirs["worst"][1])
        if not ours["worst"][1] <= worst:
            wrong.append(f"gradient of {ours['worst'][0]}: {ours['worst'][1]:.2g} from fp32, above {worst:.2g}")
    return wrong


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
    wide = model.wide and not toy
    eager = exact = None
    try:
        eager = runner.got(runner.model, runner.model)
        if model.wide:
            row["eager"] = runner.timed(runner.model)
    except torch.OutOfMemoryError:
        if not wide:
            raise
        row["eager"] = {"error": "out of memory"}
    runner.model.zero_grad(set_to_none=True)
    free()
    if not wide:
        other = copy.deepcopy(runner.model).float()
        exact = runner.got(other, other, exact=True)
    dtype = way.autocast or way.dtype
    found, wrong = attempt(runner, "mhc_inductor", eager, exact, dtype)
    row |= found
    if wrong and not wide:
        if device.type == "cuda":
            torch.cuda.synchronize()  # raises after an illegal access, whatever would run next
        other, too = attempt(runner, "inductor", eager, exact, dtype)
        # What torch.compile fails at as well is not of this package.
        if "output" in other or (too and "output" not in row):
            why = f"{'; '.join(wrong)}. torch.compile without this package too: {'; '.join(too)}"
            return {**row, "status": NAMED, "why": why}
    return {**row, "status": WRONG if wrong else RIGHT, "why": "; ".join(wrong)}


def attempt(
    runner: Runner, backend: str, eager: Got | None, exact: Got | None, dtype: torch.dtype
) -> tuple[dict[str, Any], list[str]]:
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
    return row, judged(row, got, eager, exact, dtype) + problems
