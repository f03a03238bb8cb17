# SPDX-License-Identifier: Apache-2.0
"""explain(), the report, the log and the tlparse artifact."""

from __future__ import annotations

import inspect
import json
import logging
import os
import pathlib
import subprocess
import sys

import pytest
import test_offline_e79
import test_offline_selection
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from conftest import INTERPRETED
from torch import nn
from torch.utils.checkpoint import checkpoint

import mhc_inductor
from mhc_inductor import explanation as module
from mhc_inductor.explanation import explain
from mhc_inductor.kernels.eager import plan_of
from mhc_inductor.report import NearMiss, Report, Routed, log_report
from mhc_inductor.routing.operators.kernels import KERNELS, REFERENCE, kernels_of
from tests.oracles.samples import sample
from tests.tools.offline import TARGETS, Recorder

ROOT = pathlib.Path(__file__).resolve().parent.parent
HERE = pathlib.Path(__file__).name
N, D = 4, 16
pytestmark = pytest.mark.usefixtures("fresh")


class Plain(nn.Module):
    """One sublayer with mHC residuals in plain PyTorch; ``dim`` is the softmax dim of h_res."""

    def __init__(self, dim: int = -1, broken: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.phi = nn.Parameter(torch.randn(N * N + 2 * N, N * D, generator=generator) * 0.2)
        self.alpha = nn.Parameter(torch.tensor([0.7, 1.1, 0.9]))
        self.bias = nn.Parameter(torch.randn(N * N + 2 * N, generator=generator))
        self.inner = nn.Linear(D, D)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.dim, self.broken, self.checkpointed = dim, broken, checkpointed

    def body(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(-2).float()
        mix = F.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6), self.phi)
        pre, post, res = mix.split([N, N, N * N], dim=-1)
        pre = torch.sigmoid(pre * self.alpha[0] + self.bias[:N]) + 1e-6
        post = 2 * torch.sigmoid(post * self.alpha[1] + self.bias[N : 2 * N])
        res = res.unflatten(-1, (N, N)) * self.alpha[2] + self.bias[2 * N :].view(N, N)
        res = torch.softmax(res, dim=self.dim) + 1e-6
        res = res / (res.sum(-2, keepdim=True) + 1e-6)
        for _ in range(2):
            res = res / (res.sum(-1, keepdim=True) + 1e-6)
            res = res / (res.sum(-2, keepdim=True) + 1e-6)
        h_in = (pre.unsqueeze(-1) * x).sum(-2)
        if self.broken:
            torch._dynamo.graph_break()
        out = self.drop(torch.tanh(self.inner(h_in)))
        return post.unsqueeze(-1) * out.unsqueeze(-2) + torch.matmul(res.transpose(-1, -2), x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


def streams(seed: int = 1) -> torch.Tensor:
    return torch.randn(2, 5, N, D, generator=torch.Generator().manual_seed(seed))


def ops(report: Report) -> list[str]:
    return sorted(r.op for r in report.routed)


# ---- explain


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_formulas_are_found_with_their_lines(mode, checkpointed, capsys):
    model = Plain(checkpointed=checkpointed).train(mode == "train")
    with torch.set_grad_enabled(mode != "no_grad"):
        report = explain(model, streams())
    assert ops(report) == ["mhc_post", "mhc_pre"]
    assert report.graphs >= 1 and report.nodes > 20 and report.seconds > 0
    lines, first = inspect.getsourcelines(Plain.body)
    for routed in report.routed:
        assert routed.kernels == REFERENCE, "the inputs are on a CPU"
        file, _, rest = routed.source.partition(":")
        assert pathlib.Path(file).name == HERE
        line = int(rest.partition(",")[0])
        assert first <= line < first + len(lines)
        assert lines[line - first].strip() in routed.source
    assert all(r.as_written for r in report.routed)
    assert str(report).count("reference formula, fused by Inductor; a compile keeps the formula as written") == 2
    said = capsys.readouterr().out
    assert "mhc_pre" in said and HERE in said and report.totals() in " ".join(said.split())
    assert str(mhc_inductor.OpCounts.of(report)) in said


def test_a_report_is_printed_once(capsys):
    """By the call; what a prompt shows of the returned report is its totals."""
    report = explain(Plain().eval(), streams())
    said = " ".join(capsys.readouterr().out.split())
    assert said.count(report.totals()) == 1 and said.count("why not") <= 1 and said.count("routed module line ") == 1
    assert repr(report) == f"<Report: {report.totals()}>"


def test_a_function_with_keyword_arguments():
    model = Plain().eval()

    def fn(scale: float, *, x: torch.Tensor) -> torch.Tensor:
        return model(x * scale)

    assert ops(explain(fn, 2.0, x=streams())) == ["mhc_post", "mhc_pre"]


def test_a_near_miss_says_why(capsys):
    report = explain(Plain(dim=-2).eval(), streams())
    assert report.near_misses, report
    near = "rows and columns are normalised 6 times, and no form of mhc_sinkhorn gives the matrix: the nearest is"
    assert any(near in miss.reason and miss.node and HERE in miss.source for miss in report.near_misses)
    assert "near miss" in capsys.readouterr().out


def test_graph_breaks_are_reported_together():
    report = explain(Plain(broken=True).eval(), streams())
    assert report.graphs >= 2
    assert "mhc_pre" in ops(report), report
    assert any("Dynamo breaks the graph" in miss.reason for miss in report.near_misses), report


def test_a_checkpointed_region_that_breaks_is_named():
    """Dynamo compiles nothing of it, so that no graph shows its formulas."""
    broken = explain(Plain(broken=True, checkpointed=True), streams())
    assert not ops(broken) and ["checkpointed region" in miss.reason for miss in broken.near_misses] == [True], broken
    whole = explain(Plain(checkpointed=True), streams())
    assert ops(whole) and not whole.near_misses, "another call's break is not this one's"


def test_nothing_to_find():
    report = explain(lambda x: torch.sin(x) * 2, torch.randn(3))
    assert report.empty and report.graphs == 1


def test_the_call_is_an_eager_call():
    eager, explained = Plain(), Plain()
    explained.load_state_dict(eager.state_dict())
    x = streams()
    seen = []

    def run(model: Plain) -> torch.Tensor:
        out = model(x)
        seen.append(out)
        out.square().sum().backward()
        return out

    torch.manual_seed(7)
    run(eager)
    after = torch.rand(())
    torch.manual_seed(7)
    explain(lambda: seen.append(explained(x)))
    seen[1].square().sum().backward()
    assert torch.equal(torch.rand(()), after), "as many random numbers were drawn"
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0)
    assert explained.calls == eager.calls == 1
    for (name, a), b in zip(eager.named_parameters(), explained.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_pass_sees_copies(monkeypatch, checkpointed):
    def destroy(gm: torch.fx.GraphModule, **_) -> Report:
        bodies = [m for m in gm.modules() if isinstance(m, torch.fx.GraphModule)]
        assert len(bodies) == 1 + checkpointed
        for body in bodies:
            for node in body.graph.find_nodes(op="call_function", target=torch.sigmoid):
                node.target = torch.cos
            body.recompile()
        return Report(graphs=1)

    monkeypatch.setattr(module, "route", destroy)
    model, outputs = Plain(checkpointed=checkpointed).eval(), []
    explain(lambda x: outputs.append(model(x)), streams())
    torch.testing.assert_close(outputs[0], model(streams()), rtol=0, atol=0)


def test_no_counter_moves():
    torch.compile(Plain().eval(), backend="mhc_inductor")(streams())
    before = mhc_inductor.counters()
    assert before["routed mhc_pre"] >= 1
    explain(Plain().eval(), streams())
    assert mhc_inductor.counters() == before


def test_the_users_compiled_code_stays_and_explain_has_no_limit():
    model, x = Plain().eval(), streams()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counter)
    compiled(x)
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        assert ops(explain(compiled, x)) == ["mhc_post", "mhc_pre"]
    compiled(x)
    assert counter.frame_count == 1


