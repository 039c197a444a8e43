"""Differences planted anywhere, many ranks, and what scenes.txt cannot hold. The texts are in scenes.txt."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.command import Place, compare
from tests.helpers.recorded import PHASES
from tests.helpers.traces import NAMES, START, call_facts, environment, write_trace

WORD = "ab" * 8
_PLACES = [(phase, name) for phase in PHASES for name in NAMES[phase]]


@given(st.data(), st.integers(1, 4), st.integers(1, 8), st.sampled_from(_PLACES[1:]))
def test_one_difference_anywhere_is_found_there_from_both_sides_and_between_ranks(
    data: st.DataObject, world_size: int, steps: int, place: tuple[str, str]
) -> None:
    phase, name = place
    step = data.draw(st.integers(0 if phase in START else 1, steps))
    rank = data.draw(st.integers(0, world_size - 1))
    value = ("7", None) if phase == "settings" else (WORD, 0.5)
    shape = {"world_size": world_size, "steps": steps}
    with TemporaryDirectory() as folder:
        a = write_trace(Path(folder) / "a", **shape)
        b = write_trace(Path(folder) / "b", **shape, planted={(rank, step, phase, name): value})
        answers = [] if phase == "settings" else [compare(a, b), compare(b, a)]
        if world_size > 2 and phase != "local_gradients":
            answers.append(compare(b))

    for found in answers:
        assert found.first is not None
        assert (found.first.step, found.first.phase, found.first.name) == (step, phase, name)
        assert (found.verdict, found.first.ranks) == ("different", (rank,))
        assert found.places == (Place(step, phase, (rank,), 1, len(NAMES[phase])),)


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3), st.floats(0, 1e6), st.text(max_size=8))
def test_equal_values_are_the_same_whatever_is_around_them(facts: dict[str, str], seconds: float, started: str) -> None:
    with TemporaryDirectory() as folder:
        a = write_trace(Path(folder) / "a")
        b = write_trace(
            Path(folder) / "b",
            environments=lambda rank, size: environment(rank, size, facts=facts, started=started),
            calls=lambda step, rank: call_facts(step, rank, seconds_waited=seconds, local_norm=seconds),
        )
        assert [compare(a, b).verdict, compare(b, a).verdict, compare(b, b).verdict] == ["same"] * 3


@contextmanager
def _few_open_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_ranks_are_compared_with_two_files_open_at_a_time(tmp_path: Path) -> None:
    a = write_trace(tmp_path / "a", world_size=100, steps=2)
    b = write_trace(tmp_path / "b", world_size=100, steps=2, planted={(77, 2, "buffers", "buffer 'mean'"): (WORD, 1.0)})
    with _few_open_files():
        assert [compare(a, b).first.ranks, compare(b).first.ranks] == [(77,), (77,)]


def test_the_same_folder_twice_is_a_note_and_buffers_can_be_left_out_afterwards(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "a", planted={(1, 3, "buffers", "buffer 'mean'"): (WORD, 1.0)})

    assert compare(folder, folder).notes == ("A and B are the same folder",)
    assert [compare(folder).verdict, compare(folder, local_buffers=("me*",)).verdict] == ["different", "same"]
