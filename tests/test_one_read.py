# SPDX-License-Identifier: Apache-2.0
"""pre with one read of x in one Gluon kernel (sm_90): values, equal bits, residency, compiled code."""

from __future__ import annotations

import re

import pytest
import torch
from conftest import INTERPRETED
from test_post_project import check_training_step, on_hopper

from mhc_inductor import compat, log
from mhc_inductor.kernels.launch import EagerBuilder
from mhc_inductor.kernels.mhc import gluon, plan
from tests.oracles import mhc as h
from tests.oracles.poisoned import Poisoned
from tests.tools import offline
from tests.tools.fakecuda import without_a_gpu
from tests.tools.offline import TARGETS, Recorder, compile_all, source

BF16, F32 = torch.bfloat16, torch.float32
OPTIONS = {**h.PRE_OPTIONS, "sinkhorn_iters": 20}
OUTSIDE = {**OPTIONS, "norm_eps": 0.1, "norm_form": "outside"}
NAMES = ("h_in", "h_post", "h_res", "h_pre", "h_mix", "inv_rms")


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Uses the kernel at every width that it can take, whatever the widths that it is switched on for."""
    monkeypatch.setattr(gluon, "ONE_READ_PRE", range(1024, 8193))
    monkeypatch.setattr(gluon, "refused", set())


def run(inputs, options=OPTIONS):
    """Runs the plan; returns its outputs by name."""
    b = Poisoned(torch.device("cuda", torch.cuda.current_device()))
    out = plan.plan_mhc_pre(b, *inputs.values(), *options.values())
    assert b.names == ([] if inputs["x"].numel() == 0 else ["mhc_one_read"])
    return dict(zip(NAMES, out, strict=True))


def made(tokens, width=1024, **kinds):
    return h.make_inputs((tokens,), 4, width, BF16, device="cuda", **kinds)


def check(inputs, options=OPTIONS):
    got = {k: v for k, v in run(inputs, options).items() if v.numel()}
    h.compare(got, h.oracle_pre(inputs, None, options), 2e-6, 1.05)
    return got


def equal(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


@on_hopper
@pytest.mark.parametrize("width", [2560, 3072, 4096, 5120])
def test_values(width):
    assert run(made(0, width))["h_in"].shape == (0, width)
    for tokens in (1, 5, 33, 130):
        check(made(tokens, width, gamma=tokens != 33))
    # One token of many tiles would show a slip of the ring: all of h_in is compared, in pieces of the oracle.
    inputs = made(4099, width)
    got = run(inputs)
    for some in (slice(0, 130), slice(2000, 2130), slice(3969, 4099)):
        want = h.oracle_pre({**inputs, "x": inputs["x"][some]}, None, OPTIONS)
        h.compare({k: v[some] for k, v in got.items()}, want, 2e-6, 1.05)
    # The other kernels see all tokens.
    x, *params = inputs.values()
    old = plan.plan_pre(EagerBuilder(x.device), x, tuple(params), plan.Options(*OPTIONS.values()))
    for k, v in zip(NAMES, old, strict=True):
        assert h.relative(got[k], v) < (1e-4 if k == "h_in" else 4e-6), k


@on_hopper
@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        ({"gamma": False}, OPTIONS), ({"full": False}, OPTIONS), ({"param_dtype": BF16}, OPTIONS), ({}, OUTSIDE),
        ({"x_scale": 1e-4}, OUTSIDE), ({}, {**OPTIONS, "sinkhorn_form": "exp"}), ({}, {**OPTIONS, "sinkhorn_form": "exp_eps"}),
        ({}, {**OPTIONS, "sinkhorn_iters": 0}),
    ],
    ids=str,
)  # fmt: skip
def test_variants(kinds, options):
    check(made(150, **kinds), options)


@on_hopper
@pytest.mark.parametrize("width", [1024, 2560, 4096, 5120])
def test_equal_bits_in_two_runs_and_in_any_batch(width):
    inputs = made(5000, width)
    whole = run(inputs)
    assert equal(whole, run(inputs))
    for some in (slice(4321, 4322), slice(77, 500)):
        part = run({**inputs, "x": inputs["x"][some].clone()})
        assert equal({k: t[some] for k, t in whole.items()}, part)


@on_hopper
def test_a_token_of_zeros_or_of_nan_comes_through_and_leaves_the_others_alone():
    inputs = made(100)
    inputs["x"][5] = 0
    want = check(inputs)
    inputs["x"][3] = float("nan")
    got = run(inputs)
    others = torch.arange(100, device="cuda") != 3
    assert equal({k: t[others] for k, t in want.items()}, {k: t[others] for k, t in got.items()})
    assert all(got[k][3].isnan().all() for k in NAMES)


@on_hopper
def test_an_x_that_starts_anywhere():
    inputs = made(70)
    want = run(inputs)
    x = inputs["x"]
    inputs["x"] = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    assert inputs["x"].data_ptr() % 16
    assert equal(want, run(inputs))


@on_hopper
@pytest.mark.parametrize("width", [1024, 4096])
def test_two_streams_beside_another_kernel(width):
    """Tests that programs which cannot start at once do not stop those that wait for them."""
    inputs = [made(3000 + 500 * s, width, seed=s) for s in range(2)]
    want = [run(i) for i in inputs]
    streams = [torch.cuda.Stream() for _ in range(3)]
    m = torch.randn(4096, 4096, device="cuda", dtype=BF16)
    torch.cuda.synchronize()
    for _ in range(10):
        with torch.cuda.stream(streams[2]):
            m @ m
        got = []
        for stream, i in zip(streams, inputs, strict=False):
            with torch.cuda.stream(stream):
                got.append(run(i))
        torch.cuda.synchronize()
        assert all(equal(a, b) for a, b in zip(want, got, strict=True))


@on_hopper
def test_graph():
    inputs, other = made(3000), made(3000, seed=1)
    run(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(inputs)
    inputs["x"].copy_(other["x"])
    for v in out.values():
        v.fill_(float("nan"))
    for _ in range(3):
        graph.replay()
    assert equal(out, run(inputs))


@on_hopper
@pytest.mark.parametrize("options", [OPTIONS, OUTSIDE], ids=["inside", "outside"])
def test_a_compiled_training_step(options):
    check_training_step(lambda *args: torch.ops.mhc_inductor.mhc_pre(*args, *options.values())[:3], made(200))


# --- without a GPU ----------------------------------------------------------------------------------------------


def recorded(width=4096, case="pre", b=None):
    """Returns the launches of mhc_pre on meta tensors."""
    return offline.mhc("pre", 8192, width, case, b, **(OUTSIDE if case == "outside" else OPTIONS))


def names(width):
    return [launch[0].__name__ for launch in recorded(width)]


@pytest.mark.skipif(INTERPRETED, reason="compiling and interpreting exclude each other")
@pytest.mark.parametrize(
    ("width", "case"),
    [(4096, "pre"), (4096, "gamma"), (2560, "gamma"), (2560, "plain"), (4096, "outside"), (5120, "gamma")],
)
def test_compiles_without_unnamed_spills(width, case):
    assert compile_all(recorded(width, case), "cuda:90", f"{case} {width}") == {"mhc_one_read"}


def lanes(ir, layout):
    """The bases of a layout's lanes, from the text of Triton's IR."""
    sliced = re.fullmatch(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>", layout)
    if sliced:
        dim = int(sliced[1])
        return [b[:dim] + b[dim + 1 :] for b in lanes(ir, sliced[2])]
    text = re.search(rf"^{layout} = #ttg\.linear<.*?lane = \[(\[.*?\])\], warp", ir, re.M)[1]
    return [[int(v) for v in b.split(",")] for b in re.findall(r"\[([^\]]*)\]", text)]


@pytest.mark.skipif(INTERPRETED, reason="compiling and interpreting exclude each other")
def test_sums_run_over_neighbouring_lanes():
    """Tests what Triton 3.6 takes for granted: of a sum's lanes, the bits of their numbers follow one another."""
    import triton

    ((kernel, args, constexprs, warps, stages),) = recorded()
    constexprs = {k: v for k, v in constexprs.items() if k != "launch_cooperative_grid"}
    options = {"num_warps": warps, "num_stages": stages}
    ir = triton.compile(source(kernel, args, constexprs), target=TARGETS["cuda:90"][0], options=options).asm["ttgir"]
    sums = re.findall(
        r'"tt\.reduce"\(.*?axis = (\d+) : i32\}>.*?\}\) : \(tensor<[0-9x]*x[a-z0-9]+, (.*?)>\) ->', ir, re.S
    )
    assert len(sums) > 10
    across = 0
    for axis, layout in sums:
        bits = [n for n, basis in enumerate(lanes(ir, layout)) if basis[int(axis)]]
        across += bool(bits)
        assert bits == list(range(min(bits, default=0), min(bits, default=0) + len(bits))), (axis, layout)
    assert across >= 4


