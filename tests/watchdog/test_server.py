"""Status servers and requests between ranks, with real sockets and processes, also at the limits of a process."""

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from legacy_ddp import Checks
from legacy_ddp._watchdog.client import (
    PROOF_BYTES,
    Endpoint,
    Message,
    Outcome,
    encode_message,
    greet,
    own_hosts,
    reachable,
    request,
    request_all,
)
from legacy_ddp._watchdog.process import Identity, own_identity
from legacy_ddp._watchdog.server import StatusServer
from tests.helpers.listening import WARN_SECONDS, Training, listen, said
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import run_script
from tests.helpers.small_models import error_of, step, wrap
from tests.helpers.status_servers import a_listener

# More than the address space holds: Python's threads cannot be started, as at a limit of processes; those of C++ can.
TOO_LARGE_STACK_BYTES = 2**47


@contextmanager
def _no_more_threads() -> Iterator[None]:
    threading.stack_size(TOO_LARGE_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(0)


class _Servers:
    """Two status servers of this process, and the closed monitor connections."""

    def __init__(self) -> None:
        self.closed: list[tuple[int, int, str | None]] = []
        self.was_closed = threading.Event()
        self.servers = [StatusServer(rank, self._answer, self._noting(rank)) for rank in (0, 1)]

    def _answer(self, message: Any) -> dict[str, Any]:
        return {"heard": message["request"]}

    def _noting(self, rank: int) -> Callable[[int, str | None], None]:
        def note(other: int, exit_reason: str | None) -> None:
            self.closed.append((rank, other, exit_reason))
            self.was_closed.set()

        return note


@pytest.fixture
def pair() -> Iterator[_Servers]:
    pair = _Servers()
    yield pair
    for server in pair.servers:
        server.close("")


def _request(endpoint: Endpoint, own: Identity | None = None, **options: float) -> tuple[Outcome, Message | None]:
    return request(endpoint, {"request": "status"}, own or own_identity(), **options)


def _connect(server: StatusServer) -> socket.socket:
    return socket.create_connection(server.endpoint.addresses[-1], timeout=5)


def _send(connection: socket.socket, server: StatusServer, *messages: Message) -> None:
    """As another rank does."""
    connection.sendall(greet(server.endpoint.token) + b"".join(map(encode_message, messages)))


def _receive_reason(connection: socket.socket) -> Any:
    """What the server sends until it closes the connection, without its proof."""
    return json.loads(connection.makefile("rb").read()[PROOF_BYTES:])


def test_an_error_in_an_answer_or_in_what_follows_a_neighbour_s_end_ends_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    was_closed = threading.Event()

    def answer(message: Any) -> dict[str, Any]:
        return {"ratio": 1 / message["divisor"]}

    def fail(rank: int, exit_reason: str | None) -> None:
        was_closed.set()
        raise RuntimeError("can't start new thread")

    server = StatusServer(0, answer, fail)
    server.start(None)
    with _connect(server) as neighbour:
        _send(neighbour, server, {"request": "monitor", "rank": 1})
    assert was_closed.wait(5)
    own, message = own_identity(), {"request": "status", "divisor": 0}
    assert request(server.endpoint, message, own, seconds=0.2)[0] is Outcome.SILENT
    assert request(server.endpoint, {**message, "divisor": 2}, own) == (Outcome.ANSWERED, {"ratio": 0.5})

    assert "ZeroDivisionError" in caplog.text
    assert "can't start new thread" in caplog.text
    server.close("")


def _monitor(**rank: object) -> bytes:
    return encode_message({"request": "monitor", **rank})


_OF_STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b'{"request": 1}\n',
    b"",
    bytes(1000),
    greet("another token") + encode_message({"request": "status"}),
]
_OF_RANKS = [b"\x00\xff\n", b"[1, 2]\n", b'"text"\n', b"[" * 100_000 + b"\n", _monitor()]
_OF_RANKS += [_monitor(rank=rank) for rank in (None, "one", [1], 1.5, 1e400, True, -1)]
_STRANGE = [*((data, False) for data in _OF_STRANGERS), *((data, True) for data in _OF_RANKS)]


