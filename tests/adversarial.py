# SPDX-License-Identifier: Apache-2.0
"""Random programs that mix routed formulas with constructs that once broke routing: routed and eager must agree.

``python -m tests.adversarial`` runs 3000 of them, each in training and in inference, and ``--json FILE`` writes the
counts with a hash of the routing sources. A program is a list of Python statements. A failing program is printed after
all statements that the failure does not need have been removed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import linecache
import logging
import multiprocessing
import os
import platform
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.source_hash import ROUTING, source_hash
from tests import test_laws_autograd
from tests.formulas import laws
from tests.formulas.laws import Leaves, Program, Seen
from tests.formulas.laws_writes import PLAIN, UNRECORDED, WRITES, written

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "adversarial.json"
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
MODES = ("train", "no_grad", "inference")


# --- functions a program's statements may call --------------------------------------------------------------


def hooked(t: torch.Tensor, kind: str) -> torch.Tensor:
    """Registers a gradient hook if ``t`` requires grad, and returns ``t``.

    Raises NotImplementedError where the hook would crash PyTorch.
    """
    if t.requires_grad:
        if not torch.compiler.is_compiling() and type(t.grad_fn).__name__ == "AsStridedBackward0":
            raise NotImplementedError("a hook on a view that was written through another one is a segmentation fault")
        t.register_hook({"halve": lambda g: g * 0.5, "clip": lambda g: g.clamp(-0.5, 0.5)}[kind])
    return t


def rounded(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns ``t`` cast to ``dtype`` and back."""
    return t.to(dtype).to(t.dtype)


def without_grad(t: torch.Tensor) -> torch.Tensor:
    """Returns a new tensor computed under ``no_grad``."""
    with torch.no_grad():
        return t * 1.25


def causal(p: Leaves) -> torch.Tensor:
    """Returns the causal mask, bool [1, S, 1, T]."""
    S, T = p["q"].shape[1], p["k"].shape[1]
    return (torch.arange(T) <= torch.arange(S).unsqueeze(-1) + (T - S)).view(1, S, 1, T)


_NAMES: dict[str, Any] = {
    "torch": torch,
    "hooked": hooked,
    "rounded": rounded,
    "quiet": lambda write, t: written(WRITES[write], False)(t),
    "loud": lambda write, t: written(WRITES[write])(t),
    "without_grad": without_grad,
    "causal": causal,
    "checkpointed": test_laws_autograd.checkpointed,
    **{k: getattr(laws, k) for k in ("block", "pre", "post", "head", "e79", "sdpa", "attention", "sinkhorn")},
    **{k: getattr(laws, k) for k in ("filled", "added", "selected", "chosen", "listed")},
}


# --- a program ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A random program: statements, returned names, the leaves it is called with, and the mode of the call."""

    number: int
    seed: int
    statements: tuple[str, ...]
    returned: tuple[str, ...]
    dtype: str = "fp64"
    empty: bool = False
    frozen: tuple[str, ...] = ()
    around: str = ""
    steps: bool = False
    dtensor: bool = False
    kinds: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        lines = [f"    {line}" for s in self.statements for line in s.split("\n")]
        return "\n".join(["def program(p):", *lines, f"    return ({', '.join(self.returned)},)", ""])

    def __str__(self) -> str:
        how = f"dtype {self.dtype}, empty rows {self.empty}, frozen {list(self.frozen)}, around {self.around or None}"
        return f"# program {self.number} of seed {self.seed}: {how}, DTensor {self.dtensor}\n{self.source}"

    def program(self) -> Program:
        """Returns the compiled function, with its source registered for tracebacks and for Dynamo."""
        name = f"<adversarial {self.seed} {self.number} {abs(hash(self.source))}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)
        names = dict(_NAMES)
        exec(compile(self.source, name, "exec"), names)
        return names["program"]

    def leaves(self, dtype: torch.dtype | None = None) -> Leaves:
        to = dtype or DTYPES[self.dtype]
        made = {**laws.mhc_leaves(), **laws.e79_leaves(), **laws.selection_leaves(empty=self.empty)}
        made |= {**laws.index_leaves(), "mean": laws.normal(4, 16, seed=51)}
        # Round to the case's dtype first: the values are then the same in every dtype.
        low = DTYPES[self.dtype]
        return {
            k: t.to(low).to(to) if t.is_floating_point() else t for k, t in made.items() if k in self.source_names()
        }

    def source_names(self) -> set[str]:
        """Returns the names of the leaves that the statements can read."""
        text = self.source
        called = {key: any(f"{f}(" in text for f in functions) for key, (_, functions) in _LEAVES.items()}
        return {n for key, (names, _) in _LEAVES.items() if f'p["{key}"]' in text or called[key] for n in names}


