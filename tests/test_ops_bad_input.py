# SPDX-License-Identifier: Apache-2.0
"""Bad arguments of every op, its fake function and its public function are named, with what was expected and what came.

Values of other Python types are in ``test_ops_boundaries.py``, other kinds of tensors in ``test_ops_kinds.py``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import mhc_inductor
from mhc_inductor.ops import checks, registry
from tests.oracles.op_contract import op
from tests.oracles.samples import F32, F64, sample

pytestmark = pytest.mark.usefixtures("one_thread")
I32 = torch.int32
FULL: Mapping[str, Mapping[str, Any]] = {
    "mhc_pre_backward": {"acc": True},
    "e79_scan": {"bias": "input"},
    "selection_attention": {"S_kv": 21, "segments": "mixed", "sink": True},
    "selection_list_attention": {"segments": True, "sink": True},
    "selection_entry_attention": {"sink": True},
    "selection_mask_attention": {"sink": True},
    **{f"index_{name}": {"kind": "everything"} for name in ("scores", "topk", "topk_scores")},
    "index_loss": {"with_lse": True},
    "selection_blocks": {"S": 3, "S_kv": 47, "N": 10, "dtype": F32},
}
"""Variants with every tensor."""
SHAPES: Mapping[str, Mapping[str, str]] = {
    "mhc": {
        "x": "[..., n, D]",
        "grad": "h_res's = ",
        "h_res": "[..., n, n]",
        **dict.fromkeys(("f_out", "h_in", "dh_in"), "[..., D]"),
        **dict.fromkeys(("h_pre", "h_post", "dh_pre", "dh_post", "next_pre", "next_post"), "[..., n]"),
        **dict.fromkeys(("dnext_pre", "dnext_post"), "[..., n]"),
        "phi": "n*D]",
        "alpha": "[one per kind of coefficient]",
        "bias": "[rows of phi]",
        "gamma": "[n, D]",
        **dict.fromkeys(("x_out", "dx_out", "g"), "x's = "),
    },
    "e79": {
        **dict.fromkeys(("b_s", "b_m", "dout"), "[T, B, n]"),
        **dict.fromkeys(("S0", "M0", "dS", "dM"), "[B, n, n]"),
        "kvqm": "[T, B, 4n]",
    },
    "selection": {
        "q": "[B, S, G, h, D",
        "k": "[B, G, ",
        "v": "[B, G, S_kv, Dv]",
        "indices": "[B, S, G, k]",
        "ranges": "[B, S, G, r, 2]",
        "sink": "[G, h]",
        "segments_q": "[B, S]",
        "segments_k": "[B, S_kv]",
        "mask": "[B or 1, S, G or 1, S_kv]",
        "bias": "indices' shape",
        **dict.fromkeys(("o", "dout"), "[B, S, G, h, Dv]"),
        **dict.fromkeys(("lse", "dlse"), "[B, S, G, h]"),
    },
    "index": {
        "q": "[B, S, H, D]",
        "k": "[B, T, D]",
        "w": "[B, S, H]",
        "mask": "broadcast to [B, S, T]",
        "limit": "[B, S]",
        "segments_q": "[B, S]",
        "segments_k": "[B, T]",
        "indices": "[B, S, n]",
        "attention_q": "[B, S, G, h, Dk]",
        "attention_k": "[B, G, T, Dk]",
        "lse": "[B, S, G, h]",
    },
}
"""What messages call the shape of an argument."""
FIRST = ("x", "q", "k", "v", "kvqm", "h_res", "ranges", "indices", "attention_q")
"""The tensors that bring a size: another one may be named that has it too."""
TAKEN = {
    **{f"mhc_{name}": {"x+0", "x+1", "x more"} for name in ("pre", "head", "coefficients")},
    "mhc_sinkhorn": {"h_res+0", "h_res+1", "h_res more"},
    "mhc_collapse": {"x+3"},
    "selection_attention": {"ranges+3", "v+3"},
    "selection_attention_backward": {"ranges+3"},
    **{f"selection_list_attention{end}": {"indices+3"} for end in ("", "_backward")},
    "index_loss": {"indices+2"},
    "index_loss_backward": {"k+1"},
    "selection_blocks": {"k+2"},
}
"""The sizes of an op's tensors that nothing else has."""


