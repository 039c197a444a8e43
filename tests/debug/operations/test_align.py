"""The first difference of two sequences of operations of the same data."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp.debug._operations.align import Block, blocks, first_difference
from legacy_ddp.debug._operations.operation import Operation, Origin, before
from tests.helpers.operations import changed, model, operation, rewritten, value

STEP = model()
POSITIONS = st.integers(0, len(STEP) - 1)


def test_equal_sequences_have_no_difference() -> None:
    assert first_difference(STEP, model()) is None
    assert first_difference([], []) is None


@pytest.mark.parametrize(
    "other",
    [
        [replace(item, micro_batch=item.micro_batch + (index > 4)) for index, item in enumerate(STEP)],
        [*STEP[:4], replace(STEP[4], outputs=(value(None),)), *STEP[5:]],
    ],
    ids=["micro-batches", "digests"],
)
def test_operations_counted_or_digested_otherwise_have_no_difference(other: list[Operation]) -> None:
    assert first_difference(STEP, other) is None


@given(POSITIONS)
def test_an_output_with_other_bits_is_the_culprit_at_its_place(position: int) -> None:
    wrong = STEP[position].outputs[0].digest or ""

    found = first_difference(STEP, rewritten(STEP, position, wrong, "wrong"))

    assert found is not None
    assert (found.kind, found.start_a, found.start_b, found.differing) == ("output", position, position, (0,))
    assert found.differing_values == ((value(wrong), value("wrong")),)


def test_the_first_of_two_culprits_is_named() -> None:
    twice = rewritten(rewritten(STEP, 4, "h1(x)", "wrong"), 9, "loss(x)'", "worse")

    found = first_difference(STEP, twice)

    assert found is not None
    assert found.start_a == 4


def test_other_data_are_an_input_that_nobody_wrote() -> None:
    found = first_difference(STEP, model("y"))

    assert found is not None
    assert (found.kind, found.operation.name, found.operation.module, found.differing) == (
        "input",
        "aten::mm",
        "0",
        (0,),
    )
    assert found.origin == Origin()


def test_another_weight_is_named_with_the_operation_that_read_it_first() -> None:
    found = first_difference(STEP, rewritten(STEP, 3, "w1", "other"))

    assert found is not None
    assert (found.kind, found.start_a, found.differing) == ("input", 3, (0,))
    assert found.origin == Origin("1.weight")


def test_a_weight_that_changes_inside_of_the_step_names_the_reader_before() -> None:
    again = [*STEP, operation("mm", ["w1"], ["out"], parameters=("1.weight",))]
    written = [*STEP, operation("mm", ["written"], ["out'"], parameters=("1.weight",))]

    found = first_difference(again, written)

    assert found is not None
    assert (found.kind, found.start_a) == ("input", len(STEP))
    assert found.origin == Origin("1.weight", reader=4)  # the product, which reads the transposed weight


def test_a_write_between_two_operations_names_the_writer_on_the_side_that_still_has_it() -> None:
    inputs = (value("poked"), *STEP[7].inputs[1:])

    found = first_difference(STEP, changed(STEP, 7, inputs=inputs))

    assert found is not None
    assert (found.kind, found.start_a, found.differing) == ("input", 7, (0,))
    assert found.origin == Origin(writer_a=5)


def test_the_last_of_two_writers_is_named() -> None:
    a = [operation("clone", ["x"], ["y"]), operation("clone", ["y"], ["y"]), operation("mul", ["y"], ["z"])]

    found = first_difference(a, changed(a, 2, inputs=(value("poked"),)))

    assert found is not None
    assert found.origin == Origin(writer_a=1)


def test_a_view_of_a_weight_is_no_reader_of_its_bits() -> None:
    view = operation("t", inputs=(value(None),), outputs=(value(None),), parameters=("w",))
    a, b = ([view, operation("mm", [held], ["y"], parameters=("w",))] for held in ("w", "other"))

    found = first_difference(a, b)

    assert found is not None
    assert found.origin == Origin("w")


def test_another_tensor_of_the_step_has_a_writer_on_both_sides() -> None:
    inputs = (value("r0(x)"), *STEP[7].inputs[1:])

    found = first_difference(STEP, changed(STEP, 7, inputs=inputs))

    assert found is not None
    assert found.origin == Origin(writer_a=5, writer_b=2)


def test_an_operation_that_only_b_has_explains_the_inputs_after_it() -> None:
    extra = operation("mul", ["r0(x)"], ["extra"], module="0.act")
    longer = [*STEP[:3], extra, *rewritten(STEP[3:], 1, "r0(x)", "extra")]

    found = first_difference(STEP, longer)

    assert found is not None
    assert (found.kind, found.start_a, found.start_b, found.a, found.b) == ("sequence", 3, 3, (), (extra,))
    assert found.has_effect is True


def test_an_operation_that_b_lacks_explains_the_inputs_after_it() -> None:
    shorter = [*STEP[:5], *rewritten(STEP[6:], 1, "r1(x)", "h1(x)")]

    found = first_difference(STEP, shorter)

    assert found is not None
    assert (found.kind, found.start_a, found.a, found.b) == ("sequence", 5, (STEP[5],), ())


def test_an_extra_operation_without_effect_does_not_hide_the_culprit() -> None:
    extra = operation("clone", ["h0(x)"], ["h0(x)"], module="0.act")
    wrong = rewritten(STEP, 7, "h2(x)", "wrong")

    found = first_difference(STEP, [*wrong[:2], extra, *wrong[2:]])

    assert found is not None
    assert (found.kind, found.start_a, found.start_b) == ("output", 7, 8)
    assert [gap.b for gap in found.earlier] == [(extra,)]


def test_an_extra_operation_without_effect_does_not_hide_a_write_from_elsewhere() -> None:
    extra = operation("clone", ["h0(x)"], ["h0(x)"], module="0.act")
    poked = changed(STEP, 7, inputs=(value("poked"), *STEP[7].inputs[1:]))

    found = first_difference(STEP, [*poked[:2], extra, *poked[2:]])

    assert found is not None
    assert (found.kind, found.start_a, found.start_b, found.origin.writer_a) == ("input", 7, 8, 5)


@pytest.mark.parametrize("before", [[], [operation("detach", ["x"], ["x"])]], ids=["at the start", "later"])
def test_a_write_in_place_before_the_tensor_was_made_is_not_the_cause_of_its_bits(before: list[Operation]) -> None:
    written = operation("add_", ["count"], ["count'"])
    product = operation("mm", ["x"], ["h"])

    found = first_difference(
        [*before, product, operation("relu", ["h"], ["r"])],
        [*before, written, product, operation("relu", ["other"], ["r'"])],
    )

    assert found is not None
    assert (found.kind, found.operation.name) == ("input", "aten::relu")


def test_an_operation_of_b_alone_in_place_may_have_written_to_a_part_of_the_input() -> None:
    extra = operation("mul_.Scalar", ["part"], ["part'"], module="1.act")
    poked = changed(STEP, 7, inputs=(value("poked"), *STEP[7].inputs[1:]))

    after, before = (first_difference(STEP, [*poked[:k], extra, *poked[k:]]) for k in (6, 3))

    assert after is not None
    assert (after.kind, after.b) == ("sequence", (extra,))
    assert before is not None  # before the tensor was written
    assert (before.kind, before.start_a) == ("input", 7)


def test_an_extra_operation_alone_is_the_difference_and_has_no_effect() -> None:
    extra = operation("clone", ["h0(x)"], ["h0(x)"], module="0.act")

    found = first_difference([*STEP[:2], extra, *STEP[2:]], STEP)

    assert found is not None
    assert (found.kind, found.a, found.b, found.has_effect) == ("sequence", (extra,), (), False)


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": "training=False"},
        {"generator": "0123456789abcdef"},
        {"inputs": (value("x", layout="strides (1, 4)"), value("w0.T"))},
    ],
)
def test_another_form_without_other_values_is_the_last_choice(changes: dict[str, object]) -> None:
    other = changed(STEP, 1, **changes)

    found = first_difference(STEP, other)
    both = first_difference(STEP, rewritten(other, 7, "h2(x)", "wrong"))

    assert found is not None
    assert (found.kind, found.start_a, found.has_effect) == ("form", 1, False)
    assert both is not None
    assert (both.kind, both.start_a) == ("output", 7)


def test_undefined_contents_are_no_difference() -> None:
    empty = [operation("empty", [], ["?"]), *STEP]
    undefined = [replace(empty[0], outputs=(value(None),)), *STEP]

    assert first_difference(undefined, undefined) is None
    found = first_difference(empty, undefined)
    assert found is None or found.kind == "form"


def test_another_dtype_of_an_input_is_a_difference_even_with_equal_bits() -> None:
    other = changed(STEP, 1, inputs=(value("x", "float64 (2, 8)"), STEP[1].inputs[1]))

    found = first_difference(STEP, other)

    assert found is not None
    assert (found.kind, found.differing) == ("input", (0,))


def test_an_input_more_is_a_difference() -> None:
    inputs, parameters = (*STEP[1].inputs, value("b")), (*STEP[1].parameters, "0.bias")

    found = first_difference(STEP, changed(STEP, 1, inputs=inputs, parameters=parameters))

    assert found is not None
    assert (found.kind, found.differing, found.differing_values) == ("input", (2,), ())


@pytest.mark.thorough
def test_a_hundred_thousand_operations() -> None:
    drawn = random.Random(0)
    long = [operation("mul", [f"v{i}"], [f"v{i + 1}"], module=f"{drawn.randrange(300)}") for i in range(100_000)]
    shorter = [item for index, item in enumerate(long) if index % 1000 != 999 or index > 90_000]

    found = first_difference(long, rewritten(long, 99_000, "v99001", "wrong"))
    gone = first_difference(long, shorter)

    assert found is not None
    assert (found.kind, found.start_a) == ("output", 99_000)
    assert gone is not None
    assert (gone.kind, gone.start_a, gone.has_effect) == ("sequence", 999, False)


@given(st.integers(1, 8), st.data())
def test_the_extra_one_of_several_products_of_a_module_is_told_by_its_values(count: int, data: st.DataObject) -> None:
    """The keys of all products are equal; the extra product was once blamed on the product behind it."""
    products = [operation("mm", ["x", f"w{index}"], [f"y{index}"]) for index in range(count)]
    at, more = data.draw(st.integers(0, count)), data.draw(st.integers(1, 3))
    extra = [operation("mm", ["x", f"extra{index}"], [f"z{index}"]) for index in range(more)]
    start, end = [operation("relu", ["w"], ["x"])], [operation("sum", ["y0"], ["loss"])]
    longer, shorter = [*start, *products[:at], *extra, *products[at:], *end], [*start, *products, *end]

    for found in (first_difference(longer, shorter), first_difference(shorter, longer)):
        assert found is not None
        assert (found.kind, found.start_a, found.start_b, found.has_effect) == ("sequence", at + 1, at + 1, False)
    assert found.b == tuple(extra)


def test_an_extra_product_with_an_effect_is_the_difference() -> None:
    products = [operation("mm", ["x", f"w{index}"], [f"y{index}"]) for index in range(3)]
    wrong = operation("mm", ["x", "wrong"], ["z"])
    end = operation("sum", ["y0"], ["loss"])

    found = first_difference(
        [*products, end], [products[0], wrong, *products[1:], changed([end], 0, inputs=(value("z"),))[0]]
    )

    assert found is not None
    assert (found.kind, found.b, found.has_effect) == ("sequence", (wrong,), True)


KEYS = st.lists(st.sampled_from("abcd"), max_size=30)


@given(KEYS, KEYS)
def test_blocks_cover_both_sequences_in_order(a: list[str], b: list[str]) -> None:
    ends = (0, 0)
    for block in blocks(a, b):
        assert (block.start_a, block.start_b) == ends
        ends = (block.end_a, block.end_b)
    assert ends == (len(a), len(b))


@given(KEYS, KEYS)
def test_paired_items_have_equal_keys_and_no_block_is_empty(a: list[str], b: list[str]) -> None:
    for block in blocks(a, b):
        assert block.end_a > block.start_a or block.end_b > block.start_b
        if block.is_common:
            assert a[block.start_a : block.end_a] == b[block.start_b : block.end_b]


@given(KEYS)
def test_equal_sequences_are_one_common_block(keys: list[str]) -> None:
    assert [*blocks(keys, keys)] == ([Block(0, len(keys), 0, len(keys), is_common=True)] if keys else [])


@given(st.lists(st.integers(), unique=True, min_size=1, max_size=40), st.data())
def test_items_taken_out_are_told_one_by_one(keys: list[int], data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.integers(0, len(keys) - 1)))
    rest = [key for index, key in enumerate(keys) if index not in gone]

    only_a = [
        index for block in blocks(keys, rest) if not block.is_common for index in range(block.start_a, block.end_a)
    ]
    only_b = [
        index for block in blocks(rest, keys) if not block.is_common for index in range(block.start_b, block.end_b)
    ]

    assert {*only_a} == {*only_b} == gone


def test_a_repeated_pattern_meets_again_right_after_an_insertion() -> None:
    pattern = list("abcde") * 40
    longer = [*pattern[:102], "x", "y", *pattern[102:]]

    assert [block for block in blocks(pattern, longer) if not block.is_common] == [
        Block(102, 102, 102, 104, is_common=False)
    ]


def test_another_key_at_one_place_is_a_block_of_one_item_on_both_sides() -> None:
    a = list("abcdefgh")
    b = list("abcdxfgh")

    assert [block for block in blocks(a, b) if not block.is_common] == [Block(4, 5, 4, 5, is_common=False)]


def test_common_items_between_two_near_differences_are_paired() -> None:
    a = list("amnz")
    b = list("aqqmqnz")

    assert [(block.start_a, block.start_b) for block in blocks(a, b) if block.is_common] == [(0, 0), (1, 3), (2, 5)]


@pytest.mark.thorough
def test_a_hundred_thousand_keys_with_a_difference_in_every_tenth() -> None:
    a = [f"{index % 1000}" for index in range(100_000)]
    b = [key for index, key in enumerate(a) if index % 10 != 3]

    only_a = [index for block in blocks(a, b) if not block.is_common for index in range(block.start_a, block.end_a)]

    assert only_a == [index for index in range(100_000) if index % 10 == 3]


def test_ten_thousand_items_on_one_side_alone() -> None:
    a = [f"{index % 100}" for index in range(2_000)]
    b = [*a[:1000], *(f"extra {index % 50}" for index in range(10_000)), *a[1000:]]

    assert [block for block in blocks(a, b) if not block.is_common] == [
        Block(1000, 1000, 1000, 11_000, is_common=False)
    ]


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

    for item, text in ((doubled, "before"), (scalar, "before, without influence")):
        texts = told_before([LAYER, view, *draw("h", "s0")], [LAYER, item, view, *draw("h", "s1")])
        assert [told.partition(":")[0] for told in texts] == [text]


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
