# SPDX-License-Identifier: Apache-2.0
"""Configures the tests: kernels run on a GPU if there is one, else in Triton's interpreter in a separate process."""

from __future__ import annotations

import gc
import os
import pathlib
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest
import torch
import torch._inductor.config
from _pytest.python import pytest_pyfunc_call as call_test
from torch._inductor.cpu_vec_isa import supported_vec_isa_list, valid_vec_isa_list

from tests import golden
from tests.tools import each_commit, quick_torch

pytest.register_assert_rewrite("tests.oracles.op_contract")
golden.watch()
GPU = torch.cuda.is_available()
os.environ["MHC_INDUCTOR_TUNED"] = "0"  # the closed forms are tested, also on a machine that was tuned
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WHOLE = os.environ.get("MHC_INDUCTOR_TESTS") == "whole"  # also what tests/all_offline.py compiles

# Without a GPU, tests/test_interpreter.py runs the kernels in processes that turn the interpreter on; what is interpreted
# does not compile.
collect_ignore_glob = ["test_offline*.py"] if INTERPRETED else [] if GPU else ["test_kernels_*.py"]

if not GPU:
    torch.set_num_threads(1)  # tensors have a few elements: two threads spend half of the time waiting for each other
    # Scalar C++ compiles in two thirds of the time; tests of Inductor's vector code use ``vectorised``. The two
    # settings on valid ISAs skip the three probe programs that each process with a new cache would compile.
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
    torch._inductor.config.cpp.simdlen = 1
    torch._inductor.config.cpp.vec_isa_ok = False

if INTERPRETED and not GPU:
    from tests.tools import interpreter_fixes

    interpreter_fixes.apply()

quick_torch.apply()

T = TypeVar("T")


def some(every: T, few: T) -> T:
    """Returns ``every`` case on a GPU, else the ``few`` that still cover each property in the slow interpreter."""
    return every if GPU else few


def cases(**groups: Any) -> list[Any]:
    """Returns the options of each case as a parameter, named by its group and its options.

    A group is ``(options, names, values)``, with values of the named options for each case, or a list of options.
    """
    found = []
    for group, rows in groups.items():
        if isinstance(rows, tuple):
            base, names, values = rows
            each = [v if " " in names else (v,) for v in values]
            rows = [{**base, **dict(zip(names.split(), v, strict=True))} for v in each]
        for row in rows:
            name = " ".join([group, *(f"{k}={v}".replace("torch.", "") for k, v in row.items())])
            found.append(pytest.param(row, id=name))
    return found


OPEN = pathlib.Path(__file__).with_name("open_laws.txt")
"""Lists the law tests that fail, each with its reason. They are strict xfails: remove one that passes."""


