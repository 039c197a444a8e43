"""``legacy-ddp watch`` in this process, and jobs that it can be shown: rows as ranks would answer them."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from legacy_ddp._explain.job import describe_job
from legacy_ddp._watchdog.client import Outcome, encode_message
from legacy_ddp._watchdog.local import FORMAT
from legacy_ddp._watchdog.process import Sample
from legacy_ddp._watchdog.server import StatusServer
from legacy_ddp._watchdog.status import Row
from tests.helpers.command import command
from tests.helpers.processes import slowness

_PAUSE_SECONDS = 0.05


def watch_command(*arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command, in this process."""
    done = command("watch", *arguments)
    return done.returncode, done.stdout, done.stderr


def wait_for(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30 * slowness()
    while not (found := look()):
        assert time.monotonic() < deadline, "what the test waits for did not come"
        time.sleep(_PAUSE_SECONDS)
    return found


@contextmanager
def a_job(*answers: dict[str, Any]) -> Iterator[list[Any]]:
    """This process as a rank. Yields the requests. ``answers``: to the requests for the job; the last one stays."""
    requests, left = [], list(answers)

    def answer(connection: socket.socket, message: Any) -> None:
        requests.append(message)
        if message.get("request") == "process":
            said = {"size": 2, "first": [0, "host", 1, "", "", ""], "pids": [os.getpid()]}
        else:
            said = left.pop(0) if len(left) > 1 else left[0]
        with connection, suppress(OSError):
            connection.sendall(encode_message({"format": FORMAT, **said}))

    server = StatusServer(0, lambda _: {}, lambda *_: None, on_local=answer)
    server.start(None)
    try:
        yield requests
    finally:
        server.close("")


def described(*rows: Row, warn_after_seconds: float = 60.0, with_stacks: bool = False) -> dict[str, Any]:
    return describe_job(rows, range(len(rows)), len(rows), warn_after_seconds, with_stacks=with_stacks)


def a_sample(phase: str = "agree", seconds: float = 2.0, **changes: Any) -> Sample:
    return Sample(**{"call": "", "phase": phase, "age_seconds": seconds, "changes": 1, "stack": ("a", "b"), **changes})


def a_row(rank: int, **changes: Any) -> Row:
    """A rank that waits in a call."""
    usual = {"sample": a_sample(), "serial": 5, "in_call": True, "last_call": "all_reduce() call 5", "is_busy": False}
    return Row(rank, **{"host": "vm", "pid": 100 + rank, "outcome": Outcome.ANSWERED, **usual, **changes})


def moving(rank: int) -> Row:
    return a_row(rank, has_moved=True, is_advancing=True, step_seconds=0.25)


def waiting_ranks(job: dict[str, Any]) -> list[int]:
    return [rank for row in job["rows"] if row["state"] == "waits" for rank in row["ranks"]]
