# SPDX-License-Identifier: Apache-2.0
"""The kernels of the index ops through their launch plans, with poisoned buffers, against fp64.

They run compiled on a GPU, elsewhere in the interpreter.
"""

from __future__ import annotations

import pytest
import torch
from conftest import GPU, some

from mhc_inductor.kernels.index import config, plan
from mhc_inductor.kernels.launch import DeviceProps, EagerBuilder
from tests.oracles import index as h

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NONE = (None,) * 4
EPS = 2.0**-23
INTEGERS = 2**31 - 1  # in poisoned memory


@pytest.fixture
def short(monkeypatch):
    """Holds 128 keys of a row: of longer ones, candidates are listed."""
    monkeypatch.setattr(config, "select_config", lambda T, topk, few: config.SelectConfig(128, 256, 1))


def check_scores(builder, args, scale=0.7, visible=NONE):
    """Checks the scores against fp64; returns them."""
    assert plan.unsupported(builder, *args) is None
    got = plan.plan_index_scores(builder, *args, scale, *visible)
    want = h.oracle(*args, scale, visible)
    assert got.shape == want.shape and got.dtype is F32 and got.is_contiguous()
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    there = want > -torch.inf
    if there.any():
        error = float((got.double() - want)[there].abs().max())
        # Tensor cores round every partial sum towards zero; the interpreter does not.
        slack = 4 if GPU else 1
        assert error <= slack * (2 * h.formula_error(*args, scale) + EPS * float(want[there].abs().max())), error
    return got


def check_topk(builder, args, topk, scale=0.7, visible=NONE):
    """Checks the chosen keys against fp64; returns them."""
    assert plan.unsupported_sizes(builder, *args, topk, scale, *visible) is None
    got = plan.plan_index_topk(builder, *args, topk, scale, *visible)
    h.check_topk(got, args, topk, scale, visible)
    check_their_scores(builder, got, args, topk, scale, visible)
    return got


def check_their_scores(builder, chosen, args, topk, scale=1.0, visible=NONE):
    """Checks that the keys come with the scores that ``index_scores`` gives, bit by bit, and with -inf next to -1."""
    again, scores = plan.plan_index_topk_scores(builder, *args, topk, scale, *visible)
    assert torch.equal(again, chosen) and scores.dtype is F32
    if topk:
        every = plan.plan_index_scores(builder, *args, scale, *visible)
        want = every.gather(-1, chosen.long().clamp(min=0)).masked_fill(chosen < 0, -torch.inf)
        torch.testing.assert_close(scores, want, rtol=0, atol=0, equal_nan=True)


def exact(builder, args, topk, visible=NONE):
    """Checks the chosen keys where every score is exact, ties included."""
    got = plan.plan_index_topk(builder, *args, topk, 1.0, *visible)
    want = h.first_of(h.oracle(*args, 1.0, visible), ~h.seen(*args[:2], visible), topk)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("kind", h.KINDS)
@pytest.mark.parametrize("S", [3, 70])
def test_what_hides_keys(builder, device, kind, S):
    args = h.make_inputs(2, S, 150, 3, 24, device=device)
    visible = h.visibility(kind, *args[:2])
    check_scores(builder, args, visible=visible)
    check_topk(builder, args, 20, visible=visible)
    exact(builder, h.make_inputs(2, S, 150, 3, 24, whole=True, device=device), 20, visible)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    ("S", "H", "D"),
    some(
        [
            (S, H, D)
            for S in (2, 200)
            for H, D in ((1, 16), (4, 128), (16, 80), (64, 128), (128, 64), (33, 256), (5, 1))
        ],
        [(2, 1, 16), (2, 33, 80), (40, 5, 24), (40, 2, 256), (2, 3, 1)],
    ),
)
def test_heads_and_widths(builder, device, S, H, D, dtype):
    args = h.make_inputs(1, S, 90, H, D, dtype, device=device)
    check_scores(builder, args)
    check_topk(builder, args, 30, visible=h.visibility("causal", *args[:2]))


@pytest.mark.parametrize("w_dtype", [BF16, F16, F32])
def test_dtypes_of_the_weights(builder, device, w_dtype):
    check_scores(builder, h.make_inputs(1, 40, 60, 4, 16, BF16, w_dtype=w_dtype, device=device))


