# SPDX-License-Identifier: Apache-2.0
"""The end-to-end benchmarks of whole models and that of the pass: jobs, rows, bars, bounds of errors, pages."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import pytest
import torch

from benchmarks import (
    deepseek_model,
    deepseek_v4,
    environment,
    pages,
    processes,
    routing,
    sparse_cases,
    sparse_models,
    worker,
)
from benchmarks import sparse_cases as targets
from benchmarks.sparse_cases import COMPILE, COMPILE_GRAPHS, EAGER, FORWARD, OURS, OURS_GRAPHS, TRAINING, V4, V32, Case
from benchmarks.sparse_models import fill

CPU = torch.device("cpu")


def case(model: str = V32, part: str = FORWARD, seq: int = 32, **changes: Any) -> Case:
    return Case(model, 2, seq, part, **{"eager": True, "checked": True, **changes})


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


def test_deepseek_v32_has_the_surveyed_sizes_and_the_published_widths():
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


@pytest.mark.parametrize("lost", [False, True])
def test_another_result_has_errors_and_a_lost_gradient_is_one(lost, monkeypatch):
    process = sparse_models.Process(job(part=TRAINING))
    process.call = lambda **kwargs: process.model(**kwargs)
    right = process.step

    def step() -> Any:
        logits, weight = right(), process.model.lm_head.weight
        if process.call is process.model:
            return logits
        weight.grad = None if lost else 2 * weight.grad
        return logits + 1

    monkeypatch.setattr(process, "step", step)
    if lost:
        with pytest.raises(RuntimeError, match="lm_head"):
            process.errors()
    else:
        row = process.errors()
        assert row["error_logits"] > 0.1 and row["error_gradients"] > 0.1


def test_our_row_counts_what_was_routed():
    torch._dynamo.reset()
    row = sparse_models.measure(job(OURS, model=V4, seq=64))  # compiled once for both tests of what was routed
    torch._dynamo.reset()
    assert row["routing"]["nodes"] > 0 and row["compile_s"] > 0
    assert isinstance(row["reasons"], list) and row["error_logits"] < 1e-4


def test_a_failing_process_keeps_its_times(monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    said: list[str] = []
    monkeypatch.setattr(sparse_models.Process, "errors", fail)
    worker.answer(sparse_models, json.dumps(dataclasses.asdict(job())), said.append)
    told, row = map(json.loads, said)
    assert row["error"] == "RuntimeError: out of luck" and row["median_ms"] > 0 and row["done"]
    assert told.items() < row.items() and "done" not in told


# ---- the driver


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Has a script run in place of Python in processes that measure."""

    def plant(lines: str) -> None:
        script = tmp_path / "planted"
        script.write_text(f"#!/bin/sh\n{lines}")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return plant


def test_rows_come_from_processes_and_are_kept(tmp_path, monkeypatch, planted):
    """A process that measures is in tests/test_benchmarks_families.py."""
    planted("""read job; echo '{"median_ms": 7.5}'; echo '{"median_ms": 7.5, "error_logits": 0.0, "done": true}'""")
    monkeypatch.setenv("MHC_COMMIT", "abc")
    said: list[str] = []
    made = settings(variants=(EAGER,))
    (row,) = processes.run("sparse_models", made, tmp_path, said.append)
    assert said == ["deepseek_v32-2x32-forward-eager"] and row.pop("stamp")["commit"] == "abc"
    assert row == made.plan()[0].named | {"median_ms": 7.5, "error_logits": 0}
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, **__: pytest.fail("measured again"))
    monkeypatch.setattr(environment, "_output", lambda *_: None)
    (kept,) = processes.run("sparse_models", made, tmp_path, said.append)
    assert kept.pop("stamp") and kept == row and len(said) == 1
    monkeypatch.setenv("MHC_COMMIT", "def")
    assert processes.kept(tmp_path, made.plan()[0]) is None


def test_a_spent_budget_and_a_dead_process_are_rows(tmp_path, monkeypatch):
    rows = processes.run("sparse_models", settings(budget_s=0), tmp_path, lambda _: None)
    assert [r["error"] for r in rows] == [sparse_models.SPENT] * 3
    monkeypatch.setattr(sys, "executable", "false")
    (row,) = processes.run("sparse_models", settings(variants=(EAGER,)), tmp_path, lambda _: None)
    assert row["error"] == "the process ended with 1"


