# SPDX-License-Identifier: Apache-2.0
"""``python -m mhc_inductor try``: real models of transformers, small, on a CPU."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from mhc_inductor.try_model import command, configuration, worker

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "head_dim": 16}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1}
V4 = {"layer_types": ["sliding_attention"], "hidden_size": 32, "moe_intermediate_size": 16, "hc_mult": 2}
V4 |= {"num_attention_heads": 2, "head_dim": 32, "o_groups": 1, "sliding_window": 4, "hc_sinkhorn_iters": 2}
FAST = {"ATEN_CPU_CAPABILITY": "default", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Compiles in less time."""


def words(changes: dict[str, Any]) -> list[str]:
    return [f"{k}={json.dumps(v)}" for k, v in changes.items()]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160", **FAST, **environment}
    line = [sys.executable, "-m", "mhc_inductor", "try", *arguments]
    return subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)


def test_deepseek_v4_from_its_name_in_one_command(tmp_path: pathlib.Path) -> None:
    settings = [x for word in words(V4) for x in ("--set", word)]
    done = run(
        "deepseek_v4", "--tokens", "24", "--device", "cpu", "--out", str(tmp_path), *settings, HF_HUB_OFFLINE="1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for word in (
        "eager",
        "torch.compile",
        'backend="mhc_inductor"',
        "compile, s",
        "RSS",
        "1 mhc_head",
        "1 selection_attention",
    ):
        assert word in done.stdout, done.stdout
    assert "5/5" in done.stderr and "num_hidden_layers 43 -> 1" in done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    rows = figures["variants"]
    assert figures["passed"] and [*rows] == ["eager", "torch.compile", "mhc_inductor"]
    assert all(row["call_s"] > 0 and row["peak_bytes"] > 2**26 for row in rows.values())
    assert rows["mhc_inductor"]["compile_s"] > 1 and rows["mhc_inductor"]["errors"]["outputs"] < 1e-5
    assert "mhc_pre" in (tmp_path / "report.html").read_text()


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures variants without starting a process for each."""

    def variant(job: worker.Job, name: str, log: pathlib.Path) -> dict[str, Any]:
        torch._dynamo.reset()
        worker.main(json.dumps(vars(job)), name, str(log))
        return dict(json.loads(log.read_text()))

    monkeypatch.setattr(command, "_variant", variant)
    monkeypatch.setenv("COLUMNS", "160")


def test_nothing_of_a_llama_is_routed_and_training_is_compared(
    in_this_process: None, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = worker.Job("llama", {}, training=True, tokens=8)
    assert command.main(job, words(TINY), False, tmp_path, 1e-3, False) == 0
    said = capsys.readouterr().out
    assert "routed nothing" in said and "Nothing of this model is routed" in said
    rows = json.loads((tmp_path / "figures.json").read_text())["variants"]
    for name in ("torch.compile", "mhc_inductor"):
        assert {*rows[name]["errors"]} == {"outputs", "loss", "gradients"}
        assert all(e < 1e-5 for e in rows[name]["errors"].values())


def test_a_variant_that_fails_hides_no_other_and_the_exit_status_is_1(
    in_this_process: None, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(worker.BACKENDS, worker.COMPILE, "aot_eager")
    monkeypatch.setitem(worker.BACKENDS, worker.OURS, "no_such_backend")
    assert command.main(worker.Job("llama", {}, tokens=8), words(TINY), False, tmp_path, 1e-3, True) == 1
    said = capsys.readouterr()
    figures = json.loads(said.out)  # nothing but JSON
    rows = figures["variants"]
    assert not figures["passed"] and rows["torch.compile"]["passed"] and rows["eager"]["passed"]
    assert "no_such_backend" in rows["mhc_inductor"]["error"] and "5/5" in said.err


def test_a_difference_beyond_the_tolerance_fails(
    in_this_process: None, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "BACKENDS", dict.fromkeys(worker.BACKENDS, "aot_eager"))
    assert command.main(worker.Job("llama", {}, tokens=8), words(TINY), False, tmp_path, -1.0, False) == 1
    assert capsys.readouterr().out.count("TOO MUCH") == 2


def test_a_folder_with_weights_gives_its_own_model(tmp_path: pathlib.Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    model.save_pretrained(tmp_path)
    job, loaded, notes = command.settled(worker.Job(str(tmp_path), {}, weights=True, tokens=8), [], False)
    ids = job.inputs(loaded)["input_ids"]
    assert torch.equal(loaded(ids).logits, model(ids).logits) and not notes
    drawn = command.settled(worker.Job(str(tmp_path / "config.json"), {}, tokens=8), [], True)[1]
    assert drawn.config.hidden_size == 32 and not torch.equal(drawn(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match=r"no weights for 9 parameters, such as model\.layers\.1\."):
        command.settled(worker.Job(str(tmp_path), {}, weights=True), ["num_hidden_layers=2"], False)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (
            ["deepsek_v4"],
            2,
            "'deepsek_v4' is no file, folder, id of the hub (OWNER/NAME) or model type (near: deepseek_v4",
        ),
        (["llama", "--set", "hidden_sizes=3"], 2, "LlamaConfig has no field 'hidden_sizes'; near: hidden_size"),
        (["llama", "--set", "hidden_size"], 2, "expected key=value"),
        (["llama", "--weights"], 2, "--weights takes a folder with config.json and weights, got 'llama'"),
        (["vit"], 2, "transformers has no model of type vit that takes tokens"),
        (["gpt2", "--tokens", "1025"], 2, "--tokens 1025: the model takes at most 1024"),
        (["llama", "--device", "tpu"], 2, "--device takes cpu, or cuda where torch sees a GPU; got 'tpu'"),
        (["llama", "--dtype", "int8"], 2, "--dtype takes one of float64"),
        (["owner/model"], 1, "Offline: give a folder, a config.json, or a model type such as deepseek_v4"),
    ],
)
def test_wrong_arguments_are_named_without_a_traceback(
    arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    from mhc_inductor.__main__ import main

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as ended:
        main(["try", *arguments])
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ended.value.code == status and said in text, text


def test_offline_in_a_process_of_its_own(tmp_path: pathlib.Path) -> None:
    done = run("owner/model", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert done.returncode == 1 and "Offline: give a folder" in done.stderr and "Traceback" not in done.stderr


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class Own(LlamaConfig):
    model_type = "own"


class Model(LlamaForCausalLM):
    config_class = Own

    def __init__(self, config):
        if config.hidden_size < 300:
            raise ValueError(f"{config.hidden_size} is too narrow")
        super().__init__(config)
"""


