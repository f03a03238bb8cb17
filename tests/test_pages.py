# SPDX-License-Identifier: Apache-2.0
"""The pages: their code runs, their results are the files' results, and the words are plain."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch
import yaml
from PIL import Image

from benchmarks import pages, pictures
from tests.user_code import GIVEN, blocks

ROOT = pages.ROOT
PAGES = [p.relative_to(ROOT).as_posix() for p in pages.pages()]
WIDTH = 140
FORBIDDEN = {
    r"\bmends?\b": "fixes",
    r"\bbeside\b": "next to",
    r"\bjudges?\b": "reference model",
    r"\bsaid once\b": "logged once",
    r"\bthe house\b": "the layers",
    r"\bfront doors?\b": "entry point",
}
"""Words that ../shared/words.md names, and what to write."""


# ---- code blocks


def _no_group() -> None:
    """Ends the process group of an earlier test: the page starts one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _trainers() -> None:
    """Checks what the page says of accelerate's list of backends, and forgets what earlier tests set in the process."""
    plugin = pytest.importorskip("accelerate.utils").TorchDynamoPlugin
    with pytest.raises(ValueError, match="'MHC_INDUCTOR' is not a valid DynamoBackend"):
        plugin(backend="mhc_inductor")
    pytest.importorskip("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)


BEFORE = {"docs/distributed.md": _no_group, "docs/trainers.md": _trainers}
WITH_CODE = [p for p in PAGES if blocks((ROOT / p).read_text())]


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs(
    page: str, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    """Blocks run one after the other, as a reader would run them; each report of ``explain`` is printed once."""
    module = ModuleType(re.sub(r"\W", "_", page))  # Dynamo imports the modules of functions, and remembers them
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = vars(module)
    BEFORE.get(page, lambda: None)()
    exec(GIVEN.get(page, ""), names)
    explained, file, lines = 0, tmp_path / f"{module.__name__}.py", list[str]()
    for line, code in blocks((ROOT / page).read_text()):
        # Dynamo reads the file of a function as Python, which a page is not. Lines are those of the page.
        lines += [*["\n"] * (line - len(lines)), *code.splitlines(True)]
        file.write_text("".join(lines))
        exec(compile("\n" * line + code, str(file), "exec"), names)
        explained += re.sub("#.*", "", code).count("explain(")
    said = " ".join(capsys.readouterr().out.split())
    assert len(re.findall(r"\d+ nodes of \d+ graphs? in", said)) == explained


def test_modules_that_the_pages_run_exist() -> None:
    called = {m for p in PAGES for m in re.findall(r"python -m ([\w.]+)", (ROOT / p).read_text())}
    assert {"benchmarks", "mhc_inductor"} <= called
    for module in called - {"mhc_inductor"}:
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module


# ---- results


@pytest.mark.parametrize("page", PAGES)
def test_results_of_a_page_are_those_of_the_files(page: str) -> None:
    text = (ROOT / page).read_text()
    assert pages.filled(text) == text, "run python -m benchmarks readme"


def test_a_block_is_written_between_its_markers() -> None:
    page = "a\n<!-- results: counts -->\nold\n<!-- end of results -->\nb\n"
    new = pages.filled(page)
    assert new.startswith("a\n<!-- results: counts -->\n| checked") and new.endswith("\n<!-- end of results -->\nb\n")
    assert pages.filled(new) == new and "old" not in new
    with pytest.raises(KeyError, match="another"):
        pages.filled(page.replace("counts", "another"))


def test_the_picture_has_a_dozen_bars() -> None:
    groups = pictures.picture("overview").groups
    assert sum(len(group.bars) for group in groups) <= 12


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_shows_the_figures_of_the_results(name: str) -> None:
    of = pictures.picture(name)
    assert all(group.bars[0].name == pictures.OURS and not group.bars[0].found for group in of.groups)
    with Image.open(pictures.path(name)) as image:
        assert image.info[pictures.FIGURES] == of.figures(), "run python -m benchmarks readme"


@pytest.mark.parametrize("page", sorted(p.stem for p in (ROOT / "docs/operators").glob("*.md")))
def test_a_page_of_an_operator_says_what_it_takes_and_saves(page: str) -> None:
    (name,) = re.findall(r"results/(operator-\w+)\.png", (ROOT / f"docs/operators/{page}.md").read_text())
    of = pictures.picture(name)
    units = [group.unit for group in of.groups]
    assert {"µs", "ms"} & {*units} and {"MB", "GB", "GiB"} & {*units}
    assert "NVIDIA" in of.measured and any("torch.compile" in peer for peer in of.peers())


def test_what_a_picture_shows_is_drawn_whole(tmp_path: pathlib.Path) -> None:
    """Bars of 2, 40 and 400 times: the long ones are cut at the same place, and no letter stands at an edge."""
    bars = [pictures.Bar(*bar) for bar in ((pictures.OURS, 1.0), ("b", 2.0), ("c", 40.0), ("long name " * 4, 400.0))]
    of = pictures.Picture([pictures.Group("Title " * 20, "ms", bars)], "NVIDIA H200")
    pictures.draw(of, tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        assert image.info[pictures.FIGURES] == of.figures()
        pixels = image.convert("L")
    edges = [pixels.crop(box) for box in ((0, 0, 4, pixels.height), (pixels.width - 4, 0, *pixels.size))]
    assert [edge.getextrema() for edge in edges] == [(255, 255)] * 2
    assert str(of.groups[0]).endswith("b 2 ms (2 x), c 40 ms (40 x), " + "long name " * 4 + " 400 ms (400 x).")


# ---- how others take part


def test_who_finds_a_bug_is_led_from_the_readme_to_a_form_that_asks_for_versions() -> None:
    assert {"CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md"} <= set(
        re.findall(r"\((\w+\.md)\)", (ROOT / "README.md").read_text())
    )
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = [yaml.safe_load(f.read_text()) for f in folder.glob("*.yml") if f.name != "config.yml"]
    assert len(forms) == 2
    for form in forms:
        asked = {part["id"]: part for part in form["body"]}
        assert "doctor --json" in asked["doctor"]["attributes"]["label"] and asked["doctor"]["validations"]["required"]
        assert any("explain" in part["attributes"]["label"] for part in form["body"])


def test_the_citation_and_the_changelog_are_of_this_version() -> None:
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]  # type: ignore[index]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert re.search(rf"^(## \[{version}\]|{version} will be)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_size_of_routing_is_as_the_design_says() -> None:
    said = re.search(r"The pass has ([\d,]+) lines", (ROOT / "docs/design.md").read_text())[1]  # type: ignore[index]
    files = (ROOT / "mhc_inductor/routing").rglob("*.py")
    lines = sum(len(f.read_text().splitlines()) for f in files)
    assert abs(lines - int(said.replace(",", ""))) < 200, lines


def test_the_design_is_short_and_experiments_open_with_their_conclusions() -> None:
    """Today's decisions alone; what was tried has a table of contents, and each section begins with what came of it."""
    assert len((ROOT / "docs/design.md").read_text().splitlines()) <= 350
    contents, *sections = re.split(r"^##+ ", (ROOT / "docs/tuning.md").read_text(), flags=re.MULTILINE)
    linked = [" ".join(title.split()) for title in re.findall(r"\[([^]]+)\]\(#", contents)]
    assert linked == [section.partition("\n")[0] for section in sections]
    assert [
        s.partition("\n")[0] for s in sections if not s.partition("\n")[2].lstrip().startswith("**In short:** ")
    ] == []


# ---- words


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 90
    assert len(re.findall("<!--", text)) == 4, "comments only around the results"


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md"])
def test_lines_of_a_page_are_not_long(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "    ", "<!--", "!["))]
    assert [line for line in prose if len(line) > WIDTH] == []


