"""The section about operations of `legacy-ddp diff`: the first difference, its meaning and the next step."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.command import command
from tests.helpers.operations import Operation, changed, layer, model, operation, recordable, rewritten, value
from tests.helpers.scenes import rewrite, texts_in
from tests.helpers.traces import NAMES, environment, write_trace

EXPECTED = Path(__file__).with_name("explanations.txt")
STEP = model()
DATA, HIDDEN = "x", "r0(x)"  # the input of the model, and of its second layer


class Case(NamedTuple):
    """Operations of A and B. ``differ``: local gradients differ, too. ``facts``: of A and B."""

    b: Sequence[Operation]
    a: Sequence[Operation] = STEP
    differ: bool = False
    facts: dict[str, tuple[str, str]] | None = None


def wrong(**changes: Any) -> Case:
    """The product of the second layer has another output, and ``changes``."""
    return Case(changed(STEP, 4, **{"outputs": (value("wrong"),), **changes}))


def reads(first: Any, position: int = 7, **changes: Any) -> list[Operation]:
    """The step in which an operation reads another first input."""
    return changed(STEP, position, inputs=(first, *STEP[position].inputs[1:]), **changes)


def inserted(*group: Operation, result: str, source: str = HIDDEN, at: int = 3) -> list[Operation]:
    """The step with a group of operations between two layers."""
    return [*STEP[:at], *group, *rewritten(STEP[at:], 1 if source == HIDDEN else 0, source, result)]


def beside(*group: Operation) -> list[Operation]:
    """The step with a group of operations whose results no other operation reads."""
    return [*STEP[:3], *group, *STEP[3:]]


def dropout(module: str, source: str, result: str) -> list[Operation]:
    return [
        operation("empty_like", [source], module=module, outputs=(value(None),)),
        operation("bernoulli_.float", ["?"], ["mask"], module=module, generator="0" * 16, settings="p=0.9"),
        operation("div_.Scalar", ["mask"], ["mask'"], module=module),
        operation("mul.Tensor", [source, "mask'"], [result], module=module),
    ]


def swapped(*, equal: bool) -> tuple[list[Operation], list[Operation]]:
    """Two layers in the other order; ``equal``: they compute the same."""
    first, last = ("x", "x") if equal else ("h", "h'")
    end, other_end = (operation("sum", [bits], ["l"]) for bits in ("y", "y" if equal else "y'"))
    a = [*layer("a", "x", first, "wa"), *layer("b", first, "y", "wb"), end]
    b = [*layer("b", "x", last, "wb"), *layer("a", last, "y" if equal else "y'", "wa"), other_end]
    return b, a


def weighted(bits: str, module: str = "", name: str = "1.weight") -> Operation:
    return operation("mm", [bits], [f"{bits} {module}"], parameters=(name,), module=module)


def draw(source: str, state: str) -> list[Operation]:
    """A dropout whose mask depends on the state of the generator."""
    mask = f"mask {state}"
    return [
        operation("bernoulli_", ["mask"], [mask], module="drop", generator=state * 16),
        operation("mul", [source, mask], [f"{source} {state}"], module="drop"),
    ]


def in_micro_batch(number: int, *operations: Operation) -> list[Operation]:
    return [replace(item, micro_batch=number) for item in operations]


CAST = operation("_to_copy", inputs=(value(DATA),), parameters=("",), outputs=(value("c", "bfloat16 (4, 8)"),))
DRAW = operation("rand", [], ["r"], generator="0" * 16)
CLAMP = operation("clamp", ["g"], ["g'"], module="1", stage="backward")
SCALE = [operation("mul_.Tensor", [f"g{index}"], [f"g{index}/2"], settings="other=0.5") for index in range(4)]
LOG = [operation("mean", ["h0(x)"], ["m"]), operation("_local_scalar_dense", ["m"])]
COUNT = operation("add_", ["count"], ["count'"], module="bn")
CLONE = operation("clone", ["h0(x)"], ["h0(x)"], module="0.act")
PRODUCT = operation("mm", ["x", "w"], ["y"], parameters=("", "out.weight"), module="out")
COPIED = changed([PRODUCT], 0, parameters=("", ""))
MORE = [operation(name, ["g"], [name], stage="backward", module="out") for name in ("new_empty", "copy_")]
NAMED = [operation(name, [], [name], module="drop") for name in ("empty_like", "bernoulli_", "div_", "mul")]
DROP = dropout("drop", HIDDEN, "d")
LOOP = [operation(name, ["s"], ["s"], module="cell") for _ in range(5) for name in ("mul", "tanh")]
RELU, TANH = operation("relu", ["x"], ["r"], module="a"), operation("tanh", ["x"], ["t"], module="b")
NORM = operation("native_layer_norm_backward.default", ["g"], ["x", "w", "b"], stage="backward", module="norm")
STRIDED = value("r0(x)", layout="strides (1, 4)")
DETACHED = operation("detach", inputs=(value(None),), outputs=(value(None),), parameters=("a",))
VIEW = operation("mul.Tensor", inputs=(value(None),), parameters=("",), settings="other=1.0")
PART = [operation("mul", module="a"), operation("sum"), operation("mm", stage="backward"), operation("mul_")]
PARTS = [*PART, *in_micro_batch(2, *PART, operation("relu", module="a"), operation("add_"))]
LAST_PART = in_micro_batch(3, operation("eval"))
NEG = operation("neg")
WRITTEN_TWICE = [operation("clone", ["x"], ["y"]), operation("clone", ["y"], ["y"]), operation("mul", ["y"], ["z"])]
OF_A_VIEW = operation("t", inputs=(value(None),), outputs=(value(None),), parameters=("1.weight",))
POKED = reads(value("poked"))
FORMED = changed(rewritten(STEP, 7, "h2(x)", "wrong"), 1, settings="training=False")
DETACH = operation("detach", ["x"], ["x"])
OWN_INPUT, OTHER_INPUT = (
    [operation("mm", ["x"], ["h"]), operation("relu", [bits], [f"r{bits}"])] for bits in ("h", "other")
)
IN_PLACE = operation("mul_.Scalar", ["part"], ["part'"], module="1.act")
PRODUCTS = [operation("mm", ["x", f"w{index}"], [f"y{index}"]) for index in range(3)]
EXTRA, END = operation("mm", ["x", "wrong"], ["z"]), operation("sum", ["y0"], ["l"])
HEAD, DOUBLED = operation("mm", ["x"], ["h"], module="sub"), operation("mul", ["h"], ["2h"])
READER, CHAIN = operation("relu", ["h"], ["r"]), [DOUBLED, operation("log", ["2h"], ["l"])]
SCALAR = operation("sum", ["h"], outputs=(value("s", "float32 ()"),))
VIEWED = operation("t", inputs=(value(None),), outputs=(value(None, "float32 (8, 4)"),), parameters=("",))

CASES = {
    # An output differs.
    "one of several outputs": Case(changed([NORM], 0, outputs=(value("x"), value("w'"), value("b"))), [NORM]),
    "other settings": wrong(settings="p=0.5"),
    "another generator": wrong(generator="0123456789abcdef"),
    "another dtype of the output": wrong(outputs=(value("wrong", "bfloat16 (4, 8)"),)),
    "other strides of an input": wrong(inputs=(STRIDED, value("w1.T"))),
    "other threads": wrong()._replace(facts={"seed": ("0", "1"), "threads": ("1", "2")}),
    "a kernel with unordered sums": Case(
        [operation("index_add", ["x"], ["y'"])], [operation("index_add", ["x"], ["y"])]
    ),
    "a draw of one side before": Case(
        [replace(DRAW, module="debug"), operation("bernoulli_", ["x"], ["m'"], module="drop", generator="2" * 16)],
        [operation("bernoulli_", ["x"], ["m"], module="drop", generator="1" * 16)],
    ),
    "a default probability": Case([replace(DROP[1], settings="", outputs=(value("m'"),))], [DROP[1]]),
    # An input differs.
    "other data": Case(model("y")),
    "other data in a strided view": Case(
        reads(value("y", layout="strides (1, 4)"), 1), reads(value("x", layout="strides (1, 4)"), 1)
    ),
    "data of another dtype": Case(reads(value(DATA, "float64 (2, 8)"), 1)),
    "another weight": Case(rewritten(STEP, 3, "w1", "other")),
    "a weight written during the step": Case([*STEP, weighted("poked")], [*STEP, weighted("w1")]),
    "a weight that one side alone read before": Case(
        [weighted("v", "out")], [weighted("u", "log"), weighted("u", "out")]
    ),
    "a write from elsewhere": Case(reads(value("poked"))),
    "another tensor of the step": Case(reads(value(HIDDEN))),
    "a copy in place of a weight": Case([operation("mm", ["old"], ["z"], module="out")], [weighted("w", "out")]),
    "the last of two writers": Case(changed(WRITTEN_TWICE, 2, inputs=(value("poked"),)), WRITTEN_TWICE),
    "a view of a weight reads no bits": Case([OF_A_VIEW, weighted("other")], [OF_A_VIEW, weighted("w")]),
    "an input more": Case(
        changed(STEP, 1, inputs=(*STEP[1].inputs, value("b")), parameters=("", "0.weight", "0.bias"))
    ),
    # Another form.
    "another tensor with equal bits": Case([*COPIED, *MORE], [PRODUCT], differ=True),
    "a copy with equal bits": Case([operation("clone", ["w"], ["w"]), *COPIED, *MORE], [PRODUCT], differ=True),
    "settings alone": Case(changed(STEP, 4, settings="training=False")),
    "settings alone where gradients differ": Case(changed(STEP, 4, settings="training=False"), differ=True),
    "another parameter in a view, which has no bits": Case(changed([DETACHED], 0, parameters=("b",)), [DETACHED]),
    "several aspects": Case(
        changed([VIEW], 0, inputs=(value(None, layout="strides (1, 4)"),), parameters=("w",), settings=""), [VIEW]
    ),
    # Operations of one side alone.
    "a cast": Case(inserted(replace(CAST, module="0"), result="c", source=DATA, at=1)),
    "compiled code": Case(
        [operation("addmm.out", ["x", "w"], ["h"]), operation("sum", ["h"], ["l"])],
        [*layer("lin", "x", "h"), operation("sum", ["h"], ["l"])],
        differ=True,
    ),
    "a dropout in A": Case(STEP, inserted(*DROP, result="d")),
    "a dropout in A and another operation of it": Case(
        STEP, inserted(*DROP, replace(DROP[1], name="aten::bernoulli_", inputs=(value("n"),)), result="d")
    ),
    "a dropout, and an operation of another module": Case(
        inserted(*dropout("drop", HIDDEN, "e"), operation("mul.Tensor", ["e"], ["d"], module="other"), result="d")
    ),
    "a dropout, and an operation that is none": Case(
        inserted(*dropout("drop", HIDDEN, "e"), operation("relu", ["e"], ["d"], module="drop"), result="d")
    ),
    "a dropout outside of modules": Case(inserted(*dropout("", HIDDEN, "d"), result="d")),
    "random numbers outside of modules": Case([DRAW, *STEP]),
    "a block with a dropout once more": Case(
        inserted(*layer("sub.lin", HIDDEN, "e"), *dropout("sub.drop", "e", "d"), result="d")
    ),
    "a block with a normalisation and a cast once more": Case(
        inserted(
            replace(CAST, inputs=(value("e"),)), operation("native_batch_norm", ["c"], ["d"], module="bn"), result="d"
        )
    ),
    "another form of a normalisation": Case(
        *(
            [operation(name, ["x"], [name], module="bn"), operation("relu", [name], [f"r{name}"])]
            for name in ("_native_batch_norm_legit_no_training", "native_batch_norm")
        )
    ),
    "without effect": Case([*STEP[:2], CLONE, *STEP[2:]]),
    "two modules": Case([NAMED[0], TANH, RELU], [RELU]),
    "four names": Case([*NAMED, RELU], [RELU]),
    "gradients scaled after backward": Case([*STEP, *SCALE], differ=True),
    "a hook that clamps a gradient": Case([*STEP, CLAMP], differ=True),
    "a print before a clamp": Case([*STEP[:2], *LOG, *STEP[2:], CLAMP], differ=True),
    "a print before a scale": Case([*STEP[:2], *LOG, *STEP[2:], SCALE[0]], differ=True),
    "further operations": Case([*STEP[:2], COUNT, *STEP[2:], CLAMP], differ=True),
    "after the backward pass of a micro-batch": Case([*PARTS[:4], NEG, *PARTS[4:], *LAST_PART], [*PARTS, *LAST_PART]),
    "in a module behind the backward pass": Case(
        [*PARTS, replace(NEG, micro_batch=2, module="a"), *LAST_PART], [*PARTS, *LAST_PART]
    ),
    "in a micro-batch without a backward pass": Case(
        [*PARTS, *LAST_PART, *in_micro_batch(3, NEG)], [*PARTS, *LAST_PART]
    ),
    "missing in B": Case([*STEP[:5], *rewritten(STEP[6:], 1, "r1(x)", "h1(x)")]),
    "one of several products": Case([*PRODUCTS[:1], EXTRA, *PRODUCTS[1:], END], [*PRODUCTS, END]),
    "one of several products, with an effect": Case(
        [*PRODUCTS[:1], EXTRA, *PRODUCTS[1:], replace(END, inputs=(value("z"),))], [*PRODUCTS, END]
    ),
    # Operations of one side alone before another difference, which they do not hide.
    "a copy before a write from elsewhere": Case([*POKED[:2], CLONE, *POKED[2:]]),
    "a copy before another form": Case([*FORMED[:1], CLONE, *FORMED[1:]]),
    "a write in place before the tensor was made": Case([COUNT, *OTHER_INPUT], OWN_INPUT),
    "a write in place before the tensor was made, later": Case([DETACH, COUNT, *OTHER_INPUT], [DETACH, *OWN_INPUT]),
    "a write in place to a part of the input": Case([*POKED[:6], IN_PLACE, *POKED[6:]]),
    "a write in place before the input was written": Case([*POKED[:3], IN_PLACE, *POKED[3:]]),
    "another activation": Case(
        [HEAD, operation("silu", ["h"], ["s"], module="sub"), *draw("s", "1")],
        [HEAD, operation("tanh", ["h"], ["t"], module="sub"), *draw("t", "0")],
    ),
    **{
        f"before another draw: {name}": Case([HEAD, *group, *draw("h", "1")], [HEAD, *draw("h", "0")])
        for name, group in {
            "a print": [operation("mean", ["h"], ["m"]), operation("_local_scalar_dense", ["m"])],
            "a copy": [operation("clone", ["h"], ["h"])],
            "a draw moves the generator": [DRAW],
            "a write": [COUNT],
            "running statistics": [operation("native_batch_norm", ["h"], ["n", "mean"], module="bn")],
            "a view of a weight may be written to": [DETACHED],
            "a result may be a gradient": [CLAMP],
            "a chain that no operation reads": CHAIN,
            "a chain that is written": [*CHAIN, operation("add_.Tensor", ["s", "l"], ["s'"])],
        }.items()
    },
    "before another draw: written behind its reader": Case(
        [HEAD, READER, operation("exp", ["q"], ["h"]), *draw("r", "1")], [HEAD, READER, *draw("r", "0")]
    ),
    # Behind a transposed view the same elements have other digests.
    "before a view that may read it": Case([HEAD, DOUBLED, VIEWED, *draw("h", "1")], [HEAD, VIEWED, *draw("h", "0")]),
    "before a view of another shape": Case([HEAD, SCALAR, VIEWED, *draw("h", "1")], [HEAD, VIEWED, *draw("h", "0")]),
    # No difference.
    "other micro-batches": Case([*STEP[:5], *in_micro_batch(2, *STEP[5:])]),
    "a digest on one side alone": Case(changed(STEP, 4, outputs=(value(None),))),
    # Another order, and what is none.
    "two layers in the other order": Case(*swapped(equal=False)),
    "another order where gradients differ": Case([TANH, RELU, *STEP], [RELU, TANH, *STEP], differ=True),
    "the missing first step of a loop": Case(beside(*LOOP[1:]), beside(*LOOP)),
    "other numbers in another place": Case(
        beside(operation("mul", ["x"], ["x"], settings="other=3")),
        [operation("mul", ["x"], ["x"], settings="other=2"), *STEP],
    ),
}


def told(folder: Path, case: Case) -> str:
    for label, operations in (("a", case.a), ("b", case.b)):
        facts = {name: sides[label == "b"] for name, sides in (case.facts or {}).items()}
        differs = {(0, 1, "local_gradients", NAMES["local_gradients"][0]): ("ab" * 8, 9.0)}
        write_trace(
            folder / label,
            world_size=1,
            steps=1,
            operations=lambda *_, operations=operations: recordable(operations),
            environments=partial(environment, facts=facts),
            planted=differs if case.differ and label == "b" else {},
        )
    sections = command("diff", folder / "a", folder / "b").stdout.split("\n\n")
    return next(part for part in sections if part.startswith(("operations of step", "note: "))).rstrip() + "\n"


@pytest.mark.parametrize("name", CASES)
def test_the_first_difference_is_explained_as_before(tmp_path: Path, name: str) -> None:
    assert told(tmp_path, CASES[name]) == texts_in(EXPECTED)[name]


if __name__ == "__main__":
    rewrite(EXPECTED, {name: partial(told, case=case) for name, case in CASES.items()})
