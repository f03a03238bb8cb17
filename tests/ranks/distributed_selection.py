# SPDX-License-Identifier: Apache-2.0
"""Checks of selection attention whose keys are on several ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import mhc_inductor as mi
from tests.oracles import lists as helpers_lists
from tests.oracles import selection as helpers
from tests.oracles.mhc import rounding
from tests.ranks import distributed_tools as tools
from tests.ranks.distributed_tools import check, here, joined, leaf, me, message, ranks, shares, total, uneven


def attended(
    made: Mapping[str, Any],
    up: Mapping[str, Tensor] | None,
    method: str,
    queries: Sequence[slice],
    keys: Sequence[slice],
    listed: bool = False,
    **options: Any,
) -> dict[str, Tensor]:
    """Runs the function on this rank's shares; returns the joined results, named as the oracles name them."""
    s, t = queries[me()], keys[me()]
    grad = up is not None
    q, k = leaf(made["q"], (tools.ALL, s), grad), leaf(made["k"], (tools.ALL, tools.ALL, t), grad)
    v = k if made["v"] is None else leaf(made["v"], (tools.ALL, tools.ALL, t), grad)
    sink = leaf(made["sink"], grad=grad)
    ids = [None if made.get(n) is None else here(made[n][:, at]) for n, at in (("segments_q", s), ("segments_k", t))]
    chosen = {"indices" if listed else "ranges": here(made["indices" if listed else "ranges"][:, s])}
    options |= {"sink": sink, "segments_q": ids[0], "segments_k": ids[1], "method": method, "group": tools.GROUP}
    o, lse = mi.distributed.selection_attention(q, k, v, **chosen, **options, return_lse=True)
    results = {"o": joined(o, 1), "lse": joined(lse, 1)}
    if up is None:
        return results
    outputs = [{"o": o, "lse": lse}[n] for n in up]
    torch.autograd.backward(outputs, [here(u[:, s]) for u in up.values()])
    results |= {"dq": joined(q.grad, 1), "dk": joined(k.grad, 2)}
    if made["v"] is not None:
        results["dv"] = joined(v.grad, 2)
    if sink is not None:
        results["dsink"] = total(sink.grad)
    return results


def _cases() -> dict[str, dict[str, Any]]:
    return {
        "odd": {"kind": "odd", "sink": True},
        "empty": {"kind": "empty", "sink": True, "S": 9},
        "none": {"kind": "none"},
        "segments": {"kind": "all", "S": 12, "S_kv": 21, "r": 1, "segments": "mixed"},
        "documents": {"kind": "odd", "S": 12, "S_kv": 21, "segments": "documents", "segment_dtype": torch.int64},
        "wide": {"kind": "wide", "range_dtype": torch.int64, "Dk": 12, "Dv": 5},
        "twice": {"kind": "twice", "sink": True, "spread": 6.0},
    }


def check_ranges(
    dtype: torch.dtype, method: str, cases: Sequence[str], cut: Callable[[int], list[slice]] = shares
) -> None:
    for name in cases:
        made = helpers.make_inputs(**_cases()[name], dtype=dtype)
        up = helpers.upstream(made)
        got = attended(made, up, method, cut(made["q"].shape[1]), cut(made["k"].shape[2]))

        def compare(got: Any = got, made: Any = made, up: Any = up) -> None:
            helpers.check(got, made, up)
            _no_selection_is_zero(got)

        tools.on_first(compare)


def _no_selection_is_zero(got: Mapping[str, Tensor]) -> None:
    empty = got["lse"] == -torch.inf
    assert not got["o"][empty].any() and not got["dq"][empty].any()


@check
def gather_ranges() -> None:
    check_ranges(torch.float32, "gather", list(_cases()))


@check
def ring_ranges() -> None:
    check_ranges(torch.float32, "ring", list(_cases()))


@check
def uneven_parts() -> None:
    for method in ("gather", "ring"):
        check_ranges(torch.float32, method, ["odd", "empty", "segments"], uneven)


@check
def bf16() -> None:
    """At most twice the error of the op in one process in the same dtype, plus the rounding of the partial results."""
    for case, method in itertools.product(("odd", "documents"), ("gather", "ring")):
        made = helpers.make_inputs(**_cases()[case], dtype=torch.bfloat16)
        up = helpers.upstream(made)
        got = attended(made, up, method, shares(made["q"].shape[1]), shares(made["k"].shape[2]))
        exact, plain = helpers.oracle(made, up), helpers.run(made, up)
        for name, t in got.items():
            assert t.dtype == plain[name].dtype
            allowed = 2 * helpers.error(plain[name], exact[name]) + (
                rounding(torch.bfloat16) if name != "lse" else 1e-6
            )
            found = helpers.error(t, exact[name])
            assert found <= allowed, f"{case}, {method}: {name}: {found:.3g} above {allowed:.3g}"


@check
def fp64_is_exact() -> None:
    made = helpers.make_inputs("odd", sink=True)
    for method, names in itertools.product(("gather", "ring"), (("o", "lse"), ("lse",), ("o",))):
        up = helpers.upstream(made, names)
        got = attended(made, up, method, shares(7), shares(12))
        want = helpers.oracle(made, up)
        assert got.keys() == want.keys()
        for name, t in got.items():
            assert helpers.error(t, want[name]) < 1e-13, (method, names, name)