_LEAVES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "x": (("x", "phi", "alpha", "bias", "gamma", "w"), ("block", "pre", "post", "head")),
    "kvqm": (("kvqm", "b_s", "b_m", "S", "M"), ("e79",)),
    "q": (("q", "k", "v", "ranges"), ("sdpa", "attention")),
    "iq": (("iq", "ik", "iw"), ("chosen",)),
    "mean": (("mean",), ()),
}
"""Leaves by the first of them, and the functions that read them."""


class Writer:
    """Writes one random program."""

    def __init__(self, number: int, seed: int) -> None:
        self.rng = random.Random(f"adversarial {seed} {number}")
        self.number, self.seed = number, seed
        self.lines: list[str] = []
        self.kinds: list[str] = []
        self.streams: list[str] = []
        self.others: list[str] = []
        self.count = 0
        self.dtype = self.rng.choices(list(DTYPES), [8, 2, 1])[0]
        self.smooth = self.dtype != "fp64"  # only fp64 programs contain roundings and other discontinuous steps
        self.dtensor = False

    def name(self, streams: bool = False) -> str:
        self.count += 1
        new = f"{'x' if streams else 't'}{self.count}"
        (self.streams if streams else self.others).append(new)
        return new

    def x(self) -> str:
        """Returns the latest streams mostly, sometimes earlier ones."""
        return self.streams[-1] if self.rng.random() < 0.8 else self.rng.choice(self.streams)

    def any(self) -> str:
        return self.rng.choice(self.streams[1:] + self.others + self.streams[-1:])

    def say(self, kind: str, text: str) -> None:
        self.kinds.append(kind)
        self.lines.append(text)

    def within(self, text: str) -> str:
        """Returns ``text``, sometimes wrapped in a grad or autocast mode."""
        modes = ["torch.no_grad()", "torch.enable_grad()", "torch.set_grad_enabled(False)"]
        if self.dtype == "fp32" and self.rng.random() < 0.5:
            modes = ['torch.autocast("cpu", torch.bfloat16)', 'torch.autocast("cpu", enabled=False)']
        if self.rng.random() > 0.15:
            return text
        self.kinds.append("mode")
        return f"with {self.rng.choice(modes)}:\n    " + text.replace("\n", "\n    ")

    def effect(self, value: str) -> str:
        """Returns an expression that applies a random effect to ``value`` and evaluates to the result."""
        low = ["torch.bfloat16", "torch.float8_e4m3fn"]
        choices = {
            "hook": f'hooked({value}, "{self.rng.choice(["halve", "clip"])}")',
            "write under no_grad": f'quiet("{self.rng.choice(list(WRITES))}", {value})',
            "write": f'loud("{self.rng.choice(list(PLAIN))}", {value})',
            "named write": f'loud("{self.rng.choice(list(UNRECORDED))}", {value})',
            "detach": f"{value}.detach()",
            "round": f"rounded({value}, {self.rng.choice(low)})",
            "made under no_grad": f"without_grad({value})",
            "scaled": f"{value} * {self.rng.uniform(0.5, 1.5):.2f}",
        }
        if self.smooth:
            for kind in ("round", "write", "named write", "write under no_grad"):
                choices.pop(kind)
            choices["write under no_grad"] = f'quiet("{self.rng.choice(["imul", "mul_", "foreach"])}", {value})'
        if self.dtensor:
            choices = {k: choices[k] for k in ("detach", "made under no_grad", "scaled", "hook")}
        kind = self.rng.choice(list(choices))
        self.kinds.append(kind)
        return choices[kind]

    def places(self, names: Sequence[str]) -> str:
        """Returns the source of an argument ``at`` that applies effects to one or two values, or an empty string."""
        if self.rng.random() < 0.65:
            return ""
        chosen = self.rng.sample(list(names), self.rng.choice([1, 1, 2]))
        return ", {" + ", ".join(f'"{c}": lambda t: {self.effect("t")}' for c in chosen) + "}"

    # Each method below adds one or a few statements.

    def formula_block(self) -> None:
        x = self.x()
        self.say("block", self.within(f"{self.name(True)} = block({x}, p{self.places(laws.MHC_PLACES)})"))

    def formula_parts(self) -> None:
        x = self.x()
        h, hp, r, f = (self.name() for _ in range(4))
        self.say("pre", self.within(f"{h}, {hp}, {r} = pre({x}, p{self.places(laws.MHC_PLACES[1:9])})"))
        self.others.remove(f)
        for _ in range(self.rng.choice([0, 1, 1, 2])):
            self.meddle(self.rng.choice([x, h, hp, r, self.any()]))
        self.others.append(f)
        self.say("sublayer", f'{f} = torch.tanh({h} @ p["w"])')
        if self.rng.random() < 0.4:
            self.meddle(self.rng.choice([f, r, hp]))
        turned = self.rng.choice(["", "", ".transpose(-1, -2)"])
        self.say("post", self.within(f"{self.name(True)} = post({x}, {f}, {hp}, {r}{turned})"))

    def formula_head(self) -> None:
        self.say("head", self.within(f"{self.name()} = head({self.x()}, p)"))

    def formula_sinkhorn(self) -> None:
        self.say("sinkhorn", f"{self.name()} = sinkhorn({self.x()}[..., :4] * 1.0, {self.rng.choice([1, 2, 3])})")

    def formula_e79(self) -> None:
        outs, S, M = self.name(), self.name(), self.name()
        self.others.remove(outs)
        steps = self.rng.choice([2, 3])
        at = self.places(["S1", "M1", "S2", "M2", "out0", "k1", "delta1", "kvqm", "b_s", "S0"])
        given = f'{{**p, "kvqm": p["kvqm"][:{steps}]}}' if steps < 3 else "p"
        self.say("e79", self.within(f"{outs}, {S}, {M} = e79({given}{at})"))
        if self.rng.random() < 0.85:
            how = self.rng.choice(["torch.stack({})", "torch.stack({})", "torch.stack({}, 1)", "torch.cat({})"])
            self.say("outs", f"{self.name()} = {how.format(outs)}")
        if self.rng.random() < 0.25:
            self.say("alias", f"{self.name()} = {outs}[-1]")

    def formula_attention(self) -> None:
        out = self.name()
        mask = self.rng.choice(
            ["selected", "selected", "lambda p: selected(p) & causal(p)", "lambda p: selected(p) | causal(p)"]
        )
        if self.rng.random() < 0.4:
            self.say("sdpa", self.within(f"{out} = sdpa(p, {mask})"))
            return
        number = self.rng.choice(['float("-inf")', "-1e9", "-1e4", "torch.finfo(torch.float64).min"])
        if self.dtype != "fp64":
            number = self.rng.choice(['float("-inf")', "-1e9"])
        fill = f"{self.rng.choice(['filled', 'filled', 'added'])}({number})"
        if self.rng.random() < 0.15:
            fill = f"lambda s, m: filled(-1e4)(filled({number})(s, m), causal(p).transpose(1, 2))"
        at = self.places(["q", "k", "v", "scores", "masked", "weights", "o"])
        self.say("attention", self.within(f"{out} = attention(p, {mask}, {fill}{at})"))

    def formula_index(self) -> None:
        """Adds an indexer in fp64, without effects that make equal scores: of those, topk may take any.

        Nothing but a mask reads keys in no order (``sorted=False``): any order would be right.
        """
        keys, smooth, self.smooth = self.name(), self.smooth, True
        at = self.places(laws.INDEX_PLACES) or ", {}"
        self.smooth = smooth
        roll, ordered = self.rng.random(), self.rng.random() < 0.7
        order = "" if ordered else ", False"
        self.say("index", self.within(f"{keys} = chosen(p, {self.rng.choice([3, 4, 6])}{at}{order})"))
        if not ordered or self.rng.random() < 0.6:  # otherwise a later statement may change them, or return them
            self.others.remove(keys)
        if roll < 0.15:
            self.say("graph break", "torch._dynamo.graph_break()")
        if roll < 0.3 and ordered:
            self.say("rank", f"{self.name()} = {keys}[..., {self.rng.choice(['0', '-1', ':2'])}] * 1")
            return
        mask = self.rng.choice(["{}", "{}", "{} & causal(p)", "{} | selected(p)"]).format(f"listed(p, {keys})")
        call = f"{self.rng.choice(['attention', 'sdpa'])}(p, lambda p: {mask})"
        if roll > 0.9:
            self.say("checkpoint", f'{self.name()} = checkpointed(lambda {keys}: {call}, "none", {keys})')
        else:
            self.say("listed", self.within(f"{self.name()} = {call}"))

    def meddle(self, target: str) -> None:
        """Adds one statement that does something to an existing value."""
        roll = self.rng.random()
        if roll < 0.6:
            text = self.effect(target)
            again = self.rng.random() < 0.7
            if again:
                self.say("effect", f"{target} = {text}")
            else:
                self.say("effect", f"{self.name()} = {text}")
        elif roll < 0.75:
            view = self.rng.choice(
                ["view(-1)", "unsqueeze(0)", "detach()", "[0]", "flatten()", "transpose(0, 1)", "clone()"]
            )
            self.say("alias", f"{self.name()} = {target}{view if view.startswith('[') else '.' + view}")
        elif roll < 0.85 and not self.dtensor:
            self.say(
                "buffer",
                f'with torch.no_grad():\n    p["mean"].lerp_({self.streams[-1]}.to(p["mean"].dtype).mean(0), 0.1)',
            )
        elif roll < 0.9 and not self.dtensor:
            self.say("graph break", "torch._dynamo.graph_break()")
        else:
            self.say("elementwise", f"{self.name()} = {target}.sin() + 0.1")

    def wrapped(self) -> None:
        """Adds a formula under checkpointing or a functional transform."""
        x = self.x()
        if self.rng.random() < 0.6:
            policy = self.rng.choice(["none", "matmuls", "pre", "pre and post", "nothing"])
            self.say("checkpoint", f'{self.name(True)} = checkpointed(lambda x: block(x, p), "{policy}", {x})')
            return
        fn = self.rng.choice(["lambda x: block(x, p)", "lambda x: head(x, p)"])
        kind = self.rng.choice(["grad", "vmap", "jvp"])
        forms = {
            "grad": f"torch.func.grad(lambda x: ({fn})(x).square().sum())({x})",
            "vmap": f"torch.func.vmap({fn})({x}.unsqueeze(1))",
            "jvp": f"torch.func.jvp({fn}, ({x},), (torch.ones_like({x}),))[1]",
        }
        self.say(f"func.{kind}", f"{self.name()} = {forms[kind]}")

    def write(self) -> Case:
        rng = self.rng
        self.dtensor = self.dtype == "fp64" and rng.random() < 0.03
        self.streams.append("x0")
        self.lines.append('x0 = p["x"]' if rng.random() < 0.5 else 'x0 = p["x"] * 1.0')
        formulas: list[tuple[Callable[[], None], int]] = [
            (self.formula_block, 5),
            (self.formula_parts, 5),
            (self.formula_head, 2),
            (self.formula_sinkhorn, 1),
            (self.formula_e79, 2),
            (self.formula_attention, 3),
            (self.wrapped, 2),
        ]
        if self.dtensor:
            formulas = formulas[:3]
        elif self.dtype == "fp64":
            formulas.append((self.formula_index, 3))
        for _ in range(rng.choice([1, 2, 2, 3])):
            for _ in range(rng.choice([0, 1, 1])):
                self.meddle(self.any())
            rng.choices([f for f, _ in formulas], [w for _, w in formulas])[0]()
        for _ in range(rng.choice([0, 1, 2])):
            self.meddle(self.any())
        names = [*self.streams[1:], *self.others] or ["x0"]
        returned = rng.sample(names, min(len(names), rng.choice([1, 2, 3, 4])))
        if self.streams[-1] not in returned:
            returned.append(self.streams[-1])
        frozen = rng.sample(
            ["x", "phi", "alpha", "bias", "w", "kvqm", "b_s", "S", "q", "k", "v", "iq", "ik", "iw"],
            rng.choice([0, 0, 0, 1, 3]),
        )
        around = "autocast" if self.dtype == "fp32" and rng.random() < 0.3 else ""
        return Case(
            self.number,
            self.seed,
            tuple(self.lines),
            tuple(returned),
            self.dtype,
            rng.random() < 0.25,
            tuple(sorted({*frozen, "mean"})),
            around,
            rng.random() < 0.3,
            self.dtensor,
            tuple(self.kinds),
        )


