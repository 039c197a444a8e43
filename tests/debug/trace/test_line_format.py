"""Lines of a trace: round trips, and the refusal of damaged or foreign lines."""

import json
import re
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._trace.read import RankTrace
from legacy_ddp.debug._trace.records import (
    DamagedLineError,
    Names,
    check_version,
    encode,
    parse,
    split_checked,
)
from tests.helpers.trace_scenarios import (
    JSON,
    Scenario,
    contents_of,
    held,
    scenarios,
    temporary_folder,
    texts,
    trace_of,
    write_scenario,
)
from tests.helpers.traces import environment, sealed

MEMBERS = st.dictionaries(texts.filter(lambda name: name not in ("at", "crc32")), JSON, max_size=4)
NUMBERS = st.integers(1, 10**18 - 1)


# --- a line ----------------------------------------------------------------------------------------------------------


@given(MEMBERS, NUMBERS)
def test_a_line_is_json_and_ends_with_its_number_and_a_checksum_of_all_before(members: dict[str, Any], at: int) -> None:
    line = encode({"line": "x", **members}, at)
    checked, _, checksum = line.rpartition(b',"crc32":')

    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert json.loads(line) == {"line": "x", **members, "at": at, "crc32": f"{zlib.crc32(checked):08x}"}
    assert checksum == f'"{zlib.crc32(checked):08x}"}}\n'.encode()
    assert split_checked(line) == (checked.removesuffix(f',"at":{at}'.encode()), at)


@given(MEMBERS, st.data())
def test_a_line_with_any_changed_bit_is_damaged(members: dict[str, Any], data: st.DataObject) -> None:
    line = bytearray(encode({"line": "x", **members}, 7))
    position, bit = data.draw(st.integers(0, len(line) - 1)), data.draw(st.integers(0, 7))
    line[position] ^= 1 << bit

    with pytest.raises(DamagedLineError):
        parse(bytes(line), dict)


@given(MEMBERS, st.data())
def test_a_line_that_is_cut_is_torn(members: dict[str, Any], data: st.DataObject) -> None:
    line = encode({"line": "x", **members}, 7)

    with pytest.raises(DamagedLineError) as caught:
        split_checked(line[: data.draw(st.integers(0, len(line) - 1))])

    assert str(caught.value) == "it is torn"


@pytest.mark.parametrize("body", [b"", b"[1", b'{"a":', b'{"a":NULL', b'{"a":"\xff"', b"\0", b'{"a":' + b"9" * 5000])
def test_what_is_no_json_is_damaged_whatever_its_checksum(body: bytes) -> None:
    with pytest.raises(DamagedLineError, match="it has contents that no recorder writes"):
        parse(sealed(body), dict)


def test_a_line_nested_too_deep_to_parse_is_damaged() -> None:
    with pytest.raises(DamagedLineError, match="it has contents that no recorder writes"):
        parse(sealed(b'{"a":' + b"[" * 200_000), dict)


def test_no_line_says_nan_which_json_lacks() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"a": float("nan")}, 1)


# --- what a line means -----------------------------------------------------------------------------------------------


@given(scenarios())
def test_a_rank_reads_as_it_was_written(scenario: Scenario) -> None:
    with temporary_folder() as folder:
        path, sizes = write_scenario(scenario, folder)
        with RankTrace(path) as trace:
            assert trace.environment == scenario.environment
            assert contents_of(trace) == held(scenario.events)
            assert list(trace.steps) == sorted({step for step, _ in scenario.events})
            assert (trace.damage, trace.torn, trace.end) == ("", False, scenario.end or "")
            assert trace.size_bytes == sizes[-1]


def test_another_version_is_reported() -> None:
    members = {**environment(0, 1).to_json(), "version": 5}

    with pytest.raises(
        TraceError, match="is of another version: got 5, expected 1, 2, 3 or 4; read it with the legacy_ddp"
    ):
        check_version(members)


@pytest.mark.parametrize("changes", [{"format": "other"}, {"line": "values"}])
def test_another_first_line_is_no_trace(changes: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match="is no trace: got a first line of another kind, expected one of format"):
        check_version({**environment(0, 1).to_json(), **changes})


VALUES = b'{"line":"values","step":1,"phase":"buffers","names":0,"words":["a"],"norms":[null],"nonfinite":[]'


@pytest.mark.parametrize(
    "body, what",
    [
        (VALUES.replace(b'"names":0', b'"names":1'), "line 3: it has contents that no recorder writes"),
        (VALUES.replace(b"buffers", b"settings"), "line 3: it has contents that no recorder writes"),
        (VALUES.replace(b'"step":1', b'"step":-1'), "line 3: it is of a kind that no recorder writes"),
        (b'{"line":"lunch"', "line 3: it is of a kind that no recorder writes"),
        (b"[1", r"line 3: it has contents that no recorder writes \(JSONDecodeError: "),
        (
            b'{"line":"names","number":1,"phase":"lunch","names":[],"kinds":[]',
            "line 3: it has contents that no recorder",
        ),
        (b'{"line":"names","number":1,"phase":"buffers"', "line 3: it has contents that no recorder writes"),
        (b'{"line":"log","step":1,"values":[1]', "line 3: it has contents that no recorder writes"),
        (b'{"line":"end","step":1', r"line 3: it has contents that no recorder writes \(KeyError: 'reason'\)"),
        (VALUES.replace(b',"norms":[null]', b""), "a line of step 1 cannot be read: it has contents that no recorder"),
        (VALUES.replace(b'["a"]', b"null"), "a line of step 1 cannot be read: it has contents that no recorder"),
        (b'{"line":"call","step":1,"x":0', "a line of step 1 cannot be read: it has contents that no recorder"),
    ],
)
def test_contents_that_no_recorder_writes_are_reported_whatever_their_checksum(body: bytes, what: str) -> None:
    before = [environment(0, 1).to_json(), Names("buffers", ("x",), ("",)).to_json(0)]
    data = b"".join(encode(members, at) for at, members in enumerate(before, start=1)) + sealed(body, 3)

    try:
        with trace_of(data) as trace:
            contents_of(trace)
            found = trace.damage
    except TraceError as error:
        found = str(error)

    assert re.search(what, found)


def test_a_first_line_that_lacks_a_member_is_damaged() -> None:
    members = environment(0, 1).to_json()
    del members["facts"]

    with (
        pytest.raises(TraceError, match="line 1 is damaged: it has contents that no recorder writes"),
        trace_of(encode(members, 1)),
    ):
        pass
