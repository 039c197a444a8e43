"""What does the log hear of a rank's long wait, and what goes to the file?"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from legacy_ddp._watchdog.log_policy import Voice
from legacy_ddp._watchdog.report import Report

BAD = Report(
    head="a call: ranks have waited; missing rank 1",
    text="the head\nand the table",
    summary="missing rank 1",
    awaited=(1,),
    is_harmless=False,
    is_busy=False,
    speakers=(0,),
)
FULL = f"{BAD.text}\n(reports of this rank: {Path('/reports/of-rank-0')})"


@dataclass
class _File:
    """What of a ReportFile is used."""

    texts: list[str] = field(default_factory=list)
    path: Path = Path("/reports/of-rank-0")

    def append(self, text: str) -> bool:
        self.texts.append(text)
        return True

    def where(self, words: str) -> str:
        return f"{words} {self.path}"


class _Heard:
    """A voice, its file, and what its log said since it was asked last."""

    def __init__(self, log: pytest.LogCaptureFixture) -> None:
        self._log = log
        self.file: Any = _File()
        self.voice = Voice(0, self.file, warn_after_seconds=4.0)
        self.voice.begin(warns=True)

    def say(self, report: Report) -> list[str]:
        self.voice.say(report)
        return self.heard()

    def heard(self) -> list[str]:
        said = [record.getMessage() for record in self._log.records]
        self._log.clear()
        return said


@pytest.fixture
def rank_0(caplog: pytest.LogCaptureFixture) -> Iterator[_Heard]:
    with caplog.at_level(logging.WARNING, "legacy_ddp"):
        yield _Heard(caplog)


def test_it_is_due_after_the_limit_then_at_twice_the_time_and_not_while_a_look_is_under_way(rank_0: _Heard) -> None:
    voice = rank_0.voice
    assert [voice.is_due(seconds) for seconds in (3.9, 4.0, 9.0)] == [False, True, False]
    voice.look_away()
    assert [voice.is_due(seconds) for seconds in (7.9, 8.0)] == [False, True]
    voice.look_away()

    voice.begin(warns=True)
    assert voice.is_due(4.0)
    voice.look_away()
    voice.begin(warns=False)
    assert not voice.is_due(1e9)


def test_a_report_is_told_in_full_and_filed_once_a_call_and_its_end_is_told(rank_0: _Heard) -> None:
    assert rank_0.say(BAD) == [FULL]
    assert rank_0.say(BAD) == [f"{BAD.head}, as reported"]
    assert rank_0.file.texts == [BAD.text]
    assert rank_0.say(replace(BAD, summary="missing ranks 1-2")) == [FULL]
    rank_0.voice.end("a call")
    assert rank_0.heard() == ["a call: all ranks are there now, and it is done"]

    rank_0.voice.begin(warns=True)
    assert rank_0.say(BAD) == [FULL]
    assert rank_0.file.texts == [BAD.text] * 3


def test_who_computes_is_believed_once_at_each_place_and_again_in_the_next_call(rank_0: _Heard) -> None:
    busy = replace(BAD, is_busy=True)
    believed = [f"{BAD.head}, alive and busy"]
    assert rank_0.say(busy) == believed
    assert rank_0.say(replace(busy, summary="elsewhere")) == believed
    assert rank_0.file.texts == []
    assert rank_0.say(replace(busy, summary="elsewhere")) == [FULL]

    rank_0.voice.begin(warns=True)
    assert rank_0.say(replace(busy, summary="elsewhere")) == believed


def test_who_gets_on_is_a_line_however_often_and_its_end_is_not_told(rank_0: _Heard) -> None:
    moving = replace(BAD, is_harmless=True)
    for _ in range(3):
        assert rank_0.say(moving) == [f"{BAD.head}, alive"]
    rank_0.voice.end("a call")
    assert rank_0.heard() == []
    assert rank_0.file.texts == []


def test_a_rank_that_does_not_speak_for_its_machine_writes_its_file_all_the_same(rank_0: _Heard) -> None:
    assert rank_0.say(replace(BAD, speakers=(2,))) == []
    assert rank_0.file.texts == [BAD.text]
