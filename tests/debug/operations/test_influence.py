"""Operations of one side alone before the first difference: with influence on what follows, or without."""

from collections.abc import Sequence

import pytest

from legacy_ddp.debug._operations.align import first_difference
from legacy_ddp.debug._operations.describe import before
from legacy_ddp.debug._operations.operation import Operation
from tests.helpers.operations import operation, value

LAYER = operation("mm", ["x"], ["h"], module="sub")


def draw(reads: str, state: str) -> list[Operation]:
    """A dropout whose mask depends on the state of the generator."""
    return [
        operation("bernoulli_", ["mask"], [f"mask {state}"], module="drop", generator=state),
        operation("mul", [reads, f"mask {state}"], [f"{reads} {state}"], module="drop"),
    ]


def told_before(a: Sequence[Operation], b: Sequence[Operation]) -> list[str]:
    """Texts before the random draw, which differs."""
    found = first_difference(a, b)
    assert found is not None
    assert (found.kind, found.operation.name) == ("output", "aten::bernoulli_")
    return [before(gap, ("A", "B")) for gap in found.earlier]


def extra(*operations: Operation) -> str:
    """The text about operations of B alone before a dropout of another state, which reads ``h``."""
    (text,) = told_before([LAYER, *draw("h", "s0")], [LAYER, *operations, *draw("h", "s1")])
    return text.partition(":")[0]


def test_a_changed_activation_before_a_random_draw_is_not_said_to_be_without_influence() -> None:
    a = [LAYER, operation("tanh", ["h"], ["t"], module="sub"), *draw("t", "s0")]
    b = [LAYER, operation("silu", ["h"], ["s"], module="sub"), *draw("s", "s1")]

    assert told_before(a, b) == [
        "before: 1 operation only in A: forward of sub (aten::tanh) and 1 operation only in B: forward of sub "
        "(aten::silu)"
    ]


def test_a_printed_mean_is_without_influence() -> None:
    assert extra(operation("mean", ["h"], ["m"]), operation("_local_scalar_dense", ["m"])) == (
        "before, without influence"
    )


def test_a_copy_for_a_log_is_without_influence_although_its_bits_are_read_later() -> None:
    assert extra(operation("clone", ["h"], ["h"])) == "before, without influence"


@pytest.mark.parametrize(
    "planted",
    [
        operation("rand", [], ["r"], generator="s0"),
        operation("add_.Tensor", ["count"], ["count'"], module="bn"),
        operation("native_batch_norm", ["h"], ["n", "mean"], module="bn"),
        operation("detach", inputs=(value(None),), outputs=(value(None),), parameters=("lin.weight",)),
        operation("clamp", ["g"], ["g'"], stage="backward"),
    ],
    ids=[
        *("a draw moves the generator", "a write", "running statistics", "a view of a weight may be written to"),
        "a result may be a gradient",
    ],
)
def test_an_operation_that_leaves_something_behind_is_not_said_to_be_without_influence(planted: Operation) -> None:
    assert extra(planted) == "before"


def test_an_output_that_a_view_may_read_is_not_said_to_be_without_influence() -> None:
    """Behind a transposed view the same elements have other digests."""
    view = operation("t", inputs=(value(None),), outputs=(value(None, "float32 (8, 4)"),))
    doubled, scalar = operation("mul", ["h"], ["2h"]), operation("sum", ["h"], outputs=(value("s", "float32 ()"),))

    for given, text in ((doubled, "before"), (scalar, "before, without influence")):
        texts = told_before([LAYER, view, *draw("h", "s0")], [LAYER, given, view, *draw("h", "s1")])
        assert [item.partition(":")[0] for item in texts] == [text]


def test_influence_passes_through_operations_of_one_side_alone() -> None:
    doubled = operation("mul", ["h"], ["2h"])
    logged = operation("log", ["2h"], ["l"])
    written = operation("add_.Tensor", ["sum", "l"], ["sum'"])

    assert extra(doubled, logged) == "before, without influence"
    assert extra(doubled, logged, written) == "before"


def test_an_output_that_is_read_before_it_is_written_is_none() -> None:
    """The bits of ``h`` came from the layer, not from the second product."""
    late = operation("exp", ["q"], ["h"])

    texts = told_before(
        [LAYER, operation("relu", ["h"], ["r"]), *draw("r", "s0")],
        [LAYER, operation("relu", ["h"], ["r"]), late, *draw("r", "s1")],
    )

    assert [text.partition(":")[0] for text in texts] == ["before, without influence"]
