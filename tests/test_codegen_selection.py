# SPDX-License-Identifier: Apache-2.0
"""The CUDA code of compiled graphs with attention over ranges, lists or a mask, without a GPU: what it launches on what."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mhc_inductor
from mhc_inductor.kernels.selection import lists_plan
from tests.test_codegen import called_and_logged, compiled
from tests.tools.deterministic import deterministic_algorithms
from tests.tools.fakecuda import without_a_gpu
from tests.tools.generated import called, launches, runs

OPS = torch.ops.mhc_inductor
SCALE = 32**-0.5
F32, I32, I64 = torch.float32, torch.int32, torch.int64

pytestmark = [pytest.mark.usefixtures("no_caches"), without_a_gpu]


def ranges(fn, S=64, S_kv=None, r=4, dynamic=None, D=32):
    keys = (2, S_kv or S, 2, D)
    return compiled(fn, (2, S, 2, 4, D), keys, keys, ((2, S, 2, r, 2), I32), dynamic=dynamic)


def lists(fn, S=64, h=4, D=32, dynamic=None):
    return compiled(fn, (2, S, 1, h, D), (2, 128, 1, D), ((2, S, 1, 20), I64), dynamic=dynamic)


def masks(fn, D=32, dtype=torch.bool, dynamic=None):
    return compiled(fn, (2, 64, 1, 4, D), (2, 128, 1, D), ((1, 1, 64, 128), dtype), dynamic=dynamic)


# --- functions: gradients are computed in the graph of the forward, since autograd itself needs a real device ---


def _attention(q, k, v, ranges, *more):
    return OPS.selection_attention(q, k, v, ranges, *(more or (None, None, None, SCALE)))


def _turned(q, k, v, ranges):
    return _attention(q, k.transpose(1, 2), v.transpose(1, 2), ranges)


def _both(q, k, v, ranges, *more):
    k, v, more = k.transpose(1, 2), v.transpose(1, 2), more or (None, None, None, SCALE)
    o, lse = _attention(q, k, v, ranges, *more)
    return o, OPS.selection_attention_backward(o, lse, q, k, v, ranges, *more[:3], o, lse, *more[3:])


def _segments(q, k, v, ranges):
    return _both(q, k, v, ranges, None, None, None, SCALE, ranges.sum((2, 3, 4)), k.sum((2, 3)).long())


def _listed(q, k, indices):
    k = k.transpose(1, 2)
    return mhc_inductor.selection_attention(q, k, k, indices=indices)


def _both_listed(q, k, indices, up=None):
    args = (q, k.transpose(1, 2), None, indices, *[None] * 5)
    o, lse = OPS.selection_list_attention(*args, 0.1, q.shape[-1])
    return OPS.selection_list_attention_backward(o if up is None else up, None, *args, o, lse, 0.1, q.shape[-1])


def _both_biased(q, k, indices):
    bias = torch.zeros(indices.shape, device=indices.device)
    args, options = (q, k.transpose(1, 2), None, indices, bias, None), (0.1, q.shape[-1], True)
    o, lse = OPS.selection_entry_attention(*args, *options)
    return OPS.selection_entry_attention_backward(o, lse, *args, o, lse, *options)


def _masked(q, k, mask):
    k = k.transpose(1, 2)
    return mhc_inductor.selection_attention(q, k, k, mask=mask.transpose(1, 2))


def _both_masked(q, k, mask):
    args, D = (q, k.transpose(1, 2), None, mask.transpose(1, 2), None), q.shape[-1]
    o, lse = OPS.selection_mask_attention(*args, 0.1, D)
    return OPS.selection_mask_attention_backward(o, None, *args, o, lse, 0.1, D)


# --- which kernels and ops --------------------------------------------------------------------------------------

TILES = ["pieces", "finite", "lists"]
BACKWARD = [*TILES, "forward", *TILES, *("delta", "dq", "dkv_count", "dkv_prefix", "dkv", "dkv_fix", "dkv_fix")]
DECODED = ["gather", "combine", "delta", "segment_tiles", "pieces", "gather_dq", "dq_sum", "dkv_few"]
FORWARD = ["list_keys", "list_forward"]
FEW = [*FORWARD, "combine"]  # two sequences of one query, or of an unknown number, split their keys
CHUNK = ["list_dq", "list_rows", "list_slots", "list_invert", "list_sum"]
FOLDED = [CHUNK[0], "list_fold", "list_fold", *CHUNK[1:]]
MASKED = ["mask_tiles", "mask_lists", "finite", "mask_forward"]
MASKS = [*MASKED, "delta", *MASKED[:2] * 2, "finite", "mask_dq", "dkv_prefix", "mask_dkv", "dkv_fix"]
LATENT = {"h": 64, "D": 512}
LIST, ENTRY = ({f"selection_{kind}_attention", f"selection_{kind}_attention_backward"} for kind in ("list", "entry"))
LAUNCHED: dict[str, tuple[Callable[..., Any], Callable[..., str], dict[str, Any], list[str], set[str]]] = {
    "ranges": (_turned, ranges, {}, [*TILES, "forward"], set()),
    "ranges, decoding": (_turned, ranges, {"S": 1, "S_kv": 640}, ["gather", "combine"], set()),
    "ranges, single tokens": (_turned, ranges, {"S_kv": 640, "r": 100}, ["pieces", "gather"], set()),
    "ranges, gradients": (_both, ranges, {}, BACKWARD, set()),
    "ranges, gradients, unknown sizes": (_both, ranges, {"dynamic": True}, BACKWARD, set()),
    # dK and dV have tiles of their own.
    "segments": (_segments, ranges, {"S_kv": 640}, [*BACKWARD, *["segment_tiles"] * 2], set()),
    "segments, decoding": (_segments, ranges, {"S": 1, "S_kv": 640}, DECODED, set()),
    "segments, unknown sizes": (_segments, ranges, {"S_kv": 640, "dynamic": True}, [*BACKWARD, *["segment_tiles"] * 2], set()),
    "lists": (_listed, lists, {"S": 300}, FORWARD, set()),
    "lists, decoding": (_listed, lists, {"S": 1}, FEW, set()),
    "lists, unknown sizes": (_listed, lists, {"dynamic": True}, FEW, set()),
    "lists, Gluon": (_listed, lists, LATENT, [], LIST - {"selection_list_attention_backward"}),
    "lists, gradients, unknown sizes": (_both_listed, lists, {"dynamic": True}, FEW, LIST - {"selection_list_attention"}),
    "lists, gradients, Gluon": (_both_listed, lists, LATENT, [], LIST),
    "lists, gradients, many chunks": (
        _both_listed, lists, {"S": 300, "most": 64}, FORWARD, LIST - {"selection_list_attention"}),
    "biased": (_both_biased, lists, {"S": 300}, [*FORWARD, "list_keys", "delta", "list_totals", *FOLDED], set()),
    "biased, unknown sizes": (_both_biased, lists, {"dynamic": True}, FEW, ENTRY - {"selection_entry_attention"}),
    "biased, Gluon": (_both_biased, lists, LATENT, [], ENTRY),
    "mask": (_masked, masks, {}, MASKED, set()),
    "mask, expanded": (lambda q, k, m: _masked(q, k, m.expand(2, -1, -1, -1)), masks, {}, MASKED, set()),
    **{
        f"mask of {dtype}, gradients, dynamic={dynamic}": (
            _both_masked, masks, {"dtype": dtype, "dynamic": dynamic}, [*MASKS, *["mask_shares"] * (dtype is F32)], set())
        for dtype in (torch.bool, F32)
        for dynamic in (None, True)
    },
}  # fmt: skip
"""Functions, what compiles them, sizes, kernels without "selection_", and ops that are called."""
SIZED = {f"selection_{name}" for name in (*TILES, "forward", "dq", "dkv", "list_forward", "mask_dkv")}
"""Kernels that take a size."""


def _kernels(code):
    return [name.removeprefix("selection_") for name in launches(code, "selection_")]


def _pointwise(code):
    """Returns the arguments of Inductor's own kernels, except those that only clear the bitmaps."""
    return [args for *_, args in runs(code, "triton_") if not re.match(r"buf\d+, \S+, stream", args)]


