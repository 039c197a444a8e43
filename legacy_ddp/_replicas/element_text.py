"""Text of values, bits, indices and rows of a tensor."""

import torch
from torch import Tensor

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


def format_bit(bit: int, dtype: torch.dtype) -> str:
    """``bit 22 (mantissa)``; bit 0 is the least significant bit."""
    if dtype not in MANTISSA_BITS:
        return f"bit {bit}"
    # float8_e8m0fnu has exponent bits only.
    if bit == 8 * dtype.itemsize - 1 and dtype != torch.float8_e8m0fnu:
        return f"bit {bit} (sign)"
    return f"bit {bit} ({'mantissa' if bit < MANTISSA_BITS[dtype] else 'exponent'})"


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
