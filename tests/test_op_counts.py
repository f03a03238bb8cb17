# SPDX-License-Identifier: Apache-2.0
"""Bytes and FLOPs of the ops, counted where they run, and the scopes that a profiler's trace shows."""

from __future__ import annotations

import ast
import contextlib
import json
import pathlib
import re
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.profiler import ProfilerActivity, profile

import mhc_inductor
from benchmarks.source_hash import ROOT
from mhc_inductor import OpCounts, count_ops, op_scopes
from mhc_inductor.nn import HyperConnection
from mhc_inductor.ops import flops, registry
from mhc_inductor.profiling import Bytes, OpCount, op_bytes
from tests import test_explain
from tests.oracles.selection import selection_of
from tests.ranks import sharded_ops
from tests.test_codegen import compiled
from tests.test_options import Block, streams
from tests.test_options import fresh as fresh  # resets Dynamo around each test, and disables the backend
from tests.tools import example_modules
from tests.tools.fakecuda import without_a_gpu
from tests.tools.generated import launches

CALLED = {"mhc_inductor.profile_scopes": True}
OPS = sorted(registry.REFERENCE)


def moved(op: str, *args: Any) -> Bytes:
    out = getattr(torch.ops.mhc_inductor, op)(*args)
    return op_bytes.count(op, *args, out_val=out)


# ---- bytes


def size(*tensors: Any) -> int:
    return sum(prod(t.shape) * t.element_size() for t in tensors if isinstance(t, Tensor))


def named(given: dict[str, Any]) -> dict[tuple[int, int], list[set[int]]]:
    """Returns the keys that each query names, for each entry of the batch and group."""
    none = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "segments_q", "segments_k"))
    made = {**none, **given, **({} if given["k"].dim() == 4 else {"k": given["k"].unsqueeze(1)})}
    if "ranges" in given:  # all keys of the ranges are read, whatever their segments
        made |= {"segments_q": None, "segments_k": None}
    elif given["indices"].dim() == 3:
        made["indices"] = given["indices"].unsqueeze(2)
    listed = made["ranges" if "ranges" in given else "indices"]
    found: dict[tuple[int, int], list[set[int]]] = {}
    for b, s, g in torch.cartesian_prod(*map(torch.arange, listed.shape[:3])).view(-1, 3).tolist():
        found.setdefault((b, g), []).append(set(selection_of(made, b, s, g)))
    return found


