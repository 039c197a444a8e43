"""What do the bytes of a tensor leave behind? A state for every column of their words, and the sum of all states.

The bytes, padded with zeros to 64-bit words, are rows of lanes. Every lane runs down its column, from a key of its own
and on over two words of zero::

    state = fold(word + MULTIPLIER * state)        fold(x) = x ^ (x >> 32), a logical shift

Without the fold a column would be a polynomial mod 2**64, where two flips of bit 63 cancel: a negated float64 tensor
would go unseen. The product carries low bits up, the fold brings high bits down, and each step can be undone, so that a
single changed word always changes its state.

``MULTIPLIER`` is that of Knuth's MMIX generator (The Art of Computer Programming 2, 3.3.4). Keys are the states of
splitmix64 from 0 on, and to shift, xor and multiply in turn is how it finishes them (Steele, Lea, Flood 2014, "Fast
splittable pseudorandom number generators", OOPSLA).
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

MULTIPLIER = 6364136223846793005
GAMMA = 0x9E3779B97F4A7C15 - 2**64

# Part of what a digest is: how words become rows. More rows: fewer states to finish; more lanes: fewer calls of torch.
MAX_ROWS = 2**6
MIN_LANES = 2**12

# How it is computed: lanes at work together. On a CPU they stay in the cache, and below the size from which torch
# uses more threads: those of many ranks on one host would wait for each other. A GPU wants few launches.
CPU_LANES = 2**15
GPU_LANES = 2**20


def sum_of_states(data: torch.Tensor) -> torch.Tensor:
    """The sum over all lanes (one int64), at most ``CPU_LANES`` or ``GPU_LANES`` of them at a time."""
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
    """The sum over all lanes of each of these tensors of one row: their lanes lie end to end, and advance together."""
    device = tensors[0].device
    lanes = [count_words(data) for data in tensors]
    keys = torch.arange(max(lanes), device=device).mul_(GAMMA)
    keys_of = {count: keys[:count] for count in set(lanes)}
    state = torch.cat([keys_of[count] for count in lanes])
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    _advance(state, [_padded(tensors), zero, zero])
    # The sums of all lanes so far wrap around, and so do their differences: exact mod 2**64.
    so_far = torch.cat([zero, state]).cumsum(0)
    # On the host whatever the default device is; pinned, or else the host waits for the copy.
    ends = torch.tensor([0, *accumulate(lanes)], device="cpu", pin_memory=device.type == "cuda")
    return so_far[ends.to(device, non_blocking=True)].diff()


def sum_of_words(data: torch.Tensor) -> torch.Tensor:
    """The plain sum of the words, where no state is needed; the bytes of an incomplete word count by themselves."""
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
    """The rows as words: views, or where the words are not aligned one copy after the other."""
    if (body.storage_offset() | body.data_ptr()) % 8 == 0:
        return body.view(torch.int64).unbind()
    return (row.clone().view(torch.int64) for row in body.unbind())


def _padded(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The words of all of them end to end."""
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
    """How many lanes advance together there."""
    return CPU_LANES if device.type == "cpu" else GPU_LANES
