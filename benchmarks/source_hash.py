"""The hash that ties a results file to the sources it measured: ``python -m benchmarks.source_hash``."""

from __future__ import annotations

import hashlib
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "lowerings", "mhc_inductor/ops")


def source_hash(root: pathlib.Path = ROOT) -> str:
    """Returns the SHA-256, in hex, of the paths and contents of the Python files under ``FOLDERS``, in path order."""
    digest = hashlib.sha256()
    files = {f.relative_to(root).as_posix(): f for folder in FOLDERS for f in (root / folder).rglob("*.py")}
    for name in sorted(files):
        content = files[name].read_bytes()
        # Hash the length too, so that no byte can move between a file's content and the next file's name.
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


if __name__ == "__main__":
    print(source_hash())
