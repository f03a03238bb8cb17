# SPDX-License-Identifier: Apache-2.0
"""mkdocs hooks: pages of the checkout outside docs/ (results, CONTRIBUTING.md) become pages of the site."""

from __future__ import annotations

import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parent.parent
_PATTERNS = ("CONTRIBUTING.md", "examples/README.md", "benchmarks/results/*.md", "benchmarks/results/*.png")
OUTSIDE = {p.relative_to(ROOT).as_posix(): p for pattern in _PATTERNS for p in sorted(ROOT.glob(pattern))}
"""Files by their path in the site, which is their path in the checkout."""
_LINK = re.compile(r"(\]\()(?![a-z]+:|#|/)([^)#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages and pictures that stand outside the folder of the documentation."""
    for name, path in OUTSIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links between places of the checkout into links inside the site."""
    here = posixpath.dirname(page.file.src_uri)
    base = here if page.file.src_uri in OUTSIDE else posixpath.join("docs", here)

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(base, match.group(2))).removeprefix("docs/")
        return match.group(1) + posixpath.relpath(target, here or ".")

    return _LINK.sub(moved, markdown)
