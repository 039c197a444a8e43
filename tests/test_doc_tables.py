"""Does every test exist that the last column of a table in the documentation names?"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REFERENCE = re.compile(r"`(tests/\w+\.py)::(\w+)(?:\[.*?\])?`")
CELL = re.compile(r"(?<!\\)\|")
RULE = re.compile(r"[\s|:-]+")
PAGES = [
    page.name
    for page in sorted((ROOT / "docs").glob("*.md"))
    if REFERENCE.search(page.read_text(encoding="utf-8")) is not None
]


def _rows(page: str) -> list[list[str]]:
    """The cells of every row, of those tables whose first row names a test."""
    rows: list[list[str]] = []
    for table in re.findall(r"(?:^\|.*\|\n)+", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE):
        _, rule, *body = ([cell.strip() for cell in CELL.split(line)[1:-1]] for line in table.splitlines())
        assert RULE.fullmatch("|".join(rule)), table
        if REFERENCE.search(body[0][-1]):
            rows += body
    return rows


def _tests(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {item.name for item in tree.body if isinstance(item, ast.FunctionDef) and item.name.startswith("test_")}


@pytest.mark.parametrize("page", PAGES)
def test_every_row_ends_with_tests_that_are_there(page: str) -> None:
    rows = _rows(page)

    assert rows
    for row in rows:
        references = REFERENCE.findall(row[-1])
        assert references, row
        for path, name in references:
            assert name in _tests(path), (page, row[0], path, name)


def test_the_page_about_lightning_has_a_table() -> None:
    assert len(_rows("lightning.md")) > 20