# --- only programs that eager accepts -----------------------------------------------------------------------


def _around(case: Case) -> Callable[[], Any]:
    if case.around == "autocast":
        # From torch 2.13 on a checkpoint counts casts, and a weight that autocast has cached is cast only when it is recomputed.
        return lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled="checkpoint" not in case.kinds)
    return contextlib.nullcontext


def _distributed(case: Case) -> Program:
    """Returns the program on DTensors of a one-process mesh; its outputs are local tensors."""
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    laws.one_process()
    mesh, inner = init_device_mesh("cpu", (1,)), case.program()

    def program(p: Leaves) -> Any:
        spread = {k: DTensor.from_local(t, mesh, [Replicate()]) for k, t in p.items()}
        return [t.to_local() if isinstance(t, DTensor) else t for t in inner(spread)]

    return program


def _program(case: Case) -> Program:
    return _distributed(case) if case.dtensor else case.program()


def runs(case: Case, mode: str) -> bool:
    """Returns whether eager runs the program in this mode."""
    return not laws.observe(_program(case), case.leaves(), mode, frozen=case.frozen, around=_around(case)).error


def repaired(case: Case, mode: str = "train") -> Case | None:
    """Returns the program without the statements that eager refuses, or None if nothing is left."""
    while not runs(case, mode):
        for i in range(len(case.statements) - 1, 0, -1):
            shorter = _without(case, i)
            if shorter is not None and runs(shorter, mode):
                return shorter
        shorter = _without(case, len(case.statements) - 1)
        if shorter is None or len(shorter.statements) < 2:
            return None
        case = shorter
    return case


