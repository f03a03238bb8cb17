"""Checks of the ops on DTensors, run by every rank of one gloo process group: ``run(world)`` returns what failed.

A check is a function of the mesh. Names that begin with ``whole_`` run on a mesh of two dimensions.
"""

from __future__ import annotations

import datetime
import functools
import pathlib
import queue
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from mhc_inductor.ops import sharding

TIMEOUT = datetime.timedelta(seconds=60)
# Sums over tokens in another order; fp16 and bf16 gradients of parameters are rounded once per rank.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def error(a: Tensor, b: Tensor) -> float:
    """Returns ||a - b|| / ||b||, with equal infinities left out."""
    a, b = (t.double() for t in (a, b))
    assert a.shape == b.shape, (a.shape, b.shape)
    same = a == b
    a, b = a.masked_fill(same, 0), b.masked_fill(same, 0)
    if same.all():
        return 0.0
    return float((a - b).norm() / b.norm().clamp(min=1e-6))


def close(a: Tensor, b: Tensor) -> bool:
    return error(a, b) <= TOLERANCE[b.dtype] if b.is_floating_point() else torch.equal(a, b)


# --- every op, with the samples of its tests ----------------------------------------------------------------


@functools.cache
def samples() -> list[tuple[str, str, tuple[Any, ...]]]:
    """Returns (op, id, arguments) of the samples of all ops in one dtype, the same on every rank."""
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    import test_ops_e79
    import test_ops_index
    import test_ops_index_loss
    import test_ops_lists
    import test_ops_mhc
    import test_ops_selection

    torch.manual_seed(0)
    found = []
    for tests in (test_ops_mhc, test_ops_e79, test_ops_selection, test_ops_lists, test_ops_index, test_ops_index_loss):
        for case in tests.SAMPLES:
            name, sample, variant = case.values
            if not any(dtype in case.id for dtype in ("fp64", "bf16", "fp16", "low")):
                found.append((name, case.id, sample(**variant)))
    q, k = torch.randn(2, 8, 2, 2, 4), torch.randn(2, 2, 3, 4)
    found.append(("selection_blocks", "blocks", (q, k, torch.randn(2, 8, 2, 2), 0.5, 4, 2, 4, 3, 8)))
    return found


# For each family: which dimension of which arguments is one name. Written out here, independently of the table.
_TOKENS = ("x", "f_out", "h_post", "h_res", "h_pre", "h_mix", "inv_rms", "x_out", "x_acc", "h_in", "g", "grad")
_TOKENS += ("next_pre", "next_post", "next_res")
_QUERIES = dict.fromkeys(("q", "o", "out", "lse", "ranges", "indices", "segments_q"), 1)
_INDEX = dict.fromkeys(("q", "w", "limit", "mask", "segments_q", "scores", "indices", "attention_q", "lse", "loss"), 1)
_ALL = ("q", "k", "v", "o", "out", "lse", "ranges", "indices", "segments_q", "segments_k")
SPLITS: dict[str, dict[str, dict[str, int]]] = {
    "mhc": {"batch": dict.fromkeys(_TOKENS, 0), "sequence": dict.fromkeys(_TOKENS, 1)},
    "e79": {
        "batch": {
            **dict.fromkeys(("kvqm", "out", "b_s", "b_m", "checkpoints", "gates"), 1),
            **dict.fromkeys(("S", "M", "S0", "M0"), 0),
        }
    },
    "selection": {
        "batch": dict.fromkeys(_ALL, 0),
        "queries": _QUERIES,
        "groups": {**dict.fromkeys(("q", "o", "out", "lse", "ranges", "indices"), 2), "k": 1, "v": 1, "sink": 0},
        "heads": {**dict.fromkeys(("q", "o", "out", "lse"), 3), "sink": 1},
    },
    "index": {
        "batch": dict.fromkeys((*_INDEX, "k", "segments_k", "attention_k"), 0),
        "queries": _INDEX,
    },
}


def named(op: str, args: Sequence[Any]) -> dict[str, Any]:
    schema = getattr(torch.ops.mhc_inductor, op).default._schema
    return {a.name: t for a, t in zip(schema.arguments, args, strict=False)}


