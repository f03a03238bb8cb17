# SPDX-License-Identifier: Apache-2.0
"""The CUDA code of compiled graphs with the index ops, without a GPU: which kernels it launches on what."""

from __future__ import annotations

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mhc_inductor
from mhc_inductor import IndexStore
from mhc_inductor.kernels.index import plan
from mhc_inductor.kernels.selection import lists_plan
from mhc_inductor.nn import SparseIndexer
from mhc_inductor.replay import run
from tests.test_codegen import called_and_logged, compiled
from tests.tools.deterministic import deterministic_algorithms
from tests.tools.fakecuda import fake_cuda, generated_code, without_a_gpu
from tests.tools.generated import called, launches

pytestmark = [pytest.mark.usefixtures("no_caches"), without_a_gpu]


def _compile(fn, S, T, dynamic=None, D=64):
    given = ((2, S, 4), torch.float32), ((2, S), torch.int32), ((1, 1, T), torch.bool)
    return compiled(fn, (2, S, 4, D), (2, T, D), *given, dynamic=dynamic)


def _topk(q, k, w, limit, mask):
    return mhc_inductor.index_topk(q, k, w, 16, scale=0.1, limit=limit)


def _topk_scores(q, k, w, limit, mask):
    return torch.ops.mhc_inductor.index_topk_scores(q, k, w, 16, 0.1, limit, mask, None, None)


def _scores(q, k, w, limit, mask):
    return mhc_inductor.index_scores(q, k, w, limit=limit)


def _gradients(q, k, w, limit, mask):
    """Computes a forward and its gradients in one graph: autograd itself needs a real device."""
    none = (None, None, None)
    scores = torch.ops.mhc_inductor.index_scores(q, k, w, 1.0, limit, *none)
    return torch.ops.mhc_inductor.index_scores_backward(scores, q, k, w, 1.0, limit, *none)


TOPK = ["index_tile_scores", "index_select"]
SUMS = ["index_tile_scores", "index_dq", "index_dk", "index_dk_sum"]
LAUNCHED = {
    "a choice": (_topk, 256, {}, TOPK, set()),
    "a choice with its scores": (_topk_scores, 256, {}, TOPK, set()),
    "few queries": (_topk, 1, {}, ["index_row_scores", "index_select"], set()),
    "a few chunks, one after the other": (_topk, 256, {"scores": 128 * 512}, TOPK * 4, set()),
    "many chunks": (_topk, 2048, {"scores": 1}, [], {"index_topk"}),
    "unknown sizes": (_topk, 256, {"dynamic": True}, [], {"index_topk"}),
    "scores": (_scores, 256, {}, TOPK[:1], set()),
    "scores of unknown sizes": (_scores, 256, {"dynamic": True}, TOPK[:1], set()),
    "gradients": (_gradients, 256, {}, SUMS, set()),
    "gradients of unknown sizes": (_gradients, 256, {"dynamic": True}, SUMS, set()),
}
"""Functions, numbers of queries, the largest workspace and whether sizes are known, kernels, and ops that are called."""


@pytest.mark.parametrize("name", LAUNCHED)
def test_the_kernels_that_are_launched_and_the_ops_that_are_called(name, monkeypatch):
    fn, S, how, kernels, ops = LAUNCHED[name]
    monkeypatch.setattr(plan, "SCORES", how.get("scores", plan.SCORES))
    code = _compile(fn, S, 512, how.get("dynamic"))
    assert launches(code) == kernels and called(code) == ops


def test_few_queries_with_deterministic_algorithms():
    """They take the kernels of many queries, whose tiles the workspace holds whole."""
    with deterministic_algorithms():
        code = _compile(_topk, 1, 512)
    assert launches(code) == ["index_tile_scores", "index_select"]
    assert f"(2, {plan.ROWS}, 512)" in code


def test_a_mask_is_read_in_place():
    """Checks that an expanded mask is neither copied nor expanded."""

    def fn(q, k, w, limit, mask):
        wide = mask.expand(2, 256, 512)
        return mhc_inductor.index_scores(q, k, w, mask=wide), mhc_inductor.index_topk(q, k, w, 9, mask=mask)

    code = _compile(fn, 256, 512)
    assert sorted(launches(code)) == sorted(["index_tile_scores", "index_hide", "index_tile_scores", "index_select"])
    # Two kernels of the scores and two of the choice read it, the first two with strides of 0.
    assert code.count("reinterpret_tensor(arg0_1, (2, 256, 512), (0, 0, 1), 0)") == 2
    assert not re.search(r"triton_\w+\.run|empty_strided_cuda\(.*torch\.bool", code)


def test_computed_inputs_are_read_in_place():
    def fn(q, k, w, limit, mask):
        return mhc_inductor.index_topk(q * 2, k.relu(), w.sigmoid(), 16, limit=limit + 1)

    launched = launches(_compile(fn, 256, 512))
    assert [n for n in launched if n.startswith("index")] == ["index_tile_scores", "index_select"]
    assert len(launched) <= 6, "one kernel for each computed input"


def test_above_256_the_reference_is_called_and_logged_once(caplog):
    called_and_logged(caplog, lambda: _compile(_topk, 256, 512, D=300), "index_topk", "D = 300 is above 256")


def _indexer(q, k, w, limit, mask):
    scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) * 0.125
    scores = torch.matmul((w * 0.5).unsqueeze(-2), torch.relu(scores)).squeeze(-2)
    seen = torch.arange(k.shape[1], device=q.device) < limit.unsqueeze(-1)
    return torch.where(seen, scores, float("-inf")).topk(16, -1).indices.sort(-1).values