def _assigned(statements: Sequence[str]) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse("\n".join(statements))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _without(case: Case, i: int) -> Case | None:
    """Returns the program without statement ``i`` and the values it assigned, or None if no returned value is left."""
    statements = (*case.statements[:i], *case.statements[i + 1 :])
    there = _assigned(statements)
    returned = tuple(r for r in case.returned if r in there)
    return dataclasses.replace(case, statements=statements, returned=returned) if returned else None


def random_case(number: int, seed: int = 0) -> tuple[Case, int]:
    """Returns the program of this number, and how many candidates eager refused before it."""
    refused = 0
    while True:
        case = Writer(number + 1_000_003 * refused, seed).write()
        found = repaired(case)
        if found is not None and len(found.statements) > 1:
            return dataclasses.replace(found, number=number), refused
        refused += 1


# --- the comparison -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """The results of one program. ``differences`` is empty where routing changed nothing."""

    number: int
    kinds: tuple[str, ...]
    dtype: str
    modes: tuple[str, ...]
    ops: Counter[str]
    near_misses: int
    excused: int
    refused: int
    seconds: float
    differences: tuple[str, ...] = ()
    source: str = ""


def compared(case: Case, modes: Sequence[str]) -> tuple[Counter[str], int, int, list[str]]:
    """Returns the ops, the near misses, the runs that differ without routing too, and the differences.

    Every third program trains through AOTAutograd; the others interpret the graph.
    """
    ops, near, excused, found = Counter[str](), 0, 0, list[str]()
    fn = _program(case)
    for mode in modes:
        how: dict[str, Any] = {"mode": mode, "frozen": case.frozen, "around": _around(case)}
        bar: float | Seen = laws.TIGHT[torch.float64]
        if case.dtype != "fp64":
            exact = laws.observe(fn, case.leaves(torch.float64), mode, frozen=case.frozen)
            # Autograd may refuse an in-place write in fp64 that is harmless on the copies that autocast makes.
            low = torch.bfloat16 if case.around == "autocast" else DTYPES[case.dtype]
            bar = laws.TIGHT[low] if exact.error else exact
        # AOTAutograd takes half of the time, and without gradients it adds nothing to interpreting the graph.
        traced = mode == "train" and (case.dtensor or case.number % 3 == 0)
        compiled, lines = laws.compare(fn, case.leaves(), bar, steps=case.steps, autograd=traced, **how)
        if lines and (any(_CACHED in line for line in lines) or _refused_anyway(case, how)):
            excused, lines = excused + 1, []
        lines += [f"the pass failed: {p}" for p in compiled.report.problems]
        ops.update(compiled.ops)
        near += len(compiled.report.near_misses)
        excused += bool(compiled.excused)
        found += [f"{mode}: {line}" for line in lines]
    return ops, near, excused, found


