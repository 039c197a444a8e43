"""Private memory in forked children, in place of the segments of the parent.

A forked process, for instance of a DataLoader, inherits the shared mappings. Without this module its writes to a
gradient would change the gradient of its parent. In the child every segment of the parent is mapped again at its
address as private memory (mmap(2) with MAP_PRIVATE and MAP_FIXED). The child sees the values of the parent, and later
changes by the parent only in pages that the child has not written to.
"""

import ctypes
import mmap
import os
import re
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

NAME_PREFIX = "legacy_ddp-"  # of every segment; the number of the owning process follows

_MAP_FIXED = 0x10
_COPIED_BYTES = 16 * 2**20  # a multiple of every page size
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAPPING = re.compile(rf"([0-9a-f]+)-([0-9a-f]+) rw-s .*/memfd:{NAME_PREFIX}(\d+)")
_owners: "weakref.WeakValueDictionary[int, _Owner]" = weakref.WeakValueDictionary()
_process = 0  # the process that made the segments in _owners
_reserve = -1  # an open descriptor, closed to read a file at the limit of open files


class _Owner(Protocol):
    descriptor: int


def keep_private_in_children(address: int, owner: _Owner) -> None:
    """Make the mapping at ``address`` private in every child forked from now on."""
    global _process
    _process, _owners[address] = os.getpid(), owner
    _register()


@cache
def _register() -> None:
    global _reserve
    _reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.register_at_fork(after_in_child=_make_private)


def _make_private() -> None:
    for start, size_bytes, process in _mappings():
        owner = _owners.get(start)
        if process != _process:  # of another rank: nothing in a child refers to it, and it shall not keep it alive
            _map_private(start, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        elif owner is not None:
            _map_private(start, size_bytes, mmap.MAP_PRIVATE, owner.descriptor)
        else:  # only a gradient kept by the user refers to this memory: its descriptor is closed
            _copy_private(start, size_bytes)


def _mappings() -> Iterator[tuple[int, int, int]]:
    """Address, size and owning process of every segment mapped in this process."""
    for line in _read_maps().splitlines():
        if found := _MAPPING.match(line):
            start, stop = int(found[1], 16), int(found[2], 16)
            yield start, stop - start, int(found[3])


def _read_maps() -> str:
    global _reserve
    path = Path("/proc/self/maps")
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the limit of open files
        os.close(_reserve)
        text = path.read_text(encoding="utf-8", errors="replace")
        _reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return text


def _copy_private(address: int, size_bytes: int) -> None:
    """Replace the mapping by a private copy. In pieces: the copy exists twice, and string_at() ends at 2 GiB."""
    for place in range(address, address + size_bytes, _COPIED_BYTES):
        size = min(_COPIED_BYTES, address + size_bytes - place)
        content = ctypes.string_at(place, size)
        _map_private(place, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        ctypes.memmove(place, content, size)


def _map_private(address: int, size_bytes: int, flags: int, descriptor: int) -> None:
    found = _libc_mmap()(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, descriptor, 0)
    if found == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap of private memory in a forked child failed")


@cache
def _libc_mmap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    return function
