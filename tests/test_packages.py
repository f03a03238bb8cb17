"""A package for a CPU (AOTInductor): loaded without this package, by Python and by C++, at other sizes.

One package holds the modules and routed formulas of all operators, because each takes a C++ compile.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import torch
from reference_models_mhc import deepseek, parameters
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import cpp_extension

import mhc_inductor

GROUPS, HEADS, WIDTH, STREAMS = 2, 2, 16, 4


class Everything(nn.Module):
    """A module of each operator, a plain mHC site and a plain masked attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.site = mhc_inductor.nn.HyperConnection(WIDTH, STREAMS, nn.Linear(WIDTH, WIDTH), sinkhorn_iters=2)
        self.recurrence = mhc_inductor.nn.E79Layer(WIDTH, 8, conv=2)
        self.qkv = nn.Linear(WIDTH, GROUPS * (HEADS + 2) * 8)
        self.attention = mhc_inductor.nn.SelectionAttention(GROUPS, HEADS)
        made = parameters(n=STREAMS, width=WIDTH)
        self.plain = nn.ParameterDict({name: nn.Parameter(t.detach()) for name, t in made.items()})

    def forward(self, x: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Takes x [B, S, n, D] and starts [B, S, G, 1]: each query sees five keys. Returns three outputs."""
        x = self.site(x)
        h = x.mean(-2)
        y, _ = self.recurrence(h)
        B, S = h.shape[:2]
        q, k, v = self.qkv(y).split([GROUPS * HEADS * 8, GROUPS * 8, GROUPS * 8], -1)
        q = q.view(B, S, GROUPS, HEADS, 8)
        k, v = (t.view(B, S, GROUPS, 8).transpose(1, 2) for t in (k, v))
        ranges = torch.stack([starts, starts + 5], -1)
        o = self.attention(q, k, v, ranges)
        at = torch.arange(S, device=x.device)
        chosen = ((at >= starts) & (at < starts + 5)).transpose(1, 2)
        scores = torch.einsum("bsghd,bgtd->bghst", q, k) * 8**-0.5
        weights = scores.masked_fill(~chosen[:, :, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        plain = torch.einsum("bghst,bgtd->bsghd", weights, v)
        picked = mhc_inductor.index_topk(q[:, :, 0], k[:, 0], y[..., :HEADS], 3)
        return deepseek(x, self.plain), o + plain, picked


def inputs(B: int, S: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(B * S)
    starts = torch.randint(-3, S, (B, S, GROUPS, 1), generator=g)
    return torch.randn(B, S, STREAMS, WIDTH, generator=g), starts


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a folder with the package, and the inputs and expected outputs of two sizes."""
    folder = tmp_path_factory.mktemp("package")
    model = Everything()
    batch, length = Dim("batch", min=1, max=64), Dim("length", min=3, max=512)
    shapes = ({0: batch, 1: length}, {0: batch, 1: length})
    with torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        program = torch.export.export(model, inputs(2, 6), dynamic_shapes=shapes)
        routed = mhc_inductor.route_exported(program)
        code = routed.graph_module.code
        assert code.count("mhc_inductor.mhc_pre.default") == code.count("mhc_inductor.mhc_post.default") == 2
        assert code.count("mhc_inductor.selection_attention.default") == 2
        torch._inductor.aoti_compile_and_package(routed, package_path=str(folder / "model.pt2"))
    for i, sizes in enumerate([(2, 6), (3, 17)]):
        args = inputs(*sizes)
        with torch.no_grad():
            torch.save((args, model(*args)), folder / f"case{i}.pt")
    return folder


LOAD = """
import sys, torch
run = torch._inductor.aoti_load_package("model.pt2")
for name in ("case0.pt", "case1.pt"):
    args, want = torch.load(name)
    for a, b in zip(run(*args), want, strict=True):
        assert a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-5, atol=1e-5), (name, (a - b).abs().max())
assert "mhc_inductor" not in sys.modules
print("equal")
"""


def test_a_process_without_this_package_loads_it(package: pathlib.Path) -> None:
    done = subprocess.run([sys.executable, "-c", LOAD], cwd=package, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


# Only what the tests need of libtorch: its large headers would take a minute to compile.
PROGRAM = """
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <cstdio>
#include <fstream>

static at::Tensor read(const std::string& name, at::IntArrayRef sizes, at::ScalarType type) {
  at::Tensor t = at::empty(sizes, type);
  std::ifstream(name, std::ios::binary).read(static_cast<char*>(t.data_ptr()), t.nbytes());
  return t;
}

int main() {
  torch::inductor::AOTIModelPackageLoader loader("model.pt2");
  std::vector<at::Tensor> inputs{
      read("x.bin", {3, 17, 4, 16}, at::kFloat), read("starts.bin", {3, 17, 2, 1}, at::kLong)};
  std::vector<at::Tensor> out = loader.run(inputs);
  for (size_t i = 0; i < out.size(); ++i) {
    at::Tensor t = out[i].contiguous();
    std::ofstream("out" + std::to_string(i) + ".bin", std::ios::binary)
        .write(static_cast<const char*>(t.data_ptr()), t.nbytes());
  }
  std::printf("%zu outputs\\n", out.size());
}
"""


def test_a_program_in_cpp_runs_it_without_python(package: pathlib.Path) -> None:
    args, want = torch.load(package / "case1.pt")
    for name, t in zip(("x.bin", "starts.bin"), args, strict=True):
        (package / name).write_bytes(t.numpy().tobytes())
    (package / "main.cpp").write_text(PROGRAM)
    paths = [f"-I{p}" for p in cpp_extension.include_paths()]
    libraries = [p for folder in cpp_extension.library_paths() for p in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    command = ["g++", "-std=c++20", "-O0", abi, *paths, "main.cpp", "-o", "main", *libraries]
    command += ["-ltorch", "-ltorch_cpu", "-lc10"]
    built = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=500)
    assert built.returncode == 0, built.stderr[-3000:]
    done = subprocess.run([str(package / "main")], cwd=package, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "3 outputs", done.stderr[-2000:]
    linked = subprocess.run(["ldd", str(package / "main")], capture_output=True, text=True).stdout
    assert "libtorch_cpu" in linked and "libpython" not in linked
    for i, b in enumerate(want):
        got = torch.frombuffer(bytearray((package / f"out{i}.bin").read_bytes()), dtype=b.dtype).view(b.shape)
        assert torch.allclose(got, b, rtol=1e-5, atol=1e-5), (i, (got - b).abs().max())
