"""The first difference of two ranks that ran a step on data of their own."""

from typing import Any

import pytest

from legacy_ddp.debug._operations.operation import Operation
from legacy_ddp.debug._operations.structure import Structure
from tests.helpers.operations import changed, model, operation, value

STEP = model()


def compare(a: list[Operation], b: list[Operation]) -> Any:
    return Structure(a, b, lambda name: name.endswith("weight")).difference


def dropout(path: str = "drop", **changes: Any) -> Operation:
    given = {"settings": "p=0.1, train=True", "generator": "0" * 16, "module": path}
    return operation("native_dropout", ["x"], ["y", "mask"], **{**given, **changes})


def test_other_data_are_no_difference() -> None:
    assert compare(STEP, model("y")) is None


def test_dropout_seeded_by_rank_is_no_difference() -> None:
    assert compare([dropout()], [dropout(generator="1" * 16)]) is None


def test_an_uneven_batch_is_no_difference() -> None:
    full = [
        operation("mm", ["x"], ["y"], module="fc", settings="[32, 10]"),
        operation("div.Scalar", ["y"], ["z"], settings="37.5"),
        operation("expand", ["z"], ["g"], stage="backward", module="fc", settings="[32, 1]"),
    ]
    rest = [
        operation(
            item.name.removeprefix("aten::"),
            inputs=(value("p", "float32 (6, 8)"),),
            parameters=("",),
            outputs=(value("q", "float32 (6, 8)"),),
            settings=item.settings.replace("32", "6").replace("37.5", "6"),
            stage=item.stage,
            module=item.module,
        )
        for item in full
    ]

    assert compare(full, rest) is None


def test_a_device_of_each_rank_s_own_is_no_difference() -> None:
    a, b = ([operation("zeros", [], ["z"], module="fc", settings=f"device=cuda:{index}")] for index in (0, 1))

    assert compare(a, b) is None


def test_a_buffer_of_each_rank_s_own_is_no_difference() -> None:
    a, b = ([operation("norm", ["x", mean], ["y"], parameters=("", "running_mean"))] for mean in ("m", "n"))

    assert compare(a, b) is None


def test_another_weight_is_named() -> None:
    found = compare(STEP, changed(model("y"), 3, inputs=(value("other"),)))

    assert (found.kind, found.start_a, found.origin.parameter, found.origin.reader) == ("input", 3, "1.weight", None)


def test_a_weight_that_changed_during_the_step_names_its_last_reader() -> None:
    again = operation("mm", ["w1"], ["z"], parameters=("1.weight",))
    found = compare([*STEP, again], [*model("y"), operation("mm", ["poked"], ["z"], parameters=("1.weight",))])

    assert (found.origin.parameter, found.origin.reader) == ("1.weight", 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": "p=0.1, train=False"},
        {"settings": "p=0.5, train=True"},
        {"parameters": ("fc.weight",)},
        {"inputs": (value("x", "bfloat16 (4, 8)"),)},
        {"inputs": (value("x", "float32 (1, 4, 8)"),)},
    ],
)
def test_another_form_is_a_difference(changes: dict[str, Any]) -> None:
    found = compare([dropout()], [dropout(**changes)])

    assert (found.kind, found.start_a, found.has_effect) == ("form", 0, None)


def test_a_missing_operation_is_a_difference() -> None:
    found = compare([*STEP[:2], dropout(), *STEP[2:]], model("y"))

    assert (found.kind, found.start_a, found.a, found.b) == ("sequence", 2, (dropout(),), ())


def micro_batch(number: int, *stages: str, **changes: Any) -> list[Operation]:
    return [operation("mul", ["x"], ["y"], micro_batch=number, stage=stage, **changes) for stage in stages]


def test_a_third_micro_batch_of_one_rank_is_no_difference() -> None:
    two = [*micro_batch(1, "forward", "backward"), *micro_batch(2, "forward", "backward")]

    assert compare(two, [*two, dropout(micro_batch=3)]) is None
    assert compare(two, []) is None


def test_one_backward_pass_of_uneven_micro_batches_is_no_difference() -> None:
    two = [*micro_batch(1, "forward"), *micro_batch(2, "forward", "backward")]
    three = [*micro_batch(1, "forward"), *micro_batch(2, "forward"), *micro_batch(3, "forward", "backward")]

    assert compare(two, three) is None
    assert compare(three, two) is None


def test_a_difference_in_a_common_micro_batch_is_found_beside_uneven_ones() -> None:
    a = [*micro_batch(1, "forward", module="fc"), *micro_batch(2, "forward", module="fc")]
    b = [*micro_batch(1, "forward", module="fc", settings="p=0.5")]

    found = compare(a, b)

    assert found is not None
    assert (found.kind, found.start_a, found.start_b) == ("form", 0, 0)
