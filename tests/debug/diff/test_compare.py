"""Differences planted anywhere, many ranks, and names of any form: what scenes.txt cannot hold."""

import json
import resource
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.command import command, compare
from tests.helpers.operations import operation, recordable
from tests.helpers.processes import limited
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
        [differing] = found.places
        assert (differing.step, differing.phase, differing.ranks, differing.steps) == (step, phase, (rank,), 1)
        assert (differing.differing, differing.total) == (1, len(NAMES[phase]))


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


def test_many_ranks_are_compared_with_two_files_open_at_a_time(tmp_path: Path) -> None:
    a = write_trace(tmp_path / "a", world_size=100, steps=2)
    b = write_trace(tmp_path / "b", world_size=100, steps=2, planted={(77, 2, "buffers", "buffer 'mean'"): (WORD, 1.0)})
    with limited(resource.RLIMIT_NOFILE, 64):
        assert [compare(a, b).first.ranks, compare(b).first.ranks] == [(77,), (77,)]


def test_the_same_folder_twice_is_a_note(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "a")

    assert compare(folder, folder).notes == ("A and B are the same folder",)


TEXTS = st.text(min_size=1, max_size=120)


@given(st.data())
def test_the_text_keeps_to_the_page_and_can_be_printed_whatever_the_names(data: st.DataObject) -> None:
    def text() -> str:
        return data.draw(TEXTS)

    def written(folder: Path, planted: dict[Any, Any]) -> Path:
        logged, held = {text(): text()}, [operation("mul", ["x"], [text()], module=text(), settings=text())]
        return write_trace(
            folder,
            names=names,
            kind=kind,
            steps=2,
            planted=planted,
            environments=partial(environment, facts={text(): text()}),
            calls=partial(call_facts, metrics={text(): data.draw(st.floats())}, generators=text()),
            logs=lambda *_: logged,
            operations=lambda *_: recordable(held),
        )

    names = {phase: tuple(data.draw(st.lists(TEXTS, min_size=1, max_size=4, unique=True))) for phase in NAMES}
    phase, kind = data.draw(st.sampled_from([*NAMES])), text()
    with TemporaryDirectory() as folder:
        a = written(Path(folder) / "a", {})
        b = written(Path(folder) / "b", {(0, 2, phase, name): (text(), 1e300, 7) for name in names[phase]})
        for name, *folders in (("diff", a, b), ("diff", b), ("show", b)):
            lines = command(name, *folders).stdout.split("\n")
            assert len(lines) > 3
            assert all(len(line) <= 80 and line.isprintable() for line in lines)
            json.loads(command(name, "--json", *folders).stdout)


@given(*[st.lists(st.sampled_from("abc"), min_size=1, max_size=25)] * 2)
def test_rows_of_operations_stand_in_order_and_never_twice(a: list[str], b: list[str]) -> None:
    def written(folder: Path, names: list[str]) -> Path:
        held = recordable([operation(name, [], [name]) for name in names])
        return write_trace(folder, world_size=1, steps=1, operations=lambda *_: held)

    with TemporaryDirectory() as folder:
        found = compare(written(Path(folder) / "a", a), written(Path(folder) / "b", b)).operations
    if found is None:
        return

    for side in (0, 1):
        numbers = [row.numbers[side] for row in found.rows if row.numbers[side] is not None]
        assert numbers == sorted(set(numbers))
    assert any(row.is_first for row in found.rows)


@pytest.mark.parametrize(
    "name, pattern, kept",
    [
        ("buffer 'bn.running_mean'", "*.running_*", False),
        ("buffer 'bn.running_mean'", "bn.running_mean", False),
        ("buffer 'bn.running_mean'", "running_mean", True),
        ('buffer "it\'s"', "it's", False),
        ("buffer 'A'", "a", True),
        ("not quoted", "not*", False),
        ("buffer 'parameter'", "*", False),
    ],
)
def test_buffers_alone_are_left_out_by_raw_name_or_pattern(tmp_path: Path, name: str, pattern: str, kept: bool) -> None:
    planted = {(1, 3, "buffers", name): (WORD, 1.0), (1, 4, "parameters", "parameter 'a'"): (WORD, 1.0)}
    folder = write_trace(tmp_path / "trace", names={**NAMES, "buffers": (name,)}, planted=planted)

    assert compare(folder, local_buffers=(pattern,)).first.phase == ("buffers" if kept else "parameters")
