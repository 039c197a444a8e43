"""Messages between the ranks of a group, in a tree of stars: Unix sockets on a host, TCP between the hubs of the hosts.

Every rank but the root has a connection to its parent: the hub of its host, or for a hub the hub of another host. The
rows of the ranks go up to the root, and the rows of all ranks go down. Barriers and descriptors concern one host alone,
and use only the connections of the host.

A message is a series of pieces of at most 64 KiB, because a Unix socket takes no packet that is larger than its buffer.
A piece begins with its kind and its number of bytes. A notice is a piece without content, with a rank in place of the
number. A rank can send it between two pieces of a message.

Every wait is cut into slices of :data:`SLICE_SECONDS`, so that signal handlers run and a caller can give up. A slice
also ends if signals come more often: select.poll() keeps its deadline, while a receive with SO_RCVTIMEO begins again.
"""

import array
import json
import os
import select
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

SLICE_SECONDS = 0.1
PIECE_BYTES = 2**16  # the smallest limit of a packet that was seen is 208 KiB

_SIZE, _ROW, _BARRIER, _MEMORY = b"S", b"R", b"B", b"M"
_LOST, _LATE, _LEFT = b"L", b"T", b"F"
_NOTICES = (_LOST, _LATE, _LEFT)
_HEAD = struct.Struct("<cI")  # of a piece: its kind, and its number of bytes; of a notice: the rank that it is about

OnSlice = Callable[[], None]
Merge = Callable[[list[bytes]], bytes]


class _Exchange(NamedTuple):
    """What :meth:`Star.exchange` needs for columns of the same widths."""

    sizes: Mapping[int, int]  # of the messages from below, by rank
    total: int  # size of the result
    join: Merge
    sort: Callable[[bytes], bytes]  # of the result
    places: Sequence[slice]  # of each column in the result


class StarLostError(Exception):
    """The connection to a rank broke, or a rank left because another was lost. The text names the rank."""


class StarTimeoutError(Exception):
    """A rank gave up its wait."""


@dataclass
class Descriptors:
    """The result of :meth:`Star.share_descriptors`."""

    descriptors: dict[int, list[int]] = field(default_factory=dict)  # open on this rank, by the rank that sent them
    problem: OSError | None = None  # why descriptors are missing here or elsewhere; None also if not known here

    def close(self) -> None:
        for descriptor in (descriptor for each in self.descriptors.values() for descriptor in each):
            os.close(descriptor)
        self.descriptors = {}


