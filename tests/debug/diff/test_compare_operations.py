"""The step and the ranks with compared operations, between two runs and between the ranks of one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from legacy_ddp.debug._trace import read
from tests.helpers.command import compare
from tests.helpers.operations import Operation, operation
from tests.helpers.tiers import thorough
from tests.helpers.traces import NAMES, call_facts, environment, write_trace

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


def between_ranks(folder: Path, recorded: Recorded, **changes: Any) -> Any:
    return compare(write_trace(folder / "trace", operations=recorded, **changes))


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
    ranks = between_ranks(tmp_path, lambda _, rank: sequence(rank, extra=rank == 1))
    equal = between_runs(tmp_path / "equal", of_steps(2), of_steps(2))

    for comparison in (runs, ranks):
        assert comparison.verdict == "same"
        assert comparison.headline.endswith("bit for bit; operations differ, see below")
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


@pytest.mark.parametrize(
    "world_size, guilty, labels", [(3, 0, ("ranks 1-2", "rank 0")), (4, 2, ("ranks 0-1, 3", "rank 2"))]
)
def test_a_majority_of_ranks_stands_first(
    tmp_path: Path, world_size: int, guilty: int, labels: tuple[str, str]
) -> None:
    found = between_ranks(
        tmp_path, lambda step, rank: sequence(rank, extra=rank == guilty) if step == 2 else (), world_size=world_size
    ).operations

    assert found is not None
    assert (found.kind, found.labels, found.ranks, found.counts) == ("sequence", labels, (guilty,), (4, 5))


def test_two_ranks_have_no_majority(tmp_path: Path) -> None:
    found = between_ranks(tmp_path, lambda _, rank: sequence(rank, extra=rank == 1)).operations

    assert found is not None
    assert (found.step, found.labels, found.ranks) == (1, ("rank 0", "rank 1"), (0, 1))


def test_another_weight_of_one_rank_is_named_and_other_data_are_not(tmp_path: Path) -> None:
    found = between_ranks(
        tmp_path, lambda _, rank: sequence(rank, weight=("c" if rank == 1 else "b") * 16), world_size=3
    ).operations

    assert found is not None
    assert (found.kind, found.module, found.ranks) == ("input", "m0", (1,))
    assert found.summary == "forward of m0 (aten::mul): all operations before agree, 'a' differs"
    assert [row.result for row in found.rows] == ["weights differ"] * 4


def test_a_parameter_that_is_ignored_may_differ_between_ranks(tmp_path: Path) -> None:
    comparison = between_ranks(
        tmp_path,
        lambda _, rank: sequence(rank, weight=("c" if rank == 1 else "b") * 16),
        environments=lambda rank, size: environment(rank, size, parameters=("b",)),
    )

    assert comparison.operations is None


def test_many_ranks_with_operations_of_their_own(tmp_path: Path) -> None:
    def own(step: int, rank: int) -> list[Operation]:
        more = [operation("neg", [], [f"{6000 + 100 * rank + index:016x}"]) for index in range(rank)]
        return [*sequence(rank), *more] if step == 2 else []

    comparison = between_ranks(tmp_path, own, world_size=7)

    assert comparison.operations is not None
    assert comparison.operations.labels == ("rank 0", "rank 1")
    assert comparison.operations.ranks == tuple(range(7))


def logged(operations: Sequence[Operation]) -> list[Operation]:
    """The operations with a number read for a log after the second."""
    return [*operations[:2], operation("_local_scalar_dense", ["a" * 16]), *operations[2:]]


def test_a_log_on_one_rank_is_a_note_and_no_difference(tmp_path: Path) -> None:
    comparison = between_ranks(tmp_path, lambda _, rank: logged(sequence(0)) if rank == 0 else sequence(1))

    assert comparison.operations is None
    assert comparison.headline.endswith("bit for bit")
    assert comparison.notes[-1] == (
        "operations without influence, first in step 1, against rank 1: 1 operation only on rank 0: forward outside of "
        "submodules (aten::_local_scalar_dense)"
    )


@pytest.mark.parametrize("world_size", [3, thorough(4)])
def test_a_log_on_the_first_rank_does_not_hide_the_rank_with_a_fault(tmp_path: Path, world_size: int) -> None:
    def recorded(_: int, rank: int) -> list[Operation]:
        return logged(sequence(0)) if rank == 0 else sequence(rank, extra=rank == world_size - 1)

    comparison = between_ranks(tmp_path, recorded, world_size=world_size)

    assert comparison.operations is not None
    assert (comparison.operations.ranks, comparison.operations.module) == ((world_size - 1,), "m4")
    assert comparison.operations.counts == (4, 5)
    assert {row.result for row in comparison.operations.rows} == {"agrees", f"only on rank {world_size - 1}"}
    assert [note for note in comparison.notes if "only on rank 0" in note]


@pytest.mark.parametrize("first, second", [(0, 2), (2, 0), (1, 2)])
def test_every_rank_with_a_difference_of_its_own_is_named(tmp_path: Path, first: int, second: int) -> None:
    def recorded(_: int, rank: int) -> list[Operation]:
        found = sequence(rank)
        own = [operation("neg", ["a" * 16], [f"{5000 + rank:016x}"], module=f"own{rank}")]
        return [*found[:1], *own, *found[1:]] if rank == first else [*found, *own] if rank == second else found

    comparison = between_ranks(tmp_path, recorded, world_size=3)

    assert comparison.operations is not None
    told = [comparison.operations.summary, *comparison.notes]
    assert [text for text in told if f"1 operation only on rank {first}: forward of own{first} (aten::neg)" in text]
    assert [text for text in told if f"1 operation only on rank {second}: forward of own{second} (aten::neg)" in text]


def test_ranks_are_compared_up_to_the_first_different_step(tmp_path: Path) -> None:
    comparison = between_ranks(
        tmp_path,
        lambda step, rank: sequence(rank, extra=step == 4 and rank == 1) if step in (2, 4) else (),
        planted=differing(3, 1, "parameters"),
    )

    assert (comparison.verdict, comparison.operations) == ("different", None)
    assert comparison.notes == (
        "operations of step 2 agree between ranks, as far as data leave them equal; other data hide the rest, as a "
        "constant in the loss: legacy_ddp.debug.cross_check() compares it",
    )


def test_a_step_that_not_all_ranks_recorded_is_left_out(tmp_path: Path) -> None:
    comparison = between_ranks(tmp_path, lambda step, rank: sequence(rank) if step == 2 + rank else ())

    assert comparison.operations is None
    assert comparison.notes == (
        "operations of step 3 are missing on rank 0",
        "operations of step 2 are missing on rank 1",
    )


def test_uneven_micro_batches_of_ranks_are_a_note_and_no_difference(tmp_path: Path) -> None:
    def uneven(step: int, rank: int) -> list[Operation]:
        first = sequence(rank)
        more = [replace(item, micro_batch=number) for number in range(2, 3 + rank) for item in first]
        return [*first, *more] if step == 2 else []

    comparison = between_ranks(tmp_path, uneven)

    assert (comparison.verdict, comparison.operations) == ("same", None)
    assert comparison.notes[-1] == (
        "ranks took other numbers of micro-batches, first in step 2: 2 on rank 0, 3 on rank 1; only operations of "
        "common micro-batches were compared"
    )


def test_files_are_not_read_again_for_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(step: int, rank: int) -> list[Operation]:
        more = [replace(item, micro_batch=2) for item in sequence(rank)] if rank == step % 2 else []
        return [*sequence(rank, extra=step == 5 and rank == 1), *more]

    folder = write_trace(tmp_path, operations=taken)
    opened = []
    opens = read.open_trace
    monkeypatch.setattr(read, "open_trace", lambda path: opened.append(path) or opens(path))

    comparison = compare(folder)

    assert comparison.operations is not None
    assert comparison.operations.step == 5
    # All ranks; each rank beside the fullest of its steps; all ranks in the different step.
    assert 2 <= len(opened) <= 2 + 2 * 2 + 2


def test_a_note_names_the_rank_without_operations(tmp_path: Path) -> None:
    def on_rank_0(step: int, rank: int) -> Sequence[Operation]:
        return of_steps(2)(step, rank) if rank == 0 else ()

    of_runs = between_runs(tmp_path, of_steps(2), on_rank_0)
    of_ranks = between_ranks(tmp_path, on_rank_0)

    assert of_runs.notes == ("B: operations of step 2 are missing on rank 1", "operations of step 2 agree")
    assert of_ranks.notes == ("operations of step 2 are missing on rank 1",)


@pytest.mark.parametrize("of_a, of_b", [((2,), (2,)), ((2,), ()), ((), (2,))])
def test_runs_of_other_world_sizes_say_that_operations_were_not_compared(
    tmp_path: Path, of_a: tuple[int, ...], of_b: tuple[int, ...]
) -> None:
    a = write_trace(tmp_path / "a", operations=of_steps(*of_a))
    b = write_trace(tmp_path / "b", operations=of_steps(*of_b), world_size=3)

    comparison = compare(a, b)

    assert comparison.operations is None
    assert comparison.notes[0] == "world sizes 2 and 3: local gradients, inputs and operations were not compared"
