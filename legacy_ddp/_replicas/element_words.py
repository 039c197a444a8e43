"""How are values, bits, places and rows of a tensor said?"""

import torch
from torch import Tensor

SPANS = 3  # of rows, named before "and ... more"
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


def say_value(bits: Tensor, dtype: torch.dtype) -> str:
    """One element, given the bits of its parts: the shortest text that only this number of its dtype rounds from."""
    if dtype.is_complex:
        real, imaginary = (_shortest(part, dtype.to_real()) for part in bits)
        return f"{real}{'' if imaginary.startswith('-') else '+'}{imaginary}j"
    if dtype in MANTISSA_BITS:
        return _shortest(bits[0], dtype)
    if dtype == torch.bool:
        return str(bool(bits[0]))
    # A packed float has no value of its own: its byte.
    return str(bits.view(torch.uint8 if dtype.is_floating_point else dtype)[0].item())


def _shortest(bits: Tensor, dtype: torch.dtype) -> str:
    number = float(bits.unsqueeze(0).view(dtype).double())
    for digits in range(1, 18):
        text = float(f"{number:.{digits}g}")
        if float(torch.tensor([text], dtype=torch.float64).to(dtype).double()) == number:
            return repr(text)
    return repr(number)  # NaN


def say_bits(bits: Tensor) -> str:
    """In hexadecimal, as ``0x7fc00001``; a complex number's two parts with a comma."""
    digits = 2 * bits.dtype.itemsize
    return ", ".join(f"0x{part % 16**digits:0{digits}x}" for part in bits.tolist())


def say_bit(bit: int, dtype: torch.dtype) -> str:
    """``bit 22 (mantissa)``; 0 is the least significant one."""
    if dtype not in MANTISSA_BITS:
        return f"bit {bit}"
    # float8_e8m0fnu is all exponent.
    if bit == 8 * dtype.itemsize - 1 and dtype != torch.float8_e8m0fnu:
        return f"bit {bit} (sign)"
    return f"bit {bit} ({'mantissa' if bit < MANTISSA_BITS[dtype] else 'exponent'})"


def say_share(count: int, total: int) -> str:
    """In percent, never rounded to none or to all."""
    if 0 < count < 0.001 * total:
        return "under 0.1 %"
    return "over 99.9 %" if 0.999 * total < count < total else f"{100 * count / total:.1f} %"


def say_rows(rows: Tensor, total: int) -> str:
    """``rows 3, 7-9 and 12 more of 1000``, given their numbers, ascending."""
    # No loop over the rows: there may be millions.
    last = (rows.diff() != 1).nonzero().flatten()
    firsts = torch.cat([rows[:1], rows[last[:SPANS] + 1]])[:SPANS].tolist()
    lasts = torch.cat([rows[last[:SPANS]], rows[-1:]])[:SPANS].tolist()
    spans = [f"{first}-{last}" if last > first else str(first) for first, last in zip(firsts, lasts, strict=True)]
    more = len(rows) - sum(last - first + 1 for first, last in zip(firsts, lasts, strict=True))
    text = f"{', '.join(spans)} and {more} more" if more else ", ".join(spans)
    return f"{'row' if len(rows) == 1 else 'rows'} {text} of {total}"


def position(place: int, shape: torch.Size) -> tuple[int, ...]:
    """The index of the ``place``-th element in logical order."""
    index = []
    for size in reversed(shape):
        place, here = divmod(place, size)
        index.append(here)
    return tuple(reversed(index))
