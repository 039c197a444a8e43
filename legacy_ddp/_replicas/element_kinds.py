"""Classification of the difference between two tensors, and its text with values, bits and indices.

The first matching entry of ``CLASSES`` is the kind. Narrow kinds come before wide kinds; if two kinds match, the kind
that explains more comes first:

one bit      a single bit of a single element, even if rounding can cause the same (the text then says this)
same values  every differing pair is equal as numbers: 0.0 and -0.0, or two NaNs
permutation  the same elements, bit by bit, at different indices
scaled       99 % of the nonzero elements are a common factor times the reference, within rounding. Before ``same bit``:
             a changed sign of every element matches both
same bit     the same bit of several elements. Of fewer than 20 elements only if rounding cannot cause the same: half of
             all steps by 1 ulp change the lowest bit alone
rounding     all elements are finite and a few ulp apart: by their own ulp or, where terms of a sum cancel, by the ulp
             of the greatest element
non-finite   NaN or inf on a single side
rows         at least half of the elements in less than half of the rows (dimension 0)
everything   at least 90 % of the elements
some         any other difference
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import frexp, isfinite, ldexp

import torch
from torch import Tensor

BLOCK = 2**20  # elements of a block, see by_blocks()
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
SPANS = 3  # spans of rows that are named before "and ... more"
MANTISSA_BITS = {
    torch.float64: 52,
    torch.float32: 23,
    torch.float16: 10,
    torch.bfloat16: 7,
    torch.float8_e4m3fn: 3,
    torch.float8_e4m3fnuz: 3,
    torch.float8_e5m2: 2,
    torch.float8_e5m2fnuz: 2,
    torch.float8_e8m0fnu: 0,
}
SAMPLE = 2**16  # the median of this many quotients gives the factor


@dataclass(frozen=True, eq=False)
class Pair:
    """The bits of two tensors, ``[numel, parts]``, and ``where`` the tensors differ: flat indices, ascending.

    A complex number has two parts, other numbers have a single part; ``dtype`` is the dtype of a part. ``own``,
    ``reference`` and the properties derived from them hold only the elements that differ.
    """

    shape: torch.Size
    dtype: torch.dtype
    all_own: Tensor
    all_reference: Tensor
    where: Tensor

    @cached_property
    def own(self) -> Tensor:
        return self.all_own[self.where]

    @cached_property
    def reference(self) -> Tensor:
        return self.all_reference[self.where]

    @cached_property
    def own_numbers(self) -> Tensor:
        return as_numbers(self.own, self.dtype)

    @cached_property
    def reference_numbers(self) -> Tensor:
        return as_numbers(self.reference, self.dtype)

    @cached_property
    def finite(self) -> Tensor:
        return self.own_numbers.isfinite() & self.reference_numbers.isfinite()

    @cached_property
    def rows(self) -> Tensor:
        """The rows that hold a difference, ascending."""
        rows: Tensor = torch.unique_consecutive(self.where // self.row_numel)
        return rows

    @property
    def unchanged_nonzero(self) -> int:
        """The number of nonzero parts in the elements that are equal."""
        unchanged = torch.ones(len(self.all_own), dtype=torch.bool, device=self.where.device)
        unchanged[self.where] = False
        return int(torch.count_nonzero(as_numbers(self.all_own[unchanged], self.dtype)))

    @property
    def row_numel(self) -> int:
        return len(self.all_own) // self.shape[0]

    @property
    def count(self) -> int:
        return len(self.where)


def find_differences(own: Tensor, reference: Tensor) -> Pair:
    """The pair of two tensors of the same shape and dtype."""
    own_bits, reference_bits = _bits(own), _bits(reference)
    where = (own_bits != reference_bits).any(dim=1).nonzero().flatten()
    return Pair(own.shape, _part_dtype(own.dtype), own_bits, reference_bits, where)


def format_element(tensor: Tensor) -> str:
    """The text of a tensor with a single element; texts of equal dtype are equal only if the bits are."""
    bits = _bits(tensor)[0].cpu()
    text = format_value(bits, tensor.dtype)
    return f"{text} ({format_bits(bits)})" if "nan" in text else text


def _bits(tensor: Tensor) -> Tensor:
    """The bits of the elements as integers, ``[numel, parts]``."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor.unsqueeze(-1)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parts.dtype.itemsize]
    return parts.contiguous().view(-1).view(integer).view(-1, parts.shape[-1])


