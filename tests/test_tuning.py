# SPDX-License-Identifier: Apache-2.0
"""The device's own table of configurations: what it may change, how it is measured, which one is read."""

from __future__ import annotations

import json
import logging
import pathlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mhc_inductor import __main__ as command_line
from mhc_inductor import doctor, fingerprint
from mhc_inductor.kernels import launch, tuned
from mhc_inductor.kernels.e79 import config as e79
from mhc_inductor.kernels.index import config as index
from mhc_inductor.kernels.mhc import config as mhc
from mhc_inductor.kernels.selection import config as selection
from mhc_inductor.kernels.selection import lists_config as lists
from mhc_inductor.tuning import command, table, workloads
from mhc_inductor.tuning.search import Calls, Search, Workload, equal_bits

H200 = launch.DeviceProps(132, "cuda", 90)
ASKED: dict[str, Callable[[], Any]] = {
    "mhc.pre(16384, 4096, 32, True)": lambda: mhc.pre_config(H200, 16384, 4096, 32, True),
    "mhc.post(4096, 4)": lambda: mhc.post_config(4096, 4),
    "mhc.dx(4096, 32, True)": lambda: mhc.dx_config(H200, 4096, 32, True),
    "mhc.dphi(16384, 32, 3)": lambda: mhc.dphi_config(H200, 16384, 32, 3),
    "selection.forward(16, 128, 128, 2, 'cuda', 90)": lambda: selection.forward_config(16, 128, 128, 2, "cuda", 90),
    "lists.tiles(64, 512, 512, 2, 'cuda', 90, True, backward=True)": lambda: lists.list_config(
        64, 512, 512, 2, "cuda", 90, True, backward=True
    ),
    "lists.rows(64, 512, 512, 2)": lambda: lists.rows_config(64, 512, 512, 2),
    "index.scores(128, 2, 'cuda', 90)": lambda: index.score_config(128, 2, "cuda", 90),
    "index.backward(128, 2, 'cuda')": lambda: index.backward_config(128, 2, "cuda"),
    "e79.forward(64)": lambda: e79.forward_config(64),
    "e79.backward(64)": lambda: e79.backward_config(64),
    "e79.gluon_backward(64)": lambda: e79.gluon_backward_config(64),
}
FREE = {"num_stages", "num_warps", "BD", "WK", "AHEAD", "MS"}
"""Fields that a table may choose: none of them is a size of a sum."""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[list[Any]]:
    """Makes torch see the GPUs in a list, and the cache folder an empty one; no table is known yet."""
    seen = [types.SimpleNamespace(name="NVIDIA A100-SXM4-80GB", major=8, minor=0, multi_processor_count=108)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(seen))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: seen[i])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(table.VARIABLE, raising=False)
    table.forget()
    yield seen
    table.forget()


# --- what a table may change --------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ASKED)
def test_a_table_chooses_free_fields_and_nothing_else(key: str) -> None:
    default = ASKED[key]()
    with tuned.recorded() as asked:
        assert ASKED[key]() == default
    assert list(asked) == [key] and asked[key].default == default
    choices = asked[key].choices
    assert choices.keys() <= FREE and all(hasattr(default, field) for field in choices)
    for field, values in choices.items():
        for value in values:
            with table.use({key: {field: value}}):
                got = ASKED[key]()
            assert getattr(got, field) == value
            assert tuned.changed(got, {field: getattr(default, field)}, {field: (getattr(default, field),)}) == default
    forged = {f: 7 for f in vars(default)} | {"no_field": 1}
    with table.use({key: forged, key.replace("(", "(1, ", 1): {f: v[0] for f, v in choices.items()}}):
        assert ASKED[key]() == default
    assert ASKED[key]() == default


def test_without_a_table_nothing_is_asked_of_a_device(monkeypatch: pytest.MonkeyPatch, gpus: list[Any]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("a device was asked for"))
    assert not table.entries() and "python -m mhc_inductor tune" in str(table.found())
    monkeypatch.setenv(table.VARIABLE, "off")
    table.forget()
    assert str(table.found()) == "none: switched off by MHC_INDUCTOR_TUNED=off"


