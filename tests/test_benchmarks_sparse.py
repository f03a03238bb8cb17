# SPDX-License-Identifier: Apache-2.0
"""The end-to-end benchmark of models with sparse attention: jobs, rows, bars, bounds of errors, pages."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import zipfile
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import __main__ as cli
from benchmarks import environment, processes, sparse_cases, sparse_models, worker
from benchmarks import sparse_cases as targets
from benchmarks.sparse_cases import (
    COMPILE,
    COMPILE_GRAPHS,
    EAGER,
    FORWARD,
    OURS,
    OURS_GRAPHS,
    TRAINING,
    V4,
    V32,
    Case,
)
from benchmarks.sparse_models import fill

CPU = torch.device("cpu")


def case(model: str = V32, part: str = FORWARD, **changes: Any) -> Case:
    return Case(model, 2, 32, part, **{"eager": True, "checked": True, **changes})


def job(variant: str = EAGER, **changes: Any) -> sparse_models.Job:
    return sparse_models.Job(variant, dataclasses.asdict(case(**changes)), "cpu", True, 2)


def settings(**changes: Any) -> sparse_models.Settings:
    return sparse_models.Settings(**{"device": "cpu", "cases": (case(),), "rounds": 2, "toy": True, **changes})


# ---- what is measured


def test_the_cases_and_bars_of_the_survey():
    bars = {c.name: (c.bar_ms, c.bar_gib, c.bar_times) for c in targets.CASES}
    assert bars["deepseek_v4-2x2048-forward"] == (6.3, None, None)
    assert bars["deepseek_v4-1x8192-forward"] == (13.5, 3, None)
    assert bars["deepseek_v32-1x8192-training"] == (57, 7, None)
    assert bars["deepseek_v32-1x16384-training"] == (None, None, 2.2)
    assert {(c.seq, c.part) for c in targets.CASES if c.model == V32} == {
        (seq, part) for seq in (4096, 8192, 16384, 32768) for part in (FORWARD, TRAINING)
    }
    assert len({c.name for c in targets.CASES}) == len(targets.CASES)


def test_deepseek_v32_has_the_surveyed_sizes():
    config = sparse_cases.v32_config(32768, toy=False)
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 2048, 32)
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim) == (
        512,
        64,
        128,
        128,
    )
    assert (config.index_n_heads, config.index_head_dim, config.index_topk) == (32, 128, 2048)
    size = sparse_cases.v4_size(targets.CASES[2], toy=False)
    assert (size.layers, size.batch, size.seq, size.dim) == (4, 1, 8192, 2048)


def test_published_widths_of_deepseek_v32():
    config = sparse_cases.v32_published(32768)
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (1, 7168, 128)
    assert (config.q_lora_rank, config.kv_lora_rank, config.index_n_heads, config.index_topk) == (1536, 512, 64, 2048)


def test_a_budget_cuts_off_peers_first():
    plan = settings(cases=targets.CASES).plan()
    order = [j.variant for j in plan]
    assert order == sorted(order, key=targets.VARIANTS.index)
    assert order.count(OURS) == len(targets.CASES) and order.count(COMPILE) == sum(c.peer for c in targets.CASES)
    assert all(j.of.eager for j in plan if j.variant == EAGER) and 0 < order.count(EAGER) < len(targets.CASES)

    graphs = [j.of for j in plan if j.variant in (OURS_GRAPHS, COMPILE_GRAPHS)]
    assert graphs and {(c.model, c.seq) for c in graphs} == {(V4, 2048)}, "the host's share is largest there"


# ---- one process


@pytest.mark.parametrize(("variant", "backend"), [(OURS_GRAPHS, "mhc_inductor"), (COMPILE_GRAPHS, "inductor")])
def test_cuda_graphs_are_a_mode_of_the_same_compiler(variant, backend, monkeypatch):
    asked: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda model, **given: asked.update(given) or model)
    process = sparse_models.Process(job(variant, part=TRAINING))
    assert asked == {"backend": backend, "dynamic": False, "mode": "reduce-overhead"}
    assert process.errors()["error_gradients"] == 0


@pytest.mark.parametrize("model", [V4, V32])
@pytest.mark.parametrize("part", [FORWARD, TRAINING])
def test_a_row(model, part):
    saved = []
    row = sparse_models.measure(job(model=model, part=part), saved.append)
    assert row["case"] == f"{model}-2x32-{part}" and row["median_ms"] > 0
    assert min(row["samples_ms"]) <= row["median_ms"] <= max(row["samples_ms"])
    assert "compile_s" not in row, "eager"
    assert row["error_logits"] == 0, "a CPU run is the fp32 run"
    assert ("error_gradients" in row) == (part == TRAINING) and row.get("error_gradients", 0) < 1e-6
    assert "error_logits" not in saved[0], "times are saved before errors are measured"


def test_errors_show_another_result(monkeypatch):
    process = sparse_models.Process(job(part=TRAINING))
    wrong = process.step

    def step() -> Any:
        logits = wrong()
        if process.call is not process.model:
            process.model.lm_head.weight.grad.mul_(2)
        return logits + 1 if process.call is not process.model else logits

    process.call = lambda **kwargs: process.model(**kwargs)
    monkeypatch.setattr(process, "step", step)
    row = process.errors()
    assert row["error_logits"] > 0.1 and row["error_gradients"] > 0.1


def test_a_lost_gradient_is_an_error(monkeypatch):
    process = sparse_models.Process(job(part=TRAINING))
    process.call = lambda **kwargs: process.model(**kwargs)
    step = process.step

    def losing() -> Any:
        logits = step()
        if process.call is not process.model:
            process.model.lm_head.weight.grad = None
        return logits

    monkeypatch.setattr(process, "step", losing)
    with pytest.raises(RuntimeError, match="lm_head"):
        process.errors()


def test_our_row_counts_what_was_routed(monkeypatch):
    torch._dynamo.reset()
    row = sparse_models.measure(job(OURS))
    torch._dynamo.reset()
    assert row["routing"]["nodes"] > 0 and row["compile_s"] > 0
    assert isinstance(row["reasons"], list) and row["error_logits"] < 1e-4


def test_a_failing_process_keeps_its_times(tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(sparse_models.Process, "errors", fail)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    worker.measure(print, "sparse_models", json.dumps(dataclasses.asdict(job())), str(tmp_path / "row.json"))
    row = json.loads((tmp_path / "row.json").read_text())
    assert row["error"] == "RuntimeError: out of luck" and row["median_ms"] > 0


# ---- the driver


def test_rows_come_from_processes_and_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("MHC_COMMIT", "abc")
    said: list[str] = []
    made = settings(variants=(EAGER,))
    (row,) = sparse_models.run(made, tmp_path, said.append)
    assert "error" not in row, row
    assert said == ["deepseek_v32-2x32-forward-eager"] and row["error_logits"] == 0
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, **__: pytest.fail("measured again"))
    monkeypatch.setattr(environment, "_output", lambda *_: None)
    assert sparse_models.run(made, tmp_path, said.append) == [row]
    monkeypatch.setenv("MHC_COMMIT", "def")
    assert processes.kept(tmp_path, made.plan()[0]) is None


def test_a_spent_budget_and_a_dead_process_are_rows(tmp_path, monkeypatch):
    rows = sparse_models.run(settings(budget_s=0), tmp_path, lambda _: None)
    assert [r["error"] for r in rows] == [sparse_models.SPENT] * 3
    monkeypatch.setattr(sys, "executable", "false")
    (row,) = sparse_models.run(settings(variants=(EAGER,)), tmp_path, lambda _: None)
    assert row["error"] == "the process ended with 1"


def test_a_process_that_takes_too_long_keeps_what_it_saved(tmp_path, monkeypatch):
    late = tmp_path / "late"
    late.write_text("""#!/bin/sh
