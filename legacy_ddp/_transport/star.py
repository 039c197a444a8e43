"""Messages between the ranks of one host, over Unix sockets. The lowest rank is the hub, connected to every other rank.

A message is a series of pieces of 64 KiB at most: a socket takes no packet that is larger than its buffer. A piece
begins with its kind and its number of bytes. A notice is a piece without content, and its number is a rank: a rank can
send it between two pieces of a message. Every wait ends after :data:`SLICE_SECONDS`, so that signal handlers run and a
caller can give up; also where signals come more often: select.poll() keeps its deadline, a receive with SO_RCVTIMEO
would begin again.

The hub listens in a directory of mode 0700: processes of other users can neither connect nor fill the queue of
connections. An abstract name would be in /proc/net/unix for every user of the host, and any of them could fill the
queue. The caller lets all ranks agree after each step: connect, then accept. No step waits for another rank.
"""

import array
import hmac
import os
import select
import socket
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NoReturn

SLICE_SECONDS = 0.1
PIECE_BYTES = 2**16  # the smallest limit of a packet that was seen is 208 KiB

_ROW, _BARRIER, _MEMORY, _LOST, _LATE = b"R", b"B", b"M", b"L", b"T"
_NOTICES = (_LOST, _LATE)
_HEAD = struct.Struct("<cI")  # of a piece: its kind, and its number of bytes; of a notice: the rank that it is about

OnSlice = Callable[[], None]
_FILE = "hub"
_HELLO_BYTES = 256
# None: the directory for temporary files (TMPDIR). Where that is full, read-only or without sockets: in memory.
_PLACES = (None, "/dev/shm")


