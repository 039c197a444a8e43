"""Names, kinds and operations of any form: entries that are equal, and text that fits a page and can be printed."""

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.command import command, compare
from tests.helpers.operations import operation, recordable
from tests.helpers.traces import NAMES, call_facts, environment, write_trace

WORD = "ab" * 8
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
def test_buffers_alone_are_left_out_by_their_raw_name_or_a_pattern(
    tmp_path: Path, name: str, pattern: str, kept: bool
) -> None:
    planted = {(1, 3, "buffers", name): (WORD, 1.0), (1, 4, "parameters", "parameter 'a'"): (WORD, 1.0)}
    folder = write_trace(tmp_path / "trace", names={**NAMES, "buffers": (name,)}, planted=planted)

    assert compare(folder, local_buffers=(pattern,)).first.phase == ("buffers" if kept else "parameters")
