"""Private process groups of a parent group, so that headers and payloads never pair with collectives of the user.

Their members make them in the first call on the parent group. First they connect in a tree of stars
(:mod:`~legacy_ddp._ranks.first_meeting`), then the gloo group for gradients. Between hosts, the ranks of equal index on
their hosts form a gloo group. ``Groups.connect_gloo`` opens every gloo connection of the library. torch's ``new_group``
is not usable: it is collective over all ranks of the job, and its names depend on the number of groups of a rank.
"""

import atexit
import errno
import multiprocessing
import multiprocessing.util
import os
import resource
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from legacy_ddp import _torch as internals
from legacy_ddp._check_settings import Checks
from legacy_ddp._errors import (
    LegacyDDPError,
    LostPeerError,
    PeerError,
    PeerLostError,
    SyncTimeoutError,
    argument_errors,
)
from legacy_ddp._interrupts import OwnedLock, run_in_children
from legacy_ddp._ranks.first_meeting import find_hosts, meet_members, why_gloo
from legacy_ddp._ranks.star import Star
from legacy_ddp._text import error_text, system_error_text
from legacy_ddp._watchdog import Watchdog, await_turn, forget_turn

_SINGLE_RANK = 'torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)'
_DESTROYED = "process_group was destroyed; assign a live one to .process_group"
_OF_GROUP = 9  # measured with torch 2.13, 16 ranks: at most 9 descriptors after an all_reduce
_OF_TREE = 4  # two listeners, the connection to the rank above, a directory
_WATCHDOG = 9  # file, two listening sockets, selector, two to wake its thread, two connections, a request

_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, Groups]" = weakref.WeakKeyDictionary()
_alive: "weakref.WeakSet[Groups]" = weakref.WeakSet()
# In a forked child: the groups of torch that it has inherited, with the number of the process that it was forked from.
inherited: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()


class GroupHandle:
    """The user's process group. Copies of a wrapper share the group; a pickle loses the group."""

    def __init__(self, process_group: dist.ProcessGroup | DeviceMesh | None, *, lost: bool = False) -> None:
        self._process_group = process_group
        self._lost = lost

    def resolve(self) -> dist.ProcessGroup:
        group = dist.group.WORLD if self._process_group is None else self._process_group
        if isinstance(group, dist.ProcessGroup) and group in internals.groups_of_torch() and not self._lost:
            return group
        return _find_group(self._process_group, is_lost=self._lost)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupHandle":
        return GroupHandle(self._process_group, lost=self._lost)

    def __getstate__(self) -> dict[str, Any]:
        return {"_process_group": None, "_lost": self._lost or self._process_group is not None}


def resolve_group(process_group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The group to use for the argument ``process_group``.

    Raises:
        ValueError: no default group, a mesh of several dimensions, a destroyed group.
        TypeError: a different type, or the result of ``new_group`` on a process outside the group.
    """
    return GroupHandle(process_group).resolve()


@argument_errors
def _find_group(process_group: dist.ProcessGroup | DeviceMesh | None, *, is_lost: bool) -> dist.ProcessGroup:
    """As :func:`resolve_group`, for a mesh, and for the errors. ``is_lost``: the argument did not survive a pickle."""
    if is_lost:
        raise ValueError(
            "process_group was not carried by the pickle, expected a live one; assign .process_group after loading"
        )
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise ValueError(
                f"process_group is a DeviceMesh of {process_group.ndim} dimensions, expected 1; pass mesh[name]"
            )
        try:
            process_group = process_group.get_group()
        except RuntimeError as error:  # torch does not know the group of the mesh any more
            raise ValueError(_DESTROYED) from error
    if process_group is None:
        process_group = dist.group.WORLD if dist.is_initialized() else None
        if process_group is None:
            raise ValueError(
                "no default process group: start with torchrun and call torch.distributed.init_process_group() first, "
                f"or pass process_group=; plain python and notebooks, for a single rank: {_SINGLE_RANK}"
            )
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group is of the wrong type: got {process_group!r}, expected ProcessGroup, DeviceMesh or None "
            "(new_group() returns no ProcessGroup on ranks outside it; wrap on its members only)"
        )
    if process_group not in internals.groups_of_torch():
        raise ValueError(_DESTROYED)
    return process_group


def descriptors_of_gloo(size: int) -> int:
    """The number of descriptors of a gloo group of ``size`` ranks in each of their processes."""
    return min(size + 4, _OF_GROUP)


def check_descriptors(count: int) -> None:
    """Check that this process can open ``count`` more descriptors."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise OSError(
            f"got a limit of {limit} open files with room for {len(opened)} more, expected room for {count} more; "
            "raise it with ulimit -n"
        ) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


