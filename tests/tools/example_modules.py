# SPDX-License-Identifier: Apache-2.0
"""Imports the scripts of examples/ as modules, or runs them as a user does."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@contextlib.contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """Imports the script ``name``; other scripts in its directory are importable meanwhile."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def with_fewer_iterations(build: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``build``, whose models' hyper-connections get 3 Sinkhorn iterations in place of 20: half of a layer's nodes."""

    def smaller(*given: Any) -> Any:
        model = build(*given)
        for module in model.modules():
            if hasattr(module, "hc_sinkhorn_iters"):
                module.hc_sinkhorn_iters = 3
        return model

    return smaller


def fixture(name: str) -> Any:
    """Returns a fixture of the imported script."""

    @pytest.fixture(scope="module")
    def example() -> Iterator[ModuleType]:
        for needed in ("typer", "rich", "matplotlib"):
            pytest.importorskip(needed)
        with imported(name) as module:
            yield module

    return example


def drawn(path: pathlib.Path, height: int, width: int) -> None:
    """Checks that a picture is larger than this and no empty canvas."""
    import matplotlib.pyplot as plt

    picture = plt.imread(path)
    assert picture.shape[0] > height and picture.shape[1] > width, picture.shape
    colors = {tuple(c) for c in picture[::3, ::3, :3].reshape(-1, 3).round(2).tolist()}
    assert len(colors) > 20, "an empty canvas"


def printed(capsys: pytest.CaptureFixture[str], *texts: str) -> None:
    """Checks that a script printed each text, whatever the line breaks."""
    said = " ".join(capsys.readouterr().out.split())
    for text in texts:
        assert text in said, said


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the script in a separate process with a terminal 200 columns wide."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def refused(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Runs the script in this process, which must end it with exit status 2; returns what it says."""
    monkeypatch.setattr(sys, "argv", [name, *options])
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def started(module: str, *words: str, ranks: int = 1, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a module of this checkout in a process of its own, or in several of torchrun."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    command = [sys.executable, *start, "-m", module, *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
