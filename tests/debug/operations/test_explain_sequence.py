"""Sentences about operations of one side alone, about another order, and about inputs with equal bits."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from legacy_ddp.debug._operations.align import first_difference
from legacy_ddp.debug._operations.meaning import Explanation, explain
from legacy_ddp.debug._operations.operation import Operation, OperationDifference, details, summary, with_after_backward
from tests.helpers.operations import changed, layer, model, operation, rewritten, value

STEP = model()
SIDES = ("A", "B")
LIKELY = (
    " All operations that both sides ran have equal values: operations that only one side has are the only recorded "
    "difference, and the likely cause of the tensors that differ."
)


def compared(b: Sequence[Operation], a: Sequence[Operation] = STEP, *, differ: bool = False) -> OperationDifference:
    """``differ``: tensors of the step differ."""
    found = first_difference(with_after_backward(a), with_after_backward(b))
    assert found is not None
    return replace(found, tensors_differ=differ)


def told(
    b: Sequence[Operation], a: Sequence[Operation] = STEP, *, differ: bool = False
) -> tuple[str, Explanation, list[str]]:
    found = compared(b, a, differ=differ)
    return summary(found, SIDES), explain(found, SIDES), [*details(found, SIDES)]


def dropout(module: str, reads: str, writes: str) -> list[Operation]:
    return [
        operation("empty_like", [reads], module=module, outputs=(value(None),)),
        operation("bernoulli_.float", ["?"], ["mask"], module=module, generator="0" * 16, settings="p=0.9"),
        operation("div_.Scalar", ["mask"], ["mask'"], module=module),
        operation("mul.Tensor", [reads, "mask'"], [writes], module=module),
    ]


def test_gradients_scaled_after_backward_are_the_likely_cause_of_other_gradients() -> None:
    scale = [operation("mul_.Tensor", [f"g{index}"], [f"g{index}/2"], settings="other=0.5") for index in range(4)]

    text, told_about, _ = told([*STEP, *scale], differ=True)

    assert text == "4 operations only in B: outside of modules, after the backward pass (aten::mul_.Tensor)"
    assert told_about.meaning == (
        "Operations only in B: other code, a hook, or another path for other values." + LIKELY
    )
    assert told_about.next_step == "look at the code after backward(): gradients that it scales, clips or edits"


def test_a_hook_that_clamps_a_gradient_is_the_likely_cause_of_other_gradients() -> None:
    clamp = operation("clamp", ["g"], ["g'"], module="1", stage="backward")

    text, told_about, _ = told([*STEP, clamp], differ=True)

    assert text == "1 operation only in B: backward of 1 (aten::clamp)"
    assert told_about.meaning.endswith(LIKELY)
    assert told_about.next_step == "look at the code and the hooks of 1"


@pytest.mark.parametrize(
    "change",
    [
        operation("mul_.Tensor", ["g"], ["g/2"], stage="after backward"),
        operation("clamp", ["g"], ["g'"], module="1", stage="backward"),
    ],
)
def test_a_print_does_not_hide_the_edited_gradient_behind_it(change: Operation) -> None:
    log = [operation("mean", ["h0(x)"], ["m"]), operation("_local_scalar_dense", ["m"])]

    found = compared([*STEP[:2], *log, *STEP[2:], change], differ=True)

    assert found.b == (change,)
    assert [gap.b for gap in found.earlier] == [tuple(log)]


def test_further_operations_of_one_side_alone_are_listed() -> None:
    write = operation("add_", ["count"], ["count'"], module="bn")
    clamp = operation("clamp", ["g"], ["g'"], module="1", stage="backward")

    _, __, listed = told([*STEP[:2], write, *STEP[2:], clamp], differ=True)

    assert listed == ["later: 1 operation only in B: backward of 1 (aten::clamp)"]


def test_only_operations_outside_of_modules_behind_the_last_backward_operation_are_after_backward() -> None:
    first = [operation("mul", module="a"), operation("sum"), operation("mm", stage="backward"), operation("mul_")]
    second = [replace(item, micro_batch=2) for item in [*first, operation("relu", module="a"), operation("add_")]]

    stages = [item.stage for item in with_after_backward([*first, *second, operation("eval", micro_batch=3)])]

    of_first = ["forward", "forward", "backward", "after backward"]
    assert stages == [*of_first, *of_first, "forward", "after backward", "forward"]


def test_compiled_code_is_named_by_its_operations() -> None:
    a = [*layer("lin", "x", "h"), operation("sum", ["h"], ["l"])]
    b = [operation("addmm.out", ["x", "w"], ["h"]), operation("sum", ["h"], ["l"])]

    _, told_about, __ = told(b, a, differ=True)

    assert told_about.meaning == (
        "Compiled code only in B: forward outside of submodules (aten::addmm.out). Kernels that torch.compile "
        "generates are no recorded operations, and may round otherwise." + LIKELY
    )
    assert told_about.next_step == "run both with torch.compile, or both without, and diff again"


def test_a_stale_copy_of_a_weight_comes_before_operations_of_the_backward_pass() -> None:
    product = operation("mm", ["x", "w"], ["y"], parameters=("", "out.weight"), module="out")
    more = [operation(name, ["g"], [name], stage="backward", module="out") for name in ("new_empty", "copy_")]
    copied = changed([product], 0, parameters=("", ""))

    for b in ([*copied, *more], [operation("clone", ["w"], ["w"]), *copied, *more]):
        text, told_about, listed = told(b, [product], differ=True)

        assert text == "forward of out (aten::mm): input 2 is another tensor with equal bits"
        assert listed == [
            "input 2: 'out.weight' in A, no parameter in B",
            "later: 2 operations only in B: backward of out (aten::new_empty, aten::copy_)",
        ]
        assert told_about.meaning == (
            "Another tensor with equal bits is passed: 'out.weight' in A, no parameter in B (a copy, or a tensor kept "
            "from an earlier step). Its gradient goes elsewhere, and later writes to the parameter do not reach a copy."
        )
        assert told_about.next_step == "look at the code of out, and for copies of weights"


def test_a_view_of_another_parameter_is_no_tensor_with_equal_bits() -> None:
    view = operation("detach", inputs=(value(None),), outputs=(value(None),), parameters=("a",))

    assert compared(changed([view], 0, parameters=("b",)), [view]).passed == ()


def test_settings_alone_are_not_called_harmless_where_tensors_differ() -> None:
    text, told_about, _ = told(changed(STEP, 4, settings="training=False"), differ=True)

    assert text == "forward of 1 (aten::mm): settings differ"
    assert told_about.meaning.startswith(
        "No operation has other values, and tensors of the step differ. Other settings"
    )
    assert told_about.next_step == "look at the code of 1, and at the code after backward()"


def test_a_block_called_once_more_is_not_explained_by_its_dropout() -> None:
    block = [*layer("sub.lin", "r0(x)", "e"), *dropout("sub.drop", "e", "d")]

    text, told_about, _ = told([*STEP[:3], *block, *rewritten(STEP[3:], 1, "r0(x)", "d")])

    assert text == "6 operations only in B, the first: forward of sub.lin (aten::t, aten::mm)"
    assert told_about.meaning == (
        "Operations only in B, among them a random draw (aten::bernoulli_.float): other code, a hook, or another path "
        "for other values."
    )
    assert told_about.next_step == "look at the code and the hooks of sub.lin"


@pytest.mark.parametrize(
    "group",
    [
        [*dropout("drop", "r0(x)", "e"), operation("mul.Tensor", ["e"], ["d"], module="other")],
        [*dropout("drop", "r0(x)", "e"), operation("relu", ["e"], ["d"], module="drop")],
        dropout("", "r0(x)", "d"),
    ],
    ids=["in two modules", "with more than a dropout", "outside of modules"],
)
def test_only_the_operations_of_a_single_dropout_of_a_module_are_its_mode(group: list[Operation]) -> None:
    _, told_about, __ = told([*STEP[:3], *group, *rewritten(STEP[3:], 1, "r0(x)", "d")])

    assert told_about.meaning.startswith("Operations only in B, among them a random draw (aten::bernoulli_.float)")
    assert "model.training" not in told_about.next_step


def test_random_numbers_outside_of_modules_are_not_explained_by_dropout() -> None:
    _, told_about, __ = told([operation("rand", [], ["r"], generator="0" * 16), *STEP])

    assert told_about.meaning.startswith("Operations only in B, among them a random draw (aten::rand): other code")
    assert told_about.next_step == "look at the code and the hooks of the model, and at the code outside of it"


@pytest.mark.parametrize("more", [[], [operation("bernoulli_", ["m"], ["n"], module="drop", generator="0" * 16)]])
def test_a_dropout_alone_is_a_mode_of_its_module(more: list[Operation]) -> None:
    drop = dropout("drop", "r0(x)", "d")

    text, told_about, _ = told(STEP, [*STEP[:3], *drop, *more, *rewritten(STEP[3:], 1, "r0(x)", "d")])

    assert text.endswith("forward of drop (aten::empty_like, aten::bernoulli_.float, aten::div_.Scalar, ...)")
    is_one = not more
    assert told_about.meaning.startswith("Random numbers are drawn only in A (aten::bernoulli_.float)") == is_one
    assert (told_about.next_step == "compare model.training, and train() and eval() of drop") == is_one


def test_a_block_with_a_normalisation_or_a_cast_called_once_more_is_no_mode_and_no_autocast() -> None:
    cast = operation("_to_copy", inputs=(value("e"),), parameters=("",), outputs=(value("c", "bfloat16 (4, 8)"),))
    block = [cast, operation("native_batch_norm", ["c"], ["d"], module="bn")]

    _, told_about, __ = told([*STEP[:3], *block, *rewritten(STEP[3:], 1, "r0(x)", "d")])

    assert told_about.meaning.startswith("Operations only in B: other code")


def swapped(*, equal: bool) -> tuple[list[Operation], list[Operation]]:
    """Two layers in the other order; ``equal``: they compute the same."""
    first, last = ("x", "x") if equal else ("h", "h'")
    end, other_end = (operation("sum", [bits], ["l"]) for bits in ("y", "y" if equal else "y'"))
    a = [*layer("a", "x", first, "wa"), *layer("b", first, "y", "wb"), end]
    b = [*layer("b", "x", last, "wb"), *layer("a", last, "y" if equal else "y'", "wa"), other_end]
    return a, b


def test_two_layers_in_the_other_order_are_not_operations_of_one_side_alone() -> None:
    text, told_about, _ = told(*reversed(swapped(equal=False)))

    assert text == (
        "the same 4 operations in another order: forward of a (aten::t, aten::mm) first in A, forward of b (aten::t, "
        "aten::mm) first in B"
    )
    assert told_about.meaning == "Modules or functions are called in another order."
    assert told_about.next_step == "look at the order of calls in the code around a and b"


def test_another_order_without_an_effect() -> None:
    a = [operation("relu", ["x"], ["r"], module="a"), operation("tanh", ["x"], ["t"], module="b"), *STEP]
    found = compared([a[1], a[0], *STEP], a)

    assert (found.kind, found.a, found.b, found.has_effect) == ("order", tuple(a[:2]), (a[1], a[0]), False)
    assert explain(found, SIDES).meaning.endswith(
        "in another order. All operations that both sides ran have equal values."
    )
    assert explain(replace(found, tensors_differ=True), SIDES).meaning.endswith(
        "equal values: their order is the only recorded difference, and the likely cause of the tensors that differ."
    )


def test_the_missing_first_step_of_a_loop_is_no_other_order() -> None:
    loop = [operation(name, ["s"], ["s"], module="cell") for _ in range(5) for name in ("mul", "tanh")]

    found = compared([*STEP[:3], *loop[1:], *STEP[3:]], [*STEP[:3], *loop, *STEP[3:]])

    assert found.kind == "sequence"


def test_other_numbers_in_another_place_are_no_other_order() -> None:
    a = [operation("mul", ["x"], ["x"], settings="other=2"), *STEP]
    b = [*STEP[:3], operation("mul", ["x"], ["x"], settings="other=3"), *STEP[3:]]

    assert compared(b, a).kind == "sequence"


def test_an_argument_of_the_forward_pass_is_other_data_and_no_unknown_source() -> None:
    found = compared(model("y"))

    told_about = explain(replace(found, origin=replace(found.origin, is_argument=True)), SIDES)

    assert told_about == Explanation(
        "Other data: the differing input is an argument of the model's forward pass.",
        "compare the batches (sampler, seed of the data, order)",
    )


def test_a_default_is_not_printed_as_none_and_the_kept_share_is_told() -> None:
    a = operation("bernoulli_.float", ["?"], ["m"], module="drop", settings="p=0.9")
    b = changed([a], 0, settings="", outputs=(value("m'"),))

    assert told(b, [a])[2][1:] == [
        "settings: p=0.9 in A, none given in B; p is the probability of keeping an element, 0.5 by default, and "
        "dropout has 1 - p"
    ]


def test_a_list_of_aspects_has_commas_and_no_consequences() -> None:
    a = [operation("mul.Tensor", inputs=(value(None),), parameters=("",), settings="other=1.0")]

    others = changed(a, 0, inputs=(value(None, layout="strides (1, 4)"),), parameters=("w",), settings="")

    assert explain(compared(others, a), SIDES).meaning.startswith(
        "No value differs. Other settings, parameters and str"
    )


def test_a_weight_that_one_side_alone_read_before_may_have_come_with_other_bits() -> None:
    def product(bits: str, module: str) -> Operation:
        return operation("mm", [bits], [f"{bits} {module}"], parameters=("w",), module=module)

    found = compared([product("v", "out")], [product("u", "log"), product("u", "out")])

    assert explain(found, SIDES).meaning.startswith("The weight or buffer 'w' came into this step with other bits, or")