class Groups:
    """The tree and the payload group of a parent group, shared by all wrappers of the process on this parent."""

    def __init__(self, parent: dist.ProcessGroup) -> None:
        self.rank = parent.rank()
        self.size = parent.size()
        self.global_ranks = dist.get_process_group_ranks(parent)  # the ranks of the group, counted in the whole job
        self.wrapper_count = 0  # wrappers with a successful call on this group
        self.has_wrapper = False  # until a wrapper makes a call, and not only the function all_reduce_gradients()
        self.busy: OwnedLock[Any] = OwnedLock()  # held by the call under way
        self.watchdog: Watchdog | None = None  # None: not wanted, or no call yet
        self.endpoints_exchanged = self.size == 1  # a single rank has no peers
        self.star: Star | None = None  # None: a single rank, or no call yet
        self.cards: Sequence[dict[str, Any]] = ()  # of all ranks
        self.host_problem = ""  # why the ranks of a host share no memory
        self.is_fallback_told = False  # the warning about shared memory that failed later
        self.hosts: Sequence[tuple[int, ...]] = ()  # with shared memory: the ranks of every host, ascending
        self.host_ranks: tuple[int, ...] = ()  # of this host
        # With shared memory on several hosts: the group of the ranks of equal index on their hosts.
        self.between: Any = None
        self._at_end: list[Callable[[], None]] = []  # in this order; also at exit
        self._end = weakref.finalize(self, _call_all, self._at_end)
        self._payload: Any = None
        self._store: Any = None
        self._timeout = timedelta()
        self._parent = weakref.ref(parent)
        self._issued_before = 0
        self.lost = ""  # the text of the failure after which no call is possible
        self._lost_ranks: tuple[int, ...] = ()

    def build(self, parent: dist.ProcessGroup, timeout_seconds: float | None, warn_after_seconds: float | None) -> None:
        """Collective: connect the members. A single rank needs no connection."""
        if self.size == 1:
            return
        timeout = self.timeout(timeout_seconds)
        store = internals.PrefixStore("legacy_ddp", internals.group_store(parent))
        met = meet_members(
            store,
            self.rank,
            self.size,
            timeout,
            self._check_room,
            has_wrapper=self.has_wrapper,
            warn_after_seconds=warn_after_seconds,
        )
        self.star, self.cards, self._store, self._timeout = met.star, met.cards, met.store, timeout
        self._at_end.append(met.star.close)
        self._payload = self.connect_gloo("payload", self.rank, self.size)

    def _check_room(self, ranks_below: int) -> None:
        check_descriptors(ranks_below + _OF_TREE + descriptors_of_gloo(self.size) + _WATCHDOG)

    def timeout(self, seconds: float | None) -> timedelta:
        """The limit of a wait: ``seconds``, None for the present timeout of the parent group."""
        parent = self._parent()
        if seconds is not None or parent is None:
            return self._timeout if seconds is None else timedelta(seconds=seconds)
        return internals.group_timeout(parent)

    def connect_gloo(self, name: str, rank: int, size: int) -> Any:
        """Collective on the ranks that give this ``name``: connect them to a gloo group of ``size`` ranks, in a ring.

        ``rank``: the number of this rank in the new group.
        """
        return internals.connect_gloo(internals.PrefixStore(name, self._store), rank, size, self._timeout)

    def open_watchdog(self, checks: Checks) -> Watchdog | None:
        """Make the watchdog, unless ``checks`` are off. Returns a new one, or None. Before endpoints are exchanged."""
        if self.watchdog is not None or checks.level == "off":
            return None
        watchdog = Watchdog(
            self.rank, self.global_ranks, warn_after_seconds=checks.warn_after_seconds, report_dir=checks.report_dir
        )
        # Closed before the star: when a connection of the star ends, the other ranks ask for the exit reason at once.
        self._at_end.insert(0, watchdog.close)
        self.watchdog = watchdog
        if self.has_wrapper:
            watchdog.note_wrapper()
        return watchdog

    def note_wrapper(self) -> None:
        self.has_wrapper = True
        if self.watchdog is not None:
            self.watchdog.note_wrapper()

    def payload(self, device: torch.device) -> Any:
        """The group for tensors of ``device``: the private group for CPU and on gloo, else the user's group."""
        parent = self._parent()
        if parent is None or device.type == "cpu" or self.size == 1:
            return self._payload
        try:
            backend = internals.backend_name(parent, device)
        except RuntimeError as error:
            raise ValueError(
                f"process_group has no backend for tensors on {device.type!r}; initialise it with one, "
                "or move the module to a device that it serves"
            ) from error
        return self._payload if backend == "gloo" else parent

    def issued(self) -> int | None:
        """The number of collectives that the script has issued on its group since :meth:`note_issued`; None if the
        backend of the group does not count them, or does not carry gradients."""
        parent, device = self._parent(), self.counting_device
        if parent is None or device is None:
            return None
        return internals.issued_collectives(parent, device) - self._issued_before

    def note_issued(self) -> None:
        self._issued_before += self.issued() or 0

    @cached_property
    def counting_device(self) -> torch.device | None:
        parent = self._parent()
        return None if parent is None or self.size == 1 else internals.counting_device(parent)

    def is_private(self, group: Any) -> bool:
        return any(group is private for private in (self._payload, self.between))

    def mark_failed(self, error: BaseException) -> None:
        """Refuse further calls, because the ranks may be in different calls."""
        self.lost = error_text(error)  # not the error: its traceback holds local variables
        self._lost_ranks = error.ranks if isinstance(error, LegacyDDPError) else ()

    def lost_error(self) -> LostPeerError:
        """The error of every call after :meth:`mark_failed`."""
        return LostPeerError(
            f"the process group is not usable after an earlier failure ({self.lost}); "
            "end this process, or destroy the process group and make a new one",
            ranks=self._lost_ranks,
        )

    def close(self) -> None:
        """Drop the groups: their threads end here, and not while the interpreter is finalizing."""
        self._end()
        self._payload = self.between = None

    @property
    def hosts_text(self) -> str:
        """``2 hosts of 4 ranks, gloo between them``; empty for one host, and without shared memory."""
        if self.between is None:
            return ""
        return f"{len(self.hosts)} hosts of {len(self.host_ranks)} ranks, gloo between them"

    def close_star(self, error: BaseException) -> None:
        """Close the connections of the tree because of ``error``: the other ranks notice at once."""
        if self.star is not None:
            if isinstance(error, LostPeerError):
                self.star.give_up(is_late=isinstance(error, SyncTimeoutError))
            self.star.close()
            self.star = None

    def after_fork(self) -> None:
        """In a forked child: close the connections, which would hide the end of the parent from the other ranks."""
        if self.watchdog is not None:
            self.watchdog.after_fork()
        if self.star is not None:
            self.star.forget()
        self._end.detach()
        # Without this, torch would wait for threads that only the parent has, or end with SIGSEGV.
        for group in (self._payload, self.between):
            if group is not None:
                internals.keep_for_ever(group)


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    """Call all functions in order, also if one raises."""
    with ExitStack() as stack:
        for function in reversed(functions):
            stack.callback(function)


