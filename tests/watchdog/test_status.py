"""Polls of real status servers: which ranks are polled a second time, and what the second answer changes."""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from legacy_ddp._watchdog.client import ANSWER_SECONDS, RUNNING, Endpoint, Failure, Outcome, own_identity
from legacy_ddp._watchdog.server import StatusServer
from legacy_ddp._watchdog.status import GroupView, RankStatus, own_status, poll_ranks
from legacy_ddp._watchdog.watchdog import FailureRecord

WORDS = "left because another rank was lost"


class _Answers:
    """A listener whose n-th answer is its state with ``changes[n]``, ``delays[n]`` seconds late."""

    def __init__(self, rank: int) -> None:
        self.count = 0
        self.changes: dict[int, dict[str, Any]] = {}
        self.delays: dict[int, float] = {}
        self.server = StatusServer(rank, self._answer, lambda _rank, _exit_reason: None)
        self.server.start(None)

    def _answer(self, _message: Any) -> dict[str, Any]:
        self.count += 1
        time.sleep(self.delays.get(self.count, 0.0))
        return {**own_status(RankStatus(), []), **self.changes.get(self.count, {})}


@pytest.fixture
def listeners() -> Iterator[list[_Answers]]:
    made = [_Answers(rank) for rank in range(3)]
    yield made
    for one in made:
        one.server.close("")


def _dead_peer(rank: int) -> Endpoint:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    identity = own_identity()
    return Endpoint(rank, replace(identity, pid=process.pid), [], "")


def test_an_exit_reason_that_came_after_the_first_answer_is_in_the_report(listeners: list[_Answers]) -> None:
    first = listeners[0]
    first.changes = {1: {"exit_reasons": {}}, 2: {"exit_reasons": {"1": WORDS}}}
    peers = [first.server.endpoint, _dead_peer(1), listeners[2].server.endpoint, _dead_peer(3)]

    rows = poll_ranks(peers, first.server.endpoint, twice=False)

    assert [row.outcome for row in rows] == [Outcome.ANSWERED, Outcome.ENDED, Outcome.ANSWERED, Outcome.ENDED]
    assert [row.note for row in rows] == ["", WORDS, "", ""]
    assert [row.left_after_loss for row in rows] == [False, True, False, False]


def test_a_silent_rank_whose_process_runs_is_asked_twice(listeners: list[_Answers]) -> None:
    asker, other, slow = listeners
    slow.delays = {1: ANSWER_SECONDS + 0.2}
    asker.changes = {1: {"process_states": {"2": RUNNING}}}
    peers = [asker.server.endpoint, other.server.endpoint, slow.server.endpoint]

    rows = poll_ranks(peers, asker.server.endpoint, twice=False)

    assert [row.outcome for row in rows] == [Outcome.ANSWERED] * 3
    assert [one.count for one in listeners] == [1, 1, 2]


def test_no_rank_is_asked_twice_if_all_ranks_answer(listeners: list[_Answers]) -> None:
    rows = poll_ranks([one.server.endpoint for one in listeners], listeners[0].server.endpoint, twice=False)

    assert [row.outcome for row in rows] == [Outcome.ANSWERED] * 3
    assert [one.count for one in listeners] == [1, 1, 1]


class _Saved:
    """A policy that keeps what is saved and what is logged."""

    def __init__(self) -> None:
        self.saved: list[str] = []
        self.logged: list[str] = []
        self.save, self.notify_loss = self.saved.append, self.logged.append


def test_a_later_failure_is_written_down_where_the_first_named_no_rank(listeners: list[_Answers]) -> None:
    policy: Any = _Saved()
    peers = [listener.server.endpoint for listener in listeners]
    record = FailureRecord(GroupView(peers[0], peers), policy)

    for reason, ranks in (("connection lost", ()), ("rank 1 has ended", (1,)), ("rank 1 is silent", (1,))):
        record.record_failure(Failure(reason, ranks=ranks), logs=True)

    assert record.failure == Failure("connection lost")  # the first one ends the call
    assert len(policy.saved) == len(policy.logged) == 2  # the third adds nothing
    assert "missing rank 1" in policy.saved[1]