def split_of(op: str, kind: str, given: dict[str, Any], ranks: int) -> dict[str, int]:
    """Returns the dimension at which each tensor argument is sharded; arguments that are left out are replicated."""
    dims = SPLITS[op.split("_")[0]][kind]
    found = {}
    for name, t in given.items():
        d = dims.get(name, dims.get(name.removeprefix("d")))
        broadcast = name == "mask" and isinstance(t, Tensor) and d is not None and t.shape[d] == 1
        if isinstance(t, Tensor) and d is not None and t.dim() > d and not broadcast:
            found[name] = d
    if op.startswith("e79"):  # a bias [n] is a parameter
        found = {k: d for k, d in found.items() if k not in ("b_s", "b_m") or given[k].dim() == 3}
    return found if found and all(given[k].shape[d] >= ranks for k, d in found.items()) else {}


def spread(given: dict[str, Any], dims: dict[str, int], mesh: Any) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return [
        distribute_tensor(t, mesh, [Shard(dims[k]) if k in dims else Replicate()]) if isinstance(t, Tensor) else t
        for k, t in given.items()
    ]


def outputs(out: Any) -> list[Any]:
    return [out] if isinstance(out, Tensor) else list(out)


def ops_are_sharded_without_communication(mesh: Any) -> None:
    """Every sample of every op, sharded in each way: whole results equal, local ones the op's on local arguments."""
    seen = {(op, kind) for op, case, args in samples() for kind in sharded_sample(op, case, args, mesh)}
    wanted = {(op, kind) for op, _, _ in samples() for kind in SPLITS[op.split("_")[0]]}
    assert wanted == seen, wanted - seen


def sharded_sample(op: str, case: str, args: Sequence[Any], mesh: Any) -> dict[str, bool]:
    """Checks a sample sharded in each way; returns whether all results have the bits of the unsharded op, by way."""
    args = placed(args, mesh)
    call = getattr(torch.ops.mhc_inductor, op).default
    given, plain = named(op, args), outputs(call(*args))
    found = {}
    for kind in SPLITS[op.split("_")[0]]:
        if dims := split_of(op, kind, given, mesh.size()):
            whole = _sharded(op, f"{case} {kind}", given, dims, mesh)
            assert all(map(close, whole, plain)), f"{op} {case} {kind}: errors {list(map(error, whole, plain))}"
            found[kind] = all(map(torch.equal, whole, plain))
    return found


def _sharded(op: str, case: str, given: dict[str, Any], dims: dict[str, int], mesh: Any) -> list[Tensor]:
    """Returns the whole results of an op on sharded arguments; checks what it communicates, and the local results."""
    from torch.distributed.tensor.debug import CommDebugMode

    call = getattr(torch.ops.mhc_inductor, op).default
    # Boundaries of packed sequences, and the blocks that a query sees, count positions of the whole tensor.
    packed = given.get("cu_seqlens_q") is not None and case.endswith(" queries")
    gathered = packed or (op == "selection_blocks" and case.endswith((" queries", " heads")))
    distributed = spread(given, dims, mesh)
    with CommDebugMode() as comm:
        got = outputs(call(*distributed))
    assert (comm.get_total_counts() > 0) == gathered, f"{op} {case}: {comm.get_comm_counts()}"
    where = f"{op} {case}: {[a.placements[0] for a in got]}"
    if not gathered:
        local = outputs(call(*[t.to_local() if isinstance(t, Tensor) else t for t in distributed]))
        assert all(torch.equal(a.to_local(), mine) for a, mine in zip(got, local, strict=True)), where
        assert not any(a.placements[0].is_replicate() for a in got if a.numel()), where
    return [a.full_tensor() for a in got]


def placed(args: Sequence[Any], mesh: Any) -> list[Any]:
    """Returns arguments with their tensors on the mesh's device."""
    return [t.to(mesh.device_type) if isinstance(t, Tensor) else t for t in args]