def refuse_inherited(parent: dist.ProcessGroup, operation: object) -> None:
    """Refuse a call in a forked child: it has the sockets of the group but not its threads, and would wait for ever."""
    process = inherited.get(parent)
    if process is not None and parent.size() > 1:
        raise LegacyDDPError(
            f"{operation}: the process group belongs to process {process}, from which this process was forked: got the "
            f"call in process {os.getpid()}, which has no connections to the other ranks, expected it in process "
            f"{process}; make the call there, or fork before init_process_group()"
        )


def groups_of(
    parent: dist.ProcessGroup,
    timeout_seconds: float | None,
    *,
    for_wrapper: bool = True,
    warn_after_seconds: float | None = None,
) -> Groups:
    """The private groups of ``parent``. Collective if this process has to build them.

    ``timeout_seconds``: limit of a wait, None for the timeout of ``parent``. ``for_wrapper``: false for the function
    ``all_reduce_gradients()``. ``warn_after_seconds``: as of :class:`Checks`, None for no warning.

    Raises:
        PeerError: a rank cannot open its connections; the next call tries again.
        LostPeerError: a member did not arrive, or the store is gone; the groups then stay unusable.
    """
    groups = _groups.get(parent)
    if groups is not None and for_wrapper:
        groups.note_wrapper()
    if groups is None:
        groups = Groups(parent)
        groups.has_wrapper = for_wrapper
        _alive.add(groups)
        _close_at_exit()
        try:
            groups.build(parent, timeout_seconds, warn_after_seconds)
            _groups[parent] = groups
        except BaseException as error:  # also an interrupt: the other ranks may be connected
            if groups.size == 1 or isinstance(error, PeerError):  # nothing was connected: the next call may succeed
                raise
            groups.mark_failed(error)
            _groups[parent] = groups
            groups.close_star(error)
            if isinstance(error, LegacyDDPError) or not isinstance(error, RuntimeError):
                raise
            raise PeerLostError(
                f"first collective on this process group failed: {error_text(error)}", phase="agree"
            ) from error
    return groups


