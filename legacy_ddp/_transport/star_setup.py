"""The connections of a star: the hub listens in a directory of its user, the other ranks of the host connect.

The directory has mode 0700: processes of other users can neither connect nor fill the queue of connections. An abstract
name would be in /proc/net/unix for every user of the host, and any of them could fill the queue.

The caller lets all ranks agree after each step: connect, then accept. No step waits for another rank.
"""

import hmac
import os
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from legacy_ddp._transport.star import Star

_FILE = "hub"
_HELLO_BYTES = 256
# None: the directory for temporary files (TMPDIR). Where that is full, read-only or without sockets: in memory.
_PLACES = (None, "/dev/shm")


class StarListener:
    """The listening socket of a hub, before its connections.

    ``directory``: with the file of the socket, to be given to the other ranks; made here, and removed by
    :meth:`close`. ``size``: the largest number of connections that wait.

    Raises:
        OSError: no such socket can be made.
    """

    def __init__(self, size: int) -> None:
        self.directory = ""
        self._socket = _new_socket()
        try:
            self._bind()
            self._socket.listen(size)
            self._socket.setblocking(False)
        except BaseException:
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
        """Stop listening, and remove the directory; the connections stay."""
        self._socket.close()
        self._remove_directory()

    def _bind(self) -> None:
        problem = None
        for place in _PLACES:
            try:
                self.directory = tempfile.mkdtemp(prefix="legacy_ddp-socket-", dir=place)
                with _address(self.directory) as address:
                    self._socket.bind(address)
            except OSError as error:
                self._remove_directory()
                problem = problem or error  # of the place that the user can choose
            else:
                return
        if problem is not None:
            raise problem

    def _remove_directory(self) -> None:
        if self.directory:
            with suppress(OSError):  # without a socket, or removed already
                os.unlink(os.path.join(self.directory, _FILE))
            with suppress(OSError):
                os.rmdir(self.directory)
            self.directory = ""


def connect(directory: str, token: str, rank: int, ranks: Sequence[int]) -> Star:
    """Connect this rank to the hub of ``ranks``, the first of them, which listens in ``directory``.

    Raises:
        OSError: the directory is not visible here, the connection is refused, or a process of another user listens.
    """
    connection = _new_socket()
    try:
        connection.setblocking(False)  # a full queue of the listener is an error, not a wait without a limit
        try:
            with _address(directory) as address:
                connection.connect(address)
        except FileNotFoundError:
            raise OSError(
                f"{directory} of rank {ranks[0]} is not visible here; containers of one network need a common "
                "directory for temporary files (TMPDIR)"
            ) from None
        if _peer_user(connection) != os.geteuid():
            raise OSError(f"a process of another user listens in the directory of rank {ranks[0]}")
        connection.send(f"{rank} {token}".encode("ascii"))
    except BaseException:
        connection.close()
        raise
    return Star(rank, ranks, {ranks[0]: connection})


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


@contextmanager
def _address(directory: str) -> Iterator[str]:
    """The address of the socket in ``directory``, inside the block: short, because an address has 108 bytes at most."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{_FILE}"
    finally:
        os.close(descriptor)


def _read_hello(connection: socket.socket, token: str) -> int | None:
    """The rank that has connected; None for a process outside the job.

    Raises:
        OSError: nothing can be read from any process.
    """
    if _peer_user(connection) != os.geteuid():
        return None
    try:
        rank, given = connection.recv(_HELLO_BYTES, socket.MSG_DONTWAIT).decode("ascii").split()
        return int(rank) if hmac.compare_digest(given, token) else None
    except (BlockingIOError, ConnectionError, ValueError):
        return None


def _peer_user(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _close_all(connections: Mapping[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
