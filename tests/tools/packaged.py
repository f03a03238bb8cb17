# SPDX-License-Identifier: Apache-2.0
"""A model for packages (AOTInductor), and what a folder with its package needs to be run by Python and by C++."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import cpp_extension

import mhc_inductor
from tests.formulas.reference_models_mhc import deepseek, parameters

GROUPS, HEADS, STREAMS, INDEX_HEADS = 2, 2, 4, 16
CASES = [(2, 6), (3, 13)]
"""Batch and length of inputs. Export uses the second: attention to 5 of 6 keys would stay dense on a GPU."""


class Everything(nn.Module):
    """A module of each operator, a plain mHC site and a plain masked attention.

    Args:
        width: columns of a stream.
        head: columns of a query.
        picks: also return chosen keys; on a GPU ``index_topk`` has no kernels that run without Python.
        recurrent: has an E79 layer.
    """

    def __init__(self, width: int, head: int, picks: bool, recurrent: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.picks = head, picks
        self.site = mhc_inductor.nn.HyperConnection(width, STREAMS, nn.Linear(width, width), sinkhorn_iters=2)
        self.recurrence = mhc_inductor.nn.E79Layer(width, head, conv=2) if recurrent else None
        self.qkv = nn.Linear(width, GROUPS * (HEADS + 2) * head)
        self.attention = mhc_inductor.nn.SelectionAttention(GROUPS, HEADS)
        made = parameters(n=STREAMS, width=width)
        self.plain = nn.ParameterDict({name: nn.Parameter(t.detach()) for name, t in made.items()})

    def forward(self, x: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        """Takes x [B, S, n, D] and starts [B, S, G, 1]: each query sees five keys. Returns two or three outputs."""
        x = self.site(x)
        h = x.mean(-2)
        y = h if self.recurrence is None else self.recurrence(h)[0]
        B, S = h.shape[:2]
        q, k, v = self.qkv(y).split([GROUPS * HEADS * self.head, GROUPS * self.head, GROUPS * self.head], -1)
        q = q.view(B, S, GROUPS, HEADS, self.head)
        k, v = (t.view(B, S, GROUPS, self.head).transpose(1, 2) for t in (k, v))
        ranges = torch.stack([starts, starts + 5], -1)
        o = self.attention(q, k, v, ranges)
        at = torch.arange(S, device=x.device)
        chosen = ((at >= starts) & (at < starts + 5)).transpose(1, 2)
        scores = torch.einsum("bsghd,bgtd->bghst", q, k) * self.head**-0.5
        weights = scores.masked_fill(~chosen[:, :, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        plain = torch.einsum("bghst,bgtd->bsghd", weights, v)
        outputs = deepseek(x, self.plain), o + plain
        if not self.picks:
            return outputs
        return *outputs, mhc_inductor.index_topk(q[:, :, 0], k[:, 0], y[..., :HEADS], 3)

    @property
    def ops(self) -> dict[str, int]:
        """Counts the ops of the routed program."""
        return {"mhc_pre": 2, "mhc_post": 2, "selection_attention": 2}


class Listed(nn.Module):
    """Index scores, and attention to lists of keys: to those of the largest scores, or to four from a start on.

    Args:
        width: columns of a stream.
        head: columns of a query.
        picks: choose the keys by ``index_topk``.
    """

    def __init__(self, width: int, head: int, picks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.picks = head, picks
        self.columns = [GROUPS * HEADS * head, GROUPS * head, GROUPS * head, INDEX_HEADS * head, head, INDEX_HEADS]
        self.made = nn.Linear(width, sum(self.columns))

    def forward(self, x: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        """Takes the inputs of :class:`Everything`. Returns the attention, the scores, and the keys if it chose them."""
        q, k, v, index_q, index_k, w = self.made(x.mean(-2)).split(self.columns, -1)
        B, S = x.shape[:2]
        q = q.view(B, S, GROUPS, HEADS, self.head)
        k, v = (t.view(B, S, GROUPS, self.head).transpose(1, 2) for t in (k, v))
        index_q = index_q.view(B, S, INDEX_HEADS, self.head)
        indices = starts + torch.arange(4, device=x.device)
        chosen = ()
        if self.picks:
            chosen = (mhc_inductor.index_topk(index_q, index_k, w, 3),)
            indices = chosen[0].unsqueeze(2).expand(-1, -1, GROUPS, -1)
        o = mhc_inductor.selection_attention(q, k, v, indices=indices)
        return o, mhc_inductor.index_scores(index_q, index_k, w), *chosen

    @property
    def ops(self) -> dict[str, int]:
        """Counts the ops of the routed program."""
        return {"selection_list_attention": 1, "index_scores": 1, **({"index_topk": 1} if self.picks else {})}


class Together(nn.Module):
    """Models in one package: each takes a C++ compile."""

    def __init__(self, *models: Everything | Listed) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        return tuple(out for model in self.models for out in model(x, starts))

    @property
    def ops(self) -> dict[str, int]:
        """Counts the ops of the routed program; no two models have one."""
        return {op: count for model in self.models for op, count in model.ops.items()}


def inputs(B: int, S: int, width: int, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(B * S + seed)
    starts = torch.randint(-3, S, (B, S, GROUPS, 1), generator=g)
    return torch.randn(B, S, STREAMS, width, generator=g).to(device), starts.to(device)


def exported(model: nn.Module, width: int, device: str = "cpu", dynamic: bool = True) -> torch.export.ExportedProgram:
    """Returns the routed program of a model that takes :func:`inputs`, with dynamic batch and length if asked."""
    sizes = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=3, max=512)}
    shapes = (sizes, sizes) if dynamic else None
    return mhc_inductor.route_exported(
        torch.export.export(model, inputs(*CASES[1], width, device), dynamic_shapes=shapes)
    )


def make(
    folder: pathlib.Path, model: Everything | Listed | Together, width: int, device: str = "cpu", dynamic: bool = True
) -> None:
    """Writes the package ``model.pt2`` into a folder, and inputs and expected outputs of two cases.

    They have the sizes of ``CASES``, or without ``dynamic`` both that of the second.
    """
    model = model.to(device)
    # A header that is compiled first pays from the second package on.
    options = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
    with torch._inductor.config.patch(options):
        routed = exported(model, width, device, dynamic)
        code = routed.graph_module.code
        assert {op: code.count(f"mhc_inductor.{op}.default") for op in model.ops} == model.ops
        torch._inductor.aoti_compile_and_package(routed, package_path=str(folder / "model.pt2"))
    for i, sizes in enumerate(CASES if dynamic else CASES[1:] * 2):
        args = inputs(*sizes, width, device, seed=i)
        with torch.no_grad():
            torch.save((args, model(*args)), folder / f"case{i}.pt")


LOAD = """
import sys, torch
tolerance = float(sys.argv[1])
run = torch._inductor.aoti_load_package("model.pt2")
for name in ("case0.pt", "case1.pt"):
    args, want = torch.load(name)
    for a, b in zip(run(*args), want, strict=True):
        assert a.dtype == b.dtype and torch.allclose(a, b, rtol=tolerance, atol=tolerance), (name, (a - b).abs().max())
