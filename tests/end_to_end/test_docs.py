"""The pointers of the documentation to tests: every test exists, and every row of a feature table has one."""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import legacy_ddp
from tests.helpers.paths import ROOT

DOCS = ROOT / "docs"
POINTER = re.compile(r"\[(test_\w+)\]\((\S+?)\)")
CELL = re.compile(r"(?<!\\)\|")
RULE = re.compile(r"[\s|:-]+")
# A page, and how many pointers it has at least.
PAGES = {
    "accelerate.md": 6,
    "compatibility.md": 74,
    "faults.md": 91,
    "lightning.md": 36,
    "multi-host.md": 3,
    "restart.md": 6,
}


def _rows(page: str) -> Iterator[list[str]]:
    """The cells of every row, of those tables whose first row ends with a test."""
    for table in re.findall(r"(?:^\|.*\|\n)+", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE):
        _, rule, *body = ([cell.strip() for cell in CELL.split(line)[1:-1]] for line in table.splitlines())
        assert RULE.fullmatch("|".join(rule)), table
        if POINTER.search(body[0][-1]):
            yield from body


def _tests(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {item.name for item in tree.body if isinstance(item, ast.FunctionDef) and item.name.startswith("test_")}


def test_no_page_that_points_to_tests_is_left_out() -> None:
    found = {page.name for page in DOCS.rglob("*.md") if POINTER.search(page.read_text(encoding="utf-8"))}

    assert found == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_is_where_it_says(page: str) -> None:
    pointers = POINTER.findall((DOCS / page).read_text(encoding="utf-8"))

    assert len(pointers) >= PAGES[page]
    for name, target in pointers:
        assert name in _tests((DOCS / target).resolve()), (name, target)


@pytest.mark.parametrize("page", ["compatibility.md", "lightning.md"])
def test_every_row_of_a_table_of_features_ends_with_a_test(page: str) -> None:
    rows = list(_rows(page))

    assert len(rows) >= 30
    for row in rows:
        assert POINTER.search(row[-1]), row


MARKDOWN = sorted([*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *DOCS.rglob("*.md")])
LINK = re.compile(r"\]\((?!https?:)([^()#\s]*)(?:#([^()\s]+))?\)")


def _anchors(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve() if target else page

        assert path.exists(), target
        assert not anchor or anchor in _anchors(path), (target, anchor)


def test_the_drawings_are_those_that_the_script_makes() -> None:
    drawings = runpy.run_path(str(DOCS / "drawings.py"))

    # Charts are drawn by benchmarks/tables.py.
    found = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.svg") if path.parent.name != "charts"}
    assert found == set(drawings["DRAWINGS"])
    for name, draw in drawings["DRAWINGS"].items():
        assert (DOCS / name).read_text(encoding="utf-8") == draw(), "run: python docs/drawings.py"


def test_the_messages_of_the_first_page_are_those_of_the_readme() -> None:
    part = (DOCS / "index.md").read_text(encoding="utf-8").split("## Three messages")[1]
    messages = re.findall(r"(?:^    .*\n)+", part, re.MULTILINE)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert len(messages) == 3
    for message in messages:
        assert message in readme


# Files for contributors and hosts of the repository


def _yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    citation = _yaml("CITATION.cff")

    assert citation["version"] == legacy_ddp.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_the_workflow_runs_the_script_of_ci() -> None:
    (job,) = _yaml(".github/workflows/ci.yml")["jobs"].values()

    assert [step["run"] for step in job["steps"] if "run" in step][-1] == "bash .ci/run"
    assert (ROOT / ".ci" / "run").exists()


def test_the_template_of_an_issue_asks_for_the_page_of_a_report() -> None:
    template = _yaml(".github/ISSUE_TEMPLATE/bug.yml")

    assert {"name", "description", "body"} <= template.keys()
    assert any("legacy-ddp report" in field["attributes"]["label"] for field in template["body"])
    assert len({field["id"] for field in template["body"]}) == len(template["body"])
