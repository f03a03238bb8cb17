# SPDX-License-Identifier: Apache-2.0
"""route_exported: exported programs of all kinds are routed, stay valid, and give the program's values and gradients."""

from __future__ import annotations

import io
import pathlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import mhc_inductor
from mhc_inductor import explain, route_exported
from mhc_inductor.ops.checks import public
from tests.formulas.reference_models_e79 import Layer
from tests.formulas.reference_models_mhc import _balanced, deepseek, liger, parameters
from tests.formulas.reference_models_selection import DeepseekSparse, Indexer, window_and_blocks
from tests.tools.capture import Captured, difference, evaluate, ops_of

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("one_thread")]
BOUND = 2e-6


class Site(nn.Module):
    """One mHC site of plain PyTorch."""

    def __init__(self, formula: Callable[..., Tensor] = deepseek) -> None:
        super().__init__()
        self.formula = formula
        self.p = nn.ParameterDict({name: nn.Parameter(t.detach()) for name, t in parameters().items()})

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x, self.p)


class Windows(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
        return window_and_blocks(q, k, v, blocks)


def sparse() -> nn.Module:
    """DeepSeek sparse attention whose index scores have no ties."""
    torch.manual_seed(2)
    model = DeepseekSparse()
    model.indexer = Indexer(24, 16, 4, 5)
    return model


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def attended(B: int = 2, S: int = 16) -> tuple[Tensor, ...]:
    blocks = (torch.arange(S) // 4).view(1, S, 1).repeat(B, 1, 2)
    return randn(B, 3, S, 8), randn(B, 3, S, 8) * 0.5, randn(B, 3, S, 6), blocks * torch.tensor([1, 0])


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], dict[str, int]]] = {
    "mhc": (Site, (randn(2, 6, 4, 32),), {"mhc_pre": 1, "mhc_post": 1}),
    "e79": (Layer, (randn(2, 4, 24),), {"e79_scan": 1}),
    "attention": (Windows, attended(), {"selection_attention": 1}),
    "sparse": (sparse, (randn(2, 16, 24),), {"index_topk": 1, "selection_attention": 1}),
}


def exported(case: str, strict: bool = False, decomposed: bool = False) -> ExportedProgram:
    make, args, _ = CASES[case]
    program = torch.export.export(make(), args, strict=strict)
    return program.run_decompositions() if decomposed else program


def called(program: ExportedProgram, args: tuple[Tensor, ...]) -> Captured:
    module = program.module()
    return Captured(*evaluate(module, args, [*module.named_parameters()]))


def same(routed: ExportedProgram, plain: ExportedProgram, args: tuple[Tensor, ...], bound: float = BOUND) -> None:
    """Asserts equal outputs and gradients, and that the same inputs and parameters get none."""
    got, want = called(routed, args), called(plain, args)
    assert difference(got, want) < bound
    assert [k for k, g in got.grads.items() if g is None] == [k for k, g in want.grads.items() if g is None]


