# SPDX-License-Identifier: Apache-2.0
"""Runs one variant of the end-to-end benchmark in its own process, with cold caches.

The process builds the model and prints ``ready``, then compiles and prints ``compiled``. After each it waits for a line
on stdin, so that a driver can let one process compile or run while the others are idle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from .cold import cold_caches

VARIANTS = ("eager", "torch.compile", "trivial", "mhc_inductor")
PARTS = ("forward", "training", "checkpointed")


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures. ``size`` holds the fields of :class:`benchmarks.deepseek_model.Size`."""

    variant: str
    part: str
    device: str
    size: dict[str, int]
    rounds: int = 30

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.part}"


def measure(job: Job, wait: Callable[[str], None]) -> dict[str, Any]:
    """Builds, calls ``wait("ready")``, compiles, calls ``wait("compiled")`` and times; returns the row.

    Times are in ms, compile times in s, memory in GiB. The row also has the loss and the norm of the gradients.
    """
    import torch

    from . import deepseek_model, routing

    device = torch.device(job.device)
    cuda = device.type == "cuda"
    size = deepseek_model.Size(**job.size)
    model = deepseek_model.build(size, device, torch.bfloat16 if cuda else torch.float32)
    ids = deepseek_model.tokens(size, device)
    model.train(job.part != "forward")
    if job.part == "checkpointed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    call: Any = model
    if job.variant != "eager":
        call = torch.compile(model, backend="mhc_inductor" if job.variant == "mhc_inductor" else "inductor")

    def synchronize() -> None:
        if cuda:
            torch.cuda.synchronize(device)

    def step() -> torch.Tensor:
        if job.part == "forward":
            with torch.no_grad():
                return call(input_ids=ids).logits
        model.zero_grad(set_to_none=True)
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    def seconds() -> float:
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        return time.perf_counter() - start

    row: dict[str, Any] = {"variant": job.variant, "part": job.part}
    row["parameters"] = sum(p.numel() for p in model.parameters())
    ours = job.variant == "mhc_inductor"
    with (
        deepseek_model.trivial_coefficients() if job.variant == "trivial" else contextlib.nullcontext(),
        routing.watched() if ours else contextlib.nullcontext() as reports,
    ):
        synchronize()
        wait("ready")
        first = [seconds(), seconds()]
        if cuda:
            torch.cuda.empty_cache()
        wait("compiled")
        for _ in range(3):
            seconds()
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        samples = [round(1e3 * seconds(), 4) for _ in range(job.rounds)]
        loss = step()
    row["median_ms"] = statistics.median(samples)
    row["samples_ms"] = samples
    if job.part == "forward":
        loss = torch.nn.functional.cross_entropy(loss[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    row["loss"] = loss.item()
    if cuda:
        row["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    if job.part != "forward":
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        row["gradient_norm"] = torch.stack(squares).sum().sqrt().item()
        row["parameters_without_gradient"] = [n for n, p in model.named_parameters() if p.grad is None]
    if job.variant != "eager":
        row["compile_s"] = sum(first) - 2 * row["median_ms"] / 1e3
    if reports is not None:
        import mhc_inductor

        row["routing"] = routing.summary(reports) | {"counters": mhc_inductor.counters()}
        row["routing"]["share_of_compile"] = row["routing"]["seconds"] / row["compile_s"]
    return row


def main(words: str, out: str) -> None:
    """Measures the job in ``words`` (JSON) and writes its row to the file ``out``."""
    job = Job(**json.loads(words))
    with cold_caches():
        import torch

        if job.variant == "mhc_inductor":
            import mhc_inductor  # noqa: F401  (registers the backend in a checkout that is not installed)

        def wait(stage: str) -> None:
            print(stage, flush=True)
            sys.stdin.readline()

        try:
            row = measure(job, wait)
        except Exception as e:
            import traceback

            traceback.print_exc()
            row = {"variant": job.variant, "part": job.part, "error": f"{type(e).__name__}: {e}"[:2000]}
        torch._dynamo.reset()
        pathlib.Path(out).write_text(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
