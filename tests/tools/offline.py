# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels for absent GPUs: launches are recorded on meta tensors, and the assembler reports the spills."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mhc_inductor import versions
from mhc_inductor.kernels import COMPILED, launch
from mhc_inductor.kernels.launch import DeviceProps
from mhc_inductor.kernels.mhc import fused_plan, plan, single_pass_plan
from tests.oracles.mhc import PRE_OPTIONS

TARGETS = {
    "cuda:80": (GPUTarget("cuda", 80, 32), DeviceProps(108, "cuda", 80)),
    "cuda:89": (GPUTarget("cuda", 89, 32), DeviceProps(128, "cuda", 89)),
    "cuda:90": (GPUTarget("cuda", 90, 32), DeviceProps(132, "cuda", 90)),
    "cuda:100": (GPUTarget("cuda", 100, 32), DeviceProps(148, "cuda", 100)),
    "cuda:120": (GPUTarget("cuda", 120, 32), DeviceProps(170, "cuda", 120)),
    "hip:gfx942": (GPUTarget("hip", "gfx942", 64), DeviceProps(304, "hip", 94)),
}
SHARED_LIMIT = {"cuda:80": 163 << 10, "cuda:89": 99 << 10, "cuda:90": 227 << 10, "cuda:100": 227 << 10,
                "cuda:120": 99 << 10, "hip:gfx942": 64 << 10}  # fmt: skip
