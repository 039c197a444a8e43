"""Opening of the sockets of a tree of stars: Unix sockets on a host, TCP between hubs.

The hub of a host listens in a directory of mode 0700, so that processes of other users can neither connect nor fill the
queue of connections. An abstract name is in /proc/net/unix: any user of the host could fill the queue. A hub listens
for other hubs on all interfaces, as the status server does. Every connection begins with a rank and a token, which the
ranks have from the store of the group.
"""

import hmac
import os
import secrets
import select
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from legacy_ddp._ranks.star import SLICE_SECONDS
from legacy_ddp._watchdog.client import Endpoint, connect, keep_alive, own_hosts
from legacy_ddp._watchdog.process import own_identity
from legacy_ddp._watchdog.server import listen

_FILE = "hub"
_HELLO_BYTES = 64  # no more is read before the token is known to be right
_MAX_STRANGERS = 128
# None: the directory for temporary files (TMPDIR). The second is for a TMPDIR that is full, read-only, or takes no
# sockets.
_PLACES = (None, "/dev/shm")


class HostListener:
    """The listening socket of a hub on its host. ``size``: the largest number of connections that wait."""

    def __init__(self, size: int) -> None:
        self.directory = ""  # of the file of the socket, for the other ranks; removed by close()
        self._socket = _new_socket()
        try:
            self._bind()
            self._socket.listen(size)
            self._socket.setblocking(False)
        except BaseException:
            self.close()
            raise

    def accept(self, count: int, token: str) -> dict[int, socket.socket]:
        """The connections of ``count`` ranks, by rank; all of them have connected already."""
        connections: dict[int, socket.socket] = {}
        try:
            while len(connections) < count:
                connection, _ = self._socket.accept()
                rank = _read_hello(connection, token) if _peer_user(connection) == os.geteuid() else None
                if rank is None or rank in connections:
                    connection.close()
                    continue
                connections[rank] = connection
        except BlockingIOError:
            _close_all(connections)
            raise OSError(f"{len(connections)} ranks have connected, expected {count}") from None
        except BaseException:
            _close_all(connections)
            raise
        return connections

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
                problem = problem or error  # the first, because the user can choose TMPDIR
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


def connect_on_host(directory: str, token: str, rank: int, hub: int) -> socket.socket:
    """Connect this rank to the rank ``hub``, which listens in ``directory``."""
    connection = _new_socket()
    try:
        connection.setblocking(False)  # a full queue of the listener is an error, not a wait without a limit
        try:
            with _address(directory) as address:
                connection.connect(address)
        except FileNotFoundError:
            raise OSError(
                f"{directory} of rank {hub} is not visible here; containers of one network need a common "
                "directory for temporary files (TMPDIR)"
            ) from None
        if _peer_user(connection) != os.geteuid():
            raise OSError(f"a process of another user listens in the directory of rank {hub}")
        connection.send(_hello(rank, token))
    except BaseException:
        connection.close()
        raise
    return connection


class HubListener:
    """The listening TCP socket of a hub, for the hubs of other hosts."""

    def __init__(self, rank: int) -> None:
        self._socket = listen()
        self._socket.setblocking(False)
        port = self._socket.getsockname()[1]
        # What the other hubs need to connect.
        self.endpoint = Endpoint(rank, own_identity(), [(host, port) for host in own_hosts()], secrets.token_hex(16))

    def accept(self, count: int, on_slice: Callable[[], None]) -> dict[int, socket.socket]:
        """The connections of ``count`` ranks, by rank. Waits for them, and calls ``on_slice``, which may raise."""
        connections: dict[int, socket.socket] = {}
        strangers: dict[int, socket.socket] = {}  # by descriptor: connections without a rank and a token yet
        poll = select.poll()  # select() takes no descriptor above 1,023
        poll.register(self._socket, select.POLLIN)
        try:
            while len(connections) < count:
                for descriptor, _ in poll.poll(1000 * SLICE_SECONDS):
                    if descriptor == self._socket.fileno():
                        connection = self._socket.accept()[0]
                        strangers[connection.fileno()] = connection
                        poll.register(connection, select.POLLIN)
                        continue
                    poll.unregister(descriptor)
                    connection = strangers.pop(descriptor)
                    rank = _read_hello(connection, self.endpoint.token)
                    if rank is None or rank in connections:
                        connection.close()
                        continue
                    set_options(connection)
                    connections[rank] = connection
                while len(strangers) > _MAX_STRANGERS:
                    oldest = next(iter(strangers))
                    poll.unregister(oldest)
                    strangers.pop(oldest).close()
                on_slice()
        except BaseException:
            _close_all(connections)
            raise
        finally:
            _close_all(strangers)
        return connections

    def close(self) -> None:
        """Stop listening; the connections stay."""
        self._socket.close()


def connect_hubs(endpoint: Endpoint, rank: int, seconds: float) -> socket.socket:
    connection = connect(endpoint, own_identity(), seconds)
    set_options(connection)
    connection.sendall(_hello(rank, endpoint.token))
    return connection


def set_options(connection: socket.socket) -> None:
    """Send at once, and notice a host that has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)


def _hello(rank: int, token: str) -> bytes:
    return f"{rank} {token}".encode("ascii").ljust(_HELLO_BYTES)


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


@contextmanager
def _address(directory: str) -> Iterator[str]:
    """The address of the socket in ``directory``, inside the block."""
    # Through a descriptor, because an address has at most 108 bytes.
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{_FILE}"
    finally:
        os.close(descriptor)


def _read_hello(connection: socket.socket, token: str) -> int | None:
    """The rank that has connected; None without the right token."""
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
