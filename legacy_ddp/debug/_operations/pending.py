"""Digests of tensors that change soon: small tensors are copied, and their copies digested together."""

from collections.abc import Iterable

import torch

from legacy_ddp._replicas.digest import CHUNK_BYTES, digest_each

# Larger tensors are digested at once: for them alone the digest takes no longer than together with others.
COPY_BYTES = 2**15


class PendingDigests:
    """Digests of tensors as they are when added. Holds at most CHUNK_BYTES of copies."""

    def __init__(self) -> None:
        self._found: dict[int, int] = {}
        self._copies: dict[int, torch.Tensor] = {}
        self._copied_bytes = 0
        self._count = 0

    def add(self, tensor: torch.Tensor) -> int:
        """The position of the digest in :meth:`digests`."""
        position, self._count = self._count, self._count + 1
        if tensor.layout is torch.strided and (size_bytes := tensor.nbytes) <= COPY_BYTES:
            self._copies[position] = tensor.clone(memory_format=torch.contiguous_format)
            self._copied_bytes += size_bytes
            if self._copied_bytes > CHUNK_BYTES:
                self._digest_copies()
        else:
            self._note([position], [tensor])
        return position

    def digests(self) -> list[str]:
        """16 hexadecimal digits for each added tensor."""
        self._digest_copies()
        return [f"{self._found[position] % 2**64:016x}" for position in range(self._count)]

    def _digest_copies(self) -> None:
        copies, self._copies, self._copied_bytes = self._copies, {}, 0
        self._note(copies, copies.values())

    def _note(self, positions: Iterable[int], tensors: Iterable[torch.Tensor]) -> None:
        self._found.update(zip(positions, digest_each(tensors), strict=True))
