"""Operations and differences as JSON values, and back."""

import json
from dataclasses import asdict

import pytest

from legacy_ddp.debug._cross_check.locate import difference_from, operation_from
from legacy_ddp.debug._operations.align import first_difference
from legacy_ddp.debug._operations.operation import Operation
from tests.helpers.operations import changed, model, operation, rewritten, value

pytestmark = pytest.mark.fast

STEP = model()
POKED = (value("poked"), *STEP[7].inputs[1:])


def test_operations_arrive_as_they_were_sent() -> None:
    assert [operation_from(json.loads(json.dumps(asdict(item)))) for item in STEP] == STEP


@pytest.mark.parametrize(
    "other",
    [
        rewritten(STEP, 4, "h1(x)", "wrong"),
        changed(STEP, 7, inputs=POKED),
        [*STEP[:5], operation("clone", ["r0(x)"], ["copy"]), *changed(STEP, 7, inputs=POKED)[5:]],
        [*STEP[:5], operation("clone", ["r0(x)"], ["copy"]), *STEP[5:], operation("exp", ["r0(x)"], ["e"])],
    ],
    ids=["output", "input with a writer", "input behind a gap", "gap before a gap"],
)
def test_a_difference_arrives_with_every_record_in_it(other: list[Operation]) -> None:
    """The writers of an input once arrived as dictionaries."""
    sent = first_difference(STEP, other)
    assert sent is not None

    received = difference_from(json.loads(json.dumps(asdict(sent))))

    assert repr(received) == repr(sent)  # `==` leaves out the writers