def through_a_file(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


MODES = [
    *[(case, False, False) for case in CASES],
    *[(case, False, True) for case in CASES],
    ("mhc", True, False),
    ("sparse", True, True),
]


@pytest.mark.parametrize(("case", "strict", "decomposed"), MODES)
def test_routed_program_equals_the_program(case: str, strict: bool, decomposed: bool) -> None:
    program = exported(case, strict, decomposed)
    before = program.graph_module.code, str(program.graph_signature)
    routed = route_exported(program, verify=case != "sparse")
    assert ops_of(routed.graph_module) == Counter(CASES[case][2])
    routed.validate()
    assert (program.graph_module.code, str(program.graph_signature)) == before
    assert routed.verifiers == program.verifiers and routed.state_dict is program.state_dict
    same(routed, program, CASES[case][1])


def test_dynamic_sizes_stay_dynamic() -> None:
    batch, length = Dim("batch", min=2, max=64), Dim("length", min=4, max=256)
    shapes: Any = ({0: batch, 2: length}, {0: batch, 2: length}, {0: batch, 2: length}, {0: batch, 1: length})
    for make, args, other, dims in (
        (lambda: Site(liger), (randn(2, 6, 4, 32),), (randn(3, 9, 4, 32),), ({0: batch, 1: length},)),
        (Windows, attended(), attended(3, 24), shapes),
    ):
        program = torch.export.export(make(), args, dynamic_shapes=dims)
        routed, late = route_exported(program), route_exported(through_a_file(program))
        assert routed.range_constraints == program.range_constraints
        assert [*late.range_constraints.values()] == [*program.range_constraints.values()]
        for one in (routed, through_a_file(routed), late):
            assert ops_of(one.graph_module) == ops_of(routed.graph_module) and ops_of(one.graph_module).total() >= 1
            same(one, program, other)


class Widths(nn.Module):
    """Attention whose scale is computed from the width of the heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        at = torch.arange(k.shape[2])
        mask = (at >= starts[..., None]) & (at < starts[..., None] + 4)
        scores = torch.einsum("bhsd,bhtd->bhst", q, k) * q.shape[-1] ** -0.5
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def test_a_dynamic_size_that_a_formula_needs_is_named() -> None:
    width = Dim("width", min=4, max=64)
    args = (randn(2, 3, 9, 8), randn(2, 3, 9, 8), randn(2, 3, 9, 8), torch.zeros(2, 3, 9, dtype=torch.long))
    program = torch.export.export(Widths(), args, dynamic_shapes=({3: width}, {3: width}, None, None))
    report = explain(program)
    assert not report.routed and any("leaves it dynamic" in miss.reason for miss in report.near_misses)
    assert route_exported(program).range_constraints == program.range_constraints
    assert explain(torch.export.export(Widths(), args)).routed


class InRegions(nn.Module):
    """The indexer without gradients and a site under autocast: export makes a region of each."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse, self.site = sparse(), Site()

    def forward(self, x: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            frozen = self.site(streams)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = self.site(streams)
        return self.sparse(x) + frozen.mean(), mixed


def test_regions_of_other_modes_stay_regions() -> None:
    args = randn(2, 16, 24), randn(2, 3, 4, 32)
    program = torch.export.export(InRegions(), args)
    routed = route_exported(program)
    found = explain(InRegions(), *args)
    assert ops_of(routed.graph_module) == Counter(r.op for r in found.routed) and len(found.routed) >= 4
    regions = [str(n.target) for n in routed.graph.nodes if str(n.target).startswith("wrap_with")]
    assert regions == ["wrap_with_set_grad_enabled", "wrap_with_autocast"]
    same(routed, program, args, 2e-2)
    same(through_a_file(routed), routed, args)


class Branches(nn.Module):
    """The iterations in a branch, which is under autocast, and in a region of a region."""

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            chosen = logits.sum() > 0
            mixed = torch.cond(chosen, lambda t: _balanced((t @ t).float()), lambda t: (t @ t).float() * 3, (logits,))
        with torch.no_grad():
            inner = logits * 2
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inner = _balanced((inner @ inner).float())
        return mixed, inner


def test_branches_have_the_modes_of_their_call() -> None:
    logits = randn(2, 3, 4, 4)
    program = torch.export.export(Branches(), (logits,))
    routed = route_exported(program)
    assert ops_of(routed.graph_module) == Counter(mhc_sinkhorn=2)
    for sign in (1, -1):
        same(routed, program, (logits.abs() * sign,))


class Writes(nn.Module):
    """Writes a mask, a buffer and its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.site = Site()
        self.register_buffer("steps", torch.zeros(2))

    def forward(self, x: Tensor, q: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        self.steps.add_(1)
        q.mul_(2.0)
        at, chosen = torch.arange(q.shape[2]), torch.zeros(*starts.shape[:3], q.shape[2], dtype=torch.bool)
        for i in range(starts.shape[-1]):
            chosen |= (at >= starts[..., i : i + 1]) & (at < starts[..., i : i + 1] + 3)
        mask = torch.full(chosen.shape, float("-inf"))
        mask.masked_fill_(chosen, torch.tensor(0.0))
        return self.site(x) + self.steps.sum(), F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


@pytest.mark.parametrize("decomposed", [False, True])
def test_in_place_writes_stay(decomposed: bool) -> None:
    args = randn(2, 3, 4, 32), randn(2, 2, 9, 8), torch.arange(9).view(1, 1, 9, 1).repeat(2, 2, 1, 2)
    program = torch.export.export(Writes(), args)
    program = program.run_decompositions() if decomposed else program
    routed = route_exported(program)
    assert ops_of(routed.graph_module) == Counter(mhc_pre=1, mhc_post=1, selection_attention=1)
    results = []
    for one in (routed, program):
        given, module = [t.clone() for t in args], one.module()
        outputs = module(*given) + module(*given)
        results.append([*outputs, given[1], module.get_buffer("steps").clone()])
        program.state_dict["steps"].zero_()
    for got, want in zip(*results, strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    assert float(results[0][-1][0]) == 2.0


class TwoResults(nn.Module):
    """Gates of one projection in parts: each result depends on its own parameter only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(randn(4, 128) * 0.1), nn.Parameter(randn(4, 128) * 0.1)
        self.scale, self.bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        v = x.flatten(-2)
        z = F.linear(v, torch.cat([self.a, self.b])) * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)
        pre = torch.sigmoid(F.linear(v, self.a) * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6))
        post = 2 * torch.sigmoid(z[..., 4:] * self.scale[1] + self.bias[4:])
        return (pre[..., None] * x).sum(-2), post