@pytest.mark.parametrize("data, has_token", _STRANGE, ids=map(str, range(len(_STRANGE))))
def test_strange_bytes_end_the_connection_and_nothing_else(data: bytes, has_token: bool, pair: _Servers) -> None:
    server = pair.servers[0]
    server.start(None)
    with _connect(server) as connection, suppress(OSError):  # the server does not read to the end
        connection.sendall((greet(server.endpoint.token) if has_token else b"") + data)
        connection.shutdown(socket.SHUT_WR)
        assert connection.makefile("rb").read()[PROOF_BYTES if has_token else 0 :] == b""

    assert _request(server.endpoint)[0] is Outcome.ANSWERED
    assert pair.closed == []


@pytest.mark.parametrize("limits", [nullcontext, _no_more_threads], ids=["threads", "no threads"])
def test_many_ranks_answer_concurrent_requests_each_for_itself(limits: Any, pair: _Servers) -> None:
    for server in pair.servers:
        server.start(None)

    with limits():
        answers = request_all([server.endpoint for server in pair.servers], {"request": "status"}, own_identity())

    assert answers == dict.fromkeys((0, 1), (Outcome.ANSWERED, {"heard": "status"}))


def test_a_request_without_the_token_gets_no_answer(pair: _Servers) -> None:
    pair.servers[0].start(None)
    client = replace(pair.servers[0].endpoint, token="guessed")

    assert _request(client, seconds=0.1) == (Outcome.SILENT, None)
    assert _request(pair.servers[0].endpoint)[0] is Outcome.ANSWERED


_LISTS = b"[" + b"[]," * (2**20 // 3 - 10) + b"[]]\n"  # a little less than a rank takes from another


def _cpu_seconds(server: StatusServer, data: bytes) -> float:
    """The processor time of the server's thread for 1,000 connections that send ``data``."""
    thread = server._thread.ident
    assert thread is not None
    clock = time.pthread_getcpuclockid(thread)
    before = time.clock_gettime(clock)
    for _ in range(1000):
        with socket.create_connection(server.endpoint.addresses[-1], timeout=60) as connection:
            with suppress(OSError):  # the server does not read to the end
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError):
                assert connection.recv(100) == b""
    return time.clock_gettime(clock) - before


def test_a_thousand_messages_of_strangers_cost_as_little_as_a_thousand_empty_connections(pair: _Servers) -> None:
    """JSON of 1 MiB was decoded before the token was compared: 0.35 s a message, which held up the training."""
    server = pair.servers[0]
    server.start(None)
    empty = _cpu_seconds(server, b"")

    assert _cpu_seconds(server, _LISTS) < 10 * empty  # 1,000 times as much with the JSON decoded
    assert _cpu_seconds(server, greet("guessed") + _LISTS) < 10 * empty
    assert _request(server.endpoint)[0] is Outcome.ANSWERED


def test_an_unauthenticated_connection_that_sends_byte_by_byte_delays_no_other(pair: _Servers) -> None:
    server = pair.servers[0]
    server.start(None)
    with _connect(server) as client:
        for _ in range(5):
            client.sendall(b"{")
            assert _request(server.endpoint, seconds=0.3)[0] is Outcome.ANSWERED
        assert client.recv(10) == b""  # evicted in the middle of its message


def test_silent_unauthenticated_connections_are_evicted_and_release_their_descriptors(pair: _Servers) -> None:
    server = pair.servers[0]
    server.start(None)
    before = len(os.listdir("/proc/self/fd"))
    clients = [_connect(server) for _ in range(300)]

    assert _request(server.endpoint)[0] is Outcome.ANSWERED
    for client in clients:
        assert client.recv(10) == b""
        client.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_neighbour_that_leaves_sends_its_exit_reason(pair: _Servers) -> None:
    first, second = pair.servers
    first.start(None)
    second.start(first.endpoint)
    # Answered in the order of arrival: the second server holds its connection by now.
    assert _request(first.endpoint)[0] is Outcome.ANSWERED
    second.close("left after call 3")
    assert pair.was_closed.wait(5)
    pair.was_closed.clear()
    with _connect(first) as neighbour:  # it comes with the request
        _send(neighbour, first, {"request": "monitor", "rank": 2}, {"exit_reason": "left at once"})

    assert pair.was_closed.wait(5)
    assert pair.closed == [(0, 1, "left after call 3"), (0, 2, "left at once")]


