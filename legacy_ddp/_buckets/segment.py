"""Memory of flat tensors that other processes of the host can map: anonymous files in memory (memfd_create(2)).

A segment is sealed against shrinking and growing before any mapping. A mapping keeps no descriptor open, and lives as
long as any tensor refers to it. In a forked child the memory is private: see :mod:`private_fork`.
"""

import ctypes
import fcntl
import os
import weakref
from contextlib import ExitStack
from functools import cache
from itertools import count
from typing import Any

import torch

from legacy_ddp._buckets.layout import Bucket
from legacy_ddp._buckets.private_fork import OpenFile, map_shared
from legacy_ddp._text import system_error_text

# As in the headers of Linux: a Python that was built with an old C library lacks the names, and memfd_create().
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4
_NAME_PREFIX = "legacy_ddp-"  # of every segment; the number of the owning process follows
_RESERVED_BYTES = 4 * 2**20
_serials = count(1)


class Segment:
    """Shared memory of ``size_bytes``. ``serial``: number in this process, from 1. ``process``: that has made it.

    When the segment is deleted, its memory becomes private: from then on only gradients kept by the user are in it.

    Raises:
        OSError: no memory, or a limit of the process, of the container or of the kernel.
    """

    def __init__(self, size_bytes: int) -> None:
        self.serial = next(_serials)
        self.process = os.getpid()
        self._file = OpenFile(_new_file(f"{_NAME_PREFIX}{self.process}"))
        with ExitStack() as failed:
            failed.callback(self._file.close)
            _reserve(self.descriptor, size_bytes)
            fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
            self.memory, mapping = map_shared(self._file, is_own=True)
            weakref.finalize(self, mapping.make_private).atexit = False
            failed.pop_all()

    @property
    def descriptor(self) -> int:
        """Of the file behind the memory."""
        return self._file.descriptor


class SegmentPolicy:
    """Whether the flat tensors of a set of parameters, and the sums of their micro-batches, lie in segments.

    ``wanted``: from the next allocation on. ``chosen``: the host transport carried the call before. ``problem``: the
    first failure, as text; all ranks learn of it after their headers.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.chosen = False
        self.problem = ""

    def is_for(self, bucket: Bucket) -> bool:
        """Whether the memory of ``bucket`` shall be a segment."""
        return self.wanted and not self.problem and bucket.may_be_shared

    def fits(self, bucket: Bucket, segment: Segment | None) -> bool:
        """Whether memory with ``segment``, None for ordinary memory, is of the kind that ``bucket`` shall have."""
        # In a forked child the memory is private.
        is_shared = segment is not None and segment.process == os.getpid()
        return is_shared == (self.wanted and not self.problem and bucket.may_be_shared)

    def carries(self, bucket: Bucket) -> bool:
        """Whether the host transport will carry ``bucket``, unless memory fails on another rank.

        False in the first call, which chooses the transport after its header.
        """
        return self.chosen and self.is_for(bucket)

    def allocate(self, bucket: Bucket, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, Segment | None]:
        """A flat tensor for ``bucket``, and its segment if there is one. ``dtype``: in place of the bucket's dtype."""
        dtype = dtype or bucket.dtype
        if self.is_for(bucket):
            try:
                segment = Segment(bucket.numel * dtype.itemsize)
                return segment.memory.view(dtype), segment
            except OSError as error:
                self.problem = no_memory_text(error)
        return torch.empty(bucket.numel, dtype=dtype, device=bucket.device), None


def _new_file(name: str) -> int:
    """The descriptor of an anonymous file in memory.

    Raises:
        OSError: no such file can be made.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    descriptor = int(_libc_memfd_create()(name.encode(), _MFD_CLOEXEC | _MFD_ALLOW_SEALING))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "memfd_create failed")
    return descriptor


@cache
def _libc_memfd_create() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True).memfd_create
    except AttributeError:
        raise OSError("the C library has no memfd_create") from None


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Give the file its size and its pages. Later a missing page would be SIGBUS.

    In pieces: after a signal the kernel begins an allocation again, and with a timer a large one would never end.
    """
    for start in range(0, size_bytes, _RESERVED_BYTES):
        os.posix_fallocate(descriptor, start, min(_RESERVED_BYTES, size_bytes - start))


def no_memory_text(error: OSError) -> str:
    """The reason for a rank without shared memory."""
    return f"no shared memory ({system_error_text(error)})"


def map_segment(descriptor: int) -> torch.Tensor:
    """The whole memory behind the descriptor of another rank's segment, uint8. The descriptor may be closed afterwards.

    Raises:
        OSError: the memory cannot be mapped.
    """
    return map_shared(OpenFile(descriptor), is_own=False)[0]
