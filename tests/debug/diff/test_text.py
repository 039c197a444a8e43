"""Text and JSON of a comparison: first divergence first, 80 columns, complete JSON."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._text import WIDTH, printable, shorten, table, wrap
from legacy_ddp.debug._diff.result import (
    Cause,
    Comparison,
    Divergence,
    Location,
    MetricDifference,
    OperationFinding,
    OperationRow,
    Side,
)
from legacy_ddp.debug._diff.text import as_json, lines
from legacy_ddp.debug._trace.records import PHASES

FIRST = Divergence(
    step=3,
    phase="local_gradients",
    name="gradient of 'b'",
    kind="float32 (2, 3)",
    ranks=(1,),
    sides=(Side("A", "0000000003000102", 2.375), Side("B", "ab" * 8, 2.375001)),
)
DIFFERENT = Comparison(
    folders=("run-a", "run-b"),
    verdict="different",
    headline="different: runs part at step 3 in local gradients of rank 1: gradient of 'b'",
    steps=(0, 5),
    first=FIRST,
    explanation="Forward or backward of this step parts them.",
    causes=(
        Cause("threads", (("A", "1"), ("B", "4"))),
        Cause("random generators", (("A", "00"), ("B", "11")), "first at step 2 on rank 0"),
    ),
    locations=(Location(3, "local_gradients", (1,), 1, 2), Location(4, "parameters", (0, 1), 2, 2)),
    more_locations=7,
    notes=("A goes on to step 9",),
)


def test_a_difference_is_printed_from_the_headline_to_the_notes() -> None:
    assert lines(DIFFERENT) == [
        "different: runs part at step 3 in local gradients of rank 1: gradient of 'b'",
        "  A: run-a",
        "  B: run-b",
        "",
        "these differ around the training, and may explain it:",
        "  threads: 1 in A, 4 in B",
        "  random generators, first at step 2 on rank 0: 00 in A, 11 in B",
        "",
        "step 3, local gradients, rank 1: gradient of 'b', float32 (2, 3)",
        "  A: 0000000003000102, norm 2.375",
        "  B: abababababababab, norm 2.375001",
        "  relative difference of norms 4.2e-07, of rounding size",
        "",
        "meaning: Forward or backward of this step parts them.",
        "",
        "9 places that differ, in the order of training:",
        "  step  phase            differ",
        "  3     local gradients  1 of 2  rank 1",
        "  4     parameters       2 of 2  ranks 0-1",
        "  ... 7 more",
        "",
        "note: A goes on to step 9",
    ]


def test_equal_runs_are_printed_in_a_line_with_their_folders_and_notes() -> None:
    found = Comparison(("run-a",), "same", "same: 2 ranks hold the same", (0, 5), notes=("threads differ",))

    assert lines(found) == ["same: 2 ranks hold the same", "  trace: run-a", "", "note: threads differ"]


def sides_text(*sides: Side) -> list[str]:
    text = lines(replace(DIFFERENT, first=replace(FIRST, sides=sides)))
    start = next(index for index, line in enumerate(text) if line.startswith("step 3, "))
    return text[start + 1 : text.index("", start)]


def test_a_side_that_holds_nothing_or_no_finite_norm_is_printed_so() -> None:
    assert sides_text(Side("A", None, None), Side("B", "ab", 1.5, 3)) == [
        "  A: nothing",
        "  B: ab, norm 1.5, 3 not finite",
    ]


def test_values_of_a_setting_are_printed_without_norms() -> None:
    assert sides_text(Side("A", "0.1", None), Side("B", "0.2", None)) == ["  A: 0.1", "  B: 0.2"]


def test_equal_norms_are_not_called_small() -> None:
    text = sides_text(Side("A", "0a", 1.5), Side("B", "0b", 1.5))

    assert text[2].startswith("  their norms are equal: values in another order, other signs")


def test_a_greater_difference_is_not_called_rounding() -> None:
    assert sides_text(Side("A", "0a", 1.0), Side("B", "0b", 2.0))[2] == "  relative difference of norms 0.5"


def test_many_sides_are_cut_and_counted() -> None:
    text = sides_text(*(Side(f"rank {rank}", f"{rank:016x}", 1.0) for rank in range(9)))

    assert text[3:] == ["  rank 3: 0000000000000003, norm 1", "  ... 5 more groups"]


def test_other_names_of_the_location_are_counted() -> None:
    others = tuple(replace(FIRST, name=f"gradient of '{letter}'") for letter in "cdefg")
    locations = (Location(3, "local_gradients", (1,), 6, 9),)

    text = lines(replace(DIFFERENT, others=others, locations=locations))

    assert "  5 more there, such as gradient of 'c', gradient of 'd'" in text


def test_steps_that_differ_alike_are_in_one_row_and_counted_each() -> None:
    locations = (Location(62, "parameters", (1,), 1, 29, last_step=120, steps=59), Location(70, "buffers", (1,), 1, 1))

    text = lines(replace(DIFFERENT, locations=locations, more_locations=0))

    assert text[text.index("60 places that differ, in the order of training:") + 1 : -2] == [
        "  step    phase       differ",
        "  62-120  parameters  1 of 29  rank 1",
        "  70      buffers     1 of 1   rank 1",
    ]


def test_the_json_object_is_complete_with_format_and_version() -> None:
    members = json.loads(json.dumps(as_json(DIFFERENT), allow_nan=False))

    assert (members["format"], members["version"]) == ("legacy_ddp diff", 1)
    assert (members["verdict"], members["headline"]) == ("different", DIFFERENT.headline)
    assert members["first"]["sides"][1] == {"label": "B", "word": "ab" * 8, "norm": 2.375001, "nonfinite": 0}
    assert members["first"]["parameter"] == "b"
    assert members["causes"][0] == {"what": "threads", "sides": [["A", "1"], ["B", "4"]], "where": ""}
    location = {"step": 4, "phase": "parameters", "ranks": [0, 1], "differing": 2, "total": 2}
    assert members["places"][1] == {**location, "last_step": None, "steps": 1}
    assert members["more_places"] == 7


@pytest.mark.parametrize(
    "name, parameter",
    [
        ("gradient of 'a.b'", "a.b"),
        ("parameter 'a'", "a"),
        ("optimizer 1: exp_avg of 'a'", "a"),
        ("buffer 'a'", None),
        ("lr of parameter group 0", None),
    ],
)
def test_the_parameter_that_a_divergence_concerns(name: str, parameter: str | None) -> None:
    assert replace(FIRST, name=name).parameter == parameter


def test_what_would_move_the_cursor_is_escaped() -> None:
    assert printable("a\x1b[2J\n\u2028\ud800é") == "a\\x1b[2J\\n\\u2028\\ud800é"


def test_long_text_is_shortened_in_its_middle() -> None:
    assert shorten("abcdefghijklmnop", 9) == "abc...nop"
    assert shorten("abcdefghi", 9) == "abcdefghi"


_TEXT = st.text(max_size=120)
_RANKS = st.lists(st.integers(0, 2000), min_size=1, max_size=60, unique=True).map(lambda ranks: tuple(sorted(ranks)))
_SIDE: Any = st.builds(Side, _TEXT, st.none() | _TEXT, st.none() | st.floats(0, 1e300), st.integers(0, 10**9))
_DIVERGENCE: Any = st.builds(
    Divergence,
    st.integers(0, 10**12),
    st.sampled_from(PHASES),
    _TEXT,
    _TEXT,
    _RANKS,
    st.lists(_SIDE, min_size=2, max_size=6).map(tuple),
)
_COUNT = st.integers(0, 10**12)
_SUM = st.none() | st.sampled_from(["nan", "inf", "-inf"]) | st.floats(allow_nan=False, allow_infinity=False)
_ROW: Any = st.builds(
    OperationRow, st.tuples(st.none() | _COUNT, st.none() | _COUNT), _TEXT, _TEXT, _TEXT, _TEXT, st.booleans()
)
_OPERATIONS: Any = st.builds(
    OperationFinding,
    *(_COUNT, st.tuples(_TEXT, _TEXT), _RANKS, st.tuples(_COUNT, _COUNT)),
    *([_TEXT] * 7),
    *([st.lists(_TEXT, max_size=3).map(tuple)] * 2),
    st.lists(_ROW, max_size=3).map(tuple),
)
_COMPARISON: Any = st.builds(
    Comparison,
    st.tuples(_TEXT, _TEXT),
    st.just("different"),
    _TEXT,
    st.just((0, 10**12)),
    _DIVERGENCE,
    st.lists(_DIVERGENCE, max_size=4).map(tuple),
    st.none(),
    _TEXT,
    st.lists(st.builds(Cause, _TEXT, st.lists(st.tuples(_TEXT, _TEXT), max_size=4).map(tuple), _TEXT)).map(tuple),
    st.lists(
        st.builds(
            Location,
            st.integers(0, 10**12),
            st.sampled_from(PHASES),
            _RANKS,
            st.integers(0, 10**9),
            st.integers(0, 10**9),
            st.none() | st.integers(0, 10**12),
            st.integers(1, 10**12),
        ),
        max_size=12,
    ).map(tuple),
    st.integers(0, 10**9),
    st.lists(st.builds(MetricDifference, _TEXT, _COUNT, _SUM, _SUM, _COUNT, _COUNT), max_size=12).map(tuple),
    st.none() | _OPERATIONS,
    st.lists(_TEXT, max_size=3).map(tuple),
)


@given(_COMPARISON)
def test_no_line_is_wider_than_80_columns_or_holds_what_cannot_be_printed(found: Comparison) -> None:
    text = lines(found)

    assert all(len(line) <= WIDTH and line.isprintable() for line in text)
    json.dumps(as_json(found), allow_nan=False)


@given(st.text())
def test_wrapping_loses_nothing_but_white_space(text: str) -> None:
    assert "".join("".join(wrap(text)).split()) == "".join(printable(text).split())


@given(st.lists(st.tuples(st.text("abc ", max_size=9), st.text("abc ", max_size=20), st.text()), min_size=1))
def test_tables_fit_the_page(rows: list[tuple[str, ...]]) -> None:
    assert all(len(line) <= WIDTH for line in table(rows))
