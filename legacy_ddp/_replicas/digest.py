"""Digests of tensors: 64 bits for all bits of a tensor, in order. Equal bits give equal digests on every device.

A digest is the sum mod 2**64 of the lane states of the tensor's bytes, xor the number of bytes. The bytes, padded with
zeros to 64-bit words, form rows; a lane is a column of words. The state of every lane begins with the key of the lane
and takes in the words of the column, then two words of zero::

    state = fold(word + MULTIPLIER * state)        fold(x) = x ^ (x >> 32), a logical shift

Without the fold a column would be a polynomial mod 2**64, where two flips of bit 63 cancel: the digest would miss a
negated float64 tensor. The product carries low bits up, and the fold brings high bits down. Each step is invertible, so
a single changed word always changes the state.

``MULTIPLIER`` is the multiplier of Knuth's MMIX generator (The Art of Computer Programming 2, 3.3.4). Keys are the
states of splitmix64 from 0 on. The finish by shift, xor and multiplication in turn is also from splitmix64 (Steele,
Lea, Flood 2014, "Fast splittable pseudorandom number generators", OOPSLA).

:func:`begin_sums` is for a device that the host does not wait for: few operations, whatever the number of tensors.

:func:`add_memory` is a CRC-32 of memory on the CPU, one pass over the bytes without an operation of torch, in a fifth
of the time of a digest. Two unequal memories have the same checksum with probability 2**-32. A change within 32
neighbouring bits always shows.
"""

import ctypes
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import TypeAlias, TypeVar

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.layout import fingerprint
from legacy_ddp._errors import argument_errors
from legacy_ddp._torch.device import host_tensor_for, read_vectors

T = TypeVar("T")
# Vectors that may be on devices, and a function from the numbers in them to a result.
Begun: TypeAlias = tuple[list[torch.Tensor], Callable[[Sequence[Sequence[int]]], T]]

MULTIPLIER = 6364136223846793005
GAMMA = 0x9E3779B97F4A7C15 - 2**64
# The numbers of rows and lanes are part of the definition of a digest. More rows leave fewer states to finish, more
# lanes need fewer calls of torch.
MAX_ROWS = 2**6
MIN_LANES = 2**12
# The number of lanes that advance together is no part of it. On a CPU these lanes fit in the cache, and stay below the
# size from which torch uses more threads: the threads of many ranks on a host would wait for each other. On a GPU the
# number of launches should be small.
CPU_LANES = 2**15
GPU_LANES = 2**20
# digest_all() joins tensors of at most SMALL_BYTES into copies of at most CHUNK_BYTES.
SMALL_BYTES = 2**19
CHUNK_BYTES = 2**22
SUM_BYTES = 2**25  # begin_sums() joins as many bytes in a copy, and needs the same memory once more


@argument_errors
def digest(tensor: torch.Tensor) -> int:
    """The digest of the bits of ``tensor`` in row-major order, for any shape and strides: a signed 64-bit number.

    Includes payloads of NaN and the sign of zero, but neither shape nor dtype. A sparse tensor is digested as its
    coalesced indices and values, a quantized tensor as its integers with scale and zero point.

    Raises:
        TypeError: the tensor is meta, quantized to less than a byte, or neither strided nor sparse COO.

    Example:
        >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(2)) == digest(-torch.zeros(2))
        (True, False)
    """
    return digest_each([tensor])[0]