def test_no_parameter_gets_zeros_where_the_program_gives_none() -> None:
    x = randn(2, 3, 4, 32)
    program = torch.export.export(TwoResults(), (x,))
    for pick in (0, 1):
        found = []
        for one in (route_exported(program), program):
            module = one.module()
            named = dict(module.named_parameters())
            grads = torch.autograd.grad(module(x)[pick].sum(), [*named.values()], allow_unused=True)
            found.append({k: g is None for k, g in zip(named, grads, strict=True)})
        assert found[0] == found[1]


class Iterations(nn.Module):
    """A submodule whose result is the formula's own."""

    def forward(self, logits: Tensor) -> Tensor:
        return _balanced(logits)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.site, self.inner = Site(), Iterations()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.site(x * 2.0)[..., :4]))


def test_a_preserved_submodule_can_be_unflattened() -> None:
    x = randn(2, 3, 4, 32)
    program = torch.export.export(Outer(), (x,), preserve_module_call_signature=("inner",))
    routed = route_exported(program)
    assert ops_of(routed.graph_module) == Counter(mhc_pre=1, mhc_post=1, mhc_sinkhorn=1)
    module = torch.export.unflatten(routed)
    assert torch.allclose(module(x), program.module()(x), rtol=1e-5, atol=1e-6)
    logits = randn(2, 3, 4, 4)
    assert torch.allclose(module.inner(logits), _balanced(logits), rtol=1e-5, atol=1e-6)


def test_a_routed_module_compiles() -> None:
    x = randn(2, 6, 4, 32)
    routed = route_exported(exported("mhc"))
    compiled = torch.compile(routed.module(), backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), routed.module()(x))
    torch._dynamo.reset()


def test_explain_reports_an_exported_program(capsys: pytest.CaptureFixture[str]) -> None:
    program = exported("mhc")
    before, counted = program.graph_module.code, mhc_inductor.counters()
    report = explain(program, verify=True)
    assert [r.op for r in report.routed] == ["mhc_pre", "mhc_post"] and all(r.error is not None for r in report.routed)
    assert "test_export.py" in report.routed[0].source
    assert "mhc_pre" in capsys.readouterr().out
    assert program.graph_module.code == before and mhc_inductor.counters() == counted
    with pytest.raises(TypeError, match="takes no arguments"):
        explain(program, torch.ones(2))


def test_other_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.export\.ExportedProgram, got Site; export the model first"):
        route_exported(Site())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="verify must be a bool"):
        route_exported(exported("mhc"), verify=1)  # type: ignore[arg-type]