class Star:
    """The connections of this rank in the tree: to its parent (None on the root), and to the ranks below.

    ``hub``: rank and connection of the hub of this host; None on a hub. ``above``: the same of the hub above, on
    another host. ``host``, ``hubs``: the connections to the ranks below, by rank, on this host and on other hosts.

    Collective on the host: :meth:`barrier` and :meth:`share_descriptors`. Collective on the group: :meth:`introduce`,
    :meth:`exchange`, :meth:`collect` and :meth:`combine`. They call ``on_slice`` after every slice of a wait.

    These methods and :meth:`look` raise:
        StarLostError: a connection broke, or a rank tells of a lost rank. StarTimeoutError: a rank gave up its wait.
        Exception: any error of ``on_slice``.
    """

    def __init__(
        self,
        rank: int,
        hub: tuple[int, socket.socket] | None = None,
        above: tuple[int, socket.socket] | None = None,
        host: Mapping[int, socket.socket] = MappingProxyType({}),
        hubs: Mapping[int, socket.socket] = MappingProxyType({}),
    ) -> None:
        self.rank = rank
        self.ranks: tuple[int, ...] = ()  # of the group, ascending, after introduce()
        self._hub = None if hub is None else hub[0]
        parent = hub or above
        self._parent = None if parent is None else parent[0]
        self._host = sorted(host)
        self._children = sorted([*host, *hubs])
        self._below: dict[int, Sequence[int]] = {}  # the ranks of each part of the message to the parent, in its order
        self._order: tuple[int, ...] = ()  # of all ranks in the message to the parent
        self._connections = {**dict([parent] if parent else []), **host, **hubs}
        self._exchanges: dict[tuple[int, ...], _Exchange] = {}  # by the widths of the columns
        self._unsent: dict[int, bytes] = {}  # the rest of a piece of which a part was sent
        self._poll = select.poll()  # of all connections
        self._polls: dict[int, select.poll] = {}  # of each connection
        self._by_descriptor: dict[int, int] = {}
        for other, connection in self._connections.items():
            connection.setblocking(False)
            self._by_descriptor[connection.fileno()] = other
            self._polls[other] = select.poll()
            for poll in (self._poll, self._polls[other]):
                poll.register(connection, select.POLLIN)

    def introduce(self, card: Mapping[str, Any], on_slice: OnSlice) -> list[Any]:
        """The cards of all ranks, JSON values in rank order. The first message between the ranks."""
        parts = {self.rank: [(self.rank, card)]}
        for child in self._children:
            parts[child] = json.loads(self._receive_sized(child, on_slice))
        self._below = {
            part: [rank for rank, _ in parts[part]] for part in sorted(parts, key=lambda each: parts[each][0][0])
        }
        self._order = tuple(rank for ranks in self._below.values() for rank in ranks)
        cards = [each for part in self._below for each in parts[part]]
        if self._parent is not None:
            self._send_sized(self._parent, json.dumps(cards).encode("ascii"), on_slice)
            cards = json.loads(self._receive_sized(self._parent, on_slice))
        cards.sort(key=itemgetter(0))
        for child in self._children:
            self._send_sized(child, json.dumps(cards).encode("ascii"), on_slice)
        self.ranks = tuple(rank for rank, _ in cards)
        return [of_rank for _, of_rank in cards]

    def exchange(self, columns: Sequence[bytes], on_slice: OnSlice) -> list[bytes]:
        """Each column of all ranks: the bytes of the ranks joined in rank order.

        ``columns``: of this rank, as many and as long on every rank. Put bytes that are equal on all ranks in most
        calls into one column, which can be compared all at once.
        """
        widths = tuple(map(len, columns))
        exchange = self._exchanges.get(widths)
        if exchange is None:
            exchange = self._exchanges[widths] = self._prepare(widths)
        sizes, total, join, sort, places = exchange
        rows = self._meet(b"".join(columns), sizes, total, join, sort, on_slice)
        return list(map(rows.__getitem__, places))

    def _prepare(self, widths: Sequence[int]) -> "_Exchange":
        width = sum(widths)
        of_parts = [_places(len(ranks) * each for each in widths) for ranks in self._below.values()]
        order = [(part, places[column]) for column in range(len(widths)) for part, places in enumerate(of_parts)]

        def join(parts: list[bytes]) -> bytes:
            return b"".join([parts[part][place] for part, place in order])

        def sort(rows: bytes) -> bytes:
            blocks = _cut(rows, [len(self._order) * each for each in widths])
            cuts = [_cut(block, [each] * len(self._order)) for block, each in zip(blocks, widths, strict=True)]
            return b"".join(b"".join(self._sorted(each)) for each in cuts)

        sizes = {child: width * len(self._below[child]) for child in self._children}
        return _Exchange(sizes, width * len(self.ranks), join, sort, _places(len(self.ranks) * each for each in widths))

    def collect(self, own: bytes, sizes: Sequence[int], on_slice: OnSlice) -> list[bytes]:
        """The bytes of every rank, by rank. ``sizes``: their sizes by rank, known to all ranks."""

        def sort(parts: bytes) -> bytes:
            return b"".join(self._sorted(_cut(parts, [sizes[rank] for rank in self._order])))

        below = {child: sum(sizes[rank] for rank in self._below[child]) for child in self._children}
        return _cut(self._meet(own, below, sum(sizes), b"".join, sort, on_slice), sizes)

    def combine(self, own: bytes, merge: Merge, on_slice: OnSlice) -> bytes:
        """The bytes of all ranks, merged. ``merge`` gets bytes of ranks and results of ``merge``, all of one size, and
        returns as many bytes.
        """
        sizes = dict.fromkeys(self._children, len(own))
        return self._meet(own, sizes, len(own), merge, lambda result: result, on_slice)

    def _meet(
        self,
        own: bytes,
        sizes: Mapping[int, int],
        total: int,
        merge: Merge,
        sort: Callable[[bytes], bytes],
        on_slice: OnSlice,
    ) -> bytes:
        """Merge the messages from below, send the result up, and return what the root has sorted and sent down."""
        found = self._receive_from(sizes, _ROW, on_slice) if sizes else {}
        found[self.rank] = own
        message = merge(list(map(found.__getitem__, self._below))) if sizes else own
        if self._parent is not None:
            self._send(self._parent, _ROW, message, on_slice)
            message = self._receive(self._parent, _ROW, total, on_slice)
        elif self._order != self.ranks:
            message = sort(message)
        for child in self._children:
            self._send(child, _ROW, message, on_slice)
        return message

    def _sorted(self, parts: Sequence[bytes]) -> list[bytes]:
        by_rank = dict(zip(self._order, parts, strict=True))
        return [by_rank[rank] for rank in self.ranks]

    def barrier(self, on_slice: OnSlice) -> None:
        """Return when every rank of the host has arrived."""
        if self._hub is not None:
            self._send_piece(self._hub, _HEAD.pack(_BARRIER, 0), on_slice)
            self._receive(self._hub, _BARRIER, 0, on_slice)
            return
        self._receive_from(dict.fromkeys(self._host, 0), _BARRIER, on_slice)
        for rank in self._host:
            self._send_piece(rank, _HEAD.pack(_BARRIER, 0), on_slice)

    def share_descriptors(self, own: Sequence[int], counts: Mapping[int, int], on_slice: OnSlice) -> Descriptors:
        """Duplicates of the open descriptors of the other ranks of the host. The caller closes them.

        ``own``: of this rank. ``counts``: the number of descriptors of each rank of the host, known to all ranks. If
        the limit of open files is reached, or the kernel refuses, descriptors are missing in the result.
        """
        found = Descriptors()
        try:
            if own:
                self._forward(self.rank, own, found, on_slice)
            senders = sorted(counts, key=lambda rank: rank != self._hub)  # a hub has sent its own before all others
            for rank in (rank for rank in senders if counts[rank] and rank != self.rank):
                sender = rank if self._hub is None else self._hub
                self._receive_descriptors(sender, rank, counts[rank], found, on_slice)
                self._forward(rank, found.descriptors[rank], found, on_slice)
        except BaseException:
            found.close()
            raise
        return found

    def look(self) -> None:
        """Raise the error for a notice that has arrived. Does not wait. To be called in waits for something else."""
        for descriptor, _ in self._poll.poll(0):
            rank = self._by_descriptor[descriptor]
            if (head := _waiting_head(self._connections[rank], socket.MSG_PEEK))[:1] in _NOTICES:
                self._follow(rank, head)

    def give_up(self, *, is_late: bool) -> None:
        """Send a notice that this rank gives up, before :meth:`close`: else other ranks would take this rank for lost.

        ``is_late``: its timeout has passed; else another rank was lost.
        """
        self._tell(_LATE if is_late else _LEFT, self.rank, self.rank)

    def close(self) -> None:
        """Close all connections: the other ranks notice at once."""
        for connection in self._connections.values():
            with suppress(OSError):  # TCP drops what it has not sent yet if something is unread: perhaps a last notice
                while connection.recv(PIECE_BYTES, socket.MSG_DONTWAIT):
                    pass
        self.forget()

    def forget(self) -> None:
        """Only close the descriptors: in a forked child the connections belong to the parent."""
        for connection in self._connections.values():
            connection.close()

    def _forward(self, source: int, descriptors: Sequence[int], found: Descriptors, on_slice: OnSlice) -> None:
        """Send descriptors: a rank sends its own to the hub, and the hub sends those of each rank to all others."""
        for rank in self._host if self._hub is None else [self._hub] if source == self.rank else []:
            if rank != source:
                problem = self._send_piece(rank, _HEAD.pack(_MEMORY, 0), on_slice, descriptors)
                found.problem = found.problem or problem

    def _send(self, rank: int, kind: bytes, content: bytes, on_slice: OnSlice) -> None:
        if len(content) <= PIECE_BYTES:
            self._send_piece(rank, _HEAD.pack(kind, len(content)) + content, on_slice)
            return
        for start in range(0, len(content), PIECE_BYTES):
            piece = content[start : start + PIECE_BYTES]
            self._send_piece(rank, _HEAD.pack(kind, len(piece)) + piece, on_slice)

    def _send_piece(
        self, rank: int, piece: bytes, on_slice: OnSlice, descriptors: Sequence[int] = ()
    ) -> OSError | None:
        """Send a piece with descriptors. If the kernel refuses them, send the piece alone, and return the error."""
        connection = self._connections[rank]
        carried = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        problem = None
        while True:
            try:
                if carried:
                    connection.sendmsg([piece], carried, socket.MSG_NOSIGNAL)
                    return problem
                sent = connection.send(piece, socket.MSG_NOSIGNAL)
                if sent == len(piece):
                    self._unsent.pop(rank, None)
                    return problem
                piece = self._unsent[rank] = piece[sent:]
            except BlockingIOError:  # the buffer is full
                if not _is_writable(connection):
                    self._after_slice(on_slice)
            except ConnectionError:  # closed at the other end, perhaps with a last notice about a lost rank
                self._follow(rank, _waiting_head(connection))
            except OSError as error:
                if not carried:
                    raise
                problem, carried = error, []

    def _receive_from(self, sizes: Mapping[int, int], kind: bytes, on_slice: OnSlice) -> dict[int, bytes]:
        """The next message of some ranks, of this kind, in the order of arrival. ``sizes``: by rank."""
        found: dict[int, bytes] = {}
        early = []
        while len(found) < len(sizes):
            ready = self._poll.poll(1000 * SLICE_SECONDS)
            if not ready:
                on_slice()
            for descriptor, _ in ready:
                rank = self._by_descriptor[descriptor]
                if rank in sizes and rank not in found:
                    found[rank] = self._read_piece(rank, kind, min(sizes[rank], PIECE_BYTES), on_slice)
                    if sizes[rank] > PIECE_BYTES:
                        found[rank] += self._receive(rank, kind, sizes[rank] - PIECE_BYTES, on_slice)
                    continue
                self._look_at(rank)
                self._poll.unregister(descriptor)  # a later message, or the end after the message: not to be read now
                early.append(descriptor)
        for descriptor in early:
            self._poll.register(descriptor, select.POLLIN)
        return found

    def _receive(self, rank: int, kind: bytes, size: int, on_slice: OnSlice) -> bytes:
        pieces, poll = [], self._polls[rank]
        while True:
            while not poll.poll(1000 * SLICE_SECONDS):
                self._after_slice(on_slice)
            pieces.append(self._read_piece(rank, kind, min(size, PIECE_BYTES), on_slice))
            size -= len(pieces[-1])
            if size == 0:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_piece(self, rank: int, kind: bytes, size: int, on_slice: OnSlice) -> bytes:
        """The content of a piece of this kind and size. The connection must be ready."""
        connection = self._connections[rank]
        try:
            piece = connection.recv(_HEAD.size + size)
            if len(piece) == _HEAD.size + size and piece.startswith(_HEAD.pack(kind, size)):
                return piece[_HEAD.size :]
            while len(piece) < _HEAD.size + size and _is_begun(piece, kind, size):  # TCP knows no packets
                self._await(rank, on_slice)
                if not (more := connection.recv(_HEAD.size + size - len(piece))):
                    break
                piece += more
        except OSError:  # the other rank closed it with an unread message; after the error there may be a last notice
            piece = _waiting_head(connection)
        return self._content(rank, piece, kind, size)

    def _await(self, rank: int, on_slice: OnSlice) -> None:
        while not self._polls[rank].poll(1000 * SLICE_SECONDS):
            self._after_slice(on_slice)

    def _send_sized(self, rank: int, content: bytes, on_slice: OnSlice) -> None:
        """Send a message after its size, which the other rank does not know."""
        self._send(rank, _SIZE, len(content).to_bytes(8, "little"), on_slice)
        self._send(rank, _ROW, content, on_slice)

    def _receive_sized(self, rank: int, on_slice: OnSlice) -> bytes:
        size = int.from_bytes(self._receive(rank, _SIZE, 8, on_slice), "little")
        return self._receive(rank, _ROW, size, on_slice)

    def _receive_descriptors(self, rank: int, source: int, count: int, found: Descriptors, on_slice: OnSlice) -> None:
        """Add the next ``count`` descriptors to ``found``. They are of ``source``, and ``rank`` sends them."""
        connection = self._connections[rank]
        self._await(rank, on_slice)
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
        if not _is_begun(piece, kind, size) or len(piece) != _HEAD.size + size:
            self._follow(rank, piece)
        return piece[_HEAD.size :]

    def _follow(self, rank: int, piece: bytes) -> NoReturn:
        """Raise the error for a notice from ``rank``, and send it on. Anything else (the end of the connection, an
        unexpected piece) means that ``rank`` is lost."""
        kind, about = _HEAD.unpack_from(piece) if len(piece) >= _HEAD.size else (b"", 0)
        if kind not in _NOTICES:
            kind, about = _LOST, rank
        # This rank closes its connections next: without the notice the other ranks would take it for the lost one.
        self._tell(kind, about, rank)
        if kind == _LATE:
            raise StarTimeoutError
        if kind == _LEFT:
            raise StarLostError(f"rank {about} left because another rank was lost")
        raise StarLostError(f"connection to rank {about} lost")

    def _after_slice(self, on_slice: OnSlice) -> None:
        """In a wait for a piece of one rank: look at the connections of all."""
        for descriptor, _ in self._poll.poll(0):
            self._look_at(self._by_descriptor[descriptor])
        on_slice()

    def _look_at(self, rank: int) -> None:
        """Raise the error for a notice of ``rank``, or for the end of its connection. Messages are read later."""
        head = _waiting_head(self._connections[rank], socket.MSG_PEEK)
        if not head or head[:1] in _NOTICES:
            self._follow(rank, head)

    def _tell(self, kind: bytes, about: int, source: int) -> None:
        notice = _HEAD.pack(kind, about)
        for rank, connection in self._connections.items():
            if rank != source:
                with suppress(OSError):
                    connection.send(self._unsent.get(rank, b"") + notice, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def _cut(data: bytes, sizes: Iterable[int]) -> list[bytes]:
    return list(map(data.__getitem__, _places(sizes)))


def _places(sizes: Iterable[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def _is_begun(piece: bytes, kind: bytes, size: int) -> bool:
    """Whether the received bytes are the beginning of a piece of this kind and size, or a part of any head."""
    return 0 < len(piece) < _HEAD.size or piece.startswith(_HEAD.pack(kind, size))


def _is_writable(connection: socket.socket) -> bool:
    """Wait until the connection takes more, at most for a slice."""
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(1000 * SLICE_SECONDS))


def _receive_with_descriptors(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    room = socket.CMSG_SPACE(count * array.array("i").itemsize)
    # Not socket.recv_fds(): processes that another thread starts meanwhile would inherit the descriptors.
    piece, ancillary, _, _ = connection.recvmsg(_HEAD.size, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return piece, list(descriptors)


def _limit_of(connection: socket.socket) -> OSError | None:
    """The error of opening another descriptor in this process; None if one more is possible."""
    try:
        os.close(os.dup(connection.fileno()))
    except OSError as error:
        return error
    return None


def _waiting_head(connection: socket.socket, flags: int = 0) -> bytes:
    """The next head on a connection, which may be closed already; empty without one. Does not wait."""
    for _ in range(2):
        try:
            return connection.recv(_HEAD.size, flags | socket.MSG_DONTWAIT)
        except BlockingIOError:
            break
        except OSError:  # the kernel reports an error once; the last piece can be read after it
            continue
    return b""
