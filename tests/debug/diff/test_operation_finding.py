"""The first different operation as a record with the rows around it, and its text."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._text import WIDTH
from legacy_ddp.debug._diff import result as operation_text
from legacy_ddp.debug._diff.operations import finding
from legacy_ddp.debug._diff.result import OperationFinding
from legacy_ddp.debug._operations.align import first_difference
from legacy_ddp.debug._operations.operation import Operation
from tests.helpers.operations import numbered, operation


def found_in(a: Sequence[Operation], b: Sequence[Operation]) -> OperationFinding:
    a, b = numbered(a), numbered(b)
    difference = first_difference(a, b)
    assert difference is not None
    return finding(41, (a, b), difference, ranks=(1,), facts={})


@given(st.data())
def test_rows_stand_in_order_and_never_twice(data: st.DataObject) -> None:
    a, b = (
        [operation(name, [], [name]) for name in data.draw(st.lists(st.sampled_from("abc"), max_size=25))]
        for _ in range(2)
    )
    difference = first_difference(a, b)
    if difference is None:
        return

    rows = found_in(a, b).rows

    for side in (0, 1):
        numbers = [row.numbers[side] for row in rows if row.numbers[side] is not None]
        assert numbers == sorted(set(numbers))
    assert any(row.is_first for row in rows)


@given(st.text(max_size=200), st.text(max_size=300))
def test_the_text_keeps_to_the_page_whatever_the_names(module: str, settings: str) -> None:
    a = [operation("mul", ["x"], ["y"], module=module, settings=settings)]
    b = [operation("mul", ["x"], ["z"], module=module, settings=settings + "!")]

    assert all(len(line) <= WIDTH for line in operation_text.operation_lines(found_in(a, b)))
