# SPDX-License-Identifier: Apache-2.0
"""The package as users install it: wheel, editable install, bare checkout, each in a new environment."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Folders of the checkout that are installed inside the package.
INSIDE = ("kernels", "lowerings")
FOLDERS = {"mhc_inductor": "mhc_inductor", **{f: f"mhc_inductor/{f}" for f in INSIDE}}
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "results")

pytestmark = pytest.mark.xdist_group("wheel")

# Prints where everything was imported from, and how far compiled is from eager.
PROGRAM = """
import json, sys
import torch

backends = torch._dynamo.list_backends()
early = "mhc_inductor" in sys.modules
import mhc_inductor, mhc_inductor.kernels.launch, mhc_inductor.lowerings.mhc
from mhc_inductor.nn import HyperConnection

torch.manual_seed(0)
model = HyperConnection(dim=48, n=4, sublayer=torch.nn.Linear(48, 48), gamma=True)
torch.nn.init.normal_(model.phi, std=0.1)
torch.nn.init.normal_(model.alpha)
x = torch.randn(3, 5, 4, 48)

def step(call):
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    out = call(leaf)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())]

eager = step(model)
torch._dynamo.reset()
compiled = step(torch.compile(model, backend="mhc_inductor", fullgraph=True))
print(json.dumps({
    "files": [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "mhc_inductor"],
    "version": mhc_inductor.__version__,
    "backends": backends,
    "early": early,
    "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    "error": max(float((a - b).norm() / b.norm()) for a, b in zip(compiled, eager)),
    "smallest": min(float(a.norm()) for a in eager),
}))
"""


def run(*command: str | pathlib.Path, cwd: pathlib.Path, **environment: str) -> str:
    """Runs a command with ``environment`` but without this process's Python settings; returns its output."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "VIRTUAL_ENV"))}
    env |= environment
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def copy_of_the_tree(to: pathlib.Path) -> pathlib.Path:
    """Copies the checkout without files left by tools, so that the tests do not write to it."""
    shutil.copytree(ROOT, to, ignore=LEFT_OUT, symlinks=True)
    return to


def new_environment(at: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Creates an environment with this one's packages except this package; returns its Python and site-packages."""
    run(sys.executable, "-m", "venv", "--without-pip", at, cwd=at.parent)
    python = at / "bin" / "python"
    site = pathlib.Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=at).strip())
    # .pth files in these folders, such as an editable install's, are not processed.
    outer = [p for p in sys.path if pathlib.Path(p).name in ("site-packages", "dist-packages")]
    (site / "outer.pth").write_text("\n".join(outer) + "\n")
    return python, site


def install(python: pathlib.Path, *what: str | pathlib.Path, cwd: pathlib.Path) -> None:
    # --ignore-installed: pip sees the outer environment's copy, though imports do not.
    flags = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", "-q")
    run(sys.executable, "-m", "pip", "--python", python, "install", *flags, *what, cwd=cwd)


def check(python: pathlib.Path, under: pathlib.Path, tmp_path: pathlib.Path, **environment: str) -> dict:
    """Runs PROGRAM in an empty folder; asserts that modules come from ``under`` and that compiled agrees with eager."""
    empty = tmp_path / "empty"
    empty.mkdir()
    # Graphs are compiled anew. C++ headers and code are shared with other processes of this machine.
    environment |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    out = run(python, "-c", PROGRAM, cwd=empty, **environment)
    report = json.loads(out.splitlines()[-1])
    assert len(report["files"]) > 8
    assert [f for f in report["files"] if not pathlib.Path(f).is_relative_to(under)] == []
    assert report["graphs"] == 1
    assert report["smallest"] > 0
    assert report["error"] < 2e-6
    assert list(empty.iterdir()) == []
    return report


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """Builds the sdist from the tree and the wheel from the sdist; returns the wheel and the sdist."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("built")
    tree = copy_of_the_tree(folder / "tree")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", tree, cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = wheel.namelist()
        top = {n.split("/")[0] for n in names}
        (info,) = top - {"mhc_inductor"}
        assert info.startswith("mhc_inductor-") and info.endswith(".dist-info")
        assert "[torch_dynamo_backends]\nmhc_inductor = mhc_inductor.backend:mhc_inductor" in wheel.read(
            f"{info}/entry_points.txt"
        ).decode().replace("\r", "")
        metadata = wheel.read(f"{info}/METADATA").decode()
        licence = wheel.read(f"{info}/licenses/LICENSE").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    assert [line for line in required if "extra ==" not in line] == ["Requires-Dist: torch>=2.11"]
    assert "Apache License" in licence and "END OF TERMS AND CONDITIONS" in licence
    expected = {
        f"{to}/{f.relative_to(ROOT / folder).as_posix()}"
        for folder, to in FOLDERS.items()
        for f in (ROOT / folder).rglob("*.py")
    }
    assert {n for n in names if n.startswith("mhc_inductor/")} == expected | {"mhc_inductor/py.typed"}


def test_the_sdist_holds_the_package_and_nothing_else(built):
    # The wheel of these tests is built from it.
    with tarfile.open(built[1]) as sdist:
        tops = {pathlib.PurePath(n).parts[1] for n in sdist.getnames() if len(pathlib.PurePath(n).parts) > 1}
    metadata = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "mhc_inductor.egg-info"}
    assert tops == {*FOLDERS, *metadata, "pyproject.toml", "setup.cfg"}


def test_wheel(built, tmp_path):
    python, site = new_environment(tmp_path / "env")
    before = set(site.iterdir())
    install(python, built[0], cwd=tmp_path)
    added = set(site.iterdir()) - before
    assert sorted(p.name.split("-")[0] for p in added) == ["mhc_inductor", "mhc_inductor"]
    report = check(python, site / "mhc_inductor", tmp_path)
    assert "mhc_inductor" in report["backends"]
    assert not report["early"], "list_backends() must find the entry point without importing the package"
    assert built[0].name.startswith(f"mhc_inductor-{report['version']}-")


@pytest.mark.parametrize("mode", ["default", "strict"])
def test_editable(mode, tmp_path):
    tree = copy_of_the_tree(tmp_path / "tree")
    python, _ = new_environment(tmp_path / "env")
    strict = () if mode == "default" else ("--config-settings", "editable_mode=strict")
    install(python, *strict, "-e", tree, cwd=tmp_path)
    # In strict mode these are links in the tree's build/.
    report = check(python, tree, tmp_path)
    assert "mhc_inductor" in report["backends"]


def test_bare_checkout(tmp_path):
    tree = copy_of_the_tree(tmp_path / "tree")
    python, _ = new_environment(tmp_path / "env")
    check(python, tree, tmp_path, PYTHONPATH=str(tree))


def test_nothing_is_imported_without_an_install(tmp_path):
    # The tests above require that their environments do not see this checkout.
    python, _ = new_environment(tmp_path / "env")
    out = run(python, "-c", "import importlib.util as u, torch; print(u.find_spec('mhc_inductor'))", cwd=tmp_path)
    assert out.strip() == "None"


def test_type_checkers_see_every_module():
    # stubs/ mirrors the installed package for mypy.
    package = {p.name for p in (ROOT / "mhc_inductor").iterdir() if p.name != "__pycache__"}
    links = {p.name: p for p in (ROOT / "stubs" / "mhc_inductor").iterdir()}
    assert set(links) == package | set(INSIDE)
    for name, link in links.items():
        assert link.resolve() == (ROOT / name if name in INSIDE else ROOT / "mhc_inductor" / name)
