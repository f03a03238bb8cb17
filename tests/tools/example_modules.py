# SPDX-License-Identifier: Apache-2.0
"""Imports the scripts of examples/ as modules, or runs them as a user does."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

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


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the script in a separate process with a terminal 200 columns wide."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
