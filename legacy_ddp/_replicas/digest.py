"""Digests of tensors, for a comparison between the ranks of one job.

Memory of the CPU is read by zlib as a CRC-32, in one pass. A change within 32 neighbouring bits always shows; another
change goes unseen with probability 2**-32. On a device every 64-bit word is mixed with its place, and the words are
added: few operations, whatever the number of tensors, and the host does not wait. Equal tensors have equal digests only
on devices of the same kind; ranks with tensors on other devices are refused before.

Traces have digests that do not depend on the device, see ``debug/_operations/digest``.
"""

import ctypes
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias, TypeVar

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.layout import fingerprint
from legacy_ddp._torch.device import read_vectors

T = TypeVar("T")
# Vectors that may be on devices, and a function from the numbers in them to a result.
Begun: TypeAlias = tuple[list[torch.Tensor], Callable[[Sequence[Sequence[int]]], T]]

MULTIPLIER = 6364136223846793005  # of Knuth's MMIX generator (The Art of Computer Programming 2, 3.3.4)
GAMMA = 0x9E3779B97F4A7C15 - 2**64  # of splitmix64
# Smaller tensors are joined before they are read, MAX_JOINED at a time: a call for each takes longer than the copy.
SMALL_BYTES = 2**12
MAX_JOINED = 2**10
SUM_BYTES = 2**25  # begin_sums() joins as many bytes in a copy, and needs the same memory once more


def digest_all(tensors: Iterable[torch.Tensor | None]) -> int:
    """One signed 64-bit number for all tensors in order: their bits, their sizes, and the positions of None."""
    vectors, finish = begin_digest(tensors)
    return finish(read_vectors(vectors))


