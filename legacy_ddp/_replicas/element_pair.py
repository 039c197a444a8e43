"""Which elements of two tensors differ, and what do they hold, as bits and as numbers?"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from legacy_ddp._replicas.element_words import MANTISSA_BITS

BLOCK = 2**20
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True, eq=False)
class Pair:
    """Two tensors' bits, ``[numel, parts]``, and ``where`` they differ: flat places, ascending.

    A complex number has two parts, all others one; ``dtype`` is a part's.
    """

    shape: torch.Size
    dtype: torch.dtype
    all_own: Tensor
    all_reference: Tensor
    where: Tensor

    @cached_property
    def own(self) -> Tensor:
        """Bits, like all that follows only of the elements that differ."""
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
        """Those that hold a difference, ascending."""
        rows: Tensor = torch.unique_consecutive(self.where // self.row_numel)
        return rows

    @property
    def unchanged_nonzero(self) -> int:
        """How many parts of the elements that do not differ are nonzero."""
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
    """Where their bits differ; for two tensors of the same shape and dtype."""
    own_bits, reference_bits = _bits(own), _bits(reference)
    where = (own_bits != reference_bits).any(dim=1).nonzero().flatten()
    return Pair(own.shape, _part_dtype(own.dtype), own_bits, reference_bits, where)


def _bits(tensor: Tensor) -> Tensor:
    """The elements' bits as integers, ``[numel, parts]``: a complex number has two parts, all others one."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor.unsqueeze(-1)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parts.dtype.itemsize]
    return parts.contiguous().view(-1).view(integer).view(-1, parts.shape[-1])


def _part_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a part of an element is read as; bool and packed floats are their byte."""
    part = dtype.to_real() if dtype.is_complex else dtype
    return part if part in MANTISSA_BITS or part in _INTEGERS else torch.uint8


def as_numbers(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that the bits mean, in float64 unless float32 holds them and what is computed with them."""
    narrow = dtype.is_floating_point and dtype.itemsize < 4
    return bits.view(dtype).to(torch.float32 if narrow else torch.float64)


def by_blocks(step: Callable[[Tensor, Tensor], Tensor], own: Tensor, reference: Tensor) -> Tensor:
    """``step(own, reference)``, with temporaries that do not grow with the tensors."""
    starts = range(0, len(own), BLOCK)
    return torch.cat([step(own[start : start + BLOCK], reference[start : start + BLOCK]) for start in starts])


def ulp_apart(own: Tensor, reference: Tensor) -> Tensor:
    """The distance of the floats with these bits; zero for both zeros, below zero where it does not fit in 64 bits."""
    return (_ordered(own) - _ordered(reference)).abs()


def _ordered(bits: Tensor) -> Tensor:
    """Integers one apart for floats one ulp apart; both zeros are 0. Eight-bit floats without a sign do not fit."""
    magnitude = bits.to(torch.int64) & torch.iinfo(bits.dtype).max
    return torch.where(bits < 0, -magnitude, magnitude)


def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """Of two roundings, relative and absolute; none for eight bits, which are too few to tell a factor from chance."""
    if dtype not in MANTISSA_BITS:
        return 2.0**-51, 0.0  # integers, by way of float64
    if MANTISSA_BITS[dtype] < 7:
        return 0.0, 0.0
    relative = 2.0 ** (1 - MANTISSA_BITS[dtype])
    return relative, relative * torch.finfo(dtype).tiny
