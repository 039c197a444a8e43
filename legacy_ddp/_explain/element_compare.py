"""Comparison of two tensors of the same shape and dtype, element by element. Pure.

Bits are compared in logical order: strides do not matter, and -0.0 differs from 0.0. The first matching entry of
``CLASSES`` is the kind of the difference:

one bit      a single bit of a single element; the text says if rounding can do this, too
same values  every differing pair is equal as numbers: 0.0 and -0.0, or two NaNs
permutation  the same elements, bit by bit, at different indices
scaled       99 % of the nonzero elements are a common factor times the reference, within rounding
rounding     all elements are finite, and the difference is a few ulp
non-finite   NaN or inf on a single side
some         any other difference
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from legacy_ddp._text import WIDTH, wrap

BLOCK = 2**20  # elements of a block, see _by_blocks()
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
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


@dataclass(frozen=True)
class ElementDifference:
    """The difference between the tensor of a rank and the reference.

    ``count``: the number of elements that differ, of ``numel``. ``first_index``: of the first, a number per dimension,
    empty for a tensor without dimensions. ``values``: the text of both values at ``first_index``, own value first; the
    texts differ. ``greatest``: the greatest absolute difference, which may be inf; ``greatest_index``: its first index.
    Both are None if each pair of values holds a NaN. ``kind``: "one bit", "same values", "permutation", "scaled",
    "rounding", "non-finite" or "some"; ``words``: the kind with numbers and a likely cause, as text. ``bit``: the
    flipped bit of the element (of its real or imaginary part), 0 for the lowest bit; None if more than a bit differs.

    Example:
        >>> if rank == 1:
        ...     model.module.weight.data[0, 1] = 5.0
        >>> (difference,) = check_replicas(model).differences
        >>> found = difference.elements[1]  # of rank 1
        >>> found.count, found.first_index, found.values
        (1, (0, 1), ('5.0', '0.0'))
    """

    count: int
    numel: int
    first_index: tuple[int, ...]
    values: tuple[str, str]
    greatest: float | None
    greatest_index: tuple[int, ...] | None
    kind: str
    words: str
    bit: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as strict JSON: tuples become lists, an infinite ``greatest`` becomes the text ``inf``."""
        row = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return row | ({"greatest": "inf"} if self.greatest == math.inf else {})

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in row.items()
        }
        return cls(**fields | ({"greatest": math.inf} if fields["greatest"] == "inf" else {}))

    def lines(self, indent: str = "") -> list[str]:
        """The report: lines of at most 80 columns with ``indent`` in front; continued lines are indented further."""
        own, reference = self.values
        differ = "differs" if self.count == 1 else "differ"
        share = f"{self.count} of {self.numel} elements {differ} ({_format_share(self.count, self.numel)})"
        first = f"first at {self.first_index}: {own} here, {reference} there"
        fits = len(f"{indent}{share}, {first}") <= WIDTH
        texts = [
            *([f"{share}, {first}"] if fits else [share, first]),
            "no absolute difference: a NaN in each pair"
            if self.greatest is None
            else f"greatest absolute difference {self.greatest:.6g} at {self.greatest_index}",
            self.words,
        ]
        return [line for text in texts for line in wrap(text, indent)]


def compare_elements(own: Tensor, reference: Tensor) -> ElementDifference | None:
    """The difference of ``own`` from ``reference``; None if all bits are equal.

    Allocates memory on the device of the tensor and waits for the device. Measured for float32: a mask if few elements
    differ, up to 17 times the size of the tensor if all differ. If this does not fit, first copy both to the CPU.
    """
    if own.shape != reference.shape or own.dtype != reference.dtype:
        raise ValueError(
            f"tensors cannot be compared by element: got {own.dtype} {tuple(own.shape)}, "
            f"expected {reference.dtype} {tuple(reference.shape)}; compare their layouts first"
        )
    own_bits, reference_bits = _bits(own), _bits(reference)
    where = (own_bits != reference_bits).any(dim=1).nonzero().flatten()
    pair = _Pair(own.shape, _part_dtype(own.dtype), own_bits, reference_bits, where)
    if not pair.count:
        return None
    kind, text = next((kind, text) for kind, describe in CLASSES.items() if (text := describe(pair)))
    bit = _single_bit(pair) if kind == "one bit" else None
    greatest, greatest_index = _greatest(pair)
    return ElementDifference(
        count=pair.count,
        numel=own.numel(),
        first_index=_unravel_index(int(pair.where[0]), own.shape),
        values=_values(pair, own.dtype),
        greatest=greatest,
        greatest_index=greatest_index,
        kind=kind,
        words=text,
        bit=None if bit is None else bit[1],
    )


