"""The cause that a cross-check names for a different operation, and its evidence."""

from typing import Any

import pytest

from legacy_ddp.debug._cross_check.explain import report_of
from legacy_ddp.debug._cross_check.verdict import CrossCheckReport, Place, judge
from legacy_ddp.debug._operations.align import first_difference
from legacy_ddp.debug._operations.operation import Operation
from tests.helpers.operations import changed, model, operation, rewritten, value

STEP = model()
A, B, C = (1, 1), (1, 2), (1, 3)
UNSTABLE = [(A, B), (A, A)]
VERDICTS: dict[str, Any] = {
    "nondeterministic": judge(0, A, A, UNSTABLE),
    "once": judge(0, B, A, [(A, A)] * 2),
    "differs": judge(0, A, B, [(A, A), (B, B)]),
}


def _report(kind: str, other: list[Operation], first: list[Operation] = STEP) -> CrossCheckReport:
    place = Place(first_difference(first, other), None, len(first))
    assert place.difference is not None
    return report_of("cross_check() call 1", 2, 2, 0, VERDICTS[kind], ["the loss"], place, ())


def _why(report: CrossCheckReport) -> str:
    return next(text for text in report.place if text.startswith("why: "))


def _scaled(number: float) -> list[Operation]:
    """A step that multiplies by a number that forward has counted."""
    return [operation("mul", ["x"], [f"x * {number}"], settings=f"other={number}"), *STEP]


@pytest.mark.parametrize("kind", ["nondeterministic", "once"])
@pytest.mark.parametrize(
    "first, other", [(_scaled(0.04), _scaled(0.05)), (STEP, [*STEP[:2], operation("clamp", ["y"], ["z"]), *STEP[2:]])]
)
def test_a_counter_in_forward_is_no_kernel(kind: str, first: list[Operation], other: list[Operation]) -> None:
    report = _report(kind, other, first)

    assert _why(report) == "why: state in Python that a run changes: a counter, a cache, an attribute of a module"
    assert report.next_step == "keep such state in buffers, or take it out of run()"


@pytest.mark.parametrize("kind", ["nondeterministic", "once"])
def test_another_order_of_calls_is_no_kernel(kind: str) -> None:
    ends = [operation("relu", ["x"], ["r"], module="a"), operation("tanh", ["x"], ["t"], module="b")]

    assert _why(_report(kind, [*reversed(ends), *STEP], [*ends, *STEP])).startswith("why: state in Python")


def test_operations_of_one_rank_alone_behind_equal_values_are_not_called_harmless() -> None:
    report = _report("differs", [*STEP, operation("clamp", ["g"], ["g'"], stage="backward")])

    assert _why(report).endswith("the only recorded difference, and the likely cause of the tensors that differ.")


def test_a_kernel_with_other_outputs_for_the_same_call_is_still_a_kernel() -> None:
    report = _report("nondeterministic", changed(rewritten(STEP, 4, "h1(x)", "wrong"), 4, outputs=(value("wrong"),)))

    assert "a kernel that is not deterministic (atomic additions, threads)" in _why(report)


@pytest.mark.parametrize(
    "is_intermittent, why, step",
    [
        (True, "equal outputs in a third: a kernel that is wrong at times", "start the job again with the rank on"),
        (False, "the same inputs give other outputs on rank 1 than on rank 0, in every run", "compare libraries"),
    ],
)
def test_a_kernel_that_is_wrong_at_times_is_not_called_wrong_in_every_run(
    is_intermittent: bool, why: str, step: str
) -> None:
    found = first_difference(STEP, changed(rewritten(STEP, 4, "h1(x)", "wrong"), 4, outputs=(value("wrong"),)))
    place = Place(found, None, len(STEP), is_intermittent=is_intermittent)
    report = report_of("cross_check() call 1", 2, 2, 0, VERDICTS["differs"], ["the loss"], place, ())

    assert why in _why(report)
    assert report.next_step.startswith(step)


@pytest.mark.parametrize("kind", VERDICTS)
@pytest.mark.parametrize("kind_of_input", ["float32 (4, 8)", "float64 (4, 8)"])
def test_an_attribute_of_a_module_is_no_other_batch(kind: str, kind_of_input: str) -> None:
    other = changed(model("y"), 1, inputs=(value("y", kind_of_input), STEP[1].inputs[1]))

    text = " ".join(str(_report(kind, other)).split())

    assert "both runs had the same batch: state kept outside of parameters and buffers (an attribute of a" in text
    assert "sampler" not in text
    assert "compare the batches" not in text


@pytest.mark.parametrize(
    "ranks, text",
    [
        ([(A, B), (A, C)], "the results of 2 runs of the batch of rank 0 differ on every rank"),
        ([(A, B), (A, A)], "the results of 2 runs of the batch of rank 0 differ on rank 0; rank 1 agrees with itself"),
        ([(A, B)], "the results of 2 runs of the batch of rank 0 differ on rank 0"),
    ],
)
def test_ranks_that_disagree_with_themselves_are_told_plainly(ranks: Any, text: str) -> None:
    report = report_of("cross_check() call 1", len(ranks), 2, 0, judge(0, A, A, ranks), [], Place(), ())

    assert report.who == text
