"""Process groups: connection, stores, timeouts, backends and options of operations; torch's ``sys.excepthook``."""

import ctypes
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from inspect import getclosurevars, isfunction
from operator import attrgetter
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store
from torch.distributed import distributed_c10d as c10d

# The sequence number of these backends counts collectives only. That of gloo also counts sends and lists of objects,
# and the ranks of a correct program may have different numbers of those.
COUNTING_BACKENDS = {"nccl", "xccl"}


def connect_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Collective: a gloo group of ranks that are connected in a ring, which all_reduce and all_gather use. Other pairs
    connect at their first exchange. Interfaces are chosen as by torch."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    gloo: Any = ProcessGroupGloo  # the stubs of torch lack these names
    options = gloo._Options()
    options._timeout = timeout
    # With lazy_init the constructor does not connect every rank to every other rank.
    options._devices = [gloo.create_device(interface=name, lazy_init=True) for name in names]
    options._devices = options._devices or [gloo.create_default_device(lazy_init=True)]
    options._threads = 2 * len(options._devices)  # as torch
    group = gloo(store, rank, size, options)
    # Connect the ring now: later, a thread of gloo would abort a process that has no descriptor left for a connection.
    group.allreduce([torch.zeros(1, device="cpu")]).wait()
    return group


# All groups of this process, without those that destroy_process_group() has ended. In C, because every call asks.
groups_of_torch: Callable[[], Mapping[dist.ProcessGroup, object]] = partial(attrgetter("pg_map"), c10d._world)


def group_store(group: dist.ProcessGroup) -> Store:
    """The key-value store of ``group``, with the prefix of the group."""
    return c10d._world.pg_map[group][1]


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout of ``group``; torch's default if the backend has no such option."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return cast(timedelta, options._timeout)
    return c10d.default_pg_timeout


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend for tensors on ``device``: ``gloo``, ``nccl``, ...; RuntimeError without a backend."""
    return str(group._get_backend(torch.device(device.type)).name())


def counting_device(group: dist.ProcessGroup) -> torch.device | None:
    """A device whose backend in ``group`` counts issued collectives, None without one."""
    for device in group._device_types:
        counts = hasattr(group._get_backend(device), "_get_sequence_number_for_group")  # not in every torch
        if counts and backend_name(group, device) in COUNTING_BACKENDS:
            return device
    return None


def issued_collectives(group: dist.ProcessGroup, device: torch.device) -> int:
    """The number of collectives that this process issued in ``group``, on a :func:`counting_device`."""
    backend: Any = group._get_backend(device)
    return int(backend._get_sequence_number_for_group())


def issued_on_all_groups() -> int:
    """The number of operations that this process has issued on all its groups, for backends that count them."""
    total = 0
    groups: list[Any] = [*groups_of_torch()]
    for group in groups:
        with suppress(RuntimeError):  # a backend without a count
            total += group._get_sequence_number_for_group()
    return total


def operation_options(kind: str, timeout: timedelta) -> Any:
    """Options for one operation (``Allreduce``, ``AllToAll``, ...), with its timeout."""
    options = getattr(c10d, f"{kind}Options")()
    options.timeout = timeout
    return options


def keep_for_ever(group: Any) -> None:
    """Never free ``group``, not even at the end of the interpreter: its destructor waits for its threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def inner_excepthook(hook: Callable[..., Any]) -> Callable[..., Any] | None:
    """The hook that torch's ``sys.excepthook`` calls after printing the rank; None if ``hook`` is not torch's."""
    if getattr(hook, "__module__", "") != c10d.__name__ or not isinstance(hook, FunctionType):
        return None
    return cast(Callable[..., Any] | None, getclosurevars(hook).nonlocals.get("old_hook"))


def _release_default_groups() -> None:
    """Replace the default group in the default arguments of ``torch.distributed.nn.functional`` by None.

    torch imports this module for the first optimizer, usually when a default group exists. The default arguments then
    keep the threads of the group alive after destroy_process_group(): the interpreter aborted at exit ("terminate
    called without an active exception") in 5 of 13 runs. With None the functions use the default group of the time of
    the call.
    """
    module = import_module("torch.distributed.nn.functional")
    for function in filter(isfunction, vars(module).values()):
        held = function.__defaults__ or ()
        if any(isinstance(value, dist.ProcessGroup) for value in held):
            function.__defaults__ = tuple(None if isinstance(value, dist.ProcessGroup) else value for value in held)


_release_default_groups()
