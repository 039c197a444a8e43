"""Classification of the difference between two tensors.

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
from math import frexp, isfinite, ldexp

import torch
from torch import Tensor

from legacy_ddp._replicas.element_pair import Pair, by_blocks, tolerance, ulp_apart
from legacy_ddp._replicas.element_text import MANTISSA_BITS, format_bit, format_rows, unravel_index

SAMPLE = 2**16  # the median of this many quotients gives the factor


def classify(pair: Pair) -> tuple[str, str]:
    """The kind and its text."""
    return next((kind, text) for kind, describe in CLASSES.items() if (text := describe(pair)))


def _one_bit(pair: Pair) -> str | None:
    bit = _common_bit(pair)
    if pair.count > 1 or not bit:
        return None
    same = _same_values(pair)
    return f"one bit flipped: {bit}" + (
        f", {same}" if same else ", which rounding can do too" if _rounding(pair) else ""
    )


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
    # The sum does not depend on the order: sums that differ, the usual case, save the sort.
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
    bit = _common_bit(pair)
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


def _common_bit(pair: Pair) -> str | None:
    """The text of the bit, if each element differs in this bit alone."""
    flips = pair.own ^ pair.reference
    masks = [(part, mask % 2 ** (8 * flips.dtype.itemsize)) for part, mask in enumerate(flips[0].tolist()) if mask]
    part, mask = masks[0]
    if len(masks) > 1 or mask & (mask - 1) or not (flips == flips[0]).all():
        return None
    of_part = f" of the {('real', 'imaginary')[part]} part" if flips.shape[1] == 2 else ""
    return format_bit(mask.bit_length() - 1, pair.dtype) + of_part


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
