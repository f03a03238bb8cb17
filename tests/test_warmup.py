# SPDX-License-Identifier: Apache-2.0
"""warmup compiles everything that later calls need, leaves no trace, and names the arguments of a call that fails."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhc_inductor
from benchmarks.source_hash import ROOT
from mhc_inductor import compat
from mhc_inductor.nn import HyperConnection
from mhc_inductor.warming import side_by_side
from tests.tools import process_state
from tests.tools.warmed import Two

D, N = 16, 4


class Model(nn.Module):
    """Writes all kinds of state in its forward."""

    cache: Tensor
    wide: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, D, max_norm=0.5)
        self.block = HyperConnection(D, N, nn.Linear(D, D), transpose_res=True)
        self.norm = nn.BatchNorm1d(D)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("cache", torch.zeros(4, D))
        self.register_buffer("wide", torch.ones(1, D).expand(4, D))
        self.register_buffer("last", None)
        self.seen: list[int] = []
        self.calls = 0
        self.scratch = torch.zeros(D)

    def forward(self, ids: Tensor, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        self.added = scale
        self.seen.append(self.calls)
        x = self.block(x + self.table(ids)[:, None]).mean(1)
        self.cache[: x.shape[0]].copy_(x.detach()[:4])
        self.scratch.add_(1)
        self.last = x.detach().clone()
        return self.drop(self.norm(x)) * scale

    def forget(self) -> None:
        """Undoes what Dynamo guards on."""
        self.seen.clear()
        self.calls, self.last = 0, None
        del self.added


def arguments(tokens: int = 4) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(tokens)
    return torch.randint(0, 8, (tokens,), generator=g), torch.randn(tokens, N, D, generator=g)


def _state(model: nn.Module) -> dict[str, Any]:
    """Returns the values and identities of all that a call may change."""
    found: dict[str, Any] = {"random": torch.get_rng_state().tolist()}
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        found[name] = (id(t), t.detach().numpy().tobytes(), id(t.grad), None if t.grad is None else t.grad.tolist())
    for name, m in model.named_modules():
        own = {k: v for k, v in vars(m).items() if not k.startswith("_")}
        found[f"module {name}"] = {k: v.tolist() if isinstance(v, Tensor) else repr(v) for k, v in own.items()}
        found[f"buffers {name}"] = {k: id(b) for k, b in m._buffers.items()}
    return found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, no_caches: None) -> Iterator[list[str]]:
    """Lists the graphs, forward and backward, that are compiled, with AOTAutograd in place of Inductor."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[str] = []

    def compiler(kind: str) -> Any:
        def compile_graph(gm: Any, example: Any) -> Any:
            graphs.append(kind)
            return make_boxed_func(gm.forward)

        return compile_graph

    whole = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    monkeypatch.setattr(compat.backend.compile_fx_module(), "compile_fx", lambda gm, inputs, **_: whole(gm, inputs))
    torch._dynamo.reset()
    yield graphs
    torch._dynamo.reset()


def _compiled(model: nn.Module, how: str) -> nn.Module:
    if how == "module":
        return torch.compile(model, backend="mhc_inductor")
    if how == "in place":
        model.compile(backend="mhc_inductor")
    else:
        model.block.compile(backend="mhc_inductor")
    return model


