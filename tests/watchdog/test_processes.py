"""The processes of ranks as other ranks see them: hidden, in namespaces of their own, ended, on a crowded machine."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from legacy_ddp._watchdog.client import ANSWER_SECONDS, Message, Outcome, request, state_of
from legacy_ddp._watchdog.process import (
    DEAD,
    RUNNING,
    STOPPED,
    UNKNOWN,
    own_identity,
    queued_seconds,
    visible_state,
)
from legacy_ddp._watchdog.server import StatusServer
from tests.helpers.hosts import reason_not_permitted
from tests.helpers.scripts import run_script
from tests.helpers.status_servers import a_listener, an_observer

as_root = pytest.mark.skipif(os.geteuid() != 0 or reason_not_permitted() is not None, reason="makes namespaces")

_HIDDEN = (
    *("unshare", "--mount", "sh", "-c", 'mount -t proc -o hidepid=2 proc /proc && exec "$@"', "sh"),
    *("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"),
)
# In each case: the command before the listener, and before the observer; the state in /proc and the state by two signs
# while the listener runs, while it is stopped, and when it has ended.
_CASES = {
    "the same namespaces": ((), (), (RUNNING, RUNNING), (STOPPED, STOPPED), (DEAD, DEAD)),
    "another time namespace": (
        ("unshare", "--time", "--boottime", "1000", "--fork"),
        (),
        (DEAD, UNKNOWN),
        (DEAD, UNKNOWN),
        (DEAD, DEAD),
    ),
    "another user with hidepid": ((), _HIDDEN, (DEAD, UNKNOWN), (DEAD, UNKNOWN), (DEAD, DEAD)),
    "a container": (
        ("unshare", "--pid", "--fork", "--mount-proc"),
        (),
        (UNKNOWN, UNKNOWN),
        (UNKNOWN, UNKNOWN),
        (UNKNOWN, UNKNOWN),
    ),
    "the /proc of another pid namespace": (
        (),
        ("unshare", "--pid", "--fork"),
        (UNKNOWN, UNKNOWN),
        (UNKNOWN, UNKNOWN),
        (UNKNOWN, UNKNOWN),
    ),
}


def _await_state(pid: int, letters: Collection[str]) -> None:
    """Wait until the kernel shows one of these states of the process; on a crowded machine it takes a while."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in letters:
        time.sleep(0.01)


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=as_root if any(_CASES[name][:2]) else ()) for name in _CASES]
)
def test_stopped_gone_hidden_and_answering_processes_are_told_apart(case: str) -> None:
    """A rank that /proc did not show was called dead while it ran."""
    before_listener, before_observer, running, stopped, ended = _CASES[case]
    with a_listener(*before_listener) as listener, an_observer(*before_observer) as observer:
        assert observer.look(listener) == (*running, Outcome.ANSWERED)
        os.kill(listener.pid, signal.SIGSTOP)
        _await_state(listener.pid, "T")
        assert observer.look(listener) == (*stopped, Outcome.SILENT)
        os.kill(listener.pid, signal.SIGCONT)
        assert observer.look(listener) == (*running, Outcome.ANSWERED)
        os.kill(listener.pid, signal.SIGKILL)
        if listener.pid == listener.process.pid:
            _await_state(listener.pid, "Z")
            while len(os.listdir(f"/proc/{listener.pid}/task")) > 1:  # sockets are closed by the last thread
                time.sleep(0.01)
            assert observer.look(listener) == (*ended, Outcome.ENDED)  # before anybody reaped it
        listener.process.wait()
        assert observer.look(listener) == (*ended, Outcome.ENDED)


def test_a_pid_that_was_given_to_another_process_counts_as_dead() -> None:
    with a_listener() as listener:
        listener.process.kill()
        listener.process.wait()
    later = replace(listener.endpoint, identity=replace(own_identity(), started="1"))

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
import os, sys, time
from legacy_ddp._watchdog.process import busy_seconds, own_identity, queued_seconds
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if sys.argv[1] == "hog":
    while True:
        pass
os.nice(19)  # about a hundredth of the processor beside the hog
own = own_identity()
start, busy, queued = time.monotonic(), busy_seconds(), queued_seconds(own)
while time.monotonic() < start + 1.0:
    time.sleep(1.0) if sys.argv[1] == "idle" else None  # one wake-up: on a loaded machine each waits for a processor
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
