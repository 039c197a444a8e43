"""How does a process of a Lightning job leave, and what becomes of those that it launched?"""

import atexit
import subprocess
import sys
import time
from functools import cache

import torch.distributed as dist

# Enough for a rank that is on its way out to show its own error; one that hangs costs it in full.
GRACE_SECONDS = 5.0


def end_children(launcher: object) -> None:
    """End the ranks that this process launched as scripts, those that do not end by themselves by force.

    Without this a rank that hangs lives on after the one which launched it.
    """
    _end(_scripts(launcher))


def leave_in_order(launcher: object) -> None:
    """From now on: this process ends with its process group, and if an exception ends it, with those it launched."""
    _destroy_at_exit()
    if _scripts(launcher):
        atexit.register(_end_if_failed, _scripts(launcher))  # runs before what was registered before


def _scripts(launcher: object) -> list[subprocess.Popen[bytes]]:
    """The launcher's own list; ranks that multiprocessing started are ended by it."""
    listed = getattr(launcher, "procs", [])
    return listed if all(isinstance(process, subprocess.Popen) for process in listed) else []


def _end(listed: list[subprocess.Popen[bytes]]) -> None:
    children = list(listed)
    # Lightning's observer thread reads this list, and would kill this process, too, when it sees one of them fail:
    # before our error is shown.
    listed.clear()
    deadline = time.monotonic() + GRACE_SECONDS
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _end_if_failed(listed: list[subprocess.Popen[bytes]]) -> None:
    if getattr(sys, "last_value", None) is not None:  # the exception that nobody caught; it has been shown
        _end(listed)


@cache
def _destroy_at_exit() -> None:
    # Lightning does so for NCCL only; on gloo torch's own threads abort a process now and then that leaves without.
    atexit.register(_destroy)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
