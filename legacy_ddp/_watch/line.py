"""How do ranks speak beside the collectives? A line of JSON each way over TCP, to a thread that sleeps until then.

A store would be the usual place to leave notes, but reading one blocks for as long as its owner is stopped, every rank
would write all the time, and all would be lost with one process. Asking the rank itself needs nobody else, costs
nothing until somebody asks, and its failures tell something: a closed port means that the process has ended.
"""

import hmac
import json
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from legacy_ddp._watch.addresses import Address, own_hosts, reachable
from legacy_ddp._watch.processes import DEAD, STOPPED, TRACED, Identity, own_identity, state_of

Message = Mapping[str, Any]
logger = logging.getLogger("legacy_ddp")

ANSWER_SECONDS = 0.7  # a Python thread answers in milliseconds; one that waits for the GIL of a busy process, in tens
_MAX_BYTES = 2**20
CONCURRENT_QUESTIONS = 32


class Outcome(StrEnum):
    """How a question ended. The last two were never put."""

    ANSWERED = "answers"
    GONE = "its process has ended"
    SILENT = "does not answer"
    UNREACHABLE = "cannot be reached"
    NOT_ASKED = "not asked"
    DEAF = "unknown: checks off, or never met"


@dataclass(frozen=True)
class Peer:
    """A rank as the others know it: who it is, where it listens, and the word that it answers to."""

    rank: int
    identity: Identity
    addresses: Sequence[Address]
    token: str

    def encode(self) -> bytes:
        """For :func:`decode_peer` on another rank."""
        return json.dumps([vars(self.identity), self.addresses, self.token]).encode()


def decode_peer(rank: int, data: bytes) -> Peer | None:
    """The peer of ``rank``, None if it sent nothing because it does not listen."""
    if not data:
        return None
    identity, addresses, token = json.loads(data)
    return Peer(rank, Identity(**identity), [(host, port) for host, port in addresses], token)


