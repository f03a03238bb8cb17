# SPDX-License-Identifier: Apache-2.0
"""Tables of measured configurations: where they are, which one this process reads, and how one is written.

A table belongs to one kind of GPU, these sources, and these versions of torch and Triton. Its file is in the user's
cache folder, under a name made of them. It is read once, when the first kernel is launched or compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mhc_inductor.fingerprint import PARTS, sources
from mhc_inductor.log import warn_once

VARIABLE = "MHC_INDUCTOR_TUNED"
"""Environment variable: ``0`` or ``off`` for no table, a path for the table in that file."""
OFF = ("0", "off")
Entries = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Found:
    """The table that this process reads: its file and entries; None and empty without one, and why."""

    path: pathlib.Path | None
    entries: Entries
    why: str

    def __str__(self) -> str:
        if self.path is None:
            return f"none: {self.why}"
        return f"{self.path}, {len(self.entries)} configurations that differ from the closed form"


_found: Found | None = None


def found() -> Found:
    """Returns the table that this process reads; looks for it at the first call."""
    global _found
    if _found is None:
        _found = _look()
    return _found


def entries() -> Entries:
    """Returns the entries of the table that this process reads: changed fields by the configuration's key."""
    return (_found or found()).entries


def digest() -> str:
    """Returns a digest of the entries for the keys of compile caches; empty without entries."""
    rows = entries()
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest() if rows else ""


PARTS.append(digest)


@contextlib.contextmanager
def use(rows: Entries) -> Iterator[None]:
    """Makes this process read these entries inside the context, and no file."""
    global _found
    before, _found = _found, Found(None, rows, "entries given in Python")
    try:
        yield
    finally:
        _found = before


def forget() -> None:
    """Makes the next call look for a table again."""
    global _found
    _found = None


# --- files --------------------------------------------------------------------------------------------------


def folder() -> pathlib.Path:
    """Returns the folder of tables: ``mhc_inductor/tuned`` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "mhc_inductor" / "tuned"


def header(device: int = 0) -> dict[str, Any]:
    """Returns what a table is of: the GPU with this index, sources and versions."""
    p = torch.cuda.get_device_properties(device)
    kind = {"device": p.name, "capability": f"{p.major}.{p.minor}", "multiprocessors": p.multi_processor_count}
    return kind | {"torch": torch.__version__, "sources": sources()}  # Triton's version is in the sources' digest


def default_path(of: Mapping[str, Any]) -> pathlib.Path:
    """Returns the file of the table with this header."""
    name = re.sub(r"\W+", "-", str(of["device"])).strip("-").lower()
    mark = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:12]
    return folder() / f"{name}-{mark}.json"


def read(path: pathlib.Path) -> dict[str, Any]:
    """Returns a table's file: "header", "entries", and "measured" by configuration.

    Raises:
        ValueError: The file is no such table.
        OSError: It cannot be read.
    """
    try:
        content = json.loads(path.read_text())
        if not all(isinstance(content[part], dict) for part in ("header", "entries", "measured")):
            raise TypeError("a part is no dictionary")
        if not all(isinstance(entry, dict) for entry in content["entries"].values()):
            raise TypeError("an entry is no dictionary")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a table of tuned configurations: {error!r}") from error
    return dict(content)


def write(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Writes a table's file in one step: a process that reads it meanwhile, or is cut, sees a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        made.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)


# --- which one ----------------------------------------------------------------------------------------------


def _look() -> Found:
    asked = os.environ.get(VARIABLE, "")
    if asked.lower() in OFF:
        return Found(None, {}, f"switched off by {VARIABLE}={asked}")
    # Without files, no device is asked for its name: this may run where none can be.
    if not asked and not (folder().is_dir() and any(folder().glob("*.json"))):
        return Found(None, {}, "this machine has none; python -m mhc_inductor tune measures one")
    if not torch.cuda.is_available():
        return Found(None, {}, "no GPU is visible")
    headers = [header(i) for i in range(torch.cuda.device_count())]
    if any(h != headers[0] for h in headers):
        return Found(None, {}, "the visible GPUs are of different kinds; show one kind with CUDA_VISIBLE_DEVICES")
    path = pathlib.Path(asked) if asked else default_path(headers[0])
    if not asked and not path.exists():
        return Found(None, {}, "there is none for this GPU, these sources and versions: python -m mhc_inductor tune")
    return _opened(path, headers[0])


def _opened(path: pathlib.Path, of: Mapping[str, Any]) -> Found:
    """Returns the table in a file; one that cannot be used is warned of once, and not used."""
    try:
        content = read(path)
    except (OSError, ValueError) as error:
        why = str(error)
    else:
        differs = [
            f"{k} {content['header'].get(k)!r}, here {v!r}" for k, v in of.items() if content["header"].get(k) != v
        ]
        if not differs:
            return Found(path, content["entries"], "")
        why = f"{path} is of {'; '.join(differs)}"
    warn_once(f"tuned {path}", f"tuned configurations are not used: {why}")
    return Found(None, {}, why)
