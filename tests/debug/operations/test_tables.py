"""The tables of explanations of operations and of a cross-check."""

from string import Formatter

import pytest

from legacy_ddp.debug._cross_check import explain as of_cross_check
from legacy_ddp.debug._operations import explain as of_operations

TABLES = {
    **{kind: (of_operations._Case, rows) for kind, rows in of_operations._ROWS.items()},
    "cross-check": (of_cross_check._Case, of_cross_check._CAUSES),
}


@pytest.mark.parametrize("table", TABLES)
def test_every_name_in_a_text_is_known_to_its_case(table: str) -> None:
    """A type checker does not read the texts, and a row may explain a rare case."""
    case, rows = TABLES[table]
    texts = [text for row in rows for text in (row.meaning, row.next_step)]
    names = {name.split(".")[1].partition("[")[0] for text in texts for _, name, *_ in Formatter().parse(text) if name}

    assert names <= {*dir(case), *case.__annotations__}


@pytest.mark.parametrize("table", TABLES)
def test_the_last_row_of_a_table_and_no_other_applies_to_all_cases(table: str) -> None:
    _, rows = TABLES[table]

    assert [row.applies is of_operations.always for row in rows] == [*[False] * (len(rows) - 1), True]