def other_placements_are_redistributed(mesh: Any) -> None:
    """The first argument of each op, sharded at each dimension or partial: the results stay what they are."""
    first = {op: (case, args) for op, case, args in reversed(samples())}
    assert first.keys() == sharding.TABLE.keys()
    for op, (case, args) in first.items():
        redistributed_sample(op, case, args, mesh)


def redistributed_sample(op: str, case: str, args: Sequence[Any], mesh: Any) -> None:
    """Checks a sample whose first tensor is sharded at each of its dimensions, or partial."""
    from torch.distributed.tensor import DTensor, Partial

    args = placed(args, mesh)
    call = getattr(torch.ops.mhc_inductor, op).default
    given, plain = named(op, args), outputs(call(*args))
    name, t = next((k, t) for k, t in given.items() if isinstance(t, Tensor))
    whole = spread(given, {}, mesh)
    part = t if mesh.get_local_rank() == 0 else torch.zeros_like(t)
    whole[list(given).index(name)] = DTensor.from_local(part, mesh, [Partial("sum")])
    for distributed in (whole, *(spread(given, {name: d}, mesh) for d in range(t.dim()) if t.shape[d] > 1)):
        for a, want in zip(outputs(call(*distributed)), plain, strict=True):
            assert close(a.full_tensor(), want), f"{op} {case} {name}: {a.placements}"


# --- public functions, with gradients -----------------------------------------------------------------------


def mhc_inputs(tokens: Sequence[int] = (3, 5), dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    n, width = 4, 16
    shapes = [(*tokens, n, width), (24, n * width), (3,), (24,), (n, width)]
    return [torch.randn(s, generator=g, dtype=torch.float64).mul(0.3).to(dtype) for s in shapes]


def mhc_layer(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor) -> Tensor:
    import mhc_inductor as mi

    h_in, h_post, h_res = mi.mhc_pre(x, phi, alpha, bias, gamma, sinkhorn_iters=2)
    return mi.mhc_post(x, torch.tanh(h_in), h_post, h_res, transpose_res=True)


def trained(fn: Callable[..., Any], args: Sequence[Tensor]) -> list[Tensor]:
    """Returns the outputs and the gradients of all floating-point arguments, as whole tensors."""
    from torch.distributed.tensor import DTensor

    def whole(t: Tensor) -> Tensor:
        return t.full_tensor() if isinstance(t, DTensor) else t

    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in args]
    outs = [t for t in outputs(fn(*leaves)) if t.is_floating_point()]
    sum((t.masked_fill(t == -torch.inf, 0) * t.masked_fill(t == -torch.inf, 0)).sum() for t in outs).backward()
    grads = [t.grad for t in leaves if t.requires_grad]
    assert all(g is not None for g in grads)
    return [whole(t).detach() for t in (*outs, *grads)]  # type: ignore[arg-type]


def same(fn: Callable[..., Any], args: Sequence[Tensor], placements: Sequence[Any], mesh: Any) -> None:
    from torch.distributed.tensor import distribute_tensor

    args = placed(args, mesh)
    want = trained(fn, args)
    got = trained(fn, [distribute_tensor(t, mesh, p) for t, p in zip(args, placements, strict=True)])
    errors = [error(a, b) for a, b in zip(got, want, strict=True)]
    assert max(errors) < TOLERANCE[args[0].dtype], errors


def mhc_trains(mesh: Any, dtype: torch.dtype = torch.float64) -> None:
    from torch.distributed.tensor import Replicate, Shard

    args = mhc_inputs(dtype=dtype)
    for placement in (Shard(0), Shard(1), Shard(-2), Shard(-1), Replicate()):
        same(mhc_layer, args, [[placement], *[[Replicate()]] * 4], mesh)
    # Parameters that are sharded themselves, as FSDP keeps them, are gathered.
    same(mhc_layer, args, [[Shard(0)], *[[Shard(0)]] * 4], mesh)


