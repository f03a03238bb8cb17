# SPDX-License-Identifier: Apache-2.0
r"""Counts which indexers and attentions of each sparse model are routed, and says why the others are not.

python -m tests.sparse_models                       # every family, mode and attention implementation
python -m tests.sparse_models deepseek_v32 --mode prefill --attention sdpa
python -m tests.sparse_models deepseek_v32 --mode prefill --code /tmp
"""

from __future__ import annotations

import argparse
import logging
import pathlib
import time
import warnings

import torch

from tests.formulas import sparse_runs
from tests.formulas.sparse_families import FAMILIES


def show(family: str, attention: str, name: str, folder: pathlib.Path | None) -> list[str]:
    """Prints one row of the table; returns the reasons for what is not routed."""
    one, start = FAMILIES[family], time.perf_counter()
    found = sparse_runs.look(family, sparse_runs.MODES[name], attention)
    seconds, graphs = time.perf_counter() - start, len(found.graphs)
    row = f"{family:16}{attention:7}{name:24}"
    row += f"{found.indexers}/{one.indexers:<8}{found.attentions}/{one.attentions:<8}{graphs:<8}{seconds:<9.1f}{found.report.seconds:.1f}"
    print(row + (f"  FAILED {found.error}" if found.error else ""), flush=True)
    if folder is not None:
        stem = f"{family}_{attention}_{name.replace(', ', '_').replace(' ', '_')}"
        code = "\n\n".join(gm.code for gm in found.graphs)
        (folder / f"graph_{stem}.txt").write_text(code)
    return [*found.reasons(), *(f"graph break: {b}" for b in found.breaks)]


def main() -> None:
    """Prints the table and, below it, the reasons with the rows that they belong to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", default=[*FAMILIES], help="some of " + ", ".join(FAMILIES))
    parser.add_argument("--mode", action="append", help="some of: " + "; ".join(sparse_runs.MODES))
    parser.add_argument("--attention", action="append", choices=("eager", "sdpa"))
    parser.add_argument("--code", type=pathlib.Path, help="a folder for the graphs' code")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    heads = f"{'family':16}{'impl':7}{'mode':24}{'indexers':10}{'attention':10}{'graphs':8}{'seconds':9}of routing"
    print(heads)
    why: dict[str, dict[str, list[str]]] = {}
    for family in asked.family:
        for attention in asked.attention or FAMILIES[family].implementations:
            if attention not in FAMILIES[family].implementations:
                continue
            for name in asked.mode or sparse_runs.MODES:
                for reason in show(family, attention, name, asked.code):
                    why.setdefault(family, {}).setdefault(reason, []).append(f"{attention} {name}")
    for family, reasons in why.items():
        print(f"\n{family}")
        for reason, rows in reasons.items():
            print(f"  {reason}\n      in {len(rows)}: {'; '.join(rows)}")


if __name__ == "__main__":
    main()
