# SPDX-License-Identifier: Apache-2.0
"""The mHC benchmark: its rows, and how one run measures them.

A run is a list of groups. The variants of a group are timed round-robin, so that a drift of the clock affects all of
them alike. A failing variant is recorded in its row. If a failure leaves the device unusable, the rest of the run
continues in a fresh process without that variant.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import accuracy, environment, fused, ours, peers, running, targets, timing
from .peers import Inputs, make_inputs

DIMS = (2560, 4096, 7168)
CPU_TOKENS, CPU_DIM = 64, 256
DECODE_TOKENS, DECODE_DIM, DECODE_CHAIN = (1, 8, 64), 4096, 20
GROUPS = (*map(str, DIMS), "npu", "decode", "memory", "accuracy", "determinism")
QUICK_GROUPS = ("4096", "npu", "accuracy")
CPU_NOTICE = "CPU run, wall clock, a small shape: it says nothing of a GPU."
TWO_OPS = "ops, one after the other"
PARTS = ("rows", "decode", "memory", "accuracy", "determinism")


@dataclasses.dataclass
class Settings:
    """Settings of one run. ``groups``: some of GROUPS; ``exclude``: omitted ``group/row/variant`` keys and why."""

    device: str = "auto"
    groups: tuple[str, ...] = GROUPS
    rounds: int = 40
    measure_peers: bool = False
    compiled: bool = True
    seed: int | None = None
    tokens: int | None = None
    dim: int | None = None
    exclude: dict[str, str] = dataclasses.field(default_factory=dict)

    def resolve(self) -> torch.device:
        return running.device_of(self.device)


@dataclasses.dataclass
class Variant:
    """One row to measure. ``build`` prepares inputs and returns the call; ``check`` compares its outputs with fp64."""

    what: str
    variant: str
    tokens: int
    dim: int
    build: Callable[[], Callable[[], Any]]
    check: Callable[[Any], dict[str, Any]] | None = None
    calls: int = 1

    def key(self, group: str) -> str:
        return f"{group}/{self.what}/{self.variant}"


class DeviceLost(RuntimeError):
    """Raised when a failure of the variant ``args[0]`` has left the device context unusable."""


def _device_alive(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    try:
        torch.zeros(8, device=device).add_(1).cpu()
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


class Run(running.PartRun[Settings]):
    operator, notice, unit, lists = "mhc", CPU_NOTICE, None, PARTS

    def __init__(
        self, settings: Settings, save: Callable[[dict[str, Any]], None], report: Callable[[str], None]
    ) -> None:
        super().__init__(settings, save, report)
        self._fp64: list[tuple[Inputs, dict[str, torch.Tensor]]] = []

    def recorded(self) -> dict[str, Any]:
        return {
            "groups": list(self.s.groups),
            "seed": self.seed,
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        }

    # ---- inputs and references

    def tokens_and_dim(self, tokens: int, dim: int) -> tuple[int, int]:
        if self.gpu:
            return self.s.tokens or tokens, self.s.dim or dim
        return self.s.tokens or min(tokens, CPU_TOKENS), self.s.dim or CPU_DIM

    def inputs(self, tokens: int, dim: int, **kwargs: Any) -> Inputs:
        return make_inputs((tokens,), targets.N, dim, self.device, **kwargs)

    def exact(self, i: Inputs) -> dict[str, torch.Tensor]:
        """Returns the fp64 values of a case, computed once."""
        for known, values in self._fp64:
            if known is i:
                return values
        self._fp64.append((i, accuracy.reference(i)))
        return self._fp64[-1][1]

    # ---- variants

    def case_variants(self, i: Inputs, prefix: str = "", compiled_peer: bool = True) -> Iterator[Variant]:
        """Yields pre, post, fb and the fused ops of one case: by the ops, a compiled step, and the peers."""
        tokens, _, dim = i.x.shape
        with torch.no_grad():
            c = peers.plain_coefficients(i.x, i.phi, i.alpha, i.bias, i.gamma, i.iters)
        h_post, h_res = c["h_post"].detach(), c["h_res"].detach()
        exact = self.exact(i)

        def check(got: dict[str, torch.Tensor]) -> dict[str, Any]:
            return accuracy.compare(got, exact, i.with_post)

        def check_post(got: dict[str, torch.Tensor]) -> dict[str, Any]:
            want = peers.plain_post(*(t.double() for t in (i.x, i.f_out, h_post, h_res)), i.transpose_res)
            return accuracy.compare(got, {"x_out": want}, True)

        def with_leaves(call: Callable[[Inputs], Any]) -> Callable[[], Callable[[], Any]]:
            def build() -> Callable[[], Any]:
                j = i.detached()
                for t in j.leaves():
                    t.requires_grad_()
                return lambda: call(j)

            return build

        def row(what: str, variant: str, build: Callable[[], Callable[[], Any]], checked: Any = None) -> Variant:
            return Variant(prefix + what, variant, tokens, dim, build, checked)

        yield row("pre", "ops", lambda: lambda: ours.ops_pre(i), check)
        if i.with_post:
            yield row("post", "ops", lambda: lambda: ours.ops_post(i, h_post, h_res), check_post)
        yield row("fb", "ops", lambda: lambda: ours.ops_fb(i), check)
        if i.with_post:
            two_passes = fused.PostPre.make(i, h_post, h_res)
            one_pass = two_passes.single_pass()
            for what, call, p in (
                ("post_pre", ours.ops_post_pre, two_passes),
                ("post_pre_fb", ours.ops_post_pre_fb, two_passes),
                ("single_pass", ours.ops_single_pass, one_pass),
                ("single_pass_fb", ours.ops_single_pass_fb, one_pass),
            ):
                for variant, one in (("ops", True), (TWO_OPS, False)):
                    # The two ops round the gradient of x_out between them: only the fused op must meet one rounding.
                    check = (lambda got, p=p: fused.check(p, got)) if one else None
                    yield row(what, variant, lambda call=call, p=p, one=one: lambda: call(p, one), check)
        if self.s.compiled:
            yield row("fb", "compiled", lambda: with_leaves(ours.autograd_fb(True))(), check)
        for name, peer in self.peers(i, compiled_peer):
            yield row("pre", name, lambda peer=peer: _no_grad(lambda: peer().pre(i)))
            if i.with_post:
                yield row("post", name, lambda peer=peer: _no_grad(lambda: peer().post(i, h_post, h_res)))
            yield row("fb", name, lambda peer=peer: with_leaves(peer().fb)())

    def peers(self, i: Inputs, compiled: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
        if not self.s.measure_peers:
            return
        cache: dict[str, Any] = {}

        def once(name: str, make: Callable[[], Any]) -> Callable[[], Any]:
            def get() -> Any:
                if name not in cache:
                    cache[name] = make()
                return cache[name]

            return get

        yield targets.EAGER, once(targets.EAGER, lambda: peers.Plain(compiled=False))
        # Compiling the plain formula takes longer than everything else, so compile it at one width only.
        if compiled and self.s.compiled and i.x.shape[-1] == self.tokens_and_dim(1, 4096)[1]:
            yield targets.COMPILE, once(targets.COMPILE, lambda: peers.Plain(compiled=True))
        if i.gamma is not None:
            self.result["skipped"]["Liger, npu rows"] = "Liger has no gamma"
        elif missing := (peers.liger_missing() if self.gpu else "Liger's kernels need a GPU"):
            self.result["skipped"][targets.LIGER] = missing
        else:
            yield targets.LIGER, once(targets.LIGER, peers.Liger)

    # ---- running

    def time(self, group: str, variants: list[Variant], rows: list[dict[str, Any]]) -> None:
        """Builds, times and checks the variants of one group; appends their rows."""
        ready: dict[str, timing.Runnable] = {}
        done: dict[str, dict[str, Any]] = {}
        for v in variants:
            key = v.key(group) + (f"@{v.tokens}" if group == "decode" else "")
            done[key] = self.row_header(v)
            if key in self.s.exclude:
                done[key]["error"] = self.s.exclude[key]
                continue
            self.report(f"{group}: preparing {v.what} {v.variant} at {v.tokens} tokens, D = {v.dim}")
            try:
                ready[key] = timing.Runnable(v.build(), self.device)
            except Exception as e:
                done[key]["error"] = running.message(e)
                if not _device_alive(self.device):
                    raise DeviceLost(key, running.message(e)) from e
        self.report(f"{group}: timing {len(ready)} variants, {self.s.rounds} rounds")
        times = timing.interleaved(ready, self.device, self.flush, self.s.rounds)
        for v, (key, row) in zip(variants, done.items(), strict=True):
            if key not in ready:
                continue
            row.update(_figures(row, times[key], v.calls, self.bars_apply))
            try:
                if v.check is not None:
                    row["errors"] = v.check(ready[key].run_poisoned())
                    row["correct"] = all(e["met"] for e in row["errors"].values())
            except Exception as e:
                row["error"] = running.message(e)
                if not _device_alive(self.device):
                    raise DeviceLost(key, running.message(e)) from e
            ready[key].close()
        rows.extend(done.values())

    def row_header(self, v: Variant) -> dict[str, Any]:
        row: dict[str, Any] = {
            "what": v.what,
            "variant": v.variant,
            "tokens": v.tokens,
            "n": targets.N,
            "dim": v.dim,
        }
        row["floor_us"] = targets.floor_us(v.what, v.tokens, v.dim, phi=v.tokens < 1024)
        target = targets.TARGETS.get((v.what, v.dim)) if v.tokens == targets.TOKENS else None
        if target is not None:
            best = target.best_peer
            row.update(bar_us=target.bar, goal_us=target.goal, measured_separately_us=target.peers)
            row.update(best_peer=best[0] if best else None, best_peer_us=best[1] if best else None)
        return row

    def group(self, name: str) -> None:
        torch.compiler.reset()
        if name == "npu":
            i = self.inputs(*self.tokens_and_dim(targets.TOKENS, 4096), npu=True)
            self.time(name, list(self.case_variants(i, "npu_")), self.result["rows"])
        elif name == "decode":
            self.decode()
        elif name == "memory":
            self.memory()
        elif name == "accuracy":
            self.accuracy()
        elif name == "determinism":
            tokens, dim = self.tokens_and_dim(2048, 4096)
            self.result["determinism"] = accuracy.determinism(self.device, dim, tokens)
        else:
            i = self.inputs(*self.tokens_and_dim(targets.TOKENS, int(name)))
            self.time(name, list(self.case_variants(i)), self.result["rows"])
        self._fp64.clear()
        running.free(self.device)

    def decode(self) -> None:
        for wanted in DECODE_TOKENS:
            tokens, dim = self.tokens_and_dim(wanted, DECODE_DIM)
            i = self.inputs(tokens, dim)
            every = self.case_variants(i, compiled_peer=False)
            cold = [v for v in every if not v.what.endswith("fb") and v.variant != TWO_OPS]
            chained = [
                dataclasses.replace(
                    v,
                    variant=f"{v.variant}, chain of {DECODE_CHAIN}",
                    build=lambda v=v: timing.chain(v.build(), DECODE_CHAIN),
                    check=None,
                    calls=DECODE_CHAIN,
                )
                for v in cold
                if self.gpu
            ]
            self.time("decode", cold + chained, self.result["decode"])

    def memory(self) -> None:
        """Measures the peak memory of forward + backward above inputs and outputs, in MB (10^6 bytes)."""
        if not self.gpu:
            self.result["skipped"]["memory"] = "peak memory is read from a GPU's allocator"
            return
        tokens, dim = self.tokens_and_dim(targets.TOKENS, 4096)
        calls: dict[str, Callable[[Inputs], Any]] = {"ops": ours.ops_fb, "eager": ours.autograd_fb(False)}
        if self.s.compiled:
            calls["compiled"] = ours.autograd_fb(True)
        for name, call in calls.items():
            row: dict[str, Any] = {
                "variant": name,
                "tokens": tokens,
                "dim": dim,
                "bar_mb": targets.PEAK_BAR_MB,
            }
            self.result["memory"].append(row)
            self.report(f"memory: {name}")
            i = self.inputs(tokens, dim)
            try:
                if name != "ops":
                    for t in i.leaves():
                        t.requires_grad_()
                call(i)
                row.update(running.peak_memory(lambda call=call, i=i: call(i), self.device, targets.PEAK_BAR_MB))
            except Exception as e:
                row["error"] = running.message(e)

    def accuracy(self) -> None:
        tokens, dim = (512, 4096) if self.gpu else self.tokens_and_dim(64, CPU_DIM)
        cases = {
            "training, sinkhorn 20, R": {},
            "training, sinkhorn 20, R transposed": {"transpose_res": True},
            "npu_mhc_pre: gamma, raw h_res": {"npu": True},
        }
        for name, kwargs in cases.items():
            self.report(f"accuracy: {name}")
            i = self.inputs(tokens, dim, **kwargs)
            compiled = self.s.compiled and not kwargs
            self.result["accuracy"].append(accuracy.case(name, i, compiled))
        self.result["accuracy"].append(accuracy.record_case(self.device))

    def run(self) -> dict[str, Any]:
        try:
            self.report("copy bandwidth")
            self.result["copy"] = timing.copy_bandwidth(self.device, self.flush, max(self.s.rounds // 2, 5))
            self.save(self.result)
            for at, name in enumerate(self.s.groups):
                self.one_group(name, self.s.groups[at:])
                self.save(self.result)
        except _Relaunched:
            pass
        return self.finish()

    def one_group(self, name: str, remaining: tuple[str, ...]) -> None:
        lengths = {part: len(self.result[part]) for part in PARTS}
        try:
            self.group(name)
        except DeviceLost as lost:
            for (
                part,
                length,
            ) in lengths.items():  # the new process measures the whole interrupted group again
                del self.result[part][length:]
            key, text = lost.args
            self.report(f"{key} left the device unusable; continuing in a new process")
            self.relaunch(remaining, {**self.s.exclude, key: text})
            raise _Relaunched from lost
        except Exception as e:
            self.result["skipped"][name] = running.message(e)
            if not _device_alive(self.device):
                self.relaunch(remaining[1:], self.s.exclude)
                raise _Relaunched from e

    def relaunch(self, groups: tuple[str, ...], exclude: dict[str, str]) -> None:
        """Runs the remaining groups in a new process and merges its results."""
        if not groups:
            return
        settings = dataclasses.asdict(dataclasses.replace(self.s, groups=groups, exclude=exclude, seed=self.seed + 1))
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "rest.json"
            command = [sys.executable, "-m", "benchmarks.mhc", json.dumps(settings), str(path)]
            status = subprocess.run(command, cwd=environment.ROOT, check=False).returncode
            if not path.exists():
                self.result["skipped"].update({g: f"a second process ended with status {status}" for g in groups})
                return
            rest = json.loads(path.read_text())
        for part in PARTS:
            self.result[part] = self.result[part] + rest[part]
        self.result["skipped"].update(rest["skipped"])


class _Relaunched(Exception):
    """Raised after a new process has measured the remaining groups."""


def _no_grad(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return call()

    return run


def _figures(row: dict[str, Any], t: timing.Timing, calls: int, bars_apply: bool) -> dict[str, Any]:
    """Returns the figures of one row; the times of a chain are divided by its number of calls."""
    if calls > 1:
        t = timing.Timing([s / calls for s in t.samples_us])
    out = {**t.as_json(), "ratio_to_floor": round(t.median / row["floor_us"], 4)}
    if bars_apply and row.get("bar_us") is not None and row["variant"] in ("ops", "compiled"):
        out["met_bar"] = t.median <= row["bar_us"]
        out["met_goal"] = t.median <= row["goal_us"]
        if row["best_peer_us"] is not None:
            out["not_slower_than_best_peer"] = t.median <= row["best_peer_us"]
    return out


def _child(settings: str, path: str) -> None:
    fields = json.loads(settings)
    fields["groups"] = tuple(fields["groups"])
    Run(
        Settings(**fields), lambda found: running.save(found, pathlib.Path(path)), lambda text: print(text, flush=True)
    ).run()


if __name__ == "__main__":
    _child(*sys.argv[1:])