def test_a_server_that_closes_at_once_sends_its_exit_reason_to_a_new_connection() -> None:
    for _ in range(10):
        server = StatusServer(0, dict, print)
        with _connect(server) as neighbour:
            _send(neighbour, server, {"request": "monitor", "rank": 1})
            server.start(None)
            server.close("left at once")

            assert _receive_reason(neighbour) == {"exit_reason": "left at once"}


def test_the_end_of_a_killed_neighbour_is_noticed(pair: _Servers) -> None:
    server = pair.servers[0]
    with a_listener() as listener:
        server.start(listener.endpoint)
        assert _request(server.endpoint)[0] is Outcome.ANSWERED  # it holds its connection by now

        listener.process.kill()

        assert pair.was_closed.wait(5)
        assert pair.closed == [(0, 1, None)]


def test_a_server_that_closes_before_its_neighbour_has_asked_for_monitoring_does_not_look_lost(pair: _Servers) -> None:
    """At load a rank ended unexpectedly for a neighbour that had connected, and had not sent its request yet."""
    server, other = pair.servers
    with _connect(server) as neighbour:
        server.start(other.endpoint)
        closing = threading.Thread(target=server.close, args=("left early",))
        closing.start()
        assert select.select([neighbour], [], [], 0.1)[0] == []  # no end of file: the server waits for the request
        _send(neighbour, server, {"request": "monitor", "rank": 1})

        assert _receive_reason(neighbour) == {"exit_reason": "left early"}
        closing.join(5)


_ELSEWHERE = replace(own_identity(), machine="another")
_STRANGERS = [
    (own_identity(), _LISTS, Outcome.STRANGER),
    (_ELSEWHERE, _LISTS, Outcome.STRANGER),  # or another host has the address
    (replace(own_identity(), started="1"), _LISTS, Outcome.ENDED),
    (replace(own_identity(), started="1"), None, Outcome.ENDED),
]


