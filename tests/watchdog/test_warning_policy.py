"""Warnings about a long wait: which line comes in the log when, and the reports in the file."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from legacy_ddp._watchdog.reports import Report, WarningPolicy

BAD = Report(
    head="a call: ranks have waited; missing rank 1",
    text="the head\nand the table",
    summary="missing rank 1",
    missing=(1,),
    is_progressing=False,
    is_busy=False,
    reporters=(0,),
)
COMMAND = "meaning and next step: legacy-ddp explain Ranks have waited"
FULL = f"{BAD.text}\n(reports of this rank: {Path('/reports/of-rank-0')})\n{COMMAND}"


@dataclass
class _File:
    """The part of a ReportFile that the policy uses."""

    texts: list[str] = field(default_factory=list)
    path: Path = Path("/reports/of-rank-0")

    def append(self, text: str) -> bool:
        self.texts.append(text)
        return True

    def where(self, prefix: str) -> str:
        return f"{prefix} {self.path}"


class _Logged:
    """A policy, its file, and the log records since the last look."""

    def __init__(self, log: pytest.LogCaptureFixture) -> None:
        self._log = log
        self.file: Any = _File()
        self.policy = WarningPolicy(0, self.file, warn_after_seconds=4.0)
        self.policy.begin(is_early=False)

    def warn(self, report: Report) -> list[str]:
        self.policy.warn(report)
        return self.logged()

    def logged(self) -> list[str]:
        said = [record.getMessage() for record in self._log.records]
        self._log.clear()
        return said


@pytest.fixture
def rank_0(caplog: pytest.LogCaptureFixture) -> Iterator[_Logged]:
    with caplog.at_level(logging.WARNING, "legacy_ddp"):
        yield _Logged(caplog)


def test_a_check_is_due_after_the_limit_then_at_twice_the_time_and_not_during_a_check(rank_0: _Logged) -> None:
    policy = rank_0.policy
    assert [policy.is_due(seconds) for seconds in (3.9, 4.0, 9.0)] == [False, True, False]
    policy.end_check()
    assert [policy.is_due(seconds) for seconds in (7.9, 8.0)] == [False, True]
    policy.end_check()

    policy.begin(is_early=False)
    assert policy.is_due(4.0)
    policy.end_check()


def test_the_first_calls_begin_with_a_line_and_go_on_with_the_report(rank_0: _Logged) -> None:
    rank_0.policy.begin(is_early=True)

    assert rank_0.warn(BAD) == [f"{BAD.head}, in one of the first calls"]
    assert rank_0.warn(BAD) == [FULL]


def test_a_wait_outside_of_calls_is_told_at_twice_the_time_and_its_end_once(
    rank_0: _Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]  # of the begin of the wait
    monkeypatch.setattr("legacy_ddp._watchdog.reports.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def warn(seconds: float, begin: float = 0.0, **changes: Any) -> list[str]:
        clock[0] = begin + seconds
        rank_0.policy.warn_of_stall(replace(BAD, seconds=seconds, **changes))
        return rank_0.logged()

    assert [warn(seconds) for seconds in (4.0, 5.0, 5.9, 8.0, 9.0)] == [
        [FULL],
        [],  # of another rank that waits, too
        [],
        [f"{BAD.head}, as reported"],
        [],
    ]
    rank_0.policy.end_stall()
    assert rank_0.logged() == ["the wait outside of calls has ended"]
    rank_0.policy.end_stall()
    assert rank_0.logged() == []
    assert [warn(seconds, 100.0, is_busy=True) for seconds in (4.0, 8.0, 16.0)] == [[BAD.head], [], []]
    # later waits in the same place, also if the end of the one before was not told
    assert warn(4.0, 200.0, is_busy=True) == [BAD.head]
    assert [warn(4.5, begin) for begin in (300.0, 400.0)] == [[FULL], [FULL]]


def test_a_report_is_logged_in_full_and_filed_once_a_call_and_the_success_is_logged(rank_0: _Logged) -> None:
    assert rank_0.warn(BAD) == [FULL]
    assert rank_0.warn(BAD) == [f"{BAD.head}, as reported"]
    assert rank_0.file.texts == [BAD.filed]
    assert rank_0.warn(replace(BAD, summary="missing ranks 1-2")) == [FULL]
    rank_0.policy.end("a call")
    assert rank_0.logged() == ["a call: all ranks have arrived, and the call has succeeded"]

    rank_0.policy.begin(is_early=False)
    assert rank_0.warn(BAD) == [FULL]
    assert rank_0.file.texts == [BAD.filed] * 3


def test_a_computing_rank_is_one_line_once_at_each_place_and_again_in_the_next_call(rank_0: _Logged) -> None:
    busy = replace(BAD, is_busy=True)
    one_line = [f"{BAD.head}, alive and busy"]
    assert rank_0.warn(busy) == one_line
    assert rank_0.warn(replace(busy, summary="elsewhere")) == one_line
    assert rank_0.file.texts == []
    assert rank_0.warn(replace(busy, summary="elsewhere")) == [FULL]

    rank_0.policy.begin(is_early=False)
    assert rank_0.warn(replace(busy, summary="elsewhere")) == one_line


def test_a_progressing_rank_is_one_line_each_time_and_the_success_is_not_logged(rank_0: _Logged) -> None:
    moving = replace(BAD, is_progressing=True)
    for _ in range(3):
        assert rank_0.warn(moving) == [f"{BAD.head}, alive"]
    rank_0.policy.end("a call")
    assert rank_0.logged() == []
    assert rank_0.file.texts == []


def test_a_rank_that_is_no_reporter_writes_the_file_without_logging(rank_0: _Logged) -> None:
    report = replace(BAD, reporters=(2,))
    assert rank_0.warn(report) == []
    assert rank_0.file.texts == [report.filed]


def test_a_record_of_the_log_has_its_facts_as_attributes(rank_0: _Logged, caplog: pytest.LogCaptureFixture) -> None:
    report = replace(BAD, call="all_reduce() call 5", phase="agree", seconds=5.25)
    rank_0.policy.warn(report)
    rank_0.policy.end(report.call)
    rank_0.policy.notify_loss("rank 1 ended", report)
    rank_0.policy.tell_completion(report.call)

    names = ("event", "rank", "call", "phase", "seconds", "ranks", "bytes")
    assert [[getattr(record, name) for name in names] for record in caplog.records] == [
        ["waiting", 0, report.call, "agree", 5.25, [1], None],
        ["arrived", 0, report.call, None, None, None, None],
        ["lost", 0, report.call, "agree", 5.25, [1], None],
        ["arrived", 0, report.call, "payload", None, None, None],
    ]
    (facts,) = [record.report for record in caplog.records if record.event == "waiting"]
    assert facts == json.loads(report.filed.splitlines()[-1]) | {"missing": (1,), "reporters": (0,), "states": ()}