def join_hosts(groups: Groups, first_problem: Callable[[str], str]) -> None:
    """Collective: connect the hosts, or note in ``groups`` why only gloo is used: the same on all ranks.

    ``first_problem``: collective, returns the first text of any rank that is not empty.
    """
    reason, hosts, between = why_gloo(groups.cards), find_hosts(groups.cards), list[Any]()

    def connect() -> None:
        # With the ranks of equal index on the other hosts, because they own the same part of the gradients.
        number, ranks = next(each for each in enumerate(hosts) if groups.rank in each[1])
        between.append(groups.connect_gloo(f"hosts, index {ranks.index(groups.rank)}", number, len(hosts)))

    if not reason and len(hosts) > 1:
        reason = first_problem(_problem_of(lambda: check_descriptors(descriptors_of_gloo(len(hosts)))))
        reason = reason or first_problem(_problem_of(connect))
    if not reason:
        groups.hosts, groups.between = hosts, between[0] if between else None
        groups.host_ranks = next(ranks for ranks in hosts if groups.rank in ranks)
    groups.host_problem = reason


def _problem_of(step: Callable[[], None]) -> str:
    try:
        step()
    except (OSError, RuntimeError) as error:
        return f"no connection between hosts ({system_error_text(error)})"
    return ""


@cache
def _close_at_exit() -> None:
    run_in_children(_after_fork)
    atexit.unregister(_close_all)  # of an earlier call, if an exception came after it
    atexit.register(_close_all, shows_exit=False)
    if multiprocessing.parent_process() is not None:  # such a process ends without atexit
        multiprocessing.util.Finalize(None, _close_all, kwargs={"shows_exit": True}, exitpriority=0)


def _after_fork() -> None:
    for groups in list(_alive):
        groups.after_fork()
    _alive.clear()
    forget_turn()  # the order of ends is about the processes of the ranks


def _close_all(*, shows_exit: bool) -> None:
    """At the end of the process. Until then the watchdogs answer other ranks."""
    for groups in list(_alive):
        if groups.watchdog is not None:
            groups.watchdog.note_end()
    await_turn(shows_exit=shows_exit)
    for groups in list(_alive):
        groups.close()


def _note_inherited() -> None:
    """In a forked child: keep the groups of the parent, and refuse calls on them (:func:`refuse_inherited`)."""
    for group in list(internals.groups_of_torch()):
        inherited.setdefault(group, os.getppid())
        internals.keep_for_ever(group)


# At the import: the first call of the library on a group may be the call of a child.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_note_inherited)
