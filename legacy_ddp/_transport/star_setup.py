"""The connections of a star: the hub listens under a random abstract name, the other ranks of the host connect.

The caller lets all ranks agree after each step: connect, then accept. No step waits for another rank.
"""

import hmac
import os
import socket
import struct
from collections.abc import Mapping, Sequence

from legacy_ddp._transport.star import Star

_HELLO_BYTES = 256


class StarListener:
    """The listening socket of a hub, before its connections.

    ``name``: to be given to the other ranks. Whoever knows the name and ``token`` can connect. ``size``: the largest
    number of connections that wait.

    Raises:
        OSError: no such socket can be made.
    """

    def __init__(self, name: str, size: int) -> None:
        self._socket = _new_socket()
        try:
            self._socket.bind(_address(name))
            self._socket.listen(size)
            self._socket.setblocking(False)
        except OSError:
            self.close()
            raise

    def accept(self, ranks: Sequence[int], token: str) -> Star:
        """The star of ``ranks``, ascending; every rank but the first, this rank, has connected already.

        Raises:
            OSError: a rank has not connected.
        """
        hub, *others = ranks
        connections: dict[int, socket.socket] = {}
        try:
            while len(connections) < len(others):
                connection, _ = self._socket.accept()
                rank = _read_hello(connection, token)
                if rank is None or rank not in others or rank in connections:
                    connection.close()
                    continue
                connections[rank] = connection
        except BlockingIOError:
            _close_all(connections)
            missing = sorted({*others} - {*connections})
            raise OSError(f"no connection from ranks {missing}") from None
        except BaseException:
            _close_all(connections)
            raise
        return Star(hub, ranks, dict(sorted(connections.items())))

    def close(self) -> None:
        """Stop listening; the connections stay."""
        self._socket.close()


def connect(name: str, token: str, rank: int, ranks: Sequence[int]) -> Star:
    """Connect this rank to the hub of ``ranks``, the first of them.

    Raises:
        OSError: the connection is refused, or a process of another user listens.
    """
    connection = _new_socket()
    try:
        connection.setblocking(False)  # a full queue of the listener is an error, not a wait without a limit
        connection.connect(_address(name))
        if _peer_user(connection) != os.geteuid():
            raise OSError(f"a process of another user listens under the name of rank {ranks[0]}")
        connection.send(f"{rank} {token}".encode("ascii"))
    except BaseException:
        connection.close()
        raise
    return Star(rank, ranks, {ranks[0]: connection})


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def _address(name: str) -> str:
    return f"\0legacy_ddp-{name}"


def _read_hello(connection: socket.socket, token: str) -> int | None:
    """The rank that has connected; None for a process outside the job."""
    if _peer_user(connection) != os.geteuid():
        return None
    try:
        rank, given = connection.recv(_HELLO_BYTES, socket.MSG_DONTWAIT).decode("ascii").split()
        return int(rank) if hmac.compare_digest(given, token) else None
    except (OSError, ValueError):
        return None


def _peer_user(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _close_all(connections: Mapping[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
