# SPDX-License-Identifier: Apache-2.0
"""Measures cells, each named by a line on stdin, and answers with a row of JSON; what else is printed goes to stderr."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main(device: str, toy: str, threads: str) -> None:
    """Answers "ready", then each line until the first cell that raises: what comes after it needs a fresh process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    from ..running import cleaned
    from . import cell

    torch.set_num_threads(int(threads))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        row: dict[str, Any]
        try:
            row = cell.measure(*json.loads(line), torch.device(device), bool(int(toy)))
        except Exception as error:
            import traceback

            row = {"status": cell.WRONG, "why": cell.said(error), "output": traceback.format_exc()[-3000:]}
        print(json.dumps(cleaned(row)), file=answers, flush=True)
        if "output" in row:
            return
        cell.free()


if __name__ == "__main__":
    main(*sys.argv[1:])