def format_element(tensor: Tensor) -> str:
    """The text of a tensor with a single element; texts of equal dtype are equal only if the bits are."""
    bits = _bits(tensor)[0].cpu()
    text = _format_value(bits, tensor.dtype)
    return f"{text} ({_format_bits(bits)})" if "nan" in text else text


def _format_share(count: int, total: int) -> str:
    """``count`` in percent of ``total``, never rounded to 0 % or 100 %."""
    if 0 < count < 0.001 * total:
        return "under 0.1 %"
    return "over 99.9 %" if 0.999 * total < count < total else f"{100 * count / total:.1f} %"


@dataclass(frozen=True, eq=False)
class _Pair:
    """The bits of two tensors, ``[numel, parts]``. A complex number has two parts, other numbers have one.

    ``own``, ``reference`` and the properties derived from them hold only the elements that differ.
    """

    shape: torch.Size
    dtype: torch.dtype  # of a part
    all_own: Tensor
    all_reference: Tensor
    where: Tensor  # flat indices of the elements that differ, ascending

    @cached_property
    def own(self) -> Tensor:
        return self.all_own[self.where]

    @cached_property
    def reference(self) -> Tensor:
        return self.all_reference[self.where]

    @cached_property
    def own_numbers(self) -> Tensor:
        return _as_numbers(self.own, self.dtype)

    @cached_property
    def reference_numbers(self) -> Tensor:
        return _as_numbers(self.reference, self.dtype)

    @cached_property
    def finite(self) -> Tensor:
        return self.own_numbers.isfinite() & self.reference_numbers.isfinite()

    @property
    def count(self) -> int:
        return len(self.where)


def _bits(tensor: Tensor) -> Tensor:
    """The bits of the elements as integers, ``[numel, parts]``."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor.unsqueeze(-1)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parts.dtype.itemsize]
    return parts.contiguous().view(-1).view(integer).view(-1, parts.shape[-1])


def _part_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a part of an element; uint8 for bool and packed floats."""
    part = dtype.to_real() if dtype.is_complex else dtype
    return part if part in MANTISSA_BITS or part in _INTEGERS else torch.uint8


def _as_numbers(bits: Tensor, dtype: torch.dtype) -> Tensor:
    narrow = dtype.is_floating_point and dtype.itemsize < 4  # their differences and ratios fit into float32
    return bits.view(dtype).to(torch.float32 if narrow else torch.float64)


def _by_blocks(step: Callable[[Tensor, Tensor], Tensor], own: Tensor, reference: Tensor) -> Tensor:
    """``step(own, reference)``, block by block: the temporary tensors do not grow with ``own``."""
    starts = range(0, len(own), BLOCK)
    return torch.cat([step(own[start : start + BLOCK], reference[start : start + BLOCK]) for start in starts])


def _format_value(bits: Tensor, dtype: torch.dtype) -> str:
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


def _format_bits(bits: Tensor) -> str:
    """Hexadecimal text, as ``0x7fc00001``; the two parts of a complex number are separated by a comma."""
    digits = 2 * bits.dtype.itemsize
    return ", ".join(f"0x{part % 16**digits:0{digits}x}" for part in bits.tolist())


