"""Status server of a rank, and tasks outside of the training thread.

The server answers requests of other ranks, and notices the end of the processes of the two neighbouring ranks. Requests
of ``legacy-ddp watch`` come through the Unix socket of the process; they are read here, and answered by a poll of all
ranks in another thread.
"""

import hmac
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

from legacy_ddp._log import logger_of
from legacy_ddp._watchdog.client import (
    ANSWER_SECONDS,
    GREETING_BYTES,
    MAX_BYTES,
    PART_BYTES,
    PROOF_BYTES,
    Endpoint,
    Message,
    answer_to,
    connect,
    decode_message,
    encode_message,
    greet,
    is_greeting,
    keep_alive,
    own_hosts,
)
from legacy_ddp._watchdog.local import REQUEST_BYTES, forget_listener, release_listener, share_listener
from legacy_ddp._watchdog.process import own_identity

_MAX_STRANGERS = 128  # connections
_MAX_LOCAL = 16  # connections of processes of the user on this host
_NEVER = float("inf")
_ACCEPT_PAUSE_SECONDS = 0.1  # after accept() found no free descriptor: an immediate retry would fail, too
# How long a rank that ends waits for the connection of the neighbour before it. Mostly the connection exists already.
_FAREWELL_SECONDS = ANSWER_SECONDS / 2


