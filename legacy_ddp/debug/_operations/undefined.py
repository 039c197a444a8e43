"""Memory without defined content: allocated by ``aten::empty`` and its relatives, and not written since.

Such bytes differ from run to run, and no digest of them may stand in a record.
"""

from dataclasses import dataclass

import torch

from legacy_ddp import _torch as internals

# Above, memory stays undefined until an operation writes the whole storage: a map has a byte for each byte of memory.
MAX_MAP_BYTES = 2**26


@dataclass
class _Region:
    """``storage``: keeps the key from being used again. ``written``: for each byte of the storage; None: no byte."""

    storage: object
    written: torch.Tensor | None = None


class UndefinedMemory:
    """The undefined bytes of all storages that were noted by :meth:`note_allocation`. Keeps no memory alive."""

    def __init__(self) -> None:
        self._regions: dict[int, _Region] = {}

    def note_allocation(self, tensor: torch.Tensor) -> None:
        """No byte of the tensor's storage is defined."""
        key = internals.storage_key(tensor)
        if key is not None and tensor.numel():
            self._regions[key] = _Region(internals.weak_storage(tensor))

    def note_write(self, tensor: torch.Tensor) -> None:
        """All elements of the tensor are written."""
        key = internals.storage_key(tensor) if self._regions else None
        region = None if key is None else self._regions.get(key)
        if key is None or region is None:
            return
        size_bytes = tensor.untyped_storage().nbytes()
        if tensor.nbytes == size_bytes and tensor.is_contiguous():
            del self._regions[key]
        elif size_bytes <= MAX_MAP_BYTES:
            if region.written is None or region.written.numel() != size_bytes:
                region.written = torch.zeros(size_bytes, dtype=torch.bool, device="cpu")
            _bytes_of(tensor, region.written).fill_(True)
            if region.written.all():
                del self._regions[key]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether any element of the tensor is undefined."""
        key = internals.storage_key(tensor) if self._regions else None
        region = None if key is None else self._regions.get(key)
        if region is None or not tensor.numel():
            return False
        written = region.written
        if written is None or written.numel() != tensor.untyped_storage().nbytes():
            return True
        return not _bytes_of(tensor, written).all()


def _bytes_of(tensor: torch.Tensor, of_storage: torch.Tensor) -> torch.Tensor:
    """The bytes of the tensor's elements, of a tensor with one element for each byte of the storage."""
    size = tensor.itemsize
    strides = (*(stride * size for stride in tensor.stride()), 1)
    return of_storage.as_strided((*tensor.shape, size), strides, tensor.storage_offset() * size)