@pytest.mark.skipif(INTERPRETED, reason="Gluon is not interpreted")
def test_a_device_that_cannot_hold_all_programs_runs_the_other_kernels(monkeypatch):
    class Refusing(Recorder):
        def launch(self, kernel, grid, args, constexprs, *sizes):
            if constexprs.get("launch_cooperative_grid"):
                assert grid[0] <= self.device_props().sm_count
                refusals.append(grid)
                raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")
            super().launch(kernel, grid, args, constexprs, *sizes)

    monkeypatch.setattr(log, "_said", set())
    refusals = []
    for _ in range(2):
        launches = recorded(b=Refusing(TARGETS["cuda:90"][1]))
        assert launches[-1][0].__name__ == "mhc_pre_collapse"
    assert len(refusals) == 1, "the second call does not try again"


@pytest.mark.skipif(INTERPRETED, reason="Gluon is not interpreted")
@pytest.mark.parametrize("width", [1024, 2560, 2816, 4096, 8704])
def test_where_the_kernel_can_run(width):
    assert ("mhc_one_read" in names(width)) == (width not in (2816, 8704))


@pytest.mark.skipif(INTERPRETED, reason="Gluon is not interpreted")
def test_the_switch_turns_it_off(monkeypatch):
    monkeypatch.setattr(gluon, "ONE_READ_PRE", range(0))
    assert "mhc_one_read" not in names(4096)


@without_a_gpu
@pytest.mark.skipif(INTERPRETED, reason="Gluon is not interpreted")
@pytest.mark.usefixtures("no_caches")
@pytest.mark.parametrize(("width", "packaged"), [(1024, False), (1024, True), (256, False)])
def test_generated_code_calls_pre_where_the_kernel_runs(width, packaged, monkeypatch):
    from test_codegen import FLOATS, OPS, compiled

    def fn(x, *params):
        out = OPS.mhc_pre(x, *params, None, *FLOATS)
        return out[0] + 1, out[1]

    monkeypatch.setattr(compat.lowerings, "packaging", lambda: packaged)
    code = compiled(fn, (64, 4, width), *((shape, F32) for shape in ((24, 4 * width), (3,), (24,))))
    calls = width == 1024 and not packaged
    assert code.count("torch.ops.mhc_inductor.mhc_pre.default(") == calls
    assert ("mhc_pre_project" in code) == (not calls)
