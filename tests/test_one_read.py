"""pre, and post and pre, with one read of x in one Gluon kernel (sm_90): parity, equal bits, residency, compiled code."""

from __future__ import annotations

import re

import helpers_mhc as h
import pytest
import torch
from conftest import GPU, INTERPRETED
from fakecuda import on_a_cpu_build

from mhc_inductor import compat, log
from mhc_inductor.kernels.launch import EagerBuilder
from mhc_inductor.kernels.mhc import fused_plan, gluon, plan

BF16, F32 = torch.bfloat16, torch.float32
try:
    import mhc_inductor.kernels.mhc.gluon_one_read  # noqa: F401
except ImportError:
    USABLE = False  # other kernels are used everywhere
else:
    USABLE = True
HOPPER = USABLE and GPU and torch.cuda.get_device_capability() == (9, 0) and torch.version.hip is None
OPTIONS = {**h.PRE_OPTIONS, "sinkhorn_iters": 20}
PARAMS = ("phi", "alpha", "bias", "gamma")
CASES = ("pre", "gamma", "head", "plain", "bf16")


def on_hopper(test):
    return pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason="written for sm_90")(test))


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Uses the kernel at every width that it can take."""
    monkeypatch.setattr(gluon, "ONE_READ_PRE", range(1024, 8193))
    monkeypatch.setattr(gluon, "ONE_READ_POST", range(1024, 8193))
    monkeypatch.setattr(gluon, "refused", set())


class Poisoned(EagerBuilder):
    """Fills every output and workspace with NaN first, and collects the names of launched kernels."""

    def __init__(self, *args):
        super().__init__(*args)
        self.names = []

    def empty(self, shape, dtype):
        return super().empty(shape, dtype).fill_(float("nan"))

    def launch(self, kernel, *args):
        self.names.append(kernel.__name__)
        super().launch(kernel, *args)


def run(inputs, transpose_res=True):
    """Runs an op's plan with ``inputs``, which say which op it is; returns its outputs by name."""
    head = inputs["phi"].shape[0] == 4
    fused = "f_out" in inputs
    b = Poisoned(torch.device("cuda", torch.cuda.current_device()))
    names = ["h_in", "h_pre", "h_mix", "inv_rms"] if head else ["h_in", "h_post", "h_res", "h_pre", "h_mix", "inv_rms"]
    tensors, options = list(inputs.values()), (h.HEAD_OPTIONS if head else OPTIONS).values()
    if fused:
        fn = fused_plan.plan_mhc_post_head if head else fused_plan.plan_mhc_post_pre
        out = fn(b, *tensors[:4], transpose_res, *tensors[4:], *options)
        names = ["x_out", "h_in", *(["next_post", "next_res"] if not head else []), "h_pre", "h_mix", "inv_rms"]
    else:
        out = (plan.plan_mhc_head if head else plan.plan_mhc_pre)(b, *tensors, *options)
    assert b.names == ([] if inputs["x"].numel() == 0 else ["mhc_one_read"])
    return dict(zip(names, out, strict=True))


def made(fused, tokens, width=1024, **kinds):
    make = h.make_fused_inputs if fused else h.make_inputs
    return make((tokens,), 4, width, BF16, device="cuda", **kinds)


def check(inputs, transpose_res=True):
    got = {k: v for k, v in run(inputs, transpose_res).items() if v.numel()}
    head = inputs["phi"].shape[0] == 4
    if "f_out" in inputs:
        want = h.oracle_fused(inputs, transpose_res, got["x_out"], None, None if head else OPTIONS)
        apart = torch.ops.mhc_inductor.mhc_post(*(inputs[k] for k in ("x", "f_out", "h_post", "h_res")), transpose_res)
        assert torch.equal(got["x_out"], apart)
    else:
        want = (h.oracle_head if head else h.oracle_pre)(inputs, None, h.HEAD_OPTIONS if head else OPTIONS)
    h.compare(got, want, 2e-6, 1.05)


def equal(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


@on_hopper
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("width", [1024, 2560, 4096, 7168, 8192])
@pytest.mark.parametrize("tokens", [1, 77, 4099])
def test_parity(fused, width, tokens):
    check(made(fused, tokens, width))


@on_hopper
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kinds", [{"gamma": False}, {"full": False}, {"head": True}, {"param_dtype": BF16}], ids=str)
@pytest.mark.parametrize("transpose_res", [False, True])
def test_variants(fused, kinds, transpose_res):
    check(made(fused, 150, **kinds), transpose_res)


@on_hopper
def test_variants_of_post():
    check(made(True, 150, residual=False))
    assert run(made(True, 0))["h_in"].shape == (0, 1024)


@on_hopper
@pytest.mark.parametrize("fused", [False, True])
def test_equal_bits_in_two_runs_and_in_any_batch(fused):
    inputs = made(fused, 5000)
    whole = run(inputs)
    assert equal(whole, run(inputs))
    for some in (slice(4321, 4322), slice(77, 500)):
        part = run({k: t if k in PARAMS else t[some].clone() for k, t in inputs.items()})
        assert equal({k: t[some] for k, t in whole.items()}, part)


@on_hopper
@pytest.mark.parametrize("fused", [False, True])
def test_a_token_of_zeros_or_of_nan_comes_through_and_leaves_the_others_alone(fused):
    inputs = made(fused, 100)
    for k in ("x", "f_out") if fused else ("x",):
        inputs[k][5] = 0
    want = run(inputs)
    check(inputs)
    inputs["x"][3] = float("nan")
    got = run(inputs)
    others = torch.arange(100, device="cuda") != 3
    assert equal({k: t[others] for k, t in want.items()}, {k: t[others] for k, t in got.items()})
    assert got["h_in"][3].isnan().all()


@on_hopper
def test_inputs_that_start_anywhere():
    inputs = made(True, 70)
    want = run(inputs)
    for k in ("x", "f_out", "h_post", "h_res"):
        t = inputs[k]
        inputs[k] = torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)
        assert inputs[k].data_ptr() % 16
    assert equal(want, run(inputs))


