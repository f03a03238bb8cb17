# SPDX-License-Identifier: Apache-2.0
"""explain() does not depend on earlier compiles or explanations, and does not change later compiles."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch._dynamo.testing

import mhc_inductor
from mhc_inductor import compat
from tests.formulas import reference_models_mhc

ISOLATED = "isolate_recompiles" in torch.compile.__kwdefaults__
LIMIT = 2
P = {name: t.detach() for name, t in reference_models_mhc.parameters().items()}


def streams(batch=2, tokens=3):
    return torch.randn(batch, tokens, reference_models_mhc.N, reference_models_mhc.WIDTH)


def block(x, k):
    x = reference_models_mhc.liger(x, P)
    torch._dynamo.graph_break()
    return reference_models_mhc.liger(x * k, P)


def outer(x, k=1):
    return block(x, k) * 2


@pytest.fixture(autouse=True)
def limited(fresh):
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        yield


@pytest.fixture(params=["apart", "older torch"])
def every_torch(request, monkeypatch):
    """Runs each test as is, and as before torch 2.13, which cannot keep the code of one compile separate."""
    if request.param == "older torch":
        plain = compat.routing.captured_apart

        @contextlib.contextmanager
        def older():
            with plain():
                yield {}

        monkeypatch.setattr(compat.routing, "captured_apart", older)


def explained(fn, *args):
    report = mhc_inductor.explain(fn, *args)
    return report.graphs, report.nodes, [r.op for r in report.routed]


@pytest.mark.usefixtures("every_torch")
@pytest.mark.parametrize("fn", [outer, block])
def test_explaining_repeatedly_gives_the_same(fn):
    first = explained(fn, streams(), 1)
    assert first[2] == ["mhc_pre", "mhc_post"] * 2
    for _ in range(LIMIT + 1):
        assert explained(fn, streams(), 1) == first
    assert explained(fn, streams(4, 5), 1) == first, "sizes seen before make nothing dynamic"


@pytest.mark.parametrize("calls", [1, LIMIT + 1])
def test_after_a_compile_and_after_the_limit_of_recompiles(calls):
    if calls > 1 and not ISOLATED:
        pytest.skip("before torch 2.13 a function that reached the limit runs uncompiled, whoever asks")
    expected = explained(outer, streams(), 1)
    torch._dynamo.reset()
    compiled = torch.compile(outer, backend="eager", dynamic=False)
    for k in range(calls):
        compiled(streams(2, 3 + k), k)
    assert explained(outer, streams(), 1) == expected
    assert explained(compiled, streams(), 1) == expected


def test_explaining_does_not_change_later_compiles():
    def frames():
        counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
        compiled = torch.compile(outer, backend=counter)
        compiled(streams(4, 5), 1)
        once = counter.frame_count, [len(gm.graph.nodes) for gm in counter.graphs]
        compiled(streams(4, 5), 1)
        assert counter.frame_count == once[0]
        return once

    alone = frames()
    torch._dynamo.reset()
    for tokens in range(LIMIT + 1):
        mhc_inductor.explain(outer, streams(2, 2 + tokens), 1)
    if not ISOLATED:
        pytest.skip("before torch 2.13 the code that explain made stays on the functions, and counts for their limit")
    assert frames() == alone