def _mark_open(items: list[pytest.Item]) -> None:
    lines = [line.partition("  # ") for line in OPEN.read_text().splitlines() if line.startswith("tests/")]
    reasons = {test.strip(): reason for test, _, reason in lines}
    for item in items:
        if item.nodeid in reasons:
            item.add_marker(pytest.mark.xfail(reason=reasons[item.nodeid], strict=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_open(items)
    items.sort(key=lambda item: item.get_closest_marker("few_objects") is None)
    absent = [mark for mark, wanted in (("gpu", GPU), ("whole", WHOLE)) if not wanted]
    _deselect(config, items, [item for item in items if any(map(item.get_closest_marker, absent))])
    if each_commit.COMMIT:
        _deselect(config, items, each_commit.left_out(items))


def _deselect(config: pytest.Config, items: list[pytest.Item], left_out: list[pytest.Item]) -> None:
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        without = set(left_out)
        items[:] = [item for item in items if item not in without]


def pytest_collection_finish(session: pytest.Session) -> None:
    _check_groups(session)
    quick_torch.rare_collections()  # again: now without the garbage of the collection


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Calls the test as pytest does, with room for frames."""
    return quick_torch.roomy(call_test, pyfuncitem)


def pytest_unconfigure() -> None:
    gc.freeze()  # Python would look through all objects before it ends: 3 s of a short run


def _check_groups(session: pytest.Session) -> None:
    """Raises where pytest-xdist ignores its groups: each worker would make what the tests of a module share."""
    if not getattr(session.config.option, "loadgroup", False):
        return
    apart = [i.nodeid for i in session.items if i.get_closest_marker("xdist_group") and "@" not in i.nodeid]
    if apart:
        raise pytest.UsageError(f"pytest {pytest.__version__}: pytest-xdist does not group {apart[0]} and others")


def pytest_report_header() -> str:
    where = torch.cuda.get_device_name() if GPU else "Triton's interpreter, on the CPU; tests marked gpu are deselected"
    rest = "" if WHOLE else "; tests marked whole are left to tests/all_offline.py"
    some = "; slow tests run in part: python -m tests.suite runs all" if each_commit.COMMIT else ""
    return f"mhc_inductor: kernels run on {where}{rest}{some}"


@pytest.fixture(autouse=True)
def no_hooks_of_a_failed_export() -> Iterator[None]:
    """Removes what torch.export leaves on every module when it fails: Dynamo breaks graphs there (2.11 and 2.12)."""
    yield
    torch.nn.modules.module._global_buffer_registration_hooks.clear()


@pytest.fixture(autouse=True)
def golden_table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compares what the test's formulas became with the golden table."""
    golden.start()
    yield
    name = golden.named(request.node.nodeid)
    different = None if name is None else golden.check(name)
    if different:
        pytest.fail(different, pytrace=False)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prepares the backend "mhc_inductor" as users call it, with AOTAutograd in place of Inductor."""
    import torch._inductor.compile_fx as module
    from torch._dynamo.backends.debugging import aot_eager

    import mhc_inductor

    mhc_inductor.enable()
    mhc_inductor.disable()

    def compile_fx(gm: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return aot_eager(gm, example_inputs)

    torch._dynamo.reset()
    monkeypatch.setattr(module, "compile_fx", compile_fx)
    yield
    mhc_inductor.disable()
    torch._dynamo.reset()


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forgets what Dynamo has compiled, before and after the test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def device() -> str:
    return "cuda" if GPU else "cpu"


@pytest.fixture
def builder(request: pytest.FixtureRequest, device: str) -> Any:
    """Builds launches with poisoned memory. Few multiprocessors give the interpreter few programs to run."""
    from mhc_inductor.kernels.launch import DeviceProps
    from tests.oracles.poisoned import Poisoned

    few = DeviceProps(getattr(request.module, "MULTIPROCESSORS", 2), "cuda", 90)
    integers = getattr(request.module, "INTEGERS", -7)
    return Poisoned(torch.device(device), None if GPU else few, integers=integers)


@pytest.fixture
def vectorised(no_caches: None) -> Iterator[None]:
    """Compiles C++ with the CPU's vector instructions, as users get it, whatever this process compiled before.

    Takes no code from torch's cache on disk, whose key leaves the instructions out: code that another process wrote
    for AVX2 and this one builds with AVX-512 writes past its outputs, and the other way round it leaves some unwritten.
    """
    with torch._inductor.config.patch({"cpp.simdlen": None, "cpp.vec_isa_ok": None}):
        _forget_vec_isa()
        yield
    _forget_vec_isa()


def _forget_vec_isa() -> None:
    """Clears what torch remembers of the CPU's vector instructions. Some classes keep an answer of their own."""
    for answer in (valid_vec_isa_list, *(type(isa).__bool__ for isa in supported_vec_isa_list)):
        if hasattr(answer, "cache_clear"):
            answer.cache_clear()


@pytest.fixture
def no_caches() -> Iterator[None]:
    """Turns off compile caches, and padding of products, which is decided by timing on a GPU that may be absent."""
    import torch._functorch.config as functorch_config

    with (
        torch._inductor.config.patch(fx_graph_cache=False, shape_padding=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limits torch to one thread, for files of tiny tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