def e79_trains(mesh: Any, dtype: torch.dtype = torch.float64) -> None:
    from torch.distributed.tensor import Replicate, Shard

    import mhc_inductor as mi

    g = torch.Generator().manual_seed(4)
    args = [
        torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in ((5, 3, 16), (4,), (3, 4, 4), (3, 4, 4))
    ]

    def scan(kvqm: Tensor, b_s: Tensor, S0: Tensor, M0: Tensor) -> Any:
        return mi.e79_scan(kvqm, b_s, None, S0, M0)

    for dims in ((1, 0, 0), (0, 1, 2)):
        split = [[Shard(dims[0])], [Replicate()], [Shard(dims[1])], [Shard(dims[2])]]
        same(scan, args, split, mesh)


def selection_trains(mesh: Any, dtype: torch.dtype = torch.float64) -> None:
    from torch.distributed.tensor import Replicate, Shard

    import mhc_inductor as mi

    g = torch.Generator().manual_seed(5)
    shapes = ((2, 5, 3, 2, 8), (2, 3, 7, 8), (2, 3, 7, 6), (3, 2))
    q, k, v, sink = (torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)
    start = torch.randint(0, 6, (2, 5, 3, 2, 1), generator=g)
    ranges, indices = torch.cat([start, start + 2], -1), torch.randint(-1, 7, (2, 5, 3, 4), generator=g)

    def by_ranges(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, ranges: Tensor) -> Any:
        return mi.selection_attention(q, k, v, ranges, sink=sink, return_lse=True)

    def by_lists(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, indices: Tensor) -> Any:
        return mi.selection_attention(q, k, v, indices=indices, sink=sink, return_lse=True)

    whole = Replicate()
    for fn, which in ((by_ranges, ranges), (by_lists, indices)):
        for split in (
            (Shard(0), Shard(0), Shard(0), whole, Shard(0)),
            (Shard(1), whole, whole, whole, Shard(1)),
            (Shard(2), Shard(1), Shard(1), Shard(0), Shard(2)),
            (Shard(3), whole, whole, Shard(1), whole),
            (Shard(1), Shard(2), Shard(2), whole, Shard(1)),  # the keys' sequence is gathered
        ):
            same(fn, (q, k, v, sink, which), [[p] for p in split], mesh)


