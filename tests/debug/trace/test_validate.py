"""Lines with a right checksum and wrong contents are refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._trace.records import PHASES, Names, encode
from tests.helpers.trace_scenarios import JSON, contents_of, trace_of
from tests.helpers.traces import call_facts, environment, lines_of, sealed, write_trace


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
        (b'{"line":"end","step":1', "line 3: has contents that no recorder writes: key 'reason'"),
        (VALUES.replace(b'["a"]', b'["a","b"]'), "'words' has 2 entries, expected 1"),
        (VALUES.replace(b'["a"]', b'"a"'), "'words' is missing or of the wrong type"),
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