_CACHED = "Tensor cached during selective activation checkpoint has been mutated"
"""PyTorch's error for a program that writes an op's result kept by a checkpointing policy.

Unrouted formulas have no such op.
"""


def _refused_anyway(case: Case, how: dict[str, Any]) -> bool:
    """Returns whether AOTAutograd refuses the program without routing, because of hooks after a graph break."""
    if "graph_break" not in case.source or "hooked(" not in case.source:
        return False
    call = laws.in_one_graph(_program(case), laws.Compiled(routes=False))
    return bool(laws.observe(call, case.leaves(), **how).error)


def shrunk(case: Case, modes: Sequence[str]) -> Case:
    """Returns the program without the statements and returned values that the difference does not need."""

    def differs(c: Case | None) -> bool:
        return c is not None and all(runs(c, m) for m in modes) and bool(compared(c, modes)[3])

    for i in range(len(case.statements) - 1, 0, -1):
        shorter = _without(case, i)
        if shorter is not None and differs(shorter):
            case = shorter
    for name in case.returned:
        fewer = dataclasses.replace(case, returned=tuple(r for r in case.returned if r != name))
        if fewer.returned and differs(fewer):
            case = fewer
    return case


def outcome(task: tuple[int, int, bool]) -> Outcome:
    """Runs the task (number, seed, whether to shrink)."""
    number, seed, shrink = task
    start = time.perf_counter()
    case, refused = random_case(number, seed)
    # Each in training and in one of the two inference modes.
    modes = [m for m in ("train", ("no_grad", "inference")[number % 2]) if runs(case, m)]
    ops, near, excused, found = compared(case, modes)
    source = ""
    if found:
        with contextlib.suppress(Exception):
            case = shrunk(case, [m for m in modes if any(f.startswith(m) for f in found)]) if shrink else case
        source = str(case)
    seconds = time.perf_counter() - start
    return Outcome(
        number, case.kinds, case.dtype, tuple(modes), ops, near, excused, refused, seconds, tuple(found), source
    )


