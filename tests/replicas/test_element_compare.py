"""Each kind of difference between two tensors, beside a similar pair of a different kind."""

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from legacy_ddp._explain.element_compare import CLASSES, ElementDifference, compare_elements

# dtype: bits of an element, bits of its mantissa (None: not a float), has it a sign bit
FLOATS = {
    torch.float64: (64, 52, True),
    torch.float32: (32, 23, True),
    torch.float16: (16, 10, True),
    torch.bfloat16: (16, 7, True),
    torch.float8_e4m3fn: (8, 3, True),
    torch.float8_e4m3fnuz: (8, 3, True),
    torch.float8_e5m2: (8, 2, True),
    torch.float8_e5m2fnuz: (8, 2, True),
    torch.float8_e8m0fnu: (8, 0, False),
}
INTEGERS = {
    torch.bool: 8,
    torch.uint8: 8,
    torch.int8: 8,
    torch.int16: 16,
    torch.uint16: 16,
    torch.int32: 32,
    torch.uint32: 32,
    torch.int64: 64,
    torch.uint64: 64,
    torch.float4_e2m1fn_x2: 8,  # two to a byte
}
CONTAINER = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
INF, NAN = math.inf, math.nan


def _from_bits(bits: Sequence[int], dtype: torch.dtype, width: int) -> Tensor:
    signed = [value - 2**width if value >= 2 ** (width - 1) else value for value in bits]
    return torch.tensor(signed, dtype=CONTAINER[width]).view(dtype)


def _floats(*bits: int) -> Tensor:
    return _from_bits(bits, torch.float32, 32)


def _difference(own: Tensor, reference: Tensor) -> ElementDifference:
    difference = compare_elements(own, reference)
    assert difference is not None
    return difference


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tensor", [_random(3, 4), torch.tensor([NAN, INF, -0.0]), torch.tensor(1), torch.zeros(0, 3)])
def test_the_same_bits_are_no_difference(tensor: Tensor) -> None:
    assert compare_elements(tensor, tensor.clone()) is None


def test_other_shapes_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got torch.float32 \(2,\), expected torch.float32 \(3,\)"):
        compare_elements(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match=r"got torch.float32 .*, expected torch.float64 "):
        compare_elements(torch.zeros(2), torch.zeros(2, dtype=torch.float64))


def test_a_flipped_bit_is_reported_whole() -> None:
    reference = torch.full((100, 8), 1.0)
    own = reference.clone()
    own[12, 7] = 1.5  # 1.0 is exponent 127, mantissa 0; the mantissa's highest bit is worth a half

    assert _difference(own, reference) == ElementDifference(
        count=1,
        numel=800,
        first_index=(12, 7),
        values=("1.5", "1.0"),
        greatest=0.5,
        greatest_index=(12, 7),
        kind="one bit",
        words="one bit flipped: bit 22 (mantissa)",
        bit=22,
    )


def _edited(reference: Tensor, index: Any, values: Any) -> Tensor:
    own = reference.clone()
    own[index] = values
    return own


def _flipped(reference: Tensor, index: Any, mask: Any) -> Tensor:
    own = reference.clone()
    own.view(torch.int32)[index] ^= torch.tensor(mask, dtype=torch.int32)
    return own


def _moved(reference: Tensor, index: Any, ulps: list[int]) -> Tensor:
    own = reference.clone()
    own.view(torch.int32)[index] += torch.tensor(ulps, dtype=torch.int32)
    return own


