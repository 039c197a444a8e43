"""Digests of tensors: 64 bits for all bits of a tensor, in order. Equal bits give equal digests on every device.

A digest is the sum mod 2**64 of the lane states of the tensor's bytes (see :mod:`legacy_ddp._replicas.hash_lanes`), xor
the number of bytes.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._argument_errors import argument_errors
from legacy_ddp._buckets.layout import fingerprint
from legacy_ddp._replicas.hash_lanes import (
    MIN_LANES,
    count_words,
    max_lanes,
    sum_of_states,
    sum_of_words,
    sums_of_states,
)

# digest_all() joins tensors of at most SMALL_BYTES into copies of at most CHUNK_BYTES.
SMALL_BYTES = 2**19
CHUNK_BYTES = 2**22


@argument_errors
def digest(tensor: torch.Tensor) -> int:
    """The digest of the bits of ``tensor`` in row-major order, for any shape and strides: a signed 64-bit number.

    Includes payloads of NaN and the sign of zero, but neither shape nor dtype. A sparse tensor is digested as its
    coalesced indices and values.

    Raises:
        TypeError: the tensor is quantized or meta, or neither strided nor sparse COO.

    Example:
        >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(2)) == digest(-torch.zeros(2))
        (True, False)
    """
    return digest_each([tensor])[0]


@torch.no_grad()
def digest_each(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The digest of each tensor. The host waits once per device, and for each sparse tensor to coalesce."""
    sizes: list[int] = []
    indices: dict[torch.device, list[int]] = {}
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for chunk in _chunks(map(as_bytes, tensors), sizes):
        data = list(chunk.values())
        device = data[0].device
        indices.setdefault(device, []).extend(chunk)
        sums.setdefault(device, []).append(sum_of_states(*data) if len(data) == 1 else sums_of_states(data))
    totals: dict[int, int] = {}
    for device, found in sums.items():
        totals.update(zip(indices[device], torch.cat(found).tolist(), strict=True))
    return [totals[index] ^ size for index, size in enumerate(sizes)]


def digest_all(tensors: Sequence[torch.Tensor | None]) -> int:
    """One digest for all tensors in order: their bits, their sizes, and the positions of None.

    Small tensors are joined first, which makes the digest cheap enough for every step.
    """
    sizes, groups = _group(tensors)
    digests = digest_each(joined for group in groups for joined in _join(group))
    return fingerprint(repr((sizes, digests)).encode())


@torch.no_grad()
def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """A number that changes with the tensors; comparable only inside this process.

    The sum of the bytes as 64-bit words: several times cheaper than :func:`digest_all`. A change of a single element
    always changes the sum. Changes that cancel do not, for example two swapped values.
    """
    sizes, groups = _group(tensors)
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for group in groups:
        for joined in _join(group):
            sums.setdefault(joined.device, []).append(sum_of_words(as_bytes(joined)))
    return hash((tuple(sizes), sum(int(torch.stack(found).sum()) for found in sums.values())))


def is_digestible(tensor: torch.Tensor) -> bool:
    """Whether the tensor is strided or sparse COO, and neither quantized nor meta."""
    return not (tensor.is_quantized or tensor.is_meta) and tensor.layout in (torch.strided, torch.sparse_coo)


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
    """The same elements in fewer tensors. Only the sizes decide which tensors are joined."""
    waiting: list[torch.Tensor] = []
    waiting_bytes = 0
    for tensor in group:
        if tensor.layout is not torch.strided or (size_bytes := tensor.nbytes) > SMALL_BYTES:
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


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bits in row-major order, one dimension of uint8: a view of a contiguous tensor, otherwise a copy."""
    if not is_digestible(tensor):
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else tensor.layout
        raise TypeError(f"tensor cannot be digested: got a {kind} one, expected a strided or sparse COO tensor")
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return torch.cat([as_bytes(tensor.indices()), as_bytes(tensor.values())])
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    # Not view(-1), which keeps any stride of a tensor with a single element.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _chunks(tensors: Iterable[torch.Tensor], sizes: list[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Tensors by index: large tensors alone, tensors of a single row together. Appends their bytes to ``sizes``."""
    waiting: dict[torch.device, dict[int, torch.Tensor]] = {}
    lanes: dict[torch.device, int] = {}
    for index, data in enumerate(tensors):
        sizes.append(data.numel())
        words, device = count_words(data), data.device
        if words > MIN_LANES:
            yield {index: data}
            continue
        if lanes.get(device, 0) + words > max_lanes(device):
            yield waiting.pop(device)
            lanes[device] = 0
        lanes[device] = lanes.get(device, 0) + words
        waiting.setdefault(device, {})[index] = data
    yield from waiting.values()
