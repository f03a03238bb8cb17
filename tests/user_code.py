# SPDX-License-Identifier: Apache-2.0
"""Types of what users copy: every example and the code of every page, by ``mypy --strict`` and by pyright.

``python -m tests.user_code``, which is a part of ``./dev lint``, prints each error at its line of the page or example.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks import pages

ROOT = pages.ROOT
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
GIVEN = {"README.md": "from tests.tools.given import config, input_ids"}
"""The names that a page takes as given: the statement that imports them, typed."""


def blocks(text: str) -> list[tuple[int, str]]:
    """Returns the blocks of Python code of a page, each with the number of lines before its first line."""
    return [(text[: m.start(1)].count("\n"), m[1]) for m in CODE.finditer(text)]


def module(page: str, text: str) -> str:
    """Returns the code of a page as one module, each line at its number; line 1, the page's title, is what is given."""
    lines = [GIVEN.get(page, ""), *[""] * (text.count("\n") - 1)]
    for before, code in blocks(text):
        lines[before : before + code.count("\n")] = code.splitlines()
    return "\n".join(lines) + "\n"


def sources() -> dict[str, str]:
    """Returns the code of every page that has any, and of every example, by path."""
    found = {p.relative_to(ROOT).as_posix(): p.read_text() for p in pages.pages()}
    modules = {page: module(page, text) for page, text in found.items() if blocks(text)}
    return modules | {f"examples/{p.name}": p.read_text() for p in sorted((ROOT / "examples").glob("*.py"))}


def errors(code: Mapping[str, str]) -> list[str]:
    """Returns what mypy and pyright say of modules, given by the path that each error begins with."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name).resolve()
        # Examples import each other by name; a page's module is named after its whole path.
        files = {p: p.rpartition("/")[2] if p.endswith(".py") else re.sub(r"\W", "_", p) + ".py" for p in code}
        for path, file in files.items():
            (folder / file).write_text(code[path])
        found = [*_mypy(folder, files.values()), *_pyright(folder)]
    paths = {file: path for path, file in files.items()}
    return [f"{paths[pathlib.Path(file).name]}:{rest}" for file, rest in found]


def _run(folder: pathlib.Path, *command: str, **env: str) -> str:
    """Returns what a tool printed. Raises RuntimeError where it did not come to check anything."""
    argv = [sys.executable, "-m", *command]
    done = subprocess.run(argv, cwd=folder, env=os.environ | env, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{command[0]} exited {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def _mypy(folder: pathlib.Path, files: Iterable[str]) -> list[tuple[str, str]]:
    options = [f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={ROOT / '.mypy_cache'}", "--no-error-summary"]
    said = _run(folder, "mypy", *options, *sorted(files), MYPYPATH=f"{ROOT / 'stubs'}:{ROOT}")
    return [(file, f"{rest} (mypy)") for file, _, rest in (line.partition(":") for line in said.splitlines())]


def _pyright(folder: pathlib.Path) -> list[tuple[str, str]]:
    config = {"include": ["."], "extraPaths": [str(ROOT / "stubs"), str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    options = ["--outputjson", "--pythonpath", sys.executable]
    said = json.loads(_run(folder, "pyright", *options, PYRIGHT_PYTHON_IGNORE_WARNINGS="1"))
    if not said["summary"]["filesAnalyzed"]:
        raise RuntimeError("pyright checked no file")
    return [(d["file"], _worded(d)) for d in said["generalDiagnostics"]]


def _worded(found: Mapping[str, Any]) -> str:
    where = found["range"]["start"]["line"] + 1
    return f"{where}: {found['severity']}: {found['message']} [{found.get('rule', 'syntax')}] (pyright)"


def main() -> None:
    code = sources()
    found = errors(code)
    print("\n".join([*found, f"user code: {len(found)} errors in {len(code)} pages and examples"]))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
