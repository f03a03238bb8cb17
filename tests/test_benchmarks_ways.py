# SPDX-License-Identifier: Apache-2.0
"""The benchmark of ways to train and serve: cells, what counts as wrong, processes that crash or hang, going on."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch
import transformers

from benchmarks import pages, processes, ways
from benchmarks.ways import cell
from benchmarks.ways.cell import NAMED, RIGHT, WAYS, WIDE, WRONG, Got, Runner
from benchmarks.ways.models import MODELS, missing
from tests.formulas.sparse_families import FAMILIES

CPU = torch.device("cpu")
SMALL = [name for name, of in MODELS.items() if not of.wide]
HERE = [name for name in SMALL if not missing(MODELS[name])]


def got(seed: int = 0, noise: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> Got:
    """Returns results of one model, off by ``noise`` that ``seed`` draws."""
    g = torch.Generator().manual_seed(9)
    other = torch.Generator().manual_seed(seed)

    def off(t: torch.Tensor) -> torch.Tensor:
        return (t + noise * t.norm() / t.numel() ** 0.5 * torch.randn(t.shape, generator=other)).to(dtype)

    logits = [off(torch.randn(50, 8, generator=g))]
    grads = {name: off(torch.randn(20, 4, generator=g)) for name in ("a", "b")}
    return Got(logits, 2.5, {**grads, "unused": None})


def wrong(mine: Got, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    exact = got(dtype=torch.float32)
    return cell.judged({}, mine, got(1, 0.02) if dtype != torch.float32 else exact, exact, dtype)


def test_gradients_that_eager_has_not_are_left_out_and_said():
    eager, mine = got(1, 0.02), got(2, 0.02)
    eager.grads["a"] = eager.grads["a"] * torch.nan
    mine.grads["a"] = mine.grads["a"] * torch.nan
    row: dict[str, Any] = {}
    assert cell.judged(row, mine, eager, got(dtype=torch.float32), torch.bfloat16) == []
    assert row["not finite in eager"] == ["a"]
    mine.grads["b"] = mine.grads["b"] * torch.nan
    assert cell.judged({}, mine, eager, got(dtype=torch.float32), torch.bfloat16)[0] == "b is not finite"


# ---- what is run


def test_every_model_has_a_cell_for_every_way():
    plan = ways.Settings("cpu").plan()
    assert len(plan) == len(set(plan))
    wide = [(m, w) for m, w in plan if MODELS[m].wide]
    assert set(plan) - set(wide) == set(itertools.product(SMALL, WAYS))
    assert plan[-len(wide) :] == wide and {w for _, w in wide} == set(WIDE) >= {"forward", "train", "checkpoint"}
    assert {m for m, _ in plan[: len(SMALL)]} == set(SMALL), "each model is trained before anything else"


@pytest.mark.parametrize("name", HERE)
def test_padding_checkpoints_and_dtypes_reach_the_model(name):
    def of(way: str) -> tuple[Runner, Got]:
        runner = Runner(MODELS[name], WAYS[way], CPU, True)
        return runner, runner.got(runner.model, runner.model)

    runner, plain = of("fp32")
    assert all(bool(t.isfinite().all()) for t in plain.logits) and plain.loss > 0
    assert any(g is not None for g in plain.grads.values())
    exact = copy.deepcopy(runner.model)
    assert cell.errors(runner.got(exact, exact, exact=True), plain)["gradients"] < 1e-5
    assert 1e-5 < cell.errors(of("train")[1], plain)["gradients"] < 1, "bf16"
    # A scaled gradient comes back unscaled, though fp16 rounds it.
    assert 0 < cell.errors(of("fp16, scaled")[1], plain)["gradients"] < 0.5
    if not cell.not_there(MODELS[name], WAYS["left padded"]):
        left, right = of("left padded")[1].logits[0], of("right padded")[1].logits[0]
        assert left.shape == right.shape and left.shape[0] < plain.logits[0].shape[0]
        assert (left - right).abs().max() > 1e-3
    accumulated = of("accumulated")[1]
    assert len(accumulated.logits) == 2 and not torch.equal(*accumulated.logits)


def test_a_model_that_is_not_there_is_named(monkeypatch):
    assert cell.measure("mhc", "decode", CPU, True) == {"status": NAMED, "why": "the model takes no cache"}
    new = dataclasses.replace(FAMILIES["hy_v4"], model="NewForCausalLM")
    monkeypatch.setitem(FAMILIES, "hy_v4", new)
    row = cell.measure("hy_v4", "train", CPU, True)
    assert row == {"status": NAMED, "why": f"transformers {transformers.__version__} has no NewForCausalLM"}


# ---- what counts as wrong


def test_eager_with_other_roundings_is_right():
    assert not wrong(got(2, 0.02)) and not wrong(got(2, 0.035))
    assert not wrong(got(2, 1e-5, torch.float32), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wrong_results_are_seen(dtype):
    def broken(**changes: Any) -> list[str]:
        mine = got(2, 0.0, dtype)
        for name, value in changes.items():
            mine.grads[name] = value
        return wrong(mine, dtype)

    gradient = got(dtype=dtype).grads["a"]
    assert gradient is not None and not broken()
    for change in (2 * gradient, -gradient, 0 * gradient, gradient.flip(0)):
        assert any("worst gradient" in line for line in broken(a=change))
    assert "only: ['a']" in broken(a=None)[0] and "only: ['unused']" in broken(unused=gradient)[0]
    assert "a is not finite" in broken(a=gradient / 0)[0]


def test_wrong_logits_are_seen():
    mine = got(2, 0.02)
    mine.logits[0] += 0.3
    assert any("median token" in line for line in wrong(mine))
    one = got(2, 0.02)
    one.logits[0][3] *= -1
    assert not wrong(one), "another key or expert for one token"
    most = got(2, 0.02)
    most.logits[0][:24] *= -1
    assert any("logits" in line for line in wrong(most)), "the median alone does not see it"
    with pytest.raises(RuntimeError, match=r"logits are \[\[49, 8\]\]"):
        wrong(Got([mine.logits[0][1:]], 2.5, mine.grads))


def _measured(monkeypatch, fails: dict[str, Any]) -> dict[str, Any]:
    """Measures a cell whose compile by a backend of ``fails`` raises the exception, or gives wrong logits."""

    def step(self: Runner, model: Any, call: Any, exact: bool = False) -> Any:
        rows, loss = plain(self, model, model, exact)
        fault = fails.get(call) if isinstance(call, str) else None
        if isinstance(fault, Exception):
            raise fault
        return [2 * r for r in rows] if fault else rows, loss

    plain = Runner.step
    monkeypatch.setattr(Runner, "step", step)
    monkeypatch.setattr(Runner, "compiled", lambda _, backend: cell.contextlib.nullcontext(backend))
    return cell.measure("mhc", "train", CPU, True)


@pytest.mark.parametrize(
    ("fails", "status"),
    [
        ({}, RIGHT),
        ({"mhc_inductor": ValueError("no")}, WRONG),
        ({"mhc_inductor": "wrong"}, WRONG),
        ({"mhc_inductor": ValueError("no"), "inductor": "wrong"}, WRONG),
        ({"mhc_inductor": ValueError("no"), "inductor": KeyError("neither")}, NAMED),
        ({"mhc_inductor": "wrong", "inductor": "wrong"}, NAMED),
        ({"inductor": "wrong"}, RIGHT),
    ],
)
def test_what_torch_compile_fails_at_as_well_is_named(monkeypatch, fails, status):
    row = _measured(monkeypatch, fails)
    assert row["status"] == status, row
    assert ("without this package" in row["why"]) == (status == NAMED)


def test_a_device_that_is_broken_blames_no_one_else(monkeypatch):
    monkeypatch.setattr(cell, "works", lambda _: False)
    fault = ValueError("illegal memory access")
    row = _measured(monkeypatch, {"mhc_inductor": fault, "inductor": fault})
    assert row["status"] == WRONG and row["why"] == "ValueError: illegal memory access" and "output" in row


# ---- processes


PLANTED = """
import os, sys, time
from benchmarks import worker
from benchmarks.ways import cell
def measure(model, way, device, toy):
    print("noise")
    if way == "decode":
        os._exit(7)
    if way == "reentrant":
        time.sleep(60)
    if way == "fp32":
        raise ValueError("planted")
    return {"status": "right", "why": "", "routed": {"op": 2}, "process": os.getpid()}
