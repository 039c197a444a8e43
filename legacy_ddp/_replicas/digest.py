"""Which 64 bits stand for all bits of a tensor, in order? Equal bits, equal number, on every device and rank.

They are the sum mod 2**64 of the states (see :mod:`legacy_ddp._replicas.hash_lanes`) that its bytes leave behind, xor
the number of bytes.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.layout import fingerprint
from legacy_ddp._replicas.hash_lanes import (
    MIN_LANES,
    count_words,
    max_lanes,
    sum_of_states,
    sum_of_words,
    sums_of_states,
)

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
    return digest_each([tensor])[0]


@torch.no_grad()
def digest_each(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The digest of each tensor. The host waits once per device, and for sparse tensors to coalesce."""
    sizes: list[int] = []
    places: dict[torch.device, list[int]] = {}
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for chunk in _chunks(map(_as_bytes, tensors), sizes):
        data = list(chunk.values())
        device = data[0].device
        places.setdefault(device, []).extend(chunk)
        sums.setdefault(device, []).append(sum_of_states(*data) if len(data) == 1 else sums_of_states(data))
    words: dict[int, int] = {}
    for device, found in sums.items():
        words.update(zip(places[device], torch.cat(found).tolist(), strict=True))
    return [words[index] ^ size for index, size in enumerate(sizes)]


def digest_all(tensors: Sequence[torch.Tensor | None]) -> int:
    """One number for the bits of all tensors in order, their sizes, and which of them are None.

    Small tensors are joined first: cheap enough for every step.
    """
    sizes, groups = _group(tensors)
    words = digest_each(joined for group in groups for joined in _join(group))
    return fingerprint(repr((sizes, words)).encode())


@torch.no_grad()
def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """One number that shows a change of these tensors to the process that takes it again.

    The sum of their bytes as 64-bit words: several times cheaper than :func:`digest_all`. Every change of one element
    shows; changes that cancel, two values that change places for instance, do not.
    """
    sizes, groups = _group(tensors)
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for group in groups:
        for joined in _join(group):
            sums.setdefault(joined.device, []).append(sum_of_words(_as_bytes(joined)))
    return hash((tuple(sizes), sum(int(torch.stack(found).sum()) for found in sums.values())))


def _group(tensors: Iterable[torch.Tensor | None]) -> tuple[list[int], list[list[torch.Tensor]]]:
    """The tensors by device and dtype; and for each of all its group and its size, or -1 for None."""
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
    """The same elements in fewer tensors; how they are joined depends on sizes alone."""
    waiting: list[torch.Tensor] = []
    waiting_bytes = 0
    for tensor in group:
        if tensor.layout is not torch.strided or (size_bytes := tensor.nbytes) > SMALL_BYTES:
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
    return internals.flattened(tensors)


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


def _chunks(tensors: Iterable[torch.Tensor], sizes: list[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Tensors by their places: one, or several of one row of lanes each. Appends the bytes of each to ``sizes``."""
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
