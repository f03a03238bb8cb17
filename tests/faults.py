# SPDX-License-Identifier: Apache-2.0
"""Breaks the package on purpose, one fault at a time, and looks which of the tests that each commit runs see it.

``python -m tests.faults`` plants each fault in a copy of the tree, runs the tests named with it as ``./dev test`` chooses
their cases, up to the first that fails, and writes which that was to ``benchmarks/results/faults.json``. It exits with 1 if
a fault is not seen. A change that makes the tests fewer, shorter or other ones, such as of
:data:`tests.tools.each_commit.SECONDS`, is followed by such a run: what was seen before must be seen after it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import track

from benchmarks import running
from benchmarks.source_hash import ROOT, TESTED, source_hash
from tests.tools.each_commit import SECONDS, environment

RESULT = ROOT / "benchmarks" / "results" / "faults.json"
_PASS = "mhc_inductor/routing"


class Fault(NamedTuple):
    """A piece of ``file`` that is replaced, and the tests, as ``FILE::FUNCTION``, of which one must fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = (
    Fault(
        "a tensor is written in place within a formula",
        f"{_PASS}/placement.py",
        "if any(self.view.written_between(n, last + 1, left=True, after=at) for n, at in since):",
        "if not since:",
        "test_laws_writes.py::test_streams_written_in_inference_mode_between_two_blocks",
    ),
    Fault(
        "an op reads its input after a later write",
        f"{_PASS}/placement.py",
        "overwritten = [n for n, look in looks.items() if view.written_between(n, at, after=look)]",
        "overwritten: list[fx.Node] = []",
        "test_laws_writes.py::test_queries_written_after_the_scores_read_them",
    ),
    Fault(
        "a value with a hook goes away",
        f"{_PASS}/placement.py",
        "if user not in region and (effect.watches or not effect.known):",
        "if user not in region and not effect.known:",
        "test_laws_autograd.py::test_values_of_a_block_hooked_after_it",
    ),
    Fault(
        "gradients are switched off in the middle of a formula",
        f"{_PASS}/placement.py",
        "if len(grads) > 1:",
        "if not grads and flowing:",
        "test_laws_modes.py::test_a_step_without_grad_and_one_with_it",
    ),
    Fault(
        "a parameter gets a gradient of zeros in place of none",
        f"{_PASS}/edit.py",
        "if roots & ~view.reached_anyway(old):",
        "if not view.roots:",
        "test_laws_autograd.py::test_an_op_gives_zeros_only_to_what_gets_a_gradient_anyway",
    ),
    Fault(
        "a result requires a gradient where the formula's does not",
        f"{_PASS}/edit.py",
        'new = self.emit("detach", new)',
        "pass",
        "test_laws_autograd.py::test_results_of_one_step_require_grad_only_where_a_part_of_theirs_trains",
    ),
    Fault(
        "two results share memory",
        f"{_PASS}/edit.py",
        "return claimed.setdefault(mine, theirs) != theirs or self._repeats()",
        "return False",
        "test_laws_autograd.py::test_two_equal_loops_are_no_aliases",
    ),
    Fault(
        "an edit that failed is undone in part",
        f"{_PASS}/edit.py",
        "user.args, user.kwargs = args, kwargs",
        "pass",
        "test_routing_plugin.py::test_a_failing_edit_leaves_the_model_as_it_was",
    ),
    Fault(
        "a rounding of the model's is dropped",
        f"{_PASS}/placement.py",
        "if not narrow or all(",
        "if narrow or all(",
        "test_laws_values.py::test_an_input_of_a_block_stays_rounded",
    ),
    Fault(
        "what the op saves for its backward is written",
        f"{_PASS}/placement.py",
        "found.append(node)",
        "pass",
        "test_laws_autograd.py::test_a_bias_written_before_the_backward",
    ),
    Fault(
        "the comparison of an op with its formula finds nothing",
        f"{_PASS}/comparison.py",
        "if not error <= bar:",
        "if not off:",
        "test_routing_verify.py::test_a_wrong_op_is_refused",
    ),
    Fault(
        "a size that was taken as fixed has no guard",
        f"{_PASS}/edit.py",
        "int(size)",
        "pass",
        "test_laws_values.py::test_another_size_than_the_one_that_was_taken_as_fixed_is_routed_anew",
    ),
    Fault(
        "a call that writes its argument counts as one that does not",
        f"{_PASS}/effects.py",
        "compat.storage_key(t) in writes.storages or t.requires_grad",
        "t.requires_grad",
        "test_routing_effects.py::test_writes_are_found",
    ),
    Fault(
        "autocast goes on after its end",
        f"{_PASS}/effects.py",
        "autocast=before.get(value, outer).autocast",
        "autocast=now.autocast",
        "test_routing_effects.py::test_modes_belong_to_positions",
    ),
    Fault(
        "a quantised weight is taken for a plain one",
        f"{_PASS}/graph/values.py",
        "return (type(t), shape, stride, t.dtype, t.device)",
        "return (shape, stride, t.dtype, t.device)",
        "test_routing_known_calls.py::test_a_tensor_of_another_class_is_another_call",
    ),
    Fault(
        "a bias is read from its first row on",
        f"{_PASS}/operators/mhc/formula.py",
        "return Piece(ref.value, start.factor, rows)",
        "return Piece(ref.value, 0, rows)",
        "test_routing_spellings.py::test_random_spellings_are_routed",
    ),
    Fault(
        "streams are mixed by the transposed matrix",
        f"{_PASS}/operators/mhc/mixing.py",
        "bool(mix.place)",
        "not mix.place",
        "test_routing_spellings.py::test_random_spellings_are_routed",
    ),
    Fault(
        "gradients of a loop's inputs are cut where they are asked for",
        f"{_PASS}/operators/e79/outputs.py",
        "for role, reached in wanted.items() if not reached)",
        "for role, reached in wanted.items() if reached)",
        "test_laws_autograd.py::test_inputs_of_a_loop_that_no_output_needs_get_no_gradient",
    ),
    Fault(
        "any index counts as one within its tensor",
        f"{_PASS}/masks/index_checks.py",
        "return picked_size(a) == size",
        "return picked_size(a) is not None",
        "test_routing_masks.py::test_indices_of_a_topk_over_more_keys_raise_as_before",
    ),
    Fault(
        "rows without a key are 0",
        f"{_PASS}/operators/selection/empty_rows.py",
        "if rows in (Rows.SEEN, Rows.ZERO) or",
        "if rows in (Rows.SEEN, Rows.ZERO, Rows.NAN, Rows.MEAN) or",
        "test_routing_masks.py::test_rows_without_keys_are_the_formulas",
    ),
    Fault(
        "a window has one key too many",
        f"{_PASS}/operators/selection/intervals.py",
        "at = rest.times(-c)",
        "at = rest.times(-c).shifted(1)",
        "test_routing_masks.py::test_rows_without_keys_are_the_formulas",
    ),
    Fault(
        "an indexer picks -1 where topk picks a hidden key",
        f"{_PASS}/operators/index/emit.py",
        "if mask is not None:\n            chosen",
        "if not self.device:\n            chosen",
        "test_routing_index_order.py::test_a_finite_fill_marks_hidden_picks",
    ),
    Fault(
        "generated code of an older version is taken from the cache",
        "mhc_inductor/fingerprint.py",
        "digest.update(path.read_bytes())",
        "pass",
        "test_cache.py::test_the_key_of_cached_code_is_of_every_source",
    ),
    Fault(
        "a second derivative is none",
        "mhc_inductor/ops/registry.py",
        "def _double_grad(name: str, ctx: Any, *grads: Any) -> None:\n",
        "def _double_grad(name: str, ctx: Any, *grads: Any) -> None:\n    return None\n",
        "test_ops_contract.py::test_double_backward_is_refused_never_zero",
    ),
    Fault(
        "an argument of a wrong shape reaches a kernel",
        "mhc_inductor/ops/checks.py",
        "torch._check_value(got == want, message)",
        "pass",
        "test_ops_bad_input.py::test_a_wrong_shape_is_named",
    ),
    Fault(
        "a gradient is added that is computed only later",
        "mhc_inductor/passes.py",
        "or other is dx or order[other] > order[node]:",
        "or other is dx:",
        "test_codegen.py::test_the_kernel_adds_no_gradient_that_is_computed_after_it",
    ),
    Fault(
        "disable() leaves routing on",
        "mhc_inductor/backend.py",
        "            _enabled = None\n            _entry.__exit__()",
        "            _enabled = None",
        "test_laws_process.py::test_disable_takes_everything_back",
    ),
    Fault(
        "a kernel adds another gate's bias",
        "kernels/e79/forward.py",
        "h += bmr",
        "h += bsr",
        "test_interpreter.py::test_kernels_under_the_interpreter[e79]",
    ),
)