@pytest.mark.parametrize("topk", [1, 2, 31, 128, 149, 150])
def test_numbers_of_keys(builder, device, topk):
    args = h.make_inputs(1, 40, 150, 2, 16, device=device)
    check_topk(builder, args, topk)
    check_topk(builder, args, topk, visible=h.visibility("limits", *args[:2]))


@pytest.mark.parametrize("kind", ["all", "everything", "limits"])
@pytest.mark.parametrize("topk", [1, 7, 32])
def test_rows_that_stream(builder, device, short, kind, topk):
    args = h.make_inputs(2, 4, 700, 2, 16, device=device)
    check_topk(builder, args, topk, visible=h.visibility(kind, *args[:2]))
    exact(builder, h.make_inputs(2, 4, 700, 2, 16, whole=True, device=device), topk, h.visibility(kind, *args[:2]))


AT = torch.arange(1000)
# Scores of a row, topk, and which keys it sees. Rows whose every key beats the ones before, none does, all tie, or only
# the last ones are above 0; rows that begin with few visible keys, of which those below the first ones are chosen as long
# as there are less than topk.
ROWS = {
    "rising": (AT[:900], 30, None),
    "falling": (900 - AT[:900], 30, None),
    "equal": (AT[:900] * 0 + 1, 30, None),
    "late": ((AT[:900] > 895) * 3.0, 30, None),
    **{f"{few} first": (600 - AT[:600], 32, (AT[:600] < few) | (AT[:600] >= 300)) for few in (0, 5, 31)},
}


def ones(device, scores):
    """Returns q, k and w of three queries whose scores are twice those given."""
    k, q, w = torch.zeros(1, len(scores), 16), torch.zeros(1, 3, 2, 16), torch.ones(1, 3, 2)
    k[0, :, 0], q[..., 0] = scores, 1
    return tuple(t.to(device) for t in (q, k, w))


@pytest.mark.parametrize("row", ROWS)
def test_orders_of_scores_that_fill_the_candidates(builder, device, short, row):
    scores, topk, seen = ROWS[row]
    exact(
        builder,
        ones(device, scores),
        topk,
        (None, None if seen is None else seen.view(1, 1, -1).to(device), None, None),
    )


LONG = torch.arange(70000)


@pytest.mark.parametrize(
    "scores", some([LONG, LONG.flip(0), LONG * 0 + 1], [LONG[:700]]), ids=["rising", "falling", "equal"][: some(3, 1)]
)
def test_orders_of_long_rows(builder, device, scores):
    """The sizes of a GPU are above all that a program holds."""
    exact(builder, ones(device, scores), some(4096, 40))


@pytest.mark.parametrize("T", some([4000, 60000], [400]))
def test_ties_of_whole_numbers(builder, device, T):
    args = h.make_inputs(1, some(40, 3), T, 2, 16, BF16, whole=True, device=device)
    exact(builder, args, some(1000, 100), h.visibility("everything", *args[:2]))


@pytest.mark.parametrize(("limit", "topk"), [(100, 40), (1000, 300)])
def test_ties_in_several_segments(builder, device, limit, topk):
    """Tests ties at the threshold that are spread over a row, some of which are taken: of 334 keys, and ten above them."""
    scores = (AT % 3 == 0) * 1.0
    scores[7::100] = 2
    exact(builder, ones(device, scores), topk, (torch.full((1, 3), limit, device=device), None, None, None))


@pytest.mark.parametrize("S", [2, 40])
def test_ties_go_to_the_first_key(builder, device, S):
    q, k, w = h.make_inputs(1, S, 200, 2, 16, device=device)
    got = plan.plan_index_topk(builder, q * 0, k, w, 60, 1.0, *NONE)
    assert torch.equal(got, torch.arange(60, dtype=torch.int32, device=device).expand(1, S, 60))
    # Weights of both signs times a relu of 0 give -0 and 0, which tie.
    got = plan.plan_index_topk(builder, -q.abs(), k.abs(), w, 60, 1.0, *NONE)
    assert torch.equal(got, torch.arange(60, dtype=torch.int32, device=device).expand(1, S, 60))


