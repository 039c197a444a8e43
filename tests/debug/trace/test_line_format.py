"""Lines of a trace: round trips, and the refusal of damaged or foreign lines."""

import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._trace.read import RankTrace
from legacy_ddp.debug._trace.records import (
    PHASES,
    CallFacts,
    DamagedLineError,
    Environment,
    Names,
    check_version,
    decode,
    encode,
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
from tests.helpers.traces import call_facts, environment, lines_of, sealed, write_trace

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
        decode(bytes(line))


@given(MEMBERS, st.data())
def test_a_line_that_is_cut_is_torn(members: dict[str, Any], data: st.DataObject) -> None:
    line = encode({"line": "x", **members}, 7)

    with pytest.raises(DamagedLineError) as caught:
        split_checked(line[: data.draw(st.integers(0, len(line) - 1))])

    assert str(caught.value) == "it is torn"


@pytest.mark.parametrize("body", [b"", b"[1", b'{"a":', b'{"a":NULL', b'{"a":"\xff"', b"\0", b'{"a":' + b"9" * 5000])
def test_what_is_no_json_is_damaged_whatever_its_checksum(body: bytes) -> None:
    with pytest.raises(DamagedLineError, match="it is no JSON"):
        decode(sealed(body))


def test_a_line_nested_too_deep_to_parse_is_damaged() -> None:
    with pytest.raises(DamagedLineError, match="it is no JSON"):
        decode(sealed(b'{"a":' + b"[" * 200_000))


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


# --- what no recorder writes -----------------------------------------------------------------------------------------

WRONG: list[tuple[type[Any], str, Any]] = [
    (Environment, "rank", -1),
    (Environment, "rank", 1.0),
    (Environment, "rank", True),
    (Environment, "world_size", 2**20 + 1),
    (Environment, "world_size", 10**30),
    (Environment, "started", 3),
    (Environment, "facts", []),
    (Environment, "facts", {"threads": 1}),
    (Environment, "parameters", "ab"),
    (Environment, "parameters", [1]),
    (Environment, "local_buffers", None),
    (CallFacts, "call", None),
    (CallFacts, "sample_size", "3"),
    (CallFacts, "took_part", 1),
    (CallFacts, "local_norm", "1"),
    (CallFacts, "local_norm", False),
    (CallFacts, "finite", 0),
    (CallFacts, "seconds", {"plan": None}),
    (CallFacts, "seconds_waited", None),
    (CallFacts, "seconds_waited", 10**400),
    (CallFacts, "inputs", ["ab"]),
    (CallFacts, "inputs", [["a", "b", "c"]]),
    (CallFacts, "inputs", [["a", 1]]),
    (CallFacts, "inputs", [{"a": 1, "b": 2}]),
]


@pytest.mark.parametrize("record, member, value", WRONG)
def test_a_member_of_another_kind_is_named(record: Any, member: str, value: Any) -> None:
    members = {**_right(record), member: value}

    with pytest.raises(
        TraceError, match=f"^has contents that no recorder writes: key '{member}' is missing or of the wrong"
    ):
        record.from_json(members)


@pytest.mark.parametrize("record", [Environment, CallFacts])
def test_a_missing_member_is_named(record: Any) -> None:
    right = _right(record)
    record.from_json(right)
    for member in right.keys() - {"line", "format", "version", "step", "metrics", "parts"}:  # version 1 has neither
        with pytest.raises(TraceError, match=f"key '{member}' is missing"):
            record.from_json({name: value for name, value in right.items() if name != member})


def _right(record: type[Any]) -> dict[str, Any]:
    members = environment(0, 2).to_json() if record is Environment else call_facts(1, 0).to_json(1)
    found: dict[str, Any] = json.loads(json.dumps(members))
    return found


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small trace of one rank."""
    folder = write_trace(tmp_path_factory.mktemp("whole"), world_size=1, steps=2)
    return (folder / "rank-00000.jsonl").read_bytes()


def _tried(data: bytes) -> str:
    """What was wrong with it, having asked for all that it says."""
    try:
        with trace_of(data) as trace:
            contents_of(trace)
            return trace.damage
    except TraceError as error:
        return str(error)


@given(st.data())
def test_sealed_lines_of_any_content_raise_nothing_but_trace_errors(whole: bytes, data: st.DataObject) -> None:
    lines = lines_of(whole)
    number = data.draw(st.integers(0, len(lines) - 1))
    members = json.loads(lines[number])
    del members["at"], members["crc32"]
    for name in data.draw(st.lists(st.sampled_from([*members, "more"]), max_size=2)):
        members[name] = data.draw(JSON | st.sampled_from([*PHASES, "end", "names", 10**30, -1, 1, [], {}]))
    if data.draw(st.booleans()):
        del members[data.draw(st.sampled_from(sorted(members)))]
    lines[number] = sealed(json.dumps(members, separators=(",", ":")).encode()[:-1], number + 1)
    _tried(b"".join(lines))


@given(st.integers(0, 30), st.sampled_from([b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"9" * 5000, b"[" * 20_000]))
def test_sealed_lines_with_any_number_raise_nothing_but_trace_errors(whole: bytes, place: int, text: bytes) -> None:
    lines = lines_of(whole)
    number = place % len(lines)
    body = lines[number].rpartition(b',"at":')[0]
    colons = [index for index, byte in enumerate(body) if byte == ord(":")]
    for colon in colons:
        lines[number] = sealed(body[: colon + 1] + text + body[colon + 2 :], number + 1)
        _tried(b"".join(lines))
        lines[number] = sealed(body[: colon + 1] + text, number + 1)
        _tried(b"".join(lines))


VALUES = b'{"line":"values","step":1,"phase":"buffers","names":0,"words":["a"],"norms":[null],"nonfinite":[]'
CALL = json.dumps(call_facts(1, 0).to_json(1), separators=(",", ":")).encode()[:-1]


@pytest.mark.parametrize(
    "body, what",
    [
        (VALUES.replace(b'"names":0', b'"names":1'), "line 3: it has contents that no recorder writes"),
        (VALUES.replace(b"buffers", b"settings"), "line 3: it has contents that no recorder writes"),
        (VALUES.replace(b"buffers", b"lunch"), "line 3: it has contents that no recorder writes"),
        (VALUES.replace(b',"norms":[null]', b""), "line 3: it has contents that no recorder writes"),
        (VALUES.replace(b'"step":1', b'"step":-1'), "line 3: it is of a kind that no recorder writes"),
        (VALUES.replace(b'"step":1', b'"step":' + b"9" * 30), "line 3: it is of a kind that no recorder writes"),
        (b'{"line":"lunch"', "line 3: it is of a kind that no recorder writes"),
        (b"[1", "line 3: it is no JSON"),
        (
            b'{"line":"names","number":3,"phase":"buffers","names":[],"kinds":[]',
            "line 3: its number is not the next one",
        ),
        (
            b'{"line":"names","number":1,"phase":"lunch","names":[],"kinds":[]',
            "line 3: has contents that no recorder writes",
        ),
        *(
            (b'{"line":"names",' + text, "line 3: has contents that no recorder writes")
            for text in (
                b'"number":1,"phase":[],"names":[],"kinds":[]',
                b'"number":1,"phase":"buffers","names":["a"],"kinds":[]',
                b'"number":"1","phase":"buffers","names":[],"kinds":[]',
            )
        ),
        (b'{"line":"end","step":1', "line 3: has contents that no recorder writes: key 'reason'"),
        (VALUES.replace(b'["a"]', b'["a","b"]'), "'words' has 2 entries, expected 1"),
        (VALUES.replace(b'["a"]', b'"a"'), "'words' is missing or of the wrong type"),
        (VALUES.replace(b'["a"]', b"[1]"), "'words' is missing or of the wrong type"),
        (VALUES.replace(b"[null]", b"[null,null]"), "'norms' has 2 entries, expected 1"),
        *(
            (VALUES.replace(b'"nonfinite":[]', b'"nonfinite":' + text), "'nonfinite' is missing or of the wrong type")
            for text in (b"[[-1,1]]", b"[[0]]", b'{"0":1}', b"null")
        ),
        (VALUES.replace(b"[null]", b"[" + b"9" * 400 + b"]"), "'norms' is missing or of the wrong type"),
        (VALUES.replace(b"[null]", b"[1e999]"), "'norms' is missing or of the wrong type"),
        (VALUES.replace(b"[null]", b"[-Infinity]"), "'norms' is missing or of the wrong type"),
        (VALUES.replace(b"[null]", b"[NaN]"), "'norms' is missing or of the wrong type"),
        (
            VALUES.replace(b'"nonfinite":[]', b'"nonfinite":[[0,9223372036854775808]]'),
            "'nonfinite' is missing or of the wrong type",
        ),
        (VALUES.replace(b"[null]", b"[" * 50_000), "a line of step 1 cannot be read: it is no JSON"),
        (VALUES.replace(b'"nonfinite":[]', b'"nonfinite":[[1,1]]'), "'nonfinite' is missing or of the wrong type"),
        (VALUES + b',"names":"x"', "key 'names' is not a number declared for that phase"),
        (VALUES + b',"names":[]', "key 'names' is not a number declared for that phase"),
        (VALUES + b',"names":7', "key 'names' is not a number declared for that phase"),
        (VALUES + b',"names":true', "key 'names' is not a number declared for that phase"),
        (CALL.replace(b'"call":1', b'"call":-1'), "key 'call' is missing or of the wrong type"),
        (
            CALL.replace(b'"sample_size":64', b'"sample_size":1' + b"0" * 400),
            "'sample_size' is missing or of the wrong",
        ),
        (b'{"line":"call","step":1,"x":0', "key 'call' is missing or of the wrong type"),
    ],
)
def test_a_sealed_line_that_no_recorder_writes_is_reported(body: bytes, what: str) -> None:
    before = [environment(0, 1).to_json(), Names("buffers", ("x",), ("",)).to_json(0)]
    found = _tried(b"".join(encode(members, at) for at, members in enumerate(before, start=1)) + sealed(body, 3))

    assert what in found
    assert found.startswith("line 3") or "/rank-00000.jsonl: a line " in found


@pytest.mark.parametrize("words", [b'"a"', b"[]", b'["a","b"]', b'["a"', b"[" * 20_000, b'["a"],"more":[1]'])
def test_words_that_no_recorder_writes_are_refused_without_the_rest_of_their_line(words: bytes) -> None:
    before = [environment(0, 1).to_json(), Names("buffers", ("x",), ("",)).to_json(0)]
    lines = [encode(members, at) for at, members in enumerate(before, start=1)]
    with trace_of(b"".join([*lines, sealed(VALUES.replace(b'["a"]', words), 3)])) as trace:
        with pytest.raises(
            TraceError, match=r"rank-00000\.jsonl: a line of step 1 has contents that no recorder writes: key 'words'"
        ):
            trace.words(1, "buffers")
        with pytest.raises(TraceError):
            trace.words(2, "buffers")