def planted(fault: Fault, text: str) -> str:
    """Returns the text of a fault's file with the fault. Raises ValueError unless its old text stands there once."""
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has {text.count(fault.old)} times {fault.old!r}; expected once")
    return text.replace(fault.old, fault.new)


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """Yields a copy of the files that git knows, which is what ``import mhc_inductor`` finds there."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in listed.splitlines():
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
        for part in ("kernels", "lowerings"):
            (tree / "mhc_inductor" / part).symlink_to(Path("..") / part)
        yield tree


def seen(fault: Fault | None, tests: str, tree: Path) -> tuple[str, float]:
    """Returns the first of ``tests`` that fails with a fault, "" where none does, and how many seconds that took.

    ``tree`` is a copy of the files. It stays as it was, and what Python compiled there serves the next fault.
    """
    start = time.perf_counter()
    env = environment() | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider")
    with _planted_in(tree, fault) if fault is not None else contextlib.nullcontext():
        names = [f"tests/{name}" for name in tests.split()]
        done = subprocess.run([*command, *names], cwd=tree, env=env, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) or (done.returncode == 1) != (failed is not None):
        raise RuntimeError(f"the tests of {tests} did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[1] if failed else "", round(time.perf_counter() - start, 1)


@contextlib.contextmanager
def _planted_in(tree: Path, fault: Fault) -> Iterator[None]:
    file = tree / fault.file
    text = file.read_text()
    file.write_text(planted(fault, text))
    try:
        yield
    finally:
        file.write_text(text)


def main(
    jobs: Annotated[int, typer.Option(help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[Path, typer.Option(help="Where the result goes.")] = RESULT,
    only: Annotated[str, typer.Option(help="Part of the names of the faults to plant; nothing is written then.")] = "",
) -> None:
    """Plant each fault and run its tests; exit with 1 if one is not seen."""
    console = Console()
    faults = [fault for fault in FAULTS if only in fault.name]
    hashed = source_hash(folders=TESTED)
    found: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        free: queue.Queue[Path] = queue.Queue()
        for _ in range(jobs):
            free.put(stack.enter_context(copied()))

        def see(fault: Fault) -> tuple[str, float]:
            tree = free.get()
            try:
                return seen(fault, fault.tests, tree)
            finally:
                free.put(tree)

        runs = stack.enter_context(ThreadPoolExecutor(jobs)).map(see, faults)
        for fault, (test, took) in zip(faults, track(runs, "planting", len(faults), console=console), strict=True):
            found[fault.name] = {"file": fault.file, "seen_by": test.removeprefix("tests/"), "seconds": took}
            console.print(f"{took:6.1f} s  {fault.name}: {test or 'NOT SEEN'}", markup=False, soft_wrap=True)
    if not only:
        running.save({"tested_sources_sha256": hashed, "seconds_of_a_test_function": SECONDS, "faults": found}, out)
    unseen = [name for name, result in found.items() if not result["seen_by"]]
    console.print(f"{len(found) - len(unseen)} of {len(found)} faults seen")
    if unseen:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