def test_an_indexer_in_plain_pytorch_launches_the_kernels():
    code = _compile(_indexer, 256, 512)
    launched = launches(code)
    assert "index_tile_scores" in launched and "index_select" in launched
    assert "extern_kernels.bmm" not in code and "(2, 256, 4, 512)" not in code


def test_keys_that_leave_are_chosen_by_topk_from_the_kernels_scores():
    def leaving(q, k, w, limit, mask):
        scores = (torch.einsum("bshd,btd->bsht", q, k).relu() * w[..., None]).sum(2)
        seen = torch.arange(k.shape[1], device=q.device) < limit[..., None]
        return torch.where(seen, scores, float("-inf")).topk(16, -1).indices

    code = _compile(leaving, 256, 512)
    assert launches(code) == ["index_tile_scores"] and code.count("torch.ops.aten.topk.default(") == 1


def test_an_indexer_of_unknown_sizes_calls_the_op():
    code = _compile(_indexer, 256, 512, dynamic=True)
    assert "torch.ops.mhc_inductor.index_topk.default" in code and "extern_kernels.bmm" not in code


# --- the loss -----------------------------------------------------------------------------------------------


def _trained(S, dynamic=None, *, n=40, D=64, lse=True):
    """Returns the code of a loss and its gradients in one graph: autograd itself needs a real device."""

    def fn(q, k, w, indices, aq, ak, lse):
        loss, dscores = torch.ops.mhc_inductor.index_loss(q, k, w, indices, aq, ak, lse, 0.1, 0.2)
        return loss, *torch.ops.mhc_inductor.index_loss_backward(loss, q, k, w, indices, dscores, 0.1)

    given = [(2, S, 4, D), (2, S, D), (2, S, 4), ((2, S, n), torch.int32), (2, S, 2, 8, 96), (2, 2, S, 96)]
    return compiled(fn, *given, ((2, S, 2, 8), torch.float32) if lse else None, dynamic=dynamic)


LOSS = ["selection_list_keys", "index_list_heads", "index_list_heads", "index_loss_rows"]
GRADIENTS = ["selection_list_keys", "index_loss_factors"]
CHUNK = ["index_loss_gradients", "selection_list_slots", "selection_list_invert", "selection_list_sum"]
TRAINED = {
    "known sizes": ({}, GRADIENTS + CHUNK, set()),
    "without lse": ({"lse": False}, GRADIENTS + CHUNK, set()),
    "a few chunks of gradients": ({"most": 128}, GRADIENTS + CHUNK * 2, set()),
    "many chunks of gradients": ({"most": 10}, [], {"index_loss_backward"}),
    "unknown sizes": ({"dynamic": True}, [], {"index_loss_backward"}),
}


def _kernels(code):
    return [name for name in launches(code) if not name.startswith("triton_")]


@pytest.mark.parametrize("name", TRAINED)
def test_the_kernels_and_ops_of_a_loss_and_its_gradients(name, monkeypatch):
    how, gradients, ops = TRAINED[name]
    monkeypatch.setattr(lists_plan, "MOST_QUERIES", how.get("most", lists_plan.MOST_QUERIES))
    code = _trained(256, **{k: v for k, v in how.items() if k != "most"})
    assert _kernels(code)[:4] == LOSS and sorted(_kernels(code)[4:]) == sorted(gradients) and called(code) == ops


@pytest.mark.parametrize(("T", "dynamic"), [(256, None), (256, True), (4100, True)])
def test_the_loss_over_all_keys_launches_the_kernels_up_to_their_limit(T, dynamic):
    shapes = (2, 128, 4, 64), (2, T, 64), (2, 128, 4), None, (2, 128, 2, 8, 96), (2, 2, T, 96)
    code = compiled(SparseIndexer(8).loss, *shapes, dynamic=dynamic)
    assert _kernels(code) == (LOSS if T == 256 else [])
    assert ("torch.ops.mhc_inductor.index_loss.default" in code) == (T > 4096)


def test_a_loss_of_longer_lists_calls_the_reference_and_is_logged_once(caplog):
    with caplog.at_level("WARNING", logger="mhc_inductor"):
        code = _trained(256, n=5000)
    assert not _kernels(code) and "torch.ops.mhc_inductor.index_loss.default" in code
    for name in ("index_loss", "index_loss_backward"):
        message = f"compiled {name} calls the reference formula on cuda:0: n = 5000 keys a query are above 4096"
        assert [r.getMessage() for r in caplog.records].count(message) == 1


@pytest.mark.parametrize("mode", ["record", "replay"])
def test_a_record_launches_what_a_call_does_and_a_replay_no_scores(mode):
    torch._dynamo.reset()
    with fake_cuda(), FakeTensorMode():
        q, k, w = (torch.empty(2, *size, device="cuda") for size in ((256, 4, 64), (512, 64), (256, 4)))
        limit, keys = (torch.empty(2, 256, *n, device="cuda", dtype=torch.int32) for n in ((), (16,)))
        store = IndexStore()
        if mode == "replay":
            store._append("", keys)
        compiled = torch.compile(_topk, fullgraph=True, backend="mhc_inductor")
        with run._entered(run.Run(mode, store)):
            (code,) = generated_code(lambda: compiled(q, k, w, limit, None))
    assert launches(code) == (["index_tile_scores", "index_select"] if mode == "record" else [])
    assert code.count("= torch.ops.mhc_inductor_replay.replayed.default(") == (mode == "replay")