def test_a_process_that_takes_too_long_keeps_what_it_saved(tmp_path, planted):
    planted("""echo '{"median_ms": 7.5}'; echo noise >&2; exec sleep 60""")
    (row,) = processes.run("sparse_models", settings(variants=(EAGER,), limit_s=2), tmp_path, lambda _: None)
    assert row["error"] == "the process ended with its limit of 2 s" and row["median_ms"] == 7.5
    assert row["output"] == "noise\n"


# ---- the result


@pytest.mark.parametrize("name", ["sparse_models", "sparse_models-partial", "sparse_models-published"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_verdicts_follow_from_the_committed_rows(name, device, monkeypatch):
    want = pages.read(name)
    monkeypatch.setattr(environment, "device_facts", lambda _: want["device"] if device == "cuda" else {"name": "CPU"})
    cases = tuple(Case(**made) for made in want["settings"]["cases"])
    result = sparse_models.gather(sparse_models.Settings(device, cases), want["rows"])
    assert result["errors"] == want["errors"]
    assert result["verdicts"] == (want["verdicts"] if device == "cuda" else [])
    assert {"commit", "routing_sha256", "kernel_sources_sha256", "device", "versions"} <= result.keys()


@pytest.mark.parametrize(("error", "within"), [(0.019, True), (0.021, False)])
def test_errors_are_bounded_by_those_of_the_others(error, within):
    rows = {OURS: {"error_logits": error}, COMPILE: {"error_logits": 0.0095}}
    assert targets.errors(rows)[0]["within"] is within
    assert targets.errors({OURS: {"error_logits": error}})[0]["within"] is None, "nothing to compare with"


def test_the_page_names_failures_reasons_and_bad_errors():
    result = pages.read("sparse_models")
    result["rows"][0] |= {"reasons": ["the mask is a | tensor"], "error": "OutOfMemoryError: none left"}
    result["errors"][0]["within"] = False
    page = sparse_models.table(result)
    assert all(text in page for text in ("a / tensor", "**error out of bounds**", "OutOfMemoryError: none left"))


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
    with pytest.raises(ValueError, match="device name"):
        fill(first, _run(later["rows"], device={"type": "cuda", "name": "NVIDIA H100"}))


# ---- DeepSeek-V4 with and without checkpointing

SMALL = deepseek_model.Size(1, 32, 2, 16, 16, 16, 2, 16, 4, 2, 16, 64, 2, 16)


def v4_job(variant: str = "eager", part: str = "forward") -> deepseek_v4.Job:
    (job,) = deepseek_v4.settings("cpu", True, (variant,), (part,), 2).plan()
    return job


# ---- the model


def test_the_measured_model_has_the_published_size():
    from transformers import DeepseekV4ForCausalLM

    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(deepseek_model.config(deepseek_model.Size()))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 155


def test_only_mhc_stays_in_fp32():
    model = deepseek_model.build(SMALL, CPU, torch.bfloat16)
    kept = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {n for n, _ in model.named_parameters() if "_hc." in n or "hc_head." in n}
    assert len(kept) == 2 * 3 + 3
    assert model(input_ids=deepseek_model.tokens(SMALL, CPU)).logits.isfinite().all()


def test_trivial_coefficients_depend_on_no_token_and_are_taken_back():
    model = deepseek_model.build(SMALL, CPU, torch.float32)
    connection = next(m for m in model.modules() if type(m).__name__ == "DeepseekV4HyperConnection")
    x = torch.randn(2, 3, 4, SMALL.dim)
    usual = [t.detach() for t in connection(x)]
    with deepseek_model.trivial_coefficients():
        post, comb, h_in = connection(x)
    assert [t.shape for t in (post, comb, h_in)] == [t.shape for t in usual]
    assert torch.equal(post[0, 0], post[1, 2]) and torch.equal(comb[0, 0], comb[1, 2])
    for a, b in zip(connection(x), usual, strict=True):
        assert torch.equal(a, b)


# ---- one process


def test_rows_of_deepseek_v4_and_checkpointing_changes_no_result():
    rows = {part: deepseek_v4.measure(v4_job(part=part)) for part in deepseek_v4.PARTS}
    for part, row in rows.items():
        assert len(row["samples_ms"]) == 3 and min(row["samples_ms"]) <= row["median_ms"] <= max(row["samples_ms"])
        assert 4.5 < row["loss"] < 7.0, "an untrained model: about ln 256 = 5.55"
        assert "compile_s" not in row and "peak_gib" not in row
        if part != "forward":
            assert row["gradient_norm"] > 0
            assert not any("hc" in name for name in row["parameters_without_gradient"])
    plain, checkpointed = (rows[part] for part in ("training", "checkpointed"))
    assert checkpointed["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert checkpointed["gradient_norm"] == pytest.approx(plain["gradient_norm"], rel=1e-5)


def test_the_plugins_row_counts_what_was_routed():
    torch._dynamo.reset()
    row = deepseek_v4.measure(v4_job("mhc_inductor"))
    torch._dynamo.reset()
    assert row["routing"]["routed"] == {"mhc_pre": 4, "mhc_post": 4, "mhc_head": 1}
    assert 0 < row["routing"]["seconds"] < row["compile_s"]
    assert 0 < row["routing"]["share_of_compile"] < 1
    assert row["loss"] == pytest.approx(deepseek_v4.measure(v4_job())["loss"], rel=1e-5)


# ---- the driver


def test_the_plan_starts_with_what_compiles_longest():
    plan = deepseek_v4.settings("cpu", True).plan()
    assert len(plan) == 12 == len({j.name for j in plan})
    assert plan[0].name == "deepseek_v4-2x64-checkpointed-torch.compile"
    assert plan[-1].name == v4_job().name == "deepseek_v4-2x64-forward-eager"


# ---- the result


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_verdicts_of_deepseek_v4_follow_from_the_committed_rows(device, monkeypatch):
    want = pages.read("deepseek_v4")
    monkeypatch.setattr(environment, "device_facts", lambda _: want["device"] if device == "cuda" else {"name": "CPU"})
    made = deepseek_v4.settings(device, False, tuple(want["variants"]))
    result = deepseek_v4.gather(made, want["rows"])
    assert result["variants"] == want["variants"]
    assert result["verdicts"] == (want["verdicts"] if device == "cuda" else [])
    assert {v["met_bar"] for v in want["verdicts"]} == {v["met_goal"] for v in want["verdicts"]} == {True, False}
    assert result["kernel_sources_sha256"] == environment.source_hash() and result["versions"]["transformers"]
    result["rows"].append({"variant": "trivial", "part": "training", "error": "OutOfMemoryError: no\nmore"})
    assert "- failed: trivial, training: OutOfMemoryError: no\n" in deepseek_v4.table(result)


def test_compile_times_of_a_slower_processor_are_also_scaled():
    variants = {
        "torch.compile": {"forward_compile_s": 2 * deepseek_v4.RECORD_COMPILE_S},
        "mhc_inductor": {"forward_compile_s": 38.0, "checkpointed_compile_s": 90.0},
    }
    absolute, scaled = deepseek_v4.verdicts(variants, deepseek_v4.VARIANTS)
    assert absolute["value"] == 38.0 and not absolute["met_bar"]
    assert scaled["value"] == pytest.approx(19.0) and scaled["met_bar"] and not scaled["met_goal"]
    assert "x 31 / 62.0" in scaled["what"]
    # A time taken while other compiles run does not measure the processor.
    assert deepseek_v4.verdicts(variants, ("mhc_inductor",)) == [absolute]


# ---- the pass


def test_every_run_of_the_pass_is_watched():
    torch._dynamo.reset()
    import mhc_inductor.routing as module

    original = module.route
    with routing.watched() as reports:
        gm = torch.fx.symbolic_trace(lambda x: x + 1)
        module.route(gm)
    assert module.route is original
    assert len(reports) == 1 and reports[0].nodes == 3 and reports[0].seconds > 0


def test_routing_bars():
    result = pages.read("routing")
    result["rows"][-1]["cpu_seconds"], result["compile"]["share"] = 15.5, 0.1
    text = routing.table(result)
    assert "15.50 (**bar not met**)" in text and "10.0 % (bar met)" in text