for out; do :; done
echo '{"median_ms": 7.5}' > "$out"
echo noise >&2
exec sleep 60
""")
    late.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(late))
    (row,) = sparse_models.run(settings(variants=(EAGER,), limit_s=2), tmp_path, lambda _: None)
    assert row["error"] == "the process ended with its limit of 2 s" and row["median_ms"] == 7.5
    assert row["output"] == "noise\n"


def test_transformers_may_come_from_a_folder_or_a_wheel(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        processes.make_importable(str(tmp_path / "nowhere"), tmp_path)
    wheel, folder = tmp_path / "sparse_probe-1-py3-none-any.whl", tmp_path / "packages"
    folder.mkdir()
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("sparse_probe.py", "value = 7")
    paths = processes.make_importable(os.pathsep.join(map(str, (wheel, folder))), tmp_path / "unpacked")
    assert paths == (str(tmp_path / "unpacked" / wheel.stem), str(folder)) and sys.path[:2] == [*paths]
    import sparse_probe

    assert sparse_probe.value == 7


def test_an_old_dependency_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "transformers.py").write_text("raise ImportError('huggingface-hub>=1.31.0 is required')")
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with pytest.raises(ImportError, match=r"huggingface-hub>=1\.31\.0 is required.*accepts 1\.5"):
        processes.make_importable(str(tmp_path), tmp_path)


# ---- the result


def _rows(**changes: Any) -> dict[str, dict[str, Any]]:
    base = {"median_ms": 10.0, "peak_gib": 2.0, "compile_s": 20.0, "error_logits": 0.01, "error_gradients": 0.02}
    peer = {**base, "median_ms": 50.0, "compile_s": 40.0}
    return {OURS: {**base, **changes}, COMPILE: peer}


def test_verdicts():
    by_name = {c.name: c for c in targets.CASES}
    (time, memory) = targets.verdicts(by_name["deepseek_v4-1x8192-forward"], _rows())
    assert (time["met_bar"], time["met_goal"], memory["met_bar"], memory["met_goal"]) == (True, True, True, None)
    (times,) = targets.verdicts(by_name["deepseek_v32-1x16384-forward"], _rows())
    assert times["value"] == 5 and times["met_bar"] and not times["met_goal"]
    _, share = targets.verdicts(by_name["deepseek_v4-2x2048-forward"], _rows())
    assert share["value"] == 0.5 and share["met_bar"] and not share["met_goal"]
    assert targets.verdicts(by_name["deepseek_v32-1x32768-forward"], _rows()) == []


@pytest.mark.parametrize(("error", "within"), [(0.019, True), (0.021, False)])
def test_errors_are_bounded_by_those_of_the_others(error, within):
    found = {e["what"]: e["within"] for e in targets.errors(_rows(error_logits=error))}
    assert found == {"error_logits": within, "error_gradients": True}
    assert targets.errors({OURS: {"error_logits": error}})[0]["within"] is None, "nothing to compare with"


def test_the_page_names_bars_failures_and_bad_errors(tmp_path, monkeypatch):
    made = settings(cases=targets.CASES[2:4], toy=False)
    rows = []
    for c in made.cases:
        for variant, row in _rows(error_logits=0.5).items():
            rows.append({"variant": variant, "case": c.name, "part": c.part, **row})
        rows.append({"variant": EAGER, "case": c.name, "part": c.part, "error": "OutOfMemoryError: none left"})
    rows[0]["routing"] = {"routed": {"index_topk": 2}, "fused": {}, "seconds": 0.5}
    rows[0]["reasons"] = ["the mask is a | tensor"]
    monkeypatch.setattr(environment, "device_facts", lambda _: {"type": "cuda", "name": "NVIDIA H200"})
    result = sparse_models.gather(made, rows)
    sparse_models.write(result, tmp_path / "sparse_models.json")
    page = (tmp_path / "sparse_models.md").read_text()
    for text in (
        "13.5 met",
        "7 **not met**",
        "OutOfMemoryError",
        "2 index_topk",
        "a / tensor",
        "**error out of bounds**",
    ):
        assert text in page, text
    assert (tmp_path / "sparse_models.png").stat().st_size > 10_000
    kept = json.loads((tmp_path / "sparse_models.json").read_text())
    assert {"commit", "routing_sha256", "kernel_sources_sha256", "device", "versions"} <= kept.keys()
    printed = CliRunner().invoke(cli.app, ["table", str(tmp_path / "sparse_models.json")])
    assert printed.output == page


def _run(rows, **changes):
    device, versions = {"type": "cuda", "name": "NVIDIA H200"}, {"torch": "2", "triton": "3", "transformers": "5"}
    made = {"settings": {"cases": [dataclasses.asdict(targets.CASES[2])]}, "bars_apply": True, "commit": "abcdef12"}
    return {"device": device, "versions": versions, "rows": rows, "date": "2026-11-24T00", **made, **changes}


def test_rows_of_peers_are_filled_from_a_later_run():
    name, spent = targets.CASES[2].name, {"error": sparse_models.SPENT}
    row = {"case": name, "part": FORWARD, "median_ms": 10.0, "error_logits": 0.01}
    first = _run(
        [
            {**row, "variant": OURS},
            {**row, "variant": COMPILE, "median_ms": 50.0},
            {"case": name, "variant": EAGER} | spent,
        ]
    )
    later = _run([{**row, "variant": v, "median_ms": 70.0, "error_logits": 0.02} for v in (OURS, COMPILE, EAGER)])
    filled = fill(first, later)
    assert filled["rows"][:2] == first["rows"][:2], "a row that was measured stays, and ours are never taken"
    assert filled["rows"][2]["median_ms"] == 70 and filled["rows"][2]["of_run"]["commit"] == "abcdef12"
    assert [e["bound"] for e in filled["errors"]] == [2 * 0.02 + 1e-6] and filled["verdicts"]
    assert "error" in first["rows"][2], "the first run is not changed"
    with pytest.raises(ValueError, match="none of the rows"):
        fill(filled, later)
    with pytest.raises(ValueError, match="device's name"):
        fill(first, _run(later["rows"], device={"type": "cuda", "name": "NVIDIA H100"}))


def test_the_command(tmp_path):
    words = ["sparse_models", "--toy", "--device", "cpu", "--only", "deepseek_v32,2x32-forward", "--variant", "eager"]
    done = CliRunner().invoke(cli.app, [*words, "--rounds", "2", "--out", str(tmp_path), "--keep", str(tmp_path / "k")])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "sparse_models-toy-partial.json").read_text())
    assert [r["variant"] for r in result["rows"]] == [EAGER] and result["verdicts"] == []
    assert "not representative" in done.output
    assert CliRunner().invoke(cli.app, ["sparse_models", "--toy", "--only", "gpt"]).exit_code == 2
