"""Recorded steps and ends of the files of a run, in groups of ranks."""

from pathlib import Path
from typing import Any

import pytest

from legacy_ddp.debug._trace.run import RunCoverage, open_run, span, spans
from tests.helpers.operations import operation
from tests.helpers.traces import end_after, environment, write_trace


def extent(label: str, *runs: Path) -> RunCoverage:
    """Of ranks that are each the rank 0 of a run."""
    seen = RunCoverage(label)
    for rank, folder in enumerate(runs):
        with open_run(folder).open(0) as trace:
            seen.add(rank, trace)
    return seen


def written(folder: Path, **changes: Any) -> Path:
    return write_trace(folder, world_size=1, **changes)


def test_steps_are_those_of_any_rank(tmp_path: Path) -> None:
    late = written(tmp_path / "late", environments=lambda rank, size: environment(rank, size, first_step=4), steps=6)
    long, short = written(tmp_path / "long", steps=12), written(tmp_path / "short", steps=2)

    assert extent("A", late).steps == (3, 9)
    assert extent("A", late, long, short).steps == (0, 12)
    assert extent("A", long, short, late).span() == "steps 0-12"
    assert extent("A", late, short).steps == (0, 9)
    assert extent("A").span() == "no steps"


def test_files_that_were_all_closed_after_the_same_step_need_no_note(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a"), written(tmp_path / "b")

    assert extent("A", a, b).notes() == []


def test_ranks_that_end_at_other_steps_are_reported_even_if_closed(tmp_path: Path) -> None:
    a, b, c = written(tmp_path / "a"), written(tmp_path / "b", steps=3), written(tmp_path / "c")

    assert extent("A", a, b, c).notes() == ["A: ranks 0, 2 ended after step 5", "A: rank 1 ended after step 3"]
    assert extent("", a, b).notes() == ["rank 0 ended after step 5", "rank 1 ended after step 3"]


def test_how_files_end_is_distinguished(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a", end="KeyError"), written(tmp_path / "b", end=None)

    assert extent("B", a, b).notes() == [
        "B: rank 0 ended after step 5 (left by KeyError)",
        "B: rank 1 ended after step 5 (killed, still running, or recorder stopped)",
    ]


def test_many_ways_of_ending_are_cut_and_counted(tmp_path: Path) -> None:
    runs = [written(tmp_path / str(steps), steps=steps) for steps in range(1, 6)]

    assert extent("A", *runs).notes()[3:] == ["A: 2 more ways in which ranks ended"]


@pytest.mark.parametrize("steps, text", [((3, 3), "step 3"), ((0, 7), "steps 0-7")])
def test_a_span_of_one_step_is_a_step(steps: tuple[int, int], text: str) -> None:
    assert span(steps) == text


def of_steps(*steps: int) -> Any:
    return lambda step, _: [operation("mul", ["a" * 16], ["b" * 16])] if step in steps else []


def test_ranks_without_the_operations_of_other_ranks_are_named(tmp_path: Path) -> None:
    whole, part, none = (
        written(tmp_path / name, operations=of_steps(*steps))
        for name, steps in (("whole", (1, 2, 5)), ("part", (2,)), ("none", ()))
    )

    assert extent("A", whole, whole).notes() == []
    assert extent("A", whole, none, whole, part).notes() == [
        "A: operations of steps 1-2, step 5 are missing on rank 1",
        "A: operations of step 1, step 5 are missing on rank 3",
    ]


def test_a_rank_that_was_cut_lacks_the_operations_of_its_later_steps(tmp_path: Path) -> None:
    whole, cut = (written(tmp_path / name, operations=of_steps(2, 3, 4)) for name in ("whole", "cut"))
    end_after(cut / "rank-00000.jsonl", 2)

    assert "operations of steps 3-4 are missing on rank 1" in extent("", whole, cut).notes()


def test_steps_are_joined_to_spans_and_cut() -> None:
    assert spans([3]) == "step 3"
    assert spans([1, 2, 3, 7, 9, 10]) == "steps 1-3, step 7, steps 9-10"
    assert spans(range(0, 40, 2)).endswith(", step 18, ... 10 more spans of steps")
