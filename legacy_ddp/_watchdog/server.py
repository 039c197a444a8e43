"""How does a rank hear the others? A thread sleeps until somebody speaks; strangers get no answer and little time."""

import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from legacy_ddp._log import logger_of
from legacy_ddp._watchdog.addresses import own_hosts
from legacy_ddp._watchdog.background import start_thread
from legacy_ddp._watchdog.client import (
    ANSWER_SECONDS,
    MAX_BYTES,
    PART_BYTES,
    Message,
    Peer,
    connect,
    decode_message,
    encode_message,
    keep_alive,
)
from legacy_ddp._watchdog.processes import own_identity

_MAX_STRANGERS = 128
# After a connection could not be taken for want of a descriptor: the next try at once would fail, too.
_PAUSE_SECONDS = 0.1


class Line:
    """This rank's listening end, and the two connections that it holds so that a neighbour's end is noticed at once.

    The thread is there from the beginning: where none can be started, no rank counts on this one yet.

    Raises:
        OSError: no socket can be made, or no thread be started.
    """

    def __init__(
        self, rank: int, answer: Callable[[Message], Message], on_closed: Callable[[int, str | None], None]
    ) -> None:
        self._answer = answer
        self._on_closed = on_closed  # (rank, its goodbye or None)
        self._selector = selectors.DefaultSelector()
        self._listener = _listen()
        self._wake, self._alarm_clock = socket.socketpair()
        self._visitors: dict[socket.socket, _Visitor] = {}
        self._listens_again = 0.0  # when, if the listener is not attended to for the moment
        self._goodbye = ""
        self._neighbour: Peer | None = None
        self._may_serve = threading.Event()
        port = self._listener.getsockname()[1]
        self.me = Peer(rank, own_identity(), [(host, port) for host in own_hosts()], secrets.token_hex(16))
        for end in (self._listener, self._wake):
            end.setblocking(False)
            self._selector.register(end, selectors.EVENT_READ)
        try:
            self._thread = start_thread(self._serve)
        except OSError:
            self._release()
            raise

    def start(self, neighbour: Peer | None) -> None:
        """Answer from now on, and hold a connection to ``neighbour``."""
        self._neighbour = neighbour
        self._may_serve.set()

    def close(self, goodbye: str) -> None:
        """Say goodbye to the neighbours and stop answering."""
        self._goodbye = goodbye
        with suppress(OSError):
            self._alarm_clock.send(b"x")
        self._may_serve.set()
        if self._thread is not threading.current_thread():
            self._thread.join(ANSWER_SECONDS)

    def abandon(self) -> None:
        """In a forked child: close what belongs to the parent, whose end would else go unnoticed."""
        for end in (self._listener, self._wake, self._alarm_clock, *self._visitors):
            end.close()

    def _serve(self) -> None:
        self._may_serve.wait()
        if self._neighbour is not None:
            self._hold(self._neighbour)
        while self._wake in self._selector.get_map():
            self._attend_all(self._patience())
        # Who has knocked is let in: a neighbour that began a moment ago is to hear the goodbye, too.
        while self._attend_all(0):
            pass
        self._release()

    def _attend_all(self, seconds: float | None) -> int:
        """Wait for ``seconds`` (None: for ever) for somebody to speak; attend to all who did, and count them."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            end: socket.socket = key.fileobj  # type: ignore[assignment]  # only sockets are registered
            if end is self._wake:
                self._selector.unregister(end)
            elif end is self._listener:
                self._accept()
            elif end in self._visitors:
                self._attend(end, self._visitors[end])
        return len(ready)

    def _attend(self, end: socket.socket, visitor: "_Visitor") -> None:
        try:
            self._hear(end, visitor)
        except Exception:  # noqa: BLE001 - whatever one rank says, the others still need answers
            logger_of(self.me.rank).exception("what another rank said led to an error here")
            if end in self._visitors:
                self._drop(end)

    def _patience(self) -> float | None:
        """Show out who takes too long to say who it is, and the oldest of too many; how long until the next such look,
        or until the listener is attended to again."""
        now = time.monotonic()
        strangers = self._strangers()
        late = [end for end in strangers if self._visitors[end].until < now]
        for end in {*late, *strangers[:-_MAX_STRANGERS]}:
            self._drop(end)
        looks = [self._visitors[end].until for end in self._strangers()]
        if self._listener not in self._selector.get_map():
            if self._listens_again > now:
                looks.append(self._listens_again)
            else:
                self._selector.register(self._listener, selectors.EVENT_READ)
        return max(0.0, min(looks) - now) if looks else None

    def _strangers(self) -> list[socket.socket]:
        """Who has not said who it is, the oldest first."""
        return [end for end, visitor in self._visitors.items() if visitor.rank is None]

    def _hold(self, neighbour: Peer) -> None:
        with suppress(OSError):
            connection = connect(neighbour, self.me.identity, ANSWER_SECONDS)
            connection.sendall(encode_message(neighbour, {"ask": "hold", "rank": self.me.rank}))
            self._let_in(connection, neighbour.rank)

    def _accept(self) -> None:
        try:
            self._let_in(self._listener.accept()[0], None)
        except OSError:  # it left before it was let in, or this process may open nothing more: others are let go first
            for end in self._strangers():
                self._drop(end)
            self._selector.unregister(self._listener)
            self._listens_again = time.monotonic() + _PAUSE_SECONDS

    def _let_in(self, connection: socket.socket, rank: int | None) -> None:
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        self._visitors[connection] = _Visitor(rank, time.monotonic() + ANSWER_SECONDS)

    def _hear(self, end: socket.socket, visitor: "_Visitor") -> None:
        """Take what it says; it need not say all at once, and nobody else waits for it."""
        try:
            part = end.recv(PART_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        visitor.said += part
        said, is_whole, more = visitor.said.partition(b"\n")
        if part and not is_whole and len(visitor.said) < MAX_BYTES:
            return
        message = decode_message(said) if is_whole else None
        if visitor.rank is not None:
            self._drop(end)
            self._on_closed(visitor.rank, str(message["goodbye"]) if message and "goodbye" in message else None)
        elif message is None or not self._knows_token(message):
            self._drop(end)
        elif message.get("ask") == "hold":
            keep_alive(end)
            visitor.rank, visitor.said = _rank_in(message), more  # it may have come and gone in one breath
        else:
            self._reply(end, message)

    def _knows_token(self, message: Message) -> bool:
        return hmac.compare_digest(str(message.get("token")).encode(errors="replace"), self.me.token.encode())

    def _reply(self, end: socket.socket, message: Message) -> None:
        try:
            answer = json.dumps(self._answer(message)).encode() + b"\n"
            end.settimeout(ANSWER_SECONDS)
            with suppress(OSError):  # it asked, and did not wait
                end.sendall(answer)
        finally:
            self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        del self._visitors[end]
        self._selector.unregister(end)
        end.close()

    def _release(self) -> None:
        for connection, visitor in self._visitors.items():
            if visitor.rank is not None:
                with suppress(OSError):
                    connection.sendall(json.dumps({"goodbye": self._goodbye}).encode() + b"\n")
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # only sockets are registered
        self._selector.close()
        for end in (self._listener, self._wake, self._alarm_clock):
            end.close()


@dataclass
class _Visitor:
    """The other end of a connection: a neighbour's rank, or None for who asks, who is to be heard by ``until``."""

    rank: int | None
    until: float
    said: bytearray = field(default_factory=bytearray)


def _rank_in(message: Message) -> int:
    """The rank that a neighbour says it is."""
    rank = message.get("rank")
    if type(rank) is not int or rank < 0:  # True is an int, too
        raise ValueError(f"a connection is held for a rank: got {rank!r}, expected a number from 0 on")
    return rank


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)
