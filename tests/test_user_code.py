# SPDX-License-Identifier: Apache-2.0
"""What ``./dev lint`` checks of pages and examples: all of their code, each error at its line."""

from __future__ import annotations

import pytest

from tests import user_code

PAGE = """# Title

```python
import mhc_inductor
count: int = "one"
```

Between two blocks.

```python
def untyped(x):
    return x


mhc_inductor.warmup(untyped, [], parallel="all")
mhc_inductor.explain(untyped, **{"x": 1})
count = given
```
"""


def test_every_block_and_every_example_is_checked_at_its_own_lines() -> None:
    found = user_code.sources()
    fences = 0
    for page, code in found.items():
        text = (user_code.ROOT / page).read_text()
        fences += text.count("```python\n")
        same = [a == b for a, b in zip(text.splitlines(), code.splitlines(), strict=True)]
        at = [before + i for before, block in user_code.blocks(text) for i in range(block.count("\n"))]
        assert all(same[i] for i in at) and (at or all(same)), page
    assert fences == sum(len(user_code.blocks(page.read_text())) for page in user_code.pages.pages()) > 30
    assert {p.name for p in (user_code.ROOT / "examples").glob("*.py")} < {page.rpartition("/")[2] for page in found}


def test_a_wrong_line_of_a_page_is_named_by_both_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(user_code.GIVEN, "docs/a page.md", "from typing import Any; given: Any = 1")
    fine = {"examples/fine.py": "import mhc_inductor\n\nseconds: float = mhc_inductor.counters()['x'] / 2\n"}
    found = user_code.errors({"docs/a page.md": user_code.module("docs/a page.md", PAGE), **fine})
    said = {(tool, int(line.split(":")[1])) for line in found for tool in ("mypy", "pyright") if f"({tool})" in line}
    assert all(line.startswith("docs/a page.md:") for line in found), found
    assert said == {("mypy", 5), ("pyright", 5), ("mypy", 11), ("mypy", 15), ("pyright", 15)}, found


def test_a_tool_that_checks_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"mypy exited 2"):
        user_code.errors({})


def test_lint_checks_what_users_copy() -> None:
    lint = (user_code.ROOT / "dev").read_text().split("lint() {")[1].split("}")[0]
    assert "python -m tests.user_code" in lint