@pytest.fixture
def own(tmp_path: pathlib.Path) -> str:
    """A folder with a model that has code of its own and takes no width below 300."""
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    sizes = {**TINY, "hidden_size": 320, "num_hidden_layers": 3, "vocab_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    (tmp_path / "own.py").write_text(OWN_CODE)
    return str(tmp_path)


def test_code_of_a_model_runs_only_if_asked(own: str) -> None:
    with pytest.raises(ValueError, match="code of its own: read it, then pass --trust-remote-code"):
        command.settled(worker.Job(own, {}), [], False)


def test_fewer_changes_are_tried_where_a_model_refuses_and_it_says_so(own: str) -> None:
    job, model, notes = command.settled(worker.Job(own, {}, trust_remote_code=True, tokens=8), [], False)
    assert type(model).__name__ == "Model" and model.config.hidden_size == 320
    assert (model.config.num_hidden_layers, model.config.vocab_size) == (2, 1024)
    assert "with smaller layers, vocabulary, experts, widths: ValueError: 256 is too narrow" in notes[0]
    assert "changed for this run: num_hidden_layers 3 -> 2, vocab_size 2048 -> 1024" in notes[1]
    with pytest.raises(ValueError, match="as it is: ValueError: 100 is too narrow"):
        command.settled(job, ["hidden_size=100"], True)


def test_without_transformers_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; from mhc_inductor.__main__ import main; main(['try', 'llama'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "pip install 'mhc_inductor[try]'" in done.stderr, done.stderr


# ---- what is made small


SPARSE = ("deepseek_v4", "hy_v4", "deepseek_v32", "glm_moe_dsa", "glm5_next", "mistral_large4", "axk2", "minimax_m3_vl")


@pytest.mark.parametrize("name", SPARSE)
def test_what_decides_routing_stays(name: str) -> None:
    config = AutoConfig.for_model(name)
    small = configuration.changed(config, configuration.smaller(config, {})).get_text_config()
    config = config.get_text_config()
    before, after = config.to_dict(), small.to_dict()
    kept = ("hc_mult", "index_topk", "sliding_window", "num_attention_heads", "num_key_value_heads", "head_dim")
    kept += ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim", "num_experts_per_tok")
    assert all(before[k] == after[k] for k in kept if k in before)
    for kinds in ("layer_types", "indexer_types", "mlp_layer_types"):
        assert {*before.get(kinds, ())} == {*after.get(kinds, ())} and len(after.get(kinds, ())) <= 4
    assert small.hidden_size == 256 and small.vocab_size == 1024 and small.num_hidden_layers <= 4