def digest_each(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The digest of each tensor. The host waits once."""
    begun = [begin_digest([tensor]) for tensor in tensors]
    read = iter(read_vectors([vector for vectors, _ in begun for vector in vectors]))
    return [finish([next(read) for _ in vectors]) for vectors, finish in begun]


@torch.no_grad()
def begin_digest(tensors: Iterable[torch.Tensor | None]) -> Begun[int]:
    """Vectors on devices, and a function from the numbers in the vectors to the result of :func:`digest_all`.

    So a caller reads the vectors together with other numbers. Tensors on the CPU add no vector, but sparse ones do.
    """
    sizes: list[int] = []
    groups: dict[tuple[torch.device, torch.dtype], tuple[int, list[torch.Tensor], list[torch.Tensor]]] = {}
    for tensor in tensors:
        if tensor is None:
            sizes.append(-1)
            continue
        index, small, large = groups.setdefault((tensor.device, tensor.dtype), (len(groups), [], []))
        sizes += index, tensor.numel()
        # Never by contiguity, which may be another on another rank.
        can_join = tensor.layout is torch.strided and not tensor.is_quantized and not internals.has_own_dispatch(tensor)
        (small if can_join and tensor.nbytes <= SMALL_BYTES else large).append(tensor)
    checksum, pieces = 0, []
    for _, small, large in groups.values():
        joined = (internals.flattened(small[start : start + MAX_JOINED]) for start in range(0, len(small), MAX_JOINED))
        for tensor in chain(large, joined):
            if has_memory(tensor):
                checksum = add_memory(checksum, tensor, 0, tensor.nbytes)
            else:
                pieces.append(as_bytes(tensor))
    return begin_sums(pieces), lambda numbers: fingerprint(repr((sizes, checksum, numbers)).encode())


@torch.no_grad()
def begin_sums(pieces: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A number for each 32 MiB of all ``pieces``: vectors of int64, one for each device. The host does not wait.

    The pieces, of one dimension of uint8, are joined: eleven operations for each 32 MiB. Every operation is on
    integers, so that the numbers do not depend on the order in which a device adds.
    """
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for joined in _fill(pieces):
        device = joined[0].device
        padding = torch.zeros(8, dtype=torch.uint8, device=device)
        zero = padding.view(torch.int64)
        words = torch.cat([*joined, padding[: -sum(piece.numel() for piece in joined) % 8]]).view(torch.int64)
        state = torch.arange(words.numel(), device=device).mul_(GAMMA)
        advance(state, [words, zero, zero])
        sums.setdefault(device, []).append(state.sum().view(1))
    return [found[0] if len(found) == 1 else torch.cat(found) for found in sums.values()]


def advance(state: torch.Tensor, rows: Iterable[torch.Tensor]) -> None:
    """Mix each row of words into the states: ``x = word + MULTIPLIER * state``, then ``state = x ^ (x >> 32)``.

    Each step is invertible: a single changed word always changes the state. Without the shift two flips of bit 63 would
    cancel.
    """
    low, high = state.view(torch.int32).view(-1, 2).unbind(1)
    for row in rows:
        torch.add(row, state, alpha=MULTIPLIER, out=state)
        low.bitwise_xor_(high)


def is_digestible(tensor: torch.Tensor) -> bool:
    """Whether the tensor is strided or sparse COO, and neither packed, nor meta, nor around other tensors."""
    is_plain = tensor.layout in (torch.strided, torch.sparse_coo) and not tensor.is_meta
    return is_plain and not internals.is_packed(tensor) and not internals.wraps_others(tensor)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bits in row-major order, one dimension of uint8: a view of a contiguous tensor, otherwise a copy."""
    if not is_digestible(tensor):
        kind = tensor.dtype if tensor.is_quantized else "meta" if tensor.is_meta else tensor.layout
        raise TypeError(f"tensor cannot be digested: got a {kind} one, expected a strided or sparse COO tensor")
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return torch.cat([as_bytes(tensor.indices()), as_bytes(tensor.values())])
    if tensor.is_quantized:
        quantizer = torch.tensor(list(internals.quantizer_of(tensor).encode()), dtype=torch.uint8, device=tensor.device)
        return torch.cat([as_bytes(internals.integers_of(tensor)), quantizer])
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    # Not view(-1), which keeps any stride of a tensor with a single element.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in memory of the CPU: not of a sparse or fake tensor, for example."""
    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not internals.is_packed(tensor)
    return is_plain and not internals.has_own_dispatch(tensor)


def add_memory(checksum: int, tensor: torch.Tensor, start: int, stop: int) -> int:
    """``checksum`` (from 0 on) continued with the bytes ``start`` to ``stop`` of the tensor in row-major order. Of a
    quantized tensor, also with scale and zero point.

    A tensor of a compiler, or around other tensors, has no memory: a TypeError.
    """
    if not 0 <= start <= stop <= tensor.nbytes:
        raise ValueError(f"bytes are not of the tensor: got {start} to {stop}, expected 0 to {tensor.nbytes} at most")
    if tensor.is_quantized:
        checksum = zlib.crc32(internals.quantizer_of(tensor).encode(), checksum)
        tensor = internals.integers_of(tensor)
    if start == stop:  # an empty tensor has no memory
        return checksum
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    address = 0 if internals.has_own_dispatch(tensor) else tensor.data_ptr()
    if not address:
        raise TypeError(f"the tensor has no memory: got {type(tensor).__name__}, expected a tensor with a storage")
    # `tensor` keeps the memory alive until the checksum is there.
    return zlib.crc32((ctypes.c_char * (stop - start)).from_address(address + start), checksum)


def _fill(pieces: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The pieces of a device, up to ``SUM_BYTES`` at a time. A larger piece is cut."""
    waiting: dict[torch.device, list[torch.Tensor]] = {}
    sizes: dict[torch.device, int] = {}
    for piece in chain.from_iterable(torch.split(piece, SUM_BYTES) for piece in pieces):
        device = piece.device
        if sizes.get(device, 0) + piece.numel() > SUM_BYTES:
            yield waiting.pop(device)
            sizes[device] = 0
        sizes[device] = sizes.get(device, 0) + piece.numel()
        waiting.setdefault(device, []).append(piece)
    yield from waiting.values()
