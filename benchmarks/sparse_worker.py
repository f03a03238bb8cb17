# SPDX-License-Identifier: Apache-2.0
"""Runs one case of the sparse benchmark with one compiler, in its own process, with cold caches."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from .cold import cold_caches
from .sparse_targets import COMPILE, COMPILE_GRAPHS, EAGER, OURS, OURS_GRAPHS, OURS_LAYERS, TRAINING, Case

BACKENDS = {COMPILE: "inductor", COMPILE_GRAPHS: "inductor"}
BACKENDS |= dict.fromkeys((OURS, OURS_GRAPHS, OURS_LAYERS), "mhc_inductor")


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures. ``toy``: tiny sizes; ``rounds``: timed calls at most, within ``seconds``."""

    variant: str
    case: dict[str, Any]
    device: str
    toy: bool = False
    rounds: int = 20
    seconds: float = 10.0

    @property
    def of(self) -> Case:
        return Case(**self.case)

    @property
    def name(self) -> str:
        return f"{self.of.name}-{self.variant}"


class Process:
    """The model of a job and its calls."""

    def __init__(self, job: Job) -> None:
        import torch

        from . import sparse_cases

        self.job, self.case = job, job.of
        self.device = torch.device(job.device)
        self.cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.trains = self.case.part == TRAINING
        self.model = sparse_cases.build(self.case, self.device, self.dtype, job.toy).train(self.trains)
        self.ids = sparse_cases.tokens(self.case, self.device, job.toy)
        self.graphs = job.variant in (OURS_GRAPHS, COMPILE_GRAPHS)
        self.call: Any = self.model
        if job.variant == OURS_LAYERS:
            for layer in self.model.get_submodule("model.layers"):
                layer.compile(backend=BACKENDS[OURS_LAYERS], dynamic=False)
        elif backend := BACKENDS.get(job.variant):
            mode = "reduce-overhead" if self.graphs else None
            self.call = torch.compile(self.model, backend=backend, dynamic=False, mode=mode)

    def step(self) -> Any:
        """Makes one call: logits without gradients, or a loss and its gradients."""
        import torch

        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        if not self.trains:
            with torch.no_grad():
                return self.call(input_ids=self.ids, use_cache=False).logits
        self.model.zero_grad(set_to_none=True)
        out = self.call(input_ids=self.ids, labels=self.ids, use_cache=False)
        out.loss.backward()
        return out.logits.detach()

    def seconds(self) -> float:
        """Returns how long one call takes."""
        self.wait()
        start = time.perf_counter()
        self.step()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.synchronize(self.device)

    def times(self) -> dict[str, Any]:
        """Compiles, warms up and times; returns ms, GiB and seconds of compiling."""
        import torch

        first = [self.seconds(), self.seconds()]
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        once = min(self.seconds() for _ in range(2))
        count = max(3, min(self.job.rounds, int(self.job.seconds / once)))
        samples = [round(1e3 * self.seconds(), 4) for _ in range(count)]
        row: dict[str, Any] = {"median_ms": statistics.median(samples), "samples_ms": samples}
        if self.cuda:
            row["peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        if self.job.variant != EAGER:
            row["compile_s"] = sum(first) - 2 * row["median_ms"] / 1e3
        return row

    def errors(self) -> dict[str, float]:
        """Returns the relative errors of logits and gradients against the same weights run eagerly in fp32."""
        # A CUDA graph's results are overwritten by the next call.
        logits, grads = self.step().clone(), {n: g.clone() for n, g in self._gradients().items()}
        self.model.zero_grad(set_to_none=True)
        self.model.float()
        self.call, self.graphs = self.model, False
        gc.collect()
        want, exact = self.step(), self._gradients()
        row = {"error_logits": _relative([logits], [want])}
        if self.trains:
            if lost := sorted(exact.keys() ^ grads.keys()):
                raise RuntimeError(f"gradients of {lost[:3]} exist in one of fp32 and {self.job.variant} only")
            row["error_gradients"] = _relative([grads[k] for k in exact], [*exact.values()])
        return row

    def _gradients(self) -> dict[str, Any]:
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


def _relative(got: list[Any], want: list[Any]) -> float:
    """Returns the norm of the difference of two lists of tensors, over the norm of the second."""
    apart = sum(float((a.float() - b).double().square().sum()) for a, b in zip(got, want, strict=True))
    size = sum(float(b.double().square().sum()) for b in want)
    return float((apart / max(size, 1e-300)) ** 0.5)


def measure(job: Job, save: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
    """Returns the row of a job: times, memory, errors, and what was routed. ``save`` gets the times first."""
    from . import routing

    process = Process(job)
    row: dict[str, Any] = {"variant": job.variant, "case": job.of.name, "part": job.of.part}
    row["parameters"] = sum(p.numel() for p in process.model.parameters())
    ours = job.variant in (OURS, OURS_GRAPHS, OURS_LAYERS)
    with routing.watched() if ours else contextlib.nullcontext() as reports:
        row |= process.times()
    if reports is not None:
        row["routing"] = routing.summary(reports)
        row["reasons"] = sorted({m.reason for r in reports for m in r.near_misses if not m.ordinary})
    save(row)
    if job.of.checked:
        row = {**row, **process.errors()}
    return row


def main(words: str, out: str) -> None:
    """Measures the job in ``words`` (JSON) and writes its row to the file ``out``."""
    job = Job(**json.loads(words))
    with cold_caches():
        if BACKENDS.get(job.variant) == "mhc_inductor":
            import mhc_inductor  # noqa: F401  (registers the backend in a checkout that is not installed)

        def save(row: dict[str, Any]) -> None:
            pathlib.Path(out).write_text(json.dumps(row))

        kept: dict[str, Any] = {"variant": job.variant, "case": job.of.name, "part": job.of.part}
        try:
            row = measure(job, lambda r: (kept.update(r), save(r))[1])
        except Exception as e:
            import traceback

            traceback.print_exc()
            row = {**kept, "error": f"{type(e).__name__}: {e}"[:2000]}
        save(row)


if __name__ == "__main__":
    main(*sys.argv[1:])