def refusal(name: str, args: Sequence[Any]) -> str:
    """Returns the error that an op raises for its arguments, or an empty text."""
    try:
        op(name)(*args)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def meta(args: Sequence[Any]) -> list[Any]:
    return [a.to("meta") if isinstance(a, Tensor) else a for a in args]


def shapes(t: Tensor) -> dict[str, Tensor]:
    """Returns tensors with one entry more in a dimension, and with a dimension more or less."""
    found = {f"+{d}": torch.cat([t, t.narrow(d, 0, 1)], d) for d in range(t.dim())}
    return {**found, " more": t[None], " less": t.sum(-1, dtype=t.dtype)}


def tensors(name: str) -> tuple[list[Any], list[tuple[int, str]]]:
    """Returns the arguments of an op, and the position and name of each tensor."""
    args = list(sample(name, **FULL.get(name, FULL.get(name.removesuffix("_backward"), {}))))
    names = zip(registry.argument_names(name), args, strict=False)
    return args, [(k, n) for k, (n, a) in enumerate(names) if isinstance(a, Tensor)]


@pytest.mark.parametrize("name", registry.REFERENCE)
def test_a_wrong_shape_is_named(name):
    args, found = tensors(name)
    words, taken = SHAPES[name.split("_")[0]], set()
    for k, argument in found:
        for kind, wrong in shapes(args[k]).items():
            given = [*args[:k], wrong, *args[k + 1 :]]
            said = refusal(name, given)
            assert said == refusal(name, meta(given))
            if not said:
                taken.add(argument + kind)
                continue
            other, must = re.match(rf"ValueError: {checks.public(name)}: (\w+)(.*)", said).groups()
            assert other == argument or argument in FIRST, said
            if other == argument:
                shape = str(list(wrong.shape))
                assert words.get(argument, "[") in must or "width D" in must, said
                assert re.search(rf"must .*got (shape )?{re.escape(shape)}", must)
                own = str(list(args[k].shape))
                assert own in must or argument in FIRST or argument == "mask", said
    assert taken == TAKEN.get(name, set())


@pytest.mark.parametrize("name", registry.REFERENCE)
def test_another_dtype_or_device_is_named(name):
    args, found = tensors(name)
    first = next(n for k, n in found if n in FIRST)
    for k, argument in found:
        t, dtypes = args[k], {}
        floats = "must be bfloat16, float16, float32 or float64, got torch."
        if t.dtype is torch.bool:
            dtypes[I32] = "mask must be bool"
        elif t.is_floating_point():
            dtypes |= {I32: f"{floats}int32", torch.complex64: f"{floats}complex64"}
            if argument != first:
                dtypes[F64] = f"may be float64 only where {first} is; {first} is torch.float32"
        else:
            dtypes |= dict.fromkeys((torch.bool, torch.int16, F32), "must be int32 or int64, got torch.")
        for dtype, message in dtypes.items():
            given = [*args[:k], t.to(dtype), *args[k + 1 :]]
            said = refusal(name, given)
            assert re.match(rf"TypeError: {checks.public(name)}: {argument} .*", said) and message in said, said
            assert said == refusal(name, meta(given))
        if argument != first:
            said = refusal(name, [*args[:k], t.to("meta"), *args[k + 1 :]])
            assert said == f"ValueError: {checks.public(name)}: {argument} must be on {first}'s device cpu, got meta"