cell.measure = measure
worker.main(*sys.argv[1:])
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Starts processes in which one way exits, one hangs and one raises."""
    script, popen = tmp_path / "planted.py", processes.subprocess.Popen
    script.write_text(PLANTED)
    monkeypatch.setattr(
        processes.subprocess, "Popen", lambda words, **given: popen([words[0], str(script), *words[3:]], **given)
    )
    return tmp_path


@pytest.mark.timeout(180)
def test_a_cell_that_fails_takes_no_other_with_it(planted):
    made = ways.Settings("cpu", True, jobs=1, limit_s=1.5, only=("mhc: ",))
    said: list[str] = []
    result = ways.run(made, planted / "ways.json", planted / "kept", said.append)
    rows = {r["way"]: r for r in result["rows"] if r["model"] == "mhc"}
    assert rows["decode"]["why"] == "the process ended with 7" and "noise" in rows["decode"]["output"]
    assert rows["reentrant"]["why"] == "the process ended with its limit of 2 s"
    assert rows["fp32"]["why"] == "ValueError: planted" and 'ValueError("planted")' in rows["fp32"]["output"]
    others = [rows[w] for w in WAYS if w not in ("decode", "reentrant", "fp32")]
    assert {r["status"] for r in others} == {RIGHT}
    assert len({r["process"] for r in others}) == 3, "a fresh process after each that ended, and no other"
    assert len(said) == len(WAYS) and not result["complete"]
    assert {r["status"] for r in result["rows"] if r["model"] != "mhc"} == {ways.NOT_RUN}


class Fake:
    """Stands for a process; its cells take no time."""

    def __init__(self, *_: Any) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def ask(self, job: dict[str, Any], limit: float) -> dict[str, Any]:
        return {"status": WRONG if (job["model"], job["way"]) in BAD else RIGHT, "why": "", "routed": {}}


BAD = (("mhc", "decode"), ("e79", "fp32"))


def test_a_second_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(ways, "start", Fake)
    monkeypatch.setattr(ways, "source_hash", lambda **_: "these")
    made, path, said = ways.Settings("cpu", True, jobs=3), tmp_path / "ways.json", []

    def run(**changes: Any) -> tuple[list[str], set[str]]:
        said.clear()
        result = ways.run(dataclasses.replace(made, **changes), path, tmp_path, said.append)
        assert result["complete"] is False and json.loads(path.read_text())["rows"] == result["rows"]
        return sorted(" ".join(line.split()[2:4]) for line in said), {r["status"] for r in result["rows"]}

    assert run(only=("mhc: train",)) == (["mhc: train"], {RIGHT, ways.NOT_RUN})
    assert len(run()[0]) == len(made.plan()) - 1, "what is there is kept"
    assert run() == (["e79: fp32", "mhc: decode"], {RIGHT, WRONG}), "what failed is measured again"
    assert run(budget_s=0) == ([], {RIGHT, ways.NOT_RUN})
    monkeypatch.setattr(ways, "source_hash", lambda **_: "another")
    assert run(budget_s=0) == ([], {ways.NOT_RUN}), "what is of other code is not kept"


# ---- the command


def test_what_the_page_says():
    result = pages.read("ways")
    first, second, third = result["rows"][:3]
    first |= {"status": WRONG, "why": "a | b"}
    second |= {"status": NAMED, "why": "no cache"}
    third |= {"status": RIGHT, "why": "", "routed": {"mhc_pre": 2, "mhc_post": 1}}
    third |= {"from fp32": {"median token": 0.011, "gradients": 0.01}, "skipped graphs": 0}
    third |= {"eager from fp32": {"median token": 0.01, "gradients": 0.01}}
    for row, peak in zip((r for r in result["rows"] if MODELS[r["model"]].wide), (3.0, None), strict=False):
        row |= {"ours": {"ms": 12.34, "peak_gib": peak}, "eager": {"error": "out of memory"}, "loss": 9.5}
    page = ways.table(result)
    for piece in ("wrong [1]", "1. a / b", "named [2]", "ok 1.1x, 3 routed", "| 12.3 | 3.0 | 9.5000 |"):
        assert piece in page, piece
    assert "| 12.3 |  | 9.5000 |" in page and "| eager | out of memory |  |" in page


def test_nothing_routed_stands_out():
    row = {"status": RIGHT, "why": "", "routed": {}, "from eager": {"logits": 0.5}}
    assert ways.text(row) == "ok 5e-01, **nothing** routed"