def _unravel_index(flat_index: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat_index, remainder = divmod(flat_index, size)
        index.append(remainder)
    return tuple(reversed(index))


def _tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """Relative and absolute tolerance for two roundings."""
    if dtype not in MANTISSA_BITS:
        return 2.0**-51, 0.0  # integers, converted to float64
    if MANTISSA_BITS[dtype] < 7:
        return 0.0, 0.0  # 8-bit floats: too few bits to recognise a factor
    relative = 2.0 ** (1 - MANTISSA_BITS[dtype])
    return relative, relative * torch.finfo(dtype).tiny


def _greatest(pair: _Pair) -> tuple[float | None, tuple[int, ...] | None]:
    if pair.dtype.is_floating_point:
        apart = _by_blocks(_float_gap, pair.own_numbers, pair.reference_numbers)
    else:
        apart = _by_blocks(_integer_gap, pair.own.view(pair.dtype), pair.reference.view(pair.dtype))
    most = int(apart.argmax())
    if apart[most] < 0:
        return None, None
    return float(apart[most]), _unravel_index(int(pair.where[most]), pair.shape)


def _float_gap(own: Tensor, reference: Tensor) -> Tensor:
    """The absolute difference of each pair; -1 for a pair with a NaN."""
    apart = (own - reference).abs()
    apart = torch.hypot(apart[:, 0], apart[:, 1]) if apart.shape[1] == 2 else apart[:, 0]
    return torch.where(apart.isnan(), -1, apart)


def _integer_gap(own: Tensor, reference: Tensor) -> Tensor:
    if own.dtype == torch.uint64:
        # A signed order with the same distances: torch has no minimum or maximum for uint64.
        own, reference = (number.view(torch.int64) ^ torch.iinfo(torch.int64).min for number in (own, reference))
    own, reference = own[:, 0].to(torch.int64), reference[:, 0].to(torch.int64)
    # The difference may need 64 unsigned bits. In float64, neighbours beyond 2**53 would be equal.
    apart = torch.maximum(own, reference) - torch.minimum(own, reference)
    return apart.double() + (apart < 0) * 2.0**64


def _values(pair: _Pair, dtype: torch.dtype) -> tuple[str, str]:
    """The texts of the first pair that differs, with the bits if the texts are equal, as of two NaNs."""
    own, reference = _format_value(pair.own[0], dtype), _format_value(pair.reference[0], dtype)
    if own != reference:
        return own, reference
    return f"{own} ({_format_bits(pair.own[0])})", f"{reference} ({_format_bits(pair.reference[0])})"


def _one_bit(pair: _Pair) -> str | None:
    if pair.count > 1 or not (found := _single_bit(pair)):
        return None
    part, bit = found
    of_part = f" of the {('real', 'imaginary')[part]} part" if pair.own.shape[1] == 2 else ""
    mantissa = MANTISSA_BITS.get(pair.dtype)
    if mantissa is None:
        return f"one bit flipped: bit {bit}{of_part}"
    # float8_e8m0fnu has exponent bits only.
    is_sign = bit == 8 * pair.dtype.itemsize - 1 and pair.dtype != torch.float8_e8m0fnu
    field = "sign" if is_sign else "mantissa" if bit < mantissa else "exponent"
    same, rounds = _same_values(pair), _rounding(pair)
    reading = f", {same}" if same else ", which rounding can do too" if rounds else ""
    return f"one bit flipped: bit {bit} ({field}){of_part}{reading}"


def _single_bit(pair: _Pair) -> tuple[int, int] | None:
    """Part and bit (0 for the lowest) of the first pair that differs; None if this pair differs in more bits."""
    flips = (pair.own[0] ^ pair.reference[0]).tolist()
    masks = [(part, mask % 2 ** (8 * pair.own.dtype.itemsize)) for part, mask in enumerate(flips) if mask]
    part, mask = masks[0]
    return None if len(masks) > 1 or mask & (mask - 1) else (part, mask.bit_length() - 1)


def _same_values(pair: _Pair) -> str | None:
    if pair.dtype not in MANTISSA_BITS:
        return None
    differs = pair.own != pair.reference
    zeros = differs & (pair.own_numbers == pair.reference_numbers)
    nans = differs & pair.own_numbers.isnan() & pair.reference_numbers.isnan()
    if not torch.equal(zeros | nans, differs):
        return None
    named = {"-0.0 against 0.0": zeros, "NaN on both sides with other bits": nans}
    return f"equal as numbers: {' and '.join(text for text, mask in named.items() if mask.any())}"


def _permutation(pair: _Pair) -> str | None:
    # Sums do not depend on the order. They mostly differ, and then no sort is needed.
    if pair.own.sum(dtype=torch.int64) != pair.reference.sum(dtype=torch.int64):
        return None
    if not torch.equal(_in_order(pair.own), _in_order(pair.reference)):
        return None
    if pair.count == 2:
        first, second = (_unravel_index(flat_index, pair.shape) for flat_index in pair.where.tolist())
        return f"permutation: {first} and {second} swapped"
    return "permutation: the same elements in other places"


def _in_order(bits: Tensor) -> Tensor:
    """``bits``, sorted by the first part, then by the second."""
    for part in reversed(range(bits.shape[1])):
        bits = bits[bits[:, part].argsort(stable=True)]
    return bits


def _scaled(pair: _Pair) -> str | None:
    own, reference = pair.own_numbers, pair.reference_numbers
    nonzero = (own != 0) | (reference != 0)
    unchanged = torch.ones(len(pair.all_own), dtype=torch.bool, device=pair.where.device)
    unchanged[pair.where] = False
    unchanged_nonzero = int(torch.count_nonzero(_as_numbers(pair.all_own[unchanged], pair.dtype)))
    # One number gives the factor, and at least two more must confirm it.
    needed = max(3, 0.99 * (int(nonzero.sum()) + unchanged_nonzero))
    if int(nonzero.sum()) < needed:
        return None
    some = slice(None, None, 1 + pair.count // SAMPLE)
    factor = float((own[some] / reference[some]).nanmedian())  # 0 / 0 is NaN
    relative, absolute = _tolerance(pair.dtype)
    if not math.isfinite(factor) or abs(factor - 1) <= 2 * relative:
        return None

    def fit(own: Tensor, reference: Tensor) -> Tensor:
        return torch.isclose(own, factor * reference, rtol=relative, atol=absolute, equal_nan=True)

    fits = _by_blocks(fit, own, reference)
    if int((fits & nonzero).sum()) < needed or not (fits | pair.finite).all():
        return None
    cause = "a clip, a rate, a decay or a write of its own"
    cause = {-1.0: "every sign changed", 0.0: "all zero here"}.get(factor, cause)
    return f"{factor + 0.0:.6g} times the reference: {cause}"


def _rounding(pair: _Pair) -> str | None:
    mantissa = MANTISSA_BITS.get(pair.dtype, 0)
    if mantissa < 7 or not pair.finite.all():
        return None
    # Measured for sums of 3 to 64 terms in two orders, and for matmuls computed in two ways: elements near zero are
    # thousands of ulp apart, but at most 4.3 ulp of the greatest element; at least 83 % are within 16 of their own ulp.
    own, reference = pair.own_numbers, pair.reference_numbers
    greatest = max(float(own.abs().max()), float(reference.abs().max()))
    apart = float((own - reference).abs_().max()) / max(math.ldexp(1.0, math.frexp(greatest)[1] - 1 - mantissa), 5e-324)
    ulp = _by_blocks(_ulp_apart, pair.own, pair.reference)
    if apart > 8 or int(((ulp >= 0) & (ulp <= 16)).sum()) < 0.75 * ulp.numel():  # below 0: an overflow of 64 bits
        return None
    return f"at most {apart:.2g} ulp of the greatest apart: of rounding size"


def _ulp_apart(own: Tensor, reference: Tensor) -> Tensor:
    """The distance of floats, given their bits, in ulp: 0 between 0.0 and -0.0; below 0 if 64 bits overflow."""
    return (_ordered(own) - _ordered(reference)).abs()


def _ordered(bits: Tensor) -> Tensor:
    """Integers in the order of the floats: 1 for each ulp, 0 for both zeros. Wrong for 8-bit floats without a sign."""
    magnitude = bits.to(torch.int64) & torch.iinfo(bits.dtype).max
    return torch.where(bits < 0, -magnitude, magnitude)


def _non_finite(pair: _Pair) -> str | None:
    own, reference = pair.own_numbers, pair.reference_numbers
    changed = (own != reference) & ~(own.isnan() & reference.isnan())
    sides = {"here": _count_non_finite(own, changed), "there": _count_non_finite(reference, changed)}
    found = [f"{counts} {side}" for side, counts in sides.items() if counts]
    return f"not finite: {'; '.join(found)}" if found else None


def _count_non_finite(numbers: Tensor, changed: Tensor) -> str:
    """``3 NaN and 1 inf``. A complex number counts once for each kind among its parts."""
    kinds = {"NaN": numbers.isnan(), "inf": numbers.isposinf(), "-inf": numbers.isneginf()}
    counts = {name: int((mask & changed).any(dim=1).sum()) for name, mask in kinds.items()}
    return " and ".join(f"{count} {name}" for name, count in counts.items() if count)


CLASSES: dict[str, Callable[[_Pair], str | None]] = {
    "one bit": _one_bit,
    "same values": _same_values,
    "permutation": _permutation,
    "scaled": _scaled,
    "rounding": _rounding,
    "non-finite": _non_finite,
    "some": lambda _: "no known pattern",
}