ONES, FEW, MANY, WIDE = torch.ones(30), _random(50), _random(200), _random(1000, 4)
SIX, FIFTEEN = torch.arange(6.0).view(2, 3), torch.arange(15).view(5, 3)
EIGHT_BITS = torch.tensor([1.0, 1.5, -2.0, 3.0, 0.0])
SIGNS = torch.tensor([1.0, 2.5, 0.0, -3.0, INF])
SUBNORMAL = _edited(_random(40), slice(10), _floats(*range(1, 20, 2)))
FOUR_ULP = torch.cat([torch.ones(20), _edited(torch.full((10,), 1 + 4 * 2**-23), 5, 1 + 3 * 2**-23)])
NINE_IN_TEN = torch.cat([_random(100)[:10], _random(100, seed=1)[10:]])
GREATEST = torch.finfo(torch.float32).max
CAUSE = "times the reference: a clip, a rate, a decay or a write of its own"
SAME = "permutation: the same elements in other places"
ULP = "at most {} ulp of the greatest apart: of rounding size"
# What it shows: own, reference, kind, and the words, None where any may follow.
PAIRS: dict[str, tuple[Any, Any, str, str | None]] = {
    "the last bit": (
        [7.0, 1 + 2**-23],
        [7.0, 1.0],
        "one bit",
        "one bit flipped: bit 0 (mantissa), which rounding can do too",
    ),
    "16 ulp are a bit": ([7.0, 1 + 2**-19], [7.0, 1.0], "one bit", "one bit flipped: bit 4 (mantissa)"),
    "two bits of one element": (_floats(0x3F800000, 7), _floats(0x3F800000 ^ 0x600000, 7), "some", None),
    "the imaginary part of a complex number": (
        [1 - 2j, 5],
        [1 + 2j, 5],
        "one bit",
        "one bit flipped: bit 31 (sign) of the imaginary part",
    ),
    "a bit in both parts of a complex number": ([-1 - 2j, 5], [1 + 2j, 5], "some", None),
    "one zero of other sign": (
        [-0.0, 1],
        [0.0, 1],
        "one bit",
        "one bit flipped: bit 31 (sign), equal as numbers: -0.0 against 0.0",
    ),
    "zeros of other sign swapped": (
        [-0.0, 1.0, 0.0],
        [0.0, 1.0, -0.0],
        "same values",
        "equal as numbers: -0.0 against 0.0",
    ),
    "a zero beside a true difference": ([-0.0, 1, 5, 6], [0.0, 3, 5, 6], "some", None),
    "two swapped": (
        [[0.0, 1.0, 3.0], [2.0, 4.0, 5.0]],
        SIX,
        "permutation",
        "permutation: (0, 2) and (1, 0) swapped",
    ),
    "rows in another order": (
        FIFTEEN[[1, 2, 0, 3, 4]],
        FIFTEEN,
        "permutation",
        SAME,
    ),
    "complex numbers in another order": ([3 + 4j, 5 + 6j, 1 + 2j], [1 + 2j, 3 + 4j, 5 + 6j], "permutation", None),
    "parts of complex numbers": ([1 + 4j, 3 + 2j, 5 + 6j], [1 + 2j, 3 + 4j, 5 + 6j], "some", None),
    "complex numbers with equal real parts": (
        [1 + 3j, 1 + 4j, 1 + 2j],
        [1 + 2j, 1 + 3j, 1 + 4j],
        "permutation",
        None,
    ),
    "rows that come more often": ([[1, 2], [1, 2], [2, 1]], [[2, 1], [2, 1], [1, 2]], "permutation", SAME),
    "the same sum": ([1, 5, 7, 9], [2, 4, 7, 9], "some", None),
    "the same set": ([1, 1, 4], [4, 4, 1], "some", None),
    "a factor of eight bits": (
        (2 * EIGHT_BITS).to(torch.float8_e4m3fn),
        EIGHT_BITS.to(torch.float8_e4m3fn),
        "scaled",
        f"2 {CAUSE}",
    ),
    "a factor of integers that is not exact": ([1, 2, 3], [49, 98, 147], "scaled", None),
    "eight bits are too few": (
        torch.tensor([2.0, 3.0, -4.0, 5.0]).to(torch.float8_e4m3fn),
        EIGHT_BITS[:4].to(torch.float8_e4m3fn),
        "some",
        None,
    ),
    "subnormal numbers hide no factor": (SUBNORMAL * 0.3, SUBNORMAL, "scaled", f"0.3 {CAUSE}"),
    "every sign": (-SIGNS, SIGNS, "scaled", "-1 times the reference: every sign changed"),
    "cleared": (0 * SIGNS[:4], SIGNS[:4], "scaled", "0 times the reference: all zero here"),
    "cleared to -0.0": (-0.0 * SIGNS[:4], SIGNS[:4], "scaled", "0 times the reference: all zero here"),
    "one in a hundred may miss the factor": (_edited(MANY * 3, [0, 1], 0.7), MANY, "scaled", None),
    "more than one in a hundred": (_edited(MANY * 3, [0, 1, 2], 0.7), MANY, "some", None),
    "one number": ([2.0], [1.0], "some", None),
    "one confirmation": ([3.3, 6.6], [1.1, 2.2], "some", None),
    "half of them unchanged": ([3.0, 6.0, 9.0, 4.0, 5.0, 6.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "some", None),
    "no factor of zero": ([3.0, 6.0, 9.0, 1.0], [1.0, 2.0, 3.0, 0.0], "some", None),
    "nearly a factor": ([3.0, 6.0, 9.01], [1.0, 2.0, 3.0], "some", None),
    "zeros confirm no factor": (
        [3.0, 6.0, 9.0, 7.0] + [-0.0] * 10,
        [1.0, 2.0, 3.0, 4.0] + [0.0] * 10,
        "some",
        None,
    ),
    "a factor hides no NaN": (_edited(MANY * 3, 7, NAN), MANY, "non-finite", "not finite: 1 NaN here"),
    "two bits": (_flipped(FEW, [3, 7], [1 << 20, 1 << 21]), FEW, "some", None),
    "a low bit of few elements": (_flipped(FEW, slice(19), 1), FEW, "rounding", None),
    # 2**-149 is the smallest number: one ulp above zero, two above its negative.
    "3 ulp": (
        _floats(0x3F800003, 0xBF7FFFFF, 0x80000001, 0x40490FDB),
        _floats(0x3F800000, 0xBF800000, 0x00000001, 0x40490FDB),
        "rounding",
        ULP.format(3),
    ),
    "4 ulp": (FOUR_ULP, ONES, "rounding", ULP.format(4)),
    "9 ulp": (_edited(FOUR_ULP, 29, 1 + 9 * 2**-23), ONES, "some", None),
    "an ulp everywhere is no factor": (
        _moved(MANY[:100], slice(None), [1, 2] * 50),
        MANY[:100],
        "rounding",
        ULP.format(2),
    ),
    "rounding in few rows": (_moved(WIDE, 4, [1, 2, 3, 1]), WIDE, "rounding", None),
    "small numbers beside a great one": (
        _edited(_random(100, seed=1) * 1e-7, 0, 1 + 2**-23),
        _edited(_random(100) * 1e-7, 0, 1.0),
        "some",
        None,
    ),
    "infinity is no ulp": ([INF, INF], [GREATEST, GREATEST], "non-finite", "not finite: 2 inf here"),
    "another order of summation": (
        sum(_random(16, 20_000)),
        sum(_random(16, 20_000).flip(0)),
        "rounding",
        ULP.format(3),
    ),
    "integers are never rounded": ([10, 23, 5, 6], [11, 24, 5, 6], "some", None),
    "not finite on either side": (
        [NAN, NAN, INF, 1.0, -INF, 2.0, INF],
        [1.0, 2.0, 3.0, NAN, 4.0, 2.0, INF],
        "non-finite",
        "not finite: 2 NaN and 1 inf and 1 -inf here; 1 NaN there",
    ),
    "NaN on both sides": (_floats(0x7FC00001, 0x3F800000, 0, 7), _floats(0x7FC00000, 0x40200000, 0, 7), "some", None),
    "infinity beside it": (
        _floats(0x7FC00001, 0x3F800000, 0x7F800000, 7),
        _floats(0x7FC00000, 0x40200000, 0, 7),
        "non-finite",
        "not finite: 1 inf here",
    ),
    "an infinite part on both sides": ([complex(INF, 1), 5j], [complex(INF, 2.5), 5j], "some", None),
    "a row": (_edited(_random(5, 4, 3), 4, _random(4, 3, seed=1)), _random(5, 4, 3), "some", "no known pattern"),
    "nine in ten": (NINE_IN_TEN, _random(100), "some", "no known pattern"),
}


@pytest.mark.parametrize("shows", PAIRS)
def test_the_kind_of_a_difference_is_named(shows: str) -> None:
    own, reference, kind, words = PAIRS[shows]
    difference = _difference(torch.as_tensor(own), torch.as_tensor(reference))

    assert difference.kind == kind
    assert words in (None, difference.words)


def test_a_bool_byte_that_is_neither_0_nor_1_is_told_from_true() -> None:
    own = torch.tensor([3], dtype=torch.uint8).view(torch.bool)
    difference = _difference(own, torch.tensor([True]))

    assert difference.words == "one bit flipped: bit 1"
    assert difference.values == ("True (0x03)", "True (0x01)")


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_each_bit_of_any_dtype_is_named(dtype: torch.dtype) -> None:
    width, mantissa, has_sign = FLOATS.get(dtype) or (INTEGERS[dtype], None, False)
    fields = [""] * width
    if mantissa is not None:
        fields = [" (mantissa)"] * mantissa + [" (exponent)"] * (width - mantissa - has_sign) + [" (sign)"] * has_sign
    for bit, field in enumerate(fields):
        difference = _difference(*(_from_bits([1, 0, which], dtype, width) for which in (1 << bit, 0)))

        assert difference.kind == "one bit"
        assert difference.words.split(", ")[0] == f"one bit flipped: bit {bit}{field}"
        assert (difference.count, difference.first_index, difference.bit) == (1, (2,), bit)
        assert difference.values[0] != difference.values[1]


def test_nans_of_other_bits_are_equal_as_numbers() -> None:
    own, reference = _floats(0xFFC00001, 0x7FC00002, 0), _floats(0x7FC00000, 0x7FC00000, 0)
    difference = _difference(own, reference)

    assert (difference.kind, difference.words) == ("same values", "equal as numbers: NaN on both sides with other bits")
    assert difference.values == ("nan (0xffc00001)", "nan (0x7fc00000)")
    assert (difference.greatest, difference.greatest_index) == (None, None)
    assert "no absolute difference: a NaN in each pair" in difference.lines()


@given(st.data())
def test_a_permutation_of_distinct_values_is_called_nothing_else(data: st.DataObject) -> None:
    dtype, numbers = data.draw(
        st.sampled_from(
            [
                (torch.float32, st.floats(width=32, allow_nan=False)),
                (torch.float64, st.floats(allow_nan=False)),
                (torch.int64, st.integers(-(2**63), 2**63 - 1)),
                (torch.uint8, st.integers(0, 255)),
                (torch.float32, st.integers(-5, 5)),
            ]
        )
    )
    reference = torch.tensor(data.draw(st.lists(numbers, min_size=2, max_size=20, unique=True)), dtype=dtype)
    order = data.draw(st.permutations(range(len(reference))))
    moved = [place for place, source in enumerate(order) if place != source]
    difference = compare_elements(reference[order], reference)

    if difference is None:
        assert moved == []
    else:
        assert difference.kind == "permutation"
        assert difference.count == len(moved)
        assert (f"({moved[0]},) and ({moved[1]},) swapped" in difference.words) == (len(moved) == 2)


def test_a_large_tensor_is_taken_in_blocks_to_its_end() -> None:
    reference = _random(2**20 + 5)
    own = reference * 3
    reference[-1], own[-1] = 100, 300
    difference = _difference(own, reference)

    assert difference.words.startswith("3 times the reference")
    assert (difference.greatest, difference.greatest_index) == (200.0, (2**20 + 4,))


def test_float64_extremes_are_no_rounding() -> None:
    # 2 + 1 ulp is 2**63 ulp from -2 + 1 ulp: a distance that wraps round to below zero.
    own = _from_bits([0x4000000000000001, 0x4000000000000002], torch.float64, 64)
    reference = _from_bits([0xBFFFFFFFFFFFFFFF, 0xBFFFFFFFFFFFFFFE], torch.float64, 64)
    assert _difference(own, reference).kind == "some"

    huge = torch.tensor([1.5e308, 1e308], dtype=torch.float64)
    difference = _difference(huge, -huge.flip(0))
    assert (difference.kind, difference.greatest, difference.greatest_index) == ("some", INF, (0,))


def test_views_are_compared_in_logical_order() -> None:
    expanded = torch.tensor([1.0, 2.0]).expand(3, 2)
    assert compare_elements(expanded, torch.tensor([1.0, 2.0] * 3).view(3, 2)) is None

    numbers = torch.tensor([1 + 2j, 3 + 4j])
    assert compare_elements(numbers.conj(), torch.tensor([1 - 2j, 3 - 4j])) is None
    assert compare_elements(numbers.conj().imag, torch.tensor([-2.0, -4.0])) is None
    assert compare_elements(numbers[:1].conj().imag, torch.tensor([-2.0])) is None


@pytest.mark.parametrize(
    "dtype, bits, text",
    [
        (torch.float32, 0x3DCCCCCD, "0.1"),
        (torch.float32, 0x00000001, "1e-45"),
        (torch.float32, 0x7F7FFFFF, "3.4028235e+38"),
        (torch.bfloat16, 0x3DCD, "0.1"),
        (torch.float16, 0x7C00, "inf"),
        (torch.float64, 0x3FD3333333333334, "0.30000000000000004"),
        (torch.float8_e4m3fn, 0xB8, "-1.0"),
        (torch.float8_e8m0fnu, 0x80, "2.0"),
        (torch.complex64, 0x40000000_3F800000, "1.0+2.0j"),
    ],
)
def test_values_are_as_short_as_their_dtype_allows(dtype: torch.dtype, bits: int, text: str) -> None:
    width = 8 * dtype.itemsize

    assert _difference(_from_bits([bits], dtype, width), _from_bits([2], dtype, width)).values[0] == text


def _brute_force(own: Sequence[complex], reference: Sequence[complex], code: str) -> tuple[int, int, float, int]:
    def pack(number: complex) -> bytes:
        if code in "fd":
            return struct.pack(f"<2{code}", number.real, number.imag)
        return struct.pack(f"<{code}", number)

    differs = [place for place in range(len(own)) if pack(own[place]) != pack(reference[place])]
    greatest, where = -1.0, -1
    for place in differs:
        apart = float(abs(own[place] - reference[place]))
        if apart > greatest:
            greatest, where = apart, place
    return len(differs), differs[0] if differs else -1, greatest, where


@pytest.mark.parametrize(
    "dtype, code, numbers",
    [
        (torch.float32, "f", st.sampled_from([0.0, -0.0, 1.0, 1.5, -(2.0**127), 2.0**127, 2.0**-149, NAN, INF, -INF])),
        (torch.float64, "d", st.sampled_from([0.0, -0.0, 0.1, -1e308, 1e308, 5e-324, NAN, INF, -INF])),
        (torch.complex64, "f", st.sampled_from([0j, -0.0j, 1 + 1j, -3 + 4j, 2j, 5 + 12j])),
        (torch.int64, "q", st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), 2**60, 2**60 + 1])),
        (torch.uint64, "Q", st.sampled_from([0, 1, 2**63, 2**64 - 1, 2**60, 2**60 + 1])),
        (torch.int8, "b", st.integers(-128, 127)),
        (torch.bool, "?", st.booleans()),
    ],
)
@given(st.data())
def test_the_figures_are_those_of_a_plain_loop(
    dtype: torch.dtype, code: str, numbers: st.SearchStrategy[complex], data: st.DataObject
) -> None:
    rows, columns = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    several = st.lists(numbers, min_size=rows * columns, max_size=rows * columns)
    own, reference = data.draw(several), data.draw(several)
    count, first, greatest, where = _brute_force(own, reference, code)
    sides = [torch.tensor(side, dtype=dtype).view(rows, columns) for side in (own, reference)]
    difference = compare_elements(*sides)

    if difference is None:
        assert count == 0
        return
    assert (difference.count, difference.numel) == (count, rows * columns)
    assert difference.first_index == divmod(first, columns)
    assert (difference.greatest, difference.greatest_index) == (
        (greatest, divmod(where, columns)) if where >= 0 else (None, None)
    )
    assert difference.kind in CLASSES
    assert ElementDifference.from_json(json.loads(json.dumps(difference.to_json(), allow_nan=False))) == difference
    assert all(len(line) <= 80 for line in difference.lines(" " * 8))


def test_the_report_is_short_lines() -> None:
    reference = torch.full((1000, 8), 0.015625)
    own = reference.clone()
    own[12, 7] = 0.03125  # one more in the exponent: 121 to 122, two bits

    assert _difference(own, reference).lines("  ") == [
        "  1 of 8000 elements differs (under 0.1 %)",
        "  first at (12, 7): 0.03125 here, 0.015625 there",
        "  greatest absolute difference 0.015625 at (12, 7)",
        "  no known pattern",
    ]
    assert _difference(own[12, 6:], reference[12, 6:]).lines()[0] == (
        "1 of 2 elements differs (50.0 %), first at (1,): 0.03125 here, 0.015625 there"
    )


def test_a_share_is_never_rounded_to_all() -> None:
    reference, own = torch.zeros(5000), _random(5000)
    own[4] = 0

    assert _difference(own, reference).lines()[0].startswith("4999 of 5000 elements differ (over 99.9 %)")
