"""System calls that a sandbox, a container or a limit refuses while the ranks of a host meet.

Gloo is used on all ranks. Once the others have connected to a hub that cannot read from them, it is an error on all.
"""

import errno
import fcntl
import os
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from legacy_ddp import PeerError
from tests.helpers import tiers
from tests.helpers.host_sockets import refused
from tests.helpers.hosts import arriving_in_order
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import add_gradients, gradient_values, step, transport_line, wrap

pytestmark = pytest.mark.parametrize("transport", ["host"], indirect=True)

HUB, LEAF = 0, 1
# By call: where it is refused, and the beginning of the reason.
METHODS = {
    "socket": ((HUB, LEAF), "no connection on the host"),
    "bind": ((HUB,), "no connection on the host"),
    "listen": ((HUB,), "no connection on the host"),
    "connect": ((LEAF,), "no connection on the host"),
    "getsockopt": ((LEAF,), "no connection on the host"),
    "send": ((LEAF,), "no connection on the host"),
    "sendmsg": ((HUB, LEAF), "no shared memory"),
    "recvmsg": ((HUB, LEAF), "no shared memory"),
}
FUNCTIONS: dict[str, tuple[Any, str, str]] = {
    "mkdir": (os, "mkdir", "no connection on the host"),
    "memfd_create": (os, "memfd_create", "no shared memory"),
    "fallocate": (os, "posix_fallocate", "no shared memory"),
    "fcntl": (fcntl, "fcntl", "no shared memory"),
}
ERRORS = ("EPERM", "EACCES", "EMFILE", "ENFILE", "ENOBUFS", "ENOMEM", "ENOSYS", "ETOOMANYREFS")
PLACES = [(call, place) for call, (places, _) in METHODS.items() for place in places]
PLACES += [each for each in product(FUNCTIONS, (HUB, LEAF)) if each != ("mkdir", LEAF)]
ALL_ROWS = [(call, place, name) for (call, place), name in product(PLACES, ERRORS)]
# EPERM everywhere, the limit of open files everywhere on the hub, and each of the others here and there.
EVERYWHERE = [(place, "EPERM") for place in (HUB, LEAF)] + [(HUB, "EMFILE")]
ROWS = [row for index, row in enumerate(ALL_ROWS) if row[1:] in EVERYWHERE or index % (len(ERRORS) + 1) == 1]
ROWS = list(tiers.choose(ALL_ROWS, ROWS))
# On the hub, after the other rank has connected.
LATER = ("accept", "getsockopt", "recv")
# What ``ulimit -n`` mends is named instead of the error, whichever call met it.
LIMITS = {
    "EMFILE": "the limit of open files of this process is reached; raise it with ulimit -n",
    "ENFILE": "the limit of open files of this machine is reached; raise the sysctl fs.file-max",
    "ETOOMANYREFS": "too many open files of this user are on their way; raise the limit with ulimit -n",
}


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _reason(call: str, place: int, name: str) -> str:
    prefix = METHODS[call][1] if call in METHODS else FUNCTIONS[call][2]
    error = _error(getattr(errno, name))
    return f"rank {place}: {prefix} ({LIMITS.get(name) or f'{type(error).__name__}: {error}'})"


def _refused(call: str, number: int) -> AbstractContextManager[object]:
    """Refuse ``call`` on this rank: of sockets, for those of the host only."""
    if call in METHODS or call in LATER:
        return refused(call, _error(number))
    owner, name, _ = FUNCTIONS[call]
    return patch.object(owner, name, side_effect=_error(number))


def _chosen(rank: int, rows: list[tuple[str, int, str]]) -> list[tuple[str, str, float | None]]:
    """Per row, on a group of its own: the transport, what ``print(model)`` says of it, and the mean."""
    seen = []
    for call, place, name in rows:
        group = dist.new_group([0, 1])
        with arriving_in_order(), _refused(call, getattr(errno, name)) if rank == place else nullcontext():
            model = wrap(process_group=group, checks="off")
            model.zero_grad()
            add_gradients(model, 1.0 + rank)
            record = model.all_reduce()
        seen.append((record.transport, transport_line(model), gradient_values(model)["weight"]))
        assert step(model, 2.0 + rank) == 2.5
        dist.destroy_process_group(group)
    return seen


def test_a_refused_call_in_the_meeting_of_the_ranks_is_gloo_on_all_with_this_reason(transport: str) -> None:
    """EPERM of sendmsg ended the group, and EPERM of recvmsg read "limit of open files". The limit of open files is one
    text, whichever call meets it."""
    first, second = run_ranks(_chosen, 2, ROWS, store="rank0", timeout_seconds=300.0)

    assert first == second
    assert first == [("gloo", f"transport: gloo ({_reason(*row)})", 1.5) for row in ROWS]


def _failed_later(rank: int) -> list[tuple[str, tuple[int, ...], float | None]]:
    """Per call and error: the error of the construction, and the mean after a second construction."""
    seen = []
    for call, name in product(LATER, ERRORS):
        group = dist.new_group([0, 1])
        with (
            arriving_in_order(),
            _refused(call, getattr(errno, name)) if rank == HUB else nullcontext(),
            pytest.raises(PeerError) as caught,
        ):
            wrap(process_group=group, checks="off")
        mean = step(wrap(process_group=group, checks="off"), 1.0 + rank)
        seen.append((str(caught.value), caught.value.ranks, mean))
        dist.destroy_process_group(group)
    return seen


def test_a_call_refused_to_a_hub_behind_the_arrival_of_all_is_an_error_on_all_and_the_next_call_works(
    transport: str,
) -> None:
    first, second = run_ranks(_failed_later, 2, store="rank0")

    assert first == second
    for (_, name), (text, ranks, mean) in zip(product(LATER, ERRORS), first, strict=True):
        error = _error(getattr(errno, name))
        problem = LIMITS.get(name) or f"{type(error).__name__}: {error}"
        assert text == f"first collective on this process group: rank {HUB} cannot open its connections: {problem}"
        assert (ranks, mean) == ((HUB,), 1.5)
