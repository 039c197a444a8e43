"""Which 64 bits stand for all bits of a tensor, in order? Equal bits, equal number, on every device and rank.

The bytes, padded with zeros to 64-bit words, are rows of lanes. Every lane runs down its column, from a key of its own
and on over two words of zero::

    state = fold(word + MULTIPLIER * state)        fold(x) = x ^ (x >> 32), a logical shift

The sum of all states mod 2**64, xor the number of bytes, is the digest. Without the fold a column would be a polynomial
mod 2**64, where two flips of bit 63 cancel: a negated float64 tensor would go unseen. The product carries low bits up,
the fold brings high bits down, and each step can be undone, so that a single changed word always changes its state.

``MULTIPLIER`` is that of Knuth's MMIX generator (The Art of Computer Programming 2, 3.3.4). Keys are the states of
splitmix64 from 0 on, and to shift, xor and multiply in turn is how it finishes them (Steele, Lea, Flood 2014, "Fast
splittable pseudorandom number generators", OOPSLA).
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from legacy_ddp._layout import fingerprint

MULTIPLIER = 6364136223846793005
GAMMA = 0x9E3779B97F4A7C15 - 2**64

# Part of what a digest is: how words become rows. More rows: fewer states to finish; more lanes: fewer calls of torch.
MAX_ROWS = 2**6
MIN_LANES = 2**12

# How it is computed: lanes at work together. On a CPU they stay in the cache, and below the size from which torch
# uses more threads: those of many ranks on one host would wait for each other. A GPU wants few launches.
CPU_LANES = 2**15
GPU_LANES = 2**20

# digest_all() joins tensors up to the first size into copies up to the second.
SMALL_BYTES = 2**19
CHUNK_BYTES = 2**22


def digest(tensor: torch.Tensor) -> int:
    """A signed 64-bit number for the tensor's bits in row-major order, whatever its strides.

    Shape and dtype are not in it; payloads of NaN and the sign of zero are. A sparse tensor is its coalesced indices
    and values.

    Raises:
        TypeError: a quantized or meta tensor, or one of another layout.
    """
    return digest_words([tensor])[0]


@torch.no_grad()
def digest_words(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The digest of each tensor. The host waits once per device, and for sparse tensors to coalesce."""
    sizes, sums = [], []
    for tensor in tensors:
        data = _as_bytes(tensor)
        sizes.append(data.numel())
        sums.append(_sum_of_states(data))
    return [word ^ size for word, size in zip(_to_host(sums), sizes, strict=True)]


def digest_all(tensors: Sequence[torch.Tensor | None]) -> int:
    """One number for the bits of all tensors in order, their sizes, and which of them are None.

    Small tensors are joined first: cheap enough for every step.
    """
    groups: dict[tuple[torch.device, torch.dtype], tuple[int, list[torch.Tensor]]] = {}
    sizes: list[int] = []
    for tensor in tensors:
        if tensor is None:
            sizes.append(-1)
            continue
        index, group = groups.setdefault((tensor.device, tensor.dtype), (len(groups), []))
        group.append(tensor)
        sizes += index, tensor.numel()
    words = digest_words(joined for _, group in groups.values() for joined in _join(group))
    return fingerprint(repr((sizes, words)).encode())


def _join(group: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same elements in fewer tensors; how they are joined depends on sizes alone."""
    waiting: list[torch.Tensor] = []
    waiting_bytes = 0
    for tensor in group:
        size_bytes = tensor.numel() * tensor.itemsize
        if size_bytes > SMALL_BYTES or tensor.layout is not torch.strided:
            yield tensor
            continue
        if waiting_bytes + size_bytes > CHUNK_BYTES:
            yield _end_to_end(waiting)
            waiting, waiting_bytes = [], 0
        if size_bytes:
            waiting.append(tensor)
            waiting_bytes += size_bytes
    if waiting:
        yield _end_to_end(waiting)


def _end_to_end(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements in one dimension: a view if they lie like that already, as reduced gradients do, else a copy."""
    first = tensors[0]
    start = end = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            break
        end += tensor.nbytes
    else:
        numel, storage = (end - start) // first.itemsize, first.untyped_storage()
        if end <= storage.data_ptr() + storage.nbytes():  # else it is chance that they are neighbours
            return first.as_strided((numel,), (1,))
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bits in row-major order, one dimension of uint8: a view of a contiguous tensor, a copy of another."""
    if tensor.is_quantized or tensor.is_meta or tensor.layout not in (torch.strided, torch.sparse_coo):
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else tensor.layout
        raise TypeError(f"tensor cannot be digested: got a {kind} one, expected a strided or sparse COO tensor")
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return torch.cat([_as_bytes(tensor.indices()), _as_bytes(tensor.values())])
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    # Not view(-1): it keeps the stride of a single element, whatever that is.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _sum_of_states(data: torch.Tensor) -> torch.Tensor:
    """The sum over all lanes (0-dim, int64), at most ``CPU_LANES`` or ``GPU_LANES`` of them at a time."""
    words = -(-data.numel() // 8)
    lanes = max(1, min(words, max(MIN_LANES, 1 << ((words - 1) // MAX_ROWS).bit_length())))
    whole = data.numel() - data.numel() % (8 * lanes)
    body, tail = data[:whole].view(-1, 8 * lanes), data[whole:]
    total = zero = torch.zeros((), dtype=torch.int64, device=data.device)
    step = CPU_LANES if data.device.type == "cpu" else GPU_LANES
    for start in range(0, lanes, step):
        stop = min(start + step, lanes)
        state = torch.arange(start, stop, device=data.device).mul_(GAMMA)
        _advance(state, _rows(body[:, 8 * start : 8 * stop]))
        last = _padded(tail[8 * start : 8 * stop])
        _advance(state[: last.numel()], [last])
        _advance(state, [zero, zero])
        total = total + state.sum()
    return total


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


def _padded(data: torch.Tensor) -> torch.Tensor:
    return torch.cat([data, data.new_zeros(-data.numel() % 8)]).view(torch.int64)


def _to_host(scalars: Sequence[torch.Tensor]) -> list[int]:
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for scalar in scalars:
        groups.setdefault(scalar.device, []).append(scalar)
    words = {device: iter(torch.stack(group).tolist()) for device, group in groups.items()}
    return [next(words[scalar.device]) for scalar in scalars]