class StarLostError(Exception):
    """The connection to ``rank`` broke."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"connection to rank {rank} lost")
        self.rank = rank


class StarTimeoutError(Exception):
    """A rank gave up its wait."""


@dataclass
class Descriptors:
    """Open descriptors of this rank, received by :meth:`Star.share_descriptors`, by the rank that sent them.

    ``problem``: why descriptors are missing here or elsewhere, as far as this rank met the reason.
    """

    descriptors: dict[int, list[int]] = field(default_factory=dict)
    problem: OSError | None = None

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in (descriptor for each in self.descriptors.values() for descriptor in each):
            os.close(descriptor)
        self.descriptors = {}


class Star:
    """The connections of this rank: to all other ranks of the host on the hub, else to the hub alone.

    ``ranks``: of the host, ascending; numbers of the group, in which other hosts may have the numbers between.
    ``connections``: by rank. Every method but :meth:`close` is collective on the host; ``on_slice`` is called after
    every slice of a wait, and may raise.
    """

    def __init__(self, rank: int, ranks: Sequence[int], connections: Mapping[int, socket.socket]) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self._hub = self.ranks[0]
        self._connections = dict(connections)
        self._poll = select.poll()  # of all connections
        self._polls: dict[int, select.poll] = {}  # of each connection
        self._by_descriptor: dict[int, int] = {}
        for other, connection in self._connections.items():
            connection.setblocking(False)
            self._by_descriptor[connection.fileno()] = other
            self._polls[other] = select.poll()
            for poll in (self._poll, self._polls[other]):
                poll.register(connection, select.POLLIN)

    def exchange(self, columns: Sequence[bytes], on_slice: OnSlice) -> list[bytes]:
        """Each column of all ranks: the bytes of every rank, one behind the other, in rank order.

        ``columns``: of this rank, as many and as long on every rank. Bytes that are equal on all ranks in most calls
        belong in one column: the columns of all ranks can be compared all at once.

        Raises:
            StarLostError: a connection broke. StarTimeoutError: a rank gave up its wait.
            Exception: raised by ``on_slice``.
        """
        row = b"".join(columns)
        if self.rank != self._hub:
            self._send(self._hub, _ROW, row, on_slice)
            rows = self._receive(self._hub, _ROW, len(self.ranks) * len(row), on_slice)
            return _cut(rows, [len(self.ranks) * len(column) for column in columns])
        found = self._receive_from_all(_ROW, len(row), on_slice)
        cuts = [_cut(found[rank], map(len, columns)) for rank in self._connections]
        joined = [b"".join(parts) for parts in zip(columns, *cuts, strict=True)]
        self._send_to_all(_ROW, b"".join(joined), on_slice)
        return joined

    def barrier(self, on_slice: OnSlice) -> None:
        """Return when every rank has arrived.

        Raises:
            StarLostError, StarTimeoutError, Exception: as :meth:`exchange`.
        """
        if self.rank != self._hub:
            self._send(self._hub, _BARRIER, b"", on_slice)
            self._receive(self._hub, _BARRIER, 0, on_slice)
            return
        self._receive_from_all(_BARRIER, 0, on_slice)
        self._send_to_all(_BARRIER, b"", on_slice)

    def share_descriptors(self, own: Sequence[int], counts: Sequence[int], on_slice: OnSlice) -> Descriptors:
        """Duplicates of the open descriptors of the other ranks. The caller closes them.

        ``own``: of this rank. ``counts``: the number of descriptors by rank, known to all ranks. At the limit of open
        files, and where the kernel refuses, some descriptors are missing in the result; the messages arrive
        nevertheless.

        Raises:
            StarLostError, StarTimeoutError, Exception: as :meth:`exchange`.
        """
        found = Descriptors()
        try:
            if own:
                self._forward(self.rank, own, found, on_slice)
            is_hub = self.rank == self._hub
            for rank in (rank for rank in self.ranks if counts[rank] and rank != self.rank):
                self._receive_descriptors(rank if is_hub else self._hub, rank, counts[rank], found, on_slice)
                if is_hub:
                    self._forward(rank, found.descriptors[rank], found, on_slice)
        except BaseException:
            found.close()
            raise
        return found

    def give_up(self) -> None:
        """Tell the other ranks that this rank gives up because its timeout has passed; call this before :meth:`close`.

        Without this message the others would take the closed connection for a lost rank.
        """
        self._tell(_LATE, self.rank, self.rank)

    def close(self) -> None:
        """Close all connections: the other ranks notice at once."""
        for connection in self._connections.values():
            connection.close()

    def _forward(self, source: int, descriptors: Sequence[int], found: Descriptors, on_slice: OnSlice) -> None:
        for rank in self._connections:
            if rank != source:
                problem = self._send_piece(rank, _HEAD.pack(_MEMORY, 0), on_slice, descriptors)
                found.problem = found.problem or problem

    def _send_to_all(self, kind: bytes, content: bytes, on_slice: OnSlice) -> None:
        for rank in self._connections:
            self._send(rank, kind, content, on_slice)

    def _send(self, rank: int, kind: bytes, content: bytes, on_slice: OnSlice) -> None:
        """Send a message, in pieces."""
        if len(content) <= PIECE_BYTES:
            self._send_piece(rank, _HEAD.pack(kind, len(content)) + content, on_slice)
            return
        for start in range(0, len(content), PIECE_BYTES):
            piece = content[start : start + PIECE_BYTES]
            self._send_piece(rank, _HEAD.pack(kind, len(piece)) + piece, on_slice)

    def _send_piece(
        self, rank: int, piece: bytes, on_slice: OnSlice, descriptors: Sequence[int] = ()
    ) -> OSError | None:
        """Send a piece with descriptors. If the kernel refuses them, send it without, and return the reason."""
        connection = self._connections[rank]
        carried = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        problem = None
        while True:
            try:
                if carried:
                    connection.sendmsg([piece], carried, socket.MSG_NOSIGNAL)
                else:
                    connection.send(piece, socket.MSG_NOSIGNAL)
            except BlockingIOError:  # many messages wait there
                if not _is_ready(connection, select.POLLOUT):
                    self._after_slice(on_slice)
            except ConnectionError:  # closed at the other end, perhaps with a last notice about a lost rank
                self._follow(rank, _waiting_head(connection))
            except OSError as error:
                if not carried:
                    raise
                problem, carried = error, []
            else:
                return problem

    def _receive_from_all(self, kind: bytes, size: int, on_slice: OnSlice) -> dict[int, bytes]:
        """The next message of every connection, of this kind and size; read in the order of their arrival."""
        found: dict[int, bytes] = {}
        early = []
        while len(found) < len(self._connections):
            ready = self._poll.poll(1000 * SLICE_SECONDS)
            if not ready:
                on_slice()
            for descriptor, _ in ready:
                rank = self._by_descriptor[descriptor]
                if rank not in found:
                    found[rank] = self._read_piece(rank, kind, min(size, PIECE_BYTES))
                    if size > PIECE_BYTES:
                        found[rank] += self._receive(rank, kind, size - PIECE_BYTES, on_slice)
                    continue
                self._look_at(rank)
                self._poll.unregister(descriptor)  # it is ahead, or has ended behind its message: not now
                early.append(descriptor)
        for descriptor in early:
            self._poll.register(descriptor, select.POLLIN)
        return found

    def _receive(self, rank: int, kind: bytes, size: int, on_slice: OnSlice) -> bytes:
        """The content of the next message of ``rank``, of this kind and size."""
        pieces = []
        while True:
            while not self._polls[rank].poll(1000 * SLICE_SECONDS):
                self._after_slice(on_slice)
            pieces.append(self._read_piece(rank, kind, min(size, PIECE_BYTES)))
            size -= len(pieces[-1])
            if size == 0:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_piece(self, rank: int, kind: bytes, size: int) -> bytes:
        """The content of a piece of this kind and size, from a connection that is ready."""
        connection = self._connections[rank]
        try:
            piece = connection.recv(_HEAD.size + size + 1)
        except OSError:  # closed with a message of this rank unread; a last notice may wait behind the error
            piece = _waiting_head(connection)
        return self._content(rank, piece, kind, size)

    def _receive_descriptors(self, rank: int, source: int, count: int, found: Descriptors, on_slice: OnSlice) -> None:
        """Add the next ``count`` descriptors, sent by ``source`` and forwarded by ``rank``, to ``found``."""
        connection = self._connections[rank]
        while not self._polls[rank].poll(1000 * SLICE_SECONDS):
            self._after_slice(on_slice)
        problem = None
        try:
            piece, found.descriptors[source] = _receive_with_descriptors(connection, count)
            if len(found.descriptors[source]) < count:
                problem = _limit_of(connection)
        except OSError as error:  # the piece is still there
            piece, found.descriptors[source] = _waiting_head(connection), []
            problem = error
        found.problem = found.problem or problem
        self._content(rank, piece, _MEMORY, 0)

    def _content(self, rank: int, piece: bytes, kind: bytes, size: int) -> bytes:
        """The content of a piece of this kind and size."""
        if piece[:1] != kind or len(piece) != _HEAD.size + size:
            self._follow(rank, piece)
        return piece[_HEAD.size :]

    def _follow(self, rank: int, piece: bytes) -> NoReturn:
        """Pass on the notice that came from ``rank``. All else is the loss of ``rank``: the end of its connection, or a
        piece that is not expected here."""
        kind, about = _HEAD.unpack_from(piece) if len(piece) >= _HEAD.size else (b"", 0)
        if kind == _LATE:
            self._tell(_LATE, about, rank)
            raise StarTimeoutError
        lost = about if kind == _LOST else rank
        # Without the notice the other ranks would blame this rank, which closes its connections next.
        self._tell(_LOST, lost, rank)
        raise StarLostError(lost)

    def _after_slice(self, on_slice: OnSlice) -> None:
        """A rank waits for one piece at a time: look at the other connections."""
        for descriptor, _ in self._poll.poll(0):
            self._look_at(self._by_descriptor[descriptor])
        on_slice()

    def _look_at(self, rank: int) -> None:
        """Follow a notice of ``rank``, or the end of its connection. A message waits until its turn."""
        head = _waiting_head(self._connections[rank], socket.MSG_PEEK)
        if not head or head[:1] in _NOTICES:
            self._follow(rank, head)

    def _tell(self, kind: bytes, about: int, source: int) -> None:
        """Send a notice to all connections but that of ``source``."""
        notice = _HEAD.pack(kind, about)
        for rank, connection in self._connections.items():
            if rank != source:
                with suppress(OSError):
                    connection.send(notice, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def _cut(data: bytes, sizes: Iterable[int]) -> list[bytes]:
    """``data`` cut into parts of these sizes."""
    return [data[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))]


def _is_ready(connection: socket.socket, event: int) -> bool:
    """Wait for ``event``, at most for a slice, also where signals come more often."""
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(1000 * SLICE_SECONDS))


def _receive_with_descriptors(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """As ``socket.recv_fds``, which leaves descriptors open in processes that another thread starts meanwhile."""
    room = socket.CMSG_SPACE(count * array.array("i").itemsize)
    piece, ancillary, _, _ = connection.recvmsg(_HEAD.size, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return piece, list(descriptors)


def _limit_of(connection: socket.socket) -> OSError | None:
    """The error of a new descriptor in this process; None if the process can have one more."""
    try:
        os.close(os.dup(connection.fileno()))
    except OSError as error:
        return error
    return None


def _waiting_head(connection: socket.socket, flags: int = 0) -> bytes:
    """The head of a piece that was sent before the connection was closed, empty without one."""
    for _ in range(2):
        try:
            return connection.recv(_HEAD.size, flags | socket.MSG_DONTWAIT)
        except BlockingIOError:
            break
        except OSError:  # the kernel reports an error once; the last piece can be read after it
            continue
    return b""


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
    """Connect this rank to the hub of ``ranks``: the first of these ranks, which listens in ``directory``.

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