class BackgroundTasks:
    """A thread for each task, and a reserve thread for tasks when no more threads can be started.

    An error in a task is logged, and training continues.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pending: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: end the reserve thread
        self._reserve = start_thread(self._run_all_pending)

    def submit(self, function: Callable[..., None], *args: object) -> None:
        task = partial(self._run, function, *args)
        try:
            _start(task)
        except RuntimeError:  # a limit of processes, or the interpreter is ending
            self._pending.put(task)

    def sleep_and_run_pending(self, seconds: float) -> None:
        time.sleep(seconds)
        # The calling thread may be the reserve thread, and may wait for the result of a pending task.
        with suppress(Empty):
            if task := self._pending.get_nowait():
                task()
            else:
                self._pending.put(None)

    def close(self) -> None:
        self._pending.put(None)
        if self._reserve is not threading.current_thread():
            self._reserve.join(ANSWER_SECONDS)

    def _run_all_pending(self) -> None:
        while task := self._pending.get():
            task()

    def _run(self, function: Callable[..., None], *args: object) -> None:
        try:
            function(*args)
        except Exception:  # noqa: BLE001 - no error of the watchdog may end training
            text = "a background task of the watchdog failed; training continues"
            logger_of(self._rank).exception(text, extra={"event": "internal_error"})


def start_thread(target: Callable[[], None]) -> threading.Thread:
    try:
        return _start(target)
    except RuntimeError as error:
        raise OSError(
            f"the watchdog needs two threads: got {str(error)!r}, expected room for both; raise the "
            'limit of processes and threads (ulimit -u, pids.max of the container), or pass checks="off"'
        ) from error


def _start(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name="legacy_ddp watchdog", daemon=True)
    thread.start()
    return thread


class StatusServer:
    """The listening socket of a rank, and monitor connections to the two neighbours.

    A monitor connection stays open, so the kernel shows the end of the neighbour's process at once.
    """

    def __init__(
        self,
        rank: int,
        answer: Callable[[Message], Message],
        on_closed: Callable[[int, str | None], None],
        look: Callable[[], float | None] = lambda: None,
        on_local: Callable[[socket.socket, Message], None] | None = None,
    ) -> None:
        self._answer = answer
        self._on_closed = on_closed  # (rank, its exit reason or None)
        self._look = look  # called before each wait; returns the seconds until its next call, None for no limit
        self._on_local = on_local  # answers a request from the Unix socket, and closes the connection; None: no socket
        self._selector = selectors.DefaultSelector()
        self._listener = listen()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._local = None if on_local is None else share_listener(partial(_tell_problem, rank))
        self._listeners = [self._listener]
        if self._local is not None and self._local.socket is not None:
            self._listeners.append(self._local.socket)
        self._connections: dict[socket.socket, _Connection] = {}
        self._accept_again_at = 0.0  # while accepting is paused
        self._exit_reason = ""
        self._is_closing = False
        self._neighbour: Endpoint | None = None
        self._was_monitored = False  # by the neighbour before this rank
        self._started = threading.Event()
        port = self._listener.getsockname()[1]
        self.endpoint = Endpoint(rank, own_identity(), [(host, port) for host in own_hosts()], secrets.token_hex(16))
        for sock in (*self._listeners, self._wake_receiver):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        try:
            # Here: if no thread can be started, no other rank depends on this server yet.
            self._thread = start_thread(self._serve)
        except OSError:
            self._close_all()
            raise

    def start(self, neighbour: Endpoint | None) -> None:
        self._neighbour = neighbour
        self._started.set()

    def close(self, exit_reason: str) -> None:
        """Send the exit reason to the neighbours and stop answering."""
        self._exit_reason, self._is_closing = exit_reason, True
        self.wake()
        self._started.set()
        if self._thread is not threading.current_thread():
            self._thread.join(ANSWER_SECONDS)

    def wake(self) -> None:
        """Wake the thread, because ``look`` has a new answer."""
        with suppress(OSError):
            self._wake_sender.send(b"x")

    def after_fork(self) -> None:
        """In a forked child: close the parent's sockets. An open copy would hide the end of the parent."""
        for sock in (self._listener, self._wake_receiver, self._wake_sender, *self._connections):
            sock.close()
        if self._local is not None:
            forget_listener()

    def _serve(self) -> None:
        self._started.wait()
        if self._neighbour is not None:
            self._monitor(self._neighbour)
        while self._wake_receiver in self._selector.get_map():
            seconds = [limit for limit in (self._next_timeout(), self._look()) if limit is not None]
            self._handle_ready(min(seconds, default=None))
        # The neighbour before this rank may connect only now, in its first call. Without the exit reason it would
        # report that this rank ended unexpectedly. All input that has arrived is handled.
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while self._handle_ready(max(0.0, deadline - time.monotonic()) if self._awaits_monitor() else 0):
            pass
        self._close_all()

    def _awaits_monitor(self) -> bool:
        return self._neighbour is not None and not self._was_monitored

    def _handle_ready(self, seconds: float | None) -> int:
        """Wait up to ``seconds`` (None: no limit) for input; handle all ready sockets and return their number."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            sock: socket.socket = key.fileobj  # type: ignore[assignment]  # only sockets are registered
            if sock is self._wake_receiver:
                sock.recv(PART_BYTES)
                if self._is_closing:
                    self._selector.unregister(sock)
            elif sock in self._listeners:
                self._accept(sock)
            elif sock in self._connections:
                self._handle(sock, self._connections[sock])
        return len(ready)

    def _handle(self, sock: socket.socket, connection: "_Connection") -> None:
        try:
            self._receive(sock, connection)
        except Exception:  # noqa: BLE001 - a bad message of one rank must not stop the answers to the others
            text = "a message of another rank could not be handled"
            logger_of(self.endpoint.rank).exception(text, extra={"event": "internal_error"})
            if sock in self._connections:
                self._evict(sock)

    def _next_timeout(self) -> float | None:
        """Seconds until the next deadline, or the end of a pause in accepting; None if there is neither.

        Evicts connections after their deadline, and strangers above the limit.
        """
        now = time.monotonic()
        late = [sock for sock, connection in self._connections.items() if connection.deadline < now]
        for sock in {*late, *self._strangers()[:-_MAX_STRANGERS]}:
            self._evict(sock)
        times = [connection.deadline for connection in self._connections.values()]
        if self._listener not in self._selector.get_map():
            if self._accept_again_at > now:
                times.append(self._accept_again_at)
            else:
                for listener in self._listeners:
                    self._selector.register(listener, selectors.EVENT_READ)
        next_time = min(times, default=_NEVER)
        return None if next_time == _NEVER else max(0.0, next_time - now)

    def _strangers(self) -> list[socket.socket]:
        """Connections to this server without a greeting yet, the oldest first."""
        return [
            sock
            for sock, connection in self._connections.items()
            if connection.rank is None and not connection.is_authentic
        ]

    def _monitor(self, neighbour: Endpoint) -> None:
        # Does not wait for the proof of the neighbour: the ranks are a ring, and every rank would wait for the next.
        with suppress(OSError):
            greeting = greet(neighbour.token)
            sock = connect(neighbour, self.endpoint.identity, ANSWER_SECONDS)
            sock.sendall(greeting + encode_message({"request": "monitor", "rank": self.endpoint.rank}))
            self._register(sock, _Connection(neighbour.rank, expected=answer_to(greeting, neighbour.token)))

    def _accept(self, listener: socket.socket) -> None:
        is_local = listener is not self._listener
        try:
            sock = listener.accept()[0]
            # The kernel has proved the user of a local connection.
            connection = _Connection(None, time.monotonic() + ANSWER_SECONDS, is_local=is_local, is_authentic=is_local)
            self._register(sock, connection)
        except BlockingIOError:  # the client has gone, or another server of this process has taken it
            return
        except OSError:  # no descriptor is free: free some before the next try
            for sock in self._strangers():
                self._evict(sock)
            for one in self._listeners:
                if one in self._selector.get_map():  # both may be ready at the same time
                    self._selector.unregister(one)
            self._accept_again_at = time.monotonic() + _ACCEPT_PAUSE_SECONDS
            return
        if is_local and not self._is_welcome(sock):
            self._evict(sock)

    def _is_welcome(self, sock: socket.socket) -> bool:
        number = sum(connection.is_local for connection in self._connections.values())
        return self._local is not None and self._local.is_of_user(sock) and number <= _MAX_LOCAL

    def _register(self, sock: socket.socket, connection: "_Connection") -> None:
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ)
        self._connections[sock] = connection

    def _receive(self, sock: socket.socket, connection: "_Connection") -> None:
        try:
            # Until the other side has proved the token, no more than its first bytes.
            part = sock.recv(PART_BYTES if connection.is_authentic else connection.missing_bytes)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        connection.received += part
        if connection.is_authentic:
            self._receive_message(sock, connection, is_end=not part)
        elif not part or not connection.missing_bytes:
            self._authenticate(sock, connection)

    def _authenticate(self, sock: socket.socket, connection: "_Connection") -> None:
        """Close the connection of a process that does not know the token."""
        first, connection.received = bytes(connection.received), bytearray()
        if connection.expected:
            connection.is_authentic = hmac.compare_digest(first, connection.expected)
        elif is_greeting(first, self.endpoint.token):
            connection.is_authentic = True
            with suppress(OSError):  # the client has gone
                sock.send(answer_to(first, self.endpoint.token))
        if not connection.is_authentic:
            self._end(sock, connection, None)

    def _receive_message(self, sock: socket.socket, connection: "_Connection", *, is_end: bool) -> None:
        """Handle a complete message. ``is_end``: there will be no more bytes."""
        line, is_complete, rest = connection.received.partition(b"\n")
        max_bytes = REQUEST_BYTES if connection.is_local else MAX_BYTES
        if not is_end and not is_complete and len(connection.received) < max_bytes:
            return
        message = decode_message(line) if is_complete and len(line) <= max_bytes else None
        if connection.is_local and message is not None and self._on_local is not None:
            self._release(sock)
            self._on_local(sock, message)
        elif connection.rank is not None or connection.is_local or message is None:
            self._end(sock, connection, message)
        elif message.get("request") == "monitor":
            keep_alive(sock)
            # The neighbour may already have left: the rest may hold its exit reason.
            connection.rank, connection.deadline, connection.received = _rank_in(message), _NEVER, rest
            self._was_monitored = True
        else:
            self._reply(sock, message)

    def _end(self, sock: socket.socket, connection: "_Connection", message: Message | None) -> None:
        """End a connection. ``message``: the last; of a neighbour, with its exit reason."""
        self._evict(sock)
        if connection.rank is not None:
            reason = message.get("exit_reason") if message else None
            self._on_closed(connection.rank, None if reason is None else str(reason))

    def _reply(self, sock: socket.socket, message: Message) -> None:
        try:
            answer = encode_message(self._answer(message))
            sock.settimeout(ANSWER_SECONDS)
            with suppress(OSError):  # the client did not wait for the answer
                sock.sendall(answer)
        finally:
            self._evict(sock)

    def _evict(self, sock: socket.socket) -> None:
        self._release(sock)
        sock.close()

    def _release(self, sock: socket.socket) -> None:
        del self._connections[sock]
        self._selector.unregister(sock)

    def _close_all(self) -> None:
        for sock, connection in self._connections.items():
            if connection.rank is not None:
                with suppress(OSError):
                    sock.sendall(encode_message({"exit_reason": self._exit_reason}))
        for key in list(self._selector.get_map().values()):
            if key.fileobj not in self._listeners:  # that of the process may have other uses
                key.fileobj.close()  # type: ignore[union-attr]  # only sockets are registered
        self._selector.close()
        for sock in (self._listener, self._wake_receiver, self._wake_sender):
            sock.close()
        if self._local is not None:
            release_listener(self._local)


@dataclass
class _Connection:
    """An open connection."""

    rank: int | None  # of a neighbour, for a monitor connection
    deadline: float = _NEVER
    expected: bytes = b""  # the first bytes of the neighbour this rank connected to; empty: a client sends a greeting
    received: bytearray = field(default_factory=bytearray)
    is_authentic: bool = False  # the first bytes have proved the token
    is_local: bool = False  # from the Unix socket

    @property
    def missing_bytes(self) -> int:
        return (PROOF_BYTES if self.expected else GREETING_BYTES) - len(self.received)


def _tell_problem(rank: int, problem: str) -> None:
    text = "legacy-ddp watch does not find this process: %s"
    logger_of(rank).info(text, problem, extra={"event": "local_socket"})


def _rank_in(message: Message) -> int:
    rank = message.get("rank")
    if type(rank) is not int or rank < 0:  # True is an int, too
        raise ValueError(f"rank in a monitor request is invalid: got {rank!r}, expected a number from 0 on")
    return rank


def listen() -> socket.socket:
    """A listening TCP socket on all interfaces, at a free port."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)
