"""Checks of ``mhc_inductor.distributed`` that every rank of a gloo group runs; tests/test_distributed.py starts them.

A check splits inputs over the ranks, runs a function, joins the results again, and compares them on rank 0 with the fp64
oracles of one process. A failed check ends its rank, and the others with it.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT = datetime.timedelta(seconds=60)
CHECKS: dict[str, Callable[[], None]] = {}
GROUP: Any = None
"""The group of the running check; None for all ranks."""
DEVICE = torch.device("cpu")
"""Where the functions under test run; the oracles stay on the CPU."""


def check(fn: Callable[[], None]) -> Callable[[], None]:
    CHECKS[fn.__name__] = fn
    return fn


# --- the ranks ----------------------------------------------------------------------------------------------


def run_rank(rank: int, size: int, folder: str, names: Sequence[str]) -> None:
    """Runs the named checks as one rank; writes what failed, by check, to a file of this rank."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    torch.set_num_threads(1)
    import mhc_inductor

    assert "mhc_inductor.distributed" not in sys.modules, "it is imported where it is used"
    early = message(lambda: mhc_inductor.distributed.e79_scan(torch.ones(2, 1, 4)))
    assert early.startswith("RuntimeError: e79_scan: torch.distributed has no process group; call torch."), early
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=TIMEOUT)
    found: dict[str, str] = {}
    for name in names:
        try:
            CHECKS[name]()
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
        (pathlib.Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
        if found[name]:  # the other ranks wait for messages of this check, or are past it
            break
    os._exit(0)  # the group of a dead rank cannot be taken down


def me() -> int:
    return dist.get_rank(GROUP)


def ranks() -> int:
    return dist.get_world_size(GROUP)


def shares(total: int, *parts: int) -> list[slice]:
    """Returns one slice per rank: of the sizes ``parts``, or nearly even."""
    sizes = list(parts) or [total * (i + 1) // ranks() - total * i // ranks() for i in range(ranks())]
    assert len(sizes) == ranks() and sum(sizes) == total, (sizes, total)
    return [slice(a, b) for a, b in itertools.pairwise([0, *itertools.accumulate(sizes)])]


def uneven(n: int) -> list[slice]:
    """Returns shares of very different sizes, 0 among them if there are more than two ranks."""
    return shares(n, *([n // 4, n - n // 4] if ranks() == 2 else [n - n // 4, *[0] * (ranks() - 2), n // 4]))


def everywhere(value: Any) -> list[Any]:
    """Returns the values of all ranks, without the package's own messages."""
    values: list[Any] = [None] * ranks()
    dist.all_gather_object(values, tree_map(_on_host, value), group=GROUP)
    return values


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def here(t: Tensor | None) -> Any:
    """Returns a tensor on the device of the functions under test."""
    return None if t is None else t.to(DEVICE)


def joined(t: Tensor, dim: int) -> Tensor:
    return torch.cat(everywhere(t.detach()), dim)


def total(t: Tensor) -> Tensor:
    """Returns the sum over the ranks, in fp64, in t's dtype."""
    return torch.stack(everywhere(t.detach().double())).sum(0).to(t.dtype)


def leaf(t: Tensor | None, at: tuple[Any, ...] = (), grad: bool = True) -> Tensor | None:
    return None if t is None else here(t[at].clone()).requires_grad_(grad)


def message(fn: Callable[[], Any]) -> str:
    """Returns the type and text of the error that ``fn`` raises."""
    try:
        fn()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


# --- selection attention ------------------------------------------------------------------------------------

_ALL = slice(None)


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
    from mhc_inductor.distributed import selection_attention

    s, t = queries[me()], keys[me()]
    grad = up is not None
    q, k = leaf(made["q"], (_ALL, s), grad), leaf(made["k"], (_ALL, _ALL, t), grad)
    v = k if made["v"] is None else leaf(made["v"], (_ALL, _ALL, t), grad)
    sink = leaf(made["sink"], grad=grad)
    ids = [None if made.get(n) is None else here(made[n][:, at]) for n, at in (("segments_q", s), ("segments_k", t))]
    chosen = {"indices" if listed else "ranges": here(made["indices" if listed else "ranges"][:, s])}
    o, lse = selection_attention(
        q,
        k,
        v,
        **chosen,
        sink=sink,
        segments_q=ids[0],
        segments_k=ids[1],
        return_lse=True,
        method=method,
        group=GROUP,
        **options,
    )
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


def _ranges(dtype: torch.dtype, method: str, cases: Sequence[str], cut: Callable[[int], list[slice]] = shares) -> None:
    import helpers_selection as helpers

    for name in cases:
        made = helpers.make_inputs(**_cases()[name], dtype=dtype)
        up = helpers.upstream(made)
        got = attended(made, up, method, cut(made["q"].shape[1]), cut(made["k"].shape[2]))
        if me() == 0:
            helpers.check(got, made, up)
            _no_selection_is_zero(got)


def _no_selection_is_zero(got: Mapping[str, Tensor]) -> None:
    empty = got["lse"] == -torch.inf
    assert not got["o"][empty].any() and not got["dq"][empty].any()


@check
def gather_ranges() -> None:
    _ranges(torch.float32, "gather", list(_cases()))


@check
def ring_ranges() -> None:
    _ranges(torch.float32, "ring", list(_cases()))


@check
def uneven_parts() -> None:
    for method in ("gather", "ring"):
        _ranges(torch.float32, method, ["odd", "empty", "segments"], uneven)


@check
def bf16() -> None:
    """At most twice the error of the op in one process in the same dtype, plus the rounding of the partial results."""
    import helpers_selection as helpers
    from helpers_mhc import rounding

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
    import helpers_selection as helpers

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
    import helpers_lists as helpers

    cases = (
        {"kind": "odd", "sink": True, "S_kv": 11},
        {"kind": "empty", "shared": True, "Dv": 5, "S_kv": 11, "segments": True},
        {"kind": "odd", "shared": True, "sink": True, "index_dtype": torch.int64, "segments": True},
        {"kind": "random", "shared": True, "dtype": torch.bfloat16, "Dv": 5, "S_kv": 16},
    )
    for case, method in itertools.product(cases, ("gather", "ring")):
        made = helpers.make_inputs(**{"dtype": torch.float32, **case})
        up = helpers.upstream(made)
        got = attended(made, up, method, uneven(5), shares(made["k"].shape[2]), True, v_width=made["v_width"])
        if me() == 0:
            helpers.check(got, made, up)


@check
def keys_that_are_the_values_of_ranges() -> None:
    import helpers_selection as helpers

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
    import helpers_selection as helpers

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
    import helpers_selection as helpers

    made = helpers.make_inputs("odd", torch.float32, sink=True, S=20, S_kv=40)
    up = helpers.upstream(made)
    for method in ("gather", "ring"):
        one, two = (attended(made, up, method, shares(20), uneven(40)) for _ in range(2))
        assert all(torch.equal(one[n], two[n]) for n in one), method


@check
def gradients_that_only_some_ranks_need() -> None:
    """The messages of the backward need every rank, whichever inputs require a gradient there."""
    import helpers_selection as helpers

    from mhc_inductor.distributed import selection_attention

    made = helpers.make_inputs("odd", torch.float32, sink=True)
    up = helpers.upstream(made, ("o",))
    want = helpers.oracle(made, up)
    s, t, last = shares(7)[me()], shares(12)[me()], me() == ranks() - 1
    for method in ("gather", "ring"):
        q = leaf(made["q"], (_ALL, s), me() == 0)
        k = leaf(made["k"], (_ALL, _ALL, t), last)
        v, sink, ranges = (here(r) for r in (made["v"][:, :, t], made["sink"], made["ranges"][:, s]))
        o = selection_attention(q, k, v, ranges, sink=sink, method=method, group=GROUP)
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
            frozen = selection_attention(q, k, v, ranges, sink=sink, method=method, group=GROUP)
        assert not frozen.requires_grad and torch.equal(frozen, o)


@check
def double_backward_raises() -> None:
    import helpers_selection as helpers

    from mhc_inductor.distributed import e79_scan, selection_attention

    made, texts = helpers.make_inputs("odd", torch.float32), []
    for method in ("gather", "ring"):
        q, k, v = (leaf(made[n], at) for n, at in (("q", (_ALL, shares(7)[me()])), ("k", ()), ("v", ())))
        o = selection_attention(q, k, v, made["ranges"][:, shares(7)[me()]], method=method)
        grads = torch.autograd.grad(o.sum(), (q, k), create_graph=True)
        texts += [message(lambda t=t, q=q: (t + q.sum()).sum().backward(retain_graph=True)) for t in grads]
    kvqm = torch.ones(2, 1, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(e79_scan(kvqm)[0].sum(), kvqm, create_graph=True)
    texts.append(message(grad.sum().backward))
    assert all("double backward is not supported" in text for text in texts), texts


# --- E79 ----------------------------------------------------------------------------------------------------


def _pieces(
    made: Mapping[str, Any], ups: Sequence[Mapping[str, Tensor]], cut: Sequence[slice], dtype: torch.dtype
) -> Any:
    """Returns each piece's out, S and M in one process, and the gradients of all inputs; one loop after the other."""
    import helpers_e79 as helpers

    inputs = {n: None if t is None else t.detach().to(dtype).requires_grad_() for n, t in made.items()}
    states = {n: inputs[n] for n in ("S0", "M0")}
    pieces, total = [], torch.zeros((), dtype=dtype)
    for at, up in zip(cut, ups, strict=True):
        biases = {n: t[at] if t is not None and t.dim() == 3 else t for n, t in inputs.items() if n in ("b_s", "b_m")}
        done = helpers.loop({"kvqm": inputs["kvqm"][at], **biases, **states}, dtype)
        states = {"S0": done["S"], "M0": done["M"]}
        pieces.append({n: t.detach() for n, t in done.items()})
        total = total + sum((done[n] * u.to(dtype)).sum() for n, u in up.items())
    leaves = {n: t for n, t in inputs.items() if t is not None}
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return pieces, {
        f"d{n}": torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), grads, strict=True)
    }


def _scan(
    made: Mapping[str, Any], names: Sequence[str], cut: Sequence[slice], chunks: int | None, replicated: bool
) -> tuple[Any, Any, Any]:
    """Runs the function on this rank's steps; returns the pieces of all ranks, the gradients, and the ups."""
    import helpers_e79 as helpers

    from mhc_inductor.distributed import e79_scan

    ups = [helpers.upstream({**made, "kvqm": made["kvqm"][at]}, names, seed=i) for i, at in enumerate(cut)]
    at = cut[me()]
    biases = [leaf(made[n], (at,) if made[n] is not None and made[n].dim() == 3 else ()) for n in ("b_s", "b_m")]
    states = [leaf(made[n]) if replicated or me() == 0 else None for n in ("S0", "M0")]
    inputs = [leaf(made["kvqm"], (at,)), *biases, *states]
    out, S, M = e79_scan(*inputs, group=GROUP, chunks=chunks)
    torch.autograd.backward([{"out": out, "S": S, "M": M}[n] for n in names], [here(ups[me()][n]) for n in names])
    pieces = everywhere({"out": out.detach(), "S": S.detach(), "M": M.detach()})
    grads = {"dkvqm": joined(inputs[0].grad, 0)}
    for n, t in zip(("b_s", "b_m"), biases, strict=True):
        if t is not None:
            grads[f"d{n}"] = joined(t.grad, 0) if t.dim() == 3 else total(t.grad)
    for n, t in zip(("S0", "M0"), states, strict=True):
        every = everywhere(None if t is None else t.grad)
        if every[0] is not None:
            grads[f"d{n}"] = every[0]
        assert all(g is None or (replicated and not g.any()) for g in every[1:])
    return pieces, grads, ups


def _check_scan(
    made: Mapping[str, Any],
    cut: Sequence[slice],
    chunks: int | None,
    names: Sequence[str] = ("out", "S", "M"),
    replicated: bool = False,
) -> None:
    from helpers_mhc import relative, rounding

    pieces, grads, ups = _scan(made, names, cut, chunks, replicated)
    if me() != 0:
        return
    want, plain = (_pieces(made, ups, cut, dtype) for dtype in (torch.float64, torch.float32))
    rows = [(f"{n} of rank {i}", t, want[0][i][n], plain[0][i][n]) for i, p in enumerate(pieces) for n, t in p.items()]
    assert grads.keys() == want[1].keys()
    rows += [(n, t, want[1][n], plain[1][n]) for n, t in grads.items()]
    for name, got, exact, formula in rows:
        low = 1.01 * rounding(got.dtype) if got.dtype in (torch.bfloat16, torch.float16) else 0.0
        allowed = max(2 * relative(formula, exact), 1e-6) + low
        assert relative(got, exact) <= allowed, f"{name}: {relative(got, exact):.3g} above {allowed:.3g}"


@check
def scans() -> None:
    import helpers_e79 as helpers

    for bias, chunks in (("none", 1), ("fixed", 2), ("input", 4), (("fixed", "input"), None)):
        _check_scan(helpers.make_inputs(9, 4, dtype=torch.float32, bias=bias), shares(9), chunks)
    made = helpers.make_inputs(9, 5, dtype=torch.float32, bias="fixed")
    parts = shares(9, *[1] * (ranks() - 1), 10 - ranks())
    for chunks in (2, 5):
        _check_scan(made, parts, chunks, replicated=True)
    _check_scan(helpers.make_inputs(9, 3, dtype=torch.bfloat16, bias="fixed"), parts[::1], 3)
    _check_scan(helpers.make_inputs(9, 3, dtype=torch.float32, state=False), parts, None)
    for names in (("out",), ("S",), ("M",)):
        _check_scan(made, shares(9), 2, names)


@check
def scans_in_fp64_and_without_gradients() -> None:
    import helpers_e79 as helpers

    from mhc_inductor.distributed import e79_scan

    made = helpers.make_inputs(9, 4, bias="fixed")
    at = shares(9)[me()]
    with torch.no_grad():
        out, S, _ = e79_scan(made["kvqm"][at], *(made[n] for n in helpers.NAMES[1:]), group=GROUP, chunks=4)
    outs, states = joined(out, 0), everywhere(S)
    want = helpers.oracle(made)
    assert not out.requires_grad
    assert helpers.relative(outs, want["out"]) < 1e-13 and helpers.relative(states[-1], want["S"]) < 1e-13
    frozen = {n: made[n] for n in helpers.NAMES[:3]}
    S0 = leaf(made["S0"])  # only the first rank's initial state needs a gradient: all ranks take part
    frozen["kvqm"] = frozen["kvqm"][at]
    out, _, _ = e79_scan(**frozen, S0=S0 if me() == 0 else None, group=GROUP)
    assert out.requires_grad
    out.backward(torch.ones_like(out))
    up = {"out": torch.ones(9, 4, 5, dtype=torch.float64)}
    if me() == 0:
        exact = helpers.oracle({**made, "M0": None}, up)["dS0"]
        assert helpers.relative(S0.grad, exact) < 1e-12


# --- index scores, mHC --------------------------------------------------------------------------------------


@check
def index_of_all_keys() -> None:
    import helpers_index as helpers

    from mhc_inductor import index_scores as local_scores
    from mhc_inductor import index_topk as local_topk
    from mhc_inductor.distributed import index_scores, index_topk

    g = torch.Generator().manual_seed(3)
    q, k, w = (torch.randn(size, generator=g) for size in ((2, 10, 3, 8), (2, 14, 8), (2, 10, 3)))
    limit = torch.randint(0, 15, (2, 10), generator=g)
    mask = torch.rand((2, 10, 14), generator=g) < 0.8
    ids = torch.randint(0, 2, (2, 10), generator=g), torch.randint(0, 2, (2, 14), generator=g)
    s, t = shares(10)[me()], uneven(14)[me()]
    up = torch.randn((2, 10, 14), generator=g)
    mine = [leaf(q, (_ALL, s)), leaf(k, (_ALL, t)), leaf(w, (_ALL, s))]
    own = {"limit": limit[:, s], "mask": mask[:, s], "segments_q": ids[0][:, s], "segments_k": ids[1][:, t]}
    own = {name: here(tensor) for name, tensor in own.items()}
    scores = index_scores(*mine, scale=0.5, group=GROUP, **own)
    scores.backward(here(up[:, s]))
    chosen = joined(index_topk(*mine, 5, scale=0.5, group=GROUP, **own), 1)
    got = [joined(scores, 1), joined(mine[0].grad, 1), joined(mine[1].grad, 1), joined(mine[2].grad, 1)]
    wide = [t.double().requires_grad_() for t in (q, k, w)]
    there = {"limit": limit, "mask": mask, "segments_q": ids[0], "segments_k": ids[1]}
    exact = local_scores(*wide, scale=0.5, **there)
    exact.backward(up.double())
    hidden = ~helpers.seen(q, k, (limit, mask, *ids))
    assert torch.equal(got[0] == -torch.inf, hidden)
    want = [exact.detach(), *(t.grad for t in wide)]
    for a, b in zip(got, want, strict=True):
        assert helpers_error(a, b) < 1e-6
    there = {name: here(tensor) for name, tensor in there.items()}
    assert torch.equal(chosen, local_topk(*map(here, (q, k, w)), 5, scale=0.5, **there).cpu())


def helpers_error(got: Tensor, want: Tensor) -> float:
    import helpers_selection

    return helpers_selection.error(got, want)


@check
def mhc_needs_no_messages() -> None:
    """A hyper-connection on token shards: equal outputs, and gradients that sum to those of all tokens."""
    from helpers_mhc import relative

    from mhc_inductor.nn import HyperConnection

    def built() -> Any:
        torch.manual_seed(0)
        site = HyperConnection(dim=16, n=4, sublayer=torch.nn.Linear(16, 16), gamma=True)
        torch.nn.init.normal_(site.phi, std=0.1)
        return site.double()

    x, up = (torch.randn(2, 12, 4, 16, generator=torch.Generator().manual_seed(i)).double() for i in (1, 2))
    s, site = uneven(12)[me()], built()
    mine = leaf(x, (_ALL, s))
    out = site(mine)
    out.backward(up[:, s])
    outs, dx = joined(out, 1), joined(mine.grad, 1)
    grads = {n: total(p.grad) for n, p in site.named_parameters()}
    whole, one = leaf(x), built()
    want = one(whole)
    want.backward(up)
    assert relative(outs, want) < 1e-14 and relative(dx, whole.grad) < 1e-14  # a product's sums depend on its size
    for n, p in one.named_parameters():
        assert relative(grads[n], p.grad) < 1e-13, n


# --- groups, costs, torch.compile ---------------------------------------------------------------------------


@check
def groups_and_meshes() -> None:
    """A group of ranks with gaps, whose numbers are not the default group's; then a mesh of all."""
    global GROUP
    from torch.distributed.device_mesh import init_device_mesh

    some = dist.new_group([0, 2])
    if dist.get_rank() in (0, 2):
        GROUP = some
        try:
            _ranges(torch.float32, "gather", ["odd"])
            _ranges(torch.float32, "ring", ["odd"])
            import helpers_e79

            _check_scan(helpers_e79.make_inputs(6, 2, dtype=torch.float32), shares(6), 2)
        finally:
            GROUP = None
    else:
        text = message(lambda: _scan_of(some))
        assert text == "ValueError: e79_scan: this process (rank 1) is not in the group", text
    mesh = init_device_mesh("cpu", (ranks(),))
    out = _scan_of(mesh)
    assert out.shape == (2, 1, 1)
    text = message(lambda: _scan_of("all"))
    assert text == "TypeError: e79_scan: group must be a process group, a device mesh or None, got str", text


def _scan_of(group: Any) -> Tensor:
    from mhc_inductor.distributed import e79_scan

    return e79_scan(torch.ones(2, 1, 4), group=group)[0]


@contextlib.contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Yields a list of one number: the bytes that this rank sent to others inside the context."""
    from mhc_inductor.distributed import moves

    sent = [0]
    plain = moves._all_gather, dist.all_to_all_single, dist.batch_isend_irecv

    def gathers(out: Tensor, t: Tensor, **kwargs: Any) -> Any:
        sent[0] += t.numel() * (ranks() - 1)
        return plain[0](out, t, **kwargs)

    def scatters(out: Tensor, t: Tensor, into: list[int], sizes: list[int], **kwargs: Any) -> Any:
        sent[0] += sum(sizes) - sizes[me()]
        return plain[1](out, t, into, sizes, **kwargs)

    def passes(ops: list[Any]) -> Any:
        sent[0] += sum(op.tensor.numel() for op in ops if op.op is dist.isend)
        return plain[2](ops)

    moves._all_gather, dist.all_to_all_single, dist.batch_isend_irecv = gathers, scatters, passes
    try:
        yield sent
    finally:
        moves._all_gather, dist.all_to_all_single, dist.batch_isend_irecv = plain


@check
def bytes_are_those_of_the_docstrings() -> None:
    import helpers_e79
    import helpers_selection as helpers

    made = helpers.make_inputs("odd", torch.bfloat16, S=12, S_kv=24, Dk=16, Dv=8)
    up, others = helpers.upstream(made), ranks() - 1
    part = 2 * 2 * 24 // ranks() * (16 + 8) * 2
    row = 20 * 8 * others
    measured = []
    with counted_bytes() as sent:
        for run in (
            lambda: attended(made, None, "gather", shares(12), shares(24)),
            lambda: attended(made, up, "gather", shares(12), shares(24)),
            lambda: attended(made, None, "ring", shares(12), shares(24)),
            lambda: attended(made, up, "ring", shares(12), shares(24)),
            lambda: _scan(helpers_e79.make_inputs(9, 4, dtype=torch.float32), ["out"], shares(9), 2, False),
        ):
            sent[0] = 0
            run()
            measured.append(sent[0] - row)
    states = 2 * 4 * 5 * 5 * 4
    both = states * ((me() > 0) + (me() < others))
    assert measured == [others * part, 2 * others * part, others * part, 3 * others * part, both], measured


@check
def under_torch_compile() -> None:
    """The function breaks the graph: what is around it is compiled, and the gradients are right."""
    import helpers_selection as helpers
    from torch._dynamo.testing import CompileCounter

    from mhc_inductor.distributed import e79_scan, selection_attention

    made = helpers.make_inputs("odd", torch.float32)
    s, t = shares(7)[me()], shares(12)[me()]

    def program(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
        return torch.sin(selection_attention(q * 2, k, v, ranges, method="ring").float()) + 1

    def run(fn: Any) -> list[Tensor]:
        inputs = [leaf(made["q"], (_ALL, s)), leaf(made["k"], (_ALL, _ALL, t)), leaf(made["v"], (_ALL, _ALL, t))]
        out = fn(*inputs, made["ranges"][:, s])
        out.sum().backward()
        return [out.detach(), *(i.grad for i in inputs)]

    counter = CompileCounter()
    got, want = run(torch.compile(program, backend=counter)), run(program)
    assert counter.frame_count == 2, counter.frame_count
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for fn in (program, lambda x, *_: e79_scan(x.flatten(2)[..., :4])[0]):
        torch._dynamo.reset()
        text = message(lambda fn=fn: run(torch.compile(fn, backend="eager", fullgraph=True)))
        assert text.startswith("Unsupported:"), text


# --- errors -------------------------------------------------------------------------------------------------


def _bad_calls() -> dict[str, tuple[Callable[..., Any], str]]:
    """Returns calls that are wrong on the last rank only, and what every rank must say."""
    import mhc_inductor.distributed as cp

    last, n = me() == ranks() - 1, ranks() - 1
    q, k = torch.ones(1, 2, 1, 1, 4), torch.ones(1, 1, 3, 4)
    ranges = torch.zeros(1, 2, 1, 1, 2, dtype=torch.int32)
    x, w = torch.ones(2, 2, 8), torch.ones(1, 2, 1)
    index = torch.ones(1, 2, 1, 4), torch.ones(1, 3, 4), w

    def on_last(wrong: Any, right: Any) -> Any:
        return wrong if last else right

    def attend(q: Any = q, k: Any = k, v: Any = None, r: Any = ranges, **kwargs: Any) -> Any:
        return cp.selection_attention(q, k, k + 1 if v is None else v, r, **kwargs)

    def without_grad() -> Any:
        with torch.set_grad_enabled(not last):
            return attend(k=k.clone().requires_grad_())

    there = f"on rank {n} of the group:"
    same = "must be the same on every rank of the group, got"
    name = "ValueError: selection_attention:"
    scan = "ValueError: e79_scan:"
    return {
        "shape": (lambda: attend(k=on_last(k[0], k)), f"{name} {there} k must have shape [B, G, S_kv, Dk]"),
        "dtype": (lambda: attend(v=on_last(k.half(), k + 1)), f"Type{name[5:]} {there} v must have q's dtype"),
        "type": (lambda: attend(r=on_last("all", ranges)), f"Type{name[5:]} {there} ranges must be a tensor"),
        "method": (
            lambda: attend(method=on_last("rings", "ring")),
            f"{name} {there} method must be 'gather' or 'ring'",
        ),
        "methods": (lambda: attend(method=on_last("ring", "gather")), f"{name} method {same} gather on rank 0"),
        "sizes": (lambda: attend(*on_last((q[..., :2], k[..., :2]), (q, k))), f"{name} q's B, G, h, Dk {same}"),
        "scales": (lambda: attend(scale=on_last(0.5, 0.25)), f"{name} scale {same} 0.25 on rank 0"),
        "shared": (lambda: attend(v=on_last(k, k + 1)), f"{name} whether v is k {same} False on rank 0"),
        "selection": (
            lambda: attend(r=on_last(None, ranges), indices=on_last(ranges[..., 0], None)),
            f"{name} the selection {same} ranges on rank 0",
        ),
        "nothing": (lambda: attend(r=on_last(None, ranges)), f"Type{name[5:]} {there} ranges must be a tensor"),
        "broken": (lambda: attend(scale=on_last(_Broken(), 0.5)), ""),
        "no_grad": (without_grad, f"{name} gradients are needed, but switched off"),
        "functions": (on_last(lambda: cp.e79_scan(x), attend), "selection_attention on rank 0"),
        "steps": (lambda: cp.e79_scan(on_last(x[:0], x)), f"{scan} {there} kvqm[T, B, 4n] must have at least one"),
        "chunks": (
            lambda: cp.e79_scan(x, chunks=on_last(3, 2)),
            f"{scan} {there} chunks must be from 1 to B = 2, got 3",
        ),
        "chunk counts": (lambda: cp.e79_scan(x, chunks=on_last(1, 2)), f"{scan} chunks {same} 2 on rank 0"),
        "chunk type": (lambda: cp.e79_scan(x, chunks=on_last(1.0, 2)), f"Type{scan[5:]} {there} chunks must be an int"),
        "states": (
            lambda: cp.e79_scan(x, S0=on_last(torch.ones(2, 2, 2), None)),
            f"{scan} S0 must be given on the group's first rank",
        ),
        "mask": (
            lambda: cp.index_scores(*index, mask=torch.ones(1, 2, on_last(3, 3 * ranks()), dtype=torch.bool)),
            f"ValueError: index_scores: {there} mask must broadcast to [B, S, T] with T = {3 * ranks()}",
        ),
        "topk": (lambda: cp.index_topk(*index, 3 * ranks() + 1), "ValueError: index_topk: topk must be at most T"),
        "topks": (
            lambda: cp.index_topk(*index, on_last(-1, 2)),
            f"ValueError: index_topk: {there} topk must be at least 0",
        ),
    }


class _Broken:
    """A scale that no check can read."""

    def __eq__(self, other: object) -> bool:
        raise KeyError("broken")

    __hash__ = None  # type: ignore[assignment]


@check
def errors_on_every_rank() -> None:
    for name, (call, expected) in _bad_calls().items():
        texts = everywhere(message(call))
        if name == "functions":  # each rank's message begins with the function that it called
            texts = [text.split(": ", 2)[2] for text in texts]
        assert texts[0] != "no error" and len(set(texts)) == 1, (name, texts)
        assert expected in texts[0], (name, texts[0])


@check
def a_rank_does_not_answer() -> None:
    from mhc_inductor.distributed import e79_scan

    short = dist.new_group(timeout=datetime.timedelta(seconds=1))
    e79_scan(torch.ones(1, 1, 4), group=short)  # connects the ranks
    texts = everywhere("" if me() == ranks() - 1 else message(lambda: e79_scan(torch.ones(1, 1, 4), group=short)))
    assert all("RuntimeError" in text and "imed out" in text for text in texts[:-1]), texts


@check
def a_rank_dies() -> None:
    """The others get an error, not a hang. The last check: the group is gone."""
    if me() == ranks() - 1:
        return  # run_rank ends the process
    import helpers_selection as helpers

    made = helpers.make_inputs("odd", torch.float32)
    text = message(lambda: attended(made, None, "ring", shares(7), shares(12)))
    assert text != "no error", text
