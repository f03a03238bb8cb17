# SPDX-License-Identifier: Apache-2.0
"""The kernel of the Hugging Face hub: built, loaded from disk by ``kernels``, and put into plain layers of a model."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import mhc_inductor
from mhc_inductor.integrations import hub
from tests.formulas import laws


def _library() -> Any:
    """Imports the library ``kernels``, not this checkout's folder of that name."""
    try:
        place = str(importlib.metadata.distribution("kernels").locate_file(""))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the library kernels is not installed", allow_module_level=True)
    sys.path.insert(0, place)
    try:
        return importlib.import_module("kernels")
    finally:
        sys.path.remove(place)


kernels = _library()
TRAINING, COMPILED = kernels.Mode.TRAINING, kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
NAMES = ("HyperConnection", "SelectionAttention", "SparseIndexer")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    command = [sys.executable, "-m", "mhc_inductor.integrations.hub", str(folder), "--version", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "torch-cuda" in done.stdout, done.stderr
    return folder


# ---- a model in plain PyTorch, whose layers have the attributes that the kernel's layers read


@kernels.use_kernel_forward_from_hub("HyperConnection")
class PlainSite(nn.Module):
    """A hyper-connection in two streams of width 16."""

    def __init__(self, sublayer: nn.Module) -> None:
        super().__init__()
        made = mhc_inductor.nn.HyperConnection(16, 2, sublayer, sinkhorn_iters=2)
        for name, value in vars(made).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self.gamma, self.sublayer = None, sublayer
        for name, parameter in made.named_parameters(recurse=False):
            setattr(self, name, nn.Parameter(torch.randn_like(parameter) * 0.3))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        p = {"phi": self.phi, "alpha": self.alpha, "bias": self.bias}
        h_in, h_post, mixing = laws.pre(x, p)
        return laws.post(x, self.sublayer(h_in, *args, **kwargs), h_post, mixing)


@kernels.use_kernel_forward_from_hub("SparseIndexer")
class PlainIndexer(nn.Module):
    """The keys of the largest scores before each query."""

    topk, scale, causal = 3, None, True

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        w: Tensor,
        limit: Tensor | None = None,
        mask: Tensor | None = None,
        segments_q: Tensor | None = None,
        segments_k: Tensor | None = None,
    ) -> Tensor:
        scores = ((q.transpose(1, 2) @ k[:, None].transpose(-1, -2)) * q.shape[-1] ** -0.5).relu()
        scores = (scores * w.transpose(1, 2)[..., None]).sum(1)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        values, picks = scores.masked_fill(hidden, -torch.inf).topk(self.topk)
        return picks.masked_fill(values == -torch.inf, -1)[:, :, None]


@kernels.use_kernel_forward_from_hub("SelectionAttention")
class PlainAttention(nn.Module):
    """Attention of two heads in one group to listed keys, with a sink."""

    groups, heads, scale, block_size = 1, 2, None, None

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.randn(1, 2))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        *,
        indices: Tensor | None = None,
        segments_q: Tensor | None = None,
        segments_k: Tensor | None = None,
        v_width: int | None = None,
    ) -> Tensor:
        assert indices is not None
        count = k.shape[2]
        listed = indices[:, :, 0].where(indices[:, :, 0] >= 0, count)
        seen = torch.zeros(*listed.shape[:2], count + 1, dtype=torch.bool).scatter(-1, listed, True)[..., :count]
        scores = torch.einsum("bsghd,bgtd->bsght", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~seen[:, :, None, None], -torch.inf)
        sink = self.sink[None, None, :, :, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return torch.einsum("bsght,bgtd->bsghd", weights, v)


class Sublayer(nn.Module):
    """Sparse attention over the keys that an indexer chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 64), nn.Linear(32, 16)
        self.index, self.attend = PlainIndexer(), PlainAttention()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([32, 16, 16], -1)
        # Positive products: scores of exactly 0 would tie, and either key could be chosen.
        picks = self.index(q.detach().abs().unflatten(-1, (2, 16)), k.detach().abs(), x.detach()[..., :2])
        o = self.attend(q.unflatten(-1, (1, 2, 16)), k[:, None], v[:, None], indices=picks)
        return self.out(o.flatten(2))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(PlainSite(Sublayer()), PlainSite(nn.Linear(16, 16)))


def _mapping(folder: pathlib.Path) -> dict[str, Any]:
    repos = {name: kernels.LocalLayerRepository(folder, layer_name=name) for name in NAMES}
    return {name: {"cpu": {mode: repo for mode in (TRAINING, COMPILED)}} for name, repo in repos.items()}


def _kernelized(folder: pathlib.Path, mode: Any) -> nn.Module:
    with kernels.use_kernel_mapping(_mapping(folder), inherit_mapping=False):
        model: nn.Module = kernels.kernelize(_model(), mode=mode, device="cpu", use_fallback=False)
    return model


def _run(model: nn.Module, call: Any, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = call(x)
    y.square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
    return {"y": y.detach(), **{name: g for name, g in found.items() if g is not None}}


@pytest.mark.parametrize("mode", [TRAINING, COMPILED], ids=["training", "training and torch.compile"])
def test_plain_layers_with_the_kernels_layers_have_the_same_results(built: pathlib.Path, mode: Any) -> None:
    plain, model = _model(), _kernelized(built, mode)
    x = torch.randn(2, 8, 2, 16)
    seen = {f.__func__.__module__ for m in model.modules() if (f := vars(m).get("forward")) is not None}
    (module,) = {name.partition(".")[0] for name in seen}
    assert module.startswith("_mhc_inductor_cpu_") and module != "mhc_inductor"
    torch._dynamo.reset()
    ops, call = list[str](), model

    def watched(gm: torch.fx.GraphModule, _: Any) -> Any:
        ops.extend(str(n.target) for n in gm.graph.nodes if str(n.target).startswith(module))
        return make_boxed_func(gm.forward)

    if mode is COMPILED:
        call = torch.compile(model, backend=aot_autograd(fw_compiler=watched), fullgraph=True)
    got, want = _run(model, call, x), _run(plain, plain, x)
    assert got.keys() == want.keys() and len(want) >= 13
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5, msg=name)
    if mode is COMPILED:
        short = {op.split(".")[1] for op in ops}
        assert {"mhc_pre", "mhc_post", "index_topk", "mhc_pre_backward", "mhc_post_backward"} <= short, short
        assert {"selection_list_attention", "selection_list_attention_backward"} <= short, short


def test_torch_compile_with_inductor(built: pathlib.Path) -> None:
    """A site around a linear layer: Inductor calls the kernel's ops."""
    plain, model = _model()[1], _kernelized(built, COMPILED)[1]
    x = torch.randn(4, 2, 16)
    torch._dynamo.reset()
    got, want = _run(model, torch.compile(model, fullgraph=True), x), _run(plain, plain, x)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5, msg=name)


