"""Are entries of two sections compared by name, by what they hold, and only where they are to be?"""

import pytest

from legacy_ddp.debug._diff.locations import Places, join
from legacy_ddp.debug._diff.sections import Entry, Unequal, entries, greatest, keep_all, keep_shared, relative, unequal
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
    found = unequal({"z": ONE, "a": ONE, "same": TWO}, {"b": TWO, "a": TWO, "same": TWO})

    assert [item.name for item in found] == ["z", "a", "b"]
    assert [(item.a.word, item.b.word) for item in found] == [("ab", None), ("ab", "cd"), (None, "cd")]


def test_nothing_is_as_good_as_absent_whatever_its_kind() -> None:
    assert unequal({"a": NONE}, {}) == []
    assert unequal({"a": NONE}, {"a": Entry("float64 (3,)", None, None, 0)}) == []


def test_the_same_digest_of_another_kind_is_a_difference_of_kinds() -> None:
    (item,) = unequal({"a": ONE}, {"a": Entry("float32 (1, 2)", "ab", 1.0, 0)})

    assert item.kind == "float32 (2,) in A, float32 (1, 2) in B"
    assert Unequal("a", ONE, NONE).kind == "float32 (2,)"


@pytest.mark.parametrize("a, b, share", [(1.0, 2.0, 0.5), (2.0, 1.0, 0.5), (0.0, 3.0, 1.0), (0.0, 0.0, 0.0)])
def test_a_relative_difference_is_a_share_of_the_greater_norm(a: float, b: float, share: float) -> None:
    assert relative(a, b) == share


def test_the_greatest_difference_needs_all_norms() -> None:
    small, great = Unequal("a", ONE, Entry("", "x", 0.75, 0)), Unequal("b", ONE, TWO)

    assert greatest([small, great]) == 0.5
    assert greatest([small, Unequal("c", ONE, NONE)]) is None
    assert greatest([]) is None


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


def test_the_names_of_a_place_are_those_of_all_ranks() -> None:
    places = Places()
    for rank, names in ((0, ("a", "b")), (1, ("b", "a", "c")), (2, ("a", "c"))):
        places.add((4, 0), rank, ["a"], names)

    (place,), more = join(places.marks, [4])

    assert (place.ranks, place.differing, place.total, more) == ((0, 1, 2), 1, 3, 0)