class _Stranger:
    """A process that has got the port of a rank, and does not know the token.

    ``answer``: to the first bytes of a client; None: what it can send back of them.
    """

    def __init__(self, answer: bytes | None) -> None:
        self.heard: list[bytes] = []
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    self.heard.append(connection.recv(10_000))
                    connection.sendall(self.heard[-1][-PROOF_BYTES:] if self._answer is None else self._answer)
                    while data := connection.recv(10_000):
                        self.heard.append(data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def _cpu_seconds_of_requests(endpoint: Endpoint, expected: Outcome) -> float:
    before = time.thread_time()
    for _ in range(100):
        assert _request(endpoint) == (expected, None)
    return time.thread_time() - before


@pytest.mark.parametrize("identity, answer, outcome", _STRANGERS, ids=["alive", "elsewhere", "dead", "echo"])
def test_a_stranger_on_the_port_of_a_rank_gets_nothing_and_costs_as_little_as_a_closed_port(
    identity: Identity, answer: bytes | None, outcome: Outcome
) -> None:
    """A rank sent it the token, and decoded up to 1 MiB of its JSON: 0.35 s for an answer."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = Endpoint(1, identity, [unused.getsockname()], "0123456789abcdef" * 2)

    with closing(_Stranger(answer)) as stranger:
        seconds = _cpu_seconds_of_requests(replace(closed, addresses=[stranger.address]), outcome)

    refused = Outcome.ENDED if outcome is Outcome.ENDED or identity is _ELSEWHERE else Outcome.CLOSED
    assert seconds < 30 * _cpu_seconds_of_requests(closed, refused)  # 1,000 times as much with the JSON decoded
    assert len(stranger.heard) == 100
    assert max(map(len, stranger.heard)) < 100
    heard = b"".join(stranger.heard)
    assert closed.token.encode() not in heard
    assert b"status" not in heard


def test_loopback_is_for_the_same_network_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [("10.0.0.1", 5000), ("127.0.0.1", 5000)]

    assert reachable(addresses, same_network=False) == [("10.0.0.1", 5000)]
    assert reachable(addresses, same_network=True) == [("127.0.0.1", 5000), ("10.0.0.1", 5000)]
    for interface in ("", "no such interface", "lo"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
        assert own_hosts()[-1] == "127.0.0.1"


def _late_without_threads(rank: int, folder: Path) -> list[float]:
    training = Training(folder)
    weights = []
    with _no_more_threads():
        if rank == 1:
            time.sleep(2.5 * WARN_SECONDS)  # being late is the fault
        for _ in range(2):
            training.step()
            weights.append(training.model.module.weight.sum().item())
    return weights


def test_a_warning_that_falls_due_where_no_thread_can_be_started_is_given_and_training_goes_on(tmp_path: Path) -> None:
    results = run_ranks(partial(listen, _late_without_threads, tmp_path), 2)

    assert results[0] == results[1]
    first, *_ = told = said(tmp_path, 0)
    assert "all_reduce() call 3, phase agree: ranks have waited for" in first
    assert "stack of rank 1, innermost last:" in "\n".join(told)
    assert "Traceback" not in "\n".join(told)
    assert told[-1].endswith("all_reduce() call 3: all ranks have arrived, and the call has succeeded")


def _constructs(rank: int, folder: str) -> tuple[Any, Any, float | None]:
    """The errors of a ``report_dir`` that cannot be used on rank 1, and without threads there; the mean of a step."""
    errors = [error_of(wrap, checks=Checks(report_dir=f"{folder}/file/inside" if rank == 1 else folder))]
    with _no_more_threads() if rank == 1 else nullcontext():
        errors.append(error_of(wrap, checks=Checks(report_dir=folder), timeout_seconds=20.0))
    return *errors, step(wrap(checks=Checks(report_dir=folder)), 1.0 + rank)


def test_a_watchdog_that_cannot_be_started_on_one_rank_is_the_same_error_on_all_and_the_group_stays_usable(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("not a directory")

    for (first_kind, first), (second_kind, second), mean in run_ranks(_constructs, 2, str(tmp_path)):
        assert first_kind == second_kind == "PeerError"
        assert "rank 1" in first
        assert str(tmp_path / "file") in first
        assert "rank 1" in second
        assert "can't start new thread" in second
        assert mean == 1.5
    assert os.listdir(tmp_path) == ["file"]


_AT_THE_LIMIT = """
import json, os, resource, socket, threading
from legacy_ddp._watchdog.server import StatusServer
from legacy_ddp._watchdog.client import PROOF_BYTES, encode_message, greet

tries = 0
def count(frame, event, _):
    global tries
    tries += event == "call" and frame.f_code.co_name == "_accept"

threading.setprofile(count)
server = StatusServer(0, lambda message: {"heard": message["request"]}, print)
server.start(None)
first, second = socket.socket(), socket.socket()
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
free = os.dup(0)  # the next number that would be given
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
first.connect(server.endpoint.addresses[-1])
first.sendall(greet(server.endpoint.token) + encode_message({"request": "status"}))
first.settimeout(0.5)
try:
    first.recv(100)
except TimeoutError:
    pass
counted = tries
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
first.settimeout(10.0)
answer = first.makefile("rb").read()[PROOF_BYTES:].decode()
resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
second.connect(server.endpoint.addresses[-1])
server.close("")
print(json.dumps([counted, answer, threading.active_count()]))
"""


def test_a_connection_that_waits_at_the_limit_of_descriptors_costs_a_few_tries_and_is_answered_later() -> None:
    ran = run_script("-c", _AT_THE_LIMIT)

    assert ran.stderr == ""
    tries, answer, threads = json.loads(ran.stdout)
    assert 1 <= tries <= 20
    assert json.loads(answer) == {"heard": "status"}
    assert threads == 1  # the main one: closing ended the other


REQUEST_AT_EXIT = """
import atexit
from legacy_ddp._watchdog.server import StatusServer
from legacy_ddp._watchdog.client import request_all

server = StatusServer(0, dict, print)
atexit.register(lambda: print(*request_all([server.endpoint], {}, server.endpoint.identity).values()))
"""


def test_a_rank_that_sends_requests_while_its_process_ends_leaves_no_traceback() -> None:
    ran = run_script("-c", REQUEST_AT_EXIT)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "does not answer" in ran.stdout  # asked by the thread that ends the process: no other can be started