def digest_each(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The digest of each tensor. The host waits once, and for each sparse tensor to coalesce."""
    vectors, finish = begin_digests(tensors)
    return finish(read_vectors(vectors))


@torch.no_grad()
def begin_digests(tensors: Iterable[torch.Tensor]) -> Begun[list[int]]:
    """A vector per device, and a function from the numbers in the vectors to the digest of each tensor.

    So a caller reads the vectors together with other numbers.
    """
    sizes: list[int] = []
    indices: dict[torch.device, list[int]] = {}
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for chunk in _chunks(map(as_bytes, tensors), sizes):
        data = list(chunk.values())
        device = data[0].device
        indices.setdefault(device, []).extend(chunk)
        sums.setdefault(device, []).append(_sum_of_states(*data) if len(data) == 1 else _sums_of_states(data))

    def finish(numbers: Sequence[Sequence[int]]) -> list[int]:
        totals: dict[int, int] = {}
        for device, read in zip(sums, numbers, strict=True):
            totals.update(zip(indices[device], read, strict=True))
        return [totals[index] ^ size for index, size in enumerate(sizes)]

    return [torch.cat(found) for found in sums.values()], finish


@torch.no_grad()
def begin_sums(pieces: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A number for each 32 MiB of all ``pieces``: vectors of int64, one for each device. The host does not wait.

    The pieces, of one dimension of uint8, are joined, and every word is a lane of its own: eleven operations for each
    32 MiB, where a digest has about twenty for each tensor, or 140 for a large tensor. Every operation is on integers,
    so that the numbers do not depend on the order in which a device adds.
    """
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for joined in _fill(pieces):
        device = joined[0].device
        padding = torch.zeros(8, dtype=torch.uint8, device=device)
        zero = padding.view(torch.int64)
        words = torch.cat([*joined, padding[: -sum(piece.numel() for piece in joined) % 8]]).view(torch.int64)
        state = torch.arange(words.numel(), device=device).mul_(GAMMA)
        _advance(state, [words, zero, zero])
        sums.setdefault(device, []).append(state.sum().view(1))
    return [found[0] if len(found) == 1 else torch.cat(found) for found in sums.values()]


def digest_all(tensors: Sequence[torch.Tensor | None]) -> int:
    """One digest for all tensors in order: their bits, their sizes, and the positions of None.

    Small tensors are joined first, which makes the digest cheap enough for every step.
    """
    vectors, finish = begin_lists([tensors])
    return finish(read_vectors(vectors))[0]


def begin_lists(lists: Sequence[Sequence[torch.Tensor | None]]) -> Begun[list[int]]:
    """Vectors, and a function from the numbers in the vectors to :func:`digest_all` of each list."""
    grouped = [_group(tensors) for tensors in lists]
    ends: list[int] = []  # of each list, among the joined tensors of all lists

    def join_all() -> Iterator[torch.Tensor]:
        number = 0
        for _, groups in grouped:
            for joined in chain.from_iterable(map(_join, groups)):
                number += 1
                yield joined
            ends.append(number)

    vectors, finish_digests = begin_digests(join_all())

    def finish(numbers: Sequence[Sequence[int]]) -> list[int]:
        digests = finish_digests(numbers)
        return [
            fingerprint(repr((sizes, digests[start:end])).encode())
            for (sizes, _), (start, end) in zip(grouped, pairwise([0, *ends]), strict=True)
        ]

    return vectors, finish


@torch.no_grad()
def begin_checksum(tensors: Sequence[torch.Tensor]) -> Begun[int]:
    """Vectors, and a function from the numbers in the vectors to a number that changes with the tensors.

    The number is comparable only inside this process: the sum of the bytes as 64-bit words, several times cheaper than
    :func:`digest_all`. A change of a single element always changes the sum. Changes that cancel do not, for example two
    swapped values.
    """
    sizes, groups = _group(tensors)
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for group in groups:
        for joined in _join(group):
            sums.setdefault(joined.device, []).append(_sum_of_words(as_bytes(joined)))

    def finish(numbers: Sequence[Sequence[int]]) -> int:
        return hash((tuple(sizes), sum(number[0] for number in numbers)))

    return [torch.stack(found).sum().view(1) for found in sums.values()], finish


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

    Raises:
        TypeError: the tensor has no memory: it belongs to a compiler, or wraps other tensors.
        ValueError: the bytes are not all of the tensor.
    """
    if not 0 <= start <= stop <= tensor.nbytes:
        raise ValueError(f"bytes are not of the tensor: got {start} to {stop}, expected 0 to {tensor.nbytes} at most")
    if tensor.is_quantized:
        checksum = zlib.crc32(internals.quantizer_of(tensor).encode(), checksum)
        tensor = internals.integers_of(tensor)
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    address = 0 if internals.has_own_dispatch(tensor) else tensor.data_ptr()
    if not address:
        raise TypeError(f"the tensor has no memory: got {type(tensor).__name__}, expected a tensor with a storage")
    # `tensor` keeps the memory alive until the checksum is there.
    return zlib.crc32((ctypes.c_char * (stop - start)).from_address(address + start), checksum)


def _group(tensors: Iterable[torch.Tensor | None]) -> tuple[list[int], list[list[torch.Tensor]]]:
    """For each tensor the number of its group and its size, or -1 for None; and the groups by device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[int, list[torch.Tensor]]] = {}
    sizes: list[int] = []
    for tensor in tensors:
        if tensor is None:
            sizes.append(-1)
            continue
        index, group = groups.setdefault((tensor.device, tensor.dtype), (len(groups), []))
        group.append(tensor)
        sizes += index, tensor.numel()
    return sizes, [group for _, group in groups.values()]


