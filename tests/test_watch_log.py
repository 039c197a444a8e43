"""What does the log say, and when, while ranks wait?"""

import logging
import time
from pathlib import Path

from legacy_ddp import Checks, LostPeerError
from tests.ranks import run_ranks
from tests.small import step, wrap

WARN_SECONDS = 0.5


def _listen() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("legacy_ddp").addHandler(handler)
    return said


def _loops(rank: int, folder: str) -> list[str]:
    said = _listen()
    model = wrap(timeout_seconds=5.0, checks=Checks(report_dir=folder, warn_after_seconds=WARN_SECONDS))
    for _ in range(3):
        step(model, 1.0)
    while rank == 1:
        pass
    try:
        step(model, 1.0)
    except LostPeerError:
        return said
    return ["no error"]


def test_a_rank_that_computes_is_believed_once_then_reported_once_then_mentioned(tmp_path: Path) -> None:
    first, second, *later = run_ranks(_loops, 2, str(tmp_path), lost=(1,), survivors_exit=False)[0]

    assert first.endswith(", alive and busy")
    assert "\n" not in first
    assert "stack of rank 1" in second
    assert "reports of this rank: " in second
    assert later
    assert all(line.endswith(", as reported") for line in later)


def _arrives_late(rank: int, folder: str) -> list[str]:
    said = _listen()
    model = wrap(timeout_seconds=30.0, checks=Checks(report_dir=folder, warn_after_seconds=WARN_SECONDS))
    for _ in range(3):
        step(model, 1.0)
    if rank == 1:
        time.sleep(3 * WARN_SECONDS)
    step(model, 1.0)
    return said


def test_when_a_rank_that_was_reported_arrives_a_line_says_so(tmp_path: Path) -> None:
    said, nothing = run_ranks(_arrives_late, 2, str(tmp_path))

    assert "stack of rank 1" in said[0]
    assert said[-1] == "all_reduce() call 4: all ranks are there now, and it is done"
    assert nothing == []