@on_hopper
@pytest.mark.parametrize("fused", [False, True])
def test_two_streams_beside_another_kernel(fused):
    """Tests that programs which cannot start at once do not stop those that wait for them."""
    inputs = [made(fused, 3000 + 500 * s, seed=s) for s in range(2)]
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
@pytest.mark.parametrize("fused", [False, True])
def test_graph(fused):
    inputs, other = made(fused, 3000), made(fused, 3000, seed=1)
    run(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(inputs)
    inputs["x"].copy_(other["x"])
    for _ in range(3):
        graph.replay()
    assert equal(out, run(inputs))


# --- without a GPU ----------------------------------------------------------------------------------------------


def meta(*shape, dtype=F32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def recorded(b, fused, width, case):
    """Records the launches of an op on meta tensors."""
    b.gluon = True
    T, m, head = 8192, {"head": 4, "plain": 8}.get(case, 24), case == "head"
    x, phi = meta(T, 4, width, dtype=BF16), meta(m, 4 * width, dtype=BF16 if case == "bf16" else F32)
    params = (phi, meta(1 if head else 3), meta(m), meta(4, width) if case == "gamma" else None)
    options = (h.HEAD_OPTIONS if head else OPTIONS).values()
    if not fused:
        return (plan.plan_mhc_head if head else plan.plan_mhc_pre)(b, x, *params, *options)
    fn = fused_plan.plan_mhc_post_head if head else fused_plan.plan_mhc_post_pre
    post = (meta(T, width, dtype=BF16), meta(T, 4), None if case == "plain" else meta(T, 4, 4))
    return fn(b, x, *post, True, *params, *options)


# Bytes of spill stores allowed, by width and case, of post and pre; pre alone spills none.
SPILLS = {2560: 128, 4096: 64, 7168: 64}


@pytest.mark.skipif(INTERPRETED or not USABLE, reason="compiling and interpreting exclude each other; another Gluon")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("width", [2560, 4096, 7168])
@pytest.mark.parametrize("case", CASES)
def test_compiles_without_spills(fused, width, case, tmp_path):
    from offline import TARGETS, Recorder, compile_all

    b = Recorder(TARGETS["cuda:90"][1])
    recorded(b, fused, width, case)
    allowed = {("cuda:90", "mhc_one_read", ""): SPILLS[width] if fused else 0}
    seen, bad = compile_all(b.launches, "cuda:90", "", allowed, tmp_path)
    assert seen == {"mhc_one_read"}
    assert not bad


@pytest.mark.skipif(INTERPRETED or not USABLE, reason="another Triton")
@pytest.mark.parametrize("fused", [False, True])
def test_a_device_that_cannot_hold_all_programs_runs_the_other_kernels(fused, monkeypatch):
    from offline import TARGETS, Recorder

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
        b = Refusing(TARGETS["cuda:90"][1])
        recorded(b, fused, 4096, "pre")
        assert b.launches and "mhc_one_read" not in {launch[0].__name__ for launch in b.launches}
    assert len(refusals) == 1, "the second call does not try again"


@pytest.mark.skipif(INTERPRETED or not USABLE, reason="another Triton")
@pytest.mark.parametrize("width", [1024, 2560, 2816, 4096, 8704])
def test_where_the_kernel_runs(width, monkeypatch):
    from offline import TARGETS, Recorder

    b = Recorder(TARGETS["cuda:90"][1])
    recorded(b, False, width, "pre")
    assert ("mhc_one_read" in {launch[0].__name__ for launch in b.launches}) == (width not in (2816, 8704))


def _code(width):
    from fakecuda import fake_cuda
    from test_codegen import FLOATS, OPS, generated_code
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fn(x, *params):
        out = OPS.mhc_pre(x, *params, None, *FLOATS)
        return out[0] + 1, out[1]

    with fake_cuda(), FakeTensorMode():
        x = torch.empty(64, 4, width, dtype=BF16, device="cuda")
        params = [torch.empty(*shape, device="cuda") for shape in ((24, 4 * width), (3,), (24,))]
        (code,) = generated_code(lambda: torch.compile(fn, fullgraph=True, backend="mhc_inductor")(x, *params))
    return code[code.index("def call(") :]


@on_a_cpu_build
@pytest.mark.skipif(INTERPRETED, reason="another Triton")
@pytest.mark.usefixtures("no_caches")
@pytest.mark.parametrize(("width", "packaged"), [(1024, False), (1024, True), (256, False)])
def test_generated_code_calls_pre_where_the_kernel_runs(width, packaged, monkeypatch):
    monkeypatch.setattr(compat, "packaging", lambda: packaged)
    code = _code(width)
    calls = USABLE and width == 1024 and not packaged
    assert len(re.findall(r"torch\.ops\.mhc_inductor\.mhc_pre\.default\(", code)) == calls
    assert ("mhc_pre_project" in code) == (not calls)
