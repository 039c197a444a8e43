"""Folders of traces: one whole run is accepted, anything else is refused with a reason; notes about its ends."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import command, compare, refusal
from tests.helpers.operations import operation
from tests.helpers.traces import end_after, environment, write_trace

RANKS = ["rank-00000.jsonl", "rank-00001.jsonl", "rank-00002.jsonl"]
LACKING = (
    "copy the files of all hosts into one folder (was a rank killed before its recorder began, or is there a recorder "
    "on some ranks only?)"
)


def _add_rank(folder: Path, rank: int, world_size: int) -> None:
    """The file of a rank of a run of another size."""
    write_trace(folder / "other", world_size=1, environments=lambda *_: environment(rank, world_size))
    (path,) = (folder / "other").iterdir()
    path.rename(folder / path.name)
    (folder / "other").rmdir()


def _emptied(folder: Path, *names: str) -> Path:
    """The folder with empty files of these names alone."""
    for path in folder.iterdir():
        path.unlink()
    for name in names:
        (folder / name).touch()
    return folder


def _replace(folder: Path, by: Callable[[Path], object]) -> None:
    """Replace the file of rank 1."""
    (folder / RANKS[1]).unlink()
    by(folder / RANKS[1])


# What is done to a folder with the trace of two ranks; what the command says.
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "{folder} cannot be read: No such file or directory; expected a recorder's folder"),
    "a file": (
        lambda folder: (shutil.rmtree(folder), folder.touch()),
        "{folder} is a file, expected the folder that a recorder wrote",
    ),
    "empty": (_emptied, "{folder} holds no trace: got nothing, expected rank-00000.jsonl and so on"),
    "other files": (
        lambda folder: _emptied(folder, "b", "a", "c"),
        "{folder} holds no trace: got a, b, c, expected rank-00000.jsonl and so on",
    ),
    "many files": (
        lambda folder: _emptied(folder, "a", "b", "c", "d", "e"),
        "{folder} holds no trace: got a, b, c and 2 more, expected rank-00000.jsonl and so on",
    ),
    "a missing rank": (lambda folder: (folder / RANKS[0]).unlink(), f"{{folder}} lacks rank 0 of 2; {LACKING}"),
    "ranks of more digits": (
        lambda folder: _add_rank(_emptied(folder), 123_456, 123_457),
        f"{{folder}} lacks ranks 0-123455 of 123457; {LACKING}",
    ),
    "several sizes": (
        lambda folder: _add_rank(folder, 2, 3),
        "{folder} holds files of several runs: got world sizes [2, 3], expected one run",
    ),
    "a rank beyond the size": (
        lambda folder: _add_rank(folder, 4, 2),
        "{folder} holds files of several runs: got rank 4, expected ranks below 2",
    ),
    "a renamed file": (
        lambda folder: (folder / RANKS[1]).rename(folder / RANKS[2]),
        "{folder}/rank-00002.jsonl was renamed: it is the trace of rank 1",
    ),
    **{
        name: (partial(_replace, by=by), f"{{folder}}/rank-00001.jsonl {text}")
        for name, (by, text) in {
            "a link to nowhere": (lambda path: path.symlink_to("/none"), "cannot be read: No such file or directory"),
            "a folder in place of a file": (Path.mkdir, "cannot be read: Is a directory"),
            "a file that fails to be read": (  # where nothing is mapped
                lambda path: path.symlink_to("/proc/self/mem"),
                "cannot be read: Input/output error",
            ),
            "a pipe, which is not waited for": (os.mkfifo, "is a pipe, expected a file; save its output to a file"),
        }.items()
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_is_no_whole_run_is_refused(tmp_path: Path, name: str) -> None:
    harm, text = REFUSED[name]
    harm(folder := write_trace(tmp_path / "trace"))

    assert refusal("show", folder) == text.format(folder=folder)


@pytest.mark.parametrize(
    "what, values", [("first_step", [1, 2]), ("every", [1, 2]), ("job", ["0000000000000000", "0000000000000001"])]
)
def test_ranks_of_two_runs_are_refused_together(tmp_path: Path, what: str, values: list[Any]) -> None:
    folder = write_trace(tmp_path, environments=lambda rank, size: environment(rank, size, **{what: values[rank]}))

    assert refusal("show", folder) == f"{folder} holds files of several runs: got {what} {values}, expected one value"


def test_other_files_in_the_folder_are_nobodys_business(tmp_path: Path) -> None:
    write_trace(tmp_path)
    names = ("notes.txt", "rank-00002.jsonl.gz", "rank-0.jsonl", "rank-000x0.jsonl", "a-rank-00005.jsonl", ".lock")
    digits = chr(0x660)  # a zero of another script
    for name in (*names, "rank-000001.jsonl", f"rank-{5 * digits}.jsonl"):
        (tmp_path / name).write_bytes((tmp_path / RANKS[0]).read_bytes())
    (tmp_path / "rank-1").mkdir()

    assert json.loads(command("show", "--json", tmp_path).stdout)["world_size"] == 2


def _with_ends(folder: Path, *steps: int) -> Path:
    """A run whose ranks were all closed, each after its own step."""
    for rank, last in enumerate(steps):
        parts = write_trace(folder / f"{rank}", world_size=len(steps), steps=last)
        (folder / "trace").mkdir(exist_ok=True)
        (parts / f"rank-{rank:05}.jsonl").rename(folder / "trace" / f"rank-{rank:05}.jsonl")
    return folder / "trace"


def test_ranks_that_end_at_other_steps_are_reported_even_if_closed(tmp_path: Path) -> None:
    folder = _with_ends(tmp_path / "three", 5, 3, 5)

    assert compare(folder).notes == ("ranks 0, 2 ended after step 5", "rank 1 ended after step 3")
    assert compare(folder, folder).notes[:2] == ("A: ranks 0, 2 ended after step 5", "A: rank 1 ended after step 3")
    notes = compare(_with_ends(tmp_path / "five", 1, 2, 3, 4, 5)).notes
    assert notes[2:] == ("rank 2 ended after step 3", "2 more ways in which ranks ended")


def test_a_rank_that_was_cut_lacks_the_operations_of_its_later_steps(tmp_path: Path) -> None:
    folder = write_trace(tmp_path, operations=lambda step, _: [operation("mul", ["a" * 16], ["b" * 16])] * (step > 1))
    end_after(folder / RANKS[1], 2)

    assert "operations of steps 3-5 are missing on rank 1" in compare(folder).notes