@pytest.mark.parametrize("S", [2, 40])
def test_nan_and_inf(builder, device, S):
    """Checks that NaN comes first, that -inf is chosen before hidden keys, and that NaN reaches its own keys only."""
    q, k, w = h.make_inputs(1, S, 50, 2, 16, device=device)
    k[0, 30] = torch.nan
    k[0, 31] = -torch.nan
    limit = torch.full((1, S), 40, device=device)
    scores = plan.plan_index_scores(builder, q, k, w, 1.0, limit, None, None, None)
    assert scores[0, :, 30:32].isnan().all() and not scores[0, :, :30].isnan().any()
    assert (scores[0, :, 40:] == -torch.inf).all()
    got = plan.plan_index_topk(builder, q, k, w, 2, 1.0, limit, None, None, None)
    assert got.tolist() == [[[30, 31]] * S]
    check_their_scores(builder, got, (q, k, w), 2, visible=(limit, None, None, None))
    got = plan.plan_index_topk(builder, q, k, w, 1, 1.0, limit, None, None, None)
    assert got.tolist() == [[[30]] * S]
    q, k, w = q.abs(), k.abs().nan_to_num(1.0), w * 0 + 1
    k[0, 3], w[...] = torch.inf, -1.0
    mask = torch.ones(1, 1, 50, dtype=torch.bool, device=device)
    mask[..., 10:] = False
    got = plan.plan_index_topk(builder, q, k, w, 12, 1.0, None, mask, None, None)
    assert got.tolist() == [[[*range(10), -1, -1]] * S]
    check_their_scores(builder, got, (q, k, w), 12, visible=(None, mask, None, None))


@pytest.mark.parametrize("S", [3, 70])
def test_any_strides(builder, device, S):
    B, T, H, D = 2, 90, 4, 16
    q, k, w = h.make_inputs(B, S, T, H, D, device=device)
    limit, mask, sq, sk = h.visibility("everything", q, k)
    mask = torch.rand(B, S, T, generator=torch.Generator().manual_seed(3)).to(device) < 0.7
    plain = (q, k, w), (limit, mask, sq, sk)
    odd = (
        (q.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), k.mT.contiguous().mT, w.mT.contiguous().mT),
        (limit.mT.contiguous().mT, mask.mT.contiguous().mT, sq.mT.contiguous().mT, sk.mT.contiguous().mT),
    )
    heads = (q.transpose(1, 2).contiguous().transpose(1, 2), torch.cat((k, k), -1)[..., :D], w)
    for args, visible in (odd, (heads, plain[1])):
        want = plan.plan_index_scores(builder, *plain[0], 0.7, *plain[1])
        assert torch.equal(check_scores(builder, args, visible=visible), want)
        want = plan.plan_index_topk(builder, *plain[0], 20, 0.7, *plain[1])
        assert torch.equal(check_topk(builder, args, 20, visible=visible), want)


def test_a_mask_is_never_expanded(builder, device):
    """Checks masks with strides of 0, in every dimension."""
    args = h.make_inputs(2, 70, 90, 2, 16, device=device)
    g = torch.Generator().manual_seed(5)
    for shape in ((1, 70, 90), (2, 1, 90), (2, 70, 1), (1, 1, 1)):
        mask = torch.rand(shape, generator=g).to(device) < 0.7
        got = check_topk(builder, args, 9, visible=(None, mask, None, None))
        wide = mask.expand(2, 70, 90)
        assert torch.equal(got, check_topk(builder, args, 9, visible=(None, wide, None, None)))


@pytest.mark.parametrize(("B", "S", "T"), [(1, 300, 1000), (5, 40, 600), (9, 20, 600), (40, 1, 3000), (3, 129, 500)])
def test_the_workspace_is_bounded(builder, monkeypatch, B, S, T):
    """Checks what a plan allocates besides its output, and that it does so once."""
    held = []

    class Counting(type(builder)):
        def empty(self, shape, dtype):
            held.append(shape)
            return super().empty(shape, dtype)

        def launch(self, *args):
            pass

    for most in (128 * 1024, 2**18):
        held.clear()
        monkeypatch.setattr(plan, "SCORES", most)
        args = h.make_inputs(B, S, T, 1, 1, device=str(builder.device))
        plan.plan_index_topk(Counting(builder.device, builder._props), *args, 3, 1.0, *NONE)
        (out, keys) = held
        assert out == (B, S, 3) and keys[0] * keys[1] * keys[2] <= max(most, 128 * plan.padded_row(T))