def test_errors_of_the_function_come_through():
    with pytest.raises(RuntimeError, match=r"shape|size|mat1"):
        explain(Plain().eval(), torch.randn(3, 5))


# ---- the report

FOUND = Report(
    routed=[Routed("mhc_pre", "m.py:3, in f: x[0]", "n = 4", ("a", "b")), Routed("mhc_post", "m.py:9, in f: y")],
    fused=[Routed("mhc_post_pre", "m.py:3, in f: x[0]", kernels=("c",), parts=("mhc_post", "mhc_pre"))],
    near_misses=[
        NearMiss("mhc_sinkhorn", "expected [dim] -1", "m.py:5, in f: z", "softmax"),
        NearMiss("mhc_sinkhorn", "expected [dim] -1", "m.py:5, in f: z", "softmax_1"),
    ],
    problems=["broken at m.py:8"],
    graphs=2,
    nodes=77,
    seconds=0.25,
)
EXPECTED = ("1 x mhc_pre", "m.py:3, in f: x[0]", "n = 4", "a, b", "mhc_post + mhc_pre", "expected [dim] -1", "softmax")
TOTALS = "routed 1 mhc_pre, 1 mhc_post; fused 1 mhc_post_pre; 2 near misses, 1 problems; 77 nodes of 2 graphs in 0.25 s"


def test_plain_text():
    text = str(FOUND)
    for part in (*EXPECTED, "2 x mhc_sinkhorn", "broken at m.py:8"):
        assert part in text
    assert text.count("mhc_sinkhorn") == 1, "equal findings share a row"
    assert text.splitlines()[-1] == TOTALS
    assert str(Report(graphs=1)).startswith("routed nothing; fused nothing; 0 near misses")


