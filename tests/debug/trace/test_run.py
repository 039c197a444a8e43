"""Folders of traces: one whole run is accepted, anything else is refused with a reason."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._trace.read import RunCoverage, open_run, span, spans
from legacy_ddp.debug._trace.records import Writer
from tests.helpers.operations import operation
from tests.helpers.traces import KIND, NAMES, end_after, environment, write_trace


def _refused(folder: Path) -> str:
    with pytest.raises(TraceError) as caught:
        open_run(folder)
    return str(caught.value)


def test_a_run_is_its_ranks_in_order(tmp_path: Path) -> None:
    run = open_run(write_trace(tmp_path, world_size=3, steps=2))

    assert run.environments == tuple(environment(rank, 3) for rank in range(3))
    assert (run.folder, run.world_size) == (tmp_path, 3)
    assert [path.name for path in run.paths] == ["rank-00000.jsonl", "rank-00001.jsonl", "rank-00002.jsonl"]
    assert run.size_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    with run.open(2) as trace:
        assert trace.environment.rank == 2
        assert list(trace.steps) == [0, 1, 2]


def test_other_files_in_the_folder_are_nobodys_business(tmp_path: Path) -> None:
    write_trace(tmp_path, world_size=2)
    for name in ("notes.txt", "rank-00002.jsonl.gz", "rank-0.jsonl", "rank-000x0.jsonl", "a-rank-00005.jsonl", ".lock"):
        (tmp_path / name).write_bytes(b"junk")
    (tmp_path / "rank-1").mkdir()

    assert open_run(tmp_path).world_size == 2


def test_ranks_of_more_digits_are_found(tmp_path: Path) -> None:
    Writer(tmp_path, environment(123_456, 123_457)).abandon()

    assert _refused(tmp_path).startswith(f"{tmp_path} lacks ranks 0-123455 of 123457; ")


def test_no_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert _refused(tmp_path / "none") == (
        f"{tmp_path}/none cannot be read: No such file or directory; expected a recorder's folder"
    )
    assert _refused(tmp_path / "file") == f"{tmp_path}/file is a file, expected the folder that a recorder wrote"


@pytest.mark.parametrize(
    "names, got",
    [
        ([], "nothing"),
        (["b", "a"], "a, b"),
        (["a", "b", "c"], "a, b, c"),
        (["a", "b", "c", "d", "e"], "a, b, c and 2 more"),
    ],
)
def test_a_folder_without_a_trace_says_what_is_in_it(tmp_path: Path, names: list[str], got: str) -> None:
    for name in names:
        (tmp_path / name).touch()

    assert _refused(tmp_path) == f"{tmp_path} holds no trace: got {got}, expected rank-00000.jsonl and so on"


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    write_trace(tmp_path, world_size=6)
    for rank in (1, 2, 5):
        (tmp_path / f"rank-0000{rank}.jsonl").unlink()

    assert _refused(tmp_path) == (
        f"{tmp_path} lacks ranks 1-2, 5 of 6; copy the files of all hosts into one folder "
        "(was a rank killed before its recorder began, or is there a recorder on some ranks only?)"
    )


def test_files_of_runs_of_several_sizes_are_refused(tmp_path: Path) -> None:
    write_trace(tmp_path, world_size=2)
    Writer(tmp_path, environment(2, 3)).abandon()

    assert _refused(tmp_path) == (f"{tmp_path} holds files of several runs: got world sizes [2, 3], expected one run")


def test_a_rank_beyond_the_world_size_is_refused(tmp_path: Path) -> None:
    write_trace(tmp_path, world_size=2)
    Writer(tmp_path, environment(4, 2)).abandon()

    assert _refused(tmp_path) == f"{tmp_path} holds files of several runs: got rank 4, expected ranks below 2"


def test_a_renamed_file_is_refused(tmp_path: Path) -> None:
    write_trace(tmp_path, world_size=2)
    (tmp_path / "rank-00001.jsonl").rename(tmp_path / "rank-00002.jsonl")

    assert _refused(tmp_path) == f"{tmp_path}/rank-00002.jsonl was renamed: it is the trace of rank 1"


@pytest.mark.parametrize("name", ["rank-000000.jsonl", f"rank-{5 * chr(0x660)}.jsonl"])
def test_a_file_of_another_name_never_takes_the_place_of_a_rank(tmp_path: Path, name: str) -> None:
    write_trace(tmp_path, world_size=1)
    (tmp_path / name).write_bytes((tmp_path / "rank-00000.jsonl").read_bytes())

    assert open_run(tmp_path).paths == (tmp_path / "rank-00000.jsonl",)


@pytest.mark.parametrize("junk", [b"", b"junk\n", b'{"line":"environment","format":"x"}\n'])
def test_a_rank_file_that_is_no_trace_is_named(tmp_path: Path, junk: bytes) -> None:
    write_trace(tmp_path, world_size=2)
    (tmp_path / "rank-00001.jsonl").write_bytes(junk)

    assert _refused(tmp_path).startswith(f"{tmp_path}/rank-00001.jsonl")


def test_a_rank_file_that_is_a_folder_or_leads_nowhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.symlink_to(tmp_path / "nowhere")
    assert _refused(tmp_path) == f"{path} cannot be read: No such file or directory"
    path.unlink()
    path.mkdir()
    assert _refused(tmp_path) == f"{path} cannot be read: Is a directory"


def test_a_rank_file_that_fails_to_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.symlink_to("/proc/self/mem")  # opens, and fails to be read from where nothing is mapped

    assert _refused(tmp_path) == f"{path} cannot be read: Input/output error"


@pytest.mark.thorough
def test_a_thousand_ranks_need_few_open_files(tmp_path: Path) -> None:
    write_trace(tmp_path, world_size=1000, steps=1, names={"settings": ("lr",)})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
    try:
        run = open_run(tmp_path)
        for rank in range(1000):
            with run.open(rank) as trace:
                assert trace.environment.rank == rank
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert run.world_size == 1000


@pytest.mark.parametrize("what", ["first_step", "every"])
def test_ranks_of_a_whole_and_of_a_resumed_run_are_refused_together(tmp_path: Path, what: str) -> None:
    write_trace(tmp_path, environments=lambda rank, size: environment(rank, size, **{what: 1 + rank}))

    assert _refused(tmp_path) == f"{tmp_path} holds files of several runs: got {what} [1, 2], expected one value"


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-00000.jsonl")

    assert _refused(tmp_path).endswith("rank-00000.jsonl is a pipe, expected a file; save its output to a file")


def test_ranks_of_two_jobs_are_refused_together(tmp_path: Path) -> None:
    write_trace(tmp_path, environments=lambda rank, size: environment(rank, size, job=f"{rank:016x}"))

    assert "holds files of several runs: got job ['0000000000000000', '0000000000000001']" in _refused(tmp_path)


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


def test_names_of_a_section_are_reported_without_its_values(tmp_path: Path) -> None:
    with open_run(write_trace(tmp_path / "t")).open(1) as trace:
        names = trace.names(3, "optimizer")

        assert names is not None
        assert (names.phase, names.names, names.kinds) == ("optimizer", NAMES["optimizer"], (KIND, KIND))
        assert trace.names(0, "optimizer") is None
        assert trace.names(99, "optimizer") is None


def test_the_first_section_with_elements_that_are_not_finite_is_known(tmp_path: Path) -> None:
    planted = {
        (0, 4, "local_gradients", "gradient of 'a'"): ("ab" * 8, 1.0, 1),
        (0, 3, "parameters", "parameter 'b'"): ("ab" * 8, 1.0, 2),
    }
    run = open_run(write_trace(tmp_path / "t", planted=planted))

    with run.open(0) as bad, run.open(1) as good:
        assert (bad.nonfinite, good.nonfinite) == ((3, "parameters"), None)


def test_reading_up_to_a_step_stops_at_the_next_one(tmp_path: Path) -> None:
    run = open_run(write_trace(tmp_path / "t", steps=50))

    with run.open(0, until=3) as trace:
        assert list(trace.steps) == [0, 1, 2, 3, 4]
        assert trace.names(3, "buffers") is not None
        assert (trace.damage, trace.end) == ("", "")
