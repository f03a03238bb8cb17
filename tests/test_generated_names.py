# SPDX-License-Identifier: Apache-2.0
"""Names in generated code: no kernel of ours bears one that the graph gives to an argument, a value or a constant."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from torch import fx
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import mhc_inductor
from mhc_inductor import backend
from tests.tools.fakecuda import fake_cuda, generated_code, without_a_gpu
from tests.tools.generated import clashes, launches, runs

pytestmark = [pytest.mark.usefixtures("no_caches"), without_a_gpu]

N, D = 4, 128
OPS = torch.ops.mhc_inductor


def _layer(x, h_post):
    h_res = mhc_inductor.mhc_sinkhorn(x[..., :N].float(), 3)
    for _ in range(2):
        x = mhc_inductor.mhc_post(x, torch.tanh(x[..., 0, :]), h_post, h_res, transpose_res=False)
    return x


def _trained(reentrant: bool) -> list[str]:
    """Returns the code of checkpointed layers: their inputs are saved, named after the op ``mhc_post``."""

    def model(x, h_post):
        for _ in range(3):
            x = checkpoint(_layer, x, h_post, use_reentrant=reentrant)
        return x.float().sum()

    with fake_cuda(), FakeTensorMode():
        x = torch.empty(2, 64, N, D, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        h_post = torch.empty(2, 64, N, device="cuda", requires_grad=True)
        compiled = torch.compile(model, fullgraph=True, backend="mhc_inductor")
        return generated_code(lambda: compiled(x, h_post).backward())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_saved_tensor_named_like_its_op_does_not_hide_the_kernel(reentrant):
    forward, backward = _trained(reentrant)
    assert re.search(r"\bmhc_post_1\b.* = args$", backward, re.MULTILINE), "the graph has the name that this is about"
    assert {"mhc_post", "mhc_post_backward", "mhc_sinkhorn_backward"} <= set(launches(backward))
    assert clashes(forward) == clashes(backward) == []


def _graph(argument: str, constant: str, calls: int = 1) -> str:
    """Returns the code of a graph whose argument and constant have these names."""
    backend.prepare()
    with fake_cuda(), FakeTensorMode():
        root, graph = torch.nn.Module(), fx.Graph()
        value = torch.empty(64, N, N, device="cuda")
        setattr(root, constant, value + 1)
        nodes = [graph.placeholder(argument), graph.get_attr(constant)]
        outs = [graph.call_function(OPS.mhc_sinkhorn.default, (node, 3, 1e-6, "softmax")) for node in nodes]
        for node in (*nodes, *outs):
            node.meta["val"] = value
        graph.output((*outs, nodes[1]))
        (code,) = generated_code(lambda: compile_fx_inner(fx.GraphModule(root, graph), [value]))
    return code


@pytest.mark.parametrize(
    ("argument", "constant"),
    [
        ("x", "c"),
        ("mhc_sinkhorn_0", "mhc_sinkhorn_Kernel_0"),
        ("mhc_sinkhorn_Kernel_0", "mhc_sinkhorn_0"),
        ("mhc_sinkhorn_Kernel_0", "mhc_sinkhorn_Kernels_0"),
        ("Kernelss_Kernel", "mhc_sinkhorn_Kernel_0"),
    ],
)
def test_no_name_that_a_user_can_give_hides_a_kernel(argument, constant):
    code = _graph(argument, constant)
    assert f" {argument}, " in code.replace("(", " ") and constant in code, "generated code keeps the graph's names"
    assert launches(code) == ["mhc_sinkhorn"] * 2
    assert clashes(code) == []


def test_names_are_the_same_in_every_compile():
    """Checks that caches, whose keys hold the code, find what an earlier process left."""
    codes = [_graph("x", "c") for _ in range(2)]
    names = [[launch.variable for launch in runs(code)] for code in codes]
    assert names[0] == names[1] == ["mhc_sinkhorn_Kernel_0"] * 2


@pytest.mark.parametrize(("unique", "name"), [(False, "mhc_sinkhorn"), (True, "mhc_sinkhorn_0")])
def test_profiles_show_the_function_of_the_kernel(unique, name):
    with config.patch({"triton.unique_user_kernel_names": unique}):
        code = _graph("x", "c")
    (kernel,) = (
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton"
    )
    literal, source = (ast.literal_eval(a) for a in kernel.args[:2])
    assert literal == name and f"\ndef {name}(" in source, "what is launched is named as in eager calls"
