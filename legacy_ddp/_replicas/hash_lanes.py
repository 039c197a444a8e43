"""Hash of the bytes of a tensor in lanes: a state for every column of 64-bit words, and the sum of all states.

The bytes, padded with zeros to 64-bit words, form rows; a lane is a column of words. The state of every lane begins
with the key of the lane and takes in the words of the column, then two words of zero::

    state = fold(word + MULTIPLIER * state)        fold(x) = x ^ (x >> 32), a logical shift

Without the fold a column would be a polynomial mod 2**64, where two flips of bit 63 cancel: the digest would miss a
negated float64 tensor. The product carries low bits up, and the fold brings high bits down. Each step is invertible, so
a single changed word always changes the state.

``MULTIPLIER`` is the multiplier of Knuth's MMIX generator (The Art of Computer Programming 2, 3.3.4). Keys are the
states of splitmix64 from 0 on. The finish by shift, xor and multiplication in turn is also from splitmix64 (Steele,
Lea, Flood 2014, "Fast splittable pseudorandom number generators", OOPSLA).
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

MULTIPLIER = 6364136223846793005
GAMMA = 0x9E3779B97F4A7C15 - 2**64

# Part of the definition of a digest: the number of rows and lanes. More rows: fewer states to finish. More lanes: fewer
# calls of torch.
MAX_ROWS = 2**6
MIN_LANES = 2**12

# Not part of the definition: the number of lanes that advance together. On a CPU these lanes fit in the cache, and stay
# below the size from which torch uses more threads: the threads of many ranks on a host would wait for each other. On a
# GPU the number of launches should be small.
CPU_LANES = 2**15
GPU_LANES = 2**20


def sum_of_states(data: torch.Tensor) -> torch.Tensor:
    """The sum over all lanes, one int64, computed for at most :func:`max_lanes` lanes at a time."""
    words = count_words(data)
    lanes = max(1, min(words, max(MIN_LANES, 1 << ((words - 1) // MAX_ROWS).bit_length())))
    whole = data.numel() - data.numel() % (8 * lanes)
    body, tail = data[:whole].view(-1, 8 * lanes), data[whole:]
    total = zero = torch.zeros(1, dtype=torch.int64, device=data.device)
    step = max_lanes(data.device)
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


def sums_of_states(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum over all lanes of each tensor, for tensors of a single row. The lanes of all tensors advance together."""
    device = tensors[0].device
    lanes = [count_words(data) for data in tensors]
    keys = torch.arange(max(lanes), device=device).mul_(GAMMA)
    keys_of = {count: keys[:count] for count in set(lanes)}
    state = torch.cat([keys_of[count] for count in lanes])
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    _advance(state, [_padded(tensors), zero, zero])
    # Cumulative sums and their differences wrap around: the results are exact mod 2**64.
    cumulative = torch.cat([zero, state]).cumsum(0)
    # On the host for any default device. Pinned, because the host would wait for the copy of pageable memory.
    ends = torch.tensor([0, *accumulate(lanes)], device="cpu", pin_memory=device.type == "cuda")
    return cumulative[ends.to(device, non_blocking=True)].diff()


def sum_of_words(data: torch.Tensor) -> torch.Tensor:
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


def count_words(data: torch.Tensor) -> int:
    return -(-data.numel() // 8)


def max_lanes(device: torch.device) -> int:
    """The number of lanes that advance together on the device."""
    return CPU_LANES if device.type == "cpu" else GPU_LANES
