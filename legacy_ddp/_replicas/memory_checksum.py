"""CRC-32 of the memory of tensors on the CPU: one pass over the bytes, without an operation of torch.

A fifth of the time of a digest (:mod:`legacy_ddp._replicas.digest`) for the tensors of one call. 32 bits: two unequal
memories have the same checksum with probability 2**-32. A change within 32 neighbouring bits always shows.
"""

import ctypes
import zlib

import torch

from legacy_ddp import _torch as internals


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in memory of the CPU: not of a sparse, quantized or fake tensor, for example."""
    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
    return is_plain and not internals.has_own_dispatch(tensor)


def add_memory(checksum: int, tensor: torch.Tensor, start: int, stop: int) -> int:
    """``checksum`` (from 0 on) continued with the bytes ``start`` to ``stop`` of the tensor in row-major order.

    Raises:
        TypeError: the tensor has no memory: it belongs to a compiler, or wraps other tensors.
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    address = 0 if internals.has_own_dispatch(tensor) else tensor.data_ptr()
    if not address:
        raise TypeError(f"the tensor has no memory: got {type(tensor).__name__}, expected a tensor with a storage")
    # `tensor` keeps the memory alive until the checksum is there.
    return zlib.crc32((ctypes.c_char * (stop - start)).from_address(address + start), checksum)