class Line:
    """This rank's listening end, and the two connections that it holds so that a neighbour's end is noticed at once."""

    def __init__(
        self, rank: int, answer: Callable[[Message], Message], on_closed: Callable[[int, str | None], None]
    ) -> None:
        self._answer = answer
        self._on_closed = on_closed  # (rank, its goodbye or None)
        self._selector = selectors.DefaultSelector()
        self._listener = _listen()
        self._wake, self._alarm_clock = socket.socketpair()
        self._held: dict[socket.socket, int] = {}
        self._goodbye = ""
        self._thread: threading.Thread | None = None
        port = self._listener.getsockname()[1]
        self.me = Peer(rank, own_identity(), [(host, port) for host in own_hosts()], secrets.token_hex(16))

    def start(self, neighbour: Peer | None) -> None:
        """Answer from now on, and hold a connection to ``neighbour``."""
        for end in (self._listener, self._wake):
            self._selector.register(end, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, args=(neighbour,), name="legacy_ddp watch", daemon=True)
        self._thread.start()

    def close(self, goodbye: str) -> None:
        """Say goodbye to the neighbours and stop answering."""
        self._goodbye = goodbye
        with suppress(OSError):
            self._alarm_clock.send(b"x")
        if self._thread is None:
            self._release()
        elif self._thread is not threading.current_thread():
            self._thread.join(ANSWER_SECONDS)

    def abandon(self) -> None:
        """In a forked child: close what belongs to the parent, whose end would else go unnoticed."""
        for end in (self._listener, self._wake, self._alarm_clock, *self._held):
            end.close()

    def _serve(self, neighbour: Peer | None) -> None:
        if neighbour is not None:
            self._hold(neighbour)
        while self._wake in self._selector.get_map():
            self._attend_all(seconds=None)
        # Who has knocked is let in: a neighbour that began a moment ago is to hear the goodbye, too.
        while self._attend_all(seconds=0):
            pass
        self._release()

    def _attend_all(self, seconds: float | None) -> int:
        """Wait for ``seconds`` (None: for ever) for somebody to speak; attend to all who did, and count them."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            end: socket.socket = key.fileobj  # type: ignore[assignment]  # only sockets are registered
            try:
                if end is self._wake:
                    self._selector.unregister(end)
                elif end is self._listener:
                    self._accept()
                else:
                    self._attend(end)
            except Exception:  # whatever it is, the others still need answers
                logger.exception("an answer to another rank failed")
        return len(ready)

    def _hold(self, neighbour: Peer) -> None:
        with suppress(OSError):
            connection = _connect(neighbour, self.me.identity)
            connection.sendall(_encode(neighbour, {"ask": "hold", "rank": self.me.rank}))
            self._held[connection] = neighbour.rank
            self._selector.register(connection, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it left before it was let in
            return
        connection.settimeout(ANSWER_SECONDS)
        self._selector.register(connection, selectors.EVENT_READ)

    def _attend(self, end: socket.socket) -> None:
        try:
            message = _read(end)
        except OSError:
            message = None
        if end in self._held:
            self._drop(end)
            self._on_closed(self._held.pop(end), message.get("goodbye") if message else None)
        elif message is None or not hmac.compare_digest(str(message.get("token")), self.me.token):
            self._drop(end)
        elif message["ask"] == "hold":
            _keep_alive(end)
            self._held[end] = int(message["rank"])
        else:
            try:
                answer = json.dumps(self._answer(message)).encode() + b"\n"
                with suppress(OSError):  # it asked, and did not wait
                    end.sendall(answer)
            finally:
                self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        self._selector.unregister(end)
        end.close()

    def _release(self) -> None:
        for connection in self._held:
            with suppress(OSError):
                connection.sendall(json.dumps({"goodbye": self._goodbye}).encode() + b"\n")
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # only sockets are registered
        self._selector.close()
        for end in (self._listener, self._wake, self._alarm_clock):
            end.close()


def ask(peer: Peer, message: Message, me: Identity, seconds: float = ANSWER_SECONDS) -> tuple[Outcome, Message | None]:
    """Put one question to one rank; blocks for about ``seconds`` at most, not at all where the kernel knows better."""
    give_up = time.monotonic() + seconds
    while True:
        state = state_of(peer.identity)
        if state in (DEAD, STOPPED, TRACED):
            return (Outcome.GONE if state == DEAD else Outcome.SILENT), None
        try:
            with _connect(peer, me) as connection:
                connection.settimeout(max(0.01, give_up - time.monotonic()))
                connection.sendall(_encode(peer, message))
                if (answer := _read(connection)) is not None:
                    return Outcome.ANSWERED, answer
            outcome = Outcome.SILENT
        except ConnectionRefusedError:
            return Outcome.GONE, None
        except TimeoutError:
            return Outcome.SILENT, None
        except ConnectionError:
            outcome = Outcome.SILENT
        except OSError:
            outcome = Outcome.UNREACHABLE
        # A process that is just ending takes connections and drops them, until its port is closed.
        if time.monotonic() > give_up:
            return outcome, None
        time.sleep(0.02)


def ask_all(peers: Sequence[Peer], message: Message, me: Identity) -> dict[int, tuple[Outcome, Message | None]]:
    """Put one question to many ranks at the same time; ranks not heard in time are silent."""
    with ThreadPoolExecutor(CONCURRENT_QUESTIONS, thread_name_prefix="legacy_ddp watch") as pool:
        try:
            asked = {peer.rank: pool.submit(ask, peer, message, me) for peer in peers}
        except RuntimeError:  # the interpreter is ending, in which no thread can be started any more
            return {peer.rank: (Outcome.NOT_ASKED, None) for peer in peers}
        wait(asked.values())
    return {rank: future.result() for rank, future in asked.items()}


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _connect(peer: Peer, me: Identity) -> socket.socket:
    """Raises the most telling of the errors: refused, before timed out or unreachable."""
    errors: list[OSError] = []
    for address in reachable(list(peer.addresses), same_machine=peer.identity.machine == me.machine):
        try:
            connection = socket.create_connection(address, timeout=ANSWER_SECONDS / 2)
        except OSError as error:
            errors.append(error)
        else:
            _keep_alive(connection)
            return connection
    errors.sort(key=lambda error: not isinstance(error, ConnectionRefusedError))
    raise OSError("connect timed out") if not errors or isinstance(errors[0], TimeoutError) else errors[0]


def _keep_alive(connection: socket.socket) -> None:
    """An idle connection is forgotten by firewalls, and its other end's host may vanish without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if option := getattr(socket, name, None):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _encode(peer: Peer, message: Message) -> bytes:
    return json.dumps({**message, "token": peer.token}).encode() + b"\n"


def _read(connection: socket.socket) -> Message | None:
    """One message; None if the connection ended before it did, or if it is none of ours."""
    data = bytearray()
    while not data.endswith(b"\n") and len(data) < _MAX_BYTES:
        part = connection.recv(65536)
        if not part:
            return None
        data += part
    try:
        message = json.loads(data)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
