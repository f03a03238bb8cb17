# SPDX-License-Identifier: Apache-2.0
"""The ops on DTensors, without processes: the table of dimensions and what follows from it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mhc_inductor.ops import dims, registry, sharding
from tests.ranks import sharded_ops

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def test_every_op_is_in_the_table():
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    ours = {op.partition(".")[0] for space, _, op in names if space == "mhc_inductor"}
    assert sharding.TABLE.keys() == ours == registry.REFERENCE.keys()


@pytest.mark.parametrize("op", sharding.TABLE)
def test_every_tensor_has_names(op):
    family, schema = sharding.TABLE[op], getattr(torch.ops.mhc_inductor, op).default._schema
    results = dims.results(op)
    assert len(results) == len(schema.returns) and all(results)
    tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
    for name in (*tensors, *results):
        assert name in family.dims or name.removeprefix("d") in family.dims, name


@pytest.mark.parametrize("op", sharding.TABLE)
def test_only_gradients_are_partial(op):
    """What an op computes of all tokens, heads or groups together is a gradient; its inputs are never partial."""
    done = set()
    for name, _, args in sharded_ops.samples():
        if name != op:
            continue
        for results, inputs in sharding.strategies(op, *args):
            partial = [r for r, p in zip(dims.results(op), results, strict=True) if p.is_partial()]
            assert all(r.startswith("d") for r in partial)
            assert len(inputs) == len(args) and not any(p is not None and p.is_partial() for p in inputs)
            assert [p is not None for p in inputs] == [isinstance(a, torch.Tensor) for a in args]
            done.add(tuple(map(str, results)))
    assert len(done) > 1


def test_the_import_leaves_dtensor_alone():
    code = """
    import sys, torch, mhc_inductor
    x = torch.randn(2, 4, 16, requires_grad=True)
    mhc_inductor.mhc_collapse(x, torch.rand(2, 4)).sum().backward()
    # Dynamo of torch 2.11 imports FSDP, and with it DTensor; a checkout that is not installed imports Dynamo.
    imported = torch.__version__ < "2.13" and "torch.distributed.fsdp" in sys.modules
    assert imported or "torch.distributed.tensor" not in sys.modules
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
