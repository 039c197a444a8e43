"""The pointers of the documentation to tests: every test exists, and every row of a feature table has one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

DOCS = ROOT / "docs"
POINTER = re.compile(r"\[(test_\w+)\]\((\S+?)\)")
CELL = re.compile(r"(?<!\\)\|")
RULE = re.compile(r"[\s|:-]+")
# A page, and how many pointers it has at least.
PAGES = {"compatibility.md": 79, "faults.md": 80, "lightning.md": 36, "multi-host.md": 3, "restart.md": 7}


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
    found = {page.name for page in DOCS.glob("*.md") if POINTER.search(page.read_text(encoding="utf-8"))}

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