def layer(i: int, name: str = "attn") -> tuple[tuple[str, str], ...]:
    return (("", "Model"), ("model.layers", "ModuleList"), (f"model.layers.{i}.{name}", "Layer"))


def test_a_line_for_each_finding():
    layers = [
        Routed("mhc_pre", f"/a/long/way/to/{'x' * 40}.py:997, in f: y", "n", ("k1, or k2", "b"), error, modules=place)
        for error, place in zip((1e-7, 3e-7, 1e-7), (layer(0), layer(1), layer(1, "ffn")), strict=True)
    ]
    misses = [NearMiss("mhc_sinkhorn", "because " * 30, "m.py:5, in f: z", f"n{i}", modules=layer(i)) for i in range(9)]
    report = Report(layers, misses, list(FOUND.fused), ["broken at " + "y" * 200], 1, 12345, 1.5)
    lines = report.table().splitlines()
    assert max(map(len, lines)) <= 100
    counts = [line.split()[:3] for line in lines if line.split()[0].isdigit()]
    assert counts == [
        ["2", "mhc_pre", "model.layers.*.attn"],
        ["1", "mhc_pre", "model.layers.*.ffn"],
        ["1", "mhc_post_pre", "m.py:3"],
        ["9", "mhc_sinkhorn", "model.layers.*.attn"],
        ["1", "broken", "at"],
    ]
    first = next(line for line in lines if line.split()[:2] == ["2", "mhc_pre"])
    assert "…" in first and "x.py:997 " in first and "error 3e-07, k1 + 1 more" in report.table(width=140)
    assert " ".join(lines).endswith(report.totals())


def test_modules_are_those_of_the_model():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Plain(), Plain()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x))

    model = Model().eval()
    wanted = [[("", "Model"), ("layers.0", "Plain")], [("", "Model"), ("layers.1", "Plain")]]
    for fn in (model, torch.compile(model), lambda x: model(x)):
        report = explain(fn, streams())
        assert [[*r.modules] for r in report.routed if r.op == "mhc_pre"] == wanted
        assert [[*f.modules] for f in report.fused] == wanted[1:]
        assert "    2 mhc_pre       layers.*" in report.table()
    assert all(f.modules for f in explain(Plain(dim=-2).eval(), streams()).near_misses)


def test_details_are_printed_on_request_and_sizes_are_those_of_the_op(capsys):
    report = explain(Plain().eval(), streams(), details=True)
    said = capsys.readouterr().out
    assert said.startswith(report.table()) and said.rstrip().endswith(str(report)) and said.count("detail: n = 4") == 1
    (pre,) = (r for r in report.routed if r.op == "mhc_pre")
    tokens, m = 10, N * N + 2 * N
    results = tokens * (D + N + N * N + N + m + 1)
    assert pre.cost.bytes == 4 * (tokens * N * D + m * N * D + 3 + m + results)
    assert pre.cost.flops == 2 * tokens * (m * N * D + N * D)
    assert pre.cost.tensors[:2] == ("x: float32 [2, 5, 4, 16]", "phi: float32 [24, 64]")
    assert pre.cost.times is None


@pytest.mark.parametrize(
    ("name", "error", "note"),
    [
        ("_cost", TypeError("no size\nhere"), "not known: TypeError: no size"),
        ("_seconds", RuntimeError("no compiler\nhere"), "not measured: RuntimeError: no compiler"),
    ],
)
def test_what_cannot_be_told_or_measured_of_an_op_says_why_and_changes_no_finding(monkeypatch, name, error, note):
    def fail(*_):
        raise error

    monkeypatch.setattr(module, name, fail)
    report = explain(Plain().eval(), streams(), measure=True)
    assert ops(report) == ["mhc_post", "mhc_pre"] and not report.near_misses and not report.problems
    assert {r.cost.note for r in report.routed} == {note}


@pytest.mark.parametrize("grad", [False, True])
def test_formula_and_op_are_measured_on_request(grad, monkeypatch):
    backends = []

    def seconds(trial, piece, feed, backend):
        backends.append(backend)
        return taken(trial, piece, feed, backend)

    taken = module._seconds
    monkeypatch.setattr(module, "_seconds", seconds)
    monkeypatch.setattr(module, "_REPEATS", 2)
    before = mhc_inductor.counters()
    with torch.set_grad_enabled(grad):
        report = explain(Plain().eval(), streams(), measure=True)
    assert mhc_inductor.counters() == before
    assert len(backends) == 4 and backends[1::2] == ["mhc_inductor"] * 2, "each distinct formula once, then its op"
    for routed in report.routed:
        assert not routed.cost.note
        assert all(0 < t < 1 for t in routed.cost.times)