TABLE = pathlib.Path(__file__).parents[1] / "compiled.json"
"""What each kernel uses, by target, case and minor version of Triton."""
TRITON = versions.written(versions.minor(triton.__version__))
"""The minor version of the Triton that compiles."""
RECORD = "MHC_INDUCTOR_COMPILED"
"""The environment variable by which ``tests/all_offline.py`` names a file for what kernels use."""
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bool: "*i1",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def meta(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Returns a function that makes tensors without memory, of ``dtype`` unless told otherwise."""
    return functools.partial(torch.empty, dtype=dtype, device="meta")


def part(every: Iterable[tuple[Any, ...]], kept: Callable[..., bool]) -> list[Any]:
    """Returns a test's parameters; those that are not ``kept`` are marked: only ``tests/all_offline.py`` runs them."""
    return [p if kept(*p) else pytest.param(*p, marks=pytest.mark.whole) for p in every]


def names(launches: Callable[..., Any], pairs: Iterable[tuple[str, str]], cases: Mapping[str, Any]) -> set[str]:
    """Returns the names of the kernels that ``launches`` records for targets and cases; compiles nothing."""
    return {
        kernel.__name__
        for target, case in pairs
        for kernel, *_ in launches(Recorder(TARGETS[target][1]), **cases[case])
    }


def ones(launches: Iterable[Any]) -> list[Any]:
    """Returns launches with sizes and strides of 1 in place of each, as constants: so generated code passes those."""
    return [
        (kernel, args, {**constants, **{name: 1 for name, value in args.items() if isinstance(value, int)}}, *options)
        for kernel, args, constants, *options in launches
    ]


class Resources(NamedTuple):
    """What a compiled kernel uses: registers a thread, bytes of shared memory a program, and what spills.

    ``spilled`` is in bytes of stores a thread (CUDA) or registers (ROCm). ``serialized``: the assembler makes each wgmma
    wait for the one before, for want of registers (a fused kernel of mHC took 369 us then in place of 285).
    """

    registers: int
    shared: int
    spilled: int
    serialized: bool

    def __str__(self) -> str:
        last = ", wgmma one after the other" if self.serialized else ""
        return f"{self.registers} registers, {self.shared} shared, {self.spilled} spilled{last}"


# Kernels already compiled, in this case or another.
MEASURED: dict[str, Resources] = {}


class Recorder(launch.Recorder):
    """Records the launches of plain Triton kernels."""

    gluon = False


def mhc(op: str, tokens: int, width: int, case: str = "", b: Any = None, **options: Any) -> list[Any]:
    """Records and returns an mHC op's launches for sm_90, Gluon's among them, on bf16 streams without memory.

    ``case`` may name gamma, a phi in bf16, a head, or a plain phi without rows of the residual matrix.
    """
    b = b or Recorder(TARGETS["cuda:90"][1])
    b.gluon = True
    empty, low, m = meta(torch.float32), meta(torch.bfloat16), {"head": 4, "plain": 8}.get(case, 24)
    x, f, h_post, h_res = low(tokens, 4, width), low(tokens, width), empty(tokens, 4), empty(tokens, 4, 4)
    phi = (low if case == "bf16" else empty)(m, 4 * width)
    params = phi, empty(1 if case == "head" else 3), empty(m), empty(4, width) if "gamma" in case else None
    floats = {**PRE_OPTIONS, "sinkhorn_iters": 20, **options}.values()
    if op == "post":
        plan.plan_mhc_post(b, x, f, h_post, h_res, True)
    elif op == "pre":
        plan.plan_mhc_pre(b, x, *params, *floats)
    elif op == "single_pass":
        single_pass_plan.plan_mhc_single_pass(b, x, f, h_post, h_res, empty(tokens, 4), True, *params, *floats)
    elif case == "head":
        fused_plan.plan_mhc_post_head(b, x, f, h_post, h_res, True, *params, 1e-6, 1e-6)
    else:
        fused_plan.plan_mhc_post_pre(b, x, f, h_post, h_res, True, *params, *floats)
    return b.launches


def split_options(kernel, constexprs) -> tuple[dict, dict]:
    """Returns the kernel's constants, and the launch options among them, which it does not take as parameters."""
    constants = {k: v for k, v in constexprs.items() if k in kernel.arg_names}
    return constants, {k: v for k, v in constexprs.items() if k not in constants}


def source(kernel, args, constexprs) -> ASTSource:
    signature, constants, attributes = {}, dict(constexprs), {}
    for i, name in enumerate(kernel.arg_names):
        value = args.get(name)
        if isinstance(value, torch.Tensor):
            signature[name], attributes[(i,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif name in constexprs or value is None:
            signature[name] = "constexpr"
            constants.setdefault(name, None)
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(kernel, signature, constants, attributes)
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def _log_as_cubin(backend=None, stages=None, *_):
    """Triton's hook on its compile stages: has the cubin stage return the log of Triton's own call of the assembler.

    Called without arguments, returns what the hook adds to the key of Triton's cache.
    """
    if stages is None:
        return "log as cubin", "log as cubin"
    if "cubin" in stages:
        assemble = stages["cubin"]

        def log(ptx, metadata):
            with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as printed:
                triton.knobs.nvidia.dump_ptxas_log = True
                assemble(ptx, metadata)
            return printed.getvalue().encode()

        stages["cubin"] = log
    return None


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Uses the hook with a cache of its own: Triton 3.6 does not count it into the key, and a GPU would get the log."""
    with triton.knobs.runtime.scope(), triton.knobs.cache.scope():
        triton.knobs.cache.dir = os.path.join(triton.knobs.cache.dir, "log_as_cubin")
        triton.knobs.runtime.add_stages_inspection_hook = _log_as_cubin
        yield


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    assert found is not None, f"no {pattern} in {log[:200]}"
    return int(found[1])


def measure(kernel, args, constexprs, target: str, options) -> Resources:
    """Compiles a kernel; returns what it uses."""
    with _logged():
        compiled = triton.compile(source(kernel, args, constexprs), target=TARGETS[target][0], options=options)
    shared = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        log = compiled.asm["amdgcn"]
        return Resources(
            _number(r"\.vgpr_count:\s*(\d+)", log), shared, _number(r"\.vgpr_spill_count:\s*(\d+)", log), False
        )
    log = compiled.asm["cubin"].decode()
    return Resources(
        _number(r"Used (\d+) registers", log), shared, _number(r"(\d+) bytes spill stores", log), "serialized" in log
    )


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())


def _differs(key: str, used: Resources) -> bool:
    """Returns whether the table has other numbers for this Triton; without a column there, nothing differs.

    Where ``tests/all_offline.py`` makes the table, notes the numbers instead.
    """
    if RECORD not in os.environ:
        return TRITON in _table()["versions"] and str(used) not in _table()["kernels"].get(key, {}).get(TRITON, [])
    with open(os.environ[RECORD], "a") as file:
        file.write(json.dumps([key, str(used)]) + "\n")
    return False


def compile_all(launches, target: str, case: str) -> set[str]:
    """Compiles each recorded launch once; returns the kernels' names. Asserts that none uses more than it should."""
    seen: set[str] = set()
    bad: dict[str, str] = {}
    for kernel, args, constexprs, num_warps, num_stages in launches:
        constexprs, others = split_options(kernel, constexprs)
        options = {"num_warps": num_warps, "num_stages": num_stages, **COMPILED, **others}
        dtypes = {k: v.dtype if isinstance(v, torch.Tensor) else type(v) for k, v in args.items()}
        name = kernel.__name__
        key = repr((target, name, dtypes, constexprs, options))
        if key not in MEASURED:
            MEASURED[key] = measure(kernel, args, constexprs, target, options)
        used = MEASURED[key]
        seen.add(name)
        if _differs(f"{target} {name} {case}", used):
            bad[name] = f"{used}, which {TABLE.name} does not have"
        if used.shared > SHARED_LIMIT[target]:
            bad[name] = f"{used.shared} bytes of shared memory"
    assert not bad, bad
    return seen