def _in_each_commit():
    """Returns the rows, of which those of known sizes that take less than two seconds run in each commit."""
    for name, (fn, *_) in LAUNCHED.items():
        slow = fn in (_segments, _both_masked) or "unknown" in name
        yield pytest.param(name, marks=() if slow else pytest.mark.every_case)


@pytest.mark.parametrize("name", [*_in_each_commit()])
def test_the_kernels_that_are_launched_and_the_ops_that_are_called(name, monkeypatch):
    """Keys and masks are views, which are read in place: nothing is copied. Segments are sums of two inputs."""
    fn, compile_, how, kernels, ops = LAUNCHED[name]
    monkeypatch.setattr(lists_plan, "MOST_QUERIES", how.get("most", lists_plan.MOST_QUERIES))
    code = compile_(fn, **{k: v for k, v in how.items() if k != "most"})
    order = list if compile_ is lists else sorted
    assert order(_kernels(code)) == order(kernels) and called(code) == ops
    assert ("torch.ops.mhc_inductor" in code) == bool(ops)
    assert len(_pointwise(code)) == (2 if fn is _segments else 0)
    for launch in runs(code, "selection_"):
        if launch.kernel in SIZED:
            assert bool(re.search(r"\bs\d+\b", launch.arguments)) == bool(how.get("dynamic")), launch


