"""Segments: anonymous files in memory, and their private copies in forked children."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from legacy_ddp._buckets import private_fork
from legacy_ddp._buckets.segment import Segment
from tests.helpers.paths import ROOT

PAGE = os.sysconf("SC_PAGESIZE")


def _written_by_a_child(memory: torch.Tensor) -> tuple[list[int], list[int]]:
    """The values that a child finds and those of this process after the child has written."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, bytes(memory.unique().tolist()))
        memory.fill_(9)
        os._exit(0)
    os.waitpid(child, 0)
    found = list(os.read(read, 16))
    os.close(read)
    os.close(write)
    return found, memory.unique().tolist()


def test_a_child_writes_to_a_copy() -> None:
    segment = Segment(3 * PAGE)
    assert _written_by_a_child(segment.memory.fill_(7)) == ([7], [7])


def test_a_kept_segment_of_several_pieces_is_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor is closed. From 2 GiB on the copy failed, and the child wrote to the parent."""
    monkeypatch.setattr(private_fork, "_COPIED_BYTES", PAGE)
    memory = Segment(3 * PAGE + 5).memory
    memory[:PAGE], memory[PAGE:] = 5, 7

    assert _written_by_a_child(memory) == ([5, 7], [5, 7])


def _open_one_more() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return None


@contextmanager
def _no_file_left() -> Iterator[None]:
    before, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        while (descriptor := _open_one_more()) is not None:
            held.append(descriptor)
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_child_forked_at_the_limit_of_open_files_writes_to_a_copy() -> None:
    segment = Segment(PAGE)
    segment.memory.fill_(7)
    with _no_file_left():
        child = os.fork()
        if child == 0:
            segment.memory.fill_(9)
            os._exit(0)
        os.waitpid(child, 0)
    assert segment.memory.unique().tolist() == [7]


_OLD_C_LIBRARY = """
import fcntl, os
del os.memfd_create, os.MFD_CLOEXEC, os.MFD_ALLOW_SEALING
for name in [name for name in vars(fcntl) if name.startswith("F_SEAL") or name == "F_ADD_SEALS"]:
    delattr(fcntl, name)
from legacy_ddp._buckets.segment import Segment
segment = Segment(10)
segment.memory.fill_(3)
try:
    os.ftruncate(segment.descriptor, 20)
except PermissionError:
    print("sealed", os.pread(segment.descriptor, 10, 0))
"""


def test_a_python_that_does_not_know_memfd_create_makes_segments() -> None:
    """Some builds of Python were made with an old C library: the import failed with an AttributeError."""
    run = subprocess.run(
        [sys.executable, "-c", _OLD_C_LIBRARY], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert (run.stdout.strip(), run.stderr) == (f"sealed {bytes([3] * 10)}", "")