def absent_arguments_are_told_apart(mesh: Any) -> None:
    """Calls that differ only in which argument is None, one after the other: torch caches decisions."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._op_schema import OpSchema

    ops = torch.ops.mhc_inductor
    x, phi, alpha, bias, gamma = mhc_inputs()
    options = (1e-6, 1e-6, 2.0, 0.0, 0, 1e-6, "softmax")
    h_pre, h_post, _, h_mix, inv_rms = ops.mhc_coefficients(x, phi, alpha, bias, gamma, *options)
    up = torch.randn(h_pre.shape, generator=torch.Generator().manual_seed(6), dtype=h_pre.dtype)
    for ups in ((up, None, None), (None, up, None), (up, up, None)):
        args = (*ups, x, phi, alpha, bias, gamma, h_pre, h_post, h_mix, inv_rms, None, *options)
        given = named("mhc_coefficients_backward", args)
        want = ops.mhc_coefficients_backward(*args)
        dims = dict.fromkeys(("x", "h_pre", "h_post", "h_mix", "inv_rms"), 0)  # the gradients start replicated
        for a, b in zip(ops.mhc_coefficients_backward(*spread(given, dims, mesh)), want, strict=True):
            assert error(a.full_tensor(), b) < 1e-12
    # The cache that Python keeps, which torch uses where its C++ one cannot serve a call.
    op, spec = ops.mhc_coefficients_backward.default, distribute_tensor(up, mesh, [Replicate()])._spec
    info = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op]
    assert OpSchema(op, (spec, None), {}, schema_info=info) != OpSchema(op, (None, spec), {}, schema_info=info)
    kvqm, bias = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(7)), torch.ones(4)
    whole = distribute_tensor(bias, mesh, [Replicate()])
    parts = distribute_tensor(kvqm, mesh, [Shard(1)])
    for b_s, b_m in ((bias, None), (None, bias)):
        out, _, _, *saved = ops.e79_scan(kvqm, b_s, b_m, None, None, 2)
        args = [None if b is None else whole for b in (b_s, b_m)]
        got, _, _, *kept = ops.e79_scan(parts, *args, None, None, 2)
        assert torch.equal(got.full_tensor(), out)
        grads = ops.e79_scan_backward(out, None, None, kvqm, b_s, b_m, None, None, *saved, 2)
        theirs = ops.e79_scan_backward(got, None, None, parts, *args, None, None, *kept, 2)
        assert [g.placements[0].is_partial() for g in theirs[1:3]] == [b_s is not None, b_m is not None]
        assert all(close(a.full_tensor(), b) for a, b in zip(theirs, grads, strict=True))


def fewer_tokens_than_ranks_are_gathered(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard

    same(mhc_layer, mhc_inputs((1, 1)), [[Shard(1)], *[[Replicate()]] * 4], mesh)
    same(mhc_layer, mhc_inputs((0, 2)), [[Shard(0)], *[[Replicate()]] * 4], mesh)


def _refused(*args: Tensor) -> str:
    import mhc_inductor as mi

    try:
        mi.mhc_pre(*args)
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("no error")


def wrong_calls_raise_on_every_rank(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import mhc_inductor as mi

    x, phi, alpha, bias, gamma = mhc_inputs()
    whole = [distribute_tensor(t, mesh, [Replicate()]) for t in (phi, alpha, bias, gamma)]
    split = distribute_tensor(x, mesh, [Shard(0)])
    assert "mixed torch.Tensor and DTensor" in _refused(split, phi, *whole[1:])
    assert "mhc_pre: phi" in _refused(split, whole[0][:, :-1], *whole[1:])
    assert torch.isfinite(mi.mhc_pre(split, *whole)[0].full_tensor()).all()


# --- compiled models ----------------------------------------------------------------------------------------


def _compiled(fn: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    from tests.laws import Compiled

    torch._dynamo.reset()
    seen = Compiled()
    return torch.compile(fn, backend=seen.backend), seen


def formulas_on_dtensors_are_routed(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.utils.checkpoint import checkpoint

    from tests.laws import block, mhc_leaves

    names = list(mhc_leaves())

    def layer(*tensors: Tensor) -> Tensor:
        p = dict(zip(names, tensors, strict=True))
        return block(p["x"], p)

    for count, placement in ((5, Shard(0)), (6, Replicate())):
        leaves = mhc_leaves(tokens=count)
        args = [distribute_tensor(t, mesh, [placement if k == "x" else Replicate()]) for k, t in leaves.items()]
        compiled, seen = _compiled(layer)
        got, want = trained(compiled, args), trained(layer, list(leaves.values()))
        assert max(map(error, got, want)) < 1e-12
        assert seen.ops == {"mhc_pre": 1, "mhc_post": 1} and not seen.near and not seen.report.problems, seen
    compiled, seen = _compiled(lambda *tensors: checkpoint(layer, *tensors, use_reentrant=False))
    assert max(map(error, trained(compiled, args), want)) < 1e-12
    assert seen.ops == {"mhc_pre": 1, "mhc_post": 1} and not seen.report.problems, seen


def other_placements_of_results_stay_the_formulas(mesh: Any) -> None:
    """Streams sharded along n: the op would gather them, the formula's results are partial sums, so it is kept."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from tests.laws import block, mhc_leaves

    leaves = mhc_leaves()
    given = {k: distribute_tensor(t, mesh, [Shard(1) if k == "x" else Replicate()]) for k, t in leaves.items()}
    compiled, seen = _compiled(lambda p: block(p["x"], p))
    with torch.no_grad():
        got, want = compiled(given), block(given["x"], given)
    assert got.placements == want.placements and error(got.full_tensor(), want.full_tensor()) < 1e-12
    assert not seen.ops and not seen.report.problems
    assert "the op's result would be (Replicate(),) where the formula's is" in seen.near["mhc_pre"], seen.near