def _part_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to read a part of an element with; bytes for bool and packed floats."""
    part = dtype.to_real() if dtype.is_complex else dtype
    return part if part in MANTISSA_BITS or part in _INTEGERS else torch.uint8


def as_numbers(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of the bits. In float32 for narrow floats, whose differences and ratios fit; otherwise in float64."""
    narrow = dtype.is_floating_point and dtype.itemsize < 4
    return bits.view(dtype).to(torch.float32 if narrow else torch.float64)


def by_blocks(step: Callable[[Tensor, Tensor], Tensor], own: Tensor, reference: Tensor) -> Tensor:
    """``step(own, reference)``, block by block, so temporaries do not grow with the tensors."""
    starts = range(0, len(own), BLOCK)
    return torch.cat([step(own[start : start + BLOCK], reference[start : start + BLOCK]) for start in starts])


def ulp_apart(own: Tensor, reference: Tensor) -> Tensor:
    """The distance of floats, given their bits, in ulp. 0 between 0.0 and -0.0; negative if 64 bits overflow."""
    return (_ordered(own) - _ordered(reference)).abs()


def _ordered(bits: Tensor) -> Tensor:
    """Integers in the order of the floats: 1 for each ulp, 0 for both zeros. Wrong for 8-bit floats without a sign."""
    magnitude = bits.to(torch.int64) & torch.iinfo(bits.dtype).max
    return torch.where(bits < 0, -magnitude, magnitude)


def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """Relative and absolute tolerance for two roundings; 0 for 8-bit floats: too few bits to recognise a factor."""
    if dtype not in MANTISSA_BITS:
        return 2.0**-51, 0.0  # integers, by way of float64
    if MANTISSA_BITS[dtype] < 7:
        return 0.0, 0.0
    relative = 2.0 ** (1 - MANTISSA_BITS[dtype])
    return relative, relative * torch.finfo(dtype).tiny


def format_value(bits: Tensor, dtype: torch.dtype) -> str:
    """The shortest text that rounds to the element with these bits, ``[parts]``, and to no other element."""
    if dtype.is_complex:
        real, imaginary = (_shortest(part, dtype.to_real()) for part in bits)
        return f"{real}{'' if imaginary.startswith('-') else '+'}{imaginary}j"
    if dtype in MANTISSA_BITS:
        return _shortest(bits[0], dtype)
    if dtype == torch.bool:
        return str(bool(bits[0]))
    # A packed float holds two numbers: its byte is shown.
    return str(bits.view(torch.uint8 if dtype.is_floating_point else dtype)[0].item())


def _shortest(bits: Tensor, dtype: torch.dtype) -> str:
    number = float(bits.unsqueeze(0).view(dtype).double())
    for digits in range(1, 18):
        text = float(f"{number:.{digits}g}")
        if float(torch.tensor([text], dtype=torch.float64).to(dtype).double()) == number:
            return repr(text)
    return repr(number)  # NaN


def format_bits(bits: Tensor) -> str:
    """Hexadecimal text, as ``0x7fc00001``; the two parts of a complex number are separated by a comma."""
    digits = 2 * bits.dtype.itemsize
    return ", ".join(f"0x{part % 16**digits:0{digits}x}" for part in bits.tolist())


def format_share(count: int, total: int) -> str:
    """``count`` in percent of ``total``, never rounded to 0 % or 100 %."""
    if 0 < count < 0.001 * total:
        return "under 0.1 %"
    return "over 99.9 %" if 0.999 * total < count < total else f"{100 * count / total:.1f} %"


def format_rows(rows: Tensor, total: int) -> str:
    """``rows 3, 7-9 and 12 more of 1000``. ``rows``: row numbers, ascending."""
    # No loop over the rows: there may be millions.
    last = (rows.diff() != 1).nonzero().flatten()
    firsts = torch.cat([rows[:1], rows[last[:SPANS] + 1]])[:SPANS].tolist()
    lasts = torch.cat([rows[last[:SPANS]], rows[-1:]])[:SPANS].tolist()
    spans = [f"{first}-{last}" if last > first else str(first) for first, last in zip(firsts, lasts, strict=True)]
    more = len(rows) - sum(last - first + 1 for first, last in zip(firsts, lasts, strict=True))
    text = f"{', '.join(spans)} and {more} more" if more else ", ".join(spans)
    return f"{'row' if len(rows) == 1 else 'rows'} {text} of {total}"


