# SPDX-License-Identifier: Apache-2.0
"""Arguments of every op, in variants: what the contract of the ops is tested with, on one device or several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mhc_inductor.ops import registry
from mhc_inductor.ops.dims import results, source_of
from tests.oracles import e79, index, index_loss, lists, masks, mhc, selection, single_pass
from tests.oracles.op_contract import op, outputs

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Named = Mapping[str, Any]


def _mhc(
    make: Callable[..., Named],
    lead: tuple[int, ...] = (2, 3),
    n: int = 4,
    width: int = 16,
    dtype: torch.dtype = F32,
    transpose: bool = True,
    iters: int = 0,
    form: str = "softmax",
    **made: Any,
) -> Named:
    inputs = make(lead, n, width, dtype, **made)
    options = {**mhc.PRE_OPTIONS, "post_eps": 0.01, "sinkhorn_iters": iters, "sinkhorn_form": form}
    options |= {"transpose_res": transpose, "iters": iters, "eps": 1e-6, "form": form}
    return {"h_pre": inputs.get("h_post"), **inputs, **options}


def _scan(T: int = 5, B: int = 2, n: int = 3, segment: int = 2, **made: Any) -> Named:
    return {**e79.make_inputs(T, B, n, **{"dtype": F32, **made}), "segment": segment}


def _attention(make: Callable[..., Named], scale: float, **made: Any) -> Named:
    return {**make(**{"kind": "empty", "dtype": F32, "h": 2, "Dk": 4, **made}), "scale": scale}


def _index(kind: str = "causal", topk: int = 4, seed: int = 0, **made: Any) -> Named:
    q, k, w = index.make_inputs(seed=seed, **made)
    visible = zip(("limit", "mask", "segments_q", "segments_k"), index.visibility(kind, q, k, seed + 1), strict=True)
    return {"q": q, "k": k, "w": w, "topk": topk, "scale": 0.5, **dict(visible)}


def _of_positions(name: str, make: Callable[..., Sequence[Any]], **made: Any) -> Named:
    return dict(zip(registry.argument_names(name), make(**made), strict=True))


MADE: dict[str, Callable[..., Named]] = {
    **dict.fromkeys(("mhc_pre", "mhc_coefficients"), functools.partial(_mhc, mhc.make_inputs)),
    "mhc_head": functools.partial(_mhc, mhc.make_inputs, head=True),
    "mhc_post": functools.partial(_mhc, mhc.make_post_inputs, transpose=False),
    "mhc_collapse": functools.partial(_mhc, mhc.make_post_inputs),
    "mhc_sinkhorn": lambda dtype=F32, **v: _mhc(mhc.make_post_inputs, dtype=dtype, h_dtype=dtype, **{"iters": 3, **v}),
    "mhc_post_pre": functools.partial(_mhc, mhc.make_fused_inputs),
    "mhc_post_head": functools.partial(_mhc, mhc.make_fused_inputs, head=True),
    "mhc_single_pass": functools.partial(_mhc, single_pass.make_inputs),
    "e79_scan": _scan,
    "selection_attention": functools.partial(_attention, selection.make_inputs, 0.5, S=5),
    "selection_list_attention": functools.partial(_attention, lists.make_inputs, 0.4),
    "selection_entry_attention": functools.partial(_attention, lists.make_inputs, 0.4, bias="rows"),
    "selection_mask_attention": functools.partial(_attention, masks.make_inputs, 0.4),
    **dict.fromkeys(("index_scores", "index_topk", "index_topk_scores"), _index),
    "index_loss": functools.partial(_of_positions, "index_loss", index_loss.make),
    "selection_blocks": functools.partial(_of_positions, "selection_blocks", selection.choice),
}
"""Of each op what makes its arguments by name, others among them."""


def named(name: str, **variant: Any) -> dict[str, Any]:
    """Returns the arguments of an op that is no backward op, by name."""
    made = MADE[name](**variant)
    return {a: made[a] for a in registry.argument_names(name) if a in made}


def sample(name: str, drop: Sequence[int] = (), acc: bool = False, **variant: Any) -> tuple[Any, ...]:
    """Returns the arguments of an op; of a backward op without the gradients ``drop``, with ``dx_acc`` if ``acc``."""
    forward = name.removesuffix("_backward")
    args = tuple(named(forward, **variant).values())
    return args if name == forward else backward(forward, args, drop, acc)


def backward(name: str, args: Sequence[Any], drop: Sequence[int] = (), acc: bool = False) -> tuple[Any, ...]:
    """Returns normal gradients of the first results of op ``name``, then its arguments and results, as they are named."""
    out = outputs(op(name)(*args))
    given = dict(zip(results(name), out, strict=True)) | dict(zip(registry.argument_names(name), args, strict=False))
    given["dx_acc"] = torch.randn_like(args[0]) if acc else None
    names = registry.argument_names(f"{name}_backward")
    count = next(i for i, a in enumerate(names) if a in given)
    ups = [None if k in drop else torch.randn_like(t) for k, t in enumerate(out[:count])]
    return (*ups, *(given[a] for a in names[count:] if a in given))


def trainable(name: str, args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the arguments as leaves, those that have a gradient requiring one."""
    taught = {source_of(r) for r in results(f"{name}_backward")} if f"{name}_backward" in registry.REFERENCE else ()
    named = zip(registry.argument_names(name), args, strict=False)
    return tuple(a.detach().requires_grad_() if n in taught and isinstance(a, Tensor) else a for n, a in named)


