"""The elements in which two tensors differ, as bits and as numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from legacy_ddp._replicas.element_text import MANTISSA_BITS, format_bits, format_value

BLOCK = 2**20
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


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
    """The difference of two tensors of the same shape and dtype."""
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
