"""Files of a rank: read as written; after cuts, damage and repetition; with lines that no recorder writes."""

import gzip
import re
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp import TraceError
from legacy_ddp.debug._operations.operation import Operation, Value
from legacy_ddp.debug._trace.read import RankTrace
from legacy_ddp.debug._trace.records import Names, Section, Values, Writer, encode
from tests.helpers.operations import operation
from tests.helpers.trace_scenarios import Scenario, contents_of, held, scenarios, sections, trace_of, write_scenario
from tests.helpers.traces import environment, lines_of, sealed, section, write_trace


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small trace of one rank."""
    folder = write_trace(tmp_path_factory.mktemp("whole"), world_size=1, steps=2)
    return (folder / "rank-00000.jsonl").read_bytes()


def _words(sections: list[Section]) -> list[int | None]:
    """The word of each, all held in one phase, at steps one after the other."""
    with TemporaryDirectory() as folder:
        writer = Writer(Path(folder), environment(0, 1))
        for step, given_section in enumerate(sections):
            writer.section(step, given_section)
        writer.close(len(sections), "closed")
        with RankTrace(writer.path) as trace:
            return [trace.digest(step, "buffers") for step in range(len(sections))]


@given(sections("buffers"), sections("buffers"), sections("buffers"))
def test_words_of_sections_are_equal_if_their_names_and_words_are(a: Section, b: Section, other: Section) -> None:
    without_norms = replace(a, values=Values(a.values.words, (None,) * len(a.values.words)))
    first, second, third = _words([a, b, without_norms])
    with_others = _words([other, b, a])  # their names have other numbers

    assert (first == second) == ((a.names, a.values.words) == (b.names, b.values.words))
    assert with_others[1:] == [second, first]
    assert third == first


def test_a_word_that_moves_to_the_next_name_is_seen() -> None:
    names = Names("buffers", ("a", "b"), ("", ""))
    held_words = [("x", None), (None, "x"), ("x", "x"), ('x","x', None), ("null", None), (None, None)]
    found = _words([Section(names, Values(words, (None, None))) for words in held_words])

    assert len(set(found)) == len(held_words)


@given(scenarios(), st.data())
def test_a_file_reads_as_written_and_a_cut_file_keeps_its_whole_lines(scenario: Scenario, data: st.DataObject) -> None:
    written, sizes = write_scenario(scenario)
    with trace_of(written) as trace:
        assert contents_of(trace) == held(scenario.events)
        assert list(trace.steps) == sorted({step for step, _ in scenario.events})
        assert (trace.damage, trace.torn, trace.end) == ("", False, scenario.end or "")
    cut = data.draw(st.integers(0, len(written) - 1))
    if cut < sizes[0]:
        with pytest.raises(TraceError), trace_of(written[:cut]):
            pass
        return
    with trace_of(written[:cut]) as trace:
        left = [event for event, size in zip(scenario.events, sizes[1:], strict=False) if size <= cut]
        assert contents_of(trace) == held(left)
        assert trace.environment == scenario.environment
        assert (trace.damage, trace.end, trace.torn) == ("", "", not written[:cut].endswith(b"\n"))


@st.composite
def _edits(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes after an accident at some place."""
    start = draw(st.integers(0, len(data)))
    stop = min(len(data), start + draw(st.integers(1, 8) | st.integers(1, len(data))))
    junk = draw(st.binary(min_size=1, max_size=12) | st.sampled_from([b"\n", b"\0" * 5000, b"{}\n", b"x" * 10**6]))
    part = data[start:stop]
    instead = {
        "flip": bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in part[:1]) + part[1:],
        "delete": b"",
        "insert": junk + part,
        "overwrite": junk[: len(part)],
        "repeat": part + part,
        "zeros": b"\0" * len(part),
    }
    return data[:start] + draw(st.sampled_from(sorted(instead)).map(instead.__getitem__)) + data[stop:]