_PRE: Mapping[str, Named] = {
    "full": {},
    "plain": {"gamma": False},
    "2n": {"full": False},
    "softmax": {"iters": 3},
    "exp_bf16": {"iters": 3, "form": "exp", "dtype": BF16},
    "exp_eps": {"iters": 3, "form": "exp_eps"},
    "bf16_params": {"dtype": BF16, "param_dtype": BF16, "gamma": False},
    "fp64": {"dtype": F64, "iters": 2},
}
_FUSED: Mapping[str, Named] = {
    "full": {"iters": 2},
    "2n_none": {"full": False, "residual": False, "gamma": False},
    "bf16": {"dtype": BF16, "transpose": False, "gamma": False},
    "fp64": {"dtype": F64, "iters": 2},
}
_PACKED = {"B": 1, "S": 9, "S_kv": 9, "lengths": (4, 0, 3)}
_INDEX: Mapping[str, Named] = {
    **{kind: {"kind": kind} for kind in index.KINDS},
    "fp64": {"dtype": F64},
    "bf16": {"dtype": BF16, "kind": "everything"},
    "fp16-weights": {"dtype": F16, "w_dtype": F16},
    "one_query": {"S": 1},
}
VARIANTS: Mapping[str, Mapping[str, Named]] = {
    **dict.fromkeys(("mhc_pre", "mhc_coefficients"), _PRE),
    "mhc_head": {"plain": {}, "fp64": {"dtype": F64}, "bf16": {"gamma": False, "dtype": BF16}},
    "mhc_post": {
        "plain": {},
        "fp64": {"dtype": F64},
        "bf16": {"dtype": BF16, "transpose": True},
        "none": {"residual": False},
        "bf16_none": {"dtype": BF16, "residual": False},
    },
    **dict.fromkeys(("mhc_post_pre", "mhc_post_head", "mhc_single_pass"), _FUSED),
    "mhc_collapse": {
        "fp32": {},
        "fp64": {"dtype": F64},
        "bf16": {"dtype": BF16},
        "low": {"dtype": BF16, "h_dtype": BF16},
    },
    "mhc_sinkhorn": {
        "plain": {},
        "fp64": {"dtype": F64},
        "0": {"iters": 0},
        "exp": {"form": "exp"},
        "exp_bf16": {"form": "exp", "dtype": BF16},
        "exp_eps": {"form": "exp_eps"},
    },
    "e79_scan": {
        "fixed": {},
        "none": {"bias": "none"},
        "input": {"bias": "input"},
        "mixed_fp64": {"bias": ("none", "input"), "dtype": F64},
        "fp64": {"bias": "input", "dtype": F64},
        "bf16": {"dtype": BF16},
        "fp32_biases": {"dtype": BF16, "bias": "input", "bias_dtype": F32},
        "zero_state": {"state": False},
        "one_step": {"T": 1, "segment": 1},
        "long_segment": {"T": 4, "segment": 9},
        "no_checkpoints": {"segment": 0},
    },
    "selection_attention": {
        "plain": {},
        "sink": {"sink": True},
        "fp64": {"dtype": F64, "sink": True},
        "bf16_int64": {"dtype": BF16, "sink": True, "range_dtype": torch.int64},
        "bf16_sink": {"dtype": F16, "sink": True, "sink_dtype": BF16},
        "packed": _PACKED,
        "packed_keys": {**_PACKED, "S_kv": 11, "key_lengths": (6, 1, 4), "sink": True},
        "Dk_not_Dv": {"Dv": 3, "strided": True},
        "one_query": {"S": 1, "S_kv": 9},
        "no_ranges": {"r": 0},
        "segments": {"S_kv": 21, "segments": "mixed", "sink": True},
        "packed_segments": {**_PACKED, "segments": "mixed", "segment_dtype": torch.int64},
    },
    "selection_list_attention": {
        "plain": {},
        "sink": {"sink": True, "kind": "odd"},
        "shared": {"shared": True, "Dv": 3, "strided": True},
        "fp64": {"dtype": F64, "sink": True, "segments": True},
        "bf16_int64": {"dtype": BF16, "sink": True, "index_dtype": torch.int64, "segments": True, "shared": True},
        "packed": _PACKED,
        "packed_keys": {**_PACKED, "S_kv": 11, "key_lengths": (6, 1, 4), "sink": True, "segments": True},
        "Dk_not_Dv": {"Dv": 3},
        "one_query": {"S": 1, "S_kv": 9},
        "no_keys_listed": {"n": 0},
        "no_keys": {"S_kv": 0},
    },
    "selection_entry_attention": {
        "plain": {"sink": True, "kind": "odd"},
        "repeats": {"repeats": True, "kind": "odd", "shared": True, "Dv": 3, "strided": True},
        "fp64": {"dtype": F64, "sink": True, "kind": "odd", "repeats": True},
        "bf16": {"dtype": BF16, "bias_dtype": BF16, "index_dtype": torch.int64, "kind": "odd"},
        "no_keys": {"bias": "normal", "S_kv": 0},
        "no_keys_listed": {"bias": "normal", "n": 0},
    },
    "selection_mask_attention": {
        "plain": {},
        "sink": {"sink": True, "kind": "random", "shared_mask": "G"},
        "shared": {"shared": True, "Dv": 3, "strided": True, "shared_mask": "B"},
        "fp64": {"dtype": F64, "sink": True, "kind": "biased", "shared_mask": "BG"},
        "bf16": {"dtype": BF16, "sink": True, "kind": "fills", "shared": True, "mask_dtype": BF16},
        "biased": {"kind": "biased", "S_kv": 9},
        "fills": {"kind": "fills", "S_kv": 9, "sink": True, "shared_mask": "BG"},
        "view": {"kind": "causal", "shared_mask": "BGS"},
        "one_head": {"h": 1, "kind": "fills", "Dv": 3},
        "one_query": {"S": 1, "S_kv": 9},
        "no_keys_shown": {"S_kv": 0},
    },
    **dict.fromkeys(("index_scores", "index_topk", "index_topk_scores"), _INDEX),
    "index_loss": {
        "plain": {},
        "lse": {"with_lse": True},
        "fp64": {"dtype": F64},
        "bf16": {"dtype": BF16, "w_dtype": F32},
        "one_query": {"S": 1},
    },
    "selection_blocks": {
        "plain": {"S": 3, "S_kv": 47, "N": 10, "dtype": F32},
        "fp64": {},
        "no_keys_fp64": {"S": 5, "S_kv": 5, "N": 0},
    },
}
_DROPPED = {"no_do": {"drop": (0,)}, "no_dlse": {"drop": (1,), "sink": True}}
_NO_SITE = {"no_dx_out": {"drop": (0,)}, "no_dh_in": {"drop": (1,)}}
_NO_LAYER = {"none-acc": {"drop": (0, 2), "acc": True}}
OF_BACKWARD: Mapping[str, Mapping[str, Named]] = {
    **dict.fromkeys(("mhc_pre", "mhc_coefficients"), _NO_LAYER),
    "mhc_head": {"acc": {"acc": True}},
    **dict.fromkeys(("mhc_post_pre", "mhc_post_head"), _NO_SITE),
    "mhc_single_pass": {**_NO_SITE, "dh_in": {"drop": (0, 2, 3, 4)}},
    "e79_scan": {"no_dout": {"drop": (0,)}, "no_states": {"drop": (1, 2)}},
    "selection_attention": _DROPPED,
    **{
        name: {**_DROPPED, "no_dlse": {"drop": (1,), "shared": True}}
        for name in ("selection_list_attention", "selection_mask_attention")
    },
    "selection_entry_attention": {"no_do": {"drop": (0,)}},
}
"""Variants of backward ops only: gradients that do not arrive."""


def _samples() -> list[Any]:
    found = {}
    for name, variants in VARIANTS.items():
        found[name] = variants
        if f"{name}_backward" in registry.REFERENCE:
            differentiable = {k: v for k, v in variants.items() if v.get("segment") != 0}
            found[f"{name}_backward"] = {**differentiable, **OF_BACKWARD.get(name, {})}
    return [pytest.param(name, v, id=f"{name}-{k}") for name, variants in found.items() for k, v in variants.items()]


SAMPLES = _samples()
"""Of every op the name and a variant."""
OP_SAMPLES = {name: sample(name, **variant) for name, variant in (p.values for p in reversed(SAMPLES))}
"""Of every op the arguments of its first variant."""
