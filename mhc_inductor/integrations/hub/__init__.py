# SPDX-License-Identifier: Apache-2.0
"""Builds this package as a kernel of the Hugging Face hub: ``python -m mhc_inductor.integrations.hub FOLDER``.

The hub imports a kernel under a name of its own, allows relative imports, the standard library and torch, and no
dependency that is not on its list. So the build copies what the layers need, makes its imports relative, and takes the
namespace of the ops from the kernel's ``_ops.py``, so that two builds and the installed package can be in one process.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

import mhc_inductor

__all__ = ["BACKENDS", "NAME", "build"]

NAME = "mhc-inductor"
BACKENDS = ("cpu", "cuda", "rocm")
"""Backends for which the kernel can be built: the files are the same, their ids are not."""
_FOLDERS = ("api", "compat", "kernels", "nn", "ops", "reference")
_MOVED = {"entry.py": "__init__.py", "layers.py": "layers.py"}
_LICENSE = "# SPDX-License-Identifier: Apache-2.0\n"
_REPLACED = {
    "tuning/__init__.py": '"""In a kernel configurations are the closed forms."""\n',
    "tuning/table.py": '"""In a kernel there is no table of the device."""\n\n\n'
    "def entries() -> dict[str, dict[str, object]]:\n    return {}\n",
}
_ALLOWED = {*sys.stdlib_module_names, "torch", "triton", "sympy", "typing_extensions"}
"""What a kernel may import, by the hub's rules: torch, and what comes with it."""
_OWN_OPS = re.compile(r"(?<!`)\btorch\.ops\.mhc_inductor\b|\"mhc_inductor\"(?=, \"FRAGMENT\")")


def build(
    folder: str | pathlib.Path, backends: Sequence[str] = ("cpu", "cuda"), version: int = 0
) -> dict[str, pathlib.Path]:
    """Writes a kernel's repository: ``build.toml`` and ``torch-ext/`` for the hub's builder, ``build/`` to load.

    Args:
        folder: A folder that does not exist or is empty.
        backends: Of :data:`BACKENDS`; a variant ``build/torch-BACKEND`` is written for each.
        version: The kernel's version on the hub; 0 stands for one whose functions may still change.

    Returns:
        The folder of each backend's variant. Its ``metadata.json`` has an id that is made of the sources' hash, and the
        ops are in ``torch.ops.<id>``.

    Raises:
        ValueError: There are other files in the folder, a backend is unknown, none is given, or version is negative.
        TypeError: version is not an int.
        RuntimeError: A source imports what the hub does not allow: this package is broken.

    Source: the hub's "Kernel requirements" (huggingface.co/docs/kernels), and ``kernels`` 0.17.2.
    """
    folder = pathlib.Path(folder)
    unknown = [b for b in backends if b not in BACKENDS]
    if unknown or not backends:
        raise ValueError(f"build: backends must be one or more of {', '.join(BACKENDS)}, got {unknown or 'none'}")
    if not isinstance(version, int) or isinstance(version, bool):
        raise TypeError(f"build: version must be an int, got {type(version).__name__}")
    if version < 0:
        raise ValueError(f"build: version must be at least 0, got {version}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"build: folder must be empty or not exist, got {folder}")
    files = dict(_sources())
    digest = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()[:8]
    _write(folder, {"build.toml": _build_toml(backends, version), "flake.nix": _FLAKE})
    _write(folder / "torch-ext" / NAME.replace("-", "_"), files)
    made = {b: folder / "build" / f"torch-{b}" for b in backends}
    for backend, variant in made.items():
        kernel_id = f"_{NAME.replace('-', '_')}_{backend}_{digest}"
        whole = {**files, "_ops.py": _OPS.format(id=kernel_id)}
        _write(variant, whole)
        about = {"name": NAME, "id": kernel_id, "version": version, "license": "apache-2.0", "python-depends": []}
        hashes = {
            name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for name, text in whole.items()
        }
        about |= {"backend": {"type": backend}, "digest": {"algorithm": "sha256", "files": hashes}}
        _write(variant, {"metadata.json": json.dumps(about, indent=2) + "\n"})
    return made


def _sources() -> Iterator[tuple[str, str]]:
    """Yields name and text of each file of the kernel but ``_ops.py``."""
    package, here = pathlib.Path(next(iter(mhc_inductor.__path__))), pathlib.Path(__file__).parent
    kernels = pathlib.Path(next(iter(sys.modules["mhc_inductor.kernels"].__path__)))
    paths = {name: package / name for name in ("log.py", "scope.py")}
    for part in _FOLDERS:
        top = kernels if part == "kernels" else package / part
        paths |= {f"{part}/{p.relative_to(top).as_posix()}": p for p in sorted(top.rglob("*.py"))}
    paths |= {name: here / source for source, name in _MOVED.items()}
    for name, path in paths.items():
        yield name, _relative(name, path.read_text())
    for name, text in _REPLACED.items():
        yield name, _LICENSE + text


def _relative(name: str, text: str) -> str:
    """Returns a source with relative imports and with ops of the kernel's own namespace."""
    dots = "." * (name.count("/") + 1)
    text = text.replace("from mhc_inductor.integrations.hub import layers", "from mhc_inductor import layers")
    text = re.sub(r"(?m)^(\s*from )mhc_inductor(?:\.([\w.]+))?(?= import )", rf"\1{dots}\2", text)
    made = _OWN_OPS.sub(lambda found: "hub_ops.name" if found[0].startswith('"') else "hub_ops", text)
    made = made.replace('f"mhc_inductor::', 'f"{hub_ops.name}::')
    if made != text:
        after = "from __future__ import annotations\n"
        made = made.replace(after, f"{after}\nfrom {dots}_ops import ops as hub_ops\n", 1)
    _check(name, made)
    return made


def _check(name: str, text: str) -> None:
    """Raises RuntimeError for an import that the hub does not allow, or an op outside of the kernel's namespace."""
    for node in ast.walk(ast.parse(text)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        wrong = [n for n in names if n.partition(".")[0] not in _ALLOWED]
        if wrong or (isinstance(node, ast.Attribute) and node.attr == "mhc_inductor"):
            raise RuntimeError(f"build: {name}, line {getattr(node, 'lineno', 0)}: {wrong or 'torch.ops.mhc_inductor'}")


def _write(folder: pathlib.Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _build_toml(backends: Sequence[str], version: int) -> str:
    listed = ", ".join(f'"{b}"' for b in backends)
    return (
        f'[general]\nname = "{NAME}"\nedition = 5\nversion = {version}\nlicense = "apache-2.0"\n'
        f"backends = [{listed}]\n\n[torch-noarch]\n"
    )


_OPS = (
    _LICENSE
    + '''"""The namespace of this build's ops."""

import torch

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str) -> str:
    """Returns the op's name with the namespace in front."""
    return f"{id}::{{op_name}}"
'''
)
_FLAKE = """{
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs { inherit self; path = ./.; };
}
"""