def test_a_table_is_part_of_the_keys_of_compile_caches() -> None:
    plain = fingerprint.fingerprint()
    with table.use({"mhc.post(4096, 4)": {"num_warps": 8}}):
        eight = fingerprint.fingerprint()
    with table.use({"mhc.post(4096, 4)": {"num_warps": 2}}):
        assert len({plain, eight, fingerprint.fingerprint()}) == 3
    assert fingerprint.fingerprint() == plain == fingerprint.sources()


# --- measuring ----------------------------------------------------------------------------------------------


def _fake(path: pathlib.Path, times: Callable[[], float], until: float = float("inf")) -> tuple[Search, list[str]]:
    lines: list[str] = []
    return Search(path, {"device": "fake"}, lambda call: (call(), times())[1], lines.append, until), lines


def _sites() -> Workload:
    """A workload of two configurations: more warps change a bit of dx, and three stages do not compile."""

    def run() -> list[torch.Tensor]:
        post, dx = mhc.post_config(4096, 4), mhc.dx_config(H200, 4096, 32, True)
        if dx.num_stages == 3:
            raise RuntimeError("out of resource: shared memory")
        bits = torch.tensor([float("nan"), -0.0 if dx.num_warps == 4 else 0.0])
        return [bits, torch.full((2,), 1.0) if post.BD else bits]

    return Workload("sites", lambda: Calls(run, run))


def _times() -> float:
    """Returns less for wide posts with 8 warps, much less for what must be refused, and 1 % less for dx's 2 stages."""
    post, dx = mhc.post_config(4096, 4), mhc.dx_config(H200, 4096, 32, True)
    forbidden = dx.num_warps == 4 or dx.num_stages == 3
    return (3.0 - post.BD / 2048 - post.num_warps / 16) * (0.1 if forbidden else 0.99 if dx.num_stages == 2 else 1.0)


def test_the_fastest_values_with_equal_bits_are_kept(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "table.json"
    search, lines = _fake(path, _times)
    assert search.run(_sites())
    content = table.read(path)
    assert content["entries"] == {"mhc.post(4096, 4)": {"BD": 2048, "num_warps": 8}}
    row = content["measured"]["mhc.post(4096, 4)"]
    assert row["default"] == {"BD": 512, "num_warps": 4} and row["ms"] == pytest.approx(1.5)
    assert row["default_ms"] == pytest.approx(2.5) and len(row["tried"]) == 4 + 3
    tried = {json.dumps({k: v for k, v in t.items() if k not in ("ms", "refused")}): t for t in
             content["measured"]["mhc.dx(4096, 32, True)"]["tried"]}  # fmt: skip
    assert tried['{"num_warps": 4}']["refused"] == "other bits"
    assert "out of resource" in tried['{"num_stages": 3}']["refused"] and "ms" in tried['{"num_stages": 2}']
    assert len(lines) == 2 and "BD = 2048, num_warps = 8" in lines[0] and "the closed form" in lines[1]
    assert [f.name for f in path.parent.iterdir()] == ["table.json"]


def test_a_search_goes_on_where_it_was_cut(tmp_path: pathlib.Path) -> None:
    path, count = tmp_path / "table.json", [0]

    def cut() -> float:
        count[0] += 1
        if count[0] > 11:  # all of post, and the first of dx
            raise KeyboardInterrupt
        return _times()

    with pytest.raises(KeyboardInterrupt):
        _fake(path, cut)[0].run(_sites())
    assert list(table.read(path)["measured"]) == ["mhc.post(4096, 4)"]
    search, lines = _fake(path, _times)
    assert search.run(_sites()) and [line.split(":")[0] for line in lines] == ["mhc.dx(4096, 32, True)"]
    whole = tmp_path / "whole.json"
    _fake(whole, _times)[0].run(_sites())
    assert table.read(path)["entries"] == table.read(whole)["entries"]
    # All is measured; of another GPU, nothing is; and after the time nothing is begun.
    assert _fake(path, lambda: pytest.fail("measured again"))[0].run(_sites())
    other = Search(path, {"device": "another"}, lambda call: 1.0, lines.append, until=0.0)
    assert not other.content["measured"] and not other.run(_sites())


def test_equal_bits_are_more_than_equal_numbers() -> None:
    zero, nan = torch.zeros(2), torch.full((2,), float("nan"))
    assert equal_bits([nan, zero], [nan.clone(), zero.clone()]) and not equal_bits([zero], [-zero])
    assert (
        not equal_bits([zero], [zero.view(1, 2)])
        and not equal_bits([zero], [])
        and not equal_bits([zero], [zero.half()])
    )


def test_the_command_runs_the_workloads_of_every_operator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """On a CPU the ops run their formulas: nothing asks for a configuration, and every output has a gradient."""
    monkeypatch.setattr(workloads, "SIZES", (5, 1))
    plan = workloads.workloads(workloads.KINDS, (64,), torch.device("cpu"))
    assert len(plan) == 2 * (2 + 2 + 3 + 2 + 5)
    names = {
        "mHC pre, D = 64": 3 + 4,
        "mHC post, D = 64": 1 + 4,
        "selection, 4 heads of 128": 4,
        "index, 64 heads of 64": 4,
    }
    names["E79, n = 16"] = 3 + 1
    some = [w for w in plan if w.name.rpartition(", ")[0] in names]
    assert [w.name.rpartition(", ")[2] for w in some] == ["forward"] * 2 + ["training"] * 2 + [
        "forward",
        "training",
    ] * 3
    for workload in some:
        calls = workload.make()
        assert len(calls.outputs()) == 2 * names[workload.name.rpartition(", ")[0]], workload.name
        assert (calls.timed() is None) == workload.name.endswith("forward")
    content = command.search(some[:1], tmp_path / "t.json", {"device": "cpu"}, lambda call: 1.0, 1.0)
    assert content == {"header": {"device": "cpu"}, "entries": {}, "measured": {}} == table.read(tmp_path / "t.json")


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match=r"^1$"):
            command_line.main(["tune", "--only", "mhc"])
        assert "no GPU is visible" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^2$"):
        command_line.main(["tune", "--only", "mlp"])
    assert "no such operator: mlp; there are mhc, " in " ".join(capsys.readouterr().err.split())