def _quiet() -> None:
    """Prepares a process that does nothing else."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)


def outcomes(numbers: Iterable[int], seed: int, jobs: int, shrink: bool = True) -> Iterator[Outcome]:
    """Yields every outcome, in order."""
    tasks = [(i, seed, shrink) for i in numbers]
    if jobs == 1:
        yield from map(outcome, tasks)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _quiet) as pool:
        yield from pool.map(outcome, tasks, chunksize=8)


def origin(seed: int) -> list[Any]:
    """Returns what an outcome depends on: the hash of the routing sources, the version of torch and the seed."""
    return [source_hash(folders=ROUTING), torch.__version__, seed]


def line_of(o: Outcome, of: list[Any]) -> str:
    """Returns one outcome as a line of JSON."""
    return json.dumps({"of": of, **vars(o)}) + "\n"


def kept_in(file: Path, of: list[Any]) -> dict[int, Outcome]:
    """Reads a file's outcomes with the origin ``of``, by number."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found = {}
    for row in (row for row in rows if row.pop("of") == of):
        lists = {k: tuple(v) for k, v in row.items() if isinstance(v, list)}
        found[row["number"]] = Outcome(**{**row, **lists, "ops": Counter(row["ops"])})
    return found


def summary(done: Sequence[Outcome], seed: int) -> dict[str, Any]:
    """Returns the counts for the results file."""
    ops, kinds, modes = Counter[str](), Counter[str](), Counter[str]()
    for o in done:
        ops.update(o.ops)
        kinds.update(set(o.kinds))
        modes.update(o.modes)
    return {
        "routing_sha256": source_hash(folders=ROUTING),
        "seed": seed,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "programs": len(done),
        "runs": dict(sorted(modes.items())),
        "with_routed_ops": sum(bool(o.ops) for o in done),
        "routed_ops": dict(sorted(ops.items())),
        "near_misses": sum(o.near_misses for o in done),
        "by_dtype": dict(sorted(Counter(o.dtype for o in done).items())),
        "by_statement": dict(sorted(kinds.items())),
        "runs_that_differ_without_routing_too": sum(o.excused for o in done),
        "differences": [
            {"number": o.number, "what": o.differences, "program": o.source} for o in done if o.differences
        ],
    }


