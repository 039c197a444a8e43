"""Sentences about the first difference of two sequences of operations."""

from string import Formatter
from typing import Any

import pytest

from legacy_ddp.debug._cross_check import verdict as of_cross_check
from legacy_ddp.debug._operations import meaning as of_operations
from legacy_ddp.debug._operations.align import first_difference
from legacy_ddp.debug._operations.meaning import Explanation, explain
from legacy_ddp.debug._operations.operation import Operation, details, place, summary
from tests.helpers.operations import changed, model, numbered, operation, rewritten, value

STEP = model()
SIDES = ("A", "B")


def told(b: list[Operation], a: list[Operation] = STEP, facts: Any = None) -> tuple[str, Explanation]:
    found = first_difference(numbered(a), numbered(b))
    assert found is not None
    return summary(found, SIDES), explain(found, SIDES, facts)


def wrong(**changes: Any) -> tuple[str, Explanation]:
    """The product of the second layer has another output, and ``changes``."""
    return told(changed(rewritten(STEP, 4, "h1(x)", "wrong"), 4, outputs=(value("wrong"),), **changes))


def test_the_culprit_is_named_by_stage_module_and_operation() -> None:
    text, told_about = wrong()

    assert text == "forward of 1 (aten::mm): inputs agree, output differs"
    assert told_about.meaning.startswith("The same kernel gave another result for the same bits")
    assert "cross_check()" in told_about.next_step


def test_backward_and_one_of_several_outputs() -> None:
    a = operation("aten::native_layer_norm_backward.default", ["g"], ["x", "w", "b"], stage="backward", module="norm")

    found = first_difference([a], changed([a], 0, outputs=(value("x"), value("w'"), value("b"))))

    assert found is not None
    text = "backward of norm (aten::native_layer_norm_backward): inputs agree, output 2 of 3 differs"
    assert summary(found, SIDES) == text
    assert [*details(found, SIDES)] == ["output 2, float32 (4, 8): w in A, w' in B"]


def test_outside_of_modules() -> None:
    assert place(operation("sum", ["x"], ["y"])) == "forward outside of submodules (aten::sum)"


@pytest.mark.parametrize(
    "changes, beginning",
    [
        ({"settings": "p=0.5"}, "Other settings"),
        ({"generator": "0123456789abcdef"}, "Random generator at another place"),
        ({"outputs": (value("wrong", "bfloat16 (4, 8)"),)}, "Other dtype or shape"),
        (
            {"inputs": (value("r0(x)", layout="strides (1, 4)"), value("w1.T"))},
            "Other kernel: the inputs have other str",
        ),
    ],
)
def test_the_meaning_of_another_output_follows_from_what_else_differs(changes: dict[str, Any], beginning: str) -> None:
    found = first_difference(STEP, changed(STEP, 4, **{"outputs": (value("wrong"),), **changes}))

    assert found is not None
    assert explain(found, SIDES).meaning.startswith(beginning)


def test_other_threads_are_another_kernel() -> None:
    _, told_about = told(rewritten(STEP, 4, "h1(x)", "wrong"), facts={"seed": ("0", "1"), "threads": ("1", "2")})

    assert told_about.meaning == "Other kernel, or another order of its sums: threads 1 in A, 2 in B."


def test_a_kernel_with_unordered_sums_is_not_deterministic() -> None:
    a = operation("index_add", ["x", "i", "s"], ["y"])

    _, told_about = told(changed([a], 0, outputs=(value("y'"),)), [a])

    assert told_about.meaning.startswith("A kernel that is not deterministic: aten::index_add")
    assert "use_deterministic_algorithms" in told_about.next_step


def test_draws_of_one_side_alone_before_a_random_operation_are_named() -> None:
    draw = operation("rand", [], ["r"], module="debug", generator="0" * 16)
    a = [operation("bernoulli_", ["x"], ["m"], module="drop", generator="1" * 16)]
    b = [draw, operation("bernoulli_", ["x"], ["m'"], module="drop", generator="2" * 16)]

    text, told_about = told(b, a)

    assert text == "forward of drop (aten::bernoulli_): inputs agree, output differs"
    assert "only one side drew random numbers before, in forward of debug (aten::rand)" in told_about.meaning


def test_other_data_and_other_weights() -> None:
    text, data = told(model("y"))
    other_text, weights = told(rewritten(STEP, 3, "w1", "other"))

    assert text == "forward of 0 (aten::mm): all operations before agree, input 1 of 2 differs"
    assert data.meaning.startswith("Unknown source: the input is no parameter, and no recorded operation of this step")
    assert other_text == "forward of 1 (aten::t): all operations before agree, '1.weight' differs"
    assert weights.meaning == (
        "The weight or buffer '1.weight' came into this step with other bits, or was written inside of the step before "
        "this operation, which no recorded operation did (NumPy, a second thread, an extension)."
    )
    assert weights.next_step.endswith("and look for code that writes to weights during a step")


def test_an_input_from_compiled_code_is_not_called_data() -> None:
    _, unknown = told(model("y"))

    for source in (
        "a batch",
        "kept from an earlier step",
        "a kernel that is not recorded, such as one of torch.compile",
    ):
        assert source in unknown.meaning
    for advice in ("compare the batches", "kept tensors", "run without torch.compile"):
        assert advice in unknown.next_step


