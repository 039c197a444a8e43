"""Threads, children and open files of processes as /proc shows them, and the load of the machine.

A process or thread may end between the listing and the reading.
"""

import logging
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from multiprocessing.util import _finalizer_registry
from pathlib import Path
from types import ModuleType

import torch
from torch._dynamo.utils import counters
from torch.nn.modules import module as global_hooks

from legacy_ddp._log import is_configured

# What a job may leave changed in a process that runs further jobs


_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def slowness() -> float:
    """By how much limits of time grow with the load of the machine: they are for hanging, not for waiting."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def process_state() -> dict[str, object]:
    """Name and value of everything that a later job could notice; equal before and after a job that cleans up."""
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": _descriptors(),
        "children": children(),
        "finalizers": _finalizers(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "standard streams": [os.fstat(end)[:3] for end in range(3)] + [id(sys.stdout), id(sys.stderr)],
        "signal handlers": [signal.getsignal(number) for number in _SIGNALS],
        "limits": [resource.getrlimit(limit) for limit in _LIMITS],
        "hooks of Python": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.gettrace(), sys.getprofile()),
        "loggers": _loggers(),
        "constants of the library": _constants(),
        "defaults of torch": _torch_defaults(),
        "compiled frames": counters["frames"]["total"],
        "global hooks": [len(hooks) for hooks in _global_hooks()],
    }


def _descriptors() -> list[str]:
    """Targets of the open descriptors, without the one that listed them.

    One report file is left out: SIGTERM leaves stacks in the newest, which stays open until there is a newer one.
    """
    links = open_files()
    reports = [link for link in links if re.search(r"/legacy_ddp-[^/]*-rank\d+-", link)]
    return sorted(link for link in links if not link.endswith("/fd") and link not in reports[:1])


def _finalizers() -> int:
    """Functions to be called at the end of the process, without the library's own, which stays."""
    callbacks = [finalizer._callback for finalizer in _finalizer_registry.values()]
    return sum(not callback.__module__.startswith("legacy_ddp") for callback in callbacks)


def _loggers() -> dict[str, object]:
    """Without the library's own handler, which stays."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("legacy_ddp")]
    found: dict[str, object] = {"disable": logging.root.manager.disable}
    for logger in (logging.root, *map(logging.getLogger, names)):
        handlers = [id(handler) for handler in logger.handlers if type(handler).__module__ != is_configured.__module__]
        facts = (logger.level, logger.propagate, logger.disabled, handlers)
        if facts != (logging.NOTSET, True, False, []):  # as a logger that nobody asked for yet
            found[logger.name] = facts
    return found


def _constants() -> dict[str, object]:
    """Numbers in capital letters of the library's modules, which some tests change."""
    return {
        f"{module.__name__}.{constant}": value
        for module in _modules()
        for constant, value in vars(module).items()
        if constant.isupper() and isinstance(value, int | float)
    }


@cache
def _modules() -> list[ModuleType]:
    """Modules of the library that were loaded before the first job: loading another one changes nothing."""
    return [module for name, module in sys.modules.items() if name.startswith("legacy_ddp")]


def _torch_defaults() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch._C._len_torch_function_stack(),  # a default device of "cpu" is a mode, too, and the compiler sees it
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.__future__.get_swap_module_params_on_conversion(),
        torch.__future__.get_overwrite_module_params_on_conversion(),
    )


def _global_hooks() -> list[dict[int, object]]:
    """Hooks on all modules. Hooks on all optimizers are not compared: the library's own stays by design."""
    return [
        hooks for name, hooks in vars(global_hooks).items() if name.startswith("_global_") and isinstance(hooks, dict)
    ]


# What is read may have ended: there is no such file, or no such process (ESRCH) behind an open file.
_unless_ended = suppress(FileNotFoundError, ProcessLookupError)


def children() -> list[int]:
    """Children of the threads of this process."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with _unless_ended:
            found += map(int, Path(f"/proc/self/task/{task}/children").read_text().split())
    return found


def open_files() -> list[str]:
    """Targets of the open descriptors of this process, among them the list itself."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with _unless_ended:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def state(pid: int) -> str:
    """The letter of proc(5), for example T for stopped; Z also for a process that is gone."""
    fields: list[str] = []
    with _unless_ended:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0] if fields else "Z"


@contextmanager
def limited(kind: int, amount: int) -> Iterator[None]:
    """This process has no more of what ``resource.RLIMIT_...`` names."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (amount, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def leave_open_files(count: int) -> None:
    closed = (number for number in range(1024) if not os.path.lexists(f"/proc/self/fd/{number}"))
    *_, limit = islice(closed, count + 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
