"""Memory of flat tensors that other processes of the host can map: anonymous files in memory (memfd_create(2)).

A segment is sealed against shrinking and growing before any mapping. A mapping keeps no descriptor open, and lives as
long as any tensor refers to it. In a forked child the memory becomes private: see :mod:`private_fork`.
"""

import fcntl
import os
import weakref
from itertools import count

import torch

from legacy_ddp._buckets.layout import Bucket
from legacy_ddp._buckets.private_fork import NAME_PREFIX, keep_private_in_children
from legacy_ddp._error_text import error_text

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_serials = count(1)


class Segment:
    """Shared memory of ``size_bytes``. ``serial``: number in this process, from 1.

    Raises:
        OSError: no memory, or a limit of the process, of the container or of the kernel.
        RuntimeError: the memory cannot be mapped.
    """

    def __init__(self, size_bytes: int) -> None:
        self.serial = next(_serials)
        self.size_bytes = size_bytes
        self.descriptor = os.memfd_create(f"{NAME_PREFIX}{os.getpid()}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.posix_fallocate(self.descriptor, 0, size_bytes)  # now: later a missing page would be SIGBUS
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self.memory = map_segment(self.descriptor, size_bytes)
        keep_private_in_children(self.memory.data_ptr(), self)


class SegmentPolicy:
    """Whether the flat tensors of a set of parameters lie in segments.

    ``wanted``: from the next allocation on. ``required``: a failure is an error, and not ordinary memory. ``problem``:
    the first failure, as text.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.required = False
        self.problem = ""

    def is_for(self, bucket: Bucket) -> bool:
        """Whether the memory of ``bucket`` shall be a segment."""
        return self.wanted and not self.problem and bucket.device.type == "cpu" and bucket.numel > 0

    def allocate(self, bucket: Bucket) -> tuple[torch.Tensor, Segment | None]:
        """A flat tensor for ``bucket``, and its segment if there is one.

        Raises:
            OSError, RuntimeError: as :class:`Segment`, if a segment is required.
        """
        if self.is_for(bucket):
            try:
                segment = Segment(bucket.numel * bucket.dtype.itemsize)
                return segment.memory.view(bucket.dtype), segment
            except (OSError, RuntimeError) as error:
                if self.required:
                    raise
                self.problem = f"no shared memory ({error_text(error)})"
        return torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device), None


def map_segment(descriptor: int, size_bytes: int) -> torch.Tensor:
    """The memory behind an open descriptor, uint8, shape (size_bytes,). The descriptor may be closed afterwards.

    Raises:
        RuntimeError: the memory cannot be mapped.
        ValueError: the memory is smaller than ``size_bytes``.
    """
    found = os.fstat(descriptor).st_size
    if found != size_bytes:
        raise ValueError(f"a memory segment has {found} bytes, expected {size_bytes}")
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size_bytes, dtype=torch.uint8)