# ---- what the hub asks of a kernel


def test_the_hub_reads_the_configuration_and_the_metadata(built: pathlib.Path) -> None:
    rust = pytest.importorskip("kernels._rust")
    assert [str(b) for b in rust.Build.open(built).general.backends] == ["cpu", "cuda"]
    ids = set()
    for backend in ("cpu", "cuda"):
        variant = built / "build" / f"torch-{backend}"
        read = rust.Metadata.read_from_file(variant / "metadata.json")
        assert (str(read.name), read.version, read.license, read.python_depends) == (hub.NAME, 3, "apache-2.0", [])
        assert read.digest is not None
        (variant / "metadata.json").rename(built / f"{backend}.json")  # the digest is of all other files
        try:
            read.digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant))
        finally:
            (built / f"{backend}.json").rename(variant / "metadata.json")
        ids.add(read.id)
    assert len(ids) == 2 and all(i.isidentifier() for i in ids)
    sources = built / "torch-ext" / "mhc_inductor"
    assert (sources / "layers.py").exists() and not (sources / "_ops.py").exists(), "the builder writes its own"


def test_imports_are_relative_or_of_torch_and_the_standard_library(built: pathlib.Path) -> None:
    found = set()
    for path in (built / "build" / "torch-cpu").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found |= {a.name.partition(".")[0] for a in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").partition(".")[0])
    assert found - {*sys.stdlib_module_names} == {"torch", "triton", "sympy", "typing_extensions"}


def test_a_kernel_needs_no_mhc_inductor_and_two_builds_are_apart(built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Another build has other sources, so another id. In a process of its own nothing else is imported."""
    other = tmp_path / "other"
    hub.build(other, ["cpu"])
    variant = other / "build" / "torch-cpu"
    old = json.loads((variant / "metadata.json").read_text())["id"]
    for name in ("metadata.json", "_ops.py"):
        (variant / name).write_text((variant / name).read_text().replace(old, f"{old}_2"))
    program = f"""
import importlib, pathlib, pkgutil, sys, torch
from kernels import get_local_kernel
a, b = (get_local_kernel(pathlib.Path(p)) for p in ({str(built)!r}, {str(other)!r}))
assert a.__name__ != b.__name__ and "mhc_inductor" not in sys.modules
x, phi, alpha, bias = torch.randn(3, 2, 16), torch.randn(8, 32), torch.ones(3), torch.zeros(8)
modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(a.__path__, a.__name__ + ".")]
assert len(modules) > 100 and "triton" in sys.modules and "mhc_inductor" not in sys.modules
one, two = (k.mhc_pre(x, phi, alpha, bias)[0] for k in (a, b))
assert torch.equal(one, two)
assert not any(n.startswith("mhc_inductor::") for n in torch._C._dispatch_get_all_op_names())
print("done", sum(n.startswith("_mhc_inductor_cpu_") for n in torch._C._dispatch_get_all_op_names()))
"""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-2000:]


def test_layers_with_other_forwards_are_refused(built: pathlib.Path) -> None:
    @kernels.use_kernel_forward_from_hub("SparseIndexer")
    class Other(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return q

    with kernels.use_kernel_mapping(_mapping(built), inherit_mapping=False):
        kernels.layer.layer._CACHED_LAYER.clear()
        with pytest.raises(TypeError, match="different number of arguments"):
            kernels.kernelize(nn.Sequential(Other()), mode=TRAINING, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"backends": ["tpu"]}, ValueError, r"backends must be one or more of cpu, cuda, rocm, got \['tpu'\]"),
        ({"backends": []}, ValueError, "got none"),
        ({"version": -1}, ValueError, "version must be at least 0, got -1"),
        ({"version": "1"}, TypeError, "version must be an int, got str"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], said: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(error, match=said):
        hub.build(tmp_path / "x", **arguments)
    assert not (tmp_path / "x").exists()


def test_files_of_others_are_not_mixed_in(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(ValueError, match="folder must be empty or not exist"):
        hub.build(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "mhc_inductor.integrations.hub", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 2 and "folder must be empty" in done.stderr
