"""Arrival of all members of a group at its store, before any of them connects.

A rank that cannot connect tells the others in the store. Without this step such a rank would end in an error of gloo,
or be aborted by a thread of gloo, while the other ranks wait for its connections until their timeout.
"""

import json
import os
import time
from datetime import timedelta

from legacy_ddp import _torch as internals
from legacy_ddp._compare import name_ranks
from legacy_ddp._error_text import system_error_text
from legacy_ddp._errors import PeerError, SyncTimeoutError

_BEGINS, _ARRIVALS, _PROBLEM = "begins", "arrivals", "problem"
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.25
# Control and payload; measured with torch 2.13: 10, 12 and 16 descriptors for both of 2, 3 and 5 ranks.
_GROUPS, _BESIDE_RANKS = 2, 4
# Of the watchdog: file, listening socket, selector, two for waking up, two connections, a request.
_WATCHDOG = 8


def meet_members(store: internals.Store, rank: int, size: int, timeout: timedelta) -> internals.Store:
    """Collective: wait for all members. Returns the part of ``store`` for their connections.

    Raises:
        PeerError: on all ranks: a rank is at its limit of open files.
        SyncTimeoutError: a member did not arrive.
    """
    # The count of begins numbers the generations, also on a store that an earlier generation used.
    generation = (store.add(_BEGINS, 1) - 1) // size
    of_generation = internals.PrefixStore(str(generation), store)
    try:
        check_descriptors(_GROUPS * descriptors_of_gloo(size) + _WATCHDOG)
    except OSError as error:
        of_generation.set(_PROBLEM, json.dumps([rank, system_error_text(error)]))
    _await_members(store, generation, rank, size, timeout)
    if of_generation.check([_PROBLEM]):  # written before the arrival of its rank: equal on all ranks
        failed, problem = json.loads(of_generation.get(_PROBLEM))
        raise PeerError(
            f"first collective on this process group: rank {failed} cannot open its connections: {problem}",
            ranks=(failed,),
            phase="agree",
        )
    return of_generation


def descriptors_of_gloo(size: int) -> int:
    """The number of descriptors of a gloo group of ``size`` ranks in each of their processes."""
    return size + _BESIDE_RANKS


def check_descriptors(count: int) -> None:
    """Check that this process can open ``count`` more descriptors.

    Raises:
        OSError: a limit of this process or of the machine.
    """
    opened: list[int] = []
    try:
        opened.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(count))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _await_members(store: internals.Store, generation: int, rank: int, size: int, timeout: timedelta) -> None:
    """Wait until every member arrived. The error names the missing ranks; the error of torch's group would not."""
    keys = [f"{generation}/arrived/{other}" for other in range(size)]
    store.set(keys[rank], "1")
    store.add(_ARRIVALS, 1)
    deadline, pause = time.monotonic() + timeout.total_seconds(), _SHORTEST_PAUSE_SECONDS
    # Polls one counter: the store's own wait fills the terminal with its timeouts.
    while store.add(_ARRIVALS, 0) < (generation + 1) * size:
        if time.monotonic() > deadline:
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            raise SyncTimeoutError(
                f"first collective on this process group: {name_ranks(missing)} did not arrive within "
                f"{timeout.total_seconds():g} s; look at the output of these processes, or construct the wrapper on "
                "every rank of the group",
                ranks=missing,
                phase="agree",
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
