"""The step and the ranks with compared operations of two runs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import compare
from tests.helpers.operations import Operation, operation
from tests.helpers.traces import NAMES, call_facts, write_trace

GRADIENT = NAMES["local_gradients"][0]
Recorded = Callable[[int, int], Sequence[Operation]]


def sequence(rank: int, *, wrong: int | None = None, extra: bool = False, weight: str = "b" * 16) -> list[Operation]:
    """Four operations on data of the rank; ``wrong``: position of an operation with another output.

    ``extra``: one more, with a result of its own.
    """
    found, held = [], f"{rank:016x}"
    for index in range(4):
        out = f"{17 * (index + 1) + (index == wrong) + 1000 * rank:016x}"
        found.append(operation("mul", [held, weight], [out], module=f"m{index}", parameters=("", "a")))
        held = out
    return [*found, operation("neg", [held], [f"{5000 + rank:016x}"], module="m4")] if extra else found


def of_steps(*steps: int, **changes: Any) -> Recorded:
    return lambda step, rank: sequence(rank, **changes) if step in steps else ()


def between_runs(folder: Path, a: Recorded, b: Recorded, planted: dict[Any, Any] | None = None) -> Any:
    one = write_trace(folder / "a", operations=a)
    return compare(one, write_trace(folder / "b", operations=b, planted=planted))


def differing(step: int, rank: int, phase: str = "local_gradients") -> dict[Any, Any]:
    return {(rank, step, phase, NAMES[phase][0]): ("ee" * 8, 9.0)}


def test_the_first_different_step_and_rank_is_compared(tmp_path: Path) -> None:
    def wrong(step: int, rank: int) -> list[Operation]:
        return sequence(rank, wrong={0: 3, 1: 1}[rank] if step == 3 else 0)

    found = between_runs(tmp_path, of_steps(2, 3, 4), wrong, differing(3, 1)).operations

    assert found is not None
    assert (found.step, found.ranks, found.module, found.counts) == (3, (1,), "m1", (4, 4))


def test_ranks_with_the_same_first_difference_are_named_together(tmp_path: Path) -> None:
    planted = {**differing(3, 0), **differing(3, 1)}

    found = between_runs(tmp_path, of_steps(3), of_steps(3, wrong=2), planted).operations

    assert found is not None
    assert (found.ranks, found.module) == ((0, 1), "m2")


@pytest.mark.parametrize(
    "phase, meaning",
    [
        ("local_gradients", "as far as recorded: gradients were written to after backward"),
        ("reduced_gradients", "Forward and backward computed the same."),
        ("parameters", "Forward and backward computed the same."),
    ],
)
def test_equal_operations_in_the_first_different_step_are_told(tmp_path: Path, phase: str, meaning: str) -> None:
    found = between_runs(tmp_path, of_steps(3), of_steps(3), differing(3, 1, phase)).operations

    assert found is not None
    assert (found.kind, found.summary) == ("", "all 4 operations agree")
    assert meaning in found.meaning


@pytest.mark.parametrize(
    "a, b, lacking", [((3,), (), "B"), ((), (3,), "A"), ((), (), "A and B"), ((2,), (2,), "A and B")]
)
def test_a_first_different_step_without_operations_is_told_with_the_next_step(
    tmp_path: Path, a: tuple[int, ...], b: tuple[int, ...], lacking: str
) -> None:
    comparison = between_runs(tmp_path, of_steps(*a), of_steps(*b), differing(3, 1))

    assert comparison.operations is None
    assert comparison.notes[-1] == (
        f"operations of step 3 were not recorded in {lacking}; to find the first that differs, record again with "
        "operations=range(3, 4)"
    )


@pytest.mark.parametrize("phase", ["reduced_gradients", "parameters"])
def test_where_operations_cannot_help_nobody_is_asked_to_record_them(tmp_path: Path, phase: str) -> None:
    comparison = between_runs(tmp_path, of_steps(), of_steps(), differing(3, 1, phase))

    assert (comparison.verdict, comparison.operations, comparison.notes) == ("different", None, ())


def test_operations_alone_do_not_make_runs_different(tmp_path: Path) -> None:
    comparison = between_runs(tmp_path, of_steps(2, 4), of_steps(2, 4, wrong=1))

    assert comparison.verdict == "same"
    assert comparison.operations is not None
    assert (comparison.operations.step, comparison.operations.ranks) == (2, (0, 1))


@pytest.mark.parametrize(
    "phase, is_likely", [("local_gradients", True), ("buffers", True), ("reduced_gradients", False), (None, False)]
)
def test_operations_of_one_run_alone_are_the_likely_cause_if_tensors_they_may_write_differ(
    tmp_path: Path, phase: str | None, is_likely: bool
) -> None:
    planted = differing(3, 1, phase) if phase else {}

    found = between_runs(tmp_path, of_steps(3), of_steps(3, extra=True), planted).operations

    assert found is not None
    assert found.ranks == (0, 1)
    assert found.meaning.endswith("the likely cause of the tensors that differ.") == is_likely
    assert found.meaning.endswith("All operations that both sides ran have equal values.") != is_likely


def test_operations_behind_the_backward_pass_are_not_said_to_be_of_the_forward_pass(tmp_path: Path) -> None:
    step = [*sequence(0), operation("mul", stage="backward")]
    scale = operation("mul_", ["aa" * 8], ["bb" * 8])

    found = between_runs(tmp_path, lambda *_: step, lambda *_: [*step, scale], differing(3, 1)).operations

    assert found is not None
    assert found.summary == "1 operation only in B: outside of modules, after the backward pass (aten::mul_)"
    assert (found.stage, found.rows[-1].stage) == ("after backward", "after backward")


@pytest.mark.parametrize("is_argument", [True, False])
def test_other_data_of_the_forward_pass_are_no_unknown_source(tmp_path: Path, is_argument: bool) -> None:
    """The digest of the input stands among the recorded arguments."""

    def reads(digest: str) -> Recorded:
        return lambda step, _: [operation("mul", [digest], [digest[::-1]])] if step == 3 else ()

    digests = "0a" * 8, "0b" * 8
    runs = [
        write_trace(
            tmp_path / digest,
            operations=reads(digest),
            planted=differing(3, 1) if digest == digests[1] else {},
            calls=lambda step, rank, digest=digest: call_facts(
                step, rank, inputs=(("float32 (4, 8)", digest if is_argument else digests[0]),), forwards=1
            ),
        )
        for digest in digests
    ]

    found = compare(*runs).operations

    assert found is not None
    assert found.meaning.startswith(
        "Other data: the differing input is an argument" if is_argument else "Unknown source"
    )


def test_the_headline_of_equal_tensors_says_that_operations_differ(tmp_path: Path) -> None:
    runs = between_runs(tmp_path, of_steps(2), of_steps(2, wrong=1))
    equal = between_runs(tmp_path / "equal", of_steps(2), of_steps(2))

    assert runs.verdict == "same"
    assert runs.headline.endswith("bit for bit; operations differ, see below")
    assert equal.headline.endswith("bit for bit")


def test_equal_operations_of_equal_runs_are_a_note(tmp_path: Path) -> None:
    comparison = between_runs(tmp_path, of_steps(2, 4), of_steps(2, 4))

    assert (comparison.verdict, comparison.operations) == ("same", None)
    assert comparison.notes == ("operations of steps 2-4 (2 compared) agree",)


@pytest.mark.parametrize(
    "a, b, text",
    [
        ((1, 2), (), "for steps 1-2 in A and for none in B"),
        ((), (3,), "for none in A and for step 3 in B"),
        ((1, 2), (3, 4), "for steps 1-2 in A and for steps 3-4 in B"),
    ],
)
@pytest.mark.parametrize("planted", [{}, differing(3, 1, "parameters")])
def test_operations_without_a_common_step_are_told(
    tmp_path: Path, a: tuple[int, ...], b: tuple[int, ...], text: str, planted: dict[Any, Any]
) -> None:
    comparison = between_runs(tmp_path, of_steps(*a), of_steps(*b), planted)

    assert comparison.operations is None
    assert comparison.notes == (f"operations: recorded {text}: not compared",)


def test_a_note_names_the_rank_without_operations(tmp_path: Path) -> None:
    def on_rank_0(step: int, rank: int) -> Sequence[Operation]:
        return of_steps(2)(step, rank) if rank == 0 else ()

    of_runs = between_runs(tmp_path, of_steps(2), on_rank_0)
    of_ranks = compare(tmp_path / "b")

    assert of_runs.notes == ("B: operations of step 2 are missing on rank 1", "operations of step 2 agree")
    assert of_ranks.notes[0] == "operations of step 2 are missing on rank 1"


@pytest.mark.parametrize("of_a, of_b", [((2,), (2,)), ((2,), ()), ((), (2,))])
def test_runs_of_other_world_sizes_say_that_operations_were_not_compared(
    tmp_path: Path, of_a: tuple[int, ...], of_b: tuple[int, ...]
) -> None:
    a = write_trace(tmp_path / "a", operations=of_steps(*of_a))
    b = write_trace(tmp_path / "b", operations=of_steps(*of_b), world_size=3)

    comparison = compare(a, b)

    assert comparison.operations is None
    assert comparison.notes[0] == "world sizes 2 and 3: local gradients, inputs and operations were not compared"


def test_the_operations_of_the_ranks_of_one_run_are_not_compared_and_a_note_says_what_does(tmp_path: Path) -> None:
    comparison = compare(write_trace(tmp_path / "trace", operations=lambda _, rank: sequence(rank, extra=rank == 1)))

    assert (comparison.verdict, comparison.operations) == ("same", None)
    (note,) = comparison.notes
    assert "cross_check() lets every rank compute the same batch" in note
