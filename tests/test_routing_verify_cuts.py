# SPDX-License-Identifier: Apache-2.0
"""Verification compares a formula and its op on the same inputs, whatever else of the graph is returned or written.

A result that the graph returns, or writes later, is read through clones. Both sides must then still be fed the same
value. Here each graph is routed with its intermediate results as further outputs: all of them, some, or one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import mhc_inductor
from mhc_inductor.report import Report
from mhc_inductor.routing import Verifier, route
from mhc_inductor.routing.few_tokens import FewTokens
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.mhc import emit
from tests import test_routing_single_pass as single_pass
from tests.formulas import reference_models_e79 as e79
from tests.formulas import reference_models_selection as selection
from tests.formulas.laws import block, mhc_leaves
from tests.formulas.laws_writes import WRITES, written
from tests.formulas.reference_models_mhc import WIDTH, N, _balanced, _gates, around, normed, parameters
from tests.formulas.spellings_selection import plain
from tests.tools.capture import interpreted, run

P = parameters()
Fn = Callable[..., Any]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@torch.library.custom_op("example::matrix_of_streams", mutates_args=())
def matrix_of(x: Tensor) -> Tensor:
    return x[..., :N, :N].softmax(-1).clone()


@matrix_of.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-2], N, N)


matrix_of.register_autograd(lambda ctx, grad: None)


def given_matrix(x: Tensor, h: Tensor, f: Tensor, m: Tensor) -> Tensor:
    """A post whose matrix is an input of the graph, then a site."""
    return around(m @ x + h.unsqueeze(-1) * f.unsqueeze(-2), P, _balanced)


def made_matrix(x: Tensor, h: Tensor, f: Tensor, m: Tensor) -> Tensor:
    return given_matrix(x, h, f, matrix_of(x))


def static_matrix(x: Tensor, h: Tensor, f: Tensor, m: Tensor) -> Tensor:
    return given_matrix(x, h, f, m[0, 0].mT)


def collapsed_only(x: Tensor, h: Tensor, f: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    x = m @ x + h.unsqueeze(-1) * f.unsqueeze(-2)
    pre, post, logits = _gates(normed(x.flatten(-2)) @ P["phi"].T, P)
    return (pre.unsqueeze(-1) * x).sum(-2), post, logits, x


def two_layers(x: Tensor) -> Tensor:
    return around(around(x, P, _balanced), P, _balanced)


SITE = (_random(2, 3, N, WIDTH), _random(2, 3, N), _random(2, 3, WIDTH), _random(2, 3, N, N))
PROGRAMS: dict[str, tuple[Callable[[], Fn], tuple[Tensor, ...]]] = {
    "given matrix": (lambda: given_matrix, SITE),
    "matrix of a custom op": (lambda: made_matrix, SITE),
    "static matrix": (lambda: static_matrix, SITE),
    "coefficients and collapse": (lambda: collapsed_only, SITE),
    "two layers": (lambda: two_layers, SITE[:1]),
    "single pass": (single_pass.Package, (single_pass.streams(),)),
    "recurrence": (e79.Stack, (_random(3, 2, e79.DIM),)),
    "lists of keys": (selection.DeepseekSparse, (_random(2, 20, 24),)),
    "blocks of keys": (lambda: plain("blocks"), plain("blocks").inputs()),
}


def captured(fn: Fn, inputs: Sequence[Tensor]) -> list[fx.GraphModule]:
    """Returns the graphs of one call in training."""
    return run(fn, inputs, routed=False, dynamo=True).graphs


def returning(gm: fx.GraphModule, more: Iterable[fx.Node], written: bool) -> fx.GraphModule:
    """Returns a copy of a graph that also returns some of its nodes or, if ``written``, doubles them in place at the end."""
    graph, at = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        at[node] = made = graph.node_copy(node, at.__getitem__)
        made.meta = {**node.meta}
    end = graph.output_node()
    for node in more:
        if written:
            with graph.inserting_before(end):
                graph.call_method("mul_", (at[node], 2.0)).meta = {**node.meta}
        else:
            end.args = ((*end.args[0], at[node]),)  # type: ignore[misc]
    return fx.GraphModule(gm, graph)


def floats(gm: fx.GraphModule) -> list[fx.Node]:
    calls = (n for n in gm.graph.nodes if n.op.startswith("call_"))
    return [n for n in calls if isinstance(t := n.meta.get("example_value"), Tensor) and t.is_floating_point()]


def refused(report: Report) -> list[str]:
    """Returns what verification refused or could not run, and the problems."""
    missed = [f"{m.op}: {m.reason}" for m in report.near_misses if "verified" in m.reason]
    return [
        *missed,
        *(f"{r.op}: {r.note}" for r in (*report.routed, *report.fused) if r.error is None),
        *report.problems,
    ]


@pytest.mark.parametrize("written", [False, True], ids=["returned", "written"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_right_op_is_refused_whatever_is_seen(name: str, written: bool) -> None:
    make, inputs = PROGRAMS[name]
    pick, check, routed = random.Random(name), Verifier(), 0
    for gm in captured(make(), inputs):
        nodes = floats(gm)
        for seen in (nodes, [], *([n] for n in pick.sample(nodes, min(5, len(nodes))))):
            report = route(returning(gm, [] if written and seen is nodes else seen, written), check=check)
            assert not refused(report), ([n.name for n in seen], refused(report))
            routed += len(report.routed) + len(report.fused)
    assert routed and check.runs


def test_a_wrong_op_is_refused_where_its_input_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    (gm,) = captured(collapsed_only, SITE)
    right = emit._numbers
    assert {r.op for r in route(returning(gm, [], False), check=Verifier()).routed} == {"mhc_post", "mhc_pre"}
    monkeypatch.setattr(emit, "_numbers", lambda pre: (1e-3, *right(pre)[1:]))
    report = route(returning(gm, [], False), check=Verifier())
    assert [r.op for r in report.routed] == ["mhc_post"] and not report.problems
    assert [m for m in report.near_misses if m.op == "mhc_pre" and "verified on random data" in m.reason]


@pytest.mark.parametrize(
    ("op", "rest"),
    [
        ("mhc_sinkhorn", {"mhc_pre", "mhc_post"}),
        ("mhc_pre", {"mhc_sinkhorn"}),
        ("mhc_post", {"mhc_pre", "mhc_sinkhorn"}),
    ],
)
def test_ops_after_a_refused_one_read_the_models_values(op: str, rest: set[str]) -> None:
    """The iterations are an op of their own where h_res is returned. A post stays with a pre that is refused."""
    (gm,) = captured(two_layers, SITE[:1])
    logits = [n for n in floats(gm) if "unflatten" in str(n.target)]
    assert len(logits) == 2

    def check(edit: Any, match: Any, pairs: Any) -> Any:
        if match.op == op:
            raise Mismatch("refused", match.start)
        return Verifier()(edit, match, pairs)

    report = route(returning(gm, logits, False), check=check)
    assert not report.problems and not refused(report)
    assert {m.op for m in report.near_misses if m.reason == "refused"} == {op}
    assert {r.op for r in report.routed} == rest


def test_explain_accepts_the_site() -> None:
    """A post with a matrix from a custom op, then coefficients and a collapse of what the graph returns too."""
    report = mhc_inductor.explain(lambda x, h, f, m: collapsed_only(x, h, f, matrix_of(x)), *SITE, verify=True)
    assert [r.op for r in report.routed] == ["mhc_post", "mhc_pre"] and not report.near_misses
    assert all(r.error is not None and r.error < 1e-5 for r in report.routed)


@pytest.mark.parametrize("kind", [Verifier, FewTokens])
@pytest.mark.parametrize("name", ["mul_quietly", "setitem", "setitem_mask"])
def test_what_a_step_writes_after_an_op_is_read_after_the_step(name: str, kind: type[Any]) -> None:
    """The second block reads what the first one's op returns, as a step in place leaves it."""

    def program(p: dict[str, Tensor]) -> Tensor:
        streams = block(p["x"], p)
        return block(written(WRITES[name], False)(streams), p)

    check, report = kind(), Report()
    torch._dynamo.reset()
    torch.compile(program, backend=interpreted(report, [], check), dynamic=False)(mhc_leaves())
    assert Counter(r.op for r in report.routed) == {"mhc_pre": 2, "mhc_post": 2}
    assert not report.near_misses and not report.problems and check.runs == 3