@pytest.mark.parametrize("S", [3, 150])
def test_queries_in_parts_give_the_same(builder, device, monkeypatch, S):
    args = h.make_inputs(3, S, 90, 2, 16, device=device)
    visible = h.visibility("everything", *args[:2])
    whole = check_topk(builder, args, 20, visible=visible)
    for most in (1, 256 * S, 256 * 2 * S):
        monkeypatch.setattr(plan, "SCORES", most)
        assert len(plan.parts(builder, 3, S, 90)) > 1
        assert torch.equal(plan.plan_index_topk(builder, *args, 20, 0.7, *visible), whole)


def test_two_runs_are_equal(builder, device):
    args = h.make_inputs(1, 40, 300, 3, 16, BF16, device=device)
    assert torch.equal(check_scores(builder, args), check_scores(builder, args))
    assert torch.equal(check_topk(builder, args, 50), check_topk(builder, args, 50))


@pytest.mark.parametrize(
    ("B", "S", "T", "topk"), [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 0), (2, 3, 4, 0), (1, 1, 1, 1)]
)
def test_sizes_of_none_and_one(builder, device, B, S, T, topk):
    args = h.make_inputs(B, S, T, 1, 1, device=device)
    check_scores(builder, args)
    check_topk(builder, args, topk)


def test_nothing_is_visible(builder, device):
    for S in (2, 40):
        args = h.make_inputs(1, S, 60, 2, 16, device=device)
        for visible in ((torch.full((1, S), -5), None, None, None), (None, torch.zeros(1, S, 60).bool(), None, None)):
            visible = tuple(None if t is None else t.to(device) for t in visible)
            assert (plan.plan_index_topk(builder, *args, 20, 1.0, *visible) == -1).all()
            assert (plan.plan_index_scores(builder, *args, 1.0, *visible) == -torch.inf).all()


def test_a_scale_of_zero(builder, device):
    args = h.make_inputs(1, 40, 60, 2, 16, device=device)
    assert (check_scores(builder, args, 0.0) == 0).all()
    # 0 times sums of both signs: -0 and 0, which tie.
    got = plan.plan_index_topk(builder, *args, 9, 0.0, *NONE)
    assert torch.equal(got, torch.arange(9, dtype=torch.int32, device=device).expand(1, 40, 9))


@pytest.mark.parametrize("D", [16, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("backend", "arch"), [("cuda", 90), ("cuda", 89), ("hip", 94)])
def test_tiles_fit(D, itemsize, backend, arch):
    c = config.score_config(D, itemsize, backend, arch)
    assert plan.PAD % c.BT == 0 and plan.ROWS % c.BS == 0 and plan.PAD % config.row_config(itemsize).BT == 0


def test_unsupported_inputs_have_a_reason():
    builder = EagerBuilder(torch.device("meta"), DeviceProps(132, "cuda", 90))
    q, k, w = h.make_inputs()
    assert plan.unsupported(builder, q, k, w) is None
    assert "float64" in plan.unsupported(builder, q.double(), k.double(), w)
    assert "float64" in plan.unsupported(builder, q, k, w.double())
    assert "D = 300" in plan.unsupported(builder, torch.zeros(1, 2, 1, 300), torch.zeros(1, 4, 300), w)
    assert "H = 129" in plan.unsupported(builder, torch.zeros(1, 2, 129, 8), k, w)
    assert "topk = 4097" in plan.unsupported_sizes(builder, q, k, w, 4097, 1.0, *NONE)
    assert plan.unsupported_sizes(builder, q, k, w, 1.0, *NONE) is None


def test_deterministic_algorithms_give_a_query_equal_bits_in_any_batch(builder, device, monkeypatch):
    args = h.make_inputs(1, 70, 90, 5, 24, device=device)
    few = args[0][:, 5:9], args[1], args[2][:, 5:9]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    whole, part = (plan.plan_index_scores(builder, *a, 0.7, *NONE) for a in (args, few))
    assert set(builder.names) == {"index_tile_scores"}
    for kind in h.KINDS:  # three sequences: a tile has more rows than one has queries
        visible = h.visibility(kind, *(several := h.make_inputs(3, 5, 90, 2, 16, device=device))[:2])
        check_topk(builder, several, 20, visible=visible)
    # The interpreter's products depend on a row's place in the tile.
    torch.testing.assert_close(whole[:, 5:9], part, **({"rtol": 0, "atol": 0} if GPU else {}))