# --- which table is read ------------------------------------------------------------------------------------

ENTRIES = {"mhc.post(4096, 4)": {"num_warps": 8}}


def _written(path: pathlib.Path | None = None, **changes: Any) -> pathlib.Path:
    of = table.header() | changes
    path = path or table.default_path(of)
    table.write(path, {"header": of, "entries": ENTRIES, "measured": {}})
    table.forget()
    return path


def test_the_table_of_this_gpu_is_read(
    gpus: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    path = _written()
    assert path.parent == tmp_path / "mhc_inductor" / "tuned" and path.name.startswith("nvidia-a100-sxm4-80gb-")
    assert mhc.post_config(4096, 4).num_warps == 8 and mhc.post_config(2560, 4).num_warps == 4
    assert str(path) in doctor._state()["tuned configurations"]
    monkeypatch.setenv(table.VARIABLE, "0")
    table.forget()
    assert mhc.post_config(4096, 4).num_warps == 4 and "switched off" in doctor._state()["tuned configurations"]
    given = _written(tmp_path / "given.json")
    monkeypatch.setenv(table.VARIABLE, str(given))
    assert mhc.post_config(4096, 4).num_warps == 8 and table.found().path == given


def test_a_table_that_is_not_of_this_machine_is_left_alone(
    gpus: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other versions have other names; a file that is named must fit, and says once why it does not."""
    caplog.set_level(logging.WARNING, "mhc_inductor")
    _written(torch="2.0.0")
    assert not table.entries() and "none for this GPU" in table.found().why and not caplog.records
    monkeypatch.setenv(table.VARIABLE, str(_written(tmp_path / "old.json", torch="2.0.0")))
    assert not table.entries() and "is of torch '2.0.0', here" in caplog.text
    for name, text in (
        ("a", "{"),
        ("b", "[]"),
        ("c", '{"header": {}, "entries": {"k": 1}, "measured": {}}'),
        ("d", None),
    ):
        bad = tmp_path / f"{name}.json"
        if text is not None:
            bad.write_text(text)
        monkeypatch.setenv(table.VARIABLE, str(bad))
        table.forget()
        assert not table.entries() and str(bad) in table.found().why and str(bad) in caplog.text
    monkeypatch.delenv(table.VARIABLE)
    _written()
    gpus.append(types.SimpleNamespace(**{**vars(gpus[0]), "name": "NVIDIA H200"}))
    table.forget()
    assert not table.entries() and "different kinds" in table.found().why
    gpus.clear()
    table.forget()
    assert table.found().why == "no GPU is visible"
