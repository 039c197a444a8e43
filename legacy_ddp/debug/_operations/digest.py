"""Digests of tensors in traces: 64 bits for all bits of a tensor, in order, and the same on every device.

A digest is the sum mod 2**64 of the lane states of the tensor's bytes, xor the number of bytes. The bytes, padded with
zeros to 64-bit words, form rows; a lane is a column of words. The state of every lane begins with the key of the lane
and takes in the words of the column, then two words of zero::

    state = fold(word + MULTIPLIER * state)        fold(x) = x ^ (x >> 32), a logical shift

Without the fold a column would be a polynomial mod 2**64. Two flips of bit 63 would cancel, so the digest would miss
that a float64 tensor is negated. Multiplication moves low bits up, and the fold moves high bits down. Each step is
invertible, so one changed word always changes the state.

``MULTIPLIER`` is the multiplier of Knuth's MMIX generator (The Art of Computer Programming 2, 3.3.4). Keys are the
states of splitmix64 from 0 on. The finish by shift, xor and multiplication in turn is also from splitmix64 (Steele,
Lea, Flood 2014, "Fast splittable pseudorandom number generators", OOPSLA).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch

from legacy_ddp._errors import argument_errors
from legacy_ddp._replicas.state import (
    GAMMA,
    Begun,
    advance,
    as_bytes,
)
from legacy_ddp._torch.device import host_tensor_for, read_vectors

# These numbers are part of the definition of a digest. More rows leave fewer states to finish; more lanes need fewer
# calls of torch.
MAX_ROWS = 2**6
MIN_LANES = 2**12
# The number of lanes that advance together is not part of the definition. On a CPU these lanes fit in the cache, and
# torch uses one thread: with more, the threads of many ranks on a host would wait for each other. On a GPU more lanes
# need fewer launches.
CPU_LANES = 2**15
GPU_LANES = 2**20


@argument_errors
def digest(tensor: torch.Tensor) -> int:
    """The digest of the bits of ``tensor`` in row-major order, for any shape and strides: a signed 64-bit number.

    It depends on payloads of NaN and on the sign of zero, but not on shape or dtype. The bits of a sparse tensor are
    those of its coalesced indices and values; of a quantized tensor, its integers, scale and zero point.

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

    A caller can read the vectors together with other numbers.
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


def _chunks(tensors: Iterable[torch.Tensor], sizes: list[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Tensors by index: each large tensor alone, tensors of one row together. Appends their numbers of bytes to
    ``sizes``.
    """
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
            advance(state, _rows(body[:, 8 * start : 8 * stop]))
        if whole < data.numel():
            last = _padded([tail[8 * start : 8 * stop]])
            advance(state[: last.numel()], [last])
        advance(state, [zero, zero])
        total = total + state.sum()
    return total


def _sums_of_states(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the states of each tensor, for tensors of one row. The lanes of all tensors advance together."""
    device = tensors[0].device
    lanes = [_count_words(data) for data in tensors]
    keys = torch.arange(max(lanes), device=device).mul_(GAMMA)
    keys_of = {count: keys[:count] for count in set(lanes)}
    state = torch.cat([keys_of[count] for count in lanes])
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    advance(state, [_padded(tensors), zero, zero])
    # Cumulative sums and their differences may overflow: the results are exact mod 2**64.
    cumulative = torch.cat([zero, state]).cumsum(0)
    ends = host_tensor_for([0, *accumulate(lanes)], device)
    return cumulative[ends.to(device, non_blocking=True)].diff()


def _rows(body: torch.Tensor) -> Iterable[torch.Tensor]:
    """The rows as words: views, or copies if the words are not aligned."""
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
    return CPU_LANES if device.type == "cpu" else GPU_LANES
