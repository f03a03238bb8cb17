# SPDX-License-Identifier: Apache-2.0
"""The doctor: its facts, its exit status, and its plain output without rich and typer."""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mhc_inductor
from mhc_inductor import doctor, versions
from mhc_inductor.kernels import eager

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def report() -> doctor.Report:
    return doctor.collect()


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160", **environment}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


TOO_OLD = ["2.10.1", "1.99", "main"]


@pytest.mark.parametrize("version", [*TOO_OLD, "2.11.0", "2.13.0+cpu", "2.15.1a0+git123", "2.16.0", "3.0"])
def test_torch_version(version: str) -> None:
    problem = doctor.torch_problem(version)
    assert (problem is not None) == (version in TOO_OLD)
    assert problem is None or version in problem


def test_the_report_has_every_op_on_every_device_and_nothing_that_is_untested_or_off(report: doctor.Report) -> None:
    assert set(report.ops) == set(report.devices)
    for of in report.ops.values():
        assert tuple(of) == eager.OPS
        assert all(of.values())
    assert report.state['backend "mhc_inductor" registered'] == "yes"
    assert "cannot" not in report.state["cache fingerprint"]
    assert doctor._fingerprint() == report.state["cache fingerprint"]
    assert versions.untested() == [] and report.state["kernels that cannot be loaded"] == "none"
    text = doctor.plain(report)
    for _, rows in doctor.tables(report):
        for name, value in rows.items():
            assert f"{name}: {value}" in text


def test_kernels_and_the_reason_for_none_come_from_the_ops_own_rule() -> None:
    how = doctor.kernels_on(torch.device("cpu"), "mhc_pre")  # the rule reads dtypes, not the device
    assert "kernels for bfloat16, float16, float32" in how
    assert "reference formula for float64: " in how


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "why_not", lambda *_: "triton cannot be imported (No module named 'triton')")
    monkeypatch.setattr(doctor, "_triton", lambda: (None, "No module named 'triton'"))
    how = doctor.kernels_on(torch.device("cpu"), "mhc_post")
    assert "kernels" not in how
    assert how.startswith("reference formula for bfloat16, float16, float32, float64: triton cannot be imported")
    assert doctor._versions()["triton"] == "missing: No module named 'triton'"
    assert any("triton is missing" in n for n in doctor._notes({"cuda:0": ""}))


def test_enable_is_reported() -> None:
    key = "enable() active in this process"
    assert doctor._state()[key] == "no"
    mhc_inductor.enable()
    try:
        assert doctor._state()[key] == "yes"
    finally:
        mhc_inductor.disable()
    assert doctor._state()[key] == "no"


def test_environment_and_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    report = doctor.collect()
    assert report.environment["TRITON_INTERPRET"] == "1"
    assert any("interpreter" in n for n in report.notes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so_and_is_usable(report: doctor.Report) -> None:
    assert set(report.devices) == {"cpu"}
    assert any(n.startswith("no GPU") for n in report.notes)
    assert report.exit_code == 0


def test_exit_status_when_torch_is_too_old(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(versions.TESTED, "torch", ((9, 0), (9, 1)))
    assert doctor.main() == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "not usable" in out
    assert "too old: at least 9.0 is needed" in out


def test_an_untested_version_is_tried_and_named_once() -> None:
    """In a process of its own: its torch and Triton claim to be newer than any tested."""
    code = (
        "import importlib.metadata, logging, torch; logging.basicConfig(format='%(message)s');"
        "torch.__version__ = '9.1'; read = importlib.metadata.version;"
        "importlib.metadata.version = lambda name: '9.2' if name == 'triton' else read(name);"
        "import mhc_inductor; from mhc_inductor import doctor, versions; versions.warn();"
        "print(*doctor._notes({'cuda:0': ''}), sep='\\n');"
        "mhc_inductor.mhc_sinkhorn(torch.zeros(1, 4, 4), 2, 1e-6)"
    )
    run = _run("-c", code)
    assert run.returncode == 0, run.stderr
    said = [f"{name} 9.{i} is untested; tested are " for i, name in ((1, "torch"), (2, "triton"))]
    for sentence in said:
        assert run.stderr.count(sentence) == 1 and run.stdout.count(sentence) == 1


def test_what_an_older_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    assert any(note.startswith("torch 2.12.1+cpu: ") for note in doctor._notes({"cuda:0": ""}))
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    assert not any(note.startswith("torch 2.13.0: ") for note in doctor._notes({"cuda:0": ""}))


def test_a_kernel_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mhc_inductor.kernels.mhc.gluon_few", None)
    assert [line.split(":")[0] for line in doctor.unloadable()] == ["mhc_inductor.kernels.mhc.gluon_few"]


def test_command_line() -> None:
    run = _run("-m", "mhc_inductor", "doctor")
    assert run.returncode == 0, run.stderr
    for word in (torch.__version__, mhc_inductor.__version__, "mhc_pre_backward", "fingerprint", "TRITON_INTERPRET"):
        assert word in run.stdout
    assert run.stdout.strip().endswith("usable")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs ``python -m mhc_inductor`` in this process; returns the exit status and what was printed."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setattr(sys, "argv", ["mhc_inductor", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("mhc_inductor", run_name="__main__")
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


def test_command_line_without_rich_and_typer(monkeypatch: pytest.MonkeyPatch, command: Callable[..., Any]) -> None:
    for name in ("rich", "typer", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    status, out, err = command("doctor")
    assert status == 0, err
    assert "versions:\n  mhc_inductor: " in out
    assert out.strip().endswith("usable")
    assert json.loads(command("doctor", "--json")[1])["usable"] is True


def test_json_is_all_that_is_printed() -> None:
    run = _run("-m", "mhc_inductor", "doctor", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["usable"] is True and found["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["tune", "--only", "foo"], "no such operator: foo"),
        (["tune", "--widths", "a"], "widths must be integers"),
        ([], "Exit status: 0 if it is done"),
    ],
)
def test_wrong_arguments_end_with_2_and_no_traceback(
    arguments: list[str], said: str, command: Callable[..., Any]
) -> None:
    status, out, err = command(*arguments)
    text = " ".join((out + err).split())
    assert status == 2 and said in text and "Traceback" not in text, text


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_nothing_to_measure_on_ends_with_1(command: Callable[..., Any]) -> None:
    status, out, err = command("tune", "--json")
    assert (status, out) == (1, "") and "no GPU is visible" in err
