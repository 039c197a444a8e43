"""How do two tensors of the same shape and dtype differ, element by element?

Pure: nothing is exchanged here. Bits are compared, in logical order, so strides do not matter, and -0.0 differs from
0.0. The classes and their order are in ``element_kinds``.
"""

import math
import textwrap
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from legacy_ddp._replicas.element_kinds import classify
from legacy_ddp._replicas.element_pair import Pair, by_blocks, find_differences
from legacy_ddp._replicas.element_words import position, say_bits, say_share, say_value

WIDTH = 80


@dataclass(frozen=True)
class ElementDifference:
    """How one rank's tensor differs from the reference.

    ``values`` are its own and the reference's at ``first_index``, in words that differ. ``greatest`` is the greatest
    absolute difference, inf included, and ``greatest_index`` the first place that has it; both are None where each pair
    of values holds a NaN. ``kind`` is one of ``element_kinds.KINDS``; ``words`` say it with numbers and a likely cause.
    ``bit``: which bit of the element (of its real or imaginary part) flipped, 0 the lowest, if nothing else differs.
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
        """The fields as strict JSON knows them: tuples become lists, an infinite ``greatest`` the text ``inf``."""
        row = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return row | ({"greatest": "inf"} if self.greatest == math.inf else {})

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        """What :meth:`to_json` was called on."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in row.items()
        }
        return cls(**fields | ({"greatest": math.inf} if fields["greatest"] == "inf" else {}))

    def lines(self, indent: str = "") -> list[str]:
        """The report: lines of at most 80 columns; those that go on are indented further."""
        own, reference = self.values
        differ = "differs" if self.count == 1 else "differ"
        share = f"{self.count} of {self.numel} elements {differ} ({say_share(self.count, self.numel)})"
        first = f"first at {self.first_index}: {own} here, {reference} there"
        fits = len(f"{indent}{share}, {first}") <= WIDTH
        told = [
            *([f"{share}, {first}"] if fits else [share, first]),
            "no absolute difference: a NaN in each pair"
            if self.greatest is None
            else f"greatest absolute difference {self.greatest:.6g} at {self.greatest_index}",
            self.words,
        ]
        wrap = textwrap.TextWrapper(WIDTH, indent, f"{indent}  ", break_on_hyphens=False)
        return [line for text in told for line in wrap.wrap(text)]


def compare_elements(own: Tensor, reference: Tensor) -> ElementDifference | None:
    """How ``own`` differs from ``reference``; None if all bits are the same.

    Takes memory on the tensor's device and waits for it. Measured for float32: nearly nothing where few elements differ
    (a mask), up to 17 times the tensor's size where all do; copy both to the CPU first where that does not fit.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    if own.shape != reference.shape or own.dtype != reference.dtype:
        raise ValueError(
            f"tensors cannot be compared by element: got {own.dtype} {tuple(own.shape)}, "
            f"expected {reference.dtype} {tuple(reference.shape)}; compare their layouts first"
        )
    pair = find_differences(own, reference)
    if not pair.count:
        return None
    kind, words = classify(pair)
    greatest, greatest_index = _greatest(pair)
    return ElementDifference(
        count=pair.count,
        numel=own.numel(),
        first_index=position(int(pair.where[0]), own.shape),
        values=_values(pair, own.dtype),
        greatest=greatest,
        greatest_index=greatest_index,
        kind=kind,
        words=words,
        bit=_flipped_bit(pair) if kind == "one bit" else None,
    )


def _flipped_bit(pair: Pair) -> int:
    flips = pair.own[0] ^ pair.reference[0]
    return (int(flips.sum()) % (1 << 8 * flips.itemsize)).bit_length() - 1


def _greatest(pair: Pair) -> tuple[float | None, tuple[int, ...] | None]:
    """The greatest absolute difference and its first place."""
    if pair.dtype.is_floating_point:
        apart = by_blocks(_float_gap, pair.own_numbers, pair.reference_numbers)
    else:
        apart = by_blocks(_integer_gap, pair.own.view(pair.dtype), pair.reference.view(pair.dtype))
    most = int(apart.argmax())
    if apart[most] < 0:
        return None, None
    return float(apart[most]), position(int(pair.where[most]), pair.shape)


def _float_gap(own: Tensor, reference: Tensor) -> Tensor:
    """The absolute difference of each two; -1 where one is NaN."""
    apart = (own - reference).abs()
    apart = torch.hypot(apart[:, 0], apart[:, 1]) if apart.shape[1] == 2 else apart[:, 0]
    return torch.where(apart.isnan(), -1, apart)


def _integer_gap(own: Tensor, reference: Tensor) -> Tensor:
    if own.dtype == torch.uint64:
        # Signed order with the same distances: uint64 has neither minimum nor maximum.
        own, reference = (number.view(torch.int64) ^ torch.iinfo(torch.int64).min for number in (own, reference))
    own, reference = own[:, 0].to(torch.int64), reference[:, 0].to(torch.int64)
    # The difference may need 64 bits without a sign; float64 alone would call neighbours beyond 2**53 equal.
    apart = torch.maximum(own, reference) - torch.minimum(own, reference)
    return apart.double() + (apart < 0) * 2.0**64


def _values(pair: Pair, dtype: torch.dtype) -> tuple[str, str]:
    """The first pair that differs; where both read the same, such as two NaNs, with their bits."""
    own, reference = say_value(pair.own[0], dtype), say_value(pair.reference[0], dtype)
    if own != reference:
        return own, reference
    return f"{own} ({say_bits(pair.own[0])})", f"{reference} ({say_bits(pair.reference[0])})"