class Ops(nn.Module):
    """An op of each operator."""

    def forward(self, kvqm: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        out, S, M = mhc_inductor.e79_scan(kvqm)
        indices = mhc_inductor.index_topk(q[:, :, 0], k[:, 0], q[:, :, 0, :, 0], 3)
        o = mhc_inductor.selection_attention(q, k, k, indices=indices[:, :, None])
        return out, mhc_inductor.mhc_sinkhorn(S, 3), M, o


def test_decompositions_leave_plain_formulas() -> None:
    args = randn(5, 2, 32), randn(2, 6, 1, 3, 64), randn(2, 1, 9, 64)
    steps, batch = Dim("steps", min=2, max=64), Dim("batch", min=2, max=64)
    shapes = ({0: steps}, {0: batch}, {0: batch})
    program = torch.export.export(Ops(), args, dynamic_shapes=shapes)
    plain = program.run_decompositions(mhc_inductor.decompositions())
    assert ops_of(program.graph_module).total() == 4 and "mhc_inductor" not in plain.graph_module.code
    other = randn(7, 2, 32), randn(3, 6, 1, 3, 64), randn(3, 1, 9, 64)
    for got, want in zip(plain.module()(*other), Ops()(*other), strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


class Balanced(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        return mhc_inductor.mhc_sinkhorn(scores, 3)


P24 = randn(24, 128), torch.ones(3), torch.zeros(24)
QK, AT = (randn(2, 6, 1, 3, 64), randn(2, 1, 9, 64)), torch.tensor([1, 4]).expand(2, 6, 1, 2)
STREAMS = randn(2, 3, 4, 32)
attention = mhc_inductor.selection_attention
TRACED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "mhc_pre": (lambda x: mhc_inductor.mhc_pre(x, *P24, sinkhorn_iters=3), (STREAMS,), ""),
    "mhc_post": (
        lambda *a: mhc_inductor.mhc_post(*a, transpose_res=True),
        (STREAMS, randn(2, 3, 32), randn(2, 3, 4), randn(2, 3, 4, 4)),
        "",
    ),
    "mhc_sinkhorn": (lambda scores: mhc_inductor.mhc_sinkhorn(scores, 3), (randn(3, 4, 4),), ""),
    "selection_attention": (lambda q, k, at: attention(q, k, k, at), (*QK, AT[..., None, :].expand(2, 6, 1, 2, 2)), ""),
    "selection_list_attention": (lambda q, k, at: attention(q, k, k, indices=at), (*QK, AT), ""),
    "selection_entry_attention": (
        lambda q, k, at, bias: attention(q, k, k, indices=at, bias=bias),
        (*QK, AT, randn(2, 6, 1, 2)),
        "",
    ),
    "selection_mask_attention": (lambda q, k, shown: attention(q, k, k, mask=shown), (*QK, randn(1, 6, 1, 9) < 0), ""),
    "e79_scan": (mhc_inductor.e79_scan, (randn(5, 2, 32),), "scan"),
    "index_topk": (
        lambda q, k: mhc_inductor.index_topk(q, k, q[..., 0], 3),
        (randn(2, 6, 3, 64), randn(2, 9, 64)),
        "aten::full",
    ),
}
"""A call of each op, its arguments, and what torch.jit.trace does not take of its formula."""


@pytest.mark.parametrize("op", list(TRACED))
def test_a_trace_of_the_ops_and_of_their_formulas(op: str) -> None:
    """Checks what docs/export.md says of ``torch.jit.trace``: of models, and of programs with ops and without."""
    fn, args, untraced = TRACED[op]

    class Calls(nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return fn(*args)

    with pytest.raises(
        RuntimeError, match=rf"cannot hold {public(op)}\. .*run_decompositions\(mhc_inductor.decompositions"
    ):
        torch.jit.trace(Calls(), args)
    program = torch.export.export(Calls(), args)
    assert f"mhc_inductor::{op}" in str(torch.jit.trace(program.module(), args).inlined_graph)
    plain = program.run_decompositions(mhc_inductor.decompositions()).module()
    if untraced:
        with pytest.raises(RuntimeError, match=untraced):
            torch.jit.trace(plain, args)
        return
    traced = torch.jit.trace(plain, args)
    assert "mhc_inductor" not in str(traced.inlined_graph)
    for given in (args, [t.flip(0) for t in args]):
        torch.testing.assert_close(traced(*given), fn(*given))


def test_a_traced_program_keeps_the_op_and_needs_the_package(tmp_path: pathlib.Path) -> None:
    """Checks what docs/export.md says of ``torch.jit.trace`` of a program that holds an op."""
    file, scores = tmp_path / "traced.pt", randn(3, 4, 4)
    program = torch.export.export(Balanced(), (scores,), dynamic_shapes=({0: Dim.DYNAMIC},))
    torch.jit.trace(program.module(), (scores,)).save(file)
    more = randn(7, 4, 4) * 3
    assert torch.equal(torch.jit.load(file)(more), mhc_inductor.mhc_sinkhorn(more, 3))
    load = "import torch; torch.jit.load({!r})"
    done = subprocess.run([sys.executable, "-c", load.format(str(file))], capture_output=True, text=True)
    assert done.returncode and "mhc_inductor" in done.stderr and "mhc_sinkhorn" in done.stderr


def test_an_export_to_onnx_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does what torch.onnx.export does with the ops, without onnxscript: its flag, and programs of torch.export."""
    from torch.onnx._internal.exporter import _flags

    args = randn(5, 2, 32), randn(2, 6, 1, 3, 64), randn(2, 1, 9, 64)
    program = torch.export.export(Ops(), args)
    plain = program.run_decompositions(mhc_inductor.decompositions())
    monkeypatch.setattr(_flags, "_is_onnx_exporting", True)
    words = r"torch\.onnx\.export cannot hold e79_scan.*run_decompositions\(mhc_inductor.decompositions"
    for strict in (False, True):
        with pytest.raises(Exception, match=words):
            torch.export.export(Ops(), args, strict=strict)
    with pytest.raises(RuntimeError, match=words):
        program.run_decompositions({})
    assert plain.run_decompositions({}).graph_module.code
