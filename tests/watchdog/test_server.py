"""Do ranks reach each other beside the collectives, and nobody else?"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from legacy_ddp._watchdog.addresses import own_hosts, reachable
from legacy_ddp._watchdog.client import Outcome, Peer, ask, ask_all, decode_peer, encode_message
from legacy_ddp._watchdog.processes import DEAD, RUNNING, STOPPED, UNKNOWN, Identity, own_identity, state_of
from legacy_ddp._watchdog.server import Line

# Another process, so that it can be stopped and killed; it says where it listens and stays.
_LISTENER = """
import sys
from legacy_ddp._watchdog.server import Line
line = Line(1, lambda message: {"heard": message["ask"]}, print)
line.start(None)
print(line.me.encode().decode(), flush=True)
sys.stdin.read()
line.close("bye")
"""


class _Ends:
    """Two lines of this process, and what they were told."""

    def __init__(self) -> None:
        self.closed: list[tuple[int, int, str | None]] = []
        self.told = threading.Event()
        self.lines = [Line(rank, self._answer, self._noting(rank)) for rank in (0, 1)]

    def _answer(self, message: Any) -> dict[str, Any]:
        return {"heard": message["ask"]}

    def _noting(self, rank: int) -> Callable[[int, str | None], None]:
        def note(other: int, goodbye: str | None) -> None:
            self.closed.append((rank, other, goodbye))
            self.told.set()

        return note


@pytest.fixture
def ends() -> Iterator[_Ends]:
    ends = _Ends()
    yield ends
    for line in ends.lines:
        line.close("")


@pytest.fixture
def listener() -> Iterator[tuple[subprocess.Popen[str], Peer]]:
    with subprocess.Popen(
        [sys.executable, "-c", _LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        peer = decode_peer(1, process.stdout.readline().encode())
        assert peer is not None
        yield process, peer
        process.kill()


def _elsewhere(peer: Peer) -> Peer:
    """The same process as another machine would see it: nothing is known of it but its port."""
    return replace(peer, identity=replace(peer.identity, machine="another"), addresses=peer.addresses)


def _here() -> Identity:
    return replace(own_identity(), machine="another")


def test_a_question_is_answered(ends: _Ends) -> None:
    ends.lines[0].start(None)

    assert ask(ends.lines[0].me, {"ask": "state"}, own_identity()) == (Outcome.ANSWERED, {"heard": "state"})


def test_many_are_asked_at_once_and_each_answers_for_itself(ends: _Ends) -> None:
    for line in ends.lines:
        line.start(None)

    answers = ask_all([line.me for line in ends.lines], {"ask": "state"}, own_identity())

    assert answers == dict.fromkeys((0, 1), (Outcome.ANSWERED, {"heard": "state"}))


def test_who_does_not_know_the_token_hears_nothing(ends: _Ends) -> None:
    ends.lines[0].start(None)
    stranger = replace(ends.lines[0].me, token="guessed")

    assert ask(stranger, {"ask": "state"}, own_identity(), seconds=0.1) == (Outcome.SILENT, None)
    assert ask(ends.lines[0].me, {"ask": "state"}, own_identity())[0] is Outcome.ANSWERED


_STRANGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x00\xff\n",
    b"[1, 2]\n",
    b'"text"\n',
    b'{"ask": 1}\n',
    b"",
    b"[" * 100_000 + b"\n",
    '{"token": "\\ud800é"}\n'.encode(),
]


@pytest.mark.parametrize("data", _STRANGE)
def test_strange_bytes_end_the_connection_and_nothing_else(data: bytes, ends: _Ends) -> None:
    ends.lines[0].start(None)
    host, port = ends.lines[0].me.addresses[-1]
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""

    assert ask(ends.lines[0].me, {"ask": "state"}, own_identity())[0] is Outcome.ANSWERED


def test_a_stranger_that_drips_keeps_nobody_else_waiting(ends: _Ends) -> None:
    line = ends.lines[0]
    line.start(None)
    with socket.create_connection(line.me.addresses[-1], timeout=5) as stranger:
        for _ in range(5):
            stranger.sendall(b"{")
            assert ask(line.me, {"ask": "state"}, own_identity(), seconds=0.3)[0] is Outcome.ANSWERED
        assert stranger.recv(10) == b""  # shown out, though it was about to go on


def test_strangers_that_stay_silent_are_shown_out_and_leave_room(ends: _Ends) -> None:
    line = ends.lines[0]
    line.start(None)
    before = len(os.listdir("/proc/self/fd"))
    strangers = [socket.create_connection(line.me.addresses[-1], timeout=5) for _ in range(300)]

    assert ask(line.me, {"ask": "state"}, own_identity())[0] is Outcome.ANSWERED
    for stranger in strangers:
        assert stranger.recv(10) == b""
        stranger.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_answer_that_cannot_be_made_ends_the_connection_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def answer(message: Any) -> dict[str, Any]:
        return {"ratio": 1 / message["divisor"]}

    line = Line(0, answer, print)
    line.start(None)

    assert ask(line.me, {"ask": "state", "divisor": 0}, own_identity(), seconds=0.2)[0] is Outcome.SILENT
    assert ask(line.me, {"ask": "state", "divisor": 2}, own_identity()) == (Outcome.ANSWERED, {"ratio": 0.5})
    assert "ZeroDivisionError" in caplog.text
    line.close("")


@pytest.mark.parametrize("rank", [None, "one", [1], 1.5, 1e400, True, -1])
def test_a_hold_that_names_no_rank_ends_the_connection_and_nothing_else(rank: object, ends: _Ends) -> None:
    line = ends.lines[0]
    line.start(None)
    with socket.create_connection(line.me.addresses[-1], timeout=5) as neighbour:
        neighbour.sendall(encode_message(line.me, {"ask": "hold"} if rank is None else {"ask": "hold", "rank": rank}))
        assert neighbour.recv(100) == b""

    assert ask(line.me, {"ask": "state"}, own_identity())[0] is Outcome.ANSWERED
    assert ends.closed == []


def test_an_error_in_what_follows_a_neighbour_s_end_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()

    def fail(rank: int, goodbye: str | None) -> None:
        told.set()
        raise RuntimeError("can't start new thread")

    line = Line(0, lambda message: {"heard": message["ask"]}, fail)
    line.start(None)
    with socket.create_connection(line.me.addresses[-1], timeout=5) as neighbour:
        neighbour.sendall(encode_message(line.me, {"ask": "hold", "rank": 1}))

    assert told.wait(5)
    assert ask(line.me, {"ask": "state"}, own_identity()) == (Outcome.ANSWERED, {"heard": "state"})
    assert "can't start new thread" in caplog.text
    line.close("")


def test_a_neighbour_that_leaves_says_goodbye_and_one_that_dies_does_not(ends: _Ends) -> None:
    first, second = ends.lines
    first.start(None)
    second.start(first.me)
    # Answered in the order of arrival: the second line holds its connection by now.
    assert ask(first.me, {"ask": "state"}, own_identity())[0] is Outcome.ANSWERED

    second.close("left after call 3")

    assert ends.told.wait(5)
    assert ends.closed == [(0, 1, "left after call 3")]


def test_a_goodbye_that_comes_with_the_greeting_is_heard(ends: _Ends) -> None:
    line = ends.lines[0]
    line.start(None)
    with socket.create_connection(line.me.addresses[-1], timeout=5) as neighbour:
        greeting = encode_message(line.me, {"ask": "hold", "rank": 1})
        neighbour.sendall(greeting + json.dumps({"goodbye": "left after call 3"}).encode() + b"\n")

    assert ends.told.wait(5)
    assert ends.closed == [(0, 1, "left after call 3")]


@pytest.mark.parametrize("_", range(10))
def test_a_line_that_closes_at_once_says_goodbye_to_who_has_just_come(_: int, ends: _Ends) -> None:
    line = ends.lines[0]
    with socket.create_connection(line.me.addresses[-1], timeout=5) as neighbour:
        neighbour.sendall(json.dumps({"ask": "hold", "rank": 1, "token": line.me.token}).encode() + b"\n")
        line.start(None)
        line.close("left at once")

        assert json.loads(neighbour.recv(1000)) == {"goodbye": "left at once"}


def test_the_end_of_a_killed_neighbour_is_noticed(listener: tuple[subprocess.Popen[str], Peer]) -> None:
    process, peer = listener
    told = threading.Event()
    said: list[tuple[int, str | None]] = []

    def note(rank: int, goodbye: str | None) -> None:
        said.append((rank, goodbye))
        told.set()

    line = Line(0, dict, note)
    line.start(peer)
    assert ask(line.me, {"ask": "state"}, own_identity())[0] is Outcome.ANSWERED  # it holds its connection by now

    process.kill()

    assert told.wait(5)
    assert said == [(1, None)]
    line.close("")


@pytest.mark.parametrize("from_elsewhere", [False, True])
def test_stopped_gone_and_answering_processes_are_told_apart(
    from_elsewhere: bool, listener: tuple[subprocess.Popen[str], Peer]
) -> None:
    process, peer = listener
    me = own_identity()
    if from_elsewhere:
        peer, me = _elsewhere(peer), _here()
        assert state_of(peer.identity) == UNKNOWN
    else:
        assert state_of(peer.identity) == RUNNING

    assert ask(peer, {"ask": "state"}, me)[0] is Outcome.ANSWERED
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert ask(peer, {"ask": "state"}, me)[0] is Outcome.SILENT
    assert from_elsewhere or state_of(peer.identity) == STOPPED
    process.send_signal(signal.SIGCONT)
    assert ask(peer, {"ask": "state"}, me, seconds=5)[0] is Outcome.ANSWERED
    process.kill()
    assert ask(peer, {"ask": "state"}, me)[0] is Outcome.GONE  # also before anybody reaped it
    assert from_elsewhere or state_of(peer.identity) == DEAD
    process.wait()
    assert ask(peer, {"ask": "state"}, me)[0] is Outcome.GONE


def test_a_pid_that_was_given_to_another_process_counts_as_dead() -> None:
    assert state_of(replace(own_identity(), started="1")) == DEAD
    assert state_of(own_identity()) == RUNNING


def test_a_card_carries_all_that_peers_need() -> None:
    peer = Peer(3, Identity("node", 42, "77", "machine"), [("10.0.0.1", 5000)], "word")

    assert decode_peer(3, peer.encode()) == peer
    assert decode_peer(3, b"") is None


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


def test_a_message_is_one_line_of_json() -> None:
    assert json.loads(Peer(0, own_identity(), [], "t").encode())[2] == "t"