def test_the_compiled_code_follows_deterministic_algorithms():
    """With them, few queries take the kernels whose bits no batch changes."""
    plain = _kernels(ranges(_turned, 1, 640))
    with deterministic_algorithms():
        launched = _kernels(ranges(_turned, 1, 640))
    assert "forward" in launched and not {*LAUNCHED["ranges, decoding"][3]} & {*launched}
    assert _kernels(ranges(_turned, 1, 640)) == plain


@pytest.mark.parametrize(
    ("fn", "compile_", "D", "op"),
    [(_turned, ranges, 584, "selection_attention"), (_listed, lists, 600, "selection_list_attention"),
     (_both_biased, lists, 600, "selection_entry_attention"), (_masked, masks, 600, "selection_mask_attention")],
)  # fmt: skip
def test_above_576_the_reference_is_called_and_logged_once(caplog, fn, compile_, D, op):
    called_and_logged(caplog, lambda: compile_(fn, D=D), op, f"D = {D} is above 576")


# --- on what ----------------------------------------------------------------------------------------------------


def _arguments(code):
    return runs(code, "selection_forward")[0].arguments


def test_views_of_keys_are_read_in_place():
    assert _arguments(ranges(_turned)).count("reinterpret_tensor(arg") == 2


def test_computed_keys_are_read_in_place():
    def fn(q, k, v, ranges):
        kv = torch.cat((k, v), 3).relu()
        return _attention(q * 2, kv.narrow(3, 0, 32).transpose(1, 2), kv.narrow(3, 32, 32).transpose(1, 2), ranges)

    code = ranges(fn)
    assert len(_pointwise(code)) <= 3, "q, and the keys and values once"
    assert _kernels(code).count("forward") == 1 and _arguments(code).count("(8192, 64, 128, 1)") == 2


def test_expanded_and_transposed_inputs():
    def fn(q, k, v, ranges):
        k = k.narrow(2, 0, 1).expand(-1, -1, 2, -1).transpose(1, 2)
        v = v.permute(0, 2, 3, 1)  # the last dimension has no stride of 1
        return _attention(q, k, v, ranges)

    code = ranges(fn, 32)
    assert _kernels(code).count("forward") == 1
    assert "(2048, 0, 64, 1)" in _arguments(code), "no copy of what is expanded"
    assert len(_pointwise(code)) == 1, "a copy of v"


@pytest.mark.parametrize(("most", "chunks"), [(2048, [300]), (256, [198, 102]), (132, [132, 132, 36])])
def test_the_backward_over_lists_takes_turns_in_its_memory(monkeypatch, most, chunks):
    monkeypatch.setattr(lists_plan, "MOST_QUERIES", most)
    code = lists(_both_listed, 300)
    assert _kernels(code) == [*FORWARD, "list_keys", "delta", *CHUNK * len(chunks)]
    assert "torch.ops.mhc_inductor" not in code
    # 20 keys are rows of 32 times 32 columns. Each chunk's are freed before the next chunk's are made, or taken over.
    shape = r"\((\d+), 32, 32\), \(1024, 32, 1\)"
    made = re.findall(rf"^\s+(\w+) = empty_strided_cuda\({shape}, torch.bfloat16\)", code, re.MULTILINE)
    assert [int(rows) for _, rows in made] == [2 * rows for i, rows in enumerate(chunks) if rows not in chunks[:i]]
    for (first, _), (second, _) in itertools.pairwise(made):
        gone = re.search(rf"del {first}\b|{first}  # reuse", code)
        assert gone.start() < code.index(f" {second} = empty_strided_cuda")


def test_a_gradient_is_written_as_the_op_reads_it():
    """The kernels read contiguous gradients: the op that is called would copy others."""

    def fn(q, k, indices):
        return _both_listed(q, k, indices, torch.sin(q.transpose(1, 3).contiguous()).transpose(1, 3))

    code = lists(fn, **LATENT)
    given = re.search(r"selection_list_attention_backward.default\((\w+), None", code)
    assert given is not None and re.search(
        rf"{given[1]} = empty_strided_cuda\(\(2, 64, 1, 64, 512\), \(2097152, 32768, 32768, 512, 1\)", code
    )
    assert len(launches(code, "triton_")) == 1


def test_one_list_of_tiles_serves_the_sequences_that_share_a_mask():
    """A tile has 16 queries and 64 keys."""
    assert "empty_strided_cuda((1, 1, 4, 2), (8, 8, 2, 1), torch.int32)" in masks(_masked)
