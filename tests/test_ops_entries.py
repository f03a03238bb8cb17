# SPDX-License-Identifier: Apache-2.0
"""What a bias per entry of a list means: absent entries, repeated keys, rows of the lowest bias, no gradient.

The contract of the op is tested with that of lists, in ``test_ops_lists.py``.
"""

from __future__ import annotations

import pytest
import torch
from test_ops_lists import SCALE, run

from mhc_inductor import selection_attention
from tests.oracles import lists as h
from tests.oracles.op_contract import op
from tests.oracles.selection import error

F32, F64 = torch.float32, torch.float64
pytestmark = pytest.mark.usefixtures("one_thread")
ENTRY = op("selection_entry_attention")


def attended(made):
    return run(made, h.upstream(made))


@pytest.mark.parametrize("repeats", [False, True])
def test_a_bias_of_zero_is_attention_over_the_list(repeats):
    made = h.make_inputs("random", F64, S_kv=20, sink=True)
    want = attended(made)
    got = attended({**made, "bias": torch.zeros(made["indices"].shape, dtype=F64), "repeats": repeats})
    assert all(error(got[name], want[name]) < 1e-12 for name in want)


@pytest.mark.parametrize("repeats", [False, True])
def test_repeated_keys(repeats):
    """Each entry counts, or the first whose bias is not -inf."""
    made = h.make_inputs("random", F64, B=1, S=1, G=1, S_kv=3, n=5)
    made["indices"] = torch.tensor([1, 2, 1, 1, 2], dtype=torch.int32).view(1, 1, 1, 5)
    made["bias"] = torch.tensor([-torch.inf, 0.5, 0.25, -2.0, 1.0], dtype=F64).view(1, 1, 1, 5)
    o, lse = ENTRY(*h.arguments({**made, "repeats": repeats}, SCALE))
    logits = SCALE * made["q"][0, 0, 0] @ made["k"][0, 0].T
    per_key = {1: [0.25, -2.0], 2: [0.5, 1.0]}
    sums = [
        sum(torch.tensor(b, dtype=F64).exp() for b in (found if repeats else found[:1])) for found in per_key.values()
    ]
    weights = logits[:, 1:].exp() * torch.stack(sums)
    assert error(o[0, 0, 0], weights / weights.sum(-1, keepdim=True) @ made["v"][0, 0, 1:]) < 1e-12
    assert error(lse[0, 0, 0], weights.sum(-1).log()) < 1e-12


def eager(made, scale=SCALE):
    """Returns the formula as models write it, in the inputs' dtype: the listed keys' scores, plus the bias, and softmax."""
    b, g = (torch.arange(n).view(shape) for n, shape in ((2, (2, 1, 1, 1)), (2, (1, 1, 2, 1))))
    at = made["indices"].long()

    def attention(q, k, v, indices, bias, sink, scale, v_width, repeats):
        t = torch.einsum("bsghd,bsgnd->bsghn", q, k[b, g, at]) * scale + bias.unsqueeze(3)
        return torch.einsum("bsghn,bsgnd->bsghd", t.softmax(-1), v[b, g, at]), h.logsumexp(t)

    return run(made, h.upstream(made), attention, scale)


@pytest.mark.parametrize("low", [h.LOWEST, h.LOWEST / 2, -1e9, -1e4, -100.0])
@pytest.mark.parametrize("all_rows", [False, True])
def test_rows_of_low_biases_are_as_eager_rounds_them(low, all_rows):
    made = h.make_inputs("random", F32, S_kv=20, bias="normal", repeats=True)
    made["bias"] = torch.where((made["bias"] > -0.5) | all_rows, low, made["bias"])
    got, want = attended(made), eager(made)
    for name in want:
        # Each score may be rounded to the next number of the sum's precision.
        assert error(got[name], want[name]) < 2e-5, name
        assert got[name].isfinite().all()


def test_rows_of_nothing_give_exactly_zero():
    made = h.make_inputs("random", F32, S_kv=20, sink=True, bias="normal")
    made["bias"][:, ::2] = -torch.inf
    got = attended(made)
    for name in ("o", "dq"):
        assert not got[name][:, ::2].any() and got[name][:, 1::2].abs().amin((-1, -2)).gt(0).all()
    assert got["lse"][:, ::2].eq(-torch.inf).all() and all(t.isfinite().all() for n, t in got.items() if n != "lse")


def test_nan_behind_a_bias_of_minus_inf_does_not_leak():
    made = h.make_inputs("random", F32, B=1, S=4, G=1, S_kv=20, n=9, bias="normal")
    made["bias"][made["indices"] < 7] = -torch.inf
    made["k"][:, :, :7] = made["v"][:, :, :7] = torch.nan
    got = attended(made)
    assert all(t.isfinite().all() for n, t in got.items() if n in ("o", "lse", "dq"))
    assert not got["dk"][:, :, :7].any() and not got["dv"][:, :, :7].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_give_nan_in_their_row(bad):
    made = h.make_inputs("random", F32, S_kv=20, bias="normal")
    made["bias"][0, 1, 0, 2] = bad
    o, lse = ENTRY(*h.arguments(made, SCALE))
    assert (
        o[0, 1, 0].isnan().all() and not o[1].isnan().any() and not o[0, 2:].isnan().any() and lse[1].isfinite().all()
    )


@pytest.mark.parametrize("repeats", [False, True])
def test_a_bias_of_nan_gives_its_score_no_gradient(repeats):
    """A row whose scores are all filled with -inf: weights of NaN, and gradients that a fill stops."""
    made = h.make_inputs("random", F32, S_kv=20, bias="normal", repeats=repeats)
    made["bias"][0, 1] = torch.nan
    listed = made["indices"][0, 1, 0]
    got = attended(made)
    assert got["o"][0, 1].isnan().all() and not got["dq"][0, 1].any() and got["dk"].isfinite().all()
    seen = torch.zeros(20, dtype=torch.bool).scatter(0, listed[listed >= 0].long(), True)
    assert torch.equal(got["dv"][0, 0].isnan().all(-1), seen) and got["dv"][1].isfinite().all()


def test_a_bias_that_requires_a_gradient_is_refused():
    made = h.make_inputs("random", F32, bias="normal")
    made["bias"].requires_grad_()
    with pytest.raises(RuntimeError, match=r"no gradient for bias; pass bias\.detach\(\)"):
        ENTRY(*h.arguments(made, SCALE))
    with torch.no_grad():
        assert ENTRY(*h.arguments(made, SCALE))[0].isfinite().all()
    given = {name: made[name] for name in ("q", "k", "v", "indices", "bias")}
    with pytest.raises(RuntimeError, match="no gradient for bias"):
        torch.compile(lambda: selection_attention(**given), backend="aot_eager")()