def _join(group: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Join small tensors to larger ones with the same elements. Only sizes decide which tensors are joined."""
    waiting: list[torch.Tensor] = []
    waiting_bytes = 0
    for tensor in group:
        if tensor.layout is not torch.strided or tensor.is_quantized or (size_bytes := tensor.nbytes) > SMALL_BYTES:
            yield tensor
            continue
        if waiting_bytes + size_bytes > CHUNK_BYTES:
            yield _concatenate(waiting)
            waiting, waiting_bytes = [], 0
        if size_bytes:
            waiting.append(tensor)
            waiting_bytes += size_bytes
    if waiting:
        yield _concatenate(waiting)


def _concatenate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements in one dimension: a view of neighbours in memory, as reduced gradients are, otherwise a copy."""
    first = tensors[0]
    start = end = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            break
        end += tensor.nbytes
    else:
        numel, storage = (end - start) // first.itemsize, first.untyped_storage()
        if end <= storage.data_ptr() + storage.nbytes():  # otherwise they are neighbours by chance
            return first.as_strided((numel,), (1,))
    return internals.flattened(tensors)


def _chunks(tensors: Iterable[torch.Tensor], sizes: list[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Tensors by index: large tensors alone, tensors of a single row together. Appends their bytes to ``sizes``."""
    waiting: dict[torch.device, dict[int, torch.Tensor]] = {}
    lanes: dict[torch.device, int] = {}
    for index, data in enumerate(tensors):
        sizes.append(data.numel())
        words, device = _count_words(data), data.device
        if words > MIN_LANES:
            yield {index: data}
            continue
        if lanes.get(device, 0) + words > _max_lanes(device):
            yield waiting.pop(device)
            lanes[device] = 0
        lanes[device] = lanes.get(device, 0) + words
        waiting.setdefault(device, {})[index] = data
    yield from waiting.values()


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


def _sum_of_states(data: torch.Tensor) -> torch.Tensor:
    """The sum of the states of all lanes, one int64."""
    words = _count_words(data)
    lanes = max(1, min(words, max(MIN_LANES, 1 << ((words - 1) // MAX_ROWS).bit_length())))
    whole = data.numel() - data.numel() % (8 * lanes)
    body, tail = data[:whole].view(-1, 8 * lanes), data[whole:]
    total = zero = torch.zeros(1, dtype=torch.int64, device=data.device)
    step = _max_lanes(data.device)
    for start in range(0, lanes, step):
        stop = min(start + step, lanes)
        state = torch.arange(start, stop, device=data.device).mul_(GAMMA)
        if whole:
            _advance(state, _rows(body[:, 8 * start : 8 * stop]))
        if whole < data.numel():
            last = _padded([tail[8 * start : 8 * stop]])
            _advance(state[: last.numel()], [last])
        _advance(state, [zero, zero])
        total = total + state.sum()
    return total


def _sums_of_states(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the states of each tensor, for tensors of a single row. The lanes of all tensors advance together."""
    device = tensors[0].device
    lanes = [_count_words(data) for data in tensors]
    keys = torch.arange(max(lanes), device=device).mul_(GAMMA)
    keys_of = {count: keys[:count] for count in set(lanes)}
    state = torch.cat([keys_of[count] for count in lanes])
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    _advance(state, [_padded(tensors), zero, zero])
    # Cumulative sums and their differences wrap around: the results are exact mod 2**64.
    cumulative = torch.cat([zero, state]).cumsum(0)
    ends = host_tensor_for([0, *accumulate(lanes)], device)
    return cumulative[ends.to(device, non_blocking=True)].diff()


def _sum_of_words(data: torch.Tensor) -> torch.Tensor:
    """The plain sum of the words, without states. The bytes of an incomplete word are added byte by byte."""
    whole = data.numel() - data.numel() % 8
    body = data[:whole]
    words = body if (body.storage_offset() | body.data_ptr()) % 8 == 0 else body.clone()
    return words.view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64)


def _advance(state: torch.Tensor, rows: Iterable[torch.Tensor]) -> None:
    low, high = state.view(torch.int32).view(-1, 2).unbind(1)
    for row in rows:
        torch.add(row, state, alpha=MULTIPLIER, out=state)
        low.bitwise_xor_(high)


def _rows(body: torch.Tensor) -> Iterable[torch.Tensor]:
    """The rows as words: views, or a copy of each row if the words are not aligned."""
    if (body.storage_offset() | body.data_ptr()) % 8 == 0:
        return body.view(torch.int64).unbind()
    return (row.clone().view(torch.int64) for row in body.unbind())


def _padded(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The concatenated words of all tensors, each padded to whole words."""
    padding = tensors[0].new_zeros(7)
    parts = []
    for data in tensors:
        parts.append(data)
        if rest := data.numel() % 8:
            parts.append(padding[rest - 1 :])
    return torch.cat(parts).view(torch.int64)


def _count_words(data: torch.Tensor) -> int:
    return -(-data.numel() // 8)


def _max_lanes(device: torch.device) -> int:
    """The number of lanes that advance together on the device."""
    return CPU_LANES if device.type == "cpu" else GPU_LANES