@pytest.mark.parametrize("name", [name for name in registry.REFERENCE if not name.endswith("_backward")])
def test_a_wrong_tensor_is_named_while_tracing(name):
    args, found = tensors(name)
    for k, argument in found:
        given = [*args[:k], args[k].to(torch.complex64 if args[k].is_floating_point() else F32)[None], *args[k + 1 :]]
        torch._dynamo.reset()
        compiled = torch.compile(functools.partial(registry.call, name), backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match=f"{checks.public(name)}: {argument} must"):
            compiled(*given)
    torch._dynamo.reset()


# --- values, and arguments that do not fit together ---------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


_PACKED = {"B": 1, "S": 4, "S_kv": 4, "lengths": (2, 2)}
_CU, _OF_K = "cu_seqlens_q", "cu_seqlens_k"
_STREAMS = "must hold 2 to 8 streams .*got "
VALUES: list[tuple[str, Mapping[str, Any], Mapping[str, Any], type[Exception], str]] = [
    *[("mhc_pre", {}, {"x": zeros(3, n, 16)}, ValueError, f"x.* {_STREAMS}{n}") for n in (1, 9)],
    ("mhc_pre", {}, {"x": zeros(3, 4, 15)}, ValueError, "x must have a width D of at least 16, got"),
    *[
        ("mhc_pre", {}, {"phi": zeros(*s)}, ValueError, rf"phi must .*\[24, 64\] or .*\[8, 64\], got {re.escape(str([*s]))}")
        for s in ((20, 64), (24, 63), (64,), (4, 64))
    ],
    *[
        ("mhc_pre", {}, {name: value}, ValueError, f"{name} must be finite, not negative.*, got {value}")
        for name, value in (("norm_eps", math.nan), ("norm_eps", -1e-6), ("hc_eps", math.inf), ("post_eps", -1.0))
    ],
    ("mhc_pre", {}, {"post_mult": 0.0}, ValueError, "post_mult must be above 0"),
    ("mhc_pre", {}, {"post_mult": math.nan}, ValueError, "post_mult must be finite"),
    ("mhc_coefficients", {}, {"post_mult": 0.0}, ValueError, "post_mult must be above 0"),
    ("mhc_pre", {}, {"sinkhorn_eps": 1.0}, ValueError, "sinkhorn_eps must be finite, not negative and below 1"),
    ("mhc_pre", {}, {"sinkhorn_iters": -1}, ValueError, r"sinkhorn_iters must be 0 \(raw logits\) or more, got -1"),
    ("mhc_pre", {}, {"sinkhorn_form": "log"}, ValueError, r"sinkhorn_form must be one of \('softmax', 'exp', 'exp_eps'\), got 'log'"),
    ("mhc_pre", {"full": False}, {"sinkhorn_iters": 20}, ValueError, r"sinkhorn_iters must be 0 when phi has 2n = 8 rows .* got 20"),
    ("mhc_sinkhorn", {}, {"h_res": zeros(3, 4, 5)}, ValueError, r"h_res must have shape \[..., n, n\], got \[3, 4, 5\]"),
    ("mhc_sinkhorn", {}, {"h_res": zeros(4)}, ValueError, r"h_res must have shape \[..., n, n\], got \[4\]"),
    ("mhc_sinkhorn", {}, {"h_res": zeros(9, 9)}, ValueError, f"h_res.* {_STREAMS}9"),
    ("mhc_sinkhorn", {}, {"iters": -1}, ValueError, "iters must be 0"),
    ("mhc_sinkhorn", {}, {"eps": math.nan}, ValueError, "eps must be finite"),
    *[("mhc_sinkhorn", {}, {"form": form}, ValueError, "form must be one of") for form in ("Softmax", "none")],
    ("e79_scan", {}, {"kvqm": zeros(0, 2, 12)}, ValueError, r"kvqm\[T, B, 4n\] must have at least one time step.*\[0, 2, 12\]"),
    ("e79_scan", {}, {"kvqm": zeros(3, 2, 0)}, ValueError, r"n of at least 1, got \[3, 2, 0\]"),
    ("e79_scan", {}, {"b_s": zeros(5)}, ValueError, r"b_s must have shape \[n\] = \[3\], got \[5\]"),
    ("e79_scan", {}, {"b_s": zeros(2, 4)}, ValueError, r"b_s must have shape \[n\] = \[3\] or \[T, B, n\]"),
    ("e79_scan", {}, {"segment": -1}, ValueError, r"segment must be 0 \(no checkpoints\) or more, got -1"),
    ("e79_scan_backward", {}, {"segment": 0}, ValueError, "segment must be at least 1"),
    ("e79_scan_backward", {}, {"kvqm": zeros(0, 2, 12)}, ValueError, "at least one time step"),
    ("selection_attention", {}, {"v": zeros(2, 2, 10, 0)}, ValueError, "Dv of at least 1"),
    ("selection_attention", {}, {"q": zeros(2, 5, 2, 0, 4)}, ValueError, "h of at least 1"),
    ("selection_attention", {}, {"q": zeros(2, 5, 2, 2, 0), "k": zeros(2, 2, 10, 0)}, ValueError, "Dk of at least 1"),
    ("selection_attention", {}, {_CU: zeros(2, dtype=I32)}, ValueError, "q must have a batch of 1"),
    ("selection_attention", _PACKED, {_CU: None, _OF_K: zeros(3, dtype=I32)}, ValueError, "must be None"),
    ("selection_attention", _PACKED, {_CU: zeros(3)}, TypeError, "cu_seqlens_q must be int32 or int64"),
    ("selection_attention", _PACKED, {_CU: zeros(1, 3, dtype=I32)}, ValueError, r"shape \[N\+1\], got \[1, 3\]"),
    ("selection_attention", _PACKED, {_CU: zeros(0, dtype=I32)}, ValueError, r"shape \[N\+1\], got \[0\]"),
    ("selection_attention", _PACKED, {_OF_K: zeros(2, dtype=I32)}, ValueError, "cu_seqlens_q's = "),
    ("selection_attention", {**_PACKED, "S_kv": 6}, {}, ValueError, "cu_seqlens_k may be None only where"),
    *[
        (name, variant, {mine: zeros(2, 5, dtype=I32), other: None}, ValueError, f"{other} must be given where {mine} is, got None")
        for name, variant in (
            ("selection_attention", {"segments": "mixed", "S_kv": 5}),
            ("selection_list_attention", {}),
            ("index_topk", {"T": 5}),
            ("index_scores", {"T": 5}),
        )
        for mine, other in (("segments_q", "segments_k"), ("segments_k", "segments_q"))
    ],
    *[(f"{name}attention", {}, {"scale": math.nan}, ValueError, "scale must be finite, got nan") for name in ("selection_", "selection_list_")],
    ("selection_attention_backward", {}, {"scale": math.inf}, ValueError, "scale must be finite, got inf"),
    *[
        (f"selection_{kind}_attention", {"Dk": 8}, {"v": None, "v_width": width}, ValueError, message)
        for kind in ("list", "entry", "mask")
        for width, message in ((9, "v_width must be at most Dk = 8, got 9"), (0, "Dv of at least 1"))
    ],
    ("selection_list_attention", {}, {_CU: zeros(3, dtype=I32)}, ValueError, "batch of 1"),
    *[
        ("selection_mask_attention", {"S_kv": 5}, {"mask": zeros(*s, dtype=torch.bool)}, ValueError, rf"mask must have .* \[2, 5, 2, 5\], got {re.escape(str([*s]))}")
        for s in ((2, 1, 2, 5), (2, 5, 2, 1), (2, 5, 3, 5), (5, 5))
    ],
    ("selection_mask_attention", {}, {"mask": zeros(2, 5, 2, 5, dtype=F64)}, TypeError, "mask may be float64 only where q is"),
    ("selection_mask_attention", {}, {"mask": zeros(2, 5, 2, 5, dtype=I32)}, TypeError, "mask must be bool or floating, got torch.int32"),
    ("index_topk", {}, {"q": zeros(2, 5, 0, 8), "w": zeros(2, 5, 0)}, ValueError, "H of at least 1"),
    ("index_topk", {}, {"q": zeros(2, 5, 3, 0), "k": zeros(2, 9, 0)}, ValueError, "D of at least 1"),
    ("index_topk", {}, {"topk": 10}, ValueError, "topk must be at most T = 9, the number of keys, got 10"),
    ("index_topk", {}, {"topk": -1}, ValueError, "topk must be at least 0, got -1"),
    ("index_topk", {}, {"scale": -1.0}, ValueError, "scale must be finite and at least 0 .put a negative scale into w., got -1.0"),
    ("index_topk", {}, {"scale": math.inf}, ValueError, "scale must be finite"),
    ("index_scores", {}, {"scale": -1.0}, ValueError, "scale must be finite and at least 0"),
    *[
        ("index_topk", {}, {"mask": zeros(*s, dtype=torch.bool)}, ValueError, rf"mask must broadcast to \[B, S, T\] = \[2, 5, 9\], got {re.escape(str([*s]))}")
        for s in ((2, 5, 8), (1, 2, 5, 9))
    ],
    ("index_loss", {}, {"q": zeros()}, ValueError, r"q must have shape \[B, S, H, D\]"),
    ("index_loss", {}, {"attention_q": zeros()}, ValueError, r"attention_q must have shape \[B, S, G, h, Dk\]"),
    ("index_loss", {}, {"scale": math.nan}, ValueError, "scale must be finite"),
    ("index_loss", {}, {"attention_scale": math.inf}, ValueError, "attention_scale must be finite"),
    *[
        (name, {"dtype": torch.bfloat16}, {argument: zeros(*s)}, TypeError, f"{argument} must have {of}'s dtype torch.bfloat16")
        for name, argument, s, of in (
            ("index_topk", "k", (2, 9, 8), "q"),
            ("index_loss", "attention_k", (2, 2, 9, 6), "attention_q"),
            ("selection_attention", "k", (2, 2, 10, 4), "q"),
            ("selection_list_attention", "k", (2, 2, 5, 4), "q"),
            ("selection_mask_attention", "k", (2, 2, 5, 4), "q"),
        )
    ],
    *[
        (f"mhc_{name}_backward", {"dtype": torch.bfloat16}, {"x_out": zeros(2, 3, 4, 16)}, TypeError, "x_out must have x's dtype")
        for name in ("post_pre", "post_head", "single_pass")
    ],
    *[
        ("selection_blocks", {}, change, ValueError, message)
        for change, message in (({"length": 6}, "multiples of stride, got length 6"), ({"count": 2}, "count must be at least 3"))
    ],
]  # fmt: skip


@pytest.mark.parametrize(("name", "variant", "change", "kind", "message"), VALUES, ids=str)
def test_bad_values_are_named(name, variant, change, kind, message):
    names = registry.argument_names(name)
    given = dict(zip(names, sample(name, **variant), strict=False)) | change
    args = [given.get(n) for n in names if n in given or n in ("segments_q", "segments_k")]
    for form in (args, meta(args)):
        with pytest.raises(kind, match=f"{checks.public(name)}: .*{message}"):
            op(name)(*form)
    if hasattr(mhc_inductor, name) and "segment" not in change:
        with pytest.raises(kind, match=f"{name}: .*{message}"):
            getattr(mhc_inductor, name)(**{k: v for k, v in given.items() if k != "segment"})
    if message.startswith(("topk must be at most", "segments_")):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(lambda: op(name)(*args), backend="aot_eager", fullgraph=True)()


def test_every_op_has_rules():
    assert registry.REFERENCE.keys() == checks._RULES.keys()
