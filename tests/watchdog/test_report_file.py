"""The report file (path and mode, a full disk, a SIGTERM that the user handles), and the warnings in log and file."""

import json
import logging
import os
import re
import resource
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from legacy_ddp import LostPeerError
from legacy_ddp._watchdog import reports
from legacy_ddp._watchdog.reports import Report, ReportFile, WarningPolicy
from tests.helpers.listening import Training, hearing
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import fork_script
from tests.helpers.tiers import thorough

STACKS = "most recent call first"  # as faulthandler writes them


@contextmanager
def _file(folder: Path, **arguments: Any) -> Iterator[ReportFile]:
    file = ReportFile(folder, **{"rank": 1, "size": 3, **arguments})
    yield file
    file.close()


def test_a_report_file_is_private_named_after_its_process_and_removed_without_a_report(tmp_path: Path) -> None:
    with _file(tmp_path / "made" / "for it") as file:
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
        assert file.path.name.endswith(f"-rank1-pid{os.getpid()}.txt")
        assert "rank 1 of 3" in file.path.read_text()
    assert not file.path.exists()

    with _file(tmp_path) as file:
        file.append("first")
        file.append("at a\udcff.py")
    time = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d\]"
    assert re.fullmatch(
        rf"{time}\nrank 1 of 3, .*\n\(.*\)\n\n{time}\nfirst\n\n{time}\nat a\\udcff\.py\n\n", file.path.read_text()
    )


def test_an_existing_file_is_never_written_to(tmp_path: Path) -> None:
    with _file(tmp_path) as file:
        name = file.path.name
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / name).symlink_to(victim)

    with _file(tmp_path) as file:
        file.append("report")

    assert victim.read_text() == "precious"
    assert file.path.name != name
    assert "report" in file.path.read_text()


def test_a_report_after_the_end_is_neither_written_nor_called_a_problem(tmp_path: Path) -> None:
    """The other ranks send the report of a lost rank to all ranks; the lost rank may be at its end, not yet ended."""
    with _file(tmp_path) as file:
        pass

    assert file.append("rank 1 is lost")
    assert "not written" not in file.where("reports of this rank:")
    assert list(tmp_path.iterdir()) == []


@contextmanager
def _full_disk(size_bytes: int = 0) -> Iterator[None]:
    """No file of this process may grow over ``size_bytes``: it is written as far as that, then an error comes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))  # Python ignores the signal that comes with it
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_ctrl_c_showed_a_report_that_came_while_the_end_of_the_process_closed_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _file(tmp_path) as file:
        monkeypatch.setattr(reports, "printable_lines", lambda text: file.close() or text)  # before it is written
        is_filed = file.append("report")

    assert (is_filed, file.where("in")) == (True, f"in {file.path}")


def test_a_full_disk_is_told_in_place_of_the_path_and_no_empty_file_is_left(tmp_path: Path) -> None:
    with _full_disk():
        file = ReportFile(tmp_path, 0, 2)
        assert not file.append("report")

    assert file.path.stat().st_size == 0
    assert file.where("also in") == f"not written in full to {file.path}: File too large"
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_is_cut_short_by_a_full_disk_is_not_pointed_to_and_the_next_is(tmp_path: Path) -> None:
    file = ReportFile(tmp_path, 0, 2)
    with _full_disk(file.path.stat().st_size + 100):
        assert not file.append(1000 * "x")
    assert "not written in full" in file.where("also in")

    assert file.append("later")
    assert file.where("also in") == f"also in {file.path}"
    file.close()
    assert "later" in file.path.read_text()


def test_where_no_file_can_be_made_nothing_points_to_the_null_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file" / "inside"))

    file = ReportFile(None, 0, 2)

    assert not file.append("report")
    assert file.where("also in") == f"not on disk: [Errno 20] Not a directory: {str(tmp_path / 'file' / 'inside')!r}"
    file.close()


def _loses_a_rank_on_a_full_disk(rank: int, folder: Path) -> list[str]:
    with hearing() as heard:
        training = Training(folder)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with _full_disk(), pytest.raises(LostPeerError) as caught:
            training.step()
    return ["\n".join(heard), str(caught.value)]


def test_a_loss_on_a_full_disk_is_told_in_full_by_log_and_error_and_neither_points_to_a_file(tmp_path: Path) -> None:
    for text in run_ranks(_loses_a_rank_on_a_full_disk, 2, tmp_path, lost=(1,))[0]:
        assert "    0  all_reduce() call 3: agree" in text  # in the table
        assert "not written in full to " in text
        assert "also in" not in text
        assert "reports of this rank" not in text


# SIGTERM

_SCRIPT = """
import faulthandler, os, signal, sys
from legacy_ddp._watchdog.reports import Report, ReportFile, WarningPolicy