assert "mhc_inductor" not in sys.modules
print("equal")
"""


def run_in_python(folder: pathlib.Path, tolerance: float = 1e-5) -> None:
    """Runs the package in a process that does not import this package, and compares all cases."""
    command = [sys.executable, "-c", LOAD, str(tolerance)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


# Only what is needed of libtorch: its large headers would take a minute to compile.
PROGRAM = """
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <cstdio>
#include <fstream>

static at::Tensor read(const std::string& name, at::IntArrayRef sizes, at::ScalarType type, const char* device) {
  at::Tensor t = at::empty(sizes, type);
  std::ifstream(name, std::ios::binary).read(static_cast<char*>(t.data_ptr()), t.nbytes());
  return t.to(at::Device(device));
}

int main(int, char** argv) {
  torch::inductor::AOTIModelPackageLoader loader("model.pt2");
  std::vector<at::Tensor> inputs{
      read("x.bin", {3, 13, 4, std::atol(argv[2])}, at::kFloat, argv[1]),
      read("starts.bin", {3, 13, 2, 1}, at::kLong, argv[1])};
  std::vector<at::Tensor> out = loader.run(inputs);
  for (size_t i = 0; i < out.size(); ++i) {
    at::Tensor t = out[i].cpu().contiguous();
    std::ofstream("out" + std::to_string(i) + ".bin", std::ios::binary)
        .write(static_cast<const char*>(t.data_ptr()), t.nbytes());
  }
  std::printf("%zu outputs\\n", out.size());
}
"""


def run_in_cpp(folder: pathlib.Path, device: str = "cpu", tolerance: float = 1e-5) -> None:
    """Builds and runs a C++ program that runs the package, without Python, and compares the last case."""
    args, want = torch.load(folder / "case1.pt")
    for name, t in zip(("x.bin", "starts.bin"), args, strict=True):
        (folder / name).write_bytes(t.cpu().numpy().tobytes())
    (folder / "main.cpp").write_text(PROGRAM)
    paths = [f"-I{p}" for p in cpp_extension.include_paths(device)]
    libraries = [p for path in cpp_extension.library_paths(device) for p in (f"-L{path}", f"-Wl,-rpath,{path}")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    command = ["g++", "-std=c++20", "-O0", abi, *paths, "main.cpp", "-o", "main", *libraries]
    command += ["-ltorch", "-ltorch_cpu", "-lc10"]
    command += [] if device == "cpu" else ["-Wl,--no-as-needed", "-ltorch_cuda", "-lc10_cuda"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    assert built.returncode == 0, built.stderr[-3000:]
    program = [str(folder / "main"), device, str(args[0].shape[-1])]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == f"{len(want)} outputs", done.stderr[-2000:]
    linked = subprocess.run(["ldd", str(folder / "main")], capture_output=True, text=True).stdout
    assert "libtorch_cpu" in linked and "libpython" not in linked
    for i, t in enumerate(want):
        b = t.cpu()
        got = torch.frombuffer(bytearray((folder / f"out{i}.bin").read_bytes()), dtype=b.dtype).view(b.shape)
        assert torch.allclose(got, b, rtol=tolerance, atol=tolerance), (i, (got - b).abs().max())