def local_tensors_in_a_formula_are_followed(mesh: Any) -> None:
    """A look at, then a write to, the local tensor of the streams in the middle of a formula that reads them later."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from tests.laws import block, mhc_leaves

    whole = {k: distribute_tensor(t, mesh, [Replicate()]) for k, t in mhc_leaves().items()}

    def model(x: Tensor, write: bool) -> tuple[Tensor, Tensor]:
        streams, seen = x * 1, []

        def touch(t: Tensor) -> Tensor:
            local = streams.redistribute(placements=[Shard(0)]).to_local()
            seen.append(local.mul_(2).sum() if write else local.sum())
            return t

        return block(streams, whole, {"h_pre": touch}), seen[0]

    x = distribute_tensor(mhc_leaves()["x"], mesh, [Shard(0)])
    for write in (False, True):
        compiled, seen = _compiled(lambda x, write=write: model(x, write))
        with torch.no_grad():
            got, want = compiled(x), model(x, write)
        assert error(got[0].full_tensor(), want[0].full_tensor()) < 1e-12 and error(got[1], want[1]) < 1e-12
        assert seen.ops["mhc_pre"] == (not write) and bool(seen.near) == write, (write, seen.ops, seen.near)
        assert not seen.report.problems, seen.report.problems


def explain_verifies_formulas_on_dtensors(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import mhc_inductor as mi
    from tests.laws import block, mhc_leaves

    given = {k: distribute_tensor(t, mesh, [Shard(0) if k == "x" else Replicate()]) for k, t in mhc_leaves().items()}
    report = mi.explain(lambda p: block(p["x"], p), given, verify=True)
    assert [(r.op, r.error is not None and r.error < 1e-9) for r in report.routed] == [
        ("mhc_pre", True),
        ("mhc_post", True),
    ], report


def a_recurrence_on_dtensors_is_routed(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from tests.laws import e79, e79_leaves

    names = list(e79_leaves())

    def scan(*tensors: Tensor) -> Any:
        outs, S, M = e79(dict(zip(names, tensors, strict=True)))
        return torch.stack(outs), S, M

    leaves = e79_leaves(batch=3)
    split = {"kvqm": Shard(1), "S": Shard(0), "M": Shard(0)}
    args = [distribute_tensor(t, mesh, [split.get(k, Replicate())]) for k, t in leaves.items()]
    compiled, seen = _compiled(scan)
    assert max(map(error, trained(compiled, args), trained(scan, list(leaves.values())))) < 1e-12
    assert seen.ops["e79_scan"] == 1 and not seen.report.problems, (seen.ops, seen.near, seen.report.problems)


def local_tensors_and_redistribution_are_kept(mesh: Any) -> None:
    """Formulas between from_local, redistribute and to_local, and a write to the local tensor of their input."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from tests.laws import block, mhc_leaves

    leaves = mhc_leaves(tokens=6)
    whole = {k: distribute_tensor(t, mesh, [Replicate()]) for k, t in leaves.items()}

    def model(x: Tensor, write: bool) -> tuple[Tensor, Tensor]:
        streams = DTensor.from_local(x * 1, mesh, [Shard(0)], run_check=False)
        y = block(streams, {**whole, "x": streams})
        if write:
            streams.to_local().mul_(2)
        z = block(y.redistribute(placements=[Replicate()]), whole)
        return y.to_local(), (z + streams).full_tensor()

    mine = leaves["x"].chunk(mesh.size())[mesh.get_local_rank()]
    for write in (False, True):
        compiled, seen = _compiled(lambda x, write=write: model(x, write))
        with torch.no_grad():
            got, want = compiled(mine), model(mine, write)
        assert all(map(torch.equal, [got[0].isfinite()], [want[0].isfinite()]))
        assert max(map(error, got, want)) < 1e-12, write
        assert not seen.report.problems, seen.report.problems
        assert seen.ops["mhc_pre"] == 2, (write, seen.ops, seen.near)


