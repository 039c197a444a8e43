"""Comparison of the entries of two sections by name, kind and value."""

import pytest

from legacy_ddp.debug._diff.pair import (
    Entry,
    EntryDifference,
    Locations,
    entries,
    entry_differences,
    greatest_difference,
    keep_all,
    keep_shared,
    merge,
)
from legacy_ddp.debug._diff.result import relative_difference
from legacy_ddp.debug._trace.records import Names, Section, Values

ONE = Entry("float32 (2,)", "ab", 1.0, 0)
TWO = Entry("float32 (2,)", "cd", 2.0, 0)
NONE = Entry("float32 (2,)", None, None, 0)


def test_entries_are_what_a_section_holds_by_name() -> None:
    names = Names("buffers", ("buffer 'a'", "buffer 'b'", "buffer 'c'"), ("x", "y", "z"))
    section = Section(names, Values(("aa", None, "cc"), (1.0, None, None), {2: 5}))

    assert entries(section, keep_shared(("a",))) == {
        "buffer 'b'": Entry("y", None, None, 0),
        "buffer 'c'": Entry("z", "cc", None, 5),
    }
    assert entries(None, keep_all) == {}


def test_names_of_both_sides_are_compared_and_those_of_b_come_last() -> None:
    found = entry_differences({"z": ONE, "a": ONE, "same": TWO}, {"b": TWO, "a": TWO, "same": TWO})

    assert [item.name for item in found] == ["z", "a", "b"]
    assert [(item.a.value, item.b.value) for item in found] == [("ab", None), ("ab", "cd"), (None, "cd")]


def test_nothing_is_as_good_as_absent_whatever_its_kind() -> None:
    assert entry_differences({"a": NONE}, {}) == []
    assert entry_differences({"a": NONE}, {"a": Entry("float64 (3,)", None, None, 0)}) == []


def test_the_same_digest_of_another_kind_is_a_difference_of_kinds() -> None:
    (item,) = entry_differences({"a": ONE}, {"a": Entry("float32 (1, 2)", "ab", 1.0, 0)})

    assert item.kind == "float32 (2,) in A, float32 (1, 2) in B"
    assert EntryDifference("a", ONE, NONE).kind == "float32 (2,)"


@pytest.mark.parametrize("a, b, share", [(1.0, 2.0, 0.5), (2.0, 1.0, 0.5), (0.0, 3.0, 1.0), (0.0, 0.0, 0.0)])
def test_a_relative_difference_is_a_share_of_the_greater_norm(a: float, b: float, share: float) -> None:
    assert relative_difference(a, b) == share


def test_the_greatest_difference_needs_all_norms() -> None:
    small, great = EntryDifference("a", ONE, Entry("", "x", 0.75, 0)), EntryDifference("b", ONE, TWO)

    assert greatest_difference([small, great]) == 0.5
    assert greatest_difference([small, EntryDifference("c", ONE, NONE)]) is None
    assert greatest_difference([]) is None


@pytest.mark.parametrize(
    "name, pattern, kept",
    [
        ("buffer 'bn.running_mean'", "*.running_*", False),
        ("buffer 'bn.running_mean'", "bn.running_mean", False),
        ("buffer 'bn.running_mean'", "running_mean", True),
        ('buffer "it\'s"', "it's", False),
        ("buffer 'A'", "a", True),
        ("not quoted", "not*", False),
    ],
)
def test_buffers_are_left_out_by_their_raw_name_or_a_pattern(name: str, pattern: str, kept: bool) -> None:
    keep = keep_shared((pattern,))

    assert keep("buffers", name) == kept
    assert keep("parameters", name)


def test_the_names_of_a_location_are_those_of_all_ranks() -> None:
    locations = Locations()
    for rank, names in ((0, ("a", "b")), (1, ("b", "a", "c")), (2, ("a", "c"))):
        locations.add((4, 0), rank, ["a"], names)

    (location,), more = merge(locations.found, [4])

    assert (location.ranks, location.differing, location.total, more) == ((0, 1, 2), 1, 3, 0)
