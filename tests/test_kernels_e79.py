# SPDX-License-Identifier: Apache-2.0
"""Parity of the E79 kernels with the fp64 loop, through the launch plans, with every buffer poisoned.

On a GPU, Gluon and plain Triton run; elsewhere plain Triton runs in the interpreter.
"""

from __future__ import annotations

import types

import pytest
import torch
from conftest import GPU, cases

from mhc_inductor.kernels.e79 import plan
from mhc_inductor.kernels.launch import DeviceProps
from tests.oracles import e79 as h
from tests.oracles.poisoned import Poisoned

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMALL = DeviceProps(4, "cuda", 90)
# The interpreter takes a second per step at n = 128.
WIDTHS = (16, 20, 32, 48, 64, 96, 128) if GPU else (16, 20, 33)


class PlainTriton(Poisoned):
    gluon = False


@pytest.fixture(autouse=True, params=["gluon", "triton"] if GPU else ["triton"])
def builder(request, monkeypatch, device):
    """Makes the helpers call the launch plans in place of the registered ops."""
    made = (Poisoned if request.param == "gluon" else PlainTriton)(torch.device(device), None if GPU else SMALL)
    kernels = {
        "e79_scan": lambda *args: plan.plan_e79_scan(made, *args),
        "e79_scan_backward": lambda *args: plan.plan_e79_scan_backward(made, *args),
    }
    monkeypatch.setattr(h, "OPS", types.SimpleNamespace(**kernels))
    return made


def run(device, T, B=2, n=16, dtype=F32, *, segment=4, up=h.OUTPUTS, **made):
    inputs = h.make_inputs(T, B, n, dtype, device=device, **made)
    ups = h.upstream(inputs, up)
    got = h.run_scan(inputs, ups, segment)
    h.check(got, inputs, ups)
    return inputs, ups, got


CASES = cases(
    dtypes=({"T": 4, "bias": ("input", "fixed"), "segment": 3}, "dtype", [F32, BF16, F16]),
    # T = 6: segments that divide it, do not divide it, equal it, and exceed it
    segments=({"T": 6, "B": 1, "bias": "input"}, "segment", [1, 3, 5, 6, 7]),
    gates=({"T": 4, "B": 1}, "gates", [-20.0, 20.0]),
    without_initial_state=({"T": 3}, "state", [False]),
    one_step=({"T": 1, "B": 1}, "segment", [1]),
    some_outputs=({"T": 3, "B": 1, "bias": "input"}, "up", [("out",), ("S",), ("M",), ("S", "M")]),
)


@pytest.mark.parametrize("case", CASES)
def test_against_fp64(device, case):
    run(device, **case)


@pytest.mark.parametrize("name", h.MISTAKES)
def test_mistakes_made_before(device, name):
    run(device, **h.MISTAKES[name])


@pytest.mark.parametrize("bias", h.BIASES)
@pytest.mark.parametrize("n", WIDTHS)
def test_widths(device, n, bias):
    run(device, 3, n=n, bias=bias, segment=2)


def test_checkpoints_change_no_bit_and_none_are_kept_without_gradients(device):
    inputs = h.make_inputs(5, 2, 16, F32, device=device)
    args = [inputs[k] for k in h.NAMES]
    with_, without = h.OPS.e79_scan(*args, 2), h.OPS.e79_scan(*args, 0)
    assert all(torch.equal(a, b) for a, b in zip(with_[:3], without[:3], strict=True))
    assert [t.shape for t in without[3:]] == [(0,), (0,)]


@pytest.mark.parametrize("n", [16, 32, 64, 128] if GPU else [16])
def test_equal_bits_with_any_segments_and_strides_and_in_any_batch(device, n):
    """Checks that the backward recomputes the forward's states bit by bit for any segment length, which depends on the batch."""
    inputs, ups, got = run(device, 7, 3, n, bias="input")
    strided = {k: t.transpose(0, 1).contiguous().transpose(0, 1) for k, t in inputs.items()}
    strided["S0"] = inputs["S0"].mT.contiguous().mT
    strided_ups = {k: t.mT.contiguous().mT for k, t in ups.items()}
    for again in (h.run_scan(strided, strided_ups, 4), *(h.run_scan(inputs, ups, segment) for segment in (3, 7))):
        assert all(torch.equal(got[k], again[k]) for k in got), [k for k in got if not torch.equal(got[k], again[k])]
    one = {k: None if t is None else (t[:, 1:2] if k in ("kvqm", "b_s", "b_m") else t[1:2]) for k, t in inputs.items()}
    alone = h.run_scan(one, {k: t[:, 1:2] if k == "out" else t[1:2] for k, t in ups.items()}, 4)
    for k, t in alone.items():
        whole = got[k]
        assert torch.equal(t, whole[1:2] if k in ("S", "M", "dS0", "dM0") else whole[:, 1:2]), k


def test_no_sequence(device):
    inputs = h.make_inputs(3, 0, 16, F32, device=device)
    got = h.run_scan(inputs, h.upstream(inputs))
    assert got["out"].shape == (3, 0, 16) and got["dkvqm"].shape == (3, 0, 64)
    assert torch.equal(got["db_s"], torch.zeros(16, device=device)), "the sum over no sequence"


@pytest.mark.parametrize("key", ["kvqm", "S0", "b_m"])
def test_nan_propagates_in_its_sequence_alone(device, key):
    inputs = h.make_inputs(3, 2, 16, F32, bias="input", device=device)
    clean = h.run_scan(inputs)
    inputs[key].view(-1)[0] = float("nan")  # step 0 of sequence 0
    got = h.run_scan(inputs)
    assert got["S" if key != "b_m" else "M"][0].isnan().any()
    assert torch.equal(got["out"][:, 1], clean["out"][:, 1])


def test_zero_k_and_m_have_finite_gradients(device):
    inputs = h.make_inputs(3, 1, 16, F32, device=device)
    inputs["kvqm"][1, :, :16] = 0
    inputs["kvqm"][2, :, 48:] = 0
    ups = h.upstream(inputs)
    got = h.run_scan(inputs, ups, 2)
    assert all(t.isfinite().all() for t in got.values())
    h.check(got, inputs, ups)
