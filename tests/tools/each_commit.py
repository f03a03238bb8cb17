# SPDX-License-Identifier: Apache-2.0
"""Chooses the tests that ``./dev test`` runs, so that it takes some 10 minutes on two cores.

``python -m tests.suite`` runs every case of every test and writes how long each test function took, if that was a second
or more. Of such a function as many cases run as fit into ``SECONDS``, at least one. A function whose cases took more
than ``LONGEST`` on average is left out, unless ``LAWS`` names it: then one case runs. Functions and cases marked
``every_case`` run whole. The choice is the same on every machine: it depends only on the committed times and on the
cases' names.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import pytest

from benchmarks.source_hash import ROOT

RESULT = ROOT / "benchmarks" / "results" / "tests.json"
SECONDS = 0.25
"""Seconds for all cases of a test function."""
LONGEST = 1.0
"""Seconds of an average case above which a test function is left out."""
LAWS: dict[str, tuple[str, ...]] = {
    "adversarial programs": ("test_adversarial.py::test_random_programs_give_what_eager_gives",),
    "caches of compiled code": (
        "test_cacheable.py::test_a_routed_model_is_cached",
        "test_process_state.py::test_a_graph_with_ops_under_the_plain_backend_is_compiled_with_the_pass_and_its_key",
    ),
    "code of others that calls ours": (
        "test_example_trainer.py::test_accelerate_on_one_process",
        "test_try_model.py::test_nothing_of_a_llama_is_routed_and_training_is_compared",
    ),
    "code of the pages": (
        "test_notebook.py::test_the_notebook_runs_again_with_the_same_kinds_of_output",
        "test_pages.py::test_the_code_of_a_page_runs",
        "test_site.py::test_the_site_builds_strictly",
    ),
    "disable() takes everything back": ("test_laws_process.py::test_disable_takes_everything_back",),
    "failure at every edit and in every function of the pass": (
        "test_laws_process.py::test_a_failure_in_any_function_of_the_pass_leaves_a_graph_that_is_right",
        "test_routing_plugin.py::test_a_failing_edit_leaves_the_model_as_it_was",
    ),
    "families in every kind of mode": ("test_sparse_models.py::test_routed_of_all_and_the_same_results",),
    "formulas on DTensors": ("test_laws_process.py::test_a_block_on_dtensors_compiles",),
    "kernels compiled for absent GPUs": ("test_offline_selection.py::test_kernels_compile_without_unnamed_spills",),
    "models that decode": ("test_decoding_families.py::test_routed_calls_with_a_cache_give_the_full_forward",),
    "models on several ranks": ("test_distributed.py::test_ranks",),
    "package without an installation": ("test_wheel.py::test_bare_checkout",),
    "planted failures are found": (
        "test_adversarial.py::test_a_planted_wrong_rewrite_is_found_and_the_program_shrinks",
        "test_routing_e79.py::test_a_mutant_is_not_routed_and_the_report_says_why",
        "test_routing_selection.py::test_a_mutant_is_not_routed_and_the_report_says_why",
        "test_routing_spellings.py::test_no_mutant_is_routed",
        "test_routing_verify.py::test_a_wrong_op_is_refused",
    ),
    "processes that are spawned": ("test_engines.py::test_a_spawned_process_runs_pickled_models",),
    "random modules": ("test_routing_fuzz.py::test_random_modules_give_the_same_with_and_without_routing",),
    "random spellings": (
        "test_routing_e79.py::test_random_spellings_are_routed",
        "test_routing_index.py::test_spellings",
        "test_routing_selection.py::test_random_spellings_are_routed",
        "test_routing_spellings.py::test_random_spellings_are_routed",
    ),
    "resume after a kill": ("test_example_fsdp.py::test_killed_and_resumed_has_the_same_losses",),
    "state of the process": ("test_process_state.py::test_a_compile_changes_nothing_in_the_process",),
    "through Inductor": (
        "test_routing_e79.py::test_compiled_with_inductor",
        "test_routing_spellings.py::test_through_inductor",
    ),
}
"""Test functions of each class of laws. Issues were closed on these, so each commit runs a case of each."""
FAMILY_CASES = 186
"""Cases of families and modes (``tests/test_sparse_models.py``), all of which the suite runs."""
COMMIT = os.environ.get("MHC_INDUCTOR_TESTS") == "commit"
"""Whether this is a run of ``./dev test`` without options."""


class Case(NamedTuple):
    """One case of a test: its name, and the place of each of its parameters in the parameter's list."""

    name: str
    values: frozenset[tuple[str, int]]


def recorded() -> dict[str, tuple[int, float]]:
    """Returns, for each test function that took at least a second, its number of cases and their seconds."""
    return json.loads(RESULT.read_text())["seconds"] if RESULT.exists() else {}


def spread(cases: Iterable[Case], most: int) -> list[Case]:
    """Returns ``most`` cases that together have many values of the parameters, in any order of ``cases`` the same."""
    left = sorted(cases, key=lambda c: (zlib.crc32(c.name.encode()), c.name))
    if most >= len(left):
        return left
    taken: list[Case] = []
    seen: set[tuple[str, int]] = set()
    while len(taken) < most:
        best = max(left, key=lambda c: len(c.values - seen))  # the first of the best
        left.remove(best)
        taken.append(best)
        seen |= best.values
    return taken


def chosen(
    tests: Mapping[str, list[Case]], times: Mapping[str, tuple[int, float]], laws: Iterable[str] = ()
) -> set[tuple[str, str]]:
    """Returns the cases to run, by test and name: every case of a test that is quick or that has no recorded time.

    Of each of ``laws`` at least one case runs.
    """
    least = dict.fromkeys(laws, 1)
    return {
        (test, case.name)
        for test, cases in tests.items()
        for case in spread(cases, max(least.get(test, 0), most_of(*times.get(test, (1, 0.0)), len(cases))))
    }


def most_of(count: int, seconds: float, cases: int) -> int:
    """Returns how many of a test's ``cases`` run, where all cases were ``count`` and took ``seconds`` when last timed."""
    if seconds <= SECONDS:
        return cases
    return max(1, int(SECONDS * count / seconds)) if seconds <= LONGEST * count else 0


def ungrouped(nodeid: str) -> str:
    """Returns the name of a case without the @group that pytest-xdist appends."""
    return re.sub(r"@\w+$", "", nodeid)


def function(nodeid: str) -> str:
    """Returns the name of a case's test function: without parameters, and without the @group that pytest-xdist appends."""
    return nodeid.partition("[")[0].partition("@")[0]


def environment() -> dict[str, str]:
    """Returns the environment of a process that runs what each commit runs, without the options of this one's pytest."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"MHC_INDUCTOR_TESTS": "commit"}


def selected(*files: str) -> set[str]:
    """Returns the names of the cases of ``files`` that ``./dev test`` runs, as pytest collects them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *sorted(files)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {line for line in done.stdout.splitlines() if line.startswith("tests/")}


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns the collected cases that ``./dev test`` does not run."""
    rest = [item for item in items if not item.get_closest_marker("every_case")]
    tests: dict[str, list[Case]] = defaultdict(list)
    for item in rest:
        call = getattr(item, "callspec", None)
        values = frozenset(call.indices.items()) if call else frozenset()
        tests[function(item.nodeid)].append(Case(item.name, values))
    laws = {f"tests/{test}" for one in LAWS.values() for test in one}
    whole = {function(item.nodeid) for item in items if item.get_closest_marker("every_case")}
    names = chosen(tests, recorded(), laws - whole)
    return [item for item in rest if (function(item.nodeid), item.name) not in names]