@st.composite
def _moves(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with lines after the first that moved, are missing or come twice."""
    first, *lines = lines_of(data)
    places = st.integers(0, len(lines))
    at, to = draw(places), draw(places)
    others = lines if draw(st.booleans()) else lines[:at] + lines[at + 1 :]
    return b"".join([first, *others[:to], *lines[at : at + draw(st.integers(0, 1))], *others[to:]])


@given(scenarios(), st.data())
def test_damaged_bytes_and_lines_that_moved_are_found_in_any_trace(scenario: Scenario, data: st.DataObject) -> None:
    written, _ = write_scenario(scenario)
    _assert_honest(written, data.draw(_edits(written) | _moves(written)))


def _assert_honest(written: bytes, found: bytes) -> None:
    """Whatever can be read of ``found`` is what was written, up to the first line that differs; that one is named."""
    lines, after = lines_of(written), lines_of(found)
    pairs = zip([*lines, None], [*after, None], strict=False)
    first = next((number for number, (one, other) in enumerate(pairs, start=1) if one != other), None)
    if first == 1:
        with pytest.raises(TraceError), trace_of(found):
            pass
        return
    with trace_of(written) as trace:
        everything = contents_of(trace)
        digests = {key: trace.digest(*key) for key in everything if key[1] != "call"}
    with trace_of(found) as trace:
        left = contents_of(trace)
        assert left.items() <= everything.items()
        assert all(trace.digest(*key) == digest for key, digest in digests.items() if key in left)
        if first is None or first > len(after):  # the same, or the rest is gone line by line
            assert (trace.damage, trace.torn) == ("", False)
        elif after[first - 1].endswith(b"\n"):
            assert trace.damage.startswith(f"line {first}: ")
            assert not trace.torn
        else:
            assert (trace.damage, trace.torn) == ("", True)


def test_a_line_that_follows_the_end_is_damage(whole: bytes) -> None:
    number = len(lines_of(whole)) + 1
    with trace_of(whole + sealed(b'{"line":"end","step":2,"reason":"closed"', number)) as trace:
        assert trace.damage == f"line {number}: it follows the end of the trace"


def test_a_second_trace_in_the_same_file_is_damage(whole: bytes) -> None:
    with trace_of(whole + whole) as trace:
        assert trace.damage == f"line {len(lines_of(whole)) + 1}: it was written as line 1"
        assert list(trace.steps) == [0, 1, 2]


@pytest.mark.parametrize("step", [0, 2])  # the first step, and another line of the last step
def test_a_step_that_comes_again_is_damage(whole: bytes, step: int) -> None:
    lines = lines_of(whole)[:-1]
    again = next(line for line in lines if line.startswith(b'{"line":"values","step":%d,' % step))
    number = len(lines) + 1
    with trace_of(b"".join([*lines, sealed(again.rpartition(b',"at":')[0], number)])) as trace:
        assert trace.damage == f"line {number}: step {step} comes again; are these two runs in one file?"


@pytest.mark.parametrize(
    "made, what",
    [
        (lambda data: data[:0], "is empty, expected a trace; was the run killed before its first step"),
        (gzip.compress, "is no trace: its first line is not what a recorder writes"),
        (lambda data: b"\xef\xbb\xbf" + data, "is no trace"),
        (lambda data: data.replace(b"\n", b"\r\n"), "line 1 is damaged: its checksum is not that of its bytes"),
        (lambda data: data.replace(b"2026", b"2025", 1), "line 1 is damaged: its checksum is not that of its bytes"),
        (lambda data: data[:100], "line 1 is damaged: it is torn"),
    ],
)
def test_what_is_no_trace_is_refused(whole: bytes, made: Callable[[bytes], bytes], what: str) -> None:
    with pytest.raises(TraceError, match=f"rank-00000.jsonl:? {what}"), trace_of(made(whole)):
        pass


@pytest.mark.parametrize(
    "changes, what",
    [
        (
            {"version": 5},
            " is of another version: got 5, expected 1, 2, 3 or 4; read it with the legacy_ddp that wrote it",
        ),
        ({"format": "other"}, " is no trace: got a first line of another kind, expected one of format"),
        ({"facts": None}, ": line 1 is damaged: it has contents that no recorder writes"),
    ],
)
def test_a_first_line_of_another_kind_is_refused(changes: dict[str, Any], what: str) -> None:
    members = {**environment(0, 1).to_json(), **changes}
    line = encode({name: value for name, value in members.items() if value is not None}, 1)

    with pytest.raises(TraceError, match=f"rank-00000.jsonl{what}"), trace_of(line):
        pass


def test_no_line_says_nan_which_json_lacks() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"a": float("nan")}, 1)


LINE = b'{"line":"values","step":1,"phase":"buffers","names":0,"words":["a"],"norms":[null],"nonfinite":[]'


@pytest.mark.parametrize(
    "body, what",
    [
        (LINE.replace(b'"names":0', b'"names":1'), "line 3: it has contents that no recorder writes"),
        (LINE.replace(b"buffers", b"settings"), "line 3: it has contents that no recorder writes"),
        (b'{"line":"lunch"', "line 3: it is of a kind that no recorder writes"),
        (b"[1", r"line 3: it has contents that no recorder writes \(JSONDecodeError: "),
        (b'{"a":' + b"[" * 200_000, r"line 3: it has contents that no recorder writes \(RecursionError: "),
        (b'{"line":"names","number":1,"phase":"x","names":[],"kinds":[]', "line 3: it has contents that no recorder"),
        (b'{"line":"names","number":1,"phase":"buffers"', "line 3: it has contents that no recorder writes"),
        (b'{"line":"log","step":1,"values":[1]', "line 3: it has contents that no recorder writes"),
        (b'{"line":"end","step":1', r"line 3: it has contents that no recorder writes \(KeyError: 'reason'\)"),
        (LINE.replace(b',"norms":[null]', b""), "a line of step 1 cannot be read: it has contents that no recorder"),
        (LINE.replace(b'["a"]', b"null"), "a line of step 1 cannot be read: it has contents that no recorder"),
        (b'{"line":"call","step":1,"x":0', "a line of step 1 cannot be read: it has contents that no recorder"),
    ],
)
def test_contents_that_no_recorder_writes_are_reported_whatever_their_checksum(body: bytes, what: str) -> None:
    before = [environment(0, 1).to_json(), {"line": "names", "number": 0, **vars(Names("buffers", ("x",), ("",)))}]
    data = b"".join(encode(members, at) for at, members in enumerate(before, start=1)) + sealed(body, 3)

    try:
        with trace_of(data) as trace:
            contents_of(trace)
            found = trace.damage
    except TraceError as error:
        found = str(error)

    assert re.search(what, found)


def test_a_huge_file_of_one_line_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    with path.open("wb") as file:
        file.write(b"junk")
        file.truncate(200 * 2**20)
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="is no trace"):
            RankTrace(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 2**20


def test_a_line_that_changes_after_it_was_scanned_is_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path, environment(0, 1))
    writer.section(1, section(0, 1, "buffers", ("buffer 'mean'",), "float32 (2,)", {}))
    writer.close(1, "closed")
    path = writer.path
    with RankTrace(path) as trace:
        assert trace.phases == ("buffers",)
        assert trace.section(1, "buffers") is not None
        path.write_bytes(path.read_bytes().replace(b'"step":1,', b'"step":2,'))
        trace._file.seek(0)
        with pytest.raises(TraceError, match=f"{path}: a line of step 1 cannot be read: its checksum is not"):
            trace.section(1, "buffers")


def test_a_scan_up_to_a_step_ends_with_the_next_one(tmp_path: Path) -> None:
    with RankTrace(write_trace(tmp_path, steps=50) / "rank-00000.jsonl", until=3) as trace:
        assert list(trace.steps) == [0, 1, 2, 3, 4]
        assert trace.section(3, "buffers") is not None
        assert (trace.damage, trace.end) == ("", "")


DIGESTS = st.integers(0, 2**64 - 1).map("{:016x}".format)
VALUES = st.builds(Value, st.sampled_from(["float32 (8, 10)", "int64 ()"]), st.text(max_size=9), st.none() | DIGESTS)
NAMED_INPUTS = st.lists(st.tuples(st.text(max_size=9), VALUES), max_size=3)
OPERATIONS = st.builds(
    lambda named, **given: Operation(
        **given, parameters=tuple([name for name, _ in named]), inputs=tuple([value for _, value in named])
    ),
    named=NAMED_INPUTS,
    name=st.sampled_from(["aten::mm", "aten::add.Tensor", "own::op"]),
    stage=st.sampled_from(["forward", "backward"]),
    micro_batch=st.integers(0, 3),
    module=st.text(max_size=9),
    outputs=st.lists(VALUES, max_size=3).map(tuple),
    settings=st.text(max_size=9),
    generator=st.just("") | DIGESTS,
)


ONE = operation("mm", ["0" * 16] * 2, ["0" * 16])


def write(folder: Path, steps: dict[int, Sequence[Operation]]) -> Path:
    writer = Writer(folder, environment(0, 1))
    for step, operations in steps.items():
        writer.operations(step, operations)
    writer.close(max(steps), "closed")
    return writer.path


@given(steps=st.dictionaries(st.integers(1, 9), st.lists(OPERATIONS, min_size=1, max_size=6), min_size=1))
def test_operations_are_read_as_written(steps: dict[int, list[Operation]], tmp_path_factory: Any) -> None:
    path = write(tmp_path_factory.mktemp("trace"), dict(sorted(steps.items())))

    with RankTrace(path) as trace:
        assert trace.damage == ""
        assert {step: list(trace.operations(step)) for step in trace.steps} == steps
        assert trace.operation_counts == {step: len(found) for step, found in steps.items()}
        assert trace.operations(10) == ()


@pytest.mark.parametrize("numbers, digests", [([0], "0" * 16), ([7], "0" * 48)])
def test_operations_that_no_recorder_writes_are_an_error_of_their_step(
    numbers: list[int], digests: str, tmp_path: Path
) -> None:
    path = write(tmp_path, {1: [ONE]})
    kept = path.read_bytes().partition(b'{"line":"operations"')[0]
    members = {"line": "operations", "step": 1, "micro_batch": 1, "numbers": numbers, "digests": digests}
    path.write_bytes(kept + encode(members, kept.count(b"\n") + 1))

    with RankTrace(path) as trace, pytest.raises(TraceError, match="a line of step 1 cannot be read: it has contents"):
        trace.operations(1)
