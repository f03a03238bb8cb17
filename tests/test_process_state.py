# SPDX-License-Identifier: Apache-2.0
"""A compile leaves torch and the garbage collector as they were: functions and settings are restored."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest
import torch

import mhc_inductor
from mhc_inductor import backend, compat, routing
from mhc_inductor.routing.graph import view
from mhc_inductor.scope import Change
from tests.tools import process_state

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.timeout(600)
def test_a_compile_changes_nothing_in_the_process():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    script = pathlib.Path(__file__).parent / "tools" / "process_state.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env, cwd=script.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["left"] == {name: [] for name in found["left"]}
    assert len(found["left"]) == 10
    # The garbage collector's state during a compile is the one during a compile by torch alone: torch 2.15 raises the
    # threshold of the oldest generation meanwhile.
    assert len(found["inside"]) == 3 and not any("gc frozen" in names for names in found["inside"])
    collectors = found["collectors"]
    assert collectors.keys() == {"torch alone", "backend fails", "plain fails", "enable fails", "watched"}
    assert collectors == dict.fromkeys(collectors, collectors["torch alone"])


def test_frozen_objects_may_be_freed_and_none_may_be_added():
    state = {"gc frozen": 5}
    assert not process_state.changed(state, {"gc frozen": 4}) and not process_state.changed(state, state)
    for before, after in ((5, 6), (5, 0), (0, 1)):
        assert process_state.changed({"gc frozen": before}, {"gc frozen": after}) == ["gc frozen"]


@pytest.mark.few_objects
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_the_collector_is_paused_for_a_pass_and_no_longer(monkeypatch, on, fails, frozen):
    seen = []

    def watch(*args):
        seen.append(gc.isenabled())
        if fails:
            raise RuntimeError("stop")
        return modes_of(*args)

    modes_of = view.modes_of
    monkeypatch.setattr(view, "modes_of", watch)
    gm = torch.fx.symbolic_trace(torch.nn.Identity())
    was = gc.isenabled()
    gc.unfreeze()
    if frozen:
        gc.freeze()
    count = gc.get_freeze_count()
    try:
        (gc.enable if on else gc.disable)()
        report = routing.route(gm)
        # Frozen objects can be freed, so the count may fall.
        assert gc.get_freeze_count() <= count and bool(gc.get_freeze_count()) is frozen
        assert seen and not any(seen)
        assert bool(report.problems) is fails
        assert gc.isenabled() is on
    finally:
        gc.unfreeze()
        (gc.enable if was else gc.disable)()


def test_a_change_lasts_until_the_last_thread_leaves():
    made: list[str] = []

    def make():
        made.append("made")
        return lambda: made.append("taken back")

    change, entered, leave = Change(make), threading.Event(), threading.Event()

    def other():
        with change:
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with contextlib.suppress(ValueError), change, change:
        thread.start()
        assert entered.wait(60)
        raise ValueError
    assert made == ["made"]
    leave.set()
    thread.join()
    assert made == ["made", "taken back"]
    with change:
        assert made[2:] == ["made"]


def test_disable_leaves_what_another_library_wrapped_around_the_compiler(monkeypatch):
    module = compat.backend.compile_fx_module()
    plain = module.compile_fx
    calls = []

    def theirs(*args, **kwargs):
        calls.append(1)
        return ours(*args, **kwargs)

    mhc_inductor.enable()
    try:
        ours = module.compile_fx
        assert ours is not plain
        monkeypatch.setattr(module, "compile_fx", theirs)
    finally:
        mhc_inductor.disable()
    assert module.compile_fx is theirs, "what others put there is not ours to remove"
    torch._dynamo.reset()
    before = mhc_inductor.counters()
    torch.compile(lambda x: x.sin() * 5)(torch.randn(3))
    assert calls and mhc_inductor.counters() == before and backend.enabled() is None
    monkeypatch.undo()
    assert module.compile_fx is ours
    module.compile_fx = plain


def test_a_graph_with_ops_under_the_plain_backend_is_compiled_with_the_pass_and_its_key():
    """Checks that, without enable(), patches apply to this compile's forward and backward, and to no other compile."""
    torch._dynamo.reset()
    seen = []

    def spy(graph):
        config = compat.backend.inductor_config()
        seen.append(getattr(config.post_grad_custom_pre_pass, "mhc_inductor", False))

    def post(x, f, h, r):
        return mhc_inductor.mhc_post(x, f, h, r, transpose_res=True)

    x, f, h, r = torch.randn(2, 4, 16), torch.randn(2, 16), torch.rand(2, 4), torch.rand(2, 4, 4)
    with compat.backend.inductor_config().patch(post_grad_custom_post_pass=spy, fx_graph_cache=False):
        torch.compile(post)(x.requires_grad_(), f, h, r).sum().backward()
        assert seen == [True, True]
        torch.compile(lambda x: x.cos() * 7)(f)
    assert seen == [True, True, False]