def unravel_index(flat_index: int, shape: torch.Size) -> tuple[int, ...]:
    """The index of the element at ``flat_index`` in logical order."""
    index = []
    for size in reversed(shape):
        flat_index, remainder = divmod(flat_index, size)
        index.append(remainder)
    return tuple(reversed(index))


def classify(pair: Pair) -> tuple[str, str]:
    """The kind and its text."""
    return next((kind, text) for kind, describe in CLASSES.items() if (text := describe(pair)))


def _one_bit(pair: Pair) -> str | None:
    bit = _describe_common_bit(pair)
    if pair.count > 1 or not bit:
        return None
    if same := _same_values(pair):
        return f"one bit flipped: {bit}, {same}"
    return f"one bit flipped: {bit}{', which rounding can do too' if _rounding(pair) else ''}"


def _same_values(pair: Pair) -> str | None:
    if pair.dtype not in MANTISSA_BITS:
        return None
    differs = pair.own != pair.reference
    zeros = differs & (pair.own_numbers == pair.reference_numbers)
    nans = differs & pair.own_numbers.isnan() & pair.reference_numbers.isnan()
    if not torch.equal(zeros | nans, differs):
        return None
    named = {"-0.0 against 0.0": zeros, "NaN on both sides with other bits": nans}
    return f"equal as numbers: {' and '.join(text for text, mask in named.items() if mask.any())}"


def _permutation(pair: Pair) -> str | None:
    # Sums do not depend on the order. Mostly they differ, which saves the sort.
    if pair.own.sum(dtype=torch.int64) != pair.reference.sum(dtype=torch.int64):
        return None
    if not torch.equal(_in_order(pair.own), _in_order(pair.reference)):
        return None
    if pair.count == 2:
        first, second = (unravel_index(flat_index, pair.shape) for flat_index in pair.where.tolist())
        return f"permutation: {first} and {second} swapped"
    if not _moves_whole_rows(pair):
        return "permutation: the same elements in other places"
    if len(pair.rows) == 2:
        return "permutation: rows {} and {} swapped".format(*pair.rows.tolist())
    return f"permutation: {format_rows(pair.rows, pair.shape[0])} in another order"


