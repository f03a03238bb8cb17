# SPDX-License-Identifier: Apache-2.0
"""Options of the backend, and that each graph is routed once even if graphs share their meta."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import mhc_inductor
from mhc_inductor import backend
from mhc_inductor.options import RoutingOptions, parse
from tests.formulas import reference_models_mhc
from tests.formulas.laws import one_process


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, value in reference_models_mhc.parameters().items():
            self.register_parameter(name, nn.Parameter(value.detach()))
        self.names = tuple(reference_models_mhc.parameters())

    def forward(self, x):
        return reference_models_mhc.liger(x, {name: getattr(self, name) for name in self.names})


class Stages(nn.Sequential):
    """Replaces nn.Sequential's forward: Dynamo does not start a graph in torch's own frames."""

    def forward(self, x):
        for stage in self:
            x = stage(x)
        return x


def streams():
    return torch.randn(2, 3, reference_models_mhc.N, reference_models_mhc.WIDTH)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    mhc_inductor.disable()
    torch._dynamo.reset()


def test_options_are_parsed_separately_from_inductors():
    given = {"max_autotune": False, "mhc_inductor.verify": True, "mhc-inductor.empty-rows": "zero"}
    assert parse(given) == (RoutingOptions(verify=True, empty_rows="zero"), {"max_autotune": False})
    assert parse({}) == (RoutingOptions(verify=False, empty_rows="exact"), {})
    assert parse(None) == parse({})


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mhc_inductor.verfy": True}, RuntimeError, ("mhc_inductor.verfy", "mhc_inductor.verify", "empty_rows")),
        ({"mhc_inductor.": True}, RuntimeError, ("mhc_inductor.verify",)),
        ({"mhc_inductor.profile_scopes": 1}, TypeError, ("mhc_inductor.profile_scopes", "bool", "int")),
        ({"mhc_inductor.verify": 1}, TypeError, ("mhc_inductor.verify", "bool", "int")),
        ({"mhc_inductor.empty_rows": "none"}, ValueError, ("mhc_inductor.empty_rows", "exact", "zero", "'none'")),
        ({"mhc_inductor.empty_rows": None}, ValueError, ("mhc_inductor.empty_rows", "exact", "zero", "None")),
    ],
)
def test_bad_options_are_named(options, error, words):
    with pytest.raises(error) as caught:
        parse(options)
    assert all(word in str(caught.value) for word in words)
    with pytest.raises(Exception, match=next(iter(options))):
        torch.compile(lambda x: x + 1, backend="mhc_inductor", options=options)(torch.zeros(2))


def _seen(run):
    """Returns the options that the routing pass was called with."""
    torch._dynamo.reset()
    seen = []

    def taking(gm, options, lower):
        seen.append(options)
        return mock.Mock(routed=[], near_misses=[], fused=[], problems=[])

    with mock.patch("mhc_inductor.routing.route", taking), mock.patch("mhc_inductor.report.log_report"):
        run()
    return seen


def test_options_reach_the_routing_pass():
    x, verify = torch.zeros(2), {"mhc_inductor.verify": True}
    asked = RoutingOptions(verify=True)

    def backend_call(options):
        return lambda: torch.compile(lambda x: x + 1, backend="mhc_inductor", options=options)(x)

    assert _seen(backend_call(verify)) == [asked]
    assert _seen(backend_call({})) == [RoutingOptions()]


def test_enable_takes_the_same_options():
    x = torch.zeros(2)
    mhc_inductor.enable(verify=True, empty_rows="zero")
    assert _seen(lambda: torch.compile(lambda x: x + 2)(x)) == [RoutingOptions(True, "zero")]
    # A compile through the backend ignores the options of enable().
    own = _seen(lambda: torch.compile(lambda x: x + 3, backend="mhc_inductor")(x))
    assert own == [RoutingOptions()]
    mhc_inductor.enable()
    assert _seen(lambda: torch.compile(lambda x: x + 4)(x)) == [RoutingOptions()]
    with pytest.raises(ValueError, match="empty_rows"):
        mhc_inductor.enable(empty_rows="none")
    with pytest.raises(TypeError, match="verify"):
        mhc_inductor.enable(verify="yes")


def _routing(gm, example_inputs):
    backend._route(gm, RoutingOptions())
    return gm.forward


def test_graphs_that_share_one_meta_dict_are_both_routed():
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(Block(), backend=keep)(streams())
    first, second = graphs
    second.meta = first.meta
    before = mhc_inductor.counters().get("routed mhc_pre", 0)
    for gm in (first, second, first, second):
        backend._route(gm, RoutingOptions())
    assert mhc_inductor.counters().get("routed mhc_pre", 0) - before == 2


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_every_bucket_of_ddp_is_routed(monkeypatch):
    import torch.distributed as dist

    # A bucket ends at each of the two wide layers, so that no formula is cut.
    cap = 4 * 4096 * reference_models_mhc.WIDTH
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", cap)
    one_process()
    wide = [nn.Linear(*sizes) for sizes in ((reference_models_mhc.WIDTH, 4096), (4096, reference_models_mhc.WIDTH))]
    model = Stages(Block(), *wide, nn.Tanh(), Block(), Block())
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap / 2**20)
    before = mhc_inductor.counters().get("routed mhc_pre", 0)
    calls = []

    def routing(gm, example_inputs):
        calls.append(gm)
        return _routing(gm, example_inputs)

    x = streams()
    with torch._dynamo.config.patch(optimize_ddp=True):
        out = torch.compile(ddp, backend=routing)(x)
    assert len(calls) >= 2 and len({id(gm.meta) for gm in calls}) < len(calls)
    assert mhc_inductor.counters()["routed mhc_pre"] - before == 3
    torch.testing.assert_close(out, model(x))
