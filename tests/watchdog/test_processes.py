"""The processes of ranks as other ranks see them (hidden, ended, on a crowded machine), and polls of all ranks."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from legacy_ddp._explain.missing import compose, poll_ranks
from legacy_ddp._watchdog.client import ANSWER_SECONDS, Endpoint, Failure, Message, Outcome, request, state_of
from legacy_ddp._watchdog.ending import is_fault
from legacy_ddp._watchdog.exchange import FailureRecord, ReportExchange
from legacy_ddp._watchdog.process import DEAD, RUNNING, STOPPED, UNKNOWN, own_identity, queued_seconds, visible_state
from legacy_ddp._watchdog.reports import Report
from legacy_ddp._watchdog.server import BackgroundTasks, StatusServer
from legacy_ddp._watchdog.status import GroupView
from tests.helpers.hosts import reason_not_permitted
from tests.helpers.scripts import run_script
from tests.helpers.status_servers import Answers, a_listener, an_observer

as_root = pytest.mark.skipif(os.geteuid() != 0 or reason_not_permitted() is not None, reason="makes namespaces")

_HIDDEN = (
    *("unshare", "--mount", "sh", "-c", 'mount -t proc -o hidepid=2 proc /proc && exec "$@"', "sh"),
    *("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"),
)
# In each case: the command before the listener, and before the observer; the state in /proc and the state by two signs
# while the listener runs, while it is stopped, and when it has ended.
_HIDES = (DEAD, UNKNOWN), (DEAD, UNKNOWN), (DEAD, DEAD)
_CASES = {
    "the same namespaces": ((), (), ((RUNNING, RUNNING), (STOPPED, STOPPED), (DEAD, DEAD))),
    "another time namespace": (("unshare", "--time", "--boottime", "1000", "--fork"), (), _HIDES),
    "another user with hidepid": ((), _HIDDEN, _HIDES),
    "a container": (("unshare", "--pid", "--fork", "--mount-proc"), (), ((UNKNOWN, UNKNOWN),) * 3),
}


def _await_state(pid: int, letters: Collection[str]) -> None:
    """Wait until the kernel shows one of these states of the process; on a crowded machine it takes a while."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in letters:
        time.sleep(0.01)


def _marks(case: str) -> list[pytest.MarkDecorator]:
    needs_root = [as_root] if any(_CASES[case][:2]) else []
    return [*needs_root, *([pytest.mark.thorough] if case == "another time namespace" else [])]


@pytest.mark.parametrize("case", [pytest.param(name, marks=_marks(name)) for name in _CASES])
def test_stopped_gone_hidden_and_answering_processes_are_told_apart(case: str) -> None:
    """A rank that /proc did not show was called dead while it ran."""
    before_listener, before_observer, (running, stopped, ended) = _CASES[case]
    with a_listener(*before_listener) as listener, an_observer(*before_observer) as look:
        assert look(listener) == (*running, Outcome.ANSWERED)
        os.kill(listener.pid, signal.SIGSTOP)
        _await_state(listener.pid, "T")
        assert look(listener) == (*stopped, Outcome.SILENT)
        os.kill(listener.pid, signal.SIGCONT)
        assert look(listener) == (*running, Outcome.ANSWERED)
        os.kill(listener.pid, signal.SIGKILL)
        if listener.pid == listener.process.pid:
            _await_state(listener.pid, "Z")
            while len(os.listdir(f"/proc/{listener.pid}/task")) > 1:  # sockets are closed by the last thread
                time.sleep(0.01)
            assert look(listener) == (*ended, Outcome.ENDED)  # before anybody reaped it
        listener.process.wait()
        assert look(listener) == (*ended, Outcome.ENDED)


@as_root
def test_ranks_with_the_proc_of_another_pid_namespace_do_not_look_for_their_numbers_there() -> None:
    """There the numbers are of other processes, so that a rank that runs was called dead."""
    alone = a_listener("unshare", "--pid", "--fork")
    with alone as listener, an_observer("nsenter", "--target", str(listener.pid), "--pid") as look:
        assert look(listener) == (UNKNOWN, UNKNOWN, Outcome.ANSWERED)


def test_a_pid_that_was_given_to_another_process_counts_as_dead() -> None:
    later = replace(_dead_peer(1), identity=replace(own_identity(), started="1"))

    assert state_of(later) == DEAD
    assert request(later, {"request": "status"}, own_identity()) == (Outcome.ENDED, None)


def test_a_process_that_runs_without_its_status_server_is_not_called_dead() -> None:
    """A rank closes its server at its end, before its process ends."""
    server = StatusServer(0, dict, print)
    server.start(None)
    server.close("")

    assert state_of(server.endpoint) == RUNNING
    assert request(server.endpoint, {"request": "status"}, own_identity()) == (Outcome.CLOSED, None)