@pytest.mark.parametrize("op", OPS)
def test_every_op_moves_the_bytes_of_its_tensors(op: str) -> None:
    """All samples: each tensor once, but of gathered ones the named rows; fake tensors count no less."""
    seen = 0
    for _, case, args in (sample for sample in sharded_ops.samples() if sample[0] == op):
        args = tuple(a.clone(memory_format=torch.contiguous_format) if isinstance(a, Tensor) else a for a in args)
        out = getattr(torch.ops.mhc_inductor, op)(*args)
        results = (out,) if isinstance(out, Tensor) else out
        given, real = sharded_ops.named(op, args), moved(op, *args)
        gathered = {name: given.get(name) for name in op_bytes.GATHERED.get(op, ())}
        if not gathered:
            assert real == (size(*args, *results), 0), case
        else:
            rows = named(given)
            each = sum(size(t) // (len(rows) * t.shape[-2]) for t in gathered.values() if t is not None and t.shape[-2])
            once = sum(len(set().union(*keys)) for keys in rows.values())
            others = size(*results, *(t for name, t in given.items() if name not in gathered))
            assert real.moved == others + once * each, case
            repeats = op_bytes.GATHERED[op] != ("k", "v") or "ranges" not in given
            lower = each * sum(len(keys) for mine in rows.values() for keys in mine)
            assert real.gathered == lower or (repeats and real.gathered > lower), case
        with FakeTensorMode() as mode:
            fake = moved(op, *(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
        assert fake.moved >= real.moved and fake.gathered >= real.gathered, case
        assert gathered or fake == real, case
        seen += 1
    assert seen


def test_symbolic_sizes_get_no_guards() -> None:
    env, first = ShapeEnv(), {op: args for op, _, args in reversed(sharded_ops.samples())}
    with FakeTensorMode(shape_env=env) as mode:
        for op, args in first.items():
            fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
            out = getattr(torch.ops.mhc_inductor, op)(*fake)
            before = len(env.guards)
            assert isinstance(op_bytes.count(op, *fake, out_val=out).moved, torch.SymInt), op
            assert isinstance(flops.count(op, *fake, out_val=out), torch.SymInt) == ("sinkhorn" not in op), op
            assert len(env.guards) == before, op


def test_memory_is_counted_once() -> None:
    """A mix that is expanded over tokens, and values that are the first columns of the keys."""
    x, f, post, mix = torch.randn(3, 5, 4, 16), torch.randn(3, 5, 16), torch.rand(3, 5, 4), torch.rand(4, 4)
    whole = moved("mhc_post", x, f, post, mix.expand(3, 5, 4, 4).contiguous(), False).moved
    assert whole - moved("mhc_post", x, f, post, mix.expand(3, 5, 4, 4), False).moved == 14 * mix.nbytes
    q, k, ranges = torch.randn(1, 2, 1, 2, 8), torch.randn(1, 1, 9, 8), torch.tensor([[[[[0, 4]]], [[[2, 6]]]]])
    given = (ranges.int(), None, None, None, 1.0)
    latent, apart = (
        moved("selection_attention", q, k, k[..., :6], *given),
        moved("selection_attention", q, k, k, *given),
    )
    assert latent.gathered == 8 * 8 * 4 and apart.gathered == latent.gathered
    assert moved("selection_attention", q, k, k[..., :6].clone(), *given).gathered == 8 * (8 + 6) * 4


# ---- counts


def trained(call: Any, x: Tensor) -> Tensor:
    out = call(x)
    out.sum().backward()
    return out.detach()


def test_ops_are_counted_where_they_run() -> None:
    model, x = HyperConnection(16, 4, nn.Linear(16, 16)), torch.randn(2, 3, 4, 16)
    with count_ops() as counts:
        trained(model, x)
        trained(model, x)
    trained(model, x)
    assert {op: one.calls for op, one in counts.ops.items()} == dict.fromkeys(
        ("mhc_pre", "mhc_post", "mhc_post_backward", "mhc_pre_backward"), 2
    )
    tokens, width = 6, 4 * 16
    assert counts.ops["mhc_pre"].flops == 2 * 2 * tokens * (24 * width + width)
    streams_in_and_out = 4 * tokens * (2 * width + 16)
    assert counts.ops["mhc_post"].bytes == 2 * (streams_in_and_out + 4 * tokens * (4 + 16))
    assert counts.total().calls == 8 and counts.total().flops == sum(one.flops for one in counts.ops.values())
    lines = str(counts).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [*([op, "2"] for op in counts.ops), ["total", "8"]]


def test_utilization_is_of_the_peak() -> None:
    counts = OpCounts({"mhc_pre": OpCount(1, 600, 50), "mhc_post": OpCount(2, 400, 150)})
    assert counts.mfu(2.0, 5_000) == 0.1 and counts.mbu(0.5, 4_000) == 0.1
    for bad in (0, -1.0, True, "1", None, float("nan")):
        with pytest.raises(ValueError, match=r"OpCounts\.mfu: seconds must be a number above 0"):
            counts.mfu(bad, 1e12)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"OpCounts\.mbu: peak_bytes must be a number above 0"):
            counts.mbu(1.0, bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["backend", "enable"])
def test_compiled_formulas_call_their_ops_with_the_option_in_scopes(way: str) -> None:
    """Forward and backward, counted and in scopes, on a CPU too, where a compile would keep the formula as it is written."""
    model, x = Block(), streams()
    want = trained(model, x)
    if way == "enable":
        mhc_inductor.enable(profile_scopes=True)
    compiled = torch.compile(model, **({} if way == "enable" else {"backend": "mhc_inductor", "options": CALLED}))
    trained(compiled, x)
    with count_ops() as counts:
        torch.testing.assert_close(trained(compiled, x), want)
    assert [*counts.ops] == ["mhc_pre", "mhc_post", "mhc_post_backward", "mhc_pre_backward"]
    assert {one.calls for one in counts.ops.values()} == {1}
    with op_scopes():
        found = [name for name in events(lambda: trained(compiled, x)) if name[:4] == "mhc_" and "::" not in name]
    assert [name.partition(" x ")[0].partition(" d")[0].partition(" g ")[0] for name in found] == [*counts.ops]


def test_the_option_is_part_of_the_keys_of_caches() -> None:
    def post(x: Tensor) -> Tensor:
        return mhc_inductor.mhc_post(x, x[..., 0, :], x[..., 0], None, transpose_res=False)

    for on in (True, False, True):
        torch._dynamo.reset()
        compiled = torch.compile(post, backend="mhc_inductor", options={"mhc_inductor.profile_scopes": on})
        x = torch.randn(2, 3, 4, 16, requires_grad=True)
        trained(compiled, x)
        with count_ops() as counts:
            trained(compiled, x)
        assert [*counts.ops] == (["mhc_post", "mhc_post_backward"] if on else [])


@without_a_gpu
@pytest.mark.usefixtures("no_caches")
@pytest.mark.parametrize("on", [True, False])
def test_the_code_for_a_gpu_calls_the_ops_with_the_option(on: bool) -> None:
    def layer(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> Tensor:
        h_in, post, mix = mhc_inductor.mhc_pre(x, phi, alpha, bias)
        return mhc_inductor.mhc_post(x, h_in.tanh(), post, mix, transpose_res=False)

    given = [(shape, torch.float32) for shape in ((2, 64, 4, 64), (24, 256), (3,), (24,))]
    code = compiled(layer, *given, options={"mhc_inductor.profile_scopes": on})
    ours = [name for name in launches(code) if name.startswith("mhc_")]
    called = [f"torch.ops.mhc_inductor.{op}.default(" in code for op in ("mhc_pre", "mhc_post")]
    assert (called, bool(ours)) == (([True, True], False) if on else ([False, False], True))


def test_counts_of_a_report_are_those_of_the_call() -> None:
    model, x = Block(), streams()
    compiled = torch.compile(model, backend="mhc_inductor", options=CALLED)
    with torch.no_grad():
        compiled(x)
        with count_ops() as counts:
            compiled(x)
        found = OpCounts.of(mhc_inductor.explain(model, x))
    assert found == counts and found.total().flops
    with pytest.raises(TypeError, match="report must be what explain returned, got dict"):
        OpCounts.of({})  # type: ignore[arg-type]


def test_fused_ops_count_in_place_of_their_parts() -> None:
    x = test_explain.streams()
    with torch.no_grad():
        report = mhc_inductor.explain(nn.Sequential(test_explain.Plain(), test_explain.Plain()).eval(), x)
    assert [one.op for one in report.routed] == ["mhc_pre", "mhc_post"] * 2
    assert [one.op for one in report.fused] == ["mhc_post_pre"]
    counts, each = OpCounts.of(report), [one.cost for one in report.routed if one.cost is not None]
    assert {op: one.calls for op, one in counts.ops.items()} == {"mhc_pre": 1, "mhc_post": 1, "mhc_post_pre": 1}
    assert counts.total().flops == sum(cost.flops for cost in each)
    assert counts.total().bytes < sum(cost.bytes for cost in each)


# ---- scopes


def events(call: Any, *, profiled: bool = True) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) if profiled else contextlib.nullcontext() as found:
        call()
    return [event.name for event in found.events() or ()] if found is not None else []


def test_scopes_have_shapes_while_a_profiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, f, h = torch.randn(2, 3, 4, 16, dtype=torch.bfloat16), torch.randn(2, 3, 16).bfloat16(), torch.rand(2, 3, 4)
    name = "mhc_post x bfloat16[2, 3, 4, 16], f_out bfloat16[2, 3, 16], h_post float32[2, 3, 4]"

    def call() -> None:
        mhc_inductor.mhc_post(x, f, h, None, transpose_res=False)

    assert "mhc_inductor::mhc_post" in (plain := events(call)) and name not in plain
    with op_scopes():
        assert name in events(call)
        monkeypatch.setattr(torch.profiler, "record_function", None)
        call()
    with op_scopes(), pytest.raises(TypeError):
        events(call)


def test_nvtx_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, said = torch.randn(3, 4, 4), []

    def call() -> None:
        mhc_inductor.mhc_sinkhorn(logits, 2, 1e-6)

    if not torch.version.cuda:
        with pytest.raises(RuntimeError, match="nvtx=True needs a torch for CUDA"), op_scopes(nvtx=True):
            pass
    for name in ("mark", "range_push"):
        monkeypatch.setattr(torch.cuda.nvtx, name, said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("pop"))
    with op_scopes():
        call()
    assert said == []
    with op_scopes(nvtx=True):
        call()
    assert said == ["mhc_inductor.op_scopes", "mhc_sinkhorn h_res float32[3, 4, 4]", "pop"]


def test_every_op_that_gathers_names_its_keys() -> None:
    for op, names in op_bytes.GATHERED.items():
        arguments = {a.name for a in getattr(torch.ops.mhc_inductor, op).default._schema.arguments}
        assert {*names} <= arguments and arguments & {"ranges", "indices"} and op in OPS
    others = [op for op in OPS if {"ranges", "indices"} & set(registry._NAMES[op]) and op not in op_bytes.GATHERED]
    assert others == []
    assert flops.PRODUCTS.keys() <= {*OPS}


# ---- the page

PAGE = (ROOT / "docs" / "profiling.md").read_text()
FORMULAS = re.findall(r"^\| `(\w+)` \| `(.*)` \| `(.*)` \|$", PAGE, re.MULTILINE)
OPTIONAL = ("v", "h_res")
"""Arguments that may be None and are among the page's formulas."""


def evaluated(op: str, args: tuple[Any, ...], out: Any) -> dict[str, int] | None:
    """Returns the names in the page's formulas for a sample, None where they do not hold: absent or wider tensors."""
    given, results = sharded_ops.named(op, args), (out,) if isinstance(out, Tensor) else out
    schema = getattr(torch.ops.mhc_inductor, op).default._schema
    known = {a.name for a in schema.arguments if "?" not in str(a.type) and "Optional" not in str(a.type)} | {*OPTIONAL}
    tensors = [t for name, t in given.items() if isinstance(t, Tensor) and name in known]
    absent = [name for name in OPTIONAL if name in given and given[name] is None]
    absent += ["mask"] * (given.get("mask") is not None and 1 in given["mask"].shape[:-1])
    if (
        absent
        or any(t.element_size() != 4 for t in (*tensors, *results))
        or (op[:3] == "mhc" and not all(t.numel() for t in results))
    ):
        return None
    sizes = flops._sizes(op, given, results)
    found = {word: int(size) for word, size in sizes.items() if word.isidentifier()}
    found |= {"P": prod(int(size) for word, size in sizes.items() if word.isdigit()), "a": found.get("k", 0)}
    if "ranges" in given or "indices" in given:
        rows = named(given)
        found["rows"] = sum(len(set().union(*keys)) for keys in rows.values())
        found["pairs"] = sum(len(keys) for mine in rows.values() for keys in mine)
    if not op.startswith(("mhc", "e79")):
        found["N"] = found.pop("n", 0)
    more = [t for name, t in given.items() if isinstance(t, Tensor) and name not in known]
    return found | {"more": size(*more)}


@pytest.mark.parametrize(("op", "products", "elements"), FORMULAS)
def test_the_formulas_of_the_page_are_those_of_the_ops(op: str, products: str, elements: str) -> None:
    seen = 0
    for name, case, args in sharded_ops.samples():
        out = getattr(torch.ops.mhc_inductor, name)(*args) if name == op else None
        names = None if out is None else evaluated(op, args, out)
        if names is None or (op == "e79_scan" and args[5] != 0):
            continue
        args = tuple(a.clone(memory_format=torch.contiguous_format) if isinstance(a, Tensor) else a for a in args)
        assert eval(products, dict(names)) == flops.count(op, *args, out_val=out), case
        assert 4 * eval(elements, dict(names)) + names["more"] == op_bytes.count(op, *args, out_val=out).moved, case
        seen += 1
    assert seen


def test_the_page_names_every_op_and_every_kernel() -> None:
    assert sorted(op for op, _, _ in FORMULAS) == [op for op in OPS if not op.endswith("_backward")]
    trees = [ast.parse(f.read_text()) for f in sorted((ROOT / "kernels").glob("*/*.py"))]
    found = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    jitted = [node.name for node in found if any("jit" in ast.unparse(d) for d in node.decorator_list)]
    defined = {name for name in jitted if name.startswith(("mhc_", "e79_", "index_", "selection_"))}
    kernels = PAGE[PAGE.index("## Kernels") :]
    shown = {
        name for row in re.findall(r"^\| (`.*?`) \|", kernels, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert len(defined) > 70 and shown == defined


def test_the_trace_of_the_page_has_the_names_of_a_run(tmp_path: pathlib.Path) -> None:
    kept = json.loads((ROOT / "docs" / "traces" / "cpu.json").read_text())["traceEvents"]
    new = tmp_path / "trace.json"
    done = example_modules.run("profile_ops", "--brief", "--rounds", "0", "--out", str(new))
    assert done.returncode == 0, done.stderr
    assert "mhc_post_pre_backward" in done.stdout and "total" in done.stdout
    ours = [[e["name"] for e in of if "mhc_" in e["name"]] for of in (kept, json.loads(new.read_text())["traceEvents"])]
    assert ours[0] == ours[1] and len(ours[0]) == 12
    assert {e["name"] for e in kept} >= {"Torch-Compiled Region: 0/0", "CompiledFunctionBackward", "PythonDispatchMode"}
