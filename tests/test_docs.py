"""Does every test that the documentation points to exist?"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
POINTER = re.compile(r"\[(test_\w+)\]\((\S+?)\)")


@pytest.mark.parametrize("page, least", [("docs/faults.md", 31), ("docs/restart.md", 7), ("docs/multi-host.md", 3)])
def test_every_test_that_a_page_names_is_where_it_says(page: str, least: int) -> None:
    path = ROOT / page
    pointers = POINTER.findall(path.read_text(encoding="utf-8"))

    assert len(pointers) >= least
    for name, target in pointers:
        assert f"def {name}(" in (path.parent / target).read_text(encoding="utf-8"), (name, target)
