"""The end of a process of a Lightning job, and of the processes that it launched."""

import atexit
import subprocess
import sys
import time
from functools import cache

import torch.distributed as dist

# Enough for a rank that is about to end to show its own error. A rank that hangs takes the full time.
GRACE_SECONDS = 5.0


def end_children(launcher: object) -> None:
    """End the ranks launched by this process as scripts; kill the ranks that do not end within GRACE_SECONDS.

    Otherwise a rank that hangs outlives the process that launched the rank.
    """
    _end(_scripts(launcher))


def set_up_exit(launcher: object) -> None:
    """Destroy the process group at exit of this process. If an exception ends the process, end the launched ranks."""
    _destroy_at_exit()
    if _scripts(launcher):
        atexit.register(_end_if_failed, _scripts(launcher))  # runs before all exit functions registered earlier


def _scripts(launcher: object) -> list[subprocess.Popen[bytes]]:
    """The launcher's own list of launched scripts. Empty for multiprocessing, which ends its processes itself."""
    listed = getattr(launcher, "procs", [])
    return listed if all(isinstance(process, subprocess.Popen) for process in listed) else []


def _end(listed: list[subprocess.Popen[bytes]]) -> None:
    children = list(listed)
    # Lightning's observer thread reads this list. If it finds a failed process there, it kills this process, too,
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
    if getattr(sys, "last_value", None) is not None:  # the uncaught exception; Python has shown it
        _end(listed)


@cache
def _destroy_at_exit() -> None:
    # Lightning destroys the group for NCCL only. With gloo, a process that exits without destroying the group sometimes
    # aborts in a thread of torch.
    atexit.register(_destroy)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
