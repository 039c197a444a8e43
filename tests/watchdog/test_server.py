"""Status servers and requests between ranks, with real sockets and processes, also at the limits of a process."""

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from legacy_ddp import Checks
from legacy_ddp._watchdog.client import (
    ANSWER_SECONDS,
    DEAD,
    RUNNING,
    STOPPED,
    UNKNOWN,
    Endpoint,
    Identity,
    Message,
    Outcome,
    decode_endpoint,
    encode_message,
    own_hosts,
    own_identity,
    queued_seconds,
    reachable,
    request,
    request_all,
    state_of,
)
from legacy_ddp._watchdog.server import StatusServer
from tests.helpers.listening import WARN_SECONDS, Training, listen, said
from tests.helpers.paths import ROOT
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import run_script
from tests.helpers.small_models import error_of, wrap

# Status servers and requests between ranks, with real sockets and processes

# A server in another process, which can be stopped and killed; prints its endpoint and waits.
_LISTENER = """
import sys
from legacy_ddp._watchdog.server import StatusServer
server = StatusServer(1, lambda message: {"heard": message["request"]}, print)
server.start(None)
print(server.endpoint.encode().decode(), flush=True)
sys.stdin.read()
server.close("left")
"""


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


@pytest.fixture
def listener() -> Iterator[tuple[subprocess.Popen[str], Endpoint]]:
    with subprocess.Popen(
        [sys.executable, "-c", _LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        peer = decode_endpoint(1, process.stdout.readline().encode())
        assert peer is not None
        yield process, peer
        process.kill()


def _elsewhere(peer: Endpoint) -> Endpoint:
    """The endpoint as seen from another machine: only the port is known, not the process."""
    return replace(peer, identity=replace(peer.identity, machine="another"), addresses=peer.addresses)


def _here() -> Identity:
    return replace(own_identity(), machine="another")


def _request(endpoint: Endpoint, own: Identity | None = None, **options: float) -> tuple[Outcome, Message | None]:
    return request(endpoint, {"request": "status"}, own or own_identity(), **options)


def test_a_request_is_answered(pair: _Servers) -> None:
    pair.servers[0].start(None)

    assert _request(pair.servers[0].endpoint) == (Outcome.ANSWERED, {"heard": "status"})


def test_many_ranks_answer_concurrent_requests_each_for_itself(pair: _Servers) -> None:
    for server in pair.servers:
        server.start(None)

    answers = request_all([server.endpoint for server in pair.servers], {"request": "status"}, own_identity())

    assert answers == dict.fromkeys((0, 1), (Outcome.ANSWERED, {"heard": "status"}))


def test_a_request_without_the_token_gets_no_answer(pair: _Servers) -> None:
    pair.servers[0].start(None)
    client = replace(pair.servers[0].endpoint, token="guessed")

    assert _request(client, seconds=0.1) == (Outcome.SILENT, None)
    assert _request(pair.servers[0].endpoint)[0] is Outcome.ANSWERED


_STRANGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x00\xff\n",
    b"[1, 2]\n",
    b'"text"\n',
    b'{"request": 1}\n',
    b"",
    b"[" * 100_000 + b"\n",
    '{"token": "\\ud800é"}\n'.encode(),
]


@pytest.mark.parametrize("data", _STRANGE)
def test_strange_bytes_end_the_connection_and_nothing_else(data: bytes, pair: _Servers) -> None:
    pair.servers[0].start(None)
    host, port = pair.servers[0].endpoint.addresses[-1]
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""

    assert _request(pair.servers[0].endpoint)[0] is Outcome.ANSWERED


def test_an_unauthenticated_connection_that_sends_byte_by_byte_delays_no_other(pair: _Servers) -> None:
    server = pair.servers[0]
    server.start(None)
    with socket.create_connection(server.endpoint.addresses[-1], timeout=5) as client:
        for _ in range(5):
            client.sendall(b"{")
            assert _request(server.endpoint, seconds=0.3)[0] is Outcome.ANSWERED
        assert client.recv(10) == b""  # evicted in the middle of its message


def test_silent_unauthenticated_connections_are_evicted_and_release_their_descriptors(pair: _Servers) -> None:
    server = pair.servers[0]
    server.start(None)
    before = len(os.listdir("/proc/self/fd"))
    clients = [socket.create_connection(server.endpoint.addresses[-1], timeout=5) for _ in range(300)]

    assert _request(server.endpoint)[0] is Outcome.ANSWERED
    for client in clients:
        assert client.recv(10) == b""
        client.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_answer_that_cannot_be_made_ends_the_connection_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def answer(message: Any) -> dict[str, Any]:
        return {"ratio": 1 / message["divisor"]}

    server = StatusServer(0, answer, print)
    server.start(None)

    assert (
        request(server.endpoint, {"request": "status", "divisor": 0}, own_identity(), seconds=0.2)[0] is Outcome.SILENT
    )
    assert request(server.endpoint, {"request": "status", "divisor": 2}, own_identity()) == (
        Outcome.ANSWERED,
        {"ratio": 0.5},
    )
    assert "ZeroDivisionError" in caplog.text
    server.close("")


@pytest.mark.parametrize("rank", [None, "one", [1], 1.5, 1e400, True, -1])
def test_a_monitor_request_without_a_rank_ends_the_connection_and_nothing_else(rank: object, pair: _Servers) -> None:
    server = pair.servers[0]
    server.start(None)
    with socket.create_connection(server.endpoint.addresses[-1], timeout=5) as neighbour:
        neighbour.sendall(
            encode_message(
                server.endpoint, {"request": "monitor"} if rank is None else {"request": "monitor", "rank": rank}
            )
        )
        assert neighbour.recv(100) == b""

    assert _request(server.endpoint)[0] is Outcome.ANSWERED
    assert pair.closed == []


def test_an_error_in_what_follows_a_neighbour_s_end_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    was_closed = threading.Event()

    def fail(rank: int, exit_reason: str | None) -> None:
        was_closed.set()
        raise RuntimeError("can't start new thread")

    server = StatusServer(0, lambda message: {"heard": message["request"]}, fail)
    server.start(None)
    with socket.create_connection(server.endpoint.addresses[-1], timeout=5) as neighbour:
        neighbour.sendall(encode_message(server.endpoint, {"request": "monitor", "rank": 1}))

    assert was_closed.wait(5)
    assert _request(server.endpoint) == (Outcome.ANSWERED, {"heard": "status"})
    assert "can't start new thread" in caplog.text
    server.close("")


def test_a_neighbour_that_leaves_sends_its_exit_reason(pair: _Servers) -> None:
    first, second = pair.servers
    first.start(None)
    second.start(first.endpoint)
    # Answered in the order of arrival: the second server holds its connection by now.
    assert _request(first.endpoint)[0] is Outcome.ANSWERED

    second.close("left after call 3")

    assert pair.was_closed.wait(5)
    assert pair.closed == [(0, 1, "left after call 3")]


def test_an_exit_reason_that_comes_with_the_monitor_request_is_received(pair: _Servers) -> None:
    server = pair.servers[0]
    server.start(None)
    with socket.create_connection(server.endpoint.addresses[-1], timeout=5) as neighbour:
        message = encode_message(server.endpoint, {"request": "monitor", "rank": 1})
        neighbour.sendall(message + json.dumps({"exit_reason": "left after call 3"}).encode() + b"\n")

    assert pair.was_closed.wait(5)
    assert pair.closed == [(0, 1, "left after call 3")]


@pytest.mark.parametrize("_", range(10))
def test_a_server_that_closes_at_once_sends_its_exit_reason_to_a_new_connection(_: int, pair: _Servers) -> None:
    server = pair.servers[0]
    with socket.create_connection(server.endpoint.addresses[-1], timeout=5) as neighbour:
        neighbour.sendall(
            json.dumps({"request": "monitor", "rank": 1, "token": server.endpoint.token}).encode() + b"\n"
        )
        server.start(None)
        server.close("left at once")

        assert json.loads(neighbour.recv(1000)) == {"exit_reason": "left at once"}


def test_a_server_that_closes_before_its_neighbour_has_asked_for_monitoring_does_not_look_lost(pair: _Servers) -> None:
    """At load a rank ended unexpectedly for a neighbour that had connected, and had not sent its request yet."""
    server, other = pair.servers
    with socket.create_connection(server.endpoint.addresses[-1], timeout=5) as neighbour:
        server.start(other.endpoint)
        closing = threading.Thread(target=server.close, args=("left early",))
        closing.start()
        with select.epoll() as closed:
            closed.register(neighbour, select.EPOLLIN)
            assert closed.poll(0.1) == []  # no end of file: the server waits for the request
        neighbour.sendall(encode_message(server.endpoint, {"request": "monitor", "rank": 1}))

        assert json.loads(neighbour.recv(1000)) == {"exit_reason": "left early"}
        closing.join(5)


def test_the_end_of_a_killed_neighbour_is_noticed(listener: tuple[subprocess.Popen[str], Endpoint]) -> None:
    process, peer = listener
    was_closed = threading.Event()
    said: list[tuple[int, str | None]] = []

    def note(rank: int, exit_reason: str | None) -> None:
        said.append((rank, exit_reason))
        was_closed.set()

    server = StatusServer(0, dict, note)
    server.start(peer)
    assert _request(server.endpoint)[0] is Outcome.ANSWERED  # it holds its connection by now

    process.kill()

    assert was_closed.wait(5)
    assert said == [(1, None)]
    server.close("")


@pytest.mark.parametrize("from_elsewhere", [False, True])
def test_stopped_gone_and_answering_processes_are_told_apart(
    from_elsewhere: bool, listener: tuple[subprocess.Popen[str], Endpoint]
) -> None:
    process, peer = listener
    me = own_identity()
    if from_elsewhere:
        peer, me = _elsewhere(peer), _here()
        assert state_of(peer.identity) == UNKNOWN
    else:
        assert state_of(peer.identity) == RUNNING

    assert _request(peer, me)[0] is Outcome.ANSWERED
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert _request(peer, me)[0] is Outcome.SILENT
    assert from_elsewhere or state_of(peer.identity) == STOPPED
    process.send_signal(signal.SIGCONT)
    assert _request(peer, me, seconds=5)[0] is Outcome.ANSWERED
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # on a crowded machine it takes a while to end
    assert _request(peer, me)[0] is Outcome.ENDED  # also before anybody reaped it
    assert from_elsewhere or state_of(peer.identity) == DEAD
    process.wait()
    assert _request(peer, me)[0] is Outcome.ENDED


def test_a_pid_that_was_given_to_another_process_counts_as_dead() -> None:
    assert state_of(replace(own_identity(), started="1")) == DEAD
    assert state_of(own_identity()) == RUNNING


def test_an_encoded_endpoint_is_decoded_without_loss() -> None:
    peer = Endpoint(3, Identity("node", 42, "77", "machine"), [("10.0.0.1", 5000)], "token")

    assert decode_endpoint(3, peer.encode()) == peer
    assert decode_endpoint(3, b"") is None


def test_loopback_is_for_the_same_machine_alone() -> None:
    addresses = [("10.0.0.1", 5000), ("127.0.0.1", 5000)]

    assert reachable(addresses, same_machine=False) == [("10.0.0.1", 5000)]
    assert reachable(addresses, same_machine=True) == [("127.0.0.1", 5000), ("10.0.0.1", 5000)]
    assert own_hosts()[-1] == "127.0.0.1"


def test_the_interface_that_gloo_uses_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no such interface")
    assert own_hosts()[-1] == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_hosts()[-1] == "127.0.0.1"


def test_an_encoded_endpoint_is_json_with_the_token() -> None:
    assert json.loads(Endpoint(0, own_identity(), [], "t").encode())[2] == "t"


# The watchdog of a process that may start no more threads, or open no more descriptors

# More than the address space holds: Python's threads cannot be started, as at a limit of processes; those of C++ can.
TOO_LARGE_STACK_BYTES = 2**47


@contextmanager
def _no_more_threads() -> Iterator[None]:
    threading.stack_size(TOO_LARGE_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(0)


# Threads


def test_many_ranks_answer_though_no_thread_can_be_started() -> None:
    servers = [StatusServer(rank, lambda message: {"heard": message["request"]}, print) for rank in range(3)]
    for server in servers:
        server.start(None)

    with _no_more_threads():
        answers = request_all([server.endpoint for server in servers], {"request": "status"}, own_identity())

    assert answers == dict.fromkeys(range(3), (Outcome.ANSWERED, {"heard": "status"}))
    for server in servers:
        server.close("")


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


def _constructs(rank: int, folder: str) -> tuple[object, object]:
    if rank == 1:
        threading.stack_size(TOO_LARGE_STACK_BYTES)
    first = error_of(wrap, checks=Checks(report_dir=folder), timeout_seconds=20.0)
    threading.stack_size(0)
    return first, error_of(wrap, checks=Checks(report_dir=folder))


def test_a_watchdog_that_cannot_be_started_on_one_rank_is_the_same_error_on_all_and_the_group_stays_usable(
    tmp_path: Path,
) -> None:
    results = run_ranks(_constructs, 2, str(tmp_path))

    for (kind, text), later in results:
        assert kind == "PeerError"
        assert "rank 1" in text
        assert "can't start new thread" in text
        assert later is None
    assert list(tmp_path.iterdir()) == []


# Descriptors


def test_a_process_that_cannot_be_looked_at_for_want_of_a_descriptor_is_not_called_dead() -> None:
    alive = own_identity()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        state = state_of(alive)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert state != DEAD


_AT_THE_LIMIT = """
import json, os, resource, socket, threading
from legacy_ddp._watchdog.server import StatusServer
from legacy_ddp._watchdog.client import encode_message

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
first.sendall(encode_message(server.endpoint, {"request": "status"}))
first.settimeout(0.5)
try:
    first.recv(100)
except TimeoutError:
    pass
counted = tries
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
first.settimeout(10.0)
answer = first.recv(100).decode()
resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
second.connect(server.endpoint.addresses[-1])
server.close("")
print(json.dumps([counted, answer, threading.active_count()]))
"""


def test_a_connection_that_waits_at_the_limit_of_descriptors_costs_a_few_tries_and_is_answered_later() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", _AT_THE_LIMIT], env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    assert ran.stderr == ""
    tries, answer, threads = json.loads(ran.stdout)
    assert 1 <= tries <= 20
    assert json.loads(answer) == {"heard": "status"}
    assert threads == 1  # the main one: closing ended the other


_CROWDED = """
import os, sys, time
from legacy_ddp._watchdog.client import busy_seconds, own_identity, queued_seconds
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if sys.argv[1] == "hog":
    while True:
        pass
os.nice(19)  # about a hundredth of the processor beside the hog
own = own_identity()
start, busy, queued = time.monotonic(), busy_seconds(), queued_seconds(own)
while time.monotonic() < start + 1.0:
    time.sleep(0.1) if sys.argv[1] == "idle" else None
seconds = time.monotonic() - start
print((busy_seconds() - busy) / seconds, (queued_seconds(own) - queued) / seconds, flush=True)
os._exit(0)  # the end of an interpreter takes a hundred times as long here
"""


@pytest.mark.parametrize("what, is_busy", [("busy", True), ("idle", False)])
def test_a_rank_that_computes_on_a_crowded_machine_is_busy(what: str, is_busy: bool) -> None:
    """It was called idle, with a report for each wait, because it got less than a tenth of a processor."""
    with subprocess.Popen([sys.executable, "-c", _CROWDED, "hog"]) as hog:
        try:
            busy, queued = map(float, run_script("-c", _CROWDED, what).stdout.split())
        finally:
            hog.kill()

    assert (busy > 0.5) is is_busy
    assert (queued > 0.5) is is_busy


@pytest.mark.parametrize("is_crowded", [True, False])
def test_a_rank_whose_process_waits_for_a_processor_gets_more_time_to_answer(
    monkeypatch: pytest.MonkeyPatch, is_crowded: bool
) -> None:
    """At a load of 14 a rank that waited in the call was called missing."""

    def answer(_message: Message) -> Message:
        time.sleep(ANSWER_SECONDS + 0.2)
        return {"heard": "status"}

    # A second per second: one thread waits for a processor all the time.
    monkeypatch.setattr(
        "legacy_ddp._watchdog.client.queued_seconds", lambda _process: time.monotonic() if is_crowded else 0.0
    )
    server = StatusServer(1, answer, lambda _rank, _exit_reason: None)
    server.start(None)

    outcome, _ = request(server.endpoint, {"request": "status"}, own_identity())

    server.close("")
    assert outcome is (Outcome.ANSWERED if is_crowded else Outcome.SILENT)


def test_a_process_that_ends_while_its_threads_are_listed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that asked a dying rank raised FileNotFoundError in place of PeerLostError, about once in 150 losses."""
    scandir, listed = os.scandir, []
    with subprocess.Popen(["sleep", "60"]) as process:
        ending = replace(own_identity(), pid=process.pid)

        def end_and_list(path: str) -> Any:
            process.kill()
            process.wait()
            listed.append(path)
            return scandir(path)

        monkeypatch.setattr(os, "scandir", end_and_list)
        assert queued_seconds(ending) == 0.0
        assert queued_seconds(ending) == 0.0  # and after the end

    assert listed == [f"/proc/{process.pid}/task"] * 2