def test_data_of_another_dtype() -> None:
    _, told_about = told(changed(STEP, 1, inputs=(value("x", "float64 (2, 8)"), STEP[1].inputs[1])))

    assert told_about.meaning == "Data of another dtype or shape: float32 (4, 8) and float64 (2, 8)."


def test_a_write_from_elsewhere_names_both_operations() -> None:
    _, told_about = told(changed(STEP, 7, inputs=(value("poked"), *STEP[7].inputs[1:])))

    assert told_about.meaning.startswith(
        "The input is the output of operation 6, forward of 1.act (aten::relu), in A. It has changed since in B,"
    )


def test_a_weight_written_during_the_step_names_both_operations() -> None:
    a, b = ([*STEP, operation("mm", [held], ["o"], parameters=("1.weight",))] for held in ("w1", "poked"))

    _, told_about = told(b, a)

    assert "'1.weight' agreed in operation 5, and changed before operation 17" in told_about.meaning


def test_another_tensor_of_the_step() -> None:
    _, told_about = told(changed(STEP, 7, inputs=(value("r0(x)"), *STEP[7].inputs[1:])))

    assert told_about.meaning == (
        "Another tensor is passed: the output of operation 6, forward of 1.act (aten::relu), in A and of operation 3, "
        "forward of 0.act (aten::relu), in B."
    )


def test_a_copy_in_place_of_a_weight() -> None:
    a = [operation("mul", ["w"], ["y"], module="scale", parameters=("factor",))]
    b = [operation("mul", ["old"], ["z"], module="scale")]

    _, told_about = told(b, a)

    assert told_about.meaning.startswith("Another tensor is passed: 'factor' in A, no parameter in B (a copy")


def test_an_input_more() -> None:
    inputs, parameters = (*STEP[1].inputs, value("b")), ("", "0.weight", "0.bias")

    _, told_about = told(changed(STEP, 1, inputs=inputs, parameters=parameters))

    assert told_about.meaning == "One side passes more tensors."


def test_autocast_is_told_by_its_casts() -> None:
    cast = operation(
        "_to_copy", inputs=(value("x"),), parameters=("",), outputs=(value("x16", "bfloat16 (4, 8)"),), module="0"
    )

    text, told_about = told([STEP[0], cast, *rewritten(STEP[1:], 0, "x", "x16")])

    assert text == "1 operation only in B: forward of 0 (aten::_to_copy)"
    assert told_about.meaning == "Other dtype: a cast to bfloat16 only in B (autocast, or a cast in the code)."


def test_eval_mode_is_told_by_the_missing_random_operation() -> None:
    drop = [
        operation("bernoulli_", ["e"], ["m"], module="0.drop", generator="0" * 16),
        operation("mul", ["r0(x)", "m"], ["d"], module="0.drop"),
    ]

    text, told_about = told(STEP, [*STEP[:3], *drop, *rewritten(STEP[3:], 1, "r0(x)", "d")])

    assert text == "2 operations only in A: forward of 0.drop (aten::bernoulli_, aten::mul)"
    assert told_about.meaning.startswith("Random numbers are drawn only in A (aten::bernoulli_): dropout in")
    assert "eval()" in told_about.next_step


def test_another_form_of_a_normalisation_is_a_mode() -> None:
    a, b = (
        [operation(name, ["x"], [name], module="bn"), operation("relu", [name], [f"r{name}"])]
        for name in ("native_batch_norm", "_native_batch_norm_legit_no_training")
    )

    text, told_about = told(b, a)

    assert text == (
        "1 operation only in A: forward of bn (aten::native_batch_norm); 1 operation only in B: forward of bn "
        "(aten::_native_batch_norm_legit_no_training)"
    )
    assert told_about.meaning == "The normalisation takes another form: training mode against eval mode."


def test_an_operation_without_effect_is_told_as_such() -> None:
    extra = operation("clone", ["h0(x)"], ["h0(x)"], module="0.act")

    _, told_about = told([*STEP[:2], extra, *STEP[2:]])

    assert told_about.meaning.endswith("All operations that both sides ran have equal values.")


def test_another_form_is_told_as_other_settings() -> None:
    text, told_about = told(changed(STEP, 4, settings="training=False"))

    assert text == "forward of 1 (aten::mm): settings differ"
    assert told_about.meaning.startswith("No value differs.")


def test_up_to_three_operations_of_one_side_alone_are_named() -> None:
    names = ["empty_like", "bernoulli_", "div_", "mul"]
    extra = [operation(name, [], [name], module="drop") for name in names]
    elsewhere = operation("relu", [], ["r"], module="act")

    assert told(extra[:2], [])[0] == "2 operations only in B: forward of drop (aten::empty_like, aten::bernoulli_)"
    assert told([extra[0], elsewhere], [])[0] == "2 operations only in B, the first: forward of drop (aten::empty_like)"
    assert told(extra, [])[0] == (
        "4 operations only in B: forward of drop (aten::empty_like, aten::bernoulli_, aten::div_, ...)"
    )


# The tables of explanations, also of a cross-check

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
