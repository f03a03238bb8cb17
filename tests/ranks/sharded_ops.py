# SPDX-License-Identifier: Apache-2.0
"""Checks of every op on DTensors, with the samples of its tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from mhc_inductor.ops import sharding
from tests.ranks.sharded_tools import close, error, mhc_inputs, outputs, placed, spread
from tests.tools.each_commit import COMMIT


@functools.cache
def samples() -> list[tuple[str, str, tuple[Any, ...]]]:
    """Returns (op, id, arguments) of the samples of all ops in one dtype, the same on every rank."""
    from tests.oracles.samples import SAMPLES, sample

    torch.manual_seed(0)
    found = []
    for case in SAMPLES:
        name, variant = case.values
        if name != "selection_blocks" and not any(dtype in case.id for dtype in ("fp64", "bf16", "fp16", "low")):
            found.append((name, case.id, sample(name, **variant)))
    q, k = torch.randn(2, 8, 2, 2, 4), torch.randn(2, 2, 3, 4)
    found.append(("selection_blocks", "blocks", (q, k, torch.randn(2, 8, 2, 2), 0.5, 4, 2, 4, 3, 8)))
    return found


# For each family: which dimension of which arguments is one name. Written out here, independently of the table.
_TOKENS = ("x", "f_out", "h_post", "h_res", "h_pre", "h_mix", "inv_rms", "x_out", "x_acc", "h_in", "g", "grad")
_TOKENS += ("next_pre", "next_post", "next_res")
_QUERIES = dict.fromkeys(("q", "o", "out", "lse", "ranges", "indices", "bias", "mask", "segments_q"), 1)
_INDEX = dict.fromkeys(("q", "w", "limit", "mask", "segments_q", "scores", "indices", "attention_q", "lse", "loss"), 1)
_ALL = ("q", "k", "v", "o", "out", "lse", "ranges", "indices", "bias", "mask", "segments_q", "segments_k")
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
        "groups": {
            **dict.fromkeys(("q", "o", "out", "lse", "ranges", "indices", "bias", "mask"), 2),
            "k": 1,
            "v": 1,
            "sink": 0,
        },
        "heads": {**dict.fromkeys(("q", "o", "out", "lse"), 3), "sink": 1},
    },
    "index": {"batch": dict.fromkeys((*_INDEX, "k", "segments_k", "attention_k"), 0), "queries": _INDEX},
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


def ops_are_sharded_without_communication(mesh: Any) -> None:
    """Every sample of every op, sharded in each way: whole results equal, local ones the op's on local arguments."""
    run = _first_of_each_way(mesh.size()) if COMMIT else samples()
    seen = {(op, kind) for op, case, args in run for kind in sharded_sample(op, case, args, mesh)}
    wanted = {(op, kind) for op, _, _ in samples() for kind in SPLITS[op.split("_")[0]]}
    assert wanted == seen, wanted - seen


def _first_of_each_way(ranks: int) -> list[tuple[str, str, tuple[Any, ...]]]:
    """Returns the samples that are the first of their op to be sharded in some way."""
    found, seen = [], set[tuple[str, str]]()
    for op, case, args in samples():
        ways = {(op, kind) for kind in SPLITS[op.split("_")[0]] if split_of(op, kind, named(op, args), ranks)}
        if not ways <= seen:
            found.append((op, case, args))
            seen |= ways
    return found


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


def other_placements_are_redistributed(mesh: Any) -> None:
    """The first argument of each op, sharded at each dimension or partial: the results stay what they are."""
    first = {op: (case, args) for op, case, args in reversed(samples())}
    assert first.keys() == sharding.TABLE.keys()
    for op, (case, args) in first.items():
        redistributed_sample(op, case, args, mesh)


def redistributed_sample(op: str, case: str, args: Sequence[Any], mesh: Any) -> None:
    """Checks a sample whose first tensor is sharded at each of its dimensions, or partial."""
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


def absent_arguments_are_told_apart(mesh: Any) -> None:
    """Calls that differ only in which argument is None, one after the other: torch caches decisions."""
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