def test_a_process_that_cannot_be_looked_at_for_want_of_a_descriptor_is_not_called_dead() -> None:
    alive = own_identity()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        state = visible_state(alive)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert state != DEAD


_CROWDED = """
import os, subprocess, sys, time
from legacy_ddp._watchdog.process import busy_seconds, own_identity, queued_seconds
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
own = own_identity()
for what in ("idle", "busy"):  # in this order: after much computing a wake-up waits for long, as with a low priority
    os.nice(19 if what == "busy" else 0)  # about a hundredth of the processor beside the hog
    start, busy, queued = time.monotonic(), busy_seconds(), queued_seconds(own)
    while time.monotonic() < start + 1.0:
        time.sleep(1.0) if what == "idle" else None  # one wake-up: on a loaded machine each waits for a processor
    seconds = time.monotonic() - start
    print((busy_seconds() - busy) / seconds, (queued_seconds(own) - queued) / seconds, flush=True)
hog.kill()
os._exit(0)  # the end of an interpreter takes a hundred times as long here
"""


def test_a_rank_that_computes_on_a_crowded_machine_is_busy() -> None:
    """It was called idle, with a report for each wait, because it got less than a tenth of a processor."""
    shares = [[float(share) for share in line.split()] for line in run_script("-c", _CROWDED).stdout.splitlines()]

    assert [[share > 0.5 for share in of_case] for of_case in shares] == [[False, False], [True, True]]


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


@pytest.mark.parametrize(
    "reason, expected",
    [
        ("left after all_reduce() call 2 with ValueError: bad batch, at train.py:9 in main", True),
        ("left after all_reduce() call 2 with exit status 7, at train.py:9 in main", True),
        ("left after all_reduce() call 2 with exit status 7, at train.py:9 in _stop, after SIGTERM", False),
        ("left without an error after all_reduce() call 2, at the end of its script", False),
        ("left because another rank was lost: rank 1 ended unexpectedly", False),
        ("left all_reduce() call 2 with ValueError: bad batch", True),
        ("left all_reduce() call 2 with KeyboardInterrupt", False),
    ],
)
def test_an_end_that_was_asked_for_or_that_follows_another_is_not_told(reason: str, expected: bool) -> None:
    assert is_fault(reason) is expected


# Polls: which ranks are polled a second time, and what the second answer changes

WORDS = "left because another rank was lost"


@pytest.fixture
def listeners() -> Iterator[list[Answers]]:
    made = [Answers(rank) for rank in range(3)]
    yield made
    for one in made:
        one.server.close("")


def _dead_peer(rank: int) -> Endpoint:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = closed.getsockname()
    return Endpoint(rank, replace(own_identity(), pid=process.pid), [address], "")


def test_an_exit_reason_that_came_after_the_first_answer_is_in_the_report(listeners: list[Answers]) -> None:
    first = listeners[0]
    first.changes = {1: {"exit_reasons": {}}, 2: {"exit_reasons": {"1": WORDS}}}
    peers = [first.server.endpoint, _dead_peer(1), listeners[2].server.endpoint, _dead_peer(3)]

    rows = poll_ranks(peers, first.server.endpoint, twice=False)

    assert [row.outcome for row in rows] == [Outcome.ANSWERED, Outcome.ENDED, Outcome.ANSWERED, Outcome.ENDED]
    assert [row.note for row in rows] == ["", WORDS, "", ""]
    assert [row.left_after_loss for row in rows] == [False, True, False, False]


@pytest.mark.parametrize("twice", [False, True])
def test_a_silent_rank_whose_process_runs_is_asked_twice(listeners: list[Answers], twice: bool) -> None:
    asker, _, slow = listeners
    peers = [listener.server.endpoint for listener in listeners]
    assert [row.outcome for row in poll_ranks(peers, peers[0], twice=False)] == [Outcome.ANSWERED] * 3
    assert [one.count for one in listeners] == [1, 1, 1]
    slow.delays = {2: ANSWER_SECONDS + 0.2}
    asker.changes = {number: {"process_states": {"2": RUNNING}} for number in (2, 3)}

    rows = poll_ranks(peers, peers[0], twice=twice)

    assert [row.outcome for row in rows] == [Outcome.ANSWERED] * 3
    assert [one.count for one in listeners] == [2 + twice, 2 + twice, 3]


@pytest.mark.parametrize("number", [1, 2])
def test_a_rank_that_waits_for_a_disk_is_busy(listeners: list[Answers], number: int) -> None:
    """A rank that saved a checkpoint on a crowded machine was called idle, and got a report in place of a line."""
    for listener in listeners:
        listener.changes = {answer: {"busy_seconds": 0.0, "waits_for_disk": False} for answer in (1, 2)}
    listeners[1].changes[number]["waits_for_disk"] = True
    peers = [listener.server.endpoint for listener in listeners]

    rows = poll_ranks(peers, peers[0], twice=True)

    assert [row.is_busy for row in rows] == [False, True, False]