folder, story = sys.argv[1:]
if "handler" in story:
    signal.signal(signal.SIGTERM, lambda *_: print("handled"))
if "faulthandler" in story:
    faulthandler.register(signal.SIGTERM, file=open(folder + "/own", "w"), chain="chained" in story)
file = ReportFile(folder, 0, 1)
os.kill(os.getpid(), signal.SIGTERM)
print("alive")
file.append("the end")
"""


@pytest.mark.parametrize(
    "story, output, in_own",
    [
        thorough("faulthandler", "alive", True),
        thorough("handler, then faulthandler", "alive", True),
        ("handler, then chained faulthandler", "handled alive", True),
        ("handler", "handled alive", False),
    ],
)
def test_a_faulthandler_that_the_user_registered_keeps_its_file_and_its_end(
    story: str, output: str, *, in_own: bool, tmp_path: Path
) -> None:
    """It was replaced: the stacks went to the report file, and the process ended."""
    ran = fork_script("-c", _SCRIPT, str(tmp_path), story)

    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split() == output.split()
    (report,) = tmp_path.glob("legacy_ddp-*.txt")
    text = report.read_text()
    assert (STACKS in text) is not in_own
    assert ("SIGTERM leaves no stacks here" in text) is in_own
    if in_own:
        assert STACKS in (tmp_path / "own").read_text()


# Warnings about a long wait: which line comes in the log when, and the reports in the file

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
PATH = Path("/reports/of-rank-0")
FULL = f"{BAD.text}\n(reports of this rank: {PATH})\n{COMMAND}"


class _Logged:
    """A policy, the texts in its file, and the log records since the last look."""

    def __init__(self, log: pytest.LogCaptureFixture) -> None:
        self._log = log
        self.texts: list[str] = []
        file: Any = SimpleNamespace(
            append=lambda text: self.texts.append(text) or True, where=lambda prefix: f"{prefix} {PATH}", path=PATH
        )
        self.policy = WarningPolicy(0, file, warn_after_seconds=4.0)
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
    # later waits in the same place, also if the end of the one before was not told, and one in another place
    assert warn(4.0, 200.0, is_busy=True) == [BAD.head]
    assert [warn(4.5, begin) for begin in (300.0, 400.0)] == [[f"{BAD.head}, as reported"]] * 2
    assert warn(4.5, 500.0, summary="at another line") == [FULL]


def test_a_report_is_logged_in_full_and_filed_once_a_call_and_the_success_is_logged(rank_0: _Logged) -> None:
    assert rank_0.warn(BAD) == [FULL]
    assert rank_0.warn(BAD) == [f"{BAD.head}, as reported"]
    assert rank_0.texts == [BAD.filed]
    assert rank_0.warn(replace(BAD, summary="missing ranks 1-2")) == [FULL]
    rank_0.policy.end("a call")
    assert rank_0.logged() == ["a call: all ranks have arrived, and the call has succeeded"]

    rank_0.policy.begin(is_early=False)
    assert rank_0.warn(BAD) == [FULL]
    assert rank_0.texts == [BAD.filed] * 3


def test_a_computing_rank_is_one_line_once_at_each_place_and_again_in_the_next_call(rank_0: _Logged) -> None:
    busy = replace(BAD, is_busy=True)
    one_line = [f"{BAD.head}, alive and busy"]
    assert rank_0.warn(busy) == one_line
    assert rank_0.warn(replace(busy, summary="elsewhere")) == one_line
    assert rank_0.texts == []
    assert rank_0.warn(replace(busy, summary="elsewhere")) == [FULL]

    rank_0.policy.begin(is_early=False)
    assert rank_0.warn(replace(busy, summary="elsewhere")) == one_line


def test_a_progressing_rank_is_one_line_each_time_and_the_success_is_not_logged(rank_0: _Logged) -> None:
    moving = replace(BAD, is_progressing=True)
    for _ in range(3):
        assert rank_0.warn(moving) == [f"{BAD.head}, alive"]
    rank_0.policy.end("a call")
    assert rank_0.logged() == []
    assert rank_0.texts == []


def test_a_rank_that_is_no_reporter_writes_the_file_without_logging(rank_0: _Logged) -> None:
    report = replace(BAD, reporters=(2,))
    assert rank_0.warn(report) == []
    assert rank_0.texts == [report.filed]


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