@check
def lists_of_positions() -> None:
    cases = (
        {"kind": "odd", "sink": True, "S_kv": 11},
        {"kind": "empty", "shared": True, "Dv": 5, "S_kv": 11, "segments": True},
        {"kind": "odd", "shared": True, "sink": True, "index_dtype": torch.int64, "segments": True},
        {"kind": "random", "shared": True, "dtype": torch.bfloat16, "Dv": 5, "S_kv": 16},
    )
    for case, method in itertools.product(cases, ("gather", "ring")):
        made = helpers_lists.make_inputs(**{"dtype": torch.float32, **case})
        up = helpers_lists.upstream(made)
        got = attended(made, up, method, uneven(5), shares(made["k"].shape[2]), True, v_width=made["v_width"])
        tools.on_first(functools.partial(helpers_lists.check, got, made, up))


@check
def keys_that_are_the_values_of_ranges() -> None:
    made = helpers.make_inputs("odd", torch.float32, sink=True)
    apart = {**made, "v": made["k"][..., :5]}
    up = helpers.upstream(apart)
    for method in ("gather", "ring"):
        got = attended({**made, "v": None}, up, method, shares(7), uneven(12), v_width=5)
        want = helpers.oracle(apart, up)
        want["dk"] = want["dk"] + torch.nn.functional.pad(want.pop("dv"), (0, 3))
        for name, t in got.items():
            assert helpers.error(t, want[name]) < 2e-6, name


@check
def nan_and_inf_reach_only_their_queries() -> None:
    made = helpers.make_inputs("odd", torch.float32, sink=True, S=16, S_kv=30, size=4, r=2)
    made["v"][0, 0, 3, 1], made["v"][0, 0, 20, 1], made["v"][1, 1, 25, 0] = torch.inf, -torch.inf, torch.nan
    made["k"][1, 0, 7, 2] = torch.nan
    # The last part's weights are exactly 0 here; a selected value of inf counts all the same.
    far = helpers.make_inputs("all", torch.float32, S=4, S_kv=6)
    far["q"][:], far["k"][:, :, :2], far["k"][:, :, 2:] = 10.0, 10.0, -10.0
    far["v"][0, 0, -1, 1] = torch.inf
    for inputs, method in itertools.product((made, far), ("gather", "ring")):
        want = helpers.run(inputs)
        odd = int((~want["o"].isfinite()).sum())
        got = attended(inputs, None, method, shares(inputs["q"].shape[1]), shares(inputs["k"].shape[2]))
        assert 0 < odd < want["o"].numel() // 2
        # The ring's weights are exp of differences of rounded lse.
        size = want["lse"][want["lse"].isfinite()].abs().max().item()
        for name in ("o", "lse"):
            assert helpers.error(got[name], want[name]) < 1e-6 + torch.finfo(torch.float32).eps * size, (method, name)


@check
def two_runs_give_equal_bits() -> None:
    made = helpers.make_inputs("odd", torch.float32, sink=True, S=20, S_kv=40)
    up = helpers.upstream(made)
    for method in ("gather", "ring"):
        one, two = (attended(made, up, method, shares(20), uneven(40)) for _ in range(2))
        assert all(torch.equal(one[n], two[n]) for n in one), method


@check
def gradients_that_only_some_ranks_need() -> None:
    """The messages of the backward need every rank, whichever inputs require a gradient there."""
    made = helpers.make_inputs("odd", torch.float32, sink=True)
    up = helpers.upstream(made, ("o",))
    want = helpers.oracle(made, up)
    s, t, last = shares(7)[me()], shares(12)[me()], me() == ranks() - 1
    for method in ("gather", "ring"):
        q = leaf(made["q"], (tools.ALL, s), me() == 0)
        k = leaf(made["k"], (tools.ALL, tools.ALL, t), last)
        v, sink, ranges = (here(r) for r in (made["v"][:, :, t], made["sink"], made["ranges"][:, s]))
        o = mi.distributed.selection_attention(q, k, v, ranges, sink=sink, method=method, group=tools.GROUP)
        assert o.requires_grad or (method == "gather" and not last)
        if o.requires_grad:
            o.backward(here(up["o"][:, s]))
        # gather: q needs no message, k needs all ranks
        assert (q.grad is None) == (me() != 0) and (k.grad is None) == (not last)
        if q.grad is not None:
            assert helpers.error(q.grad.cpu(), want["dq"][:, s]) < 2e-5
        if k.grad is not None:
            assert helpers.error(k.grad.cpu(), want["dk"][:, :, t]) < 2e-5
        with torch.no_grad():
            frozen = mi.distributed.selection_attention(q, k, v, ranges, sink=sink, method=method, group=tools.GROUP)
        assert not frozen.requires_grad and torch.equal(frozen, o)


@check
def double_backward_raises() -> None:
    made, texts = helpers.make_inputs("odd", torch.float32), []
    for method in ("gather", "ring"):
        q, k, v = (leaf(made[n], at) for n, at in (("q", (tools.ALL, shares(7)[me()])), ("k", ()), ("v", ())))
        o = mi.distributed.selection_attention(q, k, v, made["ranges"][:, shares(7)[me()]], method=method)
        grads = torch.autograd.grad(o.sum(), (q, k), create_graph=True)
        texts += [message(lambda t=t, q=q: (t + q.sum()).sum().backward(retain_graph=True)) for t in grads]
    kvqm = torch.ones(2, 1, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(mi.distributed.e79_scan(kvqm)[0].sum(), kvqm, create_graph=True)
    texts.append(message(grad.sum().backward))
    assert all("double backward is not supported" in text for text in texts), texts
