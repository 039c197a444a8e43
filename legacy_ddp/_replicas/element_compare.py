"""Comparison of two tensors of the same shape and dtype, element by element. Pure.

Bits are compared in logical order: strides do not matter, and -0.0 differs from 0.0. The kinds of differences and their
order are in ``element_kinds``.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from legacy_ddp._replicas.element_kinds import (
    Pair,
    by_blocks,
    classify,
    common_bit,
    find_differences,
    format_bits,
    format_share,
    format_value,
    unravel_index,
)
from legacy_ddp._text import WIDTH, wrap


@dataclass(frozen=True)
class ElementDifference:
    """The difference between the tensor of a rank and the reference.

    ``count``: the number of elements that differ, of ``numel``. ``first_index``: of the first, a number per dimension,
    empty for a tensor without dimensions. ``values``: the text of both values at ``first_index``, own value first; the
    texts differ. ``greatest``: the greatest absolute difference, which may be inf; ``greatest_index``: its first index.
    Both are None if each pair of values holds a NaN. ``kind``: an entry of ``element_kinds.KINDS``; ``words``: the kind
    with numbers and a likely cause, as text. ``bit``: the flipped bit of the element (of its real or imaginary part), 0
    for the lowest bit; None if more than a single bit differs.

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
        share = f"{self.count} of {self.numel} elements {differ} ({format_share(self.count, self.numel)})"
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

    Allocates memory on the device of the tensor and waits for the device. Measured for float32: little memory (a mask)
    if few elements differ, up to 17 times the size of the tensor if all differ. Copy both tensors to the CPU first if
    this does not fit.

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
    kind, text = classify(pair)
    bit = common_bit(pair) if kind == "one bit" else None
    greatest, greatest_index = _greatest(pair)
    return ElementDifference(
        count=pair.count,
        numel=own.numel(),
        first_index=unravel_index(int(pair.where[0]), own.shape),
        values=_values(pair, own.dtype),
        greatest=greatest,
        greatest_index=greatest_index,
        kind=kind,
        words=text,
        bit=None if bit is None else bit[1],
    )


def _greatest(pair: Pair) -> tuple[float | None, tuple[int, ...] | None]:
    """The greatest absolute difference and its first index."""
    if pair.dtype.is_floating_point:
        apart = by_blocks(_float_gap, pair.own_numbers, pair.reference_numbers)
    else:
        apart = by_blocks(_integer_gap, pair.own.view(pair.dtype), pair.reference.view(pair.dtype))
    most = int(apart.argmax())
    if apart[most] < 0:
        return None, None
    return float(apart[most]), unravel_index(int(pair.where[most]), pair.shape)


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


def _values(pair: Pair, dtype: torch.dtype) -> tuple[str, str]:
    """The text of the first pair that differs. Equal texts, as of two NaNs, include the bits."""
    own, reference = format_value(pair.own[0], dtype), format_value(pair.reference[0], dtype)
    if own != reference:
        return own, reference
    return f"{own} ({format_bits(pair.own[0])})", f"{reference} ({format_bits(pair.reference[0])})"
