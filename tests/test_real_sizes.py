# SPDX-License-Identifier: Apache-2.0
"""Whole models at published widths, compiled for the simulated CUDA in many ways: what their wrappers hold.

``./dev test`` runs all of ``QUICK`` and one case of each other test that takes seconds; ``python -m tests.suite`` runs
all. ``python -m tests.real_sizes`` prints the table.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from tests import real_sizes
from tests.real_sizes import CASES, MODELS, V4, WAYS
from tests.tools import generated
from tests.tools.fakecuda import without_a_gpu

pytestmark = without_a_gpu

QUICK = [("mHC 4096", "checkpointed"), ("mHC 7168", "layer by layer"), ("E79 64", "reentrant"), ("E79 128", "fp16")]
REST = [case for case in CASES if not MODELS[case[0]].keys and case not in QUICK]

with_transformers = pytest.mark.skipif(
    not all(importlib.util.find_spec(f"transformers.models.{name}") for name in ("deepseek_v4", "deepseek_v32")),
    reason="this transformers lacks some of the models",
)


def _right(name: str, way: str) -> None:
    codes, chosen = real_sizes.generate(MODELS[name], way)
    assert len(codes) >= (1 if way == "inference" else 2), "a forward, and a backward where gradients are asked for"
    assert real_sizes.faults(MODELS[name], way, codes, chosen) == []


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "way"), QUICK)
def test_one_case_of_each_model_without_attention(name, way):
    _right(name, way)


@pytest.mark.parametrize(("name", "way"), REST)
def test_layers_without_attention(name, way):
    _right(name, way)


@with_transformers
@pytest.mark.parametrize("way", WAYS)
def test_deepseek_v32(way):
    _right("DeepSeek-V3.2", way)


@with_transformers
@pytest.mark.parametrize("way", WAYS)
def test_deepseek_v4(way):
    _right("DeepSeek-V4-Flash", way)


CODE = """
kernel_0 = async_compile.triton('kernel', '''''')
def call(args):
    x, {argument} = args
    buf0 = empty_strided_cuda(({shape}), (1, 1), torch.float32)
    kernel_0.run(x, {argument}, buf0, stream=stream0)
    buf1 = torch.ops.mhc_inductor.{op}.default(buf0)
    {last}
    return buf1
"""
RIGHT = {"argument": "y", "shape": "6144, 512", "op": "mhc_pre", "last": "del buf0"}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"argument": "kernel_0"}, "wrapper 0: kernel_0 stands for two things"),
        ({"last": "buf1 = empty_strided_cuda((2, ), (1, ), torch.float32)"}, "wrapper 0: buf1 stands for two things"),
        ({"last": "buf1 = align(buf1)"}, None),
        ({"op": "mhc_post"}, "wrapper 0: calls mhc_post, which has a launch"),
        ({"shape": "6144, 6144"}, "allocates (6144, 6144)"),
        ({"shape": "1, 64, 6144, 7680"}, "allocates (1, 64, 6144, 7680)"),
        ({"shape": "393216, 6192"}, "allocates (393216, 6192)"),
        ({"shape": "s77, s77"}, "allocates (s77, s77)"),
        ({"shape": "1, s77, s77 + s77 // 4"}, "allocates (1, s77, s77 + s77 // 4)"),
        ({"shape": "1, s77, 128 + min(512, s77 // 4)"}, None),
        ({"shape": "1, s77, 512"}, None),
    ],
)
def test_each_fault_is_found(change, fault):
    code = CODE.format(**{**RIGHT, **change})
    assert real_sizes.faults(replace(V4, ops=("kernel",)), "inference", [code], {"mhc_pre"}) == (
        [fault] if fault else []
    )


def test_missing_kernels_are_found():
    one = replace(V4, ops=("kernel", "mhc_post"))
    code = CODE.format(**RIGHT)
    assert real_sizes.faults(one, "inference", [code], {"mhc_pre"}) == ["no kernel of mhc_post"]
    trained = real_sizes.faults(one, "training", [code], {"mhc_pre"})
    assert trained == ["no kernel of mhc_post", "no backward of kernel", "no backward of mhc_post"]
    assert generated.launches(code) == ["kernel"]


def test_code_that_python_refuses_is_found():
    with pytest.raises(SyntaxError):
        real_sizes.faults(V4, "inference", [CODE.format(**RIGHT) + "  f("], set())