def test_reports_add_up():
    total = Report()
    total.extend(FOUND)
    total.extend(FOUND)
    assert (len(total.routed), len(total.near_misses), len(total.fused), len(total.problems)) == (4, 4, 2, 2)
    assert (total.graphs, total.nodes, total.seconds) == (4, 154, 0.5)
    assert len(FOUND.routed) == 2


def test_one_line_per_finding(caplog):
    with caplog.at_level(logging.INFO, logger="mhc_inductor"):
        log_report(FOUND)
        log_report(Report(graphs=1))
    lines = [r.getMessage() for r in caplog.records if r.name == "mhc_inductor"]
    assert lines == [
        "routed mhc_pre at m.py:3, in f: x[0]; detail: n = 4; kernels: a, b",
        "routed mhc_post at m.py:9, in f: y",
        "fused mhc_post_pre at m.py:3, in f: x[0]; of: mhc_post + mhc_pre; kernels: c",
        "near miss mhc_sinkhorn at m.py:5, in f: z; why not: expected [dim] -1; node: softmax",
        "near miss mhc_sinkhorn at m.py:5, in f: z; why not: expected [dim] -1; node: softmax_1",
        "problem: broken at m.py:8",
        TOTALS,
    ]


# ---- the log and the artifact, in fresh processes

MODEL = """
import torch, mhc_inductor, logging
from test_explain import Plain, streams
level = logging.getLogger("mhc_inductor").level
torch.compile(Plain().eval(), backend="mhc_inductor")(streams())
torch.compile(lambda x: x + 1, backend="mhc_inductor")(streams())
print("level", level)
"""


def in_a_process(**variables: str) -> subprocess.CompletedProcess[str]:
    """Runs MODEL in a new process without Inductor's caches; g++ may reuse objects it built from the same code."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    anew = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    env = {**os.environ, "PYTHONPATH": paths, **anew, **variables}
    done = subprocess.run([sys.executable, "-c", MODEL], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.parametrize(("setting", "level"), [("mhc_inductor", logging.INFO), ("+mhc_inductor", logging.DEBUG)])
def test_torch_logs(setting, level):
    done = in_a_process(TORCH_LOGS=setting)
    assert f"level {level}" in done.stdout
    assert "Overriding a previously registered kernel" not in done.stderr, (
        "naming the logger imported the package twice"
    )
    lines = done.stderr.splitlines()
    assert len([x for x in lines if "routed mhc_pre at" in x and HERE in x]) == 1
    assert len([x for x in lines if "routed mhc_post at" in x and HERE in x]) == 1
    assert any("routed nothing" in x for x in lines) == (level == logging.DEBUG)


def test_tlparse_artifact(tmp_path):
    in_a_process(TORCH_TRACE=str(tmp_path / "trace"))
    (log,) = (tmp_path / "trace").iterdir()
    lines = log.read_text().splitlines()
    at = [i for i, line in enumerate(lines) if '"mhc_inductor_routing"' in line]
    assert len(at) == 1, "one artifact for the graph with the formula, none for the other"
    record = json.loads(lines[at[0]].partition("] ")[2])
    assert record["artifact"] == {"name": "mhc_inductor_routing", "encoding": "string"}
    assert record["frame_id"] == 0, "tlparse shows it with its graph"
    payload = "\n".join(line[1:] for line in lines[at[0] + 1 : at[0] + 12])
    assert payload.startswith("routed:\n") and "1 x mhc_pre" in payload and HERE in payload


# ---- kernels


def _launched(op: str) -> list[str]:
    """Returns the kernels that an op and its gradient launch, in order."""
    builder = Recorder(TARGETS["cuda:90"][1])
    builder.gluon = True
    if op == "e79_scan":
        test_offline_e79.launches(builder, n=64, bias="fixed")
    elif op == "selection_attention":
        test_offline_selection.launches(builder, h=16, Dk=128)
    else:
        for name in (op, f"{op}_backward"):
            args = sample(name, lead=(300,), width=128, dtype=torch.bfloat16, iters=20)
            plan_of(name)(builder, *(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args))
    return [kernel.__name__ for kernel, *_ in builder.launches]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no kernel names")
@pytest.mark.parametrize("op", KERNELS)
def test_kernels_are_those_of_the_plan(op):
    assert tuple(dict.fromkeys(_launched(op))) == KERNELS[op]


def test_every_forward_op_has_its_kernels():
    ops = ("mhc_", "e79_", "selection_attention")
    names = {n for n in dir(torch.ops.mhc_inductor) if n.startswith(ops) and not n.endswith("_backward")}
    assert set(KERNELS) == names
    assert kernels_of("mhc_pre", "cuda") == KERNELS["mhc_pre"]
    assert kernels_of("mhc_pre", "cpu") == kernels_of("mhc_pre", "xpu") == REFERENCE