class Layer(nn.Module):
    """A hyper-connection written out, around a linear sublayer."""

    def __init__(self, n: int = 4, width: int = 16) -> None:
        super().__init__()
        from tests.laws import mhc_leaves

        p = mhc_leaves(n, width, torch.float64)
        self.n, self.w = n, nn.Linear(width, width, bias=False, dtype=torch.float64)
        for name in ("phi", "alpha", "bias", "gamma"):
            setattr(self, name, nn.Parameter(p[name]))

    def forward(self, x: Tensor) -> Tensor:
        from tests.laws import post, pre

        h_in, h_post, res = pre(x, {k: getattr(self, k) for k in ("phi", "alpha", "bias", "gamma")})
        return post(x, torch.tanh(self.w(h_in)), h_post, res)


def _model() -> nn.Module:
    torch.manual_seed(9)
    return nn.Sequential(Layer(), Layer())


def _stepped(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the output and the parameters after one step of SGD on the mean over the ranks' batches."""
    from torch.distributed.tensor import DTensor

    step = torch.optim.SGD(model.parameters(), 0.1)
    out = model(x)
    out.square().mean().backward()
    step.step()
    return [t.full_tensor().detach() if isinstance(t, DTensor) else t.detach() for t in model.parameters()]


def fsdp2_layers_are_routed(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    from tests.laws import normal

    x = normal(2 * mesh.size(), 3, 4, 16, seed=8)
    want = _stepped(_model(), x)
    model = _model()
    torch._dynamo.reset()
    from tests.laws import Compiled

    seen = Compiled()
    for layer in model:
        layer.compile(backend=seen.backend)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    got = _stepped(model, x.chunk(mesh.size())[mesh.get_local_rank()])
    assert max(map(error, got, want)) < 1e-12
    assert seen.ops["mhc_pre"] >= 1 and seen.ops["mhc_post"] >= 1 and not seen.report.problems, seen


def sequence_parallel_models_are_routed(mesh: Any) -> None:
    """All parameters as DTensors, the sublayer's weight in columns and rows, the streams sharded along the sequence."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from tests.laws import normal

    if torch.__version__ < "2.13":  # Dynamo of torch 2.11 cannot trace F.linear of these, whatever the backend
        return
    x = normal(2, 5, 4, 16, seed=8)
    want = _stepped(_model(), x)
    model = _model()
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            placement = Shard(0) if isinstance(module, nn.Linear) else Replicate()
            module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [placement])))
    compiled, seen = _compiled(model)
    got = _stepped(compiled, distribute_tensor(x, mesh, [Shard(1)]))
    assert max(map(error, got, want)) < 1e-12
    assert seen.ops["mhc_pre"] == 2 and seen.ops["mhc_post"] == 2, (seen.ops, seen.near, seen.report.problems)


# --- a mesh of two dimensions -------------------------------------------------------------------------------


def whole_mesh_of_two_dimensions(mesh: Any) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    import mhc_inductor as mi

    whole = [Replicate(), Replicate()]
    # The first op that this process calls is called in inference mode, which skips autograd.
    args = mhc_inputs((4, 5))
    with torch.inference_mode():
        parts = [distribute_tensor(t, mesh, p) for t, p in zip(args, [[Shard(0), Shard(1)], *[whole] * 4], strict=True)]
        h_in = torch.ops.mhc_inductor.mhc_pre(*parts, 1e-6, 1e-6, 2.0, 0.0, 0, 1e-6, "softmax")[0]
        assert tuple(h_in.placements) == (Shard(0), Shard(1))
        assert error(h_in.full_tensor(), mi.mhc_pre(*args)[0]) < 1e-12
    for split in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(1), Shard(1)], [Replicate(), Shard(0)]):
        same(mhc_layer, args, [split, *[whole] * 4], mesh)
    g = torch.Generator().manual_seed(5)
    q, k = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((2, 3, 1, 4, 8), (2, 1, 7, 8)))
    indices = torch.randint(0, 7, (2, 3, 1, 4), generator=g)

    def attend(q: Tensor, k: Tensor, indices: Tensor) -> Tensor:
        return mi.selection_attention(q, k, k, indices=indices, v_width=6)

    same(attend, (q, k, indices), [[Shard(0), Shard(3)], [Shard(0), Replicate()], [Shard(0), Replicate()]], mesh)
    dq = distribute_tensor(q.requires_grad_(), mesh, [Shard(0), Shard(3)])
    dk = distribute_tensor(k, mesh, [Shard(0), Replicate()]).requires_grad_()
    attend(dq, dk, distribute_tensor(indices, mesh, [Shard(0), Replicate()])).sum().backward()
    assert dk.grad.placements == (Shard(0), Partial("sum"))


def whole_empty_shards(mesh: Any) -> None:
    """Five tokens on four ranks: the last one has none."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    flat = init_device_mesh("cpu", (mesh.size(),))
    same(mhc_layer, mhc_inputs((1, 5)), [[Shard(1)], *[[Replicate()]] * 4], flat)


def whole_a_dead_rank_ends_in_an_error(mesh: Any) -> None:
    """The last check of its process group: one rank ends; the others get an error where they need it."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    flat = init_device_mesh("cpu", (mesh.size(),))
    args = mhc_inputs((1, 8))
    parts = [distribute_tensor(t, flat, [Shard(3) if i == 0 else Replicate()]) for i, t in enumerate(args)]
    if dist.get_rank() == mesh.size() - 1:
        raise SystemExit  # a normal end: what this rank said before still reaches the parent
    try:
        mhc_layer(*parts).full_tensor()
    except RuntimeError:
        return
    raise AssertionError("no error")


ONE = (
    ops_are_sharded_without_communication,
    other_placements_are_redistributed,
    mhc_trains,
    e79_trains,
    selection_trains,
    absent_arguments_are_told_apart,
    fewer_tokens_than_ranks_are_gathered,
    wrong_calls_raise_on_every_rank,
    formulas_on_dtensors_are_routed,
    a_recurrence_on_dtensors_is_routed,
    other_placements_of_results_stay_the_formulas,
    local_tensors_in_a_formula_are_followed,
    explain_verifies_formulas_on_dtensors,
    local_tensors_and_redistribution_are_kept,
    fsdp2_layers_are_routed,
    sequence_parallel_models_are_routed,
)
TWO = (whole_mesh_of_two_dimensions, whole_empty_shards, whole_a_dead_rank_ends_in_an_error)


def _rank(rank: int, shape: tuple[int, ...], path: str, names: Sequence[str], results: Any) -> None:
    import torch.distributed as dist

    import mhc_inductor  # noqa: F401  (before DTensor is imported: the ops become known to it later)

    torch.set_num_threads(1)
    world = torch.Size(shape).numel()
    store = dist.FileStore(path, world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=TIMEOUT)
    from torch.distributed.tensor import init_device_mesh

    mesh = init_device_mesh("cpu", shape)
    for name in names:
        results.put((rank, name, _told(globals()[name], mesh)))


def _told(check: Callable[[Any], None], mesh: Any) -> str:
    """Returns what went wrong in a check, or ""."""
    try:
        check(mesh)
    except Exception:
        return traceback.format_exc()
    return ""


def run(shape: tuple[int, ...], names: Sequence[str], seconds: float = 240) -> dict[str, list[str]]:
    """Runs checks on ranks of their own. Returns for each check what each rank said: "" or a traceback."""
    context, world = mp.get_context("spawn"), torch.Size(shape).numel()
    results, found = context.Queue(), dict[str, list[str]]({name: [] for name in names})
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder, "store"))
        ranks = [
            context.Process(target=_rank, args=(r, shape, path, names, results), daemon=True) for r in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            dead = "whole_a_dead_rank_ends_in_an_error" in names
            for _ in range(world * len(names) - dead):
                rank, name, trace = results.get(timeout=seconds)
                found[name].append(f"rank {rank}: {trace}" if trace else "")
        except queue.Empty:
            for told in found.values():
                told += ["no answer in time"] * (world - len(told))
        for process in ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
    return found


if __name__ == "__main__":
    chosen = sys.argv[1:] or [f.__name__ for f in ONE]
    for check, told in run((2, 2) if chosen[0].startswith("whole_") else (2,), chosen).items():
        print(check, "good" if not any(told) else "\n".join(told))
