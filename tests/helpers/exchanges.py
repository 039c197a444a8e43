"""The exchanges of this rank, seen from outside: collectives of gloo, and messages between the ranks of a host."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch._C._distributed_c10d import ProcessGroupGloo

# A group that the process makes itself is called through these methods; torch's own functions pass them by.
_COLLECTIVES = (
    "allgather",
    "allreduce",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce_scatter",
)
# The first byte of a message between the ranks of a host. The others tell of a failure.
_MESSAGES = {b"R": "row", b"B": "barrier", b"M": "memory"}


@contextmanager
def watch_exchanges(watcher: Callable[[str], object]) -> Iterator[None]:
    """Call ``watcher(kind)`` before each exchange that this rank starts.

    ``kind``: the name of the collective on a private group; ``row``, ``barrier`` or ``memory`` for the message to one
    rank of the host. A watcher may raise: the exchange then does not start.
    """
    with (
        patch.multiple(ProcessGroupGloo, **{name: _watched(ProcessGroupGloo, name, watcher) for name in _COLLECTIVES}),
        patch.multiple(
            socket.socket, create=True, **{name: _watched_send(name, watcher) for name in ("send", "sendmsg")}
        ),
    ):
        yield


def kinds_of(action: Callable[[], object]) -> list[str]:
    """The kinds of all exchanges that ``action()`` starts on this rank, in their order."""
    kinds: list[str] = []
    with watch_exchanges(kinds.append):
        action()
    return kinds


def _watched(owner: type, name: str, watcher: Callable[[str], object]) -> Callable[..., Any]:
    method = getattr(owner, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        watcher(name)
        return method(self, *args, **kwargs)

    return call


def _watched_send(name: str, watcher: Callable[[str], object]) -> Callable[..., Any]:
    method = getattr(socket.socket, name)

    def send(self: socket.socket, data: Any, *args: Any) -> Any:
        if (self.family, self.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            first = bytes(data[0] if name == "sendmsg" else data)[:1]
            if first in _MESSAGES:
                watcher(_MESSAGES[first])
        return method(self, data, *args)

    return send