def _scaled(pair: Pair) -> str | None:
    own, reference = pair.own_numbers, pair.reference_numbers
    nonzero = (own != 0) | (reference != 0)
    # A single number gives the factor; at least two more numbers confirm the factor.
    needed = max(3, 0.99 * (int(nonzero.sum()) + pair.unchanged_nonzero))
    if int(nonzero.sum()) < needed:
        return None
    some = slice(None, None, 1 + pair.count // SAMPLE)
    factor = float((own[some] / reference[some]).nanmedian())  # 0 / 0 is NaN
    relative, absolute = tolerance(pair.dtype)
    if not isfinite(factor) or abs(factor - 1) <= 2 * relative:
        return None

    def fit(own: Tensor, reference: Tensor) -> Tensor:
        return torch.isclose(own, factor * reference, rtol=relative, atol=absolute, equal_nan=True)

    fits = by_blocks(fit, own, reference)
    if int((fits & nonzero).sum()) < needed or not (fits | pair.finite).all():
        return None
    cause = "a clip, a rate, a decay or a write of its own"
    cause = {-1.0: "every sign changed", 0.0: "all zero here"}.get(factor, cause)
    return f"{factor + 0.0:.6g} times the reference: {cause}"


def _same_bit(pair: Pair) -> str | None:
    bit = _describe_common_bit(pair)
    if not bit or (pair.count < 20 and _rounding(pair)):
        return None
    return f"the same bit flipped in {pair.count} elements: {bit}"


def _rounding(pair: Pair) -> str | None:
    if pair.dtype not in MANTISSA_BITS or not pair.finite.all():
        return None
    mantissa = MANTISSA_BITS[pair.dtype]
    ulp = by_blocks(ulp_apart, pair.own, pair.reference)
    # A negative distance is an overflow of 64 bits.
    if ((ulp >= 0) & (ulp <= (4 if mantissa >= 7 else 1))).all():
        return f"at most {int(ulp.max())} ulp apart: of rounding size"
    # Measured for sums of 3 to 64 terms in two orders, and for matmuls computed in two ways: elements next to zero are
    # thousands of ulp apart, but at most 4.3 ulp of the greatest element; at least 83 % are within 16 of their own ulp.
    own, reference = pair.own_numbers, pair.reference_numbers
    greatest = max(float(own.abs().max()), float(reference.abs().max()))
    apart = float((own - reference).abs_().max()) / max(ldexp(1.0, frexp(greatest)[1] - 1 - mantissa), 5e-324)
    if mantissa < 7 or apart > 8 or int(((ulp >= 0) & (ulp <= 16)).sum()) < 0.75 * ulp.numel():
        return None
    return f"at most {apart:.2g} ulp of the greatest apart, of rounding size where terms of a sum cancel"


def _non_finite(pair: Pair) -> str | None:
    own, reference = pair.own_numbers, pair.reference_numbers
    changed = (own != reference) & ~(own.isnan() & reference.isnan())
    sides = {"here": _count_non_finite(own, changed), "there": _count_non_finite(reference, changed)}
    found = [f"{counts} {side}" for side, counts in sides.items() if counts]
    return f"not finite: {'; '.join(found)}" if found else None


def _rows(pair: Pair) -> str | None:
    rows = _few_rows(pair)
    if not rows or 2 * pair.count < len(pair.rows) * pair.row_numel:
        return None
    return f"{rows}: sparse or unused rows"


def _everything(pair: Pair) -> str | None:
    if pair.count < 0.9 * len(pair.all_own):
        return None
    return "everything, without a pattern"


def _some(pair: Pair) -> str:
    rows = _few_rows(pair)
    return f"some elements, in {rows}" if rows else "some elements"


CLASSES: dict[str, Callable[[Pair], str | None]] = {
    "one bit": _one_bit,
    "same values": _same_values,
    "permutation": _permutation,
    "scaled": _scaled,
    "same bit": _same_bit,
    "rounding": _rounding,
    "non-finite": _non_finite,
    "rows": _rows,
    "everything": _everything,
    "some": _some,
}
KINDS = tuple(CLASSES)


def common_bit(pair: Pair) -> tuple[int, int] | None:
    """The part and the bit, 0 for the lowest, if each element differs in this bit alone."""
    flips = pair.own ^ pair.reference
    masks = [(part, mask % 2 ** (8 * flips.dtype.itemsize)) for part, mask in enumerate(flips[0].tolist()) if mask]
    part, mask = masks[0]
    if len(masks) > 1 or mask & (mask - 1) or not (flips == flips[0]).all():
        return None
    return part, mask.bit_length() - 1


def _describe_common_bit(pair: Pair) -> str:
    """For example ``bit 22 (mantissa)``; empty without a common bit."""
    if not (found := common_bit(pair)):
        return ""
    part, bit = found
    of_part = f" of the {('real', 'imaginary')[part]} part" if pair.own.shape[1] == 2 else ""
    # float8_e8m0fnu has exponent bits only.
    is_sign = bit == 8 * pair.dtype.itemsize - 1 and pair.dtype != torch.float8_e8m0fnu
    if pair.dtype not in MANTISSA_BITS:
        return f"bit {bit}{of_part}"
    field = "sign" if is_sign else "mantissa" if bit < MANTISSA_BITS[pair.dtype] else "exponent"
    return f"bit {bit} ({field}){of_part}"


def _in_order(bits: Tensor) -> Tensor:
    """Elements sorted by their first part, then their second."""
    for part in reversed(range(bits.shape[1])):
        bits = bits[bits[:, part].argsort(stable=True)]
    return bits


def _moves_whole_rows(pair: Pair) -> bool:
    if len(pair.shape) < 2:
        return False
    sides = (bits.view(pair.shape[0], -1)[pair.rows] for bits in (pair.all_own, pair.all_reference))
    (own, own_times), (reference, times) = (torch.unique(side, dim=0, return_counts=True) for side in sides)
    return torch.equal(own, reference) and torch.equal(own_times, times)


def _count_non_finite(numbers: Tensor, changed: Tensor) -> str:
    """``3 NaN and 1 inf``. A complex number counts once for each kind among its parts."""
    kinds = {"NaN": numbers.isnan(), "inf": numbers.isposinf(), "-inf": numbers.isneginf()}
    counts = {name: int((mask & changed).any(dim=1).sum()) for name, mask in kinds.items()}
    return " and ".join(f"{count} {name}" for name, count in counts.items() if count)


def _few_rows(pair: Pair) -> str | None:
    """The text of the rows that differ, if the tensor has rows and most rows are equal."""
    if len(pair.shape) < 2 or 2 * len(pair.rows) >= pair.shape[0]:
        return None
    return format_rows(pair.rows, pair.shape[0])