def main(
    seed: Annotated[int, typer.Option(help="Seed of every program.")] = 0,
    count: Annotated[int, typer.Option(help="Programs.")] = 3000,
    jobs: Annotated[int, typer.Option(help="Processes.")] = os.cpu_count() or 1,
    shrink: Annotated[bool, typer.Option(help="Remove what a difference does not need.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the counts go.")] = None,
    kept: Annotated[Path | None, typer.Option(help="Outcomes, a line each: a run that was stopped goes on.")] = None,
) -> None:
    """Compare routed random programs with eager; exit with 1 if any differs."""
    console, start = Console(), time.perf_counter()
    of = origin(seed)
    known = kept_in(kept, of) if kept is not None else {}
    todo = [i for i in range(count) if i not in known]
    with kept.open("a") if kept is not None else contextlib.nullcontext() as lines:
        for o in track(outcomes(todo, seed, jobs, shrink), "comparing", len(todo), console=console):
            known[o.number] = o
            if lines is not None:
                lines.write(line_of(o, of))
                lines.flush()
    done = [known[i] for i in range(count)]
    result = summary(done, seed)
    table = Table("programs", "with routed ops", "near misses", "differ without routing too", "differences")
    table.add_row(
        *(str(result[k]) for k in ("programs", "with_routed_ops", "near_misses")),
        str(result["runs_that_differ_without_routing_too"]),
        str(len(result["differences"])),
    )
    for o in done:
        if o.differences:
            console.print("\n".join(["", *o.differences, o.source]), markup=False)
    console.print(table)
    console.print(f"{time.perf_counter() - start:.0f} s, {sum(o.seconds for o in done) / count:.2f} s a program")
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if result["differences"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    _quiet()
    typer.run(main)
