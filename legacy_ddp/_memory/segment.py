"""Memory of flat tensors that other processes of the host can map: anonymous files in memory (memfd_create(2)).

A segment is sealed against shrinking and growing before any mapping. A mapping keeps no descriptor open, and lives as
long as any tensor refers to it.

A forked process, for instance of a DataLoader, inherits shared mappings. Its writes to a gradient
would change the gradient of its parent. So the kernel leaves every mapping out of children (MADV_DONTFORK of
madvise(2)), from before any tensor refers to the memory: whatever fails, a child has no access to the memory of its
parent. A function in the child then maps private memory at the same addresses. The child sees the values of the
parent, and later changes by the parent only in pages that the child has not written to.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from contextlib import ExitStack
from functools import cache
from itertools import count
from typing import Any

import torch

from legacy_ddp._interrupts import run_in_children
from legacy_ddp._memory.layout import Bucket
from legacy_ddp._text import system_error_text

_MAP_FIXED, _MAP_FIXED_NOREPLACE = 0x10, 0x100000  # as in the headers of Linux
_READ_WRITE, _NO_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE, 0
_MAP_FAILED = ctypes.c_void_p(-1).value
_NO_FILE = -1
# Far below the addresses that the kernel chooses. In a child the addresses are free until private memory is mapped
# there, and before that other hooks of the fork may allocate memory.
_FIRST_ADDRESS, _LAST_ADDRESS = 2**44, 2**46

_mappings: "dict[int, Mapping]" = {}  # every shared mapping of this process, by address
_next_address = _FIRST_ADDRESS


class OpenFile:
    """The owner of an open file. ``descriptor``: ``_NO_FILE`` from before the file is closed: the number may be of
    another file then."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def close(self) -> None:
        """Close the file, once."""
        descriptor, self.descriptor = self.descriptor, _NO_FILE
        if descriptor != _NO_FILE:
            os.close(descriptor)


class Mapping:
    """A shared mapping of an open file, in the table as long as it exists and is shared.

    ``file``: for the private memory of children; open as long as the mapping is in the table. Without one, as for the
    memory of another rank, a child has memory without access there.
    """

    def __init__(self, address: int, size_bytes: int, file: OpenFile) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self._file = file
        self._may_be_private = False

    @property
    def descriptor(self) -> int:
        """Of the file, ``_NO_FILE`` without one."""
        return self._file.descriptor

    def make_private(self) -> None:
        """Map the same pages as private memory, also for children: no other process uses them any more. Close the file.

        After an exception the mapping stays in the table, with its open file.
        """
        if _mappings.get(self.address) is self:  # some tensor still refers to the memory
            self._may_be_private = True
            self._map_private(_MAP_FIXED, self.descriptor)
            del _mappings[self.address]
        self._file.close()

    def replace_in_child(self) -> None:
        """Map private memory at the addresses, which the kernel left free in this child."""
        if self.descriptor == _NO_FILE:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
            _map_at(self.address, self.size_bytes, _NO_ACCESS, flags, _NO_FILE)
            return
        try:
            self._map_private(_MAP_FIXED_NOREPLACE, self.descriptor)
        except FileExistsError:
            if not self._may_be_private:  # inherited: an exception came before the end of make_private()
                raise

    def _map_private(self, flag: int, descriptor: int) -> None:
        _map_at(self.address, self.size_bytes, _READ_WRITE, mmap.MAP_PRIVATE | flag, descriptor)

    def unmap(self) -> None:
        """End the mapping: no tensor refers to the memory any more."""
        _mappings.pop(self.address, None)
        _libc().munmap(self.address, self.size_bytes)
        self._file.close()


def map_shared(file: OpenFile, *, is_own: bool) -> tuple[torch.Tensor, Mapping]:
    """The whole memory of a sealed file, uint8. It stays mapped as long as a tensor refers to it.

    ``is_own``: the file is of this rank, and forked children of this rank see its values.
    """
    size_bytes = os.fstat(file.descriptor).st_size
    address = _map(_new_address(size_bytes), size_bytes, _READ_WRITE, mmap.MAP_SHARED, file.descriptor)
    mapping = Mapping(address, size_bytes, file if is_own else OpenFile(_NO_FILE))
    buffer = (ctypes.c_ubyte * size_bytes).from_address(address)
    weakref.finalize(buffer, mapping.unmap).atexit = False  # the end of the process unmaps
    if _libc().madvise(address, size_bytes, mmap.MADV_DONTFORK):
        raise _error("madvise", size_bytes)
    _mappings[address] = mapping
    _register_for_forks()
    return torch.frombuffer(buffer, dtype=torch.uint8), mapping


def _new_address(size_bytes: int) -> int:
    """A hint for the kernel, which takes another address if this one is not free."""
    global _next_address
    pages = -(-size_bytes // mmap.PAGESIZE)
    address = _next_address if _next_address < _LAST_ADDRESS else _FIRST_ADDRESS
    _next_address = address + pages * mmap.PAGESIZE
    return address


@cache
def _register_for_forks() -> None:
    run_in_children(_replace_all)


def _replace_all() -> None:
    try:
        for mapping in _mappings.values():
            mapping.replace_in_child()
    except OSError as error:
        raise OSError(
            f"its copy of the gradients of the parent could not be mapped: got {error}, expected private memory; raise "
            'the limit, fork before the first all_reduce(), or pass transport="gloo"'
        ) from error
    _mappings.clear()  # private mappings are inherited by children of this process


def _map_at(address: int, size_bytes: int, protection: int, flags: int, descriptor: int) -> None:
    found = _map(address, size_bytes, protection, flags, descriptor)
    if found != address:  # Linux before 4.17 takes MAP_FIXED_NOREPLACE for a hint
        _libc().munmap(found, size_bytes)
        raise OSError(errno.EEXIST, "other memory is mapped there")


def _map(address: int, size_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    found = _libc().mmap(address, size_bytes, protection, flags, descriptor, 0)
    if found == _MAP_FAILED:
        raise _error("mmap", size_bytes)
    return int(found)


def _error(function: str, size_bytes: int) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{function} of {size_bytes} bytes: {os.strerror(number)}")


@cache
def _libc() -> Any:
    """Functions in C that keep the GIL: no other thread forks between a change of a mapping and of the table."""
    library = ctypes.PyDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


# As in the headers of Linux: a Python that was built with an old C library lacks the names, and memfd_create().
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4
_NAME_PREFIX = "legacy_ddp-"  # of every segment; the number of the owning process follows
_RESERVED_BYTES = 4 * 2**20
_serials = count(1)


class Segment:
    """Shared memory of ``size_bytes``. ``serial``: number in this process, from 1. ``process``: that has made it.

    When the segment is deleted, its memory becomes private: from then on only gradients kept by the user are in it.
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
    """The descriptor of an anonymous file in memory."""
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
    """The memory behind the descriptor of another rank's segment, uint8. The descriptor may be closed afterwards."""
    return map_shared(OpenFile(descriptor), is_own=False)[0]
