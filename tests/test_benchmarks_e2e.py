# SPDX-License-Identifier: Apache-2.0
"""The end-to-end benchmark and that of the routing pass: what they measure, save, compare with bars and plot."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import __main__ as cli
from benchmarks import deepseek_model, deepseek_v4, environment, processes, routing, worker
from mhc_inductor.report import Report, Routed

CPU = torch.device("cpu")
SMALL = deepseek_model.Size(1, 32, 2, 16, 16, 16, 2, 16, 4, 2, 16, 64, 2, 16)


def job(variant: str = "eager", part: str = "forward") -> deepseek_v4.Job:
    return deepseek_v4.Job(variant, part, "cpu", dataclasses.asdict(SMALL), 2)


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


@pytest.mark.parametrize("part", deepseek_v4.PARTS)
def test_a_row(part):
    waited = []
    row = deepseek_v4.measure(job(part=part), waited.append)
    assert waited == ["ready", "compiled"]
    assert len(row["samples_ms"]) == 2 and min(row["samples_ms"]) <= row["median_ms"] <= max(row["samples_ms"])
    assert 3.0 < row["loss"] < 6.0, "an untrained model: about ln 64 = 4.16"
    assert "compile_s" not in row and "peak_gib" not in row
    if part != "forward":
        assert row["gradient_norm"] > 0
        assert not any("hc" in name for name in row["parameters_without_gradient"])


def test_checkpointing_changes_no_result():
    plain, checkpointed = (deepseek_v4.measure(job(part=p), lambda _: None) for p in ("training", "checkpointed"))
    assert checkpointed["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert checkpointed["gradient_norm"] == pytest.approx(plain["gradient_norm"], rel=1e-5)


def test_the_plugins_row_counts_what_was_routed():
    torch._dynamo.reset()
    row = deepseek_v4.measure(job("mhc_inductor"), lambda _: None)
    torch._dynamo.reset()
    assert row["routing"]["routed"] == {"mhc_pre": 2, "mhc_post": 2, "mhc_head": 1}
    assert 0 < row["routing"]["seconds"] < row["compile_s"]
    assert 0 < row["routing"]["share_of_compile"] < 1
    assert row["loss"] == pytest.approx(deepseek_v4.measure(job(), lambda _: None)["loss"], rel=1e-5)


def test_a_failing_variant_is_a_row(tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(deepseek_v4, "measure", fail)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    worker.measure(print, "deepseek_v4", json.dumps(dataclasses.asdict(job())), str(tmp_path / "row.json"))
    row = json.loads((tmp_path / "row.json").read_text())
    assert row == {"variant": "eager", "part": "forward", "error": "RuntimeError: out of luck"}


# ---- the driver


def settings(**changes: Any) -> deepseek_v4.Settings:
    return deepseek_v4.Settings(**{"device": "cpu", "size": SMALL, "rounds": 2, **changes})


def test_the_plan_starts_with_what_compiles_longest():
    plan = settings().plan()
    assert len(plan) == 12 == len({j.name for j in plan})
    assert plan[0].name == "torch.compile-checkpointed"
    assert plan[-1].name == "eager-forward"
    assert [j.name for j in settings(variants=("eager",), parts=("forward",)).plan()] == ["eager-forward"]


def test_workers_share_the_processors_that_torch_would_take(monkeypatch):
    monkeypatch.setattr(deepseek_v4.os, "cpu_count", lambda: 64)
    made = settings()
    threads = {j.name: made.threads(j) for j in made.plan()}
    assert threads.pop("mhc_inductor-training") == threads.pop("torch.compile-forward") == 32
    assert threads["torch.compile-training"] == threads["eager-forward"] == 8


def test_rows_are_measured_in_processes_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("MHC_COMMIT", "abc")
    said: list[str] = []
    made = settings(variants=("eager",), alone=("eager-training",))
    rows = deepseek_v4.run(made, tmp_path, said.append)
    assert [r["part"] for r in rows] == ["checkpointed", "training", "forward"]
    assert not any("error" in r for r in rows), rows
    assert [r["compiled_alone"] for r in rows] == [False, True, False]
    assert said[:2] == ["eager-training: compiling", "eager-training: timing"], "alone"
    assert sorted(said[2:4]) == ["eager-checkpointed: compiling", "eager-forward: compiling"]
    assert said[4:] == ["eager-checkpointed: timing", "eager-forward: timing"], "nothing is timed while others compile"

    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, **__: pytest.fail("measured again"))
    assert deepseek_v4.run(made, tmp_path, said.append) == rows
    monkeypatch.setenv("MHC_COMMIT", "def")
    assert processes.kept(tmp_path, made.plan()[0]) is None, "another commit's row does not count"


def test_a_process_that_dies_is_a_failed_row(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    (row,) = deepseek_v4.run(settings(variants=("eager",), parts=("forward",)), tmp_path, lambda _: None)
    assert row["error"] == "the process ended with 1"


# ---- the result


def made_rows() -> list[dict[str, Any]]:
    figures = {"eager": (36.0, 86.2, None, 6.9), "mhc_inductor": (11.0, 29.0, (19.0, 36.0), 5.4)}
    rows = []
    for variant, (forward, both, compile_s, peak) in figures.items():
        for i, (part, ms) in enumerate((("forward", forward), ("training", both))):
            row = {
                "variant": variant,
                "part": part,
                "median_ms": ms,
                "samples_ms": [ms],
                "loss": 8.25,
                "peak_gib": peak,
            }
            row |= {"parameters": 155_000_000, "compiled_alone": True, "stamp": {}}
            if compile_s:
                row["compile_s"] = compile_s[i]
                found = Report(
                    [Routed("mhc_pre", "a.py:1")] * 8, [], [Routed("mhc_post_pre", "", parts=("a", "b"))] * 7
                )
                found.nodes, found.seconds = 900, 0.5
                row["routing"] = routing.summary([found]) | {"share_of_compile": 0.5 / compile_s[i]}
            rows.append(row)
    return rows


@pytest.fixture
def on_h200(monkeypatch) -> dict[str, Any]:
    monkeypatch.setattr(environment, "device_facts", lambda _: {"type": "cuda", "name": "NVIDIA H200"})
    made = deepseek_v4.Settings("cuda", deepseek_model.Size(), ("eager", "mhc_inductor"), ("forward", "training"))
    return deepseek_v4.gather(made, made_rows())


def test_verdicts(on_h200):
    verdicts = {v["what"]: (v["met_bar"], v["met_goal"]) for v in on_h200["verdicts"]}
    assert verdicts == {
        "forward_ms": (True, False),
        "training_ms": (False, False),
        "forward_compile_s": (True, False),
        "training_compile_s": (True, False),
        "training_peak_gib": (True, True),
    }
    assert on_h200["variants"]["eager"]["training_ms"] == 86.2


def test_compile_times_of_a_slower_processor_are_also_scaled():
    variants = {
        "torch.compile": {"forward_compile_s": 2 * deepseek_v4.RECORD_COMPILE_S},
        "mhc_inductor": {"forward_compile_s": 38.0, "checkpointed_compile_s": 90.0},
    }
    absolute, scaled = deepseek_v4.verdicts(variants, deepseek_v4.ALONE)
    assert absolute["value"] == 38.0 and not absolute["met_bar"]
    assert scaled["value"] == pytest.approx(19.0) and scaled["met_bar"] and not scaled["met_goal"]
    assert "x 31 / 62.0" in scaled["what"]
    # A time taken while other compiles run does not measure the processor.
    assert deepseek_v4.verdicts(variants, ("mhc_inductor",)) == [absolute]


def test_no_verdict_on_a_cpu():
    made = settings(variants=("eager", "mhc_inductor"))
    result = deepseek_v4.gather(made, made_rows())
    assert result["verdicts"] == []
    assert result["kernel_sources_sha256"] == environment.source_hash()
    assert result["versions"]["transformers"]


def test_table(on_h200):
    rows = {line.split("|")[1].strip(): line for line in deepseek_v4.table(on_h200).splitlines() if line[:1] == "|"}
    assert "| 36.0 | 86.2 |" in rows["eager"]
    assert "| 11.0 | 29.0 | 19.0 + 36.0 | 5.40 |" in rows['backend="mhc_inductor"']
    assert "| 29.00 | 28.5 **not met** | 25.5 **not met** |" in rows["training_ms"]
    assert "| 8 mhc_pre | 7 mhc_post_pre | 0 | 900 | 0.50 | 1.4 % |" in rows["training"]
    for block in deepseek_v4.table(on_h200).split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_failed_rows_are_named(on_h200):
    on_h200["rows"].append({"variant": "trivial", "part": "training", "error": "OutOfMemoryError: no\nmore"})
    assert "- failed: trivial, training: OutOfMemoryError: no\n" in deepseek_v4.table(on_h200)


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


def test_routing_command(tmp_path):
    done = CliRunner().invoke(cli.app, ["routing", "--layers", "1,2", "--compiled", "0", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "routing.json").read_text())
    assert [r["layers"] for r in result["rows"]] == [1, 2]
    for row in result["rows"]:
        assert row["routed"] == {"mhc_pre": 2 * row["layers"], "mhc_post": 2 * row["layers"], "mhc_head": 1}
        assert 0 < row["cpu_seconds"] <= row["seconds"] + 0.1 and row["dynamo_seconds"] > 0 and not row["problems"]
    assert result["compile"] is None
    assert (tmp_path / "routing.md").read_text() == routing.table(result)
    shown = CliRunner().invoke(cli.app, ["table", str(tmp_path / "routing.json")])
    assert shown.output == routing.table(result)


def test_routing_bars():
    row = {
        "layers": 43,
        "nodes": 10,
        "seconds": 16.0,
        "microseconds_a_node": 1.0,
        "dynamo_seconds": 1.0,
        "cpu_seconds": 15.5,
    }
    row |= {"routed": {}, "fused": {}}
    header = environment.header(CPU)
    header["versions"]["transformers"] = "5"
    result = header | {"rows": [row], "compile": {"layers": 4, "seconds": 1.0, "compile_seconds": 10.0, "share": 0.1}}
    text = routing.table(result)
    assert "15.50 (**bar not met**)" in text
    assert "10.0 % (bar met)" in text


def test_unknown_variants_are_refused(tmp_path):
    done = CliRunner().invoke(cli.app, ["deepseek_v4", "--variant", "fast", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_a_run_never_takes_the_name_of_a_whole_one(tmp_path):
    options = ["--variant", "eager", "--part", "forward", "--rounds", "2", "--device", "cpu"]
    folders = ["--out", str(tmp_path / "out"), "--keep", str(tmp_path / "keep")]
    done = CliRunner().invoke(cli.app, ["deepseek_v4", *options, *folders])
    assert done.exit_code == 0, done.output
    path = tmp_path / "out" / "deepseek_v4-tiny-partial.json"
    result = json.loads(path.read_text())
    assert [r["variant"] for r in result["rows"]] == ["eager"]
    assert result["settings"]["size"] == dataclasses.asdict(deepseek_model.TINY)
    assert path.with_suffix(".md").read_text() == deepseek_v4.table(result)
    assert sorted(p.name for p in (tmp_path / "keep").iterdir()) == ["eager-forward.json", "eager-forward.log"]