@pytest.mark.parametrize(
    ("how", "mode"), [("module", "train"), ("layer", "train"), ("in place", "no_grad"), ("module", "inference")]
)
def test_a_warm_model_compiles_nothing_and_has_the_state_it_had(seen, how, mode):
    model = Model().train(mode == "train")
    model.norm.eval()
    for p in list(model.parameters())[::2]:
        p.grad = torch.full_like(p, 2.0)
    compiled, grad = _compiled(model, how), mode == "train"
    args = [arguments(4), arguments(7), arguments(9)]
    args[0][1].requires_grad_(grad)
    before, given = _state(model), [a.clone() for pair in args for a in pair]
    context = {"train": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    with context():
        shapes = [args[0], lambda: args[1], {"ids": args[2][0], "x": args[2][1], "scale": 0.5}]
        found = mhc_inductor.warmup(compiled, shapes, backward=grad)
        assert _state(model) == before
        assert all(torch.equal(a, b) for a, b in zip((t for pair in args for t in pair), given, strict=True))
        assert args[0][1].grad is None
        assert len(found.shapes) == 3 and found.shapes[0].graphs and found.graphs == seen.count("forward")
        assert found.seconds > 0 and "float32[7, 4, 16]" in str(found)
        assert ("backward" in seen) is grad
        del seen[:]
        with torch.compiler.set_stance("fail_on_recompile"):
            out = compiled(*args[0])
            if grad:
                out.sum().backward()
            model.forget()
            compiled(args[2][0], args[2][1], scale=0.5)
    assert seen == [] and out.requires_grad is grad


def test_a_backward_by_a_loss_of_ones_own_and_a_second_warmup(seen):
    model = torch.compile(Model(), backend="mhc_inductor")
    shapes = [arguments()]
    first = mhc_inductor.warmup(model, shapes, backward=lambda out: out.square().sum())
    assert seen == ["forward", "backward"] and first.graphs == 1
    again = mhc_inductor.warmup(model, shapes, backward=True)
    assert len(seen) == 2 and again.graphs == 0


class Counting(nn.Module):
    """Writes a cache that it is given."""

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(1)
        return x * cache.sum()


def test_tensors_among_the_arguments_are_put_back(seen):
    x, cache = torch.ones(2, requires_grad=True), torch.zeros(2, 3).expand(2, 2, 3)[0].t()
    x.grad = torch.full((2,), 5.0)
    mhc_inductor.warmup(torch.compile(Counting(), backend="mhc_inductor"), [(x, cache)], backward=True)
    assert seen == ["forward", "backward"] and not cache.any() and x.grad.tolist() == [5.0, 5.0]


def test_a_warmup_changes_nothing_in_the_process(seen):
    mhc_inductor.warmup(torch.compile(Model(), backend="mhc_inductor"), [arguments()], backward=True)
    torch._dynamo.reset()
    model = torch.compile(Model(), backend="mhc_inductor")
    before = process_state.snapshot()
    mhc_inductor.warmup(model, [arguments()], backward=True)
    assert process_state.changed(before, process_state.snapshot()) == []


def test_a_call_that_fails_names_its_arguments_and_leaves_no_trace(seen):
    model, wrong = Model(), (arguments()[0], torch.zeros(4, N, D + 1))
    compiled, before = torch.compile(model, backend="mhc_inductor"), _state(model)
    with pytest.raises(RuntimeError, match=r"^warmup: shapes\[1\] \(int64\[4\], float32\[4, 4, 17\]\): ") as raised:
        mhc_inductor.warmup(compiled, [arguments(), wrong], backward=True)
    assert raised.value.__cause__ is not None and _state(model) == before

    def broken() -> None:
        raise KeyError("gone")

    with pytest.raises(RuntimeError, match=r"^warmup: shapes\[0\], a function: KeyError: 'gone'"):
        mhc_inductor.warmup(compiled, [broken])
    with torch.no_grad(), pytest.raises(ValueError, match=r"^warmup: shapes\[0\] \(int64.*no output requires a grad"):
        mhc_inductor.warmup(compiled, [arguments()], backward=True)
    assert _state(model) == before


def test_wrong_arguments_are_named(seen):
    model = torch.compile(nn.Linear(2, 2), backend="mhc_inductor")
    for shapes in (torch.zeros(2), "x", {"input": torch.zeros(2)}, 3):
        with pytest.raises(TypeError, match=r"^warmup: shapes must be a list of argument tuples, got"):
            mhc_inductor.warmup(model, shapes)
    for entry in (torch.zeros(1, 2), 3, lambda: 3):
        with pytest.raises(TypeError, match=r"^warmup: shapes\[1\] must be a tuple of arguments"):
            mhc_inductor.warmup(model, [(torch.zeros(1, 2),), entry])
    with pytest.raises(TypeError, match=r"^warmup: model must be an nn.Module that is compiled, got function"):
        mhc_inductor.warmup(lambda x: x, [])
    with pytest.raises(ValueError, match=r"^warmup: nothing is compiled"):
        mhc_inductor.warmup(nn.Linear(2, 2), [(torch.zeros(1, 2),)])
    with pytest.raises(ValueError, match=r"^warmup: parameter _orig_mod.weight is not initialised"):
        mhc_inductor.warmup(torch.compile(nn.LazyLinear(2)), [(torch.zeros(1, 2),)])


# ---- side by side


@pytest.fixture
def cached(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Gives an empty cache of graphs on disk, and Dynamo's counters."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    counters.clear()
    options = {"fx_graph_cache": True, "cpp_cache_precompile_headers": False}
    with torch._inductor.config.patch(options), torch._functorch.config.patch(enable_autograd_cache=False):
        yield counters
    torch._dynamo.reset()


def test_processes_compile_what_the_warmup_then_finds(tmp_path: pathlib.Path) -> None:
    """Runs a script, as a user would: what other tests leave in this process is a part of the keys of the cache."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.warmed"], capture_output=True, text=True, env=env, cwd=ROOT
    )
    assert done.returncode == 0 and "warmup" not in done.stderr, done.stderr[-3000:]


def test_an_entry_that_fails_in_processes_is_named_as_without_them(cached, caplog, capfd):
    model = torch.compile(Two(), backend="mhc_inductor", dynamic=False)
    before = _state(model)
    with pytest.raises(RuntimeError, match=r"^warmup: shapes\[0\] \(float32\[2, 3\]\): "):
        mhc_inductor.warmup(model, [(torch.zeros(2, 3),), (torch.zeros(2, D),)], parallel=2)
    assert "1 of 2 processes failed" in caplog.text and "warmup(parallel=2): " in capfd.readouterr().err
    assert _state(model) == before


def test_without_a_cache_or_a_pickle_nothing_runs_ahead(seen, caplog):
    model = Two()
    compiled = torch.compile(model, backend="mhc_inductor")
    assert mhc_inductor.warmup(compiled, [(torch.zeros(2, D),)], parallel=2).graphs == 1
    assert "Inductor's cache of graphs is off" in caplog.text
    model.odd = lambda: None
    with torch._inductor.config.patch(fx_graph_cache=True):
        assert len(mhc_inductor.warmup(compiled, [(torch.zeros(2, D),)], parallel=2).shapes) == 1
    assert "pickling failed" in caplog.text
    with pytest.raises(TypeError, match=r"^warmup: parallel must be an int, got float"):
        mhc_inductor.warmup(compiled, [], parallel=2.0)
    with pytest.raises(ValueError, match=r"^warmup: parallel must be at least 1, got 0"):
        mhc_inductor.warmup(compiled, [], parallel=0)


def test_a_process_compiles_as_its_parent_would():
    """Inside one process: modes and settings, and contexts with ``dynamic=``."""
    stream = io.BytesIO()
    model = torch.compile(Two(), backend="mhc_inductor", dynamic=True)
    side_by_side._Pickler(stream, 4).dump(model)
    assert pickle.loads(stream.getvalue()).dynamo_ctx._dynamic is True
    model = Two()
    model.second.compile(backend="mhc_inductor", dynamic=False)
    compat.processes.compile_in_place(Two(), found := compat.processes.compiled_in_place(model))
    assert list(found) == ["second"] and compat.has_compiled(model) and found["second"]._dynamic is False
    with torch.inference_mode(), torch.autocast("cpu", torch.float16), torch._dynamo.config.patch(recompile_limit=3):
        modes = pickle.loads(pickle.dumps(side_by_side._modes()))
    whole = [torch._dynamo.config, torch._functorch.config, torch._inductor.config]
    with contextlib.ExitStack() as stack:
        for config in whole:
            stack.enter_context(config.patch({}))
            stack.callback(config.load_config, config.get_config_copy())
        with side_by_side._set(modes, 2):
            assert torch._dynamo.config.recompile_limit == 3 and torch.is_inference_mode_enabled()
            assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16


def test_a_constant_of_torch_has_one_place_in_all_processes(monkeypatch):
    """Without the order of the parent, a script that imports torch is where pickle finds the constant."""
    parent = dict.fromkeys(name for name in sys.modules if name != "__mp_main__")
    monkeypatch.setattr(
        sys, "modules", {"__mp_main__": types.SimpleNamespace(torch=torch), **{n: sys.modules[n] for n in parent}}
    )
    side_by_side._order_modules(parent)
    assert [*sys.modules] == [*parent, "__mp_main__"]


def test_a_bar_is_shown_only_where_asked_and_only_with_rich(seen, monkeypatch, capsys):
    model = torch.compile(nn.Linear(2, 2), backend="mhc_inductor")
    shapes = [(torch.zeros(n, 2),) for n in (1, 2)]
    mhc_inductor.warmup(model, shapes)
    assert capsys.readouterr().err == ""
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich draws nothing where it sees no terminal
    mhc_inductor.warmup(model, shapes, progress=True)
    assert "compiling" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setitem(sys.modules, "rich", types.SimpleNamespace())
    assert len(mhc_inductor.warmup(model, shapes, progress=True).shapes) == 2
    assert capsys.readouterr().err == ""


def test_inductor_compiles_both_graphs_ahead_of_the_traffic(no_caches):
    compiled: list[int] = []
    torch._dynamo.reset()
    model = HyperConnection(D, N, nn.Linear(D, D), transpose_res=True)
    step = torch.compile(model, backend="mhc_inductor", options={"post_grad_custom_post_pass": compiled.append})
    x = arguments()[1]
    before = [p.clone() for p in model.parameters()]
    mhc_inductor.warmup(step, [(x,)], backward=True)
    assert len(compiled) == 2 and all(p.grad is None for p in model.parameters())
    with torch.compiler.set_stance("fail_on_recompile"):
        step(x).sum().backward()
    assert len(compiled) == 2 and all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is not None for p in model.parameters())