def _prose(file: pathlib.Path) -> str:
    """A page; or the comments and strings of a module, its names left out."""
    text = file.read_text()
    if file.suffix != ".py":
        return text
    return "\n".join(re.findall(r'#.*|"""[\s\S]*?"""|"[^"\n]*"', text))


def test_the_words_are_plain() -> None:
    files = [ROOT / p for p in (*PAGES, "CONTRIBUTING.md", "examples/README.md")]
    for folder in ("mhc_inductor", "lowerings", "kernels", "benchmarks", "examples", "tests"):
        files += sorted((ROOT / folder).rglob("*.py"))
    found = [
        f"{file.relative_to(ROOT)}: {match.group()}: write {better!r}"
        for file in files
        if file != pathlib.Path(__file__).resolve()
        for word, better in FORBIDDEN.items()
        for match in re.finditer(word, _prose(file))
    ]
    assert not found, "\n".join(found)


def test_every_source_names_its_licence():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    shell = ("dev", *(n for n in listed if n.startswith((".ci/", ".github/workflows/"))))
    sources = [n for n in listed if n.endswith((".py", ".sh", ".toml")) or n in shell]
    named = [n for n in sources if "# SPDX-License-Identifier: Apache-2.0\n" in (ROOT / n).read_text()[:100]]
    assert len(sources) > 500
    assert set(sources) - set(named) == {".ci/constraints.txt"}


def _docstrings_of_kernels() -> dict[str, str | None]:
    """Returns the docstring of each file of kernels/ that defines a function of Triton or of Gluon."""
    found = {}
    for file in sorted((ROOT / "kernels").rglob("*.py")):
        tree = ast.parse(file.read_text())
        marks = (ast.unparse(mark) for x in tree.body if isinstance(x, ast.FunctionDef) for mark in x.decorator_list)
        if any(mark.startswith(("triton.jit", "gluon.jit")) for mark in marks):
            found[file.relative_to(ROOT).as_posix()] = ast.get_docstring(tree)
    return found


def test_a_kernel_file_opens_with_what_it_computes_and_its_tile() -> None:
    """A few lines: the formula, what a program takes of it, and what bounds it. A page would be docs/tuning.md's."""
    docstrings = _docstrings_of_kernels()
    assert len(docstrings) > 50
    for name, text in docstrings.items():
        assert text is not None and 3 <= len(text.splitlines()) <= 14, name
        assert re.search(r"\b(tile|program)s?\b", text, re.IGNORECASE), name
