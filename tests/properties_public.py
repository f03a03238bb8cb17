# SPDX-License-Identifier: Apache-2.0
"""Random inputs of what is public beyond the ops: ranges, lists, modules, options. Run by ``tests/properties.py``."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import test_nn_selection
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import mhc_inductor
from mhc_inductor.nn import (
    E79Cell,
    E79Layer,
    HyperConnection,
    HyperHead,
    NativeSparseAttention,
    SelectionAttention,
    SparseIndexer,
    expand,
)
from tests import properties
from tests.oracles import index as helpers_index
from tests.oracles import index_loss
from tests.oracles import lists as helpers_lists
from tests.oracles import mhc as helpers_mhc
from tests.oracles import selection as helpers_selection
from tests.oracles import single_pass as helpers_single_pass
from tests.properties import DTYPE, INTEGERS, LEAD, Call, Property, close, drawn, in_documents, laid_out

F64 = torch.float64
WIDE = st.sampled_from([torch.float64, torch.float32])


def _drawn(seed: int, *shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def _scrambled(module: nn.Module, seed: int) -> nn.Module:
    """Adds noise to parameters that start at special values."""
    with torch.no_grad():
        for at, p in enumerate(module.parameters()):
            p.add_(0.3 * _drawn(seed + at, *p.shape).to(p.dtype) / max(p.shape[-1], 1) ** 0.5)
    return module


# ---- functions


def blocks_to_ranges(seed: int, B: int, S: int, more: int, G: int, k: int, size: int, packed: bool, **of: Any) -> Call:
    g = torch.Generator().manual_seed(seed)
    keys, B = S + more, 1 if packed else B
    blocks = laid_out(torch.randint(-2, keys + 3, (B, S, G, k), generator=g).to(of["dtype"]), random.Random(seed))
    arguments = {"block_indices": blocks, "block_size": size, "S_kv": keys, "causal": of["causal"]}
    ends, key_ends = [0, S], [0, keys]
    if packed:
        ends, key_ends = [0, S // 2, S], [0, S // 2 + more // 2, keys]
        arguments |= {"cu_seqlens_q": torch.tensor(ends), "cu_seqlens_k": torch.tensor(key_ends)}
    got = mhc_inductor.blocks_to_ranges(**arguments)
    assert got.shape == (B, S, G, k, 2) and got.dtype is torch.int32
    for b, s, n, i in torch.cartesian_prod(*(torch.arange(z) for z in got.shape[:4])).tolist():
        at = 0 if s < ends[1] or not packed else 1
        length = key_ends[at + 1] - key_ends[at]
        own = s - ends[at] + length - (ends[at + 1] - ends[at])
        block = int(blocks[b, s, n, i])
        named = {t for t in range(block * size, (block + 1) * size) if block >= 0 and t < length}
        want = {t for t in named if t <= own or not of["causal"]}
        start, end = got[b, s, n, i].tolist()
        assert {t for t in range(start, end) if 0 <= t < length} == want, (block, start, end)
    return Call(mhc_inductor.blocks_to_ranges, arguments)


def selection_lists(seed: int, documents: bool, return_lse: bool, masked: bool, **sizes: Any) -> Call:
    """The ops of lists have no public functions of their names."""
    masked = masked and not documents
    if documents or masked or sizes["segments"] or sizes["bias"] is None:
        sizes |= {"bias": None, "repeats": False}
    if documents:
        sizes |= in_documents(sizes["S"], sizes["S_kv"])
    if sizes["shared"]:
        sizes["Dv"] = min(sizes["Dv"], sizes["Dk"])
    made = properties.any_strides(helpers_lists.make_inputs(**sizes, seed=seed), seed)
    shared = {"v": made["k"], "v_width": made["v_width"]} if made["v"] is None else {"v_width": None}
    arguments = {**made, "return_lse": return_lse, **shared}
    if masked:
        hidden = _drawn(seed, *made["indices"].shape[:3], made["k"].shape[2]) < 0
        arguments["mask"] = laid_out(~hidden, random.Random(seed))
        rows = zip(made["indices"].flatten(0, 2).tolist(), hidden.flatten(0, 2).tolist(), strict=True)
        kept = [[-1 if 0 <= t < len(row) and row[t] else t for t in keys] for keys, row in rows]
        made["indices"] = torch.tensor(kept, dtype=torch.int64).view(made["indices"].shape)
    got = mhc_inductor.selection_attention(**arguments)
    o, lse = got if isinstance(got, tuple) else (got, None)
    named = {"o": o} | ({"lse": lse} if return_lse else {})
    close(named, helpers_lists.oracle(made), sizes["dtype"])
    return Call(mhc_inductor.selection_attention, arguments)


def started(seed: int, lead: tuple[int, ...], width: int, n: int, dtype: torch.dtype) -> Call:
    x = laid_out(_drawn(seed, *lead, width, dtype=dtype), random.Random(seed))
    got = expand(x, n)
    assert got.shape == (*lead, n, width) and got.is_contiguous() and got.dtype is dtype
    assert all(torch.equal(stream, x) for stream in got.unbind(-2))
    return Call(expand, {"x": x, "n": n})


# ---- modules


class _Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


def hyper_connection(seed: int, lead: tuple[int, ...], dtype: torch.dtype, first: bool, **options: Any) -> Call:
    x = laid_out(_drawn(seed, *lead, options["n"], options["dim"], dtype=dtype), random.Random(seed))
    h_pre = None if first else _drawn(seed + 1, *lead, options["n"]).float()
    options["sublayer"] = _Tanh()
    torch.manual_seed(seed)
    module = _scrambled(HyperConnection(**options), seed)
    given = (x, h_pre) if options["single_pass"] else x
    made = {"x": x, **{k: getattr(module, k) for k in ("phi", "alpha", "bias", "gamma")}}
    names = (*helpers_mhc.PRE_OPTIONS, "norm_form")
    exact = helpers_mhc.oracle_pre(made, options={k: getattr(module, k) for k in names})
    if options["single_pass"]:
        got, next_pre = module(given)
        collapsed = x[..., 0, :] if h_pre is None else (h_pre.double().unsqueeze(-1) * x.double()).sum(-2).to(dtype)
        coefficients = helpers_single_pass.oracle_coefficients(made, options={k: getattr(module, k) for k in names})
        close({"h_pre": next_pre}, coefficients, dtype)
    else:
        got, collapsed = module(given), exact["h_in"].to(dtype)
    h_res = exact["h_res"] if options["residual"] else None
    parts = {"x": x, "f_out": collapsed.tanh(), "h_post": exact["h_post"], "h_res": h_res}
    close({"x_out": got}, helpers_mhc.oracle_post(parts, options["transpose_res"]), dtype)
    return _module_call(HyperConnection, options, {"x": given})


def hyper_head(seed: int, lead: tuple[int, ...], dtype: torch.dtype, **options: Any) -> Call:
    x = laid_out(_drawn(seed, *lead, options["n"], options["dim"], dtype=dtype), random.Random(seed))
    torch.manual_seed(seed)
    module = _scrambled(HyperHead(**options), seed)
    made = {"x": x, **{k: getattr(module, k) for k in ("phi", "alpha", "bias", "gamma")}}
    exact = helpers_mhc.oracle_head(made, options={k: getattr(module, k) for k in ("norm_eps", "hc_eps", "norm_form")})
    close({"h_in": module(x)}, exact, dtype)
    return _module_call(HyperHead, options, {"x": x})


def _module_call(
    kind: Callable[..., nn.Module], options: Mapping[str, Any], inputs: Mapping[str, Any], **more: Any
) -> Call:
    """Returns what makes a module of its options and calls it, as one function of all of their arguments."""

    def make_and_call(**given: Any) -> Any:
        module = kind(**{k: v for k, v in given.items() if k not in inputs})
        return module(**{k: v for k, v in given.items() if k in inputs})

    return Call(make_and_call, {**options, **inputs}, **more)


def _in_parts(run: Callable[[Tensor, Any], tuple[Tensor, Any]], x: Tensor, cuts: Sequence[int], dim: int) -> Tensor:
    """Returns the results of a sequence that goes on from the state of each part, with parts of at least one step."""
    parts, state = [], None
    places = sorted({c for c in cuts if 0 < c < x.shape[dim]})
    for part in torch.tensor_split(x, places, dim):
        y, state = run(part, state)
        parts.append(y)
    return torch.cat(parts, dim)


def e79_cell(seed: int, T: int, B: int, cuts: Sequence[int], **options: Any) -> Call:
    torch.manual_seed(seed)
    module = _scrambled(E79Cell(**options), seed)
    x = laid_out(_drawn(seed, T, B, options["dim"], dtype=options["dtype"]), random.Random(seed))
    exact = copy.deepcopy(module).double()(x.double())
    close(dict(zip("oSM", module(x), strict=True)), dict(zip("oSM", exact, strict=True)), torch.float32)

    def run(part: Tensor, state: Any) -> tuple[Tensor, Any]:
        out, *state = module(part, *(state or ()))
        return out, state

    close({"o": _in_parts(run, x, cuts, 0)}, {"o": exact[0]}, torch.float32)
    return _module_call(E79Cell, options, {"x": x}, untyped=True)


def e79_layer(seed: int, T: int, B: int, cuts: Sequence[int], **options: Any) -> Call:
    torch.manual_seed(seed)
    module = _scrambled(E79Layer(**options), seed)
    x = laid_out(_drawn(seed, B, T, options["dim"], dtype=options["dtype"]), random.Random(seed))
    wide = copy.deepcopy(module).double()
    h = wide.in_proj(x.double())
    if wide.conv1d is not None:
        h = wide.conv1d(nn.functional.pad(h.transpose(1, 2), (options["conv"] - 1, 0))).transpose(1, 2)
    exact = wide.out_proj(wide.cell(nn.functional.silu(h).transpose(0, 1))[0].transpose(0, 1))
    close({"y": module(x)[0], "z": _in_parts(module, x, cuts, 1)}, {"y": exact, "z": exact}, torch.float32)
    steps = _in_parts(lambda part, s: (lambda y, s: (y.unsqueeze(1), s))(*module.step(part[:, 0], s)), x, range(T), 1)
    close({"y": steps}, {"y": exact}, torch.float32)
    return _module_call(E79Layer, options, {"x": x}, untyped=True)


def selection_module(seed: int, form: str, sink: bool, one: bool, size: int, **sizes: Any) -> Call:
    """Ranges, blocks or lists, the same of all groups (``one``) or not."""
    made = helpers_selection.make_inputs(**sizes, kind="odd", seed=seed)
    q, k, v = (laid_out(made[n], random.Random(seed + i)) for i, n in enumerate("qkv"))
    options = {"groups": sizes["G"], "heads": sizes["h"], "sink": sink}
    options["block_size"] = size if form == "blocks" else None
    module = _scrambled(SelectionAttention(**options), seed)
    g = torch.Generator().manual_seed(seed)
    chosen = torch.randint(-1, sizes["S_kv"] + 1, (sizes["B"], sizes["S"], sizes["G"], 3), generator=g)
    made["sink"], inputs = module.sink, {"q": q, "k": k, "v": v}
    if form == "lists":
        chosen = chosen[:, :, :1] if one else chosen
        inputs["indices"] = chosen
        whole = chosen.expand(-1, -1, sizes["G"], -1)
        inside = (whole >= 0) & (whole < sizes["S_kv"])
        made["ranges"] = torch.stack((whole, torch.where(inside, whole + 1, whole)), -1)
    elif form == "blocks":
        inputs["selection"] = chosen
        made["ranges"] = mhc_inductor.blocks_to_ranges(chosen, size, sizes["S_kv"])
    else:
        inputs["selection"] = made["ranges"]
    close({"o": module(**inputs)}, helpers_selection.oracle(made), sizes["dtype"])
    return _module_call(SelectionAttention, options, inputs, inner=("ranges", "block_indices"))


def indexer(seed: int, topk: int, scale: float | None, causal: bool, **sizes: Any) -> Call:
    made = tuple(laid_out(t, random.Random(seed)) for t in helpers_index.make_inputs(**sizes, seed=seed))
    q, k, _ = made
    s, t = q.shape[1], k.shape[1]
    options = {"topk": topk, "scale": scale, "causal": causal}
    limit = (torch.arange(1, s + 1) + t - s).expand(q.shape[0], s) if causal else None
    got = SparseIndexer(**options)(*made)
    assert got.shape == (q.shape[0], s, 1, min(topk, t))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    helpers_index.check_topk(got[:, :, 0], made, min(topk, t), factor, (limit, None, None, None))
    return _module_call(SparseIndexer, options, dict(zip("qkw", made, strict=True)))


def indexer_loss(seed: int, reduction: str, **sizes: Any) -> Call:
    *args, scale, attention_scale = index_loss.make(**sizes, seed=seed)
    args = [laid_out(a, random.Random(seed)) for a in args]
    q, k, w, listed, attention_q, attention_k, lse = args
    inputs = {"q": q, "k": k, "w": w, "indices": listed.unsqueeze(2), "attention_q": attention_q}
    inputs |= {"attention_k": attention_k, "lse": lse, "attention_scale": attention_scale, "reduction": reduction}
    got = SparseIndexer(3, scale=scale).loss(**inputs)
    each = index_loss.dense(*args, scale, attention_scale)
    queries = ((listed >= 0) & (listed < k.shape[1])).any(-1).sum().clamp(min=1)
    want = {"none": each, "sum": each.sum(), "mean": each.sum() / queries}[reduction]
    error = float((got.double() - want).abs().max()) if got.numel() else 0.0
    assert got.shape == want.shape and error <= 1e-5 * (1 + each.numel()), error
    return Call(SparseIndexer(3, scale=scale).loss, inputs)


def native(seed: int, S: int, cuts: Sequence[int], strides: Sequence[int], rope: bool, **options: Any) -> Call:
    stride, compress, block = strides
    options |= {"stride": stride, "compress": compress * stride, "block_size": block * stride}
    options |= {"rope": 100.0 if rope else None, "dim": 12, "heads": 4, "head_dim": 4, "dtype": F64}
    torch.manual_seed(seed)
    module = _scrambled(NativeSparseAttention(**options), seed)
    x = _drawn(seed, 1, S, 12)
    exact = test_nn_selection.naive(module, x)

    def run(part: Tensor, cache: Any) -> tuple[Tensor, Any]:
        return module(part, cache, return_cache=True)

    close({"y": module(x), "z": _in_parts(run, x, cuts, 1)}, {"y": exact, "z": exact}, F64)
    return _module_call(NativeSparseAttention, options, {"x": x}, untyped=True)


# ---- arguments that are no tensors


def options(seed: int, verify: bool, empty_rows: str, profile_scopes: bool) -> Call:
    def enabled(**given: Any) -> None:
        try:
            mhc_inductor.enable(**given)
        finally:
            mhc_inductor.disable()

    arguments = {"verify": verify, "empty_rows": empty_rows, "profile_scopes": profile_scopes}
    enabled(**arguments)
    return Call(enabled, arguments)


@functools.cache
def _program() -> torch.export.ExportedProgram:
    return torch.export.export(_Tanh(), (torch.ones(2),))


def exported(seed: int, verify: bool, empty_rows: str) -> Call:
    arguments = {"program": _program(), "verify": verify, "empty_rows": empty_rows}
    routed = mhc_inductor.route_exported(**arguments)
    assert routed is not _program() and torch.equal(routed.module()(torch.ones(2)), torch.ones(2).tanh())
    return Call(mhc_inductor.route_exported, arguments)


@functools.cache
def _compiled() -> Any:
    return torch.compile(nn.Linear(3, 2), backend="eager")


def warmed(seed: int, rows: Sequence[int], by_name: bool, backward: bool) -> Call:
    model, inputs = _compiled(), [torch.ones(n, 3) for n in rows]
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    arguments = {"model": model, "shapes": [{"input": x} if by_name else (x,) for x in inputs], "backward": backward}
    assert len(mhc_inductor.warmup(**arguments).shapes) == len(rows)
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    return Call(mhc_inductor.warmup, arguments)


_SIZE = st.integers(1, 9)
_CUTS = st.lists(st.integers(1, 12), max_size=3)
_OPTIONS = drawn(verify=bool, empty_rows=["exact", "zero"])
_STREAMS = drawn(lead=LEAD, dim=(16, 24), n=(2, 5), gamma=bool, norm_form=["inside", "outside"], dtype=DTYPE)
_CELL = drawn(T=(1, 10), B=(0, 2), dim=_SIZE, n_state=(1, 6), bias=["none", "fixed", "input"], dtype=WIDE, cuts=_CUTS)
_LOSS = {k: v for k, v in properties.PROPERTIES["index_loss"][1].items() if k != "dtype"}
_LISTS = properties.PROPERTIES["selection_list_attention"][1]
_INDEX = {k: v for k, v in properties.PROPERTIES["index_topk"][1].items() if k != "kind"}

PROPERTIES: Mapping[str, Property] = {
    "blocks_to_ranges": (
        blocks_to_ranges,
        drawn(B=(0, 2), S=(0, 6), more=(0, 9), G=(1, 2), k=(0, 3), size=(1, 5))
        | drawn(packed=bool, causal=bool, dtype=INTEGERS),
    ),
    "selection_attention": (
        selection_lists,
        _LISTS | drawn(bias=[None, "normal", "rows"], repeats=bool, return_lse=bool, masked=bool),
    ),
    "nn.expand": (started, drawn(lead=LEAD, width=(0, 9), n=_SIZE, dtype=DTYPE)),
    "nn.HyperConnection": (
        hyper_connection,
        _STREAMS | properties.ITERATIONS | drawn(transpose_res=bool, residual=bool, single_pass=bool, first=bool),
    ),
    "nn.HyperHead": (hyper_head, _STREAMS),
    "nn.E79Cell": (e79_cell, _CELL),
    "nn.E79Layer": (e79_layer, _CELL | drawn(inner=st.none() | _SIZE, conv=(0, 4))),
    "nn.SelectionAttention": (
        selection_module,
        drawn(form=["ranges", "blocks", "lists"], sink=bool, one=bool, size=(1, 4), B=(0, 2), S=(0, 6), S_kv=(6, 13))
        | drawn(G=(1, 2), h=(1, 3), Dk=_SIZE, Dv=_SIZE, dtype=DTYPE),
    ),
    "nn.SparseIndexer": (indexer, _INDEX | drawn(topk=(1, 21), scale=st.none() | st.floats(0, 2), causal=bool)),
    "nn.SparseIndexer.loss": (indexer_loss, _LOSS | drawn(dtype=WIDE, reduction=["mean", "sum", "none"])),
    "nn.NativeSparseAttention": (
        native,
        drawn(S=(1, 14), cuts=_CUTS, strides=st.tuples(*[st.integers(1, 3)] * 3), groups=[1, 2, 4])
        | drawn(value_dim=st.none() | st.integers(1, 5), top_k=(3, 5), window=(1, 6), rope=bool),
    ),
    "enable": (options, _OPTIONS | drawn(profile_scopes=bool)),
    "route_exported": (exported, _OPTIONS),
    "warmup": (warmed, drawn(rows=st.lists(st.integers(1, 4), max_size=3), by_name=bool, backward=bool)),
}
"""Of each public function or module what checks a case, and what is drawn for it."""

WITHOUT = {
    "ANY_SEGMENT": "a number",
    "IndexStore": "a container of tensors: tests/test_replay_eager.py gives it each kind of wrong tensor",
    "checkpointed_indices": "takes nothing; tests/test_replay_eager.py and tests/test_replay.py",
    "recorded_indices": "a context around a model's call: tests/test_replay_eager.py and tests/test_replay.py",
    "replayed_indices": "a context around a model's call: tests/test_replay_eager.py and tests/test_replay.py",
    "OpCounts": "what count_ops yields; its bad arguments are in tests/test_op_counts.py",
    "count_ops": "takes nothing; tests/test_op_counts.py compares the counts of every op's samples with their tensors",
    "counters": "takes nothing; returns counts",
    "decompositions": "takes nothing; tests/test_export.py runs each formula of the table",
    "disable": "takes nothing; is drawn with enable",
    "distributed": "a module whose functions take a group of ranks: tests/test_distributed.py compares them with one process",
    "explain": "gives its arguments to the model; compiles, some seconds a case: tests/test_explain.py",
    "nn": "a module: each of its names is here by itself",
    "nn.CONVENTIONS": "a table of options; each is drawn with nn.HyperConnection",
    "nn.E79State": "the state that nn.E79Layer returns and is drawn with",
    "nn.NSACache": "the cache that nn.NativeSparseAttention returns and is drawn with",
    "ops": "a module that is imported for its ops",
    "register_attention": "takes nothing; tests/test_attention_interface.py runs models with it",
    "op_scopes": "names the ops in a profiler's trace: tests/test_op_counts.py",
    "ops_to_save": "takes nothing; tests/test_checkpoint_policies.py",
}
"""Public names without a property, and why."""
