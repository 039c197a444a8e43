"""The log of ranks that wait: which line comes when."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from legacy_ddp import Checks, LostPeerError
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import step, wrap

WARN_SECONDS = 0.5


def _listen(count: int = 0, act: Callable[[], object] = lambda: None) -> list[str]:
    """The lines of the log from now on. After the line number ``count`` the listener acts."""
    said: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        if len(said) == count:
            act()

    handler = logging.Handler(logging.WARNING)
    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("legacy_ddp").addHandler(handler)
    return said


class _HeardEnoughError(Exception):
    pass


def _loops(rank: int, folder: str) -> list[str]:
    """The lines until the third: on a busy machine they may come seconds late."""

    def raise_it(*_: object) -> None:
        raise _HeardEnoughError

    signal.signal(signal.SIGUSR1, raise_it)
    model = wrap(timeout_seconds=60.0, checks=Checks(report_dir=folder, warn_after_seconds=WARN_SECONDS))
    for _ in range(3):
        step(model, 1.0)
    while rank == 1:
        pass
    said = _listen(3, partial(os.kill, os.getpid(), signal.SIGUSR1))
    with pytest.raises(_HeardEnoughError):
        step(model, 1.0)
    return said


def test_a_rank_that_computes_is_one_line_once_then_a_report_once_then_a_mention(tmp_path: Path) -> None:
    first, second, *later = run_ranks(_loops, 2, str(tmp_path), lost=(1,), survivors_exit=False)[0]

    assert first.endswith(", alive and busy")
    assert "\n" not in first
    assert "stack of rank 1" in second
    assert "reports of this rank: " in second
    assert later
    assert all(line.endswith(", as reported") for line in later)


def _is_notified_of_a_loss(rank: int, folder: str, where: str) -> list[str]:
    heard = threading.Event()
    said = _listen(1, heard.set)
    model = wrap(timeout_seconds=30.0, checks=Checks(report_dir=folder))
    step(model, 1.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if where == "user code":
        assert heard.wait(10.0)
        return said
    try:
        step(model, 1.0)
    except LostPeerError:
        return said
    return ["no error"]


@pytest.mark.parametrize(
    "where, place",
    [
        ("user code", "rank 0 is in user code after all_reduce() call 1, at watchdog/test_log.py:"),
        ("call", "rank 0 is in all_reduce() call 2, phase agree, at helpers/small_models.py:"),
    ],
)
def test_a_loss_is_logged_at_once_with_the_position_of_this_rank(where: str, place: str, tmp_path: Path) -> None:
    """A launcher may end this process before anything is raised."""
    lines = run_ranks(_is_notified_of_a_loss, 2, str(tmp_path), where, lost=(1,))[0]

    line = lines[-1]  # which names the rank
    assert len([line for line in lines if line.startswith("rank 1 ended unexpectedly")]) <= 1  # it lost two connections
    words, _, pointer = line.rpartition(" (reports of this rank: ")
    assert words.startswith("rank 1 ended unexpectedly; ") or "; missing rank 1 (" in words  # gloo was faster
    assert place in words
    assert words.endswith("in _is_notified_of_a_loss" if where == "user code" else "in step")
    assert "\n" not in line
    assert pointer.startswith(str(tmp_path))