def _view(peers: Sequence[Endpoint], rank: int) -> GroupView:
    return GroupView(peers[rank], peers, range(len(peers)), len(peers))


def test_a_rank_that_left_a_call_is_called_dead_before_a_poll_only_if_its_process_is(listeners: list[Answers]) -> None:
    """A rank that had raised in the call, and stood in a debugger, was dead in the first report of the others."""
    peers = [listeners[0].server.endpoint, listeners[1].server.endpoint, _dead_peer(2)]

    rows = _view(peers, 0).local_rows(Failure("ranks 1-2 left", ranks=(1, 2)))

    assert [row.outcome for row in rows] == [Outcome.ANSWERED, Outcome.LEFT, Outcome.ENDED]
    assert [row.process for row in rows] == [RUNNING, RUNNING, DEAD]


class _Exchange:
    """The exchange of a rank, with what its policy saved and logged. ``composed``: a report on ranks outside of
    calls."""

    def __init__(self, peers: Sequence[Endpoint], rank: int) -> None:
        view = _view(peers, rank)
        self.saved: list[str] = []
        self.logged: list[str] = []
        policy: Any = SimpleNamespace(
            save=lambda report, introduction="": self.saved.append(introduction + report.text),
            notify_loss=lambda text, report: self.logged.append(f"{report.missing}: {text}"),
        )
        self.record = FailureRecord(view, policy)
        self.composed = compose(view.local_rows(None))
        self._background = BackgroundTasks(rank)
        self._exchange = ReportExchange(view, self.record, self._background, warn_after_seconds=60.0)

    def fetch(self) -> Report:
        found = self._exchange.fetch(5, Failure("connection lost"))
        self._background.close()
        return found


@pytest.fixture
def exchange(listeners: list[Answers]) -> _Exchange:
    """Of rank 2, with all listeners."""
    return _Exchange([listener.server.endpoint for listener in listeners], 2)


def test_a_report_of_another_rank_that_arrived_during_a_request_is_adopted(
    listeners: list[Answers], exchange: _Exchange
) -> None:
    arrived = replace(exchange.composed)
    listeners[0].on_answer = lambda: exchange.record.finalize(arrived)

    assert exchange.fetch() is arrived
    assert [one.count for one in listeners] == [1, 0, 0]


def test_the_report_of_a_rank_that_was_found_late_is_fetched(
    listeners: list[Answers], exchange: _Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a load of 25 the search for an answering rank took all of the time: "the missing rank is not known"."""
    first, answers = listeners[0], [{}, asdict(exchange.composed)]

    def answer() -> None:
        time.sleep(0.3)
        first.answer_in_place = answers.pop(0)

    first.on_answer, seconds = answer, [0.1, 60.0]
    monkeypatch.setattr("legacy_ddp._watchdog.exchange._report_seconds", lambda _size: seconds.pop(0))

    found = _Exchange([first.server.endpoint], 0).fetch()

    assert found.text == exchange.composed.text
    assert seconds == answers == []


def test_a_report_is_fetched_from_the_next_rank_after_the_one_that_composed_it_has_ended(
    listeners: list[Answers], exchange: _Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next rank was not asked behind the first time limit: "the missing rank is not known"."""
    first = listeners[0]
    first.answer_in_place = {}  # it composes
    first.on_answer = lambda: (time.sleep(0.3), first.server.close(""))
    for other in listeners[1:]:
        other.answer_in_place = asdict(exchange.composed)
    seconds = [0.1, 60.0, 60.0]
    monkeypatch.setattr("legacy_ddp._watchdog.exchange._report_seconds", lambda _size: seconds.pop(0))

    assert exchange.fetch().text == exchange.composed.text


def test_the_end_of_a_rank_that_left_a_call_names_the_rank_once(exchange: _Exchange) -> None:
    """The text of the failure, behind the name of the rank: "rank 1 rank 1 left all_reduce()"."""
    exchange.record.record_failure(Failure("rank 2 left all_reduce() call 4 with ValueError: bad batch", ranks=(2,)))

    assert exchange.record.exit_reason() == "left all_reduce() call 4 with ValueError: bad batch"


def test_a_later_failure_is_written_down_where_the_first_named_no_rank(exchange: _Exchange) -> None:
    for reason, ranks in (("connection lost", ()), ("rank 1 has ended", (1,)), ("rank 1 is silent", (1,))):
        exchange.record.record_failure(Failure(reason, ranks=ranks), logs=True)

    assert exchange.record.failure == Failure("connection lost")  # the first one ends the call
    assert len(exchange.saved) == len(exchange.logged) == 2  # the third adds nothing
    assert "missing rank 1" in exchange.saved[1]
