"""What is read from /proc while threads, children and files come and go."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.helpers import processes

READS = 500


@contextmanager
def _coming_and_going(change: Callable[[], object]) -> Iterator[None]:
    ended = threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            change()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _start_threads() -> None:
    threads = [threading.Thread(target=int) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _open_and_close() -> None:
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize(
    "read, change", [(processes.children, _start_threads), (processes.open_files, _open_and_close)]
)
def test_what_ends_between_listing_and_reading_is_left_out(
    read: Callable[[], object], change: Callable[[], object]
) -> None:
    """A thread that had just ended failed the comparison of the state of processes, and so ``make test``."""
    with _coming_and_going(change):
        for _ in range(READS):
            read()


def test_a_child_is_found_with_its_state_and_its_environment() -> None:
    mark = f"PROCESSES_TEST={os.getpid()}"
    program = [sys.executable, "-S", "-c", "input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, env=dict([mark.split("=")])) as child:
        assert child.pid in processes.children()
        assert processes.with_variable(mark)[child.pid].startswith(sys.executable.encode())
        assert processes.state(child.pid) in "RSD"
    assert processes.state(child.pid) == "Z"
    assert child.pid not in processes.with_variable(mark)
