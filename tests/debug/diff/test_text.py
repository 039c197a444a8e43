"""Text and JSON of any comparison: 80 columns that can be printed, and JSON. scenes.txt has the texts."""

import json
from typing import Any

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
    as_json,
    lines,
)
from legacy_ddp.debug._trace.records import PHASES


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
